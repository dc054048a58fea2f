"""Slots in shared memory: whole, or not there."""

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import DamagedDataError, ShmFullError, ShmPool, ShmSlot
from dlrover_py.protocol.documents import NewerFormatError
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.slots import (
    ALIGN,
    PAGE,
    Layout,
    SlotHeader,
    TensorChunk,
    decode_objects,
    encode_objects,
    private_key,
)

PIECES = [
    TensorChunk(private_key(3, "rng"), "uint8", (5,), (5,), (0,)),
    TensorChunk("model.w", "float32", (2, 3), (4, 3), (2, 0)),
    TensorChunk("model.empty", "bfloat16", (0, 3), (0, 3), (0, 0)),
    TensorChunk("step", "int64", (), (), ()),
]
FACTS = {"job": "u1", "step": 7, "round": 2, "timeline": 0, "world": 4, "rank": 3, "part": "p"}


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[ShmSlot]:
    with ShmSlot(tmp_path / "0.0", write=True) as one:
        yield one


def fill(
    slot: ShmSlot, *, objects: bytes = b"", **facts: object
) -> tuple[Layout, dict[str, bytes]]:
    layout = Layout(PIECES)
    slot.reserve(layout.end + shm.OBJECT_HEADROOM)
    slot.begin()
    said, sums = {}, []
    for number, (chunk, at) in enumerate(layout, 1):
        data = bytes([number]) * chunk.nbytes
        said[chunk.key] = data
        source = ctypes.create_string_buffer(data, len(data) or 1)
        target = slot.view()[at : at + chunk.nbytes]
        sums.append(shm.copy_summed(ctypes.addressof(source), target))
    private_offset = layout.private_offset
    slot.seal(
        layout.encode(),
        sums,
        objects,
        layout.end,
        private_offset=private_offset,
        **{**FACTS, **facts},
    )
    return layout, said


def test_what_was_sealed_is_read(slot: ShmSlot) -> None:
    objects = encode_objects([("epoch", b"4"), (private_key(3, "x"), b"")])
    _, said = fill(slot, objects=objects)
    with ShmSlot(slot.path) as reader:
        found = shm.contents(reader)
        assert (found.header.step, found.header.rank, found.header.persist) == (7, 3, False)
        assert found.objects == {"epoch": b"4", "rank/3/x": b""}
        for (chunk, at), digest in zip(found.layout, found.digests, strict=True):
            data = bytes(reader.view()[at : at + chunk.nbytes])
            assert data == said[chunk.key]
            assert shm.digest(data) == digest
            assert at % ALIGN == 0
    assert list(shm.scan(slot.path.parent)) == [(slot.path, found.header)]


def test_private_bytes_are_the_last(slot: ShmSlot) -> None:
    layout, _ = fill(slot)
    assert [p.private for p in layout.chunks] == [False, False, False, True]
    assert layout.slot_offsets[-1] == layout.private_offset


def test_a_slot_that_is_being_filled_is_not_there(slot: ShmSlot) -> None:
    fill(slot)
    slot.begin()
    assert slot.header() is None
    with pytest.raises(DamagedDataError, match="holds no complete checkpoint"):
        shm.contents(slot)
    assert list(shm.scan(slot.path.parent)) == []


