"""Copies of buckets: rare orders of messages, each of which once could lose or repeat a push."""

from collections import deque
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import messages as m
from dlrover_py.ps import specs
from dlrover_py.ps.cluster_map import AckMode, ClusterMap, Placement, Replacing, Steps
from dlrover_py.ps.planner import Planner, PlanRules
from dlrover_py.ps.replication import Replica
from dlrover_py.ps.server import AT_ONCE, in_turn, without_copies
from dlrover_py.ps.session import PendingRequests
from dlrover_py.ps.specs import TableSpec
from dlrover_py.ps.store import Store

TABLE = TableSpec("t", 1, specs.sgd(1.0), specs.uniform(0.0, 0.0))
ROUTE = b"worker"


def cluster(term: int, primary: str, *backups: str, learner: str = "", **more: Any) -> ClusterMap:
    """Return a map of one bucket whose epoch is the term."""
    placement = Placement(term, primary, backups, learner)
    names = {name: name for name in "abc"}
    return ClusterMap("j", term, tables=(TABLE,), servers=names, placements=(placement,), **more)


class Server:
    """A replica with its rows; messages are delivered by hand."""

    def __init__(self, name: str, part_bytes: int = 1 << 20) -> None:
        self.store = Store(1)
        self.replica = Replica(name, self.store, part_bytes=part_bytes)

    def see(self, new: ClusterMap) -> list[Any]:
        self.replica.on_map(new, 0.0)
        return self.replica.take()

    def push(
        self,
        seq: int,
        ids: list[int],
        *,
        client: str = "w",
        incarnation: int = 1,
        now: float = 0.0,
    ) -> Any:
        assert self.replica.map is not None
        push = m.Push(client, incarnation, self.replica.map.epoch, seq, (0,))
        arrays = [np.array(ids, np.int64), np.full((len(ids), 1), -1, np.float32)]
        self.replica.on_push(ROUTE, push, [("t", arrays)], now)
        return self.replica.take()

    def get(self, *envelopes: Any, now: float = 0.0) -> list[Any]:
        for one in envelopes:
            match one.message:
                case m.Replicate():
                    self.replica.on_replicate(one.message, one.payload)
                case m.BucketCopy():
                    self.replica.on_copy(one.message, one.payload)
                case m.PartsTaken():
                    self.replica.on_parts_taken(one.message, now)
                case m.Compare():
                    self.replica.on_compare(one.message)
                case m.Held():
                    self.replica.on_held(one.message, now)
                case m.Lacking():
                    self.replica.on_lacking(one.message, now)
        return self.replica.take()

    def value(self, one: int) -> float:
        return float(self.store.tables["t"].read(np.array([one], np.int64))[0, 0])


def kinds(envelopes: list[Any]) -> list[str]:
    return [type(one.message).__name__ for one in envelopes]


def copy_of(server: Server, to: str, term: int) -> list[Any]:
    """Return the copy that a follower without rows gets."""
    server.replica.on_lacking(m.Lacking(to, (m.LackedBucket(0, term),)), 0.0)
    return server.replica.take()


def pair(*, push: int = 0, part_bytes: int = 1 << 20) -> tuple[Server, Server]:
    """Return primary a and backup b in term 1, which both have some pushes."""
    a, b = Server("a", part_bytes), Server("b")
    b.see(cluster(1, "a", "b"))
    b_held = b.get(*a.see(cluster(1, "a", "b")))
    a.get(*b_held)
    for seq in range(1, push + 1):
        assert kinds(a.get(*b.get(*a.push(seq, [1])))) == ["Pushed"]
    return a, b


def test_a_push_is_acknowledged_when_the_backup_has_it() -> None:
    a, b = pair()
    sent = a.push(1, [1, 1])
    assert kinds(sent) == ["Replicate"]
    assert kinds(a.get(*b.get(*sent))) == ["Pushed"]
    assert (a.value(1), b.value(1)) == (2, 2)


