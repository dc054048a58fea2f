"""The persister: one process for each node, which writes staged checkpoints to storage.

``python -m dlrover_py.persist`` reads orders from standard input and answers on standard output
(:mod:`dlrover_py.protocol.checkpoint`, one JSON document a line). It ends with its input or at an
empty line, calling off what is under way, and with the thread that has started it
(PR_SET_PDEATHSIG): start it from one that stays. The nodes that write a checkpoint meet in its
folder, and nowhere else::

    parts/<node>.layout.json   which slots a node has: boxes, digests          each writer
    parts/plan.json            who writes which box                            the coordinator
    __<rank>_0.distcp          torch DCP's files, a ``torch.save`` zip a tensor  each writer
    parts/<node>.done.json     where each box is; the files are synced         each writer
    .metadata                  torch DCP's index                               the coordinator

then, once that is granted, the manifest (:mod:`dlrover_py.storage`). Bytes that are not those that
were staged are never part of a checkpoint: they are summed on their way out, and compared.

The files follow torch/distributed/checkpoint/filesystem.py of torch 2.6 to 2.13.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.storage import WriteResult

from dlrover_py import telemetry
from dlrover_py.arena import Contents, Damaged, Slot, contents, scan
from dlrover_py.processes import signal_at_parents_end
from dlrover_py.protocol.checkpoint import (
    Answer,
    Cancel,
    Grant,
    Manifest,
    Order,
    Owner,
    Phase,
    Piece,
    Written,
    WrittenObject,
    read_line,
)
from dlrover_py.protocol.errors import DLRoverError, Superseded
from dlrover_py.storage import BEAT_S, PARTS, Claimed, Sink, Store, folder_of

log = logging.getLogger("persister")

NICE = 10
PAUSE_S = (0.01, 2.0)
"""Between two looks for what others write: the first, and the longest."""
CHUNK = 1 << 22
"""Bytes that are summed and then written at once: few, so that they are still in the cache."""
SMALL = 1 << 16
"""Shorter writes are put together."""
METADATA = ".metadata"

T = TypeVar("T")


# --- the plan ---


@dataclass(frozen=True, slots=True)
class Share:
    """What one slot offers, or has to write: the part of a node's layout that is about it."""

    rank: int
    hollow: bool
    """Only what belongs to its rank alone is in it."""
    metric: float | None
    pieces: tuple[Piece, ...]
    digests: tuple[int, ...]
    objects: tuple[tuple[str, int, int], ...]
    """Key, bytes, XXH3."""

    @classmethod
    def of(cls, found: Contents, sums: Mapping[str, int]) -> "Share":
        """What a slot offers."""
        hollow = found.summary.hollow
        rows = [
            (piece, xxh3)
            for piece, xxh3 in zip(found.layout.pieces, found.digests, strict=True)
            if piece.private or not hollow
        ]
        return cls(
            rank=found.summary.rank,
            hollow=hollow,
            metric=found.summary.metric,
            pieces=tuple(piece for piece, _ in rows),
            digests=tuple(xxh3 for _, xxh3 in rows),
            objects=tuple((key, len(value), sums[key]) for key, value in found.objects.items()),
        )

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        rows = [[p.key, p.dtype, p.shape, p.whole, p.at] for p in self.pieces]
        return {
            "rank": self.rank,
            "hollow": self.hollow,
            "metric": self.metric,
            "pieces": rows,
            "digests": self.digests,
            "objects": self.objects,
        }

    @classmethod
    def decode(cls, values: dict[str, Any]) -> "Share":
        """From JSON."""
        return cls(
            rank=values["rank"],
            hollow=values["hollow"],
            metric=values["metric"],
            pieces=tuple(
                Piece(k, d, tuple(s), tuple(w), tuple(a)) for k, d, s, w, a in values["pieces"]
            ),
            digests=tuple(values["digests"]),
            objects=tuple((key, nbytes, xxh3) for key, nbytes, xxh3 in values["objects"]),
        )


class NotWhole(DLRoverError):
    """The slots that were named do not hold a whole checkpoint together."""


@dataclass(slots=True)
class Plan:
    """Who writes what: indices into the pieces of a node's share of a rank, and objects' keys."""

    pieces: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    objects: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps({"pieces": self.pieces, "objects": self.objects}).encode()

    @classmethod
    def decode(cls, document: bytes) -> "Plan":
        """From JSON."""
        values = json.loads(document)
        pieces, objects = (
            {node: {int(rank): rows for rank, rows in ranks.items()} for node, ranks in x.items()}
            for x in (values["pieces"], values["objects"])
        )
        return cls(pieces, objects)


