"""The chart as `helm template` makes it; tests/cluster/test_chart.py installs it."""

import copy
import functools
import json
import os
import re
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_operator import gang, loop, manifests, settings
from dlrover_operator.allotment import SharedHosts
from dlrover_py import __version__
from dlrover_py.kubernetes import kinds
from dlrover_py.kubernetes.kinds import Kind
from dlrover_py.protocol.job import ElasticJob
from scripts import chart_values
from tests.cluster.lab.settings import CACHE, REQUIRED
from tests.local.test_alerts import ALERTS

Obj = dict[str, Any]
ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/dlrover"
VALUES: Obj = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Obj = json.loads((CHART / "values.schema.json").read_text())
KUBERNETES = "1.34.0"

FULL: Obj = {
    "commonLabels": {"team": "ml"},
    "image": {"registry": "reg.test:5000/a/", "repository": "op", "digest": f"sha256:{'a' * 64}"},
    "imagePullSecrets": [{"name": "pull"}],
    "master": {
        "image": {"repository": "ma", "tag": "v7", "pullPolicy": "Never"},
        "imagePullSecrets": [{"name": "m1"}, {"name": "m2"}],
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}},
        "progressSeconds": 30,
    },
    "worker": {"networkPolicy": {"enabled": False}},
    "replicas": 2,
    "logLevel": "DEBUG",
    "extraArgs": ["--health=0.0.0.0:8080"],
    "podLabels": {"a": "b"},
    "podAnnotations": {"c": "d"},
    "nodeSelector": {"kind": "system"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"x": 1}},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "dlrover-operator"}},
        }
    ],
    "priorityClassName": "system-cluster-critical",
    "serviceAccount": {"annotations": {"e": "f"}},
    "networkPolicy": {"from": [{"podSelector": {}}], "egress": [{"ports": []}]},
    "metrics": {
        "service": {"annotations": {"g": "h"}},
        "serviceMonitor": {"enabled": True, "labels": {"i": "j"}, "interval": "30s"},
        "podMonitor": {"enabled": True, "labels": {"i": "k"}, "interval": "15s"},
        "prometheusRule": {
            "enabled": True,
            "labels": {"i": "l"},
            "leaveOut": ["DLRoverStrangers"],
            "runbooks": "https://docs.test/operations",
        },
        "grafanaDashboard": {"enabled": True, "annotations": {"grafana_folder": "ML"}},
    },
    "test": {"workerImage": "w:1"},
}
NAMESPACED: Obj = {"watchNamespaces": ["a", "b"], "crds": {"enabled": False}}
BARE: Obj = {
    "crds": {"enabled": False},
    "rbac": {"create": False},
    "serviceAccount": {"create": False, "name": "theirs"},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "metrics": {"service": {"enabled": False}},
    "fullnameOverride": "op",
}
ALLOCATOR: Obj = {
    "allocator": {
        "enabled": True,
        "nodeSelector": {"pool": "a", "gpu": ""},
        "slot": {"g/gpu": "4", "cpu": "500m"},
        "poolLabel": "k.sh/type",
        "holdSeconds": 20,
    },
    "watchNamespaces": ["a"],
    "crds": {"enabled": False},
}
MATRIX: dict[str, Obj] = {
    "default": {},
    "full": FULL,
    "namespaced": NAMESPACED,
    "bare": BARE,
    "allocator": ALLOCATOR,
}


def find(tool: str) -> str:
    """Installed, or built by `make cluster` or `make test`."""
    built = [str(path) for path in CACHE.glob(f"bin/*/{tool}")]
    found = shutil.which(tool) or next(iter(built), "")
    words = f"{tool} is not found, nor built by `make cluster` or `make test`"
    if not found and REQUIRED:
        pytest.fail(f"DLROVER_REQUIRE_CLUSTER=1, but {words}")
    if not found:
        pytest.skip(words)
    return found


