"""The folder in which this node's workers keep what ``torch.compile`` has compiled.

What inductor keys itself, and what it does not (torch 2.13 and 2.15):

============================ ===================================================================
part of the folder           its key
============================ ===================================================================
``fxgraph/``, ``aotautograd/`` the graph, the inputs' metadata, inductor's and AOTAutograd's
(``FxGraphHashDetails``)     settings, the content of torch's Python files, Triton and the GPU's
                             model. Not the CPU, nor Python
``*.so`` of C++ code         source and command line. The command has ``-march=native`` on x86,
(``CppCodeCache``)           which is the same text on each CPU. Not the compiler's version
``triton/``                  source, Triton, the compute capability
============================ ===================================================================

So a folder that two kinds of machines share could give one of them instructions that it does not
have. The folder's key has what is missing: Python, torch's build, libc, and what the CPU can do.
"""

import hashlib
import importlib.util
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Final

from dlrover_agent.settings import Command
from dlrover_py.process.blocking import BackgroundThread, OverdueError
from dlrover_py.process.compile_cache import CompileCache
from dlrover_py.process.ownership import NotOwnedError

log = logging.getLogger("agent")

FILES_S: Final = 2.0
"""Seconds for the folder. Its disk may hang."""
VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch with the folder. Triton's folder is below it by torch's default."""
_CPU = re.compile(r"(vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \w+)\s*:")
"""Lines of ``/proc/cpuinfo`` that say what a processor can do, on x86 and on ARM."""


async def environment(command: Command) -> dict[str, str]:
    """Return the variable that names the folder; nothing if the workers get none.

    They get none if the user has set the variable, if ``DLROVER_CACHE_DIR`` is ``none``, or if the
    command is not a script for the agent's own interpreter with torch. Nor if the folder cannot be
    used: this is logged. A disk that hangs costs ``FILES_S``.
    """
    cache = CompileCache.of(command.environ)
    own_python = command.argv[:1] == (sys.executable,) and command.argv[1:2] == ("-u",)
    if cache is None or VARIABLE in command.environ or not own_python:
        return {}
    thread = BackgroundThread("compiled")
    try:
        folder = await thread.run(lambda: _use(cache, command), FILES_S, lambda _: cache.close())
    except (OSError, NotOwnedError) as error:  # OverdueError, too
        why = "its disk does not answer" if isinstance(error, OverdueError) else str(error)
        then = "torch's own folder is used"
        log.info("compiled_code_not_kept", extra={"why": why, "then": then})
        return {}
    if folder is None:
        return {}
    thread.post(lambda: _trim(cache))
    return {VARIABLE: str(folder.absolute())}


def _use(cache: CompileCache, command: Command) -> Path | None:
    """Return the folder of a command; None without torch.

    Raises:
        NotOwnedError: Another user can change the folder.
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
    parts = [os.path.join(os.getcwd(), command.name), sys.version, torch_build]
    parts += [os.confstr("CS_GNU_LIBC_VERSION") or "", *filter(_CPU.match, first)]
    return hashlib.sha256(ascii(parts).encode()).hexdigest()[:32]


def _trim(cache: CompileCache) -> None:
    """Remove folders beyond the limits; log an error."""
    try:
        cache.trim(time.time())  # noqa: TID251 - as files have their age
    except (OSError, NotOwnedError) as error:
        log.info("compiled_code_not_removed", extra={"why": str(error)})
