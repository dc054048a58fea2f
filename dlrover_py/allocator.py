"""The sizes of all jobs that share a cluster: which job gets how many nodes, where, and why.

:func:`allocate` is a pure function. What it returns is written into the status of each job, and
comes back with the next call as :attr:`Demand.granted`, so whoever calls it may die at any time.
Nodes are first taken from jobs. They are given to others once they were seen to be gone.

Under unchanged demands, each call raises the sum of ``weight · ln(speed)`` or changes nothing.
So sizes never move in a circle, and stand still after a few calls.
"""

import bisect
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import MeasuredSpeed
from dlrover_py.protocol.words import counted

HORIZON_S = 3600.0
"""Seconds over which a change of size must pay off."""
RESIZE_S = 30.0
"""Seconds that a change of size takes, before one was measured."""
ONE_SIZE = 0.9
"""Exponent of the speed by the number of nodes, for a job without a curve."""
TRUSTED = 2
"""Factor beyond the measured sizes up to which a curve is followed."""
STEP = 10
"""A change of size moves about this fraction (1 / STEP) of the job's nodes at least."""
MIN_GAIN = 0.02
"""Gain of speed for which a step of growth is made at least."""
WORTH = 0.2
"""Speed that an added node must bring, as a fraction of what a node of the job brings now."""
BETTER = 0.25
"""Fraction by which the gain of a move between jobs must exceed the loss."""
CHURN = 0.1
"""Fraction of all nodes that one call moves for the sake of speed, to within one step. It is at
least one node: a small cluster would be shared by the order of arrival otherwise."""
FORCED_S = 60.0
"""Seconds for which a size is kept that was forced by a loss of hosts or by another's minimum."""
ENDING_S = 60.0
"""Seconds for which a growth waits for the Pods of a job that shrinks, to be made in one change."""
FLATTEST = 1e-3
"""Least ``n / speed`` of a curve, as a fraction of the sum of its parameters."""
NONE = 2**31
"""A size that no job has."""
PATIENCE_S = 3600.0
"""Seconds for which smaller jobs may start before a waiting job that does not fit yet."""
RECLAIMS = 3
"""Reclaimed nodes within :data:`HORIZON_S` after which a spot pool gets no further nodes."""
RECLAIMED = 0.05
"""The same as a fraction of the pool, if that is more: a large pool loses some hosts each hour."""

