"""The thread of a server that writes buckets into a cut, or reads them from one.

The server's own thread copies rows, a part of a bucket at a time, and takes rows over, a bucket at
a time. So it goes on answering while the store is slow.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.ps.cluster_map import CutPlace
from dlrover_py.ps.cuts import CutFile, SavedCut
from dlrover_py.ps.messages import CutFailed, CutPart, SavedBucket
from dlrover_py.ps.store import Array, Payload

Part = tuple[int, dict[str, tuple[int, int]], Payload, bool]
"""A bucket, the last push of each worker, records of rows, and whether these are the last ones."""
AHEAD = 2
"""Parts, or buckets that were read, which wait for a thread."""
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

    def __init__(
        self,
        place: CutPlace,
        server: str,
        buckets: Iterable[int],
        parts: Callable[[int], Iterator[tuple[Payload, bool]]],
    ) -> None:
        """Start the thread.

        Args:
            place: The cut.
            server: Id of the server.
            buckets: The buckets to write.
            parts: Yields parts of a bucket's records, and whether a part is the last one. No row
                changes while the cut is made.
        """
        self.place = place
        self.buckets = tuple(buckets)
        self.left = list(self.buckets)
        """Buckets that were not given to the thread, or in part."""
        self.result: CutPart | CutFailed | None = None
        """What was written, or why not; None until the thread has ended."""
        self._server = server
        self._read = parts
        self._parts: Iterator[tuple[Payload, bool]] | None = None
        """The next parts of the first bucket that is left."""
        self._given: queue.Queue[Part] = queue.Queue(AHEAD)
        self._over = threading.Event()
        threading.Thread(target=self._run, name="ps-cut-writer", daemon=True).start()

    @property
    def wants(self) -> bool:
        """Whether it can take the next part."""
        return bool(self.left) and self.result is None and not self._given.full()

    def give(self, clients: Callable[[int], dict[str, tuple[int, int]]]) -> None:
        """Copy the next part of the first bucket that is left for the thread, while :attr:`wants`.

        Args:
            clients: Returns the last push of each worker that a bucket has.
        """
        bucket = self.left[0]
        if self._parts is None:
            self._parts = self._read(bucket)
        payload, last = next(self._parts)
        self._given.put((bucket, clients(bucket), payload, last))
        if last:
            self.left.pop(0)
            self._parts = None

    def stop(self) -> None:
        """Let the thread end, as the cut is over or given up."""
        self._over.set()

    def _run(self) -> None:
        written, wanted = 0, len(self.buckets)
        parts: list[Payload] = []
        try:
            file = CutFile(self.place, self._server)
            try:
                while written < wanted and not self._over.is_set():
                    with contextlib.suppress(queue.Empty):
                        bucket, clients, payload, last = self._given.get(timeout=WAIT_S)
                        parts.append(payload)
                        if last:
                            file.add(bucket, clients, _joined(parts))
                            written, parts = written + 1, []
                if written == wanted:
                    file.finish()
                    saved = tuple(file.buckets)
                    self.result = CutPart(self._server, self.place.folder, file.name, saved)
            finally:
                file.abandon()
        except (OSError, DLRoverError) as error:
            self.result = CutFailed(self._server, self.place.folder, str(error))


def _joined(parts: list[Payload]) -> Payload:
    """Return the records of a bucket as one for each table."""
    if len(parts) == 1:
        return parts[0]
    tables: dict[str, list[list[Array]]] = {}
    for payload in parts:
        for name, arrays in payload:
            tables.setdefault(name, []).append(arrays)
    return [
        (name, [np.concatenate(column) for column in zip(*records, strict=True)])
        for name, records in tables.items()
    ]


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

    def taken(self, clock: Callable[[], float], turn_s: float) -> Iterator[tuple[int, Payload]]:
        """Yield buckets that were read, and their records, but none after the end of a turn.

        Args:
            clock: Returns the time in seconds.
            turn_s: Seconds of the turn, which begins now. The first bucket may take longer.
        """
        until = clock() + turn_s
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._found.get_nowait()
                if clock() >= until:
                    return

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
