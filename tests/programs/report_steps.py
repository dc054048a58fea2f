"""Reports steps: python report_steps.py TOTAL PAUSE. Without torch, it starts in a moment."""

import sys
import time

from dlrover_py.trainer import session

total, pause = int(sys.argv[1]), float(sys.argv[2])
for step in range(1, total + 1):
    if session.should_stop():
        print("asked to stop at", step, flush=True)
        sys.exit(0)
    session.report_step(step, total)
    time.sleep(pause)
print("done", session.world().rank, flush=True)
