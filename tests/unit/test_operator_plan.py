"""The operator's plans, carried out on a small world: level-triggered, harmless when repeated."""

import copy
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrover_operator import actions, facts
from dlrover_operator import plan as p
from dlrover_operator.actions import Action
from dlrover_operator.manifests import Options
from dlrover_operator.observed import (
    Deployment,
    LastError,
    MasterPod,
    ObservedJob,
    PodReason,
    Service,
    WorkerPod,
)
from dlrover_operator.plan import plan
from dlrover_operator.timing import OperatorTiming
from dlrover_py.protocol import names
from dlrover_py.protocol.reasons import ConditionReason
from dlrover_py.protocol.status import rfc3339
from tests.builders import job_file

OPTIONS, TIMING = Options(image="master:1"), OperatorTiming()
START = 1_000_000.0
NAME = names.master_of("x")
LEFT = WorkerPod("x-n0", "p0", "lost", leaving=False)
"""A worker Pod whose agent has ended, and that holds resources yet."""


def at(seconds: float) -> str:
    return rfc3339(START + seconds)


@dataclass
class World:
    """An API server as one job's operator sees it, and a master that does what it is told."""

    job: dict[str, Any]
    now: float = START
    deployment: Deployment | None = None
    service: Service | None = None
    pods: tuple[MasterPod, ...] = ()
    last_error: LastError | None = None
    credentials_checked_at: float = 0.0
    rights_checked_at: float = math.inf
    account_created_at: float = 0.0
    refused: str = ""
    remaining_pods: tuple[WorkerPod, ...] = ()
    looked: int = 0
    done: list[Action] = field(default_factory=list)
    exists: bool = True
    version: int = 1
    addresses: int = 0
    allotted: bool = False

    @classmethod
    def of(cls, **spec: Any) -> "World":
        job = job_file(3)
        job["metadata"] |= {"namespace": "default", "uid": "u1", "generation": 1}
        job["spec"] |= spec
        return cls(job)

    @property
    def status(self) -> dict[str, Any]:
        found = self.job.get("status", {})
        assert isinstance(found, dict)
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        return next((c for c in self.status.get("conditions", ()) if c["type"] == kind), {})

    def said(self, kind: str) -> tuple[str, str]:
        found = self.condition(kind)
        return found.get("status", ""), found.get("reason", "")

    def edit(self, **spec: Any) -> None:
        self.job["spec"] |= spec
        self.job["metadata"]["generation"] += 1

    def master_says(self, phase: str, **more: Any) -> None:
        generation = self.job["metadata"]["generation"]
        training = {"phase": phase, "generation": generation, "nodes": []} | more
        self.job.setdefault("status", {})["training"] = training

    def master_condition(
        self,
        kind: str,
        status: str = "True",
        *,
        ahead_s: float = 0.0,
        message: str = "",
        reason: str = "R",
    ) -> None:
        others = [c for c in self.status.get("conditions", ()) if c["type"] != kind]
        mine = {"type": kind, "status": status, "reason": reason, "message": message, "x": 1}
        mine["lastTransitionTime"] = rfc3339(self.now + ahead_s)
        self.job.setdefault("status", {})["conditions"] = [*others, mine]

    def comes_up(self) -> None:
        assert self.deployment is not None
        self.deployment = Deployment(**_fields(self.deployment) | {"available": True})

    def goes_down(self) -> None:
        assert self.deployment is not None
        self.deployment = Deployment(**_fields(self.deployment) | {"available": False})

    def seen(self) -> ObservedJob:
        job = copy.deepcopy(self.job)
        return ObservedJob(
            job,
            self.deployment,
            self.service,
            self.pods,
            self.last_error,
            self.credentials_checked_at,
            self.rights_checked_at,
            self.account_created_at,
            self.refused,
            allotted=self.allotted,
        )

    def may_have(self, nodes: int, reason: str = "why") -> None:
        """Have the allocator decide."""
        self.job.setdefault("status", {})["allocation"] = {"nodes": nodes, "reason": reason}

    def plan(self) -> p.JobPlan:
        wish = plan(self.seen(), self.now, OPTIONS)
        if not wish.needs_pods:
            return wish
        self.looked += 1
        wish = plan(replace(self.seen(), remaining_pods=self.remaining_pods), self.now, OPTIONS)
        assert not wish.needs_pods
        return wish

    def step(self) -> list[Action]:
        """Carry out one plan."""
        return self.carry_out(self.plan())

    def carry_out(self, wish: p.JobPlan) -> list[Action]:
        actions = [*wish.actions, *wish.status]
        for action in actions:
            self._do(action)
        self.done += actions
        return actions

    def settle(self) -> Counter[str]:
        """Plan and carry out until there is nothing to do; count what was done."""
        counted: Counter[str] = Counter()
        for _ in range(10):
            actions = self.step()
            if not actions:
                return counted
            counted.update(_word(a) for a in actions)
        raise AssertionError(f"it does not come to rest: {actions}")

    def _do(self, action: Action) -> None:
        match action:
            case actions.Create("Service", obj):
                if self.service is None:
                    self.addresses += 1
                    address = obj["spec"].get("clusterIP") or f"10.0.0.{self.addresses}"
                    self.service = Service("s1", "u1", address)
            case actions.Create("Deployment", obj):
                if self.deployment is None:
                    self.deployment = Deployment.of(_stored(obj, self._next()))
            case actions.ReplaceDeployment(obj):
                held = self.deployment
                if held is not None and held.version == obj["metadata"]["resourceVersion"]:
                    self.deployment = Deployment.of(_stored(obj, self._next()))
            case actions.ScaleToZero():
                if self.deployment is not None:
                    changed = {"replicas": 0, "available": False, "version": self._next()}
                    self.deployment = Deployment(**_fields(self.deployment) | changed)
            case actions.DeletePods():
                self.remaining_pods = tuple(
                    replace(pod, leaving=True) for pod in self.remaining_pods
                )
            case actions.MakeCredentials() | actions.RestoreToken():
                self.credentials_checked_at = self.now
            case actions.DeleteService():
                self.service = None
            case actions.DeleteJob(uid):
                assert uid == "u1"
                self.exists = False
            case actions.Allot(allocation):
                assert allocation is None
                self.job["status"].pop("allocation", None)
                for writer in self.job["metadata"].get("managedFields", ()):
                    if "manager" in writer:  # as the API server leaves it
                        writer["fieldsV1"] = {"f:status": {}}
            case actions.SetStatus(status):
                ours = {c["type"] for c in status["conditions"]}
                theirs = [c for c in self.status.get("conditions", ()) if "x" in c]
                assert not ours & {c["type"] for c in theirs}, "two writers of one condition"
                kept = {k: v for k, v in self.status.items() if k in ("training", "allocation")}
                status = copy.deepcopy(status)
                self.job["status"] = kept | status | {"conditions": status["conditions"] + theirs}

    def _next(self) -> str:
        self.version += 1
        return str(self.version)


