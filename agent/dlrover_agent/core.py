"""The decisions of one node's agent, for example after an assignment, a worker's end or a signal.

This module is pure: it has no I/O and reads no clock. :meth:`Core.handle` is the only entry point.
It takes an event and returns the effects to carry out.

Workers belong to one round at a time: a run of the script on a fixed set of nodes. All workers of
the old round are gone before those of the next round start. A check runs test workers in the place
of the script. The lease is the time without a report after which the master counts a node as lost.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dlrover_py.protocol.agents import (
    Assignment,
    CheckResult,
    Directive,
    Progress,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.timing import AGENT_DISCONNECTED_S

MEASURED: dict[str, Callable[[Iterable[float]], float]] = {
    "matmul_s": max,
    "allreduce_s": max,
    "algbw_gb_s": min,
    "busbw_gb_s": min,
}
"""Measurements of a check's workers, and how the node's value is made from theirs.

The node's value is that of its slowest worker: the longest time or the lowest bandwidth."""
EXCHANGE_OVERDUE_S = 5.0
"""Seconds after which an exchange without an answer has failed."""
SPEED_REPORTS, SPEED_S = 11, 10.0
"""New steps, and seconds, that the shown speed is the mean of at least, once they have passed."""
AFTER_FAILURE_S = 5.0
"""Seconds that workers get to end after another worker of the node failed in the last step.

They may still be saving that step."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """An answer of the master has arrived."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The master has refused this node, or this incarnation of it."""

    message: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The process of a worker has ended."""

    round: int
    local_rank: int
    failure: WorkerFailure | None
    """Why the worker failed; None if its exit code was 0."""


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """All processes of a round are gone."""

    round: int


@dataclass(frozen=True, slots=True)
class WorkersStuck:
    """Processes of a round have survived SIGKILL, for example in a hung driver or file system."""

    round: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReported:
    """A script has reported its step and its metrics."""

    round: int
    local_rank: int
    step: int
    total: int | None
    metrics: dict[str, float]
    spent: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MasterLost:
    """The master has been unreachable for so long that it will not come back."""

    message: str


@dataclass(frozen=True, slots=True)
class MasterUnreachable:
    """The master has not answered a report."""


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """Another node of the round has been reached.

    On rank 0 another node's agent has sent a probe. On the other nodes rank 0's agent has answered
    a probe.
    """

    round: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time has passed, at most :attr:`Core.tick_s`."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """The agent has received a signal, or its lifeline pipe has been closed."""

    name: str
    number: int


Event = (
    Assigned
    | NodeRefused
    | WorkerEnded
    | WorkersGone
    | WorkersStuck
    | StepReported
    | MasterLost
    | MasterUnreachable
    | PeerSeen
    | Tick
    | Signalled
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers of this assignment."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class ReserveNextPort:
    """Use the reserved port for this round, and reserve another port for the next round."""

    round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the workers with a signal, and with SIGKILL after the grace period.

    :class:`WorkersGone` follows when all processes are gone.
    """

    why: str
    grace_s: float
    """Seconds from the signal to SIGKILL."""
    graceful: bool = False
    """Whether scripts that call ``should_stop()`` may end by themselves instead of by a signal."""
    signal: int = 15
    last_step_s: float = 0.0
    """Seconds that such scripts have for their last step, if that is longer than ``grace_s``."""
    fault: bool = False
    """Whether the job has failed, so that the workers are looked at before a graceful stop, too."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the workers immediately."""


@dataclass(frozen=True, slots=True)
class Report:
    """Send a report now, because a change must not wait for the next exchange."""


