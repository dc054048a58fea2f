"""A real API server takes the CRD, holds its rules, and runs masters within ``restricted``."""

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dlrover_operator import crd, manifests
from dlrover_operator.manifests import Options
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import InvalidError, KubeError, NotFoundError
from dlrover_py.kubernetes.kinds import CRDS, ELASTICJOBS, NAMESPACES, PODS, Obj
from dlrover_py.kubernetes.watch import Changed
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import ElasticJobStatus, GoodputStatus
from tests.builders import job_file
from tests.unit.test_job_file import DLROVER
from tests.unit.test_training_status import status

WORKER = "spec.replicaSpecs.worker"


@asynccontextmanager
async def cluster(kubeconfig: Path) -> AsyncIterator[tuple[KubeClient, str]]:
    async with await KubeClient.connect(kubeconfig=kubeconfig) as kube:
        if not await served(kube):
            await kube.apply(CRDS, crd.definition(), manager="test")
            async with asyncio.timeout(60):
                while not await served(kube):
                    await asyncio.sleep(0.05)
        made = await kube.create(NAMESPACES, {"metadata": {"generateName": "crd-"}})
        yield kube, made["metadata"]["name"]


async def served(kube: KubeClient) -> bool:
    """Whether the kind is served."""
    try:
        held = await kube.get(CRDS, crd.definition()["metadata"]["name"])
        await kube.list(ELASTICJOBS, "default")
    except NotFoundError:
        return False
    wanted = crd.definition()["spec"]["versions"][0]["schema"]
    assert held["spec"]["versions"][0]["schema"] == wanted, "the server has changed the schema"
    conditions = held.get("status", {}).get("conditions", ())
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


@pytest.fixture
async def bed(kube_api: Path) -> AsyncIterator[tuple[KubeClient, str]]:
    async with cluster(kube_api) as found:
        yield found


Bed = tuple[KubeClient, str]


def job(namespace: str, changes: dict[str, Any] | None = None, **worker: Any) -> Obj:
    document = copy.deepcopy(job_file(4, **worker))
    document["metadata"]["namespace"] = namespace
    for path, value in (changes or {}).items():
        *above, last = path.split(".")
        place: Any = document
        for key in above:
            place = place[key]
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{WORKER}.minReplicas": 4}, ""),
        ({f"{WORKER}.minReplicas": 5}, "minReplicas is larger than replicas"),
        ({f"{WORKER}.maxReplicas": 4}, ""),
        ({f"{WORKER}.maxReplicas": 3}, "replicas is larger than maxReplicas"),
        ({f"{WORKER}.nodeUnit": 2, f"{WORKER}.minReplicas": 2}, ""),
        ({f"{WORKER}.nodeUnit": 3}, "replicas is not a multiple of nodeUnit"),
        ({f"{WORKER}.nodeUnit": 2, f"{WORKER}.minReplicas": 3}, "minReplicas is not a multiple"),
        ({f"{WORKER}.nodeUnit": 2, f"{WORKER}.maxReplicas": 5}, "maxReplicas is not a multiple"),
        ({f"{WORKER}.replicas": 0}, "worker.replicas is 0: expected at least 1"),
        ({f"{WORKER}.replicas": 0, "spec.replicaSpecs.ps": {"replicas": 1}}, ""),
        ({f"{WORKER}.replicas": 0, "spec.replicaSpecs.ps": {"replicas": 0}}, "expected at least 1"),
        ({"spec.replicaSpecs.ps": {"minReplicas": 2}}, "minReplicas is larger than replicas"),
        ({"spec.replicaSpecs.ps": {"replicas": 3, "maxReplicas": 2}}, "larger than maxReplicas"),
        ({"spec.replicaSpecs.ps": {"replicas": 2, "minReplicas": 2, "standbyReplicas": 1}}, ""),
        ({f"{WORKER}.replicas": -1}, "greater than or equal to 0"),
        ({f"{WORKER}.template": "x"}, "must be of type object"),
        ({"metadata.name": "x" * 37}, ""),
        ({"metadata.name": "x" * 38}, "at most 37 characters"),
        ({"metadata.name": "x.y"}, "expected lowercase letters"),
        ({"spec.distributionStrategy": "AllreduceStrategy"}, ""),
        ({"spec.distributionStrategy": "X"}, "Unsupported value"),
        ({"spec.replicaSpecs": {}}, "expected the role worker"),
        ({"spec.replicaSpecs": {"ps": {"replicas": 1}}}, ""),
        ({"spec.ttlSecondsAfterFinished": 0, "spec.activeDeadlineSeconds": 1}, ""),
        ({"spec.activeDeadlineSeconds": 0}, "greater than or equal to 1"),
        ({"spec.managedBy": ""}, "at least 1 char"),
    ],
)
async def test_each_rule_lets_the_good_pass_and_tells_the_bad(
    bed: Bed, changes: dict[str, Any], words: str
) -> None:
    kube, namespace = bed
    document = job(namespace, changes)
    if not words:
        await kube.create(ELASTICJOBS, document, dry_run=True)
        return
    with pytest.raises(InvalidError, match=words):
        await kube.create(ELASTICJOBS, document, dry_run=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"managedBy": "a/b"}),
        ({"managedBy": "a/b"}, {"managedBy": None}),
        ({"managedBy": "a/b"}, {"managedBy": "a/c"}),
        ({}, {"distributionStrategy": "AllreduceStrategy"}),
        ({"distributionStrategy": "AllreduceStrategy"}, {"distributionStrategy": None}),
        ({"distributionStrategy": "AllreduceStrategy"}, {"distributionStrategy": "Local"}),
    ],
)
async def test_what_is_fixed_cannot_be_added_removed_or_changed(
    bed: Bed, before: dict[str, Any], after: dict[str, Any]
) -> None:
    kube, namespace = bed
    made = job(namespace)
    made["spec"] |= before
    await kube.create(ELASTICJOBS, made)
    with pytest.raises(InvalidError, match="cannot be changed, added or removed"):
        await kube.patch(ELASTICJOBS, "x", {"spec": after}, namespace)
    await kube.patch(ELASTICJOBS, "x", {"spec": {"suspend": True}}, namespace)


