"""What a person, a script or a dashboard may know of a job: :class:`JobStatus`.

The master writes it whole: it serves it at ``/v1/job`` and publishes it through its platform.
Times are Unix seconds (wall clock, for people); durations were measured on a monotonic clock.

On Kubernetes it stands, cut to size, in ``status.training`` of the object (:class:`Training`);
the rest of :class:`ElasticJobStatus` is Kubernetes' own way of telling the same, and has two
writers: ``phase``, ``observedGeneration``, the times and some conditions are the operator's.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from dlrover_py.protocol.agents import Progress, WorkerFailure, WorkerPhase


class _Doc(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )


_D = TypeVar("_D", bound=_Doc)


class JobPhase(StrEnum):
    """Where the job as a whole stands."""

    PENDING = "Pending"  # no round has been formed yet
    RUNNING = "Running"  # a round runs
    FORMING = "Forming"  # the next round waits for nodes
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"  # its user has ended it

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED)


class NodePhase(StrEnum):
    """Life of a node, in this order."""

    PENDING = "pending"  # wished, but the platform has no place for it yet
    STARTING = "starting"  # its process runs, its agent has not spoken
    LIVE = "live"
    SUSPECT = "suspect"  # its connection closed; it may come back at once
    GONE = "gone"


class NodeRole(StrEnum):
    """What a node does in the current round."""

    MEMBER = "member"
    STANDBY = "standby"
    NONE = "none"


class Condition(_Doc):
    """One aspect of the job, as Kubernetes shows it."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_time: float


class JobEvent(_Doc):
    """Something that happened or was decided, and why."""

    id: int
    """Number of the event in its job; it grows."""
    at: float
    """Unix seconds."""
    type: Literal["Normal", "Warning"] = "Normal"
    """``Normal`` or ``Warning``."""
    reason: str
    """A fixed CamelCase word."""
    message: str
    """What happened, in words."""
    node: str | None = None
    """The node that it is about."""
    round: int | None = None
    """The round that it is about."""
    cause: int | None = None
    """``id`` of the event that this one follows from."""
    took_s: float | None = None
    """Since the event at the root of the chain of causes."""


class NodeStatus(_Doc):
    """One node."""

    id: str
    """Name of the node, such as ``n7``; its Pod is named after it."""
    phase: NodePhase
    """Where its life stands: pending, starting, live, suspect, leaving or gone."""
    role: NodeRole
    """``member`` of the round, ``standby`` or ``none``."""
    incarnation: int
    """Lives of this node's agent."""
    node_rank: int | None = None
    """Rank of the node in the round."""
    nproc: int = 1
    """Number of its workers."""
    host: str = ""
    """The host that it runs on."""
    agent_pid: int = 0
    """Process id of its agent, on its host."""
    pids: list[int] = Field(default_factory=list)
    """Process ids of its workers."""
    workers: WorkerPhase = WorkerPhase.IDLE
    """What its workers do."""
    warm: bool = False
    """Its next workers have their imports before they start (docs/warm-start.md)."""
    step: int | None = None
    """Newest step that one of its workers has reported."""
    restarts: int = 0
    """Failures of its workers that count against ``restartCount``."""
    relaunches: int = 0
    """Replacements of its place that count against ``restartCount``."""
    message: str = ""
    """What is wrong with it, in words; empty if nothing is."""


class Failure(_Doc):
    """The last failure that was charged to a node."""

    at: float
    """Unix seconds."""
    node: str
    """The node that was charged."""
    round: int
    """The round that ended by it."""
    worker: WorkerFailure
    """The worker that failed."""


class LastCheckpoint(_Doc):
    """What a job that begins anew would go on from."""

    step: int
    """Its step."""
    where: Literal["memory", "storage"]
    """``memory`` of the nodes, or ``storage``."""
    at: float
    """When it was committed, or was seen to be whole in memory."""
    age_s: float = 0.0
    """At ``published_at``."""
    stored_step: int | None = None
    """The newest one in storage."""
    stored_at: float | None = None
    """When that was committed, in Unix seconds."""
    folder: str = ""
    """Of that."""


class JobStatus(_Doc):
    """The state of a job at one moment."""

    name: str
    """Name of the job."""
    namespace: str = "default"
    """Namespace of the job."""
    generation: int
    """Of the spec that the master has taken in."""
    phase: JobPhase
    """Where the job stands, by its master."""
    reason: str
    """Why it is in this phase, in words."""
    term: int
    """Number of the master's term; each new master takes the next one."""
    round: int
    """Number of the newest round; 0 if there was none."""
    world_size: int
    """Workers in the round."""
    nodes_in_round: int
    """Nodes in the round; once the job has ended: in its last round."""
    wanted: int
    """Nodes that the spec wishes, standbys not counted."""
    minimum: int
    """Fewest nodes that a round may have."""
    ready: int
    """Nodes that can train, standbys too."""
    standby: int
    """Nodes that wait to take a lost one's place."""
    updated: int | None = None
    """Nodes that were made of the present template, standbys too; None if that is not known."""
    progress: Progress | None = None
    """How far the script is, as it reports by ``report_step``."""
    restarts: dict[str, int] = Field(default_factory=dict)
    """New rounds by cause: failure, loss, drain, scale, join."""
    goodput: float | None = None
    """Part of the time since the job's start, suspensions left out, that brought new steps; None
    until a step was reported."""
    lost_s: dict[str, float] = Field(default_factory=dict)
    """The other part, in seconds: by what cost it (start, and as ``restarts``)."""
    last_failure: Failure | None = None
    """The newest failure that was charged to a node."""
    last_checkpoint: LastCheckpoint | None = None
    """None as long as no node has told of one."""
    checkpoints_stored: int = 0
    """By this master's orders."""
    checkpoint_failures: int = 0
    """Checkpoints that could not be stored."""
    conditions: list[Condition] = Field(default_factory=list)
    nodes: list[NodeStatus] = Field(default_factory=list)
    """The job's nodes."""
    events: list[JobEvent] = Field(default_factory=list)
    """The newest ones, oldest first."""
    started_at: float
    """Unix seconds."""
    ended_at: float | None = None
    """Unix seconds; absent while the job goes on."""
    published_at: float = 0.0
    """Unix seconds at which this status was made."""


