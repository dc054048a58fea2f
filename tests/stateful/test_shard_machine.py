"""Each sample of an epoch is credited once, whatever happens to workers, answers and the queue.

A queue of few shards, and workers whose requests are lost, repeated or come late, that die, stand
still, go back to a checkpoint, or see a new master. The model below knows nothing of the queue's
record: it keeps each credit that an answer has confirmed, and which lease may give one.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import TypeAdapter

from dlrover_py.protocol.agents import HeldLease
from dlrover_py.protocol.runs import add, lengths
from dlrover_py.protocol.shards import (
    AnswerCode,
    Credit,
    DatasetSpec,
    Ledger,
    Level,
    ShardAnswer,
    ShardLease,
    ShardRequest,
    ShardReturn,
)
from dlrover_py.shards.order import ShardOrder
from dlrover_py.shards.queue import ShardQueue
from dlrover_py.shards.records import QueueRecord

RECORD = TypeAdapter(QueueRecord)
WORKERS = ("a", "b", "c")
LEASE_S = 60.0
Sample = tuple[int, int]
"""An epoch and a sample of the dataset."""


@dataclass
class Worker:
    """A process that trains, and what it knows."""

    name: str
    history: tuple[int, int]
    seq: int = 0
    epoch: int = 0
    joined: bool = False
    leases: dict[int, ShardLease] = field(default_factory=dict)
    unanswered: ShardRequest | None = None
    old: list[ShardRequest] = field(default_factory=list)
    """Requests that the network may deliver again."""
    reported_at: float = 0.0
    """When it last reported progress or got its first lease."""


@dataclass
class Saved:
    """A checkpoint: the ledger, and what the model of the test says is credited in it."""

    ledger: Ledger
    credited: set[Sample]
    epoch: int


class ShardMachine(RuleBasedStateMachine):
    """The queue, its workers, and the network between them."""

    @initialize(
        sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3),
        shuffle=st.booleans(),
        epochs=st.sampled_from([None, 1, 3]),
        level=st.sampled_from([Level.EXACTLY_ONCE_EFFECT, Level.EXACTLY_ONCE_ACCOUNTING]),
        failures=st.integers(1, 4),
    )
    def begin(self, sizes: Any, shuffle: bool, epochs: int | None, level: Level,
              failures: int) -> None:  # fmt: skip
        self.spec = DatasetSpec(
            sizes=sizes, seed=7, shuffle=shuffle, epochs=epochs, level=level,
            failures=failures, lease_s=LEASE_S,
        )  # fmt: skip
        self.now = 0.0
        self.history = (1, 0)
        self.queue = ShardQueue(QueueRecord(spec=self.spec))
        self.stored = RECORD.dump_json(self.queue.record)
        self.workers = {name: Worker(name, self.history) for name in WORKERS}
        # --- The second opinion ---
        self.credited: set[Sample] = set()
        self.epoch = 0
        self.live: dict[int, tuple[str, int, int]] = {}
        """Leases that may give credits: worker, epoch, first sample."""
        self.blamed: dict[int, int] = defaultdict(int)
        """Failures with a shard that were its own fault, at most."""
        self.saved: list[Saved] = []
        self.tokens: set[int] = set()
        self.terms: dict[int, tuple[str, int, int]] = {}
        self.shards: dict[int, int] = {}
        """The shard of each lease."""
        self.applied: dict[str, int] = {}
        """The newest request of each worker whose effects must last."""
        self.refused: dict[str, list[int]] = {}
        """What was refused in it."""

    # --- The network ---

    def deliver(self, worker: Worker, request: ShardRequest, fate: str = "arrives") -> None:
        """Deliver a request; its answer may be lost, or the master may die before or after it."""
        answer = self.queue.take(worker.name, request, self.now)
        if fate == "master dies before it writes" and self.queue.changed:
            self.restart()
            return
        if self.queue.changed:
            self.stored, self.queue.changed = RECORD.dump_json(self.queue.record), False
        if answer.code is AnswerCode.OK:
            self.judge(worker, request, answer)
        if fate == "master dies after it wrote":
            self.restart()
        elif fate == "arrives" and request is worker.unanswered:
            self.receive(worker, answer)

    def judge(self, worker: Worker, request: ShardRequest, answer: ShardAnswer) -> None:
        """Keep the credits that the queue must have counted, and check its answer."""
        if request.seq <= self.applied.get(worker.name, 0):
            if request.seq == worker.seq and (request.credits or request.returns):
                assert answer.refused == self.refused[worker.name], "answered in another way"
        else:
            self.applied[worker.name] = request.seq
            self.refused[worker.name] = answer.refused
            for credit in request.credits:
                held = self.live.get(credit.token)
                if held is None or held[0] != worker.name:
                    assert credit.token in answer.refused, "credited by an old lease"
                    continue
                assert credit.token not in answer.refused, "a valid credit was refused"
                _, epoch, start = held
                for first, stop in credit.ranges:
                    for sample in range(start + first, start + stop):
                        assert epoch == self.epoch, "credited in another epoch"
                        assert (epoch, sample) not in self.credited, "credited twice"
                        self.credited.add((epoch, sample))
            for one in request.returns:
                if one.token in self.live and one.fault:
                    self.blamed[self.shards[one.token]] += 1
        if answer.epoch != self.epoch:
            assert answer.epoch == self.epoch + 1, "an epoch was left out"
            self.check_complete(self.epoch)
            self.epoch += 1
            self.live.clear()
        for token in [t for t, entry in self.live.items() if entry[0] == worker.name]:
            if token not in {lease.token for lease in answer.leases}:
                del self.live[token]
        for lease in answer.leases:
            if lease.token not in self.live:
                entry = (worker.name, lease.epoch, lease.start)
                if lease.token in self.tokens:  # a new master continues it: see restart()
                    assert lease.token in worker.leases, "an old term has come back"
                    assert self.terms[lease.token] == entry, "a term was used twice"
                assert entry[1:] not in {other[1:] for other in self.live.values()}
                self.tokens.add(lease.token)
                self.live[lease.token] = self.terms[lease.token] = entry
                self.shards[lease.token] = lease.shard
            assert self.live[lease.token][0] == worker.name
            for first, stop in lease.todo:
                for sample in range(lease.start + first, lease.start + stop):
                    assert (lease.epoch, sample) not in self.credited, "leased again after a credit"

    def receive(self, worker: Worker, answer: ShardAnswer) -> None:
        worker.unanswered = None
        if answer.code is AnswerCode.OK:
            worker.joined = True
            worker.epoch = answer.epoch
            worker.leases = {lease.token: lease for lease in answer.leases}
        elif answer.code is AnswerCode.REFUSED:
            assert self.queue.record.quarantined
        else:
            worker.leases = {}

    def restart(self, *, unheard: str = "") -> None:
        """A new master: what was stored, and the leases that agents report."""
        self.queue = ShardQueue(RECORD.validate_json(self.stored))
        newest: dict[int, int] = {}
        for worker in self.workers.values():
            if worker.history != self.queue.record.history or worker.name == unheard:
                continue
            worker.reported_at = self.now
            for token, lease in worker.leases.items():
                held = HeldLease(token=token, position=lease.position, epoch=lease.epoch)
                self.queue.adopt(worker.name, held, self.now)
                samples = {(lease.epoch, lease.start + at) for at in range(lease.size)}
                poison = lease.shard in self.queue.record.quarantined
                if lease.epoch == self.epoch and samples - self.credited and not poison:
                    newest[lease.start] = max(token, newest.get(lease.start, 0))
        # Also one that had expired, if nobody has a newer lease of its shard.
        self.live = {token: self.terms[token] for token in newest.values()}

    # --- What happens ---

    @rule(
        name=st.sampled_from(WORKERS),
        want=st.integers(0, 3),
        part=st.sampled_from(["nothing", "half", "all", "odd", "zombie"]),
        nack=st.sampled_from(["", "", "fault", "leaves"]),
        fate=st.sampled_from(
            ["arrives", "arrives", "arrives", "answer is lost", "master dies before it writes",
             "master dies after it wrote"],
        ),
    )  # fmt: skip
    def ask(self, name: str, want: int, part: str, nack: str, fate: str) -> None:
        """A worker reports what it has trained, and asks for more."""
        worker = self.workers[name]
        request = worker.unanswered
        if request is None:
            request = worker.unanswered = self.request(worker, want, part, nack)
            worker.old = [*worker.old[-3:], request]
        if request.credits or request.returns or request.progress or not self.held(worker):
            worker.reported_at = self.now
        self.deliver(worker, request, fate)

    def held(self, worker: Worker) -> list[int]:
        return [t for t, entry in self.live.items() if entry[0] == worker.name]

    def request(self, worker: Worker, want: int, part: str, nack: str) -> ShardRequest:
        worker.seq += 1
        credits, returns = [], []
        for token, lease in list(worker.leases.items())[:1]:
            ranges = list(lease.todo)
            if part == "half":
                first, stop = ranges[0]
                ranges = [(first, (first + stop + 1) // 2)]
            elif part == "odd":
                ranges = [(at, at + 1) for run in ranges for at in range(*run) if at % 2]
            if part not in ("nothing", "zombie") and ranges:
                credits.append(Credit(token=token, ranges=ranges))
            elif nack:
                why = "a sample cannot be read"
                returns.append(ShardReturn(token=token, why=why, fault=nack == "fault"))
        if part == "zombie" and self.tokens - self.live.keys():
            old = max(self.tokens - self.live.keys())
            credits.append(Credit(token=old, ranges=[(0, 1)]))
        return ShardRequest(
            dataset="d", round=worker.history[0], load=worker.history[1], local_rank=0,
            seq=worker.seq, spec=None if worker.joined else self.spec, epoch=worker.epoch,
            credits=credits, returns=returns, want=want,
            ledger=None if worker.joined else self.loaded,
        )  # fmt: skip

    loaded: Ledger | None = None

    @rule(name=st.sampled_from(WORKERS))
    def make_the_loader_anew(self, name: str) -> None:
        """A loader of the same process takes over: it knows the numbers, and no lease."""
        worker = self.workers[name]
        if worker.unanswered is not None:
            return
        worker.joined = False
        held = set(self.held(worker))
        self.ask(name, 0, "nothing", "", "arrives")
        assert worker.leases.keys() == held or self.queue.record.quarantined

    @rule(name=st.sampled_from(WORKERS), which=st.integers(0, 3))
    def deliver_again(self, name: str, which: int) -> None:
        """The network delivers an old request once more."""
        worker = self.workers[name]
        if which < len(worker.old) and worker.old[which] is not worker.unanswered:
            request = worker.old[which]
            before = set(self.credited)
            if not self.held(worker):
                worker.reported_at = self.now
            self.deliver(worker, request)
            assert self.credited == before

    @rule(name=st.sampled_from(WORKERS), blame=st.booleans())
    def die(self, name: str, blame: bool) -> None:
        """A worker is killed; another process takes its place in a later round only."""
        for token in self.held(self.workers[name]):
            if blame:
                self.blamed[self.shards[token]] += 1
            del self.live[token]
        self.queue.drop(name, blame="it died" if blame else "")
        self.workers[name].leases.clear()

    @rule(seconds=st.sampled_from([1.0, 30.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        """Workers make no progress for a while."""
        self.now += seconds
        before = self.queue.lease_s
        self.queue.expire(self.now)
        for token, (name, _, _) in list(self.live.items()):
            idle = self.now - self.workers[name].reported_at
            if idle >= max(before, 900.0):
                self.blamed[self.shards[token]] += 1
                del self.live[token]
                assert name not in self.queue.workers, "its lease has ended"
            elif name not in self.queue.workers:
                self.blamed[self.shards[token]] += 1
                del self.live[token]
                assert idle >= LEASE_S, "it had time left"

    @rule(unheard=st.sampled_from(["", *WORKERS]))
    def master_dies(self, unheard: str) -> None:
        """A new master takes over; one agent may be silent."""
        self.restart(unheard=unheard)

    @rule()
    def save(self) -> None:
        """A checkpoint at a step of all workers: the ledger has what was credited."""
        samples = {s for e, s in self.credited if e == self.epoch}
        done: list[tuple[int, int]] = []
        partial: dict[int, list[tuple[int, int]]] = {}
        at = 0
        places = [size for count, size in self.spec.sizes for _ in range(count)]
        order = ShardOrder(self.spec.shards, 7, self.epoch, self.spec.shuffle)
        starts = []
        for each in places:
            starts.append(at)
            at += each
        for position in range(self.spec.shards):
            shard = order.at(position)
            runs: list[tuple[int, int]] = []
            for offset in range(places[shard]):
                if starts[shard] + offset in samples:
                    add(runs, offset, offset + 1)
            if runs == [(0, places[shard])]:
                add(done, position, position + 1)
            elif runs:
                partial[position] = runs
        ledger = Ledger.model_validate_json(
            Ledger(
                epoch=self.epoch, done=lengths(done),
                partial={p: lengths(r) for p, r in partial.items()},
            ).model_dump_json()
        )  # fmt: skip
        self.saved.append(Saved(ledger, set(self.credited), self.epoch))

    @precondition(lambda self: self.history[0] < 12)
    @rule(which=st.integers(0, 5), load=st.booleans(), found=st.booleans())
    def roll_back(self, which: int, load: bool, found: bool) -> None:
        """All workers load a checkpoint, or a new round begins, with or without one."""
        self.loaded = None
        self.history = (self.history[0], self.history[1] + 1) if load else (self.history[0] + 1, 0)
        saved = self.saved[which % len(self.saved)] if found and self.saved else None
        if not load:
            self.queue.forget_workers()
        for name in WORKERS:
            old = self.workers[name]
            self.workers[name] = Worker(
                name, self.history, seq=old.seq if load else 0, old=old.old[-1:]
            )
        self.live.clear()
        self.applied.clear()
        if self.spec.level is Level.EXACTLY_ONCE_EFFECT:
            self.loaded = saved.ledger if saved else None
            self.credited = set(saved.credited) if saved else set()
            self.epoch = saved.epoch if saved else 0
        worker = self.workers["a"]  # the first request of the history
        self.ask("a", 0, "nothing", "", "arrives")
        assert worker.joined or self.queue.record.quarantined

    # --- What must hold ---

    def check_complete(self, epoch: int) -> None:
        """An epoch may only end when each sample is credited, or its shard is in quarantine."""
        at = 0
        shard = 0
        for count, size in self.spec.sizes:
            for _ in range(count):
                missing = {s for s in range(at, at + size) if (epoch, s) not in self.credited}
                if missing:
                    assert shard in self.queue.record.quarantined, "a shard was lost"
                at, shard = at + size, shard + 1

    @invariant()
    def only_poison_is_in_quarantine(self) -> None:
        for shard, found in self.queue.record.quarantined.items():
            assert found.why
            assert self.blamed[shard] >= self.spec.failures

    def teardown(self) -> None:
        """A healthy worker can always finish the epoch."""
        if not hasattr(self, "spec"):
            return
        for name in WORKERS:
            self.die(name, blame=False)
        epoch = self.epoch
        for _ in range(4 * self.spec.shards + 20):
            self.ask("a", 2, "all", "", "arrives")
            if self.queue.over or self.epoch > epoch or self.queue.record.quarantined:
                break
        else:
            raise AssertionError("the epoch does not end")


TestShards = ShardMachine.TestCase
TestShards.settings = settings(
    max_examples=80, stateful_step_count=40, phases=[Phase.generate], deadline=None
)
