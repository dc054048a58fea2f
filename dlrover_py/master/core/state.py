"""The state of one job: what outlives the master, and what each master makes anew.

:class:`DurableState` is the journal: all that the next master must know is a field of it, and only
there. Agents and the platform report the rest again; it is in :class:`TransientState`, and in the
components that use it alone. This module decides nothing.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic import dataclasses as records

from dlrover_py.master.core.autotune import TunerRecord
from dlrover_py.master.core.checkpoints import CheckpointRecord, Checkpoints
from dlrover_py.master.core.events import Assign, Effect, Kind, NodeSeen, Rules
from dlrover_py.master.core.health import Health, JobHealthRecord
from dlrover_py.master.core.hosts import Hosts, Strikes
from dlrover_py.master.core.nodes import NodeRecord, Nodes, ReportPace, pace
from dlrover_py.master.core.rendezvous import RoundMembers, Size
from dlrover_py.master.core.scaling import ScalingRecord
from dlrover_py.master.core.time_account import TimeAccount
from dlrover_py.master.core.usage import UsageRecord
from dlrover_py.protocol import json_text
from dlrover_py.protocol.agents import (
    COUNT,
    Count,
    FailureClass,
    LoaderSettings,
    Progress,
    WorkerFailure,
)
from dlrover_py.protocol.diagnosis import EvidenceKind
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId, Round, Term
from dlrover_py.protocol.reasons import ConditionReason
from dlrover_py.protocol.sdk import MAX_LOADER_WORKERS, MAX_MICRO_BATCH, MAX_TUNING
from dlrover_py.protocol.status import (
    DiagnosisStatus,
    Failure,
    HostFault,
    JobEvent,
    JobPhase,
    MeasuredSpeed,
    TablesStatus,
)
from dlrover_py.protocol.timing import POD_GRACE_S
from dlrover_py.protocol.words import counted
from dlrover_py.shards.records import QueueRecord

LARGEST_READ = 2**52
"""The largest number that a journal may contain where the next master counts on from it."""
ACCEPTED_BYTES = 256 * 1024
"""Largest spec in the journal. A Secret takes 1 MiB, and round and members are more important."""
BEFORE_KILL_S = 2.0
"""Seconds between the end of an agent's grace and the kill by the platform."""
NON_DISRUPTIVE: tuple[Kind, ...] = ("scale", "join")
"""Kinds of pending rounds during which the current round goes on; it may still fail or succeed."""
PLANNED: tuple[Kind, ...] = (*NON_DISRUPTIVE, "drain")
"""Kinds of pending rounds without a fault: all workers can end after the same step."""


class _JournalModel(BaseModel):
    """Base of all models in the journal; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class PendingRound(_JournalModel):
    """A next round that is needed and not formed yet."""

    kind: Kind
    reason: str
    """Why the round is needed, in words."""
    cause: Count
    """Id of the event that made it necessary."""
    since: float
    """Monotonic time at which the need began; set again when a journal is read."""
    hold_until: float | None = None
    """Monotonic time until which the real cause may still be reported; None if it is known."""
    suspected: tuple[NodeId, WorkerFailure] | None = None
    """The failure that is charged if no other cause is reported in time."""
    cold: bool = False
    """Whether warm starts are in doubt; the next round is then started cold."""
    disrupted: bool = False
    """Whether a fault was added to a planned change; workers can then not end in good order."""


class TuningRecord(_JournalModel):
    """The settings of data loaders, and what became of them."""

    number: Annotated[int, Field(ge=0, le=MAX_TUNING)] = 0
    """Number of the newest settings; it grows with each change."""
    micro_batch: Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH)] | None = None
    loader_workers: Annotated[int, Field(ge=0, le=MAX_LOADER_WORKERS)] | None = None
    event: Count = 0
    """Id of the event about them."""
    taken_up: Count = 0
    """Number of the settings whose outcome is known and recorded."""
    refused: str = ""
    """Why the newest settings cannot be used; empty if nothing speaks against them."""
    flag: bool = False
    """Whether a node was started with ``--auto-tunning``."""
    tuner: TunerRecord = TunerRecord()
    """The searches of the auto-tuner."""
    why: str = ""
    """Why the auto-tuner wants a change that is not requested yet."""

    def settings(self) -> LoaderSettings | None:
        """Return the settings for agents; None if none were ever changed."""
        if not self.number:
            return None
        return LoaderSettings(
            number=self.number, micro_batch=self.micro_batch, loader_workers=self.loader_workers
        )


class ReplacementSlot(_JournalModel):
    """The vacant place of a lost node, to be filled with a new node.

    The journal has the number of relaunches only. A new master fills the place immediately.
    """

    relaunches: Count
    """Nodes lost in this place since the last steady progress."""
    not_before: float = Field(default=-math.inf, exclude=True)
    """Monotonic time before which no new node is requested."""
    failed_before_report: Count = Field(default=0, exclude=True)
    """Number of nodes in a row that ended before their first report."""


class NewNodesRecord(_JournalModel):
    """What new nodes get instead of what the template says, and the last reclaims of nodes on spot
    hosts."""

    memory: Count = 0
    """Memory limit in bytes to which that of new nodes was raised; 0 if it was not."""
    advised_for: str = ""
    """Hash of the template for which memory and CPUs were advised; empty if none were."""
    advised_memory: Count = 0
    """Memory limit in bytes that is advised."""
    advised_cpu: Count = 0
    """CPU request in thousandths of a CPU that is advised; 0 if the template has none."""
    lack: str = ""
    """Hash of the template with which a node ran out of memory below the template's limit."""
    usage: UsageRecord = Field(default_factory=UsageRecord)
    """What nodes have used, as it was last stored."""
    reclaims: list[float] = Field(default_factory=list)
    """Unix times at which the last nodes that may be on spot hosts were taken away, the oldest
    first."""


