"""``dlrover data verify``: was each sample of each finished epoch trained once?

The ledger has the history of all workers, also of steps that were lost and trained again. Each
segment says after which step it has begun. So of the segments before it only the steps up to that
one have survived. For these, the digests of what each rank has trained are compared with the order
of the samples, and the steps must cover the epoch without gaps and overlaps.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from dlrover_py.protocol.data_ledger import (
    DIGEST_BYTES,
    END,
    LARGEST_FILE,
    LONGEST_HEADER,
    LedgerHeader,
    parse_name,
)
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data.ledger_report import (
    MOST_EPOCHS,
    NAMED,
    EpochReport,
    LedgerReport,
    ledger_folder,
)
from dlrover_py.trainer.data.order import SampleOrder, hash_samples

CHUNK = 1 << 20
"""Samples that are looked up at once."""
_NO_DIGESTS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class RankFile:
    """What one rank has written in one segment."""

    header: LedgerHeader
    digests: Tensor
    """int64 tensor with one digest per step."""
    ended: bool
    """All of these steps are committed; else the last one may have failed."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring steps of one segment that have survived."""

    ranks: dict[int, RankFile]
    """The files of the segment, by rank; some may be missing."""
    steps: int
    """How many steps of the segment have survived, from its first one on."""

    @property
    def start(self) -> LedgerHeader:
        """The beginning of the segment."""
        return next(iter(self.ranks.values())).header

    @property
    def order(self) -> SampleOrder:
        """The order of the samples in the epoch of the segment."""
        start = self.start
        return SampleOrder(start.length, start.seed, start.epoch, start.shuffle, start.block)


Segments = dict[int, dict[int, RankFile]]
"""The files of a ledger, by segment and rank."""


# --- Reading ---


def read_ledger(folder: Path) -> tuple[Segments, list[str], list[str]]:
    """Return the files of a ledger, what could not be read, and what makes it uncertain, in words.

    A segment whose files are all empty has no steps: its process was killed at its beginning.

    Args:
        folder: the ledger, or a folder with the ledger in its folder ``ledger``.

    Raises:
        ConfigError: there is no ledger, none that can be read, or one of a newer version.
    """
    place = ledger_folder(folder)
    try:
        names = sorted(path.name for path in place.iterdir())
    except OSError as error:
        raise ConfigError(f"{place}: expected the folder of a ledger: {error.strerror}") from error
    segments: Segments = {}
    problems = []
    damaged: set[int] = set()
    for name in names:
        if (parsed := parse_name(name)) is None:
            continue
        try:
            found = _read_file(place / name)
        except EOFError:
            problems.append(f"{name}: it is empty")
            continue
        except (OSError, ValueError, MemoryError) as error:
            damaged.add(parsed[0])
            problems.append(f"{name}: {error}")
            continue
        if (found.header.segment, found.header.rank) != parsed:
            damaged.add(parsed[0])
            problems.append(f"{name}: its header is that of another file")
            continue
        segments.setdefault(parsed[0], {})[parsed[1]] = found
    if not segments:
        why = f" that can be read ({'; '.join(problems[:NAMED])})" if problems else ""
        raise ConfigError(
            f"{place}: found no ledger{why}: expected the folder that ElasticLoader(ledger=…) has, "
            "or one with it in its folder 'ledger'"
        )
    faults = [
        f"segment {number}: none of its files can be read, so it is not known which steps before "
        "it have survived"
        for number in sorted(damaged - segments.keys())
    ]
    faults += [
        f"segment {number}: its ranks disagree about where it begins"
        for number, ranks in segments.items()
        if len({replace(file.header, rank=0) for file in ranks.values()}) > 1
    ]
    return segments, problems, faults


