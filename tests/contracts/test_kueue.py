"""Kueue's objects on a real API server: the operator asks, and the test answers as Kueue does.

The definitions have only the fields that are used, with the types and defaults that
``kueue.x-k8s.io/v1beta2`` has (Kueue 0.17). tests/unit/test_kueue.py has what is decided.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
from dlrover_py.protocol.job import ElasticJob
from tests import kueue_server
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


def definition(kind: Kind, fields: Obj) -> Obj:
    """Return a definition of a kind whose spec has these fields."""
    spec = {"type": "object", "properties": fields}
    schema = {"type": "object", "properties": {"spec": spec, "status": ANY}}
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
                await kube.create(CRDS, definition(kind, SPECS[kind.plural]), strict=True)
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
            place |= {"tolerations": [{"operator": "Exists"}], "labels": {}, "annotations": {}}
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


class Master:
    """Plays the master of a job: it follows the allocation, one Pod at a time."""

    def __init__(self, kube: KubeClient, space: str, name: str, held: set[str]) -> None:
        """Do nothing yet.

        Args:
            kube: client of the API server.
            space: namespace of the job.
            name: name of the job.
            held: Pods of all jobs that exist; it is kept up to date.
        """
        self._kube, self._space, self._name, self._held = kube, space, name, held
        self._number = 0
        self.nodes: list[str] = []
        """Its Pods."""

    async def run(self) -> None:
        """Follow the allocation until the task is canceled."""
        while True:
            await self._step()
            await asyncio.sleep(0.02)

    async def _step(self) -> None:
        obj = await self._kube.get(ELASTICJOBS, self._name, self._space)
        found = ElasticJob.read(obj)
        may = 0 if found.rests or found.allocation is None else found.allocation.nodes
        want = min(found.worker.replicas, may)
        training: Obj = {"phase": "Running" if want else "Suspended", "desired": want, "nodes": []}
        training["generation"] = obj["metadata"]["generation"]
        before = (obj.get("status") or {}).get("training") or {}
        if any(before.get(part) != training[part] for part in ("phase", "desired")):
            meta: Obj = {"name": self._name, "namespace": self._space}
            status = {"metadata": meta, "status": {"training": training}}
            manager = names.MASTER_MANAGER
            await self._kube.apply(ELASTICJOBS, status, manager=manager, subresource="status")
        if len(self.nodes) > want:
            name = self.nodes.pop()
            await self._kube.delete(PODS, name, self._space, grace_s=0)
            self._held.discard(name)
        elif len(self.nodes) < want:
            name = f"{self._name}-n{self._number}"
            self._number += 1
            assert found.allocation is not None
            (place,) = found.allocation.placements
            labels = {names.LABEL_JOB: self._name, names.LABEL_ROLE: names.ROLE_WORKER}
            labels[names.LABEL_PLACEMENT] = place.name
            owner = names.owner(self._name, obj["metadata"]["uid"])
            meta = {"name": name, "namespace": self._space, "labels": labels}
            spec: Obj = {"containers": [{"name": "main", "image": "i"}]}
            spec |= {"nodeSelector": place.node_selector}
            self._held.add(name)
            self.nodes.append(name)
            await self._kube.create(
                PODS, {"metadata": meta | {"ownerReferences": [owner]}, "spec": spec}
            )


async def test_jobs_share_a_quota_of_the_real_kueue(kube_api: Path, tmp_path: Path) -> None:
    program = kueue_server.folder()
    if isinstance(program, str):
        pytest.skip(program)
    quota = {"name": "cpu", "nominalQuota": "4"}
    group = {"coveredResources": ["cpu"], "flavors": [{"name": "a", "resources": [quota]}]}
    share: Obj = {"namespaceSelector": {}, "resourceGroups": [group]}
    share |= {"preemption": {"withinClusterQueue": "LowerPriority"}}
    held: set[str] = set()
    async with cluster(kube_api) as (kube, space), contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            kueue_server.kueue(tmp_path / "kueue", program, kube_api, kube)
        )
        flavor = {"metadata": {"name": "a"}, "spec": {"nodeLabels": {"pool": "a"}}}
        await kube.apply(RESOURCE_FLAVORS, flavor, manager="test")
        await kube.create(kueue_server.CLUSTER_QUEUES, {"metadata": {"name": "q"}, "spec": share})
        meta = {"name": "team", "namespace": space}
        await kube.create(LOCAL_QUEUES, {"metadata": meta, "spec": {"clusterQueue": "q"}})
        timing = OperatorTiming(allot_after_s=0.02)
        await stack.enter_async_context(operator(kube, space, timing=timing, kueue=True))
        masters = await stack.enter_async_context(asyncio.TaskGroup())
        running: list[asyncio.Task[None]] = []
        stack.callback(lambda: [task.cancel() for task in running])

        async def arrives(name: str, most: int, priority: str = "0") -> Master:
            made = job(space, minReplicas=2, priority=priority)
            made["metadata"] |= {"name": name, "labels": {names.LABEL_QUEUE: "team"}}
            worker = made["spec"]["replicaSpecs"]["worker"]
            worker["replicas"] = most
            requests = {"requests": {"cpu": "1"}}
            worker["template"]["spec"]["containers"][0]["resources"] = requests
            await kube.create(ELASTICJOBS, made)
            master = Master(kube, space, name, held)
            running.append(masters.create_task(master.run()))
            return master

        async def used() -> int:
            found = await kube.get(kueue_server.CLUSTER_QUEUES, "q")
            (flavor,) = found["status"]["flavorsReservation"]
            return int(flavor["resources"][0]["total"])

        async def sizes(*wanted: tuple[Master, int]) -> None:
            """Wait until jobs have these sizes; at each moment all Pods must have quota."""

            async def look() -> bool:
                assert len(held) <= 4, held
                return [len(m.nodes) for m, _ in wanted] == [n for _, n in wanted]

            await until(look, str(wanted))

            async def counted() -> bool:
                return await used() == len(held)

            await until(counted, "Kueue counts the same")

        first = await arrives("first", 4)
        await sizes((first, 4))
        second = await arrives("second", 2)
        await sizes((first, 2), (second, 2))
        urgent = await arrives("urgent", 2, "9")

        async def one_gives_way() -> bool:
            assert len(held) <= 4, held
            return len(urgent.nodes) == 2 and {len(first.nodes), len(second.nodes)} == {0, 2}

        await until(one_gives_way, "a job of lower priority waits again")
        gone, other = (first, second) if not first.nodes else (second, first)
        suspend = {"spec": {"suspend": True}}
        await kube.patch(ELASTICJOBS, "urgent", suspend, space)
        await sizes((urgent, 0), (gone, 2), (other, 2))
