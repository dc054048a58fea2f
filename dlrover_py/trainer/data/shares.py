"""How the samples of one optimizer step are divided among ranks and micro-batches. Pure.

All ranks run the same number of micro-batches, because each may contain collectives. Numbers of
samples differ by at most one between two ranks, and between two micro-batches of a rank. Some may
be 0: such a micro-batch is *empty*. The rank then computes any sample with weight 0.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The positions of one micro-batch in the order of the epoch."""

    start: int
    stop: int
    """One past the last position. It is ``start`` in an empty micro-batch."""
    last: bool
    """It is the last micro-batch of its step: gradients are exchanged after it."""
    total: int
    """Number of samples of the step, of all ranks together."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    def weight(self, world: int) -> float:
        """Return the factor of the mean loss of this micro-batch.

        The mean of the weighted gradients over the ranks is the mean over the samples of the step.

        Args:
            world: number of workers, over which gradients are averaged.
        """
        return self.samples * world / self.total

    @property
    def positions(self) -> range:
        """The positions to compute: those of the samples; one of the same step if it is empty."""
        # The first part of a step is never empty, so there is a position before an empty one.
        return range(self.start, self.stop) or range(self.start - 1, self.start)


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of one of several contiguous parts of nearly the same size.

    Args:
        total: size of the whole.
        parts: number of parts; some are empty if there are more of them than ``total``.
        index: index of the part.
    """
    small, larger = divmod(total, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)


def count_micro_batches(total: int, world: int, limit: int | None) -> int:
    """Return the number of micro-batches of each rank in one step.

    Args:
        total: number of samples of the step.
        world: number of workers.
        limit: greatest number of samples in a micro-batch; None for one micro-batch.
    """
    return 1 if limit is None else -(-total // (world * limit))


def micro_batches(
    start: int, stop: int, *, rank: int, world: int, limit: int | None
) -> list[MicroBatch]:
    """Return the micro-batches of a rank for the positions of one step.

    Args:
        start: first position of the step.
        stop: one past the last position of the step; greater than ``start``.
        rank: global rank of the worker.
        world: number of workers.
        limit: greatest number of samples in a micro-batch; None for one micro-batch.
    """
    count = count_micro_batches(stop - start, world, limit)
    first, end = (start + edge for edge in share(stop - start, world, rank))
    found = []
    for index in range(count):
        low, high = share(end - first, count, index)
        last = index == count - 1
        found.append(MicroBatch(first + low, first + high, last, total=stop - start))
    return found
