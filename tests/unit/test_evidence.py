"""Bundles of evidence: for which events they are kept, what is in them, and how large they are."""

import asyncio
import base64
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

from dlrover_py.cli.commands import root
from dlrover_py.cli.evidence import last_known, snapshot_in_copies, with_copies
from dlrover_py.cli.runs import bundles
from dlrover_py.kubernetes.kinds import Obj
from dlrover_py.master.core.diagnosis.crashes import LAST_LOOKS_S, MOST_LOOKS
from dlrover_py.master.core.diagnosis.losses import TOGETHER_S
from dlrover_py.master.core.events import (
    EvidenceKept,
    KeepEvidence,
    NodeEnded,
    NodeSeen,
    Rules,
    SnapshotArrived,
)
from dlrover_py.master.core.state import Look, Step
from dlrover_py.master.evidence import (
    MAX_BUNDLE_BYTES,
    BundleCopies,
    BundleFolder,
    EvidenceStore,
)
from dlrover_py.master.evidence_secret import BundleSecret
from dlrover_py.master.journal_store import FileJournalStore
from dlrover_py.master.loop import Loop
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    FailureKind,
    NodeLoad,
    Progress,
)
from dlrover_py.protocol.bundles import (
    MAX_BUNDLES,
    MAX_BYTES,
    bucket_of,
    folder_name,
    newest,
    packed,
    unpacked,
)
from dlrover_py.protocol.diagnosis import (
    MAX_LAST_BYTES,
    EvidenceKind,
    HangKind,
    HangVerdict,
    NodeSnapshot,
    WorkerSnapshot,
)
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import JOB_FILE, STATUS_FILE, NodeId, owner
from dlrover_py.protocol.status import EvidenceManifest
from tests.builders import Bench, SimAgent, crash, elastic_job, job_file, running, user_error
from tests.loops import working

if TYPE_CHECKING:
    from dlrover_py.kubernetes.client import KubeClient


def look(
    agent: SimAgent, round_number: int, *, number: int = 0, failed: FailureKind | None = None
) -> SnapshotArrived:
    rank = int(agent.node.removeprefix("n"))
    failure = None if failed is None else crash(failed)
    worker = WorkerSnapshot(rank=rank, local_rank=0, output=["the last line"], failure=failure)
    snapshot = NodeSnapshot(boot_id=agent.boot, number=number, round=round_number, workers=[worker])
    return SnapshotArrived(agent.node, snapshot)


def kept(out: Step) -> list[KeepEvidence]:
    return [effect for effect in out.effects if isinstance(effect, KeepEvidence)]


def fail(bench: Bench, node: str) -> Step:
    agent = bench.agent(node)
    agent.fail(user_error())
    return bench.say(agent)


def test_a_failure_has_a_bundle_once_all_nodes_have_sent_their_last_look() -> None:
    bench = running(elastic_job(3, restarts=3))
    early, failed, late = (bench.agent(f"n{n}") for n in range(3))
    assert not kept(bench.step(look(early, 1))), "it may come before the failure"
    assert not kept(fail(bench, "n1"))
    assert not kept(bench.step(look(failed, 1)))
    (one,) = kept(bench.step(look(late, 1)))
    assert one.manifest.kind is EvidenceKind.FAILURE
    assert one.manifest.failure is not None
    assert one.manifest.failure.node == "n1"
    assert one.manifest.reason.startswith("n1: worker 0 (rank 0) died")
    assert one.manifest.round == 1
    assert one.manifest.nodes == ["n0", "n1", "n2"]
    assert not one.manifest.missing
    bench.settle()
    assert bench.job.state.round == 2
    assert not kept(bench.step(look(late, 1))), "a bundle is kept once"


def test_a_last_look_that_does_not_come_is_waited_for_only_for_a_while() -> None:
    bench = running(elastic_job(3, restarts=3))
    fail(bench, "n1")
    bench.step(look(bench.agent("n1"), 1))
    bench.settle()
    assert bench.job.state.round == 2, "the next round does not wait"
    bench.now += LAST_LOOKS_S + 1
    (one,) = kept(bench.step())
    assert one.manifest.nodes == ["n1"]
    assert one.manifest.missing == ["n0", "n2"]


def test_the_bundle_of_a_slow_job_names_the_node_at_fault() -> None:
    bench = running(elastic_job(2, restarts=3))
    bench.job.live.look = Look(EvidenceKind.SLOW, "slow", node="n1")
    bench.step()
    bench.step(look(bench.agent("n0"), 1, number=1))
    (one,) = kept(bench.step(look(bench.agent("n1"), 1, number=1)))
    assert (one.manifest.kind, one.manifest.node) == (EvidenceKind.SLOW, "n1")


