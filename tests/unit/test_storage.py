"""A directory of checkpoints: what exists, who writes, what stays."""

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.checkpoint import directory
from dlrover_py.checkpoint.directory import (
    LEASE_FILE,
    LEASE_S,
    MAX_DOCUMENT,
    RENEW_S,
    CheckpointDirectory,
    DirectoryClaimedError,
    DirectoryOwner,
    FolderBackend,
    address,
    folder_of,
    retained,
    upload_parts,
)
from dlrover_py.protocol.errors import ConfigError, SupersededError
from dlrover_py.protocol.manifest import Manifest, WrittenChunk, WrittenObject
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.persister import (
    KeepRules,
    read_line,
)
from dlrover_py.protocol.slots import TensorChunk

ONE, OTHER = DirectoryOwner("u1", "gpt"), DirectoryOwner("u2", "bert")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drawn(step: int) -> str:
    """An attempt, as a master draws its name."""
    return f"{step:012x}"


def named(step: int) -> str:
    """Its folder."""
    return folder_of(step, drawn(step))


def manifest(step: int = 7, attempt: str = "", **more: object) -> Manifest:
    attempt = attempt or drawn(step)
    made = Manifest(
        Step(step), attempt, "u1", Round(1), Timeline(0), 2, folder_of(step, attempt), 1.5
    )
    return replace(made, **more)  # type: ignore[arg-type]


def write(store: CheckpointDirectory, wanted: Manifest, data: bytes = b"bytes") -> Path:
    """What an attempt leaves before its commit."""
    folder = Path(store.where(wanted))
    (folder / "parts").mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(data)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> CheckpointDirectory:
    made = CheckpointDirectory(tmp_path / "ckpt")
    made.prepare()
    return made


# --- documents ---


def test_a_manifest_is_read_as_written() -> None:
    whole = manifest(
        chunks=(
            WrittenChunk(
                TensorChunk("w", "float32", (2, 3), (4, 3), (2, 0)), "__1_0.distcp", 704, 9
            ),
        ),
        objects=(WrittenObject("epoch", "__0_0.distcp", 5, 6, 1 << 63),),
        metric=0.25,
        notes=("odd",),
        term=3,
        number=4,
    )
    assert Manifest.decode(whole.encode()) == whole
    assert whole.nbytes == 24 + 6
    assert json.loads(whole.encode())["manifest"]["step"] == 7, "any reader of JSON can read it"


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_no_damaged_manifest_is_believed(at: int, bit: int, cut: bool) -> None:
    whole = manifest(
        chunks=(WrittenChunk(TensorChunk("w", "float32", (2,), (2,), (0,)), "f", 64, 9),)
    )
    data = bytearray(whole.encode())
    at %= len(data) - 1  # a last line's end may be missing
    if cut:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    try:
        found = Manifest.decode(bytes(data))
    except ValueError:
        return
    assert found == whole


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"kind": "orders"}', b'{"kind": "grant"}', b"x"])
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"kind|Field required|an object|Invalid JSON"):
        read_line(line)


# --- commit ---


def test_a_checkpoint_exists_once_its_manifest_does(store: CheckpointDirectory) -> None:
    assert store.checkpoints() == []
    write(store, manifest())
    assert store.checkpoints() == []
    done = store.commit(manifest())
    assert done.number == 1
    assert store.checkpoints() == [done]
    assert CheckpointDirectory(store.place.url).checkpoints() == [done]
    assert CheckpointDirectory(f"file://{store.place.url}").checkpoints() == [done]
    target = bytearray(3)
    store.read_into(done, "__0_0.distcp", 1, memoryview(target))
    assert bytes(target) == b"yte"
    with pytest.raises(OSError, match="ends at byte 5: expected 1 more"):
        store.read_into(done, "__0_0.distcp", 3, memoryview(bytearray(3)))


def test_there_is_nothing_where_nothing_is(tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path / "none").checkpoints() == []


def test_what_is_newer_is_told_by_the_order_of_commits(store: CheckpointDirectory) -> None:
    """Not by clocks, which jump, nor by steps, which a script may do again."""
    for step, at in ((10, 50.0), (20, 40.0), (15, 30.0)):
        store.commit(manifest(step, at=at))
    assert [m.step for m in store.checkpoints()] == [15, 20, 10]


@pytest.mark.parametrize("at", [0.0, 4e9])
def test_a_clock_that_jumps_hides_no_commit(store: CheckpointDirectory, at: float) -> None:
    for step, then in ((1, 2e9), (2, at), (3, 2e9 + 1)):
        write(store, store.commit(manifest(step, at=then)))
        assert CheckpointDirectory(store.place.url).checkpoints()[0].step == step
    assert store.retain(KeepRules(newest=2)) == [named(1)]
    assert [m.step for m in store.checkpoints()] == [3, 2]


def test_of_many_committers_of_one_attempt_one_commits(store: CheckpointDirectory) -> None:
    start = threading.Barrier(8)
    done: list[Manifest] = []
    refused: list[str] = []

    def commit(rank: int) -> None:
        mine = CheckpointDirectory(store.place.url)
        start.wait()
        try:
            done.append(mine.commit(manifest(notes=(str(rank),))))
        except SupersededError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=commit, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1
    assert len(refused) == 7
    assert "given the attempt up, or committed" in refused[0]
    assert store.checkpoints() == done
    assert [n for n in store.place.names() if n.endswith(".tmp")] == []


def test_without_links_it_is_exclusive_too(
    store: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)  # as a mounted FAT or SMB has it
    done = store.commit(manifest())
    with pytest.raises(SupersededError):
        CheckpointDirectory(store.place.url).commit(manifest())
    assert CheckpointDirectory(store.place.url).checkpoints() == [done]


