"""What is left of an epoch of a dataset whose shards are known: the supply of its lease queue."""

from collections.abc import Container
from dataclasses import dataclass

from dlrover_py.protocol.runs import Run, add, first_missing, missing, size
from dlrover_py.protocol.shards import Ledger
from dlrover_py.shards.order import ShardOrder, ShardTable
from dlrover_py.shards.records import QueueRecord


@dataclass(frozen=True, slots=True)
class Place:
    """What a position stands for."""

    shard: int
    """Number of the shard; failures are counted under it."""
    start: int
    """Its first unit."""
    size: int
    """Number of its units."""
    partition: str = ""
    """For a stream: the partition in which ``start`` is counted."""


class EpochShards:
    """The shards of the present epoch. A position is one in the order of the epoch."""

    def __init__(self, record: QueueRecord, leased: Container[int]) -> None:
        """Look for shards from the first position on.

        Args:
            record: The record of the queue, which is changed in place.
            leased: The positions that are leased now; the queue changes it.
        """
        self._record, self._leased = record, leased
        self._table = ShardTable(record.spec.sizes)
        self._restart()

    @property
    def over(self) -> bool:
        """Whether all epochs are complete."""
        epochs = self._record.spec.epochs
        return epochs is not None and self._record.epoch >= epochs

    @property
    def limit(self) -> int:
        """Number of shards, of which some must be left for the dataset to be usable."""
        return self._record.spec.shards

    def begin(self, ledger: Ledger) -> None:
        """Take the credits of a ledger instead of the present ones."""
        record = self._record
        record.epoch = ledger.epoch
        record.done = list(ledger.done)
        record.partial = {position: list(runs) for position, runs in ledger.partial.items()}
        record.skipped = []
        self._restart()

    def fault(self, ledger: Ledger) -> str:
        """Return why a ledger is not one of this dataset, in words; empty if it is one."""
        spec, done, partial = self._record.spec, ledger.done, ledger.partial
        if ledger.parts:
            return "expected the ledger of a dataset with epochs, found that of a stream"
        if spec.epochs is not None and ledger.epoch > spec.epochs:
            return f"expected an epoch up to {spec.epochs}, found {ledger.epoch}"
        last = max([0, *(stop for _, stop in done[-1:]), *(position + 1 for position in partial)])
        if last > spec.shards:
            return f"expected {spec.shards} shards, found {last}"
        order = ShardOrder(spec.shards, spec.seed, ledger.epoch, spec.shuffle)
        for position, runs in partial.items():
            _, each = self._table.place(order.at(position))
            if first_missing(done, position) != position or not 0 < size(runs) < each:
                return f"position {position} is finished, or has more than its {each} samples"
            if runs[-1][1] > each:
                return f"expected {each} samples at position {position}, found {runs[-1][1]}"
        return ""

    def end_if_complete(self) -> bool:
        """Begin the next epoch if each shard is finished or in quarantine.

        Nothing changes if all are in quarantine. The caller must ensure that no shard is leased or
        waits to be leased again.

        Returns:
            Whether an epoch has ended. After the last one, :attr:`over` is true.
        """
        record = self._record
        if self.over or self._next() is not None or size(record.skipped) == record.spec.shards:
            return False  # if no shard can be trained, the epochs must not rush by
        record.epoch += 1
        record.done, record.partial, record.skipped = [], {}, []
        self._restart()
        return True

    def take(self) -> int | None:
        """Return the next position that is not leased, and go on behind it; None: there is none.

        Shards in quarantine are skipped.
        """
        position = self._next()
        if position is not None:
            self._cursor = position + 1
        return position

    def left(self, most: int) -> int:
        """Return how many positions are left for :meth:`take` at most, up to ``most``."""
        return min(most, self._record.spec.shards - self._cursor)

    def place(self, position: int) -> Place:
        """Return the shard at a position."""
        shard = self._order.at(position)
        start, each = self._table.place(shard)
        return Place(shard, start, each)

    def is_open(self, position: int) -> bool:
        """Return whether a position may be leased: it exists, and is not finished."""
        exists = position < self._record.spec.shards
        return exists and first_missing(self._record.done, position) == position

    def todo(self, position: int, length: int) -> list[Run]:
        """Return the units of a shard that are not credited.

        Args:
            position: The position of the shard.
            length: Number of its units.
        """
        return missing(self._record.partial.get(position, []), 0, length)

    def credit(self, position: int, start: int, stop: int) -> None:
        """Credit units of a shard.

        Args:
            position: The position of the shard.
            start: The first unit, from the start of the shard.
            stop: The unit after the last one.
        """
        add(self._record.partial.setdefault(position, []), start, stop)

    def finish(self, position: int) -> None:
        """Note that all units of a shard are credited."""
        del self._record.partial[position]
        add(self._record.done, position, position + 1)

    def skip(self, position: int) -> None:
        """Leave out a shard in this epoch."""
        add(self._record.skipped, position, position + 1)

    def _next(self) -> int | None:
        """Return the next position that is not leased, to which the cursor moves."""
        record = self._record
        while self._cursor < record.spec.shards:
            position = first_missing(record.skipped, first_missing(record.done, self._cursor))
            if position != self._cursor:
                self._cursor = position
            elif position in self._leased:
                self._cursor += 1
            elif record.quarantined and self._order.at(position) in record.quarantined:
                self.skip(position)
            else:
                return position
        return None

    def _restart(self) -> None:
        """Look for shards from the first position on."""
        spec = self._record.spec
        self._order = ShardOrder(spec.shards, spec.seed, self._record.epoch, spec.shuffle)
        self._cursor = 0
