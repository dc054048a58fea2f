"""The faults of a campaign, drawn from a seed alone: what, whom, how long, after which pause.

Pure. Whom is said by role and rank: names of nodes and hosts are another story in each run.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

LEAST, MOST = 2, 4
"""Numbers of nodes that a job is scaled to."""


class Kind(StrEnum):
    """What is done."""

    WORKER_KILLED = "worker killed"
    AGENT_KILLED = "agent killed"
    POD_DELETED = "Pod deleted"
    POD_FORCED = "Pod deleted by force"
    ALL_FORCED = "all Pods deleted by force"
    MASTER_KILLED = "master killed"
    MASTER_DELETED = "master deleted"
    MASTER_FORCED = "master deleted by force"
    MASTER_TWICE = "master deleted by force, twice"
    OPERATOR_KILLED = "operator killed"
    OPERATOR_AWAY = "operator away"
    HOST_CUT = "host cut off"
    HOST_CRASHED = "host crashed"
    HEAD_CUT = "host of master and rank 0 cut off"
    KUBELET_HUNG = "kubelet hangs"
    API_CUT = "master's host loses the API server"
    API_STOPPED = "API server hangs"
    API_KILLED = "API server killed"
    API_FORGOT = "API server killed, its history compacted"
    ETCD_STOPPED = "etcd hangs"
    API_BROKEN = "masters' writes fail"
    API_FORBIDS = "master's rights taken away"
    DRAINED = "host drained"
    TAINTED = "host tainted"
    CORDONED = "host cordoned, its Pod deleted"
    EVICTED = "Pod evicted"
    QUOTA = "Pod deleted by force under a quota"
    BAD_IMAGE = "Pod deleted by force, its image not to be had"
    SCALED = "scaled"
    FLAPPED = "scaled, and back at once"
    SUSPENDED = "suspended and resumed"
    PAIR = "two at once"


OF_NODES = (
    Kind.AGENT_KILLED, Kind.POD_DELETED, Kind.POD_FORCED, Kind.EVICTED, Kind.QUOTA,
    Kind.BAD_IMAGE,
)  # fmt: skip
"""Of one Pod of a job, which may be a standby's."""
OF_MASTERS = (Kind.MASTER_KILLED, Kind.MASTER_DELETED, Kind.MASTER_FORCED, Kind.MASTER_TWICE)
OF_HOSTS = (
    Kind.HOST_CUT, Kind.HOST_CRASHED, Kind.HEAD_CUT, Kind.KUBELET_HUNG, Kind.API_CUT,
)  # fmt: skip
OF_API = (
    Kind.API_STOPPED, Kind.API_KILLED, Kind.API_FORGOT, Kind.ETCD_STOPPED, Kind.API_BROKEN,
    Kind.API_FORBIDS, Kind.OPERATOR_AWAY,
)  # fmt: skip
QUICK = (
    Kind.WORKER_KILLED, Kind.AGENT_KILLED, Kind.POD_DELETED, Kind.POD_FORCED, Kind.EVICTED,
    Kind.MASTER_KILLED, Kind.MASTER_DELETED, Kind.MASTER_FORCED, Kind.OPERATOR_KILLED,
)  # fmt: skip
"""Done in a moment, so that another can follow within a second."""
WEIGHTS = {
    Kind.WORKER_KILLED: 4, Kind.AGENT_KILLED: 3, Kind.POD_DELETED: 2, Kind.POD_FORCED: 3,
    Kind.MASTER_KILLED: 2, Kind.MASTER_DELETED: 1, Kind.MASTER_FORCED: 2, Kind.MASTER_TWICE: 1,
    Kind.OPERATOR_KILLED: 1, Kind.OPERATOR_AWAY: 1, Kind.HOST_CUT: 3, Kind.HOST_CRASHED: 2,
    Kind.HEAD_CUT: 2, Kind.KUBELET_HUNG: 2, Kind.API_CUT: 2, Kind.ALL_FORCED: 1,
    Kind.API_STOPPED: 2, Kind.API_KILLED: 1, Kind.API_FORGOT: 1, Kind.ETCD_STOPPED: 1,
    Kind.API_BROKEN: 2, Kind.API_FORBIDS: 2,
    Kind.DRAINED: 2, Kind.TAINTED: 2, Kind.CORDONED: 1, Kind.EVICTED: 2,
    Kind.QUOTA: 2, Kind.BAD_IMAGE: 2, Kind.SCALED: 3, Kind.FLAPPED: 1, Kind.SUSPENDED: 1,
    Kind.PAIR: 6,
}  # fmt: skip
STANDBY = -1
"""In the place of a rank."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done."""

    kind: Kind
    job: int = 0
    rank: int = 0
    """Of the node, or of the node whose host is meant; modulo the number of nodes at that time."""
    hold_s: float = 0.0
    """It is undone after so long."""
    sizes: tuple[int, ...] = ()
    """Wished one after the other."""

    @property
    def whom(self) -> str:
        """The target by its role."""
        if self.kind in (*OF_MASTERS, Kind.HEAD_CUT, Kind.API_CUT):
            return f"job {self.job}: master"
        if self.kind in OF_API or self.kind is Kind.OPERATOR_KILLED:
            return "control plane"
        if self.sizes:
            return f"job {self.job}: {'→'.join(map(str, self.sizes))}"
        if self.kind in (Kind.SUSPENDED, Kind.ALL_FORCED):
            return f"job {self.job}"
        return f"job {self.job}: {'standby' if self.rank == STANDBY else f'rank {self.rank}'}"

    def __str__(self) -> str:
        held = f", {self.hold_s:g} s" if self.hold_s else ""
        return f"{self.kind} ({self.whom}{held})"


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the campaign."""

    number: int
    pause_s: float
    """Before it, with the job in progress."""
    faults: tuple[Fault, ...]
    apart_s: float = 0.0
    """Between the first and the second."""

    @property
    def kind(self) -> Kind:
        """As which it is counted."""
        return self.faults[0].kind if len(self.faults) == 1 else Kind.PAIR

    def __str__(self) -> str:
        what = f", {self.apart_s:g} s later ".join(map(str, self.faults))
        return f"{self.number:4}  after {self.pause_s:4.1f} s  {what}"


def plan(
    seed: int, number: int, *, jobs: int = 1, replicas: int = 3, kinds: Sequence[Kind] = tuple(Kind)
) -> list[Step]:
    """So many steps. A longer plan of the same seed begins as a shorter one does."""
    return list(_steps(random.Random(seed), number, [replicas] * jobs, kinds))


def _steps(
    draw: random.Random, number: int, sizes: list[int], kinds: Sequence[Kind]
) -> Iterator[Step]:
    weights = [WEIGHTS[kind] for kind in kinds]
    for count in range(1, number + 1):
        (kind,) = draw.choices(kinds, weights)
        pause_s = round(min(15.0, draw.expovariate(1 / 4)), 1)
        if kind is not Kind.PAIR:
            yield Step(count, pause_s, (_fault(draw, kind, sizes),))
            continue
        # The second one is undone first: the API server has to be there when a host comes back.
        one = _fault(draw, draw.choice((*QUICK, Kind.HOST_CUT, Kind.HOST_CRASHED)), sizes)
        other = _fault(draw, draw.choice((*QUICK, *OF_API)), sizes)
        yield Step(count, pause_s, (one, other), round(draw.uniform(0, 0.8), 2))


def _fault(draw: random.Random, kind: Kind, sizes: list[int]) -> Fault:
    job, rank = draw.randrange(len(sizes)), draw.randrange(MOST)
    if kind in OF_NODES and draw.random() < 0.15:
        rank = STANDBY
    if draw.random() < 0.25:
        rank = min(rank, 0)  # rank 0 is where most is at stake
    hold_s = 0.0
    if kind in OF_HOSTS:
        # Shorter than a lease; longer; longer than Kubernetes waits; and until masters move.
        hold_s = draw.choice((3.0, 8.0, 16.0, 30.0))
    elif kind in OF_API:
        hold_s = draw.choice((2.0, 5.0, 12.0))
    elif kind in (
        Kind.DRAINED, Kind.TAINTED, Kind.CORDONED, Kind.QUOTA, Kind.BAD_IMAGE, Kind.SUSPENDED,
    ):  # fmt: skip
        hold_s = draw.choice((2.0, 6.0))
    wished: tuple[int, ...] = ()
    if kind is Kind.SCALED:
        wished = (draw.choice([n for n in range(LEAST, MOST + 1) if n != sizes[job]]),)
    elif kind is Kind.FLAPPED:
        wished = (MOST, LEAST, MOST)
    if wished:
        sizes[job] = wished[-1]
    return Fault(kind, job, rank, hold_s, wished)
