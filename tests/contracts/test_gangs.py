"""PodGroups on a real API server: the operator makes them, and keeps their minimum.

The definition has only the fields that are used, as ``scheduling.volcano.sh/v1beta1`` has them.
Gangs of Kubernetes itself are in tests/process/test_native_gangs.py: Kubernetes 1.34 has none, and
serves no definition of a user in its own API group.
"""

from pathlib import Path

import pytest

from dlrover_py.kubernetes.kinds import CRDS, ELASTICJOBS, SCHEDULING, VOLCANO_GROUPS, Obj
from dlrover_py.kubernetes.watch import ClientTimes
from tests.contracts.test_crd import cluster, job
from tests.contracts.test_kueue import COUNT, TEXT, definition
from tests.contracts.test_operator import said, seen
from tests.process.test_operator import operator


async def test_a_pod_group_is_made_once_it_is_served_and_follows_the_minimum(
    kube_api: Path,
) -> None:
    async with cluster(kube_api) as (kube, space):
        kube.times = ClientTimes(first_wait_s=0.05, denied_s=0.2)
        async with operator(kube, space, gangs=True):
            made = job(space, minReplicas=2)
            template: Obj = made["spec"]["replicaSpecs"]["worker"]["template"]
            template["metadata"] = {"annotations": {"scheduling.k8s.io/group-name": "g"}}
            await kube.create(ELASTICJOBS, made)

            async def becomes(*word: str) -> None:
                await seen(kube, ELASTICJOBS, "x", space, lambda j: said(j, "GangReady") == word)

            await becomes("False", "ApiMissing")
            fields = {"minMember": COUNT, "queue": TEXT}
            await kube.create(CRDS, definition(VOLCANO_GROUPS, fields), strict=True)
            await becomes("True", "InStep")
            group = await kube.get(VOLCANO_GROUPS, "g", space)
            assert group["spec"] == {"minMember": 2}
            spec = {"replicaSpecs": {"worker": {"minReplicas": 3}}}
            await kube.patch(ELASTICJOBS, "x", {"spec": spec}, space)
            await seen(kube, VOLCANO_GROUPS, "g", space, lambda g: g["spec"]["minMember"] == 3)


async def test_a_server_without_gangs_of_its_own_is_named(kube_api: Path) -> None:
    async with cluster(kube_api) as (kube, space):
        if any(kind.plural == "podgroups" for kind in await kube.served(SCHEDULING)):
            pytest.skip("this Kubernetes has gangs of its own")
        kube.times = ClientTimes(first_wait_s=0.05, denied_s=0.2)
        async with operator(kube, space, gangs=True):
            made = job(space, minReplicas=2)
            template: Obj = made["spec"]["replicaSpecs"]["worker"]["template"]
            template["spec"]["schedulingGroup"] = {"podGroupName": "g"}
            await kube.create(ELASTICJOBS, made)
            missing = ("False", "ApiMissing")
            held = await seen(
                kube, ELASTICJOBS, "x", space, lambda j: said(j, "GangReady") == missing
            )
            conditions = held["status"]["conditions"]
            (message,) = (c["message"] for c in conditions if c["type"] == "GangReady")
            assert "does not serve podgroups of scheduling.k8s.io" in message
