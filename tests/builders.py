"""Builders of jobs and failures, simulated agents, and a bench that checks each step of a Job.

There are no mocks, sleeps or clocks. Time is a number that the bench increases in steps of 1/4 s.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from itertools import combinations, count, groupby
from typing import Any

from dlrover_py.master.core.events import (
    Assign,
    CreateNode,
    DeleteNode,
    Effect,
    Event,
    JobChanged,
    NodeEnded,
    NodeSeen,
    NodesListed,
    Refuse,
    Reported,
    Rules,
)
from dlrover_py.master.core.health import Verdict
from dlrover_py.master.core.job import Job
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.state import DurableState, Step
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    CheckRequest,
    CheckResult,
    Directive,
    FailureKind,
    LoaderState,
    LogFinding,
    MemoryCheckpoint,
    NodeLoad,
    Offer,
    PersistPhase,
    PersistProgress,
    Progress,
    StoredCheckpoint,
    WorkerFailure,
    WorkerPhase,
    WrongValue,
)
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId, Term
from dlrover_py.protocol.shards import Level
from dlrover_py.protocol.status import JobPhase, NodePhase, NodeRole

WALL = 1_000_000.0
OWN = {"generation", "time"}
"""Fields of the state that belong to a single master, or change without a write."""


def job_file(replicas: int = 3, **worker: Any) -> dict[str, Any]:
    """Return a job file as plain data; ``worker`` has more fields of the replica spec."""
    template = {"spec": {"containers": [{"name": "main", "command": ["elastic-run", "t.py"]}]}}
    replica_spec = {"replicas": replicas, "template": template, **worker}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "x"},
        "spec": {"replicaSpecs": {"worker": replica_spec}},
    }


def elastic_job(
    replicas: int = 3,
    minimum: int | None = None,
    *,
    unit: int = 1,
    standby: int = 0,
    restarts: int = 3,
    suspend: bool = False,
    **worker: Any,
) -> ElasticJob:
    document = job_file(
        replicas,
        **worker,
        minReplicas=minimum,
        nodeUnit=unit,
        standbyReplicas=standby,
        restartCount=restarts,
    )
    document["spec"]["suspend"] = suspend
    return ElasticJob.parse(document)


def crash(
    kind: FailureKind = FailureKind.SIGNAL,
    *,
    fingerprint: str = "",
    step: int | None = None,
    ran_s: float = 5.0,
    forked: bool = False,
) -> WorkerFailure:
    return WorkerFailure(
        kind=kind,
        local_rank=0,
        rank=0,
        pid=7,
        exit_code=1,
        message="died",
        fingerprint=fingerprint,
        step=step,
        ran_s=ran_s,
        forked=forked,
    )


def user_error(fingerprint: str = "E@f:1", step: int | None = 5) -> WorkerFailure:
    return crash(FailureKind.EXCEPTION, fingerprint=fingerprint, step=step)


def _racks_in_use(pool: Iterable[Node], stay: Collection[str]) -> tuple[int, int]:
    """Return how many racks are in use if these stay, and how many of them in part."""
    inside: dict[tuple[str, ...], set[bool]] = defaultdict(set)
    for node in pool:
        inside[node.domain].add(node.id in stay)
    return sum(True in some for some in inside.values()), sum(len(s) == 2 for s in inside.values())


def _taken_up(told: Assignment) -> dict[str, Any]:
    """Return the fields of an assignment that an agent must acknowledge before the next one."""
    beside = {
        "version",
        "reason",
        "checkpoint",
        "snapshot",
        "peer",
        "persist",
        "stay_until_stored",
        "last_step_s",
    }
    return told.model_dump(exclude=beside)


_ports = count(1024)
_boots = count(1)
_commits = count(1)


def fresh_offer(node: str) -> Offer:
    port = next(_ports)
    return Offer(addr=f"{node}-{port // 60000}", port=1024 + port % 60000)


@dataclass
class SimAgent:
    """A simulated agent process: it follows the rules of a real agent, but starts no processes."""

    node: NodeId
    nproc: int = 1
    max_restarts: int | None = None
    role: str = "default"
    boot: str = ""
    incarnation: int = 0
    seq: int = 0
    have: tuple[int, int] = (0, 0)
    follows: int = 0
    phase: WorkerPhase = WorkerPhase.IDLE
    failure: WorkerFailure | None = None
    progress: Progress | None = None
    reached_step: int | None = None
    leaving: str = ""
    gives_up: str = ""
    nested: str = ""
    cut_off: str = ""
    warm: bool = False
    warming: bool = False
    """The agent prepares warm starts, and cannot be in a round until it is ready."""
    precheck: int = 0
    exclude_straggler: bool = False
    loader: LoaderState | None = None
    """State of its script's data loader; None if it has none."""
    auto_tune: bool = False
    wrong: list[WrongValue] = field(default_factory=list)
    log_findings: list[LogFinding] = field(default_factory=list)
    """Wrong values that its workers have."""
    load: NodeLoad | None = None
    """What its node lacks."""
    checks: int = 0
    check: CheckResult | None = None
    fault: str = ""
    """Fault of its node in checks: device, link (only with other nodes), slow or hang."""
    stores: bool = True
    """Its script has a checkpoint directory."""
    memory: list[MemoryCheckpoint] = field(default_factory=list)
    """Checkpoints that its workers have saved. They outlive the workers, but not the agent."""
    persisting: PersistProgress | None = None
    stored: StoredCheckpoint | None = None
    stopping: bool = False
    """The agent must stop. It ends after its next report."""
    ended: bool = False
    frozen: bool = False
    """The process is stopped: it neither sends nor receives."""
    cut: bool = False
    """The network drops all that the agent sends."""
    starts: list[int] = field(default_factory=list)
    """Rounds whose workers the agent has started."""
    assignment: Assignment | None = None

    def __post_init__(self) -> None:
        self.boot = self.boot or f"boot-{next(_boots):06}"
        self.offer = fresh_offer(self.node)

    def report(self) -> AgentReport:
        self.seq += 1
        return AgentReport(
            boot_id=self.boot,
            incarnation=self.incarnation,
            seq=self.seq,
            have_term=self.have[0],
            have_version=self.have[1],
            follows=self.follows,
            phase=self.phase,
            nproc=self.nproc,
            role=self.role,
            offer=self.offer,
            pids=[1000 * self.follows + n + 1 for n in range(self.nproc)] if self.running else [],
            max_restarts=self.max_restarts,
            failure=self.failure,
            progress=self.progress,
            reached_step=self.reached_step,
            leaving=self.leaving,
            gives_up=self.gives_up,
            nested=self.nested,
            cut_off=self.cut_off,
            warm=self.warm,
            warming=self.warming,
            precheck=CheckRequest(level=self.precheck, exclude_slow=self.exclude_straggler)
            if self.precheck
            else None,
            loader=self.loader,
            auto_tune=self.auto_tune,
            wrong=self.wrong,
            log_findings=self.log_findings,
            load=self.load,
            checks=self.checks,
            check=self.check,
            memory=self.memory,
            memory_round=self.follows if self.running else self.follows + 1,
            stores=bool(self.memory) and self.stores,
            transfer_port=4000,
            persisting=self.persisting,
            stored=self.stored,
        )

    def receive(self, new: Assignment) -> None:
        if self.ended or (new.term, new.version) <= self.have:
            return
        assert new.incarnation >= self.incarnation, "incarnations only grow"
        assert new.round >= self.follows, "an agent never receives an older round"
        self.have, self.incarnation, self.assignment = (
            (new.term, new.version),
            new.incarnation,
            new,
        )
        if self.stopping:
            return
        if new.directive is Directive.STOP:
            self.stopping, self.phase = True, WorkerPhase.STOPPING
        elif new.directive is Directive.WAIT:
            if self.phase in (WorkerPhase.RUNNING, WorkerPhase.CHECKING):
                self.phase = WorkerPhase.IDLE
        elif new.directive is Directive.CHECK:
            if new.check > self.checks:
                self.checks, self.check, self.phase = new.check, None, WorkerPhase.CHECKING
                self.offer = fresh_offer(self.node)
        elif new.round > self.follows:
            self.follows = new.round
            self.starts.append(new.round)
            if self.progress is not None:
                self.reached_step = max(self.progress.step, self.reached_step or 0)
            self.phase, self.failure, self.progress = WorkerPhase.RUNNING, None, None
            self.cut_off = ""
            self.offer = fresh_offer(self.node)  # the previous offer is used by this round

    @property
    def running(self) -> bool:
        return self.phase is WorkerPhase.RUNNING and not self.ended

    @property
    def lingers(self) -> bool:
        """Whether the agent must stay until its checkpoints are stored."""
        told = self.assignment
        return told is not None and told.stay_until_stored and not self.ended

    def save(self, step: int, *, persist: bool) -> None:
        """Add a checkpoint in which each worker has its own shard group."""
        told = self.assignment
        assert told is not None
        ranks = range(told.rank_offset, told.rank_offset + self.nproc)
        parts = {rank: f"p{rank}" for rank in ranks}
        fresh = MemoryCheckpoint(
            step=step, round=self.follows, world=told.world_size, ranks=parts, persist=persist
        )
        self.memory = [fresh, *self.memory[:2]]

    def write(self, phase: PersistPhase) -> None:
        """Report a phase of the requested write; do nothing if no write was requested."""
        order = self.assignment.persist if self.assignment is not None else None
        if order is None:
            return
        if phase is PersistPhase.DONE and order.writers and not order.grant:
            phase = PersistPhase.READY
        self.persisting = PersistProgress(attempt=order.attempt, phase=phase)
        if phase is PersistPhase.DONE and order.writers:
            self.stored = StoredCheckpoint(
                step=order.step,
                round=order.round,
                timeline=order.timeline,
                where="/d",
                at=0.0,
                number=next(_commits),
            )

    @property
    def group(self) -> tuple[int, str, int] | None:
        """The check and the group in which the agent is; None if it is not in a check."""
        told = self.assignment
        if self.phase is not WorkerPhase.CHECKING or told is None or self.ended or self.frozen:
            return None
        return told.check, told.master_addr, told.master_port

    def fail(self, failure: WorkerFailure) -> None:
        assert self.running
        self.phase, self.failure = WorkerPhase.FAILED, failure

    def stop_itself(self) -> None:
        """Stop the workers, because no master has answered for the time of a lease."""
        assert self.running
        self.phase, self.cut_off = WorkerPhase.IDLE, "the master did not answer"

    def succeed(self) -> None:
        assert self.running
        self.phase = WorkerPhase.SUCCEEDED

    def reach(self, step: int) -> None:
        started = self.progress.started_at_step if self.progress else step
        self.progress = Progress(step=step, started_at_step=started, first_step_after_s=0.5)


