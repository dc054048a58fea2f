"""Bundles of evidence in a Secret: written by the master, read by users of the cluster."""

import asyncio
from pathlib import Path

import pytest

from dlrover_py.cli.cluster import ClusterClient, ClusterJob
from dlrover_py.cli.settings import Target
from dlrover_py.kubernetes.kinds import SECRETS, Obj
from dlrover_py.master.core.events import KeepEvidence
from dlrover_py.master.evidence_secret import MOST_BUNDLES, BundleSecret
from dlrover_py.protocol.diagnosis import EvidenceKind, NodeSnapshot, WorkerSnapshot
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.names import NodeId, owner
from dlrover_py.protocol.status import EvidenceManifest
from tests.fakes_kube import fake_cluster

NAME, JOB = "elasticjob-x-evidence", "uid-of-x"
OBJECT: Obj = {"metadata": {"name": "x", "namespace": "default", "uid": JOB}, "status": {}}


def secret(uid: str = JOB) -> Obj:
    return {"metadata": {"name": NAME, "ownerReferences": [owner("x", uid)]}}


def evidence(number: int, kind: EvidenceKind = EvidenceKind.FAILURE) -> KeepEvidence:
    worker = WorkerSnapshot(rank=0, local_rank=0, output=[f"line {number}"])
    snapshot = NodeSnapshot(boot_id="boot-0001", number=0, round=1, workers=[worker])
    manifest = EvidenceManifest(number=number, kind=kind, at=1.0, round=1, reason="it failed")
    return KeepEvidence(manifest, ((NodeId("n0"), snapshot),))


async def test_users_read_what_the_master_has_kept_and_the_oldest_are_removed(
    tmp_path: Path,
) -> None:
    async with fake_cluster(tmp_path) as (cluster, kube):
        config = cluster.kubeconfig(tmp_path / "of-a-user")

        def read() -> tuple[list[EvidenceManifest], NodeSnapshot | None]:
            with ClusterClient(Target(kubeconfig=config)) as client:
                job = ClusterJob(client, OBJECT)
                return job.evidence(), job.node_snapshot("n0")

        assert await asyncio.to_thread(read) == ([], None), "no Secret, and nothing in the status"
        cluster.put(SECRETS, secret())
        store = BundleSecret(kube, "default", NAME, job_uid=JOB)
        for number in range(1, MOST_BUNDLES + 3):
            where = await store.keep(evidence(number))
        assert where == f"Secret {NAME}, key {number:06d}-failure.json.gz"
        found, newest = await asyncio.to_thread(read)
        assert [one.number for one in found] == list(range(3, MOST_BUNDLES + 3))
        assert found[0].kind is EvidenceKind.FAILURE
        assert found[0].nodes == ["n0"]
        assert newest is not None
        assert newest.workers[0].output == [f"line {number}"]


async def test_a_secret_of_another_job_is_neither_written_nor_shown(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as (cluster, kube):
        store = BundleSecret(kube, "default", NAME, job_uid=JOB)
        with pytest.raises(TransientError, match="not found"):
            await store.keep(evidence(1))
        cluster.put(SECRETS, secret("uid-of-y"))
        with pytest.raises(TransientError, match="belongs to another job of this name"):
            await store.keep(evidence(1))
