"""Trains on the samples of an ``ElasticLoader``, and saves, until it is asked to stop.

python train_until_stopped.py EVERY

EVERY is the number of steps between two checkpoints.
"""

import sys
import threading

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader

dist.init_process_group("gloo")
loader = ElasticLoader(TensorDataset(torch.arange(100_000)), global_batch=4)
state = {"data": loader}
with Checkpointer("store", every=int(sys.argv[1]), persist_every=1_000_000) as checkpointer:
    checkpointer.load(state)
    for step in loader:
        for (batch,) in step:
            batch.sum()
        step.commit()
        session.report_step(loader.steps)
        checkpointer.save(loader.steps, state)
        if checkpointer.should_stop:
            break
        threading.Event().wait(0.05)
dist.destroy_process_group()
