"""What an agent says of its memory, and how it gets on with its persister."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dlrover_agent.checkpoint.replication import BURST_S
from dlrover_agent.checkpoint.saver import NodeContext, PersisterClient, Saver, memory_checkpoints
from dlrover_agent.child_processes import ChildRegistry
from dlrover_py.checkpoint.shm import OWNER_FILE, POOL_PREFIX, ShmSlot
from dlrover_py.protocol.agents import (
    Assignment,
    Directive,
    PersistPhase,
    PersistRequest,
    ReplicationPeer,
    StoredCheckpoint,
)
from dlrover_py.protocol.persister import (
    CancelWrite,
    KeepRules,
    WatchLease,
    WriteReply,
)
from dlrover_py.protocol.workers import CheckpointTarget
from tests.slots import JOB, full, no_more_files, stage

FACTS = {"term": 1, "version": 1, "incarnation": 1, "directive": Directive.RUN, "reason": ""}


def slot(folder: Path, name: str, rank: int, step: int, **facts: Any) -> None:
    stage(folder / name, [(full("w", (2,)), bytes(8))], rank=rank, world=4, step=step, **facts)


# --- what is held ---


def test_slots_are_told_by_checkpoint_the_newest_first(tmp_path: Path) -> None:
    slot(tmp_path, "0.0", 2, 5, part="a")
    slot(tmp_path, "1.0", 3, 5, part="b", certified=True)
    slot(tmp_path, "0.1", 2, 6, part="a", persist=True, certified=True)
    slot(tmp_path, "peer-0.0", 0, 6, part="a", private_only=True, persist=True)
    slot(tmp_path, "0.2", 2, 9, job="another")
    newest, oldest = [h for h in memory_checkpoints(tmp_path, JOB) if not h.replica]
    assert (newest.step, newest.ranks, newest.persist) == (6, {2: "a"}, True)
    assert (oldest.step, oldest.ranks, oldest.persist) == (5, {2: "a", 3: "b"}, False)
    assert (newest.certified, oldest.certified) == (True, False), "all ranks here have to be"
    assert oldest.nbytes == 2 * newest.nbytes > 0
    (copy,) = [h for h in memory_checkpoints(tmp_path, JOB) if h.replica]
    assert (copy.step, copy.ranks, copy.private_only, copy.persist) == (6, {0: "a"}, [0], False)


def test_what_was_staged_last_comes_first_though_its_step_is_smaller(tmp_path: Path) -> None:
    """A report has room for the newest only."""
    slot(tmp_path, "0.0", 0, 9, round=1)
    slot(tmp_path, "0.1", 0, 3, round=2)
    assert [one.step for one in memory_checkpoints(tmp_path, JOB)] == [3, 9]


def test_a_slot_that_is_being_filled_is_not_there(tmp_path: Path) -> None:
    slot(tmp_path, "0.0", 0, 5)
    with ShmSlot(tmp_path / "0.0", write=True) as one:
        one.begin()
    (tmp_path / "0.1").write_bytes(b"\0" * 10_000)
    assert memory_checkpoints(tmp_path, JOB) == []


# --- the agent's side ---


class OpenSaver(Saver):
    """A saver that shows the tests what it has, and that can be killed."""

    @property
    def limit(self) -> object:
        """What limits the bandwidth of its copies."""
        assert self._replicas is not None
        return self._replicas._bucket

    @property
    def persister(self) -> PersisterClient:
        return self._persister

    def answered(self, answer: WriteReply) -> None:
        self._on_reply(answer)

    def lose_pool(self) -> None:
        """Lose its memory as the kernel has a killed process lose it."""
        assert self._pool is not None
        self._pool.close()
        self._pool = None


class Desk:
    """A saver with a folder, and what it has told."""

    def __init__(self, tmp_path: Path, **site: Any) -> None:
        self.news = 0
        self.root = tmp_path / "shm"
        self.root.mkdir(parents=True, exist_ok=True)
        node = {"root": self.root, "job": JOB, "name": "j", "node": "n0", "token": "t", "nproc": 2}
        context = NodeContext(**{**node, "socket": tmp_path / "d.sock", **site})
        self.saver = OpenSaver(context, {}, master=self, children=ChildRegistry())

    async def ask(self, path: str) -> bytes:
        return b'{"candidates": []}'

    def urge(self) -> None:
        self.news += 1


async def test_a_flagged_set_is_told_at_once_when_all_workers_have_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    path = desk.saver.path
    assert path is not None
    desk.saver.staged(0, 5)
    assert desk.news == 1, "the first of all: peers may come for it"
    slot(path, "0.0", 0, 6, persist=True)
    desk.saver.staged(0, 6)
    assert desk.news == 1
    slot(path, "1.0", 1, 6, persist=True)
    desk.saver.staged(1, 6)
    assert desk.news == 2
    desk.saver.staged(1, 6)
    assert desk.news == 2, "it is no news any more"
    assert desk.saver.facts()["memory"][0].persist
    assert desk.saver.facts()["transfer_port"] > 0
    await desk.saver.close()
    assert list(desk.root.iterdir()) == []


async def test_each_report_says_that_the_memory_has_an_owner(tmp_path: Path) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    assert desk.saver.path is not None
    owner = desk.saver.path / OWNER_FILE
    os.utime(owner, (1.0, 1.0))
    desk.saver.facts()
    assert owner.stat().st_mtime > 1.0
    await desk.saver.close()
    desk.saver.facts()


async def test_what_a_worker_cannot_save_is_told_until_it_can(tmp_path: Path) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    desk.saver.unsaved(1, "")
    assert (desk.news, desk.saver.facts()["transfer_port"]) == (0, 0), "nobody saves anything"
    desk.saver.unsaved(1, "no memory: 3 MB more")
    desk.saver.unsaved(0, "no memory: 2 MB more")
    assert desk.news == 2
    desk.saver.unsaved(1, "no memory: 4 MB more")
    assert desk.news == 2, "other figures are for the next report"
    assert desk.saver.facts()["checkpoint_error"] == "no memory: 2 MB more"
    assert desk.saver.facts()["transfer_port"] > 0, "by which the master knows that it matters"
    desk.saver.unsaved(0, "")
    assert desk.saver.facts()["checkpoint_error"] == "no memory: 4 MB more"
    desk.saver.unsaved(1, "")
    assert desk.saver.facts()["checkpoint_error"] == ""
    assert desk.news == 4
    await desk.saver.close()


async def test_memory_that_another_user_may_have_prepared_is_not_used(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk.saver.close()
    (tmp_path / "elsewhere").mkdir()
    Path(desk.root, f"{POOL_PREFIX}{JOB}-n0").symlink_to(tmp_path / "elsewhere")
    desk = Desk(tmp_path)
    assert "it is a link; expected a folder that belongs to you" in desk.saver.last_error
    assert "DLROVER_SHM_POOL" not in desk.saver.environment()
    await desk.saver.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_without_memory_training_goes_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path, root=tmp_path / "not-there")
    assert "no memory for checkpoints" in desk.saver.facts()["checkpoint_error"]
    assert "DLROVER_SHM_POOL" not in desk.saver.environment()
    assert desk.saver.memory() == []
    desk.saver.staged(0, 5)
    order = PersistRequest(attempt="a1", step=5, round=1, world=2, ranks=[0])
    desk.saver.assigned(Assignment(**FACTS, persist=order))
    told = desk.saver.facts()["persisting"]
    assert (told.phase, told.attempt) == (PersistPhase.FAILED, "a1")
    await desk.saver.close()


async def test_memory_that_cannot_be_looked_at_is_told_as_it_was(tmp_path: Path) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    assert desk.saver.path is not None
    slot(desk.saver.path, "0.0", 0, 6, persist=True)
    before = desk.saver.facts()
    with no_more_files():
        desk.saver.staged(0, 6)
        facts = desk.saver.facts()
    assert [held.step for held in facts["memory"]] == [6]
    assert "Too many open files" in facts["checkpoint_error"]
    assert desk.saver.facts() == before, "it is over"
    await desk.saver.close()


async def test_an_order_without_a_place_to_go_has_failed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    order = PersistRequest(attempt="a1", step=5, round=1, world=2, ranks=[0])
    desk.saver.assigned(Assignment(**FACTS, persist=order))
    assert "no directory for checkpoints is known" in desk.saver.facts()["persisting"].why
    assert not desk.saver.facts()["stores"]
    desk.saver.stores(CheckpointTarget(dir="/x"))
    assert desk.saver.facts()["stores"]
    await desk.saver.close()


async def test_what_a_killed_agent_held_is_found_by_the_next(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    assert first.saver.path is not None
    slot(first.saver.path, "0.0", 0, 5)
    second = Desk(tmp_path)
    assert "held by a running process" in second.saver.last_error
    await second.saver.close()
    first.saver.lose_pool()
    await first.saver.close()
    third = Desk(tmp_path)
    assert third.saver.in_use
    assert [h.step for h in third.saver.memory()] == [5]
    await third.saver.close()


async def test_a_peers_memory_is_copied_no_faster_than_the_job_allows(tmp_path: Path) -> None:
    source, keeper = (
        Desk(tmp_path / node, addr="127.0.0.1", node=node, name=node) for node in ("n0", "n1")
    )
    assert source.saver.path is not None
    assert source.saver.server is not None
    assert keeper.saver.path is not None
    size = 8 << 20
    stage(source.saver.path / "0.0", [(full("w", (size,), "uint8"), bytes(size))])
    peer = ReplicationPeer(node="n0", addr="127.0.0.1", port=source.saver.server.port)
    began = time.monotonic()
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 8000000}', peer=peer))
    async with asyncio.timeout(120):
        while not any(one.replica for one in memory_checkpoints(keeper.saver.path, JOB)):
            await asyncio.sleep(0.02)
    assert time.monotonic() - began > size / 8e6 - BURST_S
    for desk in (source, keeper):
        await desk.saver.close()


async def test_a_bandwidth_that_is_changed_holds_for_copies_that_are_kept_already(
    tmp_path: Path,
) -> None:
    source, keeper = (
        Desk(tmp_path / node, addr="127.0.0.1", node=node, name=node) for node in ("n0", "n1")
    )
    assert source.saver.path is not None
    assert source.saver.server is not None
    assert keeper.saver.path is not None
    stage(source.saver.path / "0.0", [(full("w", (4000,), "uint8"), bytes(4000))])
    absent = ReplicationPeer(node="n0", addr="127.0.0.1", port=0)
    there = ReplicationPeer(node="n0", addr="127.0.0.1", port=source.saver.server.port)
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 1}', peer=absent))
    slow = keeper.saver.limit
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 1}', peer=absent))
    assert keeper.saver.limit is slow, "the same one gives no new burst"
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 500000000}', peer=there))
    async with asyncio.timeout(120):  # an hour at the old one
        while not any(one.replica for one in memory_checkpoints(keeper.saver.path, JOB)):
            await asyncio.sleep(0.02)
    for desk in (source, keeper):
        await desk.saver.close()


@pytest.mark.parametrize("attempt", ["a1", "a2"])
async def test_the_grant_goes_to_the_order_it_is_for(tmp_path: Path, attempt: str) -> None:
    desk = Desk(tmp_path)
    sent: list[Any] = []
    desk.saver.persister.say = lambda document, *, start=True: sent.append(document)  # type: ignore[method-assign]
    keep = KeepRules(newest=2, every=5, best=1, highest=True)
    desk.saver.stores(CheckpointTarget(dir="/x", keep=keep.rules))
    first = PersistRequest(attempt="a1", step=5, round=1, world=2, ranks=[0], writers=["n0"])
    desk.saver.assigned(Assignment(**FACTS, persist=first))
    granted = first.model_copy(update={"attempt": attempt, "grant": 7})
    desk.saver.assigned(Assignment(**FACTS, persist=granted))
    desk.saver.assigned(Assignment(**FACTS, persist=granted))
    kinds = [type(document).__name__ for document in sent]
    if attempt == "a1":
        assert kinds == ["WriteRequest", "CommitGrant"], "once"
    else:
        assert kinds == ["WriteRequest", "CancelWrite", "WriteRequest", "CommitGrant"]
    assert (sent[0].dir, sent[0].keep, sent[-1].term) == ("/x", keep, 7)
    desk.saver.assigned(Assignment(**FACTS))
    assert isinstance(sent[-1], CancelWrite)
    await desk.saver.close()


async def test_the_lease_is_watched_from_the_first_checkpoint_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    sent: list[Any] = []
    starts = iter([True, False, False, True])
    desk.saver.persister.start = lambda: next(starts)  # type: ignore[method-assign]
    desk.saver.persister.say = lambda document, *, start=True: sent.append(document)  # type: ignore[method-assign]
    desk.saver.staged(0, 1)
    assert not sent, "no directory is known"
    desk.saver.stores(CheckpointTarget(dir="/x", keep={}))
    for step in (2, 3):
        desk.saver.staged(0, step)
    assert sent == [WatchLease(dir="/x", job=JOB)], "once"
    desk.saver.stores(CheckpointTarget(dir="/y", keep={}))
    desk.saver.staged(0, 4)
    assert sent[1:] == [WatchLease(dir="/y", job=JOB)], "of the directory that counts"
    desk.saver.staged(0, 5)
    assert sent[2:] == [WatchLease(dir="/y", job=JOB)], "another process has seen nothing yet"
    await desk.saver.close()


# --- the master is lost ---


async def lost(desk: Desk, round_number: int, common: str = "a") -> list[Any]:
    """What a persister is asked for by a node that has lost its master; it stores all."""
    sent: list[Any] = []

    def say(document: Any, *, start: bool = True) -> None:
        sent.append(document)
        step, round = document.step, document.round
        stored = StoredCheckpoint(step=step, round=round, where="/x/it", at=1.0, number=1)
        done = WriteReply(attempt=document.attempt, phase=PersistPhase.DONE, stored=stored)
        desk.saver.answered(done)

    desk.saver.persister.say = say  # type: ignore[method-assign]
    desk.saver.stores(CheckpointTarget(dir="/x"))
    desk.saver.assigned(Assignment(**FACTS, common_shard_group=common))
    await desk.saver.store_without_master(round_number, 7)
    return sent


async def test_a_late_answer_of_the_master_ends_no_lone_write(tmp_path: Path) -> None:
    """The write was canceled, its end was not heard, and the agent waited for ever."""
    desk = Desk(tmp_path)
    path = desk.saver.path
    assert path is not None
    slot(path, "0.1", 2, 6, part="a", round=2)
    sent: list[Any] = []
    desk.saver.persister.say = lambda document, **_: sent.append(document)  # type: ignore[method-assign]
    desk.saver.stores(CheckpointTarget(dir="/x"))
    desk.saver.assigned(Assignment(**FACTS, common_shard_group="a"))
    lone = asyncio.create_task(desk.saver.store_without_master(2, 7))
    while not sent:
        await asyncio.sleep(0)
    desk.saver.assigned(Assignment(**FACTS))
    assert [type(one).__name__ for one in sent] == ["WriteRequest"]
    desk.saver.answered(WriteReply(attempt=sent[0].attempt, phase=PersistPhase.FAILED, why="x"))
    await asyncio.wait_for(lone, 30)
    await desk.saver.close()


async def test_a_node_that_has_the_whole_state_stores_it_without_a_master(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    path = desk.saver.path
    assert path is not None
    for rank in (2, 3):
        slot(path, f"{rank - 2}.0", rank, 5, part="a", round=2)
    slot(path, "0.1", 2, 6, part="a", round=2)
    slot(path, "peer-0.0", 0, 6, part="a", round=2, private_only=True)
    with caplog.at_level("WARNING"):
        (request,) = await lost(desk, 2)
        desk.saver.warn_of_unwritten()
    assert request.without_master
    assert (request.step, request.ranks, request.writers) == (6, [0, 2], ["n0"])
    assert (request.grant, request.world) == (7, 4)
    assert [r.message for r in caplog.records] == ["checkpoint_stored_without_master"]
    await desk.saver.close()


async def test_what_a_write_waited_for_is_why_it_was_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    path = desk.saver.path
    assert path is not None
    slot(path, "0.1", 0, 6)
    desk.saver.persister.say = lambda document, **_: None  # type: ignore[method-assign]
    desk.saver.stores(CheckpointTarget(dir="/x"))
    order = PersistRequest(attempt="a1", step=6, round=1, world=2, ranks=[0])
    desk.saver.assigned(Assignment(**FACTS, persist=order))
    desk.saver.answered(WriteReply(attempt="a1", why="waits for the end of its lease: /x is gpt's"))
    with caplog.at_level("WARNING"):
        desk.saver.warn_of_unwritten()
    (said,) = caplog.records
    assert said.__dict__["why"] == "waits for the end of its lease: /x is gpt's"
    await desk.saver.close()


@pytest.mark.parametrize(
    ("common", "round_number", "why"),
    [("", 2, "only a part"), ("a", 3, "of an earlier round"), ("b", 2, "of an earlier round")],
    ids=["sharded", "skipped", "changed"],
)
async def test_what_may_be_incomplete_or_wrong_is_not_stored_without_a_master(
    tmp_path: Path, common: str, round_number: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    assert desk.saver.path is not None
    slot(desk.saver.path, "0.0", 2, 6, part="a", round=2)
    with caplog.at_level("WARNING"):
        assert await lost(desk, round_number, common) == []
    assert why in vars(caplog.records[-1])["why"]
    await desk.saver.close()


# --- words that nobody of ours says ---


@pytest.mark.parametrize(
    "facts", [{"world": 0}, {"rank": 2}, {"step": 1 << 60}, {"part": "x" * 40}], ids=str
)
def test_a_slot_that_no_worker_writes_is_not_there(tmp_path: Path, facts: dict[str, Any]) -> None:
    stage(tmp_path / "0.0", [(full("w", (2,)), bytes(8))], **{"world": 2, "step": 5, **facts})
    assert memory_checkpoints(tmp_path, JOB) == []


@pytest.mark.parametrize(
    "policy", ["{", "[]", '{"bandwidth": "x"}', '{"keep": 7}', '{"dir": ["a"]}']
)
async def test_a_policy_that_is_not_understood_changes_nothing(tmp_path: Path, policy: str) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    peer = ReplicationPeer(node="n1", addr="127.0.0.1", port=1)
    order = PersistRequest(attempt="a", step=1, round=1, world=1, ranks=[0])
    told = Assignment(**FACTS, checkpoint=policy, peer=peer, persist=order)
    desk.saver.assigned(told)
    persisting = desk.saver.facts()["persisting"]
    assert persisting.phase is PersistPhase.FAILED
    assert "set `dir`" in persisting.why
    await desk.saver.close()
