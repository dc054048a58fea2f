"""Replicas that differ: the digest of their parameters, and the rank that a majority names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.replica_check import digest, wrong_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float16)


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 3), st.data())
def test_one_flipped_bit_changes_the_digest(
    dtype: torch.dtype, count: int, offset: int, data: st.DataObject
) -> None:
    whole = torch.arange(count + offset).to(dtype)
    tensors = [torch.ones(3), whole[offset:], torch.ones(())]
    before = digest(tensors)
    assert digest([tensor.clone() for tensor in tensors]) == before, "wherever they are"
    bits = tensors[1].view(torch.uint8)
    place = data.draw(st.integers(0, bits.numel() - 1))
    bits[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensors) != before


def test_tensors_without_elements_and_no_tensors_have_a_digest() -> None:
    assert digest([]) == 0
    assert digest([torch.empty(0)]) == digest([torch.empty(0)])


@given(st.integers(3, 9), st.data())
def test_a_majority_names_the_wrong_ranks(ranks: int, data: st.DataObject) -> None:
    wrong = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=(ranks - 1) // 2))
    answers = [{(): rank + 10 if rank in wrong else 1} for rank in range(ranks)]
    assert wrong_ranks(answers) == sorted(wrong)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_equal_replicas_never_differ(groups: list[int]) -> None:
    assert wrong_ranks([{group: group * 7} for group in groups]) is None


def test_two_replicas_differ_without_a_name_and_groups_are_apart() -> None:
    assert wrong_ranks([{(): 1}, {(): 2}]) == []
    stages = [{"a": 1}, {"a": 1}, {"a": 2}, {"b": 5}, {"b": 5}, {}]
    assert wrong_ranks(stages) == [2]


def test_a_number_of_steps_is_expected() -> None:
    with (
        Checkpointer() as checkpointer,
        pytest.raises(ConfigError, match="compareEvery is 0: expected a number of steps"),
    ):
        checkpointer.replica_check.compare(every=0)
