"""Rows of a store, as tests look at them."""

from typing import Any

from dlrover_py.ps.store import Payload, Store, Table


def copied(store: Store, bucket: int) -> Payload:
    """Return the records of a bucket."""
    payload, last = next(store.parts(bucket, 1 << 30))
    assert last
    return payload


def rows_of(table: Table, bucket: int = 0) -> list[Any]:
    """Return the record of a bucket of one table."""
    return table.record(bucket, table.rows_in(bucket))
