"""The largest values of each gradient's row, and the memory of what was not sent.

What is left out of a push is kept by the worker, and added to the next gradient of the same row. So
each value arrives at last. Without that, small values never would.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover_py.ps.codecs import decode, encode, with_columns
from dlrover_py.ps.hashing import Floats, Ids
from dlrover_py.ps.index import IdIndex
from dlrover_py.ps.specs import Formats

MAX_KEPT_BYTES = 64 << 20
"""Bytes that a worker keeps for a table."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What a push leaves in the memory of its table."""

    ids: Ids
    rows: Floats
    """What is not sent of the gradient of each id."""
    alone: bool
    """Whether the push has all other values of the memory."""


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

    def unsent(self) -> tuple[Ids, Floats]:
        """Return all that was not sent: ids, and their gradients."""
        ids, at = self._index.items()
        return ids, self._kept[at]

    def encode(self, ids: Ids, grads: Floats, seed: int) -> tuple[Ids, list[Any], Rest]:
        """Return the ids of a push, each once, the arrays that carry its gradients, and the rest.

        The memory stays as it is until :meth:`keep` gets the rest. So a push that is refused
        changes nothing.

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
            old, kept = self.unsent()
            more = ~np.isin(old, unique)
            every = np.concatenate([unique, old[more]])
            arrays = encode(np.concatenate([rows, kept[more]]), self._formats.push, seed)
            return every, arrays, Rest(unique[:0], rows[:0], alone=True)
        rest = self._dim - self._formats.top
        columns: Ids = np.argpartition(np.abs(rows), rest, axis=1)[:, rest:]
        values = encode(np.take_along_axis(rows, columns, axis=1), self._formats.push, seed)
        sent = decode(values)
        assert sent is not None
        with np.errstate(invalid="ignore"):  # a push with such numbers is refused
            left = np.take_along_axis(rows, columns, axis=1) - sent
        np.put_along_axis(rows, columns, left, axis=1)
        return unique, with_columns(columns, values), Rest(unique, rows, alone=False)

    def keep(self, rest: Rest) -> None:
        """Take note that a push of :meth:`encode` is on its way.

        Args:
            rest: What it leaves in the memory.
        """
        if rest.alone:
            self.clear()
        at = self._index.find(rest.ids)
        fresh = at < 0
        self._grow(rest.ids[fresh])
        at[fresh] = self._index.find(rest.ids[fresh])
        self._kept[at] = rest.rows

    def _grow(self, ids: Ids) -> None:
        """Make room for ids that have none."""
        size = len(self._index)
        self._index.insert(ids, np.arange(size, size + len(ids), dtype=np.int64))
        if size + len(ids) > len(self._kept):
            grown = np.zeros((1 << (size + len(ids)).bit_length(), self._dim), np.float32)
            grown[:size] = self._kept[:size]
            self._kept = grown
