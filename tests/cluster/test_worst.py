"""The cluster at its worst: what is cut off, gone, or asked for twice, while jobs run."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import ELASTICJOBS
from dlrover_py.protocol import names
from dlrover_py.protocol.status import NodeRole, NodeStatus, Training
from tests.cluster.conftest import installed, rolled_out
from tests.cluster.harness import Cluster, LabError, Obj, inside, send, until
from tests.cluster.jobs import (
    OPERATOR,
    UNTIL_STOPPED,
    WORKER,
    Job,
    Watched,
    document,
    no_operator,
    spread,
    submit,
    watching,
)
from tests.cluster.lab.daemons import environment
from tests.cluster.many import MASTER, WRITES, at

pytestmark = pytest.mark.timeout(900)
AWAY_S = int(os.environ.get("DLROVER_TEST_AWAY_S", "20"))
"""For so long nobody answers: hosts are NotReady by then."""
PAUSE_S = 0.05


@pytest.fixture(scope="module")
def shared(
    cluster: Cluster, operator_image: str, master_image: str, agent_image: str
) -> Iterator[Job]:
    """A job of two nodes that all tests of this module may hurt; what they find of it runs.

    It is born while there are two operators, and while both are killed.
    """
    release = installed(cluster, operator_image, master_image)
    namespace = f"worst-{secrets.token_hex(3)}"
    cluster.make_namespace(namespace)
    with two_operators(cluster, release), watching(cluster, namespace) as there:
        run = job(there, agent_image, 2, minReplicas=1)
        kill_operators(cluster, release)
        run.runs(2)
        yield run
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@contextmanager
def two_operators(cluster: Cluster, release: str) -> Iterator[None]:
    scale = ("scale", "deploy/dlrover-operator", "-n", release)
    cluster.kubectl(*scale, "--replicas=2")
    try:
        rolled_out(cluster, release)
        yield
    finally:
        cluster.kubectl(*scale, "--replicas=1")


def kill_operators(cluster: Cluster, release: str) -> None:
    """All of them, without a word; their Pods too, as those wait longer after each end."""
    for pod in cluster.list("pods", release, OPERATOR):
        name = pod["metadata"]["name"]
        with contextlib.suppress(LabError):  # it has not started yet
            cluster.kill(name, release)
        with contextlib.suppress(LabError):  # it is gone
            cluster.delete_pod(name, release, force=True)


def job(there: Watched, image: str, replicas: int, name: str = "job", **more: Any) -> Job:
    command = ["elastic-run", "--no-python", "python3", "-c", UNTIL_STOPPED, str(PAUSE_S)]
    return submit(there.cluster, there, document(name, image, command, replicas=replicas, **more))


def steady(run: Job) -> Training:
    """As it stands when all its workers are known."""
    return run.until(lambda: all(n.pids for n in members(run.training)) and run.training, "pids")


def members(seen: Training) -> list[NodeStatus]:
    found = [n for n in seen.nodes if n.role is NodeRole.MEMBER]
    return sorted(found, key=lambda n: n.node_rank or 0)


def hosts(run: Job, seen: Training) -> list[str]:
    return [str(run.pods[n.id]["spec"]["nodeName"]) for n in members(seen)]


def master_of(run: Job) -> Obj:
    (pod,) = run.cluster.list("pods", run.namespace, MASTER)
    return pod


def master_host(run: Job) -> str:
    return str(master_of(run)["spec"]["nodeName"])


def said(run: Job, node: str, word: str) -> None:
    until(
        lambda: word in run.cluster.logs(f"job-{node}", run.namespace),
        f"{node}: {word}",
    )


def at_work(run: Job) -> set[str]:
    """Nodes whose Pods run, and shall go on."""
    return {
        name
        for name, pod in run.pods.items()
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    }


def pids(run: Job, node: str, pattern: str) -> set[int]:
    found = run.cluster.processes(f"{run.name}-{node}", run.namespace)
    return {pid for pid, command in found.items() if re.search(pattern, command)}


def trainers(run: Job) -> dict[str, set[int]]:
    """The workers of all nodes of the round, by node, once each has begun to take steps."""

    def look() -> dict[str, set[int]]:
        found = {n.id: run.workers(n.id) for n in members(run.training)}
        return found if all(map(step, found.values())) else {}

    return run.until(look, "all take steps")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def a_hundred_on(workers: set[int], since: int) -> bool:
    return step(workers) > since + 100


def step(workers: set[int]) -> int:
    """How far the worker among these is in its round, by what it writes in its container; 0 if it
    has not."""
    for pid in workers:
        of = [e.partition("=")[2] for e in environment(pid) if e.startswith(f"{names.ENV_ROUND}=")]
        with contextlib.suppress(OSError):
            return int(inside(pid, f"/tmp/step-{''.join(of)}").read_text())
    return 0


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
    said(run, victim.id, "peer_probe_answered")
    workers, agents = pids(run, victim.id, WORKER), pids(run, victim.id, r"elastic-run")
    logs = {victim.id: cluster.logs(f"job-{victim.id}", run.namespace)}
    assert workers
    with cluster.cut_off_from_api(host):  # so its kubelet, once back, does not end the agent first
        with cluster.cut_off(host):
            assert f"2 nodes, 2 workers (left: {victim.id})" in run.formed(before.round + 1)
            until(lambda: not any(map(alive, workers)), "its workers are stopped")
            assert any(map(alive, agents)), "by its agent, which goes on asking"
            until(lambda: not cluster.node_ready(host), "nobody told it to")
        until(lambda: not any(map(alive, agents)), "it was refused")
        until(lambda: "NodeRefused" in {e.reason for e in run.training.events}, "it is told so")
    full = run.runs(3, after=before.round + 1)
    assert victim.id not in {n.id for n in members(full)}
    logs |= {n: cluster.logs(f"job-{n}", run.namespace) for n in run.pods}
    found = starts(list(logs.values()))
    assert max(Counter((r, rank) for r, rank, _ in found).values()) == 1, found
    assert len({(r, world) for r, _, world in found}) == len({r for r, _, _ in found}), found


def test_what_a_cut_off_master_believes_is_never_written(there: Watched, agent_image: str) -> None:
    """Its host has rank 0 too, whose agent still hears of it."""
    cluster = there.cluster
    host, *others = cluster.nodes
    for other in others:
        cluster.cordon(other)
    run = job(there, agent_image, 1, pod=spread())
    run.runs(1)
    cluster.heal()
    cluster.cordon(host)  # what is lost with it is the master and one node
    run.patch({"replicaSpecs": {"worker": {"replicas": 3, "minReplicas": 2}}})
    before = run.runs(3)
    cluster.heal()  # else the fixture does
    assert hosts(run, before)[0] == master_host(run) == host
    first, second, third = members(before)
    for node in (second, third):
        said(run, node.id, "peer_probe_answered")
    old = master_of(run)["metadata"]["name"]
    with cluster.cut_off(host):
        # What was on its way when it was cut off may still be written.
        until(lambda: not cluster.node_ready(host), "it is not heard of")
        cut = time.time()
        after = run.runs(3, after=before.round, within_s=300)
        assert after.term > before.term
        assert first.id not in {n.id for n in members(after)}
    until(lambda: cluster.get("pod", old, run.namespace) is None, "the old master is gone")
    there.until(lambda: first.id not in run.pods, "so is its node's Pod")
    assert steady(run).round == after.round, "what has come back disturbs nobody"
    assert run.holder == master_of(run)["metadata"]["name"]
    run.kill_worker(second.id)
    assert run.runs(3, after=after.round).term == after.term
    wrote = writers(run, cut)
    assert run.holder in wrote
    assert old not in wrote


@pytest.mark.parametrize("how", ["it has lost the API server", "its kubelet hangs"])
def test_workers_find_the_new_master_though_the_old_one_still_answers_them(
    there: Watched, agent_image: str, how: str
) -> None:
    """Something is wrong with its host, and nothing else: the connections to it stand."""
    cluster = there.cluster
    host, *others = cluster.nodes
    for other in others:
        cluster.cordon(other)
    elsewhere = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [host]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    run = job(there, agent_image, 2, pod={"affinity": {"nodeAffinity": required}})
    until(
        lambda: [
            pod
            for pod in cluster.list("pods", run.namespace, MASTER)
            if pod["status"].get("phase") == "Running"
        ],
        "the master runs",
    )
    cluster.heal()
    before = run.runs(2)
    assert master_host(run) == host
    workers = trainers(run)
    with cluster.hung(host) if "kubelet" in how else cluster.cut_off_from_api(host):
        after = run.until(
            lambda: run.training.term > before.term and steady(run),
            "a new master that hears of all",
            within_s=300,
        )
        assert after.round == before.round
    assert {n: pids(run, n, WORKER) for n in workers} == workers
    assert "NodeLost" not in {e.reason for e in run.training.events}


def writers(run: Job, since: float) -> set[str]:
    """Pods whose masters have written anything since then."""
    key = "authentication.kubernetes.io/pod-name"
    return {
        event["user"]["extra"][key][0]
        for event in run.cluster.asked(names.master_of(run.name), run.namespace)
        if event["verb"] in WRITES
        and event["responseStatus"]["code"] < 300
        and at(event["requestReceivedTimestamp"]) > since
    }


# --- one job, hurt again and again ---


def test_operators_that_are_killed_double_nothing(shared: Job, operator: str) -> None:
    """The job was born under them; now it grows, and they die again."""
    run, cluster = shared, shared.cluster
    before = run.runs(2)
    run.kubectl("scale", "ej/job", "--replicas=4")
    kill_operators(cluster, operator)
    run.runs(4, after=before.round)
    run.until(lambda: len(at_work(run)) == 4, "four Pods, and their kubelets have said so")
    label = "elasticjob.dlrover/name=job"
    made = Counter(
        o["kind"]
        for kind in ("deployments", "services", "roles", "rolebindings", "serviceaccounts")
        for o in cluster.list(kind, run.namespace, label)
    )
    assert set(made.values()) == {1}, made
    assert len(made) == 5
    assert len(cluster.list("pods", run.namespace, MASTER)) == 1
    run.patch({"suspend": True})
    kill_operators(cluster, operator)
    run.until(lambda: run.holds("Suspended"), "suspended by who came back", within_s=240)
    last = run.training.round
    run.patch({"suspend": False, "replicaSpecs": {"worker": {"replicas": 2}}})
    run.runs(2, after=last)


def test_two_masters_in_a_row_are_deleted_by_force(shared: Job) -> None:
    run, cluster = shared, shared.cluster
    run.runs(2)
    before = steady(run)
    deleted = set()
    for _ in range(2):
        name = until(
            lambda: next(
                (
                    p["metadata"]["name"]
                    for p in cluster.list("pods", run.namespace, MASTER)
                    if p["metadata"]["name"] not in deleted
                    and p["status"].get("phase") == "Running"
                ),
                None,
            ),
            "a master",
        )
        cluster.delete_pod(name, run.namespace, force=True)
        deleted.add(name)
    run.until(lambda: run.training.term > before.term and run.training.ready == 2, "a new term")
    until(
        lambda: run.holder not in {"", *deleted},
        "the third: by its kubelet the second may live on",
    )
    after = steady(run)
    assert after.round == before.round
    assert [n.pids for n in members(after)] == [n.pids for n in members(before)]
    run.kill_worker(members(after)[1].id)
    run.runs(2, after=after.round)


def test_what_is_deleted_while_the_master_does_not_look_is_noticed(shared: Job) -> None:
    """It stands still, and its watch ends with the API server."""
    run, cluster = shared, shared.cluster
    run.runs(2)
    before, there = steady(run), set(run.pods)
    with no_room(cluster):
        run.kubectl("scale", "ej/job", "--replicas=3")
        (lost,) = run.until(lambda: set(run.pods) - there, "a Pod that has no place")
        name = f"job-{lost}"
        run.until(lambda: lost in {n.id for n in run.training.nodes if n.host == ""}, "it is known")
        pids = cluster.kill(
            master_of(run)["metadata"]["name"], run.namespace, number=signal.SIGSTOP
        )
        try:
            cluster.delete_pod(name, run.namespace, force=True)
            with cluster.api_server_killed():
                pass
        finally:
            send(signal.SIGCONT, pids)
        new = run.until(lambda: set(run.pods) - there - {lost}, "another Pod in its place")
        assert len(new) == 1
        assert steady(run).round == before.round, "nobody who trains was disturbed"
    after = run.runs(3, after=before.round)
    assert {n.id for n in members(after)} == {n.id for n in members(before)} | new


@contextmanager
def no_room(cluster: Cluster) -> Iterator[None]:
    """No host takes another Pod."""
    for node in cluster.nodes:
        cluster.cordon(node)
    try:
        yield
    finally:
        cluster.heal()


@pytest.mark.parametrize("who", ["API server", "etcd"])
def test_workers_train_while_nothing_can_be_written(shared: Job, who: str) -> None:
    """One fails meanwhile: the others go on, since no round is told before it is written."""
    run, cluster = shared, shared.cluster
    before = run.runs(run.obj["spec"]["replicaSpecs"]["worker"]["replicas"])
    workers = trainers(run)
    victim, master = min(workers), run.holder
    with cluster.etcd_stopped() if who == "etcd" else cluster.api_server_stopped():
        for mine in workers.values():
            now = step(mine)
            until(partial(a_hundred_on, mine, now), "a hundred steps")
        send(signal.SIGKILL, workers.pop(victim))
        for mine in workers.values():
            now = step(mine)
            until(partial(a_hundred_on, mine, now), "a hundred more")
    after = run.runs(len(members(before)), after=before.round)
    # Who is back has heard of no host for a while: Kubernetes may move the master.
    assert after.term == before.term or run.holder != master
    assert after.last_failure is not None
    assert after.last_failure.node == victim


@pytest.mark.timeout(900 + AWAY_S)
def test_a_job_outlives_a_long_absence_of_all_who_look_after_it(shared: Job, operator: str) -> None:
    """The API server, whose history is gone when it is back, and the operator."""
    run, cluster = shared, shared.cluster
    before = run.runs(run.obj["spec"]["replicaSpecs"]["worker"]["replicas"])
    workers, master = trainers(run), run.holder
    with no_operator(cluster, operator):
        with cluster.api_server_killed():
            began, first = time.monotonic(), {n: step(mine) for n, mine in workers.items()}
            time.sleep(AWAY_S)

            def keeps_pace(node: str) -> bool:
                done = step(workers[node]) - first[node]
                return done * PAUSE_S > (time.monotonic() - began) / 4

            for node in workers:  # where this machine has stood still they catch up
                until(partial(keeps_pace, node), f"{node} trains at its pace")
            cluster.compact()
        assert {n: pids(run, n, WORKER) for n in workers} == workers
        run.kill_worker(min(workers))
        after = run.runs(len(workers), after=before.round)
        # Not counted in rounds: a host that is still NotReady may be given up in a second one.
        said = [e for e in after.events if (e.round or 0) >= before.round]
        assert after.term == before.term or run.holder != master, said
        assert after.last_failure is not None, said
        assert after.last_failure.node == min(workers), said
    run.patch({"suspend": True})
    run.until(lambda: run.holds("Suspended"), "suspended by who is back", within_s=240)
    run.patch({"suspend": False})
    run.runs(len(workers), after=after.round)


# --- wished ---


def test_wishes_that_come_at_once_are_one_resize(shared: Job) -> None:
    """An autoscaler's way (``/scale``) and a user's; then a wish that flaps."""
    run = shared
    run.runs(run.obj["spec"]["replicaSpecs"]["worker"]["replicas"])
    before = run.training.round

    def user(worker: Obj) -> Edit:
        return "", {"spec": {"replicaSpecs": {"worker": worker}}}

    def autoscaler(replicas: int) -> Edit:
        return "scale", {"spec": {"replicas": replicas}}

    asyncio.run(edit(run, [autoscaler(4), user({"restartCount": 7})], at_once=True))
    four = run.runs(4, after=before)
    # A host that is late with its Pod is not waited for: that is a round of three first.
    assert four.round == before + 1 or apart(run) or "3 nodes" in run.formed(before + 1)
    worker = run.obj["spec"]["replicaSpecs"]["worker"]
    assert (worker["replicas"], worker["restartCount"]) == (4, 7)

    asyncio.run(edit(run, [autoscaler(3), user({"replicas": 2})], at_once=True))
    run.until(lambda: obeyed(run), "it is seen")
    newest = run.cluster.get("elasticjob", run.name, run.namespace) or {}
    size = int(newest["spec"]["replicaSpecs"]["worker"]["replicas"])
    less = run.runs(size, after=four.round)
    assert less.round == four.round + 1 or apart(run)
    run.patch({"replicaSpecs": {"worker": {"replicas": 4}}})
    run.runs(4, after=less.round)
    there = {n.id for n in members(run.training)}
    run.until(lambda: at_work(run) == there, "nobody else is left")

    before = steady(run).round
    workers = trainers(run)[members(run.training)[0].id]
    for way in (autoscaler, lambda n: user({"replicas": n})):
        asyncio.run(edit(run, [way(2), way(4)]))
        run.until(lambda: obeyed(run), "both are seen")
        if apart(run):  # and so it was obeyed
            pytest.skip("this machine is too busy for two wishes in one second")
    now = step(workers)
    until(lambda: step(workers) > now + 60, "three seconds' steps")
    assert run.training.round == before
    assert at_work(run) == there
    run.patch({"replicaSpecs": {"worker": {"replicas": 2}}})
    run.runs(2, after=before)


Edit = tuple[str, Obj]
"""Which subresource, and a merge patch."""


async def edit(run: Job, edits: list[Edit], *, at_once: bool = False) -> None:
    """Make these changes one right after the other, or all at once."""
    async with await KubeClient.connect(kubeconfig=run.cluster.kubeconfig) as kube:
        made = [
            kube.patch(ELASTICJOBS, run.name, patch, run.namespace, subresource=subresource)
            for subresource, patch in edits
        ]
        if at_once:
            await asyncio.gather(*made)
        else:
            for one in made:
                await one


def obeyed(run: Job) -> bool:
    """Whether the master has seen the newest spec."""
    newest = run.cluster.get("elasticjob", run.name, run.namespace) or {}
    return bool(run.training.generation == newest["metadata"]["generation"])


def apart(run: Job) -> bool:
    """Whether the master heard of the last two wishes too far apart to take them for one."""
    heard = [e.at for e in run.training.events if e.reason == "SpecChanged"]
    return len(heard) > 1 and heard[-1] - heard[-2] > 0.9


# --- deleted ---


def test_jobs_are_deleted_while_there_is_no_operator(
    there: Watched, agent_image: str, operator: str
) -> None:
    cluster, jobs = there.cluster, {}
    for how in ("foreground", "background", "orphan"):
        jobs[how] = job(there, agent_image, 1, name=how)
    for run in jobs.values():
        run.runs(1)
    with no_operator(cluster, operator):
        kept = set(jobs["orphan"].pods)
        for how, run in jobs.items():
            run.kubectl("delete", "ej", how, f"--cascade={how}", "--wait=false")
        there.until(lambda: not there.all("ElasticJob"), "no finalizer holds one")
        there.until(
            lambda: not jobs["foreground"].pods and not jobs["background"].pods,
            "their Pods go",
            within_s=240,
        )
    rolled_out(cluster, operator)
    orphan = jobs["orphan"]
    assert set(orphan.pods) == kept
    for node in kept:
        cluster.kill(f"orphan-{node}", orphan.namespace, WORKER)
        until(partial(pids, orphan, node, WORKER), "its agent has started another worker")
    label = "elasticjob.dlrover/name"
    kinds = "pods,secrets,deployments,services,roles,rolebindings,serviceaccounts,networkpolicies"
    until(
        lambda: (
            not orphan.kubectl(
                "get", kinds, "-l", f"{label} in (foreground,background)", "-oname"
            ).strip()
        ),
        "nothing of the others is left",
    )
    # As docs/operations.md has it.
    of_job = ("-l", f"{label}=orphan")
    assert orphan.kubectl("get", kinds, *of_job, "-oname").count("\n") >= 8
    orphan.kubectl("delete", kinds, *of_job)
    until(lambda: not orphan.kubectl("get", kinds, *of_job, "-oname").strip(), "the orphan is gone")
    last = job(there, agent_image, 1, name="last")
    last.runs(1)
    with no_operator(cluster, operator):
        cluster.kubectl("delete", "namespace", there.namespace, "--wait=false")
        until(lambda: cluster.get("namespace", there.namespace) is None, "all of it is gone",
              within_s=240)  # fmt: skip
