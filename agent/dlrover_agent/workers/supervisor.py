"""The supervisor of one node's workers: it starts, watches, stops and reaps them.

Each worker is the leader of its own session. A pidfd reports its end immediately. A worker is
reaped only when its session is empty: until then, the kernel gives its process id to no other
process. A round is over when its sessions are empty, because a DataLoader child that outlives its
worker could hold memory that the next round needs. Standard output and error go through pipes, so
that a full disk costs log lines and not the training.

A warm start forks the workers from the zygote, a process that has already imported their modules. A
cold start runs a new program for each worker.
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
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.core import Event, WorkerEnded, WorkersGone, WorkersStuck
from dlrover_agent.scratch_folder import ScratchFolder
from dlrover_agent.settings import Command
from dlrover_agent.warm.forks import ForkedProcess, ForkRequest
from dlrover_agent.warm.pool import WarmPool
from dlrover_agent.warm.tcpstore import TCPStores
from dlrover_agent.warm.zygote_start import WorkerProgram
from dlrover_agent.workers.deaths import DeathRecords
from dlrover_agent.workers.failure_classes import DeathFacts, classify
from dlrover_agent.workers.failures import WorkerDeath
from dlrover_agent.workers.logs import Logs
from dlrover_agent.workers.worker import PreparedWorker, Worker, WorkerFactory, per_rank
from dlrover_py.process.blocking import OverdueError
from dlrover_py.process.identity import (
    Process,
    ProcessId,
    all_processes,
    children,
    children_of_main_thread,
    end_with_parent,
    exit_code,
    forked_by_other_threads,
    members,
)
from dlrover_py.process.starter import Starter, kill_and_reap
from dlrover_py.protocol.agents import Assignment, Directive, FailureKind, WorkerFailure

log = logging.getLogger("agent.workers")

SIGNAL_BEFORE_KILL_S = 1.0
"""Seconds before the end of the grace period at which a script with should_stop() is signaled."""
FORK_START_S = 5.0
"""Seconds that a forked worker has to reach the user's code. Then it is killed and started cold."""
REAP_DELAY_S = 1.0
"""Seconds from a worker's end to the reaping of empty sessions.

One look at all processes serves all workers that end within this time.
"""
LISTED_AGAIN_S = 0.2
"""Seconds after which the processes of a round are listed again, if that has failed."""
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class RoundObserver(Protocol):
    """Follows the rounds of a :class:`WorkerSupervisor`, and knows what the scripts report."""

    def post(self, event: Event) -> None:
        """Handle an event of the workers."""

    def last_step(self, local_rank: int) -> int | None:
        """Return the newest step that a worker of the round has reported; None if none."""

    def worker_failed(self) -> None:
        """Take note that the first worker of the round has failed; its end is posted later."""

    def round_started(self, assignment: Assignment) -> None:
        """Take note that the start of a round is over.

        The events of workers that could not be started follow.
        """

    def warm_starts_changed(self) -> None:
        """Take note of a new recipe or zygote, or that warm starts were given up."""


