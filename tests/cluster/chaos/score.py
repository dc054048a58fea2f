"""The results of a campaign: recoveries by kind, and goodput with its upper limit. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from tests.cluster.chaos.check import WorkerLine

FEWEST_S, TIMES = 1.0, 10.0


def useful_s(lines: Iterable[WorkerLine], began: float, ended: float) -> float:
    """Return the seconds in which rank 0 made new steps.

    Of a step that took much longer than most, only a part counts, because the workers waited.

    Args:
        lines: lines of the workers.
        began: begin of the campaign.
        ended: end of the campaign.
    """
    best = newest = 0
    last: WorkerLine | None = None
    spent: list[float] = []
    for line in sorted(lines, key=lambda line: line.at):
        if line.what not in ("loaded", "step") or line.rank or line.round < newest:
            continue
        newest = line.round
        step = int(line.values[0])
        if line.what == "step":
            same = last is not None and last.round == line.round
            if last is not None and same and step > best:
                spent.append(min(line.at, ended) - max(last.at, began))
            best = max(best, step)
        last = line
    spent = [s for s in spent if s > 0]
    if not spent:
        return 0.0
    longest = max(FEWEST_S, TIMES * statistics.median(spent))
    return sum(min(s, longest) for s in spent)


def ceiling(stall_s: float, recovery_s: float, between_s: float) -> float:
    """Return the largest possible goodput, at the best interval of checkpoints.

    It is G* = 1 - √(2C/M) - R/M.

    Args:
        stall_s: C, seconds that a save stops the training.
        recovery_s: R, seconds of a recovery.
        between_s: M, mean seconds between two faults.
    """
    return max(0.0, 1.0 - sqrt(2 * stall_s / between_s) - recovery_s / between_s)


def stall_s(lines: Iterable[WorkerLine]) -> float:
    """Return the mean seconds that a save stopped the training, over all processes of rank 0."""
    newest = {}
    for line in lines:
        if line.what == "blocked":
            newest[line.node, line.round] = line.values
    calls = sum(calls for calls, _ in newest.values())
    return sum(seconds for _, seconds in newest.values()) / calls if calls else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one kind of fault."""

    kind: str
    number: int
    median_s: float
    most_s: float
    pause_s: float
    longest_pause_s: float


def rows(found: Mapping[str, Sequence[tuple[float, float]]]) -> list[Row]:
    """Return recoveries and pauses by kind, the most frequent kind first."""
    made = []
    for kind, seconds in found.items():
        if seconds:
            recovered, paused = zip(*seconds, strict=True)
            medians = statistics.median(recovered), statistics.median(paused)
            made.append(
                Row(kind, len(seconds), medians[0], max(recovered), medians[1], max(paused))
            )
    return sorted(made, key=lambda row: (-row.number, row.kind))
