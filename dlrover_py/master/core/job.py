"""The state machine of one job: takes events and the time, and returns what has to be done.

``Job.step(events, now, wall)`` is the only way to change the state. ``now`` is a monotonic clock,
by which decisions are made. ``wall`` is Unix time, and only dates what people read. Everything that
must outlive the master is in :class:`DurableState`. When a step returns it as the journal, it must
be stored before the effects of the step are carried out.
"""

from collections.abc import Iterable

from dlrover_py.master.core.admission import Admission
from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.autoscaler import Autoscaler
from dlrover_py.master.core.capacity import Capacity
from dlrover_py.master.core.checkpointing import Checkpointing
from dlrover_py.master.core.departures import Departures
from dlrover_py.master.core.diagnosis.detectors import Detectors
from dlrover_py.master.core.events import (
    DeleteNode,
    Disconnected,
    Event,
    EvidenceKept,
    JobChanged,
    JobStopped,
    NodeEnded,
    NodeSeen,
    NodesListed,
    Reported,
    RestoreAsked,
    RoomSeen,
    Rules,
    ShardsAsked,
    Slept,
    SnapshotArrived,
    Stalled,
    TablesReported,
)
from dlrover_py.master.core.failures import Failures
from dlrover_py.master.core.goodput import Goodput
from dlrover_py.master.core.history import EVENTS_KEPT, CoreContext, EventLog
from dlrover_py.master.core.reports import Reports, TrainingReports
from dlrover_py.master.core.resource_advice import ResourceAdvice
from dlrover_py.master.core.rounds import Rounds
from dlrover_py.master.core.servers import Servers
from dlrover_py.master.core.sharding import Sharding
from dlrover_py.master.core.spec_changes import SpecChanges
from dlrover_py.master.core.state import DurableState, Step, desired_nodes, make_transient
from dlrover_py.master.core.status import StatusReport
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.master.core.tuning import Tuning
from dlrover_py.protocol.errors import InvariantError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import Round, Term, is_server
from dlrover_py.protocol.reasons import ENDED_BY_USER, EventReason
from dlrover_py.protocol.status import JobPhase, JobStatus