class WorkerSupervisor:
    """The supervisor of this node's worker processes, for one round at a time."""

    stuck_after_s = 10.0
    """Seconds after which a process that is left counts as stuck.

    They begin at SIGKILL for a worker, and at the last worker's end for another process of the
    round.
    """

    def __init__(
        self,
        command: Command,
        env: dict[str, str],
        *,
        scratch: ScratchFolder,
        logs: Logs,
        children: ChildRegistry,
        observer: RoundObserver,
    ) -> None:
        """Create the supervisor, and make this process a subreaper; no worker starts yet.

        A subreaper is the process that the kernel makes the parent of its descendants' orphans.

        Args:
            command: Command of each worker.
            env: Environment variables that are the same for all workers in all rounds.
            scratch: Folder for error files.
            logs: Destinations of the workers' output.
            children: Registry of the agent's child processes. The supervisor adds the workers'
                sessions.
            observer: Follows the rounds.
        """
        self._command, self._scratch = command, scratch
        self._children, self._observer = children, observer
        cpus = frozenset().union(*command.cpus)
        program = WorkerProgram(command.argv, env, per_rank(command), cpus)
        self.warm = WarmPool(
            program,
            disabled_reason=command.cold,
            scratch=scratch.path,
            children=children,
            on_change=observer.warm_starts_changed,
        )
        self._factory = WorkerFactory(command, env, logs, scratch.path)
        self._deaths = DeathRecords(scratch.path)
        self._workers: list[Worker] = []
        self._assignment: Assignment | None = None
        self._round = 0
        self._checking = self._stopped = self._reap_scheduled = False
        self._timers: list[asyncio.TimerHandle] = []
        self._clearing: asyncio.Task[None] | None = None
        self._explanations: set[asyncio.Task[None]] = set()
        self._starter = Starter("workers")
        self._starting: asyncio.Task[None] | None = None
        """The task that starts the round; None if no start is under way."""
        self._cold_restarts: set[asyncio.Task[None]] = set()
        """Cold starts of workers whose fork has failed."""
        self._after_start: Callable[[], None] | None = None
        """Function that stops the round once its start is over; None if no stop was requested."""
        self._stores = TCPStores(self.warm, scratch.path, children, self._store_ended)
        become_subreaper()

    @property
    def hosts_store(self) -> bool:
        """Whether the agent hosts the store of a round; if not, worker 0 does."""
        return self._factory.hosts_store

    @property
    def deaths(self) -> list[WorkerDeath]:
        """Failures of the round's workers in order of time, without workers that were stopped."""
        return self._deaths.deaths

    @property
    def pids(self) -> list[int]:
        """Process ids by local rank; 0 for a worker that has ended or has no process yet."""
        return [0 if w.ended else w.pid for w in self._workers]

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers of the round, by local rank."""
        return self._workers

    @property
    def unreaped(self) -> set[int]:
        """Process ids of the workers that the supervisor still has to reap."""
        return {w.pid for w in self._workers if w.session is not None}

    def stop_waiting_for_console(self) -> None:
        """Wait no more for a console that is not read, because the agent was asked to end."""
        self._factory.stop_waiting_for_console()

    async def close(self) -> None:
        """Show the last lines, and end the processes that were kept for the next round.

        These are the zygote and the round's store. Workers are not ended here: they must be gone,
        or their start is given up. The event loop is blocked while the last lines are written: a
        second at most without progress of a destination.
        """
        self._after_start = lambda: None
        under_way = [t for t in (self._starting, *self._cold_restarts) if t is not None]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._stores.end()
        await self.warm.close()
        self._factory.close()

    @property
    def starting(self) -> bool:
        """Whether the start of the round is under way."""
        return self._starting is not None

    def start(self, assignment: Assignment, listening: socket.socket | None) -> None:
        """Begin to start the workers of a round, in a task; the last round must be over.

        ``round_started`` of the observer follows. A worker that cannot be started is then posted as
        failed, with :class:`WorkerEnded`.

        Args:
            assignment: The node's place in the round.
            listening: Listening socket for the store of the round; None if another node has the
                store.
        """
        self._round, self._assignment = assignment.round, assignment
        self._stopped, self._after_start = False, None
        self._checking = assignment.directive is Directive.CHECK
        self._stores.new_round(listening, check=self._checking)
        self._deaths.new_round()
        self._workers = []
        self._starting = asyncio.create_task(self._start(assignment))
        self._starting.add_done_callback(self._on_start_end)

    async def _start(self, assignment: Assignment) -> None:
        """Start the workers: as forks of a zygote, or cold if that is impossible.

        Threads make the calls that may block, within limits. Checks always start cold.

        Raises:
            _NotStartedError: If a worker cannot be started.
        """
        began = time.monotonic()
        await self._scratch.mend()
        await self._factory.begin_round(assignment)
        prepared: list[PreparedWorker] = []
        try:
            try:
                for i in range(self._command.nproc):
                    prepared.append(self._factory.prepare(i))  # noqa: PERF401 - some may be made
            except OSError as error:  # no more file descriptors
                raise _NotStartedError(_start_failure(0, 0, "its output", error)) from error
            finally:
                self._workers = [one.worker for one in prepared]
            await self.warm.learn_from_ended()
            warm = not (assignment.cold or self._checking) and await self.warm.becomes_ready()
            self._stores.serve(now=self._checking and assignment.nnodes > 1)
            requests = [
                ForkRequest(p.worker.argv, p.worker.env, 1 if p.out is None else p.out, p.err)
                for p in prepared
            ]
            children = await self.warm.fork(requests) if warm else None
            if children:
                self._adopt_all(children)
            else:
                await self._start_all_cold(prepared)
        finally:
            for one in prepared:
                one.close()
        took = round(time.monotonic() - began, 4)
        log.info("workers_started", extra={"warm": bool(children), "took_s": took})
        if children:
            self._call_later(FORK_START_S, self._kill_unstarted)

    def _on_start_end(self, start: "asyncio.Task[None]") -> None:
        """Handle the end of the round's start, and of the round if a stop was requested.

        All workers run, or one could not be started, or the start was canceled by a stop.

        The observer is informed, except after a stop. A failure is then posted as a worker's end. A
        stop that was requested meanwhile begins now.
        """
        assert self._assignment is not None
        self._starting = None
        failure = None
        error = None if start.cancelled() else start.exception()
        if isinstance(error, _NotStartedError):
            failure = error.failure
        elif error is not None:  # a defect of the agent must be visible, and must not end it
            failure = _start_failure(0, 0, "the workers", error)
            more = {"message": "the start of a round has failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(more)
        self._stores.close_unused()
        if error is not None or start.cancelled():
            for worker in self._workers:
                if not worker.watched:
                    worker.ended = worker.over = True
                    worker.close_pumps()
        if not start.cancelled():
            self._observer.round_started(self._assignment)
            self.warm.watch(self._stores.start)
            if not self._checking:  # it measures the node
                self.warm.keep_spares(self._command.nproc, store=self._stores.has_store)
        if failure is not None:
            self._observer.post(WorkerEnded(self._round, failure.local_rank, failure))
        then, self._after_start = self._after_start, None
        if then is not None:
            then()
        elif all(w.over for w in self._workers):
            self._on_all_ended()

    @property
    def alive(self) -> set[int]:
        """Local ranks of workers that have not ended."""
        return {w.local_rank for w in self._workers if not w.ended}

    def stop(self, grace_s: float, number: int, *, delayed: set[int] | None = None) -> None:
        """Begin to stop the workers, and return at once.

        Each worker that runs gets the signal, and SIGKILL after the grace period. A start that is
        under way is canceled first; the grace period begins when it is over. From now on, a worker
        that dies of a stop signal or SIGKILL is not added to ``deaths``.

        The observer gets :class:`WorkersGone` when no process of the round is left. It gets
        :class:`WorkersStuck` instead if one survives SIGKILL, see ``stuck_after_s``, or if the
        processes cannot be listed.

        Args:
            grace_s: Seconds from the signal to SIGKILL.
            number: Number of the signal. SIGTERM becomes SIGKILL for a worker that it would kill.
            delayed: Local ranks that get the signal only ``SIGNAL_BEFORE_KILL_S`` before SIGKILL.
                Their scripts call ``should_stop()`` and were asked to end by it. None: no rank.
        """
        if self._cancel_starts(functools.partial(self.stop, grace_s, number, delayed=delayed)):
            return
        late = [w for w in self._workers if w.local_rank in (delayed or ())]
        self._signal(number, [w for w in self._workers if w not in late])
        if late:
            delay_s = max(0.0, grace_s - SIGNAL_BEFORE_KILL_S)
            self._call_later(delay_s, self._signal, number, late)
        self._call_later(grace_s, self.kill)
        if all(w.over for w in self._workers):
            self._on_all_ended()

    def kill(self) -> None:
        """Begin to kill all workers, and return at once.

        The workers get SIGKILL. A start that is under way is canceled first. The observer gets the
        same events as after :meth:`stop`.
        """
        if self._cancel_starts(self.kill):
            return
        self._signal(signal.SIGKILL, self._workers)
        if all(w.over for w in self._workers):
            self._on_all_ended()
            return
        self._call_later(self.stuck_after_s, self._report_survivors)

    def _call_later(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        """Call a function after a delay, unless all workers have ended before."""
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, call, *args))

    def _report_survivors(self) -> None:
        """Post :class:`WorkersStuck` for the workers that have survived SIGKILL, if any have."""
        if pids := tuple(w.pid for w in self._workers if not w.ended):
            self._observer.post(WorkersStuck(self._round, pids))

    def _cancel_starts(self, then: Callable[[], None]) -> bool:
        """Begin to give up the starts that are under way, and note that the round is stopped.

        Args:
            then: Function to call when the start of the round is over.

        Returns:
            Whether the round was being started, so that ``then`` will be called.
        """
        self._stopped = True
        for task in self._cold_restarts:
            task.cancel()
        if self._starting is None:
            return False
        self._after_start = then
        self._starting.cancel()
        return True

    def _signal(self, number: int, workers: list[Worker]) -> None:
        """Signal the workers that have not ended."""
        for worker in workers:
            worker.signal(number)

    async def _start_all_cold(self, prepared: list[PreparedWorker]) -> None:
        """Start the workers without a zygote, and record their imports for the next zygote.

        Imports are not recorded in a check, or if warm starts are disabled. The first worker that
        cannot be started ends the start; earlier workers run.

        Raises:
            _NotStartedError: A worker cannot be started.
        """
        observed = not self.warm.disabled_reason and not self._checking
        argvs = [one.worker.argv for one in prepared]
        if observed:
            argvs = await self.warm.observed_argvs(argvs)
        for one, argv in zip(prepared, argvs, strict=True):
            try:
                await self._start_cold(one, argv)
            except (OSError, subprocess.SubprocessError) as error:  # OverdueError is one, too
                worker = one.worker
                failure = _start_failure(worker.local_rank, worker.rank, worker.argv[0], error)
                raise _NotStartedError(failure) from error

    async def _start_cold(self, prepared: PreparedWorker, argv: list[str]) -> None:
        """Start a worker without a zygote.

        Args:
            prepared: The worker, and the pipes of its output, which the caller still has to close.
            argv: Command line, which may differ from the worker's own to observe its imports.

        Raises:
            OSError: If the operating system refuses, or has not answered within the limit.
            subprocess.SubprocessError: If a step before exec has failed.
        """
        worker, out, err = prepared.worker, prepared.out, prepared.err
        # The thread may need the descriptors after the caller has given up and closed its own.
        owned = PreparedWorker(worker, None if out is None else os.dup(out), os.dup(err))
        before_exec = _die_with_parent(os.getpid(), self._factory.cpus(worker.local_rank))

        def make() -> "subprocess.Popen[bytes]":
            try:
                return subprocess.Popen(
                    argv,
                    env=worker.env,
                    stdout=owned.out,
                    stderr=owned.err,
                    start_new_session=True,
                    preexec_fn=before_exec,
                )
            finally:
                owned.close()

        worker.started_at = time.monotonic()
        process = await self._starter.start(make, undo=kill_and_reap, not_called=owned.close)
        worker.wait = process.wait
        self._begin(worker, process.pid)

    def _adopt_all(self, children: list[ForkedProcess]) -> None:
        """Let the forked processes run as the workers of the round.

        Raises:
            _NotStartedError: A process has ended, or there are no more file descriptors. The
                processes after this one end too.
        """
        for worker, child in zip(self._workers, children, strict=True):
            try:
                self._adopt(worker, child)
            except OSError as error:  # for example, the process was killed immediately
                for rest in children[worker.local_rank :]:
                    rest.control.close()  # this ends the process
                failure = _start_failure(worker.local_rank, worker.rank, worker.argv[0], error)
                raise _NotStartedError(failure) from error

    def _adopt(self, worker: Worker, child: ForkedProcess) -> None:
        """Let a forked process run as a worker, on its CPUs.

        Raises:
            OSError: The process has ended, or there are no more file descriptors.
        """
        worker.child, worker.wait = child, child.wait
        worker.started_at = time.monotonic()
        self._begin(worker, child.pid)
        if cpus := self._factory.cpus(worker.local_rank):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(child.pid, cpus)
        child.go()

    def _begin(self, worker: Worker, pid: int) -> None:
        """Watch a worker's new process, and have the reaper end its session with the agent.

        A process that cannot be watched is killed, and reaped with the round.

        Raises:
            OSError: The process is gone, or there are no more file descriptors.
        """
        worker.pid = pid
        try:
            worker.session = ProcessId.of(pid)
            self._children.add_session(worker.session)
            worker.watch(self._on_exit)
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it is not reaped, so its id belongs to no other
            raise

    def _kill_unstarted(self) -> None:
        """Kill the forked workers that hang before the user's code.

        This runs ``FORK_START_S`` after the start. When their ends are noticed, they are started
        cold.
        """
        hung = [w for w in self._workers if w.child and not w.ended and not w.child.started()]
        self._signal(signal.SIGKILL, hung)

    def _replace_by_cold_start(self, worker: Worker) -> None:
        """Begin to start a worker cold, because its fork ended before it reached the user's code.

        The start runs in a task, and its imports are not recorded. If it fails, the worker's end is
        reported as a failure. If a stop cancels it, the end is reported without a failure.
        """
        log.warning("warm_start_failed", extra={"rank": worker.rank, "then": "cold start"})
        self._reap(worker)
        try:
            prepared = self._factory.prepare(worker.local_rank)
        except OSError as error:  # no more file descriptors
            self._report_end(
                worker, _start_failure(worker.local_rank, worker.rank, "its output", error)
            )
            return
        fresh = self._workers[worker.local_rank] = prepared.worker

        def on_start_end(start: "asyncio.Task[None]") -> None:
            self._cold_restarts.discard(start)
            prepared.close()
            if fresh.watched:
                return
            fresh.ended = True
            fresh.close_pumps()
            error = None if start.cancelled() else start.exception()
            failure = None
            if error is not None:
                failure = _start_failure(fresh.local_rank, fresh.rank, fresh.argv[0], error)
            self._report_end(fresh, failure)

        start = asyncio.create_task(self._start_cold(prepared, fresh.argv))
        self._cold_restarts.add(start)
        start.add_done_callback(on_start_end)

    def _store_ended(self, why: str) -> None:
        """Post the end of the store's process as a failure of the round while workers run.

        If a stop was requested, or all workers have ended, nothing happens.
        """
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
            self._observer.post(WorkerEnded(self._round, -1, failure))

    def _on_exit(self, worker: Worker) -> None:
        """Handle the end of a worker's process, in the event loop.

        The end of a worker with exit code 0 is reported now. A failure is reported by a task, once
        its cause is found. A forked worker that did not reach the user's code is started cold
        instead.
        """
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        code = exit_code(os.P_PIDFD, worker.pidfd)  # not None: the pidfd is readable
        worker.ended = True
        # Its reports must be read before its end is handled.
        step = self._observer.last_step(worker.local_rank)
        os.close(worker.pidfd)
        worker.close_pumps()
        if worker.child is not None:
            started = worker.child.started()
            worker.child.control.close()
            if not started and not self._stopped:
                self._replace_by_cold_start(worker)
                return
        if not code:
            worker.succeeded = True
            self._report_end(worker, None)
            return
        if not self._stopped and sum(w.ended for w in self._workers) == 1:
            self._observer.worker_failed()
            if worker.is_young and step is None and code != -signal.SIGKILL:
                self.warm.shelf.distrust(forked=worker.child is not None)
        stopped = self._stopped and -code in (*self._command.signals, signal.SIGKILL)
        succeeded = [w.rank for w in self._workers if w.succeeded]
        describer = self._deaths.facts(worker, code, step, succeeded)
        task = asyncio.create_task(self._explain(worker, describer, stopped=stopped))
        self._explanations.add(task)
        task.add_done_callback(self._explanations.discard)

    async def _explain(
        self, worker: Worker, describer: Callable[..., WorkerFailure], *, stopped: bool
    ) -> None:
        """Report the end of a worker that has failed or was stopped, once its cause is found.

        Args:
            worker: The worker.
            describer: Function that describes the death; see :meth:`DeathRecords.facts`.
            stopped: Whether the agent has stopped the worker.
        """
        self._report_end(worker, await self._deaths.explain(worker, describer, stopped=stopped))

    def _report_end(self, worker: Worker, failure: WorkerFailure | None) -> None:
        """Post a worker's end, and begin to clear the round if no other worker is left.

        While others are left, a timer starts instead, unless it runs: it reaps the ended workers
        whose sessions are empty.
        """
        worker.over = True
        self._observer.post(WorkerEnded(self._round, worker.local_rank, failure))
        if all(w.over for w in self._workers):
            self._on_all_ended()
        elif not self._reap_scheduled:
            self._reap_scheduled = True
            self._call_later(REAP_DELAY_S, self._reap_empty_sessions)

    def _reap_empty_sessions(self) -> None:
        """Reap the ended workers whose sessions are empty, while others of the round run.

        If the processes cannot be listed, nothing is reaped before the end of the round.
        """
        self._reap_scheduled = False
        ended = [w for w in self._workers if w.ended and w.session is not None]
        try:
            busy = {p.session for p in members([w.session for w in ended if w.session is not None])}
        except OSError:  # no more file descriptors: the end of the round releases them
            return
        for worker in ended:
            if worker.pid not in busy:
                self._reap(worker)

    def _reap(self, worker: Worker) -> None:
        """Reap a worker whose session is empty. The kernel may then reuse its process id.

        The session is removed from the registry, even if the process has survived SIGKILL.
        """
        if exit_code(os.P_PID, worker.pid) is not None:
            worker.wait()
        if worker.session is not None:
            self._children.remove_session(worker.session)
            worker.session = None

    def _on_all_ended(self) -> None:
        """Begin to clear the round in a task, once the last worker has ended.

        The timers of the round are cancelled. The store ends only if a stop was requested. A second
        call does nothing more while the task runs.
        """
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._reap_scheduled = False
        if self._stopped:  # otherwise workers of other nodes may still use the store
            self._stores.end()
        if self._clearing is None:
            self._clearing = asyncio.create_task(self._clear_sessions())

    async def _clear_sessions(self) -> None:
        """Kill the processes that are left in the workers' sessions, and wait for their end.

        Then :class:`WorkersGone` is posted. It is :class:`WorkersStuck` if processes are left after
        ``stuck_after_s``, or if the processes could not be listed; it may then name none. Starts
        that were given up get as much time before that.
        """
        held = [w for w in self._workers if w.session is not None]
        sessions = [w.session for w in held if w.session is not None]
        # Otherwise these processes would be killed as leftovers.
        await self._stores.forked()
        await self.warm.forks.stop_forking_spares()
        starting_pids = await self._starter.idle(self.stuck_after_s)
        deadline = time.monotonic() + self.stuck_after_s
        own = self._children.non_worker_pids
        left = await _kill_remaining(sessions, own, self.unreaped, deadline)
        self._clearing = None
        for worker in held:
            self._reap(worker)
        if left != [] or starting_pids:
            pids = (*starting_pids, *(process.pid for process in left or ()))
            self._observer.post(WorkersStuck(self._round, pids))
        else:
            self._observer.post(WorkersGone(self._round))


def remaining_processes(
    sessions: list[ProcessId], own: set[int], among: Collection[Process]
) -> list[ProcessId]:
    """Return the processes that are left of a round.

    These are the members of its sessions, and processes that moved to another session and lost
    their parent. The agent is a subreaper, so it is now the parent of those.

    Args:
        sessions: The workers' processes, which lead the sessions.
        own: Process ids of the agent's children that are no workers.
        among: All processes, read just now.

    Raises:
        OSError: There are no more file descriptors.
    """
    others = [child for child in children(os.getpid(), among=among) if child.pid not in own]
    # The agent's own processes, just forked, are left alone.
    own_forks = forked_by_other_threads() if others else set()
    strays = [child for child in others if child.pid not in own_forks]
    return [*(process.id for process in members(sessions, among)), *strays]


async def _kill_remaining(
    sessions: list[ProcessId], own: set[int], unreaped: set[int], deadline: float
) -> list[ProcessId] | None:
    """Kill the processes that are left of a round until none is, and reap orphans.

    Args:
        sessions: As for :func:`remaining_processes`.
        own: As for :func:`remaining_processes`; it may change meanwhile.
        unreaped: Process ids of workers, which are reaped later.
        deadline: When to give up (``time.monotonic()``).

    Returns:
        The processes that are left at the deadline; None if they could not be listed.
    """
    left: list[ProcessId] | None = None
    while left != [] and time.monotonic() < deadline:
        try:
            found = list(all_processes())
            left = remaining_processes(sessions, own, found)
            reap_orphans(own | unreaped)
            await asyncio.gather(*(_kill(process, deadline) for process in left))
        except OSError as error:  # no more file descriptors; some may become free
            log.warning("processes_not_listed", extra={"why": error.strerror or str(error)})
            await asyncio.sleep(LISTED_AGAIN_S)
    return left


async def _kill(process: ProcessId, deadline: float) -> None:
    """Send SIGKILL to a process, and wait for its end until the deadline (``time.monotonic()``).

    It is no error if the process is gone, may not be signaled, or outlives the deadline.

    Raises:
        OSError: There are no more file descriptors.
    """
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


class _NotStartedError(Exception):
    """A worker of the round cannot be started."""

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _start_failure(local_rank: int, rank: int, what: str, error: BaseException) -> WorkerFailure:
    """Describe the failure of a worker that could not be started.

    Args:
        local_rank: Local rank of the worker.
        rank: Global rank of the worker.
        what: What could not be started or opened, such as the path of the program.
        error: Why it could not.
    """
    number, why = None, str(error)
    if isinstance(error, OverdueError):
        why = f"{why}; expected its file system to return the program"
    elif isinstance(error, OSError):
        number, why = error.errno, error.strerror or why
    what = what if len(what) <= 400 else f"…{what[-400:]}"  # the end of a path is the useful part
    message = f"could not be started: {what}: {why}"
    return WorkerFailure(
        kind=FailureKind.START,
        local_rank=local_rank,
        rank=rank,
        pid=0,
        exit_code=127,
        message=message,
        fingerprint=f"start|{number}|{what}",
        cause=classify(DeathFacts(FailureKind.START, 127, last_words=message)),
    )


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans, so that it can reap them.

    If the kernel refuses, a warning is logged.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        log.warning("subreaper_refused", extra={"why": os.strerror(ctypes.get_errno())})


def reap_orphans(known: set[int]) -> None:
    """Reap ended children that no other code waits for; do not wait for those that run.

    Children that another thread than the main thread has forked are left to that thread's code.

    Args:
        known: Process ids of children that other code reaps.

    Raises:
        OSError: There are no more file descriptors.
    """
    for pid in children_of_main_thread() - known:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _die_with_parent(parent: int, cpus: frozenset[int]) -> Callable[[], None]:
    """Return a function for a child before exec: set its CPUs, and have it die with its parent.

    The parent is the thread that forks it. A child whose parent has ended exits with 1.
    """

    def before_exec() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        end_with_parent(parent)

    return before_exec
