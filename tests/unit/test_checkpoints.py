"""What is whole in memory, who keeps copies of whom, and what is stored."""

from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_py.checkpoint.directory import CheckpointDirectory, folder_of
from dlrover_py.master.core.checkpoints import (
    CheckpointOutcome,
    CheckpointRecord,
    Checkpoints,
)
from dlrover_py.master.core.memory_index import CANDIDATES
from dlrover_py.master.core.replica_pairs import peers
from dlrover_py.master.core.status import checkpoint_error, held_checkpoints
from dlrover_py.master.core.store_request import TRIES, StoreRequest
from dlrover_py.protocol.agents import (
    AgentReport,
    MemoryCheckpoint,
    Offer,
    PersistPhase,
    PersistProgress,
    PersistRequest,
    StoredCheckpoint,
)
from dlrover_py.protocol.names import NodeId, Term
from dlrover_py.protocol.status import StoreAnswer
from tests.ids import checkpoint_id

PERSIST_S = 100.0
N0, N1, N2, N3 = (NodeId(f"n{i}") for i in range(4))


class Desk:
    """The checkpoints of a job, with agents whose reports are made here."""

    def __init__(self, *nodes: NodeId, round_number: int = 1, replicas: bool = True) -> None:
        self.core = Checkpoints()
        self.now, self.term, self.seq = 0.0, Term(1), 0
        self.leaving: set[NodeId] = set()
        self.said: dict[NodeId, dict[str, Any]] = {}
        self.notes: list[str] = []
        self.reassigned: set[NodeId] = set()
        self.answers: dict[int, list[int]] = {}
        self.request: StoreRequest | None = None
        """What a user asks for, and the answer."""
        self.answer: StoreAnswer | None = None
        for node in nodes:
            self.say(node, transfer_port=7000 + int(node[1:]))
        self.core.new_round(round_number, [(n, (n,)) for n in nodes], replicas=replicas)
        self.look()

    def say(self, node: NodeId, **facts: Any) -> CheckpointOutcome:
        """The node reports; what it has said before holds until it says something else."""
        self.seq += 1
        known = self.said.setdefault(node, {"memory_round": 1, "boot_id": f"boot-{node}-xx"})
        known.update(facts)
        offer = Offer(addr=f"10.0.0.{int(node[1:]) + 1}", port=1024)
        self.core.take(node, AgentReport(seq=self.seq, offer=offer, **known), self.now)
        return self.look()

    def look(self, at: float | None = None) -> CheckpointOutcome:
        self.now = self.now if at is None else at
        if self.request is not None:
            self.answer = self.request.serve(self.core, self.now, self.term)
            self.request = self.request if self.answer is None else None
        out = self.core.look(
            self.now, 1e6 + self.now, term=self.term, persist_s=PERSIST_S, leaving=self.leaving
        )
        self.notes += [note.reason for note in out.notes]
        self.reassigned = set(out.reassign)
        for number, found in out.answers:
            self.answers[number] = [c.step for c in found.candidates]
        return out

    def steps(self) -> list[int]:
        return [c.step for c in self.core.memory.candidates()]

    def orders(self) -> dict[NodeId, PersistRequest]:
        found = {node: self.core.persist_request(node, self.term) for node in self.said}
        return {node: order for node, order in found.items() if order is not None}

    def attempt(self) -> str:
        (attempt,) = {order.attempt for order in self.orders().values()}
        return attempt

    def persisting(
        self, node: NodeId, phase: PersistPhase, why: str = "", **more: Any
    ) -> CheckpointOutcome:
        told = PersistProgress(attempt=self.attempt(), phase=phase, why=why)
        return self.say(node, persisting=told, **more)


def held(
    step: int, *ranks: int, world: int = 2, part: str = "", round_number: int = 1, **more: Any
) -> MemoryCheckpoint:
    """Of ranks with parts of their own (FSDP), or one that is the same for all (DDP)."""
    parts = {rank: part or f"p{rank}" for rank in ranks}
    return MemoryCheckpoint(step=step, round=round_number, world=world, ranks=parts, **more)


def sharded(*steps: int, persist: bool = False) -> Desk:
    """Two nodes, each with a part of its own of these steps."""
    desk = Desk(N0, N1)
    desk.say(N0, memory=[held(s, 0, persist=persist) for s in steps])
    desk.say(N1, memory=[held(s, 1, persist=persist) for s in steps])
    return desk


def test_nodes_learn_once_that_each_alone_has_the_whole_state() -> None:
    """By that they can store it if the master is lost."""
    desk = Desk(N0, N1)
    memory = desk.core.memory
    desk.say(N0, memory=[held(1, 0, part="a")])
    assert memory.common_shard_group == "", "n1 may have another"
    assert not desk.reassigned
    desk.say(N1, memory=[held(1, 1, part="a")])
    assert desk.core.memory.common_shard_group == "a"
    assert {N0, N1} <= desk.reassigned
    for step in (2, 3):
        desk.say(N0, memory=[held(step, 0, part="a")])
        desk.say(N1, memory=[held(step, 1, part="a")])
        assert not desk.reassigned
    desk.say(N1, memory=[held(4, 1, part="b")])
    assert desk.core.memory.common_shard_group == "", "the ranks differ now"
    assert {N0, N1} <= desk.reassigned
    assert not sharded(1).core.memory.common_shard_group


def test_a_node_with_memory_of_an_older_round_changes_nothing_for_all_others() -> None:
    """Each of its reports changed the answer, and each report of another node changed it back."""
    desk = Desk(N0, N1, N2)
    for node, rank in ((N0, 0), (N1, 1)):
        desk.say(node, memory=[held(5, rank, part="new", round_number=2)])
    desk.say(N2, memory=[held(1, 0, 1, part="old")])
    assert desk.core.memory.common_shard_group == "new"
    for step in (2, 3):
        desk.say(N2, memory=[held(step, 0, 1, part="old")])
        assert not desk.reassigned
        desk.say(N0, memory=[held(step + 5, 0, part="new", round_number=2)])
        assert not desk.reassigned


# --- what is whole ---


def test_a_set_is_whole_when_every_part_is_held() -> None:
    desk = Desk(N0, N1)
    desk.say(N0, memory=[held(5, 0), held(6, 0)])
    assert desk.steps() == [], "rank 1 has told nothing: nobody knows what its part is"
    desk.say(N1, memory=[held(5, 1)])
    assert desk.steps() == [5]
    desk.say(N1, memory=[held(5, 1), held(6, 1)])
    assert desk.steps() == [6, 5]


