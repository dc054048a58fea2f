"""The only writer: takes in what has happened, lets the core decide, journals, acts.

Reports and facts of the platform meet in one mailbox; each turn hands all of them to
``Job.step`` at once. What must outlive the master is on disk before anything else happens. If the
journal cannot be written the loop stands still, on purpose: no round is formed that a later
master would not know of, while running workers go on and agents get their old answers.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dlrover_py.master.core.events import (
    Answer,
    Asked,
    Assign,
    CreateNode,
    DeleteNode,
    Disconnected,
    Effect,
    Event,
    JobStopped,
    Journal,
    NodesListed,
    Refuse,
    Reported,
    Rules,
    Stalled,
    Step,
)
from dlrover_py.master.core.job import Job
from dlrover_py.master.platform import Platform
from dlrover_py.master.store import Store, Unwritable
from dlrover_py.protocol.agents import AgentReport, Assignment, Candidates, Directive, Holders
from dlrover_py.protocol.errors import Superseded, TransientError
from dlrover_py.protocol.names import NodeId, Term
from dlrover_py.protocol.status import Condition, JobStatus
from dlrover_py.telemetry import bind

log = logging.getLogger("master.loop")

T = TypeVar("T")

REST_S = 5.0
"""Turns come so often at least: to show life, and to see a master that stood still."""
STALL_S = 0.25
"""Later than this, a turn is not a late lease but a master that stood still."""
STORM_SAVE_S = 0.01
GATHER_S = 0.1
"""After the journal was written, turns wait so long at most for what else comes: see `_gather`."""
PUBLISH_SHARE = 20
"""Making the status takes at most this part of the time."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def pause_s(tries: int, error: TransientError | None = None) -> float:
    """How long to wait after so many failures. Spread: a thousand masters fail at the same time."""
    wait_s = RETRY_S[min(tries, len(RETRY_S) - 1)] * random.uniform(0.5, 1.0)
    return wait_s if error is None else max(wait_s, error.retry_after)


