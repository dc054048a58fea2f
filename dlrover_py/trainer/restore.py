"""From the newest checkpoint that can be had, into a user's state.

Each rank collects who has what of a candidate: slots of its own node's memory, those of peers, the
files in storage. The boxes that it needs are cut out of the boxes that there are by
torch.distributed.checkpoint's planner, so that any sharding is loaded into any other; bytes go
straight into the user's tensors where they can, and each piece's XXH3 is compared. A piece that is
damaged or gone is read from the next one who has it.

All ranks agree twice on each candidate: that everything can be had, before a byte is copied, and
that everything was right, before anything but tensors is touched.
"""

import ctypes
import io
import logging
import os
import pickle  # noqa: TID251  torch's own metadata are one
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from dlrover_py import arena, depot
from dlrover_py.arena import Damaged, Slot
from dlrover_py.protocol.checkpoint import Manifest, Piece, is_private, private_key
from dlrover_py.protocol.errors import CheckpointError, DLRoverError, TransientError
from dlrover_py.storage import Store
from dlrover_py.trainer.state import Leaf, Targets, decode_object, leaf_of, targets

CHUNK = 1 << 20
"""Bytes that are read and summed at once: what is summed is still in the cache."""
THREADS = 2
"""That read and sum; the GIL is held for neither."""
ASK_S = 120.0
"""The agent is asked so long for what memory holds, if its master is away."""
AGAIN_S = 0.5

_TROUBLE = (DLRoverError, OSError, RuntimeError, ValueError, EOFError)
"""What reading may raise: the next one who has the bytes is tried."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and its shape."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded."""

    step: int
    round: int
    lap: int
    world: int
    """Ranks of those who saved it."""
    where: str
    """In words: whose memory, or which folder."""
    folder: str = ""
    """Name of the checkpoint in storage, if it exists there: retention must spare it."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors that this rank has read, by kind of source: memory, peer, storage."""
    missing: tuple[str, ...] = ()
    """Keys of the state that the checkpoint does not have: these values are as they were."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that the state has no place for."""


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


class _Memory:
    """A slot of this node's arena, locked against writers until it is closed."""

    kind = "memory"

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.where = f"this node's memory ({slot.path.name})"
        if not slot.lock(shared=True):
            raise Damaged(f"{slot.path}: it is being filled")
        self.contents = arena.contents(slot)

    def read(self, file: str, position: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._slot.fd, [target[done:]], position + done)
            if not count:
                raise Damaged(f"{self._slot.path}: it ends at {position + done}")
            done += count


class _Peer:
    """A slot in another node's arena, through that node's depot."""

    kind = "peer"

    def __init__(self, link: depot.Link, name: str, fill: str, turn: threading.Lock) -> None:
        self.link, self.name, self.fill, self.turn = link, name, fill, turn
        self.where = f"{name} of the {link.where}"
        with turn:
            self.contents = link.contents(name, fill)

    def read(self, file: str, position: int, target: memoryview) -> None:
        with self.turn:
            self.link.read_into(self.name, self.fill, position, target, pin=True)


class _Stored:
    """A checkpoint of ours in storage."""

    kind = "storage"

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self.where = store.where(manifest)

    def read(self, file: str, position: int, target: memoryview) -> None:
        self._store.read_into(self._manifest, file, position, target)


def _add_contents(catalog: Catalog, source: "_Memory | _Peer") -> None:
    """Note what a slot has."""
    contents = source.contents
    for (piece, position), xxh3 in zip(contents.layout, contents.digests, strict=True):
        there = piece.private or not contents.summary.hollow
        catalog.add(piece, Place(source, "", position, xxh3) if there else None)
    for key, value in contents.objects.items():
        catalog.add_object(key, lambda value=value: value)  # type: ignore[misc]


def _add_manifest(catalog: Catalog, store: Store, manifest: Manifest) -> None:
    """Note what storage has."""
    source = _Stored(store, manifest)
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


