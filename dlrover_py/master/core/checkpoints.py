"""Which checkpoints are whole in the nodes' memory, who keeps copies of whom, and what is stored.

A *set* is one ``(step, round, lap)`` (docs/decisions/0010-flash-checkpoint.md). It is whole when
living nodes hold every part of it. Its parts are known once each rank of its world has told of
its own, of this step or else of the newest one of the same lap. A report costs what it says, and
not what other nodes hold.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dlrover_py.protocol.agents import (
    AgentReport,
    Candidate,
    Candidates,
    Held,
    Holders,
    Peer,
    PersistOrder,
    PersistPhase,
    Stored,
)
from dlrover_py.protocol.checkpoint import Age, age_of
from dlrover_py.protocol.names import NodeId, Term, id_key

Key = tuple[int, int, int]
"""Step, round, lap."""
Topology = tuple[str, ...]

CANDIDATES = 3
PASSED_KEPT = 8
TRIES = 2
"""To store what would be lost: a further one where the first has failed."""


@dataclass(slots=True)
class _Set:
    """One checkpoint, as far as nodes have told of it."""

    world: int
    full: dict[str, set[NodeId]] = field(default_factory=dict)
    """By part: nodes that hold all of it."""
    nodes: set[NodeId] = field(default_factory=set)
    flagged: set[NodeId] = field(default_factory=set)
    """Nodes that say that it is to be stored."""
    told: set[int] = field(default_factory=set)
    """Ranks of which something was ever known."""
    parts: set[str] = field(default_factory=set)
    """Theirs."""
    tried: int = 0
    """Orders that have come to an end, well or not."""
    stored: bool = False
    whole_at: float | None = None
    """Wall time at which it was first seen to be whole."""


@dataclass(slots=True)
class _Lap:
    """What is known of the ranks of a round between two loads."""

    world: int
    newest: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By rank: newest step that it has told of, and its part."""
    sets: set[Key] = field(default_factory=set)
    parts: frozenset[str] | None = None
    """Of all ranks; None if that has to be found out anew."""

    def learn(self, held: Held) -> None:
        for rank, part in held.ranks.items():
            step, old = self.newest.get(rank, (-1, ""))
            if held.step >= step:
                self.newest[rank] = held.step, part
                if part != old:
                    self.parts = None

    def all_parts(self) -> frozenset[str]:
        """Empty as long as a rank has told nothing."""
        if self.parts is None:
            known = len(self.newest) >= self.world
            self.parts = frozenset(p for _, p in self.newest.values()) if known else frozenset()
        return self.parts


@dataclass(slots=True)
class _Node:
    """What one node has told."""

    memory: list[Held] = field(default_factory=list)
    looked: int = 0
    addr: str = ""
    depot: int = 0
    boot: str = ""
    stored: Stored | None = None
    """What it was the last to commit; it says so as long as it lives."""


@dataclass(slots=True)
class _Order:
    """A checkpoint that is being written."""

    key: Key
    world: int
    attempt: str
    ranks: dict[NodeId, list[int]]
    """By the node that writes them."""
    coordinator: NodeId
    begun: float
    until: float
    granted: bool = False
    done: set[NodeId] = field(default_factory=set)
    """Nodes whose shards are there."""


@dataclass(slots=True)
class _Wish:
    """What is newest in memory is to be stored, for it may be lost."""

    why: str
    waits: set[NodeId]
    """Nodes whose workers may still run."""
    round: int
    settle_at: float
    until: float
    stay: bool
    """Who goes stays until then."""
    attempt: str = ""
    """Its newest order: not called off for a newer set, for a round that trains on has one with
    each step."""


@dataclass(slots=True)
class _Question:
    number: int
    round: int
    until: float


@dataclass(frozen=True, slots=True)
class Note:
    """Something for people to know."""

    reason: str
    message: str
    warning: bool = False


