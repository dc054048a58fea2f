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

from pydantic import ConfigDict, Field
from pydantic import dataclasses as records

from dlrover_py.protocol.agents import Count, HeldLease
from dlrover_py.protocol.runs import Runs, add, first_missing, missing, size
from dlrover_py.protocol.shards import (
    AnswerCode,
    DatasetSpec,
    Ledger,
    Level,
    ShardAnswer,
    ShardLease,
    ShardRequest,
)
from dlrover_py.shards.order import ShardOrder, ShardTable

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


@records.dataclass(slots=True, config=ConfigDict(extra="ignore"))
class ShardFailures:
    """The failures of workers with one shard."""

    count: Count
    why: str
    """The newest one, in words."""


@records.dataclass(slots=True, config=ConfigDict(extra="ignore"))
class QuarantinedShard:
    """A shard that is not leased any more."""

    epoch: Count
    """The epoch in which that was decided."""
    why: str
    """The reason, in words."""
    missed: Runs
    """Its samples that were not credited in that epoch. Later epochs miss all its samples."""


@records.dataclass(slots=True, kw_only=True, config=ConfigDict(extra="ignore"))
class QueueRecord:
    """All that must outlive the process of a queue. Positions are those in the epoch's order."""

    spec: DatasetSpec
    history: tuple[Count, Count] = (0, 0)
    """The newest round and load of a worker."""
    epoch: Count = 0
    done: Runs = Field(default_factory=list)
    """Positions of the finished shards."""
    partial: dict[Count, Runs] = Field(default_factory=dict)
    """Credited samples of shards that are not finished, by position."""
    skipped: Runs = Field(default_factory=list)
    """Positions of shards in quarantine that were reached in this epoch."""
    quarantined: dict[Count, QuarantinedShard] = Field(default_factory=dict)
    """The quarantine, by shard."""
    failures: dict[Count, ShardFailures] = Field(default_factory=dict)
    """Failures with shards that are not in quarantine, by shard."""
    reserved: Count = 1
    """The first token that no process has used."""
    applied: dict[str, Count] = Field(default_factory=dict)
    """Number of each worker's newest request whose credits and returns were taken in."""
    refused: dict[str, list[Count]] = Field(default_factory=dict)
    """Tokens that were refused in that request, where there are any."""
    shard_s: float = 0.0
    """99th percentile of the seconds that shards took; 0 before the first one."""


