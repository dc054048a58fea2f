"""Has two children, writes their ids to the file "children", and asks its agent once "go" exists.

The file "answered" says that the agent has answered.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

from dlrover_py.checkpoint.transfer import TransferConnection

# They do not die with the agent, as a worker does; one is not of the worker's session.
argv = [sys.executable, "-c", "import signal; signal.pause()"]
both = [subprocess.Popen(argv, start_new_session=own) for own in (False, True)]
Path("children.new").write_text(" ".join(str(child.pid) for child in both))
Path("children.new").rename("children")
while not Path("go").exists():
    threading.Event().wait(0.05)
with TransferConnection.local(os.environ["DLROVER_TRANSFER_SOCKET"]) as link:
    link.candidates(int(os.environ["DLROVER_ROUND"]))
Path("answered").touch()
threading.Event().wait()
