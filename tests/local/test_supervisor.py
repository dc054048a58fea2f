"""The workers of a round, from processes that are started."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.core import Event, WorkerEnded, WorkersGone, WorkersStuck
from dlrover_agent.scratch_folder import ScratchFolder
from dlrover_agent.settings import Command
from dlrover_agent.warm.forks import ForkedProcess
from dlrover_agent.workers.logs import Logs
from dlrover_agent.workers.supervisor import WorkerSupervisor
from dlrover_agent.workers.worker import Worker
from dlrover_py.process.identity import children
from dlrover_py.process.recipe_cache import KeptRecipe
from dlrover_py.protocol.agents import Assignment, Directive, FailureKind
from tests.slots import no_more_files


class Observer:
    """What a supervisor reports."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.started = asyncio.Event()
        self.step: int | None = None

    def post(self, event: Event) -> None:
        self.events.put_nowait(event)

    def last_step(self, local_rank: int) -> int | None:
        return self.step

    def worker_failed(self) -> None:
        pass

    def round_started(self, assignment: Assignment) -> None:
        self.started.set()

    def warm_starts_changed(self) -> None:
        pass


class Supervisor(WorkerSupervisor):
    """A supervisor of one worker, whose fork fails when the worker is killed."""

    def fail_fork(self, control: socket.socket) -> None:
        worker = self._workers[0]
        worker.child = ForkedProcess(worker.pid, control)  # it does not reach the user's code
        os.kill(worker.pid, signal.SIGKILL)


class OutOfFiles(WorkerSupervisor):
    """A supervisor that has no file descriptor left once a worker's process runs."""

    def _begin(self, worker: Worker, pid: int) -> None:
        with no_more_files():
            super()._begin(worker, pid)


class Unkillable(WorkerSupervisor):
    """A supervisor whose workers hang in the kernel, so that no signal has an effect."""

    stuck_after_s = 0.1

    def _signal(self, number: int, workers: list[Worker]) -> None:
        pass


ASSIGNMENT = Assignment(
    term=1, version=1, incarnation=1, directive=Directive.RUN, reason="", round=1, nnodes=1
)


Kind = TypeVar("Kind", bound=WorkerSupervisor)


@asynccontextmanager
async def started(
    kind: type[Kind], argv: tuple[str, ...] = ("sleep", "100")
) -> AsyncIterator[tuple[Kind, Observer]]:
    """A supervisor that begins to start one worker, and what it reports; for a minute at most."""
    observer, scratch = Observer(), ScratchFolder()
    command = Command(argv, 1, os.environ, cold="the test starts it")
    workers = kind(
        command,
        dict(os.environ),
        scratch=scratch,
        logs=Logs(command, run_id="none", node_id="n0"),
        children=ChildRegistry(),
        observer=observer,
    )
    try:
        async with asyncio.timeout(60):
            workers.start(ASSIGNMENT, None)
            yield workers, observer
    finally:
        await workers.close()
        scratch.close()


async def test_a_worker_that_cannot_be_started_again_has_ended() -> None:
    """Its fork fails while the agent has no more file descriptors for the pipes of a cold start."""
    here, there = socket.socketpair()
    with here, there:
        async with started(Supervisor) as (workers, observer):
            await observer.started.wait()
            workers.fail_fork(here)
            with no_more_files():
                ended = await observer.events.get()
            assert isinstance(ended, WorkerEnded)
            assert ended.failure is not None
            assert ended.failure.kind is FailureKind.START
            assert "its output: Too many open files" in ended.failure.message
            assert workers.alive == set()
            assert isinstance(await observer.events.get(), WorkersGone)


async def test_a_process_that_cannot_be_watched_is_no_worker() -> None:
    """It ran on, and the round never ended: a stop failed before it had set its timer."""
    async with started(OutOfFiles) as (workers, observer):
        ended = await observer.events.get()
        assert isinstance(ended, WorkerEnded)
        assert ended.failure is not None
        assert "could not be started: sleep: " in ended.failure.message
        assert isinstance(await observer.events.get(), WorkersGone)
        assert not children(os.getpid())
        workers.stop(0.1, signal.SIGTERM)


async def test_a_worker_that_survives_sigkill_is_stuck() -> None:
    """A hung driver or file system keeps a process for ever. The agent waited for its end."""
    async with started(Unkillable) as (workers, observer):
        await observer.started.wait()
        (pid,) = workers.pids
        workers.stop(0.1, signal.SIGTERM)
        assert await observer.events.get() == WorkersStuck(1, (pid,))
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await observer.events.get(), WorkerEnded)
        assert isinstance(await observer.events.get(), WorkersGone)


class Keeper:
    """Keeps no recipe, and counts how often one is removed."""

    def __init__(self) -> None:
        self.removals = 0

    def load(self, key: str) -> KeptRecipe | None:
        return None

    def store(self, key: str, recipe: KeptRecipe) -> None:
        raise AssertionError("there is none to keep")

    def remove(self, key: str) -> bool:
        self.removals += 1
        return False


@pytest.mark.parametrize(("step", "removals"), [(None, 1), (3, 0)])
async def test_a_recipe_stays_if_a_worker_that_has_trained_fails(
    tmp_path: Path, step: int | None, removals: int
) -> None:
    """It failed in its first 10 s, but after a step: its start was not at fault."""
    os.mkfifo(go := tmp_path / "go")
    (script := tmp_path / "train.sh").write_text(f"read line < {go}\nexit 1\n")
    async with started(WorkerSupervisor, ("sh", "-e", str(script))) as (workers, observer):
        observer.step, keeper = step, Keeper()
        workers.warm.shelf.use(keeper)
        await workers.warm.shelf.find(60)
        await asyncio.to_thread(go.write_text, "go\n")
        assert isinstance(await observer.events.get(), WorkerEnded)
        await workers.warm.shelf.find(60)  # what came before it in the thread is done
        assert keeper.removals == removals
