"""The agent's side of warm starts: learns the job's recipe, and keeps a zygote built from it.

See docs/warm-start.md. The processes are in zygote.py (what is forked from) and script.py (what a
worker becomes, and how a cold one is observed).
"""

import ast
import asyncio
import contextlib
import hashlib
import json
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
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

import dlrover_agent
import dlrover_py
from dlrover_agent import script, zygote
from dlrover_agent.script import BOOT
from dlrover_agent.zygote import Fitness, Orders, receive, send
from dlrover_py.helpers import wake
from dlrover_py.processes import ProcessId, exit_code, members

log = logging.getLogger("agent.warm")

MAX_RECIPE = 16 << 20
RECORD_SIZE = 8 << 20
"""Of a file of zeros: it takes no more room than what is written."""
LOOK_S = 0.25
QUIET_S = 3.0
"""Nothing new was imported for so long: the recipe is complete, for now."""
BUILD_S = 180.0
WAKE_S = 10.0
"""A zygote that somebody has stopped (SIGSTOP) is woken so often while it is built."""
MAX_FDS = 253
"""In one message (SCM_MAX_FD in the kernel)."""
FORK_S = 2.0
"""The agent waits for a fork, and for nothing else meanwhile: well below a lease."""
AGAIN_S = (0.5, 2.0, 8.0)
"""Pauses before a zygote is built again that was lost while it was built: as often as that. One
that an import ends each time is not tried for ever."""
BUILDS = 5
"""Zygotes that are tried one after the other, each without what was wrong with the last."""

Line = tuple[str, str, str | None]
_LINES = TypeAdapter(list[Line])


@dataclass(frozen=True, slots=True)
class Recipe:
    """What workers import from installed packages, in its order, and what the script's own code
    puts into ``os.environ`` between; see :func:`dlrover_agent.script.watch` for the lines.
    ``("own", name, origin)`` is a module of the user's, which no zygote may hold."""

    lines: tuple[Line, ...]

    @classmethod
    def from_records(cls, records: Iterable[str], installed: tuple[str, ...]) -> Self:
        """Merge the records of one node's workers.

        Raises:
            ValueError: the workers differ in what they put into ``os.environ``.
        """
        merged: list[Line] = []
        settings: list[list[Line]] = []
        for text in records:
            lines = [_parsed(line) for line in text.splitlines() if "\0" not in line]
            lines = [
                ("own", name, value)
                if what == "import" and not str(value).startswith(installed)
                else (what, name, value)
                for what, name, value in lines
            ]
            while lines and lines[-1][0] == "env":  # nothing is imported after it
                lines.pop()
            settings.append([x for x in lines if x[0] == "env"])
            known = {x[1] for x in merged}
            merged += [x for x in lines if x[1] not in known and (not known or x[0] != "env")]
        longest = max(settings, key=len, default=[])
        if any(longest[: len(own)] != own for own in settings):  # one may be behind the others
            raise ValueError("workers of this node put different values into os.environ")
        return cls(tuple(merged))

    @classmethod
    def from_wire(cls, body: bytes) -> Self:
        """Read what :meth:`to_wire` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            text = zlib.decompressobj().decompress(body, MAX_RECIPE)
            return cls(tuple(_LINES.validate_python(json.loads(text))))
        except (zlib.error, ValueError, RecursionError) as error:  # pydantic's too
            # Paths that are no UTF-8 stand in it as JSON's lone surrogates, which pydantic refuses.
            raise ValueError("what the master keeps is not a recipe") from error

    def to_wire(self) -> bytes:
        """For the master to keep; thousands of paths are alike, so they are compressed."""
        return zlib.compress(json.dumps(self.lines).encode())

    @property
    def digest(self) -> str:
        """Tells one recipe from another; the master names it so too."""
        return hashlib.sha256(self.to_wire()).hexdigest()[:16]

    @property
    def shared(self) -> bool:
        """Whether other nodes may have it: not where a script puts values into ``os.environ``,
        which may be secrets, or belong to one rank."""
        return not any(what == "env" for what, _, _ in self.lines)

    @property
    def imports(self) -> set[str]:
        """Names of modules."""
        return {name for what, name, _ in self.lines if what == "import"}

    def with_imports_of(self, older: Self) -> Self:
        """With what was learnt before: this time the workers may not have come as far."""
        known = self.imports
        rest = [line for line in older.lines if line[0] == "import" and line[1] not in known]
        return type(self)((*self.lines, *rest))

    def without(self, names: Sequence[str]) -> Self:
        """The same, but for these modules and what is in them."""
        below = tuple(f"{name}." for name in names)
        return type(self)(
            tuple(
                line
                for line in self.lines
                if line[0] != "import" or not (line[1] in names or line[1].startswith(below))
            )
        )


def _parsed(line: str) -> Line:
    what, name, value = ast.literal_eval(line)
    return what, name, value


@dataclass(frozen=True, slots=True)
class Birth:
    """One worker that is to be forked."""

    argv: list[str]
    env: dict[str, str]
    out: int
    err: int


@dataclass(slots=True)
class Child:
    """A process that was forked for us, and waits for :meth:`go`."""

    pid: int
    control: socket.socket
    process: subprocess.Popen[bytes] | None = None
    """If it was not forked, but started."""

    def go(self) -> None:
        """Let it become what it is for."""
        with contextlib.suppress(OSError):
            self.control.send(b"g")

    def started(self) -> bool:
        """Whether it got as far as the user's code."""
        self.control.setblocking(False)
        try:
            return self.control.recv(1, socket.MSG_PEEK) == zygote.STARTED
        except OSError:
            return False

    def wait(self) -> int:
        """Its exit code, or the negative signal number; it has ended, a pidfd said so."""
        if self.process is not None:
            return self.process.wait()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@dataclass(slots=True)
