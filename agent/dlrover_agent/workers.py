"""Starts, watches, stops and reaps the workers of one node, and keeps their logs.

Each worker leads a session of its own, and its end is seen through a pidfd at once. It is not
reaped before its session is empty: until then its number is nobody else's. A round is over when
its sessions are empty: a DataLoader child that outlived its worker could hold memory
that the next round needs. Standard output and error go through pipes, so that a full disk costs
log lines and not the training.
"""

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from string import Template

from dlrover_agent import errorfile, store
from dlrover_agent.core import Emptied, Ended, Event, Stuck
from dlrover_agent.failures import Death, describe
from dlrover_agent.logs import Destination, Files, Logs, Pump
from dlrover_agent.settings import Command
from dlrover_agent.store import Store
from dlrover_agent.warm import Birth, Child, Warm
from dlrover_py import cgroups
from dlrover_py.aside import Aside, Overdue, outlet
from dlrover_py.processes import ProcessId, children, exit_code, members, signal_at_parents_end
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import Assignment, Directive, FailureKind, WorkerFailure

log = logging.getLogger("agent.workers")

LAST_LINES_S = 1.0
TERM_AFTER_POLITE_S = 1.0
"""A script that asks should_stop() is signalled so long before the end of its grace."""
SURVIVED_KILL_S = 10.0
UNSTARTED_S = 5.0
RELEASED_S = 1.0
"""One look at all processes for those that end together; none is reaped before."""
ERROR_FILE_S = 2.0
"""The disk has so long to give what a worker has left."""
FINAL_S = 5.0
"""A traceback that a worker wrote so shortly before a signal killed it is why it ended."""
CHECK = (sys.executable, "-P", "-u", "-m", "dlrover_agent.checks")
"""What workers run when the node is checked, in place of the user's command."""
PER_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"),
    *(names.ENV_LOCAL_RANK, names.ENV_ROUND, names.ENV_RESTART_REASON, names.ENV_CHECKPOINT),
)
"""Environment of workers that differs between them, or from round to round."""
LONGEST_VALUE = 30_000
"""Characters, of four bytes at most; the kernel takes 128 KiB (MAX_ARG_STRLEN in execve(2))."""
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Worker:
    local_rank: int
    rank: int
    argv: list[str]
    env: dict[str, str]
    error_file: Path | None
    errors: Pump
    out: Pump | None
    """None: standard output is the agent's."""
    pid: int = 0
    session: ProcessId | None = None
    """Its process, until that is reaped."""
    pidfd: int = -1
    wait: Callable[[], int] = int
    """Reaps the process, once it has ended."""
    child: Child | None = None
    """Of a zygote; None for a cold start."""
    started_at: float = field(default_factory=time.monotonic)
    ended: bool = False
    """Its process is gone."""
    over: bool = False
    """It was told why."""


_Pipes = tuple[_Worker, int | None, int]
"""A worker that is to be started, and the ends of its pipes that are its standard output (None:
the agent's) and error."""