def make_plan(layouts: Mapping[str, Iterable[Share]]) -> Plan:
    """Have each box written once, and nodes and ranks write about as many bytes as each other.

    Copies of a box whose digests differ are legal (buffers that each rank of DDP updates by
    itself): the lowest rank's is taken, as DDP does, and the plan's notes tell of it.

    Args:
        layouts: the shares of each node.

    Raises:
        NotWhole: parts of a tensor are in none of them; says of which.
    """
    plan = Plan()
    holders: dict[tuple[Any, ...], list[tuple[int, str, int, int]]] = {}
    boxes: dict[tuple[Any, ...], Piece] = {}
    objects: dict[str, list[tuple[int, str, int]]] = {}
    done: set[int] = set()
    for node, shares in layouts.items():
        plan.pieces[node], plan.objects[node] = {}, {}
        for share in shares:
            if share.rank in done:  # a replica beside the original
                continue
            done.add(share.rank)
            plan.pieces[node][share.rank], plan.objects[node][share.rank] = [], []
            for index, (piece, xxh3) in enumerate(zip(share.pieces, share.digests, strict=True)):
                boxes.setdefault(piece.box, piece)
                holders.setdefault(piece.box, []).append((share.rank, node, index, xxh3))
            for key, _, xxh3 in share.objects:
                objects.setdefault(key, []).append((share.rank, node, xxh3))
    load: dict[str, int] = dict.fromkeys(plan.pieces, 0)
    rank_load: dict[int, int] = dict.fromkeys(done, 0)
    unequal: list[str] = []
    chosen = _needed(boxes.values())
    for piece in sorted(chosen, key=lambda p: (-p.nbytes, p.key, p.at)):
        copies = holders[piece.box]
        if len({xxh3 for *_, xxh3 in copies}) > 1:
            unequal.append(piece.key)
            rank, node, index, _ = min(copies)
        else:
            rank, node, index, _ = min(copies, key=lambda c: (load[c[1]], rank_load[c[0]], c[0]))
        load[node] += piece.nbytes
        rank_load[rank] += piece.nbytes
        plan.pieces[node][rank].append(index)
    for key, found in objects.items():
        if len({xxh3 for *_, xxh3 in found}) > 1:
            unequal.append(key)
        rank, node, _ = min(found)
        plan.objects[node][rank].append(key)
    for ranks in plan.pieces.values():
        for rows in ranks.values():
            rows.sort()  # as they lie in the slot
    if unequal:
        more = f" and {len(unequal) - 3} more" if len(unequal) > 3 else ""
        words = f"ranks hold different values of {', '.join(sorted(unequal)[:3])}{more}"
        plan.notes.append(f"{words}: the lowest rank's are kept")
    return plan


def _needed(boxes: Iterable[Piece]) -> Iterator[Piece]:
    """The boxes that make whole tensors.

    Raises:
        NotWhole: some do not.
    """
    by_key: dict[str, list[Piece]] = {}
    for piece in boxes:
        by_key.setdefault(piece.key, []).append(piece)
    for key, pieces in by_key.items():
        if len({(p.dtype, p.whole) for p in pieces}) > 1:
            kinds = ", ".join(sorted({f"{p.dtype}{list(p.whole)}" for p in pieces}))
            raise NotWhole(f"{key}: ranks disagree on what it is: {kinds}")
        whole = pieces[0].whole
        complete = [p for p in pieces if p.shape == whole]
        if complete:
            yield complete[0]
            continue
        has, wants = sum(prod(p.shape) for p in pieces), prod(whole)
        if has != wants:
            raise NotWhole(
                f"{key}: the slots hold {has} of its {wants} elements: expected each rank's shard "
                "once; is a rank missing, or is it sharded differently by some?"
            )
        yield from pieces


# --- files ---


