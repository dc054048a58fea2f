"""What is left of a stream, whose partitions grow: the supply of its lease queue.

A partition is cut into ranges at multiples of ``range_size``. The last range is leased as far as
the known end of the partition, and again when there is more. A position names a range: the number
of its partition in the upper bits, and its own number in the lower :data:`RANGE_BITS`.

The *watermark* of a partition is its first unit that is neither credited nor in quarantine.
"""

from collections.abc import Container, Mapping

from dlrover_py.protocol.runs import Run, add, first_missing, missing, size
from dlrover_py.protocol.shards import MAX_PARTITIONS, Ledger
from dlrover_py.shards.epochs import Place
from dlrover_py.shards.records import PartitionRecord, QueueRecord, StreamRecord

RANGE_BITS = 32
"""A partition has less than ``2**RANGE_BITS`` ranges."""


def watermark(partition: PartitionRecord) -> int:
    """Return the first unit of a partition that is neither credited nor in quarantine."""
    found, at = 0, -1
    while found != at:
        at = found
        found = first_missing(partition.skipped, first_missing(partition.credited, at))
    return min(found, partition.end)


def watermarks(stream: StreamRecord) -> dict[str, int]:
    """Return the watermark of each partition, but for 0."""
    found = {name: watermark(partition) for name, partition in stream.partitions.items()}
    return {name: mark for name, mark in found.items() if mark}


def quarantined(partition: PartitionRecord) -> int:
    """Return how many units of a partition are in quarantine, and not credited."""
    return sum(
        size(missing(partition.credited, start, min(stop, partition.end)))
        for start, stop in partition.skipped
        if start < partition.end
    )


