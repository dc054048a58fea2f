"""Children that a zygote forks for the agent: spare at first, then a worker or a store.

A child is forked without a task, and waits on a socket of its own. The agent gives it a task, and
then lets it go. A spare is a child that was forked before it is needed: a fork copies the page
tables of a process with gigabytes, which takes longer than all other steps of a restart together.
"""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.observer import raise_task_error
from dlrover_agent.warm.zygote import receive, send
from dlrover_agent.warm.zygote_start import ZygoteProcess
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.process.identity import exit_code, is_stopped
from dlrover_py.protocol.zygote import (
    GO,
    STARTED,
    ForkAnswer,
    ForkChildren,
    StoreTask,
    WorkerTask,
    encode,
)

FORK_S = 2.0
"""Seconds for a request to the zygote, from its first byte to the last byte of the answer.

After that, a cold start is the better choice.
"""
MAX_FDS = 253
"""File descriptors in one message (SCM_MAX_FD in the kernel)."""


class ForkRequest(NamedTuple):
    """A request to fork one worker."""

    argv: list[str]
    env: dict[str, str]
    out: int
    """File descriptor of its standard output."""
    err: int
    """File descriptor of its standard error."""


@dataclass(slots=True)
class ForkedProcess:
    """A process that a zygote has forked for the agent. It waits for a task, and for :meth:`go`."""

    pid: int
    control: socket.socket
    """The agent's end of a socket pair. The process ends if it is closed before :meth:`go`."""
    process: subprocess.Popen[bytes] | None = None
    """The process if it was started cold; None if it was forked."""

    def go(self) -> None:
        """Let the process run as the worker or store that it was forked for.

        If the process has ended, nothing happens.
        """
        with contextlib.suppress(OSError):
            self.control.send(GO)

    def started(self) -> bool:
        """Return whether the process has reported that it runs the user's code or serves the store.

        The call does not wait. The result is False for a process that has ended without such a
        report.
        """
        self.control.setblocking(False)
        try:
            return self.control.recv(1, socket.MSG_PEEK) == STARTED
        except OSError:
            return False

    def wait(self) -> int:
        """Reap the process, which must have ended (its pidfd is readable); else the call blocks.

        Returns:
            The exit code, or the negative signal number.
        """
        if self.process is not None:
            return self.process.wait()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class ChildStart(NamedTuple):
    """A task for a child, and the descriptors that come with it."""

    task: WorkerTask | StoreTask
    fds: Sequence[int]


class ForkWork:
    """Work for the thread that talks to a zygote: get children, and give each of them its task.

    The object owns duplicates of the descriptors, because the caller may give up and close its own
    at any time. They are closed after :meth:`do`, or with :meth:`give_up`.
    """

    def __init__(
        self, starts: Sequence[ChildStart], checked: Sequence[str], spares: list[ForkedProcess]
    ) -> None:
        """Duplicate the descriptors of the tasks.

        Args:
            starts: The tasks.
            checked: Command line of the workers; empty if nothing is to be checked. The zygote
                refuses if a worker would import other modules than it has.
            spares: As many children as tasks; or none, and they are forked.

        Raises:
            OSError: This process has too many open descriptors.
        """
        self._checked, self._spares = list(checked), spares
        self._starts: list[ChildStart] = []
        try:
            for task, fds in starts:
                copies: list[int] = []
                self._starts.append(ChildStart(task, copies))
                copies += map(os.dup, fds)
        except OSError:
            self.close()
            raise

    def do(self, line: socket.socket) -> tuple[ForkAnswer, list[ForkedProcess]]:
        """Return the zygote's answer, and the children with their tasks. Runs in the thread.

        If a spare has ended, all of them are given up, and others are forked. There are no children
        if the zygote refuses, or cannot fork all of them.

        Args:
            line: Socket to the zygote.

        Raises:
            EOFError: The zygote has closed its socket before the end of its answer.
            OSError: The zygote or a child takes no message, or not within ``FORK_S``.
            ValueError: The answer is not understood.
        """
        children = self._spares
        try:
            answer = ForkAnswer([], "")
            if self._checked or not children:
                wanted = 0 if children else len(self._starts)
                answer, forked = fork(line, wanted, self._checked)
                children = children or forked
            if answer.refusal or not children:
                end_unused(children)
                return answer, []
            try:
                self._give_tasks(children)
            except OSError:
                if not self._spares:
                    raise
                end_unused(children)
                answer, children = fork(line, len(self._starts), ())
                self._give_tasks(children)
            return answer, children
        except BaseException:
            end_unused(children)
            raise
        finally:
            self.close()

    def _give_tasks(self, children: Sequence[ForkedProcess]) -> None:
        for child, (task, fds) in zip(children, self._starts, strict=bool(children)):
            child.control.settimeout(FORK_S)  # the thread must not hang with the child
            send(child.control, encode(task), list(fds))

    def give_up(self) -> None:
        """Release everything, because :meth:`do` is not called."""
        end_unused(self._spares)
        self.close()

    def close(self) -> None:
        """Close the descriptors of the tasks."""
        for _, fds in self._starts:
            for fd in fds:
                os.close(fd)
        self._starts = []


