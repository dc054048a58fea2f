"""The messages between workers, servers and the coordinator. A payload of arrays may follow.

A *mark* ``(bucket, term, last_term, version)`` names a state of a bucket. ``version`` counts its
changes, and ``last_term`` is the term of the last one. Two copies with the same ``last_term`` and
``version`` have the same rows, because each term has one primary.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from dlrover_py.ps.cluster_map import ClusterMap, StepId
from dlrover_py.ps.specs import Consistency, RowFormat, TableSpec

Mark = tuple[int, int, int, int]


class RefusalReason(StrEnum):
    """Why a server did not do what a worker asked for."""

    MOVED = "moved"
    """It is not the primary of these buckets. The worker needs a newer map, or has one."""
    OLD_CLIENT = "old_client"
    """A newer incarnation of the worker has pushed."""
    INVALID = "invalid"
    """The request can never be done: a wrong type, shape, table or bucket."""


# --- Worker to server ---


@dataclass(frozen=True, slots=True)
class Push:
    """Gradients of a worker; payload: ``[ids, *gradients]`` for each table, see ``codecs``.

    ``(incarnation, seq)`` only grows for a worker, and stays when the push is sent again. The
    worker sends the next one when all buckets of this one are acknowledged.
    """

    client: str
    incarnation: int
    epoch: int
    """Epoch of the worker's map. A server with an older one gets that first."""
    seq: int
    buckets: tuple[int, ...]
    step: StepId = (0, 0)
    """With synchronous steps, the step. Gradients then wait on the servers until it is over."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A request for rows; payload: ``[ids]`` for each table."""

    epoch: int
    seq: int
    buckets: tuple[int, ...]
    formats: dict[str, RowFormat] = field(default_factory=dict)
    """How the rows of a table are to come, if not as float32."""


# --- Server to worker ---


@dataclass(frozen=True, slots=True)
class Pushed:
    """Buckets of a push that are applied, or wait, and are copied as the job wants it."""

    seq: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """Rows of the buckets of a pull; payload: ``[*rows]``, in the order of the request."""

    seq: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """Buckets of a request for which nothing was done."""

    seq: int
    buckets: tuple[int, ...]
    reason: RefusalReason
    epoch: int
    """Epoch of the server's map."""
    words: str = ""


# --- Server to server ---


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one bucket by a push: from one state to the next."""

    bucket: int
    term: int
    from_term: int
    from_version: int
    version: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """What a push, or the end of a step, has changed.

    The payload has the records of the changed rows. A push of a step changes none: then the payload
    has its gradients, which wait for the end of the step.
    """

    sender: str
    client: str
    """The worker; empty if a step has ended."""
    incarnation: int
    seq: int
    changes: tuple[Change, ...]
    step: StepId = (0, 0)
    """The step that has ended, or to which the push belongs."""


@dataclass(frozen=True, slots=True)
class WaitingPush:
    """A push in a copy of a bucket that waits for the end of its step."""

    client: str
    incarnation: int
    seq: int
    step: StepId
    tables: int
    """How many tables of the payload belong to it."""


@dataclass(frozen=True, slots=True)
class BucketCopy:
    """A part of a bucket; payload: records of rows, then the gradients of waiting pushes.

    Each change from the first part on is sent to the follower as well. So when it has taken the
    last part, and all changes before that, it has the state of the last part's mark. It takes one
    part after the other, and tells that by :class:`PartsTaken`.
    """

    sender: str
    mark: Mark
    """The state of the primary when it made this part."""
    copy: int
    """Number of this copy in the life of the sender."""
    part: int
    """Number of the part, from 0."""
    last: bool
    clients: dict[str, tuple[int, int]] = field(default_factory=dict)
    """In the last part, the last push of each worker: incarnation and sequence number."""
    waiting: tuple[WaitingPush, ...] = ()
    """In the order of their gradients."""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How much of a copy of a bucket a follower has."""

    bucket: int
    term: int
    copy: int
    """Number of the copy."""
    next_part: int
    """Number of the part that it needs next."""


@dataclass(frozen=True, slots=True)
class PartsTaken:
    """What a follower has of copies that are not complete. The primary sends the next parts."""

    sender: str
    parts: tuple[CopyProgress, ...]


@dataclass(frozen=True, slots=True)
class ComparedBucket:
    """What a primary has of a bucket, and what it has sent of it before this message."""

    mark: Mark
    copy: int
    """Number of the last copy that it has begun for the follower; 0 if there is none."""
    parts: int
    """How many parts of the copy were sent. A follower that has fewer lacks one that is lost."""


