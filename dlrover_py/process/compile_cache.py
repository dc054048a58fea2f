"""The folders with compiled code that scripts have left on this machine.

``torch.compile`` keeps what it has compiled in a folder, and reads it after a restart. Its own
default is one folder in ``/tmp`` for all scripts of a user, which nothing limits. Here each script
has a folder of its own. A folder is used only if no other user can change or replace it, because
its files are code.

A run locks the folder that it uses. Folders beyond the limits are removed once no run uses them.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from dlrover_py.process.ownership import NotOwnedError, check_parents, make_own, open_own
from dlrover_py.process.recipe_cache import HINT, cache_folder
from dlrover_py.protocol.json_text import decoded
from dlrover_py.protocol.names import ENV_CACHE_DIR

_PARENT_HINT: Final = (
    f"set {ENV_CACHE_DIR} to another folder, or use `chmod +t` if this one is to be shared"
)
"""What a user can do about a parent that is refused: the end of the error message."""
_RECORD: Final = "script.json"
"""File in a folder: the name of the script, the time of the last start, and the lock."""
_OVERSIZED: Final = "oversized"
"""File in a folder that was beyond a limit while a run used it: the next run begins anew."""
_KEY: Final = re.compile(r"[0-9a-f]{32}")
_REMOVED: Final = "removed-"
"""Beginning of the name of a folder that is not used any more."""
_TRIMMED: Final = "trimmed"
"""File whose time is that of the last comparison with the limits. It is locked meanwhile."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is kept of the folders, the last used ones first."""

    folders: int = 100
    """Number of folders."""
    total_bytes: int = 8 << 30
    """Sum of the sizes of all files."""
    age_s: float = 30 * 86400.0
    """Seconds since a run has last started with a folder."""
    interval_s: float = 3600.0
    """Seconds from one comparison with the limits to the next: it looks at each file."""


@dataclass(frozen=True, slots=True)
class CompiledScript:
    """A folder of the cache."""

    key: str
    """Its name."""
    at: float
    """When a run has last started with it, in seconds of wall time."""
    size: int
    """Sum of the sizes of its files, in bytes; 0 if nothing was compiled."""
    script: str
    """The script, for people; empty if it is not known."""


