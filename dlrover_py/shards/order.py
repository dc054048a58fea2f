"""The order of the shards in an epoch: a keyed permutation that needs no table.

The permutation is a Feistel network over numbers of an even number of bits. A number that falls
outside of the range is permuted again until it is inside. A ledger holds positions, so the order of
a seed must not change between versions: ``tests/unit/test_shard_queue.py`` has some orders.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate

ROUNDS = 4
"""Rounds of the network. Its round function is a cryptographic hash, so four are enough."""


@dataclass(slots=True)
class ShardOrder:
    """The order of the shards in one epoch. It depends on nothing but these fields."""

    shards: int
    """Number of shards."""
    seed: int
    epoch: int
    shuffle: bool = True
    """False gives the order of the dataset."""
    _bits: int = field(init=False)
    """Bits of one half of a number."""

    def __post_init__(self) -> None:
        self._bits = max(1, ((self.shards - 1).bit_length() + 1) // 2)

    def at(self, position: int) -> int:
        """Return the shard at a position from 0 to ``shards``."""
        if not self.shuffle:
            return position
        while True:
            position = self._permuted(position)
            if position < self.shards:
                return position

    def _permuted(self, number: int) -> int:
        """Run the network once. The result may be outside of the range."""
        mask = (1 << self._bits) - 1
        left, right = number >> self._bits, number & mask
        for turn in range(ROUNDS):
            text = f"{self.seed}/{self.epoch}/{turn}/{right}"
            digest = blake2b(text.encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return left << self._bits | right


class ShardTable:
    """Where the shards of a dataset begin, and how large they are."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Take the sizes as pairs: how many shards in a row have a size, and that size."""
        self._sizes = sizes
        self._first_shards = [0, *accumulate(count for count, _ in sizes)]
        self._first_samples = [0, *accumulate(count * each for count, each in sizes)]

    def place(self, shard: int) -> tuple[int, int]:
        """Return the first sample of a shard, and its size."""
        run = bisect_right(self._first_shards, shard) - 1
        each = self._sizes[run][1]
        return self._first_samples[run] + (shard - self._first_shards[run]) * each, each

    def shard(self, sample: int) -> int:
        """Return the shard of a sample of the dataset."""
        run = bisect_right(self._first_samples, sample) - 1
        return self._first_shards[run] + (sample - self._first_samples[run]) // self._sizes[run][1]
