"""Checks of simulated nodes: who is bad is found, who is not passes, and it comes to an end."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlrover_py.master.core.health import Finding, Health, Verdict
from dlrover_py.protocol.agents import CheckResult
from dlrover_py.protocol.names import NodeId, id_key

Fault = Literal["device", "link", "slow", "hang"]
BAD, GOOD, SLOW = Verdict.BAD, Verdict.GOOD, Verdict.SLOW


@dataclass
class Ward:
    """Nodes with their faults, checked as the master and the agents would."""

    faults: dict[str, Fault]
    links: set[frozenset[str]] = field(default_factory=set)
    """Pairs between which nothing arrives."""
    narrow: str = ""
    """A node with a slow link."""
    exclude_slow: bool = True
    idle: bool = True
    """Good nodes have nothing else to do."""
    health: Health = field(default_factory=Health)
    findings: list[Finding] = field(default_factory=list)
    steps: int = 0
    now: float = 0.0

    def come(self, *nodes: str) -> None:
        for node in nodes:
            assert self.health.enter(NodeId(node), 1, exclude_slow=self.exclude_slow)

    def check(self, at_most: int = 30) -> None:
        """Until every node has a verdict."""
        while self.plan():
            self.steps += 1
            assert self.steps <= at_most, self.health.node_records
            self.run()

    def plan(self) -> bool:
        marks = self.health.node_records
        good = [n for n in marks if marks[n].verdict is GOOD] if self.idle else []
        self.findings += self.health.plan(sorted(self.health.open, key=id_key), good)
        members = [n for group in self.health.groups for n in group]
        assert len(set(members)) == len(members), "a node is in one group at a time"
        assert self.health.runs or not self.health.open, "nobody is forgotten"
        return self.health.runs

    def run(self) -> None:
        self.health.due = self.now + 300
        for group in self.health.groups:
            faults = {self.faults.get(n) for n in group}
            dead = any(pair <= set(group) for pair in self.links)
            dead |= "device" in faults or ("link" in faults and len(group) > 1)
            for node in group:
                if "hang" not in faults:
                    slow = 3.0 if self.faults.get(node) == "slow" else 1.0
                    took = 0.5 if self.narrow in group else 0.1
                    result = CheckResult(
                        passed=not dead, why="broke", matmul_s=slow, allreduce_s=took
                    )
                    self.health.take(node, self.health.number, result)
        assert not any("hang" in {self.faults.get(n) for n in g} for g in self.health.groups) or (
            not self.health.judge()
        )
        self.now += 300
        self.health.expire(self.now, 300)
        self.findings += self.health.judge()
        assert not self.health.runs

    def verdicts(self, verdict: Verdict) -> set[str]:
        return {n for n, mark in self.health.node_records.items() if mark.verdict is verdict}


def ward(nodes: int, *, idle: bool = True, exclude_slow: bool = True, **faults: Fault) -> Ward:
    made = Ward(dict(faults), idle=idle, exclude_slow=exclude_slow)
    made.come(*(f"n{i}" for i in range(nodes)))
    made.check()
    return made


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 64])
def test_good_nodes_take_one_step(nodes: int) -> None:
    done = ward(nodes)
    assert len(done.verdicts(GOOD)) == nodes
    assert done.steps == 1


@pytest.mark.parametrize("fault", ["device", "hang"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 9])
def test_one_bad_device_is_found_in_two_steps(nodes: int, fault: Fault) -> None:
    done = ward(nodes, n0=fault)
    assert done.verdicts(BAD) == {"n0"}
    assert len(done.verdicts(GOOD)) == nodes - 1
    assert done.steps <= (3 if nodes == 3 else 2)


@pytest.mark.parametrize("nodes", [4, 5, 6, 9])
def test_one_bad_link_to_all_is_found_in_two_steps(nodes: int) -> None:
    done = ward(nodes, n1="link")
    assert done.verdicts(BAD) == {"n1"}
    assert done.steps == 2 if nodes > 5 or nodes == 4 else done.steps <= 4


@pytest.mark.parametrize("bad", ["n0", "n1", "n2"])
def test_of_three_the_one_with_the_bad_link_is_found(bad: str) -> None:
    faults: dict[str, Any] = {bad: "link"}
    assert ward(3, **faults).verdicts(BAD) == {bad}


@pytest.mark.parametrize("order", [("n0", "n1"), ("n1", "n0")])
def test_of_two_with_a_bad_link_one_is_kept_and_it_is_said(order: tuple[str, ...]) -> None:
    done = Ward({"n0": "link"})
    done.come(*order)
    done.check()
    assert done.verdicts(GOOD) == {"n0"}
    assert done.verdicts(BAD) == {"n1"}
    (words,) = [f.message for f in done.findings if f.verdict is BAD]
    assert words == (
        "n0 and n1 each work alone, but not together: a link between them is bad. No other "
        "node can show whose link it is, so n1 is excluded"
    )
    # The one that replaces it does not work with n0 either, so now it is known.
    done.health.forget(NodeId("n1"))
    done.come("n2")
    done.check()
    assert done.verdicts(GOOD) == {"n2"}
    assert done.verdicts(BAD) == {"n0"}


def test_a_bad_link_between_two_nodes_costs_none_of_them_where_others_are() -> None:
    made = Ward({}, links={frozenset(("n0", "n1"))})
    made.come("n0", "n1", "n2", "n3")
    made.check()
    assert len(made.verdicts(GOOD)) == 4
    assert made.steps == 2


@pytest.mark.parametrize("nodes", [2, 3, 4, 6])
def test_a_slow_node_is_confirmed_before_it_is_left_out(nodes: int) -> None:
    done = ward(nodes, n1="slow")
    assert done.verdicts(SLOW) == {"n1"}
    assert len(done.verdicts(GOOD)) == nodes - 1
    assert done.steps == 2
    (left_out,) = [f for f in done.findings if f.verdict is SLOW]
    assert "a matmul took 3 s, the median is 1 s" in left_out.message


def test_a_slow_node_that_does_not_wish_it_is_only_told_of() -> None:
    done = ward(4, exclude_slow=False, n1="slow")
    assert len(done.verdicts(GOOD)) == 4
    assert done.steps == 1
    assert [f.nodes for f in done.findings if "slow" in f.message] == [("n1",)]


def test_a_node_that_comes_later_alone_is_compared_with_those_that_train() -> None:
    done = ward(4)
    done.idle = False
    done.faults["n4"] = "slow"
    done.come("n4")
    done.check()
    assert done.verdicts(SLOW) == {"n4"}


def test_a_node_that_comes_later_alone_and_fails_is_tried_twice() -> None:
    done = ward(4)
    done.idle = False
    done.faults["n4"] = "device"
    done.come("n4")
    done.check()
    assert done.verdicts(BAD) == {"n4"}
    assert done.steps == 3


def test_a_device_that_fails_once_only_passes() -> None:
    made = Ward({"n0": "device"})
    made.come("n0")
    assert made.plan()
    made.run()
    made.faults.clear()
    made.check()
    assert made.verdicts(GOOD) == {"n0"}


def test_a_slow_group_tells_its_slow_link() -> None:
    made = Ward({})
    made.come("n0", "n1", "n2", "n3")
    slow = NodeId("n1")
    for _ in range(2):
        assert made.plan()
        for group in made.health.groups:
            for node in group:
                seconds = 9.0 if slow in group else 1.0
                result = CheckResult(passed=True, matmul_s=1.0, allreduce_s=seconds)
                made.health.take(node, made.health.number, result)
        made.health.judge()
    assert made.verdicts(SLOW) == {"n1"}
    assert made.verdicts(GOOD) == {"n0", "n2", "n3"}


def test_results_of_an_older_step_and_of_a_group_that_lost_a_node_say_nothing() -> None:
    made = Ward({})
    made.come("n0", "n1")
    assert made.plan()
    broken = CheckResult(passed=False, why="broke")
    made.health.take(NodeId("n0"), made.health.number - 1, broken)
    assert not made.health.judge()
    made.health.forget(NodeId("n1"))
    made.health.take(NodeId("n0"), made.health.number, broken)
    assert not made.health.judge()
    assert not made.health.node_records[NodeId("n0")].needs_recheck
    made.check()
    assert made.verdicts(GOOD) == {"n0"}


@given(
    nodes=st.integers(1, 24),
    bad=st.dictionaries(st.integers(0, 23), st.sampled_from(["device", "link", "slow"])),
    late=st.integers(0, 8),
    idle=st.booleans(),
)
@example(  # the good nodes of the second step are too few for n5, whose link is bad
    nodes=15,
    bad={
        **dict.fromkeys((0, 1, 2, 4), "device"),
        **dict.fromkeys((5, 6, 12), "link"),
    },
    late=0,
    idle=False,
)
def test_exactly_the_bad_ones_are_left_out(
    nodes: int, bad: dict[int, Fault], late: int, idle: bool
) -> None:
    """As long as one pair of the first step is good, and of those that passed most are not slow."""
    faults: dict[str, Fault] = {f"n{i}": fault for i, fault in bad.items() if i < nodes}
    firsts = nodes - nodes % 2 if nodes > 1 else 0
    starts = range(0, firsts - (3 if nodes % 2 else 0), 2)
    if not any(not faults.keys() & {f"n{i}", f"n{i + 1}"} for i in starts):
        faults = {}
    slow = {n for n, fault in faults.items() if fault == "slow"}
    if len(slow) >= nodes - len(faults) - 2 * (len(faults) - len(slow)):
        faults = {n: f for n, f in faults.items() if f != "slow"}
        slow = set()
    made = Ward(faults)
    made.come(*(f"n{i}" for i in range(nodes)))
    made.check(at_most=2 + nodes)
    assert made.verdicts(BAD) == faults.keys() - slow
    assert made.verdicts(SLOW) == slow
    assert len(made.verdicts(GOOD)) == nodes - len(faults)
    if not slow and len(faults) * 2 <= nodes - len(faults) * 2 - 3:
        assert made.steps <= 2, "there were enough good ones for all that were in doubt"
    before = made.verdicts(GOOD)
    made.idle = idle
    made.come(*(f"m{i}" for i in range(late)))
    made.check(at_most=2 * nodes + 4)
    assert made.verdicts(GOOD) == before | {f"m{i}" for i in range(late)}


@given(
    nodes=st.integers(1, 12),
    bad=st.dictionaries(st.integers(0, 11), st.sampled_from(["device", "link", "slow", "hang"])),
    links=st.sets(st.sets(st.integers(0, 11), min_size=2, max_size=2).map(frozenset), max_size=8),
    idle=st.booleans(),
)
def test_it_always_ends_and_a_device_that_fails_is_never_good(
    nodes: int, bad: dict[int, Fault], links: set[frozenset[int]], idle: bool
) -> None:
    made = Ward(
        {f"n{i}": fault for i, fault in bad.items()},
        links={frozenset(f"n{i}" for i in pair) for pair in links},
        idle=idle,
    )
    made.come(*(f"n{i}" for i in range(nodes)))
    made.check(at_most=4 * nodes + 4)
    broken = {n for n, fault in made.faults.items() if fault in ("device", "hang")}
    assert not made.verdicts(GOOD) & broken


def test_a_pair_that_fails_only_once_costs_nobody() -> None:
    made = Ward({"n0": "link"})
    made.come("n0", "n1")
    assert made.plan()
    made.run()
    made.faults.clear()
    made.check()
    assert made.verdicts(GOOD) == {"n0", "n1"}
    assert made.steps == 2, "each alone, and both together again"


def confirming(faults: dict[str, Fault], slow_from: float = 1.1) -> Ward:
    """Eight nodes that have passed a check, of which n1 is then checked with three others."""
    made = Ward({})
    made.come(*(f"n{i}" for i in range(8)))
    made.check()
    assert len(made.verdicts(GOOD)) == 8
    made.findings.clear()
    made.faults.update(faults)
    made.health.reopen(NodeId("n1"), {NodeId(f"n{i}"): 1 for i in (1, 0, 2, 3)}, slow_from)
    return made


def test_a_suspect_that_is_slow_beside_good_nodes_is_left_out() -> None:
    made = confirming({"n1": "slow"})
    made.check()
    assert made.verdicts(SLOW) == {"n1"}
    assert len(made.verdicts(GOOD)) == 7


def test_a_confirmation_that_fails_without_the_suspect_too_leaves_nobody_out() -> None:
    made = confirming(dict.fromkeys(("n0", "n1", "n2", "n3"), "device"))
    made.check()
    assert len(made.verdicts(GOOD)) == 8
    assert {(found.void, found.message) for found in made.findings} == {(True, "n2: broke")}


def test_a_suspect_is_compared_with_nodes_of_the_same_check_only() -> None:
    """All four are slower than in the check before the training, and equal to each other."""
    made = confirming({})
    while made.plan():
        for group in made.health.groups:
            for node in group:
                result = CheckResult(passed=True, matmul_s=1.2, allreduce_s=1.2)
                made.health.take(node, made.health.number, result)
        made.findings += made.health.judge()
    assert len(made.verdicts(GOOD)) == 8


def test_a_suspect_with_a_slow_link_is_left_out() -> None:
    made = confirming({}, slow_from=1.3)
    made.narrow = "n1"
    made.check()
    assert made.verdicts(SLOW) == {"n1"}


def test_an_all_reduce_of_two_good_pairs_may_differ() -> None:
    made = confirming({}, slow_from=1.1)
    while made.plan():
        for group in made.health.groups:
            for node in group:
                took = 0.13 if "n1" in group else 0.1
                result = CheckResult(passed=True, matmul_s=1.0, allreduce_s=took)
                made.health.take(node, made.health.number, result)
        made.findings += made.health.judge()
    assert len(made.verdicts(GOOD)) == 8


def test_a_broken_node_that_comes_after_a_confirmation_is_left_out() -> None:
    made = confirming({})
    made.check()
    made.faults["n0"] = "device"
    assert made.health.enter(NodeId("n0"), 2, exclude_slow=True)
    made.check()
    assert made.verdicts(BAD) == {"n0"}


def test_without_the_suspect_the_others_are_checked_like_new_nodes() -> None:
    made = confirming({"n0": "device"})
    made.health.forget(NodeId("n1"))
    made.check()
    assert made.verdicts(BAD) == {"n0"}
    assert len(made.verdicts(GOOD)) == 6
