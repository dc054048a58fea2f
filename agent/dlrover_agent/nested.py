"""Finds another launcher below the workers: one that their command line does not show.

A shell script that runs ``torchrun`` makes each worker a world of its own, and the job succeeds
with many trainings of one worker. What such a launcher starts has another world in its environment
than the worker that started the launcher. A thread of its own looks for that, since a read of
``/proc/PID/environ`` may hang with the process.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlrover_py.processes import ProcessId, everybody
from dlrover_py.protocol.names import ENV_ROUND

LOOK_AFTER_S = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
"""From the start of the first round. A launcher needs some seconds to start its processes."""
MOST = 1000
"""Processes whose environment is read in one look."""
MOST_BYTES = 256 * 1024
"""Of an environment."""
OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where launchers that are not torch's write the size of their world."""


@dataclass(frozen=True, slots=True)
class World:
    """The world of one round, as its workers have it in their environment."""

    round: int
    size: int
    port: int
    inherited: frozenset[str] = frozenset()
    """Variables of other launchers that the agent itself was given."""

    def other(self, environ: Mapping[str, str]) -> str:
        """The size of the world that a process below a worker was given, if it is another one;
        else empty."""
        if environ.get(ENV_ROUND) != str(self.round):
            return ""  # a process that was forked, or one of the round before
        for name in OTHERS:
            if name in environ and name not in self.inherited:
                return environ[name]
        size, port = environ.get("WORLD_SIZE"), environ.get("MASTER_PORT")
        if size is None or port is None or "RANK" not in environ:
            return ""
        return "" if (size, port) == (str(self.size), str(self.port)) else size


class Watch:
    """Looks a few times, and tells of the first finding."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Start nothing yet.

        Args:
            tell: takes the finding, in words; called by the running event loop.
        """
        self._tell, self._loop = tell, asyncio.get_running_loop()
        self._round: tuple[World, Sequence[ProcessId | None]] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def below(self, world: World, workers: Sequence[ProcessId | None]) -> None:
        """From now on look below these workers.

        Args:
            world: of their round.
            workers: by local rank; None for one that does not run.
        """
        self._round = world, workers
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nested", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look no more. A look that hangs is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        before = 0.0
        for after in LOOK_AFTER_S:
            if self._ended.wait(after - before):
                return
            before = after
            assert self._round is not None
            found = look(*self._round)
            if found:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    self._loop.call_soon_threadsafe(self._take, found)
                return

    def _take(self, found: str) -> None:
        if not self._ended.is_set():
            self._tell(found)


def look(world: World, workers: Sequence[ProcessId | None]) -> str:
    """What a launcher below the workers has started, in words; empty if there is none.

    Args:
        world: of the workers' round.
        workers: by local rank.
    """
    children: dict[int, list[int]] = {}
    for process in everybody():
        children.setdefault(process.parent, []).append(process.id.pid)
    for local_rank, worker in enumerate(workers):
        # One that has ended since has none; its number may be another program's by now.
        for pid in _below(worker.pid, children) if worker is not None and worker.alive else ():
            size = world.other(_environment(pid))
            if size:
                return (
                    f"worker {local_rank} has started process {pid} ({_command(pid)}) in a world "
                    f"of {size} of its own, not in this round's of {world.size}: is there another "
                    "launcher in the script? elastic-run takes its place"
                )
    return ""


def _below(pid: int, children: Mapping[int, list[int]]) -> Iterable[int]:
    """Descendants of a process, the nearest first, and no more than :data:`MOST`."""
    found = list(children.get(pid, ()))
    for one in found:
        if len(found) >= MOST:
            break
        found += children.get(one, ())
    return found[:MOST]


def _environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read(MOST_BYTES)
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in text.split(b"\0") if part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _command(pid: int) -> str:
    """The first words of a process's command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(200)
    except OSError:
        return "it has ended"
    return text.replace(b"\0", b" ").decode(errors="replace").strip()
