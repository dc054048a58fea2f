"""What the operator writes is what a real API server takes; the rest is in tests/process."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover_operator.allotment import SharedHosts
from dlrover_operator.timing import OperatorTiming
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import NotFoundError
from dlrover_py.kubernetes.kinds import DEPLOYMENTS, ELASTICJOBS, SERVICES, Obj
from dlrover_py.protocol import names
from tests.contracts.test_crd import cluster, job
from tests.process.test_operator import SOON, operator

MASTER = names.master_of("x")


async def seen(
    kube: KubeClient, kind: Any, name: str, space: str, look: Callable[[Obj], Any]
) -> Obj:
    """Watch an object until it looks so."""
    async with asyncio.timeout(SOON):
        while True:
            try:
                held = await kube.get(kind, name, space)
            except NotFoundError:
                held = {}
            if look(held):
                return held
            await asyncio.sleep(0.02)


def said(held: Obj, kind: str) -> tuple[str, str]:
    found = (held.get("status") or {}).get("conditions") or ()
    one: Obj = next((c for c in found if c["type"] == kind), {})
    return one.get("status", ""), one.get("reason", "")


async def test_a_jobs_life_on_a_real_api_server(kube_api: Path) -> None:
    async with cluster(kube_api) as (kube, space), operator(kube, space):

        async def master_says(**status: Any) -> None:
            held = await kube.get(ELASTICJOBS, "x", space)
            generation = held["metadata"]["generation"]
            training = {"generation": generation, "nodes": [], **status}
            obj = {"metadata": {"name": "x", "namespace": space}, "status": {"training": training}}
            await kube.apply(ELASTICJOBS, obj, manager=names.MASTER_MANAGER, subresource="status")

        async def available(count: int) -> None:
            status = {"replicas": count, "readyReplicas": count, "availableReplicas": count}
            patch = {"status": status}
            await kube.patch(DEPLOYMENTS, MASTER, patch, space, subresource="status")

        template = {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "main"}]}}
        made = job(space)
        made["spec"]["replicaSpecs"]["dlrover-master"] = {"template": template}
        await kube.create(ELASTICJOBS, made)
        first = await seen(kube, DEPLOYMENTS, MASTER, space, bool)
        pod = first["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {"a": "b"}
        await available(1)
        await seen(kube, ELASTICJOBS, "x", space, lambda j: said(j, "MasterReady")[0] == "True")
        await master_says(phase="Running")
        await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": True}}, space)
        await seen(kube, ELASTICJOBS, "x", space, lambda j: said(j, "Suspended")[1] == "Suspending")
        await master_says(phase="Suspended")
        await seen(kube, DEPLOYMENTS, MASTER, space, lambda d: d["spec"]["replicas"] == 0)
        held = await seen(
            kube, ELASTICJOBS, "x", space, lambda j: said(j, "Suspended")[0] == "True"
        )
        assert held["status"]["phase"] == "Suspended"
        assert "startTime" not in held["status"]
        assert held["status"]["training"]["phase"] == "Suspended"

        roles = {"dlrover-master": {"template": {"spec": {"nodeSelector": None}}}}
        wish = {"spec": {"suspend": False, "replicaSpecs": roles}}
        await kube.patch(ELASTICJOBS, "x", wish, space)
        again = await seen(kube, DEPLOYMENTS, MASTER, space, lambda d: d["spec"]["replicas"] == 1)
        assert again["metadata"]["uid"] == first["metadata"]["uid"]
        assert "nodeSelector" not in again["spec"]["template"]["spec"]

        service = await kube.get(SERVICES, MASTER, space)
        address = service["spec"]["clusterIP"]
        await kube.delete(SERVICES, MASTER, space)
        other = await seen(
            kube,
            SERVICES,
            MASTER,
            space,
            lambda s: s and s["metadata"]["uid"] != service["metadata"]["uid"],
        )
        assert other["spec"]["clusterIP"] == address

        await master_says(phase="Succeeded", endedAt="2027-01-15T08:00:00.500Z")
        held = await seen(
            kube, ELASTICJOBS, "x", space, lambda j: j["status"].get("phase") == "Succeeded"
        )
        assert held["status"]["completionTime"]
        await seen(kube, DEPLOYMENTS, MASTER, space, lambda d: d["spec"]["replicas"] == 0)


async def test_an_allocation_is_written_and_taken_away_on_a_real_api_server(
    kube_api: Path,
) -> None:
    async with cluster(kube_api) as (kube, space):

        def look(held: Obj) -> tuple[int | None, tuple[str, str]]:
            allocation = (held.get("status") or {}).get("allocation") or {}
            return allocation.get("nodes"), said(held, "Allocated")

        async def becomes(nodes: int | None, *word: str) -> int | None:
            held = await seen(kube, ELASTICJOBS, "x", space, lambda h: look(h) == (nodes, word))
            return look(held)[0]

        timing = OperatorTiming(allot_after_s=0.02)
        async with operator(kube, space, timing=timing, shared=SharedHosts(capacity=3)):
            await kube.create(ELASTICJOBS, job(space, minReplicas=2))
            assert await becomes(3, "True", "Allocated") == 3
            await seen(kube, DEPLOYMENTS, MASTER, space, bool)
        async with operator(kube, space):
            assert await becomes(None, "", "") is None
            # One that still ends writes it again.
            held = await kube.get(ELASTICJOBS, "x", space)
            late = {"metadata": held["metadata"], "status": {"allocation": {"nodes": 3}}}
            late["metadata"] = {k: late["metadata"][k] for k in ("name", "namespace", "uid")}
            await kube.apply(
                ELASTICJOBS, late, manager=names.ALLOCATOR_MANAGER, subresource="status"
            )
            assert await becomes(None, "", "") is None
