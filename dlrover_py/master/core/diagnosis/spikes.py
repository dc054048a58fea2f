"""Finds a loss or a gradient norm that leaps up and stays there: by the values before, robustly."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

KEPT = 64
"""Number of the newest values that count as usual."""
FEWEST = 16
"""Number of values from which on a leap is looked for."""
IN_A_ROW = 3
"""Number of high values in a row that make a spike: a single odd batch is none."""
ROBUST_Z = 10.0
"""A value is high from this many times the usual deviation above the median. The usual deviation is
the median absolute deviation, scaled so that it equals the standard deviation of normal values."""
LEAST_LEAP = 0.5
"""A value that is high is also this share of the median above it: a value that hardly varies has a
deviation of nearly zero."""


@dataclass(slots=True)
class SpikeWatch:
    """The newest values of one metric."""

    good: int | None = None
    """The newest step whose value was not high."""
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _high: list[tuple[int, float]] = field(default_factory=list)
    """Steps and values of the leap that is under way."""
    _step: int = -1

    @property
    def limit(self) -> float | None:
        """The value from which on one is high; None while too few values are known.

        None, too, while most values are 0: nothing says what a large value is.
        """
        if len(self._usual) < FEWEST:
            return None
        middle = median(self._usual)
        deviation = 1.4826 * median(abs(value - middle) for value in self._usual)
        leap = max(ROBUST_Z * deviation, LEAST_LEAP * abs(middle))
        return middle + leap if leap else None

    @property
    def leap(self) -> tuple[int, float, float] | None:
        """First step, usual value and newest value of a spike; None without one."""
        if len(self._high) < IN_A_ROW:
            return None
        return self._high[0][0], median(self._usual), self._high[-1][1]

    def saw(self, step: int, value: float) -> None:
        """Take in the value of a step; one that is not later than the last is ignored.

        A high value does not count as usual. If the leap lasts for as long as values are kept, it
        becomes the usual.
        """
        if step <= self._step:
            return
        self._step = step
        limit = self.limit
        if limit is None or value <= limit:
            self._usual.append(value)
            self._high.clear()
            self.good = step
            return
        self._high.append((step, value))
        if len(self._high) >= KEPT:
            self._usual.clear()
            self._usual.extend(value for _, value in self._high)
            self._high.clear()
            self.good = step
