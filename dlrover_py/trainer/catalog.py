"""Who has what of a checkpoint: slots of this node's memory, those of peers, files in storage."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dlrover_py import arena, depot
from dlrover_py.arena import Damaged, Slot
from dlrover_py.protocol.checkpoint import Id, Manifest, Piece, Summary
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.storage import Store

TROUBLE = (DLRoverError, OSError, RuntimeError, ValueError, EOFError)
"""What reading may raise: the next one who has the bytes is tried."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and its shape."""


class Found(NamedTuple):
    """A candidate: one set, in memory or in storage or both."""

    step: int
    round: int
    lap: int
    world: int
    job: str
    memory: bool
    folder: str
    """In storage; empty if it is not there."""

    @property
    def id(self) -> Id:
        """Which set it is."""
        return self.step, self.round, self.lap

    def __str__(self) -> str:
        where = " and ".join(["memory"] * self.memory + [self.folder] * bool(self.folder))
        return f"step {self.step} in {where} (round {self.round}.{self.lap}, {self.world} ranks)"


class Source(Protocol):
    """One who has pieces of a checkpoint, and can be read by several threads."""

    kind: str
    """memory, peer or storage."""
    where: str

    def read(self, file: str, position: int, target: memoryview) -> None:
        """Fill the target; that the bytes are right is the caller's to find out."""


class Place(NamedTuple):
    """Where a piece's bytes are."""

    source: Source
    file: str
    position: int
    xxh3: int | None
    """None: nobody has summed it (torch's own files)."""


class Catalog:
    """Who has what of one candidate."""

    def __init__(self) -> None:
        self.boxes: dict[str, dict[Box, tuple[Piece, list[Place]]]] = {}
        self.objects: dict[str, list[Callable[[], bytes]]] = {}
        self.more: Callable[[], bool] = lambda: False
        """Looks at the next sources; False: there are none."""
        self.foreign = False
        """It is not one of ours: nothing in it says how values are nested."""
        self.rebuild: Callable[[str], tuple[object, list[str]] | None] = lambda key: None
        """Puts an object together that torch's own checkpoints take apart: its keys, too."""

    def add(self, piece: Piece, place: Place | None) -> None:
        """Note a place; None: only that there is such a piece."""
        boxes = self.boxes.setdefault(piece.key, {})
        _, places = boxes.setdefault((piece.at, piece.shape), (piece, []))
        if place is not None:
            places.append(place)

    def add_object(self, key: str, read: Callable[[], bytes]) -> None:
        """Note where an object's bytes are."""
        self.objects.setdefault(key, []).append(read)

    def piece(self, key: str) -> Piece:
        """Any of a key's pieces: they have dtype and whole shape in common."""
        return next(iter(self.boxes[key].values()))[0]

    def gaps(self, keys: Iterable[str]) -> list[str]:
        """Keys of which parts are nowhere to be had."""
        found = []
        for key in keys:
            boxes = self.boxes[key].values()
            there = sum(prod(piece.shape) for piece, places in boxes if places)
            if there < prod(self.piece(key).whole):
                found.append(key)
        return found


# --- sources ---


class Memory:
    """A slot of this node's arena, locked against writers until it is closed."""

    kind = "memory"

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.where = f"this node's memory ({slot.path.name})"
        if not slot.lock(shared=True):
            raise Damaged(f"{slot.path}: it is being filled")
        self.contents = arena.contents(slot)

    def read(self, file: str, position: int, target: memoryview) -> None:
        """As :class:`Source` says."""
        done = 0
        while done < len(target):
            count = os.preadv(self._slot.fd, [target[done:]], position + done)
            if not count:
                raise Damaged(f"{self._slot.path}: it ends at {position + done}")
            done += count


class Peer:
    """A slot in another node's arena, through that node's depot."""

    kind = "peer"

    def __init__(self, link: depot.Link, name: str, fill: str, turn: threading.Lock) -> None:
        self.link, self.name, self.fill, self.turn = link, name, fill, turn
        self.where = f"{name} of the {link.where}"
        with turn:
            self.contents = link.contents(name, fill)

    def read(self, file: str, position: int, target: memoryview) -> None:
        """As :class:`Source` says."""
        with self.turn:
            self.link.read_into(self.name, self.fill, position, target, pin=True)


class Stored:
    """A checkpoint of ours in storage."""

    kind = "storage"

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self.where = store.where(manifest)

    def read(self, file: str, position: int, target: memoryview) -> None:
        """As :class:`Source` says."""
        self._store.read_into(self._manifest, file, position, target)


def _add_contents(catalog: Catalog, source: "Memory | Peer") -> None:
    """Note what a slot has."""
    contents = source.contents
    for (piece, position), xxh3 in zip(contents.layout, contents.digests, strict=True):
        there = piece.private or not contents.summary.hollow
        catalog.add(piece, Place(source, "", position, xxh3) if there else None)
    for key, value in contents.objects.items():
        catalog.add_object(key, lambda value=value: value)  # type: ignore[misc]


