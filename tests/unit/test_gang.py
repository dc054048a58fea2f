"""The PodGroup that a template names: when it is written, and what is said of it."""

from dataclasses import replace
from typing import Any

import pytest

from dlrover_operator.actions import KeepPodGroup
from dlrover_operator.gang import (
    POD_GROUPS,
    WORKLOADS,
    change,
    changed,
    gang_of,
    own_kind,
    verdict,
)
from dlrover_operator.manifests import Options
from dlrover_operator.observed import Gang, ObservedJob, PodGroup
from dlrover_operator.plan import plan
from dlrover_py.kubernetes.kinds import COSCHEDULING_GROUPS, SCHEDULING, VOLCANO_GROUPS, Kind
from dlrover_py.protocol import names
from dlrover_py.protocol.job import ElasticJob
from tests.builders import job_file

VOLCANO = Gang(VOLCANO_GROUPS, "g", queue="team")
BETA = Kind(SCHEDULING, "v1beta1", "podgroups", "PodGroup")
ALPHA = Kind(SCHEDULING, "v1alpha1", "workloads", "Workload")
OWN = Gang(BETA, "g", priority_class="urgent")
PART = Gang(ALPHA, "w", "g")


def job(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    document = job_file(4, minReplicas=2)
    document["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
    template = document["spec"]["replicaSpecs"]["worker"]["template"]
    template["metadata"] = metadata
    template["spec"] |= spec or {}
    return document


@pytest.mark.parametrize(
    ("metadata", "gang"),
    [
        ({}, None),
        ({"annotations": {"scheduling.k8s.io/group-name": ""}}, None),
        ({"annotations": "g", "labels": ["g"]}, None),
        (
            {
                "annotations": {
                    "scheduling.k8s.io/group-name": "g",
                    "scheduling.volcano.sh/queue-name": "team",
                }
            },
            VOLCANO,
        ),
        (
            {"labels": {"scheduling.x-k8s.io/pod-group": "g"}},
            Gang(COSCHEDULING_GROUPS, "g"),
        ),
    ],
)
def test_the_group_is_the_one_that_the_schedulers_own_words_name(
    metadata: dict[str, Any], gang: Gang | None
) -> None:
    assert gang_of(job(**metadata)) == gang


@pytest.mark.parametrize(
    ("spec", "gang"),
    [
        ({"schedulingGroup": {"podGroupName": "g"}}, Gang(POD_GROUPS, "g")),
        (
            {"schedulingGroup": {"podGroupName": "g"}, "priorityClassName": "urgent"},
            Gang(POD_GROUPS, "g", priority_class="urgent"),
        ),
        ({"workloadRef": {"name": "w", "podGroup": "g"}}, Gang(WORKLOADS, "w", "g")),
        ({"workloadRef": {"name": "w"}}, None),
        ({"schedulingGroup": "g", "workloadRef": ["w"]}, None),
    ],
)
def test_the_group_of_kubernetes_own_scheduler_is_named_in_the_spec(
    spec: dict[str, Any], gang: Gang | None
) -> None:
    assert gang_of(job(spec)) == gang


@pytest.mark.parametrize(
    ("wanted", "served", "found", "words"),
    [
        (POD_GROUPS, [BETA, replace(BETA, version="v1alpha3")], BETA, ""),
        (POD_GROUPS, [ALPHA], None, "does not serve podgroups of scheduling.k8s.io"),
        (POD_GROUPS, [], None, "GenericWorkload"),
        (WORKLOADS, [ALPHA], ALPHA, ""),
        (WORKLOADS, [replace(ALPHA, version="v1beta1"), BETA], None, "in schedulingGroup"),
    ],
)
def test_the_version_is_the_one_that_the_server_prefers(
    wanted: Kind, served: list[Kind], found: Kind | None, words: str
) -> None:
    kind, missing = own_kind(wanted, served)
    assert kind == found
    assert words in missing
    assert bool(missing) == (found is None)


def test_the_number_of_a_group_is_the_least_size_with_which_a_round_is_formed() -> None:
    document = job(annotations={"scheduling.k8s.io/group-name": "g"})
    sizes = {"mode": "auto", "sizes": [4, 8]}
    document["spec"]["replicaSpecs"]["worker"] |= {"maxReplicas": 8, "autoscale": sizes}
    read = ElasticJob.read(document)
    for gang, spec in (
        (VOLCANO, {"minMember": 4, "queue": "team"}),
        (replace(OWN, priority_class=""), {"schedulingPolicy": {"gang": {"minCount": 4}}}),
    ):
        made = change(read, gang)
        assert made is not None
        assert made["spec"] == spec
        group = PodGroup(read.metadata.uid, 4)
        assert verdict(read, replace(gang, group=group))[0]
        assert not verdict(read, replace(gang, group=replace(group, minimum=2)))[0]


def test_kubernetes_own_groups_are_written_in_their_form() -> None:
    read = ElasticJob.read(job())
    made = change(read, OWN)
    assert made is not None
    policy = {"gang": {"minCount": 2}}
    assert made["spec"] == {"schedulingPolicy": policy, "priorityClassName": "urgent"}
    assert changed(made["spec"]) == {"schedulingPolicy": policy}
    assert PodGroup.of(made) == PodGroup("u", 2)
    made = change(read, PART)
    assert made is not None
    assert made["spec"] == {
        "controllerRef": {"apiGroup": names.GROUP, "kind": "ElasticJob", "name": "x"},
        "podGroups": [{"name": "g", "policy": policy}],
    }
    assert PodGroup.parts(made) == {"g": PodGroup("u", 2)}


@pytest.mark.parametrize(
    ("gang", "written", "true", "words"),
    [
        (VOLCANO, True, False, "the PodGroup g does not exist yet"),
        (replace(VOLCANO, group=PodGroup("u", 2)), False, True, "has minMember 2"),
        (replace(VOLCANO, group=PodGroup("u", 4)), True, False, "the job's minimum is 2"),
        (replace(VOLCANO, group=PodGroup("", 2)), False, True, "has minMember 2"),
        (replace(VOLCANO, group=PodGroup("other", 4)), False, False, "does not belong to this"),
        (replace(VOLCANO, missing="the API is not served"), False, False, "not served: install"),
        (replace(OWN, group=PodGroup("u", 3, "i")), True, False, "g has minCount 3, and"),
        (replace(OWN, group=PodGroup("u", 3, "i", True)), False, False, "it is being deleted"),
        (replace(PART, group=PodGroup("u", 2)), False, True, "the group g of the Workload w has"),
        (replace(PART, group=PodGroup("", 0)), False, False, "delete the Workload, which does"),
    ],
)
def test_it_has_the_minimum_of_its_job_and_no_other_owner(
    gang: Gang, written: bool, true: bool, words: str
) -> None:
    document = job()
    read = ElasticJob.read(document)
    wanted = change(read, gang)
    assert (wanted is not None) == written
    if wanted is not None and gang.queue:
        assert wanted["spec"] == {"minMember": 2, "queue": "team"}
    found, _, message = verdict(read, gang)
    assert found == true
    assert words in message
    made = plan(ObservedJob(document, gang=gang), 1.8e9, Options(image="i"))
    kept = [action for action in made.actions if isinstance(action, KeepPodGroup)]
    assert len(kept) == written
    (status,) = [s for s in made.status if hasattr(s, "status")]
    condition = next(c for c in status.status["conditions"] if c["type"] == "GangReady")
    assert condition["status"] == str(true)


def test_a_group_of_a_workload_that_has_another_name_now_is_written_anew() -> None:
    read = ElasticJob.read(job())
    made = change(read, PART)
    assert made is not None
    renamed = replace(PART, part="h")
    found = PodGroup.part(PodGroup.parts(made), "h")
    assert found == PodGroup("u", 0)
    again = change(read, replace(renamed, group=found))
    assert again is not None
    assert [one["name"] for one in again["spec"]["podGroups"]] == ["h"]
    right = PodGroup.part(PodGroup.parts(again), "h")
    assert change(read, replace(renamed, group=right)) is None
    assert PodGroup.part({}, "h") == PodGroup("", 0), "a Workload without groups is another's"


def test_without_a_group_nothing_is_said() -> None:
    made = plan(ObservedJob(job()), 1.8e9, Options(image="i"))
    assert "GangReady" not in str(made)
