"""The faults of a campaign: kind, target, duration and pause, drawn from a seed alone. Pure.

A target is named by role and rank, because the names of nodes and hosts differ in each run.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

LEAST, MOST = 2, 4
"""Smallest and largest number of nodes to which a job is scaled."""


class Kind(StrEnum):
    """The kind of a fault."""

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
"""Faults of one Pod of a job, which may be that of a standby."""
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
"""Faults that take a moment, so that another one can follow within a second."""
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
"""Value of a rank that means the standby."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    kind: Kind
    job: int = 0
    rank: int = 0
    """Rank of the node, or of the node on the target host, modulo the number of nodes then."""
    hold_s: float = 0.0
    """Seconds after which the fault is undone."""
    sizes: tuple[int, ...] = ()
    """Desired numbers of nodes, one after the other."""

    @property
    def whom(self) -> str:
        """Description of the target by its role."""
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
    """One step of the campaign: one fault, or two at the same time."""

    number: int
    pause_s: float
    """Seconds of training before the step."""
    faults: tuple[Fault, ...]
    apart_s: float = 0.0
    """Seconds between the first and the second fault."""

    @property
    def kind(self) -> Kind:
        """Kind under which the step is counted."""
        return self.faults[0].kind if len(self.faults) == 1 else Kind.PAIR

    def __str__(self) -> str:
        what = f", {self.apart_s:g} s later ".join(map(str, self.faults))
        return f"{self.number:4}  after {self.pause_s:4.1f} s  {what}"


def plan(
    seed: int, number: int, *, jobs: int = 1, replicas: int = 3, kinds: Sequence[Kind] = tuple(Kind)
) -> list[Step]:
    """Return the steps of a campaign. A longer plan of a seed begins like a shorter one.

    Args:
        seed: seed of the random numbers.
        number: number of steps.
        jobs: number of jobs.
        replicas: number of nodes of each job.
        kinds: kinds of faults to draw from.
    """
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
        # The second fault is undone first: a host that comes back needs the API server.
        one = _fault(draw, draw.choice((*QUICK, Kind.HOST_CUT, Kind.HOST_CRASHED)), sizes)
        other = _fault(draw, draw.choice((*QUICK, *OF_API)), sizes)
        yield Step(count, pause_s, (one, other), round(draw.uniform(0, 0.8), 2))


def _fault(draw: random.Random, kind: Kind, sizes: list[int]) -> Fault:
    job, rank = draw.randrange(len(sizes)), draw.randrange(MOST)
    if kind in OF_NODES and draw.random() < 0.15:
        rank = STANDBY
    if draw.random() < 0.25:
        rank = min(rank, 0)  # a fault of rank 0 has the most effects
    hold_s = 0.0
    if kind in OF_HOSTS:
        # Shorter than a lease; longer; until Kubernetes notices; until masters are moved.
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
