"""Gangs of Kubernetes itself, on a fake API server that serves the versions of 1.35, 1.36 and 1.37.

``scheduling.k8s.io`` has Workloads with groups in v1alpha1 (1.35), PodGroups that cannot change in
v1alpha2 (1.36), and PodGroups whose ``minCount`` can in v1alpha3 and v1beta1 (1.37).
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import ELASTICJOBS, SCHEDULING, Kind, Obj
from dlrover_py.kubernetes.watch import ClientTimes
from tests.fakes_kube import FakeCluster, fake_cluster
from tests.process.test_operator import condition, job, operator, until

PRIORITIES = Kind(SCHEDULING, "v1", "priorityclasses", "PriorityClass", namespaced=False)
IN_1_35 = Kind(SCHEDULING, "v1alpha1", "workloads", "Workload")
IN_1_36 = (
    Kind(SCHEDULING, "v1alpha2", "podgroups", "PodGroup"),
    Kind(SCHEDULING, "v1alpha2", "workloads", "Workload"),
)
IN_1_37 = tuple(
    Kind(SCHEDULING, version, plural, name)
    for version in ("v1beta1", "v1alpha3")
    for plural, name in (("podgroups", "PodGroup"), ("workloads", "Workload"))
)
Bed = tuple[FakeCluster, KubeClient]


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        kube.times = ClientTimes(first_wait_s=0.02, longest_wait_s=0.1, denied_s=0.1)
        cluster.fixed = {IN_1_35, IN_1_36[0]}
        cluster.serve(SCHEDULING, PRIORITIES)
        yield cluster, kube


def put_job(cluster: FakeCluster, minimum: int, spec: Obj) -> None:
    made = job()
    worker = made["spec"]["replicaSpecs"]["worker"]
    worker["minReplicas"] = minimum
    worker["template"]["spec"] |= spec
    cluster.put(ELASTICJOBS, made)


def said(cluster: FakeCluster) -> tuple[str, str]:
    found = condition(cluster, "GangReady")
    return found.get("status", ""), found.get("message", "")


async def test_a_pod_group_is_found_by_discovery_and_survives_upgrades(bed: Bed) -> None:
    cluster, kube = bed
    spec = {"schedulingGroup": {"podGroupName": "g"}, "priorityClassName": "urgent"}
    put_job(cluster, 2, spec)
    old, new = IN_1_36[0], IN_1_37[0]

    async def becomes(status: str, words: str) -> None:
        await until(lambda: said(cluster)[0] == status and words in said(cluster)[1], words)

    async with operator(kube, gangs=True):
        await becomes("False", "does not serve podgroups of scheduling.k8s.io")
        cluster.serve(SCHEDULING, PRIORITIES, IN_1_35)
        cluster.serve(SCHEDULING, PRIORITIES, *IN_1_36)
        await becomes("True", "the PodGroup g has minCount 2")
        group = cluster.one(old, "g")
        assert group is not None
        assert group["spec"] == {
            "schedulingPolicy": {"gang": {"minCount": 2}},
            "priorityClassName": "urgent",
        }
        (owner,) = group["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("ElasticJob", "x")

        # Kubernetes 1.36 cannot change the number, and keeps a group that has Pods.
        group["metadata"]["finalizers"] = ["scheduling.k8s.io/podgroup-protection"]
        cluster.put(old, group)
        put_job(cluster, 3, spec)
        await becomes("False", "it is being deleted, and is made anew once all Pods")
        cluster.remove(old, "g")
        await becomes("True", "the PodGroup g has minCount 3")

        # Kubernetes 1.37 can. It serves the same objects in another version.
        held = cluster.one(old, "g")
        assert held is not None
        cluster.serve(SCHEDULING, PRIORITIES, *IN_1_37)
        cluster.put(new, held)
        cluster.cut()
        put_job(cluster, 2, spec)
        await becomes("True", "the PodGroup g has minCount 2")
        changed = cluster.one(new, "g")
        assert changed is not None
        assert changed["metadata"]["uid"] == held["metadata"]["uid"]

        cluster.serve(SCHEDULING, PRIORITIES)
        cluster.cut()
        await becomes("False", "does not serve podgroups of scheduling.k8s.io")


async def test_the_workload_of_the_first_version_has_the_group(bed: Bed) -> None:
    cluster, kube = bed
    cluster.serve(SCHEDULING, PRIORITIES, IN_1_35)
    spec = {"workloadRef": {"name": "w", "podGroup": "g"}}
    put_job(cluster, 2, spec)

    async def has(minimum: int) -> None:
        wanted = [{"name": "g", "policy": {"gang": {"minCount": minimum}}}]

        def fits() -> bool:
            found = cluster.one(IN_1_35, "w")
            return found is not None and bool(found["spec"]["podGroups"] == wanted)

        await until(fits, f"a minimum of {minimum}")

    async with operator(kube, gangs=True):
        for number in (2, 3):
            put_job(cluster, number, spec)
            await has(number)
            await until(lambda: said(cluster)[0] == "True", "a group in step")
        cluster.serve(SCHEDULING, PRIORITIES, *IN_1_37)
        cluster.cut()
        await until(lambda: "in schedulingGroup" in said(cluster)[1], "a hint")
        assert said(cluster)[0] == "False"
