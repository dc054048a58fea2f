"""The order of the samples in an epoch: a keyed permutation that needs no table.

The permutation is a Feistel network over the two digits of a number in mixed bases, as in J. Black
and P. Rogaway, *Ciphers with arbitrary finite domains*, CT-RSA 2002. Each round adds a hash of one
digit and a key to the other digit. The product of the bases is at least the number of samples, and
exceeds it by less than 2·√length + 1. A number outside of the range is permuted again until it is
inside (*cycle walking*). The keys come from the seed and the epoch.

A checkpoint holds only a position, so the order of a seed must not change between versions.
``tests/unit/test_sample_order.py`` has the first numbers of some orders.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import torch
from torch import Tensor

ROUNDS = 12
"""Rounds of the network. Fewer would do for large sets; the digits of small sets have few bits."""
_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples in one epoch. It does not depend on the world."""

    length: int
    """Number of samples, at most 2**53."""
    seed: int
    epoch: int
    shuffle: bool = True
    """False gives the order of the dataset."""
    block: int = 1
    """Number of neighbouring samples that stay together, for datasets in files. The blocks are
    permuted, and the samples inside of each block. The rest that fills no block comes last."""

    def at(self, positions: Tensor) -> Tensor:
        """Return the samples at some positions; both are int64 tensors.

        Positions are from 0 to ``length - 1``. Without ``shuffle`` the argument itself is returned.
        """
        if not self.shuffle:
            return positions
        if self.block == 1:
            return self._permutation("samples", self.length).at(positions)
        blocks = self.length // self.block
        full = blocks * self.block
        samples = torch.empty_like(positions)
        inside = positions < full
        block = self._permutation("blocks", blocks).at(positions[inside] // self.block)
        within = self._permutation("within", self.block).at(
            positions[inside] % self.block, tweak=block
        )
        samples[inside] = block * self.block + within
        rest = self._permutation("rest", self.length - full).at(positions[~inside] - full)
        samples[~inside] = full + rest
        return samples

    @cached_property
    def _permutations(self) -> "dict[str, _Permutation]":
        """The permutations that were used so far, by purpose."""
        return {}

    def _permutation(self, purpose: str, length: int) -> "_Permutation":
        """Return the permutation of a range that belongs to seed, epoch and purpose."""
        found = self._permutations.get(purpose)
        if found is None:
            found = _Permutation(length, f"{self.seed}/{self.epoch}/{purpose}")
            self._permutations[purpose] = found
        return found


class _Permutation:
    """A permutation of the numbers from 0 to ``length - 1``, chosen by a key."""

    def __init__(self, length: int, key: str) -> None:
        self._length = length
        self._low_base = isqrt(max(length - 1, 0)) + 1  # the smallest number with a square ≥ length
        self._high_base = max(1, -(-length // self._low_base))
        digest = hashlib.blake2b(key.encode(), digest_size=4 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 4 * ROUNDS, 4)]

    def at(self, numbers: Tensor, *, tweak: Tensor | None = None) -> Tensor:
        """Return the image of each number.

        Args:
            numbers: int64 tensor of one dimension, with numbers from 0 to ``length - 1``.
            tweak: for each number, which of many permutations to use; None: the same for all.
        """
        if tweak is not None:
            tweak = _hash(tweak & _LOW_32)
        found = self._encrypt(numbers, tweak)
        while bool((outside := found >= self._length).any()):
            found[outside] = self._encrypt(
                found[outside], None if tweak is None else tweak[outside]
            )
        return found

    def _encrypt(self, numbers: Tensor, tweak: Tensor | None) -> Tensor:
        """Run the network once. The result may be outside of the range."""
        low, high = numbers % self._low_base, numbers // self._low_base
        for index, key in enumerate(self._keys):
            mask = key if tweak is None else tweak ^ key
            if index % 2:
                high = _add(high, _hash(low ^ mask), self._high_base)
            else:
                low = _add(low, _hash(high ^ mask), self._low_base)
        return high * self._low_base + low


def hash_samples(samples: Tensor) -> Tensor:
    """Return a hash of 64 bits of each sample; both are int64 tensors of one dimension.

    The hashes of samples may be added up (modulo 2**64), so that their order does not matter.
    """
    # Products are modulo 2**64. The multipliers are odd, and have their bits from 2**64 / φ.
    values = samples * -0x61C8864680B583EB
    values ^= values >> 32
    values *= -0x61C8864680B583EB
    values ^= values >> 29
    return values


def _add(digits: Tensor, hashes: Tensor, base: int) -> Tensor:
    """Return the sum of digits and hashes, as digits in a base. The hashes are overwritten.

    Args:
        digits: numbers from 0 to ``base - 1``.
        hashes: numbers of 32 bits, which are scaled to the same range.
        base: number of digits, less than 2**31.
    """
    # A loader does this for each sample, and a new tensor costs more than the arithmetic.
    hashes *= base
    hashes >>= 32
    hashes += digits
    hashes %= base
    return hashes


def _hash(values: Tensor) -> Tensor:
    """Return a hash of 32 bits of each value of 32 bits. The values are overwritten.

    The multipliers and shifts are those of *lowbias32* by C. Wellons, in the public domain
    (https://nullprogram.com/blog/2018/07/31/).
    """
    values ^= values >> 16
    values *= 0x7FEB352D
    values &= _LOW_32
    values ^= values >> 15
    values *= 0x846CA68B
    values &= _LOW_32
    values ^= values >> 16
    return values
