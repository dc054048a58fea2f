"""The operator as a loop and as a process, against an API server in memory.

There is no controller and no kubelet there: the test plays them, and the master.
"""

import asyncio
import base64
import contextlib
import math
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dlrover_operator import manifests
from dlrover_operator.allotment import SharedHosts
from dlrover_operator.host_watch import Mode
from dlrover_operator.loop import WATCHES, Features, Operator
from dlrover_operator.manifests import Options
from dlrover_operator.timing import OperatorTiming
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import (
    DEPLOYMENTS,
    ELASTICJOBS,
    EVENTS,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Obj,
)
from dlrover_py.kubernetes.watch import ClientTimes
from dlrover_py.protocol import names
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import unix_seconds
from tests.builders import job_file
from tests.fakes_kube import FakeCluster, fake_cluster
from tests.process.harness import free_port

pytestmark = pytest.mark.process

MASTER = names.master_of("x")
OPTIONS = Options(image="master:1")
SOON = 120.0


async def until(look: Callable[[], Any], what: str) -> Any:
    async def seen() -> Any:
        while not (found := look()):
            await asyncio.sleep(0.01)
        return found

    try:
        return await asyncio.wait_for(seen(), SOON)
    except TimeoutError:
        pytest.fail(f"not within {SOON:g} s: {what}")


class OpenOperator(Operator):
    """An operator that can be made to look at the job, and shows whether it has work."""

    @property
    def rests(self) -> bool:
        return self._queue.is_idle

    def look_again(self) -> None:
        self._queue.add(("default", "x"))

    def forget_what_was_made(self) -> None:
        """Take what the job needs for made long ago."""
        self._credentials_checked_at.clear()


@asynccontextmanager
async def operator(
    kube: KubeClient,
    *namespaces: str,
    timing: OperatorTiming | None = None,
    shared: SharedHosts | None = None,
    kueue: bool = False,
    gangs: bool = False,
    bad_hosts: Mode = "off",
) -> AsyncIterator[OpenOperator]:
    made = OpenOperator(
        kube,
        OPTIONS,
        namespaces,
        timing=timing,
        shared=shared,
        features=Features(kueue, gangs, bad_hosts),
    )
    running = asyncio.create_task(made.run())
    try:
        await until(lambda: made.ready, "a ready operator")
        yield made
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def rest(one: OpenOperator) -> None:
    await until(lambda: one.rests, "rest")


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, KubeClient]]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        for name in ("a", "b", "c", "bad"):
            cluster.put(NAMESPACES, {"metadata": {"name": name}})
        yield cluster, kube


Bed = tuple[FakeCluster, KubeClient]


def job(name: str = "x", namespace: str = "default", **spec: Any) -> Obj:
    document = job_file(3)
    document["metadata"] = {"name": name, "namespace": namespace}
    document["spec"] |= spec
    return document


def condition(cluster: FakeCluster, kind: str, name: str = "x", space: str = "default") -> Obj:
    held = cluster.one(ELASTICJOBS, name, space) or {}
    found = (held.get("status") or {}).get("conditions") or []
    return next((c for c in found if c["type"] == kind), {})


def status(cluster: FakeCluster) -> Obj:
    held = cluster.one(ELASTICJOBS, "x") or {}
    found = held.get("status") or {}
    assert isinstance(found, dict)
    return found


def master_says(cluster: FakeCluster, phase: str) -> None:
    held = cluster.one(ELASTICJOBS, "x")
    assert held is not None
    generation = held["metadata"].get("generation", 1)
    its = held.setdefault("status", {})
    its["training"] = {"phase": phase, "generation": generation}
    runs = {"type": "Running", "status": str(phase == "Running")}
    its["conditions"] = [c for c in its.get("conditions", ()) if c["type"] != "Running"] + [runs]
    cluster.put(ELASTICJOBS, held)


