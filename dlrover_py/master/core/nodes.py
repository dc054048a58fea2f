"""Who lives: leases, incarnations, and how ready each node is for the next round.

A node is *lost* on facts where there are any (its process ended, its connection closed and did not
come back), and on the lease as the last resort. Ids are never reused: what is gone stays gone.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from dlrover_py.protocol.agents import AgentReport
from dlrover_py.protocol.names import Incarnation, NodeId, Term
from dlrover_py.protocol.status import NodePhase


class Heard(Enum):
    """What became of a report."""

    TAKEN = auto()
    BORN = auto()  # first report of a new incarnation
    STALE = auto()  # older than one that was taken: nothing changes
    REFUSED = auto()  # from a node, or a life of it, that was given up: it must end


class Standing(Enum):
    """How a node counts when the next round is formed."""

    READY = auto()  # has taken in all that it was told: its offer is good
    BUSY = auto()  # a member that has not answered yet to what it was told, or is suspect
    NEAR = auto()  # its process runs and its agent will speak soon; or a suspect standby
    PENDING = auto()  # no place for it yet, or it gets warm or is checked: not waited for
    OUT = auto()  # leaving or gone


@dataclass(slots=True)
class Node:
    """What the master knows of one node."""

    id: NodeId
    phase: NodePhase = NodePhase.STARTING
    incarnation: Incarnation = field(default=Incarnation(0))
    boot_id: str = ""
    former_boots: set[str] = field(default_factory=set)
    seq: int = -1
    heard_at: float = -math.inf
    """When its last report was taken in, by this master."""
    lease_until: float = math.inf
    return_until: float = math.inf
    """Of one that had spoken to an earlier term: until then it is waited for, whoever reports."""
    due: float = math.inf
    """When it is looked at next, at the latest; the timer for that is set."""
    suspect_until: float = math.inf
    told: int = 0
    """Version of the newest assignment that it must take in before it counts; 0 if there is none.
    An offer is used by the round that it was made for, so a node that has not yet answered to
    one round must not be asked for the next."""
    acknowledged: int = 0
    """Version of the newest assignment of this term that it has taken in."""
    report: AgentReport | None = None
    leaving: str = ""
    """Why it is about to go; empty if it is not."""
    topology: tuple[str, ...] = ()
    """Zone, rack, host: the outermost first."""
    message: str = ""
    """The platform's words on its state."""
    seen: bool = False
    """The platform has told of it."""
    recalled: bool = False
    """It had spoken to an earlier term."""
    runs: bool = True
    """Its process runs, or may do so in a moment: the platform has not said otherwise."""
    grace_s: float = math.inf
    """How long it has when it is leaving."""
    unheard: int = 0
    """Nodes in a row that were gone from its place before they spoke."""
    avoid: tuple[str, ...] = ()
    """Hosts that it was not to be on."""
    pending_since: float = math.inf
    """Since when there has been no place for it."""
    restarts: int = 0
    """Worker failures charged to it since the last steady progress."""
    relaunches: int = 0
    """Nodes that were lost before it in the same place since the last steady progress."""
    held: bool = False
    """It is not known yet whether it is fit to train."""
    nested_told: str = ""
    """The boot id of the agent whose finding of another launcher is in the events."""
    lived: int = 0
    """Incarnations that nodes of this id had before it was known: its own are above."""
    made_of: str = ""
    """Hash of the template that it was made of; empty if that is not known."""
    restart: str = ""
    """``spec.restart.at`` when it was made; empty if there was none."""

    @property
    def standing(self) -> Standing:
        """How it counts for the next round."""
        if self.leaving or self.phase is NodePhase.GONE:
            return Standing.OUT
        if self.phase is NodePhase.PENDING:
            return Standing.PENDING
        if self.phase is NodePhase.STARTING:
            return Standing.NEAR
        if self.held:
            return Standing.PENDING
        if self.phase is NodePhase.SUSPECT or self.report is None:
            return Standing.BUSY if self.told else Standing.NEAR
        if self.report.warming:
            return Standing.PENDING
        return Standing.READY if self.acknowledged >= self.told else Standing.BUSY

    @property
    def stuck(self) -> bool:
        """It has never spoken, and cannot start as it is."""
        held = self.pending_since < math.inf or (bool(self.message) and not self.runs)
        return held and not self.incarnation and self.standing is not Standing.OUT

    @property
    def alive(self) -> bool:
        """It has spoken, and was not given up."""
        return self.phase in (NodePhase.LIVE, NodePhase.SUSPECT)


