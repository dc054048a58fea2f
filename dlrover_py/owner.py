"""Whose a folder is. What stands in one that others can write to may be theirs by now."""

import os
import stat
from pathlib import Path

from dlrover_py.protocol.errors import ConfigError


def is_own(folder: Path) -> bool:
    """Whether there is such a folder, and nobody but this user (and root) can put things there.

    Returns:
        False if there is none yet.

    Raises:
        ConfigError: somebody else could have put there what is in it.
    """
    try:
        # A link too: who owns it says what it means next.
        name, found = folder.lstat(), folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    me = os.getuid()
    others = [look.st_uid for look in (name, found) if look.st_uid != me]
    if others:
        words = f"it belongs to user {others[0]}"
    elif not stat.S_ISDIR(found.st_mode):
        words = "it is no folder"
    elif found.st_mode & 0o022:
        words = f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return True
    raise ConfigError(
        f"{folder}: {words}; expected a folder of your own (user {me}) that nobody else can write "
        "to, as sockets and tokens of jobs are kept there: do not use what is in it, and remove "
        "it, or set DLROVER_RUNTIME_DIR to another"
    )
