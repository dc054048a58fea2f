"""Starts a persister that has its standard input, says its process id, and "up" once it answers."""

import subprocess
import sys

argv = [sys.executable, "-m", "dlrover_py.checkpoint.writer"]
persister = subprocess.Popen(argv, stdin=sys.stdin, stdout=subprocess.PIPE)
assert persister.stdout is not None
print(persister.pid, flush=True)
persister.stdout.readline()
print("up", flush=True)
persister.wait()
