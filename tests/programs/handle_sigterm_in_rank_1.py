"""Waits for signals. Only rank 1 handles SIGTERM: it makes the file heard-RANK, and ends."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def term(number: int, frame: FrameType | None) -> None:
    Path(f"heard-{os.environ['RANK']}").touch()
    sys.exit(0)


# Not the first one: each is looked at by itself.
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, term)
print("start", os.environ["RANK"], os.environ["DLROVER_ROUND"], flush=True)
signal.pause()