REPORTS_PER_S = 500
"""Reports of healthy nodes that a master takes in each second, at most: a fraction of one core."""
LONGEST_EXCHANGE_S = 20.0


COMING_BACK_S = 0.004
"""For each node: a TLS handshake and a report, when all come back at once to a busy machine."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often each node reports, and how long it may be silent."""

    exchange_s: float
    lease_s: float
    return_s: float
    """How long a new master waits for the members of its predecessor's round."""


def pace(nodes: int, *, exchange_s: float, lease_s: float) -> Pace:
    """The pace of a job of so many nodes, from that of a small one.

    Reports are spaced out as the job grows, so that their number per second does not grow with it;
    the lease grows by two exchanges' worth of that, so it stays at two exchanges and what the
    small job's lease had to spare. Nothing but a frozen process is found later by it: a process
    that ends, and a host that falls silent, close their connection.
    """
    spaced = max(exchange_s, min(LONGEST_EXCHANGE_S, nodes / REPORTS_PER_S))
    lease = lease_s + 2 * (spaced - exchange_s)
    return Pace(spaced, lease, lease + COMING_BACK_S * nodes)


@dataclass(frozen=True, slots=True)
class Lost:
    """A node that has just been given up."""

    node: Node
    why: str
    free: bool = False
    """Neither it nor its host is to blame."""


_Facets = tuple[Standing, bool, bool, bool]
"""What nodes are counted by: standing, whether alive, whether warm, whether its process runs."""