def available(cluster: FakeCluster, count: int = 1) -> None:
    held = cluster.one(DEPLOYMENTS, MASTER)
    assert held is not None
    cluster.put(DEPLOYMENTS, held | {"status": {"availableReplicas": count}})


async def test_the_life_of_a_job(bed: Bed) -> None:
    cluster, kube = bed
    async with operator(kube):
        await kube.create(ELASTICJOBS, job(ttlSecondsAfterFinished=0))
        deployment = await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        for kind in (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, NETWORK_POLICIES, SERVICES):
            assert cluster.one(kind, MASTER), kind
        uid = (cluster.one(ELASTICJOBS, "x") or {})["metadata"]["uid"]
        for name in (names.token_of("x", uid), names.tls_of("x", uid), names.journal_of("x")):
            assert cluster.one(SECRETS, name), name
        service = cluster.one(SERVICES, MASTER)
        assert service is not None
        env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        address = f"{service['spec']['clusterIP']}:50001"
        assert {"name": "DLROVER_MASTER_SERVICE", "value": address} in env
        available(cluster)
        await until(
            lambda: condition(cluster, "MasterReady").get("status") == "True", "MasterReady"
        )
        master_says(cluster, "Running")
        await until(lambda: status(cluster).get("phase") == "Running", "phase Running")

        await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": True}}, "default")
        await until(lambda: condition(cluster, "Suspended").get("reason") == "Suspending", "word")
        master_says(cluster, "Suspended")

        def replicas() -> int:
            held = cluster.one(DEPLOYMENTS, MASTER)
            assert held is not None
            return int(held["spec"]["replicas"])

        await until(lambda: replicas() == 0, "no master")
        available(cluster, 0)
        await until(lambda: status(cluster).get("phase") == "Suspended", "phase Suspended")
        await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": False}}, "default")
        await until(lambda: replicas() == 1, "a master again")
        available(cluster)
        master_says(cluster, "Succeeded")
        await until(lambda: cluster.one(ELASTICJOBS, "x") is None, "the job is deleted")
    reasons = [e["reason"] for e in cluster.all(EVENTS)]
    assert reasons.count("Suspended") == reasons.count("Resumed") == 1


async def test_one_bad_job_does_not_hold_up_others_and_is_told_why(bed: Bed) -> None:
    cluster, kube = bed
    words = 'deployments.apps "m" is forbidden: exceeded quota: q'
    fault = cluster.fail(
        403, "Forbidden", words, times=10_000, method="POST", path="namespaces/bad/deployments"
    )
    async with operator(kube):
        for number in range(20):
            await kube.create(ELASTICJOBS, job(f"x{number}", "bad"))
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "the good job's master")
        told = await until(
            lambda: (c := condition(cluster, "MasterReady", "x7", "bad")).get("message") and c,
            "the refusal as a condition",
        )
        assert (told["status"], told["reason"]) == ("False", "QuotaExceeded")
        assert told["message"] == words
        fault.times = 0
        await until(lambda: len(cluster.all(DEPLOYMENTS, "bad")) == 20, "all masters")


@pytest.mark.parametrize("stays", [False, True])
async def test_a_right_that_is_missing_for_a_moment_is_not_told(bed: Bed, stays: bool) -> None:
    """An API server that starts does not know yet who may do what."""
    timing = OperatorTiming(api_server_start_s=0.5 if stays else 1000.0)
    cluster, kube = bed
    words = 'deployments.apps is forbidden: User "o" cannot create resource "deployments"'
    times = 1000 if stays else 3
    cluster.fail(403, "Forbidden", words, times=times, method="POST", path="/deployments")
    async with operator(kube, timing=timing):
        await kube.create(ELASTICJOBS, job())
        if stays:
            await until(
                lambda: condition(cluster, "MasterReady").get("reason") == "PermissionDenied",
                "a word",
            )
            assert condition(cluster, "MasterReady")["message"] == words
        else:
            await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
            await until(lambda: condition(cluster, "MasterReady"), "a word")
    assert stays or "PermissionDenied" not in [e["reason"] for e in cluster.all(EVENTS)]


