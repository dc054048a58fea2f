"""The next round: whether it is needed, how long it waits for nodes, and which are in it."""

import math

from dlrover_py.master.core.admission import Admission
from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.autoscaler import Autoscaler
from dlrover_py.master.core.checkpointing import Checkpointing
from dlrover_py.master.core.history import CoreContext, named
from dlrover_py.master.core.nodes import Readiness
from dlrover_py.master.core.policy import MAX_SUSPECT_WARM_STARTS
from dlrover_py.master.core.rendezvous import (
    CandidateNode,
    Counts,
    Form,
    RoundMembers,
    Size,
    Wait,
    arrange,
    verdict,
)
from dlrover_py.master.core.state import NON_DISRUPTIVE, PendingRound
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.names import NodeId, Round
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase
from dlrover_py.protocol.words import are, counted

MISSED_S = 10.0
"""Seconds after which an event names the nodes that did not come."""
MISSED_AGAIN = 6.0
"""Factor by which the wait grows before the next such event."""
SILENT_S = 30.0
"""Seconds between two looks for nodes whose command runs and does not join. Two in a row make an
event, since a node may have been started just before the first one."""


class Rounds:
    """Forms a round as soon as every node that is waited for has come."""

    def __init__(
        self,
        context: CoreContext,
        transitions: Transitions,
        assignments: Assignments,
        checkpointing: Checkpointing,
        admission: Admission,
        autoscaler: Autoscaler,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._assignments = assignments
        self._checkpointing = checkpointing
        self._admission = admission
        self._autoscaler = autoscaler
        self._enough_since: float | None = None
        """When enough nodes for the first round were there; None if there are not enough."""
        self._missed: tuple[float, float] = (-math.inf, MISSED_S)
        """Begin of a round that lacks nodes, and the wait before the next event about it."""
        self._silent: dict[NodeId, tuple[float, float]] = {}
        """Nodes that ran and had not joined at the last look: since when, and when to tell it."""
        self._look_at = math.inf
        """When to look for such nodes again; infinite if there is none."""

    def form(self) -> bool:
        """Form the next round if one is needed and every node that can come has come.

        A change of the desired or possible size makes a round necessary here. A pending change of
        size is dropped if it no longer applies. While a round after a fault or a departure is
        awaited, workers are stopped. If too few nodes come within ``join_timeout_s``, the job
        fails.

        Returns:
            True if a round was formed. False if none is needed, the job has ended or is suspended,
            or nodes, their checks or the cause of a failure are still awaited.
        """
        if self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED:
            return False
        self._look_for_silent_nodes()
        size = self.live.size
        ready = self.live.nodes.count(Readiness.READY)
        current = len(self.state.world.members) if self.state.world is not None else 0
        shrink = 0 < size.fit(size.desired) < current
        pending = self.state.pending_round
        healthy = pending is not None and pending.kind in NON_DISRUPTIVE
        if pending is not None and healthy and shrink != (pending.kind == "scale"):
            self.state.pending_round = None  # the spec has changed again
        if self.state.pending_round is None:
            self._look_for_change(size, ready, current)
        pending = self.state.pending_round
        if pending is None or pending.hold_until is not None:
            return False
        if pending.kind == "start" and self._admission.checks_first():
            count = len(self.live.health.open)
            message = f"{counted(count, 'node')} {are(count)} being checked first"
            self.state.reason = f"{message} ({pending.reason})"
            present = ready + len(self.live.health.open)
            if not size.fit(present):
                least = counted(size.least, "node")
                message = f"{present} of at least {least} {are(present)} present"
                self._too_late(pending, message)
            return False
        if self._last_call(size, ready, pending):
            return False
        near = self._expected_nodes(pending)
        # Nodes that were near have been waited for before the check.
        waited = pending.kind == "start" and bool(self.live.health.node_records)
        wait_s = 0.0 if waited or not near else self.live.rules.replacement_wait_s
        spares, spare_wait_s = self._autoscaler.spare_wait(pending)
        wait_s = max(wait_s, spare_wait_s)
        counts = Counts(ready, self.live.nodes.count(Readiness.BUSY), max(near, spares))
        answer = verdict(size, counts, opened_at=pending.since, now=self.live.now, wait_s=wait_s)
        if confirming := self.live.health.confirming:
            answer = Wait(f"{' and '.join(confirming)} are being checked")
        if isinstance(answer, Form):
            if pending.kind == "join" and answer.size <= current:
                # The expected nodes did not come: the round would not grow.
                self.state.pending_round = None
                return False
            self._new_round(answer.size, pending)
            return True
        if answer.until is not None:
            self.live.wake(answer.until)
        if not (size.fit(ready) or confirming) and self._too_late(pending, answer.why):
            return False
        if pending.kind in ("failure", "loss", "drain", "start"):
            self.state.reason = f"{answer.why} ({pending.reason})"
            if self.state.phase is JobPhase.RUNNING:
                self.state.phase = JobPhase.FORMING
                # The round is over, so its workers are stopped while the next round is awaited.
                self._assignments.send_all()
            elif self.state.phase is JobPhase.FORMING and self.state.world is not None:
                first = self.live.nodes.get(self.state.world.members[0].node)
                if first is not None and first.alive and not first.leaving:
                    self._assignments.send(first)  # it may have begun the round by now
        return False

    def _last_call(self, size: Size, ready: int, pending: PendingRound) -> bool:
        """Return whether the first round waits for further nodes, although there are enough.

        Where nodes come by themselves, their number is not known in advance. Once there are enough,
        others get ``last_call_s`` seconds. There is no such wait where the platform creates nodes,
        for a later round, or at full size.

        Args:
            size: Bounds of the round.
            ready: Number of nodes that are ready.
            pending: The round that is needed.
        """
        if self.live.rules.can_create or pending.kind != "start" or not size.fit(ready):
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = self.live.now
        until = self._enough_since + self.live.rules.last_call_s
        if size.fit(ready) == size.fit(size.desired) or self.live.now >= until:
            return False
        self.live.wake(until)
        return True

    def _too_late(self, pending: PendingRound, why: str) -> bool:
        """End the job and return True if there were too few nodes for ``join_timeout_s``.

        Before that time, only the event about missing nodes may be recorded.
        """
        until = pending.since + self.live.rules.join_timeout_s
        if self.live.now < until:
            self.live.wake(until)
            if not self.live.rules.can_create:
                self._record_missing_nodes(pending, why)
            return False
        message = f"{why}, after {self.live.rules.join_timeout_s:g} s ({pending.reason})"
        self._transitions.end_job(
            JobPhase.FAILED, EventReason.RENDEZVOUS_TIMEOUT, message, cause=pending.cause
        )
        return True

    def _record_missing_nodes(self, pending: PendingRound, why: str) -> None:
        """Record which nodes are missing, first after `MISSED_S`, then at growing intervals.

        This is for nodes that come by themselves. Elsewhere the platform reports what a node waits
        for. Before the next event is due, or if enough nodes are there and only not ready yet, just
        a timer is set.
        """
        if self._missed[0] != pending.since:
            self._missed = (pending.since, MISSED_S)
        due = pending.since + self._missed[1]
        if self.live.now < due:
            self.live.wake(due)
            return
        here = [node.id for node in self.live.nodes if node.alive and not node.leaving]
        if any(node.leaving for node in self.live.nodes) or self.live.size.fit(len(here)):
            # A node leaves with notice, or is being warmed: the result is open.
            self._missed = (pending.since, self.live.now + MISSED_S - pending.since)
            self.live.wake(self.live.now + MISSED_S)
            return
        waited = self.live.now - pending.since
        self._missed = (pending.since, max(waited, self._missed[1]) * MISSED_AGAIN)
        self.live.wake(pending.since + self._missed[1])
        ranked = {NodeId(f"n{rank}") for rank in range(self.live.size.desired)}
        message = f"present: {named(here) or 'none'}"
        if ranked > set(here):  # the ids come from --node-rank
            message = f"missing: {named(ranked - set(here))}"
        limit = self.live.rules.join_timeout_s
        ends = f"; the job fails after {limit:g} s" if limit < math.inf else ""
        self.log.record(
            EventReason.NODES_MISSING,
            f"{why}, after {waited:.0f} s ({pending.reason}); {message}{ends}",
            cause=pending.cause,
            warning=True,
        )
        self.state.changed()  # the event is worth a write of its own

    def _look_for_silent_nodes(self) -> None:
        """Record which nodes run and do not join, after two looks, then at growing intervals.

        This is for nodes that the platform creates. Their command may wait for something itself,
        such as for the master of another kind of job, and would do so without a word. It does not
        matter whether the other nodes train without them.
        """
        if not self.live.rules.can_create:
            return
        if not self.live.nodes.count(Readiness.NEAR, alive=False, runs=True):
            self._silent, self._look_at = {}, math.inf
            return
        now = self.live.now
        if self._look_at == math.inf:
            self._look_at = now + SILENT_S
        if now < self._look_at:
            self.live.wake(self._look_at)
            return
        self._look_at = now + SILENT_S
        self.live.wake(self._look_at)
        self._silent = {
            node.id: self._silent.get(node.id, (now - SILENT_S, now + SILENT_S))
            for node in self.live.nodes
            if node.phase is NodePhase.STARTING and node.seen and node.runs and not node.leaving
        }
        due = {node: since for node, (since, at) in self._silent.items() if at <= now}
        if not due:
            return
        for node, since in due.items():
            self._silent[node] = since, since + (now - since) * MISSED_AGAIN
        pending = self.state.pending_round
        verb = "runs, but has" if len(due) == 1 else "run, but have"
        reason = f" ({pending.reason})" if pending is not None else ""
        self.log.record(
            EventReason.NODES_MISSING,
            f"{named(due)} {verb} not joined the job, after {now - max(due.values()):.0f} s"
            f"{reason}: does the command reach elastic-run? The output of the nodes shows what it "
            "does",
            cause=pending.cause if pending is not None else None,
            warning=True,
        )
        self.state.changed()

    def _expected_nodes(self, pending: PendingRound) -> int:
        """Return the number of nodes that are not ready yet, but are worth waiting for.

        The kind ``start`` means that no worker runs. The same holds if all members of the last
        round are lost. All nodes that are `Readiness.NEAR` count then, and living nodes that are
        being warmed or checked.

        Only nodes that are `Readiness.NEAR` count otherwise. A node that never reported
        does not count if a living node can start its workers warm. If none can, such a node counts
        unless the platform says that its process does not run yet.
        """
        near = self.live.nodes.count(Readiness.NEAR)
        if pending.kind == "start" or not self._any_survivor():
            # No worker runs: one start is better than many.
            return near + self.live.nodes.count(Readiness.PENDING, alive=True)
        if near and self.live.nodes.any_warm:
            # A new node has to import modules first; nodes that are there can go on in a moment.
            near = self.live.nodes.count(Readiness.NEAR, alive=True)
        elif near:
            # Their images may have to be pulled.
            near -= self.live.nodes.count(Readiness.NEAR, alive=False, runs=False)
        return near

    def _any_survivor(self) -> bool:
        """Return whether a member of the last round lives and stays in the job."""
        members = self.state.world.members if self.state.world is not None else ()
        found = ((m, self.live.nodes.get(m.node)) for m in members)
        # Where nodes come by themselves, another process may have the id of one that was lost.
        return any(
            node is not None
            and node.incarnation == member.incarnation
            and node.alive
            and not node.leaving
            for member, node in found
        )

    def _look_for_change(self, size: Size, ready: int, current: int) -> None:
        """Declare a next round if the job has none yet, must shrink, or can grow.

        Nothing happens once workers of the round have succeeded. A round shrinks only ``settle_s``
        after the change of the spec. If no change of the spec or of the nodes is known as the
        cause, an event is recorded as the cause.

        Args:
            size: Bounds of the round.
            ready: Number of nodes that are ready.
            current: Number of members of the current round.
        """
        following = Round(self.state.round + 1)
        if self.state.world is None:
            event = self.state.next_event - 1
            self._transitions.need_round("start", "the job starts", event)
        elif self.state.succeeded:
            return  # it finishes soon
        elif 0 < size.fit(size.desired) < current:
            event, since = self.live.round_causes.get(following, (0, self.live.now))
            if self.live.now < (settled := since + self.live.rules.settle_s) and event:
                self.live.wake(settled)
                return
            if not event:  # the spec has changed while no master ran
                message = f"the desired size is now {counted(size.desired, 'node')}"
                event = self.log.record(EventReason.SPEC_CHANGED, message)
            message = f"the desired size is now {counted(size.desired, 'node')}"
            self._transitions.need_round("scale", message, event)
            if self.state.pending_round is not None:
                self.state.pending_round.since = since
        elif size.fit(ready) > current:
            event, since = self.live.round_causes.get(following, (0, self.live.now))
            if not event:
                event = self.log.record(
                    EventReason.ROOM_TO_GROW,
                    f"{counted(ready, 'node')} {are(ready)} ready and {current} {are(current)} in "
                    "the round",
                )
            message = f"the round can grow to {counted(size.fit(ready), 'node')}"
            self._transitions.need_round("join", message, event)

    def _new_round(self, size: int, pending: PendingRound) -> None:
        """Form the next round with this many ready nodes, and assign all ready nodes their task.

        The progress and the successes of the last round are reset, and an event is recorded. The
        workers start cold if warm starts are in doubt. If the size of the job was reduced, the
        newest checkpoint of the previous round is requested to be stored.
        """
        previous: list[tuple[NodeId, tuple[str, ...]]] = []
        if self.state.world is not None:
            for member in self.state.world.members:
                node = self.live.nodes.get(member.node)
                previous.append((member.node, node.place if node else ()))
        ready = [n for n in self.live.nodes if n.readiness is Readiness.READY]
        candidates = [
            CandidateNode(
                n.id, n.incarnation, n.report.nproc, n.place, n.report.role, n.record.stable
            )
            for n in ready
            if n.report is not None
        ]
        members = arrange(candidates, size, previous)
        first = self.live.nodes[members[0].node].report
        assert first is not None
        self.state.round = Round(self.state.round + 1)
        old = self.state.world
        self.live.previous_world = old if self._assignments.is_planned() else None
        self.state.world = RoundMembers(
            round=self.state.round,
            members=members,
            master_addr=first.offer.addr,
            master_port=first.offer.port,
        )
        for member in members:  # a good node may have been helping with a check
            if self.live.checking.pop(member.node, None) is not None:
                self.live.health.withdraw(member.node)
        if self.state.resumed:  # otherwise the earlier cause counts for the whole time
            healthy = pending.kind in NON_DISRUPTIVE
            self.live.outage = pending.kind, self.live.now if healthy else pending.since
        if pending.kind != "start":
            self.state.restarts[pending.kind] = self.state.restarts.get(pending.kind, 0) + 1
        self.state.phase = JobPhase.RUNNING
        self.state.reason = pending.reason
        self.live.formed_at, self.live.baseline_step = self.live.now, self.state.max_step
        self.state.warm_starts.disabled = (
            pending.cold or self.state.warm_starts.suspected >= MAX_SUSPECT_WARM_STARTS
        )
        self.state.succeeded.clear()
        self.live.progress, self.state.resumed = None, False
        change = _change_in_words(old, self.state.world)
        event = self.log.record(
            EventReason.ROUND_FORMED,
            f"round {self.state.round}: {counted(size, 'node')}, "
            f"{counted(self.state.world.world_size, 'worker')}{change}; because {pending.reason}",
            cause=pending.cause,
            since=pending.since,
        )
        self.live.round_causes = {self.state.round: (event, pending.since)}
        self.log.begin_again(event, pending.since)
        self.state.pending_round = None
        self._checkpointing.begin_round(self.state.world)
        if pending.kind == "scale" and old is not None:
            self._checkpointing.flush(pending.reason, self.live.grace_s, of=old, copy=True)
        self._assignments.send_all(ready)


def _change_in_words(old: RoundMembers | None, new: RoundMembers) -> str:
    """Describe the difference between two rounds; empty if there is none.

    All members of a first round have joined, so the events tell who was in each round.
    """
    before: set[NodeId] = set(old.rank_of) if old is not None else set()
    after: set[NodeId] = set(new.rank_of)
    parts = []
    if after - before:
        parts.append("joined: " + named(after - before))
    if before - after:
        parts.append("left: " + named(before - after))
    return f" ({'; '.join(parts)})" if parts else ""
