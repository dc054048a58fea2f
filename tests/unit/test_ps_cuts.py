"""Cuts of a parameter server: saved, read back, refused when damaged, and exported."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zmq
from click.testing import CliRunner
from pyarrow import parquet
from safetensors.numpy import load_file

from dlrover_py.checkpoint.directory import CheckpointDirectory, DirectoryOwner
from dlrover_py.cli.checkpoints import ckpt
from dlrover_py.cli.commands import root
from dlrover_py.cli.ps import ps as ps_command
from dlrover_py.protocol.errors import CheckpointError, ConfigError, SupersededError
from dlrover_py.protocol.manifest import TABLES_KEY, Manifest, WrittenChunk
from dlrover_py.protocol.slots import TensorChunk
from dlrover_py.ps import specs
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.cluster_map import ClusterMap, CutPlace, Placement
from dlrover_py.ps.coordinator import Coordinator
from dlrover_py.ps.cuts import DOCUMENT, CutDirectory, CutFile, SavedCut
from dlrover_py.ps.export import export
from dlrover_py.ps.hashing import bucket_of, salt_of
from dlrover_py.ps.map_store import MapFile
from dlrover_py.ps.meetings import Meetings
from dlrover_py.ps.messages import (
    CutPart,
    Meet,
    Met,
    Push,
    RefusalReason,
    SavedArray,
    SavedBucket,
)
from dlrover_py.ps.planner import Planner, PlanRules
from dlrover_py.ps.replication import Replica
from dlrover_py.ps.specs import Consistency, TableSpec
from dlrover_py.ps.store import Store
from dlrover_py.ps.transfer import CutReader, CutWriter, parts_of
from dlrover_py.ps.wire import decode, encode, send
from tests.ps_threads import client, connect, servers

ADAM = TableSpec("user", 4, specs.adam(0.1))
SUM = TableSpec("count", 2, specs.sgd(1.0, momentum=0.5), specs.uniform(0.0, 0.0))
EMPTY = TableSpec("empty", 3, specs.ftrl(0.1))
IDS = np.arange(200, dtype=np.int64) * 7919 - 500
PLACE = CutPlace("/cuts", "step-3.0123456789abcdef", 3)


def push(worker: PsClient, seed: int) -> None:
    grads = np.random.default_rng(seed).normal(size=(len(IDS), 4)).astype(np.float32)
    worker.push({"user": (IDS, grads), "count": (IDS[:9], grads[:9, :2])}).result()


def rows(worker: PsClient) -> list[Any]:
    found = worker.pull({"user": IDS, "count": IDS}).result()
    return [found["user"].tolist(), found["count"].tolist()]


def tables(worker: PsClient) -> None:
    for spec in (ADAM, SUM, EMPTY):
        worker.create(spec)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """A directory with a cut after two pushes, and the rows after two, three and four pushes."""
    folder = tmp_path_factory.mktemp("saved")
    cuts, after = folder / "cuts", []
    with servers(folder, 2, 8, str(cuts)) as access, client(access) as worker:
        tables(worker)
        push(worker, 0)
        push(worker, 1)
        worker.save(2, 1)
        after.append(rows(worker))
        for seed in (2, 3):
            push(worker, seed)
            after.append(rows(worker))
    return cuts, after


@pytest.fixture
def copied(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the directory, which a test may damage."""
    shutil.copytree(saved[0], tmp_path / "cuts")
    return tmp_path / "cuts"


@pytest.mark.parametrize("count", [1, 3])
def test_training_goes_on_as_without_a_stop(
    saved: tuple[Path, list[list[Any]]], tmp_path: Path, count: int
) -> None:
    """The optimizer's values, the steps of rows and the buckets are those of the cut, too."""
    cuts, after = saved
    with servers(tmp_path, count, 64, str(cuts), "2") as access, client(access) as worker:
        assert len(worker.map.placements) == 8
        assert rows(worker) == after[0]
        tables(worker)
        with pytest.raises(ConfigError, match="other properties"):
            worker.create(replace(ADAM, dim=8))
        for seed in (2, 3):
            push(worker, seed)
            assert rows(worker) == after[seed - 1]


def test_the_last_push_of_each_worker_is_in_the_cut(saved: tuple[Path, Any]) -> None:
    cut = SavedCut.open(str(saved[0]))
    assert cut is not None
    incarnation = cut.document.clients["worker-0"]
    assert set(bucket_of(IDS, salt_of("user"), 8).tolist()) == set(range(8))
    assert [one["worker-0"] for one in cut.document.pushes] == [(incarnation, 2)] * 8


