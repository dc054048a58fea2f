"""Each unit of a stream is credited once while it grows, whatever happens to workers and the queue.

The model below knows nothing of the queue's record: it keeps each unit that an answer has
confirmed, and which lease may give one.
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import TypeAdapter

from dlrover_py.protocol.agents import HeldLease
from dlrover_py.protocol.runs import Run, add, lengths
from dlrover_py.protocol.shards import (
    AnswerCode,
    Credit,
    DatasetSpec,
    Ledger,
    Level,
    ShardAnswer,
    ShardLease,
    ShardRequest,
)
from dlrover_py.shards.queue import ShardQueue
from dlrover_py.shards.records import QueueRecord
from dlrover_py.shards.streams import watermark

RECORD = TypeAdapter(QueueRecord)
WORKERS = ("a", "b")
PARTITIONS = ("left", "right")
Unit = tuple[str, int]
"""A partition and one of its units."""


@dataclass
class Worker:
    """A process that trains, and what it knows."""

    history: tuple[int, int]
    seq: int = 0
    joined: bool = False
    leases: dict[int, ShardLease] = field(default_factory=dict)
    unanswered: ShardRequest | None = None


def units(lease: ShardLease, runs: list[Run]) -> set[Unit]:
    return {(lease.partition, lease.start + at) for run in runs for at in range(*run)}


class StreamMachine(RuleBasedStateMachine):
    """The source, the queue, its workers, and the network between them."""

    @initialize(
        size=st.integers(1, 5),
        level=st.sampled_from([Level.EXACTLY_ONCE_EFFECT, Level.EXACTLY_ONCE_ACCOUNTING]),
    )
    def begin(self, size: int, level: Level) -> None:
        self.spec = DatasetSpec(range_size=size, level=level, epochs=None, failures=1000)
        self.queue = ShardQueue(QueueRecord(spec=self.spec))
        self.stored = RECORD.dump_json(self.queue.record)
        self.now, self.history = 0.0, (1, 0)
        self.workers = {name: Worker(self.history) for name in WORKERS}
        self.ends: dict[str, int] = {}
        self.ended = False
        self.loaded: Ledger | None = None
        # --- The second opinion ---
        self.credited: set[Unit] = set()
        self.live: dict[int, tuple[str, ShardLease]] = {}
        self.applied: dict[str, int] = {}
        self.saved: list[set[Unit]] = []
        self.tokens: set[int] = set()

    # --- The network ---

    def deliver(self, name: str, request: ShardRequest, fate: str) -> None:
        worker = self.workers[name]
        answer = self.queue.take(name, request, self.now)
        if fate == "master dies before it writes" and self.queue.changed:
            self.restart()
            return
        if self.queue.changed:
            self.stored, self.queue.changed = RECORD.dump_json(self.queue.record), False
        assert answer.code is AnswerCode.OK, answer.why
        self.judge(name, request, answer)
        if fate == "master dies after it wrote":
            self.restart()
        elif fate == "arrives":
            worker.unanswered, worker.joined = None, True
            worker.leases = {lease.token: lease for lease in answer.leases}

    def judge(self, name: str, request: ShardRequest, answer: ShardAnswer) -> None:
        """Keep the credits that the queue must have counted, and check its answer."""
        if request.seq > self.applied.get(name, 0):
            self.applied[name] = request.seq
            for credit in request.credits:
                held = self.live.get(credit.token)
                if held is None or held[0] != name:
                    assert credit.token in answer.refused, "credited by an old lease"
                    continue
                assert credit.token not in answer.refused, "a valid credit was refused"
                for unit in units(held[1], credit.ranges):
                    assert unit not in self.credited, "credited twice"
                    self.credited.add(unit)
        listed = {lease.token: lease for lease in answer.leases}
        for token in [t for t, (owner, _) in self.live.items() if owner == name]:
            if token not in listed:
                del self.live[token]
        for token, lease in listed.items():
            todo = units(lease, lease.todo)
            assert todo, "a lease of nothing"
            assert not todo & self.credited, "leased again after a credit"
            assert max(at for _, at in todo) < self.ends[lease.partition], "leased before it exists"
            for other, (_, mine) in self.live.items():
                assert other == token or not todo & units(mine, mine.todo), "leased twice"
            assert (
                token in self.live
                or token not in self.tokens
                or token in (self.workers[name].leases)
            ), "an old lease has come back"
            self.live[token] = name, lease
            self.tokens.add(token)
        if answer.over:
            everything = {(key, at) for key, end in self.ends.items() for at in range(end)}
            assert self.ended, "it is over before its end"
            assert self.credited >= everything, "units were lost"

    def restart(self) -> None:
        """A new master: what was stored, and the leases that agents report."""
        self.queue = ShardQueue(RECORD.validate_json(self.stored))
        newest: dict[tuple[str, int], int] = {}
        reported: dict[int, tuple[str, ShardLease]] = {}
        for name, worker in self.workers.items():
            if worker.history != self.queue.record.history:
                continue
            for token, lease in worker.leases.items():
                held = HeldLease(token=token, position=lease.position, epoch=0)
                self.queue.adopt(name, held, self.now)
                if units(lease, [(0, lease.size)]) - self.credited or self.grown(lease):
                    place = lease.partition, lease.start
                    newest[place] = max(token, newest.get(place, 0))
                    reported[token] = name, lease
        self.live = {token: reported[token] for token in newest.values()}

    def grown(self, lease: ShardLease) -> bool:
        """Return whether the stored end of a partition lets its last range have more units."""
        assert self.spec.range_size is not None
        end = self.queue.record.stream.partitions[lease.partition].end
        stop = min(end, lease.start + self.spec.range_size)
        return bool(units(lease, [(0, stop - lease.start)]) - self.credited)

    # --- What happens ---

    @precondition(lambda self: not self.ended)
    @rule(partition=st.sampled_from(PARTITIONS), more=st.integers(0, 7), ends=st.booleans())
    def append(self, partition: str, more: int, ends: bool) -> None:
        """The source grows; it may end, if it has enough."""
        self.ends[partition] = self.ends.get(partition, 0) + more
        self.ended = ends and sum(self.ends.values()) > 12

    @rule(
        name=st.sampled_from(WORKERS),
        want=st.integers(0, 3),
        part=st.sampled_from(["nothing", "half", "all"]),
        look=st.booleans(),
        fate=st.sampled_from(
            ["arrives", "arrives", "arrives", "answer is lost", "master dies before it writes",
             "master dies after it wrote"],
        ),
    )  # fmt: skip
    def ask(self, name: str, want: int, part: str, look: bool, fate: str) -> None:
        """A worker reports what it has trained and where partitions end, and asks for more."""
        worker = self.workers[name]
        if worker.unanswered is None:
            worker.seq += 1
            credits = []
            for token, lease in list(worker.leases.items())[:1]:
                runs = list(lease.todo)
                if part == "half":
                    runs = [(runs[0][0], (runs[0][0] + runs[0][1] + 1) // 2)]
                if part != "nothing":
                    credits.append(Credit(token=token, ranges=runs))
            worker.unanswered = ShardRequest(
                dataset="d", round=worker.history[0], load=worker.history[1], local_rank=0,
                seq=worker.seq, spec=None if worker.joined else self.spec, credits=credits,
                want=want, ledger=None if worker.joined else self.loaded, progress=True,
                ends=self.ends if look else {}, ended=look and self.ended,
            )  # fmt: skip
        self.deliver(name, worker.unanswered, fate)

    @rule(
        name=st.sampled_from(WORKERS), want=st.integers(1, 3), part=st.sampled_from(["half", "all"])
    )
    def work(self, name: str, want: int, part: str) -> None:
        """A worker trains a few ranges, and nothing fails."""
        for look in (True, False, True):
            self.ask(name, want, part, look, "arrives")

    def die(self, name: str) -> None:
        self.queue.drop(name)
        self.workers[name].leases.clear()
        self.live = {t: held for t, held in self.live.items() if held[0] != name}

    @rule(what=st.sampled_from(["master", "all stand still", *WORKERS]))
    def fail(self, what: str) -> None:
        """The master or a worker dies, or all workers stand still for longer than their leases."""
        if what == "master":
            self.restart()
        elif what in WORKERS:
            self.die(what)
        else:
            self.now += 1000.0
            self.queue.expire(self.now)
            assert not self.queue.workers
            self.live.clear()

    @rule()
    def save(self) -> None:
        self.saved.append(set(self.credited))

    @precondition(lambda self: self.history[0] < 8)
    @rule(which=st.integers(0, 5), load=st.booleans(), found=st.booleans())
    def roll_back(self, which: int, load: bool, found: bool) -> None:
        """All workers load a checkpoint, or a new round begins, with or without one."""
        self.history = (self.history[0], self.history[1] + 1) if load else (self.history[0] + 1, 0)
        self.workers = {
            name: Worker(self.history, seq=old.seq if load else 0)
            for name, old in self.workers.items()
        }
        self.live.clear()
        self.applied.clear()
        self.loaded = None
        if self.spec.level is Level.EXACTLY_ONCE_EFFECT:
            saved = self.saved[which % len(self.saved)] if found and self.saved else None
            self.credited = set(saved or ())
            if saved is not None:
                parts: dict[str, Any] = {}
                for key, at in sorted(saved):
                    add(parts.setdefault(key, []), at, at + 1)
                self.loaded = Ledger(epoch=0, parts={k: lengths(v) for k, v in parts.items()})
        self.ask("a", 0, "nothing", False, "arrives")

    # --- What must hold ---

    @invariant()
    def watermarks_are_the_first_gaps(self) -> None:
        for name, partition in self.queue.record.stream.partitions.items():
            mark = watermark(partition)
            assert {(name, at) for at in range(mark)} <= self.credited
            assert mark == partition.end or (name, mark) not in self.credited
            assert len(partition.credited) <= len(self.live) + len(WORKERS) * 3 + 8

    def teardown(self) -> None:
        """A healthy worker can always finish the stream."""
        if not hasattr(self, "spec"):
            return
        self.ended = True
        for name in WORKERS:
            self.die(name)
        for _ in range(200):
            if self.queue.over:
                break
            self.ask("a", 2, "all", True, "arrives")
        else:
            raise AssertionError("the stream does not end")
        for name, partition in self.queue.record.stream.partitions.items():
            assert watermark(partition) == self.ends.get(name, 0)


TestStreams = StreamMachine.TestCase
TestStreams.settings = settings(
    max_examples=60, stateful_step_count=40, phases=[Phase.generate], deadline=None
)
