"""The destinations of the workers' output (files, console or both), and the pumps that move it.

The flags have the same meaning as in torchrun (torch/distributed/elastic/multiprocessing/api.py).
A stream is shown unchanged, redirected into a file, or copied into a file and onto the console
with a prefix. There are two differences. Each stream that is not simply shown goes through a pipe
of the agent: a full disk then costs log lines, and not the training. And each round has its own
folder.
"""

import asyncio
import collections
import contextlib
import errno
import fcntl
import functools
import logging
import math
import os
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from dlrover_agent.settings import Command, OutputSettings
from dlrover_agent.workers.log_rules import LogWatch, WatchedStream
from dlrover_agent.workers.plugins import logs_specs
from dlrover_agent.workers.streams import OutputDestination, WorkerStream
from dlrover_py.process.blocking import (
    BackgroundThread,
    BackgroundWriter,
    OverdueError,
    inheritable_signals,
    write_all,
)
from dlrover_py.process.ownership import NotOwnedError, open_own
from dlrover_py.protocol.agents import Assignment
from dlrover_py.protocol.errors import ConfigError

log = logging.getLogger("agent.logs")

MAX_TAIL = 131_072
"""Bytes of standard error that are kept to explain a failure. Some exceptions list a model."""
MAX_READS = 16
"""Reads of 64 KiB for each call. A pipe holds 1 MiB at most, unless root has raised the limit."""
PAUSE_S = 0.02
"""Seconds that a pump does not read while the disk or the console is slow."""
FOLDERS_S = 2.0
"""Seconds that the disk, or a plug-in for logs specs, has to make the folders of a round."""
OUT, ERR = 1, 2
"""File descriptors of the two streams, and their bits in the flags."""
ENV_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""The variable by which torch's logs specs name the folder of a round."""