class WarmStartRecord(_JournalModel):
    """What is held against warm starts."""

    suspected: Count = 0
    """Number of early deaths of forked workers that were attributed to the fork."""
    early_death: str = ""
    """The manner of the last early death that no fork has caused, until training is steady again;
    empty if there was none."""
    disabled: bool = False
    """Whether the workers of the current round are started cold."""


class ServersRecord(_JournalModel):
    """The nodes of the role ``ps``. An id is never used again: its rows end with its process."""

    nodes: dict[NodeId, str] = Field(default_factory=dict)
    """All servers that are not gone, each with why it leaves; empty if it does not."""
    next: Count = 0
    """Number of the next server."""
    lost: Count = 0
    """Number of servers that were lost lately."""


HOST_FAULTS_KEPT = 32
"""Number of the newest faults of hosts that are kept."""
WRITTEN_LATER = {"events", "max_step", "next_event", "reason"}
"""Fields that change often and whose loss does no harm: they are written with the next change."""


@records.dataclass(slots=True, kw_only=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class DurableState:
    """All that a restarted master must know: the journal.

    Only masters read this document. Its times are numbers: Unix seconds in full precision, or
    monotonic seconds. Events and failures have the same form as in the status, with RFC 3339 times.

    An assignment to a field raises :attr:`generation`, except for the fields in
    ``WRITTEN_LATER``. A change within a field (an element of a list, a field of an element) does
    not: whoever makes it calls :meth:`changed`.
    """

    version: Literal[1] = 1
    job: str
    accepted: str = ""
    """The spec that was in use, as JSON. The next master continues with it if the spec in the
    cluster is unusable by then. Empty if the spec is large."""
    term: Annotated[Term, COUNT]
    next_node: Count = 0
    next_event: Count = 1
    phase: JobPhase = JobPhase.PENDING
    reason: str = ""
    world: RoundMembers | None = None
    round: Annotated[Round, COUNT] = Round(0)
    pending_round: PendingRound | None = None
    """The next round, if one is needed."""
    health: JobHealthRecord = Field(default_factory=JobHealthRecord)
    """Results of the node checks, and faults of hosts."""
    hosts: dict[str, Strikes] = Field(default_factory=dict)
    """Strikes against hosts on which nodes were lost, by host name."""
    succeeded: Annotated[set[NodeId], PlainSerializer(sorted, list[NodeId])] = Field(
        default_factory=set
    )
    """Members whose workers have all exited with code 0 in this round."""
    nodes: dict[NodeId, NodeRecord] = Field(default_factory=dict)
    """All nodes that are not gone."""
    last_incarnations: dict[NodeId, Count] = Field(default_factory=dict)
    """Last incarnation of each node that is gone, where nodes come by themselves. A node that
    returns gets a higher incarnation."""
    least_incarnation: Count = 0
    """Last incarnation to assume for nodes that ``last_incarnations`` does not name."""
    replacement_slots: list[ReplacementSlot] = Field(default_factory=list)
    """Places of lost nodes that are to be filled."""
    abandoned_slots: Count = 0
    """Number of places that are not filled again, because their budget is used up."""
    restarts: dict[str, Count] = Field(default_factory=dict)
    """Number of rounds after the first, by kind."""
    failures: dict[str, Count] = Field(default_factory=dict)
    """Number of failures of workers that were a first cause, and of lost nodes, by class."""
    warm_starts: WarmStartRecord = Field(default_factory=WarmStartRecord)
    """What is held against warm starts."""
    last_exception: WorkerFailure | None = None
    """The last exception that ended a round, until training is steady again."""
    last_failure: Failure | None = None
    out_of_memory: str = ""
    """The last failure or loss because of exhausted memory, until training is steady again."""
    new_nodes: NewNodesRecord = Field(default_factory=NewNodesRecord)
    """What new nodes get, and the last reclaims of nodes on spot hosts."""
    max_step: Count | None = None
    """The highest training step that was reported."""
    resumed: bool = False
    """Whether the round has made a training step; its first step is recorded as an event."""
    checkpoints: CheckpointRecord = Field(default_factory=CheckpointRecord)
    """The newest checkpoint in storage, and those that rounds have skipped."""
    shards: dict[str, QueueRecord] = Field(default_factory=dict)
    """Lease queues of the datasets with dynamic shards, by name."""
    scaling: ScalingRecord = Field(default_factory=ScalingRecord)
    """The size that the job has chosen, and what it was chosen from."""
    servers: ServersRecord = Field(default_factory=ServersRecord)
    """The servers of the parameter server."""
    snapshots: Count = 0
    """Number of the newest snapshot of all ranks."""
    snapshot_request: str = ""
    """The newest ``spec.diagnosis.snapshot`` that was followed."""
    tuning: TuningRecord = Field(default_factory=TuningRecord)
    """Settings of data loaders."""
    lost_s: dict[str, float] = Field(default_factory=dict)
    """Seconds that rounds have cost, by their kind: what the autoscaler weighs."""
    time: TimeAccount = Field(default_factory=TimeAccount)
    """Where the time of the job went. It changes without a write, and goes with the next one."""
    started_at: float = 0.0
    ended_at: float | None = None
    events: list[JobEvent] = Field(default_factory=list)

    generation: int = Field(default=0, init=False, exclude=True, repr=False)
    """Version of the state in this process. It is not written; it grows with each change."""

    if not TYPE_CHECKING:  # a type checker would then allow an assignment to any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in WRITTEN_LATER and getattr(self, name) is not value:
                self.changed()
            object.__setattr__(self, name, value)

    def count_failure(self, failure_class: FailureClass) -> None:
        """Count a failure of this class."""
        self.failures[failure_class] = self.failures.get(failure_class, 0) + 1
        self.changed()

    def note_host_fault(self, host: str, wall: float, kind: HostFaultKind) -> None:
        """Note a fault of a host, for the operator; one on a host without a name is dropped.

        Args:
            host: Name of the host.
            wall: Unix time.
            kind: What has happened.
        """
        if host:
            fault = HostFault(host=host, at=wall, kind=kind)
            self.health.host_faults = [*self.health.host_faults, fault][-HOST_FAULTS_KEPT:]
            self.changed()

    def changed(self) -> None:
        """Note a change: the state is written before the effects of this step are carried out."""
        object.__setattr__(self, "generation", self.generation + 1)

    @staticmethod
    def begin(job: str, term: Term, wall: float) -> "DurableState":
        """Return the state of a job that begins.

        Args:
            job: Its name.
            term: Term of its first master.
            wall: Unix time.
        """
        waits, time = "waiting for nodes", TimeAccount(at=wall)
        return DurableState(job=job, term=term, reason=waits, started_at=wall, time=time)

    def to_json(self) -> str:
        """Return the journal."""
        return JOURNAL.dump_json(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "DurableState":
        """Read a journal.

        Raises:
            ValidationError: It is not a journal of this version.
        """
        return JOURNAL.validate_json(text)

    @property
    def restart_count(self) -> int:
        """Number of rounds that were formed after a failure or a loss."""
        return self.restarts.get("failure", 0) + self.restarts.get("loss", 0)

    def trains(self, node_id: NodeId, incarnation: int) -> bool:
        """Return whether this incarnation of a node is a member of the current round.

        The result is False if the job is pending, suspended or has ended. The round counts as
        current until the next one is formed.

        Args:
            node_id: Id of the node.
            incarnation: Number of its agent process.
        """
        world = self.world
        is_member = world is not None and world.has(node_id, incarnation)
        return is_member and self.phase in (JobPhase.RUNNING, JobPhase.FORMING)

    def has_finished(self, node_id: NodeId) -> bool:
        """Return whether a node has done its part of a round that is not to be repeated.

        That is so if its workers have all exited with code 0 and no next round is pending.
        """
        return node_id in self.succeeded and self.pending_round is None

    @model_validator(mode="after")
    def _check_consistency(self, info: ValidationInfo) -> Self:
        """Refuse a document that no master writes; the core relies on what is checked here.

        Only a state that is read from JSON is checked, and not one that a master makes anew.

        Raises:
            ValueError: A number is too large to count on from, or a check names an unknown node.
                Also if the members are those of another round, or a node is a member twice.
        """
        if info.mode != "json":  # a master makes the state anew
            return self
        largest = max(self.term, self.round, self.health.number, self.next_node, self.next_event)
        largest = max([largest, *(record.incarnation for record in self.nodes.values())])
        largest = max([largest, self.least_incarnation, *self.last_incarnations.values()])
        if largest > LARGEST_READ:
            raise ValueError(f"it has the number {largest}, expected at most {LARGEST_READ}")
        if unknown := self.health.node_records.keys() - self.nodes.keys():
            raise ValueError(f"it has a check of {min(unknown)}, which is none of its nodes")
        world = self.world
        if world is not None and world.round != self.round:
            raise ValueError(f"its members are of round {world.round}, expected {self.round}")
        if world is not None and len(world.rank_of) < len(world.members):
            raise ValueError("its round names a node twice")
        return self

    def accept(self, job: ElasticJob) -> None:
        """Keep the spec that is in use for the next master, unless it is too large.

        A spec whose JSON has more than ``ACCEPTED_BYTES`` bytes is dropped, and the one before
        as well: the next master then knows none.
        """
        text = job.model_dump_json(by_alias=True, exclude_unset=True)
        self.accepted = text if len(text.encode()) <= ACCEPTED_BYTES else ""
        self.changed()

    def read_accepted(self) -> ElasticJob | None:
        """Return the spec that was in use, or None if it is not known or cannot be read."""
        try:
            return ElasticJob.read(json_text.decoded(self.accepted)) if self.accepted else None
        except (ConfigError, ValueError):  # written by another version
            return None


JOURNAL: TypeAdapter[DurableState] = TypeAdapter(DurableState)
"""Reads and writes journals."""


@dataclass(slots=True)
class Step:
    """The result of one step of the core: effects, and the durable state if it has changed."""

    effects: list[Effect] = field(default_factory=list)
    journal: DurableState | None = None
    """The durable state, if it has changed. It must be stored before the effects are carried out,
    and before the next step: it is the state itself, and not a copy."""
    wake_at: float = math.inf
    """Monotonic time of the next step, if no event arrives before."""


@dataclass(frozen=True, slots=True)
class Look:
    """A reason to look at all ranks."""

    kind: EvidenceKind
    """The event to which the bundle belongs."""
    reason: str
    """What was found, in words."""
    facts: tuple[str, ...] = ()
    """What was measured, in words."""
    node: str = ""
    """The node at fault; empty if none is named."""


@dataclass(slots=True)
class TransientState:
    """The part of the state that several components use, and that each master makes anew."""

    spec: ElasticJob
    """The desired state of the job."""
    rules: Rules
    now: float
    """Monotonic time of this step."""
    wall: float
    """Unix time of this step."""
    ahead: float
    """Unix time minus monotonic time, at the start of this master."""
    pace: ReportPace
    nodes: Nodes
    hosts: Hosts
    health: Health
    checkpoints: Checkpoints
    template_hash: str = ""
    step: Step = field(default_factory=Step)
    """The result of this step so far."""
    lost_now: set[NodeId] = field(default_factory=set)
    """Nodes that were lost in this step."""
    last_loss: str = ""
    """The newest loss of a node, in words."""
    end_reason: str = ""
    """Why the job has ended, as a CamelCase word."""
    progress: tuple[int, Progress] | None = None
    """The newest progress in this round, from the reporting member with the lowest rank."""
    outage: tuple[Kind, float] = ("start", 0.0)
    """Reason and begin of the current or last time without training steps."""
    formed_at: float = 0.0
    """Begin of the time over which steady progress is measured."""
    baseline_step: int | None = None
    """The highest training step at ``formed_at``."""
    previous_world: RoundMembers | None = None
    """The previous round if its end was planned; workers may still be in its last step."""
    round_causes: dict[Round, tuple[int, float]] = field(default_factory=dict)
    """Event that caused a round, and the time of its first cause, by round."""
    spec_changed_at: float = -math.inf
    """Monotonic time of the last change of the spec in a job that trains."""
    checking: dict[NodeId, RoundMembers] = field(default_factory=dict)
    """The group in which a node is checked, or was last checked."""
    target: int | None = None
    """The number of nodes that the job has chosen by itself; None if ``replicas`` counts."""
    room: int | None = None
    """Further nodes for which the platform has room; None if it has not said."""
    scaling_reason: tuple[ConditionReason, str] | None = None
    """Why the job has its size; None if it neither scales by itself nor has an allocation."""
    resource_advice: tuple[ConditionReason, str] | None = None
    """Which memory and CPUs are advised, and why; None without advice."""
    servers: dict[NodeId, NodeSeen] = field(default_factory=dict)
    """What the platform has said last of each server."""
    tables: TablesStatus | None = None
    """What the coordinator has said last of the tables; None if this master has not heard it."""
    tables_risk: tuple[ConditionReason, str] | None = None
    """Whether rows are lost or in danger, and why; None before the first time."""
    loader_batch: tuple[int, int] = (-1, 0)
    """Number of a round, and the samples of a step that a data loader has reported in it."""
    speed: MeasuredSpeed | None = None
    """The speed by the number of nodes; None if none was measured."""
    snapshot: int = 0
    """Number of the newest snapshot that this master has requested; 0 if there was none."""
    diagnosis: DiagnosisStatus | None = None
    """The newest snapshot, for the status."""
    hang: str | None = None
    """Why the job stands still; empty if it does not any more, None if it never did."""
    wrong: str | None = None
    """Which values are wrong; empty if none are any more, None if none ever were."""
    log_rule: str | None = None
    """Which log rules apply; empty if none do any more, None if none ever did."""
    log_hang: tuple[str, float, bool] | None = None
    """What a log rule has found whose verdict is a hang, since when, and whether its end is the end
    of the hang; None if none applies."""
    slow: str | None = None
    """Why steps are slow; empty if they are not any more, None if they never were."""
    look: Look | None = None
    """What a detector has found, so that all ranks must be looked at; None once that has begun."""
    checkpoint_policy: str = ""
    """The checkpoint policy for agents, as JSON; empty if there is none."""

    @property
    def steady_wall(self) -> float:
        """Unix time at the start of this master plus the time since then, with sleeps of the
        machine.

        Durations do not change when the system clock is set meanwhile.
        """
        return self.now + self.ahead

    @property
    def desired(self) -> int:
        """The desired number of nodes, without standbys, and no more than are allocated."""
        desired, most = self.target, self.spec.most_nodes
        desired = self.spec.worker.replicas if desired is None else desired
        return desired if most is None else min(desired, most)

    @property
    def size(self) -> Size:
        """The bounds of a round."""
        worker = self.spec.worker
        sizes = () if self.target is None else worker.allowed_sizes
        return Size(self.desired, worker.minimum, worker.node_unit, sizes)

    @property
    def grace_s(self) -> float:
        """Seconds that a node has to end; it must have ended before it is killed."""
        spec = self.spec.worker.template.get("spec")
        allowed = spec.get("terminationGracePeriodSeconds") if isinstance(spec, dict) else None
        if not isinstance(allowed, int):
            allowed = POD_GRACE_S
        return min(self.rules.drain_grace_s, max(0.0, allowed - BEFORE_KILL_S))

    def emit(self, effect: Effect) -> None:
        """Add an effect to the result of this step; the loop carries it out after the step."""
        self.step.effects.append(effect)

    def wake(self, *times: float) -> None:
        """Request the next step for one of these times, at the latest; an event may come first."""
        self.step.wake_at = min(self.step.wake_at, *times, math.inf)

    def end_step(self) -> Step:
        """Return the result of this step, and begin the next one.

        A node that was lost in this step may have got an assignment before; that is removed. The
        next step is requested for the deadline of the first node at the latest.
        """
        out, self.step = self.step, Step()
        if self.lost_now:
            gone, self.lost_now = self.lost_now, set()
            out.effects = [e for e in out.effects if not (isinstance(e, Assign) and e.node in gone)]
        out.wake_at = min(out.wake_at, self.nodes.wake_at)
        return out

    def leave_checks(self, node_id: NodeId) -> None:
        """Drop the checks of a node that leaves or is gone; its running group is checked again."""
        self.checking.pop(node_id, None)
        self.health.forget(node_id)


def pace_of(spec: ElasticJob, rules: Rules) -> ReportPace:
    """Return the pace of reports, by the number of desired nodes.

    A pace by the number of existing nodes would change for all nodes whenever one comes or goes.
    """
    worker = spec.worker
    most = worker.replicas if worker.scaling is None else worker.ceiling
    desired = most + worker.standby_replicas
    return pace(desired, exchange_s=rules.exchange_s, lease_s=rules.lease_s)


def make_transient(
    state: DurableState, spec: ElasticJob, rules: Rules, *, now: float, wall: float
) -> TransientState:
    """Make the transient part of the state of a job that begins, or of one that goes on.

    Each node that reported to an earlier term has a lease to report again. To this are added the
    time that all nodes need to return at the same moment, and ``routed_s``. Workers run on
    meanwhile. In the durable part, the times of a pending round and of replacement slots are set to
    ``now``, and a suspected failure is dropped.

    Args:
        state: The durable part; an earlier master may have left it.
        spec: The desired state.
        rules: Times and limits.
        now: Monotonic time.
        wall: Unix time.
    """
    pace = pace_of(spec, rules)
    ending = (one.reason for one in reversed(state.events) if one.message == state.reason)
    live = TransientState(
        spec=spec,
        rules=rules,
        now=now,
        wall=wall,
        ahead=wall - now,
        pace=pace,
        nodes=Nodes(pace.lease_s, rules.suspect_s, state.nodes, state.changed),
        hosts=Hosts(state.hosts, now=now, wall=wall),
        health=Health(state.health),
        checkpoints=Checkpoints(state.checkpoints),
        template_hash=spec.worker.template_hash,
        end_reason=next(ending, "") if state.phase.ended else "",
        outage=("loss" if state.events else "start", now),
        formed_at=now,
        baseline_step=state.max_step,
    )
    if (scaling := spec.worker.scaling) is not None and scaling.mode == "auto":
        live.target = state.scaling.target
    if (pending := state.pending_round) is not None:
        pending.since, pending.hold_until, pending.suspected = now, None, None
        live.outage = pending.kind, now
    for slot in state.replacement_slots:
        slot.not_before = now
    for node_id, record in state.nodes.items():
        live.nodes.plan(node_id, record)
        if not record.incarnation:
            continue
        live.nodes.recall(
            node_id,
            now,
            member=state.world is not None and state.world.has(node_id, record.incarnation),
            return_s=pace.return_s + rules.routed_s,
            unreached_s=rules.unreached_s if rules.routed_s else 0.0,
            unrouted_s=rules.unrouted_s if rules.routed_s else 0.0,
        )
        live.checkpoints.recall(node_id)
    return live


def desired_nodes(spec: ElasticJob) -> str:
    """Describe the desired number of nodes."""
    worker = spec.worker
    message = f"{counted(worker.replicas, 'node')} (at least {worker.least}"
    if worker.node_unit > 1:
        message += f", in units of {worker.node_unit}"
    message += f", {worker.standby_replicas} on standby)" if worker.standby_replicas else ")"
    return message