def test_rows_of_a_new_table_may_come_before_the_map_that_has_it() -> None:
    new = cluster(1, "a", "b")
    a, b = Server("a"), Server("b")
    b.see(replace(new, tables=()))
    a.get(*b.get(*a.see(new)))
    assert b.get(*a.push(1, [1, 1])) == [], "b does not answer for what it cannot keep"
    b.see(replace(new, epoch=2))
    a.replica.tick(100.0)
    copy = a.get(*b.get(*a.replica.take()))
    assert kinds(copy) == ["BucketCopy"]
    assert kinds(a.get(*b.get(*copy))) == ["Pushed"]
    assert (a.value(1), b.value(1)) == (2, 2)


def test_a_copy_with_a_new_table_may_come_before_the_map_that_has_it() -> None:
    a, _ = pair(push=1)
    copy = copy_of(a, "b", 1)
    b = Server("b")
    b.see(replace(cluster(1, "a", "b"), tables=()))
    assert b.get(*copy) == []
    b.see(replace(cluster(1, "a", "b"), epoch=2))
    assert kinds(b.get(*copy)) == ["Held"]
    assert b.value(1) == 1


def test_a_duplicate_is_acknowledged_no_earlier_and_not_applied() -> None:
    a, b = pair()
    sent = a.push(1, [1])
    assert a.push(1, [1]) == []
    assert kinds(a.get(*b.get(*sent))) == ["Pushed"]
    assert a.replica.duplicates == 1
    assert a.value(1) == 1


def test_a_primary_of_an_older_term_gets_no_answer() -> None:
    a, b = pair(push=1)
    b.see(cluster(2, "b"))
    assert b.get(*a.push(2, [1])) == []
    b.see(cluster(3, "c", "b"))
    assert b.get(*a.push(3, [1])) == []
    assert b.value(1) == 1


def test_the_same_version_of_another_term_is_another_state() -> None:
    a, b = pair(push=1)
    a.push(2, [7])  # only a has this one
    b.see(cluster(2, "b", "a"))
    b.push(1, [9], client="other")  # it is lost: a and b have version 2 of different terms
    sent = b.push(2, [8], client="other")
    answer = a.get(*sent)
    assert kinds(answer) == ["Lacking"]
    copy = b.get(*answer)
    held = a.get(*copy)
    assert kinds(b.get(*held)) == ["Pushed", "Pushed"]
    assert [server.value(id_) for server in (a, b) for id_ in (7, 8, 9)] == [0, 1, 1] * 2


def test_a_copy_that_comes_late_undoes_nothing() -> None:
    a, b = pair(push=1)
    a.see(cluster(2, "a", learner="b"))
    copy = copy_of(a, "b", 2)
    a.get(*b.get(*copy))
    assert kinds(a.get(*b.get(*a.push(2, [1])))) == ["Pushed"]
    b.get(*copy)
    assert b.value(1) == 2


def test_a_copy_replaces_rows_that_its_primary_does_not_have() -> None:
    a, b = pair(push=1)
    a.push(2, [7])
    b.see(cluster(2, "b", learner="a"))
    a.get(*copy_of(b, "a", 2))
    assert a.value(7) == 0
    assert len(a.store.tables["t"]) == 1


def primary_of_three_rows() -> Server:
    """Return primary a, which sends each row in a part of its own."""
    a, b = pair(part_bytes=1)
    for seq in (1, 2, 3):
        a.get(*b.get(*a.push(seq, [seq])))
    return a


def test_a_bucket_is_copied_in_parts_while_its_rows_change() -> None:
    a, c = primary_of_three_rows(), Server("c")
    for one in (a, c):
        one.see(cluster(2, "a", learner="c"))
    first = copy_of(a, "c", 2)
    taken = c.get(*first)
    assert kinds(taken) == ["PartsTaken"]
    change = a.push(4, [1, 3, 4])  # a row before this part, one behind it, and a new one
    assert c.get(*change[:1]) == []
    second = a.get(*taken)
    third = a.get(*c.get(*second))
    assert [one[0].message.last for one in (first, second, third)] == [False, False, True]
    held = c.get(*third)
    assert kinds(held) == ["Held"]
    assert [c.value(one) for one in (1, 2, 3, 4)] == [2, 1, 2, 1]
    assert c.replica.numbers(0) == a.replica.numbers(0)
    a.get(*held)
    assert a.replica.synced() == [(0, 2, "c")]
    assert kinds(c.get(*a.push(5, [1])[:1])) == ["Held"]


