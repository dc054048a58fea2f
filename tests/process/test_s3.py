"""Checkpoints and evidence in a bucket: a real S3 server."""

import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dlrover_py.checkpoint.directory import (
    MIN_PART,
    CheckpointDirectory,
    DirectoryClaimedError,
    DirectoryOwner,
    folder_of,
)
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.errors import CheckpointError, SupersededError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.persister import KeepRules, WriteReply
from dlrover_py.trainer.dcp_import import load_dcp
from tests.flash import OPEN
from tests.process.harness import CALM, Place, eventually, job, members
from tests.process.test_flash import training
from tests.programs import PROGRAMS
from tests.s3 import BUCKET, BUILD_S, Server, serving
from tests.slots import JOB, Persister, full, load_with_torch, order, rows, stage, verify

pytestmark = [pytest.mark.process, pytest.mark.timeout(BUILD_S + 120)]

DRAWN = "0123456789ab"
"""An attempt, as a master draws its name."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A folder of the bucket for one test."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/runs/{request.node.name}"


def manifest(step: int, attempt: str = DRAWN) -> Manifest:
    return Manifest(
        Step(step), attempt, JOB, Round(1), Timeline(0), 1, folder_of(step, attempt), 1.5
    )


def test_a_manifest_is_created_once(url: str) -> None:
    store = CheckpointDirectory(url)
    store.prepare()
    assert store.checkpoints() == []
    start = threading.Barrier(4)
    done: list[Manifest] = []
    refused: list[SupersededError] = []

    def commit(name: str) -> None:
        mine = CheckpointDirectory(url)
        start.wait()
        try:
            done.append(mine.commit(replace(manifest(7), notes=(name,))))
        except SupersededError as error:
            refused.append(error)

    threads = [threading.Thread(target=commit, args=(f"c{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(done), len(refused)) == (1, 3)
    assert store.checkpoints() == done


def test_a_document_that_is_too_large_is_refused(url: str) -> None:
    place = CheckpointDirectory(url).place
    place.make("")
    place.put("ten.json", bytes(10))
    place.put("none.json", b"")
    assert place.read("ten.json", 10) == bytes(10)
    assert place.read("none.json", 0) == b""
    with pytest.raises(OSError, match=r"it has 10 bytes: expected at most 9: .*ten.json"):
        place.read("ten.json", 9)
    with pytest.raises(FileNotFoundError):
        place.read("eleven.json", 9)


def test_claims_tombstones_and_retention_are_those_of_a_folder(url: str) -> None:
    store = CheckpointDirectory(url)
    store.prepare()
    store.acquire_lease(DirectoryOwner(JOB), DRAWN)
    with pytest.raises(DirectoryClaimedError, match="is written by another job, job-uid-1"):
        CheckpointDirectory(url).acquire_lease(DirectoryOwner("another"), "b")
    for step in (1, 2, 3):
        sink = store.place.sink(f"{folder_of(step, DRAWN)}/__0_0.distcp")
        sink.write(bytes(range(200)))
        sink.finish()
        store.place.put(f"{folder_of(step, DRAWN)}/parts/n0.layout.json", b"[]")
        if step < 3:
            store.commit(manifest(step))
    target = bytearray(10)
    store.read_into(manifest(2), "__0_0.distcp", 20, memoryview(target))
    assert bytes(target) == bytes(range(20, 30))
    assert store.sweep(now=0.0) == [folder_of(3, DRAWN)]
    with pytest.raises(SupersededError, match="given the attempt up"):
        store.commit(manifest(3))
    assert store.retain(KeepRules(newest=1)) == [folder_of(1, DRAWN)]
    assert sorted(store.place.names()) == [
        "dlrover.json",
        folder_of(2, DRAWN),
        f"{folder_of(2, DRAWN)}.json",
        f"{folder_of(3, DRAWN)}.json",
    ]
    store.release()


def test_of_an_upload_that_is_called_off_nothing_stays(url: str, server: Server) -> None:
    def sent() -> int:
        """Files of the size of a part that the server has, wherever; -1 while it removes some."""
        try:
            return sum(path.stat().st_size == MIN_PART for path in server.folder.rglob("*"))
        except FileNotFoundError:
            return -1

    assert sent() == 0
    sink = CheckpointDirectory(url).place.sink(f"{folder_of(7, DRAWN)}/__0_0.distcp")
    for _ in range(4):
        sink.write(bytes(MIN_PART))
    eventually(lambda: sent() >= 4, "all parts are there")
    sink.abandon()
    sink.abandon()
    eventually(lambda: sent() == 0, "they are gone")
    CheckpointDirectory(url).place.sink("run-2/__0_0.distcp").abandon()  # before it has begun
    assert CheckpointDirectory(url).place.names() == []


def test_two_nodes_write_into_a_bucket_and_torch_reads_it(
    url: str, server: Server, tmp_path: Path
) -> None:
    values = torch.arange(8 << 20, dtype=torch.float32).reshape(8, 1 << 20)  # 32 MB: in parts
    nodes = [Persister(), Persister()]
    try:
        for rank in range(2):
            mine = values[rank * 4 : rank * 4 + 4].contiguous()
            stage(
                tmp_path / f"pool{rank}/0.0",
                [
                    (rows("model.w", rank * 4, 4, 8, 1 << 20), bytes(mine.view(-1).numpy())),
                    (full(f"rank/{rank}/rng", (3,), "uint8"), bytes(3)),
                ],
                rank=rank,
                world=2,
            )
            nodes[rank].send(
                order(
                    tmp_path / f"pool{rank}",
                    url,
                    "s1",
                    world=2,
                    ranks=(rank,),
                    node=f"n{rank}",
                    writers=("n0", "n1") if rank == 0 else (),
                    deadline_s=120.0,
                )
            )
        ends = [one.end("s1", timeout=150) for one in nodes]
    finally:
        for one in nodes:
            one.close()
    assert [e.phase for e in ends] == [PersistPhase.DONE] * 2, ends
    store = CheckpointDirectory(url)
    (found,) = store.checkpoints()
    assert ends[0].stored is not None
    assert ends[0].stored.where == store.where(found) == f"{url}/step-7.s1"
    verify(store, found)
    # The server's folder is what a plain reader of files sees.
    folder = server.bucket / store.where(found).removeprefix(f"s3://{BUCKET}/")
    loaded = load_with_torch(str(folder), {"model.w": ((8, 1 << 20), "float32")})
    assert torch.equal(loaded["model.w"], values)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_has_saved_is_read_from_a_bucket(
    url: str, server: Server, tmp_path: Path
) -> None:
    saved = {"w": torch.arange(1000.0), "epoch": 7}
    dcp.save(saved, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    where = url.removeprefix(f"s3://{BUCKET}").strip("/")
    shutil.copytree(tmp_path / "theirs", server.bucket / where / "theirs")
    state = {"w": torch.zeros(1000), "epoch": 0}
    load_dcp(state, f"{url}/theirs", rank=0, world=1, log=logging.getLogger("test"))
    assert torch.equal(state["w"], saved["w"])
    assert state["epoch"] == 7
    with pytest.raises(CheckpointError, match="nothing"):
        load_dcp(state, f"{url}/nothing", rank=0, world=1, log=logging.getLogger("test"))


def test_a_server_that_is_gone_is_told_in_time(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    stage(tmp_path / "pool/0.0", [(full("w", (4,)), bytes(16))])
    one = Persister()
    try:
        one.send(order(tmp_path / "pool", url, "g1", deadline_s=15.0))
        answer = one.end("g1")
    finally:
        one.close()
    assert answer.phase is PersistPhase.FAILED
    assert url in answer.why, answer


def test_a_key_that_is_revoked_leaves_what_is_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(step: int) -> WriteReply:
        stage(tmp_path / f"pool/0.{step % 3}", [(full("w", (4,)), bytes(16))], step=step)
        one = Persister()
        try:
            one.send(order(tmp_path / "pool", url, f"k{step}", step=step))
            return one.end(f"k{step}")
        finally:
            one.close()

    assert stored(6).phase is PersistPhase.DONE
    with monkeypatch.context() as revoked:
        revoked.setenv("AWS_SECRET_ACCESS_KEY", "another")
        answer = stored(7)
    assert answer.phase is PersistPhase.FAILED
    assert url in answer.why, answer
    store = CheckpointDirectory(url)
    (before,) = store.checkpoints()
    assert before.step == 6
    verify(store, before)
    assert stored(8).phase is PersistPhase.DONE


def test_jobs_live_from_a_bucket(place: Place, shm: Path, server: Server, url: str) -> None:
    """All nodes of a job at once are lost, then the server hangs; another job goes on."""
    place.env.update(server.env)
    rules: dict[str, object] = {"dir": url, "persistEvery": 4, "saveAtBreakpoint": True}
    store = CheckpointDirectory(url)
    with training(place, "sharded", replicas=2, hosts=2, checkpoint=rules, settings=CALM) as its:
        first = its.reach(4, "storage")
        its.reach(5)
        for node in members(its.run.running(2)):
            its.run.hurt(node.id, "kill")
        its.run.api("POST", "/v1/hosts?count=2")
        again = its.run.running(2, round_after=first.round)
        assert its.loaded(again) == 4
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            its.allow(14)
            eventually(lambda: its.at() == 14, "they train on", within_s=120)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        its.allow(OPEN)
        its.run.until(
            lambda s: s.last_checkpoint and (s.last_checkpoint.stored_step or 0) > 14,
            "what they store then",
            within_s=240,
        )
    newest = max(store.checkpoints(), key=lambda m: m.step)
    verify(store, newest)
    with training(
        place, "sharded", name="next", replicas=1, checkpoint=rules, settings=CALM
    ) as its:
        assert its.loaded(its.run.running(1)) == newest.step, "one node, of what two have written"


def test_evidence_in_a_bucket_outlives_the_machine(place: Place, server: Server, url: str) -> None:
    place.env.update(server.env)
    script = PROGRAMS / "fail_on_a_full_disk.py"
    spec = {"checkpoint": {"dir": url}}
    with job(place, script=script, replicas=2, settings=CALM, spec=spec) as run:
        copies = server.bucket / url.removeprefix(f"s3://{BUCKET}/") / "evidence"
        eventually(lambda: list(copies.glob("*/*.json.gz")), "the copy", within_s=120)
        (kept,) = json.loads(run.cli("job", "evidence", "job", "--json"))
        assert Path(kept["folder"]).is_dir()
        shutil.rmtree(kept["folder"])
        (copy,) = json.loads(run.cli("job", "evidence", "job", "--json"))
    assert copy["folder"].startswith(f"{url}/evidence/job-")
    assert copy | {"folder": ""} == kept | {"folder": ""}
