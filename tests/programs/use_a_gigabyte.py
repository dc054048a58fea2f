"""Rank 1 uses a gigabyte of memory. All sleep."""

import os
import time

if os.environ["RANK"] == "1":
    taken = b"x" * (1 << 30)
time.sleep(600)
