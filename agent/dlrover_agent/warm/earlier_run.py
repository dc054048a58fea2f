"""The recipe that an earlier run of the same command has left: on this node, or with the master.

A recipe lists the modules that a script imports. It is used again only if nothing has changed that
decides which modules these are: the interpreter, the installed packages, the command line, the
script, each imported file, and the environment as far as interpreters and libraries read it.
"""

import contextlib
import functools
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from dlrover_py import __version__
from dlrover_py.process.blocking import BackgroundThread, OverdueError
from dlrover_py.process.ownership import NotOwnedError
from dlrover_py.process.recipe_cache import FileState, KeptRecipe, RecipeCache
from dlrover_py.protocol.zygote import RecipeLine

log = logging.getLogger("agent.warm")

READ_BY_LIBRARIES = (
    *("PYTHON", "LD_", "LC_", "LANG", "VIRTUAL_ENV", "CONDA"),
    *("TORCH", "PYTORCH", "TRITON", "CUDA", "NVIDIA", "NCCL", "GLOO", "HIP", "ROCR", "XLA"),
    *("OMP", "GOMP", "KMP", "MKL", "OPENBLAS", "NUMEXPR", "HF_", "TRANSFORMERS", "ACCELERATE"),
)
"""Beginnings of the names of environment variables that decide what is imported."""
SAME_RUN_S = 60.0
"""Agents that count a run within this many seconds are taken for those of one run."""
MOST_DOUBLINGS = 6
"""Largest exponent of 2 for the number of cold runs after the death of a forked worker."""
MAX_HASHED_BYTES = 1 << 20
"""Bytes of a module of the user up to which its content is compared, and not its time."""
_WITHOUT_EFFECT = ("TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR", "NVIDIA_VISIBLE_DEVICES")
"""Beginnings of the names of variables that decide no imports, and differ between runs, CPUs or
Pods."""


class RecipeKeeper(Protocol):
    """Where recipes are kept between runs. All methods may block."""

    def load(self, key: str) -> KeptRecipe | None:
        """Return a recipe; None if there is none that can be read.

        Raises:
            NotOwnedError: Another user can change what is kept.
            OSError: It cannot be read.
        """

    def store(self, key: str, recipe: KeptRecipe) -> None:
        """Keep a recipe instead of an older one of the key.

        Raises:
            NotOwnedError: Another user can change what is kept.
            OSError: It cannot be written.
        """

    def remove(self, key: str) -> bool:
        """Remove a recipe, and return whether there may have been one.

        Raises:
            NotOwnedError: Another user can change what is kept.
            OSError: It cannot be removed.
        """


