"""Saves each step in memory until it is asked to stop, and prints each step."""

import os
import threading

import torch
import torch.distributed as dist

from dlrover_py.trainer import Checkpointer

dist.init_process_group("gloo")
state = {"w": torch.zeros(3)}
step = 0
with Checkpointer("store", every=1, persist_every=1_000_000) as checkpointer:
    while not checkpointer.should_stop:
        step += 1
        state["w"] += 1
        checkpointer.save(step, state)
        os.write(1, f"step {step}\n".encode())
        threading.Event().wait(0.05)
dist.destroy_process_group()
