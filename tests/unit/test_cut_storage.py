"""What the master of a job takes from the servers' template to write cuts."""

from typing import Any

import pytest

from dlrover_operator import manifests
from dlrover_operator.manifests import Options
from dlrover_py.protocol.cut_storage import OWN_FOLDERS, CutStorage, optional_env
from dlrover_py.protocol.errors import ConfigError, UnsupportedError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NODE_MOUNT, TLS_MOUNT, TOKEN_MOUNT
from tests.builders import job_file
from tests.unit.test_servers import document

NFS = {"name": "data", "nfs": {"server": "s", "path": "/x"}}
PLACE = {"name": "data", "mountPath": "/data/", "subPath": "run"}


def storage(
    url: str = "/data/cuts",
    volumes: Any = (NFS,),
    mounts: Any = (PLACE,),
    **main: Any,
) -> CutStorage:
    pod = {"volumes": list(volumes)}
    return CutStorage.of(url, pod, {"volumeMounts": list(mounts), **main})


def test_the_volume_of_the_directory_is_taken_and_no_other_one() -> None:
    other = {"name": "other", "emptyDir": {}}
    root = {"name": "other", "mountPath": "/"}
    found = storage(volumes=[other, NFS], mounts=[root, PLACE], env=[{"name": "AWS_REGION"}])
    assert found.volumes == ({"name": "cuts", "nfs": NFS["nfs"]},)
    assert found.mounts == ({"name": "cuts", "mountPath": "/data/", "subPath": "run"},)
    assert found.env == ()


def test_a_bucket_needs_the_credentials_of_the_servers_and_nothing_else() -> None:
    secret = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {}}}
    env = [secret, {"name": "LD_PRELOAD", "value": "x"}, "odd"]
    found = storage("s3://bucket/cuts", env=env)
    assert (found.volumes, found.mounts, found.env) == ((), (), (secret,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "cuts"}, "expected an absolute path"),
        ({"url": "/data/../etc"}, "expected an absolute path"),
        ({"url": "/database/cuts"}, "in no volume of the servers"),
        ({"mounts": []}, "in no volume of the servers"),
        ({"volumes": []}, "there is no such volume"),
        ({"volumes": [{"name": "data", "emptyDir": {}}]}, "its kind is emptyDir"),
        ({"mounts": [PLACE | {"readOnly": True}]}, "its volumeMount has readOnly"),
        ({"mounts": [PLACE | {"subPathExpr": "$(POD)"}]}, "its volumeMount has subPathExpr"),
        ({"url": "/tmp/cuts", "mounts": [PLACE | {"mountPath": "/tmp"}]}, "another mountPath"),
    ],
)  # fmt: skip
def test_a_directory_that_servers_and_master_do_not_share_is_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        storage(**change)


def test_the_masters_own_mounts_are_known() -> None:
    for path in (TOKEN_MOUNT, TLS_MOUNT, NODE_MOUNT, "/tmp"):
        assert path.startswith(OWN_FOLDERS)


def with_cuts(url: str, security: dict[str, Any] | None = None) -> dict[str, Any]:
    found = document(checkpoints=url)
    pod = found["spec"]["replicaSpecs"]["ps"]["template"]["spec"]
    pod |= {"volumes": [NFS], "securityContext": security or {}}
    pod["containers"][0]["volumeMounts"] = [PLACE]
    return found


def test_the_masters_pod_can_write_where_the_servers_can() -> None:
    options = Options("master:1")
    plain = ElasticJob.parse(document(), on_cluster=True)
    before = manifests.deployment(plain, "10.0.0.1", options)["spec"]["template"]["spec"]
    security = {"runAsUser": 7, "fsGroup": 8, "privileged": True}
    job = ElasticJob.parse(with_cuts("/data/cuts", security), on_cluster=True)
    made = manifests.deployment(job, "10.0.0.1", options)["spec"]["template"]["spec"]
    assert made["volumes"] == [*before["volumes"], {"name": "cuts", "nfs": NFS["nfs"]}]
    mounts = made["containers"][0]["volumeMounts"]
    assert mounts == [*before["containers"][0]["volumeMounts"], PLACE | {"name": "cuts"}]
    expected = before["securityContext"] | {"runAsUser": 7, "fsGroup": 8}
    assert made["securityContext"] == expected
    as_root = ElasticJob.parse(with_cuts("/data/cuts", {"runAsUser": 0}), on_cluster=True)
    made = manifests.deployment(as_root, "10.0.0.1", options)["spec"]["template"]["spec"]
    assert made["securityContext"] == before["securityContext"]


def test_a_job_names_its_field_when_it_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"spec\.replicaSpecs\.ps\.checkpoints: found text '/x'"
    ):
        ElasticJob.parse(with_cuts("/x"), on_cluster=True)


def test_the_masters_pod_has_the_credentials_of_the_bucket_for_evidence() -> None:
    variables = [
        {"name": "AWS_REGION", "value": "x"},
        {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "OTHER", "value": "y"},
    ]
    secret = {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}
    expected = [variables[0], {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": secret}]
    found = []
    for where in ("s3://bucket/run", "/shared/run"):
        job = job_file(2)
        job["spec"]["checkpoint"] = {"dir": where}
        container = job["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
        container["env"] = variables
        made = manifests.deployment(ElasticJob.parse(job), "10.0.0.1", Options("master:1"))
        env = made["spec"]["template"]["spec"]["containers"][0]["env"]
        found.append([one for one in env if one["name"].startswith(("AWS_", "OTHER"))])
    assert found == [expected, []]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"configMapKeyRef": {"name": "c", "key": "k", "optional": False}},
            {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}},
        ),
        ({"resourceFieldRef": {"containerName": "main", "resource": "limits.cpu"}}, None),
        ({"fieldRef": {"fieldPath": "metadata.labels['a']"}}, None),
        ({}, None),
        ("odd", None),
    ],
)
def test_no_credential_for_evidence_keeps_the_master_from_its_start(
    source: object, expected: object
) -> None:
    """Copies of evidence are optional: the API server and the kubelet must take the Pod."""
    variable = {"name": "AWS_ROLE", "valueFrom": source}
    found = optional_env([variable, {"name": "AWS_REGION", "value": "x"}])
    assert [one["valueFrom"] for one in found[:-1]] == ([expected] if expected else [])
    assert found[-1] == {"name": "AWS_REGION", "value": "x"}