class _Stream:
    """What ``torch.save`` writes a tensor's zip into: finds the raw bytes in it, and sums them.

    It never raises: a C++ writer that calls it would end the process. `error` says what happened.
    """

    def __init__(self, sink: Sink, stopped: Callable[[], bool]) -> None:
        self._sink, self._stopped = sink, stopped
        self.position = 0
        """Of the next byte, in the file."""
        self.error: Exception | None = None
        self.whole = xxhash.xxh3_64()
        """Of all bytes of the file that were handed on."""
        self._small = bytearray()
        self._extra = 0
        self._nbytes = 0
        self.payload = -1
        """Where the raw bytes of the present tensor begin."""
        self._sums = xxhash.xxh3_64()

    def begin(self, nbytes: int) -> None:
        """The next tensor, of so many raw bytes."""
        self.payload, self._nbytes, self._sums = -1, nbytes, xxhash.xxh3_64()

    @property
    def xxh3(self) -> int:
        """Of the raw bytes that were written."""
        return self._sums.intdigest()

    def write(self, data: Any) -> int:
        """Called by torch, with memory that is only there during the call."""
        data = memoryview(data).cast("B")
        size = len(data)
        if self.error is not None:
            return size
        if self.payload < 0:
            # A local header of a zip: 30 bytes, the name, then "extra", by which torch aligns.
            if size == 30 and data[:4] == b"PK\3\4":
                self._extra = int.from_bytes(data[28:30], "little")
            elif size < 64 and bytes(data).endswith(b"/data/0"):
                self.payload = self.position + size + self._extra
        try:
            self._put(data)
        except Exception as error:  # noqa: BLE001  told by who has called torch.save
            self.error = error
        return size

    def _put(self, data: memoryview) -> None:
        start = self.payload
        inside = 0 <= start <= self.position < start + self._nbytes
        if len(data) < SMALL:
            if inside:
                self._sums.update(data)
            self._small += data
            self.position += len(data)
            if len(self._small) >= CHUNK:
                self.flush_small()
            return
        self.flush_small()
        for at in range(0, len(data), CHUNK):
            if self._stopped():
                raise Stopped
            chunk = data[at : at + CHUNK]
            if inside:
                self._sums.update(chunk)
            self.whole.update(chunk)
            self._sink.write(chunk)
            self.position += len(chunk)

    def flush_small(self) -> None:
        """Hand on what was put together."""
        if self._small:
            self.whole.update(self._small)
            self._sink.write(memoryview(self._small))
            self._small = bytearray()

    def flush(self) -> None:
        """Called by torch at the end of a zip."""

    def raw(self, data: bytes) -> int:
        """Write an object's bytes; where they begin."""
        at = self.position
        self._put(memoryview(data))
        return at


def _tensor(slot: Slot, piece: Piece, at: int) -> torch.Tensor:
    """A piece as torch has it; its storage is no larger than the piece."""
    dtype = getattr(torch, piece.dtype)
    if not piece.nbytes:
        return torch.empty(piece.shape, dtype=dtype)
    flat = torch.frombuffer(slot.view(), dtype=dtype, count=prod(piece.shape), offset=at)
    return flat.reshape(piece.shape)


def metadata(manifest: Manifest, extents: Mapping[tuple[Any, ...], tuple[int, int]]) -> bytes:
    """Torch DCP's ``.metadata`` of a checkpoint.

    Args:
        manifest: which pieces and objects there are, and in which files.
        extents: position and length of each tensor's zip, by the piece's box.
    """
    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    results: list[WriteResult] = []
    for written in manifest.pieces:
        piece = written.piece
        entry = tensors.get(piece.key)
        if entry is None:
            properties = dcp.TensorProperties(dtype=getattr(torch, piece.dtype))
            entry = dcp.TensorStorageMetadata(properties, torch.Size(piece.whole), [])
            tensors[piece.key] = entry
        chunk = dcp.ChunkStorageMetadata(torch.Size(piece.at), torch.Size(piece.shape))
        index = dcp.MetadataIndex(piece.key, piece.at, len(entry.chunks))
        entry.chunks.append(chunk)
        position, length = extents[piece.box]
        info = dcp_files._StorageInfo(written.file, position, length)
        results.append(WriteResult(index, length, info))
    for item in manifest.objects:
        tensors[item.key] = dcp.BytesStorageMetadata()
        info = dcp_files._StorageInfo(item.file, item.position, item.nbytes)
        results.append(WriteResult(dcp.MetadataIndex(item.key), item.nbytes, info))
    # dcp_to_torch_save nests by it: one level, so that ["model"] is what load_state_dict takes
    paths = {key: (key,) if "/" in key else tuple(key.split(".", 1)) for key in tensors}
    top = {path[0] for path in paths.values() if len(path) == 1}
    paths = {key: (key,) if path[0] in top else path for key, path in paths.items()}
    # torch writes it, in its own form; to a folder of ours, for the store may be a bucket.
    with tempfile.TemporaryDirectory(prefix="dlrover-") as folder:
        writer = FileSystemWriter(folder, sync_files=False)
        writer.storage_meta = dcp.StorageMeta  # it names no folder: this one goes
        writer.finish(dcp.Metadata(tensors, planner_data=paths), [results])
        return Path(folder, METADATA).read_bytes()