def _fields(deployment: Deployment) -> dict[str, Any]:
    return {name: getattr(deployment, name) for name in Deployment.__dataclass_fields__}


def _stored(obj: dict[str, Any], version: str) -> dict[str, Any]:
    return obj | {"metadata": obj["metadata"] | {"uid": "d1", "resourceVersion": version}}


def _word(action: Action) -> str:
    return f"Create{action.what}" if isinstance(action, actions.Create) else type(action).__name__


def running(**spec: Any) -> World:
    world = World.of(**spec)
    world.settle()
    world.comes_up()
    world.master_says("Running")
    world.master_condition("Running")
    world.settle()
    return world


def suspended(world: World) -> World:
    world.edit(suspend=True)
    world.settle()
    world.master_says("Suspended")
    world.settle()
    return world


# --- life of a job ---


def test_a_job_gets_its_master_and_then_rest() -> None:
    world = World.of()
    done = world.settle()
    made = {word for word in done if word.startswith("Create")}
    assert made == {
        *("CreateServiceAccount", "CreateRole", "CreateRoleBinding", "CreateNetworkPolicy"),
        *("CreateSecret", "CreateService", "CreateDeployment"),
    }
    assert done["CreateNetworkPolicy"] == 2, "the master's, and its workers'"
    assert done["MakeCredentials"] == 1
    assert world.deployment is not None
    assert world.service is not None
    assert world.deployment.service_address == world.service.address
    assert world.status["phase"] == "Created"
    assert world.status["startTime"] == at(0)
    assert world.status["observedGeneration"] == 1
    assert world.said("Accepted") == ("True", "Accepted")
    assert world.said("MasterReady") == ("False", "Starting")
    world.comes_up()
    world.master_says("Running")
    assert set(world.settle()) == {"SetStatus", "RecordEvent"}
    assert world.said("MasterReady") == ("True", "Available")
    assert world.status["phase"] == "Running"


def test_a_job_that_was_looked_at_has_a_phase_even_if_nothing_can_be_made() -> None:
    world = World.of()
    world.last_error = LastError(ConditionReason.PERMISSION_DENIED, "services is forbidden")
    (told,) = [action for action in world.plan().status if isinstance(action, actions.SetStatus)]
    assert told.status["phase"] == "Created"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Stopped"])
def test_an_ended_jobs_master_goes_and_the_job_after_its_time(phase: str) -> None:
    world = running(ttlSecondsAfterFinished=100)
    world.now += 50
    world.master_says(phase, endedAt=world.now)
    assert world.settle() == {"ScaleToZero": 1, "SetStatus": 1}
    assert world.status["completionTime"] == at(50)
    assert world.status["phase"] == phase
    assert world.plan().wake_at == START + 150
    world.now = START + 149
    assert not world.step()
    world.now = START + 150
    assert [_word(a) for a in world.step()] == ["DeleteJob"]


def test_an_ended_job_gets_no_other_master_whatever_happens_to_it() -> None:
    world = running()
    world.master_condition("Succeeded")
    world.settle()
    world.deployment = world.service = None
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    assert "CreateDeployment" not in world.settle()
    assert world.status["phase"] == "Succeeded"


def test_a_job_that_is_born_suspended_gets_no_master_until_its_resume() -> None:
    world = World.of(suspend=True)
    assert set(world.settle()) == {"SetStatus", "RecordEvent"}
    assert world.said("Suspended") == ("True", "Suspended")
    assert world.status["phase"] == "Suspended"
    assert "startTime" not in world.status
    world.now += 1000
    world.edit(suspend=False)
    assert world.settle()["CreateDeployment"] == 1
    assert world.said("Suspended") == ("False", "Resumed")
    assert world.status["startTime"] == at(1000)


def test_suspending_waits_for_the_master_and_a_resume_plans_it_anew() -> None:
    world = running()
    told = world.deployment.service_address if world.deployment else ""
    world.edit(suspend=True)
    world.settle()
    assert world.said("Suspended") == ("False", "Suspending")
    world.master_says("Suspended", nodes=[{"phase": "live"}])
    assert "ScaleToZero" not in world.settle()
    world.master_says("Suspended", generation=1)  # of the spec before
    assert "ScaleToZero" not in world.settle()
    world.master_says("Suspended", leftOut=1)
    assert "ScaleToZero" not in world.settle()
    world.master_says("Suspended", nodes=[{"phase": "gone"}], leftOut=1)
    assert world.settle()["ScaleToZero"] == 1
    assert world.said("Suspended") == ("True", "Suspended")
    assert world.status["phase"] == "Suspended"
    assert "startTime" not in world.status
    world.now += 500
    template = {"spec": {"nodeSelector": {"a": "b"}}}
    specs = world.job["spec"]["replicaSpecs"] | {"dlrover-master": {"template": template}}
    world.edit(suspend=False, replicaSpecs=specs)
    assert world.settle()["ReplaceDeployment"] == 1
    assert world.deployment is not None
    assert (world.deployment.replicas, world.deployment.service_address) == (1, told)
    replanned = next(a for a in world.done if isinstance(a, actions.ReplaceDeployment))
    assert replanned.obj["spec"]["template"]["spec"]["nodeSelector"] == {"a": "b"}
    assert world.said("Suspended") == ("False", "Resumed")
    assert world.status["startTime"] == at(500)
    assert world.status["phase"] == "Pending"  # what is published is of before


def test_workers_have_no_policy_where_the_administrator_has_none() -> None:
    world = World.of()
    made = plan(world.seen(), world.now, Options(image="master:1", workers_policy=False)).actions
    policies = [a.obj for a in made if isinstance(a, actions.Create) and a.what == "NetworkPolicy"]
    assert [obj["metadata"]["name"] for obj in policies] == [NAME]


def test_an_upgrade_of_the_operator_changes_nothing_of_a_running_job() -> None:
    world = running()
    assert plan(world.seen(), world.now, Options(image="master:2")).actions == ()


