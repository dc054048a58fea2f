"""Checks before the training, one story each; the bench checks every step (tests/builders.py)."""

from typing import Any

from dlrover_py.master.core.events import Rules
from dlrover_py.protocol.agents import Directive, WorkerPhase
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobPhase
from tests.builders import Bench, SimAgent, elastic_job

RULES = Rules(check_s=60.0)


def checked(spec: ElasticJob, *, capacity: int = 1000, settle: bool = True, **faults: str) -> Bench:
    """A job whose agents wish to be checked."""
    bench = Bench(spec, RULES, capacity=capacity)
    bench.precheck, bench.faults = 1, faults
    bench.step()
    if settle:
        bench.settle()
    return bench


def phase(bench: Bench) -> JobPhase:
    """The phase of its job; mypy takes an attribute to stay as it was."""
    return bench.job.state.phase


def message(bench: Bench, reason: str) -> str:
    return next(e.message for e in bench.job.state.events if e.reason == reason)


def directive(bench: Bench, node: str) -> Directive:
    told = bench.agent(node).assignment
    assert told is not None
    return told.directive


def test_all_nodes_are_checked_in_pairs_before_the_first_round() -> None:
    bench = checked(elastic_job(4), settle=False)
    bench.deliver_facts()
    for node in list(bench.pods):
        bench.boot(node)
    bench.exchange()
    bench.exchange()
    assert message(bench, "CheckStarted") == "check 1 started: n0+n1, n2+n3"
    agents = [bench.agent(f"n{i}") for i in range(4)]
    assert all(a.phase is WorkerPhase.CHECKING and not a.starts for a in agents)
    told = agents[3].assignment
    assert told is not None
    assert (told.check, told.node_rank, told.nnodes, told.rank_offset) == (1, 1, 2, 1)
    assert bench.job.state.reason == "4 nodes are being checked first (the job starts)"
    assert bench.job.status(0, 0).nodes[0].message == "is being checked before it trains"
    bench.settle()
    bench.check_running()
    assert bench.members == ["n0", "n1", "n2", "n3"]
    assert bench.job.state.round == 1
    assert (bench.job.state.restart_count, bench.job.state.restarts) == (0, {})


def test_nobody_is_checked_who_does_not_wish_it() -> None:
    bench = checked(elastic_job(3), settle=False)
    bench.precheck = 0
    bench.settle()
    bench.check_running()
    assert "CheckStarted" not in bench.reasons()


def test_only_those_are_checked_who_wish_it() -> None:
    bench = checked(elastic_job(3), settle=False)
    bench.deliver_facts()
    for node, level in (("n0", 0), ("n1", 1), ("n2", 2)):
        bench.boot(NodeId(node)).precheck = level
    bench.settle()
    bench.check_running()
    assert message(bench, "CheckStarted") == "check 1 started: n1+n2"
    assert len(bench.members) == 3


def test_a_bad_node_is_replaced_and_the_others_train_at_once() -> None:
    bench = checked(elastic_job(4, 2), capacity=4, n1="device")
    bench.check_running()
    assert bench.members == ["n0", "n2", "n3", "n4"]
    assert message(bench, "NodeExcluded") == (
        "node n1 is not fit to train: n1: broke (it failed with n0, and with n3)"
    )
    assert bench.job.live.nodes[NodeId("n4")].relaunches == 1
    formed = [e for e in bench.job.state.events if e.reason == "RoundFormed"]
    assert "3 nodes" in formed[0].message, "they did not wait for the replacement"
    causes = {e.id: e for e in bench.job.state.events}
    assert causes[formed[0].cause or 0].reason == "NodesChecked"
    assert bench.agent("n1").ended


def test_below_the_minimum_the_replacement_is_waited_for_and_checked_with_a_good_one() -> None:
    bench = checked(elastic_job(2), n0="device")
    bench.check_running()
    assert bench.members == ["n1", "n2"]
    assert [e.message for e in bench.job.state.events if e.reason == "CheckStarted"] == [
        "check 1 started: n0+n1",
        "check 2 started: n0, n1",
        "check 3 started: n1+n2",
    ]


