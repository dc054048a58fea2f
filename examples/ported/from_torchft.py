"""A script for torchft's manager, ported. docs/migrating-from-torchft.md shows both loops."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader


def main() -> None:
    """Train, and print the loss on all points."""
    args = parse_args()
    points, model = task()
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ElasticLoader(points, global_batch=64, ledger=args.ledger)
    state = {"model": model, "optimizer": optimizer, "data": loader}
    checkpointer = Checkpointer(args.ckpt)
    checkpointer.load(state)
    if loader.steps:
        print(f"resumed after step {loader.steps}", flush=True)
    while loader.steps < args.steps and not checkpointer.should_stop:
        for step in loader:
            for inputs, targets in step:
                with step.sync(ddp):
                    step.weigh(mse_loss(ddp(inputs), targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
            checkpointer.save(loader.steps, state)
            session.report_step(loader.steps)
            time.sleep(args.step_delay)
            if loader.steps == args.steps or checkpointer.should_stop:
                break
    checkpointer.close()
    if loader.steps == args.steps and dist.get_rank() == 0:
        loss = mse_loss(model(points.tensors[0]), points.tensors[1])
        print(f"loss {loss.item():.12f} after {loader.steps} steps", flush=True)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--ckpt", help="folder that all nodes share; without it only in memory")
    parser.add_argument("--ledger", help="shared folder for a record of the samples of each step")
    parser.add_argument(
        "--step-delay", type=float, default=0.0, help="seconds, to have time to look"
    )
    return parser.parse_args()


def task() -> tuple[TensorDataset, nn.Module]:
    """Return 1,000 random points with their targets, and a network. They are always the same."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(1000, 8, dtype=torch.float64)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), network


if __name__ == "__main__":
    main()
