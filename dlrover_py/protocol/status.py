"""What a person, a script or a dashboard may know of a job: :class:`JobStatus`.

The master writes it whole: it serves it at ``/v1/job`` and publishes it through its platform.
Times are Unix seconds (wall clock, for people); durations were measured on a monotonic clock.
"""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from dlrover_py.protocol.agents import Progress, WorkerFailure, WorkerPhase


class _Doc(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )


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
    at: float
    type: Literal["Normal", "Warning"] = "Normal"
    reason: str
    """A fixed CamelCase word."""
    message: str
    node: str | None = None
    round: int | None = None
    cause: int | None = None
    """``id`` of the event that this one follows from."""
    took_s: float | None = None
    """Since the event at the root of the chain of causes."""


class NodeStatus(_Doc):
    """One node."""

    id: str
    phase: NodePhase
    role: NodeRole
    incarnation: int
    node_rank: int | None = None
    nproc: int = 1
    host: str = ""
    agent_pid: int = 0
    pids: list[int] = Field(default_factory=list)
    workers: WorkerPhase = WorkerPhase.IDLE
    step: int | None = None
    restarts: int = 0
    relaunches: int = 0
    message: str = ""


class Failure(_Doc):
    """The last failure that was charged to a node."""

    at: float
    node: str
    round: int
    worker: WorkerFailure


class JobStatus(_Doc):
    """The state of a job at one moment."""

    name: str
    namespace: str = "default"
    generation: int
    """Of the spec that the master has taken in."""
    phase: JobPhase
    reason: str
    """Why it is in this phase, in words."""
    term: int
    round: int
    world_size: int
    nodes_in_round: int
    wanted: int
    """Nodes that the spec wishes, standbys not counted."""
    minimum: int
    ready: int
    standby: int
    progress: Progress | None = None
    restarts: dict[str, int] = Field(default_factory=dict)
    """New rounds by cause: failure, loss, drain, scale, join."""
    last_failure: Failure | None = None
    conditions: list[Condition] = Field(default_factory=list)
    nodes: list[NodeStatus] = Field(default_factory=list)
    events: list[JobEvent] = Field(default_factory=list)
    """The newest ones, oldest first."""
    started_at: float
    ended_at: float | None = None
    published_at: float = 0.0
