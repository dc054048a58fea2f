"""Jobs in a Kueue queue: quota covers the Pods, steps come and go, and no base is lost for a step.

Kueue, the master and the kubelets are simulated: each acts when the test says so. The real objects
are in tests/contracts/test_kueue.py.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_operator import kueue
from dlrover_operator.allotment import takes_part
from dlrover_operator.kueue import Changes, Cluster, Flavor, PodUpdates, QueuedPod, Workload, decide
from dlrover_operator.observed import lean_job
from dlrover_operator.queues import Queues
from dlrover_py.protocol import names
from dlrover_py.protocol.job import ElasticJob
from tests.builders import job_file

Obj = dict[str, Any]
NOW = 1.8e9
FLAVORS = {
    "stable": Flavor({"pool": "stable"}, ()),
    "spot": Flavor({"pool": "spot"}, ({"key": "spot", "operator": "Exists"},)),
}
CLUSTER = Cluster(frozenset({("default", "team")}), FLAVORS)


def job(most: int = 4, least: int = 2, queue: str = "team", **worker: Any) -> Obj:
    document = job_file(most, minReplicas=least, **worker)
    labels = {names.LABEL_QUEUE: queue} if queue else {}
    document["metadata"] = {"name": "x", "namespace": "default", "uid": "u-x", "labels": labels}
    return document


@dataclass
class World:
    """One job, Kueue, a master and Pods."""

    job: Obj
    cluster: Cluster = CLUSTER
    workloads: dict[str, Workload] = field(default_factory=dict)
    objects: dict[str, Obj] = field(default_factory=dict)
    read: Obj | None = None
    """The allocation that the master has read last."""
    wanted: int = 0
    """Number of nodes that the master wants."""
    pods: list[str] = field(default_factory=list)
    """Placement of each Pod that holds resources."""
    now: float = NOW
    created: int = 0

    def operate(self) -> Changes:
        """Decide once, and carry it out."""
        views = [QueuedPod(("default", "u-x"), place, True) for place in self.pods]
        changes = decide(lean_job(self.job), self.workloads.values(), views, self.cluster, self.now)
        if changes.allocation is not None:
            written = changes.allocation.model_dump(by_alias=True)
            self.job.setdefault("status", {})["allocation"] = written
        for one in changes.delete:
            del self.workloads[one.name]
        for obj in changes.create:
            self.created += 1
            name = obj["metadata"]["name"]
            assert name not in self.workloads
            meta = obj["metadata"] | {"uid": f"w{self.created}"}
            self.objects[name] = obj | {"metadata": meta}
            self.workloads[name] = Workload.of(self.objects[name])
        return changes

    def admit(self, step: int, *flavors: str) -> None:
        name = f"elasticjob-x-u-x-{step}"
        one = self.workloads[name]
        given = tuple(sorted(flavors or ("stable",)))
        self.workloads[name] = replace(one, reserved=True, admitted=True, flavors=given)

    def evict(self, step: int) -> None:
        name = f"elasticjob-x-u-x-{step}"
        one = self.workloads[name]
        self.workloads[name] = replace(one, admitted=False, evicted=True, why="Preempted")

    def master(self) -> None:
        """Have the master read the allocation."""
        found = ElasticJob.read(self.job)
        self.read = self.job.get("status", {}).get("allocation")
        may = 0 if found.rests or found.allocation is None else found.allocation.nodes
        self.wanted = min(found.worker.replicas, may)

    def publish(self) -> None:
        """Have the master report how many nodes it wants."""
        training: Obj = {"phase": "Running" if self.wanted else "Suspended", "desired": self.wanted}
        training |= {"followedAllocation": (self.read or {}).get("since")}
        self.job.setdefault("status", {})["training"] = training

    def want(self) -> int:
        worker = self.job["spec"]["replicaSpecs"]["worker"]
        return self.wanted + worker.get("standbyReplicas", 0) if self.wanted else 0

    def create_pod(self) -> None:
        """Have the master create a Pod where there is room."""
        places = {p["name"]: p["nodes"] for p in (self.read or {}).get("placements", ())}
        have = Counter(self.pods)
        room = [name for name, nodes in places.items() if have[name] < nodes]
        if len(self.pods) < self.want() and room:
            self.pods.append(room[0])

    def end_pod(self) -> None:
        """Have a Pod end that has no place any more, or is one too many."""
        places = {p["name"]: p["nodes"] for p in (self.read or {}).get("placements", ())}
        have = Counter(self.pods)
        over = [p for p in self.pods if have[p] > places.get(p, 0)]
        if over or len(self.pods) > self.want():
            self.pods.remove(over[0] if over else self.pods[-1])

    def be_silent(self) -> None:
        """Have time pass while the master hears nothing; what it wants was reported."""
        self.publish()
        self.now += kueue.SEEN_S

    def pass_time(self) -> None:
        self.master()
        self.publish()
        self.now += kueue.SEEN_S

    def settle(self) -> None:
        for _ in range(12):
            self.operate()
            self.pass_time()
            for _ in range(8):
                self.create_pod()
                self.end_pod()

    def quota(self) -> Counter[str]:
        found = Counter[str]()
        for one in self.workloads.values():
            if one.reserved:
                found[one.placement] += one.nodes
        return found

    @property
    def nodes(self) -> int:
        return int((self.job.get("status", {}).get("allocation") or {}).get("nodes", -1))

    @property
    def reason(self) -> str:
        return str((self.job.get("status", {}).get("allocation") or {}).get("reason", ""))

    def steps(self) -> list[int]:
        return sorted(one.step for one in self.workloads.values())


def running(most: int = 4, least: int = 2, **worker: Any) -> World:
    """Return a job that has all its nodes."""
    world = World(job(most, least, **worker))
    world.settle()
    world.admit(0)
    world.settle()
    for step in world.steps()[1:]:
        world.admit(step)
    world.settle()
    return world


SCALES: Obj = {"maxReplicas": 8, "autoscale": {"mode": "auto"}}


def admit_all(world: World) -> None:
    """Admit all steps for an hour of decisions."""
    for _ in range(4):
        for one in list(world.workloads.values()):
            if not one.reserved:
                world.admit(one.step)
        world.settle()


def report(world: World, **speed: Any) -> None:
    """Have the master report what it has measured."""
    world.job["status"]["training"]["speed"] = speed


def test_a_job_that_scales_by_itself_holds_no_quota_that_it_does_not_use() -> None:
    """It asks for its replicas, and then for what its measured speeds recommend."""
    world = World(job(2, 2, **SCALES))
    world.settle()
    admit_all(world)
    assert (world.nodes, world.quota().total(), world.steps()) == (2, 2, [0])

    @dataclass
    class Scaled(World):
        target: int = 2
        speed: dict[str, Any] = field(default_factory=dict)

        def master(self) -> None:
            super().master()
            may = (self.read or {}).get("nodes", 0)
            self.wanted = min(self.target, may)

        def publish(self) -> None:
            super().publish()
            if self.speed:
                report(self, **self.speed)

    grows = Scaled(world.job, workloads=world.workloads, objects=world.objects, pods=world.pods)
    grows.speed = {"most": 2, "least": 2}
    grows.settle()
    admit_all(grows)
    assert (grows.nodes, grows.quota().total()) == (4, 4), "twice as many as were measured"
    grows.target = 4
    grows.speed = {"most": 4, "least": 2, "curve": [0.1, 0.0, 0.0]}
    grows.settle()
    admit_all(grows)
    assert (grows.nodes, grows.quota().total()) == (8, 8)
    grows.speed = {"most": 4, "least": 2, "curve": [0.1, 0.1, 0.0]}
    grows.target = 2
    grows.settle()
    assert (grows.nodes, grows.quota().total(), len(grows.pods)) == (2, 2, 2)
    assert grows.reason == "the queue team has admitted 2 nodes"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"objective": "cost"}, 2),
        ({"objective": "cost", "deadline": "2030-01-01T00:00:00Z"}, 4),
        ({"objective": "deadline", "deadline": "2030-01-01T00:00:00Z"}, 4),
        ({"objective": "throughput"}, 8),
    ],
)
def test_a_job_asks_for_the_size_that_its_objective_prefers(
    settings: dict[str, Any], kept: int
) -> None:
    """Further nodes are worth it for the speed alone, and eight nodes have been measured."""
    scales = {"mode": "auto", **settings}
    world = running(8, 2, nodeUnit=2, maxReplicas=32, autoscale=scales)
    admit_all(world)
    assert world.quota().total() == 8

    @dataclass
    class Measured(World):
        def master(self) -> None:
            super().master()
            self.wanted = min(self.wanted, 2)

        def publish(self) -> None:
            super().publish()
            report(self, most=8, least=2, curve=[1.0, 0.2, 0.01])

    measured = Measured(
        world.job, workloads=world.workloads, objects=world.objects, pods=world.pods
    )
    measured.settle()
    admit_all(measured)
    assert (measured.quota().total(), measured.steps()) == (kept, list(range(kept // 2)))


def test_quota_follows_the_given_sizes() -> None:
    worker: Obj = {"maxReplicas": 16, "autoscale": {"mode": "auto", "sizes": [4, 8, 16]}}
    world = World(job(16, 2, **worker))
    world.settle()
    base = world.objects["elasticjob-x-u-x-0"]["spec"]
    assert base["podSets"][0]["count"] == 4, "with two nodes it could not train"
    world.admit(0)
    world.settle()
    assert (world.steps(), world.nodes) == ([0, 1], 4)
    world.admit(1)
    world.settle()
    assert (world.steps(), world.nodes) == ([0, 1, 2], 8)
    assert world.workloads["elasticjob-x-u-x-2"].nodes == 8
    world.admit(2)
    world.settle()
    world.evict(1)
    world.settle()
    assert world.nodes == 8, "12 is no size"


def test_the_base_comes_first_and_steps_follow_with_a_lower_priority() -> None:
    world = World(job(most=6, nodeUnit=2, standbyReplicas=1, priority="7"))
    world.settle()
    assert (world.steps(), world.nodes) == ([0], 0)
    assert world.reason == "held back: waits in the queue team: Kueue has not admitted it yet"
    base = world.objects["elasticjob-x-u-x-0"]["spec"]
    assert (base["queueName"], base["priority"], base["podSets"][0]["count"]) == ("team", 7, 3)
    world.admit(0, "stable")
    world.settle()
    assert (world.steps(), world.nodes, len(world.pods)) == ([0, 1, 2], 2, 3)
    asked = [world.objects[f"elasticjob-x-u-x-{n}"]["spec"] for n in (1, 2)]
    assert [a["podSets"][0]["count"] for a in asked] == [2, 2]
    assert base["priority"] > asked[0]["priority"] > asked[1]["priority"]
    world.admit(2, "spot")
    world.settle()
    places = world.job["status"]["allocation"]["placements"]
    assert world.nodes == 4
    assert Counter(world.pods) == {"stable": 3, "spot": 2}
    assert [p["nodeSelector"] for p in places] == [{"pool": "spot"}, {"pool": "stable"}]
    assert places[0]["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert world.reason == "the queue team has admitted 4 nodes; 2 more nodes wait for quota"


def test_no_step_comes_before_the_base_of_another_job() -> None:
    """Users choose the priority, and quota is shared with those of other namespaces."""
    most = World(job(most=6, priority="400000"))
    least = World(job(most=6, priority="-400000"))
    for world in (most, least):
        world.settle()
    most.admit(0)
    most.settle()
    steps = [one["spec"]["priority"] for n, one in most.objects.items() if not n.endswith("-0")]
    assert max(steps) < least.objects["elasticjob-x-u-x-0"]["spec"]["priority"]


def test_objects_of_another_namespace_are_none_of_the_jobs() -> None:
    """Whoever may write there may name any job as the owner."""
    world = World(job())
    world.settle()
    (own,) = world.objects.values()
    theirs = own | {"metadata": own["metadata"] | {"namespace": "other", "uid": "w9"}}
    world.workloads["theirs"] = Workload.of(theirs)
    world.admit(0)
    pod = {
        "metadata": {
            "name": "p",
            "namespace": "other",
            "ownerReferences": own["metadata"]["ownerReferences"],
        }
    }
    pods = [QueuedPod.of(pod)] * 9
    changes = decide(world.job, world.workloads.values(), pods, CLUSTER, NOW)
    assert changes.allocation is not None
    assert (changes.allocation.nodes, changes.waits) == (2, False)
    assert not decide(world.job, [Workload.of(theirs)], pods, CLUSTER, NOW).delete
    assert decide(world.job, [], pods, CLUSTER, NOW).create, "nothing holds its quota"


def test_a_step_that_is_evicted_costs_its_nodes_and_keeps_its_quota_until_they_are_gone() -> None:
    world = running()
    assert (world.nodes, len(world.pods)) == (4, 4)
    world.evict(1)
    assert world.operate().delete == ()
    assert world.nodes == 3
    world.pass_time()
    assert world.operate().delete == (), "a Pod still holds what was evicted"
    world.end_pod()
    assert [one.step for one in world.operate().delete] == [1]
    world.settle()
    assert (world.nodes, len(world.pods)) == (3, 3)
    assert len(world.steps()) == 3, "the step waits in the queue again"


def test_quota_is_kept_until_the_master_has_read_the_smaller_number() -> None:
    world = running()
    world.pods.pop()  # lost, and about to be replaced
    world.evict(1)
    changes = world.operate()
    assert changes.delete == ()
    assert changes.waits
    world.be_silent()
    assert world.operate().delete == (), "the master still wants four"
    world.pass_time()
    assert [one.step for one in world.operate().delete] == [1]


def test_quota_is_kept_until_the_master_follows_the_allocation_that_takes_it_back() -> None:
    """The number of nodes is the same, so it does not show which allocation the master has read."""
    world = World(job(3, 1))
    for step, flavor in ((0, "stable"), (1, "spot"), (2, "stable")):
        world.settle()
        world.admit(step, flavor)
    world.settle()
    world.job["spec"]["replicaSpecs"]["worker"]["replicas"] = 4
    world.operate()
    world.admit(3, "stable")
    world.operate()
    world.evict(1)
    world.operate()
    world.pods.remove("spot")
    world.be_silent()
    assert world.operate().delete == ()
    world.create_pod()
    assert sorted(world.pods) == ["spot", "stable", "stable"]
    world.settle()
    assert sorted(world.pods) == ["stable"] * 3
    assert not any(w.flavors == ("spot",) for w in world.workloads.values())


def test_quota_is_kept_while_the_master_may_act_on_a_larger_number_that_it_has_read() -> None:
    world = running()
    world.evict(2)
    world.settle()
    (waiting,) = [one.step for one in world.workloads.values() if not one.reserved]
    world.admit(waiting)
    world.operate()
    world.master()  # wants four, and has reported three
    world.evict(waiting)
    assert world.operate().delete == ()
    world.create_pod()
    assert len(world.pods) == 4


def test_a_base_that_is_evicted_suspends_the_job_and_waits_again() -> None:
    world = running()
    before = set(world.workloads.values())
    world.evict(0)
    world.operate()
    assert world.nodes == 0
    assert "Preempted" in world.reason
    assert not world.operate().delete
    world.settle()
    assert (world.pods, world.steps()) == ([], [0])
    assert not set(world.workloads.values()) & before
    world.admit(0)
    world.settle()
    assert world.nodes == 2


@pytest.mark.parametrize("ended", [False, True])
def test_a_job_that_is_suspended_or_ends_gives_its_quota_back_once_its_pods_are_gone(
    ended: bool,
) -> None:
    world = running()
    if ended:
        world.job["status"]["training"] = {"phase": "Succeeded"}
    else:
        world.job["spec"]["suspend"] = True
    world.now += 60
    world.operate()
    assert len(world.workloads) == 3
    world.pods.clear()
    world.job["status"]["training"] = {"phase": "Succeeded" if ended else "Suspended"}
    world.now += 60
    world.operate()
    assert world.workloads == {}
    world.operate()  # forgets the places of a job that is only suspended
    assert world.operate() == Changes()


def test_fewer_replicas_give_back_steps_that_wait_first() -> None:
    world = running(most=6)
    world.evict(2)
    world.settle()
    waiting = {one.step for one in world.workloads.values() if not one.reserved}
    assert len(waiting) == 1
    world.job["spec"]["replicaSpecs"]["worker"]["replicas"] = 5
    world.operate()
    assert world.nodes == 5
    assert not any(one.step in waiting for one in world.workloads.values())


@pytest.mark.parametrize(
    ("cluster", "changes", "words"),
    [
        (Cluster(missing="Kueue: the API is not served"), {}, "Kueue: the API is not served"),
        (CLUSTER, {"labels": {names.LABEL_QUEUE: "taem"}}, "there is no LocalQueue taem in the"),
        (CLUSTER, {"template": True}, "two owners of quota"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_asked_for(
    cluster: Cluster, changes: Obj, words: str
) -> None:
    world = World(job(), cluster)
    if changes.pop("template", False):
        template = world.job["spec"]["replicaSpecs"]["worker"]["template"]
        template["metadata"] = {"labels": {names.LABEL_QUEUE: "team"}}
    world.job["metadata"] |= changes
    world.settle()
    assert (world.workloads, world.nodes) == ({}, 0)
    assert words in world.reason


def test_a_job_keeps_its_nodes_while_kueue_is_away() -> None:
    world = running()
    before = dict(world.workloads)
    world.cluster = Cluster(missing="Kueue: away")
    world.settle()
    assert (world.workloads, world.nodes, world.reason) == (before, 4, "Kueue: away")
    world.cluster = CLUSTER
    world.settle()
    assert world.reason == "the queue team has admitted 4 nodes"


def test_a_flavor_that_is_not_known_yet_starts_no_job_and_ends_none() -> None:
    world = World(job(), replace(CLUSTER, flavors={}))
    world.settle()
    world.admit(0)
    world.settle()
    assert world.reason == "held back: there is no ResourceFlavor of the name stable"
    world.cluster = CLUSTER
    world.settle()
    assert world.nodes == 2
    world.cluster = replace(CLUSTER, flavors={})
    world.settle()
    assert (world.nodes, len(world.pods)) == (2, 2)


@pytest.mark.parametrize(("label", "words"), [("other", "the queue other"), ("", "no queue")])
def test_a_label_that_changes_takes_effect_at_the_next_start(label: str, words: str) -> None:
    world = running()
    world.cluster = replace(CLUSTER, queues=CLUSTER.queues | {("default", "other")})
    world.job["metadata"]["labels"] = {names.LABEL_QUEUE: label} if label else {}
    world.settle()
    assert world.nodes == 4
    assert f"the label now names {words}: suspend and resume" in world.reason
    world.job["spec"]["suspend"] = True
    world.settle()
    assert world.workloads == {}
    world.job["spec"]["suspend"] = False
    world.settle()
    queues = {one.queue for one in world.workloads.values()}
    assert queues == ({"other"} if label else set())


def test_a_job_that_runs_and_is_put_into_a_queue_waits_there() -> None:
    world = World(job())
    world.job["status"] = {"training": {"phase": "Running", "desired": 4}}
    world.wanted = 4
    world.pods = [""] * 4
    world.operate()
    assert (world.nodes, world.workloads) == (0, {})
    world.settle()
    assert world.steps() == [0]


def test_a_request_that_changes_while_it_waits_is_made_again() -> None:
    world = World(job())
    world.settle()
    worker = world.job["spec"]["replicaSpecs"]["worker"]
    worker["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2"}}
    world.settle()
    sent = world.objects["elasticjob-x-u-x-0"]["spec"]["podSets"][0]["template"]["spec"]
    assert sent["containers"] == [{"name": "main", "resources": {"requests": {"cpu": "2"}}}]
    assert world.created == 2


def test_no_job_has_two_managers() -> None:
    assert not takes_part(job())
    assert takes_part(job(queue=""))
    foreign = job()
    foreign["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert decide(foreign, (), (), CLUSTER, NOW) == Changes()


def test_flavors_of_several_resources_are_one_place_with_a_short_name() -> None:
    both = Workload("w", "u", ("default", "o"), 0, 1, "q", "r", flavors=("a" * 40, "b" * 40))
    assert both.placement == "a" * 40 + "." + "b" * 9 + "-9824946b940f", "as in earlier operators"
    assert len(both.own_placement) == 63
    assert both.own_placement != replace(both, step=1).own_placement
    assert both.placement != replace(both, flavors=("a" * 40, "c" * 40)).placement


CHECK = "autoscaling.x-k8s.io/consume-provisioning-request"


def test_what_admission_checks_say_of_pods_reaches_those_of_their_workload_alone() -> None:
    world = running()
    world.job["spec"]["replicaSpecs"]["worker"]["replicas"] = 5
    world.settle()
    name = "elasticjob-x-u-x-3"
    check = {
        "name": "provisioned",
        "state": "Ready",
        "podSetUpdates": [
            {
                "name": "main",
                "annotations": {CHECK: "request-3"},
                "labels": {"cost": "team"},
                "nodeSelector": {"made-by": "request-3"},
                "tolerations": [{"key": "new", "operator": "Exists"}],
            }
        ],
    }
    status = {
        "admission": {"podSetAssignments": [{"name": "main", "flavors": {"cpu": "stable"}}]},
        "conditions": [{"type": "Admitted", "status": "True"}],
        "admissionChecks": [check, check | {"name": "other", "state": "Pending"}],
    }
    world.workloads[name] = Workload.of(world.objects[name] | {"status": status})
    world.settle()
    plain, updated = world.job["status"]["allocation"]["placements"]
    assert (plain["name"], plain["nodes"]) == ("stable", 4)
    assert plain["annotations"] == {}
    assert updated["name"] == "stable_3"
    assert updated["nodes"] == 1
    assert updated["nodeSelector"] == {"pool": "stable", "made-by": "request-3"}
    assert updated["annotations"] == {CHECK: "request-3"}
    assert updated["labels"] == {"cost": "team"}
    assert updated["tolerations"] == [{"key": "new", "operator": "Exists"}]
    pending = Workload.of(
        world.objects[name] | {"status": status | {"admissionChecks": [check | {"state": "Retry"}]}}
    )
    assert pending.updates == PodUpdates()


def told(world: World, *steps: int, request: str) -> None:
    """Have the checks of Workloads say something of their Pods, other than of each other's."""
    for step in steps:
        name = f"elasticjob-x-u-x-{step}"
        updates = PodUpdates(annotations={CHECK: f"{request}-{step}"})
        world.workloads[name] = replace(world.workloads[name], updates=updates)


