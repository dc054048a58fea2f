"""Rank 1 fails in each run, once the other rank has said that it has started, too."""

import os
import signal
import sys
from pathlib import Path

count, begun = os.environ["TORCHELASTIC_RESTART_COUNT"], Path("begun")
print("start", os.environ["RANK"], count, flush=True)
if os.environ["RANK"] == "1":
    while not begun.exists() or len(begun.read_text()) <= int(count):
        signal.sigtimedwait([], 0.05)
    sys.exit(1)
with begun.open("a") as file:
    file.write("x")
signal.pause()