class _Candidate:
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
        self._rank, self._arena, self._agent, self._log = rank, arena, agent, log
        self._manifest = manifest
        self._open = ExitStack()
        self._parts: set[str] = set()
        """Whose bytes are in the catalog."""
        self._ranks: set[int] = set()
        """Whose private pieces are."""
        self.whole = False
        """All parts of the set are known, so that a key that is missing does not exist."""
        self._stages = iter(self._look())

    def more(self) -> bool:
        """Look at the next sources; False: there are none."""
        return next(self._stages, None) is not None

    def close(self) -> None:
        """Let go of slots and connections."""
        self._open.close()

    def report(self, key: str, where: str, why: str) -> None:
        """Tell of a piece that could not be read where it was looked for."""
        self._log.warning("checkpoint_piece", extra={"key": key, "where": where, "why": why})

    def _look(self) -> Iterator[str]:
        if self.found.memory:
            self._own()
            yield "own memory"
            if self._agent is not None:
                yield from self._peers(self._agent)
        if self.found.folder:
            held = self._manifest(self.found.folder)
            if held is not None:
                _add_manifest(self.catalog, *held)
                self.whole = True
                yield "storage"

    def _is_it(self, step: int, round: int, lap: int, job: str) -> bool:
        wanted = (self.found.step, self.found.round, self.found.lap)
        return (step, round, lap) == wanted and self.found.job in ("", job)

    def _own(self) -> None:
        """Slots of this node, this rank's own first."""
        if self._arena is None:
            return
        seen = [
            (path, s)
            for path, s in arena.scan(self._arena)
            if self._is_it(s.step, s.round, s.lap, s.job)
        ]
        for path, _ in sorted(seen, key=lambda item: (item[1].rank != self._rank, item[0])):
            try:
                slot = self._open.enter_context(Slot(path))
                source = _Memory(slot)
                summary = source.contents.summary
                if not self._is_it(summary.step, summary.round, summary.lap, summary.job):
                    continue
            except _TROUBLE as error:
                self._log.warning(
                    "checkpoint_source", extra={"where": str(path), "why": str(error)}
                )
                continue
            _add_contents(self.catalog, source)
            if not summary.hollow:
                self._parts.add(summary.part)
            self._ranks.add(summary.rank)
        self.whole = self._ranks >= set(range(self.found.world))

    def _peers(self, agent: depot.Link) -> Iterator[str]:
        """Depots of other nodes: first those that are needed, then all others."""
        try:
            holders = agent.holders(self.found.step, self.found.round, self.found.lap)
        except _TROUBLE as error:
            self._log.warning("checkpoint_holders", extra={"why": str(error)})
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
                except _TROUBLE as error:
                    where = f"{holder.node} ({holder.addr}:{holder.port})"
                    why = {"where": where, "why": str(error)}
                    self._log.warning("checkpoint_source", extra=why)
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
        there = [
            (name, s) for name, s in link.slots() if self._is_it(s.step, s.round, s.lap, s.job)
        ]
        needed = [(n, s) for n, s in there if self._lacks(s.rank, s.part, s.hollow)]
        for name, summary in needed or there:
            _add_contents(self.catalog, _Peer(link, name, summary.fill, turn))
            if not summary.hollow:
                self._parts.add(summary.part)
            self._ranks.add(summary.rank)


# --- what goes where ---


class KeysDiffer(CheckpointError):
    """The state is another one than that which was saved; nothing was changed."""


@dataclass
class _Fit:
    """How a catalog is put into a state."""

    leaves: list[Leaf]
    objects: list[tuple[str, Callable[[object], None], Callable[[], object]]]
    """Key, what sets it, what reads it."""
    missing: list[str]
    unexpected: list[str]
    wrong: list[str]
    private: list[str]
    """Of this rank alone, and not there: left as they are."""


def _fit(target: Targets, catalog: Catalog, rank: int) -> _Fit:
    """Compare the keys, and find each its place; allocates optimizers' state, copies nothing."""
    fit = _Fit([], [], [], [], [], [])
    used: set[str] = set()
    own = private_key(rank, "")
    for leaf in target.leaves:
        key = leaf.piece.key
        if key not in catalog.boxes:
            (fit.private if leaf.piece.private else fit.missing).append(key)
            continue
        used.add(key)
        saved = catalog.piece(key)
        if saved.whole != leaf.piece.whole:
            fit.wrong.append(f"{key} has the shape {saved.whole}, and {leaf.piece.whole} here")
        fit.leaves.append(leaf)
    for key, put in target.put.items():
        _fit_object(fit, catalog, used, key, put)
    for optimizer in target.optimizers:
        by_number = {str(number): name for name, number in optimizer.known.items()}
        for number in range(optimizer.group_count):
            key = f"{optimizer.groups}.{number}"

            def put_group(value: Any, o: Any = optimizer, n: int = number) -> None:
                o.put_group(n, value)

            _fit_object(fit, catalog, used, key, put_group)
        start = len(optimizer.prefix)
        for key in [
            k for k in (*catalog.boxes, *catalog.objects) if k.startswith(optimizer.prefix)
        ]:
            name, _, entry = key[start:].rpartition(".")
            if name not in optimizer.known:
                name = by_number.get(name, name)
            if name not in optimizer.known:
                continue
            used.add(key)
            if name not in optimizer.owned:
                continue
            if key in catalog.boxes:
                piece = catalog.piece(key)
                dtype = getattr(torch, piece.dtype)
                tensor = optimizer.allocate(name, entry, dtype, piece.whole)
                if (leaf_at := leaf_of(key, tensor)) is not None:
                    fit.leaves.append(leaf_at)
            else:

                def put_entry(v: object, o: Any = optimizer, n: str = name, e: str = entry) -> None:
                    o.put(n, e, v)

                _fit_object(fit, catalog, used, key, put_entry)
    for key in (*catalog.boxes, *catalog.objects):
        if key in used or (is_private(key) and not key.startswith(own)):
            continue
        grown = target.grown(key) if key in catalog.objects else None
        if grown is not None:
            _fit_object(fit, catalog, used, key, grown)
        elif not is_private(key):
            fit.unexpected.append(key)
    return fit


