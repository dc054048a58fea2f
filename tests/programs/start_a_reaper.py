"""Starts a reaper for a folder, says its process id, and ends with its standard input."""

import sys
from pathlib import Path

from dlrover_agent.reaper_client import ReaperClient

print(ReaperClient(None, [Path(sys.argv[1])]).pid, flush=True)
sys.stdin.read()