@dataclass(slots=True)
class Clock:
    """Where time comes from: ``now`` decides, ``wall`` dates what people read."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # noqa: TID251 - the one wall clock of the master


@dataclass(slots=True)
class _Desk:
    """What the master has for one node, and who waits for it."""

    left: asyncio.Event
    """Set when a node was dismissed; all desks have the same."""
    assignment: Assignment | None = None
    boot_id: str = ""
    """The agent process that the assignment is for."""
    seq: int = -1
    """Newest report that has arrived from it."""
    refused: dict[str, str] = field(default_factory=dict)
    dismissed: bool = False
    """It was told to stop."""
    waiting: "set[Waiting]" = field(default_factory=set)

    def ring(self) -> None:
        for waiting in list(self.waiting):
            waiting.look()


ADRIFT_S = 25.0
"""Where the platform is not heard of for so long, another master may be in our place."""


class Passive(TransientError):
    """This master does not (yet) hold the journal, or has not yet seen its nodes."""


Told = Callable[["Assignment | Passive | Superseded"], None]


class Waiting:
    """A report that is not answered yet. There may be thousands: no task, no future."""

    __slots__ = ("_desk", "_due", "_report", "_timer", "_told")

    def __init__(self, desk: _Desk, report: AgentReport, told: Told, hold_s: float) -> None:
        self._desk, self._report, self._told = desk, report, told
        self._due = False
        # As long as the agent was told at most: it hangs up soon after that.
        held = desk.assignment if desk.boot_id == report.boot_id else None
        if held is not None:
            hold_s = held.exchange_s
        self._timer = asyncio.get_running_loop().call_later(hold_s, self._late)
        desk.waiting.add(self)
        self.look()

    def look(self) -> None:
        """Answer, if there is something new or it is time."""
        desk, report = self._desk, self._report
        if desk.refused and report.boot_id in desk.refused:
            self._answer(Superseded(desk.refused[report.boot_id]))
            return
        mine = desk.assignment if desk.boot_id == report.boot_id else None
        if mine is None:
            if self._due:
                self._answer(Passive("the master is busy; ask again"))
        elif (
            self._due
            or desk.seq > report.seq
            or (mine.term, mine.version) != (report.have_term, report.have_version)
            or self._is_last(mine)
        ):
            self._answer(mine)

    def leave(self) -> None:
        """Nobody waits any more."""
        self._timer.cancel()
        self._desk.waiting.discard(self)

    def _is_last(self, mine: Assignment) -> bool:
        """Whether the node has only told that its workers have ended, and goes now."""
        stops = mine.directive is Directive.STOP and not mine.linger
        return stops and self._report.memory_round > self._report.follows

    def _late(self) -> None:
        self._due = True
        self.look()

    def _answer(self, outcome: "Assignment | Passive | Superseded") -> None:
        self.leave()
        if (
            isinstance(outcome, Assignment)
            and outcome.directive is Directive.STOP
            and not outcome.linger
        ):
            self._desk.dismissed = True
            self._desk.left.set()
        self._told(outcome)


class Loop:
    """Runs one job. ``run`` is its life; the other methods are for the server."""

    def __init__(
        self,
        platform: Platform,
        store: Store,
        rules: Rules,
        *,
        publish_s: float = 0.1,
        clock: Clock | None = None,
    ) -> None:
        self._platform, self._store, self._rules = platform, store, rules
        self._publish_s = publish_s
        self._clock = clock or Clock()
        self._job: Job | None = None
        self._mail: dict[tuple[NodeId, str], AgentReport] = {}
        self._facts: list[Event] = []
        self._awake = asyncio.Event()
        self._changed = asyncio.Event()
        self._left = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._desks: dict[NodeId, _Desk] = {}
        self._questions: dict[int, asyncio.Future[Candidates]] = {}
        self._asked = 0
        self._chores: dict[NodeId, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._listed = False
        self._turned_at = self._clock.now()
        self._saving = False
        self._saved_at = self._save_s = 0.0
        self._stored: JobStatus | None = None
        """The status before the journal was last written."""
        self.journal_error = ""
        self.journal_writes = 0
        self.exchanges = 0
        self.refused = 0

    # --- for the server ---

    @property
    def ready(self) -> bool:
        """It holds the term and knows its nodes: agents should come here, and nowhere else, also
        while the journal cannot be written."""
        return self._listed

    @property
    def silent_s(self) -> float:
        """Time since the loop last turned: it turns at least every few seconds."""
        return self._clock.now() - self._turned_at

    @property
    def name(self) -> str:
        """Of the job; empty as long as this master does not run it, and once it has ended where
        nodes come by themselves: who asks then is about to be in the next one."""
        return "" if self._job is None or self._is_over else self._job.job.metadata.name

    def status(self) -> JobStatus | None:
        """The state of the job, once there is one: what the next master would know of too."""
        if self._job is None:
            return None
        status = self._stored
        if status is None or not self._saving:
            status = self._stored = self._job.status(self._clock.now(), self._clock.wall())
        if self.journal_error:
            lost = Condition(
                type="JournalWritable",
                status="False",
                reason="JournalUnwritable",
                message=f"{self.journal_error}; training goes on, but a failure cannot be handled",
                last_transition_time=self._clock.wall(),
            )
            status = status.model_copy(update={"conditions": [*status.conditions, lost]})
        return status

    @property
    def adrift(self) -> bool:
        """Whether this master may have been replaced without knowing of it."""
        return self._platform.silent_s() > ADRIFT_S

    def exchange(self, node_id: NodeId, report: AgentReport, told: Told) -> Callable[[], None]:
        """Take in a report; tell the node's assignment once it differs from what it has.

        Or tell that the caller has to ask again later (:class:`Passive`), or that the node, or this
        life of it, was given up (``Superseded``).

        Returns what to call when the connection closes before that.
        """
        if self._job is None or not self._listed:
            told(Passive("this master is not ready yet: it takes over the job"))
            return lambda: None
        self.exchanges += 1
        if self._is_of_the_next_job(node_id, report):
            # An agent of the next job at this endpoint: its master will take our place.
            told(Passive("the job of this master has ended; ask again"))
            return lambda: None
        desk = self._desk(node_id)
        key = (node_id, report.boot_id)
        earlier = self._mail.get(key)
        if earlier is None or earlier.seq < report.seq:
            self._mail[key] = report
            self._awake.set()
        if desk.boot_id == report.boot_id and desk.seq < report.seq:
            desk.seq = report.seq
            desk.ring()  # answers the older ones: only the newest report of a node is held
        waiting = Waiting(desk, report, told, self._job.pace.exchange_s)

        def leave() -> None:
            waiting.leave()
            self.tell([Disconnected(node_id, report.boot_id, report.seq)])

        return leave

    async def candidates(self, round_number: int) -> Candidates:
        """What could be restored in a round, once its members have said what they hold.

        Raises:
            Passive: it is not known here yet.
        """
        if self._job is None or not self._listed:
            raise Passive("this master is not ready yet: it takes over the job")
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Candidates] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self.tell([Asked(number, round_number)])
            return await answer
        finally:
            del self._questions[number]

    def holders(self, step: int, round_number: int, lap: int) -> Holders:
        """Who has a checkpoint in memory.

        Raises:
            Passive: it is not known here yet.
        """
        if self._job is None or not self._listed:
            raise Passive("this master is not ready yet: it takes over the job")
        return self._job.checkpoints.holders(step, round_number, lap)

    @property
    def _is_over(self) -> bool:
        """Whether our job has ended and another one may follow it at this endpoint."""
        return not self._rules.can_create and self._job is not None and self._job.phase.ended

    def _is_of_the_next_job(self, node_id: NodeId, report: AgentReport) -> bool:
        """Whether our job has ended and this agent was not in it: another one starts here."""
        assert self._job is not None
        if not self._is_over:
            return False
        node = self._job.nodes.get(node_id)
        return node is None or node.boot_id != report.boot_id

    async def farewell(self, why: str, within_s: float) -> None:
        """End the job, and stay until every node that lives has been told."""
        self.tell([JobStopped(why)])
        job = self._job
        if job is None or self._tasks is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not all(self._was_dismissed(n.id) for n in job.nodes if n.alive):
                    self._left.clear()
                    await self._left.wait()

    def _was_dismissed(self, node_id: NodeId) -> bool:
        desk = self._desks.get(node_id)
        return desk is not None and desk.dismissed

    def tell(self, events: list[Event]) -> None:
        """Put facts into the mailbox."""
        self._facts.extend(events)
        self._awake.set()

    # --- its life ---

    async def run(self) -> None:
        """Hold the journal and run the job, until cancelled."""
        try:
            journal = await self._acquire()
            accepted = None if journal is None else journal.read_accepted()
            job = await self._until_works("get_job", lambda: self._platform.get_job(accepted))
            now, wall = self._clock.now(), self._clock.wall()
            known = self._platform.known
            # A journal that was put back from elsewhere may be older than what was told since.
            term = Term(max(known.term, journal.term if journal else 0) + 1)
            if journal is None:
                self._job = Job(job, self._rules, term=term, now=now, wall=wall)
                if known.term:
                    self._job.skip(known.round, known.node, known.event)
            else:
                self._job = Job.resume(job, self._rules, journal, term=term, now=now, wall=wall)
            bind(job=job.metadata.name, term=self._job.term)
            log.info("term_begins", extra={"round": self._job.round})
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._watch())
                tasks.create_task(self._publish())
                await self._turn_forever(self._job)
        finally:
            await self._store.release()

    async def _turn_forever(self, job: Job) -> None:
        wake_at = self._clock.now()
        while True:
            wake_at = min(wake_at, self._clock.now() + REST_S)
            await self._rest(wake_at)
            await self._gather()
            now = self._clock.now()
            self._turned_at = now
            events: list[Event] = []
            if now - wake_at > STALL_S:
                events.append(Stalled(now - wake_at))
                log.warning("master_stood_still", extra={"seconds": round(now - wake_at, 3)})
            mail, self._mail = self._mail, {}
            facts, self._facts = self._facts, []
            events += [Reported(node_id, report) for (node_id, _), report in mail.items()]
            events += facts
            seen = job.next_event
            step = job.step(events, now, self._clock.wall())
            wake_at = step.wake_at
            self._log(job, seen)
            for (node_id, _), report in mail.items():
                self._address(job, node_id, report)
            await self._carry_out(step)
            if events or step.effects:
                self._changed.set()

    async def _rest(self, wake_at: float) -> None:
        """Until there is mail, or it is time."""
        left = wake_at - self._clock.now()
        if not self._awake.is_set() and left > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._awake.wait()
        self._awake.clear()

    async def _gather(self) -> None:
        """Let decisions share a journal: in a storm it is written for a fifth of the time at most.

        A small job's takes a millisecond or two, and nothing is ever waited for.
        """
        left = self._saved_at + min(4 * self._save_s, GATHER_S) - self._clock.now()
        if self._save_s > STORM_SAVE_S and left > 0:
            await asyncio.sleep(left)

    def _address(self, job: Job, node_id: NodeId, report: AgentReport) -> None:
        """Whom the node's assignment is for, now that its report was taken in."""
        node = job.nodes.get(node_id)
        desk = self._desk(node_id)
        if node is not None and node.boot_id == report.boot_id and desk.boot_id != report.boot_id:
            if desk.boot_id:
                desk.assignment = None  # it was for the agent that was here before
            desk.boot_id, desk.seq = report.boot_id, report.seq

    async def _carry_out(self, step: Step) -> None:
        if step.journal is not None:
            await self._save(step.journal)
        # Answered once all is in place: a step may tell a node twice, and only the last one counts.
        news: dict[NodeId, _Desk] = {}
        for effect in step.effects:
            self._perform(effect, news)
        for node_id, desk in news.items():
            desk.ring()
            desk.refused.clear()
            if not desk.waiting and self._job is not None and not self._job.nodes.get(node_id):
                self._desks.pop(node_id, None)  # callers may go by any name
        self._left.set()  # somebody may have been given up who was waited for

    def _perform(self, effect: Effect, news: dict[NodeId, _Desk]) -> None:
        match effect:
            case Assign(node_id, assignment):
                desk = news[node_id] = self._desk(node_id)
                desk.assignment = assignment
            case Refuse(node_id, boot_id, message):
                self.refused += 1
                desk = news[node_id] = self._desk(node_id)
                desk.refused[boot_id] = message
            case Answer(number, candidates):
                answer = self._questions.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(candidates)
            case CreateNode(node_id, avoid):
                self._chore(node_id, lambda: self._platform.create_node(node_id, avoid))
            case DeleteNode(node_id, grace_s, _):
                self._chore(node_id, lambda: self._platform.delete_node(node_id, grace_s))

    def _desk(self, node_id: NodeId) -> _Desk:
        desk = self._desks.get(node_id)
        if desk is None:
            desk = self._desks[node_id] = _Desk(self._left)
        return desk

    def _chore(self, node_id: NodeId, call: Callable[[], Awaitable[None]]) -> None:
        """Do this for the node until it works; a newer wish for the same node replaces it."""
        assert self._tasks is not None
        old = self._chores.get(node_id)
        if old is not None:
            old.cancel()
        task = self._tasks.create_task(self._until_works("platform", call))
        self._chores[node_id] = task
        task.add_done_callback(
            lambda done: self._chores.pop(node_id) if self._chores.get(node_id) is done else None
        )

    async def _acquire(self) -> Journal | None:
        said = ""
        while True:
            try:
                return await self._store.acquire()
            except TransientError as error:
                if said != str(error):
                    said = str(error)
                    log.warning("passive", extra={"why": said})
                await asyncio.sleep(pause_s(len(RETRY_S), error))

    async def _save(self, journal: Journal) -> None:
        """Write the journal; nothing else happens until it is written."""
        self._saving = True
        began = self._clock.now()
        try:
            await self._save_until_it_works(journal)
        finally:
            self._saving = False
            self._saved_at = self._clock.now()
            self._save_s = self._saved_at - began

    async def _save_until_it_works(self, journal: Journal) -> None:
        tries = 0
        while True:
            try:
                await self._store.save(journal)
            except Unwritable as error:
                if self.journal_error != str(error):
                    self.journal_error = str(error)
                    log.error("journal_unwritable", extra={"why": self.journal_error})
                self._changed.set()
                wait_s = pause_s(tries, error)
                self._turned_at = self._clock.now() + wait_s  # to wait so long is no standstill
                await asyncio.sleep(wait_s)
                tries += 1
            else:
                self.journal_writes += 1
                if self.journal_error:
                    log.info("journal_writable")
                    self.journal_error = ""
                    self._changed.set()
                return

    async def _watch(self) -> None:
        tries = 0
        while True:
            try:
                async for events in self._platform.watch():
                    tries = 0
                    self.tell(list(events))
                    if not events:  # nothing for the core, but a condition may have changed
                        self._changed.set()
                    self._listed |= not self._platform.can_create or any(
                        isinstance(event, NodesListed) for event in events
                    )
            except TransientError as error:
                log.warning("watch_lost", extra={"why": str(error)})
            await asyncio.sleep(pause_s(tries))
            tries += 1

    async def _publish(self) -> None:
        tries = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            began = time.thread_time()  # not of the clock: to be held up is not to be busy
            status = self.status()
            wait_s = max(self._publish_s, PUBLISH_SHARE * (time.thread_time() - began))
            if status is not None:
                try:
                    async with self._publishing:
                        await self._platform.publish(status)
                    tries = 0
                except TransientError as error:
                    log.warning("publish_failed", extra={"why": str(error)})
                    self._changed.set()
                    wait_s += pause_s(tries, error)
                    tries += 1
            await asyncio.sleep(wait_s)

    async def last_words(self, within_s: float) -> None:
        """Publish the job's end if that is not done yet, and can be done so soon.

        Nothing else: of a job that goes on another master may be speaking already.
        """
        with contextlib.suppress(TimeoutError, TransientError, Superseded):
            async with asyncio.timeout(within_s), self._publishing:
                status = self.status()
                if status is not None and status.phase.ended and self._changed.is_set():
                    self._changed.clear()
                    await self._platform.publish(status)

    async def _until_works(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        tries = 0
        while True:
            try:
                return await call()
            except TransientError as error:
                log.warning("retrying", extra={"what": what, "why": str(error)})
                await asyncio.sleep(pause_s(tries, error))
                tries += 1

    def _log(self, job: Job, since: int) -> None:
        fresh = list(itertools.takewhile(lambda e: e.id >= since, reversed(job.events)))
        for event in reversed(fresh):
            fields = event.model_dump(exclude_none=True, exclude={"at", "type", "reason"})
            fields["why"] = fields.pop("message")
            level = logging.WARNING if event.type == "Warning" else logging.INFO
            log.log(level, event.reason, extra=fields)
