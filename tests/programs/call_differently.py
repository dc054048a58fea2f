"""Two ranks whose calls of the checkpointer differ.

python call_differently.py steps    only rank 0 saves each of forty steps
python call_differently.py close    each saves another step
python call_differently.py options  each has another interval
python call_differently.py init     only rank 0 loads with init
"""

import sys

import torch
import torch.distributed as dist

from dlrover_py.trainer import Checkpointer

dist.init_process_group("gloo")
rank, state = dist.get_rank(), {"w": torch.ones(3)}
checkpointer = Checkpointer("ckpt", every=1 + rank if sys.argv[1] == "options" else None)
match sys.argv[1]:
    case "steps":
        for step in range(1, 41):
            if rank == 0:
                checkpointer.save(step, state)
        checkpointer.save(step, state, force=True)
    case "close":
        checkpointer.save(1 + rank, state)
    case "options":
        checkpointer.load(state)
    case "init":
        checkpointer.load(state, init="there" if rank == 0 else None)
checkpointer.close()
