"""The lease queue of one dataset: which worker trains which shard, and what is credited.

A shard is a range of samples. It waits, is leased to one worker, and is done when all its samples
are credited. A lease ends early when its worker dies, gives it back, or makes no progress until a
deadline. The samples that are not credited are then leased again, before any new shard, and under a
higher token. A report under the old token is refused. So each sample is credited once per epoch.

The queue reads no clock and does no I/O. :class:`QueueRecord` is what must outlive the process:
while :attr:`ShardQueue.changed` is True, it must be stored before an answer is sent.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from dlrover_py.protocol.agents import HeldLease
from dlrover_py.protocol.runs import Run, size
from dlrover_py.protocol.shards import (
    AnswerCode,
    DatasetSpec,
    Ledger,
    Level,
    ShardAnswer,
    ShardLease,
    ShardRequest,
)
from dlrover_py.shards.epochs import EpochShards, Place
from dlrover_py.shards.records import QuarantinedShard, QueueRecord, ShardFailures
from dlrover_py.shards.streams import StreamRanges, watermarks

MAX_OPEN = 1024
"""Most shards that are leased or returned at the same time. It bounds the size of the record."""
MAX_QUARANTINED = 64
"""Shards in quarantine at which the dataset is refused: something else is wrong."""
MAX_FAILURES = 256
"""Most shards whose failures are remembered; the oldest are forgotten first."""
MAX_WHY = 120
"""Greatest length of the reason of a quarantine, in characters."""
TOKENS = 4096
"""Tokens that are reserved at once. The tokens of a lost process are thus not used again."""
DURATIONS = 200
"""Number of newest shards from whose durations the deadline is learned."""
RETRY_S = 0.1
"""Seconds after which a worker without a lease asks again, for up to ``RETRY_WORKERS`` workers."""
RETRY_WORKERS = 50
POLL_S = 1.0
"""Least seconds between two looks of workers at the source of a stream."""


class _Supply(Protocol):
    """What may be leased: positions, each of which stands for a shard or a range of a stream.

    See :class:`~dlrover_py.shards.epochs.EpochShards` for what each method does.
    """

    @property
    def over(self) -> bool: ...
    @property
    def limit(self) -> int | None: ...
    def begin(self, ledger: Ledger) -> None: ...
    def fault(self, ledger: Ledger) -> str: ...
    def end_if_complete(self) -> bool: ...
    def take(self) -> int | None: ...
    def left(self, most: int) -> int: ...
    def place(self, position: int) -> Place: ...
    def is_open(self, position: int) -> bool: ...
    def todo(self, position: int, length: int) -> list[Run]: ...
    def credit(self, position: int, start: int, stop: int) -> None: ...
    def finish(self, position: int) -> None: ...
    def skip(self, position: int) -> None: ...


@dataclass(slots=True)
class _Lease:
    """A shard that a worker holds."""

    worker: str
    position: int
    place: Place
    since: float
    """When it was leased."""


@dataclass(slots=True)
class _Worker:
    """A worker of this history."""

    seq: int = 0
    """Number of its newest request."""
    tokens: list[int] = field(default_factory=list)
    """Its leases, the oldest first: it trains that one."""
    deadline: float = math.inf
    """Time at which it loses its leases without progress."""
    finished_at: float = -math.inf
    """When it finished its last shard."""
    late: ShardFailures | None = None
    """The failures of a shard among which its passed deadline counts; None once it is heard."""


class ShardQueue:
    """The queue of one dataset.

    Workers are known by names, which the caller chooses. A name stands for one process.
    """

    def __init__(self, record: QueueRecord) -> None:
        """Continue from a record. Nothing is leased yet.

        Args:
            record: What an earlier process has left, or a record with nothing but a spec. The queue
                changes it in place.
        """
        self.record = record
        self.changed = False
        """Whether the record must be stored before the next answer; the caller resets it."""
        self.changed_later = False
        """Whether the record has changed in a way whose loss does no harm for a few seconds."""
        self.notes: list[str] = []
        """Shards that went to quarantine, in words; the caller empties the list."""
        self._leases: dict[int, _Lease] = {}
        self._leased: dict[int, int] = {}
        """Token of the lease of each position that has one."""
        self._workers: dict[str, _Worker] = {}
        self._durations: deque[float] = deque(maxlen=DURATIONS)
        self._next_token = record.reserved
        self._look_at = math.inf
        """No deadline passes before this time."""
        self._poll_at = -math.inf
        """When a worker should look at the source of a stream again."""
        self._returned: list[int] = []
        """Positions that must be leased again, before others: a heap."""
        streams = record.spec.range_size is not None
        self._stream = StreamRanges(record, self._leased) if streams else None
        self._supply: _Supply = self._stream or EpochShards(record, self._leased)

    # --- What the caller tells ---

    def take(self, worker: str, request: ShardRequest, now: float) -> ShardAnswer:
        """Take in a request, and return the answer.

        Args:
            worker: Name of the worker.
            request: The request; its spec must be the one of this queue.
            now: Monotonic time.
        """
        record = self.record
        history = (request.round, request.load)
        if history < record.history:
            round_number, load = record.history
            why = f"load {load} of round {round_number} has replaced load {request.load} of round "
            return self._answer(request, AnswerCode.SUPERSEDED, f"{why}{request.round}")
        if history > record.history:
            if request.ledger is not None and (fault := self._supply.fault(request.ledger)):
                why = f"dataset {request.dataset}: the loaded ledger cannot be used: {fault}"
                return self._answer(request, AnswerCode.REFUSED, why)
            self._begin(history, request.ledger)
        if refusal := self._refusal(request):
            return self._answer(request, AnswerCode.REFUSED, refusal)
        if request.spec is not None and request.spec.fingerprint and not record.spec.fingerprint:
            # A script that was given a fingerprint goes on, and holds to it from now on.
            record.spec, self.changed = request.spec, True
        known = self._workers.setdefault(worker, _Worker())
        if request.seq < known.seq:
            return self._listed(worker, known, request, now)
        if request.seq > known.seq:
            self._forgive(known)
        known.seq = request.seq
        if self._stream is not None and (request.ends or request.ended):
            self.changed |= self._stream.extend(request.ends, ended=request.ended)
        news = bool(request.credits or request.returns)
        if news and request.seq > record.applied.get(worker, 0):
            self._apply(worker, known, request, now)
        elif news:
            # Its agent may have told a new process of leases that this request had returned.
            for one in request.returns:
                if one.token in known.tokens:
                    self._give_back(known, one.token, "")
        if news or request.progress or not known.tokens:
            self._renew(known, now)
        # A worker whose credits were refused may have to end: it asks again if it goes on.
        if request.epoch == record.epoch and not self._refused(worker, request):
            self._lease(worker, known, request.want, now)
        return self._listed(worker, known, request, now)

    def drop(self, worker: str, *, blame: str = "") -> None:
        """End the leases of a worker, which is gone or has lost them.

        Args:
            worker: Name of the worker.
            blame: Why the shard that it trained may be the cause, in words. Empty: it is not, as
                after a preemption.
        """
        known = self._workers.get(worker)
        if known is None:
            return
        for index, token in enumerate(list(known.tokens)):
            self._give_back(known, token, blame if index == 0 else "")

    def fail(self, worker: str, why: str) -> None:
        """End the leases of a worker that has failed; the shard that it trained is blamed.

        A failure counts once, also if a new process of the queue hears of it again.

        Args:
            worker: Name of the worker.
            why: How it has failed, in words.
        """
        known, failed = self._workers.get(worker), self.record.failed
        counts = known is not None and known.tokens and worker not in failed
        if counts:
            failed.append(worker)
        self.drop(worker, blame=why if counts else "")

    def forget_workers(self) -> None:
        """End all leases, because all workers of the history are gone; no shard is to blame."""
        for worker in list(self._workers):
            self.drop(worker)
        self._workers.clear()

    def adopt(self, worker: str, lease: HeldLease, now: float) -> None:
        """Continue a lease of an earlier process of the queue; ignore one that does not count.

        All leases must be continued before the first request is taken in: a worker whose lease had
        expired may report it as well, and the higher token wins.

        A lease does not count if its epoch is over, its shard is finished, in quarantine or leased
        again, or its token is not one that was given.

        Args:
            worker: Name of the worker that holds it.
            lease: The lease.
            now: Monotonic time.
        """
        position = lease.position
        if (
            lease.epoch != self.record.epoch
            or lease.token in self._leases
            or lease.token >= self.record.reserved
            or not self._supply.is_open(position)
        ):
            return
        other = self._leased.get(position)
        if other is not None:
            if other > lease.token:
                return
            self._release(self._workers[self._leases[other].worker], other)
        if self._supply.place(position).shard in self.record.quarantined:
            return
        if position in self._returned:
            self._returned.remove(position)
            heapq.heapify(self._returned)
        self._hold(worker, self._workers.setdefault(worker, _Worker()), lease.token, position, now)
        self._renew(self._workers[worker], now)

    def expire(self, now: float) -> float:
        """End the leases of workers whose deadline has passed.

        The shard that such a worker trained is blamed, and may go to quarantine. It is not blamed
        if no other worker goes on: then all have a long step, or wait for one of them. The blame is
        taken back when the worker is heard again, because it was slow and not stuck.

        Args:
            now: Monotonic time.

        Returns:
            The time until which no further deadline passes.
        """
        if now < self._look_at:
            return self._look_at
        self._look_at = math.inf
        others = any(one.deadline > now + self.lease_s / 2 for one in self._workers.values())
        for name, worker in self._workers.items():
            if not worker.tokens:
                continue
            if worker.deadline <= now:
                shard = self._leases[worker.tokens[0]].place.shard
                blame = f"worker {name} made no progress for {self.lease_s:.0f} s"
                self.drop(name, blame=blame if others else "")
                worker.late = self.record.failures.get(shard) if others else None
            else:
                self._look_at = min(self._look_at, worker.deadline)
        return self._look_at

    def stalled(self, seconds: float) -> None:
        """Move all deadlines, because nobody could be heard for some seconds."""
        for worker in self._workers.values():
            worker.deadline += seconds
        self._look_at += seconds

    # --- What the caller may ask ---

    @property
    def lease_s(self) -> float:
        """Seconds without progress after which a worker loses its leases."""
        return max(self.record.spec.lease_s, 3 * self.record.shard_s)

    @property
    def over(self) -> bool:
        """Whether all epochs are complete; for a stream, whether all of it is, up to its end."""
        return self._supply.over

    @property
    def workers(self) -> list[str]:
        """Names of the workers that hold leases."""
        return [name for name, worker in self._workers.items() if worker.tokens]

    # --- Histories and epochs ---

    def _begin(self, history: tuple[int, int], ledger: Ledger | None) -> None:
        """Begin a history: all leases of earlier ones are void.

        For ``exactly_once_effect`` the credits are those of the ledger, and none without one: the
        model has forgotten all others. For other levels they stay.
        """
        record = self.record
        self.forget_workers()
        record.history = history
        record.applied.clear()
        record.refused.clear()
        record.failed.clear()
        if record.spec.level is Level.EXACTLY_ONCE_EFFECT:
            self._returned = []
            self._supply.begin(ledger or Ledger(epoch=0))
        self.changed = True

    def _end_epoch_if_complete(self) -> None:
        """Begin the next epoch if each shard is finished or in quarantine."""
        if not self._leases and not self._returned:
            self.changed |= self._supply.end_if_complete()

    # --- Leases ---

    def _lease(self, worker: str, known: _Worker, want: int, now: float) -> None:
        """Lease shards to a worker until it holds as many as it wants, as far as there are any.

        Near the end of an epoch it gets one at a time: another worker may be faster.
        """
        enough = 2 * len(self._workers) + 1
        if self._supply.left(enough) + len(self._returned) < enough:
            want = min(want, 1)
        while len(known.tokens) < want and not self.over:
            if self._returned:
                position = heapq.heappop(self._returned)
            elif len(self._leases) >= MAX_OPEN or (found := self._supply.take()) is None:
                break
            else:
                position = found
            token = self._next_token
            self._next_token += 1
            if token >= self.record.reserved:
                self.record.reserved = token + TOKENS
                self.changed = True
            self._hold(worker, known, token, position, now)
            self._look_at = min(self._look_at, known.deadline)
        if not known.tokens:
            self._end_epoch_if_complete()

    def _hold(self, name: str, worker: _Worker, token: int, position: int, now: float) -> None:
        """Note a lease."""
        self._leases[token] = _Lease(name, position, self._supply.place(position), now)
        self._leased[position] = token
        worker.tokens.append(token)

    def _release(self, worker: _Worker, token: int) -> _Lease:
        """Forget a lease, and return it."""
        worker.tokens.remove(token)
        lease = self._leases.pop(token)
        del self._leased[lease.position]
        return lease

    def _give_back(
        self, worker: _Worker, token: int, blame: str, *, unreadable: bool = False
    ) -> None:
        """End a lease whose shard is not finished.

        Args:
            worker: The worker that holds it.
            token: Its token.
            blame: Why the shard may be to blame, in words; empty if it is not.
            unreadable: Whether the shard goes to quarantine immediately.
        """
        lease = self._release(worker, token)
        if blame:
            self._blame(lease, blame, unreadable=unreadable)
        if lease.place.shard not in self.record.quarantined:
            heapq.heappush(self._returned, lease.position)

    def _blame(self, lease: _Lease, why: str, *, unreadable: bool) -> None:
        """Count a failure with a shard, and put it into quarantine if there were too many."""
        record, place = self.record, lease.place
        self.changed = True
        found = record.failures.pop(place.shard, None) or ShardFailures(0, "")
        found.count, found.why = found.count + 1, why[:MAX_WHY]
        if not unreadable and found.count < record.spec.failures:
            record.failures[place.shard] = found
            while len(record.failures) > MAX_FAILURES:
                del record.failures[next(iter(record.failures))]
            return
        missed = self._supply.todo(lease.position, place.size)
        record.quarantined[place.shard] = QuarantinedShard(record.epoch, found.why, missed)
        self._supply.skip(lease.position)
        last = place.start + place.size - 1
        if place.partition:
            self.notes.append(
                f"units {place.start} to {last} of partition {place.partition} are in quarantine, "
                f"and {size(missed)} of them are not trained: {found.why}"
            )
        else:
            self.notes.append(
                f"shard {place.shard} (samples {place.start} to {last}) is in quarantine: "
                f"{size(missed)} of its samples are not trained in epoch {record.epoch}, and none "
                f"in later ones: {found.why}"
            )

    def _forgive(self, worker: _Worker) -> None:
        """Take back the failure as which the passed deadline of a worker was counted."""
        failures = self.record.failures
        for shard, found in failures.items() if worker.late is not None else ():
            if found is worker.late:  # else the shard was finished since, or is in quarantine
                found.count -= 1
                if not found.count:
                    del failures[shard]
                self.changed = True
                break
        worker.late = None

    # --- Requests ---

    def _refusal(self, request: ShardRequest) -> str:
        """Return why the user must act, in words; empty if the request can be taken in."""
        record = self.record
        spec = request.spec
        if spec is not None and (words := different(request.dataset, record.spec, spec)):
            return words
        limit = self._supply.limit
        if len(record.quarantined) >= min(MAX_QUARANTINED, limit or MAX_QUARANTINED):
            shard, found = next(reversed(record.quarantined.items()))
            of = f"of {limit} shards" if limit is not None else "ranges"
            return (
                f"dataset {request.dataset}: {len(record.quarantined)} {of} are in quarantine, the "
                f"last one is shard {shard}: {found.why}"
            )
        for credit in request.credits:
            lease = self._leases.get(credit.token)
            if lease is not None and not all(a < b <= lease.place.size for a, b in credit.ranges):
                return (
                    f"dataset {request.dataset}: expected samples 0 to {lease.place.size} of shard "
                    f"{lease.place.shard}, found {credit.ranges[0]}"
                )
        if self._stream is not None and (fault := self._stream.refusal(request.ends)):
            return f"dataset {request.dataset}: {fault}"
        return ""

    def _apply(self, name: str, worker: _Worker, request: ShardRequest, now: float) -> None:
        """Take in the credits and returns of a request. Those under a void token are refused."""
        record = self.record
        refused = []
        for credit in request.credits:
            lease = self._leases.get(credit.token)
            if lease is None or lease.worker != name:
                refused.append(credit.token)
                continue
            for start, stop in credit.ranges:
                self._supply.credit(lease.position, start, stop)
            if not self._supply.todo(lease.position, lease.place.size):
                self._finish(worker, credit.token, now)
        for one in request.returns:
            lease = self._leases.get(one.token)
            if lease is not None and lease.worker == name:
                blame = one.why or "no reason was given"
                self._give_back(
                    worker,
                    one.token,
                    blame if one.fault or one.unreadable else "",
                    unreadable=one.unreadable,
                )
        record.applied[name] = request.seq
        record.refused.pop(name, None)
        if refused:
            record.refused[name] = refused
        self.changed_later = True
        self.changed |= record.spec.level is not Level.AT_LEAST_ONCE
        self._end_epoch_if_complete()

    def _refused(self, name: str, request: ShardRequest) -> list[int]:
        """Return the tokens of a worker's request whose credits were refused."""
        if request.seq != self.record.applied.get(name):
            return []
        return self.record.refused.get(name, [])

    def _finish(self, worker: _Worker, token: int, now: float) -> None:
        """Note that all samples of a shard are credited."""
        lease = self._release(worker, token)
        record = self.record
        record.failures.pop(lease.place.shard, None)
        self._supply.finish(lease.position)
        self._durations.append(now - max(lease.since, worker.finished_at))
        worker.finished_at = now
        if len(self._durations) <= 16 or not lease.position % 16:
            slowest = sorted(self._durations)
            record.shard_s = round(slowest[(99 * len(slowest)) // 100], 3)

    def _renew(self, worker: _Worker, now: float) -> None:
        """Give a worker a new deadline."""
        worker.deadline = now + self.lease_s
        self._look_at = min(self._look_at, worker.deadline)

    # --- Answers ---

    def _listed(self, name: str, worker: _Worker, request: ShardRequest, now: float) -> ShardAnswer:
        """Return the answer with all leases of a worker.

        Args:
            name: Name of the worker.
            worker: The worker.
            request: Its request.
            now: Monotonic time.
        """
        record = self.record
        leases = []
        for token in worker.tokens:
            lease = self._leases[token]
            place = lease.place
            leases.append(
                ShardLease(
                    token=token,
                    position=lease.position,
                    epoch=record.epoch,
                    shard=place.shard,
                    partition=place.partition,
                    start=place.start,
                    size=place.size,
                    todo=self._supply.todo(lease.position, place.size),
                )
            )
        poll = self._stream is not None and not record.stream.ended and now >= self._poll_at
        if poll:
            self._poll_at = now + POLL_S
        told = self._stream is not None and (request.ends or request.ended or self.over)
        return ShardAnswer(
            seq=request.seq,
            epoch=record.epoch,
            over=self.over,
            leases=leases,
            refused=self._refused(name, request),
            retry_s=RETRY_S * max(1.0, len(self._workers) / RETRY_WORKERS),
            lease_s=self.lease_s,
            quarantined=len(record.quarantined),
            poll=poll,
            watermarks=watermarks(record.stream) if told else {},
        )

    def _answer(self, request: ShardRequest, code: AnswerCode, why: str) -> ShardAnswer:
        """Return an answer without leases."""
        epoch = self.record.epoch
        return ShardAnswer(code=code, why=why, seq=request.seq, epoch=epoch)


def different(name: str, known: DatasetSpec, found: DatasetSpec) -> str:
    """Return, in words, how two specs of one dataset differ; empty if they are equal.

    A fingerprint that is unknown in one of them is not compared.

    Args:
        name: Name of the dataset.
        known: The spec that is in use.
        found: The other one.
    """
    if known.samples != found.samples:
        return (
            f"dataset {name}: expected {known.samples} samples, as at its first use, found "
            f"{found.samples}: restore the data, or give the new dataset another name"
        )
    names = [key for key in DatasetSpec.model_fields if getattr(known, key) != getattr(found, key)]
    if not (known.fingerprint and found.fingerprint) and "fingerprint" in names:
        names.remove("fingerprint")
    if not names:
        return ""
    if names == ["fingerprint"]:
        return (
            f"dataset {name}: expected the data of its first use, found other names, sizes or "
            "another order of its files, or another fingerprint of the source: give all workers "
            "the same files in the same order (sort the list of a folder), or use another name"
        )
    return (
        f"dataset {name}: expected the arguments of its first use, found another "
        f"{' and '.join(names)}: use the same ones on all workers and in all runs, or another name"
    )