@dataclass(slots=True)
class Outcome:
    """What has come of a look at it all."""

    tell: set[NodeId] = field(default_factory=set)
    """Nodes whose assignment has changed."""
    notes: list[Note] = field(default_factory=list)
    answers: list[tuple[int, Candidates]] = field(default_factory=list)
    kept: bool = False
    """What outlives the master has changed: what is in storage, or what a round has passed by."""
    wake_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint that could be loaded."""

    step: int
    at: float
    """Wall time."""
    where: str = ""
    """Folder, if it is in storage."""


class Checkpoints:
    """All that is known of checkpoints; only ``stored`` and ``passed`` outlive the master."""

    def __init__(
        self, stored: Stored | None = None, passed: Iterable[tuple[int, Age]] = ()
    ) -> None:
        self.stored = stored
        self.passed = list(passed)
        """Rounds, the newest last, and the newest that each could go on from."""
        self.in_use = stored is not None
        """Some node's script saves and loads."""
        self.storable = stored is not None
        """There is a storage, as far as is known."""
        self.failing: str = ""
        """Why the last order came to nothing."""
        self.commits = self.failures = 0
        self._nodes: dict[NodeId, _Node] = {}
        self._sets: dict[Key, _Set] = {}
        self._laps: dict[tuple[int, int], _Lap] = {}
        self._flagged: set[Key] = set()
        self._trouble: dict[NodeId, str] = {}
        self._round = 0
        self._unlooked: set[NodeId] = set()
        """Members of the round of which it is not known what their memory holds by now."""
        self._unheard: set[NodeId] = set()
        """Nodes of an earlier term that have not said in this one what they hold."""
        self._source: dict[NodeId, NodeId] = {}
        """By the node that keeps a copy: whose memory it is of."""
        self._keeper: dict[NodeId, NodeId] = {}
        self._order: _Order | None = None
        self._orders = 0
        self._wish: _Wish | None = None
        self._questions: list[_Question] = []
        self._out = Outcome()
        self._dirty = False
        """Something has changed that an order may follow from."""

    # --- what happens ---

    def recall(self, node: NodeId) -> None:
        """A node had reported to an earlier term: it may hold what no other does."""
        self._unheard.add(node)

    def take(self, node: NodeId, report: AgentReport) -> None:
        """A node has reported."""
        self._unheard.discard(node)
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = _Node()
        if known.boot and known.boot != report.boot_id:
            self._part_lost(node, "has a new agent")
        known.boot = report.boot_id
        if report.memory != known.memory:
            self._remember(node, known, report.memory)
        if report.memory_round != known.looked:
            known.looked = report.memory_round
            self._looked(node, known.looked)
        if (report.offer.addr, report.depot) != (known.addr, known.depot):
            known.addr, known.depot = report.offer.addr, report.depot
            if keeper := self._keeper.get(node):
                self._out.tell.add(keeper)
        if report.checkpoint_trouble:
            self._trouble[node] = report.checkpoint_trouble
        elif self._trouble:
            self._trouble.pop(node, None)
        self.in_use |= report.depot > 0  # even if nothing could be saved yet
        self.storable |= report.stores
        if report.stored != known.stored:
            known.stored = report.stored
            if report.stored is not None:
                self._see(report.stored)
        if report.persisting is not None and self._order is not None:
            self._progressed(node, report)

    def drop(self, node: NodeId) -> None:
        """The node is gone, and so is what it held."""
        self._unheard.discard(node)
        known = self._nodes.pop(node, None)
        if known is None:
            return
        self._remember(node, known, [])
        self._trouble.pop(node, None)
        self._looked(node, math.inf)
        self._part_lost(node, "is gone")

    def new_round(
        self, number: int, members: Sequence[tuple[NodeId, Topology]], *, replicas: bool
    ) -> None:
        """These are the members from now on; what was being written for the old round is not."""
        self._round = number
        self._unlooked = {n for n, _ in members if self._look_of(n) < number}
        if self._order is not None and not self._order.granted:
            self._call_off("a new round has begun")
        old = self._source
        self._source = peers(members, old) if replicas else {}
        self._keeper = {source: keeper for keeper, source in self._source.items()}
        self._dirty = True

    def end_round(self) -> None:
        """Nobody trains any more: no copies are kept."""
        self._source, self._keeper = {}, {}

    def wish(
        self,
        why: str,
        members: Iterable[NodeId],
        round_number: int,
        *,
        now: float,
        until: float,
        stay: bool,
    ) -> None:
        """Let the newest whole set be stored, once the workers of the round have ended.

        Args:
            why: in words.
            members: of the round.
            round_number: of the round.
            now, until: when it is in vain.
            stay: nodes that are to end wait for it.
        """
        if not (self.storable and self._sets):
            return
        old = self._wish
        if old is not None and old.round == round_number:
            old.until, old.stay = max(old.until, until), old.stay or stay
            return
        waits = {n for n in members if n in self._nodes and self._look_of(n) <= round_number}
        settle_at = now + (until - now) / 2
        self._wish = _Wish(why, waits, round_number, settle_at, until, stay)
        self._dirty = True

    def ask(self, number: int, round_number: int, until: float) -> None:
        """A node of the round wants to know what could be restored; see ``Outcome.answers``.

        Args:
            number: names the question.
            round_number: whose members must have looked at their memory.
            until: it is answered by then, whoever has.
        """
        self._questions.append(_Question(number, round_number, until))

    def look(self, now: float, wall: float, *, term: Term, persist_s: float) -> Outcome:
        """Decide what follows.

        Args:
            now, wall: the time.
            term: of this master.
            persist_s: an order has failed after so long.
        """
        self._expire(now)
        if self._dirty:
            self._dirty = False
            self._decide(now, wall, term, persist_s)
        self._answer(now)
        out, self._out = self._out, Outcome()
        if self._order is not None:
            out.wake_at = min(out.wake_at, self._order.until)
        if (wish := self._wish) is not None:
            due = wish.settle_at if wish.waits and now < wish.settle_at else wish.until
            out.wake_at = min(out.wake_at, due)
        out.wake_at = min([out.wake_at, *(q.until for q in self._questions)])
        return out

    # --- what a node is told ---

    def peer(self, node: NodeId) -> Peer | None:
        """Whose memory the node keeps a copy of."""
        source = self._source.get(node)
        known = self._nodes.get(source) if source is not None else None
        return self._address(source) if source is not None and known and known.depot else None

    def order(self, node: NodeId, term: Term) -> PersistOrder | None:
        """What the node has to write."""
        order = self._order
        if order is None or node not in order.ranks:
            return None
        coordinates = node == order.coordinator
        return PersistOrder(
            attempt=order.attempt,
            step=order.key[0],
            round=order.key[1],
            lap=order.key[2],
            world=order.world,
            ranks=order.ranks[node],
            writers=sorted(order.ranks, key=id_key) if coordinates else [],
            grant=term if coordinates and order.granted else 0,
        )

    def holds(self, node: NodeId) -> bool:
        """Whether a node that is to end should stay, for what it holds is about to be stored."""
        order = self._order
        if order is not None and node in order.ranks and node not in order.done:
            return True
        wish, known = self._wish, self._nodes.get(node)
        return wish is not None and wish.stay and known is not None and bool(known.memory)

    # --- what can be asked ---

    def candidates(self) -> list[Candidate]:
        """The newest whole sets, best first."""
        found: list[Candidate] = []
        for key in sorted(self._sets, key=age_of, reverse=True):
            if self._whole(key):
                step, number, lap = key
                world = self._sets[key].world
                found.append(Candidate(step=step, round=number, lap=lap, world=world))
                if len(found) == CANDIDATES:
                    break
        return found

    def holders(self, step: int, number: int, lap: int) -> Holders:
        """Who holds what of a set, where a peer can get at it."""
        key = (step, number, lap)
        one = self._sets.get(key)
        if one is None:
            return Holders()
        best: dict[int, tuple[tuple[bool, bool], NodeId, str]] = {}
        for node in sorted(one.nodes, key=id_key):
            if not self._nodes[node].depot:
                continue
            for held in _of(self._nodes[node].memory, key):
                for rank, part in held.ranks.items():
                    worth = (rank in held.hollow, held.replica)
                    if rank not in best or worth < best[rank][0]:
                        best[rank] = worth, node, part
        addresses = {node: self._address(node) for _, node, _ in best.values()}
        return Holders(
            ranks={rank: addresses[node] for rank, (_, node, _) in sorted(best.items())},
            parts={rank: part for rank, (_, _, part) in sorted(best.items())},
            hollow=sorted(rank for rank, (worth, _, _) in best.items() if worth[0]),
        )

    def newest(self, wall: float) -> Newest | None:
        """What would be loaded if all began anew now.

        Args:
            wall: the time; a set in memory is as old as it is known to be whole.
        """
        for key in sorted(self._sets, key=age_of, reverse=True):
            if self._is_stored(key):
                break
            if self._whole(key):
                one = self._sets[key]
                one.whole_at = wall if one.whole_at is None else one.whole_at
                return Newest(key[0], one.whole_at)
        return self.storage

    def only_in_memory(self) -> int:
        """Give the newest step that is kept, where nothing has ever gone to storage, nor can go.

        Returns:
            0 if storage has something, or a directory is known, or nothing is kept.
        """
        if self.stored is not None or self.storable or self._order is not None:
            return 0
        return max((key[0] for key in self._sets), default=0)

    @property
    def storage(self) -> Newest | None:
        """The newest that is in storage."""
        stored = self.stored
        return None if stored is None else Newest(stored.step, stored.at, stored.where)

    @property
    def trouble(self) -> str:
        """Why checkpoints are not what they should be; empty if they are."""
        if self.failing:
            return self.failing
        if not self._trouble:
            return ""
        node = min(self._trouble, key=id_key)
        more = len(self._trouble) - 1
        others = f" (and {more} more nodes have trouble)" if more else ""
        return f"{node}: {self._trouble[node]}{others}"

    # --- memory ---

    def _remember(self, node: NodeId, known: _Node, memory: list[Held]) -> None:
        before, after = _by_key(known.memory), _by_key(memory)
        known.memory = memory
        for key in before.keys() | after.keys():
            old, new = before.get(key, []), after.get(key, [])
            if old != new:
                self._swap(node, key, old, new)
        if after:
            self.in_use = True
        self._dirty |= bool(self._flagged or self._wish)

    def _swap(self, node: NodeId, key: Key, old: list[Held], new: list[Held]) -> None:
        """A node holds something else of a set than it did."""
        one = self._sets.get(key)
        if one is None:
            one = self._sets[key] = _Set(new[0].world)
            lap = self._laps.setdefault(key[1:], _Lap(new[0].world))
            lap.sets.add(key)
        before, after = _full(old), _full(new)
        for part in before - after:
            one.full[part].discard(node)
            if not one.full[part]:
                del one.full[part]
        for part in after - before:
            one.full.setdefault(part, set()).add(node)
        for held in new:
            one.told.update(held.ranks)
            one.parts.update(held.ranks.values())
            self._laps[key[1:]].learn(held)
        if any(held.persist for held in new):
            one.flagged.add(node)
            self._flagged.add(key)
            self.storable = True
        else:
            one.flagged.discard(node)
            if not one.flagged:
                self._flagged.discard(key)
        if new:
            one.nodes.add(node)
            return
        one.nodes.discard(node)
        if not one.nodes:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        del self._sets[key]
        self._flagged.discard(key)
        lap = self._laps[key[1:]]
        lap.sets.discard(key)
        if not lap.sets:
            del self._laps[key[1:]]

    def _whole(self, key: Key) -> bool:
        """Whether living nodes hold all of it."""
        one = self._sets[key]
        if len(one.told) >= one.world:
            # Only parts that were told are held: all, if they are as many.
            return len(one.full) == len(one.parts)
        parts = self._laps[key[1:]].all_parts()
        return bool(parts) and len(one.full) == len(parts) and one.full.keys() == parts

    def _look_of(self, node: NodeId) -> int:
        known = self._nodes.get(node)
        return -1 if known is None else known.looked

    def _looked(self, node: NodeId, number: float) -> None:
        """A node has looked at its memory, or never will."""
        if number >= self._round and node in self._unlooked:
            self._unlooked.discard(node)
            self._dirty = True
        wish = self._wish
        if wish is not None and number > wish.round and node in wish.waits:
            wish.waits.discard(node)
            self._dirty = True

    def _address(self, node: NodeId) -> Peer:
        known = self._nodes.get(node) or _Node()
        return Peer(node=node, addr=known.addr, port=known.depot)

    def _answer(self, now: float) -> None:
        if not self._questions:
            return
        due = [q for q in self._questions if self._due(q, now)]
        if due:
            found = self.candidates()
            self._out.answers += [(q.number, Candidates(candidates=found)) for q in due]
            self._questions = [q for q in self._questions if q not in due]
            if any(q.round == self._round for q in due):
                self._go_on_from(found)

    def _due(self, question: _Question, now: float) -> bool:
        known = question.round <= self._round and not (self._unlooked or self._unheard)
        # What is about to be in storage is looked for there next.
        known = known and not (self._order is not None and self._order.granted)
        return known or question.round < self._round or now >= question.until

    def _go_on_from(self, found: Sequence[Candidate]) -> None:
        """The round goes on from the best of these, or from storage. What turns up to be newer, and
        came before the round, is no part of its history: in storage it would be taken for that."""
        known = [age_of((c.step, c.round, c.lap)) for c in found[:1]]
        if self.stored is not None:
            known.append(_age_in_storage(self.stored))
        best = max(known, default=(-1, -1, -1))
        # One that was passed by a round which made nothing of it may be gone on from after all.
        kept = [(n, age) for n, age in self.passed if not (best[0] < n and best > age)]
        new = self._round, best
        self.passed = [*[one for one in kept if one != new][-PASSED_KEPT:], new]
        # A later master has nobody to learn it from: workers that run ask for nothing again.
        self._dirty = self._out.kept = True
        order = self._order
        if order is not None and not order.granted and self._is_passed(order.key):
            self._call_off("the round goes on without it")

    def _is_passed(self, key: Key) -> bool:
        age = age_of(key)
        return any(age[0] < number and age > best for number, best in self.passed)

    # --- storage ---

    def _see(self, stored: Stored) -> None:
        self.in_use = self.storable = True
        if self.stored is None or stored.number > self.stored.number:
            self.stored = stored
            self._out.kept = True
            self._dirty = True

    def _progressed(self, node: NodeId, report: AgentReport) -> None:
        order, told = self._order, report.persisting
        assert order is not None
        assert told is not None
        if told.attempt != order.attempt or node not in order.ranks:
            return
        if told.phase is PersistPhase.FAILED:
            self._failed(f"{node}: {told.why or 'its persister has failed'}")
        elif node != order.coordinator:
            if told.phase is PersistPhase.DONE and node not in order.done:
                order.done.add(node)
                self._out.tell.add(node)
        elif told.phase is PersistPhase.READY and not order.granted:
            order.granted = True
            self._out.tell.add(node)
        elif told.phase is PersistPhase.DONE and order.granted:
            if report.stored is not None and report.stored.step == order.key[0]:
                self.stored = report.stored  # numbers begin anew in another directory
            self._done(order)

    def _done(self, order: _Order) -> None:
        self.commits += 1
        self.failing = ""
        self._close(order)
        self._out.kept = True
        if (one := self._sets.get(order.key)) is not None:
            one.stored = True
        where = ""
        if self.stored is not None and self.stored.step == order.key[0]:
            where = f" ({self.stored.where})"
        message = f"step {order.key[0]} is in storage{where}"
        self._out.notes.append(Note("CheckpointStored", message))
        self._out.tell.update(order.ranks)
        wish = self._wish
        if wish is not None and not wish.waits:
            self._end_wish()

    def _failed(self, why: str) -> None:
        order = self._order
        assert order is not None
        self.failures += 1
        self.failing = f"step {order.key[0]} is not stored: {why}"[:1000]
        self._out.notes.append(Note("CheckpointFailed", self.failing, warning=True))
        self._out.tell.update(order.ranks)
        self._close(order)

    def _close(self, order: _Order) -> None:
        self._order = None
        self._dirty = True
        if (one := self._sets.get(order.key)) is not None:
            one.tried += 1

    def _call_off(self, why: str) -> None:
        """It is not written any more; it may be ordered again."""
        order, self._order = self._order, None
        assert order is not None
        message = f"step {order.key[0]} is not stored: {why}"
        self._out.notes.append(Note("CheckpointCalledOff", message))
        self._out.tell.update(order.ranks)
        self._dirty = True

    def _part_lost(self, node: NodeId, what: str) -> None:
        order = self._order
        if order is not None and node in order.ranks and node not in order.done:
            self._call_off(f"{node}, which writes a part of it, {what}")

    def _expire(self, now: float) -> None:
        order, wish = self._order, self._wish
        if order is not None and now >= order.until:
            self._failed(f"it took longer than {order.until - order.begun:g} s")
        if wish is not None and now >= wish.until:
            self._end_wish()
        elif wish is not None and wish.waits and now >= wish.settle_at:
            self._dirty = True

    def _end_wish(self) -> None:
        """Who has waited for it is told."""
        wish, self._wish = self._wish, None
        if wish is not None and wish.stay:
            self._out.tell.update(n for n, known in self._nodes.items() if known.memory)

    def _decide(self, now: float, wall: float, term: Term, persist_s: float) -> None:
        """Whether something is to be stored now."""
        wish = self._wish
        if wish is not None and (not wish.waits or now >= wish.settle_at):
            wish.waits.clear()
            newest = sorted(self._sets, key=age_of, reverse=True)
            key = next((k for k in newest if self._whole(k) and not self._is_passed(k)), None)
            if key is None or self._is_stored(key) or self._sets[key].tried >= TRIES:
                self._end_wish()
            elif self._order is None or (
                age_of(self._order.key) < age_of(key) and self._order.attempt != wish.attempt
            ):
                if self._order is not None:
                    self._call_off("a newer one is to be stored")
                wish.attempt = self._write(key, now, term, wish.until)
                words = f"step {key[0]} is stored now: {wish.why}"
                self._out.notes.append(Note("CheckpointOrdered", words))
                self._dirty = False
            return
        if self._order is not None:
            return
        for key in sorted(self._flagged, key=age_of, reverse=True):
            one = self._sets[key]
            if one.tried or self._is_stored(key) or self._is_passed(key):
                continue
            if self._whole(key):
                self._write(key, now, term, now + persist_s)
                return

    def _is_stored(self, key: Key) -> bool:
        """Whether it, or one that came later, is in storage."""
        there = self.stored
        later = there is not None and _age_in_storage(there) >= age_of(key)
        return later or self._sets[key].stored

    def _write(self, key: Key, now: float, term: Term, until: float) -> str:
        """Order it: each rank's slot is written by one node that has it, its own if that lives.

        Returns:
            the attempt.
        """
        one = self._sets[key]
        best: dict[int, tuple[tuple[bool, bool], NodeId]] = {}
        for node in sorted(one.nodes, key=id_key):
            for held in _of(self._nodes[node].memory, key):
                for rank in held.ranks:
                    worth = (rank in held.hollow, held.replica)
                    if rank not in best or worth < best[rank][0]:
                        best[rank] = worth, node
        ranks: dict[NodeId, list[int]] = {}
        for rank, (_, node) in sorted(best.items()):
            ranks.setdefault(node, []).append(rank)
        coordinator = best[min(best)][1]
        self._orders += 1
        seed = (self._nodes[coordinator].boot, term, self._orders, *key)
        attempt = hashlib.sha256(repr(seed).encode()).hexdigest()[:12]
        self._order = _Order(key, one.world, attempt, ranks, coordinator, now, until)
        self._out.tell.update(ranks)
        return attempt


