"""Counts of ids in a fixed memory: at least as high as they are, and halved again and again."""

import numpy as np
import numpy.typing as npt

from dlrover_py.ps.hashing import Ids, mix

SIZE = 1 << 22
"""Counters, one byte each. Each id uses two of them."""
_SEEDS = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344))


class RecentCounts:
    """How often ids were seen lately. Two ids may share a counter, so a count may be too high."""

    def __init__(self, size: int = SIZE) -> None:
        """Start with 0 for all ids.

        Args:
            size: Number of counters, a power of 2.
        """
        self._counts: npt.NDArray[np.uint8] = np.zeros(size, np.uint8)
        self._mask, self._seen = np.uint64(size - 1), 0

    def add(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Count ids once more; return their counts.

        All counts are halved when as many ids were added as there are counters.

        Args:
            ids: Ids, each once.
        """
        self._seen += len(ids)
        if self._seen > len(self._counts):
            self._counts >>= np.uint8(1)
            self._seen = len(ids)
        places = [mix(ids.view(np.uint64) ^ seed) & self._mask for seed in _SEEDS]
        found: npt.NDArray[np.uint8] = np.minimum(self._counts[places[0]], self._counts[places[1]])
        found += found < 255
        for place in places:
            np.maximum.at(self._counts, place, found)
        return found