def test_a_commit_whose_answer_was_lost_is_one(
    store: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def asked_again(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", asked_again)  # as an NFS client without an answer does
    done = store.commit(manifest())
    assert CheckpointDirectory(store.place.url).checkpoints() == [done]
    with pytest.raises(SupersededError):
        CheckpointDirectory(store.place.url).commit(manifest())


@pytest.mark.parametrize(("times", "read"), [(2, True), (3, False)])
def test_what_is_replaced_while_it_is_read_is_read_again(
    store: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, times: int, read: bool
) -> None:
    store.acquire_lease(ONE, drawn(7))
    stale = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * times
    opened = os.open

    def from_a_server(path: str | Path, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(path) == LEASE_FILE and stale:
            raise stale.pop()
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", from_a_server)  # as an NFS client has it
    if read:
        assert store.commit(manifest()).number == 1
    else:
        with pytest.raises(OSError, match=r"[Ss]tale"):
            store.commit(manifest())


def test_a_lower_term_does_not_commit(store: CheckpointDirectory) -> None:
    store.commit(manifest(1, term=4))
    with pytest.raises(SupersededError, match=r"term 3, and a checkpoint of term 4"):
        store.commit(manifest(2, term=3))
    assert store.commit(manifest(3, term=4)).number == 2
    assert store.commit(manifest(4, term=1, job="u2")).number == 3, (
        "another job's terms are its own"
    )


def test_what_was_saved_earlier_is_not_committed_later(store: CheckpointDirectory) -> None:
    """It would count as the newest."""
    store.commit(manifest(6, term=1))
    with pytest.raises(SupersededError, match="a later checkpoint exists: step-6"):
        store.commit(manifest(5, term=2))
    assert store.commit(manifest(5, term=2, round=9)).number == 2, "the job has gone back"
    assert store.commit(manifest(4, term=1, job="u2")).number == 3


def test_who_comes_after_a_tombstone_does_not_commit(store: CheckpointDirectory) -> None:
    folder = write(store, manifest())
    assert store.sweep(now=0.0) == [folder.name]
    assert not folder.exists()
    with pytest.raises(SupersededError, match="given the attempt up"):
        CheckpointDirectory(store.place.url).commit(manifest())
    assert store.checkpoints() == []


def test_a_damaged_manifest_is_named_and_left_out(
    store: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    good = store.commit(manifest(1))
    write(store, manifest(2))
    bad = Path(f"{store.where(manifest(2))}.json")
    bad.write_bytes(store.commit(manifest(3)).encode())
    torn = Path(f"{store.where(manifest(4))}.json")
    torn.write_bytes(manifest(4).encode()[:-40])
    fresh = CheckpointDirectory(store.place.url)
    assert [m.step for m in fresh.checkpoints()] == [3, 1]
    assert fresh.damaged[bad.name] == f"it belongs to the folder {named(3)}"
    assert "not those" in fresh.damaged[torn.name] or "not a complete" in fresh.damaged[torn.name]
    assert fresh.checkpoints()[-1] == good
    assert len([r for r in caplog.records if " is damaged: " in r.getMessage()]) == 2, "told once"
    fresh.sweep(now=0.0)
    assert Path(store.where(manifest(2))).exists(), "its bytes may be good: that is for people"


class Refusing(FolderBackend):
    """Some files cannot be read: a bad sector, another user's."""

    def __init__(self, path: Path, *bad: str) -> None:
        super().__init__(path)
        self.bad = set(bad)

    def read(self, name: str, most: int = MAX_DOCUMENT) -> bytes:
        if name in self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path / name))
        return super().read(name)


def refusing(store: CheckpointDirectory, *folders: str) -> CheckpointDirectory:
    """A fresh look at it, by whom these cannot be read."""
    fresh = CheckpointDirectory(store.place.url)
    fresh.place = Refusing(Path(store.place.url), *(f"{folder}.json" for folder in folders))
    return fresh


def test_a_manifest_that_cannot_be_read_hides_no_other(
    store: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write(store, store.commit(manifest(step, term=1)))
    fresh = refusing(store, named(2))
    assert [m.step for m in fresh.checkpoints()] == [3, 1]
    assert fresh.unreadable == {f"{named(2)}.json"}
    assert fresh.damaged == {f"{named(2)}.json": "it cannot be read: Input/output error"}
    assert f"{named(2)}.json is damaged: it cannot be read" in caplog.text
    assert fresh.sweep(now=0.0) == []
    assert fresh.retain(KeepRules(newest=1)) == [named(1)]
    fresh.place = store.place
    assert [m.step for m in fresh.checkpoints()] == [3, 2]
    assert not fresh.unreadable
    assert Path(store.where(manifest(2))).exists()


def test_a_store_that_refuses_all_is_no_empty_one(store: CheckpointDirectory) -> None:
    store.commit(manifest(1))
    with pytest.raises(OSError, match="Input/output error"):
        refusing(store, named(1)).checkpoints()
    away = CheckpointDirectory(store.place.url)

    def read(name: str, limit: int = 0) -> bytes:
        raise OSError("the server is away")

    store.commit(manifest(2))
    away.checkpoints()
    store.commit(manifest(3))
    away.place.read = read  # type: ignore[method-assign]
    with pytest.raises(OSError, match="is away"):
        away.checkpoints()


@given(data=st.data())
def test_what_is_committed_beside_what_cannot_be_read_is_newer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Also if the job has gone back, if checkpoints are removed, and whoever looks sees others."""
    store = CheckpointDirectory(tmp_path_factory.mktemp("ckpt"))
    round, step = 1, 0
    for count in range(data.draw(st.integers(1, 8))):
        there = store.checkpoints()
        bad = data.draw(st.sets(st.sampled_from([m.folder for m in there] or [""])))
        round, step = data.draw(
            st.one_of(
                st.tuples(st.just(round), st.integers(step + 1, step + 3)),
                st.tuples(st.just(round + 1), st.integers(1, 9)),
            )
        )
        one = manifest(step, term=1, round=round, attempt=f"a{count}")
        with suppress(
            SupersededError, OSError
        ):  # it may be a later one, or it is all that there is
            refusing(store, *bad).commit(one)
            assert store.checkpoints()[0].folder == one.folder
        numbers = [m.number for m in store.checkpoints()]
        assert len(set(numbers)) == len(numbers)
        assert max(numbers) < 2**53, "what a message may tell"
        if bool(there) and data.draw(st.booleans()):
            store.remove(data.draw(st.sampled_from(there)).folder)
    leaps = [p.name for p in Path(store.place.url).iterdir() if p.name.startswith(".number.")]
    assert len(leaps) <= 1, "the newest tells enough"


def test_what_was_committed_so_and_cannot_be_read_either_is_older(
    store: CheckpointDirectory,
) -> None:
    for step, bad in ((1, ()), (2, ()), (3, ()), (4, (2, 3)), (5, (4,))):
        folders = (named(other) for other in bad)
        refusing(store, *folders).commit(manifest(step, term=1))
    assert [m.step for m in store.checkpoints()] == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("step", [2, 3])
def test_what_cannot_be_read_may_be_what_was_saved_later(
    store: CheckpointDirectory, step: int
) -> None:
    store.commit(manifest(1, term=1))
    store.commit(manifest(3, term=1))
    late = replace(manifest(step, term=1, round=9), folder=f"step-{step}.b", attempt="b")
    with pytest.raises(
        SupersededError, match=f"{named(3)}.json may be a later checkpoint, and it cannot be"
    ):
        refusing(store, named(3)).commit(late)
    assert store.commit(late).number == 3, "the job has gone back"


# --- sweep ---


def test_a_sweep_spares_what_is_committed_under_way_or_none_of_ours(
    store: CheckpointDirectory,
) -> None:
    done = store.commit(manifest(1))
    kept_folder = write(store, done)
    under_way, left = write(store, manifest(2)), write(store, manifest(3))
    root = left.parent
    (root / "notes.txt").write_text("a user's")
    (root / "step-old").mkdir()
    (root / f".{left.name}.json.0123abcd.tmp").write_text("torn")
    assert store.sweep({under_way.name}, now=0.0) == [left.name]
    there = {p.name for p in root.iterdir()}
    assert there == {
        kept_folder.name,
        f"{kept_folder.name}.json",
        under_way.name,
        f"{left.name}.json",
        "notes.txt",
        "step-old",
    }
    assert store.sweep({under_way.name}, now=0.0) == [], "once is enough"


def copied(root: Path, whole: Path) -> None:
    """Of a checkpoint, with a manifest and without, by hand."""
    for name in ("step-7.backup", named(6), f"{named(7)}-old"):
        shutil.copytree(whole, root / name)
    shutil.copy(f"{whole}.json", root / "step-7.backup.json")
    shutil.copy(f"{whole}.json", root / f"{named(7)}-old.json")


def exported(root: Path, _: Path) -> None:
    """Of the same step, as other formats."""
    for name in ("step-7.pt", "step-7.safetensors", named(8), ".step-7.tmp"):
        (root / name).write_bytes(b"a user's")
    (root / "step-7.metrics.json").write_text("{}")


def beside(root: Path, _: Path) -> None:
    """In folders that look like ours."""
    for name, file in (("step-7.export", "parts/0"), (named(8), "parts/0"), (named(8), "notes")):
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).write_bytes(b"a user's")
    (root / "step-9.json" / "x").mkdir(parents=True)
    (root / f"{named(9)}.json" / "x").mkdir(parents=True)


@pytest.mark.parametrize("put", [copied, exported, beside])
def test_what_people_put_beside_checkpoints_is_neither_loaded_nor_removed(
    store: CheckpointDirectory, put: Callable[[Path, Path], None]
) -> None:
    root = Path(store.place.url)
    whole = root / named(7)
    write(store, manifest())
    shutil.rmtree(whole / "parts")  # as a commit does
    (whole / ".metadata").write_bytes(b"torch's")
    done = store.commit(manifest())
    put(root, whole)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    left = write(store, manifest(1))
    for one, swept in ((store, [left.name]), (CheckpointDirectory(root), [])):
        assert one.sweep(now=0.0) == swept
        assert one.checkpoints() == [done]
        assert one.retain(KeepRules(newest=1)) == []
    stone = left.with_name(f"{left.name}.json")
    after = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path != stone}
    assert after == before


class Killed(BaseException):
    pass


class Dying(FolderBackend):
    """Its process is killed when it is to remove a checkpoint's file."""

    def remove(self, name: str) -> None:
        if name.endswith(".distcp"):
            raise Killed
        super().remove(name)


def test_a_removal_that_was_killed_is_finished_by_a_sweep(store: CheckpointDirectory) -> None:
    """Its bytes would be left for ever: without a manifest they might be anybody's."""
    done = store.commit(manifest())
    folder = write(store, done)
    shutil.rmtree(folder / "parts")
    store.place = Dying(Path(store.place.url))
    with pytest.raises(Killed):
        store.remove(done.folder)
    after = CheckpointDirectory(store.place.url)
    assert after.checkpoints() == []
    assert after.sweep(now=0.0) == [folder.name]
    assert not folder.exists()


@pytest.mark.parametrize("wall", [0.0, 4e9])
def test_a_tombstone_goes_when_no_committer_can_be_left(tmp_path: Path, wall: float) -> None:
    """By a clock that does not jump, whatever time it is said to be."""
    clock = Clock()
    store = CheckpointDirectory(tmp_path, clock=clock)
    folder = write(store, manifest())
    store.sweep(now=2e9)
    stone = folder.with_name(f"{folder.name}.json")
    store.sweep(now=wall)
    clock.now += directory.TOMBSTONE_S - 1
    store.sweep(now=wall)
    with pytest.raises(SupersededError):
        CheckpointDirectory(store.place.url).commit(manifest())
    clock.now += 2
    store.sweep(now=wall)
    assert not stone.exists()


def test_a_sweep_that_was_killed_is_finished_by_the_next(store: CheckpointDirectory) -> None:
    folder = write(store, manifest())
    grave = manifest(void="it was never committed")
    assert store.place.create(f"{folder.name}.json", grave.encode())
    assert store.sweep(now=0.0) == [folder.name]
    assert not folder.exists()


class Keeping(FolderBackend):
    """Some things in it are not ours to remove."""

    def __init__(self, path: Path, *stuck: str) -> None:
        super().__init__(path)
        self.stuck = stuck

    def remove(self, name: str) -> None:
        if name.startswith(self.stuck):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(self.path / name))
        super().remove(name)


def test_what_cannot_be_removed_is_named_and_the_sweep_goes_on(store: CheckpointDirectory) -> None:
    for step in (1, 2):
        write(store, manifest(step))
    torn = f".{named(1)}.json.0123abcd.tmp"
    store.place.put(torn, b"torn")
    whole, store.place = store.place, Keeping(Path(store.place.url), named(1), torn)
    assert store.sweep(now=0.0) == [named(2)]
    assert store.stuck == dict.fromkeys((named(1), torn), "Permission denied")
    store.place = whole
    assert store.sweep(now=0.0) == [named(1)]
    assert store.stuck == {}


# --- what others who may write there have put beside it ---


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A checkpoint of torch's own, of another training of this user."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(b"precious")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("buried", [False, True])
def test_a_sweep_follows_no_link(store: CheckpointDirectory, foreign: Path, buried: bool) -> None:
    store.prepare()
    link = Path(store.place.url, named(3))
    link.symlink_to(foreign)
    if buried:
        grave = manifest(3, void="it was never committed")
        assert store.place.create(f"{named(3)}.json", grave.encode())
    else:
        (foreign / "parts").mkdir()
    before = files(foreign)
    store.sweep(now=0.0)
    assert files(foreign) == before
    with pytest.raises(NotADirectoryError, match=named(3)):
        store.place.make(f"{named(3)}/parts")


def test_of_a_checkpoint_that_is_a_link_only_the_link_is_removed(
    store: CheckpointDirectory, foreign: Path
) -> None:
    """It may lead to an archive, from which it is still read."""
    done = store.commit(manifest(3))
    Path(store.place.url, done.folder).symlink_to(foreign)
    before = files(foreign)
    data = bytearray(8)
    store.read_into(done, "__0_0.distcp", 0, memoryview(data))
    assert data == b"precious"
    store.remove(done.folder)
    assert files(foreign) == before
    assert [p.name for p in Path(store.place.url).iterdir()] == []


def test_a_link_inside_a_checkpoint_is_not_followed_either(
    store: CheckpointDirectory, foreign: Path
) -> None:
    done = store.commit(manifest(3))
    folder = write(store, done)
    shutil.rmtree(folder / "parts")
    (folder / "parts").symlink_to(foreign)
    before = files(foreign)
    store.remove(done.folder)
    assert files(foreign) == before


@pytest.mark.parametrize("name", [LEASE_FILE, f"{named(3)}.json", f"{named(4)}/__0_0.distcp"])
def test_a_pipe_is_not_waited_for(store: CheckpointDirectory, name: str) -> None:
    done = store.commit(manifest(4))
    write(store, done)
    path = Path(store.place.url, name)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    data = memoryview(bytearray(1))
    for read in (
        lambda: store.place.read(name),
        lambda: store.place.read_into(name, 0, data),
    ):
        with pytest.raises(OSError, match=f"it is not a regular file.*{path.name}"):
            read()
    assert [m.step for m in store.checkpoints()] == [4]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.none())
)


