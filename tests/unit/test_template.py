"""Pod templates of any form: what cannot be read is named, and ends no program."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_operator import manifests, observed
from dlrover_operator import plan as operator
from dlrover_py.cli import jobfile
from dlrover_py.cli.cluster import _row, job_view
from dlrover_py.master.platform.kubernetes.pods import PodContext, pod, refusal
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import SERVER_TEMPLATE, TEMPLATE, ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.template import faults_of, in_lines, is_deeper
from scripts import pod_fields
from tests.builders import job_file
from tests.templates import JSON, broken, templates

SITE = PodContext(uid="u1", master_addr="10.0.0.1:50001")
MAIN = {"name": "main", "image": "i"}


def test_the_table_has_what_the_client_has() -> None:
    assert pod_fields.MODULE.read_text() == pod_fields.module(), (
        "run: python scripts/pod_fields.py --write"
    )


# --- what is named ---


def of_main(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [MAIN | fields]}}


def of_spec(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [MAIN], **fields}}


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def terms(value: Any) -> dict[str, Any]:
    return of_spec(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": value}}})


QUOTE = "text (put it in quotes)"
QUANTITY = "a quantity of at least 0, such as 500m, 2 or 10Gi"
FORMS = [
    (of_main(env={"A": "b"}), "spec.containers[0].env", "a list"),
    (of_main(env=["A=b"]), "spec.containers[0].env[0]", "a mapping"),
    (of_main(env=[None]), "spec.containers[0].env[0]", "a mapping"),
    (of_main(volumeMounts={"d": "/data"}), "spec.containers[0].volumeMounts", "a list"),
    (of_main(volumeMounts=["d:/data"]), "spec.containers[0].volumeMounts[0]", "a mapping"),
    (of_main(image={"a": "b"}), "spec.containers[0].image", "text"),
    (of_main(command=["a", ["b"]]), "spec.containers[0].command[1]", "text"),
    (of_main(command="elastic-run"), "spec.containers[0].command", "a list"),
    (of_spec(volumes={"d": {}}), "spec.volumes", "a list"),
    (of_spec(volumes=["d"]), "spec.volumes[0]", "a mapping"),
    (of_spec(affinity="x"), "spec.affinity", "a mapping"),
    (of_spec(affinity={"nodeAffinity": "x"}), "spec.affinity.nodeAffinity", "a mapping"),
    (of_spec(nodeSelector=["a"]), "spec.nodeSelector", "a mapping"),
    (terms({"a": 1}), f"spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms", "a list"),
    ({"metadata": {"labels": "a=b"}, **of_spec()}, "metadata.labels", "a mapping"),
    ({"metadata": {"annotations": ["a"]}, **of_spec()}, "metadata.annotations", "a mapping"),
    ({"metadata": "x", **of_spec()}, "metadata", "a mapping"),
    ({"spec": {"containers": ["main"]}}, "spec.containers[0]", "a mapping"),
    (of_spec(nodeSelector={"gpu": True}), "spec.nodeSelector.gpu", QUOTE),
    ({"metadata": {"labels": {"a": 1}}, **of_spec()}, "metadata.labels.a", QUOTE),
    (of_spec(priorityClassName=5), "spec.priorityClassName", QUOTE),
    (of_main(command=["a", 1.5]), "spec.containers[0].command[1]", QUOTE),
    (of_spec(hostNetwork="true"), "spec.hostNetwork", "true or false without quotes"),
    (of_spec(hostNetwork=1), "spec.hostNetwork", "true or false"),
    (
        of_main(ports=[{"containerPort": "80"}]),
        "spec.containers[0].ports[0].containerPort",
        "a whole number without quotes",
    ),
    (
        of_main(securityContext={"runAsUser": "root"}),
        "spec.containers[0].securityContext.runAsUser",
        "a whole number",
    ),
    (
        of_spec(securityContext={"supplementalGroups": [True]}),
        "spec.securityContext.supplementalGroups[0]",
        "a whole number",
    ),
    (
        of_spec(terminationGracePeriodSeconds="30s"),
        "spec.terminationGracePeriodSeconds",
        "a whole number",
    ),
    (
        of_spec(terminationGracePeriodSeconds=0.5),
        "spec.terminationGracePeriodSeconds",
        "a whole number",
    ),
    (
        of_spec(volumes=[{"name": "a", "emptyDir": {"sizeLimit": "1 Gi"}}]),
        "spec.volumes[0].emptyDir.sizeLimit",
        QUANTITY,
    ),
    *(
        (
            of_main(resources={"limits": {"cpu": amount}}),
            "spec.containers[0].resources.limits.cpu",
            QUANTITY,
        )
        for amount in ("10 Gi", "10GB", -1, "-1", "-0.5", "", "1K", "1e", "2x", True, "１")
    ),
    (
        of_main(imagePullPolicy="always"),
        "spec.containers[0].imagePullPolicy",
        "Always, IfNotPresent or Never; did you mean Always?",
    ),
    (
        of_spec(tolerations=[{"operator": "Exist"}]),
        "spec.tolerations[0].operator",
        "Exists, Equal, Lt or Gt; did you mean Exists?",
    ),
]


@pytest.mark.parametrize(("template", "path", "expected"), FORMS)
def test_a_place_of_a_wrong_form_is_named(
    template: dict[str, Any], path: str, expected: str
) -> None:
    job = ElasticJob.read(job_file(template=template))
    with pytest.raises(ConfigError) as told:
        pod(job, NodeId("n0"), SITE, ["host"])
    (line,) = str(told.value).splitlines()
    assert line.startswith(f"{TEMPLATE}.{path}: found ")
    assert line.endswith(f": expected {expected}")
    with pytest.raises(ConfigError) as told:
        ElasticJob.parse(job_file(template=template))
    assert line in str(told.value)


def mounts(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "mountPath": f"/{name}"} for name in names]


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (
            {"spec": {"containers": [MAIN, MAIN]}},
            "containers[1].name: found text 'main': expected another name than that of "
            f"{TEMPLATE}.spec.containers[0]",
        ),
        (
            of_spec(initContainers=[MAIN]),
            "initContainers[0].name: found text 'main': expected another name than that of "
            f"{TEMPLATE}.spec.containers[0]",
        ),
        (
            of_spec(volumes=[{"name": "a", "emptyDir": {}}] * 2),
            "volumes[1].name: found text 'a': expected another name than that of "
            f"{TEMPLATE}.spec.volumes[0]",
        ),
        (
            {
                "spec": {
                    "containers": [MAIN | {"volumeMounts": mounts("date")}],
                    "volumes": [{"name": "data", "emptyDir": {}}],
                }
            },
            "containers[0].volumeMounts[0].name: found text 'date': expected the name of a volume; "
            "did you mean data?",
        ),
    ],
)
def test_a_name_that_does_not_fit_the_others_is_refused(
    template: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as told:
        ElasticJob.parse(job_file(template=template))
    assert str(told.value) == f"{TEMPLATE}.spec.{line}"


def test_volumes_that_are_added_later_may_be_mounted() -> None:
    names = ("dlrover-job", "dlrover-job-shm", "a")
    volumes = [{"name": "a", "emptyDir": {}}]
    template = of_spec(
        volumes=volumes, initContainers=[{"name": "i", "volumeMounts": mounts(*names)}]
    )
    assert ElasticJob.parse(job_file(template=template)).worker.template == template


def test_a_value_that_is_not_like_a_known_one_may_be_newer() -> None:
    template = of_spec(tolerations=[{"operator": "NewerThan", "effect": "", "key": "a"}])
    (fault,) = ElasticJob.parse(job_file(template=template)).template_faults()
    assert fault.unknown
    assert fault.message == "found text 'NewerThan': expected Exists, Equal, Lt or Gt"


@pytest.mark.parametrize(
    ("template", "path", "advice"),
    [
        (of_main(resource={}), "spec.containers[0].resource", "did you mean resources?"),
        (
            of_main(imagePullPolice="Always"),
            "spec.containers[0].imagePullPolice",
            "imagePullPolicy",
        ),
        (of_main(Image="x"), "spec.containers[0].Image", "did you mean image?"),
        (of_main(env=[{"nam": "A"}]), "spec.containers[0].env[0].nam", "did you mean name?"),
        (of_spec(tolerationz=[]), "spec.tolerationz", "did you mean tolerations?"),
        (
            of_spec(volumes=[{"name": "a", "emptyDirectory": {}}]),
            "spec.volumes[0].emptyDirectory",
            "",
        ),
        (of_spec(qqqq=1), "spec.qqqq", "check its spelling"),
        ({"metadata": {"label": {}}, **of_spec()}, "metadata.label", "did you mean labels?"),
    ],
)
def test_an_unknown_field_is_named_with_the_likely_one(
    template: dict[str, Any], path: str, advice: str
) -> None:
    (fault,) = faults_of(template, TEMPLATE)
    assert (fault.path, fault.unknown) == (f"{TEMPLATE}.{path}", True)
    assert advice in fault.message


def test_what_the_api_server_does_not_see_is_refused_before_it_is_asked() -> None:
    for template in ({"metadata": {"label": {}}, **of_spec()}, {"metadat": {}, **of_spec()}):
        with pytest.raises(ConfigError, match="unknown field"):
            pod(ElasticJob.read(job_file(template=template)), NodeId("n0"), SITE)
    pod(ElasticJob.read(job_file(template=of_spec(newer=1))), NodeId("n0"), SITE)


def test_a_refusal_is_told_by_the_templates_paths() -> None:
    """The server counts our variables too, and does not know what was meant."""
    template = of_main(resource={}, env=[{"name": "A", "valu": "b"}])
    job = ElasticJob.read(job_file(template=template))
    words = (
        'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field '
        '"spec.containers[0].env[14].valu", unknown field "spec.containers[0].resource"'
    )
    lines = refusal(job, words, NodeId("n0")).splitlines()
    assert lines == [
        f"{TEMPLATE}.spec.containers[0].resource: unknown field; did you mean resources?",
        f"{TEMPLATE}.spec.containers[0].env[0].valu: unknown field; did you mean value?",
    ]
    newer = words.replace("resource", "resources")  # this server does not know it yet
    assert refusal(job, newer, NodeId("n0")) == newer
    assert refusal(job, "is invalid: image", NodeId("n0")) == "is invalid: image"
    assert refusal(job, words, NodeId("ps0")) == words, "the job has no servers"


def test_a_refusal_of_a_server_is_told_by_the_path_of_its_own_template() -> None:
    document = job_file(template=of_main(resource={}))
    main = {"name": "main", "command": ["dlrover", "ps", "server"], "resource": {}}
    document["spec"]["replicaSpecs"]["ps"] = {"template": {"spec": {"containers": [main]}}}
    job = ElasticJob.read(document)
    words = 'unknown field "spec.containers[0].resource"'
    advice = "spec.containers[0].resource: unknown field; did you mean resources?"
    assert refusal(job, words, NodeId("ps0")) == f"{SERVER_TEMPLATE}.{advice}"
    assert refusal(job, words, NodeId("n0")) == f"{TEMPLATE}.{advice}"


# --- nothing but a ConfigError ---


@given(templates())
def test_what_has_the_form_has_no_fault(template: dict[str, Any]) -> None:
    """A text that is no value of an enumeration may be one of a newer version."""
    for fault in faults_of(template, "t"):
        assert fault.unknown, fault
        assert "expected" in fault.message, "it is no unknown field"


@given(JSON)
def test_anything_is_looked_at(value: Any) -> None:
    for fault in faults_of(value, "t"):
        assert fault.path.startswith("t")
        assert str(fault)


def obj_of(worker: Any, master: Any = None) -> dict[str, Any]:
    roles = {"worker": {"replicas": 2, "template": worker}}
    if master is not None:
        roles["dlrover-master"] = {"template": master}
    meta = {"name": "x", "namespace": "d", "uid": "u", "generation": 1}
    return {**job_file(2), "metadata": meta, "spec": {"replicaSpecs": roles}}


def attempt(call: Callable[[], Any]) -> Any:
    """What it returns, or the words of its ConfigError."""
    try:
        return call()
    except ConfigError as error:
        return str(error)


TEMPLATES = templates() | broken()


@settings(max_examples=150)
@given(TEMPLATES, TEMPLATES | st.none(), st.lists(st.just("host"), max_size=1))
def test_no_template_ends_a_program(worker: Any, master: Any, avoid: list[str]) -> None:
    obj = obj_of(worker, master)
    before = copy.deepcopy(obj)
    options = manifests.Options(image="m")
    planned = operator.plan(observed.ObservedJob(obj), 1e6, options)
    json.dumps([getattr(action, "obj", None) for action in planned.actions])
    for phase in ("", "Running"):
        status = {"training": {"phase": phase}} if phase else {}
        operator.plan(observed.ObservedJob(obj | {"status": status}), 1e6, options)
        job_view(obj | {"status": status}, (), (), where="here")
        _row(obj | {"status": status})
    for strict in (False, True):
        obj_again = copy.deepcopy(obj)
        job = attempt(partial(ElasticJob.parse if strict else ElasticJob.read, obj_again))
        if isinstance(job, str):
            continue
        job.without_effect()
        job.for_clusters_only()
        manifests.deployment(job, "10.0.0.1", options)
        manifests.network_policy(job)
        manifests.workers_network_policy(job)
        made = attempt(partial(pod, job, NodeId("n0"), SITE, avoid))
        if isinstance(made, str):
            # parse() names all else; unknown fields are remarks there.
            assert not strict or "/var/run/dlrover" in made or "unknown field" in made
        json.dumps(made)
    assert obj == before


@settings(max_examples=50)
@given(TEMPLATES)
def test_no_template_in_a_file_ends_the_command(
    tmp_path_factory: pytest.TempPathFactory, template: Any
) -> None:
    file = tmp_path_factory.getbasetemp() / "job.yaml"
    file.write_text(yaml.safe_dump(job_file(2, template=template)))
    for load in (jobfile.load, jobfile.load_all):
        found = attempt(partial(load, file))
        assert not isinstance(found, str) or found.startswith(f"{file}:")


def nested(levels: int) -> Any:
    value: Any = 1
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    return value


def test_a_template_that_is_nested_without_end_is_refused() -> None:
    assert not is_deeper(nested(5), 5)
    assert is_deeper(nested(6), 5)
    for read in (ElasticJob.read, ElasticJob.parse):
        with pytest.raises(ConfigError, match="expected at most 64 levels"):
            read(job_file(template=of_spec(x=nested(200))))
        with pytest.raises(ConfigError, match="expected at most 64 levels"):
            read(nested(5000) if read is ElasticJob.parse else {"spec": nested(5000)})
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    assert not is_deeper(bomb)


# --- job files ---


def told(tmp_path: Path, text: str) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        jobfile.load_all(file)
    return str(error.value).replace(f"{file}:", "")


GOOD = """\
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: x}
spec:
  replicaSpecs:
    worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: main
              image: i
              command: [elastic-run, --at, 12:30, 2024-01-01, 1:30.5, "1"]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "  replicas: 2",
            "  replicas: 2\n      replicas: 3",
            "8: not valid YAML: the key 'replicas'",
        ),
        ("image: i", "image: i\n              'image': j", "13: not valid YAML: the key 'image'"),
        ("{name: x}", "{name: x, name: y}", "3: not valid YAML: the key 'name' occurs twice"),
        ("image: i", "image: !!binary aGk=", "12: not valid YAML: could not determine"),
        ("image: i", "image: .inf", "12: not valid YAML: expected a finite number"),
        ("image: i", "[a]: i", "12: not valid YAML: expected text as the key"),
        ("replicas: 2", "replica: 2", "unknown field (found a number 2); did you mean replicas?"),
        ("spec:\n  rep", "spec:\n  suspended: true\n  rep", "did you mean suspend?"),
        ("{name: x}", "{name: x, lables: {}}", "3: metadata.lables: unknown field"),
        ("image: i", "env: {A: b}", "12: spec.replicaSpecs.worker.template.spec.containers[0].env"),
    ],
)
def test_a_fault_of_a_file_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert GOOD.count(old) == 1
    assert words in told(tmp_path, GOOD.replace(old, new))


