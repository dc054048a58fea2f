"""The file with the job's token, as the master and the agents read it."""

import errno
import os
from pathlib import Path

from dlrover_py.process.blocking import open_regular, read_at_most
from dlrover_py.protocol.errors import ConfigError

MAX_TOKEN_BYTES = 1 << 16
"""Bytes of the largest token file. A larger one is another file."""
MIN_TOKEN_CHARS = 16
"""Characters of the shortest token. A shorter one could be guessed."""


def read_token(path: Path, *, private: bool) -> str:
    """Return the job's token without white space around it; the read blocks while the disk hangs.

    Args:
        path: Path of the file.
        private: Whether the file must belong to this user or root, and be closed to others. It is
            False in a Pod, where all users may read a mounted Secret.

    Raises:
        ConfigError: The file cannot be read, or has no token of printable ASCII characters. Others
            may write to it. With ``private``, also if others may read it, its group may write to
            it, or it belongs to another user.
    """
    try:
        with open(path, "rb", 0, opener=lambda name, _: open_regular(name)) as file:
            data = read_at_most(file, MAX_TOKEN_BYTES)
            found = os.fstat(file.fileno())
        if data is None:
            raise OSError(errno.EFBIG, "it is too large")
        token = data.decode().strip()
    except OSError as error:
        raise ConfigError(
            f"token file {path}: {error.strerror}; expected a file with the job's token, of at "
            f"most {MAX_TOKEN_BYTES} bytes"
        ) from error
    except UnicodeDecodeError:
        token = "\0"
    if not (token.isascii() and (token.isprintable() or not token)):
        raise ConfigError(f"token file {path}: expected one line of printable ASCII characters")
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"token file {path}: expected at least {MIN_TOKEN_CHARS} characters, found {len(token)}"
        )
    if found.st_mode & 0o002:
        raise ConfigError(f"token file {path}: others may write to it; expected mode 0600")
    if private:
        _check_private(path, found)
    return token


def _check_private(path: Path, found: os.stat_result) -> None:
    """Raise ConfigError if others may read a token file, or another user may have written it."""
    if found.st_mode & 0o005:
        raise ConfigError(f"token file {path}: others may read it; expected mode 0600")
    if found.st_mode & 0o020:  # a mounted Secret has mode 0440 and belongs to root: it passes
        raise ConfigError(f"token file {path}: its group may write to it; expected mode 0600")
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"token file {path}: it belongs to user {found.st_uid}; expected user {os.getuid()}, "
            "as whom this runs, or root"
        )
