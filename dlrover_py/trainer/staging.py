"""Copies a worker's state into a slot of shared memory, while the training goes on.

:meth:`Stager.stage` returns when everything that may change before the next optimizer step has
been copied. The rest (parameters and the optimizers' state: a :class:`Leaf` says ``deferrable``) is
copied by one thread, for which the *fence* waits: torch's global hook before each optimizer step.
Who waits helps: its processor has nothing else to do, and it has the GIL, for which the thread may
have stood in line. Both move memory through ctypes, which does without the GIL, and sum it on the
way, at the source: so what is sealed is compared by each reader with what the training had. To open
the fence after the copy and sum the slot later would save the waiting one a sixth of the work, and
a bit that flipped in the slot before that would be sealed as right.

What may not change is watched all the same, since torch cannot forbid it. A save is thrown away,
and all later ones are copied before ``stage`` returns, when one of these has changed:

- the tensor's version, which torch counts with each operation in place (but not for those of
  ``.data``, nor in some fused kernels), between ``stage`` and the end of the copy;
- a few bytes at changing places of each tensor, between ``stage`` and the tensor's copy, and once
  more before the fence opens;
- the sum of a sample of the tensors, between their copy and the opening of the fence: all of them
  in the first two saves, a sixteenth of the bytes afterwards.

Through ``.data`` an edit of some elements in this short time can go unnoticed, and one of all that
is still under way when the fence opens.

On GPUs the copies are enqueued on a stream of their own, into slots that CUDA has registered; the
fence is then an event which the training's stream waits for. This has not been run on a GPU yet.
"""

import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrover_py import arena
from dlrover_py.arena import NoRoom, Slot
from dlrover_py.protocol.checkpoint import Id, Layout, Piece, Summary, encode_objects

log = logging.getLogger(__name__)

CLONED = 16 << 20
"""What is not deferrable is cloned within ``stage`` if it is at most so many bytes; else the thread
copies it into the slot first, and ``stage`` waits for that."""
PEEK = 64
"""Bytes that are looked at in each of two places of a tensor, before, in and after its copy."""
SAMPLE = 16
"""This part of the deferred bytes is summed a second time."""
THOROUGH = 2
"""So many saves at first have all of them summed a second time."""
STRIDE = 32 << 20
"""Bytes of memory that are prepared at once: a save that begins meanwhile waits for so much."""


class Leaf(Protocol):
    """A box of the state, where it lies."""

    @property
    def piece(self) -> Piece:
        """What it is."""

    @property
    def tensor(self) -> Any:
        """The bytes: a plain local tensor of the piece's shape and type."""

    @property
    def deferrable(self) -> bool:
        """Nothing changes it before the next step of a hooked optimizer."""


@dataclass(frozen=True, slots=True)
class Place:
    """Who stages: the fields of a :class:`Summary` that stay."""

    job: str
    round: int = 0
    world: int = 1
    rank: int = 0


@dataclass(slots=True)
class _Item:
    """A copy to make."""

    leaf: Leaf
    number: int
    """In the layout."""
    at: int
    nbytes: int
    source: Any
    address: int
    version: int | None = None
    peeks: tuple[tuple[int, bytes], ...] = ()


@dataclass(eq=False)
class _Room:
    """Memory to have."""

    nbytes: int
    slot: Slot | None = None
    """Which is to be filled then."""
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


