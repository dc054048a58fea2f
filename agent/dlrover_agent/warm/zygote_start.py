"""The agent's start of a zygote's process, also before the agent knows what the zygote must import.

In a cluster the master has the import recipe, and may itself be starting. Nearly all scripts import
torch. So a zygote can import it meanwhile, and go on with the recipe later.
"""

import asyncio
import contextlib
import functools
import importlib.util
import os
import site
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlrover_agent import temporary_folder
from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.observer import FILES_S
from dlrover_agent.warm.script import BOOT
from dlrover_agent.warm.zygote import send
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.process.identity import ProcessId
from dlrover_py.process.ownership import NotOwnedError
from dlrover_py.process.starter import Starter, kill_and_reap
from dlrover_py.protocol.zygote import RecipeLine, ZygoteConfig, ZygoteFitness, encode

SEND_S = 2.0
"""Seconds for one short message to a zygote."""


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """What all workers of this node run."""

    argv: Sequence[str]
    """Command line: ``PYTHON -u [-m] SCRIPT ARGS…``."""
    env: Mapping[str, str]
    """Environment, without variables that differ by rank."""
    per_rank: Sequence[str]
    """Names of the variables that differ by rank."""
    cpus: frozenset[int] = frozenset()
    """CPUs on which the workers of this node run; empty for all CPUs of the agent."""


@dataclass(slots=True)
class ZygoteProcess:
    """A zygote of this node, as the agent sees it."""

    process: subprocess.Popen[bytes]
    session: ProcessId
    line: socket.socket
    output: Path
    """File with its output."""
    config: Path
    """File with its configuration."""
    early: str = ""
    """Module that it imports before its recipe is known; empty if it was known at the start."""
    fitness: ZygoteFitness = field(default_factory=ZygoteFitness)


class ZygoteLostError(Exception):
    """A zygote was lost while it was built. The text says why.

    The recipe need not be the cause: a user, or the kernel's out-of-memory killer, may have killed
    or stopped the process.
    """


