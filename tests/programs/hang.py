"""Trains a little with gloo, until one rank hangs in a chosen way: python hang.py HOW RANK STEP.

HOW is ``skip`` (the rank leaves out a collective), ``mismatch`` (it calls another), ``lock`` (it
waits for a lock that it holds), ``loader`` (its data loader blocks), ``early`` (its data end
earlier), ``freeze`` (it stops itself), ``slow`` (it computes for long) or ``none``. With ``silent``
before it, as in ``silent-lock``, the script prints its steps and does not report them.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from dlrover_py.trainer import session

how, guilty, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
silent, how = how.startswith("silent-"), how.removeprefix("silent-")
STEPS = int(sys.argv[4]) if len(sys.argv) > 4 else 10_000


class Samples(IterableDataset[torch.Tensor]):  # type: ignore[misc]
    """Samples that stop to come at one place, on one rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(STEPS):
            if how == "loader" and dist.get_rank() == guilty and number == at:
                Path("hang-began").write_text(str(time.time()))
                threading.Event().wait()
            yield torch.ones(4) * number


def wait_for_own_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def compute_for_long() -> None:
    until = time.monotonic() + 12
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # One restart only hangs once.
    here = rank == guilty and session.round() == 1
    for step, batch in enumerate(DataLoader(Samples(), batch_size=None), start=1):
        if here and step == at:
            Path("hang-began").write_text(str(time.time()))
            if how == "early":
                break
            if how == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "lock":
                wait_for_own_lock()
            if how == "slow":
                compute_for_long()
        total = batch.clone()
        if here and step == at and how == "mismatch":
            dist.broadcast(total, src=rank)
        elif not (here and step == at and how == "skip"):
            dist.all_reduce(total)
        if here and step == at and how == "skip":
            threading.Event().wait()
        time.sleep(0.05)
        if silent:
            os.write(1, f"rank {rank} step {step}\n".encode())
        else:
            session.report_step(step, None if at < STEPS else STEPS)
    dist.barrier()
    dist.destroy_process_group()
    os.write(1, f"rank {rank} is done\n".encode())


main()
