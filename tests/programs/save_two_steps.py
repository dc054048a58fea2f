"""Loads, saves and stores two steps in the folder "store". Its first run fails after one step."""

import os
import sys

import torch
import torch.distributed as dist

from dlrover_py.trainer import Checkpointer

dist.init_process_group()  # as many scripts do: torch chooses a backend for each device
state = {"w": torch.zeros(3)}
checkpointer = Checkpointer("store", every=1, persist_every=1)
begin = checkpointer.load(state) or 0
for step in (begin + 1, begin + 2):
    state["w"] += 1
    checkpointer.save(step, state)
    there = checkpointer.wait(persisted=True, timeout_s=30)
    os.write(1, f"rank {dist.get_rank()}: {step} {there} {state['w'].tolist()}\n".encode())
    if begin == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
checkpointer.close()
dist.destroy_process_group()