def test_replacements_count_against_the_budget_of_their_place() -> None:
    faults: dict[str, Any] = {f"n{i}": "device" for i in range(1, 20)}
    bench = checked(elastic_job(2, restarts=2), **faults)
    for _ in range(4):
        bench.pass_time(60)
        bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.reasons().count("NodeExcluded") == 3
    ended = bench.job.state.events[-1]
    assert ended.reason == "NetworkCheckFailed"
    assert "n3 is not fit to train: n3: broke" in ended.message
    conditions = {c.type: c for c in bench.job.status(0, 0).conditions}
    assert conditions["Failed"].reason == "NetworkCheckFailed"


def by_themselves(replicas: int, minimum: int, **faults: str) -> Bench:
    bench = Bench(elastic_job(replicas, minimum), Rules(can_create=False, check_s=60.0))
    bench.faults = faults
    bench.step()
    for i in range(replicas):
        agent = SimAgent(NodeId(f"n{i}"), precheck=1, exclude_straggler=True)
        agent.fault = faults.get(agent.node, "")
        bench.agents[agent.node].append(agent)
    bench.settle()
    return bench


def test_where_nodes_come_by_themselves_the_bad_one_is_told_to_end() -> None:
    bench = by_themselves(4, 3, n2="link")
    assert sorted(bench.members) == ["n0", "n1", "n3"]
    bad = bench.agent("n2")
    assert bad.ended
    assert bad.assignment is not None
    assert (bad.assignment.directive, bad.assignment.exit_code) == (Directive.STOP, 1)
    assert "n2 is not fit to train" in bad.assignment.reason


def test_where_too_few_are_left_the_job_fails_and_says_which_node_and_why() -> None:
    bench = by_themselves(2, 2, n1="device")
    assert bench.job.state.phase is JobPhase.FAILED
    assert bench.job.state.events[-1].reason == "NetworkCheckFailed"
    assert bench.job.state.reason == (
        "node n1 is not fit to train: n1: broke (it failed with n0, and alone); fewer than 2 nodes "
        "are left"
    )


def test_a_bad_link_between_two_nodes_is_said_clearly() -> None:
    bench = by_themselves(2, 2, n1="link")
    assert "n0 and n1 each work alone, but not together" in bench.job.state.reason


def test_a_slow_node_is_kept_where_the_job_cannot_do_without() -> None:
    bench = by_themselves(3, 3, n1="slow")
    bench.check_running()
    assert len(bench.members) == 3
    assert "it stays in the job" in message(bench, "NodeSlow")
    assert by_themselves(3, 2, n1="slow").members == ["n0", "n2"]


def test_a_node_that_joins_is_checked_alone_and_disturbs_nobody() -> None:
    bench = checked(elastic_job(3, 2), capacity=2)
    bench.check_running()
    assert len(bench.members) == 2
    bench.set_capacity(3)
    bench.deliver_facts()
    bench.boot(NodeId("n2"))
    for _ in range(3):
        bench.exchange()
    assert bench.agent("n2").phase is WorkerPhase.CHECKING
    assert [e.message for e in bench.job.state.events if e.reason == "CheckStarted"][
        -1
    ] == "check 2 started: n2"
    assert bench.job.state.round == 1
    bench.settle()
    assert len(bench.members) == 3
    assert bench.job.state.restarts == {"join": 1}


def test_a_standby_helps_and_is_free_for_a_round_at_any_time() -> None:
    bench = checked(elastic_job(3, 3, standby=1))
    bench.kill(NodeId("n3"))  # the standby: its replacement is checked
    bench.deliver_facts()
    bench.settle()
    assert directive(bench, "n4") is Directive.WAIT
    bench.set_capacity(5)
    bench.change(bench.spec.scaled(4))  # n4 joins; n5 is the next standby
    bench.settle()
    assert len(bench.members) == 4
    bench.check_running()


def test_a_good_survivor_helps_to_check_a_replacement_that_all_wait_for() -> None:
    bench = checked(elastic_job(2))
    bench.kill(NodeId("n1"))
    bench.settle()
    bench.check_running()
    assert [e.message for e in bench.job.state.events if e.reason == "CheckStarted"][-1] == (
        "check 2 started: n0+n2"
    )
    assert bench.members == ["n0", "n2"]


