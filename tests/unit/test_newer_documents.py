"""The rule for documents that a newer version has written (docs/architecture.md).

Unknown fields are ignored. A newer format is refused in words, and neither removed nor overwritten.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash
from click.testing import CliRunner
from pydantic import TypeAdapter

from dlrover_agent.checkpoint.replication import ReplicaPull, Replicator
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.directory import (
    LEASE_FILE,
    LEASE_S,
    SEQUENCE_GAP,
    CheckpointDirectory,
    DirectoryClaimedError,
    DirectoryOwner,
    folder_of,
)
from dlrover_py.checkpoint.shm import ShmSlot, SlotContents
from dlrover_py.checkpoint.transfer import TransferConnection
from dlrover_py.cli.checkpoints import ckpt
from dlrover_py.protocol.documents import NewerFormatError, read
from dlrover_py.protocol.errors import CheckpointError, ConfigError, SupersededError
from dlrover_py.protocol.lease import WriterLease
from dlrover_py.protocol.manifest import Manifest, WrittenChunk
from dlrover_py.protocol.names import MAX_COUNT, Round, Step, Timeline
from dlrover_py.protocol.persister import KeepRules
from dlrover_py.protocol.shares import (
    NodeShares,
    SharedObject,
    StoredChunk,
    WriteFailure,
    WritePlan,
    WriteShare,
    WrittenFile,
    WrittenFiles,
)
from dlrover_py.protocol.slots import Layout, SlotHeader, SlotRegion, TensorChunk, ValidHeader
from dlrover_py.trainer.candidates import CandidateSearch, CheckpointSources
from dlrover_py.trainer.slot_pool import SlotPool
from tests.slots import full, stage

ATTEMPT = "a" * 12
PIECE = TensorChunk("w", "uint8", (4,), (4,), (0,))
ONE, OTHER = DirectoryOwner("u1", "gpt"), DirectoryOwner("u2", "bert")
WORDS = r"it has format 2, and this version of DLRover-Py reads formats up to 1: use a version"


def manifest(step: int = 7, term: int = 0) -> Manifest:
    return Manifest(
        step=Step(step),
        attempt=ATTEMPT,
        job="u1",
        round=Round(1),
        timeline=Timeline(0),
        world=1,
        folder=folder_of(step, ATTEMPT),
        at=1.5,
        term=term,
        chunks=(WrittenChunk(PIECE, "f", 0, 123),),
    )


def sealed(values: dict[str, Any]) -> bytes:
    """A manifest with these values."""
    text = json.dumps(values).encode()
    return b'{"xxh3": "%016x", "manifest": %s}\n' % (xxhash.xxh3_64_intdigest(text), text)


HEADER = SlotHeader(
    job="u1",
    step=Step(7),
    round=Round(1),
    timeline=Timeline(0),
    world=1,
    rank=0,
    part="p",
    write_id="f",
    size=9,
    private_offset=0,
    table=SlotRegion(0, 2, 0),
    digests=SlotRegion(2, 0, 0),
    objects=SlotRegion(2, 7, 0),
)


@dataclass(frozen=True)
class Form:
    """A kind of document."""

    example: Any
    decode: Callable[[bytes], Any]
    encode: Callable[[dict[str, Any]], bytes] = lambda values: json.dumps(values).encode()
    """Returns the document with these values."""

    @property
    def values(self) -> dict[str, Any]:
        """The values of the example."""
        values: dict[str, Any] = json.loads(self.example.encode())
        inner: dict[str, Any] = values.get("manifest", values)
        return inner


FORMS = {
    "manifest": Form(manifest(), Manifest.decode, sealed),
    "header": Form(HEADER, SlotHeader.decode),
    "shares": Form(
        NodeShares((WriteShare(0, False, None, (PIECE,), (7,), (SharedObject("o", 3, 7),)),)),
        NodeShares.decode,
    ),
    "plan": Form(WritePlan({"n0": {0: [0]}}, {"n0": {0: ["o"]}}, ["x"]), WritePlan.decode),
    "files": Form(
        WrittenFiles((StoredChunk(0, 0, 0, 9, 0, 7),), (), (WrittenFile("f", 9, 7),)),
        WrittenFiles.decode,
    ),
    "failure": Form(WriteFailure("x"), WriteFailure.decode),
    "lease": Form(WriterLease("u1", "gpt", ATTEMPT, "h", 1, 2, "w", True, 3), WriterLease.decode),
}


def with_additions(value: Any) -> Any:
    """The value with a further field in each object, except in maps whose keys are data."""
    if isinstance(value, list):
        return [with_additions(one) for one in value]
    if not isinstance(value, dict):
        return value
    below = {key: with_additions(one) for key, one in value.items()}
    return below if value.keys() & {"n0", "0"} else below | {"news": {"x": [1]}}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_additions_are_ignored(form: Form) -> None:
    assert form.decode(form.encode(with_additions(form.values))) == form.example


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_document_without_a_format_has_format_1(form: Form) -> None:
    """A new format must keep this true: the default of the field is the format that is written."""
    values = form.values
    assert values.pop("format") == 1
    assert form.decode(form.encode(values)).format == 1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("found", [2, 1000])
def test_a_newer_format_is_refused_in_words(form: Form, found: int) -> None:
    """Whatever else has changed in it."""
    words = WORDS.replace("format 2", f"format {found}")
    for values in (form.values, {"news": 1}, dict.fromkeys(form.values)):
        with pytest.raises(NewerFormatError, match=words):
            form.decode(form.encode(values | {"format": found}))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("found", [0, -1, "1", 1.5, True, None, 1 << 80, [2]])
def test_a_format_that_is_no_number_is_a_damaged_document(form: Form, found: object) -> None:
    with pytest.raises(ValueError, match="its format: ") as told:
        form.decode(form.encode(form.values | {"format": found}))
    assert not isinstance(told.value, NewerFormatError)


def test_a_list_with_a_newer_format_is_refused_in_words() -> None:
    """A peer answers with the headers of its slots; the first fault may be another one."""
    form = TypeAdapter(list[tuple[str, ValidHeader]])
    values = json.loads(HEADER.encode()) | {"step": None, "format": 2}
    with pytest.raises(NewerFormatError, match=WORDS):
        read(form, json.dumps([["0.0", values]]).encode())


# --- checkpoints ---


@pytest.fixture
def store(tmp_path: Path) -> CheckpointDirectory:
    """A directory with checkpoints of the steps 5, 7 and 8, of which the last two are newer."""
    made = CheckpointDirectory(tmp_path / "ckpt")
    made.prepare()
    for step in (5, 7, 8):
        done = made.commit(manifest(step, term=1))
        folder = Path(made.where(done))
        (folder / "parts").mkdir(parents=True)
        (folder / "f").write_bytes(b"data")
        if step > 5:
            values = json.loads(done.encode())["manifest"] | {"format": 2}
            Path(f"{folder}.json").write_bytes(sealed(values))
    return CheckpointDirectory(made.place.url)


def files(store: CheckpointDirectory, *steps: int) -> dict[str, bytes]:
    root = Path(store.place.url)
    names = {folder_of(step, ATTEMPT) for step in steps}
    return {
        str(path): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0].removesuffix(".json") in names
    }


def test_a_checkpoint_of_a_newer_format_stays(
    store: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    before = files(store, 7, 8)
    assert [m.step for m in store.checkpoints()] == [5]
    assert store.newer == {f"{folder_of(step, ATTEMPT)}.json" for step in (7, 8)}
    assert f"{folder_of(7, ATTEMPT)}.json is skipped: it has format 2" in caplog.text
    assert "is damaged" not in caplog.text
    assert store.sweep(now=0.0) == []
    assert store.retain(KeepRules(newest=1)) == []
    assert files(store, 7, 8) == before
    assert len(before) == 4


def test_nothing_is_committed_that_may_be_older_than_a_newer_format(
    store: CheckpointDirectory,
) -> None:
    before = files(store, 7, 8)
    with pytest.raises(
        SupersededError, match=rf"may be a later checkpoint, and {WORDS}.*wrote it$"
    ):
        store.commit(manifest(6, term=1))
    later = store.commit(manifest(9, term=1))
    assert later.number > SEQUENCE_GAP, "it is newer than any that cannot be read"
    assert files(store, 7, 8) == before


def test_a_person_does_not_remove_a_newer_format_by_an_older_version(
    store: CheckpointDirectory,
) -> None:
    before = files(store, 7, 8)
    argv = ["rm", store.place.url, folder_of(8, ATTEMPT), "--newest-too", "--yes"]
    result = CliRunner().invoke(ckpt, argv)
    assert isinstance(result.exception, ConfigError)
    assert "is skipped: it has format 2" in str(result.exception)
    assert files(store, 7, 8) == before


def test_a_script_does_not_start_anew_beside_newer_formats(store: CheckpointDirectory) -> None:
    sources = CheckpointSources(store=store, round=1, job="u1")
    search = CandidateSearch(sources, logging.getLogger("test"))
    listed = search.candidates()
    assert [one.step for one in listed.found] == [5]
    assert "is skipped: it has format 2" in listed.incomplete_reason
    store.remove(folder_of(5, ATTEMPT))
    with pytest.raises(CheckpointError, match=rf"{WORDS}.*; there is no other checkpoint$"):
        search.candidates()


# --- the writer lease ---


def lease_of(tmp_path: Path, **more: object) -> bytes:
    """Change the fields of the lease file, and return its contents."""
    values = json.loads((tmp_path / LEASE_FILE).read_bytes()) | more
    (tmp_path / LEASE_FILE).write_text(json.dumps(values))
    return (tmp_path / LEASE_FILE).read_bytes()


def test_a_lease_with_additions_is_honoured(tmp_path: Path) -> None:
    """An older version took it for another job's, which cannot be read, and removed it in time."""
    clock = [100.0]
    mine = CheckpointDirectory(tmp_path, clock=lambda: clock[0])
    CheckpointDirectory(tmp_path).acquire_lease(OTHER, "b1")
    lease_of(tmp_path, news={"x": 1})
    for _ in range(2):
        with pytest.raises(DirectoryClaimedError, match=r"another job, bert \(u2\)") as told:
            mine.acquire_lease(ONE, "a1")
        assert told.value.is_alive, "its process lives on this host"
        clock[0] += 2 * LEASE_S