class EarlierRun:
    """The recipe that is kept for one command of this node.

    All methods read or write files, and may block. Those that raise nothing log errors, because a
    job goes on without a cache.
    """

    def __init__(
        self,
        cache: RecipeKeeper,
        argv: Sequence[str],
        env: Mapping[str, str],
        installed: Sequence[str],
        *,
        wall: Callable[[], float] = time.time,  # noqa: TID251 - runs may be of different machines
    ) -> None:
        """Take the command; no file is read yet.

        Args:
            cache: Where recipes are kept.
            argv: Command line of the workers: ``PYTHON -u [-m] SCRIPT ARGS…``.
            env: Environment that all workers have.
            installed: Folders of the standard library and of installed packages.
            wall: Returns the wall time in seconds.
        """
        self._wall = wall
        self._cache, self._argv, self._env, self._installed = cache, argv, env, installed
        self._key = ""
        """Key of the command at the beginning of this run."""
        self._dies_cold = False
        """Whether a worker that was started cold has died early in this run."""
        self._refused = False
        """Whether a forked worker has died early in this run."""
        self._counted = False
        """Whether this run was counted as a cold one."""

    def find(self) -> KeptRecipe | None:
        """Return the recipe as :meth:`load` does; None after an error, which is logged."""
        found = None
        try:
            found = self.load()
        except (OSError, NotOwnedError) as error:
            log.info("recipe_not_found", extra={"why": str(error), "then": "cold start"})
        if found is not None:
            log.info("recipe_found", extra={"modules": len(found.lines)})
        return found

    def keep(self, lines: Sequence[RecipeLine], import_s: float) -> None:
        """Keep a recipe as :meth:`store` does; log an error, or that it is kept."""
        try:
            if self.store(lines, import_s):
                log.info("recipe_kept", extra={"modules": len(lines)})
        except (OSError, NotOwnedError) as error:
            log.info("recipe_not_kept", extra={"why": str(error)})

    def forget(self) -> None:
        """Remove the recipe, because no zygote could be built from it; log an error."""
        self._change(lambda: self._cache.remove(self._key))

    def distrust(self, *, forked: bool) -> None:
        """Remove the recipe, because a worker has died early; log an error.

        After the death of a forked worker, the next runs of this command start cold: two runs, and
        twice as many after each further such death. Otherwise every second run could fail. A worker
        that dies early without a fork shows that the script is at fault, and the next run is free
        again.

        Args:
            forked: Whether the worker was forked.
        """
        self._dies_cold = self._dies_cold or not forked
        if self._dies_cold:
            self.forget()
        elif not self._refused:
            self._refused = True
            self._change(self._refuse)

    def _refuse(self) -> None:
        """Have the next runs start cold."""
        present, now = self._cache.load(self._key), self._wall()
        if present is not None and self._counts_already(present, now):
            return
        times = 1 if present is None else present.refusals + 1
        cold_runs = 2 ** min(times, MOST_DOUBLINGS)
        self._cache.store(self._key, KeptRecipe(self._name, [], 0.0, {}, times, cold_runs, now))

    def _counts_already(self, present: KeptRecipe, now: float) -> bool:
        """Return whether another agent of this run has counted it: nodes may share the cache."""
        return not present.lines and abs(now - present.counted_at) < SAME_RUN_S

    def _change(self, change: Callable[[], object]) -> None:
        """Change the cache if the command has a key; log an error."""
        try:
            if self._key:
                change()
        except (OSError, NotOwnedError) as error:
            log.info("recipe_not_removed", extra={"why": str(error)})

    @property
    def _name(self) -> str:
        """The command line of the workers, for people."""
        return " ".join(self._argv[2:])[:1000]

    def load(self) -> KeptRecipe | None:
        """Return the recipe; None if there is none, or if something has changed since.

        A recipe whose files have changed is removed. The result is also None after
        :meth:`distrust`.

        Raises:
            NotOwnedError: Another user can change the cache.
            OSError: The script or the cache cannot be read.
        """
        self._key = self._make_key()
        found = self._cache.load(self._key)
        if found is None or not found.lines:
            return None
        if not self._is_of_installed_modules(found.lines) or any(
            self._state(path) != was for path, was in found.files.items()
        ):
            self._cache.remove(self._key)
            return None
        return found

    def _is_of_installed_modules(self, lines: Iterable[RecipeLine]) -> bool:
        """Return whether a recipe imports installed modules only, and sets no variable.

        All recipes that :meth:`store` keeps are such. Others may write where recipes are kept.
        """
        installed = tuple(self._installed)
        return all(
            what in ("own", "unfit")
            or (
                what == "import"
                and value is not None
                and value.startswith(installed)
                and os.path.normpath(value) == value
                and name.rpartition(".")[2] == _module_of(value)
            )
            for what, name, value in lines
        )

    def store(self, lines: Sequence[RecipeLine], import_s: float) -> bool:
        """Keep a recipe, unless the script has changed since the beginning of this run.

        After :meth:`distrust`, nothing is kept before the runs that it has named.

        Args:
            lines: The recipe. It must not contain values of environment variables.
            import_s: Seconds that workers needed to import it.

        Returns:
            Whether the recipe is kept.

        Raises:
            NotOwnedError: Another user can change the cache.
            OSError: The script cannot be read, or the recipe cannot be written.
        """
        if not self._key or self._key != self._make_key():
            return False
        present, now = self._cache.load(self._key), self._wall()
        if present is not None and not present.lines:
            if self._refused or self._counted or self._counts_already(present, now):
                return False
            self._counted = True
            if present.cold_runs > 1:
                fewer = replace(present, cold_runs=present.cold_runs - 1, counted_at=now)
                self._cache.store(self._key, fewer)
                return False
        paths = [value for _, _, value in lines if value is not None]
        files = {path: state for path in paths if (state := self._state(path)) is not None}
        refusals = 0 if present is None else present.refusals
        kept = KeptRecipe(self._name, lines, import_s, files, refusals)
        self._cache.store(self._key, kept)
        return True

    def _state(self, path: str) -> FileState | None:
        """Return what shows later whether a file has changed; None if it cannot be read.

        For an installed module this is the time of its last change. For a module of the user it is
        a digest: a new container may have the same file with another time.
        """
        try:
            found = os.stat(path)
            if path.startswith(tuple(self._installed)) or found.st_size > MAX_HASHED_BYTES:
                return found.st_mtime_ns, found.st_size
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read(MAX_HASHED_BYTES)).digest()
        except OSError:
            return None
        return int.from_bytes(digest[:6]), found.st_size

    def _make_key(self) -> str:
        """Return the key of the command as everything is now.

        Raises:
            OSError: The script cannot be read.
        """
        argv = self._argv
        parts: list[object] = [__version__, sys.version, os.path.realpath(sys.executable)]
        parts += [os.getcwd(), *argv]
        with open(self._script(), "rb") as script:
            parts.append(hashlib.sha256(script.read()).hexdigest())
        parts += [(folder, _entries(folder)) for folder in self._installed]
        for name, value in sorted(self._env.items()):
            if name.startswith(READ_BY_LIBRARIES) and not name.startswith(_WITHOUT_EFFECT):
                parts.append((name, value))
        return hashlib.sha256(ascii(parts).encode()).hexdigest()[:32]

    def _script(self) -> str:
        """Return the path of the script, or of the module that is run with ``-m``.

        Raises:
            FileNotFoundError: The module is neither in the working directory, nor on PYTHONPATH,
                nor on the agent's own path, which has installed packages.
        """
        name = self._argv[2]
        if name != "-m":
            return name
        module = self._argv[3].replace(".", "/")
        python_path = self._env.get("PYTHONPATH", "").split(os.pathsep)
        for folder in (os.getcwd(), *python_path, *sys.path):
            for path in (f"{folder}/{module}.py", f"{folder}/{module}/__main__.py"):
                if os.path.isfile(path):
                    return path
        raise FileNotFoundError(f"module {self._argv[3]}: its file is not known")