class Logs:
    """The output destinations of this node's workers, for each round.

    By default the flags decide about them. With ``--logs-specs``, a plug-in for torch (its logs
    specs) decides.
    """

    def __init__(self, command: Command, *, run_id: str, node_id: str) -> None:
        """Make the log folder of this run, if the flags need one, and log its path.

        Args:
            command: The workers' command, with the output flags.
            run_id: Id of the run. It is part of the folder's name.
            node_id: Id of this node.

        Raises:
            ConfigError: If the folder cannot be made, or the requested logs specs cannot be used.
        """
        self.watch = LogWatch()
        """Applies the log rules to the output of the workers."""
        self._command, self._node_id = command, node_id
        self._rounds = 0
        self._disk = BackgroundThread("log-folders")
        output = command.output
        self._folder: Path | None = None
        self._specs: Callable[[Sequence[dict[str, str]]], list[OutputDestination]] | None = None
        if output.specs is not None:
            self._specs = logs_specs(output, command.nproc, command.role)
        elif output.log_dir is not None and not _discards_output(output):
            self._folder = _make_run_folder(output.log_dir, run_id)
        elif output.log_dir is None and output.wants_files and command.log_dir is None:
            self._folder = _make_run_folder(None, f"torchelastic_{run_id}")
        if self._folder is not None:
            level = logging.INFO if output.log_dir is not None else logging.WARNING
            log.log(level, "log_folder", extra={"path": str(self._folder)})

    async def destinations(
        self, a: Assignment, envs: Sequence[dict[str, str]], scratch: Path
    ) -> tuple[list[OutputDestination], list[dict[str, str]]]:
        """Return where the workers of a round write; make folders, and remove old error files.

        The wait for the disk and for logs specs takes ``FOLDERS_S`` at most. After the limit, a
        warning is logged and the workers write to the console only. Each call for a round, but not
        for a check, counts up the number in the folder's name, and begins to apply the log rules.

        Args:
            a: The assignment of the round.
            envs: Environments of the workers, by local rank.
            scratch: Folder for error files that need not stay.

        Returns:
            Two lists by local rank: the destinations, and the environments. Logs specs may have
            changed the environments.
        """
        attempt = f"check_{a.check}"
        rules = (self._command.log_rules, a.log_rules) if not a.check else ((), "")
        self.watch.new_round(a.round, *rules)
        if not a.check:
            attempt, self._rounds = f"attempt_{self._rounds}", self._rounds + 1
        copies = [dict(env) for env in envs]
        find = functools.partial(
            self._find_destinations, a, attempt, self._rounds - 1, copies, scratch
        )
        # A disk that hangs has had its time in an earlier round: do not wait for it again.
        within_s = FOLDERS_S if self._disk.stuck_s < FOLDERS_S else 0.0
        try:
            return await self._disk.run(find, within_s), copies
        except OverdueError:
            why = f"folders or logs specs have not answered within {FOLDERS_S:g} s"
            log.warning("log_lines_lost", extra={"why": why, "then": "no log files, no error file"})
            return [self._without_disk(a, i) for i in range(len(envs))], list(envs)

    def _find_destinations(
        self,
        a: Assignment,
        attempt: str,
        number: int,
        envs: list[dict[str, str]],
        scratch: Path,
    ) -> list[OutputDestination]:
        """Find the destinations, make folders and remove old error files. Runs in the thread.

        Args:
            a: The assignment of the round.
            attempt: Name of the round's folder.
            number: Number of the round on this node, for a plug-in.
            envs: Environments of the workers by local rank. A plug-in may change them.
            scratch: Folder for error files that need not stay.
        """
        found = self._from_specs(envs, number) if not a.check else []
        if not found:
            found = [self._destination(a, attempt, i, scratch) for i in range(len(envs))]
        for destination in found:
            with contextlib.suppress(OSError):
                if destination.error_file:
                    os.unlink(destination.error_file)
        if self._command.log_dir is None:
            return found
        return [self._for_platform(a, i, d) for i, d in enumerate(found)]

    def _from_specs(self, envs: list[dict[str, str]], number: int) -> list[OutputDestination]:
        """Return a plug-in's destinations; an empty list if there is none, or it has failed.

        A failure is logged.

        Args:
            envs: Environments of the workers. The plug-in may change them.
            number: Number of the round on this node.
        """
        if self._specs is None:
            return []
        counts = [env[ENV_RESTART_COUNT] for env in envs]
        for env in envs:  # the plug-in names and clears a folder by this: one for each round
            env[ENV_RESTART_COUNT] = str(number)
        try:
            with inheritable_signals():  # for processes that the plug-in starts
                return self._specs(envs)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            why = f"{type(error).__name__}: {error}"
            log.warning("logs_specs_failed", extra={"why": why, "then": "as without them"})
            return []
        finally:
            for env, count in zip(envs, counts, strict=True):
                env[ENV_RESTART_COUNT] = count

    def _destination(
        self, a: Assignment, attempt: str, local_rank: int, scratch: Path
    ) -> OutputDestination:
        """Find a worker's destination from the flags, and make its folder. Runs in the thread.

        If a folder cannot be made, its files are left out and the stream is shown instead.

        Args:
            a: The assignment of the round.
            attempt: Name of the round's folder.
            local_rank: Local rank of the worker.
            scratch: Folder for error files that need not stay.
        """
        if _discards_output(self._command.output):
            return OutputDestination(WorkerStream(), WorkerStream(), "")
        folder = shared = None
        if self._folder is not None and _is_own_folder(self._folder):
            shared = self._folder / attempt
            folder = _make_folder(shared / str(local_rank))
        kept = folder or _make_folder(scratch / f"{attempt}-{local_rank}")
        file = str(kept / "error.json") if kept is not None else ""
        return self._streams(a, local_rank, folder, shared, file)

    def _streams(
        self,
        a: Assignment,
        local_rank: int,
        folder: Path | None,
        shared: Path | None,
        error_file: str,
    ) -> OutputDestination:
        """Return the destination that the flags ask for.

        Args:
            a: The assignment of the round.
            local_rank: Local rank of the worker.
            folder: Folder of the worker's files; None if there is none.
            shared: Parent of ``folder``, for the files that all local ranks share.
            error_file: Path of the worker's error file; empty if there is none.
        """
        output = self._command.output
        prefix = output.line_prefix(self._command.role, a.rank_offset + local_rank, local_rank)
        filters_of = {OUT: output.stdout_filters, ERR: output.stderr_filters}
        streams = []
        for bit, name in ((OUT, "stdout"), (ERR, "stderr")):
            filters = filters_of[bit]
            tee = bool(output.of(output.tee, local_rank) & bit)
            to_file = tee or bool(output.of(output.redirects, local_rank) & bit)
            hidden = output.shown is not None and local_rank not in output.shown
            streams.append(
                WorkerStream(
                    files=(folder / f"{name}.log",) if to_file and folder is not None else (),
                    shown=(tee or not to_file or folder is None) and not hidden,
                    prefix=prefix if tee else "",
                    words=filters if tee and not hidden else (),
                    filtered=shared / f"filtered_{name}.log"
                    if tee and filters and not hidden and shared is not None and folder is not None
                    else None,
                )
            )
        return OutputDestination(streams[0], streams[1], error_file)

    def _without_disk(self, a: Assignment, local_rank: int) -> OutputDestination:
        """Return a destination that needs no disk: the console, or nothing."""
        if _discards_output(self._command.output):
            return OutputDestination(WorkerStream(), WorkerStream(), "")
        return self._streams(a, local_rank, None, None, "")

    def _for_platform(
        self, a: Assignment, local_rank: int, d: OutputDestination
    ) -> OutputDestination:
        """Add the files in which the platform expects both streams of a worker of a job.

        Their folder is ``<dir>/<node>/<incarnation>/<round>/<rank>``. The files that the flags ask
        for are kept as well. Streams without a prefix are not shown any more. If the folder cannot
        be made, its files are left out.

        Args:
            a: The assignment of the round.
            local_rank: Local rank of the worker.
            d: Destination of the worker's output so far.
        """
        assert self._command.log_dir is not None
        subfolder = Path(
            self._node_id, str(a.incarnation), str(a.round), str(a.rank_offset + local_rank)
        )
        folder = _make_folder(self._command.log_dir / subfolder)

        def with_platform_file(stream: WorkerStream, name: str) -> WorkerStream:
            files = (*stream.files, folder / name) if folder is not None else stream.files
            return replace(stream, files=files, shown=stream.shown and bool(stream.prefix))

        return replace(
            d,
            out=with_platform_file(d.out, "stdout.log"),
            err=with_platform_file(d.err, "stderr.log"),
        )


