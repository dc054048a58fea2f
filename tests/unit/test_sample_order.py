"""The order of samples: a permutation, chosen by seed and epoch, that never changes."""

from collections import Counter
from math import factorial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.trainer.data.order import SampleOrder


def samples(order: SampleOrder, start: int, stop: int) -> list[int]:
    found: list[int] = order.at(torch.arange(start, stop)).tolist()
    return found


@given(
    length=st.integers(1, 400),
    seed=st.integers(0, 2**53),
    epoch=st.integers(0, 10),
    block=st.integers(1, 40),
    shuffle=st.booleans(),
)
def test_each_sample_has_one_position(
    length: int, seed: int, epoch: int, block: int, shuffle: bool
) -> None:
    order = SampleOrder(length, seed, epoch, shuffle, block)
    assert sorted(samples(order, 0, length)) == list(range(length))


@given(length=st.integers(1, 2**53), data=st.data())
def test_a_position_has_the_same_sample_however_it_is_asked_for(
    length: int, data: st.DataObject
) -> None:
    order = SampleOrder(length, 7, 3, block=data.draw(st.sampled_from((1, 5, 1000))))
    start = data.draw(st.integers(0, length - 1))
    stop = min(length, start + 20)
    together = samples(order, start, stop)
    assert together == [samples(order, at, at + 1)[0] for at in range(start, stop)]
    assert len(set(together)) == len(together)
    assert all(0 <= sample < length for sample in together)


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint holds a position only. So another order would repeat samples, and leave out."""
    assert samples(SampleOrder(10, 1, 0), 0, 10) == FIRST
    assert samples(SampleOrder(10, 1, 1), 0, 10) == SECOND
    assert samples(SampleOrder(10, 1, 0, block=4), 0, 10) == BLOCKS
    assert samples(SampleOrder(2**53, 5, 2), 2**53 - 3, 2**53) == LARGE


FIRST = [9, 1, 2, 4, 0, 3, 5, 6, 8, 7]
SECOND = [4, 6, 7, 1, 2, 8, 5, 3, 0, 9]
BLOCKS = [7, 6, 4, 5, 2, 1, 3, 0, 8, 9]
LARGE = [6638645556924278, 1932038227424890, 4126058475885511]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_a_small_set_are_about_equally_likely(length: int) -> None:
    tries = 50 * factorial(length)
    seen = Counter(tuple(samples(SampleOrder(length, s, 0), 0, length)) for s in range(tries))
    orders = factorial(length)
    expected = tries / orders
    chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
    assert len(seen) == orders
    # 6 standard deviations above the mean of the distribution; the seeds are fixed.
    assert chi_squared < orders - 1 + 6 * (2 * (orders - 1)) ** 0.5


def test_samples_of_a_block_stay_together() -> None:
    order = samples(SampleOrder(1000, 3, 0, block=10), 0, 1000)
    blocks = [{sample // 10 for sample in order[at : at + 10]} for at in range(0, 1000, 10)]
    assert all(len(block) == 1 for block in blocks)
    assert [block.pop() for block in blocks] != list(range(100))
    within = {tuple(sample % 10 for sample in order[at : at + 10]) for at in range(0, 1000, 10)}
    assert len(within) > 90, "each block has an order of its own"