def test_a_job_goes_on_with_its_lease_that_has_additions(tmp_path: Path) -> None:
    newer, older = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    newer.acquire_lease(ONE, "a1", shared=True)
    lease_of(tmp_path, news=1, host="another", writer="")
    older.join(ONE)
    assert older.renew_lease()
    older.acquire_lease(ONE, ATTEMPT)
    assert older.commit(manifest(8)).number == 1


@pytest.mark.parametrize("job", ["u1", "u2"])
def test_a_lease_of_a_newer_format_never_expires(tmp_path: Path, job: str) -> None:
    clock = [100.0]
    mine = CheckpointDirectory(tmp_path, clock=lambda: clock[0])
    mine.acquire_lease(ONE, ATTEMPT)
    before = lease_of(tmp_path, format=2, job=job, host="another")
    other = CheckpointDirectory(tmp_path, clock=lambda: clock[0])
    for _ in range(3):
        with pytest.raises(
            ConfigError, match=rf"{LEASE_FILE}: {WORDS}.*, or remove the file if no job"
        ):
            other.acquire_lease(ONE, "a2")
        other.join(ONE)
        assert not other.renew_lease()
        assert not mine.renew_lease()
        clock[0] += 2 * LEASE_S
    with pytest.raises(SupersededError):
        mine.commit(manifest(8))
    mine.release()
    other.release()
    assert (tmp_path / LEASE_FILE).read_bytes() == before