def _discards_output(output: OutputSettings) -> bool:
    """Return whether all output is discarded (``--log-dir /dev/null``)."""
    return output.log_dir is not None and str(output.log_dir) == os.devnull


def _make_run_folder(base: Path | None, run_id: str) -> Path:
    """Make a new folder for a run, below ``base`` or the system's temporary folder.

    Raises:
        ConfigError: The folder cannot be made.
    """
    try:
        base = base or Path(tempfile.gettempdir())
        base.mkdir(parents=True, exist_ok=True)
        name = run_id.replace("/", "_")[:100]
        return Path(tempfile.mkdtemp(prefix=f"{name}_", dir=base))
    except OSError as error:
        raise ConfigError(
            f"--log-dir {base or ''}: cannot be used as a folder: {error.strerror}"
        ) from error


def _is_own_folder(folder: Path) -> bool:
    """Return whether the folder of a run still belongs to this user, or does not exist.

    Another user who owns the parent folder may have replaced it by a link. That is logged.
    """
    try:
        os.close(open_own(folder, os.O_DIRECTORY, shared=True))
    except FileNotFoundError:
        return True  # the folder will be made again
    except (OSError, NotOwnedError) as error:
        log.warning("log_lines_lost", extra={"path": str(folder), "why": str(error)})
        return False
    return True