def _fit_object(
    fit: _Fit, catalog: Catalog, used: set[str], key: str, put: Callable[[object], None]
) -> None:
    places = catalog.objects.get(key)
    if places is not None:
        used.add(key)
        fit.objects.append((key, put, lambda: _first(key, places)))
        return
    rebuilt = catalog.rebuild(key)
    if rebuilt is not None:
        value, keys = rebuilt
        used.update(keys)
        fit.objects.append((key, put, lambda: value))
        return
    (fit.private if is_private(key) else fit.missing).append(key)


def _first(key: str, places: Sequence[Callable[[], bytes]]) -> object:
    """Read an object from the first that has it.

    Raises:
        CheckpointError: none has.
    """
    why = ""
    for read in places:
        try:
            return decode_object(read())
        except Exception as error:  # noqa: BLE001  torch.load raises what a damaged file leads to
            why = str(error).strip().partition("\n")[0]
    raise CheckpointError(f"{key} cannot be read: {why}")


def _compare(fit: _Fit, *, strict: bool) -> None:
    """Refuse a state that is another one.

    Raises:
        KeysDiffer: says which keys.
    """
    words = []
    if fit.wrong:
        words.append("shapes differ: " + _some(fit.wrong))
    if strict and fit.missing:
        words.append("the checkpoint does not have " + _some(fit.missing))
    if strict and fit.unexpected:
        words.append("the state has no place for " + _some(fit.unexpected))
    if words:
        hint = "" if fit.wrong else "; strict=False loads what both have"
        raise KeysDiffer("; ".join(words) + hint)


def _some(keys: Sequence[str], limit: int = 8) -> str:
    more = len(keys) - limit
    return ", ".join(sorted(keys)[:limit]) + (f" and {more} more" if more > 0 else "")


# --- copying ---


