"""How many nodes each job may have: from the objects of a cluster to allocations (pure functions).

What is decided is written into ``status.allocation`` of the jobs, and is read from there for the
next decision. Nothing else is kept, so the operator may die between any two writes.

A host is free once no Pod on it is observed. A number is raised only as far as all others fit in
beside it as they are written now, so no host is promised to two jobs that take part.

Users write Pods, specs and perhaps statuses of their own namespace. So a Pod counts only where its
host has room, and what a job is about to create counts only as far as its spec allows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from types import MappingProxyType
from typing import Self

from dlrover_operator.facts import ACTIVE_PHASES, final_phase
from dlrover_operator.observed import JobUid, Key, Obj, job_of, uid_of
from dlrover_py.allocator import Allocation, Demand, Pool, SpotPolicy, allocate, demand_of
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation, PodPlace
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.hosts import SPOT_LABELS
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.quantities import quantity
from dlrover_py.protocol.status import MeasuredSpeed, unix_seconds
from dlrover_py.protocol.words import counted

SUSPENDED = "held back: the job was suspended"
"""Reason of a job with ``suspend: true``, which must not take its old nodes when it resumes."""
LOST_S = 45.0
"""Seconds after which a host that is not ready counts as lost. Until then it may come back, and its
jobs keep their sizes. Kubernetes itself waits for 300 seconds before it ends the Pods there."""
NO_HOSTS = "no host that is shared exists; check the label selector of the allocator"
"""Reason while no host matches: the hosts have not all vanished at the same moment."""
NO_POOLS = "no host has the label {}, which names its pool; check the pool label of the allocator"
"""Reason while all hosts are without a pool, which is as probable a mistake."""
UNREADABLE = "the status of the job cannot be understood"
"""Reason of a job that is left out, because something in its object has another form."""
LEAVING = (
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/spot-itn",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
)
"""Taints of hosts that are about to be taken away. They count as cordoned."""
PASSING = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Prefixes of taints that tell the state of a host, and not for which Pods it is meant."""
ONE_POOL = "hosts"
"""Name of the only pool, if hosts are not told apart."""
MOST_PLACES = 64
"""Most pools that a job is placed in. With more of them, the scheduler places its Pods."""
Taint = tuple[str, str, str]
"""Key, value and effect."""
FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a malformed document of a job raises where it is read."""


@dataclass(frozen=True, slots=True)
class SharedHosts:
    """The administrator's settings: how many nodes jobs share, and on which hosts."""

    capacity: int = 0
    """Number of nodes that all jobs may have together; 0: as many as the hosts have room for."""
    selector: str = ""
    """Label selector of the hosts, if ``capacity`` is 0."""
    slot: Mapping[str, Decimal] = field(default_factory=dict)
    """What a node of a job takes of a host, by resource; empty: the whole host."""
    hold_s: float = 300.0
    """Seconds for which a size is kept that was chosen for the sake of speed."""
    pool_label: str = ""
    """Label of hosts whose value is the name of their pool; empty: there is one pool, and the
    scheduler alone places Pods."""


