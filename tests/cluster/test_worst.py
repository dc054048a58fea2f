"""The cluster at its worst: what is cut off, gone, or asked for twice, while jobs run."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from dlrover_py.protocol.status import NodeRole, NodeStatus, Training
from tests.cluster.harness import Cluster, until
from tests.cluster.jobs import Job, Watched, document, spread, submit, watching

pytestmark = pytest.mark.timeout(400)
MASTER = "elasticjob.dlrover/replica-type=dlrover-master"
WORKER = r"^\S*python3 -c"
STORY = """
import time
from dlrover_py.trainer import session
world, step = session.world(), 0
print("starts", session.round(), world.rank, world.size, flush=True)
while not session.should_stop():
    step += 1
    session.report_step(step)
    time.sleep(0.05)
"""


@pytest.fixture
def there(cluster: Cluster, operator: str, namespace: str) -> Iterator[Watched]:
    """A namespace that is watched, of a cluster with the operator in it."""
    with watching(cluster, namespace) as watched:
        yield watched


def job(there: Watched, image: str, replicas: int, **more: object) -> Job:
    command = ["elastic-run", "--no-python", "python3", "-c", STORY]
    return submit(there.cluster, there, document("job", image, command, replicas=replicas, **more))


def members(seen: Training) -> list[NodeStatus]:
    found = [n for n in seen.nodes if n.role is NodeRole.MEMBER]
    return sorted(found, key=lambda n: n.node_rank or 0)


def hosts(run: Job, seen: Training) -> list[str]:
    return [str(run.pods[n.id]["spec"]["nodeName"]) for n in members(seen)]


def master_host(run: Job) -> str:
    (pod,) = run.cluster.list("pods", run.namespace, MASTER)
    return str(pod["spec"]["nodeName"])


def said(run: Job, node: str, word: str) -> None:
    until(
        lambda: word in run.cluster.logs(f"job-{node}", run.namespace),
        f"{node}: {word}",
        within_s=60,
    )


def pids(run: Job, node: str, pattern: str) -> set[int]:
    found = run.cluster.processes(f"job-{node}", run.namespace)
    return {pid for pid, command in found.items() if re.search(pattern, command)}


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def starts(logs: list[str]) -> list[tuple[int, int, int]]:
    """Round, rank and world size of each worker that was started, by all logs of a job."""
    return [
        (int(r), int(k), int(w))
        for log in logs
        for r, k, w in re.findall(r"starts (\d+) (\d+) (\d+)", log)
    ]


def test_a_node_that_is_cut_off_stops_its_workers_before_it_is_back(
    there: Watched, agent_image: str
) -> None:
    cluster = there.cluster
    run = job(there, agent_image, 3, minReplicas=2, pod=spread())
    before = run.runs(3)
    where = hosts(run, before)
    assert len(set(where)) == 3, "this test needs a host for each"
    victim = next(
        n
        for n, host in zip(members(before)[1:], where[1:], strict=True)
        if host != master_host(run)
    )
    host = where[victim.node_rank or 0]
    said(run, victim.id, "contact_made")
    workers, agents = pids(run, victim.id, WORKER), pids(run, victim.id, r"elastic-run")
    logs = [cluster.logs(f"job-{victim.id}", run.namespace)]
    assert workers
    with cluster.cut_off(host):
        after = run.runs(2, after=before.round, within_s=60)
        assert victim.id not in {n.id for n in members(after)}
        until(lambda: not any(map(alive, workers)), "its workers are stopped", within_s=60)
        assert any(map(alive, agents)), "by its agent, which goes on asking"
        assert not cluster.node_ready(host), "nobody could have told it to"
    until(lambda: not any(map(alive, agents)), "it was refused, or its Pod deleted", within_s=60)
    full = run.runs(3, after=after.round)
    assert victim.id not in {n.id for n in members(full)}
    logs += [cluster.logs(f"job-{n}", run.namespace) for n in run.pods]
    found = starts(logs)
    assert max(Counter((r, rank) for r, rank, _ in found).values()) == 1, found
    assert len({(r, world) for r, _, world in found}) == len({r for r, _, _ in found}), found
    assert "NodeRefused" in {e.reason for e in run.training.events}
