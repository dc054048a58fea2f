"""Writes to the file ignored-TEST_LAUNCHER which signals it ignores, as the kernel says it."""

import os
from pathlib import Path

status = Path("/proc/self/status").read_text().splitlines()
found = next(line.split()[1] for line in status if line.startswith("SigIgn:"))
Path("ignored-" + os.environ["TEST_LAUNCHER"]).write_text(found)