@dataclass
class _Life:
    """What the checks of the bench know about one node, independent of the core."""

    boot: str = ""
    former: set[str] = field(default_factory=set)
    seq: int = -1
    report: AgentReport | None = None
    gone: bool = False
    owes: int = 0
    """Version that the node must acknowledge before it can be in the next round."""
    acked: int = 0
    told: Assignment | None = None


class Bench:
    """A Job between a simulated platform and simulated agents. Each step is checked.

    All events pass through :meth:`step`. It makes all checks that hold in every scenario, so that
    each test and each run of the state machine makes them.
    """

    def __init__(
        self, spec: ElasticJob, rules: Rules | None = None, *, capacity: int = 1000, now: float = 0
    ) -> None:
        self.spec, self.rules = spec, rules or Rules()
        self.now = now
        self.job = Job(spec, self.rules, term=Term(1), now=now, wall=WALL)
        self.capacity = capacity
        self.pods: dict[NodeId, bool] = {}
        """For each node of the platform: whether its process runs."""
        self.avoided: dict[NodeId, tuple[str, ...]] = {}
        """For each node: the hosts on which it must not run."""
        self.dying: set[NodeId] = set()
        self.facts: list[Event] = []
        """Events of the platform that are not delivered yet, in their order."""
        self.agents: dict[NodeId, list[SimAgent]] = defaultdict(list)
        self.desks: dict[NodeId, tuple[str, Assignment | None]] = {}
        """For each node: boot id of the agent process, and its newest assignment."""
        self.refused: set[str] = set()
        self.history: list[tuple[str, Assignment]] = []
        """All assignments that were sent, each with the boot id of its agent."""
        self.in_flight: list[tuple[SimAgent, AgentReport]] = []
        """Reports that have not arrived yet."""
        self.journal: DurableState | None = None
        self.wake_at = now
        self.precheck = 0
        """Setting ``precheck`` of agents that are booted from now on."""
        self.racks = 1
        """Number of racks that the hosts of nodes are in."""
        self.faults: dict[str, str] = {}
        """For each node: its fault in checks."""
        self.broken = False
        """A check has failed, so later results mean nothing."""
        self.crash: tuple[str, int] | None = None
        """Death of the master in the next step that stores a journal.

        It is ``before`` or ``after`` the journal is stored, with the number of effects that are
        carried out.
        """
        # State of the checks.
        self._lives: dict[NodeId, _Life] = defaultdict(_Life)
        self._worlds: dict[int, tuple[Any, ...]] = {}
        self._domains: dict[NodeId, tuple[str, ...]] = {}
        """For each member of the last round: the domain that was known when it was formed."""
        self._offers: set[tuple[str, int]] = set()
        self._check_offers: set[tuple[str, int]] = set()
        """Offers of checks by this master. Those of a check that was never journaled are harmless
        (checks.connect).
        """
        self._groups: dict[tuple[int, str, int], dict[int, tuple[NodeId, int]]] = {}
        self._created: set[NodeId] = set()
        self._unseen: set[NodeId] = set()
        self._wanted: set[NodeId] = set()
        self._charged: dict[str, int] = defaultdict(int)
        self._reborn: dict[str, int] = defaultdict(int)
        self._exceptions: list[tuple[str, int | None, float]] = []
        self._early = ""
        self._doubts = 0
        self._successes: dict[int, set[str]] = defaultdict(set)
        self._end: JobPhase | None = None
        self._events_seen = 0
        self._round = 0
        self._term = 0

    # --- The master ---

    def step(self, *events: Event) -> Step:
        """Make one step at ``now``, and carry out its effects unless the master dies in it."""
        self.broken = True
        before = self.job.state.world
        restarts = dict(self.job.state.restarts)
        stale = self._stale(events)
        for event in events:
            self._note(event)
        out = self.job.step(list(events), self.now, WALL + self.now)
        assert out.wake_at > self.now, "no busy loop"
        assert not stale or stale == self._stale(events), "a stale report changes nothing"
        if self.crash and out.journal is not None:
            how, kept = self.crash
            self.crash = None
            if how == "after":
                self._store(out.journal)
                self._check(out, before, restarts, events)
                self._carry_out(out.effects[:kept])
            self.restart_master()
            return out
        self._check(out, before, restarts, events)
        if out.journal is not None:
            self._store(out.journal)
        self._compare_journal()
        self._carry_out(out.effects)
        self.wake_at = self._quiet(out.wake_at, decided=bool(out.effects))
        self.broken = False
        return out

    def _store(self, journal: DurableState) -> None:
        self.journal = DurableState.from_json(journal.to_json())
        assert dumped(self.journal, OWN) == dumped(journal, OWN), (
            "a journal is read as it was written"
        )

    def _quiet(self, wake_at: float, *, decided: bool = False) -> float:
        """Check that a step without news does nothing, and return the time of the next one.

        Args:
            wake_at: the time of the next step, as the last step has said it.
            decided: the last step had effects.
        """
        again = self.job.step([], self.now, WALL + self.now)
        assert not again.effects, f"a step decides all there is to decide: {again.effects}"
        assert again.journal is None, "a step without news stores nothing"
        # A wake-up time is harmless if a later decision of the same step has made it idle: the end
        # of the round, or of a node that was to be dismissed then. A lost one is not.
        idle = decided or self.job.state.pending_round is not None
        assert again.wake_at == wake_at or (idle and again.wake_at > wake_at), (
            f"{again.wake_at} was {wake_at}"
        )
        return again.wake_at

    def restart_master(self, *, early_list: bool = False) -> None:
        """Replace the master. Only the journal and the platform outlive it."""
        if self.journal is None:  # the master died before it stored a journal
            self.job = Job(self.spec, self.rules, term=Term(1), now=self.now, wall=WALL)
            self._created.clear()
            self._unseen.clear()
            self._wanted.clear()
        else:
            term = Term(self.journal.term + 1)
            left = DurableState.from_json(self.journal.to_json())
            self.job = Job.resume(
                self.spec, self.rules, left, term=term, now=self.now, wall=WALL + self.now
            )
            kept = set(self.journal.nodes)
            self._wanted = {n for n, record in self.journal.nodes.items() if not record.leaving}
            self._unseen = {n for n, record in self.journal.nodes.items() if not record.incarnation}
            numbers = range(self.journal.next_node)
            self._created = {n for n in self._created if int(n[1:]) in numbers}
            for node, life in self._lives.items():
                life.owes = life.acked = 0
                life.told = life.report = None
                life.seq = -1  # it is not in the journal, so one late report may be accepted
                if node not in kept:
                    life.gone = True
            for name, record in self.journal.nodes.items():
                life = self._lives[name]
                if life.boot and life.boot != record.boot_id:
                    life.former.discard(record.boot_id)
                life.boot = record.boot_id
            # Pending rounds and the successes of the round outlive the master.
            self._successes = defaultdict(set)
            self._successes[self.journal.round] = set(self.journal.succeeded)
            self._charged.clear()
            for name, record in self.journal.nodes.items():
                self._charged[name] = record.restarts
            last = self.journal.last_exception
            self._exceptions = [(last.fingerprint, last.step, last.ran_s)] if last else []
            self._early = self.journal.warm_starts.early_death
            self._doubts = self.journal.warm_starts.suspected
            self._end = self.journal.phase if self.journal.phase.ended else None
            self._round = self.journal.round
            self._events_seen = self.job.state.events[-1].id - 1  # ids may skip, not repeat
            assert self._events_seen >= self.journal.next_event - 1
            self._worlds = {r: w for r, w in self._worlds.items() if r <= self.journal.round}
        if self.journal is not None:
            drop = OWN | {"term", "next_event", "events", "pending_round", "accepted"}
            resumed = dumped(self.job.state, drop)
            assert resumed == dumped(self.journal, drop), "nothing is forgotten"
        self._check_offers.clear()
        self.desks.clear()
        self.refused.clear()
        self.facts.clear()
        self.in_flight.clear()  # their connections died with the master
        steady = self.job.state.pending_round is None and self.job.state.phase is JobPhase.RUNNING
        round_before = self.job.state.round
        listing = self.listing() if early_list else None
        first = self.step()
        if self.rules.can_create:  # otherwise no platform lists nodes
            self.step(*(listing or self.listing()))
        members = self.job.state.world.rank_of if self.job.state.world else {}
        if steady and all(m in self.pods for m in members):
            size = full_size(self.spec, len(members), self.desired)
            if size == len(members) and not self.spec.spec.suspend:
                assert self.job.state.round == round_before, (
                    "a restart of the master changes no rank"
                )
        assert not [e for e in first.effects if isinstance(e, Assign)], (
            "no agent has reported to the new master yet"
        )

    def listing(self) -> list[Event]:
        seen: list[Event] = [self._seen(n) for n in self.pods]
        return [*seen, NodesListed(frozenset(self.pods))]

    def relist(self) -> None:
        self.facts.clear()
        self.step(*self.listing())

    # --- The platform ---

    def _seen(self, node: NodeId) -> NodeSeen:
        why = "it is being deleted" if node in self.dying else ""
        rack = f"rack-{int(node[1:]) % self.racks}"
        return NodeSeen(node, self.pods[node], ("zone", rack, node), leaving=why)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            nodes_change = isinstance(effect, CreateNode | DeleteNode)
            assert self.rules.can_create or not nodes_change, (
                "this platform neither creates nor deletes nodes"
            )
            match effect:
                case Assign(node, assignment):
                    boot, _ = self.desks.get(node, ("", None))
                    self.desks[node] = (boot, assignment)
                    self.history.append((boot, assignment))
                case Refuse(_, boot_id, _):
                    self.refused.add(boot_id)
                case CreateNode(node, avoid):
                    self.avoided[node] = avoid
                    if node not in self.pods:
                        self.pods[node] = False
                        self.facts.append(NodeSeen(node, False, message="no room"))
                        self._schedule()
                case DeleteNode(node, grace_s, _):
                    if node in self.pods:
                        self.dying.add(node)
                        if not grace_s or not self.pods[node]:
                            self.finish(node)

    def _schedule(self) -> None:
        for node, runs in self.pods.items():
            if not runs and sum(self.pods.values()) < self.capacity:
                self.pods[node] = True
                self.facts.append(self._seen(node))

    def finish(self, node: NodeId) -> None:
        """The platform has ended a node as requested."""
        self._remove(node, "deleted", free=True)

    def kill(self, node: NodeId) -> None:
        """A node is lost with its processes. A frozen agent may only be unreachable."""
        self._remove(node, "killed", free=False)

    def _remove(self, node: NodeId, why: str, *, free: bool) -> None:
        self.dying.discard(node)
        if self.pods.pop(node, None) is None:
            return
        for agent in self.agents[node]:
            if not agent.frozen:  # a frozen agent may run on, on a host that is cut off
                agent.ended = True
        self.facts.append(NodeEnded(node, why, free=free))
        self._schedule()

    def set_capacity(self, hosts: int) -> None:
        self.capacity = hosts
        self._schedule()

    def deliver_facts(self, number: int | None = None) -> None:
        number = len(self.facts) if number is None else number
        facts, self.facts = self.facts[:number], self.facts[number:]
        if facts:
            self.step(*facts)

    def change(self, spec: ElasticJob) -> Step:
        self.spec = spec
        return self.step(JobChanged(spec))

    # --- The agents ---

    def boot(self, node: NodeId, nproc: int = 1) -> SimAgent:
        """Start an agent process on a node. An older one on this node is ended."""
        for old in self.agents[node]:
            old.ended = True
        agent = SimAgent(node, nproc=nproc, precheck=self.precheck, exclude_straggler=True)
        agent.fault = self.faults.get(node, "")
        self.agents[node].append(agent)
        return agent

    def agent(self, node: str) -> SimAgent:
        return self.agents[NodeId(node)][-1]

    def living(self) -> list[SimAgent]:
        return [a for agents in self.agents.values() for a in agents if not a.ended]

    def say(self, agent: SimAgent, report: AgentReport | None = None) -> Step:
        """Deliver a report of an agent, without the answer."""
        return self.step(Reported(agent.node, report or agent.report()))

    def answer(self, agent: SimAgent) -> None:
        """Deliver the master's answer to an agent."""
        if agent.boot in self.refused:
            self.leave(agent)
            return
        boot, assignment = self.desks.get(agent.node, ("", None))
        if boot == agent.boot and assignment is not None:
            agent.receive(assignment)

    def leave(self, agent: SimAgent) -> None:
        """End an agent process, and with it its node."""
        agent.ended = True
        node = agent.node
        if node in self.pods and self.agents[node][-1] is agent:
            free = node in self.dying
            self.dying.discard(node)
            del self.pods[node]
            self.facts.append(NodeEnded(node, "exited", exit_code=0, free=free))
            self._schedule()

    def exchange(self, *agents: SimAgent) -> None:
        for agent in agents or self.living():
            if not agent.ended and not agent.frozen and not agent.cut:
                was_stopping = agent.stopping
                self.say(agent)
                self.answer(agent)
                if was_stopping and not agent.ended and not agent.lingers:
                    self.leave(agent)

    def end_checks(self) -> None:
        """End the checks whose groups are complete; the results follow from the nodes' faults."""
        groups: dict[tuple[int, str, int], list[SimAgent]] = defaultdict(list)
        for agent in self.living():
            if agent.group is not None:
                groups[agent.group].append(agent)
        for agents in groups.values():
            told = agents[0].assignment
            faults = {a.fault for a in agents}
            if told is None or len(agents) < told.nnodes or "hang" in faults:
                continue
            dead = "device" in faults or ("link" in faults and len(agents) > 1)
            for agent in agents:
                seconds = 4.0 if agent.fault == "slow" else 1.0
                agent.check = CheckResult(
                    passed=not dead, why="broke" if dead else "", matmul_s=seconds, allreduce_s=0.5
                )
                agent.phase = WorkerPhase.IDLE

    # --- Time ---

    def to(self, when: float) -> Step:
        """Set the time. If it is before ``wake_at``, nothing may happen."""
        early = when < self.wake_at
        self.now = when
        if early:
            self._quiet(self.wake_at)
            return Step(wake_at=self.wake_at)
        return self.step()

    def pass_time(self, seconds: float, *, exchange_s: float = 1.0) -> None:
        """Let time pass, with exchanges of connected agents and wake-ups of the master.

        Args:
            seconds: duration.
            exchange_s: seconds between two exchanges of an agent.
        """
        end = self.now + seconds
        while self.now < end:
            self.to(min(end, self.now + exchange_s, max(self.wake_at, self.now + 0.25)))
            self.exchange()

    def settle(self, rounds: int = 30) -> None:
        """Deliver all events and boot all agents, until nothing changes any more.

        Args:
            rounds: largest number of rounds of delivery.
        """
        quiet = 0
        for _ in range(rounds):
            told = len(self.history), len(self.facts), len(self.pods)
            self.deliver_facts()
            for node, runs in list(self.pods.items()):
                if runs and node not in self.dying and self.empty(node):
                    self.boot(node)
            self.end_checks()
            self.exchange()
            for node in list(self.dying):
                if not any(agent.lingers for agent in self.agents[node]):
                    self.finish(node)
            quiet += 1
            if told != (len(self.history), len(self.facts), len(self.pods)):
                quiet = 0
            if quiet == 2:
                return

    # --- State ---

    @property
    def desired(self) -> int:
        """The number of nodes that the job has chosen within its bounds, else the user's."""
        worker, target = self.spec.worker, self.job.state.scaling.target
        if worker.scaling is None or worker.scaling.mode != "auto" or target is None:
            return worker.replicas
        return target

    def empty(self, node: NodeId) -> bool:
        """Return whether no agent process runs on a node."""
        return all(agent.ended for agent in self.agents[node])

    @property
    def members(self) -> list[str]:
        return [m.node for m in self.job.state.world.members] if self.job.state.world else []

    def reasons(self) -> list[str]:
        return [e.reason for e in self.job.state.events]

    # --- Checks ---

    def _stale(self, events: tuple[Event, ...]) -> Any:
        """Return the state of the job, if the only event is a stale report; None otherwise."""
        if len(events) != 1 or self.now >= self.wake_at or not isinstance(events[0], Reported):
            return None
        node, report = self.job.live.nodes.get(events[0].node), events[0].report
        life = self._lives[events[0].node]
        if node is None or life.gone or life.boot != report.boot_id or report.seq > life.seq:
            return None
        return self.job.status(0.0, 0.0), node.lease_until, node.suspect_until

    def _note(self, event: Event) -> None:
        match event:
            case NodeEnded(node) | NodeSeen(node):
                self._unseen.discard(node)
                if isinstance(event, NodeEnded) or event.leaving:
                    self._wanted.discard(node)
            case NodesListed(listed):
                self._wanted -= {n for n in self._wanted if n not in listed | self._unseen}
            case Reported(node, report):
                self._unseen.discard(node)
                if report.leaving:
                    self._wanted.discard(node)

    def _take_reports(self, out: Step, events: tuple[Event, ...]) -> None:
        """Check independently whether each report is refused, stale or accepted."""
        refused = {(e.node, e.boot_id) for e in out.effects if isinstance(e, Refuse)}
        for event in events:
            if not isinstance(event, Reported):
                continue
            node, report = event.node, event.report
            known, life = self.job.live.nodes.get(node), self._lives[node]
            if not self.rules.can_create:
                life.gone = False  # no platform can replace the node, so it may come back
            must_refuse = life.gone or known is None or report.boot_id in life.former
            if must_refuse:
                assert (node, report.boot_id) in refused, f"{node} {report.boot_id} must be refused"
                continue
            if (node, report.boot_id) in refused:
                continue
            if life.boot != report.boot_id:
                assert not report.incarnation, (
                    "an incarnation that the master never assigned is refused"
                )
                if life.boot:
                    life.former.add(life.boot)
                life.boot, life.seq = report.boot_id, -1
                life.owes = life.acked = 0
                boot, _ = self.desks.get(node, ("", None))
                if boot != report.boot_id:
                    self.desks[node] = (report.boot_id, None)
            elif self.desks.get(node, ("", None))[0] != report.boot_id:
                self.desks[node] = (report.boot_id, None)
            if report.seq <= life.seq:
                if len(events) == 1:
                    assert out.journal is None, "a stale report changes nothing"
                    assert not [e for e in out.effects if not isinstance(e, Refuse)]
                continue
            life.seq, life.report = report.seq, report
            life.acked = report.have_version if report.have_term == self.job.state.term else 0
            if report.phase is WorkerPhase.SUCCEEDED and report.follows:
                self._successes[report.follows].add(node)

    def _check(
        self, out: Step, before: Any, restarts: dict[str, int], events: tuple[Event, ...]
    ) -> None:
        job = self.job
        self._take_reports(out, events)
        assert job.state.term >= self._term, "terms only grow"
        assert self._round <= job.state.round <= self._round + 1, "one round at a time"
        for node in job.live.nodes:
            if node.phase is NodePhase.GONE:
                self._lives[node.id].gone = True
                self._wanted.discard(node.id)
        self._check_nodes(out)
        if job.state.round > self._round:
            self._check_round(out, before, restarts)
        self._check_assignments(out)
        self._check_events()
        self._check_checkpoints()
        self._check_end()
        if out.journal is not None:
            self._check_status()
        self._term, self._round = job.state.term, job.state.round

    def _check_nodes(self, out: Step) -> None:
        for effect in out.effects:
            if isinstance(effect, DeleteNode):
                self._wanted.discard(effect.node)
            if not isinstance(effect, CreateNode):
                continue
            assert self._end is None, "an ended job creates nothing"
            assert not self.spec.spec.suspend, "a suspended job creates nothing"
            # Otherwise it was requested again, because it never appeared.
            if effect.node not in self._unseen:
                assert effect.node not in self._created, "ids are never reused"
                numbers = [int(n[1:]) for n in self._created]
                assert all(int(effect.node[1:]) > n for n in numbers), "ids grow"
                assert out.journal is not None, "an id is journaled before it is used"
            self._created.add(effect.node)
            self._unseen.add(effect.node)
            self._wanted.add(effect.node)
        wished = self.desired + self.spec.worker.standby_replicas
        if any(isinstance(e, CreateNode) for e in out.effects):
            assert len(self._wanted) <= wished, f"{self._wanted} are more than {wished}"

    def _check_round(self, out: Step, before: Any, restarts: dict[str, int]) -> None:
        job, world = self.job, self.job.state.world
        assert world is not None
        assert world.round == job.state.round
        worker = self.spec.worker
        size = len(world.members)
        assert worker.minimum <= size <= max(worker.replicas, worker.ceiling)
        assert size % worker.node_unit == 0
        assert out.journal is not None
        written = DurableState.from_json(out.journal.to_json())
        assert written.world == world, "a round is journaled before it is sent"
        assert not self.spec.spec.suspend
        nodes = [m.node for m in world.members]
        assert len(set(nodes)) == size
        offset = 0
        for member in world.members:
            life, node = self._lives[member.node], job.live.nodes[member.node]
            assert life.report is not None, "each member has reported to this master"
            assert not life.gone
            assert not node.leaving
            assert not life.report.warming
            if life.report.precheck:
                mark = job.live.health.node_records[member.node]
                assert mark.incarnation == node.incarnation, "each incarnation of a node is checked"
                assert mark.verdict is Verdict.GOOD, "each member has passed its check"
            assert member.incarnation == node.incarnation
            assert life.acked >= life.owes, f"{member.node} has not acknowledged {life.owes}"
            assert member.rank_offset == offset
            assert member.nproc == life.report.nproc
            offset += member.nproc
        assert world.world_size == offset
        offer = (world.master_addr, world.master_port)
        first = self._lives[nodes[0]].report
        assert first is not None
        assert offer == (first.offer.addr, first.offer.port), "the newest offer of rank 0"
        assert offer not in self._offers | self._check_offers, "an offer is for one round"
        self._offers.add(offer)
        domains = {n: job.live.nodes[n].domain for n in nodes}
        # A new node of which nothing is known is in the domain of the lost one, whichever that is.
        ranked = [domains[n] for n in nodes if any(domains[n]) or n in self._domains]
        runs = [domain for domain, _ in groupby(ranked)]
        assert len(runs) == len(set(runs)), "nodes of one domain have neighbouring ranks"
        if before is not None:
            old = [m.node for m in before.members]
            stay = [n for n in old if n in nodes]
            if all(domains[n] == self._domains.get(n) for n in stay):
                assert stay == [n for n in nodes if n in old], "survivors keep their order"
            if size == len(old) and len({*domains.values(), *self._domains.values()}) == 1:
                assert all(nodes.index(n) == old.index(n) for n in stay), "… and their rank"
            gone = [n for n in old if n not in nodes]
            fresh = [n for n in nodes if n not in old]
            able = [n for n in gone if self._may_run(n)]
            assert not (able and fresh), "no survivor makes room for a newcomer"
        self._domains = domains
        told = {e.node for e in out.effects if isinstance(e, Assign)}
        assert told >= set(nodes), "every member receives its assignment in the same step"
        formed = [e for e in job.state.events if e.reason == "RoundFormed"][-1]
        assert formed.round == job.state.round
        assert formed.cause, "every round has a cause"
        assert 0 < formed.cause < formed.id
        ready = [
            n.id
            for n in job.live.nodes
            if n.phase is NodePhase.LIVE
            and n.report is not None  # reported to this master; others are known from the journal
            and not n.leaving
            and not n.held
            and not ((last := self._lives[n.id].report) and last.warming)
            and self._lives[n.id].acked >= (self._lives[n.id].owes if n.id not in nodes else 0)
        ]
        pool = [job.live.nodes[n] for n in ready if before is not None and n in before.rank_of]
        if len(pool) > size:
            ids = [n.id for n in pool]
            least = min(_racks_in_use(pool, some) for some in combinations(ids, size))
            assert _racks_in_use(pool, nodes) == least, "whole racks are given up first"
        full = full_size(self.spec, len(ready), self.desired)
        # The round may take a node out of a check and so end it. The passed nodes come later.
        later = any(e.reason == "NodesChecked" and e.id > formed.id for e in job.state.events)
        assert size == full or (later and size < full), f"{size} of {ready}"
        if before is not None and self._successes[before.round] & {m.node for m in before.members}:
            for kind in ("join", "scale"):
                assert job.state.restarts.get(kind, 0) == restarts.get(kind, 0), (
                    "a round that is about to finish is not resized"
                )

    def _may_run(self, name: NodeId) -> bool:
        """Return whether a node is live, has reported to this master, and needs no check first."""
        node = self.job.live.nodes.get(name)
        heard = self._lives[name].report is not None
        if node is None or node.held:
            return False
        return heard and node.phase is NodePhase.LIVE and not node.leaving

    def _check_checkpoints(self) -> None:
        """Check that offered checkpoints exist, and that at most one node may commit."""
        living = {
            n.id: n for n in self.job.live.nodes if n.phase is not NodePhase.GONE and n.report
        }
        memory = [h for n in living.values() if n.report for h in n.report.memory]
        for found in self.job.live.checkpoints.memory.candidates():
            there = {r for h in memory if h.id == found.id for r in h.ranks}
            assert len(there) == found.world, f"{found} is not complete: {there}"
        orders = [self.job.live.checkpoints.persist_request(n, self.job.state.term) for n in living]
        given = [order for order in orders if order is not None]
        assert len({order.attempt for order in given}) <= 1
        assert sum(bool(order.grant) for order in given) <= 1
        assert all(order.grant in (None, self.job.state.term) for order in given)

    def _check_assignments(self, out: Step) -> None:
        for effect in out.effects:
            if not isinstance(effect, Assign):
                continue
            new, life = effect.assignment, self._lives[effect.node]
            old, life.told = life.told, new
            assert new.term == self.job.state.term
            if old is not None and old.term == new.term:
                assert new.version > old.version, "versions only grow"
                assert new.round >= old.round
                same = old.model_copy(update={"version": new.version})
                assert same != new, "no agent receives the same assignment twice"
            node = self.job.live.nodes.get(effect.node)
            assert node is not None
            assert new.incarnation == node.incarnation >= 1, (
                "a node that never reported receives nothing"
            )
            beside = old is not None and _taken_up(old) == _taken_up(new)
            if not beside and (
                new.directive in (Directive.RUN, Directive.CHECK)
                or (old is not None and old.directive is Directive.RUN)
            ):
                life.owes = new.version
            if new.directive is Directive.CHECK:
                self._check_check(effect.node, new, old)
            if new.directive is not Directive.RUN:
                continue
            world = self.job.state.world
            assert self._end is None
            assert not life.gone, "a node that was given up never runs again"
            assert world is not None
            assert new.round == world.round == self.job.state.round
            member = world.members[new.node_rank]
            assert (member.node, member.incarnation) == (effect.node, new.incarnation)
            facts = (
                tuple((m.node, m.incarnation, m.rank_offset) for m in world.members),
                new.world_size,
                new.nnodes,
                new.master_addr,
                new.master_port,
            )
            assert self._worlds.setdefault(new.round, facts) == facts, "one round, one world"
            assert new.rank_offset == member.rank_offset
            assert new.nnodes == len(world.members)
            assert new.world_size == sum(m.nproc for m in world.members)

    def _check_check(self, node: NodeId, new: Assignment, old: Assignment | None) -> None:
        """Check an assignment to a check of the node."""
        assert not self.spec.spec.suspend
        running = self.job.state.world if self.job.state.phase is JobPhase.RUNNING else None
        if running is not None and not (old is not None and old.check == new.check):
            assert not running.has(node, new.incarnation), "a node that trains is not checked"
        assert new.check <= self.job.live.health.number
        offer = (new.master_addr, new.master_port)
        group = self._groups.setdefault((new.check, *offer), {})
        if not group:
            assert offer not in self._offers | self._check_offers, "an offer is for one group"
            self._check_offers.add(offer)
        group[new.node_rank] = (node, new.rank_offset)
        assert len({n for n, _ in group.values()}) == len(group) <= new.nnodes
        offsets = [group[rank][1] for rank in sorted(group)]
        assert offsets == sorted(set(offsets))
        assert all(offset < new.world_size for offset in offsets)

    def _check_events(self) -> None:
        fresh = [e for e in self.job.state.events if e.id > self._events_seen]
        smaller = any(
            e.reason == "TuningRequested" and "memory ran out" in e.message for e in fresh
        )
        for event in fresh:
            assert event.id == self._events_seen + 1, (event, self._events_seen)
            self._events_seen = event.id
            assert event.cause is None or 0 < event.cause < event.id
            assert event.took_s is None or event.took_s >= 0
            assert "\n" not in event.reason
            if event.reason == "BudgetReset":
                self._charged.clear()
                self._reborn.clear()
                self._exceptions.clear()
                self._early = ""
            if event.reason == "NodeRestarted":
                assert event.node
                self._reborn[event.node] += 1  # also charged, if it was a member
            if event.reason == "WorkerFailed" and not event.node:  # all nodes are charged
                assert self.job.state.world is not None
                for member in self.job.state.world.members:
                    self._charged[member.node] += 1
                most = max(self._charged[m.node] for m in self.job.state.world.members)
                assert self.job.state.phase.ended == (most > self.spec.worker.restart_count)
            elif event.reason == "WorkerFailed" and not smaller:  # a smaller micro-batch is free
                assert event.node
                failed = self.job.state.last_failure
                assert failed is not None
                worker = failed.worker
                budget = self.spec.worker.restart_count
                said = self._lives[NodeId(event.node)].report
                if not self.rules.can_create and said is not None:
                    budget = said.max_restarts or 0
                if self._is_free(worker, may_restart=budget > 0 or failed.round > 1):
                    assert not self.job.state.phase.ended
                    continue
                self._charged[event.node] += 1
                if self._charged[event.node] > budget:
                    node = self.job.live.nodes.get(NodeId(event.node))
                    assert self.job.state.phase.ended or (node is not None and node.leaving), (
                        "a node has no more restarts than its budget"
                    )
                elif self._charged[event.node] + self._reborn[event.node] <= budget:
                    reasons = {e.reason for e in fresh}
                    assert "RestartsExhausted" not in reasons, "… and no fewer"
            if event.reason == "NonRetryable":
                assert len(self._exceptions) >= 2
                (f1, s1, _), (f2, s2, _) = self._exceptions[-2:]
                assert f1 == f2
                assert s1 == s2
        assert self.job.state.warm_starts.suspected == self._doubts

    def _is_free(self, worker: WorkerFailure, *, may_restart: bool) -> bool:
        """Return whether a failure costs nothing, because a fork may be at fault; remember it."""
        early = worker.ran_s < 10 and worker.step is None and worker.exit_code != -9
        early = early and worker.kind in {"exception", "exit", "signal"}
        manner = f"{worker.kind} {worker.exit_code} {worker.fingerprint}"
        exceptions = [fingerprint for fingerprint, _, _ in self._exceptions[-1:]]
        is_known = manner == self._early or worker.fingerprint in exceptions
        if worker.forked and early and not is_known and self._doubts < 2:
            self._doubts += 1
            pending = self.job.state.pending_round
            assert self.job.state.phase.ended or pending is None or pending.cold
            return may_restart and not self._early
        if worker.kind is FailureKind.EXCEPTION:
            self._exceptions.append((worker.fingerprint, worker.step, worker.ran_s))
        if early:
            self._early = manner
        return False

    def _check_end(self) -> None:
        phase = self.job.state.phase
        if self._end is not None:
            assert phase is self._end, "the end is the end"
        elif phase.ended:
            self._end = phase
            if phase is JobPhase.SUCCEEDED:
                world = self.job.state.world
                assert world is not None
                assert {m.node for m in world.members} <= self._successes[world.round]

    def _check_status(self) -> None:
        status = self.job.status(self.now, WALL + self.now)
        assert type(status).model_validate_json(status.model_dump_json()) == status
        world = self.job.state.world
        assert status.round == self.job.state.round
        assert status.nodes_in_round == (len(world.members) if world else 0)
        assert status.phase is not JobPhase.RUNNING or status.world_size > 0
        for said in (status.reason, *(e.message for e in status.events[-3:])):
            assert not re.search(r"\b1 (nodes|workers|steps|restarts)\b", said), said
        assert status.reason
        kinds = [c.type for c in status.conditions]
        assert len(kinds) == len(set(kinds))
        running = [c for c in status.conditions if c.type == "Running"]
        assert (running[0].status == "True") == (status.phase is JobPhase.RUNNING)
        ranks = [n.node_rank for n in status.nodes if n.role is NodeRole.MEMBER]
        assert len(set(ranks)) == len(ranks) <= status.nodes_in_round
        assert None not in ranks
        for node in status.nodes:
            assert node.relaunches <= self.spec.worker.restart_count
            assert node.incarnation >= 0
        if status.phase.ended:
            assert status.ended_at is not None

    def _compare_journal(self) -> None:
        """Check that the stored journal has all state that must outlive the master."""
        assert self.journal is not None
        late = OWN | {"events", "max_step", "next_event", "reason", "pending_round"}
        if any(q.spec.level is Level.AT_LEAST_ONCE for q in self.job.state.shards.values()):
            late |= {"shards"}
        now = dumped(self.job.state, late)
        then = dumped(self.journal, late)
        assert now == then, {k: (then[k], now[k]) for k in now if then[k] != now[k]}
        assert (self.journal.pending_round is None) == (self.job.state.pending_round is None)

    def check_running(self) -> None:
        """Check that the job trains and that each member's agent follows the round."""
        job = self.job
        assert job.state.world is not None, job.state.reason
        assert job.state.phase is JobPhase.RUNNING, (job.state.phase, job.state.reason)
        for member in job.state.world.members:
            agent = self.agents[member.node][-1]
            if member.node in self._successes[job.state.round]:
                continue  # it has finished its work, and may be gone
            assert not agent.ended, (member.node, self.pods, agent, self.reasons()[-12:])
            assert agent.follows == job.state.round, (agent.node, agent.follows, job.state.round)
            assert agent.phase in (WorkerPhase.RUNNING, WorkerPhase.SUCCEEDED)


