"""What a server has and does: it says so to the coordinator every few seconds."""

import numpy as np

from dlrover_py.ps.messages import Load
from dlrover_py.ps.replication import Replica
from dlrover_py.ps.store import Payload, Store

LOAD_S = 2.0
"""Seconds between two messages with the load of a server."""


class RowMeter:
    """Counts the rows of pulls and pushes, and gives the rates since the last message."""

    def __init__(self, server: str, now: float) -> None:
        """Begin to count.

        Args:
            server: Id of this life of the server.
            now: The time in seconds.
        """
        self._server, self._since = server, now
        self._pulled = self._pushed = 0
        self._of_buckets = np.zeros(0, np.int64)
        """Rows of each bucket; empty until there is a request."""

    def count(self, payload: Payload, store: Store, *, push: bool) -> None:
        """Count the rows of a request, whether it is applied or refused.

        Args:
            payload: For each table the ids, and the gradients of a push.
            store: The rows of the server.
            push: Whether it is a push.
        """
        if len(self._of_buckets) != store.buckets:
            self._of_buckets = np.zeros(store.buckets, np.int64)
        self._of_buckets += store.bucket_counts(payload)
        rows = sum(len(arrays[0]) for _, arrays in payload if arrays)
        if push:
            self._pushed += rows
        else:
            self._pulled += rows

    def due(self, now: float) -> bool:
        """Return whether the next message is to be sent."""
        return now - self._since >= LOAD_S

    def load(self, store: Store, replica: Replica, now: float) -> Load:
        """Return the next message, and begin to count anew.

        Args:
            store: The rows of the server.
            replica: The server's part of the map.
            now: The time in seconds.
        """
        past_s = max(now - self._since, 1e-9)
        tables = store.tables.values()
        made = Load(
            self._server,
            rows=sum(len(table) for table in tables),
            nbytes=sum(table.nbytes for table in tables),
            pulled_per_s=self._pulled / past_s,
            pushed_per_s=self._pushed / past_s,
            waiting=replica.counts()[1],
            bucket_rows=tuple(
                (bucket, int(self._of_buckets[bucket]))
                for bucket in np.flatnonzero(self._of_buckets).tolist()
            ),
        )
        self._of_buckets[:] = 0
        self._since, self._pulled, self._pushed = now, 0, 0
        return made
