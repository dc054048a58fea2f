"""One worker of a round, and the preparation of a round's workers."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from dlrover_agent.settings import Command
from dlrover_agent.visible_devices import one_for_each
from dlrover_agent.warm import tcpstore
from dlrover_agent.warm.forks import ForkedProcess
from dlrover_agent.workers.logs import LogFiles, Logs, StreamPump
from dlrover_agent.workers.streams import OutputDestination
from dlrover_py.process.blocking import shared_writer
from dlrover_py.process.identity import ProcessId
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import Assignment, Directive

CONSOLE_STALL_S = 1.0
"""Seconds without progress after which the agent stops writing the last lines at its end."""
EARLY_S = 10.0
"""Seconds from its start within which a forked worker may die because of the fork."""
CHECK = (sys.executable, "-P", "-u", "-m", "dlrover_agent.checks")
"""Command of the workers while the node is checked, instead of the user's command."""
PER_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"),
    *(names.ENV_LOCAL_RANK, names.ENV_ROUND, names.ENV_RESTART_REASON, names.ENV_CHECKPOINT),
    names.ENV_LOADER,
)
"""Environment variables that differ between workers or rounds."""
MAX_VALUE = 30_000
"""Largest length of a value in characters, which have at most four bytes each.

The kernel's limit is 128 KiB (MAX_ARG_STRLEN in execve(2)).
"""


@dataclass(slots=True)
class Worker:
    """A worker of a round."""

    local_rank: int
    rank: int
    argv: list[str]
    env: dict[str, str]
    error_file: Path | None
    errors: StreamPump
    out: StreamPump | None
    """Pump of standard output; None if the worker shares the agent's standard output."""
    pid: int = 0
    session: ProcessId | None = None
    """The worker's process, which leads the session; None before the start and once reaped."""
    pidfd: int = -1
    wait: Callable[[], int] = int
    """Function that reaps the process once it has ended."""
    child: ForkedProcess | None = None
    """The process that a zygote has forked; None for a cold start."""
    started_at: float = field(default_factory=time.monotonic)
    ended: bool = False
    """Whether the process has ended, or could not be started."""
    over: bool = False
    """Whether the end was reported, with its cause."""
    succeeded: bool = False
    """Whether the process has ended with exit code 0."""

    @property
    def process(self) -> ProcessId | None:
        """Its process; None if it has ended, or has no process yet."""
        return None if self.ended else self.session

    @property
    def last_lines(self) -> str:
        """The end of its standard error."""
        return self.errors.words().decode("utf-8", "replace")

    @property
    def not_started(self) -> bool:
        """Whether it has no process yet."""
        return self.session is None and not self.ended

    @property
    def watched(self) -> bool:
        """Whether the process was started, and its end is or was observed."""
        return self.pidfd >= 0

    @property
    def is_young(self) -> bool:
        """Whether the worker has run for so short a time that it may die because of its fork."""
        return time.monotonic() - self.started_at < EARLY_S

    def watch(self, exited: "Callable[[Worker], None]") -> None:
        """Call a function in the event loop once the process has ended.

        The caller must remove the reader of ``pidfd`` and close it then.

        Raises:
            OSError: The process has been reaped, or there are no more file descriptors.
        """
        pidfd = os.pidfd_open(self.pid)
        try:
            asyncio.get_running_loop().add_reader(pidfd, exited, self)
        except OSError:
            os.close(pidfd)
            raise
        self.pidfd = pidfd

    def signal(self, number: int) -> None:
        """Signal the process if it has not ended; do nothing before its start.

        SIGTERM is sent as SIGKILL to a process that does not handle, block or ignore SIGTERM.
        """
        if not self.ended and self.watched:
            # If SIGTERM would only kill the process, send SIGKILL: it acts without waiting
            # until the process is scheduled.
            fatal = number == signal.SIGTERM and not may_survive(self.pid, number)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL if fatal else number)

    def close_pumps(self) -> None:
        """Read the rest of the output, and close its pipes."""
        self.errors.close()
        if self.out is not None:
            self.out.close()


