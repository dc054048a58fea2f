"""The servers of a parameter server: nodes of the role ``ps``, which are in no round.

They are kept apart from the other nodes: they do not report, and count for no size. Their end is a
fact of the platform. Which rows they have is decided by the coordinator of the parameter server.
"""

import math
from dataclasses import dataclass

from dlrover_py.master.core.capacity import NO_ROOM_S, Capacity
from dlrover_py.master.core.events import (
    CreateNode,
    DeleteNode,
    NodeEnded,
    NodeSeen,
    ServersPresent,
)
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.policy import relaunch_delay
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.names import SERVER_PREFIX, NodeId
from dlrover_py.protocol.reasons import ConditionReason, EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase, TablesStatus
from dlrover_py.protocol.words import counted

SINGLE_S = 60.0
"""Seconds for which parts of the tables may have one copy only, until that is reported: copying
after the loss of a server takes a moment."""
LEAVE_S = 600.0
"""Seconds that a server has to give its rows away."""


@dataclass(slots=True)
class _PendingServer:
    """What is known of a server that has not run yet."""

    avoid: tuple[str, ...]
    """The hosts on which it must not be placed."""
    pending_since: float = math.inf
    """Since when it has no place; infinite if it has one, or if that is not known."""


def runs(seen: NodeSeen) -> bool:
    """Return whether the process of a server runs, as far as the platform knows."""
    return seen.near and seen.runs and seen.exists and not seen.cut_off


