"""What an agent says of its memory, and how it gets on with its persister."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover_agent import saver
from dlrover_agent.replicas import BURST_S
from dlrover_agent.saver import Persister, Saver, Site, held
from dlrover_py.arena import OWNER, PREFIX, Slot
from dlrover_py.protocol.agents import Assignment, Directive, Peer, PersistOrder, PersistPhase
from dlrover_py.protocol.checkpoint import Answer, Cancel, Keep, Order, Phase
from dlrover_py.protocol.workers import Store
from tests.slots import JOB, full, no_more_files, stage

FACTS = {"term": 1, "version": 1, "incarnation": 1, "directive": Directive.RUN, "reason": ""}

ECHO = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    if said["kind"] == "order" and said["dir"] == "die":
        sys.exit(3)
    print("not JSON", flush=True)
    why = f"{said['kind']} {said.get('dir', '')} {said.get('term', '')}".strip()
    print(json.dumps({"kind": "answer", "attempt": said["attempt"], "phase": "writing",
                      "why": why}), flush=True)
"""


def slot(folder: Path, name: str, rank: int, step: int, **facts: Any) -> None:
    stage(folder / name, [(full("w", (2,)), bytes(8))], rank=rank, world=4, step=step, **facts)


# --- what is held ---


def test_slots_are_told_by_checkpoint_the_newest_first(tmp_path: Path) -> None:
    slot(tmp_path, "0.0", 2, 5, part="a")
    slot(tmp_path, "1.0", 3, 5, part="b")
    slot(tmp_path, "0.1", 2, 6, part="a", persist=True)
    slot(tmp_path, "peer-0.0", 0, 6, part="a", hollow=True, persist=True)
    slot(tmp_path, "0.2", 2, 9, job="another")
    newest, oldest = [h for h in held(tmp_path, JOB) if not h.replica]
    assert (newest.step, newest.ranks, newest.persist) == (6, {2: "a"}, True)
    assert (oldest.step, oldest.ranks, oldest.persist) == (5, {2: "a", 3: "b"}, False)
    (copy,) = [h for h in held(tmp_path, JOB) if h.replica]
    assert (copy.step, copy.ranks, copy.hollow, copy.persist) == (6, {0: "a"}, [0], False)


def test_a_slot_that_is_being_filled_is_not_there(tmp_path: Path) -> None:
    slot(tmp_path, "0.0", 0, 5)
    with Slot(tmp_path / "0.0", write=True) as one:
        one.begin()
    (tmp_path / "0.1").write_bytes(b"\0" * 10_000)
    assert held(tmp_path, JOB) == []


# --- the agent's side ---


class Desk:
    """A saver with a folder, and what it has told."""

    def __init__(self, tmp_path: Path, **site: Any) -> None:
        self.news = 0
        self.root = tmp_path / "shm"
        self.root.mkdir(parents=True, exist_ok=True)
        self.kin: set[int] = set()
        self.guarded: list[str] = []
        self.saver = Saver(
            Site(**{"root": self.root, "job": JOB, "name": "j", "node": "n0", **site}),
            token="t",
            socket=tmp_path / "d.sock",
            nproc=2,
            environ={},
            ask=self._ask,
            changed=self._changed,
            guard=self.guarded.append,
            kin=self.kin,
        )

    async def _ask(self, path: str) -> bytes:
        return b'{"candidates": []}'

    def _changed(self) -> None:
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
    assert desk.saver.facts()["depot"] > 0
    await desk.saver.close()
    assert list(desk.root.iterdir()) == []


async def test_each_report_says_that_the_memory_has_an_owner(tmp_path: Path) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    assert desk.saver.path is not None
    owner = desk.saver.path / OWNER
    os.utime(owner, (1.0, 1.0))
    desk.saver.facts()
    assert owner.stat().st_mtime > 1.0
    await desk.saver.close()
    desk.saver.facts()


async def test_what_a_worker_cannot_save_is_told_until_it_can(tmp_path: Path) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    desk.saver.unsaved(1, "")
    assert (desk.news, desk.saver.facts()["depot"]) == (0, 0), "nobody saves anything"
    desk.saver.unsaved(1, "no memory: 3 MB more")
    desk.saver.unsaved(0, "no memory: 2 MB more")
    assert desk.news == 2
    desk.saver.unsaved(1, "no memory: 4 MB more")
    assert desk.news == 2, "other figures are for the next report"
    assert desk.saver.facts()["checkpoint_trouble"] == "no memory: 2 MB more"
    assert desk.saver.facts()["depot"] > 0, "by which the master knows that it matters"
    desk.saver.unsaved(0, "")
    assert desk.saver.facts()["checkpoint_trouble"] == "no memory: 4 MB more"
    desk.saver.unsaved(1, "")
    assert desk.saver.facts()["checkpoint_trouble"] == ""
    assert desk.news == 4
    await desk.saver.close()


