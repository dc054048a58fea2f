import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, cluster_for_tests
from tests.cluster.jobs import Watched, watching

CHART = Path(__file__).parents[2] / "charts/dlrover"
SYSTEM = "dlrover-system"


UNTIL = os.environ.get("DLROVER_CLUSTER_TESTS_UNTIL")
"""Unix time in seconds from which on no test begins; ``scripts/test.sh`` sets it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests a longer timeout: the first one waits for the cluster and the images.

    Where the time is limited, each day it is other files that come last.
    """
    files = list(dict.fromkeys(item.path for item in items))
    if UNTIL is not None and files:
        first = time.localtime().tm_yday * 7 % len(files)
        items.sort(key=lambda item: (files.index(item.path) - first) % len(files))
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and not item.get_closest_marker(
            "timeout"
        ):
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which no time is left."""
    if UNTIL is not None and time.time() >= float(UNTIL):
        pytest.skip(f"NOT TESTED {item.nodeid}: no time was left (DLROVER_TEST_MINUTES)")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real cluster: the running one, or one for these tests. Skipped if there can be none."""
    with cluster_for_tests() as cluster:
        yield cluster


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for one test. After the test it is deleted, and nodes are uncordoned."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())
    name = f"{words[:40].strip('-')}-{secrets.token_hex(3)}"
    cluster.make_namespace(name)
    yield name
    cluster.heal()
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def agent_image(cluster: Cluster) -> str:
    """The image of the agent, built from the working tree, on each node."""
    return cluster.image("agent")


@pytest.fixture(scope="session")
def master_image(cluster: Cluster) -> str:
    """The image of the master."""
    return cluster.image("master")


@pytest.fixture(scope="session")
def operator_image(cluster: Cluster) -> str:
    """The image of the operator."""
    return cluster.image("operator")


@pytest.fixture
def operator(cluster: Cluster, operator_image: str, master_image: str) -> str:
    """The namespace of the operator, which is installed from the chart and runs."""
    release = installed(cluster, operator_image, master_image)
    rolled_out(cluster, release)  # an earlier test may have moved it
    return release


@pytest.fixture
def there(cluster: Cluster, operator: str, namespace: str) -> Iterator[Watched]:
    """A watched namespace in a cluster with the operator."""
    with watching(cluster, namespace) as watched:
        yield watched


def rolled_out(cluster: Cluster, release: str) -> None:
    """Wait until the desired number of operators is ready."""
    ready = ("rollout", "status", "deploy/dlrover-operator", "--timeout=230s")
    cluster.kubectl(*ready, "-n", release, within_s=240)


def installed(cluster: Cluster, operator_image: str, master_image: str) -> str:
    """Install or upgrade the chart if needed; return the namespace of the release."""
    values = ["dashboard.enabled=true"]
    for key, image in (("image", operator_image), ("master.image", master_image)):
        name, _, tag = image.rpartition(":")
        values += [f"{key}.repository={name}", f"{key}.tag={tag}"]
    found = cluster.helm("list", "-A", "-f", "^dlrover$", "-ojson")
    release = next(iter(json.loads(found)), None)
    if (
        release is not None
        and release["status"] == "deployed"
        and operator_image in cluster.helm("get", "manifest", "dlrover", "-n", release["namespace"])
    ):
        return str(release["namespace"])
    cluster.helm(
        *("upgrade", "--install", "dlrover", str(CHART), "-n", SYSTEM, "--create-namespace"),
        *("--take-ownership", "--set", ",".join(values), "--wait", "--timeout=240s"),
    )
    return SYSTEM