class Nodes:
    """All nodes of the job. Every change of a node goes through a method here, which keeps the
    counts by standing, so that no decision has to walk through all of them."""

    def __init__(self, lease_s: float, suspect_s: float) -> None:
        self.lease_s = lease_s
        self.suspect_s = suspect_s
        self.by_id: dict[NodeId, Node] = {}
        self._facets: dict[NodeId, _Facets] = {}
        self._count: Counter[_Facets] = Counter()
        self._unreached = False
        """Whether nobody at all has reported to this term yet, though some could."""
        self._unrouted_until = -math.inf
        """Nobody whose host is heard of is given up before, as long as nobody at all reports."""
        self._awaited: set[NodeId] = set()
        """Had spoken to an earlier term, and have not reported to this one."""
        self._cut_off: set[NodeId] = set()
        """Had spoken to an earlier term, and the platform does not hear of their hosts."""
        self._back_until = -math.inf
        """Who has hung up on a master that stood still has until then to come back."""
        self.members = 0
        """Grows when a node is added or forgotten."""
        # Lazy: re-pushed when it turns out too early; `hear` costs no push. An entry that is not
        # its node's `due` was overtaken by an earlier one.
        self._deadlines: list[tuple[float, NodeId]] = []

    def __iter__(self) -> Iterator[Node]:
        return iter(self.by_id.values())

    def __getitem__(self, node_id: NodeId) -> Node:
        return self.by_id[node_id]

    def count(
        self, standing: Standing, *, alive: bool | None = None, runs: bool | None = None
    ) -> int:
        """Number of nodes with this standing; only those that have spoken, or run, or do not."""
        return sum(
            number
            for facets, number in self._count.items()
            if facets[0] is standing and alive in (None, facets[1]) and runs in (None, facets[3])
        )

    @property
    def any_warm(self) -> bool:
        """Whether one has said that its next start is a fork."""
        return any(number for facets, number in self._count.items() if facets[2])

    def get(self, node_id: NodeId) -> Node | None:
        """The node, if it was ever known."""
        return self.by_id.get(node_id)

    @property
    def present(self) -> int:
        """Number of nodes that are there or will be: not gone, not leaving."""
        return len(self.by_id) - self.count(Standing.OUT)

    def plan(
        self, node_id: NodeId, relaunches: int = 0, restarts: int = 0, unheard: int = 0
    ) -> Node:
        """Take in a new node that the platform is asked for, or that the journal names."""
        node = Node(id=node_id, relaunches=relaunches, restarts=restarts, unheard=unheard)
        self.by_id[node_id] = node
        self.members += 1
        self._index(node)
        return node

    def recall(
        self,
        node_id: NodeId,
        incarnation: Incarnation,
        boot_id: str,
        now: float,
        *,
        member: bool = False,
        return_s: float | None = None,
        unreached_s: float = 0.0,
        unrouted_s: float = 0.0,
    ) -> None:
        """Take up a node that had spoken to an earlier term: it has so long to report again.

        As long as nobody at all reports it is rather the master who cannot be reached: it has
        ``unreached_s``, and where the platform hears of its host ``unrouted_s``. The first thing
        that a member is told in this term is binding.
        """
        node = self.by_id[node_id]
        self._awaited.add(node_id)
        node.told = int(member)
        node.recalled = True
        node.phase = NodePhase.LIVE
        node.incarnation, node.boot_id = incarnation, boot_id
        node.return_until = now + (self.lease_s if return_s is None else return_s)
        node.lease_until = max(node.return_until, now + unreached_s)
        self._unreached |= node.lease_until > node.return_until
        self._unrouted_until = now + unrouted_s
        self._look_at(node, node.lease_until)
        self._index(node)

    def observe(
        self,
        node_id: NodeId,
        *,
        near: bool,
        runs: bool,
        there: bool,
        topology: tuple[str, ...],
        message: str,
        cut_off: bool = False,
        now: float = 0.0,
    ) -> None:
        """Take in what the platform sees of a node that is not gone."""
        node = self.by_id[node_id]
        if node.recalled:
            (self._cut_off.add if cut_off else self._cut_off.discard)(node_id)
            if not cut_off and node.phase is NodePhase.SUSPECT and node.report is None:
                node.phase, node.suspect_until = NodePhase.LIVE, math.inf
            self._despair(now)
        node.topology, node.message, node.runs = topology, message, runs
        node.seen |= there
        node.pending_since = math.inf if near or not there else min(node.pending_since, now)
        self._index(node)
        if node.phase in (NodePhase.PENDING, NodePhase.STARTING):
            node.phase = NodePhase.STARTING if near else NodePhase.PENDING
            self._index(node)

    def hear(self, node_id: NodeId, report: AgentReport, now: float, term: Term) -> Heard:
        """Take in a report of a known node."""
        node = self.by_id[node_id]
        if node.phase is NodePhase.GONE or report.boot_id in node.former_boots:
            return Heard.REFUSED
        born = report.boot_id != node.boot_id
        if born:
            if report.incarnation:  # it claims a life that is not its own, or no longer
                return Heard.REFUSED
            self._next_life(node, report.boot_id)
        if report.seq <= node.seq:
            return Heard.STALE
        node.seq = report.seq
        node.report = report
        node.acknowledged = report.have_version if report.have_term == term else 0
        node.phase = NodePhase.LIVE
        node.unheard = 0
        node.suspect_until = math.inf
        node.heard_at = now
        self._renew(node, now)
        self._index(node)
        if self._unreached:
            self._reached(now)
        if node_id in self._awaited:
            self._awaited.remove(node_id)
            self._despair(now)
        return Heard.BORN if born else Heard.TAKEN

    def _reached(self, now: float) -> None:
        """Somebody has reported to this term: so can others, if they live."""
        self._unreached = False
        for node in self:
            if node.alive and node.recalled and node.report is None:
                node.lease_until = max(node.return_until, now + self.lease_s)
                self._look_at(node, node.lease_until)

    def _despair(self, now: float) -> None:
        """Just those are missing whose hosts the platform does not hear of either: no use to wait.

        If one of such a host does report, the platform is wrong about hosts, and all are awaited.
        """
        if self._unreached or self._awaited != self._cut_off:
            return
        for node in map(self.by_id.__getitem__, self._awaited):
            if node.phase is NodePhase.LIVE:
                self._suspect(node, now)

    def readmit(self, node_id: NodeId) -> None:
        """Let a node that was given up live again, as a new incarnation.

        Only where nobody can replace it: one machine that was paused, say.
        """
        node = self.by_id[node_id]
        node.phase = NodePhase.STARTING
        node.leaving = ""
        self._next_life(node, "")

    def stalled(self, now: float, stood_s: float) -> None:
        """The master itself stood still: nobody is to blame, and all have their time anew.

        Who has hung up on it meanwhile, as is heard only now, has as long as that to come back, a
        lease at most. Short stalls are no reason to: after them a closed connection means the same
        as ever.
        """
        self._back_until = now + min(stood_s, self.lease_s)
        for node in self:
            if node.alive:
                # Not shorter: who is to return to a new master has longer than a lease.
                node.lease_until = max(node.lease_until, now + self.lease_s)
                self._look_at(node, node.lease_until)
                if node.phase is NodePhase.SUSPECT:
                    node.suspect_until = max(now + self.suspect_s, self._back_until)

    def disconnected(self, node_id: NodeId, boot_id: str, seq: int, now: float) -> bool:
        """The connection of a report closed before its answer; true if the node is now suspect.

        Only the newest report's connection counts: an older one closing says nothing.
        """
        node = self.by_id.get(node_id)
        if node is None or node.phase is not NodePhase.LIVE:
            return False
        if node.boot_id != boot_id or node.seq != seq:
            return False
        self._suspect(node, now)
        return True

    def unheard(self, node: Node, since: float) -> bool:
        """Whether it lives, as far as is known, and has not been heard of since then."""
        return node.alive and (node.heard_at < since or node.phase is NodePhase.SUSPECT)

    def tell(self, node: Node, version: int) -> None:
        """The node must take in this assignment before it is ready again."""
        node.told = version
        self._index(node)

    def hold(self, node: Node, held: bool) -> None:
        """No round has the node as long as it is held."""
        node.held = held
        self._index(node)

    def leave(self, node: Node, why: str) -> None:
        """The node is about to go: no further round has it."""
        node.leaving = why
        self._index(node)

    def give_up(self, node: Node) -> None:
        """The node is gone, for good."""
        node.phase = NodePhase.GONE
        node.lease_until = node.suspect_until = math.inf
        self._awaited.discard(node.id)
        self._cut_off.discard(node.id)
        self._index(node)

    def forget(self, node: Node) -> None:
        """Drop a gone node that nobody needs to know any more."""
        self._count[self._facets.pop(node.id)] -= 1
        del self.by_id[node.id]
        self.members += 1

    def expire(self, now: float) -> list[Lost]:
        """Give up the nodes whose lease or grace has run out."""
        lost = []
        while self._deadlines and self._deadlines[0][0] <= now:
            at, node_id = heapq.heappop(self._deadlines)
            node = self.by_id.get(node_id)
            if node is None or node.due != at:
                continue
            node.due = math.inf
            if not node.alive:
                continue
            due = min(node.lease_until, node.suspect_until)
            unrouted = self._unreached and node.recalled and node.id not in self._cut_off
            if due <= now < self._unrouted_until and unrouted:
                due = node.lease_until = min(now + self.lease_s, self._unrouted_until)
            if due > now:
                self._look_at(node, due)
                continue
            why = f"it was silent for {self.lease_s:g} s (lease)"
            if node.recalled and node.report is None:
                why = "it did not report to the new master"
                why += ", and its host is not heard of" if node.id in self._cut_off else ""
            elif node.suspect_until <= now:
                why = "its connection closed and it did not come back"
            self.give_up(node)
            lost.append(Lost(node, why, free=unrouted))
        return lost

    @property
    def timers(self) -> int:
        """Number of timers that are set."""
        return len(self._deadlines)

    @property
    def wake_at(self) -> float:
        """When :meth:`expire` may have something to do."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _next_life(self, node: Node, boot_id: str) -> None:
        if node.boot_id and boot_id:
            node.former_boots.add(node.boot_id)
        node.boot_id, node.seq = boot_id, -1
        node.told = node.acknowledged = 0
        node.held = False
        if boot_id:
            node.incarnation = Incarnation(max(node.incarnation, node.lived) + 1)
        self._index(node)

    def _suspect(self, node: Node, now: float) -> None:
        node.phase = NodePhase.SUSPECT
        node.suspect_until = max(now + self.suspect_s, self._back_until)
        self._look_at(node, node.suspect_until)
        self._index(node)

    def _renew(self, node: Node, now: float) -> None:
        node.lease_until = now + self.lease_s
        self._look_at(node, node.lease_until)

    def _look_at(self, node: Node, when: float) -> None:
        if when < node.due:
            node.due = when
            heapq.heappush(self._deadlines, (when, node.id))

    def _index(self, node: Node) -> None:
        old = self._facets.get(node.id)
        warm = node.report is not None and node.report.warm
        new = (node.standing, node.alive, warm, node.runs)
        if old == new:
            return
        if old is not None:
            self._count[old] -= 1
        self._facets[node.id] = new
        self._count[new] += 1