# --- an attempt ---


class Stopped(Exception):
    """The attempt was called off, or is out of time; that was said already."""


@dataclass(slots=True)
class _Held:
    """A slot that is locked, so that nobody fills it anew."""

    slot: Slot
    found: Contents
    share: Share
    positions: list[int]
    """Of the share's pieces."""


class Attempt:
    """One order, on a thread of its own."""

    def __init__(
        self,
        order: Order,
        store: Callable[[str], Store],
        say: Callable[[Answer], None],
        before: "threading.Thread | None",
    ) -> None:
        """Take up an order; `start` begins.

        Args:
            order: what to write.
            store: gives the store of a directory.
            say: tells an answer.
            before: the thread of the attempt before, which may hang in a dead store.
        """
        self.order, self._open, self._say, self._before = order, store, say, before
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._committing = False
        self._term = order.grant
        self._doing = ("it has not begun", "")
        self._moved = self._began
        """When something has gone on last."""
        self._patient = False
        """It has written its part and waits for others, who have limits of their own."""
        self._held: list[_Held] = []
        self._files: list[str] = []
        self._nbytes = 0
        self._made = False
        self._deadline = self._timer(order.deadline_s)
        self.thread = threading.Thread(target=self._run, name=order.attempt, daemon=True)
        self.folder = folder_of(order.step, order.attempt)

    def start(self) -> None:
        """Begin."""
        self._deadline.start()
        self._answer(Phase.WRITING)
        self.thread.start()

    def grant(self, term: int) -> None:
        """It may commit, in this term."""
        with self._lock:
            self._term = term
            self._wake.set()

    def give_up(self, why: str, *, force: bool = False) -> None:
        """Say that it failed, unless its end was said; a commit that has begun is let finish."""
        with self._lock:
            if self._stopped or (self._committing and not force):
                return
            self._stopped = True
            self._wake.set()
            for held in self._held:  # its thread may hang: the trainer is not to wait for it
                with contextlib.suppress(OSError):
                    held.slot.unlock()
        self._deadline.cancel()
        self._answer(Phase.FAILED, why=why)

    def _timer(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self._look)
        timer.daemon = True
        return timer

    def _look(self) -> None:
        """Whether it stands still."""
        limit = self.order.deadline_s
        left = limit if self._patient else self._moved + limit - time.monotonic()
        if left <= 0:
            self._too_late()
            return
        with self._lock:
            if not self._stopped:
                self._deadline = self._timer(left)
                self._deadline.start()

    def _too_late(self) -> None:
        words, hint = self._doing
        waited = time.monotonic() - self._moved
        hint = f": {hint}" if hint else ""
        self.give_up(f"{words} for {waited:.0f} s{hint}", force=True)

    def _answer(self, phase: Phase, **more: Any) -> None:
        took = time.monotonic() - self._began
        self._say(Answer(self.order.attempt, phase, seconds=took, nbytes=self._nbytes, **more))

    # --- its thread ---

    def _run(self) -> None:
        why = ""
        try:
            stored, notes = self._write()
            self._let_go()
            with self._lock:
                self._stopped, late = True, self._stopped
            if not late:
                self._answer(Phase.DONE, stored=stored, notes=notes)
        except Stopped:
            why = "called off"
        except (OSError, DLRoverError, ValueError) as error:
            why = _words(error)
        except Exception as error:
            log.exception("attempt_failed", extra={"attempt": self.order.attempt})
            why = f"{type(error).__name__}: {error}"
        if why:
            self._let_go()
            self._now(f"{why}; and {self.order.dir} has not answered since")
            self._clean_up(why)
            self.give_up(why, force=True)
        self._deadline.cancel()

    def _now(self, doing: str, hint: str = "") -> None:
        """What it is at, for who asks why it takes so long."""
        if self._doing[0] != doing:
            self._doing, self._moved = (doing, hint), time.monotonic()

    def _ends(self) -> bool:
        """Asked at each chunk: whether it was called off."""
        self._moved = time.monotonic()
        return self._stopped

    def _write(self) -> tuple[tuple[int, int, int, str, float, int] | None, tuple[str, ...]]:
        order = self.order
        if self._before is not None:
            self._now(f"{order.dir} has not answered to the attempt before")
            while self._before.is_alive():
                self._before.join(0.2)
                self._check()
        self._now(f"no slot of step {order.step}")
        self._held = self._poll(self._lock_slots)
        self._now(f"{order.dir} has not answered")
        store = self._open(order.dir)
        if order.writers:
            self._poll(lambda: self._claim(store))
            self._check()
            store.sweep({self.folder}, now=_wall())
        place = store.place
        place.make(f"{self.folder}/{PARTS}")
        self._made = True
        place.settle("")
        self._put(store, f"{order.node}.layout", [h.share.encode() for h in self._held])
        layouts: dict[str, list[Share]] = {}
        plan = self._plan(store, layouts) if order.writers else self._read_plan(store)
        if not order.writers:
            store.join(Owner(order.job, order.name))
        self._put(store, f"{order.node}.done", self._write_files(store, plan))
        if not order.writers:
            return None, ()
        return self._finish(store, plan, layouts)

    def _check(self) -> None:
        if self._stopped:
            raise Stopped

    def _poll(self, look: Callable[[], T | None]) -> T:
        """Look until there is something: first often, then not."""
        pause, longest = PAUSE_S
        while True:
            self._check()
            if (found := look()) is not None:
                return found
            if self._wake.wait(pause):
                self._wake.clear()
            pause = min(2 * pause, longest)

    # --- slots ---

    def _lock_slots(self) -> list[_Held] | None:
        order = self.order
        wanted = (order.round, order.lap, order.step)
        missing = set(order.ranks)
        newer: dict[int, int] = {}
        held: list[_Held] = []
        found = sorted(
            scan(Path(order.arena)), key=lambda row: (row[1].hollow, row[0].name[:1] == "p")
        )
        try:
            for path, summary in found:
                if summary.job != order.job or summary.rank not in missing:
                    continue
                have = (summary.round, summary.lap, summary.step)
                if have != wanted:
                    if have > wanted:
                        newer[summary.rank] = summary.step
                    continue
                with contextlib.suppress(FileNotFoundError, Damaged):
                    slot = Slot(path)
                    held_here = self._lock_slot(slot, summary.fill)
                    if held_here is None:
                        slot.close()
                        continue
                    held.append(held_here)
                    missing.discard(summary.rank)
            gone = sorted(missing & newer.keys())
            if gone:
                raise NotWhole(
                    f"step {order.step} of rank {gone[0]} is not in {order.arena} any more: it "
                    f"holds step {newer[gone[0]]}"
                )
        except BaseException:
            _close(held)
            raise
        if missing:
            _close(held)
            ranks = ", ".join(map(str, sorted(missing)))
            self._now(f"step {order.step} of rank {ranks} is not in {order.arena}")
            return None
        return sorted(held, key=lambda h: h.share.rank)

    def _lock_slot(self, slot: Slot, fill: str) -> _Held | None:
        try:
            now = slot.summary() if slot.lock(shared=True) else None
            if now is None or now.fill != fill:
                return None
            found = contents(slot)
            if found.summary.world != self.order.world:
                raise NotWhole(
                    f"rank {now.rank} has staged step {now.step} in a world of {now.world}: "
                    f"expected {self.order.world}"
                )
        except BaseException:
            slot.close()
            raise
        sums = {key: xxhash.xxh3_64_intdigest(value) for key, value in found.objects.items()}
        share = Share.of(found, sums)
        at = [at for piece, at in found.layout if piece.private or not found.summary.hollow]
        return _Held(slot, found, share, at)

    def _let_go(self) -> None:
        """The slots may be filled anew, and need not be spared any more."""
        for one in self._held:
            fill = one.found.summary.fill
            if not one.found.summary.persist or not one.slot.path.exists():
                continue
            with contextlib.suppress(OSError, ValueError), Slot(one.slot.path, write=True) as slot:
                for _ in range(3):  # its agent may be writing there too: that it was copied
                    now = slot.summary()
                    if now is None or now.fill != fill:
                        break
                    if slot.amend(now, replace(now, persist=False)):
                        break
        with self._lock:  # who gives up meanwhile finds none that is closed already
            held, self._held = self._held, []
        _close(held)

    # --- meeting the others ---

    def _put(self, store: Store, name: str, document: object) -> None:
        self._check()
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        store.place.put(f"{self.folder}/{PARTS}/{name}.json", data)

    def _read(self, store: Store, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return store.place.read(f"{self.folder}/{PARTS}/{name}.json")
        return None

    def _others(self, store: Store) -> set[str]:
        """Names of what is there.

        Raises:
            Superseded: one of the others has failed, or the attempt was removed.
        """
        parts = f"{self.folder}/{PARTS}"
        if self.order.writers != (self.order.node,):
            store.place.refresh(parts)
        names = {n.removesuffix(".json") for n in store.place.names(parts)}
        for name in sorted(names):
            node = name.removesuffix(".failed")
            if node != name:
                why = self._read(store, name)
                if why is not None:
                    raise Superseded(f"{node}: {json.loads(why)}")
        if f"{self.order.node}.layout" not in names:
            raise Superseded(
                f"{store.place.url}/{self.folder} was removed: the attempt was given up"
            )
        return names

    def _gather(self, store: Store, kind: str, hint: str = "") -> dict[str, Any]:
        """A document of each writer."""
        found: dict[str, Any] = {}

        def look() -> dict[str, Any] | None:
            names = self._others(store)
            for node in self.order.writers:
                if node not in found and f"{node}.{kind}" in names:
                    data = self._read(store, f"{node}.{kind}")
                    if data is not None:
                        found[node] = json.loads(data)
            late = [node for node in self.order.writers if node not in found]
            if not late:
                return found
            who = ", ".join(late[:5]) + (f" and {len(late) - 5} more" if len(late) > 5 else "")
            self._now(f"{kind} of {who} not seen in {store.place.url}/{self.folder}", hint)
            return None

        return self._poll(look)

    def _claim(self, store: Store) -> bool | None:
        """Be the one that writes into the directory; None while the one that did may be dead."""
        order = self.order
        try:
            shared = len(order.writers) > 1
            store.claim(Owner(order.job, order.name), order.attempt, shared=shared)
        except Claimed as error:
            if error.sure:
                raise
            self._now(str(error))
            return None
        return True

    def _plan(self, store: Store, layouts: dict[str, list[Share]]) -> Plan:
        hint = "is it a folder that all nodes share?"
        found = self._gather(store, "layout", hint if len(self.order.writers) > 1 else "")
        for node in self.order.writers:
            layouts[node] = [Share.decode(row) for row in found[node]]
        plan = make_plan(layouts)
        self._put(store, "plan", plan.encode())
        return plan

    def _read_plan(self, store: Store) -> Plan:
        url = f"{store.place.url}/{self.folder}"
        self._now(
            f"the coordinator's plan not seen in {url}", "is it a folder that all nodes share?"
        )
        data = self._poll(
            lambda: self._read(store, "plan") if "plan" in self._others(store) else None
        )
        return Plan.decode(data)

    # --- writing ---

    def _write_files(self, store: Store, plan: Plan) -> dict[str, Any]:
        """Write this node's files.

        Raises:
            Damaged: a slot's bytes are not those that were staged.
        """
        pieces: list[list[int]] = []
        objects: list[list[Any]] = []
        files: list[list[Any]] = []
        node = self.order.node
        for held in self._held:
            rank = held.share.rank
            mine = plan.pieces.get(node, {}).get(rank, [])
            keys = plan.objects.get(node, {}).get(rank, [])
            if not mine and not keys:
                continue
            name = f"__{rank}_0.distcp"
            path = f"{self.folder}/{name}"
            self._now(f"writing {store.place.url}/{path}")
            self._check()
            self._files.append(path)
            wanted = sum(held.share.pieces[i].nbytes for i in mine)
            wanted += sum(len(held.found.objects[key]) for key in keys)
            sink = store.place.sink(path, wanted)
            try:
                stream = _Stream(sink, self._ends)
                pieces += [[rank, i, *self._write_piece(held, i, stream)] for i in mine]
                sums = {key: xxh3 for key, _, xxh3 in held.share.objects}
                for key in keys:
                    value = held.found.objects[key]
                    objects.append([rank, key, stream.raw(value), len(value), sums[key]])
                stream.flush_small()
                self._check()
                self._now(f"syncing {store.place.url}/{path}")
                sink.finish()
                files.append([name, stream.position, stream.whole.intdigest()])
                self._nbytes += stream.position
            finally:
                sink.abandon()
        store.place.settle(self.folder)
        return {"pieces": pieces, "objects": objects, "files": files}

    def _write_piece(self, held: _Held, index: int, stream: _Stream) -> tuple[int, int, int, int]:
        """Position and length of the zip, position and digest of the raw bytes."""
        piece = held.share.pieces[index]
        start = stream.position
        stream.begin(piece.nbytes)
        try:
            torch.save(_tensor(held.slot, piece, held.positions[index]), stream)
        except RuntimeError:  # of a writer whose stream had failed
            if stream.error is None:
                raise
        if stream.error is not None:
            raise stream.error
        if stream.payload < 0:
            raise ValueError(f"torch {torch.__version__} writes tensors otherwise: no data/0")
        self._check()
        if stream.xxh3 != held.share.digests[index]:
            raise Damaged(
                f"{piece.key} of rank {held.share.rank}: its bytes in {held.slot.path} are not "
                "those that were staged; nothing of this step is stored. If the script edits "
                "tensors through .data or NumPy after save(), let it do so before; else, if it "
                "happens again, have the memory of this node tested"
            )
        return start, stream.position - start, stream.payload, stream.xxh3

    # --- the coordinator's end ---

    def _finish(
        self, store: Store, plan: Plan, layouts: dict[str, list[Share]]
    ) -> tuple[tuple[int, int, int, str, float, int], tuple[str, ...]]:
        order = self.order
        self._patient = True
        done = self._gather(store, "done")
        self._patient = False
        shares = {(node, s.rank): s for node, shares in layouts.items() for s in shares}
        extents: dict[tuple[Any, ...], tuple[int, int]] = {}
        pieces: list[Written] = []
        objects: list[WrittenObject] = []
        for node in order.writers:
            for rank, index, start, length, position, xxh3 in done[node]["pieces"]:
                piece = shares[node, rank].pieces[index]
                extents[piece.box] = (start, length)
                pieces.append(Written(piece, f"__{rank}_0.distcp", position, xxh3))
            for rank, key, position, nbytes, xxh3 in done[node]["objects"]:
                objects.append(WrittenObject(key, f"__{rank}_0.distcp", position, nbytes, xxh3))
        planned = sum(len(rows) for ranks in plan.pieces.values() for rows in ranks.values())
        if len(pieces) != planned:
            raise NotWhole(f"{len(pieces)} tensors were written: expected {planned}")
        pieces.sort(key=lambda w: (w.piece.key, w.piece.at))
        objects.sort(key=lambda o: o.key)
        metrics = {s.rank: s.metric for s in shares.values() if s.metric is not None}
        sums = {name: (size, xxh3) for node in done.values() for name, size, xxh3 in node["files"]}
        manifest = Manifest(
            step=order.step,
            attempt=order.attempt,
            job=order.job,
            round=order.round,
            lap=order.lap,
            world=order.world,
            folder=self.folder,
            at=_wall(),
            pieces=tuple(pieces),
            objects=tuple(objects),
            metric=metrics[min(metrics)] if metrics else None,
            notes=tuple(plan.notes),
        )
        self._now(f"writing {store.place.url}/{self.folder}/{METADATA}")
        self._files.append(f"{self.folder}/{METADATA}")
        index = metadata(manifest, extents)
        manifest = replace(
            manifest,
            index=xxhash.xxh3_64_intdigest(index),
            sums=tuple(sums[name] for name in manifest.files),
        )
        store.place.put(f"{self.folder}/{METADATA}", index)
        if self._term is None:
            self._now("no grant of the master")
            self._answer(Phase.READY)
        term = self._poll(lambda: self._term)
        with self._lock:
            if self._stopped:
                raise Stopped
            self._committing = True
        self._now(f"committing to {store.place.url}; whether it was is not known")
        manifest = store.commit(replace(manifest, term=term))
        log.info(
            "checkpoint_stored",
            extra={"step": order.step, "where": store.where(manifest), "nbytes": manifest.nbytes},
        )
        notes = [*manifest.notes]
        if store.stuck:
            name, why = next(iter(store.stuck.items()))
            more = f", and {len(store.stuck) - 1} more" if len(store.stuck) > 1 else ""
            notes.append(f"{store.place.url}/{name} is left over, and not removed: {why}{more}")
        try:
            store.place.remove_folder(f"{self.folder}/{PARTS}")
            store.retain(order.keep, {*order.spare, self.folder})
        except OSError as error:  # it is stored all the same
            notes.append(f"older checkpoints could not be removed: {_words(error)}")
        where = store.where(manifest)
        stored = (order.step, order.round, order.lap, where, manifest.at, manifest.number)
        return stored, tuple(notes)

    def _clean_up(self, why: str) -> None:
        """Leave nothing half behind; whatever stays all the same, a later attempt sweeps."""
        if not self._made or self._committing:
            return  # whether the commit went through is for the next one to see
        with contextlib.suppress(OSError, DLRoverError):
            store = self._open(self.order.dir)
            place = store.place
            if self.order.writers:  # nobody else can commit it
                store.clear(self.folder)
                return
            for name in self._files:
                place.remove(name)
            if f"{self.order.node}.layout.json" in place.names(f"{self.folder}/{PARTS}"):
                place.put(
                    f"{self.folder}/{PARTS}/{self.order.node}.failed.json", json.dumps(why).encode()
                )


def _close(held: Iterable[_Held]) -> None:
    for one in held:
        with contextlib.suppress(OSError):
            one.slot.close()


def _wall() -> float:
    """Seconds of the epoch: for people, and never to decide what is newer."""
    return datetime.now(UTC).timestamp()


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'storage'}: {error.strerror}"
    return str(error) or type(error).__name__


