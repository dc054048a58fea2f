"""What a ``JournalStore`` promises, for the file and for the fake alike."""

import asyncio
import base64
import contextlib
import gzip
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path

import pytest

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import PODS, SECRETS, Obj
from dlrover_py.master.core.nodes import NodeRecord
from dlrover_py.master.core.rendezvous import Member, RoundMembers
from dlrover_py.master.core.state import DurableState, PendingRound, ReplacementSlot
from dlrover_py.master.journal_store import (
    HOLDER,
    JOURNAL_KEY,
    MAX_BYTES,
    FileJournalStore,
    JournalLockedError,
    JournalStore,
    JournalUnwritableError,
    SecretJournalStore,
)
from dlrover_py.protocol.agents import FailureKind, WorkerFailure
from dlrover_py.protocol.errors import ConfigError, SupersededError, TransientError
from dlrover_py.protocol.names import Incarnation, NodeId, Round, Term, owner
from dlrover_py.protocol.status import Failure, JobEvent, JobPhase
from tests.fakes import MemoryStore, Shelf, fill_up, small_disk
from tests.fakes_kube import FakeCluster, Fault, fake_cluster
from tests.programs import PROGRAMS


@dataclass
class Case:
    """One kind of store: stores on the same place, and what can be done to that place."""

    open: Callable[[], JournalStore]
    spoil: Callable[[bytes], None]
    fill: Callable[[bool], None]
    """Whether the place has no room any more."""


def memory() -> Iterator[Case]:
    shelf = Shelf()

    def spoil(data: bytes) -> None:
        shelf.text = data.decode("utf-8", "replace")

    def fill(full: bool) -> None:
        shelf.full = full

    yield Case(lambda: MemoryStore(shelf), spoil, fill)


def file(folder: Path) -> Iterator[Case]:
    path = folder / "state" / "journal.json"
    obstacle = path.with_suffix(".new")

    def spoil(data: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)

    def fill(full: bool) -> None:
        # A folder where the new file is to be: cannot be opened, as on a disk without inodes.
        if full:
            obstacle.mkdir()
        else:
            obstacle.rmdir()

    yield Case(lambda: FileJournalStore(path), spoil, fill)


SECRET, JOB = "elasticjob-x-journal", "uid-of-x"


def master_pod(name: str, phase: str = "Running") -> Obj:
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "status": {"phase": phase}}


def secret_store(kube: KubeClient, pod: str) -> SecretJournalStore:
    return SecretJournalStore(kube, "default", SECRET, job_uid=JOB, pod=pod, pod_uid=f"uid-{pod}")


def secret(cluster: FakeCluster, kube: KubeClient) -> Case:
    cluster.put(SECRETS, {"metadata": {"name": SECRET}})
    pods = (f"m{number}" for number in count())
    faults: list[Fault] = []

    def open_() -> JournalStore:
        name = next(pods)
        cluster.put(PODS, master_pod(name))
        return secret_store(kube, name)

    def spoil(data: bytes) -> None:
        found = cluster.one(SECRETS, SECRET)
        assert found is not None
        found["data"] = {JOURNAL_KEY: base64.b64encode(gzip.compress(data)).decode()}
        cluster.put(SECRETS, found)

    def fill(full: bool) -> None:
        if full:
            faults.append(cluster.fail(500, times=1000, method="PUT", path="/secrets/"))
        else:
            faults.pop().times = 0

    return Case(open_, spoil, fill)


