"""One story each; the bench checks every step of each of them (tests/builders.py)."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dlrover_py.cli import view
from dlrover_py.master.core.events import (
    Assign,
    CreateNode,
    DeleteNode,
    Disconnected,
    JobChanged,
    JobStopped,
    NodeEnded,
    NodeSeen,
    NodesListed,
    Refuse,
    Reported,
    RestoreAnswer,
    RestoreAsked,
    Rules,
    Stalled,
)
from dlrover_py.master.core.job import Job
from dlrover_py.master.core.reports import REFUSAL_EVENTS_PER_MINUTE
from dlrover_py.master.core.state import JOURNAL, DurableState
from dlrover_py.protocol.agents import (
    Confidence,
    Directive,
    FailureClass,
    FailureKind,
    PersistPhase,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import InvariantError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId, Term
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase, StoreAnswer, summarize
from tests.builders import Bench, SimAgent, crash, elastic_job, job_file, running, user_error

N1 = NodeId("n1")


def phase(bench: Bench) -> JobPhase:
    """The phase of its job; mypy takes an attribute to stay as it was."""
    return bench.job.state.phase


def by_themselves(*nodes: str, replicas: int = 2, minimum: int = 1) -> Bench:
    """A job on machines that nobody creates: agents come by themselves."""
    bench = Bench(elastic_job(replicas, minimum), Rules(can_create=False))
    bench.step()
    for node in nodes:
        bench.agents[NodeId(node)].append(SimAgent(NodeId(node), max_restarts=2))
    bench.settle()
    return bench


# --- forming ---


def test_a_job_starts_when_all_have_come() -> None:
    bench = running(elastic_job(3, 2, standby=1))
    assert bench.members == ["n0", "n1", "n2"]
    assert bench.reasons().count("RoundFormed") == 1
    waits = bench.agent("n3").assignment
    assert waits is not None
    assert waits.directive is Directive.WAIT


def test_with_too_little_room_it_starts_small_and_grows() -> None:
    bench = Bench(elastic_job(3, 2), capacity=2)
    bench.step()
    bench.settle()
    assert bench.members == ["n0", "n1"]
    bench.set_capacity(3)
    bench.settle()
    assert bench.members == ["n0", "n1", "n2"]
    assert bench.job.state.restarts == {"join": 1}


def test_a_node_that_is_near_is_waited_for() -> None:
    bench = Bench(elastic_job(3, 2))
    bench.step()
    bench.deliver_facts()
    for node in ("n0", "n1"):
        bench.boot(NodeId(node))
    bench.exchange()
    assert bench.job.state.world is None
    assert bench.wake_at <= 10.0
    bench.pass_time(9.75)
    assert bench.job.state.world is None
    bench.pass_time(0.25)
    assert bench.members == ["n0", "n1"]


def test_offsets_follow_unequal_nodes() -> None:
    bench = Bench(elastic_job(2))
    bench.step()
    bench.deliver_facts()
    bench.boot(NodeId("n0"), nproc=2)
    bench.boot(NodeId("n1"), nproc=3)
    bench.settle()
    told = bench.agent("n1").assignment
    assert told is not None
    assert (told.rank_offset, told.world_size, told.nnodes) == (2, 5, 2)


# --- failures ---


def test_a_failed_worker_restarts_all_in_place() -> None:
    bench = running(elastic_job(2))
    bench.agent("n1").fail(crash())
    bench.settle()
    assert bench.job.state.round == 2
    assert all(a.starts == [1, 2] for a in bench.living())
    assert (bench.job.state.restarts, bench.job.state.restart_count) == ({"failure": 1}, 1)


def test_a_lost_node_is_replaced_by_the_standby_at_its_rank() -> None:
    bench = running(elastic_job(3, 2, standby=1))
    bench.kill(N1)
    bench.deliver_facts()
    assert bench.members == ["n0", "n3", "n2"]
    bench.settle()
    assert bench.job.state.round == 2, "the new standby disturbs nobody"
    assert sorted(bench.pods) == ["n0", "n2", "n3", "n4"]


def test_without_a_standby_it_shrinks_and_grows_again() -> None:
    bench = running(elastic_job(3, 2))
    bench.set_capacity(2)
    bench.kill(N1)
    bench.settle()
    assert bench.members == ["n0", "n2"]
    bench.set_capacity(3)
    bench.settle()
    assert bench.members == ["n0", "n2", "n3"]


def test_below_the_minimum_the_workers_stop_and_wait() -> None:
    bench = running(elastic_job(2, 2))
    bench.set_capacity(1)
    bench.kill(N1)
    bench.settle()
    assert bench.job.state.phase is JobPhase.FORMING
    assert not bench.agent("n0").running
    bench.set_capacity(2)
    bench.settle()
    bench.check_running()


def test_a_silent_node_is_lost_after_its_lease_and_refused_when_it_comes_back() -> None:
    bench = running(elastic_job(2, 1))
    ghost = bench.agent("n1")
    ghost.frozen = True
    bench.pass_time(6.0)
    bench.settle()
    assert bench.job.live.nodes[N1].phase is NodePhase.GONE
    ghost.frozen = False
    out = bench.say(ghost)
    assert [e.node for e in out.effects if isinstance(e, Refuse)] == ["n1"]
    assert bench.job.state.world is not None
    assert "n1" not in bench.members


def test_refusals_do_not_flood_the_events() -> None:
    bench = running(elastic_job(2, 1))
    ghost = bench.agent("n1")
    ghost.frozen = True
    bench.kill(N1)
    bench.deliver_facts()
    for _ in range(5):
        bench.say(ghost)
    assert bench.reasons().count("NodeRefused") == 1


def test_a_closed_connection_is_forgiven_within_its_grace() -> None:
    bench = running(elastic_job(2, 1))
    agent = bench.agent("n1")
    bench.step(Disconnected(N1, agent.boot, agent.seq))
    bench.pass_time(0.75, exchange_s=5)
    assert bench.job.state.round == 1
    agent.cut = True
    bench.step(Disconnected(N1, agent.boot, agent.seq))
    bench.pass_time(1.0)
    assert bench.job.live.nodes[N1].phase is NodePhase.GONE


def test_nodes_that_have_stopped_by_themselves_get_another_round_and_no_blame() -> None:
    """The master was away, or they were cut off from it, for less than their lease."""
    bench = running(elastic_job(3, 2))
    for node in ("n1", "n2"):
        bench.agent(node).stop_itself()
    bench.settle()
    assert bench.job.state.round == 2
    assert bench.members == ["n0", "n1", "n2"]
    assert bench.job.state.restarts == {"loss": 1}
    assert bench.reasons().count("NodeCutOff") == 1, "one event, however many they are"
    assert not any(n.restarts or n.relaunches for n in bench.job.live.nodes)
    bench.check_running()


def test_a_broken_connection_between_workers_waits_for_its_cause() -> None:
    bench = running(elastic_job(3, 2))
    bench.agent("n0").fail(crash(FailureKind.PEER))
    bench.exchange(bench.agent("n0"))
    assert bench.job.state.round == 1
    bench.agent("n2").fail(crash())
    bench.settle()
    failed = bench.job.state.last_failure
    assert failed is not None
    assert failed.node == "n2"
    assert {n.id: n.restarts for n in bench.job.live.nodes}[NodeId("n0")] == 0


def test_a_rank_that_ended_before_the_others_is_the_cause_of_their_broken_connection() -> None:
    bench = running(elastic_job(3, 2))
    bench.agent("n2").succeed()
    bench.exchange(bench.agent("n2"))
    bench.agent("n0").fail(crash(FailureKind.PEER))
    bench.exchange(bench.agent("n0"))
    bench.pass_time(bench.job.live.rules.cause_wait_s + 1)
    failed = bench.job.state.last_failure
    assert failed is not None
    assert failed.node == "n0"
    cause = failed.worker.cause
    assert cause is not None
    assert (cause.failure_class, cause.confidence) == (FailureClass.CODE, Confidence.LIKELY)
    assert cause.evidence.startswith("rank 2 had ended with exit code 0 while others waited")


def test_a_node_that_was_cut_off_is_the_cause_of_a_broken_connection() -> None:
    """Once it is reached again, its peer's worker may be the first to tell."""
    bench = running(elastic_job(3, 2))
    bench.agent("n0").fail(crash(FailureKind.PEER))
    bench.exchange(bench.agent("n0"))
    bench.agent("n2").stop_itself()
    bench.settle()
    assert bench.job.state.restarts == {"loss": 1}
    assert not any(n.restarts for n in bench.job.live.nodes)
    bench.check_running()


@pytest.mark.parametrize("returns", [False, True])
def test_who_is_not_heard_may_be_the_cause_of_a_broken_connection(returns: bool) -> None:
    bench = running(elastic_job(3, 2))
    lost = bench.agent("n2")
    lost.cut = True
    bench.pass_time(3.0)
    bench.agent("n0").fail(crash(FailureKind.PEER))
    bench.pass_time(1.0)
    assert bench.job.state.round == 1
    lost.cut = not returns
    bench.pass_time(2.0)
    bench.settle()
    assert bench.job.state.round == 2
    assert bench.job.live.nodes[NodeId("n0")].restarts == int(returns), "it trained all the time"
    assert bench.job.state.restarts == ({"failure": 1} if returns else {"loss": 1})
    bench.check_running()


def broken_by(name: str) -> tuple[Bench, SimAgent]:
    """An agent ends between two reports, and another one says that a connection has broken."""
    bench = running(elastic_job(3, 2))
    bench.pass_time(2.0)
    lost = bench.agent(name)
    lost.cut = True
    bench.to(bench.now + 0.1)
    bench.agent("n0").fail(crash(FailureKind.PEER))
    bench.exchange()
    return bench, lost


def test_who_ended_between_two_reports_may_be_the_cause_of_a_broken_connection() -> None:
    """No report of its agent waited for an answer, so no connection told of its end: the platform
    does, a second later."""
    bench, lost = broken_by("n2")
    bench.pass_time(1.0)
    assert bench.job.state.round == 1, "n2 was heard of 1.1 s ago, but not since"
    bench.kill(lost.node)
    bench.settle()
    assert bench.job.state.restarts == {"loss": 1}
    assert not any(n.restarts for n in bench.job.live.nodes)


def test_a_master_that_stood_still_has_heard_of_nobody_meanwhile() -> None:
    """Its journal is slow to be written just then, say."""
    bench, lost = broken_by("n2")
    for stood_s in (1.5, 2 * bench.job.live.pace.lease_s):
        bench.now += stood_s
        bench.step(Stalled(stood_s))
        assert bench.job.state.round == 1
    bench.kill(lost.node)
    bench.settle()
    assert bench.job.state.restarts["loss"] == 1
    assert not any(n.restarts for n in bench.job.live.nodes)


def test_callers_by_ever_new_names_do_not_drive_all_else_from_the_events() -> None:
    bench = running(elastic_job(2, 1))
    for minute in (1, 2):
        for number in range(1000):
            stranger = SimAgent(NodeId(f"stranger{number}"), boot=f"boot-{minute}-{number:04}")
            bench.step(Reported(stranger.node, stranger.report()))
        assert bench.reasons().count("NodeRefused") == minute * REFUSAL_EVENTS_PER_MINUTE
        assert "RoundFormed" in bench.reasons()
        bench.now += 60.0
        bench.exchange()


def test_workers_of_the_round_before_are_not_shown_as_this_ones() -> None:
    bench = running(elastic_job(2, 2))
    survivor = bench.agent("n1")
    survivor.cut = True
    bench.agent("n0").fail(crash())
    bench.exchange()
    bench.exchange()
    assert bench.job.state.round == 2

    def shown() -> tuple[WorkerPhase, list[int]]:
        (node,) = (n for n in bench.job.status(bench.now, 0.0).nodes if n.id == N1)
        return node.workers, node.pids

    assert shown() == (WorkerPhase.STOPPING, [])
    survivor.cut = False
    bench.settle()
    assert shown() == (WorkerPhase.RUNNING, [2001])


def test_who_has_hung_up_on_a_master_that_stood_still_is_given_time_to_come_back() -> None:
    bench = running(elastic_job(2, 1))
    lease_s, agent = bench.job.live.pace.lease_s, bench.agent("n1")
    bench.now += 2 * lease_s
    bench.step(Stalled(2 * lease_s))
    bench.step(Disconnected(N1, agent.boot, agent.seq))
    bench.now += lease_s - 0.1
    bench.step()
    assert "NodeLost" not in bench.reasons()
    bench.exchange()
    assert bench.job.state.round == 1, "it is back"