def dumped(state: DurableState, but: set[str] | None = None) -> dict[str, Any]:
    """Return the fields of a state, whether they are journaled or not.

    Args:
        state: the state.
        but: names of fields to leave out.
    """
    found = {f.name: getattr(state, f.name) for f in fields(DurableState)}
    found["replacement_slots"] = [slot.relaunches for slot in state.replacement_slots]
    return {name: value for name, value in found.items() if name not in (but or set())}


def full_size(spec: ElasticJob, nodes: int, desired: int | None = None) -> int:
    """Return the size of a round for a number of available nodes, and of desired ones."""
    worker = spec.worker
    most = worker.replicas if desired is None else desired
    fits = [n for n in range(worker.minimum, min(nodes, most) + 1) if n % worker.node_unit == 0]
    return max(fits, default=0)


def running(spec: ElasticJob | None = None, rules: Rules | None = None) -> Bench:
    """Return a bench whose first round runs, after all agents have reported it."""
    bench = Bench(spec or elastic_job(), rules)
    bench.step()
    bench.settle()
    bench.check_running()
    return bench


__all__ = [
    "WALL",
    "Bench",
    "SimAgent",
    "crash",
    "elastic_job",
    "fresh_offer",
    "full_size",
    "job_file",
    "running",
    "user_error",
]
