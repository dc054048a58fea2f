"""A node as a Pod: what is asked for, and what is understood of what is there."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.events import NodeEnded, NodeSeen
from dlrover_py.master.platform.kubernetes.pods import (
    Given,
    PodContext,
    fact,
    node_of,
    place_for,
    pod,
    view,
)
from dlrover_py.protocol.autoscale import PodPlace
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import LABEL_PLACEMENT, NOTE_TEMPLATE, NodeId, pod_of
from tests.builders import job_file

N7 = NodeId("n7")
SITE = PodContext(uid="uid-1", master_addr="10.96.0.9:50001")


def job(template: dict[str, Any] | None = None, **worker: Any) -> ElasticJob:
    document = job_file(4, **worker)
    if template is not None:
        document["spec"]["replicaSpecs"]["worker"]["template"] = template
    return ElasticJob.parse(document)


def template(**spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "image": "i"}], **spec}}


def made(template: dict[str, Any] | None = None, **worker: Any) -> dict[str, Any]:
    return pod(job(template, **worker), N7, SITE)


def env(of: dict[str, Any]) -> dict[str, Any]:
    listed = of["spec"]["containers"][0]["env"]
    assert len({e["name"] for e in listed}) == len(listed), "each once"
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in listed}


# --- what is asked for ---


def test_the_template_is_kept_as_written_but_for_what_is_listed() -> None:
    given = template(
        nodeSelector={"gpu": "h100"},
        terminationGracePeriodSeconds=60,
        invented={"later": [1]},
        initContainers=[{"name": "init"}],
    )
    given["metadata"] = {"labels": {"team": "a"}, "annotations": {"k": "v"}}
    before = copy.deepcopy(given)
    out = made(given)
    assert given == before, "the job's own copy is untouched"
    for key in ("nodeSelector", "terminationGracePeriodSeconds", "invented", "initContainers"):
        assert out["spec"][key] == given["spec"][key]
    assert out["metadata"]["labels"]["team"] == "a"
    notes = dict(out["metadata"]["annotations"])
    assert notes.pop(NOTE_TEMPLATE) == job(given).worker.template_hash
    assert notes == {"k": "v"}
    assert isinstance(seen := fact(N7, view(out)), NodeSeen)
    assert seen.template_hash == job(given).worker.template_hash
    added = set(out["spec"]) - set(given["spec"])
    assert added == {"restartPolicy", "automountServiceAccountToken", "volumes"}
    assert set(out["spec"]["containers"][0]) == {"name", "image", "env", "volumeMounts"}


def test_who_it_belongs_to() -> None:
    out = made()
    assert out["metadata"]["name"] == pod_of("x", N7) == "x-n7"
    assert node_of("x", "x-n7") == N7
    (owner,) = out["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("uid-1", True)
    assert out["metadata"]["labels"]["elasticjob.dlrover/replica-index"] == "7"


def test_the_agent_is_told_where_its_master_is() -> None:
    told = env(made())
    assert told["DLROVER_MASTER_ADDR"] == "10.96.0.9:50001"
    assert told["DLROVER_NODE_ID"] == "n7"
    assert told["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert (told["NODE_RANK"], told["NODE_NUM"]) == ("7", "4")


def test_what_is_ours_cannot_be_set_and_what_is_not_stays_theirs() -> None:
    given = template()
    given["spec"]["containers"][0]["env"] = [
        {"name": "DLROVER_MASTER_ADDR", "value": "elsewhere:1"},
        {"name": "NODE_RANK", "value": "$(NODE_NUM)-mine"},
        {"name": "MY", "value": "$(NODE_NUM)"},
    ]
    out = made(given)
    told = env(out)
    assert told["DLROVER_MASTER_ADDR"] == "10.96.0.9:50001"
    assert told["NODE_RANK"] == "$(NODE_NUM)-mine"
    order = [e["name"] for e in out["spec"]["containers"][0]["env"]]
    assert order.index("NODE_NUM") < order.index("MY"), "Kubernetes resolves what stands before"


def test_a_higher_memory_limit_is_that_of_the_main_container_and_of_no_other() -> None:
    limits = {"limits": {"memory": "2Gi"}, "requests": {"memory": "1Gi"}}
    two = [{"name": "side", "resources": limits}, {"name": "main", "resources": limits}]
    for memory, expected in (
        (0, limits),
        (1 << 30, limits),  # the template has more meanwhile
        (3 << 30, {"limits": {"memory": str(3 << 30)}, "requests": {"memory": str(3 << 29)}}),
    ):
        given = job(template(containers=two))
        side, main = pod(given, N7, SITE, given=Given(memory))["spec"]["containers"]
        assert main["resources"] == expected
        assert side["resources"] == limits


def test_the_container_named_main_is_the_agents() -> None:
    given = template()
    given["spec"]["containers"].insert(0, {"name": "sidecar"})
    out = made(given)
    assert out["spec"]["containers"][0] == {"name": "sidecar"}
    assert "env" in out["spec"]["containers"][1]


def test_shared_memory_is_given_unless_there_is_some() -> None:
    assert "/dev/shm" in {m["mountPath"] for m in made()["spec"]["containers"][0]["volumeMounts"]}
    given = template(volumes=[{"name": "mine", "emptyDir": {}}])
    given["spec"]["containers"][0]["volumeMounts"] = [{"name": "mine", "mountPath": "/dev/shm/"}]
    out = made(given)
    assert [v["name"] for v in out["spec"]["volumes"]] == ["mine", "dlrover-job"]


@pytest.mark.parametrize(
    ("security", "mounted", "volumes"),
    [
        ({"readOnlyRootFilesystem": True}, [], {"dlrover-job-tmp": "/tmp"}),
        ({"readOnlyRootFilesystem": True}, [{"name": "mine", "mountPath": "/tmp/"}], {}),
        ({"readOnlyRootFilesystem": False}, [], {}),
        (None, [], {}),
    ],
)
def test_a_read_only_root_gets_a_tmp_that_can_be_written(
    security: Any, mounted: list[dict[str, Any]], volumes: dict[str, str]
) -> None:
    given = template(volumes=[{"name": "mine", "emptyDir": {}}])
    given["spec"]["containers"][0] |= {"securityContext": security, "volumeMounts": mounted}
    spec = made(given)["spec"]
    ours = {
        m["name"]: m["mountPath"]
        for m in spec["containers"][0]["volumeMounts"]
        if m["name"].endswith("-tmp")
    }
    assert ours == volumes
    assert {v["name"] for v in spec["volumes"]} >= volumes.keys()


def test_a_service_account_of_the_template_keeps_its_token() -> None:
    assert made()["spec"]["automountServiceAccountToken"] is False
    assert "automountServiceAccountToken" not in made(template(serviceAccountName="s"))["spec"]
    assert made(template(automountServiceAccountToken=True))["spec"]["automountServiceAccountToken"]


def test_a_place_that_is_ours_is_refused_in_words() -> None:
    given = template()
    given["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "v", "mountPath": "/var/run/dlrover"}
    ]
    given["spec"]["volumes"] = [{"name": "v", "emptyDir": {}}]
    with pytest.raises(ConfigError, match="/var/run/dlrover"):
        made(given)


def test_priority_is_the_templates_or_the_roles() -> None:
    assert made(priority="high")["spec"]["priorityClassName"] == "high"
    assert "priorityClassName" not in made(priority="0.5")["spec"]
    assert (
        made(template(priorityClassName="p"), priority="high")["spec"]["priorityClassName"] == "p"
    )


def terms(affinity: Any, avoid: list[str]) -> list[dict[str, Any]]:
    given = template() if affinity is None else template(affinity=affinity)
    out = pod(job(given), N7, SITE, avoid)
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    found: list[dict[str, Any]] = out["spec"]["affinity"]["nodeAffinity"][key]["nodeSelectorTerms"]
    return found


def test_a_place_that_a_queue_has_given_is_added_to_what_the_template_asks_for() -> None:
    mine = template(nodeSelector={"gpu": "h100"}, tolerations=[{"key": "a"}])
    place = PodPlace(
        name="spot",
        nodes=1,
        node_selector={"pool": "s", "gpu": "any"},
        tolerations=[{"key": "b"}],
        labels={"cost": "team", LABEL_PLACEMENT: "other"},
        annotations={"autoscaling.x-k8s.io/consume-provisioning-request": "r"},
    )
    out = pod(job(mine), N7, SITE, (), place)
    assert out["metadata"]["labels"]["cost"] == "team"
    assert (
        out["metadata"]["annotations"]["autoscaling.x-k8s.io/consume-provisioning-request"] == "r"
    )
    assert out["spec"]["nodeSelector"] == {"gpu": "h100", "pool": "s"}
    assert out["spec"]["tolerations"] == [{"key": "a"}, {"key": "b"}]
    assert out["metadata"]["labels"][LABEL_PLACEMENT] == "spot"


@pytest.mark.parametrize(
    ("taken", "chosen"),
    [({}, "a"), ({"a": 1}, "a"), ({"a": 2}, "b"), ({"a": 2, "b": 1}, "a"), ({"a": 4, "b": 1}, "b")],
)
def test_a_pod_goes_where_there_is_room_or_where_least_is_lacking(
    taken: dict[str, int], chosen: str
) -> None:
    places = [PodPlace(name="a", nodes=2), PodPlace(name="b", nodes=1)]
    found = place_for(places, taken)
    assert found is not None
    assert found.name == chosen
    assert place_for([], taken) is None


def test_a_pod_that_replaces_one_without_a_place_gets_a_place() -> None:
    nameless = PodPlace(name="", nodes=4)
    found = place_for([PodPlace(name="a", nodes=0), nameless], {"": 3})
    assert found is not None
    assert found.name == "a"
    assert place_for([nameless], {}) == nameless


def test_hosts_are_kept_out_of_every_alternative_that_the_template_has() -> None:
    """Terms are alternatives: one more of them would let more hosts in."""
    a = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    b = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["old"]}]}
    given = {
        "podAffinity": {"x": 1},
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [a, b]}
        },
    }
    first, second = terms(given, ["h1", "h2"])
    bans = [
        {"key": "metadata.name", "operator": "NotIn", "values": ["h1"]},
        {"key": "metadata.name", "operator": "NotIn", "values": ["h2"]},
    ]
    assert first == {**a, "matchFields": bans}
    assert second == {"matchFields": [*b["matchFields"], *bans]}
    (only,) = terms(None, ["h1"])
    assert only == {"matchFields": bans[:1]}
    assert "affinity" not in made()["spec"]


# --- what is there ---


def there(status: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "x-n7", "uid": "p", **meta},
        "spec": {"nodeName": "h1", "containers": [{"name": "main"}]},
        "status": status,
    }


def main_is(state: dict[str, Any], phase: str = "Running", **more: Any) -> dict[str, Any]:
    return {"phase": phase, "containerStatuses": [{"name": "main", "state": state}], **more}


NO_VOLUME = {"type": "PodReadyToStartContainers", "status": "False"}


def waiting(reason: str) -> dict[str, Any]:
    return main_is({"waiting": {"reason": reason, "message": "the words"}}, "Pending")


def seen(obj: dict[str, Any]) -> NodeSeen:
    event = fact(N7, view(obj))
    assert isinstance(event, NodeSeen)
    return event


def ended(obj: dict[str, Any]) -> NodeEnded:
    event = fact(N7, view(obj))
    assert isinstance(event, NodeEnded)
    return event


def test_a_pod_that_runs_is_near_and_one_that_pulls_does_not_run_yet() -> None:
    runs = seen(there(main_is({"running": {}})))
    assert (runs.near, runs.runs, runs.topology) == (True, True, ("h1",))
    pulls = seen(there(waiting("ContainerCreating")))
    assert (pulls.near, pulls.runs) == (True, False)


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
def test_an_image_that_is_not_to_be_had(reason: str) -> None:
    assert view(there(waiting(reason))).problem_type == "ImagePullBackOff"
    told = seen(there(waiting(reason)))
    assert (told.near, told.message) == (False, "main: the words")


@pytest.mark.parametrize("main", ["PodInitializing", ""])
def test_a_native_sidecar_that_crashes_keeps_its_pod_from_starting(main: str) -> None:
    crashes = {
        "name": "mesh",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
        "lastState": {"terminated": {"exitCode": 3}},
    }
    obj = there(waiting(main) if main else main_is({"running": {}}))
    obj["spec"]["initContainers"] = [{"name": "mesh", "restartPolicy": "Always"}]
    obj["status"]["initContainerStatuses"] = [crashes]
    told = seen(obj)
    assert told.near != bool(main), "what runs has started"
    words = "sidecar mesh: back-off 5m0s; it ended with exit code 3"
    assert told.message == (words if main else "")


@pytest.mark.parametrize(
    ("status", "prepared"),
    [
        ({}, False),  # its kubelet has not begun
        (waiting("ContainerCreating"), True),
        (waiting("ContainerCreating") | {"conditions": [NO_VOLUME]}, False),
        (waiting("ContainerCreating") | {"conditions": [NO_VOLUME | {"status": "True"}]}, True),
        (main_is({"running": {}}), True),
    ],
)
def test_a_pod_waits_for_its_volumes(status: dict[str, Any], prepared: bool) -> None:
    obj = there(status)
    assert view(obj).prepared is prepared
    del obj["spec"]["nodeName"]
    assert view(obj).prepared, "the scheduler says what is the matter then"


@pytest.mark.parametrize(
    ("inits", "waits_for"),
    [
        ([], ""),
        ([{"state": {"waiting": {"reason": "PodInitializing"}}}], ""),  # it has not begun
        ([{"state": {"running": {}}}], "i0"),
        ([{"state": {"terminated": {"exitCode": 0}}}], ""),
        ([{"state": {"terminated": {"exitCode": 0}}}, {"state": {"waiting": {}}}], "i1"),
        ([{"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 2}], "i0"),
        ([{"state": {"running": {}}, "native": True}], "i0"),  # its startupProbe fails
        ([{"state": {"running": {}}, "native": True, "started": True}], ""),
    ],
)
def test_a_pod_waits_for_its_init_containers(inits: list[dict[str, Any]], waits_for: str) -> None:
    obj = there(waiting("PodInitializing"))
    named = [{"name": f"i{number}"} | one for number, one in enumerate(inits)]
    obj["status"]["initContainerStatuses"] = named
    obj["spec"]["initContainers"] = [
        {"name": one["name"]} | ({"restartPolicy": "Always"} if "native" in one else {})
        for one in named
    ]
    reason, words = view(obj).waits_for
    assert (reason, words) == ("", "") or (reason == "PodInitializing" and waits_for in words)
    assert bool(words) == bool(waits_for)


def test_no_room() -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available",
    }
    obj = there({"phase": "Pending", "conditions": [condition]})
    del obj["spec"]["nodeName"]
    assert view(obj).problem_type == "Unschedulable"
    assert seen(obj).message == "0/3 nodes are available"
    obj["status"]["nominatedNodeName"] = "h1"
    assert seen(obj).message == (
        "0/3 nodes are available; "
        "it is to get a place on h1, if need be from Pods of lower priority"
    )


def test_a_fresh_pod_without_a_status_is_near() -> None:
    obj = there({})
    del obj["spec"]["nodeName"]
    assert seen(obj).near


def test_the_agents_end_counts_though_a_sidecar_goes_on() -> None:
    dead = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "last"}}
    statuses = [{"name": "sidecar", "state": {"running": {}}}, {"name": "main", "state": dead}]
    obj = there({"phase": "Running", "containerStatuses": statuses})
    obj["spec"]["containers"].insert(0, {"name": "sidecar"})
    told = ended(obj)
    assert (told.exit_code, told.free, told.output) == (137, False, "last")
    assert "OOMKilled" in told.why
    assert not view(obj).done
    assert view(obj).sidecars_run


def test_a_container_that_has_ended_is_the_pods_end_before_the_phase_says_so() -> None:
    dead = there(main_is({"terminated": {"exitCode": 127}}, "Pending"))
    assert ended(dead).exit_code == 127
    assert not view(dead).done, "its requests count until its phase says so"
    assert not view(dead).sidecars_run, "its kubelet is about to"
    assert not view(there(main_is({"running": {}}))).done
    assert not view(there({"phase": "Pending"})).done


def test_an_init_container_that_fails_is_named() -> None:
    dead = {"name": "fetch", "state": {"terminated": {"exitCode": 7}}}
    waiting = {"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}
    obj = there(
        {"phase": "Failed", "initContainerStatuses": [dead], "containerStatuses": [waiting]}
    )
    assert ended(obj).why == "its init container fetch ended with exit code 7"
    assert ended(obj).exit_code is None, "it is not the agent's"


@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "NodeShutdown"])
def test_an_eviction_is_nobodys_failure(reason: str) -> None:
    told = ended(there({"phase": "Failed", "reason": reason, "message": "low on memory"}))
    assert told.free
    assert told.by_platform
    assert told.exit_code is None
    assert "low on memory" in told.why


@pytest.mark.parametrize(
    ("kubelet", "controller", "gates", "cut_off"),
    [("True", "False", [], True), ("True", "True", [], False), ("False", "False", [], False),
     ("True", "False", [{"conditionType": "theirs"}], False)],
)  # fmt: skip
def test_a_host_that_is_not_heard_of(
    kubelet: str, controller: str, gates: list[Any], cut_off: bool
) -> None:
    """What kube-controller-manager leaves of a Pod's conditions when its node is NotReady."""
    conditions = [
        {"type": "ContainersReady", "status": kubelet}, {"type": "Ready", "status": controller}
    ]  # fmt: skip
    obj = there(main_is({"running": {}}, conditions=conditions))
    obj["spec"]["readinessGates"] = gates
    assert seen(obj).cut_off == cut_off


