"""Saves in memory until it is asked to stop, and prints each step.

python save_until_stopped.py [EVERY]

EVERY is the number of steps between two checkpoints, 1 if it is not given.
"""

import os
import sys
import threading

import torch
import torch.distributed as dist

from dlrover_py.trainer import Checkpointer

dist.init_process_group("gloo")
state = {"w": torch.zeros(3)}
step = 0
every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
with Checkpointer("store", every=every, persist_every=1_000_000) as checkpointer:
    while not checkpointer.should_stop:
        step += 1
        state["w"] += 1
        checkpointer.save(step, state)
        os.write(1, f"step {step}\n".encode())
        threading.Event().wait(0.05)
dist.destroy_process_group()
