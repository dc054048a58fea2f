"""Outlives a killed agent by a moment, to end what it has left behind.

A script of its own (``python -I -S guardian.py ROOT PIPE LIFELINE AGENT MARK FOLDER…``), so that it
holds nothing but two pipes; ROOT is where :mod:`dlrover_py` is. The agent writes ``+SESSION`` and
``-SESSION`` lines; end of file means that the agent is gone, and the sessions that are left are
killed, and what has left them but carries the agent's mark in its environment. The lifeline's end
of file means that the platform is gone: the agent gets a few seconds to end by itself (it may be
frozen). The agent's folders go last: its scratch, and the memory that nobody would adopt.
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
from dlrover_py.processes import ProcessId, marked, members, signal_at_parents_end
from dlrover_py.protocol.names import ENV_AGENT_MARK

LAST_CHANCE_MS = 10_000
STRAYS_S = 3.0
"""What comes after them waits so long for their end."""
LAST_STRAYS_S = 60.0


def _kill(find: Callable[[], Sequence[ProcessId]]) -> None:
    """SIGKILL all that is found, until there is nothing."""
    for _ in range(100):
        left = find()
        if not left:
            return
        for process in left:
            process.signal(signal.SIGKILL)


def clear(mark: str, folders: Iterable[str | os.PathLike[str]]) -> threading.Thread:
    """SIGKILL all that carries an agent's mark, and remove the agent's folders.

    To read an environment may hang with its process: that is done by a thread, which is returned
    and may go on where it takes long.
    """
    strays = threading.Thread(
        target=_kill, args=(lambda: marked(ENV_AGENT_MARK, mark),), daemon=True
    )
    strays.start()
    strays.join(STRAYS_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return strays


def main(pipe: int, lifeline: int, agent: ProcessId, mark: str, folders: list[str]) -> None:
    """Wait for the end of the agent."""
    # Somebody may stop it (SIGSTOP): the end of the agent has it go on.
    signal_at_parents_end(signal.SIGCONT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[ProcessId] = set()
    watched = select.poll()
    watched.register(pipe, select.POLLIN | select.POLLHUP)
    if lifeline >= 0:
        watched.register(lifeline, select.POLLIN | select.POLLHUP)
    rest, patience = b"", None
    while True:
        ready = watched.poll(patience)
        if not ready:  # the platform is gone and the agent did not end: it is frozen
            agent.signal(signal.SIGKILL)
            break
        if any(fd == pipe for fd, _ in ready):
            data = os.read(pipe, 4096)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                change = sessions.add if line[:1] == b"+" else sessions.discard
                change(ProcessId.parse(line[1:].decode()))
        elif not os.read(lifeline, 64):
            watched.unregister(lifeline)
            patience = LAST_CHANCE_MS
    _kill(lambda: [process.id for process in members(sessions)])
    clear(mark, folders).join(LAST_STRAYS_S)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        ProcessId.parse(sys.argv[3]),
        sys.argv[4],
        sys.argv[5:],
    )
