"""Reports steps and a loss until three workers train together, and then ends."""

import os
import threading

from dlrover_py.trainer import session

pause = threading.Event()
print("world", os.environ["WORLD_SIZE"], flush=True)
step = 0
while not session.should_stop():
    step += 1
    session.report_step(step, loss=1 / step)
    if os.environ["WORLD_SIZE"] == "3" and step == 20:
        break
    pause.wait(0.02)