def test_a_file_is_read_as_json(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        GOOD.replace("image: i", "image: 2024-01-01\n              1: {<<: {a: 1}, a: 2}")
    )
    (document,) = jobfile.load_all(file)
    container = document.job.worker.template["spec"]["containers"][0]
    assert container["image"] == "2024-01-01"
    assert container["1"] == {"a": 2}, "a key that is merged in is no second one"
    assert container["command"][2:] == ["12:30", "2024-01-01", "1:30.5", "1"]
    json.dumps(document.written)
    assert document.job.worker.template_hash


def test_a_cluster_needs_an_image_and_this_machine_does_not(tmp_path: Path) -> None:
    without = GOOD.replace("image: i", "tty: true")
    words = f"11: {TEMPLATE}.spec.containers[0].image: missing: expected the name of an image"
    assert told(tmp_path, without) == words
    assert jobfile.load(tmp_path / "job.yaml").remarks == ()


def test_servers_in_a_cluster_need_an_image_too(tmp_path: Path) -> None:
    document = job_file(1)
    main = {"name": "main", "command": ["dlrover", "ps", "server"]}
    document["spec"]["replicaSpecs"]["ps"] = {"template": {"spec": {"containers": [main]}}}
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(document))
    words = r"replicaSpecs\.ps\.template\.spec\.containers\[0\]\.image: missing"
    with pytest.raises(ConfigError, match=words):
        jobfile.load_all(file)


def test_a_misspelt_field_of_a_template_is_remarked_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD.replace("image: i", "image: i\n              tt: true"))
    remark = f"{file}:13: {TEMPLATE}.spec.containers[0].tt: unknown field; did you mean tty?"
    assert jobfile.load(file).remarks == (remark,)
    assert jobfile.load_all(file)[0].remarks == (remark,)


@pytest.mark.timeout(60)
def test_thousands_of_unknown_fields_are_found_at_once_and_twenty_are_told() -> None:
    """The advice for each takes a quarter of a millisecond: the master looks before each Pod."""
    found = list(faults_of({f"restartPolicies{n}": 1 for n in range(300_000)}, "spec"))
    assert len(found) == 300_000
    assert all(fault.unknown for fault in found)
    lines = in_lines(found).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 299980 more"