async def test_an_object_deleted_and_made_again_meanwhile_is_no_refusal(bed: Bed) -> None:
    """The creation finds the name taken, the read finds nothing, and the next creation fails."""
    cluster, kube = bed
    cluster.fail(409, "AlreadyExists", "was faster", times=2, method="POST", path="/deployments")
    async with operator(kube):
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        await until(lambda: condition(cluster, "MasterReady"), "a condition")
    assert "was faster" not in [e["message"] for e in cluster.all(EVENTS)]


async def test_a_strangers_secret_is_not_touched(bed: Bed) -> None:
    cluster, kube = bed
    theirs = {"metadata": {"name": names.journal_of("x")}, "data": {"token": "eA=="}}
    before = cluster.put(SECRETS, theirs)
    async with operator(kube):
        await kube.create(ELASTICJOBS, job())
        await until(lambda: condition(cluster, "Accepted").get("reason") == "NameConflict", "it")
    assert cluster.one(SECRETS, names.journal_of("x")) == before
    assert cluster.one(DEPLOYMENTS, MASTER) is None


async def test_what_a_deleted_job_of_the_same_name_has_left_is_waited_for(bed: Bed) -> None:
    """The garbage collector takes its Deployment first, and its account later."""
    cluster, kube = bed
    theirs = {"metadata": {"name": MASTER, "ownerReferences": [names.owner("x", "another")]}}
    cluster.put(SERVICE_ACCOUNTS, theirs)
    async with operator(kube):
        await kube.create(ELASTICJOBS, job())
        await until(lambda: condition(cluster, "MasterReady").get("reason") == "Waiting", "it")
        assert condition(cluster, "Accepted")["status"] == "True"
        await kube.delete(SERVICE_ACCOUNTS, MASTER, "default")
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")


async def test_a_masters_rights_are_made_again_though_it_cannot_say_that_it_lacks_them(
    bed: Bed,
) -> None:
    cluster, kube = bed
    async with operator(kube, timing=OperatorTiming(rights_interval_s=0.2)) as one:
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        master_says(cluster, "Running")
        role = cluster.one(ROLES, MASTER) or {}
        cluster.put(ROLES, role | {"rules": []})
        one.look_again()
        await until(lambda: (cluster.one(ROLES, MASTER) or {})["rules"] == role["rules"], "rules")
        binding = cluster.one(ROLE_BINDINGS, MASTER) or {}
        theirs = [{"kind": "Group", "name": "g"}]
        cluster.put(ROLE_BINDINGS, binding | {"subjects": theirs})
        one.look_again()

        def subjects() -> object:
            return (cluster.one(ROLE_BINDINGS, MASTER) or {}).get("subjects")

        await until(lambda: subjects() == binding["subjects"], "its account is bound again")
        await kube.delete(ROLE_BINDINGS, MASTER, "default")
        one.look_again()
        await until(lambda: subjects() == binding["subjects"], "its binding")


async def test_a_master_whose_account_was_deleted_gets_it_and_a_pod_that_has_its_token(
    bed: Bed,
) -> None:
    cluster, kube = bed
    async with operator(kube, timing=OperatorTiming(rights_interval_s=0.2)) as one:
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        labels = {names.LABEL_JOB: "x", names.LABEL_ROLE: names.ROLE_MASTER}
        by = {"kind": "ReplicaSet", "name": f"{MASTER}-5f", "uid": "r", "controller": True}
        pod = f"{MASTER}-5f-a"
        meta = {"name": pod, "labels": labels, "ownerReferences": [by]}
        cluster.put(PODS, {"metadata": meta})
        available(cluster)
        master_says(cluster, "Running")
        await until(lambda: status(cluster).get("phase") == "Running", "phase Running")
        await rest(one)
        assert cluster.one(PODS, pod)
        cluster.ahead_s = 30.0
        await kube.delete(SERVICE_ACCOUNTS, MASTER, "default")
        one.look_again()
        await until(lambda: cluster.one(SERVICE_ACCOUNTS, MASTER), "its account")
        await until(lambda: cluster.one(PODS, pod) is None, "the old Pod goes")


