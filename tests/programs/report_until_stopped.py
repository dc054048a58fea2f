"""Reports steps until it should stop, and says why it was restarted and why it stops."""

import os
import threading

from dlrover_py.trainer import session

world = session.world()
assert world.rank == int(os.environ["RANK"])
assert session.active()
print("round", session.round(), "because", session.restart_reason() or "-", flush=True)
wait = threading.Event()
step = 0
while not session.should_stop():
    step += 1
    session.report_step(step, total=1000000, loss=1 / step)
    wait.wait(0.01)
print("asked to stop:", session.stop_reason(), flush=True)