@dataclass(eq=False)
class Staging:
    """One save on its way. Its events are set whatever happens."""

    step: int
    slot: Slot
    layout: Layout
    table: bytes
    objects: bytes
    facts: dict[str, object]
    need: int
    """Bytes of the slot."""
    first: list[_Item] = field(default_factory=list)
    clone: bytearray = field(default_factory=bytearray)
    """Of all that is first."""
    deferred: list[_Item] = field(default_factory=list)
    on_device: list[_Item] = field(default_factory=list)
    events: list[tuple[Any, Any]] = field(default_factory=list)
    """A device, and the event after its last copy."""
    left: tuple[deque[_Item], deque[_Item]] = field(default_factory=lambda: (deque(), deque()))
    """What nobody has taken yet, of what is first and of what is deferred."""
    sums: list[int] = field(default_factory=list)
    """XXH3 of each piece."""
    helping: threading.Lock = field(default_factory=threading.Lock)
    """Held by who copies beside the thread."""
    error: BaseException | None = None
    """What the one who helped has met."""
    begun: threading.Event = field(default_factory=threading.Event)
    """The slot may be written."""
    fenced: bool = False
    """The training's streams wait for these events: versions may count on."""
    awaited: bool = False
    """The training does nothing else now."""
    captured: threading.Event = field(default_factory=threading.Event)
    """What is not deferrable is safe."""
    opened: threading.Event = field(default_factory=threading.Event)
    """So is the rest: the optimizer may step."""
    done: threading.Event = field(default_factory=threading.Event)
    """The slot is sealed, or this save has failed."""
    summary: Summary | None = None
    """Of the sealed slot."""
    why: str = ""
    """Why it has failed."""
    moved: str = ""
    """Key of a tensor that was changed while it was being copied."""
    copied_s: float = 0.0


def choose(found: Sequence[Summary | None], spared: Collection[Id]) -> list[int]:
    """Which slots may be filled, best first.

    Spared are the sets named, and of those that are to go to storage the newest: an older one
    would be given up for it anyway.

    Args:
        found: what each slot holds.
        spared: sets that are needed.
    """
    order = [s.age if s else (-1, -1, -1) for s in found]
    flagged = max((order[i] for i, s in enumerate(found) if s and s.persist), default=None)
    free = [
        i
        for i, s in enumerate(found)
        if not s or (s.id not in spared and not (s.persist and order[i] == flagged))
    ]
    return sorted(free, key=lambda i: order[i])


