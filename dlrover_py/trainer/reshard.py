"""Boxes out of other boxes: what is planned by DCP's planner, and copied straight into tensors.

A box that was saved as it is needed is read into the tensor itself, if that is on the CPU and
contiguous; the rest is cut out of pieces, each of which is read whole, for only then its XXH3 tells
anything.
"""

import ctypes
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from dlrover_py import arena
from dlrover_py.arena import Damaged
from dlrover_py.protocol.checkpoint import Piece
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.trainer.catalog import TROUBLE, Catalog, Peer, Place
from dlrover_py.trainer.state import Leaf, decode_object

CHUNK = 1 << 20
"""Bytes that are read and summed at once: what is summed is still in the cache."""
THREADS = 2
"""That read and sum; the GIL is held for neither."""


@runtime_checkable
class Files(Protocol):
    """A source whose pieces are files of ``torch.save``, which nobody has summed."""

    def entry(self, file: str, position: int) -> bytes:
        """The whole of the one that begins there."""


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

    def __init__(self, catalog: Catalog, keys: Iterable[str], log: logging.Logger) -> None:
        self._catalog, self._log = catalog, log
        self._keys = list(keys)
        self.nbytes: dict[str, int] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        catalog = self._catalog
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
        boxes = self._catalog.boxes
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
            told = {"key": job.piece.key, "where": place.source.where, "why": job.why}
            self._log.warning("checkpoint_piece", extra=told)
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
            _cut(found, job)
        elif job.direct():
            _fill(place, _bytes_of(job.target))
        else:
            scratch = torch.empty(job.piece.shape, dtype=getattr(torch, job.piece.dtype))
            _fill(place, _bytes_of(scratch))
            _cut(scratch, job)
    except TROUBLE as error:
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
    assert isinstance(source, Peer)
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
    boxes = catalog.boxes
    jobs: list[_Job] = []
    cut: list[Leaf] = []
    for leaf in leaves:
        piece, places = boxes[leaf.piece.key].get((leaf.piece.at, leaf.piece.shape), (None, []))
        if piece is not None and places:  # the same box was saved: nothing is to be planned
            at = (0,) * len(piece.shape)
            jobs.append(_Job(piece, places, 0, leaf.tensor, at, piece.shape))
        else:
            cut.append(leaf)
    reader = _Reader(catalog, {leaf.piece.key for leaf in cut}, log)
    reader.run(jobs)
    if cut:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no_dist is set, which is meant
            dcp.load({}, storage_reader=reader, planner=_Planner(cut), no_dist=True)
    return reader.nbytes