def run_helm(*args: str, values: Obj | None = None) -> subprocess.CompletedProcess[str]:
    stdin = json.dumps(values or {})
    env = {**os.environ, "KUBECONFIG": "/nonexistent"}
    command = [find("helm"), *args, "--values", "-"]
    return subprocess.run(command, input=stdin, env=env, capture_output=True, text=True)


def rendered(values: Obj, release: str = "dlrover") -> list[Obj]:
    return [obj for obj in yaml.safe_load_all(template(json.dumps(values), release)) if obj]


@functools.cache
def template(values: str, release: str) -> str:
    done = run_helm("template", release, str(CHART), "-n", "system", "--kube-version", KUBERNETES,
                    values=json.loads(values))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_kind(objects: list[Obj], kind: str, *, hooks: bool = False) -> list[Obj]:
    return [o for o in objects if o["kind"] == kind and is_hook(o) == hooks]


def is_hook(obj: Obj) -> bool:
    return "helm.sh/hook" in obj["metadata"].get("annotations", {})


def operator(objects: list[Obj]) -> Obj:
    (deployment,) = of_kind(objects, "Deployment")
    return dict(deployment["spec"]["template"])


# --- it can be made at all ---


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_lint(values: Obj) -> None:
    done = run_helm("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_names_labels_and_no_chance(values: Obj) -> None:
    objects = rendered(values)
    again = template.__wrapped__(json.dumps(values), "dlrover")
    assert list(filter(None, yaml.safe_load_all(again))) == objects, "nothing is left to chance"
    seen = set()
    for obj in objects:
        meta = obj["metadata"]
        key = (obj["kind"], meta.get("namespace"), meta["name"], is_hook(obj))
        assert key not in seen
        seen.add(key)
        if not is_hook(obj) and obj["kind"] != "CustomResourceDefinition":
            assert meta["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    (deployment,) = of_kind(objects, "Deployment")
    chosen = deployment["spec"]["selector"]["matchLabels"].items()
    assert chosen <= operator(objects)["metadata"]["labels"].items()
    (test,) = of_kind(objects, "Pod", hooks=True)
    assert not chosen <= test["metadata"].get("labels", {}).items(), "no operator: no endpoint"


def test_versions_are_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


@pytest.mark.parametrize("release", ["dlrover", "x", "9-" + "a" * 51, "dlrover." + "b" * 45])
def test_names_of_any_release(release: str) -> None:
    objects = rendered({}, release)
    (test,) = of_kind(objects, "Pod", hooks=True)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,35}[a-z0-9])?", test["metadata"]["name"])  # a job's
    for obj in objects:
        if obj["kind"] in ("Service", "Deployment"):
            assert len(obj["metadata"]["name"]) <= 63


# --- the policies that others hold good ---

OPERATOR, TEST = "Deployment", "Pod"
EXCEPTIONS: dict[tuple[str, str], str] = {
    (OPERATOR, "container-image-pull-policy"): "a value; a registry that is away must not matter",
    (TEST, "container-image-pull-policy"): "as the operator's",
    (OPERATOR, "container-ephemeral-storage-request-and-limit"): "its root is read-only",
    (TEST, "container-ephemeral-storage-request-and-limit"): "its root is read-only",
    (OPERATOR, "deployment-replicas"): "jobs do not need it to go on",
    (OPERATOR, "deployment-strategy"): "an allocator may run once only; jobs go on without it",
    (OPERATOR, "deployment-has-host-podantiaffinity"): "a value; one operator by default",
    (TEST, "pod-networkpolicy"): "it lives for a minute, and nobody calls it",
    (OPERATOR, "container-security-context-user-group-id"): "the image's user is 65532, and not "
    "root; some clusters choose users themselves, and refuse one that is named",
    (TEST, "container-security-context-user-group-id"): "as the operator's",
    (OPERATOR, "pod-networkpolicy"): "only where a value has turned it off",
}
"""What kube-score would have otherwise, by kind of object and check, with the reason."""


