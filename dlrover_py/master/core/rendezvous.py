"""Membership and start of the next round: pure functions without waiting windows.

A round is formed as soon as every node that can come has come. Nodes of one domain have
neighbouring ranks. Within a domain, the order of ranks is stable: survivors keep their order, a new
node takes the place of a lost node, and further nodes come at the end.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.master.core.topology import Domain, grouped, kept
from dlrover_py.protocol.agents import COUNT, Count, Port
from dlrover_py.protocol.names import NodeId, Round, id_key
from dlrover_py.protocol.words import are, counted


@dataclass(frozen=True, slots=True)
class Size:
    """The bounds of a round, in nodes."""

    desired: int
    minimum: int
    """``minReplicas``. If only some sizes are allowed, a round may need more: ``least``."""
    unit: int
    """The size of a round is a multiple of this number."""
    sizes: tuple[int, ...] = ()
    """The only allowed sizes, ascending; all multiples of the unit if empty."""

    @property
    def least(self) -> int:
        """Return the least number of nodes with which a round can be formed."""
        return next((size for size in self.sizes if size >= self.minimum), self.minimum)

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
    least = counted(size.least, "node")
    return f"{counts.ready} of at least {least} {are(counts.ready)} ready"


@dataclass(frozen=True, slots=True)
class CandidateNode:
    """A node that can be in the round."""

    node: NodeId
    incarnation: int
    nproc: int
    topology: tuple[str, ...] = ()
    """Its domain, such as zone and rack, and its host: the outermost first."""
    role: str = "default"
    stable: bool = False
    """Whether it must not be on a spot host."""

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
        Members in the order of node ranks. If only some members of the round before can stay, those
        that may be on spot hosts are given up first, and among these whole domains
        (:func:`topology.kept`). If only some new nodes are needed, those in domains of the round
        stay first. The places of lost members go to the new nodes that share most levels of the
        topology with them. Further new nodes follow at the end, sorted by topology. Then the nodes
        of each domain are put side by side (:func:`topology.grouped`). A new node of which nothing
        else is known is taken to be in the domain of the lost one.
    """
    by_id = {c.node: c for c in candidates}
    survivors = [node for node, _ in previous if node in by_id]
    if len(survivors) > size:
        survivors = _staying([by_id[node] for node in survivors], size)
    staying = set(survivors)
    old = {node for node, _ in previous}
    spare = sorted(
        (c for c in candidates if c.node not in old), key=lambda c: (c.topology, id_key(c.node))
    )
    spare = _needed(spare, [by_id[node].domain for node in survivors], size - len(survivors))
    successors = _successors([one for one in previous if one[0] not in by_id], spare)
    places: list[tuple[NodeId, Domain]] = []
    for node, topology in previous:
        if node in staying:
            places.append((node, by_id[node].domain))
        elif (new := successors.get(node)) is not None:
            lost = topology[:-1]
            same = all(a in ("", b) for a, b in zip_longest(new.domain, lost, fillvalue=""))
            places.append((new.node, lost if same else new.domain))
    placed = {node for node, _ in places}
    places += [(c.node, c.domain) for c in spare if c.node not in placed]
    ranked = grouped(places, staying)
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


def _staying(members: Sequence[CandidateNode], size: int) -> list[NodeId]:
    """Choose ``size`` members. Nodes that are kept off spot hosts stay before others.

    Among those of one kind, whole topology domains are given up first.

    Args:
        members: More than ``size`` nodes, in the order of ranks.
        size: Number of members that stay.
    """
    stable = [at for at, member in enumerate(members) if member.stable]
    others = [at for at, member in enumerate(members) if not member.stable]
    some, always = (stable, []) if len(stable) >= size else (others, stable)
    stay = kept([members[at].domain for at in some], size - len(always))
    return [members[at].node for at in sorted([*always, *(some[i] for i in stay)])]


def _needed(
    spare: Sequence[CandidateNode], in_use: Sequence[Domain], count: int
) -> list[CandidateNode]:
    """Choose new nodes: as few further domains as possible come into use, beginning with the widest
    level.

    Args:
        spare: The new nodes, sorted.
        in_use: Domains of the nodes that stay.
        count: Number of new nodes that are needed.

    Returns:
        So many new nodes, or all of them, sorted as before.
    """
    near: list[CandidateNode] = []
    pool = list(spare)
    depth = max(map(len, [*in_use, *(c.domain for c in spare)]), default=0)
    unknown = ("",) * depth
    for level in range(1, depth + 1):
        prefixes = {(domain + unknown)[:level] for domain in in_use}
        inside = [c for c in pool if (c.domain + unknown)[:level] in prefixes]
        if len(inside) < count:
            near = inside
            break
        pool = inside
    nodes = {c.node for c in near}
    others = [c for c in pool if c.node not in nodes]
    nodes |= {others[at].node for at in kept([c.domain for c in others], count - len(near))}
    return [c for c in spare if c.node in nodes]


def _successors(
    lost: Sequence[tuple[NodeId, Domain]], spare: Sequence[CandidateNode]
) -> dict[NodeId, CandidateNode]:
    """Return the new node in the place of each lost one, as far as there are new nodes.

    Those that share most levels of the topology come together first. Among equals, the order is
    kept.

    Args:
        lost: Node and topology of the lost members, in the order of ranks.
        spare: The new nodes, sorted by topology.
    """
    found: dict[NodeId, CandidateNode] = {}
    depth = max((len(c.topology) for c in spare), default=0)
    for level in range(depth, -1, -1):
        inside: dict[Domain, deque[CandidateNode]] = {}
        for c in spare:
            inside.setdefault(c.topology[:level], deque()).append(c)
        for node, topology in lost:
            if node not in found and (near := inside.get(topology[:level])):
                found[node] = near.popleft()
        spare = [c for near in inside.values() for c in near]
    return found