def _make_folder(folder: Path) -> Path | None:
    """Make a folder and return it; if it cannot be made, log that and return None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("log_lines_lost", extra={"path": str(folder), "why": error.strerror})
        return None
    return folder


class LogFiles:
    """The workers' log files, written by a thread because a disk may be full, lost, or hang."""

    HIGH_BYTES, MAX_BYTES = 1 << 22, 1 << 24
    """Limits in bytes of unwritten data.

    Above HIGH_BYTES, workers must wait. Above MAX_BYTES, the oldest data is lost.
    """
    HUNG_S = 1.0
    """Seconds without progress after which a disk counts as hanging.

    Workers no longer wait for a disk that hangs. Log lines are lost instead.
    """

    def __init__(self) -> None:
        """Create the writer. The thread starts later."""
        self._thread = BackgroundThread("log-files", max_waiting=self.MAX_BYTES)

    @property
    def slow(self) -> bool:
        """Whether pumps must pause because too much data waits for a disk that still works."""
        return self._thread.waiting > self.HIGH_BYTES and self._thread.stuck_s < self.HUNG_S

    def file(self, path: Path) -> "_LogFile":
        """Return a log file. The thread opens it and appends to it."""
        return _LogFile(path, self._thread)

    def finish(self, within_s: float) -> None:
        """Block until all data is written, or no write has ended for ``within_s`` seconds.

        In the second case a warning is logged. The writes continue in the thread.
        """
        if not self._thread.finish(within_s):
            log.warning("log_lines_lost", extra={"why": f"no answer within {within_s:g} s"})


class _LogFile:
    """A log file, which a thread writes. Errors of its disk cost log lines and do not raise."""

    def __init__(self, path: Path, thread: BackgroundThread) -> None:
        self._path: Path | None = path
        self._thread = thread
        self._file: BinaryIO | None = None
        self._logged = False
        thread.post(lambda: self._write(b""))

    def write(self, data: bytes) -> None:
        self._thread.post(lambda: self._write(data), len(data))
        if self._thread.dropped and not self._logged:
            self._logged = True
            log.warning("log_lines_lost", extra={"path": str(self._path), "why": "its disk hangs"})

    def close(self) -> None:
        self._thread.post(self._close)

    # --- Methods that run in the thread ---

    def _write(self, data: bytes) -> None:
        """Append data to the file; drop it after an error, which is logged once.

        The file is given up after any error except a full disk. Then all later data is dropped.
        """
        try:
            if self._file is None and self._path is not None:
                self._file = self._path.open("ab", buffering=0)
            if self._file is not None:
                write_all(self._file.fileno(), data)
        except OSError as error:
            if not self._logged:
                self._logged = True
                path = str(self._path)
                log.warning("log_lines_lost", extra={"path": path, "why": error.strerror})
            if error.errno != errno.ENOSPC:
                self._path = self._file = None

    def _close(self) -> None:
        self._path = None
        if self._file is not None:
            self._file.close()