def test_all_workers_go_back_together(tmp_path: Path) -> None:
    cuts = str(tmp_path / "cuts")
    with (
        servers(tmp_path, 2, 8, cuts) as access,
        client(access) as one,
        client(access, "worker-1") as two,
        client(access, "evaluation") as third,
        ThreadPoolExecutor() as threads,
    ):
        tables(one)
        assert one.restore(world=1) is None
        push(one, 0)
        push(third, 5)
        waiting = [threads.submit(worker.save, 4, 2) for worker in (one, two)]
        for future in waiting:
            future.result()
        before = rows(one)
        push(one, 1)
        push(two, 2)
        push(one, 3)
        assert rows(two) != before
        going = [threads.submit(worker.restore, None, 2) for worker in (one, two)]
        assert [future.result() for future in going] == [4, 4]
        assert rows(one) == rows(two) == before
        with pytest.raises((OSError, SupersededError)):
            push(third, 4)
        push(two, 1)
        push(one, 2)
        with pytest.raises(CheckpointError, match="there is no cut '9'"):
            one.restore(9, 1)


@pytest.mark.parametrize("consistency", [None, specs.sync()])
@pytest.mark.parametrize("begun", [1, 3])
def test_every_push_counts_after_the_return_to_the_cut_of_another_run(
    tmp_path: Path, consistency: Consistency | None, begun: int
) -> None:
    """Its workers had the same names, as often begun or more often, and had pushed more."""
    cuts, one = str(tmp_path / "cuts"), np.ones((len(IDS), 2), np.float32)
    plain = TableSpec("plain", 2, specs.sgd(1.0), specs.uniform(0.0, 0.0))
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()

    def train(worker: PsClient, pushes: int) -> float:
        for _ in range(pushes):
            worker.push({"plain": (IDS, -one)}).result()
        found = worker.pull({"plain": IDS}).result()["plain"]
        assert (found == found[0, 0]).all()
        return float(found[0, 0])

    def ready(worker: PsClient) -> None:
        worker.create(plain)
        if consistency is not None:
            worker.use(consistency, 1)

    with servers(tmp_path / "first", 2, 8, cuts) as access:
        for _ in range(begun - 1):
            with client(access):
                pass
        with client(access) as worker:
            ready(worker)
            assert train(worker, 5) == 5
            worker.save(5, 1)
    with servers(tmp_path / "second", 2, 8, cuts) as access, client(access) as worker:
        ready(worker)
        assert worker.restore(world=1) == 5
        assert [train(worker, 1) for _ in range(3)] == [6, 7, 8]


@pytest.mark.parametrize("then_saved", [False, True])
def test_the_newest_cut_is_that_of_these_rows_after_a_new_coordinator_too(
    tmp_path: Path, then_saved: bool
) -> None:
    """The user went back to step 10, because something was wrong with step 20."""
    cuts = str(tmp_path / "cuts")
    with servers(tmp_path, 2, 8, cuts) as access, client(access) as worker:
        tables(worker)
        for step in (10, 20):
            push(worker, step)
            worker.save(step, 1)
        assert worker.restore(10, 1) == 10
        if then_saved:
            worker.save(15, 1)
    with servers(tmp_path, 2, 8, cuts) as access, client(access) as worker:
        assert worker.restore(world=1) == (15 if then_saved else 10)
        with pytest.raises(CheckpointError, match=r"expected one of the steps .*20"):
            worker.restore(12, 1)
        worker.create(replace(SUM, name="renamed"))
        with pytest.raises(CheckpointError, match=r"new=\['renamed'\]"):
            worker.restore(10, 1)
        assert worker.restore(10, 1, new=["renamed"]) == 10


