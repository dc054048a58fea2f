"""Trains a little with gloo, until one rank fails in a chosen way: python fail.py HOW RANK.

HOW is one of the keys of ``WAYS``. Texts of CUDA are those of torch: no GPU is needed.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover_py.trainer import session

HOW, RANK, STEP = sys.argv[1], int(sys.argv[2]), 20
CLONE_NEWNS, MS_PRIVATE, MS_REC = 0x20000, 0x40000, 0x4000


def take_memory() -> None:
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 32)


def mount_small(folder: str) -> None:
    """Mount a file system of 1 MiB, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(None, b"/", None, MS_PRIVATE | MS_REC, None)
        or libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=1m")
    ):
        raise RuntimeError(f"cannot mount: {os.strerror(ctypes.get_errno())}")


def fill_shared_memory() -> None:
    mount_small("/dev/shm")
    torch.zeros(1 << 22).share_memory_()


def fill_disk() -> None:
    mount_small("/mnt")
    Path("/mnt/checkpoint").write_bytes(bytes(1 << 22))


def raise_key_error() -> None:
    dict[str, int]()["labels"]


def raise_device_memory() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
        "of which 3.12 GiB is free."
    )


def raise_ecc() -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


WAYS: dict[str, Callable[[], object]] = {
    "memory": take_memory,
    "shm": fill_shared_memory,
    "disk": fill_disk,
    "code": raise_key_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "device": raise_device_memory,
    "ecc": raise_ecc,
}


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(1, 10 * STEP):
        if step == STEP and dist.get_rank() == RANK:
            WAYS[HOW]()
        dist.all_reduce(torch.ones(4))
        time.sleep(0.05)
        session.report_step(step)


if __name__ == "__main__":
    main()
