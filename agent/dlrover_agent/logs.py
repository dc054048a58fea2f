"""Where the workers' output goes: files, the console, both; and the pumps that carry it there.

The flags mean what they mean to torchrun (torch/distributed/elastic/multiprocessing/api.py): a
stream is shown as it is, redirected into a file, or tee'd into a file and onto the console with a
prefix. But every stream that is not simply shown goes through a pipe of ours, so that a full disk
costs log lines and not the training, and each round has a folder of its own.
"""

import asyncio
import collections
import contextlib
import errno
import fcntl
import logging
import math
import os
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from dlrover_agent.settings import Command, Output
from dlrover_py.aside import Aside, Outlet, write_all
from dlrover_py.owner import NotOwn, open_own
from dlrover_py.protocol.agents import Assignment
from dlrover_py.protocol.errors import ConfigError

log = logging.getLogger("agent.logs")

LAST_WORDS = 131_072
"""Bytes of standard error that are kept to explain a failure; some exceptions list a model."""
AT_ONCE = 16
"""Pieces of 64 kB: a pipe holds a megabyte at most, unless root says otherwise."""
PAUSE_S = 0.02
OUT, ERR = 1, 2
COUNT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class Stream:
    """What becomes of one stream of one worker."""

    files: tuple[Path, ...] = ()
    shown: bool = True
    prefix: str = ""
    """Before each line on the console and in the filtered file."""
    words: tuple[str, ...] = ()
    filtered: Path | None = None
    """Lines with one of the words go there as well, from all local ranks."""

    @property
    def plain(self) -> bool:
        """It is the agent's own stream, with nothing between."""
        return self.shown and not (self.files or self.prefix or self.filtered)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one worker writes."""

    out: Stream
    err: Stream
    error_file: str
    """For ``@record``; empty if there is none."""


class Logs:
    """The destinations of this node's workers, round by round."""

    def __init__(self, command: Command, *, run_id: str, node_id: str) -> None:
        """Make the folder of this run.

        Raises:
            ConfigError: it cannot be made; or the logs specs that are asked for cannot be used.
        """
        self._command, self._node_id = command, node_id
        self._rounds = 0
        output = command.output
        self._folder: Path | None = None
        self._specs: Callable[[Sequence[dict[str, str]]], list[Destination]] | None = None
        if output.specs is not None:
            from dlrover_agent.plugins import logs_specs

            self._specs = logs_specs(output, command.nproc, command.role)
        elif output.log_dir is not None and not _nowhere(output):
            self._folder = _folder(output.log_dir, run_id)
        elif output.log_dir is None and output.wants_files and command.log_dir is None:
            self._folder = _folder(None, f"torchelastic_{run_id}")
        if self._folder is not None:
            level = logging.INFO if output.log_dir is not None else logging.WARNING
            log.log(level, "log_folder", extra={"path": str(self._folder)})

    def of_round(
        self, a: Assignment, envs: Sequence[dict[str, str]], scratch: Path
    ) -> list[Destination]:
        """Where the workers of a round write, by local rank.

        Args:
            a: the round.
            envs: their environments; logs specs of others may change them.
            scratch: for error files that need not stay.
        """
        folder = f"check_{a.check}"
        if not a.check:
            folder, self._rounds = f"attempt_{self._rounds}", self._rounds + 1
        found = self._of_specs(envs) if not a.check else []
        if not found:
            found = [self._destination(a, folder, i, scratch) for i in range(len(envs))]
        if self._command.log_dir is None:
            return found
        return [self._for_platform(a, i, d) for i, d in enumerate(found)]

    def _of_specs(self, envs: Sequence[dict[str, str]]) -> list[Destination]:
        """As a plug-in wants it; none if there is no plug-in, or it has failed."""
        if self._specs is None:
            return []
        counts = [env[COUNT] for env in envs]
        for env in envs:  # it names, and clears, folders by this: one for each round
            env[COUNT] = str(self._rounds - 1)
        try:
            return self._specs(envs)
        except Exception as error:  # noqa: BLE001 - anything may go wrong in a class of others
            why = f"{type(error).__name__}: {error}"
            log.warning("logs_specs_failed", extra={"why": why, "then": "as without them"})
            return []
        finally:
            for env, count in zip(envs, counts, strict=True):
                env[COUNT] = count

    def _destination(
        self, a: Assignment, attempt: str, local_rank: int, scratch: Path
    ) -> Destination:
        output = self._command.output
        if _nowhere(output):
            return Destination(Stream(), Stream(), "")
        folder = shared = None
        if self._folder is not None and _is_still_own(self._folder):
            shared = self._folder / attempt
            folder = _made(shared / str(local_rank))
        prefix = output.line_prefix(self._command.role, a.rank_offset + local_rank, local_rank)
        words_of = {OUT: output.out_words, ERR: output.err_words}
        streams = []
        for bit, name in ((OUT, "stdout"), (ERR, "stderr")):
            words = words_of[bit]
            tee = bool(output.of(output.tee, local_rank) & bit)
            filed = tee or bool(output.of(output.redirects, local_rank) & bit)
            hidden = output.shown is not None and local_rank not in output.shown
            streams.append(
                Stream(
                    files=(folder / f"{name}.log",) if filed and folder is not None else (),
                    shown=(tee or not filed or folder is None) and not hidden,
                    prefix=prefix if tee else "",
                    words=words if tee and not hidden else (),
                    filtered=shared / f"filtered_{name}.log"
                    if tee and words and not hidden and shared is not None and folder is not None
                    else None,
                )
            )
        kept = folder or _made(scratch / f"{attempt}-{local_rank}")
        file = str(kept / "error.json") if kept is not None else ""
        return Destination(streams[0], streams[1], file)

    def _for_platform(self, a: Assignment, local_rank: int, d: Destination) -> Destination:
        """In a job, both streams are kept where the platform looks for them; what the flags want
        comes on top of it: ``<dir>/<node>/<incarnation>/<round>/<rank>``."""
        assert self._command.log_dir is not None
        place = Path(
            self._node_id, str(a.incarnation), str(a.round), str(a.rank_offset + local_rank)
        )
        folder = _made(self._command.log_dir / place)

        def kept(stream: Stream, name: str) -> Stream:
            files = (*stream.files, folder / name) if folder is not None else stream.files
            return replace(stream, files=files, shown=stream.shown and bool(stream.prefix))

        return replace(d, out=kept(d.out, "stdout.log"), err=kept(d.err, "stderr.log"))


