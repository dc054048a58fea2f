"""Which node copies whose memory: for the case of a loss, and from nodes that leave by plan.

Each member of a round replicates the memory of one other member. Where ranks have different shards,
a leaving node may be the only one that has its shard group of the newest checkpoint. It must then
stay until a node that stays, its heir, has copied it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from dlrover_py.master.core.memory_index import MemoryIndex
from dlrover_py.master.core.replica_pairs import Topology, peers
from dlrover_py.protocol.agents import CheckpointReference, ReplicationPeer
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import NodeId, id_key

NODES_NAMED = 5
"""Most leaving nodes that a warning names."""


class Copies:
    """The copies that nodes have to make. Nothing is sent here: callers reassign the nodes."""

    def __init__(self, memory: MemoryIndex) -> None:
        self._memory = memory
        self._members: list[NodeId] = []
        """Members of the round; none if the round has ended without another one."""
        self._source: dict[NodeId, NodeId] = {}
        """The node whose memory is replicated, by the node that keeps the replica."""
        self.replica_holder: dict[NodeId, NodeId] = {}
        """The inverse of ``_source``."""
        self.wanted: CheckpointId | None = None
        """The checkpoint that must outlive leaving nodes; None if it is not known yet."""
        self.heirs: dict[NodeId, NodeId] = {}
        """The node that makes the copy, by the leaving node that alone has a part of it."""
        self.loading = False
        """Whether workers may read the checkpoint from leaving nodes, before it is copied."""

    def begin_round(self, members: Sequence[tuple[NodeId, Topology]], *, replicas: bool) -> None:
        """Choose the pairs of a round.

        Args:
            members: Node and topology of each member, in the order of ranks.
            replicas: Whether nodes keep replicas of each other's memory.
        """
        self._members = [node for node, _ in members]
        self._source = peers(members, self._source) if replicas else {}
        self.replica_holder = {source: holder for holder, source in self._source.items()}

    def end_round(self) -> None:
        """Keep no more replicas, because the round ends without another one."""
        self._members, self._source, self.replica_holder = [], {}, {}

    def peer(self, node: NodeId) -> ReplicationPeer | None:
        """Return the peer whose memory the node replicates, with its address.

        A leaving node from which it has to copy a checkpoint comes first.

        Returns:
            None if the node replicates none, or its peer has reported no transfer server.
        """
        source = self._leaving_source(node) or self._source.get(node)
        known = self._memory.nodes.get(source) if source is not None else None
        if source is None or known is None or not known.transfer_port:
            return None
        return self._memory.address(source)

    def checkpoint(self, node: NodeId) -> CheckpointReference | None:
        """Return the checkpoint that the node must copy from its peer, which leaves; else None."""
        key = self.wanted
        if key is None or self._leaving_source(node) is None:
            return None
        return CheckpointReference(step=key.step, round=key.round, timeline=key.timeline)

    def hand_over(self, key: CheckpointId) -> tuple[set[NodeId], str]:
        """Have members that stay copy what only leaving nodes have of a checkpoint.

        Heirs that were chosen before keep their task. Preferred are nodes with fewer such tasks,
        then those that have replicas of the leaving node, whose memory then suffices. If workers
        may read this checkpoint from leaving nodes already, nothing changes, so that these stay.

        Args:
            key: The checkpoint, which must be complete.

        Returns:
            The nodes whose task has changed. A warning of what is lost because no member stays;
            empty if nothing is.
        """
        if self.loading and self.wanted == key:
            return set(), ""
        leaving, nodes = self._memory.leaving, self._memory.nodes
        owners = self._memory.only_on(key, leaving)
        staying = [n for n in self._members if n in nodes and n not in leaving]
        if owners and not staying:
            return self.end_hand_over(), describe_loss(key, owners, "no other node stays")
        before, self.wanted, self.loading = self.heirs, key, False
        self.heirs = {n: h for n, h in before.items() if n in owners and h in staying}
        for owner in sorted(owners - self.heirs.keys(), key=id_key):
            self.heirs[owner] = self._heir(owner, staying)
        if self.heirs == before:
            return set(), ""
        return {*(leaving & nodes.keys()), *before.values(), *self.heirs.values()}, ""

    def end_hand_over(self) -> set[NodeId]:
        """Have no more copies made of leaving nodes; return the nodes whose task has changed."""
        changed = {*self.heirs, *self.heirs.values()}
        self.wanted, self.heirs, self.loading = None, {}, False
        return changed

    def overdue(self) -> str:
        """Return a warning of what is lost if the leaving nodes go now; empty if nothing is."""
        if self.wanted is None or not self.heirs:
            return ""
        return describe_loss(
            self.wanted, self.heirs, "they were not copied within the grace period"
        )

    def _leaving_source(self, node: NodeId) -> NodeId | None:
        """Return the leaving node that this node has to copy now; None if there is none.

        It copies one node after the other.
        """
        return min((n for n, heir in self.heirs.items() if heir == node), key=id_key, default=None)

    def _heir(self, owner: NodeId, staying: Iterable[NodeId]) -> NodeId:
        """Return the node that copies a leaving node."""
        tasks = Counter(self.heirs.values())
        keeps = self._memory.replica_holders(owner)
        return min(staying, key=lambda n: (tasks[n], n not in keeps, id_key(n)))


def describe_loss(key: CheckpointId, owners: Iterable[NodeId], why: str) -> str:
    """Return a warning that parts of a checkpoint are lost, and what helps.

    Args:
        key: The checkpoint.
        owners: The leaving nodes that alone have these parts.
        why: The reason, in words.
    """
    nodes = sorted(owners, key=id_key)
    more = " and others" if len(nodes) > NODES_NAMED else ""
    return (
        f"parts of the checkpoint of step {key.step} are lost with "
        f"{', '.join(nodes[:NODES_NAMED])}{more}: {why}; with spec.checkpoint.dir they are stored"
    )
