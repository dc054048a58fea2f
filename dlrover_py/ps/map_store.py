"""Where the coordinator keeps its map, so that the next one goes on with it."""

import os
from pathlib import Path
from typing import Protocol

from dlrover_py.protocol.errors import ConfigError, TransientError


class MapStore(Protocol):
    """Keeps one document. Its calls block."""

    name: str
    """What it is, in words: the path of a file, or the name of an object."""
    step_buckets: int
    """Most buckets of a map that is written after each step of the workers."""

    def read(self) -> bytes | None:
        """Take the document over, and return it; None if there is none.

        Whoever held it before cannot write it any more.

        Raises:
            ConfigError: It cannot be used.
            TransientError: It cannot be read now.
        """

    def write(self, document: bytes) -> None:
        """Replace the document, so that it outlives this process.

        Raises:
            TransientError: It cannot be written now. Its ``retry_after`` is the least delay until
                the next attempt.
            SupersededError: Another process has taken the document over.
        """

    def check(self) -> bool:
        """Check that this process may still write; return whether the document is there.

        Raises:
            TransientError: This cannot be found out now.
            SupersededError: Another process has taken the document over.
        """


class MapTooLargeError(TransientError):
    """The document is larger than its place can take."""


class MapFile:
    """The document in a file. One process at a time may use it: the journal's lock says which."""

    step_buckets = 1 << 16

    def __init__(self, path: Path) -> None:
        """Note the path; nothing is read."""
        self.name, self._path = str(path), path

    def read(self) -> bytes | None:
        """Return the document; None if there is none.

        Raises:
            ConfigError: The file cannot be read.
        """
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(
                f"{self.name}: {error.strerror}; expected a map of servers"
            ) from error

    def write(self, document: bytes) -> None:
        """Write another file, and put it in the place of the old one.

        Raises:
            TransientError: It cannot be written.
        """
        fresh = self._path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                file.write(document)
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(self._path)
        except OSError as error:
            raise TransientError(f"{self.name}: {error.strerror}; expected to write it") from error

    def check(self) -> bool:
        """Return whether the file is there.

        Raises:
            TransientError: The disk does not say so now.
        """
        try:
            return self._path.exists()
        except OSError as error:
            raise TransientError(f"{self.name}: {error.strerror}; expected to find it") from error