class StreamRanges:
    """The ranges of a stream, as far as its partitions are known."""

    limit: int | None = None
    """A stream has no number of ranges."""

    def __init__(self, record: QueueRecord, leased: Container[int]) -> None:
        """Look for ranges from the watermarks on.

        Args:
            record: The record of the queue, which is changed in place.
            leased: The positions that are leased now; the queue changes it.
        """
        self._stream, self._leased = record.stream, leased
        self._size = record.spec.range_size or 1
        self._names = list(self._stream.partitions)
        self._restart()

    @property
    def over(self) -> bool:
        """Whether the stream has ended, and nothing is left of it."""
        return self._stream.complete

    def begin(self, ledger: Ledger) -> None:
        """Take the credits of a ledger, which a checkpoint has, instead of the present ones.

        The quarantine and the known ends of partitions stay. A ledger with later units moves an end
        up, and its new partitions are added.
        """
        for partition in self._stream.partitions.values():
            partition.credited = []
        for name, runs in ledger.parts.items():
            partition = self._partition(name)
            partition.credited = list(runs)
            partition.end = max([partition.end, *(stop for _, stop in runs[-1:])])
        self._stream.complete = False
        self._restart()

    def fault(self, ledger: Ledger) -> str:
        """Return why a ledger is not one of a stream, in words; empty if it is one."""
        if ledger.epoch or ledger.done or ledger.partial:
            return "expected the ledger of a stream, found that of a dataset with epochs"
        return self.refusal({name: runs[-1][1] for name, runs in ledger.parts.items() if runs})

    def refusal(self, ends: Mapping[str, int]) -> str:
        """Return why these partitions cannot be used, in words; empty if they can."""
        names = self._stream.partitions.keys() | ends.keys()
        if len(names) > MAX_PARTITIONS:
            return f"expected at most {MAX_PARTITIONS} partitions, found {len(names)}"
        for name, end in ends.items():
            if end > self._size << RANGE_BITS:
                return f"partition {name} has {end} units: expected larger ranges than {self._size}"
        return ""

    def extend(self, ends: Mapping[str, int], *, ended: bool) -> bool:
        """Take in where the partitions end. A lower end than the known one is ignored.

        Args:
            ends: The end of each partition, by name.
            ended: Whether these are the last ones.

        Returns:
            Whether something is new.
        """
        if self._stream.ended:
            return False
        news = self._stream.ended = ended
        for name, end in ends.items():
            news |= name not in self._stream.partitions
            partition = self._partition(name)
            if end > partition.end:
                partition.end = end
                self._ready[self._numbers[name]] = None
                news = True
        return news

    def end_if_complete(self) -> bool:
        """Mark the stream as complete, if its source has ended and no range is left or leased.

        Returns:
            Whether this call has marked it: true once for each stream.
        """
        left = (number for number in self._ready if self._next_of(number) is not None)
        if self.over or not self._stream.ended or next(left, None) is not None:
            return False
        self._stream.complete = True
        return True

    def take(self) -> int | None:
        """Return a position that is not leased, of each partition in turn; None if there is none.

        Ranges in quarantine are skipped.
        """
        while self._ready:
            number = next(iter(self._ready))
            del self._ready[number]
            position = self._next_of(number)
            if position is not None:
                self._ready[number] = None  # behind the others
                self._cursors[number] = self._start(position) + self._size
                return position
        return None

    def left(self, most: int) -> int:
        """Return how many positions are left for :meth:`take` at most, up to ``most``."""
        found = 0
        for number in self._ready:
            units = self._stream.partitions[self._names[number]].end - self._cursors[number]
            found += max(0, -(-units // self._size))
            if found >= most:
                return most
        return found

    def place(self, position: int) -> Place:
        """Return the range at a position, as far as its partition is known."""
        name = self._names[position >> RANGE_BITS]
        start = self._start(position)
        end = self._stream.partitions[name].end
        return Place(position, start, min(end - start, self._size), name)

    def is_open(self, position: int) -> bool:
        """Return whether a position may be leased: it exists, and is not credited completely."""
        if position >> RANGE_BITS >= len(self._names):
            return False
        found = self.place(position)
        return found.size > 0 and bool(self.todo(position, found.size))

    def todo(self, position: int, length: int) -> list[Run]:
        """Return the units of a range that are not credited, from its start.

        Args:
            position: The position of the range.
            length: Number of its units.
        """
        start = self._start(position)
        left = missing(self._at(position).credited, start, start + length)
        return [(first - start, stop - start) for first, stop in left]

    def credit(self, position: int, start: int, stop: int) -> None:
        """Credit units of a range.

        Args:
            position: The position of the range.
            start: The first unit, from the start of the range.
            stop: The unit after the last one.
        """
        first = self._start(position)
        add(self._at(position).credited, first + start, first + stop)

    def finish(self, position: int) -> None:
        """Look at a range again that was leased: its partition may have grown."""
        number = position >> RANGE_BITS
        self._cursors[number] = min(self._cursors[number], self._start(position))
        self._ready[number] = None

    def skip(self, position: int) -> None:
        """Leave out a range, with what will be added to it."""
        start = self._start(position)
        add(self._at(position).skipped, start, start + self._size)

    def _partition(self, name: str) -> PartitionRecord:
        """Return a partition, which is added if it is new."""
        found = self._stream.partitions.get(name)
        if found is None:
            found = self._stream.partitions[name] = PartitionRecord()
            self._numbers[name] = len(self._names)
            self._names.append(name)
            self._cursors.append(0)
        return found

    def _at(self, position: int) -> PartitionRecord:
        """Return the partition of a position."""
        return self._stream.partitions[self._names[position >> RANGE_BITS]]

    def _start(self, position: int) -> int:
        """Return the first unit of a range in its partition."""
        return (position & (1 << RANGE_BITS) - 1) * self._size

    def _next_of(self, number: int) -> int | None:
        """Return the next position of a partition that is not leased; None if there is none.

        The cursor of the partition moves to it.
        """
        partition = self._stream.partitions[self._names[number]]
        at, found = self._cursors[number], None
        while at < partition.end and found is None:
            free = first_missing(partition.skipped, first_missing(partition.credited, at))
            position = number << RANGE_BITS | at // self._size
            if free != at:
                at = free
            elif position in self._leased:
                at = (at // self._size + 1) * self._size
            else:
                found = position
        self._cursors[number] = at
        return found

    def _restart(self) -> None:
        """Look for ranges in all partitions, from their starts on."""
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._cursors = [0] * len(self._names)
        """In each partition, the first unit that may be free."""
        self._ready: dict[int, None] = dict.fromkeys(range(len(self._names)))
        """Numbers of the partitions that may have a free range, in the order of their turns."""
