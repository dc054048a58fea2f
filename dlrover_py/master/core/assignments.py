"""What each node has to do in the present state of the job, as a numbered assignment."""

from collections.abc import Iterable, Sequence

from dlrover_py.master.core.events import Assign
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.state import BEFORE_KILL_S, PLANNED, TransientState
from dlrover_py.protocol.agents import Assignment, Directive
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.log_rules import LOG_RULES, LogRule
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.status import JobPhase

COSMETIC_FIELDS = (
    *("checkpoint", "loader", "snapshot", "peer", "peer_checkpoint", "persist"),
    *("stay_until_stored", "last_step_s", "log_rules", "common_shard_group"),
)
"""Fields of an assignment that change nothing about the workers."""


class Assignments:
    """Assigns each node its task, and knows what each was assigned last."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._newest: dict[NodeId, Assignment] = {}
        """The newest assignment of each node."""
        self._rules: tuple[list[LogRule], str] | None = None
        """The log rules of the spec, and the same as JSON."""

    def send(self, node: Node) -> None:
        """Assign a node what it has to do in the present state: stop, run, check or wait.

        Nothing is sent if that is equal to its newest assignment, or if the node has not reported
        to this master. A member of the current round runs while the round does. Another node is
        checked if it belongs to a check, and waits otherwise.
        """
        phase, world = self.state.phase, self.state.world
        if phase.ended:
            code = ExitCode.FAILED if phase is JobPhase.FAILED else ExitCode.OK
            self.assign(node, Directive.STOP, self.state.reason, exit_code=int(code))
        elif node.leaving:
            self.assign(node, Directive.STOP, node.leaving, exit_code=int(ExitCode.OK))
        elif (
            world is not None
            and world.has(node.id, node.incarnation)
            and (phase is JobPhase.RUNNING or self._is_due(node))
        ):
            self.assign(node, Directive.RUN, self.state.reason)
        elif node.id in self.live.checking:
            names = " and ".join(m.node for m in self.live.checking[node.id].members)
            self.assign(node, Directive.CHECK, f"{names} are being checked")
        else:
            waits = (
                "the node is on standby"
                if phase is JobPhase.RUNNING
                else "the next round is forming"
            )
            self.assign(node, Directive.WAIT, waits)

    def send_all(self, ready: Sequence[Node] | None = None) -> None:
        """Assign a task to each living node that is not leaving, or only to those in ``ready``."""
        nodes = list(self.live.nodes) if ready is None else ready
        for node in nodes:
            if node.alive and not node.leaving:
                self.send(node)

    def update(self, nodes: Iterable[NodeId]) -> None:
        """Make the assignments of these nodes again, and send those that have changed.

        Nodes that are not alive, or have no assignment of this master yet, are left out.
        """
        for node_id in sorted(nodes, key=id_key):
            node = self.live.nodes.get(node_id)
            if node is not None and node.alive and node_id in self._newest:
                self.send(node)

    def get(self, node_id: NodeId) -> Assignment | None:
        """Return the newest assignment of a node by this master; None if it has none."""
        return self._newest.get(node_id)

    def drop(self, node_id: NodeId) -> None:
        """Forget the assignment of a node that is gone."""
        self._newest.pop(node_id, None)

    def clear(self) -> None:
        """Forget all assignments, because those of a new term follow."""
        self._newest.clear()

    def is_planned(self) -> bool:
        """Return whether the end of the current or previous round is planned, without a fault.

        If a next round is pending, its kind decides; otherwise the end of the previous round does.
        """
        pending = self.state.pending_round
        if pending is None:
            return self.live.previous_world is not None
        return pending.kind in PLANNED and not pending.disrupted

    def assign(self, node: Node, directive: Directive, reason: str, *, exit_code: int = 0) -> None:
        """Emit an assignment for a node; the loop sends it once the journal is stored.

        Nothing happens if the node has not reported to this master: it gets its assignment when it
        does. Nothing happens either if its newest assignment is equal but for the version, and for
        the reason to run. If the assignment changes what its workers do, the node must acknowledge
        it before it is ready for another round.

        Args:
            node: The node.
            directive: What its agent has to do.
            reason: The reason, in words.
            exit_code: Exit code of the agent, for an order to stop.
        """
        if node.report is None:
            return  # it gets its assignment when it reports to this master
        old = self._newest.get(node.id)
        world = self.state.world if directive is Directive.RUN else None
        if directive is Directive.CHECK:
            world = self.live.checking[node.id]
        rank = world.rank_of[node.id] if world is not None else 0
        place = world.members[rank] if world is not None else None
        copies = self.live.checkpoints.copies.checkpoint(node.id)
        assignment = Assignment(
            term=self.state.term,
            version=max(old.version if old is not None else 0, node.acknowledged) + 1,
            incarnation=node.incarnation,
            directive=directive,
            reason=reason,
            round=self.state.round,
            check=world.round if world is not None and directive is Directive.CHECK else 0,
            node_rank=rank,
            nnodes=len(world.members) if world is not None else 0,
            rank_offset=place.rank_offset if place is not None else 0,
            world_size=world.world_size if world is not None else 0,
            role_rank_offset=place.role_rank_offset if place is not None else 0,
            role_world_size=world.role_world_size[place.role] if world and place else 0,
            master_addr=world.master_addr if world is not None else "",
            master_port=world.master_port if world is not None else 0,
            exit_code=exit_code,
            restart_count=self.state.restart_count,
            max_restarts=restart_budget(self.live, node),
            cold=self.state.warm_starts.disabled,
            stop_grace_s=(
                min(self.live.grace_s, max(0.0, node.grace_s - BEFORE_KILL_S))
                if directive is Directive.STOP
                else self.live.rules.stop_grace_s
            ),
            last_step_s=(
                self._last_step_s()
                if directive is not Directive.STOP and self.is_planned()
                else 0.0
            ),
            exchange_s=self.live.pace.exchange_s,
            lease_s=self.live.pace.lease_s,
            checkpoint=self.live.checkpoint_policy,
            snapshot=self.live.snapshot if directive is Directive.RUN else 0,
            log_rules=self._log_rules(),
            loader=self.state.tuning.settings(),
            peer=(
                self.live.checkpoints.copies.peer(node.id)
                if directive is Directive.RUN or copies is not None
                else None
            ),
            peer_checkpoint=copies,
            persist=self.live.checkpoints.persist_request(node.id, self.state.term),
            common_shard_group=self.live.checkpoints.memory.common_shard_group,
            stay_until_stored=directive is Directive.STOP and self.live.checkpoints.holds(node.id),
        )
        if old is not None and (old.round, old.directive) == (self.state.round, directive):
            same: dict[str, object] = {"version": old.version}
            if directive is Directive.RUN:
                same["reason"] = old.reason  # the round has its reason already
            if old == assignment.model_copy(update=same):
                return
        self._newest[node.id] = assignment
        if old is not None and old == assignment.model_copy(
            update={name: getattr(old, name) for name in ("version", "reason", *COSMETIC_FIELDS)}
        ):
            pass  # the workers are not concerned: its offer stays good
        elif world is not None or (old is not None and old.directive is Directive.RUN):
            self.live.nodes.require_version(node, assignment.version)
        self.live.emit(Assign(node.id, assignment))

    def _is_due(self, node: Node) -> bool:
        """Return whether this is rank 0's node, and it has not begun the round that is over.

        The address and port that it offered for the round are used up, because other nodes may have
        got them. An agent makes a new offer only when it begins the round. The node therefore still
        has to begin it.
        """
        world = self.state.world
        assert world is not None
        if self.state.phase is not JobPhase.FORMING or world.members[0].node != node.id:
            return False
        return node.report is None or node.report.follows < world.round

    def _log_rules(self) -> str:
        """Return the job's log rules as JSON; empty if it has none."""
        rules = self.live.spec.spec.diagnosis.log_rules
        if not rules:
            return ""
        if self._rules is None or self._rules[0] is not rules:
            self._rules = rules, LOG_RULES.dump_json(rules, exclude_defaults=True).decode()
        return self._rules[1]

    def _last_step_s(self) -> float:
        """Return the seconds that workers have to end the same last step of a round.

        The grace of nodes that leave limits this time: without them no step can end.
        """
        leaving = [node.grace_s - BEFORE_KILL_S for node in self.live.nodes.leaving.values()]
        return max(0.0, min([self.live.grace_s, *leaving]))


def restart_budget(live: TransientState, node: Node) -> int:
    """Return the failures that the node may have without steady progress.

    It comes from the spec where the platform creates nodes. Elsewhere it is what the agent has
    reported, or 0.
    """
    if live.rules.can_create:
        return live.spec.worker.restart_count
    return (node.report.max_restarts or 0) if node.report is not None else 0