@dataclass(frozen=True, slots=True)
class Host:
    """The view of a Kubernetes Node."""

    name: str
    slots: int
    """Nodes of jobs for which it has room."""
    open: bool
    """Whether it takes new Pods: it is ready and not cordoned."""
    lost_at: float | None = None
    """Unix time at which it became not ready; None if it is ready, or cordoned."""
    pool: str = ONE_POOL
    """Name of its pool."""
    spot: bool = False
    """Whether it may be taken away at short notice."""
    taints: frozenset[Taint] = frozenset()
    """What a Pod must tolerate to be placed there."""
    leaving: bool = False
    """Whether a taint says that it is about to be taken away."""

    def lost_in(self, now: float) -> float:
        """Return after how many seconds it counts as lost; 0 if it does not count any more.

        The clock of the program that has dated the loss may be ahead of ``now`` a little.
        """
        if self.lost_at is None or not -LOST_S < now - self.lost_at < LOST_S:
            return 0.0
        return min(LOST_S, self.lost_at + LOST_S - now)

    def usable(self, now: float) -> bool:
        """Return whether it takes new Pods, or may do so again soon."""
        return self.open or self.lost_in(now) > 0

    @classmethod
    def of(cls, obj: Obj, slot: Mapping[str, Decimal], pool_label: str = "") -> Self:
        """Return the view of an object. A host without the label of pools takes no new Pods.

        Args:
            obj: the Kubernetes Node.
            slot: what a node of a job takes of it, by resource; empty: the whole host.
            pool_label: label whose value is the name of its pool; empty: there is one pool.
        """
        status = obj.get("status") or {}
        has = status.get("allocatable") or {}
        rooms = [int(quantity(has.get(name, "0")) // size) for name, size in slot.items()]
        conditions: list[Obj] = status.get("conditions") or []
        about = next((c for c in conditions if c.get("type") == "Ready"), {})
        ready = about.get("status") == "True"
        spec = obj.get("spec") or {}
        listed: list[Obj] = spec.get("taints") or []
        leaving = any(taint.get("key") in LEAVING for taint in listed)
        taints = frozenset(
            (one["key"], one.get("value") or "", one["effect"])
            for one in listed
            if one.get("effect") in ("NoSchedule", "NoExecute")
            and not one["key"].startswith(PASSING)
            and one["key"] not in LEAVING
        )
        cordoned = bool(spec.get("unschedulable")) or leaving
        lost_at = None if ready or cordoned else unix_seconds(about.get("lastTransitionTime"))
        labels = obj["metadata"].get("labels") or {}
        pool = labels.get(pool_label, "") if pool_label else ONE_POOL
        spot = any(labels.get(name) == value for name, value in SPOT_LABELS.items())
        if not pool:  # the Pods that it has stay
            ready, lost_at = False, None
        slots = min(rooms, default=1)
        usable = ready and not cordoned
        return cls(obj["metadata"]["name"], slots, usable, lost_at, pool, spot, taints, leaving)


@dataclass(frozen=True, slots=True)
class HeldPod:
    """The view of a worker's Pod."""

    job: JobUid
    """The ElasticJob that owns it."""
    host: str
    """Name of its host; empty if it has none yet."""
    holds: bool
    """Whether it holds resources: it has not ended."""
    ends: bool = False
    """Whether it was deleted, and is ending."""
    placement: str = ""
    """Name of the pool that it was created for; empty if for none."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of an object."""
        return cls(
            job_of(obj["metadata"]),
            (obj.get("spec") or {}).get("nodeName") or "",
            (obj.get("status") or {}).get("phase") not in ("Succeeded", "Failed"),
            "deletionTimestamp" in obj["metadata"],
            (obj["metadata"].get("labels") or {}).get(names.LABEL_PLACEMENT, ""),
        )


def takes_part(job: Obj) -> bool:
    """Return whether nodes are allotted to a job: run here, in no queue, and not opted out."""
    if names.LABEL_QUEUE in (job["metadata"].get("labels") or {}):
        return False
    note = (job["metadata"].get("annotations") or {}).get(names.NOTE_ALLOCATION)
    return note != "off" and _here(job)


def _here(job: Obj) -> bool:
    """Return whether this operator runs a job, and not another controller, perhaps elsewhere."""
    return (job.get("spec") or {}).get("managedBy") in (None, names.MANAGED_BY)


def decide(
    jobs: Iterable[Obj],
    hosts: Iterable[Host],
    pods: Iterable[HeldPod],
    shared: SharedHosts,
    now: float,
    reclaims: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> dict[Key, NodeAllocation]:
    """Return the allocations that must change now, by job. Nothing is carried out.

    Each of them is right beside the present allocations of all other jobs. A job that was not
    started yet, and is held back, gets an allocation of 0 nodes with the reason. If there is no
    shared host at all, running jobs keep their sizes. Numbers that fall come first, because others
    wait for them, then those that rise, and at last the changes of reasons alone.

    Pods of a job that takes no part, or is gone, take the room that the others' Pods leave on the
    shared hosts. Those that have no host yet take nothing from the others. They only keep hosts
    free that would be further nodes, beyond the minima and beyond what each job has.

    Args:
        jobs: all ElasticJobs.
        hosts: the hosts that jobs share, unless the number of nodes is given.
        pods: all Pods of workers.
        shared: the settings.
        now: Unix time.
        reclaims: Unix times at which spot hosts were taken away from jobs, by pool.
    """
    hosts = list(hosts)
    if not hosts and not shared.capacity:
        return hold(jobs, now, NO_HOSTS)
    if hosts and not any(host.pool for host in hosts):
        return hold(jobs, now, NO_POOLS.format(shared.pool_label))
    closed = {host.name for host in hosts if not host.open and not host.lost_in(now)}
    # A Pod that ends on a host that takes no others holds nothing that a job could have.
    holding = [pod for pod in pods if pod.holds and not (pod.ends and pod.host in closed)]
    stable = {host.pool for host in hosts if not host.spot}
    taints = _taints(hosts) if shared.pool_label else {}
    # A host that has lost its label counts with the pool that its Pods were created for.
    meant = {pod.host: pod.placement for pod in holding}
    hosts = [host if host.pool else replace(host, pool=meant.get(host.name, "")) for host in hosts]
    held = Counter(pod.job for pod in holding)
    hosted = Counter(pod.job for pod in holding if pod.host)
    found: dict[Key, NodeAllocation] = {}
    demands: dict[Key, tuple[Demand, NodeAllocation | None]] = {}
    choosing: set[JobUid] = set()
    """Jobs that choose their pools themselves."""
    asking: dict[JobUid, Key] = {}
    """The jobs of ``demands``."""
    given_up: Counter[JobUid] = Counter()
    """Nodes that suspended jobs may still take, until their allocations are written."""
    coming = 0
    for obj in jobs:
        key, uid = (obj["metadata"]["namespace"], obj["metadata"]["name"]), uid_of(obj)
        granted = ElasticJob.allocation_in(obj)
        try:
            demand = _demand(obj, held[uid], hosted[uid], now)
            if isinstance(demand, Demand) and shared.pool_label:
                template = obj["spec"]["replicaSpecs"]["worker"].get("template") or {}
                spec = template.get("spec") or {}
                demand = replace(demand, avoids=_not_tolerated(spec, taints))
                if _selects(spec, shared.pool_label):
                    choosing.add(uid)
        except FAULTS as error:
            # Whoever may write one job must not stop the decisions for all others.
            demand = 0 if granted is None else max(0, granted.nodes - hosted[uid])
            nodes = 0 if granted is None else granted.nodes
            start = f"{counted(nodes, 'node')}: kept" if nodes else "held back"
            reason = f"{start}, because {UNREADABLE}: {' '.join(repr(error).split())[:200]}"
            if granted is None or granted.reason != reason:
                since = now if granted is None else granted.since
                found[key] = NodeAllocation(nodes=nodes, reason=reason, since=since)
        if isinstance(demand, int):
            coming += demand
            if granted is not None and granted.nodes and _suspended(obj):
                given_up[uid] = granted.nodes
                found[key] = NodeAllocation(nodes=0, reason=SUSPENDED, since=now)
        else:
            asking[uid] = key
            demands[key] = demand, granted
    turns = {
        uid: held[uid] > demands[key][0].maximum + demands[key][0].standbys
        for uid, key in asking.items()
    }
    placed = _placed(holding, hosts, shared.capacity, turns)
    used: Counter[str] = Counter()
    for uid, key in asking.items():
        demand, granted = demands[key]
        pools = placed.pop(uid, Counter())
        size = max(demand.size, pools.total() - demand.standbys)
        standing = min(demand.standbys, max(0, pools.total() - size))
        promised = Counter(
            {
                place.name: place.nodes
                for place in (granted.placements if granted else ())
                if place.name and place.name not in demand.avoids
            }
        )
        # A Pod that is missing will be created again: it leaves no room to others.
        used += pools | promised
        policy = demand.spot_policy if shared.pool_label else "any"
        demand = replace(demand, size=size, standing=standing, spot_policy=policy)
        demands[key] = replace(demand, placed=pools | promised), granted
    given_up -= Counter({uid: pools.total() for uid, pools in placed.items()})
    waits = 0 if shared.capacity else _not_ready(hosts, holding, now)
    rooms = Counter({ONE_POOL: shared.capacity} if shared.capacity else _rooms(hosts, holding, now))
    for pools in placed.values():
        rooms -= pools
    room = rooms.total()
    kept = sum(_kept(demand, room) for demand, _ in demands.values())
    _keep_free(rooms, used, min(coming, max(0, room - kept)))
    every = [
        Pool(
            name=name,
            nodes=nodes,
            spot=bool(shared.pool_label) and name not in stable,
            reclaimed_at=tuple(reclaims.get(name, ())),
            used=used[name],
        )
        for name, nodes in sorted(rooms.items())
    ]
    busy = waits + sum(given_up.values())
    wishes = [demand for demand, _ in demands.values()]
    sizes = allocate(wishes, every, now, hold_s=shared.hold_s, busy=busy)
    loose = _loose(holding, hosts)
    places = {
        key: []
        if uid in choosing
        else _places(
            demands[key][0], sizes[demands[key][0].name], every, loose.get(uid, Counter()), shared
        )
        for uid, key in asking.items()
    }
    for key, (demand, granted) in demands.items():
        one = sizes[demand.name]
        # The time that a job was suspended is no time that it has waited.
        resumed = granted is not None and granted.reason == SUSPENDED
        # A job without nodes has no standbys, whatever it may have.
        standbys = one.standbys if one.nodes and one.standbys < demand.standbys else None
        moves = granted is not None and granted.placements != places[key]
        if granted is None or granted.nodes != one.nodes or resumed or moves:
            found[key] = NodeAllocation(
                nodes=one.nodes,
                standbys=standbys,
                reason=one.reason,
                since=now,
                forced=one.forced,
                placements=places[key],
            )
        elif (granted.reason, granted.standbys) != (one.reason, standbys):
            update = {"reason": one.reason, "standbys": standbys}
            found[key] = granted.model_copy(update=update)

    def standbys_of(key: Key, one: NodeAllocation) -> int:
        return demands[key][0].standbys if one.standbys is None else one.standbys

    def turn(key: Key) -> int:
        granted = demands[key][1] if key in demands else None
        falls = key not in demands or (
            granted is not None
            and (
                found[key].nodes < granted.nodes
                or standbys_of(key, found[key]) < standbys_of(key, granted)
            )
        )
        return 0 if falls else 1 if found[key].since == now else 2

    return {key: found[key] for key in sorted(found, key=turn)}


def hold(jobs: Iterable[Obj], now: float, why: str) -> dict[Key, NodeAllocation]:
    """Return the allocations that must change while the hosts are not known: the numbers stay.

    Args:
        jobs: all ElasticJobs.
        now: Unix time.
        why: why they are not known; a part of the reasons.
    """
    found = {}
    for obj in jobs:
        granted = ElasticJob.allocation_in(obj)
        over = final_phase(obj.get("status") or {}) or obj["metadata"].get("deletionTimestamp")
        if over or not takes_part(obj):
            continue
        key = obj["metadata"]["namespace"], obj["metadata"]["name"]
        if _suspended(obj):
            if granted is not None and granted.nodes:
                found[key] = NodeAllocation(nodes=0, reason=SUSPENDED, since=now)
        elif granted is not None and granted.nodes:
            kept = f"{counted(granted.nodes, 'node')}: kept, because {why}"
            if granted.reason != kept:
                found[key] = granted.model_copy(update={"reason": kept})
        elif granted is not None or not ((obj.get("status") or {}).get("training") or {}):
            text = f"held back: {why}"
            since = now if granted is None else granted.since
            if granted is None or granted.reason != text:
                found[key] = NodeAllocation(nodes=0, reason=text, since=since)
    return found


def _suspended(job: Obj) -> bool:
    """Return whether a job that has not ended is to be suspended."""
    return (job.get("spec") or {}).get("suspend") is True and takes_part(job)


def _demand(job: Obj, pods: int, hosted: int, now: float) -> Demand | int:
    """Return what a job asks for, or how many Pods without a host it has or may create.

    It asks for nothing if it has ended, is suspended, takes no part or cannot be read. The size of
    what it asks for is no greater than its maximum.

    Args:
        job: the ElasticJob.
        pods: Pods of its workers that hold resources.
        hosted: those of them that have a host.
        now: Unix time.
    """
    meta, status = job["metadata"], job.get("status") or {}
    training = status.get("training") or {}
    if final_phase(status) or meta.get("deletionTimestamp") or _suspended(job) or not _here(job):
        return 0
    # Until a master reports that it wants fewer nodes, it may create those that are missing.
    wanted = training.get("desired", 0) if training.get("phase") in ACTIVE_PHASES else 0
    try:
        read = ElasticJob.read(job) if takes_part(job) else None
    except ConfigError:
        read = None
    if read is None:
        granted = ElasticJob.allocation_in(job)
        wanted = max(pods, wanted, 0 if granted is None else granted.nodes)
        return max(0, min(wanted, _most(job)) - hosted)
    demand = demand_of(
        read,
        MeasuredSpeed.read(training.get("speed")),
        queued_at=unix_seconds(meta.get("creationTimestamp")) or 0.0,
        size=max(pods - read.worker.standby_replicas, wanted),
    )
    if read.allocation is not None and read.allocation.reason == SUSPENDED:
        demand = replace(demand, granted_at=now)  # it waits since it was resumed
    policy: SpotPolicy = "any" if read.worker.spot_policy == "any" else "onDemandMin"
    return replace(demand, size=min(demand.size, demand.maximum), spot_policy=policy)


def _most(job: Obj) -> int:
    """Return the greatest number of Pods that a spec allows, which may be one that is refused."""
    worker = ((job.get("spec") or {}).get("replicaSpecs") or {}).get("worker") or {}
    most = max(worker.get("replicas") or 1, worker.get("maxReplicas") or 0)
    return int(most + (worker.get("standbyReplicas") or 0))


def _kept(demand: Demand, room: int) -> int:
    """Return the nodes of a job that Pods without a host leave to it: what it has, or its minimum.

    Its standbys are counted.

    Args:
        demand: what the job asks for.
        room: nodes for which there is room; a greater minimum cannot be given.
    """
    has = max(demand.size, demand.granted or 0)
    least = demand.least + demand.standbys
    return max(has + demand.standbys if has else 0, least if least <= room else 0)


def _placed(
    pods: Iterable[HeldPod], hosts: Iterable[Host], capacity: int, turns: Mapping[JobUid, int]
) -> dict[JobUid, Counter[str]]:
    """Return how many Pods of each job have room on the shared hosts, by pool.

    A user may write any number of Pods on one host, and on the host of another job. So Pods get
    the room in turns, and those of one turn in any order.

    Args:
        pods: Pods that hold resources.
        hosts: the shared hosts.
        capacity: the number of nodes, if it is given instead of hosts; otherwise 0.
        turns: 0 for a job that has no more Pods than it may have, and 1 for one that has more. All
            other jobs come last.
    """
    left = {"": capacity} if capacity else {host.name: host.slots for host in hosts}
    pools = {"": ONE_POOL} if capacity else {host.name: host.pool for host in hosts}
    found: dict[JobUid, Counter[str]] = {}
    here = [pod for pod in pods if pod.host]
    for turn in (0, 1, 2):
        for pod in here:
            place = "" if capacity else pod.host
            if turns.get(pod.job, 2) == turn and left.get(place, 0) > 0:
                left[place] -= 1
                found.setdefault(pod.job, Counter())[pools[place]] += 1
    return found


def _rooms(hosts: Iterable[Host], pods: Iterable[HeldPod], now: float) -> Counter[str]:
    """Return for how many nodes the hosts of each pool have room, with those that exist.

    A host that takes no new Pods counts with the Pods that it has, and one that is not ready for a
    short time counts as if it were ready.
    """
    here = Counter(pod.host for pod in pods)
    found: Counter[str] = Counter()
    for host in hosts:
        found[host.pool] += host.slots if host.usable(now) else min(host.slots, here[host.name])
    return found


def _keep_free(rooms: Counter[str], used: Mapping[str, int], nodes: int) -> None:
    """Take nodes from pools for Pods without a host, the free ones of the emptiest pools first.

    Args:
        rooms: nodes of each pool, which fall.
        used: nodes of jobs that exist in each pool.
        nodes: how many to take.
    """
    free = {name: max(0, rooms[name] - used.get(name, 0)) for name in rooms}
    for least in (free, dict(rooms)):
        for name in sorted(least, key=lambda one: (-least[one], one)):
            taken = min(nodes, least[name], rooms[name])
            rooms[name] -= taken
            nodes -= taken


def _loose(pods: Iterable[HeldPod], hosts: Iterable[Host]) -> dict[JobUid, Counter[str]]:
    """Return how many Pods of each job were created for no pool, by the pool that they are in."""
    pools = {host.name: host.pool for host in hosts}
    found: dict[JobUid, Counter[str]] = {}
    for pod in pods:
        if not pod.placement and not pod.ends:
            found.setdefault(pod.job, Counter())[pools.get(pod.host, "")] += 1
    return found


def _taints(hosts: Iterable[Host]) -> dict[str, frozenset[Taint]]:
    """Return the taints that all hosts of a pool have, by pool.

    Those of all pools are left out. They say nothing about which pool is better, and the cluster
    may add a toleration to the Pods, as GKE does for its GPUs.
    """
    found: dict[str, frozenset[Taint]] = {}
    for host in hosts:
        if host.pool:
            found[host.pool] = found.get(host.pool, host.taints) & host.taints
    common = frozenset[Taint].intersection(*found.values()) if found else frozenset[Taint]()
    return {pool: taints - common for pool, taints in found.items() if taints - common}


def _not_tolerated(spec: Obj, taints: Mapping[str, frozenset[Taint]]) -> frozenset[str]:
    """Return the pools with a taint that a Pod does not tolerate.

    Args:
        spec: the Pod spec of a template.
        taints: the taints of pools.
    """
    tolerations: list[Obj] = spec.get("tolerations") or []

    def tolerated(taint: Taint) -> bool:
        key, value, effect = taint
        return any(
            (one.get("effect") or effect) == effect
            and (
                (one.get("key") or key) == key
                if one.get("operator") == "Exists"
                else (one.get("key"), one.get("value") or "") == (key, value)
            )
            for one in tolerations
        )

    return frozenset(name for name, found in taints.items() if not all(map(tolerated, found)))


def _selects(spec: Obj, label: str) -> bool:
    """Return whether a Pod may be only on hosts that its own spec selects by a label."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return label in (spec.get("nodeSelector") or {}) or any(
        one.get("key") == label
        for term in required.get("nodeSelectorTerms") or ()
        for one in term.get("matchExpressions") or ()
    )


def _places(
    demand: Demand,
    one: Allocation,
    pools: Sequence[Pool],
    loose: Counter[str],
    shared: SharedHosts,
) -> list[PodPlace]:
    """Return where the Pods of a job go; empty if the scheduler alone places them.

    Stable pools come first: a master fills the first place with room. Pods that were created before
    there were pools stay where they are, and take the room of their pool.

    Args:
        demand: what the job asks for.
        one: what it may have.
        pools: all pools.
        loose: Pods of the job that were created for no pool, by the pool that they are in.
        shared: the settings.
    """
    if not (shared.pool_label and one.nodes) or len(one.pools) >= MOST_PLACES:
        return []
    pools = [pool for pool in pools if pool.name]
    found = {name: nodes for name, nodes in one.pools.items() if name}
    # Each node needs a place: a Pod without one would be created and ended again and again.
    kept = min(one.pools.get("", 0), loose[""])
    missing = one.nodes + one.standbys - kept - sum(found.values())
    open_pools = {pool.name for pool in pools} - demand.avoids
    if missing > 0:
        if not open_pools:
            return []
        most = max(sorted(open_pools & found.keys() or open_pools), key=lambda n: found.get(n, 0))
        found[most] = found.get(most, 0) + missing
    places = [
        PodPlace(
            name=pool.name,
            nodes=max(0, found[pool.name] - loose[pool.name]),
            node_selector={shared.pool_label: pool.name},
        )
        for pool in sorted(pools, key=lambda pool: pool.spot)
        if pool.name in found
    ]
    if loose:
        places.append(PodPlace(name="", nodes=loose.total()))
    return places


def reclaimed(
    watched: Mapping[str, str], hosts: Iterable[Host], pods: Iterable[HeldPod], now: float
) -> tuple[list[str], dict[str, str]]:
    """Return the pools of spot hosts that were taken away, and the hosts to watch from now on.

    A host with Pods of workers is watched. If it vanishes, or a taint announces that, it was taken
    away. One that an administrator has cordoned is watched no more. One that is not ready may come
    back: it is watched on.

    Args:
        watched: pools of the hosts to watch, by their names, as the last call returned them.
        hosts: the hosts that jobs share.
        pods: all Pods of workers.
        now: Unix time.
    """
    staying = {host.name: host for host in hosts if not host.leaving}
    busy = {pod.host for pod in pods if pod.holds}
    gone = [pool for name, pool in watched.items() if name not in staying]
    return gone, {
        name: host.pool
        for name, host in staying.items()
        if host.spot
        and ((name in busy and host.usable(now)) or (name in watched and host.lost_at is not None))
    }


def _not_ready(hosts: Iterable[Host], pods: Iterable[HeldPod], now: float) -> int:
    """Return the room without Pods on hosts that count although they are not ready."""
    here = Counter(pod.host for pod in pods)
    return sum(max(0, host.slots - here[host.name]) for host in hosts if host.lost_in(now))