@pytest.mark.parametrize("what", ["managedBy", "deletion"])
def test_what_is_not_ours_to_look_after_is_left_alone(what: str) -> None:
    world = World.of(**({"managedBy": "kueue.x-k8s.io/multikueue"} if what == "managedBy" else {}))
    if what == "deletion":
        world.job["metadata"]["deletionTimestamp"] = at(0)
    assert world.plan() == p.JobPlan()
    ours = World.of(managedBy=names.MANAGED_BY)
    assert ours.plan().actions


# --- what is refused ---


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"distributionStrategy": "ParameterServerStrategy"}, "Unsupported", "AllreduceStrategy"),
        ({"replicaSpecs": {"ps": {}, "worker": {}}}, "Unsupported", "role ps"),
        ({"replicaSpecs": {"worker": {"replicas": 1}}}, "InvalidSpec", "template"),
    ],
)
def test_a_refused_job_gets_words_and_nothing_else(
    spec: dict[str, Any], reason: str, words: str
) -> None:
    world = World.of(**spec)
    assert world.settle() == {"SetStatus": 1, "RecordEvent": 1}
    assert world.said("Accepted") == ("False", reason)
    assert words in world.condition("Accepted")["message"]
    assert world.status["phase"] == "Refused"
    world.job["spec"] = World.of().job["spec"]
    world.job["metadata"]["generation"] += 1
    world.settle()
    assert world.status["phase"] == "Created"
    seen = {condition["observedGeneration"] for condition in world.status["conditions"]}
    assert seen == {world.job["metadata"]["generation"]}


def test_a_bad_edit_leaves_the_running_job_alone_and_is_told() -> None:
    world = running()
    good = world.job["spec"]["replicaSpecs"]
    world.edit(replicaSpecs={"worker": {"replicas": 1}})
    assert not {"ScaleToZero", "DeletePods", "ReplaceDeployment"} & set(world.settle())
    assert world.said("Accepted") == ("False", "InvalidSpec")
    world.edit(replicaSpecs=good)
    world.settle()
    assert world.said("Accepted") == ("True", "Accepted")


BAD_EDITS: list[dict[str, Any]] = [
    {"worker": {"replicas": 1, "template": {"spec": {"containers": "x"}}}},
    {"worker": job_file(3)["spec"]["replicaSpecs"]["worker"], "ps": {"replicas": 1}},
    {"worker": {"replicas": 1}, "dlrover-master": {"template": {"spec": {}}, "replicas": 1}},
]


@pytest.mark.parametrize("bad", BAD_EDITS)
def test_under_a_bad_edit_what_the_master_needs_is_kept(bad: dict[str, Any]) -> None:
    world = running()
    assert world.service is not None
    address = world.service.address
    world.edit(replicaSpecs=bad)
    world.settle()
    world.service = None
    assert world.settle()["CreateService"] == 1
    assert world.service is not None
    assert world.service.address == address
    world.goes_down()
    world.settle()
    world.now += TIMING.heal_after_s + 1
    healed = world.settle()
    assert {"CreateRole", "CreateSecret", "MakeCredentials"} <= set(healed)
    world.deployment = None
    assert world.settle()["CreateDeployment"] == 1
    assert world.said("Accepted")[0] == "False"


@pytest.mark.parametrize("bad", BAD_EDITS)
def test_a_job_is_suspended_under_a_bad_edit_and_not_resumed_before_it_is_mended(
    bad: dict[str, Any],
) -> None:
    world = running()
    world.edit(replicaSpecs=bad)
    world.settle()
    suspended(world)
    assert world.status["phase"] == "Suspended"
    world.edit(suspend=False)
    assert not {"ReplaceDeployment", "CreateDeployment"} & set(world.settle())
    assert world.said("MasterReady") == ("False", "Refused")
    assert world.status["phase"] == "Refused"
    world.edit(replicaSpecs=job_file(3)["spec"]["replicaSpecs"])
    assert world.settle()["ReplaceDeployment"] == 1


def test_fields_without_effect_are_told_once() -> None:
    world = World.of(optimizeMode="single-job", brainService="b")
    assert world.settle()["RecordEvent"] == 1
    assert world.condition("Accepted")["message"] == (
        "spec.optimizeMode, spec.brainService: accepted, without effect"
    )


def test_a_policy_that_asks_for_no_restarts_is_told_what_does() -> None:
    world = World.of()
    worker = world.job["spec"]["replicaSpecs"]["worker"]
    worker |= {"restartPolicy": "Never", "restartCount": 3}  # an API server stores the default
    world.settle()
    inert, restarts = world.condition("Accepted")["message"].splitlines()
    assert inert == "spec.replicaSpecs.worker.restartPolicy: accepted, without effect"
    assert restarts.endswith("and is 3; write restartCount: 0 for no restarts")
    worker["restartCount"] = 0
    world.settle()
    assert world.condition("Accepted")["message"] == inert


def test_a_command_that_does_not_join_is_told_before_it_runs() -> None:
    world = World.of(optimizeMode="single-job")
    worker = world.job["spec"]["replicaSpecs"]["worker"]
    worker["template"]["spec"]["containers"][0]["command"] = ["torchrun", "t.py"]
    assert world.settle()["RecordEvent"] == 1
    assert world.said("Accepted") == ("True", "DoesNotJoin")
    told, inert = world.condition("Accepted")["message"].splitlines()
    assert told.startswith("spec.replicaSpecs.worker.template.spec.containers[0].command: torchrun")
    assert inert == "spec.optimizeMode: accepted, without effect"
    world.comes_up()
    world.master_says("Pending")
    world.settle()
    assert (world.status["phase"], world.status["reason"]) == ("Pending", "DoesNotJoin")
    world.master_says("Running")  # it has joined: the command was not understood
    world.settle()
    assert "reason" not in world.status


def test_a_strangers_objects_are_kept_and_a_dead_namesakes_waited_for() -> None:
    world = World.of()
    world.service = Service("s0", "", "10.0.0.9")
    assert set(world.settle()) == {"SetStatus", "RecordEvent"}
    assert world.said("Accepted") == ("False", "NameConflict")
    world.service = Service("s0", "u0", "10.0.0.9")
    world.settle()
    assert world.said("Accepted") == ("True", "Accepted")
    assert world.said("MasterReady") == ("False", "Waiting")
    assert world.plan().wake_at == world.now + facts.LEFTOVER_CHECK_S
    world.service = None
    assert world.settle()["CreateDeployment"] == 1


