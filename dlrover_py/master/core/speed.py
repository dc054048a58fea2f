"""The speed of training: how it is measured, and what it would be with other numbers of nodes."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

WINDOW_STEPS = 5
"""Steps that a window has at least: a report may be late by one step."""
WINDOWS = 6
"""Windows that make a measurement at least."""
PATIENCE = 60
"""Windows after which a speed counts although it is not exact; older windows are dropped."""
EXACT = 0.012
"""Standard error of a speed, as a fraction of it, at which it is exact enough."""
USUAL = 0.05
"""Deviation of a window at which it is left out, as a fraction, if the others are alike: a
checkpoint or an evaluation was in it."""
ONE_SIZE = 0.9
"""Exponent of the speed by the number of nodes, while only one size was measured."""
_SIGMA = 1.4826
"""Standard deviation of normal numbers, divided by their median deviation."""
SIMPLER = 1e-4
"""Error by which a curve with one more parameter must be better than a simpler one."""


@dataclass(slots=True)
class SpeedMeter:
    """Measures the speed of one round from the steps that it reports.

    Time is cut into windows. The first one is left out, because kernels and caches warm up in it.
    The more the windows differ, the more of them make a measurement. Single windows that differ
    much from the others contain a checkpoint or an evaluation, and do not count.
    """

    window_s: float
    """Seconds that a window has at least."""
    _start: tuple[float, int] | None = None
    """Time and step at which the open window began."""
    _warm: bool = False
    _windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    """Steps and seconds of each window."""
    _exact: bool = False
    """Whether the speed was known exactly enough before."""
    count: int = 0
    """Number of windows that were measured in this round."""

    def take(self, now: float, step: int) -> bool:
        """Take in the newest step; return whether a window has ended.

        Args:
            now: Monotonic time.
            step: The newest step that was reported.
        """
        if self._start is None or step < self._start[1]:
            self._start = now, step
            return False
        began, first = self._start
        if now - began < self.window_s or step - first < WINDOW_STEPS:
            return False
        self._start = now, step
        if not self._warm:
            self._warm = True
            return False
        self._windows.append((float(step - first), now - began))
        self.count += 1
        return True

    def skip(self) -> None:
        """Drop the open window: the master itself stood still in it."""
        self._start = None

    @property
    def error(self) -> float:
        """Return the standard error of the speed, as a fraction of it."""
        speeds = [steps / seconds for steps, seconds in self._windows]
        if len(speeds) < 2:
            return 1.0
        usual = _median(speeds)
        spread = _SIGMA * _median([abs(speed - usual) for speed in speeds])
        return min(1.0, spread / usual / math.sqrt(len(speeds))) if usual > 0 else 1.0

    def speed(self) -> float | None:
        """Return the steps per second; None until they were once known exactly enough.

        After ``PATIENCE`` windows they count although they are not exact.
        """
        windows = list(self._windows)
        if len(windows) < WINDOWS:
            return None
        speeds = [steps / seconds for steps, seconds in windows]
        usual = _median(speeds)
        spread = _SIGMA * _median([abs(speed - usual) for speed in speeds])
        limit = max(USUAL * usual, 3 * spread)
        kept = [w for w, x in zip(windows, speeds, strict=True) if abs(x - usual) <= limit]
        speed = _mean(kept)
        # Thirds show the error of the mean: a late report makes one window faster, and the next
        # one slower.
        third = len(kept) // 3
        parts = (_mean(kept[i * third : (i + 1) * third]) for i in range(3)) if third else ()
        error = max((abs(part / speed - 1) for part in parts), default=1.0) / 2
        self._exact = self._exact or error <= EXACT or len(windows) == PATIENCE
        return speed if self._exact else None


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """The speed for each number of nodes, from the sizes that were measured.

    The curve is the universal scalability law: ``n / (a + b(n-1) + c·n(n-1))``. ``b`` stands for
    what nodes wait for one after the other, and ``c`` for what each has to agree upon with all
    others. With one measured size the speed grows as ``n**0.9``.
    """

    measured: Mapping[int, float]
    """Measured speeds by the number of nodes; at least one, all above 0."""
    curve: tuple[float, float, float] | None
    """``a``, ``b`` and ``c``; None with one measured size."""

    @classmethod
    def fit(cls, measured: Mapping[int, float]) -> "SpeedModel":
        """Return the model that fits these measured speeds best, with no parameter below 0."""
        sizes = sorted(measured)
        if len(sizes) == 1:
            return cls(measured, None)
        # Each row is divided by the measured time, so that the relative error counts.
        rows = [[measured[n] / n * x for x in (1.0, n - 1.0, n * (n - 1.0))] for n in sizes]
        best: tuple[float, tuple[float, float, float]] | None = None
        for number in (1, 2, 3):
            for kept in combinations(range(3), min(number, len(sizes))):
                solved = _least_squares([[row[i] for i in kept] for row in rows])
                if solved is None or min(solved) < 0:
                    continue
                found = [0.0, 0.0, 0.0]
                for i, value in zip(kept, solved, strict=True):
                    found[i] = value
                error = sum(
                    (sum(x * y for x, y in zip(row, found, strict=True)) - 1) ** 2 for row in rows
                ) / len(rows)
                if best is None or error < best[0] - SIMPLER:
                    best = error, (found[0], found[1], found[2])
        return cls(measured, best[1] if best is not None else None)

    def at(self, nodes: int) -> float:
        """Return the speed with this many nodes.

        A measured speed is returned as it is, but if more sizes were measured than the curve has
        parameters, half of its distance from the curve counts as noise.
        """
        known = self.measured.get(nodes)
        if known is not None:
            if self.curve is None or len(self.measured) <= len(self.curve):
                return known
            return math.sqrt(known * self._curve_at(nodes))
        nearest = min(self.measured, key=lambda n: (abs(math.log(n / nodes)), n))
        speed = self.measured[nearest]
        if self.curve is None:
            return speed * float((nodes / nearest) ** ONE_SIZE)
        found = speed * self._curve_at(nodes) / self._curve_at(nearest)
        least = min(self.measured)
        # Nothing was measured there, so no smaller size is taken for a faster one.
        return min(found, self.at(least)) if nodes < least else found

    def _curve_at(self, nodes: int) -> float:
        """Return the speed on the fitted curve."""
        assert self.curve is not None
        a, b, c = self.curve
        return nodes / (a + b * (nodes - 1) + c * nodes * (nodes - 1) or 1e-9)


def _mean(windows: list[tuple[float, float]]) -> float:
    """Return the steps per second of windows."""
    return sum(steps for steps, _ in windows) / sum(seconds for _, seconds in windows)


def _median(values: list[float]) -> float:
    """Return the median; the upper one of two."""
    return sorted(values)[len(values) // 2]


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """Return x for which the rows times x are nearest to 1; None if there is no single one.

    The normal equations of at most three unknowns are solved by elimination.
    """
    size = len(rows[0])
    matrix = [
        [sum(r[i] * r[j] for r in rows) for j in range(size)] + [sum(r[i] for r in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        scale = max(abs(x) for x in matrix[pivot])
        if abs(matrix[pivot][i]) <= 1e-12 * scale or not scale:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [x - factor * y for x, y in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
