"""Starts of processes that hang, are given up, or are cancelled."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlrover_agent.workers.supervisor import reap_orphans
from dlrover_py.process.blocking import OverdueError
from dlrover_py.process.identity import children, forked_by_other_threads
from dlrover_py.process.starter import Starter, kill_and_reap


@contextmanager
def hangs(program: Path) -> Iterator[None]:
    """Its exec waits, as with a dead NFS server, until the lease that is held here is broken
    (fcntl(2), F_SETLEASE)."""
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    leased = os.open(program, os.O_RDWR)
    fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGURG)  # it is ignored
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield
    finally:
        os.close(leased)


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not look():
            await asyncio.sleep(0.01)


def sleeper(*program: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(program or ("sleep", "100"), start_new_session=True)


async def test_a_program_that_hangs_is_given_up_and_the_next_start_is_made(tmp_path: Path) -> None:
    starter, unmade = Starter("test"), []
    path = tmp_path / "program"
    with hangs(path):
        hung = asyncio.create_task(
            starter.start(lambda: sleeper(str(path)), undo=kill_and_reap, within_s=0.5)
        )
        await until(forked_by_other_threads)
        second = starter.start(
            sleeper, undo=kill_and_reap, not_called=lambda: unmade.append(1), within_s=0.01
        )
        with pytest.raises(OverdueError, match=r"no answer within 0\.01 s"):
            await second
        assert unmade, "it is told that its call is never made"
        with pytest.raises(OverdueError, match=r"no answer within 0\.5 s"):
            await hung
        assert await starter.idle(60) == []
        assert not forked_by_other_threads(), "what was born is killed and reaped"
        process = await starter.start(sleeper, undo=kill_and_reap)
    assert process.poll() is None, "the thread lives on, and so do its children"
    kill_and_reap(process)


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    starter = Starter("test")
    for turns in range(40):  # at any point of a start
        task = asyncio.create_task(starter.start(sleeper, undo=kill_and_reap))
        for _ in range(turns):
            await asyncio.sleep(0.0002)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, subprocess.Popen):
            kill_and_reap(outcome)
        assert await starter.idle(60) == []
        assert not forked_by_other_threads()


async def test_a_process_that_was_just_born_is_no_orphan() -> None:
    starter = Starter("test")
    process = await starter.start(
        lambda: subprocess.Popen((sys.executable, "-c", "import sys; sys.exit(3)")),
        undo=kill_and_reap,
    )
    await until(lambda: process.pid in {p.pid for p in children(os.getpid(), ended=True)})
    reap_orphans(set())
    assert process.wait() == 3


async def test_a_process_has_the_signal_mask_of_the_loop() -> None:
    starter = Starter("test")
    look = "import signal; print(signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"

    def make() -> "subprocess.Popen[bytes]":
        return subprocess.Popen((sys.executable, "-c", look), stdout=subprocess.PIPE)

    async def seen() -> bytes:
        process = await starter.start(make, undo=kill_and_reap)
        return (await asyncio.to_thread(process.communicate))[0]

    assert await seen() == b"False\n"
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        assert await seen() == b"True\n"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