def test_a_copy_whose_parts_or_changes_are_lost_begins_again() -> None:
    for lost in ("a change", "a part", "an answer"):
        a, c = primary_of_three_rows(), Server("c")
        for one in (a, c):
            one.see(cluster(2, "a", learner="c"))
        taken = c.get(*copy_of(a, "c", 2))
        if lost == "a change":
            a.push(4, [1])
            assert kinds(c.get(*a.get(*taken))) == ["Lacking"]
        elif lost == "a part":
            a.get(*taken)
        for passed in range(1, 5):
            a.replica.tick(100.0 * passed)
            news = a.replica.take()
            while news:
                news = a.get(*c.get(*news))
        assert a.replica.synced() == [(0, 2, "c")], lost
        assert c.value(1) == a.value(1)


def test_a_part_counts_only_after_all_parts_of_its_copy() -> None:
    a, c = primary_of_three_rows(), Server("c")
    for one in (a, c):
        one.see(cluster(2, "a", learner="c"))
    taken = c.get(*copy_of(a, "c", 2))
    a.get(*taken)  # the second part is lost
    (third,) = a.get(replace(taken[0], message=m.PartsTaken("c", (m.CopyProgress(0, 2, 1, 2),))))
    assert (third.message.part, third.message.last) == (2, True)
    assert kinds(c.get(third)) == ["Lacking"]
    a.replica.tick(100.0)
    a.replica.take()
    a.get(*c.get(*copy_of(a, "c", 2)))
    assert kinds(c.get(third)) == ["Lacking"], "it is of an earlier copy"
    assert c.replica.numbers(0) == {}


class Link:
    """Primary a and learner c, whose messages come late; the time passes in tenths of a second."""

    def __init__(self, delay_s: float) -> None:
        self.a, self.c, self.delay_s, self.now = primary_of_three_rows(), Server("c"), delay_s, 0.0
        self.under_way: deque[tuple[float, Any]] = deque()
        self.parts: list[int] = []
        """The parts of copies that were sent, by number."""
        self.lost: set[int] = set()
        """Which of them are lost, counted from 0."""
        for one in (self.a, self.c):
            self.send(one.see(cluster(2, "a", learner="c", ack=AckMode.PRIMARY)))

    def send(self, envelopes: list[Any]) -> None:
        for one in envelopes:
            if isinstance(one.message, m.BucketCopy):
                self.parts.append(one.message.part)
                if len(self.parts) - 1 in self.lost:
                    continue
            if one.to != ROUTE:
                self.under_way.append((self.now + self.delay_s, one))

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.now += 0.1
            while self.under_way and self.under_way[0][0] <= self.now:
                _, one = self.under_way.popleft()
                self.send((self.c if one.to == "c" else self.a).get(one, now=self.now))
            self.a.replica.tick(self.now)
            self.send(self.a.replica.take())


def test_a_follower_that_answers_late_gets_each_part_once() -> None:
    """It once got part 0 again each time, and the copy never ended."""
    link = Link(3.0)
    link.passes(40.0)
    assert link.parts == [0, 1, 2]
    assert link.a.replica.synced() == [(0, 2, "c")]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_part_that_is_lost_begins_one_new_copy_however_late_the_answers_are(lost: int) -> None:
    link = Link(3.0)
    link.lost = {lost}
    link.passes(80.0)
    assert link.parts == [*range(lost + 1), 0, 1, 2]
    assert link.a.replica.synced() == [(0, 2, "c")]
    assert [link.c.value(one) for one in (1, 2, 3)] == [link.a.value(one) for one in (1, 2, 3)]


