"""Sources of a checkpoint: slots of this node's memory, slots of peers, files in storage."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dlrover_py.checkpoint import shm, transfer
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.checkpoint.shm import DamagedDataError, ShmSlot
from dlrover_py.protocol.agents import ReplicaLocation
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import CheckpointError, DLRoverError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import SlotHeader, TensorChunk
from dlrover_py.protocol.words import counted
from dlrover_py.trainer.object_codec import decode_object, unreadable

READ_ERRORS = (DLRoverError, OSError, RuntimeError, ValueError, EOFError)
"""Exceptions that reading a source may raise: the next source that has the bytes is tried."""

ChunkBounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets of a tensor chunk in its tensor, and its shape."""


class RestoreSource(NamedTuple):
    """A candidate for a load: one checkpoint, in memory or in storage or in both."""

    step: Step
    """The training step at which it was saved."""
    round: Round
    """The round of the rendezvous in which it was saved."""
    timeline: Timeline
    """Its timeline within the round: it grows with each ``load()``."""
    world: int
    """World size of the job that saved it."""
    job: str
    """The uid of the job that saved it; empty if that is unknown or does not matter."""
    memory: bool
    """True if the memory of nodes has it."""
    folder: str
    """The name of its folder in storage; empty if it is not there."""

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's identity."""
        return CheckpointId(round=self.round, timeline=self.timeline, step=self.step)

    def __str__(self) -> str:
        where = " and ".join(["memory"] * self.memory + [self.folder] * bool(self.folder))
        ranks = counted(self.world, "rank")
        return f"step {self.step} in {where} (round {self.round}.{self.timeline}, {ranks})"