SpotPolicy = Literal["onDemandMin", "any"]
"""``onDemandMin``: a job starts with its minimum on stable hosts, and keeps it there if it can.
``any``: all nodes may be on spot hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one job asks for, and what it has."""

    name: str
    """Unique among all jobs of the cluster."""
    minimum: int
    """Least number of nodes with which it trains."""
    maximum: int
    """Greatest useful number of nodes."""
    unit: int = 1
    """Sizes are multiples of this, without :attr:`sizes`."""
    sizes: tuple[int, ...] = ()
    """The only sizes that it may have, ascending; empty for all multiples of the unit."""
    priority: int = 0
    """A higher one gets its minimum first."""
    queue: str = ""
    """Queue or namespace; queues get equal shares of the minima."""
    weight: float = 1.0
    """Weight of the job when further nodes are shared, above 0."""
    queued_at: float = 0.0
    """Unix time at which it was created."""
    curve: tuple[float, float, float] | None = None
    """``a``, ``b`` and ``c`` of its speed ``n / (a + b(n-1) + c·n(n-1))``; None if not known."""
    measured: int = 0
    """Greatest size whose speed was measured; 0 if none was."""
    least_measured: int = 1
    """Least size whose speed was measured."""
    standbys: int = 0
    """Nodes that it has beside its size, as replacements."""
    standing: int = 0
    """Standbys that exist, with those that are ending."""
    resize_s: float = RESIZE_S
    """Seconds without training that a change of size costs."""
    size: int = 0
    """Nodes that exist, with those that are ending: their hosts are not free."""
    granted: int | None = None
    """What the last call granted; None if there was none. 0: the job is held back."""
    granted_at: float = -math.inf
    """Unix time at which :attr:`granted` has changed."""
    forced: bool = False
    """Whether that change was forced, and not made for the sake of speed."""
    spot_policy: SpotPolicy = "any"
    placed: Mapping[str, int] = field(default_factory=dict)
    """Nodes that exist in each pool, or may be created there, by its name; with standbys."""
    avoids: frozenset[str] = frozenset()
    """Pools in which no further nodes can be created."""

    @property
    def least(self) -> int:
        """Return the least allowed size."""
        return self.after(max(1, self.minimum) - 1)

    @property
    def most(self) -> int:
        """Return the greatest allowed size; sizes that no curve describes are left out.

        The one that follows on the greatest measured one is never left out: it may be far.
        """
        most = self.maximum
        if self.measured:  # a script that reports no steps could not grow otherwise
            known = max(TRUSTED * self.measured, self.after(self.measured))
            most = min(most, max(known, self.size, self.granted or 0))
        return max(self.least, self.fit(most))

    def fit(self, nodes: int) -> int:
        """Return the greatest allowed size with no more than these nodes; 0 if there is none."""
        if not self.sizes:
            return nodes // self.unit * self.unit
        index = bisect.bisect_right(self.sizes, nodes)
        return self.sizes[index - 1] if index else 0

    def after(self, nodes: int) -> int:
        """Return the least allowed size with more nodes; a very large one if there is none."""
        if not self.sizes:
            return (nodes // self.unit + 1) * self.unit
        index = bisect.bisect_right(self.sizes, nodes)
        return self.sizes[index] if index < len(self.sizes) else NONE

    def speed(self, nodes: int) -> float:
        """Return the speed with a number of nodes; only ratios have a meaning."""
        if self.curve is None:
            return float(nodes**ONE_SIZE)
        # The curve says nothing of much fewer nodes: there the speed falls with their number.
        known = max(nodes, self.least_measured / TRUSTED)
        a, b, c = self.curve
        time = a + b * (known - 1) + c * known * (known - 1)
        speed = nodes / max(time, FLATTEST * (a + b + c))
        # Nothing was measured there, so no smaller size is taken for a faster one.
        return min(speed, self.speed(self.least_measured)) if nodes < self.least_measured else speed

    @property
    def waits_since(self) -> float:
        """Return the Unix time since which it waits, if it is held back."""
        held_back = self.granted == 0 and math.isfinite(self.granted_at)
        return self.granted_at if held_back else self.queued_at


CLASSES: Mapping[str, int] = {"high": 1000, "low": -1000}
"""Priorities that names of DLRover's have here. Other names of classes have the priority 0."""


def name_of(namespace: str, name: str) -> str:
    """Return the name of a job among all jobs of a cluster."""
    return name if namespace == "default" else f"{namespace}/{name}"


def demand_of(
    job: ElasticJob, speed: MeasuredSpeed | None, *, queued_at: float, size: int
) -> Demand:
    """Return what a job asks for.

    It may have up to ``maxReplicas`` nodes if it scales by itself, else up to ``replicas``. Its
    ``priority`` is a whole number, ``high`` or ``low``.

    Args:
        job: the job, with its allocation.
        speed: what was measured of it; None if nothing was.
        queued_at: Unix time at which it was created.
        size: nodes that it has, with those that are ending.
    """
    worker, granted = job.worker, job.allocation
    scales = worker.scaling is not None and worker.scaling.mode == "auto"
    most, unit = worker.ceiling if scales else worker.replicas, worker.node_unit
    if scales and worker.scaling is not None and worker.scaling.node_unit is not None:
        chosen = math.lcm(unit, worker.scaling.node_unit)
        unit = chosen if -(-worker.minimum // chosen) * chosen <= most else unit
    sizes = tuple(size for size in worker.allowed_sizes if worker.minimum <= size <= most)
    number = CLASSES.get(worker.priority or "", 0) if worker.rank is None else worker.rank
    resize_s = speed.resize_s if speed is not None else None
    curve = None
    if speed is not None and speed.curve is not None:
        # Only ratios have a meaning, and the product of two such numbers must be finite.
        a, b, c = (part / math.fsum(speed.curve) for part in speed.curve)
        curve = a, b, c
    return Demand(
        name=name_of(job.metadata.namespace, job.metadata.name),
        minimum=worker.minimum,
        maximum=most,
        standbys=worker.standby_replicas,
        unit=unit,
        sizes=sizes,
        priority=number,
        queue=job.metadata.namespace,
        queued_at=queued_at,
        curve=curve,
        measured=speed.most if speed is not None else 0,
        least_measured=speed.least if speed is not None else 1,
        resize_s=RESIZE_S if resize_s is None else resize_s,
        size=size,
        granted=None if granted is None else granted.nodes,
        granted_at=-math.inf if granted is None else granted.since,
        forced=granted is not None and granted.forced,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Hosts of one topology domain, such as a rack, or of one spot market."""

    name: str
    nodes: int
    """Nodes for which the pool has hosts, used ones included."""
    spot: bool = False
    """Whether the hosts may be reclaimed at any time."""
    reclaimed_at: tuple[float, ...] = ()
    """Unix times at which hosts were reclaimed."""
    used: int = 0
    """Nodes of jobs that exist in the pool, or were granted there."""

    def usable(self, now: float) -> int:
        """Return the nodes that jobs may have beyond minima.

        They are no more than now if it keeps reclaiming. Minima may be on all of its hosts.
        """
        recent = sum(abs(now - at) < HORIZON_S for at in self.reclaimed_at)
        closed = self.spot and recent >= max(RECLAIMS, RECLAIMED * self.nodes)
        return min(self.nodes, self.used) if closed else self.nodes


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a job may have now."""

    nodes: int
    """Nodes that the job may have from now on; 0: it is held back."""
    goal: int
    """Nodes that it gets as soon as other jobs have given them back."""
    reason: str
    """Why, in words."""
    pools: Mapping[str, int] = field(default_factory=dict)
    """Where :attr:`nodes` and :attr:`standbys` are best placed, by the name of the pool."""
    forced: bool = False
    """Whether a change was forced by a loss of hosts or by the minimum of another job."""
    standbys: int = 0
    """Standbys that the job may have beside its nodes."""


@dataclass(slots=True)
class _Share:
    """A job while its size is decided."""

    demand: Demand
    nodes: int
    start: int
    """Nodes before this call."""
    steady: bool
    """Whether its size may be changed for a gain: the last change was long ago."""
    least: int
    most: int
    standbys: int = 0
    """Standbys for which there is room."""
    taker: str = ""
    """Job for which nodes are taken from it."""
    forced: bool = False
    """Whether it must give nodes back."""

    def change(self, nodes: int) -> float:
        """Return the change of the utility that another size would bring."""
        demand = self.demand
        return demand.weight * math.log(demand.speed(nodes) / demand.speed(self.nodes))

    def step(self) -> int:
        """Return the nodes of a step: about a tenth of the size, in whole units."""
        unit = self.demand.unit
        return max(unit, self.nodes // STEP // unit * unit)

    def fewer(self) -> int:
        """Return the next smaller size; the present one if it is the least."""
        return max(self.least, self.demand.fit(self.nodes - self.step()))

    def larger(self, room: int) -> int:
        """Return the next larger size, about a step away; the present one if there is no room.

        Args:
            room: nodes that may be added.
        """
        size = self.demand.fit(self.nodes + min(self.step(), room))
        if size <= self.nodes:  # the next allowed size may be far
            size = self.demand.after(self.nodes)
        return size if size - self.nodes <= room else self.nodes

    def more(self, free: int) -> int:
        """Return the next larger size that is worth it; the present one if there is none.

        Args:
            free: nodes that may be added.
        """
        step = self.larger(min(free, self.most - self.nodes)) - self.nodes
        if step <= 0:
            return self.nodes
        gain = self.demand.speed(self.nodes + step) / self.demand.speed(self.nodes) - 1
        worth = gain >= MIN_GAIN and gain * self.nodes >= WORTH * step
        return self.nodes + step if worth else self.nodes

    def cost(self) -> float:
        """Return what the first change of its size costs, in units of the utility."""
        changed = self.nodes != self.start or not self.start
        return 0.0 if changed else self.demand.weight * self.demand.resize_s / HORIZON_S


def allocate(
    demands: Sequence[Demand],
    pools: Sequence[Pool],
    now: float,
    *,
    hold_s: float = 300.0,
    busy: int = 0,
) -> dict[str, Allocation]:
    """Return the nodes of each job, by its name. Nothing is changed, and nothing is remembered.

    Minima come first: by priority, then jobs that have nodes, then the queue with the least, then
    the older job. Further nodes go where they raise the sum of ``weight · ln(speed)`` most. A
    minimum takes nodes above the minimum from others, those of low priority first. For the sake
    of speed alone, a node moves only if that outweighs the time of both changes.

    Args:
        demands: all jobs that have not ended.
        pools: all hosts, by topology domain.
        now: Unix time.
        hold_s: seconds for which a size that was granted is not changed for the sake of speed.
        busy: nodes of the pools that cannot be taken yet, although no job here has them.
    """
    usable = {pool.name: max(0, pool.usable(now)) for pool in pools}
    total = sum(usable.values())
    every = sum(max(0, pool.nodes) for pool in pools)
    stable = sum(usable[pool.name] for pool in pools if not pool.spot)
    order = _in_order(demands)
    shares, waiting = _admitted(order, every, stable, now, hold_s)
    free = _fitted(shares, total)
    free = _grown(shares.values(), free)
    _exchanged(shares.values(), free, max(1, int(CHURN * total)))
    granted = {
        name: replace(one, standbys=shares[name].standbys if name in shares else 0)
        for name, one in _when_gone(
            order, shares, waiting, total - busy, now, for_minima=every - total
        ).items()
    }
    return _placed(granted, order, pools, usable)


# --- Minima ---


def _has_nodes(demand: Demand) -> bool:
    """Return whether a job has nodes, or may take them."""
    return bool(demand.size or demand.granted)


def _in_order(demands: Iterable[Demand]) -> list[Demand]:
    """Return jobs in the order in which they get their minima.

    A job whose minimum was raised beyond what it has comes after those of its priority that run:
    it must not take the minimum of another one.
    """

    def turn(demand: Demand) -> tuple[bool, float, str]:
        raised = demand.least > max(demand.size, demand.granted or 0)
        return _has_nodes(demand) and raised, demand.queued_at, demand.name

    by_priority: dict[int, list[Demand]] = defaultdict(list)
    for demand in demands:
        by_priority[demand.priority].append(demand)
    used: dict[str, int] = defaultdict(int)
    found: list[Demand] = []
    for priority in sorted(by_priority, reverse=True):
        alike = sorted(by_priority[priority], key=turn)
        queues: dict[str, deque[Demand]] = defaultdict(deque)
        for demand in alike:
            if _has_nodes(demand):
                found.append(demand)
                used[demand.queue] += demand.least
            else:
                queues[demand.queue].append(demand)
        heap = [(used[name], waits[0].queued_at, name) for name, waits in queues.items()]
        heapq.heapify(heap)
        while heap:
            _, _, name = heapq.heappop(heap)
            demand = queues[name].popleft()
            found.append(demand)
            used[name] += demand.least
            if queues[name]:
                heapq.heappush(heap, (used[name], queues[name][0].queued_at, name))
    return found


def _admitted(
    order: Sequence[Demand], total: int, stable: int, now: float, hold_s: float
) -> tuple[dict[str, _Share], dict[str, str]]:
    """Return the jobs that get their minimum, and why the others do not.

    Args:
        order: all jobs, in the order in which they get their minimum.
        total: nodes of the cluster.
        stable: those that cannot be reclaimed.
        now: Unix time.
        hold_s: seconds for which a size is kept.
    """
    shares: dict[str, _Share] = {}
    waiting: dict[str, str] = {}
    first: Demand | None = None
    """A job that has waited so long that no younger one may start before it."""
    left, stable_left = total, stable
    running = sum(demand.least for demand in order if _has_nodes(demand))
    """Minima of the jobs with nodes that follow: no standby is worth one of them."""
    for demand in order:
        least, has_nodes = demand.least, _has_nodes(demand)
        # A job that starts must have room for its standbys. Later it gives them up one by one.
        needs = least + (0 if has_nodes else demand.standbys)
        running -= least if has_nodes else 0
        choosy = demand.spot_policy == "onDemandMin"
        on_stable = choosy and not has_nodes  # a lost stable host stops no job that has others
        room = min(left, stable_left) if on_stable else left
        # A job that waits for stable hosts needs none of the others.
        apart = left - stable_left if first is not None and first.spot_policy != "any" else 0
        if first is not None and not has_nodes and (choosy or needs > apart):
            waiting[demand.name] = f"held back: {first.name} waits before it"
            continue
        if needs > room:
            kind = "stable node" if on_stable else "node"
            possible = stable if on_stable else total
            beside = f" with {counted(needs - least, 'standby')}" if needs > least else ""
            waiting[demand.name] = (
                f"held back: it needs {counted(needs, kind)}{beside}, and the cluster has "
                f"{possible}"
                if needs > possible
                else f"held back: it needs {needs} {kind}s{beside}, and {room} are left by other "
                "jobs"
            )
            if needs <= possible and abs(now - demand.waits_since) > PATIENCE_S:
                first = first or demand
            continue
        left -= least
        standbys = min(demand.standbys, max(0, left - running if has_nodes else left))
        left -= standbys
        # What may be on any host leaves the stable ones to those that need them, if it can.
        stable_left = max(0, stable_left - least) if choosy else min(stable_left, left)
        start = demand.granted if demand.granted is not None else demand.size
        most = demand.most
        nodes = min(most, max(least, demand.fit(start)))
        held_s = max(0.0, min(hold_s, FORCED_S) if demand.forced else hold_s)
        steady = not start or abs(now - demand.granted_at) >= held_s
        shares[demand.name] = _Share(demand, nodes, start, steady, least, most, standbys)
    return shares, waiting


# --- Further nodes ---


def _fitted(shares: Mapping[str, _Share], total: int) -> int:
    """Take nodes above the minima until all jobs fit; return the nodes that are left.

    Those of low priority are taken first, and among them those whose loss is least.
    """
    free = total - sum(share.nodes + share.standbys for share in shares.values())
    newest = next((n for n, s in reversed(list(shares.items())) if not s.start), "")
    heap = [
        (share.demand.priority, _loss(share), index, share)
        for index, share in enumerate(shares.values())
        if free < 0 and share.fewer() < share.nodes
    ]
    heapq.heapify(heap)
    while free < 0 and heap:
        priority, _, index, share = heapq.heappop(heap)
        smaller = max(share.fewer(), share.demand.fit(share.nodes + free))
        free += share.nodes - smaller
        share.nodes, share.taker, share.forced = smaller, newest, True
        if share.fewer() < share.nodes:
            heapq.heappush(heap, (priority, _loss(share), index, share))
    return max(0, free)


def _loss(share: _Share) -> float:
    """Return the loss of utility for each node that the next step takes."""
    smaller = share.fewer()
    return -share.change(smaller) / max(1, share.nodes - smaller)


def _grown(shares: Iterable[_Share], free: int) -> int:
    """Give free nodes to jobs, where they bring most; return the nodes that are left."""

    steady = [share for share in shares if share.steady]
    heap = [entry for i, share in enumerate(steady) for entry in _wish(share, i, free)]
    heapq.heapify(heap)
    while heap and free > 0:
        _, index, larger = heapq.heappop(heap)
        share = steady[index]
        if larger - share.nodes <= free:
            free -= larger - share.nodes
            share.nodes = larger
        for entry in _wish(share, index, free):
            heapq.heappush(heap, entry)
    return free


def _exchanged(shares: Iterable[_Share], free: int, budget: int) -> None:
    """Move nodes between jobs where that raises the sum of utilities by more than it costs.

    Args:
        shares: the jobs.
        free: nodes that no job has.
        budget: nodes after which no further move begins.
    """
    movable = [share for share in shares if share.steady]
    donors = [(_loss(s), i, s.nodes) for i, s in enumerate(movable) if s.fewer() < s.nodes]
    takers = [entry for i, share in enumerate(movable) for entry in _wish(share, i, share.most)]
    heapq.heapify(donors)
    heapq.heapify(takers)
    gave: set[int] = set()
    took: set[int] = set()
    while takers and donors and budget > 0:
        # If the cheapest node is not worth it to the job that gains most, it is to none.
        if -takers[0][0] <= (1 + BETTER) * donors[0][0]:
            return
        _, index, larger = heapq.heappop(takers)
        share = movable[index]
        if index in gave:
            continue
        moved, gain = larger - share.nodes, share.change(larger) - share.cost()
        loss, found, given = 0.0, free, list[tuple[float, int, int]]()
        while donors and found < moved:
            entry = heapq.heappop(donors)
            donor = movable[entry[1]]
            if donor.nodes != entry[2] or entry[1] in took or entry[1] == index:
                continue  # it has changed since, or it takes nodes itself
            smaller = donor.fewer()
            loss += donor.cost() - donor.change(smaller)
            given.append(entry)
            found += donor.nodes - smaller
            donor.nodes = smaller
            if donor.fewer() < donor.nodes:
                heapq.heappush(donors, (_loss(donor), entry[1], donor.nodes))
        if found < moved or gain <= (1 + BETTER) * loss:
            for entry in reversed(given):
                movable[entry[1]].nodes = entry[2]
                heapq.heappush(donors, entry)
            continue
        free, budget = found - moved, budget - moved
        share.nodes = larger
        took.add(index)
        for _, number, _ in given:
            gave.add(number)
            movable[number].taker = share.demand.name
        for wish in _wish(share, index, share.most):
            heapq.heappush(takers, wish)


def _wish(share: _Share, index: int, room: int) -> Iterator[tuple[float, int, int]]:
    """Yield the gain of a node, below 0, and the larger size, if a job would gain from it.

    Args:
        share: the job.
        index: its index, which stands between the two.
        room: nodes that may be added.
    """
    larger = share.more(room)
    if larger > share.nodes:
        yield -share.change(larger) / (larger - share.nodes), index, larger


# --- What may be taken now ---


def _when_gone(
    order: Sequence[Demand],
    shares: Mapping[str, _Share],
    waiting: Mapping[str, str],
    total: int,
    now: float,
    *,
    for_minima: int = 0,
) -> dict[str, Allocation]:
    """Return what each job may have now: less at once, more only of hosts that are seen free.

    What was granted to a job counts as taken until less was granted to it. So each of the returned
    allocations is right beside the old ones of all other jobs, whichever are written.

    Args:
        order: all jobs, in the order in which they get free hosts.
        shares: the jobs that have a size.
        waiting: why each of the others has none.
        total: nodes that can be used now.
        now: Unix time.
        for_minima: further nodes that only the minimum of a job may have.
    """
    granted: dict[str, Allocation] = {}
    free = total
    shrinks = False
    """Whether hosts will be free soon, so that a growth is worth a short wait."""
    for demand in order:
        share = shares.get(demand.name)
        goal = share.nodes if share is not None else 0
        before = demand.granted if demand.granted is not None else demand.size
        kept = share.standbys if share is not None and _has_nodes(demand) else 0
        free -= max(demand.size, before) + max(demand.standing, kept)
        ends = demand.size > before and abs(now - demand.granted_at) < ENDING_S
        shrinks = shrinks or goal < before or ends
    for demand in order:
        share = shares.get(demand.name)
        if share is None:
            text = waiting[demand.name]
            if _has_nodes(demand):
                text = text.replace("held back", f"{demand.granted or demand.size}→0", 1)
            granted[demand.name] = Allocation(0, 0, text, forced=True)
            continue
        goal, before = share.nodes, share.start
        if goal <= before:
            forced = share.forced if goal < before else demand.forced
            granted[demand.name] = Allocation(goal, goal, _kept(share, free), forced=forced)
            continue
        has, standbys = max(demand.size, before), 0 if _has_nodes(demand) else share.standbys
        nodes, short = goal, goal + standbys - has - free
        if short > 0:
            nodes = demand.fit(goal - short)
            if share.least + standbys - has <= free + for_minima:
                nodes = max(nodes, share.least)
            if nodes <= before or nodes < share.least or (shrinks and before):
                text = f"{before}→{goal}: waits until other jobs have given "
                text += f"{counted(short, 'node')} back"
                granted[demand.name] = Allocation(before, goal, text, forced=demand.forced)
                continue
        free -= max(0, nodes + standbys - has)
        if before:
            gain = demand.speed(nodes) / demand.speed(before) - 1
            add = "adds" if nodes == before + 1 else "add"
            text = (
                f"{before}→{nodes}: {counted(nodes - before, 'more node')} {add} {_percent(gain)}"
            )
        else:
            text = f"{counted(nodes, 'node')}: the minimum is {demand.least}"
        if nodes < goal:
            text += f"; {goal - nodes} more when other jobs have given them back"
        granted[demand.name] = Allocation(nodes, goal, text)
    return granted


def _kept(share: _Share, free: int) -> str:
    """Return why a job does not get more nodes than before, in words."""
    demand, before, nodes = share.demand, share.start, share.nodes
    if nodes < before:
        to = f", {share.taker} gets them" if share.taker else ""
        return f"{before}→{nodes}: {counted(before - nodes, 'node')} given back{to}"
    kept = f"{counted(nodes, 'node')}: "
    if demand.after(nodes) > share.most:
        known = demand.after(share.most) <= demand.maximum
        return kept + ("the speed with more is not known yet" if known else "the maximum")
    larger = share.larger(share.most - nodes)
    gain = demand.speed(larger) / demand.speed(nodes) - 1
    more = f"{counted(larger - nodes, 'more node')} would add {_percent(gain)}"
    if share.more(share.most) == nodes:
        return f"{kept}{more}"
    if not share.steady:
        return f"{kept}{more}; the size was changed a short time ago"
    return f"{kept}{more}, and {'no node is' if free <= 0 else 'too few nodes are'} free"


def _percent(gain: float) -> str:
    """Return a gain in words."""
    return f"{100 * gain:.0f} %"


# --- Places ---


class _Rooms:
    """Free nodes of some pools, in order of their number."""

    def __init__(self, left: Mapping[str, int]) -> None:
        self.left = dict(left)
        self._order = sorted((nodes, name) for name, nodes in left.items())

    def take(self, here: dict[str, int], name: str, nodes: int) -> None:
        """Move free nodes of a pool to a job.

        Args:
            here: nodes of the job by pool, which grow.
            name: the pool.
            nodes: how many; no more than are free are moved.
        """
        left = self.left.get(name, 0)
        nodes = min(nodes, left)
        if nodes <= 0:
            return
        here[name] = here.get(name, 0) + nodes
        self._order.pop(bisect.bisect_left(self._order, (left, name)))
        self.left[name] = left - nodes
        bisect.insort(self._order, (left - nodes, name))

    def keep(self, here: dict[str, int], placed: Mapping[str, int], nodes: int) -> None:
        """Place existing nodes of a job where they are, until it has a number of nodes.

        Args:
            here: nodes of the job by pool, which grow.
            placed: existing nodes by pool.
            nodes: nodes of the job after it, at most.
        """
        for name in sorted(placed, key=lambda n: (-placed[n], n)):
            self.take(here, name, min(placed[name] - here.get(name, 0), nodes - sum(here.values())))

    def add(self, here: dict[str, int], nodes: int, avoids: frozenset[str]) -> None:
        """Place further nodes: beside others of the job, else in the smallest pool with room.

        Args:
            here: nodes of the job by pool, which grow.
            nodes: nodes of the job after it, at most.
            avoids: pools to leave out.
        """
        for name in sorted(here.keys() - avoids, key=lambda n: (-here[n], n)):
            self.take(here, name, nodes - sum(here.values()))
        while (missing := nodes - sum(here.values())) > 0:
            order = [one for one in self._order if one[1] not in avoids] if avoids else self._order
            if not order:
                return
            fits = bisect.bisect_left(order, (missing, ""))
            left, name = order[min(fits, len(order) - 1)]
            if left <= 0:
                return
            self.take(here, name, missing)


def _placed(
    granted: Mapping[str, Allocation],
    order: Sequence[Demand],
    pools: Sequence[Pool],
    usable: Mapping[str, int],
) -> dict[str, Allocation]:
    """Return the allocations with the pools in which their nodes are best placed.

    Minima that need stable hosts are placed first. Nodes stay where they are, if they can. A job
    gives up the pools first in which it has the fewest nodes, and grows where it has the most.
    Nodes above the minimum take spot hosts first.

    Args:
        granted: nodes of each job.
        order: all jobs, in the order in which they choose.
        pools: all hosts.
        usable: nodes that each pool has for jobs.
    """
    stable = _Rooms({pool.name: usable[pool.name] for pool in pools if not pool.spot})
    spot = _Rooms({pool.name: usable[pool.name] for pool in pools if pool.spot})
    # Pools that keep reclaiming have these for minima alone, and only if no other pool has room.
    last = _Rooms({pool.name: max(0, pool.nodes - usable[pool.name]) for pool in pools})
    where: dict[str, dict[str, int]] = {demand.name: {} for demand in order}
    most = {name: one.nodes + (one.standbys if one.nodes else 0) for name, one in granted.items()}
    left = sum(stable.left.values())
    for choosy, rooms in ((True, (stable,)), (False, (spot, stable, last))):
        least: list[tuple[Demand, dict[str, int], int]] = []
        for demand in order:
            if (demand.spot_policy == "onDemandMin") is choosy:
                nodes = min(demand.least, granted[demand.name].nodes)
                if choosy:  # if there are too few, the first ones have them
                    nodes = min(nodes, left)
                    left -= nodes
                least.append((demand, where[demand.name], nodes))
        for demand, here, nodes in least:
            for room in rooms:
                room.keep(here, demand.placed, nodes)
        for demand, here, nodes in least:
            for room in rooms:
                room.add(here, nodes, demand.avoids)
    for demand in order:  # what is there stays, before anything new takes its place
        for room in (stable, spot):
            room.keep(where[demand.name], demand.placed, most[demand.name])
    for demand in order:
        for room in (spot, stable):
            room.add(where[demand.name], most[demand.name], demand.avoids)
        nodes = min(demand.least, granted[demand.name].nodes)
        last.add(where[demand.name], nodes, demand.avoids)
    return {name: replace(one, pools=where[name]) for name, one in granted.items()}
