"""A Job against everything that a platform, agents, a network, a user and a crash can do to it.

Each step is checked by ``tests.builders.Bench``; here is what may happen, and that a job recovers
once the faults stop. More examples: ``HYPOTHESIS_PROFILE=nightly``.
"""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dlrover_py.master.core.events import (
    Disconnected,
    JobStopped,
    Reported,
    RestoreAsked,
    RoomSeen,
    Rules,
    Stalled,
)
from dlrover_py.protocol.agents import FailureKind, PersistPhase, WorkerPhase
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import JobPhase
from tests.builders import Bench, SimAgent, crash, elastic_job, full_size, user_error

RULES = Rules(forgive_after_s=30.0, check_s=30.0, measure_s=1.0)
QUARTERS = st.integers(1, 8).map(lambda n: n / 4)
PICK = st.integers(0, 1000)
FAULTS = st.sampled_from(["device", "link", "slow", "hang"])


class JobMachine(RuleBasedStateMachine):
    """Picks are numbers into what there is at that moment, so that examples shrink well."""

    @initialize(
        size=st.sampled_from([(1, 1), (2, 1), (3, 1), (3, 2), (3, None), (4, 2)]),
        unit=st.sampled_from([1, 1, 2]),
        standby=st.integers(0, 1),
        restarts=st.integers(0, 3),
        capacity=st.integers(1, 6),
        warm=st.booleans(),
        early_list=st.booleans(),
        precheck=st.sampled_from([0, 0, 1, 2]),
        racks=st.integers(1, 3),
        bad=st.dictionaries(st.integers(0, 6), FAULTS, max_size=3),
        mode=st.sampled_from(["off", "off", "advise", "auto", "auto"]),
    )
    def start(
        self,
        size: tuple[int, int | None],
        unit: int,
        standby: int,
        restarts: int,
        capacity: int,
        warm: bool,
        early_list: bool,
        precheck: int,
        racks: int,
        bad: dict[int, str],
        mode: str,
    ) -> None:
        replicas, minimum = size
        if replicas % unit or (minimum or 0) % unit:
            unit = 1
        autoscale: dict[str, Any] = {"mode": mode, "scaleUpDelaySeconds": 1}
        autoscale["waitForSpareSeconds"] = 2 if standby else None
        more: dict[str, Any] = {} if mode == "off" else {"maxReplicas": 8, "autoscale": autoscale}
        spec = elastic_job(replicas, minimum, unit=unit, standby=standby, restarts=restarts, **more)
        self.bench = Bench(spec, RULES, capacity=max(capacity, 6 if warm else 0))
        self.bench.precheck, self.bench.racks = precheck, racks
        self.bench.faults.update((f"n{number}", fault) for number, fault in bad.items())
        listing = self.bench.listing() if early_list else None
        self.bench.step()
        if listing:
            self.bench.step(*listing)
        if warm:
            self.bench.settle()

    # --- picking ---

    def speaking(self) -> list[SimAgent]:
        return [a for a in self.bench.living() if not a.frozen]

    def of_phase(self, *phases: WorkerPhase) -> list[SimAgent]:
        return [a for a in self.speaking() if a.phase in phases]

    # --- the network ---

    @precondition(lambda self: self.speaking())
    @rule(pick=PICK)
    def sends(self, pick: int) -> None:
        agents = self.speaking()
        agent = agents[pick % len(agents)]
        self.bench.in_flight.append((agent, agent.report()))

    @precondition(lambda self: self.bench.in_flight)
    @rule(pick=PICK, again=st.booleans(), with_facts=st.booleans())
    def arrives(self, pick: int, again: bool, with_facts: bool) -> None:
        """In any order, once or twice, alone or in one turn with what the platform says."""
        index = pick % len(self.bench.in_flight)
        agent, report = self.bench.in_flight[index]
        if not again:
            del self.bench.in_flight[index]
        facts, self.bench.facts = (self.bench.facts, []) if with_facts else ([], self.bench.facts)
        self.bench.step(Reported(agent.node, report), *facts)

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def is_lost(self) -> None:
        self.bench.in_flight.clear()

    @precondition(lambda self: self.speaking())
    @rule(pick=PICK)
    def hears(self, pick: int) -> None:
        agents = self.speaking()
        self.bench.answer(agents[pick % len(agents)])

    @precondition(lambda self: self.bench.history)
    @rule(pick=PICK)
    def hears_late(self, pick: int) -> None:
        boot, assignment = self.bench.history[pick % len(self.bench.history)]
        for agent in self.speaking():
            if agent.boot == boot and assignment.term <= self.bench.job.state.term:
                old = agent.have
                if (assignment.term, assignment.version) <= old:
                    agent.receive(assignment)
                    assert agent.have == old

    @precondition(lambda self: self.speaking())
    @rule(pick=PICK)
    def exchanges(self, pick: int) -> None:
        agents = self.speaking()
        self.bench.exchange(agents[pick % len(agents)])

    @rule()
    def all_exchange(self) -> None:
        self.bench.exchange()

    @rule()
    def settles(self) -> None:
        self.bench.settle()

    @precondition(lambda self: self.speaking())
    @rule(pick=PICK, newest=st.booleans())
    def disconnects(self, pick: int, newest: bool) -> None:
        agents = self.speaking()
        agent = agents[pick % len(agents)]
        seq = agent.seq if newest else max(0, agent.seq - 1)
        self.bench.step(Disconnected(agent.node, agent.boot, seq))

    @precondition(lambda self: self.bench.living())
    @rule(pick=PICK)
    def cut_or_healed(self, pick: int) -> None:
        agents = self.bench.living()
        agent = agents[pick % len(agents)]
        agent.cut = not agent.cut

    # --- agents and workers ---

    @rule(pick=PICK, nproc=st.sampled_from([1, 1, 2]))
    def boots(self, pick: int, nproc: int) -> None:
        nodes = [n for n, up in self.bench.pods.items() if up and self.bench.empty(n)]
        if nodes:
            self.bench.boot(nodes[pick % len(nodes)], nproc)

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(
        pick=PICK,
        kind=st.sampled_from(list(FailureKind)),
        text=st.sampled_from(["a", "b"]),
        step=st.sampled_from([None, 1, 2]),
        forked=st.booleans(),
        tell=st.booleans(),
    )
    def worker_fails(
        self,
        pick: int,
        kind: FailureKind,
        text: str,
        step: int | None,
        forked: bool,
        tell: bool,
    ) -> None:
        agents = self.of_phase(WorkerPhase.RUNNING)
        agent = agents[pick % len(agents)]
        exception = kind is FailureKind.EXCEPTION
        failure = user_error(text, step) if exception else crash(kind, step=step)
        forked = forked and agent.assignment is not None and not agent.assignment.cold
        agent.fail(failure.model_copy(update={"forked": forked}))
        if tell:
            self.bench.exchange(agent)

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(pick=PICK, tell=st.booleans())
    def workers_succeed(self, pick: int, tell: bool) -> None:
        agents = self.of_phase(WorkerPhase.RUNNING)
        agent = agents[pick % len(agents)]
        agent.succeed()
        if tell:
            self.bench.exchange(agent)

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(pick=PICK, tell=st.booleans())
    def stops_by_itself(self, pick: int, tell: bool) -> None:
        agents = self.of_phase(WorkerPhase.RUNNING)
        agent = agents[pick % len(agents)]
        agent.stop_itself()
        if tell:
            self.bench.exchange(agent)

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(more=st.integers(1, 3))
    def trains(self, more: int) -> None:
        self.all_train(more)
        self.bench.exchange()

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(speed=st.integers(6, 30))
    def trains_at_a_steady_speed(self, speed: int) -> None:
        for _ in range(8):
            self.all_train(speed)
            self.bench.pass_time(1.0)

    @rule(hosts=st.integers(0, 3))
    def platform_has_room(self, hosts: int) -> None:
        self.bench.step(RoomSeen(hosts))

    # --- checkpoints ---

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(step=st.integers(1, 9), persist=st.booleans(), tell=st.booleans())
    def saves(self, step: int, persist: bool, tell: bool) -> None:
        for agent in self.of_phase(WorkerPhase.RUNNING):
            agent.save(step, persist=persist)
        if tell:
            self.bench.exchange()

    @precondition(lambda self: self.speaking())
    @rule(pick=PICK, phase=st.sampled_from(list(PersistPhase)))
    def writes(self, pick: int, phase: PersistPhase) -> None:
        agents = self.speaking()
        agent = agents[pick % len(agents)]
        agent.write(phase)
        self.bench.exchange(agent)

    @rule(round_number=st.integers(0, 4))
    def asks(self, round_number: int) -> None:
        self.bench.step(RestoreAsked(0, round_number))

    @precondition(lambda self: self.bench.living())
    @rule(pick=PICK)
    def freezes_or_thaws(self, pick: int) -> None:
        agents = self.bench.living()
        agent = agents[pick % len(agents)]
        agent.frozen = not agent.frozen

    @precondition(lambda self: self.speaking())
    @rule(pick=PICK)
    def agent_restarts(self, pick: int) -> None:
        agents = [a for a in self.speaking() if a.node in self.bench.pods]
        if agents:
            self.bench.boot(agents[pick % len(agents)].node)

    # --- checks before the training ---

    @rule(number=st.integers(0, 12), fault=FAULTS)
    def a_node_is_bad(self, number: int, fault: str) -> None:
        """Whoever is booted on it."""
        self.bench.faults[f"n{number}"] = fault

    @rule(precheck=st.integers(0, 1))
    def wishes_change(self, precheck: int) -> None:
        self.bench.precheck = precheck

    @rule()
    def checks_end(self) -> None:
        self.bench.end_checks()

    # --- nodes ---

    @precondition(lambda self: self.bench.pods)
    @rule(pick=PICK)
    def node_dies(self, pick: int) -> None:
        self.bench.kill(list(self.bench.pods)[pick % len(self.bench.pods)])

    @precondition(lambda self: self.speaking())
    @rule(pick=PICK)
    def is_drained(self, pick: int) -> None:
        agents = self.speaking()
        agents[pick % len(agents)].leaving = "drained"

    @precondition(lambda self: self.bench.dying)
    @rule(pick=PICK)
    def has_ended(self, pick: int) -> None:
        dying = sorted(self.bench.dying)
        self.bench.finish(dying[pick % len(dying)])

    @rule(hosts=st.integers(0, 6))
    def capacity_is(self, hosts: int) -> None:
        self.bench.set_capacity(hosts)

    @precondition(lambda self: self.bench.facts)
    @rule(number=st.integers(1, 6))
    def platform_tells(self, number: int) -> None:
        self.bench.deliver_facts(number)

    @rule()
    def platform_lists(self) -> None:
        self.bench.relist()

    # --- the user ---

    @rule(replicas=st.integers(1, 5), away=st.booleans())
    def scales(self, replicas: int, away: bool) -> None:
        spec = self.bench.spec
        worker = spec.worker
        if replicas >= (worker.min_replicas or 1) and not replicas % worker.node_unit:
            self.change(spec.scaled(replicas), away)

    def change(self, spec: ElasticJob, away: bool) -> None:
        if away:  # while no master is there
            self.bench.spec = spec
            self.bench.restart_master()
        else:
            self.bench.change(spec)

    @rule(often=st.integers(0, 3), away=st.booleans())
    def suspends_or_resumes(self, often: int, away: bool) -> None:
        suspended = self.bench.spec.spec.suspend
        if suspended or not often:  # rare, for it ends all that went on
            self.change(self.bench.spec.suspended(not suspended), away)

    @rule(at=st.sampled_from("abc"), rolling=st.booleans(), away=st.booleans())
    def restarts_all_nodes(self, at: str, rolling: bool, away: bool) -> None:
        self.change(self.bench.spec.restarted(at, rolling=rolling), away)

    @rule(often=st.integers(0, 30))
    def ends_the_job(self, often: int) -> None:
        if not often:
            self.bench.step(JobStopped())

    # --- the master ---

    @rule()
    def master_restarts(self) -> None:
        self.bench.restart_master()

    @rule(how=st.sampled_from(["before", "after"]), kept=st.integers(0, 3))
    def master_dies_in_next_write(self, how: str, kept: int) -> None:
        self.bench.crash = (how, kept)

    @rule(seconds=QUARTERS)
    def master_stands_still(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.step(Stalled(seconds))

    # --- time ---

    @rule(seconds=QUARTERS)
    def moment_passes(self, seconds: float) -> None:
        self.bench.to(self.bench.now + seconds)

    @rule(seconds=st.sampled_from([1.0, 2.0, 5.0, 6.0, 11.0, 35.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.pass_time(seconds)

    @rule()
    def until_due(self) -> None:
        if self.bench.wake_at < self.bench.now + 100:
            self.bench.to(self.bench.wake_at)

    # --- what holds whenever ---

    @invariant()
    def rounds_start_once(self) -> None:
        for agents in self.bench.agents.values():
            for agent in agents:
                assert agent.starts == sorted(set(agent.starts))

    def all_write(self) -> None:
        """Who is to write a checkpoint does; until then some may not end."""
        for agent in self.bench.living():
            agent.write(PersistPhase.DONE)
        self.bench.settle()

    def all_train(self, more: int = 1) -> None:
        for agent in self.of_phase(WorkerPhase.RUNNING):
            agent.reach((agent.progress.step if agent.progress else 0) + more)

    def teardown(self) -> None:
        """The faults stop: the job recovers, and then it finishes."""
        if not hasattr(self, "bench") or self.bench.broken:
            return
        bench = self.bench
        bench.crash = None
        bench.faults.clear()
        for agent in bench.living():
            agent.cut = agent.frozen = False
            agent.fault = ""
            if agent.leaving:
                bench.exchange(agent)
                bench.leave(agent)
        if bench.spec.spec.suspend:
            bench.settle()
            assert bench.job.state.phase is JobPhase.SUSPENDED or bench.job.state.phase.ended
            assert not any(a.running for a in bench.living()), "nobody works in a suspended job"
            bench.change(bench.spec.suspended(False))
        bench.set_capacity(100)
        for _ in range(8):  # delays of replacement are at most a minute
            self.all_write()
            bench.settle()
            self.all_train()  # a rolling restart waits for a step of each round
            bench.pass_time(20.0)
        for _ in range(2):  # the last change of size takes a moment
            bench.settle()
            bench.pass_time(2.0)
        bench.settle()
        if bench.job.state.phase.ended:
            assert not any(a.running for a in bench.living())
            return
        bench.check_running()
        assert bench.job.state.world is not None
        if not bench.job.state.succeeded:
            worker = bench.spec.worker
            nodes = bench.desired + worker.standby_replicas - bench.job.state.abandoned_slots
            assert len(bench.members) == full_size(bench.spec, nodes, bench.desired)
            assert len(bench.pods) == nodes, "neither too many nodes nor too few"
            restart = bench.spec.spec.restart
            if restart is not None:
                at = {n.record.restart for n in bench.job.live.nodes if n.id in bench.pods}
                assert at == {restart.at}, "a restart that was asked for comes to its end"
        round_before = bench.job.state.round
        for node in bench.members:
            agent = bench.agent(node)
            if agent.running:
                agent.succeed()
        bench.settle()
        assert bench.job.state.phase is JobPhase.SUCCEEDED
        assert bench.job.state.round == round_before
        assert all(agent.lingers for agent in bench.living())
        self.all_write()
        self.all_write()  # one of them needed a grant
        assert not bench.living()
        assert not bench.pods


EXAMPLES = {"nightly": (4000, 80), "default": (60, 40)}


def test_a_job_survives_everything() -> None:
    profile = os.environ.get("HYPOTHESIS_PROFILE", "default")
    examples, steps = EXAMPLES.get(profile, EXAMPLES["default"])
    run_state_machine_as_test(
        JobMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )


def test_a_wake_up_that_became_idle_in_its_step_is_harmless() -> None:
    """The surplus node is replaced by the rolling restart, before it could have been dismissed."""
    bench = Bench(elastic_job(2, 1), RULES, capacity=6)
    bench.step()
    bench.settle()
    bench.change(bench.spec.scaled(1))
    bench.change(bench.spec.restarted("a", rolling=True))
    for _ in range(3):
        bench.settle()
        bench.pass_time(20.0)
    bench.check_running()
