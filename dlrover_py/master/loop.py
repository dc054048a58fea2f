"""The master's loop, the only writer of the job's state: take in events, decide, journal, act.

Reports of agents and events of the platform are collected, and each turn hands all of them to
``Job.step``. What must outlive the master is stored before anything else happens. While the journal
cannot be written, the loop stands still on purpose: no round is formed that a later master would
not know. Running workers go on meanwhile, and agents get their last assignments again.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dlrover_py.master.core.events import (
    Assign,
    CreateNode,
    DeleteNode,
    Disconnected,
    Effect,
    Event,
    JobStopped,
    KeepEvidence,
    NodesListed,
    Refuse,
    Reported,
    RestoreAnswer,
    RestoreAsked,
    Rules,
    ServersPresent,
    ShardsAnswer,
    ShardsAsked,
    Slept,
    Stalled,
    TablesReported,
)
from dlrover_py.master.core.job import Job
from dlrover_py.master.core.state import DurableState, Step
from dlrover_py.master.evidence import EvidenceStore
from dlrover_py.master.journal_store import JournalStore, JournalUnwritableError
from dlrover_py.master.pauses import RETRY, pause_s
from dlrover_py.master.platform import Platform
from dlrover_py.master.servers import ServerMap
from dlrover_py.master.traces import RecoveryTimes
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    Directive,
    JobName,
    ReplicaLocations,
    RestoreCandidates,
)
from dlrover_py.protocol.bundles import bucket_of
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import SupersededError, TransientError
from dlrover_py.protocol.names import NodeId, Term
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.shards import NodeShardRequest, ShardAnswer
from dlrover_py.protocol.status import Condition, JobPhase, JobStatus
from dlrover_py.telemetry import bind

log = logging.getLogger("master.loop")

T = TypeVar("T")

REST_S = 5.0
"""Longest time between two turns, in seconds. Turns show that the loop is alive, and detect a
standstill of the master."""
STALL_S = 0.25
"""A turn that is later than this many seconds means that the master itself stood still."""
SLEEP_S = 1.0
"""Least seconds of a sleep of the machine that counts."""
STORM_SAVE_S = 0.01
"""If a write of the journal takes longer than this many seconds, turns are spaced out."""
GATHER_S = 0.1
"""Longest time that a turn waits for more events after a write of the journal; see `_gather`."""
PUBLISH_SHARE = 20
"""Factor between the CPU time of a status and the pause after it: 1/20 of the time at most."""


@dataclass(slots=True)
class Clock:
    """The sources of time: ``now`` is monotonic and decides, ``wall`` dates what people read."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # noqa: TID251 - the one wall clock of the master
    slept: Callable[[], float] = lambda: (
        time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    )
    """Returns the seconds that this machine has slept since its start."""


@dataclass(slots=True)
class _NodeMailbox:
    """The newest assignment of one node, and the requests that wait for it."""

    dismissed_any: asyncio.Event
    """Set when a node was dismissed or given up; all mailboxes share one event."""
    assignment: Assignment | None = None
    boot_id: str = ""
    """The agent process that the assignment is for."""
    seq: int = -1
    """Sequence number of the newest report of that agent process."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why an agent process is refused, by its boot id."""
    dismissed: bool = False
    """Whether the node's agent was sent its order to stop."""
    waiting: "set[PendingExchange]" = field(default_factory=set)

    def notify(self) -> None:
        """Answer the waiting requests for which there is something new; the others wait on."""
        for waiting in list(self.waiting):
            waiting.look()


class PassiveMasterError(TransientError):
    """This master does not hold the journal, or does not know its nodes yet."""


ReplyCallback = Callable[["Assignment | PassiveMasterError | SupersededError"], None]
"""A function that takes the outcome of an exchange."""


