"""Where the journal lives: :class:`Store`, and its form as a file.

Only one master at a time may hold a journal. The file form proves it by a lock on a file of its
own (the journal itself is replaced at each write, and a lock would stay with the old inode).
"""

import asyncio
import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from dlrover_py.master.core.events import Journal
from dlrover_py.protocol.errors import ConfigError, TransientError


class Held(TransientError):
    """Another master holds this journal."""


class Unwritable(TransientError):
    """The journal could not be written; what was there before still is."""


class Store(Protocol):
    """Keeps one journal."""

    async def acquire(self) -> Journal | None:
        """Become its only writer and return what it holds.

        Raises:
            Held: another master is its writer.
            TransientError: not now.
            ConfigError: it holds something that cannot be read.
        """

    async def save(self, journal: Journal) -> None:
        """Replace what it holds, all or nothing: it outlives this process from now on.

        Raises:
            Unwritable: nothing has changed.
            Superseded: another master has become its writer.
        """

    async def release(self) -> None:
        """Let another master have it."""


class FileStore:
    """A journal in a file, replaced atomically.

    It is not forced to the disk (three commits, 13 ms in each recovery): it has to outlive the
    master, and a machine that loses power loses the nodes that the journal tells of as well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1

    async def acquire(self) -> Journal | None:  # noqa: D102
        return await asyncio.to_thread(self._acquire)

    async def save(self, journal: Journal) -> None:  # noqa: D102
        await asyncio.to_thread(self._save, journal)

    async def release(self) -> None:  # noqa: D102
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _acquire(self) -> Journal | None:
        try:
            if self._lock < 0:
                self._lock = self._locked()
            if not self._path.exists():
                return None
            data = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{error.filename or self._path}: {error.strerror}") from error
        try:
            return Journal.model_validate_json(data)
        except ValidationError as error:
            raise ConfigError(
                f"{self._path}: not a journal of this version: {error.error_count()} faults, the "
                f"first: {error.errors(include_url=False)[0]['msg']}; move it away to start anew"
            ) from error

    def _locked(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                raise Held(f"another master holds {self._path}") from error
            raise  # a file system that has no locks
        return lock

    def _save(self, journal: Journal) -> None:
        data = journal.model_dump_json().encode()
        fresh = self._path.with_suffix(".new")
        try:
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
            finally:
                os.close(handle)
            os.replace(fresh, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            raise Unwritable(f"{self._path}: {what}") from error
