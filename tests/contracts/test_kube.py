"""What the client promises, against a fake API server and a real one; and what it does on errors.

The first part is one suite: it proves the fake by what the real server does. Faults are the fake's.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NameConflictError,
    NotFoundError,
    ServerDownError,
    ThrottledError,
    UnauthenticatedError,
)
from dlrover_py.kubernetes.kinds import (
    CRDS,
    DEPLOYMENTS,
    ELASTICJOBS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Kind,
    Obj,
)
from dlrover_py.kubernetes.watch import Changed, ClientTimes, Gone, Listed
from dlrover_py.kubernetes.wire import AnswerLimits
from dlrover_py.protocol.errors import TransientError, UnreachableError
from dlrover_py.protocol.refusals import Refusal, refusal_in
from tests.fakes_kube import FakeCluster, fake_cluster, write_kubeconfig
from tests.kube_server import api_server, programs

SOON = 60.0
QUICK = ClientTimes(
    call_s=60, first_wait_s=0.02, longest_wait_s=0.2, denied_s=0.1, stall_s=60, steady_s=0.05
)


async def until(look: Callable[[], Any], what: str) -> Any:
    async def seen() -> Any:
        while not (found := look()):
            await asyncio.sleep(0.005)
        return found

    try:
        return await asyncio.wait_for(seen(), SOON)
    except TimeoutError:
        pytest.fail(f"not within {SOON:g} s: {what}")


def pod(name: str, namespace: str, **labels: str) -> Obj:
    spec = {"containers": [{"name": "main", "image": "none"}]}
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": spec}


def secret(name: str, namespace: str, **data: str) -> Obj:
    return {"metadata": {"name": name, "namespace": namespace}, "stringData": data}


def name_of(obj: Obj) -> str:
    return str(obj["metadata"]["name"])


@dataclass
class Watcher:
    """Follows a watch as its users do: what there is now, and what was said."""

    said: list[Any] = field(default_factory=list)
    errors: list[KubeError | None] = field(default_factory=list)
    there: dict[str, Obj] = field(default_factory=dict)

    async def run(self, kube: KubeClient, *what: Any, **options: Any) -> None:
        told = {"view": lambda obj: obj, "on_error": self.errors.append} | options
        async with contextlib.aclosing(kube.watch(*what, **told)) as events:
            async for event in events:
                self.said.append(event)
                if isinstance(event, Listed):
                    self.there = {name_of(obj): obj for obj in event.items}
                elif isinstance(event, Changed):
                    self.there[name_of(event.item)] = event.item
                else:
                    self.there.pop(name_of(event.item), None)

    @property
    def lists(self) -> int:
        return sum(isinstance(event, Listed) for event in self.said)


@contextlib.asynccontextmanager
async def watching(kube: KubeClient, *what: Any, **options: Any) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    task = asyncio.create_task(watcher.run(kube, *what, **options))
    try:
        yield watcher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, SOON)


# --- one suite, two servers ---


@dataclass
class Bed:
    kube: KubeClient
    namespace: str
    kubeconfig: Path


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = programs()
    if isinstance(found, str):
        pytest.skip(found)
    with api_server(tmp_path_factory.mktemp("api"), *found) as kubeconfig:
        yield kubeconfig


@pytest.fixture(params=["fake", "real"])
async def bed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bed]:
    if request.param == "fake":
        async with fake_cluster(tmp_path) as (_, kube):
            yield Bed(kube, "default", tmp_path / "kubeconfig")
        return
    kubeconfig = request.getfixturevalue("real_server")
    async with await KubeClient.connect(kubeconfig=kubeconfig) as kube:
        await have_elasticjobs(kube)
        made = {"metadata": {"generateName": "test-"}}
        yield Bed(kube, name_of(await kube.create(NAMESPACES, made)), kubeconfig)


async def have_elasticjobs(kube: KubeClient) -> None:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    condition: Obj = {"type": "object", "properties": {"type": {"type": "string"}}}
    condition |= {"required": ["type"], "x-kubernetes-preserve-unknown-fields": True}
    conditions = {"type": "array", "items": condition}
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    schema: Obj = {"type": "object", "properties": {"spec": anything, "status": anything}}
    schema["properties"]["status"] = anything | {"properties": {"conditions": conditions}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "subresources": {"status": {}}}
    names = {"plural": ELASTICJOBS.plural, "singular": "elasticjob", "kind": ELASTICJOBS.name}
    crd = {
        "metadata": {"name": f"{ELASTICJOBS.plural}.{ELASTICJOBS.group}"},
        "spec": {
            "group": ELASTICJOBS.group,
            "scope": "Namespaced",
            "names": names,
            "versions": [version | {"schema": {"openAPIV3Schema": schema}}],
        },
    }
    with contextlib.suppress(AlreadyExistsError):
        await kube.create(CRDS, crd)
    async with asyncio.timeout(SOON):
        while True:
            with contextlib.suppress(NotFoundError):
                await kube.list(ELASTICJOBS)
                return
            await asyncio.sleep(0.05)


async def test_an_object_comes_and_goes(bed: Bed) -> None:
    made = await bed.kube.create(PODS, pod("a", bed.namespace, job="j"))
    assert made["metadata"]["uid"]
    assert (made["apiVersion"], made["kind"]) == ("v1", "Pod")
    assert made["status"]["phase"] == "Pending"
    assert (await bed.kube.get(PODS, "a", bed.namespace)) == made
    assert await bed.kube.delete(PODS, "a", bed.namespace)
    with pytest.raises(NotFoundError, match='pods "a" not found') as told:
        await bed.kube.get(PODS, "a", bed.namespace)
    assert (told.value.status, told.value.reason) == (404, "NotFound")
    assert not await bed.kube.delete(PODS, "a", bed.namespace)


async def test_the_server_says_which_kinds_it_has(bed: Bed) -> None:
    found = await bed.kube.served(DEPLOYMENTS.group)
    assert DEPLOYMENTS in found
    assert not [kind for kind in found if "/" in kind.plural]
    assert await bed.kube.served("nothing.example.com") == ()


async def test_a_name_is_taken_once(bed: Bed) -> None:
    await bed.kube.create(PODS, pod("a", bed.namespace))
    with pytest.raises(AlreadyExistsError, match='pods "a" already exists'):
        await bed.kube.create(PODS, pod("a", bed.namespace))


async def test_what_cannot_be_is_refused_in_the_servers_words(bed: Bed) -> None:
    spec = {"containers": [{"name": "main"}]}
    with pytest.raises(InvalidError, match=r'Pod "a" is invalid: spec\.containers\[0\]\.image'):
        await bed.kube.create(PODS, pod("a", bed.namespace) | {"spec": spec})
    with pytest.raises(InvalidError, match=r"is invalid: metadata\.name"):
        await bed.kube.create(PODS, pod("A!", bed.namespace))
    with pytest.raises(NotFoundError, match='namespaces "nowhere" not found'):
        await bed.kube.create(PODS, pod("a", "nowhere"))


async def test_a_dry_run_leaves_nothing(bed: Bed) -> None:
    assert name_of(await bed.kube.create(PODS, pod("a", bed.namespace), dry_run=True)) == "a"
    assert await bed.kube.list(PODS, bed.namespace) == []


async def test_an_unknown_field_is_a_warning_or_a_refusal(bed: Bed) -> None:
    odd = pod("a", bed.namespace)
    odd["spec"]["tolerationz"] = []
    odd["spec"]["containers"][0]["resource"] = {}
    fields = ("spec.tolerationz", "spec.containers[0].resource")
    told: list[str] = []
    await bed.kube.create(PODS, odd, dry_run=True, on_warning=told.append)
    assert {f'unknown field "{field}"' for field in fields} <= set(told)
    told.clear()
    with pytest.raises(InvalidError) as refused:
        await bed.kube.create(PODS, odd, dry_run=True, strict=True, on_warning=told.append)
    assert "strict decoding error" in str(refused.value)
    assert all(f'unknown field "{field}"' in str(refused.value) for field in fields)
    assert told == []
    bed.kube.on_warning = told.append
    await bed.kube.create(PODS, odd)
    assert len(told) == 2


async def test_create_or_own_keeps_what_is_ours_and_no_other(bed: Bed) -> None:
    ours = secret("s", bed.namespace, word="first")
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "owner-1"}
    ours["metadata"]["ownerReferences"] = [owner]
    made = await bed.kube.create_or_own(SECRETS, ours, "owner-1")
    again = await bed.kube.create_or_own(SECRETS, ours | {"stringData": {"word": "2"}}, "owner-1")
    assert again == made
    with pytest.raises(NameConflictError, match=f"Secret {bed.namespace}/s already exists"):
        await bed.kube.create_or_own(SECRETS, ours, "owner-2")


async def test_a_stale_replace_is_a_conflict(bed: Bed) -> None:
    first = await bed.kube.create(SECRETS, secret("s", bed.namespace, word="1"))
    second = await bed.kube.replace(SECRETS, first | {"data": {"word": "Mg=="}})
    assert second["data"] == {"word": "Mg=="}
    with pytest.raises(ConflictError) as told:
        await bed.kube.replace(SECRETS, first | {"data": {"word": "Mw=="}})
    assert told.value.reason == "Conflict"
    assert (await bed.kube.get(SECRETS, "s", bed.namespace))["data"] == {"word": "Mg=="}


async def test_immutable_secrets_stay(bed: Bed) -> None:
    made = await bed.kube.create(SECRETS, secret("s", bed.namespace, a="1") | {"immutable": True})
    with pytest.raises(InvalidError, match="immutable"):
        await bed.kube.replace(SECRETS, made | {"data": {"a": "Mg=="}})


async def test_a_merge_patch_adds_and_removes(bed: Bed) -> None:
    await bed.kube.create(PODS, pod("a", bed.namespace, old="1", kept="1"))
    patch = {"metadata": {"labels": {"old": None, "new": "1"}}}
    changed = await bed.kube.patch(PODS, "a", patch, bed.namespace)
    assert changed["metadata"]["labels"] == {"kept": "1", "new": "1"}


async def test_delete_spares_another_object_of_the_name(bed: Bed) -> None:
    made = await bed.kube.create(PODS, pod("a", bed.namespace))
    assert not await bed.kube.delete(PODS, "a", bed.namespace, uid="another")
    uid = made["metadata"]["uid"]
    assert await bed.kube.delete(PODS, "a", bed.namespace, uid=uid, grace_s=0)
    assert not await bed.kube.delete(PODS, "a", bed.namespace, uid=uid)


async def test_a_pod_that_runs_is_given_its_grace(bed: Bed) -> None:
    runs = pod("a", bed.namespace)
    runs["spec"] |= {"nodeName": "somewhere", "terminationGracePeriodSeconds": 30}
    await bed.kube.create(PODS, runs)
    assert await bed.kube.delete(PODS, "a", bed.namespace)
    meta = (await bed.kube.get(PODS, "a", bed.namespace))["metadata"]
    assert meta["deletionTimestamp"]
    assert meta["deletionGracePeriodSeconds"] == 30
    assert await bed.kube.delete(PODS, "a", bed.namespace, grace_s=1)
    meta = (await bed.kube.get(PODS, "a", bed.namespace))["metadata"]
    assert meta["deletionGracePeriodSeconds"] == 1, "a later order may only hurry it"
    assert await bed.kube.delete(PODS, "a", bed.namespace, grace_s=0)
    with pytest.raises(NotFoundError):
        await bed.kube.get(PODS, "a", bed.namespace)


async def test_a_finalizer_holds_an_object(bed: Bed) -> None:
    held = secret("s", bed.namespace)
    held["metadata"]["finalizers"] = ["example.test/held"]
    await bed.kube.create(SECRETS, held)
    assert await bed.kube.delete(SECRETS, "s", bed.namespace)
    assert (await bed.kube.get(SECRETS, "s", bed.namespace))["metadata"]["deletionTimestamp"]
    await bed.kube.patch(SECRETS, "s", {"metadata": {"finalizers": None}}, bed.namespace)
    with pytest.raises(NotFoundError):
        await bed.kube.get(SECRETS, "s", bed.namespace)


async def test_lists_select(bed: Bed) -> None:
    for name, labels in {"a": {"job": "x"}, "b": {"job": "y"}, "c": {}}.items():
        await bed.kube.create(PODS, pod(name, bed.namespace, **labels))

    async def names(**select: str) -> list[str]:
        return sorted(map(name_of, await bed.kube.list(PODS, bed.namespace, **select)))

    assert await names() == ["a", "b", "c"]
    assert await names(labels="job=x") == ["a"]
    assert await names(labels="job in (x, y),job!=y") == ["a"]
    assert await names(labels="!job") == ["c"]
    assert await names(fields="metadata.name=b") == ["b"]
    assert await names(fields="status.phase!=Pending") == []


async def test_lists_come_in_pages(bed: Bed) -> None:
    created = (bed.kube.create(SECRETS, secret(f"s{n}", bed.namespace)) for n in range(1050))
    await asyncio.gather(*created)  # more in flight than the client lets out at once
    found = await bed.kube.list(SECRETS, bed.namespace)
    assert sorted(map(name_of, found)) == sorted(f"s{n}" for n in range(1050))


async def test_cluster_wide_kinds_have_no_namespace(bed: Bed) -> None:
    await bed.kube.create_or_own(NODES, {"metadata": {"name": f"of-{bed.namespace}"}}, "")
    assert name_of(await bed.kube.get(NODES, f"of-{bed.namespace}")) == f"of-{bed.namespace}"
    assert await bed.kube.delete(NODES, f"of-{bed.namespace}")


async def test_a_service_gets_its_address(bed: Bed) -> None:
    spec = {"selector": {"a": "b"}, "ports": [{"name": "agents", "port": 50001}]}
    meta = {"name": "svc", "namespace": bed.namespace}
    made = await bed.kube.apply(SERVICES, {"metadata": meta, "spec": spec}, manager="us")
    again = await bed.kube.apply(SERVICES, {"metadata": meta, "spec": spec}, manager="us")
    assert made["spec"]["clusterIP"].startswith("10.96.")
    assert again["spec"]["clusterIP"] == made["spec"]["clusterIP"]
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_applied_fields_belong_to_their_manager(bed: Bed) -> None:
    def labelled(**labels: str) -> Obj:
        return {"metadata": {"name": "s", "namespace": bed.namespace, "labels": labels}}

    await bed.kube.apply(SECRETS, labelled(a="1", b="1"), manager="one")
    await bed.kube.apply(SECRETS, labelled(b="2", c="2"), manager="two")
    found = await bed.kube.apply(SECRETS, labelled(b="1"), manager="one")
    assert found["metadata"]["labels"] == {"b": "1", "c": "2"}, "a was dropped by its manager"
    found = await bed.kube.apply(SECRETS, labelled(), manager="one")
    assert found["metadata"]["labels"] == {"c": "2"}, "b was taken over by the first"


async def test_any_text_is_applied(bed: Bed) -> None:
    """Torch ends some errors with an emoji, and no line that a worker prints may stop a status."""
    words = "\U0001f3d6 \\ud83c\\udfd6 \"'\\\n\t: #"
    words += "\x00\x1f\x7f\x85\x9f\xa0\u2028\u2029\ufeff\ufffe\uffff"
    meta = {"name": "any", "namespace": bed.namespace, "annotations": {"words": words + "\udfd6"}}
    made = await bed.kube.apply(SECRETS, {"metadata": meta}, manager="us")
    assert made["metadata"]["annotations"]["words"] == words + "\ufffd"


async def test_two_managers_share_a_status(bed: Bed) -> None:
    meta = {"name": "job", "namespace": bed.namespace}
    job = await bed.kube.create(
        ELASTICJOBS, {"metadata": meta, "spec": {"a": 1}, "status": {"x": 1}}
    )
    assert "status" not in job
    assert job["metadata"]["generation"] == 1

    async def say(manager: str, *types: str, **more: Any) -> Obj:
        conditions = [{"type": name, "status": "True"} for name in types]
        status = {"conditions": conditions} | more
        applied = {"metadata": meta, "status": status}
        return await bed.kube.apply(ELASTICJOBS, applied, manager=manager, subresource="status")

    def types(obj: Obj) -> list[str]:
        return sorted(condition["type"] for condition in obj["status"]["conditions"])

    await say("master", "Running", "PodsReady", replicas=3)
    assert types(await say("operator", "MasterReady", phase="Running")) == [
        "MasterReady",
        "PodsReady",
        "Running",
    ]
    found = await say("master", "Running")
    assert types(found) == ["MasterReady", "Running"]
    assert found["status"]["phase"] == "Running"
    assert "replicas" not in found["status"]
    assert found["metadata"]["generation"] == 1
    found = await bed.kube.patch(
        ELASTICJOBS, "job", {"spec": {"a": 2}, "status": {"phase": "no"}}, bed.namespace
    )
    assert found["metadata"]["generation"] == 2
    assert found["status"]["phase"] == "Running"


async def test_apply_does_not_bring_back_the_dead(bed: Bed) -> None:
    gone = {"name": "job", "namespace": bed.namespace, "uid": "of-one-that-is-gone"}
    with pytest.raises(NotFoundError):
        await bed.kube.apply(
            ELASTICJOBS, {"metadata": gone, "status": {}}, manager="m", subresource="status"
        )
    with pytest.raises(ConflictError, match="uid mismatch"):
        await bed.kube.apply(ELASTICJOBS, {"metadata": gone, "spec": {}}, manager="m")
    assert await bed.kube.list(ELASTICJOBS, bed.namespace) == []


async def test_a_log_needs_a_pod(bed: Bed) -> None:
    with pytest.raises(NotFoundError):
        await bed.kube.log("nobody", bed.namespace, tail=5)


async def test_an_unknown_kind_is_not_found(bed: Bed) -> None:
    with pytest.raises(NotFoundError, match="404 page not found"):
        await bed.kube.list(Kind("example.test", "v1", "nothings", "Nothing"))


async def test_a_watch_says_what_is_and_what_changes(bed: Bed) -> None:
    await bed.kube.create(PODS, pod("a", bed.namespace))
    async with watching(
        bed.kube, PODS, bed.namespace, view=lambda o: {"metadata": o["metadata"]}
    ) as w:
        await until(lambda: w.said, "a list")
        assert list(w.there) == ["a"]
        await bed.kube.create(PODS, pod("b", bed.namespace))
        await bed.kube.patch(PODS, "a", {"metadata": {"labels": {"n": "1"}}}, bed.namespace)
        await bed.kube.delete(PODS, "b", bed.namespace)
        await until(lambda: isinstance(w.said[-1], Gone), "the end of b")
        assert [type(event) for event in w.said] == [Listed, Changed, Changed, Changed, Gone]
        assert w.there["a"]["metadata"]["labels"] == {"n": "1"}
        assert list(w.there["a"]) == ["metadata"], "only the view is kept"
        assert w.errors == []


async def test_who_leaves_the_selection_is_gone(bed: Bed) -> None:
    async with watching(bed.kube, PODS, bed.namespace, labels="job=j") as w:
        await until(lambda: w.said, "a list")
        await bed.kube.create(PODS, pod("other", bed.namespace))
        await bed.kube.create(PODS, pod("ours", bed.namespace, job="j"))
        await until(lambda: "ours" in w.there, "our Pod")
        await bed.kube.patch(PODS, "ours", {"metadata": {"labels": {"job": "k"}}}, bed.namespace)
        await until(lambda: not w.there, "our Pod to leave")
        assert [type(event) for event in w.said] == [Listed, Changed, Gone]


async def test_watches_are_apart(bed: Bed) -> None:
    async with (
        watching(bed.kube, PODS, bed.namespace, fields="metadata.name=a") as one,
        watching(bed.kube, SECRETS, bed.namespace) as two,
    ):
        await until(lambda: one.said and two.said, "two lists")
        await bed.kube.create(PODS, pod("b", bed.namespace))
        await bed.kube.create(PODS, pod("a", bed.namespace))
        await bed.kube.create(SECRETS, secret("s", bed.namespace))
        await until(lambda: one.there and two.there, "both")
        assert (list(one.there), list(two.there)) == (["a"], ["s"])


async def test_lines_of_any_length(bed: Bed) -> None:
    long = "x" * 1_000_000
    async with watching(bed.kube, SECRETS, bed.namespace) as w:
        await until(lambda: w.said, "a list")
        await bed.kube.create(SECRETS, secret("long", bed.namespace, word=long))
        await bed.kube.create(SECRETS, secret("short", bed.namespace))
        await until(lambda: "short" in w.there, "both")
        assert len(w.there["long"]["data"]["word"]) > 1_300_000


async def test_a_watch_goes_on_after_the_server_ends_it(bed: Bed) -> None:
    bed.kube.times = ClientTimes(watch_s=1.0, steady_s=0.1)
    async with watching(bed.kube, PODS, bed.namespace) as w:
        await until(lambda: w.said, "a list")
        for number in range(12):  # for longer than two watches last
            await bed.kube.create(PODS, pod(f"p{number}", bed.namespace))

            def there(name: str = f"p{number}") -> bool:
                return name in w.there

            await until(there, "a Pod")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.Event().wait()
        assert [type(event) for event in w.said] == [Listed] + [Changed] * 12
        assert w.errors == []


async def test_a_watch_ends_at_once_when_it_is_cancelled(bed: Bed) -> None:
    async with watching(bed.kube, PODS, bed.namespace) as w:
        await until(lambda: w.said, "a list")
        ended = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - ended < SOON, "the server would end it after minutes"
    assert threads_of_requests() == []


def threads_of_requests() -> list[str]:
    import threading

    return [t.name for t in threading.enumerate() if "urllib3" in t.name or "Pool" in t.name]


async def test_a_wrong_token_is_said(bed: Bed, tmp_path: Path) -> None:
    import yaml

    config = yaml.safe_load(bed.kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    path = write_kubeconfig(tmp_path / "wrong", cluster, {"token": "wrong"})
    async with await KubeClient.connect(kubeconfig=path) as kube:
        with pytest.raises(UnauthenticatedError, match="Unauthorized") as told:
            await kube.get(PODS, "a", "default")
        assert told.value.status == 401


# --- faults, which only the fake can be made to have ---


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, KubeClient]]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        kube.times = QUICK
        yield cluster, kube


Fake = tuple[FakeCluster, KubeClient]
secret_ = secret("s", "default")


def asked(cluster: FakeCluster, *, watch: bool) -> int:
    return sum(call.watch == watch for call in cluster.calls if call.method == "GET")


async def test_pages_that_expire_are_listed_anew(fake: Fake) -> None:
    cluster, kube = fake
    for number in range(5):
        cluster.put(SECRETS, secret(f"s{number}", "default"))
    cluster.page = 2
    cluster.fail(410, "Expired", query="continue")
    found = await kube.list(SECRETS, "default")
    assert [name_of(obj) for obj in found] == [f"s{number}" for number in range(5)]
    starts = [call for call in cluster.calls if "continue" not in call.query]
    assert len(starts) == 2
    assert all(call.query["limit"] == "500" for call in starts)


async def test_pages_that_expire_always_are_listed_in_one_piece(fake: Fake) -> None:
    cluster, kube = fake
    for number in range(5):
        cluster.put(SECRETS, secret(f"s{number}", "default"))
    cluster.page = 2
    cluster.fail(410, "Expired", query="continue", times=1000)
    assert len(await kube.list(SECRETS, "default")) == 5
    assert "limit" not in cluster.calls[-1].query


async def test_compacted_history_means_a_new_list(fake: Fake) -> None:
    cluster, kube = fake
    cluster.put(SECRETS, secret("a", "default"))
    cluster.put(SECRETS, secret("b", "default"))
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        cluster.stalled = True
        cluster.remove(SECRETS, "b")
        cluster.put(SECRETS, secret("c", "default"))
        cluster.compact()
        cluster.cut()
        await until(lambda: w.lists == 2, "a second list")
        assert list(w.there) == ["a", "c"], "what went unseen is not among what is listed"
        assert Gone not in map(type, w.said)
        assert w.errors == []


async def test_a_watch_that_is_refused_as_expired_means_a_new_list(fake: Fake) -> None:
    cluster, kube = fake
    cluster.fail(410, "Expired", "too old resource version", watch=True)
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        assert w.lists == 2
        assert w.errors == []


async def test_other_errors_in_a_watch_go_on_from_where_it_was(fake: Fake) -> None:
    cluster, kube = fake
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        cluster.say("ERROR", {"kind": "Status", "code": 500, "message": "etcd: no leader"})
        await until(lambda: len(w.errors) == 2, "an error and its end")
        cluster.put(SECRETS, secret("a", "default"))
        await until(lambda: "a" in w.there, "what comes then")
        assert w.lists == 1
        assert [str(error) for error in w.errors] == ["etcd: no leader", "None"]


async def test_a_cut_in_mid_line_loses_nothing(fake: Fake) -> None:
    cluster, kube = fake
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        cluster.put(SECRETS, secret("a", "default"))
        await until(lambda: "a" in w.there, "a")
        cluster.stalled = True
        cluster.put(SECRETS, secret("b", "default"))
        cluster.cut(b'{"type": "ADDED", "object": {"metadata": {"na')
        await until(lambda: asked(cluster, watch=True) == 2, "another watch")
        cluster.stalled = False
        await until(lambda: "b" in w.there, "b")
        assert [type(event) for event in w.said] == [Listed, Changed, Changed]
        assert w.errors == []


async def test_a_server_that_goes_away_is_waited_for(fake: Fake) -> None:
    cluster, kube = fake
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        await cluster.stop()
        await until(lambda: w.errors, "an error")  # the cut alone is none
        assert isinstance(w.errors[0], ServerDownError)
        with pytest.raises(
            ServerDownError, match=r"http://127\.0\.0\.1:\d+: Connection refused; is it running"
        ) as told:
            await kube.create(SECRETS, secret_)
        assert isinstance(told.value, UnreachableError)
        cluster.put(SECRETS, secret("a", "default"))
        await cluster.start()
        await until(lambda: "a" in w.there, "what happened meanwhile")
        assert [type(error) for error in w.errors] == [ServerDownError, type(None)]
        assert w.lists == 1


async def test_a_stalled_watch_is_left(fake: Fake) -> None:
    cluster, kube = fake
    kube.times = ClientTimes(stall_s=0.3, steady_s=0.05, first_wait_s=0.02)
    cluster.bookmark_s = 0.05
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        before = cluster.calls[-1].query["resourceVersion"]
        cluster.put(SECRETS, secret("a", "default"))
        await until(lambda: "a" in w.there, "a")
        cluster.stalled = True
        there = asked(cluster, watch=True)  # more than one, if this machine stood still
        await until(lambda: asked(cluster, watch=True) > there, "another watch")
        cluster.stalled = False
        assert cluster.calls[-1].query["resourceVersion"] != before
        assert w.lists == 1
        assert w.errors == []


async def test_bookmarks_keep_a_quiet_watch_and_carry_its_version(fake: Fake) -> None:
    cluster, kube = fake
    kube.times = ClientTimes(stall_s=6.0, steady_s=0.05, first_wait_s=0.02)
    cluster.bookmark_s = 0.05
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        first = int(cluster.calls[-1].query["resourceVersion"])
        for number in range(5):
            cluster.put(PODS, pod(f"p{number}", "default"))  # of another kind: only versions move
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(8.0):
                await asyncio.Event().wait()
        assert asked(cluster, watch=True) == 1
        cluster.cut()
        await until(lambda: asked(cluster, watch=True) == 2, "another watch")
        assert int(cluster.calls[-1].query["resourceVersion"]) >= first + 5
        assert len(w.said) == 1


async def test_what_is_said_twice_is_passed_on(fake: Fake) -> None:
    cluster, kube = fake
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: cluster.watches, "a watch")
        cluster.put(SECRETS, secret("a", "default"))
        cluster.say("MODIFIED", cluster.one(SECRETS, "a") or {})
        await until(lambda: len(w.said) == 3, "both")
        assert list(w.there) == ["a"]


@pytest.mark.parametrize("watch", [False, True])
async def test_throttled_calls_say_for_how_long(fake: Fake, watch: bool) -> None:
    cluster, kube = fake
    cluster.fail(429, "TooManyRequests", "slow down", watch=watch, retry_after=1)
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: len(w.errors) == 2, "an error and its end")
        times = [call.at for call in cluster.calls if call.watch == watch]
        assert times[1] - times[0] >= 1.0
        assert w.lists == 1
        assert [type(error) for error in w.errors] == [ThrottledError, type(None)]
    cluster.fail(429, "TooManyRequests", "slow down", method="POST", retry_after=7)
    with pytest.raises(ThrottledError, match="slow down") as told:
        await kube.create(SECRETS, secret_)
    assert 7.0 <= told.value.retry_after <= 7.0 * 1.25
    assert isinstance(told.value, TransientError)


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize(
    ("code", "kind"), [(401, UnauthenticatedError), (403, ForbiddenError), (404, NotFoundError)]
)
async def test_what_needs_a_person_is_said_once(
    fake: Fake, code: int, kind: type[KubeError], watch: bool
) -> None:
    cluster, kube = fake
    fault = cluster.fail(code, "Why", "its own words", watch=watch, times=1000)
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: fault.times < 985, "some attempts")
        assert [type(error) for error in w.errors] == [kind]
        assert str(w.errors[0]) == "its own words"
        times = [call.at for call in cluster.calls if call.watch == watch]
        apart = 2 if code == 401 else 1  # a token that is refused is read again at once
        waits = [b - a for a, b in zip(times, times[apart:], strict=False)]
        assert min(waits[-3:]) >= 0.05  # they have grown to `denied_s`, or half of it at random
        fault.times = 0
        await until(lambda: w.errors[1:], "its end")
        assert w.errors[1:] == [None]


async def test_failures_wait_longer_and_longer(fake: Fake) -> None:
    cluster, kube = fake
    cluster.fail(500, "InternalError", "no leader", times=8)
    async with watching(kube, SECRETS, "default") as w:
        await until(lambda: len(w.errors) == 2, "an error and its end")
        times = [call.at for call in cluster.calls][:9]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        for number, gap in enumerate(gaps):
            assert gap >= min(0.2, 0.02 * 2**number) / 2
        assert len(w.errors) == 2


async def test_watches_that_end_at_once_are_no_hot_loop(fake: Fake) -> None:
    cluster, kube = fake
    kube.times = ClientTimes(first_wait_s=0.05, longest_wait_s=0.4, steady_s=1000)
    async with watching(kube, SECRETS, "default") as w:
        for number in range(2, 6):
            await until(lambda: cluster.watches, "a watch")
            cluster.cut()

            def next_watch(watches: int = number) -> bool:
                return asked(cluster, watch=True) == watches

            await until(next_watch, "the next watch")
        times = [call.at for call in cluster.calls if call.watch]
        assert times[4] - times[3] >= 0.2
        assert w.lists == 1
        assert w.errors == []


async def test_a_log_shows_its_end(fake: Fake) -> None:
    cluster, kube = fake
    cluster.put(PODS, pod("a", "default"))
    cluster.logs["default", "a"] = "one\ntwo\nthree é\n"
    assert await kube.log("a", "default", tail=2) == "two\nthree é\n"


async def test_what_goes_while_it_is_looked_at_is_made_again(fake: Fake) -> None:
    cluster, kube = fake
    cluster.fail(409, "AlreadyExists", method="POST")
    made = await kube.create_or_own(SECRETS, secret_, "owner-1")
    assert name_of(made) == "s"
    assert [call.method for call in cluster.calls] == ["POST", "GET", "POST"]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_either_event_loop_will_do(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def use() -> None:
        async with fake_cluster(tmp_path) as (cluster, kube):
            async with watching(kube, SECRETS) as w:
                await until(lambda: cluster.watches, "a watch")
                await asyncio.gather(
                    *(kube.create(SECRETS, secret(f"s{n}", "default")) for n in range(100))
                )
                await until(lambda: len(w.there) == 100, "all of them")
            await until(lambda: not cluster.watches, "the end of the watch")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(use())


async def test_fifty_calls_at_once_beside_watches(fake: Fake) -> None:
    cluster, kube = fake
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(80):  # more than there are turns for calls
            await stack.enter_async_context(watching(kube, SECRETS, "default"))
        await until(lambda: cluster.watches == 80, "all watches")
        await asyncio.gather(*(kube.create(PODS, pod(f"p{n}", "default")) for n in range(200)))
    assert len(cluster.all(PODS)) == 200


async def test_a_call_has_a_deadline(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = "http://{}:{}".format(*server.sockets[0].getsockname())
    async with server:
        config = write_kubeconfig(tmp_path / "kubeconfig", {"server": address}, {"token": "t"})
        async with await KubeClient.connect(kubeconfig=config) as kube:
            kube.times = ClientTimes(call_s=0.2)
            with pytest.raises(ServerDownError, match=f"{address}: no answer within 0.2 s"):
                await kube.get(PODS, "a", "default")
        await asyncio.wait_for(left.wait(), SOON)  # its connection is broken off


@pytest.mark.parametrize("code", [200, 403])
@pytest.mark.parametrize("watch", [False, True])
async def test_an_answer_without_end_is_given_up(tmp_path: Path, code: int, watch: bool) -> None:
    """By a proxy, say. Without a line's end it is no event of a watch either."""

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            asked = await reader.readuntil(b"\r\n\r\n")
            if watch and b"watch=1" not in asked:
                text = b'{"metadata": {"resourceVersion": "1"}, "items": []}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
                writer.write(text)
                await writer.drain()
                asked = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 %d Said\r\nConnection: close\r\n\r\n" % code)
            while True:
                writer.write(b"x" * (1 << 16))
                await writer.drain()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    address = "http://{}:{}".format(*server.sockets[0].getsockname())
    errors: list[KubeError | None] = []
    async with server:
        config = write_kubeconfig(tmp_path / "kubeconfig", {"server": address}, {"token": "t"})
        async with await KubeClient.connect(kubeconfig=config) as kube:
            kube.times = ClientTimes(call_s=60)
            kube.limits = AnswerLimits(answer_bytes=1 << 20, event_bytes=1 << 20)
            if watch:
                async with watching(kube, PODS, on_error=errors.append):
                    await until(lambda: errors, "an error")
                error: KubeError | None = errors[0]
            else:
                with pytest.raises(KubeError) as told:
                    await kube.get(PODS, "a", "default")
                error = told.value
    if code == 200:
        assert isinstance(error, ServerDownError)
        assert "the answer does not end: at most 1 MiB were expected" in str(error)
    else:
        assert isinstance(error, ForbiddenError)
        assert str(error) == "x" * 200