def test_a_master_that_takes_over_before_the_first_step_of_a_round_tells_of_it() -> None:
    bench = running(elastic_job(3, 2))
    for round_ in (1, 2):
        assert bench.job.state.round == round_
        bench.restart_master()
        bench.exchange()
        for node in ("n0", "n1", "n2"):
            bench.agent(node).reach(5 * round_)
        bench.settle()
        bench.restart_master()
        bench.exchange()
        assert bench.reasons().count("TrainingResumed") == round_, "and the next one not again"
        if round_ == 1:
            bench.agent("n0").fail(crash())
            bench.settle()


def test_with_no_other_cause_it_is_the_fault_of_who_said_it() -> None:
    bench = running(elastic_job(3, 2))
    bench.agent("n0").fail(crash(FailureKind.PEER))
    bench.exchange()
    assert bench.wake_at == bench.now + 0.25
    bench.to(bench.wake_at)
    bench.settle()
    assert bench.job.live.nodes[NodeId("n0")].restarts == 1
    bench.check_running()


def test_a_second_failure_of_a_round_is_a_consequence() -> None:
    bench = running(elastic_job(3, 2))
    bench.agent("n0").fail(crash())
    bench.agent("n1").fail(crash())
    bench.settle()
    assert bench.reasons().count("WorkerFailed") == 1


def test_a_failure_counts_though_the_round_was_about_to_grow() -> None:
    bench = Bench(elastic_job(4, 2), capacity=2)
    bench.step()
    bench.settle()
    bench.set_capacity(4)
    bench.deliver_facts()
    bench.boot(NodeId("n2"))
    bench.exchange()
    assert bench.job.state.pending_round is not None
    assert bench.job.state.pending_round.kind == "join", "n3 is near, and waited for"
    bench.agent("n0").fail(crash())
    bench.settle()
    assert bench.job.state.restarts == {"failure": 1}
    bench.check_running()


def test_the_same_exception_at_the_same_step_stops_the_job() -> None:
    bench = running(elastic_job(2, 1))
    for _ in range(2):
        bench.agent("n0").fail(user_error("E", 5))
        bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.reasons()[-1] == "NonRetryable"
    assert not bench.living()
    kinds = {c.type: c for c in bench.job.status(bench.now, 0.0).conditions}
    assert kinds["Failed"].reason == "NonRetryable"


def test_other_exceptions_use_up_the_budget_then_the_node_then_the_job() -> None:
    bench = running(elastic_job(1, 1, restarts=1))
    for step in range(2):
        bench.agent("n0").fail(user_error("E", step))
        bench.settle()
    assert bench.members == ["n1"], "its restarts were used up, so it was replaced"
    for step in range(2, 4):
        bench.agent("n1").fail(user_error("E", step))
        bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.reasons()[-1] == "RestartsExhausted"


def test_lost_nodes_are_replaced_so_often_and_then_the_job_ends() -> None:
    bench = running(elastic_job(2, 2, restarts=1))
    bench.kill(N1)
    bench.settle()
    assert bench.members == ["n0", "n2"]
    bench.kill(NodeId("n2"))
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.reasons()[-1] == "ReplacementsExhausted"
    assert bench.job.state.reason.startswith(
        "fewer nodes than the minimum of 2 remain: 1 is not replaced; the last loss:"
    )


def test_later_replacements_wait() -> None:
    bench = running(elastic_job(2, 1))
    for node in ("n1", "n2"):
        bench.kill(NodeId(node))
        bench.settle()
    assert sorted(bench.pods) == ["n0"]
    bench.pass_time(1.0)
    assert sorted(bench.pods) == ["n0", "n3"]


def test_steady_progress_forgives() -> None:
    bench = running(elastic_job(1, 1, restarts=1), Rules(forgive_after_s=20))
    for turn in range(4):
        bench.agent("n0").fail(user_error("E", turn))
        bench.settle()
        bench.agent("n0").reach(10 * (turn + 1))
        bench.pass_time(25.0)
    assert bench.reasons().count("BudgetReset") == 4
    assert bench.members == ["n0"]


def test_time_without_new_ground_does_not_forgive() -> None:
    bench = running(elastic_job(1, 1), Rules(forgive_after_s=20))
    bench.agent("n0").reach(10)
    bench.exchange()
    bench.agent("n0").fail(crash(step=10))
    bench.settle()
    bench.agent("n0").reach(10)
    bench.pass_time(50.0)
    assert "BudgetReset" not in bench.reasons()
    bench.agent("n0").reach(11)
    bench.pass_time(25.0)
    assert "BudgetReset" in bench.reasons()


def resumed(bench: Bench) -> str:
    """The newest event of a round whose first step was reported."""
    events = bench.job.state.events
    return next(e.message for e in reversed(events) if e.reason == "TrainingResumed")


@pytest.mark.parametrize("how", ["a late report of round 1", "the first report of round 2"])
def test_steps_that_are_told_after_the_next_round_was_formed_had_been_reached(how: str) -> None:
    bench = running(elastic_job(2, 1), Rules(forgive_after_s=20))
    agent = bench.agent("n0")
    agent.reach(10)
    bench.exchange()
    agent.reach(13)
    bench.change(elastic_job(1, 1))
    bench.to(bench.wake_at)
    assert bench.job.state.round == 2
    if how == "a late report of round 1":
        bench.say(agent)
        agent.progress = None
    bench.answer(agent)
    agent.reach(14)
    bench.exchange()
    assert resumed(bench) == (
        "first step of round 2 is 14; step 13 had been reached: no steps are repeated"
    )


def test_steps_of_the_last_round_are_no_progress_of_the_next() -> None:
    bench = running(elastic_job(2, 1), Rules(forgive_after_s=20))
    agent = bench.agent("n0")
    agent.reach(10)
    bench.exchange()
    agent.fail(crash(step=10))
    bench.settle()
    agent.reach(13)
    bench.change(elastic_job(1, 1))
    bench.to(bench.wake_at)
    bench.exchange()
    agent.reach(11)
    bench.pass_time(50.0)
    assert "BudgetReset" not in bench.reasons(), "step 13 was reached before"
    agent.reach(14)
    bench.pass_time(25.0)
    assert "BudgetReset" in bench.reasons()


def test_a_drained_node_costs_nobody_anything() -> None:
    bench = running(elastic_job(2, 1, standby=1, restarts=0))
    bench.agent("n1").leaving = "SIGTERM"
    bench.exchange(bench.agent("n1"))
    assert bench.members == ["n0", "n2"]
    assert bench.job.state.restarts == {"drain": 1}
    bench.leave(bench.agent("n1"))
    bench.settle()
    assert sorted(bench.pods) == ["n0", "n2", "n3"]
    assert all(n.relaunches == 0 for n in bench.job.live.nodes)


def last_steps(bench: Bench, *nodes: str) -> list[float]:
    told = [bench.agent(n).assignment for n in nodes]
    return [a.last_step_s for a in told if a is not None]


def test_when_a_node_goes_by_plan_the_others_finish_their_step() -> None:
    bench = running(elastic_job(3, 2))
    assert last_steps(bench, "n0") == [0.0], "a start ends nothing"
    bench.agent("n2").leaving = "SIGTERM"
    bench.exchange(bench.agent("n2"))
    bench.answer(bench.agent("n0"))
    bench.answer(bench.agent("n1"))
    assert all(s > 1 for s in last_steps(bench, "n0", "n1"))


def test_when_a_node_is_lost_the_others_are_stopped_at_once() -> None:
    bench = running(elastic_job(3, 2))
    bench.kill(NodeId("n2"))
    bench.settle()
    assert last_steps(bench, "n0", "n1") == [0.0, 0.0]


def test_a_fault_on_top_of_a_plan_ends_the_wait_for_the_last_step() -> None:
    bench = running(elastic_job(3, 3))
    bench.agent("n2").leaving = "SIGTERM"
    bench.exchange(bench.agent("n2"))
    bench.answer(bench.agent("n0"))
    assert last_steps(bench, "n0") > [1.0]
    bench.kill(N1)
    bench.deliver_facts()
    bench.answer(bench.agent("n0"))
    assert last_steps(bench, "n0") == [0.0]
    bench.settle()
    assert bench.job.state.round == 2
    assert last_steps(bench, "n0", "n1") == [0.0, 0.0]


LEAVES = NodeId("n2")


def leaving(*, formed: bool) -> Bench:
    """A node has a minute to go; the others finish their step, told of the next round or not."""
    bench = running(elastic_job(3, 2, standby=int(formed)))
    bench.step(NodeSeen(LEAVES, True, leaving="spot notice", grace_s=60.0))
    for name in ("n0", "n1", "n2"):
        bench.answer(bench.agent(name))
    assert bench.job.state.round == 1 + formed
    assert last_steps(bench, "n0", "n1") == [28.0, 28.0]
    return bench


@pytest.mark.parametrize("formed", [False, True])
@pytest.mark.parametrize("how", ["its host is gone", "killed", "silent", "cut off", "not listed"])
def test_who_is_lost_while_it_leaves_ends_the_wait_for_the_last_step(
    how: str, formed: bool
) -> None:
    bench = leaving(formed=formed)
    bench.agent("n2").cut = True
    bench.to(bench.now + 1)
    if how == "silent":
        bench.pass_time(5.0)
    elif how == "cut off":
        bench.step(Disconnected(LEAVES, bench.agent("n2").boot, bench.agent("n2").seq))
        bench.pass_time(1.0)
    elif how == "not listed":
        del bench.pods[LEAVES]
        bench.relist()
    else:
        bench.step(NodeEnded(LEAVES, how, exit_code=137 if how == "killed" else None))
    for name in ("n0", "n1"):
        bench.answer(bench.agent(name))
    assert last_steps(bench, "n0", "n1") == [0.0, 0.0]
    assert bench.job.state.restarts.get("loss", 0) == 0, "it is the same plan"


@pytest.mark.parametrize("formed", [False, True])
@pytest.mark.parametrize("how", ["it exits 0", "it has said so"])
def test_who_leaves_when_its_workers_have_ended_leaves_the_others_their_time(
    how: str, formed: bool
) -> None:
    """Theirs have agreed on the same step, and may save it still."""
    bench = leaving(formed=formed)
    if how == "it exits 0":
        bench.step(NodeEnded(LEAVES, "exited", exit_code=0))
    else:
        bench.say(bench.agent("n2"))
        bench.step(NodeEnded(LEAVES, "signalled before it was told", exit_code=1))
    for name in ("n0", "n1"):
        bench.answer(bench.agent(name))
    assert last_steps(bench, "n0", "n1") == [28.0, 28.0]


def test_who_leaves_with_less_time_leaves_the_others_no_more() -> None:
    bench = running(elastic_job(3, 2))
    bench.step(NodeSeen(NodeId("n2"), True, leaving="drained", grace_s=7.0))
    bench.answer(bench.agent("n0"))
    assert last_steps(bench, "n0") == [5.0]


@pytest.mark.parametrize("first", ["the failure", "the notice"])
def test_a_broken_round_has_no_last_step_though_a_node_is_leaving(first: str) -> None:
    """In a preemption, connections may break before the platform says why."""
    bench = running(elastic_job(3, 3))
    bench.agent("n0").fail(crash(FailureKind.PEER))
    bench.agent("n2").leaving = "SIGTERM"
    for name in ("n0", "n2") if first == "the failure" else ("n2", "n0"):
        bench.exchange(bench.agent(name))
    bench.answer(bench.agent("n1"))
    assert last_steps(bench, "n1") == [0.0]


def test_a_restarted_agent_starts_the_next_round() -> None:
    bench = running(elastic_job(2, 1))
    bench.boot(N1)
    bench.settle()
    assert (bench.job.state.round, bench.agent("n1").incarnation) == (2, 2)
    bench.check_running()


def test_who_was_told_of_a_round_takes_it_up_before_its_offer_is_asked_for_again() -> None:
    """Rank 0 has not yet heard of round 2, but others have been told its offer."""
    bench = running(elastic_job(2, 2, standby=1))
    bench.agent("n1").fail(crash())
    bench.exchange(bench.agent("n1"))
    assert bench.job.state.round == 2
    bench.answer(bench.agent("n1"))
    bench.kill(N1)
    bench.settle()
    assert bench.agent("n0").starts == [1, 2, 3]
    bench.check_running()