def test_a_lease_with_the_largest_counter_is_renewed(tmp_path: Path) -> None:
    """The next number was beyond what readers accept, and the job lost its lease for good."""
    store = CheckpointDirectory(tmp_path)
    store.acquire_lease(ONE, ATTEMPT)
    lease_of(tmp_path, beat=MAX_COUNT)
    assert store.renew_lease()
    assert store.renew_lease()
    store.commit(manifest(8))


# --- slots ---


def newer_slot(path: Path) -> bytes:
    """Fill a slot as a newer version does, and return its contents."""
    header = stage(path, [(full("w", (64,)), bytes(256))])
    text = json.dumps(json.loads(header.encode()) | {"format": 2, "news": 1}).encode()
    with ShmSlot(path, write=True) as slot:
        view = slot.view()
        view[shm.HEADER_STRUCT.size : shm.HEADER_STRUCT.size + len(text)] = text
        view[: shm.HEADER_STRUCT.size] = shm.HEADER_STRUCT.pack(
            b"DLRSLOT1", len(text), shm.digest(text)
        )
        return bytes(view)


def test_a_slot_of_a_newer_format_is_not_filled(tmp_path: Path) -> None:
    paths = shm.slots_of(tmp_path, 0)
    before = newer_slot(paths[1])
    assert list(shm.scan(tmp_path)) == [], "it is no checkpoint for this version"
    with pytest.raises(ConfigError, match=rf"0\.1: {WORDS}.*, or remove the file"):
        SlotPool(paths, None)
    assert paths[1].read_bytes() == before
    paths[1].unlink()
    SlotPool(paths, None).close()


class OpenReplicator(Replicator):
    """A replicator whose thread does nothing: the test takes its steps."""

    def pull(self, peer: TransferConnection, pull: ReplicaPull) -> None:
        self._pull(peer, pull)


class Peer(TransferConnection):
    """A peer with one slot."""

    def __init__(self, header: SlotHeader) -> None:
        self.header = header

    def contents(self, *_: object) -> SlotContents:
        return SlotContents(self.header, Layout([]), (), {})


def test_a_replica_of_a_newer_format_is_not_replaced(tmp_path: Path) -> None:
    before = newer_slot(tmp_path / "peer-0.0")
    one = OpenReplicator(tmp_path, "u1", "secret", on_change=lambda: None)
    with pytest.raises(ConfigError, match=rf"peer-0\.0: {WORDS}"):
        one.pull(Peer(HEADER), ReplicaPull("0.0", HEADER, "peer-0.0", False))
    assert (tmp_path / "peer-0.0").read_bytes() == before
