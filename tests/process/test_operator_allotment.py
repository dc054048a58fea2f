"""The operator shares hosts among jobs, against an API server in memory; the test is the masters.

tests/unit/test_allotment.py has what is decided.
"""

from typing import Any

import pytest

from dlrover_operator.allotment import SharedHosts
from dlrover_operator.timing import OperatorTiming
from dlrover_py.kubernetes.kinds import DEPLOYMENTS, ELASTICJOBS, EVENTS, NODES, PODS, Obj
from dlrover_py.protocol import names
from tests.builders import job_file
from tests.fakes_kube import FakeCluster
from tests.process import test_operator
from tests.process.test_operator import Bed, condition, operator, until

pytestmark = pytest.mark.process
bed = test_operator.bed
SOON = OperatorTiming(allot_after_s=0.02)


def job(name: str, most: int, least: int, **worker: Any) -> Obj:
    document = job_file(most, minReplicas=least, **worker)
    document["metadata"] = {"name": name, "namespace": "default"}
    return document


def granted(cluster: FakeCluster, name: str) -> Obj:
    held = cluster.one(ELASTICJOBS, name) or {}
    found = (held.get("status") or {}).get("allocation") or {}
    assert isinstance(found, dict)
    return found


def nodes(cluster: FakeCluster, name: str) -> int:
    """Return the nodes that a job may have; -1 if nothing was decided."""
    return int(granted(cluster, name).get("nodes", -1))


def says(cluster: FakeCluster, name: str, desired: int) -> None:
    """Play a master that wants a number of nodes."""
    held = cluster.one(ELASTICJOBS, name)
    assert held is not None
    held.setdefault("status", {})["training"] = {
        "phase": "Running",
        "desired": desired,
        "generation": held["metadata"].get("generation", 1),
    }
    cluster.put(ELASTICJOBS, held)


def pod(cluster: FakeCluster, name: str, index: int, owner: str = "", host: str = "h") -> None:
    """Play a master that creates the Pod of a node, and a scheduler."""
    owner = owner or (cluster.one(ELASTICJOBS, name) or {})["metadata"]["uid"]
    labels = {names.LABEL_JOB: name, names.LABEL_ROLE: names.ROLE_WORKER}
    cluster.put(
        PODS,
        {
            "metadata": {
                "name": f"{name}-n{index}",
                "namespace": "default",
                "labels": labels,
                "ownerReferences": [{"kind": names.KIND, "name": name, "uid": owner}],
            },
            "spec": {"containers": [{"name": "main", "image": "i"}], "nodeName": host},
            "status": {"phase": "Running"},
        },
    )


async def test_a_job_gives_nodes_back_for_another_and_operators_come_and_go(bed: Bed) -> None:
    cluster, kube = bed
    shared = SharedHosts(capacity=4)

    def master(name: str) -> Obj | None:
        return cluster.one(DEPLOYMENTS, names.master_of(name))

    async with operator(kube, timing=SOON, shared=shared):
        await kube.create(ELASTICJOBS, job("a", 4, 2))
        await until(lambda: master("a"), "a master")
        assert nodes(cluster, "a") == 4, "before there is a master"
        for index in range(4):
            pod(cluster, "a", index)
        says(cluster, "a", 4)
        await kube.create(ELASTICJOBS, job("b", 2, 2, priority="high"))
        await until(lambda: nodes(cluster, "a") == 2, "two nodes given back")
        told = await until(
            lambda: (c := condition(cluster, "Allocated", "b")).get("reason") == "HeldBack" and c,
            "why it is held back",
        )
    assert told["status"] == "False"
    assert told["message"] == "0→2: waits until other jobs have given 2 nodes back"
    assert (cluster.one(ELASTICJOBS, "b") or {})["status"]["reason"] == "HeldBack"
    assert master("b") is None
    cluster.remove(PODS, "a-n3")
    async with operator(kube, timing=SOON, shared=shared) as one:
        says(cluster, "a", 2)
        await test_operator.rest(one)
        assert nodes(cluster, "b") == 0, "a Pod is still there"
        cluster.remove(PODS, "a-n2")
        await until(lambda: master("b"), "the other master")
        assert (nodes(cluster, "a"), nodes(cluster, "b")) == (2, 2)
        await until(lambda: condition(cluster, "Allocated", "b")["status"] == "True", "a word")
    async with operator(kube):
        await until(lambda: nodes(cluster, "a") == nodes(cluster, "b") == -1, "no limit")
        await until(lambda: not condition(cluster, "Allocated", "b"), "no word")
    reasons = {(e["involvedObject"]["name"], e["reason"]) for e in cluster.all(EVENTS)}
    assert {("b", "HeldBack"), ("b", "Allocated"), ("a", "Allocated")} <= reasons


def host(name: str, pool: str = "a") -> Obj:
    ready = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": name, "labels": {"pool": pool}}, "status": {"conditions": ready}}


