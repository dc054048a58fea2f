"""More memory for nodes after one has run out of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.events import NodeEnded, Rules
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.memory_growth import (
    MIB,
    MemoryGrowthSpec,
    memory_limit,
    with_memory_limit,
)
from dlrover_py.protocol.names import LABEL_QUEUE, NodeId
from dlrover_py.protocol.status import JobPhase
from tests.builders import Bench, crash, job_file, running

GIB = 1 << 30
LACK = "out of memory: the memory limit of container main is 2Gi"
KILLED = crash().model_copy(update={"message": "was killed", "out_of_memory": LACK})


def document(limit: str = "2Gi", growth: dict[str, Any] | None = None, **worker: Any) -> Any:
    """A job file of three nodes; their memory limit is given."""
    found = job_file(3, minReplicas=1, memoryGrowth=growth or {"limit": "4Gi"}, **worker)
    (main,) = found["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    main["resources"] = {"limits": {"memory": limit}, "requests": {"memory": "1Gi", "cpu": 1}}
    return found


def job(limit: str = "2Gi", growth: dict[str, Any] | None = None, **worker: Any) -> ElasticJob:
    return ElasticJob.parse(document(limit, growth, **worker))


def limits(bench: Bench) -> dict[str, float]:
    """The memory limit with which each node that is there was requested, in GiB."""
    return {n.id: n.record.memory / GIB for n in bench.job.live.nodes if n.alive}


def lose(bench: Bench, node: str, *, late: bool = False) -> None:
    """Have a node's container killed for lack of memory; ``late``: its connection closes first."""
    bench.agent(node).ended = True
    if late:
        bench.pass_time(10.0)
        bench.dying.discard(NodeId(node))
    bench.pods.pop(NodeId(node), None)
    bench.step(NodeEnded(NodeId(node), "was killed", exit_code=137, out_of_memory=LACK))
    bench.settle()


def test_a_node_that_ran_out_of_memory_is_replaced_by_one_with_more_and_nothing_is_charged() -> (
    None
):
    bench = running(job(restartCount=0))
    lose(bench, "n1")
    assert limits(bench) == {"n0": 0, "n2": 0, "n3": 3}
    assert bench.job.state.phase is JobPhase.RUNNING
    (event,) = (e for e in bench.job.state.events if e.reason == "MemoryRaised")
    expected = "node n1 ran out of memory: new nodes have 3072 MiB of memory instead of 2048 MiB"
    assert event.message == expected
    bench.restart_master()
    lose(bench, "n2")
    assert limits(bench) == {"n0": 0, "n3": 3, "n4": 3}, "it still had the lower limit"
    assert bench.reasons().count("MemoryRaised") == 1
    lose(bench, "n3")
    assert limits(bench) == {"n0": 0, "n4": 3}, "the limit is raised once, and restartCount is 0"


def test_a_worker_that_ran_out_of_memory_has_its_node_replaced() -> None:
    bench = running(job(restartCount=0))
    bench.agent("n1").fail(KILLED)
    bench.settle()
    assert limits(bench) == {"n0": 0, "n2": 0, "n3": 3}
    assert bench.job.state.phase is JobPhase.RUNNING


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_reason_that_comes_late_takes_back_what_was_charged(restarts: int) -> None:
    bench = running(job(restartCount=restarts))
    lose(bench, "n1", late=True)
    assert sorted(limits(bench).values()) == [0, 0, 3]
    assert bench.job.state.abandoned_slots == 0
    assert {n.relaunches for n in bench.job.live.nodes if n.alive} == {0}


def test_all_nodes_that_ran_out_of_memory_in_one_step_are_replaced() -> None:
    bench = running(job(restartCount=0))
    for node in ("n0", "n1", "n2"):
        bench.agent(node).fail(KILLED)
    bench.settle()
    assert set(limits(bench).values()) == {3}
    assert len(limits(bench)) == 3
    assert bench.job.state.phase is JobPhase.RUNNING
    assert bench.reasons().count("MemoryRaised") == 1


def test_a_node_of_an_older_template_is_replaced_and_raises_nothing() -> None:
    bench = running(job(restartCount=0, growth={"limit": "16Gi"}))
    bench.change(job("6Gi", {"limit": "16Gi"}, restartCount=0))
    lose(bench, "n1")
    assert limits(bench) == {"n0": 0, "n2": 0, "n3": 0}
    assert "MemoryRaised" not in bench.reasons()


def test_an_init_container_that_ran_out_of_memory_raises_nothing() -> None:
    bench = running(job())
    bench.agent("n1").ended = True
    bench.pods.pop(NodeId("n1"), None)
    bench.step(NodeEnded(NodeId("n1"), "container fetch was killed", out_of_memory=LACK))
    bench.settle()
    assert "MemoryRaised" not in bench.reasons()


def test_a_replacement_that_was_requested_before_the_reason_was_known_is_requested_again() -> None:
    bench = running(job())
    lose(bench, "n1", late=True)
    assert set(limits(bench).values()) == {0, 3}
    assert len(limits(bench)) == 3