@functools.cache
def scored(values: str) -> frozenset[tuple[str, str]]:
    """What kube-score finds critical, or warns of."""
    command = [
        find("kube-score"),
        "score",
        "--output-format=json",
        f"--kubernetes-version=v{KUBERNETES[:-2]}",
    ]
    said = subprocess.run([*command, "-"], input=template(values, "dlrover"), text=True,
                          capture_output=True)  # fmt: skip
    objects = json.loads(said.stdout)
    assert {o["type_meta"]["kind"] for o in objects} >= {OPERATOR, TEST}, said.stderr
    return frozenset(
        (obj["type_meta"]["kind"], check["check"]["id"])
        for obj in objects
        for check in obj["checks"]
        if not check["skipped"] and check["grade"] <= 5
    )


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_a_linter_of_policies_has_nothing_more_against_it(values: Obj) -> None:
    assert scored(json.dumps(values)) <= EXCEPTIONS.keys()


def test_each_exception_is_still_one() -> None:
    found = frozenset[tuple[str, str]]().union(*(scored(json.dumps(v)) for v in MATRIX.values()))
    assert EXCEPTIONS.keys() <= found


# --- what is said in values arrives ---


def test_images() -> None:
    for values, image, master in (
        ({}, f"dlrover-py-operator:{__version__}", f"dlrover-py-master:{__version__}"),
        (FULL, f"reg.test:5000/a/op@sha256:{'a' * 64}", "reg.test:5000/a/ma:v7"),
        ({"image": {"tag": "x"}}, "dlrover-py-operator:x", f"dlrover-py-master:{__version__}"),
    ):
        (container,) = operator(rendered(values))["spec"]["containers"]
        assert container["image"] == image
        assert f"--master-image={master}" in container["args"]


def test_the_operator_understands_its_arguments() -> None:
    def parsed(values: Obj) -> settings.Settings:
        (container,) = operator(rendered(values))["spec"]["containers"]
        assert container["command"] == ["dlrover-operator"]
        return settings.Settings.parse(container["args"])

    default, full, namespaced = parsed({}), parsed(FULL), parsed(NAMESPACED)
    assert (default.namespaces, default.log_level) == ((), "INFO")
    assert default.masters.resources == manifests.Options(image="").resources
    assert full.masters == manifests.Options(
        image="reg.test:5000/a/ma:v7",
        pull_policy="Never",
        pull_secrets=("m1", "m2"),
        resources=FULL["master"]["resources"],
        workers_policy=False,
        progress_s=30,
    )
    assert default.masters.workers_policy
    assert full.log_level == "DEBUG"
    assert namespaced.namespaces == ("a", "b")
    assert default.health.rpartition(":")[2] == "8080", "what probes and Service say"


