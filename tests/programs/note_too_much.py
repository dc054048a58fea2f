"""Set a variable that is too long for a record of 1 kB, and a short one before and after it."""

import os
import sys

from dlrover_agent.warm.script import watch

watch(sys.argv[1], ())
os.environ["A"] = "1"
os.environ["LONG"] = "x" * 4096
os.environ["B"] = "1"