def test_a_lost_part_is_found_out_while_pushes_go_on() -> None:
    link = Link(0.0)
    link.lost = {1}
    for seq in range(4, 34):
        link.send(link.a.push(seq, [1], now=link.now))
        link.passes(0.2)
    assert link.parts == [0, 1, 0, 1, 2]
    assert link.c.value(1) == link.a.value(1)


def test_half_a_copy_is_no_state_to_lead_with() -> None:
    a, b = primary_of_three_rows(), Server("b")
    b.see(cluster(1, "a", "b"))
    assert kinds(b.get(*copy_of(a, "b", 1))) == ["PartsTaken"]
    assert len(b.store.tables["t"]) == 1
    b.see(cluster(2, "b"))
    assert len(b.store.tables["t"]) == 0
    assert kinds(b.push(1, [1])) == ["Pushed"]
    assert b.value(1) == 1


def test_a_backup_keeps_what_it_has_until_a_copy_is_complete() -> None:
    a, b = pair(push=1, part_bytes=1)
    for seq in (2, 3):
        a.push(seq, [seq])  # b does not get these
    assert kinds(b.get(*copy_of(a, "b", 1))) == ["PartsTaken"]
    b.see(cluster(2, "b"))
    assert [b.value(one) for one in (1, 2, 3)] == [1, 0, 0]
    assert kinds(b.push(2, [2])) == ["Pushed"]
    assert [b.value(one) for one in (1, 2, 3)] == [1, 1, 0]


def test_answers_to_an_earlier_primary_do_not_count() -> None:
    a, b = pair(push=1)
    answer_of_term_1 = [one for one in b.get(*a.push(2, [1])) if kinds([one]) == ["Held"]]
    b.see(cluster(2, "b"))
    a.see(cluster(3, "b", "a"))
    a.see(cluster(4, "a", "b"))
    a.push(3, [1])
    late = m.Held("b", ((0, 1, 1, 99),))
    a.replica.on_held(late, 0.0)
    assert "Pushed" not in kinds(a.get(*answer_of_term_1))


def test_progress_of_followers_is_unknown_after_a_missed_term() -> None:
    a, b = pair(push=1)
    a.get(*b.get(*a.push(2, [1])))
    a.see(cluster(3, "a", "b"))  # term 2 had another primary, for all that a knows
    assert a.push(2, [1]) == []


def test_a_learner_that_is_in_sync_is_waited_for() -> None:
    a = Server("a")
    a.see(cluster(1, "a", learner="c"))
    assert kinds(a.push(1, [1])) == ["Pushed"]
    c = Server("c")
    c.see(cluster(1, "a", learner="c"))
    assert a.replica.synced() == []
    a.get(*c.get(*copy_of(a, "c", 1)))
    assert a.replica.synced() == [(0, 1, "c")]
    assert kinds(a.push(2, [1])) == ["Replicate"]


def test_with_ack_primary_only_backups_are_not_waited_for() -> None:
    a = Server("a")
    a.see(cluster(1, "a", "b", ack=AckMode.PRIMARY))
    assert kinds(a.push(1, [1])) == ["Replicate", "Pushed"]


def test_a_backup_that_is_to_lead_is_waited_for_when_it_has_caught_up() -> None:
    """It may lack pushes that were acknowledged, and must not lead before it has them."""
    a, b = Server("a"), Server("b")
    before, then = (
        cluster(term, "a", "b", learner=learner, ack=AckMode.PRIMARY)
        for term, learner in ((1, ""), (2, "b"))
    )
    for one in (a, b):
        one.see(before)
    lost = a.push(1, [1])
    assert kinds(lost) == ["Replicate", "Pushed"]
    asked = a.see(then)
    assert a.replica.synced() == []
    assert kinds(asked) == ["Compare"]
    b.see(then)
    lacking = b.get(*asked)
    assert kinds(lacking) == ["Lacking"]
    a.get(*b.get(*a.get(*lacking)))
    assert a.replica.synced() == [(0, 2, "b")]
    pushed = a.push(2, [1])
    assert kinds(pushed) == ["Replicate"]
    assert kinds(a.get(*b.get(*pushed))) == ["Pushed"]


