"""Open a file or folder in a shared folder only if it belongs to this user alone.

Every user of a machine can put a file, a link or a folder into ``/tmp`` and ``/dev/shm``. Its name
may be one that another user's program will use. :func:`open_own` opens such a name and checks what
it has opened. So nothing can change between the check and the use.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlrover_py.protocol.errors import ConfigError

_NONE = (errno.ENOENT, errno.EEXIST)
"""Errors of open(2) that do not depend on the owner or kind of the file at the path."""


# The user may have named a folder that has more than the files of DLRover-Py, such as /tmp: the
# hints never advise to remove it.
RUNTIME_HINT = (
    "set DLROVER_RUNTIME_DIR to another folder, or use `chmod go-w` if this one is for you alone"
)
"""What a user can do about a runtime folder that is refused: the end of the error message."""
STATE_HINT = (
    "set DLROVER_STATE_DIR to another folder, or use `chmod go-w` if this one is for you alone"
)
"""What a user can do about a state folder that is refused: the end of the error message."""


class NotOwnedError(ConfigError):
    """Another user can change the file or folder at a path. It was neither used nor changed."""


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

    A FIFO does not block the call. A file is truncated (O_TRUNC) only after the check. With
    O_CREAT, a missing file is made; a refused one stays as it is.

    Args:
        path: Path of the file, or of a folder if ``flags`` has O_DIRECTORY.
        flags: Flags of open(2). A new file gets mode 0600.
        at: File descriptor of the folder in which a relative path begins.
        links: Whether to follow a link at the end of the path, if this user has made it.
        shared: Whether to accept an owner root, or write permission of a group, as in a mounted
            volume.
        hint: What the user can do about a refusal: the end of the error message.

    Returns:
        A file descriptor, closed on exec.

    Raises:
        NotOwnedError: If it belongs to another user, or other users can write to it. Also if it is
            a link or of another kind, or a file with a second name (a hard link).
        OSError: If it cannot be opened for another reason.
    """
    folder = bool(flags & os.O_DIRECTORY)
    safe = (flags & ~os.O_TRUNC) | os.O_CLOEXEC | os.O_NONBLOCK

    def refuse(why: str) -> NotOwnedError:
        kind = "folder" if folder else "file"
        return NotOwnedError(
            f"{path}: {why}; expected a {kind} that belongs to you (user {os.getuid()}) and that "
            f"no other user can write to; {hint}"
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
    """Return why a file or folder does not belong to this user alone; empty if it does."""
    others = stat.S_IWOTH if shared else stat.S_IWOTH | stat.S_IWGRP
    if found.st_uid != os.getuid() and not (shared and found.st_uid == 0):
        return f"it belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if folder and not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if not folder and not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_mode & others:
        return f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    if not folder and found.st_nlink > 1:
        return "it has a second name (a hard link), which others may have made"
    return ""


def is_own(folder: Path, *, shared: bool = False, hint: str) -> bool:
    """Return whether a folder exists, and check that it belongs to this user alone.

    Args:
        folder: Path of the folder. It may be a link that this user has made.
        shared: As for :func:`open_own`.
        hint: As for :func:`open_own`.

    Returns:
        False if there is no such folder yet, or a link of this user leads to no folder.

    Raises:
        ConfigError: If another user could have changed its content, or it cannot be opened.
    """
    try:
        os.close(open_own(folder, os.O_DIRECTORY, links=True, shared=shared, hint=hint))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    return True


def make_own(folder: Path) -> None:
    """Make a folder and its missing parents, all for this user alone.

    Raises:
        OSError: One of them cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def replaced_when_whole(out: Path) -> Iterator[Path]:
    """Yield a path for the content of a file, which appears at its own path when it is complete.

    The path is in a new folder beside the file, which only this user can enter. At a path beside
    the file itself, another user could have put a link to a file of this user. A library that
    opens the path would overwrite that file.

    After an exception in the block, the file at ``out`` stays as it was.

    Raises:
        OSError: The folder cannot be made, or the file cannot be put in its place.
    """
    # The name of a file has at most 255 bytes.
    folder = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=out.parent))
    try:
        yield folder / out.name
        (folder / out.name).replace(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_parents(folder: Path, *, hint: str) -> None:
    """Check that no other user but root can put another folder in the place of this one.

    The owner of a parent can rename what is in it. Without the sticky bit, so can all who may write
    to it. The owner of the root folder counts as root, also in a container.

    Args:
        folder: Absolute path without links.
        hint: What the user can do about a refusal: the end of the error message.

    Raises:
        NotOwnedError: Another user can replace it.
        OSError: A parent cannot be examined.
    """
    owners = (os.getuid(), 0, os.stat("/").st_uid)
    for parent in folder.parents:
        found, why = parent.lstat(), ""
        if found.st_uid not in owners:
            why = f"it belongs to user {found.st_uid}"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            why = f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        if why:
            raise NotOwnedError(
                f"{parent}: {why}; expected a folder in which no other user can replace {folder}; "
                f"{hint}"
            )


def is_own_socket(path: str | Path) -> bool:
    """Return whether there is a socket at a path that this user or root has made.

    When a program has ended, another user may put a socket at its path. The result is False if
    there is no file, a link or another kind of file. It does not say whether a program listens.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid in (os.getuid(), 0)