class Source(Protocol):
    """A place that has tensor chunks of a checkpoint. Several threads may read it at the same
    time."""

    kind: str
    """The kind of the source: memory, peer or storage."""
    where: str
    """The place, in words, for messages."""

    def read(self, file: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of the source. The caller must check that they are right.

        Args:
            file: the name of a file in the source; empty for a slot.
            position: the offset in bytes at which to begin.
            target: the memory to be filled.
        """


class TensorLocation(NamedTuple):
    """The position of a tensor chunk's bytes in a source."""

    source: Source
    """The source that has the bytes."""
    file: str
    """The name of the file in the source; empty for a slot."""
    position: int
    """Offset of the first byte, in bytes."""
    xxh3: int | None
    """XXH3 digest of the bytes. None: there is no digest (torch's own files)."""


class Catalog:
    """The tensor chunks and objects of one candidate, and the places where each can be read."""

    def __init__(self) -> None:
        self.chunks: dict[str, dict[ChunkBounds, tuple[TensorChunk, list[TensorLocation]]]] = {}
        self.objects: dict[str, list[Callable[[], bytes]]] = {}
        self.more: Callable[[], bool] = lambda: False
        """Looks at the next sources, and adds what they have. False: there are no more sources."""
        self.foreign = False
        """True if torch wrote the checkpoint itself: nothing in it says how values are nested."""
        self.rebuild: Callable[[str], tuple[object, list[str]] | None] = lambda key: None
        """Rebuilds an object that torch's own checkpoints split into several keys. Returns the
        object and these keys, or None if there is no such object."""

    def add(self, chunk: TensorChunk, place: TensorLocation | None) -> None:
        """Note a place that has a tensor chunk. None: note only that the chunk exists."""
        chunks = self.chunks.setdefault(chunk.key, {})
        _, locations = chunks.setdefault((chunk.at, chunk.shape), (chunk, []))
        if place is not None:
            locations.append(place)

    def add_object(self, key: str, read: Callable[[], bytes]) -> None:
        """Note a place from which an object's bytes can be read."""
        self.objects.setdefault(key, []).append(read)

    def any_chunk(self, key: str) -> TensorChunk:
        """Return any tensor chunk of a key: all have the same dtype and global shape."""
        return next(iter(self.chunks[key].values()))[0]

    def same(self, key: str, other: str) -> bool:
        """Return whether two tensors are known to have had the same value when they were saved.

        False also means that this is not known.
        """
        one, two = self._digests(key), self._digests(other)
        return one is not None and one == two

    def _digests(self, key: str) -> dict[object, set[int | None]] | None:
        """Return the digests of a tensor's chunks, by type and bounds; None if one is unknown."""
        found: dict[object, set[int | None]] = {
            (chunk.dtype, chunk.whole, bounds): {place.xxh3 for place in places}
            for bounds, (chunk, places) in self.chunks.get(key, {}).items()
        }
        known = set[int | None]().union(*found.values())
        return found if known and None not in known else None

    def keys_under(self, prefix: str) -> list[str]:
        """Return the keys of tensors, then those of objects, that begin with the prefix."""
        return [key for key in (*self.chunks, *self.objects) if key.startswith(prefix)]

    def value(self, key: str) -> object:
        """Read an object from the first known place that has it intact.

        Raises:
            CheckpointError: the object can be read from none of its places.
        """
        why = ""
        for read in self.objects[key]:
            try:
                return decode_object(read())
            except Exception as error:  # noqa: BLE001  torch.load raises what a damaged file leads to
                why = unreadable(error)
        raise CheckpointError(f"{key} cannot be read: {why}")

    def find(self, key: str) -> tuple[object, list[str]] | None:
        """Return an object and the keys from which it was built; None if it is not there.

        Raises:
            CheckpointError: the object is there, but no known place has it intact.
        """
        return (self.value(key), [key]) if key in self.objects else self.rebuild(key)

    def gaps(self, keys: Iterable[str]) -> list[str]:
        """Return those of the keys of which parts are in no source that is known."""
        found = []
        for key in keys:
            chunks = self.chunks[key].values()
            there = sum(prod(chunk.shape) for chunk, locations in chunks if locations)
            if there < prod(self.any_chunk(key).whole):
                found.append(key)
        return found


# --- Kinds of sources ---


class MemorySource:
    """A slot in this node's shared memory, locked against writers until the slot is closed.

    Raises:
        DamagedDataError: a writer fills the slot, or the slot holds no complete and intact
            snapshot.
    """

    kind = "memory"

    def __init__(self, slot: ShmSlot) -> None:
        self._slot = slot
        self.where = f"this node's memory ({slot.path.name})"
        if not slot.lock(shared=True):
            raise DamagedDataError(f"{slot.path}: it is being filled")
        self.contents = shm.contents(slot)

    def read(self, file: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of the slot. The caller must check that they are right.

        Args:
            file: not used: a slot has no files.
            position: the offset in bytes at which to begin.
            target: the memory to be filled.

        Raises:
            DamagedDataError: the slot is shorter than expected.
        """
        done = 0
        while done < len(target):
            count = os.preadv(self._slot.fd, [target[done:]], position + done)
            if not count:
                raise DamagedDataError(f"{self._slot.path}: it ends at {position + done}")
            done += count


class PeerSource:
    """A slot in another node's shared memory, read through the transfer server of that node.

    The constructor reads the header and the tables of the slot. It fails as
    :meth:`~dlrover_py.checkpoint.transfer.TransferConnection.contents` does.

    Args:
        connection: the connection to the transfer server.
        name: the name of the slot.
        write_id: that of the header of the slot, which is new each time the slot is filled.
        lock: held while the connection is used. All sources of one connection share it.
    """

    kind = "peer"

    def __init__(
        self,
        connection: transfer.TransferConnection,
        name: str,
        write_id: str,
        lock: threading.Lock,
    ) -> None:
        self.link, self.name, self.write_id, self.turn = connection, name, write_id, lock
        self.where = f"{name} of the {connection.where}"
        with lock:
            self.contents = connection.contents(name, write_id)

    def read(self, file: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of the peer's slot. The caller must check that they are right.

        A DamagedDataError is raised if the slot was filled again, and a TransientError if the
        connection broke.

        Args:
            file: not used: a slot has no files.
            position: the offset in bytes at which to begin.
            target: the memory to be filled.
        """
        with self.turn:
            self.link.read_into(self.name, self.write_id, position, target, pin=True)


class StorageSource:
    """A checkpoint in storage that DLRover-Py has written."""

    kind = "storage"

    def __init__(self, store: CheckpointDirectory, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self.where = store.where(manifest)

    def read(self, file: str, position: int, target: memoryview) -> None:
        """Fill the target with bytes of a file. The caller must check that they are right.

        An OSError is raised if the file cannot be read or ends too early.

        Args:
            file: the name of the file.
            position: the offset in bytes at which to begin.
            target: the memory to be filled.
        """
        self._store.read_into(self._manifest, file, position, target)


def _add_contents(catalog: Catalog, source: "MemorySource | PeerSource") -> None:
    """Add what a slot has to the catalog.

    A replica may have only the private chunks of a rank. Its other chunks are only noted to exist.
    """
    contents = source.contents
    for (chunk, position), xxh3 in zip(contents.layout, contents.digests, strict=True):
        there = chunk.private or not contents.header.private_only
        catalog.add(chunk, TensorLocation(source, "", position, xxh3) if there else None)
    for key, value in contents.objects.items():
        catalog.add_object(key, lambda value=value: value)  # type: ignore[misc]


def _add_manifest(catalog: Catalog, store: CheckpointDirectory, manifest: Manifest) -> None:
    """Add what a checkpoint in storage has to the catalog."""
    source = StorageSource(store, manifest)
    for written in manifest.chunks:
        catalog.add(
            written.chunk, TensorLocation(source, written.file, written.position, written.xxh3)
        )
    for entry in manifest.objects:

        def read(entry: Any = entry) -> bytes:
            data = bytes(store.read_all(manifest, entry.file, entry.position, entry.nbytes))
            if shm.digest(data) != entry.xxh3:
                raise DamagedDataError(
                    f"{source.where}: {entry.key} is damaged: its checksum differs"
                )
            return data

        catalog.add_object(entry.key, read)


class OpenCandidate:
    """A candidate and its catalog, at one rank. Sources are looked at one by one, as they are
    needed.

    Args:
        found: the candidate.
        rank: the rank of this process.
        pool: the directory of this node's shared-memory pool, if there is one.
        agent: the connection to this node's transfer server, if there is one.
        manifest: returns the directory and the manifest of a folder in storage; None if it is not
            there.
        log: receives warnings about sources that cannot be used.
    """

    def __init__(
        self,
        found: RestoreSource,
        *,
        rank: int,
        pool: Path | None,
        agent: transfer.TransferConnection | None,
        manifest: Callable[[str], tuple[CheckpointDirectory, Manifest] | None],
        log: logging.Logger,
    ) -> None:
        self.found = found
        self.catalog = Catalog()
        self.catalog.more = self.more
        self._rank, self._pool, self._agent, self._log = rank, pool, agent, log
        self._manifest = manifest
        self._open = ExitStack()
        self._shard_groups: set[str] = set()
        """The shard groups whose bytes are in the catalog."""
        self._ranks: set[int] = set()
        """The ranks whose private tensor chunks are in the catalog."""
        self._stored = False
        self.whole = False
        """True once all parts of the checkpoint are known: a key that is missing then does not
        exist."""
        self._steps = iter(self._load_in_order())

    def more(self) -> bool:
        """Add the next sources to the catalog. Return False if there are no more.

        True does not mean that they had anything: a source that cannot be used is logged and
        skipped. The order is this node's memory, peers, storage. An error of storage is raised.
        """
        return next(self._steps, None) is not None

    def load_from_storage(self) -> bool:
        """Look at storage now, before any other source. Return False if it has nothing more.

        Storage is looked at only once, unless that failed: its error is raised. The manifest is
        read, but no tensor.
        """
        held = None if self._stored or not self.found.folder else self._manifest(self.found.folder)
        self._stored = True
        if held is None:
            return False
        _add_manifest(self.catalog, *held)
        self.whole = True
        return True

    def close(self) -> None:
        """Release all slots and connections."""
        self._open.close()

    def _load_in_order(self) -> Iterator[str]:
        """Look at one source after the other: this node's memory, peers, storage."""
        if self.found.memory:
            self._add_own_slots()
            yield "own memory"
            if self._agent is not None:
                yield from self._add_peers(self._agent)
        if self.load_from_storage():
            yield "storage"

    def _matches(self, header: SlotHeader) -> bool:
        """Return whether a slot belongs to this candidate."""
        return header.id == self.found.id and self.found.job in ("", header.job)

    def _add_own_slots(self) -> None:
        """Add the slots of this node, this rank's own first.

        Each is locked against writers until `close`. One that cannot be used is logged and skipped.
        Nothing is done without a shared-memory pool. The candidate is then known to be `whole` if
        each of its ranks has a slot here.
        """
        if self._pool is None:
            return
        seen = [(path, s) for path, s in shm.scan(self._pool) if self._matches(s)]
        for path, _ in sorted(seen, key=lambda item: (item[1].rank != self._rank, item[0])):
            try:
                slot = self._open.enter_context(ShmSlot(path))
                source = MemorySource(slot)
                header = source.contents.header
                if not self._matches(header):
                    continue
            except READ_ERRORS as error:
                self._log.warning("checkpoint in %s is not used: %s", path, error)
                continue
            _add_contents(self.catalog, source)
            if not header.private_only:
                self._shard_groups.add(header.part)
            self._ranks.add(header.rank)
        self.whole = self._ranks >= set(range(self.found.world))

    def _add_peers(self, agent: transfer.TransferConnection) -> Iterator[str]:
        """Add the slots of other nodes: first of those that are needed, then of all others.

        Nothing is added if the agent cannot say which nodes have slots; a warning is logged. A node
        that cannot be reached is logged and skipped. The first part decides whether the candidate
        is `whole`: the shard groups of all known slots must have been added.

        Yields:
            ``peers`` after the first part, then the name of each other node that was asked.
        """
        try:
            holders = agent.locations(self.found.id)
        except READ_ERRORS as error:
            self._log.warning("it is not known which peers have a checkpoint: %s", error)
            return
        asked: set[tuple[str, int]] = set()
        for all_others in (False, True):
            while True:
                holder = next(
                    (
                        h
                        for h in holders
                        if (h.addr, h.port) not in asked
                        and (
                            not h.private_only
                            if all_others
                            else self._lacks(h.rank, h.part, h.private_only)
                        )
                    ),
                    None,
                )
                if holder is None:
                    break
                asked.add((holder.addr, holder.port))
                try:
                    self._add_peer_slots(agent, holder)
                except READ_ERRORS as error:
                    where = f"{holder.node} ({holder.addr}:{holder.port})"
                    self._log.warning("checkpoint of %s is not used: %s", where, error)
                if all_others:
                    yield holder.node
            if not all_others:
                self.whole = bool(holders) and {h.part for h in holders} <= self._shard_groups
                yield "peers"

    def _lacks(self, rank: int, part: str, private_only: bool) -> bool:
        """Return whether a slot has something that the catalog lacks."""
        own = rank == self._rank and rank not in self._ranks
        return own or (not private_only and part not in self._shard_groups)

    def _add_peer_slots(self, agent: transfer.TransferConnection, holder: ReplicaLocation) -> None:
        """Add the slots of a peer that are needed, or all its slots if none is needed.

        The connection stays open until `close`. Only headers and tables are read.
        """
        connection = agent.connect(holder.addr, holder.port)
        self._open.callback(connection.close)
        lock = threading.Lock()
        there = [(name, s) for name, s in connection.slots() if self._matches(s)]
        needed = [(n, s) for n, s in there if self._lacks(s.rank, s.part, s.private_only)]
        for name, header in needed or there:
            _add_contents(self.catalog, PeerSource(connection, name, header.write_id, lock))
            if not header.private_only:
                self._shard_groups.add(header.part)
            self._ranks.add(header.rank)
