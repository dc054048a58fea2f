"""The invariants of a job, which hold under all faults. Pure.

The checker receives observations with their times, and keeps a list of violations. All times are of
one clock. Lines of workers may arrive before or after observations of the API server. Nothing here
depends on their order.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from dlrover_py.cli.view import causal_chain
from dlrover_py.protocol.status import JobEvent, NodePhase, Training

AFTER_S = 15.0
"""Seconds after the first step of a round in which all workers of older rounds stop.

Their agents learn of the new round at the next exchange, and workers have a grace period.
"""
AFRESH_S = 15.0
"""Age of a round in seconds, below which a cut-off node may not be connected to the others yet."""
BACK_S = 30.0
"""Seconds after the end of a network fault in which a cut-off node learns that it was given up."""


class Violation(NamedTuple):
    """A violation of an invariant."""

    at: float
    job: str
    rule: str
    words: str

    def __str__(self) -> str:
        return f"{self.job}: {self.rule}: {self.words}"


class WorkerLine(NamedTuple):
    """A line that a worker wrote (worker.py)."""

    what: str
    at: float
    node: str
    round: int
    rank: int
    size: int
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parse a line."""
        what, at, node, number, rank, size, *values = json.loads(line)
        return cls(what, at, node, number, rank, size, tuple(values))


class Journaled(NamedTuple):
    """A version of the journal's Secret."""

    boot: str
    """Boot id of the master that holds the journal; empty for none."""
    term: int
    round: int
    next_event: int
    gap: bool = False
    """Whether versions before this one may be missing."""


class Committed(NamedTuple):
    """The identity of a committed checkpoint, ordered by commit number."""

    number: int
    term: int
    step: int


class Blame(NamedTuple):
    """What one fault may count against the restart budgets of a job, according to the docs."""

    failures: int = 0
    """Number of worker failures."""
    losses: int = 0
    """Number of nodes that are lost without notice."""
    nodes: frozenset[str] = frozenset()
    """Nodes that the fault affects. No other node may be charged."""
    hosts: frozenset[str] = frozenset()
    """Hosts whose nodes may be charged as well, even nodes that appear after the fault."""
    owed: bool = False
    """Whether one of the nodes must be charged before the next round is formed."""


class Partition(NamedTuple):
    """Nodes that are cut off from others, and may not know that these continue without them."""

    nodes: frozenset[str]
    wait_s: float
    """Seconds after which they stop by themselves."""
    sure: bool
    """Whether they certainly stop, because no other node is with them."""


class Pod(NamedTuple):
    """The facts about a Pod that are checked."""

    name: str
    owner: str
    """Uid of its controller."""
    job: str
    """Job in its label; empty for none."""
    master: bool


CHARGES = {"WorkerFailed": "failures", "NodeLost": "losses"}
"""Reasons of warning events that charge a node, with the kind of charge."""
RESTARTS = ("WorkerFailed", "NodeRestarted")
"""Reasons of events that ``restarts`` of a node counts."""
REPLACED = ("NodeLost", "NodeExcluded", "RestartsExhausted")
"""Reasons of events that ``relaunches`` counts."""
OTHER_ENDS = (
    "NodeLost", "NodeLeaving", "NodeCutOff", "NodeRestarted", "NodeRefused", "NodeExcluded",
    "SpecChanged", "RoomToGrow", "Suspended", "Resumed", "MasterStarted", "JournalBehind",
    "WorkerFailed",
)  # fmt: skip
"""Reasons of events after which a killed worker may not be the cause of the end of the round."""
CAUSED = ("RestartsExhausted", "NonRetryable")
"""Reasons of events that always have a cause; abandoned replacements have one, too."""


@dataclass
class _Allowance:
    at: float
    until: float
    left: dict[str, int]
    nodes: frozenset[str]
    hosts: frozenset[str]


@dataclass
class _Apart:
    at: float
    what: Partition
    back_at: float = float("inf")

    def until(self, first_step_at: float) -> float:
        """Return when workers that continued must have stopped.

        Args:
            first_step_at: time of the first step of their round.
        """
        stops = self.at + self.what.wait_s
        if self.what.sure and first_step_at < self.at - AFRESH_S:
            return stops
        return max(stops, self.back_at + BACK_S)