# --- the program ---


class Persister:
    """Takes orders one after the other; the newest calls the one before off."""

    def __init__(self, say: Callable[[Answer], None]) -> None:
        self._tell = say
        self._stores: dict[str, Store] = {}
        self._attempt: Attempt | None = None
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def take(self, message: Order | Grant | Cancel | Answer) -> None:
        """Do as a line says; it is not waited for."""
        now = self._attempt
        same = now is not None and now.order.attempt == getattr(message, "attempt", "")
        match message:
            case Order() if not same:
                if now is not None:
                    now.give_up(f"called off by a newer order: step {message.step}")
                before = now.thread if now is not None else None
                self._attempt = Attempt(message, self._store, self._tell, before)
                self._attempt.start()
            case Order(grant=int(term)) | Grant(term=term) if same and now is not None:
                now.grant(term)
            case Cancel() if same and now is not None:
                now.give_up("called off")

    def close(self, grace_s: float = 5.0) -> None:
        """Call off what is under way, and let other jobs write where this one did."""
        self._over.set()
        if self._attempt is not None:
            self._attempt.give_up("the persister was told to end")
            self._attempt.thread.join(grace_s)
        release = threading.Thread(target=self._release, daemon=True)
        release.start()
        release.join(grace_s)  # a store may hang

    def _release(self) -> None:
        for store in list(self._stores.values()):
            with contextlib.suppress(OSError):
                store.release()

    def _store(self, url: str) -> Store:
        store = self._stores.get(url)
        if store is None:
            store = self._stores[url] = Store(url)
        store.prepare()  # each time: somebody may have removed it
        return store

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            for store in list(self._stores.values()):
                with contextlib.suppress(OSError):
                    store.renew()


def main() -> int:
    """Run until standard input ends, or has an empty line."""
    parent = os.getppid()
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # who started it ends it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(max(0, NICE - os.nice(0)))
    telemetry.setup("persister", level=telemetry.wished_level("WARNING"))
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    torch.set_num_threads(1)
    torch.serialization.set_crc32_options(False)  # bytes are summed by XXH3; three times as fast
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints does not print between the answers
    lock = threading.Lock()

    def say(answer: Answer) -> None:
        rest = memoryview(answer.encode())
        with lock, contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(answers, rest) :]

    persister = Persister(say)
    log.info("persister_ready")
    for line in sys.stdin.buffer:
        if line == b"\n":
            break  # the end of the input need not come: see dlrover_py/trainer/alone.py
        try:
            message = read_line(line)
        except (ValueError, TypeError) as error:
            log.warning("line_not_understood", extra={"why": str(error)})
            continue
        persister.take(message)
    persister.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a dead store is not waited for
