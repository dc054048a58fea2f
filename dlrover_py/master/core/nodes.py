"""State of the nodes: leases, incarnations, and readiness for the next round.

A node is *lost* on facts where there are any: its process ended, or its connection closed and it
did not come back. The lease is the last resort. Node ids are never reused.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated

from pydantic import dataclasses as records

from dlrover_py.protocol.agents import COUNT, AgentReport, Count
from dlrover_py.protocol.names import Incarnation, NodeId, Round, Term
from dlrover_py.protocol.status import NodePhase


class ReportOutcome(Enum):
    """The result of taking in a report."""

    ACCEPTED = auto()
    NEW_INCARNATION = auto()  # first report of a new incarnation
    STALE = auto()  # older than a report that was taken: nothing changes
    REFUSED = auto()  # from a node, or an incarnation of it, that was given up: it must end


class Readiness(Enum):
    """The readiness of a node for the next round."""

    READY = auto()  # has acknowledged its last assignment: its offered address and port are good
    BUSY = auto()  # a member that has not acknowledged its last assignment, or is suspect
    NEAR = auto()  # its process runs and its agent will report soon; or a suspect standby
    PENDING = auto()  # has no place yet, is being warmed, or is being checked: not waited for
    OUT = auto()  # leaving or gone


@records.dataclass(slots=True, kw_only=True)
class NodeRecord:
    """All that outlives the master about one node."""

    incarnation: Annotated[Incarnation, COUNT] = Incarnation(0)
    """Number of its agent process; 0 if none has reported yet."""
    boot_id: str = ""
    """Id of the agent process that speaks for the node."""
    leaving: str = ""
    """Why the node has to end; empty if it does not."""
    restarts: Count = 0
    """Worker failures charged to it since the last steady progress."""
    relaunches: Count = 0
    """Nodes lost before it in the same place since the last steady progress."""
    avoid: tuple[str, ...] = ()
    """Hosts that the node must not be placed on."""
    template_hash: str = ""
    """Hash of the template that the node was created from; empty if that is not known."""
    restart: str = ""
    """``spec.restart.at`` when the node was created; empty if there was none."""
    memory: Count = 0
    """Memory limit in bytes that the node was created with; 0 for that of the template."""
    stable: bool = False
    """Whether the node must not be placed on a spot host."""
    cpu: Count = 0
    """CPU request in thousandths of a CPU that it was created with; 0 for that of the template."""


@dataclass(slots=True)
class Node:
    """The master's knowledge about one node."""

    id: NodeId
    record: NodeRecord = field(default_factory=NodeRecord)
    phase: NodePhase = NodePhase.STARTING
    former_boots: set[str] = field(default_factory=set)
    """Boot ids of earlier agent processes; their reports are refused."""
    seq: int = -1
    """Sequence number of its newest report; -1 before the first one."""
    heard_at: float = -math.inf
    """When this master took in its last report."""
    lease_until: float = math.inf
    """When it is given up, unless it reports before."""
    return_until: float = math.inf
    """Until when the master waits for a node that reported to an earlier term. Reports of other
    nodes do not shorten this time."""
    due: float = math.inf
    """The latest time at which its deadlines are checked; a timer is set for it."""
    suspect_until: float = math.inf
    """When it is given up, if its connection closed and it does not come back."""
    required_version: int = 0
    """Version of the newest assignment that it must acknowledge before it is ready; 0 if there is
    none. The address and port that it offers are used by the round they were offered for. A node
    that has not acknowledged one round must therefore not be in the next one."""
    acknowledged: int = 0
    """Version of the newest assignment of this term that it has acknowledged."""
    report: AgentReport | None = None
    """Its newest report to this master."""
    announced_by_agent: bool = False
    """Whether only its agent has announced its end; the platform knows of no deletion."""
    topology: tuple[str, ...] = ()
    """Its domain, such as zone and rack, and its host: the outermost first, as the platform sees
    them; empty if nothing is known."""
    message: str = ""
    """The platform's words on its state."""
    seen: bool = False
    """Whether the platform has reported it."""
    recalled: bool = False
    """Whether it had reported to an earlier term."""
    runs: bool = True
    """Whether its process runs or may run soon; true unless the platform has denied it."""
    grace_s: float = math.inf
    """Seconds between the request to end it and the kill, if it is leaving."""
    failed_before_report: int = 0
    """Number of nodes in a row, in its place, that ended before their first report."""
    pending_since: float = math.inf
    """Since when there has been no place for it; infinite if there is one."""
    held: bool = False
    """Whether it is kept out of rounds, because a check must still show that it is fit to train."""
    nested_warning_boot: str = ""
    """Boot id of the agent whose warning about a nested launcher is already in the events."""
    last_incarnation: int = 0
    """Last incarnation under this id before the node was known; its own incarnations are higher."""
    generation: int = 0
    """Version of all that the status shows of the node; it grows with each change."""

    @property
    def incarnation(self) -> Incarnation:
        """Number of its agent process; 0 if none has reported yet."""
        return self.record.incarnation

    @property
    def boot_id(self) -> str:
        """Id of the agent process that speaks for the node."""
        return self.record.boot_id

    @property
    def leaving(self) -> str:
        """Why it is going to end; empty if it is not."""
        return self.record.leaving

    @property
    def restarts(self) -> int:
        """Worker failures charged to it since the last steady progress."""
        return self.record.restarts

    @property
    def relaunches(self) -> int:
        """Nodes that were lost before it in the same place since the last steady progress."""
        return self.record.relaunches

    @property
    def host(self) -> str:
        """Name of its host; empty if it is not known."""
        return self.topology[-1] if self.topology else ""

    @property
    def place(self) -> tuple[str, ...]:
        """Its domain and its host; the domain that its agent says takes precedence.

        A host that is not known is taken for one of its own.
        """
        said = self.report.offer.topology if self.report is not None else ()
        return (*said, self.host or self.id) if said else self.topology

    @property
    def domain(self) -> tuple[str, ...]:
        """The topology domain that it is in, the widest level first; empty if none is known."""
        return self.place[:-1]

    @property
    def readiness(self) -> Readiness:
        """The node's readiness for the next round, computed from its last report and its phase.

        :class:`Readiness` says what each value means. Only READY nodes can be in the next round.
        """
        if self.record.leaving or self.phase is NodePhase.GONE:
            return Readiness.OUT
        if self.phase is NodePhase.PENDING:
            return Readiness.PENDING
        if self.phase is NodePhase.STARTING:
            return Readiness.NEAR
        if self.held:
            return Readiness.PENDING
        if self.phase is NodePhase.SUSPECT or self.report is None:
            return Readiness.BUSY if self.required_version else Readiness.NEAR
        if self.report.warming:
            return Readiness.PENDING
        return Readiness.READY if self.acknowledged >= self.required_version else Readiness.BUSY

    @property
    def stuck(self) -> bool:
        """Whether the node has never reported and cannot start in its present state.

        That is so if the platform has no place for it, or gives any reason why its process does not
        run yet. A node that leaves the job is never stuck.
        """
        held = self.pending_since < math.inf or (bool(self.message) and not self.runs)
        return held and not self.record.incarnation and self.readiness is not Readiness.OUT

    @property
    def alive(self) -> bool:
        """Whether the node has reported, to this master or an earlier one, and was not given up."""
        return self.phase in (NodePhase.LIVE, NodePhase.SUSPECT)