@dataclass(frozen=True, slots=True)
class Compare:
    """The states of a primary. Its follower answers with Held, Lacking or PartsTaken."""

    sender: str
    buckets: tuple[ComparedBucket, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """States that a follower has."""

    sender: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class LackedBucket:
    """A bucket of which a follower needs a copy."""

    bucket: int
    term: int
    copy: int = 0
    """The copy that cannot be completed, or that the primary has compared; 0: none. The answer does
    not count if the primary has begun another copy since."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """Buckets of which a follower needs a copy."""

    sender: str
    buckets: tuple[LackedBucket, ...]


# --- With the coordinator ---


@dataclass(frozen=True, slots=True)
class Alive:
    """A server runs. It is sent often, and answered by the map if that is newer."""

    server: str
    address: str
    epoch: int
    synced: tuple[tuple[int, int, str], ...] = ()
    """Buckets, with their term, whose learner has every acknowledged push."""
    loaded: tuple[tuple[int, int], ...] = ()
    """Buckets, with their term, whose rows were read from a cut."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The process of a server runs, though its thread may be at work. There is no answer."""

    server: str


@dataclass(frozen=True, slots=True)
class WatchMap:
    """A worker or a tool wants the map, now and after each change."""

    epoch: int


@dataclass(frozen=True, slots=True)
class JoinClient:
    """A worker begins. The answer is a map with its incarnation; older ones may push no more."""

    client: str
    call: str
    """Drawn by the worker's program, which sends the same one until it is answered."""


@dataclass(frozen=True, slots=True)
class CreateTable:
    """A worker uses a table. The answer is a map that has it, or a CoordinatorRefusal."""

    spec: TableSpec
    client: str = ""
    """Name of the worker."""
    incarnation: int = 0
    """Incarnation of the worker."""


@dataclass(frozen=True, slots=True)
class UseConsistency:
    """A worker uses a consistency. The answer is a map that has it, or a CoordinatorRefusal."""

    consistency: Consistency


@dataclass(frozen=True, slots=True)
class Stepped:
    """How far a worker is. It says so when it has ended a step, and often.

    The answer is the map, if that is newer.
    """

    client: str
    incarnation: int
    epoch: int
    """Epoch of the worker's map. The news of a step may have gone to an earlier connection."""
    step: StepId
    """The last step that it has ended. All servers have what it pushed."""
    world: int
    """Number of workers that are to step together."""
    round: int = 0
    """Number of the round in which they were started."""
    leaving: bool = False
    """Whether it has ended, so that nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A server wants to leave, and keeps its buckets until others have them."""

    server: str


@dataclass(frozen=True, slots=True)
class Meet:
    """A worker asks to save all tables, or to go back to a cut, and waits for the other workers.

    All its pushes are acknowledged. It sends this again until it gets :class:`Met`.
    """

    client: str
    incarnation: int
    number: int
    """Number of the call in this worker's life."""
    step: int
    """Step of the cut; -1: the newest one, to go back to."""
    world: int
    """Number of workers that must ask for the same."""
    restore: bool
    new: tuple[str, ...] = ()
    """Tables that a cut to go back to need not have."""
    folder: str = ""
    """The cut to go back to, by its name; empty: by its step."""
    origin: bool = False
    """Whether to go back to the rows with which the training began, or to save them if it begins
    now."""
    needed: tuple[str, ...] | None = ()
    """Earlier cuts, by name, that checkpoints of this worker need; None: perhaps all."""


@dataclass(frozen=True, slots=True)
class Met:
    """What became of a :class:`Meet`."""

    number: int
    step: int
    """Step of the cut; -1 without one."""
    epoch: int
    """Epoch of the map that the worker must have before it goes on."""
    words: str = ""
    """Why it failed; empty on success."""
    folder: str = ""
    """Name of the cut; empty without one."""


@dataclass(frozen=True, slots=True)
class SavedArray:
    """One array of one table in a file of a cut."""

    table: str
    array: int
    """Its number in the record: ids, rows, steps, slots."""
    shape: tuple[int, ...]
    position: int
    xxh3: int


@dataclass(frozen=True, slots=True)
class SavedBucket:
    """One bucket in a file of a cut."""

    bucket: int
    clients: dict[str, tuple[int, int]]
    """The last push of each worker: incarnation and sequence number."""
    arrays: tuple[SavedArray, ...]


@dataclass(frozen=True, slots=True)
class CutPart:
    """A server has written buckets of a cut. It says so until the map has another cut, or none.

    A file with many buckets has several of these messages.
    """

    server: str
    folder: str
    file: str
    buckets: tuple[SavedBucket, ...]


@dataclass(frozen=True, slots=True)
class CutFailed:
    """A server cannot write its part of a cut."""

    server: str
    folder: str
    words: str


@dataclass(frozen=True, slots=True)
class Load:
    """What a server has, and what it did since its last message of this kind. It has no answer."""

    server: str
    rows: int
    """Rows in its memory, copies included."""
    nbytes: int
    """Bytes of these rows, with the values of the optimizer."""
    pulled_per_s: float
    """Rows per second that workers have got."""
    pushed_per_s: float
    """Rows per second to which gradients of workers were applied."""
    waiting: int
    """Pushes that other copies do not have yet."""
    bucket_rows: tuple[tuple[int, int], ...] = ()
    """Rows of pulls and pushes since its last message, for each bucket that had any."""
    stale_per_s: tuple[float, ...] = ()
    """Pushes per second by staleness: 0, 1, 2 to 3, 4 to 7 and so on."""


@dataclass(frozen=True, slots=True)
class MapNews:
    """The newest map."""

    map: ClusterMap


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended, or was deleted. A server that leaves waits for nobody to take its rows."""


@dataclass(frozen=True, slots=True)
class CoordinatorRefusal:
    """The coordinator changed nothing, and says why."""

    words: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The message of the receiver could not be read: it was damaged, or of another job."""

    words: str


ToServer = Push | Pull | Replicate | BucketCopy | PartsTaken | Compare | Held | Lacking
ToWorker = Pushed | Pulled | RefusedRequest
ToCoordinator = (
    Alive | Beat | WatchMap | JoinClient | CreateTable | UseConsistency | Stepped | Drain | Meet
    | CutPart | CutFailed | Load
)  # fmt: skip
FromCoordinator = MapNews | JobEnded | CoordinatorRefusal | Met
Message = ToServer | ToWorker | ToCoordinator | FromCoordinator | Unreadable
