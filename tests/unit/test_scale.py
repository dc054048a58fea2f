"""What a decision costs does not grow with the number of nodes that it is not about.

Counted, not timed: the bytecodes that the core executes, which are the same on any machine.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.events import Assign, Disconnected, Reported, Rules
from dlrover_py.master.core.job import Job
from dlrover_py.master.core.nodes import LONGEST_EXCHANGE_S, ReportPace, pace
from dlrover_py.master.core.rendezvous import CandidateNode, arrange
from dlrover_py.master.core.reports import JOIN_EVENTS_PER_STEP
from dlrover_py.protocol.names import NodeId, Term
from dlrover_py.protocol.status import JobPhase
from tests.builders import WALL, SimAgent, elastic_job

FEW, MANY = 200, 3200
FLAT = 2.0
"""A cost that grew with the number of nodes would grow by a factor of 16."""
TURNS = 8
"""A storm's reports come in so many turns, however many they are: what comes while one turn is
taken waits for the next."""


class Swarm:
    """A job whose nodes come by themselves, and its agents."""

    def __init__(self, nodes: int, minimum: int | None = None) -> None:
        job = elastic_job(nodes, minimum or nodes // 2)
        self.now = 0.0
        self.job = Job(job, Rules(can_create=False), term=Term(1), now=0.0, wall=WALL)
        self.agents = [SimAgent(NodeId(f"n{i}"), warm=True) for i in range(nodes)]

    def report(self, agents: list[SimAgent]) -> None:
        """One turn: these have reported; all are told what there is for them."""
        self.now += 0.001
        events = [Reported(agent.node, agent.report()) for agent in agents]
        out = self.job.step(events, self.now, WALL)
        by_node = {agent.node: agent for agent in self.agents}
        for effect in out.effects:
            assert isinstance(effect, Assign)
            by_node[effect.node].receive(effect.assignment)

    def storm(self, agents: list[SimAgent]) -> None:
        """All of these report, in a few turns."""
        size = -(-len(agents) // TURNS)
        for at in range(0, len(agents), size):
            self.report(agents[at : at + size])

    def run(self) -> None:
        """All are in a round, and have taken it up."""
        self.storm(self.agents)
        self.storm(self.agents)
        self.storm(self.agents)
        assert self.job.state.world is not None
        assert len(self.job.state.world.members) == len(self.agents)
        assert all(agent.running for agent in self.agents)

    def lose(self, agent: SimAgent) -> None:
        self.now += 0.001
        self.job.step([Disconnected(agent.node, agent.boot, agent.seq)], self.now, WALL)
        agent.cut = True
        self.now += self.job.live.rules.suspect_s
        self.agents.remove(agent)
        self.storm(self.agents)
        self.storm(self.agents)
        assert self.job.state.world is not None
        assert len(self.job.state.world.members) == len(self.agents)


def work(call: Callable[[], object], parts: Sequence[str] = ("master/core",)) -> int:
    """Bytecodes that the core executes in a call, or other files: those with a part of the path."""
    counted = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        if not any(part in frame.f_code.co_filename for part in parts):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal counted
            counted += event == "opcode"
            return count

        return count

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counted


def each(nodes: int, part: str) -> float:
    """Bytecodes for each node that a part is about."""
    swarm = Swarm(nodes)
    if part == "a storm of joins":
        return work(lambda: swarm.storm(swarm.agents)) / nodes
    if part == "a report while others are waited for":
        swarm.storm(swarm.agents[: nodes // 4])
        return work(lambda: swarm.report(swarm.agents[:1]))
    swarm.run()
    if part == "a report of a running round":
        swarm.agents[1].reach(5)
        swarm.report(swarm.agents[:2])  # the first step is news; it is stored
        swarm.agents[1].reach(6)
        return work(lambda: swarm.report(swarm.agents[1:2]))
    if part == "a status":
        return work(lambda: swarm.job.status(swarm.now, WALL)) / nodes
    assert part == "a loss"
    return work(lambda: swarm.lose(swarm.agents[nodes // 2])) / nodes


@pytest.mark.parametrize(
    "part",
    [
        "a storm of joins",
        "a report while others are waited for",
        "a report of a running round",
        "a loss",
        "a status",
    ],
)
def test_the_cost_of_each_node_does_not_grow_with_the_job(part: str) -> None:
    few, many = each(FEW, part), each(MANY, part)
    assert few > 10, "it is counted at all"
    assert many < FLAT * few, f"{part}: {few:.0f} bytecodes for each node, then {many:.0f}"


# --- the pace ---


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("size", [18, 72])
def test_the_cost_of_ranks_by_domain_is_linearithmic(size: int, replaced: bool) -> None:
    """Racks of nearly this size in blocks and zones: half of the nodes go, or all are replaced."""

    def cost(nodes: int) -> float:
        def place(n: int) -> tuple[str, ...]:
            rack = n // (size - n // size % 5)
            return f"zone-{rack % 3}", f"block-{rack % 30}", f"rack-{rack}", f"host-{n}"

        there = [CandidateNode(NodeId(f"n{n}"), 1, 8, place(n)) for n in range(nodes)]
        old = [(c.node, c.topology) for c in there]
        if replaced:
            there = [replace(c, node=NodeId(f"m{c.node}")) for c in there]
        count = nodes if replaced else nodes // 2 + 1
        return work(lambda: arrange(there, count, old)) / (nodes * log2(nodes))

    assert cost(MANY) <= FLAT * cost(FEW)


def test_a_small_job_keeps_its_settings() -> None:
    return_s: Any = pytest.approx(5.012)
    assert pace(3, exchange_s=1.0, lease_s=5.0) == ReportPace(1.0, 5.0, return_s)
    assert pace(500, exchange_s=1.0, lease_s=5.0) == ReportPace(1.0, 5.0, 7.0)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (1000, ReportPace(2.0, 7.0, 11.0)),
        (10_000, ReportPace(20.0, 43.0, 83.0)),
        (100_000, ReportPace(LONGEST_EXCHANGE_S, 43.0, 443.0)),
    ],
)
def test_a_large_job_reports_less_often(nodes: int, expected: ReportPace) -> None:
    assert pace(nodes, exchange_s=1.0, lease_s=5.0) == expected


@given(nodes=st.integers(1, 200_000), more=st.integers(0, 200_000), exchange=st.floats(0.1, 100.0))
def test_one_late_report_never_costs_a_node(nodes: int, more: int, exchange: float) -> None:
    lease = 2 * exchange
    small = pace(nodes, exchange_s=exchange, lease_s=lease)
    large = pace(nodes + more, exchange_s=exchange, lease_s=lease)
    assert large.lease_s >= small.lease_s >= lease
    assert large.exchange_s >= small.exchange_s >= exchange
    for found in (small, large):
        assert found.lease_s >= 2 * found.exchange_s * (1 - 1e-9)


def test_agents_are_told_the_pace_of_the_wish_not_of_those_that_are_there() -> None:
    swarm = Swarm(5000)
    swarm.report(swarm.agents[:1])
    told = swarm.agents[0].assignment
    assert told is not None
    assert (told.exchange_s, told.lease_s) == (10.0, 23.0)
    assert swarm.job.live.nodes.lease_s == 23.0


# --- events ---


def test_many_that_come_at_once_are_one_event() -> None:
    swarm = Swarm(100)
    swarm.report(swarm.agents[:JOIN_EVENTS_PER_STEP])
    singly = [e for e in swarm.job.state.events if e.reason == "NodeJoined"]
    assert [e.node for e in singly] == [f"n{i}" for i in range(JOIN_EVENTS_PER_STEP)]
    swarm.report(swarm.agents[JOIN_EVENTS_PER_STEP:])
    (together,) = [e for e in swarm.job.state.events if e.reason == "NodeJoined"][
        JOIN_EVENTS_PER_STEP:
    ]
    assert together.message.startswith("92 nodes joined: n8, n9, n10")
    assert together.message.endswith("n23 and 76 more")


def test_a_node_that_returns_late_is_charged_with_nothing() -> None:
    """It was silent for longer than its lease; the loss is known, and its process is the same."""
    swarm = Swarm(4, minimum=4)
    swarm.run()
    late = swarm.agents[2]
    swarm.job.step([Disconnected(late.node, late.boot, late.seq)], swarm.now, WALL)
    swarm.now += swarm.job.live.rules.suspect_s
    swarm.report(swarm.agents[:1])
    assert swarm.job.state.phase is JobPhase.FORMING
    swarm.report([late])
    assert not swarm.job.state.phase.ended, swarm.job.state.reason
    assert swarm.job.live.nodes[late.node].restarts == 0
