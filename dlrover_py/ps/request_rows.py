"""The arrays of a worker's requests: checked, put into their formats, and ordered by bucket (pure).

Numpy does all work; nothing is sent here.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps.cluster_map import ClusterMap
from dlrover_py.ps.codecs import decode, encode
from dlrover_py.ps.feedback import MAX_KEPT_BYTES, Feedback, Rest
from dlrover_py.ps.hashing import Floats, Ids, Words, bucket_of, mix, salt_of
from dlrover_py.ps.specs import Formats, RowFormat, TableSpec

MAX_REQUEST_BYTES = 256 << 20
"""Bytes of the arrays of one request."""


@dataclass(slots=True)
class TableRows:
    """The rows of one table in a request, ordered by bucket."""

    table: str
    arrays: list[Any]
    """Ids, and gradients for a push, in the format in which they are sent."""
    starts: Ids
    """First row of each bucket, and the end."""
    order: Ids
    """Row of the request at each place."""
    rows: Floats | None = None
    """The rows that a pull has received."""
    format: RowFormat = RowFormat.FP32
    """How the rows of a pull are to come."""

    def of(self, buckets: tuple[int, ...]) -> list[Any]:
        """Return the part of the arrays that is in some buckets."""
        if self._all(buckets):
            return self.arrays
        return [
            np.concatenate([array[self.starts[one] : self.starts[one + 1]] for one in buckets])
            for array in self.arrays
        ]

    def receive(self, buckets: tuple[int, ...], arrays: list[Any]) -> None:
        """Keep the rows of some buckets that a server has sent for a pull."""
        rows = decode(arrays)
        assert self.rows is not None
        assert rows is not None
        if self._all(buckets):
            self.rows[:] = rows
            return
        at = 0
        for bucket in buckets:
            start, stop = self.starts[bucket], self.starts[bucket + 1]
            self.rows[start:stop] = rows[at : at + stop - start]
            at += stop - start

    def _all(self, buckets: tuple[int, ...]) -> bool:
        """Return whether buckets, in this order, are all rows."""
        at = 0
        for bucket in buckets:
            start, stop = self.starts[bucket], self.starts[bucket + 1]
            if start == stop:
                continue
            if start != at:
                return False
            at = stop
        return at == len(self.order)


class SentTables:
    """The formats in which a worker sends its tables, and what it has not sent of gradients yet."""

    def __init__(self, worker: str, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        """Start without tables.

        Args:
            worker: Name of the worker. The random roundings of two workers differ.
            max_kept_bytes: Bytes that are kept for each table with ``top``.
        """
        self._worker, self._max_kept_bytes = worker, max_kept_bytes
        self._formats: dict[str, Formats] = {}
        self._feedback: dict[str, Feedback] = {}
        self._seeds = itertools.count()
        """Seeds of random roundings: each push has another one."""

    def check(self, spec: TableSpec, formats: Formats) -> None:
        """Refuse a table that is used with other formats.

        Raises:
            ConfigError: It is.
        """
        known = self._formats.get(spec.name, formats)
        if known != formats:
            raise ConfigError(f"table {spec.name} is used twice: with {known}, and with {formats}")

    def add(self, spec: TableSpec, formats: Formats) -> None:
        """Use a table with some formats."""
        self._formats[spec.name] = formats
        if 0 < formats.top < spec.dim:
            memory = Feedback(spec.dim, formats, self._max_kept_bytes)
            self._feedback.setdefault(spec.name, memory)

    def unsent(self) -> Iterator[tuple[str, tuple[Ids, Floats]]]:
        """Yield what was not sent of each table's gradients. A whole push of it empties it."""
        for name, one in self._feedback.items():
            yield name, one.unsent()

    def forget(self) -> None:
        """Forget what was not sent."""
        for one in self._feedback.values():
            one.clear()

    def ordered(
        self, current: ClusterMap, tables: Mapping[str, Sequence[Any]], *, push: bool, whole: bool
    ) -> tuple[list[TableRows], tuple[int, ...]]:
        """Return the rows of a request, and the buckets that they are in.

        A request that is refused changes nothing of what was not sent.

        Args:
            current: The map, with the tables and the number of buckets.
            tables: The arrays of each table: ids, and gradients for a push.
            push: Whether it is a push.
            whole: Whether this is all that was not sent of the tables, which nothing is left of.

        Raises:
            ConfigError: An array has another type or shape, a gradient is no number that the format
                has, a table does not exist, or the request is too large.
        """
        count = len(current.placements)
        parts: list[TableRows] = []
        rests: list[tuple[Feedback, Rest]] = []
        size = 0
        touched = np.zeros(count, np.bool_)
        for name, arrays in tables.items():
            spec = current.table(name)
            if spec is None:
                raise ConfigError(f"table {name!r} does not exist: expected create() before")
            ids = _checked_ids(spec, arrays, push=push)
            size += ids.nbytes + 4 * len(ids) * spec.dim
            if size > MAX_REQUEST_BYTES:
                raise ConfigError(
                    f"a request has more than {MAX_REQUEST_BYTES} bytes: use smaller batches"
                )
            used = self._formats.get(name, Formats())
            if push:
                seed = np.array([next(self._seeds), salt_of(self._worker), salt_of(name)], "u8")
                memory = self._feedback.get(name)
                grads, feedback = np.asarray(arrays[1]), None if whole else memory
                ids, arrays, rest = _encoded(spec, used.push, ids, grads, seed, feedback)
                if memory is not None:
                    rests.append((memory, rest))
            of = bucket_of(np.ascontiguousarray(ids), salt_of(name), count)
            order = np.argsort(of, kind="stable")
            sizes = np.bincount(of, minlength=count)
            touched |= sizes > 0
            starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
            ordered = [np.asarray(array)[order] for array in arrays]
            rows = None if push else np.empty((len(ids), spec.dim), np.float32)
            parts.append(TableRows(name, ordered, starts, order, rows, used.pull))
        for memory, rest in rests:
            memory.keep(rest)
        return parts, tuple(np.flatnonzero(touched).tolist())