class Workers:
    """The worker processes of one round at a time."""

    def __init__(
        self,
        command: Command,
        post: Callable[[Event], None],
        *,
        guard: Callable[[str], None],
        last_step: Callable[[int], int | None],
        sdk_socket: Path,
        more: dict[str, str],
        scratch: Path,
        logs: Logs,
        run_id: str,
        kin: set[int],
        changed: Callable[[], None],
    ) -> None:
        """Remember what to run.

        Args:
            command: what each worker runs.
            post: takes what happens to them.
            guard: tells the guardian of a session (``+1234``, ``-1234``).
            last_step: newest step that a local rank has reported.
            sdk_socket: where the agent listens to the trainer SDK.
            more: environment that is the same for all of them, in all rounds.
            scratch: folder for error files.
            logs: where they write.
            run_id: TORCHELASTIC_RUN_ID.
            kin: children of this process that are no workers, nor what workers have left.
            changed: called when there is news of warm starts.
        """
        self._command, self._post, self._guard = command, post, guard
        self._last_step, self._scratch = last_step, scratch
        self._kin = kin
        self._base = _base_environment(command, run_id, sdk_socket) | more
        self.warm = Warm(
            command.argv,
            self._base,
            per_rank(command),
            off=command.cold,
            scratch=scratch,
            kin=kin,
            guard=guard,
            changed=changed,
        )
        self.hosts_store = store.available()
        self._store: Store | None = None
        self._store_session: ProcessId | None = None
        self._store_used = False
        self._logs = logs
        self._destinations: list[Destination] = []
        self._envs: list[dict[str, str]] = []
        self._stdout, self._stderr, self._files = outlet(1), outlet(2), Files()
        self.deaths: list[Death] = []
        """Workers of the round that ended in a failure of their own, the first one first."""
        self._workers: list[_Worker] = []
        self._assignment: Assignment | None = None
        self._round = 0
        self._checking = False
        self._oom_kills = cgroups.oom_kills()
        """As the round began."""
        self._stopped = False
        self._timers: list[asyncio.TimerHandle] = []
        self._releasing = False
        self._sweep: asyncio.Task[None] | None = None
        self._disk = Aside("error-files")
        self._explaining: set[asyncio.Task[None]] = set()
        become_subreaper()

    @property
    def pids(self) -> list[int]:
        """By local rank; 0 for one that has ended."""
        return [0 if w.ended else w.pid for w in self._workers]

    @property
    def processes(self) -> list[ProcessId | None]:
        """By local rank; None for one that has ended."""
        return [None if w.ended else w.session for w in self._workers]

    @property
    def sessions(self) -> list[ProcessId]:
        """All that must end with the agent."""
        ours = (*(w.session for w in self._workers), self._store_session)
        return [*(session for session in ours if session is not None), *self.warm.sessions]

    @property
    def unreaped(self) -> set[int]:
        """Process ids of workers that are reaped here."""
        return {w.pid for w in self._workers if w.session is not None}

    async def close(self) -> None:
        """Show the last lines, and end what was kept for the next round."""
        self._end_store()
        await self.warm.close()
        for waits in (self._stdout, self._stderr, self._files):
            waits.finish(LAST_LINES_S)

    def start(self, assignment: Assignment, listening: socket.socket | None) -> None:
        """Start the workers of a round. One that cannot be started counts as failed.

        Args:
            assignment: what they are.
            listening: where the store of the round is, if it is here.
        """
        assert threading.current_thread() is threading.main_thread()  # PR_SET_PDEATHSIG
        self._round, self._assignment = assignment.round, assignment
        self._stopped = False
        self._end_store()
        began = time.monotonic()
        self._checking = assignment.directive is Directive.CHECK
        self._oom_kills = cgroups.oom_kills()
        self.deaths = []
        ranks = range(self._command.nproc)
        self._envs = [{**self._base, **self._environment(assignment, i)} for i in ranks]
        self._destinations = self._logs.of_round(assignment, self._envs, self._scratch)
        pipes: list[_Pipes] = []
        try:
            for i in ranks:
                pipes.append(self._prepare(assignment, i))  # noqa: PERF401 - some may be made
        except OSError as error:
            self._unpreparable(pipes, error)
            return
        self._workers = [worker for worker, _, _ in pipes]
        if listening is not None:
            self._store = Store(
                listening,
                self.warm,
                python=sys.executable,
                env=self._base,
                output=self._scratch / "store.log",
                adopt=self._adopt_store,
                ended=self._store_ended,
                wanted=self._store_used or (self._checking and assignment.nnodes > 1),
            )
        self.warm.forget_records()
        cold = assignment.cold or self._checking
        children = self._fork(pipes) if self.warm.ready and not cold else None
        try:
            for i, (worker, out, err) in enumerate(pipes):
                if children:
                    self._adopt(worker, children[i])
                else:
                    self._start_cold(worker, out, err)
        except (OSError, subprocess.SubprocessError) as error:
            for other in self._workers[worker.local_rank + 1 :]:  # those are not started at all
                other.ended = other.over = True
                self._close_pumps(other)
            self._unstartable(worker, error)
        finally:
            for _, out, err in pipes:
                for fd in (out, err):
                    if fd is not None:
                        os.close(fd)
        took = round(time.monotonic() - began, 4)
        log.info("workers_started", extra={"warm": bool(children), "took_s": took})
        self.warm.watch(self._store.start if self._store else lambda: None)
        if children:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(UNSTARTED_S, self._kill_unstarted))

    @property
    def alive(self) -> set[int]:
        """Local ranks of workers that have not ended."""
        return {w.local_rank for w in self._workers if not w.ended}

    def stop(self, grace_s: float, number: int, *, spare: set[int] | None = None) -> None:
        """Signal the workers (those in ``spare`` only shortly before the end of the grace), and
        kill what is left after the grace."""
        loop = asyncio.get_running_loop()
        self._stopped = True
        spare = spare or set()
        self._signal(number, [w for w in self._workers if w.local_rank not in spare])
        if spare:
            kept = [w for w in self._workers if w.local_rank in spare]
            delay = max(0.0, grace_s - TERM_AFTER_POLITE_S)
            self._timers.append(loop.call_later(delay, self._signal, number, kept))
        self._timers.append(loop.call_later(grace_s, self.kill))
        if all(w.over for w in self._workers):
            self._all_ended()

    def kill(self) -> None:
        """SIGKILL all of them, now."""
        self._stopped = True
        self._signal(signal.SIGKILL, self._workers)
        if all(w.over for w in self._workers):
            self._all_ended()

    def _signal(self, number: int, workers: list[_Worker]) -> None:
        for worker in workers:
            if not worker.ended and worker.pid:
                # Where SIGTERM would only kill, SIGKILL does so without waiting for its turn.
                fatal = number == signal.SIGTERM and not _minds(worker.pid, number)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL if fatal else number)

    def _prepare(self, assignment: Assignment, local_rank: int) -> "_Pipes":
        """All but the process: its environment, and where its output goes."""
        to = self._destinations[local_rank]
        env = {**self._envs[local_rank], "TORCHELASTIC_ERROR_FILE": to.error_file}
        error_file = Path(to.error_file) if to.error_file else None
        if error_file is not None:
            with contextlib.suppress(OSError):
                error_file.unlink(missing_ok=True)
        # The last words on standard error are kept, since they tell why a worker died.
        errors = Pump(to.err, self._stderr, self._files, terminal=os.isatty(2))
        out = None if to.out.plain else Pump(to.out, self._stdout, self._files)
        worker = _Worker(
            local_rank,
            assignment.rank_offset + local_rank,
            self._argv(assignment, local_rank),
            env,
            error_file,
            errors,
            out,
        )
        return worker, None if out is None else out.end, errors.end

    def _environment(self, a: Assignment, local_rank: int) -> dict[str, str]:
        """What differs between workers, as torchrun has it
        (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
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
        }
        if self._command.virtual_local_rank:
            visible = self._command.inherit.get("CUDA_VISIBLE_DEVICES")
            gpus = [str(local_rank)] * (local_rank + 1) if visible is None else visible.split(",")
            env |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": gpus[local_rank].strip()}
        # No environment can hold a NUL, nor a longer value.
        return {name: str(value).replace("\0", "")[:LONGEST_VALUE] for name, value in env.items()}

    def _argv(self, assignment: Assignment, local_rank: int) -> list[str]:
        """The command line, with ``$local_rank`` filled in as torchrun does
        (torch/distributed/elastic/utils/api.py:macros)."""
        if self._checking:
            return [*CHECK, str(self._command.precheck), str(assignment.check)]
        program, *arguments = self._command.argv
        rank = str(local_rank)
        return [program, *(Template(a).safe_substitute(local_rank=rank) for a in arguments)]

    def _fork(self, pipes: "list[_Pipes]") -> list[Child] | None:
        return self.warm.fork(
            [Birth(w.argv, w.env, 1 if out is None else out, err) for w, out, err in pipes]
        )

    def _start_cold(self, worker: _Worker, out: int | None, err: int) -> None:
        argv = worker.argv
        if not self.warm.off and not self._checking:
            argv = self.warm.observed(worker.local_rank, argv)
        worker.started_at = time.monotonic()
        process = subprocess.Popen(
            argv,
            env=worker.env,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid(), self._cpus(worker.local_rank)),
        )
        worker.wait = process.wait
        self._begin(worker, process.pid)

    def _adopt(self, worker: _Worker, child: Child) -> None:
        worker.child, worker.wait = child, child.wait
        worker.started_at = time.monotonic()
        self._begin(worker, child.pid)
        if cpus := self._cpus(worker.local_rank):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(child.pid, cpus)
        child.go()

    def _cpus(self, local_rank: int) -> frozenset[int]:
        return self._command.cpus[local_rank] if self._command.cpus else frozenset()

    def _begin(self, worker: _Worker, pid: int) -> None:
        worker.pid, worker.session = pid, ProcessId.of(pid)
        self._guard(f"+{worker.session}")
        worker.pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._exited, worker)

    def _unstartable(self, worker: _Worker, error: Exception) -> None:
        """The operating system refuses this worker."""
        worker.ended = True
        self._close_pumps(worker)
        self._over(worker, _not_started(worker.local_rank, worker.rank, worker.argv[0], error))

    def _unpreparable(self, pipes: "list[_Pipes]", error: OSError) -> None:
        """Not even pipes are to be had (no more descriptors)."""
        self._workers = [worker for worker, _, _ in pipes]
        for worker, out, err in pipes:
            worker.ended = worker.over = True
            self._close_pumps(worker)
            for fd in (out, err):
                if fd is not None:
                    os.close(fd)
        self._post(Ended(self._round, 0, _not_started(0, 0, "its output", error)))
        self._all_ended()

    def _kill_unstarted(self) -> None:
        """A forked worker that hangs before the user's code is started cold instead."""
        self._signal(
            signal.SIGKILL,
            [w for w in self._workers if w.child and not w.ended and not w.child.started()],
        )

    def _again(self, worker: _Worker) -> None:
        """Start a worker cold whose fork did not get as far as the user's code."""
        assert self._assignment is not None
        log.warning("warm_start_failed", extra={"rank": worker.rank, "then": "cold start"})
        self._release(worker)
        fresh, out, err = self._prepare(self._assignment, worker.local_rank)
        self._workers[worker.local_rank] = fresh
        try:
            self._start_cold(fresh, out, err)
        except (OSError, subprocess.SubprocessError) as error:
            self._unstartable(fresh, error)
        finally:
            os.close(err)
            if out is not None:
                os.close(out)

    def _adopt_store(self, pid: int) -> None:
        self._store_used |= not self._checking
        self._store_session = ProcessId.of(pid)
        self._kin.add(pid)
        self._guard(f"+{self._store_session}")

    def _drop_store(self) -> None:
        if self._store_session is not None:
            self._kin.discard(self._store_session.pid)
            self._guard(f"-{self._store_session}")
            self._store_session = None

    def _store_ended(self, why: str) -> None:
        self._drop_store()
        if not self._stopped and self._workers and not all(w.ended for w in self._workers):
            failure = WorkerFailure(
                kind=FailureKind.START,
                local_rank=0,
                rank=0,
                pid=0,
                exit_code=1,
                message=f"the store of the round has ended: {why}",
                fingerprint="store",
            )
            self._post(Ended(self._round, -1, failure))

    def _exited(self, worker: _Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        code = exit_code(os.P_PIDFD, worker.pidfd)  # it says that it has ended
        worker.ended = True
        self._last_step(worker.local_rank)  # what it has said comes before its end
        os.close(worker.pidfd)
        self._close_pumps(worker)
        if worker.child is not None:
            started = worker.child.started()
            worker.child.control.close()
            if not started and not self._stopped:
                self._again(worker)
                return
        if not code:
            self._over(worker, None)
            return
        told = self._stopped and -code in (*self._command.signals, signal.SIGKILL)
        why = self._failure(worker, code)
        task = asyncio.create_task(self._explain(worker, why, told=told))
        self._explaining.add(task)
        task.add_done_callback(self._explaining.discard)

    async def _explain(
        self, worker: _Worker, why: Callable[..., WorkerFailure], *, told: bool
    ) -> None:
        """Take what the worker has left in its error file, if the disk gives it in time."""
        said = ""
        if worker.error_file is not None:
            try:
                path = worker.error_file
                said = await self._disk.run(lambda: errorfile.read(path), ERROR_FILE_S)
            except Overdue as error:
                more = {"path": str(worker.error_file), "why": str(error)}
                log.warning("error_file_not_read", extra=more)
        failure = why(error_file=said)
        if not told:
            self.deaths.append(self._death(worker, failure, said))
        self._over(worker, failure)

    def _over(self, worker: _Worker, failure: WorkerFailure | None) -> None:
        """All is known of a worker's end."""
        worker.over = True
        self._post(Ended(self._round, worker.local_rank, failure))
        if all(w.over for w in self._workers):
            self._all_ended()
        elif not self._releasing:
            self._releasing = True
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(RELEASED_S, self._release_empty))

    def _release_empty(self) -> None:
        """Reap the workers that have ended and left nothing, while others of the round go on."""
        self._releasing = False
        ended = [w for w in self._workers if w.ended and w.session is not None]
        busy = {p.session for p in members([w.session for w in ended if w.session is not None])}
        for worker in ended:
            if worker.pid not in busy:
                self._release(worker)

    def _release(self, worker: _Worker) -> None:
        """Its session is empty: from now on its number may be another program's."""
        if exit_code(os.P_PID, worker.pid) is not None:
            worker.wait()
        self._guard(f"-{worker.session}")
        worker.session = None

    def _close_pumps(self, worker: _Worker) -> None:
        worker.errors.close()
        if worker.out is not None:
            worker.out.close()

    def _end_store(self) -> None:
        if self._store is not None:
            self._drop_store()
            self._store.end()
            self._store = None

    def _death(self, worker: _Worker, failure: WorkerFailure, said: str) -> Death:
        stays = worker.error_file
        if stays is None or stays.is_relative_to(self._scratch) or not said:
            stays = None
        at = datetime.now(UTC).astimezone()
        return Death(failure, at, str(stays) if stays is not None else "", said)

    def _failure(self, worker: _Worker, code: int) -> Callable[..., WorkerFailure]:
        """What is known of a death now; the content of the error file is still to come."""
        return functools.partial(
            describe,
            exit_code=code,
            forked=worker.child is not None,
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=worker.pid,
            last_words=worker.errors.words().decode("utf-8", "replace"),
            final_words=worker.errors.words(FINAL_S).decode("utf-8", "replace"),
            step=self._last_step(worker.local_rank),
            ran_s=time.monotonic() - worker.started_at,
            out_of_memory=cgroups.oom_kills().since(self._oom_kills),
        )

    def _all_ended(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._releasing = False
        if self._stopped:  # else workers of other nodes may still use it
            self._end_store()
        if self._sweep is None:
            self._sweep = asyncio.create_task(self._empty_sessions())

    async def _empty_sessions(self) -> None:
        """Kill what the workers have left in their sessions, and wait until it is gone."""
        held = [w for w in self._workers if w.session is not None]
        sessions = [w.session for w in held if w.session is not None]
        deadline = time.monotonic() + SURVIVED_KILL_S
        left = self._left(sessions)
        while left and time.monotonic() < deadline:
            await asyncio.gather(*(_kill(process, deadline) for process in left))
            reap_orphans(self._kin | self.unreaped)
            left = self._left(sessions)
        self._sweep = None
        for worker in held:
            self._release(worker)
        if left:
            self._post(Stuck(self._round, tuple(process.pid for process in left)))
        else:
            self._post(Emptied(self._round))

    def _left(self, sessions: list[ProcessId]) -> list[ProcessId]:
        """What is there of the round: its sessions, and what went into a session of its own and
        is our child now, since we are the subreaper of what lost its parent."""
        strays = [child for child in children(os.getpid()) if child.pid not in self._kin]
        return [*(process.id for process in members(sessions)), *strays]


async def _kill(process: ProcessId, deadline: float) -> None:
    """SIGKILL a process, and wait for its end."""
    try:
        fd = process.open()
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(fd, gone.set)
    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _minds(pid: int, number: int) -> bool:
    """Whether a process handles, waits for or ignores this signal: it would not just die of it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:
        masks = [line.split()[1] for line in status if line.startswith(_MASKS)]
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


_MASKS = (b"SigBlk:", b"SigIgn:", b"SigCgt:")


def _not_started(local_rank: int, rank: int, what: str, error: Exception) -> WorkerFailure:
    number, why = None, str(error)
    if isinstance(error, OSError):
        number, why = error.errno, error.strerror or why
    what = what if len(what) <= 400 else f"…{what[-400:]}"  # the end of a path says more
    return WorkerFailure(
        kind=FailureKind.START,
        local_rank=local_rank,
        rank=rank,
        pid=0,
        exit_code=127,
        message=f"could not be started: {what}: {why}",
        fingerprint=f"start|{number}|{what}",
    )


def per_rank(command: Command) -> tuple[str, ...]:
    """Names of what differs between the workers of this command."""
    return (*PER_RANK, "CUDA_VISIBLE_DEVICES") if command.virtual_local_rank else PER_RANK


def _base_environment(command: Command, run_id: str, sdk_socket: Path) -> dict[str, str]:
    """What the environments of this node's workers have in common, in all rounds."""
    env = {k: v for k, v in command.inherit.items() if k not in names.PRIVATE_ENV}
    if command.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: not nproc times all cores
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(s.name for s in command.signals)
    for name in (*per_rank(command), names.ENV_ARENA, names.ENV_DEPOT):
        env.pop(name, None)  # of the job whose worker has started us
    return env | {"TORCHELASTIC_RUN_ID": run_id, names.ENV_AGENT_SOCKET: str(sdk_socket)}


def become_subreaper() -> None:
    """Orphans of our workers become our children, so that they can be waited for."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        log.warning("no_subreaper", extra={"why": os.strerror(ctypes.get_errno())})


def reap_orphans(known: set[int]) -> None:
    """Take the exit status of ended children that nobody else waits for."""
    for child in children(os.getpid(), over=True):
        if child.pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _die_with_parent(parent: int, cpus: frozenset[int]) -> Callable[[], None]:
    def before_exec() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return before_exec