def test_an_older_incarnation_is_refused_on_each_bucket() -> None:
    a = Server("a")
    a.see(cluster(1, "a", clients={"w": 5}))
    (refusal,) = a.push(1, [1], incarnation=4)
    assert refusal.message.reason is m.RefusalReason.OLD_CLIENT
    assert a.value(1) == 0
    assert kinds(a.push(1, [1], incarnation=5)) == ["Pushed"]


def planner(*servers: str, replicas: int = 2, buckets: int = 4) -> Planner:
    rules = PlanRules(buckets=buckets, servers=len(servers), replicas=replicas)
    made = Planner(ClusterMap("j"), rules, 0.0)
    for name in servers:
        made.heard(name, name, 0.0)
    return made


def test_a_bucket_that_is_lost_while_it_moves_does_not_move_any_more() -> None:
    """It counted as one of the few buckets that may move at a time, until a return to a cut."""
    plan = planner("a", replicas=1)
    plan.heard("b", "b", 0.0)
    assert any(one.replacing for one in plan.map.placements)
    plan.lost("a")
    found = {(one.learner, one.replacing, one.lost) for one in plan.map.placements}
    assert found == {("", Replacing.NOTHING, True)}


def test_a_promotion_has_a_new_term_and_never_a_learner() -> None:
    plan = planner("a", "b")
    plan.heard("c", "c", 0.0)
    moving = [one for one in plan.map.placements if one.learner]
    assert moving
    before = plan.map.placements
    plan.lost("a")
    for old, new in zip(before, plan.map.placements, strict=True):
        assert not new.lost
        if old.primary == "a":
            assert new.primary == "b"
            assert new.term > old.term


def test_each_change_of_members_has_a_new_term() -> None:
    plan = planner("a", "b")
    before = plan.map.placements
    plan.lost("a")
    for old, new in zip(before, plan.map.placements, strict=True):
        assert (new.term, new.members) == (old.term + 1, ("b",))


def test_what_is_said_in_an_older_term_changes_nothing() -> None:
    plan = planner("a", "b")
    plan.heard("c", "c", 0.0)
    bucket = next(i for i, one in enumerate(plan.map.placements) if one.learner)
    old = plan.map.placements[bucket]
    for sender, term in ((old.primary, old.term - 1), ("c", old.term), ("b", old.term + 1)):
        plan.synced(sender, bucket, term, "c")
        assert plan.map.placements[bucket] == old
    plan.synced(old.primary, bucket, old.term, "c")
    assert "c" in plan.map.placements[bucket].members
    plan.synced(old.primary, 99, 1, "c")


def test_a_silent_server_keeps_what_nobody_else_has() -> None:
    plan = planner("a", "b", replicas=1)
    plan.heard("b", "b", 10.0)
    plan.tick(10.0)
    assert set(plan.map.servers) == {"b"}
    alone = [one for one in plan.map.placements if one.primary == "a"]
    assert alone
    assert not any(one.lost for one in alone)
    plan.heard("a", "a", 11.0)
    plan.lost("a")
    assert all(one.lost for one in plan.map.placements if one.primary == "a")


def test_a_new_server_gets_its_share_and_no_more_moves() -> None:
    plan = planner("a", "b", buckets=12)
    plan.heard("c", "c", 0.0)
    for _ in range(100):
        for bucket, one in enumerate(plan.map.placements):
            if one.learner:
                plan.synced(one.primary, bucket, one.term, one.learner)
    leads = [one.primary for one in plan.map.placements]
    assert {leads.count(name) for name in "abc"} == {4}
    assert all(one.replacing is Replacing.NOTHING for one in plan.map.placements)


@pytest.mark.parametrize(
    "rules",
    [
        PlanRules(buckets=0),
        PlanRules(replicas=3),
        PlanRules(servers=0),
        PlanRules(silence_s=0),
    ],
)
def test_wrong_rules_are_refused(rules: PlanRules) -> None:
    with pytest.raises(ConfigError, match="expected"):
        rules.check()


def test_workers_and_tables_are_checked() -> None:
    plan = planner("a")
    first = plan.join("w", "a")
    assert plan.join("w", "a") == first < plan.join("w", "b")
    for name in ("", "a b"):
        with pytest.raises(ConfigError, match="expected"):
            plan.join(name, "a")
    plan.create_table(TABLE)
    with pytest.raises(ConfigError, match="another name"):
        plan.create_table(TableSpec("t", 2))


def test_a_request_is_sent_again_with_its_number() -> None:
    requests = PendingRequests(resend_s=1.0, refused_s=0.1)
    assert requests.start(7, [0], 0.0) == []
    (first,) = requests.on_map(cluster(1, "a", "b"), 0.0)
    assert (first.server, first.seq) == ("a", 7)
    assert requests.due(0.9) == []
    assert [one.server for one in requests.due(1.0)] == ["a"]
    (moved,) = requests.on_map(cluster(2, "b"), 1.1)
    assert (moved.server, moved.seq) == ("b", 7)
    requests.refused(7, [0], 1.1)
    assert [one.server for one in requests.due(1.3)] == ["b"]
    assert requests.answered(7, [0]) == [0]
    assert not requests.is_open(7)
    assert requests.answered(7, [0]) == []


def test_a_request_without_an_answer_is_sent_again_after_growing_pauses() -> None:
    """A server that needed 1.2 s for a pull got a copy each second, and never caught up."""
    requests = PendingRequests(resend_s=1.0, most_s=5.0, refused_s=0.1)
    requests.on_map(cluster(1, "a", "b"), 0.0)

    def sent(request: int, until: int) -> list[int]:
        return [at for at in range(until) if requests.due(at / 10, only=request)]

    assert len(requests.start(7, [0], 0.0)) == 1
    assert sent(7, 200) == [10, 30, 70, 120, 170]
    requests.refused(7, [0], 20.0)
    assert [at for at in range(200, 240) if requests.due(at / 10)] == [201, 211, 231]
    requests.on_map(cluster(2, "b"), 24.0)
    assert [at for at in range(240, 275) if requests.due(at / 10)] == [250, 270]


def test_a_server_answers_only_one_of_the_copies_of_a_pull() -> None:
    pull, ids = m.Pull(3, 7, (0, 1)), [("t", [np.arange(2)])]
    later, other = m.Pull(3, 8, (0, 1)), m.Pull(3, 7, (1, 2))
    push = m.Push("w", 1, 3, 7, (0, 1))
    staying: Any = [(b"x", pull, ids), (ROUTE, later, ids), (ROUTE, other, ids), (ROUTE, push, ids)]
    copies: Any = [(ROUTE, pull, ids), (ROUTE, m.Pull(4, 7, (1,)), ids)]
    assert list(without_copies([*copies, *staying, *copies], ROUTE, pull)) == staying


@pytest.mark.parametrize(("takes_s", "handled"), [(0.0, AT_ONCE), (0.125, 3), (1.25, 1)])
def test_requests_that_take_long_wait_for_the_next_turn(takes_s: float, handled: int) -> None:
    """Pulls of 1.2 s each were answered one after the other, and their server counted as lost."""
    requests: list[Any] = [(ROUTE, m.Pull(1, seq, (0,)), []) for seq in range(2 * AT_ONCE)]
    queued = deque(requests)
    now = count(0.0, takes_s)
    assert list(in_turn(queued, lambda: next(now))) == requests[:handled]
    assert list(queued) == requests[handled:]


def test_a_queue_that_is_empty_ends_the_turn() -> None:
    assert list(in_turn(deque(), lambda: 0.0)) == []


def test_a_server_that_leaves_has_no_bucket_left_when_nobody_can_take_a_copy() -> None:
    """Some buckets had to change their primary first, and nothing happened afterwards."""
    plan = planner("a", "b", buckets=3)
    plan.drain("a")
    assert {one.members for one in plan.map.placements} == {("b",)}


# --- Synchronous steps ---


def stepping(epoch: int, generation: int, done: int, *, primary: str = "a", **more: Any) -> Any:
    """Return a map of one bucket, whose primary has the term 1, or 2 after a change."""
    steps = Steps(specs.sync(), generation, {"w": 1}, done)
    term = 1 if primary == "a" else 2
    return replace(cluster(term, primary, **more), epoch=epoch, steps=steps)


def push_of(server: Server, seq: int, step: tuple[int, int], ids: list[int]) -> list[str]:
    """Push 1 for some ids in a step; return the kinds of the answers."""
    assert server.replica.map is not None
    push = m.Push("w", 1, server.replica.map.epoch, seq, (0,), step)
    arrays = [np.array(ids, np.int64), np.full((len(ids), 1), -1, np.float32)]
    server.replica.on_push(ROUTE, push, [("t", arrays)], 0.0)
    return kinds(server.replica.take())


def test_an_old_push_does_not_take_the_place_of_one_that_waits() -> None:
    """It came late, when the group had changed and its worker had sent another one."""
    a = Server("a")
    a.see(stepping(1, 1, 0))
    assert push_of(a, 1, (1, 1), [5]) == ["Pushed"]
    a.see(stepping(2, 2, 0))
    assert push_of(a, 2, (2, 1), [6]) == ["Pushed"]
    assert push_of(a, 1, (1, 1), [5]) == ["RefusedRequest"]
    a.see(stepping(3, 2, 1))
    assert (a.value(5), a.value(6)) == (0, 1)
    assert push_of(a, 2, (2, 1), [6]) == ["Pushed"]
    assert a.value(6) == 1


def test_a_copy_of_a_bucket_has_the_pushes_that_wait() -> None:
    a, b = Server("a"), Server("b")
    a.see(stepping(1, 1, 0, learner="b"))
    b.see(stepping(1, 1, 0, learner="b"))
    push_of(a, 1, (1, 1), [5])
    b.get(*copy_of(a, "b", 1))
    assert b.value(5) == 0
    b.see(stepping(2, 1, 1, primary="b"))
    assert b.value(5) == 1


def test_a_pull_waits_until_the_server_knows_that_the_step_is_over() -> None:
    a = Server("a")
    a.see(stepping(1, 1, 0))
    push_of(a, 1, (1, 1), [5])
    a.replica.on_pull(ROUTE, m.Pull(2, 2, (0,)), [("t", [np.array([5])])])
    assert a.replica.take() == []
    (answer,) = a.see(stepping(2, 1, 1))
    assert answer.payload[0][1][0].tolist() == [[1.0]]


def test_a_late_push_of_a_step_that_is_over_counts_once() -> None:
    """With ``--ack primary``, its server may have died with what waited there."""
    a = Server("a")
    a.see(stepping(1, 1, 1))
    for _ in range(2):
        assert push_of(a, 1, (1, 1), [5]) == ["Pushed"]
    assert a.value(5) == 1


def test_staleness_counts_the_pushes_of_others_once() -> None:
    server = Server("a")
    server.see(cluster(1, "a"))
    ids = np.array([1], np.int64)
    pull = m.Pull(1, 1, (0,))
    for route in (b"x", ROUTE):
        server.replica.on_pull(route, pull, [("t", [ids])])
    for seq in (1, 1, 2, 2):  # each one comes again
        server.push(seq, [1])
    late = m.Push("x", 1, 1, 2, (0,))
    server.replica.on_push(b"x", late, [("t", [ids, np.ones((1, 1), np.float32)])], 0.0)
    assert server.replica.staleness.per_s(1.0) == (2, 0, 1, 0, 0, 0, 0, 0)