async def test_with_no_master_its_running_pods_are_deleted_and_no_others(bed: Bed) -> None:
    cluster, kube = bed
    made = await kube.create(ELASTICJOBS, job(suspend=True))
    made["status"] = {"startTime": "2026-01-01T00:00:00Z"}  # its master was deleted meanwhile
    cluster.put(ELASTICJOBS, made)
    labels = {names.LABEL_JOB: "x", names.LABEL_ROLE: names.ROLE_WORKER}
    for name, uid, phase in (
        ("running", made["metadata"]["uid"], "Running"),
        ("over", made["metadata"]["uid"], "Failed"),
        ("foreign", "u0", "Running"),
    ):
        owner = {"apiVersion": names.API_VERSION, "kind": "ElasticJob", "name": "x", "uid": uid}
        meta = {"name": name, "labels": labels, "ownerReferences": [owner]}
        cluster.put(PODS, {"metadata": meta, "status": {"phase": phase}})
    async with operator(kube):
        await until(lambda: status(cluster).get("phase") == "Suspended", "suspended")

    def left() -> set[str]:
        found = cluster.all(PODS)
        return {p["metadata"]["name"] for p in found if "deletionTimestamp" not in p["metadata"]}

    await until(lambda: left() == {"over", "foreign"}, "only the running one goes")


@pytest.mark.parametrize("wish", ["suspend", "Succeeded"])
async def test_a_master_is_kept_while_a_pod_of_its_job_holds_resources(bed: Bed, wish: str) -> None:
    """Its master says that no node is left: a sidecar of one runs on."""
    cluster, kube = bed
    await kube.create(ELASTICJOBS, job())
    uid = (cluster.one(ELASTICJOBS, "x") or {})["metadata"]["uid"]
    owner = {"apiVersion": names.API_VERSION, "kind": "ElasticJob", "name": "x", "uid": uid}
    labels = {names.LABEL_JOB: "x", names.LABEL_ROLE: names.ROLE_WORKER}
    meta = {"name": "x-n0", "labels": labels, "ownerReferences": [owner]}
    cluster.put(PODS, {"metadata": meta, "status": {"phase": "Running"}})

    def replicas() -> int:
        return int((cluster.one(DEPLOYMENTS, MASTER) or {})["spec"]["replicas"])

    def lists() -> int:
        return sum(call.path.endswith("/pods") and not call.watch for call in cluster.calls)

    async with operator(kube) as one:
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        if wish == "suspend":
            await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": True}}, "default")
            await until(lambda: condition(cluster, "Suspended"), "word")
        master_says(cluster, "Suspended" if wish == "suspend" else wish)
        seen = lists()
        await until(lambda: lists() >= seen + 2, "it looks, and looks again")
        await rest(one)
        assert replicas() == 1
        assert condition(cluster, "Suspended").get("status") != "True"
        cluster.put(PODS, {"metadata": meta, "status": {"phase": "Succeeded"}})
        await until(lambda: replicas() == 0, "no master")
        await until(lambda: condition(cluster, "PodsLeft").get("status") == "False", "its end")
        if wish == "suspend":
            await until(lambda: condition(cluster, "Suspended")["status"] == "True", "Suspended")
    assert "deletionTimestamp" not in cluster.all(PODS)[0]["metadata"]


async def test_a_namespaced_operator_asks_for_its_namespaces_only(bed: Bed) -> None:
    cluster, kube = bed
    await kube.create(ELASTICJOBS, job(namespace="a"))
    await kube.create(ELASTICJOBS, job(namespace="b"))
    before = len(cluster.calls)
    async with operator(kube, "b", "c"):
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER, "b"), "the master in b")
    assert not cluster.all(DEPLOYMENTS, "a")
    paths = {call.path for call in cluster.calls[before:]}
    assert all("/namespaces/b/" in path or "/namespaces/c/" in path for path in paths)