def fork(
    line: socket.socket, count: int, checked: Sequence[str]
) -> tuple[ForkAnswer, list[ForkedProcess]]:
    """Have a zygote fork children without a task, and return its answer and all of them, or none.

    Without enough file descriptors for them, the zygote is not asked.

    Args:
        line: Socket to the zygote.
        count: Number of children.
        checked: As for :class:`ForkWork`.

    Raises:
        EOFError: The zygote has closed its socket before the end of its answer.
        OSError: The zygote takes no message.
        ValueError: The answer is not understood.
    """
    pairs: list[tuple[socket.socket, socket.socket]] = []
    children: list[ForkedProcess] = []
    try:
        try:
            for _ in range(count):
                pairs.append(socket.socketpair())  # noqa: PERF401 - some may be made
        except OSError:
            return ForkAnswer([], ""), []
        request = encode(ForkChildren(list(checked)))
        send(line, request, [theirs.fileno() for _, theirs in pairs])
        answer = ForkAnswer.decode(receive(line)[0])
        if len(answer.pids) == count:
            both = zip(answer.pids, pairs, strict=True)
            children = [ForkedProcess(pid, ours) for pid, (ours, _) in both]
        return answer, children
    finally:
        for ours, theirs in pairs:
            theirs.close()
            if not children:
                ours.close()


def end_unused(children: Sequence[ForkedProcess]) -> None:
    """Let children end that are not needed, by closing their control sockets."""
    for child in children:
        child.control.close()