class PendingExchange:
    """A report that is not answered yet.

    There may be thousands of them, so it has neither a task nor a future. The answer comes when
    there is something new, or after the ``exchange_s`` that the agent was given.
    """

    __slots__ = ("_due", "_mailbox", "_on_reply", "_report", "_timer")

    def __init__(
        self, mailbox: _NodeMailbox, report: AgentReport, on_reply: ReplyCallback, hold_s: float
    ) -> None:
        self._mailbox, self._report, self._on_reply = mailbox, report, on_reply
        self._due = False
        # Not held longer than the agent was promised: it hangs up soon after that time.
        held = mailbox.assignment if mailbox.boot_id == report.boot_id else None
        if held is not None:
            hold_s = held.exchange_s
        self._timer = asyncio.get_running_loop().call_later(hold_s, self._late)
        mailbox.waiting.add(self)
        self.look()

    def look(self) -> None:
        """Answer if there is something new or the time is over; otherwise wait on.

        An agent process that was refused gets a SupersededError immediately. Otherwise the answer
        is the node's assignment, if the agent does not have it yet or the time is over. The answer
        is also given if a newer report has arrived, or if the agent goes after an order to stop.
        Without an assignment for this agent process, the answer is a PassiveMasterError once the
        time is over: the agent must try again.
        """
        mailbox, report = self._mailbox, self._report
        if mailbox.refused and report.boot_id in mailbox.refused:
            self._answer(SupersededError(mailbox.refused[report.boot_id]))
            return
        assignment = mailbox.assignment if mailbox.boot_id == report.boot_id else None
        if assignment is None:
            if self._due:
                self._answer(PassiveMasterError("the master is busy; try again"))
        elif (
            self._due
            or mailbox.seq > report.seq
            or (assignment.term, assignment.version) != (report.have_term, report.have_version)
            or self._is_last(assignment)
        ):
            self._answer(assignment)

    def leave(self) -> None:
        """End the wait without an answer. Further calls have no effect."""
        self._timer.cancel()
        self._mailbox.waiting.discard(self)

    def _is_last(self, assignment: Assignment) -> bool:
        """Return whether the agent was ordered to stop, and reports that its workers have ended.

        The result is False if the order lets the node stay until a checkpoint is stored.
        """
        stops = assignment.directive is Directive.STOP and not assignment.stay_until_stored
        return stops and self._report.memory_round > self._report.follows

    def _late(self) -> None:
        """Answer because the time is over."""
        self._due = True
        self.look()

    def _answer(self, outcome: "Assignment | PassiveMasterError | SupersededError") -> None:
        """End the wait, and pass the outcome on to the agent.

        If the outcome is an order to stop, the node is marked as dismissed, and tasks that wait for
        this are woken. An order that lets the node stay until a checkpoint is stored does not
        count.
        """
        self.leave()
        if (
            isinstance(outcome, Assignment)
            and outcome.directive is Directive.STOP
            and not outcome.stay_until_stored
        ):
            self._mailbox.dismissed = True
            self._mailbox.dismissed_any.set()
        self._on_reply(outcome)


