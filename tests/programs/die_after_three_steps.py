"""Trains with DDP. In each of the first runs, one rank kills itself after its third step.

    python die_after_three_steps.py KILLS

The ranks do so in turn. The run after KILLS such deaths makes three steps, and ends.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
turn = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
dist.barrier()
if turn < int(sys.argv[1]) and turn % dist.get_world_size() == dist.get_rank():
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