class Forks:
    """The children of the present zygote: forked when they are needed, or as spares.

    One request to a zygote is made after the other, in a thread.
    """

    def __init__(
        self,
        registry: ChildRegistry,
        thread: BackgroundThread,
        on_failure: Callable[[str, bool], None],
    ) -> None:
        """Create the object, without a zygote.

        Args:
            registry: Registry of the agent's child processes. Spares are added as children that are
                no workers.
            thread: The thread that exchanges messages with zygotes.
            on_failure: Called with the reason if the present zygote does not answer, or refuses.
                The second argument says whether it has refused.
        """
        self._registry, self._thread, self._on_failure = registry, thread, on_failure
        self.zygote: ZygoteProcess | None = None
        """The present zygote."""
        self._spares: list[ForkedProcess] = []
        """Children of the present zygote that have no task."""
        self._wanted = 0
        """Number of spares for the next start; 0 while workers are started or stopped."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the fork of spares."""
        self._forking: asyncio.Task[None] | None = None
        """The task that forks spares."""
        self._too_slow = False
        """Whether a fork of spares has cost a zygote in this run. There are none then."""

    def use(self, zygote: ZygoteProcess | None) -> None:
        """Fork from this zygote from now on, or from none. Spares of the last one end."""
        self.zygote = zygote
        self._registry.non_worker_pids.difference_update(child.pid for child in self._spares)
        end_unused(self._spares)  # they are reaped as orphans
        self._spares = []
        self._fork_missing()

    async def start(
        self, starts: Sequence[ChildStart], checked: Sequence[str] = ()
    ) -> list[ForkedProcess] | None:
        """Give tasks to spares, or to children that the zygote forks now.

        Args:
            starts: The tasks, at most ``MAX_FDS``.
            checked: Command line of the workers; empty for a store. For workers, no spares are
                forked until :meth:`keep_spares`.

        Returns:
            All children, which wait for :meth:`ForkedProcess.go`. None without a zygote, or if not
            all of them could be forked.
        """
        if checked:
            self._wanted = 0
        if self.zygote is None:
            return None
        self._kill_stopped()
        spares = self._spares[: len(starts)] if len(starts) <= len(self._spares) else []
        try:
            work = ForkWork(starts, checked, spares)
        except OSError:  # no more file descriptors
            return None
        del self._spares[: len(spares)]
        zygote = self.zygote
        try:
            answer, children = await self._exchange(zygote, work.do, work.give_up)
        except (EOFError, OSError, ValueError) as error:  # OverdueError, too
            self._report_silence(zygote, error)
            return None
        finally:
            # The caller registers them as what they are now.
            self._registry.non_worker_pids.difference_update(child.pid for child in spares)
        if answer.refusal:
            self._on_failure(answer.refusal, True)
        return children or None

    async def _exchange(
        self,
        zygote: ZygoteProcess,
        work: Callable[[socket.socket], tuple[ForkAnswer, list[ForkedProcess]]],
        not_called: Callable[[], object] | None = None,
    ) -> tuple[ForkAnswer, list[ForkedProcess]]:
        """Return a zygote's answer and its new children, within ``FORK_S`` seconds.

        Args:
            zygote: The zygote.
            work: Function for the thread, which gets the socket to the zygote.
            not_called: Called instead of ``work`` if that is given up before it begins.

        Raises:
            EOFError: The zygote has closed its socket.
            OSError: The zygote does not answer in time, or takes no message.
            ValueError: The answer is not understood.
        """
        call, discard = functools.partial(work, zygote.line), lambda result: end_unused(result[1])
        return await self._thread.run(call, FORK_S, discard, not_called)

    def _report_silence(self, zygote: ZygoteProcess, error: Exception) -> None:
        """Report that a zygote does not answer, unless another one has replaced it."""
        if zygote is self.zygote:
            self._on_failure(f"it does not answer ({error or 'closed'})", False)

    # --- Spares ---

    def keep_spares(self, count: int, after_s: float) -> None:
        """Have so many spares for the next start. Without a zygote, they wait for one.

        Args:
            count: Number of spares.
            after_s: Seconds before they are forked: workers that start now need the processor.
        """
        self._cancel_timer()
        self._wanted = 0 if self._too_slow else min(count, MAX_FDS)
        self._timer = asyncio.get_running_loop().call_later(after_s, self._fork_missing)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fork_missing(self) -> None:
        """Begin to fork the spares that are missing, if there is a zygote."""
        missing = self._wanted - len(self._spares)
        if missing > 0 and self.zygote is not None and self._forking is None:
            self._forking = asyncio.create_task(self._fork(self.zygote, missing))
            self._forking.add_done_callback(raise_task_error)

    async def _fork(self, zygote: ZygoteProcess, count: int) -> None:
        """Fork spares. A refusal, such as for too many processes, costs only the spares.

        A zygote that does not answer is ended, and there are no more spares in this run: the next
        zygote might not answer either.
        """
        try:
            _, children = await self._exchange(zygote, lambda line: fork(line, count, ()))
        except (EOFError, OSError, ValueError) as error:  # OverdueError, too
            if zygote is self.zygote:
                self._wanted, self._too_slow = 0, True
            self._report_silence(zygote, error)
            return
        finally:
            self._forking = None
        if zygote is self.zygote:
            self._spares += children
            self._registry.non_worker_pids.update(child.pid for child in children)
        else:
            end_unused(children)
            self._fork_missing()

    def child_ended(self) -> None:
        """Reap the spares that have ended, and keep the others."""
        for child in self._spares[:]:
            with contextlib.suppress(ChildProcessError):  # it ended before it was registered
                if exit_code(os.P_PID, child.pid) is None:
                    continue
                child.wait()
            self._remove(child)

    def _kill_stopped(self) -> None:
        """Kill the spares that were stopped, for example by SIGSTOP: they would never start."""
        for child in [c for c in self._spares if is_stopped(c.pid)]:
            os.kill(child.pid, signal.SIGKILL)  # it is not reaped, so its id belongs to no other
            self._remove(child)

    def _remove(self, child: ForkedProcess) -> None:
        self._spares.remove(child)
        self._registry.non_worker_pids.discard(child.pid)
        child.control.close()

    async def stop_forking_spares(self) -> None:
        """Fork no more spares until :meth:`keep_spares`.

        If a fork is under way, wait until it is over, or ``FORK_S`` seconds have passed.
        """
        self._cancel_timer()
        self._wanted = 0
        if self._forking is not None:
            await asyncio.wait([self._forking], timeout=FORK_S)
