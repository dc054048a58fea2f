"""Outlives a killed agent by a moment, to end what it has left behind.

A script of its own (``python -I -S guardian.py PIPE LIFELINE AGENT FOLDER…``), so that it holds
nothing but two pipes. The agent writes ``+SESSION`` and ``-SESSION`` lines; end of file means
that the agent is gone, and the sessions that are left are killed. The lifeline's end of file
means that the platform is gone: the agent gets a few seconds to end by itself (it may be
frozen). The agent's folders go last: its scratch, and the memory that nobody would adopt.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable

LAST_CHANCE_MS = 10_000
_PR_SET_PDEATHSIG = 1


def _processes(fits: Callable[[list[bytes]], bool]) -> list[int]:
    """Processes whose /proc/PID/stat, from the state on, fits."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{entry}/stat", "rb") as stat:
                # pid (name) state ppid pgrp session …; the name may hold anything.
                fields = stat.read().rpartition(b")")[2].split()
            if fits(fields):
                found.append(int(entry))
    return found


def _over(fields: list[bytes]) -> bool:
    """Whether it has ended. One thread may hang in a driver, with all that the process has open,
    after its first thread has ended."""
    return fields[0] == b"Z" and fields[17] == b"1"


def members(sessions: set[int]) -> list[int]:
    """Running processes of these sessions."""
    return _processes(lambda f: int(f[3]) in sessions and not _over(f))


def children(parent: int, *, ended: bool = False) -> list[int]:
    """Child processes that run, or those that have ended and wait to be reaped."""
    return _processes(lambda f: int(f[1]) == parent and _over(f) is ended)


def kill_sessions(sessions: set[int]) -> None:
    """SIGKILL all processes of the sessions, until no new one turns up."""
    for _ in range(100):
        pids = members(sessions)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def main(pipe: int, lifeline: int, agent: int, folders: list[str]) -> None:
    """Wait for the end of the agent."""
    # Somebody may stop it (SIGSTOP): the end of the agent has it go on.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    watched = select.poll()
    watched.register(pipe, select.POLLIN | select.POLLHUP)
    if lifeline >= 0:
        watched.register(lifeline, select.POLLIN | select.POLLHUP)
    rest, patience = b"", None
    while True:
        ready = watched.poll(patience)
        if not ready:  # the platform is gone and the agent did not end: it is frozen
            if os.getppid() == agent:
                os.kill(agent, signal.SIGKILL)
            break
        if any(fd == pipe for fd, _ in ready):
            data = os.read(pipe, 4096)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                change = sessions.add if line[:1] == b"+" else sessions.discard
                change(int(line[1:]))
        elif not os.read(lifeline, 64):
            watched.unregister(lifeline)
            patience = LAST_CHANCE_MS
    kill_sessions(sessions)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
