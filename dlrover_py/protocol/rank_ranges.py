"""Ranks of a process group in a short form: most groups have evenly spaced ranks."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class RankRange(NamedTuple):
    """Evenly spaced ranks."""

    first: int
    """The smallest rank."""
    number: int
    """Number of ranks."""
    step: int
    """The distance between two of them."""


def ranges_of(ranks: Iterable[int]) -> list[RankRange]:
    """Return ranks as few ranges."""
    ordered = sorted(set(ranks))
    found: list[RankRange] = []
    start = 0
    while start < len(ordered):
        step = ordered[start + 1] - ordered[start] if start + 1 < len(ordered) else 1
        end = start + 1
        while end < len(ordered) and ordered[end] - ordered[end - 1] == step:
            end += 1
        found.append(RankRange(ordered[start], end - start, step))
        start = end
    return found


def ranks_of(ranges: Sequence[RankRange], below: int) -> list[int]:
    """Return the ranks of ranges that are smaller than a number, in order.

    Args:
        ranges: Ranges, as of :func:`ranges_of`.
        below: The size of the world. It keeps a wrong message from asking for much memory.
    """
    found = {
        rank
        for one in ranges
        for rank in range(
            one.first, min(below, one.first + one.number * one.step), max(1, one.step)
        )
    }
    return sorted(found)