@dataclass(frozen=True, slots=True)
class PreparedWorker:
    """A worker that is to be started, and the pipes of its output."""

    worker: Worker
    out: int | None
    """File descriptor of its standard output; None if it shares the agent's."""
    err: int
    """File descriptor of its standard error."""

    def close(self) -> None:
        """Close the descriptors, because the worker has its own or is not started."""
        os.close(self.err)
        if self.out is not None:
            os.close(self.out)


class WorkerFactory:
    """The preparation of workers: their command lines, environments and output.

    Standard output and error go through pipes, so that a full disk costs log lines and not the
    training.
    """

    def __init__(self, command: Command, env: dict[str, str], logs: Logs, scratch: Path) -> None:
        """Create the factory.

        Args:
            command: Command of each worker.
            env: Environment variables that are the same for all workers in all rounds.
            logs: Destinations of the workers' output.
            scratch: Folder for error files.
        """
        self._command, self._env, self._logs, self._scratch = command, env, logs, scratch
        self.hosts_store = tcpstore.available()
        """Whether the agent hosts the store of a round; if not, worker 0 does."""
        self._assignment: Assignment | None = None
        self._destinations: list[OutputDestination] = []
        self._envs: list[dict[str, str]] = []
        self._stdout, self._stderr, self._files = shared_writer(1), shared_writer(2), LogFiles()

    async def begin_round(self, assignment: Assignment) -> None:
        """Find the environments and the output's destinations of a round's workers.

        The method makes the folders for log files, and waits for a slow disk for ``FOLDERS_S`` at
        most. After that the workers have no log files and no error files in this round.
        """
        ranks = range(self._command.nproc)
        envs = [{**self._env, **self._environment(assignment, i)} for i in ranks]
        found = await self._logs.destinations(assignment, envs, self._scratch)
        self._destinations, self._envs = found
        self._assignment = assignment

    def prepare(self, local_rank: int) -> PreparedWorker:
        """Prepare a worker of the round without its process, and open the pipes of its output.

        The caller closes the result once the process has its own descriptors.

        Raises:
            OSError: There are no more file descriptors.
        """
        assignment = self._assignment
        assert assignment is not None
        to = self._destinations[local_rank]
        env = {**self._envs[local_rank], "TORCHELASTIC_ERROR_FILE": to.error_file}
        error_file = Path(to.error_file) if to.error_file else None
        # Standard error always has a pump, which keeps the last output: it says why a worker died.
        rank = assignment.rank_offset + local_rank
        watched = [self._logs.watch.stream(rank) for _ in range(2)]
        files, terminals = self._files, [os.isatty(1), os.isatty(2)]
        errors = StreamPump(to.err, self._stderr, files, terminal=terminals[1], watched=watched[1])
        try:
            out = None
            if watched[0] is not None or not to.out.plain:
                out = StreamPump(
                    to.out, self._stdout, files, terminal=terminals[0], watched=watched[0]
                )
        except OSError:
            errors.close()
            os.close(errors.end)
            raise
        worker = Worker(
            local_rank,
            rank,
            self._argv(assignment, local_rank),
            env,
            error_file,
            errors,
            out,
        )
        return PreparedWorker(worker, None if out is None else out.end, errors.end)

    def _environment(self, a: Assignment, local_rank: int) -> dict[str, str]:
        """Return the environment variables that differ between workers or rounds.

        They are those of torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py).
        Values are cut to ``MAX_VALUE`` characters, without NULs.
        """
        rank = a.rank_offset + local_rank
        env: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": a.node_rank,
            "ROLE_RANK": a.role_rank_offset + local_rank,
            "ROLE_NAME": self._command.role,
            "WORLD_SIZE": a.world_size,
            "LOCAL_WORLD_SIZE": self._command.nproc,
            "GROUP_WORLD_SIZE": a.nnodes,
            "ROLE_WORLD_SIZE": a.role_world_size,
            "MASTER_ADDR": a.master_addr,
            "MASTER_PORT": a.master_port,
            "TORCHELASTIC_RESTART_COUNT": a.restart_count,
            "TORCHELASTIC_MAX_RESTARTS": a.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": self.hosts_store,
            names.ENV_LOCAL_RANK: local_rank,
            names.ENV_ROUND: a.round,
            names.ENV_RESTART_REASON: a.reason if a.round > 1 else "",
            names.ENV_CHECKPOINT: a.checkpoint,
            names.ENV_LOADER: "" if a.loader is None else a.loader.model_dump_json(),
        }
        if self._command.virtual_local_rank:
            gpus = one_for_each(self._command.environ, self._command.nproc)
            env |= {"LOCAL_RANK": 0, **gpus[local_rank]}
        # An environment can hold neither a NUL nor a longer value.
        return {name: str(value).replace("\0", "")[:MAX_VALUE] for name, value in env.items()}

    def _argv(self, assignment: Assignment, local_rank: int) -> list[str]:
        """Return a worker's command line. As in torchrun, ``$local_rank`` is replaced.

        The rules are those of torch/distributed/elastic/utils/api.py:macros. In a check, the result
        is the command of the check instead of the user's.
        """
        if assignment.directive is Directive.CHECK:
            return [*CHECK, str(self._command.precheck), str(assignment.check)]
        program, *arguments = self._command.argv
        rank = str(local_rank)
        return [program, *(Template(a).safe_substitute(local_rank=rank) for a in arguments)]

    def cpus(self, local_rank: int) -> frozenset[int]:
        """Return the CPUs of a worker; empty if it runs on all CPUs of the agent."""
        return self._command.cpus[local_rank] if self._command.cpus else frozenset()

    def stop_waiting_for_console(self) -> None:
        """Let workers go on while the console is not read; the oldest output may be lost then."""
        self._stdout.waits_for_reader = self._stderr.waits_for_reader = False

    def close(self) -> None:
        """Write the last lines of the workers' output, as long as there is progress.

        The call blocks. It gives a destination up after ``CONSOLE_STALL_S`` without progress.
        """
        for writer in (self._stdout, self._stderr, self._files):
            writer.finish(CONSOLE_STALL_S)


