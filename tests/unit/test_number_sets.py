"""Sets of whole numbers as runs behave like sets, and survive a document."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from dlrover_py.protocol.runs import Run, Runs, add, first_missing, missing, size

RUNS = TypeAdapter(Runs)
PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=12)


@given(PIECES, st.integers(0, 40), st.integers(0, 40))
def test_runs_are_a_set(pieces: list[tuple[int, int]], start: int, length: int) -> None:
    runs: list[Run] = []
    numbers: set[int] = set()
    for first, count in pieces:
        fresh = set(range(first, first + count))
        assert add(runs, first, first + count) == len(fresh - numbers)
        numbers |= fresh
    assert {n for a, b in runs for n in range(a, b)} == numbers
    assert all(a < b for a, b in runs)
    assert all(b < a for (_, b), (a, _) in pairwise(runs))
    assert size(runs) == len(numbers)
    gaps = missing(runs, start, start + length)
    assert {n for a, b in gaps for n in range(a, b)} == set(range(start, start + length)) - numbers
    assert first_missing(runs, start) == min(set(range(start, 100)) - numbers)
    assert RUNS.validate_json(RUNS.dump_json(runs)) == runs


@pytest.mark.parametrize(
    "bad", ["[1]", "[0, 0]", "[1, 2, 0, 3]", "[-1, 2]", "[0, 9007199254740993]"]
)
def test_other_lengths_are_refused(bad: str) -> None:
    with pytest.raises(ValidationError):
        RUNS.validate_json(bad)
