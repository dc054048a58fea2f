"""Says "start", adds an x to the file "runs", and fails in the way that its argument names.

python raise_exceptions.py at-step-5      rank 0 fails after it has reported five steps
python raise_exceptions.py without-steps  rank 0 fails, and has reported no step
python raise_exceptions.py by-round       fails in each round in another way
python raise_exceptions.py differently    fails in each run in another way
python raise_exceptions.py always         fails in each run in the same way
python raise_exceptions.py aborted        is aborted while it ends, after an exception
python raise_exceptions.py long           reports a step, and fails with a long message
"""

import atexit
import os
import signal
import sys
from pathlib import Path

from dlrover_py.trainer import session

KINDS = (ValueError, KeyError, TypeError, OSError, IndexError, ArithmeticError)

print("start", flush=True)
with Path("runs").open("a") as file:
    file.write("x")
runs = len(Path("runs").read_text())
match sys.argv[1]:
    case "at-step-5" | "without-steps":
        if os.environ["RANK"] == "1":
            signal.pause()
        for step in range(1, 6):
            if sys.argv[1] == "at-step-5":
                session.report_step(step)
        raise ValueError(f"loss of process {os.getpid()} is nan")
    case "by-round":
        raise KINDS[session.round() - 1]("bad")
    case "differently" | "always":
        raise KINDS[runs - 1 if sys.argv[1] == "differently" else 0]("always")
    case "aborted":
        atexit.register(os.abort)
        raise ValueError("a mistake of the user")
    case "long":
        session.report_step(1)
        raise ValueError("again " + "long " * 10000)