def test_copies_of_the_same_stand_in_for_a_lost_node() -> None:
    desk = Desk(N0, N1)
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(5, rank, part="all")])
    desk.core.drop(N1)
    assert desk.steps() == [5]
    desk.say(N0, memory=[held(5, 0, part="all"), held(6, 0, part="all")])
    assert desk.steps() == [6, 5], "what rank 1 had of an earlier step tells what all must have"


def test_a_lost_part_is_found_in_a_replica() -> None:
    desk = sharded(5)
    desk.core.drop(N1)
    assert desk.steps() == []
    desk.say(N0, memory=[held(5, 0), held(5, 1, replica=True)])
    assert desk.steps() == [5]


def test_a_hollow_replica_is_no_copy_of_what_others_share() -> None:
    desk = sharded(5)
    desk.say(N0, memory=[held(5, 0), held(5, 1, replica=True, private_only=[1])])
    desk.core.drop(N1)
    assert desk.steps() == []


def test_timelines_are_not_mixed() -> None:
    desk = Desk(N0, N1)
    desk.say(N0, memory=[held(5, 0, timeline=1)])
    desk.say(N1, memory=[held(5, 1, timeline=2)])
    assert desk.steps() == []


def test_a_state_of_another_shape_is_learnt_anew() -> None:
    desk = sharded(5)
    desk.say(N0, memory=[held(5, 0), held(6, 0, part="other")])
    assert desk.steps() == [5], "what was whole stays so"
    desk.say(N1, memory=[held(5, 1), held(6, 1)])
    assert desk.steps() == [6, 5]


def test_only_the_newest_are_offered() -> None:
    assert sharded(1, 2, 3, 4, 5).steps() == [5, 4, 3][:CANDIDATES]


def test_the_status_says_on_how_many_nodes_each_checkpoint_is() -> None:
    desk = sharded(5, persist=True)
    copies = [held(5, 1, replica=True), held(6, 0, nbytes=7, certified=True)]
    desk.say(N0, memory=[held(5, 0), *copies])
    newest, oldest = held_checkpoints(desk.core)
    assert (newest.step, newest.nodes, newest.copies, newest.complete) == (6, 1, 0, False)
    assert (newest.nbytes, newest.certified, newest.writing) == (7, True, False)
    assert (oldest.step, oldest.nodes, oldest.copies, oldest.complete) == (5, 2, 1, True)
    assert (oldest.writing, oldest.stored) == (True, False)
    committed(desk)
    assert [one.stored for one in held_checkpoints(desk.core)] == [False, True]
    desk.core.drop(N1)
    assert [one.nodes for one in held_checkpoints(desk.core)] == [1, 1]


# --- questions ---


def test_a_question_is_answered_once_all_have_looked() -> None:
    desk = sharded(5)
    desk.core.new_round(2, [(N0, ()), (N1, ())], replicas=True)
    desk.core.ask(1, 2, until=10.0)
    desk.look()
    desk.say(N0, memory_round=2)
    assert desk.answers == {}
    desk.say(N1, memory=[held(5, 1), held(6, 1)], memory_round=2)
    assert desk.answers == {1: [5]}


@pytest.mark.parametrize("how", ["lost", "late", "overtaken"])
def test_a_question_is_answered_in_any_case(how: str) -> None:
    desk = sharded(5)
    desk.core.new_round(2, [(N0, ()), (N1, ())], replicas=True)
    desk.core.ask(1, 2, until=10.0)
    desk.say(N0, memory_round=2)
    if how == "lost":
        desk.core.drop(N1)
    elif how == "overtaken":
        desk.core.new_round(3, [(N0, ())], replicas=True)
    assert desk.answers == {}
    out = desk.look(10.0 if how == "late" else None)
    assert desk.answers == {1: [] if how == "lost" else [5]}
    assert out.wake_at > desk.now


@pytest.mark.parametrize("how", ["heard", "lost"])
def test_a_new_master_waits_for_who_may_hold_what_no_other_does(how: str) -> None:
    """A node that is leaving, say: it is in no round any more, and has its memory still."""
    desk = Desk(N0)
    desk.core.recall(N0)
    desk.core.recall(N1)
    desk.say(N0, memory=[held(5, 0)])
    desk.core.new_round(2, [(N0, ())], replicas=True)
    desk.core.ask(1, 2, until=10.0)
    desk.say(N0, memory_round=2)
    assert desk.answers == {}
    if how == "heard":
        desk.say(N1, memory=[held(5, 1)])
    else:
        desk.core.drop(N1)
        desk.look()
    assert desk.answers == {1: [5] if how == "heard" else []}


def late() -> Desk:
    """Round 2 was told of step 4; that step 6 of round 1 is whole turns out after that."""
    desk = sharded(4)
    desk.core.drop(N1)
    desk.say(N0, memory=[held(4, 0, part="all"), held(6, 0, persist=True)])
    desk.core.new_round(2, [(N0, ()), (N2, ())], replicas=True)
    desk.say(N2, transfer_port=7002, memory_round=2)
    desk.core.ask(1, 2, until=10.0)
    desk.say(N0, memory_round=2)
    assert desk.answers == {1: []}
    desk.say(N1, memory=[held(6, 1, persist=True)])
    assert desk.steps() == [6]
    return desk


def test_what_a_round_has_passed_by_is_not_stored_under_it() -> None:
    """It goes on from another step, and its next checkpoint would come after a higher one."""
    desk = late()
    assert desk.orders() == {}
    desk.core.request_flush("node n0 is leaving", [N0, N2], 2, now=0.0, until=30.0, stay=True)
    for node in (N0, N2):
        desk.say(node, memory_round=3)
    assert desk.orders() == {}


def test_what_a_round_has_passed_by_is_gone_on_from_if_it_made_nothing() -> None:
    desk = late()
    desk.core.new_round(3, [(N0, ()), (N1, ())], replicas=True)
    desk.core.ask(2, 3, until=10.0)
    for node in (N0, N1):
        desk.say(node, memory_round=3)
    assert desk.answers[2] == [6]
    desk.look()
    assert {order.step for order in desk.orders().values()} == {6}, "it is part of the history now"


