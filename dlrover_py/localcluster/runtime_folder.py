"""The runtime folder of a job on this machine, which is made again if it was removed.

It lies below ``/tmp``, where cleaners remove what is old. Without its socket no command reaches the
job, and without its token no node can be started.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dlrover_py.process.blocking import BackgroundThread, read_regular
from dlrover_py.process.ownership import RUNTIME_HINT, is_own, open_own
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, DLRoverError

log = logging.getLogger("cluster")

LOOK_S, RESTORE_S = 3.0, 10.0
"""Seconds between two looks whether the folder is still there, and that one may take."""
MAX_FILE_BYTES = 1 << 20
"""Bytes of the largest file that is written again."""


def lock(folder: Path) -> int:
    """Lock a runtime folder for this process; return the descriptor of the lock, without waiting.

    The folder may remain from a process that was killed. The lock is a file beside it, which stays.

    Raises:
        BlockingIOError: another process holds the lock.
        ConfigError: another user could change the lock file or the folder in which it is.
        OSError: the lock file cannot be made or locked.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Another user may have made it before: its name in /tmp is predictable.
    root = open_own(folder.parent, os.O_DIRECTORY, links=True, hint=RUNTIME_HINT)
    try:
        held = open_own(folder.with_suffix(".lock").name, os.O_RDWR | os.O_CREAT, at=root)
    finally:
        os.close(root)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def listen_at(path: Path) -> socket.socket:
    """Return a unix socket that listens at a path; once the name exists, connections succeed.

    Raises:
        OSError: it cannot be made there.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        fresh = path.with_suffix(".fresh")
        listener.bind(str(fresh))
        listener.listen(128)
        fresh.rename(path)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(slots=True)
class RuntimeFolder:
    """A runtime folder that this process has locked and made, with what it had when last seen."""

    path: Path
    lock: int
    """Descriptor of the lock on the job's name."""
    _files: dict[str, bytes] = field(default_factory=dict)
    """Contents of its files."""
    _socket: tuple[int, int] | None = None
    """Device and inode of its socket; None while it was not seen yet."""
    _guard: threading.Lock = field(default_factory=threading.Lock)
    """Held while the folder is looked at."""
    _listeners: list[socket.socket] = field(default_factory=list)
    """Sockets that listen at the path in the place of the first one."""
    _removed: bool = False
    """Whether the job has removed it."""

    def restore(self) -> socket.socket | None:
        """Make again what was removed from the folder since the last call.

        The first call only notes what is there. The lock file beside the folder is made again, too,
        so that no other job can take the name. The call blocks while the disk does.

        Returns:
            The socket that listens at the path of the old one, if that was removed; else None.

        Raises:
            ConfigError: another job of this name has taken the folder, or another user has made it
                or could change it. Nothing is changed.
            OSError: something cannot be made again.
        """
        with self._guard:
            if self._removed:
                return None
            self._restore_lock()
            if not is_own(self.path, hint=RUNTIME_HINT):
                self.path.mkdir(mode=0o700)
            for name, content in self._files.items():
                with contextlib.suppress(FileExistsError):
                    self._write(name, content)
            for entry in os.scandir(self.path):
                # A name with a dot at its beginning is that of a file that is being written.
                if entry.is_file(follow_symlinks=False) and not entry.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        self._files[entry.name] = read_regular(Path(entry.path), MAX_FILE_BYTES)
            found, fresh = self._present_socket(), None
            if self._socket is not None and found != self._socket:
                fresh = listen_at(self.path / names.CLUSTER_SOCKET)
                found = self._present_socket()
            self._socket = found
            return fresh

    async def keep(self, serve: Callable[[socket.socket], None]) -> None:
        """Make the folder again whenever it was removed, until this is canceled.

        Args:
            serve: begins to serve the API on a new listening socket as well.
        """
        told, pause_s, disk = "", 0.0, BackgroundThread("runtime-folder")
        while True:
            await asyncio.sleep(pause_s)
            pause_s = LOOK_S
            try:
                fresh = await disk.run(self.restore, RESTORE_S, discard=self._discard)
            except (OSError, DLRoverError) as error:
                if told != (told := str(error)):
                    then = "commands may not reach the job: see the reason"
                    log.warning("runtime_folder_lost", extra={"why": told, "then": then})
                continue
            if fresh is not None:
                self._listeners.append(fresh)
                serve(fresh)
                why = f"{self.path} was removed, perhaps by a cleaner of temporary files"
                then = "it is there again; DLROVER_RUNTIME_DIR can name one that is not cleaned"
                log.warning("runtime_folder_made_again", extra={"why": why, "then": then})

    def _discard(self, listener: socket.socket | None) -> None:
        """Close a socket for which nobody waits any more; the next look makes another one."""
        if listener is not None:
            listener.close()
            with self._guard:
                self._socket = (0, 0)

    def remove(self) -> None:
        """Remove the folder for good, and release the lock on the name; errors are ignored."""
        held = self._guard.acquire(timeout=1.0)  # a disk that hangs holds it
        self._removed = True
        if held:
            self._guard.release()
        for listener in self._listeners:
            listener.close()
        with contextlib.suppress(OSError, DLRoverError):  # else it is another job's by now
            self._restore_lock()
            shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock)

    def _restore_lock(self) -> None:
        """Lock the name again if the lock file was removed or replaced.

        Raises:
            ConfigError: another job has locked it, or another user could change the lock file.
            OSError: the lock file cannot be made.
        """
        mine = os.fstat(self.lock)
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self.path.with_suffix(".lock"), follow_symlinks=False)
            if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
                return
        try:
            old, self.lock = self.lock, lock(self.path)
        except BlockingIOError as error:
            raise ConfigError(f"another job of this name has taken {self.path}") from error
        os.close(old)

    def _write(self, name: str, content: bytes) -> None:
        """Write a file for this user alone that does not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(self.path / name, flags, 0o600), "wb") as file:
            file.write(content)

    def _present_socket(self) -> tuple[int, int] | None:
        """Return device and inode of the socket; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path / names.CLUSTER_SOCKET)
            return found.st_dev, found.st_ino
        return None