# --- the end ---


def test_it_succeeds_when_all_have() -> None:
    bench = running(elastic_job(2, 1))
    bench.agent("n0").succeed()
    bench.settle()
    assert phase(bench) is JobPhase.RUNNING
    bench.agent("n1").succeed()
    bench.settle()
    assert phase(bench) is JobPhase.SUCCEEDED
    assert not bench.living()
    assert not bench.pods


def test_a_node_may_go_once_it_has_succeeded() -> None:
    bench = running(elastic_job(2, 2, restarts=0))
    bench.agent("n0").succeed()
    bench.exchange()
    bench.kill(NodeId("n0"))
    bench.settle()
    assert phase(bench) is JobPhase.RUNNING
    bench.agent("n1").succeed()
    bench.settle()
    assert phase(bench) is JobPhase.SUCCEEDED


def test_it_is_remembered_who_has_succeeded() -> None:
    bench = running(elastic_job(2, 2))
    bench.agent("n0").succeed()
    bench.exchange()
    bench.kill(NodeId("n0"))
    bench.restart_master()
    bench.settle()
    bench.agent("n1").succeed()
    bench.settle()
    assert (bench.job.state.phase, bench.job.state.round) == (JobPhase.SUCCEEDED, 1)


def test_a_round_that_is_about_to_finish_does_not_grow() -> None:
    bench = Bench(elastic_job(3, 2), capacity=2)
    bench.step()
    bench.settle()
    bench.agent("n0").succeed()
    bench.exchange()
    bench.set_capacity(3)
    bench.settle()
    assert bench.job.state.round == 1


def test_after_the_end_nothing_is_formed() -> None:
    bench = Bench(elastic_job(3, 2), capacity=2)
    bench.step()
    bench.settle()
    bench.set_capacity(3)
    bench.deliver_facts()
    bench.step(JobStopped())
    for node in ("n0", "n1"):
        bench.answer(bench.agent(node))
        bench.say(bench.agent(node))
    late = bench.boot(NodeId("n2"))
    bench.say(late)
    assert (bench.job.state.phase, bench.job.state.round) == (JobPhase.STOPPED, 1)
    bench.settle()
    assert not bench.pods


def test_steps_between_the_order_to_stop_and_the_end_are_shown() -> None:
    """A script finished step 108 and saved it, and the job "stopped at step 105"."""
    bench = running()
    bench.agent("n0").reach(105)
    bench.settle()
    bench.step(JobStopped())
    bench.agent("n0").reach(108)
    bench.say(bench.agent("n0"))
    progress = bench.job.status(bench.now, 0.0).progress
    assert progress is not None
    assert progress.step == 108


@pytest.mark.parametrize("stored", [False, True])
def test_an_end_with_nothing_stored_is_told(stored: bool) -> None:
    bench = by_themselves("n0", "n1")
    for node in ("n0", "n1"):
        bench.agent(node).stores = stored
        bench.agent(node).save(6, persist=False)
    bench.exchange()
    for node in ("n0", "n1"):
        bench.agent(node).succeed()
    bench.exchange()
    assert bench.job.state.phase is JobPhase.SUCCEEDED
    told = [
        e.message for e in bench.job.status(bench.now, 0.0).events if e.reason == "NothingStored"
    ]
    if stored:
        assert told == [], "it is stored now"
    else:
        assert [words.partition(":")[0] for words in told] == [
            "the checkpoint of step 6 was only in memory and is lost with the job"
        ]


def test_a_failure_after_some_succeeded_is_a_round_for_all() -> None:
    bench = running(elastic_job(2, 2))
    bench.agent("n0").succeed()
    bench.exchange()
    bench.agent("n1").fail(crash())
    bench.settle()
    assert (bench.job.state.round, bench.job.state.succeeded) == (2, set())
    bench.check_running()


def test_a_success_ends_the_wish_to_grow() -> None:
    bench = Bench(elastic_job(4, 2), capacity=2)
    bench.step()
    bench.settle()
    bench.set_capacity(4)
    bench.deliver_facts()
    bench.boot(NodeId("n2"))
    bench.exchange()
    assert bench.job.state.pending_round is not None
    for node in ("n0", "n1"):
        bench.agent(node).succeed()
    bench.exchange()
    assert (bench.job.state.phase, bench.job.state.round) == (JobPhase.SUCCEEDED, 1)


def test_a_command_that_cannot_be_run_ends_the_job() -> None:
    for output in ("a line\nelastic-run: script x.py: there is no such file", ""):
        bench = Bench(elastic_job(2))
        bench.step()
        bench.step(NodeEnded(N1, "exited", exit_code=2, output=output))
        assert bench.job.state.phase is JobPhase.FAILED
        assert output in bench.job.state.reason


@pytest.mark.parametrize(
    ("code", "free", "output"),
    [
        (None, False, ""),
        (None, True, ""),
        (2, True, ""),
        (2, False, "tar: x: Cannot open: I/O error"),
    ],
)
def test_an_end_that_is_not_the_commands_does_not_end_the_job(
    code: int | None, free: bool, output: str
) -> None:
    """An init container's code is not the agent's; of a Pod that was evicted no code counts; and
    what a shell runs before elastic-run has codes of its own."""
    bench = Bench(elastic_job(2))
    bench.step()
    bench.step(NodeEnded(N1, "it ended with 2", exit_code=code, free=free, output=output))
    assert bench.job.state.phase is not JobPhase.FAILED
    bench.pass_time(3.0)
    assert NodeId("n2") in bench.avoided, "another is tried"


def test_a_replacement_that_cannot_run_its_command_does_not_end_a_job_that_trains() -> None:
    bench = running(elastic_job(2, 1, standby=1))
    bench.kill(N1)
    bench.deliver_facts()
    fresh = NodeId("n3")
    bench.pods.pop(fresh)
    bench.step(NodeEnded(fresh, "exited", exit_code=2, output="elastic-run: no such file"))
    assert bench.job.state.phase is not JobPhase.FAILED


def test_a_command_that_ends_well_without_joining_ends_the_job() -> None:
    bench = Bench(elastic_job(2))
    bench.step()
    bench.step(NodeEnded(N1, "exited", exit_code=0))
    assert (bench.job.state.phase, bench.reasons()[-1]) == (JobPhase.FAILED, "NeverJoined")
    words = "n1: the command ended with code 0 and never joined the job: start the script with "
    assert bench.job.state.reason == words + "elastic-run"
    assert bench.job.state.next_node == 2, "no node was replaced"


def test_nodes_that_fail_without_joining_are_told_so_with_what_to_write() -> None:
    document = job_file(1, restartCount=0)
    worker = document["spec"]["replicaSpecs"]["worker"]
    worker["template"]["spec"]["containers"][0]["command"] = ["torchrun", "t.py"]
    bench = Bench(ElasticJob.parse(document))
    bench.step()
    bench.pods.pop(NodeId("n0"))
    bench.step(
        NodeEnded(NodeId("n0"), "its agent ended with exit code 1", exit_code=1, output="Traceback")
    )
    assert bench.job.state.phase is JobPhase.FAILED
    lost = "node n0 was lost: its agent ended with exit code 1 before it joined the job: Traceback"
    place = "spec.replicaSpecs.worker.template.spec.containers[0].command"
    assert bench.job.state.reason == (
        f"fewer nodes than the minimum of 1 remain: 1 is not replaced; {place}: torchrun does not "
        "join the job, so that each node would train alone; write: elastic-run t.py; the last "
        f"loss: {lost}"
    )


def test_a_job_with_too_few_nodes_for_its_least_size_ends() -> None:
    """``minReplicas`` is less than the least allowed size: no round could be formed any more."""
    scaling = {"mode": "auto", "sizes": [3, 4]}
    bench = running(elastic_job(3, 2, restarts=0, maxReplicas=4, autoscale=scaling))
    assert bench.job.status(bench.now, 0.0).minimum == 3
    bench.kill(N1)
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.job.state.reason.startswith("fewer nodes than the minimum of 3 remain: 1 is not")


def stopped(bench: Bench, node: NodeId, *, free: bool = False, by_platform: bool = False) -> None:
    """Its container is stopped, and its agent says so; then its platform says how it has ended."""
    bench.agent(node).leaving = "the agent received SIGTERM"
    bench.exchange()
    bench.agent(node).ended = True
    bench.pods.pop(node, None)
    bench.step(NodeEnded(node, "it has ended", exit_code=1, free=free, by_platform=by_platform))
    bench.settle()


def test_nodes_that_are_stopped_again_and_again_though_nobody_deletes_them_end_the_job() -> None:
    bench = running(elastic_job(1, restarts=2))
    for number in range(3):
        assert not bench.job.state.phase.ended, bench.job.state.reason
        stopped(bench, NodeId(f"n{number}"))
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.reasons()[-1] == "ReplacementsExhausted"
    words = "was stopped by SIGTERM, but nothing in this job requested that"
    assert words in bench.job.state.reason  # no words of Kubernetes: its platform adds them


@pytest.mark.parametrize("free", [True, False])
def test_nodes_that_are_deleted_or_evicted_with_notice_cost_nothing(free: bool) -> None:
    bench = running(elastic_job(1, restarts=2))
    for number in range(5):
        stopped(bench, NodeId(f"n{number}"), free=free, by_platform=not free)
    bench.check_running()


def test_a_newcomer_that_ends_well_without_joining_is_not_replaced() -> None:
    bench = running(elastic_job(2, 1, standby=1))
    bench.kill(N1)
    bench.deliver_facts()
    assert "n3" in bench.pods
    bench.pods.pop(NodeId("n3"))
    bench.step(NodeEnded(NodeId("n3"), "exited", exit_code=0))
    bench.settle()
    assert bench.job.state.phase is not JobPhase.FAILED
    assert "NeverJoined" in bench.reasons()
    assert bench.job.state.next_node == 4, "no node was asked for in its place"


@pytest.mark.parametrize("kind", ["taken away", "suspended"])
def test_a_node_that_is_ended_before_it_spoke_is_no_fault(kind: str) -> None:
    bench = Bench(elastic_job(2))
    bench.step()
    if kind == "suspended":
        bench.change(bench.spec.suspended(True))
    bench.step(NodeEnded(N1, "exited", exit_code=0, free=kind == "taken away"))
    assert not bench.job.state.phase.ended
    assert "NeverJoined" not in bench.reasons()


def test_another_launcher_below_the_workers_is_told_once() -> None:
    bench = running(elastic_job(2))
    bench.agent("n1").nested = "worker 0 has started a world of its own"
    bench.exchange()
    bench.exchange()
    assert bench.reasons().count("NestedLauncher") == 1
    bench.check_running()


def test_an_agent_that_restarts_again_and_again_is_replaced() -> None:
    bench = running(elastic_job(2, 1, restarts=2))
    for _ in range(3):
        bench.boot(N1)
        bench.settle()
    assert "RestartsExhausted" in bench.reasons()
    assert "n1" not in bench.members
    bench.check_running()


def test_a_node_that_leaves_keeps_its_grace_when_the_master_dies() -> None:
    bench = running(elastic_job(2, 1))
    agent = bench.agent("n1")
    bench.step(NodeSeen(N1, near=True, leaving="drained"))
    bench.restart_master()
    refused = [e for e in bench.say(agent).effects if isinstance(e, Refuse)]
    assert not refused
    bench.settle()
    assert "n1" not in bench.members
    assert bench.job.state.restarts == {"drain": 1}


def test_a_refused_report_does_not_outrank_the_master() -> None:
    bench = running(elastic_job(2, 1, standby=1))
    old = bench.agent("n1")
    late = old.report().model_copy(update={"have_term": 9, "follows": 9})
    bench.kill(N1)
    bench.settle()
    bench.step(Reported(N1, late))
    assert (bench.job.state.term, bench.job.state.round) == (1, 2)


# --- the user ---


def test_scaling_down_and_up() -> None:
    bench = running(elastic_job(3, 1))
    bench.change(bench.spec.scaled(2))
    bench.pass_time(bench.rules.settle_s)
    bench.settle()
    assert bench.members == ["n0", "n1"]
    assert sorted(bench.pods) == ["n0", "n1"]
    bench.change(bench.spec.scaled(3))
    bench.settle()
    assert bench.members == ["n0", "n1", "n3"]
    assert bench.job.state.restarts == {"scale": 1, "join": 1}