class StreamPump:
    """Moves the output of one stream of a worker to its destinations, in the event loop."""

    def __init__(
        self,
        stream: WorkerStream,
        console: BackgroundWriter,
        files: LogFiles,
        *,
        terminal: bool = False,
        watched: WatchedStream | None = None,
    ) -> None:
        """Open a pipe for the worker, or a pseudoterminal.

        Args:
            stream: The destinations of the stream.
            console: Writer for the agent's own stream.
            files: Writer for the log files.
            terminal: Whether the agent's own stream is a terminal. If the worker's stream is shown
                unchanged, the worker then gets a pseudoterminal.
            watched: Takes in the stream for the log rules; None without rules.

        Raises:
            OSError: There are no more file descriptors.
        """
        self._stream, self._console = stream, console if stream.shown else None
        self._fd, self.end = (terminal and stream.plain and _open_terminal()) or os.pipe()
        """``end`` is the worker's file descriptor. The code that starts the worker closes it."""
        self._disk = files
        self._files = [files.file(path) for path in stream.files]
        self._filtered = files.file(stream.filtered) if stream.filtered is not None else None
        self._prefix = stream.prefix.encode()
        self._filters = [word.encode() for word in stream.words]
        self._watched = watched
        self._partial_line = b""
        self._new_line = True
        self._tail: collections.deque[tuple[float, bytes]] = collections.deque()
        """The last data that was read, each block with its time."""
        self._tail_bytes = 0
        """Bytes in ``_tail``."""
        os.set_blocking(self._fd, False)
        self._resume_timer: asyncio.TimerHandle | None = None
        asyncio.get_running_loop().add_reader(self._fd, self.drain)

    def words(self, within_s: float = math.inf) -> bytes:
        """Return the end of the output that was read in the last ``within_s`` seconds.

        It has at most ``MAX_TAIL`` bytes. It is empty if nothing was read in that time.
        """
        since = time.monotonic() - within_s
        return b"".join(data for read_at, data in self._tail if read_at >= since)[-MAX_TAIL:]

    def drain(self) -> None:
        """Read the available output and pass it on, at most ``MAX_READS`` blocks of 64 KiB.

        The event loop calls this when there is output. While the disk or the console is slow,
        reading stops for ``PAUSE_S`` seconds. At the end of the stream it stops.
        """
        for _ in range(MAX_READS):  # a worker with much output must not block the event loop
            if self._disk.slow or self._waits_for_console:
                self._pause_reading()
                return
            data = self._read()
            if data is None:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._fd)
                return
            self._distribute(data)

    @property
    def _waits_for_console(self) -> bool:
        """Whether the worker waits for the console; not if a file has all of its output.

        With such a file the worker goes on, as with torchrun. If more than
        ``BackgroundWriter.MAX_BYTES`` bytes wait, the oldest lines are missing on the console. A
        warning at the agent's end says how many.
        """
        return self._console is not None and not self._files and self._console.slow

    def close(self) -> None:
        """Pass on the rest of the output and close the stream; the worker has ended.

        The pump reads no more than a pipe holds, because other processes may still write to it. The
        log files are written and closed later, by their thread.
        """
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        for _ in range(MAX_READS):
            if not (data := self._read()):
                break
            self._distribute(data)
        os.close(self._fd)
        if self._watched is not None:
            self._watched.end()
        if self._filtered is not None:
            self._write_filtered(b"\n" if self._partial_line else b"")
            self._filtered.close()
        for file in self._files:
            file.close()

    def _pause_reading(self) -> None:
        """Stop reading for a moment.

        The worker blocks, as if it wrote to the slow disk or console itself.
        """
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._fd)
        self._resume_timer = loop.call_later(PAUSE_S, self._resume_reading)

    def _resume_reading(self) -> None:
        asyncio.get_running_loop().add_reader(self._fd, self.drain)
        self._resume_timer = None

    def _read(self) -> bytes | None:
        """Return the next data: None if there is none now, empty at the end of the stream.

        Raises:
            OSError: The stream cannot be read.
        """
        try:
            return os.read(self._fd, 65536)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO:  # the last process with the terminal has closed it
                return b""
            raise

    def _distribute(self, data: bytes) -> None:
        """Pass data on to the writers of all destinations, and keep the end of it.

        The end describes a failure. The writers' threads write the data later.
        """
        self._tail.append((time.monotonic(), data[-MAX_TAIL:]))
        self._tail_bytes += len(self._tail[-1][1])
        while self._tail_bytes - len(self._tail[0][1]) >= MAX_TAIL:
            self._tail_bytes -= len(self._tail.popleft()[1])
        if self._watched is not None:
            self._watched.take(data)
        for file in self._files:
            file.write(data)
        if self._filtered is not None:
            self._write_filtered(data)
        if self._console is not None:
            self._console.write(self._prefixed(data) if self._prefix else data)

    def _write_filtered(self, data: bytes) -> None:
        """Write the complete lines that contain one of the words to the filtered file.

        An incomplete line waits for its rest. Only its last ``MAX_TAIL`` bytes are kept.
        """
        assert self._filtered is not None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            if any(word in line for word in self._filters):
                self._filtered.write(self._prefix + line + b"\n")
        self._partial_line = self._partial_line[-MAX_TAIL:]

    def _prefixed(self, data: bytes) -> bytes:
        """Return the data with the prefix at the beginning of each line."""
        *lines, rest = data.split(b"\n")
        out = bytearray()
        for line in lines:
            out += (self._prefix if self._new_line else b"") + line + b"\n"
            self._new_line = True
        if rest:
            out += (self._prefix if self._new_line else b"") + rest
            self._new_line = False
        return bytes(out)


def _open_terminal() -> tuple[int, int] | None:
    """Open a raw pseudoterminal of the same size as the agent's terminal.

    It does not change the output, and a progress bar works as on a real terminal.

    Returns:
        The agent's and the worker's file descriptor; None if the system has no more of them.
    """
    try:
        agent_end, worker_end = os.openpty()
    except OSError:
        return None
    tty.setraw(worker_end)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(ERR, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(worker_end, termios.TIOCSWINSZ, size)
    return agent_end, worker_end