class _Planner(LoadPlanner):  # type: ignore[misc]
    """Cuts the boxes that are needed out of those that there are, as DefaultLoadPlanner does.

    (torch/distributed/checkpoint/default_planner.py: create_default_local_load_plan.)
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = {leaf.piece.key: leaf for leaf in leaves}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, leaf in self.leaves.items():
            wanted = ChunkStorageMetadata(
                offsets=torch.Size(leaf.piece.at), sizes=torch.Size(leaf.piece.shape)
            )
            if 0 not in leaf.piece.shape:
                saved = self.metadata.state_dict_metadata[key]
                items += create_read_items_for_chunk_list(key, saved, [wanted])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("objects are read without a plan")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found = self.leaves[read_item.dest_index.fqn].tensor
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            if size != found.shape[dim]:
                found = found.narrow(dim, start, size)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


@dataclass(slots=True)
class _Job:
    """A part of a piece that goes into a part of a tensor."""

    piece: Piece
    places: list[Place]
    tried: int
    target: torch.Tensor
    offsets: Sequence[int]
    lengths: Sequence[int]
    why: str = ""

    def direct(self) -> bool:
        """Whether the piece's bytes are the target's as they are."""
        return (
            self.target.device.type == "cpu"
            and tuple(self.lengths) == self.piece.shape
            and self.target.is_contiguous()
            and self.target.dtype == getattr(torch, self.piece.dtype)
        )


class _Reader(dcp.StorageReader):  # type: ignore[misc]
    """Gives DCP the boxes of a catalog, and copies what its plan says."""

    def __init__(self, candidate: "_Candidate | _Foreign", keys: Iterable[str]) -> None:
        self._candidate = candidate
        self._keys = list(keys)
        self.nbytes: dict[str, int] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        catalog = self._candidate.catalog
        tensors: dict[str, TensorStorageMetadata] = {}
        for key in self._keys:
            piece = catalog.piece(key)
            boxes = [
                ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(shape))
                for (at, shape), (_, places) in catalog.boxes[key].items()
                if places
            ]
            properties = TensorProperties(dtype=getattr(torch, piece.dtype))
            tensors[key] = TensorStorageMetadata(properties, torch.Size(piece.whole), boxes)
        return Metadata(state_dict_metadata=tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        jobs = []
        boxes = self._candidate.catalog.boxes
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            key, index = item.storage_index.fqn, item.storage_index.index
            chunk = self._metadata.state_dict_metadata[key].chunks[index]
            piece, places = boxes[key][tuple(chunk.offsets), tuple(chunk.sizes)]
            target = planner.resolve_tensor(item)
            jobs.append(_Job(piece, places, 0, target, item.storage_offsets, item.lengths))
        self.run(jobs)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def run(self, jobs: list["_Job"]) -> None:
        """Read all of it, wherever it can be had.

        Raises:
            CheckpointError: something can be had nowhere.
        """
        jobs.sort(key=lambda job: job.piece.nbytes, reverse=True)
        with ThreadPoolExecutor(THREADS, "dlrover-restore") as pool:
            while jobs:
                jobs = self._round(jobs, pool)

    def _round(self, jobs: list[_Job], pool: ThreadPoolExecutor) -> list[_Job]:
        """Try each once; returns those that have to be tried elsewhere.

        Raises:
            CheckpointError: one of them can be had nowhere else.
        """
        while any(job.tried >= len(job.places) for job in jobs):
            if not self._candidate.more():
                job = next(job for job in jobs if job.tried >= len(job.places))
                raise CheckpointError(f"{job.piece.key}: {job.why}; nobody else has it")
        waves: dict[int, list[_Job]] = {}
        others: list[_Job] = []
        for job in jobs:
            source = job.places[job.tried].source
            if isinstance(source, _Peer) and job.direct():
                waves.setdefault(id(source), []).append(job)
            else:
                others.append(job)
        turns = iter(others)  # a thread takes the next when it is done: the largest come first
        results = [pool.submit(_wave, wave) for wave in waves.values()]
        results += [pool.submit(_attempts, turns) for _ in range(THREADS)]
        for result in results:
            result.result()
        for job in jobs:
            if not job.why:
                kind = job.places[job.tried].source.kind
                self.nbytes[kind] = self.nbytes.get(kind, 0) + job.target.nbytes
        failed = [job for job in jobs if job.why]
        for job in failed:
            place = job.places[job.tried]
            self._candidate.report(job.piece.key, place.source.where, job.why)
            job.tried += 1
        return failed


def _attempts(jobs: Iterator[_Job]) -> None:
    """Take one after the other, as other threads do; the GIL keeps the iterator whole."""
    for job in jobs:
        _attempt(job)


def _attempt(job: _Job) -> None:
    """Read a piece from where it is its turn; ``why`` says what is wrong, if anything is."""
    place = job.places[job.tried]
    job.why = ""
    try:
        if isinstance(place.source, _Torch):
            place.source.copy(place, job)
        elif job.direct():
            _fill(place, _bytes_of(job.target))
        else:
            scratch = torch.empty(job.piece.shape, dtype=getattr(torch, job.piece.dtype))
            _fill(place, _bytes_of(scratch))
            _cut(scratch, job)
    except _TROUBLE as error:
        job.why = str(error) or type(error).__name__


def _cut(source: torch.Tensor, job: _Job) -> None:
    """Copy the part that is wanted."""
    for dim, (start, size) in enumerate(zip(job.offsets, job.lengths, strict=True)):
        source = source.narrow(dim, start, size)
    with torch.no_grad():
        job.target.copy_(source)


def _fill(place: Place, target: memoryview) -> None:
    """Read a piece, and compare.

    Raises:
        Damaged: the bytes are not those that were saved.
    """
    sums = xxhash.xxh3_64()
    step = CHUNK if place.source.kind == "memory" else max(CHUNK, len(target))
    for start in range(0, len(target), step):
        part = target[start : start + step]
        place.source.read(place.file, place.position + start, part)
        sums.update(part)
    if sums.intdigest() != place.xxh3:
        raise Damaged(f"{place.source.where}: the bytes are not those that were saved")


def _wave(jobs: list[_Job]) -> None:
    """Read many pieces from one peer, without waiting for one before the next is asked for."""
    source = jobs[0].places[jobs[0].tried].source
    assert isinstance(source, _Peer)
    wanted = []
    for job in jobs:
        job.why = "it did not come"
        wanted.append((job.places[job.tried].position, _bytes_of(job.target)))
    try:
        with source.turn:
            arrived = source.link.read_all(source.name, source.fill, wanted, pin=True)
            for job, data in zip(jobs, arrived, strict=True):
                good = arena.digest(data) == job.places[job.tried].xxh3
                job.why = "" if good else "the bytes are not those that were saved"
    except _TROUBLE as error:
        for job in jobs:
            job.why = job.why and str(error)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, writable."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _copy(
    candidate: "_Candidate | _Foreign", fit: _Fit
) -> tuple[list[tuple[Any, object]], dict[str, int]]:
    """Copy all tensors, and read all objects; returns these with what sets them.

    Raises:
        CheckpointError: something cannot be had, or is damaged wherever it is.
    """
    boxes = candidate.catalog.boxes
    jobs: list[_Job] = []
    cut: list[Leaf] = []
    for leaf in fit.leaves:
        piece, places = boxes[leaf.piece.key].get((leaf.piece.at, leaf.piece.shape), (None, []))
        if piece is not None and places:  # the same box was saved: nothing is to be planned
            at = (0,) * len(piece.shape)
            jobs.append(_Job(piece, places, 0, leaf.tensor, at, piece.shape))
        else:
            cut.append(leaf)
    reader = _Reader(candidate, {leaf.piece.key for leaf in cut})
    reader.run(jobs)
    if cut:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no_dist is set, which is meant
            dcp.load({}, storage_reader=reader, planner=_Planner(cut), no_dist=True)
    return [(put, read()) for _, put, read in fit.objects], reader.nbytes


# --- all ranks together ---


def load(
    state: Mapping[str, object],
    *,
    rank: int,
    world: int,
    arena: Path | None,
    agent: depot.Link | None,
    store: Store | None,
    strict: bool = True,
    log: logging.Logger,
    round: int = 0,
    job: str = "",
) -> Loaded | None:
    """Fill the state from the newest checkpoint that all ranks can have; collective.

    Args:
        state: as :func:`dlrover_py.trainer.state.flatten` takes it; filled in place.
        rank, world: of this process among those that load.
        arena: this node's folder of slots.
        agent: this node's depot; without one, memory is what the arena has.
        store: where checkpoints are persisted.
        strict: keys that only one side has are an error.
        log: told of what was tried.
        round: that has been agreed on: its nodes' memory is asked for.
        job: the job's uid: slots of others are left alone. Empty: whatever the arena has.

    Returns:
        What was loaded; None if there is no checkpoint. Nothing was changed then.

    Raises:
        KeysDiffer: the newest checkpoint is of another state; nothing was changed.
        CheckpointError: there are checkpoints, and none could be read, or the storage could not be
            looked at. The state may be a mixture if the error says so.
    """
    ranks = _Ranks(rank, world)
    manifests: dict[str, Manifest] = {}
    refused: Exception | None = None
    found: list[Found] = []
    claimed, blind = False, ""
    try:
        targets(state, rank=rank)
        if rank == 0:
            found, claimed, blind = _candidates(arena, agent, store, manifests, round, job, log)
    except DLRoverError as error:
        refused = error
    found, claimed, blind = ranks.hear((found, claimed, blind))
    _same(ranks, refused, "the state cannot be loaded")
    if not found and blind:
        raise CheckpointError(f"{blind}; so nobody knows whether there is a checkpoint: try again")

    def manifest(folder: str) -> tuple[Store, Manifest] | None:
        if store is not None and folder not in manifests:
            manifests.update((m.folder, m) for m in store.checkpoints())
        return (store, manifests[folder]) if store is not None and folder in manifests else None

    tried: list[str] = []
    spoiled = False
    for one in found:
        candidate = _Candidate(one, rank=rank, arena=arena, agent=agent, manifest=manifest, log=log)
        try:
            loaded, why, touched = _try(state, candidate, ranks, strict=strict, log=log)
        finally:
            candidate.close()
        if loaded is not None:
            return loaded
        spoiled = spoiled or touched
        log.warning("checkpoint_skipped", extra={"candidate": str(one), "why": why})
        tried.append(f"{one}: {why}")
    if tried and (spoiled or claimed):
        words = "no checkpoint could be loaded; tried " + "; ".join(tried)
        if spoiled:
            words += ". Tensors of the state have been written: do not train on with them"
        raise CheckpointError(words)
    return None


def _try(
    state: Mapping[str, object],
    candidate: _Candidate,
    ranks: "_Ranks",
    *,
    strict: bool,
    log: logging.Logger,
) -> tuple[Loaded | None, str, bool]:
    """One candidate: what was loaded, or why not, and whether tensors have been written."""
    target = targets(state, rank=ranks.rank)
    fit: _Fit | None = None
    differs: KeysDiffer | None = None
    why = ""
    try:
        fit = _ready(candidate, target, ranks.rank)
        _compare(fit, strict=strict)
    except KeysDiffer as error:
        differs = KeysDiffer(f"{candidate.found} is of another state: {error}")
    except _TROUBLE as error:
        why = str(error) or type(error).__name__
    _same(ranks, differs, "", KeysDiffer)
    if why := ranks.first(why):
        return None, why, False
    assert fit is not None
    values: list[tuple[Any, object]] = []
    nbytes: dict[str, int] = {}
    try:
        values, nbytes = _copy(candidate, fit)
    except _TROUBLE as error:
        why = str(error) or type(error).__name__
    if why := ranks.first(why):
        return None, why, True
    return _finish(candidate.found, target, fit, values, nbytes, log), "", True


def _finish(
    found: Found,
    target: Targets,
    fit: _Fit,
    values: list[tuple[Any, object]],
    nbytes: dict[str, int],
    log: logging.Logger,
) -> Loaded:
    """All tensors are right, everywhere: set the rest."""
    with torch.no_grad():
        for put, value in values:
            put(value)
        for optimizer in target.optimizers:
            optimizer.finish()
        target.finish()
    if fit.private:
        log.warning("checkpoint_private", extra={"left": _some(fit.private)})
    if fit.missing or fit.unexpected:
        keys = {"missing": _some(fit.missing), "unexpected": _some(fit.unexpected)}
        log.warning("checkpoint_keys", extra=keys)
    kinds = {"memory": "its own memory", "peer": "peers' memory", "storage": "storage"}
    where = ", ".join(kinds[kind] for kind in kinds if nbytes.get(kind)) or (
        "memory" if found.memory else "storage"
    )
    return Loaded(
        found.step,
        found.round,
        found.lap,
        found.world,
        where,
        found.folder,
        nbytes,
        tuple(sorted((*fit.missing, *fit.private))),
        tuple(sorted(fit.unexpected)),
    )


def _ready(candidate: _Candidate, target: Targets, rank: int) -> _Fit:
    """Look at sources until all that is needed can be had.

    Raises:
        CheckpointError: it cannot; says what is nowhere.
    """
    while not candidate.whole and candidate.more():
        pass
    if not candidate.whole:
        raise CheckpointError("not all of its parts can be had here")
    while True:
        fit = _fit(target, candidate.catalog, rank)
        gaps = candidate.catalog.gaps(
            leaf.piece.key for leaf in fit.leaves if 0 not in leaf.piece.shape
        )
        if not gaps:
            return fit
        if not candidate.more():
            raise CheckpointError(f"parts of {_some(gaps)} are nowhere")


def _candidates(
    arena_: Path | None,
    agent: depot.Link | None,
    store: Store | None,
    manifests: dict[str, Manifest],
    round: int,
    job: str,
    log: logging.Logger,
) -> tuple[list[Found], bool, str]:
    """What there is, newest first; whether somebody vouches for it; why that is not all."""
    blind = ""
    memory: list[Found] = []
    claimed = False
    if agent is not None:
        try:
            rows = _asked(lambda: agent.candidates(round))
            memory = [Found(r.step, r.round, r.lap, r.world, job, True, "") for r in rows]
            claimed = bool(memory)
        except _TROUBLE as error:
            blind = f"the agent was asked what memory holds: {error}"
    elif arena_ is not None:
        seen = {
            Found(s.step, s.round, s.lap, s.world, s.job, True, "")
            for _, s in arena.scan(arena_)
            if job in ("", s.job)
        }
        memory = sorted(seen, reverse=True)
    stored: list[Found] = []
    if store is not None:
        try:
            for m in store.checkpoints():
                manifests[m.folder] = m
                stored.append(Found(m.step, m.round, m.lap, m.world, m.job, False, m.folder))
            claimed = claimed or bool(stored)
        except _TROUBLE as error:
            blind = f"the storage was asked for its checkpoints: {error}"
    if blind:
        log.warning("checkpoint_blind", extra={"why": blind})
    return merge(memory, stored, job), claimed, blind


def merge(memory: Sequence[Found], stored: Sequence[Found], job: str) -> list[Found]:
    """Both lists in one, newest first; a set that is in both is one candidate.

    Args:
        memory: newest first.
        stored: the newest commit first.
        job: ours. Rounds and laps of one job tell what came later, for a script may go back to an
            earlier step; of another job nothing is newer than what our memory holds.
    """
    merged: list[Found] = []
    rest = list(stored)
    for one in memory:
        while rest:
            other = rest[0]
            ours = other.job == one.job
            same = (other.step, other.round, other.lap) == (one.step, one.round, one.lap) and ours
            if same:
                break
            if ours and job:
                newer = (other.round, other.lap, other.step) > (one.round, one.lap, one.step)
            else:
                newer = not job and other.step > one.step
            if not newer:
                break
            merged.append(rest.pop(0))
        twin = next(
            (
                o
                for o in rest
                if (o.step, o.round, o.lap, o.job) == (one.step, one.round, one.lap, one.job)
            ),
            None,
        )
        if twin is not None:
            rest.remove(twin)
            one = one._replace(folder=twin.folder)
        merged.append(one)
    return merged + rest


def _asked(ask: Callable[[], list[Any]]) -> list[Any]:
    """Ask again as long as the answer is that one should."""
    deadline = time.monotonic() + ASK_S
    while True:
        try:
            return ask()
        except TransientError:
            if time.monotonic() > deadline:
                raise
        threading.Event().wait(AGAIN_S)


class _Ranks:
    """The processes that load together."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        if world > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"load() is for all {world} ranks together: call "
                "torch.distributed.init_process_group before it"
            )

    def hear(self, said: Any) -> Any:
        """What rank 0 says."""
        box = [said]
        if self.world > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def all(self, said: str) -> list[str]:
        """What each says, by rank."""
        answers: list[Any] = [said] * self.world
        if self.world > 1:
            dist.all_gather_object(answers, said)
        return answers

    def first(self, why: str) -> str:
        """What is wrong, at the first rank where something is; empty if nothing is anywhere."""
        for rank, words in enumerate(self.all(why)):
            if words:
                return words if self.world == 1 else f"rank {rank}: {words}"
        return ""


