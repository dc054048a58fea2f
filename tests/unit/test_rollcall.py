"""Who waits for whom is said once, by the lowest of those that wait."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import rollcall
from dlrover_py.trainer.rollcall import CollectiveWait, KeyValueStore, RollCall

DEADLINE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Table:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int, /) -> int:
        with self._lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = b"%d" % total
            return total

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


class Broken(Table):
    def fail(self, *_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    add = set = get = check = fail  # type: ignore[assignment]


class Ranks:
    """All ranks of a world, each in a thread of its own where it waits."""

    def __init__(self, world: int, store: KeyValueStore | None) -> None:
        self.clock = Clock()
        self.said: list[tuple[int, str]] = []
        self.heard = threading.Condition()
        self.pool = ThreadPoolExecutor(world)
        self.ranks = [
            RollCall(
                *(r, world, store),
                name="test",
                report=self.say(r),
                clock=self.clock,
                look_interval_s=0.01,
            )
            for r in range(world)
        ]

    def call_of(self, rank: int) -> str:
        """The call that a rank waits in, as far as rank 0 knows."""
        return self.ranks[0]._call_of(rank)

    def say(self, rank: int) -> Callable[[str], None]:
        def say(words: str) -> None:
            with self.heard:
                self.said.append((rank, words))
                self.heard.notify_all()

        return say

    def until_said(self, count: int) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.said) >= count, DEADLINE_S)


@pytest.fixture(params=["torch", "table"])
def store(request: pytest.FixtureRequest) -> KeyValueStore:
    return dist.HashStore() if request.param == "torch" else Table()


def test_where_all_come_nothing_is_said(store: KeyValueStore) -> None:
    three = Ranks(3, store)
    for number in range(3):
        calls = [three.pool.submit(r.check_in, "load()", f"load() {number}") for r in three.ranks]
        for call in calls:
            call.result(DEADLINE_S)
    assert three.said == []


def test_a_rank_that_does_not_come_is_named_once(store: KeyValueStore) -> None:
    three = Ranks(3, store)
    for number in (1, 2):
        calls = [
            three.pool.submit(three.ranks[r].check_in, "save()", "save() of step 7") for r in (0, 2)
        ]
        until_begun(store, f"save()/{number}", 2)
        three.clock.now += 4  # in steps: who waits says so before others look for it
        until_posted(three, 0, 2)
        three.clock.now += 2
        three.until_said(1)
        calls.append(three.pool.submit(three.ranks[1].check_in, "save()", "save() of step 7"))
        for call in calls:
            call.result(DEADLINE_S)
        assert [three.call_of(r) for r in range(3)] == ["", "", ""], number
    ((rank, words),) = three.said
    assert rank == 0
    assert words.startswith("rank 0 has waited 6 s in save() of step 7 for rank 1, which is not")
    assert "call save() on every rank, and not only `if rank == 0:`" in words


def until(look: Callable[[], object]) -> None:
    tick, waited = threading.Event(), 0.0
    while not look():
        assert (waited := waited + 0.01) < DEADLINE_S
        tick.wait(0.01)


def until_posted(ranks: Ranks, *waiting: int) -> None:
    until(lambda: all(ranks.call_of(r) for r in waiting))


def until_begun(store: KeyValueStore, key: str, count: int = 1) -> None:
    key = f"dlrover/test/{key}"
    until(lambda: store.check([key]) and int(store.get(key)) >= count)


def test_ranks_in_different_calls_are_told(store: KeyValueStore) -> None:
    two = Ranks(2, store)
    wrong = [
        two.pool.submit(two.ranks[0].check_in, "save()", "save() of step 7"),
        two.pool.submit(two.ranks[1].check_in, "load()", "load()"),
    ]
    until_begun(store, "save()/1")
    until_begun(store, "load()/1")
    two.clock.now += 4
    until_posted(two, 0, 1)
    two.clock.now += 2
    two.until_said(1)
    assert two.said == [
        (
            0,
            "rank 0 has waited 6 s in save() of step 7, and rank 1 in load(): make the same calls "
            "on every rank, in the same order",
        )
    ]
    two.clock.now += rollcall.CHECK_IN_LIMIT_S
    for call in wrong:
        with pytest.raises(ConfigError, match="was not called on every rank"):
            call.result(DEADLINE_S)


def test_a_collective_under_way_is_looked_at(store: KeyValueStore) -> None:
    two = Ranks(2, store)
    with two.ranks[1].report_missing_ranks("close()", "close()"):
        two.clock.now += 6
        two.until_said(1)
        assert "rank 1 has waited 6 s in close() for rank 0" in two.said[0][1]
        until_posted(two, 1)
    assert two.call_of(1) == ""
    two.ranks[1].close()
    thread = two.ranks[1]._thread
    assert thread is not None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("store", [None, Broken()], ids=["none", "broken"])
def test_without_a_store_the_call_is_named(store: KeyValueStore | None) -> None:
    two = Ranks(2, store)
    two.ranks[0].check_in("save()", "save() of step 7")  # which does not wait
    wait = CollectiveWait("save()", "save() of step 7", two.clock())
    for _ in range(9):
        two.clock.now += 1
        two.ranks[0].look(wait)
    assert two.said == [
        (
            0,
            "rank 0 has waited 5 s in save() of step 7 for other ranks: call save() on every rank, "
            "and not only `if rank == 0:`",
        )
    ]


@given(st.lists(st.sampled_from(["", "save() of step 1", "load()"]), min_size=2, max_size=30))
def test_the_lowest_that_waits_speaks_for_all(calls: list[str]) -> None:
    ranks = Ranks(len(calls), Table())
    waits = {
        r: CollectiveWait(call[:6], call, ranks.clock()) for r, call in enumerate(calls) if call
    }
    for _ in range(9):
        ranks.clock.now += 1
        for r, wait in waits.items():
            ranks.ranks[r].look(wait)
    absent = [r for r, call in enumerate(calls) if not call]
    if not waits or len(set(calls)) == 1:
        assert ranks.said == []
        return
    ((rank, words),) = ranks.said
    assert rank == min(waits)
    if absent:
        shown = ", ".join(map(str, absent[: rollcall.MAX_NAMED]))
        assert f" for rank{'s' * (len(absent) > 1)} {shown}" in words
        assert (f" and {len(absent) - rollcall.MAX_NAMED} more" in words) == (
            len(absent) > rollcall.MAX_NAMED
        )
