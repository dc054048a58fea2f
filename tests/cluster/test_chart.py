"""The chart on a real cluster: installed, used, upgraded, taken away and put back."""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.harness import Cluster, LabError, Obj, until
from tests.cluster.jobs import patient

CHART = Path(__file__).parents[2] / "charts/dlrover"
CRD = "elasticjobs.elastic.iml.github.io"
USERS = ("elasticjobs-admin", "elasticjobs-edit", "elasticjobs-view")
FOREVER = ["elastic-run", "--no-python", "tail", "-f", "/dev/null"]

Installed = Callable[..., str]
"""Runs helm for a release with the images of this working tree."""


def image_values(cluster: Cluster) -> Obj:
    def parts(target: str) -> dict[str, str]:
        name, _, tag = cluster.image(target).rpartition(":")
        return {"repository": name, "tag": tag, "pullPolicy": "IfNotPresent"}

    return {"image": parts("operator"), "master": {"image": parts("master")}}


@pytest.fixture
def helm(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Installed]:
    """Helm in the test's namespace, which enforces Pod Security `restricted`.

    The definition and users' roles are the cluster's: they go if this test brought them. Another
    operator may be there, which other tests have installed; no release of ours has its name.
    """
    had = cluster.get("crd", CRD) is not None
    cluster.kubectl("label", "ns", namespace, "pod-security.kubernetes.io/enforce=restricted")
    images = tmp_path / "images.yaml"
    images.write_text(yaml.safe_dump(image_values(cluster)))

    def run(
        what: str, release: str, *args: str, values: Obj | None = None, chart_of: Path = CHART
    ) -> str:
        chart = [str(chart_of), "--values", str(images)] if what in ("install", "upgrade") else []
        if values is not None:
            given = tmp_path / f"{secrets.token_hex(4)}.yaml"
            given.write_text(yaml.safe_dump(values))
            chart += ["--values", str(given)]
        wait = ["--timeout", "240s"] + ([] if what == "test" else ["--wait"])
        return cluster.helm(what, release, *chart, "-n", namespace, *wait, *args)

    yield run
    for release in json.loads(cluster.helm("list", "-n", namespace, "-aojson")):
        cluster.helm("uninstall", release["name"], "-n", namespace)
    if cluster.get("crd", CRD) is not None:
        cluster.kubectl("delete", "elasticjobs", "--all", "-n", namespace)
    if had:  # as it was, also if the test has left an older one
        define(cluster)
    else:
        cluster.kubectl("delete", "crd", CRD, "--ignore-not-found")
        cluster.kubectl("delete", "clusterrole", *USERS, "--ignore-not-found")


def job(name: str, image: str, *command: str, **worker: Any) -> Obj:
    container = {
        "name": "main",
        "image": image,
        "command": list(command),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
    }
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "replicaSpecs": {
                "worker": {"replicas": 1, "template": {"spec": pod}} | worker,
                "dlrover-master": patient(),
            },
        },
    }


def define(cluster: Cluster, *more: str) -> None:
    """What the chart defines for the whole cluster, without a release."""
    only = [arg for name in ("crd", *more) for arg in ("--show-only", f"templates/{name}.yaml")]
    made = cluster.helm("template", "dlrover", str(CHART), *only, "--kube-version", "1.34.0")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=made)


def phase(cluster: Cluster, name: str, namespace: str) -> str:
    found = cluster.get("elasticjob", name, namespace) or {}
    return str(found.get("status", {}).get("phase", ""))


def of_job(cluster: Cluster, name: str, namespace: str) -> dict[str, tuple[str, int]]:
    """Pods of a job that run: uid, and how often their containers were started anew."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(c["restartCount"] for c in pod["status"].get("containerStatuses", [])),
        )
        for pod in cluster.list("pods", namespace, f"elasticjob.dlrover/name={name}")
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    }


def may(cluster: Cluster, user: str, verb: str, what: str, namespace: str, name: str = "") -> bool:
    """Whether the API server would let that user, perhaps with one object only."""
    kind, _, sub = what.partition("/")
    group = "elastic.iml.github.io" if kind == "elasticjobs" else ""
    asked = {"namespace": namespace, "verb": verb, "group": group, "resource": kind,
             "subresource": sub, "name": name}  # fmt: skip
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": asked},
    }
    said = cluster.kubectl("create", "-f", "-", "-ojson", stdin=json.dumps(review))
    return bool(json.loads(said)["status"]["allowed"])


def bind(cluster: Cluster, user: str, role: str, namespace: str) -> None:
    cluster.kubectl("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}",
                    "-n", namespace)  # fmt: skip


def older(folder: Path) -> Path:
    """The chart as if it was an earlier version's: its CRD lacks a rule and a column."""
    chart = Path(shutil.copytree(CHART, folder / "older"))
    crd = chart / "templates/crd.yaml"
    text = crd.read_text()
    for part in (
        r"\n +x-kubernetes-validations:\n +- rule: '!has\(oldSelf\.term\).*\n +message: .*",
        r"\n +- name: Why\n.*\n.*\n +priority: 1",
    ):
        text, found = re.subn(part, "", text)
        assert found == 1, part
    crd.write_text(text)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": "0.0.1"}))
    return chart


def columns(cluster: Cluster) -> set[str]:
    """That the CRD has now."""
    crd = cluster.get("crd", CRD) or {}
    return {one["name"] for one in crd["spec"]["versions"][0]["additionalPrinterColumns"]}


