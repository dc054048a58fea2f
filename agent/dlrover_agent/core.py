"""One node's decisions, PURE: what to do about an assignment, a worker's end, a signal.

``Core.handle(event, now)`` is the only way in; it returns effects. Workers belong to one round at
a time: those of the old round are gone before those of the next one start.
"""

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

MEASURED: dict[str, Callable[[Iterable[float]], float]] = {
    "matmul_s": max,
    "allreduce_s": max,
    "algbw_gb_s": min,
    "busbw_gb_s": min,
}
"""What the workers of a check measure, and whose number is the node's."""
ADRIFT_S = 30.0
"""So much longer is a master enough that answers, but hears nothing of its platform: it is cut off
with us, or the platform is away for all, and then nobody is better off for a stop."""
OVERDUE_S = 5.0
"""An exchange has failed when its answer is so late."""
AFTER_FAILURE_S = 5.0
"""Where one of several workers fails in their last step, the others may be saving it still."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The master has answered."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Refused:
    """The master has given this node, or this life of it, up."""

    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's process has ended."""

    round: int
    local_rank: int
    failure: WorkerFailure | None
    """None if it exited 0."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """All processes of the round are gone."""

    round: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """Processes of the round survived SIGKILL (a hung driver or file system)."""

    round: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A script reported where it stands."""

    round: int
    local_rank: int
    step: int
    total: int | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class MasterLost:
    """The master has been away for so long that it will not come back."""

    message: str


@dataclass(frozen=True, slots=True)
class Missed:
    """The master did not answer."""


@dataclass(frozen=True, slots=True)
class Met:
    """Another node of the round is there: rank 0's agent has answered, or one has asked it."""

    round: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Some time has passed: a part of :attr:`Core.look_s`."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """The agent was signalled, or its lifeline has ended."""

    name: str
    number: int


Event = (
    Assigned
    | Refused
    | Ended
    | Emptied
    | Stuck
    | Stepped
    | MasterLost
    | Missed
    | Met
    | Passed
    | Signalled
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers of this assignment; a fresh offer is needed from now on."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Renew:
    """The offer belongs to this round now: reserve another port for the next one."""

    round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the workers: a signal, SIGKILL after the grace; then :class:`Emptied`."""

    why: str
    grace_s: float
    polite: bool = False
    """Let scripts that ask ``should_stop()`` end by themselves before they are signalled."""
    signal: int = 15
    last_step_s: float = 0.0
    """Those scripts have so long for it, if that is longer than the grace."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the workers at once."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report has changed in a way that must not wait for the next exchange."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask rank 0's agent whether it is in this round still; then :class:`Met`, or silence."""

    addr: str
    port: int


@dataclass(frozen=True, slots=True)
class Exit:
    """The agent's work is done."""

    code: int
    message: str


Effect = Start | Renew | Stop | Kill | Report | Ask | Exit


