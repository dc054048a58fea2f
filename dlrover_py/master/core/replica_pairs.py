"""Which node replicates whose memory: few pairs share a host, and most existing pairs stay."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from dlrover_py.master.core.topology import shared_levels
from dlrover_py.protocol.names import NodeId

Topology = tuple[str, ...]
"""Zone, rack, host: the outermost first."""


def peers(
    members: Sequence[tuple[NodeId, Topology]], old: Mapping[NodeId, NodeId]
) -> dict[NodeId, NodeId]:
    """Choose the node whose memory each member replicates; each memory is replicated once.

    The two nodes of a pair share a host, then a rack, then a zone, as rarely as possible. Existing
    pairs stay where that allows it, because a new pair costs the transfer of a complete copy.

    Args:
        members: Node and topology (zone, rack, host: the outermost first), in the order of ranks.
        old: The pairs so far, as they were returned. Their nodes may be gone.

    Returns:
        For each node that keeps a replica, the node whose memory that is. Empty if there are fewer
        than two members.
    """
    if len(members) < 2:
        return {}
    topology = dict(members)
    order = {node: (place, index) for index, (node, place) in enumerate(members)}
    pairs = {k: source for k, source in old.items() if k in order and source in order}
    taken = set(pairs.values())
    keepers = sorted((n for n in order if n not in pairs), key=order.__getitem__)
    sources = sorted((n for n in order if n not in taken), key=order.__getitem__)
    count = len(keepers)

    def cost(shift: int) -> tuple[int, int]:
        """Return the cost of pairing each keeper with the source ``shift`` positions later."""
        together = [
            shared_levels(topology[k], topology[sources[(i + shift) % count]])
            for i, k in enumerate(keepers)
            if k != sources[(i + shift) % count]
        ]
        return count - len(together), sum(together)

    if count:
        # The nodes are sorted by place. A shift by the size of the largest place leaves every
        # place.
        depth = max(len(place) for _, place in members)
        sizes = [_largest(keepers, topology, d) for d in range(1, depth + 1)]
        shift = min(dict.fromkeys([*sizes, count // 2, 1, 0]), key=cost)
        for index, keeper in enumerate(keepers):
            pairs[keeper] = sources[(index + shift) % count]
    _separate_pairs(pairs, topology, old)
    return pairs


def _separate_pairs(
    pairs: dict[NodeId, NodeId],
    topology: Mapping[NodeId, Topology],
    old: Mapping[NodeId, NodeId],
) -> None:
    """Swap sources in ``pairs``, so that no node replicates itself, and few pairs share a host.

    If more than half of the nodes are on one host, some pairs stay on it.

    Args:
        pairs: The node whose memory is replicated, by the node that keeps the replica; changed in
            place.
        topology: Zone, rack and host of each node, as far as they are known.
        old: The pairs so far; a pair that was there before is preferred.
    """
    hosts = Counter(filter(None, map(_host, topology.values())))
    # If a host has more than half of the nodes, some of them have no partner on another host.
    must = max(0, 2 * max(hosts.values(), default=0) - len(pairs))
    together = sum(
        not _on_different_hosts(topology[k], topology[source]) for k, source in pairs.items()
    )

    def weight(keeper: NodeId, source: NodeId) -> tuple[int, int, int, int]:
        """Return the cost of one pair."""
        one, other = topology[keeper], topology[source]
        changed = old.get(keeper) != source
        return (
            keeper == source,
            not _on_different_hosts(one, other),
            changed,
            shared_levels(one, other),
        )

    def gain(keeper: NodeId, other: NodeId) -> tuple[int, ...]:
        """Return the change of cost if two keepers swap their sources; less is better."""
        now = zip(weight(keeper, pairs[keeper]), weight(other, pairs[other]), strict=True)
        then = zip(weight(keeper, pairs[other]), weight(other, pairs[keeper]), strict=True)
        return tuple(sum(b) - sum(a) for a, b in zip(now, then, strict=True))

    for selves in (True, False):
        for keeper in topology:
            source = pairs[keeper]
            shared = together > must and not _on_different_hosts(topology[keeper], topology[source])
            if keeper == source or (shared and not selves):
                other = min((n for n in topology if n != keeper), key=partial(gain, keeper))
                together += gain(keeper, other)[1]
                pairs[keeper], pairs[other] = pairs[other], source


def _largest(nodes: Iterable[NodeId], topology: Mapping[NodeId, Topology], depth: int) -> int:
    """Return the number of nodes at the place with most nodes, at this depth of the topology."""
    sizes: dict[Topology, int] = {}
    for node in nodes:
        place = topology[node][:depth]
        sizes[place] = sizes.get(place, 0) + 1
    return max(sizes.values())


def _on_different_hosts(one: Topology, other: Topology) -> bool:
    """Return whether two nodes are on different hosts, as far as is known."""
    return not _host(one) or _host(one) != _host(other)


def _host(place: Topology) -> str:
    """Return the host alone: of two nodes on it, only one may have the labels of its rack yet."""
    return place[-1] if place else ""
