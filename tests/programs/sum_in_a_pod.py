"""Sums ones over two workers with gloo; says the sum, and as which user it runs."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
os.write(1, f"sum {int(x)} uid {os.getuid()}\n".encode())
dist.destroy_process_group()
