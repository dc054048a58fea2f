"""Copies the state of a worker into a slot of shared memory while the training goes on.

:meth:`Stager.stage` returns when it has copied everything that may change before the next optimizer
step. The rest consists of the parameters and the optimizers' state; a :class:`StagedTensor` marks
it as ``deferrable``. One thread copies the rest. The *fence* waits for this thread. It is torch's
global hook before each optimizer step.

The training's thread helps with the copy while it waits at the fence: its processor has nothing
else to do. It also holds the GIL, for which the copying thread may have waited. Both threads copy
memory through ctypes, which releases the GIL. They sum the bytes at the source during the copy. A
reader therefore compares a sealed slot with what the training had. The alternative would be to open
the fence after the copy and to sum the slot later. This would save the waiting thread a sixth of
the work. But a bit that flipped in the slot before the sum would be sealed as correct.

torch cannot forbid a change of what must not change, so the stager detects changes. When it finds
one, it discards the save. All later saves are then copied before ``stage`` returns. It checks:

- the version of the tensor, between ``stage`` and the end of the copy. torch increments it with
  each operation in place, but not for operations through ``.data``, nor in some fused kernels;
- a few bytes of each tensor at changing offsets, between ``stage`` and the copy of the tensor, and
  again before the fence opens;
- the sum of a sample of the tensors, between their copy and the opening of the fence. The sample is
  all tensors in the first two saves, and a sixteenth of the bytes afterwards.

Two edits through ``.data`` can remain undetected: an edit of some elements in this short time, and
any edit that is still in progress when the fence opens.

On GPUs the copies are enqueued on a separate stream, into slots that are registered with CUDA. The
fence is then an event for which the training's stream waits. This has not been run on a GPU yet.
"""

import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmFullError, ShmSlot
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.slots import Layout, SlotHeader, TensorChunk, encode_objects
from dlrover_py.trainer.copy_items import (
    CopyItem,
    StagedTensor,
    enqueue,
    key_of_changed_bytes,
    key_of_changed_version,
    sample_bytes,
    take_item,
)
from dlrover_py.trainer.slot_pool import SlotPool
from dlrover_py.trainer.torch_compat import (
    constant_when_traced,
    traces_one_graph,
    untraced,
    version_of,
)

log = logging.getLogger(__name__)

CLONED = 16 << 20
"""Greatest number of bytes of tensors that are not deferrable for which ``stage`` makes a clone. If
there are more, the thread copies them into the slot first, and ``stage`` waits for that."""
SAMPLE_DIVISOR = 16
"""Divisor of the deferred bytes: one part of so many is summed a second time."""
FULL_CHECK_SAVES = 2
"""Number of first saves in which all deferred bytes are summed a second time."""


@dataclass(frozen=True, slots=True)
class StagingContext:
    """The fields of a :class:`SlotHeader` that are the same for all saves of a worker."""

    job: str
    """Uid of the job."""
    round: int = 0
    """Number of the rendezvous round."""
    world: int = 1
    """Number of ranks."""
    rank: int = 0
    """Global rank of this worker."""


@dataclass(eq=False)
class _SlotSpace:
    """A request to allocate memory for the slots."""

    nbytes: int
    """Bytes that each slot must have."""
    slot: ShmSlot | None = None
    """The slot that is filled next; None if it is not known yet."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when the request has succeeded or failed."""
    error: Exception | None = None
    """Why it has failed; None if it has not."""


