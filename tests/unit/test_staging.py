"""The copying thread and the fence, with leaves made by hand."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmFullError, ShmSlot
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import SlotHeader, SlotRegion, TensorChunk, private_key
from dlrover_py.trainer import staging
from dlrover_py.trainer.slot_pool import fillable_slots
from dlrover_py.trainer.staging import StagedSave, Stager, StagingContext
from tests.ids import checkpoint_id
from tests.inside import pool_of
from tests.slots import no_more_files

DEADLINE_S = 30.0
PLACE = StagingContext(job="u1", round=2, world=1, rank=0)


@dataclass
class Leaf:
    chunk: TensorChunk
    tensor: torch.Tensor
    deferrable: bool = True


def leaf(key: str, tensor: torch.Tensor, *, deferrable: bool = True) -> Leaf:
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Leaf(
        TensorChunk(key, dtype, shape, shape, (0,) * len(shape)), tensor.detach(), deferrable
    )


class Gate:
    """Copies, but not before it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, source: int, target: memoryview, chunk: int) -> int:
        self.reached.set()
        assert self.open.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return shm.copy_summed(source, target, chunk)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Stager]]:
    made: list[tuple[Stager, Any]] = []

    def stager(folder: Path = tmp_path, number: int = 0, **options: Any) -> Stager:
        one = Stager(shm.slots_of(folder, number), PLACE, **options)
        made.append((one, options.get("copy")))
        return one

    yield stager
    for one, copy in made:
        if isinstance(copy, Gate):
            copy.open.set()
        one.close()


def read(path: Path) -> tuple[SlotHeader, dict[str, torch.Tensor]]:
    """What a slot holds; each tensor has been compared with its digest."""
    with ShmSlot(path) as slot:
        found = shm.contents(slot)
        tensors = {}
        for (chunk, at), digest in zip(found.layout, found.digests, strict=True):
            data = bytearray(slot.view()[at : at + chunk.nbytes])
            assert shm.digest(memoryview(data)) == digest, chunk.key
            dtype = getattr(torch, chunk.dtype)
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            tensors[chunk.key] = flat.reshape(chunk.shape)
        return found.header, tensors


def sealed(folder: Path) -> dict[int, Path]:
    return {header.step: path for path, header in shm.scan(folder)}


class Work:
    """A model whose every number is the step: parameters, and state of its optimizer."""

    def __init__(self, count: int = 4, size: int = 1 << 16) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(size)) for _ in range(count)]
        self.optimizer = Stamp(self.parameters)

    def step(self) -> None:
        self.optimizer.step()

    def leaves(self) -> list[Leaf]:
        found = [leaf(f"model.{n}", p) for n, p in enumerate(self.parameters)]
        for n, p in enumerate(self.parameters):
            state = self.optimizer.state[p].get("moment")
            if state is not None:
                found.append(leaf(f"optim.{n}", state))
        return found


class Stamp(torch.optim.Optimizer):
    """Sets each parameter and its state to the number of the step."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.number = 0

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not read
    def step(self, closure: Any = None) -> None:
        self.number += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("moment", torch.zeros_like(p)).fill_(self.number)
                p.fill_(self.number)


def half_copied(make: Callable[..., Stager], gate: Gate) -> tuple[Stager, Work, StagedSave]:
    """A save whose copy is under way, and goes on when the gate opens."""
    stager, work = make(copy=gate), Work()
    work.step()
    job = stager.stage(1, work.leaves())
    assert job is not None
    assert gate.reached.wait(DEADLINE_S)
    return stager, work, job


def test_what_was_staged_is_read(make: Callable[..., Stager], tmp_path: Path) -> None:
    stager = make()
    tensors = {
        "model.w": torch.randn(300, 200),
        "model.bf": torch.randn(70000).bfloat16(),
        "model.b": torch.randn(3),
        "model.t": torch.randn(8, 300).t(),
        "model.none": torch.empty(0, 4),
        "model.n": torch.tensor(7),
        private_key(0, "own"): torch.arange(5),
    }
    leaves = [leaf(key, t, deferrable=t.nbytes > 1000) for key, t in tensors.items()]
    job = stager.stage(5, leaves, [("epoch", b"3")], timeline=1, metric=0.5)
    assert job is not None
    assert stager.wait(DEADLINE_S)
    header, found = read(job.slot.path)
    assert (header.step, header.timeline, header.round, header.job) == (5, 1, 2, "u1")
    assert header.metric == 0.5
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key


def test_the_optimizer_waits_for_the_copy_and_not_longer(
    make: Callable[..., Stager], tmp_path: Path, gate: Gate
) -> None:
    stager, work, job = half_copied(make, gate)
    stepped = threading.Thread(target=work.step)
    stepped.start()
    stepped.join(0.05)
    assert stepped.is_alive(), "the fence is open while the copy is under way"
    gate.open.set()
    stepped.join(DEADLINE_S)
    assert not stepped.is_alive()
    assert stager.wait(DEADLINE_S)
    assert stager.waited_s > 0
    _, found = read(job.slot.path)
    assert {float(v) for t in found.values() for v in (t[0], t[-1])} == {1.0}


class Shared:
    """Copies; the stager's own thread waits with its first copy until somebody helps it."""

    def __init__(self) -> None:
        self.reached, self.helped = threading.Event(), threading.Event()
        self.by: list[str] = []
        self.error: BaseException | None = None
        """What who helps meets."""

    def __call__(self, source: int, target: memoryview, chunk: int) -> int:
        me = threading.current_thread().name
        self.by.append(me)
        if me == "dlrover-staging":
            self.reached.set()
            assert self.helped.wait(DEADLINE_S)
        else:
            self.helped.set()
            if self.error is not None:
                raise self.error
        return shm.copy_summed(source, target, chunk)


