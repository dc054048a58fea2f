"""A printer of log files, which can follow them while the job runs."""

import contextlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dlrover_py.process.blocking import open_regular
from dlrover_py.protocol.job_view import LogTail
from dlrover_py.protocol.status import JobStatus
from dlrover_py.protocol.words import plain

POLL_S = 0.2
"""Seconds between two looks at the files. Files appear in folders that appear. Looking again is
simpler than inotify, and fast enough for a reader.
"""

AGENT_LOG = "agent.log"
"""Name of an agent's log, in the folder of its node."""
AGENT_LINE_START = b'{"at": '
"""Beginning of a line of an agent's own log."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """A selection of log lines of a job."""

    node: str | None = None
    """Only this node; None for all."""
    rank: int | None = None
    """Only this global rank; None for all."""
    round: int | None = None
    """Only this round; None for all."""
    agents: bool = False
    """The lines of agents and master, instead of those of the workers."""
    follow: bool = False
    """Continue until the job ends."""
    previous: bool = False
    """In a cluster: include Pods that have ended."""


_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")
"""Escape sequences that set the color of text. They are harmless on a terminal."""
_NO_COLOURS = "\x1b[0m"
"""The escape sequence that ends all colors."""
READ_BYTES = 1 << 18
"""Bytes that are read of a file at a time. A live display shows only the newest of them; the
rest is in ``dlrover job logs``.
"""
LONGEST_LINE = 1 << 24
"""Bytes of the longest line. A longer line is shown as several lines."""
KEPT_LINES = 50
"""Number of lines of rank 0 that are kept for the live display."""
TAIL_LINES, TAIL_BYTES = 200, 1 << 16
"""Lines, and bytes of each file, that :func:`tail` reads at most."""
LOGS_NAMED = 8
"""Number of existing logs that the message about a missing log names."""


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line that a worker has printed."""

    node: str
    round: int
    rank: int
    stream: str
    line: str


class WorkerOutput:
    """The new output of the workers of the present round."""

    def __init__(self, folder: Path, *, all_ranks: bool) -> None:
        """Set up the reader; no file is read yet.

        Args:
            folder: folder of the job's logs.
            all_ranks: read the output of every worker, not of rank 0 alone.
        """
        self._folder, self._all_ranks = folder, all_ranks
        self._rounds: deque[tuple[int, list[Path]]] = deque(maxlen=2)
        """The present round and the one before it. Its last lines may appear after the next
        round has begun.
        """
        self._offsets: dict[Path, tuple[int, bytes]] = {}
        """Offset of the next read, and the incomplete last line, of each file."""
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def last_lines(self) -> list[str]:
        """The newest lines of rank 0, including a line that is not complete yet.

        They are at most ``KEPT_LINES`` complete lines that :meth:`new_lines` has read; no file is
        read here.
        """
        now = self._rounds[-1][1] if self._rounds else []
        writing = [
            as_displayed(rest)
            for path, (_, rest) in self._offsets.items()
            if rest and path.parent.name == "0" and path.parents[1] in now
        ]
        return [*self._last_lines, *writing]

    def new_lines(self, status: JobStatus | None, *, end: bool = False) -> list[PrintedLine]:
        """Return what workers have printed since the last call, in this round and the one before.

        Without a status or a round no new file is looked for. Of more than ``READ_BYTES`` new bytes
        in a file, only the last are returned, after a line that says so. Files that cannot be read
        are left out.

        Args:
            status: status of the job, which names the nodes of the round.
            end: nothing follows, so incomplete lines are returned, too.
        """
        if status is not None and status.round:
            folders = [
                self._folder / node.id / str(node.incarnation) / str(status.round)
                for node in status.nodes
                if node.node_rank is not None and (self._all_ranks or node.node_rank == 0)
            ]
            if not self._rounds or self._rounds[-1][0] != status.round:
                self._rounds.append((status.round, folders))
            elif folders:  # members leave one by one at the end; their files stay
                self._rounds[-1][1].extend(f for f in folders if f not in self._rounds[-1][1])
        found = []
        for number, folders in self._rounds:
            for folder in folders:
                with contextlib.suppress(OSError):  # a lost disk costs only its output
                    for path in sorted(
                        folder.glob("*/std*.log" if self._all_ranks else "0/std*.log")
                    ):
                        found += self._lines(path, number, end=end)
        self._last_lines.extend(printed.line for printed in found if printed.rank == 0)
        return found

    def _lines(self, path: Path, number: int, *, end: bool) -> list[PrintedLine]:
        """Return the new lines of one file, and remember where the next call continues.

        An incomplete last line is kept for the next call, unless ``end``.
        """
        at, rest = self._offsets.get(path, (0, b""))
        size = path.stat().st_size
        if size > at:
            with os.fdopen(open_regular(path), "rb") as file:
                if (skipped := size - at - READ_BYTES) > 0:
                    text = f"… {skipped} bytes are not shown: see `dlrover job logs`"
                    at, rest = size - READ_BYTES, f"{text}\n".encode()
                file.seek(at)
                data = file.read(READ_BYTES)
            at, rest = at + len(data), rest + data
        *lines, rest = rest.split(b"\n")
        if end and rest:
            lines, rest = [*lines, rest], b""
        rest = rest[-READ_BYTES:]
        self._offsets[path] = (at, rest)
        node, rank = path.relative_to(self._folder).parts[0], int(path.parent.name)
        return [PrintedLine(node, number, rank, path.stem, as_displayed(line)) for line in lines]


