"""What can be loaded whichever node is lost never goes back, whatever the workers go through.

Real checkpointers, choices of slots and plans of keepers, in nodes whose memory is a dictionary.
Ranks save in any order, keepers look at any moment, and between rounds nodes are replaced, come and
go. Of a set that all ranks know to be copied, nothing may be given up before the next one is.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, note, settings
from hypothesis import strategies as st

from dlrover_agent.checkpoint.replication import plan
from dlrover_py.master.core.replica_pairs import peers
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import NodeId, Round, Step, Timeline
from dlrover_py.protocol.slots import SlotHeader, SlotRegion
from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.replica_tracking import ReplicaMarks
from dlrover_py.trainer.settings import Settings
from dlrover_py.trainer.slot_pool import fillable_slots
from tests.ids import checkpoint_id

NOTHING = SlotRegion(0, 0, 0)
NONE = checkpoint_id(0, 0)


@dataclass
class Node:
    """Its memory: the headers of its workers' slots, and of replicas."""

    id: NodeId
    slots: dict[str, SlotHeader] = field(default_factory=dict)

    def list(self) -> list[tuple[str, SlotHeader]]:
        return sorted(self.slots.items())


class Ballot:
    """Votes are heard once all ranks have given theirs."""

    def __init__(self, world: int) -> None:
        self.world, self.votes = world, dict[int, list[tuple[int, ...]]]()

    def of(self, rank: int) -> Any:
        given = 0

        def launch(vote: tuple[int, ...]) -> Callable[[float | None], list[int]]:
            nonlocal given
            votes = self.votes.setdefault(given, [])
            given += 1
            votes.append(vote)

            def heard(_: float | None) -> list[int]:
                assert len(votes) == self.world
                return [max(column) for column in zip(*votes, strict=True)]

            return heard

        return SimpleNamespace(launch=launch)


class Site:
    """A worker's place, and its stager."""

    persister = None

    def __init__(self, node: Node, place: int, rank: int, world: int, round: int) -> None:
        self.node, self.rank, self.world, self.round = node, rank, world, round
        self.copies, self.stager, self.ballot = world > 1, self, None
        self._names = [f"{place}.{index}" for index in range(4)]
        self.said: list[ReplicaMarks] = []

    def found(self) -> list[SlotHeader | None]:
        return [self.node.slots.get(name) for name in self._names]

    def wait(self) -> bool:
        return True

    def grow(self) -> bool:
        return True

    def tidy(self) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        pass

    def gather(self, mine: list[Any]) -> list[list[Any]]:
        return [one.plain() for one in self.said]

    def update_headers(self, change: Callable[[SlotHeader], SlotHeader]) -> None:
        self.node.slots |= {n: change(s) for n, s in self.node.slots.items() if n in self._names}

    def stage(self, step: int, *_: Any, timeline: Timeline, persist: bool, copy: bool,
              protected: Any, metric: Any, certified: bool) -> Any:  # fmt: skip
        part, id_ = f"{self.rank + 1:x}", f"{step}"
        for index in fillable_slots(self.found(), protected):
            header = SlotHeader("j", Step(step), Round(self.round), timeline, self.world,
                                 self.rank, part, id_, 9, 5, NOTHING, NOTHING, NOTHING,
                                 persist=persist, copy=copy, certified=certified)  # fmt: skip
            self.node.slots[self._names[index]] = header
            done = threading.Event()
            done.set()
            facts = {"part": part, "copy": copy}
            return SimpleNamespace(header=header, why="", done=done, facts=facts)
        return None


class OpenCheckpointer(Checkpointer):
    """A checkpointer whose steps are taken one by one, at a site of the test."""

    @property
    def copied(self) -> CheckpointId | None:
        """What all ranks know to be copied."""
        return self._replicas.copied

    def begins(self, site: Site, newest: CheckpointId | None, said: list[Any]) -> None:
        """Load in a new round, of which all ranks have said what they hold."""
        self._opened = cast(Any, site)
        site.said = said
        self._claim.begin_timeline()
        self._replicas.loaded(cast(Any, site), newest)
        site.said = said[site.rank : site.rank + 1]
        self._newest_complete = newest

    def saves(self, step: int) -> None:
        self._save(cast(Any, self._opened), step, {}, None, False)

    def ends(self) -> None:
        self._at_exit()


