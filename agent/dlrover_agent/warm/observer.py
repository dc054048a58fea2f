"""The agent's view of what its workers import: files that the workers write, and the agent reads.

Each observed worker maps a file of its own into memory (:func:`dlrover_agent.warm.script.watch`).
So the file is complete even if the worker was killed.
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from dlrover_agent.warm.script import OBSERVED_START
from dlrover_py.process.blocking import BackgroundThread, OverdueError

log = logging.getLogger("agent.warm")

RECORD_SIZE = 2 << 20
"""Bytes of the file for a worker's record. A large script fills a quarter of it."""
RECORD_POLL_S = 0.25
"""Seconds between two reads of the records."""
QUIET_S = 3.0
"""Seconds without a new import after which the recipe counts as complete for now."""
FILES_S = 2.0
"""Seconds for a read of the records, and for other small files."""


class ImportObserver:
    """The records of one round's workers."""

    def __init__(self, scratch: Path, files: BackgroundThread) -> None:
        """Take the folder for the files, and the thread that reads them; no worker is observed."""
        self._scratch, self._files = scratch, files
        self.of_forks = False
        """Whether the workers are forked, so that the records lack what their zygote has."""
        self._records: list[_ImportRecord] = []
        self._ended: list[_ImportRecord] = []
        """Records of workers that have ended. Their files are closed."""
        self._rounds = 0
        """Number of rounds whose workers were observed."""
        self._since = self._grown_at = 0.0
        """When the observation of the round began, and when a record had last grown."""
        self._watching: asyncio.Task[None] | None = None

    @property
    def limit_s(self) -> float:
        """Limit in seconds of a call that uses files; 0 if another such call hangs already."""
        return FILES_S if self._files.stuck_s < FILES_S else 0.0

    @property
    def texts(self) -> list[str]:
        """What each worker has recorded so far."""
        return [record.text for record in self._records or self._ended]

    @property
    def import_s(self) -> float:
        """Seconds from the start of the workers to their last import so far."""
        return self._grown_at - self._since

    async def observed_argvs(
        self, argvs: Sequence[list[str]], installed: Sequence[str]
    ) -> list[list[str]]:
        """Return the command lines of cold workers with observation; unchanged without files.

        Args:
            argvs: The command lines, ``PYTHON -u [-m] SCRIPT ARGS…``.
            installed: Folders of the standard library and of installed packages.
        """
        folders = os.pathsep.join(installed)
        paths = await self._begin(len(argvs), of_forks=False)
        return [
            [*argv[:2], "-c", OBSERVED_START, str(paths[i]), folders, *argv[2:]] if paths else argv
            for i, argv in enumerate(argvs)
        ]

    async def observe_forks(self, number: int, installed: Sequence[str]) -> list[list[str]]:
        """Return ``WorkerTask.observe`` for each of the workers that will be forked.

        Args:
            number: Number of workers.
            installed: Folders of the standard library and of installed packages.
        """
        paths = await self._begin(number, of_forks=True)
        return [[str(paths[i]), os.pathsep.join(installed)] if paths else [] for i in range(number)]

    async def _begin(self, number: int, *, of_forks: bool) -> list[Path]:
        """Make files for the records of a new round's workers, and return their paths.

        The list is empty if there is no space for them, or if they cannot be made in time.

        Args:
            number: Number of workers.
            of_forks: Whether the workers are forked from a zygote.
        """
        self._close(self._records)  # of forks that have failed
        self._rounds += 1
        paths = [self._scratch / f"imports-{self._rounds}-{i}" for i in range(number)]
        try:
            self._records = await self._files.run(
                lambda: _create_records(paths), self.limit_s, _close_records
            )
        except OSError as error:  # OverdueError, too
            self._records = []
            why = f"{self._scratch}: {error.strerror or error}"
            if isinstance(error, OverdueError):
                why = f"{self._scratch} has not answered within {FILES_S:g} s"
            log.warning("imports_not_recorded", extra={"why": why, "then": "no warm start"})
        self._ended, self.of_forks = [], of_forks
        self._since = self._grown_at = time.monotonic()
        return paths if self._records else []

    def watch(
        self,
        *,
        active: Callable[[], bool],
        grown: Callable[[], None],
        quiet: Callable[[], Awaitable[None]],
        imports_torch: Callable[[], None],
    ) -> None:
        """Read the records from now on, in a task; do nothing without observed workers.

        Args:
            active: Returns whether to go on; asked before each read.
            grown: Called when a worker has imported more.
            quiet: Called and awaited once no worker has imported anything for ``QUIET_S``, and
                again whenever that happens after more imports.
            imports_torch: Called once, when a worker has imported torch.
        """
        self.stop()
        if self._records:
            self._watching = asyncio.create_task(self._watch(active, grown, quiet, imports_torch))
            self._watching.add_done_callback(raise_task_error)

    async def _watch(
        self,
        active: Callable[[], bool],
        grown: Callable[[], None],
        quiet: Callable[[], Awaitable[None]],
        imports_torch: Callable[[], None],
    ) -> None:
        """Read the records repeatedly, as :meth:`watch` says. A failed read is repeated.

        Args:
            active: As for :meth:`watch`.
            grown: As for :meth:`watch`.
            quiet: As for :meth:`watch`.
            imports_torch: As for :meth:`watch`.
        """
        records = self._records
        is_quiet = torch_reported = False

        def read_records() -> tuple[bool, bool]:
            """Return whether there are new lines, and whether a worker has imported torch."""
            return _read_all(records), any("('import', 'torch'," in r.text for r in records)

        while active():
            await asyncio.sleep(QUIET_S if is_quiet else RECORD_POLL_S)
            now = time.monotonic()
            try:
                more, torch = await self._files.run(read_records, FILES_S)
            except (OverdueError, OSError):  # the next look may succeed
                continue
            if more:
                self._grown_at, is_quiet = now, False
                grown()
                if torch and not torch_reported:
                    torch_reported = True
                    imports_torch()
            elif not is_quiet and now - self._grown_at >= QUIET_S:
                is_quiet = True
                await quiet()

    async def end(self) -> bool | None:
        """Read the last lines of workers that have ended, and close and delete their files.

        Returns:
            Whether there were new lines; None if no worker was observed, or if the disk does not
            answer.
        """
        self.stop()
        records, self._records = self._records, []
        if not records:
            return None
        self._ended = records
        try:
            grown = await self._files.run(lambda: _read_all(records), self.limit_s)
        except OSError as error:  # OverdueError, too
            log.warning("imports_not_recorded", extra={"why": str(error), "then": "cold start"})
            return None
        finally:
            self._close(records)
        if grown:
            self._grown_at = time.monotonic()
        return grown

    def stop(self) -> "asyncio.Task[None] | None":
        """Stop reading the records; return the task that did so, which is canceled."""
        task, self._watching = self._watching, None
        if task is not None:
            task.cancel()
        return task

    def _close(self, records: "list[_ImportRecord]") -> None:
        if records:
            self._files.post(functools.partial(_close_records, records))


