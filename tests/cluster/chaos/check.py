"""What must be true of a job all the time, whatever is done to it.

Pure: it is given what was seen, with times, and keeps a list of what should not have been. All
times are of one clock. What workers tell may come later than what was seen of the API, and the
other way round: nothing here depends on the order of the two.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from dlrover_py.cli.view import story
from dlrover_py.protocol.status import JobEvent, Training


class Violation(NamedTuple):
    """Something that must not be."""

    at: float
    job: str
    rule: str
    words: str

    def __str__(self) -> str:
        return f"{self.job}: {self.rule}: {self.words}"


class Told(NamedTuple):
    """A worker's line (worker.py)."""

    what: str
    at: float
    node: str
    round: int
    rank: int
    size: int
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read one."""
        what, at, node, number, rank, size, *values = json.loads(line)
        return cls(what, at, node, number, rank, size, tuple(values))


class Journaled(NamedTuple):
    """A version of the journal's Secret."""

    boot: str
    """Of the master process that holds it; empty for nobody."""
    term: int
    round: int
    next_event: int
    gap: bool = False
    """Versions before this one may not have been seen."""


class Committed(NamedTuple):
    """A checkpoint's manifest, by number."""

    number: int
    term: int
    step: int


class Blame(NamedTuple):
    """What a job may be charged with for one fault: by the documents, and no more."""

    failures: int = 0
    """Of workers."""
    losses: int = 0
    """Of nodes, without notice."""

    def __add__(self, other: object) -> "Blame":  # of two faults at once
        assert isinstance(other, Blame)
        return Blame(self.failures + other.failures, self.losses + other.losses)


CHARGES = {"WorkerFailed": "failures", "NodeLost": "losses"}
"""Events of type Warning that are charged to a node, and as what."""


@dataclass
class _Allowance:
    until: float
    left: dict[str, int]


@dataclass
class _Job:
    """What is known of one job."""

    sizes: dict[int, int] = field(default_factory=dict)
    """World size by round, as its first worker has it."""
    ranks: dict[tuple[int, int], str] = field(default_factory=dict)
    last_round: dict[str, int] = field(default_factory=dict)
    """Newest one of each node's workers."""
    loaded: dict[int, int] = field(default_factory=dict)
    """Step by round."""
    stored_at: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    """Newest step in storage by the status, and when that was seen first."""
    committed_at: list[float] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    """The same by what is there."""
    seen: Training | None = None
    events: dict[int, JobEvent] = field(default_factory=dict)
    formed: dict[int, int] = field(default_factory=dict)
    """Event by round."""
    journal: Journaled | None = None
    over: set[str] = field(default_factory=set)
    """Masters that others have followed."""
    owners: dict[int, str] = field(default_factory=dict)
    """Masters by term."""
    allowances: list[_Allowance] = field(default_factory=list)


