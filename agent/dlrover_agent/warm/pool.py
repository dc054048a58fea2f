"""The agent's part of warm starts: learn the script's imports, and keep a zygote that has them.

A zygote is a process that has imported the script's modules, and from which workers are forked. An
import recipe is the list of these modules. See docs/warm-start.md. The code of the zygote is in
zygote.py. The code that runs in a worker, and records its imports, is in script.py.
"""

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import time
import zipimport
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import dlrover_py
from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.earlier_run import RecipeShelf
from dlrover_agent.warm.forks import (
    FORK_S,
    MAX_FDS,
    ChildStart,
    ForkedProcess,
    ForkRequest,
    Forks,
)
from dlrover_agent.warm.observer import ImportObserver, raise_task_error
from dlrover_agent.warm.zygote import NO_FORK, receive
from dlrover_agent.warm.zygote_start import (
    WorkerProgram,
    ZygoteLostError,
    ZygoteProcess,
    ZygoteStarter,
)
from dlrover_py.process.blocking import BackgroundThread, OverdueError
from dlrover_py.process.children import wake
from dlrover_py.process.identity import exit_code, members
from dlrover_py.protocol import recipe as recipes
from dlrover_py.protocol.zygote import (
    RecipeLine,
    StoreTask,
    WorkerTask,
    ZygoteFitness,
)

log = logging.getLogger("agent.warm")

ZYGOTE_S = 2.0
"""Seconds that a zygote takes beside its imports, on a busy machine."""
MAX_OUTPUT_TAIL = 4096
"""Bytes of a process's output that are read after its end."""
MAX_BUILDS = 5
"""Zygotes that are tried one after the other, each without the modules at fault in the last one."""


@dataclass(frozen=True, slots=True)
class ImportRecipe:
    """A list of modules to import beforehand, and of the script's changes to ``os.environ``.

    It contains what workers import from installed packages, in order, and the values that the
    script's own code puts into ``os.environ`` in between. See
    :func:`dlrover_agent.warm.script.watch` for the lines. The line ``("own", name, origin)`` is a
    module of the user, and ``("unfit", name, origin)`` one that has made a zygote unfit. No zygote
    may import them. ``("rank", key, None)`` is a variable into which workers put different values,
    and no import of a zygote may read it. ``("start", key, value)`` is a variable that was changed
    when the interpreter started, which must be so in the zygote, too.
    """

    lines: tuple[RecipeLine, ...]

    @classmethod
    def from_records(cls, records: Iterable[str], installed: tuple[str, ...]) -> Self:
        """Merge the records of one node's workers into a recipe.

        Workers that have come less far than others are no contradiction.

        Args:
            records: Text of each worker's record.
            installed: Folders of the standard library and of installed packages.

        Raises:
            ValueError: If a record cannot be read, or variables were changed differently in workers
                when their interpreters started.
        """
        workers: list[list[RecipeLine]] = []
        for text in records:
            lines = [recipes.decode_record(line) for line in text.splitlines() if "\0" not in line]
            lines = [
                ("own", name, value)
                if kind == "import" and not str(value).startswith(installed)
                else (kind, name, value)
                for kind, name, value in lines
            ]
            while lines and lines[-1][0] == "env":  # no import follows this change
                lines.pop()
            workers.append(lines)
        starts = [[x for x in lines if x[0] == "start"] for lines in workers if lines]
        if any(changed != starts[0] for changed in starts):
            first, other = next((starts[0], changed) for changed in starts if changed != starts[0])
            names = ", ".join(sorted({name for _, name, _ in {*first} ^ {*other}}))
            raise ValueError(
                "sitecustomize, usercustomize or a .pth file sets variables differently in the "
                f"workers of this node; expected the same value in each, found others of {names}: "
                "set them in the script"
            )
        differing = _variables_that_differ(workers)
        merged: list[RecipeLine] = []
        for lines in workers:
            known = {x[1] for x in merged}
            merged += [x for x in lines if x[1] not in known and (not known or x[0] != "env")]
        ranks: list[RecipeLine] = [("rank", name, None) for name in sorted(differing)]
        return cls((*ranks, *(x for x in merged if x[0] != "env" or x[1] not in differing)))

    @classmethod
    def from_wire(cls, body: bytes) -> Self:
        """Read a recipe that :meth:`to_wire` has written.

        Raises:
            ValueError: If the data is not a recipe, or one of another version.
        """
        try:
            return cls(recipes.decode(body))
        except ValueError as error:
            raise ValueError(f"the master's recipe is refused: {error}") from error

    def to_wire(self) -> bytes:
        """Return the recipe for storage by the master."""
        return recipes.encode(self.lines)

    @property
    def digest(self) -> str:
        """Identifier of the recipe, which the master computes in the same way."""
        return hashlib.sha256(self.to_wire()).hexdigest()[:16]

    @property
    def shared(self) -> bool:
        """Whether other nodes may use the recipe.

        They may not if the script, or code at the start of the interpreter, puts values into
        ``os.environ``. Such values may be secrets, or valid for one rank only.
        """
        return not any(what in ("env", "rank", "start") for what, _, _ in self.lines)

    @property
    def imports(self) -> set[str]:
        """Names of the modules to import."""
        return {name for what, name, _ in self.lines if what == "import"}

    @property
    def unfit(self) -> set[str]:
        """Names of the installed modules that no zygote may import."""
        return {name for what, name, _ in self.lines if what == "unfit"}

    def with_imports_of(self, older: Self) -> Self:
        """Return the recipe with an older recipe's imports and unfit modules at its end.

        The workers may have imported fewer modules this time.
        """
        known = {name for what, name, _ in self.lines if what in ("import", "unfit", "rank")}
        kinds = ("import", "unfit", "rank")
        rest = [line for line in older.lines if line[0] in kinds and line[1] not in known]
        return type(self)((*self.lines, *rest))

    def extended_by(self, newer: Self) -> Self:
        """Return the recipe with the new lines of another recipe at its end.

        The other one has what workers imported that were forked with this recipe's modules.
        """
        known, modules = set(self.lines), self.imports | self.unfit
        new = [x for x in newer.lines if x not in known and x[1] not in modules]
        return type(self)((*self.lines, *new))

    def without(self, names: Collection[str]) -> Self:
        """Return the recipe with these modules and their submodules as unfit ones."""
        below = tuple(f"{name}." for name in names)
        return type(self)(
            tuple(
                ("unfit", name, value)
                if kind == "import" and (name in names or name.startswith(below))
                else (kind, name, value)
                for kind, name, value in self.lines
            )
        )


