"""The servers of a parameter server: nodes of the role ``ps``, which are in no round.

They are kept apart from the other nodes: they do not report, and count for no size. Their end is a
fact of the platform. Which rows they have is decided by the coordinator of the parameter server.
"""

from dlrover_py.master.core.events import (
    CreateNode,
    DeleteNode,
    NodeEnded,
    NodeSeen,
    ServersPresent,
)
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.names import SERVER_PREFIX, NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase

LEAVE_S = 600.0
"""Seconds that a server has to give its rows away."""


def runs(seen: NodeSeen) -> bool:
    """Return whether the process of a server runs, as far as the platform knows."""
    return seen.near and seen.runs and seen.exists and not seen.cut_off


class Servers:
    """Requests the wanted servers, replaces lost ones, and ends them after the workers.

    In a job without the role ``ps``, nothing happens here.
    """

    def __init__(self, context: CoreContext, transitions: Transitions) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._told: ServersPresent | None = None
        """What the coordinator was told last."""
        self._lost_at = self.live.now
        """When a server was lost last, as far as this master knows."""
        self._requested = set[NodeId]()
        """The servers that this master has requested, and that were not seen yet."""
        self._asked: dict[NodeId, float] = {}
        """The grace, in seconds, of each server whose end this master has requested."""

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
        why = seen.leaving or ("its host does not answer" if seen.cut_off else "")
        if why and not record.nodes[seen.node]:
            self._leave(seen.node, why)

    def nodes_listed(self, listed: frozenset[NodeId], *, gone: bool) -> None:
        """Take in that the platform does not list some servers.

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

    def decide(self) -> None:
        """Request or dismiss servers, and tell the coordinator which ones exist.

        Servers end after the workers, which may still push or save.
        """
        record, spec = self.state.servers, self.live.spec.servers
        if not self.live.rules.can_create or (spec is None and not record.nodes):
            return
        wanted = 0 if spec is None else spec.size
        if not self._rests:
            self._forgive()
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
            for _ in range(wanted - len(staying)):
                node = NodeId(f"{SERVER_PREFIX}{record.next}")
                record.next += 1
                record.nodes[node] = ""
                self.state.changed()
                self._requested.add(node)
                self.live.emit(CreateNode(node))
        elif all(node.phase is NodePhase.GONE for node in self.live.nodes):
            for node, leaving in record.nodes.items():
                if self._asked.get(node) == 0.0:
                    continue
                record.nodes[node] = leaving or "the workers have ended"
                self.state.changed()
                self._end(node, 0.0)
        present = ServersPresent(frozenset(record.nodes), wanted, self.state.phase.ended)
        if present != self._told:
            self._told = present
            self.live.emit(present)

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