REPORTS_PER_S = 500
"""Upper limit of the reports of healthy nodes per second. They cost a fraction of one core."""
LONGEST_EXCHANGE_S = 20.0
"""Upper limit of the time between two reports of a healthy node, in seconds."""


COMING_BACK_S = 0.004
"""Seconds per node to return when all nodes return at the same time to a busy machine. A return
costs a TLS handshake and a report."""


@dataclass(frozen=True, slots=True)
class ReportPace:
    """The interval of reports, and the time that a node may be silent, in seconds."""

    exchange_s: float
    lease_s: float
    return_s: float
    """Seconds that a new master waits for the members of its predecessor's round."""


def pace(nodes: int, *, exchange_s: float, lease_s: float) -> ReportPace:
    """Return the pace of reports for a job of this size.

    The time between reports grows with the job, so that the number of reports per second does not.
    The lease grows by twice that growth: it stays at two exchanges plus the margin of a small job.
    Only a frozen process is found later because of this. A process that ends closes its connection,
    and so does a host that falls silent.

    Args:
        nodes: Number of nodes in the job.
        exchange_s: Time between two reports in a small job, in seconds.
        lease_s: Lease of a node in a small job, in seconds.
    """
    spaced = max(exchange_s, min(LONGEST_EXCHANGE_S, nodes / REPORTS_PER_S))
    lease = lease_s + 2 * (spaced - exchange_s)
    return ReportPace(spaced, lease, lease + COMING_BACK_S * nodes)


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node that has just been given up."""

    node: Node
    why: str
    free: bool = False
    """Whether neither the node nor its host is to blame."""


@dataclass(slots=True)
class Loss:
    """A node that was lost, and whose evidence is still to be kept."""

    node: Node
    why: str
    round: Round
    at: float
    """Monotonic time."""
    report: AgentReport | None
    """Its last report: a node that comes back gets newer ones."""
    heard_at: float
    """Monotonic time of that report."""
    ended: str = ""
    """What its platform has said later of its end; empty if it has said nothing."""


_Facets = tuple[Readiness, bool, bool, bool]
"""Properties by which nodes are counted: readiness, whether alive, whether warm, whether the
process runs."""


class Nodes:
    """All nodes of the job.

    Every change of a node's readiness or record is made by a method of this class. The methods keep
    counts by readiness, so that decisions do not iterate over all nodes. The records of all nodes
    that are not gone outlive the master. Nothing is sent to agents or to the platform here.
    """

    def __init__(
        self,
        lease_s: float,
        suspect_s: float,
        records: dict[NodeId, NodeRecord] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the records.

        Args:
            lease_s: Time for which a node may be silent, in seconds.
            suspect_s: Time in which a node whose connection closed has to come back, in seconds.
            records: The records that an earlier master has left; they are changed in place.
            changed: Called after each change of a record.
        """
        self.lease_s = lease_s
        self.suspect_s = suspect_s
        self._records = records if records is not None else {}
        self._changed = changed
        self.by_id: dict[NodeId, Node] = {}
        self._facets: dict[NodeId, _Facets] = {}
        self._count: Counter[_Facets] = Counter()
        self._unreached = False
        """Whether no node has reported to this term yet, although some could."""
        self._unrouted_until = -math.inf
        """Until when nodes whose hosts report to the platform are kept, while no node has
        reported."""
        self._awaited: set[NodeId] = set()
        """Nodes that reported to an earlier term and have not reported to this one."""
        self._cut_off: set[NodeId] = set()
        """Nodes that reported to an earlier term, and whose hosts the platform has lost contact
        with."""
        self._back_until = -math.inf
        """Until when a node may come back whose connection closed while the master stood still."""
        self.leaving: dict[NodeId, Node] = {}
        """Living nodes that are leaving, by id."""
        self.losses: dict[NodeId, Loss] = {}
        """Nodes that were lost lately, the first one first."""
        self.members = 0
        """Version of the set of nodes; it grows when a node is added or forgotten."""
        # Lazy heap: an entry that comes too early is pushed again, so `take_report` costs no push.
        # An entry that differs from its node's `due` was superseded by an earlier one.
        self._deadlines: list[tuple[float, NodeId]] = []

    def __iter__(self) -> Iterator[Node]:
        return iter(self.by_id.values())

    def __getitem__(self, node_id: NodeId) -> Node:
        return self.by_id[node_id]

    def count(
        self, readiness: Readiness, *, alive: bool | None = None, runs: bool | None = None
    ) -> int:
        """Return the number of nodes with this readiness.

        Args:
            readiness: Readiness to count.
            alive: If given, only count nodes whose ``alive`` has this value.
            runs: If given, only count nodes whose ``runs`` has this value.
        """
        return sum(
            number
            for facets, number in self._count.items()
            if facets[0] is readiness and alive in (None, facets[1]) and runs in (None, facets[3])
        )

    @property
    def any_warm(self) -> bool:
        """Whether the newest report of a living node says that its next start is a fork."""
        return any(number for facets, number in self._count.items() if facets[2] and facets[1])

    def get(self, node_id: NodeId) -> Node | None:
        """Return the node, also one that is gone; None if the id is not known or was forgotten."""
        return self.by_id.get(node_id)

    @property
    def present(self) -> int:
        """Number of nodes that are neither gone nor leaving, including those not started yet."""
        return len(self.by_id) - self.count(Readiness.OUT)

    def plan(
        self,
        node_id: NodeId,
        record: NodeRecord | None = None,
        *,
        failed_before_report: int = 0,
    ) -> Node:
        """Add a node that is requested, that came by itself, or that the journal names.

        The node counts as starting. Its record outlives the master from now on. The request to
        create the node is made by the caller.

        Args:
            node_id: Id of the node; a known node of this id is replaced.
            record: What is known about it; None if nothing is.
            failed_before_report: Number of nodes before it, in its place and in a row, that ended
                before their first report.
        """
        node = Node(node_id, record or NodeRecord(), failed_before_report=failed_before_report)
        self.by_id[node_id] = node
        self.members += 1
        self._index(node)
        if self._records.get(node_id) is not node.record:
            self._records[node_id] = node.record
            self._changed()
        return node

    def recall(
        self,
        node_id: NodeId,
        now: float,
        *,
        member: bool = False,
        return_s: float | None = None,
        unreached_s: float = 0.0,
        unrouted_s: float = 0.0,
    ) -> None:
        """Restore a node that reported to an earlier term, and give it time to report again.

        Until then the node counts as alive. While no node at all has reported, the master itself is
        probably unreachable. The node then has ``unreached_s``, or ``unrouted_s`` if its host
        reports to the platform. If the node is in the round, it must acknowledge its first
        assignment of this term before it is ready.

        Args:
            node_id: Id of a node that was added with :meth:`plan`.
            now: Monotonic time.
            member: Whether the node is in the round.
            return_s: Seconds that it has to report; None for one lease.
            unreached_s: Seconds that it has while no node has reported.
            unrouted_s: The same, for a node whose host reports to the platform.
        """
        node = self.by_id[node_id]
        self._awaited.add(node_id)
        node.required_version = int(member)
        node.recalled = True
        node.phase = NodePhase.LIVE
        node.return_until = now + (self.lease_s if return_s is None else return_s)
        node.lease_until = max(node.return_until, now + unreached_s)
        self._unreached |= node.lease_until > node.return_until
        self._unrouted_until = now + unrouted_s
        self._set_timer(node, node.lease_until)
        self._index(node)

    def observe(
        self,
        node_id: NodeId,
        *,
        near: bool,
        runs: bool,
        exists: bool,
        topology: tuple[str, ...],
        message: str,
        cut_off: bool = False,
        now: float = 0.0,
    ) -> None:
        """Take in the platform's view of a node that is not gone.

        A node that has never reported is in phase STARTING or PENDING afterwards, as ``near`` says.
        A node is missing if it reported to an earlier term and not to this master. If the platform
        has lost the hosts of exactly the missing nodes, these become suspect. A suspicion of this
        kind ends when the host is back. Other nodes keep their phase.

        Args:
            node_id: Id of the node.
            near: Whether its process runs or will run soon.
            runs: Whether its process runs already.
            exists: Whether the node exists on the platform.
            topology: Its domain and its host: the outermost first.
            message: The platform's words on its state.
            cut_off: Whether the platform has lost contact with its host.
            now: Monotonic time.
        """
        node = self.by_id[node_id]
        if node.recalled:
            (self._cut_off.add if cut_off else self._cut_off.discard)(node_id)
            if not cut_off and node.phase is NodePhase.SUSPECT and node.report is None:
                node.phase, node.suspect_until = NodePhase.LIVE, math.inf
            self._suspect_missing_nodes(now)
        node.topology, node.message, node.runs = topology, message, runs
        node.seen |= exists
        node.pending_since = math.inf if near or not exists else min(node.pending_since, now)
        self._index(node)
        if node.phase in (NodePhase.PENDING, NodePhase.STARTING):
            node.phase = NodePhase.STARTING if near else NodePhase.PENDING
            self._index(node)

    def take_report(
        self, node_id: NodeId, report: AgentReport, now: float, term: Term
    ) -> ReportOutcome:
        """Take in a report of a node that was added before.

        An accepted report renews the node's lease and ends a suspicion against it. The first
        accepted report to a new master shortens the wait for nodes that have not reported yet.

        Args:
            node_id: Id of the node.
            report: The report.
            now: Monotonic time.
            term: The term of this master.

        Returns:
            NEW_INCARNATION for the first report of a new agent process, which takes the place of
            the earlier one. ACCEPTED for a later report. STALE if the report is not newer than the
            last one. REFUSED if the node was given up, or another agent process has taken this
            one's place. REFUSED also if an unknown agent process claims an incarnation. STALE and
            REFUSED reports leave the node unchanged.
        """
        node = self.by_id[node_id]
        if node.phase is NodePhase.GONE or report.boot_id in node.former_boots:
            return ReportOutcome.REFUSED
        is_new = report.boot_id != node.boot_id
        if is_new:
            if report.incarnation:  # it claims an incarnation that it never had or has lost
                return ReportOutcome.REFUSED
            self._begin_incarnation(node, report.boot_id)
        if report.seq <= node.seq:
            return ReportOutcome.STALE
        node.seq = report.seq
        node.report = report
        node.acknowledged = report.have_version if report.have_term == term else 0
        node.phase = NodePhase.LIVE
        node.failed_before_report = 0
        node.suspect_until = math.inf
        node.heard_at = now
        self._renew(node, now)
        self._index(node)
        if self._unreached:
            self._end_unreached(now)
        if node_id in self._awaited:
            self._awaited.remove(node_id)
            self._suspect_missing_nodes(now)
        return ReportOutcome.NEW_INCARNATION if is_new else ReportOutcome.ACCEPTED

    def _end_unreached(self, now: float) -> None:
        """Shorten the wait for missing nodes, as a report shows that the master is reachable.

        Each of them still has the time to return that it was given at first, and at least one
        lease.
        """
        self._unreached = False
        for node in self:
            if node.alive and node.recalled and node.report is None:
                node.lease_until = max(node.return_until, now + self.lease_s)
                self._set_timer(node, node.lease_until)

    def _suspect_missing_nodes(self, now: float) -> None:
        """Suspect the missing nodes if they are exactly those whose hosts the platform has lost.

        If one of these nodes reports after all, the platform is wrong about hosts. All missing
        nodes are then waited for. Nothing is decided while no node has reported.
        """
        if self._unreached or self._awaited != self._cut_off:
            return
        for node in map(self.by_id.__getitem__, self._awaited):
            if node.phase is NodePhase.LIVE:
                self._suspect(node, now)

    def readmit(self, node_id: NodeId, boot_id: str) -> None:
        """Take a node that was given up back: its next report begins a new incarnation.

        The node counts as starting until that report, and is no longer leaving. If another agent
        process spoke for it before, reports of that one are refused from now on. This is allowed
        only where no other node can replace it, such as one machine that was paused.

        Args:
            node_id: Id of the node.
            boot_id: Id of the agent process whose report follows.
        """
        node = self.by_id[node_id]
        if node.boot_id not in ("", boot_id):
            node.former_boots.add(node.boot_id)
        node.phase = NodePhase.STARTING
        node.record.leaving = ""
        self._records[node_id] = node.record
        self._begin_incarnation(node, "")

    def stalled(self, now: float, stood_s: float) -> None:
        """Extend all leases after a standstill of the master itself.

        A node may have closed its connection in that time, which the master notices only now. Such
        a node has as long as the standstill to come back, but at most one lease. It always has at
        least ``suspect_s``, as without a standstill. No lease is shortened.

        Args:
            now: Monotonic time.
            stood_s: Duration of the standstill, in seconds.
        """
        self._back_until = now + min(stood_s, self.lease_s)
        for node in self:
            if node.alive:
                # Not shortened: a node that returns to a new master has longer than one lease.
                node.lease_until = max(node.lease_until, now + self.lease_s)
                self._set_timer(node, node.lease_until)
                if node.phase is NodePhase.SUSPECT:
                    node.suspect_until = max(now + self.suspect_s, self._back_until)

    def disconnected(self, node_id: NodeId, boot_id: str, seq: int, now: float) -> bool:
        """Suspect a node whose newest report lost its connection before the answer was sent.

        The node is given up by :meth:`expire` after ``suspect_s``, unless it reports before. After
        a standstill of the master it has longer.

        Args:
            node_id: Id of the node.
            boot_id: Agent process that sent the report.
            seq: Sequence number of the report.
            now: Monotonic time.

        Returns:
            True if the node is now suspect. False if it was not alive or was suspect already, or if
            the connection was that of an older report or agent process.
        """
        node = self.by_id.get(node_id)
        if node is None or node.phase is not NodePhase.LIVE:
            return False
        if node.boot_id != boot_id or node.seq != seq:
            return False
        self._suspect(node, now)
        return True

    def is_silent(self, node: Node, since: float) -> bool:
        """Return whether the node is alive and either suspect or silent since this time."""
        return node.alive and (node.heard_at < since or node.phase is NodePhase.SUSPECT)

    def require_version(self, node: Node, version: int) -> None:
        """Require the node to acknowledge this assignment before it is ready again.

        Version 0 requires nothing. Nothing is sent here.
        """
        node.required_version = version
        self._index(node)

    def hold(self, node: Node, held: bool) -> None:
        """Keep the node out of all rounds (its readiness is then PENDING), or end that."""
        node.held = held
        self._index(node)

    def leave(self, node: Node, why: str) -> None:
        """Mark the node as leaving: it is in no further round. Its agent is not informed here."""
        node.record.leaving = why
        self._index(node)
        self._changed()

    def count_failures(self, node: Node, *, restarts: int = 0, relaunches: int = 0) -> None:
        """Count failures against a node.

        Args:
            node: The node.
            restarts: Number of failures of its workers.
            relaunches: Number of nodes that were lost in its place.
        """
        node.record.restarts += restarts
        node.record.relaunches += relaunches
        self._index(node)
        self._changed()

    def reset_budgets(self, node: Node) -> None:
        """Refill the budgets of a node."""
        node.record.restarts = node.record.relaunches = 0
        self._index(node)
        self._changed()

    def set_template(self, node: Node, template_hash: str) -> None:
        """Note the template that the node was created from, by its hash."""
        if node.record.template_hash != template_hash:
            node.record.template_hash = template_hash
            self._changed()

    def give_up(self, node: Node) -> None:
        """Mark the node as gone, and drop its record. Only :meth:`readmit` can take it back.

        It stays among the nodes until it is forgotten. The caller handles the consequences.
        """
        node.phase = NodePhase.GONE
        node.lease_until = node.suspect_until = math.inf
        self._awaited.discard(node.id)
        self._cut_off.discard(node.id)
        self._records.pop(node.id, None)
        self._index(node)
        self._changed()

    def forget(self, node: Node) -> None:
        """Drop a node that is gone and no longer needed."""
        self._count[self._facets.pop(node.id)] -= 1
        self.leaving.pop(node.id, None)
        del self.by_id[node.id]
        self.members += 1

    def expire(
        self, now: float, spared_until: Callable[[NodeId], float] = lambda _: -math.inf
    ) -> list[LostNode]:
        """Give up the nodes that were silent for too long, and return them with the reasons.

        A node is given up when its lease has run out. If its connection closed, it is given up when
        its time to come back is over. While no node has reported to a new master, nodes whose hosts
        report to the platform are kept for up to ``unrouted_s``. Their loss is then nobody's fault
        (:attr:`LostNode.free`). The caller handles the consequences of each loss.

        Args:
            now: Monotonic time.
            spared_until: The time until which a silent node is not given up; it may be past.
        """
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
            if due <= now:
                due = min(now + self.lease_s, spared_until(node.id))
            if due > now:
                self._set_timer(node, due)
                continue
            why = f"its lease expired: it sent no report for {self.lease_s:g} s"
            if node.recalled and node.report is None:
                why = "it did not report to the new master"
                why += (
                    ", and its host has lost contact with the platform"
                    if node.id in self._cut_off
                    else ""
                )
            elif node.suspect_until <= now:
                why = "its connection closed and it did not reconnect"
            self.give_up(node)
            lost.append(LostNode(node, why, free=unrouted))
        return lost

    @property
    def timers(self) -> int:
        """Number of timers that are set."""
        return len(self._deadlines)

    @property
    def wake_at(self) -> float:
        """The earliest time at which :meth:`expire` may give up a node; infinite if none is set."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _begin_incarnation(self, node: Node, boot_id: str) -> None:
        """Begin a new incarnation of the node, for this agent process if its id is known.

        The node needs no acknowledgement any more, and is no longer kept out of rounds. With an id,
        reports of the earlier agent process are refused from now on. An empty id means that the
        same process may follow. Its first report then raises the number of the incarnation.
        """
        if node.boot_id and boot_id:
            node.former_boots.add(node.boot_id)
        node.record.boot_id, node.seq = boot_id, -1
        node.required_version = node.acknowledged = 0
        node.held = False
        if boot_id:
            node.record.incarnation = Incarnation(max(node.incarnation, node.last_incarnation) + 1)
        self._index(node)
        self._changed()

    def _suspect(self, node: Node, now: float) -> None:
        """Mark the node as suspect, and set the timer by which it must report again."""
        node.phase = NodePhase.SUSPECT
        node.suspect_until = max(now + self.suspect_s, self._back_until)
        self._set_timer(node, node.suspect_until)
        self._index(node)

    def _renew(self, node: Node, now: float) -> None:
        """Renew the node's lease."""
        node.lease_until = now + self.lease_s
        self._set_timer(node, node.lease_until)

    def _set_timer(self, node: Node, when: float) -> None:
        """Set the node's timer to this time, unless it is due earlier."""
        if when < node.due:
            node.due = when
            heapq.heappush(self._deadlines, (when, node.id))

    def _index(self, node: Node) -> None:
        """Update the counts and the version of the node; each change of it must end with this."""
        node.generation += 1
        old = self._facets.get(node.id)
        warm = node.report is not None and node.report.warm
        new = (node.readiness, node.alive, warm, node.runs)
        if old == new:
            return
        if old is not None:
            self._count[old] -= 1
        self._facets[node.id] = new
        self._count[new] += 1
        if node.alive and node.leaving:
            self.leaving[node.id] = node
        else:
            self.leaving.pop(node.id, None)
