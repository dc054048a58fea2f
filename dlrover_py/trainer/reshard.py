"""Boxes out of other boxes: cut by torch DCP's planner, and copied straight into tensors.

A part that lies in one run, in a piece as in the tensor that needs it, is read into the tensor
itself, if that is on the CPU: boxes that were saved as they are needed and, from memory, what
``fully_shard`` cuts. The rest is cut out of pieces. Each piece is read whole, for only then its
XXH3 tells anything. The planner, which takes long to import, is not asked where no box has to be
cut.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import xxhash

from dlrover_py.arena import NEAR, Damaged
from dlrover_py.protocol.checkpoint import Piece
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.trainer.catalog import TROUBLE, Catalog, Peer, Place
from dlrover_py.trainer.state import Leaf, decode_object

THREADS = 2
"""That read and sum; the GIL is held for neither."""


@runtime_checkable
class Files(Protocol):
    """A source whose pieces are files of ``torch.save``, which nobody has summed."""

    def entry(self, file: str, position: int) -> bytes:
        """The whole of the one that begins there."""


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
        return tuple(self.lengths) == self.piece.shape and self.run() is not None

    def run(self) -> int | None:
        """Where in the piece's bytes the target's lie as they are; None: in no one place."""
        dtype = getattr(torch, self.piece.dtype)
        fits = self.target.device.type == "cpu" and self.target.dtype == dtype
        if not fits or not self.target.is_contiguous():
            return None
        if self.target.is_conj() or self.target.is_neg():  # its bytes are not its values
            return None
        if tuple(self.lengths) == self.piece.shape:
            return 0
        there = self.cut(torch.empty(self.piece.shape, dtype=dtype, device="meta"))
        return int(there.storage_offset()) * dtype.itemsize if there.is_contiguous() else None

    def cut(self, piece: torch.Tensor) -> torch.Tensor:
        """The part that is wanted."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            piece = piece.narrow(dim, start, size)
        return piece


class _Reader:
    """Reads pieces, each from the next one who has it where one does not."""

    def __init__(self, catalog: Catalog, log: logging.Logger) -> None:
        self._catalog, self._log = catalog, log
        self.nbytes: dict[str, int] = {}

    def run(self, jobs: list[_Job]) -> None:
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
            if not self._catalog.more():
                job = next(job for job in jobs if job.tried >= len(job.places))
                raise CheckpointError(f"{job.piece.key}: {job.why}; nobody else has it")
        waves: dict[int, list[_Job]] = {}
        others: list[_Job] = []
        for job in jobs:
            source = job.places[job.tried].source
            if isinstance(source, Peer) and job.direct():
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
            self._log.warning(
                "%s in %s is not used: %s", job.piece.key, place.source.where, job.why
            )
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
        if isinstance(place.source, Files):
            found = decode_object(place.source.entry(place.file, place.position))
            if not isinstance(found, torch.Tensor) or tuple(found.shape) != job.piece.shape:
                raise Damaged(f"{place.source.where}/{place.file}: {job.piece.key} is not there")
            _put(found, job)
        elif (start := job.run()) is not None and (
            job.direct() or place.source.kind == "memory"  # elsewhere each part is asked for
        ):
            _fill(place, _around(_bytes_of(job.target), start, job.piece.nbytes))
        else:
            scratch = torch.empty(job.piece.shape, dtype=getattr(torch, job.piece.dtype))
            _fill(place, [_bytes_of(scratch)])
            _put(scratch, job)
    except TROUBLE as error:
        job.why = str(error) or type(error).__name__


def _put(piece: torch.Tensor, job: _Job) -> None:
    """Copy the part that is wanted."""
    with torch.no_grad():
        job.target.copy_(job.cut(piece))


def _around(target: memoryview, start: int, nbytes: int) -> Iterator[memoryview]:
    """Where a piece is read to, whose bytes from ``start`` on are the target's.

    The others are only summed, so that one small memory, which stays in the cache, does for them.
    """
    end = start + len(target)
    aside = memoryview(bytearray(min(NEAR, nbytes - len(target))))
    yield from (aside[: start - at] for at in range(0, start, NEAR))
    yield target
    yield from (aside[: nbytes - at] for at in range(end, nbytes, NEAR))


