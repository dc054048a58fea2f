"""The platform against an API server in memory: what it asks for, understands, and tells."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import (
    ExpiredError,
    ForbiddenError,
    ServerDownError,
    ThrottledError,
    UnauthenticatedError,
)
from dlrover_py.kubernetes.kinds import ELASTICJOBS, EVENTS, PODS, Obj
from dlrover_py.master.core.events import (
    Event,
    JobChanged,
    JobStopped,
    NodeEnded,
    NodeSeen,
    NodesListed,
    Rules,
)
from dlrover_py.master.journal_store import FileJournalStore
from dlrover_py.master.loop import Loop
from dlrover_py.master.pauses import RETRY, pause_s
from dlrover_py.master.platform import PriorMasterState
from dlrover_py.master.platform.kubernetes import creator, pod_calls, pods
from dlrover_py.master.platform.kubernetes.job_watcher import ElasticJobWatcher
from dlrover_py.master.platform.kubernetes.platform import KubernetesPlatform
from dlrover_py.master.platform.kubernetes.pod_table import ENDED_KEPT, PodTable
from dlrover_py.master.platform.kubernetes.pods import PodContext
from dlrover_py.master.platform.kubernetes.rights import Rights
from dlrover_py.master.platform.kubernetes.timing import PlatformTiming
from dlrover_py.pacing import TokenBucket
from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.errors import SupersededError, TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import LABEL_PLACEMENT, NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import (
    Condition,
    GoodputStatus,
    JobEvent,
    JobPhase,
    JobStatus,
    NodePhase,
    NodeRole,
    NodeStatus,
    TimeBucket,
)
from tests.builders import SimAgent, job_file
from tests.fakes_kube import FakeCluster, fake_cluster
from tests.loops import working

N0, N1 = NodeId("n0"), NodeId("n1")
WITHIN_S = 60.0
TRUSTED = pytest.mark.parametrize("timing", [PlatformTiming(api_server_start_s=0.0)])
"""A missing permission counts at once."""
SOON = pytest.mark.parametrize("timing", [PlatformTiming(linger_s=0.2, overdue_s=0.2)])
"""Pods have little time to end."""


def of_generation(generation: int) -> Callable[[Event], bool]:
    """Whether an event is the change of the job to that generation."""
    return lambda e: isinstance(e, JobChanged) and e.job.metadata.generation == generation


class OpenPlatform(KubernetesPlatform):
    """A platform that shows the tests what it still has to do."""

    @property
    def template_problem(self) -> object:
        return self._trial.problem

    @property
    def template_words(self) -> str:
        return self._trial.problem.message if self._trial.problem is not None else ""

    @property
    def unfinished(self) -> object:
        """Its requests in the background."""
        return self._context.tasks.running

    @property
    def unfinished_ends(self) -> object:
        """Pods whose sidecars have to be ended."""
        return self._ender._endings

    @property
    def missing_rights(self) -> object:
        return self._rights._denials or self._rights._denied_since

    @property
    def rights(self) -> Rights:
        return self._rights

    @property
    def recorder(self) -> object:
        return self._recorder

    @property
    def jobs(self) -> ElasticJobWatcher:
        return self._jobs

    @property
    def table(self) -> PodTable:
        return self._table


@dataclass
class Scene:
    """A job in a cluster, its platform, and what that has said so far."""

    cluster: FakeCluster
    kube: KubeClient
    platform: OpenPlatform
    uid: str
    said: list[Event]
    news: asyncio.Event

    async def hears(self, fits: Callable[[Event], bool]) -> Event:
        """The first thing said that fits, now or soon."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                for event in self.said:
                    if fits(event):
                        return event
                self.news.clear()
                await self.news.wait()

    async def hears_of(self, kind: type[Event], node: NodeId) -> Any:
        return await self.hears(lambda e: isinstance(e, kind) and getattr(e, "node", "") == node)

    def pod(self, node: NodeId = N0) -> Obj:
        found = self.cluster.one(PODS, f"x-{node}")
        assert found is not None
        return found

    def change(self, node: NodeId, **status: Any) -> None:
        self.cluster.put(PODS, {**self.pod(node), "status": status})

    def runs(self, node: NodeId) -> None:
        obj = self.pod(node)
        obj["spec"]["nodeName"] = f"host-{node}"
        obj["status"] = {
            "phase": "Running",
            "containerStatuses": [{"name": "main", "state": {"running": {}}}],
        }
        self.cluster.put(PODS, obj)

    def ends(self, node: NodeId, code: int, phase: str = "Failed") -> None:
        state = {"terminated": {"exitCode": code, "reason": "Error"}}
        self.change(node, phase=phase, containerStatuses=[{"name": "main", "state": state}])

    def job(self) -> Obj:
        found = self.cluster.one(ELASTICJOBS, "x")
        assert found is not None
        return found

    def conditions(self) -> dict[str, Obj]:
        return {c["type"]: c for c in (self.job().get("status") or {}).get("conditions", [])}

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not true():
                await asyncio.sleep(0.02)


@pytest.fixture
def timing() -> PlatformTiming:
    """The times of the scene's platform; a test that needs other ones sets them as a parameter."""
    return PlatformTiming()


@pytest.fixture
async def scene(tmp_path: Path, timing: PlatformTiming) -> AsyncIterator[Scene]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        made = cluster.put(ELASTICJOBS, document())
        uid = made["metadata"]["uid"]
        site = PodContext(uid, "10.0.0.1:50001")
        platform = OpenPlatform(kube, "default", "x", site, timing=timing)
        said: list[Event] = []
        news = asyncio.Event()

        async def listen() -> None:
            async for events in platform.watch():
                said.extend(events)
                news.set()

        await platform.get_job()
        task = asyncio.create_task(listen())
        scene = Scene(cluster, kube, platform, uid, said, news)
        await scene.hears(lambda e: isinstance(e, NodesListed))
        yield scene
        assert not task.done() or task.exception() is None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def document(replicas: int = 2) -> Obj:
    made = job_file(replicas, minReplicas=1)
    template = made["spec"]["replicaSpecs"]["worker"]["template"]
    template["spec"]["containers"][0]["image"] = "i"
    return made


def status(**more: Any) -> JobStatus:
    fields: dict[str, Any] = {
        "name": "x",
        "generation": 1,
        "phase": JobPhase.RUNNING,
        "reason": "r",
        "term": 3,
        "round": 1,
        "world_size": 2,
        "nodes_in_round": 2,
        "desired": 2,
        "minimum": 1,
        "ready": 3,
        "standby": 1,
        "started_at": 1e9,
        "published_at": 1.5e9,
    }
    return JobStatus(**{**fields, **more})


# --- nodes ---