def test_an_order_for_what_a_round_has_passed_by_is_called_off() -> None:
    """A node that holds a part of it is lost when its shards are written."""
    desk = sharded(4, persist=True)
    desk.persisting(N1, PersistPhase.DONE)
    desk.core.drop(N1)
    assert {order.step for order in desk.orders().values()} == {4}
    desk.core._round = 2
    desk.core.ask(1, 2, until=0.0)
    desk.look()
    assert desk.answers == {1: []}
    assert desk.notes[-1] == "CheckpointCanceled"


def test_an_answer_waits_for_a_commit_that_is_granted() -> None:
    desk = sharded(5, persist=True)
    for node, phase in ((N1, PersistPhase.DONE), (N0, PersistPhase.READY)):
        desk.persisting(node, phase)
    desk.core.new_round(2, [(N0, ()), (N1, ())], replicas=True)
    desk.core.ask(1, 2, until=10.0)
    for node in (N0, N1):
        desk.say(node, memory_round=2)
    assert desk.answers == {}
    desk.persisting(N0, PersistPhase.DONE)
    assert desk.answers == {1: [5]}


def test_holders_are_those_that_can_be_reached() -> None:
    desk = sharded(5)
    desk.say(N0, memory=[held(5, 0), held(5, 1, replica=True, private_only=[1])])
    first, second = desk.core.memory.locations(checkpoint_id(5)).locations
    assert [(one.rank, one.node) for one in (first, second)] == [(0, "n0"), (1, "n1")]
    assert (second.addr, second.port) == ("10.0.0.2", 7001)
    assert (first.part, second.part) == ("p0", "p1")
    desk.say(N1, transfer_port=0)
    first, second = desk.core.memory.locations(checkpoint_id(5)).locations
    assert (second.node, first.private_only, second.private_only) == ("n0", False, True)
    assert desk.core.memory.locations(checkpoint_id(6)).locations == []


def test_a_checkpoint_of_which_a_part_is_gone_has_no_holders() -> None:
    """It was a candidate a moment ago. Keys of the lost rank would seem never to have been."""
    desk = sharded(5)
    assert len(desk.core.memory.locations(checkpoint_id(5)).locations) == 2
    desk.core.drop(N1)
    assert desk.core.memory.locations(checkpoint_id(5)).locations == []


def test_a_part_that_no_transfer_server_has_is_not_passed_over() -> None:
    desk = sharded(5)
    desk.say(N1, transfer_port=0)
    assert desk.core.memory.locations(checkpoint_id(5)).locations == []


def test_the_newest_in_memory_alone_is_the_one_that_was_saved_last() -> None:
    desk = Desk(N0, N1)
    desk.say(N0, memory=[held(9, 0), held(3, 0, timeline=1)])
    assert desk.core.only_in_memory() == 3


def test_what_was_saved_later_comes_first_though_its_step_is_smaller() -> None:
    """A script that goes back would else load what it has gone back from."""
    desk = Desk(N0, N1)
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(10, rank), held(5, rank, round_number=2)])
    assert [(c.step, c.round) for c in desk.core.memory.candidates()] == [(5, 2), (10, 1)]
    newest = desk.core.newest(0.0)
    assert newest is not None
    assert newest.step == 5


# --- orders ---


def test_a_flagged_set_is_ordered_when_it_is_whole() -> None:
    desk = Desk(N0, N1)
    desk.say(N0, memory=[held(5, 0, persist=True)])
    assert not desk.orders()
    desk.say(N1, memory=[held(5, 1, persist=True)])
    orders = desk.orders()
    assert desk.reassigned == {N0, N1}
    assert {n: o.ranks for n, o in orders.items()} == {N0: [0], N1: [1]}
    assert {n: o.writers for n, o in orders.items()} == {N0: ["n0", "n1"], N1: []}
    assert len({o.attempt for o in orders.values()}) == 1


def test_the_coordinator_gets_the_grant_and_nobody_else() -> None:
    desk = sharded(5, persist=True)
    desk.persisting(N1, PersistPhase.READY)
    assert [o.grant for o in desk.orders().values()] == [None, None]
    desk.persisting(N0, PersistPhase.READY)
    assert [desk.orders()[n].grant for n in (N0, N1)] == [1, None]
    assert desk.reassigned == {N0}
    desk.look(desk.now + 2)
    stored = StoredCheckpoint(step=5, where="/d/step-5", at=1.0)
    out = desk.persisting(N0, PersistPhase.DONE, stored=stored)
    assert out.journal_changed
    assert not desk.orders()
    assert desk.notes == ["CheckpointStored"]
    newest = desk.core.newest(0.0)
    assert newest is not None
    assert (newest.step, newest.where) == (5, "/d/step-5")
    assert (desk.core.commits, desk.core.last_write) == (1, (5, 2))
    desk.look()
    assert not desk.orders(), "it is flagged still, for its nodes have not looked"


@pytest.mark.parametrize("at", [0.0, 4e9])
def test_whose_clock_is_wrong_hides_no_newer_checkpoint(at: float) -> None:
    """A node says what it was the last to commit as long as it lives, and to the next master."""
    desk = sharded(5, persist=True)
    first = StoredCheckpoint(step=5, where="/d/step-5", at=at, number=1)
    desk.persisting(N0, PersistPhase.READY)
    desk.persisting(N0, PersistPhase.DONE, stored=first)
    newer = StoredCheckpoint(step=6, where="/d/step-6", at=1e6, number=2)
    for order in ((N0, N1), (N1, N0)):
        desk.core = Checkpoints(CheckpointRecord(stored=desk.core.stored))
        for node in order:
            desk.say(node, stored={N0: first, N1: newer}[node])
        assert desk.core.stored == newer, order
    desk.say(N0)
    assert desk.core.stored == newer


def test_another_directory_counts_its_commits_anew() -> None:
    desk = sharded(5, persist=True)
    desk.say(N1, stored=StoredCheckpoint(step=4, where="/old/step-4", at=1.0, number=57))
    here = StoredCheckpoint(step=5, where="/new/step-5", at=2.0, number=1)
    desk.persisting(N0, PersistPhase.READY)
    desk.persisting(N0, PersistPhase.DONE, stored=here)
    desk.say(N1)
    assert desk.core.stored == here


def test_done_without_a_grant_is_no_commit() -> None:
    desk = sharded(5, persist=True)
    desk.persisting(N0, PersistPhase.DONE)
    assert desk.core.commits == 0


