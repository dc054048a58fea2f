"""Rank 1 fails in the first two runs, each time with another exception.

    python fail_twice_under_ddp.py GO

The third run ends once the file GO exists.
"""

import os
import sys
import threading

import torch.distributed as dist

dist.init_process_group("gloo")
rank, turn = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.barrier()
if rank == 1 and turn == 0:
    raise OSError("first")
if rank == 1 and turn == 1:
    raise ConnectionError("second")
# A broken barrier could be told of before what broke it; and the end waits to be looked at.
while turn < 2 or not os.path.exists(sys.argv[1]):
    threading.Event().wait(0.05)
dist.barrier()
print("done", flush=True)
