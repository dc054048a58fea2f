"""The thread of a server that writes buckets into a cut, or reads them from one.

The server's own thread copies rows and takes rows over, a bucket at a time. So it goes on answering
while the store is slow.
"""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.ps.cluster_map import CutPlace
from dlrover_py.ps.cuts import CutFile, SavedCut
from dlrover_py.ps.messages import CutFailed, CutPart, SavedBucket
from dlrover_py.ps.store import Payload

Bucket = tuple[int, dict[str, tuple[int, int]], Payload]
"""A bucket, the last push of each worker, and the records of all rows."""
AHEAD = 2
"""Buckets that are in memory a second time."""
WAIT_S = 0.2
PART_ENTRIES = 1 << 16
"""Arrays and workers of the buckets in one message, unless one bucket has more."""


def parts_of(written: CutPart) -> Iterator[CutPart]:
    """Yield what a server has written in messages that the coordinator takes.

    Args:
        written: All buckets of one file.
    """
    buckets: list[SavedBucket] = []
    entries = 0
    for bucket in written.buckets:
        size = 1 + len(bucket.arrays) + len(bucket.clients)
        if buckets and entries + size > PART_ENTRIES:
            yield replace(written, buckets=tuple(buckets))
            buckets, entries = [], 0
        buckets.append(bucket)
        entries += size
    yield replace(written, buckets=tuple(buckets))


class CutWriter:
    """Writes buckets that a server leads into one file of a cut."""

    def __init__(self, place: CutPlace, server: str, buckets: Iterable[int]) -> None:
        """Start the thread.

        Args:
            place: The cut.
            server: Id of the server.
            buckets: The buckets to write.
        """
        self.place = place
        self.buckets = tuple(buckets)
        self.left = list(self.buckets)
        """Buckets that were not given to the thread yet."""
        self.result: CutPart | CutFailed | None = None
        """What was written, or why not; None until the thread has ended."""
        self._server = server
        self._given: queue.Queue[Bucket] = queue.Queue(AHEAD)
        self._over = threading.Event()
        threading.Thread(target=self._run, name="ps-cut-writer", daemon=True).start()

    @property
    def wants(self) -> bool:
        """Whether it can take the next bucket of :attr:`left`."""
        return bool(self.left) and self.result is None and not self._given.full()

    def give(self, bucket: int, clients: dict[str, tuple[int, int]], payload: Payload) -> None:
        """Pass on a bucket, which must be in :attr:`left`, while :attr:`wants`.

        Args:
            bucket: The bucket.
            clients: The last push of each worker.
            payload: The records of all its rows.
        """
        self.left.remove(bucket)
        self._given.put((bucket, clients, payload))

    def stop(self) -> None:
        """Let the thread end, as the cut is over or given up."""
        self._over.set()

    def _run(self) -> None:
        written, wanted = 0, len(self.buckets)
        try:
            file = CutFile(self.place, self._server)
            try:
                while written < wanted and not self._over.is_set():
                    with contextlib.suppress(queue.Empty):
                        found = self._given.get(timeout=WAIT_S)
                        file.add(*found)
                        written += 1
                if written == wanted:
                    file.finish()
                    saved = tuple(file.buckets)
                    self.result = CutPart(self._server, self.place.folder, file.name, saved)
            finally:
                file.abandon()
        except (OSError, DLRoverError) as error:
            self.result = CutFailed(self._server, self.place.folder, str(error))


class CutReader:
    """Reads buckets of a cut."""

    def __init__(self, place: CutPlace, buckets: Iterable[tuple[int, int]]) -> None:
        """Start the thread.

        Args:
            place: The cut.
            buckets: The buckets to read, each with the term in which it is wanted.
        """
        self.wanted = dict(buckets)
        self.error = ""
        """Why the thread has ended too early."""
        self._place = place
        self._found: queue.Queue[tuple[int, Payload]] = queue.Queue(AHEAD)
        self._over = threading.Event()
        threading.Thread(target=self._run, name="ps-cut-reader", daemon=True).start()

    def take(self) -> tuple[int, Payload] | None:
        """Return a bucket that was read, and its records; None if there is none yet."""
        with contextlib.suppress(queue.Empty):
            return self._found.get_nowait()
        return None

    def stop(self) -> None:
        """Let the thread end."""
        self._over.set()

    def _run(self) -> None:
        try:
            cut = SavedCut.open(self._place.url, self._place.folder)
            assert cut is not None
            for bucket in self.wanted:
                if self._over.is_set():
                    return
                found = (bucket, cut.read(bucket))
                while not self._over.is_set():
                    with contextlib.suppress(queue.Full):
                        self._found.put(found, timeout=WAIT_S)
                        break
        except (OSError, DLRoverError) as error:
            self.error = str(error)