def test_pods_that_run_stay_whatever_checks_say_later() -> None:
    world = running()
    before = list(world.pods)
    assert before == ["stable"] * 4
    told(world, 0, 1, 2, request="a")  # such as at the upgrade of an operator that did not listen
    world.settle()
    (place,) = world.job["status"]["allocation"]["placements"]
    assert (place["name"], place["nodes"], place["annotations"]) == ("stable", 4, {})
    assert world.pods == before
    world.job["spec"]["replicaSpecs"]["worker"]["replicas"] = 5
    world.settle()
    world.admit(3)
    told(world, 3, request="a")
    world.settle()
    assert world.pods == [*before, "stable_3"]
    for request, number in (("b", "b-3"), ("", "-3")):
        told(world, 0, 1, 2, 3, request=request)
        world.settle()
        own = world.job["status"]["allocation"]["placements"][1]
        assert (own["name"], own["annotations"]) == ("stable_3", {CHECK: number})
        assert world.pods == [*before, "stable_3"]
    name = "elasticjob-x-u-x-3"
    world.workloads[name] = replace(world.workloads[name], updates=PodUpdates())
    world.settle()
    assert world.pods == [*before, "stable_3"], "a check is not ready any more"
    world.evict(1)
    world.settle()
    assert sorted(world.pods) == [*before[:3], "stable_3"], "its quota was of the shared place"


