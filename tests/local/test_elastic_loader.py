"""Data loaders with processes."""

import sys

import pytest
import torch
from torch.utils.data import Dataset

from dlrover_py.trainer.data import ElasticLoader


class CallsOfTorch(Dataset[int]):
    """A sample is the number of Python functions that one call of torch runs through."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        found = []
        sys.setprofile(lambda frame, event, arg: found.append(event))
        torch.ones(1)
        sys.setprofile(None)
        return found.count("call")


@pytest.mark.parametrize("workers", [0, 1])
def test_calls_of_torch_in_a_dataset_go_through_no_python(workers: int) -> None:
    """A device context would be inherited by the loader's processes, and slow each call."""
    for step in ElasticLoader(CallsOfTorch(), global_batch=4, num_workers=workers):
        (batch,) = step
        step.commit()
    assert batch.tolist() == [0, 0, 0, 0]
