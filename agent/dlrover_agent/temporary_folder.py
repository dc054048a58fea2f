"""The temporary folder of an agent, for its sockets and short-lived files."""

import contextlib
import os
import tempfile
from pathlib import Path

from dlrover_py.process.ownership import open_own
from dlrover_py.protocol.errors import ConfigError

SOCKET_PATH = 107
"""Largest number of bytes that the kernel accepts for the path of a unix socket."""
LONGEST_NAME = "/slots.sock"
"""Longest name of a socket in the folder, with the slash before it."""
ELSEWHERE = ("/tmp", "/var/tmp")
"""Parent folders to use if TMPDIR is not set or cannot be used."""


def create(prefix: str) -> Path:
    """Create a folder that only this user can enter, in TMPDIR, /tmp or /var/tmp.

    The first of them that can be used is taken. A TMPDIR that other users could change is tried
    last. A file is written to the folder and removed, as a test.

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