@pytest.mark.parametrize(
    ("last_error", "condition"),
    [
        (LastError(ConditionReason.QUOTA_EXCEEDED, "exceeded quota: q"), "MasterReady"),
        (LastError(ConditionReason.NAME_CONFLICT, "Secret already exists"), "Accepted"),
    ],
)
def test_a_refusal_of_the_server_is_told_in_its_words(
    last_error: LastError, condition: str
) -> None:
    world = World.of()
    world.last_error = last_error
    world.carry_out(p.JobPlan(status=world.plan().status))
    assert world.said(condition) == ("False", last_error.reason)
    assert world.condition(condition)["message"] == last_error.message


def test_why_a_master_does_not_come_up_is_told() -> None:
    world = World.of()
    world.settle()
    world.pods = (MasterPod(PodReason("ImagePullBackOff"), "no such image"),)
    world.settle()
    assert world.said("MasterReady") == ("False", "ImagePullBackOff")


def test_a_fault_of_the_masters_template_is_told_by_its_path() -> None:
    world = World.of()
    world.job["spec"]["replicaSpecs"]["dlrover-master"] = {
        "template": {"spec": {"tolerations": {}}}
    }
    world.last_error = LastError(ConditionReason.REFUSED, "json: cannot unmarshal object")
    world.settle()
    first, second = world.condition("MasterReady")["message"].splitlines()
    path = "spec.replicaSpecs.dlrover-master.template.spec.tolerations"
    assert first.startswith(f"{path}: found a mapping {{}}: expected a list")
    assert second == "json: cannot unmarshal object"


def test_a_master_that_no_scheduler_looks_at_is_told() -> None:
    world = World.of()
    world.settle()
    pod = {"metadata": {"name": "m", "uid": "p", "creationTimestamp": at(0)}}
    world.pods = (MasterPod.of(pod | {"spec": {"schedulerName": "volcano"}}),)
    world.settle()
    assert world.said("MasterReady") == ("False", "Starting")
    world.now = world.plan().wake_at or 0.0
    world.settle()
    assert world.said("MasterReady") == ("False", "Unschedulable")
    assert "check that the scheduler volcano runs" in world.condition("MasterReady")["message"]
    looked = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
    assert MasterPod.of(pod | {"status": looked}).pending_scheduler == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ('pods "m" is forbidden: violates PodSecurity "restricted:latest": x', "PodsForbidden"),
        ("pods \"m\" is forbidden: ValidatingAdmissionPolicy 'p' denied", "PodsForbidden"),
        ('pods "m" is forbidden: exceeded quota: q, requested: pods=1', "QuotaExceeded"),
        ('pods "m" is forbidden: maximum memory usage per Container is 2Mi', "PodsForbidden"),
        ('pods "m-" is forbidden: no PriorityClass with name x was found', "PodsForbidden"),
        ('Pod "m" is invalid: spec', "FailedCreate"),
    ],
)
def test_why_a_master_gets_no_pod_is_told_as_of_workers(words: str, reason: str) -> None:
    world = World.of()
    world.settle()
    assert world.deployment is not None
    world.deployment = replace(world.deployment, create_error=words)
    world.settle()
    assert world.said("MasterReady") == ("False", reason)
    assert world.condition("MasterReady")["message"] == words


def test_why_a_master_crashes_is_told_in_its_last_words() -> None:
    crashed = {
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"exitCode": 2, "message": "DLROVER_MASTER_LEASE_S is x\n"}},
    }
    pod = {"metadata": {"name": "m", "uid": "p"}, "status": {"containerStatuses": [crashed]}}
    said = MasterPod.of(pod)
    assert said.reason == "CrashLoopBackOff"
    assert said.message == "DLROVER_MASTER_LEASE_S is x; back-off 40s"
    silent = {"exitCode": 137, "reason": "OOMKilled"}
    pod["status"]["containerStatuses"][0]["lastState"]["terminated"] = silent  # type: ignore[index]
    assert MasterPod.of(pod).message == "it ended with exit code 137 (OOMKilled); back-off 40s"


