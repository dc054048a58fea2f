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

from dlrover_agent.replicas import plan
from dlrover_py.master.core.checkpoints import peers
from dlrover_py.protocol.checkpoint import Age, Region, Summary
from dlrover_py.protocol.names import NodeId
from dlrover_py.trainer.checkpoint import Checkpointer, Marks
from dlrover_py.trainer.settings import Settings
from dlrover_py.trainer.staging import choose

NOTHING = Region(0, 0, 0)
NONE = (0, 0, 0)


@dataclass
class Node:
    """Its memory: the summaries of its workers' slots, and of replicas."""

    id: NodeId
    slots: dict[str, Summary] = field(default_factory=dict)

    def list(self) -> list[tuple[str, Summary]]:
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

    waited_s = fenced_s = 0.0
    persister = None

    def __init__(self, node: Node, place: int, rank: int, world: int, round: int) -> None:
        self.node, self.rank, self.world, self.round = node, rank, world, round
        self.copies, self.stager, self.ballot = world > 1, self, None
        self._names = [f"{place}.{index}" for index in range(4)]
        self.said: list[Marks] = []

    def found(self) -> list[Summary | None]:
        return [self.node.slots.get(name) for name in self._names]

    def wait(self) -> bool:
        return True

    def grow(self) -> bool:
        return True

    def tidy(self) -> None:
        pass

    def close(self, *, failed: bool) -> None:
        pass

    def gather(self, mine: Marks) -> list[Marks]:
        return self.said

    def amend(self, change: Callable[[Summary], Summary]) -> None:
        self.node.slots |= {n: change(s) for n, s in self.node.slots.items() if n in self._names}

    def stage(self, step: int, *_: Any, lap: int, persist: bool, copy: bool, spared: Any,
              metric: Any) -> Any:  # fmt: skip
        part, id_ = f"{self.rank + 1:x}", f"{step}"
        for index in choose(self.found(), spared):
            summary = Summary("j", step, self.round, lap, self.world, self.rank, part, id_, 9, 5,
                              NOTHING, NOTHING, NOTHING, persist=persist, copy=copy)  # fmt: skip
            self.node.slots[self._names[index]] = summary
            done = threading.Event()
            done.set()
            facts = {"part": part, "copy": copy}
            return SimpleNamespace(summary=summary, why="", done=done, facts=facts)
        return None


class World:
    """A job of nodes whose ranks have different parts."""

    def __init__(self, nodes: int, nproc: int, dice: Random, *, stores: bool) -> None:
        self._dice, self._nproc, self._stores = dice, nproc, stores
        self._made = self.round = self.step = 0
        self.nodes = list[Node]()
        self.sources = dict[NodeId, NodeId]()
        self.ranks = list[Checkpointer]()
        self.least = dict[str, Age]()
        """Of each node: what is left without it, of what all ranks know to be copied."""
        for _ in range(nodes):
            self.add()

    def add(self) -> Node:
        self.nodes.append(Node(NodeId(f"n{self._made}")))
        self._made += 1
        return self.nodes[-1]

    def without(self, lost: Node) -> Age:
        """The newest set that can be loaded without a node."""
        have: dict[tuple[Age, int], set[int]] = {}
        for node in self.nodes:
            for summary in node.slots.values() if node is not lost else ():
                have.setdefault((summary.age, summary.world), set()).add(summary.rank)
        return max((age for (age, world), r in have.items() if len(r) == world), default=NONE)

    def look(self, what: str) -> None:
        agreed = {c._copied and (c._copied[1], c._copied[2], c._copied[0]) for c in self.ranks}
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
        here = {s.id: s.age for n in self.nodes for s in n.slots.values()}
        newest = max((i for i in here if self._whole(here[i])), key=lambda i: here[i], default=None)
        for site in sites:
            held = [s for s in site.found() if s is not None]
            site.said.append(
                Marks(
                    tuple(s.age for s in held), {s.id: (s.copied, s.world) for s in held if s.copy}
                )
            )
        for site in sites:
            said = [other.said[0] for other in sites]
            rank = Checkpointer(
                "/no" if self._stores else None, every=1, persist_every=4, rng=False,
                settings=Settings(),
            )  # fmt: skip
            rank._open_at = cast(Any, site)
            site.said = said
            rank._lap += 1
            rank._go_on_with_copies(cast(Any, site), newest)
            site.said = said[site.rank : site.rank + 1]
            rank._whole = newest
            self.ranks.append(rank)
        self.step = 0 if newest is None else newest[0]
        note(f"round {self.round} of {[n.id for n in self.nodes]}: {newest} is loaded")
        self.look("loading")

    def end(self) -> None:
        """Of the round: its workers are killed."""
        for rank in self.ranks:
            rank._at_exit()
        self.ranks = []

    def _whole(self, age: Age) -> bool:
        found = [s for n in self.nodes for s in n.slots.values() if s.age == age]
        return len({s.rank for s in found}) == found[0].world

    def save(self) -> None:
        self.step += 1
        for rank in self._dice.sample(self.ranks, len(self.ranks)):
            rank._save(cast(Any, rank._open_at), self.step, {}, None, False)
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
            keeper.slots[pull.to] = pull.summary
            self.look(f"a pull of {keeper.id}")
        for name in todo.spare:
            del keeper.slots[name]
            self.look(f"what {keeper.id} drops")
        if todo.told is not None:
            for name, summary in source.slots.items():
                if summary.age == todo.told and not name.startswith("peer-"):
                    source.slots[name] = replace(summary, copied=True)

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
@settings(deadline=None, max_examples=200, derandomize=True)
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
    assert {one._copied and one._copied[1] for one in world.ranks} == {world.round}
    world.end()
