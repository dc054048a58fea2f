"""Finds a job that has become slow, and what has made it slow: from windows of some steps each.

A step is slow against the usual steps of the same round, and a node against the other nodes. No
limit is absolute. What grew with the time of a step is its cause: the wait for data, the garbage
collector, the CPU that others took, the network, or the CPU time of one node or of all. What
differs from the first steps on is the loader of one node, its link, or the part of the model at
its place.

Most slow jobs are not slow because of a machine, so the result is told and nothing else.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_high

from dlrover_py.protocol.diagnosis import SlowKind

KEPT = 64
"""Number of the newest windows that count as usual."""
PAST = 256
"""Number of the newest windows that a slow job is compared with."""
FEWEST = 10
"""Number of usual windows from which on a change is looked for."""
LEAST_SHIFT = 0.10
"""A window is slow from this share above the usual time of a step; after a slow one, from half."""
EVIDENT_SHIFT = 0.07
"""A job is slow from this share on if one part of one node explains it in each of the windows."""
EVIDENT_KINDS = frozenset({SlowKind.DATA, SlowKind.CODE, SlowKind.MACHINE})
"""Causes that may do so: times of the script itself. Others come and go in jobs in good health."""
IN_A_ROW = 6
"""Number of slow windows in a row that make a slow job, at least."""
LEAST_DEVIATION = 0.03
"""The usual deviation is at least this share of the usual time: even steps vary by that much."""
SLACK = 2.0
"""Deviations that the cumulative sum leaves out in each window."""
MOST_DEVIATIONS = 6.0
"""Deviations that one window adds at most, so that one window alone is never enough."""
ALARM = 12.0
"""Cumulative sum of deviations from which on the job is slow."""
BEYOND_PAST = 1.08
"""A slow job is this much slower than nearly all windows before: what came and went is usual."""
PEER_WINDOWS = 10
"""Windows in a row in which a node must wait for data longer than others, without any change."""
PEER_DEVIATIONS = 6.0
"""Deviations of the other nodes above which its wait must be."""
PEER_TIMES = 2.0
"""Times the wait of the other nodes that its wait must be."""
SHARE_OF_GROWTH = 0.5
"""A part that grew by this share of the growth of a step explains it."""
STAGE_TIMES = 1.5
"""Times the CPU time of the other nodes that a place needs in each window from the first one on,
so that its part of the model is larger. The node that logs needs 1.3 times as much."""
STAGE_BUSY = 0.8
"""CPU seconds of the training thread in a second of a step at this place, at least: it never waits
for others."""
LINK_TIMES = 4.0
"""Times that the links of the other nodes are faster than a slow link, at least. Links between
racks, and nodes with other traffic than the rest, differ by 2 or 3 times."""
LINK_WAIT = 0.3
"""Share of a step in which a slow link must be waited for, at least."""
LINK_TRAFFIC = 0.5
"""Share of the traffic of the other nodes that must go over a slow link, at least. With less
traffic, the wait is one for acknowledgements."""
LINK_NODES = 4
"""Nodes whose links are known, at least: a slow one at most halves what is compared with."""
LINK_SPEED = 10e6
"""Bytes a second of the other links, at least. With less, all wait for acknowledgements only."""
CLOCKS = 0.05
"""Growth of the share of GPUs with slowed clocks that shows a slow machine."""
THROTTLED = 0.10
"""Growth of the share of throttled periods, or of the time in which a process waited for a CPU,
that shows that others take the CPU."""
RESENT = 0.02
"""Share of TCP segments sent again, or its growth, that shows a bad link. Networks in good health
send less than a thousandth again."""
LACKS = {"throttled": "CPU", "pressure": "CPU", "memory": "memory", "io": "storage"}
"""What a node lacks, by the part that shows it."""
ADVICE = {
    SlowKind.DATA: "Check its storage and its loader: more loader workers",
    SlowKind.CODE: "Look at the garbage collector, and at the length of samples since then",
    SlowKind.NEIGHBOUR: "Raise the CPU limit, or move what else runs there",
    SlowKind.MACHINE: "Compare its clock and temperature; drain it if its work is that of others",
    SlowKind.LINK: "Check cable, port, errors and other traffic; --network-check measures links",
    SlowKind.STAGE: "Split the model or its work more evenly; another host changes nothing",
    SlowKind.UNKNOWN: "See `dlrover job stacks`; check GPU clocks and the network",
}
"""What to do first about a slow job."""
FOR_MEMORY = "Raise the memory limit, or move what else runs there"
FOR_STORAGE = "Look at its disk, and at what else reads and writes there"
WEIGHT = 0.1
"""Weight of the newest window in the usual parts of a node."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a step on one node: its worker with the greatest part."""

    data: float = 0.0
    """Seconds of a step in which it waited for data."""
    gc: float = 0.0
    """Seconds of a step in which Python collected garbage."""
    cpu: float = 0.0
    """CPU seconds of a step."""
    throttled: float = 0.0
    """Share of the periods in which its CPU limit has stopped it, from 0 to 1."""
    pressure: float = 0.0
    """Share of the time in which some process of the node waited for a CPU, from 0 to 1."""
    memory: float = 0.0
    """Share of the time in which some process waited for memory: pages had to be made free, or read
    again."""
    io: float = 0.0
    """Share of the time in which some process of the node waited for storage, from 0 to 1."""
    sending: float = 0.0
    """Seconds of a step in which its busiest connection waited for the network."""
    clocks: float = 0.0
    """Share of its GPUs whose clocks are slowed by heat, power or a fault, from 0 to 1."""
    peer: str = ""
    """The node at the other end of that connection; empty if it is not known."""
    speed: float = 0.0
    """Bytes that all its connections send for each second of that wait; 0 if it is not known."""
    resent: float = 0.0
    """Share of its TCP segments that were sent again, from 0 to 1."""
    errors: float = 0.0
    """Packets a second that its network interfaces have lost or found damaged."""

    def towards(self, other: "Parts", weight: float) -> "Parts":
        """Return parts between these and others; with weight 1 the others."""
        return Parts(
            data=self.data + (other.data - self.data) * weight,
            gc=self.gc + (other.gc - self.gc) * weight,
            cpu=self.cpu + (other.cpu - self.cpu) * weight,
            throttled=self.throttled + (other.throttled - self.throttled) * weight,
            pressure=self.pressure + (other.pressure - self.pressure) * weight,
            memory=self.memory + (other.memory - self.memory) * weight,
            io=self.io + (other.io - self.io) * weight,
            sending=self.sending + (other.sending - self.sending) * weight,
            clocks=self.clocks + (other.clocks - self.clocks) * weight,
            peer=other.peer,
            speed=self.speed + (other.speed - self.speed) * weight,
            resent=self.resent + (other.resent - self.resent) * weight,
            errors=self.errors + (other.errors - self.errors) * weight,
        )


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps of the whole job."""

    step: int
    """The first step of the window."""
    step_s: float
    """Seconds of a step, without saves and loads of checkpoints; more than 0."""
    nodes: Mapping[str, Parts]
    """The parts of a step on each node of the round."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A node that needed far more CPU time than the others in a whole round."""

    node: str
    """The node."""
    rank: int
    """Its node rank in that round."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """Why a job is slow."""

    kind: SlowKind
    """The cause."""
    node: str
    """The node that makes it slow; empty if no node is singled out."""
    since: int
    """First step of the slow time."""
    step_s: float
    """Seconds of a step now."""
    usual_s: float
    """Seconds of a usual step; the same as ``step_s`` if it was never faster."""
    part: float = 0.0
    """The part that explains it: seconds of a step, a share of the time, or a speed."""
    others: float = 0.0
    """This part as it was before. If nothing has changed: this part on the other nodes."""
    peer: str = ""
    """The other end of a slow link; or the node that had the same place, or was at another place,
    with the same difference. Empty if that is not known."""
    clocks: bool = False
    """Whether ``part`` is the share of its GPUs whose clocks are slowed."""
    speeds: bool = False
    """Whether ``part`` and ``others`` are bytes a second of links."""
    resends: bool = False
    """Whether ``part`` is the share of its TCP segments that were sent again."""
    lost: str = ""
    """What the network of ``node`` has lost, in words; empty if it is little, or not known."""
    lacks: str = "CPU"
    """What a node lacks because of its neighbours: a value of :data:`LACKS`."""

    @property
    def shift(self) -> float:
        """Times that a step takes of the usual time; or that the part is worse than elsewhere."""
        if self.usual_s < self.step_s:
            return self.step_s / self.usual_s
        if self.speeds:
            return self.others / max(self.part, 1e-6)
        return self.part / max(self.others, 1e-6)


@dataclass(slots=True)
class SlowWatch:
    """The windows of one round. A new round has a new watch: its usual time is another one."""

    ranks: Mapping[str, int] = field(default_factory=dict)
    """Node rank of each node in this round."""
    earlier: Sequence[Excess] = ()
    """What differed in earlier rounds with the same number of nodes."""
    excess: Excess | None = None
    """The node that needs far more CPU time than the others since the first window, if any."""
    slow: Slowness | None = None
    """Why the job is slow now; None if it is not."""
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Times of a step in windows that were not slow."""
    _past: deque[float] = field(default_factory=lambda: deque(maxlen=PAST))
    """Times of a step in all windows that came before the present run of slow ones."""
    _run: list[Window] = field(default_factory=list)
    """The present run of slow windows: the first one, and the newest ones."""
    _nearly: list[Window] = field(default_factory=list)
    """Windows at the begin of the run that are nearly slow. They are usual ones if it is none."""
    _since: int = 0
    """First step of the run, without these windows if there are others."""
    _count: int = 0
    """Number of the other windows in the run."""
    _sum: float = 0.0
    _told: bool = False
    """Whether the run has made the job slow."""
    _parts: dict[str, Parts] = field(default_factory=dict)
    """Usual parts of each node."""
    _odd: tuple[str, int, int] = ("", 0, 0)
    """The node that waits longest for data, since how many windows in a row, and from which
    step."""
    _ends: tuple[frozenset[str], int, int] = (frozenset(), 0, 0)
    """The nodes that are an end of all slow links, since how many windows in a row, and from which
    step."""
    _uneven: tuple[str, int, int, int] | None = ("", 0, 0, 0)
    """The node that needs far more CPU time than the others, in how many windows, in how many not,
    and from which step; None if it was not the same from the first window on."""

    def saw(self, window: Window) -> None:
        """Take in the next window, and judge again whether the job is slow, and why."""
        self._compare(window)
        known = [*self._usual, *(one.step_s for one in self._nearly)]
        usual = median(known) if len(known) >= FEWEST else None
        if usual is None or window.step_s < (1 + LEAST_SHIFT / 2) * usual:
            self._end_run()
            self._take_usual(window)
            self.slow = self._against_peers(window)
            return
        self._run = [*self._run[:1], *self._run[1:][-(IN_A_ROW - 1) :], window]
        newest = self._run[-IN_A_ROW:]
        times = sorted(one.step_s for one in newest)
        if not (self._count or self._told) and window.step_s < (1 + LEAST_SHIFT) * usual:
            self._since = self._run[0].step
            self._nearly.append(window)
            if len(self._nearly) > KEPT:
                self._take_usual(self._nearly.pop(0))
            if self._is_evident(newest, usual):
                self._told, self._nearly = True, []
            explained = self._explain(newest, usual, median(times)) if self._told else None
            self.slow = explained or self._against_peers(window)
            return
        deviation = 1.4826 * median(abs(one - usual) for one in known)
        deviation = max(deviation, LEAST_DEVIATION * usual)
        deviations = min((window.step_s - usual) / deviation, MOST_DEVIATIONS)
        self._sum = max(0.0, self._sum + deviations - SLACK)
        if not (self._count or self._told):
            self._since = window.step
        self._count += 1
        if self._count >= KEPT:  # it lasts for so long that it is the usual time now
            self._usual.clear()
            self._usual.extend(one.step_s for one in self._run)
            self._parts = dict(window.nodes)
            self._end_run()
            self.slow = None
            return
        past = sorted(self._past)[int(0.95 * (len(self._past) - 1))]
        least = max((1 + LEAST_SHIFT) * usual, BEYOND_PAST * past)
        shown = self._count >= IN_A_ROW and self._sum >= ALARM and times[1] >= least
        self._told = self._told or shown or self._is_evident(newest, usual)
        if self._told:
            self.slow = self._explain(newest, usual, median(times))

    def _is_evident(self, newest: Sequence[Window], usual: float) -> bool:
        """Return whether one part of one node explains each of the windows by itself.

        A smaller change is enough then: other things than a fault seldom do that.

        Args:
            newest: The newest windows of the run.
            usual: Seconds of a usual step.
        """
        level = median(one.step_s for one in newest)
        if len(newest) < IN_A_ROW or level < (1 + EVIDENT_SHIFT) * usual:
            return False
        causes = [self._explain([window], usual, window.step_s) for window in newest]
        (kind, node), *others = {(one.kind, one.node) for one in causes}
        return not others and node != "" and kind in EVIDENT_KINDS

    def _end_run(self) -> None:
        """End the run of slow windows: what it reached belongs to the past."""
        for window in self._nearly:
            self._take_usual(window)
        self._past.extend(one.step_s for one in self._run)
        self._run, self._nearly = [], []
        self._count, self._sum, self._told = 0, 0.0, False

    def _take_usual(self, window: Window) -> None:
        """Take in a window that is not slow."""
        self._usual.append(window.step_s)
        self._past.append(window.step_s)
        self._parts = {
            name: self._parts.get(name, parts).towards(parts, WEIGHT)
            for name, parts in window.nodes.items()
        }

    def _against_peers(self, window: Window) -> Slowness | None:
        """Return the slowness of a node that waits far longer for data than the others.

        It must be the same node in ``PEER_WINDOWS`` calls in a row. Each call counts as one window.
        Otherwise, return that of a link which is much slower than the others, or of a place which
        has more to compute since the first window. None if there is none.
        """
        link = self._link_against_peers(window)
        return self._data_against_peers(window) or link or self._stage(window)

    def _compare(self, window: Window) -> None:
        """Note the node that needs far more CPU time than the others, in all windows so far.

        One window in ten may be another one, such as one with an evaluation.
        """
        if self._uneven is None:
            return
        cpu = {name: parts.cpu for name, parts in window.nodes.items()}
        node = max(cpu, key=lambda name: (cpu[name], name))
        others = [seconds for name, seconds in cpu.items() if name != node]
        # Agents that do not report the CPU time say 0.
        more = bool(others) and cpu[node] >= STAGE_TIMES * median(others) > 0
        first, count, missed, step = self._uneven
        if not more or cpu[node] < STAGE_BUSY * window.step_s or first not in ("", node):
            self._uneven = (first, count, missed + 1, step)
            if not count or PEER_WINDOWS * missed >= count:
                self._uneven = self.excess = None
            return
        self._uneven = (node, count + 1, missed, step if count else window.step)
        if count + 1 >= PEER_WINDOWS and node in self.ranks:
            self.excess = Excess(node, self.ranks[node])

    def _stage(self, window: Window) -> Slowness | None:
        """Return the slowness of a place that has more to compute; None if there is none.

        If the same node had the difference at another place before, then the machine has it.
        """
        excess = self.excess
        if excess is None or self._uneven is None or excess.node not in window.nodes:
            return None
        cpu = window.nodes[excess.node].cpu
        others = median(p.cpu for name, p in window.nodes.items() if name != excess.node)
        moved = any(one.node == excess.node and one.rank != excess.rank for one in self.earlier)
        peers = [o.node for o in self.earlier if o.rank == excess.rank and o.node != excess.node]
        return Slowness(
            SlowKind.MACHINE if moved and not peers else SlowKind.STAGE,
            excess.node,
            self._uneven[3],
            window.step_s,
            window.step_s,
            cpu,
            others,
            peers[-1] if peers else "",
        )

    def _data_against_peers(self, window: Window) -> Slowness | None:
        """Return the slowness of a node that waits far longer for data than the others, if any."""
        # Stages of a pipeline behind the first one load nothing, and are no measure.
        waits = {name: parts.data for name, parts in window.nodes.items() if parts.data > 0}
        if len(waits) < 2:
            return None
        node = max(waits, key=lambda name: (waits[name], name))
        others = [seconds for name, seconds in waits.items() if name != node]
        middle = median(others)
        deviation = 1.4826 * median(abs(one - middle) for one in others)
        least = max(LEAST_SHIFT * window.step_s, PEER_DEVIATIONS * deviation)
        if waits[node] - middle < least or waits[node] < PEER_TIMES * middle:
            self._odd = ("", 0, 0)
            return None
        same = self._odd[0] == node
        self._odd = (node, self._odd[1] + 1, self._odd[2]) if same else (node, 1, window.step)
        if self._odd[1] < PEER_WINDOWS:
            return None
        return Slowness(
            SlowKind.DATA,
            node,
            self._odd[2],
            window.step_s,
            window.step_s,
            waits[node],
            middle,
        )

    def _link_against_peers(self, window: Window) -> Slowness | None:
        """Return the slowness of a link that is much slower than those of the other nodes, if any.

        Waits are not compared: nodes with more traffic wait longer. The speed while they wait is.
        A node that is an end of all slow links, in ``PEER_WINDOWS`` calls in a row, has the link.
        """
        known = {name: parts for name, parts in window.nodes.items() if parts.speed > 0}
        if len(known) < LINK_NODES:
            return None
        # The higher one of two: a slow node is an end of its own link and of one of another node.
        others = median_high(parts.speed for parts in known.values())
        traffic = median(parts.speed * parts.sending for parts in known.values())
        slow = {
            name: parts
            for name, parts in known.items()
            if parts.peer  # else it may be a store outside of the job
            and LINK_TIMES * parts.speed <= others
            and parts.sending >= LINK_WAIT * window.step_s
            and parts.speed * parts.sending >= LINK_TRAFFIC * traffic
        }
        ends = [frozenset((name, parts.peer)) for name, parts in slow.items()]
        common = ends[0].intersection(*ends) if ends and others >= LINK_SPEED else frozenset()
        before, count, since = self._ends
        held = before & common
        self._ends = (held, count + 1, since) if held else (common, 1, window.step)
        if not held or count + 1 < PEER_WINDOWS:
            return None
        node = min(held)  # one of both ends, if there is one slow link: always the same
        peer = slow[node].peer if node in slow else min(n for n in slow if slow[n].peer == node)
        return Slowness(
            SlowKind.LINK,
            node,
            since,
            window.step_s,
            window.step_s,
            min(parts.speed for parts in slow.values()),
            others,
            peer,
            speeds=True,
        )

    def _explain(self, newest: Sequence[Window], usual: float, level: float) -> Slowness:
        """Return what has grown with the time of a step.

        Args:
            newest: The newest windows of the run, at least one.
            usual: Seconds of a usual step.
            level: Seconds of a step now.
        """
        since = self._since
        grown = level - usual
        now = {name: _mean([w.nodes[name] for w in newest if name in w.nodes])
               for name in newest[-1].nodes}  # fmt: skip
        before = {name: self._parts.get(name, parts) for name, parts in now.items()}

        def growth(part: str) -> dict[str, float]:
            return {n: getattr(now[n], part) - getattr(before[n], part) for n in now}

        def found(kind: SlowKind, part: str, least: float) -> Slowness | None:
            grew = growth(part)
            node = max(grew, key=lambda name: (grew[name], name))
            if grew[node] < least:
                return None
            # Most nodes together: no single one makes the job slow.
            others = [one for name, one in grew.items() if name != node]
            alike = bool(others) and median(others) >= 0.5 * grew[node]
            value, old = getattr(now[node], part), getattr(before[node], part)
            named = "" if alike else node
            lacks, clocks = LACKS.get(part, "CPU"), part == "clocks"
            return Slowness(
                kind, named, since, level, usual, value, old, clocks=clocks, lacks=lacks
            )

        least = SHARE_OF_GROWTH * grown
        for kind, part, limit in (
            (SlowKind.DATA, "data", least),
            (SlowKind.CODE, "gc", least),
            (SlowKind.NEIGHBOUR, "throttled", THROTTLED),
            (SlowKind.MACHINE, "clocks", CLOCKS),
        ):
            if (one := found(kind, part, limit)) is not None:
                return one
        if (link := self._by_link(now, before, least)) is not None:
            node, peer = link
            value, old = (now[node].sending, before[node].sending) if node else (0.0, 0.0)
            lost = _lost(now[node]) if node else ""
            return Slowness(SlowKind.LINK, node, since, level, usual, value, old, peer, lost=lost)
        machine = self._by_cpu(now, before, grown / usual)
        if machine is not None:
            kind, node = machine
            value, old = (now[node].cpu, before[node].cpu) if node else (0.0, 0.0)
            return Slowness(kind, node, since, level, usual, value, old)
        # A burst in one of the windows is no bad link, though it raises the mean.
        often = [
            window
            for window in newest
            if any(
                p.resent - before[n].resent >= RESENT for n, p in window.nodes.items() if n in now
            )
        ]
        if 2 * len(often) > len(newest) and (one := found(SlowKind.LINK, "resent", RESENT)):
            return replace(one, resends=True)
        for part in ("pressure", "memory", "io"):
            if (one := found(SlowKind.NEIGHBOUR, part, THROTTLED)) is not None:
                return one
        return Slowness(SlowKind.UNKNOWN, "", since, level, usual)

    def _by_link(
        self, now: Mapping[str, Parts], before: Mapping[str, Parts], least: float
    ) -> tuple[str, str] | None:
        """Return the two ends of a slow link, the worse one first; None if no link is slow.

        Most slow connections have one node in common, at one of their ends. Its link is the slow
        one. If there is none, no node is named: the network itself is slow.

        Args:
            now: The parts of each node now.
            before: Its usual parts.
            least: Growth of the wait for the network that explains the growth of a step.
        """
        grew = {name: parts.sending - before[name].sending for name, parts in now.items()}
        slow = [name for name in grew if grew[name] >= least]
        if not slow:
            return None
        worst = max(slow, key=lambda name: (grew[name], name))
        ends = Counter(end for name in slow for end in {name, now[name].peer} - {""})
        (first, most), *rest = ends.most_common()
        if len(slow) > 1 and rest and rest[0][1] == most:
            both = {worst, now[worst].peer}
            if len(slow) > 2 or set(ends) != both:
                return "", ""  # no end is in more slow connections than the others
            first = worst  # both ends of one link
        elif len(slow) == 1:
            first = worst
        other = next((n for n in sorted(slow) if now[n].peer == first and n != first), "")
        return first, now[first].peer if first in slow else other

    def _by_cpu(
        self, now: Mapping[str, Parts], before: Mapping[str, Parts], rise: float
    ) -> tuple[SlowKind, str] | None:
        """Return whether one node, or all, need more CPU time for a step; None if none does.

        Nodes that wait for a slow one sleep. So only the slow one needs more CPU time.

        Args:
            now: The parts of each node now.
            before: Its usual parts.
            rise: The growth of a step as a share of the usual time.
        """
        grew = {
            name: parts.cpu / before[name].cpu - 1
            for name, parts in now.items()
            if before[name].cpu > 0
        }
        if len(grew) < len(now) or not grew:
            return None
        node = max(grew, key=lambda name: (grew[name], name))
        if grew[node] < SHARE_OF_GROWTH * rise:
            return None
        others = [one for name, one in grew.items() if name != node]
        if not others or median(others) >= 0.5 * grew[node]:
            return SlowKind.CODE, ""
        return SlowKind.MACHINE, node