async def test_memory_that_another_user_may_have_prepared_is_not_used(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    await desk.saver.close()
    (tmp_path / "elsewhere").mkdir()
    Path(desk.root, f"{PREFIX}{JOB}-n0").symlink_to(tmp_path / "elsewhere")
    desk = Desk(tmp_path)
    assert "it is a link; expected a folder of your own" in desk.saver.trouble
    assert "DLROVER_ARENA" not in desk.saver.environment()
    await desk.saver.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_without_memory_training_goes_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path, root=tmp_path / "not-there")
    assert "no memory for checkpoints" in desk.saver.facts()["checkpoint_trouble"]
    assert "DLROVER_ARENA" not in desk.saver.environment()
    assert desk.saver.memory() == []
    desk.saver.staged(0, 5)
    order = PersistOrder(attempt="a1", step=5, round=1, world=2, ranks=[0])
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
    assert "Too many open files" in facts["checkpoint_trouble"]
    assert desk.saver.facts() == before, "it is over"
    await desk.saver.close()


async def test_an_order_without_a_place_to_go_has_failed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    order = PersistOrder(attempt="a1", step=5, round=1, world=2, ranks=[0])
    desk.saver.assigned(Assignment(**FACTS, persist=order))
    assert "it is not known where" in desk.saver.facts()["persisting"].why
    assert not desk.saver.facts()["stores"]
    desk.saver.stores(Store(dir="/x"))
    assert desk.saver.facts()["stores"]
    await desk.saver.close()


async def test_what_a_killed_agent_held_is_found_by_the_next(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    assert first.saver.path is not None
    slot(first.saver.path, "0.0", 0, 5)
    second = Desk(tmp_path)
    assert "held by a living process" in second.saver.trouble
    await second.saver.close()
    assert first.saver._arena is not None
    first.saver._arena.close()  # as the kernel does
    first.saver._arena = None
    await first.saver.close()
    third = Desk(tmp_path)
    assert third.saver.in_use
    assert [h.step for h in third.saver.memory()] == [5]
    await third.saver.close()


# --- the persister ---


class Heard:
    """A persister that is a few lines of Python, and what it says."""

    def __init__(self, program: str = ECHO) -> None:
        self.kin: set[int] = set()
        self.answers: list[Answer] = []
        self._news = asyncio.Event()
        self.persister = Persister(
            {},
            self._told,
            guard=lambda line: None,
            kin=self.kin,
            argv=(sys.executable, "-c", program),
        )

    def _told(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._news.set()

    async def until(self, good: Callable[[Answer], bool]) -> Answer:
        async with asyncio.timeout(120):
            while True:
                for answer in self.answers:
                    if good(answer):
                        return answer
                self._news.clear()
                await self._news.wait()


def order(attempt: str, dir: str = "/d") -> Order:
    return Order(
        attempt, 5, 1, 0, 2, (0,), arena="/a", dir=dir, job=JOB, node="n0", writers=("n0",)
    )


async def test_orders_go_out_and_answers_come_back() -> None:
    heard = Heard()
    heard.persister.say(order("a1"))
    heard.persister.say(Cancel("a1"), start=False)
    assert (await heard.until(lambda a: a.why.startswith("order"))).phase is Phase.WRITING
    await heard.until(lambda a: a.why == "cancel")
    assert heard.persister.sessions
    assert {session.pid for session in heard.persister.sessions} == heard.kin
    await heard.persister.close()
    assert not heard.kin


async def test_an_order_fails_with_its_persister_and_the_next_starts_another() -> None:
    heard = Heard()
    heard.persister.say(order("a1", "die"))
    failed = await heard.until(lambda a: a.phase is Phase.FAILED)
    assert failed.attempt == "a1"
    assert "code 3" in failed.why
    assert "code 3" in heard.persister.trouble
    heard.persister.say(order("a2"))
    await heard.until(lambda a: a.attempt == "a2" and a.phase is Phase.WRITING)
    assert heard.persister.trouble == ""
    await heard.persister.close()


async def test_a_persister_that_is_stopped_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "WAKE_S", 0.1)
    heard = Heard()
    heard.persister.say(order("a1"))
    await heard.until(lambda a: a.attempt == "a1")
    (session,) = heard.persister.sessions
    session.signal(signal.SIGSTOP)
    heard.persister.say(order("a2"))
    await heard.until(lambda a: a.attempt == "a2")
    await heard.persister.close()


async def test_a_program_that_cannot_be_started_is_told() -> None:
    heard = Heard()
    heard.persister._argv = ("/not/there",)
    heard.persister.say(order("a1"))
    failed = await heard.until(lambda a: a.phase is Phase.FAILED)
    assert "could not be started" in failed.why
    await heard.persister.close()


async def test_a_peers_memory_is_copied_no_faster_than_the_job_allows(tmp_path: Path) -> None:
    source, keeper = (
        Desk(tmp_path / node, addr="127.0.0.1", node=node, name=node) for node in ("n0", "n1")
    )
    assert source.saver.path is not None
    assert source.saver._depot is not None
    assert keeper.saver.path is not None
    size = 8 << 20
    stage(source.saver.path / "0.0", [(full("w", (size,), "uint8"), bytes(size))])
    peer = Peer(node="n0", addr="127.0.0.1", port=source.saver._depot.port)
    began = time.monotonic()
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 8000000}', peer=peer))
    async with asyncio.timeout(120):
        while not any(one.replica for one in held(keeper.saver.path, JOB)):
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
    assert source.saver._depot is not None
    assert keeper.saver.path is not None
    stage(source.saver.path / "0.0", [(full("w", (4000,), "uint8"), bytes(4000))])
    absent = Peer(node="n0", addr="127.0.0.1", port=0)
    there = Peer(node="n0", addr="127.0.0.1", port=source.saver._depot.port)
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 1}', peer=absent))
    assert keeper.saver._replicas is not None
    slow = keeper.saver._replicas._bucket
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 1}', peer=absent))
    assert keeper.saver._replicas._bucket is slow, "the same one gives no new burst"
    keeper.saver.assigned(Assignment(**FACTS, checkpoint='{"bandwidth": 500000000}', peer=there))
    async with asyncio.timeout(120):  # an hour at the old one
        while not any(one.replica for one in held(keeper.saver.path, JOB)):
            await asyncio.sleep(0.02)
    for desk in (source, keeper):
        await desk.saver.close()


