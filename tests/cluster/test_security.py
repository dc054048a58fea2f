"""What a job's Pods get of the API server, of another job and of one in another namespace."""

import json
import secrets
from collections.abc import Iterator

import pytest

from dlrover_py.protocol.names import (
    master_of,
)
from tests.cluster.harness import Cluster
from tests.cluster.jobs import Job, Watched, document, steps, submit, watching
from tests.cluster.many import MASTER
from tests.cluster.test_chart import may
from tests.programs import PROGRAMS, source

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def elsewhere(cluster: Cluster, operator: str) -> Iterator[Watched]:
    """Another namespace."""
    name = f"elsewhere-{secrets.token_hex(3)}"
    cluster.make_namespace(name)
    with watching(cluster, name) as watched:
        yield watched
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def asks(run: Job, other: Job) -> dict[str, object]:
    """What a worker's Pod of one job is told by the master of another."""
    (address,) = (
        pod["status"]["podIP"]
        for pod in run.cluster.list("pods", other.namespace, MASTER)
        if pod["metadata"]["name"].startswith(master_of(other.name))
    )
    inside = ("exec", f"{run.name}-n0", "-n", run.namespace, "-c", "main", "--")
    found = run.cluster.kubectl(
        *inside, "python3", "-c", source(PROGRAMS / "try_other_doors.py"), address
    )
    said = json.loads(found)
    assert isinstance(said, dict)
    return said


def test_a_pod_gets_nothing_of_another_job_nor_of_the_api_server(
    there: Watched, elsewhere: Watched, agent_image: str
) -> None:
    cluster = there.cluster
    one, two, far = (
        submit(cluster, where, document(name, agent_image, steps(), replicas=1))
        for where, name in ((there, "one"), (there, "two"), (elsewhere, "one"))
    )
    for run in (one, two, far):
        run.runs(1)
    for stranger in (two, far):
        said = asks(stranger, one)
        assert (said["own"], said["without a token"]) == (200, 401)
        # A network that enforces the master's NetworkPolicy lets them say nothing at all.
        assert said["other, believing"] in ("SSLCertVerificationError", "TimeoutError")
        assert said["other"] in (401, "TimeoutError")
        assert (said["health"], said["more of health"]) == (200, 404)
        assert said["account"] is False
    worker = f"system:serviceaccount:{there.namespace}:default"
    for what in ("pods", "secrets", "elasticjobs", "configmaps", "events"):
        for verb in ("get", "list", "create", "delete"):
            assert not may(cluster, worker, verb, what, there.namespace), (verb, what)
    assert may(cluster, one.account, "create", "pods", there.namespace)
    assert not may(cluster, one.account, "list", "secrets", there.namespace)
    for verb, what in (("create", "pods"), ("get", "secrets"), ("patch", "elasticjobs")):
        assert not may(cluster, one.account, verb, what, elsewhere.namespace), (verb, what)
