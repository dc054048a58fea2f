"""Rows and gradients as messages carry them: whole, or as numbers of 16 or 8 bits.

A message need not name the format, because the types of the arrays tell it. All arrays have one
entry for each row, so a part of the rows is a part of each array.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dlrover_py.ps.hashing import Floats
from dlrover_py.ps.specs import RowFormat

_LEVELS = 127
"""The greatest number of ``int8`` rows. -128 is not used."""
_SMALLEST = np.float32(np.finfo(np.float32).tiny)
_CHUNK = 4096
"""Rows that are rounded at a time, so that temporary arrays fit into the cache."""


def encode(rows: Floats, format: RowFormat, seed: int = 0) -> list[Any]:
    """Return the arrays that carry rows.

    The error of each value ``x`` is at most:

    - ``fp16``: ``abs(x) / 2048``, or ``2**-25`` if that is more. From 65520, it is infinite.
    - ``bf16``: ``abs(x) / 256``, or ``2**-134`` if that is more.
    - ``int8``: less than 1/127 of the greatest absolute value of its row. It is rounded up or down
      at random, so that the mean of many roundings is ``x``. A row with no value from 2e-36 is 0.

    Args:
        rows: Rows, float32, shape ``[n, dim]``.
        format: The format.
        seed: Chooses the random roundings of ``int8``. The same one gives the same arrays.
    """
    if format is RowFormat.FP16:
        with np.errstate(over="ignore"):
            return [rows.astype(np.float16)]
    if format is RowFormat.BF16:
        bits = np.ascontiguousarray(rows).view(np.uint32)
        rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        odd = np.isnan(rows)
        rounded[odd] = 0x7FC0
        return [rounded]
    if format is RowFormat.INT8:
        return _as_bytes(rows, seed)
    return [rows]


def _as_bytes(rows: Floats, seed: int) -> list[Any]:
    """Return rows as int8, and the scale of each row."""
    values = np.empty(rows.shape, np.int8)
    scales = np.empty(len(rows), np.float32)
    generator = np.random.Generator(np.random.SFC64(seed))
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            scale = np.maximum(part.max(axis=1), -part.min(axis=1)) / np.float32(_LEVELS)
            scale[scale < _SMALLEST] = 0
            scaled = part / np.where(scale > 0, scale, np.float32(np.inf))[:, None]
            scaled += generator.random(part.shape, np.float32)
            np.floor(scaled, out=scaled)
            np.clip(scaled, -_LEVELS, _LEVELS, out=scaled)
            values[start : start + _CHUNK] = scaled
            scales[start : start + _CHUNK] = scale
    return [values, scales]


def decode(arrays: Sequence[Any]) -> Floats | None:
    """Return the rows that arrays carry, as float32; None if they are not of such a format.

    Args:
        arrays: What :func:`encode` returned, or anything else.
    """
    kinds = [(array.dtype.str, array.ndim) for array in arrays]
    if kinds in ([("<f4", 2)], [("<f2", 2)]):
        return arrays[0].astype(np.float32, copy=False)  # type: ignore[no-any-return]
    if kinds == [("<u2", 2)]:
        wide = arrays[0].astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)  # type: ignore[no-any-return]
    if kinds == [("|i1", 2), ("<f4", 1)] and len(arrays[0]) == len(arrays[1]):
        with np.errstate(all="ignore"):
            return arrays[0].astype(np.float32) * arrays[1][:, None]  # type: ignore[no-any-return]
    return None


def decoded(payload: list[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    """Return the payload of a push with float32 gradients. Other arrays stay as they are."""
    found = []
    for table, arrays in payload:
        rows = decode(arrays[1:])
        found.append((table, arrays if rows is None else [arrays[0], rows]))
    return found