def test_a_failure_is_told_and_the_next_step_is_tried() -> None:
    desk = sharded(5, persist=True)
    desk.persisting(N1, PersistPhase.FAILED, "the disk is full")
    assert not desk.orders()
    assert (
        checkpoint_error(desk.core)
        == "the checkpoint of step 5 was not stored: n1: the disk is full"
    )
    desk.say(N0, memory=[held(6, 0, persist=True)])
    desk.say(N1, memory=[held(6, 1, persist=True)])
    assert {o.step for o in desk.orders().values()} == {6}
    desk.persisting(N0, PersistPhase.READY)
    desk.persisting(N0, PersistPhase.DONE)
    assert checkpoint_error(desk.core) == ""


def test_trouble_before_anything_was_saved_is_of_a_job_that_saves() -> None:
    core = Checkpoints()
    offer = Offer(addr="10.0.0.1", port=1024)
    report = AgentReport(seq=1, boot_id="boot-n0-xx", offer=offer, checkpoint_error="no memory")
    core.take(N0, report, 0.0)
    assert not core.in_use, "no script there saves anything"
    core.take(N0, report.model_copy(update={"seq": 2, "transfer_port": 7000}), 0.0)
    assert core.in_use
    assert checkpoint_error(core) == "n0: no memory"


def test_an_order_takes_too_long() -> None:
    desk = sharded(5, persist=True)
    assert desk.look().wake_at == PERSIST_S
    desk.look(PERSIST_S)
    assert desk.notes == ["CheckpointFailed"]
    assert not desk.orders()


def test_a_lost_writer_calls_it_off_and_a_replica_takes_its_part() -> None:
    desk = sharded(5, persist=True)
    desk.say(N0, memory=[held(5, 0, persist=True), held(5, 1, replica=True)])
    first = desk.attempt()
    desk.core.drop(N1)
    desk.look()
    assert desk.notes == ["CheckpointCanceled"]
    assert {n: o.ranks for n, o in desk.orders().items()} == {N0: [0, 1]}
    assert desk.attempt() != first


def test_a_writer_that_was_killed_after_its_time_is_not_blamed() -> None:
    desk = sharded(5, persist=True)
    desk.core.drop(N1, PERSIST_S)
    desk.look(PERSIST_S)
    assert desk.notes == ["CheckpointFailed"]
    assert desk.core.failing.endswith("the write took longer than 100 s")


def test_by_its_name_a_sweep_knows_what_an_attempt_has_left(tmp_path: Path) -> None:
    folder = folder_of(5, sharded(5, persist=True).attempt())
    (tmp_path / folder / "parts").mkdir(parents=True)
    assert CheckpointDirectory(tmp_path).sweep(now=0.0) == [folder]


def test_a_writer_that_is_done_may_go() -> None:
    desk = sharded(5, persist=True)
    desk.persisting(N1, PersistPhase.DONE)
    assert not desk.core.holds(N1)
    assert desk.core.holds(N0)
    desk.core.drop(N1)
    desk.look()
    assert desk.orders()


def test_a_new_round_calls_it_off_unless_it_is_granted() -> None:
    for granted in (False, True):
        desk = sharded(5, persist=True)
        if granted:
            desk.persisting(N0, PersistPhase.READY)
        desk.core.new_round(2, [(N0, ()), (N1, ())], replicas=True)
        assert bool(desk.orders()) is granted


def test_one_order_at_a_time_then_the_newest() -> None:
    desk = sharded(5, persist=True)
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(s, rank, persist=True) for s in (5, 6, 7)])
    assert {o.step for o in desk.orders().values()} == {5}
    desk.persisting(N0, PersistPhase.READY)
    desk.persisting(N0, PersistPhase.DONE)
    assert {o.step for o in desk.orders().values()} == {7}


# --- what may be lost ---


def wish(desk: Desk, *nodes: NodeId, until: float = 30.0) -> None:
    desk.core.request_flush("node n1 is leaving", nodes, 1, now=desk.now, until=until, stay=True)
    desk.look()


def test_the_newest_set_is_stored_once_the_workers_have_ended() -> None:
    desk = sharded(5)
    desk.say(N0, stores=True)
    wish(desk, N0, N1)
    assert desk.core.holds(N1)
    assert not desk.orders(), "its workers still run, and may save"
    desk.say(N0, memory=[held(6, 0)], memory_round=2)
    desk.say(N1, memory=[held(5, 1), held(6, 1)], memory_round=2)
    assert {o.step for o in desk.orders().values()} == {6}
    assert desk.notes == ["CheckpointRequested"]
    desk.persisting(N0, PersistPhase.READY)
    desk.persisting(N0, PersistPhase.DONE)
    assert not desk.core.holds(N1)
    assert {N0, N1} <= desk.reassigned


# --- copies from nodes that leave ---


class Change:
    """A planned change of a job without a storage, in which nodes leave after a last step, 6."""

    def __init__(self, leaving: Iterable[NodeId], *staying: NodeId, until: float = 30.0) -> None:
        self.leaving = sorted(leaving)
        nodes = sorted([*self.leaving, *staying])
        self.ranks = {node: rank for rank, node in enumerate(nodes)}
        self.desk = desk = Desk(*nodes)
        for node in nodes:
            self.hold(node, 5)
        self.copy(*staying, step=5)
        desk.leaving = set(self.leaving)
        desk.core.request_flush("", nodes, 1, now=desk.now, until=until, stay=True, copy=True)
        if staying:
            desk.core.new_round(2, [(n, (n,)) for n in staying], replicas=True)
        desk.look()

    def hold(self, node: NodeId, *steps: int, **more: Any) -> None:
        """The node has its own part of these steps, and what it has copied."""
        old = self.desk.said[node].get("memory", [])
        mine = [held(s, self.ranks[node], world=len(self.ranks)) for s in steps]
        self.desk.say(node, memory=[*mine, *(h for h in old if h.replica)], **more)

    def copy(self, *nodes: NodeId, step: int) -> None:
        """Each of these nodes has copied the parts of all nodes that leave."""
        for node in nodes:
            ranks = [self.ranks[n] for n in self.leaving]
            copies = [held(step, r, world=len(self.ranks), replica=True) for r in ranks]
            self.desk.say(node, memory=[*self.desk.said[node]["memory"], *copies])

    def end(self, *nodes: NodeId) -> None:
        """The workers of these nodes have saved step 6 and ended."""
        for node in nodes:
            self.hold(node, 5, 6, memory_round=2)

    def heirs(self) -> dict[NodeId, tuple[NodeId, int]]:
        """From which leaving node each node has to copy which step."""
        core = self.desk.core
        found: dict[NodeId, tuple[NodeId, int]] = {}
        for node in self.ranks:
            wanted, peer = core.copies.checkpoint(node), core.copies.peer(node)
            if wanted is not None and peer is not None:
                found[node] = NodeId(peer.node), wanted.step
        return found

    def stay(self) -> set[NodeId]:
        return {node for node in self.leaving if self.desk.core.holds(node)}