class CompileCache:
    """The folders with the compiled code of one user's scripts. All methods may block."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        """Take the folder of the folders, which is made when the first one is used."""
        self.folder, self._limits = folder, limits or Limits()
        self._locks: list[int] = []
        """Descriptors of the records of the folders that this process uses."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the cache that an environment names; None if there is none.

        It is beside the recipes of warm starts: see ``RecipeCache.of``.
        """
        base = cache_folder(environ)
        return None if base is None else cls(base / "compiled")

    def use(self, key: str, script: str) -> Path:
        """Return the folder of a key, and lock it until :meth:`close`, or this process's end.

        The files of a folder that was too large stay aside until :meth:`trim`: there may be many.

        Args:
            key: 32 hexadecimal digits.
            script: Name of the script, for people.

        Raises:
            NotOwnedError: Another user can change or replace a folder.
            OSError: The folder cannot be used, or programs cannot be run from it.
        """
        make_own(self.folder)
        with contextlib.ExitStack() as stack:
            base = self._open(stack)
            # torch opens the folder by its path later, so no part of the path may be replaced.
            folder = Path(os.readlink(f"/proc/self/fd/{base}"))
            check_parents(folder, hint=_PARENT_HINT)
            if os.fstatvfs(base).f_flag & os.ST_NOEXEC:
                raise OSError(errno.ENOEXEC, "its file system is mounted with noexec")
            if os.path.lexists(folder / key / _OVERSIZED):
                self._set_aside(base, key)
            with contextlib.suppress(FileExistsError):
                os.mkdir(key, 0o700, dir_fd=base)
            own = open_own(key, os.O_DIRECTORY, at=base, hint=HINT)
            stack.callback(os.close, own)
            record = open_own(_RECORD, os.O_RDWR | os.O_CREAT, at=own, hint=HINT)
            try:
                fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not os.path.samestat(os.stat(key, dir_fd=base), os.fstat(own)):
                    raise OSError(errno.ESTALE, "the folder is being removed")
                body = json.dumps({"script": script}).encode()
                os.pwrite(record, body, 0)
                os.ftruncate(record, len(body))
            except BaseException:
                os.close(record)
                raise
            self._locks.append(record)
        return folder / key

    def close(self) -> None:
        """Unlock all folders that this process uses."""
        while self._locks:
            os.close(self._locks.pop())

    def trim(self, now: float) -> None:
        """Remove the folders beyond the limits, and empty ones, that no run uses.

        With a folder that is used and too large, the next run begins anew. No folder is looked at
        within ``Limits.interval_s`` of the last time, or while another process does so.

        Args:
            now: Wall time in seconds, on the clock of file times.

        Raises:
            NotOwnedError: Another user can change the folder of the folders.
            OSError: It cannot be read.
        """
        kept_bytes, limits = 0, self._limits
        with contextlib.ExitStack() as stack:
            base = self._open(stack)
            last = open_own(_TRIMMED, os.O_RDWR | os.O_CREAT, at=base, hint=HINT)
            stack.callback(os.close, last)
            if not _locked(last):
                return
            for name in os.listdir(base):
                if name.startswith(_REMOVED):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=base)
            if 0 <= now - os.fstat(last).st_mtime < limits.interval_s:
                return
            os.utime(last, (now, now))
            for i, one in enumerate(self.entries()):
                oversized = kept_bytes + one.size > limits.total_bytes
                beyond = oversized or i >= limits.folders or now - one.at > limits.age_s
                if one.size and not beyond:
                    kept_bytes += one.size
                    continue
                with contextlib.suppress(OSError, NotOwnedError):
                    if not self._remove(base, one.key) and oversized:
                        (self.folder / one.key / _OVERSIZED).touch()

    def remove(self, key: str) -> bool:
        """Remove a folder, and return whether it is gone: not while a run uses it.

        Raises:
            NotOwnedError: Another user can change the folder.
            OSError: The folder cannot be removed.
        """
        with contextlib.ExitStack() as stack:
            return self._remove(self._open(stack), key)

    def entries(self) -> list[CompiledScript]:
        """Return all folders of the cache, the last used one first.

        Raises:
            NotOwnedError: Another user can change the folder of the folders.
            OSError: It cannot be read.
        """
        found = []
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            for key in os.listdir(self._open(stack)):
                if _KEY.fullmatch(key):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(self._entry(key))
        return sorted(found, key=lambda one: -one.at)

    def _entry(self, key: str) -> CompiledScript:
        """Return what is known of a folder.

        Raises:
            OSError: It is gone.
        """
        path = self.folder / key
        at, script = path.stat().st_mtime, ""
        with contextlib.suppress(OSError, NotOwnedError, ValueError):
            with open(open_own(path / _RECORD, hint=HINT), "rb") as file:
                at = os.fstat(file.fileno()).st_mtime
                document = decoded(file.read(1 << 16))
            if isinstance(document, dict):
                script = str(document.get("script", ""))
        return CompiledScript(key, at, _size(path), script)

    def _open(self, stack: contextlib.ExitStack) -> int:
        """Return a descriptor of the folder of the folders, which the stack closes.

        Raises:
            NotOwnedError: Another user can change it.
            OSError: It cannot be opened.
        """
        base = open_own(self.folder, os.O_DIRECTORY, links=True, hint=HINT)
        stack.callback(os.close, base)
        return base

    def _remove(self, base: int, key: str) -> bool:
        """Remove a folder; return False if a run of a job uses it.

        Args:
            base: File descriptor of the folder that contains it.
            key: Name of the folder.

        Raises:
            NotOwnedError: Another user can change the folder.
            OSError: The folder cannot be removed.
        """
        aside = self._set_aside(base, key)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True, dir_fd=base)
        return aside is not None

    @staticmethod
    def _set_aside(base: int, key: str) -> str | None:
        """Rename a folder, and return the new name; None if a run uses it.

        A run that starts afterwards begins anew.

        Raises:
            NotOwnedError: Another user can change the folder.
            OSError: The folder cannot be renamed.
        """
        with contextlib.ExitStack() as stack:
            own = open_own(key, os.O_DIRECTORY, at=base, hint=HINT)
            stack.callback(os.close, own)
            record = open_own(_RECORD, os.O_RDWR | os.O_CREAT, at=own, hint=HINT)
            stack.callback(os.close, record)
            if not _locked(record):
                return None
            aside = f"{_REMOVED}{secrets.token_hex(8)}"
            os.rename(key, aside, src_dir_fd=base, dst_dir_fd=base)
        return aside


def _locked(file: int) -> bool:
    """Lock an open file for this process alone; return False if another has locked it.

    Raises:
        OSError: Its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: Path) -> int:
    """Return the sum of the sizes of a folder's files, without its record."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in set(names) - {_RECORD, _OVERSIZED}:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