class Stager:
    """The slots of one worker, the thread that fills them, and the fence."""

    def __init__(
        self,
        paths: Sequence[Path],
        place: Place,
        *,
        extra: Path | None = None,
        told: Callable[[Summary], None] = lambda _: None,
        failed: Callable[[str], None] = lambda _: None,
        copy: Callable[[int, memoryview, int], int] = arena.copy_summed,
    ) -> None:
        """Open the slots; the fence stands until :meth:`close`.

        Args:
            paths: of the slots (:func:`dlrover_py.arena.place`).
            place: who stages.
            extra: a further slot, for :meth:`grow`.
            told: called by the thread with each slot that was sealed.
            failed: called by it with why one could not be.
            copy: from an address into memory, in chunks of so many bytes; gives the XXH3.

        Raises:
            OSError: the folder cannot be written.
        """
        self.place = place
        self.synchronous = ""
        """Why nothing is deferred any more; empty while it is."""
        self.waited_s = 0.0
        """What the fence has cost, all in all."""
        self.waiter: int | None = None
        """The thread that is at the fence."""
        self._slots = [Slot(path, write=True) for path in paths]
        self._prepared: list[int] = []
        """Bytes of each slot that are mapped; empty before a state is known: a load is faster."""
        self._preparing = threading.Lock()
        """Held while slots are made larger or mapped ahead of a save, or one comes or goes."""
        self._extra = extra
        self._older = set(self._slots)
        """Not filled by this one yet: what they hold may be of a world with larger parts."""
        self._told, self._failed, self._copy = told, failed, copy
        self._pid = os.getpid()
        self._job: Staging | None = None
        self._saves = 0
        self._cursor = 0
        self._shape: tuple[list[Piece], list[str], tuple[Layout, bytes, str, list[int]]] | None = (
            None
        )
        self._streams: dict[Any, Any] = {}
        self._pinned: dict[Slot, tuple[int, int]] = {}
        self._work: deque[Staging | _Room] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dlrover-staging", daemon=True)
        self._thread.start()
        self._hook = register_optimizer_step_pre_hook(_fence_of(weakref.ref(self)))
        _stagers.add(self)

    # --- the training's thread ---

    def found(self) -> list[Summary | None]:
        """What the slots hold whole; costs a read of a page each."""
        return [slot.summary() for slot in self._slots]

    def warm(self, nbytes: int) -> None:
        """Have memory for a state of this size, in the background; too little is told by a save."""
        if self._mine():
            self._put(_Room(nbytes + arena.SPARE))

    def stage(
        self,
        step: int,
        leaves: Sequence[Leaf],
        objects: Sequence[tuple[str, bytes]] = (),
        *,
        lap: int = 0,
        persist: bool = False,
        metric: float | None = None,
        copy: bool = False,
        spared: Collection[Id] = (),
    ) -> Staging | None:
        """Copy what cannot wait, and have the rest copied.

        A save that is still on its way is waited for.

        Args:
            step: of the training.
            leaves: the state's tensors.
            objects: its other values, encoded.
            lap: of this round.
            persist: it is to go to storage.
            metric: what the step is worth.
            copy: it is the one that peers copy, if there is a further slot.
            spared: sets whose slots are not to be filled.

        Returns:
            What comes of it; None if no slot is free now.

        Raises:
            NoRoom: there is not so much memory; nothing was changed.
        """
        assert self._mine(), "a forked child does not save"
        self.wait()
        layout, table, part, order = self._layout(leaves, [key for key, _ in objects])
        leaves = [leaves[index] for index in order]
        encoded = encode_objects(objects)
        need = layout.end + len(table) + 8 * len(layout) + len(encoded)
        if any(slot.size < need for slot in self._slots):
            need += arena.SPARE
            try:
                self._must_have(need)
            except NoRoom:
                if not self._do_without():
                    raise
                self._must_have(need)
                copy = False
        slot = self._take(spared)
        if slot is None:
            return None
        facts: dict[str, object] = {
            "step": step,
            "lap": lap,
            "job": self.place.job,
            "round": self.place.round,
            "world": self.place.world,
            "rank": self.place.rank,
            "part": part,
            "persist": persist,
            "metric": metric,
            "copy": copy,
            "private_at": layout.private_at,
        }
        job = Staging(step, slot, layout, table, encoded, facts, need)
        try:
            waits = self._capture(job, leaves)
        except BaseException:
            slot.unlock()
            raise
        self._saves += 1
        self._put(job)
        self._job = job  # not before: a signal's handler may end it here, and close() waits for it
        if waits:
            job.awaited = True
            self._help(job, job.left[:1])
            _outlast(job.captured, self._thread)
            job.awaited = False
        if self.synchronous:
            _outlast(job.done, self._thread)
        return job

    def grow(self) -> bool:
        """Have the further slot too; False if there is none, or no memory for it."""
        if self._extra is None:
            return False
        if self._extra == self._slots[-1].path:
            return True
        self.wait()
        need = max(slot.size for slot in self._slots) + arena.SPARE * (len(self._slots) + 1)
        slot = Slot(self._extra, write=True)
        with self._preparing:
            self._slots.append(slot)
            self._older.add(slot)
            if self._prepared:
                self._prepared.append(0)
        return need - slot.size <= arena.headroom(self._extra.parent) or not self._do_without()

    def _do_without(self) -> bool:
        """Let the further slot go, for want of memory; False if there is none."""
        if self._extra is None or self._extra != self._slots[-1].path:
            return False
        with self._preparing:
            slot = self._slots.pop()
            del self._prepared[len(self._slots) :]  # nobody looks at the two without the lock
            if slot in self._pinned:
                self._unpin(slot)
            slot.close()
        self._extra.unlink(missing_ok=True)
        self._extra = None
        log.warning(
            "no memory for a further slot that keeps what peers copy from being overtaken: "
            "after the loss of a node, what is in memory may be of different steps"
        )
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save on its way is sealed, or has failed; False if it took too long."""
        job = self._job
        if job is None or not self._mine():
            return True
        return _outlast(job.done, self._thread, timeout_s)

    def close(self) -> None:
        """Wait for the save on its way, open the fence for good, let go of the slots."""
        if not self._mine() or self._closed:
            return
        self.wait()
        self._hook.remove()
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        for slot in list(self._pinned):
            self._unpin(slot)
        for slot in self._slots:
            slot.close()

    def disarm(self) -> None:
        """In a forked child: have nothing to do with it, and hold no lock."""
        self._job = None
        for slot in self._slots:
            with suppress(OSError):
                slot.close()

    def fence(self) -> None:
        """Wait for what must be copied before an optimizer steps."""
        self.waiter = threading.get_ident()
        try:
            self._await()
        finally:
            self.waiter = None

    def _await(self) -> None:
        job = self._job
        if job is None or job.done.is_set() or not self._mine():
            return
        began = time.perf_counter()
        if job.on_device and not job.fenced:
            job.moved = job.moved or _moved(job.on_device)
            job.fenced = True
        for device, event in job.events:
            torch.cuda.current_stream(device).wait_event(event)
        job.awaited = True
        self._help(job, job.left)
        _outlast(job.opened, self._thread)
        self.waited_s += time.perf_counter() - began

    def unbroken(self) -> bool:
        """Whether torch's compiler, which asks as it traces a step, makes one graph of it.

        Such a graph (``fullgraph=True``) waits for nothing: the save on its way is waited for now,
        before it runs, and nothing is deferred any more.
        """
        from torch._dynamo.symbolic_convert import InstructionTranslator

        if not getattr(InstructionTranslator.current_tx(), "one_graph", True):
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

    def _mine(self) -> bool:
        return os.getpid() == self._pid

    def _put(self, work: Staging | _Room) -> None:
        with self._wake:
            self._work.append(work)
            self._wake.notify()

    def _layout(
        self, leaves: Sequence[Leaf], keys: list[str]
    ) -> tuple[Layout, bytes, str, list[int]]:
        """The same as last time, mostly: it takes longer to make than all else.

        Returns:
            The layout, encoded too, the digest of its part, and the leaves' places in its order.
        """
        pieces = [leaf.piece for leaf in leaves]
        if self._shape is None or self._shape[0] != pieces or self._shape[1] != keys:
            order = sorted(range(len(pieces)), key=lambda index: pieces[index].private)
            layout = Layout(pieces)
            part = f"{arena.digest(layout.part(keys)):016x}"
            self._shape = pieces, keys, (layout, layout.encode(), part, order)
        return self._shape[2]

    def _must_have(self, need: int) -> None:
        """See whether all slots can have this size before any is touched.

        Raises:
            NoRoom: they cannot.
        """
        more = sum(max(0, need - slot.size) for slot in self._slots)
        folder = self._slots[0].path.parent
        arena.check_room(folder, more, f"{len(self._slots)} slots of {need / 1e6:,.0f} MB need")

    def _take(self, spared: Collection[Id]) -> Slot | None:
        for index in choose(self.found(), spared):
            slot = self._slots[index]
            if not slot.lock(shared=False):
                continue
            now = slot.summary()  # somebody may just have written its first page anew
            if now is None or now.id not in spared:
                return slot
            slot.unlock()
        return None

    def _capture(self, job: Staging, leaves: Sequence[Leaf]) -> bool:
        """Note what is to be copied, and from where; says whether the thread must be waited for."""
        first: list[_Item] = []
        turn = self._saves * 0x9E3779B97F4A7C15
        for number, (leaf, at) in enumerate(zip(leaves, job.layout.positions, strict=True)):
            tensor = leaf.tensor
            nbytes = tensor.nbytes
            if not tensor.is_cpu:
                item = _Item(leaf, number, at, nbytes, tensor.detach(), 0, _version(tensor))
                job.on_device.append(item)
            elif leaf.deferrable and not self.synchronous and tensor.is_contiguous():
                # Detached, it keeps these bytes: a parameter may be given others meanwhile, and
                # what it had is what is saved.
                source = tensor.detach()
                address = source.data_ptr()
                peeks = _peeks(address, nbytes, turn)
                item = _Item(leaf, number, at, nbytes, source, address, _version(source), peeks)
                job.deferred.append(item)
            else:
                if not tensor.is_contiguous():
                    tensor = tensor.detach().contiguous()
                first.append(_Item(leaf, number, at, nbytes, tensor, tensor.data_ptr()))
        job.first = first
        size = sum(item.nbytes for item in first)
        clone = size <= CLONED and not self.synchronous
        if clone:  # many small ones: torch's clone would take ten times as long
            job.clone = bytearray(size)
            at = ctypes.addressof(ctypes.c_char.from_buffer(job.clone)) if size else 0
            for item in first:
                ctypes.memmove(at, item.address, item.nbytes)
                item.address = at
                at += item.nbytes
        job.sums = [0] * len(job.layout)
        # The largest first, so that two who copy end together.
        job.deferred.sort(key=lambda item: item.nbytes, reverse=True)
        job.left = deque(first), deque(job.deferred)
        if job.on_device:
            self._enqueue(job)
        return bool(first) and not clone

    # --- the copying thread ---

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, _Room):
                try:
                    with self._preparing:
                        self._reserve(work.nbytes, work.slot)
                except (NoRoom, OSError) as error:
                    work.error = error  # said by the save that needs it
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
                with job.helping:  # nobody writes into the slot any more
                    job.begun.set()
                job.opened.set()
                job.captured.set()
                self._finish(job)

    def _next(self) -> Staging | _Room | None:
        """Wait for work; prepare memory meanwhile."""
        while True:
            with self._wake:
                index = self._unprepared()
                while not self._work and not self._closed and index is None:
                    self._wake.wait()
                if self._work:
                    return self._work.popleft()
                if self._closed:
                    return None
            with self._preparing:
                if index is not None and index < len(self._prepared):
                    slot = self._slots[index]
                    try:
                        slot.populate(self._prepared[index], STRIDE)
                        self._prepared[index] += STRIDE
                    except (OSError, ValueError):  # it cannot be mapped
                        self._prepared[index] = slot.size  # said by the save that needs it

    def _unprepared(self) -> int | None:
        with self._preparing:
            for index, prepared in enumerate(self._prepared):
                if prepared < self._slots[index].size:
                    return index
        return None

    def _reserve(self, need: int, filled: Slot | None = None) -> None:
        """Have all slots, before any is filled; of the one that is, no more than is needed.

        Raises:
            NoRoom: nothing was taken.
        """
        self._prepared = self._prepared or [0] * len(self._slots)
        # Once: a state may be larger at some saves than at others.
        if filled is not None and filled in self._older:
            self._older.discard(filled)
            if filled.size > need + arena.SURPLUS:
                self._unpin(filled)
                filled.give_back(need + arena.SPARE)  # it is locked: nobody has it mapped
                self._prepared[self._slots.index(filled)] = 0
        before = [slot.size for slot in self._slots]
        if min(before) >= need:
            return
        with arena.turn(self._slots[0].path.parent):
            self._must_have(need)
            for slot in list(self._pinned):
                self._unpin(slot)
            try:
                for slot in self._slots:
                    slot.reserve(need)
            except NoRoom:
                for slot, size in zip(self._slots, before, strict=True):
                    if slot.size > size:
                        slot.give_back(size)
                raise
            finally:
                self._prepared = [0] * len(self._slots)

    def _fill(self, job: Staging) -> None:
        began = time.perf_counter()
        self._reserve(job.need, job.slot)
        job.slot.begin()
        job.begun.set()
        for items, safe in zip(job.left, (job.captured, None), strict=True):
            self._move(job, items)
            with job.helping:  # the last one may be in other hands
                if job.error is not None:
                    raise job.error
            if safe is not None:
                safe.set()
        job.moved = job.moved or _moved(job.deferred) or self._sampled(job.deferred, job.sums)
        job.moved = job.moved or _edited(job.deferred)
        job.copied_s = time.perf_counter() - began
        job.opened.set()
        for _, event in job.events:
            event.synchronize()
        moved = _moved(job.on_device)
        if not job.fenced:  # looked at after the versions: else a step may have begun meanwhile
            job.moved = job.moved or moved
        view = job.slot.view()
        for item in job.on_device:
            job.sums[item.number] = arena.digest(view[item.at : item.at + item.nbytes])
        if job.moved:
            self.synchronous = f"{job.moved} was changed between save() and the optimizer's step"
            job.why = self.synchronous
            return
        job.summary = job.slot.seal(job.table, job.sums, job.objects, job.layout.end, **job.facts)

    def _move(self, job: Staging, items: deque[_Item]) -> None:
        """Copy what is left, beside whoever else does."""
        while (item := _taken(items)) is not None:
            target = job.slot.view()[item.at : item.at + item.nbytes]
            chunk = arena.NEAR if job.awaited else arena.CHUNK
            job.sums[item.number] = self._copy(item.address, target, chunk)
            for at, bytes_then in item.peeks:
                if target[at : at + len(bytes_then)] != bytes_then:
                    job.moved = job.moved or item.leaf.piece.key

    def _help(self, job: Staging, left: Sequence[deque[_Item]]) -> None:
        """Copy what is left, in the training's thread; an error costs the save alone."""
        if not _outlast(job.begun, self._thread):
            return  # what the slot held is still there, for all who read it
        for items in left:
            with job.helping:
                try:
                    self._move(job, items)
                except Exception as error:  # noqa: BLE001 - said by the copying thread
                    job.error = error
                except BaseException as error:
                    job.error = error
                    raise

    def _sampled(self, items: Sequence[_Item], sums: Sequence[int]) -> str:
        """Sum some tensors again where they lie; the key of one that has changed."""
        budget = sum(item.nbytes for item in items)
        if self._saves > THOROUGH:
            budget //= SAMPLE
        for _ in items:
            if budget <= 0:
                break
            self._cursor = (self._cursor + 1) % len(items)
            item = items[self._cursor]
            budget -= item.nbytes
            there = (ctypes.c_char * item.nbytes).from_address(item.address)
            if arena.digest(memoryview(there)) != sums[item.number]:
                return item.leaf.piece.key
        return ""

    def _finish(self, job: Staging) -> None:
        """Let go of everything, and say what has come of it."""
        try:
            job.slot.unlock()
            job.first, job.deferred, job.on_device, job.events = [], [], [], []
            job.clone = bytearray()
            if job.summary is not None:
                self._told(job.summary)
            elif job.moved:
                log.warning(
                    "checkpoint of step %d is thrown away: %s. Later ones are copied before "
                    "save() returns, which takes longer",
                    job.step,
                    job.why,
                )
            else:
                log.warning("checkpoint of step %d failed: %s", job.step, job.why)
                self._failed(job.why)
        except BaseException:  # a message that cannot be sent must not end this thread
            log.exception("checkpoint of step %d", job.step)
        finally:
            job.done.set()

    # --- GPUs ---

    def _enqueue(self, job: Staging) -> None:
        """Enqueue all copies from GPUs; those that cannot wait hold their stream up."""
        room = _Room(job.need, job.slot)
        self._put(room)
        _outlast(room.done, self._thread)
        if room.error is not None:
            raise room.error
        job.slot.begin()
        view = job.slot.view()
        self._pin(job.slot, view)
        for device in {item.source.device for item in job.on_device}:
            here = [item for item in job.on_device if item.source.device == device]
            here.sort(key=lambda item: item.leaf.deferrable)
            current = torch.cuda.current_stream(device)
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            side = self._streams[device]
            side.wait_stream(current)
            urgent = None
            with torch.cuda.stream(side):
                for item in here:
                    if urgent is None and item.leaf.deferrable and not self.synchronous:
                        urgent = side.record_event()
                    if item.nbytes:
                        source = item.source.contiguous().reshape(-1).view(torch.uint8)
                        target = torch.frombuffer(
                            view, dtype=torch.uint8, count=item.nbytes, offset=item.at
                        )
                        target.copy_(source, non_blocking=True)
                        item.source.record_stream(side)
                last = side.record_event()
            current.wait_event(urgent or last)
            job.events.append((device, last))
        job.on_device.sort(key=lambda item: item.number)

    def _pin(self, slot: Slot, view: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if self._pinned.get(slot) != (address, len(view)):
            self._unpin(slot)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(view), 0))
            self._pinned[slot] = (address, len(view))

    def _unpin(self, slot: Slot) -> None:
        if (known := self._pinned.pop(slot, None)) is not None:
            torch.cuda.cudart().cudaHostUnregister(known[0])


