"""A Job whose nodes come by themselves, as with ``--rdzv-backend=static``: no platform replaces
them. Each step is checked by ``tests.builders.Bench``."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dlrover_py.master.core.events import Disconnected, Rules
from dlrover_py.protocol.agents import WorkerPhase
from dlrover_py.protocol.names import NodeId
from tests.builders import Bench, SimAgent, crash, elastic_job, user_error

PICK = st.integers(0, 1000)
NUMBER = st.integers(0, 3)


class StaticMachine(RuleBasedStateMachine):
    """Picks are numbers into what there is at that moment, so that examples shrink well."""

    @initialize(size=st.sampled_from([(1, 1), (2, 1), (3, 2), (3, 3)]))
    def start(self, size: tuple[int, int]) -> None:
        self.bench = Bench(elastic_job(*size), Rules(can_create=False, forgive_after_s=30.0))
        self.bench.step()
        for number in range(size[0]):
            self.bench.boot(NodeId(f"n{number}"))

    def of_phase(self, *phases: WorkerPhase) -> list[SimAgent]:
        return [a for a in self.bench.living() if a.phase in phases and not a.frozen]

    @rule()
    def all_exchange(self) -> None:
        self.bench.exchange()

    @rule()
    def settles(self) -> None:
        self.bench.settle()

    @rule(number=NUMBER)
    def the_same_command_runs_once_more(self, number: int) -> None:
        self.bench.boot(NodeId(f"n{number}"))

    @precondition(lambda self: self.bench.living())
    @rule(pick=PICK, seen=st.booleans())
    def dies(self, pick: int, seen: bool) -> None:
        agents = self.bench.living()
        agent = agents[pick % len(agents)]
        agent.ended = True
        if seen:
            self.bench.step(Disconnected(agent.node, agent.boot, agent.seq))

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(pick=PICK, step=st.one_of(st.none(), st.integers(1, 3)))
    def fails(self, pick: int, step: int | None) -> None:
        agents = self.of_phase(WorkerPhase.RUNNING)
        agents[pick % len(agents)].fail(crash() if step is None else user_error(step=step))

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(pick=PICK)
    def is_asked_to_go(self, pick: int) -> None:
        agents = self.of_phase(WorkerPhase.RUNNING)
        agents[pick % len(agents)].leaving = "the agent received SIGTERM"

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(pick=PICK)
    def succeeds(self, pick: int) -> None:
        agents = self.of_phase(WorkerPhase.RUNNING)
        agents[pick % len(agents)].succeed()

    @precondition(lambda self: self.of_phase(WorkerPhase.RUNNING))
    @rule(more=st.integers(1, 3))
    def trains(self, more: int) -> None:
        for agent in self.of_phase(WorkerPhase.RUNNING):
            agent.reach((agent.progress.step if agent.progress else 0) + more)

    @rule()
    def master_restarts(self) -> None:
        self.bench.restart_master()

    @rule(seconds=st.sampled_from([1.0, 6.0, 35.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.pass_time(seconds)

    @invariant()
    def no_life_is_given_twice(self) -> None:
        if hasattr(self, "bench"):
            for node, agents in self.bench.agents.items():
                lives = [a.incarnation for a in agents if a.incarnation]
                assert len(set(lives)) == len(lives), (node, lives)


def test_a_static_job_survives_everything() -> None:
    run_state_machine_as_test(
        StaticMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=30,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
