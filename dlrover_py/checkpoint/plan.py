"""Which node writes which part of a checkpoint, and what the written parts make together.

Both are decided by the coordinator, from the documents of all nodes
(:mod:`dlrover_py.protocol.shares`).
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from dlrover_py.checkpoint.directory import folder_of
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.manifest import Manifest, WrittenChunk, WrittenObject
from dlrover_py.protocol.persister import WriteRequest
from dlrover_py.protocol.shares import WritePlan, WriteShare, WrittenFiles
from dlrover_py.protocol.slots import TensorChunk


class IncompleteCheckpointError(DLRoverError):
    """The given slots together do not hold a complete checkpoint."""


def make_plan(layouts: Mapping[str, Iterable[WriteShare]]) -> WritePlan:
    """Assign each tensor chunk to one node and rank, and balance the bytes that they write.

    A further replica of a rank is ignored. Copies of a chunk may have different digests, such as
    buffers that each rank of DDP updates independently. The copy of the lowest rank is written
    then, as DDP does, and the notes of the plan mention it.

    Args:
        layouts: the shares of each node.

    Raises:
        IncompleteCheckpointError: the chunks of a tensor do not add up to the whole tensor, or
            ranks disagree on its type or shape; the message names the tensor.
    """
    plan = WritePlan()
    holders: dict[tuple[Any, ...], list[tuple[int, str, int, int]]] = {}
    boxes: dict[tuple[Any, ...], TensorChunk] = {}
    objects: dict[str, list[tuple[int, str, int]]] = {}
    done: set[int] = set()
    for node, shares in layouts.items():
        plan.chunks[node], plan.objects[node] = {}, {}
        for share in shares:
            if share.rank in done:  # a further replica of the rank
                continue
            done.add(share.rank)
            plan.chunks[node][share.rank], plan.objects[node][share.rank] = [], []
            for index, (piece, xxh3) in enumerate(zip(share.chunks, share.digests, strict=True)):
                boxes.setdefault(piece.box, piece)
                holders.setdefault(piece.box, []).append((share.rank, node, index, xxh3))
            for key, _, xxh3 in share.objects:
                objects.setdefault(key, []).append((share.rank, node, xxh3))
    load: dict[str, int] = dict.fromkeys(plan.chunks, 0)
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
        plan.chunks[node][rank].append(index)
    for key, found in objects.items():
        if len({xxh3 for *_, xxh3 in found}) > 1:
            unequal.append(key)
        rank, node, _ = min(found)
        plan.objects[node][rank].append(key)
    for ranks in plan.chunks.values():
        for rows in ranks.values():
            rows.sort()  # the order in the slot
    if unequal:
        more = f" and {len(unequal) - 3} more" if len(unequal) > 3 else ""
        words = f"ranks hold different values of {', '.join(sorted(unequal)[:3])}{more}"
        plan.notes.append(f"{words}: the lowest rank's are kept")
    return plan


def _needed(boxes: Iterable[TensorChunk]) -> Iterator[TensorChunk]:
    """Yield the chunks that together make complete tensors.

    If one chunk is a complete tensor, the other chunks of this tensor are left out.

    Args:
        boxes: chunks, no two of which have the same key, offsets and shape.

    Raises:
        IncompleteCheckpointError: the chunks of a tensor do not add up to the whole tensor, or they
            disagree on its type or shape.
    """
    by_key: dict[str, list[TensorChunk]] = {}
    for piece in boxes:
        by_key.setdefault(piece.key, []).append(piece)
    for key, pieces in by_key.items():
        if len({(p.dtype, p.whole) for p in pieces}) > 1:
            kinds = ", ".join(sorted({f"{p.dtype}{list(p.whole)}" for p in pieces}))
            raise IncompleteCheckpointError(f"{key}: ranks disagree on what it is: {kinds}")
        whole = pieces[0].whole
        complete = [p for p in pieces if p.shape == whole]
        if complete:
            yield complete[0]
            continue
        has, wants = sum(prod(p.shape) for p in pieces), prod(whole)
        if has != wants:
            raise IncompleteCheckpointError(
                f"{key}: the slots hold {has} of its {wants} elements: expected each rank's shard "
                "once; is a rank missing, or is it sharded differently by some?"
            )
        yield from pieces


class WrittenCheckpoint(NamedTuple):
    """The manifest of a checkpoint whose files are written, before its index and its commit."""

    manifest: Manifest
    extents: Mapping[tuple[Any, ...], tuple[int, int]]
    """Offset and length of the zip of each chunk, by ``TensorChunk.box``."""


def file_of(rank: int) -> str:
    """Return the name of the file with the chunks and objects that are taken from a rank's slot."""
    return f"__{rank}_0.distcp"