class _Questions(Generic[T]):
    """Questions to the core that wait for its answer, by their numbers."""

    def __init__(self) -> None:
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[T]] = {}

    @contextlib.contextmanager
    def ask(self) -> Iterator[tuple[int, asyncio.Future[T]]]:
        """Return the number of a new question, and its answer; it is dropped at the end."""
        self._asked += 1
        number = self._asked
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, answer
        finally:
            del self._waiting[number]

    def answer(self, number: int, answer: T) -> None:
        """Answer a question; do nothing if its asker has left."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class Loop:
    """The loop of one job: :meth:`run` runs the job, the other methods serve the server."""

    def __init__(
        self,
        platform: Platform,
        store: JournalStore,
        rules: Rules,
        *,
        publish_s: float = 0.1,
        clock: Clock | None = None,
        evidence: EvidenceStore | None = None,
        servers: ServerMap | None = None,
        traces: RecoveryTimes | None = None,
    ) -> None:
        self._platform, self._store, self._rules = platform, store, rules
        self._publish_s, self._evidence = publish_s, evidence or EvidenceStore(None)
        self._clock, self._servers = clock or Clock(), servers or ServerMap()
        self._traces = traces or RecoveryTimes(None)
        self._job: Job | None = None
        self._mail: dict[tuple[NodeId, str], AgentReport] = {}
        self._facts: list[Event] = []
        self._awake = asyncio.Event()
        """Set when there is something for the next turn."""
        self._changed = asyncio.Event()
        """Set when the status may have changed."""
        self._dismissed_any = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._mailboxes: dict[NodeId, _NodeMailbox] = {}
        self._restore_questions: _Questions[RestoreCandidates] = _Questions()
        self._shard_questions: _Questions[ShardAnswer | None] = _Questions()
        self._node_tasks: dict[NodeId, asyncio.Task[None]] = {}
        """The background task that creates or deletes a node, by node."""
        self._tasks: asyncio.TaskGroup | None = None
        self._listed = False
        """Whether the platform has listed its nodes."""
        self._turned_at = self._clock.now()
        self._saving = False
        self._saved_at = self._save_s = 0.0
        self._stored: JobStatus | None = None
        """The status before the last write of the journal."""
        self.journal_error = ""
        """Why the journal cannot be written; empty if it can."""
        self.journal_writes = 0
        """Number of writes of the journal."""
        self.exchanges = 0
        """Number of reports that arrived."""
        self.refused = 0
        """Number of refusals."""

    # --- Requests of the server ---

    @property
    def ready(self) -> bool:
        """Whether this master holds the term and knows its nodes; once true, it stays true.

        Nodes are known once the platform has listed them. Agents must then use this master only,
        even while the journal cannot be written.
        """
        return self._listed

    @property
    def silent_s(self) -> float:
        """Seconds since the last turn of the loop; it turns at least every few seconds."""
        return self._clock.now() - self._turned_at

    @property
    def name(self) -> JobName | None:
        """Name and size of the job; None while this master does not run it.

        Where nodes come by themselves, it is also None once the job has ended: an agent that asks
        then belongs to the next job.
        """
        if self._job is None or self._is_over:
            return None
        size = self._job.live.spec.worker
        return JobName(name=self._job.state.job, fewest=size.minimum, most=size.replicas)

    def status(self) -> JobStatus | None:
        """Return the status of the job, or None before this master runs it.

        While the journal is being written, this is the status before that write: a later master
        would know nothing newer. While the journal cannot be written, the condition
        ``JournalWritable`` is False and says why.
        """
        if self._job is None:
            return None
        status = self._stored
        if status is None or not self._saving:
            status = self._job.status(self._clock.now(), self._clock.wall())
            status = status.model_copy(update={"recoveries": list(self._traces.newest)})
            self._stored = status
        if self.journal_error:
            lost = _journal_lost(self.journal_error, status.phase, self._clock.wall())
            status = status.model_copy(update={"conditions": [*status.conditions, lost]})
        return status

    @property
    def disconnected(self) -> bool:
        """Whether this master may have been replaced without its knowledge.

        That is so after ``platform_silence_s`` without contact to the platform.
        """
        return self._platform.silent_s() > self._rules.platform_silence_s

    def may_be_stale(self, age_s: float) -> bool:
        """Return whether a connection of this age may lead to a master that was replaced."""
        return age_s > self._rules.renew_connection_s and self.disconnected

    def exchange(
        self, node_id: NodeId, report: AgentReport, on_reply: ReplyCallback
    ) -> Callable[[], None]:
        """Queue a report for the next turn, and answer it once the agent needs another assignment.

        Without anything new, the outcome after ``exchange_s`` is the same assignment. It is a
        :class:`PassiveMasterError` if the agent has none by then; the agent must ask again. That
        outcome comes immediately if this master does not know its nodes yet. It also comes
        immediately if the job has ended and the agent belongs to the next one. The outcome is a
        :class:`SupersededError` if the node, or this agent process of it, was given up or is not
        known. An older report of the same agent process that still waits is answered now.

        Args:
            node_id: The node that reports.
            report: Its report.
            on_reply: Called once with the outcome, possibly before this method returns.

        Returns:
            A function to call if the connection closes before the outcome. The call ends the wait,
            and has the core suspect the node unless a newer report has arrived.
        """
        if self._job is None or not self._listed:
            on_reply(PassiveMasterError("this master is not ready yet: it is taking over the job"))
            return lambda: None
        self.exchanges += 1
        if self._is_of_the_next_job(node_id, report):
            # An agent of the next job: the master of that job will listen at this endpoint.
            on_reply(PassiveMasterError("the job of this master has ended; try again"))
            return lambda: None
        mailbox = self._mailbox(node_id)
        key = (node_id, report.boot_id)
        earlier = self._mail.get(key)
        if earlier is None or earlier.seq < report.seq:
            self._mail[key] = report
            self._awake.set()
        if mailbox.boot_id == report.boot_id and mailbox.seq < report.seq:
            mailbox.seq = report.seq
            mailbox.notify()  # answers the older ones: only the newest report of a node is held
        waiting = PendingExchange(mailbox, report, on_reply, self._job.live.pace.exchange_s)

        def leave() -> None:
            waiting.leave()
            self.add_events([Disconnected(node_id, report.boot_id, report.seq)])

        return leave

    async def candidates(self, round_number: int) -> RestoreCandidates:
        """Return the checkpoints in memory that could be restored in a round; maybe none.

        The answer comes once the members of the round have reported what they hold. It comes
        ``memory_wait_s`` after the question at the latest, with what is known by then. There is no
        other time limit: while the journal cannot be written, the caller waits.

        Raises:
            PassiveMasterError: This master does not run the job yet, or the platform has not listed
                its nodes yet.
        """
        self._running_job()
        with self._restore_questions.ask() as (number, answer):
            self.add_events([RestoreAsked(number, round_number)])
            return await answer

    async def shards(self, node: NodeId, asked: NodeShardRequest) -> ShardAnswer:
        """Return the answer to a worker's request about shards, once it can be given for good.

        What the answer says is in the journal. While that cannot be written, the caller waits.

        Args:
            node: The node of the worker.
            asked: The request, with the agent process that passes it on.

        Raises:
            PassiveMasterError: This master does not run the job yet, or it does not know yet which
                leases the earlier master had given.
        """
        self._running_job()
        with self._shard_questions.ask() as (number, answer):
            self.add_events([ShardsAsked(number, node, asked.boot_id, asked.request)])
            found = await answer
        if found is None:
            raise PassiveMasterError("this master waits for the reports of all nodes")
        return found

    def locations(self, checkpoint: CheckpointId) -> ReplicaLocations:
        """Return the nodes that have a checkpoint in memory; empty if no node has it.

        Raises:
            PassiveMasterError: This master does not run the job yet, or the platform has not listed
                its nodes yet.
        """
        return self._running_job().live.checkpoints.memory.locations(checkpoint)

    def _running_job(self) -> Job:
        """Return the job.

        Raises:
            PassiveMasterError: This master does not run it yet, or the platform has not listed its
                nodes yet.
        """
        if self._job is None or not self._listed:
            raise PassiveMasterError("this master is not ready yet: it is taking over the job")
        return self._job

    @property
    def _is_over(self) -> bool:
        """Whether the job has ended and another one may follow at this endpoint."""
        return not self._rules.can_create and self._job is not None and self._job.state.phase.ended

    def _is_of_the_next_job(self, node_id: NodeId, report: AgentReport) -> bool:
        """Return whether the job has ended and this agent, which was not in it, starts another."""
        assert self._job is not None
        if not self._is_over:
            return False
        node = self._job.live.nodes.get(node_id)
        return node is None or node.boot_id != report.boot_id

    async def end_job(self, why: str, within_s: float) -> None:
        """Request the end of the job; wait until all living nodes have their order to stop.

        There is no wait if the loop does not run the job yet. A job that has ended already keeps
        its phase.

        Args:
            why: The reason, in words; the job then ends as Failed. If empty, the job ends as
                Stopped, as by its user.
            within_s: Longest wait in seconds. The end of the wait is no error.
        """
        self.add_events([JobStopped(why)])
        if (job := self._job) is None or self._tasks is None:
            return
        nodes, was, turned = job.live.nodes, self._was_dismissed, self._dismissed_any
        await _until(lambda: all(was(n.id) for n in nodes if n.alive), turned, within_s)

    async def keep_evidence(self, within_s: float) -> None:
        """Keep what is there of the evidence that nodes still send, as this master ends.

        Args:
            within_s: Longest wait in seconds. Its end is no error.
        """
        if self._job is not None and self._job.detectors.end():
            turned_at, turned = self._turned_at, self._dismissed_any
            self.add_events([])
            within_s = await _until(lambda: self._turned_at > turned_at, turned, within_s)
        await self._evidence.finish(within_s)

    def _was_dismissed(self, node_id: NodeId) -> bool:
        """Return whether the node's agent was sent its order to stop."""
        mailbox = self._mailboxes.get(node_id)
        return mailbox is not None and mailbox.dismissed

    def add_events(self, events: list[Event]) -> None:
        """Queue events for the next turn, and wake the loop; nothing is decided here."""
        self._facts.extend(events)
        self._awake.set()

    # --- Turns ---

    async def run(self) -> None:
        """Hold the journal and run the job until canceled; then release the journal.

        The journal and the spec are awaited without a time limit. Each master begins a term that is
        higher than all that the journal and the platform know.

        Raises:
            ConfigError: The journal exists and cannot be read.
            ExceptionGroup: A task of the loop has failed with an error that is not transient. The
                group contains SupersededError if another master has taken the journal, or has begun
                a later term.
        """
        try:
            journal = await self._acquire()
            accepted = None if journal is None else journal.read_accepted()
            job = await self._until_works("get_job", lambda: self._platform.get_job(accepted))
            now, wall, known = self._clock.now(), self._clock.wall(), self._platform.known
            # A restored journal may be older than the last term that the platform knows.
            term = Term(max(known.term, journal.term if journal else 0) + 1)
            if journal is None:
                self._job = Job(job, self._rules, term=term, now=now, wall=wall)
                if known.term:
                    self._job.skip(known.round, known.node, known.event, known.server)
            else:
                self._job = Job.resume(job, self._rules, journal, term=term, now=now, wall=wall)
            bind(job=job.metadata.name, term=self._job.state.term)
            log.info("term_started", extra={"round": self._job.state.round})
            self._evidence.prepare(bucket_of(job))
            # Before a node begins.
            await self._until_works("servers", lambda: self._servers.open(job))
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                serving = self._servers.run(lambda seen: self.add_events([TablesReported(seen)]))
                tasks.create_task(serving)
                tasks.create_task(self._watch())
                tasks.create_task(self._publish())
                await self._turn_forever(self._job)
        finally:
            await self._store.release()

    async def _turn_forever(self, job: Job) -> None:
        """Repeat turns: wait, collect events, let the job decide, and carry out the result.

        A turn begins when there is an event or the job wants one, and at least every ``REST_S``. If
        a turn is late, the job learns of the standstill. It also learns of sleeps of the machine.
        """
        wake_at, slept_s = self._clock.now(), self._clock.slept()
        while True:
            wake_at = min(wake_at, self._clock.now() + REST_S)
            await self._rest(wake_at)
            await self._gather()
            now = self._turned_at = self._clock.now()
            before_s, slept_s = slept_s, self._clock.slept()
            events = _lost_time(now - wake_at, slept_s - before_s)
            mail, self._mail = self._mail, {}
            facts, self._facts = self._facts, []
            events += [Reported(node_id, report) for (node_id, _), report in mail.items()]
            events += facts
            seen = job.state.next_event
            step = job.step(events, now, self._clock.wall())
            wake_at = step.wake_at
            _log_events(job, seen)
            self._traces.take(job, events, seen, now)
            for (node_id, _), report in mail.items():
                self._address(job, node_id, report)
            await self._carry_out(step)
            if events or step.effects:
                self._changed.set()

    async def _rest(self, wake_at: float) -> None:
        """Wait until there is an event, or until this time."""
        wait_s = wake_at - self._clock.now()
        if not self._awake.is_set() and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._awake.wait()
        self._awake.clear()

    async def _gather(self) -> None:
        """Wait a little after a slow write of the journal, so that decisions share the next write.

        The wait is four times the write, but at most ``GATHER_S``. After writes of up to 25 ms, the
        journal is thus written for a fifth of the time at most. In a small job a write takes a
        millisecond or two, and there is no wait.
        """
        wait_s = self._saved_at + min(4 * self._save_s, GATHER_S) - self._clock.now()
        if self._save_s > STORM_SAVE_S and wait_s > 0:
            await asyncio.sleep(wait_s)

    def _address(self, job: Job, node_id: NodeId, report: AgentReport) -> None:
        """Set the agent process that the node's assignment is for, once its report was taken in.

        An assignment for the node's earlier agent process is dropped. Nothing happens if the report
        was refused, or its process is the same as before.
        """
        node = job.live.nodes.get(node_id)
        mailbox = self._mailbox(node_id)
        if (
            node is not None
            and node.boot_id == report.boot_id
            and mailbox.boot_id != report.boot_id
        ):
            if mailbox.boot_id:
                mailbox.assignment = None  # it was for the agent that was here before
            mailbox.boot_id, mailbox.seq = report.boot_id, report.seq

    async def _carry_out(self, step: Step) -> None:
        """Store the journal if it has changed, then carry out the effects of a step.

        The journal is awaited without a time limit. Calls of the platform are only started here.
        Waiting requests of agents with a new assignment or refusal are answered at the end. The
        mailbox of a name that is no node of the job is then dropped.

        Raises:
            SupersededError: Another master has taken the journal. No effect is carried out.
        """
        if step.journal is not None:
            if (ended := _end_of_servers(self._job, step)) is not None:
                self._servers.tell(ended)
            await self._save(step.journal)
        # Answered only now: a step may assign a node twice, and only the last assignment counts.
        news: dict[NodeId, _NodeMailbox] = {}
        for effect in step.effects:
            self._perform(effect, news)
        for node_id, mailbox in news.items():
            mailbox.notify()
            mailbox.refused.clear()
            if (
                not mailbox.waiting
                and self._job is not None
                and not self._job.live.nodes.get(node_id)
            ):
                self._mailboxes.pop(node_id, None)  # an unknown caller may use any name
        self._dismissed_any.set()  # a node may have been given up that `end_job` waits for

    def _perform(self, effect: Effect, news: dict[NodeId, _NodeMailbox]) -> None:
        """Carry out one effect, or start a background task that does.

        Mailboxes with a new assignment or refusal go into ``news``; the caller answers their
        requests. Nodes are created and deleted by background tasks. An answer is dropped if its
        asker has left.
        """
        match effect:
            case Assign(node_id, assignment):
                mailbox = news[node_id] = self._mailbox(node_id)
                mailbox.assignment = assignment
            case Refuse(node_id, boot_id, message):
                self.refused += 1
                mailbox = news[node_id] = self._mailbox(node_id)
                mailbox.refused[boot_id] = message
            case RestoreAnswer(number, candidates):
                self._restore_questions.answer(number, candidates)
            case ShardsAnswer(number, leases):
                self._shard_questions.answer(number, leases)
            case ServersPresent():
                self._servers.tell(effect)
            case KeepEvidence():
                self._evidence.keep(effect, lambda kept: self.add_events([kept]))
            case CreateNode(node_id, avoid, memory, stable, cpu):
                create = self._platform.create_node
                self._run_task(node_id, lambda: create(node_id, avoid, memory, stable, cpu))
            case DeleteNode(node_id, grace_s, _):
                self._run_task(node_id, lambda: self._platform.delete_node(node_id, grace_s))

    def _mailbox(self, node_id: NodeId) -> _NodeMailbox:
        """Return the node's mailbox; create it if there is none."""
        mailbox = self._mailboxes.get(node_id)
        if mailbox is None:
            mailbox = self._mailboxes[node_id] = _NodeMailbox(self._dismissed_any)
        return mailbox

    def _run_task(self, node_id: NodeId, call: Callable[[], Awaitable[None]]) -> None:
        """Start a task that repeats this call until it succeeds.

        A task for the same node that still runs is canceled: only the newest call counts.
        """
        assert self._tasks is not None
        old = self._node_tasks.get(node_id)
        if old is not None:
            old.cancel()
        task = self._tasks.create_task(self._until_works("platform", call))
        self._node_tasks[node_id] = task
        task.add_done_callback(
            lambda done: (
                self._node_tasks.pop(node_id) if self._node_tasks.get(node_id) is done else None
            )
        )

    async def _acquire(self) -> DurableState | None:
        """Wait until this master holds the journal, without a time limit, and return the journal.

        A new reason for the wait is logged.

        Returns:
            None if there is no journal yet: the job begins.

        Raises:
            ConfigError: The journal exists and cannot be read.
        """
        why = ""
        while True:
            try:
                return await self._store.acquire()
            except TransientError as error:
                if why != str(error):
                    why = str(error)
                    log.warning("passive", extra={"why": why})
                await asyncio.sleep(pause_s(RETRY.doublings, error))

    async def _save(self, journal: DurableState) -> None:
        """Write the journal, without a time limit, and measure the duration of the write.

        Until it is written, the loop makes no turn, and :meth:`status` shows the earlier status.
        """
        self._saving = True
        began = self._clock.now()
        try:
            await self._save_until_it_works(journal)
        finally:
            self._saving = False
            self._saved_at = self._clock.now()
            self._save_s = self._saved_at - began

    async def _save_until_it_works(self, journal: DurableState) -> None:
        """Repeat the write of the journal until it succeeds, without a time limit.

        Each new error is logged, and shown in the status until a write succeeds.

        Raises:
            SupersededError: Another master has taken the journal; this ends the loop.
        """
        tries = 0
        while True:
            try:
                await self._store.save(journal)
            except JournalUnwritableError as error:
                if self.journal_error != str(error):
                    self.journal_error = str(error)
                    log.error("journal_unwritable", extra={"why": self.journal_error})
                self._changed.set()
                wait_s = pause_s(tries, error)
                self._turned_at = self._clock.now() + wait_s  # this wait is not a standstill
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
        """Queue what the platform sees; watch again, after a pause, whenever the view is lost.

        The first complete list makes this master ready. Where nodes come by themselves, the first
        message does, also if it is empty.
        """
        tries = 0
        while True:
            try:
                async for events in self._platform.watch():
                    tries = 0
                    self.add_events(list(events))
                    if not events:  # nothing for the core, but a condition may have changed
                        self._changed.set()
                    self._listed |= not self._platform.can_create or any(
                        isinstance(event, NodesListed) for event in events
                    )
            except TransientError as error:
                log.warning("watch_failed", extra={"why": str(error)})
            await asyncio.sleep(pause_s(tries))
            tries += 1

    async def _publish(self) -> None:
        """Publish the status whenever it may have changed, at intervals of ``publish_s`` or more.

        A failure is logged, and the status of a later time is published after a pause. The interval
        is also at least 20 times the CPU time that the status has taken.

        Raises:
            SupersededError: Another master has begun a later term; this ends the loop.
        """
        tries = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            began = time.thread_time()  # CPU time: a thread that waits is not busy
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

    async def publish_end(self, within_s: float) -> None:
        """Publish the job's end, if that is still to be done and is possible within this time.

        Nothing else is published: another master may already publish for a job that goes on.
        Failures are ignored, as the journal has the end.
        """
        with contextlib.suppress(TimeoutError, TransientError, SupersededError):
            async with asyncio.timeout(within_s), self._publishing:
                status = self.status()
                if status is not None and status.phase.ended and self._changed.is_set():
                    self._changed.clear()
                    await self._platform.publish(status)

    async def _until_works(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until it succeeds, without a time limit; return its result.

        Each transient error is logged, and a pause of up to 2 s or ``retry_after`` follows. Any
        other error is raised.

        Args:
            what: Name of the call for the log.
            call: Makes one attempt.
        """
        tries = 0
        while True:
            try:
                return await call()
            except TransientError as error:
                log.warning("retrying", extra={"what": what, "why": str(error)})
                await asyncio.sleep(pause_s(tries, error))
                tries += 1


async def _until(over: Callable[[], bool], turned: asyncio.Event, within_s: float) -> float:
    """Wait until a condition is met; return the seconds that are left. Their end is no error.

    Args:
        over: The condition.
        turned: Set when it may have become true.
        within_s: Longest wait in seconds.
    """
    now = asyncio.get_running_loop().time
    ends_at = now() + within_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(ends_at):
            while not over():
                turned.clear()
                await turned.wait()
    return max(0.0, ends_at - now())


def _end_of_servers(job: Job | None, step: Step) -> ServersPresent | None:
    """Return what the servers of a job that its user has ended must hear; None if nothing.

    They hear it before the journal is stored. With a deleted job, its journal and the rights of
    this master are deleted at the same time, and its servers would wait for the next master.
    """
    if job is None or job.state.phase is not JobPhase.STOPPED:
        return None
    told = (effect for effect in step.effects if isinstance(effect, ServersPresent))
    return next((one for one in told if one.ended), None)


def _journal_lost(why: str, phase: JobPhase, at: float) -> Condition:
    """Return the condition that says that the journal cannot be written, and what follows.

    Args:
        why: Why it cannot be written.
        phase: Phase of the job.
        at: Unix time.
    """
    if phase is JobPhase.RUNNING:
        then = "training goes on, but neither a failure nor its end can be handled"
    else:
        then = "the job waits until it can be written"
    return Condition(
        type=ConditionType.JOURNAL_WRITABLE,
        status="False",
        reason=ConditionReason.JOURNAL_UNWRITABLE,
        message=f"{why}; {then}",
        last_transition_time=at,
    )


def _lost_time(late_s: float, slept_s: float) -> list[Event]:
    """Return the events of the seconds by which a turn is late, and for which the machine slept."""
    events: list[Event] = []
    if slept_s >= SLEEP_S:
        events.append(Slept(slept_s))
        log.info("machine_slept", extra={"seconds": round(slept_s, 3)})
    if late_s > STALL_S:
        events.append(Stalled(late_s))
        log.warning("master_stalled", extra={"seconds": round(late_s, 3)})
    return events


def _log_events(job: Job, since: int) -> None:
    """Log the job's events from this id on, as far as the job still keeps them."""
    fresh = list(itertools.takewhile(lambda e: e.id >= since, reversed(job.state.events)))
    for event in reversed(fresh):
        fields = event.model_dump(exclude_none=True, exclude={"at", "type", "reason"})
        fields["why"] = fields.pop("message")
        level = logging.WARNING if event.type == "Warning" else logging.INFO
        log.log(level, event.reason, extra=fields)
