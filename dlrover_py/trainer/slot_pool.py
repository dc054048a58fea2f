"""The slots of a worker in shared memory: which one is filled next, and the memory for all."""

import ctypes
import logging
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmFullError, ShmSlot
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.slots import SlotHeader
from dlrover_py.trainer.torch_compat import register_host_memory, unregister_host_memory

log = logging.getLogger(__name__)

POPULATE_BYTES = 32 << 20
"""Bytes of memory that are populated in one step. A save that starts meanwhile waits for one
step."""


def fillable_slots(
    found: Sequence[SlotHeader | None], protected: Collection[CheckpointId]
) -> list[int]:
    """Return the indices of the slots that may be filled, the best first.

    Empty slots come first, then those with the oldest checkpoints. The protected checkpoints are
    kept. The newest checkpoint that is to go to storage is kept as well. An older one would be
    given up in favor of the newest anyway.

    Args:
        found: the header of each slot; None for an empty slot.
        protected: ids of checkpoints that must be kept.
    """
    newest_to_persist = max((s.id for s in found if s and s.persist), default=None)
    empty = [i for i, s in enumerate(found) if not s]
    free = [
        (s.id, i)
        for i, s in enumerate(found)
        if s and s.id not in protected and not (s.persist and s.id == newest_to_persist)
    ]
    return empty + [i for _, i in sorted(free)]


