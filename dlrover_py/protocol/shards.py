"""The messages of dynamic shards: a worker leases shards of a dataset, and reports their progress.

A worker sends a :class:`ShardRequest` to its agent, which passes it on to the master and the
:class:`ShardAnswer` back. Both are complete documents. A worker repeats a request until it has an
answer, and has one request under way for each dataset. Numbers that only grow say which message is
newer: ``history`` and ``seq`` in a request, ``term`` in an answer, ``token`` in a lease.
"""

import hashlib
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from dlrover_py.protocol.agents import BootId, Count, Counted, DatasetName, HeldLease, Wire, Words
from dlrover_py.protocol.documents import LARGEST, Size, explain
from dlrover_py.protocol.runs import Runs

VERSION: Final = 1
"""Version of these messages. The SDK of a script may be of another release than the agent."""
MAX_REQUEST: Final = 1 << 18
"""Greatest size of a request or an answer in bytes."""

MAX_SIZES: Final = 8192
"""Most pairs of sizes in a message."""
ShardSizes = Annotated[
    list[tuple[Annotated[int, Field(ge=1, le=2**32)], Annotated[int, Field(ge=1, le=2**48)]]],
    Field(max_length=MAX_SIZES),
]
"""Sizes of shards, as pairs: how many shards in a row have a size, and that size."""
SubRange = tuple[Size, Size]
"""A part of a shard: its first sample, and the one after its last, from the start of the shard."""
MAX_TOKENS: Final = 4096
"""Most leases in a message."""
MAX_PARTITIONS: Final = 1000
"""Most partitions of a stream."""
PartitionName = Annotated[
    str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")
]
"""Name of a partition of a stream, such as the name of a file."""
Offset = Annotated[int, Field(ge=0, le=2**52)]
"""A place in a partition, in units of the source such as bytes."""


