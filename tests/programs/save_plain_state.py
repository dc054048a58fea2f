"""Saves and loads a state without sharded tensors; says what torch imported for sharded ones.

python save_plain_state.py ARENA
"""

import sys

import torch
import torch.distributed

before = set(sys.modules)
from dlrover_py.trainer import Checkpointer  # noqa: E402
from dlrover_py.trainer.settings import Settings  # noqa: E402

state = {"model": torch.nn.Linear(2, 2), "seen": 3}  # an optimizer imports it all by itself
place = Settings(pool=sys.argv[1], job="job")
with Checkpointer(settings=place) as saver:
    assert saver.load(state) is None
    assert saver.save(1, state)
with Checkpointer(settings=place) as loader:
    assert loader.load(state) == 1
dear = ("torch.distributed.tensor", "torch.distributed.checkpoint")
print([name for name in set(sys.modules) - before if name.startswith(dear)])
