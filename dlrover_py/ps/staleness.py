"""How late pushes are (pure): the pushes of others since the worker pulled, on one server."""

from collections.abc import Iterable, Sequence

from dlrover_py.ps.bucket_state import BucketState

CLASSES = 8
"""Classes of staleness: 0, 1, 2 to 3, 4 to 7 and so on. The last one has no upper limit."""
MAX_SEEN = 1 << 18
"""Buckets that are known of all connections together: some 25 MB. The connections that pulled least
recently are forgotten."""


class Staleness:
    """Counts the pushes of each class of staleness.

    A push is as stale as its stalest bucket: so many pushes of others were applied there since the
    worker pulled rows of it. A worker that pulls for its next batch before it pushes makes its
    pushes seem fresher.
    """

    def __init__(self, max_seen: int = MAX_SEEN) -> None:
        """Start without pushes.

        Args:
            max_seen: Buckets that are known of all connections together, at most.
        """
        self._max_seen, self._seen = max_seen, 0
        self._counts = [0] * CLASSES
        self._read: dict[bytes, dict[int, int]] = {}
        """The version of each bucket that a connection has seen, plus its own pushes since."""

    def pulled(self, route: bytes, buckets: Iterable[int], states: Sequence[BucketState]) -> None:
        """Note what a worker sees.

        Args:
            route: Its connection.
            buckets: The buckets of its pull that are led here.
            states: The states of all buckets.
        """
        seen = self._read.pop(route, {})
        self._read[route] = seen  # the newest one is the last one
        self._seen -= len(seen)
        seen.update((bucket, states[bucket].version) for bucket in buckets)
        self._seen += len(seen)
        while self._seen > self._max_seen and len(self._read) > 1:
            self._seen -= len(self._read.pop(next(iter(self._read))))

    def pushed(self, route: bytes, buckets: Iterable[int], states: Sequence[BucketState]) -> None:
        """Count a push just before it is applied. One without a pull is not counted.

        Args:
            route: The connection of its worker.
            buckets: The buckets in which it is applied.
            states: The states of all buckets.
        """
        seen = self._read.get(route, {})
        known = [bucket for bucket in buckets if bucket in seen]
        if not known:
            return
        stale = max(states[bucket].version - seen[bucket] for bucket in known)
        self._counts[min(max(stale, 0).bit_length(), CLASSES - 1)] += 1
        for bucket in known:
            seen[bucket] += 1

    def per_s(self, past_s: float) -> tuple[float, ...]:
        """Return the pushes per second of each class since the last call.

        Args:
            past_s: Seconds since then.
        """
        counts, self._counts = self._counts, [0] * CLASSES
        return tuple(count / past_s for count in counts)