def test_without_a_directory_nothing_is_saved(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as access, client(access) as worker:
        with pytest.raises(CheckpointError, match=r"replicaSpecs\.ps\.checkpoints.*--checkpoints"):
            worker.save(1, 1)
        with pytest.raises(CheckpointError, match="--checkpoints DIR"):
            worker.restore(1, 1)
        tables(worker)
        push(worker, 0)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@contextmanager
def nothing_changes(cuts: Path, folder: Path, words: str) -> Iterator[None]:
    """Check that running servers refuse a cut and stay as they are."""
    with servers(folder, 2, 8, str(cuts)) as access, client(access) as worker:
        tables(worker)
        push(worker, 7)
        before = rows(worker)
        yield
        with pytest.raises(CheckpointError, match=words):
            worker.restore(None, 1)
        assert rows(worker) == before
        push(worker, 8)


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("ps-s0-*.rows", lambda path: flip(path, 100), "differ from those that were written"),
        ("ps-s1-*.rows", lambda path: path.write_bytes(path.read_bytes()[:-1]), "rows"),
        ("ps-s1-*.rows", lambda path: path.unlink(), "No such file"),
        ("ps.cut", lambda path: flip(path, 30), "differ from those that were written"),
        ("../step-*.json", lambda path: flip(path, 60), "is damaged"),
        ("../step-*.json", lambda path: path.write_bytes(path.read_bytes()[:-9]), "is damaged"),
    ],
)
def test_a_damaged_cut_is_refused(
    copied: Path, tmp_path: Path, file: str, harm: Any, words: str
) -> None:
    (folder,) = copied.glob("step-*.????????????????")
    pattern = file.removeprefix("../")
    (path,) = (copied if pattern != file else folder).glob(pattern)
    with nothing_changes(copied, tmp_path, words):
        harm(path)
    for command in (
        ["serve", "--checkpoints", str(copied), "--restore", "newest", "--", "false"],
        ["export", str(copied), "--to", str(tmp_path / "out.pt")],
    ):
        result = CliRunner().invoke(ps_command, command)
        assert isinstance(result.exception, CheckpointError), result
        assert words in str(result.exception)
    assert not (tmp_path / "out.pt").exists()


def forge(cuts: Path, document: dict[str, Any], chunks: dict[str, Any]) -> None:
    """Write a cut of another form, with right digests.

    Args:
        cuts: The directory.
        document: Parts of ``ps.cut`` that are replaced.
        chunks: Fields that are replaced in all chunks of one key.
    """
    (path,) = cuts.glob("step-*.json")
    manifest = Manifest.decode(path.read_bytes())
    file = cuts / manifest.folder / DOCUMENT
    data = json.dumps(json.loads(file.read_bytes()) | document).encode()
    file.write_bytes(data)
    whole = TensorChunk(TABLES_KEY, "uint8", (len(data),), (len(data),), (0,))
    described = WrittenChunk(whole, DOCUMENT, 0, xxhash.xxh3_64_intdigest(data))
    made = [described if c.chunk.key == TABLES_KEY else c for c in manifest.chunks]
    made = [
        c._replace(chunk=c.chunk._replace(**chunks[c.chunk.key])) if c.chunk.key in chunks else c
        for c in made
    ]
    path.write_bytes(replace(manifest, chunks=tuple(made), sums=()).encode())


@pytest.mark.parametrize(
    ("document", "chunks"),
    [
        ({"rows": {}}, {}),
        ({"rows": {"user": [1], "count": [1], "empty": [0]}}, {}),
        ({"rows": {"user": [-1] * 8, "count": [1] * 8, "empty": [0] * 8}}, {}),
        ({"pushes": []}, {}),
        ({"tables": [{"name": "../x", "dim": 4}]}, {}),
        ({"tables": [{"name": "user", "dim": 1 << 40}]}, {}),
        ({"tables": []}, {}),
        ({}, {"user/ids": {"dtype": "int32"}}),
        ({}, {TABLES_KEY: {"at": (1,)}}),
        ({}, {TABLES_KEY: {"dtype": "x"}}),
        ({}, {TABLES_KEY: {"shape": (1 << 40,), "whole": (1 << 40,)}}),
    ],
)
def test_a_cut_of_another_form_is_refused(
    copied: Path, document: dict[str, Any], chunks: dict[str, Any]
) -> None:
    """Otherwise a server would wait for rows that its thread cannot read."""
    forge(copied, document, chunks)

    def read() -> None:
        found = SavedCut.open(str(copied))
        assert found is not None
        found.verify()

    with pytest.raises(CheckpointError, match=copied.name):
        read()


def test_a_cut_without_a_manifest_does_not_exist(copied: Path, tmp_path: Path) -> None:
    (manifest,) = copied.glob("step-*.json")
    manifest.unlink()
    assert SavedCut.open(str(copied)) is None
    with pytest.raises(ConfigError, match="there is no cut '2'"):
        SavedCut.open(str(copied), "2")
    with servers(tmp_path, 1, cuts=str(copied)) as access, client(access) as worker:
        assert worker.restore(world=1) is None
        worker.save(5, 1)
    assert [one.step for one in CheckpointDirectory(copied).checkpoints()] == [5]
    assert not list(copied.glob("step-2.*/*.rows")), "what was not finished was left"