async def test_a_node_is_made_and_its_life_is_told(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    seen = await scene.hears_of(NodeSeen, N0)
    assert (seen.near, seen.runs) == (True, False)
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    scene.cluster.logs["default", "x-n0"] = "Traceback\nValueError: no"
    scene.ends(N0, 2)
    ended = await scene.hears_of(NodeEnded, N0)
    assert (ended.exit_code, ended.free) == (2, False)
    assert "ValueError: no" in ended.output


async def test_a_server_is_ordered_to_leave_by_the_deletion_of_its_pod(scene: Scene) -> None:
    made = document()
    main = {"name": "main", "image": "i", "command": ["dlrover", "ps", "server"]}
    made["spec"]["replicaSpecs"]["ps"] = {"template": {"spec": {"containers": [main]}}}
    scene.cluster.put(ELASTICJOBS, {**scene.job(), "spec": made["spec"]})
    await scene.hears(lambda e: isinstance(e, JobChanged) and e.job.servers is not None)
    server = NodeId("ps0")
    await scene.platform.create_node(server)
    scene.runs(server)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    await scene.platform.delete_node(server, 600.0)  # there is no agent that could be told
    leaving = scene.pod(server)["metadata"]
    assert leaving["deletionGracePeriodSeconds"] == 600
    seen = await scene.hears(lambda e: isinstance(e, NodeSeen) and bool(e.leaving))
    assert getattr(seen, "node", "") == server
    await scene.platform.delete_node(server, 0.0)  # the workers have ended: there is no need
    assert scene.pod(server)["metadata"]["deletionGracePeriodSeconds"] == 1


async def test_to_ask_twice_makes_one(scene: Scene) -> None:
    await asyncio.gather(*(scene.platform.create_node(N0) for _ in range(3)))
    await scene.platform.create_node(N0)
    assert len(scene.cluster.all(PODS)) == 1


async def test_pods_of_others_are_neither_told_nor_touched(scene: Scene) -> None:
    theirs = pods.pod(await scene.platform.get_job(), N1, PodContext("another", "a:1"))
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another"
    scene.cluster.put(PODS, theirs)
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    assert not [e for e in scene.said if getattr(e, "node", "") == N1]
    await scene.platform.delete_node(N1, 0.0)
    assert scene.cluster.one(PODS, "x-n1") is not None


async def test_a_name_that_is_taken_is_a_condition_until_it_is_free(scene: Scene) -> None:
    scene.cluster.put(PODS, {"metadata": {"name": "x-n0"}})
    asked = asyncio.create_task(scene.platform.create_node(N0))
    refused = await scene.hears_of(NodeSeen, N0)
    assert (refused.near, refused.exists) == (False, False)
    assert "does not belong to this job" in refused.message
    await scene.platform.publish(status())
    assert scene.conditions()["NameConflict"]["status"] == "True"
    scene.cluster.remove(PODS, "x-n0")
    await asyncio.wait_for(asked, WITHIN_S)
    await scene.platform.publish(status())
    assert scene.conditions()["NameConflict"]["status"] == "False"


async def test_a_taken_name_whose_pod_cannot_be_read_is_tried_again(scene: Scene) -> None:
    scene.cluster.put(PODS, {"metadata": {"name": "x-n0"}})
    words = 'pods "x-n0" is forbidden: User "u" cannot get resource "pods"'
    scene.cluster.fail(403, "Forbidden", words, method="GET", path="/pods/x-n0")
    with pytest.raises(TransientError, match="cannot get"):
        await scene.platform.create_node(N0)


REFUSALS = [
    (403, 'pods "x-n0" is forbidden: exceeded quota: q, requested: pods=1', "QuotaExceeded"),
    (403, 'pods "x-n0" is forbidden: violates PodSecurity "restricted:latest"', "PodsForbidden"),
    (
        403,
        'pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods"',
        "PermissionDenied",
    ),
    (422, 'Pod "x-n0" is invalid: spec.containers[0].image: Required value', "InvalidTemplate"),
    (
        422,
        "pods \"x-n0\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied "
        "request: users cannot create resource claims",
        "PodsForbidden",
    ),
    (400, 'admission webhook "v.k.io" denied the request: no', "PodsForbidden"),
]


@TRUSTED
@pytest.mark.parametrize(("code", "words", "condition"), REFUSALS)
async def test_a_refusal_is_a_condition_in_the_servers_words(
    scene: Scene, code: int, words: str, condition: str
) -> None:
    fault = scene.cluster.fail(code, "Because", words, method="POST", path="/pods", times=1000)
    asked = asyncio.create_task(scene.platform.create_node(N0))
    await scene.hears_of(NodeSeen, N0)
    await scene.platform.publish(status())
    told = scene.conditions()[condition]
    assert told["status"] == "True"
    assert words in told["message"]
    fault.times = 0
    await asyncio.wait_for(asked, WITHIN_S)
    await scene.platform.publish(status())
    assert scene.conditions()[condition]["status"] == "False"


async def test_a_template_that_was_refused_is_accepted_once_a_pod_is_made(scene: Scene) -> None:
    """Nobody touches the job: an account, say, was missing that its template names."""
    words = "error looking up service account default/a"
    scene.cluster.fail(403, "Forbidden", words, method="POST", path="/pods", times=1)
    platform = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    await platform.get_job()
    await scene.until(lambda: platform.template_problem)
    await platform.publish(status())
    assert scene.conditions()["PodsForbidden"]["status"] == "True"
    await platform.create_node(N0)
    await platform.publish(status())
    assert scene.conditions()["PodsForbidden"]["status"] == "False"


async def test_a_template_that_was_refused_is_tried_again(scene: Scene) -> None:
    """Also where no Pod is needed."""
    scene.cluster.fail(403, "Forbidden", "no such account", method="POST", path="/pods", times=3)
    site, timing = PodContext(scene.uid, "a:1"), PlatformTiming(template_retry_s=0.01)
    platform = OpenPlatform(scene.kube, "default", "x", site, timing=timing)
    await platform.get_job()
    await scene.until(lambda: platform.template_problem)
    await scene.until(lambda: platform.template_problem is None)
    await platform.publish(status())
    assert "PodsForbidden" not in scene.conditions()


async def test_a_trial_of_a_refused_template_goes_on_after_a_conflict(scene: Scene) -> None:
    """A quota that changes during the call makes the API server answer with a conflict."""
    scene.cluster.fail(403, "Forbidden", "no such account", method="POST", path="/pods")
    scene.cluster.fail(409, "Conflict", "quota was modified", method="POST", path="/pods")
    site, timing = PodContext(scene.uid, "a:1"), PlatformTiming(template_retry_s=0.01)
    platform = OpenPlatform(scene.kube, "default", "x", site, timing=timing)
    await platform.get_job()
    await scene.until(lambda: platform.template_problem)
    await scene.until(lambda: platform.template_problem is None)


async def test_a_template_that_could_not_be_checked_is_tried_again(scene: Scene) -> None:
    scene.cluster.fail(409, "Conflict", "quota was modified", method="POST", path="/pods")
    words = "no such account"
    refusal = scene.cluster.fail(403, "Forbidden", words, method="POST", path="/pods", times=1000)
    site, timing = PodContext(scene.uid, "a:1"), PlatformTiming(template_retry_s=0.01)
    platform = OpenPlatform(scene.kube, "default", "x", site, timing=timing)
    await platform.get_job()
    await scene.until(lambda: platform.template_problem)
    refusal.times = 0
    await scene.until(lambda: platform.template_problem is None)


async def test_an_edit_that_could_not_be_checked_does_not_hide_the_fault(scene: Scene) -> None:
    obj = scene.job()
    del obj["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]["image"]
    scene.cluster.put(ELASTICJOBS, obj)
    await scene.until(lambda: scene.platform.template_problem)
    fault = scene.cluster.fail(409, "Conflict", "quota was modified", method="POST", path="/pods")
    obj = scene.job()
    obj["spec"]["replicaSpecs"]["worker"]["replicas"] = 3
    obj["metadata"]["generation"] = 3
    scene.cluster.put(ELASTICJOBS, obj)
    await scene.hears(of_generation(3))
    await scene.until(lambda: not fault.times)
    await scene.platform.publish(status(generation=3))
    assert scene.conditions()["InvalidTemplate"]["status"] == "True"


async def test_a_right_that_a_starting_server_does_not_know_of_yet_is_no_condition(
    scene: Scene,
) -> None:
    words = 'pods is forbidden: User "u" cannot {} resource "pods"'
    await scene.platform.create_node(N0)
    for method, verb in (("POST", "create"), ("DELETE", "delete")):
        said = words.format(verb)
        scene.cluster.fail(403, "Forbidden", said, method=method, path="/pods", times=1)
    with pytest.raises(TransientError):
        await scene.platform.create_node(N1)
    with pytest.raises(TransientError):
        await scene.platform.delete_node(N0, 0.01)
    await scene.platform.publish(status())
    assert not {"PermissionDenied", "PodsForbidden"} & set(scene.conditions())
    assert not [e for e in scene.said if isinstance(e, NodeSeen) and e.message]
    await scene.platform.create_node(N1)
    await scene.platform.delete_node(N0, 0.01)
    assert not scene.platform.missing_rights


async def test_a_right_to_watch_that_stays_away_is_a_condition_though_nothing_happens(
    tmp_path: Path,
) -> None:
    words = 'pods is forbidden: User "u" cannot list resource "pods"'
    async with fake_cluster(tmp_path) as (cluster, kube):
        job = cluster.put(ELASTICJOBS, document())
        site = PodContext(job["metadata"]["uid"], "10.0.0.1:50001")
        timing = PlatformTiming(api_server_start_s=0.3)
        platform = OpenPlatform(kube, "default", "x", site, timing=timing)
        scene = Scene(cluster, kube, platform, site.uid, [], asyncio.Event())
        cluster.fail(403, "Forbidden", words, method="GET", path="/pods", times=1000)
        async with working(Loop(platform, FileJournalStore(tmp_path / "journal"), Rules())):
            await scene.until(lambda: "PermissionDenied" in scene.conditions())
    assert scene.conditions()["PermissionDenied"]["message"] == f"Pods: {words}"


@TRUSTED
async def test_a_right_that_is_reported_stays_away_until_the_server_has_checked_it(
    scene: Scene,
) -> None:
    rights, missing = scene.platform.rights, ["Events: no"]
    rights.on_error("Events", ForbiddenError("no", status=403))
    for error in (
        ServerDownError("no answer"),
        ThrottledError("busy", retry_after=1.0),
        UnauthenticatedError("the token has expired", status=401),
    ):
        rights.on_error("Events", error)
        assert rights.missing() == missing
    rights.on_error("Events", ExpiredError("too old", status=410))
    assert rights.missing() == []


@TRUSTED
async def test_a_deletion_that_is_not_needed_any_more_is_denied_no_more(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    words = 'pods "x-n0" is forbidden: User "m" cannot delete resource "pods"'
    scene.cluster.fail(403, "Forbidden", words, method="DELETE", path="/pods", times=1)
    with pytest.raises(TransientError):
        await scene.platform.delete_node(N0, 0.01)
    await scene.platform.publish(status())
    assert scene.conditions()["PermissionDenied"]["status"] == "True"
    scene.ends(N0, 0, "Succeeded")
    await scene.hears_of(NodeEnded, N0)
    await scene.platform.delete_node(N0, 0.01)
    await scene.platform.publish(status())
    assert scene.conditions()["PermissionDenied"]["status"] == "False"


async def test_a_flood_of_events_is_told_slowly(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    monkeypatch.setattr(platform.recorder, "_tokens", TokenBucket(1e-9, 3, 0.0))

    def told() -> int:
        return sum(c.method == "POST" and c.path.endswith("/events") for c in scene.cluster.calls)

    for newest in (1, 5, 40):
        events = [JobEvent(id=n, at=1e9, reason="R", message="m") for n in range(1, newest + 1)]
        await platform.publish(status(events=events, restarts={"failure": newest}))
    await scene.until(lambda: told() == 3)
    await scene.kube.list(PODS, "default")
    assert told() == 3
    monkeypatch.setattr(platform.recorder, "_tokens", TokenBucket(0.0, 0.0, 0.0))


@pytest.mark.parametrize("timing", [PlatformTiming(event_retry_s=0.01)])
@pytest.mark.parametrize(("code", "missing"), [(503, []), (429, []), (422, ["x1"])])
async def test_an_event_that_is_refused_does_not_stop_those_after_it(
    scene: Scene, code: int, missing: list[str]
) -> None:
    scene.cluster.fail(code, path="/events", method="POST", retry_after=0)
    events = [JobEvent(id=n, at=1e9, reason=f"x{n}", message="m") for n in (1, 2)]
    await scene.platform.publish(status(events=events))
    await scene.until(lambda: not scene.platform.unfinished)
    told = {event["reason"] for event in scene.cluster.all(EVENTS)}
    assert told == {"x1", "x2"}.difference(missing)


async def test_what_pods_lack_is_a_condition(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling i"}}
    scene.change(N0, phase="Pending", containerStatuses=[{"name": "main", "state": waiting}])
    await scene.hears(lambda e: isinstance(e, NodeSeen) and not e.near)
    await scene.platform.publish(status())
    told = scene.conditions()["ImagePullBackOff"]
    assert told["message"] == "n0: main: Back-off pulling i"
    assert told["lastTransitionTime"] == "2017-07-14T02:40:00Z"
    later = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    await later.get_job()
    await later.publish(status(published_at=1.6e9, term=4))
    over = scene.conditions()["ImagePullBackOff"]
    assert over["status"] == "False", "the next master knows that it was there"


@pytest.mark.parametrize("timing", [PlatformTiming(unprepared_s=0.1)])
async def test_a_pod_whose_volume_is_missing_is_a_condition(scene: Scene) -> None:
    """Its kubelet says so in events alone, which masters do not read."""

    def creating(ready: str, **more: Any) -> None:
        conditions = [{"type": "PodReadyToStartContainers", "status": ready}]
        state = {"waiting": {"reason": "ContainerCreating"}}
        obj = scene.pod()
        obj["spec"]["nodeName"] = "h1"
        containers = [{"name": "main", "state": state}]
        obj["status"] = {"conditions": conditions, "containerStatuses": containers, **more}
        scene.cluster.put(PODS, obj)

    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    creating("False", phase="Pending")
    told = await scene.hears(lambda e: isinstance(e, NodeSeen) and e.message != "")
    assert isinstance(told, NodeSeen)
    assert (told.near, told.runs) == (True, False), "it may start any moment"
    await scene.platform.publish(status())
    words = scene.conditions()["PodNotStarting"]["message"]
    assert words.startswith(
        "n0: its volumes or its network are not ready on h1; see `kubectl describe pod x-n0`"
    )
    scene.said.clear()
    creating("False", phase="Pending", hostIP="10.0.0.1")
    assert (await scene.hears_of(NodeSeen, N0)).message, "what else is told of it changes nothing"
    scene.said.clear()
    creating("True", phase="Pending")
    assert not (await scene.hears_of(NodeSeen, N0)).message
    await scene.platform.publish(status(reason="another"))
    assert scene.conditions()["PodNotStarting"]["status"] == "False"


@pytest.mark.parametrize("timing", [PlatformTiming(waiting_s=0.1)])
async def test_an_init_container_that_does_not_end_is_a_condition(scene: Scene) -> None:
    """Manifests of Kubeflow have one that waits for the first worker's name."""

    def initializing(*states: dict[str, Any], **more: Any) -> None:
        obj = scene.pod()
        names = [f"init{number}" for number, _ in enumerate(states)]
        obj["spec"] |= {"nodeName": "h1", "initContainers": [{"name": name} for name in names]}
        inits = [{"name": n, "state": s} for n, s in zip(names, states, strict=True)]
        main = {"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}
        obj["status"] = {"phase": "Pending", "containerStatuses": [main | more]}
        obj["status"] |= {"initContainerStatuses": inits}
        scene.cluster.put(PODS, obj)

    done: dict[str, Any] = {"terminated": {"exitCode": 0}}
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    initializing(done, {"running": {}})
    told = await scene.hears(lambda e: isinstance(e, NodeSeen) and "init container" in e.message)
    assert isinstance(told, NodeSeen)
    assert (told.near, told.runs) == (True, False), "it may begin any moment"
    await scene.platform.publish(status())
    words = scene.conditions()["PodInitializing"]["message"]
    assert words == (
        "n0: its init container init1 has not finished; see `kubectl logs x-n0 -c init1`"
    )
    scene.said.clear()
    initializing(done, done, state={"running": {}})
    assert not (await scene.hears_of(NodeSeen, N0)).message
    await scene.platform.publish(status(reason="another"))
    assert scene.conditions()["PodInitializing"]["status"] == "False"


@pytest.mark.parametrize("timing", [PlatformTiming(waiting_s=0.1)])
async def test_a_pod_that_no_scheduler_looks_at_is_a_condition(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    obj = scene.pod()
    obj["spec"]["schedulerName"] = "volcano"
    scene.cluster.put(PODS, obj)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and "volcano" in e.message)
    await scene.platform.publish(status())
    words = "n0: no scheduler has processed it: check that the scheduler volcano runs"
    assert scene.conditions()["Unschedulable"]["message"] == words


async def test_the_column_why_names_what_holds_the_job_up(scene: Scene) -> None:
    def why() -> str:
        return str(scene.job()["status"]["training"]["reason"])

    await scene.platform.create_node(N0)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling i"}}
    scene.change(N0, phase="Pending", containerStatuses=[{"name": "main", "state": waiting}])
    await scene.hears(lambda e: isinstance(e, NodeSeen) and not e.near)
    nobody = "0 of at least 1 node are ready"
    await scene.platform.publish(status(phase=JobPhase.PENDING, reason=nobody, nodes_in_round=0))
    assert why() == f"ImagePullBackOff: n0: main: Back-off pulling i; {nobody}"
    await scene.platform.publish(status(reason="a round", nodes_in_round=1))
    assert why() == "ImagePullBackOff: n0: main: Back-off pulling i; a round"
    await scene.platform.publish(status(reason="all train"))
    assert why() == "all train"


async def test_a_template_that_is_refused_is_a_condition_before_a_pod_is_needed(
    scene: Scene,
) -> None:
    obj = scene.job()
    del obj["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]["image"]
    obj["metadata"]["generation"] = 2
    scene.cluster.put(ELASTICJOBS, obj)
    await scene.until(lambda: scene.platform.template_problem)
    await scene.platform.publish(status(generation=2))
    assert scene.conditions()["InvalidTemplate"]["status"] == "True"
    assert not scene.cluster.all(PODS)
    obj = document()
    obj["metadata"] = {**scene.job()["metadata"], "generation": 3}
    scene.cluster.put(ELASTICJOBS, {**scene.job(), **obj})
    await scene.until(lambda: not scene.platform.template_problem)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env": {"A": "b"}}, "containers[0].env: found a mapping {'A': 'b'}: expected a list"),
        ({"volumeMounts": ["d:/data"]}, "containers[0].volumeMounts[0]: found text 'd:/data'"),
        ({"resource": {}}, "containers[0].resource: unknown field; did you mean resources?"),
    ],
)
async def test_a_template_that_cannot_be_read_is_a_condition_until_it_is_mended(
    scene: Scene, change: Obj, words: str
) -> None:
    """The API server takes templates unread: the master goes on, whatever they are."""
    good = scene.job()
    bad = scene.job()
    bad["metadata"]["generation"] = 2
    bad["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0] |= change
    scene.cluster.put(ELASTICJOBS, bad)
    await scene.until(lambda: scene.platform.template_problem)
    await scene.platform.publish(status(generation=2))
    before = scene.conditions()["InvalidTemplate"]
    assert before["message"].startswith("spec.replicaSpecs.worker.template.spec.containers[0].")
    asked = asyncio.create_task(scene.platform.create_node(N0))
    await scene.hears_of(NodeSeen, N0)
    await scene.platform.publish(status(generation=2))
    for told in (before, scene.conditions()["InvalidTemplate"]):
        assert told["status"] == "True"
        assert told["observedGeneration"] == 2
        assert words in told["message"]
    assert scene.cluster.all(PODS) == []
    good["metadata"]["generation"] = 3
    scene.cluster.put(ELASTICJOBS, good)
    await asyncio.wait_for(asked, WITHIN_S)
    await scene.platform.publish(status(generation=3))
    assert scene.conditions()["InvalidTemplate"]["status"] == "False"


async def test_the_template_of_servers_is_tried_and_a_pod_says_nothing_of_the_other_role(
    scene: Scene,
) -> None:
    good = {"name": "main", "image": "i", "command": ["dlrover", "ps", "server"]}
    bad = {"name": "main", "command": ["dlrover", "ps", "server"]}
    whole = scene.job()["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]

    def edit(generation: int, server: Obj, worker: Obj) -> None:
        edited = scene.job()
        edited["metadata"]["generation"] = generation
        roles = edited["spec"]["replicaSpecs"]
        roles["ps"] = {"replicas": 1, "template": {"spec": {"containers": [server]}}}
        roles["worker"]["template"]["spec"]["containers"] = [worker]
        scene.cluster.put(ELASTICJOBS, edited)

    edit(2, bad, whole)
    await scene.until(lambda: scene.platform.template_problem)
    await scene.platform.create_node(N0)
    await scene.platform.publish(status(generation=2))
    found = scene.conditions()["InvalidTemplate"]
    assert found["status"] == "True"
    assert "x-ps9999" in found["message"]
    edit(3, good, {key: value for key, value in whole.items() if key != "image"})
    await scene.until(lambda: "x-trial" in scene.platform.template_words)
    await scene.platform.create_node(NodeId("ps0"))
    assert "x-trial" in scene.platform.template_words
    edit(4, good, whole)
    await scene.until(lambda: not scene.platform.template_problem)


async def test_what_the_server_warns_of_is_an_event(scene: Scene) -> None:
    def told() -> list[Obj]:
        events = scene.cluster.all(EVENTS)
        return [event for event in events if event["reason"] == "TemplateWarning"]

    scene.cluster.warnings = ['would violate PodSecurity "restricted:latest"', "and more"]
    for generation in (2, 3):
        edited = scene.job()
        edited["spec"]["replicaSpecs"]["worker"]["maxReplicas"] = 10 + generation
        scene.cluster.put(ELASTICJOBS, edited)
        await scene.hears(of_generation(generation))
        await scene.until(lambda: told() and not scene.platform.unfinished)
    (event,) = told()  # of the same words: the same event
    assert event["type"] == "Warning"
    assert 'would violate PodSecurity "restricted:latest"; and more' in event["message"]
    assert event["involvedObject"]["uid"] == scene.uid
    await scene.platform.publish(status(generation=3))
    assert "InvalidTemplate" not in scene.conditions()


async def test_what_is_said_of_a_template_is_said_of_the_newest(scene: Scene) -> None:
    """The server takes longer over the first edit than over the one that mends it."""
    good = scene.job()
    slow = scene.cluster.hold("/pods", method="POST", times=1)
    bad = scene.job()
    del bad["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]["image"]
    for generation, obj in ((2, bad), (3, good)):
        obj["metadata"]["generation"] = generation
        scene.cluster.put(ELASTICJOBS, obj)
        await scene.hears(of_generation(generation))
    while scene.platform.unfinished:
        slow.set()
        await asyncio.sleep(0)
    assert scene.platform.template_problem is None


Edit = Callable[[Obj], object]
BAD_EDITS: list[Edit] = [
    lambda roles: roles["worker"]["template"]["spec"].update(containers="x"),
    lambda roles: roles.update(ps={"replicas": 1}),
    lambda roles: roles["worker"].pop("template"),
]


def refused(scene: Scene, edit: Edit, *, suspend: bool = False, **worker: Any) -> Obj:
    """Patch in what the API server takes and we do not."""
    obj = scene.job()
    edit(obj["spec"]["replicaSpecs"])
    obj["spec"]["replicaSpecs"]["worker"].update(worker)
    obj["spec"]["suspend"] = suspend
    obj["metadata"]["generation"] = obj["metadata"].get("generation", 1) + 1
    scene.cluster.put(ELASTICJOBS, obj)
    return obj


async def test_an_allocation_in_the_status_is_told_once(scene: Scene) -> None:
    await scene.platform.get_job()
    for nodes in (1, 1, 0):
        obj = scene.job()
        status = (obj.get("status") or {}) | {"allocation": {"nodes": nodes, "reason": "r"}}
        scene.cluster.put(ELASTICJOBS, obj | {"status": status})
    first = await scene.hears(lambda e: isinstance(e, JobChanged) and e.job.most_nodes == 1)
    last = await scene.hears(lambda e: isinstance(e, JobChanged) and e.job.most_nodes == 0)
    assert isinstance(first, JobChanged)
    assert isinstance(last, JobChanged)
    assert last.job.rests
    assert last.job.metadata.generation == first.job.metadata.generation
    assert last.job.spec == first.job.spec


async def test_pods_go_where_a_queue_has_given_room_and_leave_when_it_is_taken(
    scene: Scene,
) -> None:
    def give(**places: int) -> None:
        listed = [{"name": k, "nodes": n, "nodeSelector": {"pool": k}} for k, n in places.items()]
        allocation = {"nodes": sum(places.values()), "reason": "r", "placements": listed}
        obj = scene.job()
        scene.cluster.put(
            ELASTICJOBS, obj | {"status": (obj.get("status") or {}) | {"allocation": allocation}}
        )

    obj = scene.job()
    obj["spec"]["replicaSpecs"]["worker"] |= {"replicas": 4, "minReplicas": 1}
    scene.cluster.put(ELASTICJOBS, obj)
    give(spot=2, stable=2)
    await scene.platform.get_job()
    nodes = [NodeId(f"n{number}") for number in range(4)]
    for node in nodes:
        await scene.platform.create_node(node)
        scene.runs(node)
    pods = [scene.pod(node) for node in nodes]
    pools = [pod["spec"]["nodeSelector"]["pool"] for pod in pods]
    assert pools == ["spot", "spot", "stable", "stable"]
    assert [pod["metadata"]["labels"][LABEL_PLACEMENT] for pod in pods] == pools
    give(spot=1, stable=2)
    left = await scene.hears(lambda e: isinstance(e, NodeSeen) and bool(e.leaving))
    assert isinstance(left, NodeSeen)
    assert left.node == nodes[1], "the newest where there is one too many"
    give(stable=2)
    await scene.hears_of(NodeSeen, nodes[0])
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.node == nodes[0] and bool(e.leaving))
    await scene.until(lambda: not scene.platform.unfinished)
    assert all("deletionTimestamp" not in scene.pod(node)["metadata"] for node in nodes[2:])


@pytest.mark.parametrize("edit", BAD_EDITS)
async def test_under_an_edit_that_is_refused_suspend_and_scale_are_obeyed(
    scene: Scene, edit: Edit, caplog: pytest.LogCaptureFixture
) -> None:
    before = await scene.platform.get_job()
    refused(scene, edit)
    refused(scene, lambda _: None, suspend=True, replicas=5, minReplicas=3)
    told = await scene.hears(lambda e: isinstance(e, JobChanged) and e.job.spec.suspend)
    assert isinstance(told, JobChanged)
    assert (told.job.worker.replicas, told.job.worker.minimum) == (5, 3)
    assert told.job.worker.template == before.worker.template
    assert told.job.metadata.generation == 3
    await scene.platform.publish(status())  # a status is no edit: it is not told again
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    logged = [r.__dict__["generation"] for r in caplog.records if r.msg == "spec_refused"]
    assert logged == sorted(set(logged))
    assert logged[-1] == 3


async def test_of_an_edit_that_is_refused_numbers_that_do_not_fit_are_left(scene: Scene) -> None:
    refused(scene, BAD_EDITS[0], replicas=2, minReplicas=9)
    told = await scene.hears(lambda e: isinstance(e, JobChanged))
    assert isinstance(told, JobChanged)
    assert (told.job.worker.replicas, told.job.worker.minimum) == (2, 1)


@pytest.mark.parametrize("edit", BAD_EDITS)
async def test_a_new_master_goes_on_with_the_spec_that_was_accepted(
    scene: Scene, edit: Edit
) -> None:
    accepted = await scene.platform.get_job()
    refused(scene, edit, suspend=True)
    later = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    job = await later.get_job(accepted)
    assert job.spec.suspend
    assert job.worker == accepted.worker


async def test_a_master_that_starts_under_a_bad_edit_reads_its_journal_and_is_ready(
    scene: Scene, tmp_path: Path
) -> None:
    await runs(scene, tmp_path, lambda loop: loop.journal_writes)
    for edit in BAD_EDITS:
        refused(scene, edit)
    # no assert: runs() waits, and fails if it was in vain
    await runs(scene, tmp_path, lambda loop: loop.ready and scene.cluster.one(PODS, "x-n1"))


async def runs(scene: Scene, tmp_path: Path, until: Callable[[Loop], object]) -> Loop:
    """A master's whole life, up to this."""
    platform = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), Rules())
    async with working(loop) as running:
        await scene.until(lambda: running.done() or until(loop))
        assert not running.done()
    return loop


async def test_a_journal_that_was_put_back_begins_no_term_that_was_told_before(
    scene: Scene, tmp_path: Path
) -> None:
    await runs(scene, tmp_path, lambda loop: loop.journal_writes)
    await scene.platform.publish(status(term=9))
    now = (await runs(scene, tmp_path, Loop.status)).status()
    assert now is not None
    assert now.term == 10


async def test_a_spec_that_cannot_be_used_does_not_end_a_master_that_starts(scene: Scene) -> None:
    obj = scene.job()
    obj["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"] = []
    scene.cluster.put(ELASTICJOBS, obj)
    with pytest.raises(TransientError, match="cannot be used"):
        await scene.platform.get_job()


async def test_what_earlier_masters_used_is_remembered(scene: Scene) -> None:
    nodes = [NodeStatus(id="n7", phase=NodePhase.LIVE, role=NodeRole.MEMBER, incarnation=1)]
    events = [JobEvent(id=41, at=1e9, reason="R", message="m")]
    await scene.platform.publish(status(term=5, round=12, nodes=nodes, events=events))
    later = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    await later.get_job()
    assert later.known == PriorMasterState(term=5, round=12, node=7, event=41)


async def test_what_was_told_before_is_not_told_again(scene: Scene) -> None:
    """Kubernetes forgets its events after an hour; alerts would go off anew with each master."""
    events = [JobEvent(id=n, at=1e9, reason="NodeLost", message="m") for n in range(1, 4)]
    await scene.platform.publish(status(term=5, events=events))
    await scene.until(lambda: len(scene.cluster.all(EVENTS)) == 3)
    for event in scene.cluster.all(EVENTS):
        scene.cluster.remove(EVENTS, event["metadata"]["name"])
    later = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    await later.get_job()
    events += [JobEvent(id=4, at=1e9, reason="MasterStarted", message="m")]
    await later.publish(status(term=6, events=events))
    await scene.until(lambda: not later.unfinished)
    told = [event["reason"] for event in scene.cluster.all(EVENTS)]
    assert told == ["MasterStarted"]


async def test_an_api_server_that_is_away_is_for_the_caller_to_wait_for(scene: Scene) -> None:
    scene.cluster.fail(500, method="POST", path="/pods")
    with pytest.raises(TransientError):
        await scene.platform.create_node(N0)
    await scene.platform.create_node(N0)


@pytest.mark.parametrize(
    "timing",
    [
        PlatformTiming(query_after_s=0.2, progress_s=0.1),
        PlatformTiming(progress_s=3600.0, silence_s=0.3),  # where there are many jobs
    ],
)
async def test_a_server_of_which_nothing_is_heard_is_asked(scene: Scene) -> None:
    """Only so is a cut noticed: a watch that is cut off says nothing, like one without news."""
    scene.cluster.stalled = True
    before = scene.cluster.gets("elasticjobs/x")
    await scene.until(lambda: scene.cluster.gets("elasticjobs/x") > before)
    assert scene.platform.silent_s() < WITHIN_S
    gate = scene.cluster.hold("/")
    await scene.until(lambda: scene.platform.silent_s() > 2.5)
    gate.set()
    await scene.until(lambda: scene.platform.silent_s() < 1)


async def test_many_nodes_bother_a_server_in_trouble_no_more_than_a_few_do(scene: Scene) -> None:
    """It says when to come back: those whose turn it is wait for that, the others for them."""
    storm = scene.cluster.fail(429, "TooManyRequests", path="/pods", method="POST", times=1000,
                               retry_after=600)  # fmt: skip
    nodes = [NodeId(f"n{i}") for i in range(100)]
    asking = [asyncio.create_task(scene.platform.create_node(node)) for node in nodes]

    def asked() -> int:
        mine = (
            c for c in scene.cluster.calls if c.path.endswith("/pods") and "dryRun" not in c.query
        )
        return sum(c.method == "POST" for c in mine)

    await scene.until(lambda: asked() >= pod_calls.CALLS)
    for _ in range(100):  # each takes as long as one of those
        await scene.kube.get(ELASTICJOBS, "x", "default")
    assert asked() == pod_calls.CALLS
    storm.times = 0
    for task in asking:
        task.cancel()


async def test_many_pods_over_a_quota_are_asked_for_by_a_few(scene: Scene) -> None:
    words = 'pods "x" is forbidden: exceeded quota: q, requested: pods=1'
    quota = scene.cluster.fail(403, "Forbidden", words, method="POST", path="/pods", times=100_000)
    nodes = [NodeId(f"n{i}") for i in range(100)]
    began = asyncio.get_running_loop().time()
    asking = [asyncio.create_task(scene.platform.create_node(node)) for node in nodes]

    def asked() -> int:
        return 100_000 - quota.times

    await scene.until(lambda: asked() >= len(nodes) + 2 * creator.ASKING_AGAIN)
    turns = (asyncio.get_running_loop().time() - began) / (pod_calls.BACKOFF.first_s / 2)
    assert asked() <= len(nodes) + creator.ASKING_AGAIN * (turns + 1)
    quota.times = 0
    async with asyncio.timeout(WITHIN_S):  # whoever is made tells the others
        await asyncio.gather(*asking)


@TRUSTED
async def test_a_right_to_delete_that_was_taken_away_is_a_condition(scene: Scene) -> None:
    words = 'pods "x-n0" is forbidden: User "u" cannot delete resource "pods"'
    await scene.platform.create_node(N0)
    fault = scene.cluster.fail(403, "Forbidden", words, method="DELETE", path="/pods", times=1000)
    with pytest.raises(TransientError):
        await scene.platform.delete_node(N0, 0.0)
    await scene.platform.publish(status())
    denied = scene.conditions()["PermissionDenied"]
    assert (denied["status"], words in denied["message"]) == ("True", True)
    fault.times = 0
    await scene.platform.delete_node(N0, 0.0)
    await scene.platform.publish(status())
    assert scene.conditions()["PermissionDenied"]["status"] == "False"


async def test_logs_that_are_slow_to_read_hold_up_no_other_news(scene: Scene) -> None:
    nodes = [NodeId(f"n{i}") for i in range(30)]
    await asyncio.gather(*(scene.platform.create_node(node) for node in nodes))
    gate = scene.cluster.hold("/log")
    for node in nodes:
        scene.ends(node, 1)
    async with asyncio.timeout(WITHIN_S):  # the first one's log takes 3 s, and so would each
        for node in nodes:
            await scene.hears_of(NodeEnded, node)
    # no assert: the time limit fails if they do
    gate.set()


async def test_a_status_that_is_refused_waits_as_long_as_it_is_told(
    scene: Scene, tmp_path: Path
) -> None:
    scene.cluster.fail(429, "TooManyRequests", path="/status", times=1000, retry_after=600)
    platform = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), Rules(), publish_s=0.01)
    async with working(loop):
        await scene.until(lambda: writes(scene))
        for number in range(100):
            loop.add_events([NodeSeen(NodeId("n0"), near=True, message=f"{number}")])
            await scene.kube.get(ELASTICJOBS, "x", "default")
        assert writes(scene) == 1


async def test_callers_by_ever_new_names_leave_nothing_in_the_master(
    scene: Scene, tmp_path: Path
) -> None:
    platform = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), Rules())
    async with working(loop):
        await scene.until(lambda: loop.ready)
        refused: list[object] = []
        for number in range(100):
            stranger = SimAgent(NodeId(f"stranger{number}"))
            loop.exchange(stranger.node, stranger.report(), refused.append)
        await scene.until(lambda: len(refused) == 100)
        assert {type(answer) for answer in refused} == {SupersededError}
        assert not [node for node in loop._mailboxes if node.startswith("stranger")]


async def test_an_end_that_was_not_published_yet_is_the_last_word_of_a_master(
    scene: Scene, tmp_path: Path
) -> None:
    platform = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), Rules(), publish_s=3600.0)
    async with working(loop):
        await scene.until(lambda: writes(scene))
        async with asyncio.timeout(WITHIN_S):
            while (status := loop.status()) is None or status.nodes[0].message != "something new":
                # Again and again: its Pod is seen meanwhile, and nothing is wrong with that.
                loop.add_events([NodeSeen(N0, near=True, message="something new")])
                await asyncio.sleep(0.001)
        await loop.publish_end(WITHIN_S)
        assert writes(scene) == 1, (
            "the job goes on, and another master may be speaking of it already"
        )
        loop.add_events([JobStopped()])
        async with asyncio.timeout(WITHIN_S):
            while (status := loop.status()) is None or not status.phase.ended:
                await asyncio.sleep(0.001)
        assert writes(scene) == 1
        for _ in range(2):
            await loop.publish_end(WITHIN_S)
            assert writes(scene) == 2


