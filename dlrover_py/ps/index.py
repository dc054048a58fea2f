"""A hash index from ids to row numbers: open addressing, worked on whole arrays at once.

When it is full, a larger one begins, and each insertion moves a part of the old one. So no
insertion takes long because of what is there already.
"""

import numpy as np
import numpy.typing as npt

from dlrover_py.ps.hashing import Ids, mix

_EMPTY = 0
"""Row numbers are stored plus 1, so that new memory, which is zero, need not be written."""
_DELETED = -1
_SMALLEST = 1024
_MOVED = 4
"""Old places that are looked at for each id that is inserted. With fewer, the new index could be
full before the old one is empty."""


class _Places:
    """Places for ids and row numbers. Half of them are free or deleted at least."""

    def __init__(self, capacity: int) -> None:
        """Make places.

        Args:
            capacity: How many, a power of 2.
        """
        self._keys: Ids = np.zeros(capacity, np.int64)
        self._rows: Ids = np.zeros(capacity, np.int64)
        self._mask = np.int64(capacity - 1)
        self.capacity, self.used = capacity, 0

    def has_room(self, count: int) -> bool:
        """Return whether some more ids may be placed."""
        return 2 * (self.used + count) <= self.capacity

    def find(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return what is stored for each id, 0 for an unknown one, and the place of each."""
        at = mix(ids.view(np.uint64)).view(np.int64) & self._mask
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

    def place(self, ids: Ids, rows: Ids) -> None:
        """Store ids that are not here, each once.

        Args:
            ids: The ids.
            rows: What is stored for each.
        """
        self.used += len(ids)
        at = mix(ids.view(np.uint64)).view(np.int64) & self._mask
        while len(ids):
            free = self._rows[at] == _EMPTY
            # Several ids may claim a place: the last one has it.
            self._rows[at[free]] = rows[free]
            won = free & (self._rows[at] == rows)
            self._keys[at[won]] = ids[won]
            ids, rows, at = ids[~won], rows[~won], (at[~won] + 1) & self._mask

    def remove(self, ids: Ids) -> int:
        """Remove those of some ids that are here; return how many."""
        rows, at = self.find(ids)
        here = at[rows > 0]
        self._rows[here] = _DELETED
        return len(here)

    def part(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """Return the ids in a range of places, and what is stored for each."""
        rows = self._rows[start:stop]
        used = rows > 0
        return self._keys[start:stop][used], rows[used]


class IdIndex:
    """Maps unique int64 ids to row numbers."""

    def __init__(self) -> None:
        """Make an empty index."""
        self._places = _Places(_SMALLEST)
        self._old: _Places | None = None
        """The places before. Its ids stay there, also those that were moved."""
        self._moved = 0
        """Places of the old ones whose ids are among the new ones."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def items(self) -> tuple[Ids, Ids]:
        """Return all ids and their row numbers, in no particular order."""
        ids, rows = self._places.part(0, self._places.capacity)
        if self._old is not None:
            left = self._old.part(self._moved, self._old.capacity)
            ids, rows = np.concatenate([ids, left[0]]), np.concatenate([rows, left[1]])
        return ids, rows - 1

    def find(self, ids: Ids) -> Ids:
        """Return the row number of each id, shape ``[n]``; -1 for an unknown id."""
        rows, _ = self._places.find(ids)
        if self._old is not None:
            missing = np.flatnonzero(rows == _EMPTY)
            if len(missing):
                rows[missing], _ = self._old.find(ids[missing])
        rows -= 1
        return rows

    def insert(self, ids: Ids, rows: Ids) -> None:
        """Add ids with their row numbers.

        Args:
            ids: Ids that are neither in the index nor twice among these.
            rows: The row number of each.
        """
        self._move(_MOVED * len(ids))
        if not self._places.has_room(len(ids)):
            if self._old is not None:
                self._move(self._old.capacity)
            needed = max(4 * (self._size + len(ids)), self._places.capacity)
            self._old, self._moved = self._places, 0
            self._places = _Places(1 << (needed - 1).bit_length())
            self._move(_MOVED * len(ids))
        self._places.place(ids, rows + 1)
        self._size += len(ids)

    def remove(self, ids: Ids) -> None:
        """Remove ids, which must be in the index."""
        self._places.remove(ids)
        if self._old is not None:
            self._old.remove(ids)
        self._size -= len(ids)

    def _move(self, places: int) -> None:
        """Move the ids of some more places of the old index."""
        if self._old is None:
            return
        start, self._moved = self._moved, min(self._moved + places, self._old.capacity)
        self._places.place(*self._old.part(start, self._moved))
        if self._moved == self._old.capacity:
            self._old = None