def test_a_write_that_fails_saves_nothing(tmp_path: Path) -> None:
    cuts = tmp_path / "cuts"
    with servers(tmp_path, 1, cuts=str(cuts)) as access, client(access) as worker:
        tables(worker)
        push(worker, 0)
        worker.save(1, 1)
        shutil.rmtree(cuts)
        cuts.write_text("a file where the directory was")
        with pytest.raises(CheckpointError, match="not saved"):
            worker.save(2, 1)
        cuts.unlink()
        push(worker, 1)
        worker.save(3, 1)
    assert 3 in [one.step for one in CheckpointDirectory(cuts).checkpoints()]


@contextmanager
def coordinator_of_one(folder: Path, cuts: Path) -> Iterator[tuple[Coordinator, int, Any]]:
    """A coordinator that knows server s0 and worker a, with a's incarnation and a socket to it."""
    rules, store = PlanRules(buckets=2, replicas=1), MapFile(folder / "map")
    made = Coordinator("job", "token", store, rules, 0.0, cuts=CutDirectory(str(cuts)))
    context = zmq.Context()
    with closing(made) as one:
        one.planner.heard("s0", "tcp://127.0.0.1:1", 0.0)
        incarnation = one.planner.join("a", "call")
        line = connect(context, one.access.address, one.access.key)
        yield one, incarnation, line
        context.destroy(linger=0)


def test_a_cut_that_nobody_waits_for_is_given_up(tmp_path: Path) -> None:
    """Its server never writes, and the worker has ended: pushes of others must go on."""
    cuts = tmp_path / "cuts"
    with coordinator_of_one(tmp_path, cuts) as (one, incarnation, worker):

        def ask(now: float) -> None:
            asked = Meet("a", incarnation, 1, 3, 1, restore=False)
            send(worker, asked, [], one.access.key)
            assert one.socket.poll(20_000)
            one.receive(now)

        def listen(since: int, until: int) -> None:
            for now in range(2 * since, 2 * until):
                one.planner.heard("s0", "tcp://127.0.0.1:1", now / 2)
                one.tick(now / 2)

        ask(0.0)
        listen(0, 8)
        ask(8.0)
        listen(8, 17)
        assert one.planner.map.cut is not None
        listen(17, 19)
        assert one.planner.map.cut is None
        assert not list(cuts.glob("step-3.*/*.rows"))
        ask(19.0)
        met = None
        while not isinstance(met, Met):
            assert worker.poll(20_000)
            met, _ = decode(worker.recv_multipart(), one.access.key)
        assert met.words == "no worker waits for it any more"


def test_the_next_coordinator_answers_who_has_not_heard_that_the_cut_exists(
    tmp_path: Path,
) -> None:
    """The other worker has its answer, and does not ask again."""
    cuts = tmp_path / "cuts"
    with coordinator_of_one(tmp_path, cuts) as (one, incarnation, _):
        known = replace(one.planner.map, source=PLACE, met={"a": (incarnation, 1)})
    (tmp_path / "map").write_bytes(msgspec.json.encode(known))
    with coordinator_of_one(tmp_path, cuts) as (one, again, worker):
        assert again == incarnation

        def answer(number: int, wait_ms: int) -> Met | None:
            asked = Meet("a", again, number, PLACE.step, 2, restore=False)
            send(worker, asked, [], one.access.key)
            assert one.socket.poll(20_000)
            one.receive(0.0)
            one.tick(0.0)
            while worker.poll(wait_ms):
                found, _ = decode(worker.recv_multipart(), one.access.key)
                if isinstance(found, Met):
                    return found
            return None

        assert answer(2, 200) is None
        met = answer(1, 20_000)
        assert met is not None
        assert (met.step, met.folder, met.words) == (PLACE.step, PLACE.folder, "")


def test_the_next_coordinator_of_a_job_writes_at_once_and_the_last_one_no_more(
    tmp_path: Path,
) -> None:
    job, other = DirectoryOwner("ps-1", "the servers of x"), DirectoryOwner("ps-2", "another job")
    known = ClusterMap("x", placements=(Placement(1, "s0"),))
    written = SavedBucket(0, {}, ())
    with closing(CutDirectory(str(tmp_path), owner=job)) as first:
        before = first.begin(1)
        with pytest.raises(ConfigError, match="written by another job, the servers of x"):
            CutDirectory(str(tmp_path), owner=other).begin(1)
        with closing(CutDirectory(str(tmp_path), owner=job)) as second:
            place = second.begin(2)
            with pytest.raises((OSError, SupersededError)):
                first.commit(before, known, [CutPart("s0", before.folder, "x", (written,))], 1)
            second.commit(place, known, [CutPart("s0", place.folder, "x", (written,))], 1)
    found = SavedCut.open(str(tmp_path))
    assert found is not None
    assert found.place == place