def test_a_node_that_leaves_stays_until_another_has_its_part_of_the_last_step() -> None:
    change = Change([N1], N0)
    assert change.stay() == {N1}, "its workers still run, and may save"
    change.end(N1)
    assert change.stay() == {N1}, "step 6 is not complete before n0 reports its part"
    change.end(N0)
    assert (change.heirs(), change.stay()) == ({N0: (N1, 6)}, {N1})
    assert {N0, N1} <= change.desk.reassigned
    change.copy(N0, step=6)
    assert (change.heirs(), change.stay()) == ({}, set())
    assert N1 in change.desk.reassigned
    change.desk.core.drop(N1)
    assert change.desk.steps()[0] == 6
    assert not change.desk.notes


def test_the_next_round_waits_for_the_part_of_a_node_that_leaves() -> None:
    change = Change([N1], N0)
    change.end(N0)
    change.desk.core.ask(1, 2, until=10.0)
    change.desk.look()
    assert not change.desk.answers, "n1 may still have saved step 6"
    change.end(N1)
    assert not change.desk.answers, "n1 must not go while its memory is read"
    change.copy(N0, step=6)
    assert change.desk.answers[1][0] == 6
    (own, copy) = change.desk.core.memory.locations(checkpoint_id(6)).locations
    assert (own.node, copy.node) == (N0, N0), "n1 may be gone in the next moment"


def test_a_node_that_leaves_stays_while_its_memory_may_be_read() -> None:
    """The copy takes longer than workers wait, so they load from the node that leaves."""
    change = Change([N1], N0)
    change.end(N0, N1)
    change.desk.core.ask(1, 2, until=10.0)
    change.desk.look(10.0)
    assert change.desk.answers[1][0] == 6
    change.copy(N0, step=6)
    assert change.stay() == {N1}
    change.desk.core.ask(2, 2, until=20.0)
    change.desk.look()
    assert change.desk.answers[2][0] == 6, "nothing new is waited for"
    change.desk.say(N0, memory=[held(7, 0, world=1, round_number=2)])
    assert change.stay() == set()


def test_nodes_that_leave_together_are_copied_one_after_the_other() -> None:
    """They have copied each other, which helps nobody."""
    change = Change([N1, N2], N0)
    change.copy(N1, N2, step=5)
    change.end(N0, N1, N2)
    assert (change.heirs(), change.stay()) == ({N0: (N1, 6)}, {N1, N2})
    mine = change.desk.said[N0]["memory"]
    change.desk.say(N0, memory=[*mine, held(6, 1, world=3, replica=True)])
    assert (change.heirs(), change.stay()) == ({N0: (N2, 6)}, {N2})
    change.copy(N0, step=6)
    assert (change.heirs(), change.stay()) == ({}, set())


def test_several_nodes_that_stay_share_the_copies() -> None:
    change = Change([N2, N3], N0, N1)
    change.end(N0, N1, N2, N3)
    assert sorted(change.heirs().values()) == [(N2, 6), (N3, 6)]
    (lost,) = (heir for heir, (source, _) in change.heirs().items() if source == N2)
    change.desk.core.drop(lost)
    change.desk.look()
    assert change.stay() == set(), "with its own part, step 6 is lost"


def test_at_the_end_of_its_grace_a_node_is_let_go_with_a_warning() -> None:
    change = Change([N1], N0, until=30.0)
    change.end(N0, N1)
    change.desk.look(29.0)
    assert change.stay() == {N1}
    change.desk.look(30.0)
    assert (change.stay(), change.desk.notes) == (set(), ["CheckpointNotCopied"])
    assert N1 in change.desk.reassigned


def test_a_node_whose_workers_do_not_end_is_copied_after_half_of_its_grace() -> None:
    change = Change([N1], N0, until=30.0)
    change.hold(N1, 6)
    change.end(N0)
    assert change.heirs() == {}
    change.desk.look(15.0)
    assert change.heirs() == {N0: (N1, 6)}


def test_where_no_node_stays_a_warning_says_what_is_lost() -> None:
    change = Change([N0, N1])
    change.end(N0, N1)
    assert (change.stay(), change.desk.notes) == (set(), ["CheckpointNotCopied"])


def test_what_another_node_has_anyway_is_not_copied() -> None:
    desk = Desk(N0, N1)
    desk.leaving = {N1}
    desk.core.request_flush("", [N0, N1], 1, now=0.0, until=30.0, stay=True, copy=True)
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(6, rank, part="all")], memory_round=2)
    assert not desk.core.holds(N1)
    assert not desk.notes


def test_what_cannot_be_stored_is_copied() -> None:
    change = Change([N1], N0)
    change.desk.say(N0, stores=True)
    change.end(N0, N1)
    assert (change.heirs(), len(change.desk.orders())) == ({}, 2)
    for _ in range(2):
        change.desk.persisting(N0, PersistPhase.FAILED)
    assert (change.heirs(), change.stay()) == ({N0: (N1, 6)}, {N1})


# --- what a user asks for ---


def asked(desk: Desk, text: str = "at 1") -> StoreAnswer | None:
    desk.request, desk.answer = StoreRequest(text, desk.now + 30.0), None
    desk.look()
    return desk.answer


def committed(desk: Desk, where: str = "/store") -> StoreAnswer | None:
    """All parts are written, and the manifest."""
    order = desk.orders()[N0]
    desk.persisting(N0, PersistPhase.READY)
    stored = StoredCheckpoint(step=order.step, round=order.round, where=where, at=1.0, number=1)
    desk.persisting(N0, PersistPhase.DONE, stored=stored)
    return desk.answer


def test_a_user_has_the_newest_set_stored_while_the_workers_go_on() -> None:
    desk = sharded(5)
    desk.say(N0, stores=True)
    assert asked(desk) is None
    assert {o.step for o in desk.orders().values()} == {5}
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(5, rank), held(6, rank)])
    assert {o.step for o in desk.orders().values()} == {5}, "a newer one does not call it off"
    assert desk.notes == ["CheckpointRequested"]
    assert committed(desk) == StoreAnswer(request="at 1", step=5, folder="/store")
    assert not desk.orders(), "once is enough"