_stagers: "weakref.WeakSet[Stager]" = weakref.WeakSet()


def _disarm_all() -> None:
    for stager in list(_stagers):
        stager.disarm()


os.register_at_fork(after_in_child=_disarm_all)


def _fence_of(stager: "weakref.ref[Stager]") -> Callable[..., None]:
    """The hook; it does not keep the stager alive.

    torch's compiler traces it with the step. A lock is nothing to compile: the graph is broken
    there or, where it must not be, does without it. That is asked while it is traced, and once: for
    another stager's hook, as for none, the compiler traces anew.
    """

    def wait() -> None:
        if (found := stager()) is not None:
            found.fence()

    def unbroken() -> bool:
        return (found := stager()) is not None and found.unbroken()

    def fence(*_: object) -> None:
        if not (torch.compiler.is_dynamo_compiling() and unbroken()):
            wait()

    # What torch.compiler's decorators do, without importing the compiler.
    wait._torchdynamo_disable = True  # type: ignore[attr-defined]
    unbroken._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fence


def _outlast(
    event: threading.Event, thread: threading.Thread, limit_s: float | None = None
) -> bool:
    """Wait for what the thread will set; not for ever if it is gone."""
    if limit_s is not None:
        return event.wait(limit_s)
    while thread.is_alive():
        if event.wait(5.0):
            return True
    return event.is_set()


