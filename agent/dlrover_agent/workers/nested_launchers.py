"""Detection of another launcher below the workers, which their command line does not show.

A launcher is a program such as ``torchrun`` that starts workers. A world is the set of workers that
train together. If the workers' command is a shell script that runs ``torchrun``, each worker
becomes a world of its own. The job then succeeds with many trainings of one worker. Processes that
such a launcher starts have another world in their environment than the worker that started the
launcher. A dedicated thread looks for them, because a read of ``/proc/PID/environ`` may hang with
the process.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlrover_py.process.identity import ProcessId, all_processes, environment
from dlrover_py.protocol.names import ENV_AGENT_SOCKET, ENV_ROUND

LOOK_AFTER_S = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
"""Seconds from the start of the first round to each look.

A launcher needs some seconds to start its processes.
"""
MAX_PROCESSES = 1000
"""Largest number of processes whose environment is read in one look."""
MAX_ENVIRONMENT_BYTES = 256 * 1024
"""Bytes of an environment that are read."""
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which launchers other than torch's write the size of their world."""


@dataclass(frozen=True, slots=True)
class ExpectedWorld:
    """The world of one round, as it is in the environment of the round's workers."""

    round: int
    size: int
    port: int
    agent_socket: str
    """Path of the socket on which the workers reach their agent."""
    inherited: frozenset[str] = frozenset()
    """Variables of other launchers in the environment of the agent itself."""

    def other(self, environ: Mapping[str, str]) -> str:
        """Return the world size in a process's environment, if it belongs to another world.

        Args:
            environ: Environment of a descendant of a worker.

        Returns:
            The size; empty if the process belongs to this world, or to another round.
        """
        if environ.get(ENV_ROUND) != str(self.round):
            return ""  # a forked process, or one of the previous round
        if environ.get(ENV_AGENT_SOCKET) != self.agent_socket:
            return ""  # a worker of an elastic-run --standalone, which may run within a worker
        for name in LAUNCHER_VARIABLES:
            if name in environ and name not in self.inherited:
                return environ[name]
        size, port = environ.get("WORLD_SIZE"), environ.get("MASTER_PORT")
        if size is None or port is None or "RANK" not in environ:
            return ""
        return "" if (size, port) == (str(self.size), str(self.port)) else size


class LauncherWatch:
    """A watch that looks for another launcher a few times, and reports the first finding."""

    def __init__(self, on_found: Callable[[str], None]) -> None:
        """Create the watch. The thread starts with the first call of :meth:`watch`.

        Args:
            on_found: Called with a description of the finding, in the running event loop.
        """
        self._on_found, self._loop = on_found, asyncio.get_running_loop()
        self._round: tuple[ExpectedWorld, Sequence[ProcessId | None]] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, world: ExpectedWorld, workers: Sequence[ProcessId | None]) -> None:
        """Look below these workers from now on, at the remaining times of the first call.

        The first call starts the thread, which looks at the times in ``LOOK_AFTER_S``. After the
        last time, or after a finding, a call has no effect.

        Args:
            world: World of the workers' round.
            workers: Workers by local rank; None for one that does not run.
        """
        self._round = world, workers
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nested", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking. The method does not wait for a look that hangs."""
        self._ended.set()

    def _run(self) -> None:
        """Look at the set times until there is a finding. Runs in the thread.

        The finding is reported in the event loop. The thread then ends.
        """
        before = 0.0
        for after in LOOK_AFTER_S:
            if self._ended.wait(after - before):
                return
            before = after
            assert self._round is not None
            found = find_launcher(*self._round)
            if found:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    self._loop.call_soon_threadsafe(self._report, found)
                return

    def _report(self, found: str) -> None:
        if not self._ended.is_set():
            self._on_found(found)


def find_launcher(world: ExpectedWorld, workers: Sequence[ProcessId | None]) -> str:
    """Describe a process that another launcher has started below the workers.

    The function reads environments, so it may hang with a process. Processes that it may not read
    are skipped, and so are ended workers.

    Args:
        world: World of the workers' round.
        workers: Workers by local rank; None for one that does not run.

    Returns:
        The description; empty if there is no such process, or if the agent can open no more files.
    """
    with contextlib.suppress(OSError):  # no more file descriptors: the next look may find it
        for local_rank, pid in _below(workers):
            size = world.other(_environment(pid))
            if size:
                return (
                    f"worker {local_rank} has started process {pid} ({_command(pid)}) in a world "
                    f"of {size} of its own, not in this round's of {world.size}: is there another "
                    "launcher in the script? elastic-run replaces it, so remove it"
                )
    return ""


def _below(workers: Sequence[ProcessId | None]) -> Iterator[tuple[int, int]]:
    """Yield the local rank of each worker with the pids of its descendants, the nearest first.

    Raises:
        OSError: There are no more file descriptors.
    """
    children: dict[int, list[int]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process.id.pid)
    for local_rank, worker in enumerate(workers):
        # A worker that has ended is skipped: its process id may belong to another program by now.
        if worker is not None and worker.alive:
            for pid in _descendants(worker.pid, children):
                yield local_rank, pid


def _descendants(pid: int, children: Mapping[int, list[int]]) -> Iterable[int]:
    """Return at most :data:`MAX_PROCESSES` descendants of a process, the nearest first."""
    found = list(children.get(pid, ()))
    for one in found:
        if len(found) >= MAX_PROCESSES:
            break
        found += children.get(one, ())
    return found[:MAX_PROCESSES]


def _environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    try:
        text = environment(pid, MAX_ENVIRONMENT_BYTES)
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in text.split(b"\0") if part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _command(pid: int) -> str:
    """Return the beginning of a process's command line, or "it has ended"."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(200)
    except OSError:
        return "it has ended"
    return text.replace(b"\0", b" ").decode(errors="replace").strip()
