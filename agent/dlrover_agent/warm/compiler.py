"""The digests that ``torch.compile`` needs in each process, computed once for all workers.

inductor, the compiler behind ``torch.compile``, looks compiled code up by a key. The key has one
digest of all Python files of torch (2,476 files with 53 MB in torch 2.15), and one of Triton with
its library (500 MB in Triton 3.9), also for code of the CPU. Each process computes both when it
compiles first. They depend on installed files only. So a zygote computes them before it forks.
"""

import os
import sys
from collections.abc import Callable, Iterator

COMPILER = "torch._inductor.compile_fx"
"""Module that a process imports when it compiles for the first time."""
_DIGESTS = (
    ("torch._inductor.codecache", "torch_key"),
    ("torch._inductor.codecache", "triton_key"),
    ("torch._inductor.runtime.triton_compat", "triton_key"),
)
"""Modules, and functions that compute a digest in them and keep it. Releases of torch differ."""
_PACKAGES = ("torch", "triton")
"""Packages whose files the digests are of."""
_SUFFIXES = (".py", ".so", ".cpp", ".h", ".ld")
_NOT_READ = frozenset({"include", "lib", "share", "test", "__pycache__"})
"""Folders of torch with thousands of files that no digest is of."""


def compute_digests(before_read: Callable[[str], None]) -> None:
    """Compute the digests, if this process has the compiler; a digest that fails is left out.

    A worker computes a missing digest itself. Nothing but the result is kept: no thread, file or
    device.

    Args:
        before_read: Called first for each file that a digest may be of. A digest must not be used
            once such a file has changed.
    """
    if COMPILER not in sys.modules:
        return
    for path in _files():
        before_read(path)
    for module, function in _DIGESTS:
        compute = getattr(sys.modules.get(module), function, None)
        if compute is not None:
            try:
                compute()
            except Exception:  # noqa: BLE001 - the worker's own call will fail, too
                continue


def _files() -> Iterator[str]:
    """Yield the paths of the files that the digests are of, and of some others."""
    for package in _PACKAGES:
        for root in getattr(sys.modules.get(package), "__path__", ()):
            for folder, folders, names in os.walk(root):
                folders[:] = [name for name in folders if name not in _NOT_READ]
                yield from (f"{folder}/{name}" for name in names if name.endswith(_SUFFIXES))
