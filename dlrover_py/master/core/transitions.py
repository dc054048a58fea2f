"""The changes of a job's phase: a next round is needed, a round is over, the job ends."""

from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.checkpointing import Checkpointing
from dlrover_py.master.core.events import DeleteNode, Kind
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.state import NON_DISRUPTIVE, PLANNED, PendingRound
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase


class Transitions:
    """Declares that a next round is needed, and ends rounds and the job."""

    def __init__(
        self, context: CoreContext, assignments: Assignments, checkpointing: Checkpointing
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._assignments = assignments
        self._checkpointing = checkpointing

    def need_round(self, kind: Kind, reason: str, event: int) -> None:
        """Declare that a next round is needed; it is formed later by :class:`Rounds`.

        Nothing happens if the job has ended or is suspended. If a next round is needed already, its
        first cause is kept. A further fault then only notes that a planned change was disrupted.
        But a suspected cause, or a change of size, gives way to the new cause.

        Args:
            kind: Why the round is needed.
            reason: The same in words.
            event: Id of the event that made it necessary.
        """
        if self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED:
            return
        old = self.state.pending_round
        if old is not None and old.suspected is None and old.kind not in NON_DISRUPTIVE:
            if kind not in PLANNED:
                self.mark_disrupted()
            return
        since = self.live.now if old is None or old.kind in NON_DISRUPTIVE else old.since
        disrupted = old is not None and (old.disrupted or old.kind not in PLANNED)
        self.state.pending_round = PendingRound(
            kind=kind, reason=reason, cause=event, since=since, disrupted=disrupted
        )
        self.log.begin(event, since)

    def node_unavailable(self, node: Node, kind: Kind, reason: str, event: int) -> None:
        """Declare a next round if the current one needs a node that is leaving or gone.

        Nothing happens without a current round, or if this incarnation of the node is not a member
        of it. The same is true if the node's workers have all exited with code 0, and no next round
        is pending. :meth:`need_round` is called in all other cases.

        Args:
            node: The node.
            kind: Why a next round would be needed.
            reason: The same in words.
            event: Id of the event that the node is leaving or gone.
        """
        world = self.state.world
        if world is None or not world.has(node.id, node.incarnation):
            return
        if not self.state.has_finished(node.id):
            self.need_round(kind, reason, event)

    def mark_disrupted(self) -> None:
        """Note a fault during a planned change: its last step cannot end and is not awaited.

        Nothing happens if no planned change is pending, or this was noted before. Nodes get changed
        assignments if the round is over already.
        """
        pending = self.state.pending_round
        if pending is None or pending.disrupted or pending.kind not in PLANNED:
            return
        pending.disrupted = True
        self.state.changed()
        if self.state.phase is JobPhase.FORMING:
            self._assignments.send_all()

    def shorten_grace(self, node: Node) -> None:
        """Stop waiting for the last common step of a round, because a leaving node is gone.

        If the node never reported that its workers had ended, workers of other nodes may wait for
        them, in a step that cannot end. Nodes then get changed assignments. Nothing happens if the
        node had reported this, or was no member of a round that ends by plan.
        """
        clean = node.report.memory_round if node.report is not None else 0
        world = self.state.world if self.state.pending_round is not None else None
        ending = (self.live.previous_world, world)
        if not any(w and w.has(node.id, node.incarnation) and clean <= w.round for w in ending):
            return
        self.mark_disrupted()
        if self.live.previous_world is not None:
            self.live.previous_world = None
            self._assignments.send_all()

    def close_round(self) -> None:
        """Drop the current round and a pending one, for a job that is suspended.

        No assignment is sent here, and no replicas are kept from now on.
        """
        self.state.world = self.state.pending_round = None
        self.live.previous_world = self.live.progress = None
        self.live.checkpoints.end_round()
        self.state.succeeded.clear()

    def end_job(
        self, phase: JobPhase, reason: EventReason, message: str, *, cause: int | None = None
    ) -> None:
        """End the job in this phase: agents get an order to stop, and nodes are to be deleted.

        Before that, the newest checkpoint is requested to be stored. A warning is recorded if
        checkpoints were only in memory. The orders are effects of this step. Nodes that come by
        themselves are not deleted. The caller must ensure that the job has not ended before.

        Args:
            phase: How it ends.
            reason: Reason of the event.
            message: The reason in a sentence.
            cause: Id of the event that led to the end.
        """
        self._checkpointing.flush(message, self.live.grace_s)
        self.state.phase, self.state.reason = phase, message
        self.state.ended_at = self.live.steady_wall
        self.live.checkpoints.end_round()
        self.log.record(reason, message, cause=cause, warning=phase is JobPhase.FAILED)
        if step := self.live.checkpoints.only_in_memory():
            text = (
                f"the checkpoint of step {step} was only in memory and is lost with the job: set "
                "spec.checkpoint.dir, or give the script's Checkpointer a directory"
            )
            self.log.record(EventReason.NOTHING_STORED, text, warning=True)
        self.state.pending_round = None
        self.live.end_reason = reason
        for node in list(self.live.nodes):
            if node.phase is NodePhase.GONE:
                continue
            if node.incarnation:
                self._assignments.send(node)
            if self.live.rules.can_create:
                grace = self.live.grace_s if node.incarnation else 0.0
                self.live.emit(DeleteNode(node.id, grace, message))
