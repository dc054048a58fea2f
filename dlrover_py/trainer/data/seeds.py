"""Random numbers that depend on seed, epoch and sample only: for random transforms of a dataset."""

import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dlrover_py.trainer.data.sampler import ElasticSampler
from dlrover_py.trainer.data.wrapped import WrappedDataset


class SeededSampler:
    """Yields the micro-batches of a sampler, where each sample has its epoch beside it."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        """Return the number of micro-batches to the end of the epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield lists of epoch and sample."""
        epoch = self._sampler.epoch
        for samples in self._sampler:
            yield [(epoch, sample) for sample in samples]


class SeededDataset(WrappedDataset):
    """A map-style dataset whose items are read with random generators of their own.

    The generators of the process are put back after each item, so those of a script that reads
    without workers do not change.
    """

    _own = WrappedDataset._own | {"_seed"}

    def __init__(self, dataset: Any, seed: int) -> None:
        """Wrap a dataset.

        Args:
            dataset: a map-style dataset.
            seed: the seed of the training.
        """
        super().__init__(dataset)
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Return a sample of the dataset, given its epoch and its number."""
        epoch, sample = key
        digest = hashlib.blake2b(f"{self._seed}/{epoch}/{sample}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        generator: Any = torch.default_generator
        numpy = sys.modules.get("numpy.random")
        before = (
            generator.get_state(),
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )
        try:
            generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.seed(seed & 0xFFFFFFFF)
            return self._dataset[sample]
        finally:
            generator.set_state(before[0])
            random.setstate(before[1])
            if numpy is not None:
                numpy.set_state(before[2])