async def test_hosts_are_found_by_their_labels_and_a_job_can_stay_out(bed: Bed) -> None:
    cluster, kube = bed
    for name in ("h1", "h2"):
        cluster.put(NODES, host(name))
    cluster.put(NODES, host("h3", "b"))
    shared = SharedHosts(selector="pool=a", hold_s=0.0)
    async with operator(kube, timing=SOON, shared=shared):
        await kube.create(ELASTICJOBS, job("a", 4, 1))
        await until(lambda: nodes(cluster, "a") == 2, "two hosts")
        cluster.put(NODES, host("h4"))
        await until(lambda: nodes(cluster, "a") == 3, "three hosts")
        alone = job("alone", 9, 9)
        alone["metadata"]["annotations"] = {names.NOTE_ALLOCATION: "off"}
        await kube.create(ELASTICJOBS, alone)
        await until(lambda: cluster.one(DEPLOYMENTS, names.master_of("alone")), "a master")
        assert nodes(cluster, "alone") == -1
        note = {"metadata": {"annotations": {names.NOTE_ALLOCATION: "off"}}}
        await kube.patch(ELASTICJOBS, "a", note, "default")
        await until(lambda: nodes(cluster, "a") == -1, "no limit")


async def test_minima_get_stable_hosts_and_a_pool_that_keeps_reclaiming_gets_no_more(
    bed: Bed,
) -> None:
    cluster, kube = bed
    label = "karpenter.sh/capacity-type"

    def add(name: str, pool: str) -> None:
        one = host(name)
        one["metadata"]["labels"][label] = pool
        cluster.put(NODES, one)

    def places() -> dict[str, int]:
        return {one["name"]: one["nodes"] for one in granted(cluster, "a").get("placements", ())}

    add("s", "on-demand")
    for index in range(3):
        add(f"h{index}", "spot")
    shared = SharedHosts(selector="pool=a", hold_s=0.0, pool_label=label)
    async with operator(kube, timing=SOON, shared=shared) as one:
        await kube.create(ELASTICJOBS, job("a", 4, 1, spotPolicy="onDemandMin"))
        await until(lambda: places() == {"on-demand": 1, "spot": 3}, "four nodes")
        (_, spot) = granted(cluster, "a")["placements"]
        assert spot["nodeSelector"] == {label: "spot"}
        # These Pods have no pool. So the places show that the operator has seen them.
        pod(cluster, "a", 0, host="s")
        for index in range(3):
            await until(lambda: nodes(cluster, "a") == 4, "four nodes")
            pod(cluster, "a", index + 1, host=f"h{index}")
            await until(lambda: places().get("") == 2, "two Pods")
            cluster.remove(NODES, f"h{index}")
            await until(lambda: nodes(cluster, "a") < 4, "the loss of a host")
            cluster.remove(PODS, f"a-n{index + 1}")
            await until(lambda: places().get("") == 1, "one Pod")
            add(f"new{index}", "spot")
        await test_operator.rest(one)
        assert nodes(cluster, "a") == 3, "the spot pool is closed"
        assert places() == {"on-demand": 0, "spot": 2, "": 1}
    async with operator(kube, timing=SOON, shared=shared):
        await until(lambda: nodes(cluster, "a") == 4, "a new operator has forgotten it")


async def test_a_late_word_of_a_watch_does_not_undo_what_was_written(bed: Bed) -> None:
    """Otherwise the hosts that were just allotted would seem free once more."""
    cluster, kube = bed
    await kube.create(ELASTICJOBS, job("a", 4, 2))
    before = cluster.one(ELASTICJOBS, "a")
    assert before is not None
    async with operator(kube, timing=SOON, shared=SharedHosts(capacity=4)) as one:
        await until(lambda: nodes(cluster, "a") == 4, "an allocation")
        await test_operator.rest(one)
        cluster.deaf.add("elasticjobs")
        cluster.say("MODIFIED", before)
        pod(cluster, "a", 0, owner="a job that is gone")
        await until(lambda: nodes(cluster, "a") == 3, "a decision")
        assert granted(cluster, "a")["reason"].startswith("4→3: 1 node given back")


async def test_a_refusal_of_one_job_does_not_keep_others_from_their_nodes(bed: Bed) -> None:
    cluster, kube = bed
    cluster.fail(422, "Invalid", "no", times=3, method="PATCH", path="/elasticjobs/a/status")
    async with operator(kube, timing=SOON, shared=SharedHosts(capacity=4)):
        await kube.create(ELASTICJOBS, job("a", 2, 1))
        await kube.create(ELASTICJOBS, job("b", 2, 1))
        await until(lambda: nodes(cluster, "b") == 2, "its nodes")
        await until(lambda: nodes(cluster, "a") == 2, "its nodes, later")