@given(
    st.one_of(
        VALUES,
        st.dictionaries(st.sampled_from(["job", "pid", "beat", "host", "writer", "x"]), VALUES),
    )
)
def test_a_claim_of_another_form_is_another_jobs(document: object) -> None:
    """It may be anything; nothing but an error in words comes of it."""
    clock = Clock()
    store = CheckpointDirectory("memory://claims", clock=clock)
    store.place.put(LEASE_FILE, json.dumps(document).encode())
    with suppress(DirectoryClaimedError):
        store.acquire_lease(ONE, drawn(7))
    store.join(ONE)
    store.renew_lease()
    # no assert: no other exception is raised
    store.release()


# --- how a directory is named ---


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("/data/run", "/data/run"),
        ("/data/run/", "/data/run"),
        ("/data//run/.", "/data/run"),
        (Path("/data/run"), "/data/run"),
        (b"/data/run", "/data/run"),
        ("run", "/cwd/run"),
        ("./a:/b", "/cwd/a:/b"),
        ("~/run", "/home/me/run"),
        ("file:///data/run/", "/data/run"),
        ("file://localhost/data/run", "/data/run"),
        ("FILE:///data/run", "/data/run"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("S3://Bucket/Run", "s3://Bucket/Run"),
        ("/data/Ω ф", "/data/Ω ф"),
        ("/" + "/".join(["d" * 255] * 14), "/" + "/".join(["d" * 255] * 14)),
    ],
)
def test_a_directory_has_one_form(monkeypatch: pytest.MonkeyPatch, given: str, means: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(os, "getcwd", lambda: "/cwd")
    assert address(given) == means
    assert address(means) == means, "what is said to other processes means the same to them"


def test_why_nothing_can_be_written_shows_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert CheckpointDirectory(tmp_path / "new" / "run").obstacle() == ""
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        assert (
            CheckpointDirectory(path).obstacle() == f"{tmp_path}/file is a file; expected a folder"
        )
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may do all
    assert "may not write to it" in CheckpointDirectory(tmp_path / "new" / "run").obstacle()
    assert {p.name for p in tmp_path.iterdir()} == {"file"}
    assert CheckpointDirectory("memory://obstacle").obstacle() == ""


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "it is empty"),
        (" ", "it is empty"),
        (b"/data/caf\xe9", "no UTF-8"),
        ("/data/a\nb", "cannot be printed"),
        ("/data/a\0b", "cannot be printed"),
        ("s3:/bucket/run", "expected two slashes"),
        ("file:/data/run", "expected two slashes"),
        ("file://data/run", "expected file:// and an absolute path"),
        ("file://", "expected file:// and an absolute path"),
        ("file:///data/a%20b", "without %"),
        ("s3://", "expected a bucket"),
        ("://run", "expected an address such as"),
        ("a b://run", "expected an address such as"),
        ("~nobody-of-this-name/run", "give the path itself"),
        ("/" + "/".join(["d" * 255] * 15), "it has 3840 bytes; expected at most 3800"),
        ("/data/" + "d" * 256, "a name of 256 bytes"),
        ("/data/" + "é" * 128, "a name of 256 bytes"),
    ],
)
def test_a_directory_that_might_be_another_is_refused(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint directory ") as refused:
        address(given)
    assert why in str(refused.value)
    assert len(str(refused.value)) < 400
    with pytest.raises(ConfigError):
        CheckpointDirectory(os.fsdecode(given))


@pytest.mark.parametrize(
    "given",
    [
        "ftp://me:hunter2@nas/run",
        "s3://AKIA:hunter2@bucket/run-1",
        "S3://:hunter2@bucket",
        "sftp://me:hunt@hunter2@nas/" + "d" * 300,
        "x" * 70 + "://me:hunter2@nas/run",
        "ftp://me:a hunter2@nas/run",
        "ftp://me:hunt/hunter2@nas/run",
        "ftp://me:hunt?hunter2@nas/run",
        "ftp://me:hunt#hunter2@nas/run",
        "ftp://me:hunt://hunter2@nas/run",
        "ftp://me:hunt:hunter2@nas/run",
        "ftp://me@corp:hunter2@nas/run",
        "ftp://my name:hunter2@nas/run",
        "s3:/AKIA:hunter2@bucket/run-1",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(given: str) -> None:
    """An address is in the status, in events and logs, and in the command lines of processes."""
    with pytest.raises(ConfigError, match=r"it has a password.*FSSPEC_FTP_PASSWORD") as refused:
        address(given)
    assert "hunt" not in str(refused.value)


def test_an_address_with_a_user_or_an_at_has_no_password(tmp_path: Path) -> None:
    for text in (
        "ftp://me@nas/run",
        "ftp://me@corp@nas/run",
        "hdfs://nas:8020/run",
        "s3://bucket/a:b@c",
        f"{tmp_path}/a:b@c",
        f"{tmp_path}/x:/y:z@w",
    ):
        assert address(text) == text
    with pytest.raises(ConfigError, match="or a path without ://"):
        address("/data/x://y:z@w")


@pytest.mark.parametrize("given", ["ftp://me:hunt\nhunter2@nas", " ftp://me:hunter2@nas"])
def test_another_fault_of_an_address_does_not_show_its_password(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        address(given)
    assert "hunt" not in str(refused.value)


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        (b"caf\xe9", "its absolute path is no UTF-8"),
        (b"a\nb", "its absolute path has characters that cannot be printed"),
        (None, "the current folder was removed"),
    ],
)
def test_a_relative_directory_in_a_folder_of_such_a_name_is_refused(
    folder: bytes | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = tmp_path / os.fsdecode(folder or b"gone")
    current.mkdir()
    monkeypatch.chdir(current)
    if folder is None:
        current.rmdir()
    with pytest.raises(ConfigError, match="checkpoint directory 'ckpt': ") as refused:
        address("ckpt")
    assert why in str(refused.value)


# --- retention ---


def test_removal_begins_with_the_manifest(store: CheckpointDirectory) -> None:
    done = store.commit(manifest())
    folder = write(store, done)
    store.remove(done.folder)
    assert not folder.exists()
    assert store.checkpoints() == []
    store.remove(done.folder)  # again is no harm


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 40), st.none() | st.floats(allow_infinity=False), st.booleans()),
        max_size=12,
    ),
    newest=st.integers(0, 4),
    every=st.integers(0, 6),
    best=st.integers(0, 3),
    highest=st.booleans(),
)
def test_retention_keeps_what_a_rule_keeps_and_no_more(
    rows: list[tuple[int, float | None, bool]], newest: int, every: int, best: int, highest: bool
) -> None:
    found = [
        manifest(step, f"a{index}", metric=metric, number=len(rows) - index, certified=certified)
        for index, (step, metric, certified) in enumerate(rows)
    ]
    agreed = next((m for m in found if m.certified), None)
    stay = retained(found, KeepRules(newest, every, best, highest))
    worth = [m.metric for m in found if m.metric is not None and m.metric == m.metric]
    bar = sorted(worth, reverse=highest)[:best]
    for index, one in enumerate(found):
        by_rule = index < max(1, newest) or (every > 0 and one.step % every == 0)
        by_rule |= one is agreed
        in_bar = one.metric in bar
        metric = one.metric
        better = (
            metric is not None
            and bool(bar)
            and in_bar
            and (metric > bar[-1] if highest else metric < bar[-1])
        )
        if by_rule or better:
            assert one.folder in stay
        elif not in_bar:
            assert one.folder not in stay
    if found:
        assert found[0].folder in stay, "the newest stays, whatever is asked for"
    assert len([m for m in found if m.folder in stay and m.metric in bar]) >= len(bar)


