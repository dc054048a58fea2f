"""Streams: sources of dynamic shards whose partitions grow while they are read.

::

    source = LineStream("/data/incoming", "*.jsonl", parse=json.loads)
    loader = ShardLoader("train", source)
    while not (loader.over or session.should_stop()):
        for records in loader.batches(32, stop=session.should_stop):
            ...
            loader.commit()

One worker at a time asks the source where its partitions end, once a second. A source that says
that it has ended ends the training; one that never does goes on until the training is stopped.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data.shard_sources import read_lines

BLOCK = 1 << 16
"""Bytes that are read at once to find the last line break of a file."""


@runtime_checkable
class StreamSource(Protocol):
    """A stream that a :class:`~dlrover_py.trainer.data.leases.ShardLoader` reads.

    Partitions have names. Their units are numbered from 0, such as the bytes of a file or the
    offsets of a log. Units that were reported once stay as they are.
    """

    @property
    def range_size(self) -> int:
        """Most units that a worker leases at once; the same number on all workers."""

    def ends(self) -> tuple[Mapping[str, int], bool]:
        """Return the number of units of each partition, by name, and whether the stream has ended.

        It has ended when no partition grows any more, and none is added.
        """

    def read(self, partition: str, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the records that begin in a range, each with the unit behind it.

        The unit behind the last record is at most ``stop``.

        Args:
            partition: name of the partition.
            start: first unit of the range.
            stop: the unit after the last one.

        Raises:
            ShardUnreadableError: the units are gone: the range goes to quarantine.
        """


class LineStream:
    """The lines of files in a folder, which grow at their ends. A file is a partition.

    Folders, FIFOs and devices are left out.
    A line counts once its line break is written. New files are found. A file with the name of
    ``end_marker`` in the folder says that the stream has ended; it must be written last.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        pattern: str = "*.jsonl",
        *,
        parse: Callable[[bytes], Any] = bytes.decode,
        range_bytes: int = 1 << 20,
        end_marker: str = "_END",
    ) -> None:
        """Name the files; none is opened yet.

        Args:
            folder: the folder, which must exist.
            pattern: names of the files, such as ``*.jsonl``, or ``*/*.jsonl`` for files in folders.
            parse: makes a record of a line without its line break, such as ``json.loads``.
            range_bytes: most bytes that a worker leases at once.
            end_marker: name of the file that says that the stream has ended.

        Raises:
            ConfigError: there is no such folder, or the size is less than 1.
        """
        self._folder, self._pattern, self._parse = Path(folder), pattern, parse
        self._marker = self._folder / end_marker
        self.range_size = range_bytes
        self._seen: dict[str, tuple[int, int]] = {}
        """Size of each file when it was looked at, and the end of its last complete line."""
        if range_bytes < 1:
            raise ConfigError(f"data: range_bytes: expected at least 1, found {range_bytes}")
        if not self._folder.is_dir():
            raise ConfigError(f"data: {folder}: expected a folder: create it before the training")

    def ends(self) -> tuple[Mapping[str, int], bool]:
        """Return the end of the last complete line of each file. See :class:`StreamSource`."""
        ended = self._marker.exists()  # before the files: what comes later does not count
        found = {}
        for path in sorted(self._folder.glob(self._pattern)):
            name = path.relative_to(self._folder).as_posix()
            if path == self._marker or not path.is_file():  # a FIFO would block
                continue
            try:
                opened = path.open("rb")
            except FileNotFoundError:
                continue  # it was removed since it was found, as by a rotation of logs
            with opened as file:
                length = os.fstat(file.fileno()).st_size
                known, end = self._seen.get(name, (0, 0))
                if length > known:
                    end = _after_last_break(file, end, length)
                    self._seen[name] = length, end
            found[name] = length if ended else end
        return found, ended

    def read(self, partition: str, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the lines that begin in a range. See :class:`StreamSource`.

        Args:
            partition: name of the file, from the folder of the stream on.
            start: first byte of the range.
            stop: the byte after the last one.

        Raises:
            ShardUnreadableError: the file is gone, or shorter than it was.
        """
        return read_lines(self._folder / partition, start, stop, least=stop, parse=self._parse)


def _after_last_break(file: Any, start: int, stop: int) -> int:
    """Return the byte after the last line break of a file.

    Args:
        file: the open file.
        start: a byte that is after a line break, or 0.
        stop: the byte at which to begin to look, backwards.
    """
    while stop > start:
        first = max(start, stop - BLOCK)
        file.seek(first)
        found = file.read(stop - first).rfind(b"\n")
        if found >= 0:
            return first + int(found) + 1
        stop = first
    return start
