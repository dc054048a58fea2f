"""What a zygote computes for ``torch.compile`` before it forks."""

import contextlib
import sys
from collections.abc import Iterator

import pytest

from dlrover_agent.warm import compiler

pytestmark = pytest.mark.whole_torch

_opened: list[list[str]] = []
"""Lists that take the paths of files that this process opens."""


def note_opened(event: str, args: tuple[object, ...]) -> None:
    if event == "open":
        for paths in _opened:
            paths.append(str(args[0]))


sys.addaudithook(note_opened)


@contextlib.contextmanager
def opened() -> Iterator[list[str]]:
    """Yield a list that grows with each file that is opened."""
    paths: list[str] = []
    _opened.append(paths)
    try:
        yield paths
    finally:
        _opened.remove(paths)


def test_a_forked_worker_need_not_read_torch_for_its_key() -> None:
    from torch._inductor import codecache, compile_fx

    key = codecache.torch_key
    # Releases of torch differ in how the function keeps its result.
    (getattr(key, "clear", None) or key.cache_clear)()
    files: list[str] = []
    with opened() as at_first:
        compiler.compute_digests(files.append)
    assert {codecache.__file__, compile_fx.__file__} <= set(at_first) & set(files)
    read = {path for path in at_first if path.endswith((".py", ".so"))}
    assert read <= set(files), "a change of what was read would not be noticed"
    with opened() as later:
        key()
        getattr(codecache, "triton_key", key)()  # some releases have none
    assert later == []


def test_without_the_compiler_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, compiler.COMPILER, raising=False)
    with opened() as paths:
        compiler.compute_digests(paths.append)
    assert paths == []