class _Sums:
    """Sums memory as it is filled, so that it is still in the cache."""

    def __init__(self, target: memoryview) -> None:
        self._target, self._sums, self._at = target, xxhash.xxh3_64(), 0

    def more(self, nbytes: int) -> None:
        """So many more bytes are there."""
        self._sums.update(self._target[self._at : self._at + nbytes])
        self._at += nbytes

    @property
    def xxh3(self) -> int:
        """Of what is there."""
        return self._sums.intdigest()


def _fill(place: Place, targets: Iterable[memoryview]) -> None:
    """Read a piece, and compare.

    Raises:
        Damaged: the bytes are not those that were saved.
    """
    sums, position = xxhash.xxh3_64(), place.position
    for target in targets:
        step = NEAR if place.source.kind == "memory" else max(NEAR, len(target))
        for start in range(0, len(target), step):
            part = target[start : start + step]
            place.source.read(place.file, position, part)
            sums.update(part)
            position += len(part)
    if sums.intdigest() != place.xxh3:
        raise Damaged(f"{place.source.where}: the bytes are not those that were saved")


def _wave(jobs: list[_Job]) -> None:
    """Read many pieces from one peer, without waiting for one before the next is asked for."""
    source = jobs[0].places[jobs[0].tried].source
    assert isinstance(source, Peer)
    wanted = []
    for job in jobs:
        job.why = "it did not come"
        wanted.append((job.places[job.tried].position, _bytes_of(job.target)))
    summed = deque(_Sums(target) for _, target in wanted)
    try:
        with source.turn:
            read = source.link.read_all(
                source.name, source.fill, wanted, pin=True, arrived=lambda n: summed[0].more(n)
            )
            for job, _ in zip(jobs, read, strict=True):
                good = summed.popleft().xxh3 == job.places[job.tried].xxh3
                job.why = "" if good else "the bytes are not those that were saved"
    except TROUBLE as error:
        for job in jobs:
            job.why = job.why and str(error)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, writable."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def copy_leaves(catalog: Catalog, leaves: Iterable[Leaf], log: logging.Logger) -> dict[str, int]:
    """Fill tensors from whoever has their bytes, the next one where they are damaged or gone.

    Args:
        catalog: who has what; asked for more sources when those that it has do not do.
        leaves: keys that the catalog has.
        log: told of each piece that was not what it should be.

    Returns:
        Bytes that have been written, by kind of source.

    Raises:
        CheckpointError: something cannot be had, or is damaged wherever it is.
    """
    jobs: list[_Job] = []
    for leaf in leaves:
        saved = catalog.boxes[leaf.piece.key]
        piece, places = saved.get((leaf.piece.at, leaf.piece.shape), (None, []))
        if piece is not None and places:  # the same box was saved: nothing is to be planned
            at = (0,) * len(piece.shape)
            jobs.append(_Job(piece, places, 0, leaf.tensor, at, piece.shape))
        elif 0 not in leaf.piece.shape:
            jobs += _planned(leaf, [one for one in saved.values() if one[1]])
    reader = _Reader(catalog, log)
    reader.run(jobs)
    return reader.nbytes


def _planned(leaf: Leaf, saved: Sequence[tuple[Piece, list[Place]]]) -> Iterator[_Job]:
    """Cut the box that is needed out of those that there are, as DCP's DefaultLoadPlanner does.

    (torch/distributed/checkpoint/default_planner.py: create_default_local_load_plan.)
    """
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(piece: Piece) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(piece.at), torch.Size(piece.shape))

    first = saved[0][0]
    properties = TensorProperties(dtype=getattr(torch, first.dtype))
    chunks = [chunk(piece) for piece, _ in saved]
    there = TensorStorageMetadata(properties, torch.Size(first.whole), chunks)
    for item in create_read_items_for_chunk_list(first.key, there, [chunk(leaf.piece)]):
        target = leaf.tensor
        for dim, (start, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            if size != target.shape[dim]:
                target = target.narrow(dim, start, size)
        piece, places = saved[item.storage_index.index]
        yield _Job(piece, places, 0, target, item.storage_offsets, item.lengths)