def test_an_older_wish_is_ignored() -> None:
    bench = running(elastic_job(3, 1))
    older = bench.spec
    bench.change(older.scaled(2))
    bench.pass_time(bench.rules.settle_s)
    bench.settle()
    bench.step(JobChanged(older))
    bench.settle()
    assert bench.members == ["n0", "n1"]


def test_suspending_ends_all_nodes_and_resuming_brings_new_ones() -> None:
    bench = running(elastic_job(2))
    bench.change(bench.spec.suspended(True))
    bench.settle()
    assert bench.job.state.phase is JobPhase.SUSPENDED
    assert "`dlrover job resume`" in bench.job.state.reason
    assert not bench.pods
    bench.change(bench.spec.suspended(False))
    bench.settle()
    assert bench.members == ["n2", "n3"]


def test_places_that_were_given_up_are_filled_again_after_a_suspension() -> None:
    bench = running(elastic_job(3, 1, restarts=0))
    bench.kill(NodeId("n1"))
    bench.settle()
    assert (len(bench.members), bench.job.state.abandoned_slots) == (2, 1)
    bench.change(bench.spec.suspended(True))
    bench.settle()
    bench.change(bench.spec.suspended(False))
    bench.settle()
    assert len(bench.members) == 3


def test_a_job_that_begins_suspended_creates_nothing() -> None:
    bench = Bench(elastic_job(2, suspend=True))
    assert not bench.step().effects
    assert bench.job.state.phase is JobPhase.SUSPENDED
    assert "`dlrover job resume`" in bench.job.state.reason


# --- the master ---


def test_a_restart_of_the_master_moves_nobody() -> None:
    bench = running(elastic_job(3, 2, standby=1))
    bench.restart_master()
    bench.settle()
    bench.pass_time(20.0)
    assert (bench.job.state.round, bench.job.state.term) == (1, 2)
    assert all(len(a.starts) <= 1 for a in bench.living())
    bench.agent("n0").fail(crash())
    bench.settle()
    assert bench.job.state.round == 2, "and the next failure is handled"
    bench.check_running()


def test_a_new_master_counts_who_has_reported_to_it() -> None:
    bench = running(elastic_job(2, 1))
    bench.restart_master()
    assert bench.job.status(bench.now, 0.0).ready == 0
    bench.settle()
    assert bench.job.status(bench.now, 0.0).ready == 2


@pytest.mark.parametrize("routed_s", [0.0, 5.0])
def test_a_new_master_gives_one_lease_to_report_again_and_the_time_to_find_it(
    routed_s: float,
) -> None:
    bench = running(elastic_job(2, 1), Rules(routed_s=routed_s))
    bench.agent("n1").frozen = True
    bench.restart_master()
    bench.pass_time(4.75 + routed_s)
    assert bench.job.live.nodes[N1].phase is not NodePhase.GONE
    bench.pass_time(0.5)
    assert bench.job.live.nodes[N1].phase is NodePhase.GONE


def test_a_new_master_that_nobody_reaches_gives_nobody_up() -> None:
    """Its Service leads to its predecessor still: the API server is away, say."""
    bench = running(elastic_job(3, 1), Rules(routed_s=5.0))
    for node in ("n0", "n1", "n2"):
        bench.agent(node).frozen = True
    bench.restart_master()
    bench.pass_time(40.0)
    assert not any(node.phase is NodePhase.GONE for node in bench.job.live.nodes)
    bench.agent("n0").frozen = bench.agent("n1").frozen = False
    bench.pass_time(4.0)
    assert bench.job.live.nodes[NodeId("n2")].phase is not NodePhase.GONE, "it may be routed later"
    bench.pass_time(5.0)
    assert bench.job.live.nodes[NodeId("n2")].phase is NodePhase.GONE
    bench.settle()
    assert bench.reasons().count("NodeLost") == 1


def test_a_new_master_that_nobody_reaches_does_not_wait_for_ever() -> None:
    bench = running(elastic_job(1), Rules(routed_s=5.0))
    bench.agent("n0").frozen = True
    bench.restart_master()
    bench.pass_time(299.0)
    assert bench.job.live.nodes[NodeId("n0")].phase is not NodePhase.GONE
    bench.pass_time(6.0)
    assert bench.job.live.nodes[NodeId("n0")].phase is NodePhase.GONE


@pytest.mark.parametrize(("how", "kept"), [("before", 0), ("after", 0), ("after", 1)])
def test_a_master_that_dies_in_a_round_change_finishes_it(how: str, kept: int) -> None:
    bench = running(elastic_job(3, 2, standby=1))
    bench.crash = (how, kept)
    bench.agent("n0").fail(crash())
    bench.settle()
    assert bench.job.state.round == 2
    bench.check_running()
    assert bench.reasons().count("WorkerFailed") == 1, "charged once"


def test_nodes_that_were_wished_but_never_asked_for_are_asked_for_again() -> None:
    bench = Bench(elastic_job(2, restarts=0))
    bench.crash = ("after", 0)
    bench.step()
    bench.settle()
    assert bench.members == ["n0", "n1"]
    assert bench.job.state.abandoned_slots == 0


def test_a_list_older_than_the_wish_loses_nobody() -> None:
    bench = Bench(elastic_job(2))
    bench.step()
    out = bench.step(NodesListed(frozenset()))
    assert [type(e) for e in out.effects] == [CreateNode, CreateNode]
    bench.settle()
    assert bench.members == ["n0", "n1"]


def test_what_the_user_did_while_no_master_was_there_is_done() -> None:
    bench = running(elastic_job(3, 1))
    bench.spec = bench.spec.scaled(2)
    bench.restart_master()
    bench.settle()
    assert bench.members == ["n0", "n1"]
    bench.spec = bench.spec.suspended(True)
    bench.restart_master()
    bench.settle()
    assert bench.job.state.phase is JobPhase.SUSPENDED
    assert "`dlrover job resume`" in bench.job.state.reason
    bench.spec = bench.spec.suspended(False)
    bench.restart_master()
    bench.settle()
    bench.check_running()


def test_terms_follow_each_other() -> None:
    bench = running(elastic_job(1))
    journal = bench.job.state
    with pytest.raises(InvariantError, match="term 1 does not follow"):
        Job.resume(bench.spec, bench.rules, journal, term=Term(1), now=0, wall=0)


def test_an_older_journal_is_gone_above() -> None:
    """The disk was set back: agents know a round that the journal does not."""
    bench = running(elastic_job(2, 2))
    old = bench.journal
    bench.agent("n0").fail(crash())
    bench.settle()
    assert old is not None
    job = Job.resume(bench.spec, bench.rules, old, term=Term(2), now=bench.now, wall=0)
    job.step([], bench.now, 0)
    agents = [bench.agent("n0"), bench.agent("n1")]
    for _ in range(4):
        for agent in agents:
            out = job.step([Reported(agent.node, agent.report())], bench.now, 0)
            for effect in out.effects:
                if isinstance(effect, Assign):
                    bench.agent(effect.node).receive(effect.assignment)
    assert job.state.round == 3
    assert all(a.follows == 3 and a.phase is WorkerPhase.RUNNING for a in agents)


def test_a_journal_is_read_as_it_was_written() -> None:
    bench = running(elastic_job(3, 2, standby=1))
    bench.agent("n1").fail(user_error())
    bench.exchange(bench.agent("n1"))
    journal = bench.job.state
    read = DurableState.from_json(journal.to_json())
    assert JOURNAL.dump_python(read) == JOURNAL.dump_python(journal)


def test_a_journal_of_an_earlier_version_is_read() -> None:
    journal = running(elastic_job(1)).job.state
    read = DurableState.from_json(
        JOURNAL.dump_json(journal, exclude={"checkpoints": {"round_starts"}})
    )
    assert JOURNAL.dump_python(read) == JOURNAL.dump_python(journal)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_round_has_passed_by_is_not_stored_under_it_by_a_later_master(
    restarted: bool,
) -> None:
    """Workers that run ask no new master what they could go on from."""
    bench = by_themselves("n0", "n1")
    n0, n1 = bench.agent("n0"), bench.agent("n1")
    for agent in (n0, n1):
        agent.save(6, persist=True)
    n1.frozen = True
    bench.pass_time(6.0)
    assert bench.members == ["n0"]
    (told,) = bench.step(RestoreAsked(1, bench.job.state.round)).effects
    assert isinstance(told, RestoreAnswer)
    assert told.candidates.candidates == [], "n1's part of step 6 is not there"
    if restarted:
        bench.restart_master()
    bench.exchange()
    n1.frozen = False
    bench.say(n1)
    assert [c.step for c in bench.job.live.checkpoints.memory.candidates()] == [6]
    checkpoints, term = bench.job.live.checkpoints, bench.job.state.term
    assert not any(checkpoints.persist_request(n, term) for n in (n0.node, n1.node))


def test_a_standby_is_told_beside_the_nodes_that_are_wished() -> None:
    bench = running(elastic_job(3, 2, standby=1))
    (ready,) = [c for c in bench.job.status(bench.now, 0).conditions if c.type == "PodsReady"]
    assert ready.message == "3 of 3 nodes are ready, and 1 additional node"


def test_the_journal_has_the_spec_that_is_followed() -> None:
    bench = running(elastic_job(2, 1))
    bench.spec = bench.spec.scaled(3)
    bench.step(JobChanged(bench.spec))
    assert bench.journal is not None
    assert bench.journal.read_accepted() == bench.spec
    huge = bench.spec.worker.template | {"metadata": {"annotations": {"a": "x" * 300_000}}}
    worker = bench.spec.worker.model_copy(update={"template": huge})
    roles = bench.spec.spec.replica_specs.model_copy(update={"worker": worker})
    bench.spec = bench.spec.changed(bench.spec.spec.model_copy(update={"replica_specs": roles}))
    bench.step(JobChanged(bench.spec))
    assert bench.journal.read_accepted() is None, "members come first"


def test_an_unknown_node_is_deleted_and_its_agent_refused() -> None:
    bench = running(elastic_job(1))
    stranger = SimAgent(NodeId("n77"))
    assert [type(e) for e in bench.say(stranger).effects] == [Refuse]
    out = bench.step(NodeSeen(NodeId("n77"), near=True))
    assert [type(e) for e in out.effects] == [DeleteNode]


# --- nodes that come by themselves ---


def test_nodes_that_come_by_themselves() -> None:
    bench = by_themselves("a", "b")
    assert bench.members == ["a", "b"]
    bench.check_running()


def test_a_paused_machine_that_nobody_can_replace_comes_back() -> None:
    bench = by_themselves("a", "b")
    bench.agent("b").frozen = True
    bench.pass_time(6.0)
    assert bench.members == ["a"]
    bench.agent("b").frozen = False
    bench.settle()
    assert bench.members == ["a", "b"]
    bench.check_running()
    assert bench.agent("b").incarnation == 2


def test_a_late_copy_of_an_old_report_wakes_no_dead_node() -> None:
    bench = by_themselves("a", "b")
    old = bench.agent("b").report()
    bench.say(bench.agent("b"), old)
    bench.agent("b").frozen = True
    bench.pass_time(6.0)
    bench.say(bench.agent("b"), old)
    assert bench.members == ["a"]
    assert bench.job.live.nodes[NodeId("b")].phase is NodePhase.GONE


def test_who_lives_again_is_told_newer_things_than_those_that_never_arrived() -> None:
    bench = by_themselves("a", "b", "c", replicas=3)
    bench.agent("a").fail(crash())
    bench.exchange(bench.agent("a"))
    bench.agent("b").frozen = True  # it has not heard of round 2, but was told
    bench.pass_time(6.0)
    bench.agent("b").frozen = False
    bench.say(bench.agent("b"))
    bench.settle()
    assert sorted(bench.members) == ["a", "b", "c"]
    bench.check_running()


def test_without_a_replacement_used_up_restarts_end_the_job() -> None:
    bench = by_themselves("a", "b")
    for step in range(3):
        bench.agent("a").fail(user_error("E", step))
        bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED


def test_a_round_that_a_smaller_job_makes_possible_names_that_in_its_cause() -> None:
    bench = running(elastic_job(2))
    bench.set_capacity(1)
    bench.kill(N1)
    bench.settle()
    bench.change(bench.spec.scaled(1))
    bench.settle()
    bench.check_running()
    (formed,) = [e for e in bench.job.state.events if e.reason == "RoundFormed" and e.round == 2]
    assert "because node n1 was lost: " in formed.message
    assert "; the desired size is now 1 node" in formed.message


def test_a_job_whose_round_is_over_says_that_no_node_trains() -> None:
    bench = running(elastic_job(2, 2))
    bench.set_capacity(1)
    bench.kill(N1)
    bench.settle()
    status = bench.job.status(0.0, 0.0)
    assert (status.phase, status.nodes_in_round, status.ready) == (JobPhase.FORMING, 2, 1)
    assert summarize(status).ready == "1/2"
    assert view.summary(status).startswith("Forming · round 1 · 1/2 nodes · 0 workers")
    conditions = {c.type: c.message for c in status.conditions}
    assert conditions["PodsReady"] == "1 of 2 nodes is ready"
    assert conditions["Degraded"].startswith("no node trains")


# --- warm starts ---


def test_nobody_waits_for_a_node_that_gets_warm() -> None:
    bench = Bench(elastic_job(3, 2), capacity=2)
    bench.step()
    bench.settle()
    bench.set_capacity(3)
    bench.deliver_facts()
    late = bench.boot(NodeId("n2"))
    late.warming = True
    bench.settle()
    assert bench.members == ["n0", "n1"]
    status = bench.job.status(0.0, 0.0)
    assert status.nodes[-1].message == "imports modules for its workers"
    (degraded,) = [c for c in status.conditions if c.type == "Degraded"]
    assert degraded.message == "2 of 3 nodes train; n2: imports modules for its workers"
    bench.agent("n0").fail(crash())
    bench.settle()
    assert bench.members == ["n0", "n1"], "not after a failure either"
    late.warming = False
    bench.settle()
    assert bench.members == ["n0", "n1", "n2"]


def test_nodes_that_get_warm_before_the_first_round_come_together() -> None:
    bench = Bench(elastic_job(3, 1))
    bench.step()
    bench.deliver_facts()
    agents = [bench.boot(NodeId(node)) for node in ("n0", "n1", "n2")]
    for agent in agents[1:]:
        agent.warming = True
    bench.exchange()
    bench.pass_time(5.0)
    assert bench.job.state.world is None
    for agent in agents:
        agent.warming = False
    bench.settle()
    assert bench.members == ["n0", "n1", "n2"]
    assert bench.job.state.round == 1


def test_nodes_that_get_warm_after_all_were_lost_come_together() -> None:
    bench = running(elastic_job(2, 1))
    for node in list(bench.members):
        bench.kill(NodeId(node))
    bench.step()
    bench.deliver_facts()
    _, late = [bench.boot(NodeId(node)) for node in ("n2", "n3")]
    late.warming = True
    bench.exchange()
    bench.pass_time(5.0)
    assert bench.job.state.round == 1, "a round of one node would be interrupted in a moment"
    late.warming = False
    bench.settle()
    assert bench.members == ["n2", "n3"]
    assert bench.job.state.round == 2


def test_nodes_that_come_again_by_themselves_after_all_were_lost_come_together() -> None:
    bench = without_platform(1, 2)
    come(bench, "n0", "n1")
    assert bench.members == ["n0", "n1"]
    before = bench.job.state.round
    late, other = [bench.boot(NodeId(node)) for node in ("n1", "n0")]
    late.max_restarts = other.max_restarts = 2
    late.warming = True
    bench.exchange()
    bench.pass_time(5.0)
    assert bench.job.state.round == before, "a round of one node would be interrupted in a moment"
    late.warming = False
    bench.settle()
    assert bench.members == ["n0", "n1"]
    assert bench.job.state.round == before + 1


def test_the_early_death_of_a_forked_worker_is_tried_cold_and_not_charged() -> None:
    bench = running()
    bench.agent("n1").fail(crash(FailureKind.EXCEPTION, fingerprint="E@f:1", forked=True))
    bench.settle()
    assert bench.job.live.nodes[N1].restarts == 0
    for agent in bench.living():
        assert agent.assignment is not None
        assert agent.assignment.cold
    bench.agent("n1").fail(user_error(step=None))
    bench.settle()
    assert bench.job.state.phase is JobPhase.RUNNING, (
        "the one that a fork may have caused is forgotten"
    )
    assert bench.job.live.nodes[N1].restarts == 1
    assert not bench.agent("n0").assignment.cold  # type: ignore[union-attr]


def test_a_script_that_dies_early_without_a_fork_is_charged_and_still_tried_cold() -> None:
    bench = running()
    bench.agent("n1").fail(crash(FailureKind.EXCEPTION, fingerprint="E@f:1"))
    bench.settle()
    bench.agent("n1").fail(crash(FailureKind.EXCEPTION, fingerprint="F@f:2", forked=True))
    bench.settle()
    assert bench.job.live.nodes[N1].restarts == 2
    assert bench.agent("n0").assignment.cold  # type: ignore[union-attr]
    assert bench.job.state.warm_starts.suspected == 1


@pytest.mark.parametrize("failure", [crash(), user_error(step=None)], ids=["exit", "exception"])
@pytest.mark.parametrize("restart_of_master", [False, True])
def test_a_script_that_fails_at_once_uses_as_many_restarts_as_without_forks(
    failure: WorkerFailure, restart_of_master: bool
) -> None:
    """The same failure of workers that are forked later is the script's, too."""

    def starts(*, forks: bool) -> int:
        bench = by_themselves("n0", "n1", minimum=2)
        while bench.job.state.phase is JobPhase.RUNNING:
            forked = (
                forks and bench.job.state.round > 1 and not bench.job.state.warm_starts.disabled
            )
            bench.agent("n1").fail(failure.model_copy(update={"forked": forked}))
            bench.settle()
            if restart_of_master:
                bench.restart_master()
                bench.settle()
        assert bench.job.state.phase is JobPhase.FAILED
        assert bench.job.state.last_failure is not None
        assert bench.job.state.last_failure.worker.message == failure.message
        assert bench.job.state.warm_starts.suspected == 0
        return bench.job.state.round

    assert starts(forks=True) == starts(forks=False)


def test_a_fork_is_blamed_again_after_steady_progress() -> None:
    bench = running(elastic_job(2, 2), Rules(forgive_after_s=20))
    bench.agent("n1").fail(crash())
    bench.settle()
    assert bench.job.state.warm_starts.early_death
    bench.agent("n0").reach(10)
    bench.pass_time(25.0)
    assert bench.job.state.warm_starts.early_death == ""
    bench.agent("n1").fail(crash(forked=True))
    bench.settle()
    assert bench.job.state.warm_starts.suspected == 1
    assert bench.job.live.nodes[N1].restarts == 0


def test_a_first_start_that_was_forked_is_not_repeated_without_restarts() -> None:
    bench = running(elastic_job(2, 2, restarts=0))
    bench.agent("n1").fail(crash(forked=True))
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED


def test_after_two_doubts_all_starts_are_cold() -> None:
    bench = running()
    for _ in range(2):
        bench.agent("n1").fail(crash(forked=True))
        bench.settle()
    assert bench.job.live.nodes[N1].restarts == 0
    bench.restart_master()
    bench.settle()
    bench.agent("n0").fail(crash(forked=True))
    bench.settle()
    assert bench.job.live.nodes[NodeId("n0")].restarts == 1, "now it counts"
    assert bench.agent("n0").assignment.cold  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "failure",
    [
        crash(forked=False),
        crash(forked=True, ran_s=10.0),
        crash(forked=True, step=3),
        crash(forked=True).model_copy(update={"exit_code": -9}),
    ],
    ids=["cold", "late", "after a step", "kill -9"],
)
def test_what_no_fork_can_have_caused_is_charged(failure: WorkerFailure) -> None:
    bench = running()
    bench.agent("n1").fail(failure)
    bench.settle()
    assert bench.job.live.nodes[N1].restarts == 1
    assert bench.job.state.warm_starts.suspected == 0


@pytest.mark.parametrize("warm", [False, True])
def test_a_replacement_that_only_starts_is_waited_for_where_a_start_takes_long(warm: bool) -> None:
    bench = running(elastic_job(3, 2))
    for agent in bench.living():
        agent.warm = warm
    bench.exchange()
    bench.kill(NodeId("n2"))
    bench.step()
    bench.deliver_facts()
    bench.exchange()
    assert (bench.members == ["n0", "n1"]) is warm
    bench.boot(NodeId("n3"))
    bench.settle()
    assert bench.members == ["n0", "n1", "n3"]


# --- nodes that come by themselves ---


def without_platform(fewest: int, most: int, **rules: float) -> Bench:
    bench = Bench(elastic_job(most, fewest), Rules(can_create=False, **rules))
    bench.step()
    return bench


def come(bench: Bench, *nodes: str) -> None:
    for node in nodes:
        bench.agents[NodeId(node)].append(SimAgent(NodeId(node), max_restarts=2))
    bench.settle()


def test_the_first_round_waits_a_moment_for_more_than_the_minimum() -> None:
    bench = without_platform(1, 3, last_call_s=5.0)
    come(bench, "n0")
    assert bench.members == []
    come(bench, "n1")
    assert bench.members == []
    bench.pass_time(5.25)
    assert bench.members == ["n0", "n1"]
    come(bench, "n2")  # later there is no call: it costs a round, and no waiting
    assert bench.members == ["n0", "n1", "n2"]


def test_nobody_is_called_when_all_have_come() -> None:
    bench = without_platform(1, 2, last_call_s=5.0)
    come(bench, "n0", "n1")
    assert bench.members == ["n0", "n1"]


def test_with_too_few_nodes_for_too_long_the_job_has_failed() -> None:
    bench = without_platform(2, 3, join_timeout_s=60.0)
    come(bench, "n0")
    bench.pass_time(59.0)
    assert not bench.job.state.phase.ended
    bench.pass_time(2.0)
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.job.state.reason == "1 of at least 2 nodes is ready, after 60 s (the job starts)"
    told = bench.agent("n0").assignment
    assert told is not None
    assert (told.directive, told.exit_code) == (Directive.STOP, 1)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (("n0", "n3"), "missing: n1, n2"),
        (("gpu7-11-ab", "gpu9-12-cd"), "present: gpu7-11-ab, gpu9-12-cd"),
    ],
)
def test_nodes_that_do_not_come_are_missed_aloud(nodes: tuple[str, ...], words: str) -> None:
    bench = without_platform(3, 4, join_timeout_s=600.0)
    come(bench, *nodes)

    def told() -> list[str]:
        return [e.message for e in bench.job.state.events if e.reason == "NodesMissing"]

    bench.pass_time(9.0)
    assert told() == []
    bench.pass_time(2.0)
    assert len(told()) == 1
    assert told()[0].startswith("2 of at least 3 nodes are ready, after 10 s (the job starts)")
    assert told()[0].endswith(f"; {words}; the job fails after 600 s")
    bench.pass_time(580.0)
    assert len(told()) == 3


def test_a_node_that_leaves_with_notice_is_not_missed() -> None:
    bench = without_platform(1, 1, join_timeout_s=600.0)
    come(bench, "n0")
    bench.agent("n0").leaving = "the agent received SIGTERM"
    bench.settle()
    bench.pass_time(20.0)
    assert [e for e in bench.job.state.events if e.reason == "NodesMissing"] == []


def test_a_node_that_is_there_and_not_ready_yet_is_not_missed() -> None:
    """A slow machine was told of missing nodes by "0 of at least 1 node are ready; present: n0"."""
    bench = without_platform(1, 1, join_timeout_s=600.0)
    bench.agents[NodeId("n0")].append(SimAgent(NodeId("n0"), warming=True))
    bench.settle()
    bench.pass_time(20.0)
    assert bench.members == []
    assert [e for e in bench.job.state.events if e.reason == "NodesMissing"] == []