class Checker:
    """Takes in what is seen of jobs; ``violations`` grows."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.checks = 0
        """Things that were looked at: none is no proof."""
        self._jobs: dict[str, _Job] = {}

    def _job(self, name: str) -> _Job:
        self.checks += 1
        return self._jobs.setdefault(name, _Job())

    def _wrong(self, at: float, name: str, rule: str, words: str) -> None:
        self.violations.append(Violation(at, name, rule, words))

    # --- what workers tell ---

    def told(self, name: str, line: Told) -> None:
        """A worker's line."""
        job = self._job(name)
        if line.what == "started":
            self._started(name, job, line)
        elif line.what == "loaded":
            self._loaded(name, job, line)

    def _started(self, name: str, job: _Job, line: Told) -> None:
        where = f"round {line.round}, rank {line.rank} on {line.node}"
        size = job.sizes.setdefault(line.round, line.size)
        if size != line.size:
            words = f"{where}: a world of {line.size} workers, another one has {size}"
            self._wrong(line.at, name, "one world per round", words)
        if (line.round, line.rank) in job.ranks:
            words = f"{where}: {job.ranks[line.round, line.rank]} has started it already"
            self._wrong(line.at, name, "one worker per rank", words)
        job.ranks[line.round, line.rank] = line.node
        if not 0 <= line.rank < line.size:
            words = f"{where}: not below {line.size}"
            self._wrong(line.at, name, "one worker per rank", words)
        last = job.last_round.get(line.node, 0)
        if line.round < last:
            words = f"{where}: this node has had workers in round {last}"
            self._wrong(line.at, name, "rounds only grow", words)
        job.last_round[line.node] = max(last, line.round)

    def _loaded(self, name: str, job: _Job, line: Told) -> None:
        step, began = int(line.values[0]), line.values[1]
        where = f"round {line.round}, rank {line.rank} on {line.node} goes on from step {step}"
        known = job.stored[: bisect_right(job.stored_at, began)][-1:]
        there = job.committed[: bisect_right(job.committed_at, began)][-1:]
        newest = max([*known, *(one.step for one in there)], default=0)
        if step < newest:
            words = f"{where}, but step {newest} was in storage before"
            self._wrong(line.at, name, "no step before a stored one", words)
        same = job.loaded.setdefault(line.round, step)
        if same != step:
            words = f"{where}, another worker of the round from {same}"
            self._wrong(line.at, name, "one step for all", words)

    # --- what the API server tells ---

    def seen(self, name: str, at: float, new: Training) -> None:
        """A version of ``status.training``."""
        job = self._job(name)
        old = job.seen
        if old is not None and (new.term, new.generation) < (old.term, old.generation):
            words = (
                f"term {new.term}, generation {new.generation} "
                f"after term {old.term}, generation {old.generation}"
            )
            self._wrong(at, name, "no stale master writes", words)
        if old is not None and new.round < old.round:
            words = f"the status tells of round {new.round} after {old.round}"
            self._wrong(at, name, "rounds only grow", words)
        self._events(name, job, at, new)
        if new.phase.value == "Running" and job.sizes.get(new.round, new.world_size) != (
            new.world_size
        ):
            words = f"round {new.round} has {new.world_size} workers, they say {job.sizes}"
            self._wrong(at, name, "one world per round", words)
        last = new.last_checkpoint
        if last is not None and last.stored_step is not None:
            if job.stored and last.stored_step < job.stored[-1]:
                words = f"the newest in storage is {last.stored_step} after {job.stored[-1]}"
                self._wrong(at, name, "no step before a stored one", words)
            elif not job.stored or last.stored_step > job.stored[-1]:
                job.stored_at.append(at)
                job.stored.append(last.stored_step)
        job.seen = new

    def _events(self, name: str, job: _Job, at: float, new: Training) -> None:
        last = max(job.events, default=0)
        gap = bool(new.events) and new.events[0].id > last + 1
        for event in new.events:
            known = job.events.setdefault(event.id, event)
            if (known.reason, known.message) != (event.reason, event.message):
                words = f"event {event.id} was “{known.message}” and is “{event.message}”"
                self._wrong(at, name, "no stale master writes", words)
            if event.id > last:
                self._new_event(name, job, at, event)
        first = (job.seen.round if job.seen else 0) + 1
        for number in range(first, new.round + 1):
            self._explained(name, job, at, number, new, gap=gap)

    def _new_event(self, name: str, job: _Job, at: float, event: JobEvent) -> None:
        if event.reason == "RoundFormed" and event.round is not None:
            other = job.formed.setdefault(event.round, event.id)
            if other != event.id:
                words = f"round {event.round} by the events {other} and {event.id}"
                self._wrong(at, name, "one world per round", words)
        charge = CHARGES.get(event.reason)
        if charge is not None and event.type == "Warning":
            for allowance in job.allowances:
                if allowance.until >= at and allowance.left[charge]:
                    allowance.left[charge] -= 1
                    return
            words = f"{event.reason} of {event.node}: {event.message}"
            self._wrong(at, name, "only who is to blame is charged", words)

    def _explained(
        self, name: str, job: _Job, at: float, number: int, new: Training, *, gap: bool
    ) -> None:
        event = job.events.get(job.formed.get(number, 0))
        if event is None:
            if not gap:
                words = f"nothing tells of round {number}"
                self._wrong(at, name, "every round is explained", words)
            return
        because = event.message.partition("because ")[2].strip()
        if not because or event.cause is None or event.cause >= event.id:
            words = f"round {number}: “{event.message}”, cause {event.cause}"
            self._wrong(at, name, "every round is explained", words)
        if number == new.round and not story(new.events, number):
            words = f"`dlrover job why --round {number}` has nothing to say"
            self._wrong(at, name, "every round is explained", words)

    def journaled(self, name: str, at: float, new: Journaled) -> None:
        """A version of the journal."""
        job = self._job(name)
        old, job.journal = job.journal, new
        if new.boot in job.over:
            words = f"master {new.boot} is back after another one"
            self._wrong(at, name, "no stale master writes", words)
        if old is None:
            job.owners[new.term] = new.boot
            return
        if old.boot and new.boot != old.boot:
            job.over.add(old.boot)
        for what in ("term", "round", "next_event"):
            was, now = getattr(old, what), getattr(new, what)
            if now < was:
                words = f"the journal's {what} is {now} after {was}"
                self._wrong(at, name, "no stale master writes", words)
        if old[1:4] != new[1:4] and not new.gap:
            # Who takes it over leaves the content as it is, and writes in a term of its own.
            owner = job.owners.setdefault(new.term, new.boot)
            if new.boot and owner and owner != new.boot:
                words = f"term {new.term} is {owner}'s, and master {new.boot} writes in it"
                self._wrong(at, name, "no stale master writes", words)

    # --- what is in storage ---

    def committed(self, name: str, at: float, found: Iterable[Committed]) -> None:
        """Checkpoints that exist; older ones may have been removed."""
        job = self._job(name)
        for one in sorted(found):
            old = job.committed[-1] if job.committed else Committed(0, 0, 0)
            if one.number <= old.number:
                continue
            if one.term < old.term:
                words = f"commit {one.number} is of term {one.term}, the one before of {old.term}"
                self._wrong(at, name, "no stale node commits", words)
            if one.step < old.step:
                words = f"commit {one.number} is of step {one.step}, the one before of {old.step}"
                self._wrong(at, name, "no step before a stored one", words)
            job.committed_at.append(at)
            job.committed.append(one)

    # --- what was done ---

    def struck(self, name: str, at: float, blame: Blame, *, for_s: float) -> None:
        """A fault begins now: so much may be charged for it within this time."""
        job = self._job(name)
        job.allowances = [a for a in job.allowances if a.until >= at]
        job.allowances.append(_Allowance(at + for_s, blame._asdict()))

    def left(self, name: str, at: float, things: Iterable[str]) -> None:
        """What there still is of a job that was deleted."""
        self._job(name)
        found = sorted(things)
        if found:
            self._wrong(at, name, "nothing is left", ", ".join(found))
