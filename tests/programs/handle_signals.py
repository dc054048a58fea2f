"""Handles SIGTERM, SIGINT and SIGUSR1: it writes the name of the signal to the file told-RANK.

python handle_signals.py             ends with code 0 then
python handle_signals.py deaf        says "no" and the number of the signal, and goes on
python handle_signals.py deaf child  and has a child, which does not handle signals
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType


def told(number: int, frame: FrameType | None) -> None:
    Path(f"told-{os.environ['RANK']}").write_text(signal.Signals(number).name)
    if "deaf" not in sys.argv:
        sys.exit(0)
    say(f"no {number}")


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())  # in one piece: two workers share a pipe


if __name__ == "__main__":
    if "child" in sys.argv:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, told)
    say("ready")
    while True:
        signal.pause()
