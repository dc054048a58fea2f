"""Rows in fewer bits: the error has a bound, and the same gradients give the same message."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as shapes

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.codecs import decode, decoded, encode
from dlrover_py.ps.specs import RowFormat, TableSpec, formats, sgd, uniform
from dlrover_py.ps.wire import JobAccess
from tests.ps_threads import client, servers

Rows = Any
BOUND = 2.0**120
ROWS = shapes.arrays(
    np.float32,
    shapes.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-BOUND, BOUND, width=32)
    | st.floats(-(2.0**-13), 2.0**-13, width=32)
    | st.floats(-10, 10, width=32),
)


def back(rows: Rows, format: RowFormat, seed: int = 0) -> Rows:
    found = decode(encode(rows, format, seed))
    assert found is not None
    assert found.dtype == np.float32
    return found.astype(np.float64)


@given(ROWS)
@settings(deadline=None)
def test_whole_rows_stay_as_they_are(rows: Rows) -> None:
    assert (back(rows, RowFormat.FP32) == rows).all()


@given(ROWS)
@settings(deadline=None)
def test_the_error_of_fp16(rows: Rows) -> None:
    rows = rows.clip(-65000, 65000)
    error = np.abs(back(rows, RowFormat.FP16) - rows)
    assert (error <= np.maximum(np.abs(rows.astype(np.float64)) / 2048, 2.0**-25)).all()


@given(ROWS)
@settings(deadline=None)
def test_the_error_of_bf16(rows: Rows) -> None:
    error = np.abs(back(rows, RowFormat.BF16) - rows)
    assert (error <= np.maximum(np.abs(rows.astype(np.float64)) / 256, 2.0**-134)).all()


@given(ROWS, st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_the_error_of_int8(rows: Rows, seed: int) -> None:
    greatest = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    error = np.abs(back(rows, RowFormat.INT8, seed) - rows)
    slack = 1 + 2.0**-16  # of the divisions, in float32
    assert (error <= np.where(greatest < 2e-36, 2e-36, greatest / 127 * slack)).all()
    first, second = encode(rows, RowFormat.INT8, seed), encode(rows, RowFormat.INT8, seed)
    assert [one.tobytes() for one in first] == [one.tobytes() for one in second]


def test_the_mean_of_int8_is_the_value() -> None:
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    times = 20_000
    sums = back(np.broadcast_to(row, (times, 64)), RowFormat.INT8, 3).sum(axis=0)
    # The standard deviation of a mean is at most 1/127/2/sqrt(times): this is six of it.
    assert np.abs(sums / times - row).max() < 6 / 254 / times**0.5
    nearest = np.round(row * 127) / 127
    assert np.abs(nearest - row).max() > 6 / 254 / times**0.5


def test_what_is_no_number_stays_so() -> None:
    rows = np.array([[np.nan, 1.0], [np.inf, 1.0], [-np.inf, 0.0]], np.float32)
    for format in RowFormat:
        assert not np.isfinite(back(rows, format)).all(axis=1).any()
    assert np.isnan(back(-rows[:1], RowFormat.BF16)[0, 0])
    assert np.isinf(back(np.array([[70000.0]], np.float32), RowFormat.FP16)).all()


def test_other_arrays_are_left_to_the_server() -> None:
    ids = np.arange(3)
    for odd in ([], [np.zeros((3, 2), np.int8)], [np.zeros((3, 2))], [np.zeros(3, np.float16)],
                [np.zeros((3, 2), np.int8), np.zeros(2, np.float32)]):  # fmt: skip
        assert decode(odd) is None
        ((_, arrays),) = decoded([("t", [ids, *odd])], {"t": 4})
        assert len(arrays) == 1 + len(odd)
    assert decoded([("t", [])], {}) == [("t", [])]


def test_formats_are_checked() -> None:
    assert formats(pull="bf16", push="int8").push is RowFormat.INT8
    with pytest.raises(ConfigError, match="expected pull to be one of fp32, fp16, bf16, found"):
        formats(pull="int8")
    with pytest.raises(ConfigError, match="found 'int4'"):
        formats(push="int4")


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with servers(tmp_path_factory.mktemp("ps")) as found:
        yield found


@pytest.mark.parametrize(("pull", "push"), [("fp16", "fp16"), ("bf16", "bf16"), ("fp16", "int8")])
def test_rows_and_gradients_come_in_their_format(access: JobAccess, pull: str, push: str) -> None:
    spec = TableSpec(f"{pull}-{push}", 64, sgd(1.0), uniform(0.0, 0.0))
    ids = np.arange(500, dtype=np.int64)
    grads = np.random.default_rng(1).normal(size=(500, 64)).astype(np.float32)
    with client(access) as worker:
        worker.create(spec, formats(pull=pull, push=push))
        for _ in range(50):
            worker.push({spec.name: (ids, grads)}).result()
        got = worker.pull({spec.name: ids}).result()[spec.name]
        with client(access, "exact") as exact:
            exact.create(spec)
            rows = exact.pull({spec.name: ids}).result()[spec.name]
        # Each format is told apart from the others: the servers keep sums in float32.
        assert (got == back(rows, RowFormat(pull))).all()
        assert (got != rows).any()
        error = np.abs(rows + 50 * grads.astype(np.float64)).max()
        assert error < {"fp16": 0.15, "bf16": 0.8, "int8": 2.0}[push]
        assert error > {"fp16": 1e-3, "bf16": 0.15, "int8": 0.05}[push]


def test_a_gradient_that_a_format_cannot_carry_is_refused(access: JobAccess) -> None:
    spec = TableSpec("large", 2, sgd(1.0), uniform(0.0, 0.0))
    ids = np.zeros(1, np.int64)
    with client(access) as worker:
        worker.create(spec, formats(push="fp16"))
        with pytest.raises(ConfigError, match="numbers which fp16 has"):
            worker.push({"large": (ids, np.full((1, 2), 1e5, np.float32))})
        with pytest.raises(ConfigError, match="is used twice"):
            worker.create(spec, formats(push="bf16"))
        same: PsClient = worker
        same.create(spec, formats(push="fp16"))
        assert same.pull({"large": ids}).result()["large"].tolist() == [[0.0, 0.0]]