def test_what_is_stored_already_is_the_answer_to_the_next_user() -> None:
    desk = sharded(5, persist=True)
    assert asked(desk) is None
    assert committed(desk) == StoreAnswer(request="at 1", step=5, folder="/store")
    assert asked(desk, "at 2") == StoreAnswer(request="at 2", step=5, folder="/store")
    assert not desk.orders()
    assert desk.notes == ["CheckpointStored"], "the attempt that ran anyway was waited for"


def test_a_user_is_told_why_nothing_is_stored() -> None:
    desk = Desk(N0, N1)
    answer = asked(desk)
    assert answer is not None
    assert answer.problem == "no checkpoint is complete in the memory of the nodes"
    desk = sharded(5)
    answer = asked(desk)
    assert answer is not None
    assert "directory" in answer.problem


def test_memory_that_was_filled_again_is_tried_with_a_newer_set() -> None:
    desk = sharded(5)
    desk.say(N0, stores=True)
    assert asked(desk) is None
    for step in range(6, 5 + TRIES):
        for rank, node in enumerate((N0, N1)):
            desk.say(node, memory=[held(step, rank)])
        desk.persisting(N0, PersistPhase.FAILED, "filled again")
        assert desk.answer is None
        assert {o.step for o in desk.orders().values()} == {step}
    desk.persisting(N0, PersistPhase.FAILED, "filled again")
    answer = desk.answer
    assert answer is not None
    assert answer.step is None
    assert "filled again" in answer.problem


def test_a_user_waits_for_nodes_of_the_last_master_but_not_for_ever() -> None:
    desk = sharded(5)
    desk.say(N0, stores=True)
    desk.core.recall(N2)
    assert asked(desk) is None
    assert not desk.orders()
    desk.say(N2, memory=[held(6, 0, 1)])
    assert {o.step for o in desk.orders().values()} == {6}
    desk.look(30.0)
    answer = desk.answer
    assert answer is not None
    assert answer.step is None
    assert not desk.orders()


def test_what_is_to_be_stored_is_not_called_off_for_each_step_of_the_next_round() -> None:
    desk = sharded(5, persist=True)
    wish(desk, N0, N1)
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(5, rank), held(6, rank)], memory_round=2)
    assert {o.step for o in desk.orders().values()} == {6}, "instead of the one before"
    first = desk.attempt()
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(6, rank), held(7, rank, round_number=2)])
    assert desk.attempt() == first
    desk.persisting(N0, PersistPhase.FAILED, "it is not in memory any more")
    assert {o.step for o in desk.orders().values()} == {7}
    desk.persisting(N0, PersistPhase.READY)
    desk.persisting(N0, PersistPhase.DONE)
    assert not desk.core.holds(N1)


def test_a_commit_that_is_granted_comes_before_a_newer_one_that_may_be_lost() -> None:
    """All its bytes are in storage, and the next one may not be there in time."""
    desk = sharded(5, persist=True)
    desk.persisting(N0, PersistPhase.READY)
    wish(desk, N0, N1)
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(5, rank), held(6, rank)], memory_round=2)
    assert {o.step for o in desk.orders().values()} == {5}
    desk.persisting(N0, PersistPhase.DONE)
    assert {o.step for o in desk.orders().values()} == {6}, "the request is not met by step 5"
    assert desk.core.holds(N1)
    desk.persisting(N0, PersistPhase.READY)
    desk.persisting(N0, PersistPhase.DONE)
    assert desk.notes == ["CheckpointStored", "CheckpointRequested", "CheckpointStored"]
    assert not desk.core.holds(N1)


def test_who_never_looks_is_not_waited_for_for_long() -> None:
    desk = sharded(5)
    desk.say(N0, stores=True)
    wish(desk, N0, N1, until=30.0)
    assert desk.look(14.9).wake_at == 15.0
    desk.look(15.0)
    assert {o.step for o in desk.orders().values()} == {5}
    desk.look(30.0)
    assert not desk.orders()
    assert not desk.core.holds(N1)


def test_the_first_checkpoint_of_all_is_stored_though_it_came_after_the_request() -> None:
    desk = Desk(N0, N1)
    wish(desk, N0, N1)
    assert desk.core.holds(N1), "it may be about to make one"
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(1, rank)], stores=True, memory_round=2)
    assert {o.step for o in desk.orders().values()} == {1}
    assert desk.core.holds(N1)


def test_a_node_that_has_made_no_checkpoint_may_go_when_its_workers_have_ended() -> None:
    desk = Desk(N0, N1)
    wish(desk, N0, N1)
    desk.reassigned.clear()
    desk.say(N1, memory_round=2)
    assert not desk.core.holds(N1)
    assert N1 in desk.reassigned
    desk.say(N0, memory_round=2)
    assert not desk.core.holds(N0)


def test_a_node_that_does_not_say_that_its_workers_have_ended_is_told_to_go_all_the_same() -> None:
    desk = Desk(N0, N1)
    wish(desk, N0, N1)
    assert desk.core.holds(N1)
    desk.look(15.0)
    assert not desk.core.holds(N1)
    assert desk.reassigned == {N0, N1}


def test_without_a_storage_nobody_stays() -> None:
    desk = sharded(5)
    wish(desk, N0, N1)
    assert not desk.core.holds(N1)


@pytest.mark.parametrize("step", [5, 6])
def test_what_is_not_newer_than_the_stored_is_not_stored(step: int) -> None:
    """Of step 6 one node is gone; step 5 is whole yet, and would count as newer than it."""
    desk = sharded(5)
    desk.say(N0, stored=StoredCheckpoint(step=step, where="/d", at=1.0, round=1))
    wish(desk, N0, N1)
    for node in (N0, N1):
        desk.say(node, memory_round=2)
    assert not desk.orders()
    assert not desk.core.holds(N1)


def test_a_job_that_has_gone_back_stores_what_it_has_since() -> None:
    desk = Desk(N0, N1)
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(5, rank, round_number=2)])
    desk.say(N0, stored=StoredCheckpoint(step=8, where="/d", at=1.0, round=1))
    wish(desk, N0, N1)
    for node in (N0, N1):
        desk.say(node, memory_round=2)
    assert {o.step for o in desk.orders().values()} == {5}


def test_a_flag_that_is_older_than_the_stored_orders_nothing() -> None:
    desk = sharded(5)
    desk.say(N0, stored=StoredCheckpoint(step=6, where="/d", at=1.0, round=1))
    for rank, node in enumerate((N0, N1)):
        desk.say(node, memory=[held(5, rank, persist=True)])
    assert not desk.orders()


