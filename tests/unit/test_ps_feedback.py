"""The largest values of gradients only: what is left out arrives later, and nothing is lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps.cluster_map import ClusterMap, Placement
from dlrover_py.ps.codecs import decode, with_columns
from dlrover_py.ps.feedback import Feedback
from dlrover_py.ps.request_rows import SentTables
from dlrover_py.ps.specs import Formats, RowFormat, TableSpec, formats, sgd, uniform
from tests.ps_threads import client, servers

DIM = 1000
SAMPLES = 200


def fit(push: Formats | None, *, remember: bool = True) -> float:
    """Return the loss of a logistic regression after some steps.

    Args:
        push: How gradients are sent. None: whole.
        remember: Whether what was left out is sent later.
    """
    draws = np.random.default_rng(5)
    features = draws.normal(size=(SAMPLES, DIM)).astype(np.float32)
    labels = (features @ draws.normal(size=DIM) > 0).astype(np.float32)
    weights, one = np.zeros(DIM, np.float32), np.zeros(1, np.int64)

    def loss() -> float:
        signs = np.where(labels > 0, 1, -1)
        return float(np.log1p(np.exp(-signs * (features @ weights))).mean())

    kept = Feedback(DIM, push or Formats())
    for _ in range(400):
        grads = (features.T @ (1 / (1 + np.exp(-features @ weights)) - labels) / SAMPLES)[None]
        if push is not None:
            kept = kept if remember else Feedback(DIM, push)
            _, arrays, rest = kept.encode(one, grads, 0)
            kept.keep(rest)
            assert sum(array.nbytes for array in arrays) <= 0.03 * grads.nbytes
            grads = decode(arrays, DIM)
        weights -= np.float32(0.05) * grads[0]
    return loss()


@pytest.mark.parametrize("push", ["fp16", "bf16", "int8"])
def test_one_percent_of_the_values_is_enough_with_memory_and_not_without(push: str) -> None:
    whole, few = fit(None), formats(push=push, top=DIM // 100)
    assert fit(few) <= 1.02 * whole
    assert fit(few, remember=False) > 1.02 * whole


def test_the_memory_is_sent_when_it_is_full() -> None:
    rows = np.random.default_rng(1).normal(size=(290, 8)).astype(np.float32)
    ids = np.arange(290) * 7
    kept, sums = Feedback(8, Formats(top=2), 4 * 8 * 40), np.zeros((2100, 8), np.float64)
    sizes = []
    for start in range(0, 290, 10):
        sent, arrays, rest = kept.encode(ids[start : start + 10], rows[start : start + 10], 0)
        kept.keep(rest)
        found = decode(arrays, 8)
        assert found is not None
        sums[sent] += found
        sizes.append(len(sent))
    assert set(sizes) == {10, 50}
    last, left = kept.unsent()
    assert 0 < len(last) <= 40
    sums[last] += left
    assert np.allclose(sums[ids], rows, atol=1e-6)


def test_no_gradient_is_lost_when_the_tables_are_saved(tmp_path: Path) -> None:
    spec = TableSpec("t", 64, sgd(1.0), uniform(0.0, 0.0))
    ids = np.arange(100)
    grads = np.random.default_rng(2).normal(size=(100, 64)).astype(np.float32)
    with (
        servers(tmp_path, cuts=str(tmp_path / "cuts")) as access,
        client(access) as worker,
        client(access, "reader") as reader,
    ):
        worker.create(spec, formats(push="int8", top=4))
        reader.create(spec)
        twice, both = np.concatenate([ids, ids]), np.concatenate([grads, grads])
        for _ in range(10):
            worker.push({"t": (twice, both)}).result(60)
        before = reader.pull({"t": ids}).result(60)["t"]
        assert np.abs(before + 20 * grads).max() > 5
        worker.save(1, 1)
        after = reader.pull({"t": ids}).result(60)["t"]
        assert np.abs(after + 20 * grads).max() < 0.5  # the last push was rounded to int8


def test_a_value_that_cannot_be_sent_does_not_stay_in_the_memory(tmp_path: Path) -> None:
    spec = TableSpec("t", 4, sgd(1.0), uniform(0.0, 0.0))
    with servers(tmp_path) as access, client(access) as worker:
        worker.create(spec, formats(push="fp16", top=1))
        for wrong in (np.float32(1e5), np.float32(np.nan)):
            with pytest.raises(ConfigError):
                worker.push({"t": (np.arange(1), np.full((1, 4), wrong))})
        worker.push({"t": (np.arange(1), np.ones((1, 4), np.float32))}).result(60)
        assert np.abs(worker.pull({"t": np.arange(1)}).result(60)["t"]).sum() == 1


@pytest.mark.parametrize("wrong", [1e5, np.nan])
def test_a_push_that_is_refused_takes_nothing_from_the_memory(wrong: float) -> None:
    """Nothing of its other tables is kept or gone, also when the memory is full."""
    tables = TableSpec("x", 4), TableSpec("y", 4)
    known = ClusterMap("job", tables=tables, placements=(Placement(1, "s"),))
    sent = SentTables("worker-0", max_kept_bytes=4 * 4 * 3)
    for table in tables:
        sent.add(table, formats(push="fp16", top=1))

    def push(ids: Any, **rows: Any) -> None:
        grads = {name: (ids, np.tile(np.float32(row), (len(ids), 1))) for name, row in rows.items()}
        sent.ordered(known, grads, push=True, whole=False)

    def memory() -> Any:
        return {
            name: dict(zip(ids.tolist(), rows.tolist(), strict=True))
            for name, (ids, rows) in sent.unsent()
        }

    push(np.arange(2), x=[1, 2, 3, 4], y=[4, 3, 2, 1])
    before = memory()
    x, y = [1, 2, 3, 0], [0, 3, 2, 1]
    assert before == {"x": {0: x, 1: x}, "y": {0: y, 1: y}}
    for ids in (np.arange(2), np.arange(9)):  # 9 ids do not fit into the memory
        with pytest.raises(ConfigError):
            push(ids, x=[5, 6, 7, 8], y=[0, 0, wrong, 0])
        assert memory() == before
    push(np.arange(9), x=[5, 6, 7, 8], y=[0, 0, 0, 0])
    assert memory() == {"x": {}, "y": {}}


def test_columns_outside_of_a_row_are_refused() -> None:
    columns: Any = np.array([[0, 4]])
    values = [np.ones((1, 2), np.float32)]
    assert decode(with_columns(columns, values), 4) is None
    assert decode(with_columns(columns, values), 5) is not None
    assert decode(with_columns(columns[:, :1], values), 5) is None
    with pytest.raises(ConfigError, match="top=-1"):
        formats(top=-1)
    assert formats(push="int8", top=3) == Formats(RowFormat.FP32, RowFormat.INT8, 3)