@pytest.mark.parametrize("why", ["no growth", "a queue", "a platform without limits"])
def test_a_lack_of_memory_is_charged_like_any_failure_where_the_limit_cannot_be_raised(
    why: str,
) -> None:
    given = document(restartCount=0)
    if why == "no growth":
        del given["spec"]["replicaSpecs"]["worker"]["memoryGrowth"]
    if why == "a queue":
        given["metadata"]["labels"] = {LABEL_QUEUE: "q"}
    rules = Rules(limits_memory=why != "a platform without limits")
    bench = running(ElasticJob.parse(given), rules)
    lose(bench, "n1")
    assert limits(bench) == {"n0": 0, "n2": 0}
    assert "MemoryRaised" not in bench.reasons()


def test_a_template_with_a_higher_limit_counts_from_then_on() -> None:
    bench = running(job(growth={"limit": "16Gi", "factor": 2}))
    lose(bench, "n1")
    assert set(limits(bench).values()) == {0, 4}
    bench.change(job("6Gi", {"limit": "16Gi", "factor": 2}))
    lose(bench, "n0")
    assert limits(bench)["n4"] == 0, "it was of the old template"
    lose(bench, "n4")
    assert limits(bench)["n5"] == 12, "the limit of the template is raised again"


def test_a_template_may_get_the_highest_limit_and_a_raise_ends_with_the_growth() -> None:
    bench = running(job())
    lose(bench, "n1")
    bench.change(job("4Gi"))
    lose(bench, "n0")
    assert limits(bench)["n4"] == 0, "the limit of the template cannot be raised further"
    bench.change(job("2Gi"))
    without = document()
    del without["spec"]["replicaSpecs"]["worker"]["memoryGrowth"]
    bench.change(ElasticJob.parse(without))
    lose(bench, "n2")
    assert limits(bench)["n5"] == 0


@pytest.mark.parametrize(
    ("limit", "growth", "words"),
    [
        ("4Gi", {"limit": "2Gi"}, "memoryGrowth.limit is 2Gi and the memory limit of its main "
         "container is 4294967296 bytes: expected a limit of the container in the template"),
        ("4Gi", {"limit": "many"}, "memoryGrowth.limit"),
        ("4Gi", {"limit": "8Gi", "factor": 1}, "memoryGrowth.factor"),
        ("4Gi", {}, "memoryGrowth.limit"),
    ],
)  # fmt: skip
def test_a_growth_that_is_none_is_refused(limit: str, growth: dict[str, Any], words: str) -> None:
    found = document(limit)
    found["spec"]["replicaSpecs"]["worker"]["memoryGrowth"] = growth
    with pytest.raises(ConfigError, match=words):
        ElasticJob.parse(found)


def test_a_growth_without_a_limit_of_the_container_is_refused() -> None:
    of_pod = document()
    template = of_pod["spec"]["replicaSpecs"]["worker"]["template"]
    template["spec"]["resources"] = {"limits": {"memory": "3Gi"}}
    for found in (job_file(3, memoryGrowth={"limit": "4Gi"}), of_pod, document("1e400")):
        with pytest.raises(ConfigError, match="is none, or of the whole Pod"):
            ElasticJob.parse(found)


@given(st.integers(1, 2**45), st.integers(1, 2**20), st.floats(1.05, 16), st.integers(0, 2**45))
def test_a_limit_never_shrinks_and_stays_within_the_highest(
    present: int, most: int, factor: float, request: int
) -> None:
    spec = MemoryGrowthSpec(limit=f"{most}Mi", factor=factor)
    raised = spec.raised(present)
    assert present <= raised <= max(present, most * MIB)
    before = {"resources": {"limits": {"memory": str(present), "cpu": "1"}, "claims": []}}
    if request:
        before["resources"]["requests"] = {"memory": str(min(request, present))}
    after = with_memory_limit(before, raised)
    assert memory_limit(after) == raised
    assert after["resources"]["limits"]["cpu"] == "1"
    if request:
        assert int(after["resources"]["requests"]["memory"]) <= raised
    assert memory_limit(before) == present, "it is not changed"


@pytest.mark.parametrize(
    "container",
    [
        {},
        {"resources": None},
        {"resources": {"limits": ["memory"]}},
        *(
            {"resources": {"limits": {"memory": m}}}
            for m in ("much", "-1", "1e5000", "1e999999999", "8E")
        ),
    ],
)
def test_a_container_of_another_form_has_no_limit(container: dict[str, Any]) -> None:
    assert memory_limit(container) == 0


@pytest.mark.parametrize(
    "memory", ["1e5000", "1e999999999", "-1", "x" * 9999, "", 1e300, [], {}, None]
)
def test_no_memory_in_a_template_raises_more_than_a_refusal(memory: Any) -> None:
    """Whoever may write one job must not stop the operator."""
    found = document()
    (main,) = found["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    main["resources"]["limits"]["memory"] = memory
    with pytest.raises(ConfigError):
        ElasticJob.read(found)
