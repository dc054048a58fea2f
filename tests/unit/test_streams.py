"""A stream in the lease queue: partitions grow, and each unit is credited once."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from dlrover_py.protocol.agents import HeldLease
from dlrover_py.protocol.shards import (
    AnswerCode,
    Credit,
    DatasetSpec,
    Ledger,
    Level,
    ShardLease,
    ShardReturn,
)
from dlrover_py.shards.queue import MAX_OPEN, POLL_S, ShardQueue
from dlrover_py.shards.records import QueueRecord
from dlrover_py.shards.streams import quarantined, watermark
from tests.unit.test_shard_queue import Client

RECORD = TypeAdapter(QueueRecord)


def stream(**fields: Any) -> ShardQueue:
    spec = {"range_size": 10, "level": Level.EXACTLY_ONCE_ACCOUNTING, **fields}
    return ShardQueue(QueueRecord(spec=DatasetSpec(**spec)))


def parts(leases: list[ShardLease]) -> list[tuple[str, int, int]]:
    """Return the ranges of leases: partition, first unit, and the one behind."""
    return [
        (one.partition, one.start + low, one.start + high)
        for one in leases
        for low, high in one.todo
    ]


def marks(queue: ShardQueue) -> dict[str, int]:
    return {name: watermark(part) for name, part in queue.record.stream.partitions.items()}


def test_a_growing_partition_is_leased_up_to_its_known_end() -> None:
    queue = stream()
    client = Client(queue)
    assert client.ask(want=4).leases == []
    assert client.answer.poll
    assert parts(client.ask(want=1, ends={"a": 4}).leases) == [("a", 0, 4)]
    assert client.finish().leases == []
    assert marks(queue) == {"a": 4}
    assert parts(client.ask(want=1, ends={"a": 25}).leases) == [("a", 4, 10)]
    assert parts(client.finish().leases) == [("a", 10, 20)]
    assert parts(client.finish().leases) == [("a", 20, 25)]
    client.finish()
    assert (marks(queue), client.answer.over) == ({"a": 25}, False)
    assert client.ask(want=1, ends={"a": 27}, ended=True).leases
    assert (client.finish().over, marks(queue)) == (True, {"a": 27})
    assert queue.record.stream.partitions["a"].credited == [(0, 27)], "credits are merged"


def test_partitions_are_leased_in_turn_and_a_watermark_waits_for_the_slowest_range() -> None:
    queue = stream()
    slow, fast = Client(queue, "n0/0"), Client(queue, "n1/0")
    fast.ask()
    (held,) = slow.ask(want=1, ends={"a": 100, "b": 100}).leases
    assert (held.partition, held.start) == ("a", 0)
    assert parts(fast.ask(want=3).leases) == [("b", 0, 10), ("a", 10, 20), ("b", 10, 20)]
    fast.finish(want=0)
    assert marks(queue) == {"a": 0, "b": 20}
    slow.finish()
    assert marks(queue) == {"a": 20, "b": 20}


def test_one_worker_at_a_time_looks_at_the_source() -> None:
    queue = stream()
    clients = [Client(queue, f"n{number}/0") for number in range(3)]
    assert [client.ask(now=5.0).poll for client in clients] == [True, False, False]
    later = 5.0 + POLL_S
    assert [client.ask(now=later).poll for client in clients] == [True, False, False]
    assert not clients[1].ask(now=later + POLL_S, ends={"a": 3}, ended=True).poll


def test_a_lower_end_and_a_late_one_are_ignored() -> None:
    queue = stream()
    client = Client(queue)
    client.ask(ends={"a": 20})
    client.ask(ends={"a": 10, "b": 0})
    client.ask(ends={}, ended=True)
    client.ask(ends={"a": 30, "c": 5})
    ends = {name: part.end for name, part in queue.record.stream.partitions.items()}
    assert ends == {"a": 20, "b": 0}


def test_a_lost_range_comes_first_and_with_what_was_added() -> None:
    queue = stream()
    lost, other = Client(queue, "n0/0"), Client(queue, "n1/0")
    (lease,) = lost.ask(want=1, ends={"a": 6, "b": 50}).leases
    lost.ask(credits=[Credit(token=lease.token, ranges=[(0, 2)])], ends={"a": 15})
    queue.drop("n0/0")
    assert parts(other.ask(want=1).leases) == [("a", 2, 10)]
    assert lost.ask(credits=[Credit(token=lease.token, ranges=[(2, 6)])]).refused == [lease.token]


def test_a_new_master_continues_leases_and_knows_the_ends() -> None:
    queue = stream()
    client = Client(queue)
    (lease,) = client.ask(want=1, ends={"a": 8}).leases
    client.ask(ends={"a": 9})
    assert queue.changed
    again = client.queue = ShardQueue(RECORD.validate_json(RECORD.dump_json(queue.record)))
    again.adopt("n0/0", HeldLease(token=lease.token, position=lease.position, epoch=0), 1.0)
    assert Client(again, "n1/0").ask(now=1.0, want=1).leases == []
    answer = client.finish(now=1.0)
    assert (answer.refused, marks(again)) == ([], {"a": 8})
    assert parts(answer.leases) == [("a", 8, 9)]
    again.adopt("n1/0", HeldLease(token=0, position=7 << 32, epoch=0), 1.0)
    assert again.workers == ["n0/0"]


def test_model_and_watermarks_go_back_together() -> None:
    queue = stream(level=Level.EXACTLY_ONCE_EFFECT)
    client = Client(queue)
    client.ask(want=1, ends={"a": 30, "b": 5})
    client.finish()
    client.finish()
    ledger = Ledger(epoch=0, parts={"a": [(0, 3), (6, 10)], "z": [(0, 4)]})
    again = Client(queue, round=2)
    found = parts(again.ask(want=9, spec=queue.record.spec, ledger=ledger).leases)
    while again.answer.leases:
        found += parts(again.finish(want=9).leases)
    expected = {("a", 3, 6), ("a", 10, 20), ("a", 20, 30), ("b", 0, 5)}
    assert set(found) >= expected
    assert marks(queue) == {"a": 30, "b": 5, "z": 4}
    begins_again = Client(queue, round=3)
    begins_again.ask(spec=queue.record.spec)
    assert marks(queue) == {"a": 0, "b": 0, "z": 0}, "a model without a checkpoint knows nothing"


def test_a_range_in_quarantine_is_passed_and_stays_visible() -> None:
    queue = stream()
    client = Client(queue)
    (lease,) = client.ask(want=1, ends={"a": 25}).leases
    broken = ShardReturn(token=lease.token, why="the file was cut", unreadable=True)
    credit = Credit(token=lease.token, ranges=[(0, 4)])
    client.ask(credits=[credit], returns=[broken], ended=True, want=1)
    while not client.answer.over:
        client.finish()
    part = queue.record.stream.partitions["a"]
    assert (watermark(part), quarantined(part)) == (25, 6)
    assert "units 0 to 9 of partition a are in quarantine" in queue.notes[0]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({f"p{number}": 1 for number in range(1001)}, "1000"),
        ({"a": 2**40}, "larger ranges"),
    ],
)
def test_what_a_queue_cannot_hold_is_refused(ends: dict[str, int], words: str) -> None:
    queue = stream()
    client = Client(queue)
    if len(ends) > 1000:
        client.ask(ends=dict(list(ends.items())[:1000]))
        ends = {"p1000": 1}
    answer = client.ask(ends=ends)
    assert answer.code is AnswerCode.REFUSED
    assert words in answer.why


def test_ledgers_of_the_other_kind_are_refused() -> None:
    queue = stream(level=Level.EXACTLY_ONCE_EFFECT)
    answer = Client(queue).ask(spec=queue.record.spec, ledger=Ledger(epoch=1))
    assert answer.code is AnswerCode.REFUSED
    plain = ShardQueue(QueueRecord(spec=DatasetSpec(sizes=[(2, 2)])))
    ledger = Ledger(epoch=0, parts={"a": [(0, 1)]})
    assert Client(plain).ask(spec=plain.record.spec, ledger=ledger).code is AnswerCode.REFUSED
    for wrong in ({}, {"sizes": [(1, 1)], "range_size": 4}):
        with pytest.raises(ValueError, match="either sizes of shards"):
            DatasetSpec(**wrong)


def test_open_ranges_and_the_record_are_bounded() -> None:
    queue = stream(range_size=1000)
    ends = {f"part-{number:04}.jsonl": 10**9 for number in range(1000)}
    Client(queue).ask(ends=ends)
    clients = [Client(queue, f"n{number}/0") for number in range(40)]
    for client in clients:
        client.ask(want=64)
    held = sum(len(client.answer.leases) for client in clients)
    assert held == MAX_OPEN
    for _ in range(20):
        for client in clients[1:]:
            client.finish(want=64)
    assert queue.record.stream.partitions.keys() == ends.keys()
    assert len(RECORD.dump_json(queue.record)) < 200_000