def test_jobs_outlive_the_release(
    cluster: Cluster, namespace: str, helm: Installed, agent_image: str, tmp_path: Path
) -> None:
    """Install an older one, test, upgrade, roll back, uninstall, install: one job runs through."""
    helm("install", "first", "--take-ownership", chart_of=older(tmp_path))
    assert "Why" not in columns(cluster)
    assert "the test passed" in helm("test", "first", "--logs")

    wrong = job("wrong", agent_image, *FOREVER, minReplicas=2)
    with pytest.raises(LabError, match="minReplicas"):
        cluster.apply(wrong, namespace=namespace)
    cluster.apply(job("long", agent_image, *FOREVER), namespace=namespace)
    until(lambda: phase(cluster, "long", namespace) == "Running", "the job runs", within_s=240)

    def two() -> dict[str, tuple[str, int]]:
        found = of_job(cluster, "long", namespace)
        return found if len(found) == 2 else {}

    pods = until(two, "a master and a worker, and their kubelets have said so")

    def untouched() -> None:
        assert of_job(cluster, "long", namespace) == pods
        assert phase(cluster, "long", namespace) == "Running"

    more = {
        "replicas": 2,
        "logLevel": "DEBUG",
        "podAnnotations": {"changed": "yes"},
        "tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}],
        "master": {"resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "512Mi"}}},
        "networkPolicy": {
            "from": [{"namespaceSelector": {}}],
            "egress": [{"ports": [{"protocol": "TCP"}, {"protocol": "UDP"}]}],
        },
    }
    helm("upgrade", "first", values=more)
    assert "Why" in columns(cluster)
    until(
        lambda: len([
            pod
            for pod in cluster.list("pods", namespace, "app.kubernetes.io/name=dlrover-operator")
            if "deletionTimestamp" not in pod["metadata"]
        ]) == 2,
        "two operators, and the former one is told to go",
    )  # fmt: skip
    budget = cluster.get("pdb", "first-dlrover-operator", namespace) or {}
    assert budget["spec"]["maxUnavailable"] == 1
    untouched()

    cluster.helm("rollback", "first", "1", "-n", namespace, "--wait", "--timeout", "240s")
    deployment = cluster.get("deployment", "first-dlrover-operator", namespace) or {}
    assert deployment["spec"]["replicas"] == 1
    assert "Why" not in columns(cluster)
    untouched()

    helm("uninstall", "first")
    assert cluster.get("deployment", "first-dlrover-operator", namespace) is None
    assert cluster.get("crd", CRD) is not None
    assert all(cluster.get("clusterrole", name) for name in USERS)
    untouched()

    with pytest.raises(LabError, match="invalid ownership metadata"):
        helm("install", "other")
    helm("install", "other", "--take-ownership")
    untouched()
    helm("uninstall", "other")
    helm("install", "other")  # its own name again: nothing has to be said

    # What only an operator does: it knows the job, and takes its master away.
    suspend = '{"spec":{"suspend":true}}'
    cluster.kubectl("patch", "ej", "long", "-n", namespace, "--type=merge", "-p", suspend)
    until(lambda: phase(cluster, "long", namespace) == "Suspended", "it is suspended", within_s=240)
    until(lambda: not of_job(cluster, "long", namespace), "no Pod of it is left")
    cluster.kubectl("delete", "ej", "long", "-n", namespace)
    until(
        lambda: not cluster.list("secrets,services,deployments,roles", namespace,
                                 "elasticjob.dlrover/name=long"),
        "what it owned is gone",
    )  # fmt: skip
    denied = [line for p in cluster.list("pods", namespace, "app.kubernetes.io/instance=other")
              for line in cluster.logs(p["metadata"]["name"], namespace).splitlines()
              if "forbidden" in line.lower()]  # fmt: skip
    assert not denied


def test_an_admin_of_one_namespace_installs_an_operator_for_it(
    cluster: Cluster, namespace: str, helm: Installed
) -> None:
    """The cluster's administrator gives the definition and users' roles, and nothing else."""
    define(cluster, "userroles")
    for user, role in (("ada", "admin"), ("edith", "edit"), ("victor", "view")):
        bind(cluster, user, role, namespace)
    for user, verb, what in (
        ("ada", "patch", "elasticjobs/status"),
        ("edith", "create", "elasticjobs"),
        ("edith", "patch", "elasticjobs/scale"),
        ("victor", "list", "elasticjobs"),
    ):
        until(lambda: may(cluster, user, verb, what, namespace), f"{user} may {verb} {what}")  # noqa: B023
    assert not may(cluster, "edith", "patch", "elasticjobs/status", namespace)
    assert not may(cluster, "victor", "create", "elasticjobs", namespace)
    assert not may(cluster, "edith", "list", "elasticjobs", "default")

    ada = ("--kube-as-user", "ada", "--kube-as-group", "system:authenticated")
    with pytest.raises(LabError, match="forbidden"):
        helm("install", "whole", *ada)  # it would be for the whole cluster
    values = {"crds": {"enabled": False}, "watchNamespaces": [namespace]}
    helm("install", "mine", *ada, values=values)
    account = f"system:serviceaccount:{namespace}:mine-dlrover-operator"
    assert may(cluster, account, "create", "secrets", namespace)
    for where in ("default", "kube-system"):
        assert not may(cluster, account, "list", "elasticjobs", where)
        assert not may(cluster, account, "get", "secrets", where)
    assert not may(cluster, account, "list", "secrets", namespace)
    assert "the test passed" in helm("test", "mine", "--logs", *ada)
