"""Which memory tensors take."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.trainer.memory_ranges import MemoryRanges

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12)


@given(ranges)
def test_a_tensor_overlaps_with_the_bytes_that_were_added(found: list[tuple[int, int]]) -> None:
    memory = torch.zeros(50, dtype=torch.int16)
    filled, expected = MemoryRanges(), set[int]()
    for begin, size in found:
        tensor = memory[begin : begin + size]
        bytes_of = set(range(begin, begin + size))
        assert filled.overlaps(tensor) == bool(bytes_of & expected)
        filled.add(tensor)
        expected |= bytes_of


def test_tensors_without_ordinary_memory_overlap_with_nothing() -> None:
    filled = MemoryRanges()
    for tensor in (
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.zeros(0),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ):
        filled.add(tensor)
        assert not filled.overlaps(tensor)


def test_the_last_element_of_a_view_is_its_own() -> None:
    memory, filled = torch.zeros(4, 4), MemoryRanges()
    filled.add(memory.t()[:, 1:3])
    assert not filled.overlaps(memory[0])
    assert filled.overlaps(memory[2, 3])
    assert not filled.overlaps(memory[3])