def _same(
    ranks: _Ranks,
    error: Exception | None,
    words: str,
    kind: type[CheckpointError] = CheckpointError,
) -> None:
    """Raise on all ranks if one has to.

    Raises:
        CheckpointError: of the kind, or this rank's own error.
    """
    first = ranks.first(str(error) if error is not None else "")
    if error is not None:
        raise error
    if first:
        raise kind(f"{words}: {first}" if words else first)


# --- checkpoints that torch has written ---


class _Torch:
    """A folder of torch.distributed.checkpoint: each piece is a file of torch.save within one."""

    kind = "storage"

    def __init__(self, fs: Any, folder: str) -> None:
        self._fs, self.where = fs, folder
        self.lengths: dict[tuple[str, int], int] = {}

    def entry(self, info: Any) -> Place:
        """Where an entry is.

        Raises:
            CheckpointError: it is not stored as it is.
        """
        file = str(info.relative_path)
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.where}/{file} is compressed: expected it as it is")
        if "/" in file or file.startswith("."):
            raise CheckpointError(f"{self.where}: {file!r} is no file of a checkpoint")
        self.lengths[file, info.offset] = info.length
        return Place(self, file, info.offset, None)

    def load(self, place: Place) -> bytes:
        """The bytes of an entry."""
        length = self.lengths[place.file, place.position]
        end = place.position + length
        data = bytes(self._fs.cat_file(f"{self.where}/{place.file}", place.position, end))
        if len(data) != length:
            raise CheckpointError(f"{self.where}/{place.file} ends before byte {end}")
        return data

    def copy(self, place: Place, job: _Job) -> None:
        """Read a piece, and copy what is wanted of it."""
        found = decode_object(self.load(place))
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != job.piece.shape:
            raise CheckpointError(f"{self.where}/{place.file}: {job.piece.key} is not there")
        _cut(found, job)

    def read(self, file: str, position: int, target: memoryview) -> None:
        raise NotImplementedError("pieces are read as torch.load does: copy()")


