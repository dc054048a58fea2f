"""Prints six megabytes to both streams, and makes the file "done"."""

import sys
from pathlib import Path

for _ in range(3000):
    print("x" * 1000)
    print("y" * 1000, file=sys.stderr)
Path("done").touch()
