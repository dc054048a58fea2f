"""Whether servers are uneven, by what they have measured, and the weights to even them by (pure).

Each server says how many rows of each bucket were pulled and pushed. One busy moment moves nothing:
the servers must be uneven for several windows. After a decision there is a pause. What is left
uneven then is below the limit of the next decision, so buckets do not move to and fro.
"""

from collections.abc import Iterable, Sequence

from dlrover_py.ps.cluster_map import ClusterMap
from dlrover_py.ps.spread import unevenness_of

WINDOW_S = 10.0
"""Seconds of a window. At its end, what was counted in it and before counts half as much."""
WINDOWS = 3
"""Windows one after the other in which servers must be uneven."""
UNEVEN = 1.25
"""Load of the busiest server, as a multiple of the mean, from which servers are evened.

It is well above ``spread.ENOUGH``, at which moves end."""
PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0
"""Least seconds between two decisions. While servers stay uneven, each pause is twice the last one,
up to the second number: what does not help is not tried again and again."""
LEAST_GAIN = 0.05
"""Least decrease of the busiest server's load, as a part of the mean, for which buckets move."""
LEAST_ASKED_GAIN = 0.01
"""Least such decrease for which buckets move at the request of a user."""
MIN_RATE = 100.0
"""Rows per second of all servers below which loads say nothing."""
SCALE = 1000
"""Weight of a bucket with the mean load."""


class BucketLoads:
    """The rows of each bucket that workers have asked for lately."""

    def __init__(self, now: float) -> None:
        """Begin to count.

        Args:
            now: The time in seconds.
        """
        self._rows: list[float] = []
        self._ends_at, self._uneven = now + WINDOW_S, 0
        self._not_before, self._pause_s = now, PAUSE_S
        self._seconds = 0.0
        """How long was counted, in seconds that weigh as much as the rows."""
        self._weighed: tuple[int, ...] = ()
        """The weights at the last end of a window."""
        self.rates: tuple[float, ...] | None = None
        """Rows per second of each bucket at the last end of a window; None before the first."""

    def heard(self, server: str, counts: Iterable[tuple[int, int]], known: ClusterMap) -> None:
        """Take in what a server has counted since its last message.

        Args:
            server: The server. Only what it leads counts: workers may ask others by mistake.
            counts: Buckets, each with its rows.
            known: The map.
        """
        if len(self._rows) != len(known.placements):
            self._rows = [0.0] * len(known.placements)
        for bucket, rows in counts:
            if 0 <= bucket < len(self._rows) and known.placements[bucket].primary == server:
                self._rows[bucket] += rows

    @property
    def weights(self) -> tuple[int, ...]:
        """How much each bucket counts: see :func:`weights_of`."""
        return self._weighed

    def tick(self, known: ClusterMap, now: float) -> tuple[int, ...] | None:
        """Take note of the time; return weights if the servers are to be evened by them.

        None of it is decided while buckets move, are read from a cut or are lost, or during a cut.

        Args:
            known: The map.
            now: The time in seconds.
        """
        if now < self._ends_at:
            return None
        self._ends_at = now + WINDOW_S
        self._seconds += WINDOW_S
        self.rates = tuple(rows / self._seconds for rows in self._rows)
        self._weighed = weights_of(self.rates)
        self._rows, self._seconds = [rows / 2 for rows in self._rows], self._seconds / 2
        rests = known.cut is None and not any(
            one.learner or one.loading or one.lost for one in known.placements
        )
        if not rests or len(self._weighed) != len(known.placements) or not self._weighed:
            self._uneven = 0
            return None
        uneven = unevenness_of(known, self._weighed) > UNEVEN
        self._uneven = self._uneven + 1 if uneven else 0
        if not uneven:
            self._pause_s = PAUSE_S
        if self._uneven < WINDOWS or now < self._not_before:
            return None
        self._uneven, self._not_before = 0, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return self._weighed


def weights_of(rates: Sequence[float]) -> tuple[int, ...]:
    """Return how much each bucket counts, by its rows per second; empty if these are too few.

    The mean is :data:`SCALE`. Each is at least 1, so that unused buckets are spread, too.
    """
    total = sum(rates)
    if total < MIN_RATE:
        return ()
    mean = total / len(rates)
    return tuple(max(1, round(SCALE * one / mean)) for one in rates)
