"""Ends in another way in each generation; test_conformance compares what each leaves behind."""

import atexit
import faulthandler
import os
import sys
import threading

import torch

from dlrover_py.trainer import session

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if generation == 0:
    while os.environ.get("PROBE_GO") and not os.path.exists(os.environ["PROBE_GO"]):
        threading.Event().wait(0.05)
    sys.exit(3)

session.report_step(generation)
print("out", generation)
atexit.register(print, "atexit: the first comes last", file=sys.stderr)
atexit.register(
    lambda: print("atexit: alive:", threading.main_thread().is_alive(), file=sys.stderr)
)


def later():
    threading.Event().wait(0.2)
    print("a thread was waited for", file=sys.stderr)


class OddError(Exception):
    pass


def deep(n):
    if n:
        deep(n - 1)
    raise OddError(f"generation {generation}")


def end():
    match generation:
        case 1:
            sys.exit(7)
        case 2:
            sys.exit("some words")
        case 3:
            threading.Thread(target=later).start()
            sys.exit(9)
        case 4:
            deep(2)
        case 5:
            try:
                deep(0)
            except OddError as error:
                raise ValueError("chained") from error
        case 6:
            raise KeyboardInterrupt
        case 7:
            faulthandler.enable()
            os.abort()
        case 8:
            sys.excepthook = lambda kind, error, trace: print("hook", kind, error, file=sys.stderr)
            deep(0)
        case 9:
            os._exit(11)
        case 10:
            torch.ones(2) @ torch.ones(3)
        case 11:
            raise ExceptionGroup("two", [ValueError(1), TypeError(2)])
        case 12:
            exec(compile("1 +", "made up", "exec"))
        case 13:
            sys.exit(None)


end()
