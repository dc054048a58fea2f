"""A job with an allocation: it follows it without ending, and never exceeds it."""

import json

import pytest

from dlrover_py.allocator import demand_of
from dlrover_py.master.core.events import JobChanged, NodeSeen, Rules
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobPhase
from tests.builders import WALL, Bench, elastic_job, job_file

RULES = Rules(measure_s=1.0, settle_s=0.0)


def allocate(bench: Bench, nodes: int | None, reason: str = "because") -> None:
    """Have the master see another allocation, and let everything settle."""
    granted = None if nodes is None else NodeAllocation(nodes=nodes, reason=reason)
    bench.spec = bench.spec.allocated(granted)
    bench.step(JobChanged(bench.spec))
    bench.settle()


def started(spec: ElasticJob) -> Bench:
    bench = Bench(spec, RULES, capacity=10)
    bench.step()
    bench.settle()
    return bench


def message(bench: Bench) -> str:
    """Return why the job has its size."""
    status = bench.job.status(bench.now, WALL + bench.now)
    return next(c.message for c in status.conditions if c.type == "ScalingActive")


def test_a_job_starts_with_what_it_may_have_and_follows_changes() -> None:
    granted = NodeAllocation(nodes=4, reason="4 nodes: why not", since=7.5)
    bench = started(elastic_job(6, 2).allocated(granted))
    assert len(bench.members) == 4
    assert bench.job.status(bench.now, WALL).followed_allocation == 7.5
    assert message(bench) == "4 nodes: why not"
    kept = bench.members[:2]
    allocate(bench, 2, "4→2: 2 nodes given back")
    assert bench.members == kept, "those with the lowest ranks stay"
    assert len(bench.pods) == 2, "the other hosts are free"
    assert bench.job.state.restarts == {"scale": 1}
    assert "NodesAllocated" in bench.reasons()
    allocate(bench, 6)
    assert len(bench.members) == 6
    allocate(bench, None)
    assert len(bench.members) == 6
    assert bench.job.status(bench.now, WALL).followed_allocation is None


def test_a_node_whose_place_was_taken_leaves_and_no_other_one_does() -> None:
    bench = started(elastic_job(4, 2))
    taken, *others = bench.members
    bench.spec = bench.spec.allocated(NodeAllocation(nodes=3))
    bench.step(
        JobChanged(bench.spec), NodeSeen(NodeId(taken), True, leaving="its Pod is being deleted")
    )
    bench.settle()
    assert bench.members == others
    assert bench.job.state.next_node == 4, "it is not replaced"


def test_more_than_replicas_is_not_used() -> None:
    bench = started(elastic_job(3, 2))
    allocate(bench, 9)
    assert len(bench.members) == 3


def test_a_job_without_nodes_is_held_back_and_goes_on() -> None:
    bench = started(elastic_job(3, 2))
    allocate(bench, 0, "3→0: another job needs them")
    status = bench.job.status(bench.now, WALL + bench.now)
    assert status.phase is JobPhase.SUSPENDED
    assert status.reason == "3→0: another job needs them"
    assert not bench.pods
    allocate(bench, 1, "1 is left")
    assert bench.job.state.phase is JobPhase.SUSPENDED, "the minimum is 2"
    allocate(bench, 2)
    assert len(bench.members) == 2


def test_a_standby_that_is_taken_back_fails_no_job_whose_place_was_abandoned() -> None:
    spec = elastic_job(2, 2, standby=1, restarts=0)
    bench = started(spec.allocated(NodeAllocation(nodes=2)))
    bench.kill(NodeId(bench.members[1]))
    bench.settle()
    assert bench.job.state.abandoned_slots == 1
    kept = bench.members
    assert len(kept) == 2, "the standby took over"
    for standbys in (0, 1, 0):
        bench.spec = bench.spec.allocated(NodeAllocation(nodes=2, standbys=standbys))
        bench.step(JobChanged(bench.spec))
        bench.settle()
        assert (bench.job.state.phase, bench.members) == (JobPhase.RUNNING, kept)
        assert len(bench.pods) == 2, "an abandoned place stays empty"
    bench.kill(NodeId(kept[0]))
    bench.settle()
    assert bench.job.state.phase is JobPhase.FAILED


