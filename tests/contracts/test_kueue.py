"""Kueue's objects on a real API server: the operator asks, and the test answers as Kueue does.

The definitions have only the fields that are used, with the types and defaults that
``kueue.x-k8s.io/v1beta2`` has (Kueue 0.17). tests/unit/test_kueue.py has what is decided.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover_operator.timing import OperatorTiming
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import (
    CRDS,
    DEPLOYMENTS,
    ELASTICJOBS,
    LOCAL_QUEUES,
    PODS,
    RESOURCE_FLAVORS,
    WORKLOADS,
    Kind,
    Obj,
)
from dlrover_py.kubernetes.watch import ClientTimes
from dlrover_py.protocol import names
from tests.contracts.test_crd import cluster, job
from tests.contracts.test_operator import MASTER, said, seen
from tests.process.test_operator import SOON, operator

TEXT, COUNT, ANY = (
    {"type": "string"},
    {"type": "integer", "format": "int32"},
    {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
)
POD_SETS: Obj = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["template"],
        "properties": {
            "name": TEXT | {"default": "main"},
            "count": COUNT | {"minimum": 0, "default": 1},
            "template": ANY,
        },
    },
}
SPECS: dict[str, Obj] = {
    "workloads": {"queueName": TEXT, "priority": COUNT, "podSets": POD_SETS},
    "localqueues": {"clusterQueue": TEXT},
    "resourceflavors": {"nodeLabels": ANY, "tolerations": {"type": "array", "items": ANY}},
}


def definition(kind: Kind) -> Obj:
    """Return a definition of a kind of Kueue's."""
    schema = {
        "type": "object",
        "properties": {
            "spec": {"type": "object", "properties": SPECS[kind.plural]},
            "status": ANY,
        },
    }
    version = {"name": kind.version, "served": True, "storage": True}
    version |= {"schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}}
    return {
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": kind.group,
            "names": {"plural": kind.plural, "kind": kind.name},
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [version],
        },
    }


async def answer(kube: KubeClient, workload: Obj, admission: Obj | None, **true: str) -> None:
    """Write the status of a Workload as Kueue does."""
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": kind,
            "message": message,
            "lastTransitionTime": "2027-01-15T08:00:00Z",
        }
        for kind, message in true.items()
    ]
    status: Obj = {"conditions": conditions} | ({"admission": admission} if admission else {})
    meta = workload["metadata"]
    await kube.patch(
        WORKLOADS, meta["name"], {"status": status}, meta["namespace"], subresource="status"
    )


async def until(look: Callable[[], Any], what: str) -> Any:
    """Repeat a look at the server until it shows something."""
    async with asyncio.timeout(SOON):
        while not (found := await look()):
            await asyncio.sleep(0.02)
    assert found, what
    return found


