"""Processes and sessions by names that no other program ever has.

A number names a process until its parent has reaped it, and a session until it is empty; then the
kernel gives the number to any other program. A :class:`ProcessId` holds the start time too, and a
signal goes through a descriptor of the process, so that it never reaches somebody else's.

The standard library is all that this module needs: the guardian runs without packages.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessId(NamedTuple):
    """A process, or the session that it has begun."""

    pid: int
    started: int
    """In ticks since the machine's start: field 22 of ``/proc/PID/stat``."""

    def __str__(self) -> str:
        return f"{self.pid}@{self.started}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what :meth:`__str__` wrote.

        Raises:
            ValueError: it is something else.
        """
        pid, _, started = text.partition("@")
        return cls(int(pid), int(started))

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that has this number now. It may have ended, if it is not reaped.

        Raises:
            ProcessLookupError: none has.
        """
        found = _look(pid)
        if found is None:
            raise ProcessLookupError(f"no process has the number {pid}")
        return cls(*found.id)

    @property
    def alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        found = _look(self.pid)
        return found is not None and found.id == self and not found.over

    def open(self) -> int:
        """A descriptor of the process (pidfd_open(2)).

        Raises:
            ProcessLookupError: it is gone.
        """
        fd = os.pidfd_open(self.pid)
        found = _look(self.pid)  # after that: what the descriptor names has not come later
        if found is None or found.id != self:
            os.close(fd)
            raise ProcessLookupError(f"process {self} is gone")
        return fd

    def signal(self, number: int) -> None:
        """Signal it if it is there and this user may do so."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            fd = self.open()
            try:
                signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


class Process(NamedTuple):
    """A process at one moment."""

    id: ProcessId
    parent: int
    session: int
    over: bool
    """It has ended. While one thread hangs in a driver, with all that the process has open, it has
    not, even after its first thread has ended."""


def _look(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # pid (name) state ppid pgrp session …; the name may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
        over = fields[0] in (b"Z", b"X") and fields[17] == b"1"
        return Process(ProcessId(pid, int(fields[19])), int(fields[1]), int(fields[3]), over)
    except (FileNotFoundError, ProcessLookupError, PermissionError, IndexError):
        return None


def _numbers() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def everybody() -> Iterator[Process]:
    """All processes that can be seen."""
    return (found for pid in _numbers() if (found := _look(pid)) is not None)


def members(sessions: Collection[ProcessId]) -> list[Process]:
    """What runs in these sessions, each named by the process that has begun it.

    A session is exact as long as its first process is not reaped, or somebody of it runs: until
    then the kernel gives its number to no other. Who names one drops it before.
    """
    if not sessions:
        return []
    now = {found.id.pid: found for found in everybody()}
    numbers = {s.pid for s in sessions if s.pid not in now or now[s.pid].id == s}
    return [found for found in now.values() if found.session in numbers and not found.over]


def children(parent: int, *, over: bool = False) -> list[ProcessId]:
    """Child processes that run, or those that have ended and wait to be reaped."""
    return [found.id for found in everybody() if found.parent == parent and found.over is over]


def marked(name: str, value: str) -> list[ProcessId]:
    """What runs with this variable in its environment, in our control groups or below them.

    Batch systems (Slurm, say) hand the environment on to the jobs that are submitted, which are
    none of ours: they have groups of their own.
    """
    ours, needle, found = _groups("self"), os.fsencode(f"{name}={value}"), []
    for pid in _numbers():
        with contextlib.suppress(OSError):
            process = ProcessId.of(pid)  # before its environment, so that this is not another's
            if not within(_groups(pid), ours):
                continue
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if needle in environ.read().split(b"\0") and process.alive:
                    found.append(process)
    return found


def _groups(pid: int | str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            return file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []  # a kernel without them


def within(theirs: list[bytes], ours: list[bytes]) -> bool:
    """Whether control groups, as ``/proc/PID/cgroup`` has them, are ours or below ours."""
    return len(theirs) == len(ours) and all(
        its == our or (its.startswith(our.rstrip(b"/") + b"/") and b"/.." not in its)
        for its, our in zip(theirs, ours, strict=True)
    )


def signal_all(find: Callable[[], Iterable[ProcessId]], number: int) -> None:
    """Signal all that is found, until no new one turns up."""
    done: set[ProcessId] = set()
    while fresh := set(find()) - done:
        for process in fresh:
            process.signal(number)
        done |= fresh


def exit_code(id_type: int, number: int) -> int | None:
    """The exit code (or the negative signal number) of a child that has ended, None if it has not.

    It is not reaped: nobody else gets its number yet.

    Args:
        id_type: ``os.P_PID`` or ``os.P_PIDFD``.
        number: process id or descriptor.
    """
    info = os.waitid(id_type, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    More exactly, when the thread ends that has forked it. A parent that has ended before is not
    told of: compare ``os.getppid()``.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


async def ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the end of a child, by its pidfd; return its exit code."""
    import asyncio  # a guardian does without

    if process.returncode is not None:
        return process.returncode
    fd = os.pidfd_open(process.pid)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.wait()
