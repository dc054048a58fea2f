"""The self-test of an installation removes its own jobs, and nobody else's."""

import asyncio
from pathlib import Path

from dlrover_operator import selftest
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import ELASTICJOBS, Obj
from dlrover_py.kubernetes.watch import Listed
from tests.fakes_kube import FakeCluster, fake_cluster

JOB = selftest.job("test-dlrover", "default", "image")


def refusing_wrong_jobs(cluster: FakeCluster) -> None:
    """The CRD refuses the wrong job that the self-test tries first."""
    cluster.fail(422, "Invalid", method="POST", query="dryRun")


async def succeed_when_made(cluster: FakeCluster, kube: KubeClient) -> None:
    """Be the operator and the master of the first job that is found without a status."""
    async for change in kube.watch(ELASTICJOBS, "default", view=_whole):
        for job in change.items if isinstance(change, Listed) else [change.item]:
            if "status" not in job:
                cluster.put(ELASTICJOBS, job | {"status": {"phase": "Succeeded"}})
                return


def _whole(obj: Obj) -> Obj:
    return obj


async def test_the_job_of_an_earlier_selftest_is_replaced(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as (cluster, kube), asyncio.timeout(30):
        cluster.put(ELASTICJOBS, JOB | {"status": {"phase": "Failed"}})
        refusing_wrong_jobs(cluster)
        operator = asyncio.create_task(succeed_when_made(cluster, kube))
        assert await selftest.check(kube, JOB) == ""
        await operator
        assert cluster.all(ELASTICJOBS) == [], "and its own is removed"


async def test_a_users_job_of_that_name_stays(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as (cluster, kube), asyncio.timeout(30):
        users = cluster.put(ELASTICJOBS, {"metadata": {"name": "test-dlrover"}, "spec": {}})
        refusing_wrong_jobs(cluster)
        why = await selftest.check(kube, JOB)
        assert "already exists: expected no job test-dlrover in the namespace default" in why
        assert cluster.all(ELASTICJOBS) == [users]