def test_a_command_that_runs_and_never_joins_is_told_of() -> None:
    """A command that waited for the master of a PyTorchJob stood still without a word."""
    bench = Bench(elastic_job(3))
    bench.step()
    for node in ("n0", "n1"):
        bench.step(NodeSeen(NodeId(node), near=True))
    bench.step(NodeSeen(NodeId("n2"), near=True, runs=False, message="its image is pulled"))

    def told() -> list[str]:
        return [e.message for e in bench.job.state.events if e.reason == "NodesMissing"]

    bench.pass_time(59.0)
    assert told() == []
    bench.pass_time(2.0)
    assert len(told()) == 1
    assert told()[0].startswith("n0, n1 run, but have not joined the job, after 60 s (the job st")
    assert "does the command reach elastic-run?" in told()[0]
    bench.pass_time(290.0)
    assert len(told()) == 1
    bench.pass_time(20.0)
    assert len(told()) == 2


def test_a_command_that_never_joins_is_told_of_while_others_train() -> None:
    """Its sentence was only said while there were too few nodes."""
    bench = Bench(elastic_job(3, minimum=1))
    bench.step()
    for node in ("n0", "n1", "n2"):
        bench.step(NodeSeen(NodeId(node), near=True))
    bench.agents[NodeId("n0")].append(SimAgent(NodeId("n0"), max_restarts=2))
    bench.pass_time(200.0)
    assert bench.members == ["n0"]
    (told,) = [e.message for e in bench.job.state.events if e.reason == "NodesMissing"]
    assert told.startswith("n1, n2 run, but have not joined the job, after 60 s")
    bench.pass_time(400.0)
    assert bench.reasons().count("NodesMissing") == 2


def test_a_command_that_was_started_at_the_last_look_is_not_told_of() -> None:
    bench = Bench(elastic_job(1))
    bench.step()
    bench.step(NodeSeen(NodeId("n0"), near=True, runs=False, message="its image is pulled"))
    bench.pass_time(59.0)
    bench.step(NodeSeen(NodeId("n0"), near=True))
    bench.pass_time(20.0)
    assert "NodesMissing" not in bench.reasons()


def test_the_end_of_the_masters_node_is_the_jobs_failure() -> None:
    bench = without_platform(1, 2)
    come(bench, "n0", "n1")
    bench.step(JobStopped("the node that runs the job's master has ended"))
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    told = bench.agent("n1").assignment
    assert told is not None
    assert (told.directive, told.exit_code) == (Directive.STOP, 1)


def test_workers_are_counted_within_their_role_too() -> None:
    bench = without_platform(3, 3)
    for node, role in (("n0", "actor"), ("n1", "learner"), ("n2", "actor")):
        agent = SimAgent(NodeId(node), nproc=2, max_restarts=2, role=role)
        bench.agents[NodeId(node)].append(agent)
    bench.settle()
    places = []
    for node in ("n0", "n1", "n2"):
        told = bench.agent(node).assignment
        assert told is not None
        places.append((told.rank_offset, told.role_rank_offset, told.role_world_size))
    assert places == [(0, 0, 4), (2, 0, 2), (4, 2, 4)]


def test_ranks_follow_the_numbers_in_the_names() -> None:
    bench = without_platform(3, 3)
    come(bench, "host10-7", "host2-99", "host2-100")
    assert bench.members == ["host2-99", "host2-100", "host10-7"]


def test_two_agents_with_one_name_are_told_of_each_other() -> None:
    bench = without_platform(2, 2)
    come(bench, "n0", "n1")
    first = bench.agent("n1")
    second = SimAgent(NodeId("n1"), max_restarts=2)
    bench.agents[NodeId("n1")].append(second)
    out = bench.step(Reported(NodeId("n1"), second.report()))
    out = bench.step(Reported(NodeId("n1"), first.report()))
    (refusal,) = [e for e in out.effects if isinstance(e, Refuse)]
    assert refusal.boot_id == first.boot
    assert "do two nodes have the same --node-rank?" in refusal.message


def test_an_agent_that_was_given_up_does_not_displace_the_newer_one_of_its_name() -> None:
    """It lost its connection before it learned its incarnation, so it claims none."""
    bench = Bench(elastic_job(1), Rules(can_create=False))
    older, newer = SimAgent(N1), SimAgent(N1)
    bench.step(Reported(N1, older.report()))
    bench.step(Disconnected(N1, older.boot, older.seq))
    bench.pass_time(5.0)
    bench.step(Reported(N1, newer.report()))
    out = bench.step(Reported(N1, older.report()))
    assert [e.boot_id for e in out.effects if isinstance(e, Refuse)] == [older.boot]
    assert bench.job.live.nodes[N1].boot_id == newer.boot
    bench.step(Disconnected(N1, newer.boot, newer.seq))
    bench.pass_time(5.0)
    out = bench.step(Reported(N1, older.report()))
    assert [e.boot_id for e in out.effects if isinstance(e, Refuse)] == [older.boot], "nor later"


def test_a_node_that_comes_by_itself_can_give_up_for_all() -> None:
    bench = by_themselves("a", "b", "c", replicas=3)
    bench.kill(NodeId("c"))
    bench.agent("a").gives_up = "its restarts are used up"
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.job.state.reason == "a: its restarts are used up"
    told = bench.agent("b").assignment
    assert told is not None
    assert (told.directive, told.exit_code) == (Directive.STOP, 1)


def test_where_nodes_can_be_replaced_none_gives_up_for_all() -> None:
    bench = running(elastic_job(2))
    bench.agent("n1").gives_up = "its restarts are used up"
    bench.settle()
    bench.check_running()


def test_a_smaller_wish_does_not_shorten_the_lease_of_who_was_told_a_longer_one() -> None:
    bench = Bench(elastic_job(10_000, 1), Rules(can_create=False))
    bench.step()
    come(bench, "n0", "n1")
    told = bench.agent("n0").assignment
    assert told is not None
    bench.step(JobChanged(bench.spec.scaled(100)))
    assert bench.job.live.nodes.lease_s >= told.lease_s > 5.0


def test_a_new_master_deletes_no_leaving_node_where_nodes_come_by_themselves() -> None:
    """Its platform cannot delete a node: the master ended, and so did each one after it."""
    bench = Bench(elastic_job(2, 1), Rules(can_create=False))
    bench.step()
    for node in ("a", "b"):
        bench.boot(NodeId(node))
    bench.settle()
    bench.agent("b").leaving = "the agent received SIGTERM"
    bench.exchange()
    bench.restart_master()
    bench.settle()
    assert "a" in bench.members


def test_a_node_that_left_with_notice_may_come_back_where_nobody_replaces_it() -> None:
    bench = without_platform(2, 2)
    come(bench, "n0", "n1")
    bench.agent("n1").leaving = "the agent received SIGTERM"
    bench.settle()
    bench.agent("n1").ended = True
    bench.pass_time(12.0)
    come(bench, "n1")
    assert bench.members == ["n0", "n1"]
    bench.check_running()
    assert bench.job.state.replacement_slots == [], "nobody would ever fill them"


# --- hosts, absence, goodput ---


def test_a_host_whose_node_fell_silent_is_kept_out_for_a_while() -> None:
    bench = running(elastic_job(3, 2))
    bench.agent("n1").frozen = True
    bench.pass_time(7.0)
    assert bench.avoided[NodeId("n3")] == ("n1",), "each node of the bench is its own host"
    bench.restart_master()
    bench.settle()
    bench.kill(NodeId("n3"))
    bench.settle()
    bench.pass_time(2.0)
    assert bench.avoided[NodeId("n4")] == ("n1",), "the next master knows it"
    bench.settle()
    bench.pass_time(60.0)
    bench.kill(NodeId("n4"))
    bench.settle()
    bench.pass_time(3.0)
    assert bench.avoided[NodeId("n5")] == ()


def test_a_host_that_refuses_a_node_is_kept_out_and_nothing_is_charged() -> None:
    """Its scheduler would choose it again: it does not know of the broken device there."""
    bench = Bench(elastic_job(2, restarts=0))
    bench.step()
    for number in range(1, 4):
        node = NodeId(f"n{number}")
        bench.pods.pop(node, None)
        words = "UnexpectedAdmissionError: no healthy devices"
        bench.step(NodeEnded(node, words, free=True, refused_by="gpu-1"))
        bench.pass_time(61.0)
        assert "gpu-1" in bench.avoided[NodeId(f"n{number + 1}")]
    assert bench.job.state.abandoned_slots == 0
    assert bench.job.state.phase is JobPhase.PENDING


def test_where_there_is_one_host_only_it_is_asked_again() -> None:
    bench = running(elastic_job(1))
    bench.agent("n0").frozen = True
    bench.pass_time(7.0)
    assert bench.avoided[N1] == ()


def test_a_host_that_refuses_each_node_at_once_is_not_asked_again_and_again() -> None:
    """Evictions are free; their number must have a bound in time all the same."""
    bench = running(elastic_job(2, 1))
    bench.pods[N1] = False
    bench.step(NodeEnded(N1, "evicted", free=True))
    asked = []
    for _ in range(400):
        new = [n for n in bench.avoided if n not in asked]
        asked += new
        for node in new[-1:]:
            if bench.job.live.nodes[node].phase is not NodePhase.GONE and node not in ("n0", "n1"):
                bench.pods.pop(node, None)
                bench.facts.clear()
                bench.step(NodeEnded(node, "evicted", free=True))
        bench.exchange(bench.agent("n0"))
        bench.to(bench.now + 0.25)
    assert 4 < len(asked) < 14
    assert bench.job.state.abandoned_slots == 0, "and no budget is charged"


def test_a_list_that_is_older_than_a_node_does_not_end_it() -> None:
    bench = Bench(elastic_job(2, 1))
    bench.step()
    bench.boot(NodeId("n0"))
    bench.exchange()
    bench.step(NodesListed(frozenset()))
    assert bench.job.live.nodes[NodeId("n0")].alive


def test_nodes_that_were_taken_away_while_nobody_looked_are_free_if_the_platform_says_so() -> None:
    bench = running(elastic_job(2, 1))
    bench.pods.pop(N1)
    bench.step(NodesListed(frozenset({NodeId("n0")}), free=True))
    bench.settle()
    assert bench.job.live.nodes[NodeId("n2")].relaunches == 0


def test_an_id_that_is_in_use_is_not_given_again_when_the_journal_was_lost() -> None:
    bench = Bench(elastic_job(2, 1))
    out = bench.job.step([NodeSeen(NodeId("n7"), True)], 0.0, 1e6)
    created = [e.node for e in out.effects if isinstance(e, CreateNode)]
    assert created == ["n8", "n9"]


def test_an_end_is_told_again_by_the_next_master() -> None:
    bench = running(elastic_job(2))
    bench.step(JobStopped("60 s are over", EventReason.DEADLINE_EXCEEDED))
    before = bench.job.status(bench.now, 2e6)
    bench.restart_master()
    bench.step()
    after = bench.job.status(bench.now, 3e6)
    failed = [c for c in after.conditions if c.type == "Failed"]
    assert failed == [c for c in before.conditions if c.type == "Failed"]
    assert failed[0].reason == "DeadlineExceeded"


def test_a_node_that_is_told_to_go_has_less_time_than_its_platform_gives_it() -> None:
    bench = running(elastic_job(2, 1))
    bench.step(NodeSeen(N1, True, leaving="drained", grace_s=12.0))
    told = bench.job.assignments.get(N1)
    assert told is not None
    assert (told.directive, told.stop_grace_s) == (Directive.STOP, 10.0)


@pytest.mark.parametrize("jump", [-600.0, 600.0])
def test_a_clock_that_jumps_changes_no_duration(jump: float) -> None:
    bench = running(elastic_job(2, 1))
    bench.pass_time(10.0)
    bench.agent("n0").reach(1)
    bench.exchange()
    bench.pass_time(90.0)
    before = bench.job.status(bench.now, 1e6 + bench.now)
    bench.job.step([], bench.now, 1e6 + bench.now + jump)
    after = bench.job.status(bench.now, 1e6 + bench.now + jump)
    assert after.goodput == before.goodput
    assert (after.round, after.phase) == (before.round, before.phase)
    bench.job.step([JobStopped()], bench.now, 1e6 + bench.now + jump)
    end = bench.job.status(bench.now, 1e6 + bench.now + jump)
    assert end.ended_at is not None
    assert end.ended_at - end.started_at == pytest.approx(bench.now)


def spent(bench: Bench) -> dict[str, float]:
    """Where the time of its job went; the sum is the time that has passed."""
    found = bench.job.status(bench.now, 1e6 + bench.now).goodput
    assert found is not None
    assert found.wall_s == pytest.approx(bench.now, abs=0.01)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=0.01)
    return {str(bucket): seconds for bucket, seconds in found.seconds.items()}


