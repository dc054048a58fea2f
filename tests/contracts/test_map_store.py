"""What a ``MapStore`` promises, for the file and for the Secret alike."""

import asyncio
import base64
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import ServerDownError
from dlrover_py.kubernetes.kinds import SECRETS, Obj
from dlrover_py.master.map_secret import MAP_KEY, MAX_PACKED_BYTES, SecretMapStore
from dlrover_py.protocol.errors import ConfigError, SupersededError, TransientError
from dlrover_py.protocol.names import owner
from dlrover_py.ps.map_store import MapFile, MapStore
from tests.fakes_kube import FakeCluster, fake_cluster

NAME, JOB = "elasticjob-x-servers", "uid-of-x"


def secret(uid: str = JOB) -> Obj:
    return {"metadata": {"name": NAME, "ownerReferences": [owner("x", uid)]}}


@dataclass
class Place:
    """A Secret in a cluster, and stores of it."""

    cluster: FakeCluster
    open: Callable[[], SecretMapStore]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        cluster.put(SECRETS, secret())
        yield Place(cluster, lambda: SecretMapStore(kube, "default", NAME, job_uid=JOB))


@pytest.mark.parametrize("kind", ["file", "secret"])
async def test_the_next_store_reads_what_was_written_last(
    place: Place, tmp_path: Path, kind: str
) -> None:
    def store() -> MapStore:
        return MapFile(tmp_path / "map.json") if kind == "file" else place.open()

    one = store()
    assert await asyncio.to_thread(one.read) is None
    for document in (b"first", b"second"):
        await asyncio.to_thread(one.write, document)
    assert await asyncio.to_thread(store().read) == b"second"


async def test_an_earlier_master_cannot_write_once_the_next_one_has_read(place: Place) -> None:
    old, new = place.open(), place.open()
    await asyncio.to_thread(old.read)
    await asyncio.to_thread(old.write, b"old")
    assert await asyncio.to_thread(new.read) == b"old"
    with pytest.raises(SupersededError, match="written by another master"):
        await asyncio.to_thread(old.write, b"late")
    await asyncio.to_thread(new.write, b"new")
    assert await asyncio.to_thread(place.open().read) == b"new"


class LostAnswers(KubeClient):
    """A client that gets no answer to its next writes, although they have been done."""

    lost = 0

    async def replace(self, *given: Any, **more: Any) -> Obj:
        found = await super().replace(*given, **more)
        if self.lost:
            self.lost -= 1
            raise ServerDownError("the connection was closed")
        return found


async def test_a_write_whose_answer_was_lost_does_not_stop_the_next(
    place: Place, tmp_path: Path
) -> None:
    kubeconfig = place.cluster.kubeconfig(tmp_path / "another-kubeconfig")
    async with await LostAnswers.connect(kubeconfig=kubeconfig) as kube:
        assert isinstance(kube, LostAnswers)
        store = SecretMapStore(kube, "default", NAME, job_uid=JOB)
        await asyncio.to_thread(store.read)
        kube.lost = 1
        with pytest.raises(TransientError, match="the connection was closed"):
            await asyncio.to_thread(store.write, b"one")
        await asyncio.to_thread(store.write, b"two")  # the Secret has another version now
    assert await asyncio.to_thread(place.open().read) == b"two"


async def test_a_label_does_not_stop_the_next_write(place: Place) -> None:
    store = place.open()
    await asyncio.to_thread(store.read)
    await asyncio.to_thread(store.write, b"one")
    found = place.cluster.one(SECRETS, NAME)
    assert found is not None
    found["metadata"]["labels"] = {"team": "a"}
    place.cluster.put(SECRETS, found)  # it has another version now
    await asyncio.to_thread(store.write, b"two")
    found = place.cluster.one(SECRETS, NAME)
    assert found is not None
    assert found["metadata"]["labels"] == {"team": "a"}
    assert await asyncio.to_thread(place.open().read) == b"two"


