"""A file of a ledger: it begins with a line, and grows until its loop has ended."""

import errno
import logging
import os
import weakref
from pathlib import Path

from dlrover_py.protocol.errors import ConfigError

log = logging.getLogger(__name__)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a ledger. It is not created.

    Args:
        path: a folder that all nodes share.

    Raises:
        ConfigError: the path is an address such as ``s3://…``: only folders can be appended to.
    """
    if "://" in os.fspath(path):
        raise ConfigError(
            f"data: ledger is {os.fspath(path)!r}: expected a folder, since it grows with each step"
        )
    return Path(path)


class LedgerFile:
    """A new file, to which one worker appends. What it has taken outlives the process."""

    def __init__(self, path: Path, beginning: bytes) -> None:
        """Create the file.

        Args:
            path: its path. Its folder exists.
            beginning: its first line. Without it, the rest would have no meaning.

        Raises:
            OSError: the file cannot be created and begun, or exists. Then there is no new file.
        """
        self._folder = path.parent
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._file)
        self._waiting = bytearray()
        """What is still to be written."""
        self._failed = False
        """The last write has failed, and that is in the log."""
        try:
            if os.write(self._file, beginning) < len(beginning):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._close()
            path.unlink(missing_ok=True)
            raise

    def add(self, content: bytes) -> None:
        """Append some bytes.

        What cannot be written costs a line in the log, and is tried again with the next bytes.
        """
        self._waiting += content
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:
            if not self._failed:
                log.warning(
                    "data: the ledger in %s cannot be written now, and is tried again: %s",
                    self._folder,
                    error,
                )
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        """Write what is waiting, if that is possible now, and close the file."""
        self.add(b"")
        self._close()
