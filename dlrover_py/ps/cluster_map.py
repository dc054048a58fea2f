"""The cluster map: which server has which bucket. Every change of a bucket gives it a new term."""

from dataclasses import dataclass, field
from enum import StrEnum

from dlrover_py.ps.specs import TableSpec


class AckMode(StrEnum):
    """When a push is acknowledged."""

    PRIMARY = "primary"
    """When the primary has applied it. Its loss may lose the last pushes."""
    BACKUP = "backup"
    """When all in-sync copies have it. The loss of one server loses nothing."""


class Replacing(StrEnum):
    """What a learner becomes when it has all rows of its bucket."""

    NOTHING = ""
    """A further backup."""
    PRIMARY = "primary"
    BACKUP = "backup"


@dataclass(frozen=True, slots=True)
class CutPlace:
    """Where a cut of all tables is, or is being written."""

    url: str
    """The directory of checkpoints."""
    folder: str
    """The cut's folder in it."""
    step: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The servers of one bucket in one term. A term has one primary."""

    term: int
    primary: str
    """Id of the only server that applies pushes."""
    backups: tuple[str, ...] = ()
    """In-sync copies: each has every push that was acknowledged."""
    learner: str = ""
    """A server that receives the rows; empty if there is none."""
    replacing: Replacing = Replacing.NOTHING
    lost: bool = False
    """Whether the last copy died: rows of acknowledged pushes are gone."""
    loading: bool = False
    """Whether the primary reads the rows from a cut. It has no followers and no lead until then."""

    @property
    def followers(self) -> tuple[str, ...]:
        """The servers to which the primary sends its changes."""
        return (*self.backups, self.learner) if self.learner else self.backups

    @property
    def members(self) -> tuple[str, ...]:
        """All servers with rows of the bucket."""
        return (self.primary, *self.followers)


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """One state of the servers of a job. A greater epoch is newer."""

    job: str
    epoch: int = 0
    ack: AckMode = AckMode.BACKUP
    tables: tuple[TableSpec, ...] = ()
    servers: dict[str, str] = field(default_factory=dict)
    """Address of each server that is believed to run, by its id."""
    draining: tuple[str, ...] = ()
    """The servers that give their buckets away."""
    clients: dict[str, int] = field(default_factory=dict)
    """Newest incarnation of each worker, by the worker's name."""
    placements: tuple[Placement, ...] = ()
    """One for each bucket; empty until enough servers have come."""
    cut: CutPlace | None = None
    """The cut that the primaries write now. They apply no push meanwhile."""
    source: CutPlace | None = None
    """The cut that the rows were read from, or are."""
    restored: int = 0
    """Epoch of the last return to a cut. Pushes that were sent before it are refused."""

    def table(self, name: str) -> TableSpec | None:
        """Return a table by its name; None if there is none."""
        return next((table for table in self.tables if table.name == name), None)
