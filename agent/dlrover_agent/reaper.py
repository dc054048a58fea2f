"""The reaper: a process that outlives its agent, and kills the processes that the agent has left.

It is a separate script (``python -I -S reaper.py ROOT PIPE LIFELINE AGENT MARK FOLDER…``), so that
it holds only two pipes. ROOT is the folder that contains :mod:`dlrover_py`.

The agent writes the lines of :mod:`dlrover_py.protocol.reaper` to the first pipe. A line that is
not understood ends the reaper, and the agent starts another one. End of file means that the agent
is gone. The reaper then kills the remaining sessions. It also kills processes outside these
sessions that carry the agent's mark in their environment. End of file on the lifeline means that
the platform is gone. The agent, which may be frozen, then has ten seconds to end by itself, and is
killed after them. Last, the reaper removes the agent's folders: its temporary folder, and the
memory for checkpoints if no later agent would use it.
"""

import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

if __name__ == "__main__":
    sys.path.append(sys.argv.pop(1))
from dlrover_py.process.identity import (
    ProcessId,
    ignore_sent_to_all,
    marked,
    members,
    signal_at_parents_end,
)
from dlrover_py.protocol.names import ENV_AGENT_MARK
from dlrover_py.protocol.reaper import split

AGENT_END_MS = 10_000
"""Milliseconds that the agent has to end by itself after the end of its platform."""
KILL_MARKED_S = 3.0
"""Seconds to kill marked processes before the folders are removed."""
LAST_KILL_S = 60.0
"""Seconds that the reaper waits at its end until all marked processes are killed."""


def _kill(find: Callable[[], Sequence[ProcessId]]) -> None:
    """Send SIGKILL to the processes that ``find`` returns, until it returns none.

    After 100 searches the function gives up. It does not pause between them.
    """
    for _ in range(100):
        left = find()
        if not left:
            return
        for process in left:
            process.signal(signal.SIGKILL)


def clear(mark: str, folders: Iterable[str | os.PathLike[str]]) -> threading.Thread:
    """Kill all processes that carry an agent's mark, and remove the agent's folders.

    The mark is in the environment of all processes that the agent has started, whether the agent
    still runs or not. Processes of other control groups than this process's are left alone. The
    read of a process's environment may hang with that process. So a thread does it.

    The removal of the folders begins after ``KILL_MARKED_S`` seconds at the latest. Its errors are
    ignored.

    Args:
        mark: Value of the mark.
        folders: Folders to remove.

    Returns:
        The thread that kills, which may still run if a read takes long.
    """
    strays = threading.Thread(
        target=_kill, args=(lambda: marked(ENV_AGENT_MARK, mark),), daemon=True
    )
    strays.start()
    strays.join(KILL_MARKED_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return strays


def main(pipe: int, lifeline: int, agent: ProcessId, mark: str, folders: list[str]) -> None:
    """Wait for the end of the agent, then kill its sessions and marked processes, and clean up.

    The end of the platform alone only starts a timer: after ``AGENT_END_MS`` without a line of the
    agent, the agent is killed. There is no limit otherwise. Signals that are sent to all processes
    of a job are ignored.

    Args:
        pipe: Descriptor of the pipe from the agent.
        lifeline: Descriptor of the pipe from the platform; -1 if there is none.
        agent: The agent's process.
        mark: Mark of the agent in the environment of its processes.
        folders: Folders to remove.

    Raises:
        ValueError: A line of the agent is not understood. Nothing is cleaned up then.
    """
    # If the reaper is stopped (SIGSTOP), the end of the agent continues it.
    signal_at_parents_end(signal.SIGCONT)
    ignore_sent_to_all()
    sessions: set[ProcessId] = set()
    watched = select.poll()
    watched.register(pipe, select.POLLIN | select.POLLHUP)
    if lifeline >= 0:
        watched.register(lifeline, select.POLLIN | select.POLLHUP)
    partial_line, timeout_ms = b"", None
    while True:
        ready = watched.poll(timeout_ms)
        if not ready:  # the platform is gone and the agent did not end, so it is frozen
            agent.signal(signal.SIGKILL)
            break
        if any(fd == pipe for fd, _ in ready):
            data = os.read(pipe, 4096)
            if not data:
                break
            changes, partial_line = split(partial_line + data)
            for change in changes:
                take = sessions.add if change.runs else sessions.discard
                take(ProcessId(change.pid, change.started))
        elif not os.read(lifeline, 64):
            watched.unregister(lifeline)
            timeout_ms = AGENT_END_MS
    _kill(lambda: [process.id for process in members(sessions)])
    clear(mark, folders).join(LAST_KILL_S)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        ProcessId.parse(sys.argv[3]),
        sys.argv[4],
        sys.argv[5:],
    )
