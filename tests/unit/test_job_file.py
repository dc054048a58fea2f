"""A fault in a job file is told by its path, what was found, and what was expected."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_py.cli import jobfile
from dlrover_py.kubernetes.json_yaml import Loader
from dlrover_py.protocol.errors import ConfigError, ExitCode, UnsupportedError
from dlrover_py.protocol.job import MASTER_TEMPLATE, TEMPLATE, ElasticJob, least_nodes
from dlrover_py.trainer.schedule import SaveInterval
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


def test_a_value_of_the_environment_is_text() -> None:
    document = copy.deepcopy(job_file())
    main = document["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
    main["env"] = [{"name": "EPOCHS", "value": 90}]
    assert faults(document).startswith(f"{TEMPLATE}.spec.containers[0].env[0].value: found a numb")


def test_an_object_of_another_kind_has_one_fault() -> None:
    spec: dict[str, Any] = {"pytorchReplicaSpecs": {}, "elasticPolicy": {}}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}, "spec": spec}
    assert len(faults(job).splitlines()) == 1


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
        (f"{WORKER}.template", [], [f"{WORKER}.template", "a list []", "expected a mapping"]),
        ("spec.replicaSpecs", ..., ["spec.replicaSpecs", "missing"]),
        ("spec.suspend", "perhaps", ["spec.suspend", "text 'perhaps'", "boolean"]),
        ("spec.distributionStrategy", "X", ["spec.distributionStrategy", "AllreduceStrategy"]),
        ("spec.checkpoint", {"bandwidth": 100}, ["spec.checkpoint.bandwidth", "1000000"]),
        ("metadata.name", "Bad_Name", ["metadata.name", "text 'Bad_Name'", "lower-case"]),
        ("metadata.name", "x" * 38, ["metadata.name", "37"]),
        ("kind", "Job", ["kind: found Job", "expected ElasticJob", "kubectl apply"]),
        ("kind", "PyTorchJob", ["kind: found PyTorchJob", "docs/migrating-from-pytorchjob.md"]),
        ("kind", "MPIJob", ["kind: found MPIJob", "docs/migrating-from-pytorchjob.md"]),
        ("kind", 3, ["kind", "a number 3", "'ElasticJob'"]),
        ("apiVersion", "v1", ["apiVersion", "elastic.iml.github.io/v1alpha1"]),
    ],
)
def test_path_found_expected(path: str, value: Any, words: list[str]) -> None:
    text = faults(changed(path, value))
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text


@pytest.mark.parametrize("interval", [10, "90s", "5m", "2h", "0.5h", "1.25m", "auto"])
@pytest.mark.parametrize("field", ["every", "persistEvery"])
def test_an_interval_has_the_forms_of_the_checkpointers_arguments(
    field: str, interval: int | str
) -> None:
    document = changed("spec.checkpoint", {field: interval})
    assert ElasticJob.parse(document).spec.checkpoint is not None
    SaveInterval.parse(field, interval)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "spec.elasticPolicy",
            "this is a field of a PyTorchJob: docs/migrating-from-pytorchjob.md",
        ),
        ("spec.runPolicy", "this is a field of a PyTorchJob: docs/migrating-from-pytorchjob.md"),
        ("spec.trainer", "this is a field of a TrainJob: docs/migrating-from-pytorchjob.md"),
        ("spec.mpiReplicaSpecs", "this is a field of a MPIJob: docs/migrating-from-pytorchjob.md"),
        (f"{WORKER}.maxRestarts", "this is a field of a PyTorchJob: docs/migrating-from"),
        ("metadata.generateName", "it is not supported: write metadata.name"),
        ("metadata.resourceVersion", "it belongs to an object in a cluster: leave it out"),
    ],
)
def test_a_field_of_another_kind_of_object_is_told_apart_from_a_misspelt_one(
    path: str, words: str
) -> None:
    (line,) = faults(changed(path, "x")).splitlines()
    assert words in line


@pytest.mark.parametrize("interval", [0, True, "0s", "0.0m", "5", "5d", "5min", "-1s", 1.5, [], ""])
def test_a_bad_interval_is_one_fault_in_one_line(interval: object) -> None:
    (line,) = faults(changed("spec.checkpoint", {"every": interval})).splitlines()
    assert line.startswith("spec.checkpoint.every: found ")
    assert line.endswith('expected a number of steps (10), a time ("30s", "5m", "2h") or "auto"')
    with pytest.raises(ConfigError):
        SaveInterval.parse("every", interval)


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
    [(None, "nothing"), ([], "a list"), ("x", "text"), (3, "a number"), (True, "a boolean")],
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
    for replicas, words in (
        (0, "1 to 100000"),
        (10**9, "1 to 100000"),
        (1, "minReplicas is 2"),
        (3, "multiple of 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            job.scaled(replicas)


def test_suspending_counts_the_generation_once() -> None:
    job = elastic_job().suspended(True)
    assert (job.spec.suspend, job.metadata.generation) == (True, 2)
    assert job.suspended(True) is job


# --- DLRover's files ---

DLROVER = """\
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: mnist, labels: {team: a}}
spec:
  distributionStrategy: AllreduceStrategy
  optimizeMode: single-job
  brainService: brain
  resourceLimits: {cpu: "8", memory: 16Gi}
  enableDynamicSharding: true
  enableElasticScheduling: true
  envs: {A: {name: A, value: b}, B: {name: B, valueFrom: {fieldRef: {fieldPath: metadata.name}}}}
  suspend: false
  replicaSpecs:
    dlrover-master:
      replicas: 1
      restartCount: 3
      template: {spec: {containers: [{name: main, resources: {limits: {cpu: 1}}}]}}
    worker:
      replicas: 4
      restartPolicy: Always
      restartCount: 1
      autoScale: false
      restartTimeout: 60
      priority: high
      BatchScheduler: volcano
      template:
        metadata: {annotations: {a: b}}
        spec:
          restartPolicy: Never
          containers:
            - name: main
              image: any
              command: [/bin/bash, -c, "dlrover-run --network-check --nnodes=3:$NODE_NUM t.py"]
              env: [{name: HOST, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}]