class SlotPool:
    """The slots of a worker. The training's thread and the stager's thread use it."""

    def __init__(self, paths: Sequence[Path], extra: Path | None) -> None:
        """Open the slots.

        Args:
            paths: paths of the slots (:func:`dlrover_py.checkpoint.shm.slots_of`).
            extra: path of a further slot for :meth:`grow`; None if there is none.

        Raises:
            OSError: the folder cannot be written.
            ConfigError: a slot has a newer format. It is not overwritten.
        """
        self.slots = [ShmSlot(path, write=True) for path in paths]
        for slot in self.slots:
            slot.check_format()
        self._populated: list[int] = []
        """Populated bytes of each slot. The list is empty until the size of a state is known,
        because that makes a load faster."""
        self.lock = threading.Lock()
        """Held while slots are enlarged, populated ahead of a save, added or removed."""
        self._extra_path = extra
        self._unfilled = set(self.slots)
        """Slots that this stager has not filled yet. They may hold larger shards of a smaller
        world."""
        self._pinned: dict[ShmSlot, tuple[int, int]] = {}
        """Slots whose memory is registered with CUDA: its address and size."""

    def found(self) -> list[SlotHeader | None]:
        """Return the header of each complete slot, else None. This reads one page per slot."""
        return [slot.header() for slot in self.slots]

    @property
    def has_extra_slot(self) -> bool:
        """Whether the further slot is one of the slots."""
        return self._extra_path is not None and self._extra_path == self.slots[-1].path

    @property
    def may_add_extra_slot(self) -> bool:
        """Whether there is a further slot that is not one of the slots."""
        return self._extra_path is not None and not self.has_extra_slot

    def grow(self) -> bool:
        """Add the further slot, unless it is there. Return whether it is one of the slots now.

        The further slot is the one of the constructor's ``extra``. False: there is none, or not
        enough memory. In the latter case a warning is logged, its file is removed, and it is never
        added again. An OSError is raised if its file cannot be opened.
        """
        if self._extra_path is None:
            return False
        if self.has_extra_slot:
            return True
        need = max(slot.size for slot in self.slots) + shm.OBJECT_HEADROOM * (len(self.slots) + 1)
        slot = ShmSlot(self._extra_path, write=True)
        with self.lock:
            self.slots.append(slot)
            self._unfilled.add(slot)
            if self._populated:
                self._populated.append(0)
        return (
            need - slot.size <= shm.headroom(self._extra_path.parent)
            or not self._remove_extra_slot()
        )

    def _remove_extra_slot(self) -> bool:
        """Remove the further slot and its file, for lack of memory. Return False if there is none.

        A warning is logged, and it is never added again.
        """
        if self._extra_path is None or not self.has_extra_slot:
            return False
        with self.lock:
            slot = self.slots.pop()
            del self._populated[len(self.slots) :]  # both lists are read under the lock only
            if slot in self._pinned:
                self._unpin(slot)
            slot.close()
        self._extra_path.unlink(missing_ok=True)
        self._extra_path = None
        log.warning(
            "no memory for the extra slot that keeps a checkpoint until the peers have copied it: "
            "after the loss of a node, the shards in memory may be of different steps"
        )
        return True

    def make_room(self, need: int) -> bool:
        """Check whether all slots can have this size; else remove the further slot.

        No memory is allocated.

        Returns:
            False if the further slot was removed.

        Raises:
            ShmFullError: the slots cannot have this size, even without the further one.
        """
        try:
            self._check_room(need)
        except ShmFullError:
            if not self._remove_extra_slot():
                raise
            self._check_room(need)
            return False
        return True

    def _check_room(self, need: int) -> None:
        """Check whether all slots can have this size, before any of them is changed.

        Raises:
            ShmTooSmallError: they cannot, and never will: slots of this node's workers alone are
                too large for the folder.
            ShmFullError: they cannot.
        """
        more = sum(max(0, need - slot.size) for slot in self.slots)
        folder, slots = self.slots[0].path.parent, f"{len(self.slots)} slots"
        try:
            shm.check_room(folder, more, f"{slots} of {shm.format_size(need)} need")
        except ShmFullError as error:
            own, size = {slot.path for slot in self.slots}, shm.capacity(folder)
            whole = need * len(self.slots)
            # Copies of other nodes' checkpoints give way, and none is there without this one.
            others = sum(
                path.stat().st_size
                for path in folder.iterdir()
                if path not in own and not path.name.startswith("peer-")
            )
            if whole + others <= size:
                raise
            beside = f", beside the {shm.format_size(others)} of other workers" if others else ""
            raise shm.ShmTooSmallError(
                f"the state of this worker needs {shm.format_size(whole)} of memory "
                f"({slots} of {shm.format_size(need)}){beside}, but {folder} can have "
                f"{shm.format_size(size)} in all, so it can never be saved: give the node's tmpfs "
                "a larger size (in Docker: --shm-size; on Kubernetes: the container's memory "
                "limit, or sizeLimit of its volume at /dev/shm), or set DLROVER_SHM_DIR to a "
                "larger tmpfs"
            ) from error

    def take(self, protected: Collection[CheckpointId]) -> ShmSlot | None:
        """Lock and return the best slot that may be filled; None if there is none now.

        A slot that another process has locked is passed over without waiting.
        """
        for index in fillable_slots(self.found(), protected):
            slot = self.slots[index]
            if not slot.lock(shared=False):
                continue
            now = slot.header()  # another process may just have rewritten its header
            if now is None or now.id not in protected:
                return slot
            slot.unlock()
        return None

    def reserve(self, need: int, filled: ShmSlot | None = None) -> None:
        """Allocate all slots before any is filled, and shrink a slot that is much too large.

        Slots that are large enough are not changed. Each slot is shrunk at most once, at its first
        fill. The call waits for the node's reservation lock if it allocates.

        Args:
            need: bytes that each slot must have.
            filled: the slot that is filled next. It keeps no more than it needs.

        Raises:
            ShmFullError: there is not enough memory; nothing was allocated. ``filled`` may have
                been shrunk.
        """
        self._populated = self._populated or [0] * len(self.slots)
        # Only once per slot: a state may be larger at some saves than at others.
        if filled is not None and filled in self._unfilled:
            self._unfilled.discard(filled)
            if filled.size > need + shm.MAX_SURPLUS:
                self._unpin(filled)
                # it is locked, so no other process has it mapped
                filled.shrink(need + shm.OBJECT_HEADROOM)
                self._populated[self.slots.index(filled)] = 0
        before = [slot.size for slot in self.slots]
        if min(before) >= need:
            return
        with shm.reservation_lock(self.slots[0].path.parent):
            self._check_room(need)
            for slot in list(self._pinned):
                self._unpin(slot)
            try:
                for slot in self.slots:
                    slot.reserve(need)
            except ShmFullError:
                for slot, size in zip(self.slots, before, strict=True):
                    if slot.size > size:
                        slot.shrink(size)
                raise
            finally:
                self._populated = [0] * len(self.slots)

    def next_unpopulated(self) -> int | None:
        """Return the index of a slot that is not populated completely; None if there is none.

        It is also None until the first `reserve`.
        """
        with self.lock:
            for index, prepared in enumerate(self._populated):
                if prepared < self.slots[index].size:
                    return index
        return None

    def populate(self, index: int) -> None:
        """Populate the next `POPULATE_BYTES` of a slot; one that cannot be mapped is skipped."""
        with self.lock:
            if index < len(self._populated):
                slot = self.slots[index]
                try:
                    slot.populate(self._populated[index], POPULATE_BYTES)
                    self._populated[index] += POPULATE_BYTES
                except (OSError, ValueError):  # it cannot be mapped
                    self._populated[index] = slot.size  # reported by the save that needs it

    def close(self) -> None:
        """Release the slots."""
        for slot in list(self._pinned):
            self._unpin(slot)
        for slot in self.slots:
            slot.close()

    def close_in_child(self) -> None:
        """Detach a forked child from the slots, so that it holds no lock; errors are ignored."""
        for slot in self.slots:
            with suppress(OSError):
                slot.close()

    def pin(self, slot: ShmSlot, view: memoryview) -> None:
        """Register a slot's memory with CUDA, if it is not registered yet."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if self._pinned.get(slot) != (address, len(view)):
            self._unpin(slot)
            register_host_memory(address, len(view))
            self._pinned[slot] = (address, len(view))

    def _unpin(self, slot: ShmSlot) -> None:
        """Remove the registration of a slot's memory."""
        if (known := self._pinned.pop(slot, None)) is not None:
            unregister_host_memory(known[0])
