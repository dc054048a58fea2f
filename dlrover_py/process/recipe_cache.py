"""The import recipes that are kept on this machine for later runs of the same command.

A recipe lists the modules that a script imports. With it, the first workers of a run can be forked
from a process that has imported them. Each recipe is a file of its own in one folder. The folder
and the files are used only if no other user can change them, because a recipe says what is
imported.
"""

import contextlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from dlrover_py.process.ownership import make_own, open_own
from dlrover_py.protocol.json_text import decoded
from dlrover_py.protocol.names import ENV_CACHE_DIR
from dlrover_py.protocol.zygote import RecipeLine, recipe_lines

VERSION: Final = 2
"""Version of a file. Files of another version are not used."""
MAX_FILES: Final = 100
"""Number of recipes that are kept. Storing another one removes the one that was not used for the
longest time."""
MAX_BYTES: Final = 16 << 20
"""Largest number of bytes of a recipe, compressed or not."""
MAX_IMPORT_S: Final = 3600.0
"""Longest time of the imports that is believed, in seconds. A start waits in proportion to it."""
HINT: Final = f"remove it, or set {ENV_CACHE_DIR} to another folder"
"""What a user can do about a folder that is refused: the end of the error message."""
_SUFFIX = ".recipe"

FileState = tuple[int, int]
"""What tells whether a file has changed: the time of its last change in nanoseconds or a digest of
its content, and its size in bytes."""


@dataclass(frozen=True, slots=True)
class KeptRecipe:
    """A recipe that a run has left, with what must be unchanged for it to be used."""

    script: str
    """The command line of the workers, for people."""
    lines: Sequence[RecipeLine]
    """The recipe; empty if the command must not be started with one."""
    import_s: float
    """Seconds that workers needed to import it."""
    files: Mapping[str, FileState]
    """State of each file that was imported."""
    refusals: int = 0
    """Number of runs in which a worker that was forked with a recipe has died early."""
    cold_runs: int = 0
    """Number of runs that must still start cold before a recipe is kept again."""
    counted_at: float = 0.0
    """When a run was counted last, in seconds of wall time."""

    def encode(self) -> bytes:
        """Return the content of a file."""
        fields = {
            "version": VERSION,
            "script": self.script,
            "lines": self.lines,
            "import_s": self.import_s,
            "files": self.files,
            "refusals": self.refusals,
            "cold_runs": self.cold_runs,
            "counted_at": self.counted_at,
        }
        return zlib.compress(json.dumps(fields).encode())

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Read the content of a file.

        Raises:
            ValueError: It is damaged, too large, or of another version.
        """
        try:
            document = decoded(zlib.decompressobj().decompress(body, MAX_BYTES))
        except zlib.error as error:
            raise ValueError(f"it is not compressed: {error}") from error
        match document:
            case {
                "version": 2,
                "script": str(script),
                "lines": lines,
                "import_s": int() | float() as import_s,
                "files": dict(files),
                "refusals": int() as refusals,
                "cold_runs": int() as cold_runs,
                "counted_at": int() | float() as at,
            } if _is_whole(lines, import_s, files):
                states = {path: (state[0], state[1]) for path, state in files.items()}
                recipe = [(what, name, value) for what, name, value in lines]
                return cls(script, recipe, float(import_s), states, refusals, cold_runs, float(at))
        raise ValueError(f"expected a recipe of version {VERSION}")


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of all caches that an environment names; None if there is none.

    Without ``DLROVER_CACHE_DIR``, it is below ``XDG_CACHE_HOME`` or the user's home folder.
    """
    given = environ.get(ENV_CACHE_DIR)
    if given == "none":
        return None
    if given:
        return Path(given)
    base = environ.get("XDG_CACHE_HOME")
    if not base and (home := environ.get("HOME")):
        base = f"{home}/.cache"
    return Path(base) / "dlrover-py" if base else None


