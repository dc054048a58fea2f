"""Tables of the parameter server: the index, first values, and optimizers against torch's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import specs
from dlrover_py.ps.hashing import bucket_of, first_rows, salt_of
from dlrover_py.ps.index import IdIndex
from dlrover_py.ps.specs import TableSpec, check_table
from dlrover_py.ps.store import Store, Table, sorted_unique
from tests.ps_rows import copied

IDS = st.integers(-(2**63), 2**63 - 1)


def array(ids: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.array(ids, np.int64)


@given(st.lists(st.tuples(st.sets(IDS | st.integers(0, 30), max_size=40), st.booleans())))
@settings(deadline=None)
def test_the_index_is_a_dictionary(steps: list[tuple[set[int], bool]]) -> None:
    index, model, number = IdIndex(), dict[int, int](), 0
    for ids, remove in steps:
        if remove:
            gone = [one for one in ids if one in model]
            index.remove(array(gone))
            for one in gone:
                del model[one]
        else:
            new = [one for one in ids if one not in model]
            index.insert(array(new), array(range(number, number + len(new))))
            for one in new:
                model[one] = number
                number += 1
        asked = [*ids, *model]
        assert index.find(array(asked)).tolist() == [model.get(one, -1) for one in asked]
        assert len(index) == len(model)
    ids_, rows = index.items()
    assert dict(zip(ids_.tolist(), rows.tolist(), strict=True)) == model


def test_the_index_grows() -> None:
    index = IdIndex()
    ids = np.random.default_rng(1).permutation(200_000).astype(np.int64) * 8
    for part in np.array_split(ids, 7):
        index.insert(part, part // 8)
    assert (index.find(ids) == ids // 8).all()
    assert (index.find(ids + 1) == -1).all()


def test_the_index_is_right_while_it_moves_into_a_larger_one() -> None:
    index = IdIndex()
    ids = np.random.default_rng(1).permutation(20_000).astype(np.int64)
    here = np.zeros(20_000, np.bool_)
    for number, part in enumerate(np.array_split(ids, 400)):
        index.insert(part, part + 1)
        here[part] = True
        if number % 3 == 2:  # some of these were moved, some are in the old places only
            gone = ids[: 50 * number : 7]
            gone = gone[here[gone]]
            index.remove(gone)
            here[gone] = False
            index.insert(gone[::2], gone[::2] + 1)
            here[gone[::2]] = True
        assert (index.find(ids) == np.where(here[ids], ids + 1, -1)).all()
        assert len(index) == here.sum()
        found, rows = index.items()
        assert (np.sort(found) == np.flatnonzero(here)).all()
        assert (rows == found + 1).all()


@given(st.lists(st.integers(-3, 3)))
def test_ids_are_sorted_and_each_is_there_once(ids: list[int]) -> None:
    assert sorted_unique(array(ids)).tolist() == sorted(set(ids))


def test_a_table_grows_without_a_copy_of_its_rows() -> None:
    table, ids = Table(TableSpec("t", 4, specs.adagrad(0.1)), 4), np.arange(5000)
    grads = np.ones((len(ids), 4), np.float32)
    table.apply(ids, grads)
    before = table.read(ids)
    for start in range(5000, 50_000, 5000):
        table.apply(np.arange(start, start + 5000), grads)
    assert (table.read(ids) == before).all()
    assert sum(len(table.rows_in(bucket)) for bucket in range(4)) == len(table) == 50_000


def test_a_bucket_is_read_in_parts() -> None:
    store, ids = Store(2), np.arange(300)
    store.add([TableSpec("a", 1, specs.sgd(1.0)), TableSpec("b", 2, specs.adagrad(0.1))])
    store.add([TableSpec("empty", 1)])
    grads = np.ones((300, 2), np.float32)
    store.apply([("a", [ids, grads[:, :1]]), ("b", [ids, grads])], range(2))
    parts = list(store.parts(0, 1000))
    assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
    sizes = [sum(array.nbytes for _, arrays in part for array in arrays) for part, _ in parts]
    assert max(sizes) <= 1000
    assert len(parts) > 4
    (whole,) = (part for part, _ in store.parts(0, 1 << 20))
    for name, arrays in whole:
        found = [of for part, _ in parts for table, of in part if table == name]
        for array, column in zip(arrays, zip(*found, strict=True), strict=True):
            assert (np.concatenate(column) == array).all()


def test_first_rows_depend_on_id_and_table_only() -> None:
    init = specs.normal(seed=5)
    ids = array([7, -3, 2**62])
    rows = first_rows(ids, salt_of("a"), 16, init)
    assert (first_rows(ids[::-1].copy(), salt_of("a"), 16, init)[::-1] == rows).all()
    assert not (first_rows(ids, salt_of("b"), 16, init) == rows).any()
    assert not (first_rows(ids, salt_of("a"), 16, specs.normal(seed=6)) == rows).any()


def test_first_rows_have_their_distribution() -> None:
    ids = np.arange(20_000, dtype=np.int64)
    rows = first_rows(ids, 1, 8, specs.normal(2.0, 0.5)).astype(np.float64)
    assert rows.mean() == pytest.approx(2.0, abs=0.01)
    assert rows.std() == pytest.approx(0.5, abs=0.01)
    assert np.abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.05
    even = first_rows(ids, 1, 8, specs.uniform(-1.0, 3.0))
    assert even.min() >= -1.0
    assert even.max() <= 3.0
    assert even.mean() == pytest.approx(1.0, abs=0.02)


def test_buckets_are_even() -> None:
    counts = np.bincount(bucket_of(np.arange(64_000, dtype=np.int64), salt_of("t"), 64))
    assert counts.min() > 850
    assert counts.max() < 1150


TORCHS: list[tuple[specs.OptimizerSpec, Callable[[Any], torch.optim.Optimizer]]] = [
    (specs.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (
        specs.sgd(0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    (specs.adagrad(0.1, start=0.5), lambda p: torch.optim.Adagrad(
        p, 0.1, initial_accumulator_value=0.5)),
    (specs.adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "theirs"), TORCHS)
def test_rows_are_those_of_torch(spec: specs.OptimizerSpec, theirs: Any) -> None:
    """Each id is a parameter of torch's, which has a gradient only when the id is in the push."""
    random = np.random.default_rng(3)
    table = Table(TableSpec("t", 4, spec, specs.normal(seed=2)))
    ids = np.arange(12, dtype=np.int64) * 1_000_003
    parameters = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in table.read(ids)]
    optimizer = theirs(parameters)
    for _ in range(60):
        chosen = random.integers(0, 12, random.integers(1, 20))  # with repetitions
        grads = random.normal(size=(len(chosen), 4)).astype(np.float32)
        optimizer.zero_grad(set_to_none=True)
        for one in np.unique(chosen):
            parameters[one].grad = torch.from_numpy(grads[chosen == one].sum(0))
        optimizer.step()
        record = table.apply(ids[chosen], grads)
        assert sorted(record[0].tolist()) == ids[np.unique(chosen)].tolist()
        expected = torch.stack(list(parameters)).detach().numpy()
        np.testing.assert_allclose(table.read(ids), expected, rtol=2e-6, atol=1e-6)