async def test_nothing_is_called_off_where_nothing_runs() -> None:
    heard = Heard()
    heard.persister.say(Cancel("a1"), start=False)
    assert not heard.persister.sessions
    await heard.persister.close()


@pytest.mark.parametrize("attempt", ["a1", "a2"])
async def test_the_grant_goes_to_the_order_it_is_for(tmp_path: Path, attempt: str) -> None:
    desk = Desk(tmp_path)
    sent: list[Any] = []
    desk.saver._persister.say = lambda document, *, start=True: sent.append(document)  # type: ignore[method-assign]
    keep = Keep(newest=2, every=5, best=1, highest=True)
    desk.saver.stores(Store(dir="/x", keep=keep.rules))
    first = PersistOrder(attempt="a1", step=5, round=1, world=2, ranks=[0], writers=["n0"])
    desk.saver.assigned(Assignment(**FACTS, persist=first))
    granted = first.model_copy(update={"attempt": attempt, "grant": 7})
    desk.saver.assigned(Assignment(**FACTS, persist=granted))
    desk.saver.assigned(Assignment(**FACTS, persist=granted))
    kinds = [type(document).__name__ for document in sent]
    if attempt == "a1":
        assert kinds == ["Order", "Grant"], "once"
    else:
        assert kinds == ["Order", "Cancel", "Order", "Grant"]
    assert (sent[0].dir, sent[0].keep, sent[-1].term) == ("/x", keep, 7)
    desk.saver.assigned(Assignment(**FACTS))
    assert isinstance(sent[-1], Cancel)
    await desk.saver.close()


# --- words that nobody of ours says ---


@pytest.mark.parametrize(
    "facts", [{"world": 0}, {"rank": 2}, {"step": 1 << 60}, {"part": "x" * 40}], ids=str
)
def test_a_slot_that_no_worker_writes_is_not_there(tmp_path: Path, facts: dict[str, Any]) -> None:
    stage(tmp_path / "0.0", [(full("w", (2,)), bytes(8))], **{"world": 2, "step": 5, **facts})
    assert held(tmp_path, JOB) == []


@pytest.mark.parametrize(
    "policy", ["{", "[]", '{"bandwidth": "x"}', '{"keep": 7}', '{"dir": ["a"]}']
)
async def test_a_policy_that_is_not_understood_changes_nothing(tmp_path: Path, policy: str) -> None:
    desk = Desk(tmp_path, addr="127.0.0.1")
    peer = Peer(node="n1", addr="127.0.0.1", port=1)
    order = PersistOrder(attempt="a", step=1, round=1, world=1, ranks=[0])
    told = Assignment(**FACTS, checkpoint=policy, peer=peer, persist=order)
    desk.saver.assigned(told)
    persisting = desk.saver.facts()["persisting"]
    assert persisting.phase is PersistPhase.FAILED
    assert "set `dir`" in persisting.why
    await desk.saver.close()


ODD_ANSWERS = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    answer = {"kind": "answer", "attempt": said["attempt"], "phase": "done"}
    for stored in ([], [1], [1, 1, 0, 7, 1.5, 1], [1, 1, 0, "/c", "x", 1], [-1, 1, 0, "/c", 1.5, 1],
                   [1 << 60, 1, 0, "/c", 1.5, 1], [1, 1, 0, "/c", 1e999, 1], "abcdef"):
        print(json.dumps(answer | {"stored": stored}), flush=True)
    print("x" * (3 << 20), flush=True)
    print(json.dumps(answer | {"stored": [1, 1, 0, "/c", 1.5, 1]}), flush=True)
"""


async def test_of_a_persisters_words_those_that_make_sense_are_taken(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    persister = Persister(
        {}, desk.saver._answered, guard=desk.guarded.append, kin=desk.kin,
        argv=(sys.executable, "-c", ODD_ANSWERS),
    )  # fmt: skip
    persister.say(order("a"))
    async with asyncio.timeout(60):
        while desk.saver.facts()["stored"] is None:
            await asyncio.sleep(0.01)
    assert desk.saver.facts()["stored"].where == "/c"
    assert not persister.trouble
    await persister.close()
    await desk.saver.close()