class ZygoteStarter:
    """Starts the zygotes of one node, one after the other."""

    def __init__(
        self,
        program: WorkerProgram,
        *,
        scratch: Path,
        children: ChildRegistry,
        files: BackgroundThread,
        line: BackgroundThread,
        kill: Callable[[ZygoteProcess], None],
    ) -> None:
        """Create the starter. Nothing is started yet.

        Args:
            program: What the workers run.
            scratch: Folder for the files of zygotes.
            children: Registry of the agent's child processes. The starter adds zygotes.
            files: Thread that writes files.
            line: Thread that sends messages to zygotes.
            kill: Kills a zygote, and does not wait.
        """
        self._program, self._scratch, self._children = program, scratch, children
        self._files, self._line, self._kill = files, line, kill
        self._starter = Starter("zygotes")
        self._number = 0
        """Number of the last zygote."""
        self._early: asyncio.Task[ZygoteProcess] | None = None
        """The start of a zygote before its recipe is known."""

    async def start(self, recipe: Sequence[RecipeLine]) -> ZygoteProcess:
        """Return a zygote that imports a recipe: the one of :meth:`begin_early`, or a new one.

        Raises:
            ZygoteLostError: It could not be started.
        """
        return await self._continue_early(recipe) or await self._start(recipe)

    def begin_early(self, module: str) -> None:
        """Start a zygote before its recipe is known, and have it import one module.

        Nothing is started if the module is not installed.
        """
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and self._early is None:
            first: list[RecipeLine] = [("import", module, spec.origin)]
            self._early = asyncio.create_task(self._start(first, early=module))

    def end_early(self) -> None:
        """Kill the zygote of :meth:`begin_early`, unless it is a usual one by now."""
        early, self._early = self._early, None
        if early is not None:
            self._drop(early)

    def remove_config(self, zygote: ZygoteProcess) -> None:
        """Remove the configuration of a zygote, which has read it or was killed, in a thread."""
        for file in (zygote.config, _whole(zygote)):
            self._files.post(functools.partial(_remove_file, file))

    def _drop(self, early: "asyncio.Task[ZygoteProcess]") -> None:
        """Kill a zygote that was started early, or end its start."""

        def kill(start: "asyncio.Task[ZygoteProcess]") -> None:
            if not start.cancelled() and start.exception() is None:
                self._kill(start.result())
                self.remove_config(start.result())

        if early.done():
            kill(early)
        else:
            early.add_done_callback(kill)
            early.cancel()

    async def _continue_early(self, recipe: Sequence[RecipeLine]) -> ZygoteProcess | None:
        """Have the zygote of :meth:`begin_early` go on with a recipe; None if there is none.

        The result is also None if the recipe has libraries before the module, since their order may
        matter, or if the zygote has ended. It is killed then.
        """
        early, self._early = self._early, None
        if early is None:
            return None
        goes_on = False
        try:
            zygote = await asyncio.shield(early)
            if may_begin_with(recipe, zygote.early):
                # Another file: it may not have read the first one yet.
                whole = _whole(zygote)
                await self._files.run(lambda: self._write_config(whole, recipe), FILES_S)
                message = os.fsencode(whole)
                await self._line.run(lambda: send(zygote.line, message), SEND_S)
                goes_on = True
                return zygote
        except (OSError, NotOwnedError, ZygoteLostError):  # OverdueError, too
            return None
        finally:
            if not goes_on:
                self._drop(early)
        return None

    async def _start(self, recipe: Sequence[RecipeLine], *, early: str = "") -> ZygoteProcess:
        """Start the process of a zygote.

        Args:
            recipe: What it imports.
            early: The module in the recipe, if the whole recipe is not known yet.

        Raises:
            ZygoteLostError: It could not be started.
        """
        self._number += 1
        stem = self._scratch / f"zygote-{self._number}"
        try:
            zygote = await self._starter.start(
                lambda: self._start_process(recipe, stem, early), undo=_undo_start
            )
        except NotOwnedError as error:
            raise ZygoteLostError(f"it cannot be started: {error}") from error
        except subprocess.SubprocessError as error:
            raise ZygoteLostError(f"it cannot be started on the workers' CPUs: {error}") from error
        except OSError as error:  # OverdueError, too
            raise ZygoteLostError(f"it cannot be started: {error.strerror or error}") from error
        self._children.non_worker_pids.add(zygote.process.pid)
        self._children.add_session(zygote.session)
        return zygote

    def _start_process(self, recipe: Sequence[RecipeLine], stem: Path, early: str) -> ZygoteProcess:
        """Start the process of a zygote, and write its configuration. Runs in the starter's thread.

        Args:
            recipe: What the zygote imports.
            stem: Path of its files, without a suffix.
            early: The module in the recipe, if the whole recipe is not known yet.

        Raises:
            NotOwnedError: Another user has made the folder of the files again.
            OSError: The process cannot be started, or a file cannot be written.
            subprocess.SubprocessError: The process may not run on the CPUs.
        """
        output, config = stem.with_suffix(".log"), stem.with_suffix(".json")
        program = self._program
        agent_end, zygote_end = socket.socketpair()
        try:
            fd = zygote_end.fileno()
            self._write_config(config, recipe, fd, more=bool(early))
            with zygote_end, output.open("wb") as output_file:
                # It reserves space in which workers show their own command line.
                room = program.argv[2:]
                # Libraries count the CPUs when they are loaded, and size their pools of threads.
                bind = functools.partial(os.sched_setaffinity, 0, program.cpus)
                process = subprocess.Popen(
                    [
                        *program.argv[:2],
                        "-c",
                        BOOT.format(module="zygote"),
                        str(config),
                        *room,
                    ],
                    env=program.env,
                    pass_fds=[fd],
                    stdout=output_file,
                    stderr=output_file,
                    start_new_session=True,
                    preexec_fn=bind if program.cpus else None,
                )
            session = ProcessId.of(process.pid)
            return ZygoteProcess(process, session, agent_end, output, config, early)
        except BaseException:
            agent_end.close()
            zygote_end.close()
            raise

    def _write_config(
        self, path: Path, recipe: Sequence[RecipeLine], fd: int = 0, *, more: bool = False
    ) -> None:
        """Write the configuration of a zygote.

        Args:
            path: The file.
            recipe: What the zygote imports.
            fd: Its socket to the agent; 0 if it has read that before.
            more: Whether the whole recipe follows later.

        Raises:
            NotOwnedError: Another user has made the folder of the file again.
            OSError: The file cannot be written.
        """
        temporary_folder.recreate(self._scratch)
        lines, per_rank = list(recipe), list(self._program.per_rank)
        path.write_bytes(encode(ZygoteConfig(fd, os.getpid(), lines, per_rank, more)))


def _undo_start(found: ZygoteProcess) -> None:
    """Kill a zygote whose start was given up. Runs in the thread."""
    found.line.close()
    kill_and_reap(found.process)


def _whole(zygote: ZygoteProcess) -> Path:
    """Return the file with the configuration that an early zygote reads later."""
    return zygote.config.with_suffix(".whole.json")


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def may_begin_with(recipe: Sequence[RecipeLine], module: str) -> bool:
    """Return whether a zygote may import this module of a recipe before all others.

    It may if only modules of the standard library and of the user come before it.
    """
    for kind, name, value in recipe:
        if kind == "import" and name == module:
            return True
        if kind in ("env", "rank") or (kind == "import" and not _is_standard(str(value))):
            return False
    return False


def _is_standard(path: str) -> bool:
    """Return whether a file is of the standard library. Packages may be in a folder below it."""
    paths = sysconfig.get_paths()
    packages = (paths["purelib"], paths["platlib"], *site.getsitepackages())
    standard = f"{paths['stdlib']}/", f"{paths['platstdlib']}/"
    return path.startswith(standard) and not path.startswith(tuple(f"{p}/" for p in packages))