def test_who_waits_at_the_fence_helps(make: Callable[..., Stager]) -> None:
    copy, work = Shared(), Work()
    stager = make(copy=copy)
    work.step()
    job = stager.stage(1, work.leaves())
    assert copy.reached.wait(DEADLINE_S)
    work.step()  # returns, though the thread alone would never come to the end
    assert stager.wait(DEADLINE_S)
    assert set(copy.by) == {"dlrover-staging", threading.current_thread().name}
    assert len(copy.by) == 8, "each tensor once"
    assert job is not None
    assert {float(v) for t in read(job.slot.path)[1].values() for v in t.unique()} == {1.0}


def test_who_waits_in_save_helps(make: Callable[..., Stager]) -> None:
    copy, work = Shared(), Work()
    stager = make(copy=copy)
    work.step()
    averages = [
        leaf(f"ema.{n}", torch.full((staging.CLONED // 8,), 2.0), deferrable=False)
        for n in range(3)
    ]
    job = stager.stage(1, [*averages, *work.leaves()])
    assert job is not None
    assert threading.current_thread().name in copy.by
    for average in averages:
        average.tensor.fill_(3)
    assert stager.wait(DEADLINE_S)
    found = read(job.slot.path)[1]
    assert {float(found[f"ema.{n}"].unique()) for n in range(3)} == {2.0}


def test_an_error_of_who_helps_costs_the_save_alone(make: Callable[..., Stager]) -> None:
    copy, work = Shared(), Work()
    stager = make(copy=copy)
    work.step()
    copy.error = MemoryError("none")
    job = stager.stage(1, work.leaves())
    assert copy.reached.wait(DEADLINE_S)
    work.step()
    assert stager.wait(DEADLINE_S)
    assert job is not None
    assert (job.header, job.why) == (None, "MemoryError: none")
    copy.error = KeyboardInterrupt()
    copy.helped.clear()
    copy.reached.clear()
    job = stager.stage(2, work.leaves())
    assert copy.reached.wait(DEADLINE_S)
    with pytest.raises(KeyboardInterrupt):
        work.step()
    assert stager.wait(DEADLINE_S)
    assert job is not None
    assert (job.header, job.why) == (None, "KeyboardInterrupt: ")
    copy.error = None
    job = stager.stage(3, work.leaves())
    assert stager.wait(DEADLINE_S)
    assert job is not None
    assert job.header is not None


def test_never_torn(make: Callable[..., Stager], tmp_path: Path) -> None:
    stager, work = make(), Work()
    for step in range(1, 60):
        work.step()
        buffer = torch.full((20000,), float(step))
        job = stager.stage(step, [*work.leaves(), leaf("buffer", buffer, deferrable=False)])
        buffer.fill_(-1)
        assert job is not None
        for path, _ in shm.scan(tmp_path):
            with ShmSlot(path) as reader:
                if reader.lock(shared=True) and reader.header() is not None:
                    header, found = read(path)
                    values = {float(t.min()) for t in found.values()}
                    values |= {float(t.max()) for t in found.values()}
                    assert values == {float(header.step)}
        assert stager.wait(DEADLINE_S)
        assert job.header is not None, job.why
    assert max(sealed(tmp_path)) == 59


def test_large_tensors_that_may_not_wait_do_not(make: Callable[..., Stager], gate: Gate) -> None:
    gate.open.set()
    stager = make(copy=gate)
    average = torch.ones(staging.CLONED // 4 + 1)
    job = stager.stage(1, [leaf("ema", average, deferrable=False)])
    average.fill_(2)
    assert job is not None
    assert stager.wait(DEADLINE_S)
    assert read(job.slot.path)[1]["ema"].unique().tolist() == [1.0]


def edit_data(p: torch.nn.Parameter) -> None:
    p.data.mul_(0.5)


def edit_in_place(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p[5] = 9


def edit_late(p: torch.nn.Parameter) -> None:
    p.data[-70:] = 3.0


def test_an_edit_of_a_whole_tensor_within_its_copy_is_noticed(
    make: Callable[..., Stager], tmp_path: Path
) -> None:
    """What was looked at before is copied by then, and the sample is of another tensor."""
    work = Work()

    def copy(source: int, target: memoryview, chunk: int) -> int:
        if edited is None or source != edited.data_ptr():
            return shm.copy_summed(source, target, chunk)
        cut = len(target) * 3 // 4
        target[:cut] = ctypes.string_at(source, cut)
        edited.data.mul_(-1)
        target[cut:] = ctypes.string_at(source + cut, len(target) - cut)
        return shm.digest(target)

    edited: torch.nn.Parameter | None = None
    stager = make(copy=copy)
    for step in range(1, 4):
        work.step()
        edited = work.parameters[2] if step > staging.FULL_CHECK_SAVES else None
        job = stager.stage(step, work.leaves())
        assert stager.wait(DEADLINE_S)
        assert job is not None
        assert job.moved == ("model.2" if step > staging.FULL_CHECK_SAVES else "")
    assert set(sealed(tmp_path)) == {1, 2}


@pytest.mark.parametrize("edit", [edit_data, edit_in_place])
def test_an_edit_before_the_copy_is_noticed(
    make: Callable[..., Stager],
    tmp_path: Path,
    gate: Gate,
    edit: Callable[[torch.nn.Parameter], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stager, work, job = half_copied(make, gate)
    edit(work.parameters[2])
    gate.open.set()
    assert stager.wait(DEADLINE_S)
    assert job.moved == "model.2"
    assert sealed(tmp_path) == {}
    assert "model.2 was changed between save() and the optimizer's step" in caplog.text
    after = stager.stage(2, work.leaves())
    assert after is not None
    assert after.done.is_set(), "later saves are synchronous"
    work.parameters[1].data.mul_(2)
    assert read(after.slot.path)[1]["model.1"].unique().tolist() == [1.0]


@pytest.mark.parametrize("edit", [edit_data, edit_in_place])
def test_an_edit_before_a_copy_for_which_the_training_waits_is_noticed(
    make: Callable[..., Stager], edit: Callable[[torch.nn.Parameter], None], tmp_path: Path
) -> None:
    copy, work = Shared(), Work()
    stager = make(copy=copy)
    work.step()
    job = stager.stage(1, work.leaves())
    assert copy.reached.wait(DEADLINE_S)
    edit(work.parameters[2])
    work.step()
    assert stager.wait(DEADLINE_S)
    assert job is not None
    assert job.moved == "model.2"
    assert sealed(tmp_path) == {}


def test_what_a_parameter_had_is_saved_though_it_is_given_other_memory(
    make: Callable[..., Stager], gate: Gate
) -> None:
    p = torch.nn.Parameter(torch.full((1 << 22,), 1.0))
    one = leaf("w", p)
    one.tensor = p  # as it is in a state
    stager = make(copy=gate)
    job = stager.stage(1, [one])
    assert gate.reached.wait(DEADLINE_S)
    p.data = torch.full((10,), 2.0)  # the only name of the old memory is gone
    gate.open.set()
    assert stager.wait(DEADLINE_S)
    assert job is not None
    assert job.header is not None, job.why
    assert read(job.slot.path)[1]["w"].unique().tolist() == [1.0]


def test_an_edit_between_copy_and_step_is_noticed(
    make: Callable[..., Stager], tmp_path: Path
) -> None:
    work = Work()
    work.step()
    copies = 0

    def copy(source: int, target: memoryview, chunk: int) -> int:
        nonlocal copies
        digest = shm.copy_summed(source, target, chunk)
        copies += 1
        if copies == 2:  # the first has been copied: what changes now is not in the slot
            edit_late(work.parameters[0])
        return digest

    stager = make(copy=copy)
    job = stager.stage(1, work.leaves())
    assert stager.wait(DEADLINE_S)
    assert job is not None
    assert job.moved == "model.0"
    assert sealed(tmp_path) == {}


def cursor(stager: Stager) -> int:
    """Where the sum of the next sample begins."""
    return stager._cursor


def thread_of(stager: Stager) -> threading.Thread:
    return stager._thread


def test_samples_come_round(make: Callable[..., Stager]) -> None:
    """After the first saves a part is summed again; in so many saves that is all."""
    stager, work = make(), Work(count=32, size=1 << 14)
    work.step()
    seen = []
    for step in range(1, 3 + 2 * staging.SAMPLE_DIVISOR):
        before = cursor(stager)
        stager.stage(step, work.leaves())
        assert stager.wait(DEADLINE_S)
        seen.append((before, cursor(stager)))
    assert seen[0] == (0, 0), "all"
    assert {(b - a) % 64 for a, b in seen[2:]} == {64 // staging.SAMPLE_DIVISOR}


def test_an_error_opens_the_fence(
    make: Callable[..., Stager], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    stager, work = make(copy=gate), Work()
    work.step()
    gate.error = MemoryError("none")
    gate.open.set()
    job = stager.stage(1, work.leaves())
    work.step()
    assert job is not None
    assert job.why == "MemoryError: none"
    assert stager.wait(DEADLINE_S)
    assert "checkpoint of step 1 failed: MemoryError: none" in caplog.text
    gate.error = None
    after = stager.stage(2, work.leaves())
    assert stager.wait(DEADLINE_S)
    assert after is not None
    assert after.header is not None, "the thread goes on"


def test_memory_that_cannot_be_mapped_costs_the_save_that_needs_it(
    make: Callable[..., Stager], gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    stager, work = make(copy=gate, on_failed=told.append), Work()
    gate.open.set()
    for step in (1, 2, 3):
        work.step()
        stager.stage(step, work.leaves())
        assert stager.wait(DEADLINE_S)
    gate.open.clear()
    gate.reached.clear()
    # A larger state: all slots are given more memory, which is mapped anew.
    stager.stage(4, [*work.leaves(), leaf("more", torch.zeros(1 << 18))])
    assert gate.reached.wait(DEADLINE_S)
    with no_more_files():
        gate.open.set()
        assert stager.wait(DEADLINE_S)
        pause = threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):  # the thread tries to prepare the other slots
            if pool_of(stager).next_unpopulated() is None or not thread_of(stager).is_alive():
                break
            pause.wait(0.01)
        job = stager.stage(5, work.leaves())
        work.step()
        assert stager.wait(DEADLINE_S)
    assert job is not None
    why = "OSError: [Errno 24] Too many open files"
    assert job.why.startswith(why)
    assert told == [job.why]
    assert [m for m in caplog.messages if why in m] == [f"checkpoint of step 5 failed: {job.why}"]
    slots = sealed(tmp_path)
    assert set(slots) == {2, 3, 4}, "what the slot held is still there"
    for step, at in ((2, 2.0), (3, 3.0), (4, 3.0)):
        assert read(slots[step])[1]["model.0"].unique().tolist() == [at], step
    last = stager.stage(6, work.leaves())
    work.step()
    assert stager.wait(DEADLINE_S)
    assert last is not None
    assert last.header is not None, "the thread goes on"


def test_without_the_thread_no_slot_is_written(make: Callable[..., Stager], tmp_path: Path) -> None:
    stager, work = make(), Work()
    for step in (1, 2, 3):
        work.step()
        stager.stage(step, work.leaves())
        assert stager.wait(DEADLINE_S)
    stager._submit(None)  # type: ignore[arg-type]  # it ends, as by a bug
    thread_of(stager).join(DEADLINE_S)
    job = stager.stage(4, work.leaves())
    work.step()
    assert job is not None
    assert not stager.wait()
    for step, path in sealed(tmp_path).items():
        assert read(path)[1]["model.0"].unique().tolist() == [step], step


def test_slots_that_are_needed_or_read_are_spared(
    make: Callable[..., Stager], tmp_path: Path
) -> None:
    stager, work = make(), Work()
    work.step()
    for step in (1, 2, 3):
        assert stager.stage(step, work.leaves(), protected={checkpoint_id(step - 1, 2)}) is not None
        assert stager.wait(DEADLINE_S)
    slots = sealed(tmp_path)
    assert set(slots) == {1, 2, 3}
    with ShmSlot(slots[1]) as reader:
        assert reader.lock(shared=True)
        assert stager.stage(4, work.leaves(), protected={checkpoint_id(3, 2)}) is not None
        assert stager.wait(DEADLINE_S)
        assert set(sealed(tmp_path)) == {1, 3, 4}
        assert (
            stager.stage(5, work.leaves(), protected={checkpoint_id(3, 2), checkpoint_id(4, 2)})
            is None
        )
    assert (
        stager.stage(5, work.leaves(), protected={checkpoint_id(3, 2), checkpoint_id(4, 2)})
        is not None
    )


def test_choice() -> None:
    def held(step: int, *, persist: bool = False, round_: int = 1, timeline: int = 0) -> SlotHeader:
        facts: dict[str, Any] = {"job": "j", "world": 1, "rank": 0, "part": "", "write_id": ""}
        region = SlotRegion(0, 0, 0)
        return SlotHeader(
            step=Step(step), round=Round(round_), timeline=Timeline(timeline), persist=persist,
            size=0, private_offset=0,
            table=region, digests=region, objects=region, **facts,
        )  # fmt: skip

    assert fillable_slots([held(3), None, held(2)], ()) == [1, 2, 0], "empty first, then the oldest"
    assert fillable_slots([held(3), held(1), held(2)], {checkpoint_id(3), checkpoint_id(2)}) == [1]
    assert fillable_slots([held(3), held(1, persist=True), held(2)], {checkpoint_id(3)}) == [2]
    assert fillable_slots(
        [held(3, persist=True), held(1, persist=True), held(2)], {checkpoint_id(2)}
    ) == [1]
    assert (
        fillable_slots(
            [held(9), held(1, timeline=1), held(2, timeline=1)], {checkpoint_id(2, 1, 1)}
        )[0]
        == 0
    ), "an older timeline"
    assert fillable_slots([held(9), held(9, round_=2)], {checkpoint_id(9, 2)}) == [0]


def test_memory_that_does_not_suffice_is_told_in_numbers(
    make: Callable[..., Stager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager, work = make(), Work()
    monkeypatch.setattr(shm, "headroom", lambda _: 1_000_000)
    with pytest.raises(ShmFullError, match=r"3 slots of 1 MB need 3 MB more in .*, which has 1 MB"):
        stager.stage(1, work.leaves())
    assert [path.stat().st_size for path in shm.slots_of(tmp_path, 0)] == [0, 0, 0]
    work.step()
    monkeypatch.setattr(shm, "headroom", lambda _: 1 << 30)
    assert stager.stage(2, work.leaves()) is not None


def test_the_further_slot_goes_where_the_state_needs_its_memory(
    make: Callable[..., Stager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of a larger world, whose ranks had less each."""
    extra = shm.extra_slot(tmp_path, 0)
    for path in (*shm.slots_of(tmp_path, 0), extra):
        with ShmSlot(path, write=True) as slot:
            slot.reserve(100_000)
    one = Stager([*shm.slots_of(tmp_path, 0), extra], PLACE, extra=extra)
    try:
        one.warm(50_000)
        monkeypatch.setattr(shm, "headroom", lambda _: 3_000_000)
        job = one.stage(1, [leaf("w", torch.ones(250_000))], copy=True)
        assert job is not None
        assert one.wait(DEADLINE_S)
        assert job.header is not None, job.why
        assert not job.header.copy, "with three slots it would stand in the way of the next ones"
        assert not extra.exists()
        assert not one.grow()
    finally:
        one.close()


def test_a_part_that_is_smaller_in_a_new_round_takes_less_memory(
    make: Callable[..., Stager], tmp_path: Path
) -> None:
    """On more nodes than before, say. What is being read stays as it is; so does what has grown."""
    large, small = torch.ones(10 << 20), torch.ones(1 << 20)

    def save(stager: Stager, step: int, tensor: torch.Tensor) -> None:
        job = stager.stage(step, [leaf("w", tensor)])
        assert job is not None
        assert stager.wait(DEADLINE_S)
        assert job.header is not None, job.why

    def sizes() -> list[int]:
        return sorted(path.stat().st_blocks * 512 for path in shm.slots_of(tmp_path, 0))

    before = make()
    for step in range(3):
        save(before, step, large)
    before.close()
    after = make()
    with ShmSlot(sealed(tmp_path)[2]) as read_now:
        assert read_now.lock(shared=True)
        view = read_now.view()
        for step in range(3, 6):
            save(after, step, small)
        assert sizes()[1] < small.nbytes + shm.MAX_SURPLUS
        assert sizes()[2] > large.nbytes
        found = shm.contents(read_now)
        ((_, at),) = found.layout
        assert shm.digest(view[at : at + large.nbytes]) == found.digests[0]
        view.release()
    save(after, 6, small)
    assert sizes()[2] < small.nbytes + shm.MAX_SURPLUS
    assert {6, 5} <= sealed(tmp_path).keys()
    save(after, 7, large)
    assert sizes()[0] > large.nbytes
    save(after, 8, small)
    assert sizes()[0] > large.nbytes, "a state may be larger at some saves than at others"
    assert torch.equal(read(sealed(tmp_path)[7])[1]["w"], large)


def test_memory_that_somebody_else_took_meanwhile_is_given_back(
    make: Callable[..., Stager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager, work = make(), Work()
    rooms = iter([1 << 30, 1 << 30, 1 << 30, 1000])
    monkeypatch.setattr(shm, "headroom", lambda _: next(rooms))
    job = stager.stage(1, work.leaves())
    assert stager.wait(DEADLINE_S)
    assert job is not None
    assert "ShmFullError" in job.why
    assert [path.stat().st_size for path in shm.slots_of(tmp_path, 0)] == [0, 0, 0]


def test_a_state_may_change_its_shape(make: Callable[..., Stager], tmp_path: Path) -> None:
    stager = make()
    for step, size in ((1, 1 << 14), (2, 1 << 18), (3, 1 << 12), (4, 1 << 19)):
        leaves = [leaf(f"w{n}", torch.full((size,), float(step))) for n in range(step)]
        job = stager.stage(step, leaves, [("note", bytes(step * 100_000))])
        assert stager.wait(DEADLINE_S)
        assert job is not None
        header, found = read(job.slot.path)
        assert header.step == step
        assert {k: v.unique().tolist() for k, v in found.items()} == {
            f"w{n}": [float(step)] for n in range(step)
        }


def test_memory_is_prepared_before_the_first_save(
    make: Callable[..., Stager], tmp_path: Path
) -> None:
    stager, work = make(), Work()
    need = sum(one.chunk.nbytes for one in work.leaves())
    stager.warm(need)
    deadline = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if all(path.stat().st_size >= need for path in shm.slots_of(tmp_path, 0)):
            break
        deadline.wait(0.01)
    sizes = [path.stat().st_size for path in shm.slots_of(tmp_path, 0)]
    assert min(sizes) >= need
    stager.stage(1, work.leaves())
    assert stager.wait(DEADLINE_S)
    assert [path.stat().st_size for path in shm.slots_of(tmp_path, 0)] == sizes


def test_who_is_told_hears_of_each_slot(make: Callable[..., Stager]) -> None:
    told: list[int] = []
    stager, work = make(on_sealed=lambda header: told.append(header.step)), Work()
    for step in (1, 2, 3):
        stager.stage(step, work.leaves(), persist=step == 2)
        assert stager.wait(DEADLINE_S)
    assert told == [1, 2, 3]


def test_who_is_told_hears_why_a_slot_could_not_be_filled(
    make: Callable[..., Stager], gate: Gate
) -> None:
    told: list[str] = []
    stager, work = make(copy=gate, on_failed=told.append), Work()
    gate.error = OSError(28, "No space left on device")
    gate.open.set()
    stager.stage(1, work.leaves())
    assert stager.wait(DEADLINE_S)
    assert told == ["OSError: [Errno 28] No space left on device"]
    gate.error = None
    stager.stage(2, work.leaves())
    assert stager.wait(DEADLINE_S)
    assert len(told) == 1