def test_what_a_server_has_written_fits_into_messages() -> None:
    """The coordinator did not take more than 32 MiB, and the call waited until its time was over"""
    arrays = tuple(
        SavedArray(f"a-table-{at // 4}", at % 4, (9, 64), 1 << 40, at) for at in range(600)
    )
    buckets = tuple(SavedBucket(at, {"worker-0": (1, at)}, arrays) for at in range(1024))
    whole = CutPart("s0", "step-1.0", "file", buckets)
    with pytest.raises(ConfigError, match=r"a CutPart would have .* besides its arrays"):
        encode(whole, [], b"k" * 16)
    parts = list(parts_of(whole))
    assert [bucket for part in parts for bucket in part.buckets] == list(buckets)
    for part in parts:
        encode(part, [], b"k" * 16)
    assert list(parts_of(replace(whole, buckets=buckets[:2]))) == [
        replace(whole, buckets=buckets[:2])
    ]


def test_a_cut_is_made_of_all_messages_of_a_server(tmp_path: Path) -> None:
    cuts = tmp_path / "cuts"
    with coordinator_of_one(tmp_path, cuts) as (one, incarnation, line):

        def say(message: Any) -> None:
            send(line, message, [], one.access.key)
            assert one.socket.poll(20_000)
            one.receive(0.0)

        say(Meet("a", incarnation, 1, 3, 1, restore=False))
        assert one.planner.map.cut is not None
        for bucket in (1, 1, 0):
            assert one.planner.map.cut is not None
            written = (SavedBucket(bucket, {}, ()),)
            say(CutPart("s0", one.planner.map.cut.folder, "file", written))
        assert one.planner.map.cut is None
        assert [found.step for found in CheckpointDirectory(cuts).checkpoints()] == [3]


# --- Export ---


@pytest.mark.parametrize("end", [".safetensors", ".pt", ".parquet"])
def test_rows_are_exported(saved: tuple[Path, list[list[Any]]], tmp_path: Path, end: str) -> None:
    cuts, after = saved
    out, precious = tmp_path / f"tables{end}", tmp_path / "thesis.tex"
    precious.write_text("precious")
    # Another user may have put a link here, if all can write to the folder.
    (tmp_path / f".tables{end}.part").symlink_to(precious)
    result = CliRunner().invoke(root, ["ps", "export", str(cuts), "--to", str(out)])
    assert result.exception is None, result
    assert "209 rows of 3 tables, step 2" in result.output
    if end == ".parquet":
        table = parquet.read_table(out).to_pydict()
        found = {
            name: {
                id_: row
                for of, id_, row in zip(table["table"], table["id"], table["weight"], strict=True)
                if of == name
            }
            for name in ("user", "count", "empty")
        }
    else:
        flat = load_file(out) if end == ".safetensors" else torch.load(out, weights_only=True)
        assert flat["empty.weight"].shape == (0, 3)
        found = {
            name: dict(
                zip(flat[f"{name}.ids"].tolist(), flat[f"{name}.weight"].tolist(), strict=True)
            )
            for name in ("user", "count", "empty")
        }
    assert [found["user"][id_] for id_ in IDS.tolist()] == after[0][0]
    assert [found["count"][id_] for id_ in IDS[:9].tolist()] == after[0][1][:9]
    assert len(found["count"]) == 9
    assert not found["empty"]
    assert precious.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {
        out.name,
        precious.name,
        f".tables{end}.part",
    }


def test_the_newest_cut_is_exported_each_time_without_a_choice_of_one() -> None:
    call = ["export", "cuts", "--to", "rows.pt", "--every", "5", "--which", "3"]
    result = CliRunner().invoke(ps_command, call)
    assert "expected no --which" in str(result.exception)


def test_what_cannot_be_exported(saved: tuple[Path, Any], tmp_path: Path) -> None:
    cut = SavedCut.open(str(saved[0]))
    assert cut is not None
    with pytest.raises(ConfigError, match=r"\.safetensors, \.parquet, \.pt"):
        export(cut, tmp_path / "rows.csv")
    (tmp_path / "rows.pt").touch()
    with pytest.raises(ConfigError, match="exists already"):
        export(cut, tmp_path / "rows.pt")
    result = CliRunner().invoke(ps_command, ["export", str(tmp_path), "--to", "out.pt"])
    assert "no cut of a parameter server" in str(result.exception)


def test_the_words_for_checkpoints_work(saved: tuple[Path, Any], tmp_path: Path) -> None:
    result = CliRunner().invoke(ckpt, ["verify", str(saved[0])])
    assert (result.exit_code, "intact" in result.output) == (0, True), result
    out = tmp_path / "all.safetensors"
    result = CliRunner().invoke(ckpt, ["export", str(saved[0]), str(out), "--keys", "user/"])
    assert result.exception is None, result
    assert sorted(load_file(out)) == ["ids", "slot0", "slot1", "steps", "weight"]