async def test_servers_come_with_their_job_and_only_their_number_and_template_change(
    bed: Bed,
) -> None:
    kube, namespace = bed
    role = {"replicas": 2, "template": {"spec": {"containers": []}}}
    await kube.create(ELASTICJOBS, job(namespace, {"spec.replicaSpecs.ps": role}))
    for change, words in (
        (None, "ps cannot be added or removed"),
        ({"buckets": 128}, "buckets cannot be changed"),
        ({"ack": "primary"}, "ack cannot be changed"),
        ({"replication": 1}, "replication cannot be changed"),
        ({"checkpoints": "/cuts"}, "checkpoints cannot be changed"),
    ):
        with pytest.raises(InvalidError, match=words):
            await kube.patch(
                ELASTICJOBS, "x", {"spec": {"replicaSpecs": {"ps": change}}}, namespace
            )
    fine = {
        "replicas": 4,
        "minReplicas": 2,
        "standbyReplicas": 1,
        "template": {"spec": {"containers": [{"name": "main"}]}},
    }
    await kube.patch(ELASTICJOBS, "x", {"spec": {"replicaSpecs": {"ps": fine}}}, namespace)


async def test_the_templates_and_the_bounds_can_be_changed(bed: Bed) -> None:
    kube, namespace = bed
    await kube.create(ELASTICJOBS, job(namespace))
    worker = {"minReplicas": 2, "maxReplicas": 8, "template": {"spec": {"priority": 1}}}
    # no assert: a refused change raises
    await kube.patch(ELASTICJOBS, "x", {"spec": {"replicaSpecs": {"worker": worker}}}, namespace)


async def test_defaults_are_the_models(bed: Bed) -> None:
    kube, namespace = bed
    document = job(namespace)
    del document["spec"]["replicaSpecs"]["worker"]["replicas"]
    made = await kube.create(ELASTICJOBS, document)
    worker = made["spec"]["replicaSpecs"]["worker"]
    fields = ("replicas", "nodeUnit", "standbyReplicas", "restartCount")
    read = ElasticJob.parse(document).worker
    assert {f: worker[f] for f in fields} == {
        "replicas": read.replicas,
        "nodeUnit": read.node_unit,
        "standbyReplicas": read.standby_replicas,
        "restartCount": read.restart_count,
    }
    assert ElasticJob.read(made).worker == read


