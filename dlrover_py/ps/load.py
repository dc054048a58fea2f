"""What a server has and does: it says so to the coordinator every few seconds."""

import numpy as np

from dlrover_py.ps.hashing import Ids
from dlrover_py.ps.messages import Load
from dlrover_py.ps.replication import Replica
from dlrover_py.ps.store import Store

LOAD_S = 2.0
"""Seconds between two messages with the load of a server."""


class RowMeter:
    """Turns the rows that a server has counted into its messages: rates since the last one.

    What was refused is no load, as the same rows are asked for again, here or elsewhere.
    """

    def __init__(self, server: str, now: float) -> None:
        """Begin to count.

        Args:
            server: Id of this life of the server.
            now: The time in seconds.
        """
        self._server, self._since = server, now
        self._pulled: Ids = np.zeros(1, np.int64)
        """Rows of each bucket that had been pulled at the last message."""
        self._pushed: Ids = np.zeros(1, np.int64)

    def due(self, now: float) -> bool:
        """Return whether the next message is to be sent."""
        return now - self._since >= LOAD_S

    def load(self, store: Store, replica: Replica, now: float) -> Load:
        """Return the next message.

        Args:
            store: The rows of the server.
            replica: The server's part of the map.
            now: The time in seconds.
        """
        past_s = max(now - self._since, 1e-9)
        pulled, pushed = store.pulled - self._pulled, store.pushed - self._pushed
        asked = pulled + pushed
        tables = store.tables.values()
        made = Load(
            self._server,
            rows=sum(len(table) for table in tables),
            nbytes=sum(table.nbytes for table in tables),
            pulled_per_s=int(pulled.sum()) / past_s,
            pushed_per_s=int(pushed.sum()) / past_s,
            waiting=replica.counts()[1],
            bucket_rows=tuple(
                (bucket, int(asked[bucket])) for bucket in np.flatnonzero(asked).tolist()
            ),
            stale_per_s=replica.staleness.per_s(past_s),
        )
        self._since = now
        self._pulled, self._pushed = store.pulled.copy(), store.pushed.copy()
        return made
