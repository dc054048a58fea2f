"""Starts a child that waits for a signal, says "child" and its process id, and waits itself.

python have_a_child.py
python have_a_child.py own-session          the child leads a session
python have_a_child.py without-environment  the child has no variables; both words may be given
"""

import signal
import subprocess
import sys

argv = [sys.executable, "-c", "import signal; signal.pause()"]
if "without-environment" in sys.argv:
    argv = ["env", "-i", *argv]
child = subprocess.Popen(argv, start_new_session="own-session" in sys.argv)
print("child", child.pid, flush=True)
signal.pause()
