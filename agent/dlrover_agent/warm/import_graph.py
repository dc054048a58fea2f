"""Which module imports which, and which of them starts threads, as seen while they are imported.

A module that no zygote may import has to be left out together with all modules that import it.
Whoever imports it first is on the stack at that moment. Whoever imports it later only finds it in
``sys.modules``. So the graph replaces ``builtins.__import__`` for a while, which every ``import``
statement calls.
"""

import builtins
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

NO_MODULE = ("", "__main__")
"""Names of importers that are no modules of a recipe."""
ALLOCATOR_THREAD = "jemalloc_bg_thd"
"""Name of a thread that frees memory; pyarrow has one, and so Hugging Face's ``datasets``.

A fork may happen beside it: jemalloc takes its locks before, and does without the thread in the
child (``background_thread_postfork_child`` in jemalloc's background_thread.c).
"""


class ImportGraph:
    """The imports that ``import`` statements do within the context, and the threads they start.

    Imports by functions such as ``importlib.import_module`` are not seen.
    """

    def __init__(self) -> None:
        """Create an empty graph. Nothing is watched yet."""
        self._importers: defaultdict[str, set[str]] = defaultdict(set)
        """Modules that import a module, by its name."""
        self._threads = dict.fromkeys(_threads(), "")
        """Module whose import has started a thread, by thread id."""
        self._plain: Any = None

    def __enter__(self) -> Self:
        self._plain = builtins.__import__
        builtins.__import__ = self._import
        return self

    def __exit__(self, *_: object) -> None:
        # A module that has replaced the function meanwhile keeps its own.
        if builtins.__import__ == self._import:
            builtins.__import__ = self._plain

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Import as ``builtins.__import__`` does, and record who imports what."""
        importer = _importing_module()
        if level or name not in sys.modules:
            self.find_threads(importer)
        if not level:  # also if the import fails
            self._importers[name].add(importer)
        loaded = len(sys.modules)
        found = self._plain(name, globals, locals, fromlist, level)
        if fromlist:
            package = getattr(found, "__name__", name)
            self._importers[package].add(importer)
            for part in fromlist:
                if f"{package}.{part}" in sys.modules:
                    self._importers[f"{package}.{part}"].add(importer)
            name = package
        if len(sys.modules) != loaded:
            self.find_threads(name)
        return found

    def find_threads(self, name: str) -> None:
        """Look for new threads, and take them for those of a module.

        It is called where the code of one module begins or ends to run. So the module that starts
        the threads is named, and none that imports it. Without a name, nothing is done: a module in
        C is being loaded, whose import will end.
        """
        if name in NO_MODULE:
            return
        for thread in _threads():
            self._threads.setdefault(thread, name)

    def starters_of_threads(self) -> list[str]:
        """Return the modules whose threads still run, in order of their names."""
        running = threads_that_forbid_forks()
        return sorted({self._threads[t] for t in running if self._threads.get(t)})

    def with_importers(self, names: Iterable[str]) -> list[str]:
        """Return modules, and all that import them or a module below them, directly or not.

        A package comes with its submodules, because they cannot be imported without it. The order
        is that of the names.
        """
        by_top: defaultdict[str, set[str]] = defaultdict(set)
        for name in self._importers:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                by_top[".".join(parts[:end])].add(name)
        found, todo = set[str](), list(names)
        while todo:
            name = todo.pop()
            if name in found or name in NO_MODULE:
                continue
            found.add(name)
            for below in by_top[name]:
                todo += self._importers[below]
        return sorted(found)


def _importing_module() -> str:
    """Return the module whose code is being run by its import; empty if there is none.

    The module of the ``import`` statement may be another one: of a function that the module calls.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back  # type: ignore[assignment]
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""


def threads_that_forbid_forks() -> list[str]:
    """Return the ids of this process's threads, without the main thread and jemalloc's."""
    return [thread for thread in _threads() if _name(thread) not in ("", ALLOCATOR_THREAD)]


def _threads() -> list[str]:
    """Return the ids of this process's threads."""
    return os.listdir("/proc/self/task")


def _name(thread: str) -> str:
    """Return the name of a thread; empty for the main thread, and for one that has ended."""
    if thread == str(os.getpid()):
        return ""
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""