@pytest.mark.parametrize("told", ["before", "after"])
def test_the_node_at_fault_is_not_crowded_out_by_those_that_lost_their_peer(told: str) -> None:
    bench = running(elastic_job(2 * MOST_LOOKS, restarts=3))
    assert bench.job.state.world is not None
    *others, last = [member.node for member in bench.job.state.world.members]
    if told == "before":
        fail(bench, last)
    for node in reversed(others):
        bench.step(look(bench.agent(node), 1, failed=FailureKind.PEER))
    assert not kept(bench.step(look(bench.agent(others[-1]), 1, failed=FailureKind.PEER)))
    out = bench.step(look(bench.agent(last), 1, failed=FailureKind.EXCEPTION))
    if told == "after":
        fail(bench, last)
        bench.now += LAST_LOOKS_S + 1
        out = bench.step()
    (one,) = kept(out)
    assert one.manifest.node == last
    assert last in one.manifest.nodes
    assert len(one.nodes) <= MOST_LOOKS
    if told == "before":
        assert not one.manifest.missing, "the first nodes are not crowded out either"


def test_at_the_end_of_a_master_what_is_there_is_kept() -> None:
    """On one machine, it ends once the nodes have ended; agents still send their looks."""
    bench = running(elastic_job(3, restarts=0))
    fail(bench, "n1")
    assert bench.job.state.phase.ended
    assert not kept(bench.step(look(bench.agent("n1"), 1)))
    assert bench.job.detectors.end()
    (one,) = kept(bench.step())
    assert one.manifest.nodes == ["n1"]
    assert one.manifest.missing == ["n0", "n2"]
    assert not bench.job.detectors.end()


async def test_a_master_that_ends_waits_until_its_evidence_is_kept(tmp_path: Path) -> None:
    platform = StaticPlatform(elastic_job(1, restarts=0))
    journal = FileJournalStore(tmp_path / "journal")
    rules = Rules(can_create=False, exchange_s=0.01)
    loop = Loop(platform, journal, rules, evidence=EvidenceStore(BundleFolder(tmp_path)))
    agent = SimAgent(NodeId("n0"))
    async with working(loop), asyncio.timeout(60):
        while not loop.ready:
            await asyncio.sleep(0.001)
        while not agent.failure:
            answer: asyncio.Queue[object] = asyncio.Queue()
            loop.exchange(agent.node, agent.report(), answer.put_nowait)
            if isinstance(said := await answer.get(), Assignment):
                agent.receive(said)
            if agent.running:
                agent.fail(user_error())
        loop.exchange(agent.node, agent.report(), lambda _: None)
        while (status := loop.status()) is None or not status.phase.ended:
            await asyncio.sleep(0.001)
        await loop.keep_evidence(60.0)
    (one,) = bundles(tmp_path)
    assert (one.kind, one.node, one.missing) == (EvidenceKind.FAILURE, "n0", ["n0"])


def manifest(**fields: object) -> EvidenceManifest:
    return EvidenceManifest.model_validate(
        {"number": 7, "at": 1.0, "round": 1, "reason": "", **fields}
    )


def test_a_packed_bundle_keeps_the_node_at_fault_within_its_size() -> None:
    hang = manifest(verdict=HangVerdict(kind=HangKind.FROZEN, ranks=[3]), node="n3")
    noise = [f"{n * 2654435761 % 2**32:032x}" for n in range(40)]
    nodes = []
    for rank in range(4):
        lines = [f"{rank}{line}" for line in noise]
        worker = WorkerSnapshot(rank=rank, local_rank=0, output=lines)
        part = NodeSnapshot(boot_id="boot-0001", number=7, round=1, workers=[worker])
        nodes.append((NodeId(f"n{rank}"), part))
    whole = packed(hang, nodes, MAX_BYTES)
    assert list(unpacked(whole).nodes) == ["n3", "n0", "n1", "n2"]
    small = unpacked(packed(hang, nodes, len(whole) - 1))
    assert list(small.nodes) == ["n3", "n0"]
    assert small.manifest.nodes == ["n0", "n3"]
    assert not unpacked(packed(hang, nodes, 1)).nodes
    assert folder_name(small.manifest) == "000007-frozen"
    with pytest.raises(ValueError, match="expected a complete bundle"):
        unpacked(whole[:-9])
    with pytest.raises(ValueError, match="expected a compressed bundle"):
        unpacked(b"no bundle")