@dataclass
class _Job:
    """What the checker knows about one job."""

    sizes: dict[int, int] = field(default_factory=dict)
    """For each round: the world size of its first worker."""
    ranks: dict[tuple[int, int], str] = field(default_factory=dict)
    last_round: dict[str, int] = field(default_factory=dict)
    """For each node: the newest round of its workers."""
    loaded: dict[int, int] = field(default_factory=dict)
    """For each round: the loaded step."""
    base: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """For each worker: the step that it loaded, or the least step that it must have loaded."""
    sure: set[tuple[int, str, int]] = field(default_factory=set)
    """Workers whose loaded step is known exactly."""
    stepped: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """For each worker that reports steps: the newest step."""
    first_steps: dict[int, float] = field(default_factory=dict)
    """For each round: the time of its first step."""
    stale: set[tuple[int, str]] = field(default_factory=set)
    """Round and node of workers that were already reported as stale."""
    apart: list[_Apart] = field(default_factory=list)
    stored_at: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    """Steps in storage according to the status. ``stored_at`` has the time of each."""
    committed_at: list[float] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    """Checkpoints in storage. ``committed_at`` has the time at which each was seen first."""
    seen: Training | None = None
    events: dict[int, JobEvent] = field(default_factory=dict)
    formed: dict[int, int] = field(default_factory=dict)
    """For each round: the id of the event that it was formed."""
    journal: Journaled | None = None
    over: set[str] = field(default_factory=set)
    """Masters that were replaced."""
    owners: dict[int, str] = field(default_factory=dict)
    """For each term: its master."""
    allowances: list[_Allowance] = field(default_factory=list)
    owed: dict[str, int] = field(default_factory=dict)
    """For each node that must be charged: the newest event at the time of the fault."""
    unbroken: int = 1
    """Id of the event from which on all events were seen."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Restarts charged to each node since the budgets were reset."""
    relaunches: int = 0
    """Number of nodes that were lost since then."""


