"""Hashes of ids: the bucket of a row, and its first values. All work on whole arrays."""

import numpy as np
import numpy.typing as npt
import xxhash

from dlrover_py.ps.specs import InitKind, InitSpec

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_UNIT = np.float64(2.0**-53)


def mix(words: Words) -> Words:
    """Return splitmix64 of each word: a bijection that spreads all bits."""
    mixed = words + _STEP
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def salt_of(table: str) -> int:
    """Return the number that makes the hashes of two tables differ."""
    return int(xxhash.xxh3_64_intdigest(table.encode()))


def bucket_of(ids: Ids, salt: int, buckets: int) -> Ids:
    """Return the bucket of each id.

    Args:
        ids: Ids, shape ``[n]``.
        salt: :func:`salt_of` the table.
        buckets: Number of buckets, below 2**31.
    """
    mixed = mix(ids.view(np.uint64) ^ np.uint64(salt))
    mixed >>= np.uint64(32)
    mixed *= np.uint64(buckets)
    mixed >>= np.uint64(32)
    return mixed.view(np.int64)


def first_rows(ids: Ids, salt: int, dim: int, init: InitSpec) -> Floats:
    """Return the first values of rows, which depend on nothing but these arguments.

    Args:
        ids: Ids, shape ``[n]``.
        salt: :func:`salt_of` the table.
        dim: Values in a row.
        init: The distribution and its seed.

    Returns:
        The rows, shape ``[n, dim]``.
    """
    if init.kind is InitKind.UNIFORM and init.low == init.high:
        return np.full((len(ids), dim), init.low, np.float32)
    seed = mix(np.array([init.seed ^ salt], np.uint64))
    base = mix(ids.view(np.uint64) ^ seed)
    columns = np.arange(dim, dtype=np.uint64) * np.uint64(2)
    with np.errstate(over="ignore"):
        first = _unit(mix(base[:, None] ^ columns))
        if init.kind is InitKind.UNIFORM:
            return (init.low + (init.high - init.low) * first).astype(np.float32)
        second = _unit(mix(base[:, None] ^ (columns + np.uint64(1))))
    radius = np.sqrt(-2.0 * np.log1p(-first))
    return (init.low + init.high * radius * np.cos(2 * np.pi * second)).astype(np.float32)


def _unit(words: Words) -> npt.NDArray[np.float64]:
    """Return numbers of at least 0 and below 1."""
    return (words >> np.uint64(11)).astype(np.float64) * _UNIT
