"""Removes TMPDIR and fails, removes it and kills the job's master, and succeeds the third time."""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from dlrover_py.trainer import session

runs = Path("runs")
attempt = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (attempt + 1))
sockets = [os.environ["DLROVER_AGENT_SOCKET"], os.environ["DLROVER_TRANSFER_SOCKET"]]
print("attempt", attempt, [os.path.exists(path) for path in sockets], flush=True)
session.report_step(attempt + 1)
while attempt < 2 and os.path.exists(os.environ["TMPDIR"]):  # others write there
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
if attempt == 0:
    sys.exit(3)
if attempt == 1:
    for found in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            parent = f"PPid:\t{os.getppid()}\n" in found.read_text()
            if parent and b"dlrover_py.master" in (found.parent / "cmdline").read_bytes():
                os.kill(int(found.parent.name), signal.SIGKILL)
    sys.exit(4)
