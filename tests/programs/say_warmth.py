"""Says whether it was started warm or cold, and the VERSION of fakelib; waits for a signal.

python say_warmth.py
python say_warmth.py unfit   imports what no zygote may have: says rank, and how many threads run
python say_warmth.py secret  sets SECRET before the import of fakelib: says what it was, and VERSION
python say_warmth.py later   imports the module later, once the file "now" exists
python say_warmth.py ends    ends if it was started warm
python say_warmth.py cuda    fails if it was started warm, as CUDA does that a fork has broken
"""

import os
import signal
import sys
import threading
from pathlib import Path

warm = "dlrover_agent.warm.zygote" in sys.modules
before = os.environ.get("SECRET")
if "secret" in sys.argv:
    os.environ["SECRET"] = "x"
import fakelib  # type: ignore[import-not-found]  # noqa: E402

found = [fakelib.VERSION]
if "secret" in sys.argv:
    found = [before, fakelib.VERSION]
if "unfit" in sys.argv:
    import above_ranks  # type: ignore[import-not-found]
    import ranks  # type: ignore[import-not-found]
    import threads  # type: ignore[import-not-found]

    assert above_ranks
    assert threads
    found = [ranks.RANK, threading.active_count()]
how = "warm" if warm else "cold"
print("start", os.environ["RANK"], os.environ["DLROVER_ROUND"], how, *found, flush=True)
if "later" in sys.argv:
    while not Path("now").exists():
        signal.sigtimedwait([], 0.1)
    import later  # type: ignore[import-not-found]

    assert later
if warm and "cuda" in sys.argv:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
if not (warm and "ends" in sys.argv):
    signal.pause()
