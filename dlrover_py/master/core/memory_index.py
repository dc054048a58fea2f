"""The checkpoints in the memory of living nodes: what each node holds, and what is complete."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from dlrover_py.protocol.agents import (
    MemoryCheckpoint,
    ReplicaLocation,
    ReplicaLocations,
    ReplicationPeer,
    RestoreCandidate,
    StoredCheckpoint,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import NodeId, Round, Timeline, id_key

CANDIDATES = 3
"""Largest number of restore candidates in an answer."""


@dataclass(slots=True)
class KnownCheckpoint:
    """All reports of nodes about one checkpoint."""

    world: int
    """World size of the checkpoint."""
    full: dict[str, set[NodeId]] = field(default_factory=dict)
    """The nodes that hold the complete shard group, by shard group."""
    nodes: set[NodeId] = field(default_factory=set)
    """All nodes that hold something of it."""
    own: dict[NodeId, MemoryCheckpoint] = field(default_factory=dict)
    """What nodes hold of their own workers. The other nodes keep copies of a peer's memory only."""
    copies: set[NodeId] = field(default_factory=set)
    """Nodes that keep a copy of a peer's memory."""
    requested_by: set[NodeId] = field(default_factory=set)
    """Nodes whose workers want it to be stored."""
    reported_ranks: set[int] = field(default_factory=set)
    """Ranks of which anything was ever reported."""
    parts: set[str] = field(default_factory=set)
    """Shard groups of these ranks."""
    tried: int = 0
    """Number of attempts to store it that have ended, successfully or not."""
    stored: bool = False
    complete_at: float | None = None
    """Unix time at which it was first seen to be complete."""


@dataclass(slots=True)
class _Timeline:
    """The ranks' shard groups in a round between two restores."""

    world: int
    newest: dict[int, tuple[int, str]] = field(default_factory=dict)
    """The newest reported step of each rank, and its shard group there."""
    checkpoints: set[CheckpointId] = field(default_factory=set)
    """The checkpoints of this timeline that are in memory."""
    parts: frozenset[str] | None = None
    """Shard groups of all ranks; None if they have to be computed again."""

    def add_report(self, held: MemoryCheckpoint) -> None:
        """Take in which shard group each rank has."""
        for rank, part in held.ranks.items():
            step, old = self.newest.get(rank, (-1, ""))
            if held.step >= step:
                self.newest[rank] = held.step, part
                if part != old:
                    self.parts = None

    def all_parts(self) -> frozenset[str]:
        """Return the shard groups of all ranks; empty until each rank has reported one."""
        if self.parts is None:
            known = len(self.newest) >= self.world
            self.parts = frozenset(p for _, p in self.newest.values()) if known else frozenset()
        return self.parts


@dataclass(slots=True)
class NodeHoldings:
    """The newest report of one node, as far as it concerns checkpoints."""

    memory: list[MemoryCheckpoint] = field(default_factory=list)
    memory_round: int = 0
    """Number of a round: no worker of an earlier round ran when the node listed its memory."""
    addr: str = ""
    transfer_port: int = 0
    """Port of its transfer server; 0 if there is none."""
    boot: str = ""
    """Id of its agent process."""
    stored: StoredCheckpoint | None = None
    """The newest checkpoint that it has seen in storage; each of its reports repeats it."""