STUCK = (MasterPod(PodReason("ImagePullBackOff"), "no such image"),)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_master_that_could_never_start_is_planned_anew_once_the_mistake_is_mended(
    resumed: bool,
) -> None:
    world = suspended(running()) if resumed else World.of()
    world.edit(suspend=False)
    world.settle()
    world.done.clear()
    world.pods = STUCK
    world.settle()
    template = {"spec": {"nodeSelector": {"pool": "good"}}}
    specs = world.job["spec"]["replicaSpecs"] | {"dlrover-master": {"template": template}}
    world.edit(replicaSpecs=specs)
    assert "ReplaceDeployment" not in world.settle(), (
        "somebody else may have another wish: it is not hasty"
    )
    world.now += TIMING.heal_after_s
    assert world.settle()["ReplaceDeployment"] == 1
    replanned = next(a for a in world.done if isinstance(a, actions.ReplaceDeployment))
    assert replanned.obj["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "good"}
    world.now += 86400
    assert "ReplaceDeployment" not in world.settle(), "it is as it should be"
    mended = plan(
        replace(world.seen(), credentials_checked_at=0.0), world.now, Options(image="master:2")
    )
    assert [
        a.obj["metadata"]["uid"] for a in mended.actions if isinstance(a, actions.ReplaceDeployment)
    ] == ["d1"]
    assert mended.disruptive


@pytest.mark.parametrize("why", ["it has run", "it may start yet", "it is there", "a bad spec"])
def test_another_master_is_not_planned_under_one_that(why: str) -> None:
    world = World.of()
    world.settle()
    if why != "it may start yet":
        world.pods = STUCK
    if why == "it has run":
        world.master_says("Pending")
    if why == "it is there":
        world.comes_up()
    if why == "a bad spec":
        world.edit(replicaSpecs=BAD_EDITS[2])
    world.settle()
    world.now += 86400
    made = plan(world.seen(), world.now, Options(image="master:2")).actions
    assert not any(isinstance(a, actions.ReplaceDeployment) for a in made)


# --- deadlines ---


def test_the_active_deadline_is_set_once_and_the_master_ends_the_job() -> None:
    world = running(activeDeadlineSeconds=100)
    assert world.plan().wake_at == START + 100
    world.now += 100
    assert world.settle() == {"SetStatus": 1, "RecordEvent": 1}
    assert world.said("DeadlineExceeded") == ("True", "ActiveDeadline")
    world.now += 1000  # the master takes its time, but it is there
    assert not world.settle()
    world.master_says("Failed")
    world.master_condition("Failed")
    assert world.settle()["ScaleToZero"] == 1
    assert world.status["phase"] == "Failed"


def test_a_master_stays_until_its_nodes_have_gone() -> None:
    world = running()
    world.master_says("Succeeded", nodes=[{"id": "n0", "phase": "live"}])
    world.master_condition("Succeeded")
    assert "ScaleToZero" not in world.settle()
    assert world.status["phase"] == "Succeeded"
    world.master_says("Succeeded", nodes=[{"id": "n0", "phase": "gone"}])
    assert world.settle()["ScaleToZero"] == 1


def test_nodes_that_do_not_go_are_ended_after_a_while() -> None:
    world = running()
    world.master_says("Succeeded", nodes=[{"id": "n0", "phase": "suspect"}])
    world.master_condition("Succeeded")
    world.settle()
    assert world.plan().wake_at == world.now + facts.END_GRACE_S
    world.now += facts.END_GRACE_S
    did = world.settle()
    assert (did["DeletePods"], did["ScaleToZero"]) == (1, 1)
    assert not world.settle()


def test_a_service_that_is_deleted_while_the_nodes_stop_comes_again() -> None:
    world = running()
    world.edit(suspend=True)
    world.service = None
    assert world.settle()["CreateService"] == 1


def test_without_a_master_the_operator_ends_the_job_itself() -> None:
    world = running(activeDeadlineSeconds=100)
    world.now += 90
    world.goes_down()
    world.settle()
    world.now += 10
    world.settle()
    assert world.said("DeadlineExceeded") == ("True", "ActiveDeadline")
    world.now += 49
    assert not {"DeletePods", "ScaleToZero"} & set(world.settle())
    world.now += 1
    done = world.settle()
    assert done["DeletePods"] >= 1
    assert done["ScaleToZero"] == 1
    assert world.status["phase"] == "Failed"
    assert world.status["completionTime"]
    world.now += 1000
    assert not world.settle()
    assert world.said("Failed") == ("True", "DeadlineExceeded")


def test_a_resume_starts_the_active_deadline_anew() -> None:
    world = suspended(running(activeDeadlineSeconds=100))
    world.now += 1000
    assert not world.settle()
    world.edit(suspend=False)
    world.settle()
    world.now += 99
    world.settle()
    assert world.said("DeadlineExceeded") == ("", "")
    world.now += 1
    world.settle()
    assert world.said("DeadlineExceeded") == ("True", "ActiveDeadline")


@pytest.mark.parametrize("ahead_s", [0, -600, 600])
def test_the_pending_timeout_counts_from_the_start_and_from_each_loss(ahead_s: float) -> None:
    world = World.of(pendingTimeoutSeconds=100)
    world.settle()
    world.comes_up()
    world.master_says("Pending")
    world.now += 99
    world.settle()
    assert world.said("DeadlineExceeded") == ("", "")
    world.master_condition("Running", ahead_s=ahead_s)
    world.settle()
    world.now += 1000
    world.settle()
    world.master_condition("Running", "False", ahead_s=ahead_s)
    world.settle()
    world.now += 99
    world.settle()
    assert world.said("DeadlineExceeded") == ("", "")
    world.now += 1
    world.settle()
    assert world.said("DeadlineExceeded") == ("True", "PendingTimeout")
    assert world.condition("DeadlineExceeded")["message"] == (
        "the job had fewer nodes than its minimum for 100 s (pendingTimeoutSeconds)"
    )


def test_what_kept_a_job_pending_is_in_its_column_and_the_cause_of_its_end() -> None:
    world = World.of(pendingTimeoutSeconds=100)
    world.settle()
    assert "reason" not in world.status
    world.comes_up()
    world.master_says("Pending")
    world.master_condition("PodsReady", "False")
    world.settle()
    assert "reason" not in world.status
    world.master_condition("Unschedulable", message="n0: 0/3 nodes are available")
    world.settle()
    assert world.status["reason"] == "Unschedulable"
    world.now += 100
    world.settle()
    assert world.said("DeadlineExceeded") == ("True", "PendingTimeout")
    words = "minimum for 100 s (pendingTimeoutSeconds); Unschedulable: n0: 0/3 nodes are available"
    assert words in world.condition("DeadlineExceeded")["message"]
    world.master_says("Failed")
    world.master_condition("Failed", reason="DeadlineExceeded")
    world.settle()
    assert world.status["reason"] == "DeadlineExceeded"


@pytest.mark.parametrize("phase", ["Running", "Suspended", "Succeeded"])
def test_a_job_that_is_well_has_no_reason_in_its_column(phase: str) -> None:
    world = running()
    world.master_condition("Unschedulable")
    world.settle()
    assert world.status["reason"] == "Unschedulable"
    world.master_condition("Unschedulable", "False")
    if phase == "Suspended":
        world = suspended(world)
    elif phase == "Succeeded":
        world.master_condition("Succeeded")
        world.master_says("Succeeded")
    world.settle()
    assert "reason" not in world.status
    assert world.status["phase"] == phase


def test_a_refused_job_and_a_master_without_a_place_have_their_reason_in_the_column() -> None:
    refused = World.of(distributionStrategy="ParameterServerStrategy")
    refused.settle()
    assert refused.status["reason"] == "Unsupported"
    world = World.of()
    world.settle()
    world.pods = (MasterPod(PodReason("ImagePullBackOff"), "no such image"),)
    world.settle()
    assert world.status["reason"] == "ImagePullBackOff"


# --- the master's things are deleted by somebody ---


def test_a_deleted_deployment_comes_again_and_a_deleted_service_with_its_address() -> None:
    world = running()
    assert world.service is not None
    address = world.service.address
    world.deployment = None
    assert world.settle()["CreateDeployment"] == 1
    assert world.deployment is not None
    assert world.deployment.service_address == address
    world.service = None
    assert world.settle()["CreateService"] == 1
    assert world.service.address == address
    world.service = Service("s2", "u1", "10.0.0.77")  # somebody was faster
    assert world.settle()["DeleteService"] == 1
    assert world.service is not None
    assert world.service.address == address


TAKEN = "spec.clusterIPs: Invalid value: [10.0.0.1]: failed to allocate IP: already allocated"


def test_an_address_that_has_gone_to_another_service_is_given_up() -> None:
    """After a while: a server may take a moment to free that of a Service that was deleted."""
    world = running()
    world.now += 1000
    world.service = None
    world.refused = TAKEN
    world.last_error = LastError(ConditionReason.REFUSED, TAKEN)
    world.carry_out(p.JobPlan(status=world.plan().status))
    world.last_error = None
    world.now += TIMING.address_lost_after_s - 1
    wish = world.plan()
    (asked,) = (a for a in wish.actions if isinstance(a, actions.Create))
    assert asked.obj["spec"]["clusterIP"] == "10.0.0.1"
    assert wish.wake_at == world.now + 1
    world.now += 1
    assert [_word(a) for a in world.plan().actions] == ["ScaleToZero"]
    world.step()
    world.refused = ""
    assert world.settle()["ReplaceDeployment"] == 1
    assert world.deployment is not None
    assert world.service is not None
    assert world.deployment.service_address == world.service.address != "10.0.0.1"


@pytest.mark.parametrize("words", ["", 'admission webhook "w" denied the request: no label'])
def test_an_address_is_kept_whatever_else_is_refused(words: str) -> None:
    world = running()
    world.service = None
    world.goes_down()
    world.refused = words
    world.carry_out(p.JobPlan(status=world.plan().status))
    world.now += 86400
    assert "ScaleToZero" not in {_word(a) for a in world.plan().actions}


def test_an_address_that_is_lost_does_not_hold_up_a_suspension() -> None:
    world = running()
    world.edit(suspend=True)
    world.settle()
    world.service = None
    world.goes_down()
    world.settle()
    world.service = None
    world.refused = TAKEN
    world.now += TIMING.address_lost_after_s
    assert {_word(a) for a in world.plan().actions} == {"DeletePods", "ScaleToZero"}


def test_with_no_master_for_long_what_it_needs_is_made_again() -> None:
    world = running()
    world.goes_down()
    assert "CreateRole" not in world.settle()
    world.now += TIMING.heal_after_s
    assert {"CreateRole", "CreateSecret", "MakeCredentials"} <= {_word(a) for a in world.step()}


def test_an_ended_job_stays_for_its_time_whatever_the_masters_clock_says() -> None:
    world = running(ttlSecondsAfterFinished=100)
    world.now += 50
    world.master_says("Failed", endedAt=world.now - 600)
    world.master_condition("Failed", ahead_s=-600)
    world.settle()
    world.now += 99
    assert not world.step()
    world.now += 1
    assert [_word(a) for a in world.step()] == ["DeleteJob"]


def test_what_a_master_lacks_is_made_again_though_its_clock_is_ahead() -> None:
    world = running()
    world.now += TIMING.heal_after_s
    world.master_condition("JournalWritable", "False", ahead_s=600)
    assert {"CreateRole", "CreateSecret", "RestoreToken"} <= {_word(a) for a in world.step()}


@pytest.mark.parametrize(("kind", "state"), [("JournalWritable", "False"),
                                             ("PermissionDenied", "True")])  # fmt: skip
def test_what_a_living_master_lacks_is_made_again(kind: str, state: str) -> None:
    world = running()
    world.now += TIMING.heal_after_s
    world.master_condition(kind, state)
    assert "CreateRole" not in world.settle()
    world.now += TIMING.heal_after_s
    did = {_word(a) for a in world.step()}
    assert {"CreateRole", "CreateSecret", "RestoreToken"} <= did
    assert "MakeCredentials" not in did, "the one that runs holds what was made"


@pytest.mark.parametrize("others", ["gone", "live"])
def test_suspending_ends_though_a_node_that_never_spoke_is_on_a_lost_host(others: str) -> None:
    """Its Pod is terminating until its host is deleted."""
    world = running()
    world.now += 1000
    suspended(world)
    world.edit(suspend=False)  # the condition is False from here on, and says nothing of what comes
    world.settle()
    world.comes_up()
    world.now += 1000
    world.edit(suspend=True)
    world.settle()
    world.master_says("Suspended", nodes=[{"phase": "starting"}, {"phase": others}])
    world.now += facts.END_GRACE_S - 1
    world.settle()
    assert world.deployment is not None
    assert world.deployment.replicas == 1
    world.now += 1
    done = world.settle()
    assert world.deployment.replicas == (0 if others == "gone" else 1), "who lives is waited for"
    assert ("DeletePods" in done) == (others == "gone")
    assert world.said("Suspended")[0] == ("True" if others == "gone" else "False")


def test_a_masters_rights_are_looked_after_though_it_says_nothing() -> None:
    """Where it may not even write its status."""
    world = running()
    world.rights_checked_at = world.now
    world.now += TIMING.rights_interval_s - 1
    assert not world.step()
    assert world.plan().wake_at == world.now + 1
    world.now += 1
    made = ["CreateServiceAccount", "CreateRole", "CreateRoleBinding", "CreateSecret"]
    assert [_word(a) for a in world.step()] == made


def test_the_secret_of_a_map_is_made_again_though_the_master_says_nothing() -> None:
    """The master has no right to create it."""
    world = World.of()
    main = {"name": "main", "image": "i", "command": ["dlrover", "ps", "server"]}
    world.job["spec"]["replicaSpecs"]["ps"] = {"template": {"spec": {"containers": [main]}}}
    world.settle()
    world.comes_up()
    world.master_says("Running")
    world.master_condition("Running")
    world.settle()
    world.rights_checked_at = world.now - TIMING.rights_interval_s
    assert [_word(a) for a in world.step()][-2:] == ["CreateSecret", "CreateSecret"]


@pytest.mark.parametrize("wish", ["to run", "to rest", "too late"])
def test_a_master_whose_account_was_made_again_gets_a_pod_that_has_its_token(wish: str) -> None:
    """All that it asks for is refused, and it can tell nobody; it hears of no wish either."""
    world = running(activeDeadlineSeconds=900)
    mine = MasterPod(name="m-1", uid="p1", created_at=world.now, replica_set=f"{NAME}-5f")
    theirs = MasterPod(name="m", uid="p0", created_at=world.now, replica_set="m")
    world.pods = (mine, theirs)
    world.now += 900 if wish == "too late" else 100
    world.edit(suspend=wish == "to rest")
    world.settle()
    world.rights_checked_at = world.now - TIMING.rights_interval_s
    assert "CreateServiceAccount" in {_word(a) for a in world.step()}
    world.rights_checked_at = math.inf
    world.account_created_at = START + p.SKEW_S  # two servers' clocks: it was made before the Pod
    assert not world.step()
    world.account_created_at = world.now
    assert world.step() == [actions.DeleteMasterPod("m-1", "p1")]
    world.pods = (replace(mine, leaving=True), theirs)
    assert not world.step()
    again = replace(mine, name="m-2", uid="p2", created_at=world.now + 1)
    world.pods = (again, theirs)
    assert not world.step()


def test_suspending_without_a_master_leaves_no_pods() -> None:
    world = running()
    world.remaining_pods = (LEFT,)
    world.deployment = None
    world.edit(suspend=True)
    assert world.settle()["DeletePods"] == 1
    assert world.said("Suspended") == ("False", "Suspending")
    world.remaining_pods = ()
    world.settle()
    assert world.said("Suspended") == ("True", "Suspended")
    assert not world.settle()


@pytest.mark.parametrize("wish", ["suspend", "Succeeded", "Failed"])
def test_a_master_stays_until_no_pod_holds_resources(wish: str) -> None:
    """Its agents are gone, and a sidecar runs on."""
    world = running()
    world.remaining_pods = (LEFT,)
    world.edit(suspend=wish == "suspend")
    phase = "Suspended" if wish == "suspend" else wish
    world.settle()
    world.master_says(phase, nodes=[{"phase": "gone"}])
    assert not {"ScaleToZero", "DeletePods"} & set(world.settle())
    assert world.said("Suspended")[0] != "True"
    assert world.said("PodsLeft") == ("", "")
    assert world.plan().wake_at == world.now + facts.RELIST_S
    if wish == "suspend":
        assert LEFT.name in world.condition("Suspended")["message"]
    world.remaining_pods = ()
    assert world.settle()["ScaleToZero"] == 1
    assert world.said("PodsLeft") == ("False", "NoneLeft")
    assert world.said("Suspended")[0] == ("True" if wish == "suspend" else "")
    looked = world.looked
    world.settle()
    assert world.looked == looked, "a job at rest costs no lists"


def test_a_job_is_suspended_once_its_masters_pod_has_ended_too() -> None:
    world = running()
    meta: dict[str, Any] = {"name": "m-1", "uid": "p1", "creationTimestamp": at(0)}
    meta |= {"ownerReferences": [{"kind": "ReplicaSet", "name": f"{NAME}-5f"}]}
    evicted = MasterPod.of({"metadata": meta, "status": {"phase": "Failed"}})
    ending = MasterPod.of({"metadata": meta, "status": {"phase": "Running"}})
    world.pods = (evicted, ending)
    suspended(world)
    assert world.deployment is not None
    assert world.deployment.replicas == 0
    assert world.said("Suspended") == ("False", "Suspending")
    assert "m-1" in world.condition("Suspended")["message"]
    world.pods = (evicted,)
    world.settle()
    assert world.said("Suspended") == ("True", "Suspended")


@pytest.mark.parametrize("wish", ["suspend", "Succeeded"])
def test_pods_that_do_not_go_are_told_until_they_have_gone(wish: str) -> None:
    """A host is lost: its Pods were deleted, and no kubelet ends them."""
    world = running()
    world.remaining_pods = (LEFT,)
    world.edit(suspend=wish == "suspend")
    world.settle()
    world.master_says("Suspended" if wish == "suspend" else wish, nodes=[{"phase": "gone"}])
    world.settle()
    world.now += facts.END_GRACE_S
    done = world.settle()
    assert (done["DeletePods"], done["ScaleToZero"]) == (1, 1), "it can do no more for them"
    assert world.said("PodsLeft") == ("True", "NotEnding")
    assert "x-n0 on lost" in world.condition("PodsLeft")["message"]
    assert world.status["reason"] == "PodsLeft"
    assert world.said("Suspended")[0] != "True"
    world.now += 1000
    assert not world.settle()
    world.remaining_pods = ()
    assert set(world.settle()) <= {"SetStatus", "RecordEvent"}
    assert world.said("PodsLeft") == ("False", "NoneLeft")
    assert world.said("Suspended")[0] == ("True" if wish == "suspend" else "")
    assert "reason" not in world.status
    if wish == "suspend":
        world.edit(suspend=False)
        world.settle()
        assert world.said("PodsLeft") == ("", "")


def test_pods_that_an_earlier_operator_left_are_deleted() -> None:
    world = suspended(running())
    world.job["status"]["conditions"] = [
        c for c in world.status["conditions"] if c["type"] != "PodsLeft"
    ]
    world.remaining_pods = (LEFT,)
    assert world.settle()["DeletePods"] == 1
    assert world.said("Suspended")[0] == "False"


# --- jobs that share a cluster ---


def test_a_job_that_is_held_back_gets_no_master_and_no_deadline_until_it_may_start() -> None:
    world = World.of(pendingTimeoutSeconds=100, activeDeadlineSeconds=100)
    world.allotted = True
    assert set(world.settle()) == {"SetStatus"}
    assert world.said("Allocated") == ("False", "Waiting")
    world.may_have(0, "held back: it needs 3 nodes, and 1 are left by other jobs")
    assert set(world.settle()) == {"SetStatus", "RecordEvent"}
    assert world.said("Allocated") == ("False", "HeldBack")
    assert world.said("MasterReady") == ("False", "Waiting")
    assert (world.status["phase"], world.status["reason"]) == ("Created", "HeldBack")
    world.now += 1000
    world.settle()
    assert world.said("DeadlineExceeded") == ("", "")
    world.may_have(3)
    assert world.settle()["CreateDeployment"] == 1
    assert world.said("Allocated") == ("True", "Allocated")
    assert world.status["startTime"] == at(1000)
    assert "reason" not in world.status


def test_a_job_that_is_held_back_later_keeps_its_master_and_says_so() -> None:
    world = World.of(pendingTimeoutSeconds=100)
    world.allotted = True
    world.may_have(3)
    world.settle()
    world.comes_up()
    world.master_says("Running")
    world.master_condition("Running")
    world.settle()
    world.may_have(0, "3→0: urgent gets them")
    world.master_says("Suspended")
    world.master_condition("Running", "False")
    assert not {"ScaleToZero", "DeletePods"} & set(world.settle())
    assert (world.status["phase"], world.status["reason"]) == ("Suspended", "HeldBack")
    assert world.condition("Allocated")["message"] == "3→0: urgent gets them"
    world.now += 1000
    world.settle()
    assert world.said("DeadlineExceeded") == ("", "")
    world.deployment = None
    world.settle()
    world.may_have(3)
    assert world.settle()["CreateDeployment"] == 1


def test_without_allocator_a_job_is_limited_only_by_what_others_write() -> None:
    world = running()
    world.allotted = True
    world.may_have(3)
    world.settle()
    world.allotted = False
    assert world.settle() == {"Allot": 1, "SetStatus": 1}
    assert "allocation" not in world.status
    assert world.said("Allocated") == ("", "")
    world.may_have(2)  # somebody else writes
    world.master_says("Suspended")
    assert world.settle() == {"SetStatus": 1}
    assert world.status["phase"] == "Suspended"


def test_what_an_operator_that_still_ends_has_allotted_is_removed() -> None:
    """During an upgrade it wrote the number again, and the job kept that for ever."""
    world = running()
    world.may_have(3)
    fields: dict[str, Any] = {"f:status": {"f:allocation": {"f:nodes": {}}}}
    writer = {"manager": names.ALLOCATOR_MANAGER, "fieldsV1": fields}
    world.job["metadata"]["managedFields"] = [{}, {"fieldsV1": []}, writer]
    assert world.said("Allocated") == ("", "")
    assert world.settle() == {"Allot": 1}
    assert "allocation" not in world.status


@pytest.mark.parametrize("born", [True, False])
def test_a_suspended_job_that_leaves_its_queue_goes_on_without_it(born: bool) -> None:
    world = World.of(suspend=True) if born else running()
    world.allotted = True
    if not born:
        world.may_have(3)
        world.settle()
        world = suspended(world)
    world.may_have(0, "held back: the job was suspended")
    world.settle()
    assert world.said("Allocated") == ("False", "HeldBack")
    assert world.status["phase"] == "Suspended"
    world.allotted = False
    assert world.settle()["Allot"] == 1
    world.edit(suspend=False)
    assert world.settle()["CreateDeployment" if born else "ReplaceDeployment"] == 1
    assert "allocation" not in world.status


def test_a_job_that_is_held_back_without_a_master_loses_its_pods() -> None:
    world = World.of()
    world.allotted = True
    world.may_have(3)
    world.settle()
    world.comes_up()
    world.master_says("Running")
    world.master_condition("Running")
    world.settle()
    world.goes_down()
    world.remaining_pods = (LEFT,)
    world.may_have(0, "held back: Preempted")
    assert "DeletePods" not in world.settle()
    world.now += 100
    assert world.settle()["DeletePods"] == 1
    assert world.deployment is not None
    assert world.deployment.replicas == 1, "a master that can start goes on with the job"


# --- whatever happens ---

happens = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("suspend", "resume", "up", "down", "no deployment", "no service", "bad", "good"),
                *("Running", "Pending", "Forming", "Suspended", "Failed", "Succeeded", "Stopped"),
                *("condition Running", "condition not Running", "other"),
                *("allotted", "by chance", "nodes 0", "nodes 3"),
            ]
        ),
        st.floats(0.5, 200).map(lambda s: f"wait {s}"),
    ),
    max_size=14,
)


