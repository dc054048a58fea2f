"""The PodGroup that a template names: when it is written, and what is said of it."""

from dataclasses import replace
from typing import Any

import pytest

from dlrover_operator.actions import KeepPodGroup
from dlrover_operator.gang import change, gang_of, verdict
from dlrover_operator.manifests import Options
from dlrover_operator.observed import Gang, ObservedJob, PodGroup
from dlrover_operator.plan import plan
from dlrover_py.kubernetes.kinds import COSCHEDULING_GROUPS, VOLCANO_GROUPS
from dlrover_py.protocol.job import ElasticJob
from tests.builders import job_file

VOLCANO = Gang(VOLCANO_GROUPS, "g", "team")


def job(**metadata: Any) -> dict[str, Any]:
    document = job_file(4, minReplicas=2)
    document["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
    document["spec"]["replicaSpecs"]["worker"]["template"]["metadata"] = metadata
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
    ("gang", "written", "true", "words"),
    [
        (VOLCANO, True, False, "the PodGroup g does not exist yet"),
        (replace(VOLCANO, group=PodGroup("u", 2)), False, True, "has minMember 2"),
        (replace(VOLCANO, group=PodGroup("u", 4)), True, False, "the job's minimum is 2"),
        (replace(VOLCANO, group=PodGroup("", 2)), False, True, "has minMember 2"),
        (replace(VOLCANO, group=PodGroup("other", 4)), False, False, "does not belong to this"),
        (replace(VOLCANO, missing="the API is not served"), False, False, "not served: install"),
    ],
)
def test_it_has_the_minimum_of_its_job_and_no_other_owner(
    gang: Gang, written: bool, true: bool, words: str
) -> None:
    document = job()
    read = ElasticJob.read(document)
    wanted = change(read, gang)
    assert (wanted is not None) == written
    if wanted is not None:
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


def test_without_a_group_nothing_is_said() -> None:
    made = plan(ObservedJob(job()), 1.8e9, Options(image="i"))
    assert "GangReady" not in str(made)
