"""Fakes for tests. Each passes the same contract tests as the real object (tests/contracts)."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlrover_py.master.core.state import DurableState
from dlrover_py.master.journal_store import JournalLockedError, JournalUnwritableError
from dlrover_py.protocol.errors import ConfigError


class Shelf:
    """The state that several :class:`MemoryStore` share, as several masters share one disk."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.holder: MemoryStore | None = None
        self.full = False
        """Whether nothing more can be written."""
        self.writes = 0


class MemoryStore:
    """A journal store without a disk."""

    def __init__(self, shelf: Shelf | None = None) -> None:
        self._shelf = shelf or Shelf()

    async def acquire(self) -> DurableState | None:
        shelf = self._shelf
        if shelf.holder not in (None, self):
            raise JournalLockedError("another master holds this shelf")
        shelf.holder = self
        if shelf.text is None:
            return None
        try:
            return DurableState.from_json(shelf.text)
        except ValueError as error:
            raise ConfigError("not a journal of this version") from error

    async def save(self, journal: DurableState) -> None:
        assert self._shelf.holder is self, "only its holder may write"
        if self._shelf.full:
            raise JournalUnwritableError("the shelf is full")
        self._shelf.text = journal.to_json()
        self._shelf.writes += 1

    async def release(self) -> None:
        if self._shelf.holder is self:
            self._shelf.holder = None


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small tmpfs at a folder. The test is skipped if that is not possible."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(path: Path) -> None:
    """Write to a file until its disk is full."""
    with path.open("wb", buffering=0) as filler:
        for size in (4096, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                continue