def share(bench: Bench) -> float | None:
    found = bench.job.status(bench.now, 1e6 + bench.now).goodput
    assert found is not None
    return found.share


def test_goodput_is_the_part_of_the_time_that_brought_new_steps() -> None:
    bench = running(elastic_job(2, 1))
    assert share(bench) is None, "no step was reported"
    began = bench.now
    bench.pass_time(10.0 - began)
    bench.agent("n0").reach(1)
    bench.exchange()
    first = bench.now
    bench.pass_time(90.0)
    bench.agent("n0").reach(91)
    progress = bench.agent("n0").progress
    assert progress is not None
    used = {"data": 20.0, "save": 5.0, "load": 1.0, "run": 80.0}
    update = {"steps_per_s": 1.0, "spent": used}
    bench.agent("n0").progress = progress.model_copy(update=update)
    bench.exchange()
    (shown,) = [one for one in bench.job.status(bench.now, 0.0).nodes if one.id == "n0"]
    assert shown.data_wait == 0.25
    found = spent(bench)
    assert share(bench) == pytest.approx(1 - (first + 26) / bench.now, abs=0.02)
    assert set(found) == {
        "productive", "program_startup", "data_loading", "checkpoint_save", "checkpoint_restore",
    }  # fmt: skip
    assert (found["data_loading"], found["checkpoint_save"]) == pytest.approx((20.0, 5.0))
    bench.agent("n1").fail(crash())
    bench.exchange()
    bench.settle()
    bench.pass_time(10.0)
    down, productive = spent(bench), found["productive"]
    assert down["productive"] == pytest.approx(productive, abs=2.0)
    bench.agent("n0").reach(81)
    bench.exchange()
    after = spent(bench)
    assert after["wasted_progress"] == pytest.approx(11.0), "steps 81 to 91"
    assert after["program_startup"] >= down["program_startup"] - 0.01
    bench.restart_master()
    bench.settle()
    bench.pass_time(10.0)
    again = spent(bench)
    assert again["wasted_progress"] == pytest.approx(11.0), "a new master knows it"
    assert again["data_loading"] == pytest.approx(20.0)


def test_a_suspension_is_counted_but_not_against_the_job() -> None:
    document = job_file(2)
    bench = running(ElasticJob.parse(document))
    bench.agent("n0").reach(1)
    bench.exchange()
    bench.pass_time(50.0)
    before = share(bench)
    document["spec"]["suspend"] = True
    bench.change(ElasticJob.parse(document))
    bench.settle()
    bench.pass_time(500.0)
    assert spent(bench)["suspended"] > 490
    assert share(bench) == pytest.approx(before, abs=0.05)


def pending(node: str, message: str = "0/3 nodes are available") -> NodeSeen:
    return NodeSeen(NodeId(node), False, message=message)


def silent(bench: Bench) -> None:
    """n1 falls silent, and there is no room for who is to replace it."""
    bench.set_capacity(2)
    bench.agent("n1").frozen = True
    bench.pass_time(6.0)
    bench.step(pending("n3"))
    assert bench.avoided[NodeId("n3")] == ("n1",)


@pytest.mark.parametrize("another_master", [False, True])
def test_a_node_that_finds_no_other_place_gets_the_host_that_was_kept_out(
    another_master: bool,
) -> None:
    bench = running(elastic_job(3, 2))
    silent(bench)
    if another_master:
        bench.restart_master()
        bench.step(pending("n3"))
    bench.pass_time(19.0)
    assert NodeId("n4") not in bench.avoided
    bench.pass_time(2.0)
    assert bench.avoided[NodeId("n4")] == ()
    assert "HostsReadmitted" in bench.reasons()


def test_where_no_host_can_be_avoided_a_node_without_a_place_waits() -> None:
    bench = running(elastic_job(3, 2), Rules(avoids_hosts=False))
    bench.set_capacity(2)
    bench.agent("n1").frozen = True
    bench.pass_time(6.0)
    bench.step(pending("n3", "no free host"))
    assert bench.avoided[NodeId("n3")] == ()
    bench.pass_time(21.0)
    assert NodeId("n4") not in bench.avoided, "n3 is not requested again"
    assert "HostsReadmitted" not in bench.reasons()


def test_who_could_not_start_is_made_anew_of_a_new_template() -> None:
    bench = Bench(elastic_job(3, 2), capacity=2)
    bench.step()
    bench.settle()
    bench.step(pending("n2", "main: Back-off pulling image"))
    spec = bench.spec.worker.template["spec"] | {"nodeSelector": {"a": "b"}}
    worker = bench.spec.worker.model_copy(update={"template": {"spec": spec}})
    roles = bench.spec.spec.replica_specs.model_copy(update={"worker": worker})
    before = bench.members
    bench.change(bench.spec.changed(bench.spec.spec.model_copy(update={"replica_specs": roles})))
    assert NodeId("n3") in bench.avoided
    assert NodeId("n4") not in bench.avoided, "who trains is left alone"
    bench.set_capacity(3)
    bench.settle()
    assert bench.members == [*before, "n3"]
    bench.step(pending("n3"))  # what is late
    assert bench.members == [*before, "n3"]


def test_who_waits_for_a_volume_is_made_anew_of_a_new_template() -> None:
    """Its platform cannot know that it will not come."""
    bench = Bench(elastic_job(2, 2), capacity=1)
    bench.step()
    waits = replace(pending("n1", "no volumes yet"), near=True, runs=False)
    bench.step(replace(waits, template_hash=bench.spec.worker.template_hash))
    assert NodeId("n2") not in bench.avoided
    bench.step(replace(waits, message="", template_hash="another"))
    assert NodeId("n2") not in bench.avoided, "it pulls its image"
    bench.step(replace(waits, template_hash="another"))
    assert NodeId("n2") in bench.avoided


@pytest.mark.parametrize("another_master", [False, True])
def test_who_turns_out_not_to_start_is_made_anew_if_it_is_of_an_older_template(
    another_master: bool,
) -> None:
    """Kubernetes tries an image for some seconds before it says so: by then it may be mended."""
    bench = Bench(elastic_job(3, 2), capacity=2)
    bench.step()
    bench.settle()
    if another_master:
        bench.restart_master()
    late = replace(pending("n2", "main: Back-off pulling image"), template_hash="another")
    bench.step(replace(late, template_hash=bench.spec.worker.template_hash))
    assert NodeId("n3") not in bench.avoided, "another would be no better"
    bench.step(replace(late, near=True), NodeSeen(NodeId("n0"), True, template_hash="another"))
    assert NodeId("n3") not in bench.avoided, "who trains or starts is left alone"
    bench.step(late)
    assert NodeId("n3") in bench.avoided
    bench.step(late)
    assert NodeId("n4") not in bench.avoided
    assert bench.reasons().count("NodeRecreated") == 1


def test_numbers_that_were_used_before_a_journal_was_lost_are_not_used_again() -> None:
    """The status tells of 64 nodes at most: what else there is is seen once all are listed."""
    bench = Bench(elastic_job(2, 1))
    bench.job.skip(12, 7, 41)
    assert not bench.job.step([NodeSeen(NodeId("n7"), True)], 0.0, 1e6).effects[1:], "not yet"
    there = NodesListed(frozenset({NodeId("n7"), NodeId("n99")}), free=True)
    out = bench.job.step([there], 0.1, 1e6)
    created = [e.node for e in out.effects if isinstance(e, CreateNode)]
    assert created == ["n100", "n101"], "n99 has ended, and its Pod is there"
    assert bench.job.state.next_event >= 42
    reports = [Reported(node, SimAgent(node).report()) for node in created]
    bench.job.step(reports, 0.2, 1e6)
    assert bench.job.state.round == 13, "what is stored under it is newer than what was"


def test_workers_are_told_how_old_their_job_was_when_the_round_began() -> None:
    """From it and the restarts they know how often something fails."""
    bench = running(elastic_job(2, 1))
    bench.job.live.checkpoints.in_use = True
    bench.pass_time(100.0)
    bench.agent("n0").fail(crash())
    bench.settle()
    told = bench.agent("n0").assignment
    assert told is not None
    assert json.loads(told.checkpoint)["ageS"] >= 100


# --- checkpoints ---


@pytest.mark.parametrize("master", ["stays", "restarts"])
def test_a_users_request_to_store_a_checkpoint_interrupts_nobody(master: str) -> None:
    bench = running()
    for agent in bench.living():
        agent.save(7, persist=False)
    bench.settle()
    bench.change(bench.spec.with_stored_checkpoint("now"))
    assert EventReason.SPEC_CHANGED not in bench.reasons()
    assert EventReason.CHECKPOINT_REQUESTED in bench.reasons()
    if master == "restarts":
        bench.restart_master()
    bench.settle()
    for _ in range(2):  # the coordinator needs a grant
        for agent in bench.living():
            agent.write(PersistPhase.DONE)
        bench.settle()
    status = bench.job.status(bench.now, 0)
    assert status.store_answer == StoreAnswer(request="now", step=7, folder="/d")
    assert status.round == 1
    bench.restart_master()
    bench.settle()
    assert bench.job.status(bench.now, 0).store_answer == status.store_answer
    requested = [r for r in bench.reasons() if r == EventReason.CHECKPOINT_REQUESTED]
    assert len(requested) == (1 if master == "stays" else 2), "one text is one request"


def test_what_a_node_holds_is_stored_before_a_smaller_wish_lets_it_go() -> None:
    bench = running(elastic_job(3, 2))
    for agent in bench.living():
        agent.save(7, persist=False)
        agent.stores = True
    bench.settle()
    bench.change(bench.spec.scaled(2))
    bench.pass_time(bench.rules.settle_s)
    bench.settle()
    assert bench.members == ["n0", "n1"], "they go on meanwhile"
    goes = bench.agent("n2").assignment
    assert goes is not None
    assert (goes.directive, goes.stay_until_stored) == (Directive.STOP, True)
    assert goes.persist is not None
    assert (goes.persist.step, goes.persist.ranks) == (7, [2])
    for _ in range(2):  # the coordinator needs a grant
        for agent in bench.living():
            agent.write(PersistPhase.DONE)
        bench.settle()
    goes = bench.agent("n2").assignment
    assert goes is not None
    assert not goes.stay_until_stored
    assert bench.job.live.checkpoints.storage is not None
    assert bench.job.live.checkpoints.storage.step == 7


@pytest.mark.parametrize("how", ["scaled", "drained", "too few stay"])
def test_what_a_node_holds_is_copied_before_it_goes_if_there_is_no_storage(how: str) -> None:
    bench = running(elastic_job(2, 2 if how == "too few stay" else 1))
    for agent in bench.living():
        agent.stores = False
        agent.save(7, persist=False)
    bench.settle()
    if how == "scaled":
        bench.change(bench.spec.scaled(1))
        bench.pass_time(bench.rules.settle_s)
    else:
        bench.set_capacity(2)  # no replacement has room
        bench.agent("n1").leaving = "the agent received SIGTERM"
    bench.settle()
    heir, goes = bench.agent("n0"), bench.agent("n1").assignment
    assert goes is not None
    assert (goes.directive, goes.stay_until_stored) == (Directive.STOP, True)
    told = heir.assignment
    assert told is not None
    assert told.directive is (Directive.WAIT if how == "too few stay" else Directive.RUN)
    assert told.peer is not None
    assert told.peer_checkpoint is not None
    assert (told.peer.node, told.peer_checkpoint.step) == ("n1", 7)
    (part,) = bench.agent("n1").memory
    heir.memory = [*heir.memory, part.model_copy(update={"replica": True})]
    bench.settle()
    goes, told = bench.agent("n1").assignment, heir.assignment
    assert goes is not None
    assert not goes.stay_until_stored
    assert told is not None
    assert told.peer_checkpoint is None
    assert EventReason.CHECKPOINT_NOT_COPIED not in bench.reasons()


def test_what_is_newest_at_the_end_of_a_job_is_stored() -> None:
    bench = running(elastic_job(2, 2))
    for agent in bench.living():
        agent.save(7, persist=False)
        agent.stores = True
    bench.settle()
    for agent in bench.living():
        agent.succeed()
    for _ in range(2):  # it is over; all have heard of it
        bench.exchange()
    assert len(bench.living()) == 2
    assert bench.job.state.phase is JobPhase.SUCCEEDED
    assert all(agent.lingers for agent in bench.living())
    for _ in range(2):  # the coordinator needs a grant
        for agent in bench.living():
            agent.write(PersistPhase.DONE)
        bench.settle()
    assert not any(agent.lingers for agent in bench.living())
    assert bench.job.live.checkpoints.storage is not None
    assert bench.job.live.checkpoints.storage.step == 7


