"""Membership and start of the next round: pure functions without waiting windows.

A round is formed as soon as every node that can come has come. Nodes of one domain have
neighbouring ranks. Within a domain, the order of ranks is stable: survivors keep their order, a new
node takes the place of a lost node, and further nodes come at the end.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.master.core.topology import grouped, kept, shared_levels
from dlrover_py.protocol.agents import COUNT, Count, Port
from dlrover_py.protocol.names import NodeId, Round, id_key
from dlrover_py.protocol.words import are, counted


@dataclass(frozen=True, slots=True)
class Size:
    """The bounds of a round, in nodes."""

    desired: int
    minimum: int
    unit: int
    """The size of a round is a multiple of this number."""
    sizes: tuple[int, ...] = ()
    """The only allowed sizes, ascending; all multiples of the unit if empty."""

    def fit(self, nodes: int) -> int:
        """Return the largest allowed size for this many nodes; 0 if they are too few."""
        size = min(nodes, self.desired) // self.unit * self.unit
        if self.sizes:
            size = self.sizes[bisect_right(self.sizes, size) - 1] if self.sizes[0] <= size else 0
        return size if size >= self.minimum else 0


class Member(BaseModel):
    """A node's place in a round."""

    model_config = ConfigDict(frozen=True)

    node: NodeId
    incarnation: Count
    rank_offset: Count
    """Rank of the node's first worker."""
    nproc: Annotated[int, Field(ge=1, le=1024)]
    """Number of workers on the node."""
    role: str = "default"
    role_rank_offset: Count = 0
    """Rank of the node's first worker among the workers of its role."""


class RoundMembers(BaseModel):
    """The agreed members of a round; ``members`` is in the order of node ranks."""

    model_config = ConfigDict(frozen=True, ignored_types=(cached_property,))

    round: Annotated[Round, COUNT]
    members: Annotated[tuple[Member, ...], Field(min_length=1)]
    master_addr: str
    """Address at which the workers of the round meet; it belongs to the node with rank 0."""
    master_port: Port

    @cached_property
    def rank_of(self) -> dict[NodeId, int]:
        """Node rank of each node."""
        return {m.node: rank for rank, m in enumerate(self.members)}

    @property
    def world_size(self) -> int:
        """Number of workers in the round."""
        last = self.members[-1]
        return last.rank_offset + last.nproc

    @cached_property
    def role_world_size(self) -> dict[str, int]:
        """Number of workers of each role."""
        return {m.role: m.role_rank_offset + m.nproc for m in self.members}

    def has(self, node: NodeId, incarnation: int) -> bool:
        """Return whether this incarnation of the node is a member."""
        rank = self.rank_of.get(node)
        return rank is not None and self.members[rank].incarnation == incarnation


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of nodes at each stage of readiness."""

    ready: int
    busy: int
    """Nodes that have not acknowledged their last assignment."""
    near: int
    """Nodes that are starting, and will report soon."""


@dataclass(frozen=True, slots=True)
class Form:
    """A verdict: form the round now, with this many nodes."""

    size: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A verdict: do not form the round yet."""

    why: str
    """The reason, in words."""
    until: float | None = None
    """Time of the next decision, if nothing happens before."""


def verdict(
    size: Size, counts: Counts, *, opened_at: float, now: float, wait_s: float
) -> Form | Wait:
    """Decide whether the next round can be formed.

    Args:
        size: Bounds of the round.
        counts: Number of nodes at each stage of readiness.
        opened_at: Time at which the next round became necessary.
        now: Time by the same clock.
        wait_s: Seconds after ``opened_at`` during which a round of at least the minimum waits for
            nodes that are near.

    Returns:
        The size of the round, or why and until when to wait. Without a time, only news of a node
        can change the decision. That is so while a node is busy, or while there are too few.
    """
    if counts.busy:
        # Each of them reports within its lease, or is given up.
        return Wait(
            f"{counted(counts.busy, 'node')} {'has' if counts.busy == 1 else 'have'} not yet "
            "acknowledged the last assignment"
        )
    full = size.fit(size.desired)
    fits = size.fit(counts.ready)
    if full and fits == full:
        return Form(full)
    if counts.near and (not fits or size.fit(counts.ready + counts.near) > fits):
        until = opened_at + wait_s
        if not fits:
            return Wait(_ready_message(counts, size))
        if now < until:
            return Wait(f"{counted(counts.near, 'more node')} {are(counts.near)} starting", until)
    if fits:
        return Form(fits)
    return Wait(_ready_message(counts, size))


def _ready_message(counts: Counts, size: Size) -> str:
    """Describe how many nodes are there."""
    desired = counted(size.minimum, "node")
    return f"{counts.ready} of at least {desired} {are(counts.ready)} ready"


@dataclass(frozen=True, slots=True)
class CandidateNode:
    """A node that can be in the round."""

    node: NodeId
    incarnation: int
    nproc: int
    topology: tuple[str, ...] = ()
    """Its domain, such as zone and rack, and its host: the outermost first."""
    role: str = "default"

    @property
    def domain(self) -> tuple[str, ...]:
        """The topology without the host."""
        return self.topology[:-1]


def arrange(
    candidates: Sequence[CandidateNode],
    size: int,
    previous: Sequence[tuple[NodeId, tuple[str, ...]]] = (),
) -> tuple[Member, ...]:
    """Choose ``size`` candidates and give them ranks; members of the round before come first.

    Args:
        candidates: At least ``size`` nodes.
        size: Number of nodes in the round.
        previous: Node and topology of each member of the round before, in the order of ranks.

    Returns:
        Members in the order of node ranks. If only some members of the round before can stay,
        whole domains are given up first (:func:`topology.kept`). Otherwise, the place of each lost
        one goes to the new node that shares most levels of the topology with it. Further new nodes
        follow at the end, sorted by topology. Then the nodes of each domain are put side by side
        (:func:`topology.grouped`).
    """
    by_id = {c.node: c for c in candidates}
    survivors = [node for node, _ in previous if node in by_id]
    if len(survivors) > size:
        stay = kept([by_id[node].domain for node in survivors], size)
        survivors = [survivors[at] for at in stay]
    staying = set(survivors)
    old = {node for node, _ in previous}
    spare = sorted(
        (c for c in candidates if c.node not in old), key=lambda c: (c.topology, id_key(c.node))
    )
    if not staying:
        spare = [spare[at] for at in kept([c.domain for c in spare], size)]
    places: list[CandidateNode] = []
    for node, topology in previous:
        if node in staying:
            places.append(by_id[node])
        elif node not in by_id and spare and len(survivors) < size:
            nearest = max(spare, key=lambda c: shared_levels(c.topology, topology))
            spare.remove(nearest)
            places.append(nearest)
            survivors.append(nearest.node)
    places += spare[: size - len(places)]
    ranked = grouped([(place.node, place.domain) for place in places], staying)
    members = []
    offset = 0
    of_role: dict[str, int] = {}
    for place in map(by_id.__getitem__, ranked):
        members.append(
            Member(
                node=place.node,
                incarnation=place.incarnation,
                rank_offset=offset,
                nproc=place.nproc,
                role=place.role,
                role_rank_offset=of_role.get(place.role, 0),
            )
        )
        offset += place.nproc
        of_role[place.role] = of_role.get(place.role, 0) + place.nproc
    return tuple(members)
