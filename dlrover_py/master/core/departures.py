"""Nodes that leave or are gone: with notice, lost, ended, or no longer listed."""

import math

from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.capacity import Capacity
from dlrover_py.master.core.checkpointing import Checkpointing
from dlrover_py.master.core.events import CreateNode, DeleteNode, NodeEnded, NodeSeen
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Loss, Node, Readiness
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.master.core.tuning import Tuning
from dlrover_py.protocol.agents import FailureClass
from dlrover_py.protocol.commands import ELASTIC_RUN
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase

GONE_KEPT = 64
"""Number of gone nodes that are kept when the oldest are dropped."""
LATE_REASON_S = 60.0
"""Seconds after the loss of a node in which its platform may still report the reason."""
KILLED_EXIT = 137
"""Exit code of a container whose program was killed: 128 and the number of SIGKILL."""
NEVER_JOINED = (
    "the command ended with code 0 and never joined the job: start the script with elastic-run"
)


class Departures:
    """Takes in what the platform sees of nodes, and handles each that leaves or is gone."""

    def __init__(
        self,
        context: CoreContext,
        transitions: Transitions,
        capacity: Capacity,
        assignments: Assignments,
        checkpointing: Checkpointing,
        tuning: Tuning,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._capacity = capacity
        self._assignments = assignments
        self._checkpointing = checkpointing
        self._tuning = tuning
        self._lost: dict[NodeId, tuple[float, int, bool]] = {}
        """When each recently lost node was lost, the id of the event about it, and whether its loss
        was charged."""

    def node_seen(self, seen: NodeSeen) -> None:
        """Take in the state of a node that exists on the platform.

        If the node is not known or was given up, its deletion is requested where the platform
        creates nodes; elsewhere it is ignored. A known node that has to end, as the platform says,
        begins to leave. A node that cannot start, and was made from another template than the
        present one, is replaced without a charge.
        """
        node = self.live.nodes.get(seen.node)
        if node is None or node.phase is NodePhase.GONE:
            if self.live.rules.can_create:  # from a time that no journal knows: it is not needed
                self._capacity.skip_id(seen.node)
                why = "it is not a node of this job"
                self.live.emit(DeleteNode(seen.node, 0.0, why))
            return
        self.live.nodes.observe(
            seen.node,
            near=seen.near,
            runs=seen.near and seen.runs,
            exists=seen.exists,
            topology=seen.topology,
            message=seen.message,
            cut_off=seen.cut_off,
            now=self.live.now,
        )
        node.grace_s = seen.grace_s
        if seen.leaving and (not node.leaving or node.announced_by_agent):
            self._capacity.spot.note_reclaim(node)
        if seen.leaving:
            node.announced_by_agent = False
        if seen.template_hash:
            self.live.nodes.set_template(node, seen.template_hash)
        if seen.leaving and not node.leaving:
            self.node_leaving(node, seen.leaving)
        elif node.stuck and seen.template_hash not in ("", self.live.template_hash):
            # It became known after the change that it cannot start.
            self._capacity.replace_stuck(node, None)

    def nodes_listed(self, listed: frozenset[NodeId], *, free: bool) -> None:
        """Give up nodes that the platform's list lacks, or request them again if they are new.

        A missing node is given up if the platform or an earlier master has seen it before.
        Otherwise it is requested again, unless it has reported, is leaving, or the job has ended.
        If the journal was lost, the first list allows requests for new nodes.

        Args:
            listed: All nodes that exist on the platform.
            free: Whether the loss of a missing node counts against no budget.
        """
        if self._capacity.unlisted:
            self._capacity.unlisted = False
            for node_id in listed:  # including nodes that have ended
                self._capacity.skip_id(node_id)
        for node in list(self.live.nodes):
            if node.phase is NodePhase.GONE or node.id in listed:
                continue
            if node.seen or node.recalled:
                self.node_lost(node, "the platform no longer lists it", free=free)
            elif self.live.rules.can_create and not (
                node.incarnation or node.leaving or self.state.phase.ended
            ):
                # The request for it is on its way or was lost, or the list is older than the
                # request.
                record = node.record
                self.live.emit(
                    CreateNode(node.id, record.avoid, record.memory, record.stable, record.cpu)
                )

    def node_leaving(self, node: Node, why: str) -> None:
        """Mark a node as leaving with notice, and have its place filled without a charge.

        It must not be leaving already: each call requests a replacement. Where nodes come by
        themselves, none is requested. The node is not deleted here. An event is recorded, and an
        agent that has reported gets an order to stop. If the node trains, the newest checkpoint in
        memory is requested to be stored. If the current round still needs the node, a next round
        is declared.
        """
        self.live.nodes.leave(node, why)
        self.live.leave_checks(node.id)
        if self.state.trains(node.id, node.incarnation):
            self._checkpointing.flush(f"node {node.id} is leaving", self.live.grace_s, copy=True)
        event = self.log.record(
            EventReason.NODE_LEAVING, f"node {node.id} is leaving: {why}", node=node.id
        )
        if self.live.rules.can_create:
            slot = self._capacity.new_slot(0, node.failed_before_report + (node.incarnation == 0))
            slot.relaunches = node.relaunches
            self.state.replacement_slots.append(slot)
        if node.incarnation:
            self._assignments.send(node)
        self._transitions.node_unavailable(
            node, "drain", f"node {node.id} is leaving: {why}", event
        )

    def node_ended(self, ended: NodeEnded) -> None:
        """Take in the end of a node, as the platform reports it.

        An unknown node is ignored, and of a node that was given up only an out-of-memory kill is
        noted. Any other node is given up, and a host that refused it gets a strike. The job fails
        before the first round in two cases: the node never reported and ended with a usage error,
        or with exit code 0. In a later round, the place of a node that ended with code 0 without a
        report is abandoned. An end that counts against no budget has none of these consequences. A
        stop by a SIGTERM that the platform did not order is charged. A lack of memory is not, if
        the auto-tuner can make the micro-batch smaller, or the next node gets more memory.
        """
        node = self.live.nodes.get(ended.node)
        smaller = ""
        if node is not None and ended.out_of_memory:
            main = ended.exit_code is not None  # and not an init container
            smaller = self._ran_out_of_memory(node, ended.out_of_memory, main=main)
        if node is None or node.phase is NodePhase.GONE:
            if (loss := self.live.nodes.losses.get(ended.node)) is not None:
                loss.ended = ended.why
            return
        if node.announced_by_agent and ended.free and ended.by_platform:  # its host is shut down
            self._capacity.spot.note_reclaim(node)
        never_reported = node.incarnation == 0
        node.failed_before_report += never_reported
        # Only before the first round: later the command has been shown to work.
        usage = never_reported and ended.exit_code == ExitCode.USAGE and not self.state.round
        # Other commands in the same shell (aws, tar, grep) may end with 2 for temporary reasons.
        usage = usage and not ended.free
        usage = usage and (not ended.output or f"{ELASTIC_RUN}:" in ended.output)
        if ended.refused_by:
            self.live.hosts.strike(ended.refused_by, self.live.now, self.live.wall)
        why = ended.why
        if never_reported and ended.exit_code and not (ended.free or usage):
            why += " before it joined the job"
        why += f": {ended.output}" if never_reported and ended.output else ""
        if never_reported and ended.exit_code == ExitCode.OK and not ended.free:
            self._never_joined(node)
            return
        why += f" ({smaller})" if smaller else ""
        free = ended.free or bool(smaller)
        self.node_lost(
            node,
            why,
            free=free,
            exited_ok=ended.exit_code == ExitCode.OK,
            failure_class=_class_of(ended),
        )
        self._lost.pop(node.id, None)  # its platform has given the reason
        if node.announced_by_agent and ended.exit_code and not (ended.free or ended.by_platform):
            self._count_unordered_stop(node, ended)
        if usage and not self.state.phase.ended:
            self._transitions.end_job(
                JobPhase.FAILED, EventReason.INVALID_COMMAND, f"{node.id}: {why}"
            )

    def node_lost(
        self,
        node: Node,
        why: str,
        *,
        free: bool,
        exited_ok: bool = False,
        failure_class: FailureClass = FailureClass.UNKNOWN,
    ) -> None:
        """Give up a node that is gone, and drop its checks and its checkpoints in memory.

        If the job has ended, nothing more follows. If the node was leaving, or the job is
        suspended, an event says that it has left, and no round is declared. Workers then no longer
        wait for a last common step that cannot end, unless the agent exited with code 0. Any other
        loss is recorded as one, and a next round is declared if the current one needs the node.

        Where the platform creates nodes, the deletion of a node that was not leaving is requested.
        The place of a lost node is filled again, or abandoned if its budget is used up.

        Args:
            node: The node.
            why: The reason, in words.
            free: Whether its loss counts against no budget; the event is then no warning.
            exited_ok: Whether its agent exited with code 0.
            failure_class: What has ended it, for the count of failures.
        """
        self.live.nodes.give_up(node)
        self.live.lost_now.add(node.id)
        self.live.checkpoints.drop(node.id, self.live.now)
        self.live.leave_checks(node.id)
        if self.live.rules.can_create:
            self._assignments.drop(node.id)
        else:  # it may come back, and its versions and incarnations must grow
            self._remember_incarnation(node)
        if self.live.rules.can_create and not node.leaving and not self.state.phase.ended:
            # Immediately: another node may get its rank, and two must not write the same
            # checkpoint.
            self.live.emit(DeleteNode(node.id, 0.0, why))
        if node.leaving or self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED:
            if not self.state.phase.ended:
                self.log.record(
                    EventReason.NODE_LEFT, f"node {node.id} has left: {why}", node=node.id
                )
                if not exited_ok:
                    self._transitions.shorten_grace(node)
            return
        if node.incarnation:  # of others nothing is known
            self.live.nodes.losses[node.id] = Loss(
                node, why, self.state.round, self.live.now, node.report, node.heard_at
            )
        self.state.count_failure(failure_class)
        self.live.last_loss = f"node {node.id} was lost: {why}"
        event = self.log.record(
            EventReason.NODE_LOST, self.live.last_loss, node=node.id, warning=not free
        )
        self._lost[node.id] = self.live.now, event, not free
        while len(self._lost) > GONE_KEPT:
            del self._lost[next(iter(self._lost))]
        if self.live.rules.can_create:
            self._capacity.replace(node, event, free=free)
        self._transitions.node_unavailable(node, "loss", f"node {node.id} was lost: {why}", event)

    def expire(self) -> None:
        """Give up the nodes that were silent for too long; their hosts may get a strike.

        Their lease has run out, or they did not come back in time after their connection closed.
        Once no round follows, nobody takes the place of a node. A silent one is then kept while
        only its memory can complete the checkpoint that is being stored.
        """
        spared_until = (
            self.live.checkpoints.needed_until
            if self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED
            else lambda _: -math.inf
        )
        for lost in self.live.nodes.expire(self.live.now, spared_until):
            if not lost.free:
                self._capacity.ban_host(lost.node, HostFaultKind.LOST)
            self.node_lost(lost.node, lost.why, free=lost.free)

    def prune_gone_nodes(self) -> None:
        """Drop all but the newest ``GONE_KEPT`` gone nodes.

        Nothing is dropped until more than twice as many nodes are leaving or gone. Where nodes come
        by themselves, the incarnations of the dropped nodes are remembered.
        """
        if self.live.nodes.count(Readiness.OUT) > 2 * GONE_KEPT:
            gone = [n for n in self.live.nodes if n.phase is NodePhase.GONE]
            for node in gone[: max(0, len(gone) - GONE_KEPT)]:
                if not self.live.rules.can_create:
                    self._remember_incarnation(node)
                self.live.nodes.forget(node)

    def _count_unordered_stop(self, node: Node, ended: NodeEnded) -> None:
        """Charge the loss of a node that was stopped by a SIGTERM which its platform did not order.

        The agent had reported the SIGTERM, so it passed for a notice, and the node's place was to
        be filled again without a charge. That is corrected here: the loss is recorded as an event
        and charged. The charge goes to a replacement slot with as many relaunches as this node. If
        there is none, it goes to a node with as many, preferably one that has not joined yet. If
        the budget is used up, the slot is abandoned, or that node is given up as lost. If there is
        neither, nothing is charged.

        Nothing happens if the job has ended or is suspended, or if the master creates no nodes.
        """
        rests = self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED
        if rests or not self.live.rules.can_create:
            return
        message = f"node {node.id} was stopped by SIGTERM, {ended.unordered_stop}"
        self.live.last_loss = f"{message}; {ended.why}"
        event = self.log.record(
            EventReason.NODE_LOST, self.live.last_loss, node=node.id, warning=True
        )
        for at, place in enumerate(self.state.replacement_slots):
            if place.relaunches == node.relaunches:
                del self.state.replacement_slots[at]
                self._capacity.replace(node, event)
                return
        alike = [
            n
            for n in self.live.nodes
            if n.relaunches == node.relaunches and n.readiness is not Readiness.OUT
        ]
        counted_node = max(alike, key=lambda n: (not n.incarnation, id_key(n.id)), default=None)
        if (
            counted_node is not None
            and counted_node.relaunches < self.live.spec.worker.restart_count
        ):
            self.live.nodes.count_failures(counted_node, relaunches=1)
        elif counted_node is not None:
            self.node_lost(counted_node, self.live.last_loss, free=False)

    def _never_joined(self, node: Node) -> None:
        """Handle a command that ended with code 0 and never joined the job.

        A new node would do the same. Before the first round the job fails. Later the place is
        abandoned, and the others go on. If the node was leaving, or the job has ended or is
        suspended, the node counts as having left.
        """
        if node.leaving or self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED:
            self.node_lost(node, NEVER_JOINED, free=True, exited_ok=True)
            return
        self.live.nodes.give_up(node)
        self.live.lost_now.add(node.id)
        self.live.emit(DeleteNode(node.id, 0.0, NEVER_JOINED))
        message = f"{node.id}: {NEVER_JOINED}"
        if not self.state.round:
            self._transitions.end_job(JobPhase.FAILED, EventReason.NEVER_JOINED, message)
            return
        self.state.abandoned_slots += 1
        self.live.last_loss = message
        self.log.record(
            EventReason.NEVER_JOINED, f"{message}; it is not replaced", node=node.id, warning=True
        )

    def _remember_incarnation(self, node: Node) -> None:
        """Remember a node's incarnation, so that no later master uses it again.

        Where more than 128 nodes are remembered, the oldest are dropped. Nodes that are not
        remembered then begin above the highest incarnation that was dropped.
        """
        self.state.last_incarnations.pop(node.id, None)
        self.state.last_incarnations[node.id] = node.incarnation
        while len(self.state.last_incarnations) > 2 * GONE_KEPT:
            oldest = next(iter(self.state.last_incarnations))
            self.state.least_incarnation = max(
                self.state.least_incarnation, self.state.last_incarnations.pop(oldest)
            )

    def _ran_out_of_memory(self, node: Node, description: str, *, main: bool) -> str:
        """Note that a node ran out of memory, as its platform reports.

        The status of the job shows the kill until training is steady again. Often the node was
        given up before, when its connection closed. An event then reports the kill once. The report
        is ignored if the node was lost more than ``LATE_REASON_S`` ago, or its loss is not known.
        What was charged then is taken back if new nodes have more memory.

        Args:
            node: The node.
            description: What ran out, in words.
            main: Whether the main container ran out of memory, and not an init container.

        Returns:
            Why the loss of the node costs nothing, in words; empty if it costs what it would cost
            anyway, or was charged already.
        """
        charged = False
        if node.phase is NodePhase.GONE:
            at, cause, charged = self._lost.pop(node.id, (-math.inf, 0, False))
            if self.live.now - at > LATE_REASON_S:
                return ""
            message = f"node {node.id} ran {description}"
            self.log.record(
                EventReason.OUT_OF_MEMORY, message, node=node.id, cause=cause, warning=True
            )
        self.state.out_of_memory = f"{node.id}: {description}"
        why = self._capacity.end_lowering(node) if main else ""
        if not why and (smaller := self._tuning.back_off(node.id)):
            return smaller
        if not why and main:
            why = self._capacity.raise_memory(node)
        if why and charged:
            self._capacity.forgive(node)
        return why


def _class_of(ended: NodeEnded) -> FailureClass:
    """Return what has ended a node."""
    if ended.out_of_memory:
        return FailureClass.HOST_MEMORY
    if ended.by_platform:
        return FailureClass.PREEMPTED
    if ended.exit_code == KILLED_EXIT:
        return FailureClass.KILLED
    return FailureClass.UNKNOWN