def test_what_was_lost_is_tried_twice() -> None:
    desk = sharded(5)
    desk.say(N0, stores=True)
    wish(desk, N0, N1)
    for node in (N0, N1):
        desk.say(node, memory_round=2)
    for _ in range(2):
        assert desk.orders()
        desk.persisting(N0, PersistPhase.FAILED, "no route")
    assert not desk.orders()
    assert not desk.core.holds(N0)


# --- peers ---

TOPOLOGIES = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("rs"), st.sampled_from("1234")).map(
        lambda place: (place[0], place[0] + place[1], "".join(place))
    )
    | st.just(()),
    min_size=2,
    max_size=12,
)


@given(TOPOLOGIES, TOPOLOGIES)
def test_each_is_kept_once_and_never_by_itself(
    before: list[tuple[str, ...]], after: list[tuple[str, ...]]
) -> None:
    old = peers([(NodeId(f"n{i}"), place) for i, place in enumerate(before)], {})
    members = [(NodeId(f"n{i + len(after) // 3}"), place) for i, place in enumerate(after)]
    found = peers(members, old)
    assert found.keys() == {n for n, _ in members} == set(found.values())
    assert all(keeper != source for keeper, source in found.items())


@given(st.lists(st.sampled_from(["h1", "h2", "h3"]), min_size=2, max_size=12))
def test_another_host_keeps_the_copy_where_that_can_be(hosts: list[str]) -> None:
    members = [(NodeId(f"n{i}"), (host,)) for i, host in enumerate(hosts)]
    place = dict(members)
    most = max(hosts.count(host) for host in hosts)
    together = sum(place[k] == place[s] for k, s in peers(members, {}).items())
    if most <= len(hosts) // 2:
        assert together == 0


PLACED = st.dictionaries(
    st.sampled_from([NodeId(f"n{i}") for i in range(8)]), st.just(None), min_size=2, max_size=5
)
"""Nodes of a round, in the order of their ranks."""


HOSTS = st.sampled_from([("z", "h1"), ("", "h1"), ("z", "h2"), ("", "h2"), ("y", "h3"), ("z", "")])
"""Places; of two nodes on one host, only one may have its label."""


@given(st.lists(HOSTS | st.just(()), min_size=8, max_size=8), PLACED, PLACED)
def test_the_best_that_can_be_is_had_by_changing_as_few_pairs_as_can_be(
    places: list[tuple[str, ...]], before: dict[NodeId, None], after: dict[NodeId, None]
) -> None:
    place = {NodeId(f"n{i}"): where for i, where in enumerate(places)}
    host = {n: where[-1] if where else "" for n, where in place.items()}
    old = peers([(n, place[n]) for n in before], {})
    members = [(n, place[n]) for n in after]

    def worth(pairs: dict[NodeId, NodeId]) -> tuple[int, int]:
        together = sum(host[k] == host[s] != "" for k, s in pairs.items())
        return together, sum(old.get(k) != s for k, s in pairs.items())

    every = (dict(zip(after, sources, strict=True)) for sources in permutations(after))
    best = min(worth(one) for one in every if all(k != s for k, s in one.items()))
    found = peers(members, old)
    assert found.keys() == set(found.values()) == after.keys()
    assert all(keeper != source for keeper, source in found.items())
    assert worth(found) == best
    assert worth(peers(members, {}))[0] == best[0]
    assert peers(members, found) == found, "nothing has changed"


def test_a_second_node_of_a_host_keeps_another_hosts_copies() -> None:
    members = [(NodeId(n), (n[0],)) for n in ("a1", "b1", "c1")]
    old = peers(members, {})
    found = peers([*members, (NodeId("a2"), ("a",))], old)
    assert all(keeper[0] != source[0] for keeper, source in found.items())
    assert sum(found[k] != old[k] for k in old) == 1, "somebody has to make room"


def test_a_new_host_whose_nodes_have_but_each_other_takes_part_in_old_pairs() -> None:
    members = [(NodeId(n), (n[0],)) for n in ("b1", "b2", "c1", "c2")]
    old = peers(members, {})
    found = peers([*members, (NodeId("a1"), ("a",)), (NodeId("a2"), ("a",))], old)
    assert all(keeper[0] != source[0] for keeper, source in found.items())
    assert sum(found[k] == old[k] for k in old) == 2


def test_another_zone_comes_before_another_host() -> None:
    members = [(NodeId(f"n{i}"), ("ab"[i % 2], f"h{i}")) for i in range(6)]
    place = dict(members)
    assert all(place[k][0] != place[s][0] for k, s in peers(members, {}).items())


def test_of_two_nodes_on_one_host_only_one_has_labels() -> None:
    places = [("z", "c", "h"), ("z", "c", "g"), ("", "", "h"), ("", "", "g")]
    members = [(NodeId(f"n{i}"), place) for i, place in enumerate(places)]
    host = {node: place[-1] for node, place in members}
    assert all(host[k] != host[s] for k, s in peers(members, {}).items())


def test_pairs_stay_when_another_node_is_replaced() -> None:
    members = [(NodeId(f"n{i}"), (f"h{i}",)) for i in range(8)]
    old = peers(members, {})
    fresh = [*members[:3], (NodeId("n9"), ("h9",)), *members[4:]]
    found = peers(fresh, old)
    changed = [k for k in found if k in old and found[k] != old[k]]
    assert len(changed) <= 1, "only who kept a copy of the lost one"


def test_one_node_has_no_peer() -> None:
    assert peers([(N0, ())], {}) == {}
    desk = Desk(N0, N1, replicas=False)
    assert desk.core.copies.peer(N0) is None


def test_a_peer_is_told_with_its_port_and_told_again_when_that_changes() -> None:
    desk = Desk(N0, N1)
    peer = desk.core.copies.peer(N0)
    assert peer is not None
    assert (peer.node, peer.port) == ("n1", 7001)
    desk.say(N1, transfer_port=7101)
    assert desk.reassigned == {N0}
    desk.say(N1, transfer_port=0)
    assert desk.core.copies.peer(N0) is None


# --- whatever happens ---

NODES = (N0, N1, N2)
PARTS = {0: "a", 1: "a", 2: "b"}
"""Ranks 0 and 1 hold copies of the same; rank 2 of something else."""


