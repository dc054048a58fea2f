"""Shows log files, and follows them while the job runs."""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dlrover_py.protocol.status import JobStatus

LOOK_S = 0.2
"""Files appear in folders that appear: a look now and then is simpler than inotify, and enough
for eyes."""

AGENT_LOG = "agent.log"
OURS = b'{"at": '
"""How a line of an agent's own log begins."""


@dataclass(frozen=True, slots=True)
class LogWish:
    """Which lines of a job are to be shown."""

    node: str | None = None
    rank: int | None = None
    round: int | None = None
    agents: bool = False
    """What agents and master say, not the workers."""
    follow: bool = False
    """Go on until the job ends."""
    previous: bool = False
    """In a cluster: of Pods that have ended, too."""


READ_BYTES = 1 << 18
"""At most so much of each file is read at once, the newest; the rest is in ``dlrover job logs``."""
KEPT_LINES = 50


@dataclass(frozen=True, slots=True)
class Printed:
    """One line that a worker has printed."""

    node: str
    round: int
    rank: int
    stream: str
    line: str


class Output:
    """What the workers of the present round print, as it comes."""

    def __init__(self, folder: Path, *, all_ranks: bool) -> None:
        """Read nothing yet.

        Args:
            folder: of the job's logs.
            all_ranks: of every worker, not of rank 0 alone.
        """
        self._folder, self._all = folder, all_ranks
        self._rounds: deque[tuple[int, list[Path]]] = deque(maxlen=2)
        """The last one too: its last words may come when the next has begun."""
        self._read: dict[Path, tuple[int, bytes]] = {}
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def last_lines(self) -> list[str]:
        """The newest lines of rank 0, the one that is being written too."""
        now = self._rounds[-1][1] if self._rounds else []
        writing = [
            _shown(rest)
            for path, (_, rest) in self._read.items()
            if rest and path.parent.name == "0" and path.parents[1] in now
        ]
        return [*self._last, *writing]

    def fresh(self, status: JobStatus | None, *, end: bool = False) -> list[Printed]:
        """What has been printed since the last call.

        Args:
            status: it says where the workers of the round are.
            end: nothing follows: lines that are not finished count too.
        """
        if status is not None and status.round:
            folders = [
                self._folder / node.id / str(node.incarnation) / str(status.round)
                for node in status.nodes
                if node.node_rank is not None and (self._all or node.node_rank == 0)
            ]
            if not self._rounds or self._rounds[-1][0] != status.round:
                self._rounds.append((status.round, folders))
            elif folders:  # members leave one by one at the end, but their files stay
                self._rounds[-1][1].extend(f for f in folders if f not in self._rounds[-1][1])
        found = []
        for number, folders in self._rounds:
            for folder in folders:
                with contextlib.suppress(OSError):  # a lost disk costs what would be shown
                    for path in sorted(folder.glob("*/std*.log" if self._all else "0/std*.log")):
                        found += self._lines(path, number, end=end)
        self._last.extend(printed.line for printed in found if printed.rank == 0)
        return found

    def _lines(self, path: Path, number: int, *, end: bool) -> list[Printed]:
        at, rest = self._read.get(path, (0, b""))
        size = path.stat().st_size
        if size > at:
            with path.open("rb") as file:
                if (skipped := size - at - READ_BYTES) > 0:
                    words = f"… {skipped} bytes are not shown: see `dlrover job logs`"
                    at, rest = size - READ_BYTES, f"{words}\n".encode()
                file.seek(at)
                data = file.read(READ_BYTES)
            at, rest = at + len(data), rest + data
        *lines, rest = rest.split(b"\n")
        if end and rest:
            lines, rest = [*lines, rest], b""
        rest = rest[-READ_BYTES:]
        self._read[path] = (at, rest)
        node, rank = path.relative_to(self._folder).parts[0], int(path.parent.name)
        return [Printed(node, number, rank, path.stem, _shown(line)) for line in lines]


def _shown(line: bytes) -> str:
    """As a terminal shows it in the end: a progress bar writes over what it has written."""
    parts = [part for part in line.split(b"\r") if part]
    return (parts[-1] if parts else b"").decode("utf-8", "replace")


def show(folder: Path, alive: Path | None, wish: LogWish) -> None:
    """Print the logs below a folder, each line with its origin.

    Args:
        folder: ``<node>/<incarnation>/<round>/<rank>/{stdout,stderr}.log``, ``<node>/agent.log``.
        alive: go on as long as this file is there; None: do not wait.
        wish: which of them.
    """
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _show(folder, alive, wish)


def _show(folder: Path, alive: Path | None, wish: LogWish) -> None:
    rest_a_moment = threading.Event()
    open_files: dict[Path, tuple[BinaryIO, bytes]] = {}
    while True:
        last = alive is None or not alive.exists()
        for path, origin in sorted(_files(folder, wish)):
            stream, rest = open_files.get(path) or (path.open("rb"), b"")
            *lines, rest = (rest + stream.read()).split(b"\n")
            if last and rest:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if path.name == AGENT_LOG and not wish.agents and line.startswith(OURS):
                    continue
                sys.stdout.buffer.write(f"[{origin}] ".encode() + line + b"\n")
            open_files[path] = (stream, rest)
        sys.stdout.buffer.flush()
        if last:
            for stream, _ in open_files.values():
                stream.close()
            return
        rest_a_moment.wait(LOOK_S)


def _files(folder: Path, wish: LogWish) -> Iterator[tuple[Path, str]]:
    if wish.agents:
        if wish.node is None and (folder / "master.log").exists():
            yield folder / "master.log", "master"
        for path in folder.glob(f"*/{AGENT_LOG}"):
            if wish.node in (None, path.parent.name):
                yield path, path.parent.name
        return
    for path in folder.glob("*/*/*/*/std*.log"):
        name, _, in_round, of_rank = path.relative_to(folder).parts[:4]
        if wish.node not in (None, name) or (wish.rank is not None and of_rank != str(wish.rank)):
            continue
        if wish.round is not None and in_round != str(wish.round):
            continue
        stream = "" if path.name == "stdout.log" else " err"
        yield path, f"{name} round {in_round} rank {of_rank}{stream}"
    if wish.rank is None and wish.round is None:
        # A command that never joined has no workers. What it wrote is where an agent writes.
        for path in folder.glob(f"*/{AGENT_LOG}"):
            name = path.parent.name
            if wish.node in (None, name) and not any(path.parent.glob("*/*/*/std*.log")):
                yield path, name
