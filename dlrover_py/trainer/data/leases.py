"""``ShardLoader`` reads the shards that the job's lease queue gives to this worker.

::

    loader = ShardLoader("train", LineSource(paths, parse=json.loads), epochs=3)
    state = {"model": model, "data": loader}
    checkpointer.load(state)
    while not loader.over:
        for records in loader.batches(32):
            train(records)
            optimizer.step()
            loader.commit()

A worker asks the queue when it has finished a shard, and at least every two seconds. It waits for
the answer. In a script without an agent, the queue is in the same process.
"""

import logging
import math
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from dlrover_py.protocol.documents import explain
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    SupersededError,
    UnreachableError,
)
from dlrover_py.protocol.runs import Run, add
from dlrover_py.protocol.runs import size as size_of
from dlrover_py.protocol.shard_ledger import UNKNOWN, LedgerHistory, ShardLedgerHeader
from dlrover_py.protocol.shards import (
    MAX_REQUEST,
    MAX_SIZES,
    AnswerCode,
    Credit,
    DatasetSpec,
    Ledger,
    Level,
    Mark,
    ShardAnswer,
    ShardLease,
    ShardRequest,
    ShardReturn,
    read_shard_answer,
)
from dlrover_py.shards.order import ShardOrder, ShardTable
from dlrover_py.shards.queue import ShardQueue
from dlrover_py.shards.records import QueueRecord
from dlrover_py.trainer import session
from dlrover_py.trainer.data.ledger_file import folder_of
from dlrover_py.trainer.data.shard_ledger import ShardLedgerWriter
from dlrover_py.trainer.data.shard_sources import (
    ShardSource,
    ShardUnreadableError,
    fingerprint_of,
)
from dlrover_py.trainer.data.streams import StreamSource
from dlrover_py.trainer.settings import Settings

log = logging.getLogger(__name__)

AGENT_AWAY_S = 60.0
"""Seconds for which a connection to the agent is tried again."""
RETRY_S = 0.2
"""Seconds between two such tries."""
REPORT_S = 2.0
"""Seconds after which a commit is reported, although no shard is finished."""
MOST_BYTES = MAX_REQUEST - 1024
"""Greatest size of a request. Its agent and the master take ``MAX_REQUEST``, with what is added."""

MAX_AHEAD = 32
"""Most leases that a worker may hold before it reads them."""

_NOTHING = object()
"""In the place of a record, for a part of a shard in which none begins."""

_names: "weakref.WeakValueDictionary[str, ShardLoader]" = weakref.WeakValueDictionary()
"""The loaders of this process, by the name of their dataset."""


@dataclass(slots=True)
class _OpenLease:
    """A lease that is begun."""

    lease: ShardLease
    left: int
    """Units of it that are not committed."""


@dataclass(slots=True)
class _History:
    """What a worker has told the queue of a dataset, and must still tell.

    It outlives the loader: one that is made anew in the same process goes on from it. The queue
    knows the worker, and ignores requests whose numbers begin again.
    """

    seq: int = 0
    """Number of the newest request."""
    loads: int = 0
    """How often a state was loaded."""
    epoch: int = 0
    """The epoch of the next batch."""
    ledger: Ledger | None = None
    """The loaded ledger, until other workers' credits are merged into it."""
    credits: dict[int, list[Run]] = field(default_factory=dict)
    """What is committed, and not reported to the queue yet, by token."""
    own: dict[int | str, list[Run]] = field(default_factory=dict)
    """What this worker has committed in this epoch since the last ledger, by position; for a
    stream, by partition."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of this process in a ledger on disk, if no job gives one."""
    origin: Mark = ""
    """Mark of the state with which the history has begun; empty if there was none."""
    over: str = ""
    """Why this history must not go on, in words: the model may have learnt what does not count."""
    states: int | None = None
    """How many states were taken in this history; None while there is no record of it on disk."""

    def roll_back(self, ledger: Ledger, level: Level) -> None:
        """Begin a history from a loaded ledger, and forget all that belongs to the present one.

        Only a queue for ``exactly_once_effect`` goes back to the ledger. For other levels it stays
        where it is, or is new: then its first answer gives the epoch.
        """
        self.loads += 1
        goes_back = level is Level.EXACTLY_ONCE_EFFECT
        self.epoch, self.ledger = (ledger.epoch, ledger) if goes_back else (0, None)
        self.credits, self.own, self.over = {}, {}, ""
        has_credits = ledger.epoch or ledger.done or ledger.partial or ledger.parts
        self.origin = ledger.mark or (UNKNOWN if has_credits else "")
        self.states = None