async def test_a_broken_watch_and_a_deleted_deployment(bed: Bed) -> None:
    cluster, kube = bed
    async with operator(kube):
        await kube.create(ELASTICJOBS, job())
        first = await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        cluster.compact()
        cluster.cut()
        cluster.remove(DEPLOYMENTS, MASTER)
        await until(
            lambda: (
                (d := cluster.one(DEPLOYMENTS, MASTER))
                and d["metadata"]["uid"] != first["metadata"]["uid"]
            ),
            "another Deployment",
        )


async def test_a_master_whose_address_another_service_has_gets_another(bed: Bed) -> None:
    cluster, kube = bed
    async with operator(kube, timing=OperatorTiming(address_lost_after_s=0.2)):
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        master_says(cluster, "Running")
        await until(lambda: status(cluster).get("phase") == "Running", "phase Running")
        address = (cluster.one(SERVICES, MASTER) or {})["spec"]["clusterIP"]
        words = f"spec.clusterIPs: Invalid value: [{address}]: provided IP is already allocated"
        fault = cluster.fail(422, "Invalid", words, times=10**6, method="POST", path="/services")
        theirs = {"metadata": {"name": "theirs"}, "spec": {"clusterIP": address}}
        cluster.put(SERVICES, theirs)
        cluster.remove(SERVICES, MASTER)

        def master() -> Obj:
            return dict((cluster.one(DEPLOYMENTS, MASTER) or {})["spec"])

        await until(lambda: master()["replicas"] == 0, "the address is given up")
        fault.times = 0
        await until(lambda: master()["replicas"] == 1, "another master")
        fresh = (cluster.one(SERVICES, MASTER) or {})["spec"]["clusterIP"]
        assert fresh != address
        assert f"{fresh}:50001" in str(master()["template"])


@pytest.mark.parametrize(
    ("code", "reason", "retry_after"),
    [(429, "TooManyRequests", 1), (500, "InternalError", None), (403, "Forbidden", None)],
)
async def test_an_operator_that_is_refused_everything_asks_seldom_and_goes_on(
    bed: Bed, code: int, reason: str, retry_after: int | None
) -> None:
    """And all history is compacted meanwhile."""
    cluster, kube = bed
    kube.times = ClientTimes(first_wait_s=0.1, denied_s=0.5)
    async with operator(kube):
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        await until(
            lambda: condition(cluster, "MasterReady").get("status") == "True", "MasterReady"
        )
        fault = cluster.fail(code, reason, times=10**6, retry_after=retry_after)
        began = len(cluster.calls)
        held = cluster.one(ELASTICJOBS, "x")
        assert held is not None
        held["spec"]["suspend"] = True
        cluster.put(ELASTICJOBS, held)
        cluster.put(ELASTICJOBS, job("y"))
        cluster.compact()
        cluster.cut()

        def asked() -> dict[str, list[float]]:
            found: dict[str, list[float]] = {}
            for call in cluster.calls[began:]:
                found.setdefault(f"{call.method} {call.path}", []).append(call.at)
            return found

        def watches() -> list[list[float]]:
            return [times for what, times in asked().items() if what.startswith("GET")]

        await until(
            lambda: len(watches()) == len(WATCHES) and min(map(len, watches())) >= 5,
            "five attempts of each watch",
        )
        for what, times in asked().items():
            gaps = [b - a for a, b in pairwise(times)]
            if code == 429:
                assert all(gap >= 1 for gap in gaps), (what, gaps)
            else:  # doubled, and spread by half; up to `denied_s` where it is for a person
                most = math.inf if code == 500 else kube.times.denied_s / 2
                least = [min(most, 0.05 * 2**n) for n in range(4)]
                assert all(g >= wait_s for g, wait_s in zip(gaps, least, strict=False)), (
                    what,
                    gaps,
                )
        assert not condition(cluster, "Suspended"), "it cannot know"
        before = len(cluster.calls)
        fault.times = 0
        await until(
            lambda: condition(cluster, "Suspended").get("reason") == "Suspending", "the new wish"
        )
        await until(lambda: cluster.one(DEPLOYMENTS, names.master_of("y")), "the new job's master")
        kinds = sorted(watch.kind.path() for watch in WATCHES)

        def lists() -> list[str]:
            asked = (c for c in cluster.calls[before:] if c.method == "GET" and not c.watch)
            return sorted(call.path for call in asked if call.path in kinds)

        await until(lambda: len(lists()) >= len(kinds) and cluster.watches == len(kinds), "lists")
        assert lists() == kinds, "one of each"