def test_what_jobs_share_arrives() -> None:
    def parsed(allocator: Obj) -> SharedHosts | None:
        (container,) = operator(rendered({"allocator": allocator}))["spec"]["containers"]
        return settings.Settings.parse(container["args"]).shared

    assert parsed({}) is None
    assert parsed({"enabled": False, "capacity": 6}) is None
    assert parsed({"enabled": True, "capacity": 6}) == SharedHosts(capacity=6)
    assert parsed(ALLOCATOR["allocator"]) == SharedHosts(
        selector="gpu=,pool=a",
        slot={"g/gpu": Decimal(4), "cpu": Decimal("0.5")},
        hold_s=20.0,
        pool_label="k.sh/type",
    )
    (deployment,) = of_kind(rendered(ALLOCATOR), "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_only_who_shares_hosts_by_labels_may_read_all_hosts() -> None:
    (role,) = of_kind(rendered(ALLOCATOR), "ClusterRole")
    assert flat(role["rules"]) == {("", "nodes", verb) for verb in ("list", "watch")}
    (binding,) = of_kind(rendered(ALLOCATOR), "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "system-dlrover-operator-hosts"
    given = rendered({"allocator": {"enabled": True, "capacity": 6}} | NAMESPACED)
    assert of_kind(given, "ClusterRole") == []


def test_labels_of_hosts_arrive_with_two_rights_more() -> None:
    labels = ["topology.kubernetes.io/zone", "a.b/rack"]
    objects = rendered({"topology": {"hostLabels": labels}})
    (container,) = operator(objects)["spec"]["containers"]
    assert settings.Settings.parse(container["args"]).host_labels == tuple(labels)

    def rights(objects: list[Obj]) -> set[tuple[str, str, str]]:
        return set().union(*(flat(role["rules"]) for role in of_kind(objects, "ClusterRole")))

    more = {("", "nodes", "list"), ("", "nodes", "watch"), ("", "pods", "patch")}
    assert rights(objects) - rights(rendered({})) == more


def test_the_dashboard_is_on_loopback_and_adds_two_questions_to_the_rights() -> None:
    def rights(objects: list[Obj]) -> set[tuple[str, str, str]]:
        return set().union(*(flat(role["rules"]) for role in of_kind(objects, "ClusterRole")))

    plain, objects = rendered({}), rendered({"dashboard": {"enabled": True}})
    assert settings.Settings.parse(arguments(plain)).dashboard_port == 0
    assert settings.Settings.parse(arguments(objects)).dashboard_port == 8090
    for kind in ("Service", "NetworkPolicy"):
        assert of_kind(objects, kind) == of_kind(plain, kind), "no other Pod has a way to it"
    reviews = (kinds.TOKEN_REVIEWS, kinds.ACCESS_REVIEWS)
    assert rights(objects) - rights(plain) == {(k.group, k.plural, "create") for k in reviews}
    (role,) = of_kind(objects, "Role")
    assert role["metadata"] | {"labels": {}} == {
        "name": "dlrover-operator-dashboard", "namespace": "system", "labels": {},
    }  # fmt: skip
    (deployment,) = of_kind(objects, "Deployment")
    assert role["rules"][0]["resourceNames"] == [deployment["metadata"]["name"]]
    assert of_kind(objects, "RoleBinding") == [], "whom it is for is not the chart's to say"
    namespaced = rendered(NAMESPACED | {"dashboard": {"enabled": True}})
    (reviews_only,) = of_kind(namespaced, "ClusterRole")
    assert reviews_only["metadata"]["name"] == "system-dlrover-operator-reviews"


def arguments(objects: list[Obj]) -> list[str]:
    (container,) = operator(objects)["spec"]["containers"]
    return list(container["args"])


def test_the_pod_gets_what_is_asked_for() -> None:
    objects = rendered(FULL)
    pod = operator(objects)
    for key in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints",
                "priorityClassName", "imagePullSecrets"):  # fmt: skip
        assert pod["spec"][key] == FULL[key]
    assert pod["metadata"]["labels"]["a"] == "b"
    assert pod["metadata"]["annotations"] == {"c": "d"}
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"][0]["from"] == [{"podSelector": {}}]
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["i"] == "j"
    (service,) = of_kind(objects, "Service")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_prometheus_finds_the_masters_and_gets_the_alerts() -> None:
    objects = rendered(FULL)
    (monitor,) = of_kind(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["i"] == "k"
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    (namespaced,) = of_kind(rendered(NAMESPACED | {"metrics": FULL["metrics"]}), "PodMonitor")
    assert namespaced["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
    text = (ROOT / "examples/01-digits/job.yaml").read_text()
    job = ElasticJob.read({**yaml.safe_load(text), "status": {}})
    pod = manifests.deployment(job, "10.0.0.1", manifests.Options(image="m"))["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert set(monitor["spec"]["podTargetLabels"]) <= pod["metadata"]["labels"].keys()
    (end,) = monitor["spec"]["podMetricsEndpoints"]
    assert end["port"] in [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    (rules,) = of_kind(objects, "PrometheusRule")
    shown = {rule["alert"]: rule for g in rules["spec"]["groups"] for rule in g["rules"]}
    assert shown.keys() == ALERTS.keys() - {"DLRoverStrangers"}
    for name, rule in shown.items():
        link = rule["annotations"].pop("runbook_url")
        assert link == f"https://docs.test/operations#{name.lower()}"
        assert rule == ALERTS[name]


def test_grafana_gets_the_dashboard_as_it_is() -> None:
    (found,) = of_kind(rendered(FULL), "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "ML"}
    written = (CHART / "files/dashboard.json").read_text()
    assert json.loads(found["data"]["dlrover.json"]) == json.loads(written)


def test_what_is_left_out() -> None:
    kinds = {o["kind"] for o in rendered(BARE) if not is_hook(o)}
    assert kinds == {"Deployment"}
    assert operator(rendered(BARE))["spec"]["serviceAccountName"] == "theirs"
    (budget,) = of_kind(rendered({}), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1, "a single operator never holds up a drain"


def test_a_namespaced_install_touches_nothing_of_the_cluster() -> None:
    objects = rendered(NAMESPACED)
    assert all(obj["metadata"].get("namespace") in ("system", "a", "b") for obj in objects)
    assert [o["metadata"]["namespace"] for o in of_kind(objects, "Role")] == ["a", "b"]
    for binding in of_kind(objects, "RoleBinding"):
        assert binding["subjects"][0]["namespace"] == "system"


# --- what may not be said ---


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"imag": {}}, "imag"),
        ({"image": {"tagg": "1"}}, "tagg"),
        ({"image": {"repository": "host/op:1"}}, "repository"),
        ({"image": {"repository": ""}}, "repository"),
        ({"image": {"digest": "sha256:1"}}, "digest"),
        ({"image": {"pullPolicy": "always"}}, "pullPolicy"),
        ({"master": {"resources": {"memory": "1Gi"}}}, "memory"),
        ({"watchNamespaces": "a"}, "watchNamespaces"),
        ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
        ({"watchNamespaces": ["A"]}, "watchNamespaces"),
        ({"replicas": 3}, "replicas"),
        ({"replicas": "1"}, "replicas"),
        ({"logLevel": "info"}, "logLevel"),
        ({"imagePullSecrets": ["name"]}, "imagePullSecrets"),
        ({"serviceAccount": {"create": False}}, "serviceAccount"),
        ({"tolerations": [{"key": "a", "effekt": "NoSchedule"}]}, "effekt"),
        ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
        ({"metrics": {"prometheusRule": {"leaveOut": ["Watchdog"]}}}, "leaveOut"),
        ({"crds": {"enabled": "yes"}}, "crds"),
        ({"topology": {"hostLabels": ["rack"]}}, "hostLabels"),
        ({"dashboard": {"enabled": True, "port": 80}}, "port"),
        ({"topology": {"hostLabels": ["elasticjob.dlrover/name"]}}, "hostLabels"),
        ({"allocator": {"slot": {"g/gpu": "four"}}}, "slot"),
        ({"allocator": {"poolLabel": "pool"}}, "poolLabel"),
        ({"allocator": {"enabled": True}}, "needs allocator.capacity or allocator.nodeSelector"),
        ({"allocator": {"enabled": True, "capacity": 6, "slot": {"cpu": "1"}}}, "stands alone"),
        ({"allocator": {"enabled": True, "capacity": 6}, "replicas": 2}, "needs replicas: 1"),
    ],
)
def test_mistakes_are_refused(values: Obj, words: str) -> None:
    done = run_helm("template", "x", str(CHART), "--kube-version", KUBERNETES, values=values)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_monitor_without_its_service_is_refused() -> None:
    metrics = {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}
    done = run_helm("template", "x", str(CHART), "--kube-version", KUBERNETES,
                    values={"metrics": metrics})  # fmt: skip
    assert "needs metrics.service.enabled" in done.stderr


def test_as_a_part_of_another_chart() -> None:
    assert rendered({"global": {"any": "thing"}, "enabled": True}) == rendered({})


def test_the_schema_knows_every_value_and_no_other() -> None:
    told = set(chart_values.values())

    def paths(schema: Obj, path: str = "") -> set[str]:
        below = schema.get("properties")
        if not below or path in told:
            return {path}
        return set().union(*(paths(s, f"{path}.{k}" if path else k) for k, s in below.items()))

    assert paths(SCHEMA) == told | {"global", "enabled"}


def test_every_value_is_described() -> None:
    assert set(chart_values.values()) <= set(chart_values.described())


def test_the_document_has_the_values() -> None:
    text = chart_values.DOCUMENT.read_text()
    found = text.split(chart_values.BEGIN)[1].split(chart_values.END)[0]
    assert found == chart_values.table(), "run: python scripts/chart_values.py --write"


# --- rights ---


def flat(rules: list[Obj]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def operators_rules(values: Obj) -> list[list[Obj]]:
    objects = rendered(values)
    return [o["rules"] for kind in ("ClusterRole", "Role") for o in of_kind(objects, kind)
            if o["metadata"]["name"] == "dlrover-operator"]  # fmt: skip


def granted_to_masters() -> set[tuple[str, str, str]]:
    text = (ROOT / "examples/01-digits/job.yaml").read_text()
    job = ElasticJob.read({**yaml.safe_load(text), "status": {}})
    return flat(manifests.role(job)["rules"])


def done_by_the_operator() -> set[tuple[str, str, str]]:
    """By kind, what its loop calls; the verbs are of dlrover_py.kubernetes.client's methods."""

    def of(kind: Kind, *verbs: str, sub: str = "") -> set[tuple[str, str, str]]:
        return {(kind.group, kind.plural + sub, verb) for verb in verbs}

    done: set[tuple[str, str, str]] = set()
    for kind in loop.KINDS.values():
        done |= of(kind, "create", "get")  # create_or_own
    for watch in loop.WATCHES:
        done |= of(watch.kind, "list", "watch")
    done |= of(loop.MASTERS, "update", "patch") | of(loop.MASTER_SERVICES, "delete")
    for what in loop.FOLLOWS:
        done |= of(loop.KINDS[what], "update")
    done |= of(loop.KINDS["Secret"], "delete") | of(loop.MASTER_PODS, "delete")
    done |= of(loop.JOBS, "delete") | of(loop.JOBS, "patch", sub="/status")
    done |= of(loop.JOBS, "update", sub="/finalizers")  # blockOwnerDeletion
    return done | {("", "events", "create")}


@pytest.mark.parametrize("values", [{}, NAMESPACED], ids=["cluster", "namespaced"])
def test_the_operator_has_what_it_grants_and_does_and_no_more(values: Obj) -> None:
    found = operators_rules(values)
    assert len(found) == len(values.get("watchNamespaces", [""]))
    for rules in found:
        assert not any(set(rule) - {"apiGroups", "resources", "verbs"} for rule in rules)
        has = flat(rules)
        assert granted_to_masters() <= has, "it cannot grant what it does not have"
        assert has == granted_to_masters() | done_by_the_operator()


def test_queues_and_gangs_add_the_rights_that_they_use_and_no_more() -> None:
    def of(kind: Kind, *verbs: str) -> set[tuple[str, str, str]]:
        return {(kind.group, kind.plural, verb) for verb in verbs}

    (plain,) = operators_rules({})
    values: Obj = {"kueue": {"enabled": True}, "gangs": {"enabled": True}}
    (rules,) = operators_rules(values)
    made = "get", "list", "watch", "create"  # get: create_or_own
    added = of(kinds.WORKLOADS, *made, "delete") | of(kinds.LOCAL_QUEUES, "list", "watch")
    for kind in (kinds.VOLCANO_GROUPS, kinds.COSCHEDULING_GROUPS):
        added |= of(kind, *made, "patch")
    for kind in (gang.POD_GROUPS, gang.WORKLOADS):
        added |= of(kind, *made, "patch", "delete")
    assert flat(rules) - flat(plain) == added
    (flavors,) = (o["rules"] for o in of_kind(rendered(values), "ClusterRole")
                  if o["metadata"]["name"].endswith("-flavors"))  # fmt: skip
    assert flat(flavors) == of(kinds.RESOURCE_FLAVORS, "list", "watch")


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_no_wildcards(values: Obj) -> None:
    for obj in rendered(values):
        for rule in obj.get("rules", []):
            assert "*" not in json.dumps(rule)


def test_users_rights_come_and_stay_with_the_definition() -> None:
    objects = rendered({})
    roles = [o for o in of_kind(objects, "ClusterRole") if "elasticjobs-" in o["metadata"]["name"]]
    kept = [o for o in objects if o["metadata"].get("annotations") == {
        "helm.sh/resource-policy": "keep"}]  # fmt: skip
    assert len(roles) == 3
    assert kept == [*of_kind(objects, "CustomResourceDefinition"), *roles]
    for role in roles:
        to = {k.rpartition("-")[2] for k in role["metadata"]["labels"] if "aggregate-to" in k}
        whose = role["metadata"]["name"].removeprefix("elasticjobs-")
        assert to == {"admin": {"admin"}, "edit": {"admin", "edit"},
                      "view": {"admin", "edit", "view"}}[whose]  # fmt: skip
        if whose == "view":
            assert {v for _, _, v in flat(role["rules"])} == {"get", "list", "watch"}
    none = rendered({"rbac": {"aggregateToUsers": False}})
    assert len(of_kind(none, "ClusterRole")) == 1


# --- Pod Security ---


def restricted(spec: Obj) -> list[str]:
    """What the standard `restricted` has against a Pod; the cluster's own admission judges too."""
    wrong = [k for k in ("hostNetwork", "hostPID", "hostIPC") if spec.get(k)]
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral",
               "persistentVolumeClaim", "projected", "secret", "name"}  # fmt: skip
    wrong += [k for v in spec.get("volumes", []) for k in v if k not in allowed]
    pod = spec.get("securityContext", {})
    for container in spec["containers"] + spec.get("initContainers", []):
        of_it = pod | container.get("securityContext", {})
        if of_it.get("runAsNonRoot") is not True or of_it.get("runAsUser") == 0:
            wrong.append("root")
        if of_it.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            wrong.append("seccomp")
        if of_it.get("allowPrivilegeEscalation") is not False or of_it.get("privileged"):
            wrong.append("privileges")
        capabilities = of_it.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {
            "NET_BIND_SERVICE"
        }:
            wrong.append("capabilities")
        wrong += [k for p in container.get("ports", []) for k in p if k == "hostPort"]
    return wrong


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_pods_are_restricted(values: Obj) -> None:
    objects = rendered(values)
    (test,) = of_kind(objects, "Pod", hooks=True)
    for spec in (operator(objects)["spec"], test["spec"]):
        assert restricted(spec) == []
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}  # quotas ask for both
        broken = copy.deepcopy(spec)
        broken["containers"][0]["securityContext"]["capabilities"] = {}
        assert restricted(broken) == ["capabilities"], "the rules bite"


def test_the_masters_pod_is_restricted_whatever_its_template_says() -> None:
    hostile = {
        "hostNetwork": True, "hostPID": True, "serviceAccountName": "admin",
        "securityContext": {"runAsUser": 0},
        "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        "initContainers": [{"name": "i", "image": "i"}],
        "containers": [{"name": "main", "securityContext": {"privileged": True},
                        "volumeMounts": [{"name": "host", "mountPath": "/host"}]}],
    }  # fmt: skip
    document = yaml.safe_load((ROOT / "examples/01-digits/job.yaml").read_text())
    document["spec"]["replicaSpecs"]["dlrover-master"] = {"template": {"spec": hostile}}
    made = manifests.deployment(ElasticJob.read(document), "10.0.0.1", manifests.Options("m:1"))
    spec = made["spec"]["template"]["spec"]
    assert restricted(hostile), "the rules bite"
    assert restricted(spec) == []
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["serviceAccountName"] == made["metadata"]["name"]
    assert {next(iter(set(v) - {"name"})) for v in spec["volumes"]} == {"secret", "emptyDir"}