def test_the_newest_bundles_stay() -> None:
    sizes = {"000001-frozen": 10, "000002-slow": 10, "000010-failure": 10}
    assert newest(sizes, 2, 100, "000010-failure") == {"000002-slow", "000010-failure"}
    assert newest(sizes, 9, 15, "000010-failure") == {"000010-failure"}


def test_the_bundle_that_was_just_written_stays_whatever_its_number_is() -> None:
    sizes = {"000001-slow": 10, "000008-frozen": 10, "000009-failure": 10}
    assert newest(sizes, 2, 100, "000001-slow") == {"000001-slow", "000009-failure"}
    assert newest(sizes, 2, 15, "000001-slow") == {"000001-slow"}


@pytest.mark.parametrize("suffix", ["", ".json.gz"])
def test_lost_nodes_do_not_push_out_other_evidence(suffix: str) -> None:
    others = [f"{n:06d}-failure{suffix}" for n in (1, 2, 10)]
    lost = [f"{n:06d}-lost{suffix}" for n in (3, 4, 5, 6, 7, 8, 9, 11)]
    sizes = dict.fromkeys([*others, *lost], 10)
    assert newest(sizes, 8, 110, lost[-1]) == {*others, *lost[-5:]}
    assert newest(sizes, 8, 110, others[-1]) == {*others, *lost[-5:]}
    assert newest(sizes, 10, 110, lost[0]) == {*others, lost[0], *lost[-6:]}
    assert newest(sizes, 6, 110, lost[-1]) == {others[-1], *lost[-5:]}, "the oldest go"
    assert newest(sizes, 20, 110, lost[-1]) == sizes.keys(), "there is room"


async def test_a_folder_keeps_a_failure_that_many_losses_follow(tmp_path: Path) -> None:
    store = BundleFolder(tmp_path)
    await store.keep(KeepEvidence(manifest(number=1, kind=EvidenceKind.FAILURE), ()))
    for number in range(2, 2 + MAX_BUNDLES):
        await store.keep(KeepEvidence(manifest(number=number, kind=EvidenceKind.LOST), ()))
    assert [one.number for one in bundles(tmp_path)] == [1, *range(3, 2 + MAX_BUNDLES)]


async def test_a_folder_with_later_numbers_takes_a_bundle(tmp_path: Path) -> None:
    store = BundleFolder(tmp_path)
    for number in range(50, 50 + MAX_BUNDLES):
        await store.keep(KeepEvidence(manifest(number=number), ()))
    assert Path(await store.keep(KeepEvidence(manifest(number=1), ()))).exists()
    assert [one.number for one in bundles(tmp_path)] == [1, *range(51, 50 + MAX_BUNDLES)]


class DumpedSnapshot(NodeSnapshot):
    """A snapshot that notes the threads in which it was made JSON."""

    def model_dump_json(self, **options: Any) -> str:
        THREADS.setdefault(self.boot_id, []).append(threading.get_ident())
        return super().model_dump_json(**options)


THREADS: dict[str, list[int]] = {}


def large(count: int) -> list[tuple[NodeId, NodeSnapshot]]:
    """Snapshots of half a megabyte each."""
    THREADS.clear()
    lines = [("x" * 250) + str(n) for n in range(40)]
    workers = [WorkerSnapshot(rank=n, local_rank=n, output=lines) for n in range(50)]
    return [
        (
            NodeId(f"n{n:03d}"),
            DumpedSnapshot(boot_id=f"boot-{n:04d}", number=7, round=1, workers=workers),
        )
        for n in range(count)
    ]


def test_a_large_bundle_is_made_json_once_and_only_up_to_its_size() -> None:
    small = unpacked(packed(manifest(node="n079"), large(80), MAX_BYTES))
    assert next(iter(small.nodes)) == "n079"
    assert 16 <= len(small.nodes) < 40
    assert small.manifest.nodes == sorted(small.nodes)
    assert {len(threads) for threads in THREADS.values()} == {1}
    assert len(THREADS) <= len(small.nodes) + 1, "the others cost nothing"


class OneSecret:
    """An API server that has one Secret."""

    def __init__(self, secret: Obj) -> None:
        self.secret = secret

    async def get(self, *_: object) -> Obj:
        return self.secret

    async def replace(self, _: object, secret: Obj) -> None:
        self.secret = secret