async def test_an_operator_whose_clock_is_wrong_goes_by_the_api_servers(bed: Bed) -> None:
    """Else a job that has waited for a moment would be too late, and one that is over deleted."""
    cluster, kube = bed
    cluster.ahead_s = -600.0
    async with operator(kube):
        await kube.create(ELASTICJOBS, job(pendingTimeoutSeconds=300, activeDeadlineSeconds=300))
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        master_says(cluster, "Pending")
        await until(lambda: status(cluster).get("phase") == "Pending", "phase Pending")
        assert abs(kube.wall() - (time.time() - 600)) < SOON
        assert not condition(cluster, "DeadlineExceeded")
        ready = unix_seconds(condition(cluster, "MasterReady")["lastTransitionTime"])
        assert ready is not None
        assert abs(ready - (time.time() - 600)) < SOON


async def test_a_verdict_is_not_passed_by_a_time_that_is_corrected(bed: Bed) -> None:
    """One server of several was wrong; the one that is asked before the verdict is right."""
    cluster, kube = bed
    async with operator(kube) as one:
        await kube.create(ELASTICJOBS, job(activeDeadlineSeconds=300))
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        master_says(cluster, "Running")
        await until(lambda: status(cluster).get("phase") == "Running", "phase Running")
        await rest(one)
        cluster.ahead_s = 3600.0
        while kube.wall() < time.time() + 3000:  # an answer that took long is not believed
            await kube.list(PODS)
        cluster.ahead_s = 0.0
        one.look_again()
        await until(lambda: kube.wall() < time.time() + SOON, "the right time")
        await rest(one)
        assert not condition(cluster, "DeadlineExceeded")
        assert status(cluster)["phase"] == "Running"


def a_node_is_missing(cluster: FakeCluster, one: OpenOperator) -> None:
    held = cluster.one(ELASTICJOBS, "x") or {}
    held["status"]["training"] = {"phase": "Running", "nodesInRound": 1, "desired": 2}
    cluster.put(ELASTICJOBS, held)
    one.forget_what_was_made()


async def test_a_tokens_secret_that_was_deleted_is_made_again_as_it_was(bed: Bed) -> None:
    """Nodes that run hold what it said, and those that are missing cannot start without it."""
    cluster, kube = bed
    async with operator(kube) as one:
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        name = names.token_of("x", (cluster.one(ELASTICJOBS, "x") or {})["metadata"]["uid"])
        first = cluster.one(SECRETS, name)
        assert first is not None
        cluster.remove(SECRETS, name)
        a_node_is_missing(cluster, one)
        again = await until(lambda: cluster.one(SECRETS, name), "the Secret")
        assert again["data"] == first["data"]


