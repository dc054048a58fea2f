"""In the first run, rank 1 finds the disk full while rank 0 waits for it in gloo."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    signal.pause()
if dist.get_rank() == 1:
    with open("/dev/full", "w") as file:
        file.write("x")
dist.all_reduce(torch.zeros(1))
