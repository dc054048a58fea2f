"""Sums the ranks with gloo. Rank 1 fails in the first runs: python sum_ranks.py FAILURES."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
# In one piece: the workers of a node write to the same pipe.
os.write(1, f"sum {int(total)} of {dist.get_world_size()}\n".encode())
failures = Path("failures")
failed = len(failures.read_text()) if failures.exists() else 0
dist.barrier()
if failed < int(sys.argv[1]):
    if dist.get_rank() == 1:
        failures.write_text("x" * (failed + 1))
        sys.exit(1)
    dist.barrier()
dist.barrier()
dist.destroy_process_group()