@dataclass(frozen=True, slots=True)
class ProbePeer:
    """Ask rank 0's agent whether it is still in this round.

    :class:`PeerSeen` follows if it is. Otherwise no event follows.
    """

    addr: str
    port: int


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent with this exit code."""

    code: int
    message: str


Effect = Start | ReserveNextPort | Stop | Kill | Report | ProbePeer | Exit


@dataclass(slots=True)
class Core:
    """The state of one agent, and its decisions.

    All times are seconds of one monotonic clock, which the caller of :meth:`handle` reads.
    """

    nproc: int
    """Number of workers on this node."""
    shutdown_s: float = 30.0
    """Seconds from the signal to SIGKILL when the agent itself is asked to end."""
    phase: WorkerPhase = WorkerPhase.IDLE
    """State of the workers of round ``follows``, taken together."""
    follows: int = 0
    """Newest round that the agent has taken up."""
    incarnation: int = 0
    """Incarnation of this node as assigned by the master; 0 before the first assignment."""
    have: tuple[int, int] = (0, 0)
    """Term and version of the newest assignment."""
    failure: WorkerFailure | None = None
    """Why round ``follows`` failed on this node; None if it did not."""
    progress: Progress | None = None
    """Progress of the script in round ``follows``; None before the first step was reported."""
    reached_step: int | None = None
    """Highest step of earlier rounds, and of workers that were being stopped; None without one."""
    checks: int = 0
    """Number of the newest check that the agent has taken up."""
    check: CheckResult | None = None
    """Result of check ``checks`` on this node; None if it has not ended."""
    leaving: str = ""
    """Why this node leaves the job; empty if it stays."""
    cut_off: str = ""
    """Why the agent stopped the workers of round ``follows`` without an order of the master."""
    assignment: Assignment | None = None
    """Newest assignment; None before the first one."""
    _alive: set[int] = field(default_factory=set)
    """Local ranks of the workers that run."""
    _measurements: dict[int, dict[str, float]] = field(default_factory=dict)
    """Measurements of a check's workers, by local rank."""
    _workers_round: int = 0
    """Round of the workers that were started last."""
    _workers_check: bool = False
    """Whether these workers were started for a check."""
    _occupied: bool = False
    """Whether processes of round ``_workers_round`` may still exist."""
    _stopping: bool = False
    """Whether the workers have been asked to stop."""
    _last_step: bool = False
    """Whether workers that stop may finish their step."""
    _next: Assignment | None = None
    """Assignment whose workers start when the present ones are gone."""
    _exit: Exit | None = None
    """How the agent ends when its workers are gone; None if it goes on."""
    _signals: int = 0
    """Number of signals that the agent has received."""
    _round_taken_up_at: float = 0.0
    """When round ``follows`` was taken up."""
    _steps_seen: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and numbers of the last new steps of round ``follows``, from which the speed follows.
    """
    _master_missing_since: float | None = None
    """Since when the master has not answered or has been disconnected; None if all is well."""
    _master_disconnected: bool = False
    """Whether the master answers, but has itself lost its platform."""
    _peer_seen_at: float | None = None
    """When another node of the round was last reached; None if never."""

    @property
    def oldest_live_round(self) -> int:
        """The oldest round whose workers may still run on this node."""
        return self._workers_round if self._occupied else self.follows + 1

    @property
    def leaves_job(self) -> bool:
        """Whether the agent ends because its node leaves a job that may go on without the node.

        It is True after a signal, and if the master has stopped running workers with exit code 0.
        It is False while the agent does not end, and after the master has refused the node. The
        other nodes wait for a last step with a node that leaves, until its report says that none
        of its workers runs any more.
        """
        if self._exit is None or self._exit.code == ExitCode.SUPERSEDED:
            return False
        dismissed = self._exit.code == ExitCode.OK and self.phase is WorkerPhase.STOPPING
        return bool(self.leaving) or dismissed

    @property
    def tick_s(self) -> float:
        """Most seconds between two :class:`Tick` events: a quarter of the lease."""
        return (self.assignment.lease_s if self.assignment is not None else EXCHANGE_OVERDUE_S) / 4

    def stands(self, round_number: int) -> bool:
        """Return whether this node's workers of a round run, or have all succeeded.

        The result is False for an older round, for a check, and after a failure or a stop.
        """
        working = self.phase in (WorkerPhase.RUNNING, WorkerPhase.SUCCEEDED)
        return working and round_number == self._workers_round

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Change the state by an event, and return the effects to carry out, in order.

        Events of workers of an older round change nothing. Many events have no effects.
        """
        match event:
            case Assigned(assignment):
                return self._on_assigned(assignment, now)
            case NodeRefused(message):
                return self._on_refused(message)
            case WorkerEnded(round_number, local_rank, failure):
                return self._on_worker_ended(round_number, local_rank, failure)
            case WorkersGone(round_number):
                return self._on_workers_gone(round_number)
            case WorkersStuck(round_number, pids):
                return self._on_workers_stuck(round_number, pids)
            case StepReported():
                return self._on_step_reported(event, now)
            case MasterLost(message):
                return self._on_master_lost(message)
            case MasterUnreachable():
                self._master_missing_since = (
                    now if self._master_missing_since is None else self._master_missing_since
                )
                self._master_disconnected = False
                return []
            case PeerSeen(round_number):
                self._peer_seen_at = (
                    now if round_number == self._workers_round else self._peer_seen_at
                )
                return []
            case Tick():
                return self._on_tick(now)
            case Signalled(name, number):
                return self._on_signal(name, number)

    def _on_assigned(self, new: Assignment, now: float) -> list[Effect]:
        """Follow an assignment of the master, if it is newer than the last one.

        An assignment that is not newer only shows that the master answers, and whether the master
        has lost its platform. One of an older term shows nothing.

        STOP ends the agent once its workers are gone, and WAIT stops the workers. Workers of a new
        round or check start when the old ones are gone. A repeated round or check at most ends a
        last step that is under way: the time in which stopping scripts may finish their step. Once
        the agent ends, assignments are only noted.
        """
        # The answer of an older term comes from a replaced master that is cut off with this node.
        if new.term >= self.have[0]:
            self._master_disconnected = new.master_disconnected
            if not new.master_disconnected:
                self._master_missing_since = None
            elif self._master_missing_since is None:
                self._master_missing_since = now
        if (new.term, new.version) <= self.have:
            return []
        self.have = (new.term, new.version)
        self.incarnation = new.incarnation
        self.assignment = new
        if self._exit is not None:
            return []
        if new.directive is Directive.STOP:
            self._exit = Exit(new.exit_code, new.reason)
            fault = new.exit_code != ExitCode.OK
            return self._stop(new.reason, new.stop_grace_s, graceful=True, fault=fault)
        if new.directive is Directive.WAIT:
            self._next = None
            return self._stop_old_round(new) if self._occupied else []
        if new.directive is Directive.CHECK:
            if new.check <= self.checks:
                return self._stop_old_round(new) if self._last_step else []
            self.checks, self.check = new.check, None
        elif new.round <= self.follows:
            return self._stop_old_round(new) if self._last_step else []
        else:
            self.follows, self._round_taken_up_at = new.round, now
        if self.progress is not None:
            self._reached(self.progress.step)
        self.failure = self.progress = None
        self.cut_off = ""
        self._next = new
        # The report is sent immediately, because the master counts on this node only after it.
        if not self._occupied:
            return [ReserveNextPort(new.round), *self._start(), Report()]
        effects = [ReserveNextPort(new.round), Report(), *self._stop_old_round(new)]
        # Reports describe the new round from now on. The end of the old round's workers must not
        # change them.
        self.phase = WorkerPhase.STOPPING
        return effects

    def _on_refused(self, message: str) -> list[Effect]:
        """End the agent without a further report; kill workers that may still exist first."""
        self._exit = Exit(ExitCode.SUPERSEDED, f"refused by the master: {message}")
        self._next = None
        if not self._occupied:
            return [self._exit]
        self._mark_stopping()
        # Another node may already work in its place, so its workers must not write any more.
        return [Kill()]

    def _on_worker_ended(
        self, round_number: int, local_rank: int, failure: WorkerFailure | None
    ) -> list[Effect]:
        """Handle a worker's end: a failure stops the other workers, the last success is reported.

        A failure is reported as well. An end in a check decides about the check only. An end after
        a requested stop does not change the phase. It matters only if it is a failure while scripts
        may finish a last step. The other workers then have at most ``AFTER_FAILURE_S`` seconds.

        Args:
            round_number: Round of the worker. The end of a worker of an older round is ignored.
            local_rank: Local rank of the worker; -1 for the round's store.
            failure: Why the worker failed; None if its exit code was 0.
        """
        if round_number != self._workers_round:
            return []
        self._alive.discard(local_rank)
        if self._stopping or self._exit is not None:
            if failure is None or not self._last_step:
                # The worker ended because it had to, which is neither a success nor a failure.
                return []
            self._last_step = False
            return [Stop("a worker of this node failed", AFTER_FAILURE_S, graceful=True)]
        if self.phase is WorkerPhase.CHECKING:
            return self._check_ended(local_rank, failure)
        if failure is not None:
            self.phase, self.failure = WorkerPhase.FAILED, failure
            # The round is over on all nodes, so the agent does not wait for the master's order.
            return [Report(), *self._stop("a worker of this node failed", 1.0)]
        if self._alive:
            return []
        self.phase = WorkerPhase.SUCCEEDED
        return [Report()]

    def _check_ended(self, local_rank: int, failure: WorkerFailure | None) -> list[Effect]:
        """Handle the end of a check's worker; it does not count as a failure of the job.

        The first failure ends the check. The check has passed when all workers have ended with a
        result.
        """
        why = "" if failure is None else failure.message
        if not why and local_rank not in self._measurements:
            why = "ended without a result"
        if why:
            self.check = CheckResult(passed=False, why=f"worker {local_rank} {why}")
            return [Report(), *self._stop("the check has failed", 0.0)]
        if self._alive:
            return []
        slowest = {
            name: pick(m.get(name, 0.0) for m in self._measurements.values())
            for name, pick in MEASURED.items()
        }
        self.check = CheckResult(passed=True, **slowest)
        return [Report()]

    def _on_workers_gone(self, round_number: int) -> list[Effect]:
        """End the agent, or start the next round, if one of them has waited for the workers' end.

        Otherwise a stopped node or checked node becomes idle, which is reported. After a failure or
        success the phase stays until the next round. The end of an older round is ignored.
        """
        if round_number != self._workers_round:
            return []
        self._alive.clear()
        self._stopping = self._last_step = self._occupied = False
        if self._exit is not None:
            return [self._exit]
        if self._next is not None:
            return self._start()
        if self.phase not in (WorkerPhase.STOPPING, WorkerPhase.CHECKING):
            return []
        self.phase = WorkerPhase.IDLE
        return [Report()]

    def _on_workers_stuck(self, round_number: int, pids: tuple[int, ...]) -> list[Effect]:
        """End the agent immediately with an error, so that this node gets no further workers."""
        if round_number != self._workers_round:
            return []
        listed = ", ".join(map(str, pids))
        return [Exit(ExitCode.FAILED, f"processes {listed} survived SIGKILL: this node is unfit")]

    def _on_step_reported(self, report: StepReported, now: float) -> list[Effect]:
        """Update the progress, or keep the measurements of a check's worker.

        Only the first step of a round leads to an immediate report. Steps are ignored if they are
        of another round or older than the newest one. The first step of workers that no longer run
        is no progress: the agent only keeps the highest one. Later steps of a round that is being
        stopped are shown, so that the last one of a job is. A check's report with a negative
        measurement is ignored.
        """
        checking = report.round == self._workers_round and self.phase is WorkerPhase.CHECKING
        if checking and all(report.metrics.get(name, 0.0) >= 0 for name in MEASURED):
            self._measurements[report.local_rank] = report.metrics
        if report.round != self._workers_round or self._workers_check:
            return []
        old = self.progress
        if self.phase is not WorkerPhase.RUNNING:
            self._reached(report.step)
            if old is not None and self.phase is WorkerPhase.STOPPING and report.step > old.step:
                seen = {"step": report.step, "metrics": report.metrics or old.metrics}
                self.progress = old.model_copy(update=seen)
            return []
        if old is None:
            self._steps_seen = deque([(now, report.step)])
            self.progress = Progress(
                step=report.step,
                total=report.total,
                started_at_step=report.step,
                first_step_after_s=now - self._round_taken_up_at,
                metrics=report.metrics,
                spent=report.spent,
            )
            return [Report()]  # the duration of the recovery is known now
        if report.step < old.step:
            return []
        steps_per_s = old.steps_per_s
        if report.step > old.step:
            steps_per_s = self._speed(report.step, now) or steps_per_s
        self.progress = old.model_copy(
            update={
                "step": report.step,
                "total": report.total if report.total is not None else old.total,
                "steps_per_s": steps_per_s,
                "metrics": report.metrics or old.metrics,
                "spent": old.spent
                | {on: max(s, old.spent.get(on, 0.0)) for on, s in report.spent.items()},
            }
        )
        return []

    def _speed(self, step: int, now: float) -> float:
        """Take in a new step, and return the steps per second of the last reports; 0: not known.

        Only the times of the first and the last one count. A mean of the speeds between reports
        would be several times too high, because the reports of two workers come at short and long
        distances in turn.
        """
        seen = self._steps_seen
        seen.append((now, step))
        while len(seen) > SPEED_REPORTS and now - seen[1][0] >= SPEED_S:
            seen.popleft()
        began, first = seen[0]
        return (step - first) / (now - began) if now > began else 0.0

    def _reached(self, step: int) -> None:
        """Keep a step that is no progress of the current round, if it is the highest one."""
        self.reached_step = max(step, self.reached_step or 0)

    def _on_master_lost(self, message: str) -> list[Effect]:
        """End the agent if no worker process may exist; else do nothing: workers need no master.

        The exit code is 0 if the workers have succeeded, else 1. An agent that already ends does
        not change.
        """
        if self._occupied or self._exit is not None:
            return []
        succeeded = self.phase is WorkerPhase.SUCCEEDED
        self._exit = Exit(ExitCode.OK if succeeded else ExitCode.FAILED, message)
        return [self._exit]

    def _on_tick(self, now: float) -> list[Effect]:
        """Probe rank 0, and stop the workers if this node is cut off from master and other nodes.

        A node is cut off if neither the master nor rank 0 (on rank 0: any other node) was heard for
        the lease. The limit is longer on rank 0, and while the master has lost its platform. Others
        may then train in the place of this node.

        If the master is dead, all nodes miss it and probe rank 0, so both sides see each other. If
        no probe of the round ever got through, the path between the agents is closed, and silence
        does not mean a cut-off node. Workers that have succeeded are not stopped. Nothing happens
        in a round of one node, or if the round's workers neither run nor have succeeded.
        """
        assignment = self.assignment
        if assignment is None or assignment.nnodes < 2 or not self.stands(assignment.round):
            return []
        is_rank_0, missing_since, seen_at = (
            assignment.node_rank == 0,
            self._master_missing_since,
            self._peer_seen_at,
        )
        probe: list[Effect] = []
        if not is_rank_0 and (missing_since is not None or seen_at is None):
            probe.append(ProbePeer(assignment.master_addr, assignment.master_port))
        if missing_since is None or seen_at is None or self.phase is not WorkerPhase.RUNNING:
            return probe
        # The other nodes probe rank 0 only when they miss the master themselves. That may be
        # later than on rank 0, by the duration of one exchange.
        limit_s = assignment.lease_s + (
            assignment.exchange_s + EXCHANGE_OVERDUE_S if is_rank_0 else 0.0
        )
        limit_s += AGENT_DISCONNECTED_S if self._master_disconnected else 0.0
        if now - max(missing_since, seen_at) < limit_s:
            return probe
        other = "any other node of the round" if is_rank_0 else "rank 0"
        master = "a master that reaches its platform" if self._master_disconnected else "the master"
        self.cut_off = f"neither {master} nor {other} was heard for {limit_s:g} s"
        return [*self._stop(self.cut_off, assignment.stop_grace_s), Report()]

    def _on_signal(self, name: str, number: int) -> list[Effect]:
        """Let this node leave the job after the first signal; kill its workers after the second.

        Workers get the same signal, and SIGKILL after ``shutdown_s``. The agent ends with exit code
        1 when its workers are gone. The first signal is ignored if the agent already ends; it still
        counts as the first one.
        """
        self._signals += 1
        if self._signals > 1:
            return [Kill()] if self._occupied else []
        if self._exit is not None:
            return []  # the agent already ends, and the platform only repeats it
        self.leaving = f"the agent received {name}"
        self._next = None
        self._exit = Exit(ExitCode.FAILED, self.leaving)
        stop = Stop(self.leaving, self.shutdown_s, graceful=True, signal=number)
        if not self._occupied:
            return [Report(), self._exit]
        self._mark_stopping()
        return [Report(), stop]

    # --- Start and stop of workers ---

    def _start(self) -> list[Effect]:
        """Mark the workers of the next assignment as running or checking; request their start."""
        assignment, self._next = self._next, None
        assert assignment is not None
        self._workers_round = assignment.round
        self._alive = set(range(self.nproc))
        self._occupied = True
        self._workers_check = assignment.directive is Directive.CHECK
        self.phase = WorkerPhase.CHECKING if self._workers_check else WorkerPhase.RUNNING
        self._measurements.clear()
        self._peer_seen_at = None
        return [Start(assignment)]

    def _stop(
        self, why: str, grace_s: float, *, graceful: bool = False, fault: bool = False
    ) -> list[Effect]:
        """Request the stop of the workers; without workers, end the agent if it has to end.

        A stop that is under way is not repeated, unless the new one is graceful. SIGKILL then comes
        at the earlier of the two times.

        Args:
            why: Reason for the stop, in words.
            grace_s: Seconds until SIGKILL.
            graceful: Whether scripts that call ``should_stop()`` may end by themselves. They get
                SIGTERM only shortly before SIGKILL.
            fault: Whether the job has failed.
        """
        if not self._occupied:
            return [self._exit] if self._exit is not None else []
        if self._stopping and not graceful:
            return []
        self._mark_stopping()
        return [Stop(why, grace_s, graceful, fault=fault)]

    def _stop_old_round(self, new: Assignment) -> list[Effect]:
        """Stop the workers because their round is over.

        If the end is planned (``last_step_s`` is over 0), they may finish their step. If a fault
        follows meanwhile, they are stopped without that time. Any other stop that is under way is
        not repeated.
        """
        planned = new.last_step_s > 0
        if self._stopping and (planned or not self._last_step):
            return []
        self._mark_stopping()
        self._last_step = planned
        return [Stop(new.reason, new.stop_grace_s, planned, last_step_s=new.last_step_s)]

    def _mark_stopping(self) -> None:
        self._stopping, self._last_step = True, False
        if self.phase in (WorkerPhase.RUNNING, WorkerPhase.CHECKING):
            self.phase = WorkerPhase.STOPPING