class Job:
    """One job: its state, its components, and the order in which they decide."""

    def __init__(
        self,
        spec: ElasticJob,
        rules: Rules,
        *,
        term: Term,
        now: float,
        wall: float,
        state: DurableState | None = None,
    ) -> None:
        """Begin a job, or prepare to continue one; :meth:`resume` does the rest.

        A job that begins records its first event.

        Args:
            spec: The desired state.
            rules: Times and limits.
            term: Term of this master.
            now: Monotonic time.
            wall: Unix time.
            state: The durable state that an earlier master has left; this job takes it over.
        """
        begins, name = state is None, spec.metadata.name
        self.state = state = state or DurableState.begin(name, term, wall)
        self.live = live = make_transient(state, spec, rules, now=now, wall=wall)
        self.log = EventLog(state, live)
        context = CoreContext(state, live, self.log)
        self.assignments = assignments = Assignments(context)
        self._checkpointing = checkpointing = Checkpointing(context, assignments)
        self._tuning = tuning = Tuning(context, assignments)
        self._transitions = transitions = Transitions(context, assignments, checkpointing)
        self._capacity = capacity = Capacity(context, transitions, assignments, checkpointing)
        self._departures = departures = Departures(
            context, transitions, capacity, assignments, checkpointing, tuning
        )
        self._failures = failures = Failures(context, transitions, capacity, checkpointing, tuning)
        self._admission = admission = Admission(context, transitions, capacity, assignments)
        self._sharding, self._autoscaler = Sharding(context), (scaler := Autoscaler(context))
        self._servers = Servers(context, transitions, capacity)
        self._rounds = Rounds(context, transitions, assignments, checkpointing, admission, scaler)
        self._spec_changes = SpecChanges(context, transitions, capacity, departures, checkpointing)
        self.detectors = Detectors(context, assignments, admission, failures, transitions)
        self._goodput, self._advice = Goodput(context), ResourceAdvice(context)
        training = TrainingReports(context, transitions, failures, self._goodput, tuning)
        self._reports = Reports(context, assignments, admission, departures, failures, training)
        self._readers_of_reports = self._reports, self._sharding, self.detectors
        self._status = StatusReport(context, self._goodput, tuning)
        self._written = -1
        """Generation of the state that was returned last."""
        state.accept(spec)
        if begins:
            message = f"job {name} started with a desired size of {desired_nodes(spec)}"
            self.log.record(EventReason.JOB_STARTED, message)

    @classmethod
    def resume(
        cls,
        spec: ElasticJob,
        rules: Rules,
        state: DurableState,
        *,
        term: Term,
        now: float,
        wall: float,
    ) -> "Job":
        """Continue from the durable state that a master of an earlier term has left.

        Nodes get assignments when they report. The deletion of nodes that had to end is requested
        again with the first step; in a job that has ended, these are all nodes. Event ids are
        skipped, because the journal may lack the newest events.

        Args:
            spec: The desired state.
            rules: Times and limits.
            state: The durable state; the job takes it over.
            term: Term of this master; it must be higher than that of the state.
            now: Monotonic time.
            wall: Unix time.

        Raises:
            InvariantError: The term is not higher than that of the state.
        """
        if term <= state.term:
            raise InvariantError(f"term {term} does not follow the journal's term {state.term}")
        state.term, state.job = term, spec.metadata.name
        # Events after the last write are lost; their ids must not be used again.
        state.next_event += EVENTS_KEPT
        self = cls(spec, rules, term=term, now=now, wall=wall, state=state)
        live, log = self.live, self.log
        if state.world is not None:
            self._checkpointing.begin_round(state.world)
        for node in live.nodes if rules.can_create else ():
            if state.phase.ended:
                live.emit(DeleteNode(node.id, live.grace_s, state.reason))
            elif node.leaving:
                grace_s = live.grace_s if node.incarnation else 0.0
                live.emit(DeleteNode(node.id, grace_s, node.leaving))
        message = f"the master of term {term} took over in round {state.round}; workers continue"
        event = log.record(EventReason.MASTER_STARTED, message)
        if state.pending_round is not None:
            log.begin(state.pending_round.cause, now)
        else:
            live.round_causes[state.round] = (event, now)
        return self  # each node gets its assignment when it reports

    def skip(self, number: int, node: int, event: int, server: int = -1) -> None:
        """Continue above these numbers: masters whose journal is lost have used them.

        There may be more nodes than these numbers show. No node is requested before the platform
        has listed the existing nodes. Snapshots are numbered from the Unix time on.

        Args:
            number: The highest round.
            node: The highest number of a node.
            event: The highest id of an event.
            server: The highest number of a server; -1 if there was none.
        """
        servers = self.state.servers
        servers.next = max(servers.next, server + 1)
        self.state.round, self.state.snapshots = Round(number), int(self.live.wall)
        self.state.next_node = max(self.state.next_node, node + 1)
        self.state.next_event = max(self.state.next_event, event + 1)
        self._capacity.unlisted = self.live.rules.can_create

    def step(self, events: Iterable[Event], now: float, wall: float) -> Step:
        """Take in events, make all decisions, and return what has to be done.

        Nothing is sent or written here. The caller must store the journal of the result, if there
        is one, before it carries out the effects.

        Args:
            events: What has happened since the last step.
            now: Monotonic time.
            wall: Unix time.

        Returns:
            The effects to carry out, the journal if it has changed, and the time of the next step
            if no event arrives before.
        """
        self.live.now, self.live.wall = now, wall
        for event in events:
            self._take(event)
        self._reports.record_joined()
        self._departures.expire()
        self._spec_changes.suspend_or_resume()
        self.detectors.decide()
        self._advice.decide()
        self._failures.resolve_suspected_failure()
        self.detectors.keep_evidence()
        self._failures.reset_budgets()
        self._tuning.decide()
        self._admission.check_nodes()
        self._run_passes()
        while self._admission.check_nodes():  # a node of a check may be dismissed or in a round now
            self._run_passes()
        self._admission.end_checks()
        self._tuning.send()
        self._checkpointing.decide()
        self._sharding.decide()
        self._servers.decide()
        self._departures.prune_gone_nodes()
        self._goodput.decide()
        out = self.live.end_step()
        if self._written != self.state.generation:
            self._written, out.journal = self.state.generation, self.state
        return out

    def _run_passes(self) -> None:
        """Choose the size, request and dismiss nodes, and form rounds, until nothing follows."""
        self._capacity.lift_bans()
        self._autoscaler.decide()
        self._capacity.plan_nodes()
        while True:
            if self._rounds.form():
                self._capacity.plan_nodes()  # a node that was left out may be surplus now
            leaving = self._spec_changes.restart_nodes()
            if not self._autoscaler.decide() and not leaving:
                return
            self._capacity.plan_nodes()

    def _take(self, event: Event) -> None:
        """Take in one event; decisions that need all events of the step follow later.

        A request to stop the job ends it as Failed if the request has a reason, otherwise as
        Stopped. It is ignored if the job has ended.
        """
        live = self.live
        match event:
            case Reported(node_id, report):
                for component in self._readers_of_reports:
                    component.take_report(node_id, report)
            case SnapshotArrived():
                self.detectors.take_snapshot(event)
            case EvidenceKept():
                self.detectors.evidence_kept(event)
            case Disconnected(node_id, boot_id, seq):
                live.nodes.disconnected(node_id, boot_id, seq, live.now)
            case RestoreAsked(number, round_number):
                live.checkpoints.ask(number, round_number, live.now + live.rules.memory_wait_s)
            case ShardsAsked():
                self._sharding.ask(event)
            case JobChanged(job):
                self._spec_changes.take_spec(job)
            case JobStopped(why, reason) if not self.state.phase.ended:
                stopped = (JobPhase.STOPPED, EventReason.JOB_STOPPED, ENDED_BY_USER)
                self._transitions.end_job(*(JobPhase.FAILED, reason, why) if why else stopped)
            case Slept(seconds):
                self._goodput.slept(seconds)
                self._autoscaler.stalled()
            case Stalled(seconds):
                live.nodes.stalled(live.now, seconds)
                self._sharding.stalled(seconds)
                self._autoscaler.stalled()
                self.detectors.stalled(seconds)
                self._failures.stalled()
            case NodeSeen(node) if is_server(node):
                self._servers.node_seen(event)
            case NodeEnded(node) if is_server(node):
                self._servers.node_ended(event)
            case NodeSeen():
                self._departures.node_seen(event)
            case NodeEnded():
                self._departures.node_ended(event)
            case RoomSeen(nodes):
                live.room = nodes
            case TablesReported(tables):
                self._servers.take_tables(tables)
            case NodesListed(listed, free):
                self._servers.nodes_listed(listed, gone=free)
                workers = frozenset(node for node in listed if not is_server(node))
                self._departures.nodes_listed(workers, free=free)

    def status(self, now: float, wall: float) -> JobStatus:
        """Return the complete status of the job; this also updates its conditions.

        Args:
            now: Monotonic time.
            wall: Unix time.
        """
        return self._status.status(now, wall)
