"""The cluster map: which server has which bucket. Every change of a bucket gives it a new term."""

from dataclasses import dataclass, field
from enum import StrEnum

from dlrover_py.ps.specs import Consistency, TableSpec

StepId = tuple[int, int]
"""A step of all workers: the generation of their group, and the number. ``(0, 0)`` is none."""


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
    """A server that receives the rows; empty if there is none.

    It may be a backup that is to lead, and may lack the last pushes. It stays a backup then."""
    replacing: Replacing = Replacing.NOTHING
    lost: bool = False
    """Whether the last copy died: rows of acknowledged pushes are gone."""
    loading: bool = False
    """Whether the primary reads the rows from a cut. It has no followers and no lead until then."""

    @property
    def followers(self) -> tuple[str, ...]:
        """The servers to which the primary sends its changes."""
        if not self.learner or self.learner in self.backups:
            return self.backups
        return (*self.backups, self.learner)

    @property
    def members(self) -> tuple[str, ...]:
        """All servers with rows of the bucket."""
        return (self.primary, *self.followers)


@dataclass(frozen=True, slots=True)
class Steps:
    """The workers that step together, and how far they have come.

    The number only grows, from one generation of the group to the next, too.
    """

    consistency: Consistency | None = None
    """None until a worker has chosen one."""
    generation: int = 0
    """How often the group has changed."""
    members: dict[str, int] = field(default_factory=dict)
    """Incarnation of each worker of the group, by its name."""
    done: int = 0
    """The last step that all members have ended."""
    ends: tuple[StepId, ...] = ()
    """The last step of each earlier generation."""

    def has(self, step: StepId) -> bool:
        """Return whether a step is over. Otherwise it never will be, if its generation has ended.

        Args:
            step: A step of which a push was sent.
        """
        if step[0] == self.generation:
            return step[1] <= self.done
        return step[1] <= dict(self.ends).get(step[0], -1)


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
    calls: dict[str, str] = field(default_factory=dict)
    """The call with which each worker has begun last, by the worker's name."""
    placements: tuple[Placement, ...] = ()
    """One for each bucket; empty until enough servers have come."""
    weights: tuple[int, ...] = ()
    """How much each bucket counts when servers are evened; empty: each as much."""
    rebalanced: str = ""
    """The last request of a user to even the servers that was answered."""
    cut: CutPlace | None = None
    """The cut that the primaries write now. They apply no push meanwhile."""
    source: CutPlace | None = None
    """The newest cut in the life of the tables: they were read from it, or saved as it.

    The directory may have later cuts that these rows do not go back to."""
    origin: CutPlace | None = None
    """The cut with the rows with which the training began, if a worker has asked for it."""
    met: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The workers that made or went back to :attr:`source` together: incarnation, and number of the
    call. The next coordinator answers those that have not heard of it."""
    steps: Steps = field(default_factory=Steps)
    restored: int = 0
    """Epoch of the last return to a cut. Pushes that were sent before it are refused."""

    def table(self, name: str) -> TableSpec | None:
        """Return a table by its name; None if there is none."""
        return next((table for table in self.tables if table.name == name), None)
