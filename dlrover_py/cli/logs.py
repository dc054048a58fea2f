"""Shows log files, and follows them while the job runs."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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