def test_workloads_keep_their_places_while_the_job_has_no_nodes() -> None:
    """The master may be late, and create Pods where it was told to before."""
    world = World(job(3, 1))
    for step, flavor in ((0, "stable"), (1, "stable"), (2, "spot")):
        world.settle()
        world.admit(step, flavor)
    world.settle()
    assert sorted(world.pods) == ["spot", "stable", "stable"]
    world.job["spec"]["suspend"] = True
    world.operate()
    since = world.job["status"]["allocation"]["since"]
    world.pods.remove("stable")
    told(world, 1, request="a")
    world.now += 1
    world.operate()
    assert world.job["status"]["allocation"]["since"] == since
    world.job["spec"]["suspend"] = False
    world.operate()
    places = world.job["status"]["allocation"]["placements"]
    assert {place["name"]: place["nodes"] for place in places} == {"spot": 1, "stable": 2}
    world.job["spec"]["suspend"] = True
    world.settle()
    assert (world.workloads, world.pods) == ({}, [])
    assert world.job["status"]["allocation"]["placements"] == []


def test_a_pod_that_is_one_too_many_in_its_place_has_the_quota_of_another() -> None:
    world = World(job(3, 1))
    for step, flavor in ((0, "stable"), (1, "stable"), (2, "spot")):
        world.settle()
        world.admit(step, flavor)
        if step == 1:
            told(world, 1, request="a")
    world.settle()
    assert sorted(world.pods) == ["spot", "stable", "stable_1"]
    world.pods = ["stable", "stable"]
    world.job["spec"]["suspend"] = True
    world.operate()
    world.pass_time()
    assert world.operate().delete == ()
    world.end_pod()
    assert [one.step for one in world.operate().delete] == [2, 1]


