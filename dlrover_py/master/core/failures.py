"""Failures of workers and agents: which is the cause, what is charged, and what follows."""

from collections.abc import Sequence

from dlrover_py.master.core.assignments import restart_budget
from dlrover_py.master.core.capacity import Capacity
from dlrover_py.master.core.checkpointing import Checkpointing
from dlrover_py.master.core.events import Kind
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.policy import (
    MAX_SUSPECT_WARM_STARTS,
    Budgets,
    FailureAction,
    FailureDecision,
    after_worker_failure,
    decide_by_budgets,
    dies_early,
    in_words,
    manner,
    ran_out_of_memory,
    with_cause,
)
from dlrover_py.master.core.state import NON_DISRUPTIVE
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.master.core.tuning import Tuning
from dlrover_py.protocol.agents import (
    FailureCause,
    FailureClass,
    FailureKind,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import Failure, JobPhase

MAX_TOLD = 240
"""Characters of a worker's message that are quoted in a cause."""


class Failures:
    """Finds the cause of a failure, and charges it to a node's budgets."""

    def __init__(
        self,
        context: CoreContext,
        transitions: Transitions,
        capacity: Capacity,
        checkpointing: Checkpointing,
        tuning: Tuning,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._capacity = capacity
        self._checkpointing = checkpointing
        self._tuning = tuning

    def worker_failed(self, node: Node, failure: WorkerFailure) -> None:
        """Decide whether a failure is a cause, a consequence, or must wait for the real cause.

        A failure in a round that had ended already is a consequence: it is neither recorded nor
        charged. After a lost connection between workers, a next round is declared, and the charge
        waits for ``cause_wait_s``. Further lost connections are ignored meanwhile. Any other
        failure is charged now, in place of the one that waits.
        """
        pending = self.state.pending_round
        if pending is not None and pending.kind in NON_DISRUPTIVE:
            pending = None
        if pending is not None and pending.suspected is None:
            self._transitions.mark_disrupted()
            if failure.out_of_memory and (why := self._capacity.lacks_memory(node)):
                self._capacity.recreate(
                    node, why
                )  # often all nodes run out of memory in the same step
            return  # the round had ended already: a consequence, not a cause
        if failure.kind is FailureKind.PEER:
            if pending is None:
                event = self.log.record(
                    EventReason.PEER_LOST,
                    f"{node.id}: {in_words(failure)}",
                    node=node.id,
                    warning=True,
                )
                self._transitions.need_round(
                    "failure",
                    f"a worker on node {node.id} lost its connection to another worker",
                    event,
                )
                assert self.state.pending_round is not None
                self.state.pending_round.hold_until = self.live.now + self.live.rules.cause_wait_s
                self.state.pending_round.suspected = (node.id, failure)
            return
        self._count_failure(node, failure)

    def job_failed(self, node: Node, failure: WorkerFailure) -> None:
        """Charge a failure that no node is to blame for to all nodes of the round.

        The job ends once the restarts of a node are used up: another node would not help.

        Args:
            node: The node of the first rank, which the status shows.
            failure: What has happened.
        """
        self._count_failure(node, failure, of_job=True)

    def agent_restarted(self, node: Node, kind: Kind, why: str, event: int) -> None:
        """Charge a node whose agent was restarted, with all its workers.

        A next round is declared, or the job fails if the budgets are used up.

        Args:
            node: The node.
            kind: Why the next round is needed.
            why: The failure, in words.
            event: Id of the event of the failure.
        """
        decision = decide_by_budgets(why, **self._budgets(node))
        self._apply_decision(node, decision, kind, why, event, charged=(node,))

    def agent_gave_up(self, node: Node, why: str) -> None:
        """End the job, because an agent refuses to go on and cannot be replaced."""
        self._transitions.end_job(JobPhase.FAILED, EventReason.NODE_GAVE_UP, f"{node.id}: {why}")

    def stalled(self) -> None:
        """Judge a suspected failure after this step, once what has arrived meanwhile is known.

        The master itself stood still. The real cause may be among the events of this step.
        """
        pending = self.state.pending_round
        if pending is not None and pending.hold_until is not None:
            pending.hold_until = max(pending.hold_until, self.live.now)

    def resolve_suspected_failure(self) -> None:
        """Charge the suspected failure if no other cause was reported in time.

        The suspected failure is the lost connection for which a next round was declared. Nothing
        happens if there is none, or its time is not over. The time is longer by one lease while
        another member is silent. If the suspected node is gone, nothing is charged.
        """
        pending = self.state.pending_round
        if pending is None or pending.suspected is None or pending.hold_until is None:
            return
        node_id, failure = pending.suspected
        due = pending.hold_until
        if self.live.now >= due and self._awaits_news(but=node_id, since=pending.since):
            due += self.live.pace.lease_s
        if self.live.now < due:
            self.live.wake(due)
            return
        node = self.live.nodes.get(node_id)
        if node is not None and node.alive:
            if ended := self._ended_ranks(but=node_id):
                cause = FailureCause.ended_early(ended, failure.message[:MAX_TOLD])
                failure = failure.model_copy(update={"cause": cause})
            self._count_failure(node, failure)
        if self.state.pending_round is pending:
            pending.suspected = pending.hold_until = None

    def reset_budgets(self) -> None:
        """Refill the budgets of all nodes and places after steady progress.

        Progress is steady if a round has run for ``forgive_after_s`` and reached a new step, and no
        next round is pending. If the script reports no steps, ten times as long is required, and no
        step. The last exception, early death and lack of memory are forgotten, too. An event is
        recorded only if anything was refilled or forgotten.
        """
        if (
            self.state.phase is not JobPhase.RUNNING
            or self.state.pending_round is not None
            or self.state.world is None
        ):
            return
        live = self.live
        steady = live.rules.forgive_after_s
        if live.progress is None:
            steady *= 10  # the script reports no steps: that it still runs is weaker evidence
        due = live.formed_at + steady
        if live.now < due:
            live.wake(due)
            return
        step, before = self.state.max_step, live.baseline_step
        gained = live.progress is None or (step is not None and (before is None or step > before))
        live.formed_at, live.baseline_step = live.now, step
        live.wake(live.now + steady)
        if not gained:
            return
        charged = [n for n in live.nodes if n.restarts or n.relaunches]
        if (
            charged
            or self.state.abandoned_slots
            or self.state.last_exception is not None
            or self.state.warm_starts.early_death
            or self.state.out_of_memory
        ):
            for node in charged:
                live.nodes.reset_budgets(node)
            for slot in self.state.replacement_slots:
                slot.relaunches = 0
            self.state.abandoned_slots = 0
            self.state.last_exception = None
            self.state.warm_starts.early_death = ""
            self.state.changed()
            self.state.out_of_memory = ""
            self.log.record(
                EventReason.BUDGET_RESET,
                f"training made steady progress for {steady:g} s: all restart budgets are full "
                "again",
            )

    def _count_failure(self, node: Node, failure: WorkerFailure, *, of_job: bool = False) -> None:
        """Charge a failure that is the root cause, and decide what follows.

        An event is recorded, and the status shows the failure. After a lack of memory, nothing is
        charged if the auto-tuner can make the micro-batch smaller. The same holds if new nodes get
        more memory: this node is then replaced. After an early death of a forked worker the next
        round is started cold, at most ``MAX_SUSPECT_WARM_STARTS`` times in a job. Such a death is
        not charged, unless workers die early without a fork, too. If the spec or the node asks for
        it (``save_at_breakpoint``), the newest checkpoint is requested to be
        stored.

        Args:
            node: The node of the worker.
            failure: How the worker has failed.
            of_job: Whether no node is to blame. All nodes of the round are then charged.
        """
        self.state.last_failure = Failure(
            at=self.live.wall, node=node.id, round=self.state.round, worker=failure
        )
        self.state.count_failure(failure.failure_class)
        if failure.failure_class is FailureClass.HARDWARE:
            self.state.note_host_fault(node.host, self.live.wall, HostFaultKind.HARDWARE)
        message = in_words(failure) if of_job else f"{node.id}: {in_words(failure)}"
        if failure.out_of_memory:
            self.state.out_of_memory = message
        event = self.log.record(
            EventReason.WORKER_FAILED,
            with_cause(message, failure),
            node=None if of_job else node.id,
            warning=True,
            cause=None if self.state.pending_round is None else self.state.pending_round.cause,
        )
        report = node.report
        spec = self.live.spec.spec.checkpoint
        if (spec and spec.save_at_breakpoint) or (report and report.save_at_breakpoint):
            self._checkpointing.flush("a worker failed", self.live.rules.drain_grace_s)
        more = self._capacity.end_lowering(node) if failure.out_of_memory else ""
        if not more and ran_out_of_memory(failure) and (why := self._tuning.back_off(node.id)):
            self._transitions.need_round("failure", f"{message} ({why})", event)
            return
        if failure.out_of_memory and (why := more or self._capacity.raise_memory(node)):
            self._capacity.recreate(node, why)
            self._transitions.need_round("failure", f"{message} ({why})", event)
            return
        suspect = self._may_be_fork(failure)
        if suspect:
            self.state.warm_starts.suspected += 1
            self.state.changed()
        # A script that must not be restarted is not run twice, either.
        once = self.state.round == 1 and not restart_budget(self.live, node)
        if suspect and not self.state.warm_starts.early_death and not once:
            self._transitions.need_round(
                "failure",
                f"{message} (the next start is cold: the warm start may be the cause)",
                event,
            )
            assert self.state.pending_round is not None
            self.state.pending_round.cold = True
            return
        charged = self._members() if of_job else [node]
        budgets = self._budgets(node)
        if of_job:
            budgets["restarts"] = max(one.restarts for one in charged)
            budgets["can_replace"] = False
        decision = after_worker_failure(failure, earlier=self.state.last_exception, **budgets)
        if failure.kind is FailureKind.EXCEPTION and not suspect:
            self.state.last_exception = failure
        if dies_early(failure) and not suspect:
            self.state.warm_starts.early_death = manner(failure)
            self.state.changed()
        why = f"{message} ({decision.message})"
        self._apply_decision(node, decision, "failure", why, event, charged=charged)
        if suspect and self.state.pending_round is not None:
            self.state.pending_round.cold = True

    def _may_be_fork(self, failure: WorkerFailure) -> bool:
        """Return whether the fork of a worker may have caused its death, and is to be avoided.

        It has not if a worker died in the same way before, and not because of a fork.
        """
        known = {self.state.warm_starts.early_death}
        if self.state.last_exception is not None:
            known.add(manner(self.state.last_exception))
        return (
            failure.forked
            and dies_early(failure)
            and manner(failure) not in known
            and self.state.warm_starts.suspected < MAX_SUSPECT_WARM_STARTS
        )

    def _budgets(self, node: Node) -> Budgets:
        """Return what the node has used of its budgets, and the budgets."""
        worker = self.live.spec.worker
        return {
            "restarts": node.restarts,
            "budget": restart_budget(self.live, node),
            "relaunches": node.relaunches,
            "relaunch_budget": worker.restart_count,
            "can_replace": self.live.rules.can_create,
        }

    def _members(self) -> list[Node]:
        """Return the nodes of the round that are known."""
        members = self.state.world.members if self.state.world is not None else ()
        return [node for m in members if (node := self.live.nodes.get(m.node)) is not None]

    def _apply_decision(
        self,
        node: Node,
        decision: FailureDecision,
        kind: Kind,
        reason: str,
        event: int,
        *,
        charged: Sequence[Node],
    ) -> None:
        """Charge a failure, and declare a next round or end the job.

        A node that is to be replaced is dismissed, and a slot for a new node is added.

        Args:
            node: The node.
            decision: What follows from the failure.
            kind: Why the next round is needed.
            reason: The same in words.
            event: Id of the event of the failure.
            charged: The nodes whose restarts it is counted among: this one, or all.
        """
        for one in charged:
            self.live.nodes.count_failures(one, restarts=1)
        if decision.action is FailureAction.STOP:
            who = "the job" if len(charged) > 1 else node.id
            message = f"{who}: {decision.message}"
            self._transitions.end_job(JobPhase.FAILED, decision.reason, message, cause=event)
            return
        self._transitions.need_round(kind, reason, event)
        if decision.action is FailureAction.REPLACE:
            self.log.record(
                decision.reason, f"{node.id}: {decision.message}", node=node.id, cause=event
            )
            self.state.replacement_slots.append(self._capacity.new_slot(node.relaunches + 1))
            self._capacity.dismiss(node, "its restarts are used up", ExitCode.FAILED)

    def _ended_ranks(self, *, but: NodeId) -> list[int]:
        """Return the ranks of nodes whose workers have all ended with exit code 0 in the round.

        Args:
            but: A node that is left out.
        """
        ranks: list[int] = []
        for member in self.state.world.members if self.state.world else ():
            node = self.live.nodes.get(member.node)
            report = node.report if node is not None and node.id != but else None
            if (
                report is not None
                and report.phase is WorkerPhase.SUCCEEDED
                and report.follows == self.state.round
            ):
                ranks += range(member.rank_offset, member.rank_offset + member.nproc)
        return ranks

    def _awaits_news(self, *, but: NodeId, since: float) -> bool:
        """Return whether another member is suspect, or has not reported since a monotonic time.

        Such a member may be the cause of the failure.

        Args:
            but: The member whose failure is suspected; it is left out.
            since: The time at which the next round became necessary.
        """
        members = self.state.world.members if self.state.world else ()
        found = (self.live.nodes.get(member.node) for member in members)
        return any(
            node is not None and node.id != but and self.live.nodes.is_silent(node, since)
            for node in found
        )
