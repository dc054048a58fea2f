"""The operator shares a real cluster among jobs: they shrink, wait and grow, and none dies."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_py.protocol.names import master_of
from tests.cluster.conftest import rolled_out
from tests.cluster.harness import Cluster
from tests.cluster.jobs import OPERATOR, Job, Watched, document, steps, submit

CHART = Path(__file__).parents[2] / "charts/dlrover"
pytestmark = pytest.mark.timeout(900)


def share(cluster: Cluster, release: str, values: str) -> None:
    """Change values of the allocator in the installed chart."""
    cluster.helm(
        *("upgrade", "dlrover", str(CHART), "-n", release, "--reset-then-reuse-values"),
        *("--set", values, "--wait", "--timeout=240s"),
    )
    rolled_out(cluster, release)


@pytest.fixture
def three_nodes(cluster: Cluster, operator: str) -> Iterator[None]:
    """Have all jobs of the cluster share three nodes."""
    share(cluster, operator, "allocator.enabled=true,allocator.capacity=3,allocator.holdSeconds=5")
    yield
    share(cluster, operator, "allocator.enabled=false")


@pytest.mark.usefixtures("three_nodes")
def test_a_job_shrinks_for_another_and_grows_again(
    there: Watched, operator: str, agent_image: str
) -> None:
    """The operator is killed in the midst of the move."""
    cluster = there.cluster

    def job(name: str, replicas: int, least: int, priority: str = "0") -> Job:
        doc = document(
            name, agent_image, steps(), replicas=replicas, minReplicas=least, priority=priority
        )
        return submit(cluster, there, doc)

    a = job("a", 3, 1)
    first = a.runs(3)
    b = job("b", 2, 2, priority="1")
    a.until(lambda: a.status["allocation"]["nodes"] == 1, "two nodes are asked back")
    cluster.kubectl("delete", "pod", "-n", operator, "-l", OPERATOR, "--force", "--grace-period=0")
    small = a.runs(1, after=first.round)
    b.runs(2)
    held = job("held", 4, 4)
    held.until(
        lambda: held.condition("Allocated").get("reason") == "HeldBack", "it says that it waits"
    )
    assert held.condition("Allocated")["message"] == (
        "held back: it needs 4 nodes, and the cluster has 3"
    )
    assert held.status["reason"] == "HeldBack"
    assert cluster.get("deployment", master_of("held"), there.namespace) is None
    b.kubectl("delete", "elasticjob", "b")
    large = a.runs(3, after=small.round)
    assert set(large.restarts) <= {"scale", "join"}, "nothing has died"
    assert large.last_failure is None


@pytest.mark.usefixtures("three_nodes")
def test_a_job_is_free_again_without_allocator(
    there: Watched, operator: str, agent_image: str
) -> None:
    doc = document("a", agent_image, steps(), replicas=4, minReplicas=1)
    a = submit(there.cluster, there, doc)
    limited = a.runs(3)
    share(there.cluster, operator, "allocator.enabled=false")
    a.runs(4, after=limited.round)
    a.until(lambda: not a.condition("Allocated"), "no word about nodes")