def test_the_order_of_checks_does_not_matter() -> None:
    checks = [
        {
            "name": name,
            "state": "Ready",
            "podSetUpdates": [{"labels": {"same": name}, "tolerations": [{"key": name}]}],
        }
        for name in ("one", "two")
    ]
    found = [PodUpdates.of({"admissionChecks": order}) for order in (checks, checks[::-1])]
    assert found[0] == found[1]
    assert bool(found[0])


def test_a_job_of_many_workloads_has_no_more_places_than_an_allocation_may_have() -> None:
    world = World(job(most=80, least=1))
    for _ in range(12):
        world.operate()
        for one in list(world.workloads.values()):
            if not one.reserved:
                world.admit(one.step)
                told(world, one.step, request="a")
    world.settle()
    places = world.job["status"]["allocation"]["placements"]
    assert sum(place["nodes"] for place in places) == 80
    assert len(places) == 49
    assert len(world.pods) == 80


def test_more_standbys_than_the_quota_has_cost_no_nodes() -> None:
    world = running()
    world.job["spec"]["replicaSpecs"]["worker"]["standbyReplicas"] = 5
    world.settle()
    assert (world.nodes, len(world.pods)) == (4, 4)


@pytest.mark.parametrize("how", ["ended", "suspended", "silent"])
def test_quota_is_given_back_though_no_master_reports_the_end(how: str) -> None:
    world = running()
    world.pods.clear()
    if how == "ended":
        world.job["status"]["conditions"] = [{"type": "Failed", "status": "True"}]
        world.job["status"]["phase"] = "Failed"
    elif how == "suspended":
        world.job["spec"]["suspend"] = True
        world.job["status"]["conditions"] = [{"type": "Suspended", "status": "True"}]
    else:
        world.evict(0)
    training = world.job["status"]["training"]
    assert (training["phase"], training["desired"]) == ("Running", 4)
    world.operate()
    world.now += kueue.SILENT_S if how == "silent" else kueue.SEEN_S
    world.operate()
    assert not any(one.reserved for one in world.workloads.values())


