"""Which memory the tensors of a state take, so that a load fills no memory twice."""

from bisect import bisect_left, bisect_right

import torch

from dlrover_py.trainer.torch_compat import has_inner_tensors, is_sharded


class MemoryRanges:
    """A set of ranges of memory."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        """The ranges are disjoint, and both lists are in ascending order."""

    def add(self, tensor: torch.Tensor) -> None:
        """Add the memory of a tensor; nothing is done if it has no ordinary memory (`range_of`)."""
        begin, end = range_of(tensor)
        if begin == end:
            return
        first, last = self._touched(begin, end)
        begin = min([begin, *self._begins[first:last]])
        end = max([end, *self._ends[first:last]])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor may have memory that was added; False if it has none."""
        begin, end = range_of(tensor)
        first, last = self._touched(begin, end)
        return begin < end and first < last

    def _touched(self, begin: int, end: int) -> tuple[int, int]:
        """Return the indices of the ranges that overlap with a range: from, and up to."""
        return bisect_right(self._ends, begin), bisect_left(self._begins, end)


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which the memory of a tensor begins and ends, on this rank.

    Between the elements of a tensor that is not contiguous may be those of others. They count as
    its own. Both addresses are 0 if the tensor has no ordinary memory.
    """
    if is_sharded(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    ordinary = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    if not ordinary or has_inner_tensors(tensor) or not tensor.numel():
        return 0, 0
    last = sum(
        stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.itemsize
