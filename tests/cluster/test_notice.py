"""Nodes that are taken away: by a taint, for a Pod that matters more, by a kubelet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from dlrover_py.protocol.status import Training
from tests.cluster.harness import LabError, Obj, until
from tests.cluster.jobs import UNTIL_STOPPED, Job, Watched, document, spread, submit
from tests.cluster.many import MASTER
from tests.cluster.test_worst import hosts, members

pytestmark = pytest.mark.timeout(900)
SPOT, IMPORTANT = "dlrover.test/spot", "dlrover-test-important"


def test_who_is_taken_away_with_notice_leaves_in_time_and_is_nobodys_failure(
    there: Watched, agent_image: str
) -> None:
    """A host of the cloud's spot market, a Pod of a higher priority, a disk that is full."""
    cluster = there.cluster
    own = {"name": "own", "emptyDir": {"sizeLimit": "1Mi"}}
    pod = spread() | {"volumes": [own], "terminationGracePeriodSeconds": 20}
    command = ["elastic-run", "--no-python", "python3", "-c", UNTIL_STOPPED, "0.05"]
    doc = document("job", agent_image, command, replicas=3, minReplicas=1, restartCount=0, pod=pod)
    main = doc["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
    main |= {
        "volumeMounts": [{"name": "own", "mountPath": "/own"}],
        "resources": {"requests": {"cpu": "500m"}},
    }
    run = submit(cluster, there, doc)
    seen = run.runs(3)
    for take in (preempt, spot):
        with given_back(run):
            seen = loses(run, seen, take, hears=True)
    # no assert: loses() looks at each loss
    loses(run, seen, fill, hears=False)


def loses(
    run: Job, seen: Training, take: Callable[[Job, str, str], None], *, hears: bool
) -> Training:
    """Take a node away from a round of three: the others go on, and it is replaced, for free."""
    (master,) = run.cluster.list("pods", run.namespace, MASTER)
    near = master["spec"]["nodeName"]
    hosts_of = hosts(run, seen)
    victim, where = next(
        (n.id, host)
        for n, host in zip(members(seen), hosts_of, strict=True)
        if host != near or take is fill  # which leaves the master alone
    )

    def heard(name: str) -> bool:
        return f"hears in round {seen.round}\n" in run.cluster.logs(f"job-{name}", run.namespace)

    for name in (n.id for n, host in zip(members(seen), hosts_of, strict=True) if host == where):
        until(partial(heard, name), f"{name} hears")
    with run.cluster.following(f"job-{victim}", run.namespace) as log:
        take(run, victim, where)
        said = log()
    # Of two on one host the first to go ends the round, and with it the other's workers.
    assert "asked to stop" in said or not hears or hosts_of.count(where) > 1, said
    after = run.until(lambda: whole(run, seen.round, victim), "three without it", within_s=240)
    formed, gone = run.formed(seen.round + 1), hosts_of.count(where) if take is spot else 1
    # The second of two may be heard of only after the first one's round.
    assert any(f"{n} node" in formed for n in (2, 3 - gone)), f"the others waited: {formed}"
    assert {(n.relaunches, n.restarts) for n in after.nodes} == {(0, 0)}
    assert after.restarts.keys() <= {"drain", "join"}
    return after


def whole(run: Job, after: int, without: str) -> Training | None:
    """A round of three later than that one, without that node."""
    seen = run.training
    there = {n.id for n in members(seen)}
    good = seen.round > after and seen.nodes_in_round == len(there) == 3 and without not in there
    return seen if good and seen.phase.value == "Running" else None


@contextmanager
def given_back(run: Job) -> Iterator[None]:
    """A host that is taken in this block can be had again after it."""
    cluster = run.cluster
    try:
        yield
    finally:
        cluster.heal()
        run.kubectl("delete", "pod", "greedy", "--ignore-not-found")
        cluster.kubectl("delete", "priorityclass", IMPORTANT, "--ignore-not-found")
        for node in cluster.nodes:
            with suppress(LabError):  # it has none
                cluster.kubectl("taint", "node", node, f"{SPOT}-")


def drain(run: Job, node: str, host: str) -> None:
    """It is about to be upgraded."""
    run.cluster.drain(host, within_s=240)


def spot(run: Job, node: str, host: str) -> None:
    """The cloud wants it back."""
    run.cluster.kubectl("taint", "node", host, f"{SPOT}=soon:NoExecute")


def fill(run: Job, node: str, host: str) -> None:
    """More than its volume may hold: its kubelet evicts it, and gives it no time."""
    words = ("dd", "if=/dev/zero", "of=/own/full", "bs=1M", "count=3")
    run.cluster.kubectl("exec", "-n", run.namespace, f"job-{node}", "--", *words)


def preempt(run: Job, node: str, host: str) -> None:
    """A Pod that matters more needs the room on that host."""
    important: Obj = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": IMPORTANT},
        "value": 1000,
    }
    (room,) = (n["status"]["allocatable"] for n in run.cluster.list("nodes")
               if n["metadata"]["name"] == host)  # fmt: skip
    cpu = f"{int(room['cpu']) * 1000 - 400}m"
    greedy: Obj = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "greedy"},
        "spec": {
            "priorityClassName": IMPORTANT,
            "nodeSelector": {"kubernetes.io/hostname": host},
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": run.cluster.image("agent"),
                            "command": ["sleep", "9999"],
                            "resources": {"requests": {"cpu": cpu}}}],
        },
    }  # fmt: skip
    run.cluster.apply(important)
    until(lambda: not run.cluster.refusal(greedy, run.namespace), "its priority is known")
    run.cluster.apply(greedy, namespace=run.namespace)
