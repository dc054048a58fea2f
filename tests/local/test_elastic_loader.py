"""Data loaders with processes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

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


class Numbers(Dataset[int]):
    """Its samples need what ``open_numbers`` sets."""

    offset: int

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def open_numbers(_: int) -> None:
    info: Any = get_worker_info()
    info.dataset.wrong = info.dataset.offset = 10
    del info.dataset.wrong


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("seed_samples", [False, True])
def test_a_process_of_the_loader_sets_attributes_of_the_dataset(
    tmp_path: Path, start: str, seed_samples: bool
) -> None:
    """As with a DataLoader of torch, although the dataset is wrapped."""
    loader = ElasticLoader(
        Numbers(),
        global_batch=4,
        shuffle=False,
        num_workers=1,
        worker_init_fn=open_numbers,
        multiprocessing_context=start,
        seed_samples=seed_samples,
        ledger=tmp_path,
    )
    for step in loader:
        (batch,) = step
        step.commit()
    assert batch.tolist() == [10, 11, 12, 13]
