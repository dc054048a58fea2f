"""Opens what stands in a folder that other users can write to, if it is this user's alone.

Every user of a machine can put a file, a link or a folder into ``/tmp`` and ``/dev/shm``, under a
name that another user's program will use. :func:`open_own` opens such a name and checks what it
has opened. So nothing can change between the check and the use.
"""

import errno
import os
import stat
from pathlib import Path

from dlrover_py.protocol.errors import ConfigError

_NONE = (errno.ENOENT, errno.EEXIST)
"""Errors of open(2) that say nothing of what stands there."""


RUNTIME_HINT = (
    "sockets and tokens of jobs are kept there, so do not use what is in it, and remove it, or set "
    "DLROVER_RUNTIME_DIR to another"
)
STATE_HINT = (
    "what jobs have written is kept there, so remove it, or set DLROVER_STATE_DIR to another"
)


class NotOwn(ConfigError):
    """Another user can change what stands at a path; it was neither used nor changed."""


def open_own(
    path: str | Path,
    flags: int = os.O_RDONLY,
    *,
    at: int | None = None,
    links: bool = False,
    shared: bool = False,
    hint: str = "remove it",
) -> int:
    """Open a regular file or a folder that no other user but root can change.

    A FIFO is not waited for, and a file is cut (O_TRUNC) only after it was checked.

    Args:
        path: of the file; of a folder, if ``flags`` has O_DIRECTORY.
        flags: of open(2). A file that is made has mode 0600.
        at: descriptor of the folder in which a relative path begins.
        links: follow a link at the end of the path, if this user has made it.
        shared: accept what belongs to root, or what a group can write to, as in a mounted volume.
        hint: what the user can do about it; the end of the error's words.

    Returns:
        A descriptor, closed on exec.

    Raises:
        NotOwn: it is another user's, other users can write to it, it is a link or of another kind,
            or a file has a second name (a hard link).
        OSError: it cannot be opened for another reason.
    """
    folder = bool(flags & os.O_DIRECTORY)
    safe = (flags & ~os.O_TRUNC) | os.O_CLOEXEC | os.O_NONBLOCK

    def refuse(why: str) -> NotOwn:
        kind = "folder" if folder else "file"
        return NotOwn(
            f"{path}: {why}; expected a {kind} of your own (user {os.getuid()}) that nobody else "
            f"can write to: {hint}"
        )

    try:
        opened = os.open(path, safe | os.O_NOFOLLOW, 0o600, dir_fd=at)
    except OSError as error:
        if error.errno in _NONE:
            raise
        name = os.stat(path, dir_fd=at, follow_symlinks=False)
        own_link = stat.S_ISLNK(name.st_mode) and name.st_uid == os.getuid()
        if not (links and own_link):
            if why := _fault(name, folder=folder, shared=shared):
                raise refuse(why) from error
            raise
        opened = os.open(path, safe, 0o600, dir_fd=at)
    try:
        if why := _fault(os.fstat(opened), folder=folder, shared=shared):
            raise refuse(why)
        if flags & os.O_TRUNC:
            os.ftruncate(opened, 0)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _fault(found: os.stat_result, *, folder: bool, shared: bool) -> str:
    """Say why something is not this user's alone; empty if it is."""
    others = stat.S_IWOTH if shared else stat.S_IWOTH | stat.S_IWGRP
    if found.st_uid != os.getuid() and not (shared and found.st_uid == 0):
        return f"it belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if folder and not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if not folder and not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_mode & others:
        return f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    if not folder and found.st_nlink > 1:
        return "it has a second name (a hard link), which others may have made"
    return ""


def is_own(folder: Path, *, shared: bool = False, hint: str) -> bool:
    """Say whether there is such a folder.

    Args:
        folder: which may be a link that this user has made.
        shared: as for :func:`open_own`.
        hint: as for :func:`open_own`.

    Returns:
        False if there is none yet.

    Raises:
        ConfigError: another user could have put there what is in it, or it cannot be opened.
    """
    try:
        os.close(open_own(folder, os.O_DIRECTORY, links=True, shared=shared, hint=hint))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    return True


def is_own_socket(path: str | Path) -> bool:
    """Say whether this user or root has made the socket at a path.

    A program that has ended leaves a path that another user can take.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid in (os.getuid(), 0)
