"""Bundles of evidence: for which events they are kept, what is in them, and how large they are."""

import pytest

from dlrover_py.master.core.diagnosis.crashes import LAST_LOOKS_S
from dlrover_py.master.core.events import KeepEvidence, SnapshotArrived
from dlrover_py.master.core.state import Step
from dlrover_py.protocol.agents import FailureKind
from dlrover_py.protocol.bundles import MAX_BYTES, folder_name, newest, packed, unpacked
from dlrover_py.protocol.diagnosis import (
    MAX_LAST_BYTES,
    EvidenceKind,
    HangKind,
    HangVerdict,
    NodeSnapshot,
    WorkerSnapshot,
)
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import EvidenceManifest
from tests.builders import Bench, SimAgent, crash, elastic_job, running, user_error


def look(agent: SimAgent, round_number: int, *, number: int = 0) -> SnapshotArrived:
    rank = int(agent.node.removeprefix("n"))
    worker = WorkerSnapshot(rank=rank, local_rank=0, output=["the last line"])
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


def manifest(**fields: object) -> EvidenceManifest:
    return EvidenceManifest.model_validate(
        {"number": 7, "at": 1.0, "round": 1, "reason": "", **fields}
    )


def test_a_packed_bundle_keeps_the_node_at_fault_within_its_size() -> None:
    guilty = HangVerdict(kind=HangKind.FROZEN, ranks=[3])
    noise = [f"{n * 2654435761 % 2**32:032x}" for n in range(40)]
    nodes = []
    for rank in range(4):
        lines = [f"{rank}{line}" for line in noise]
        worker = WorkerSnapshot(rank=rank, local_rank=0, output=lines)
        part = NodeSnapshot(boot_id="boot-0001", number=7, round=1, workers=[worker])
        nodes.append((NodeId(f"n{rank}"), part))
    whole = packed(manifest(verdict=guilty), nodes, MAX_BYTES)
    assert list(unpacked(whole).nodes) == ["n3", "n0", "n1", "n2"]
    small = unpacked(packed(manifest(verdict=guilty), nodes, len(whole) - 1))
    assert list(small.nodes) == ["n3", "n0"]
    assert small.manifest.nodes == ["n0", "n3"]
    assert not unpacked(packed(manifest(verdict=guilty), nodes, 1)).nodes
    assert folder_name(small.manifest) == "000007-frozen"
    with pytest.raises(ValueError, match="expected a complete bundle"):
        unpacked(whole[:-9])
    with pytest.raises(ValueError, match="expected a compressed bundle"):
        unpacked(b"no bundle")


def test_the_newest_bundles_stay() -> None:
    sizes = {"000001-frozen": 10, "000002-slow": 10, "000010-failure": 10}
    assert newest(sizes, 2, 100) == {"000002-slow", "000010-failure"}
    assert newest(sizes, 9, 15) == {"000010-failure"}


def test_a_last_look_is_cut_to_its_size() -> None:
    failure = crash(FailureKind.EXCEPTION).model_copy(update={"traceback": "x" * 8192})
    worker = WorkerSnapshot(rank=0, local_rank=0, failure=failure, output=["y" * 256] * 40)
    many = NodeSnapshot(boot_id="boot-0001", number=0, round=1, workers=[worker] * 64)
    small = many.fitted(MAX_LAST_BYTES)
    assert len(small.model_dump_json().encode()) <= MAX_LAST_BYTES
    assert len(small.workers) == 64
