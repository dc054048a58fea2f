"""Checks of nodes before they train: when they run, and what follows from the findings."""

from collections.abc import Sequence

from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.capacity import Capacity
from dlrover_py.master.core.health import Finding, Verdict
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node, Readiness
from dlrover_py.master.core.rendezvous import CandidateNode, RoundMembers, arrange
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.agents import AgentReport
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.names import NodeId, Round, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase
from dlrover_py.protocol.words import are, counted

SHOWN = 8
"""Largest number of nodes or groups that an event names."""


class Admission:
    """Runs the checks of nodes, and excludes those that are unfit to train."""

    def __init__(
        self,
        context: CoreContext,
        transitions: Transitions,
        capacity: Capacity,
        assignments: Assignments,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._capacity = capacity
        self._assignments = assignments
        self._check_from: float | None = None
        """Since when there are nodes to be checked."""
        self._check_event = 0
        """Id of the newest event about checks."""

    def take_report(self, node: Node, report: AgentReport) -> None:
        """Take in a node's request for a check, and the result of its check.

        A node that asks is kept out of rounds until its check has passed. A request is ignored if
        the node leaves, or is a member of the current round; a result is not.
        """
        if report.check is not None:
            self.live.health.take(node.id, report.checks, report.check)
        wanted = report.precheck
        if node.id in self.live.health.confirming and not node.held:
            # A new master has to keep it out of rounds, too.
            self.live.nodes.hold(node, node.id in self.live.health.open)
        if wanted is None or node.leaving or self.state.trains(node.id, node.incarnation):
            return
        if self.live.health.enter(node.id, node.incarnation, exclude_slow=wanted.exclude_slow):
            self.state.changed()
        held = node.id in self.live.health.open
        if held != node.held:
            self.live.nodes.hold(node, held)

    def check_nodes(self) -> bool:
        """End the running step of checks if it is over, and begin the next one if one is needed.

        A step is over when all its groups have ended or ``check_s`` has passed. In a job that has
        ended or is suspended, nothing happens.

        Returns:
            Whether a step has ended or begun, or a finding was made.
        """
        if self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED:
            return False
        ran, number = self.live.health.runs, self.live.health.number
        self.live.health.expire(self.live.now, self.live.rules.check_s)
        self._found(self.live.health.judge())
        changed = ran is not self.live.health.runs
        if changed:
            self.state.changed()
        if not (self.live.health.runs or self.state.phase.ended) and (
            able := self._can_be_checked()
        ):
            findings = self.live.health.plan(able, self._helpers())
            self._found(findings)
            if self.live.health.runs:
                self._begin_checks()
            changed |= bool(findings) or number != self.live.health.number
        self.live.wake(self.live.health.due)
        return changed

    def confirm(
        self, suspect: Node, others: Sequence[Node], slow_from: float, why: str, cause: int
    ) -> None:
        """Have a member of the round checked with good nodes, once the round has ended as planned.

        The workers end after a common step, as if the node were leaving. All nodes of the check are
        kept out of rounds until it is over, and the next round waits for it.

        Args:
            suspect: The node. If it is slow in two groups, it is excluded.
            others: Standbys and members that are thought to be good, at least one.
            slow_from: The suspect is slow if it takes this many times the median.
            why: Why it is suspected, in words.
            cause: Id of the event that says so.
        """
        nodes = {node.id: node.incarnation for node in (suspect, *others)}
        self.live.health.reopen(suspect.id, nodes, slow_from)
        self.state.health.confirmed_at = self.live.steady_wall
        for node in (suspect, *others):
            self.live.nodes.hold(node, True)
        names = " and ".join(node.id for node in others)
        message = f"{suspect.id} is checked with {names}: {why}"
        self._check_event = self.log.record(
            EventReason.NODES_SUSPECTED, message, node=suspect.id, cause=cause, warning=True
        )
        self._transitions.need_round("drain", message, self._check_event)

    def checks_first(self) -> bool:
        """Return whether the first round waits for checks of nodes that have no verdict yet.

        The result is False if each node has a verdict. It is True while checks run, if no node has
        a verdict, or if a node is to be checked once more. A new node that comes after others have
        been judged is not waited for.
        """
        health = self.live.health
        if not health.open:
            return False
        passed = len(health.node_records) > len(health.open)
        return health.runs or not passed or any(health.node_records[n].tried for n in health.open)

    def end_checks(self) -> None:
        """Assign the next task to nodes that have passed, and have acknowledged their check.

        Nothing happens while a step of checks runs, or if the job has ended. Other nodes keep their
        assignment until they are checked again. An agent offers another address and port only when
        it begins a check.
        """
        if self.live.health.runs or self.state.phase.ended:
            return
        for node_id in list(self.live.checking):
            node = self.live.nodes[node_id]
            if not node.held and node.acknowledged >= node.required_version:
                del self.live.checking[node_id]
                self._assignments.send(node)

    def _can_be_checked(self) -> list[NodeId]:
        """Return the nodes for the next step of checks.

        While a node is confirmed to be slow, only the nodes of that check are checked.

        Returns:
            Empty if no node is to be checked, or if the step waits. It waits for more nodes, for
            acknowledgements, or for the minimum of the first round. New nodes, and those of a
            confirmation, are awaited for at most ``replacement_wait_s``.
        """
        confirming = self.live.health.confirming
        wanted = self.live.health.open.intersection(confirming) or self.live.health.open
        nodes = [self.live.nodes[n] for n in sorted(wanted, key=id_key)]
        able = [n for n in nodes if n.report is not None and not n.report.warming]
        if not able:
            self._check_from = None
            return []
        if self.state.phase is JobPhase.RUNNING and any(
            self.state.trains(n.id, n.incarnation) for n in able
        ):
            return []  # the round ends first
        if any(n.phase is not NodePhase.LIVE or n.acknowledged < n.required_version for n in able):
            return []  # each of them reports within its lease, or is given up
        if self.state.phase is not JobPhase.RUNNING and self.live.nodes.count(Readiness.BUSY):
            return []  # a busy node can help as soon as it has acknowledged its assignment
        if self._check_from is None:
            self._check_from = self.live.now
        if self.state.phase is JobPhase.PENDING:
            fit = self.live.nodes.count(Readiness.READY)
            if len(able) + fit < self.live.size.least:
                return []
            if self.live.size.fit(fit) and not self.checks_first():
                return []  # the others start without these nodes, which join later
        new = any(not self.live.health.node_records[n.id].tried for n in able)
        until = self._check_from + self.live.rules.replacement_wait_s
        near = self.live.nodes.count(Readiness.NEAR)
        late = new and near > 0 and self.state.phase is not JobPhase.FORMING
        late |= bool(confirming) and any(n.alive for n in nodes if n not in able)
        if late and self.live.now < until:
            self.live.wake(until)
            return []
        return [n.id for n in able]

    def _helpers(self) -> list[NodeId]:
        """Return the nodes that have passed a check and are ready, but not those that train."""
        trains = (
            self.state.world.rank_of
            if self.state.world and self.state.phase is JobPhase.RUNNING
            else {}
        )
        return [
            n
            for n, record in self.live.health.node_records.items()
            if record.verdict is Verdict.GOOD
            and n not in trains
            and self.live.nodes[n].readiness is Readiness.READY
        ]

    def _begin_checks(self) -> None:
        """Choose the address at which each group meets, record an event, and assign the check."""
        groups = self.live.health.groups
        self.live.health.due = self.live.now + self.live.rules.check_s
        for group in groups:
            reported = [(n, n.report) for n in map(self.live.nodes.__getitem__, group) if n.report]
            candidates = [CandidateNode(n.id, n.incarnation, r.nproc, n.place) for n, r in reported]
            members = arrange(candidates, len(candidates))
            offer = next(r.offer for n, r in reported if n.id == members[0].node)
            number = Round(self.live.health.number)
            for node_id in group:
                self.live.checking[node_id] = RoundMembers(
                    round=number, members=members, master_addr=offer.addr, master_port=offer.port
                )
        message = ", ".join("+".join(group) for group in groups[:SHOWN])
        message += f", and {len(groups) - SHOWN} more groups" if len(groups) > SHOWN else ""
        cause = self._check_event or (
            self.state.pending_round.cause if self.state.pending_round else None
        )
        message = f"check {self.live.health.number} started: {message}"
        self._check_event = self.log.record(EventReason.CHECK_STARTED, message, cause=cause)
        self.state.changed()
        for group in groups:
            for node_id in group:
                self._assignments.send(self.live.nodes[node_id])

    def _found(self, findings: Sequence[Finding]) -> None:
        """Act on the findings of checks, and record them as events.

        Good nodes may train, as may those of a void check. Nodes in doubt stay out of rounds, and
        bad or slow nodes are excluded, which may end the job. Nothing happens without findings.
        """
        good = [f for f in findings if f.verdict is Verdict.GOOD and not f.void]
        void = [f for f in findings if f.void]
        if findings:
            self.state.changed()
        if void:
            names = " and ".join(f.nodes[0] for f in void)
            message = f"the check also fails without the suspect, so it says nothing, and {names} "
            message += f"{are(len(void))} free to train: {void[0].message}"
            cause = self._check_event or None
            self._check_event = self.log.record(
                EventReason.CHECK_VOID, message, cause=cause, warning=True
            )
        if good:
            message = "; ".join(f"{f.nodes[0]} {f.message}" for f in good[:SHOWN])
            message += f"; and {len(good) - SHOWN} more" if len(good) > SHOWN else ""
            message = f"{counted(len(good), 'node')} {are(len(good))} fit to train: {message}"
            cause = self._check_event or None
            self._check_event = self.log.record(EventReason.NODES_CHECKED, message, cause=cause)
        for finding in findings:
            node = self.live.nodes[finding.nodes[0]]
            if finding.verdict is Verdict.GOOD:
                self.live.nodes.hold(node, False)
            elif finding.verdict is Verdict.OPEN:
                message = (
                    f"{' and '.join(finding.nodes)} {are(len(finding.nodes))} suspected of a fault "
                    f"and checked again: {finding.message}"
                )
                cause = self._check_event or None
                self.log.record(EventReason.NODES_SUSPECTED, message, cause=cause, warning=True)
        for finding in findings:  # once all good nodes are known
            if finding.verdict in (Verdict.BAD, Verdict.SLOW) and not self.state.phase.ended:
                self._exclude(self.live.nodes[finding.nodes[0]], finding)
        pending = self.state.pending_round
        if good and pending is not None and pending.kind == "start":
            pending.cause = self._check_event

    def _exclude(self, node: Node, finding: Finding) -> None:
        """Dismiss a node that is unfit to train; it is replaced where the platform creates nodes.

        There the node's host gets a strike, and the loss is charged to its place. If too few nodes
        would be left, a slow node stays in the job as a good one. For a bad node the job fails
        instead.
        """
        worker, least = self.live.spec.worker, self.live.size.least
        left = self.live.nodes.present - 1
        enough = left >= least
        if self.live.rules.can_create:
            left = self._capacity.places - 1
            enough = node.relaunches < worker.restart_count or left >= least
        slow = finding.verdict is Verdict.SLOW
        reason = f"node {node.id} is {'slow' if slow else 'not fit to train'}: {finding.message}"
        if slow and not enough:
            self.log.record(
                EventReason.NODE_SLOW,
                f"{reason}; it stays in the job, because too few nodes would be left without it",
                node=node.id,
            )
            self.live.health.decide(node.id, Verdict.GOOD)
            self.live.nodes.hold(node, False)
            return
        event = self.log.record(
            EventReason.NODE_EXCLUDED,
            reason,
            node=node.id,
            cause=self._check_event or None,
            warning=True,
        )
        if not enough:
            message = f"{reason}; fewer than {counted(least, 'node')} {are(least)} left"
            self._transitions.end_job(
                JobPhase.FAILED, EventReason.NETWORK_CHECK_FAILED, message, cause=event
            )
            return
        if self.live.rules.can_create:
            self._capacity.ban_host(node, HostFaultKind.CHECK)
            self._capacity.replace(node, event)
        self._capacity.dismiss(node, reason, ExitCode.FAILED)
