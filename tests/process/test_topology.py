"""Nodes say where they are: ranks follow it, and a smaller round gives up whole racks."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from dlrover_operator.host_labels import AFTER_S, AT_ONCE
from dlrover_operator.loop import Features
from dlrover_py.kubernetes.kinds import ELASTICJOBS, NODES, PODS, Obj
from dlrover_py.master.core.events import NodeSeen
from dlrover_py.master.platform.kubernetes.pods import fact, view
from dlrover_py.protocol import names
from dlrover_py.protocol.names import NodeId
from tests.process import test_operator
from tests.process.harness import Place, eventually, job, members
from tests.process.test_dropin import Group, listens
from tests.process.test_operator import OPTIONS, Bed, OpenOperator, until
from tests.programs import PROGRAMS

bed = test_operator.bed
ZONE = "topology.kubernetes.io/zone"
RACK = "example.com/rack"


@pytest.fixture
def group(place: Place) -> Iterator[Group]:
    group = Group(place)
    yield group
    group.close()


def test_bare_machines_say_their_racks(group: Group) -> None:
    """Four nodes in two racks, in units of two: what is left of the broken rack waits."""
    script = str(group.place.script(PROGRAMS / "say_place.py"))
    common = ["--nnodes=2:4", "--node-unit=2", "--rdzv-backend=c10d", "--rdzv-id=x"]
    common += [f"--rdzv-endpoint=localhost:{group.port}", "--max-restarts=1", script]
    racks = ("rack-9", "rack-1", "rack-9", "rack-1")  # the first one has the master
    nodes = [group.start(*common, DLROVER_TOPOLOGY=f"zone-a/{racks[0]}")]
    eventually(lambda: listens(group.port), "the master")
    nodes += [group.start(*common, DLROVER_TOPOLOGY=f"zone-a/{rack}") for rack in racks[1:]]
    ranks = [int(group.said(node, r"place (\d) of 4")[1]) for node in nodes]
    assert {ranks[0], ranks[2]} == {2, 3}
    assert {ranks[1], ranks[3]} == {0, 1}
    group.runs[nodes[ranks.index(0)]].kill()
    assert {int(group.said(nodes[i], r"place (\d) of 2")[1]) for i in (0, 2)} == {0, 1}
    (group.place.folder / "go").touch()
    assert [group.wait(nodes[i]) for i in (0, 2)] == [0, 0], group.lines


def test_a_job_that_is_scaled_down_gives_up_a_rack(place: Place) -> None:
    shell = 'case "$DLROVER_NODE_ID" in n0|n3) export DLROVER_TOPOLOGY=zone-a/left;; '
    shell += "*) export DLROVER_TOPOLOGY=zone-a/right;; esac"
    with job(place, replicas=5, minReplicas=2, hosts=5, shell=shell) as run:
        before = run.running(5)
        assert [n.id for n in members(before)] == ["n0", "n3", "n1", "n2", "n4"]
        table = run.cli("job", "describe")
        assert "DOMAIN" in table
        assert "zone-a/right" in table
        run.cli("job", "scale", "3")
        small = run.running(3, round_after=before.round)
        assert [n.id for n in members(small)] == ["n1", "n2", "n4"]
        assert {n.domain for n in members(small)} == {"zone-a/right"}
        run.cli("job", "scale", "2")
        least = run.running(2, round_after=small.round)
        assert [n.id for n in members(least)] == ["n1", "n2"]


def test_a_wrong_topology_is_refused(place: Place) -> None:
    script = str(place.script("print()"))
    done = place.call("elastic-run", script, env={"DLROVER_TOPOLOGY": "zone a"})
    assert done.returncode == 1
    assert "DLROVER_TOPOLOGY is 'zone a': expected up to 8 names" in done.stderr


# --- On Kubernetes ---


def pod(name: str, uid: str, host: str, **labels: str) -> Obj:
    kind = {names.LABEL_JOB: "x", names.LABEL_ROLE: names.ROLE_WORKER, RACK: "of the template"}
    owners = [{"kind": names.KIND, "name": "x", "uid": uid, "controller": True}]
    return {
        "metadata": {"name": name, "labels": kind | labels, "ownerReferences": owners},
        "spec": {"containers": [{"name": "main", "image": "i"}], "nodeName": host},
        "status": {"phase": "Running"},
    }


async def test_labels_of_hosts_reach_the_master_by_its_pods(bed: Bed) -> None:
    cluster, kube = bed
    made = cluster.put(ELASTICJOBS, test_operator.job())
    uid = made["metadata"]["uid"]

    def topology(name: str) -> tuple[str, ...]:
        """What the master learns of a Pod."""
        held = cluster.one(PODS, name)
        assert held is not None
        event = fact(NodeId("n0"), view(held, (ZONE, RACK)))
        assert isinstance(event, NodeSeen)
        return event.topology

    cluster.put(NODES, {"metadata": {"name": "h1", "labels": {RACK: "r1", "other/label": "o"}}})
    cluster.put(NODES, {"metadata": {"name": "h2"}})
    cluster.put(PODS, pod("x-n0", uid, "h1"))
    cluster.put(PODS, pod("x-n1", uid, "h2"))
    foreign = pod("foreign", uid, "h1")
    del foreign["metadata"]["ownerReferences"]
    cluster.put(PODS, foreign)
    cluster.put(PODS, pod("ended", uid, "h1") | {"status": {"phase": "Succeeded"}})
    features = Features(host_labels=(ZONE, RACK))
    operator = OpenOperator(kube, OPTIONS, features=features)
    running = asyncio.create_task(operator.run())
    try:
        await until(lambda: topology("x-n0") == ("", "r1", "h1"), "a label")
        assert topology("x-n1") == ("", "of the template", "h2"), "this host says nothing"
        cluster.put(PODS, pod("x-n2", uid, ""))
        cluster.put(PODS, pod("x-n2", uid, "h1"))  # it is scheduled
        await until(lambda: topology("x-n2") == ("", "r1", "h1"), "a later Pod")
        labels = {RACK: "r2", ZONE: "z"}
        cluster.put(NODES, {"metadata": {"name": "h1", "labels": labels}})
        await until(lambda: topology("x-n2") == ("z", "r2", "h1"), "a label that has changed")
        await until(lambda: topology("x-n0") == ("z", "r2", "h1"), "on each of its Pods")
        held = cluster.one(PODS, "x-n0") or {}
        assert "other/label" not in held["metadata"]["labels"]
        for name in ("foreign", "ended"):
            held = cluster.one(PODS, name) or {}
            assert held["metadata"]["labels"][RACK] == "of the template"
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("code", [403, 500])
async def test_refused_pods_keep_no_other_from_its_labels(bed: Bed, code: int) -> None:
    """Some of them are refused, as by the webhook of a namespace, and wait alone."""
    cluster, kube = bed
    uid = cluster.put(ELASTICJOBS, test_operator.job())["metadata"]["uid"]
    cluster.put(NODES, {"metadata": {"name": "h1", "labels": {RACK: "r1"}}})
    for n in range(100):
        cluster.put(PODS, pod(f"x-n{n}", uid, "h1"))
    cluster.put(PODS, pod("y-n0", uid, "h1"))
    fault = cluster.fail(code, times=10**6, method="PATCH", path="/pods/x-")

    def rack(name: str) -> object:
        return (cluster.one(PODS, name) or {})["metadata"]["labels"][RACK]

    def tries() -> int:
        return sum(c.method == "PATCH" and c.path.endswith("/pods/x-n99") for c in cluster.calls)

    operator = OpenOperator(kube, OPTIONS, features=Features(host_labels=(RACK,)))
    running = asyncio.create_task(operator.run())
    try:
        await until(lambda: rack("y-n0") == "r1", "its labels")
        await until(lambda: tries() == 4, "delays of some seconds")
        cluster.put(PODS, pod("y-n1", uid, "h1"))
        await until(lambda: rack("y-n1") == "r1", "a later Pod")
        assert tries() == 4, "it waits for no other"
        fault.times = 0
        await until(lambda: {rack(f"x-n{n}") for n in range(100)} == {"r1"}, "all others")
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_server_that_refuses_each_write_is_left_in_peace(bed: Bed) -> None:
    cluster, kube = bed
    uid = cluster.put(ELASTICJOBS, test_operator.job())["metadata"]["uid"]
    cluster.put(NODES, {"metadata": {"name": "h1", "labels": {RACK: "r1"}}})
    for n in range(100):
        cluster.put(PODS, pod(f"x-n{n}", uid, "h1"))
    fault = cluster.fail(429, times=10**6, method="PATCH", path="/pods/")

    def writes() -> list[float]:
        return [c.at for c in cluster.calls if c.method == "PATCH" and "/pods/" in c.path]

    def labelled() -> int:
        return sum(p["metadata"]["labels"][RACK] == "r1" for p in cluster.all(PODS))

    operator = OpenOperator(kube, OPTIONS, features=Features(host_labels=(RACK,)))
    running = asyncio.create_task(operator.run())
    try:
        await until(lambda: len(writes()) >= AT_ONCE, "some writes")
        fault.times = 0
        await until(lambda: labelled() == 100, "all labels")
        pauses = [n for n, (a, b) in enumerate(pairwise(writes()), 1) if b - a > AFTER_S]
        assert pauses[0] == AT_ONCE
    finally:
        running.cancel()
        await asyncio.wait([running])
