"""Which rows get memory on the servers, and which lose it: primaries and backups do the same."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import specs
from dlrover_py.ps.counts import RecentCounts
from dlrover_py.ps.hashing import Ids, bucket_of, salt_of
from dlrover_py.ps.specs import Keep, TableSpec, check_table
from dlrover_py.ps.store import MAX_EXPIRED, Store, Table
from tests.ps_rows import copied, rows_of
from tests.ps_threads import client, servers

DIM = 4


def spec(keep: Keep) -> TableSpec:
    return TableSpec("t", DIM, specs.adagrad(0.1), specs.uniform(-1, 1), keep)


def ones(count: int) -> Any:
    return np.ones((count, DIM), np.float32)


def pushed(table: Table, ids: Ids, now: float) -> tuple[Ids, int]:
    """Push rows; return the ids of the rows that were dropped, and the length of the record."""
    found = table.apply(ids, ones(len(ids)), now)
    return found[0].view(np.int64)[found[2].view(np.int64) < 0], len(found[0])


def test_a_million_new_ids_need_no_more_memory_than_allowed() -> None:
    table = Table(spec(specs.keep(max_rows=20_000)), 8)
    before = table.read(np.arange(100))
    sizes = []
    for start in range(0, 1_000_000, 10_000):
        table.apply(np.arange(start, start + 10_000), ones(10_000))
        sizes.append(len(table))
    assert max(sizes) <= 30_000
    assert table.nbytes <= 30_000 * (4 * DIM * 2 + 8 + 8 + 4 + 8)
    assert (table.read(np.arange(100)) == before).all(), "an id that was dropped has other values"
    newest = np.arange(999_000, 1_000_000)
    assert (table.read(newest) != Table(spec(Keep())).read(newest)).all()


def test_rows_that_are_pushed_stay() -> None:
    table = Table(spec(specs.keep(max_rows=1000)))
    hot = np.arange(100)
    for start in range(1000, 21_000, 100):
        table.apply(np.concatenate([hot, np.arange(start, start + 100)]), ones(200))
    (ids, _, steps, _) = rows_of(table)
    assert len(ids) <= 1200
    assert (steps[np.isin(ids, hot)] == 200).all()
    assert np.isin(hot, ids).all()


def test_rows_that_are_only_read_stay_too() -> None:
    store = Store(1)
    store.add([spec(specs.keep(max_rows=1000, ttl_s=40.0))])
    hot, ids = np.arange(100), np.arange(1000, 21_000)
    store.apply([("t", [hot, ones(100)])], range(1))
    for part in np.split(ids, 200):
        store.now += 1.0
        store.read([("t", [hot])], range(1), {})
        store.apply([("t", [part, ones(100)])], range(1))
    (kept, _, steps, _) = rows_of(store.tables["t"])
    assert len(kept) <= 1200
    assert np.isin(hot, kept).all()
    assert (steps[np.isin(kept, hot)] == 1).all()
    for part in np.split(ids, 200):
        store.now += 1.0
        store.tables["t"].read(hot)  # this is no use
        store.apply([("t", [part, ones(100)])], range(1))
    assert not np.isin(hot, rows_of(store.tables["t"])[0]).any()


def test_rows_of_a_bucket_that_gets_another_primary_are_used_then() -> None:
    """Only the primary before knew which of them were read: what they had learnt went soon."""
    store = Store(2)
    store.add([spec(specs.keep(max_rows=1000, ttl_s=40.0))])
    ids = np.arange(1000)
    store.apply([("t", [ids, ones(1000)])], range(2))
    store.now += 39.0
    store.use([0])
    store.now += 2.0
    for new in np.arange(10_000, 10_400).reshape(4, 100):
        store.now += 1.0
        store.apply([("t", [new, ones(100)])], range(2))
    led, other = (rows_of(store.tables["t"], bucket)[0] for bucket in range(2))
    assert np.isin(led, ids).any()
    assert not np.isin(other, ids).any()


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), max_size=25),
    st.integers(0, 40), st.integers(1, 3), st.sampled_from([0.0, 2.0, 8.0]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_backup_has_the_rows_of_its_primary(
    pushes: list[list[int]], most: int, count: int, ttl_s: float
) -> None:
    primary, backup, learner = Store(4), Store(4), Store(4)
    for store in (primary, backup, learner):
        store.add([spec(specs.keep(min_count=count, max_rows=most, ttl_s=ttl_s))])
    for push in pushes:
        primary.now += 1.0  # the clock of the backup is another one
        ids = np.array(push, np.int64)
        buckets = set(bucket_of(ids, salt_of("t"), 4).tolist())
        backup.install(primary.apply([("t", [ids, ones(len(ids))])], buckets), buckets)
    for bucket in range(4):
        learner.install(copied(primary, bucket), [bucket])
        rows = [copied(one, bucket)[0][1] for one in (primary, backup, learner)]
        for array, other, copy in zip(*rows, strict=True):
            first, second, third = (np.argsort(one[0]) for one in rows)
            assert (array[first] == other[second]).all()
            assert (array[first] == copy[third]).all()


def test_a_cut_has_the_rows_that_were_kept(tmp_path: Path) -> None:
    few = spec(specs.keep(max_rows=800))
    ids = np.arange(5000)
    with servers(tmp_path, cuts=str(tmp_path / "cuts")) as access, client(access) as worker:
        worker.create(few)
        for start in range(0, 5000, 500):
            worker.push({"t": (ids[start : start + 500], ones(500))}).result(60)
        saved = worker.pull({"t": ids}).result(60)["t"]
        worker.save(1, 1)
        worker.push({"t": (ids, ones(5000))}).result(60)
        assert worker.restore(1, 1) == 1
        assert (worker.pull({"t": ids}).result(60)["t"] == saved).all()
    changed = (saved != Table(spec(Keep())).read(ids)).all(axis=1)
    assert 500 <= changed.sum() <= 1300
    assert changed[-500:].all()
    assert not changed[:500].any()


def test_an_id_gets_a_row_when_it_has_come_often_enough() -> None:
    table = Table(spec(specs.keep(min_count=3)))
    first = table.read(np.arange(2))
    for times in range(1, 4):
        table.apply(np.array([0, 0, 1][: 3 if times == 1 else 2]), ones(3 if times == 1 else 2))
        assert len(table) == (1 if times == 3 else 0)
    assert (table.read(np.arange(2))[1] == first[1]).all()
    assert (table.read(np.arange(2))[0] != first[0]).all()


def test_counts_are_halved_and_do_not_overflow() -> None:
    counts, one = RecentCounts(1 << 10), np.array([7])
    for expected in (1, 2, 3, 4):
        assert counts.add(one).tolist() == [expected]
    for _ in range(300):
        found = counts.add(one)
    assert found.tolist() == [255]
    counts.add(np.arange(100, 900))
    assert counts.add(one)[0] < 255


def test_rows_that_nobody_pushes_are_dropped_in_time() -> None:
    table = Table(spec(specs.keep(ttl_s=80.0)))
    first = table.read(np.arange(3))
    table.apply(np.arange(3), ones(3), 1000.0)
    for now in range(1010, 1090, 10):
        table.apply(np.array([0]), ones(1), float(now))
        assert len(table) == 3
    (ids, _, steps, _) = table.apply(np.array([0]), ones(1), 1090.5)
    assert sorted(zip(ids.tolist(), steps.tolist(), strict=True)) == [(0, 10), (1, -1), (2, -1)]
    assert len(table) == 1
    assert (table.read(np.arange(3))[1:] == first[1:]).all(), "they begin with the same values"
    table.apply(np.array([1]), ones(1), 1091.0)
    assert len(table) == 2
    assert table.nbytes == 3 * (4 * DIM * 2 + 8 + 8 + 4 + 8), (
        "the time of each row takes memory, too"
    )


def test_old_rows_of_a_bucket_that_nobody_pushes_stay_until_then() -> None:
    """The copies of a bucket learn only of pushes."""
    ids = np.arange(100)
    of = bucket_of(ids, salt_of("t"), 2)
    table = Table(spec(specs.keep(ttl_s=10.0)), 2)
    table.apply(ids, ones(100), 0.0)
    quiet, busy = ids[of == 0], ids[of == 1]
    table.apply(busy[:1], ones(1), 20.0)
    assert len(table) == len(quiet) + 1
    table.apply(quiet[:1], ones(1), 20.0)
    assert len(table) == 2


def test_rows_that_expire_together_are_dropped_by_several_pushes() -> None:
    """One push dropped all: half a million rows took 2.3 s, and 251 MB on the way to the copy."""
    table, ids = Table(spec(specs.keep(ttl_s=10.0)), 2), np.arange(50_000)
    table.apply(ids, ones(len(ids)), 0.0)
    dropped: list[int] = []
    for _ in range(10):
        gone, changed = pushed(table, ids[:10], 100.0)
        assert changed <= MAX_EXPIRED + 10
        dropped += gone.tolist()
        if len(table) == 10:
            break
    assert sorted(dropped) == ids[10:].tolist()


def test_old_rows_that_are_pushed_or_dropped_before_their_turn_stay_as_they_are() -> None:
    table, ids = Table(spec(specs.keep(ttl_s=80.0))), np.arange(3 * MAX_EXPIRED)
    table.apply(ids, ones(len(ids)), 0.0)
    gone, _ = pushed(table, ids[:1], 100.0)
    waiting = np.setdiff1d(ids[1:], gone)
    used, removed, last = waiting[:5], waiting[5:10], waiting[10:]
    table.install([removed, ones(5), np.full(5, -1), ones(5)], 101.0)
    table.apply(used, ones(5), 101.0)
    table.install([removed[:1], ones(1), np.full(1, 7), ones(1)], 101.0)
    for _ in range(3):
        table.apply(ids[:1], ones(1), 101.0)
    found = rows_of(table)
    assert sorted(found[0].tolist()) == sorted([0, *used, removed[0]])
    assert not np.isin(last, found[0]).any()


def test_all_rows_are_looked_at_eight_times_in_their_time_to_live() -> None:
    """Each bucket had a time of its own, so nearly every push read all rows of the table."""
    ids = np.arange(100)
    of = bucket_of(ids, salt_of("t"), 2)
    here, (other, old) = ids[of == 0][:1], ids[of == 1][:2]
    table = Table(spec(specs.keep(ttl_s=80.0)), 2)
    table.apply(np.array([*here, other, old]), ones(3), 1000.0)
    for now, one, count in (
        (1075.0, here, 3),  # a look at all rows, the next is at 1085
        (1081.0, [other], 3),
        (1085.0, here, 3),  # a row of the other bucket is old
        (1086.0, [other], 2),
    ):
        table.apply(np.array(one), ones(1), now)
        assert len(table) == count


def test_a_copy_counts_as_pushed_when_it_was_made() -> None:
    old, new = Store(2), Store(2)
    for store in (old, new):
        store.add([spec(specs.keep(ttl_s=10.0))])
    ids = np.arange(50)
    old.apply([("t", [ids, ones(50)])], range(2))
    new.now = 1005.0
    for bucket in range(2):
        new.install(copied(old, bucket), [bucket])
    for now, count in ((1014.0, 50), (1016.0, 1)):
        new.now = now
        new.apply([("t", [ids[:1], ones(1)])], range(2))
        inside = bucket_of(ids, salt_of("t"), 2) == bucket_of(ids[:1], salt_of("t"), 2)
        gone = 0 if count == 50 else int(inside.sum()) - 1
        assert len(new.tables["t"]) == 50 - gone


def test_servers_drop_rows_by_their_clock(tmp_path: Path) -> None:
    short = spec(specs.keep(ttl_s=1.0))
    ids = np.arange(400)
    first = Table(short).read(ids)
    with servers(tmp_path) as access, client(access) as worker:
        worker.create(short)
        worker.push({"t": (ids, ones(400))}).result(60)
        assert (worker.pull({"t": ids}).result(60)["t"] != first).any(axis=1).all()
        pause, deadline = threading.Event(), time.monotonic() + 60
        while time.monotonic() < deadline:
            for _ in range(30):  # longer than a row stays: a pull is a use of all rows
                pause.wait(0.05)
                worker.push({"t": (ids[200:], ones(200))}).result(60)
            rows = worker.pull({"t": ids}).result(60)["t"]
            if (rows[:200] == first[:200]).all():
                break
        assert (rows[:200] == first[:200]).all()
        assert (rows[200:] != first[200:]).any(axis=1).all()


@pytest.mark.parametrize("ttl_s", [-1.0, 0.5, float("nan"), float("inf")])
def test_a_wrong_time_to_live_is_refused(ttl_s: float) -> None:
    with pytest.raises(ConfigError, match="ttl_s of 0, or of 1 to"):
        check_table(spec(Keep(ttl_s=ttl_s)))


@pytest.mark.parametrize("keep", [Keep(0), Keep(201), Keep(1, -1)])
def test_wrong_numbers_are_refused(keep: Keep) -> None:
    with pytest.raises(ConfigError, match="min_count of 1 to 200"):
        check_table(spec(keep))