async def test_the_scale_subresource(bed: Bed) -> None:
    kube, namespace = bed
    await kube.create(ELASTICJOBS, job(namespace, maxReplicas=6, nodeUnit=2, minReplicas=2))
    said = {"status": {"replicas": 3, "selector": "a=b"}}
    meta = {"name": "x", "namespace": namespace}
    await kube.apply(ELASTICJOBS, {"metadata": meta} | said, manager="m", subresource="status")

    async def scale(replicas: int) -> Obj:
        wish = {"spec": {"replicas": replicas}}
        return await kube.patch(ELASTICJOBS, "x", wish, namespace, subresource="scale")

    assert (await scale(6))["status"] == {"replicas": 3, "selector": "a=b"}
    held = await kube.get(ELASTICJOBS, "x", namespace)
    assert held["spec"]["replicaSpecs"]["worker"]["replicas"] == 6
    for bad, words in ((8, "larger than maxReplicas"), (5, "not a multiple")):
        with pytest.raises(InvalidError, match=words):
            await scale(bad)


async def strictly(kube: KubeClient, document: Obj) -> Obj:
    """Create as ``kubectl apply --validate=strict`` does."""
    path = ELASTICJOBS.path(document["metadata"]["namespace"])
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    return await kube._json("POST", path, query, document)


async def test_dlrovers_manifests_are_taken_strictly(bed: Bed) -> None:
    import yaml

    kube, namespace = bed
    document = yaml.safe_load(DLROVER)
    document["metadata"]["namespace"] = namespace
    taken = await strictly(kube, document)
    roles = taken["spec"]["replicaSpecs"]
    assert roles["worker"]["BatchScheduler"] == "volcano"
    template = document["spec"]["replicaSpecs"]["worker"]["template"]
    assert roles["worker"]["template"] == template  # kept as written
    ps = {"replicas": 1, "restartCount": 1, "autoScale": True, "template": template}
    document["spec"] |= {"distributionStrategy": "ParameterServerStrategy"}
    document["spec"]["replicaSpecs"] |= {"ps": ps, "chief": ps, "evaluator": ps}
    await strictly(kube, document)
    document["spec"]["replicaSpecs"]["worker"]["minReplica"] = 1
    with pytest.raises(InvalidError, match=r"worker\.minReplica"):
        await strictly(kube, document)


def paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from paths(child, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for child in value:
            yield from paths(child, f"{path}[]")
    else:
        yield path


async def test_two_writers_share_the_status_and_nothing_of_it_is_dropped(bed: Bed) -> None:
    from dlrover_py.protocol.agents import FailureKind, Progress, WorkerFailure
    from dlrover_py.protocol.status import Failure, ObjectCondition, Training

    kube, namespace = bed
    await kube.create(ELASTICJOBS, job(namespace))
    meta = {"name": "x", "namespace": namespace}
    progress = Progress(
        step=3, total=9, started_at_step=1, first_step_after_s=0.5, metrics={"a": 1}
    )
    worker = WorkerFailure(
        kind=FailureKind.EXIT, local_rank=0, rank=1, pid=2, exit_code=-9, message="m", step=3
    )
    failure = Failure(at=1.5, node="n1", round=2, worker=worker)
    goodput = GoodputStatus(wall_s=4.0, share=0.5, seconds={"productive": 2.0, "standstill": 2.0})
    told = status(70, 40).model_copy(
        update={"progress": progress, "last_failure": failure, "goodput": goodput}
    )
    training = Training.of(told).model_dump(
        mode="json", by_alias=True, exclude={"conditions"}, exclude_none=True
    )

    def condition(kind: str) -> Obj:
        made = ObjectCondition(type=kind, status="True", reason="R", last_transition_time=1e9)
        return made.model_dump(mode="json", by_alias=True, exclude_none=True)

    for manager, said in (
        ("master", {"training": training, "replicas": 3, "conditions": [condition("Running")]}),
        ("operator", {"phase": "Running", "conditions": [condition("MasterReady")]}),
        ("operator", {"phase": "Forming", "conditions": [condition("MasterReady")]}),
    ):
        await kube.apply(
            ELASTICJOBS, {"metadata": meta, "status": said}, manager=manager, subresource="status"
        )
    held = (await kube.get(ELASTICJOBS, "x", namespace))["status"]
    assert {c["type"] for c in held["conditions"]} == {"Running", "MasterReady"}
    assert held["phase"] == "Forming"
    assert set(paths(held["training"])) == set(paths(training))
    read = ElasticJobStatus.model_validate(held)
    assert read.training is not None
    assert read.training.summary.progress == "33% (3/9)"
    with pytest.raises(InvalidError, match="endedAt"):
        await kube.apply(
            ELASTICJOBS,
            {"metadata": meta, "status": {"training": training | {"endedAt": 1.5}}},
            manager="master",
            subresource="status",
        )


async def test_a_master_of_an_older_term_does_not_write_the_status(bed: Bed) -> None:
    kube, namespace = bed
    await kube.create(ELASTICJOBS, job(namespace))
    meta = {"name": "x", "namespace": namespace}

    async def tell(term: int, number: int) -> None:
        said = {"training": {"term": term, "round": number}}
        await kube.apply(
            ELASTICJOBS, {"metadata": meta, "status": said}, manager="m", subresource="status"
        )

    await tell(3, 5)
    await tell(3, 6)
    await tell(4, 7)
    with pytest.raises(InvalidError, match="a newer master"):
        await tell(3, 9)
    held = (await kube.get(ELASTICJOBS, "x", namespace))["status"]["training"]
    assert (held["term"], held["round"]) == (4, 7)


async def test_an_object_that_is_nested_without_end_hides_no_other(bed: Bed) -> None:
    """The server stores 10,000 levels; Python's parser gives up after a thousand."""
    kube, namespace = bed
    await kube.create(ELASTICJOBS, job(namespace))
    deep = job(namespace, {"metadata.name": "deep"})
    deep["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["x"] = "HERE"
    data = json.dumps(deep).replace('"HERE"', "[" * 5000 + "]" * 5000).encode()
    async with kube._reply("POST", ELASTICJOBS.path(namespace), {}, data, "application/json"):
        pass
    by_name = {obj["metadata"]["name"]: obj for obj in await kube.list(ELASTICJOBS, namespace)}
    assert ElasticJob.read(by_name["x"]).worker.replicas == 4
    with pytest.raises(ConfigError, match="expected at most 64 levels"):
        ElasticJob.read(by_name["deep"])
    async with contextlib.aclosing(kube.watch(ELASTICJOBS, namespace, view=lambda o: o)) as changes:
        await anext(changes)
        await kube.patch(ELASTICJOBS, "deep", {"metadata": {"labels": {"a": "b"}}}, namespace)
        change = await anext(changes)
    assert isinstance(change, Changed)
    assert change.item["metadata"]["labels"] == {"a": "b"}


async def test_a_master_stays_within_the_restricted_pod_security(bed: Bed) -> None:
    kube, _ = bed
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    space = await kube.create(
        NAMESPACES, {"metadata": {"generateName": "restricted-", "labels": labels}}
    )
    namespace = space["metadata"]["name"]
    document = job(namespace)
    document["metadata"]["uid"] = "u1"
    made = manifests.deployment(ElasticJob.read(document), "10.0.0.1", Options("image:1"))
    template = made["spec"]["template"]
    meta = template["metadata"] | {"name": "master", "namespace": namespace}
    await kube.create(PODS, {"metadata": meta, "spec": template["spec"]}, dry_run=True)
    template["spec"]["containers"][0]["securityContext"]["capabilities"] = {}
    with pytest.raises(KubeError, match="violates PodSecurity"):
        await kube.create(PODS, {"metadata": meta, "spec": template["spec"]}, dry_run=True)