def test_a_deletion_is_notice() -> None:
    obj = there(
        main_is({"running": {}}),
        deletionTimestamp="2026-01-01T00:00:00Z",
        deletionGracePeriodSeconds=12,
    )
    told = seen(obj)
    assert told.leaving == "its Pod is being deleted"
    assert told.grace_s == 12
    obj["status"] = main_is({"terminated": {"exitCode": 143}}, "Failed")
    assert ended(obj).free


def test_a_disruption_is_notice() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "message": "preempted by p"}
    told = seen(there(main_is({"running": {}}, conditions=[condition])))
    assert "preempted by p" in told.leaving


def test_whose_a_pod_is() -> None:
    owner = {"controller": True, "uid": "uid-1"}
    label = {"elasticjob.dlrover/uid": "uid-1"}
    assert view(there({}, ownerReferences=[owner])).owner == "uid-1"
    assert view(there({}, labels=label)).owner == "uid-1", "left behind with --cascade=orphan"
    other = {"controller": True, "uid": "uid-2"}
    assert view(there({}, ownerReferences=[other], labels=label)).owner == "uid-2"
    assert view(there({})).owner == ""


@given(st.dictionaries(st.sampled_from(["phase", "reason", "message"]), st.text(max_size=9)))
def test_any_words_in_a_status_are_understood(status: dict[str, Any]) -> None:
    # no assert: no exception is raised
    fact(N7, view(there(status)))