class _Zygote:
    process: subprocess.Popen[bytes]
    session: ProcessId
    line: socket.socket
    fitness: Fitness = field(default_factory=Fitness)


class _Lost(Exception):
    """A zygote was lost while it was built: why. It says nothing of the recipe: somebody, or the
    kernel for want of memory, has killed it or stopped it."""


class _Record:
    """What one observed worker has written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = ""
        self._file = path.open("rb", buffering=0)

    def read(self) -> bool:
        """Take in what is new; true if there is any."""
        before = len(self.text)
        while True:
            self._file.seek(len(self.text))  # it is ASCII
            new = self._file.read(1 << 16)
            whole = new[: new.rfind(b"\n") + 1]
            self.text += whole.decode()
            if not whole or b"\0" in new:
                return len(self.text) > before

    def close(self) -> None:
        """Forget it."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class Warm:
    """What one node knows of its script's imports, and the zygote that is built from it."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        per_rank: Iterable[str],
        *,
        off: str,
        scratch: Path,
        kin: set[int],
        guard: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        """Start with nothing known.

        Args:
            argv: of workers: ``PYTHON -u [-m] SCRIPT ARGS…``.
            env: of workers, without what differs by rank.
            per_rank: names of what differs by rank.
            off: why workers are only ever started cold; empty if they are not.
            scratch: folder for records.
            kin: children of this process that are not workers; the zygote is added.
            guard: tells the guardian of a session.
            changed: called when there is news: a recipe, a zygote, or none for good.
        """
        self.off = off or _unfit_command(argv)
        self.recipe: Recipe | None = None
        self._argv, self._env, self._per_rank = list(argv), dict(env), list(per_rank)
        self._scratch, self._kin, self._guard, self._changed = scratch, kin, guard, changed
        self._installed = _installed()
        self._zygote: _Zygote | None = None
        self._dying: list[subprocess.Popen[bytes]] = []
        """They were killed, and are not reaped yet."""
        self._records: list[_Record] = []
        self._watching: asyncio.Task[None] | None = None
        self._building: asyncio.Task[None] | None = None
        self._denied: list[str] = []
        self._rebuild = False
        self._number = 0
        self._losses = 0
        """Zygotes that were lost one after the other while they were built."""
        self._refusal = ""

    @property
    def ready(self) -> bool:
        """Whether the next start is a warm one."""
        return self._zygote is not None

    @property
    def sessions(self) -> list[ProcessId]:
        """The zygote's session, if there is a zygote."""
        return [self._zygote.session] if self._zygote is not None else []

    @property
    def has_torch(self) -> bool:
        """Whether the zygote can fork a store."""
        return self.recipe is not None and "torch" in self.recipe.imports

    @property
    def building(self) -> bool:
        """Whether a zygote is on its way."""
        return self._building is not None and not self._building.done()

    # --- cold workers, observed ---

    def observed(self, local_rank: int, argv: list[str]) -> list[str]:
        """Command line for a cold worker of a new round that is observed."""
        path = self._scratch / f"imports-{local_rank}"
        with contextlib.suppress(OSError), open(path, "wb") as file:
            file.truncate(RECORD_SIZE)
            self._records.append(_Record(path))
            installed = os.pathsep.join(self._installed)
            return [*argv[:2], "-c", script.COLD, str(path), installed, *argv[2:]]
        return argv

    def forget_records(self) -> None:
        """The observed workers have ended."""
        for record in self._records:
            record.close()
        self._records.clear()

    def watch(self, imports_torch: Callable[[], None]) -> None:
        """Look at the records of the round's workers from now on."""
        if self._watching is not None:
            self._watching.cancel()
        if self._records:
            self._watching = asyncio.create_task(self._watch(imports_torch))
            self._watching.add_done_callback(_raise)

    async def _watch(self, imports_torch: Callable[[], None]) -> None:
        quiet_since = time.monotonic()
        learnt = told = False
        while not self.off:
            await asyncio.sleep(LOOK_S if not learnt else QUIET_S)
            now = time.monotonic()
            if sum(record.read() for record in self._records):
                quiet_since, learnt = now, False
                self._put_off_building()
                if not told and any("('import', 'torch'," in r.text for r in self._records):
                    told = True
                    imports_torch()
            elif not learnt and now - quiet_since >= QUIET_S:
                learnt = True
                self._learn()

    def _learn(self) -> None:
        try:
            recipe = Recipe.from_records([r.text for r in self._records], self._installed)
        except (ValueError, SyntaxError) as error:
            self._give_up(str(error))
            return
        if recipe.imports and self.recipe is None:
            self.adopt(recipe)
        elif self.recipe is not None and recipe.imports - self.recipe.imports:
            self.adopt(recipe.with_imports_of(self.recipe))
        elif self.recipe is not None and self._zygote is None:
            self._build_soon()

    def adopt(self, recipe: Recipe) -> None:
        """Build a zygote from this recipe, learnt here or by another node."""
        self.recipe = recipe
        log.info("recipe_learnt", extra={"modules": len(recipe.imports), "id": recipe.digest})
        self._build_soon()
        self._changed()

    # --- the zygote ---

    def _build_soon(self) -> None:
        if self.off:
            return
        if self.building:
            self._rebuild = True
        else:
            self._building = asyncio.create_task(self._build())
            self._building.add_done_callback(_raise)

    def _put_off_building(self) -> None:
        """The recipe grows yet: leave the processor to the worker that imports."""
        if self._building is not None and self._zygote is None:
            self._building.cancel()
            self._building = None

    async def _build(self) -> None:
        tries = 0
        while tries < BUILDS:
            assert self.recipe is not None
            self._rebuild = False
            began = time.monotonic()
            try:
                candidate = await self._candidate(self.recipe.without(self._denied))
            except _Lost as lost:
                fitness = Fitness(str(lost))
                if self._losses == len(AGAIN_S):
                    break
                pause = AGAIN_S[self._losses]
                self._losses += 1
                then = f"it is built again after {pause:g} s"
                log.info("zygote_lost", extra={"why": str(lost), "then": then})
                await asyncio.sleep(pause)
                continue
            fitness = candidate.fitness
            if self._rebuild:
                self._end(candidate)
                continue
            tries += 1
            if not fitness.unfit:
                self._losses = 0
                old, self._zygote = self._zygote, candidate
                if old is not None:
                    self._end(old)
                took = round(time.monotonic() - began, 3)
                log.info("zygote_ready", extra={"modules": fitness.modules, "took_s": took})
                self._changed()
                return
            self._end(candidate)
            log.info("zygote_unfit", extra={"why": fitness.unfit, "without": fitness.blame})
            if not fitness.blame:
                break
            self._denied += fitness.blame
        if self._zygote is None:
            self._give_up(f"no zygote is fit: {fitness.unfit}")

    async def _candidate(self, recipe: Recipe) -> _Zygote:
        """Build a zygote, and let it say whether it is fit.

        Raises:
            _Lost: it has said nothing.
        """
        self._number += 1
        stem = self._scratch / f"zygote-{self._number}"
        output, orders = stem.with_suffix(".log"), stem.with_suffix(".json")
        try:
            found = self._started(recipe, output, orders)
        except OSError as error:
            raise _Lost(f"it cannot be started: {error.strerror}") from error
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(found.line, readable.set)
        try:
            async with asyncio.timeout(BUILD_S):
                while not readable.is_set():
                    wake(found.process)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(WAKE_S):
                            await readable.wait()
            found.line.settimeout(FORK_S)
            found.fitness = Fitness(**receive(found.line)[0])
        except TimeoutError:
            found.fitness = Fitness(f"it is not ready after {BUILD_S:g} s")
        except (EOFError, OSError) as error:
            self._end(found)
            last = output.read_text(errors="replace").strip().splitlines()[-1:]
            raise _Lost(": ".join(["it has ended", *last])) from error
        except asyncio.CancelledError:
            self._end(found)
            raise
        finally:
            loop.remove_reader(found.line)
            orders.unlink(missing_ok=True)
        return found

    def _started(self, recipe: Recipe, output: Path, orders: Path) -> _Zygote:
        ours, theirs = socket.socketpair()
        try:
            with theirs, output.open("wb") as words:
                lines = [list(line) for line in recipe.lines]
                wanted = Orders(theirs.fileno(), os.getpid(), lines, self._per_rank)
                orders.write_text(json.dumps(asdict(wanted)))
                room = self._argv[2:]  # so that workers can show their own command line
                process = subprocess.Popen(
                    [*self._argv[:2], "-c", BOOT.format(module="zygote"), str(orders), *room],
                    env=self._env,
                    pass_fds=[theirs.fileno()],
                    stdout=words,
                    stderr=words,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        self._kin.add(process.pid)
        found = _Zygote(process, ProcessId.of(process.pid), ours)
        self._guard(f"+{found.session}")
        return found

    def fork(self, births: Sequence[Birth]) -> list[Child] | None:
        """Fork workers; None if that is not possible, and they are to be started cold."""
        if 3 * len(births) > MAX_FDS:
            return None  # more than one message carries; so many workers have time to start
        pairs = _pairs(len(births))
        fds = []
        for (_, theirs), birth in zip(pairs, births, strict=True):
            fds += [theirs.fileno(), birth.out, birth.err]
        request = {"fork": [{"argv": b.argv, "env": b.env} for b in births]}
        return self._ask(request, fds, pairs)

    def fork_store(self, listening: int, port: int) -> Child | None:
        """Fork the store of a round."""
        pairs = _pairs(1)
        fds = [theirs.fileno() for _, theirs in pairs]
        children = self._ask({"store": port}, [*fds, listening], pairs)
        return children[0] if children else None

    def _ask(
        self,
        request: object,
        fds: list[int],
        pairs: list[tuple[socket.socket, socket.socket]],
    ) -> list[Child] | None:
        children = None
        try:
            if self._zygote is not None and pairs:
                answer = self._answer(self._zygote, request, fds)
                if len(answer) == len(pairs):
                    children = [
                        Child(pid, ours) for pid, (ours, _) in zip(answer, pairs, strict=True)
                    ]
        finally:
            for ours, theirs in pairs:
                theirs.close()
                if children is None:
                    ours.close()
        return children

    def _answer(self, asked: _Zygote, request: object, fds: list[int]) -> list[int]:
        try:
            send(asked.line, request, fds)
            answer, _ = receive(asked.line)
        except (EOFError, OSError) as error:
            self._lose(f"it does not answer ({error or 'closed'})")
            return []
        refusal = str(answer["refusal"])
        if refusal and refusal == self._refusal:
            self._give_up(refusal)  # building it again does not help
        elif refusal:
            self._refusal = refusal
            self._lose(refusal)
        return list(answer["pids"])

    def _lose(self, why: str) -> None:
        """The zygote is of no use any more: this start is cold, and another one is built."""
        log.warning("zygote_lost", extra={"why": why, "then": "cold start; it is built again"})
        if self._zygote is not None:
            self._end(self._zygote)
            self._zygote = None
        if self.recipe is not None:
            self._build_soon()

    def _end(self, ended: _Zygote) -> None:
        """Kill it, and what it has started; not waited for, as a file system may hold it."""
        ended.line.close()
        for victim in members({ended.session}):
            victim.id.signal(signal.SIGKILL)
        self._guard(f"-{ended.session}")
        self.reap_later(ended.process)

    def reap_later(self, killed: "subprocess.Popen[bytes]") -> None:
        """Keep a child that was killed until it is reaped. Else its `Popen` would be reaped as an
        orphan, and would later take the exit status of a child that has its number by then."""
        self._kin.add(killed.pid)
        self._dying.append(killed)
        self._reap()

    def _reap(self) -> None:
        over = [process for process in self._dying if process.poll() is not None]
        for process in over:
            self._dying.remove(process)
            self._kin.discard(process.pid)

    def child_ended(self) -> None:
        """A child of ours has ended: perhaps the zygote."""
        self._reap()
        if self._zygote is not None:
            code = exit_code(os.P_PID, self._zygote.process.pid)
            if code is not None:
                self._lose(f"it has ended with code {code}")

    def _give_up(self, why: str) -> None:
        if not self.off:
            self.off = why
            log.warning("cold_from_now_on", extra={"why": why})
            if self._zygote is not None:
                self._end(self._zygote)
                self._zygote = None
            self._changed()

    async def close(self) -> None:
        """End what is under way."""
        tasks = [t for t in (self._watching, self._building) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._zygote is not None:
            self._end(self._zygote)
            self._zygote = None


def _pairs(number: int) -> list[tuple[socket.socket, socket.socket]]:
    """Make this number of control lines; none if there are not enough descriptors."""
    pairs: list[tuple[socket.socket, socket.socket]] = []
    try:
        pairs.extend(socket.socketpair() for _ in range(number))
    except OSError:
        for ours, theirs in pairs:
            ours.close()
            theirs.close()
        pairs.clear()
    return pairs


def _raise(task: asyncio.Task[None]) -> None:
    """A fault of ours must be seen."""
    if not task.cancelled():
        task.result()


def _unfit_command(argv: Sequence[str]) -> str:
    """Why this command line cannot be run in a process that was forked; empty if it can."""
    path = argv[2]
    if path == "-m":
        return ""
    if path.endswith(".pyc"):
        return "the script is compiled"
    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return ""
    return "the script is an archive"


def _installed() -> tuple[str, ...]:
    """Folders of the standard library and of installed packages, with a slash at the end."""
    paths = sysconfig.get_paths()
    folders = [paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    # Libraries may also come by PYTHONPATH or a .pth file, from a volume, say; what pip has put
    # there tells them from the user's own modules.
    folders += [path for path in sys.path if os.path.isdir(path) and _has_packages(path)]
    # We are no module of the user's, where we are installed for editing either: torch imports us
    # with its rendezvous handlers.
    folders += [path for package in (dlrover_agent, dlrover_py) for path in package.__path__]
    return tuple(f"{folder}/" for folder in dict.fromkeys(folders))


def _has_packages(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False
