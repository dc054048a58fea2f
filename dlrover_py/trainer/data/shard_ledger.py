"""Writing the ledger of leased shards: which samples this worker has really trained.

A worker writes what it has read for a batch when the batch is committed, before the lease queue
hears of it. So each credit has a record. :mod:`dlrover_py.trainer.data.verify_shards` reads it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlrover_py.protocol import data_ledger
from dlrover_py.protocol.documents import NewerFormatError
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.runs import Run
from dlrover_py.protocol.shard_ledger import (
    LAST_NUMBER,
    LONGEST_HEADER,
    ShardLedgerHeader,
    file_name,
    parse_name,
    read_header,
)
from dlrover_py.protocol.shards import ShardLease
from dlrover_py.trainer.data.ledger_file import LedgerFile


class ShardLedgerWriter:
    """This worker's file of a history."""

    def __init__(self, folder: Path, header: ShardLedgerHeader) -> None:
        """Create the folder, if it is not there, and a file in it.

        Args:
            folder: a folder that all nodes share.
            header: the beginning of the file.

        Raises:
            ConfigError: the folder cannot be written, or belongs to another loader.
        """
        line = header.model_dump_json(exclude_defaults=True).encode() + b"\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _created(folder, header, line)
        except OSError as error:
            raise ConfigError(
                f"data: the ledger in {folder} cannot be written: {error}: what is trained could "
                "not be proven"
            ) from error
        self._epoch = -1
        """The newest epoch that was noted."""
        self._watermarks: dict[str, int] = {}
        """The newest watermarks that were noted."""

    def trained(self, batch: Iterable[tuple[ShardLease, list[Run]]]) -> None:
        """Note a batch: what it has of each lease, from the start of the shard, or of the range."""
        parts: list[list[int | str]] = []
        for lease, runs in batch:
            shard, first = (lease.partition, lease.start) if lease.partition else (lease.shard, 0)
            for start, stop in runs:
                parts.append([lease.token, lease.epoch, shard, first + start, first + stop])
        self._add("trained", parts)

    def confirmed(self, refused: list[int]) -> None:
        """Note that the queue has counted all that was trained.

        Args:
            refused: the tokens of the leases of which the newest part does not count.
        """
        self._add("confirmed", refused)

    def state(self, number: int) -> None:
        """Note that a state is taken.

        Args:
            number: number of the state in this history, from 1.
        """
        self._add("state", number)

    def reached(self, epoch: int) -> None:
        """Note, if that is news, that all epochs before this one are complete."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._add("epoch", epoch)

    def passed(self, watermarks: dict[str, int]) -> None:
        """Note the watermarks that are news.

        Args:
            watermarks: those of a stream, by partition, as the queue says.
        """
        if news := dict(watermarks.items() - self._watermarks.items()):
            self._watermarks |= news
            self._add("watermarks", news)

    def _add(self, word: str, value: Any) -> None:
        """Append a line."""
        self._file.add(json.dumps([word, value], separators=(",", ":")).encode() + b"\n")


def _created(folder: Path, header: ShardLedgerHeader, line: bytes) -> LedgerFile:
    """Return a file whose number is greater than that of all files before.

    Args:
        folder: the ledger.
        header: the beginning of the file.
        line: the same, as it is written.

    Raises:
        ConfigError: the folder belongs to another loader.
        OSError: the file cannot be created and begun.
    """
    while True:
        names = [path.name for path in folder.iterdir()]
        if any(data_ledger.parse_name(name) for name in names):
            raise _foreign(folder, "an ElasticLoader")
        newest, rank = max(filter(None, map(parse_name, names)), default=(0, 0))
        if newest:
            _check_owner(folder, folder / file_name(newest, rank), header)
        if newest >= LAST_NUMBER:
            raise FileExistsError(f"{file_name(newest, rank)} has the last number")
        try:
            return LedgerFile(folder / file_name(newest + 1, header.rank), line)
        except FileExistsError:
            continue  # another process of this rank was faster


def _check_owner(folder: Path, newest: Path, header: ShardLedgerHeader) -> None:
    """Raise ConfigError if the newest file of a folder is that of another dataset.

    Args:
        folder: the ledger.
        newest: its newest file.
        header: the beginning of the file that is to be written.
    """
    with newest.open("rb") as file:
        line = file.readline(LONGEST_HEADER)
    try:
        before = read_header(line)
    except NewerFormatError as error:
        raise ConfigError(f"data: the ledger in {folder} has {newest.name}: {error}") from error
    except ValueError:
        return  # it is damaged: what it says is not known
    if before.dataset != header.dataset:
        raise _foreign(folder, f"the dataset {before.dataset}")
    if before.spec.samples != header.spec.samples:
        raise _foreign(folder, f"{before.spec.samples} samples")
    if not header.spec.continues(before.spec.order):
        raise _foreign(folder, "other files, shards, or another seed or shuffle")


def _foreign(folder: Path, whose: str) -> ConfigError:
    """Return the refusal of a folder that is not this loader's.

    Args:
        folder: the ledger.
        whose: what it is the ledger of.
    """
    return ConfigError(
        f"data: the ledger in {folder} is that of {whose}: expected a folder of its own for each "
        "training and each loader"
    )
