"""Input and output of the master's core: events, effects, and the rules of decisions.

Events are facts. Effects are requests to the loop, which runs the core. Each effect is idempotent:
after a crash between the write of a decision and its effects, the effects are repeated.
"""

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from dlrover_py.protocol.agents import AgentReport, Assignment, RestoreCandidates
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.shards import ShardAnswer, ShardRequest
from dlrover_py.protocol.status import EvidenceManifest, TablesStatus
from dlrover_py.protocol.timing import Timing

Kind = Literal["start", "failure", "loss", "drain", "scale", "join"]
"""Why a next round is needed."""


class Rules(Timing):
    """Times and limits for the decisions of the core; all durations are in seconds."""

    can_create: bool = True
    """Whether the platform creates nodes; if not, nodes come by themselves."""
    avoids_hosts: bool = True
    """Whether the platform can keep a new node off given hosts."""
    limits_memory: bool = True
    """Whether the platform gives a new node the memory limit that it is asked for."""
    routed_s: float = Field(default=0.0, ge=0)
    """Time beyond its lease that a node of the previous master has to report to a new master."""


# --- Events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """The arrival of an agent's report."""

    node: NodeId
    report: AgentReport


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The end of a report's connection before its answer was sent."""

    node: NodeId
    boot_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class JobChanged:
    """The current desired state of the job, as the user wrote it."""

    job: ElasticJob


@dataclass(frozen=True, slots=True)
class JobStopped:
    """A request from outside to end the job."""

    why: str = ""
    """The cause in words; empty if the user ended the job."""
    reason: EventReason = EventReason.MASTER_ENDED
    """Reason of the event that ends the job."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """A standstill of the master itself, because it was paused or its disk did not answer.

    The leases of nodes are extended by it.
    """

    seconds: float
    """Duration of the standstill."""


@dataclass(frozen=True, slots=True)
class Slept:
    """The end of a sleep of the machine, such as of a laptop whose lid was closed.

    The monotonic clock has stood still meanwhile, and nothing was late.
    """

    seconds: float
    """Duration of the sleep."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The state of a node that exists, as the platform sees it."""

    node: NodeId
    near: bool
    """Whether its process runs or will run soon; false while the platform has no place for it."""
    topology: tuple[str, ...] = ()
    message: str = ""
    """The platform's words on its state."""
    leaving: str = ""
    """Why the node has to end; empty if it does not."""
    runs: bool = True
    """Whether its process runs already; meaningful only if the node is near."""
    grace_s: float = math.inf
    """Seconds between the request to end the node and the kill, if it is leaving."""
    exists: bool = True
    """False if the node does not exist yet, and the platform reports only why."""
    cut_off: bool = False
    """Whether the platform has lost contact with the node's host; the node ran at last contact."""
    template_hash: str = ""
    """Hash of the template that the node was created from; empty if that is not known."""


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """The end of a node, as the platform reports it."""

    node: NodeId
    why: str
    exit_code: int | None = None
    """Exit code of the agent; None if it has not ended, or if something else ended the node."""
    free: bool = False
    """Whether its end is not counted against a budget: the node was drained, preempted, deleted on
    purpose, or refused by its host."""
    by_platform: bool = False
    """Whether the platform says that it ended the node, such as by an eviction."""
    output: str = ""
    """Last lines of its output, if it never reported."""
    unordered_stop: str = "but nothing in this job requested that"
    """What the platform says of a SIGTERM that it did not order, as the end of a sentence."""
    refused_by: str = ""
    """Host that refused the node; new nodes avoid this host for a while."""
    out_of_memory: str = ""
    """Description of an out-of-memory kill by the kernel; empty if there was none."""


@dataclass(frozen=True, slots=True)
class NodesListed:
    """A complete list of the nodes on the platform; a node that is not in it is gone."""

    nodes: frozenset[NodeId]
    free: bool = False
    """Whether the missing nodes were removed on purpose, as far as can be known."""


@dataclass(frozen=True, slots=True)
class RoomSeen:
    """The number of further nodes for which the platform has room."""

    nodes: int


@dataclass(frozen=True, slots=True)
class TablesReported:
    """What the coordinator of the parameter server knows of its tables and their servers."""

    tables: TablesStatus


@dataclass(frozen=True, slots=True)
class RestoreAsked:
    """A node's question which checkpoints could be restored from memory."""

    number: int
    """Number of the question; :class:`RestoreAnswer` repeats it."""
    round: int
    """Round of the node that asks."""


@dataclass(frozen=True, slots=True)
class ShardsAsked:
    """A worker's request about the shards of a dataset."""

    number: int
    """Number of the question; :class:`ShardsAnswer` repeats it."""
    node: NodeId
    boot_id: str
    """The agent process of the worker."""
    request: ShardRequest


@dataclass(frozen=True, slots=True)
class SnapshotArrived:
    """The arrival of a node's part of a snapshot of all ranks."""

    node: NodeId
    snapshot: NodeSnapshot


@dataclass(frozen=True, slots=True)
class EvidenceKept:
    """The end of a :class:`KeepEvidence`: where the bundle is."""

    number: int
    """Number of the snapshot."""
    folder: str
    """Folder of the bundle; empty if it could not be kept."""


Event = (
    RestoreAsked
    | SnapshotArrived
    | EvidenceKept
    | ShardsAsked
    | Reported
    | Disconnected
    | JobChanged
    | JobStopped
    | Stalled
    | Slept
    | NodeSeen
    | NodeEnded
    | NodesListed
    | RoomSeen
    | TablesReported
)


# --- Effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """Send an assignment to the node's agent."""

    node: NodeId
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer this agent process that its reports are refused."""

    node: NodeId
    boot_id: str
    message: str


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Create a node on the platform; idempotent by id."""

    node: NodeId
    avoid: tuple[str, ...] = ()
    """Hosts that the node must not be placed on."""
    memory: int = 0
    """Memory limit in bytes; 0 for that of the template."""
    stable: bool = False
    """Whether the node must not be placed on a spot host."""
    cpu: int = 0
    """CPU request in thousandths of a CPU; 0 for that of the template."""


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """End a node on the platform; idempotent by id."""

    node: NodeId
    grace_s: float
    why: str


@dataclass(frozen=True, slots=True)
class RestoreAnswer:
    """Answer a :class:`RestoreAsked` with what can be restored."""

    number: int
    """Number of the question."""
    candidates: RestoreCandidates


@dataclass(frozen=True, slots=True)
class ShardsAnswer:
    """Answer a :class:`ShardsAsked`."""

    number: int
    """Number of the question."""
    answer: ShardAnswer | None
    """The answer; None if the worker must ask again."""


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Keep the evidence of a snapshot as a bundle; its loss costs no decision."""

    manifest: EvidenceManifest
    nodes: tuple[tuple[NodeId, NodeSnapshot], ...]
    bucket: str = ""
    """Address below which a copy is kept; empty for none."""


@dataclass(frozen=True, slots=True)
class ServersPresent:
    """Tell the coordinator of the parameter server which servers exist: all others have ended."""

    nodes: frozenset[NodeId]
    desired: int
    """The desired number of servers, without standbys."""
    least: int = 1
    """The number of servers with which rows are placed first."""
    standbys: int = 0
    """The desired number of servers without rows."""
    ended: bool = False
    """Whether the job has ended, or was deleted: nobody needs rows any more."""
    rebalance: str = ""
    """The newest request of a user to even the servers; empty if there was none."""


Effect = (
    Assign
    | Refuse
    | CreateNode
    | DeleteNode
    | RestoreAnswer
    | ShardsAnswer
    | KeepEvidence
    | ServersPresent
)