# --- on Kubernetes ---


def rfc3339(at: float) -> str:
    """Unix seconds as Kubernetes writes them, whole seconds only."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unix_seconds(text: object) -> float | None:
    """The same, read; None for what is no such time."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


PROGRESS_S = 10.0
"""On Kubernetes, seconds between two writes of a status in which only the progress is new."""
TRAINING_NODES = 64
TRAINING_EVENTS = 30
TRAINING_BYTES = 50_000
"""The object is read whole by everyone who lists jobs, and etcd keeps each version."""


class Summary(_Doc):
    """The columns of ``kubectl get elasticjobs``, which can show a text but cannot make one."""

    ready: str
    """Nodes in the round of those that are wished: ``7/8``; none once the job has ended."""
    progress: str = ""
    """``40% (200/500)``, or the step where the script did not say how many there are."""
    restarts: int = 0
    """Rounds that followed from a failure or a loss."""
    goodput: str = ""
    """Part of the time that brought new steps, such as ``97.5%``."""


class Training(JobStatus):
    """``status.training``: a :class:`JobStatus` of at most 50 kB, and its summary."""

    summary: Summary
    left_out: int = 0
    """Nodes that are not shown: those that are not in order come first, those gone last."""

    @classmethod
    def of(cls, status: JobStatus) -> Self:
        """Cut a status to size; its conditions stand beside it, as Kubernetes has them."""
        fields = {name: getattr(status, name) for name in JobStatus.model_fields}
        fields |= {"conditions": [], "nodes": [], "events": []}
        bare = cls(**fields, summary=summarize(status), left_out=len(status.nodes))
        left = TRAINING_BYTES - _size(bare)
        events = _fitting(status.events[: -TRAINING_EVENTS - 1 : -1], left // 2)
        left -= sum(map(_size, events))
        nodes = _fitting(sorted(status.nodes, key=_dullness)[:TRAINING_NODES], left)
        update = {"nodes": nodes, "events": events[::-1]}
        return bare.model_copy(update=update | {"left_out": len(status.nodes) - len(nodes)})


def _fitting(items: list[_D], budget: int) -> list[_D]:
    """The first of them that have room."""
    found: list[_D] = []
    for item in items:
        budget -= _size(item)
        if budget < 0:
            break
        found.append(item)
    return found


def _size(doc: _Doc) -> int:
    return len(doc.model_dump_json(by_alias=True).encode()) + 1


def _dullness(node: NodeStatus) -> int:
    if node.phase is NodePhase.GONE:
        return 2
    return int(node.phase is NodePhase.LIVE and not node.message and not node.restarts)


def summarize(status: JobStatus) -> Summary:
    """The columns of a job."""
    done, progress = status.progress, ""
    if done is not None:
        progress = str(done.step)
        if done.total:
            progress = f"{100 * done.step // done.total}% ({done.step}/{done.total})"
    ready = 0 if status.phase.ended else status.nodes_in_round
    return Summary(
        ready=f"{ready}/{status.wanted}",
        progress=progress,
        restarts=sum(status.restarts.get(cause, 0) for cause in ("failure", "loss")),
        goodput="" if status.goodput is None else f"{100 * status.goodput:.1f}%",
    )


class ObjectCondition(_Doc):
    """A condition as Kubernetes has it; one for each type, and each type has one writer."""

    type: Annotated[str, Field(max_length=316)]
    """What it is about; docs/operations.md lists all."""
    status: Annotated[str, Field(max_length=16)]
    """``True``, ``False`` or ``Unknown``."""
    reason: Annotated[str, Field(max_length=1024)] = ""
    """One word for why it is so."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Why it is so, in words."""
    last_transition_time: str = ""
    """RFC 3339."""
    observed_generation: int | None = None
    """Generation of the spec that it speaks of."""


class ElasticJobStatus(_Doc):
    """``status`` of an ElasticJob."""

    phase: str = ""
    """``Created``, then the words of :class:`JobPhase`. Written by the operator."""
    reason: str = ""
    """One word for what keeps the job from running as it should, or for why it has failed; the
    condition of that name has the message. Empty if all is well. Written by the operator."""
    observed_generation: int | None = None
    """Of the spec that the operator has taken in."""
    start_time: str | None = None
    """RFC 3339: creation of the job's master; the last resume starts anew."""
    pending_since: str | None = None
    """RFC 3339: when the operator first saw that fewer nodes than the minimum run."""
    completion_time: str | None = None
    """RFC 3339: when the operator first saw that the job is over; ``training.endedAt`` is exact."""
    conditions: list[ObjectCondition] = Field(default_factory=list, max_length=64)
    """What holds of the job; docs/operations.md explains each."""
    replicas: int | None = None
    """Nodes that are there, standbys not counted. Written by the master, as what follows."""
    selector: str | None = None
    """Of the worker Pods, for ``/scale``."""
    training: Training | None = None