def as_displayed(line: bytes) -> str:
    """Return a line as a terminal shows it in the end.

    After ``\\r`` a progress bar overwrites what it has written.
    """
    parts = [part for part in line.split(b"\r") if part]
    return (parts[-1] if parts else b"").decode("utf-8", "replace")


def for_terminal(origin: str, line: bytes) -> bytes:
    """Return a line of a log with its origin, such that a terminal shows it and does not obey it.

    Control characters are escaped, except for sequences that set colors. The colors end with the
    line.
    """
    text = as_displayed(line)
    parts = _COLOURS.split(text)
    parts[::2] = map(plain, parts[::2])
    end = _NO_COLOURS if len(parts) > 1 else ""
    return f"{plain(origin)}{''.join(parts)}{end}".encode(sys.stdout.encoding or "utf-8", "replace")


def print_logs(folder: Path, while_exists: Path | None, query: LogQuery) -> bool:
    """Print the logs below a folder, each line with its origin; return whether there are any.

    On a terminal, control characters are escaped. A pipe or a file gets the bytes of the logs.
    Ctrl-C, and a pipe that has no reader any more, end it without an error, with True.

    Args:
        folder: holds ``<node>/<incarnation>/<round>/<rank>/{stdout,stderr}.log`` and
            ``<node>/agent.log``.
        while_exists: continue as long as this file exists; None: do not wait.
        query: selection of the lines.
    """
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        return _print_selected(folder, while_exists, query)
    return True  # the reader has stopped, so there were lines