# --- The machines ---


def meet(client: str, **more: Any) -> Meet:
    fields = {"incarnation": 1, "number": 1, "step": 4, "world": 2, "restore": False}
    return Meet(client, **(fields | more))


def test_a_meeting_begins_when_all_have_come() -> None:
    meetings, newest = Meetings(), {"a": 1, "b": 1, "c": 1}
    assert meetings.join(meet("b"), newest, 0.0) == ()
    assert meetings.join(meet("b"), newest, 0.1) == ()
    both = meetings.join(meet("a"), newest, 0.2)
    assert both == (meet("a"), meet("b"))
    assert meetings.answer(meet("a")) is None
    meetings.end(both, 4, 9)
    met = meetings.answer(meet("a"))
    assert met is not None
    assert (met.step, met.epoch, met.words) == (4, 9, "")
    assert meetings.answer(meet("a", number=2)) is None
    assert meetings.answer(meet("c")) is None


def test_who_has_gone_is_not_counted() -> None:
    meetings = Meetings()
    meetings.join(meet("a"), {"a": 1, "b": 1}, 0.0)
    assert meetings.join(meet("b"), {"a": 1, "b": 1}, 60.0) == (), "a is silent for a minute"
    again = meet("a", incarnation=2)
    assert meetings.join(meet("b"), {"a": 2, "b": 1}, 60.1) == ()
    assert len(meetings.join(again, {"a": 2, "b": 1}, 60.2)) == 2
    with pytest.raises(ConfigError, match="newer client"):
        meetings.join(meet("a"), {"a": 2}, 61.0)


def test_different_calls_are_refused_with_words() -> None:
    meetings, newest = Meetings(), {"a": 1, "b": 1}
    for second in range(10):
        assert meetings.join(meet("a"), newest, float(second)) == ()
        assert meetings.join(meet("b", step=5), newest, float(second)) == ()
    with pytest.raises(ConfigError, match="a saves step 4 with 2 workers, but b saves step 5"):
        meetings.join(meet("a"), newest, 11.0)
    for wrong in (meet("a", step=-1), meet("a", step=1 << 62), meet("a", world=0)):
        with pytest.raises(ConfigError, match="expected a step"):
            meetings.join(wrong, newest, 0.0)


def planner(replicas: int = 2) -> Planner:
    made = Planner(ClusterMap("job"), PlanRules(buckets=4, servers=2, replicas=replicas), 0.0)
    for name in ("s0", "s1"):
        made.heard(name, f"at-{name}", 0.0)
    made.join("old", "call")
    made.create_table(ADAM, "staying", made.join("staying", "call"))
    return made


def test_all_buckets_go_back_and_none_is_lost_while_it_is_read() -> None:
    made = planner()
    terms = [one.term for one in made.map.placements]
    made.restore(PLACE, (ADAM,), 4, {"staying"})
    known = made.map
    assert all(one.loading and not one.followers for one in known.placements)
    assert all(one.term > term for one, term in zip(known.placements, terms, strict=True))
    assert known.clients["old"] == known.restored > known.clients["staying"]
    made.lost("s0")
    assert {one.primary for one in made.map.placements} == {"s1"}
    assert not any(one.lost or one.followers for one in made.map.placements)
    for bucket, one in enumerate(made.map.placements):
        made.loaded("s0", bucket, one.term)
        made.loaded("s1", bucket, one.term - 1)
        assert made.map.placements[bucket].loading, "another server, or an older term, said so"
        made.loaded("s1", bucket, one.term)
    assert not any(one.loading for one in made.map.placements)
    made.lost("s1")
    assert all(one.lost for one in made.map.placements)
    made.heard("s2", "at-s2", 1.0)
    assert all(one.lost for one in made.map.placements), "the cut was used without being asked for"
    made.restore(PLACE, (ADAM,), 4, set())
    assert {(one.primary, one.loading, one.lost) for one in made.map.placements} == {
        ("s2", True, False)
    }


def test_no_row_is_lost_with_the_last_server_while_the_cut_is_read() -> None:
    """The rows are in the cut, which the next server reads."""
    made = planner()
    made.lost("s0")
    made.restore(PLACE, (ADAM,), 4, {"staying"})
    made.lost("s1")
    assert not any(one.lost for one in made.map.placements)
    made.heard("s2", "at-s2", 1.0)
    assert {(one.primary, one.loading, one.lost) for one in made.map.placements} == {
        ("s2", True, False)
    }


