"""The state of a job for people, scripts and dashboards: :class:`JobStatus`.

The master writes the complete document. It serves the document at ``/v1/job`` and publishes it
through its platform. Times are of the wall clock, for people: :data:`WallTime`. Durations were
measured by a monotonic clock.

On Kubernetes it is in ``status.training`` of the object, cut to size (:class:`Training`). The other
fields of :class:`ElasticJobStatus` say the same in the form of Kubernetes. They have two writers:
``phase``, ``observedGeneration``, the times and some conditions belong to the operator.
"""

import math
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
)
from pydantic.alias_generators import to_camel

from dlrover_py.protocol.agents import Count, Progress, Words, WorkerFailure, WorkerPhase
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.diagnosis import EvidenceKind, HangVerdict
from dlrover_py.protocol.hosts import BadHosts, HostFaultKind
from dlrover_py.protocol.words import byte_size


class _StatusModel(BaseModel):
    """Base of the parts of a status: immutable, with fields in camelCase; unknown fields are
    ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )


_D = TypeVar("_D", bound=_StatusModel)
NEARLY_FULL = 0.8
"""Share of ``/dev/shm`` in use from which on it is shown."""


# --- Times ---

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_END_MS: Final = (datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)
"""The last time that is accepted, in milliseconds since 1970: one day before Python's calendar
ends, so that every local time exists, too."""


def rfc3339(at: float) -> str:
    """Return Unix seconds as Kubernetes writes them, cut to whole seconds."""
    return _text(at, "seconds")


def date_time(at: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC, to the millisecond: ``2026-11-26T01:02:03.123Z``."""
    return _text(at, "milliseconds")


def unix_seconds(value: object) -> float | None:
    """Return Unix seconds, to the millisecond, of a time in RFC 3339 or in Unix seconds.

    Returns:
        The time; None for a value that is neither, or that has no time zone; 0 for a time before
        1970, or on the last day of the year 9999 and later.
    """
    if isinstance(value, (int, float)):
        return _ms(value) / 1000
    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return None
    return None if at.tzinfo is None else _ms((at - _EPOCH).total_seconds()) / 1000


def _text(at: float, precision: Literal["seconds", "milliseconds"]) -> str:
    """Return Unix seconds as RFC 3339 in UTC."""
    moment = _EPOCH + timedelta(milliseconds=_ms(at))
    return moment.replace(tzinfo=None).isoformat(timespec=precision) + "Z"


def _ms(at: float) -> int:
    """Return milliseconds since 1970; 0 for a time before 1970 or beyond the calendar.

    A clock that is wrong must not end a program.
    """
    ms = round(at * 1000) if abs(at) < _END_MS else 0
    return ms if 0 <= ms < _END_MS else 0


def _wall_time(value: object) -> float:
    """Return the Unix seconds of a time that was read; raise ValueError if it is no time."""
    at = unix_seconds(value)
    if at is None:
        raise ValueError("expected a time as RFC 3339, such as 2026-11-26T01:02:03.123Z")
    return at