@dataclass(slots=True)
class _Lease:
    """A shard that a worker holds."""

    worker: str
    position: int
    shard: int
    size: int
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
        spec = record.spec
        self._table = ShardTable(spec.sizes)
        self._shards = spec.shards
        self._leases: dict[int, _Lease] = {}
        self._leased: dict[int, int] = {}
        """Token of the lease of each position that has one."""
        self._workers: dict[str, _Worker] = {}
        self._durations: deque[float] = deque(maxlen=DURATIONS)
        self._next_token = record.reserved
        self._look_at = math.inf
        """No deadline passes before this time."""
        self._restart_order()

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
            if request.ledger is not None and (fault := self._ledger_fault(request.ledger)):
                why = f"dataset {request.dataset}: the loaded ledger cannot be used: {fault}"
                return self._answer(request, AnswerCode.REFUSED, why)
            self._begin(history, request.ledger)
        if refusal := self._refusal(request):
            return self._answer(request, AnswerCode.REFUSED, refusal)
        known = self._workers.setdefault(worker, _Worker())
        if request.seq < known.seq:
            return self._listed(worker, known, request)
        known.seq = request.seq
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
        if request.epoch == record.epoch:
            self._lease(worker, known, request.want, now)
        return self._listed(worker, known, request)

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
            or position >= self._shards
            or first_missing(self.record.done, position) != position
        ):
            return
        other = self._leased.get(position)
        if other is not None:
            if other > lease.token:
                return
            self._release(self._workers[self._leases[other].worker], other)
        shard = self._order.at(position)
        if shard in self.record.quarantined:
            return
        if position in self._returned:
            self._returned.remove(position)
            heapq.heapify(self._returned)
        self._hold(worker, self._workers.setdefault(worker, _Worker()), lease.token, position, now)
        self._renew(self._workers[worker], now)

    def expire(self, now: float) -> float:
        """End the leases of workers whose deadline has passed.

        Args:
            now: Monotonic time.

        Returns:
            The time until which no further deadline passes.
        """
        if now < self._look_at:
            return self._look_at
        self._look_at = math.inf
        for name, worker in self._workers.items():
            if not worker.tokens:
                continue
            if worker.deadline <= now:
                self.drop(name, blame=f"worker {name} made no progress for {self.lease_s:.0f} s")
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
        """Whether all epochs are complete."""
        epochs = self.record.spec.epochs
        return epochs is not None and self.record.epoch >= epochs

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
        if record.spec.level is Level.EXACTLY_ONCE_EFFECT:
            ledger = ledger or Ledger(epoch=0)
            record.epoch = ledger.epoch
            record.done = list(ledger.done)
            record.partial = {position: list(runs) for position, runs in ledger.partial.items()}
            record.skipped = []
            self._restart_order()
        self.changed = True

    def _ledger_fault(self, ledger: Ledger) -> str:
        """Return why a ledger is not one of this dataset, in words; empty if it is one."""
        done, partial, epochs = ledger.done, ledger.partial, self.record.spec.epochs
        if epochs is not None and ledger.epoch > epochs:
            return f"expected an epoch up to {epochs}, found {ledger.epoch}"
        last = max([0, *(stop for _, stop in done[-1:]), *(position + 1 for position in partial)])
        if last > self._shards:
            return f"expected {self._shards} shards, found {last}"
        order = ShardOrder(
            self._shards, self.record.spec.seed, ledger.epoch, self.record.spec.shuffle
        )
        for position, runs in partial.items():
            _, each = self._table.place(order.at(position))
            if first_missing(done, position) != position or not 0 < size(runs) < each:
                return f"position {position} is finished, or has more than its {each} samples"
            if runs[-1][1] > each:
                return f"expected {each} samples at position {position}, found {runs[-1][1]}"
        return ""

    def _restart_order(self) -> None:
        """Look for shards from the first position on; the gaps before others come first."""
        spec = self.record.spec
        self._order = ShardOrder(self._shards, spec.seed, self.record.epoch, spec.shuffle)
        self._cursor = 0
        self._returned: list[int] = []
        """Positions before the cursor that must be leased again: a heap."""

    def _end_epoch_if_complete(self) -> None:
        """Begin the next epoch if each shard is finished or in quarantine."""
        record = self.record
        if self._leases or self._returned or self.over or self._next_position() is not None:
            return
        if size(record.skipped) == self._shards:
            return  # no shard can be trained: the epochs must not rush by
        record.epoch += 1
        record.done, record.partial, record.skipped = [], {}, []
        self._restart_order()
        self.changed = True

    # --- Leases ---

    def _next_position(self) -> int | None:
        """Return the next position from the cursor on that can be leased; None if there is none.

        The cursor moves to it. Shards in quarantine are skipped.
        """
        record = self.record
        while self._cursor < self._shards:
            position = first_missing(record.skipped, first_missing(record.done, self._cursor))
            if position != self._cursor:
                self._cursor = position
            elif position in self._leased:
                self._cursor += 1
            elif record.quarantined and self._order.at(position) in record.quarantined:
                add(record.skipped, position, position + 1)
            else:
                return position
        return None

    def _lease(self, worker: str, known: _Worker, want: int, now: float) -> None:
        """Lease shards to a worker until it holds as many as it wants, as far as there are any.

        Near the end of an epoch it gets one at a time: another worker may be faster.
        """
        left = self._shards - self._cursor + len(self._returned)
        if left <= 2 * len(self._workers):
            want = min(want, 1)
        while len(known.tokens) < want and not self.over:
            if self._returned:
                position = heapq.heappop(self._returned)
            elif len(self._leases) >= MAX_OPEN or (found := self._next_position()) is None:
                break
            else:
                position = found
                self._cursor += 1
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
        shard = self._order.at(position)
        _, shard_size = self._table.place(shard)
        self._leases[token] = _Lease(name, position, shard, shard_size, now)
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
        if lease.shard not in self.record.quarantined:
            heapq.heappush(self._returned, lease.position)

    def _blame(self, lease: _Lease, why: str, *, unreadable: bool) -> None:
        """Count a failure with a shard, and put it into quarantine if there were too many."""
        record = self.record
        self.changed = True
        found = record.failures.pop(lease.shard, None) or ShardFailures(0, "")
        found.count, found.why = found.count + 1, why[:MAX_WHY]
        if not unreadable and found.count < record.spec.failures:
            record.failures[lease.shard] = found
            while len(record.failures) > MAX_FAILURES:
                del record.failures[next(iter(record.failures))]
            return
        missed = missing(record.partial.get(lease.position, []), 0, lease.size)
        record.quarantined[lease.shard] = QuarantinedShard(record.epoch, found.why, missed)
        add(record.skipped, lease.position, lease.position + 1)
        start, _ = self._table.place(lease.shard)
        self.notes.append(
            f"shard {lease.shard} (samples {start} to {start + lease.size - 1}) is in quarantine: "
            f"{size(missed)} of its samples are not trained in epoch {record.epoch}, and none in "
            f"later ones: {found.why}"
        )

    # --- Requests ---

    def _refusal(self, request: ShardRequest) -> str:
        """Return why the user must act, in words; empty if the request can be taken in."""
        record = self.record
        if request.spec is not None and request.spec != record.spec:
            return different(request.dataset, record.spec, request.spec)
        if len(record.quarantined) >= min(MAX_QUARANTINED, self._shards):
            shard, found = next(reversed(record.quarantined.items()))
            return (
                f"dataset {request.dataset}: {len(record.quarantined)} of {self._shards} shards "
                f"are in quarantine, the last one is shard {shard}: {found.why}"
            )
        for credit in request.credits:
            lease = self._leases.get(credit.token)
            if lease is not None and not all(a < b <= lease.size for a, b in credit.ranges):
                return (
                    f"dataset {request.dataset}: expected samples 0 to {lease.size} of shard "
                    f"{lease.shard}, found {credit.ranges[0]}"
                )
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
            runs = record.partial.setdefault(lease.position, [])
            for start, stop in credit.ranges:
                add(runs, start, stop)
            if runs == [(0, lease.size)]:
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

    def _finish(self, worker: _Worker, token: int, now: float) -> None:
        """Note that all samples of a shard are credited."""
        lease = self._release(worker, token)
        record = self.record
        del record.partial[lease.position]
        record.failures.pop(lease.shard, None)
        add(record.done, lease.position, lease.position + 1)
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

    def _listed(self, name: str, worker: _Worker, request: ShardRequest) -> ShardAnswer:
        """Return the answer with all leases of a worker."""
        record = self.record
        leases = []
        for token in worker.tokens:
            lease = self._leases[token]
            start, _ = self._table.place(lease.shard)
            leases.append(
                ShardLease(
                    token=token,
                    position=lease.position,
                    epoch=record.epoch,
                    shard=lease.shard,
                    start=start,
                    size=lease.size,
                    todo=missing(record.partial.get(lease.position, []), 0, lease.size),
                )
            )
        refused: list[int] = []
        if request.seq == record.applied.get(name):
            refused = record.refused.get(name, [])
        return ShardAnswer(
            seq=request.seq,
            epoch=record.epoch,
            over=self.over,
            leases=leases,
            refused=refused,
            retry_s=RETRY_S * max(1.0, len(self._workers) / RETRY_WORKERS),
            lease_s=self.lease_s,
            quarantined=len(record.quarantined),
        )

    def _answer(self, request: ShardRequest, code: AnswerCode, why: str) -> ShardAnswer:
        """Return an answer without leases."""
        epoch = self.record.epoch
        return ShardAnswer(code=code, why=why, seq=request.seq, epoch=epoch)


def different(name: str, known: DatasetSpec, found: DatasetSpec) -> str:
    """Return, in words, how two specs of one dataset differ.

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
    return (
        f"dataset {name}: expected the arguments of its first use, found another "
        f"{' and '.join(names)}: use the same ones on all workers and in all runs, or another name"
    )