def test_a_node_that_is_lost_in_a_check_says_nothing_of_its_partner() -> None:
    bench = checked(elastic_job(4, 2), settle=False)
    bench.deliver_facts()
    for node in list(bench.pods):
        bench.boot(node)
    for _ in range(2):
        bench.exchange()
    bench.kill(NodeId("n1"))
    bench.settle()
    bench.check_running()
    assert "NodesSuspected" not in bench.reasons()
    assert "n0" in bench.members


def test_a_check_that_hangs_ends_at_its_deadline() -> None:
    bench = checked(elastic_job(4, 3), capacity=4, n2="hang")
    assert bench.job.state.world is None
    bench.pass_time(59.75)
    assert "NodesSuspected" not in bench.reasons()
    bench.pass_time(0.25)
    bench.settle()
    assert "n2 and n3 did not finish within 60 s" in message(bench, "NodesSuspected")
    bench.pass_time(60.0)
    bench.settle()
    bench.check_running()
    assert "n2" not in bench.members


def test_a_master_that_is_restarted_begins_the_check_anew() -> None:
    bench = checked(elastic_job(2), settle=False)
    bench.deliver_facts()
    for node in list(bench.pods):
        bench.boot(node)
    for _ in range(2):
        bench.exchange()
    assert bench.agent("n0").checks == 1
    bench.restart_master()
    bench.settle()
    bench.check_running()
    assert [a.checks for a in bench.living()] == [2, 2]
    bench.restart_master()
    bench.settle()
    assert bench.job.live.health.number == 2, "who has passed is not checked again"


def test_a_suspended_job_checks_its_new_nodes_when_it_goes_on() -> None:
    bench = checked(elastic_job(2), settle=False)
    bench.deliver_facts()
    for node in list(bench.pods):
        bench.boot(node)
    for _ in range(2):
        bench.exchange()
    bench.change(bench.spec.suspended(True))
    bench.settle()
    assert bench.job.state.phase is JobPhase.SUSPENDED
    assert not bench.job.live.health.node_records
    bench.change(bench.spec.suspended(False))
    bench.settle()
    bench.check_running()
    assert bench.reasons().count("CheckStarted") == 2


def test_a_restarted_agent_is_checked_again() -> None:
    bench = checked(elastic_job(3, 1))
    bench.boot(NodeId("n1"))
    bench.settle()
    bench.check_running()
    assert sorted(bench.members) == ["n0", "n1", "n2"]
    assert [e.message for e in bench.job.state.events if e.reason == "CheckStarted"][
        -1
    ] == "check 2 started: n1"


def who_come(fewest: int, most: int, *nodes: str, **faults: str) -> Bench:
    """Checked nodes that nobody creates; too few of them are waited for a minute."""
    rules = Rules(check_s=60.0, can_create=False, join_timeout_s=60.0)
    bench = Bench(elastic_job(most, fewest), rules)
    bench.step()
    for node in nodes:
        comes(bench, node, faults.get(node, ""))
    bench.settle()
    return bench


def comes(bench: Bench, node: str, fault: str) -> None:
    agent = SimAgent(NodeId(node), max_restarts=1, precheck=1)
    agent.fault = fault
    bench.agents[agent.node].append(agent)


def test_too_few_nodes_to_check_are_not_waited_for_for_ever() -> None:
    bench = who_come(2, 3, "n0")
    bench.pass_time(59.0)
    assert phase(bench) is JobPhase.PENDING
    bench.pass_time(2.0)
    assert phase(bench) is JobPhase.FAILED
    assert bench.job.state.reason.startswith("1 of at least 2 nodes is present, after 60 s")


def test_an_agent_that_dies_in_its_check_again_and_again_is_charged() -> None:
    bench = who_come(2, 2, "n0", "n1", n1="hang")
    for _ in range(3):
        if bench.job.state.phase.ended:
            break
        comes(bench, "n1", "hang")
        bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED
    assert "restarted during its check" in bench.job.state.reason