WallTime = Annotated[
    float,
    BeforeValidator(_wall_time),
    PlainSerializer(date_time, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""A time of the wall clock: Unix seconds in a program, RFC 3339 in JSON. It has whole milliseconds,
so that it is equal after it was written and read. A number is read from JSON as well."""


class JobPhase(StrEnum):
    """The phase of the job as a whole."""

    PENDING = "Pending"  # no round has been formed yet
    RUNNING = "Running"  # a round runs
    FORMING = "Forming"  # the next round waits for nodes
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"  # its user has ended it

    @property
    def ended(self) -> bool:
        """True if the phase cannot change any more."""
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED)


class NodePhase(StrEnum):
    """The phases of a node, in this order."""

    PENDING = "pending"  # desired, but the platform has no place for it yet
    STARTING = "starting"  # its process runs, its agent has not reported yet
    LIVE = "live"
    SUSPECT = "suspect"  # its connection closed; it may come back immediately
    GONE = "gone"


class NodeRole(StrEnum):
    """The role of a node in the current round."""

    MEMBER = "member"
    STANDBY = "standby"
    NONE = "none"


class Condition(_StatusModel):
    """One aspect of the job, in the form of a Kubernetes condition."""

    type: str
    """Type of the condition; docs/operations.md lists all types."""
    status: Literal["True", "False", "Unknown"]
    """``True``, ``False`` or ``Unknown``."""
    reason: str
    """One CamelCase word for the reason."""
    message: str
    """The reason in words."""
    last_transition_time: WallTime
    """When ``status`` last changed."""


class JobEvent(_StatusModel):
    """An event or a decision, and its cause."""

    id: int
    """Number of the event in its job; it grows."""
    at: WallTime
    """When the event happened."""
    type: Literal["Normal", "Warning"] = "Normal"
    """``Normal`` or ``Warning``."""
    reason: str
    """A fixed CamelCase word."""
    message: str
    """What happened, in words."""
    node: str | None = None
    """The node that the event is about."""
    round: int | None = None
    """The round that the event is about."""
    cause: int | None = None
    """``id`` of the event that caused this one."""
    took_s: float | None = None
    """Seconds since the first event in the chain of causes."""


class NodeStatus(_StatusModel):
    """The state of one node."""

    id: str
    """Name of the node, such as ``n7``; its Pod is named after it."""
    phase: NodePhase
    """Phase of the node: pending, starting, live, suspect or gone."""
    role: NodeRole
    """Role of the node: ``member`` of the round, ``standby`` or ``none``."""
    incarnation: int
    """Incarnation of the node: it grows each time that its agent starts."""
    node_rank: int | None = None
    """Rank of the node in the round."""
    nproc: int = 1
    """Number of its workers."""
    host: str = ""
    """The host that it runs on."""
    domain: str = ""
    """Its topology domain, such as ``zone-a/rack-3``; empty if none is known."""
    agent_pid: int = 0
    """Process id of its agent on its host."""
    pids: list[int] = Field(default_factory=list)
    """Process ids of its workers."""
    workers: WorkerPhase = WorkerPhase.IDLE
    """State of its workers, taken together."""
    warm: bool = False
    """True if its next workers start with their modules already imported (docs/warm-start.md)."""
    step: int | None = None
    """Newest step that one of its workers has reported."""
    steps_per_s: float = 0.0
    """Steps per second of its workers; 0 before the second report."""
    data_wait: float = 0.0
    """Share of the time of the round's steps in which a worker waited for data: the greatest of
    them, from 0 to 1."""
    memory_step: int | None = None
    """Step of the newest checkpoint of its workers that is in its memory."""
    copy_step: int | None = None
    """Step of the newest checkpoint in its copy of a peer's memory."""
    memory_bytes: int = 0
    """Memory that its processes use, in bytes."""
    memory_limit: int = 0
    """The memory limit of its container in bytes; 0 if what it uses is not known."""
    shm: float = 0.0
    """Share of its ``/dev/shm`` that is in use, from 0 to 1."""
    resent: float = 0.0
    """Share of its TCP segments that were sent again."""
    network_errors: float = 0.0
    """Packets a second that its network interfaces have lost or found damaged."""
    cores: float = 0.0
    """Number of CPUs that its processes use."""
    gpus: int = 0
    """Number of its GPUs that say how far they are used."""
    gpu_busy: float = 0.0
    """Share of the last minute in which these GPUs ran a kernel, from 0 to 1: their average."""
    gpu_least_busy: float = 0.0
    """Share of the last minute in which the least used of these GPUs ran a kernel, from 0 to 1."""
    gpu_memory_bytes: int = 0
    """Memory of its GPUs that is in use, in bytes."""
    gpu_memory_limit: int = 0
    """Memory of its GPUs in bytes; 0 if that is not known."""
    restarts: int = 0
    """Failures of its workers that count against ``restartCount``."""
    relaunches: int = 0
    """Replacements of the node that count against ``restartCount``."""
    message: str = ""
    """What is wrong with the node, in words; empty if nothing is."""

    @property
    def memory_words(self) -> str:
        """The memory that it uses, of its limit, such as ``3.1 GB of 8.6 GB``; empty if unknown.

        How full ``/dev/shm`` is follows once it is nearly full: ``/dev/shm 93 % full``.
        """
        words = []
        if self.memory_limit:
            words = [f"{byte_size(self.memory_bytes)} of {byte_size(self.memory_limit)}"]
        words += [f"/dev/shm {100 * self.shm:.0f} % full"] if self.shm >= NEARLY_FULL else []
        return ", ".join(words)

    @property
    def network_words(self) -> str:
        """What its network loses, such as ``2.5 % resent, 12 lost/s``; empty if that is usual."""
        words = [f"{100 * self.resent:.1f} % resent"] if self.resent >= 0.01 else []
        words += [f"{self.network_errors:.3g} lost/s"] if self.network_errors >= 1.0 else []
        return ", ".join(words)

    @property
    def cores_words(self) -> str:
        """The number of CPUs that it uses, such as ``7.5``; empty if that is not known, or 0."""
        return f"{self.cores:.1f}" if self.cores else ""

    @property
    def gpu_words(self) -> str:
        """How busy its GPUs are, such as ``93 % of 8, the least 12 %``; empty if unknown.

        The GPU that is used least is left out if it is as busy as the others.
        """
        if not self.gpus:
            return ""
        least = ""
        if self.gpu_busy - self.gpu_least_busy >= 0.1:
            least = f", the least {100 * self.gpu_least_busy:.0f} %"
        return f"{100 * self.gpu_busy:.0f} % of {self.gpus}{least}"

    @property
    def gpu_memory_words(self) -> str:
        """The memory of its GPUs in use, such as ``512 GB of 640 GB``; empty if unknown."""
        if not self.gpu_memory_limit:
            return ""
        return f"{byte_size(self.gpu_memory_bytes)} of {byte_size(self.gpu_memory_limit)}"


class Failure(_StatusModel):
    """The last failure that was counted against a node's ``restartCount``."""

    at: WallTime
    """When the failure was seen."""
    node: str
    """The node against which it was counted."""
    round: int
    """The round that the failure ended."""
    worker: WorkerFailure
    """The worker that failed."""


class HostFault(_StatusModel):
    """A fault that the master attributes to a host."""

    host: str
    """Name of the host."""
    at: WallTime
    """When it was seen."""
    kind: HostFaultKind
    """What has happened."""


class LastCheckpoint(_StatusModel):
    """The checkpoint from which a new start of the job would continue."""

    step: int
    """The step of the checkpoint."""
    where: Literal["memory", "storage"]
    """Where the checkpoint is: in ``memory`` of the nodes, or in ``storage``."""
    at: WallTime
    """When it was committed, or when it was seen to be complete in memory."""
    age_s: float = 0.0
    """Its age in seconds at ``publishedAt``."""
    stored_step: int | None = None
    """The step of the newest checkpoint in storage."""
    stored_at: WallTime | None = None
    """When the newest checkpoint in storage was committed."""
    folder: str = ""
    """Folder of the newest checkpoint in storage."""
    write_s: float | None = None
    """Seconds that it took to write that checkpoint; absent if this master has not seen it."""


class HeldCheckpoint(_StatusModel):
    """A checkpoint in the memory of nodes."""

    step: int
    """The step of the checkpoint."""
    round: int
    """The round in which it was saved."""
    nodes: int
    """Number of nodes that hold the shards of their own workers."""
    copies: int
    """Number of nodes that hold a copy of a peer's shards."""
    nbytes: int
    """Size of the shards in the memory of their own nodes, in bytes."""
    complete: bool
    """True if living nodes hold all of it, so that it can be restored."""
    certified: bool
    """True if all replicas had equal parameters at this step."""
    stored: bool
    """True if it is in storage, too."""
    writing: bool
    """True if it is being written to storage."""
    at: WallTime | None = None
    """When it was first seen to be the newest complete one; absent if it never was."""


class StoreAnswer(_StatusModel):
    """The answer to a user's request to store the newest checkpoint."""

    request: Words
    """The text of ``spec.storeCheckpoint`` that it answers."""
    step: Count | None = None
    """The step of the checkpoint that is in storage; absent if it could not be stored."""
    folder: Words = ""
    """Folder of the checkpoint."""
    problem: Words = ""
    """Why it could not be stored; empty if it is in storage."""

    @property
    def words(self) -> str:
        """The answer as a sentence."""
        if self.step is None:
            return f"no checkpoint was stored: {self.problem}"
        return f"the checkpoint of step {self.step} is in {self.folder}"


class PartitionStatus(_StatusModel):
    """How far a partition of a stream is trained. Numbers are units, such as bytes."""

    name: str
    """Name of the partition."""
    watermark: int
    """All units below this one are credited, or in quarantine."""
    end: int
    """Where the partition ended when a worker last looked."""
    lag: int
    """Units from the watermark to the end."""
    quarantined: int = 0
    """Units in quarantine, which are not trained."""


class StreamStatus(_StatusModel):
    """How far a dataset is trained that is a stream (docs/dynamic-shards.md)."""

    name: str
    """Name of the dataset."""
    watermark: int
    """The least watermark of a partition."""
    lag: int
    """Units from the watermarks to the ends, of all partitions together."""
    ended: bool
    """True if the stream has ended: no partition grows any more."""
    partition_count: int
    """Number of its partitions."""
    partitions: list[PartitionStatus] = Field(default_factory=list)
    """Partitions, at most 100: those with the greatest lag first; on Kubernetes, at most 8."""


class DatasetStatus(_StatusModel):
    """How far the present epoch of a dataset with dynamic shards is (docs/dynamic-shards.md)."""

    name: str
    """Name of the dataset."""
    epoch: int
    """The present epoch, from 0 on."""
    epochs: int | None = None
    """Number of epochs; absent if they have no end."""
    samples: int
    """Number of samples in an epoch."""
    shards: int
    """Number of shards in an epoch."""
    finished: int
    """Shards of which all samples were trained in this epoch."""
    begun: int
    """Shards of which some samples were trained in this epoch."""
    quarantined: int
    """Shards that are not trained any more, because workers failed with them."""
    quarantine: list[str] = Field(default_factory=list)
    """The first ten of them, with the reason, in words."""


class LoaderStatus(_StatusModel):
    """How far the ``ElasticLoader`` is that the script has read last."""

    epoch: int
    """The present epoch, from 0 on."""
    position: int
    """Samples of this epoch that all ranks have trained together."""
    samples: int
    """Number of samples in an epoch."""
    batch: int
    """Samples of all ranks in a step; 0 if that is not known."""


class DataStatus(_StatusModel):
    """How far the data are trained that the script reads with :mod:`dlrover_py.trainer.data`."""

    loader: LoaderStatus | None = None
    """Progress of the ``ElasticLoader``; absent until a rank has reported one."""
    datasets: list[DatasetStatus] = Field(default_factory=list)
    """Progress of the datasets with dynamic shards that are not streams."""
    streams: list[StreamStatus] = Field(default_factory=list)
    """Progress of the datasets that are streams."""


class DiagnosisStatus(_StatusModel):
    """The newest snapshot of a job, in its status."""

    number: Count
    """Number of the snapshot."""
    at: WallTime
    """When it was complete."""
    reason: Words
    """Why it was taken."""
    request: Words = ""
    """The text of ``spec.diagnosis.snapshot`` that it answers; empty if it was taken for another
    reason."""
    verdict: HangVerdict | None = None
    """Why the job stands still; absent if it does not."""
    lines: list[Words] = Field(default_factory=list, max_length=64)
    """What each rank does, in words. Equal ranks have one line together."""
    folder: Words = ""
    """Where the evidence is: a folder of the master's machine, a key of a Secret, or an address;
    empty if none was kept."""


class EvidenceManifest(_StatusModel):
    """``manifest.json`` of a bundle of evidence, which is the folder of one event."""

    format: Count = 1
    """Version of the bundle."""
    number: Count
    """Number of the bundle."""
    kind: EvidenceKind = EvidenceKind.HANG
    """The event to which it belongs."""
    at: WallTime
    """When it was complete."""
    round: Count
    """The round."""
    step: Count | None = None
    """Newest step that was reported."""
    reason: Words
    """Why the snapshot was taken: what has happened, or who has asked."""
    verdict: HangVerdict | None = None
    """Why the job stands still; absent if it does not."""
    failure: Failure | None = None
    """The failure that ended the round; absent for another event."""
    node: Words = ""
    """The node at fault, whose snapshot is never left out; empty if none is named."""
    facts: list[Words] = Field(default_factory=list, max_length=64)
    """What was measured, in words: of a slow job, what each node spends in a step; of lost nodes,
    what they have reported last."""
    nodes: list[Words] = Field(default_factory=list, max_length=65_536)
    """Nodes of the snapshot, each with a file ``NODE.json``."""
    missing: list[Words] = Field(default_factory=list, max_length=65_536)
    """Nodes that have not answered in time, or were lost."""
    lines: list[Words] = Field(default_factory=list, max_length=64)
    """What each rank does, in words."""
    folder: Words = ""
    """Name of the folder."""


CurvePart = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A parameter of a curve of speeds, in seconds for a step or a sample."""


class MeasuredSpeed(_StatusModel):
    """The speed of a job by its number of nodes, as far as it was measured."""

    curve: Annotated[list[CurvePart], Field(min_length=3, max_length=3)] | None = None
    """``a``, ``b`` and ``c``: ``n`` nodes have the speed ``n / (a + b(n-1) + c·n(n-1))``. Absent
    before two sizes were measured. At least one of them is above 0."""
    most: Annotated[int, Field(ge=1, le=100_000)]
    """Greatest size that was measured, in nodes."""
    least: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Least size that was measured, in nodes."""
    resize_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Seconds without training that a change of size costs; absent if there was none."""

    @classmethod
    def read(cls, value: object) -> Self | None:
        """Return the speed in a status, which anybody may have written; None if there is none."""
        try:
            return cls.model_validate(value)
        except ValidationError:
            return None

    @field_validator("curve")
    @classmethod
    def _has_a_speed(cls, curve: list[float] | None) -> list[float] | None:
        """Refuse a curve on which all sizes would be infinitely fast or slow."""
        if curve is not None and not 0 < sum(curve) < math.inf:
            raise ValueError("expected three numbers whose sum is finite and above 0")
        return curve


class TimeBucket(StrEnum):
    """What a part of a job's time was used for. The names are those of ml-goodput-measurement."""

    PRODUCTIVE = "productive"
    """New steps."""
    INITIALIZATION = "infrastructure_initialization"
    """Waiting for nodes before the first round, or after a suspension."""
    INFRASTRUCTURE_RECOVERY = "infrastructure_recovery"
    """From the end of a round by a fault or a departure until the next round."""
    PROGRAM_STARTUP = "program_startup"
    """From the begin of a round until its first step; all of it in a script that reports none."""
    WASTED_PROGRESS = "wasted_progress"
    """Steps that were lost, and trained again."""
    DATA_LOADING = "data_loading"
    """Steps that waited for data."""
    CHECKPOINT_SAVE = "checkpoint_save"
    """Saves of checkpoints, as far as training waited."""
    CHECKPOINT_RESTORE = "checkpoint_restore"
    """Loads of checkpoints."""
    STANDSTILL = "standstill"
    """A hang that was found: from its last step on."""
    SUSPENDED = "suspended"
    """The job was suspended, or the machine of its master slept. This does not count for the
    share."""


class GoodputCeiling(_StatusModel):
    """The best goodput that any interval between saves could reach, and what it is made of.

    All numbers are means over the whole job.
    """

    share: float
    """The goodput that could be reached, from 0 to 1."""
    failures: int
    """Number of rounds that ended in a failure or a loss."""
    between_s: float
    """Seconds between two of them, without suspensions."""
    recovery_s: float
    """Seconds from a failure to the next step, without repeated steps."""
    interval_s: float
    """Seconds between two saves with which it is reached."""


class GoodputStatus(_StatusModel):
    """Where the time of a job went."""

    wall_s: float
    """Seconds since the start of the job, or until its end: the sum of all buckets."""
    share: float | None = None
    """Productive part of the time without suspensions, from 0 to 1; absent until a step is
    reported."""
    save_s: float | None = None
    """Mean of the seconds for which a save stops the training; absent until one is reported."""
    ceiling: GoodputCeiling | None = None
    """The best goodput that could be reached; absent before the first failure."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds by bucket (:class:`TimeBucket`); a bucket without any is left out."""


class RecoveryPhases(_StatusModel):
    """How long the parts of one recovery took."""

    round: int
    """The round whose first step ended it."""
    took_s: float
    """Seconds without training, maybe over several rounds."""
    phases: dict[str, float]
    """Seconds of its parts, in their order. Without a checkpoint, two are absent: ``detect`` the
    failure, ``decide``, ``assign`` the round, ``start`` the workers, ``prepare`` the state,
    ``restore`` the checkpoint, ``first step``."""


class ServerStatus(_StatusModel):
    """The state of a server of a parameter server: a node of the role ``ps``, in no round."""

    id: str
    """Id of the node."""
    running: bool
    """True if its process has been started."""
    host: str = ""
    """Name of its host; empty while it has none."""
    message: str = ""
    """Why it leaves, or waits, in words; empty if it does neither."""


STALENESS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
"""Names of the classes of staleness: pushes of others since a worker has pulled."""


class ServerLoad(_StatusModel):
    """What a server of a parameter server has, and what it did in the last seconds."""

    id: str
    """Id of the node."""
    leads: int
    """Number of buckets whose pushes it applies first."""
    backs_up: int
    """Number of further buckets of which it has a copy."""
    receives: int = 0
    """Number of buckets whose rows are being copied to it."""
    rows: int = 0
    """Rows in its memory, copies included."""
    memory_bytes: int = 0
    """Bytes of these rows, with the values of the optimizer."""
    pulled_per_s: float = 0.0
    """Rows per second that workers have asked it for."""
    pushed_per_s: float = 0.0
    """Rows per second with gradients that workers have sent to it."""
    waiting: int = 0
    """Pushes that other copies do not have yet."""
    stale_pushes_per_s: list[float] = Field(default_factory=list)
    """Pushes per second by the number of pushes of others since the worker pulled: 0, 1, 2 to 3,
    4 to 7 and so on, from 64. Empty with synchronous steps, and without pushes."""
    asked_per_s: float = 0.0
    """Rows per second of pulls and pushes of the buckets that it leads, in the last half minute.
    Servers are evened by it."""
    leading: list[int] = Field(default_factory=list)
    """Numbers of the buckets that it leads. Empty if there are more than 512 buckets."""
    backing: list[int] = Field(default_factory=list)
    """Numbers of the further buckets of which it has a copy, with the same limit."""
    receiving: list[int] = Field(default_factory=list)
    """Numbers of the buckets whose rows are being copied to it, with the same limit."""


class RebalanceAnswer(_StatusModel):
    """The answer to a user's request to even the servers of a parameter server."""

    request: Words
    """The text of ``spec.rebalanceServers`` that it answers."""
    words: Words
    """What follows, as a sentence."""


MAX_LISTED_BUCKETS = 512
"""Greatest number of buckets whose servers and loads are listed."""


class TablesStatus(_StatusModel):
    """The tables of a parameter server, and how they are spread over its servers."""

    epoch: int
    """Epoch of the map of the servers."""
    tables: list[str]
    """Names of the tables."""
    buckets: int
    """Number of parts of the tables; 0 until enough servers have come."""
    lost_buckets: int = 0
    """Number of parts whose last copy has died: their rows are gone."""
    single_buckets: int = 0
    """Number of parts that one server has alone: its loss would lose their rows."""
    desired: int = 0
    """Desired number of servers, without standbys; 0 in the status of an earlier release."""
    standbys: int = 0
    """Desired number of servers without rows."""
    step: int = 0
    """The last step that all workers have ended, if they step together."""
    servers: list[ServerLoad] = Field(default_factory=list)
    """The load of each server that is heard, by its id."""
    bucket_rows_per_s: list[float] = Field(default_factory=list)
    """Rows per second of pulls and pushes of each bucket, in the last half minute. Empty before
    the first 10 s, and if there are more than 512 buckets."""
    ack: str = "backup"
    """When a push is acknowledged: ``primary`` or ``backup``."""
    cut_step: int | None = None
    """Step of the newest cut of these tables: they were saved as it, or have gone back to it."""
    restored: int = 0
    """Epoch of the map in which all tables have gone back to a cut; 0 if they never have."""
    rebalanced: RebalanceAnswer | None = None
    """The answer to the newest ``spec.rebalanceServers``; absent until there is one."""

    @property
    def stale_pushes_per_s(self) -> dict[str, float]:
        """Pushes per second on all servers by :data:`STALENESS`; empty if there are none."""
        rates = [one.stale_pushes_per_s for one in self.servers if one.stale_pushes_per_s]
        sums = [sum(column) for column in zip(*rates, strict=False)]
        return dict(zip(STALENESS, sums, strict=False))

    @property
    def unlisted_buckets(self) -> int:
        """Number of buckets that are led by servers that are not listed; 0 if all are listed."""
        led = sum(one.leads for one in self.servers)
        return max(0, self.buckets - self.lost_buckets - led)


class JobStatus(_StatusModel):
    """The state of a job at one moment."""

    name: str
    """Name of the job."""
    namespace: str = "default"
    """Namespace of the job."""
    generation: int
    """Generation of the spec that the master follows."""
    phase: JobPhase
    """Phase of the job, as its master sees it."""
    reason: str
    """Why the job is in this phase, in words."""
    term: int
    """Term of the master; each new master takes the next number."""
    round: int
    """Number of the newest round; 0 if there was none."""
    world_size: int
    """Number of workers in the round."""
    nodes_in_round: int
    """Number of nodes in the round; once the job has ended, in its last round."""
    desired: int
    """Desired number of nodes, without standbys: ``targetReplicas`` if the job scales by itself."""
    target_replicas: int | None = None
    """Number of nodes that the job has chosen by itself (``autoscale.mode: auto``); absent if
    ``replicas`` counts."""
    speed: MeasuredSpeed | None = None
    """Measured speeds (``autoscale.mode: auto`` or ``advise``); absent before the first one."""
    followed_allocation: float | None = None
    """The ``allocation.since`` that the master follows; absent without one."""
    minimum: int
    """Least number of nodes that a round may have."""
    maximum: int | None = None
    """Greatest number of nodes to which the job may grow (``maxReplicas``); absent if it does not
    grow by itself."""
    ready: int
    """Number of nodes that can train, with standbys."""
    standby: int
    """Number of nodes that wait to replace a lost one."""
    updated: int | None = None
    """Number of nodes that were created from the current template, with standbys; absent if it is
    unknown."""
    progress: Progress | None = None
    """Progress of the script, as it reports it by ``report_step``."""
    restarts: dict[str, int] = Field(default_factory=dict)
    """Number of new rounds by cause: failure, loss, drain, scale, join."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Number of failures by class: workers whose failure was a first cause, and lost nodes."""
    host_faults: list[HostFault] = Field(default_factory=list)
    """The newest faults that are attributed to a host, at most 32."""
    goodput: GoodputStatus | None = None
    """Where the time of the job went."""
    recoveries: list[RecoveryPhases] = Field(default_factory=list)
    """The newest recoveries that this master has seen, oldest first."""
    last_failure: Failure | None = None
    """The newest failure that was counted against a node's ``restartCount``."""
    last_checkpoint: LastCheckpoint | None = None
    """The newest checkpoint; absent until a node reports one."""
    memory_checkpoints: list[HeldCheckpoint] = Field(default_factory=list)
    """The newest checkpoints in memory, at most 4, the newest first."""
    checkpoints_stored: int = 0
    """Number of checkpoints that were stored at this master's request."""
    checkpoint_failures: int = 0
    """Number of checkpoints that could not be stored."""
    store_answer: StoreAnswer | None = None
    """The answer to the newest ``spec.storeCheckpoint``; absent until there is one."""
    data: DataStatus = Field(default_factory=DataStatus)
    """How far the data are trained."""
    diagnosis: DiagnosisStatus | None = None
    """The newest snapshot of all ranks; absent if none was taken."""
    conditions: list[Condition] = Field(default_factory=list)
    """Conditions of the job."""
    nodes: list[NodeStatus] = Field(default_factory=list)
    """The job's nodes that train."""
    servers: list[ServerStatus] = Field(default_factory=list)
    """The servers of a parameter server."""
    tables: TablesStatus | None = None
    """What these servers have; absent before their first report to this master."""
    events: list[JobEvent] = Field(default_factory=list)
    """The newest events, oldest first."""
    started_at: WallTime
    """When the job began."""
    ended_at: WallTime | None = None
    """When the job ended; absent until then."""
    published_at: WallTime = 0.0
    """When this status was made."""

    @property
    def present(self) -> int:
        """Number of nodes to show beside the desired number.

        A round that is over does not count: its nodes may be gone.
        """
        if self.phase.ended:
            return 0
        if self.phase is JobPhase.FORMING:
            return min(self.ready, self.desired)
        return self.nodes_in_round

    @property
    def goodput_words(self) -> str:
        """The productive part of the time, such as ``97.5%``; empty until a step is reported."""
        share = None if self.goodput is None else self.goodput.share
        return "" if share is None else f"{100 * share:.1f}%"

    @property
    def workers_in_training(self) -> int:
        """Number of workers that train; 0 while no round runs."""
        return self.world_size if self.phase is JobPhase.RUNNING else 0


# --- Status on Kubernetes ---


PROGRESS_S = 10.0
"""Seconds between two writes of a status on Kubernetes in which only the progress is new."""
TRAINING_NODES = 64
"""Number of nodes that ``status.training`` has at most."""
TRAINING_EVENTS = 30
"""Number of events that ``status.training`` has at most."""
TRAINING_PARTITIONS = 8
"""Number of partitions that ``status.training`` has of each stream at most."""
TRAINING_BYTES = 50_000
"""Size of ``status.training`` at most. Each client that lists jobs reads the complete object, and
etcd keeps each version."""


class StatusColumns(_StatusModel):
    """The columns of ``kubectl get elasticjobs``, which can show a text but cannot compose one."""

    ready: str
    """Nodes in the round, and desired nodes: ``7/8``. While the next round is being formed, the
    first number counts the nodes that are ready for it. It is 0 once the job has ended."""
    progress: str = ""
    """Progress such as ``40% (200/500)``, or the step if the script does not report the total."""
    restarts: int = 0
    """Number of rounds that followed a failure or a loss."""
    goodput: str = ""
    """Fraction of the time that brought new steps, such as ``97.5%``."""


class Training(JobStatus):
    """``status.training``: a :class:`JobStatus` of at most 50 kB, and its summary."""

    summary: StatusColumns
    """The columns of ``kubectl get elasticjobs``."""
    left_out: int = 0
    """Number of nodes that are not shown. Nodes with problems are shown first, nodes that are gone
    last."""

    @classmethod
    def of(cls, status: JobStatus) -> Self:
        """Return a status cut to ``TRAINING_BYTES``, without its conditions.

        Kubernetes has the conditions in ``status.conditions``. The newest events stay, up to
        ``TRAINING_EVENTS`` and half of the bytes. Nodes stay up to ``TRAINING_NODES``, those with
        problems first, and as many servers, those that are to leave first. All other fields are
        never cut.
        """
        fields = {name: getattr(status, name) for name in JobStatus.model_fields}
        fields |= {"conditions": [], "nodes": [], "events": []}
        streams = [
            one.model_copy(update={"partitions": one.partitions[:TRAINING_PARTITIONS]})
            for one in status.data.streams
        ]
        fields["data"] = status.data.model_copy(update={"streams": streams})
        if status.tables is not None:
            shown = status.tables.servers[:TRAINING_NODES]
            fields["tables"] = status.tables.model_copy(update={"servers": shown})
        leaving_first = sorted(status.servers, key=lambda server: not server.message)
        fields["servers"] = leaving_first[:TRAINING_NODES]
        bare = cls(**fields, summary=summarize(status), left_out=len(status.nodes))
        left = TRAINING_BYTES - _size(bare)
        events = _fitting(status.events[: -TRAINING_EVENTS - 1 : -1], left // 2)
        left -= sum(map(_size, events))
        nodes = _fitting(sorted(status.nodes, key=_display_order)[:TRAINING_NODES], left)
        update = {"nodes": nodes, "events": events[::-1]}
        return bare.model_copy(update=update | {"left_out": len(status.nodes) - len(nodes)})


def _fitting(items: list[_D], budget: int) -> list[_D]:
    """Return as many of the first items as the budget of bytes allows; maybe none.

    An item that is too large also ends the search for smaller ones behind it.
    """
    found: list[_D] = []
    for item in items:
        budget -= _size(item)
        if budget < 0:
            break
        found.append(item)
    return found


def _size(doc: _StatusModel) -> int:
    """Return the size of a document in a list, in bytes of JSON."""
    return len(doc.model_dump_json(by_alias=True).encode()) + 1


def _display_order(node: NodeStatus) -> int:
    """Return the sort key of a node: problems first, then nodes in order, then nodes that are
    gone."""
    if node.phase is NodePhase.GONE:
        return 2
    return int(node.phase is NodePhase.LIVE and not node.message and not node.restarts)


def summarize(status: JobStatus) -> StatusColumns:
    """Return the columns for a job's status. A column without a value is empty."""
    done, progress = status.progress, ""
    if done is not None:
        progress = str(done.step)
        if done.total:
            progress = f"{100 * done.step // done.total}% ({done.step}/{done.total})"
    return StatusColumns(
        ready=f"{status.present}/{status.desired}",
        progress=progress,
        restarts=sum(status.restarts.get(cause, 0) for cause in ("failure", "loss")),
        goodput=status.goodput_words,
    )


class ObjectCondition(_StatusModel):
    """A condition in the form of Kubernetes.

    There is one for each type, and each type has one writer.
    """

    type: Annotated[str, Field(max_length=316)]
    """Type of the condition; docs/operations.md lists all types."""
    status: Annotated[str, Field(max_length=16)]
    """``True``, ``False`` or ``Unknown``."""
    reason: Annotated[str, Field(max_length=1024)] = ""
    """One CamelCase word for the reason."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """The reason in words."""
    last_transition_time: WallTime = 0.0
    """When ``status`` last changed."""
    observed_generation: int | None = None
    """Generation of the spec that the condition refers to."""


class ElasticJobStatus(_StatusModel):
    """``status`` of an ElasticJob."""

    phase: str = ""
    """``Created``, then one of the phases Pending, Running, Forming, Suspended, Succeeded, Failed
    and Stopped. Written by the operator."""
    reason: str = ""
    """One word for what keeps the job from running as it should, or for why it has failed; the
    condition with this reason has the message. Empty if there is no problem. Written by the
    operator."""
    observed_generation: int | None = None
    """Generation of the spec that the operator follows."""
    start_time: WallTime | None = None
    """When the job's master was created, or when the job was last resumed."""
    pending_since: WallTime | None = None
    """When the operator first saw that fewer nodes than the minimum run."""
    completion_time: WallTime | None = None
    """When the operator first saw that the job is over; ``training.endedAt`` is exact."""
    conditions: list[ObjectCondition] = Field(default_factory=list, max_length=64)
    """Conditions of the job; docs/operations.md explains each type."""
    replicas: int | None = None
    """Number of nodes that exist, without standbys. Written by the master, as the fields that
    follow."""
    target_replicas: int | None = None
    """Number of nodes that the job has chosen by itself, without standbys; absent if ``replicas``
    counts."""
    allocation: NodeAllocation | None = None
    """Nodes that the job may have; absent if nothing limits it. Written by the operator if its
    allocator is enabled (docs/autoscaling.md), else by whoever shares the cluster among jobs."""
    bad_hosts: BadHosts | None = None
    """Hosts that have failed in several jobs; absent if there are none. Written by the operator."""
    selector: str | None = None
    """Label selector of the worker Pods, for ``/scale``."""
    training: Training | None = None
    """The job's detailed state, written by its master."""
