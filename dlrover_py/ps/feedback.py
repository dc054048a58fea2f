"""The largest values of each gradient's row, and the memory of what was not sent.

What is left out of a push is kept by the worker, and added to the next gradient of the same row. So
each value arrives at last. Without that, small values never would.
"""

from typing import Any

import numpy as np

from dlrover_py.ps.codecs import decode, encode, with_columns
from dlrover_py.ps.hashing import Floats, Ids
from dlrover_py.ps.index import IdIndex
from dlrover_py.ps.specs import Formats

MAX_KEPT_BYTES = 64 << 20
"""Bytes that a worker keeps for a table."""


class Feedback:
    """What a worker has not sent of the gradients of one table."""

    def __init__(self, dim: int, formats: Formats, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """Start with an empty memory.

        Args:
            dim: Values in a row.
            formats: The format of the values that are sent, and their number in a row.
            max_bytes: Bytes of the memory. If more is needed, all of it is sent.
        """
        self._dim, self._formats, self._max_bytes = dim, formats, max_bytes
        self.clear()

    def clear(self) -> None:
        """Forget what was not sent."""
        self._index = IdIndex()
        self._kept: Floats = np.zeros((0, self._dim), np.float32)

    def take(self) -> tuple[Ids, Floats]:
        """Return all that was not sent, and forget it."""
        ids, at = self._index.items()
        rows = self._kept[at]
        self.clear()
        return ids, rows

    def encode(self, ids: Ids, grads: Floats, seed: int) -> tuple[Ids, list[Any]]:
        """Return the ids of a push, each once, and the arrays that carry its gradients.

        Args:
            ids: Ids, shape ``[n]``.
            grads: Gradients, shape ``[n, dim]``; those of the same id are added.
            seed: Chooses the random roundings of ``int8``.
        """
        unique, places = np.unique(ids, return_inverse=True)
        rows = np.zeros((len(unique), self._dim), np.float32)
        np.add.at(rows, places, grads)
        at = self._index.find(unique)
        known = at >= 0
        rows[known] += self._kept[at[known]]
        fresh = len(unique) - int(known.sum())
        if 4 * self._dim * (len(self._index) + fresh) > self._max_bytes:
            self._kept[at[known]] = 0
            old, kept = self.take()
            more = ~np.isin(old, unique)
            every = np.concatenate([unique, old[more]])
            return every, encode(np.concatenate([rows, kept[more]]), self._formats.push, seed)
        self._grow(unique[~known])
        at[~known] = self._index.find(unique[~known])
        rest = self._dim - self._formats.top
        columns: Ids = np.argpartition(np.abs(rows), rest, axis=1)[:, rest:]
        values = encode(np.take_along_axis(rows, columns, axis=1), self._formats.push, seed)
        sent = decode(values)
        assert sent is not None
        if not np.isfinite(sent).all():  # the push is refused
            return unique, with_columns(columns, values)
        left = np.take_along_axis(rows, columns, axis=1) - sent
        np.put_along_axis(rows, columns, left, axis=1)
        self._kept[at] = rows
        return unique, with_columns(columns, values)

    def _grow(self, ids: Ids) -> None:
        """Make room for ids that have none."""
        size = len(self._index)
        self._index.insert(ids, np.arange(size, size + len(ids), dtype=np.int64))
        if size + len(ids) > len(self._kept):
            grown = np.zeros((1 << (size + len(ids)).bit_length(), self._dim), np.float32)
            grown[:size] = self._kept[:size]
            self._kept = grown
