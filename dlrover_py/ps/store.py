"""The tables of one server, in memory: rows by id, worked on whole arrays at once.

A *payload* is a list of ``(table, arrays)``: what a message carries of each table. The arrays of a
pull are ``[ids]``, those of a push ``[ids, gradients]``, those of an answer ``rows``, of which
``codecs`` has the forms. A *record* is what replication carries: ``[ids, rows, steps, *slots]``. A
row with -1 steps was dropped.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from dlrover_py.ps.codecs import encode
from dlrover_py.ps.columns import Column
from dlrover_py.ps.counts import RecentCounts
from dlrover_py.ps.hashing import Floats, Ids, bucket_of, first_rows, salt_of
from dlrover_py.ps.index import IdIndex
from dlrover_py.ps.optimizers import first_slots, update
from dlrover_py.ps.specs import RowFormat, TableSpec

Array = npt.NDArray[np.generic]
Payload = list[tuple[str, list[Array]]]

_CHUNK = 2048
"""Rows that are updated at a time: their values and temporary arrays fit into the cache."""

MAX_EXPIRED = 1 << 14
"""Rows over their time to live that a push drops at most, or twice its own rows if that is more.

After a pause, all rows of a table may be over it. Workers and copies must not wait for all."""


def sorted_unique(ids: Ids) -> Ids:
    """Return each id once, in ascending order.

    ``np.unique`` of numpy 2.4 takes 12 to 25 times as long for ids that are different.
    """
    ids = np.sort(ids)
    first = np.ones(len(ids), np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    return ids[first]


def by_bucket(ids: Ids, of: Ids) -> dict[int, Ids]:
    """Return ids by their bucket.

    Args:
        ids: The ids.
        of: The bucket of each.
    """
    order = np.argsort(of, kind="stable")
    buckets, first = np.unique(of[order], return_index=True)
    parts = np.split(ids[order], first[1:])
    return dict(zip(buckets.tolist(), parts, strict=False))  # without ids, there is one empty part


class Table:
    """The rows of one table that a server has."""

    def __init__(self, spec: TableSpec, buckets: int = 1) -> None:
        """Make an empty table.

        Args:
            spec: The table.
            buckets: Number of buckets of the job. Each has the same share of ``max_rows``.
        """
        self.spec = spec
        self.salt = salt_of(spec.name)
        self._index = IdIndex()
        self._rows = Column(np.float32, spec.dim)
        self._slots = [Column(np.float32, width) for width in spec.optimizer.slots(spec.dim)]
        self._steps = Column(np.int64)
        self._ids = Column(np.int64)
        self._of = Column(np.int32)
        """The bucket of each row; -1 where there is no row."""
        self._marks = Column(np.int64)
        """Scratch: finds ids that are twice in a push."""
        self._free: Ids = np.zeros(0, np.int64)
        """Row numbers below ``_end`` that hold no row."""
        self._end = self._capacity = 0
        self._counts = RecentCounts() if spec.keep.min_count > 1 else None
        self._limit = max(1, spec.keep.max_rows // buckets) if spec.keep.max_rows else 0
        """Rows of a bucket; 0 for any number."""
        self._sizes: Ids = np.zeros(buckets, np.int64)
        """Rows of each bucket, if there is a limit."""
        self._used = Column(np.int64)
        """The newest change when each row was last pushed or read, if there is a limit."""
        self._changes = 0
        self._ttl_s = spec.keep.ttl_s
        self._used_at = Column(np.float64)
        """The time at which each row was last pushed or read, if rows have a time to live."""
        self._look_at = -np.inf
        """When all rows are looked at next, if they have a time to live."""
        self._old: dict[int, Ids] = {}
        """Ids, by bucket, of rows that were over their time to live at the last look."""
        self._columns = [self._rows, *self._slots, self._steps, self._ids, self._of]
        self._columns += [self._used] * (self._limit > 0) + [self._used_at] * (self._ttl_s > 0)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, with all that belongs to them but the index."""
        return self._end * sum(column.row_bytes for column in self._columns)

    @property
    def record_bytes(self) -> int:
        """Bytes of a row in a record."""
        return 16 + self._rows.row_bytes + sum(slot.row_bytes for slot in self._slots)

    def read(self, ids: Ids, now: float | None = None) -> Floats:
        """Return rows, shape ``[n, dim]``. A row that no push has changed has its first values.

        Args:
            ids: Their ids.
            now: The time, in seconds, of this use of the rows: others are dropped before them. If
                None, it does not count as a use.
        """
        at = self._index.find(ids)
        missing = at < 0
        found = at[~missing] if missing.any() else at
        if self._limit and now is not None:
            self._used.array[found] = self._changes
        if self._ttl_s and now is not None:
            self._used_at.array[found] = now
        if len(found) == len(ids):
            return self._rows.array.take(at, axis=0)
        rows = np.empty((len(ids), self.spec.dim), np.float32)
        rows[~missing] = self._rows.array.take(found, axis=0)
        rows[missing] = first_rows(ids[missing], self.salt, self.spec.dim, self.spec.init)
        return rows

    def apply(self, ids: Ids, grads: Floats, now: float = 0.0) -> list[Array]:
        """Apply gradients and return the record of the changed rows, and of those that it dropped.

        Args:
            ids: Ids; gradients of the same id are summed first.
            grads: Gradients, shape ``[n, dim]``.
            now: The time in seconds.
        """
        if self._counts is not None:
            fresh = self._index.find(ids) < 0
            unique = sorted_unique(ids[fresh])
            few = unique[self._counts.add(unique) < self.spec.keep.min_count]
            if len(few):
                chosen = ~fresh | ~np.isin(ids, few)
                ids, grads = ids[chosen], grads[chosen]
        at = self._row_numbers(ids)
        order = np.arange(len(ids), dtype=np.int64)
        self._marks.array[at] = order
        if (self._marks.array[at] != order).any():
            at, first, places = np.unique(at, return_index=True, return_inverse=True)
            summed = np.zeros((len(at), grads.shape[1]), np.float32)
            np.add.at(summed, places, grads)
            ids, grads = ids[first], summed
        rows = np.empty((len(ids), self.spec.dim), np.float32)
        slots = [np.empty((len(ids), *slot.array.shape[1:]), np.float32) for slot in self._slots]
        steps = self._steps.array[at] + 1
        self._steps.array[at] = steps
        for start in range(0, len(ids), _CHUNK):
            part = slice(start, start + _CHUNK)
            here = at[part]
            values = self._rows.array.take(here, axis=0, out=rows[part], mode="clip")
            kept = [
                mine.array.take(here, axis=0, out=copy[part], mode="clip")
                for mine, copy in zip(self._slots, slots, strict=True)
            ]
            update(self.spec.optimizer, values, kept, steps[part], grads[part])
            self._rows.array[here] = values
            for mine, copy in zip(self._slots, kept, strict=True):
                mine.array[here] = copy
        record: list[Array] = [ids, rows, steps, *slots]
        if self._ttl_s:
            record = self._expired(at, record, now)
        return self._trimmed(at, record) if self._limit else record

    def install(self, record: list[Array], now: float = 0.0) -> None:
        """Take over rows of a record as they are, and drop those that it has dropped.

        Args:
            record: The record.
            now: The time in seconds.
        """
        ids: Ids = record[0].view(np.int64)
        dropped = record[2].view(np.int64) < 0
        if dropped.any():
            at = self._index.find(ids[dropped])
            self._remove(ids[dropped][at >= 0], at[at >= 0])
            record = [array[~dropped] for array in record]
            ids = ids[~dropped]
        at = self._row_numbers(ids, fill=False)
        if self._limit:
            self._changes += 1
            self._used.array[at] = self._changes
        if self._ttl_s:
            self._used_at.array[at] = now
        self._rows.array[at] = record[1]
        self._steps.array[at] = record[2]
        for mine, copy in zip(self._slots, record[3:], strict=True):
            mine.array[at] = copy

    def rows_in(self, bucket: int) -> Ids:
        """Return the row numbers of all rows of a bucket."""
        return np.flatnonzero(self._of.array[: self._end] == bucket)

    def use(self, buckets: Array, now: float) -> None:
        """Count all rows of some buckets as used, for ``max_rows`` and ``ttl_s``.

        Args:
            buckets: Whether a bucket is one of them, bool ``[buckets]``.
            now: The time in seconds.
        """
        if self._limit or self._ttl_s:
            of = self._of.array[: self._end]
            at = np.flatnonzero(buckets[of] & (of >= 0))
            if self._limit:
                self._used.array[at] = self._changes
            if self._ttl_s:
                self._used_at.array[at] = now

    def record(self, bucket: int, at: Ids) -> list[Array]:
        """Return the record of some rows.

        Args:
            bucket: Their bucket.
            at: Their row numbers. If there is no row of the bucket any more, it is left out.
        """
        at = at[self._of.array[at] == bucket]
        columns = [self._ids, self._rows, self._steps, *self._slots]
        return [column.array.take(at, axis=0) for column in columns]

    def drop(self, dropped: Collection[int]) -> None:
        """Remove all rows of some buckets."""
        chosen = np.zeros(len(self._sizes) + 1, np.bool_)  # the last one is for -1, no bucket
        chosen[list(dropped)] = True
        at = np.flatnonzero(chosen[self._of.array[: self._end]])
        if len(at):
            self._remove(self._ids.array[at], at)

    def _remove(self, ids: Ids, at: Ids) -> None:
        """Remove rows, which exist.

        Args:
            ids: Their ids.
            at: Their row numbers.
        """
        self._index.remove(ids)
        self._free = np.concatenate([self._free, at])
        if self._limit:
            self._sizes -= np.bincount(self._of.array[at], minlength=len(self._sizes))
        self._of.array[at] = -1

    def _per_bucket(self, ids: Ids) -> Ids:
        count = len(self._sizes)
        return np.bincount(bucket_of(ids, self.salt, count), minlength=count)

    def _trimmed(self, pushed: Ids, record: list[Array]) -> list[Array]:
        """Drop the oldest rows of buckets that have too many; return the record with these.

        A bucket that a push has not changed is not touched, because its copies would not learn it.
        The rows of this push stay. Some more rows are dropped than are needed, so that this is
        seldom.

        Args:
            pushed: Row numbers of the push.
            record: The record of the push.
        """
        self._changes += 1
        self._used.array[pushed] = self._changes
        limit, changed = self._limit, self._per_bucket(record[0].view(np.int64)) > 0
        if not (changed & (self._sizes > limit)).any():
            return record
        full = changed & (self._sizes > limit - limit // 16)
        at = np.flatnonzero(np.append(full, False)[self._of.array[: self._end]])
        of = self._of.array[at].astype(np.uint16)  # numpy sorts 16 bits in linear time
        order = np.argsort(of, kind="stable")
        buckets, first = np.unique(of[order], return_index=True)
        gone = [
            self._oldest(part, int(self._sizes[bucket]) - (limit - limit // 8))
            for bucket, part in zip(buckets.tolist(), np.split(at[order], first[1:]), strict=True)
        ]
        old = np.concatenate(gone)
        return self._with_dropped(record, self._ids.array[old], old)

    def _oldest(self, at: Ids, count: int) -> Ids:
        """Return the rows that were not used for the longest time, and not pushed in this change.

        Of rows that were used in the same change, those with smaller ids count as older.

        Args:
            at: Row numbers.
            count: How many of them, at least 1.
        """
        used = self._used.array[at]
        at, used = at[used < self._changes], used[used < self._changes]
        if len(at) <= count:
            return at
        last = np.partition(used, count - 1)[count - 1]
        older, same = at[used < last], at[used == last]
        order = np.argsort(self._ids.array[same])
        return np.concatenate([older, same[order[: count - len(older)]]])

    def _expired(self, pushed: Ids, record: list[Array], now: float) -> list[Array]:
        """Drop rows that were not used for their time to live; return the record with these.

        Rows of buckets that the push has not changed stay, because their copies would not learn it.
        All rows are looked at eight times in the time to live, and not with each push: that takes
        long.

        Args:
            pushed: Row numbers of the push.
            record: The record of the push.
            now: The time in seconds.
        """
        self._used_at.array[pushed] = now
        if now >= self._look_at:
            self._look_at = now + self._ttl_s / 8
            at = np.flatnonzero(self._of.array[: self._end] >= 0)
            at = at[self._used_at.array[at] < now - self._ttl_s]
            self._old = by_bucket(self._ids.array[at], self._of.array[at])
        if not self._old:
            return record
        taken = [np.zeros(0, np.int64)]
        most = max(MAX_EXPIRED, 2 * len(pushed))
        for bucket in np.flatnonzero(self._per_bucket(record[0].view(np.int64))).tolist():
            old = self._old.pop(bucket, taken[0])
            if len(old) > most:
                self._old[bucket] = old[most:]
            taken.append(old[:most])
            most -= len(taken[-1])
        ids = np.concatenate(taken)
        at = self._index.find(ids)
        # Some were dropped or used since the last look.
        gone = (at >= 0) & (self._used_at.array[at] < now - self._ttl_s)
        return self._with_dropped(record, ids[gone], at[gone])

    def _with_dropped(self, record: list[Array], ids: Ids, at: Ids) -> list[Array]:
        """Remove rows, which exist; return a record with that, too.

        Args:
            record: The record of a push.
            ids: Ids of the rows.
            at: Their row numbers.
        """
        if not len(ids):
            return record
        self._remove(ids, at)
        zeros = [np.zeros((len(ids), *array.shape[1:]), array.dtype) for array in record]
        dropped = [ids, zeros[1], np.full(len(ids), -1), *zeros[3:]]
        return [np.concatenate(pair) for pair in zip(record, dropped, strict=True)]

    def _row_numbers(self, ids: Ids, *, fill: bool = True) -> Ids:
        """Return the row numbers of ids, after making the rows that do not exist.

        Args:
            ids: Ids.
            fill: Whether the new rows get their first values.
        """
        at = self._index.find(ids)
        missing = at < 0
        if missing.any():
            self._make(sorted_unique(ids[missing]), fill=fill)
            at[missing] = self._index.find(ids[missing])
        return at

    def _make(self, ids: Ids, *, fill: bool) -> None:
        """Make rows of ids that have none, each once."""
        reused, self._free = self._free[: len(ids)], self._free[len(ids) :]
        fresh = np.arange(self._end, self._end + len(ids) - len(reused), dtype=np.int64)
        self._end += len(fresh)
        self._reserve(self._end)
        at = np.concatenate([reused, fresh])
        self._index.insert(ids, at)
        self._ids.array[at] = ids
        self._of.array[at] = bucket_of(ids, self.salt, len(self._sizes))
        if self._limit:
            self._sizes += self._per_bucket(ids)
        if fill:
            rows = first_rows(ids, self.salt, self.spec.dim, self.spec.init)
            self._rows.array[at] = rows
            self._steps.array[at] = 0
            for mine, first in zip(
                self._slots, first_slots(self.spec.optimizer, rows), strict=True
            ):
                mine.array[at] = first

    def _reserve(self, rows: int) -> None:
        """Make room for a number of rows."""
        if rows > self._capacity:
            self._capacity = max(1024, 1 << (rows - 1).bit_length())
            for column in (*self._columns, self._marks):
                column.reserve(self._capacity)


class Store:
    """All tables of one server."""

    def __init__(self, buckets: int) -> None:
        """Make a store without tables.

        Args:
            buckets: Number of buckets of the job.
        """
        self.buckets = buckets
        self.tables: dict[str, Table] = {}
        self.now = 0.0
        """The time in seconds, by which rows grow old."""
        self.dims: dict[str, int] = {}
        """Values in a row of each table."""
        self.pulled: Ids = np.zeros(buckets, np.int64)
        """Rows of each bucket that pulls have read so far."""
        self.pushed: Ids = np.zeros(buckets, np.int64)
        """Rows of each bucket to which gradients were applied so far."""

    def add(self, specs: Iterable[TableSpec]) -> None:
        """Make the tables that do not exist yet."""
        for spec in specs:
            if spec.name not in self.tables:
                self.tables[spec.name] = Table(spec, self.buckets)
                self.dims[spec.name] = spec.dim

    def knows(self, payload: Payload) -> bool:
        """Return whether all tables of a payload exist here."""
        return all(name in self.tables for name, _ in payload)

    def fault(self, payload: Payload, buckets: Collection[int], *, grads: bool) -> str:
        """Return why a payload of a client cannot be used, in words; empty if it can.

        Args:
            payload: The payload of a push or a pull.
            buckets: The buckets that its rows may be in.
            grads: Whether it must have gradients.
        """
        for name, arrays in payload:
            table = self.tables.get(name)
            if table is None:
                return f"expected a table of this job, found {name!r}"
            if len(arrays) != 1 + grads:
                return f"table {name}: expected {1 + grads} arrays, found {len(arrays)}"
            ids = arrays[0]
            if ids.dtype != np.int64 or ids.ndim != 1:
                return f"table {name}: expected ids as int64 [n], found {ids.dtype} {ids.shape}"
            if grads:
                found = arrays[1]
                if found.dtype != np.float32 or found.shape != (len(ids), table.spec.dim):
                    return (
                        f"table {name}: expected gradients as float32 "
                        f"({len(ids)}, {table.spec.dim}), found {found.dtype} {found.shape}"
                    )
                if not np.isfinite(found).all():
                    return f"table {name}: a gradient is infinite or not a number"
            named = np.zeros(self.buckets, np.bool_)
            named[list(buckets)] = True
            if not named[self._buckets_of(table, ids)].all():
                return f"table {name}: a row is in a bucket that the message does not name"
        return ""

    def read(
        self, payload: Payload, buckets: Collection[int], formats: Mapping[str, RowFormat]
    ) -> Payload:
        """Return the rows of a pull that are in some buckets, in the order of the pull.

        Args:
            payload: The payload of the pull.
            buckets: The buckets.
            formats: How the rows of a table are to be sent, if not as float32.
        """
        chosen = self.select(payload, buckets)
        self.pulled += self.bucket_counts(chosen)
        return [
            (name, encode(self.tables[name].read(arrays[0].view(np.int64), self.now),
                          formats.get(name, RowFormat.FP32)))
            for name, arrays in chosen
        ]  # fmt: skip

    def apply(self, payload: Payload, buckets: Collection[int]) -> Payload:
        """Apply the part of a push that is in some buckets; return the records."""
        chosen = self.select(payload, buckets)
        self.pushed += self.bucket_counts(chosen)
        return [
            (name, self.tables[name].apply(
                arrays[0].view(np.int64), arrays[1].view(np.float32), self.now))
            for name, arrays in chosen
        ]  # fmt: skip

    def merge(self, payloads: Iterable[Payload], buckets: Collection[int]) -> Payload:
        """Apply the sum of several pushes, as far as it is in some buckets; return the records.

        Args:
            payloads: The pushes. Their order is that of the additions.
            buckets: The buckets.
        """
        parts: dict[str, list[list[Array]]] = {}
        for payload in payloads:
            for name, arrays in self.select(payload, buckets):
                parts.setdefault(name, []).append(arrays)
        joined = {
            name: [np.concatenate(column) for column in zip(*arrays, strict=True)]
            for name, arrays in parts.items()
        }
        return self.apply(list(joined.items()), range(self.buckets))

    def install(self, payload: Payload, buckets: Collection[int]) -> None:
        """Take over the rows of records that are in some buckets."""
        for name, arrays in self.select(payload, buckets):
            self.tables[name].install(arrays, self.now)

    def parts(self, bucket: int, most_bytes: int) -> Iterator[tuple[Payload, bool]]:
        """Yield the records of all rows of a bucket in parts, and whether a part is the last one.

        Rows may be changed between two parts. Then a part has some rows as they were when it was
        made. With the records of all changes since the first part, in their order, it is the whole
        bucket: a record has whole rows.

        Args:
            bucket: The bucket.
            most_bytes: Bytes of a part, unless one row is larger.
        """
        groups: list[list[tuple[str, Table, Ids]]] = [[]]
        room = most_bytes
        for name, table in self.tables.items():
            at, start = table.rows_in(bucket), 0
            while start == 0 or start < len(at):
                if room < table.record_bytes and groups[-1]:
                    groups.append([])
                    room = most_bytes
                stop = start + max(1, room // table.record_bytes)
                groups[-1].append((name, table, at[start:stop]))
                room -= len(at[start:stop]) * table.record_bytes
                start = stop
        for number, group in enumerate(groups):
            found = [(name, table.record(bucket, at)) for name, table, at in group]
            yield found, number == len(groups) - 1

    def use(self, buckets: Collection[int]) -> None:
        """Count all rows of some buckets as used now."""
        if not buckets:
            return
        named = np.zeros(self.buckets, np.bool_)
        named[list(buckets)] = True
        for table in self.tables.values():
            table.use(named, self.now)

    def drop(self, buckets: Collection[int]) -> None:
        """Remove all rows of some buckets."""
        if not buckets:
            return
        for table in self.tables.values():
            table.drop(buckets)

    def select(self, payload: Payload, buckets: Collection[int]) -> Payload:
        """Return the part of a payload that is in some buckets."""
        if len(buckets) == self.buckets:
            return payload
        wanted = np.zeros(self.buckets, np.bool_)
        wanted[list(buckets)] = True
        chosen: Payload = []
        for name, arrays in payload:
            mask = wanted[self._buckets_of(self.tables[name], arrays[0].view(np.int64))]
            part = arrays if mask.all() else [array[mask] for array in arrays]
            chosen.append((name, part))
        return chosen

    def bucket_counts(self, payload: Payload) -> Ids:
        """Return the number of rows of a payload in each bucket."""
        counts = np.zeros(self.buckets, np.int64)
        for name, arrays in payload:
            found = self._buckets_of(self.tables[name], arrays[0])
            counts += np.bincount(found, minlength=self.buckets)
        return counts

    def _buckets_of(self, table: Table, ids: Array) -> Ids:
        return bucket_of(ids.view(np.int64), table.salt, self.buckets)