class Servers:
    """Requests the wanted servers, replaces lost ones, and ends them after the workers.

    In a job without the role ``ps``, nothing happens here.
    """

    def __init__(self, context: CoreContext, transitions: Transitions, capacity: Capacity) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions, self._capacity = transitions, capacity
        self._told: ServersPresent | None = None
        """What the coordinator was told last."""
        self._lost_at = self.live.now
        """When a server was lost last, as far as this master knows."""
        self._requested = set[NodeId]()
        """The servers that this master has requested, and that were not seen yet."""
        self._asked: dict[NodeId, float] = {}
        """The grace, in seconds, of each server whose end this master has requested."""
        self._starting: dict[NodeId, _PendingServer] = {}
        """The servers that this master has requested, and that have not run yet."""
        self._failed_starts = 0
        """Servers in a row that have ended before they ran."""
        self._single_since: float | None = None
        """Since when parts of the tables have one copy only; None if none has."""
        self._not_before: list[float] = []
        """The earliest time of the replacement of each of them that is not replaced yet."""

    def node_seen(self, seen: NodeSeen) -> None:
        """Take in that a server exists. One that nobody knows is deleted, its id is not used."""
        record = self.state.servers
        if seen.node not in record.nodes:
            number = int(seen.node.removeprefix(SERVER_PREFIX))
            record.next = max(record.next, number + 1)
            self.state.changed()
            self.live.emit(DeleteNode(seen.node, 0.0, "it is not a server of this job"))
            return
        if seen.exists:
            self._requested.discard(seen.node)
        self.live.servers[seen.node] = seen
        if runs(seen) and self._starting.pop(seen.node, None) is not None:
            self._failed_starts = 0
        elif seen.node in self._starting:
            start = self._starting[seen.node]
            start.pending_since = math.inf if seen.near else min(start.pending_since, self.live.now)
        elif not (seen.near or seen.cut_off) and seen.exists:  # an earlier master has requested it
            avoid = self._capacity.avoided_hosts()
            self._starting[seen.node] = _PendingServer(avoid, self.live.now)
        why = seen.leaving or ("its host does not answer" if seen.cut_off else "")
        if why and not record.nodes[seen.node]:
            self._leave(seen.node, why)

    def nodes_listed(self, listed: frozenset[NodeId], *, gone: bool) -> None:
        """Handle servers that are missing from the platform's list.

        One that was to end is gone. One that this master has requested may be about to come.

        Args:
            listed: The nodes that the platform lists.
            gone: Whether the platform forgets nodes that have ended. Their ids are then not used
                again: an empty server under the id of one that had rows would be taken for it.
                Otherwise they are requested again, and the platform says whether they have ended.
        """
        for node, leaving in list(self.state.servers.nodes.items()):
            if node in listed or node in self._requested:
                continue
            if leaving:
                self._gone(node, f"server {node} has left: {leaving}")
            elif not gone:
                self.live.emit(CreateNode(node))
            else:
                self._gone(node, f"server {node} was lost: there is no such node", lost=True)

    def node_ended(self, ended: NodeEnded) -> None:
        """Take in the end of a server, and charge it unless it was to end.

        The job fails if too many were lost, or if the command of a server was refused.
        """
        record, spec = self.state.servers, self.live.spec.servers
        if ended.node not in record.nodes:
            return
        if ended.refused_by:
            self.live.hosts.strike(ended.refused_by, self.live.now, self.live.wall)
        if self._starting.pop(ended.node, None) is not None and not record.nodes[ended.node]:
            self._failed_starts += 1
            delay_s = relaunch_delay(0, self._failed_starts)
            self._not_before.append(self.live.now + delay_s)
        leaving = record.nodes[ended.node] or (ended.why if ended.free else "")
        if leaving or self._rests or spec is None:
            killed = bool(ended.exit_code) and not self._rests
            why = f"server {ended.node} has left: {leaving or ended.why}"
            why += f"; it had not given all its rows away: {ended.why}" if killed else ""
            self._gone(ended.node, why, lost=killed)
            return
        why = f"server {ended.node} was lost: {ended.why}"
        why += f": {ended.output}" if ended.output else ""
        event = self._gone(ended.node, why, lost=True)
        record.lost += 1
        self._lost_at = self.live.now
        if ended.exit_code == ExitCode.USAGE:
            self._transitions.end_job(
                JobPhase.FAILED, EventReason.INVALID_COMMAND, why, cause=event
            )
        elif record.lost > spec.budget:
            message = f"{why}; more servers were lost than restartCount of the role ps allows"
            message += f" ({spec.budget})"
            self._transitions.end_job(
                JobPhase.FAILED, EventReason.RESTARTS_EXHAUSTED, message, cause=event
            )

    def take_tables(self, tables: TablesStatus) -> None:
        """Take in what the coordinator knows of the tables."""
        before, self.live.tables = self.live.tables, tables
        if before is not None and tables.restored > before.restored:
            message = f"all rows went back to the cut of step {tables.cut_step}"
            self.log.record(EventReason.TABLES_RESTORED, message)
        spec = self.live.spec.servers
        if not tables.single_buckets or spec is None or min(spec.size, spec.copies) < 2:
            self._single_since = None
        elif self._single_since is None:
            self._single_since = self.live.now
        self._judge_tables()  # now: the next report of the same step may say that all is well

    def _judge_tables(self) -> None:
        """Record that rows are lost, or would be lost with one more server."""
        tables, since = self.live.tables, self._single_since
        if tables is None:
            return
        if self._rests:  # all servers end
            self._single_since = None
            if self.live.tables_risk is not None:
                self.live.tables_risk = ConditionReason.RESOLVED, "the servers are not needed"
            return
        risk, text = ConditionReason.RESOLVED, "all parts of the tables have their copies"
        of = f"of {counted(tables.buckets, 'part')} of the tables"
        if tables.lost_buckets:
            risk = ConditionReason.ROWS_LOST
            text = (
                f"the rows of {tables.lost_buckets} {of} are lost: all servers with copies have "
                "died; a call of ps.restore() by all workers goes back to a cut"
            )
        elif since is not None and self.live.now < since + SINGLE_S:
            self.live.wake(since + SINGLE_S)
        elif since is not None:
            risk = ConditionReason.SINGLE_COPY
            text = (
                f"{tables.single_buckets} {of} have one copy only since {SINGLE_S:g} s or longer: "
                "the loss of its server would lose their rows"
            )
        resolved, old = risk is ConditionReason.RESOLVED, self.live.tables_risk
        if resolved and old is None:
            return
        self.live.tables_risk = risk, text
        if old is None or old[0] is not risk:
            reason = EventReason.TABLES_SAFE if resolved else EventReason.TABLES_AT_RISK
            self.log.record(reason, text, warning=not resolved)

    def decide(self) -> None:
        """Request or dismiss servers, and tell the coordinator which ones exist.

        Servers end after the workers, which may still push or save.
        """
        self._judge_tables()
        record, spec = self.state.servers, self.live.spec.servers
        if not self.live.rules.can_create or (spec is None and not record.nodes):
            return
        wanted = 0 if spec is None else spec.total
        if not self._rests:
            self._forgive()
            self._readmit_hosts()
            staying = [node for node, leaving in record.nodes.items() if not leaving]
            for node in staying[wanted:]:
                self._leave(node, "the role ps has fewer replicas now")
            # Without another server, nobody could take the rows before the time is over.
            takes = any(
                runs(seen) and not record.nodes[node] for node, seen in self.live.servers.items()
            )
            for node, leaving in record.nodes.items():
                if leaving and node not in self._asked and (takes or not wanted):
                    self._end(node, LEAVE_S)
            self._create(wanted - len(staying))
        elif all(node.phase is NodePhase.GONE for node in self.live.nodes):
            for node, leaving in record.nodes.items():
                if self._asked.get(node) == 0.0:
                    continue
                record.nodes[node] = leaving or "the workers have ended"
                self.state.changed()
                self._end(node, 0.0)
        request = self.live.spec.spec.rebalance_servers or ""
        present = ServersPresent(
            frozenset(record.nodes),
            0 if spec is None else spec.size,
            1 if spec is None else spec.minimum,
            0 if spec is None else spec.standby_replicas,
            self.state.phase.ended,
            request,
        )
        if present != self._told:
            self._told = present
            self.live.emit(present)

    def _create(self, missing: int) -> None:
        """Request missing servers, but later those whose last ones have never run."""
        record = self.state.servers
        later = [at for at in self._not_before if at > self.live.now][: max(0, missing)]
        self._not_before = later
        self.live.wake(*later)
        avoid = self._capacity.avoided_hosts()
        for _ in range(missing - len(later)):
            node = NodeId(f"{SERVER_PREFIX}{record.next}")
            record.next += 1
            record.nodes[node] = ""
            self.state.changed()
            self._requested.add(node)
            self._starting[node] = _PendingServer(avoid)
            self.live.emit(CreateNode(node, avoid))

    def _readmit_hosts(self) -> None:
        """Replace servers that only banned hosts have room for, as the job does with its nodes."""
        for node, start in list(self._starting.items()):
            if not start.avoid or start.pending_since == math.inf:
                continue
            until = start.pending_since + NO_ROOM_S
            if self.live.now >= until:
                self._capacity.readmit(start.avoid)
            elif set(start.avoid) <= set(self._capacity.avoided_hosts()):
                self.live.wake(until, self.live.hosts.next_end(self.live.now))
                continue
            message = (
                f"server {node} can only be placed on hosts that are excluded after a failure, so "
                "these are allowed again"
            )
            self.log.record(EventReason.HOSTS_READMITTED, message, node=node)
            del self._starting[node]
            self.state.servers.nodes[node] = message
            self.state.changed()
            self._end(node, 0.0)

    @property
    def _rests(self) -> bool:
        """Whether no server may run: the job is suspended or has ended."""
        return self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED

    def _leave(self, node: NodeId, why: str) -> None:
        self.state.servers.nodes[node] = why
        self.state.changed()
        message = f"server {node} is leaving, and gives its rows away: {why}"
        self.log.record(EventReason.NODE_LEAVING, message, node=node)

    def _end(self, node: NodeId, grace_s: float) -> None:
        self._asked[node] = grace_s
        self.live.emit(DeleteNode(node, grace_s, self.state.servers.nodes[node]))

    def _gone(self, node: NodeId, message: str, *, lost: bool = False) -> int:
        del self.state.servers.nodes[node]
        self._requested.discard(node)
        self._starting.pop(node, None)
        self._asked.pop(node, None)
        self.live.servers.pop(node, None)
        self.state.changed()
        reason = EventReason.NODE_LOST if lost else EventReason.NODE_LEFT
        return self.log.record(reason, message, node=node, warning=lost)

    def _forgive(self) -> None:
        """Forget the servers that were lost if none was for ``forgive_after_s``."""
        record = self.state.servers
        if not record.lost:
            return
        due = self._lost_at + self.live.rules.forgive_after_s
        if self.live.now < due:
            self.live.wake(due)
        else:
            record.lost = 0
            self.state.changed()
