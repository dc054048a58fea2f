"""Slots in shared memory: whole, or not there."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py import arena
from dlrover_py.arena import Arena, Damaged, NoRoom, Slot
from dlrover_py.protocol.checkpoint import (
    ALIGN,
    PAGE,
    Layout,
    Piece,
    Summary,
    decode_objects,
    encode_objects,
    private_key,
)
from dlrover_py.protocol.errors import ConfigError

PIECES = [
    Piece(private_key(3, "rng"), "uint8", (5,), (5,), (0,)),
    Piece("model.w", "float32", (2, 3), (4, 3), (2, 0)),
    Piece("model.empty", "bfloat16", (0, 3), (0, 3), (0, 0)),
    Piece("step", "int64", (), (), ()),
]
FACTS = {"job": "u1", "step": 7, "round": 2, "lap": 0, "world": 4, "rank": 3, "part": "p"}


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    with Slot(tmp_path / "0.0", write=True) as one:
        yield one


def fill(slot: Slot, *, objects: bytes = b"", **facts: object) -> tuple[Layout, dict[str, bytes]]:
    layout = Layout(PIECES)
    slot.reserve(layout.end + arena.SPARE)
    slot.begin()
    said, sums = {}, []
    for number, (piece, at) in enumerate(layout, 1):
        data = bytes([number]) * piece.nbytes
        said[piece.key] = data
        source = ctypes.create_string_buffer(data, len(data) or 1)
        target = slot.view()[at : at + piece.nbytes]
        sums.append(arena.copy_summed(ctypes.addressof(source), target))
    private_at = layout.private_at
    slot.seal(
        layout.encode(), sums, objects, layout.end, private_at=private_at, **{**FACTS, **facts}
    )
    return layout, said


def test_what_was_sealed_is_read(slot: Slot) -> None:
    objects = encode_objects([("epoch", b"4"), (private_key(3, "x"), b"")])
    _, said = fill(slot, objects=objects)
    with Slot(slot.path) as reader:
        found = arena.contents(reader)
        assert (found.summary.step, found.summary.rank, found.summary.persist) == (7, 3, False)
        assert found.objects == {"epoch": b"4", "rank/3/x": b""}
        for (piece, at), digest in zip(found.layout, found.digests, strict=True):
            data = bytes(reader.view()[at : at + piece.nbytes])
            assert data == said[piece.key]
            assert arena.digest(data) == digest
            assert at % ALIGN == 0
    assert list(arena.scan(slot.path.parent)) == [(slot.path, found.summary)]


def test_private_bytes_are_the_last(slot: Slot) -> None:
    layout, _ = fill(slot)
    assert [p.private for p in layout.pieces] == [False, False, False, True]
    assert layout.positions[-1] == layout.private_at


def test_a_slot_that_is_being_filled_is_not_there(slot: Slot) -> None:
    fill(slot)
    slot.begin()
    assert slot.summary() is None
    with pytest.raises(Damaged, match="holds nothing whole"):
        arena.contents(slot)
    assert list(arena.scan(slot.path.parent)) == []


def test_a_slot_whose_first_page_is_being_amended_is_there(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks in between finds the new summary behind the old digest."""
    fill(slot)
    old = slot.summary()
    assert old is not None
    new = replace(old, persist=True)
    text, pread = new.encode(), os.pread
    slot.view()[arena._HEAD.size : arena._HEAD.size + len(text)] = text

    def meanwhile(fd: int, nbytes: int, at: int) -> bytes:
        page = pread(fd, nbytes, at)
        slot.put(new)
        return page

    monkeypatch.setattr(os, "pread", meanwhile)
    assert slot.summary() == new


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_is_believed(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    """Of the summary, the tables or the tensors; what lies between them is nobody's."""
    with Slot(tmp_path_factory.mktemp("slot") / "0.0", write=True) as slot:
        _, said = fill(slot, objects=encode_objects([("epoch", b"4")]))
        whole = arena.contents(slot)
        at %= whole.summary.size
        slot.view()[at] ^= 1 << bit
        try:
            found = arena.contents(slot)
        except Damaged:
            return
        good = all(
            arena.digest(slot.view()[start : start + piece.nbytes]) == digest
            for (piece, start), digest in zip(found.layout, found.digests, strict=True)
        )
        if good:
            assert (found.summary, found.objects) == (whole.summary, whole.objects)
            for piece, start in found.layout:
                assert bytes(slot.view()[start : start + piece.nbytes]) == said[piece.key]


def test_objects_may_grow(slot: Slot) -> None:
    fill(slot)
    large = encode_objects([("history", bytes(3 * arena.SPARE))])
    fill(slot, objects=large)
    assert len(arena.contents(slot).objects["history"]) == 3 * arena.SPARE


def test_memory_that_does_not_suffice_is_refused_before_any_is_taken(slot: Slot) -> None:
    with pytest.raises(NoRoom, match=r"a checkpoint needs .* MB more in .*, which has .* MB: give"):
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
    before = arena.headroom(tmp_path, tmp_path, tmp_path / "ours")
    (at / limit).write_text("100000\n")
    (at / used).write_text("60000\n")
    (at / "memory.stat").write_text(f"cache 50000\n{idle} 20000\n")
    assert arena.headroom(tmp_path, tmp_path, tmp_path / "ours") == 60_000
    (at / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    assert arena.headroom(tmp_path, tmp_path, tmp_path / "ours") >= before // 2


def test_a_reader_keeps_the_writer_out_and_the_other_way_round(slot: Slot) -> None:
    fill(slot)
    with Slot(slot.path) as reader, Slot(slot.path) as other:
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
    assert list(arena.scan(tmp_path)) == []
    assert list(arena.scan(tmp_path / "none")) == []


def test_objects_and_layouts_are_read_as_written() -> None:
    assert decode_objects(encode_objects([])) == {}
    layout = Layout(PIECES)
    assert Layout.decode(layout.encode()).pieces == layout.pieces
    with pytest.raises(ValueError, match="another version"):
        Layout.decode(b'[["key", "float32"]]')
    with pytest.raises(ValueError, match="another version"):
        Summary.decode(b'{"format": 99}')


def test_parts_are_equal_where_boxes_are() -> None:
    one = Layout(PIECES)
    other = Layout([Piece(private_key(0, "rng"), "uint8", (9,), (9,), (0,)), *reversed(PIECES[1:])])
    assert one.part(["epoch"]) == other.part(["epoch", private_key(0, "x")])
    assert one.part(["epoch"]) != one.part([])
    moved = Layout([Piece("model.w", "float32", (2, 3), (4, 3), (0, 0)), *PIECES[2:]])
    assert one.part(["epoch"]) != moved.part(["epoch"])


# --- the folder ---


def test_an_arena_is_held_adopted_and_removed(tmp_path: Path) -> None:
    first = Arena(tmp_path, "u1", "n0", now=0.0)
    (first.path / "0.0").write_bytes(b"kept")
    with pytest.raises(ConfigError, match="held by a living process"):
        Arena(tmp_path, "u1", "n0", now=0.0)
    other = Arena(tmp_path, "u1", "n1", now=0.0)
    first.close()
    again = Arena(tmp_path, "u1", "n0", now=0.0)
    assert (again.path / "0.0").read_bytes() == b"kept"
    again.remove()
    assert not again.path.exists()
    assert other.path.exists()
    other.remove()


def test_what_the_dead_have_just_saved_is_not_old(tmp_path: Path) -> None:
    """Its bytes are written into mapped memory, which moves no file's time."""
    dead = Arena(tmp_path, "u1", "n0", now=0.0)
    long_ago = dead.path.stat().st_mtime - 2 * arena.STALE_S
    with Slot(dead.path / "0.0", write=True) as slot:
        fill(slot)
        written = slot.summary()
        assert written is not None
        for path in (dead.path, *dead.path.iterdir()):
            os.utime(path, (long_ago, long_ago))
        slot.put(written)
    dead.close()
    Arena(tmp_path, "u2", "n0", now=time.time()).remove()
    assert dead.path.exists()


def test_who_looks_for_memory_waits_for_who_is_about_to_take_it(tmp_path: Path) -> None:
    found = []
    waits = threading.Thread(target=lambda: [found.append("its turn") for _ in turns(tmp_path)])
    with arena.turn(tmp_path):
        waits.start()
        while "-> FLOCK" not in Path("/proc/locks").read_text():
            assert waits.is_alive(), "it does not wait"
        child = os.fork()  # of a data loader, say: it has the descriptor too
        if not child:
            signal.pause()
        found.append("taken")
    waits.join()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert found == ["taken", "its turn"]


def turns(folder: Path) -> Iterator[None]:
    with arena.turn(folder):
        yield


def test_what_the_dead_left_is_removed_but_not_at_once(tmp_path: Path) -> None:
    dead = Arena(tmp_path, "u1", "n0", now=0.0)
    dead.close()
    living = Arena(tmp_path, "u1", "n1", now=0.0)
    written = living.path.stat().st_mtime
    Arena(tmp_path, "u2", "n0", now=written + arena.STALE_S - 60).remove()
    assert dead.path.exists(), "its next incarnation may be on its way"
    Arena(tmp_path, "u2", "n0", now=written + arena.STALE_S + 60).remove()
    assert not dead.path.exists()
    assert living.path.exists(), "its owner lives, whatever the clock says"
    living.remove()


def aged(folder: Path) -> float:
    """Nothing was written there for longer than a stale one has; now, by the files' clock."""
    now = folder.stat().st_mtime
    for path in (folder, *folder.iterdir()):
        os.utime(path, (now - 2 * arena.STALE_S,) * 2)
    return now


def test_what_the_dead_left_without_an_owner_is_removed_too(tmp_path: Path) -> None:
    """Its removal was cut short."""
    dead = Arena(tmp_path, "u1", "n0", now=0.0)
    dead.close()
    (dead.path / "0.0").write_bytes(b"left")
    (dead.path / arena.OWNER).unlink()
    Arena(tmp_path, "u2", "n0", now=dead.path.stat().st_mtime).remove()
    assert dead.path.exists(), "somebody may be about to take it"
    Arena(tmp_path, "u2", "n0", now=aged(dead.path)).remove()
    assert not dead.path.exists()


def test_what_is_removed_is_held_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Arena(tmp_path, "u1", "n0", now=0.0)
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
    assert gone[-1] == arena.OWNER
    assert not one.path.exists()


@pytest.mark.parametrize("how", ["says so", "takes it"])
def test_who_has_just_died_is_not_long_dead_though_its_last_save_is_old(
    tmp_path: Path, how: str
) -> None:
    dead = Arena(tmp_path, "u1", "n0", now=0.0)
    (dead.path / "0.0").write_bytes(b"the newest")
    now = aged(dead.path)
    if how == "says so":
        dead.alive()
    else:
        dead.close()
        dead = Arena(tmp_path, "u1", "n0", now=now)
    dead.close()
    Arena(tmp_path, "u2", "n0", now=now).remove()
    assert (dead.path / "0.0").read_bytes() == b"the newest"