def test_retention_removes_files_and_spares_the_loaded_one(store: CheckpointDirectory) -> None:
    for step in range(1, 6):
        write(store, store.commit(manifest(step)))
    gone = store.retain(KeepRules(newest=2), protected={named(1)})
    assert gone == [named(3), named(2)]
    assert [m.step for m in store.checkpoints()] == [5, 4, 1]
    assert sorted(p.name for p in Path(store.place.url).iterdir() if p.is_dir()) == [
        named(1),
        named(4),
        named(5),
    ]


# --- claim ---


def test_two_jobs_cannot_write_into_one_directory(store: CheckpointDirectory) -> None:
    store.acquire_lease(ONE, "a1")
    with pytest.raises(
        DirectoryClaimedError, match=r"another job, gpt \(u1\): give each job a directory"
    ) as told:
        CheckpointDirectory(store.place.url).acquire_lease(OTHER, "b1")
    assert told.value.is_alive, "its writer lives on this host: no need to wait"
    store.release()
    CheckpointDirectory(store.place.url).acquire_lease(OTHER, "b1")


def test_loading_needs_no_claim(store: CheckpointDirectory) -> None:
    store.acquire_lease(ONE, drawn(7))
    done = store.commit(manifest())
    assert CheckpointDirectory(store.place.url).checkpoints() == [done]