@pytest.mark.parametrize("refused", ["spec", "label"])
@pytest.mark.parametrize(("step", "nodes"), [(0, 0), (2, 3)])
def test_kueue_takes_back_quota_of_a_job_that_cannot_be_read(
    refused: str, step: int, nodes: int
) -> None:
    world = running()
    if refused == "spec":
        world.job["spec"]["checkpoint"] = {"every": "often"}
    else:
        template = world.job["spec"]["replicaSpecs"]["worker"]["template"]
        template["metadata"] = {"labels": {names.LABEL_QUEUE: "team"}}
    world.operate()
    assert world.nodes == 4
    world.evict(step)
    world.operate()
    assert world.nodes == nodes
    del world.pods[nodes:]
    world.job["status"]["training"] = {
        "phase": "Running" if nodes else "Suspended",
        "desired": nodes,
    }
    world.now += kueue.SEEN_S
    world.operate()
    assert sum(one.nodes for one in world.workloads.values() if one.reserved) == nodes


@pytest.mark.parametrize("text", ["9" * 5000, "-1", "1.5", "x", "", "١", 3, None])
def test_a_workload_of_a_stranger_is_none_of_the_jobs(text: Any) -> None:
    world = World(job())
    world.settle()
    (own,) = world.objects.values()
    notes = own["metadata"]["annotations"] | {kueue.NOTE_STEP: text}
    assert Workload.of(own | {"metadata": own["metadata"] | {"annotations": notes}}).step == -1
    stranger = replace(Workload.of(own), name="mine", step=1, reserved=True, admitted=True)
    world.admit(0)
    world.workloads["mine"] = stranger
    world.operate()
    assert world.nodes == 2