def assemble(
    order: WriteRequest,
    plan: WritePlan,
    layouts: Mapping[str, Iterable[WriteShare]],
    done: Mapping[str, WrittenFiles],
    *,
    at: float,
) -> WrittenCheckpoint:
    """Return the manifest of the checkpoint that the files of all nodes make together.

    Nothing is read or written. The metric is that of the lowest rank that has one.

    Args:
        order: the request to write the checkpoint.
        plan: the plan by which it was written.
        layouts: the shares of each node.
        done: what each node has written.
        at: wall time in seconds, for people.

    Raises:
        IncompleteCheckpointError: the number of chunks or of objects is not that of the plan, or a
            node has written an unknown chunk, or the size and digest of a file are missing.
    """
    shares = {(node, share.rank): share for node, found in layouts.items() for share in found}
    extents: dict[tuple[Any, ...], tuple[int, int]] = {}
    pieces: list[WrittenChunk] = []
    objects: list[WrittenObject] = []
    files = {file.name: (file.nbytes, file.xxh3) for one in done.values() for file in one.files}
    for node, written in done.items():
        for one in written.chunks:
            share = shares.get((node, one.rank))
            if share is None or one.chunk >= len(share.chunks):
                raise IncompleteCheckpointError(
                    f"{node} has written tensor {one.chunk} of rank {one.rank}, which its slots "
                    "do not have"
                )
            piece = share.chunks[one.chunk]
            extents[piece.box] = (one.start, one.length)
            pieces.append(WrittenChunk(piece, file_of(one.rank), one.position, one.xxh3))
        objects += [
            WrittenObject(row.key, file_of(row.rank), row.position, row.nbytes, row.xxh3)
            for row in written.objects
        ]
    planned = sum(len(rows) for ranks in plan.chunks.values() for rows in ranks.values())
    if len(pieces) != planned:
        raise IncompleteCheckpointError(f"{len(pieces)} tensors were written: expected {planned}")
    planned = sum(len(keys) for ranks in plan.objects.values() for keys in ranks.values())
    if len(objects) != planned:
        raise IncompleteCheckpointError(f"{len(objects)} objects were written: expected {planned}")
    pieces.sort(key=lambda w: (w.chunk.key, w.chunk.at))
    objects.sort(key=lambda o: o.key)
    metrics = {s.rank: s.metric for s in shares.values() if s.metric is not None}
    names = sorted({w.file for w in pieces} | {o.file for o in objects})
    if missing := [name for name in names if name not in files]:
        raise IncompleteCheckpointError(f"{missing[0]} has tensors: expected its size and digest")
    manifest = Manifest(
        step=order.step,
        attempt=order.attempt,
        job=order.job,
        round=order.round,
        timeline=order.timeline,
        world=order.world,
        folder=folder_of(order.step, order.attempt),
        at=at,
        chunks=tuple(pieces),
        objects=tuple(objects),
        metric=metrics[min(metrics)] if metrics else None,
        certified=bool(shares) and all(share.certified for share in shares.values()),
        notes=tuple(plan.notes),
        sums=tuple(files[name] for name in names),
    )
    return WrittenCheckpoint(manifest, extents)
