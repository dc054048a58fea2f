"""What the core takes in, what it asks for, and what it must not forget.

Events are facts; effects are wishes, each idempotent, since a crash between storing a decision and
carrying it out repeats them. :class:`Journal` is all that outlives the master.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from dlrover_py.master.core.health import Mark
from dlrover_py.master.core.hosts import Strikes
from dlrover_py.master.core.rendezvous import World
from dlrover_py.protocol.agents import (
    COUNT,
    AgentReport,
    Assignment,
    Candidates,
    Count,
    Stored,
    WorkerFailure,
)
from dlrover_py.protocol.checkpoint import Age
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import Incarnation, NodeId, Round, Term
from dlrover_py.protocol.status import Failure, JobEvent, JobPhase

Kind = Literal["start", "failure", "loss", "drain", "scale", "join"]
"""Why a next round is needed."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Times and limits that the decisions go by, in seconds."""

    lease_s: float = 5.0
    suspect_s: float = 1.0
    replacement_wait_s: float = 10.0
    cause_wait_s: float = 0.25
    """A connection that broke between two workers is nobody's fault until this has passed: the
    real cause is nearly always known within milliseconds."""
    forgive_after_s: float = 300.0
    stop_grace_s: float = 1.0
    drain_grace_s: float = 30.0
    check_s: float = 300.0
    """A step of checks has failed where it takes longer, imports included."""
    memory_wait_s: float = 10.0
    """What could be restored is told after so long, whoever has not said yet what it holds."""
    persist_s: float = 6 * 3600.0
    """A checkpoint that is not in storage by then has failed."""
    settle_s: float = 0.0
    """A smaller wish is obeyed once it has stood so long: who takes it back at once (a user beside
    an autoscaler, say) loses no step."""
    exchange_s: float = 2.0
    join_timeout_s: float = math.inf
    """With fewer nodes than the minimum for so long, the job has failed."""
    last_call_s: float = 0.0
    """Where nodes come by themselves: the first round waits so long for more than the minimum."""
    can_create: bool = True
    """Whether the platform creates nodes; if not, they come by themselves."""
    routed_s: float = 0.0
    """A new master waits so much longer than a lease for its predecessor's nodes."""
    unreached_s: float = 60.0
    """And so long as none of them has reported to it, where they have to be routed to it anew:
    without the API server nobody tells their hosts where it is."""
    unrouted_s: float = 300.0
    """And so long for those whose hosts the platform hears of: they train on, and what tells hosts
    where a Service is (kube-controller-manager, kube-proxy) may be behind by minutes."""


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """An agent's report arrived."""

    node: NodeId
    report: AgentReport


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of a report closed before its answer was sent."""

    node: NodeId
    boot_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class JobChanged:
    """The user's wish, as it stands now."""

    job: ElasticJob


@dataclass(frozen=True, slots=True)
class JobStopped:
    """The job is ended from outside: by its user, if there is no other reason."""

    why: str = ""
    reason: str = "MasterEnded"
    """A fixed CamelCase word for why."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """The master itself stood still for so long (paused, or its disk was): leases wait as well."""

    seconds: float


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The platform sees this node, in this state."""

    node: NodeId
    near: bool
    """Its process runs or is about to; false while there is no place for it."""
    topology: tuple[str, ...] = ()
    message: str = ""
    leaving: str = ""
    runs: bool = True
    """If it is near: whether its process runs by now."""
    grace_s: float = math.inf
    """If it is leaving: how long it has."""
    there: bool = True
    """False: the platform only says why it could not create it yet."""
    cut_off: bool = False
    """It runs, as far as was heard of its host, and the platform does not hear of that any more."""
    made_of: str = ""
    """Hash of the template that it is of; empty where that is not known."""


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """The platform says that the node is gone."""

    node: NodeId
    why: str
    exit_code: int | None = None
    """Of its agent; None if that has not ended, or was not what ended the node."""
    free: bool = False
    """Not to be charged: drained, preempted, deleted on purpose, refused by its host."""
    output: str = ""
    """Its last words, if it never spoke."""
    refused_by: str = ""
    """The host that would not have it: no new node is wished there for a while."""
    out_of_memory: str = ""
    """That the kernel ended it for want of memory, in words; empty if it did not."""


@dataclass(frozen=True, slots=True)
class NodesListed:
    """The platform has told all nodes that exist; what is not among them is gone."""

    nodes: frozenset[NodeId]
    free: bool = False
    """Who is gone was taken away on purpose, as far as can be known."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A node of a round wants to know what could be restored from memory."""

    number: int
    """Of the question; :class:`Answer` has it."""
    round: int


Event = (
    Asked
    | Reported
    | Disconnected
    | JobChanged
    | JobStopped
    | Stalled
    | NodeSeen
    | NodeEnded
    | NodesListed
)


# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """Let the node's agent know."""

    node: NodeId
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell this process of the node that it was superseded."""

    node: NodeId
    boot_id: str
    message: str


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Ask the platform for a node; idempotent by id."""

    node: NodeId
    avoid: tuple[str, ...] = ()
    """Hosts that it is not wished on."""


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Have the platform end a node; idempotent by id."""

    node: NodeId
    grace_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Let who has asked know."""

    number: int
    candidates: Candidates


Effect = Assign | Refuse | CreateNode | DeleteNode | Answer


# --- state --------------------------------------------------------------------------------------


class _Kept(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Opening(_Kept):
    """Why a next round is needed."""

    kind: Kind
    reason: str
    cause: Count
    since: float
    """Monotonic; rebased when a journal is read."""
    hold_until: float | None = None
    """The real cause may still turn up until then."""
    suspected: tuple[NodeId, WorkerFailure] | None = None
    cold: bool = False
    """Warm starts are in doubt: the next round is started cold."""
    broken: bool = False
    """A fault has come on top: the workers cannot end in good order any more."""


class NodeRecord(_Kept):
    """What is journaled of a node."""

    id: NodeId
    incarnation: Annotated[Incarnation, COUNT]
    boot_id: str
    leaving: str = ""
    restarts: Count
    relaunches: Count
    avoid: tuple[str, ...] = ()
    made_of: str = ""
    restart: str = ""


class Vacancy(_Kept):
    """The place of a lost node, to be filled."""

    relaunches: Count
    not_before: float
    unheard: Count = 0
    """Nodes in a row that were gone before they spoke."""


LARGEST_READ = 2**52
"""In a journal, of what the next master counts on from."""


class Journal(_Kept):
    """All that a restarted master must know; the rest is reported again."""

    version: Literal[1] = 1
    job: str
    accepted: str = ""
    """The spec that is followed, as JSON: the next master goes on with it if that of the cluster
    cannot be used by then. Empty where it is large."""
    term: Annotated[Term, COUNT]
    next_node: Count = 0
    next_event: Count = 1
    phase: JobPhase = JobPhase.PENDING
    reason: str = ""
    world: World | None = None
    round: Annotated[Round, COUNT] = Round(0)
    opening: Opening | None = None
    checks: Count = 0
    """Number of the newest step of checks."""
    marks: dict[NodeId, Mark] = Field(default_factory=dict)
    hosts: dict[str, Strikes] = Field(default_factory=dict)
    succeeded: list[NodeId] = Field(default_factory=list)
    nodes: list[NodeRecord] = Field(default_factory=list)
    lived: dict[NodeId, Count] = Field(default_factory=dict)
    """Last incarnation of each node that is gone, where nodes come by themselves: one that comes
    back is another one."""
    lived_least: Count = 0
    """The same for all nodes that are not named there."""
    vacancies: list[Count] = Field(default_factory=list)
    exhausted: Count = 0
    restart_count: Count = 0
    restarts: dict[str, Count] = Field(default_factory=dict)
    doubts: Count = 0
    cold: bool = False
    last_exception: WorkerFailure | None = None
    last_failure: Failure | None = None
    out_of_memory: str = ""
    """The last failure or loss for want of memory, until training is steady again."""
    max_step: Count | None = None
    resumed: bool = True
    """The round has made a step; one that has not is to be told of once it has."""
    stored: Stored | None = None
    """The newest checkpoint in storage."""
    passed: list[tuple[int, Age]] = Field(default_factory=list)
    """By round, what it has gone on from: what is newer, and came before it, is never stored."""
    lost_s: dict[str, float] = Field(default_factory=dict)
    suspended_s: float = 0.0
    suspended_at: float | None = None
    started_at: float = 0.0
    ended_at: float | None = None
    events: list[JobEvent] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        """Refuse a document that no master writes: the core relies on what is checked here.

        Raises:
            ValueError: two parts contradict each other, or a number is too large to count on.
        """
        if info.mode != "json":  # it is being written, not read
            return self
        largest = max(self.term, self.round, self.checks, self.next_node, self.next_event)
        largest = max([largest, *(node.incarnation for node in self.nodes)])
        largest = max([largest, self.lived_least, *self.lived.values()])
        if largest > LARGEST_READ:
            raise ValueError(f"it has the number {largest}, expected at most {LARGEST_READ}")
        ids = [node.id for node in self.nodes]
        if len(set(ids)) < len(ids):
            raise ValueError("it names a node twice")
        if unknown := self.marks.keys() - set(ids):
            raise ValueError(f"it has a check of {min(unknown)}, which is none of its nodes")
        world = self.world
        if world is not None and world.round != self.round:
            raise ValueError(f"its members are of round {world.round}, expected {self.round}")
        return self

    def read_accepted(self) -> ElasticJob | None:
        """The spec that was followed; None where it is not known."""
        try:
            return ElasticJob.read(json.loads(self.accepted)) if self.accepted else None
        except ConfigError:  # of another version
            return None


@dataclass(slots=True)
class Step:
    """What a step asks for."""

    effects: list[Effect] = field(default_factory=list)
    journal: Journal | None = None
    """To be stored before the effects are carried out."""
    wake_at: float = math.inf