def test_one_job_of_another_form_does_not_stop_the_others() -> None:
    queues = Queues(None, ("",), changed=lambda: None, failed=lambda _: None)  # type: ignore[arg-type]
    odd, good = job(), job()
    odd["metadata"] |= {"name": "odd", "uid": "u-odd"}
    odd["status"] = {"conditions": ["x"]}
    found = queues.writes([odd, good], NOW)
    assert list(found) == [("default", "x")]


@pytest.mark.parametrize(
    ("part", "value"),
    [("metadata", "x"), ("containers", [3]), ("initContainers", True), ("nodeSelector", [])],
)
def test_a_template_of_another_form_is_said_and_keeps_the_nodes(part: str, value: Any) -> None:
    """The API server stores it, and nothing is asked of Kueue."""
    world = World(job())
    template = world.job["spec"]["replicaSpecs"]["worker"]["template"]
    holder = template if part == "metadata" else template["spec"]
    before = holder.get(part)
    holder[part] = value
    world.settle()
    assert (world.steps(), world.nodes) == ([], 0)
    assert world.reason.startswith("held back: its Pod template is refused: spec.replicaSpecs.")
    holder[part] = before
    world.settle()
    world.admit(0)
    world.settle()
    holder[part] = value
    changes = world.operate()
    assert (changes.create, changes.delete, world.nodes) == ((), (), 2)
    assert world.reason.startswith("its Pod template is refused: ")