def happen(world: World, what: str) -> None:
    match what.split():
        case ["wait", seconds]:
            world.now += float(seconds)
        case ["suspend" | "resume" as verb]:
            world.edit(suspend=verb == "suspend")
        case ["bad" | "good" as kind]:
            specs = job_file(3)["spec"]["replicaSpecs"]
            world.edit(replicaSpecs=specs if kind == "good" else {"worker": {"replicas": 1}})
        case ["up"] if world.deployment is not None and world.deployment.replicas:
            world.comes_up()
        case ["down"] if world.deployment is not None:
            world.goes_down()
        case ["no", "deployment"]:
            world.deployment = None
        case ["no", "service"]:
            world.service = None
        case ["condition", *no, "Running"]:
            world.master_condition("Running", "False" if no else "True")
        case ["allotted"]:
            world.allotted = True
        case ["by", "chance"]:
            world.allotted = False
        case ["nodes", number]:
            world.may_have(int(number))
        case ["other"]:  # another operator, one look behind
            world.carry_out(world.plan())
        case [phase] if phase[0].isupper():
            world.master_says(phase)


@settings(deadline=None)
@given(happens, st.booleans())
@example(["resume", "suspend", "no service"], False)
@example(["resume", "bad", "no service"], False)
def test_plans_come_to_rest_and_never_take_a_running_jobs_master(
    what: list[str], deadlines: bool
) -> None:
    limits = {"activeDeadlineSeconds": 300, "pendingTimeoutSeconds": 150} if deadlines else {}
    world = World.of(**limits)
    for one in what:
        happen(world, one)
        wish = world.plan()
        spec, status = world.job["spec"], world.status
        coming = [a.status for a in wish.status if isinstance(a, actions.SetStatus)]
        said = [c for s in (status, *coming) for c in s.get("conditions", ())]
        over = {c["type"] for c in said if c["status"] == "True"}
        over &= {"Failed", "Succeeded", "DeadlineExceeded"}
        ended = over or status.get("training", {}).get("phase") in facts.ENDED_PHASES
        ended = ended or status.get("phase") in facts.ENDED_PHASES
        if not ended and not spec.get("suspend"):
            taken = {"ScaleToZero", "DeletePods", "DeleteJob"} & {_word(a) for a in wish.actions}
            assert not taken
        if any(isinstance(a, actions.ReplaceDeployment) for a in wish.actions):
            assert world.deployment is not None
            assert world.deployment.replicas == 0
        assert not (wish.wake_at is not None and wish.wake_at != wish.wake_at)
        world.settle()
        assert not world.step()
        refused = world.said("Accepted")[0] == "False"  # of a bad spec no Service can be made
        waits = world.allotted and world.said("Allocated")[0] == "False"
        made = world.service is not None
        assert refused or waits or world.status.get("phase") != "Created" or made


@settings(deadline=None)
@given(happens)
def test_two_operators_do_what_one_does(what: list[str]) -> None:
    alone, both = World.of(), World.of()
    for one in what:
        happen(alone, one)
        happen(both, one)
        alone.settle()
        first = both.plan()
        second = both.plan()  # has seen the same
        both.carry_out(first)
        third = both.plan()
        both.carry_out(second)
        both.carry_out(third)
        both.settle()
        assert both.status == alone.status
        assert (both.deployment is None) == (alone.deployment is None)
        if both.deployment is not None and alone.deployment is not None:
            assert both.deployment.replicas == alone.deployment.replicas
            assert both.deployment.service_address == alone.deployment.service_address
