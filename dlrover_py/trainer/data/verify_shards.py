"""``dlrover data verify`` for leased shards: was each sample of each finished epoch trained once?

The ledger has what each worker has trained, also what was lost with a rollback. With
``exactly_once_effect``, a history begins with a state of an earlier one. So of the earlier one only
what was trained before that state has survived. With the other levels nothing is taken back, and
all histories of a job count.

The order of the shards is not looked at: the ranges that were trained must cover each epoch,
without gaps and overlaps. Those of a stream must cover each partition up to its watermark.
"""

import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dlrover_py.protocol import data_ledger
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.json_text import decoded
from dlrover_py.protocol.runs import Run, add, missing, size
from dlrover_py.protocol.shard_ledger import (
    LONGEST_HEADER,
    LONGEST_LINE,
    UNKNOWN,
    LedgerHistory,
    ShardLedgerHeader,
    parse_name,
    read_header,
)
from dlrover_py.protocol.shards import DatasetSpec, Level
from dlrover_py.shards.order import ShardTable
from dlrover_py.trainer.data.ledger_report import (
    MOST_EPOCHS,
    NAMED,
    EpochReport,
    LedgerReport,
    ledger_folder,
)

READS = 5
"""How often a ledger is read anew because files were added to it meanwhile."""


class _DamagedError(ValueError):
    """A file has no header, or a line that is not one of a ledger."""


@dataclass(frozen=True)
class _TrainedRange:
    """A range of a shard that a worker has trained."""

    token: int
    of: int | str
    """The epoch; for a stream, the partition."""
    start: int
    """The first unit in the dataset, or in the partition."""
    stop: int


