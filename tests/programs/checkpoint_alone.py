"""Saves checkpoints without an agent, in the way that its first argument names.

    python checkpoint_alone.py WAY [END]

WAY is one of the functions below, and WHERE is the checkpoint directory of those that have one.
END says how the program ends then: close, kill, fork (a child that lives on, and kill) or raise;
else it just ends.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import Checkpointer

where = os.environ.get("WHERE", "")


def fork_a_child_that_fails() -> None:
    """A forked child ends with an exception before the second save."""
    pid = 0
    try:
        with Checkpointer(where) as checkpointer:
            checkpointer.save(1, {"w": torch.ones(2)}, force=True)
            pid = os.fork()
            if not pid:
                raise ValueError
            assert os.waitpid(pid, 0)[1] == 0
            print(checkpointer.save(2, {"w": torch.ones(2)}, force=True))
    except ValueError:
        os._exit(0)


def force_in_a_row() -> None:
    """Forces saves until three are stored; says the last step, and how many are stored."""
    state = {"w": torch.zeros(1 << 21)}
    end = time.monotonic() + 90
    with Checkpointer(where, keep=1000) as checkpointer:
        for step in itertools.count(1):
            checkpointer.save(step, state, force=True)
            there = len(list(Path(where).glob("step-*.json")))
            if there > 2 or time.monotonic() > end:
                break
    print(step, there)


def force() -> None:
    """Forces a save, and says whether it is stored."""
    with Checkpointer(where) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2)}, force=True)
        print(checkpointer.wait(persisted=True), checkpointer.stats.persisted)
        print(checkpointer.stats.persist_s)


def call_after_close() -> None:
    """Forces a save, closes, and says whether it is stored, and what another load answers."""
    with Checkpointer(where) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2)}, force=True)
    print(checkpointer.wait(), checkpointer.wait(persisted=True))
    try:
        checkpointer.load({"w": torch.ones(2)})
    except ConfigError as error:
        print(error)


def keep_in_memory() -> Any:
    """Saves in memory; says what is in DLROVER_SHM_DIR."""
    checkpointer = Checkpointer()
    assert checkpointer.load({"w": torch.zeros(3)}) is None
    checkpointer.save(1, {"w": torch.zeros(3)})
    checkpointer.wait()
    print(*os.listdir(os.environ["DLROVER_SHM_DIR"]))
    return checkpointer


def have_a_data_loader() -> Any:
    """Forces a save, and has a forked worker of a data loader when it closes, and later."""
    checkpointer = Checkpointer(where)
    checkpointer.save(1, {"w": torch.arange(5.0)}, force=True)
    loader = torch.utils.data.DataLoader(
        [1, 2, 3], num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    if "close" in sys.argv:
        checkpointer.close()
        print(next(batches).tolist())
    else:
        print([2])
    return checkpointer, loader, batches


def save_two_steps() -> Any:
    """Saves two steps; the second one is due for storage."""
    checkpointer = Checkpointer(where, persist_every=2) if where else Checkpointer()
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.ones(2)})
    return checkpointer


def store_and_load() -> None:
    """Stores two steps, and loads them; it says what it has loaded."""
    w = torch.arange(5.0)
    with Checkpointer(where, persist_every=1) as checkpointer:
        checkpointer.save(1, {"w": w})
        w.add_(1)
        checkpointer.save(2, {"w": w}, force=True)
        checkpointer.wait(persisted=True)
    print(checkpointer.stats)
    w.zero_()
    with Checkpointer(where) as checkpointer:
        print(checkpointer.load({"w": w}), w.tolist())
        checkpointer.save(3, {"w": w})
        checkpointer.save(4, {"w": object()})


WAYS: tuple[Callable[[], Any], ...] = (
    fork_a_child_that_fails,
    force_in_a_row,
    force,
    call_after_close,
    keep_in_memory,
    have_a_data_loader,
    save_two_steps,
    store_and_load,
)

if __name__ == "__main__":
    way, end = (*sys.argv[1:], "")[:2]
    kept = {one.__name__: one for one in WAYS}[way]()  # until the interpreter ends
    if end == "fork" and not os.fork():
        sys.stdin.readline()
        os.write(1, b"alive")
        os._exit(0)
    if end in ("fork", "kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "raise":
        raise KeyError
    if end == "close" and way == "save_two_steps":
        kept.close()