_histories: dict[tuple[str, int, str], _History] = {}
"""The histories of this process, by the socket of the agent, the round, and the dataset."""


class _Channel(Protocol):
    """The way to the queue."""

    def ask(self, request: ShardRequest) -> ShardAnswer:
        """Return the answer to a request; it may take long.

        Raises:
            ConfigError: the request is too large.
            UnreachableError: the agent does not answer.
        """


class _AgentChannel:
    """The connection to this node's agent, which asks the master."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stream: Any = None

    def ask(self, request: ShardRequest) -> ShardAnswer:
        """Send a request until it is answered. See :class:`_Channel`."""
        line = request.model_dump_json(exclude_defaults=True).encode() + b"\n"
        if len(line) > MOST_BYTES:
            raise ConfigError(
                f"dataset {request.dataset}: expected a request of at most {MOST_BYTES} bytes, "
                f"found {len(line)}: give a stream fewer partitions or shorter names, and "
                "other data fewer sizes of shards"
            )
        deadline = time.monotonic() + AGENT_AWAY_S
        while True:
            try:
                if self._stream is None:
                    connection = socket.socket(socket.AF_UNIX)
                    connection.connect(self._path)
                    self._stream = connection.makefile("rwb")
                    connection.close()  # the file keeps it open
                self._stream.write(line)
                self._stream.flush()
                answer = read_shard_answer(self._stream.readline())
                if answer.seq in (0, request.seq):
                    return answer
            except (OSError, ValueError) as error:
                self._stream = None
                if time.monotonic() > deadline:
                    raise UnreachableError(f"the agent at {self._path}: {error}") from error
                threading.Event().wait(RETRY_S)


class _OwnQueue:
    """The queue of a script without an agent."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._queue = ShardQueue(QueueRecord(spec=spec))

    def ask(self, request: ShardRequest) -> ShardAnswer:
        """Ask the queue. See :class:`_Channel`."""
        answer = self._queue.take("here", request, time.monotonic())
        for note in self._queue.notes:
            log.warning("dataset %s: %s", request.dataset, note)
        self._queue.notes.clear()
        return answer


