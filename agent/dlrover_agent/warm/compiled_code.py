"""The folder in which this node's workers keep what ``torch.compile`` has compiled.

What inductor keys itself, and what it does not (torch 2.13 and 2.15):

============================ ===================================================================
part of the folder           its key
============================ ===================================================================
``fxgraph/``, ``aotautograd/`` the graph, the inputs' metadata, inductor's and AOTAutograd's
(``FxGraphHashDetails``)     settings, the content of torch's Python files, Triton and the GPU's
                             model. Not the CPU, nor Python
``*.so`` of C++ code         source and command line. The command has ``-march=native`` on x86,
(``CppCodeCache``)           which is the same text on each CPU. Not the compiler's version, nor
                             the libraries that the code needs
``triton/``                  source, Triton, the compute capability
============================ ===================================================================

So a folder that two kinds of machines share could give one of them instructions that it does not
have, or code for a newer libstdc++ than its own. The folder's key has what decides about that:
Python, torch's build, libc, libstdc++, and what the CPU can do. The compiler's version is not in
it: the libraries decide whether the code of another compiler can be loaded.
"""

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dlrover_agent.settings import Command
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.process.compile_cache import CompileCache
from dlrover_py.process.ownership import NotOwnedError
from dlrover_py.protocol.names import ENV_CACHE_DIR

log = logging.getLogger("agent")

FILES_S: Final = 2.0
"""Seconds for the folder. Its disk may hang."""
VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch with the folder. Triton's folder is below it by torch's default."""
_CPU = re.compile(r"(vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \w+)\s*:")
"""Lines of ``/proc/cpuinfo`` that say what a processor can do, on x86 and on ARM."""


async def environment(command: Command) -> dict[str, str]:
    """Return the variable that names the folder; nothing if the workers get none.

    They get one only if ``DLROVER_CACHE_DIR`` names the folder of the caches: on one machine,
    restarts are as fast with torch's own. They get none if the user has set the variable, or if the
    command is not a script for the agent's own interpreter with torch. Nor if the folder cannot be
    used: a warning says why. A disk that hangs costs ``FILES_S``.
    """
    named = command.environ.get(ENV_CACHE_DIR)
    cache = CompileCache.of(command.environ) if named else None
    own_python = command.argv[:1] == (sys.executable,) and command.argv[1:2] == ("-u",)
    if cache is None or VARIABLE in command.environ or not own_python:
        return {}
    thread = BackgroundThread("compiled")
    try:
        folder = await thread.run(lambda: _use(cache, command), FILES_S, lambda _: cache.close())
    except (OSError, NotOwnedError) as error:  # OverdueError, too
        then = "torch's own folder is used"
        log.warning("compiled_code_not_kept", extra={"why": str(error), "then": then})
        return {}
    if folder is None:
        return {}
    thread.post(lambda: _trim(cache))
    return {VARIABLE: str(folder)}


def _use(cache: CompileCache, command: Command) -> Path | None:
    """Return the folder of a command; None without torch.

    Raises:
        NotOwnedError: Another user can change or replace the folder.
        OSError: It cannot be used.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    build = Path(spec.origin).with_name("version.py").read_text()
    return cache.use(folder_key(command, build, Path("/proc/cpuinfo").read_text()), command.name)


def folder_key(command: Command, torch_build: str, cpuinfo: str) -> str:
    """Return the key of a script's folder.

    Runs of the same script share it, whatever their arguments are.

    Args:
        command: Command of the workers.
        torch_build: Text of torch's ``version.py``.
        cpuinfo: Text of ``/proc/cpuinfo``.
    """
    first = cpuinfo.split("\n\n", 1)[0].splitlines()
    script = os.path.normpath(os.path.join(os.getcwd(), command.name))
    parts = [script, sys.version, torch_build, os.confstr("CS_GNU_LIBC_VERSION") or ""]
    parts += [_libstdcxx(command.environ), *filter(_CPU.match, first)]
    return hashlib.sha256(ascii(parts).encode()).hexdigest()[:32]


def _libstdcxx(environ: Mapping[str, str]) -> str:
    """Return name and size of the libstdc++ that workers load; empty if it is not known.

    The name has its version. The dynamic linker has more rules; these folders are the usual ones.
    """
    folders = [*environ.get("LD_LIBRARY_PATH", "").split(":"), f"{sys.base_prefix}/lib"]
    folders += [f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib"]
    for folder in filter(None, folders):
        file = os.path.realpath(f"{folder}/libstdc++.so.6")
        with contextlib.suppress(OSError):
            return f"{os.path.basename(file)} {os.stat(file).st_size}"
    return ""


def _trim(cache: CompileCache) -> None:
    """Remove folders beyond the limits; log an error."""
    try:
        cache.trim(time.time())  # noqa: TID251 - as files have their age
    except (OSError, NotOwnedError) as error:
        log.info("compiled_code_not_removed", extra={"why": str(error)})