@pytest.mark.parametrize("tls", ["gone", "of an older operator"])
async def test_no_tokens_secret_is_made_that_the_master_would_refuse(bed: Bed, tls: str) -> None:
    """Nodes that cannot start wait; those that are refused end the job. The next master's fits."""
    cluster, kube = bed
    async with operator(kube) as one:
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        await until(lambda: condition(cluster, "MasterReady").get("status") == "True", "a master")
        await rest(one)
        uid = (cluster.one(ELASTICJOBS, "x") or {})["metadata"]["uid"]
        token, certificate = names.token_of("x", uid), names.tls_of("x", uid)
        held = cluster.one(SECRETS, certificate) or {}
        for name in (token, certificate):
            cluster.remove(SECRETS, name)
        if tls != "gone":  # it has drawn the token
            held["metadata"].pop("annotations", None)
            cluster.put(SECRETS, held)
        before = cluster.gets(token)
        a_node_is_missing(cluster, one)
        await until(lambda: cluster.gets(token) > before, "it looks")
        await rest(one)
        assert cluster.one(SECRETS, token) is None
        assert (cluster.one(SECRETS, certificate) is None) == (tls == "gone")
        available(cluster, 0)
        await until(lambda: condition(cluster, "MasterReady").get("status") == "False", "no master")
        await rest(one)
        cluster.ahead_s = 40.0
        await kube.list(PODS)
        one.forget_what_was_made()
        one.look_again()
        made = await until(lambda: cluster.one(SECRETS, token), "what the next master needs")
        fits = cluster.one(SECRETS, certificate) or {}
        assert made["data"]["ca.crt"] == fits["data"]["ca.crt"]


async def test_a_resumed_jobs_master_may_do_what_its_version_needs(bed: Bed) -> None:
    """Its Role and its NetworkPolicy are of an older operator, or of an older template."""
    cluster, kube = bed
    async with operator(kube):
        await kube.create(ELASTICJOBS, job(suspend=True))
        await until(lambda: status(cluster).get("phase") == "Suspended", "phase Suspended")
        owner = cluster.one(ELASTICJOBS, "x") or {}
        read = ElasticJob.read(owner)
        for kind, made, part in (
            (ROLES, manifests.role(read), "rules"),
            (NETWORK_POLICIES, manifests.network_policy(read), "spec"),
            (NETWORK_POLICIES, manifests.workers_network_policy(read), "spec"),
        ):
            old = made | {part: made[part][:1] if part == "rules" else {"podSelector": {}}}
            cluster.put(kind, old)
        await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": False}}, "default")
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        assert (cluster.one(ROLES, MASTER) or {})["rules"] == manifests.role(read)["rules"]
        for wish in (manifests.network_policy(read), manifests.workers_network_policy(read)):
            policy = cluster.one(NETWORK_POLICIES, wish["metadata"]["name"]) or {}
            assert policy["spec"] == wish["spec"]


async def test_a_verdict_is_not_passed_on_what_is_not_heard_any_more(bed: Bed) -> None:
    """The watch hangs: the job runs by now, and is neither too late nor suspended."""
    cluster, kube = bed
    async with operator(kube) as one:
        await kube.create(ELASTICJOBS, job(pendingTimeoutSeconds=300))
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        master_says(cluster, "Pending")
        await until(lambda: status(cluster).get("phase") == "Pending", "phase Pending")
        cluster.stalled = True
        master_says(cluster, "Running")
        cluster.ahead_s = 400.0
        while kube.wall() < time.time() + 350:  # an answer that took long is not believed
            await kube.list(PODS)
        one.look_again()
        await until(lambda: status(cluster).get("phase") != "Pending", "a word of the operator")
        assert status(cluster)["phase"] == "Running"
        assert not condition(cluster, "DeadlineExceeded")


