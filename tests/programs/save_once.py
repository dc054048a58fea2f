"""Stores a step in the folder "store" beside the script, and says whether that is done."""

import sys

import torch

from dlrover_py.trainer import Checkpointer

with Checkpointer(sys.path[0] + "/store", every=1) as checkpointer:
    checkpointer.save(1, {"w": torch.zeros(3)})
    print(checkpointer.wait(persisted=True, timeout_s=60))