class ShardLoader:
    """Yields batches of records from the shards that the queue leases to this worker.

    It has ``state_dict`` and ``load_state_dict``, so it is a part of the checkpoint like a model.
    """

    def __init__(
        self,
        name: str,
        source: ShardSource | StreamSource,
        *,
        epochs: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        level: Level | str = Level.EXACTLY_ONCE_EFFECT,
        ahead: int = 2,
        lease_s: float = 60.0,
    ) -> None:
        """Describe the dataset. Nothing is leased before the first loop.

        All workers must give the same arguments, except for ``ahead``.

        Args:
            name: name of the dataset in the job: letters, digits, dots, dashes, underscores.
            source: its shards, and how they are read; or a stream.
            epochs: number of epochs; None: without an end. A stream has no epochs.
            seed: chooses the order of the shards. A stream keeps its order.
            shuffle: False keeps the order of the dataset.
            level: the guarantee, see :class:`~dlrover_py.protocol.shards.Level`.
            ahead: number of shards to hold at the same time.
            lease_s: least seconds without progress after which a worker loses its shards.

        Raises:
            ConfigError: an argument cannot be used, another loader of this process has the same
                name, or several workers have no agent.
        """
        self._settings = settings = Settings.from_environment()
        if _names.get(name) is not None:
            raise ConfigError(
                f"dataset {name}: expected one ShardLoader of this name in a process, found "
                "another: give each dataset its own name"
            )
        if settings.size > 1 and not settings.shards_socket:
            raise ConfigError(
                f"dataset {name}: {settings.size} workers need the lease queue of a master: start "
                "the script with elastic-run"
            )
        if not 1 <= ahead <= MAX_AHEAD:
            raise ConfigError(f"dataset {name}: ahead: expected 1 to {MAX_AHEAD}, found {ahead}")
        options: dict[str, Any] = {"epochs": epochs, "seed": seed, "shuffle": shuffle}
        options |= {"level": level, "lease_s": lease_s}
        self._spec, self._request = _described(name, settings, source, options)
        self.name = name
        self._source, self._ahead = source, ahead
        path = settings.shards_socket
        self._channel: _Channel = _AgentChannel(path) if path else _OwnQueue(self._spec)
        key = path, settings.round, name
        self._history = _histories.setdefault(key, _History()) if path else _History()
        self._answer = ShardAnswer()
        self._folder: Path | None = None
        """The folder of the ledger on disk."""
        self.refused = 0
        """Samples, or other units of the source, that this worker has committed and that do not
        count, because its lease had ended."""
        self._begin()
        _names[name] = self

    def _begin(self) -> None:
        """Forget what this loader has read and leased."""
        self._joined = False
        self._waiting: dict[int, ShardLease] = {}
        """Leases that are not begun, by token."""
        self._open: dict[int, _OpenLease] = {}
        """Leases that are begun and not completely committed, by token."""
        self._reading: tuple[ShardLease, Iterator[tuple[int, int, Any]]] | None = None
        """The lease that is being read, and the records of it."""
        self._batch: dict[int, list[Run]] = {}
        """What the present batch has of each lease; empty once it is committed."""
        self._returns: list[ShardReturn] = []
        self._writer: ShardLedgerWriter | None = None
        """This worker's file in the ledger, once a loop has begun."""
        self._asked_at = -math.inf
        self.weight = 1.0
        """Weight of the mean loss of the present batch, so that the gradient that DDP averages is
        the mean over the records of all ranks."""

    def keep_ledger(self, folder: str | os.PathLike[str]) -> None:
        """Keep a record of the samples that this worker trains, for ``dlrover data verify``.

        Call this on all workers before the first loop.

        Args:
            folder: a folder that all nodes share. It is created, or has the record of earlier runs.

        Raises:
            ConfigError: the path is an address such as ``s3://…``, or a loop has begun.
        """
        if self._joined:
            raise ConfigError(
                f"dataset {self.name}: expected keep_ledger() before the first loop, found it after"
            )
        self._folder = folder_of(folder)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._history.epoch

    @property
    def over(self) -> bool:
        """Whether all epochs are complete. The first call asks the queue."""
        if not self._joined:
            self._ask(0)
        return self._answer.over

    @property
    def quarantined(self) -> int:
        """Number of shards in quarantine, as far as this worker knows."""
        return self._answer.quarantined

    def batches(
        self, size: int, *, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Any]]:
        """Yield batches until the epoch is over; call :meth:`commit` after each of them.

        A batch is shorter when no more shards are free for the moment. The ranks of a process group
        run the loop in step: each of them gets a batch when one of them does, and it may be empty.

        Args:
            size: greatest number of records of a batch.
            stop: called while no rank has a record, as a stream without news; the loop ends on all
                ranks when it returns True on one of them. Others are needed for its end in between.

        Raises:
            ConfigError: ``size`` is no number from 1, the dataset is another one than before, a
                batch was not committed, or too many shards are in quarantine.
            SupersededError: another round or load has begun. With ``exactly_once_effect``, also if
                shards of this worker were given to others.
            UnreachableError: the agent does not answer.
        """
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"data: expected batches of a number of records from 1, found {size!r}"
            )
        if not self._joined:
            self._ask(0)
        if self._answer.epoch > self._history.epoch:
            self._history.epoch = self._answer.epoch
            self._history.own = {}  # the epoch before is complete
        self._begin_record()
        while True:
            self._check_committed()
            records = self._read(size)
            here = len(records), self._past_epoch(), bool(not records and stop())
            counts, past, stops = zip(*self._gather(here), strict=True)
            if any(counts):
                self.weight = len(records) * len(counts) / sum(counts)
                yield records
            elif all(past) or any(stops):
                return
            else:
                threading.Event().wait(self._answer.retry_s)
                self._ask(self._ahead)

    def commit(self) -> None:
        """Count the present batch as trained. Call it once, after ``optimizer.step()``.

        The queue is asked when a shard is finished, and at least every ``REPORT_S`` seconds.

        Raises:
            DLRoverError: as for :meth:`batches`.
        """
        finished = False
        self._check_goes_on()
        if self._writer is not None:
            self._writer.trained((self._open[token].lease, runs) for token, runs in
                                 self._batch.items())  # fmt: skip
        for token, runs in self._batch.items():
            begun = self._open[token]
            lease = begun.lease
            credited = self._history.credits.setdefault(token, [])
            own = self._history.own.setdefault(lease.partition or lease.position, [])
            first = lease.start if lease.partition else 0
            for start, stop in runs:
                add(credited, start, stop)
                add(own, first + start, first + stop)
            begun.left -= size_of(runs)
            if not begun.left:
                del self._open[token]
                finished = True
        self._batch = {}
        if finished or time.monotonic() - self._asked_at >= REPORT_S:
            self._ask(self._ahead)

    def flush(self) -> None:
        """Report all commits to the queue now, and wait until it has confirmed them.

        Raises:
            DLRoverError: as for :meth:`batches`.
        """
        if self._history.credits:
            self._ask(self._ahead)

    def state_dict(self) -> dict[str, str | int]:
        """Return which shards all workers have finished. All ranks must call it together.

        It waits until the queue has confirmed this worker's credits, so they count for good. If
        that fails on one rank, all ranks raise an error.

        Raises:
            ConfigError: the present batch of a rank is not committed.
            SupersededError: shards of a rank were given to others.
            DLRoverError: as for :meth:`batches`.
        """
        if self._settings.size > 1 and self._group() is None:
            raise ConfigError(
                f"dataset {self.name}: the state has the credits of all {self._settings.size} "
                "workers: call torch.distributed.init_process_group() before"
            )
        mark, error = "", None
        try:
            self._check_committed()
            self.flush()
            mark = self._mark()
        except DLRoverError as found:  # the other ranks wait in the collective below
            error = found
        fault = None if error is None else [isinstance(error, SupersededError), str(error)]
        told = [self._history.epoch, sorted(self._history.own.items()), mark, fault]
        everyone = self._gather(told)
        faults = [(rank, *one[3]) for rank, one in enumerate(everyone) if one[3] is not None]
        if error is not None and (len(faults) == 1 or isinstance(error, SupersededError)):
            raise error
        if faults:
            rank, fatal, why = max(faults, key=lambda one: bool(one[1]))
            raise (SupersededError if fatal else ConfigError)(f"rank {rank}: {why}")
        if any(one[2] != mark for one in everyone):
            raise ConfigError(
                f"dataset {self.name}: expected keep_ledger() on all workers or on none, found it "
                "on some"
            )
        epoch = max(one[0] for one in everyone)
        ledger = self._history.ledger
        if ledger is None or ledger.epoch < epoch:  # it may already be that of the next epoch
            ledger = Ledger(epoch=epoch)
        committed = [item for at, items, *_ in everyone if at == ledger.epoch for item in items]
        merged = _merged(self._spec, ledger, committed)
        self._history.ledger = merged.model_copy(update={"mark": mark})
        self._history.own = {}
        return {
            "dataset": self.name,
            "samples": self._spec.samples,
            "order": self._spec.order,
            "ledger": self._history.ledger.model_dump_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to the credits of a state. Begin a new loop over the batches afterwards.

        Only ``exactly_once_effect`` goes back; the other levels go on where the queue is. All
        ranks must load the same state.

        Raises:
            ConfigError: the state has another form, or belongs to other data. Nothing changes.
        """
        try:
            dataset, text = state["dataset"], state["ledger"]
            samples, order = state["samples"], state["order"]
            ledger = Ledger.model_validate_json(text)
        except (KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f"dataset {self.name}: expected the state of a ShardLoader, found {error}"
            ) from error
        if dataset != self.name:
            raise ConfigError(
                f"dataset {self.name}: expected a state of this dataset, found that of the dataset "
                f"{dataset}: each loader needs its own state, and the name of the checkpoint"
            )
        if samples != self._spec.samples:
            raise ConfigError(
                f"dataset {self.name}: expected {samples} samples, as in the checkpoint, found "
                f"{self._spec.samples}: restore the data, or begin without this state"
            )
        if not self._spec.continues(str(order)):
            raise ConfigError(
                f"dataset {self.name}: expected the files, shards, seed and shuffle of the "
                "checkpoint, found others"
            )
        self._history.roll_back(ledger, self._spec.level)
        self._begin()

    # --- The ledger on disk ---

    def _begin_record(self) -> None:
        """Create this worker's file of this history, if a ledger is kept and there is none yet.

        Raises:
            ConfigError: the folder cannot be written, or belongs to another loader.
        """
        history, settings = self._history, self._settings
        if self._folder is None:
            return
        if self._writer is None:
            here = self._place
            header = ShardLedgerHeader(
                dataset=self.name,
                spec=self._spec,
                run=here.run,
                round=here.round,
                load=here.load,
                states=history.states or 0,
                rank=settings.rank,
                world=settings.size,
                parent=history.origin,
            )
            self._writer = ShardLedgerWriter(self._folder, header)
            history.states = history.states or 0
        self._note(self._answer)

    def _note(self, answer: ShardAnswer) -> None:
        """Note in the ledger how far the queue is. Its credits have been noted before."""
        if self._writer is not None:
            self._writer.passed(answer.watermarks)
            streams = self._spec.range_size is not None
            self._writer.reached(int(answer.over) if streams else answer.epoch)

    @property
    def _place(self) -> LedgerHistory:
        """The name of this history in the ledger."""
        run = self._settings.job if self._settings.shards_socket else ""
        return LedgerHistory(run or self._history.run, self._settings.round, self._history.loads)

    def _mark(self) -> Mark:
        """Note in the ledger that a state is taken, and return its mark; empty without a ledger."""
        history = self._history
        if self._folder is None or history.states is None:
            return "" if self._folder is None else history.origin  # nothing was trained since
        history.states += 1
        if self._writer is not None:
            self._writer.state(history.states)
        return self._place.mark(history.states)

    # --- Reading ---

    def _check_goes_on(self) -> None:
        """Raise SupersededError again once it was raised: no later state may have its samples."""
        if self._history.over:
            raise SupersededError(self._history.over)

    def _check_committed(self) -> None:
        """Raise an error if the present batch is not committed, or the history must not go on.

        Raises:
            ConfigError: the batch is not committed.
            SupersededError: it was raised before.
        """
        self._check_goes_on()
        if self._batch:
            raise ConfigError(
                f"dataset {self.name}: the last batch is not committed: call commit() after "
                "optimizer.step()"
            )

    def _read(self, size: int) -> list[Any]:
        """Read up to ``size`` records of leased shards; ask the queue if there is none."""
        records: list[Any] = []
        while len(records) < size:
            if self._reading is None and not self._open_next(ask=not records):
                break
            assert self._reading is not None
            lease, parts = self._reading
            try:
                start, stop, record = next(parts)
            except StopIteration:
                self._reading = None
                continue
            except ShardUnreadableError as error:
                self._reading = None
                self._give_back(lease, str(error))
                continue
            add(self._batch.setdefault(lease.token, []), start, stop)
            if record is not _NOTHING:
                records.append(record)
        if not records and self._batch:
            self.commit()  # the shards have no record
        return records

    def _open_next(self, *, ask: bool) -> bool:
        """Begin the next lease; return False if there is none."""
        if not self._waiting and ask and not self._past_epoch():
            self._ask(self._ahead)
        if not self._waiting:
            return False
        lease = self._waiting.pop(min(self._waiting))
        self._open[lease.token] = _OpenLease(lease, size_of(lease.todo))
        self._reading = lease, _parts(self._source, lease)
        return True

    def _give_back(self, lease: ShardLease, why: str) -> None:
        """Report a shard that cannot be read; what was read of it still counts."""
        log.warning("dataset %s: shard %d: %s", self.name, lease.shard, why)
        self._returns.append(ShardReturn(token=lease.token, why=why, unreadable=True))

    # --- The queue ---

    def _past_epoch(self) -> bool:
        """Return whether no shard of this epoch is left for this worker."""
        return not self._waiting and (self._answer.over or self._answer.epoch > self._history.epoch)

    def _ask(self, want: int) -> None:
        """Report what was committed, and ask for leases.

        Raises:
            ConfigError: the queue refuses the request.
            SupersededError: another round or load has begun, or leases were lost.
            UnreachableError: the agent does not answer.
        """
        self._check_goes_on()
        history = self._history
        effect = self._spec.level is Level.EXACTLY_ONCE_EFFECT
        if effect and not history.seq and not history.loads and session.resumed():
            log.warning(
                "dataset %s: a checkpoint was loaded without the state of this loader, so epoch 0 "
                "begins again: put the loader into the state if the model trains on its samples",
                self.name,
            )
        self._history.seq += 1
        # A shard whose rest is in the present batch is given back after its commit.
        returns = [one for one in self._returns if one.token not in self._batch]
        begun = sum(1 for token in self._open if self._reading is None
                    or token != self._reading[0].token)  # fmt: skip
        request = self._request.model_copy(
            update={
                "seq": self._history.seq,
                "load": self._history.loads,
                "spec": None if self._joined else self._spec,
                "ledger": None if self._joined else self._history.ledger,
                "epoch": self._history.epoch,
                "credits": [Credit(token=t, ranges=r) for t, r in self._history.credits.items()],
                "returns": returns,
                "progress": True,
                "want": want and min(64, want + begun),
                **(_ends(self._source) if self._answer.poll or not self._joined else {}),
            }
        )
        answer = self._channel.ask(request)
        self._asked_at = time.monotonic()
        for one in returns:
            self._returns.remove(one)
            self._open.pop(one.token, None)
        self._take(request, answer)

    def _take(self, request: ShardRequest, answer: ShardAnswer) -> None:
        """Take in an answer.

        Raises:
            ConfigError: the queue refuses the request.
            SupersededError: another round or load has begun, or leases were lost.
        """
        if answer.code is AnswerCode.REFUSED:
            raise ConfigError(answer.why)
        if answer.code is AnswerCode.SUPERSEDED:
            self._history.over = f"dataset {self.name}: {answer.why}"
        if answer.code is AnswerCode.UNKNOWN:
            self._history.over = (
                f"dataset {self.name}: the master has lost its journal: the script must start again"
            )
        self._check_goes_on()
        self._answer, self._joined, self._history.credits = answer, True, {}
        held = {lease.token: lease for lease in answer.leases}
        if self._writer is not None and request.credits:
            self._writer.confirmed(answer.refused)
        self._note(answer)
        for credit in request.credits:
            if credit.token in answer.refused:
                self.refused += sum(stop - start for start, stop in credit.ranges)
        lost = (self._open.keys() - held.keys()) | set(answer.refused)
        self._waiting = {t: lease for t, lease in held.items() if t not in self._open}
        if lost:
            self._lose(lost)

    def _lose(self, lost: set[int]) -> None:
        """Drop leases that others have now, and warn; what was not reported does not count.

        Args:
            lost: tokens of these leases.

        Raises:
            SupersededError: with ``exactly_once_effect``, the model may have learnt from samples
                that others train as well.
        """
        why = (
            f"dataset {self.name}: {len(lost)} shards of this worker were given to others, because "
            f"it made no progress for {self._answer.lease_s:.0f} s: give ShardLoader a larger "
            "lease_s= if a step, an evaluation or a save takes longer"
        )
        trained = self._batch.keys() & lost or set(self._answer.refused)
        if self._spec.level is Level.EXACTLY_ONCE_EFFECT and trained:
            self._history.over = f"{why}; the script must start again from its checkpoint"
            self._check_goes_on()
        log.warning("%s; samples that it has not reported in time do not count", why)
        if self._reading is not None and self._reading[0].token in lost:
            self._reading = None
        for token in lost:
            self._open.pop(token, None)
            self._batch.pop(token, None)

    # --- Ranks ---

    def _gather(self, value: Any) -> list[Any]:
        """Return the value of each rank of the process group; only the own one without a group."""
        group = self._group()
        if group is None:
            return [value]
        from dlrover_py.trainer.collectives import gather

        return gather(value, group[1])

    def _group(self) -> tuple[int, int] | None:
        """Return rank and size in the process group; None without one, or for a single worker."""
        if self._settings.size == 1 or "torch.distributed" not in sys.modules:
            return None
        from dlrover_py.trainer.collectives import rank_and_world

        return rank_and_world()


def _merged(spec: DatasetSpec, ledger: Ledger, committed: list[Any]) -> Ledger:
    """Return a ledger with the commits of all ranks.

    Args:
        spec: the dataset.
        ledger: the ledger before.
        committed: pairs of a position and its runs; for a stream, of a partition and its runs.
    """
    done = list(ledger.done)
    partial = {position: list(runs) for position, runs in ledger.partial.items()}
    parts = {name: list(runs) for name, runs in ledger.parts.items()}
    table = ShardTable(spec.sizes)
    order = ShardOrder(spec.shards, spec.seed, ledger.epoch, spec.shuffle)
    for key, runs in committed:
        known = parts.setdefault(key, []) if isinstance(key, str) else partial.setdefault(key, [])
        for start, stop in runs:
            add(known, start, stop)
        if isinstance(key, int) and known == [(0, table.place(order.at(key))[1])]:
            del partial[key]
            add(done, key, key + 1)
    if done == [(0, spec.shards)]:  # nothing is left of the epoch
        return Ledger(epoch=ledger.epoch + 1)
    return ledger.model_copy(update={"done": done, "partial": partial, "parts": parts})


def _ends(source: ShardSource | StreamSource) -> dict[str, Any]:
    """Return the fields of a request that say where a stream ends now."""
    if not isinstance(source, StreamSource):
        return {}
    found, ended = source.ends()
    return {"ends": dict(found), "ended": ended}


def _described(
    name: str,
    settings: Settings,
    source: ShardSource | StreamSource,
    fields: Mapping[str, Any],
) -> tuple[DatasetSpec, ShardRequest]:
    """Return a dataset, and a request about it in which only the news are missing.

    Args:
        name: name of the dataset.
        settings: the place of this worker.
        source: its source.
        fields: the other fields of the dataset.

    Raises:
        ConfigError: the name or a field cannot be used.
    """
    if isinstance(source, StreamSource):
        if fields["epochs"] is not None:
            raise ConfigError(
                f"dataset {name}: expected no epochs, as a stream has none, found "
                f"epochs={fields['epochs']}"
            )
        fields = {**fields, "seed": 0, "shuffle": False, "range_size": source.range_size}
    else:
        identity = {"fingerprint": fingerprint_of(source)}
        fields = {**fields, **identity, "sizes": _run_lengths(source.sizes, name)}
    place = settings.local_rank if settings.place is None else settings.place
    try:
        spec = DatasetSpec(**fields)
        request = ShardRequest(dataset=name, round=settings.round, local_rank=place, seq=1)
    except ValidationError as error:
        raise ConfigError(f"dataset {name}: {explain(error)}") from error
    return spec, request


def _run_lengths(sizes: Sequence[tuple[int, int]], name: str) -> list[tuple[int, int]]:
    """Return the sizes of shards, with equal neighbours as one pair.

    Args:
        sizes: pairs of a number of shards in a row and their size.
        name: name of the dataset, for the message.

    Raises:
        ConfigError: there are too many pairs for a message to the master.
    """
    found: list[tuple[int, int]] = []
    for count, size in sizes:
        if found and found[-1][1] == size:
            found[-1] = found[-1][0] + count, size
        else:
            found.append((count, size))
    if len(found) > MAX_SIZES:
        raise ConfigError(
            f"dataset {name}: the size of its shards changes {len(found)} times from one to the "
            f"next, expected at most {MAX_SIZES} times: write files or row groups of equal size, "
            "cut them into shards that are larger than most of them, or use fewer"
        )
    return found


def _parts(source: ShardSource | StreamSource, lease: ShardLease) -> Iterator[tuple[int, int, Any]]:
    """Yield the parts of a lease: first unit, the unit after the last one, and the record.

    Units count from the start of the shard, or of a stream's range. A rest in which no record
    begins is a part with ``_NOTHING``. This is no method, because a loader must not refer to
    itself: its name is free once it is gone.

    Raises:
        ShardUnreadableError: the source cannot read the shard.
    """
    stream = isinstance(source, StreamSource)
    shift = lease.start if stream else 0
    for start, stop in lease.todo:
        at = start
        name = lease.partition if stream else lease.shard
        for record, end in source.read(name, shift + start, shift + stop):  # type: ignore[arg-type]
            yield at, end - shift, record
            at = end - shift
        if at < stop:
            yield at, stop, _NOTHING