class RecipeShelf:
    """The recipe of one command between runs, for an event loop: a thread makes all calls."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], installed: Sequence[str]
    ) -> None:
        """Take the command, as for :class:`EarlierRun`. Recipes are in a folder, if there is one.

        Args:
            argv: Command line of the workers.
            env: Environment that all workers have. It may name the folder.
            installed: Folders of the standard library and of installed packages.
        """
        self._command = argv, env, installed
        self._thread = BackgroundThread("recipes")
        self._kept: Sequence[RecipeLine] = ()
        """The recipe that was kept last."""
        self._run: EarlierRun | None = None
        if (cache := RecipeCache.of(env)) is not None:
            self.use(cache)

    def use(self, keeper: RecipeKeeper, keeps: Callable[[], bool] = lambda: True) -> None:
        """Take the place where recipes are kept.

        Args:
            keeper: The place.
            keeps: Returns whether this node keeps its recipe there.
        """
        self._run, self._keeps = EarlierRun(keeper, *self._command), keeps

    async def find(self, within_s: float) -> KeptRecipe | None:
        """Return the recipe; None if there is none that can be used, or not within the limit."""
        if self._run is not None:
            with contextlib.suppress(OverdueError):
                return await self._thread.run(self._run.find, within_s)
        return None

    def keep(self, lines: Sequence[RecipeLine], import_s: float) -> None:
        """Keep a recipe for later runs, in the thread; the same one is kept once.

        Args:
            lines: The recipe. It must not contain values of environment variables.
            import_s: Seconds that workers needed to import it.
        """
        if self._run is not None and lines != self._kept and self._keeps():
            self._kept = lines
            self._thread.post(functools.partial(self._run.keep, lines, import_s))

    def forget(self) -> None:
        """Remove the recipe, in the thread, because no zygote could be built from it."""
        if self._run is not None:
            self._thread.post(self._run.forget)

    def distrust(self, *, forked: bool) -> None:
        """Remove the recipe, in the thread, because a worker has died early.

        Args:
            forked: Whether that worker was forked; see :meth:`EarlierRun.distrust`.
        """
        if self._run is not None:
            self._thread.post(functools.partial(self._run.distrust, forked=forked))


def _module_of(path: str) -> str:
    """Return the name in its package of the module that a file has."""
    folder, file = os.path.split(path)
    name = file.partition(".")[0]
    return os.path.basename(folder) if name == "__init__" else name


def _entries(folder: str) -> list[str]:
    """Return the names in a folder of packages; they have the versions of what pip has installed.

    The folder's own time would differ in each new container: its first import may write bytecode.
    """
    try:
        return sorted(name for name in os.listdir(folder) if name != "__pycache__")
    except OSError:
        return []
