"""Reports steps twice as fast with twice as many workers, and goes on where another round ended."""

import sys
import threading
from pathlib import Path

from dlrover_py.trainer import session

world = session.world()
reached = Path(sys.argv[1])
step = int(reached.read_text()) if reached.exists() else 0
wait = threading.Event()
while not session.should_stop():
    wait.wait(0.1 / world.size)
    step += 1
    if world.rank == 0:
        fresh = reached.with_suffix(".new")
        fresh.write_text(str(step))
        fresh.replace(reached)
    session.report_step(step)
