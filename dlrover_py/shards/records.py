"""What must outlive the process of a lease queue. The master writes it to the job's journal."""

from pydantic import ConfigDict, Field
from pydantic import dataclasses as records

from dlrover_py.protocol.agents import Count
from dlrover_py.protocol.runs import Runs
from dlrover_py.protocol.shards import DatasetSpec


@records.dataclass(slots=True, config=ConfigDict(extra="ignore"))
class ShardFailures:
    """The failures of workers with one shard."""

    count: Count
    why: str
    """The newest one, in words."""


@records.dataclass(slots=True, config=ConfigDict(extra="ignore"))
class QuarantinedShard:
    """A shard that is not leased any more."""

    epoch: Count
    """The epoch in which that was decided."""
    why: str
    """The reason, in words."""
    missed: Runs
    """Its samples that were not credited in that epoch. Later epochs miss all its samples."""


@records.dataclass(slots=True, kw_only=True, config=ConfigDict(extra="ignore"))
class PartitionRecord:
    """One partition of a stream. Numbers are units from its start."""

    end: Count = 0
    """Where it ends, as far as a worker has reported."""
    credited: Runs = Field(default_factory=list)
    """The credited units."""
    skipped: Runs = Field(default_factory=list)
    """The units of ranges in quarantine."""


@records.dataclass(slots=True, kw_only=True, config=ConfigDict(extra="ignore"))
class StreamRecord:
    """The partitions of a stream."""

    partitions: dict[str, PartitionRecord] = Field(default_factory=dict)
    """The partitions by name, in the order in which they were found. None is ever removed."""
    ended: bool = False
    """Whether the stream has ended: no partition grows any more, and none is added."""
    complete: bool = False
    """Whether the stream has ended, and nothing is left of it."""


@records.dataclass(slots=True, kw_only=True, config=ConfigDict(extra="ignore"))
class QueueRecord:
    """All that must outlive the process of a queue.

    Positions are those in the epoch's order; for a stream, see
    :mod:`dlrover_py.shards.streams`.
    """

    spec: DatasetSpec
    history: tuple[Count, Count] = (0, 0)
    """The newest round and load of a worker."""
    epoch: Count = 0
    done: Runs = Field(default_factory=list)
    """Positions of the finished shards."""
    partial: dict[Count, Runs] = Field(default_factory=dict)
    """Credited samples of shards that are not finished, by position."""
    skipped: Runs = Field(default_factory=list)
    """Positions of shards in quarantine that were reached in this epoch."""
    quarantined: dict[Count, QuarantinedShard] = Field(default_factory=dict)
    """The quarantine, by shard."""
    failures: dict[Count, ShardFailures] = Field(default_factory=dict)
    """Failures with shards that are not in quarantine, by shard."""
    reserved: Count = 1
    """The first token that no process has used."""
    applied: dict[str, Count] = Field(default_factory=dict)
    """Number of each worker's newest request whose credits and returns were taken in."""
    refused: dict[str, list[Count]] = Field(default_factory=dict)
    """Tokens that were refused in that request, where there are any."""
    failed: list[str] = Field(default_factory=list)
    """Workers of this history whose failure with a shard is counted, as others may report it."""
    shard_s: float = 0.0
    """99th percentile of the seconds that shards took; 0 before the first one."""
    stream: StreamRecord = Field(default_factory=StreamRecord)
    """The partitions, if the dataset is a stream."""