@st.composite
def memories(draw: st.DrawFn, node: NodeId) -> list[MemoryCheckpoint]:
    found = []
    for step in draw(st.lists(st.integers(1, 4), max_size=3, unique=True)):
        timeline = draw(st.integers(0, 1))
        own = int(node[1:])
        flagged = draw(st.booleans())
        ranks = {own: PARTS[own]}
        found.append(
            MemoryCheckpoint(
                step=step, round=1, timeline=timeline, world=3, ranks=ranks, persist=flagged
            )
        )
        if draw(st.booleans()):
            other = draw(st.sampled_from([r for r in PARTS if r != own]))
            private_only = [other] if draw(st.booleans()) else []
            copy = {other: PARTS[other]}
            found.append(
                MemoryCheckpoint(
                    step=step,
                    round=1,
                    timeline=timeline,
                    world=3,
                    ranks=copy,
                    replica=True,
                    private_only=private_only,
                )
            )
    return found


EVENTS = st.one_of(
    st.sampled_from(NODES).flatmap(
        lambda n: st.tuples(st.just("memory"), st.just(n), memories(n), st.integers(1, 3))
    ),
    st.tuples(st.just("drop"), st.sampled_from(NODES)),
    st.tuples(st.just("phase"), st.sampled_from(NODES), st.sampled_from(list(PersistPhase))),
    st.tuples(st.just("old"), st.sampled_from(NODES), st.sampled_from(list(PersistPhase))),
    st.tuples(st.just("round")),
    st.tuples(st.just("wish")),
    st.tuples(st.just("leave"), st.sampled_from(NODES)),
    st.tuples(st.just("asked"), st.integers(1, 2)),
    st.tuples(st.just("stored"), st.integers(1, 5), st.sampled_from([0.0, 1e6, 4e9])),
    st.tuples(st.just("master")),
    st.tuples(st.just("time"), st.sampled_from([1.0, 20.0, 200.0])),
)


def covered(memory: Iterable[list[MemoryCheckpoint]], step: int, timeline: int) -> set[str]:
    """Parts of a set that are there, looked up in the plainest way."""
    return {
        part
        for one in memory
        for h in one
        if (h.step, h.timeline) == (step, timeline)
        for rank, part in h.ranks.items()
        if rank not in h.private_only
    }


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_no_sequence_of_events_breaks_what_is_promised(events: list[tuple[Any, ...]]) -> None:
    desk = Desk(*NODES)
    memory: dict[NodeId, list[MemoryCheckpoint]] = {}
    granted: dict[str, NodeId] = {}
    seen_attempts: list[str] = []
    last_stored: StoredCheckpoint | None = None
    round_number = 1
    for kind, *words in events:
        match kind:
            case "memory":
                node, found, looked = words
                memory[node] = found
                desk.say(node, memory=found, memory_round=looked)
            case "drop":
                memory.pop(words[0], None)
                desk.said.pop(words[0], None)
                desk.core.drop(words[0])
            case "phase" if desk.orders() and words[0] in desk.said:
                desk.persisting(words[0], words[1])
                desk.said[words[0]]["persisting"] = None
            case "old" if seen_attempts and words[0] in desk.said:
                told = PersistProgress(attempt=seen_attempts[0], phase=words[1])
                if seen_attempts[0] != (desk.attempt() if desk.orders() else ""):
                    before = desk.orders()
                    desk.say(words[0], persisting=told)
                    assert desk.orders() == before, "an old attempt says nothing of a new one"
                    desk.said[words[0]]["persisting"] = None
            case "round":
                round_number += 1
                desk.core.new_round(round_number, [(n, (n,)) for n in desk.said], replicas=True)
            case "wish":
                desk.core.request_flush(
                    "",
                    desk.said,
                    round_number,
                    now=desk.now,
                    until=desk.now + 10,
                    stay=True,
                    copy=bool(desk.leaving),
                )
            case "leave":
                desk.leaving ^= {words[0]}
            case "asked":
                desk.request = StoreRequest(str(words[0]), desk.now + 10)
            case "stored" if N0 in desk.said:
                step, at = words
                desk.say(
                    N0, stored=StoredCheckpoint(step=step, where=f"/{step}", at=at, number=step)
                )
            case "master":  # the next one knows what is journaled, and hears all again
                kept = desk.core.stored
                desk.core = Checkpoints(CheckpointRecord(stored=kept))
                desk.term = Term(desk.term + 1)
                for node in list(desk.said):
                    desk.say(node)
                desk.core.new_round(round_number, [(n, (n,)) for n in desk.said], replicas=True)
            case "time":
                desk.look(desk.now + words[0])
        out = desk.look()
        assert out.wake_at > desk.now, "no busy loop"
        again = desk.look()
        if desk.request is None:  # it waits for the end of a write, which a look may bring
            assert not again.reassign, "a look decides all there is to decide"
            assert not again.notes
        for found in desk.core.memory.candidates():
            there = covered(memory.values(), found.step, found.timeline)
            assert there == {"a", "b"}, f"step {found.step}: {there}"
        for node in desk.said:
            if desk.core.copies.checkpoint(node) is not None:
                peer = desk.core.copies.peer(node)
                assert peer is None or (peer.node in memory and desk.core.holds(NodeId(peer.node)))
                assert peer is None or peer.node != node
        orders = desk.orders()
        assert len({o.attempt for o in orders.values()}) <= 1, "one order at a time"
        assert sum(bool(o.writers) for o in orders.values()) <= 1
        fresh = {order.attempt for order in orders.values()} - set(seen_attempts)
        for node, order in orders.items():
            if order.attempt not in seen_attempts:
                seen_attempts.append(order.attempt)
            assert order.attempt == seen_attempts[-1], "what was called off does not come again"
            for rank in order.ranks if order.attempt in fresh else ():
                # Whose memory has gone on since then says so by its persister, which has failed.
                ranks = [r for h in memory[node] if h.step == order.step for r in h.ranks]
                assert rank in ranks, "who is to write it has it"
            if order.grant:
                assert order.grant == desk.term, "only the current master grants"
                assert granted.setdefault(order.attempt, node) == node, "one grant for an attempt"
        assert set(orders) <= set(desk.said), "only who lives"
        if orders:
            (coordinator,) = [n for n, o in orders.items() if o.writers]
            assert 0 in orders[coordinator].ranks or all(0 not in o.ranks for o in orders.values())
        now_stored = desk.core.stored
        if last_stored is not None:
            assert now_stored is not None
            assert now_stored.number >= last_stored.number, "what is in storage never goes back"
        last_stored = now_stored