async def test_a_secret_that_was_deleted_gets_the_map_when_it_is_there_again(place: Place) -> None:
    store = place.open()
    await asyncio.to_thread(store.read)
    await asyncio.to_thread(store.write, b"one")
    place.cluster.remove(SECRETS, NAME)
    with pytest.raises(TransientError, match=NAME):
        await asyncio.to_thread(store.write, b"two")
    place.cluster.put(SECRETS, secret())
    await asyncio.to_thread(store.write, b"three")
    assert await asyncio.to_thread(place.open().read) == b"three"


async def test_a_secret_that_another_master_made_its_own_meanwhile_is_not_written(
    place: Place,
) -> None:
    store = place.open()
    await asyncio.to_thread(store.read)
    place.cluster.remove(SECRETS, NAME)
    place.cluster.put(SECRETS, secret())
    await asyncio.to_thread(place.open().read)
    with pytest.raises(SupersededError, match="written by another master"):
        await asyncio.to_thread(store.write, b"late")
    place.cluster.remove(SECRETS, NAME)
    place.cluster.put(SECRETS, secret("another"))
    with pytest.raises(SupersededError, match="belongs to another job"):
        await asyncio.to_thread(store.write, b"late")


async def test_what_may_pass_is_told_from_what_does_not(place: Place) -> None:
    store = place.open()
    place.cluster.fail(500, times=1, method="GET", path="/secrets/")
    with pytest.raises(TransientError, match="Secret elasticjob-x-servers"):
        await asyncio.to_thread(store.read)
    assert await asyncio.to_thread(store.read) is None
    place.cluster.fail(500, times=1, method="PUT", path="/secrets/")
    with pytest.raises(TransientError, match="Secret elasticjob-x-servers"):
        await asyncio.to_thread(store.write, b"one")
    await asyncio.to_thread(store.write, b"one")
    for damaged in (b"no gzip", b""):
        found = place.cluster.one(SECRETS, NAME)
        assert found is not None
        found["data"] = {MAP_KEY: base64.b64encode(damaged).decode() or "QQ=="}
        place.cluster.put(SECRETS, found)
        with pytest.raises(ConfigError, match="expected the map of servers"):
            await asyncio.to_thread(place.open().read)


async def test_a_map_that_does_not_fit_is_refused_before_it_is_sent(place: Place) -> None:
    store = place.open()
    await asyncio.to_thread(store.read)
    large = random.Random(1).randbytes(MAX_PACKED_BYTES + 1)
    with pytest.raises(TransientError, match="use fewer buckets"):
        await asyncio.to_thread(store.write, large)


async def test_the_secret_of_another_job_is_not_touched(place: Place) -> None:
    place.cluster.put(SECRETS, secret("another"))
    with pytest.raises(TransientError, match="belongs to another job"):
        await asyncio.to_thread(place.open().read)
    place.cluster.remove(SECRETS, NAME)
    with pytest.raises(TransientError, match=NAME):
        await asyncio.to_thread(place.open().read)


async def test_a_server_that_is_too_busy_says_for_how_long_it_is_left_alone(place: Place) -> None:
    store = place.open()
    await asyncio.to_thread(store.read)
    place.cluster.fail(429, times=1, method="PUT", path="/secrets/", retry_after=7)
    with pytest.raises(TransientError) as refused:
        await asyncio.to_thread(store.write, b"one")
    assert refused.value.retry_after >= 7


async def test_a_store_says_whether_it_is_still_its_own(place: Place, tmp_path: Path) -> None:
    file, store = MapFile(tmp_path / "map.json"), place.open()
    for one in (file, store):
        await asyncio.to_thread(one.read)
        assert not await asyncio.to_thread(one.check)
        await asyncio.to_thread(one.write, b"one")
        assert await asyncio.to_thread(one.check)
    place.cluster.remove(SECRETS, NAME)
    with pytest.raises(TransientError, match=NAME):
        await asyncio.to_thread(store.check)
    place.cluster.put(SECRETS, secret())
    assert not await asyncio.to_thread(store.check)
    await asyncio.to_thread(place.open().read)
    with pytest.raises(SupersededError, match="written by another master"):
        await asyncio.to_thread(store.check)
