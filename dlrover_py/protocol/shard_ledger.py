"""The ledger of leased shards: which samples each worker has trained.

A ledger is a folder. Each worker has a file in it for each history. A history begins with a round,
and when a state is loaded. The file begins with a line that is a :class:`ShardLedgerHeader`. Each
further line is a list of JSON, which begins with a word:

* ``["trained", [[token, epoch, shard, start, stop], …]]``: the worker has trained a batch. It has
  the samples from ``start`` to ``stop`` of some shards, under the tokens of its leases. For a
  stream, ``shard`` is the name of a partition, in which ``start`` and ``stop`` are counted.
* ``["confirmed", [token, …]]``: the lease queue has answered. All that was trained before counts,
  but for these tokens, of which what was not confirmed yet is refused.
* ``["state", number]``: a state of the data was taken, which has all that was trained before. The
  workers of a history take their states together, and count them from 1.
* ``["epoch", number]``: all earlier epochs are complete, as the lease queue says. A stream has the
  epoch 0, which is complete when the stream has ended and nothing is left of it.
* ``["watermarks", {partition: number}]``: watermarks of a stream that have changed, as the lease
  queue says.

A state names its place in the ledger with a :data:`~dlrover_py.protocol.shards.Mark`, and the
header of a later history names the state that it has begun with. So a reader can follow the history
that has survived.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import Field, TypeAdapter

from dlrover_py.protocol.agents import Count, DatasetName, Wire
from dlrover_py.protocol.documents import FORMAT_NUMBER, read, up_to
from dlrover_py.protocol.shards import DatasetSpec, Mark

FORMAT: Final = 1
"""Version of the files."""
LONGEST_HEADER: Final = 1 << 18
"""Bytes after which a reader gives up looking for the end of the header."""
LONGEST_LINE: Final = 1 << 20
"""Bytes after which a reader gives up looking for the end of another line."""
LAST_NUMBER: Final = 10**9 - 1
"""Largest number of a file."""
UNKNOWN: Final = "unknown"
"""The mark of a state that has credits of which the ledger has no record."""
_FILE_NAME = re.compile(r"([0-9]{6,9})-([0-9]{5,7})\.shards")


class ShardLedgerHeader(Wire):
    """The worker and the history of a file."""

    dataset: DatasetName
    """Name of the dataset."""
    spec: DatasetSpec
    """The dataset, with its guarantee."""
    run: Annotated[str, Field(min_length=1, max_length=1000)]
    """Uid of the job; another text for each process of a script without one."""
    round: Count
    """The round of the worker."""
    load: Count
    """How many states the worker has loaded in the round."""
    states: Count
    """How many states were taken in the history before the file was begun."""
    rank: Count
    """Global rank of the worker."""
    world: Annotated[int, Field(ge=1, le=1 << 20)]
    """Number of workers."""
    parent: Mark
    """The mark of the state with which the history has begun; empty if there was none."""
    format: Annotated[int, FORMAT_NUMBER, up_to(FORMAT)] = FORMAT
    """Version of the file."""

    @property
    def history(self) -> "LedgerHistory":
        """The history of the file."""
        return LedgerHistory(self.run, self.round, self.load)


_FORM = TypeAdapter(ShardLedgerHeader)


def read_header(line: bytes) -> ShardLedgerHeader:
    """Return the header in a line of JSON; unknown fields are ignored.

    Raises:
        NewerFormatError: it has a newer format.
        ValueError: it is not a valid header.
    """
    return read(_FORM, line)


@dataclass(frozen=True, slots=True, order=True)
class LedgerHistory:
    """Names a history: all its workers began with one state, and none has gone back since."""

    run: str
    """Uid of the job, or the text that a script without one has for its process."""
    round: int
    """The round of the worker."""
    load: int
    """How many states the worker has loaded in the round."""

    def mark(self, number: int) -> Mark:
        """Return the mark of a state.

        Args:
            number: number of the state in this history, from 1.
        """
        return f"{self.run}/{self.round}/{self.load}/{number}"

    @classmethod
    def of_mark(cls, mark: Mark) -> tuple[Self, int]:
        """Return the history of a mark, and the number of the state in it.

        Raises:
            ValueError: it is no mark of a state.
        """
        run, *numbers = mark.rsplit("/", 3)
        round_number, load, number = map(int, numbers)
        return cls(run, round_number, load), number


def file_name(number: int, rank: int) -> str:
    """Return the name of a file.

    Args:
        number: greater than those of all files that were there before.
        rank: global rank of the worker.
    """
    return f"{number:06d}-{rank:05d}.shards"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return number and rank of the name of a file; None if it is not one of this ledger."""
    found = _FILE_NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))
