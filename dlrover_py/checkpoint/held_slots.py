"""The slots that a node's persister holds while it writes them to storage."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dlrover_py.checkpoint.plan import IncompleteCheckpointError
from dlrover_py.checkpoint.shm import DamagedDataError, ShmSlot, SlotContents, contents, scan
from dlrover_py.protocol.persister import WriteRequest
from dlrover_py.protocol.shares import SharedObject, WriteShare


@dataclass(slots=True)
class OpenSlot:
    """A slot that is locked, so that no writer fills it again."""

    slot: ShmSlot
    found: SlotContents
    share: WriteShare
    slot_offsets: list[int]
    """Offset in the slot of each chunk of the share."""

    def unmark(self) -> None:
        """Clear the ``persist`` mark in the header of the slot, if it still holds the snapshot.

        Nothing is done if the header had no mark when the slot was locked. Errors are ignored. The
        mark stays if the header changes during three tries, or if a writer has locked the slot.
        """
        path, write_id = self.slot.path, self.found.header.write_id
        if not self.found.header.persist or not path.exists():
            return
        with contextlib.suppress(OSError, ValueError), ShmSlot(path, write=True) as slot:
            for _ in range(3):  # the agent may set ``copied`` at the same time
                now = slot.header()
                if now is None or now.write_id != write_id:
                    break
                if slot.update_header(now, replace(now, persist=False)):
                    break


def lock_slots(order: WriteRequest) -> tuple[list[OpenSlot], set[int]]:
    """Lock one slot for each rank of a request, and read its tables. It does not wait.

    A rank counts as missing while its slot is being filled, is damaged, or holds an earlier
    checkpoint. The lock is that of a reader. A slot with all data is preferred to one with only
    private data. Then a slot of this node's worker is preferred to the copy of a peer's slot.

    Returns:
        The slots, sorted by rank, and the ranks that are missing. If some are missing, there are no
        slots, and none is locked. :func:`close_slots` unlocks them.

    Raises:
        IncompleteCheckpointError: a rank has only a slot with a later checkpoint, or a slot has
            another world size.
    """
    missing = set(order.ranks)
    newer: dict[int, int] = {}
    held: list[OpenSlot] = []
    found = sorted(
        scan(Path(order.pool)), key=lambda row: (row[1].private_only, row[0].name[:1] == "p")
    )
    try:
        for path, header in found:
            if header.job != order.job or header.rank not in missing:
                continue
            if header.id != order.id:
                if header.id > order.id:
                    newer[header.rank] = header.step
                continue
            with contextlib.suppress(FileNotFoundError, DamagedDataError):
                slot = _locked(ShmSlot(path), header.write_id, order.world)
                if slot is not None:
                    held.append(slot)
                    missing.discard(header.rank)
        gone = sorted(missing & newer.keys())
        if gone:
            raise IncompleteCheckpointError(
                f"step {order.step} of rank {gone[0]} is not in {order.pool} any more: it "
                f"holds step {newer[gone[0]]}"
            )
    except BaseException:
        close_slots(held)
        raise
    if missing:
        close_slots(held)
        return [], missing
    return sorted(held, key=lambda one: one.share.rank), missing


def _locked(slot: ShmSlot, write_id: str, world: int) -> OpenSlot | None:
    """Lock one slot and read its tables; None if it is being filled or was filled again.

    The slot is closed if it is not returned.

    Args:
        slot: the slot, which is not locked yet.
        write_id: ``write_id`` in the header of the slot that is wanted.
        world: expected world size.

    Raises:
        DamagedDataError: the tables of the slot are damaged.
        IncompleteCheckpointError: the slot has another world size.
    """
    try:
        now = slot.header() if slot.lock(shared=True) else None
        if now is None or now.write_id != write_id:
            slot.close()
            return None
        found = contents(slot)
        if found.header.world != world:
            raise IncompleteCheckpointError(
                f"rank {now.rank} has staged step {now.step} in a world of {now.world}: "
                f"expected {world}"
            )
    except BaseException:
        slot.close()
        raise
    sums = {key: xxhash.xxh3_64_intdigest(value) for key, value in found.objects.items()}
    at = [at for chunk, at in found.layout if chunk.private or not found.header.private_only]
    return OpenSlot(slot, found, share_of(found, sums), at)


def share_of(found: SlotContents, sums: Mapping[str, int]) -> WriteShare:
    """Return what a slot can contribute to a checkpoint.

    If the slot is ``private_only``, the chunks that several ranks share are left out.

    Args:
        found: contents of the slot.
        sums: XXH3 of each object, by key.
    """
    private_only = found.header.private_only
    rows = [
        (chunk, xxh3)
        for chunk, xxh3 in zip(found.layout.chunks, found.digests, strict=True)
        if chunk.private or not private_only
    ]
    return WriteShare(
        rank=found.header.rank,
        private_only=private_only,
        metric=found.header.metric,
        certified=found.header.certified,
        chunks=tuple(chunk for chunk, _ in rows),
        digests=tuple(xxh3 for _, xxh3 in rows),
        objects=tuple(SharedObject(key, len(v), sums[key]) for key, v in found.objects.items()),
    )


def close_slots(held: Iterable[OpenSlot]) -> None:
    """Close slots, which unlocks them; errors are ignored."""
    for one in held:
        with contextlib.suppress(OSError):
            one.slot.close()