def test_row_adagrad_and_ftrl_follow_their_formulas() -> None:
    random = np.random.default_rng(4)
    lr, l1, l2 = 0.1, 0.05, 0.01
    rowwise = Table(TableSpec("r", 3, specs.row_adagrad(lr, start=0.1)))
    ftrl = Table(TableSpec("f", 3, specs.ftrl(lr, l1=l1, l2=l2), specs.normal(seed=1)))
    ids = array([5])
    w, total = rowwise.read(ids)[0].astype(float), 0.1
    v = ftrl.read(ids)[0].astype(float)
    z, n = -v * (1 / lr + l2) - np.sign(v) * l1, np.zeros(3)
    for _ in range(50):
        grad = random.normal(size=(1, 3)).astype(np.float32)
        g = grad[0].astype(float)
        total += (g * g).mean()
        w -= lr * g / (np.sqrt(total) + 1e-10)
        z += g - (np.sqrt(n + g * g) - np.sqrt(n)) / lr * v
        n += g * g
        v = np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((1 + np.sqrt(n)) / lr + l2))
        rowwise.apply(ids, grad)
        ftrl.apply(ids, grad)
        assert np.allclose(rowwise.read(ids)[0], w, rtol=1e-5, atol=1e-6)
        assert np.allclose(ftrl.read(ids)[0], v, rtol=1e-4, atol=1e-5)


