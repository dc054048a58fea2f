"""Cut tensor chunks out of other chunks, by the planner of torch's DCP, and copy them into tensors.

A region is read directly into the tensor that needs it, if the tensor is on the CPU. The region
must be contiguous both in the saved chunk and in the tensor. This applies to chunks that were saved
as they are needed. It also applies to chunks from memory that ``fully_shard`` cuts. All other
regions are copied out of chunks. Each chunk is read completely, since its XXH3 digest cannot be
checked otherwise. The planner takes long to import. It is not used where no chunk has to be cut.
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

from dlrover_py.checkpoint.shm import CACHED_COPY_BYTES, DamagedDataError
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.protocol.slots import TensorChunk
from dlrover_py.trainer.object_codec import decode_object, unreadable
from dlrover_py.trainer.sources import READ_ERRORS, Catalog, PeerSource, TensorLocation
from dlrover_py.trainer.state_dict import StateLeaf
from dlrover_py.trainer.torch_compat import cuts

THREADS = 2
"""Number of threads that read and compute digests; they hold the GIL for neither."""


@runtime_checkable
class TorchFileSource(Protocol):
    """A source whose tensor chunks are files of ``torch.save``, for which there are no digests."""

    def entry(self, file: str, position: int) -> bytes:
        """Return all bytes of the file that begins at the position."""


@dataclass(slots=True)
class _CopyTask:
    """A region of a saved tensor chunk, and the region of a tensor into which it is copied."""

    chunk: TensorChunk
    """The saved chunk."""
    places: list[TensorLocation]
    """The places where its bytes can be read."""
    tried: int
    """Number of places that have been tried: the index of the next one."""
    target: torch.Tensor
    """The region of the tensor that is filled."""
    offsets: Sequence[int]
    """Where the region begins in the saved chunk."""
    lengths: Sequence[int]
    """The region's shape."""
    why: str = ""
    """Why the last attempt failed, in words; empty if it succeeded."""

    def is_direct(self) -> bool:
        """Return whether the bytes of the whole chunk are the target's bytes, unchanged."""
        return tuple(self.lengths) == self.chunk.shape and self.run() is not None

    def run(self) -> int | None:
        """Return the offset of the target's bytes in the chunk, in bytes.

        None: the bytes cannot be read straight into the target. It is not on the CPU, has another
        type, or is not contiguous in both. Or it has a pending conjugation or negation: its bytes
        are then not its values.
        """
        dtype = getattr(torch, self.chunk.dtype)
        fits = self.target.device.type == "cpu" and self.target.dtype == dtype
        if not fits or not self.target.is_contiguous():
            return None
        if self.target.is_conj() or self.target.is_neg():  # its bytes are not its values
            return None
        if tuple(self.lengths) == self.chunk.shape:
            return 0
        there = self.cut(torch.empty(self.chunk.shape, dtype=dtype, device="meta"))
        return int(there.storage_offset()) * dtype.itemsize if there.is_contiguous() else None

    def cut(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the region of a chunk that is copied."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, size)
        return chunk


class _ChunkReader:
    """Reads tensor chunks, each from its next source if one source fails."""

    def __init__(self, catalog: Catalog, log: logging.Logger) -> None:
        self._catalog, self._log = catalog, log
        self.nbytes: dict[str, int] = {}

    def run(self, tasks: list[_CopyTask]) -> None:
        """Read all chunks from any source that has them, in several threads.

        The list of tasks is sorted in place, the largest chunks first. A warning is logged for each
        chunk in a source that cannot be used. `nbytes` counts the bytes of each kind of source.

        Raises:
            CheckpointError: a chunk can be read from no source.
        """
        tasks.sort(key=lambda job: job.chunk.nbytes, reverse=True)
        with ThreadPoolExecutor(THREADS, "dlrover-restore") as pool:
            while tasks:
                tasks = self._try_once(tasks, pool)

    def _try_once(self, tasks: list[_CopyTask], pool: ThreadPoolExecutor) -> list[_CopyTask]:
        """Try each chunk once. Return those that must be tried at another source.

        More sources are looked at if a chunk has none left. Each failure is logged.

        Raises:
            CheckpointError: there is no other source for a chunk.
        """
        while any(job.tried >= len(job.places) for job in tasks):
            if not self._catalog.more():
                job = next(job for job in tasks if job.tried >= len(job.places))
                raise CheckpointError(f"{job.chunk.key}: {job.why}; no other source has it")
        by_peer: dict[int, list[_CopyTask]] = {}
        others: list[_CopyTask] = []
        for job in tasks:
            source = job.places[job.tried].source
            if isinstance(source, PeerSource) and job.is_direct():
                by_peer.setdefault(id(source), []).append(job)
            else:
                others.append(job)
        shared = iter(others)  # a thread that is done takes the next: the largest come first
        results = [pool.submit(_read_from_peer, wave) for wave in by_peer.values()]
        results += [pool.submit(_read_tasks, shared) for _ in range(THREADS)]
        for result in results:
            result.result()
        for job in tasks:
            if not job.why:
                kind = job.places[job.tried].source.kind
                self.nbytes[kind] = self.nbytes.get(kind, 0) + job.target.nbytes
        failed = [job for job in tasks if job.why]
        for job in failed:
            location = job.places[job.tried]
            self._log.warning(
                "%s in %s is not used: %s", job.chunk.key, location.source.where, job.why
            )
            job.tried += 1
        return failed


def _read_tasks(tasks: Iterator[_CopyTask]) -> None:
    """Read tasks from an iterator that threads share, until it is empty.

    The GIL keeps the iterator consistent.
    """
    for job in tasks:
        _read_task(job)


def _read_task(task: _CopyTask) -> None:
    """Read a chunk from its current source; ``why`` says what failed, if something did."""
    location = task.places[task.tried]
    task.why = ""
    try:
        if isinstance(location.source, TorchFileSource):
            data = location.source.entry(location.file, location.position)
            _copy_region(_decode_chunk(data, task.chunk, location), task)
        elif (start := task.run()) is not None and (
            task.is_direct() or location.source.kind == "memory"  # others: one request per part
        ):
            _read_chunk(location, _read_targets(_bytes_of(task.target), start, task.chunk.nbytes))
        else:
            scratch = torch.empty(task.chunk.shape, dtype=getattr(torch, task.chunk.dtype))
            _read_chunk(location, [_bytes_of(scratch)])
            _copy_region(scratch, task)
    except READ_ERRORS as error:
        task.why = str(error) or type(error).__name__


def _decode_chunk(data: bytes, chunk: TensorChunk, location: TensorLocation) -> torch.Tensor:
    """Return a tensor chunk from the bytes of a file of ``torch.save``.

    Args:
        data: the bytes.
        chunk: the chunk, whose shape the tensor must have. Its dtype is not compared.
        location: where they were read, for messages.

    Raises:
        DamagedDataError: the bytes are not those of a tensor of this shape.
    """
    where = f"{location.source.where}/{location.file}"
    try:
        found = decode_object(data)
    except Exception as error:  # torch.load raises what a damaged file leads to
        raise DamagedDataError(
            f"{where}: {chunk.key} cannot be read: {unreadable(error)}"
        ) from error
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != chunk.shape:
        raise DamagedDataError(f"{where}: {chunk.key} is not there")
    return found


def _copy_region(chunk: torch.Tensor, task: _CopyTask) -> None:
    """Copy the region into the target."""
    with torch.no_grad():
        task.target.copy_(task.cut(chunk))


def _read_targets(target: memoryview, start: int, nbytes: int) -> Iterator[memoryview]:
    """Yield the memory into which a chunk is read, if its bytes from ``start`` on are the target's.

    The other bytes are needed only for the digest. One small buffer, which stays in the CPU cache,
    takes all of them.

    Args:
        target: the memory to be filled.
        start: the offset of its bytes in the chunk.
        nbytes: the size of the chunk in bytes.
    """
    end = start + len(target)
    discarded = memoryview(bytearray(min(CACHED_COPY_BYTES, nbytes - len(target))))
    yield from (discarded[: start - offset] for offset in range(0, start, CACHED_COPY_BYTES))
    yield target
    yield from (discarded[: nbytes - offset] for offset in range(end, nbytes, CACHED_COPY_BYTES))


class _RunningDigest:
    """Computes the digest of memory while it is filled: the bytes are in the CPU cache then."""

    def __init__(self, target: memoryview) -> None:
        self._target, self._digest, self._position = target, xxhash.xxh3_64(), 0

    def more(self, nbytes: int) -> None:
        """Add the next bytes, which have arrived."""
        self._digest.update(self._target[self._position : self._position + nbytes])
        self._position += nbytes

    @property
    def xxh3(self) -> int:
        """The digest of the bytes that have arrived."""
        return self._digest.intdigest()


def _read_chunk(place: TensorLocation, targets: Iterable[memoryview]) -> None:
    """Read a chunk and compare its digest. An error of the source is raised.

    Args:
        place: the place of the chunk, with its digest.
        targets: the memory for its bytes, piece by piece in their order.

    Raises:
        DamagedDataError: the bytes are not those that were saved. They are in the targets then.
    """
    sums, position = xxhash.xxh3_64(), place.position
    for target in targets:
        step = (
            CACHED_COPY_BYTES
            if place.source.kind == "memory"
            else max(CACHED_COPY_BYTES, len(target))
        )
        for start in range(0, len(target), step):
            part = target[start : start + step]
            place.source.read(place.file, position, part)
            sums.update(part)
            position += len(part)
    if sums.intdigest() != place.xxh3:
        raise DamagedDataError(f"{place.source.where}: the bytes are not those that were saved")


def _read_from_peer(tasks: list[_CopyTask]) -> None:
    """Read many chunks from one peer. Each is requested without waiting for the one before it.

    Nothing is raised if one fails: its ``why`` says what failed.
    """
    source = tasks[0].places[tasks[0].tried].source
    assert isinstance(source, PeerSource)
    ranges = []
    for job in tasks:
        job.why = "the peer did not send it"
        ranges.append((job.places[job.tried].position, _bytes_of(job.target)))
    digests = deque(_RunningDigest(target) for _, target in ranges)
    try:
        with source.turn:
            read = source.link.read_all(
                source.name, source.write_id, ranges, pin=True, arrived=lambda n: digests[0].more(n)
            )
            for job, _ in zip(tasks, read, strict=True):
                intact = digests.popleft().xxh3 == job.places[job.tried].xxh3
                job.why = "" if intact else "the bytes are not those that were saved"
    except READ_ERRORS as error:
        for job in tasks:
            job.why = job.why and (str(error) or type(error).__name__)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, writable."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def copy_leaves(
    catalog: Catalog, leaves: Iterable[StateLeaf], log: logging.Logger
) -> dict[str, int]:
    """Fill tensors. Where bytes are damaged or gone, the next source is read.

    Bytes that were damaged may be in the tensors after a failure.

    Args:
        catalog: the places of all bytes. It looks for more sources when those that it has fail.
        leaves: the tensors to be filled; the catalog has all their keys.
        log: receives a warning for each chunk that could not be used.

    Returns:
        Bytes that have been written, by kind of source.

    Raises:
        CheckpointError: a chunk is in no source, or is damaged in all of them.
    """
    jobs: list[_CopyTask] = []
    for leaf in leaves:
        saved = catalog.chunks[leaf.chunk.key]
        chunk, locations = saved.get((leaf.chunk.at, leaf.chunk.shape), (None, []))
        if chunk is not None and locations:  # the same chunk was saved: there is nothing to plan
            start = (0,) * len(chunk.shape)
            jobs.append(_CopyTask(chunk, locations, 0, leaf.tensor, start, chunk.shape))
        elif 0 not in leaf.chunk.shape:
            jobs += _planned(leaf, [one for one in saved.values() if one[1]])
    reader = _ChunkReader(catalog, log)
    reader.run(jobs)
    return reader.nbytes


def _planned(
    leaf: StateLeaf, saved: Sequence[tuple[TensorChunk, list[TensorLocation]]]
) -> Iterator[_CopyTask]:
    """Yield the tasks that cut a chunk out of those that were saved; nothing is read yet."""
    first = saved[0][0]
    bounds = [(chunk.at, chunk.shape) for chunk, _ in saved]
    wanted = leaf.chunk.at, leaf.chunk.shape
    for index, start, offsets, lengths in cuts(first.key, first.dtype, first.whole, bounds, wanted):
        target = leaf.tensor
        for dim, (offset, size) in enumerate(zip(start, lengths, strict=True)):
            if size != target.shape[dim]:
                target = target.narrow(dim, offset, size)
        chunk, locations = saved[index]
        yield _CopyTask(chunk, locations, 0, target, offsets, lengths)
