"""Sets of whole numbers as runs: sorted, disjoint and not adjacent ranges ``(start, stop)``.

A set that is nearly contiguous takes a few bytes, however many numbers it has. In a document it is
a flat list of lengths: of the gap before the first run, of that run, of the next gap, and so on.
"""

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

Run = tuple[int, int]
"""The numbers from the first one to the one before the second."""
LARGEST = 2**53
"""Greatest number that a set in a document may have."""


def add(runs: list[Run], start: int, stop: int) -> int:
    """Add the numbers from ``start`` to ``stop`` to a set, in place.

    Args:
        runs: The set.
        start: The first number.
        stop: The number after the last one; it must be greater than ``start``.

    Returns:
        How many of the numbers were not in the set before.
    """
    first = bisect_left(runs, start, key=_stop)
    last = bisect_right(runs, stop, lo=first, key=_start)
    if first == last:
        runs.insert(first, (start, stop))
        return stop - start
    known = sum(min(stop, b) - max(start, a) for a, b in runs[first:last])
    runs[first:last] = [(min(start, runs[first][0]), max(stop, runs[last - 1][1]))]
    return stop - start - known


def missing(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Return the numbers from ``start`` to ``stop`` that are not in a set.

    Args:
        runs: The set.
        start: The first number.
        stop: The number after the last one.
    """
    found = []
    for index in range(bisect_right(runs, start, key=_stop), len(runs)):
        begin, end = runs[index]
        if begin >= stop:
            break
        if begin > start:
            found.append((start, begin))
        start = end
    if start < stop:
        found.append((start, stop))
    return found


def first_missing(runs: list[Run], start: int) -> int:
    """Return the least number from ``start`` on that is not in a set."""
    index = bisect_right(runs, start, key=_stop)
    return runs[index][1] if index < len(runs) and runs[index][0] <= start else start


def size(runs: list[Run]) -> int:
    """Return how many numbers a set has."""
    return sum(stop - start for start, stop in runs)


def lengths(runs: list[Run]) -> list[int]:
    """Return a set as lengths, in turns of a gap and of a run."""
    found: list[int] = []
    last = 0
    for start, stop in runs:
        found += (start - last, stop - start)
        last = stop
    return found


def from_lengths(found: Any) -> Any:
    """Return the set in a list of lengths; leave other values to the checks that follow.

    Raises:
        ValueError: The list is not one that :func:`lengths` returns.
    """
    if not isinstance(found, list) or any(isinstance(one, tuple) for one in found):
        return found  # a set that is not read from JSON
    if not all(type(one) is int for one in found):
        raise ValueError("expected a list of whole numbers")
    if len(found) % 2 or any(one <= 0 for one in found[1:]) or (found and found[0] < 0):
        raise ValueError("expected lengths of gaps and runs in turns, each greater than 0")
    edges = [0]
    for one in found:
        edges.append(edges[-1] + one)
    if edges[-1] > LARGEST:
        raise ValueError(f"expected numbers up to {LARGEST}, found {edges[-1]}")
    return list(pairwise(edges[1:]))[::2]


def _checked(runs: list[Run]) -> list[Run]:
    """Return a set whose runs are in order and apart; JSON may also have pairs of numbers.

    Raises:
        ValueError: The runs are no set of numbers from 0 to ``LARGEST``.
    """
    last = -1
    for start, stop in runs:
        if not last < start < stop <= LARGEST:
            raise ValueError(f"expected runs in order up to {LARGEST}, found {start} to {stop}")
        last = stop
    return runs


Runs = Annotated[
    list[Run],
    BeforeValidator(from_lengths),
    AfterValidator(_checked),
    PlainSerializer(lengths, return_type=list[int]),
]
"""A set of whole numbers. In JSON it is a list of lengths."""


def _start(run: Run) -> int:
    return run[0]


def _stop(run: Run) -> int:
    return run[1]