def test_a_cut_of_other_tables_changes_nothing() -> None:
    made = planner()
    before = made.map
    with pytest.raises(ConfigError, match="user was saved with other properties"):
        made.restore(PLACE, (replace(ADAM, dim=8),), 4, set())
    with pytest.raises(ConfigError, match="the cut has 8 buckets"):
        made.restore(PLACE, (ADAM,), 8, set())
    assert made.map == before


def test_a_table_that_may_be_renamed_does_not_begin_anew_without_a_word() -> None:
    """It had its first values after the return, and nothing said so."""
    made = planner()
    with pytest.raises(ConfigError, match=r"the cut has no table user, .* not use its table count"):
        made.restore(PLACE, (SUM,), 4, {"staying"})
    made.restore(PLACE, (SUM,), 4, {"staying"}, ["user"])
    assert {table.name for table in made.map.tables} == {"user", "count"}
    made.create_table(EMPTY, "staying", made.map.clients["staying"])
    made.restore(PLACE, (ADAM,), 4, {"staying"})  # it has all that it had before, and one more
    made.restore(PLACE, (ADAM, SUM, EMPTY), 4, {"staying"})  # one is not used any more


def test_a_worker_that_is_started_again_may_have_renamed_a_table_too() -> None:
    """The coordinator knew both names, so rows of the new one had their first values."""
    made = planner()
    made.create_table(SUM, "staying", made.join("staying", "another call"))
    made.create_table(ADAM, "old", made.map.clients["old"])  # it does not go back
    with pytest.raises(ConfigError, match=r"the cut has no table count, .* not use its table user"):
        made.restore(PLACE, (ADAM,), 4, {"staying"})
    made.restore(PLACE, (ADAM,), 4, {"staying", "old"})
    made.create_table(ADAM, "staying", 1)  # a message of its life before comes late
    with pytest.raises(ConfigError, match="not use its table user"):
        made.restore(PLACE, (ADAM,), 4, {"staying"})


@pytest.mark.parametrize("then_saved", [False, True])
def test_a_script_that_renames_a_table_is_refused_by_the_same_coordinator(
    tmp_path: Path, then_saved: bool
) -> None:
    cuts = str(tmp_path / "cuts")
    with servers(tmp_path, 1, 4, cuts) as access:
        with client(access) as worker:
            worker.create(SUM)
            worker.save(10, 1)
        with client(access) as worker:
            worker.create(replace(SUM, name="renamed"))
            if then_saved:
                worker.save(20, 1)
                assert worker.restore(20, 1) == 20, "the cut has both"
            with pytest.raises(CheckpointError, match=r"new=\['renamed'\]"):
                worker.restore(10, 1)


def test_a_bucket_that_comes_in_parts_is_saved_whole(tmp_path: Path) -> None:
    store = Store(2)
    store.add([ADAM, SUM, EMPTY])
    grads = np.ones((len(IDS), 4), np.float32)
    store.apply([("user", [IDS, grads]), ("count", [IDS, grads[:, :2]])], range(2))
    with closing(CutDirectory(str(tmp_path))) as directory:
        place = directory.begin(1)
        writer = CutWriter(place, "s0", [0, 1], lambda bucket: store.parts(bucket, 500))
        given, deadline = 0, time.monotonic() + 60
        while writer.result is None and time.monotonic() < deadline:
            if writer.wants:
                writer.give(lambda bucket: {"w": (1, bucket)})
                given += 1
        assert isinstance(writer.result, CutPart)
        assert given > 20
        known = ClusterMap("j", 1, tables=(ADAM, SUM, EMPTY), placements=(Placement(1, "s0"),) * 2)
        directory.commit(place, known, [writer.result], 1)
    cut = SavedCut.open(str(tmp_path))
    assert cut is not None
    assert cut.document.pushes == ({"w": (1, 0)}, {"w": (1, 1)})
    for bucket in range(2):
        (expected,) = (part for part, _ in store.parts(bucket, 1 << 20))
        for (name, arrays), (other, found) in zip(expected, cut.read(bucket), strict=True):
            assert name == other
            assert all((a == b).all() for a, b in zip(arrays, found, strict=True))


def test_a_server_has_other_work_between_two_buckets_that_it_reads(
    saved: tuple[Path, Any],
) -> None:
    """All buckets in one turn were more than the time after which a server counts as dead."""
    cut = SavedCut.open(str(saved[0]))
    assert cut is not None
    for passes_s, turns in ((1.0, [[3], [5], []]), (0.1, [[3, 5], [], []])):
        before = set(threading.enumerate())
        reader = CutReader(cut.place, [(3, 1), (5, 1)])
        for thread in set(threading.enumerate()) - before:
            thread.join(60)  # it has read both
        clock = (passes_s * turn for turn in count())
        found = [[bucket for bucket, _ in reader.taken(partial(next, clock), 0.5)] for _ in turns]
        assert (found, reader.error) == (turns, "")