@dataclass(eq=False)
class StagedSave:
    """A save that is under way. All its events are set in the end, whether it succeeds or fails."""

    step: int
    slot: ShmSlot
    layout: Layout
    table: bytes
    """The encoded layout."""
    objects: bytes
    """The encoded values that are not tensors."""
    facts: dict[str, object]
    """Fields of the slot's header."""
    need: int
    """Bytes that the slot must have."""
    first: list[CopyItem] = field(default_factory=list)
    """Copies of tensors that are not deferrable."""
    clone: bytearray = field(default_factory=bytearray)
    """A clone of all tensors in ``first``; empty if they are too large for one."""
    deferred: list[CopyItem] = field(default_factory=list)
    """Copies of deferrable tensors in host memory."""
    on_device: list[CopyItem] = field(default_factory=list)
    """Copies of tensors on GPUs."""
    events: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs of a device and the event after its last copy."""
    left: tuple[deque[CopyItem], deque[CopyItem]] = field(
        default_factory=lambda: (deque(), deque())
    )
    """Copies that no thread has taken yet: of ``first`` and of ``deferred``."""
    sums: list[int] = field(default_factory=list)
    """XXH3 of each tensor, in the layout's order."""
    help_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by a thread that copies beside the stager's thread."""
    error: BaseException | None = None
    """The error of the thread that helped; None if there was none."""
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when the slot may be written."""
    fenced: bool = False
    """The training's streams wait for ``events``. The tensors' versions may change from then on."""
    awaited: bool = False
    """The training's thread waits for this save."""
    captured: threading.Event = field(default_factory=threading.Event)
    """Set when everything that is not deferrable is copied."""
    opened: threading.Event = field(default_factory=threading.Event)
    """Set when the rest is copied, too: the optimizer may step."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when the slot is sealed, or the save has failed."""
    header: SlotHeader | None = None
    """The header of the sealed slot; None before, or if the save has failed."""
    why: str = ""
    """Why the save has failed, in words; empty if it has not."""
    moved: str = ""
    """Key of a tensor that was changed while it was being copied; empty if there is none."""
    copied_s: float = 0.0
    """Seconds that the copy in host memory took."""


