"""Says which place in the job it has, and waits until the file "go" exists."""

import os
import signal
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID")

line = "place {} of {} node {} role {} of {} id {}\n".format(*(os.environ[name] for name in NAMES))
os.write(1, line.encode())  # in one piece
while not Path("go").exists():
    signal.sigtimedwait([], 0.05)