Fingerprint = Annotated[str, StringConstraints(max_length=64, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Says which data a dataset has, in up to 64 characters; empty if it is not known."""


Mark = Annotated[str, StringConstraints(max_length=1100, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Names a state in the ledger of leased shards; see :mod:`dlrover_py.protocol.shard_ledger`."""


class Level(StrEnum):
    """What is guaranteed about each sample of an epoch."""

    AT_LEAST_ONCE = "at_least_once"
    """Each sample is trained. After a failure of the master some are trained again."""
    EXACTLY_ONCE_ACCOUNTING = "exactly_once_accounting"
    """Each sample is credited once, whatever fails. After a rollback of the model, samples that it
    has forgotten are not trained again."""
    EXACTLY_ONCE_EFFECT = "exactly_once_effect"
    """Each sample is credited once in the history of the model: credits are in its checkpoint, and
    roll back together with it."""


class DatasetSpec(Wire):
    """A dataset, as all its workers must name it."""

    sizes: ShardSizes = Field(default_factory=list)
    """The sizes of all shards, in the order of the dataset; empty for a stream."""
    range_size: Annotated[int, Field(ge=1, le=2**48)] | None = None
    """For a stream, whose partitions grow: most units of a range that is leased."""
    fingerprint: Fingerprint = ""
    """Says which data it is, such as a digest of the names and sizes of files; empty: unknown."""
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """It chooses the order of the shards."""
    shuffle: bool = True
    """False keeps the order of the dataset."""
    epochs: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Number of epochs; None: without an end."""
    level: Level = Level.EXACTLY_ONCE_EFFECT
    """The guarantee."""
    failures: Annotated[int, Field(ge=1, le=1000)] = 3
    """Failures of workers with a shard after which it goes to quarantine."""
    lease_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Least seconds without progress after which a worker loses its leases."""

    @model_validator(mode="after")
    def _check_size(self) -> "DatasetSpec":
        """Refuse a dataset with too many samples, or with none.

        Raises:
            ValueError: It has more than 2**53 samples or 2**32 shards, or it must have either
                shards or ranges of a stream.
        """
        if bool(self.sizes) == (self.range_size is not None):
            raise ValueError("expected either sizes of shards, or the range_size of a stream")
        samples = sum(count * size for count, size in self.sizes)
        if samples > 2**53 or sum(count for count, _ in self.sizes) > 2**32:
            raise ValueError("expected at most 2**53 samples in at most 2**32 shards")
        return self

    @property
    def shards(self) -> int:
        """Number of shards."""
        return sum(count for count, _ in self.sizes)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(count * size for count, size in self.sizes)

    @property
    def order(self) -> str:
        """Digest of all that decides which shard is at which position, and then the fingerprint.

        The fingerprint is left out if it is unknown. The credits of a stream do not depend on its
        options, so this is always the same text for a stream.
        """
        if self.range_size is not None:
            return "stream"
        text = self.model_dump_json(include={"sizes", "seed", "shuffle"})
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return f"{digest} {self.fingerprint}" if self.fingerprint else digest

    def continues(self, order: str) -> bool:
        """Return whether credits with an :attr:`order` may be those of this dataset.

        An unknown fingerprint fits each other one.

        Args:
            order: the order of the dataset of the credits.
        """
        digest, _, fingerprint = order.partition(" ")
        own, _, mine = self.order.partition(" ")
        return digest == own and (not fingerprint or not mine or fingerprint == mine)


class Ledger(Wire):
    """The credits of a dataset, as they are in a checkpoint."""

    epoch: Count
    """The epoch, from 0. All earlier ones are complete."""
    done: Runs = Field(default_factory=list, max_length=MAX_REQUEST)
    """The finished shards of the epoch, by their positions in its order."""
    partial: dict[Count, Runs] = Field(default_factory=dict, max_length=MAX_TOKENS)
    """The credited samples of shards that are begun, by position."""
    parts: dict[PartitionName, Runs] = Field(default_factory=dict, max_length=MAX_PARTITIONS)
    """For a stream: the credited units of each partition."""
    mark: Mark = ""
    """The state of these credits in the ledger on disk; empty if there is no such ledger."""


class Credit(Wire):
    """Samples that a worker has trained, since its last answered request."""

    token: Count
    """Token of the lease."""
    ranges: Annotated[list[SubRange], Field(min_length=1, max_length=64)]
    """The samples."""


class ShardReturn(Wire):
    """A worker's message that it does not finish a shard."""

    token: Count
    """Token of the lease."""
    why: Words
    """The reason, in words."""
    fault: bool = False
    """True if it counts as a failure with this shard; False if the worker only leaves."""
    unreadable: bool = False
    """True if the shard is gone or was cut: it goes to quarantine immediately."""


class ShardLease(HeldLease):
    """A shard that a worker may train."""

    shard: Count
    """Number of the shard in the dataset."""
    partition: str = ""
    """For a stream: the partition of the range."""
    start: Count
    """The first sample of the shard in the dataset; for a stream, the first unit in the
    partition."""
    size: Annotated[int, Field(ge=1, le=LARGEST)]
    """Number of samples of the shard."""
    todo: Annotated[list[SubRange], Field(min_length=1)]
    """The samples of it that are not credited yet."""


class ShardRequest(Wire):
    """A worker's request about one dataset."""

    version: Literal[1] = VERSION
    """The version of the messages; another one is refused."""
    dataset: DatasetName
    """Name of the dataset."""
    round: Counted
    """The round of the worker."""
    local_rank: Annotated[int, Field(ge=0, le=1023)]
    """Rank of the worker on its node."""
    load: Counted = 0
    """How many states this worker has loaded into the dataset. Round and load make its history: a
    higher one makes all leases of lower ones void."""
    seq: Annotated[int, Field(ge=1, le=2**53)]
    """Number of the request. A repeated request has the same one."""
    spec: DatasetSpec | None = None
    """The dataset, in the worker's first request of a history."""
    ledger: Ledger | None = None
    """The loaded credits, together with ``spec``; None if no checkpoint was loaded."""
    epoch: Count = 0
    """The epoch from which the worker wants shards."""
    credits: Annotated[list[Credit], Field(max_length=MAX_TOKENS)] = Field(default_factory=list)
    """What it has trained."""
    returns: Annotated[list[ShardReturn], Field(max_length=MAX_TOKENS)] = Field(
        default_factory=list
    )
    """What it gives back."""
    progress: bool = False
    """True if the worker has read samples since its last request: this renews its leases."""
    want: Annotated[int, Field(ge=0, le=64)] = 0
    """How many leases it wants to hold after this request."""
    ends: dict[PartitionName, Offset] = Field(default_factory=dict, max_length=MAX_PARTITIONS)
    """For a stream: where each partition of the source ends now. A lower end than before is
    ignored."""
    ended: bool = False
    """True if the stream has ended: no partition grows any more, and none is added."""


class NodeShardRequest(Wire):
    """A worker's request, as its agent passes it on: ``POST /v1/nodes/{id}/shards``."""

    boot_id: BootId
    """Random text of the agent process, as in its reports."""
    request: ShardRequest
    """The request."""


class AnswerCode(StrEnum):
    """The kind of an answer."""

    OK = "ok"
    UNKNOWN = "unknown"  # the queue does not know the dataset: the request needs `spec`
    SUPERSEDED = "superseded"  # another history or round has begun
    REFUSED = "refused"  # the user must act: `why` says what was wrong


class ShardAnswer(Wire):
    """The answer to a :class:`ShardRequest`."""

    version: Literal[1] = VERSION
    """The version of the messages; another one is refused."""
    code: AnswerCode = AnswerCode.OK
    """The kind of the answer."""
    why: Words = ""
    """Why the request is refused, in words."""
    term: Count = 0
    """The term of the master; 0 without one. An agent drops answers of earlier masters."""
    seq: Count = 0
    """The number of the request."""
    epoch: Count = 0
    """The epoch of the queue."""
    over: bool = False
    """True if all epochs are complete."""
    leases: Annotated[list[ShardLease], Field(max_length=MAX_TOKENS)] = Field(default_factory=list)
    """All leases that the worker holds now."""
    refused: Annotated[list[Count], Field(max_length=MAX_TOKENS)] = Field(default_factory=list)
    """Tokens of this request whose credits do not count: the lease has ended before."""
    retry_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds after which the worker should ask again if it has no lease."""
    lease_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds without progress after which the worker loses its leases; 0: no limit."""
    quarantined: Count = 0
    """Number of shards in quarantine."""
    poll: bool = False
    """True if the worker should ask the source of a stream for the ends of its partitions, and
    report them in its next request. One worker at a time is told so."""
    watermarks: dict[PartitionName, Offset] = Field(default_factory=dict, max_length=MAX_PARTITIONS)
    """For a stream: the watermark of each partition, but for 0. Only the worker that has reported
    ends is told so, and each one when the stream is over."""


def read_shard_request(body: bytes) -> ShardRequest:
    """Return the request in a document of JSON; unknown fields are ignored.

    Raises:
        ValueError: The document is not a valid request, or has another version.
    """
    try:
        return ShardRequest.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def read_shard_answer(body: bytes) -> ShardAnswer:
    """Return the answer in a document of JSON; unknown fields are ignored.

    Raises:
        ValueError: The document is not a valid answer, or has another version.
    """
    try:
        return ShardAnswer.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