@pytest.fixture(params=["memory", "file", "secret"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    if request.param == "secret":
        async with fake_cluster(tmp_path) as (cluster, kube):
            yield secret(cluster, kube)
    else:
        yield next(memory() if request.param == "memory" else file(tmp_path))


@pytest.fixture
async def store(case: Case) -> AsyncIterator[JournalStore]:
    store = case.open()
    yield store
    await store.release()


def journal(term: int = 1) -> DurableState:
    failure = WorkerFailure(
        kind=FailureKind.EXCEPTION,
        local_rank=0,
        rank=2,
        pid=7,
        exit_code=1,
        message="raised ValueError: ∑ is nän",
        traceback="Traceback …\n  File",
        fingerprint="ValueError|x",
        step=4,
        ran_s=1.25,
    )
    node = NodeId("n0")
    return DurableState(
        job="x",
        term=Term(term),
        next_node=3,
        next_event=9,
        phase=JobPhase.FORMING,
        reason="waiting — for n2",
        world=RoundMembers(
            round=Round(4),
            members=(Member(node=node, incarnation=2, nproc=2, rank_offset=0),),
            master_addr="10.0.0.1",
            master_port=4000,
        ),
        round=Round(4),
        pending_round=PendingRound(kind="loss", reason="node n1 was lost", cause=8, since=12.5),
        succeeded={node},
        nodes={
            node: NodeRecord(incarnation=Incarnation(2), boot_id="b" * 16, restarts=1, relaunches=2)
        },
        replacement_slots=[ReplacementSlot(relaunches=1), ReplacementSlot(relaunches=0)],
        abandoned_slots=1,
        restarts={"failure": 1, "loss": 1},
        last_exception=failure,
        last_failure=Failure(at=1e9, node="n0", round=4, worker=failure),
        max_step=41,
        started_at=1e9,
        events=[JobEvent(id=8, at=1e9, reason="NodeLost", message="node n1 was lost", cause=None)],
    )


async def test_an_empty_store_holds_nothing(store: JournalStore) -> None:
    assert await store.acquire() is None


async def test_what_was_saved_is_there_for_the_next_master(case: Case, store: JournalStore) -> None:
    await store.acquire()
    await store.save(journal())
    await store.release()
    later = case.open()
    assert await later.acquire() == journal()
    await later.release()


async def test_the_last_write_counts(store: JournalStore) -> None:
    await store.acquire()
    for term in (1, 2, 3):
        await store.save(journal(term))
    assert await store.acquire() == journal(3), "its holder may ask again"


async def test_only_one_master_holds_it_at_a_time(case: Case, store: JournalStore) -> None:
    await store.acquire()
    await store.save(journal(1))
    second = case.open()
    with pytest.raises(JournalLockedError, match="another master holds"):
        await second.acquire()
    with pytest.raises(JournalLockedError):
        await second.acquire()
    await store.save(journal(2))
    await store.release()
    assert await second.acquire() == journal(2)
    with pytest.raises(JournalLockedError):
        await store.acquire()
    await second.release()


async def test_one_that_never_held_it_takes_nothing_away_by_releasing(
    case: Case, store: JournalStore
) -> None:
    await store.acquire()
    other = case.open()
    with pytest.raises(JournalLockedError):
        await other.acquire()
    await other.release()
    with pytest.raises(JournalLockedError):
        await case.open().acquire()


async def test_releasing_twice_or_without_holding_does_no_harm(
    case: Case, store: JournalStore
) -> None:
    await store.release()
    await store.acquire()
    await store.release()
    await store.release()
    other = case.open()
    assert await other.acquire() is None
    await store.release()
    with pytest.raises(JournalLockedError):
        await store.acquire()
    await other.release()


async def test_a_failed_write_changes_nothing_and_the_next_may_work(
    case: Case, store: JournalStore
) -> None:
    await store.acquire()
    await store.save(journal(1))
    case.fill(True)
    for _ in range(2):
        with pytest.raises(JournalUnwritableError):
            await store.save(journal(2))
    assert await store.acquire() == journal(1)
    case.fill(False)
    await store.save(journal(3))
    assert await store.acquire() == journal(3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version": 1}',
        b'{"version": 2, "job": "x", "term": 1}',
        b'{"version": 1, "job": "x", "term": "many"}',
        b"\xff\xfe\x00",
        b"\0" * 4096,
    ],
)
async def test_what_cannot_be_read_is_said(case: Case, store: JournalStore, data: bytes) -> None:
    case.spoil(data)
    with pytest.raises(ConfigError, match="not a journal of this version"):
        await store.acquire()


async def test_a_journal_of_a_newer_release_with_more_fields_is_read(
    case: Case, store: JournalStore
) -> None:
    text = journal().to_json()
    case.spoil(text.replace("{", '{"invented_later": [1], ', 1).encode())
    assert await store.acquire() == journal()


# --- the file alone ---


async def test_the_file_and_its_folder_are_private_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "job" / "journal.json"
    store = FileJournalStore(path)
    await store.acquire()
    await store.save(journal())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await store.release()
    assert {p.name for p in path.parent.iterdir()} == {"journal.json", "journal.lock"}


async def test_half_a_write_is_never_seen(tmp_path: Path) -> None:
    """A master that was killed in the middle of a write has left its new file behind."""
    path = tmp_path / "journal.json"
    first = FileJournalStore(path)
    await first.acquire()
    await first.save(journal(1))
    await first.release()
    path.with_suffix(".new").write_text('{"version": 1, "jo' + "x" * 100_000)
    second = FileJournalStore(path)
    assert await second.acquire() == journal(1)
    await second.save(journal(2))
    assert await second.acquire() == journal(2)
    await second.release()


async def test_a_journal_whose_folder_was_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "temporary" / "state" / "journal.json"
    store = FileJournalStore(path)
    await store.acquire()
    await store.save(journal(1))
    shutil.rmtree(tmp_path / "temporary")
    await store.save(journal(2))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(JournalLockedError):
        await FileJournalStore(path).acquire()
    await store.release()
    assert await FileJournalStore(path).acquire() == journal(2)


async def test_a_master_whose_lock_file_was_removed_gives_way_to_the_one_that_took_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.json"
    first, second = FileJournalStore(path), FileJournalStore(path)
    await first.acquire()
    await first.save(journal(1))
    path.with_suffix(".lock").unlink()
    assert await second.acquire() == journal(1)
    with pytest.raises(SupersededError):
        await first.save(journal(2))
    await second.save(journal(3))
    await second.release()
    await first.release()


async def test_a_killed_master_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    argv = [sys.executable, str(PROGRAMS / "hold_journal.py"), str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            store = FileJournalStore(path)
            with pytest.raises(JournalLockedError):
                await store.acquire()
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert await store.acquire() is None
    await store.release()


async def test_a_full_disk_is_called_so_and_leaves_no_torn_file(tmp_path: Path) -> None:
    # no assert: on_a_full_disk() looks at the file
    with small_disk(tmp_path / "disk", "64k") as disk:
        store = FileJournalStore(disk / "journal.json")
        await on_a_full_disk(store, disk)
        await store.release()


async def on_a_full_disk(store: FileJournalStore, disk: Path) -> None:
    await store.acquire()
    await store.save(journal(1))
    event = JobEvent(id=1, at=1e9, reason="Large", message="x" * 6000)
    large = replace(journal(2), events=[event])
    filler = disk / "filler"
    fill_up(filler)
    with pytest.raises(JournalUnwritableError, match=r"journal\.json: the disk is full"):
        await store.save(journal(2))
    assert await store.acquire() == journal(1)
    assert not (disk / "journal.new").exists()
    os.truncate(filler, filler.stat().st_size - 4096)
    with pytest.raises(JournalUnwritableError):
        await store.save(large)  # its first half fits
    assert await store.acquire() == journal(1)
    filler.unlink()
    await store.save(journal(3))
    assert await store.acquire() == journal(3)


class Hanging(DurableState):
    """A journal whose write hangs, until the disk answers."""

    def to_json(self) -> str:
        HANGS.set()
        assert ANSWERS.wait(60)
        return super().to_json()


def hanging(whole: DurableState) -> Hanging:
    """The same journal, whose write hangs."""
    return Hanging(**{f.name: getattr(whole, f.name) for f in fields(DurableState) if f.init})


HANGS, ANSWERS = threading.Event(), threading.Event()


@pytest.fixture
def disk_hangs() -> Iterator[None]:
    HANGS.clear()
    ANSWERS.clear()
    yield
    ANSWERS.set()


async def held_later(store: JournalStore) -> DurableState | None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(JournalLockedError):
                return await store.acquire()
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("disk_hangs")
async def test_a_write_that_comes_late_does_not_replace_what_the_next_master_has_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A master is told to end while its write hangs, and another one takes its place."""
    path = tmp_path / "journal.json"
    first, second = FileJournalStore(path, release_timeout_s=0.05), FileJournalStore(path)
    await first.acquire()
    saving = asyncio.create_task(first.save(hanging(journal(1))))
    await asyncio.to_thread(HANGS.wait, 60)
    saving.cancel()
    await first.release()
    assert "journal_lock_kept" in caplog.text
    with pytest.raises(JournalLockedError):
        await second.acquire()
    ANSWERS.set()
    assert await held_later(second) == journal(1), "its write has ended before its lock"
    await second.save(journal(2))
    assert await second.acquire() == journal(2)
    await second.release()


@pytest.mark.usefixtures("disk_hangs")
async def test_a_disk_that_hangs_is_said_and_written_to_again_once_it_answers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.json"
    store = FileJournalStore(path, save_s=0.05)
    await store.acquire()
    for late in (hanging(journal(1)), journal(2)):
        with pytest.raises(
            JournalUnwritableError, match=r"json: the disk has not answered within 0\.05 s"
        ):
            await store.save(late)
    with pytest.raises(TransientError, match="cannot be read: the disk has not answered"):
        await store.acquire()
    ANSWERS.set()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(JournalUnwritableError):
                await store.save(journal(3))
                break
    await store.release()
    later = FileJournalStore(path)
    assert await later.acquire() == journal(3)
    await later.release()


@pytest.mark.parametrize("what", ["pipe", "folder", "large"])
async def test_only_a_regular_file_of_a_journals_size_is_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / "journal.json"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
    with pytest.raises(
        ConfigError, match=f"{path}: (it is not a regular|Is a dir|it has more than)"
    ):
        await FileJournalStore(path).acquire()


async def test_a_place_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("no folder")
    with pytest.raises(ConfigError, match=str(obstacle)):
        await FileJournalStore(obstacle / "journal.json").acquire()


# --- the Secret alone ---


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[tuple[FakeCluster, KubeClient]]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        cluster.put(SECRETS, {"metadata": {"name": SECRET}})
        for name in ("m0", "m1"):
            cluster.put(PODS, master_pod(name))
        yield cluster, kube


Site = tuple[FakeCluster, KubeClient]


def terminating(pod: Obj) -> Obj:
    return {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}


async def test_a_later_job_of_the_same_name_gets_nothing_of_an_earlier_ones_journal(
    site: Site,
) -> None:
    """Its master still writes down that the job was deleted, and finds the next one's Secret."""
    cluster, kube = site
    mine = {"metadata": {"name": SECRET, "ownerReferences": [owner("x", JOB)]}}
    next_ones = {"metadata": {"name": SECRET, "ownerReferences": [owner("x", "uid-of-the-next")]}}
    cluster.put(SECRETS, mine)
    store = secret_store(kube, "m0")
    await store.acquire()
    await store.save(journal(1))
    cluster.remove(SECRETS, SECRET)
    cluster.put(SECRETS, next_ones)
    with pytest.raises(SupersededError, match="another job of this name"):
        await store.save(journal(2))
    with pytest.raises(TransientError, match="another job of this name"):
        await secret_store(kube, "m1").acquire()
    kept = cluster.one(SECRETS, SECRET)
    assert kept is not None
    assert "data" not in kept
    assert HOLDER not in kept["metadata"].get("annotations", {})


@pytest.mark.parametrize("fate", ["gone", "another", "going", "failed"])
async def test_a_master_whose_pod_is_no_more_holds_nothing(site: Site, fate: str) -> None:
    cluster, kube = site
    first, second = secret_store(kube, "m0"), secret_store(kube, "m1")
    await first.acquire()
    await first.save(journal(1))
    with pytest.raises(JournalLockedError, match="the one in Pod m0"):
        await second.acquire()
    if fate == "gone":
        cluster.remove(PODS, "m0")
    elif fate == "another":
        cluster.remove(PODS, "m0")
        cluster.put(PODS, {"metadata": {"name": "m0", "uid": "new"}})
    elif fate == "going":
        cluster.put(PODS, terminating(master_pod("m0")))
    else:
        cluster.put(PODS, master_pod("m0", "Failed"))
    assert await second.acquire() == journal(1)
    await second.save(journal(2))
    with pytest.raises(SupersededError, match="held by the master in Pod m1"):
        await first.save(journal(3))
    assert await second.acquire() == journal(2), "an old master never writes again"


async def test_the_next_process_of_the_same_pod_goes_on(site: Site) -> None:
    _, kube = site
    first = secret_store(kube, "m0")
    await first.acquire()
    await first.save(journal(1))
    second = secret_store(kube, "m0")
    assert await second.acquire() == journal(1)
    with pytest.raises(SupersededError):
        await first.save(journal(2))


async def test_a_write_whose_answer_was_lost_is_not_taken_for_another_masters(site: Site) -> None:
    cluster, kube = site
    store = secret_store(kube, "m0")
    await store.acquire()
    written = cluster.one(SECRETS, SECRET)
    assert written is not None
    await store.save(journal(1))
    landed = cluster.one(SECRETS, SECRET)
    assert landed is not None
    store._secret = written  # as if the answer to it had not come
    await store.save(journal(2))
    assert await store.acquire() == journal(2)


async def test_somebody_who_labels_the_secret_does_no_harm(site: Site) -> None:
    cluster, kube = site
    store = secret_store(kube, "m0")
    await store.acquire()
    await store.save(journal(1))
    found = cluster.one(SECRETS, SECRET)
    assert found is not None
    found["metadata"]["labels"] = {"backup": "yes"}
    cluster.put(SECRETS, found)
    await store.save(journal(2))
    kept = cluster.one(SECRETS, SECRET)
    assert kept is not None
    assert kept["metadata"]["labels"] == {"backup": "yes"}
    assert await store.acquire() == journal(2)


async def test_a_secret_that_was_made_anew_gets_what_its_master_knows(site: Site) -> None:
    cluster, kube = site
    store = secret_store(kube, "m0")
    await store.acquire()
    await store.save(journal(1))
    cluster.remove(SECRETS, SECRET)
    with pytest.raises(JournalUnwritableError, match="not found"):
        await store.save(journal(2))
    cluster.put(SECRETS, {"metadata": {"name": SECRET}})
    await store.save(journal(3))
    assert await store.acquire() == journal(3)
    kept = cluster.one(SECRETS, SECRET)
    assert kept is not None
    assert HOLDER in kept["metadata"]["annotations"]


@pytest.mark.parametrize("data", ["", "!!!", "eA==", "H4sIAAAAAAAA"])
async def test_a_secret_that_cannot_be_unpacked_is_said(site: Site, data: str) -> None:
    cluster, kube = site
    cluster.put(SECRETS, {"metadata": {"name": SECRET}, "data": {JOURNAL_KEY: data}})
    if not data:
        assert await secret_store(kube, "m0").acquire() is None
        return
    with pytest.raises(ConfigError, match="not a journal of this version"):
        await secret_store(kube, "m0").acquire()


async def test_a_secret_that_would_unpack_to_more_than_memory_is_refused(site: Site) -> None:
    cluster, kube = site
    bomb = base64.b64encode(gzip.compress(b" " * (MAX_BYTES + 1), compresslevel=1)).decode()
    cluster.put(SECRETS, {"metadata": {"name": SECRET}, "data": {JOURNAL_KEY: bomb}})
    with pytest.raises(ConfigError, match="more than 64 MB"):
        await secret_store(kube, "m0").acquire()


async def test_a_secret_deleted_between_read_and_write_is_waited_for(site: Site) -> None:
    cluster, kube = site
    words = f'secrets "{SECRET}" not found'
    cluster.fail(404, "NotFound", words, method="PUT", path="/secrets/")
    store = secret_store(kube, "m0")
    with pytest.raises(TransientError, match="not found"):
        await store.acquire()
    assert await store.acquire() is None


async def test_a_right_that_was_taken_away_is_waited_for(site: Site) -> None:
    cluster, kube = site
    store = secret_store(kube, "m0")
    await store.acquire()
    cluster.fail(403, "Forbidden", "may not update secrets", method="PUT")
    with pytest.raises(JournalUnwritableError, match="may not update secrets"):
        await store.save(journal(1))
    await store.save(journal(1))
    cluster.fail(403, "Forbidden", "may not get secrets", method="GET")
    with pytest.raises(TransientError, match="may not get"):
        await secret_store(kube, "m1").acquire()