async def test_a_bundle_for_a_secret_is_made_in_a_thread() -> None:
    """That of 2,000 nodes took six seconds, in which the master answered no agent."""
    server = OneSecret({"metadata": {"name": "e", "ownerReferences": [owner("x", "uid")]}})
    store = BundleSecret(cast("KubeClient", server), "default", "e", job_uid="uid")
    await store.keep(KeepEvidence(manifest(kind=EvidenceKind.SLOW), tuple(large(2))))
    assert THREADS
    assert threading.get_ident() not in {one for threads in THREADS.values() for one in threads}
    (content,) = server.secret["data"].values()
    assert list(unpacked(base64.b64decode(content)).nodes) == ["n000", "n001"]


async def test_a_folder_keeps_the_node_at_fault_within_its_size(tmp_path: Path) -> None:
    nodes = large(80)
    folder = await BundleFolder(tmp_path).keep(KeepEvidence(manifest(node="n079"), tuple(nodes)))
    (one,) = bundles(tmp_path)
    assert "n079" in one.nodes
    assert one.nodes == sorted(one.nodes)
    assert len(one.nodes) < 80
    written = sum(path.stat().st_size for path in Path(folder).glob("n*.json"))
    assert written <= MAX_BUNDLE_BYTES


def report_with(agent: SimAgent, **fields: object) -> AgentReport:
    return agent.report().model_copy(update=fields)


def kept_within(bench: Bench, seconds: float) -> list[KeepEvidence]:
    """Pass time in which the other nodes report, and return what is kept."""
    found = []
    for _ in range(int(seconds)):
        bench.now += 1.0
        for agent in bench.living():
            if bench.job.live.nodes[agent.node].alive:
                found += kept(bench.say(agent))
    return found


def test_a_node_that_was_lost_with_its_agent_has_a_bundle_of_what_it_said_last() -> None:
    bench = running(elastic_job(3, restarts=3))
    progress = Progress(
        step=120, total=500, started_at_step=0, first_step_after_s=1.0, steps_per_s=2.0
    )
    load = NodeLoad(memory_bytes=3 * 10**9, memory_limit=4 * 10**9, memory=0.4)
    lost = bench.agent("n1")
    bench.say(lost, report_with(lost, progress=progress, load=load))
    bench.now += 2.0
    bench.say(bench.agent("n0"))
    bench.say(bench.agent("n2"))
    assert not kept(bench.step(NodeEnded(lost.node, "its connection closed")))
    bench.step(NodeEnded(lost.node, "its container was killed, exit code 137", exit_code=137))
    other = bench.agent("n0")
    assert not kept(bench.step(look(other, 1)))
    (one,) = kept_within(bench, TOGETHER_S)
    told = one.manifest
    assert (told.kind, told.node, told.missing) == (EvidenceKind.LOST, "n1", ["n1"])
    assert (told.round, told.step, told.nodes) == (1, 120, ["n0"])
    assert told.reason == "node n1 was lost: its connection closed"
    facts = "\n".join(told.facts)
    assert "its platform says: its container was killed, exit code 137" in facts
    assert "last report 2.0 s before, its workers running in round 1" in facts
    assert "step 120 of 500, 2 steps/s" in facts
    assert "memory 3.0 GB of 4.0 GB" in facts
    assert "waited for memory 40% of the time" in facts
    assert not kept_within(bench, 2 * TOGETHER_S)