@given(st.integers(0, 7), st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_a_copied_bucket_goes_on_as_its_original(bucket: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ours, theirs = Store(8), Store(8)
    for store in (ours, theirs):
        store.add([TableSpec("a", 3, specs.adam(0.1)), TableSpec("b", 2, specs.sgd(1.0))])
    ids = random.integers(-50, 50, 64)
    push: Any = [
        ("a", [ids, random.normal(size=(64, 3)).astype(np.float32)]),
        ("b", [ids, random.normal(size=(64, 2)).astype(np.float32)]),
    ]
    ours.apply(push, range(8))
    theirs.install(copied(ours, bucket), [bucket])
    ours.drop([one for one in range(8) if one != bucket])
    for _ in range(2):
        records = [store.apply(push, [bucket]) for store in (ours, theirs)]
        for (name, mine), (other, its) in zip(*records, strict=True):
            assert name == other
            assert all((x == y).all() for x, y in zip(mine, its, strict=True))
        assert [len(table) for table in ours.tables.values()] == [
            len(table) for table in theirs.tables.values()
        ]


def test_rows_are_used_again_after_a_drop() -> None:
    store = Store(2)
    store.add([TableSpec("t", 2, specs.sgd(1.0), specs.uniform(0.0, 0.0))])
    ids = np.arange(1000, dtype=np.int64)
    for _ in range(5):
        store.apply([("t", [ids, np.ones((1000, 2), np.float32)])], range(2))
        assert (store.tables["t"].read(ids) == -1).all()
        store.drop([0, 1])
    assert store.tables["t"].nbytes == 1000 * (2 * 4 + 8 + 8 + 4)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ([("x", [array([1])])], "expected a table of this job"),
        ([("t", [array([1])])], "expected 2 arrays"),
        ([("t", [np.array([1], np.int32), np.ones((1, 2), np.float32)])], "ids as int64"),
        ([("t", [array([1]), np.ones((1, 2))])], "gradients as float32"),
        ([("t", [array([1]), np.ones((1, 3), np.float32)])], "gradients as float32"),
        ([("t", [array([1]), np.full((1, 2), np.nan, np.float32)])], "not a number"),
        ([("t", [np.arange(99), np.ones((99, 2), np.float32)])], "does not name"),
    ],
)
def test_a_wrong_push_is_refused_with_words(payload: Any, words: str) -> None:
    store = Store(8)
    store.add([TableSpec("t", 2)])
    assert words in store.fault(payload, [0], grads=True)


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec("", 2),
        TableSpec("a b", 2),
        TableSpec("t", 0),
        TableSpec("t", 10**6),
        TableSpec("t", 2, specs.sgd(-1.0)),
        TableSpec("t", 2, specs.sgd(float("nan"))),
        TableSpec("t", 2, specs.ftrl(0.0)),
        TableSpec("t", 2, specs.adam(0.1, betas=(1.0, 0.9))),
        TableSpec("t", 2, init=specs.normal(seed=-1)),
    ],
)
def test_a_wrong_table_is_refused(spec: TableSpec) -> None:
    with pytest.raises(ConfigError, match=r"expected|must|needs"):
        check_table(spec)


@pytest.mark.parametrize(
    "optimizer",
    [
        specs.adagrad(0.1, eps=0.0),
        specs.row_adagrad(0.1, eps=0.0),
        specs.adam(0.1, eps=1e-50),
        specs.ftrl(0.1, beta=0.0),
    ],
)
def test_constants_that_divide_a_gradient_of_0_by_0_are_refused(
    optimizer: specs.OptimizerSpec,
) -> None:
    """The rows became NaN."""
    with pytest.raises(ConfigError, match="above 0, found"):
        check_table(TableSpec("t", 2, optimizer))


def test_ftrl_divides_by_its_penalty_alone() -> None:
    spec = TableSpec("t", 2, specs.ftrl(0.1, beta=0.0, l2=0.5), specs.uniform(0.0, 1.0))
    check_table(spec)
    table = Table(spec)
    before = table.read(np.array([1])).copy()
    table.apply(np.array([1]), np.zeros((1, 2), np.float32))
    assert table.read(np.array([1])) == pytest.approx(before)
