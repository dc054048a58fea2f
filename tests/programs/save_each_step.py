"""Saves each step of a state that counts its steps, until it should stop or has made LAST steps.

python save_each_step.py [LAST]
"""

import sys
import threading

import torch
import torch.distributed as dist

from dlrover_py.trainer import Checkpointer, session

last = int(sys.argv[1]) if len(sys.argv) > 1 else sys.maxsize
if session.world().size > 1:
    dist.init_process_group("gloo")
state = {"w": torch.zeros(1 << 18)}
with Checkpointer() as checkpointer:
    step = checkpointer.load(state) or 0
    while step < last and not checkpointer.should_stop:
        state["w"] += 1
        step += 1
        session.report_step(step)
        checkpointer.save(step, state)
        threading.Event().wait(0.02)
if dist.is_initialized():
    dist.destroy_process_group()
