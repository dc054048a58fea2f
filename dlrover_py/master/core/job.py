"""One job: takes events and the time, keeps the state, and returns what has to be done.

``Job.step(events, now, wall)`` is the only way in. ``now`` is a monotonic clock and decides;
``wall`` is Unix time and only dates what people read. Everything that must outlive the master is
in :class:`Journal`; when a step returns one, it must be on disk before the step's effects are
carried out.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from dlrover_py.master.core.checkpoints import Checkpoints
from dlrover_py.master.core.events import (
    Answer,
    Asked,
    Assign,
    CreateNode,
    DeleteNode,
    Disconnected,
    Event,
    JobChanged,
    JobStopped,
    Journal,
    Kind,
    NodeEnded,
    NodeRecord,
    NodeSeen,
    NodesListed,
    Opening,
    Refuse,
    Reported,
    Rules,
    Stalled,
    Step,
    Vacancy,
)
from dlrover_py.master.core.health import Finding, Health, Verdict
from dlrover_py.master.core.hosts import Hosts
from dlrover_py.master.core.nodes import Heard, Node, Nodes, Pace, Standing, pace
from dlrover_py.master.core.policy import (
    Budgets,
    Remedy,
    Ruling,
    after_restart,
    after_worker_failure,
    in_doubt,
    in_words,
    relaunch_delay,
)
from dlrover_py.master.core.rendezvous import (
    Candidate,
    Counts,
    Form,
    Size,
    World,
    arrange,
    verdict,
)
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    Directive,
    FailureKind,
    Progress,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.errors import Bug, ExitCode
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId, Round, Term, id_key
from dlrover_py.protocol.status import (
    Condition,
    Failure,
    JobEvent,
    JobPhase,
    JobStatus,
    LastCheckpoint,
    NodePhase,
    NodeRole,
    NodeStatus,
)
from dlrover_py.protocol.words import are, counted

ENDED = "the job has ended: it needs no nodes any more"
EVENTS_KEPT = 200
REFUSALS_TOLD = 32
"""In a minute: who calls by ever new names must not drive all else from the events."""
DOUBTS = 2
"""Early deaths of forked workers that are blamed on the fork; after them all starts are cold."""
GONE_KEPT = 64
TOLD_SINGLY = 8
ACCEPTED_BYTES = 256 * 1024
"""A larger spec is not journaled: a Secret takes 1 MiB, and round and members come first."""
MOST_DIGITS = 15
"""Of a node's number: no master comes to give larger ones."""
NAMED = 16
"""Nodes that a sentence names; of more it gives the number."""

LATE_WORD_S = 60.0
"""So long after a node was lost its platform may still say why."""
NO_ROOM_S = 20.0
"""A node that finds no place for so long may have a host that was kept out."""
KUBERNETES_GRACE_S = 30
"""A Pod's terminationGracePeriodSeconds where its template says nothing."""
BEFORE_KILL_S = 2.0
NEVER_JOINED = (
    "the command ended with code 0 and never joined the job: start the script with elastic-run"
)

TAKEN_UP = (Directive.RUN, Directive.CHECK)
"""What an agent uses its offer for."""
SHOWN = 8
"""Nodes or groups that an event names."""
BESIDE = ("checkpoint", "peer", "persist", "linger", "last_step_s")
"""Of an assignment: what changes nothing about the workers."""
HEALTHY: tuple[Kind, ...] = ("scale", "join")
"""A round that waits for these still runs: it may yet fail or succeed."""
BY_PLAN: tuple[Kind, ...] = (*HEALTHY, "drain")
"""Nothing is broken: all workers can end after the same step."""


