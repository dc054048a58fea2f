"""Who is in the next round, and when it is formed: plain functions, no waiting windows.

A round is formed the moment every node that can come has come. Rank order is stable: survivors
keep their places, a newcomer takes the place of a lost node, further ones stand at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.protocol.agents import COUNT, Count, Port
from dlrover_py.protocol.names import NodeId, Round, id_key
from dlrover_py.protocol.words import are, counted


@dataclass(frozen=True, slots=True)
class Size:
    """Bounds of a round, in nodes."""

    desired: int
    minimum: int
    unit: int

    def fit(self, nodes: int) -> int:
        """The largest size that this many nodes allow; 0 if fewer than the minimum."""
        size = min(nodes, self.desired) // self.unit * self.unit
        return size if size >= self.minimum else 0


class Member(BaseModel):
    """A node's place in a round."""

    model_config = ConfigDict(frozen=True)

    node: NodeId
    incarnation: Count
    rank_offset: Count
    nproc: Annotated[int, Field(ge=1, le=1024)]
    role: str = "default"
    role_rank_offset: Count = 0


class World(BaseModel):
    """An agreed membership; ``members`` is in the order of node ranks."""

    model_config = ConfigDict(frozen=True, ignored_types=(cached_property,))

    round: Annotated[Round, COUNT]
    members: Annotated[tuple[Member, ...], Field(min_length=1)]
    master_addr: str
    master_port: Port

    @cached_property
    def rank_of(self) -> dict[NodeId, int]:
        """Node rank by node."""
        return {m.node: rank for rank, m in enumerate(self.members)}

    @property
    def world_size(self) -> int:
        """Workers in the round."""
        last = self.members[-1]
        return last.rank_offset + last.nproc

    @cached_property
    def role_world_size(self) -> dict[str, int]:
        """Workers by role."""
        return {m.role: m.role_rank_offset + m.nproc for m in self.members}

    def has(self, node: NodeId, incarnation: int) -> bool:
        """Whether this life of the node is a member."""
        rank = self.rank_of.get(node)
        return rank is not None and self.members[rank].incarnation == incarnation


@dataclass(frozen=True, slots=True)
class Counts:
    """How many nodes can come."""

    ready: int
    busy: int
    near: int


@dataclass(frozen=True, slots=True)
class Form:
    """Form the round now, with this many nodes."""

    size: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet."""

    why: str
    until: float | None = None
    """Look again then, if nothing happens before."""


def verdict(
    size: Size, counts: Counts, *, opened_at: float, now: float, wait_s: float
) -> Form | Wait:
    """Whether the next round can be formed.

    Args:
        size: bounds of the round.
        counts: nodes by how ready they are.
        opened_at: when it became clear that a next round is needed.
        now: the same clock.
        wait_s: how long to wait for nodes that are near, once the minimum is there.
    """
    if counts.busy:
        # Each of them reports within its lease, or is given up.
        return Wait(
            f"{counted(counts.busy, 'node')} {are(counts.busy)} still taking up the last assignment"
        )
    full = size.fit(size.desired)
    fits = size.fit(counts.ready)
    if full and fits == full:
        return Form(full)
    if counts.near and (not fits or size.fit(counts.ready + counts.near) > fits):
        until = opened_at + wait_s
        if not fits:
            return Wait(_there(counts, size))
        if now < until:
            return Wait(f"{counted(counts.near, 'node')} {are(counts.near)} about to come", until)
    if fits:
        return Form(fits)
    return Wait(_there(counts, size))


def _there(counts: Counts, size: Size) -> str:
    wanted = counted(size.minimum, "node")
    return f"{counts.ready} of at least {wanted} {are(counts.ready)} there"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that can be in the round."""

    node: NodeId
    incarnation: int
    nproc: int
    topology: tuple[str, ...] = ()
    role: str = "default"


def arrange(
    candidates: Sequence[Candidate],
    size: int,
    previous: Sequence[tuple[NodeId, tuple[str, ...]]] = (),
) -> tuple[Member, ...]:
    """Choose ``size`` candidates and give them ranks.

    Args:
        candidates: at least ``size`` of them.
        size: nodes in the round.
        previous: node and topology in the order of the ranks of the round before.
    Returns:
        In the order of node ranks: survivors in their old order, each hole taken by the newcomer
        nearest to the lost node, further newcomers at the end beside their neighbours.
    """
    by_id = {c.node: c for c in candidates}
    survivors = [node for node, _ in previous if node in by_id][:size]
    kept = set(survivors)
    old = {node for node, _ in previous}
    spare = sorted(
        (c for c in candidates if c.node not in old), key=lambda c: (c.topology, id_key(c.node))
    )
    places: list[Candidate] = []
    for node, topology in previous:
        if node in kept:
            places.append(by_id[node])
        elif node not in by_id and spare and len(survivors) < size:
            nearest = max(spare, key=lambda c: _common(c.topology, topology))
            spare.remove(nearest)
            places.append(nearest)
            survivors.append(nearest.node)
    places += spare[: size - len(places)]
    members = []
    offset = 0
    of_role: dict[str, int] = {}
    for place in places:
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


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
