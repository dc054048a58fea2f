"""The number of nodes: which are requested, replaced, banned from hosts, and dismissed."""

import math
from collections.abc import Callable

from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.checkpointing import Checkpointing
from dlrover_py.master.core.events import CreateNode, DeleteNode
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.memory import NodeMemory
from dlrover_py.master.core.nodes import Node, NodeRecord, Readiness
from dlrover_py.master.core.policy import relaunch_delay
from dlrover_py.master.core.spot import SpotHosts
from dlrover_py.master.core.state import ReplacementSlot
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.agents import Directive
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase
from dlrover_py.protocol.words import are, counted

MAX_DIGITS = 15
"""Largest number of digits in a node's number; no master reaches a larger number."""
NO_ROOM_S = 20.0
"""Seconds without a place after which a node may be put on a banned host."""


class Capacity:
    """Keeps as many nodes as desired, where the platform creates nodes."""

    def __init__(
        self,
        context: CoreContext,
        transitions: Transitions,
        assignments: Assignments,
        checkpointing: Checkpointing,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._assignments = assignments
        self._checkpointing = checkpointing
        self._memory = NodeMemory(context)
        self.spot = SpotHosts(context)
        self.unlisted = False
        """Whether the existing nodes are unknown: there is neither a journal nor a list yet."""
        self._readmitted: set[str] = set()
        """Hosts that are bad for other jobs, and on which alone there was room for a node."""
        self._avoiding_hosts = {n for n, record in self.state.nodes.items() if record.avoid}
        """Nodes that were requested with a list of hosts to avoid, and have not reported yet."""

    @property
    def places(self) -> int:
        """The number of places that are not abandoned, those of all standbys included.

        Standbys that the allocator takes back for a time leave places, as they may come back.
        """
        standbys = self.live.spec.worker.standby_replicas
        return max(0, self.live.desired + standbys - self.state.abandoned_slots)

    @property
    def wanted(self) -> int:
        """The number of nodes that the job is to have now, with the standbys it may have."""
        return min(self.places, self.live.desired + self.live.spec.standbys)

    def plan_nodes(self) -> None:
        """Request missing nodes, and dismiss surplus nodes.

        Surplus nodes are dismissed ``settle_s`` after a new spec; members of the current round
        stay. A lost node is replaced once the delay of its slot is over. Nothing happens in a job
        that has ended or is suspended, or where nodes come by themselves. Nothing happens either
        before the first list of nodes, if the journal was lost. While spot hosts are taken away too
        often, only nodes on stable hosts are requested.

        The job fails if abandoned places leave fewer nodes than the minimum, unless workers of the
        current round have succeeded already.
        """
        rests = self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED
        if not self.live.rules.can_create or self.unlisted or rests:
            return
        worker, least = self.live.spec.worker, self.live.size.least
        finishing = self.state.succeeded and self.state.pending_round is None
        if self.state.abandoned_slots and self.places < least and not finishing:
            alone = "" if self.state.round else worker.command_remarks()
            given_up = self.state.abandoned_slots
            self._transitions.end_job(
                JobPhase.FAILED,
                EventReason.REPLACEMENTS_EXHAUSTED,
                f"fewer nodes than the minimum of {least} remain: {given_up} "
                f"{are(given_up)} not replaced{f'; {alone}' if alone else ''}"
                f"{self.live.last_loss and f'; the last loss: {self.live.last_loss}'}",
            )
            return
        missing = self.wanted - self.live.nodes.present
        if missing < 0:
            if self.live.now < (settled := self.live.spec_changed_at + self.live.rules.settle_s):
                self.live.wake(settled)  # a request for fewer nodes may be taken back
            else:
                self._dismiss_surplus(-missing)
        if missing <= 0:
            self.state.replacement_slots.clear()
            return
        del self.state.replacement_slots[missing:]
        due = [slot for slot in self.state.replacement_slots if slot.not_before <= self.live.now]
        later = [slot for slot in self.state.replacement_slots if slot.not_before > self.live.now]
        fresh = missing - len(due) - len(later)
        avoid = self.avoided_hosts()
        restart = self.live.spec.spec.restart
        stable, held_until = self.spot.stable_missing(), self.spot.held_until()
        for at, slot in enumerate(due + [ReplacementSlot(relaunches=0)] * fresh):
            if at >= stable and self.live.now < held_until:
                later += due[at:]
                self.live.wake(held_until)
                break
            node_id = NodeId(f"n{self.state.next_node}")
            self.state.next_node += 1
            record = NodeRecord(
                relaunches=slot.relaunches,
                avoid=avoid,
                template_hash=self.live.template_hash,
                restart=restart.at if restart is not None else "",
                memory=self._memory.of_new_nodes,
                stable=at < stable,
                cpu=self._memory.cpu_of_new_nodes,
            )
            failures = slot.failed_before_report
            self.live.nodes.plan(node_id, record, failed_before_report=failures)
            if avoid:
                self._avoiding_hosts.add(node_id)
            self.live.emit(CreateNode(node_id, avoid, record.memory, record.stable, record.cpu))
        self.state.replacement_slots[:] = later
        self.live.wake(*(s.not_before for s in later if s.not_before > self.live.now))

    def lift_bans(self) -> None:
        """Replace nodes that only banned hosts have room for, once such a host is allowed again.

        Only nodes that were requested with hosts to avoid, and have not reported yet, are
        considered. After ``NO_ROOM_S`` without a place, the bans of these hosts are lifted early.
        The node is then dismissed, and a replacement slot without a charge is added for it.
        """
        for node_id in sorted(self._avoiding_hosts, key=id_key):
            node = self.live.nodes.get(node_id)
            if node is None or node.incarnation or node.readiness is Readiness.OUT:
                self._avoiding_hosts.discard(node_id)
                continue
            if node.pending_since == math.inf:
                continue
            until = node.pending_since + NO_ROOM_S
            if self.live.now >= until:
                self.readmit(node.record.avoid)
            elif set(node.record.avoid) <= set(self.avoided_hosts()):
                self.live.wake(until, self.live.hosts.next_end(self.live.now))
                continue
            message = (
                f"node {node.id} can only be placed on hosts that are excluded after a failure, so "
                f"these are allowed again ({node.message})"
            )
            self.log.record(EventReason.HOSTS_READMITTED, message, node=node.id)
            self.recreate(node, message)

    def dismiss(self, node: Node, why: str, code: ExitCode) -> None:
        """Mark a node as leaving, assign its agent an order to stop, and request its deletion.

        An agent that has not reported to this master gets the order after its first report. There
        is no deletion where nodes come by themselves. The caller must fill the place and declare
        the next round, if that is needed. If the node trains, its newest checkpoint is requested to
        be stored.

        Args:
            node: The node.
            why: The reason, in words.
            code: Exit code of its agent.
        """
        if self.state.trains(node.id, node.incarnation):
            why_stored = f"node {node.id} is being removed"
            self._checkpointing.flush(why_stored, self.live.grace_s, copy=True)
        self.live.nodes.leave(node, why)
        self.live.leave_checks(node.id)
        if node.incarnation:
            self._assignments.assign(node, Directive.STOP, why, exit_code=int(code))
        if self.live.rules.can_create:
            grace = self.live.grace_s if node.incarnation else 0.0
            self.live.emit(DeleteNode(node.id, grace, why))

    def replace(self, node: Node, event: int, *, free: bool = False) -> None:
        """Add a replacement slot for a lost node, or abandon its place if the budget is used up.

        The new node is requested later, by :meth:`plan_nodes`. An abandoned place is counted and
        recorded as an event.

        Args:
            node: The node that is gone.
            event: Id of the event about its loss.
            free: Whether its loss counts against no budget.
        """
        relaunches = node.relaunches + (0 if free else 1)
        if relaunches <= self.live.spec.worker.restart_count:
            slot = self.new_slot(relaunches, node.failed_before_report)
            self.state.replacement_slots.append(slot)
            return
        self.state.abandoned_slots += 1
        self.log.record(
            EventReason.REPLACEMENTS_EXHAUSTED,
            f"node {node.id} is not replaced: {counted(node.relaunches, 'replacement')} "
            f"{'was' if node.relaunches == 1 else 'were'} already lost in its place without steady "
            f"progress (restartCount is {self.live.spec.worker.restart_count})",
            node=node.id,
            cause=event,
            warning=True,
        )

    def replace_stuck(self, node: Node, cause: int | None) -> None:
        """Dismiss a node that cannot start, and have one created from the changed template.

        Without an image, or a host that has room for it, the node would otherwise stay as it is
        indefinitely. No restart budget is charged, and an event is recorded. Its cause is the event
        with the id ``cause``, if given.
        """
        message = (
            f"node {node.id} could not start ({node.message}); a new node is created, because the "
            "template has changed"
        )
        self.log.record(EventReason.NODE_RECREATED, message, node=node.id, cause=cause)
        self.recreate(node, message)

    def recreate(self, node: Node, why: str) -> None:
        """Dismiss a node that is there, and have another fill its place without a charge."""
        self.state.replacement_slots.append(ReplacementSlot(relaunches=node.relaunches))
        self.dismiss(node, why, ExitCode.OK)

    def end_lowering(self, node: Node) -> str:
        """End the lowering of memory by advice after a node ran out of memory; return why.

        The result is empty, and the failure counts like any other, if the node itself had no less
        memory than the template says (:meth:`NodeMemory.end_lowering`). The auto-tuner must not
        answer for what the advice has caused, so this comes first.
        """
        return self._with_more_memory(self._memory.end_lowering, node)

    def raise_memory(self, node: Node) -> str:
        """Give new nodes a higher memory limit after a node ran out of memory; return why.

        The caller has called :meth:`end_lowering` before, and has the node itself replaced. The
        result is empty, and nothing happens, if the failure counts like any other
        (:meth:`NodeMemory.grow`).
        """
        return self._with_more_memory(self._memory.grow, node)

    def _with_more_memory(self, change: Callable[[Node], str], node: Node) -> str:
        """Change the memory limit of new nodes after a node ran out of memory; return why.

        Nodes that have not joined yet, such as one that was requested before its platform gave the
        reason, are requested again with a higher limit.
        """
        before = self._memory.of_new_nodes
        why = change(node)
        if self._memory.of_new_nodes == before:
            return why
        for other in list(self.live.nodes):
            waits = not other.incarnation and other.readiness is not Readiness.OUT
            if waits and other is not node and (more := self._memory.lacks(other)):
                self.recreate(other, more)
        return why

    def lacks_memory(self, node: Node) -> str:
        """Return why a node that ran out of memory is replaced without a charge; else empty."""
        return self._memory.lacks(node)

    def forgive(self, node: Node) -> None:
        """Take back what :meth:`replace` has charged for the loss of a node.

        The place with that charge, or the node that was requested for it and has not joined yet, is
        charged once less. A place that was abandoned is filled again.
        """
        charged = node.relaunches + 1
        if charged > self.live.spec.worker.restart_count:
            if self.state.abandoned_slots:
                self.state.abandoned_slots -= 1
                self.state.replacement_slots.append(ReplacementSlot(relaunches=node.relaunches))
            return
        for slot in self.state.replacement_slots:
            if slot.relaunches == charged:
                slot.relaunches, slot.not_before = node.relaunches, -math.inf
                self.state.changed()
                return
        for other in self.live.nodes:
            if (
                other.relaunches == charged
                and not other.incarnation
                and other.readiness is not Readiness.OUT
            ):
                self.live.nodes.count_failures(other, relaunches=-1)
                return

    def new_slot(self, relaunches: int, failed_before_report: int = 0) -> ReplacementSlot:
        """Return a replacement slot with the delay that follows from its numbers.

        The caller adds it to the state.
        """
        not_before = self.live.now + relaunch_delay(relaunches, failed_before_report)
        return ReplacementSlot(
            relaunches=relaunches, failed_before_report=failed_before_report, not_before=not_before
        )

    def avoided_hosts(self) -> tuple[str, ...]:
        """Return the hosts on which no new node may be placed now."""
        banned, bad = self.live.hosts.banned(self.live.now), self.live.spec.bad_hosts
        if bad is None or not self.live.rules.avoids_hosts:
            return banned
        return tuple(sorted({*banned, *bad.avoid} - (self._readmitted - {*banned})))

    def readmit(self, hosts: tuple[str, ...]) -> None:
        """Allow hosts again, although they were banned or are bad: only these have room."""
        self.live.hosts.lift_bans(hosts)
        self._readmitted.update(hosts)

    def ban_host(self, node: Node, kind: HostFaultKind) -> None:
        """Count a strike against the node's host, which may be at fault, and ban it for a while.

        The fault of a known host is always noted for other jobs, too. Neither a strike nor a ban
        follows if the host is not known, or if no living node is on another one. The same holds
        where nodes come by themselves, or where the platform cannot keep nodes off hosts.

        Args:
            node: The node.
            kind: What has happened.
        """
        live, host = self.live, node.host
        self.state.note_host_fault(host, live.wall, kind)
        bans = live.rules.can_create and live.rules.avoids_hosts and host
        if bans and any(n.alive and n.host != host for n in live.nodes):
            live.hosts.strike(host, live.now, live.wall)

    def skip_id(self, node_id: NodeId) -> None:
        """Ensure that an id in use, which no journal knows, is not given to another node.

        Ids of another form than ``n`` and a number are ignored.
        """
        number = node_id.removeprefix("n")
        is_created_id = number.isdecimal() and len(number) <= MAX_DIGITS
        if is_created_id and int(number) >= self.state.next_node:
            self.state.next_node = int(number) + 1

    def _dismiss_surplus(self, surplus: int) -> None:
        """Dismiss up to this many nodes, those first whose loss costs least.

        Nodes that could start soon go later, then those whose whole topology domain is that of a
        member, then those that must be on stable hosts, and then older ones. Members of the round
        stay until a smaller round has been formed without them. Fewer nodes than ``surplus`` may
        therefore be dismissed.
        """
        order = {Readiness.PENDING: 0, Readiness.NEAR: 1, Readiness.BUSY: 2, Readiness.READY: 2}
        members = self.state.world.rank_of if self.state.world is not None else {}
        removable = [n for n in self.live.nodes if n.readiness in order and n.id not in members]
        near = {n.domain for n in map(self.live.nodes.get, members) if n is not None}
        removable.sort(key=lambda n: id_key(n.id), reverse=True)
        removable.sort(key=lambda n: (order[n.readiness], n.domain in near, n.record.stable))
        for node in removable[:surplus]:
            self.dismiss(node, "the spec asks for fewer nodes", ExitCode.OK)