def _add_manifest(catalog: Catalog, store: Store, manifest: Manifest) -> None:
    """Note what storage has."""
    source = Stored(store, manifest)
    for written in manifest.pieces:
        catalog.add(written.piece, Place(source, written.file, written.position, written.xxh3))
    for entry in manifest.objects:

        def read(entry: Any = entry) -> bytes:
            data = bytearray(entry.nbytes)
            source.read(entry.file, entry.position, memoryview(data))
            if arena.digest(bytes(data)) != entry.xxh3:
                raise Damaged(f"{source.where}: {entry.key} is not what was written")
            return bytes(data)

        catalog.add_object(entry.key, read)


class Candidate:
    """One candidate as this rank sees it; sources are looked at one by one, as they are needed."""

    def __init__(
        self,
        found: Found,
        *,
        rank: int,
        arena: Path | None,
        agent: depot.Link | None,
        manifest: Callable[[str], tuple[Store, Manifest] | None],
        log: logging.Logger,
    ) -> None:
        self.found = found
        self.catalog = Catalog()
        self.catalog.more = self.more
        self._rank, self._arena, self._agent, self._log = rank, arena, agent, log
        self._manifest = manifest
        self._open = ExitStack()
        self._parts: set[str] = set()
        """Whose bytes are in the catalog."""
        self._ranks: set[int] = set()
        """Whose private pieces are."""
        self._stored = False
        self.whole = False
        """All parts of the set are known, so that a key that is missing does not exist."""
        self._stages = iter(self._look())

    def more(self) -> bool:
        """Look at the next sources; False: there are none."""
        return next(self._stages, None) is not None

    def look_in_storage(self) -> bool:
        """Look there, whatever is to be looked at before; False: it has nothing more."""
        held = None if self._stored or not self.found.folder else self._manifest(self.found.folder)
        self._stored = True
        if held is None:
            return False
        _add_manifest(self.catalog, *held)
        self.whole = True
        return True

    def close(self) -> None:
        """Let go of slots and connections."""
        self._open.close()

    def _look(self) -> Iterator[str]:
        if self.found.memory:
            self._own()
            yield "own memory"
            if self._agent is not None:
                yield from self._peers(self._agent)
        if self.look_in_storage():
            yield "storage"

    def _is_it(self, summary: Summary) -> bool:
        return summary.id == self.found.id and self.found.job in ("", summary.job)

    def _own(self) -> None:
        """Slots of this node, this rank's own first."""
        if self._arena is None:
            return
        seen = [(path, s) for path, s in arena.scan(self._arena) if self._is_it(s)]
        for path, _ in sorted(seen, key=lambda item: (item[1].rank != self._rank, item[0])):
            try:
                slot = self._open.enter_context(Slot(path))
                source = Memory(slot)
                summary = source.contents.summary
                if not self._is_it(summary):
                    continue
            except TROUBLE as error:
                self._log.warning("checkpoint in %s is not used: %s", path, error)
                continue
            _add_contents(self.catalog, source)
            if not summary.hollow:
                self._parts.add(summary.part)
            self._ranks.add(summary.rank)
        self.whole = self._ranks >= set(range(self.found.world))

    def _peers(self, agent: depot.Link) -> Iterator[str]:
        """Depots of other nodes: first those that are needed, then all others."""
        try:
            holders = agent.holders(*self.found.id)
        except TROUBLE as error:
            self._log.warning("it is not known which peers have a checkpoint: %s", error)
            return
        asked: set[tuple[str, int]] = set()
        for spare in (False, True):
            while True:
                holder = next(
                    (
                        h
                        for h in holders
                        if (h.addr, h.port) not in asked
                        and (not h.hollow if spare else self._lacks(h.rank, h.part, h.hollow))
                    ),
                    None,
                )
                if holder is None:
                    break
                asked.add((holder.addr, holder.port))
                try:
                    self._node(agent, holder)
                except TROUBLE as error:
                    where = f"{holder.node} ({holder.addr}:{holder.port})"
                    self._log.warning("checkpoint of %s is not used: %s", where, error)
                if spare:
                    yield holder.node
            if not spare:
                self.whole = bool(holders) and {h.part for h in holders} <= self._parts
                yield "peers"

    def _lacks(self, rank: int, part: str, hollow: bool) -> bool:
        own = rank == self._rank and rank not in self._ranks
        return own or (not hollow and part not in self._parts)

    def _node(self, agent: depot.Link, holder: depot.Holder) -> None:
        """Note what a peer has, if it is needed, or all of it if nothing of it is."""
        link = agent.connect(holder.addr, holder.port)
        self._open.callback(link.close)
        turn = threading.Lock()
        there = [(name, s) for name, s in link.slots() if self._is_it(s)]
        needed = [(n, s) for n, s in there if self._lacks(s.rank, s.part, s.hollow)]
        for name, summary in needed or there:
            _add_contents(self.catalog, Peer(link, name, summary.fill, turn))
            if not summary.hollow:
                self._parts.add(summary.part)
            self._ranks.add(summary.rank)
