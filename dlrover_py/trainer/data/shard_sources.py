"""Sources of dynamic shards: datasets, files of lines, and Parquet files.

A source cuts its data into shards, and reads a part of one. The parts of a shard are counted in
units: samples of a dataset, rows of a Parquet file, bytes of a file of lines.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, Protocol

from dlrover_py.protocol.errors import ConfigError

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of surrogate pairs, which cannot be sent."""


class ShardUnreadableError(Exception):
    """A shard is gone, or was cut, since the dataset was first used.

    What to do: raise it in a source of your own. The shard then goes to quarantine.
    """


class ShardSource(Protocol):
    """What a :class:`~dlrover_py.trainer.data.leases.ShardLoader` reads. Yours needs these two.

    It may also have a text ``fingerprint``, which says which data it is. Workers with other data,
    and a checkpoint of other data, are then refused.
    """

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Sizes of all shards in units, as pairs: how many shards in a row have a size, and it."""

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the records that begin in a part of a shard, each with the unit behind it.

        Args:
            shard: number of the shard.
            start: first unit of the part, from the start of the shard.
            stop: the unit after the last one.

        Raises:
            ShardUnreadableError: the shard is gone or was cut: it goes to quarantine.
        """


class MapSource:
    """The shards of a map-style dataset. A unit is a sample."""

    def __init__(self, dataset: Any, *, shard_size: int) -> None:
        """Cut a dataset into shards.

        Args:
            dataset: it has ``__len__`` and ``__getitem__``.
            shard_size: samples of a shard.

        Raises:
            ConfigError: the dataset has no samples or no length, or the size is less than 1.
        """
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            kind = type(dataset).__name__
            raise ConfigError(
                f"data: expected a dataset with __len__ and __getitem__, found {kind}: write a "
                "ShardSource of your own for it"
            )
        self._dataset, self._shard_size = dataset, shard_size
        self.fingerprint = fingerprint_of(dataset)
        self._samples = len(dataset)
        self.sizes = _cut(self._samples, shard_size, "the dataset")

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the samples of a part of a shard. See :class:`ShardSource`.

        Args:
            shard: number of the shard.
            start: first unit of the part, from the start of the shard.
            stop: the unit after the last one.
        """
        first = shard * self._shard_size
        for offset in range(start, stop):
            yield self._dataset[first + offset], offset + 1


class LineSource:
    """The lines of files, such as text or JSONL. A unit is a byte.

    A line belongs to the shard in which it begins. A file may grow: what comes behind its first
    size is ignored.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        shard_bytes: int = 1 << 20,
        parse: Callable[[bytes], Any] = bytes.decode,
    ) -> None:
        """Look at the sizes of the files, and cut them into shards.

        Args:
            paths: the files, in an order that never changes.
            shard_bytes: bytes of a shard.
            parse: makes a record of a line without its line break, such as ``json.loads``.

        Raises:
            ConfigError: a file cannot be found, or all files are empty.
        """
        self._parse, self._shard_bytes = parse, shard_bytes
        self._shards: list[tuple[str, int, int]] = []
        """Path of the file, first byte and size of each shard."""
        self.sizes: list[tuple[int, int]] = []
        files = []
        for path in listed(paths):
            try:
                length = os.stat(path).st_size
            except OSError as error:
                raise ConfigError(f"data: {path}: {error.strerror}: expected a file") from error
            for count, size in _cut(length, shard_bytes, path) if length else ():
                for _ in range(count):
                    last = self._shards[-1] if self._shards else ("", 0, 0)
                    begin = last[1] + last[2] if last[0] == path else 0
                    self._shards.append((path, begin, size))
                self.sizes.append((count, size))
            files.append((path, length))
        if not self._shards:
            raise ConfigError(f"data: expected lines, found {len(paths)} empty files")
        self.fingerprint = digest_of_files(files)

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the lines that begin in a part of a shard. See :class:`ShardSource`.

        Args:
            shard: number of the shard.
            start: first unit of the part, from the start of the shard.
            stop: the unit after the last one.

        Raises:
            ShardUnreadableError: the file is gone, or shorter than it was.
        """
        path, begin, size = self._shards[shard]
        lines = read_lines(path, begin + start, begin + stop, least=begin + size, parse=self._parse)
        for record, end in lines:
            yield record, end - begin


class ParquetSource:
    """The rows of Parquet files; a shard is a row group. A unit is a row. It needs pyarrow."""

    def __init__(
        self, paths: Sequence[str | os.PathLike[str]], *, columns: Sequence[str] | None = None
    ) -> None:
        """Read the metadata of the files.

        Args:
            paths: the files, in an order that never changes.
            columns: names of the columns to read; None: all.

        Raises:
            ConfigError: pyarrow is not installed, a file cannot be read, or there are no rows.
        """
        try:
            from pyarrow import ArrowException, ArrowMemoryError, parquet
        except ImportError as error:
            raise ConfigError(
                "data: ParquetSource needs pyarrow: install DLRover-Py with its extra parquet"
            ) from error
        self._parquet, self._damage, self._no_memory = parquet, ArrowException, ArrowMemoryError
        self._columns = list(columns) if columns is not None else None
        self._shards: list[tuple[str, int]] = []
        """Path of the file and number of the row group of each shard."""
        self.sizes: list[tuple[int, int]] = []
        files = []
        for path in listed(paths):
            try:
                metadata = parquet.read_metadata(path)
            except (OSError, ArrowException) as error:
                raise ConfigError(f"data: {path}: expected a Parquet file: {error}") from error
            for group in range(metadata.num_row_groups):
                if rows := metadata.row_group(group).num_rows:
                    self._shards.append((path, group))
                    self.sizes.append((1, rows))
            files.append((path, metadata.num_rows))
        if not self._shards:
            raise ConfigError(f"data: expected rows, found none in {len(paths)} Parquet files")
        self.fingerprint = digest_of_files(files)

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        """Yield the rows of a part of a row group as dictionaries. See :class:`ShardSource`.

        Args:
            shard: number of the shard.
            start: first unit of the part, from the start of the shard.
            stop: the unit after the last one.

        Raises:
            ShardUnreadableError: the file is gone, damaged, or has other row groups.
            OSError: it cannot be read for another reason, such as too many open files, which may
                pass: the shard stays as it is.
        """
        path, group = self._shards[shard]
        try:
            with opened(path) as stream, self._parquet.ParquetFile(stream) as file:
                table = file.read_row_group(group, columns=self._columns)
        except self._no_memory:
            raise
        except (OSError, self._damage) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the system's; pyarrow's own, of damaged files, have no number
            raise ShardUnreadableError(f"{path}, row group {group}: {error}") from error
        if table.num_rows < stop:
            raise ShardUnreadableError(
                f"{path}, row group {group}: expected {stop} rows, found {table.num_rows}"
            )
        for offset, row in enumerate(table.slice(start, stop - start).to_pylist(), start + 1):
            yield row, offset


def _cut(length: int, size: int, what: str) -> list[tuple[int, int]]:
    """Return the sizes of shards of at most some units.

    Args:
        length: number of units.
        size: greatest number of units of a shard.
        what: what is cut, for the message.

    Raises:
        ConfigError: there are no units, or the size is less than 1.
    """
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"data: expected a size of shards from 1, found {size!r}")
    size = int(size)
    if not length:
        raise ConfigError(f"data: expected samples in {what}, found none")
    whole, rest = divmod(length, size)
    return [*([(whole, size)] if whole else []), *([(1, rest)] if rest else [])]


def read_lines(
    path: str | os.PathLike[str],
    start: int,
    stop: int,
    *,
    least: int,
    parse: Callable[[bytes], Any],
) -> Iterator[tuple[Any, int]]:
    """Yield a record of each line that begins in a part of a file, with the offset of its end.

    The end is after the line break, but at most at ``stop``, even if the line is longer.

    Args:
        path: the file.
        start: first byte of the part.
        stop: the byte after the last one.
        least: bytes that the file must have, because it had them before.
        parse: makes a record of a line without its line break.

    Raises:
        ShardUnreadableError: the file is gone, or shorter than it was.
        ValueError: a line cannot be parsed.
    """
    with opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found < least:
            raise ShardUnreadableError(f"{path}: expected at least {least} bytes, found {found}")
        at = start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of a line that begins before
        while at < stop:
            line = file.readline()
            if not line:
                raise ShardUnreadableError(f"{path}: it ends at byte {at}")
            try:
                record = parse(line.rstrip(b"\r\n"))
            except ValueError as error:
                raise ValueError(
                    f"{path}: the line at byte {at} cannot be parsed: {error}: mend or remove it, "
                    "or give a parse= that takes such lines"
                ) from error
            at += len(line)
            yield record, min(at, stop)


def fingerprint_of(data: Any) -> str:
    """Return what a dataset or source says of its identity; "" if it says nothing.

    An attribute ``fingerprint`` that is no text, such as a method or a tensor, was not made for
    this, and says nothing.

    Args:
        data: it may have an attribute ``fingerprint``.

    Raises:
        ConfigError: the attribute is a text that has more than 64 characters, or some that cannot
            be printed.
    """
    found = getattr(data, "fingerprint", "")
    if not isinstance(found, str):
        return ""
    if len(found) > 64 or _UNPRINTABLE.search(found):
        shown = repr(found) if len(found) <= 64 else f"{found[:64]!r}… ({len(found)} characters)"
        raise ConfigError(
            f"data: found the fingerprint {shown}: expected a text of at most 64 characters "
            "without control characters, which says which data it is: use a digest of it"
        )
    return found


def digest_of_files(files: Sequence[tuple[str, int]]) -> str:
    """Return a digest of the names and sizes of files, in their order.

    A name counts from the folder that all files have in common, so that folder may have another
    path on each node.

    Args:
        files: pairs of a path and a size.
    """
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path, _ in files])
    digest = hashlib.blake2b(digest_size=8)
    for path, size in files:
        digest.update(f"{os.path.relpath(path, folder)}\0{size}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def listed(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the paths of files.

    Raises:
        ConfigError: it is one path instead of a list of them.
    """
    if isinstance(paths, str | bytes | os.PathLike):
        raise ConfigError(f"data: expected a list of paths, found the path {os.fspath(paths)!r}")
    return [os.fspath(one) for one in paths]


def opened(path: str | os.PathLike[str]) -> Any:
    """Return an open file.

    Raises:
        ShardUnreadableError: there is no such file.
        ConfigError: its folder is gone or empty, too. This node has then lost its mount, as others
            may not have: no shard must go to quarantine for that.
    """
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        folder = os.path.dirname(os.path.abspath(path))
        if not _has_entries(folder):
            raise ConfigError(
                f"data: {path}: expected the file of the first use, found its folder gone or empty "
                "on this node: mount the data again, or restore it"
            ) from error
        raise ShardUnreadableError(f"{path}: the file is gone") from error


def _has_entries(folder: str) -> bool:
    """Return whether a folder exists and has something in it, as far as this can be seen."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except PermissionError:
        return True  # a file of it may be opened all the same
    except OSError:
        return False