async def test_a_suspension_that_was_taken_back_ends_no_master(bed: Bed) -> None:
    """Another operator has resumed the job; this one has not heard of that."""
    cluster, kube = bed
    async with operator(kube):
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": True}}, "default")
        await until(lambda: condition(cluster, "Suspended").get("reason") == "Suspending", "word")
        master_says(cluster, "Suspended")

        def replicas() -> int:
            return int((cluster.one(DEPLOYMENTS, MASTER) or {})["spec"]["replicas"])

        await until(lambda: replicas() == 0, "no master")
        available(cluster, 0)
        await until(lambda: status(cluster).get("phase") == "Suspended", "phase Suspended")
        cluster.deaf.add("elasticjobs")
        await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": False}}, "default")
        held = cluster.one(DEPLOYMENTS, MASTER)
        assert held is not None
        held["spec"]["replicas"] = 1
        before = cluster.gets("elasticjobs/x")
        cluster.put(DEPLOYMENTS, held)
        await until(lambda: cluster.gets("elasticjobs/x") > before, "it looks first")
        cluster.deaf.clear()
        await until(lambda: status(cluster).get("phase") != "Suspended", "resumed")
        assert replicas() == 1


async def test_two_operators_make_one_master_whose_secrets_fit(bed: Bed) -> None:
    cluster, kube = bed
    async with operator(kube), operator(kube):
        for number in range(10):
            await kube.create(ELASTICJOBS, job(f"x{number}"))
        await until(lambda: len(cluster.all(DEPLOYMENTS)) == 10, "all masters")
    for number in range(10):
        uid = (cluster.one(ELASTICJOBS, f"x{number}") or {})["metadata"]["uid"]
        token = cluster.one(SECRETS, names.token_of(f"x{number}", uid))
        tls = cluster.one(SECRETS, names.tls_of(f"x{number}", uid))
        assert token is not None
        assert tls is not None
        assert token["data"]["ca.crt"] == tls["data"]["ca.crt"]
        assert len(base64.b64decode(token["data"]["token"])) >= 32


async def test_a_job_that_is_at_rest_costs_no_writes(bed: Bed) -> None:
    cluster, kube = bed
    async with operator(kube) as one:
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        available(cluster)
        await until(
            lambda: condition(cluster, "MasterReady").get("status") == "True", "MasterReady"
        )
        await rest(one)
        written = sum(call.method != "GET" for call in cluster.calls)
        for _ in range(5):
            one.look_again()
            await rest(one)
        assert sum(call.method != "GET" for call in cluster.calls) == written


async def test_the_process_is_killed_comes_again_and_ends_in_order(
    bed: Bed, tmp_path: Path
) -> None:
    cluster, kube = bed
    port = free_port()
    env = os.environ | {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    argv = [sys.executable, "-m", "dlrover_operator", "--master-image=m:1"]
    for_browsers = free_port()
    argv += [f"--health=127.0.0.1:{port}", f"--dashboard-port={for_browsers}"]

    def page(path: str, of: int = port) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{of}{path}", timeout=SOON) as reply:
                return str(reply.read().decode())
        except OSError:
            return ""

    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*argv, env=env)
        while await asyncio.to_thread(page, "/readyz") != "ok":
            assert process.returncode is None
            await asyncio.sleep(0.05)
        return process

    process = await asyncio.wait_for(start(), SOON)
    try:
        await kube.create(ELASTICJOBS, job())
        await until(lambda: cluster.one(SERVICES, MASTER), "a Service")
        process.kill()
        await process.wait()
        process = await asyncio.wait_for(start(), SOON)
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a Deployment")
        await until(lambda: status(cluster).get("phase") == "Created", "its phase")
        assert await asyncio.to_thread(page, "/healthz") == "ok"
        assert "Enter with a token" in await asyncio.to_thread(page, "/enter", for_browsers)
        with pytest.raises(OSError, match="refused"):  # another address of the loopback device
            socket.create_connection(("127.0.0.2", for_browsers), timeout=SOON)
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.settimeout(SOON)
            assert await asyncio.to_thread(silent.recv, 1) == b"", "nobody is waited for for ever"
        limit = Path(f"/proc/{process.pid}/limits").read_text()
        soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", limit)[0]
        assert soft == hard, "each of them has a descriptor meanwhile"
        metrics = await asyncio.to_thread(page, "/metrics")
        assert 'workqueue_adds_total{name="elasticjobs"}' in metrics
        assert 'elasticjob_jobs{phase="Created"} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), SOON) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
