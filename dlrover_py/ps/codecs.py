"""Rows and gradients as messages carry them: whole, or as numbers of 16 or 8 bits.

A message need not name the format, because the types of the arrays tell it. All arrays have one
entry for each row, so a part of the rows is a part of each array.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover_py.ps.hashing import Floats
from dlrover_py.ps.specs import RowFormat

_LEVELS = 127
"""The greatest number of ``int8`` rows. -128 is not used."""
_SMALLEST = np.float32(np.finfo(np.float32).tiny)
_CHUNK = 1024
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
        return [_as_bf16(rows)]
    if format is RowFormat.INT8:
        return _as_int8(rows, seed)
    return [rows]


def _as_bf16(rows: Floats) -> npt.NDArray[np.uint16]:
    """Return the upper 16 bits of rows, rounded to the nearest number, to an even one of two."""
    values = np.empty(rows.shape, np.uint16)
    for start in range(0, len(rows), _CHUNK):
        part = np.ascontiguousarray(rows[start : start + _CHUNK])
        bits = part.view(np.uint32) >> np.uint32(16)
        bits &= np.uint32(1)
        bits += np.uint32(0x7FFF)
        bits += part.view(np.uint32)
        bits >>= np.uint32(16)
        nan = np.isnan(part)
        if nan.any():
            bits[nan] = 0x7FC0
        values[start : start + _CHUNK] = bits
    return values


def _as_int8(rows: Floats, seed: int) -> list[Any]:
    """Return rows as int8, and the scale of each row."""
    values = np.empty(rows.shape, np.int8)
    scales = np.empty(len(rows), np.float32)
    bits = np.random.SFC64(seed).random_raw((rows.size + 3) // 4).view(np.uint16)
    draws = bits[: rows.size].reshape(rows.shape)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), _CHUNK):
            here = slice(start, start + _CHUNK)
            part = rows[here]
            scale = _greatest(np.abs(part)) / np.float32(_LEVELS)
            scale[scale < _SMALLEST] = 0
            scaled = draws[here].astype(np.float32)
            scaled *= np.float32(2.0**-16)
            scaled += part / np.where(scale > 0, scale, np.float32(np.inf))[:, None]
            np.floor(scaled, out=scaled)
            np.clip(scaled, -_LEVELS, _LEVELS, out=scaled)
            values[here], scales[here] = scaled, scale
    return [values, scales]


def _greatest(part: Floats) -> Floats:
    """Return the greatest value of each row; faster than ``max(axis=1)`` for rows of this size."""
    while part.shape[1] > 1:
        half = (part.shape[1] + 1) // 2
        part = np.maximum(part[:, :half], part[:, -half:])
    return part[:, 0]


def with_columns(columns: Any, values: list[Any]) -> list[Any]:
    """Return the arrays that carry some columns of each row. All others are 0.

    Args:
        columns: Columns of each row, shape ``[n, k]``.
        values: Their values, as :func:`encode` returned them.
    """
    return [columns.astype(np.uint16), *values]


def decode(arrays: Sequence[Any], dim: int = 0) -> Floats | None:
    """Return the rows that arrays carry, as float32; None if they are not of such a format.

    Args:
        arrays: What :func:`encode` or :func:`with_columns` returned, or anything else.
        dim: Values in a row, if the arrays may have some columns only.
    """
    if dim and len(arrays) > 1 and (arrays[0].dtype.str, arrays[0].ndim) == ("<u2", 2):
        columns, values = arrays[0], decode(arrays[1:])
        if values is None or values.shape != columns.shape or (columns >= dim).any():
            return None
        rows = np.zeros((len(columns), dim), np.float32)
        np.put_along_axis(rows, columns.astype(np.int64), values, axis=1)
        return rows
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


def decoded(
    payload: list[tuple[str, list[Any]]], dims: Mapping[str, int]
) -> list[tuple[str, list[Any]]]:
    """Return the payload of a push with float32 gradients. Other arrays stay as they are.

    Args:
        payload: The payload.
        dims: Values in a row of each table.
    """
    found = []
    for table, arrays in payload:
        rows = decode(arrays[1:], dims.get(table, 0))
        found.append((table, arrays if rows is None else [arrays[0], rows]))
    return found
