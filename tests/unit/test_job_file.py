"""A fault in a job file is told by its path, what was found, and what was expected."""

import copy
from typing import Any

import pytest

from dlrover_py.protocol.errors import ConfigError, ExitCode
from dlrover_py.protocol.job import ElasticJob
from tests.builders import elastic_job, job_file

WORKER = "spec.replicaSpecs.worker"


def faults(document: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ElasticJob.parse(document)
    assert caught.value.exit_code == ExitCode.USAGE
    return str(caught.value)


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(job_file())
    *above, last = path.split(".")
    place: Any = document
    for key in above:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


def test_a_good_file_is_read_with_its_defaults() -> None:
    job = ElasticJob.parse(job_file(3))
    worker = job.worker
    assert (worker.replicas, worker.minimum, worker.node_unit, worker.restart_count) == (3, 3, 1, 3)
    assert worker.container().command == ["elastic-run", "t.py"]
    assert not job.spec.suspend


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (f"{WORKER}.replicas", "many", [f"{WORKER}.replicas", "text 'many'", "integer"]),
        (f"{WORKER}.replicas", 0, [f"{WORKER}.replicas", "a number 0", "greater than or equal"]),
        (f"{WORKER}.replicas", 1.5, [f"{WORKER}.replicas", "a number 1.5", "integer"]),
        (f"{WORKER}.replicas", None, [f"{WORKER}.replicas", "nothing", "integer"]),
        (f"{WORKER}.minReplica", 2, [f"{WORKER}.minReplica", "unknown field", "a number 2"]),
        (f"{WORKER}.restartCount", -1, [f"{WORKER}.restartCount", "a number -1"]),
        (f"{WORKER}.template", ..., [f"{WORKER}.template", "missing"]),
        (f"{WORKER}.template", [], [f"{WORKER}.template", "a list []", "dictionary"]),
        ("spec.replicaSpecs", ..., ["spec.replicaSpecs", "missing"]),
        ("spec.suspend", "perhaps", ["spec.suspend", "text 'perhaps'", "boolean"]),
        ("spec.distributionStrategy", "X", ["spec.distributionStrategy", "AllreduceStrategy"]),
        ("metadata.name", "Bad_Name", ["metadata.name", "text 'Bad_Name'", "pattern"]),
        ("metadata.name", "x" * 38, ["metadata.name", "37"]),
        ("kind", "Job", ["kind", "text 'Job'", "'ElasticJob'"]),
        ("apiVersion", "v1", ["apiVersion", "elastic.iml.github.io/v1alpha1"]),
    ],
)
def test_path_found_expected(path: str, value: Any, words: list[str]) -> None:
    text = faults(changed(path, value))
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        ({"replicas": 2, "minReplicas": 3}, ["minReplicas is 3", "replicas is 2", "≤"]),
        ({"replicas": 4, "maxReplicas": 3}, ["replicas is 4", "maxReplicas is 3", "≤"]),
        ({"replicas": 5, "nodeUnit": 2}, ["replicas is 5", "nodeUnit is 2", "4 or 6"]),
        (
            {"replicas": 4, "minReplicas": 1, "nodeUnit": 2},
            ["minReplicas is 1", "multiple of 2", "such as 2"],
        ),
    ],
)
def test_relations(worker: dict[str, int], words: list[str]) -> None:
    text = faults(job_file(**worker))
    assert text.startswith(f"{WORKER}: ")
    for word in words:
        assert word in text


def test_all_faults_are_told_at_once() -> None:
    text = faults(changed(WORKER, {"replicas": "x", "restartCount": "y", "huh": 1}))
    assert len(text.splitlines()) == 4  # and the template is missing


@pytest.mark.parametrize(
    ("document", "found"),
    [(None, "nothing"), ([], "a list"), ("x", "text"), (3, "a number"), (True, "a truth value")],
)
def test_not_a_mapping(document: object, found: str) -> None:
    text = faults(document)
    assert found in text
    assert "apiVersion" in text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({}, "at least one container"),
        ({"spec": {"containers": []}}, "at least one container"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}, "none named 'main'"),
        ({"spec": {"containers": [{"name": "main", "command": "x"}]}}, "command"),
    ],
)
def test_the_container_that_runs_the_agent(template: dict[str, Any], words: str) -> None:
    text = faults(changed(f"{WORKER}.template", template))
    assert text.startswith(f"{WORKER}.template.spec.containers")
    assert words in text


def test_scaling_keeps_the_bounds_and_counts_the_generation() -> None:
    job = elastic_job(2, 2, unit=2)
    assert job.scaled(4).worker.replicas == 4
    assert job.scaled(4).metadata.generation == job.metadata.generation + 1
    assert job.scaled(2) is job
    for replicas, words in ((0, "at least 1"), (1, "minReplicas is 2"), (3, "multiple of 2")):
        with pytest.raises(ConfigError, match=words):
            job.scaled(replicas)


def test_suspending_counts_the_generation_once() -> None:
    job = elastic_job().suspended(True)
    assert (job.spec.suspend, job.metadata.generation) == (True, 2)
    assert job.suspended(True) is job