def test_a_cut_of_which_older_ones_cannot_be_removed_exists(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cuts = tmp_path / "cuts"
    with servers(tmp_path, 1, cuts=str(cuts)) as access, client(access) as worker:
        tables(worker)
        for step in (1, 2, 3):
            worker.save(step, 1)
        (folder,) = (one for one in cuts.glob("step-1.*") if one.is_dir())
        (folder / "ps-s0-0.rows").mkdir()  # unlink refuses it
        worker.save(4, 1)
        assert "older cuts cannot be removed" in caplog.text
        assert worker.restore(4, 1) == 4


def test_files_that_servers_have_written_elsewhere_are_no_cut(tmp_path: Path) -> None:
    store = Store(1)
    store.add([ADAM])
    store.apply([("user", [IDS, np.ones((len(IDS), 4), np.float32)])], range(1))
    known = ClusterMap("j", 1, tables=(ADAM,), placements=(Placement(1, "s0"),))
    with closing(CutDirectory(str(tmp_path / "cuts"))) as directory:
        for cut_off in (None, -1):
            place = directory.begin(1)
            file = CutFile(place, "s0")
            (rows,) = (part for part, _ in store.parts(0, 1 << 20))
            file.add(0, {}, rows)
            file.finish()
            path = tmp_path / "cuts" / place.folder / file.name
            if cut_off is None:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:cut_off])
            part = CutPart("s0", place.folder, file.name, tuple(file.buckets))
            with pytest.raises(CheckpointError, match=r"server s0 has written \d+ bytes.*share"):
                directory.commit(place, known, [part], 1)
            assert SavedCut.open(str(tmp_path / "cuts")) is None


def replica(known: ClusterMap) -> Replica:
    made = Replica("s0", Store(1))
    made.on_map(known, 0.0)
    return made


def sent(server: Replica, epoch: int, seq: int) -> list[Any]:
    """Return the answers to a push of one row."""
    payload: Any = [("user", [np.zeros(1, np.int64), np.ones((1, 4), np.float32)])]
    server.on_push(b"worker", Push("w", 1, epoch, seq, (0,)), payload, 0.0)
    return [
        one.message.reason if hasattr(one.message, "reason") else "done" for one in server.take()
    ]


def test_no_push_is_applied_while_a_cut_is_written() -> None:
    known = ClusterMap("job", 1, tables=(ADAM,), placements=(Placement(1, "s0"),))
    server = replica(known)
    assert sent(server, 1, 1) == ["done"]
    server.on_map(replace(known, epoch=2, cut=PLACE), 0.0)
    assert sent(server, 2, 2) == [RefusalReason.MOVED]
    assert sent(server, 2, 1) == ["done"], "a push that is in the cut is acknowledged again"
    server.on_map(replace(known, epoch=3), 0.0)
    assert sent(server, 3, 2) == ["done"]


def test_a_push_from_before_the_return_is_not_applied() -> None:
    """It may be a copy that was long under way. The same worker goes on with greater numbers."""
    loading = Placement(2, "s0", loading=True)
    known = ClusterMap("job", 5, tables=(ADAM,), placements=(Placement(1, "s0"),))
    server = replica(known)
    assert sent(server, 5, 7) == ["done"]
    known = replace(known, epoch=6, source=PLACE, restored=6, placements=(loading,))
    server.on_map(known, 0.0)
    assert (server.to_load(), server.led()) == ([(0, 2)], [])
    assert sent(server, 6, 8) == [RefusalReason.MOVED]
    server.on_loaded(0, 1, [])
    assert server.to_load() == [(0, 2)], "what was asked for in an older term was taken"
    server.on_loaded(0, 2, [])
    assert (server.loaded(), server.to_load(), server.led()) == ([(0, 2)], [], [])
    placements = (replace(loading, term=3, loading=False),)
    server.on_map(replace(known, epoch=7, placements=placements), 0.0)
    assert sent(server, 5, 4) == [RefusalReason.MOVED]
    assert not server.numbers(0)
    assert sent(server, 7, 3) == ["done"]
    assert server.numbers(0) == {"w": (1, 3)}, "it was taken for a push that the cut has"
    assert sent(server, 7, 9) == ["done"]
    assert server.duplicates == 0