def may_survive(pid: int, number: int) -> bool:
    """Return whether a process handles, blocks or ignores a signal, so that it may survive it.

    It is False if the process's status cannot be read.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:
        masks = [line.split()[1] for line in status if line.startswith(_MASKS)]
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


_MASKS = (b"SigBlk:", b"SigIgn:", b"SigCgt:")


def per_rank(command: Command) -> tuple[str, ...]:
    """Return the names of the environment variables that differ between a command's workers."""
    gpus = one_for_each(command.environ, 1)[0] if command.virtual_local_rank else ()
    return (*PER_RANK, *gpus)


def base_environment(command: Command, run_id: str, sdk_socket: Path) -> dict[str, str]:
    """Return the environment variables that all workers of this node share, in all rounds.

    Args:
        command: Command of each worker.
        run_id: Value of TORCHELASTIC_RUN_ID.
        sdk_socket: Path of the socket on which the agent serves the trainer SDK.
    """
    env = {k: v for k, v in command.environ.items() if k not in names.PRIVATE_ENV}
    if command.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as in torchrun: do not use all cores nproc times
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(s.name for s in command.signals)
    of_an_agent = [names.ENV_SHM_POOL, names.ENV_TRANSFER_SOCKET]
    of_an_agent += [names.ENV_SHARDS_SOCKET, names.ENV_PROBE_SOCKET]
    for name in (*per_rank(command), *of_an_agent):
        env.pop(name, None)  # set if a worker of another job has started this agent
    return env | {"TORCHELASTIC_RUN_ID": run_id, names.ENV_AGENT_SOCKET: str(sdk_socket)}