def _taken(items: deque[_Item]) -> _Item | None:
    try:
        return items.popleft()
    except IndexError:
        return None


def _version(tensor: Any) -> int | None:
    try:
        return int(tensor._version)
    except RuntimeError:  # a tensor of inference mode counts none
        return None


def _moved(items: Sequence[_Item]) -> str:
    for item in items:
        if _version(item.source) != item.version:
            return item.leaf.piece.key
    return ""


def _edited(items: Sequence[_Item]) -> str:
    """The key of one whose bytes are others at the places that were looked at: they may have been
    copied before they were changed, and the rest of it after that."""
    for item in items:
        for at, bytes_then in item.peeks:
            if ctypes.string_at(item.address + at, len(bytes_then)) != bytes_then:
                return item.leaf.piece.key
    return ""


def _peeks(address: int, nbytes: int, turn: int) -> tuple[tuple[int, bytes], ...]:
    """A few bytes at two places, others each time."""
    if nbytes < 2 * PEEK:
        return ((0, ctypes.string_at(address, nbytes)),)
    places = nbytes // PEEK
    one = turn % places
    two = (one + places // 2) % places
    return (
        (one * PEEK, ctypes.string_at(address + one * PEEK, PEEK)),
        (two * PEEK, ctypes.string_at(address + two * PEEK, PEEK)),
    )