def test_the_causes_of_a_round_end_with_what_was_known_of_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the run is gone from this machine, so the bundle is that of the bucket."""
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    tmp_path.chmod(0o700)
    folder = tmp_path / "job@1"
    folder.mkdir(mode=0o700)
    spec = in_bucket("lost")
    bench = running(elastic_job(3, minimum=1, restarts=3))
    bench.step(NodeEnded(NodeId("n1"), "its host is gone"))
    (one,) = kept_within(bench, TOGETHER_S)
    bench.settle()
    assert bench.job.state.round == 2
    copied = replace(one, bucket=bucket_of(spec))
    asyncio.run(keep_all(EvidenceStore(None, BundleCopies(folder.name)), [copied]))
    (folder / JOB_FILE).write_text(spec.model_dump_json(by_alias=True))
    (folder / STATUS_FILE).write_text(bench.job.status(0.0, 1.0).model_dump_json())
    shown = CliRunner().invoke(root, ["job", "why", "job", "--round", "2"], catch_exceptions=False)
    *_, last_report, where = shown.output.splitlines()
    assert "n1 on n1: last report" in last_report
    assert where == "  evidence: memory://lost/job-1/000001-lost.json.gz"
    listed = CliRunner().invoke(root, ["job", "evidence", "job"], catch_exceptions=False)
    assert "round 1, lost: node n1 was lost: its host is gone" in listed.output


def test_nodes_that_are_lost_together_have_one_bundle() -> None:
    bench = running(elastic_job(4, minimum=1, restarts=3))
    bench.step(NodeEnded(NodeId("n3"), "its host is gone"))
    assert not kept_within(bench, TOGETHER_S / 2)
    bench.step(NodeEnded(NodeId("n2"), "its host is gone"))
    (one,) = kept_within(bench, TOGETHER_S)
    assert one.manifest.missing == ["n2", "n3"]
    assert one.manifest.reason.endswith("was lost: its host is gone, and 1 further node")
    shown = list(last_known({("n2", 1)}, [one.manifest]))
    assert shown[0] == "n2 on n2: was lost: its host is gone"
    assert shown[-1].startswith("evidence: ")
    assert not [line for line in shown if line.startswith("n3")]
    assert not list(last_known({("n2", 2)}, [one.manifest])), "that of another round"


def test_a_node_that_leaves_or_has_never_reported_is_no_loss_with_evidence() -> None:
    bench = running(elastic_job(3, minimum=1, restarts=3))
    bench.step(NodeSeen(NodeId("n1"), near=True, leaving="its host is drained"))
    bench.step(NodeEnded(NodeId("n1"), "it has ended"))
    new = next(node.id for node in bench.job.live.nodes if not node.incarnation)
    bench.step(NodeEnded(new, "its image is missing", exit_code=1))
    assert not bench.job.live.nodes.losses
    bench.step(NodeEnded(NodeId("n2"), "killed", exit_code=137))
    assert bench.job.detectors.end(), "the master ends"
    (one,) = kept(bench.step())
    assert one.manifest.missing == ["n2"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, ""),
        ({"checkpoint": {"dir": "/shared/run"}}, ""),
        ({"checkpoint": {"dir": "file:///shared/run"}}, ""),
        ({"checkpoint": {"dir": "s3://b/run/"}}, "s3://b/run/evidence"),
        (
            {"checkpoint": {"dir": "s3://b/run"}, "diagnosis": {"evidence": "gs://c/d/"}},
            "gs://c/d",
        ),
    ],
)
def test_bundles_have_copies_where_the_job_has_a_bucket(
    spec: dict[str, Any], expected: str
) -> None:
    document = job_file(2)
    document["spec"] |= spec
    job = ElasticJob.parse(document)
    assert bucket_of(job) == expected
    bench = running(job)
    fail(bench, "n1")
    bench.now += LAST_LOOKS_S + 1
    (one,) = kept(bench.step())
    assert one.bucket == expected


def test_the_address_of_a_bucket_is_no_path() -> None:
    document = job_file(2)
    document["spec"]["diagnosis"] = {"evidence": "/shared"}
    with pytest.raises(ConfigError, match=r"spec\.diagnosis\.evidence"):
        ElasticJob.parse(document)


@pytest.mark.parametrize("address", ["s3://key:secret@host/b", "s3:/key:secret@host/b" + "/b" * 30])
def test_the_address_of_a_bucket_has_no_password(address: str) -> None:
    document = job_file(2)
    document["spec"]["diagnosis"] = {"evidence": address}
    with pytest.raises(ConfigError, match=r"spec\.diagnosis\.evidence") as told:
        ElasticJob.parse(document)
    assert "secret" not in str(told.value)


def test_the_password_of_the_directory_of_checkpoints_is_not_told(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    document = job_file(2)
    document["spec"]["checkpoint"] = {"dir": "s3://key:secret@host/b"}
    job = ElasticJob.parse(document)
    kept = [KeepEvidence(manifest(), (), bucket_of(job))]
    asyncio.run(keep_all(EvidenceStore(None, BundleCopies("x")), kept))
    assert with_copies([], job, "x") == []
    (record,) = caplog.records
    told = str(vars(record)) + capsys.readouterr().err
    assert "key:***@host" in told
    assert "secret" not in told


def in_bucket(name: str) -> ElasticJob:
    document = job_file(1)
    document["spec"]["diagnosis"] = {"evidence": f"memory://{name}"}
    return ElasticJob.parse(document)


async def keep_all(store: EvidenceStore, evidence: list[KeepEvidence]) -> list[EvidenceKept]:
    done: list[EvidenceKept] = []
    for one in evidence:
        store.keep(one, done.append)
        await store.finish(60.0)
    return done


class NotedBucket(MemoryFileSystem):
    """A bucket that notes in which threads it was opened."""

    protocol = "noted"
    cachable = False
    opened = threading.Event()
    threads: ClassVar[list[str]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.threads.append(threading.current_thread().name)
        self.opened.set()


async def test_the_bucket_of_a_job_is_opened_in_a_thread_before_there_is_a_bundle(
    tmp_path: Path,
) -> None:
    """The last bundle had no copy: the imports took longer than a master has at its end."""
    fsspec.register_implementation("noted", NotedBucket, clobber=True)
    document = job_file(1)
    document["spec"]["diagnosis"] = {"evidence": "noted://b"}
    platform = StaticPlatform(ElasticJob.parse(document))
    evidence = EvidenceStore(None, BundleCopies("x"))
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), Rules(), evidence=evidence)
    async with working(loop):
        assert await asyncio.to_thread(NotedBucket.opened.wait, 60.0)
    assert NotedBucket.threads == ["evidence-copies"]


class HangingFolder:
    """A place for bundles that takes none."""

    async def keep(self, _: KeepEvidence) -> str:
        await asyncio.Event().wait()
        return ""


async def test_what_a_master_does_not_finish_at_its_end_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = EvidenceStore(HangingFolder(), cast("BundleCopies", HangingFolder()))
    store.keep(KeepEvidence(manifest(), (), "memory://x"), lambda _: None)
    await store.finish(0.01)
    (record,) = caplog.records
    assert record.message == "evidence_not_finished"
    assert vars(record)["what"] == ["bundles", "copy of 000007-hang"]


def test_a_bucket_keeps_the_newest_bundles_which_are_listed_and_read() -> None:
    job, run = in_bucket("newest"), "x@17"
    store = EvidenceStore(None, BundleCopies(run))
    evidence = [
        KeepEvidence(manifest(number=n), tuple(large(1)), bucket_of(job))
        for n in range(1, MAX_BUNDLES + 4)
    ]
    done = asyncio.run(keep_all(store, evidence))
    assert done[-1].folder == "memory://newest/x-17/000023-hang.json.gz"
    own = manifest(number=23, reason="here")
    found = with_copies([own], job, run)
    assert [one.number for one in found] == list(range(4, MAX_BUNDLES + 4))
    assert found[-1].reason == "here", "what is here is not read again"
    assert found[0].folder == "memory://newest/x-17/000004-hang.json.gz"
    assert found[0].nodes == ["n000"]
    snapshot = snapshot_in_copies("n000", job, run)
    assert snapshot is not None
    assert snapshot.boot_id == "boot-0000"
    assert snapshot_in_copies("n001", job, run) is None
    assert with_copies([own], job, "another") == [own]


def test_a_bucket_that_fails_is_told_once_and_costs_only_the_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    document = job_file(1)
    document["spec"]["diagnosis"] = {"evidence": f"file://{tmp_path}/file"}
    job = ElasticJob.parse(document)
    store = EvidenceStore(BundleFolder(tmp_path), BundleCopies("x"))
    evidence = [KeepEvidence(manifest(number=n), (), bucket_of(job)) for n in (1, 2)]
    done = asyncio.run(keep_all(store, evidence))
    folders = [str(tmp_path / "evidence" / name) for name in ("000001-hang", "000002-hang")]
    assert [one.folder for one in done] == folders
    assert [record.message for record in caplog.records] == ["evidence_not_copied"]
    assert [one.folder for one in with_copies(bundles(tmp_path), job, "x")] == folders
    assert "are left out" in capsys.readouterr().err


def test_snapshots_after_a_lost_journal_have_later_numbers_than_all_before() -> None:
    bench = running(elastic_job(1, restarts=3))
    bench.job.skip(1, 1, 1)
    fail(bench, "n0")
    (one,) = kept(bench.step(look(bench.agent("n0"), 1)))
    assert folder_name(one.manifest) > folder_name(manifest(number=99_999))


def test_a_last_look_is_cut_to_its_size() -> None:
    failure = crash(FailureKind.EXCEPTION).model_copy(update={"traceback": "x" * 8192})
    worker = WorkerSnapshot(rank=0, local_rank=0, failure=failure, output=["y" * 256] * 40)
    many = NodeSnapshot(boot_id="boot-0001", number=0, round=1, workers=[worker] * 64)
    small = many.fitted(MAX_LAST_BYTES)
    assert len(small.model_dump_json().encode()) <= MAX_LAST_BYTES
    assert len(small.workers) == 64