class _Foreign:
    """The one candidate in a folder of torch's."""

    def __init__(self, catalog: Catalog, log: logging.Logger) -> None:
        self.catalog, self._log = catalog, log

    def more(self) -> bool:
        """There are no other sources."""
        return False

    def report(self, key: str, where: str, why: str) -> None:
        """Tell of a piece that could not be read."""
        self._log.warning("checkpoint_piece", extra={"key": key, "where": where, "why": why})


def load_dcp(
    state: Mapping[str, object],
    url: str | Path,
    *,
    rank: int,
    world: int,
    strict: bool = True,
    log: logging.Logger,
) -> None:
    """Fill the state from a folder that torch's ``dcp.save`` has written; collective.

    The state's keys are compared with those of ``dcp.save({...})`` of the same modules' and
    optimizers' ``state_dict()``, or ``get_state_dict()``. ``.metadata`` is a pickle: only torch's
    own classes are made of it, and objects are read with ``weights_only=True``.

    Args:
        state, rank, world, strict, log: as for :func:`load`.
        url: a path, or an address that fsspec knows.

    Raises:
        KeysDiffer: the checkpoint is of another state; nothing was changed.
        CheckpointError: it cannot be read.
    """
    ranks = _Ranks(rank, world)
    found = Found(0, 0, 0, world, "", False, str(url))
    error: CheckpointError | None = None
    fit: _Fit | None = None
    try:
        target = targets(state, rank=rank)
        catalog = _foreign(str(url))
        fit = _fit(target, catalog, rank)
        _compare(fit, strict=strict)
        gaps = catalog.gaps(leaf.piece.key for leaf in fit.leaves if 0 not in leaf.piece.shape)
        if gaps:
            raise CheckpointError(f"parts of {_some(gaps)} are not there")
    except KeysDiffer as differs:
        error = KeysDiffer(f"{url} is of another state: {differs}")
    except _TROUBLE as trouble:
        error = CheckpointError(f"{url} cannot be read: {trouble}")
    _same(ranks, error, "", type(error) if error is not None else CheckpointError)
    assert fit is not None
    values: list[tuple[Any, object]] = []
    nbytes: dict[str, int] = {}
    try:
        values, nbytes = _copy(_Foreign(catalog, log), fit)
    except _TROUBLE as trouble:
        error = CheckpointError(
            f"{url} cannot be read: {trouble}. Tensors of the state have been written: do not "
            "train on with them"
        )
    _same(ranks, error, "")
    _finish(found, target, fit, values, nbytes, log)