def elsewhere(store: CheckpointDirectory, beat: int) -> None:
    """What a process of another host claims."""
    store.acquire_lease(OTHER, "b1")
    claim = json.loads(store.place.read(LEASE_FILE)) | {"host": "another", "beat": beat}
    store.place.put(LEASE_FILE, json.dumps(claim).encode())


def test_a_claim_of_another_host_lapses_by_our_own_clock(tmp_path: Path) -> None:
    clock = Clock()
    mine = CheckpointDirectory(tmp_path, clock=clock)
    elsewhere(CheckpointDirectory(tmp_path), 1)
    with pytest.raises(DirectoryClaimedError) as told:
        mine.acquire_lease(ONE)
    assert not told.value.is_alive
    clock.now += LEASE_S - 1
    with pytest.raises(DirectoryClaimedError):
        mine.acquire_lease(ONE)
    clock.now += 2
    mine.acquire_lease(ONE)


def test_a_claim_of_another_host_that_is_renewed_holds(tmp_path: Path) -> None:
    clock = Clock()
    mine = CheckpointDirectory(tmp_path, clock=clock)
    for beat in range(5):
        elsewhere(CheckpointDirectory(tmp_path), beat)
        with pytest.raises(DirectoryClaimedError) as told:
            mine.acquire_lease(ONE)
        assert told.value.is_alive is (beat > 0)
        clock.now += LEASE_S - 1


