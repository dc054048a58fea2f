"""What a worker finds around it: run by torchrun, cold and warm, and compared by test_conformance.

With PROBE_GO set, generation 1 only imports what the probes need, waits for that file, and fails.
"""

import os
import sys

if os.environ.get("PROBE_GO") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import multiprocessing.forkserver
    import multiprocessing.pool
    import threading
    import tkinter.constants  # noqa: F401 - nothing else would import it: was it a warm start?

    import numpy
    import torch
    import torch._dynamo
    import torch.utils.data

    while not os.path.exists(os.environ["PROBE_GO"]):
        threading.Event().wait(0.05)
    if os.environ["RANK"] == "0":
        sys.exit(3)
    threading.Event().wait()

with open("/proc/self/cmdline") as file:
    COMMAND_LINE = file.read().rstrip("\0").split("\0")
AT_START = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "main": sorted(set(globals()) - {"COMMAND_LINE", "file"}),
    "name": __name__,
    "file": __file__,
    "spec": getattr(__spec__, "name", None),
    "loader": type(__loader__).__name__,
    "cached": __cached__,
    "package": __package__,
    "doc": __doc__,
    "path": list(sys.path),
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "flags": repr(sys.flags),
    "xoptions": sys._xoptions,
    "warnoptions": sys.warnoptions,
    # Beyond 999 is the descriptor of the thread that speaks to the agent (process/probe.py).
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 1000)[:-1],
    "cmdline": COMMAND_LINE,
    "warm": "tkinter.constants" in sys.modules,
}

import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import pickle
import random
import resource
import signal
import stat
import tempfile
import threading
import uuid
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader


class Local:
    """Pickled under __main__."""

    def __init__(self, value):
        self.value = value


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return Local(i).value


def square(x):
    return Local(x * x)


LIBC = 1 << 31 | 1 << 32
"""The signals 32 and 33, which the C library handles in a process that has had a thread."""


def status(*names):
    text = Path("/proc/self/status").read_text()
    return {
        n: int(next(x for x in text.splitlines() if x.startswith(n + ":")).split()[1], 16) & ~LIBC
        for n in names
    }


def mask():
    old = os.umask(0)
    os.umask(old)
    return old


def stream(file):
    mode = os.fstat(file.fileno()).st_mode
    return {
        "encoding": file.encoding,
        "errors": file.errors,
        "line_buffering": file.line_buffering,
        "write_through": file.write_through,
        "isatty": file.isatty(),
        "name": file.name,
        "fd": file.fileno(),
        "pipe": stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode),
        "buffer": type(file.buffer).__name__,
    }


def pools():
    found = {}
    for kind in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(kind)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found[kind] = [x.value for x in pool.map(square, range(4))]
    return found


def loaders():
    found = {}
    for kind in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=kind)
        found[kind] = sorted(int(x) for batch in loader for x in batch)
    return found


def compiled():
    @torch.compile(backend="aot_eager")
    def step(x):
        return torch.sin(x) * 2

    x = torch.ones(4, requires_grad=True)
    step(x).sum().backward()
    return [round(float(g), 4) for g in x.grad]


def raised():
    try:
        {}["key"]
    except KeyError:
        import traceback

        return traceback.format_exc()


def blocked_child():
    """A signal that the parent handles reaches a child's default."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.kill(pid, signal.SIGTERM)
    return os.waitpid(pid, 0)[1]


def main():
    state = {
        **AT_START,
        "pickled": pickle.loads(pickle.dumps(Local(3))).value,
        "pickled_as": Local.__module__,
        "stdin": os.readlink("/proc/self/fd/0"),
        "stdout": stream(sys.stdout),
        "stderr": stream(sys.stderr),
        "signals": status("SigBlk", "SigIgn", "SigCgt"),
        "int": str(signal.getsignal(signal.SIGINT)),
        "umask": mask(),
        "leads_session": os.getsid(0) == os.getpid(),
        "leads_group": os.getpgrp() == os.getpid(),
        "threads": [t.name for t in threading.enumerate()],
        "is_main": threading.current_thread() is threading.main_thread(),
        "limits": [resource.getrlimit(i) for i in range(16)],
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "faulthandler": faulthandler.is_enabled(),
        "locale": locale.getlocale(),
        "preferred": locale.getpreferredencoding(False),
        "fs": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()],
        "recursion": sys.getrecursionlimit(),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "logging": [logging.root.level, len(logging.root.handlers)],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "debug": __debug__,
        "hash": hash("dlrover") if os.environ.get("PYTHONHASHSEED") else None,
        "daemon": multiprocessing.current_process().daemon,
        "process": multiprocessing.current_process().name,
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "default_dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "bad_fork": torch.cuda._is_in_bad_fork(),
        # Once per job: each new interpreter imports torch.
        "pools": pools() if os.environ["RANK"] == "0" else None,
        "loaders": loaders() if os.environ["RANK"] == "0" else None,
        "compiled": compiled(),
        "raised": raised(),
        "blocked_child": blocked_child(),
        "warnings": sorted(str(f[:3]) for f in warnings.filters),
        "args_size": sum(map(len, sys.argv)),
    }
    # What no two workers may share.
    private = {
        "random": random.random(),
        "numpy": float(numpy.random.rand()),
        "torch": float(torch.rand(1)),
        "torch_seed": torch.initial_seed(),
        "uuid": str(uuid.uuid4()),
        "tempfile": tempfile.mktemp(),
        "authkey": multiprocessing.current_process().authkey.hex(),
        "pid": os.getpid(),
    }
    out = Path(os.environ["PROBE_OUT"], os.environ["RANK"])
    out.with_suffix(".json").write_text(json.dumps({"state": state, "private": private}))


if __name__ == "__main__":
    main()