def test_a_slot_whose_first_page_is_being_amended_is_there(
    slot: ShmSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks in between finds the new header behind the old digest."""
    fill(slot)
    old = slot.header()
    assert old is not None
    new = replace(old, persist=True)
    text, pread = new.encode(), os.pread
    slot.view()[shm.HEADER_STRUCT.size : shm.HEADER_STRUCT.size + len(text)] = text

    def meanwhile(fd: int, nbytes: int, at: int) -> bytes:
        page = pread(fd, nbytes, at)
        slot.put(new)
        return page

    monkeypatch.setattr(os, "pread", meanwhile)
    assert slot.header() == new


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_is_believed(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    """Of the header, the tables or the tensors; what lies between them is nobody's."""
    with ShmSlot(tmp_path_factory.mktemp("slot") / "0.0", write=True) as slot:
        _, said = fill(slot, objects=encode_objects([("epoch", b"4")]))
        whole = shm.contents(slot)
        at %= whole.header.size
        slot.view()[at] ^= 1 << bit
        try:
            found = shm.contents(slot)
        except DamagedDataError:
            return
        good = all(
            shm.digest(slot.view()[start : start + chunk.nbytes]) == digest
            for (chunk, start), digest in zip(found.layout, found.digests, strict=True)
        )
        if good:
            assert (found.header, found.objects) == (whole.header, whole.objects)
            for chunk, start in found.layout:
                assert bytes(slot.view()[start : start + chunk.nbytes]) == said[chunk.key]


def test_objects_may_grow(slot: ShmSlot) -> None:
    fill(slot)
    large = encode_objects([("history", bytes(3 * shm.OBJECT_HEADROOM))])
    fill(slot, objects=large)
    assert len(shm.contents(slot).objects["history"]) == 3 * shm.OBJECT_HEADROOM


def test_memory_that_does_not_suffice_is_refused_before_any_is_taken(slot: ShmSlot) -> None:
    with pytest.raises(
        ShmFullError, match=r"a checkpoint needs .* MB more in .*, which has .* MB: give"
    ):
        slot.reserve(1 << 55)
    assert slot.size == 0


@pytest.mark.parametrize("where", ["", "user.slice/job_7.scope", "user.slice"])
@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_our_cgroups_count_as_well(tmp_path: Path, version: int, where: str) -> None:
    """As the kernel writes them: docs of cgroup-v1/memory and cgroup-v2. The root is that of a
    container, the others of a job on a bare host."""
    limit, used, idle, folder, ours = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory",
            "2:cpu:/a:b\n4:hugetlb,memory:/user.slice/job_7.scope\n0::/\n"),
        2: ("memory.max", "memory.current", "inactive_file", ".",
            "0::/user.slice/job_7.scope\n"),
    }[version]  # fmt: skip
    (tmp_path / "ours").write_text(ours)
    at = tmp_path / folder / where
    at.mkdir(exist_ok=True, parents=True)
    before = shm.headroom(tmp_path, tmp_path, tmp_path / "ours")
    (at / limit).write_text("100000\n")
    (at / used).write_text("60000\n")
    (at / "memory.stat").write_text(f"cache 50000\n{idle} 20000\n")
    assert shm.headroom(tmp_path, tmp_path, tmp_path / "ours") == 60_000
    (at / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    assert shm.headroom(tmp_path, tmp_path, tmp_path / "ours") >= before // 2


def test_a_reader_keeps_the_writer_out_and_the_other_way_round(slot: ShmSlot) -> None:
    fill(slot)
    with ShmSlot(slot.path) as reader, ShmSlot(slot.path) as other:
        assert reader.lock(shared=True)
        assert other.lock(shared=True)
        assert not slot.lock(shared=False)
        reader.unlock()
        other.unlock()
        assert slot.lock(shared=False)
        assert not reader.lock(shared=True)


def test_a_file_of_another_kind_is_no_slot(tmp_path: Path) -> None:
    (tmp_path / "0.0").write_bytes(b"short")
    (tmp_path / "0.1").write_bytes(os.urandom(2 * PAGE))
    assert list(shm.scan(tmp_path)) == []
    assert list(shm.scan(tmp_path / "none")) == []


def test_objects_and_layouts_are_read_as_written() -> None:
    assert decode_objects(encode_objects([])) == {}
    layout = Layout(PIECES)
    assert Layout.decode(layout.encode()).chunks == layout.chunks
    with pytest.raises(ValueError, match=r"its layout is not valid: its 0\..*"):
        Layout.decode(b'[["key", "float32"]]')
    with pytest.raises(NewerFormatError, match="it has format 99"):
        SlotHeader.decode(b'{"format": 99}')


def test_parts_are_equal_where_boxes_are() -> None:
    one = Layout(PIECES)
    other = Layout(
        [TensorChunk(private_key(0, "rng"), "uint8", (9,), (9,), (0,)), *reversed(PIECES[1:])]
    )
    assert one.part(["epoch"]) == other.part(["epoch", private_key(0, "x")])
    assert one.part(["epoch"]) != one.part([])
    moved = Layout([TensorChunk("model.w", "float32", (2, 3), (4, 3), (0, 0)), *PIECES[2:]])
    assert one.part(["epoch"]) != moved.part(["epoch"])


# --- the folder ---


def test_a_pool_is_held_adopted_and_removed(tmp_path: Path) -> None:
    first = ShmPool(tmp_path, "u1", "n0", now=0.0)
    (first.path / "0.0").write_bytes(b"kept")
    with pytest.raises(ConfigError, match="held by a running process"):
        ShmPool(tmp_path, "u1", "n0", now=0.0)
    other = ShmPool(tmp_path, "u1", "n1", now=0.0)
    first.close()
    again = ShmPool(tmp_path, "u1", "n0", now=0.0)
    assert (again.path / "0.0").read_bytes() == b"kept"
    again.remove()
    assert not again.path.exists()
    assert other.path.exists()
    other.remove()


def test_what_the_dead_have_just_saved_is_not_old(tmp_path: Path) -> None:
    """Its bytes are written into mapped memory, which moves no file's time."""
    dead = ShmPool(tmp_path, "u1", "n0", now=0.0)
    long_ago = dead.path.stat().st_mtime - 2 * shm.STALE_S
    with ShmSlot(dead.path / "0.0", write=True) as slot:
        fill(slot)
        written = slot.header()
        assert written is not None
        for path in (dead.path, *dead.path.iterdir()):
            os.utime(path, (long_ago, long_ago))
        slot.put(written)
    dead.close()
    ShmPool(tmp_path, "u2", "n0", now=time.time()).remove()
    assert dead.path.exists()


def test_what_the_dead_left_is_removed_but_not_at_once(tmp_path: Path) -> None:
    dead = ShmPool(tmp_path, "u1", "n0", now=0.0)
    dead.close()
    living = ShmPool(tmp_path, "u1", "n1", now=0.0)
    written = living.path.stat().st_mtime
    ShmPool(tmp_path, "u2", "n0", now=written + shm.STALE_S - 60).remove()
    assert dead.path.exists(), "its next incarnation may be on its way"
    ShmPool(tmp_path, "u2", "n0", now=written + shm.STALE_S + 60).remove()
    assert not dead.path.exists()
    assert living.path.exists(), "its owner lives, whatever the clock says"
    living.remove()


def aged(folder: Path) -> float:
    """Nothing was written there for longer than a stale one has; now, by the files' clock."""
    now = folder.stat().st_mtime
    for path in (folder, *folder.iterdir()):
        os.utime(path, (now - 2 * shm.STALE_S,) * 2)
    return now


def test_what_the_dead_left_without_an_owner_is_removed_too(tmp_path: Path) -> None:
    """Its removal was cut short."""
    dead = ShmPool(tmp_path, "u1", "n0", now=0.0)
    dead.close()
    (dead.path / "0.0").write_bytes(b"left")
    (dead.path / shm.OWNER_FILE).unlink()
    ShmPool(tmp_path, "u2", "n0", now=dead.path.stat().st_mtime).remove()
    assert dead.path.exists(), "somebody may be about to take it"
    ShmPool(tmp_path, "u2", "n0", now=aged(dead.path)).remove()
    assert not dead.path.exists()


def test_what_is_removed_is_held_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ShmPool(tmp_path, "u1", "n0", now=0.0)
    for number in range(9):
        (one.path / f"{number}.0").write_bytes(b"kept")
    gone: list[str] = []
    unlink = os.unlink

    def seen(path: Path | str, **more: int) -> None:
        gone.append(Path(path).name)
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", seen)
    one.remove()
    assert len(gone) == 10
    assert gone[-1] == shm.OWNER_FILE
    assert not one.path.exists()


@pytest.mark.parametrize("how", ["says so", "takes it"])
def test_who_has_just_died_is_not_long_dead_though_its_last_save_is_old(
    tmp_path: Path, how: str
) -> None:
    dead = ShmPool(tmp_path, "u1", "n0", now=0.0)
    (dead.path / "0.0").write_bytes(b"the newest")
    now = aged(dead.path)
    if how == "says so":
        dead.alive()
    else:
        dead.close()
        dead = ShmPool(tmp_path, "u1", "n0", now=now)
    dead.close()
    ShmPool(tmp_path, "u2", "n0", now=now).remove()
    assert (dead.path / "0.0").read_bytes() == b"the newest"