def test_the_next_master_keeps_the_allocation() -> None:
    bench = started(elastic_job(6, 2))
    allocate(bench, 3)
    accepted = bench.job.state.read_accepted()
    assert accepted is not None
    assert accepted.most_nodes == 3
    assert accepted.allocation == bench.spec.allocation


def test_another_reason_alone_changes_nothing() -> None:
    bench = started(elastic_job(3, 2))
    allocate(bench, 3, "one")
    rounds, events = bench.job.state.round, len(bench.reasons())
    allocate(bench, 3, "two")
    assert (bench.job.state.round, len(bench.reasons())) == (rounds, events)
    assert message(bench) == "two"


def test_a_job_that_scales_by_itself_stays_below_its_allocation() -> None:
    settings = {"mode": "auto", "scaleUpDelaySeconds": 1}
    bench = started(elastic_job(4, 1, maxReplicas=8, autoscale=settings))
    allocate(bench, 2, "4→2: other gets them")
    assert len(bench.members) == 2
    assert bench.job.live.target == 2
    assert message(bench).startswith("the cluster allots 2 of 4 nodes (4→2: other gets them); ")
    assert "ScaledDown" not in bench.reasons(), "the job itself has not chosen that"
    for _ in range(20):
        for agent in bench.living():
            if agent.running:
                step = agent.progress.step if agent.progress else 0
                agent.reach(step + 10 * len(bench.members))
        bench.pass_time(1.0)
        bench.settle()
    assert len(bench.members) == 2
    speed = bench.job.status(bench.now, WALL + bench.now).speed
    assert speed is not None
    assert speed.most == 2
    assert bench.job.state.scaling.target == 4


def test_a_job_that_scales_by_itself_takes_replicas_once_they_are_allotted() -> None:
    """A queue admits the minimum first, and then step after step."""
    settings = {"mode": "auto", "scaleUpDelaySeconds": 1}
    spec = elastic_job(8, 2, unit=2, maxReplicas=8, autoscale=settings)
    bench = started(spec.allocated(NodeAllocation(nodes=2, reason="the base")))
    assert len(bench.members) == 2
    bench.restart_master()
    bench.settle()
    allocate(bench, 5)
    assert len(bench.members) == 4
    allocate(bench, 8)
    assert len(bench.members) == 8
    allocate(bench, 0)
    assert not bench.pods
    allocate(bench, 8)
    assert len(bench.members) == 8


def test_sizes_that_are_only_advised_limit_no_allocation() -> None:
    """The allocator, queues and the suspension count with the sizes that the master takes."""
    settings = {"mode": "advise", "sizes": [4, 8]}
    spec = elastic_job(6, 2, maxReplicas=8, autoscale=settings)
    bench = started(spec.allocated(NodeAllocation(nodes=3)))
    assert len(bench.members) == 3, "3 nodes are enough for minReplicas"
    demand = demand_of(spec, None, queued_at=0.0, size=0)
    assert (demand.least, demand.most, demand.fit(5)) == (2, 6, 5)
    acts = elastic_job(6, 2, maxReplicas=8, autoscale=settings | {"mode": "auto"})
    demand = demand_of(acts, None, queued_at=0.0, size=0)
    assert (demand.least, demand.most, demand.fit(5)) == (4, 8, 4)


def test_an_allocation_is_read_from_the_status_and_not_from_a_file() -> None:
    document = job_file()
    with pytest.raises(ConfigError, match="allocation: unknown field"):
        ElasticJob.parse(document | {"allocation": {"nodes": 1}})
    stored = document | {"status": {"allocation": {"nodes": 1, "reason": "r", "later": 1}}}
    job = ElasticJob.read(stored)
    assert job.most_nodes == 1
    assert ElasticJob.read(json.loads(job.model_dump_json(by_alias=True))).most_nodes == 1
    wrong: tuple[object, ...] = ({"nodes": -1}, {"nodes": "many"}, [], None)
    for bad in wrong:
        assert ElasticJob.read(document | {"status": {"allocation": bad}}).most_nodes is None