async def test_what_a_real_server_refuses_is_told_by_its_words(
    real_server: Path, tmp_path: Path
) -> None:
    """A ValidatingAdmissionPolicy's refusal has the status code of an object that is not valid."""
    group, version = "admissionregistration.k8s.io", "v1"
    policies, bindings = (
        Kind(group, version, kind.lower().removesuffix("y") + ending, kind, namespaced=False)
        for kind, ending in (
            ("ValidatingAdmissionPolicy", "ies"),
            ("ValidatingAdmissionPolicyBinding", "s"),
        )
    )
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["*"]}]
    named = {"kubernetes.io/metadata.name": "refusing"}
    policy = {
        "metadata": {"name": "refusing"},
        "spec": {
            "matchConstraints": {
                "resourceRules": rules,
                "namespaceSelector": {"matchLabels": named},
            },
            "validations": [{"expression": "false", "message": "nobody cannot create resource"}],
        },
    }
    binding = {
        "metadata": {"name": "refusing"},
        "spec": {"policyName": "refusing", "validationActions": ["Deny"]},
    }
    async with await KubeClient.connect(kubeconfig=real_server) as kube:
        for name in ("refusing", "full"):
            await kube.create(NAMESPACES, {"metadata": {"name": name}})
        await kube.create(policies, policy)
        await kube.create(bindings, binding)
        quotas, hard = Kind("", "v1", "resourcequotas", "ResourceQuota"), {"hard": {"pods": "0"}}
        meta = {"name": "q", "namespace": "full"}
        await kube.create(quotas, {"metadata": meta, "spec": hard})
        counted = {"metadata": meta, "status": hard | {"used": {"pods": "0"}}}  # by a controller
        await kube.apply(quotas, counted, manager="test", subresource="status")

        async def refused(namespace: str) -> KubeError:
            """By plug-ins that hear of what was made a moment later."""
            async with asyncio.timeout(SOON):
                while True:
                    try:
                        await kube.create(PODS, pod("a", namespace), dry_run=True)
                    except KubeError as error:
                        return error
                    await asyncio.sleep(0.05)

        by_policy = await refused("refusing")
        assert by_policy.status == 422
        assert refusal_in(str(by_policy)) is Refusal.POLICY, str(by_policy)
        by_quota = await refused("full")
        assert refusal_in(str(by_quota)) is Refusal.QUOTA, str(by_quota)

        await kube.create(SERVICE_ACCOUNTS, {"metadata": {"name": "robot", "namespace": "full"}})
        asked = Kind("", "v1", "serviceaccounts/robot/token", "TokenRequest")
        wish = {"apiVersion": "authentication.k8s.io/v1", "metadata": {"namespace": "full"}}
        token = await kube.create(asked, wish | {"spec": {}})
        its = yaml.safe_load(real_server.read_text())["clusters"][0]["cluster"]
        config = write_kubeconfig(tmp_path / "k", its, {"token": token["status"]["token"]})
        async with await KubeClient.connect(kubeconfig=config) as robot:
            with pytest.raises(ForbiddenError) as by_rights:
                await robot.create(PODS, pod("a", "full"))
            assert refusal_in(str(by_rights.value)) is Refusal.RIGHTS
            with pytest.raises(ForbiddenError) as by_rights:
                await robot.delete(PODS, "a", "full")
            assert refusal_in(str(by_rights.value)) is Refusal.RIGHTS