@dataclass
class _Trained:
    """What some part of the ledger says."""

    sure: dict[int | str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """Ranges of the dataset that count, by epoch or partition, in any order."""
    possible: dict[int | str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """Ranges of which it is not known whether the queue has counted them: a worker has died before
    it had the answer. They are trained again if they do not count."""
    epoch: int = 0
    """All earlier epochs are complete, as the queue has said."""
    watermarks: dict[str, int] = field(default_factory=dict)
    """For a stream: the watermark of each partition, as the queue has said."""
    batches: int = 0
    """Number of batches."""


@dataclass
class _Ledger:
    """The files of a ledger."""

    headers: dict[str, ShardLedgerHeader] = field(default_factory=dict)
    """The header of each file, by name; the newest file is the last one."""
    problems: list[str] = field(default_factory=list)
    """What was found beside the samples, in words."""
    faults: list[str] = field(default_factory=list)
    """Why the surviving history is not certain, in words."""

    @property
    def newest(self) -> ShardLedgerHeader:
        """The header of the newest file."""
        return next(reversed(self.headers.values()))


Survivors = list[tuple[str, int | None]]
"""The files that count, and the state up to which each does; None: to its end."""


def is_shard_ledger(folder: Path) -> bool:
    """Return whether a folder, or its folder ``ledger``, is a ledger of leased shards."""
    try:
        return any(parse_name(path.name) for path in ledger_folder(folder).iterdir())
    except OSError:
        return False


def verify(folder: Path) -> LedgerReport:
    """Check the ledger of a training, which may be running.

    Args:
        folder: the ledger, or a folder with the ledger in its folder ``ledger``.

    Raises:
        ConfigError: there is no ledger that can be read.
    """
    place = ledger_folder(folder)
    for _ in range(READS):
        before = _read_headers(place)
        # All records of an epoch are written before a worker hears that it is complete. So they
        # are found by a second look.
        said = _read(place, _surviving(before), before)
        ledger = _read_headers(place)
        trained = _read(place, _surviving(ledger), ledger)
        if ledger.headers.keys() == before.headers.keys():
            break
    return _report(ledger.newest.spec, trained, said, ledger)


# --- Reading ---


def _read_headers(place: Path) -> _Ledger:
    """Return the headers of all files.

    Raises:
        ConfigError: no file can be read.
    """
    try:
        names = [path.name for path in place.iterdir()]
    except OSError as error:
        raise ConfigError(f"{place}: expected the folder of a ledger: {error.strerror}") from error
    ledger = _Ledger()
    # By number: from 1,000,000 on they have more digits.
    for name in sorted(names, key=lambda name: (parse_name(name) or (0, 0), name)):
        if data_ledger.parse_name(name) is not None:
            ledger.faults.append(f"{name}: an ElasticLoader has written to this ledger, too")
        if (parsed := parse_name(name)) is None:
            continue
        try:
            with _opened(place / name) as file:
                line = file.readline(LONGEST_HEADER)
            if not line.endswith(b"\n") and len(line) < LONGEST_HEADER:
                ledger.problems.append(f"{name}: it has no beginning")  # killed while it began
                continue
            header = read_header(line)
            if header.rank != parsed[1]:
                raise _DamagedError("its header is that of another file")
        except (OSError, ValueError) as error:
            ledger.faults.append(f"{name}: {error}: it is not known which records have survived")
            continue
        ledger.headers[name] = header
    if not ledger.headers:
        why = "; ".join((ledger.faults + ledger.problems)[:NAMED])
        raise ConfigError(f"{place}: found no ledger that can be read: {why}")
    _check_datasets(ledger)
    return ledger


def _check_datasets(ledger: _Ledger) -> None:
    """Note a fault if the files are of several datasets."""
    (_, first), *others = ledger.headers.items()
    for name, header in others:
        if (
            header.dataset != first.dataset
            or header.spec.samples != first.spec.samples
            or not header.spec.continues(first.spec.order)
        ):
            ledger.faults.append(
                f"{name}: it has another dataset, seed or order than the first one"
            )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file.

    Raises:
        OSError: it cannot be opened.
        _DamagedError: it is no regular file.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _DamagedError("it is no regular file")
        yield file


def _read(place: Path, survivors: Survivors, ledger: _Ledger) -> _Trained:
    """Return what some files say, up to a state of each.

    Args:
        place: the ledger.
        survivors: the files, each with the number of a state or None.
        ledger: gets a fault for each file that cannot be read to its end.
    """
    trained = _Trained()
    for name, limit in survivors:
        header = ledger.headers[name]
        table = ShardTable(header.spec.sizes)
        pending: list[_TrainedRange] = []
        try:
            for word, value in _lines(place / name):
                match word:
                    case "trained":
                        trained.batches += 1
                        pending += _parts(value, header.spec, table)
                    case "confirmed":
                        refused = set(value)
                        for part in pending:
                            if part.token not in refused:
                                trained.sure[part.of].append((part.start, part.stop))
                        pending = []
                    case "state" if value == limit:
                        break
                    case "epoch":
                        trained.epoch = max(trained.epoch, value)
                    case "watermarks":
                        for partition, mark in value.items():
                            known = trained.watermarks.get(partition, 0)
                            trained.watermarks[partition] = max(known, mark)
        except (OSError, ValueError, TypeError) as error:
            ledger.faults.append(f"{name}: {error}: the rest of it is not known")
        for part in pending:
            trained.possible[part.of].append((part.start, part.stop))
    return trained


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the lines behind the header, but for one that is not complete at the end.

    Raises:
        OSError: the file cannot be read.
        _DamagedError: a line is not one of a ledger.
    """
    with _opened(path) as file:
        file.readline(LONGEST_HEADER)
        while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
            try:
                match decoded(line):
                    case ["trained" | "confirmed" as word, list(value)]:
                        yield word, value
                    case ["state" | "epoch" as word, int(number)]:
                        yield word, number
                    case ["watermarks", dict(found)] if all(
                        type(mark) is int for mark in found.values()
                    ):
                        yield "watermarks", found
                    case _:
                        raise _DamagedError
            except ValueError as error:
                raise _DamagedError(f"expected a record, found {line[:40]!r}") from error
        if len(line) == LONGEST_LINE:
            raise _DamagedError(f"expected lines of less than {LONGEST_LINE} bytes")


def _parts(found: list[Any], spec: DatasetSpec, table: ShardTable) -> list[_TrainedRange]:
    """Return the parts of a batch.

    Args:
        found: the value of its line.
        spec: the dataset.
        table: its shards.

    Raises:
        _DamagedError: they are no parts of the dataset.
    """
    parts = []
    for each in found:
        match each:
            case [int(token), int(epoch), int(shard), int(start), int(stop)] if (
                0 <= epoch < 2**53
                and 0 <= shard < spec.shards
                and 0 <= start < stop <= table.place(shard)[1]
            ):
                first, _ = table.place(shard)
                parts.append(_TrainedRange(token, epoch, first + start, first + stop))
            case [int(token), 0, str(partition), int(start), int(stop)] if (
                spec.range_size is not None and 0 <= start < stop
            ):
                parts.append(_TrainedRange(token, partition, start, stop))
            case _:
                raise _DamagedError(f"expected a part of a shard, found {each!r:.60}")
    return parts


# --- The surviving history ---


def _surviving(ledger: _Ledger) -> Survivors:
    """Return the files whose records have survived. Notes faults if they are not certain."""
    newest = ledger.newest
    of_run = {name: h for name, h in ledger.headers.items() if h.run == newest.run}
    if newest.spec.level is not Level.EXACTLY_ONCE_EFFECT:
        return [(name, None) for name in of_run]
    files: dict[LedgerHistory, list[str]] = defaultdict(list)
    for name, header in ledger.headers.items():
        files[header.history].append(name)
    # A worker of an older round may be late.
    history, limit = max(header.history for header in of_run.values()), None
    found: Survivors = []
    while True:
        headers = [ledger.headers[name] for name in files[history]]
        found += [
            (name, limit)
            for name in files.pop(history)
            if limit is None or ledger.headers[name].states < limit
        ]
        absent = set(range(headers[0].world)) - {header.rank for header in headers}
        where = f"round {history.round}, load {history.load}"
        if absent:
            named = ", ".join(map(str, sorted(absent)[:NAMED]))
            ledger.problems.append(f"{where}: there is no record of rank {named}")
        parents = {header.parent for header in headers}
        if len(parents) > 1:
            ledger.faults.append(f"{where}: its workers disagree about the state it began with")
        parent = max(parents)
        if not parent:
            return found
        try:
            history, limit = LedgerHistory.of_mark(parent)
        except ValueError:
            what = "has no ledger" if parent == UNKNOWN else "has no place in a ledger"
            ledger.faults.append(f"{where}: it began with a state that {what}")
            return found
        if history not in files:
            ledger.faults.append(f"{where}: the records before its state are not in this ledger")
            return found


# --- The proof ---


def _report(spec: DatasetSpec, trained: _Trained, said: _Trained, ledger: _Ledger) -> LedgerReport:
    """Return what the surviving records cover.

    Args:
        spec: the dataset.
        trained: the records.
        said: what was read before: how far the queue has come.
        ledger: gives problems and faults.
    """
    faults, epoch = ledger.faults, said.epoch
    recorded = trained.sure.keys() | trained.possible.keys()
    if spec.range_size is not None:
        partitions = [
            _partition_report(spec, str(name), trained, said, faults)
            for name in sorted(said.watermarks.keys() | recorded)
        ]
        return LedgerReport(partitions, trained.batches, ledger.problems, faults)
    listed: list[int] = []
    if epoch > MOST_EPOCHS:
        faults.append(f"the epoch {epoch} is too large: only those with a record are listed")
    else:
        listed += range(epoch + (spec.epochs is None or epoch < spec.epochs))
    epochs = [
        _epoch_report(spec, each, trained, epoch)
        for each in sorted({*listed, *(number for number in recorded if isinstance(number, int))})
    ]
    return LedgerReport(epochs, trained.batches, ledger.problems, faults)


def _epoch_report(spec: DatasetSpec, number: int, trained: _Trained, epoch: int) -> EpochReport:
    """Return what the records of one epoch cover.

    Args:
        spec: the dataset.
        number: the epoch.
        trained: the records.
        epoch: all earlier epochs are complete.
    """
    covered, repeated = _coverage(trained, number)
    gaps = missing(covered, 0, spec.samples)
    report = EpochReport(number, spec.samples, finished=number < epoch or not gaps)
    return _with_faults(report, spec, gaps if report.finished else [], repeated)


def _partition_report(
    spec: DatasetSpec, name: str, trained: _Trained, said: _Trained, faults: list[str]
) -> EpochReport:
    """Return what the records of one partition of a stream cover.

    Args:
        spec: the stream.
        name: name of the partition.
        trained: the records.
        said: what was read before: the watermarks, and whether the stream is over.
        faults: gets what makes the partition impossible to prove.
    """
    covered, repeated = _coverage(trained, name)
    mark = said.watermarks.get(name, 0)
    if said.epoch > 0 and covered and covered[-1][1] > mark:
        faults.append(
            f"partition {name}: the stream is over, and {covered[-1][1]} units were trained, but "
            f"the last known watermark is {mark}: the master may be of an earlier release"
        )
    report = EpochReport(0, mark, finished=said.epoch > 0, partition=name)
    return _with_faults(report, spec, missing(covered, 0, mark), repeated)


def _coverage(trained: _Trained, of: int | str) -> tuple[list[Run], list[Run]]:
    """Return the ranges that were trained, and those that were trained more than once.

    Args:
        trained: the records.
        of: an epoch or a partition.
    """
    covered: list[Run] = []
    repeated: list[Run] = []
    for start, stop in sorted(trained.sure.get(of, [])):
        last = covered[-1][1] if covered else 0
        if start < last:
            add(repeated, start, min(stop, last))
        add(covered, start, stop)
    for start, stop in sorted(trained.possible.get(of, [])):
        add(covered, start, stop)
    return covered, repeated


def _with_faults(
    report: EpochReport, spec: DatasetSpec, gaps: list[Run], repeated: list[Run]
) -> EpochReport:
    """Return a report with what was found.

    Args:
        report: the report, which is filled.
        spec: the dataset.
        gaps: the ranges that were not trained.
        repeated: the ranges that were trained more than once.
    """
    report.repeats_allowed = spec.level is Level.AT_LEAST_ONCE
    for kind, found in (("missing", gaps), ("repeated", repeated)):
        setattr(report, kind, size(found))
        if found and spec.range_size is not None:
            report.named[kind] = [_words(start, stop) for start, stop in found[:NAMED]]
        elif found:
            report.named[kind] = list(_named(found, ShardTable(spec.sizes)))
    return report


def _named(found: list[Run], table: ShardTable) -> Iterator[str]:
    """Yield the first ranges of a dataset in words, each within a shard.

    Args:
        found: the ranges.
        table: the shards of the dataset.
    """
    left = NAMED
    for start, stop in found:
        while start < stop and left:
            shard = table.shard(start)
            first, each = table.place(shard)
            end = min(stop, first + each)
            yield f"{_words(start - first, end - first)} of shard {shard}"
            start, left = end, left - 1


def _words(start: int, stop: int) -> str:
    """Return a range in words."""
    return f"{start}–{stop - 1}" if stop - start > 1 else f"{start}"