@pytest.mark.parametrize("replica", [False, True])
@pytest.mark.parametrize("end", ["suspend", "stop"])
def test_a_node_that_writes_the_last_checkpoint_may_be_silent(end: str, replica: bool) -> None:
    """On a machine with much load, an agent may be silent for longer than its lease."""
    bench = running(elastic_job(2, 2))
    for agent in bench.living():
        agent.save(7, persist=False)
        agent.stores = True
    if replica:
        copy = bench.agent("n0").memory[0].model_copy(update={"replica": True})
        bench.agent("n1").memory.append(copy)
    bench.settle()
    if end == "stop":
        bench.step(JobStopped())
    else:
        bench.change(bench.spec.suspended(True))
    bench.exchange()
    bench.exchange()
    silent = bench.agent("n0")
    silent.frozen = True
    bench.pass_time(bench.rules.lease_s + 1.0)
    assert ("CheckpointCanceled" in bench.reasons()) is replica, "another node can write its part"
    silent.frozen = False
    bench.settle()
    for _ in range(2):  # the coordinator needs a grant
        for agent in bench.living():
            agent.write(PersistPhase.DONE)
        bench.settle()
    assert bench.job.live.checkpoints.storage is not None
    assert bench.job.live.checkpoints.storage.step == 7


def test_a_silent_node_of_a_job_that_is_over_is_not_kept_for_ever() -> None:
    bench = running(elastic_job(2, 2))
    for agent in bench.living():
        agent.save(7, persist=False)
        agent.stores = True
    bench.settle()
    bench.step(JobStopped())
    bench.exchange()
    bench.exchange()
    bench.agent("n0").frozen = True
    bench.pass_time(bench.job.live.grace_s + bench.rules.lease_s)
    assert bench.job.live.nodes[NodeId("n0")].phase is NodePhase.GONE
    (failed,) = [e for e in bench.job.state.events if e.reason == "CheckpointFailed"]
    assert "took longer than" in failed.message


def test_a_smaller_wish_that_is_taken_back_at_once_costs_no_round() -> None:
    bench = running(elastic_job(4, 2))
    for wish in (2, 4, 3, 4):
        bench.change(bench.spec.scaled(wish))
        bench.pass_time(0.2)
    bench.pass_time(3.0)
    bench.settle()
    assert bench.reasons().count("RoundFormed") == 1
    assert len(bench.members) == 4
    bench.change(bench.spec.scaled(2))
    bench.settle()
    assert len(bench.members) == 4, "not yet"
    bench.pass_time(1.1)
    bench.settle()
    assert bench.members == ["n0", "n1"]


def test_a_smaller_wish_that_is_taken_back_at_once_costs_no_standby() -> None:
    bench = running(elastic_job(4, 2, standby=1))
    assert "n4" in bench.pods
    for wish in (2, 4):
        bench.change(bench.spec.scaled(wish))
        bench.pass_time(0.2)
    bench.pass_time(3.0)
    bench.settle()
    assert sorted(bench.pods) == ["n0", "n1", "n2", "n3", "n4"]
    bench.change(bench.spec.scaled(2))
    bench.pass_time(2.0)
    bench.settle()
    assert len(bench.pods) == 3, "two and a standby"


def test_a_smaller_size_may_be_taken_back_although_a_round_forms_meanwhile() -> None:
    bench = running(elastic_job(1, 1, standby=1))
    bench.change(bench.spec.scaled(3))
    bench.change(bench.spec.scaled(2))
    assert bench.job.state.round == 2
    assert sorted(bench.pods) == ["n0", "n1", "n2", "n3"], "the fourth stays for a moment, too"
    bench.pass_time(bench.rules.settle_s)
    bench.settle()
    assert len(bench.pods) == 3, "two and a standby"


def test_a_failure_for_want_of_memory_is_a_condition_until_training_is_steady() -> None:
    bench = running(elastic_job(2, 2), Rules(forgive_after_s=20))

    def shown() -> tuple[str, str] | None:
        found = {c.type: c for c in bench.job.status(bench.now, bench.now).conditions}
        condition = found.get("OutOfMemory")
        return (condition.status, condition.message) if condition is not None else None

    bench.agent("n0").fail(crash())
    bench.settle()
    assert shown() is None
    killed = crash().model_copy(update={"message": "was killed by SIGKILL: out of memory",
                                        "out_of_memory": "out of memory"})  # fmt: skip
    bench.agent("n1").fail(killed)
    bench.settle()
    assert shown() == ("True", "n1: worker 0 (rank 0) was killed by SIGKILL: out of memory")
    bench.restart_master()
    bench.settle()
    assert shown() == ("True", "n1: worker 0 (rank 0) was killed by SIGKILL: out of memory")
    for agent in bench.living():
        agent.reach(10)
    bench.pass_time(25)
    assert "BudgetReset" in bench.reasons()
    assert shown() == ("False", "training is steady again")


def test_a_node_that_ended_for_want_of_memory_is_told_as_that_also_when_it_was_given_up() -> None:
    words = "out of memory: the memory limit of container main is 2Gi"
    for late in (False, True):
        bench = running(elastic_job(2, 1))
        ended = NodeEnded(NodeId("n1"), f"its agent ended; {words}", 137, out_of_memory=words)
        if late:
            agent = bench.agent("n1")
            bench.step(Disconnected(agent.node, agent.boot, agent.seq))
            bench.to(bench.now + 2)
            assert "OutOfMemory" not in bench.reasons()
        bench.step(ended)
        bench.step(ended)
        lost = [e for e in bench.job.state.events if e.reason == "NodeLost"]
        told = [e for e in bench.job.state.events if e.reason == "OutOfMemory"]
        assert len(lost) == 1
        if late:
            assert [(e.message, e.cause) for e in told] == [(f"node n1 ran {words}", lost[0].id)]
        else:
            assert words in lost[0].message
            assert not told
        bench.restart_master()
        shown = {c.type: c for c in bench.job.status(bench.now, bench.now).conditions}
        assert shown["OutOfMemory"].message == f"n1: {words}"


def test_a_job_that_failed_for_want_of_memory_says_so_at_its_end() -> None:
    bench = running(elastic_job(1, 1, restarts=0))
    killed = crash().model_copy(update={"out_of_memory": "out of memory"})
    bench.agent("n0").fail(killed)
    bench.settle()
    status = bench.job.status(bench.now, bench.now)
    assert status.phase is JobPhase.FAILED
    assert {c.type: c.status for c in status.conditions}["OutOfMemory"] == "True"


# --- a restart of all nodes ---


def restarted(bench: Bench, *, rolling: bool, at: str = "now") -> None:
    bench.change(bench.spec.restarted(at, rolling=rolling))


def test_a_restart_replaces_all_nodes_at_once_and_charges_nobody() -> None:
    bench = running(elastic_job(3, 2, standby=1))
    restarted(bench, rolling=False)
    assert {n.id for n in bench.job.live.nodes if n.leaving} == {"n0", "n1", "n2", "n3"}
    bench.settle()
    bench.check_running()
    assert sorted(bench.pods) == ["n4", "n5", "n6", "n7"]
    assert bench.job.state.restarts.keys() <= {"drain", "join"}
    assert all(node.relaunches == node.restarts == 0 for node in bench.job.live.nodes)
    rounds = bench.job.state.round
    bench.pass_time(30)
    bench.restart_master()
    bench.settle()
    assert bench.job.state.round == rounds, "it was done once, for the next master too"


def test_a_rolling_restart_takes_one_unit_after_the_other() -> None:
    bench = running(elastic_job(4, 4, unit=2))
    restarted(bench, rolling=True)
    bench.settle()
    story = [
        event.node or event.reason
        for event in bench.job.state.events
        if event.reason in ("NodeLeaving", "RoundFormed")
    ]
    assert story == ["RoundFormed", "n3", "n2", "RoundFormed", "n1", "n0", "RoundFormed"]
    assert sorted(bench.pods) == ["n4", "n5", "n6", "n7"]
    bench.check_running()


def test_a_rolling_restart_waits_for_a_step_of_the_new_round() -> None:
    bench = running(elastic_job(2, 1))
    for agent in bench.living():
        agent.reach(5)
    bench.exchange()
    restarted(bench, rolling=True)
    bench.settle()
    assert len(bench.members) == 2
    assert sorted(bench.pods) == ["n0", "n2"], "the round trains, but has made no step yet"
    for agent in bench.living():
        agent.reach(6)
    bench.settle()
    for agent in bench.living():
        agent.reach(7)
    bench.settle()
    assert sorted(bench.pods) == ["n2", "n3"]


def test_a_rolling_restart_stops_at_the_first_unit_that_cannot_start() -> None:
    bench = running(elastic_job(3, 2))
    bench.set_capacity(2)  # as if no image of the new template could be had
    restarted(bench, rolling=True)
    bench.settle()
    bench.pass_time(120)
    assert sorted(bench.members) == ["n0", "n1"]
    assert len(bench.pods) == 3


def test_a_restart_under_a_new_master_goes_on() -> None:
    bench = running(elastic_job(3, 3))
    restarted(bench, rolling=True)
    bench.restart_master()
    bench.settle()
    bench.settle()
    bench.settle()
    assert sorted(bench.pods) == ["n3", "n4", "n5"]


def test_a_job_that_begins_with_a_restart_in_its_spec_replaces_nothing() -> None:
    bench = running(elastic_job(2, 2).restarted("before", rolling=False))
    bench.settle()
    assert sorted(bench.pods) == ["n0", "n1"]


def test_an_edit_of_the_template_is_told_and_counted_and_changes_no_node_that_runs() -> None:
    bench = running(elastic_job(2, 2))
    assert bench.job.status(bench.now, bench.now).updated == 2
    edited = bench.spec.model_dump(by_alias=True, exclude_unset=True)
    edited["spec"]["replicaSpecs"]["worker"]["template"]["metadata"] = {"labels": {"a": "b"}}
    edited["metadata"]["generation"] = 2
    bench.change(ElasticJob.parse(edited))
    bench.settle()
    (event,) = [e for e in bench.job.state.events if e.reason == "SpecChanged"]
    assert "the template has changed" in event.message
    assert "`dlrover job restart`" in event.message
    assert sorted(bench.pods) == ["n0", "n1"]
    assert bench.job.status(bench.now, bench.now).updated == 0
    bench.restart_master()
    bench.settle()
    assert bench.job.status(bench.now, bench.now).updated == 0
    restarted(bench, rolling=False)
    bench.settle()
    assert bench.job.status(bench.now, bench.now).updated == 2


def test_a_program_is_its_image_command_and_account() -> None:
    def program(*, labels: dict[str, str] | None = None, account: str = "", **main: Any) -> str:
        document = job_file(3)
        template = document["spec"]["replicaSpecs"]["worker"]["template"]
        template["metadata"] = {"labels": labels or {}}
        template["spec"]["serviceAccountName"] = account
        template["spec"]["containers"][0] |= main
        return ElasticJob.read(document).worker.program_hash

    one = program()
    assert one == program(labels={"run": "2"}, env=[{"name": "RUN", "value": "2"}])
    others: list[dict[str, Any]] = [
        {"image": "other:1"},
        {"command": ["x"]},
        {"args": ["--lr=1"]},
        {"workingDir": "/w"},
    ]
    found = {program(**other) for other in others} | {program(account="other"), one}
    assert len(found) == len(others) + 2


def test_the_allocator_may_allow_fewer_standbys_and_no_round_follows() -> None:
    spec = elastic_job(2, 1, standby=2)
    bench = running(spec)
    assert len(bench.pods) == 4
    number = bench.job.state.round
    bench.change(spec.allocated(NodeAllocation(nodes=2, standbys=1)))
    bench.pass_time(5)
    bench.settle()
    assert (len(bench.pods), bench.job.state.round) == (3, number)
    assert set(bench.members) <= set(bench.pods)
    bench.change(spec.allocated(NodeAllocation(nodes=2)))
    bench.pass_time(5)
    bench.settle()
    assert len(bench.pods) == 4
