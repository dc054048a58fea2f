"""Reports of agents: which may report, as which incarnation, and what their workers do."""

from collections import deque

from dlrover_py.master.core.admission import Admission
from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.departures import Departures
from dlrover_py.master.core.events import Refuse
from dlrover_py.master.core.failures import Failures
from dlrover_py.master.core.goodput import Goodput
from dlrover_py.master.core.history import EVENTS_KEPT, CoreContext, named
from dlrover_py.master.core.nodes import Node, ReportOutcome
from dlrover_py.master.core.state import NON_DISRUPTIVE
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.master.core.tuning import Tuning
from dlrover_py.protocol.agents import AgentReport, WorkerPhase
from dlrover_py.protocol.names import NodeId, Round, Term
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase

REFUSAL_EVENTS_PER_MINUTE = 32
"""Limit of refusal events per minute. A client that uses ever new names must not displace all other
events."""
JOIN_EVENTS_PER_STEP = 8
"""Largest number of nodes that join in one step and get an event each."""


class TrainingReports:
    """Takes in what members report about the current round."""

    def __init__(
        self,
        context: CoreContext,
        transitions: Transitions,
        failures: Failures,
        goodput: Goodput,
        tuning: Tuning,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._failures = failures
        self._goodput = goodput
        self._tuning = tuning

    def take(self, node: Node, report: AgentReport) -> None:
        """Take in a report about the current round from one of its members.

        Progress and the state of data loaders are always taken in. Of three further facts only the
        first is acted on: a failure of the workers, a stop because the node was cut off, a success.
        """
        self._tuning.take_report(node, report)
        if report.progress is not None:
            self._goodput.progressed(node, report.progress)
        if report.phase is WorkerPhase.FAILED and report.failure is not None:
            self._failures.worker_failed(node, report.failure)
        elif report.cut_off:
            self._cut_off(node, report.cut_off)
        elif report.phase is WorkerPhase.SUCCEEDED:
            self._succeeded(node)

    def take_reached(self, report: AgentReport) -> None:
        """Take in the steps of earlier rounds, which may be reported after a round was formed."""
        if report.reached_step is not None:
            self._goodput.reached(report.reached_step)
        if report.progress is not None and report.follows < self.state.round:
            self._goodput.reached(report.progress.step)

    def take_last(self, node: Node, report: AgentReport) -> None:
        """Take in the last steps of a job that has ended, while its workers still save and stop."""
        world = self.state.world
        if report.progress is not None and world and world.has(node.id, node.incarnation):
            self._goodput.show(node, report.progress)

    def _succeeded(self, node: Node) -> None:
        """Note that all workers of a member have exited with code 0.

        The job succeeds once all members have. Nothing is noted if the round is to be repeated
        after a fault or a departure. A pending change of size is dropped.
        """
        state, pending = self.state, self.state.pending_round
        if pending is not None and pending.kind in NON_DISRUPTIVE:
            state.pending_round = None  # the round finishes soon: too late to grow or shrink
        if state.pending_round is not None:
            return
        assert state.world is not None
        if node.id not in state.succeeded:
            state.succeeded.add(node.id)
            state.changed()  # it must not count as lost once it has gone
        if len(state.succeeded) == len(state.world.members):
            message = "all workers exited with code 0"
            self._transitions.end_job(JobPhase.SUCCEEDED, EventReason.JOB_SUCCEEDED, message)

    def _cut_off(self, node: Node, why: str) -> None:
        """Declare a next round, because a node that was cut off has stopped its workers.

        The node had lost contact with the master and all other nodes. Nothing is charged: it could
        not know whether it had been given up. If a next round is needed already for a known cause,
        no event is recorded. A planned change is then disrupted.
        """
        pending = self.state.pending_round
        if pending is not None and pending.kind not in NON_DISRUPTIVE and pending.suspected is None:
            self._transitions.mark_disrupted()
            return  # many nodes may have been cut off at the same time
        message = f"node {node.id} stopped its workers: {why}"
        event = self.log.record(EventReason.NODE_CUT_OFF, message, node=node.id, warning=True)
        self._transitions.need_round("loss", message, event)


class Reports:
    """Takes in the reports of agents, or refuses them."""

    def __init__(
        self,
        context: CoreContext,
        assignments: Assignments,
        admission: Admission,
        departures: Departures,
        failures: Failures,
        training: TrainingReports,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._assignments = assignments
        self._admission = admission
        self._departures = departures
        self._failures = failures
        self._training = training
        self._joined: list[NodeId] = []
        """Nodes that have joined in this step."""
        self._refusals: deque[str] = deque(maxlen=EVENTS_KEPT)
        """Boot ids of the agent processes whose refusal is in the events."""
        self._refused_at: deque[float] = deque(maxlen=REFUSAL_EVENTS_PER_MINUTE)
        """Times of the newest refusal events."""

    def take_report(self, node_id: NodeId, report: AgentReport) -> None:
        """Take in a report, or refuse it; a report that is older than the last one is ignored.

        Where nodes come by themselves, an unknown node is added, and a node that was given up may
        return. Elsewhere, and in a job that has ended, both are refused. A known node is refused if
        another agent process has taken the place of the sender, even if that one was given up
        since. The node gets an assignment if it has none of this master, or if its agent process is
        new. An agent that gives up ends the job where no other node can replace it.
        """
        node = self.live.nodes.get(node_id)
        returns = False
        if not self.live.rules.can_create and not self.state.phase.ended:
            again = node is not None and node.phase is NodePhase.GONE
            if node is None:
                node = self.live.nodes.plan(node_id)
                node.last_incarnation = self.state.last_incarnations.pop(
                    node_id, self.state.least_incarnation
                )
                report = report.model_copy(update={"incarnation": 0})
            elif again and (
                report.seq > node.seq
                if report.boot_id == node.boot_id
                else not (report.incarnation or report.boot_id in node.former_boots)
            ):
                self.live.nodes.readmit(node_id, report.boot_id)
                returns = True
                report = report.model_copy(update={"incarnation": 0})
        outcome = (
            self.live.nodes.take_report(node_id, report, self.live.now, self.state.term)
            if node
            else ReportOutcome.REFUSED
        )
        if node is None or outcome is ReportOutcome.REFUSED:
            self._refuse(node_id, node, report.boot_id)
            return
        if outcome is ReportOutcome.STALE:
            return
        self._adopt_newer_term(report)
        if outcome is ReportOutcome.NEW_INCARNATION:
            self._agent_restarted(node, returns=returns)
        if report.leaving and not node.leaving:
            self._departures.node_leaving(node, report.leaving)
            node.announced_by_agent = True
        if report.gives_up and not (self.live.rules.can_create or self.state.phase.ended):
            self._failures.agent_gave_up(node, report.gives_up)
        if report.nested and report.boot_id != node.nested_warning_boot:
            node.nested_warning_boot = report.boot_id
            message = f"{node.id}: {report.nested}"
            self.log.record(EventReason.NESTED_LAUNCHER, message, node=node.id, warning=True)
        self.live.checkpoints.take(node.id, report, self.live.now)
        if outcome is ReportOutcome.NEW_INCARNATION:
            self.live.leave_checks(node.id)
        self._admission.take_report(node, report)
        self._training.take_reached(report)
        if self.state.trains(node.id, node.incarnation) and report.follows == self.state.round:
            self._training.take(node, report)
        elif self.state.phase.ended and report.follows == self.state.round:
            self._training.take_last(node, report)
        if self._assignments.get(node.id) is None or outcome is ReportOutcome.NEW_INCARNATION:
            self._assignments.send(node)

    def record_joined(self) -> None:
        """Record an event for each node that has joined in this step, or one event for many."""
        joined, self._joined = self._joined, []
        if len(joined) > JOIN_EVENTS_PER_STEP:
            self.log.record(EventReason.NODE_JOINED, f"{len(joined)} nodes joined: {named(joined)}")
            return
        for node_id in joined:
            self.log.record(EventReason.NODE_JOINED, f"node {node_id} joined", node=node_id)

    def _adopt_newer_term(self, report: AgentReport) -> None:
        """Continue with higher numbers, if an agent knows a higher term or round than this master.

        In that case the journal was lost, or is old. The numbers are safe to take: only one master
        at a time holds the journal's lock. The current round ends, all nodes get new assignments,
        and an event is recorded. If only the agent's number of network checks is higher, that
        number is taken and the running network checks end; the round goes on.
        """
        if report.checks > self.live.health.number:  # else the agent would not take up the next one
            self.live.health.adopt_number(report.checks)
            self.live.checking.clear()
            self.state.changed()
        if report.have_term <= self.state.term and report.follows <= self.state.round:
            return
        self.state.term = Term(max(self.state.term, report.have_term + 1))
        self.state.round = Round(max(self.state.round, report.follows))
        self.state.world = None
        self._assignments.clear()
        for node in self.live.nodes:
            self.live.nodes.require_version(node, 0)
        self.log.record(
            EventReason.JOURNAL_BEHIND,
            f"an agent reports round {report.follows} of term {report.have_term}, which is not in "
            f"the journal: the journal was lost or is old. The master continues as term "
            f"{self.state.term}",
            warning=True,
        )
        self._assignments.send_all()

    def _agent_restarted(self, node: Node, *, returns: bool) -> None:
        """Handle a new agent process of a node; the earlier one and its workers are gone.

        The first process of a node only joins. For a later one an event is recorded. The node is
        charged if it was in a check, or in a round of which it had not finished its part. If the
        node was given up before, its loss was handled already, and nothing is charged.

        Args:
            node: The node, with its new incarnation.
            returns: Whether the node was given up before.
        """
        if node.incarnation == node.last_incarnation + 1:
            self._joined.append(node.id)
            return
        event = self.log.record(
            EventReason.NODE_RESTARTED,
            f"node {node.id} has a new agent process (incarnation {node.incarnation})",
            node=node.id,
            warning=True,
        )
        if self.state.phase.ended:
            return
        if self.live.health.runs and node.id in self.live.checking:
            # The check may have ended the agent. If that repeats, the budget puts an end to it.
            why = f"the agent of node {node.id} was restarted during its check"
            self._failures.agent_restarted(node, "start", why, event)
            return
        if returns or self.state.phase not in (JobPhase.RUNNING, JobPhase.FORMING):
            return
        if (
            self.state.world is not None
            and node.id in self.state.world.rank_of
            and not self.state.has_finished(node.id)
        ):
            why = f"the agent of node {node.id} was restarted"
            self._failures.agent_restarted(node, "loss", why, event)

    def _refuse(self, node_id: NodeId, node: Node | None, boot_id: str) -> None:
        """Refuse a report of an agent process, with the reason.

        Its node was given up or is not known, or another agent process has taken its place. Each
        report is answered. An event is recorded once for each process, and at most
        ``REFUSAL_EVENTS_PER_MINUTE`` times a minute.

        Args:
            node_id: The id that the agent process reports for.
            node: The node of this id; None if there is none.
            boot_id: Id of the agent process.
        """
        why = "it was given up as lost" if node else "it is not a node of this job"
        if node is not None and node.alive and not self.live.rules.can_create:
            why = "another agent has taken its place; do two nodes have the same --node-rank?"
        if boot_id not in self._refusals and self._may_record_refusal():
            self._refusals.append(boot_id)
            message = f"a report from node {node_id} was refused: {why}"
            self.log.record(EventReason.NODE_REFUSED, message, node=node_id)
        self.live.emit(Refuse(node_id, boot_id, f"{node_id}: {why}"))

    def _may_record_refusal(self) -> bool:
        """Return whether another refusal event is within the limit; if it is, count it."""
        times = self._refused_at
        if len(times) == REFUSAL_EVENTS_PER_MINUTE and self.live.now - times[0] < 60.0:
            return False
        times.append(self.live.now)
        return True