def _foreign(url: str) -> Catalog:
    """The catalog of a folder of torch's.

    Raises:
        CheckpointError: its metadata are not what torch writes.
    """
    fs, folder = fsspec.core.url_to_fs(url)
    source = _Torch(fs, folder.rstrip("/"))
    metadata = _Unpickler(io.BytesIO(fs.cat_file(f"{source.where}/.metadata"))).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("its .metadata is not that of a checkpoint of torch's")
    catalog = Catalog()
    paths: dict[str, tuple[str | int, ...]] = {}
    for key, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            place = source.entry(metadata.storage_data[MetadataIndex(key)])
            catalog.add_object(key, partial(source.load, place))
            paths[key] = tuple((metadata.planner_data or {}).get(key, key.split(".")))
            continue
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        for box in saved.chunks:
            piece = Piece(key, dtype, tuple(box.sizes), tuple(saved.size), tuple(box.offsets))
            info = metadata.storage_data.get(MetadataIndex(key, box.offsets))
            catalog.add(piece, source.entry(info) if info is not None else None)
    catalog.rebuild = partial(_rebuild, catalog, paths)
    return catalog


def _rebuild(
    catalog: Catalog, paths: Mapping[str, tuple[str | int, ...]], key: str
) -> tuple[object, list[str]] | None:
    """Put together what DCP has taken apart: ``optim.param_groups.0`` from ``….0.lr`` etc."""
    keys = [other for other in paths if other.startswith(f"{key}.")]
    if not keys:
        return None
    root: dict[str | int, Any] = {}
    depth = next(
        n for n in range(len(paths[keys[0]]) + 1) if ".".join(map(str, paths[keys[0]][:n])) == key
    )
    for other in keys:
        holder = root
        *inner, last = paths[other][depth:]
        for name in inner:
            holder = holder.setdefault(name, {})
        holder[last] = _first(other, catalog.objects[other])
    return _listed(root), keys


def _listed(value: Any) -> Any:
    """Mappings by number are lists, as DCP's paths have it."""
    if not isinstance(value, dict):
        return value
    items = {name: _listed(item) for name, item in value.items()}
    if items and all(isinstance(name, int) for name in items):
        return [items[name] for name in sorted(items)]
    return items


_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what ``.metadata`` consists of."""

    def find_class(self, module: str, name: str) -> Any:
        """Look a class up.

        Raises:
            CheckpointError: it has no place in metadata.
        """
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(found, torch.dtype | torch.layout):
            return super().find_class(module, name)
        raise CheckpointError(f"its .metadata names {module}.{name}: expected torch's metadata")