ACTIONS = st.lists(
    st.sampled_from(
        [
            *("operate", "read", "time", "create", "end", "lose", "admit", "spot", "evict"),
            *("more", "fewer", "suspend", "resume", "publish", "silence", "tell"),
        ]
    ),
    min_size=20,
    max_size=80,
)


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 2), st.integers(0, 1), st.randoms(use_true_random=False))
def test_quota_always_covers_the_pods(
    acts: list[str], unit: int, standbys: int, random: Any
) -> None:
    world = World(job(most=3 * unit, least=unit, nodeUnit=unit, standbyReplicas=standbys))
    for flavors in (("stable",), ("spot", "stable"), ()):
        world.settle()
        waiting = [one.step for one in world.workloads.values() if not one.reserved]
        for step, flavor in zip(waiting, flavors, strict=False):
            world.admit(step, flavor)
    for act in acts:
        pick = [w for w in world.workloads.values() if not w.reserved]
        held = [w for w in world.workloads.values() if w.admitted]
        worker = world.job["spec"]["replicaSpecs"]["worker"]
        match act:
            case "operate":
                world.operate()
            case "read":
                world.master()
            case "publish":
                world.publish()
            case "silence":
                world.be_silent()
            case "time":
                world.pass_time()
            case "create":
                world.create_pod()
            case "end":
                world.end_pod()
            case "lose" if world.pods:
                world.pods.remove(random.choice(world.pods))
            case "admit" | "spot" if pick:
                flavor = "stable" if act == "admit" else "spot"
                world.admit(random.choice(pick).step, flavor)
            case "evict" if held:
                one = random.choice(held)
                world.evict(one.step)
                world.operate()
                base = any(w.step == 0 and w.admitted for w in world.workloads.values())
                rests = not base or world.job["spec"].get("suspend")
                assert rests or world.nodes >= unit, "a step cost the whole job"
            case "tell" if world.workloads:
                one = random.choice(list(world.workloads.values()))
                told(world, one.step, request=random.choice("ab"))
            case "more":
                worker["replicas"] = 4 * unit
            case "fewer":
                worker["replicas"] = 2 * unit
            case "suspend" | "resume":
                world.job["spec"]["suspend"] = act == "suspend"
        # Kueue counts by flavor, and each place is of one flavor.
        quota, pods = world.quota(), Counter(place.partition("_")[0] for place in world.pods)
        assert all(pods[place] <= quota[place] for place in pods), (act, pods, quota)
    world.job["spec"]["suspend"] = False
    for _ in range(5):
        world.settle()
        for one in list(world.workloads.values()):
            if not one.reserved:
                world.admit(one.step)
    worker = world.job["spec"]["replicaSpecs"]["worker"]
    assert world.nodes == worker["replicas"]
    assert world.operate() == Changes()
    assert sum(world.quota().values()) == worker["replicas"] + standbys == len(world.pods)
    again = copy.deepcopy(world)
    assert again.operate() == Changes(), "a new operator decides the same"