def _mean(parts: Sequence[Parts]) -> Parts:
    """Return the mean of parts, of which there is at least one."""
    mean = parts[0]
    for count, one in enumerate(parts[1:], start=2):
        mean = mean.towards(one, 1 / count)
    return mean


def in_words(slow: Slowness) -> str:
    """Return why a job is slow, and what to do first, in one line."""
    who = f"node {slow.node}" if slow.node else "each node"
    if slow.usual_s < slow.step_s:
        more = 100 * (slow.step_s / slow.usual_s - 1)
        text = f"a step takes {_s(slow.step_s)} instead of {_s(slow.usual_s)} (+{more:.0f} %)"
        text += f" since step {slow.since}; "
        before = "before"
    else:
        text, before = f"since step {slow.since}, ", "on the other nodes"
    part, others = slow.part, slow.others
    match slow.kind:
        case SlowKind.DATA:
            text += f"{who} waits {_s(part)} a step for data, {_s(others)} {before}"
        case SlowKind.NEIGHBOUR:
            verb = "waits for" if slow.lacks == "storage" else "lacks"
            text += f"{who} {verb} {slow.lacks} {100 * part:.0f} % of the time, "
            text += f"{100 * others:.0f} % {before}"
        case SlowKind.MACHINE if slow.clocks:
            text += f"the clocks of {100 * part:.0f} % of the GPUs of {who} are slowed by heat, "
            text += f"power or a fault, {100 * others:.0f} % {before}"
        case SlowKind.MACHINE:
            text += f"only {who} needs more CPU time: {_s(part)} a step, {_s(others)} {before}"
            text += "" if slow.usual_s < slow.step_s else ", and did so with another node rank"
        case SlowKind.STAGE:
            text += f"{who} needs {_s(part)} CPU time a step, {_s(others)} {before}"
            text += f", as {slow.peer} did with this node rank" if slow.peer else ""
        case SlowKind.LINK if slow.resends:
            text += f"{who} sends {100 * part:.1f} % of its TCP segments again, "
            text += f"{100 * others:.1f} % {before}"
        case SlowKind.LINK if slow.node:
            link = f"between {slow.node} and {slow.peer}" if slow.peer else f"of {who}"
            if slow.speeds:
                text += f"the link {link} carries {_mb(part)} while data waits for it, "
                text += f"{_mb(others)} {before}"
            else:
                text += f"the link {link} waits for the network {_s(part)} a step, "
                text += f"{_s(others)} {before}"
                text += f"; {slow.node} {slow.lost}" if slow.lost else ""
        case SlowKind.LINK:
            text += "connections of several nodes wait for the network"
        case SlowKind.CODE if part:
            text += f"{who} collects garbage for {_s(part)} a step, {_s(others)} {before}"
        case SlowKind.CODE:
            text += "all nodes need more CPU time"
        case SlowKind.UNKNOWN:
            text += "nothing that is measured has grown with it"
    advice = {"memory": FOR_MEMORY, "storage": FOR_STORAGE}.get(slow.lacks, ADVICE[slow.kind])
    return f"{text}: {slow.kind}. {advice}"


def _lost(parts: Parts) -> str:
    """Return what the network of a node has lost, in words; empty if that is usual."""
    words = []
    if parts.resent >= RESENT:
        words.append(f"sends {100 * parts.resent:.1f} % of its TCP segments again")
    if parts.errors >= 1.0:
        words.append(f"loses {parts.errors:.3g} packets a second at its interfaces")
    return " and ".join(words)


def _s(seconds: float) -> str:
    """Return seconds with three digits."""
    return f"{seconds:.3g} s"


def _mb(speed: float) -> str:
    """Return a speed in megabytes a second."""
    return f"{speed / 1e6:.3g} MB/s"