def _read_file(path: Path) -> RankFile:
    """Return the contents of a file; what was cut off at its end is ignored.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no valid header, or is too large.
        EOFError: it is empty.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        header = file.readline(LONGEST_HEADER)
        if not header and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise EOFError
        if not header.endswith(b"\n"):
            raise ValueError("the header is cut off")
        if os.fstat(file.fileno()).st_size > LARGEST_FILE:
            raise ValueError(f"expected a file of at most {LARGEST_FILE} bytes")
        rest = bytearray(file.read(LARGEST_FILE))
    whole = len(rest) // DIGEST_BYTES
    digests = torch.frombuffer(rest, dtype=torch.int64, count=whole) if whole else _NO_DIGESTS
    return RankFile(LedgerHeader.decode(header), digests, rest[whole * DIGEST_BYTES :] == END)


# --- The surviving history ---


def surviving(segments: Segments) -> list[Stretch]:
    """Return the steps that have survived, from the first to the last. Pure.

    The last stretch is that of the newest segment, which may have no steps yet.

    A later segment that begins after step ``s`` has thrown away what earlier ones had after ``s``.
    """
    found: list[Stretch] = []
    limit: int | None = None
    for number in sorted(segments, reverse=True):
        ranks = segments[number]
        first = next(iter(ranks.values())).header.steps
        longest = max(len(file.digests) for file in ranks.values())
        if limit is None:
            ended = any(file.ended for file in ranks.values())
            # The ranks of a running training write one after the other.
            count = longest if ended else min(len(f.digests) for f in ranks.values()) - 1
        else:
            count = min(longest, limit - first)
        if count > 0 or limit is None:
            found.append(Stretch(ranks, max(count, 0)))
        limit = first if limit is None else min(limit, first)
    return found[::-1]


# --- The proof ---

Interval = tuple[int, int]
"""Positions of an epoch: the first, and one past the last."""


def prove(
    stretch: Stretch, problems: list[str], faults: list[str]
) -> Iterator[tuple[Interval, bool]]:
    """Yield the positions of neighbouring steps, and whether the digests prove them.

    Args:
        stretch: the steps.
        problems: gets a line for each kind of problem with a record.
        faults: gets a line if the steps cannot be those of the epoch.
    """
    start = stretch.start
    recorded = {rank: len(file.digests) for rank, file in stretch.ranks.items()}
    absent = [str(r) for r in range(start.world) if recorded.get(r, 0) < stretch.steps]
    of_all = 0 if len(recorded) < start.world else min(recorded.values())
    if absent:
        problems.append(
            f"segment {start.segment}: the record of rank {', '.join(absent[:NAMED])} is missing "
            "or ends early"
        )
    steps = min(stretch.steps, -(-max(0, start.length - start.offset) // start.global_batch))
    if steps < stretch.steps:
        faults.append(f"segment {start.segment}: it has more steps than the epoch")
    at_once = max(1, CHUNK // start.global_batch)
    for first in range(0, steps, at_once):
        count = min(at_once, steps - first)
        starts = start.offset + (first + torch.arange(count)) * start.global_batch
        stops = (starts + start.global_batch).clamp(max=start.length)
        base = int(starts[0])
        samples = stretch.order.at(torch.arange(base, int(stops[-1])))
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), hash_samples(samples).cumsum(0)])
        proven = torch.ones(count, dtype=torch.bool)
        small, larger = (stops - starts) // start.world, (stops - starts) % start.world
        for rank, file in sorted(stretch.ranks.items()):
            low = starts - base + rank * small + larger.clamp(max=rank)
            high = low + small + (larger > rank)
            digests = file.digests[first : first + count]
            same = (sums[high] - sums[low])[: len(digests)] == digests
            if not bool(same.all()):
                step = start.steps + first + int((~same).nonzero()[0]) + 1
                problems.append(
                    f"step {step}: rank {rank} has trained other samples than the order says"
                )
            proven[: len(digests)] &= same
        proven[max(0, of_all - first) :] = False
        edges = [0, *((proven[1:] != proven[:-1]).nonzero().flatten() + 1).tolist(), count]
        for low_edge, high_edge in pairwise(edges):
            interval = int(starts[low_edge]), int(stops[high_edge - 1])
            yield interval, bool(proven[low_edge])


def verify(folder: Path) -> LedgerReport:
    """Check the ledger of a training, which may be running.

    Args:
        folder: the ledger, or a folder with the ledger in its folder ``ledger``.

    Raises:
        ConfigError: there is no ledger.
    """
    segments, problems, faults = read_ledger(folder)
    history = surviving(segments)
    intervals: dict[int, list[tuple[Interval, bool]]] = {}
    orders: dict[int, SampleOrder] = {}
    fingerprint = ""  # the first one that is known
    for stretch in history:
        order = stretch.order
        first = history[0]
        same = replace(first.order, epoch=order.epoch) == order
        fingerprint = fingerprint or stretch.start.fingerprint
        if not same or stretch.start.fingerprint not in ("", fingerprint):
            faults.append(
                f"segment {stretch.start.segment}: it has another dataset, seed or order than the "
                "ones before: its steps belong to another epoch's samples, or another loader has "
                "this ledger, too"
            )
        orders[order.epoch] = order
        intervals.setdefault(order.epoch, []).extend(prove(stretch, problems, faults))
    newest = history[-1].order
    listed: Iterable[int] = range(newest.epoch + 1)
    if newest.epoch > MOST_EPOCHS:
        faults.append(f"the epoch {newest.epoch} is too large: only those with a record are listed")
        listed = sorted(orders)
    epochs = [
        _report(
            orders.get(epoch, replace(newest, epoch=epoch)),
            intervals.get(epoch, []),
            finished=epoch < newest.epoch,
        )
        for epoch in listed
    ]
    steps = history[-1].start.steps + history[-1].steps
    return LedgerReport(epochs, steps, problems, faults)


def _report(
    order: SampleOrder, intervals: list[tuple[Interval, bool]], *, finished: bool
) -> EpochReport:
    """Return what the steps of one epoch cover.

    Args:
        order: the order of the samples in the epoch.
        intervals: the positions of neighbouring steps, and whether they are proven.
        finished: a later epoch has begun.
    """
    covered = 0
    faults: dict[str, list[Interval]] = {"missing": [], "repeated": [], "unproven": []}
    for (start, stop), proven in sorted(intervals):
        if start > covered:
            faults["missing"].append((covered, start))
        if start < covered:
            faults["repeated"].append((start, min(stop, covered)))
        if not proven:
            faults["unproven"].append((start, stop))
        covered = max(covered, stop)
    finished = finished or covered == order.length
    if finished and covered < order.length:
        faults["missing"].append((covered, order.length))
    report = EpochReport(order.epoch, order.length, finished)
    for kind, found in faults.items():
        setattr(report, kind, sum(stop - start for start, stop in found))
        if found:
            first = torch.arange(found[0][0], min(found[0][1], found[0][0] + NAMED))
            report.named[kind] = order.at(first).tolist()
    return report