class _ImportRecord:
    """The record that one observed worker has written so far. Only the file thread uses it."""

    def __init__(self, path: Path) -> None:
        """Make the file, with all of its space.

        Raises:
            OSError: It cannot be made, or the disk has no space for it. There is no file then.
        """
        try:
            with path.open("wb") as file:
                # A sparse file would kill the worker (SIGBUS) that writes to it on a full disk.
                os.posix_fallocate(file.fileno(), 0, RECORD_SIZE)
            self._file = path.open("rb", buffering=0)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self.path = path
        self.text = ""

    def read(self) -> bool:
        """Read the new complete lines, and return whether there are any.

        Raises:
            OSError: The file cannot be read.
        """
        before = len(self.text)
        while True:
            self._file.seek(len(self.text))  # a record is ASCII, so characters are bytes
            new = self._file.read(1 << 16)
            complete = new[: new.rfind(b"\n") + 1]
            self.text += complete.decode()
            if not complete or b"\0" in new:
                return len(self.text) > before

    def close(self) -> None:
        """Close and delete the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _create_records(paths: Iterable[Path]) -> list[_ImportRecord]:
    """Make the files for the records of a round.

    Raises:
        OSError: A file cannot be made. None is left then.
    """
    records: list[_ImportRecord] = []
    try:
        records.extend(_ImportRecord(path) for path in paths)
    except OSError:
        _close_records(records)
        raise
    return records


def _read_all(records: Iterable[_ImportRecord]) -> bool:
    """Read the new lines of all records, and return whether there are any.

    Raises:
        OSError: A file cannot be read.
    """
    return sum(record.read() for record in records) > 0


def _close_records(records: Iterable[_ImportRecord]) -> None:
    for record in records:
        with contextlib.suppress(OSError):
            record.close()


def raise_task_error(task: asyncio.Task[None]) -> None:
    """Raise the exception of a finished task, so that the event loop logs a defect."""
    if not task.cancelled():
        task.result()
