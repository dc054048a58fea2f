"""Which rows get memory on the servers, and which lose it: primaries and backups do the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import specs
from dlrover_py.ps.counts import RecentCounts
from dlrover_py.ps.hashing import bucket_of, salt_of
from dlrover_py.ps.specs import Keep, TableSpec, check_table
from dlrover_py.ps.store import Store, Table
from tests.ps_threads import client, servers

DIM = 4


def spec(keep: Keep) -> TableSpec:
    return TableSpec("t", DIM, specs.adagrad(0.1), specs.uniform(-1, 1), keep)


def ones(count: int) -> Any:
    return np.ones((count, DIM), np.float32)


def test_a_million_new_ids_need_no_more_memory_than_allowed() -> None:
    table = Table(spec(specs.keep(max_rows=20_000)), 8)
    before = table.read(np.arange(100))
    sizes = []
    for start in range(0, 1_000_000, 10_000):
        table.apply(np.arange(start, start + 10_000), ones(10_000))
        sizes.append(len(table))
    assert max(sizes) <= 30_000
    assert table.nbytes <= 32_768 * (4 * DIM * 2 + 8)
    assert (table.read(np.arange(100)) == before).all(), "an id that was dropped has other values"
    newest = np.arange(999_000, 1_000_000)
    assert (table.read(newest) != Table(spec(Keep())).read(newest)).all()


def test_rows_that_are_pushed_stay() -> None:
    table = Table(spec(specs.keep(max_rows=1000)))
    hot = np.arange(100)
    for start in range(1000, 21_000, 100):
        table.apply(np.concatenate([hot, np.arange(start, start + 100)]), ones(200))
    (ids, _, steps, _) = table.bucket(0, 1)
    assert len(ids) <= 1200
    assert (steps[np.isin(ids, hot)] == 200).all()
    assert np.isin(hot, ids).all()


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), max_size=25),
    st.integers(1, 40), st.integers(1, 3),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_backup_has_the_rows_of_its_primary(
    pushes: list[list[int]], most: int, count: int
) -> None:
    primary, backup, learner = Store(4), Store(4), Store(4)
    for store in (primary, backup, learner):
        store.add([spec(specs.keep(min_count=count, max_rows=most))])
    for push in pushes:
        ids = np.array(push, np.int64)
        buckets = set(bucket_of(ids, salt_of("t"), 4).tolist())
        backup.install(primary.apply([("t", [ids, ones(len(ids))])], buckets), buckets)
    for bucket in range(4):
        learner.install(primary.copy(bucket), [bucket])
        rows = [one.copy(bucket)[0][1] for one in (primary, backup, learner)]
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


@pytest.mark.parametrize("keep", [Keep(0), Keep(201), Keep(1, -1)])
def test_wrong_numbers_are_refused(keep: Keep) -> None:
    with pytest.raises(ConfigError, match="min_count of 1 to 200"):
        check_table(spec(keep))
