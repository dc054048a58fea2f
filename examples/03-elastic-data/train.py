"""Classify handwritten digits. Each sample is trained once per epoch, whatever fails.

Compare this script with ``01-digits``: ``ElasticLoader`` deals the samples, and ``ElasticLoop``
makes the steps and saves the position in the data together with the model.
"""

import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dlrover_py.trainer import Checkpointer, ElasticLoop, session
from dlrover_py.trainer.data import ElasticLoader


def main() -> None:
    """Train the model, and print its accuracy on held-out samples."""
    args = parse_args()
    device = start()
    train, (test_inputs, test_labels) = load()

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ddp = DistributedDataParallel(model)
    loader = ElasticLoader(
        train, global_batch=args.global_batch, micro_batch=16, ledger=args.ledger, num_workers=1
    )
    loop = ElasticLoop(
        ddp,
        optimizer,
        loader,
        Checkpointer(args.ckpt),
        after_step=lambda: time.sleep(args.step_delay),
    )
    if loop.restored and dist.get_rank() == 0:
        print(
            f"resumed after step {loader.steps}, in epoch {loader.epoch}, "
            f"with {dist.get_world_size()} workers",
            flush=True,
        )

    for _ in loop.epochs(args.epochs):
        for inputs, labels in loop:  # the micro-batches of this rank
            loss = cross_entropy(ddp(inputs.to(device)), labels.to(device))
            loop.step(loss)  # the mean over the samples of all ranks

    if dist.get_rank() == 0 and loader.epoch == args.epochs:
        with torch.no_grad():
            right = model(test_inputs.to(device)).argmax(dim=1) == test_labels.to(device)
        print(f"accuracy {right.float().mean().item():.2f} after {loader.epoch} epochs", flush=True)
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


def start() -> torch.device:
    """Join the process group: NCCL if each worker of this node has its own GPU, else gloo."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    here = session.world()
    if torch.cuda.device_count() >= here.local_size:
        torch.cuda.set_device(here.local_rank)
        dist.init_process_group("nccl")
        return torch.device("cuda", here.local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def load() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Return 1,437 samples for training and 360 for the test, which takes every fifth sample."""
    digits = load_digits()
    inputs = torch.from_numpy(digits.data.astype(np.float32) / 16)
    labels = torch.from_numpy(digits.target)
    test = torch.arange(len(inputs)) % 5 == 0
    return TensorDataset(inputs[~test], labels[~test]), (inputs[test], labels[test])


if __name__ == "__main__":
    main()