def tail(folder: Path, query: LogQuery) -> LogTail:
    """Return about the last ``TAIL_LINES`` lines of the newest round that the query selects.

    Each file has the same share of them, so all ranks are shown. The lines of one file stay
    together. Of a file with more than ``TAIL_BYTES``, the first line is left out, which is cut.
    Files that cannot be read are left out.
    """
    files = sorted(_selected_files(folder, query))

    def number(path: Path) -> tuple[int, int]:
        _, incarnation, in_round, *_ = (*path.relative_to(folder).parts, "0", "0")
        return tuple(int(p) if p.isdigit() else 0 for p in (in_round, incarnation))  # type: ignore[return-value]

    newest = max((number(path) for path, _ in files), default=(0, 0))
    found: list[tuple[str, list[bytes], bytes]] = []
    for path, origin in files:
        if number(path) == newest:
            with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as stream:
                start = max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES)
                stream.seek(start)
                *lines, rest = stream.read(TAIL_BYTES).split(b"\n")
                found.append((origin, lines[bool(start) :], rest))
    written = [one for one in found if one[1] or one[2]][:TAIL_LINES]
    share = max(1, TAIL_LINES // max(1, len(written)))
    return LogTail(
        [f"[{origin}] {as_displayed(one)}" for origin, all_, _ in written for one in all_[-share:]],
        [f"[{origin}] {as_displayed(rest)}" for origin, _, rest in written if rest],
    )


def missing_log_message(folder: Path, query: LogQuery) -> str:
    """Return a message about a missing log, which names up to ``LOGS_NAMED`` existing ones."""
    given = {"node": query.node, "rank": query.rank, "round": query.round}
    requested = ", ".join(f"{what} {value}" for what, value in given.items() if value is not None)
    found = {
        origin.removesuffix(" err")
        for _, origin in _selected_files(folder, LogQuery(agents=query.agents))
    }
    if not found:
        return "there is no log yet: no worker has printed anything"
    shown = sorted(found)[:LOGS_NAMED]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return f"there is no log of {requested}; existing logs: {', '.join(shown)}{more}"


def _print_selected(folder: Path, while_exists: Path | None, query: LogQuery) -> bool:
    """Print the selected lines; return whether there was a file that could be read.

    With ``while_exists`` it looks every ``POLL_S`` seconds for new lines and files, until that file
    is gone. A file that cannot be opened is reported on standard error once, and tried again
    each time.
    """
    pause = threading.Event()
    terminal = sys.stdout.isatty()
    open_files: dict[Path, tuple[BinaryIO, bytes]] = {}
    told: set[Path] = set()
    while True:
        last = while_exists is None or not while_exists.exists()
        for path, origin in sorted(_selected_files(folder, query)):
            try:
                stream, rest = open_files.get(path) or (os.fdopen(open_regular(path), "rb"), b"")
            except OSError as error:  # a pipe or a device could block, or never end
                if path not in told:
                    told.add(path)
                    sys.stderr.write(f"dlrover: {path}: {error.strerror}\n")
                continue
            more = True
            while more:  # in parts: a file may be larger than the memory
                more = bool(data := stream.read(READ_BYTES))
                *lines, rest = (rest + data).split(b"\n")
                if rest and ((last and not more) or len(rest) > LONGEST_LINE):
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    if (
                        path.name == AGENT_LOG
                        and not query.agents
                        and line.startswith(AGENT_LINE_START)
                    ):
                        continue
                    prefix = f"[{origin}] "
                    text = for_terminal(prefix, line) if terminal else prefix.encode() + line
                    sys.stdout.buffer.write(text + b"\n")
            open_files[path] = (stream, rest)
        sys.stdout.buffer.flush()
        if last:
            for stream, _ in open_files.values():
                stream.close()
            return bool(open_files)
        pause.wait(POLL_S)


def _selected_files(folder: Path, query: LogQuery) -> Iterator[tuple[Path, str]]:
    """Yield the files that the query selects, each with its origin.

    There are none if the folder is missing.
    """
    if query.agents:
        if query.node is None and (folder / "master.log").exists():
            yield folder / "master.log", "master"
        for path in folder.glob(f"*/{AGENT_LOG}"):
            if query.node in (None, path.parent.name):
                yield path, path.parent.name
        return
    for path in folder.glob("*/*/*/*/std*.log"):
        name, _, in_round, of_rank = path.relative_to(folder).parts[:4]
        if query.node not in (None, name) or (
            query.rank is not None and of_rank != str(query.rank)
        ):
            continue
        if query.round is not None and in_round != str(query.round):
            continue
        stream = "" if path.name == "stdout.log" else " err"
        yield path, f"{name} round {in_round} rank {of_rank}{stream}"
    if query.rank is None and query.round is None:
        # A command that never joined has no workers. Its output is in the agent's log.
        for path in folder.glob(f"*/{AGENT_LOG}"):
            name = path.parent.name
            if query.node in (None, name) and not any(path.parent.glob("*/*/*/std*.log")):
                yield path, name
