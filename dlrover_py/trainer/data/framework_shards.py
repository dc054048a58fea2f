"""Shards of datasets of other frameworks: iterables that are read from the front, and chunks.

The classes work with the objects that a script has made. They import no framework.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data.shard_sources import fingerprint_of

LONGEST = 2**32
"""Records that a shard of unknown length may have. It counts as that long."""


class IterableSource:
    """Shards that can only be read from the front, of a length that nobody knows before.

    A unit is a record. When a shard ends, the units behind its last record are credited as well.
    """

    def __init__(
        self, shards: int, begin: Callable[[int, int], Iterable[Any]], *, fingerprint: str = ""
    ) -> None:
        """Name the shards.

        Args:
            shards: number of shards, the same in each run.
            begin: ``begin(shard, skip)`` returns the records of a shard without the first
                ``skip``. Their order must be the same each time.
            fingerprint: says which data it is, in up to 64 characters; empty: unknown.

        Raises:
            ConfigError: there are no shards.
        """
        if shards < 1:
            raise ConfigError(f"data: expected at least 1 shard, found {shards}")
        self.sizes = [(shards, LONGEST)]
        self.fingerprint = fingerprint
        self._begin = begin

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the records of a part of a shard. See ``ShardSource``.

        Args:
            shard: number of the shard.
            start: number of the first record.
            stop: number of the record after the last one.
        """
        records = islice(self._begin(shard, start), stop - start)
        for unit, record in enumerate(records, start + 1):
            yield record, unit


class ChunkSource:
    """The chunks of a dataset with numbered samples, which are stored together. A unit is a sample.

    ``ChunkSource(dataset, dataset.samples_per_shard)`` is right for a Mosaic ``StreamingDataset``.
    """

    def __init__(self, dataset: Any, chunks: Sequence[int]) -> None:
        """Take the sizes of the chunks.

        Args:
            dataset: its samples are read by number, ``dataset[number]``.
            chunks: number of samples of each chunk, in the order of the samples. Empty chunks are
                left out: Mosaic writes one if its first sample is larger than a shard may be.

        Raises:
            ConfigError: the chunks have no samples, or are not the whole dataset.
        """
        self._dataset = dataset
        self.fingerprint = fingerprint_of(dataset)
        self.sizes = [(1, int(size)) for size in chunks if size]
        if not self.sizes or min(size for _, size in self.sizes) < 1:
            raise ConfigError(f"data: expected chunks with samples, found {[*map(int, chunks)]}")
        self._first = [0]
        for _, size in self.sizes:
            self._first.append(self._first[-1] + size)
        if len(dataset) != self._first[-1]:
            raise ConfigError(
                f"data: expected chunks of {len(dataset)} samples, as the dataset has, found "
                f"{self._first[-1]}"
            )

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the samples of a part of a chunk. See ``ShardSource``.

        Args:
            shard: number of the chunk.
            start: first sample of the part, from the start of the chunk.
            stop: the sample after the last one.
        """
        for offset in range(start, stop):
            yield self._dataset[self._first[shard] + offset], offset + 1


def hugging_face_source(dataset: Any) -> IterableSource:
    """Return the shards of an ``IterableDataset`` of Hugging Face's ``datasets``.

    A shard is one of ``dataset.num_shards``, with all transforms of the dataset. A shard that was
    begun by a lost worker goes on behind its credited records, by ``skip``.

    Raises:
        ConfigError: it is another kind of dataset.
    """
    if not all(hasattr(dataset, name) for name in ("num_shards", "shard", "skip", "state_dict")):
        raise ConfigError(
            f"data: expected an IterableDataset of datasets, found {type(dataset).__name__}: use "
            "MapSource or ElasticLoader for a Dataset"
        )
    shards = int(dataset.num_shards)

    def begin(shard: int, skip: int) -> Iterable[Any]:
        part = dataset.shard(num_shards=shards, index=shard)
        records: Iterable[Any] = part.skip(skip) if skip else part
        return records

    return IterableSource(shards, begin)