def test_masters_that_fail_together_do_not_come_back_together() -> None:
    waits = [pause_s(3) for _ in range(100)]
    assert RETRY.longest_s(3) / 2 <= min(waits) < max(waits) <= RETRY.longest_s(3)
    assert pause_s(1000) <= RETRY.most_s, "nor do they ever give up"
    waits = [pause_s(0, ThrottledError("later", retry_after=7.0)) for _ in range(100)]
    assert 7.0 <= min(waits) < max(waits) < 9.0, "nor those who were all told the same"


async def test_a_pod_that_ends_within_its_grace_is_kept_for_its_log(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    gone = asyncio.create_task(scene.platform.delete_node(N0, 60.0))
    scene.ends(N0, 0, "Succeeded")
    await asyncio.wait_for(gone, WITHIN_S)
    assert scene.cluster.one(PODS, "x-n0") is not None


async def test_a_pod_that_does_not_end_is_deleted(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    await scene.platform.delete_node(N0, 0.2)
    deletes = [c for c in scene.cluster.calls if c.method == "DELETE"]
    assert [c.body["gracePeriodSeconds"] for c in deletes] == [1]
    assert (
        deletes[0].body["preconditions"] == {"uid": scene.pod()["metadata"]["uid"]}
        if (scene.cluster.one(PODS, "x-n0"))
        else True
    )


async def test_a_pod_that_its_host_refuses_is_a_condition_until_one_runs(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    obj = scene.pod()
    obj["spec"]["nodeName"] = "gpu-1"
    words = "Pod was rejected: Allocate failed due to no healthy devices present"
    obj["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": words}
    scene.cluster.put(PODS, obj)
    told = await scene.hears_of(NodeEnded, N0)
    assert (told.free, told.refused_by) == (True, "gpu-1")
    await scene.platform.publish(status(phase=JobPhase.PENDING))
    condition = scene.conditions()["PodsRefused"]
    assert condition["status"] == "True"
    assert words in condition["message"]
    assert condition["message"].startswith("n0 on gpu-1: ")
    await scene.platform.create_node(N1)
    scene.runs(N1)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    await scene.platform.publish(status())
    assert scene.conditions()["PodsRefused"]["status"] == "False"


# --- what holds resources yet ---


def agent_ends(scene: Scene, node: NodeId = N0, **more: Any) -> None:
    """Its main container has ended; of the others ``more`` tells."""
    obj = scene.pod(node)
    main = {"name": "main", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    others = more.pop("containers", ["proxy"])
    obj["spec"] |= {
        "nodeName": f"host-{node}",
        "terminationGracePeriodSeconds": more.pop("grace", 7),
    }
    obj["spec"]["containers"] = [{"name": "main"}, *({"name": name} for name in others)]
    still = [{"name": name, "state": {"running": {}}} for name in others]
    obj["status"] = {"phase": "Running", "containerStatuses": [*still, main], **more}
    scene.cluster.put(PODS, obj)


def holding(scene: Scene) -> list[str]:
    """Pods that hold resources, as schedulers and quotas count."""
    found = scene.cluster.all(PODS)
    over = ("Succeeded", "Failed")
    return [p["metadata"]["name"] for p in found if p["status"].get("phase") not in over]


def deletions(scene: Scene) -> list[Obj]:
    return [c.body for c in scene.cluster.calls if c.method == "DELETE"]


def kubelet_ends(scene: Scene, node: NodeId = N0) -> None:
    """It kills what is left of a Pod that was deleted."""
    obj = scene.pod(node)
    assert obj["metadata"]["deletionTimestamp"]
    if obj["metadata"].get("finalizers"):
        scene.cluster.put(PODS, {**obj, "status": {"phase": "Failed"}})
    else:
        scene.cluster.remove(PODS, f"x-{node}")


@SOON
@pytest.mark.parametrize("others", [["proxy"], ["proxy", "logs", "exporter"]])
@pytest.mark.parametrize("finalizers", [[], ["example.com/theirs"]])
@pytest.mark.parametrize("asked", [True, False])
async def test_a_pod_whose_sidecars_run_on_is_deleted_once_its_agent_has_ended(
    scene: Scene, others: list[str], finalizers: list[str], asked: bool
) -> None:
    await scene.platform.create_node(N0)
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    meta = scene.pod()["metadata"] | {"finalizers": finalizers}
    scene.cluster.put(PODS, scene.pod() | {"metadata": meta})
    deletion = asyncio.create_task(scene.platform.delete_node(N0, 60.0)) if asked else None
    agent_ends(scene, containers=others)
    await scene.hears_of(NodeEnded, N0)
    await scene.until(lambda: "deletionTimestamp" in scene.pod()["metadata"])
    if deletion is not None:
        await asyncio.wait_for(deletion, WITHIN_S)
    (body,) = deletions(scene)
    assert body["gracePeriodSeconds"] == 7, "sidecars have the template's grace"
    assert holding(scene) == ["x-n0"]
    kubelet_ends(scene)
    assert holding(scene) == []
    await scene.until(lambda: not scene.platform.unfinished_ends)
    assert len(deletions(scene)) == 1


@SOON
async def test_a_native_sidecar_is_for_its_kubelet_to_end(scene: Scene) -> None:
    """It ends them once all others have ended; the Pod stays for its log."""
    await scene.platform.create_node(N0)
    native = {"name": "proxy", "state": {"running": {}}}
    agent_ends(scene, containers=[], grace=1, initContainerStatuses=[native])
    await scene.hears_of(NodeEnded, N0)
    assert scene.platform.unfinished_ends
    scene.ends(N0, 0, "Succeeded")
    await scene.until(lambda: not scene.platform.unfinished_ends)
    assert not deletions(scene)
    assert holding(scene) == []


@SOON
async def test_a_native_sidecar_that_is_not_ended_is_deleted_after_its_grace(
    scene: Scene,
) -> None:
    await scene.platform.create_node(N0)
    agent_ends(scene, containers=[], grace=0.2)
    await scene.until(lambda: "deletionTimestamp" in scene.pod()["metadata"])


async def test_a_new_master_deletes_what_an_old_one_has_left(tmp_path: Path) -> None:
    """Its agent has ended, so no journal tells of the node."""
    async with fake_cluster(tmp_path) as (cluster, kube):
        wish = document()
        wish["spec"]["suspend"] = True
        job = cluster.put(ELASTICJOBS, wish)
        site = PodContext(job["metadata"]["uid"], "10.0.0.1:50001")
        timing = PlatformTiming(linger_s=0.2)
        platform = OpenPlatform(kube, "default", "x", site, timing=timing)
        scene = Scene(cluster, kube, platform, site.uid, [], asyncio.Event())
        cluster.put(PODS, pods.pod(ElasticJob.read(job), N0, site))
        agent_ends(scene)
        async with working(Loop(platform, FileJournalStore(tmp_path / "journal"), Rules())):
            await scene.until(lambda: "deletionTimestamp" in scene.pod()["metadata"])


@SOON
async def test_a_pod_on_a_lost_host_is_a_condition_until_it_has_gone(
    scene: Scene,
) -> None:
    """It was deleted, and no kubelet is there to end it."""
    await scene.platform.create_node(N0)
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    await scene.platform.delete_node(N0, 0.1)
    await scene.until(lambda: scene.platform.table.overdue())
    await scene.platform.publish(status())
    told = scene.conditions()["PodNotEnding"]
    assert told["status"] == "True"
    assert "x-n0" in told["message"]
    assert "host-n0" in told["message"]
    await scene.platform.publish(status(phase=JobPhase.SUCCEEDED))
    assert scene.conditions()["PodNotEnding"]["status"] == "False", "the operator tells it then"
    scene.cluster.remove(PODS, "x-n0")
    await scene.until(lambda: not scene.platform.table.overdue())
    await scene.platform.publish(status())
    assert scene.conditions()["PodNotEnding"]["status"] == "False"


@SOON
async def test_a_sidecar_is_ended_though_the_right_to_is_missing_for_a_while(
    scene: Scene,
) -> None:
    scene.cluster.fail(403, "Forbidden", "may not", times=1, method="DELETE")
    await scene.platform.create_node(N0)
    agent_ends(scene)
    await scene.until(lambda: "deletionTimestamp" in scene.pod()["metadata"])
    scene.cluster.remove(PODS, "x-n0")
    await scene.until(lambda: not scene.platform.unfinished_ends)
    assert not scene.platform.missing_rights


@SOON
async def test_pods_that_their_job_leaves_behind_keep_their_sidecars(
    scene: Scene,
) -> None:
    await scene.platform.create_node(N0)
    obj = scene.job()
    obj["metadata"] |= {"finalizers": ["orphan"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    scene.cluster.put(ELASTICJOBS, obj)
    await scene.until(lambda: scene.platform.jobs.orphaned)
    agent_ends(scene)
    await scene.hears_of(NodeEnded, N0)
    await scene.until(lambda: not scene.platform.unfinished_ends)
    assert not deletions(scene)


async def test_a_node_that_never_had_a_pod_is_told_as_ended(scene: Scene) -> None:
    await scene.platform.delete_node(N1, 30.0)
    ended = await scene.hears_of(NodeEnded, N1)
    assert ended.free


async def test_a_deletion_waits_for_the_creation_that_is_on_its_way(scene: Scene) -> None:
    await scene.until(lambda: not scene.platform.unfinished)  # it tries the template by a POST
    gate = scene.cluster.hold("/pods", method="POST")
    asked = asyncio.create_task(scene.platform.create_node(N0))
    await scene.until(
        lambda: any(c.method == "POST" and "dryRun" not in c.query for c in scene.cluster.calls)
    )
    asked.cancel()
    deletion = asyncio.create_task(scene.platform.delete_node(N0, 0.0))
    for _ in range(20):  # each takes as long as one that does not wait takes to look for the Pod
        await scene.kube.get(ELASTICJOBS, "x", "default")
    assert not deletion.done()
    assert scene.cluster.gets("/pods/x-n0") == 0
    gate.set()
    await asyncio.wait_for(deletion, WITHIN_S)
    assert scene.cluster.one(PODS, "x-n0") is None


async def test_a_creation_that_fails_after_its_task_was_cancelled_is_reported_nowhere(
    scene: Scene,
) -> None:
    reports: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reports.append(context["message"]))
    await scene.until(lambda: not scene.platform.unfinished)  # it tries the template by a POST
    gate = scene.cluster.hold("/pods", method="POST")
    asked = asyncio.create_task(scene.platform.create_node(N0))
    await scene.until(
        lambda: any(c.method == "POST" and "dryRun" not in c.query for c in scene.cluster.calls)
    )
    asked.cancel()
    deletion = asyncio.create_task(scene.platform.delete_node(N0, 0.0))
    scene.cluster.fail(500, "InternalError", method="POST", path="/pods")
    gate.set()
    await asyncio.wait_for(deletion, WITHIN_S)
    assert asked.cancelled()
    del asked
    gc.collect()
    assert reports == []


async def test_deleted_pods_are_free(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    scene.cluster.remove(PODS, "x-n0")
    ended = await scene.hears_of(NodeEnded, N0)
    assert ended.free


async def test_only_the_newest_ended_pods_are_kept(scene: Scene) -> None:
    last = ENDED_KEPT + 2
    for number in range(last + 1):
        node = NodeId(f"n{number}")
        await scene.platform.create_node(node)
        obj = scene.pod(node)
        obj["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{number:02}Z"
        scene.cluster.put(PODS, obj)
        if number < last:
            scene.ends(node, 0, "Succeeded")
            await scene.hears_of(NodeEnded, node)
    kept = {f"x-n{number}" for number in range(2, last + 1)}
    await scene.until(lambda: {p["metadata"]["name"] for p in scene.cluster.all(PODS)} == kept)


# --- the job ---


async def test_a_new_wish_is_told_once(scene: Scene) -> None:
    obj = scene.job()
    obj["spec"]["replicaSpecs"]["worker"]["replicas"] = 5
    obj["metadata"]["generation"] = obj["metadata"].get("generation", 1) + 1
    scene.cluster.put(ELASTICJOBS, obj)
    event = await scene.hears(lambda e: isinstance(e, JobChanged))
    assert isinstance(event, JobChanged)
    assert event.job.worker.replicas == 5
    await scene.platform.publish(status())
    scene.cluster.put(PODS, {"metadata": {"name": "other"}})
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    assert len([e for e in scene.said if isinstance(e, JobChanged)]) == 1, "a status is no wish"


async def test_a_deadline_ends_the_job_in_the_operators_words(scene: Scene) -> None:
    condition = {"type": "DeadlineExceeded", "status": "True", "message": "60 s are over"}
    scene.cluster.put(ELASTICJOBS, {**scene.job(), "status": {"conditions": [condition]}})
    event = await scene.hears(lambda e: isinstance(e, JobStopped))
    assert event == JobStopped("60 s are over", EventReason.DEADLINE_EXCEEDED)


async def test_a_deleted_job_stops_and_makes_no_more_pods(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    scene.cluster.remove(PODS, "x-n0")
    scene.cluster.remove(ELASTICJOBS, "x")
    await scene.hears(lambda e: isinstance(e, JobStopped))
    asked = asyncio.create_task(scene.platform.create_node(N1))
    refused = await scene.hears_of(NodeSeen, N1)
    assert "was deleted" in refused.message
    assert not scene.cluster.all(PODS)
    asked.cancel()


async def test_pods_that_go_first_are_not_replaced_while_their_job_goes(scene: Scene) -> None:
    """Foreground deletion: the two watches may bring the news in either order."""
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    scene.cluster.fail(500, times=1000, path="elasticjobs", watch=True)
    scene.cluster.cut()
    scene.cluster.remove(PODS, "x-n0")
    await scene.hears_of(NodeEnded, N0)
    obj = scene.job()
    obj["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["foreground"]}
    scene.cluster.put(ELASTICJOBS, obj)
    asked = asyncio.create_task(scene.platform.create_node(N1))
    await scene.hears(lambda e: isinstance(e, JobStopped))
    assert scene.cluster.one(PODS, "x-n1") is None
    asked.cancel()


async def test_many_pods_that_go_at_once_are_one_question_after_their_job(scene: Scene) -> None:
    nodes = [NodeId(f"n{i}") for i in range(20)]
    await asyncio.gather(*(scene.platform.create_node(node) for node in nodes))
    for node in nodes:
        scene.cluster.remove(PODS, f"x-{node}")
    for node in nodes:
        await scene.hears_of(NodeEnded, node)
    new = [NodeId(f"n{i}") for i in range(20, 40)]
    before = len(scene.cluster.calls)
    await asyncio.gather(*(scene.platform.create_node(node) for node in new))
    asked = [c for c in scene.cluster.calls[before:] if c.path.endswith("/elasticjobs/x")]
    assert len(asked) == 1


async def test_a_job_that_leaves_its_pods_behind_goes_on(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    obj = scene.job()
    obj["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["orphan"]}
    scene.cluster.put(ELASTICJOBS, obj)
    left = scene.pod()
    del left["metadata"]["ownerReferences"]
    scene.cluster.put(PODS, left)
    scene.cluster.remove(ELASTICJOBS, "x")
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    assert not [e for e in scene.said if isinstance(e, JobStopped | NodeEnded)]
    await scene.platform.publish(status())
    assert scene.cluster.one(ELASTICJOBS, "x") is None


async def test_a_job_that_leaves_its_pods_behind_while_nobody_looks_goes_on(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    await scene.hears_of(NodeSeen, N0)
    away = scene.cluster.fail(500, times=1000, path="elasticjobs")
    scene.cluster.cut()
    left = scene.pod()
    del left["metadata"]["ownerReferences"]
    scene.cluster.put(PODS, left)
    scene.cluster.remove(ELASTICJOBS, "x")
    scene.cluster.compact()
    before = scene.cluster.gets("/elasticjobs")
    away.times = 0
    await scene.until(lambda: scene.cluster.gets("/elasticjobs") > before + 1)  # a list, a watch
    scene.runs(N0)
    await scene.hears(lambda e: isinstance(e, NodeSeen) and e.runs)
    assert not [e for e in scene.said if isinstance(e, JobStopped | NodeEnded)]


async def test_another_job_of_the_same_name_is_not_ours(scene: Scene) -> None:
    scene.cluster.remove(ELASTICJOBS, "x")
    scene.cluster.put(ELASTICJOBS, {**document(9), "metadata": {"name": "x", "uid": "new"}})
    await scene.hears(lambda e: isinstance(e, JobStopped))
    with pytest.raises(TransientError, match="another ElasticJob"):
        await scene.platform.get_job()
    assert not [e for e in scene.said if isinstance(e, JobChanged)]


# --- what is published ---


async def test_the_status_is_written_as_ours(scene: Scene) -> None:
    progress = Progress(
        step=40,
        total=100,
        started_at_step=1,
        first_step_after_s=0.5,
        metrics={"loss": 0.5},
    )
    condition = Condition(
        type="Running", status="True", reason="Running", message="m", last_transition_time=1e9
    )
    lost = GoodputStatus(wall_s=float("nan"), seconds={TimeBucket.STANDSTILL: 0.5})
    await scene.platform.publish(status(progress=progress, conditions=[condition], goodput=lost))
    written = scene.job()["status"]
    assert written["replicas"] == 2
    assert written["selector"].startswith("elasticjob.dlrover/name=x,")
    assert written["training"]["progress"]["startedAtStep"] == 1
    assert written["training"]["progress"]["metrics"] == {"loss": 0.5}
    assert written["training"]["goodput"] == {"seconds": {"standstill": 0.5}}
    assert written["training"]["summary"]["ready"] == "2/2"
    assert "publishedAt" not in written["training"]
    assert scene.conditions()["Running"]["lastTransitionTime"] == "2001-09-09T01:46:40Z"


def writes(scene: Scene) -> int:
    return len([c for c in scene.cluster.calls if c.method == "PATCH"])


async def test_what_says_nothing_new_is_not_written(scene: Scene) -> None:
    await scene.platform.publish(status())
    await scene.platform.publish(status(published_at=1.6e9))
    step = Progress(step=1, started_at_step=1, first_step_after_s=0.5)
    await scene.platform.publish(status(progress=step))
    assert writes(scene) == 1, "progress alone waits"
    await scene.platform.publish(status(progress=step, round=2))
    assert writes(scene) == 2
    site, timing = PodContext(scene.uid, "a:1"), PlatformTiming(progress_s=1e-6)
    often = OpenPlatform(scene.kube, "default", "x", site, timing=timing)
    await often.publish(status(progress=step, round=2))
    await often.publish(status(progress=step.model_copy(update={"step": 2}), round=2))
    assert writes(scene) == 4


async def test_an_old_master_is_over_once_it_hears_of_a_new_one(scene: Scene) -> None:
    """As long as it answers them, its agents do not look for the other one."""
    other = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    await other.publish(status(term=9, round=7))
    await scene.until(lambda: scene.platform.jobs.newest_term == 9)
    with pytest.raises(SupersededError, match="a master of term 9 has taken over"):
        await scene.platform.publish(status(term=3))
    assert scene.job()["status"]["training"]["round"] == 7


async def test_what_keeps_a_pod_from_running_is_a_warning_event_once(scene: Scene) -> None:
    await scene.platform.create_node(N0)
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    no_place = {"type": "PodScheduled", "status": "False", "message": words}
    scene.change(N0, phase="Pending", conditions=[no_place])
    await scene.hears(lambda e: isinstance(e, NodeSeen) and not e.near)
    await scene.platform.publish(status())
    await scene.until(lambda: scene.cluster.all(EVENTS))
    (event,) = scene.cluster.all(EVENTS)
    assert (event["type"], event["reason"]) == ("Warning", "Unschedulable")
    assert event["message"] == f"n0: {words}"
    assert event["involvedObject"]["uid"] == scene.uid
    later = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    await later.get_job()
    later.table.pods = scene.platform.table.pods
    for term, platform in ((3, scene.platform), (4, later)):
        joined = [JobEvent(id=n, at=1e9, reason="NodeJoined", message="m") for n in range(1, term)]
        await platform.publish(status(events=joined, term=term))
        await scene.until(lambda n=term: len(scene.cluster.all(EVENTS)) == n)  # type: ignore[misc]
    assert scene.conditions()["Unschedulable"]["status"] == "True"
    told = [e["reason"] for e in scene.cluster.all(EVENTS)]
    assert told.count("Unschedulable") == 1


async def test_events_are_told_once_also_by_the_next_master(scene: Scene) -> None:
    events = [
        JobEvent(id=n, at=1e9, reason="NodeLost", message="m" * 2000, type="Warning")
        for n in (1, 2)
    ]
    await scene.platform.publish(status(events=events))
    await scene.until(lambda: len(scene.cluster.all(EVENTS)) == 2)
    later = OpenPlatform(scene.kube, "default", "x", PodContext(scene.uid, "a:1"))
    more = [*events, JobEvent(id=3, at=1e9, reason="RoundFormed", message="m")]
    await later.publish(status(events=more, term=4))
    await scene.until(lambda: len(scene.cluster.all(EVENTS)) == 3)
    told = scene.cluster.all(EVENTS)[0]
    assert told["involvedObject"]["uid"] == scene.uid
    assert len(told["message"]) == 1024
