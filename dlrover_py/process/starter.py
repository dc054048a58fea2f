"""Start processes in a thread, because an exec hangs as long as the program's file system hangs."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

from dlrover_py.process.blocking import BackgroundThread, inheritable_signals
from dlrover_py.process.identity import children_of_thread

T = TypeVar("T")

START_S = 30.0
"""Seconds for a start. A network file system may take seconds to read a program."""
LOOK_S = 0.05
"""Seconds between two searches for a process that must be killed."""


class _Start:
    """A start. The thread sets ``over`` once nothing is left of a start that was given up."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False


class Starter:
    """A thread that starts processes one after the other, each within a limit.

    One thread forks all of them, and lives as long as this process. There are two reasons. First,
    the kernel sends the parent-death signal (prctl(2), PR_SET_PDEATHSIG) when the forking thread
    ends. Second, the thread distinguishes new processes from orphans
    (:func:`dlrover_py.process.identity.forked_by_other_threads`).
    """

    def __init__(self, name: str) -> None:
        """Create the starter. The thread starts with the first process.

        Args:
            name: Name of the thread.
        """
        self._background = BackgroundThread(name)
        self._thread = 0
        self._before: set[int] = set()
        """Children of the thread from before the start that is under way."""
        self._given_up: list[_Start] = []
        self._clearing: asyncio.Task[None] | None = None

    async def start(
        self,
        make: Callable[[], T],
        *,
        undo: Callable[[T], object],
        not_called: Callable[[], object] | None = None,
        within_s: float = START_S,
    ) -> T:
        """Have the thread call a function that starts a process, and return its result.

        The start is given up at the limit, or when the waiting task is canceled. A process that was
        forked by then is killed by a task; see :meth:`idle`.

        Args:
            make: The function. The thread calls it.
            undo: Called in the thread with the function's result if the start was given up.
            not_called: Called if the function is never called.
            within_s: The limit in seconds, with the time that the start waits for earlier ones.

        Raises:
            OverdueError: If the limit has passed. An exception of the function is raised, too.
        """
        start = _Start()

        def call() -> T:
            self._thread = threading.get_native_id()
            self._before = children_of_thread(self._thread)
            try:
                with inheritable_signals():
                    return make()
            except BaseException:
                start.over = True
                raise

        def late(outcome: T) -> None:
            try:
                undo(outcome)
            finally:
                start.over = True

        def never() -> None:
            start.over = True
            if not_called is not None:
                not_called()

        try:
            return await self._background.run(call, within_s, late, never)
        except BaseException:
            if not start.over:
                self._given_up.append(start)
                if self._clearing is None or self._clearing.done():
                    self._clearing = asyncio.create_task(self._clear())
            raise

    async def idle(self, within_s: float) -> list[int]:
        """Wait until nothing is left of the starts that were given up.

        Without such a start, the method returns immediately.

        Returns:
            Process ids that are left after ``within_s`` seconds: SIGKILL has not ended them.
        """
        if self._clearing is None or self._clearing.done():
            return []
        await asyncio.wait([self._clearing], timeout=within_s)
        return [] if self._clearing.done() else sorted(self._new_children())

    async def _clear(self) -> None:
        """Kill the processes of starts that were given up. A fork may still be under way.

        The search is repeated every ``LOOK_S`` seconds without a limit, until each start is over.
        """
        while self._given_up:
            for pid in self._new_children():
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(pid)
                    try:
                        if pid in self._new_children():  # so the pidfd is that of the child
                            signal.pidfd_send_signal(fd, signal.SIGKILL)
                    finally:
                        os.close(fd)
            await asyncio.sleep(LOOK_S)
            self._given_up = [start for start in self._given_up if not start.over]

    def _new_children(self) -> set[int]:
        """Return the process ids of children that the thread has forked since its last start began.

        Children that were reaped are left out.
        """
        return children_of_thread(self._thread) - self._before


def kill_and_reap(process: "subprocess.Popen[bytes]") -> None:
    """Kill and reap a process whose start was given up; wait for its end without a limit."""
    process.kill()
    process.wait()
