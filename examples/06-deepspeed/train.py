"""Classify handwritten digits with DeepSpeed ZeRO. Each sample is trained once per epoch.

Compare this script with ``03-elastic-data``: ``ElasticEngine`` takes the place of the optimizer and
of ``DistributedDataParallel``.
"""

import argparse
import os
import time
from collections import defaultdict
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.integrations.deepspeed import ElasticEngine

CONFIG = Path(__file__).with_name("ds.json")


def main() -> None:
    """Train the model, and print its accuracy on held-out samples."""
    args = parse_args()
    start()
    train, (test_inputs, test_labels) = load()

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loader = ElasticLoader(
        train, global_batch=args.global_batch, micro_batch=16, ledger=args.ledger, num_workers=1
    )
    elastic = ElasticEngine(loader, model=model, config=CONFIG)  # not deepspeed.initialize(…)
    engine = elastic.engine
    checkpointer = Checkpointer(args.ckpt)
    state = {"engine": elastic, "data": loader}
    if checkpointer.load(state) and dist.get_rank() == 0:
        print(
            f"resumed after step {loader.steps}, in epoch {loader.epoch}, "
            f"with {dist.get_world_size()} workers",
            flush=True,
        )

    while loader.epoch < args.epochs and not checkpointer.should_stop:
        for step in loader:
            for inputs, labels in step:  # the micro-batches of this rank
                loss = cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device))
                elastic.backward(step, loss)  # the mean over the samples of all ranks
            elastic.step(step)  # changes the weights, and commits the step
            checkpointer.save(loader.steps, state)
            session.report_step(loader.steps)
            time.sleep(args.step_delay)
            if checkpointer.should_stop:
                break
    checkpointer.save(loader.steps, state, force=True)
    if loader.epoch == args.epochs:
        with torch.no_grad():  # on all ranks: ZeRO 3 gathers the weights for it
            right = engine(test_inputs.to(engine.device)).argmax(dim=1).cpu() == test_labels
        if dist.get_rank() == 0:
            accuracy = right.float().mean().item()
            print(f"accuracy {accuracy:.2f} after {loader.epoch} epochs", flush=True)
    checkpointer.close()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=96, help="samples, of all workers")
    parser.add_argument("--ckpt", help="folder that all nodes share; without it only in memory")
    parser.add_argument("--ledger", help="shared folder for a record of the samples of each step")
    parser.add_argument(
        "--step-delay", type=float, default=0.0, help="seconds, to have time to look"
    )
    return parser.parse_args()


def start() -> None:
    """Join the process group: NCCL with GPUs, gloo without."""
    if torch.cuda.is_available():
        torch.cuda.set_device(session.world().local_rank)
        dist.init_process_group("nccl")
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    # Without this, DeepSpeed compiles operations for CPUs at its first start, for a minute.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    dist.init_process_group("gloo")


def load() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Return 1,437 samples for training and 360 for the test, which takes every fifth sample."""
    digits = load_digits()
    inputs = torch.from_numpy(digits.data.astype(np.float32) / 16)
    labels = torch.from_numpy(digits.target)
    test = torch.arange(len(inputs)) % 5 == 0
    return TensorDataset(inputs[~test], labels[~test]), (inputs[test], labels[test])


if __name__ == "__main__":
    main()