class World:
    """A job of nodes whose ranks have different parts."""

    def __init__(self, nodes: int, nproc: int, dice: Random, *, stores: bool) -> None:
        self._dice, self._nproc, self._stores = dice, nproc, stores
        self._made = self.round = self.step = 0
        self.nodes = list[Node]()
        self.sources = dict[NodeId, NodeId]()
        self.ranks = list[OpenCheckpointer]()
        self.least = dict[str, CheckpointId]()
        """Of each node: what is left without it, of what all ranks know to be copied."""
        for _ in range(nodes):
            self.add()

    def add(self) -> Node:
        self.nodes.append(Node(NodeId(f"n{self._made}")))
        self._made += 1
        return self.nodes[-1]

    def without(self, lost: Node) -> CheckpointId:
        """The newest set that can be loaded without a node."""
        have: dict[tuple[CheckpointId, int], set[int]] = {}
        for node in self.nodes:
            for header in node.slots.values() if node is not lost else ():
                have.setdefault((header.id, header.world), set()).add(header.rank)
        return max((id_ for (id_, world), r in have.items() if len(r) == world), default=NONE)

    def look(self, what: str) -> None:
        agreed = {c.copied for c in self.ranks}
        for node in self.nodes:
            now = self.without(node)
            assert now >= self.least.get(node.id, NONE), f"without {node.id}, at {what}"
            if now in agreed:
                self.least[node.id] = now

    def begin(self) -> None:
        """A new round; its workers load."""
        self.end()
        self.round += 1
        self.sources = peers([(n.id, ()) for n in self.nodes], self.sources)
        world = len(self.nodes) * self._nproc
        ballot, sites = Ballot(world), list[Site]()
        for node in self.nodes:
            for place in range(self._nproc):
                sites.append(Site(node, place, len(sites), world, self.round))
                sites[-1].ballot = ballot.of(len(sites) - 1) if world > 1 else None
        here = {s.id for n in self.nodes for s in n.slots.values()}
        newest = max((i for i in here if self._whole(i)), default=None)
        for site in sites:
            held = [s for s in site.found() if s is not None]
            site.said.append(
                ReplicaMarks(
                    tuple(s.id for s in held), {s.id: (s.copied, s.world) for s in held if s.copy}
                )
            )
        for site in sites:
            said = [other.said[0] for other in sites]
            rank = OpenCheckpointer(
                "/no" if self._stores else None, every=1, persist_every=4, rng=False,
                settings=Settings(),
            )  # fmt: skip
            rank.begins(site, newest, said)
            self.ranks.append(rank)
        self.step = 0 if newest is None else newest.step
        note(f"round {self.round} of {[n.id for n in self.nodes]}: {newest} is loaded")
        self.look("loading")

    def end(self) -> None:
        """Of the round: its workers are killed."""
        for rank in self.ranks:
            rank.ends()
        self.ranks = []

    def _whole(self, id_: CheckpointId) -> bool:
        found = [s for n in self.nodes for s in n.slots.values() if s.id == id_]
        return len({s.rank for s in found}) == found[0].world

    def save(self) -> None:
        self.step += 1
        for rank in self._dice.sample(self.ranks, len(self.ranks)):
            rank.saves(self.step)
            self.look(f"step {self.step}")
            if self._dice.random() < 0.15:
                self.keep(self._dice.choice(self.nodes))

    def keep(self, keeper: Node) -> None:
        """An agent looks at its peer once."""
        source = next((n for n in self.nodes if n.id == self.sources.get(keeper.id)), None)
        if source is None:
            return
        todo = plan(source.list(), keeper.list())
        for pull in todo.pulls:
            keeper.slots[pull.to] = pull.header
            self.look(f"a pull of {keeper.id}")
        for name in todo.spare:
            del keeper.slots[name]
            self.look(f"what {keeper.id} drops")
        if todo.told is not None:
            for name, header in source.slots.items():
                if header.id == todo.told and not name.startswith("peer-"):
                    source.slots[name] = replace(header, copied=True)

    def stored(self) -> None:
        """A persister is done with what its node is to store."""
        node = self._dice.choice(self.nodes)
        node.slots = {n: replace(s, persist=False) for n, s in node.slots.items()}

    def lose(self, *, replaced: bool) -> None:
        """A node. What only it and its keeper had may go with the next one."""
        lost = self._dice.choice(self.nodes)
        self.nodes.remove(lost)
        near = {lost.id, self.sources.get(lost.id)}
        near |= {k for k, source in self.sources.items() if source == lost.id}
        for node in self.nodes:
            sure = NONE if node.id in near else self.without(node)
            self.least[node.id] = min(self.least.get(node.id, NONE), sure)
        if replaced:
            self.add()


@given(
    nodes=st.integers(2, 4),
    nproc=st.integers(1, 2),
    stores=st.booleans(),
    kinds=st.sampled_from([("restart",), ("restart", "replace"), ("restart", "grow")]),
    dice=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_outlives_any_node_never_goes_back(
    nodes: int, nproc: int, stores: bool, kinds: tuple[str, ...], dice: Random
) -> None:
    world = World(nodes, nproc, dice, stores=stores)
    world.begin()
    for _ in range(6):
        for _ in range(dice.choice([1, 2, 3, 5, 8, 12])):
            world.save()
            for _ in range(dice.choice([0, 0, 1, 2, 3])):
                world.keep(dice.choice(world.nodes))
            if stores and dice.random() < 0.5:
                world.stored()
        kind = dice.choice(kinds)
        if kind == "replace":  # one loss: another one before all is copied again may cost more
            kinds = ("restart",)
        note(kind)
        if kind == "replace":
            world.lose(replaced=True)
        elif kind == "grow" and len(world.nodes) < 4:
            world.add()
        world.begin()
    for _ in range(12):  # undisturbed, all have copied something of this round soon
        world.save()
        for node in world.nodes:
            world.keep(node)
            node.slots = {n: replace(s, persist=False) for n, s in node.slots.items()}
    copied = [one.copied for one in world.ranks]
    assert {one and one.round for one in copied} == {world.round}
    world.end()