def _age_in_storage(there: Stored) -> Age:
    return there.round, there.lap, there.step


def _by_key(memory: Iterable[Held]) -> dict[Key, list[Held]]:
    found: dict[Key, list[Held]] = {}
    for held in memory:
        found.setdefault((held.step, held.round, held.lap), []).append(held)
    return found


def _of(memory: Iterable[Held], key: Key) -> Iterator[Held]:
    return (held for held in memory if (held.step, held.round, held.lap) == key)


def _full(helds: Iterable[Held]) -> set[str]:
    """Parts of which not only what belongs to one rank is there."""
    return {part for h in helds for rank, part in h.ranks.items() if rank not in h.hollow}


# --- who keeps copies of whom ---


def peers(
    members: Sequence[tuple[NodeId, Topology]], old: Mapping[NodeId, NodeId]
) -> dict[NodeId, NodeId]:
    """By each member: the other one whose memory it keeps a copy of; each is kept once.

    As few share a host as can be, and most pairs stay: a changed one costs a whole copy.

    Args:
        members: in the order of their ranks; topology has the outermost (zone, rack, host) first.
        old: as it was.
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
        together = [
            _common(topology[k], topology[sources[(i + shift) % count]])
            for i, k in enumerate(keepers)
            if k != sources[(i + shift) % count]
        ]
        return count - len(together), sum(together)

    if count:
        # Sorted by place, a shift by the size of the largest place leads out of each of them.
        depth = max(len(place) for _, place in members)
        sizes = [_largest(keepers, topology, d) for d in range(1, depth + 1)]
        shift = min(dict.fromkeys([*sizes, count // 2, 1, 0]), key=cost)
        for index, keeper in enumerate(keepers):
            pairs[keeper] = sources[(index + shift) % count]
    _set_apart(pairs, topology, old)
    return pairs


def _set_apart(
    pairs: dict[NodeId, NodeId],
    topology: Mapping[NodeId, Topology],
    old: Mapping[NodeId, NodeId],
) -> None:
    """Swap sources until nobody keeps its own, and no more than must be are on one host."""
    hosts = Counter(place for place in topology.values() if place)
    # Of a host that has more than half of the nodes, not all find another one elsewhere.
    must = max(0, 2 * max(hosts.values(), default=0) - len(pairs))
    together = sum(not _apart(topology[k], topology[source]) for k, source in pairs.items())

    def weight(keeper: NodeId, source: NodeId) -> tuple[int, int, int, int]:
        one, other = topology[keeper], topology[source]
        changed = old.get(keeper) != source
        return keeper == source, not _apart(one, other), changed, _common(one, other)

    def gain(keeper: NodeId, other: NodeId) -> tuple[int, ...]:
        """Less is better."""
        now = zip(weight(keeper, pairs[keeper]), weight(other, pairs[other]), strict=True)
        then = zip(weight(keeper, pairs[other]), weight(other, pairs[keeper]), strict=True)
        return tuple(sum(b) - sum(a) for a, b in zip(now, then, strict=True))

    for selves in (True, False):
        for keeper in topology:
            source = pairs[keeper]
            shared = together > must and not _apart(topology[keeper], topology[source])
            if keeper == source or (shared and not selves):
                other = min((n for n in topology if n != keeper), key=partial(gain, keeper))
                together += gain(keeper, other)[1]
                pairs[keeper], pairs[other] = pairs[other], source


def _largest(nodes: Iterable[NodeId], topology: Mapping[NodeId, Topology], depth: int) -> int:
    sizes: dict[Topology, int] = {}
    for node in nodes:
        place = topology[node][:depth]
        sizes[place] = sizes.get(place, 0) + 1
    return max(sizes.values())


def _apart(one: Topology, other: Topology) -> bool:
    """Whether two nodes are on two hosts, as far as is known."""
    return not one or not other or one != other


def _common(one: Topology, other: Topology) -> int:
    """Levels that they share: none is best, and nothing is known of what has no topology."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
