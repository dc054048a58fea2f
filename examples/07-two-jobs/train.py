"""Stands for a training: steps take less time with more workers, and none is computed.

It needs no torch, so the example starts in a second. The steps that were made are kept in a file,
as a checkpoint keeps them in a real script.
"""

import argparse
import os
import threading
from pathlib import Path

from dlrover_py.trainer import session

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1500)
parser.add_argument("--seconds", type=float, default=0.4, help="of a step with one worker")
options = parser.parse_args()

world = session.world()
kept = Path(os.environ.get("STEPS_FOLDER", ".")) / f"{os.environ['ELASTIC_JOB_NAME']}.steps"
step = int(kept.read_text()) if kept.exists() else 0
if world.rank == 0:
    print(f"step {step} with {world.size} workers", flush=True)
wait = threading.Event()
while step < options.steps and not session.should_stop():
    wait.wait(options.seconds * (1 / world.size + 0.02))
    step += 1
    session.report_step(step, options.steps)
    if world.rank == 0:
        fresh = kept.with_suffix(".new")
        fresh.write_text(str(step))
        fresh.replace(kept)