def _is_whole(lines: object, import_s: float, files: dict[str, object]) -> bool:
    """Return whether the fields of a file have the form that they need."""
    states = all(isinstance(x, list) and list(map(type, x)) == [int, int] for x in files.values())
    return recipe_lines(lines) and states and 0 <= import_s <= MAX_IMPORT_S


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache."""

    key: str
    """Its name, without the suffix."""
    at: float
    """When it was last written or used, in seconds of wall time."""
    size: int
    """Its size in bytes."""
    recipe: KeptRecipe | None
    """Its content; None if it cannot be read."""


class RecipeCache:
    """The folder with the recipes of one user."""

    def __init__(self, folder: Path) -> None:
        """Take a folder, which is made when the first recipe is stored."""
        self.folder = folder

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the cache that an environment names; None if there is none."""
        base = cache_folder(environ)
        return None if base is None else cls(base / "recipes")

    def load(self, key: str) -> KeptRecipe | None:
        """Return a recipe; None if there is none, or its file is damaged or of another version.

        The recipe counts as used: others are removed before it.

        Raises:
            NotOwnedError: Another user can change the folder or the file.
            OSError: The file cannot be read.
        """
        with contextlib.suppress(FileNotFoundError), contextlib.closing(_Folder(self)) as folder:
            try:
                found = KeptRecipe.decode(folder.read(key + _SUFFIX))
            except ValueError:
                return None
            folder.touch(key + _SUFFIX)
            return found
        return None

    def store(self, key: str, recipe: KeptRecipe) -> None:
        """Store a recipe instead of an older one of the key, and remove the least used of too many.

        Raises:
            NotOwnedError: Another user can change the folder.
            OSError: The file cannot be written.
        """
        body = recipe.encode()
        if len(body) > MAX_BYTES:
            return
        make_own(self.folder)
        with contextlib.closing(_Folder(self)) as folder:
            folder.write(key + _SUFFIX, body)
            for name, _ in folder.files()[MAX_FILES:]:
                folder.remove(name)

    def remove(self, key: str) -> bool:
        """Remove a recipe, and return whether there was one.

        Raises:
            NotOwnedError: Another user can change the folder.
            OSError: The file cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError), contextlib.closing(_Folder(self)) as folder:
            folder.remove(key + _SUFFIX)
            return True
        return False

    def entries(self) -> list[Entry]:
        """Return all files of the cache, the newest first.

        Raises:
            NotOwnedError: Another user can change the folder.
            OSError: The folder cannot be read.
        """
        found: list[Entry] = []
        with contextlib.suppress(FileNotFoundError), contextlib.closing(_Folder(self)) as folder:
            for name, state in folder.files():
                recipe = None
                with contextlib.suppress(ValueError, OSError):
                    recipe = KeptRecipe.decode(folder.read(name))
                key = name.removesuffix(_SUFFIX)
                found.append(Entry(key, state.st_mtime, state.st_size, recipe))
        return found


class _Folder:
    """The open folder of a cache, which no other user can change."""

    def __init__(self, cache: RecipeCache) -> None:
        """Open the folder.

        Raises:
            NotOwnedError: Another user can change it.
            OSError: It cannot be opened.
        """
        self._fd = open_own(cache.folder, os.O_DIRECTORY, links=True, hint=HINT)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)

    def read(self, name: str) -> bytes:
        """Return the content of a file, cut at ``MAX_BYTES``.

        Raises:
            NotOwnedError: Another user can change it.
            OSError: It cannot be read.
        """
        with open(open_own(name, at=self._fd, hint=HINT), "rb") as file:
            return file.read(MAX_BYTES)

    def write(self, name: str, body: bytes) -> None:
        """Write a file at once: readers find the old one or the new one.

        Raises:
            OSError: It cannot be written.
        """
        self._remove_abandoned()
        new = f"new-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with open(open_own(new, flags, at=self._fd, hint=HINT), "wb") as file:
                file.write(body)
            os.rename(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._fd)
            raise

    def _remove_abandoned(self) -> None:
        """Remove the files of writers that were killed an hour ago or earlier."""
        for name in os.listdir(self._fd):
            with contextlib.suppress(OSError):
                age_s = time.time() - os.stat(name, dir_fd=self._fd).st_mtime  # noqa: TID251 - as files have their age
                if name.startswith("new-") and age_s > 3600:
                    os.unlink(name, dir_fd=self._fd)

    def touch(self, name: str) -> None:
        """Set the time of a file to now, if this is allowed."""
        with contextlib.suppress(OSError):
            os.utime(name, dir_fd=self._fd, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            OSError: It cannot be removed.
        """
        os.unlink(name, dir_fd=self._fd)

    def files(self) -> list[tuple[str, os.stat_result]]:
        """Return the names and states of all recipes, the newest first.

        Raises:
            OSError: The folder cannot be read.
        """
        found = []
        for name in os.listdir(self._fd):
            if name.endswith(_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, os.stat(name, dir_fd=self._fd, follow_symlinks=False)))
        return sorted(found, key=lambda one: -one[1].st_mtime_ns)