def received(parts: Sequence[TableRows]) -> dict[str, Floats]:
    """Return the rows of a pull by table, in the order in which they were asked for."""
    found = {}
    for part in parts:
        if part.rows is not None:
            found[part.table] = rows = np.empty_like(part.rows)
            rows[part.order] = part.rows
    return found


def _checked_ids(spec: TableSpec, arrays: "Sequence[Any]", *, push: bool) -> Ids:
    """Return the ids of a request for a table.

    Args:
        spec: The table.
        arrays: Ids, and gradients for a push.
        push: Whether it is a push.

    Raises:
        ConfigError: An array has another type or shape.
    """
    ids = np.asarray(arrays[0])
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ConfigError(
            f"table {spec.name}: expected ids as int64 [n], found {ids.dtype} {ids.shape}"
        )
    if push:
        found = np.asarray(arrays[1])
        if found.dtype != np.float32 or found.shape != (len(ids), spec.dim):
            raise ConfigError(
                f"table {spec.name}: expected gradients as float32 ({len(ids)}, {spec.dim}), "
                f"found {found.dtype} {found.shape}"
            )
    return ids


def _encoded(
    spec: TableSpec,
    format: RowFormat,
    ids: Ids,
    grads: Floats,
    seed: Words,
    feedback: Feedback | None,
) -> tuple[Ids, list[Any], Rest]:
    """Return the ids of a push, all its arrays, and what it does not send.

    A push that is sent again has the same arrays.

    Args:
        spec: The table.
        format: The format of its gradients.
        ids: The ids.
        grads: The gradients, float32.
        seed: Numbers on which the random rounding depends.
        feedback: What was not sent before, if only some values are sent. None: all are.

    Raises:
        ConfigError: A gradient is no number, or none that the format has.
    """
    rest = Rest(ids[:0], grads[:0], alone=True)
    # Each server would refuse its own part alone. In the memory, such a number would stay.
    finite = np.isfinite(grads).all(axis=1)
    if not finite.all():
        raise ConfigError(
            f"table {spec.name}: the gradient of id {ids[np.argmin(finite)]} is infinite or not a "
            "number: expected numbers; nothing was sent, so this step may be left out"
        )
    if feedback is not None:
        ids, arrays, rest = feedback.encode(ids, grads, int(np.bitwise_xor.reduce(mix(seed))))
    elif format is RowFormat.FP32:
        return ids, [ids, grads], rest
    else:
        arrays = encode(grads, format, int(np.bitwise_xor.reduce(mix(seed))))
    carried = decode(arrays, spec.dim)
    if carried is None or not np.isfinite(carried).all():
        raise ConfigError(
            f"table {spec.name}: expected gradients that are numbers which {format} has, found "
            f"values up to {np.abs(grads).max()}; use bf16 for large ones"
        )
    return ids, [ids, *arrays], rest
