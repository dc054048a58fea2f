"""Trains a little with gloo, until one rank hangs in a chosen way: python hang.py HOW RANK STEP.

HOW is ``skip`` (the rank leaves out a collective), ``mismatch`` (it calls another), ``lock`` (it
waits for a lock that it holds), ``loader`` (its data loader blocks), ``early`` (its data end
earlier), ``freeze`` (it stops itself), ``slow`` (it computes for long), ``groups`` (it calls the
collectives of two groups in another order), ``files`` (it opens a file of a file system whose
server does not answer; root only) or ``none``. With ``silent`` before it, as in ``silent-lock``,
the script prints its steps and does not report them.
"""

import ctypes
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
CLONE_NEWNS, MS_PRIVATE, MS_REC = 0x20000, 0x40000, 0x4000
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


def open_a_file_without_server() -> None:
    """Wait in the kernel, as for an NFS server that is down; the mount ends with the process."""
    libc, folder = ctypes.CDLL(None, use_errno=True), b"/mnt"
    server = os.open("/dev/fuse", os.O_RDWR)
    options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % server
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(None, b"/", None, MS_PRIVATE | MS_REC, None)
        or libc.mount(b"none", folder, b"fuse", 0, options)
    ):
        raise OSError(ctypes.get_errno(), "cannot mount a file system")
    os.open(folder + b"/samples", os.O_RDONLY)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    other_group = dist.new_group() if how == "groups" else None
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
            if how == "files":
                open_a_file_without_server()
        total = batch.clone()
        if other_group is not None and step == at:
            first, then = (other_group, None) if here else (None, other_group)
            dist.all_reduce(total, group=first)
            dist.all_reduce(total, group=then)
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
