"""Forked children of a process that copies a checkpoint in the background."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.trainer.staging import Stager
from tests.unit.test_staging import (  # noqa: F401 - fixtures
    DEADLINE_S,
    Gate,
    Work,
    gate,
    half_copied,
    make,
    read,
)


def test_a_child_that_is_forked_after_the_end_keeps_all_its_files(
    make: Callable[..., Stager], tmp_path: Path
) -> None:
    """Numbers of descriptors come again: a DataLoader's pipes have those of the slots, say."""
    stager = make()
    assert stager.stage(1, Work().leaves()) is not None
    stager.close()
    with ExitStack() as opened:
        files = [opened.enter_context(open(os.devnull)) for _ in range(8)]
        child = os.fork()
        if not child:
            try:
                for file in files:
                    os.fstat(file.fileno())
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_does_nothing_and_holds_nothing(
    make: Callable[..., Stager], tmp_path: Path, gate: Gate
) -> None:
    stager, _, job = half_copied(make, gate)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            stager.fence()  # open: nobody copies there
            stager.close()
            os.write(told, b"1" if stager.wait(0) else b"0")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 1) == b"1"
        gate.open.set()
        assert stager.wait(DEADLINE_S)
        assert read(job.slot.path)[1]["model.0"].unique().tolist() == [1.0]
        # As if the parent had died in the middle: its lock goes with its own descriptors.
        assert job.slot.lock(shared=False)
        with ShmSlot(job.slot.path) as reader:
            assert not reader.lock(shared=True)
            os.close(job.slot.fd)
            assert reader.lock(shared=True), "the child holds the lock"
        job.slot.fd = os.open(job.slot.path, os.O_RDWR)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