class MemoryIndex:
    """All checkpoints of which a living node has reported something."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeHoldings] = {}
        """The newest report of each node."""
        self.checkpoints: dict[CheckpointId, KnownCheckpoint] = {}
        self.requested: set[CheckpointId] = set()
        """Checkpoints that workers want to be stored."""
        self.common_shard_group = ""
        """The shard group that every rank has in the newest timeline in which all have reported
        one; empty if ranks have different ones."""
        self.leaving: frozenset[NodeId] = frozenset()
        """Nodes that have to end: readers use other nodes if they can."""
        self._timelines: dict[tuple[Round, Timeline], _Timeline] = {}

    def replace(self, node: NodeId, known: NodeHoldings, memory: list[MemoryCheckpoint]) -> bool:
        """Replace the list of what a node holds in memory.

        Checkpoints whose entries are equal are skipped. A checkpoint that no node holds any more is
        dropped.

        Args:
            node: Id of the node.
            known: Its last report.
            memory: What it holds now.

        Returns:
            Whether the common shard group has changed.
        """
        before, after = _by_id(known.memory), _by_id(memory)
        known.memory = memory
        for key in before.keys() | after.keys():
            old, new = before.get(key, []), after.get(key, [])
            if old != new:
                self._replace_one(node, key, old, new)
        # Of the newest timeline, whichever this node reports: else the result would go back and
        # forth with each report of a node that still has an older one.
        newest_first = sorted(self._timelines, reverse=True)
        groups = next((g for key in newest_first if (g := self._timelines[key].all_parts())), None)
        if not groups:
            return False
        common, self.common_shard_group = (
            self.common_shard_group,
            next(iter(groups)) if len(groups) == 1 else "",
        )
        return common != self.common_shard_group

    def is_complete(self, key: CheckpointId) -> bool:
        """Return whether living nodes hold every shard group of a checkpoint that is in the index.

        The result is False while some rank's shard group is not known. A shard group is held if a
        node has all of it, and not only what is private to one rank. A rank without a report of
        this step counts with its newest step of the same timeline.
        """
        one = self.checkpoints[key]
        if len(one.reported_ranks) >= one.world:
            # Only reported shard groups are held. If the numbers are equal, all are held.
            return len(one.full) == len(one.parts)
        parts = self._timelines[key.timeline_key].all_parts()
        return bool(parts) and len(one.full) == len(parts) and one.full.keys() == parts

    def is_only_holder(self, node: NodeId, key: CheckpointId) -> bool:
        """Return whether a shard group of this checkpoint is in the memory of this node alone."""
        one = self.checkpoints.get(key)
        return one is not None and {node} in one.full.values()

    def only_on(self, key: CheckpointId, nodes: Collection[NodeId]) -> set[NodeId]:
        """Return which of these nodes to copy from, so that others have every shard group too.

        Args:
            key: The checkpoint, which must be in the index.
            nodes: Nodes; for example those that have to end.

        Returns:
            One node for each shard group that only these nodes have.
        """
        if not nodes:
            return set()
        one, nodes = self.checkpoints[key], frozenset(nodes)
        lonely = [holders for holders in one.full.values() if holders <= nodes]
        return {min(holders, key=lambda n: (n not in one.own, id_key(n))) for holders in lonely}

    def replica_holders(self, source: NodeId) -> set[NodeId]:
        """Return the nodes that keep a replica of a node's checkpoints, of whichever step."""
        keys = {held.id for held in self.nodes[source].memory if not held.replica}
        ranks = {r for h in self.nodes[source].memory if not h.replica for r in h.ranks}
        return {
            node
            for key in keys
            for node in self.checkpoints[key].copies
            if any(ranks & h.ranks.keys() for h in _of(self.nodes[node].memory, key) if h.replica)
        }

    def complete(self) -> Iterator[CheckpointId]:
        """Yield the complete checkpoints in memory, newest first."""
        return (key for key in sorted(self.checkpoints, reverse=True) if self.is_complete(key))

    def candidates(self) -> list[RestoreCandidate]:
        """Return the newest complete checkpoints in memory, best first; at most ``CANDIDATES``."""
        return [
            RestoreCandidate(
                step=key.step,
                round=key.round,
                timeline=key.timeline,
                world=self.checkpoints[key].world,
            )
            for key in islice(self.complete(), CANDIDATES)
        ]

    def locations(self, key: CheckpointId) -> ReplicaLocations:
        """Return where each rank's slot of a checkpoint can be fetched from.

        Ranks that no node with a transfer server holds are left out. A complete slot is preferred
        to one with private data only, a node that stays to one that leaves, and the rank's own node
        to a replica. The result is empty unless it names each shard group. A reader could not see
        that a group is missing, if all its keys are: each rank of a sharded optimizer has the state
        of other parameters.
        """
        one = self.checkpoints.get(key)
        if one is None or not self.is_complete(key):
            return ReplicaLocations()
        best: dict[int, tuple[tuple[bool, bool, bool], NodeId, str]] = {}
        for node in sorted(one.nodes, key=id_key):
            if not self.nodes[node].transfer_port:
                continue
            for held in _of(self.nodes[node].memory, key):
                for rank, part in held.ranks.items():
                    worth = (rank in held.private_only, node in self.leaving, held.replica)
                    if rank not in best or worth < best[rank][0]:
                        best[rank] = worth, node, part
        if not one.full.keys() <= {part for _, _, part in best.values()}:
            return ReplicaLocations()
        addresses = {node: dict(self.address(node)) for _, node, _ in best.values()}
        return ReplicaLocations(
            locations=[
                ReplicaLocation(**addresses[node], rank=rank, part=part, private_only=worth[0])
                for rank, (worth, node, part) in sorted(best.items())
            ]
        )

    def memory_round_of(self, node: NodeId) -> int:
        """Return the round at which the node last listed its memory; -1 if it is not known."""
        known = self.nodes.get(node)
        return -1 if known is None else known.memory_round

    def address(self, node: NodeId) -> ReplicationPeer:
        """Return the address of a node's transfer server; its port is 0 if there is none."""
        known = self.nodes.get(node) or NodeHoldings()
        return ReplicationPeer(node=node, addr=known.addr, port=known.transfer_port)

    def writers(self, key: CheckpointId) -> dict[int, NodeId]:
        """Return the node that writes each rank's slot: preferably the rank's own node.

        Ranks that no living node holds are left out. The checkpoint must be in the index.
        """
        best: dict[int, tuple[tuple[bool, bool], NodeId]] = {}
        for node in sorted(self.checkpoints[key].nodes, key=id_key):
            for held in _of(self.nodes[node].memory, key):
                for rank in held.ranks:
                    worth = (rank in held.private_only, held.replica)
                    if rank not in best or worth < best[rank][0]:
                        best[rank] = worth, node
        return {rank: node for rank, (_, node) in sorted(best.items())}

    def _replace_one(
        self,
        node: NodeId,
        key: CheckpointId,
        old: list[MemoryCheckpoint],
        new: list[MemoryCheckpoint],
    ) -> None:
        """Replace what a node holds of one checkpoint; drop the latter if no node holds it then.

        Args:
            node: Id of the node.
            key: The checkpoint; if it is new, it is added.
            old: The entries of this checkpoint in the node's last report; may be empty.
            new: The entries in its present report; may be empty if ``old`` is not.
        """
        one = self.checkpoints.get(key)
        if one is None:
            one = self.checkpoints[key] = KnownCheckpoint(new[0].world)
            timeline = self._timelines.setdefault(key.timeline_key, _Timeline(new[0].world))
            timeline.checkpoints.add(key)
        before, after = _full(old), _full(new)
        for part in before - after:
            one.full[part].discard(node)
            if not one.full[part]:
                del one.full[part]
        for part in after - before:
            one.full.setdefault(part, set()).add(node)
        for held in new:
            one.reported_ranks.update(held.ranks)
            one.parts.update(held.ranks.values())
            self._timelines[key.timeline_key].add_report(held)
        if any(held.persist for held in new):
            one.requested_by.add(node)
            self.requested.add(key)
        else:
            one.requested_by.discard(node)
            if not one.requested_by:
                self.requested.discard(key)
        one.own.pop(node, None)
        one.copies.discard(node)
        for held in new:
            if held.replica:
                one.copies.add(node)
            else:
                one.own[node] = held
        if new:
            one.nodes.add(node)
            return
        one.nodes.discard(node)
        if not one.nodes:
            self._forget(key)

    def _forget(self, key: CheckpointId) -> None:
        """Drop a checkpoint that no node holds."""
        del self.checkpoints[key]
        self.requested.discard(key)
        timeline = self._timelines[key.timeline_key]
        timeline.checkpoints.discard(key)
        if not timeline.checkpoints:
            del self._timelines[key.timeline_key]


def _by_id(memory: Iterable[MemoryCheckpoint]) -> dict[CheckpointId, list[MemoryCheckpoint]]:
    """Group a node's checkpoints by their identity."""
    found: dict[CheckpointId, list[MemoryCheckpoint]] = {}
    for held in memory:
        found.setdefault(held.id, []).append(held)
    return found


def _of(memory: Iterable[MemoryCheckpoint], key: CheckpointId) -> Iterator[MemoryCheckpoint]:
    """Yield the entries of one checkpoint."""
    return (held for held in memory if held.id == key)


def _full(helds: Iterable[MemoryCheckpoint]) -> set[str]:
    """Return the shard groups of which more than the data of a single rank is there."""
    return {part for h in helds for rank, part in h.ranks.items() if rank not in h.private_only}
