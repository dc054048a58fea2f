"""The temporary folder of an agent, for its sockets and short-lived files.

If a whole tree of processes is killed, nobody removes its folders. So each process that creates a
folder also removes those of processes that are certainly gone. A process locks its folder as long
as it lives, and the kernel releases the lock. Process ids are not used, since those of another
container mean other processes.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

from dlrover_py.process.ownership import open_own
from dlrover_py.protocol.errors import ConfigError

SOCKET_PATH = 107
"""Largest number of bytes that the kernel accepts for the path of a unix socket."""
LONGEST_NAME = "/slots.sock"
"""Longest name of a socket in the folder, with the slash before it."""
ELSEWHERE = ("/tmp", "/var/tmp")
"""Parent folders to use if TMPDIR is not set or cannot be used."""
KERNEL_FILE = "kernel"
"""File in a folder that its creator has locked: the kernel and the mount that know of the lock."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with a random id of the running kernel, the same in all containers of a machine."""
STALE_S = 600.0
"""Seconds without a change in a folder after which it may be removed.

A killed agent's reaper and master use the folder a little longer than the agent.
"""
_NAME = re.compile(r"dlrover-(run-)?[0-9]+-[a-z0-9_]{8}")
"""Names of the folders of all agents."""


def create(prefix: str) -> Path:
    """Create a folder that only this user can enter, in TMPDIR, /tmp or /var/tmp.

    The first of them that can be used is taken. A TMPDIR that other users could change is tried
    last. A file is written to the folder and removed, as a test.

    The folder stays locked until this process ends. Folders that were left beside it by processes
    that were killed are removed: see :func:`remove_abandoned`.

    Args:
        prefix: Start of the folder's name. Random letters follow it.

    Returns:
        The path of the folder.

    Raises:
        ConfigError: No folder can be created, or no file can be written in it.
    """
    tried = []
    # tempfile.gettempdir() is not used, because it may return the current folder.
    requested = os.environ.get("TMPDIR", "")  # noqa: TID251 - as all programs read it
    bases = (requested, *ELSEWHERE) if _is_ours_to_share(requested) else (*ELSEWHERE, requested)
    for base in dict.fromkeys(bases):
        if not base:
            continue
        try:
            folder = _create_in(base, prefix)
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
        else:
            _lock(folder)
            remove_abandoned(base, now=time.time())  # noqa: TID251 - as files have their age
            return folder
    raise ConfigError(
        f"no folder for temporary files ({'; '.join(tried)}): expected one that can be written, "
        f"with a path of at most {SOCKET_PATH - len(prefix) - len(LONGEST_NAME) - 9} bytes; "
        "set TMPDIR to one, or mount one at /tmp"
    )


def _is_ours_to_share(base: str) -> bool:
    """Return whether no other user can replace a folder in ``base`` by one of its own.

    The owner of a folder can rename its content. Without the sticky bit, all users who may write
    there can do so as well. The owner of the root folder counts as root, also in a container.

    A folder that cannot be examined counts as safe.
    """
    try:
        found = os.stat(base)
    except OSError:
        return True  # the attempt to use it then gives the reason why it cannot be used
    owners = (os.getuid(), 0, os.stat("/").st_uid)
    return found.st_uid in owners and (found.st_mode & 0o1002) != 0o002


def _create_in(base: str, prefix: str) -> Path:
    """Create a folder in ``base``, and check that sockets and files can be created in it.

    Raises:
        OSError: The folder or a file cannot be created, or the path is too long for a socket. The
            folder is removed then.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        if len(os.fsencode(folder)) + len(LONGEST_NAME) > SOCKET_PATH:
            raise OSError(0, "the path is too long for a socket")
        trial = folder / "trial"
        trial.write_bytes(b"x" * 4096)  # a full disk may still have room for a folder
        trial.unlink()
    except OSError:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()
        raise
    return folder


def _lock(folder: Path) -> None:
    """Lock a folder until this process ends, and write into it where the lock is known.

    If one of them is not possible, the folder counts as in use for ever. This is so in a sandbox
    without ``BOOT_ID``. A folder that is made again by :func:`recreate` counts so, too.
    """
    with contextlib.suppress(OSError):
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise
        # Nothing closes the descriptor: only the end of this process may release the lock. So a
        # folder that has the file is locked as long as it is used.
        (folder / KERNEL_FILE).write_bytes(lock_domain(held))


def lock_domain(folder: int) -> bytes:
    """Return the same for all processes that see each other's locks on an open folder.

    The result is the kernel's boot id and the folder's device number. Two mounts of the same
    network storage have different device numbers, and do not know of each other's locks.

    Raises:
        OSError: The id cannot be read.
    """
    return BOOT_ID.read_bytes() + str(os.fstat(folder).st_dev).encode()


def remove_abandoned(base: str, *, now: float) -> None:
    """Remove the folders of :func:`create` in ``base`` whose processes are gone; ignore errors.

    Such a folder belongs to this user, was locked through this mount on this kernel and is not
    locked any more, and was not changed for ``STALE_S``. No link is followed. All other folders
    stay, and so do all where another user could replace a folder of this user.

    Args:
        base: Folder with the folders.
        now: Wall time in seconds, on the clock of file times.
    """
    if not _is_ours_to_share(base):
        return
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        mode = os.stat(base).st_mode
        if mode & stat.S_IWGRP and not mode & stat.S_ISVTX:
            return  # the group can replace a folder, too
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError, ConfigError):
                    _remove_if_abandoned(entry.path, now)


def _remove_if_abandoned(path: str, now: float) -> None:
    """Remove one folder for :func:`remove_abandoned`, if its conditions hold.

    Raises:
        OSError: The folder is locked, has no ``KERNEL_FILE``, or cannot be read or removed.
        NotOwnedError: It is a link, or another user can change it.
    """
    with contextlib.ExitStack() as stack:
        folder = open_own(path, os.O_DIRECTORY)
        stack.callback(os.close, folder)
        if now - os.fstat(folder).st_mtime < STALE_S:
            return
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kernel = open_own(KERNEL_FILE, at=folder)
        stack.callback(os.close, kernel)
        if os.read(kernel, 100) == lock_domain(folder):
            shutil.rmtree(path)


def recreate(folder: Path) -> None:
    """Create a folder of :func:`create` again if it was removed; its files do not come back.

    Batch systems remove TMPDIR at the end of a job step, and cleaners remove old files in /tmp. A
    folder that exists is only checked.

    Raises:
        NotOwnedError: Another user has created a folder there in the meantime.
        OSError: The folder cannot be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    os.close(open_own(folder, os.O_DIRECTORY))
