"""Reports steps until it should stop, and keeps the last one in /tmp/step-ROUND.

python report_in_a_pod.py PAUSE
"""

import os
import sys
import time
from pathlib import Path

from dlrover_py.trainer import session

world, step = session.world(), 0
print("starts", session.round(), world.rank, world.size, flush=True)
path = f"/tmp/step-{session.round()}"
while not session.should_stop():
    step += 1
    session.report_step(step)
    if step == 1:
        print("hears in round", session.round(), flush=True)
    Path(f"{path}.new").write_text(str(step))
    os.replace(f"{path}.new", path)
    time.sleep(float(sys.argv[1]))
print("asked to stop", flush=True)