class Stager:
    """The slots of a worker, the thread that fills them, and the fence."""

    def __init__(
        self,
        paths: Sequence[Path],
        context: StagingContext,
        *,
        extra: Path | None = None,
        on_sealed: Callable[[SlotHeader], None] = lambda _: None,
        on_failed: Callable[[str], None] = lambda _: None,
        copy: Callable[[int, memoryview, int], int] = shm.copy_summed,
    ) -> None:
        """Open the slots and install the fence, which remains until :meth:`close`.

        Args:
            paths: paths of the slots (:func:`dlrover_py.checkpoint.shm.slots_of`).
            context: the constant fields of the headers.
            extra: path of a further slot for :meth:`grow`; None if there is none.
            on_sealed: receives the header of each sealed slot, in the stager's thread.
            on_failed: receives the reason of each failed save, in the stager's thread.
            copy: copies from an address into memory, in chunks of the given number of bytes, and
                returns the XXH3.

        Raises:
            OSError: the folder cannot be written.
            ConfigError: a slot has a newer format.
        """
        self.place = context
        self.synchronous = ""
        """Why no copy is deferred any more; empty while copies are deferred."""
        self.waited_s = 0.0
        """Total seconds that the fence has made optimizers wait."""
        self.waiter: int | None = None
        """Id of the thread that waits at the fence; None if there is none."""
        self._pool = SlotPool(paths, extra)
        self._on_sealed, self._on_failed, self._copy = on_sealed, on_failed, copy
        self._pid = os.getpid()
        self._current_save: StagedSave | None = None
        self._saves = 0
        self._cursor = 0
        self._cached_layout: (
            tuple[list[TensorChunk], list[str], tuple[Layout, bytes, str, list[int]]] | None
        ) = None
        self._streams: dict[Any, Any] = {}
        self._queue: deque[StagedSave | _SlotSpace] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dlrover-staging", daemon=True)
        self._thread.start()
        self._hook = register_optimizer_step_pre_hook(_fence_of(weakref.ref(self)))
        _all_stagers.add(self)

    # --- The training's thread ---

    def found(self) -> list[SlotHeader | None]:
        """Return the header of each complete slot, else None. This reads one page per slot."""
        return self._pool.found()

    def warm(self, nbytes: int) -> None:
        """Request memory for a state of this size; the stager's thread allocates it later.

        Nothing is reported if there is too little memory: the next save reports it. Nothing is done
        in a forked child.
        """
        if self._is_own_process():
            self._submit(_SlotSpace(nbytes + shm.OBJECT_HEADROOM))

    def stage(
        self,
        step: int,
        leaves: Sequence[StagedTensor],
        objects: Sequence[tuple[str, bytes]] = (),
        *,
        timeline: int = 0,
        persist: bool = False,
        metric: float | None = None,
        certified: bool = False,
        copy: bool = False,
        protected: Collection[CheckpointId] = (),
    ) -> StagedSave | None:
        """Copy what cannot wait, and start the copy of the rest.

        The call waits for a previous save that is still under way, and for this one, too, once
        `synchronous` is set. A forked child must not call it.

        Args:
            step: step of the training.
            leaves: the tensors of the state.
            objects: the keys and encodings of its other values.
            timeline: number of the timeline in this round.
            persist: whether the checkpoint is to go to storage.
            metric: how good the step is; None if not known.
            certified: whether all replicas have equal parameters.
            copy: whether this is the checkpoint that peers copy. It is not if the further slot had
                to be removed for lack of memory (``facts["copy"]``).
            protected: ids of checkpoints whose slots must not be filled.

        Returns:
            The save, which may still fail (`StagedSave.done`); None if no slot is free now.

        Raises:
            ShmFullError: there is not enough memory; no slot was filled. The further slot may have
                been removed.
            OSError: only with tensors on a GPU: a slot cannot be changed or mapped.
            torch.cuda.CudaError: only with tensors on a GPU: CUDA does not register the slot, whose
                earlier checkpoint is erased by then.
        """
        assert self._is_own_process(), "a forked child does not save"
        self.wait()
        layout, table, shard_group, order = self._layout(leaves, [key for key, _ in objects])
        leaves = [leaves[index] for index in order]
        encoded = encode_objects(objects)
        need = layout.end + len(table) + 8 * len(layout) + len(encoded)
        if any(slot.size < need for slot in self._pool.slots):
            need += shm.OBJECT_HEADROOM
            copy = self._pool.make_room(need) and copy
        slot = self._pool.take(protected)
        if slot is None:
            return None
        facts: dict[str, object] = {
            "step": step,
            "timeline": timeline,
            "job": self.place.job,
            "round": self.place.round,
            "world": self.place.world,
            "rank": self.place.rank,
            "part": shard_group,
            "persist": persist,
            "metric": metric,
            "certified": certified,
            "copy": copy,
            "private_offset": layout.private_offset,
        }
        job = StagedSave(step, slot, layout, table, encoded, facts, need)
        try:
            waits = self._capture(job, leaves)
        except BaseException:
            slot.unlock()
            raise
        self._saves += 1
        self._submit(job)
        # not earlier: a signal handler may call close() here, which would wait for the save
        self._current_save = job
        if waits:
            job.awaited = True
            self._help(job, job.left[:1])
            _wait_while_alive(job.captured, self._thread)
            job.awaited = False
        if self.synchronous:
            _wait_while_alive(job.done, self._thread)
        return job

    def grow(self) -> bool:
        """Add the further slot. Return False if there is none, or not enough memory for it.

        If it is not there yet, this waits for the save that is under way.
        """
        if self._pool.may_add_extra_slot:
            self.wait()
        return self._pool.grow()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the current save is sealed or has failed. Return False after the timeout.

        True does not mean that it was sealed. It is also the result if there is no save, and in a
        forked child.
        """
        job = self._current_save
        if job is None or not self._is_own_process():
            return True
        return _wait_while_alive(job.done, self._thread, timeout_s)

    def close(self) -> None:
        """Wait for the save that is under way, remove the fence, and release the slots.

        A second call does nothing, and neither does one in a forked child.
        """
        if not self._is_own_process() or self._closed:
            return
        self.wait()
        self._hook.remove()
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._pool.close()

    def close_in_child(self) -> None:
        """Detach a forked child from the stager, so that it holds no lock."""
        self._current_save = None
        self._pool.close_in_child()

    def fence(self) -> None:
        """Make an optimizer's step wait for the copies that must be complete before it.

        torch calls this before each step of any optimizer that is not compiled into one graph, in
        the thread of the step. The GPUs' current streams wait for copies of GPU tensors; the thread
        does not. It returns immediately if no save is under way.
        """
        self.waiter = threading.get_ident()
        try:
            self._await()
        finally:
            self.waiter = None

    def _await(self) -> None:
        """Wait until an optimizer may step, and help with the copy meanwhile; see :meth:`fence`.

        Nothing is done if no save is under way, or in a forked child. On GPUs the stream of the
        training waits for the copies, not this thread. `waited_s` counts the time.
        """
        job = self._current_save
        if job is None or job.done.is_set() or not self._is_own_process():
            return
        began = time.perf_counter()
        if job.on_device and not job.fenced:
            job.moved = job.moved or key_of_changed_version(job.on_device)
            job.fenced = True
        for device, event in job.events:
            torch.cuda.current_stream(device).wait_event(event)
        job.awaited = True
        self._help(job, job.left)
        _wait_while_alive(job.opened, self._thread)
        self.waited_s += time.perf_counter() - began

    def unbroken(self) -> bool:
        """Return whether torch's compiler makes one graph of the step that it traces.

        The compiler calls this during the trace. Such a graph (``fullgraph=True``) cannot wait for
        a copy. The save that is under way is therefore awaited now, before the graph runs. From
        then on, nothing is deferred, and a warning is logged once. If the result is false, nothing
        is done, because the hook can wait.
        """
        if not traces_one_graph():
            return False
        self.fence()
        if not self.synchronous:
            self.synchronous = "an optimizer's step is compiled into one graph (fullgraph=True)"
            log.warning(
                "checkpoints are copied before save() returns, which takes longer: %s, which "
                "cannot wait for a copy",
                self.synchronous,
            )
        return True

    def _is_own_process(self) -> bool:
        """Return whether this process created the stager and is not a forked child."""
        return os.getpid() == self._pid

    def _submit(self, work: StagedSave | _SlotSpace) -> None:
        """Append work to the queue of the stager's thread, without waiting."""
        with self._wake:
            self._queue.append(work)
            self._wake.notify()

    def _layout(
        self, leaves: Sequence[StagedTensor], keys: list[str]
    ) -> tuple[Layout, bytes, str, list[int]]:
        """Return the layout of a state. It is cached: it rarely changes and is slow to make.

        Returns:
            The layout, the encoded layout, the digest of the shard group, and the index of each
            leaf in the layout's order.
        """
        chunks = [leaf.chunk for leaf in leaves]
        if (
            self._cached_layout is None
            or self._cached_layout[0] != chunks
            or self._cached_layout[1] != keys
        ):
            order = sorted(range(len(chunks)), key=lambda index: chunks[index].private)
            layout = Layout(chunks)
            shard_group = f"{shm.digest(layout.part(keys)):016x}"
            self._cached_layout = chunks, keys, (layout, layout.encode(), shard_group, order)
        return self._cached_layout[2]

    def _capture(self, job: StagedSave, leaves: Sequence[StagedTensor]) -> bool:
        """Record what to copy, and from where. Return whether the caller must wait for copies.

        Copies from GPUs are enqueued here. Tensors in host memory that are not deferrable are
        cloned here, if they have at most `CLONED` bytes together. Otherwise the result is True: the
        stager's thread must copy them before the caller goes on.

        Args:
            job: the save, which receives the copies to be made.
            leaves: the tensors, in the order of its layout.
        """
        first: list[CopyItem] = []
        seed = self._saves * 0x9E3779B97F4A7C15
        for number, (leaf, offset) in enumerate(zip(leaves, job.layout.slot_offsets, strict=True)):
            tensor = leaf.tensor
            nbytes = tensor.nbytes
            if not tensor.is_cpu:
                item = CopyItem(
                    leaf, number, offset, nbytes, tensor.detach(), 0, version_of(tensor)
                )
                job.on_device.append(item)
            elif leaf.deferrable and not self.synchronous and tensor.is_contiguous():
                # A detached tensor keeps these bytes. A parameter may get other memory meanwhile,
                # and the old values are the ones to save.
                source = tensor.detach()
                address = source.data_ptr()
                peeks = sample_bytes(address, nbytes, seed)
                item = CopyItem(
                    leaf, number, offset, nbytes, source, address, version_of(source), peeks
                )
                job.deferred.append(item)
            else:
                if not tensor.is_contiguous():
                    tensor = tensor.detach().contiguous()
                first.append(CopyItem(leaf, number, offset, nbytes, tensor, tensor.data_ptr()))
        job.first = first
        size = sum(item.nbytes for item in first)
        clone = size <= CLONED and not self.synchronous
        if clone:  # for many small tensors, torch's clone would take ten times as long
            job.clone = bytearray(size)
            offset = ctypes.addressof(ctypes.c_char.from_buffer(job.clone)) if size else 0
            for item in first:
                ctypes.memmove(offset, item.address, item.nbytes)
                item.address = offset
                offset += item.nbytes
        job.sums = [0] * len(job.layout)
        # The largest go first, so that two copying threads end at the same time.
        job.deferred.sort(key=lambda item: item.nbytes, reverse=True)
        job.left = deque(first), deque(job.deferred)
        if job.on_device:
            self._enqueue(job)
        return bool(first) and not clone

    # --- The copying thread ---

    def _run(self) -> None:
        """Handle requests until the stager is closed. This is the body of the stager's thread."""
        while (work := self._next()) is not None:
            if isinstance(work, _SlotSpace):
                try:
                    with self._pool.lock:
                        self._pool.reserve(work.nbytes, work.slot)
                except (ShmFullError, OSError) as error:
                    work.error = error  # reported by the save that needs it
                finally:
                    work.done.set()
                continue
            job = work
            try:
                self._fill(job)
            except BaseException as error:  # noqa: BLE001 - the training goes on; said below
                job.why = f"{type(error).__name__}: {error}"
            finally:
                for items in job.left:
                    items.clear()
                with job.help_lock:  # no thread writes into the slot from here on
                    job.begun.set()
                job.opened.set()
                job.captured.set()
                self._finish(job)

    def _next(self) -> StagedSave | _SlotSpace | None:
        """Wait for a request, and populate memory meanwhile; None once the stager is closed."""
        while True:
            with self._wake:
                index = self._pool.next_unpopulated()
                while not self._queue and not self._closed and index is None:
                    self._wake.wait()
                if self._queue:
                    return self._queue.popleft()
                if self._closed:
                    return None
            if index is not None:
                self._pool.populate(index)

    def _fill(self, job: StagedSave) -> None:
        """Copy everything into the slot, check for changes, and seal the slot.

        The event ``captured`` is set once nothing that may change is left to copy, and ``opened``
        once the optimizer may step. If a tensor was changed meanwhile, the slot stays empty, and
        later saves are not deferred. An error of the thread that helped with the copy is raised
        here.
        """
        began = time.perf_counter()
        self._pool.reserve(job.need, job.slot)
        job.slot.begin()
        job.begun.set()
        for items, safe in zip(job.left, (job.captured, None), strict=True):
            self._copy_items(job, items)
            with job.help_lock:  # the other thread may still copy the last item
                if job.error is not None:
                    raise job.error
            if safe is not None:
                safe.set()
        job.moved = (
            job.moved
            or key_of_changed_version(job.deferred)
            or self._key_of_changed_sample(job.deferred, job.sums)
        )
        job.moved = job.moved or key_of_changed_bytes(job.deferred)
        job.copied_s = time.perf_counter() - began
        job.opened.set()
        for _, event in job.events:
            event.synchronize()
        moved = key_of_changed_version(job.on_device)
        if not job.fenced:  # read after the versions: otherwise a step may have begun in between
            job.moved = job.moved or moved
        view = job.slot.view()
        for item in job.on_device:
            job.sums[item.number] = shm.digest(view[item.at : item.at + item.nbytes])
        if job.moved:
            self.synchronous = f"{job.moved} was changed between save() and the optimizer's step"
            job.why = self.synchronous
            return
        job.header = job.slot.seal(job.table, job.sums, job.objects, job.layout.end, **job.facts)

    def _copy_items(self, job: StagedSave, items: deque[CopyItem]) -> None:
        """Copy the remaining items. Another thread may do the same at the same time.

        The digest of each tensor is recorded. If the bytes of a sample differ from those at
        ``stage``, the tensor's key is recorded in ``moved``.
        """
        while (item := take_item(items)) is not None:
            target = job.slot.view()[item.at : item.at + item.nbytes]
            chunk = shm.CACHED_COPY_BYTES if job.awaited else shm.COPY_BYTES
            job.sums[item.number] = self._copy(item.address, target, chunk)
            for offset, bytes_then in item.samples:
                if target[offset : offset + len(bytes_then)] != bytes_then:
                    job.moved = job.moved or item.leaf.chunk.key

    def _help(self, job: StagedSave, left: Sequence[deque[CopyItem]]) -> None:
        """Copy the remaining items in the training's thread. An error costs only this save.

        It waits until the slot may be written. An exception other than an Exception, such as
        KeyboardInterrupt, is raised as well.
        """
        if not _wait_while_alive(job.begun, self._thread):
            return  # the slot still has its old content, and readers may use it
        for items in left:
            with job.help_lock:
                try:
                    self._copy_items(job, items)
                except Exception as error:  # noqa: BLE001 - said by the copying thread
                    job.error = error
                except BaseException as error:
                    job.error = error
                    raise

    def _key_of_changed_sample(self, items: Sequence[CopyItem], sums: Sequence[int]) -> str:
        """Sum some tensors again at the source. Return the key of one that has changed, or "".

        Each save continues with other tensors, so "" does not mean that none has changed.
        """
        budget = sum(item.nbytes for item in items)
        if self._saves > FULL_CHECK_SAVES:
            budget //= SAMPLE_DIVISOR
        for _ in items:
            if budget <= 0:
                break
            self._cursor = (self._cursor + 1) % len(items)
            item = items[self._cursor]
            budget -= item.nbytes
            there = (ctypes.c_char * item.nbytes).from_address(item.address)
            if shm.digest(memoryview(there)) != sums[item.number]:
                return item.leaf.chunk.key
        return ""

    def _finish(self, job: StagedSave) -> None:
        """Release everything that the save holds, and report its outcome.

        A failure is logged. Its reason is also passed to ``on_failed``, unless a tensor was changed
        meanwhile. An exception of ``on_sealed`` or ``on_failed`` is logged and not raised.
        """
        try:
            job.slot.unlock()
            job.first, job.deferred, job.on_device, job.events = [], [], [], []
            job.clone = bytearray()
            if job.header is not None:
                self._on_sealed(job.header)
            elif job.moved:
                log.warning(
                    "checkpoint of step %d is discarded: %s. Later ones are copied before "
                    "save() returns, which takes longer",
                    job.step,
                    job.why,
                )
            else:
                log.warning("checkpoint of step %d failed: %s", job.step, job.why)
                self._on_failed(job.why)
        except BaseException:  # a message that cannot be sent must not end this thread
            log.exception("checkpoint of step %d", job.step)
        finally:
            job.done.set()

    def _enqueue(self, job: StagedSave) -> None:
        """Enqueue all copies from GPUs on streams of their own, and return before they are done.

        The training's streams wait for the copies of tensors that are not deferrable. Once
        ``synchronous`` is set, they wait for all copies. The calling thread waits only until every
        slot has its memory. Then the slot's earlier checkpoint is erased.

        Raises:
            ShmFullError: there is not enough memory.
            OSError: a slot cannot be changed or mapped.
            torch.cuda.CudaError: CUDA does not register the memory.
        """
        room = _SlotSpace(job.need, job.slot)
        self._submit(room)
        _wait_while_alive(room.done, self._thread)
        if room.error is not None:
            raise room.error
        job.slot.begin()
        view = job.slot.view()
        self._pool.pin(job.slot, view)
        for device in {item.source.device for item in job.on_device}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            here = [item for item in job.on_device if item.source.device == device]
            last = enqueue(here, view, self._streams[device], wait_for_all=bool(self.synchronous))
            job.events.append((device, last))
        job.on_device.sort(key=lambda item: item.number)