@dataclass(frozen=True, slots=True)
class BuildTiming:
    """The times of the build of a zygote and of its spares, in seconds."""

    timeout_s: float = 180.0
    """Limit for the import of the recipe's modules."""
    wake_interval_s: float = 10.0
    """Time between two SIGCONT signals to a zygote that is being built and may be stopped."""
    retry_pauses_s: tuple[float, ...] = (0.5, 2.0, 8.0)
    """Pauses before each new attempt to build a zygote that was lost, while it was built or later.
    Their number limits the attempts until a start is warm: an import may end the process each time,
    or the container may have no room for it."""
    spares_delay_s: float = 0.5
    """Time after a start in which no spares are forked: the workers need the processor."""


class WarmPool:
    """The import recipe that one node has learned of its script, and the zygote built from it."""

    def __init__(
        self,
        program: WorkerProgram,
        *,
        disabled_reason: str,
        scratch: Path,
        children: ChildRegistry,
        on_change: Callable[[], None],
        timing: BuildTiming | None = None,
    ) -> None:
        """Create the pool, without a recipe or a zygote.

        Args:
            program: What the workers run.
            disabled_reason: Why workers are always started cold; empty if warm starts are allowed.
            scratch: Folder for records.
            children: Registry of the agent's child processes. The pool adds zygotes.
            on_change: Called when there is a new recipe or a new zygote, or when warm starts are
                given up.
            timing: Times of the build of a zygote; None for the defaults.
        """
        self._timing = timing or BuildTiming()
        self.disabled_reason = disabled_reason or _unfit_command(program.argv)
        self.recipe: ImportRecipe | None = None
        self.program = program
        self._scratch, self._children, self._on_change = scratch, children, on_change
        self._installed = installed_folders()
        self.shelf = RecipeShelf(program.argv, program.env, self._installed)
        """Where the recipe is kept between runs."""
        self._uses_earlier = False
        """Whether the recipe is of an earlier run, and no zygote of it has been fit in this run."""
        self._unreaped: list[subprocess.Popen[bytes]] = []
        """Processes that were killed, and are not reaped yet."""
        self._import_s = 0.0
        """Seconds that the observed workers needed for their imports; 0 if not known."""
        self._complete = False
        """Whether the recipe is of workers that had come to rest. Otherwise, forked workers are
        observed, too."""
        self._building: asyncio.Task[None] | None = None
        self._rebuild = False
        """Whether the recipe has changed since the present build began."""
        self._may_put_off = True
        """Whether the present build waits for workers that still import modules."""
        self._attempt_over: asyncio.Event | None = None
        """Set when the first attempt of the present build is over."""
        self._file_thread = BackgroundThread("warm-files")
        self._observer = ImportObserver(scratch, self._file_thread)
        self._zygote_thread = BackgroundThread("zygote")
        """The thread that exchanges messages with zygotes, one request after the other."""
        self.forks = Forks(children, self._zygote_thread, self._on_fork_failure)
        """The children of the zygote."""
        self.starter = ZygoteStarter(
            program,
            scratch=scratch,
            children=children,
            files=self._file_thread,
            line=self._zygote_thread,
            kill=self._kill_zygote,
        )
        """Starts the processes of zygotes."""
        self._losses = 0
        """Number of zygotes that were lost since workers were last forked."""
        self._last_refusal = ""
        """The last reason for which a zygote refused to fork, since workers were last forked."""

    @property
    def _zygote(self) -> ZygoteProcess | None:
        """The zygote; None if there is none."""
        return self.forks.zygote

    @property
    def ready(self) -> bool:
        """Whether the next start of workers is warm, because there is a zygote."""
        return self._zygote is not None

    @property
    def has_torch(self) -> bool:
        """Whether the recipe has torch, so that a zygote can fork a store."""
        return self.recipe is not None and "torch" in self.recipe.imports

    @property
    def building(self) -> bool:
        """Whether a zygote is being built."""
        return self._building is not None and not self._building.done()

    # --- The recipe of an earlier run ---

    async def adopt_earlier(self, within_s: float | None = None) -> None:
        """Adopt the recipe that an earlier run of the same command has left, if any.

        A zygote is built from it, so that the first workers are forked, too.

        Args:
            within_s: Seconds after which the search is given up; None for the limit of files.
        """
        if self.disabled_reason:
            return
        found = await self.shelf.find(self._observer.limit_s if within_s is None else within_s)
        if found is None or self.recipe is not None:
            return
        self._import_s, self._complete = found.import_s, True
        self._may_put_off, self._uses_earlier = False, True
        self.adopt(ImportRecipe(tuple(found.lines)))

    @property
    def earlier_s(self) -> float:
        """Seconds for which the first start waits at most for a zygote of an earlier recipe."""
        return self._limit_s if self._uses_earlier else 0.0

    def _keep_for_later(self) -> None:
        """Keep the recipe of the present zygote for later runs of the same command.

        Nothing is kept of workers that have ended early, nor if the recipe has values of
        environment variables: they may be secrets.
        """
        recipe = self.recipe
        if recipe is not None and recipe.shared and self._complete:
            self.shelf.keep(recipe.lines, self._import_s)

    # --- Observation of cold workers ---

    async def observed_argvs(self, argvs: Sequence[list[str]]) -> list[list[str]]:
        """Return the command lines for the cold workers of a new round, with observation.

        The workers are observed only if the files for their records can be made in time. Otherwise
        the command lines are returned unchanged, and nothing is learned from this round.
        """
        return await self._observer.observed_argvs(argvs, self._installed)

    async def learn_from_ended(self) -> None:
        """Learn from what the observed workers of the last round had imported when they ended.

        A job that fails early would otherwise never have a recipe. If the recipe has grown, a
        zygote is built from it, in a task. The records are closed and deleted. If the disk does not
        answer within ``FILES_S``, nothing is learned. Records that contradict each other, or cannot
        be read, end all warm starts.
        """
        grown = await self._observer.end()
        if grown is not None and not self.disabled_reason and (grown or not self._complete):
            await self._learn(complete=False)

    def watch(self, imports_torch: Callable[[], None]) -> None:
        """Read the records of the round's workers from now on, in a task.

        Without observed workers nothing is read.

        Args:
            imports_torch: Called once, in the event loop, when a worker has imported torch.
        """
        self._observer.watch(
            active=lambda: not self.disabled_reason,
            grown=self._put_off_building,
            quiet=functools.partial(self._learn, complete=True),
            imports_torch=imports_torch,
        )

    async def _learn(self, *, complete: bool) -> None:
        """Merge the records into a recipe, and adopt it if it has new imports.

        Without new imports, a zygote is built if there is none. Records that contradict each other
        or cannot be read end all warm starts. If the merge takes too long, nothing is learned.

        Args:
            complete: Whether the workers import nothing any more. If they have ended instead, the
                next round is about to start, and nothing puts the build of the zygote off.
        """

        texts = self._observer.texts

        def merged() -> ImportRecipe:
            return ImportRecipe.from_records(texts, self._installed)

        try:
            # A line takes microseconds, so the longest records take seconds.
            recipe = await self._file_thread.run(merged, self._timing.timeout_s)
        except OverdueError:
            return
        except ValueError as error:
            self._disable(str(error))
            return
        if not self._observer.of_forks:
            self._import_s = max(self._import_s, self._observer.import_s)
        self._complete = complete
        self._may_put_off = complete
        if self.recipe is not None:
            recipe = recipe.without(self.recipe.unfit)
        if recipe.imports and self.recipe is None:
            self.adopt(recipe)
        elif self.recipe is not None and recipe.imports - self.recipe.imports:
            older = self.recipe
            of_forks = self._observer.of_forks
            self.adopt(older.extended_by(recipe) if of_forks else recipe.with_imports_of(older))
        elif self.recipe is not None and self._zygote is None and not self.building:
            self._build_soon()
        elif self._zygote is not None:  # built from the recipe of another node
            self._keep_for_later()

    def adopt(self, recipe: ImportRecipe) -> None:
        """Keep a recipe of this node or another node, and begin to build a zygote from it.

        ``on_change`` is called now, and again when the zygote is there or warm starts are given up.
        While warm starts are disabled, no zygote is built.
        """
        self.recipe = recipe
        log.info("recipe_learned", extra={"modules": len(recipe.imports), "id": recipe.digest})
        self._build_soon()
        self._on_change()

    # --- The zygote ---

    def _build_soon(self, pause_s: float = 0.0) -> None:
        """Begin to build a zygote in a task, or have the present build use the new recipe.

        The method does nothing while warm starts are disabled.

        Args:
            pause_s: Seconds before the build. A start does not wait for them.
        """
        if self.disabled_reason:
            return
        if self.building:
            self._rebuild = True
        else:
            self._attempt_over = asyncio.Event()
            self._building = asyncio.create_task(self._build(pause_s))
            self._building.add_done_callback(raise_task_error)

    def _put_off_building(self) -> None:
        """Stop a build if there is no zygote: the recipe still grows, and workers need the CPUs.

        The next call of :meth:`_learn` begins it again. A build from what ended workers had
        imported goes on. Otherwise a job whose workers die early would never have a zygote.
        """
        if self._building is not None and self._zygote is None and self._may_put_off:
            self._building.cancel()
            self._building = None
            self._end_attempt()

    async def _build(self, pause_s: float) -> None:
        """Build zygotes until one is fit to fork workers, or the attempts are used up.

        Each attempt leaves out the modules at fault in an unfit zygote. Without such modules, or
        if they were left out already, there is no further attempt. A zygote that was lost is built
        again after a pause. If the recipe has changed meanwhile, the zygote is dropped and another
        one is built.

        A fit zygote replaces the present one, and ``on_change`` is called. If none is fit, the
        present one stays; without one, warm starts are disabled.

        Args:
            pause_s: Seconds before the first attempt.
        """
        if pause_s:
            self._end_wait()
            await asyncio.sleep(pause_s)
            self._attempt_over = asyncio.Event()
        tries = 0
        while tries < MAX_BUILDS:
            assert self.recipe is not None
            self._rebuild = False
            began = time.monotonic()
            try:
                candidate = await self._build_candidate(self.recipe)
            except ZygoteLostError as lost:
                if self.disabled_reason:  # the agent ends: it is no fault of the recipe
                    return
                fitness = ZygoteFitness(str(lost))
                if self._losses >= len(self._timing.retry_pauses_s):
                    break
                pause = self._timing.retry_pauses_s[self._losses]
                self._losses += 1
                then = f"it is built again after {pause:g} s"
                self._end_attempt()
                log.info("zygote_lost", extra={"why": str(lost), "then": then})
                await asyncio.sleep(pause)
                continue
            fitness = candidate.fitness
            if self._rebuild:
                self._kill_zygote(candidate)
                continue
            tries += 1
            if not fitness.unfit:
                self._kill_zygote(self._zygote)
                self.forks.use(candidate)
                took = round(time.monotonic() - began, 3)
                log.info("zygote_ready", extra={"modules": fitness.modules, "took_s": took})
                self._end_attempt()
                if not self._uses_earlier:
                    self._keep_for_later()
                self._uses_earlier = False
                self._on_change()
                return
            self._kill_zygote(candidate)
            self._end_attempt()
            log.info("zygote_unfit", extra={"why": fitness.unfit, "without": list(fitness.blame)})
            smaller = self.recipe.without(fitness.blame)
            if smaller == self.recipe:
                break  # the next one would be the same
            self.recipe = smaller
        self._end_attempt()
        if self._zygote is None:
            self._disable(f"no zygote can fork workers: {fitness.unfit}")

    def _end_attempt(self) -> None:
        """End the wait of a round for the zygote that is being built.

        If an earlier run's recipe has failed, it is removed, and a first start is not delayed.
        """
        if self._uses_earlier and self._zygote is None:
            self.shelf.forget()
            self._uses_earlier = False
            self._on_change()
        self._end_wait()

    def _end_wait(self) -> None:
        """Have a round that waits for the zygote start cold."""
        if self._attempt_over is not None:
            self._attempt_over.set()

    @property
    def _limit_s(self) -> float:
        """Seconds for which a start waits at most for a zygote."""
        return 2 * self._import_s + ZYGOTE_S

    async def becomes_ready(self) -> bool:
        """Return whether workers can be forked; wait for a zygote if one is being built.

        The wait replaces a cold start, in which each worker imports the same modules beside the
        zygote. It ends with the first attempt of the build. It takes at most ``ZYGOTE_S`` plus
        twice the time that cold workers needed for their imports. If that time is not known,
        nothing is awaited.
        """
        if not self.ready and self.building and self._import_s and self._attempt_over is not None:
            log.info("zygote_awaited", extra={"at_most_s": round(self._limit_s, 3)})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    await self._attempt_over.wait()
        return self.ready

    async def _build_candidate(self, recipe: ImportRecipe) -> ZygoteProcess:
        """Build a zygote, and wait for its report whether it is fit.

        One that does not report within the time limit is returned as unfit.

        Raises:
            ZygoteLostError: The zygote could not be started, has ended without a report, or has
                not finished its report.
        """
        candidate = await self.starter.start(recipe.lines)
        try:
            await self._wait(candidate)
            body, _ = await self._zygote_thread.run(lambda: receive(candidate.line), FORK_S)
            candidate.fitness = ZygoteFitness.decode(body)
        except OverdueError as error:
            self._kill_zygote(candidate)
            raise ZygoteLostError(f"it does not respond ({error})") from error
        except TimeoutError:
            candidate.fitness = ZygoteFitness(f"it is not ready after {self._timing.timeout_s:g} s")
        except (EOFError, OSError, ValueError) as error:
            self._kill_zygote(candidate)
            last = await self.last_line(candidate.output)
            raise ZygoteLostError(": ".join(["it has ended", *([last] if last else [])])) from error
        except asyncio.CancelledError:
            self._kill_zygote(candidate)
            raise
        finally:
            self.starter.remove_config(candidate)
        return candidate

    async def _wait(self, built: ZygoteProcess) -> None:
        """Wait until a zygote sends a message or ends; continue it periodically if it was stopped.

        Raises:
            TimeoutError: Neither happens within ``BuildTiming.timeout_s``.
        """
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(built.line, readable.set)
        try:
            async with asyncio.timeout(self._timing.timeout_s):
                while not readable.is_set():
                    wake(built.process)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._timing.wake_interval_s):
                            await readable.wait()
        finally:
            loop.remove_reader(built.line)

    async def last_line(self, output: Path) -> str:
        """Return the last line in a process's output file; empty if the disk does not answer."""
        with contextlib.suppress(OverdueError):
            return await self._file_thread.run(lambda: _last_line(output), self._observer.limit_s)
        return ""

    async def fork(self, requests: Sequence[ForkRequest]) -> list[ForkedProcess] | None:
        """Fork workers from the zygote; None if that fails, and they must be started cold.

        The result is also None without a zygote, or for more than ``MAX_FDS`` workers. A zygote
        that fails is replaced. Warm starts end instead if it refuses for the same reason as the one
        before, or if too many were lost, and no workers were forked in between. The workers wait
        for :meth:`ForkedProcess.go`. Their imports are recorded if the recipe comes from workers
        that ended before they had come to rest.
        """
        if len(requests) > MAX_FDS:
            return None  # too many for one message; a start of so many workers is slow anyway
        observe: list[list[str]] = [[] for _ in requests]
        if not self._complete and not self.disabled_reason:
            observe = await self._observer.observe_forks(len(requests), self._installed)
        starts = [
            ChildStart(WorkerTask(r.argv, r.env, o), (r.out, r.err))
            for r, o in zip(requests, observe, strict=True)
        ]
        children = await self.forks.start(starts, requests[0].argv)
        if children:
            self._losses, self._last_refusal = 0, ""
        return children

    async def fork_store(self, listening: int, port: int) -> ForkedProcess | None:
        """Fork the store of a round from the zygote; None without a zygote, or if that fails.

        The store waits for :meth:`ForkedProcess.go`.
        """
        children = await self.forks.start([ChildStart(StoreTask(port), (listening,))])
        return children[0] if children else None

    def keep_spares(self, workers: int, *, store: bool) -> None:
        """Have children for the next start, which makes it shorter. They are forked later.

        Args:
            workers: Number of workers.
            store: Whether this node has the store of the round.
        """
        count = workers + (store and self.has_torch)
        self.forks.keep_spares(count, self._timing.spares_delay_s)

    def _on_fork_failure(self, why: str, refused: bool) -> None:
        """End the zygote that has not answered, or has refused; another one is built.

        If the reason is that of the refusal before, warm starts are disabled instead. A fork that
        fails is no such reason, because memory or processes may become free.
        """
        if not refused or why.startswith(NO_FORK):
            self._on_loss(why)
        elif why == self._last_refusal:
            self._disable(why)  # a new zygote would refuse as well
        else:
            self._last_refusal = why
            self._replace_zygote(why, 0.0)

    def _on_loss(self, why: str) -> None:
        """Replace the zygote that is lost after a pause, or disable warm starts after too many.

        Otherwise a zygote for which there is no memory, say, would be built without an end.
        """
        pauses = (*self._timing.retry_pauses_s, 0.0)
        self._losses += 1
        if self.disabled_reason or self._losses < len(pauses):
            self._replace_zygote(why, pauses[min(self._losses, len(pauses)) - 1])
            return
        self._disable(
            f"{self._losses} zygotes were lost, and no workers were forked in between; "
            f"expected one that stays; the last one: {why}: give the container more memory, or its "
            "packages a faster disk, or use --cold-start"
        )

    def _replace_zygote(self, why: str, pause_s: float) -> None:
        """Log that the zygote is lost, kill it, and begin to build a new one from the recipe.

        Nothing is logged or built once the agent ends: then zygotes end with all other processes.

        Args:
            why: Why it is lost.
            pause_s: Seconds before the build.
        """
        if not self.disabled_reason:
            then = f"cold start; it is built again after {pause_s:g} s"
            log.warning("zygote_lost", extra={"why": why, "then": then})
        self._kill_zygote(self._zygote)
        self.forks.use(None)
        if self.recipe is not None:
            self._build_soon(pause_s)

    def _kill_zygote(self, ended: ZygoteProcess | None) -> None:
        """Kill a zygote and its session, without waiting: a file system may hold the process.

        It is reaped after its end, by :meth:`child_ended`. Nothing happens if there is none.
        """
        if ended is None:
            return
        with contextlib.suppress(OSError):
            ended.line.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._zygote_thread.post(ended.line.close)
        for victim in members({ended.session}):
            victim.id.signal(signal.SIGKILL)
        self._children.remove_session(ended.session)
        self.reap_later(ended.process)

    def reap_later(self, killed: "subprocess.Popen[bytes]") -> None:
        """Keep the ``Popen`` object of a killed child until the child is reaped.

        Otherwise it would be reaped as an orphan. Its ``Popen`` object could then take the exit
        status of a later child that has the same process id.
        """
        self._children.non_worker_pids.add(killed.pid)
        self._unreaped.append(killed)
        self._reap()

    def _reap(self) -> None:
        over = [process for process in self._unreaped if process.poll() is not None]
        for process in over:
            self._unreaped.remove(process)
            self._children.non_worker_pids.discard(process.pid)

    def child_ended(self) -> None:
        """Reap killed children; if the zygote has ended, replace it or give warm starts up.

        The agent calls this after the end of each of its children.
        """
        self._reap()
        self.forks.child_ended()
        if self._zygote is not None:
            code = exit_code(os.P_PID, self._zygote.process.pid)
            if code is not None:
                self._on_loss(f"it has ended with code {code}")

    def _disable(self, why: str) -> None:
        """Start all workers cold from now on, and kill the zygote; only the first call counts.

        ``on_change`` is called.
        """
        if not self.disabled_reason:
            self.disabled_reason = why
            log.warning("warm_start_disabled", extra={"why": why})
            self._kill_zygote(self._zygote)
            self.forks.use(None)
            self.starter.end_early()
            self._on_change()

    async def close(self) -> None:
        """End the zygote, the observation of workers and a build that is under way.

        The records are not closed. The zygote is killed, and not reaped here.
        """
        if self._building is not None:
            self._building.cancel()
        tasks = [t for t in (self._observer.stop(), self._building) if t is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.forks.stop_forking_spares()
        self.starter.end_early()
        self._kill_zygote(self._zygote)
        self.forks.use(None)


def _variables_that_differ(workers: Sequence[Sequence[RecipeLine]]) -> set[str]:
    """Return the variables into which workers put different values, for example a device.

    A worker that has come less far than another does not differ.

    Args:
        workers: The lines of each worker's record.
    """
    settings = [[line for line in lines if line[0] == "env"] for lines in workers]
    longest = max(settings, key=len, default=[])
    if all(longest[: len(own)] == own for own in settings):
        return set()
    names = {name for own in settings for _, name, _ in own}
    return {
        name
        for name in names
        if len({tuple(line for line in own if line[1] == name) for own in settings}) > 1
    }


def _last_line(path: Path) -> str:
    """Return the last line in the last :data:`MAX_OUTPUT_TAIL` bytes of a file; empty if none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_OUTPUT_TAIL))
            text = file.read(MAX_OUTPUT_TAIL).decode(errors="replace")
    except OSError:
        return ""
    return text.strip().rpartition("\n")[2]


def _unfit_command(argv: Sequence[str]) -> str:
    """Return why a command line cannot be run in a forked process; empty if it can."""
    path = argv[2]
    if path == "-m":
        return ""
    if path.endswith(".pyc"):
        return "the script is compiled"
    if os.path.isdir(path):
        return "the script is a folder"
    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return ""
    return "the script is an archive"


def installed_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages, with a final slash."""
    paths = sysconfig.get_paths()
    folders = [paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    # Libraries may also be on PYTHONPATH or in a .pth file, for example on a volume. The
    # .dist-info folders of pip distinguish them from the user's own modules.
    folders += [path for path in sys.path if os.path.isdir(path) and _has_packages(path)]
    # DLRover is not a module of the user, even if it is installed in editable mode: torch imports
    # it with its rendezvous handlers.
    folders += [str(Path(__file__).parents[1]), *dlrover_py.__path__]
    return tuple(f"{folder}/" for folder in dict.fromkeys(folders))


def _has_packages(folder: str) -> bool:
    """Return whether pip has installed packages in a folder."""
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False