@dataclass(slots=True)
class Core:
    """State of one agent."""

    nproc: int
    shutdown_s: float = 30.0
    """Signal to SIGKILL when the agent itself is asked to end."""
    phase: WorkerPhase = WorkerPhase.IDLE
    follows: int = 0
    incarnation: int = 0
    have: tuple[int, int] = (0, 0)
    """Term and version of the newest assignment."""
    failure: WorkerFailure | None = None
    progress: Progress | None = None
    checks: int = 0
    """Newest check that was taken up."""
    check: CheckResult | None = None
    """How it ended here."""
    leaving: str = ""
    cut_off: str = ""
    """Why the workers of round ``follows`` were stopped without the master's word."""
    assignment: Assignment | None = None
    _alive: set[int] = field(default_factory=set)
    _measured: dict[int, dict[str, float]] = field(default_factory=dict)
    """What the workers of a check have said, by local rank."""
    _workers_round: int = 0
    _occupied: bool = False
    """Processes of the round may still be there."""
    _stopping: bool = False
    _last_step: bool = False
    """The workers that stop may finish their step."""
    _next: Assignment | None = None
    _exit: Exit | None = None
    _signals: int = 0
    _taken_up_at: float = 0.0
    _stepped_at: float = 0.0
    _missed_at: float | None = None
    """Since when the master has not answered, or has been adrift."""
    _adrift: bool = False
    """It answers, and has itself lost touch with its platform."""
    _met_at: float | None = None
    """When another node of the round was there last; None if that has never been seen."""

    @property
    def clean(self) -> int:
        """No worker of a round before this one runs here any more."""
        return self._workers_round if self._occupied else self.follows + 1

    @property
    def departs(self) -> bool:
        """Whether others may go on without this node, and wait for a last step with it until they
        hear that none of its workers runs any more."""
        if self._exit is None or self._exit.code == ExitCode.SUPERSEDED:
            return False
        dismissed = self._exit.code == ExitCode.OK and self.phase is WorkerPhase.STOPPING
        return bool(self.leaving) or dismissed

    @property
    def look_s(self) -> float:
        """How often to look, at most, whether anybody is there: several times in a lease."""
        return (self.assignment.lease_s if self.assignment is not None else OVERDUE_S) / 4

    def stands(self, round_number: int) -> bool:
        """Whether this node is in that round still, and has not stopped its workers."""
        well = self.phase in (WorkerPhase.RUNNING, WorkerPhase.SUCCEEDED)
        return well and round_number == self._workers_round

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event, and say what has to be done."""
        match event:
            case Assigned(assignment):
                return self._assigned(assignment, now)
            case Refused(message):
                return self._refused(message)
            case Ended(round_number, local_rank, failure):
                return self._ended(round_number, local_rank, failure)
            case Emptied(round_number):
                return self._emptied(round_number)
            case Stuck(round_number, pids):
                return self._stuck(round_number, pids)
            case Stepped():
                return self._stepped(event, now)
            case MasterLost(message):
                return self._master_lost(message)
            case Missed():
                self._missed_at = now if self._missed_at is None else self._missed_at
                self._adrift = False
                return []
            case Met(round_number):
                self._met_at = now if round_number == self._workers_round else self._met_at
                return []
            case Passed():
                return self._passed(now)
            case Signalled(name, number):
                return self._signalled(name, number)

    def _assigned(self, new: Assignment, now: float) -> list[Effect]:
        if new.term >= self.have[0]:  # not one that was replaced, and is cut off with us
            self._adrift = new.adrift
            if not new.adrift:
                self._missed_at = None
            elif self._missed_at is None:
                self._missed_at = now
        if (new.term, new.version) <= self.have:
            return []
        self.have = (new.term, new.version)
        self.incarnation = new.incarnation
        self.assignment = new
        if self._exit is not None:
            return []
        if new.directive is Directive.STOP:
            self._exit = Exit(new.exit_code, new.reason)
            return self._stop(new.reason, new.stop_grace_s, polite=True)
        if new.directive is Directive.WAIT:
            self._next = None
            return self._make_way(new) if self._occupied else []
        if new.directive is Directive.CHECK:
            if new.check <= self.checks:
                return self._make_way(new) if self._last_step else []
            self.checks, self.check = new.check, None
        elif new.round <= self.follows:
            return self._make_way(new) if self._last_step else []
        else:
            self.follows, self._taken_up_at = new.round, now
        self.failure = self.progress = None
        self.cut_off = ""
        self._next = new
        # A report at once: the master waits for it before it counts on this node again.
        effects: list[Effect] = [Renew(new.round), Report()]
        if not self._occupied:
            return effects + self._start()
        effects += self._make_way(new)
        # A report speaks of the new round from here on: the old one's end is no news of it.
        self.phase = WorkerPhase.STOPPING
        return effects

    def _refused(self, message: str) -> list[Effect]:
        self._exit = Exit(ExitCode.SUPERSEDED, f"refused by the master: {message}")
        self._next = None
        if not self._occupied:
            return [self._exit]
        self._mark_stopping()
        return [Kill()]  # another node may already work in its place: nothing more is written

    def _ended(
        self, round_number: int, local_rank: int, failure: WorkerFailure | None
    ) -> list[Effect]:
        if round_number != self._workers_round:
            return []
        self._alive.discard(local_rank)
        if self._stopping or self._exit is not None:
            if failure is None or not self._last_step:
                return []  # it was told to end: neither a success nor a failure
            self._last_step = False
            return [Stop("a worker of this node failed", AFTER_FAILURE_S, polite=True)]
        if self.phase is WorkerPhase.CHECKING:
            return self._check_ended(local_rank, failure)
        if failure is not None:
            self.phase, self.failure = WorkerPhase.FAILED, failure
            # The round is over, here and everywhere: do not wait for the master to say so.
            return [Report(), *self._stop("a worker of this node failed", 1.0)]
        if self._alive:
            return []
        self.phase = WorkerPhase.SUCCEEDED
        return [Report()]

    def _check_ended(self, local_rank: int, failure: WorkerFailure | None) -> list[Effect]:
        """A worker of a check has ended: no news of the job's own workers, whatever it was."""
        why = "" if failure is None else failure.message
        if not why and local_rank not in self._measured:
            why = "ended without a result"
        if why:
            self.check = CheckResult(passed=False, why=f"worker {local_rank} {why}")
            return [Report(), *self._stop("the check has failed", 0.0)]
        if self._alive:
            return []
        slowest = {
            name: pick(m.get(name, 0.0) for m in self._measured.values())
            for name, pick in MEASURED.items()
        }
        self.check = CheckResult(passed=True, **slowest)
        return [Report()]

    def _emptied(self, round_number: int) -> list[Effect]:
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

    def _stuck(self, round_number: int, pids: tuple[int, ...]) -> list[Effect]:
        if round_number != self._workers_round:
            return []
        words = ", ".join(map(str, pids))
        return [Exit(ExitCode.FAILED, f"processes {words} survived SIGKILL: this node is unfit")]

    def _stepped(self, news: Stepped, now: float) -> list[Effect]:
        checking = news.round == self._workers_round and self.phase is WorkerPhase.CHECKING
        if checking and all(news.metrics.get(name, 0.0) >= 0 for name in MEASURED):
            self._measured[news.local_rank] = news.metrics
        if news.round != self._workers_round or self.phase is not WorkerPhase.RUNNING:
            return []
        old = self.progress
        if old is None:
            self._stepped_at = now
            self.progress = Progress(
                step=news.step,
                total=news.total,
                started_at_step=news.step,
                first_step_after_s=now - self._taken_up_at,
                metrics=news.metrics,
            )
            return [Report()]  # how long the recovery took is known now
        if news.step < old.step:
            return []
        speed, passed = old.steps_per_s, now - self._stepped_at
        if news.step > old.step and passed > 0:
            current = (news.step - old.step) / passed
            # The mean over about ten reports: one slow step is no news.
            speed = current if speed == 0 else 0.9 * speed + 0.1 * current
            self._stepped_at = now
        self.progress = old.model_copy(
            update={
                "step": news.step,
                "total": news.total if news.total is not None else old.total,
                "steps_per_s": speed,
                "metrics": news.metrics or old.metrics,
            }
        )
        return []

    def _master_lost(self, message: str) -> list[Effect]:
        """Workers that run need no master; what comes after them does."""
        if self._occupied or self._exit is not None:
            return []
        well = self.phase is WorkerPhase.SUCCEEDED
        self._exit = Exit(ExitCode.OK if well else ExitCode.FAILED, message)
        return [self._exit]

    def _passed(self, now: float) -> list[Effect]:
        """Whether this node still trains with the others, or is alone and cannot know whether they
        go on without it.

        The master may be dead: then all the others miss it too and ask rank 0, which both sides
        learn from. Where no question has ever got through the way is closed, not the node cut off.
        """
        place = self.assignment
        if place is None or place.nnodes < 2 or not self.stands(place.round):
            return []
        first, missed, met = place.node_rank == 0, self._missed_at, self._met_at
        ask: list[Effect] = []
        if not first and (missed is not None or met is None):
            ask.append(Ask(place.master_addr, place.master_port))
        if missed is None or met is None or self.phase is not WorkerPhase.RUNNING:
            return ask
        # Others may begin to miss the master later than rank 0 does, by as long as an exchange may
        # take, and ask only then.
        patience = place.lease_s + (place.exchange_s + OVERDUE_S if first else 0.0)
        patience += ADRIFT_S if self._adrift else 0.0
        if now - max(missed, met) < patience:
            return ask
        other = "any other node of the round" if first else "rank 0"
        who = "a master in touch with its platform" if self._adrift else "the master"
        self.cut_off = f"neither {who} nor {other} was heard for {patience:g} s"
        return [*self._stop(self.cut_off, place.stop_grace_s), Report()]

    def _signalled(self, name: str, number: int) -> list[Effect]:
        self._signals += 1
        if self._signals > 1:
            return [Kill()] if self._occupied else []
        if self._exit is not None:
            return []  # it is on its way out already: the platform only says so too
        self.leaving = f"the agent received {name}"
        self._next = None
        self._exit = Exit(ExitCode.FAILED, self.leaving)
        stop = Stop(self.leaving, self.shutdown_s, polite=True, signal=number)
        if not self._occupied:
            return [Report(), self._exit]
        self._mark_stopping()
        return [Report(), stop]

    # --- small steps ---

    def _start(self) -> list[Effect]:
        assignment, self._next = self._next, None
        assert assignment is not None
        self._workers_round = assignment.round
        self._alive = set(range(self.nproc))
        self._occupied = True
        checks = assignment.directive is Directive.CHECK
        self.phase = WorkerPhase.CHECKING if checks else WorkerPhase.RUNNING
        self._measured.clear()
        self._met_at = None
        return [Start(assignment)]

    def _stop(self, why: str, grace_s: float, *, polite: bool = False) -> list[Effect]:
        if not self._occupied:
            return [self._exit] if self._exit is not None else []
        if self._stopping and not polite:
            return []
        self._mark_stopping()
        return [Stop(why, grace_s, polite)]

    def _make_way(self, new: Assignment) -> list[Effect]:
        """The workers' round is over; if only by plan, they may finish their step, unless a fault
        comes on top."""
        by_plan = new.last_step_s > 0
        if self._stopping and (by_plan or not self._last_step):
            return []
        self._mark_stopping()
        self._last_step = by_plan
        return [Stop(new.reason, new.stop_grace_s, by_plan, last_step_s=new.last_step_s)]

    def _mark_stopping(self) -> None:
        self._stopping, self._last_step = True, False
        if self.phase in (WorkerPhase.RUNNING, WorkerPhase.CHECKING):
            self.phase = WorkerPhase.STOPPING