"""


def test_dlrovers_manifest_is_read_as_it_stands_and_told_what_has_no_effect() -> None:
    job = ElasticJob.parse(yaml.safe_load(DLROVER))
    assert (job.worker.replicas, job.worker.minimum, job.worker.restart_count) == (4, 3, 1)
    assert job.worker.priority_class == "high"
    assert job.without_effect() == [
        "spec.replicaSpecs.worker.restartPolicy",
        "spec.replicaSpecs.worker.restartTimeout",
        "spec.replicaSpecs.worker.BatchScheduler",
        "spec.replicaSpecs.dlrover-master.replicas",
        "spec.replicaSpecs.dlrover-master.restartCount",
        "spec.optimizeMode",
        "spec.brainService",
        "spec.resourceLimits",
        "spec.envs",
        "spec.enableDynamicSharding",
        "spec.enableElasticScheduling",
    ]
    assert job.for_clusters_only() == [
        "spec.replicaSpecs.worker.priority",
        "spec.replicaSpecs.dlrover-master.template",
        f"{TEMPLATE}.spec.containers[0].image",
    ]
    assert ElasticJob.parse(job_file()).without_effect() == []


def test_what_is_accepted_and_ignored_in_a_template_is_told() -> None:
    document = job_file(
        template={
            "metadata": {
                "finalizers": ["a/b"],
                "name": "mine",
                "labels": {"app": "mine", "team": "a"},
                "annotations": {"a": "b"},
            },
            "spec": {
                "restartPolicy": "OnFailure",
                "containers": [
                    {"name": "side"},
                    {"name": "main", "env": [{"name": "DLROVER_MASTER_ADDR"}, {"name": "MY"}]},
                ],
            },
        }
    )
    of_master: dict[str, Any]
    of_master = {"name": "main", "image": "i", "resources": {}, "resource": {}}
    of_master["env"] = [
        {"name": name}
        for name in ("DLROVER_MASTER_LEASE_S", "OTEL_EXPORTER_OTLP_HEADERS", "HTTP_PROXY")
    ]
    document["spec"]["replicaSpecs"]["dlrover-master"] = {
        "template": {
            "metadata": {"labels": {"a": "b"}, "finalizers": ["a/b"]},
            "spec": {
                "nodeSelector": {},
                "hostNetwork": True,
                "containers": [of_master, {"name": "side"}],
            },
        }
    }
    document["metadata"]["annotations"] = {"training_elastic_mode": "ucp", "other": "x"}
    assert ElasticJob.read(document).without_effect() == [
        f"{TEMPLATE}.metadata.finalizers",
        f"{TEMPLATE}.metadata.name",
        f"{TEMPLATE}.metadata.labels.app",
        f"{TEMPLATE}.spec.restartPolicy",
        f"{TEMPLATE}.spec.containers[1].env.DLROVER_MASTER_ADDR",
        f"{MASTER_TEMPLATE}.metadata.finalizers",
        f"{MASTER_TEMPLATE}.spec.hostNetwork",
        f"{MASTER_TEMPLATE}.spec.containers[0].image",
        f"{MASTER_TEMPLATE}.spec.containers[0].resource",
        f"{MASTER_TEMPLATE}.spec.containers[0].env.HTTP_PROXY",
        f"{MASTER_TEMPLATE}.spec.containers[1]",
        "metadata.annotations.training_elastic_mode",
    ]


def test_what_a_node_on_this_machine_does_not_follow_is_told() -> None:
    main: dict[str, Any]
    main = {"name": "main", "command": ["elastic-run"], "args": [], "env": [], "workingDir": "/x"}
    spec: dict[str, Any] = {"volumes": [], "restartPolicy": "Never", "tolerationz": []}
    spec["containers"] = [main | {"resources": {}, "resource": {}}, {"name": "side"}]
    job = ElasticJob.parse(job_file(template={"metadata": {"labels": {}}, "spec": spec}))
    assert job.for_clusters_only() == [
        f"{TEMPLATE}.spec.volumes",
        f"{TEMPLATE}.spec.containers[1]",
        f"{TEMPLATE}.spec.containers[0].workingDir",
        f"{TEMPLATE}.spec.containers[0].resources",
    ]
    assert ElasticJob.parse(job_file()).for_clusters_only() == []


@pytest.mark.parametrize("priority", ["7", "-7", "400000", "-400000"])
def test_a_whole_number_orders_jobs_and_is_no_class(priority: str) -> None:
    job = ElasticJob.parse(job_file(priority=priority))
    assert (job.worker.priority_class, job.worker.rank) == ("", int(priority))
    assert job.without_effect() == []


@pytest.mark.parametrize("priority", ["400001", "-400001", "9" * 250])
def test_a_priority_that_would_come_before_the_minima_of_others_is_refused(priority: str) -> None:
    with pytest.raises(ConfigError, match="expected a number from -400000 to 400000"):
        ElasticJob.parse(job_file(priority=priority))


def test_a_fraction_of_high_priority_is_no_class() -> None:
    job = ElasticJob.parse(job_file(priority="0.5"))
    assert job.worker.priority_class == ""
    assert job.without_effect() == ["spec.replicaSpecs.worker.priority"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("spec.distributionStrategy", "ParameterServerStrategy", "AllreduceStrategy"),
        ("spec.distributionStrategy", "CustomStrategy", "not supported yet"),
        ("spec.replicaSpecs.ps", {"replicas": 1}, "role ps"),
        ("spec.replicaSpecs.chief", {"replicas": 1, "huh": 1}, "role chief"),
        ("spec.replicaSpecs.master", {"replicas": 1}, "add its replicas to those of worker"),
    ],
)
def test_what_is_not_run_yet_is_told_apart_from_a_fault(path: str, value: Any, words: str) -> None:
    document = changed(path, value)
    for read in (ElasticJob.parse, ElasticJob.read):
        with pytest.raises(UnsupportedError, match=words) as caught:
            read(document)
        assert str(caught.value).startswith(path)


def test_a_role_without_nodes_keeps_no_job_from_running() -> None:
    document = changed("spec.replicaSpecs.ps", {"replicas": 0, "template": {"spec": {}}})
    for read in (ElasticJob.parse, ElasticJob.read):
        assert read(document).without_effect() == ["spec.replicaSpecs.ps"]
    with pytest.raises(UnsupportedError, match="role ps"):
        ElasticJob.parse(changed("spec.replicaSpecs.ps", {}))


def test_an_object_of_the_api_is_read_leniently() -> None:
    document = changed(f"{WORKER}.fromTheFuture", {"a": 1})
    document |= {"status": {"phase": "Running"}}
    document["spec"]["alsoNew"] = 1
    assert ElasticJob.read(document).worker.replicas == 3
    for path, value in ((f"{WORKER}.replicas", "x"), (f"{WORKER}.minReplicas", 9)):
        with pytest.raises(ConfigError, match=path.rpartition(".")[2]) as caught:
            ElasticJob.read(changed(path, value))
        assert not isinstance(caught.value, UnsupportedError)
    with pytest.raises(ConfigError, match="none named 'main'"):
        ElasticJob.read(
            changed(f"{WORKER}.template", {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}})
        )


@pytest.mark.parametrize(
    ("command", "least"),
    [
        (["elastic-run", "--nnodes=2:4", "t.py"], 2),
        (["elastic-run", "--nnodes", "2:4", "t.py"], 2),
        (["/usr/bin/dlrover-run", "--network-check", "--nnodes", "3", "t.py"], 3),
        (["/bin/bash", "-c", "cd /x && dlrover-run --nnodes=3:$NODE_NUM t.py"], 3),
        (
            [
                "sh",
                "-c",
                "exec dlrover-run \\\n  --x \\\n--nnodes='3:'$(NODE_NUM) t.py",
            ],
            3,
        ),
        (["sh", "-c", "dlrover-run --nnodes=$NODE_NUM t.py"], None),
        (["sh", "-c", "dlrover-run --nnodes=${MIN}:$NODE_NUM t.py"], None),
        (["elastic-run", "--nnodes=0:4", "t.py"], None),
        (["elastic-run", "t.py"], None),
        (["elastic-run", "t.py", "--nnodes=2:4"], None),
        (["elastic-run", "--nno=2:4", "t.py"], 2),
        (["elastic-run", "--nnodes=002", "t.py"], 2),
        (["elastic-run", f"--nnodes={'1' * 5000}", "t.py"], None),
        (["torchrun", "--nnodes=2:4", "t.py"], None),
        (["my-elastic-run", "--nnodes=2:4", "t.py"], None),
        ("elastic-run --nnodes=2:4", None),
    ],
)
def test_the_least_number_of_nodes_in_a_command(command: object, least: int | None) -> None:
    assert least_nodes({"spec": {"containers": [{"name": "main", "command": command}]}}) == least


PREPARED = "elastic-run --standalone --nnodes=1 prepare.py && elastic-run --nnodes=4 t.py"
AGAIN = "elastic-run --nnodes=3:4 t.py && elastic-run --standalone --nnodes=1 evaluate.py"
ALONE = ["elastic-run", "--standalone", "--nnodes=1", "t.py"]


@pytest.mark.parametrize(
    ("command", "env", "least"),
    [
        (["elastic-run", "t.py"], {}, None),
        (["sh", "-c", PREPARED], {}, 4),
        (["sh", "-c", AGAIN], {}, 3),
        (ALONE, {}, None),
        (["elastic-run", "t.py"], {"PET_NNODES": "1:2"}, 1),
        (["elastic-run", "--nnodes=2:4", "t.py"], {"PET_NNODES": "1:2"}, 2),
        (["sh", "-c", "elastic-run --nnodes=$NODE_NUM t.py"], {"PET_NNODES": "1:2"}, None),
        (["sh", "run.sh"], {"PET_NNODES": "2"}, 2),
        (["torchrun", "t.py"], {"PET_NNODES": "1:2"}, None),
        (ALONE, {"PET_NNODES": "2"}, None),
        (["elastic-run", "--nnodes=2", "t.py"], {"PET_STANDALONE": "1"}, None),
        (["elastic-run", "t.py"], {"PET_NNODES": "$(NODE_NUM)"}, None),
    ],
)
def test_only_what_joins_the_job_says_the_least_number_of_nodes(
    command: list[str], env: dict[str, str], least: int | None
) -> None:
    """A second container, or a preparation on each node alone, set the minimum of the job to 1."""
    variables: list[object] = [{"name": name, "value": value} for name, value in env.items()]
    variables += [{"name": "PET_NNODES", "valueFrom": {}}, "no mapping"]
    main = {"name": "main", "command": command, "env": variables}
    other = {"name": "other", "command": ["elastic-run", "--nnodes=1", "x.py"]}
    for containers in ([main], [main, other], [other, main]):
        assert least_nodes({"spec": {"containers": containers}}) == least


def test_standalone_in_the_environment_is_remarked_at_its_place() -> None:
    main: dict[str, Any] = {"name": "main", "image": "x", "command": ["elastic-run", "t.py"]}
    main |= {"env": [{"name": "PET_STANDALONE", "value": "1"}]}
    job = ElasticJob.parse(job_file(2, template={"spec": {"containers": [main]}}))
    where = "spec.replicaSpecs.worker.template.spec.containers[0].env: PET_STANDALONE is given"
    assert job.worker.command_remarks().startswith(where)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"restartPolicy": "Never"}, True),
        ({"restartPolicy": "never"}, True),
        ({"restartPolicy": "Never", "restartCount": 3}, True),
        ({"restartPolicy": "Never", "restartCount": 0}, False),
        ({"restartPolicy": "OnFailure"}, False),
        ({}, False),
    ],
)
def test_a_policy_that_asks_for_no_restarts_is_told_what_does(
    fields: dict[str, object], told: bool
) -> None:
    text = ElasticJob.parse(job_file(2, **fields)).worker.restart_remarks()
    assert ("restartCount decides, and is 3" in text) == told


def test_a_name_that_cannot_be_one_is_told_the_form_in_words() -> None:
    with pytest.raises(ConfigError, match="found text 'My_Job': expected lower-case letters"):
        ElasticJob.parse(job_file() | {"metadata": {"name": "My_Job"}})


def test_a_script_in_the_place_of_a_job_file_is_told_its_command(tmp_path: Path) -> None:
    script = tmp_path / "train it.py"
    script.write_text('"""Train."""\nimport sys\n')
    with pytest.raises(ConfigError, match=r"found a script: elastic-run '.+train it\.py' runs it"):
        jobfile.load(script)


def test_dlrovers_scale_plans_have_a_counterpart() -> None:
    """The advice was "kubectl apply", but there is no such kind."""
    with pytest.raises(ConfigError, match=r"no ScalePlan here: .+ dlrover job scale") as e:
        ElasticJob.parse(job_file() | {"kind": "ScalePlan"})
    assert "apply" not in str(e.value)


def test_the_minimum_is_the_specs_then_the_commands_then_all() -> None:
    template = {"spec": {"containers": [{"name": "main", "args": ["elastic-run", "--nnodes=3:9"]}]}}
    job = ElasticJob.parse(job_file(6, template=template))
    assert job.worker.minimum == 3
    assert job.scaled(2).worker.minimum == 2
    assert ElasticJob.parse(job_file(6, template=template, nodeUnit=2)).worker.minimum == 4
    assert ElasticJob.parse(job_file(6, template=template, minReplicas=1)).worker.minimum == 1
    assert ElasticJob.parse(job_file(6)).scaled(8).worker.minimum == 8


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 10)}]}}\n"
    for a, b in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, MERGES], ids=["aliases", "merges"])
def test_a_file_that_grows_by_its_aliases_is_refused(text: str) -> None:
    """Eight lines made 10^8 values of it, and took half a minute and all memory."""
    with pytest.raises(yaml.YAMLError, match="its aliases expand to more than 1000000 values"):
        yaml.load(text, Loader=Loader)
    fine = "a: &a {k: 1}\nb: {<<: *a, l: [*a, *a]}"
    assert yaml.load(fine, Loader=Loader) == {"a": {"k": 1}, "b": {"k": 1, "l": [{"k": 1}] * 2}}


LOOPS = ["&a [*a]", "a: &a {b: *a}", "a: &a\n  <<: *a\n", "a: &a [&b [*b, *a]]"]


@pytest.mark.parametrize("text", LOOPS)
def test_a_value_that_contains_itself_is_refused(tmp_path: Path, text: str) -> None:
    """YAML allows it, JSON does not. `dlrover job submit` printed a traceback."""
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="1: not valid YAML: an alias is inside the value"):
        jobfile.load_all(file)


def test_fields_that_are_null_and_a_status_are_left_out(tmp_path: Path) -> None:
    """As ``kubectl create`` does with what a Helm template or ``kubectl get -o yaml`` writes."""
    plain = job_file()
    written = copy.deepcopy(plain)
    written["status"] = {"phase": "Running"}
    written["metadata"] |= {"creationTimestamp": None, "labels": None}
    written["spec"] |= {"suspend": None}
    worker = written["spec"]["replicaSpecs"]["worker"]
    worker["restartCount"] = None
    worker["template"]["spec"]["containers"][0] |= {"image": "x", "env": None, "args": None}
    plain["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]["image"] = "x"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(written))
    assert jobfile.load(path).written == plain
    assert [one.written for one in jobfile.load_all(path)] == [plain]