def test_a_claim_that_was_watched_lapses_from_the_first_look_on(tmp_path: Path) -> None:
    """A run that was shorter than the lease of a killed one looked at its end only."""
    clock = Clock()
    mine = CheckpointDirectory(tmp_path, clock=clock)
    assert not mine.watch_lease(ONE.job), "nobody has it"
    elsewhere(CheckpointDirectory(tmp_path), 1)
    for _ in range(int(LEASE_S // RENEW_S) + 1):
        assert mine.watch_lease(ONE.job)
        clock.now += RENEW_S
        with pytest.raises(DirectoryClaimedError):
            CheckpointDirectory(tmp_path, clock=clock).acquire_lease(ONE)
    assert mine.watch_lease(ONE.job), "to watch takes nothing"
    mine.acquire_lease(ONE)
    assert not mine.watch_lease(ONE.job)


def test_a_claim_that_was_watched_while_it_was_renewed_may_still_lapse(tmp_path: Path) -> None:
    """An attempt fails at once for a holder that lives, but waits for one that may be dead."""
    clock = Clock()
    mine = CheckpointDirectory(tmp_path, clock=clock)
    for look in range(9):
        if look % 3 == 0:
            elsewhere(CheckpointDirectory(tmp_path), look)
        assert mine.watch_lease(ONE.job)
        clock.now += RENEW_S
    with pytest.raises(DirectoryClaimedError) as told:
        mine.acquire_lease(ONE)
    assert not told.value.is_alive
    clock.now += RENEW_S
    mine.acquire_lease(ONE)


def test_what_was_not_looked_at_for_a_while_does_not_lapse(tmp_path: Path) -> None:
    """While the store answered nobody, who has the claim could not renew it."""
    clock = Clock()
    mine = CheckpointDirectory(tmp_path, clock=clock)
    elsewhere(CheckpointDirectory(tmp_path), 1)
    assert mine.watch_lease(ONE.job)
    clock.now += LEASE_S + 5
    with pytest.raises(DirectoryClaimedError):
        mine.acquire_lease(ONE)


def test_a_renewal_that_is_seen_by_a_look_first_shows_an_attempt_that_a_writer_lives(
    tmp_path: Path,
) -> None:
    """It waited for ten minutes if each renewal was seen by a look first."""
    clock = Clock()
    mine = CheckpointDirectory(tmp_path, clock=clock)
    for beat in (1, 2):
        elsewhere(CheckpointDirectory(tmp_path), beat)
        assert mine.watch_lease(ONE.job)
        with pytest.raises(DirectoryClaimedError) as told:
            mine.acquire_lease(ONE)
        clock.now += RENEW_S
    assert told.value.is_alive


def away(place: Path, host: str = "another") -> None:
    """Whoever has the claim does not run on this host."""
    claim = json.loads((place / LEASE_FILE).read_bytes()) | {"host": host}
    (place / LEASE_FILE).write_text(json.dumps(claim))


def test_when_the_claiming_node_dies_the_others_of_its_job_keep_the_directory(
    tmp_path: Path,
) -> None:
    clock = Clock()
    dead, second, third = (CheckpointDirectory(tmp_path, clock=clock) for _ in range(3))
    stranger = CheckpointDirectory(tmp_path, clock=clock)
    dead.acquire_lease(OTHER, "b1", shared=True)
    away(tmp_path)
    for store in (second, third):
        store.join(OTHER)
    renewed = []
    for _ in range(20):
        renewed.append([store.renew_lease() for store in (second, third)])
        with pytest.raises(DirectoryClaimedError):
            stranger.acquire_lease(ONE)
        clock.now += RENEW_S
    assert [True, True] not in renewed, "one of them stands in"
    assert renewed[-1] == [True, False]
    second.release()
    with pytest.raises(DirectoryClaimedError):
        stranger.acquire_lease(ONE)
    assert third.renew_lease(), "somebody of the job still writes here"
    with pytest.raises(DirectoryClaimedError):
        stranger.acquire_lease(ONE)
    third.release()
    with pytest.raises(DirectoryClaimedError):
        stranger.acquire_lease(ONE)
    clock.now += LEASE_S
    stranger.acquire_lease(ONE)
    assert not third.renew_lease()


def test_who_stands_in_lets_only_the_newest_attempt_commit(tmp_path: Path) -> None:
    old, new = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    old.acquire_lease(ONE, "a7", shared=True)
    new.acquire_lease(ONE, "a8", shared=True)
    new.release()
    assert old.renew_lease()
    with pytest.raises(SupersededError):
        old.commit(manifest(7, "a7"))
    (tmp_path / LEASE_FILE).unlink()
    assert old.renew_lease(), "somebody has cleaned up too well"
    with pytest.raises(SupersededError):
        old.commit(manifest(7, "a7"))


def test_watching_the_own_claim_tells_nothing_of_another_jobs(tmp_path: Path) -> None:
    mine, peer = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    peer.acquire_lease(ONE, "a1", shared=True)
    away(tmp_path)
    mine.join(ONE)
    assert not mine.renew_lease()
    (tmp_path / LEASE_FILE).unlink()
    CheckpointDirectory(tmp_path).acquire_lease(OTHER, "b1")
    away(tmp_path)
    with pytest.raises(DirectoryClaimedError) as told:
        mine.acquire_lease(ONE, "a2")
    assert not told.value.is_alive, "it may be dead: that shows"


def test_a_newer_attempt_of_the_job_calls_the_older_off(store: CheckpointDirectory) -> None:
    """Its coordinator was cut off, and has a grant; nobody has swept what it wrote yet."""
    store.acquire_lease(ONE, "a1")
    newer = CheckpointDirectory(store.place.url)
    newer.acquire_lease(ONE, "a2")
    with pytest.raises(
        SupersededError, match=r"another attempt has begun since; step-7.a1 is given up"
    ):
        store.commit(manifest(7, "a1"))
    assert not store.renew_lease()
    store.release()
    assert newer.renew_lease(), "who was called off releases nothing"
    assert newer.commit(manifest(8, "a2")).number == 1


class Halting(FolderBackend):
    """Others do something before one or the other of its calls."""

    def __init__(self, path: Path, others: list[tuple[int, Callable[[], object]]]) -> None:
        super().__init__(path)
        self.others, self.calls = others, 0

    def halt(self) -> None:
        self.calls += 1
        while self.others and self.others[0][0] < self.calls:
            self.others.pop(0)[1]()

    def names(self, folder: str = "") -> list[str]:
        self.halt()
        return super().names(folder)

    def read(self, name: str, most: int = MAX_DOCUMENT) -> bytes:
        self.halt()
        return super().read(name)

    def put(self, name: str, data: bytes) -> None:
        self.halt()
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self.halt()
        return super().create(name, data)

    def remove(self, name: str) -> None:
        self.halt()
        super().remove(name)


CALLS = 6
"""Of who renews its claim and commits: three for the claim, and three."""


def test_who_renews_late_does_not_undo_a_newer_attempts_claim(tmp_path: Path) -> None:
    old, new = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    old.acquire_lease(ONE, drawn(7), shared=True)
    old.place = Halting(tmp_path, [(1, lambda: new.acquire_lease(ONE, drawn(8), shared=True))])
    assert not old.renew_lease()
    assert new.commit(manifest(8)).number == 1


def test_of_two_jobs_that_wait_for_a_lapsed_claim_one_has_it(tmp_path: Path) -> None:
    clock = Clock()
    elsewhere(CheckpointDirectory(tmp_path), 1)
    fast, slow = (
        CheckpointDirectory(tmp_path, clock=clock),
        CheckpointDirectory(tmp_path, clock=clock),
    )
    third = DirectoryOwner("u3", "t5")
    for one, owner in ((fast, ONE), (slow, third)):
        with pytest.raises(DirectoryClaimedError):
            one.acquire_lease(owner)
    clock.now += LEASE_S + 1
    slow.place = Halting(tmp_path, [(1, lambda: fast.acquire_lease(ONE, drawn(7)))])
    with pytest.raises(DirectoryClaimedError, match="another job, gpt"):
        slow.acquire_lease(third)
    assert fast.commit(manifest(7)).number == 1


@pytest.mark.parametrize("when", list(combinations_with_replacement(range(CALLS + 1), 3)))
def test_what_was_called_off_does_not_appear_after_a_newer_commit(
    tmp_path: Path, when: tuple[int, int, int]
) -> None:
    """A coordinator with all written and a grant stands still, again and again; others go on."""
    old, new = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    late, newer = manifest(7), manifest(8)
    old.acquire_lease(ONE, late.attempt)
    write(old, late)
    there: list[Manifest] = []

    def commit() -> None:
        with suppress(SupersededError):  # the claim was renewed just when it was taken
            new.commit(newer)
            there.extend(new.checkpoints())

    others = [
        lambda: new.acquire_lease(ONE, newer.attempt),
        lambda: new.sweep({newer.folder}, now=0.0),
    ]
    place = old.place = Halting(tmp_path, list(zip(when, [*others, commit], strict=True)))
    with suppress(SupersededError):
        old.renew_lease()
        old.commit(late)
    place.calls = CALLS
    place.halt()
    if there:
        assert new.checkpoints() == there
        assert there[0].step == 8


def test_a_claim_that_cannot_be_read_lapses_too(tmp_path: Path) -> None:
    clock = Clock()
    mine = CheckpointDirectory(tmp_path, clock=clock)
    (tmp_path / LEASE_FILE).write_text('{"job": ')
    with pytest.raises(DirectoryClaimedError, match="which cannot be read"):
        mine.acquire_lease(ONE)
    clock.now += LEASE_S + 1
    mine.acquire_lease(ONE)


class Remembering(FolderBackend):
    """As an NFS client has it: a listing is an old one, unless this client changes the folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.old: dict[str, list[str]] = {}

    def names(self, folder: str = "") -> list[str]:
        return self.old.setdefault(folder, super().names(folder))

    def refresh(self, folder: str) -> None:
        super().refresh(folder)
        self.old.pop(folder, None)


@pytest.mark.parametrize("look", ["load", "commit", "sweep"])
def test_what_another_host_has_just_committed_is_seen(
    store: CheckpointDirectory, look: str
) -> None:
    here = CheckpointDirectory(store.place.url)
    here.place = Remembering(Path(store.place.url))
    assert here.checkpoints() == []
    done = store.commit(manifest(1, term=1))
    if look == "load":
        assert here.checkpoints() == [done]
    elif look == "commit":
        assert here.commit(manifest(2, term=1)).number == 2
    else:
        left = write(store, manifest(2))
        assert here.sweep(now=0.0) == [left.name]


def test_a_mark_of_who_was_killed_goes(store: CheckpointDirectory) -> None:
    (Path(store.place.url) / ".look.0123abcd").touch()
    store.sweep(now=0.0)
    assert store.place.names() == []


# --- other stores ---


def test_a_store_without_exclusive_creation_is_refused() -> None:
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Careless(MemoryFileSystem):
        protocol = "careless"

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
            super().pipe_file(path, value)

    fsspec.register_implementation("careless", Careless, clobber=True)
    with pytest.raises(ConfigError, match="expected the store to refuse to overwrite"):
        CheckpointDirectory("careless://bucket/x").prepare()


def test_a_store_that_looks_first_and_writes_then_is_refused() -> None:
    """One after the other, two that write are told apart; at once, they are not."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Plain(MemoryFileSystem):
        protocol = "plain"
        pipe_file = fsspec.AbstractFileSystem.pipe_file

    fsspec.register_implementation("plain", Plain, clobber=True)
    with pytest.raises(ConfigError, match="Plain cannot create a file exclusively"):
        CheckpointDirectory("plain://bucket/x").prepare()


def test_a_bucket_without_the_extra_for_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="install DLRover-Py with its extra s3"):
        CheckpointDirectory("s3://bucket/x")


def test_a_server_that_does_not_answer_is_an_error_of_the_storage() -> None:
    """ftp connects in the constructor. ``dlrover ckpt ls`` ended with a traceback."""
    store = CheckpointDirectory("ftp://127.0.0.1:1/runs")
    with pytest.raises(OSError, match=r"ftp://127\.0\.0\.1:1/runs: Connection refused"):
        store.checkpoints()


def test_a_host_in_an_address_reaches_its_file_system() -> None:
    """As for ftp and sftp, which do not work without one."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Hosted(MemoryFileSystem):
        protocol = "hosted"

        def __init__(self, host: str, **options: Any) -> None:
            super().__init__(**options)
            self.host = host

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("hosted://").partition("/")[2].strip("/")

        @staticmethod
        def _get_kwargs_from_urls(path: str) -> dict[str, str]:
            host = path.removeprefix("hosted://").partition("/")[0]
            return {"host": host} if host else {}

    fsspec.register_implementation("hosted", Hosted, clobber=True)
    store = CheckpointDirectory("hosted://nas/runs/hosted")
    store.prepare()
    assert store.checkpoints() == []
    with pytest.raises(ConfigError, match=r"hosted:///runs.*'host'"):
        CheckpointDirectory("hosted:///runs")


def test_any_file_system_of_fsspec_will_do() -> None:
    store = CheckpointDirectory("memory://runs/one")
    store.prepare()
    store.acquire_lease(ONE, drawn(7))
    sink = store.place.sink(f"{named(7)}/__0_0.distcp")
    sink.write(b"bytes")
    sink.finish()
    assert store.checkpoints() == []
    done = store.commit(manifest())
    with pytest.raises(SupersededError):
        store.commit(manifest())
    assert CheckpointDirectory("memory://runs/one").checkpoints() == [done]
    target = bytearray(3)
    store.read_into(done, "__0_0.distcp", 1, memoryview(target))
    assert bytes(target) == b"yte"
    with pytest.raises(OSError, match="ends at byte 5"):
        store.read_into(done, "__0_0.distcp", 4, memoryview(target))
    assert store.retain(KeepRules()) == []
    for name in ("step-9.pt", named(9), f"{named(10)}/notes"):
        store.place.put(name, b"a user's")
        assert store.sweep(now=0.0) == []
        assert store.place.read(name) == b"a user's"
        store.place.remove(name)
    store.place.put(f"{named(11)}/parts/n0.layout.json", b"[]")
    assert store.sweep(now=0.0) == [named(11)]
    store.place.remove(f"{named(11)}.json")
    store.remove(done.folder)
    assert store.checkpoints() == []
    store.release()
    assert store.place.names() == []


@given(nbytes=st.integers(0, 5 << 40), more=st.floats(1.0, 1.05))
def test_a_file_of_any_size_has_parts_enough(nbytes: int, more: float) -> None:
    """Its zips need more than what was expected."""
    part, at_once = upload_parts(nbytes)
    assert nbytes * more / part < 10_000, "more S3 does not take"
    assert part * at_once <= max(120 << 20, 2 * part)
    assert at_once >= 2


def test_what_speaks_no_known_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="gopher://x"):
        CheckpointDirectory("gopher://x")


@contextmanager
def in_a_bucket(
    monkeypatch: pytest.MonkeyPatch, handler: type[BaseHTTPRequestHandler]
) -> Iterator[None]:
    """Have a handler answer all requests for buckets."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "tests")
        try:
            yield
        finally:
            server.shutdown()


def test_a_document_that_is_too_large_is_not_read_from_any_file_system() -> None:
    place = directory.open_backend("memory://documents")
    place.put("ten", bytes(10))
    place.put("none", b"")
    assert place.read("ten", 10) == bytes(10)
    assert place.read("none", 0) == b""
    with pytest.raises(OSError, match=r"more than 9 bytes: .* most 9: .*documents/ten") as refused:
        place.read("ten", 9)
    assert refused.value.errno == errno.EFBIG


def test_a_document_that_is_too_large_is_not_read_from_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its size is in the head of the answer: the client closes the connection then."""
    closed = threading.Event()

    class Large(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 26))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Thu, 26 Nov 2026 00:00:00 GMT")
            self.end_headers()
            try:
                for _ in range(1 << 10):
                    self.wfile.write(bytes(1 << 16))
            except OSError:
                closed.set()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with in_a_bucket(monkeypatch, Large):
        with pytest.raises(OSError, match=r"has 67108864 bytes: .* most 1000: .*/some.json"):
            directory.open_backend("s3://bucket/runs").read("some.json", 1000)
        assert closed.wait(60)


def test_a_bucket_that_refuses_an_object_says_so_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"<Error><Code>AccessDenied</Code></Error>")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with (
        in_a_bucket(monkeypatch, Refusing),
        pytest.raises(PermissionError, match=r"denied: 'bucket/runs/some\.json'"),
    ):
        directory.open_backend("s3://bucket/runs").read("some.json")
