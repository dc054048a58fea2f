"""Jobs of many Pods, on fake nodes: what they cost the API server, and what is decided at once.

How long it takes is shown by ``benchmarks/cluster.py --only pods``.
"""

import asyncio
import time
from collections.abc import Iterator

import pytest

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import PODS
from tests.cluster.harness import Cluster, until
from tests.cluster.jobs import Watched, watching
from tests.cluster.many import MasterRequests, agents_of, many, running

pytestmark = pytest.mark.timeout(900)
PODS_OF_A_JOB = 100
LOGGED = "what is watched has been logged too"


@pytest.fixture
def there(cluster: Cluster, operator: str, namespace: str) -> Iterator[Watched]:
    """A namespace that is watched, of a cluster with the operator and fake nodes in it."""
    with cluster.fake_nodes(4), watching(cluster, namespace) as watched:
        yield watched
        # While somebody speaks for its Pods.
        cluster.kubectl("delete", "namespace", namespace, within_s=300)


def test_a_large_job_costs_the_api_server_little(there: Watched) -> None:
    run = many(there, "large", PODS_OF_A_JOB)
    run.until(lambda: running(run) == PODS_OF_A_JOB, "all run", within_s=240)
    run.patch({"suspend": True})
    run.until(lambda: run.holds("Suspended") and not run.pods, "none is left", within_s=240)
    until(lambda: len(MasterRequests(run).of("delete", "pods", 200)) >= PODS_OF_A_JOB, LOGGED)
    asked = MasterRequests(run)
    assert len(asked.of("create", "pods", 201)) == PODS_OF_A_JOB
    assert len(asked.of("delete", "pods", 200)) == PODS_OF_A_JOB
    status = "patch", "elasticjobs/status"  # one a second, however long it takes
    assert asked.writes.total() - asked.writes[status] <= 4 * PODS_OF_A_JOB, asked.writes
    assert asked.writes["update", "secrets"] <= PODS_OF_A_JOB / 2, "decisions share a journal"
    assert asked.closest(*status) > 0.9
    assert len(asked.of("list", "pods")) == len(asked.of("list", "elasticjobs")) == 1


async def test_pods_that_are_deleted_at_once_are_one_decision(there: Watched) -> None:
    run = many(there, "mass", 32, minReplicas=1)
    await asyncio.to_thread(run.until, lambda: running(run) == 32, "all run")
    async with agents_of(run, 62) as agents:
        first = [f"n{i}" for i in range(32)]
        await agents.form(first, 32)
        before, since = max(agents.rounds), time.time()
        left = agents.swarm.until(agents.of(first[:2]), lambda told: told.get("nnodes") == 2)
        async with await KubeClient.connect(kubeconfig=there.cluster.kubeconfig) as kube:
            gone = (kube.delete(PODS, f"mass-{n}", there.namespace, grace_s=0) for n in first[2:])
            calls = asyncio.gather(*gone)
            agents.swarm.lose(agents.of(first[2:]))
            await calls
        await agents.swarm.wait(left, "the two that are left")
        new = [f"n{i}" for i in range(32, 62)]
        await asyncio.to_thread(run.until, lambda: set(run.pods) == {"n0", "n1", *new}, "new ones")

        def made() -> int:
            return len(MasterRequests(run, since).of("create", "pods", 201))

        await asyncio.to_thread(until, lambda: made() >= 30, LOGGED)
        assert {n: size for n, size in agents.rounds.items() if n > before} == {before + 1: 2}
        await agents.form(new, 32)
        assert made() == 30
        assert agents.swarm.surprises == []
