"""Arrays that grow without a copy of what they hold."""

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


class Column:
    """One value, or one row of values, for each row of a table.

    To grow, the kernel gives the pages another address (``mremap``). That takes less than a
    millisecond, however many there are. Pages need memory from when they are first written.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        """Make a column without rows.

        Args:
            dtype: Type of a value.
            width: Values for each row, as a second axis. None: one, without that axis.
        """
        self._dtype, self._tail = np.dtype(dtype), () if width is None else (width,)
        self._pages: mmap.mmap | None = None
        self.row_bytes = self._dtype.itemsize * int(np.prod(self._tail))
        """Bytes of one row."""
        self.array: npt.NDArray[Any] = np.zeros((0, *self._tail), self._dtype)
        """The values. Nobody keeps it, or a view of it, until the column grows."""

    def reserve(self, rows: int) -> None:
        """Make room for a number of rows. New ones are zero."""
        size = max(1, rows * self.row_bytes)
        self.array = np.zeros((0, *self._tail), self._dtype)  # pages with a view cannot move
        if self._pages is None:
            self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._pages.resize(size)
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        values = np.frombuffer(self._pages, self._dtype, size // self._dtype.itemsize)
        self.array = values.reshape(rows, *self._tail)
