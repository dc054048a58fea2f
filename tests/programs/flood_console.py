"""Writes nine megabytes to its standard error; the file "written" has the number of the line."""

import os
from pathlib import Path

for i in range(1000):
    os.write(2, b"L%08d " % i + b"x" * 9000 + b"\n")
    Path("written").write_text(str(i))
os.write(2, b"THE-LAST-WORDS\n")
