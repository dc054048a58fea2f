"""The thread of a server that tells the coordinator that its process runs."""

import contextlib
import threading
import time
from typing import Any

import zmq

from dlrover_py.ps.door import Line
from dlrover_py.ps.messages import Beat
from dlrover_py.ps.wire import JobAccess, send

BEAT_S = 0.5
"""Seconds between two messages."""
STUCK_S = 60.0
"""Seconds after which a thread that has not finished its work counts as stuck."""


class Beats:
    """Says that a process runs while its main thread has long work to do.

    It ends when that work takes longer than any should: perhaps it never ends.
    """

    def __init__(
        self, context: "zmq.Context[Any]", access: JobAccess, server: str, stuck_s: float = STUCK_S
    ) -> None:
        """Prepare the thread.

        Args:
            context: The server's, which is not closed before the thread has ended.
            access: The job.
            server: Id of this life of the server.
            stuck_s: Seconds after :meth:`turned` from which on nothing is said.
        """
        self._context, self._access = context, access
        self._message, self._stuck_s = Beat(server), stuck_s
        self._turned_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ps-beats", daemon=True)

    def __enter__(self) -> "Beats":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def turned(self) -> None:
        """Note that the main thread has finished what it had to do."""
        self._turned_at = time.monotonic()

    def _run(self) -> None:
        access = self._access
        # What is said late is wrong, so hardly anything waits.
        line = Line(self._context, access.address, access.key, queue=1)
        while not self._over.wait(BEAT_S):
            line.mend(time.monotonic())
            if time.monotonic() - self._turned_at < self._stuck_s:
                with contextlib.suppress(zmq.Again):
                    send(line.socket, self._message, [], access.key)
        line.close()