class Checker:
    """Checks observations of jobs against the invariants."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.checks = 0
        """Number of checked observations. Without any, no violation proves nothing."""
        self._jobs: dict[str, _Job] = {}

    def _job(self, name: str) -> _Job:
        self.checks += 1
        return self._jobs.setdefault(name, _Job())

    def _wrong(self, at: float, name: str, rule: str, words: str) -> None:
        self.violations.append(Violation(at, name, rule, words))

    # --- Lines of workers ---

    def wrote(self, name: str, line: WorkerLine) -> None:
        """Check a line of a worker."""
        job = self._job(name)
        if line.what == "started":
            self._started(name, job, line)
        elif line.what == "loaded":
            self._loaded(name, job, line)
        elif line.what == "step":
            self._stepped(name, job, line)

    def _started(self, name: str, job: _Job, line: WorkerLine) -> None:
        where = f"round {line.round}, rank {line.rank} on {line.node}"
        size = job.sizes.setdefault(line.round, line.size)
        if size != line.size:
            words = f"{where}: a world of {line.size} workers, another worker has {size}"
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
        job.base[line.round, line.node, line.rank] = self._in_storage(job, line.at)

    def _in_storage(self, job: _Job, at: float) -> int:
        """Return the newest step that was known to be in storage at a time."""
        known = job.stored[: bisect_right(job.stored_at, at)][-1:]
        there = job.committed[: bisect_right(job.committed_at, at)][-1:]
        return max([*known, *(one.step for one in there)], default=0)

    def _loaded(self, name: str, job: _Job, line: WorkerLine) -> None:
        step, began = int(line.values[0]), line.values[1]
        where = f"round {line.round}, rank {line.rank} on {line.node} continues from step {step}"
        newest = self._in_storage(job, began)
        if step < newest:
            words = f"{where}, but step {newest} was in storage before"
            self._wrong(line.at, name, "no step before a stored one", words)
        same = job.loaded.setdefault(line.round, step)
        if same != step:
            words = f"{where}, another worker of the round from {same}"
            self._wrong(line.at, name, "one step for all", words)
        worker = (line.round, line.node, line.rank)
        job.base[worker] = step
        job.sure.add(worker)

    def _stepped(self, name: str, job: _Job, line: WorkerLine) -> None:
        """Check a step."""
        step, worker = int(line.values[0]), (line.round, line.node, line.rank)
        where = f"round {line.round}, rank {line.rank} on {line.node} makes step {step}"
        last, base = job.stepped.get(worker), job.base.get(worker, 0)
        job.stepped[worker] = step
        if last is not None and step != last + 1:
            words = f"{where} after {last}"
            self._wrong(line.at, name, "steps continue from the last one", words)
        elif last is None and (step != base + 1 if worker in job.sure else step <= base):
            words = f"{where} first, and continues from step {base}"
            self._wrong(line.at, name, "steps continue from the last one", words)
        first_at = job.first_steps.setdefault(line.round, line.at)
        newer = [at for number, at in job.first_steps.items() if number > line.round]
        if not newer or (line.round, line.node) in job.stale:
            return
        parted = [a for a in job.apart if line.node in a.what.nodes and a.at <= line.at]
        until = max([min(newer) + AFTER_S, *(a.until(first_at) for a in parted)])
        if line.at > until:
            words = f"{where} {line.at - min(newer):.1f} s after the first one of a newer round"
            self._wrong(line.at, name, "no older round continues to train", words)
            job.stale.add((line.round, line.node))

    # --- Objects of the API server ---

    def seen(self, name: str, at: float, new: Training) -> None:
        """Check a version of ``status.training``."""
        job = self._job(name)
        old = job.seen
        if old is not None and (new.term, new.generation) < (old.term, old.generation):
            words = (
                f"term {new.term}, generation {new.generation} "
                f"after term {old.term}, generation {old.generation}"
            )
            self._wrong(at, name, "no stale master writes", words)
        if old is not None and new.round < old.round:
            words = f"the status has round {new.round} after {old.round}"
            self._wrong(at, name, "rounds only grow", words)
        self._events(name, job, at, new)
        if (formed := sum(new.restarts.values())) > max(0, new.round - 1):
            words = f"{formed} rounds after the first are counted, and it is round {new.round}"
            self._wrong(at, name, "every round is explained", words)
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
        if gap:
            job.unbroken = new.events[0].id
            job.owed.clear()
        hosts = {node.id: node.host for node in new.nodes}
        for event in new.events:
            known = job.events.setdefault(event.id, event)
            if (known.reason, known.message) != (event.reason, event.message):
                words = f"event {event.id} was “{known.message}” and is “{event.message}”"
                self._wrong(at, name, "no stale master writes", words)
            if event.id > last:
                self._new_event(name, job, at, event, hosts)
        self._counters(name, job, at, new, gap=gap)
        first = (job.seen.round if job.seen else 0) + 1
        for number in range(first, new.round + 1):
            self._explained(name, job, at, number, new, gap=gap)

    def _new_event(
        self, name: str, job: _Job, at: float, event: JobEvent, hosts: Mapping[str, str]
    ) -> None:
        self._worded(name, job, at, event)
        if event.reason == "BudgetReset":
            job.restarts.clear()
            job.relaunches = 0
        if event.reason in RESTARTS and event.type == "Warning":
            job.restarts[event.node or ""] += 1
        if event.reason in REPLACED and event.type == "Warning":
            job.relaunches += 1
        if event.reason == "RoundFormed" and event.round is not None:
            other = job.formed.setdefault(event.round, event.id)
            if other != event.id:
                words = f"round {event.round} by the events {other} and {event.id}"
                self._wrong(at, name, "one world per round", words)
        self._owed(name, job, at, event)
        charge, node = CHARGES.get(event.reason), event.node or ""
        if charge is not None and event.type == "Warning":
            for allowance in job.allowances:
                hurt = node in allowance.nodes or hosts.get(node) in allowance.hosts
                if allowance.at <= at <= allowance.until and hurt and allowance.left[charge]:
                    allowance.left[charge] -= 1
                    return
            words = f"{event.reason} of {event.node}: {event.message}"
            self._wrong(at, name, "only affected nodes are charged", words)

    def _worded(self, name: str, job: _Job, at: float, event: JobEvent) -> None:
        """Check that an event has a message, and a known cause if it needs one."""
        rule, where = "every decision is explained", f"event {event.id}, {event.reason}"
        if not event.message.strip() or not event.reason:
            self._wrong(at, name, rule, f"{where}, has no message")
        given_up = event.reason == "ReplacementsExhausted" and event.node is not None
        if event.cause is None:
            if given_up or event.reason in CAUSED:
                self._wrong(at, name, rule, f"{where}, has no cause: “{event.message}”")
        elif event.cause >= job.unbroken and event.cause not in job.events:
            words = f"{where}, follows from event {event.cause}, which is unknown"
            self._wrong(at, name, rule, words)

    def _owed(self, name: str, job: _Job, at: float, event: JobEvent) -> None:
        """Check that the node of a killed worker was charged before the next round was formed."""
        if event.reason in OTHER_ENDS:
            job.owed.clear()  # the node was charged, or another event may have ended the round
        if event.reason != "RoundFormed":
            return
        for node, newest in job.owed.items():
            if event.cause is None or event.cause > newest:
                words = f"a worker of {node} was killed, and the next is: {event.message}"
                self._wrong(at, name, "the failed node is charged", words)
        job.owed.clear()

    def _counters(self, name: str, job: _Job, at: float, new: Training, *, gap: bool) -> None:
        """Check that the counters of nodes match the events.

        :meth:`_new_event` compares the events with the injected faults.
        """
        for node in new.nodes:
            if gap:  # charges in the gap were not seen
                job.restarts[node.id] = max(job.restarts[node.id], node.restarts)
                job.relaunches = max(job.relaunches, node.relaunches)
            if node.restarts > job.restarts[node.id]:
                words = (
                    f"{node.id} has {node.restarts} restarts, {job.restarts[node.id]} are in events"
                )
                self._wrong(at, name, "only affected nodes are charged", words)
                job.restarts[node.id] = node.restarts
            if node.relaunches > job.relaunches:
                words = f"{node.id} has {node.relaunches} relaunches, {job.relaunches} nodes were"
                self._wrong(at, name, "only affected nodes are charged", f"{words} lost")
                job.relaunches = node.relaunches

    def _explained(
        self, name: str, job: _Job, at: float, number: int, new: Training, *, gap: bool
    ) -> None:
        event = job.events.get(job.formed.get(number, 0))
        if event is None:
            if not gap:
                words = f"no event reports round {number}"
                self._wrong(at, name, "every round is explained", words)
            return
        because = event.message.partition("because ")[2].strip()
        if not because or event.cause is None or event.cause >= event.id:
            words = f"round {number}: “{event.message}”, cause {event.cause}"
            self._wrong(at, name, "every round is explained", words)
        if event in new.events and event not in causal_chain(new.events, number):
            words = f"`dlrover job why --round {number}` is empty"
            self._wrong(at, name, "every round is explained", words)

    def journaled(self, name: str, at: float, new: Journaled) -> None:
        """Check a version of the journal."""
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
            # A new holder leaves the content unchanged, and later writes with its own term.
            owner = job.owners.setdefault(new.term, new.boot)
            if new.boot and owner and owner != new.boot:
                words = f"term {new.term} is {owner}'s, and master {new.boot} writes in it"
                self._wrong(at, name, "no stale master writes", words)

    # --- Storage ---

    def committed(self, name: str, at: float, found: Iterable[Committed]) -> None:
        """Check the existing checkpoints. Older ones may have been removed."""
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

    # --- Faults ---

    def struck(self, name: str, at: float, blame: Blame, *, for_s: float) -> None:
        """Register the begin of a fault.

        Args:
            name: name of the job.
            at: time of the fault.
            blame: what may be charged for it.
            for_s: seconds in which it may be charged.
        """
        job = self._job(name)
        job.allowances = [a for a in job.allowances if a.until >= at]
        left = {"failures": blame.failures, "losses": blame.losses}
        job.allowances.append(_Allowance(at, at + for_s, left, blame.nodes, blame.hosts))
        job.owed = dict.fromkeys(blame.nodes if blame.owed else (), max(job.events, default=0))

    def parted(self, name: str, at: float, what: Partition) -> None:
        """Register that nodes are cut off from now on."""
        self._job(name).apart.append(_Apart(at, what))

    def back(self, name: str, at: float) -> None:
        """Register that all nodes are connected again."""
        for apart in self._job(name).apart:
            apart.back_at = min(apart.back_at, at)

    # --- Leftovers ---

    def left(self, name: str, at: float, things: Iterable[str]) -> None:
        """Check that nothing is left of a deleted job."""
        self._job(name)
        found = sorted(things)
        if found:
            self._wrong(at, name, "nothing is left", ", ".join(found))


def unlike(jobs: Mapping[str, tuple[str, Training]], pods: Iterable[Pod]) -> list[str]:
    """Return the differences between the running Pods of a namespace and the nodes of its jobs.

    Args:
        jobs: for each job its uid and the status of its master.
        pods: Pods of the namespace that have not ended.
    """
    found, there, masters = list[str](), set[str](), Counter[str]()
    for pod in pods:
        uid = jobs[pod.job][0] if pod.job in jobs else None
        if uid is None:
            found.append(f"{pod.name} belongs to no existing job")
        elif pod.master:
            masters[pod.job] += 1
        else:
            there.add(pod.name)
            if pod.owner != uid:
                found.append(f"{pod.name} is of an earlier {pod.job}: its owner is {pod.owner}")
    known = {
        f"{name}-{node.id}"
        for name, (_, status) in jobs.items()
        for node in status.nodes
        if node.phase is not NodePhase.GONE
    }
    found += [f"{name} is not in the status" for name in sorted(there - known)]
    found += [f"{name} is in the status, and has no Pod" for name in sorted(known - there)]
    found += [f"{name} has {masters[name]} masters" for name in jobs if masters[name] != 1]
    return found