class Job:
    """The state of one job and all decisions on it."""

    def __init__(
        self, job: ElasticJob, rules: Rules, *, term: Term, now: float, wall: float
    ) -> None:
        self.job = job
        self._accepted = _told(job)
        self._template = job.worker.template_hash
        self.rules = rules
        self.term = term
        self.pace = self._pace_of(job)
        self.nodes = Nodes(self.pace.lease_s, rules.suspect_s)
        self.phase = JobPhase.PENDING
        self.reason = "waiting for nodes"
        self.world: World | None = None
        self.round = Round(0)
        self.opening: Opening | None = None
        self.succeeded: set[NodeId] = set()
        self.health = Health()
        self.hosts = Hosts()
        self.checkpoints = Checkpoints()
        self._age_s = 0
        self._take_checkpoint_spec()
        self._unlisted = False
        """Which nodes there are is not known yet, from no journal and no list."""
        self.lived: dict[NodeId, int] = {}
        """Last incarnation of each node that is gone, where nodes come by themselves."""
        self.lived_least = 0
        """The same for all nodes that are not named there."""
        self._kept_off: set[NodeId] = set()
        """Nodes that were asked for on some hosts only, and have not spoken yet."""
        self.vacancies: list[Vacancy] = []
        self.exhausted = 0
        self.next_node = 0
        self.restart_count = 0
        self.restarts: dict[str, int] = {}
        self.doubts = 0
        self.cold = False
        self.last_exception: WorkerFailure | None = None
        self.last_failure: Failure | None = None
        self.out_of_memory = ""
        """The last failure or loss for want of memory, until training is steady again."""
        self._lost: dict[NodeId, tuple[float, int]] = {}
        """When each of the last nodes that were lost was, and the event that tells of it."""
        self.max_step: int | None = None
        self.progress: tuple[int, Progress] | None = None
        self.resumed = False
        self.lost_s: dict[str, float] = {}
        self.suspended_s = 0.0
        self.suspended_at: float | None = None
        self._outage: tuple[Kind, float] = ("start", now)
        """Why no step comes, or came last, and since when."""
        self._before: World | None = None
        """The round before this one, if it has ended by plan: it may be in its last step still."""
        self._speed = 0.0
        """Steps per second of the last round that had any."""
        self.formed_at = now
        self._enough_since: float | None = None
        self.ground: int | None = None
        self.started_at = wall
        self.ended_at: float | None = None
        self.events: deque[JobEvent] = deque(maxlen=EVENTS_KEPT)
        self.next_event = 1
        self._born: dict[int, float] = {}  # event id -> monotonic time at the root of its causes
        self._conditions: dict[str, Condition] = {}
        self._assignments: dict[NodeId, Assignment] = {}
        self._joined: list[NodeId] = []
        # What was last written and shown of each node, with what it was made from: most nodes are
        # the same the next time, and there may be thousands.
        self._records: dict[NodeId, tuple[tuple[object, ...], NodeRecord]] = {}
        self._shown: dict[NodeId, tuple[tuple[object, ...], NodeStatus]] = {}
        self._ordered: tuple[int, list[Node]] = (-1, [])
        self._checking: dict[NodeId, World] = {}
        """The group that a node is, or was last, checked in."""
        self._check_from: float | None = None
        """Since when there are nodes to be checked."""
        self._check_event = 0
        self._cause: dict[Round, tuple[int, float]] = {}
        self._now, self._wall = now, wall
        self._ahead = wall - now
        self._out = Step()
        self._lost_now: set[NodeId] = set()
        self._dirty = True
        self._last_loss = ""
        self._refusals: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._refused_at: deque[float] = deque(maxlen=REFUSALS_TOLD)
        self._record("JobStarted", f"job {job.metadata.name} wishes {self._wish()}")

    @property
    def _steady(self) -> float:
        """Unix time as it was when this master began, and the time since: a clock that is set
        anew meanwhile changes no duration."""
        return self._now + self._ahead

    # --- the way in ---

    def skip(self, number: int, node: int, event: int) -> None:
        """This round, node and event, and all below, were used by masters whose journal is lost.

        There may be more nodes than those masters could tell of: none is asked for before the
        platform has listed them.
        """
        self.round = Round(number)
        self.next_node = max(self.next_node, node + 1)
        self.next_event = max(self.next_event, event + 1)
        self._unlisted = self.rules.can_create

    def step(self, events: Iterable[Event], now: float, wall: float) -> Step:
        """Take in events, decide, and say what has to be done."""
        self._now, self._wall = now, wall
        for event in events:
            self._take(event)
        self._tell_of_joined()
        for lost in self.nodes.expire(now):
            if not lost.free:
                self._keep_out(lost.node)
            self._node_lost(lost.node, lost.why, free=lost.free)
        self._suspend_or_resume()
        self._find_culprit()
        self._forgive()
        self._check_nodes()
        self._go_on()
        while self._check_nodes():  # a node of a check may have been dismissed or taken up
            self._go_on()
        self._end_checks()
        self._look_after_checkpoints()
        self._settle()
        # What `resume` has left to do is in the first step's answer.
        out, self._out = self._out, Step()
        if self._lost_now:  # it may have been told something in this very step, before it was lost
            gone, self._lost_now = self._lost_now, set()
            out.effects = [e for e in out.effects if not (isinstance(e, Assign) and e.node in gone)]
        out.wake_at = min(out.wake_at, self.nodes.wake_at)
        if self._dirty:
            self._dirty = False
            out.journal = self.journal()
        return out

    def _go_on(self) -> None:
        self._let_back_in()
        self._plan_nodes()
        while True:
            if self._form():
                self._plan_nodes()  # who was left out may be one too many
            if not self._restart_nodes():
                return
            self._plan_nodes()

    @classmethod
    def resume(
        cls, job: ElasticJob, rules: Rules, journal: Journal, *, term: Term, now: float, wall: float
    ) -> "Job":
        """Go on from the journal of an earlier term.

        The members of its round get a lease, and the time that it takes all to come back at once,
        to report again; their workers go on meanwhile.
        """
        if term <= journal.term:
            raise Bug(f"term {term} does not follow the journal's term {journal.term}")
        self = cls(job, rules, term=term, now=now, wall=wall)
        self.events.clear()
        self.events.extend(journal.events)
        # What was recorded after the last write is lost; its numbers must not be used again.
        self.next_event = journal.next_event + EVENTS_KEPT
        self.phase, self.reason = journal.phase, journal.reason
        self.world, self.round = journal.world, journal.round
        self.succeeded = set(journal.succeeded)
        marks = {n: mark.model_copy(deep=True) for n, mark in journal.marks.items()}
        self.health = Health(journal.checks, marks)
        self.next_node = journal.next_node
        self.lived, self.lived_least = dict(journal.lived), journal.lived_least
        self.vacancies = [Vacancy(relaunches=r, not_before=now) for r in journal.vacancies]
        self.exhausted = journal.exhausted
        self.restart_count, self.restarts = journal.restart_count, dict(journal.restarts)
        self.last_exception, self.last_failure = journal.last_exception, journal.last_failure
        self.out_of_memory = journal.out_of_memory
        self.doubts, self.cold = journal.doubts, journal.cold
        self.max_step = self.ground = journal.max_step
        self.hosts = Hosts.read(journal.hosts, now, wall)
        self.lost_s = dict(journal.lost_s)
        self.suspended_s, self.suspended_at = journal.suspended_s, journal.suspended_at
        self.started_at, self.ended_at = journal.started_at, journal.ended_at
        self.checkpoints = Checkpoints(journal.stored, journal.passed)
        self._take_checkpoint_spec()
        if self.world is not None:
            self._tell_of_members(self.world)
        self.resumed = journal.resumed
        if not self.resumed:
            self._outage = ("loss", now)
        if journal.opening is not None:
            fresh = {"since": now, "hold_until": None, "suspected": None}
            self.opening = journal.opening.model_copy(update=fresh)
            self._outage = (self.opening.kind, now)
        rules = self.rules
        unreached_s, unrouted_s = (
            (rules.unreached_s, rules.unrouted_s) if rules.routed_s else (0.0, 0.0)
        )
        for record in journal.nodes:
            node = self.nodes.plan(record.id, record.relaunches, record.restarts)
            node.avoid, node.made_of, node.restart = record.avoid, record.made_of, record.restart
            if record.avoid:
                self._kept_off.add(node.id)
            if record.incarnation:
                member = self.world is not None and self.world.has(record.id, record.incarnation)
                self.nodes.recall(
                    record.id,
                    record.incarnation,
                    record.boot_id,
                    now,
                    member=member,
                    return_s=self.pace.return_s + rules.routed_s,
                    unreached_s=unreached_s,
                    unrouted_s=unrouted_s,
                )
                self.checkpoints.recall(record.id)
            if record.leaving:
                self.nodes.leave(self.nodes[record.id], record.leaving)
                grace_s = self._grace_s() if record.incarnation else 0.0
                self._out.effects.append(DeleteNode(record.id, grace_s, record.leaving))
        event = self._record(
            "MasterStarted",
            f"master of term {term} took over at round {self.round}; running workers go on",
        )
        if self.opening is not None:
            self._born[self.opening.cause] = now
        else:
            self._cause[self.round] = (event, now)
        if self.phase.ended:
            ending = next((e for e in reversed(self.events) if e.message == self.reason), None)
            self._conditions_ended(self.phase, ending.reason if ending else "", self.reason)
        if self.phase.ended and rules.can_create:  # the wish to end them may have been lost
            for node in self.nodes:
                effect = DeleteNode(node.id, self._grace_s(), self.reason)
                self._out.effects.append(effect)
        return self  # each node is told its place when it reports

    def journal(self) -> Journal:
        """All that the next master must know."""
        present = [n for n in self.nodes if n.phase is not NodePhase.GONE]
        return Journal(
            job=self.job.metadata.name,
            accepted=self._accepted,
            term=self.term,
            next_node=self.next_node,
            next_event=self.next_event,
            phase=self.phase,
            reason=self.reason,
            world=self.world,
            round=self.round,
            opening=self.opening,
            succeeded=sorted(self.succeeded),
            checks=self.health.number,
            marks=self.health.marks,
            hosts=self.hosts.journal(),
            nodes=[self._node_record(n) for n in present],
            lived=dict(self.lived),
            lived_least=self.lived_least,
            vacancies=[v.relaunches for v in self.vacancies],
            exhausted=self.exhausted,
            restart_count=self.restart_count,
            restarts=self.restarts,
            doubts=self.doubts,
            cold=self.cold,
            last_exception=self.last_exception,
            last_failure=self.last_failure,
            out_of_memory=self.out_of_memory,
            max_step=self.max_step,
            resumed=self.resumed,
            stored=self.checkpoints.stored,
            passed=list(self.checkpoints.passed),
            lost_s=self.lost_s,
            suspended_s=self.suspended_s,
            suspended_at=self.suspended_at,
            started_at=self.started_at,
            ended_at=self.ended_at,
            events=list(self.events),
        )

    def _node_record(self, node: Node) -> NodeRecord:
        made_from = (
            node.incarnation,
            node.boot_id,
            node.leaving,
            node.restarts,
            node.relaunches,
            node.avoid,
            node.made_of,
            node.restart,
        )
        kept = self._records.get(node.id)
        if kept is not None and kept[0] == made_from:
            return kept[1]
        record = NodeRecord(
            id=node.id,
            incarnation=node.incarnation,
            boot_id=node.boot_id,
            leaving=node.leaving,
            restarts=node.restarts,
            relaunches=node.relaunches,
            avoid=node.avoid,
            made_of=node.made_of,
            restart=node.restart,
        )
        self._records[node.id] = made_from, record
        return record

    # --- events ---

    def _take(self, event: Event) -> None:
        match event:
            case Reported(node_id, report):
                self._reported(node_id, report)
            case Disconnected(node_id, boot_id, seq):
                self.nodes.disconnected(node_id, boot_id, seq, self._now)
            case Asked(number, round_number):
                until = self._now + self.rules.memory_wait_s
                self.checkpoints.ask(number, round_number, until)
            case JobChanged(job):
                self._job_changed(job)
            case JobStopped(why, reason):
                if not self.phase.ended and why:
                    self._end(JobPhase.FAILED, reason, why)
                elif not self.phase.ended:
                    self._end(JobPhase.STOPPED, "JobStopped", "the job was ended by its user")
            case Stalled(seconds):
                self.nodes.stalled(self._now, seconds)
                if self.opening is not None and self.opening.hold_until is not None:
                    # Who is to blame is to be seen from what comes in now.
                    self.opening.hold_until = max(self.opening.hold_until, self._now)
            case NodeSeen():
                self._node_seen(event)
            case NodeEnded():
                self._node_ended(event)
            case NodesListed(listed, free):
                self._listed(listed, free=free)

    def _reported(self, node_id: NodeId, report: AgentReport) -> None:
        node = self.nodes.get(node_id)
        returns = False
        if not self.rules.can_create and not self.phase.ended:
            again = node is not None and node.phase is NodePhase.GONE
            if node is None:
                node = self.nodes.plan(node_id)
                node.lived = self.lived.pop(node_id, self.lived_least)
                report = report.model_copy(update={"incarnation": 0})
            elif again and (
                report.seq > node.seq if report.boot_id == node.boot_id else not report.incarnation
            ):
                self.nodes.readmit(node_id)
                returns = True
                report = report.model_copy(update={"incarnation": 0})
        heard = self.nodes.hear(node_id, report, self._now, self.term) if node else Heard.REFUSED
        if node is None or heard is Heard.REFUSED:
            why = "it was given up" if node else "it is not a node of this job"
            if node is not None and node.alive and not self.rules.can_create:
                why = "another agent has come in its place; is --node-rank the same on two nodes?"
            if report.boot_id not in self._refusals and self._may_tell_of_a_refusal():
                self._refusals.append(report.boot_id)
                words = f"a report of {node_id} was refused: {why}"
                self._record("NodeRefused", words, node=node_id)
            self._out.effects.append(Refuse(node_id, report.boot_id, f"{node_id}: {why}"))
            return
        if heard is Heard.STALE:
            return
        self._outrank(report)
        if heard is Heard.BORN:
            self._born_again(node, returns=returns)
        if report.leaving and not node.leaving:
            self._node_leaving(node, report.leaving)
        if report.gives_up and not (self.rules.can_create or self.phase.ended):
            self._end(JobPhase.FAILED, "NodeGaveUp", f"{node.id}: {report.gives_up}")
        if report.nested and report.boot_id != node.nested_told:
            node.nested_told = report.boot_id
            words = f"{node.id}: {report.nested}"
            self._record("NestedLauncher", words, node=node.id, warning=True)
        self.checkpoints.take(node.id, report)
        self._dirty |= heard is Heard.BORN
        if heard is Heard.BORN:
            self._uncheck(node)
        self._check_reported(node, report)
        if self._runs(node) and report.follows == self.round:
            self._round_reported(node, report)
        if self._assignments.get(node.id) is None or heard is Heard.BORN:
            self._greet(node)

    def _outrank(self, report: AgentReport) -> None:
        """The journal was lost if an agent knows a higher term or round than it held: go above.

        Only the one master that holds the journal's lock gets here, so nobody is overtaken.
        """
        if report.checks > self.health.number:  # else the agent would not take up the next one
            self.health = Health(report.checks, self.health.marks)
            self._checking.clear()
            self._dirty = True
        if report.have_term <= self.term and report.follows <= self.round:
            return
        self.term = Term(max(self.term, report.have_term + 1))
        self.round = Round(max(self.round, report.follows))
        self.world = None
        self._dirty = True
        self._assignments.clear()
        for node in self.nodes:
            self.nodes.tell(node, 0)
        self._record(
            "JournalBehind",
            f"an agent follows round {report.follows} of term {report.have_term}, which the "
            f"journal does not know; going on as term {self.term}",
            warning=True,
        )
        self._reassign()

    def _born_again(self, node: Node, *, returns: bool) -> None:
        """A new agent process speaks for this node; an earlier one, and its workers, are gone.

        Of one that returns after it was given up that is known already, and nothing is charged.
        """
        if node.incarnation == node.lived + 1:
            self._joined.append(node.id)
            return
        event = self._record(
            "NodeRestarted",
            f"{node.id} has a new agent (incarnation {node.incarnation})",
            node=node.id,
            warning=True,
        )
        if self.health.runs and node.id in self._checking:
            # The check may have ended it. Where it comes back each time, that must have an end.
            why = f"{node.id}'s agent was restarted in its check"
            self._obey(node, after_restart(why, **self._budgets(node)), "start", why, event)
            return
        if returns or self.phase not in (JobPhase.RUNNING, JobPhase.FORMING):
            return
        if self.world is not None and node.id in self.world.rank_of and not self._ended_well(node):
            why = f"{node.id}'s agent was restarted"
            self._obey(node, after_restart(why, **self._budgets(node)), "loss", why, event)

    def _tell_of_joined(self) -> None:
        """One event for each that came; one for all where many come in the same moment."""
        joined, self._joined = self._joined, []
        if len(joined) > TOLD_SINGLY:
            self._record("NodeJoined", f"{len(joined)} nodes are there: {_joined(joined)}")
            return
        for node_id in joined:
            self._record("NodeJoined", f"{node_id} is there", node=node_id)

    def _round_reported(self, node: Node, report: AgentReport) -> None:
        """News of the current round from one of its members."""
        if report.progress is not None:
            self._progressed(node, report.progress)
        if report.phase is WorkerPhase.FAILED and report.failure is not None:
            self._worker_failed(node, report.failure)
        elif report.cut_off:
            self._stopped_itself(node, report.cut_off)
        elif report.phase is WorkerPhase.SUCCEEDED:
            if self.opening is not None and self.opening.kind in HEALTHY:
                self.opening = None  # it is about to finish: too late to grow or shrink
            if self.opening is not None:
                return
            assert self.world is not None
            if node.id not in self.succeeded:
                self.succeeded.add(node.id)
                self._dirty = True  # it must not be taken for lost once it has gone
            if len(self.succeeded) == len(self.world.members):
                self._end(JobPhase.SUCCEEDED, "JobSucceeded", "all workers exited 0")

    def _stopped_itself(self, node: Node, why: str) -> None:
        """It was cut off and could not know whether it had been given up: nobody is charged."""
        opening = self.opening
        if opening is not None and opening.kind not in HEALTHY and opening.suspected is None:
            self._break()
            return  # many may have been cut off at once
        words = f"{node.id} has stopped its workers: {why}"
        event = self._record("NodeCutOff", words, node=node.id, warning=True)
        self._open("loss", words, event)

    def _progressed(self, node: Node, progress: Progress) -> None:
        assert self.world is not None
        rank = self.world.rank_of[node.id]
        if self.progress is not None and self.progress[0] < rank:
            return
        self.progress = (rank, progress)
        self._speed = progress.steps_per_s or self._speed
        before = self.max_step
        if before is None or progress.step > before:
            self.max_step = progress.step
        if self.resumed or self.opening is not None:
            return
        self.resumed = True
        cause, since = self._cause.get(self.round, (None, self.formed_at))
        first = progress.started_at_step
        again = 0 if before is None else max(0, before - first + 1)
        words = f"first step of round {self.round} is {first}"
        if before is not None:
            words += f"; step {before} had been reached: {_repeated(again)}"
        kind, down_since = self._outage
        repeating_s = again / self._speed if self._speed else 0.0
        self._lose(kind, self._now - down_since + repeating_s)
        self._record("TrainingResumed", words, cause=cause, since=since)
        self._dirty = True  # the end of the story of this round

    def _lose(self, kind: Kind, seconds: float) -> None:
        self.lost_s[kind] = self.lost_s.get(kind, 0.0) + max(0.0, seconds)

    def _worker_failed(self, node: Node, failure: WorkerFailure) -> None:
        opening = self.opening
        if opening is not None and opening.kind in HEALTHY:
            opening = None
        if opening is not None and opening.suspected is None:
            self._break()
            return  # the round had ended already: a consequence, not a cause
        if failure.kind is FailureKind.PEER:
            if opening is None:
                event = self._record(
                    "PeerLost", f"{node.id}: {in_words(failure)}", node=node.id, warning=True
                )
                self._open("failure", f"a connection between workers broke: {node.id}", event)
                assert self.opening is not None
                self.opening.hold_until = self._now + self.rules.cause_wait_s
                self.opening.suspected = (node.id, failure)
            return
        self._charge(node, failure)

    def _charge(self, node: Node, failure: WorkerFailure) -> None:
        """This failure is the root cause: decide what follows."""
        self.last_failure = Failure(at=self._wall, node=node.id, round=self.round, worker=failure)
        words = f"{node.id}: {in_words(failure)}"
        if failure.out_of_memory:
            self.out_of_memory = words
        event = self._record(
            "WorkerFailed",
            words,
            node=node.id,
            warning=True,
            cause=None if self.opening is None else self.opening.cause,
        )
        report = node.report
        spec = self.job.spec.checkpoint
        if (spec and spec.save_at_breakpoint) or (report and report.save_at_breakpoint):
            self._save_what_may_be_lost("a worker has failed", self.rules.drain_grace_s)
        if in_doubt(failure) and self.doubts < DOUBTS:
            self.doubts += 1
            self._dirty = True
            self._open("failure", f"{words} (started cold next: the fork may be to blame)", event)
            assert self.opening is not None
            self.opening.cold = True
            return
        ruling = after_worker_failure(failure, earlier=self.last_exception, **self._budgets(node))
        if failure.kind is FailureKind.EXCEPTION:
            self.last_exception = failure
        self._obey(node, ruling, "failure", f"{words} ({ruling.message})", event)

    def _budgets(self, node: Node) -> Budgets:
        worker = self.job.worker
        return {
            "restarts": node.restarts,
            "budget": self._restart_budget(node),
            "relaunches": node.relaunches,
            "relaunch_budget": worker.restart_count,
            "can_replace": self.rules.can_create,
        }

    def _restart_budget(self, node: Node) -> int:
        if self.rules.can_create:
            return self.job.worker.restart_count
        return (node.report.max_restarts or 0) if node.report is not None else 0

    def _obey(self, node: Node, ruling: Ruling, kind: Kind, reason: str, event: int) -> None:
        """Do what the policy says of a failure of this node."""
        node.restarts += 1
        self._dirty = True
        if ruling.remedy is Remedy.STOP:
            message = f"{node.id}: {ruling.message}"
            self._end(JobPhase.FAILED, ruling.reason, message, cause=event)
            return
        self._open(kind, reason, event)
        if ruling.remedy is Remedy.REPLACE:
            self._record(ruling.reason, f"{node.id}: {ruling.message}", node=node.id, cause=event)
            self.vacancies.append(self._vacancy(node.relaunches + 1))
            self._dismiss(node, "its restarts are used up", ExitCode.FAILED)

    def _job_changed(self, job: ElasticJob) -> None:
        if job.metadata.generation < self.job.metadata.generation:
            return
        old, self.job = self.job, job
        self._template = job.worker.template_hash
        self._take_checkpoint_spec()
        wished = self._pace_of(job)
        # Nodes go on at the pace that they were told: their lease must not become shorter.
        lease_s = max(wished.lease_s, self.pace.lease_s)
        self.pace = replace(wished, lease_s=lease_s)
        self.nodes.lease_s = lease_s
        if job.spec == old.spec or self.phase.ended:
            return
        self._dirty = True
        self._accepted = _told(job)
        if job.spec.suspend != old.spec.suspend:
            return  # seen to below, as the wish may also have changed while no master was there
        self.exhausted = 0  # a new wish is a new start for places that were given up
        event = self._record("SpecChanged", self._change_of_spec(old))
        if self.opening is None or self.opening.kind in HEALTHY:
            self._cause[Round(self.round + 1)] = (event, self._now)
        if job.worker.template != old.worker.template:
            for node in [n for n in self.nodes if n.stuck]:
                self._make_anew(node, event)

    def _change_of_spec(self, old: ElasticJob) -> str:
        """What has changed since the old spec, in words."""
        words = f"the job now wishes {self._wish()}"
        if self.job.worker.template != old.worker.template:
            words += (
                "; its template has changed: new nodes are made of it, and those that run stay as "
                "they are until `dlrover job restart`"
            )
        restart = self.job.spec.restart
        if restart is not None and restart != old.spec.restart:
            words += "; all nodes are replaced"
            words += ", one unit after the other" if restart.rolling else ", all at once"
        return words

    @property
    def _restart_at(self) -> str:
        restart = self.job.spec.restart
        return "" if restart is None else restart.at

    def _restart_nodes(self) -> bool:
        """Replace the nodes that were made before ``spec.restart`` was written; false if there is
        none that may be replaced now.

        A rolling restart takes one unit at a time. It goes on once the job trains at full size
        again, so that a template that cannot start costs one unit, and the job trains on.
        """
        restart = self.job.spec.restart
        rests = self.phase.ended or self.phase is JobPhase.SUSPENDED
        if restart is None or rests or self._unlisted or not self.rules.can_create:
            return False
        due = [
            node
            for node in self.nodes
            if node.standing is not Standing.OUT and node.restart != restart.at
        ]
        if restart.rolling and due:
            if not self._is_whole():
                return False
            ranks = self.world.rank_of if self.world is not None else {}
            due.sort(key=lambda node: ranks.get(node.id, math.inf), reverse=True)  # standbys first
            del due[self.job.worker.node_unit :]
        for node in due:
            self._node_leaving(node, "a restart of all nodes was asked for")
            grace = self._grace_s() if node.incarnation else 0.0
            self._out.effects.append(DeleteNode(node.id, grace, node.leaving))
        return bool(due)

    def _is_whole(self) -> bool:
        """Whether a round of full size trains, and all nodes that are wished are ready."""
        if self.phase is not JobPhase.RUNNING or self.opening is not None or self.world is None:
            return False
        if not self.resumed and self.max_step is not None:
            return False  # the script reports its steps, and has made none in this round
        worker, size = self.job.worker, self._size()
        wanted = worker.replicas + worker.standby_replicas - self.exhausted
        ready = self.nodes.count(Standing.READY)
        full = size.fit(min(size.desired, ready))
        return ready >= wanted and len(self.world.members) >= full

    def _make_anew(self, node: Node, cause: int | None) -> None:
        """Who cannot start, for want of an image or of room, would stay so for ever: what it was
        made of is not what is wished any more."""
        words = f"{node.id} could not start ({node.message}), and the template has changed"
        self._record("NodeMadeAnew", words, node=node.id, cause=cause)
        self.vacancies.append(Vacancy(relaunches=node.relaunches, not_before=self._now))
        self._dismiss(node, words, ExitCode.OK)

    def _suspend_or_resume(self) -> None:
        """Do as ``spec.suspend`` says."""
        if self.phase.ended or self.job.spec.suspend == (self.phase is JobPhase.SUSPENDED):
            return
        self._dirty = True
        if self.job.spec.suspend:
            self._suspend()
            return
        self.phase, self.reason = JobPhase.PENDING, "waiting for nodes"
        self.suspended_s += self._steady - (self.suspended_at or self._steady)
        self.suspended_at = None
        self.exhausted = 0  # all places are filled anew
        event = self._record("Resumed", f"resumed with {self._wish()}")
        self._open("start", "resumed", event)

    def _suspend(self) -> None:
        event = self._record("Suspended", "spec.suspend is true: all nodes are stopped")
        self._save_what_may_be_lost("the job is suspended", self._grace_s())
        self.phase, self.reason = JobPhase.SUSPENDED, "spec.suspend is true"
        self.suspended_at = self._steady
        self._close_round()
        self.vacancies.clear()
        for node in list(self.nodes):
            if node.phase is not NodePhase.GONE and not node.leaving:
                self._dismiss(node, "the job is suspended", ExitCode.OK)
        self._cause.clear()
        self._born[event] = self._now

    def _node_seen(self, seen: NodeSeen) -> None:
        node = self.nodes.get(seen.node)
        if node is None or node.phase is NodePhase.GONE:
            if self.rules.can_create:  # of an earlier life of the job: nobody wants it
                self._skip(seen.node)
                why = "it is not a node of this job"
                self._out.effects.append(DeleteNode(seen.node, 0.0, why))
            return
        self.nodes.observe(
            seen.node,
            near=seen.near,
            runs=seen.near and seen.runs,
            there=seen.there,
            topology=seen.topology,
            message=seen.message,
            cut_off=seen.cut_off,
            now=self._now,
        )
        node.grace_s = seen.grace_s
        if seen.made_of not in ("", node.made_of):
            node.made_of, self._dirty = seen.made_of, True
        if seen.leaving and not node.leaving:
            self._node_leaving(node, seen.leaving)
        elif node.stuck and seen.made_of not in ("", self._template):
            self._make_anew(node, None)  # that it cannot start came to light after the change

    def _skip(self, node_id: NodeId) -> None:
        """An id that is in use, though no journal knows of it, is not given to another node."""
        number = node_id.removeprefix("n")
        ours = number.isdecimal() and len(number) <= MOST_DIGITS
        if ours and int(number) >= self.next_node:
            self.next_node = int(number) + 1
            self._dirty = True

    def _node_leaving(self, node: Node, why: str) -> None:
        """It goes, with notice: the others go on without it at once, and nobody is charged."""
        self.nodes.leave(node, why)
        self._uncheck(node)
        if self._runs(node):
            self._save_what_may_be_lost(f"{node.id} is leaving", self._grace_s())
        event = self._record("NodeLeaving", f"{node.id} is leaving: {why}", node=node.id)
        unheard = node.unheard + (node.incarnation == 0)
        place = self._vacancy(0, unheard).model_copy(update={"relaunches": node.relaunches})
        self.vacancies.append(place)
        self._dirty = True
        if node.incarnation:
            self._greet(node)
        self._miss(node, "drain", f"{node.id} is leaving: {why}", event)

    def _node_ended(self, ended: NodeEnded) -> None:
        node = self.nodes.get(ended.node)
        if node is not None and ended.out_of_memory:
            self._ran_out_of_memory(node, ended.out_of_memory)
        if node is None or node.phase is NodePhase.GONE:
            return
        never_spoke = node.incarnation == 0
        node.unheard += never_spoke
        # Before the first round: later the command has been shown to work.
        usage = never_spoke and ended.exit_code == ExitCode.USAGE and not self.round
        usage = usage and not ended.free
        if ended.refused_by:
            self.hosts.strike(ended.refused_by, self._now, self._wall)
        why = ended.why + (f": {ended.output}" if never_spoke and ended.output else "")
        if never_spoke and ended.exit_code == ExitCode.OK and not ended.free:
            self._never_joined(node)
            return
        self._node_lost(node, why, free=ended.free, well=ended.exit_code == ExitCode.OK)
        self._lost.pop(node.id, None)  # its platform has said why
        if usage and not self.phase.ended:
            self._end(JobPhase.FAILED, "InvalidCommand", f"{node.id}: {why}")

    def _never_joined(self, node: Node) -> None:
        """The command did all that it was to do, without the job: another node would do the same.

        Before the first round the job fails. Later the place is given up, and the others go on.
        """
        if node.leaving or self.phase.ended or self.phase is JobPhase.SUSPENDED:
            self._node_lost(node, NEVER_JOINED, free=True, well=True)
            return
        self.nodes.give_up(node)
        self._lost_now.add(node.id)
        self._dirty = True
        self._out.effects.append(DeleteNode(node.id, 0.0, NEVER_JOINED))
        message = f"{node.id}: {NEVER_JOINED}"
        if not self.round:
            self._end(JobPhase.FAILED, "NeverJoined", message)
            return
        self.exhausted += 1
        self._last_loss = message
        self._record("NeverJoined", f"{message}; it is not replaced", node=node.id, warning=True)

    def _node_lost(self, node: Node, why: str, *, free: bool, well: bool = False) -> None:
        self.nodes.give_up(node)
        self._lost_now.add(node.id)
        self.checkpoints.drop(node.id)
        self._uncheck(node)
        if self.rules.can_create:
            self._assignments.pop(node.id, None)
        else:  # it may live again, and versions and incarnations only grow
            self._remember_life(node)
        self._dirty = True
        if self.rules.can_create and not node.leaving and not self.phase.ended:
            # At once: another node may take its rank, and two must not write the same checkpoint.
            self._out.effects.append(DeleteNode(node.id, 0.0, why))
        if node.leaving or self.phase.ended or self.phase is JobPhase.SUSPENDED:
            if not self.phase.ended:
                self._record("NodeLeft", f"{node.id} is gone: {why}", node=node.id)
                if not well:
                    self._cut_short(node)
            return
        self._last_loss = f"{node.id} is lost: {why}"
        event = self._record("NodeLost", self._last_loss, node=node.id, warning=not free)
        self._lost[node.id] = self._now, event
        while len(self._lost) > GONE_KEPT:
            del self._lost[next(iter(self._lost))]
        if self.rules.can_create:
            self._replace(node, event, free=free)
        self._miss(node, "loss", f"{node.id} is lost: {why}", event)

    def _remember_life(self, node: Node) -> None:
        """A master that follows must not give its incarnation once more. Of many nodes the oldest
        are not named any more: then all nodes that are not known begin above them."""
        self.lived.pop(node.id, None)
        self.lived[node.id] = node.incarnation
        while len(self.lived) > 2 * GONE_KEPT:
            oldest = next(iter(self.lived))
            self.lived_least = max(self.lived_least, self.lived.pop(oldest))

    def _ran_out_of_memory(self, node: Node, words: str) -> None:
        """Its platform knows why it ended. Often its connection has closed before, and it was
        given up as lost: then an event says it, once."""
        if node.phase is NodePhase.GONE:
            at, cause = self._lost.pop(node.id, (-math.inf, 0))
            if self._now - at > LATE_WORD_S:
                return
            self._record("OutOfMemory", f"{node.id} ran {words}", node=node.id, cause=cause,
                         warning=True)  # fmt: skip
        self.out_of_memory = f"{node.id}: {words}"
        self._dirty = True

    def _keep_out(self, node: Node) -> None:
        """The node's host may be at fault: no new node goes there for a while, if there are others
        to go to."""
        host = _host(node)
        if self.rules.can_create and host and any(n.alive and _host(n) != host for n in self.nodes):
            self.hosts.strike(host, self._now, self._wall)

    def _replace(self, node: Node, event: int, *, free: bool = False) -> None:
        """Have its place filled again, as long as its budget lasts."""
        relaunches = node.relaunches + (0 if free else 1)
        if relaunches <= self.job.worker.restart_count:
            self.vacancies.append(self._vacancy(relaunches, node.unheard))
            return
        self.exhausted += 1
        self._record(
            "ReplacementsExhausted",
            f"{node.id} is not replaced: {counted(node.relaunches, 'node')} "
            f"{'was' if node.relaunches == 1 else 'were'} lost in its place "
            "without steady progress",
            node=node.id,
            cause=event,
            warning=True,
        )

    def _listed(self, listed: frozenset[NodeId], *, free: bool) -> None:
        if self._unlisted:
            self._unlisted = False
            for node_id in listed:  # also of those that have ended
                self._skip(node_id)
        for node in list(self.nodes):
            if node.phase is NodePhase.GONE or node.id in listed:
                continue
            if node.seen or node.recalled:
                self._node_lost(node, "the platform no longer has it", free=free)
            elif self.rules.can_create and not (
                node.incarnation or node.leaving or self.phase.ended
            ):
                # The wish for it is still on its way, or was lost; or the list is older than it.
                self._out.effects.append(CreateNode(node.id, node.avoid))

    # --- checks before the training ---

    def _check_reported(self, node: Node, report: AgentReport) -> None:
        """Whether the node wishes to be checked, and how its check went."""
        if report.check is not None:
            self.health.take(node.id, report.checks, report.check)
        if not report.precheck or node.leaving or self._runs(node):
            return
        if self.health.enter(node.id, node.incarnation, exclude_slow=report.exclude_straggler):
            self._dirty = True
        held = node.id in self.health.open
        if held != node.held:
            self.nodes.hold(node, held)

    def _uncheck(self, node: Node) -> None:
        """It goes, or is gone."""
        self._checking.pop(node.id, None)
        self.health.forget(node.id)

    def _check_nodes(self) -> bool:
        """End the step of checks that runs, and begin the next one; false if nothing changes."""
        if self.phase.ended or self.phase is JobPhase.SUSPENDED:
            return False
        ran, number = self.health.runs, self.health.number
        self.health.expire(self._now, self.rules.check_s)
        self._found(self.health.judge())
        changed = ran is not self.health.runs
        self._dirty |= changed
        if not (self.health.runs or self.phase.ended) and (able := self._can_be_checked()):
            findings = self.health.plan(able, self._helpers())
            self._found(findings)
            if self.health.runs:
                self._begin_checks()
            changed |= bool(findings) or number != self.health.number
        self._wake([self.health.due])
        return changed

    def _can_be_checked(self) -> list[NodeId]:
        """Nodes for the next step; none as long as more can be expected that belong to it."""
        nodes = (self.nodes[n] for n in sorted(self.health.open, key=id_key))
        able = [n for n in nodes if n.report is not None and not n.report.warming]
        if not able:
            self._check_from = None
            return []
        if any(n.phase is not NodePhase.LIVE or n.acknowledged < n.told for n in able):
            return []  # each reports within its lease, or is given up
        if self.phase is not JobPhase.RUNNING and self.nodes.count(Standing.BUSY):
            return []  # as soon as it has answered it can help
        if self._check_from is None:
            self._check_from = self._now
        if self.phase is JobPhase.PENDING:
            fit = self.nodes.count(Standing.READY)
            if len(able) + fit < self._size().minimum:
                return []
            if self._size().fit(fit) and not self._checks_first():
                return []  # the others start without these, who join them later
        new = any(not self.health.marks[n.id].tried for n in able)
        until = self._check_from + self.rules.replacement_wait_s
        near = self.nodes.count(Standing.NEAR)
        if new and near and self.phase is not JobPhase.FORMING and self._now < until:
            self._wake([until])
            return []
        return [n.id for n in able]

    def _checks_first(self) -> bool:
        """Whether the first round waits: not for a node that comes when others have passed."""
        health = self.health
        if not health.open:
            return False
        passed = len(health.marks) > len(health.open)
        return health.runs or not passed or any(health.marks[n].tried for n in health.open)

    def _helpers(self) -> list[NodeId]:
        """Good nodes that do nothing: whoever trains is not disturbed."""
        trains = self.world.rank_of if self.world and self.phase is JobPhase.RUNNING else {}
        return [
            n
            for n, mark in self.health.marks.items()
            if mark.verdict is Verdict.GOOD
            and n not in trains
            and self.nodes[n].standing is Standing.READY
        ]

    def _begin_checks(self) -> None:
        """Tell the nodes of each group."""
        groups = self.health.groups
        self.health.due = self._now + self.rules.check_s
        for group in groups:
            there = [(n, n.report) for n in map(self.nodes.__getitem__, group) if n.report]
            candidates = [Candidate(n.id, n.incarnation, r.nproc, n.topology) for n, r in there]
            members = arrange(candidates, len(candidates))
            offer = next(r.offer for n, r in there if n.id == members[0].node)
            number = Round(self.health.number)
            for node_id in group:
                self._checking[node_id] = World(
                    round=number, members=members, master_addr=offer.addr, master_port=offer.port
                )
        words = ", ".join("+".join(group) for group in groups[:SHOWN])
        words += f", and {len(groups) - SHOWN} more groups" if len(groups) > SHOWN else ""
        cause = self._check_event or (self.opening.cause if self.opening else None)
        words = f"check {self.health.number}: {words}"
        self._check_event = self._record("CheckStarted", words, cause=cause)
        self._dirty = True
        for group in groups:
            for node_id in group:
                self._greet(self.nodes[node_id])

    def _found(self, findings: Sequence[Finding]) -> None:
        """The checks have shown something."""
        good = [f for f in findings if f.verdict is Verdict.GOOD]
        self._dirty |= bool(findings)
        if good:
            words = "; ".join(f"{f.nodes[0]} {f.words}" for f in good[:SHOWN])
            words += f"; and {len(good) - SHOWN} more" if len(good) > SHOWN else ""
            words = f"{counted(len(good), 'node')} {are(len(good))} fit to train: {words}"
            cause = self._check_event or None
            self._check_event = self._record("NodesChecked", words, cause=cause)
        for finding in findings:
            node = self.nodes[finding.nodes[0]]
            if finding.verdict is Verdict.GOOD:
                self.nodes.hold(node, False)
            elif finding.verdict is Verdict.OPEN:
                words = f"{' and '.join(finding.nodes)}: {finding.words}; checked again"
                cause = self._check_event or None
                self._record("NodesSuspected", words, cause=cause, warning=True)
        for finding in findings:  # once it is known who is left
            if finding.verdict in (Verdict.BAD, Verdict.SLOW) and not self.phase.ended:
                self._exclude(self.nodes[finding.nodes[0]], finding)
        opening = self.opening
        if good and opening is not None and opening.kind == "start":
            opening.cause = self._check_event

    def _exclude(self, node: Node, finding: Finding) -> None:
        """The node is not fit to train: another takes its place, or the others do without it."""
        worker = self.job.worker
        left = self.nodes.present - 1
        enough = left >= worker.minimum
        if self.rules.can_create:
            places = worker.replicas + worker.standby_replicas - self.exhausted - 1
            enough = node.relaunches < worker.restart_count or places >= worker.minimum
        slow = finding.verdict is Verdict.SLOW
        words = f"{node.id} is {'slow' if slow else 'not fit to train'}: {finding.words}"
        if slow and not enough:
            self._record(
                "NodeSlow", f"{words}; it is kept, for too few would be left", node=node.id
            )
            self.health.decide(node.id, Verdict.GOOD)
            self.nodes.hold(node, False)
            return
        event = self._record(
            "NodeExcluded", words, node=node.id, cause=self._check_event or None, warning=True
        )
        if not enough:
            message = (
                f"{words}; fewer than {counted(worker.minimum, 'node')} {are(worker.minimum)} left"
            )
            self._end(JobPhase.FAILED, "NetworkCheckFailed", message, cause=event)
            return
        if self.rules.can_create:
            self._keep_out(node)
            self._replace(node, event)
        self._dismiss(node, words, ExitCode.FAILED)

    def _end_checks(self) -> None:
        """Who passed is told what comes next; others are not until they are checked again, for
        only by taking up a check does an agent come to make another offer."""
        if self.health.runs or self.phase.ended:
            return
        for node_id in list(self._checking):
            node = self.nodes[node_id]
            if not node.held and node.acknowledged >= node.told:
                del self._checking[node_id]
                self._greet(node)

    # --- checkpoints ---

    def _take_checkpoint_spec(self) -> None:
        spec = self.job.spec.checkpoint
        policy = spec.model_dump(mode="json", by_alias=True, exclude_none=True) if spec else {}
        if policy or self.checkpoints.in_use:
            # Of the round: workers count on from there, to know how often something fails.
            policy["ageS"] = self._age_s
        self._checkpoint_json = json.dumps(policy, separators=(",", ":")) if policy else ""
        self.checkpoints.storable |= spec is not None and spec.dir is not None

    def _tell_of_members(self, world: World) -> None:
        self._age_s = max(0, round(self._steady - self.started_at - self.suspended_s))
        self._take_checkpoint_spec()
        spec, members = self.job.spec.checkpoint, []
        for member in world.members:
            node = self.nodes.get(member.node)
            members.append((member.node, node.topology if node else ()))
        self.checkpoints.new_round(world.round, members, replicas=spec is None or spec.replicas > 0)

    def _save_what_may_be_lost(self, why: str, grace_s: float, of: World | None = None) -> None:
        """The newest state in memory goes to storage, if there is one, before its nodes go.

        Args:
            why: in words.
            grace_s: in vain after this time.
            of: whose state it is; None for the round that runs.
        """
        world = of or self.world
        if world is None or self.phase.ended:
            return
        until = self._now + grace_s
        self.checkpoints.wish(
            why, world.rank_of, world.round, now=self._now, until=until, stay=True
        )

    def _look_after_checkpoints(self) -> None:
        outcome = self.checkpoints.look(
            self._now, self._wall, term=self.term, persist_s=self.rules.persist_s
        )
        for note in outcome.notes:
            self._record(note.reason, note.message, warning=note.warning)
        self._dirty |= outcome.kept
        for node_id in sorted(outcome.tell, key=id_key):
            node = self.nodes.get(node_id)
            if node is not None and node.alive and node_id in self._assignments:
                self._greet(node)
        self._out.effects += [Answer(number, found) for number, found in outcome.answers]
        self._wake([outcome.wake_at])

    # --- what follows ---

    def _miss(self, node: Node, kind: Kind, reason: str, event: int) -> None:
        """A node cannot be in the next round; if it was in this one, the round is over."""
        if self.world is None or not self.world.has(node.id, node.incarnation):
            return
        if self._ended_well(node):
            return
        self._open(kind, reason, event)

    def _open(self, kind: Kind, reason: str, event: int) -> None:
        """A next round is needed. The first cause is kept; a real one replaces a suspected one."""
        if self.phase.ended or self.phase is JobPhase.SUSPENDED:
            return
        old = self.opening
        if old is not None and old.suspected is None and old.kind not in HEALTHY:
            if kind not in BY_PLAN:
                self._break()
            return
        since = self._now if old is None or old.kind in HEALTHY else old.since
        broken = old is not None and (old.broken or old.kind not in BY_PLAN)
        self.opening = Opening(kind=kind, reason=reason, cause=event, since=since, broken=broken)
        self._born.setdefault(event, since)
        self._dirty = True

    def _break(self) -> None:
        """A fault comes on top of a plan: nobody waits for a last step that cannot end."""
        opening = self.opening
        if opening is None or opening.broken or opening.kind not in BY_PLAN:
            return
        opening.broken = self._dirty = True
        if self.phase is JobPhase.FORMING:
            self._reassign()

    def _cut_short(self, node: Node) -> None:
        """Who was to leave by plan is gone: if it has not said that its workers have ended, those
        of the others may wait for them in a last step that cannot end."""
        clean = node.report.memory_round if node.report is not None else 0
        ending = (self._before, self.world if self.opening is not None else None)
        if not any(w and w.has(node.id, node.incarnation) and clean <= w.round for w in ending):
            return
        self._break()
        if self._before is not None:
            self._before = None
            self._reassign()

    def _plan_nodes(self) -> None:
        """Ask for nodes that are missing, dismiss those that are too many."""
        rests = self.phase.ended or self.phase is JobPhase.SUSPENDED
        if not self.rules.can_create or self._unlisted or rests:
            return
        worker = self.job.worker
        wanted = max(0, worker.replicas + worker.standby_replicas - self.exhausted)
        finishing = self.succeeded and self.opening is None
        if self.exhausted and wanted < worker.minimum and not finishing:
            self._end(
                JobPhase.FAILED,
                "ReplacementsExhausted",
                f"{self.exhausted} places were given up: fewer than {worker.minimum} are left"
                f"{self._last_loss and f'; the last: {self._last_loss}'}",
            )
            return
        missing = wanted - self.nodes.present
        if missing < 0:
            _, since = self._cause.get(Round(self.round + 1), (0, -math.inf))
            if self._now < (settled := since + self.rules.settle_s):
                self._wake([settled])  # a smaller wish may be taken back at once
            else:
                self._trim(-missing)
        if missing <= 0:
            self.vacancies.clear()
            return
        del self.vacancies[missing:]
        due = [v for v in self.vacancies if v.not_before <= self._now]
        later = [v for v in self.vacancies if v.not_before > self._now]
        fresh = missing - len(due) - len(later)
        for place in due + [Vacancy(relaunches=0, not_before=0.0)] * fresh:
            node_id = NodeId(f"n{self.next_node}")
            self.next_node += 1
            node = self.nodes.plan(node_id, place.relaunches, unheard=place.unheard)
            node.made_of, node.restart = self._template, self._restart_at
            self._ask_for(node)
            self._dirty = True
        self.vacancies = later
        self._wake([v.not_before for v in later])

    def _ask_for(self, node: Node) -> None:
        node.avoid = self.hosts.kept_out(self._now)
        if node.avoid:
            self._kept_off.add(node.id)
        self._out.effects.append(CreateNode(node.id, node.avoid))

    def _let_back_in(self) -> None:
        """A node that finds no place is asked for anew once a host that was kept out from it no
        longer is; and if there is no other room, that is soon."""
        for node_id in sorted(self._kept_off, key=id_key):
            node = self.nodes.get(node_id)
            if node is None or node.incarnation or node.standing is Standing.OUT:
                self._kept_off.discard(node_id)
                continue
            if node.pending_since == math.inf:
                continue
            until = node.pending_since + NO_ROOM_S
            if self._now >= until:
                self.hosts.pardon(node.avoid)
                self._dirty = True
            elif set(node.avoid) <= set(self.hosts.kept_out(self._now)):
                self._wake([until, self.hosts.next_end(self._now)])
                continue
            words = f"{node.id} found no place but on hosts that were kept out ({node.message})"
            self._record("HostsLetIn", words, node=node.id)
            self.vacancies.append(Vacancy(relaunches=node.relaunches, not_before=self._now))
            self._dismiss(node, words, ExitCode.OK)

    def _trim(self, surplus: int) -> None:
        """Dismiss nodes that nobody wants, first those that are missed least; members last,
        and only once a smaller round has been formed without them."""
        order = {Standing.PENDING: 0, Standing.NEAR: 1, Standing.BUSY: 2, Standing.READY: 2}
        spare = [
            n
            for n in self.nodes
            if n.standing in order and (self.world is None or n.id not in self.world.rank_of)
        ]
        spare.sort(key=lambda n: id_key(n.id), reverse=True)
        spare.sort(key=lambda n: order[n.standing])
        for node in spare[:surplus]:
            self._dismiss(node, "the job wishes fewer nodes", ExitCode.OK)

    def _dismiss(self, node: Node, why: str, code: ExitCode) -> None:
        """Let a node end."""
        if self._runs(node):
            self._save_what_may_be_lost(f"{node.id} is let go", self._grace_s())
        self.nodes.leave(node, why)
        self._uncheck(node)
        self._dirty = True
        if node.incarnation:
            self._assign(node, Directive.STOP, why, exit_code=int(code))
        if self.rules.can_create:
            grace = self._grace_s() if node.incarnation else 0.0
            self._out.effects.append(DeleteNode(node.id, grace, why))

    def _form(self) -> bool:
        """Form the next round, if one is needed and everybody who can come has come."""
        if self.phase.ended or self.phase is JobPhase.SUSPENDED:
            return False
        size = self._size()
        ready = self.nodes.count(Standing.READY)
        current = len(self.world.members) if self.world is not None else 0
        shrink = 0 < size.fit(size.desired) < current
        if (
            self.opening is not None
            and self.opening.kind in HEALTHY
            and shrink != (self.opening.kind == "scale")
        ):
            self.opening, self._dirty = None, True  # the wish has changed again
        if self.opening is None:
            self._look_for_change(size, ready, current)
        opening = self.opening
        if opening is None or opening.hold_until is not None:
            return False
        if opening.kind == "start" and self._checks_first():
            count = len(self.health.open)
            words = f"{counted(count, 'node')} {are(count)} checked first"
            self.reason = f"{words} ({opening.reason})"
            there = ready + len(self.health.open)
            if not size.fit(there):
                words = f"{there} of at least {counted(size.minimum, 'node')} {are(there)} there"
                self._too_late(opening, words)
            return False
        if self._last_call(size, ready, opening):
            return False
        near, waited = self._near(opening), bool(self.health.marks)
        counts = Counts(ready, self.nodes.count(Standing.BUSY), near)
        answer = verdict(
            size,
            counts,
            opened_at=opening.since,
            now=self._now,
            # Who was near has been waited for before the check.
            wait_s=0.0 if opening.kind == "start" and waited else self.rules.replacement_wait_s,
        )
        if isinstance(answer, Form):
            if opening.kind == "join" and answer.size <= current:
                self.opening = None  # those who were to come did not: nothing is gained
                self._dirty = True
                return False
            self._new_round(answer.size, opening)
            return True
        if answer.until is not None:
            self._wake([answer.until])
        if not size.fit(ready) and self._too_late(opening, answer.why):
            return False
        if opening.kind in ("failure", "loss", "drain", "start"):
            self.reason = f"{answer.why} ({opening.reason})"
            if self.phase is JobPhase.RUNNING:
                self.phase, self._dirty = JobPhase.FORMING, True
                # The round is over, so its workers are stopped while the next one is waited for.
                self._reassign()
            elif self.phase is JobPhase.FORMING and self.world is not None:
                first = self.nodes.get(self.world.members[0].node)
                if first is not None and first.alive and not first.leaving:
                    self._greet(first)  # it may have taken up the round by now
        return False

    def _last_call(self, size: Size, ready: int, opening: Opening) -> bool:
        """Whether others may still come to the first round: where nodes come by themselves nobody
        knows how many will, so they get a moment once there are enough."""
        if self.rules.can_create or opening.kind != "start" or not size.fit(ready):
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = self._now
        until = self._enough_since + self.rules.last_call_s
        if size.fit(ready) == size.fit(size.desired) or self._now >= until:
            return False
        self._wake([until])
        return True

    def _too_late(self, opening: Opening, why: str) -> bool:
        """Whether too few nodes have been there for too long; then the job has failed."""
        until = opening.since + self.rules.join_timeout_s
        if self._now < until:
            self._wake([until])
            return False
        words = f"{why}, after {self.rules.join_timeout_s:g} s ({opening.reason})"
        self._end(JobPhase.FAILED, "RendezvousTimeout", words, cause=opening.cause)
        return True

    def _near(self, opening: Opening) -> int:
        """Nodes that are worth waiting for."""
        near = self.nodes.count(Standing.NEAR)
        if opening.kind == "start":  # nobody runs yet: better all at once than one after the other
            return near + self.nodes.count(Standing.PENDING, alive=True)
        if near and self.nodes.any_warm:
            # A node that starts has its imports before it; those who are there go on in a moment.
            near = self.nodes.count(Standing.NEAR, alive=True)
        elif near:
            near -= self.nodes.count(Standing.NEAR, alive=False, runs=False)  # pulls its image, say
        return near

    def _look_for_change(self, size: Size, ready: int, current: int) -> None:
        """A healthy round ends only where another size is possible and wished."""
        if self.world is None:
            event = self.next_event - 1
            self._open("start", "the job starts", event)
        elif self.succeeded:
            return  # it is about to finish
        elif 0 < size.fit(size.desired) < current:
            event, since = self._cause.get(Round(self.round + 1), (0, self._now))
            if self._now < (settled := since + self.rules.settle_s) and event:
                self._wake([settled])
                return
            if not event:  # the wish has changed while no master was there
                event = self._record("SpecChanged", f"the job now wishes {self._wish()}")
            self._open("scale", f"the job now wishes {counted(size.desired, 'node')}", event)
            self._backdate(since)
        elif size.fit(ready) > current:
            event, since = self._cause.get(Round(self.round + 1), (0, self._now))
            if not event:
                event = self._record(
                    "RoomToGrow",
                    f"{counted(ready, 'node')} {are(ready)} ready and {current} {are(current)} in "
                    "the round",
                )
            self._open("join", f"{counted(size.fit(ready), 'node')} can be in the round", event)

    def _backdate(self, since: float) -> None:
        if self.opening is not None:
            self.opening.since = since

    def _find_culprit(self) -> None:
        """If no other cause turned up: it is the failure of the worker that reported it."""
        opening = self.opening
        if opening is None or opening.suspected is None or opening.hold_until is None:
            return
        node_id, failure = opening.suspected
        due = opening.hold_until
        if self._now >= due and self._awaits_news(but=node_id, since=opening.since):
            due += self.pace.lease_s
        if self._now < due:
            self._wake([due])
            return
        node = self.nodes.get(node_id)
        if node is not None and node.alive:
            self._charge(node, failure)
        if self.opening is opening:
            opening.suspected = opening.hold_until = None

    def _awaits_news(self, *, but: NodeId, since: float) -> bool:
        """Whether some other member, which may be the cause, has not been heard of since then."""
        found = (self.nodes.get(m.node) for m in (self.world.members if self.world else ()))
        return any(
            node is not None and node.id != but and self.nodes.unheard(node, since)
            for node in found
        )

    def _new_round(self, size: int, opening: Opening) -> None:
        previous: list[tuple[NodeId, tuple[str, ...]]] = []
        if self.world is not None:
            for member in self.world.members:
                node = self.nodes.get(member.node)
                previous.append((member.node, node.topology if node else ()))
        ready = [n for n in self.nodes if n.standing is Standing.READY]
        candidates = [
            Candidate(n.id, n.incarnation, n.report.nproc, n.topology, n.report.role)
            for n in ready
            if n.report is not None
        ]
        members = arrange(candidates, size, previous)
        first = self.nodes[members[0].node].report
        assert first is not None
        self.round = Round(self.round + 1)
        old = self.world
        self._before = old if self._by_plan() else None
        self.world = World(
            round=self.round,
            members=members,
            master_addr=first.offer.addr,
            master_port=first.offer.port,
        )
        for member in members:  # a good one that helped with the check of others
            if self._checking.pop(member.node, None) is not None:
                self.health.withdraw(member.node)
        if self.resumed:  # else an earlier cause has to answer for the whole time
            healthy = opening.kind in HEALTHY
            self._outage = opening.kind, self._now if healthy else opening.since
        if opening.kind in ("failure", "loss"):
            self.restart_count += 1
        if opening.kind != "start":
            self.restarts[opening.kind] = self.restarts.get(opening.kind, 0) + 1
        self.phase = JobPhase.RUNNING
        self.reason = opening.reason
        self.formed_at, self.ground = self._now, self.max_step
        self.cold = opening.cold or self.doubts >= DOUBTS
        self.succeeded.clear()
        self.progress, self.resumed = None, False
        change = self._change_in_words(old, self.world)
        event = self._record(
            "RoundFormed",
            f"round {self.round}: {counted(size, 'node')}, "
            f"{counted(self.world.world_size, 'worker')}{change}; because {opening.reason}",
            cause=opening.cause,
            since=opening.since,
        )
        self._cause = {self.round: (event, opening.since)}
        self._born = {event: opening.since}
        self.opening = None
        self._tell_of_members(self.world)
        if opening.kind == "scale" and old is not None:
            self._save_what_may_be_lost(opening.reason, self._grace_s(), of=old)
        self._reassign(ready)
        self._dirty = True

    def _reassign(self, ready: Sequence[Node] | None = None) -> None:
        """Tell every node its place."""
        nodes = list(self.nodes) if ready is None else ready
        for node in nodes:
            if node.alive and not node.leaving:
                self._greet(node)

    def _greet(self, node: Node) -> None:
        """Tell a node what it has to do as things stand."""
        if self.phase.ended:
            code = ExitCode.FAILED if self.phase is JobPhase.FAILED else ExitCode.OK
            self._assign(node, Directive.STOP, self.reason, exit_code=int(code))
        elif node.leaving:
            self._assign(node, Directive.STOP, node.leaving, exit_code=int(ExitCode.OK))
        elif (
            self.world is not None
            and self.world.has(node.id, node.incarnation)
            and (self.phase is JobPhase.RUNNING or self._is_due(node))
        ):
            self._assign(node, Directive.RUN, self.reason)
        elif node.id in self._checking:
            names = " and ".join(m.node for m in self._checking[node.id].members)
            self._assign(node, Directive.CHECK, f"{names} are checked")
        else:
            waits = "standby" if self.phase is JobPhase.RUNNING else "the next round is forming"
            self._assign(node, Directive.WAIT, waits)

    def _by_plan(self) -> bool:
        """Whether nothing is broken in the round that ends, or that has ended for this one."""
        if self.opening is None:
            return self._before is not None
        return self.opening.kind in BY_PLAN and not self.opening.broken

    def _is_due(self, node: Node) -> bool:
        """Whether this is rank 0's node, and it has not taken up the round that is over already.

        Its offer is used up, for others may have been told it: only by taking up the round does
        an agent come to make another.
        """
        assert self.world is not None
        if self.phase is not JobPhase.FORMING or self.world.members[0].node != node.id:
            return False
        return node.report is None or node.report.follows < self.world.round

    def _is_behind(self, node: Node) -> bool:
        """Whether what this member has said last is of the round before."""
        assert self.world is not None
        return node.report is not None and node.report.follows < self.world.round

    def _assign(self, node: Node, directive: Directive, reason: str, *, exit_code: int = 0) -> None:
        if node.report is None:
            return  # who has not spoken to this master yet is told when it does
        old = self._assignments.get(node.id)
        world = self.world if directive is Directive.RUN else None
        if directive is Directive.CHECK:
            world = self._checking[node.id]
        rank = world.rank_of[node.id] if world is not None else 0
        place = world.members[rank] if world is not None else None
        assignment = Assignment(
            term=self.term,
            version=max(old.version if old is not None else 0, node.acknowledged) + 1,
            incarnation=node.incarnation,
            directive=directive,
            reason=reason,
            round=self.round,
            check=world.round if world is not None and directive is Directive.CHECK else 0,
            node_rank=rank,
            nnodes=len(world.members) if world is not None else 0,
            rank_offset=place.rank_offset if place is not None else 0,
            world_size=world.world_size if world is not None else 0,
            role_rank_offset=place.role_rank_offset if place is not None else 0,
            role_world_size=world.role_world_size[place.role] if world and place else 0,
            master_addr=world.master_addr if world is not None else "",
            master_port=world.master_port if world is not None else 0,
            exit_code=exit_code,
            restart_count=self.restart_count,
            max_restarts=self._restart_budget(node),
            cold=self.cold,
            stop_grace_s=(
                min(self._grace_s(), max(0.0, node.grace_s - BEFORE_KILL_S))
                if directive is Directive.STOP
                else self.rules.stop_grace_s
            ),
            last_step_s=(
                self._last_step_s() if directive is not Directive.STOP and self._by_plan() else 0.0
            ),
            exchange_s=self.pace.exchange_s,
            lease_s=self.pace.lease_s,
            checkpoint=self._checkpoint_json,
            peer=self.checkpoints.peer(node.id) if directive is Directive.RUN else None,
            persist=self.checkpoints.order(node.id, self.term),
            linger=directive is Directive.STOP and self.checkpoints.holds(node.id),
        )
        if old is not None and (old.round, old.directive) == (self.round, directive):
            same: dict[str, object] = {"version": old.version}
            if directive is Directive.RUN:
                same["reason"] = old.reason  # of a round that has its reason already
            if old == assignment.model_copy(update=same):
                return
        self._assignments[node.id] = assignment
        if old is not None and old == assignment.model_copy(
            update={name: getattr(old, name) for name in ("version", "reason", *BESIDE)}
        ):
            pass  # it is asked to take up nothing: its offer stays good
        elif world is not None or (old is not None and old.directive is Directive.RUN):
            self.nodes.tell(node, assignment.version)
        self._out.effects.append(Assign(node.id, assignment))

    def _end(
        self,
        phase: JobPhase,
        reason: str,
        message: str,
        *,
        cause: int | None = None,
    ) -> None:
        """The job is over."""
        self._save_what_may_be_lost(message, self._grace_s())
        self.phase, self.reason = phase, message
        self.ended_at = self._steady
        self.checkpoints.end_round()
        self._record(reason, message, cause=cause, warning=phase is JobPhase.FAILED)
        if step := self.checkpoints.only_in_memory():
            words = (
                f"step {step} was in memory only, and goes with the job: set spec.checkpoint.dir, "
                "or give the script's Checkpointer a directory"
            )
            self._record("NothingStored", words, warning=True)
        self.opening = None
        self._conditions_ended(phase, reason, message)
        self._dirty = True
        for node in list(self.nodes):
            if node.phase is NodePhase.GONE:
                continue
            if node.incarnation:
                self._greet(node)
            if self.rules.can_create:
                grace = self._grace_s() if node.incarnation else 0.0
                self._out.effects.append(DeleteNode(node.id, grace, message))

    def _close_round(self) -> None:
        self.world = self._before = self.opening = self.progress = None
        self.checkpoints.end_round()
        self.succeeded.clear()

    def _forgive(self) -> None:
        """Steady progress clears the budgets."""
        if self.phase is not JobPhase.RUNNING or self.opening is not None or self.world is None:
            return
        steady = self.rules.forgive_after_s
        if self.progress is None:
            steady *= 10  # the script reports no steps: that it still runs is weaker evidence
        due = self.formed_at + steady
        if self._now < due:
            self._wake([due])
            return
        gained = self.progress is None or (
            self.max_step is not None and (self.ground is None or self.max_step > self.ground)
        )
        self.formed_at, self.ground = self._now, self.max_step
        self._wake([self._now + steady])
        if not gained:
            return
        charged = [n for n in self.nodes if n.restarts or n.relaunches]
        if charged or self.exhausted or self.last_exception is not None or self.out_of_memory:
            for node in charged:
                node.restarts = node.relaunches = 0
            for vacancy in self.vacancies:
                vacancy.relaunches = 0
            self.exhausted = 0
            self.last_exception = None
            self.out_of_memory = ""
            self._dirty = True
            self._record(
                "BudgetForgiven",
                f"{steady:g} s of steady progress: all budgets are full again",
            )

    def _settle(self) -> None:
        """Drop the oldest of the many nodes that are gone."""
        if self.nodes.count(Standing.OUT) > 2 * GONE_KEPT:
            gone = [n for n in self.nodes if n.phase is NodePhase.GONE]
            for node in gone[: max(0, len(gone) - GONE_KEPT)]:
                if not self.rules.can_create:
                    self._remember_life(node)
                self.nodes.forget(node)
                self._records.pop(node.id, None)
                self._shown.pop(node.id, None)

    # --- small questions ---

    def _pace_of(self, job: ElasticJob) -> Pace:
        """By the nodes that are wished, not those that are there: a pace that changes with each
        node that comes or goes would be news for all the others."""
        wished = job.worker.replicas + job.worker.standby_replicas
        return pace(wished, exchange_s=self.rules.exchange_s, lease_s=self.rules.lease_s)

    def _grace_s(self) -> float:
        """How long a node that has to go has: it must have ended before it is killed."""
        spec = self.job.worker.template.get("spec")
        allowed = spec.get("terminationGracePeriodSeconds") if isinstance(spec, dict) else None
        if not isinstance(allowed, int):
            allowed = KUBERNETES_GRACE_S
        return min(self.rules.drain_grace_s, max(0.0, allowed - BEFORE_KILL_S))

    def _last_step_s(self) -> float:
        """No longer than those have who leave: without them no step can end."""
        leaving = [n.grace_s - BEFORE_KILL_S for n in self.nodes if n.leaving and n.alive]
        return max(0.0, min([self._grace_s(), *leaving]))

    def _size(self) -> Size:
        worker = self.job.worker
        return Size(desired=worker.replicas, minimum=worker.minimum, unit=worker.node_unit)

    def _wish(self) -> str:
        worker = self.job.worker
        words = f"{counted(worker.replicas, 'node')} (at least {worker.minimum}"
        if worker.node_unit > 1:
            words += f", in units of {worker.node_unit}"
        words += f", {worker.standby_replicas} on standby)" if worker.standby_replicas else ")"
        return words

    def _runs(self, node: Node) -> bool:
        return (
            self.world is not None
            and self.world.has(node.id, node.incarnation)
            and self.phase in (JobPhase.RUNNING, JobPhase.FORMING)
        )

    def _ended_well(self, node: Node) -> bool:
        """It has done its part of a round that nobody has broken."""
        return node.id in self.succeeded and self.opening is None

    def _vacancy(self, relaunches: int, unheard: int = 0) -> Vacancy:
        not_before = self._now + relaunch_delay(relaunches, unheard)
        return Vacancy(relaunches=relaunches, unheard=unheard, not_before=not_before)

    def _wake(self, times: Iterable[float]) -> None:
        self._out.wake_at = min(self._out.wake_at, *times, math.inf)

    def _change_in_words(self, old: World | None, new: World) -> str:
        if old is None:
            return ""
        before: set[NodeId] = set(old.rank_of)
        after: set[NodeId] = set(new.rank_of)
        parts = []
        if after - before:
            parts.append("in: " + _joined(after - before))
        if before - after:
            parts.append("out: " + _joined(before - after))
        return f" ({'; '.join(parts)})" if parts else ""

    def _may_tell_of_a_refusal(self) -> bool:
        told = self._refused_at
        if len(told) == REFUSALS_TOLD and self._now - told[0] < 60.0:
            return False
        told.append(self._now)
        return True

    def _record(
        self,
        reason: str,
        message: str,
        *,
        node: str | None = None,
        cause: int | None = None,
        since: float | None = None,
        warning: bool = False,
    ) -> int:
        event_id = self.next_event
        self.next_event += 1
        root = since if since is not None else self._born.get(cause or 0)
        self._born[event_id] = self._now if root is None else root
        if len(self._born) > 4 * EVENTS_KEPT:
            for key in sorted(self._born)[:EVENTS_KEPT]:
                del self._born[key]
        self.events.append(
            JobEvent(
                id=event_id,
                at=self._wall,
                type="Warning" if warning else "Normal",
                reason=reason,
                message=message,
                node=node,
                round=self.round or None,
                cause=cause,
                took_s=None if root is None else self._now - root,
            )
        )
        return event_id

    # --- what people see ---

    def status(self, now: float, wall: float) -> JobStatus:
        """The state of the job, whole."""
        members = self.world.rank_of if self.world is not None else {}
        worker = self.job.worker
        ready = standby = 0
        for node in self.nodes:
            if node.alive and not node.leaving and node.report is not None:
                ready += 1
                standby += node.id not in members
        if self._ordered[0] != self.nodes.members:
            ordered = sorted(self.nodes, key=lambda n: id_key(n.id))
            self._ordered = self.nodes.members, ordered
        self._update_conditions(ready, wall)
        return JobStatus(
            name=self.job.metadata.name,
            namespace=self.job.metadata.namespace,
            generation=self.job.metadata.generation,
            phase=self.phase,
            reason=self.reason,
            term=self.term,
            round=self.round,
            world_size=self.world.world_size if self.world is not None else 0,
            nodes_in_round=len(members),
            wanted=worker.replicas,
            minimum=worker.minimum,
            ready=ready,
            standby=standby,
            updated=self._updated(),
            progress=self.progress[1] if self.progress is not None else None,
            restarts=self.restarts,
            goodput=self._goodput(now),
            lost_s={kind: round(seconds, 3) for kind, seconds in self.lost_s.items()},
            last_failure=self.last_failure,
            last_checkpoint=self._last_checkpoint(wall),
            checkpoints_stored=self.checkpoints.commits,
            checkpoint_failures=self.checkpoints.failures,
            conditions=list(self._conditions.values()),
            nodes=[self._node_status(n, members.get(n.id)) for n in self._ordered[1]],
            events=list(self.events),
            started_at=self.started_at,
            ended_at=self.ended_at,
            published_at=wall,
        )

    def _updated(self) -> int | None:
        """Nodes that were made of the present template."""
        if not self.rules.can_create:
            return None
        there = (n for n in self.nodes if n.standing is not Standing.OUT)
        return sum(node.made_of == self._template for node in there)

    def _last_checkpoint(self, wall: float) -> LastCheckpoint | None:
        newest, storage = self.checkpoints.newest(wall), self.checkpoints.storage
        if newest is None:
            return None
        return LastCheckpoint(
            step=newest.step,
            where="storage" if newest.where else "memory",
            at=newest.at,
            age_s=round(max(0.0, wall - newest.at), 1),
            stored_step=storage.step if storage else None,
            stored_at=storage.at if storage else None,
            folder=storage.where if storage else "",
        )

    def _goodput(self, now: float) -> float | None:
        if not self.lost_s:
            return None
        end = self.ended_at or self.suspended_at or now + self._ahead
        lost = sum(self.lost_s.values())
        if self.phase in (JobPhase.RUNNING, JobPhase.FORMING):
            if self.opening is not None and self.opening.kind not in HEALTHY:
                lost += now - self.opening.since
            elif not self.resumed:
                lost += now - self._outage[1]
        elapsed = end - self.started_at - self.suspended_s
        return round(max(0.0, min(1.0, 1 - lost / elapsed)), 4) if elapsed > 0 else None

    def _node_status(self, node: Node, rank: int | None) -> NodeStatus:
        made_from = (
            node.incarnation,
            node.seq,
            node.phase,
            rank,
            node.restarts,
            node.relaunches,
            node.leaving,
            node.message,
            node.topology,
            node.held,
            behind := rank is not None and self._is_behind(node),
        )
        kept = self._shown.get(node.id)
        if kept is not None and kept[0] == made_from:
            return kept[1]
        role = NodeRole.MEMBER if rank is not None else NodeRole.STANDBY
        report = node.report
        if not node.alive:
            rank, role = None, NodeRole.NONE
        status = NodeStatus(
            id=node.id,
            phase=node.phase,
            role=role,
            incarnation=node.incarnation,
            node_rank=rank,
            nproc=report.nproc if report else 1,
            host=_host(node),
            agent_pid=report.agent_pid if report else 0,
            # Of the round before: they are being stopped, or it has not heard of this round yet.
            pids=report.pids if report and not behind else [],
            workers=(
                WorkerPhase.IDLE
                if not report
                else WorkerPhase.STOPPING
                if behind and report.phase is WorkerPhase.RUNNING
                else report.phase
            ),
            warm=report is not None and report.warm,
            step=report.progress.step if report and report.progress else None,
            restarts=node.restarts,
            relaunches=node.relaunches,
            message=node.leaving or node.message or _busy(node),
        )
        self._shown[node.id] = made_from, status
        return status

    def _update_conditions(self, ready: int, wall: float) -> None:
        if self.checkpoints.in_use or self.job.spec.checkpoint is not None:
            trouble = self.checkpoints.trouble
            why = "CheckpointFailed" if trouble else "AsExpected"
            self._set("CheckpointFailing", bool(trouble), why, trouble or "no trouble", wall)
        self._update_out_of_memory(wall)
        wanted, running = self.job.worker.replicas, self.phase is JobPhase.RUNNING
        if self.phase.ended:  # how many nodes are left then says nothing of the job
            self._set("PodsReady", False, "JobEnded", ENDED, wall)
            self._set("Running", False, self.phase.value, self.reason, wall)
            self._set("Degraded", False, "JobEnded", ENDED, wall)
            return
        words = f"{min(ready, wanted)} of {counted(wanted, 'node')} {are(min(ready, wanted))} ready"
        if ready > wanted:
            words += f", and {ready - wanted} beside them"
        self._set("PodsReady", ready >= wanted, "Ready", words, wall)
        self._set("Running", running, self.phase.value, self.reason, wall)
        nodes = len(self.world.members) if self.world is not None else 0
        degraded = running and nodes < wanted // self.job.worker.node_unit * (
            self.job.worker.node_unit
        )
        words = f"{nodes} of {counted(wanted, 'node')} {'trains' if nodes == 1 else 'train'}"
        if self.nodes.count(Standing.PENDING):
            waiting = next(n for n in self.nodes if n.standing is Standing.PENDING)
            words += f"; {waiting.id}: {waiting.message}"
        size = "FewerNodes" if degraded else "FullSize" if running else "NotRunning"
        self._set("Degraded", degraded, size, words, wall)

    def _update_out_of_memory(self, wall: float) -> None:
        """True from a failure for want of memory until training is steady again."""
        if self.out_of_memory:
            self._set("OutOfMemory", True, "OutOfMemory", self.out_of_memory, wall)
        elif "OutOfMemory" in self._conditions:
            self._set("OutOfMemory", False, "Over", "no trouble", wall)

    def _conditions_ended(self, phase: JobPhase, reason: str, message: str) -> None:
        failure = self.last_failure
        if phase is JobPhase.FAILED and failure is not None and failure.worker.traceback:
            message = f"{message}\n{failure.worker.traceback}"
        self._set(phase.value, True, reason, message, self.ended_at or self._wall)

    def _set(self, kind: str, status: bool, reason: str, message: str, wall: float) -> None:
        text: Literal["True", "False"] = "True" if status else "False"
        old = self._conditions.get(kind)
        same = old is not None and old.status == text
        self._conditions[kind] = Condition(
            type=kind,
            status=text,
            reason=reason,
            message=message,
            last_transition_time=old.last_transition_time if old is not None and same else wall,
        )


def _repeated(steps: int) -> str:
    return f"{counted(steps, 'step') if steps else 'no steps'} {are(steps)} repeated"


def _told(job: ElasticJob) -> str:
    """A job as the journal keeps it."""
    text = job.model_dump_json(by_alias=True, exclude_unset=True)
    return text if len(text) <= ACCEPTED_BYTES else ""


def _joined(nodes: Iterable[NodeId]) -> str:
    named = sorted(nodes, key=id_key)
    more = len(named) - NAMED
    return ", ".join(named[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _host(node: Node) -> str:
    return node.topology[-1] if node.topology else ""


def _busy(node: Node) -> str:
    if node.report and node.report.warming:
        return "imports what its workers will need"
    return "is checked before it trains" if node.held else ""