async def test_a_job_is_queued_admitted_grown_and_shrunk(kube_api: Path) -> None:
    times = ClientTimes(first_wait_s=0.05, denied_s=0.2)
    async with cluster(kube_api) as (kube, space):
        kube.times = times
        timing = OperatorTiming(allot_after_s=0.02)
        async with operator(kube, space, timing=timing, kueue=True):

            async def reason(words: str) -> Obj:
                def look(held: Obj) -> bool:
                    allocation = (held.get("status") or {}).get("allocation") or {}
                    return words in allocation.get("reason", "")

                return await seen(kube, ELASTICJOBS, "x", space, look)

            async def steps(*wanted: int) -> list[Obj]:
                async def look() -> list[Obj]:
                    found = await kube.list(WORKLOADS, space)
                    found.sort(
                        key=lambda w: int(w["metadata"]["annotations"]["elasticjob.dlrover/step"])
                    )
                    numbers = [int(w["metadata"]["name"].rpartition("-")[2]) for w in found]
                    return found if numbers == list(wanted) else []

                return list(await until(look, f"the steps {wanted}"))

            async def master_says(phase: str, desired: int) -> None:
                held = await kube.get(ELASTICJOBS, "x", space)
                training = {"phase": phase, "desired": desired, "nodes": []}
                training["generation"] = held["metadata"]["generation"]
                meta = {"name": "x", "namespace": space}
                obj = {"metadata": meta, "status": {"training": training}}
                await kube.apply(
                    ELASTICJOBS, obj, manager=names.MASTER_MANAGER, subresource="status"
                )

            queued = job(space, minReplicas=2)  # of 4 nodes
            queued["metadata"]["labels"] = {names.LABEL_QUEUE: "team"}
            await kube.create(ELASTICJOBS, queued)
            held = await reason("does not serve kueue.x-k8s.io/v1beta2")
            for kind in (WORKLOADS, LOCAL_QUEUES, RESOURCE_FLAVORS):
                await kube.create(CRDS, definition(kind), strict=True)
            await reason(f"there is no LocalQueue team in the namespace {space}")
            flavor = {"nodeLabels": {"pool": "a"}, "tolerations": [{"operator": "Exists"}]}
            await kube.create(RESOURCE_FLAVORS, {"metadata": {"name": "a"}, "spec": flavor})
            queue = {"metadata": {"name": "team", "namespace": space}}
            await kube.create(LOCAL_QUEUES, queue | {"spec": {"clusterQueue": "all"}})

            (base,) = await steps(0)
            assert base["spec"]["podSets"][0]["count"] == 2
            held = await reason("waits in the queue team")
            assert said(held, "Allocated") == ("False", "HeldBack")
            assigned = {"name": "main", "count": 2, "flavors": {"cpu": "a"}}
            given: Obj = {"clusterQueue": "all", "podSetAssignments": [assigned]}
            await answer(kube, base, given, QuotaReserved="", Admitted="")
            _, first, _ = await steps(0, 1, 2)
            held = await reason("has admitted 2 nodes; 2 more nodes wait for quota")
            place: Obj = {"name": "a", "nodes": 2, "nodeSelector": {"pool": "a"}}
            place |= {"tolerations": [{"operator": "Exists"}]}
            assert held["status"]["allocation"]["placements"] == [place]
            await seen(kube, DEPLOYMENTS, MASTER, space, bool)

            await answer(kube, first, given, QuotaReserved="", Admitted="")
            await reason("has admitted 3 nodes")
            await master_says("Running", 3)
            owner = names.owner("x", held["metadata"]["uid"])
            labels = {names.LABEL_JOB: "x", names.LABEL_ROLE: names.ROLE_WORKER}
            labels[names.LABEL_PLACEMENT] = "a"
            for number in range(3):
                meta = {"name": f"x-n{number}", "namespace": space, "labels": labels}
                spec = {"containers": [{"name": "main", "image": "i"}]}
                await kube.create(
                    PODS, {"metadata": meta | {"ownerReferences": [owner]}, "spec": spec}
                )
            why = "Preempted to accommodate a workload"
            await answer(kube, first, given, QuotaReserved="", Admitted="", Evicted=why)
            await reason("has admitted 2 nodes")
            await master_says("Running", 2)
            kept = await kube.get(WORKLOADS, first["metadata"]["name"], space)
            assert kept["metadata"]["uid"] == first["metadata"]["uid"], "three Pods are there"
            await kube.delete(PODS, "x-n2", space, grace_s=0)

            async def absent(workload: Obj) -> bool:
                found = [w["metadata"]["uid"] for w in await kube.list(WORKLOADS, space)]
                return workload["metadata"]["uid"] not in found

            await until(lambda: absent(first), "the quota of the step is given back")

            await answer(kube, base, given, QuotaReserved="", Admitted="", Evicted=why)
            held = await reason(f"waits in the queue team: {why}")
            assert held["status"]["allocation"]["nodes"] == 0
            await master_says("Suspended", 0)
            for number in range(2):
                await kube.delete(PODS, f"x-n{number}", space, grace_s=0)
            await until(lambda: absent(base), "the quota of the base is given back")
            await steps(0)  # it waits in the queue again