def _nowhere(output: Output) -> bool:
    return output.log_dir is not None and str(output.log_dir) == os.devnull


def _folder(base: Path | None, run_id: str) -> Path:
    try:
        base = base or Path(tempfile.gettempdir())
        base.mkdir(parents=True, exist_ok=True)
        name = run_id.replace("/", "_")[:100]
        return Path(tempfile.mkdtemp(prefix=f"{name}_", dir=base))
    except OSError as error:
        raise ConfigError(
            f"--log-dir {base or ''}: cannot be used as a folder: {error.strerror}"
        ) from error


def _is_still_own(folder: Path) -> bool:
    """Say whether the folder of a run is still this user's.

    Another user who owns the folder above it may have put a link there instead.
    """
    try:
        os.close(open_own(folder, os.O_DIRECTORY, shared=True))
    except FileNotFoundError:
        return True  # it is made again
    except (OSError, NotOwn) as error:
        log.warning("log_lines_lost", extra={"path": str(folder), "why": str(error)})
        return False
    return True


def _made(folder: Path) -> Path | None:
    """The folder; None where it cannot be made, which costs log lines and not the training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("log_lines_lost", extra={"path": str(folder), "why": error.strerror})
        return None
    return folder


class Files:
    """Writes the workers' log files, in a thread: a disk may be full, lost, or hang."""

    HIGH, MOST = 1 << 22, 1 << 24
    """Bytes that wait: workers write no further; the oldest are lost."""
    HUNG_S = 1.0
    """A disk that takes nothing for so long costs lines, and holds up no worker any more."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._aside = Aside("log-files", most=self.MOST)

    @property
    def slow(self) -> bool:
        """Whether who has more to write should wait a moment."""
        return self._aside.waiting > self.HIGH and self._aside.stuck_s < self.HUNG_S

    def file(self, path: Path) -> "_File":
        """A file that is about to be opened, and written from its end on."""
        return _File(path, self._aside)

    def finish(self, within_s: float) -> None:
        """Wait, blocking, until all is written, or nothing was for so long."""
        if not self._aside.finish(within_s):
            log.warning("log_lines_lost", extra={"why": f"no answer within {within_s:g} s"})


class _File:
    """A log file that may be lost: a full or lost disk costs lines, not the training."""

    def __init__(self, path: Path, aside: Aside) -> None:
        self._path: Path | None = path
        self._aside = aside
        self._file: BinaryIO | None = None
        self._said = False
        aside.post(lambda: self._write(b""))

    def write(self, data: bytes) -> None:
        self._aside.post(lambda: self._write(data), len(data))
        if self._aside.dropped and not self._said:
            self._said = True
            log.warning("log_lines_lost", extra={"path": str(self._path), "why": "its disk hangs"})

    def close(self) -> None:
        self._aside.post(self._close)

    # --- in the thread ---

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None and self._path is not None:
                self._file = self._path.open("ab", buffering=0)
            if self._file is not None:
                write_all(self._file.fileno(), data)
        except OSError as error:
            if not self._said:
                self._said = True
                path = str(self._path)
                log.warning("log_lines_lost", extra={"path": path, "why": error.strerror})
            if error.errno != errno.ENOSPC:
                self._path = self._file = None

    def _close(self) -> None:
        self._path = None
        if self._file is not None:
            self._file.close()


class Pump:
    """Moves one stream of a worker to where it goes."""

    def __init__(
        self, stream: Stream, console: Outlet, files: Files, *, terminal: bool = False
    ) -> None:
        """Open the pipe, or a terminal where the worker should find one.

        Args:
            stream, console, files: where it goes.
            terminal: our own stream is one, and the worker's is shown there as it is.
        """
        self._stream, self._console = stream, console if stream.shown else None
        self._fd, self.end = (terminal and stream.plain and _terminal()) or os.pipe()
        """``end`` is the worker's, to be closed by who starts it."""
        self._disk = files
        self._files = [files.file(path) for path in stream.files]
        self._filtered = files.file(stream.filtered) if stream.filtered is not None else None
        self._prefix = stream.prefix.encode()
        self._words = [word.encode() for word in stream.words]
        self._line = b""
        self._new_line = True
        self._tail: collections.deque[tuple[float, bytes]] = collections.deque()
        """The last that was read, each piece with its time."""
        self._kept = 0
        os.set_blocking(self._fd, False)
        self._pause: asyncio.TimerHandle | None = None
        asyncio.get_running_loop().add_reader(self._fd, self.drain)

    def words(self, within_s: float = math.inf) -> bytes:
        """The end of what was written, as far as it came within the last seconds."""
        since = time.monotonic() - within_s
        return b"".join(data for at, data in self._tail if at >= since)[-LAST_WORDS:]

    def drain(self) -> None:
        """Take what is there."""
        for _ in range(AT_ONCE):  # one loud worker must not keep the agent from its other duties
            if self._disk.slow:
                self._rest()
                return
            data = self._read()
            if data is None:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._fd)
                return
            self._take(data)

    def close(self) -> None:
        """Take the rest, and let go: as much as a pipe holds, others may go on writing."""
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._pause is not None:
            self._pause.cancel()
        for _ in range(AT_ONCE):
            if not (data := self._read()):
                break
            self._take(data)
        os.close(self._fd)
        if self._filtered is not None:
            self._filter(b"\n" if self._line else b"")
            self._filtered.close()
        for file in self._files:
            file.close()

    def _rest(self) -> None:
        """The worker waits, as if it wrote to the slow disk itself."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._fd)
        self._pause = loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        asyncio.get_running_loop().add_reader(self._fd, self.drain)
        self._pause = None

    def _read(self) -> bytes | None:
        """None: nothing now; empty: nothing ever again."""
        try:
            return os.read(self._fd, 65536)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:  # how a terminal says that its last user is gone
                return b""
            raise

    def _take(self, data: bytes) -> None:
        self._tail.append((time.monotonic(), data[-LAST_WORDS:]))
        self._kept += len(self._tail[-1][1])
        while self._kept - len(self._tail[0][1]) >= LAST_WORDS:
            self._kept -= len(self._tail.popleft()[1])
        for file in self._files:
            file.write(data)
        if self._filtered is not None:
            self._filter(data)
        if self._console is not None:
            self._console.write(self._prefixed(data) if self._prefix else data)

    def _filter(self, data: bytes) -> None:
        assert self._filtered is not None
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if any(word in line for word in self._words):
                self._filtered.write(self._prefix + line + b"\n")
        self._line = self._line[-LAST_WORDS:]

    def _prefixed(self, data: bytes) -> bytes:
        *whole, rest = data.split(b"\n")
        out = bytearray()
        for line in whole:
            out += (self._prefix if self._new_line else b"") + line + b"\n"
            self._new_line = True
        if rest:
            out += (self._prefix if self._new_line else b"") + rest
            self._new_line = False
        return bytes(out)


def _terminal() -> tuple[int, int] | None:
    """Our end and the worker's of a terminal of the size of ours: it changes nothing of what is
    written, and a progress bar finds what it looks for. None if there are no more of them."""
    try:
        ours, theirs = os.openpty()
    except OSError:
        return None
    tty.setraw(theirs)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(ERR, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs
