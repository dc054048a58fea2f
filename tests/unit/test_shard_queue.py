"""The lease queue of a dataset: deadlines, quarantine, epochs, and what a record costs."""

import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dlrover_py.protocol.agents import HeldLease
from dlrover_py.protocol.shards import (
    AnswerCode,
    Credit,
    DatasetSpec,
    Ledger,
    Level,
    ShardAnswer,
    ShardRequest,
    ShardReturn,
    read_shard_answer,
    read_shard_request,
)
from dlrover_py.shards.order import ShardOrder
from dlrover_py.shards.queue import MAX_OPEN, ShardQueue
from dlrover_py.shards.records import QueueRecord

RECORD = TypeAdapter(QueueRecord)


class Client:
    """A worker that asks a queue, and what it was answered."""

    def __init__(self, queue: ShardQueue, name: str = "n0/0", **fixed: Any) -> None:
        self.queue, self.name, self.seq = queue, name, 0
        self.fixed = {"dataset": "d", "round": 1, "local_rank": 0, **fixed}
        self.answer = ShardAnswer()

    def ask(self, now: float = 0.0, **fields: Any) -> ShardAnswer:
        self.seq += 1
        given = {"epoch": self.answer.epoch, **self.fixed, **fields, "seq": self.seq}
        self.answer = self.queue.take(self.name, ShardRequest(**given), now)
        return self.answer

    def finish(self, now: float = 0.0, want: int = 1) -> ShardAnswer:
        """Credit all that is held, and ask for more."""
        credits = [Credit(token=one.token, ranges=one.todo) for one in self.answer.leases]
        return self.ask(now, credits=credits, want=want)


def make_queue(**fields: Any) -> ShardQueue:
    spec = {"sizes": [(4, 10)], "shuffle": False, "level": Level.EXACTLY_ONCE_ACCOUNTING, **fields}
    return ShardQueue(QueueRecord(spec=DatasetSpec(**spec)))


def test_a_lease_ends_without_progress_and_its_rest_comes_first() -> None:
    queue = make_queue(sizes=[(20, 10)])
    slow, fast = Client(queue, "n0/0"), Client(queue, "n1/0")
    (lease,) = slow.ask(0.0, want=1).leases
    slow.ask(50.0, credits=[Credit(token=lease.token, ranges=[(0, 3), (5, 6)])], want=1)
    assert queue.expire(100.0) == 110.0  # the credit has renewed it
    assert queue.expire(110.0) == math.inf
    (again,) = fast.ask(110.0, want=1).leases
    assert (again.shard, again.todo) == (0, [(3, 5), (6, 10)])
    assert again.token > lease.token
    late = slow.ask(111.0, credits=[Credit(token=lease.token, ranges=[(3, 10)])])
    assert late.refused == [lease.token]
    assert fast.finish(112.0).refused == []
    assert queue.record.done == [(0, 1)]


def test_the_deadline_follows_the_time_that_shards_take() -> None:
    queue = make_queue(sizes=[(50, 1)])
    client = Client(queue)
    client.ask(0.0, want=1)
    for shard in range(1, 11):
        client.finish(100.0 * shard)
    assert client.answer.lease_s == 300.0


def test_a_standstill_of_the_master_moves_deadlines() -> None:
    queue = make_queue()
    Client(queue).ask(0.0, want=1)
    queue.stalled(30.0)
    assert queue.expire(60.0) == 90.0
    assert queue.workers == ["n0/0"]


def test_a_repeated_request_is_answered_alike_and_applied_once() -> None:
    queue = make_queue()
    client = Client(queue)
    (lease,) = client.ask(want=1).leases
    first = client.finish()
    client.seq -= 1
    again = client.ask(credits=[Credit(token=lease.token, ranges=[(0, 10)])], want=1)
    assert again == first
    restarted = ShardQueue(RECORD.validate_json(RECORD.dump_json(queue.record)))
    client.queue = restarted
    client.seq -= 1
    after = client.ask(credits=[Credit(token=lease.token, ranges=[(0, 10)])])
    assert (after.refused, restarted.record.done) == ([], [(0, 1)])


def test_failures_lead_to_quarantine_and_preemptions_do_not() -> None:
    queue = make_queue(epochs=2)
    client = Client(queue)
    for _ in range(10):
        client.ask(want=1)
        queue.drop("n0/0")
    for _ in range(3):
        assert not queue.notes
        (lease,) = client.ask(want=1).leases
        assert lease.shard == 0
        queue.drop("n0/0", blame="exit code 1")
    assert "samples 0 to 9" in queue.notes[0]
    assert "exit code 1" in queue.notes[0]
    seen = []
    while not client.ask(want=1).over:
        if client.answer.leases:
            seen.append(client.answer.leases[0].shard)
            client.finish(want=0)
    assert seen == [1, 2, 3] * 2
    assert queue.record.quarantined[0].missed == [(0, 10)]
    assert client.answer.quarantined == 1


def test_a_slow_step_of_all_workers_is_no_failure_of_their_shards() -> None:
    """Each round begins with a step that takes longer than the deadline, and with equal shards."""
    queue = make_queue(sizes=[(20, 10)], level=Level.EXACTLY_ONCE_EFFECT)
    for number in range(1, 5):
        ranks = [Client(queue, f"n{rank}/0", round=number) for rank in range(2)]
        for rank in ranks:
            rank.ask(100.0 * number, spec=queue.record.spec, want=2)
        assert [rank.answer.leases[0].shard for rank in ranks] == [0, 2]
        queue.expire(100.0 * number + 60)
        assert queue.workers == []
        for rank in ranks:
            rank.finish(100.0 * number + 70, want=2)
            assert len(rank.answer.refused) == 2
            assert rank.answer.leases == [], "it ends now, and must not take a shard with it"
    assert (queue.record.failures, queue.record.quarantined) == ({}, {})


def test_a_worker_that_is_heard_again_was_slow_and_not_stuck() -> None:
    queue = make_queue(sizes=[(20, 10)])
    slow, other = Client(queue, "n0/0"), Client(queue, "n1/0")
    slow.ask(0.0, want=1)
    queue.drop("n0/0", blame="exit code 1")
    slow.ask(0.0, want=1)
    other.ask(50.0, want=1)
    queue.expire(60.0)
    assert queue.record.failures[0].count == 2
    late = slow.finish(70.0)
    assert (queue.record.failures[0].count, late.leases) == (1, [])
    assert slow.ask(71.0, want=1).leases[0].shard == 0, "it asks again if it goes on"
    assert queue.record.failures[0].count == 1, "it is taken back once"


def test_what_others_have_failed_with_since_is_not_taken_back() -> None:
    queue = make_queue(sizes=[(1, 10)], epochs=2)
    slow, other = Client(queue, "n0/0"), Client(queue, "n1/0")
    slow.ask(0.0, want=1)
    other.ask(50.0)
    queue.expire(60.0)
    other.ask(60.0, want=1)
    other.finish(61.0)
    other.ask(62.0, want=1)
    queue.drop("n1/0", blame="exit code 1")
    slow.ask(70.0)
    assert queue.record.failures[0].count == 1


def test_a_shard_with_which_workers_stand_still_goes_to_quarantine() -> None:
    queue = make_queue(sizes=[(20, 10)])
    healthy = Client(queue, "healthy")
    for number in range(3):
        assert queue.record.quarantined == {}
        Client(queue, f"n{number}/0").ask(100.0 * number, want=1)
        healthy.ask(100.0 * number + 50, progress=True)
        queue.expire(100.0 * number + 60)
    assert "made no progress for 60 s" in queue.record.quarantined[0].why


def test_an_unreadable_shard_goes_to_quarantine_at_once() -> None:
    queue = make_queue()
    client = Client(queue)
    (lease,) = client.ask(want=1).leases
    client.ask(credits=[Credit(token=lease.token, ranges=[(0, 4)])], want=1)
    gone = ShardReturn(token=lease.token, why="a.txt is gone", unreadable=True)
    (following,) = client.ask(returns=[gone], want=1).leases
    assert following.shard == 1
    assert queue.record.quarantined[0].missed == [(4, 10)]


def test_a_dataset_without_a_readable_shard_is_refused() -> None:
    queue = make_queue(sizes=[(1, 3)], failures=1)
    client = Client(queue)
    client.ask(want=1)
    queue.drop("n0/0", blame="it died")
    assert client.ask(want=1).code is AnswerCode.REFUSED
    assert "1 of 1 shards" in client.answer.why
    assert queue.record.epoch == 0


def test_the_next_epoch_waits_for_the_last_shard() -> None:
    queue = make_queue(sizes=[(1, 5)], epochs=2)
    first, second = Client(queue, "n0/0"), Client(queue, "n1/0")
    (lease,) = first.ask(want=1).leases
    assert (second.ask(want=1).leases, second.answer.epoch) == ([], 0)
    first.ask(credits=[Credit(token=lease.token, ranges=[(0, 4)])])
    assert second.ask(want=1).leases == []
    first.ask(credits=[Credit(token=lease.token, ranges=[(4, 5)])])
    assert (second.ask(want=1).epoch, second.answer.leases) == (1, [])
    assert second.ask(want=1).leases[0].epoch == 1


def test_at_the_end_of_an_epoch_a_worker_gets_one_shard_at_a_time() -> None:
    queue = make_queue(sizes=[(10, 1)])
    first, second = Client(queue, "n0/0"), Client(queue, "n1/0")
    assert len(first.ask(want=6).leases) == 6
    assert len(second.ask(want=6).leases) == 1


@pytest.mark.parametrize("level", list(Level))
def test_only_the_exact_effect_goes_back_with_the_model(level: Level) -> None:
    queue = make_queue(level=level)
    old = Client(queue)
    old.ask(want=2)
    old.finish(want=1)
    new = Client(queue, load=1)
    new.ask(spec=queue.record.spec, ledger=Ledger(epoch=0, done=[1, 1], partial={0: [0, 5]}))
    assert old.finish().code is AnswerCode.SUPERSEDED
    (lease,) = new.ask(want=1).leases
    if level is Level.EXACTLY_ONCE_EFFECT:
        assert (lease.position, lease.todo) == (0, [(5, 10)])
        third = Client(queue, round=2)
        third.ask(spec=queue.record.spec)
        assert third.ask(want=1).leases[0].todo == [(0, 10)], "no checkpoint: all from the start"
    else:
        assert (lease.position, lease.todo) == (2, [(0, 10)])


@pytest.mark.parametrize(
    ("ledger", "words"),
    [
        ({"epoch": 0, "done": [3, 2]}, "expected 4 shards, found 5"),
        ({"epoch": 0, "partial": {9: [0, 1]}}, "expected 4 shards, found 10"),
        ({"epoch": 9}, "expected an epoch up to 3, found 9"),
        ({"epoch": 0, "partial": {0: [8, 4]}}, "expected 10 samples at position 0, found 12"),
        ({"epoch": 0, "done": [0, 1], "partial": {0: [0, 1]}}, "position 0 is finished"),
        ({"epoch": 0, "partial": {0: [0, 10]}}, "position 0 is finished"),
    ],
)
def test_a_ledger_of_other_shards_is_refused(ledger: dict[str, Any], words: str) -> None:
    queue = make_queue(epochs=3)
    answer = Client(queue).ask(spec=queue.record.spec, ledger=Ledger(**ledger))
    assert answer.code is AnswerCode.REFUSED
    assert words in answer.why
    assert queue.record.history == (0, 0)


def test_another_dataset_under_the_same_name_is_refused() -> None:
    queue = make_queue()
    spec = queue.record.spec
    longer = spec.model_copy(update={"sizes": [(4, 11)]})
    assert "expected 40 samples" in Client(queue).ask(spec=longer).why
    seeded = spec.model_copy(update={"seed": 1})
    assert "found another seed" in Client(queue).ask(spec=seeded).why
    assert Client(queue, "n1/0").ask(spec=spec).code is AnswerCode.OK


def test_a_fingerprint_that_becomes_known_is_kept() -> None:
    queue = ShardQueue(QueueRecord(spec=DatasetSpec(sizes=[(4, 10)])))
    for worker, (fingerprint, code) in enumerate(
        [
            ("", AnswerCode.OK),
            ("v1", AnswerCode.OK),
            ("", AnswerCode.OK),
            ("v2", AnswerCode.REFUSED),
            ("v1", AnswerCode.OK),
        ]
    ):
        spec = DatasetSpec(sizes=[(4, 10)], fingerprint=fingerprint)
        request = ShardRequest(dataset="d", round=1, local_rank=0, seq=1, want=1, spec=spec)
        assert queue.take(f"w{worker}", request, 0.0).code == code
        assert queue.record.spec.fingerprint == ("v1" if worker else "")


def test_samples_beyond_a_shard_are_refused() -> None:
    client = Client(make_queue())
    (lease,) = client.ask(want=1).leases
    assert (
        "expected samples 0 to 10"
        in client.ask(credits=[Credit(token=lease.token, ranges=[(5, 11)])]).why
    )


def test_a_new_process_continues_the_leases_that_it_hears_of() -> None:
    queue = make_queue(sizes=[(20, 10)])
    held, lost = Client(queue, "n0/0"), Client(queue, "n1/0")
    (lease,) = held.ask(want=1).leases
    (gone,) = lost.ask(want=1).leases
    held.queue.drop("n0/0")
    (lease,) = held.ask(want=1).leases  # under a higher token
    new = ShardQueue(RECORD.validate_json(RECORD.dump_json(queue.record)))
    held.queue = lost.queue = new
    new.adopt("n0/0", HeldLease(token=lease.token, position=0, epoch=0), 0.0)
    new.adopt("n0/0", HeldLease(token=5_000, position=2, epoch=0), 0.0)  # never given
    new.adopt("n0/0", HeldLease(token=gone.token, position=1, epoch=7), 0.0)  # another epoch
    new.adopt("n2/0", HeldLease(token=lease.token - 1, position=0, epoch=0), 0.0)  # expired
    assert held.ask(want=1).leases == [lease]
    third = Client(new, "n2/0")
    (again,) = third.ask(want=1).leases
    assert again.shard == gone.shard
    assert lost.ask(credits=[Credit(token=gone.token, ranges=[(0, 10)])]).refused == [gone.token]


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 3))
def test_an_order_has_each_shard_once(shards: int, seed: int, epoch: int) -> None:
    order = ShardOrder(shards, seed, epoch)
    assert sorted(map(order.at, range(shards))) == list(range(shards))


def test_the_order_of_a_seed_never_changes() -> None:
    """Ledgers in checkpoints hold positions."""
    assert [ShardOrder(10, 0, 0).at(at) for at in range(10)] == [5, 9, 1, 6, 4, 2, 3, 7, 0, 8]
    assert [ShardOrder(10**6, 3, 1).at(at) for at in range(4)] == [
        643001, 312252, 445808, 191042,
    ]  # fmt: skip


def test_a_million_shards_take_little_memory() -> None:
    tracemalloc.start()
    try:
        Client(make_queue(sizes=[(1_000_000, 4096)], shuffle=True)).ask(want=8)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_record_of_a_million_shards_is_small() -> None:
    """Each worker holds a begun shard, and the finished ones have as many gaps as possible."""
    queue = make_queue(sizes=[(1_000_000, 4096)], shuffle=True)
    workers = [Client(queue, f"n{number}/0") for number in range(MAX_OPEN + 10)]
    for number, worker in enumerate(workers):
        worker.ask(want=2 if number % 2 else 1)
        if number % 2 and worker.answer.leases:
            last = worker.answer.leases[-1]
            worker.ask(credits=[Credit(token=last.token, ranges=[(0, last.size)])], want=1)
    for worker in workers:
        for lease in worker.answer.leases:
            worker.ask(credits=[Credit(token=lease.token, ranges=[(0, 4095)])], want=1)
    assert sum(len(worker.answer.leases) for worker in workers) == MAX_OPEN
    assert len(RECORD.dump_json(queue.record)) < 64 * 1024


def test_messages_arrive_and_others_are_refused_in_words() -> None:
    request = ShardRequest(
        dataset="d", round=1, local_rank=0, seq=1, spec=DatasetSpec(sizes=[(1, 2)]),
        ledger=Ledger(epoch=1, done=[0, 1]), credits=[Credit(token=1, ranges=[(0, 2)])],
        returns=[ShardReturn(token=2, why="gone")],
    )  # fmt: skip
    assert read_shard_request(request.model_dump_json().encode()) == request
    answer = Client(make_queue()).ask(want=2)
    assert read_shard_answer(answer.model_dump_json().encode()) == answer
    with pytest.raises(ValueError, match="it has version 2: expected version 1"):
        read_shard_request(b'{"version": 2, "dataset": "d"}')
    with pytest.raises(ValueError, match="dataset"):
        read_shard_request(b'{"dataset": "../d", "round": 1, "local_rank": 0, "seq": 1}')
    with pytest.raises(ValueError, match="valid"):
        read_shard_answer(b"[]")
    with pytest.raises(ValueError, match="at most 2"):
        DatasetSpec(sizes=[(2**32, 2**48)])
