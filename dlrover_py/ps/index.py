"""A hash index from ids to row numbers: open addressing, worked on whole arrays at once."""

import numpy as np
import numpy.typing as npt

from dlrover_py.ps.hashing import Ids, mix

_EMPTY = -1
_DELETED = -2
_SMALLEST = 1024


class IdIndex:
    """Maps unique int64 ids to row numbers. Half of its places are free or deleted at least."""

    def __init__(self) -> None:
        """Make an empty index."""
        self._clear(_SMALLEST)

    def __len__(self) -> int:
        return self._size

    def items(self) -> tuple[Ids, Ids]:
        """Return all ids and their row numbers, in no particular order."""
        used = self._rows >= 0
        return self._keys[used], self._rows[used]

    def find(self, ids: Ids) -> Ids:
        """Return the row number of each id, shape ``[n]``; -1 for an unknown id."""
        return self._find(ids)[0]

    def insert(self, ids: Ids, rows: Ids) -> None:
        """Add ids with their row numbers.

        Args:
            ids: Ids that are neither in the index nor twice among these.
            rows: The row number of each.
        """
        while 2 * (self._used + len(ids)) > len(self._keys):
            old_ids, old_rows = self.items()
            needed = 4 * (self._size + len(ids))
            self._clear(max(_SMALLEST, 1 << (needed - 1).bit_length()))
            self._place(old_ids, old_rows)
        self._place(ids, rows)

    def remove(self, ids: Ids) -> None:
        """Remove ids, which must be in the index."""
        _, places = self._find(ids)
        self._rows[places] = _DELETED
        self._size -= len(ids)

    def _clear(self, capacity: int) -> None:
        self._keys: Ids = np.zeros(capacity, np.int64)
        self._rows: Ids = np.full(capacity, _EMPTY, np.int64)
        self._mask = np.int64(capacity - 1)
        self._size = self._used = 0

    def _start(self, ids: Ids) -> Ids:
        return mix(ids.view(np.uint64)).view(np.int64) & self._mask

    def _find(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the row number and the place of each id."""
        at = self._start(ids)
        rows = self._rows[at]
        open_: npt.NDArray[np.intp] = np.flatnonzero(
            (rows != _EMPTY) & ((rows < 0) | (self._keys[at] != ids))
        )
        while len(open_):
            here = (at[open_] + 1) & self._mask
            found = self._rows[here]
            at[open_], rows[open_] = here, found
            open_ = open_[(found != _EMPTY) & ((found < 0) | (self._keys[here] != ids[open_]))]
        return rows, at

    def _place(self, ids: Ids, rows: Ids) -> None:
        self._size += len(ids)
        self._used += len(ids)
        at = self._start(ids)
        while len(ids):
            free = self._rows[at] == _EMPTY
            # Several ids may claim a place: the last one has it.
            self._rows[at[free]] = rows[free]
            won = free & (self._rows[at] == rows)
            self._keys[at[won]] = ids[won]
            ids, rows, at = ids[~won], rows[~won], (at[~won] + 1) & self._mask