_all_stagers: "weakref.WeakSet[Stager]" = weakref.WeakSet()
"""All stagers of this process, for :func:`_close_all_in_child`."""


def _close_all_in_child() -> None:
    """Detach all stagers in a forked child."""
    for stager in list(_all_stagers):
        stager.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)


def _fence_of(stager: "weakref.ref[Stager]") -> Callable[..., None]:
    """Return the hook of a stager. It does not keep the stager alive.

    torch's compiler traces the hook with the optimizer's step. A lock cannot be compiled. The graph
    is therefore broken there or, where that is not allowed, works without the hook. This is decided
    once, during the trace. The compiler traces again for the hook of another stager, or if there is
    none.
    """

    @untraced
    def wait() -> None:
        if (found := stager()) is not None:
            found.fence()

    @constant_when_traced
    def one_graph() -> bool:
        return (found := stager()) is not None and found.unbroken()

    def fence(*_: object) -> None:
        if not (torch.compiler.is_dynamo_compiling() and one_graph()):
            wait()

    return fence


def _wait_while_alive(
    event: threading.Event, thread: threading.Thread, limit_s: float | None = None
) -> bool:
    """Wait for an event that the thread sets; return whether it is set.

    False: the time is over, or, without a limit, the thread has ended without setting it.
    """
    if limit_s is not None:
        return event.wait(limit_s)
    while thread.is_alive():
        if event.wait(5.0):
            return True
    return event.is_set()
