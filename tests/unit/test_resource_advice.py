"""Advice about memory and CPUs: what follows from what nodes use, and what new nodes get."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.events import NodeEnded, Rules
from dlrover_py.master.core.usage import (
    KEPT,
    WORTH,
    Present,
    UsageRecord,
    advise,
    measured,
    percentile,
)
from dlrover_py.master.platform.kubernetes.pods import Given, PodContext, pod
from dlrover_py.protocol.agents import LoaderState, NodeLoad
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import LABEL_QUEUE, NodeId
from dlrover_py.protocol.reasons import ConditionReason
from dlrover_py.protocol.resource_advice import cpu_milli
from dlrover_py.protocol.status import Condition, JobPhase
from tests.builders import WALL, Bench, crash, job_file, running

GIB = 1 << 30
LACK = "out of memory: the memory limit of container main is 4Gi"
AUTO = {
    "mode": "auto",
    "observeSeconds": 60,
    "memory": {"min": "1Gi", "max": "16Gi"},
    "cpu": {"min": "500m", "max": "8"},
}


def document(advice: dict[str, Any] | None = None, **worker: Any) -> Any:
    """A job file of three nodes with 8 GiB and 4 CPUs each."""
    found = job_file(3, minReplicas=3, resourceAdvice=advice or AUTO, **worker)
    (main,) = found["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    main["resources"] = {"limits": {"memory": "8Gi"}, "requests": {"memory": "8Gi", "cpu": 4}}
    return found


def job(advice: dict[str, Any] | None = None, **worker: Any) -> ElasticJob:
    return ElasticJob.parse(document(advice, **worker))


def uses(bench: Bench, gib: float, cores: float, seconds: float = 150) -> None:
    """Let time pass in which each node uses this much."""
    used = round(gib * GIB)
    load = NodeLoad(memory_bytes=used, memory_limit=8 * GIB, memory_peak=used, cores=cores)
    for node in bench.job.live.nodes:
        if node.alive:
            bench.agent(node.id).load = load
    bench.pass_time(seconds)


def given_to(bench: Bench) -> dict[str, tuple[float, int]]:
    """Memory limit in GiB and CPU request of each node that is there; 0: as in the template."""
    return {n.id: (n.record.memory / GIB, n.record.cpu) for n in bench.job.live.nodes if n.alive}


def lose(bench: Bench, node: str, *, lack: bool = False) -> None:
    bench.agent(node).ended = True
    bench.pods.pop(NodeId(node), None)
    why = LACK if lack else ""
    bench.step(NodeEnded(NodeId(node), "was killed", exit_code=137, out_of_memory=why))
    bench.settle()


def advice_of(bench: Bench) -> Condition:
    status = bench.job.status(bench.now, WALL + bench.now)
    (found,) = (c for c in status.conditions if c.type == "ResourcesAdvised")
    return found


# --- what follows from measurements ---


@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.floats(0, 512), st.integers(1, 64)),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 2**40),
    st.integers(0, 512_000),
    st.integers(1, 64),
    st.floats(1.1, 4),
)
def test_memory_is_never_less_than_the_peak_and_its_margin_and_advice_comes_to_rest(
    uses: list[tuple[int, float, int]], memory: int, cpu: int, minimum: int, margin: float
) -> None:
    record, present, changes = UsageRecord(), Present(memory, cpu, minimum), 0
    for peak, cores, members in uses:
        record = measured(record, "t", [(peak, cores)], 30.0, members)
        advice = advise(record, present, margin, memory)
        alone = max(1.0, record.least_nodes / minimum)
        assert advice.memory + 1 >= min(memory, record.peak * margin * alone), (
            "for the minimum, too"
        )
        if advice.memory != present.memory:
            changes += advice.memory < present.memory
            assert advice.memory >= max(one for one, _, _ in uses[: record_size(record)]) * margin
        after = replace(present, memory=advice.memory, cpu=advice.cpu)
        again = advise(record, after, margin, memory)
        assert (again.memory, again.cpu) == (after.memory, after.cpu), (
            "the same facts change nothing"
        )
        if present.cpu and advice.cpu != present.cpu:
            assert abs(advice.cpu - present.cpu) >= WORTH * present.cpu
        present = after


def record_size(record: UsageRecord) -> int:
    return sum(record.cores.values())


def test_memory_is_not_lowered_for_fewer_nodes_than_were_measured() -> None:
    record = measured(UsageRecord(), "t", [(2 * GIB, 1.0)], 3600.0, 8)
    small = advise(record, Present(16 * GIB, 4000, 8), 1.25, 16 * GIB)
    assert small.memory == 2.5 * GIB
    elastic = advise(record, Present(16 * GIB, 4000, 2), 1.25, 16 * GIB)
    assert elastic.memory == 10 * GIB, "with 2 nodes each may have four times the state"
    assert "with 2 nodes it may need up to 4 times the memory of 8" in elastic.why
    assert advise(record, Present(16 * GIB, 4000, 1), 1.25, 16 * GIB).memory == 16 * GIB
    record = measured(record, "t", [(round(2.5 * GIB), 1.0)], 30.0, 8)
    for present, more in ((2.5, 12.5), (10, 12.5), (12.5, 12.5)):
        advice = advise(record, Present(round(present * GIB), 4000, 2), 1.25, 16 * GIB)
        assert advice.memory == more * GIB, "what was lowered is raised for the minimum, too"
    least = advise(record, Present(4 * GIB, 4000, 2), 1.25, 4 * GIB)
    assert least.memory == 4 * GIB, "a template with less is the user's choice"


def test_cpus_are_those_that_suffice_most_of_the_time() -> None:
    record = UsageRecord()
    for cores in [2.0] * 96 + [30.0] * 4:
        record = measured(record, "t", [(GIB, cores)], 30.0, 1)
    assert 2.0 <= percentile(record.cores, 0.95) <= 2.2
    assert percentile(record.cores, 0.97) >= 30
    assert percentile({}, 0.95) == 0
    advice = advise(record, Present(2 * GIB, 8000, 1), 1.25, 2 * GIB)
    assert 2500 <= advice.cpu <= 2800
    assert advise(record, Present(2 * GIB, 0, 1), 1.25, 2 * GIB).cpu == 0, (
        "without a request there is none"
    )


def test_the_record_stays_small_and_new_measurements_count_more() -> None:
    record = measured(UsageRecord(), "t", [(1, 1.0)] * KEPT, 30.0, 1)
    for _ in range(4):
        record = measured(record, "t", [(1, 64.0)] * (KEPT // 2 + 1), 30.0, 1)
    assert sum(record.cores.values()) <= KEPT
    assert len(record.model_dump_json()) < 300
    assert percentile(record.cores, 0.5) >= 64
    assert measured(record, "other", [(5, 1.0)], 30.0, 1).peak == 5


# --- what becomes of it ---


def test_new_nodes_get_less_and_nodes_that_run_stay_as_they_are() -> None:
    bench = running(job())
    assert advice_of(bench).reason == ConditionReason.MEASURING
    uses(bench, 2.0, 1.0)
    found = advice_of(bench)
    assert (found.status, found.reason) == ("True", ConditionReason.RESOURCES_ADVISED)
    assert found.message.startswith("memory 2560Mi instead of 8192Mi and CPU request 1400m")
    assert found.message.endswith("; new nodes get 2560Mi and 1400m")
    assert set(given_to(bench).values()) == {(0, 0)}
    assert bench.reasons().count("ResourcesAdvised") == 1
    lose(bench, "n1")
    assert given_to(bench) == {"n0": (0, 0), "n2": (0, 0), "n3": (2.5, 1400)}
    for step in range(9):
        uses(bench, 2.05 + step / 100, 1.0, 35)
    assert advice_of(bench).message.startswith("memory 2752Mi instead of 8192Mi")
    assert bench.reasons().count("ResourcesAdvised") == 1, "small steps are no events"
    bench.restart_master()
    lose(bench, "n2")
    assert given_to(bench)["n4"] == (2.6875, 1400), "more memory counts at once"
    uses(bench, 2.4, 1.0, 65)
    assert bench.reasons().count("ResourcesAdvised") == 2


def test_a_lack_of_memory_below_the_template_ends_the_lowering_and_costs_nothing() -> None:
    bench = running(job(restartCount=0))
    uses(bench, 2.0, 1.0)
    bench.step(NodeEnded(NodeId("n1"), "was evicted", free=True))
    bench.agent("n1").ended = True
    bench.pods.pop(NodeId("n1"), None)
    bench.settle()
    assert given_to(bench)["n3"] == (2.5, 1400)
    uses(bench, 2.0, 1.0, 5)
    lose(bench, "n3", lack=True)
    assert bench.job.state.phase is JobPhase.RUNNING
    assert given_to(bench)["n4"] == (0, 1400), "the limit of the template is back"
    (event,) = (e for e in bench.job.state.events if e.reason == "MemoryRaised")
    assert event.message.endswith("new nodes have 8192 MiB of memory instead of 2560 MiB")
    uses(bench, 1.0, 1.0)
    bench.restart_master()
    bench.step(NodeEnded(NodeId("n0"), "was evicted", free=True))
    bench.agent("n0").ended = True
    bench.pods.pop(NodeId("n0"), None)
    bench.settle()
    assert given_to(bench)["n5"][0] == 0, "it is not lowered again"


def test_a_node_with_the_limit_of_the_template_that_ran_out_of_it_gets_no_less() -> None:
    bench = running(job())
    uses(bench, 2.0, 1.0)
    assert advice_of(bench).message.endswith("; new nodes get 2560Mi and 1400m")
    lose(bench, "n1", lack=True)
    assert given_to(bench)["n3"] == (0, 1400)
    assert bench.job.live.nodes[NodeId("n3")].relaunches == 1, "advice was not the cause"
    (event,) = (e for e in bench.job.state.events if e.reason == "MemoryRaised")
    assert event.message.endswith("new nodes have 8192 MiB of memory instead of 2560 MiB")


@pytest.mark.parametrize("how", ["pod", "late", "worker"])
def test_the_micro_batch_does_not_shrink_for_a_lack_that_advice_has_caused(how: str) -> None:
    bench = running(job(restartCount=1))
    uses(bench, 2.0, 1.0)
    bench.step(NodeEnded(NodeId("n1"), "was evicted", free=True))
    bench.agent("n1").ended = True
    bench.pods.pop(NodeId("n1"), None)
    bench.settle()
    assert given_to(bench)["n3"] == (2.5, 1400)
    for agent in bench.living():
        agent.loader = LoaderState(micro_batch=64, share=64, loader_workers=2, most_workers=8)
        agent.auto_tune = True
    uses(bench, 2.0, 1.0, 5)
    if how == "worker":
        killed = crash().model_copy(update={"message": "was killed", "out_of_memory": LACK})
        bench.agent("n3").fail(killed)
        bench.settle()
    else:
        if how == "late":
            bench.agent("n3").ended = True
            bench.pass_time(10.0)
            bench.dying.discard(NodeId("n3"))
        lose(bench, "n3", lack=True)
    assert bench.job.state.phase is JobPhase.RUNNING
    assert {n for n, _ in given_to(bench).values()} == {0}
    assert bench.job.state.tuning.tuner.micro_batch.value is None, "it is not made smaller"
    assert {n.relaunches for n in bench.job.live.nodes if n.alive} == {0}
    lose(bench, "n0", lack=True)
    assert bench.job.state.tuning.tuner.micro_batch.value == 32


def test_more_memory_is_given_before_it_runs_out_within_the_users_limits() -> None:
    tight = AUTO | {"memory": {"min": "1Gi", "max": "9Gi"}}
    bench = running(job(tight))
    uses(bench, 7.9, 4.0)
    assert "memory 10176Mi instead of 8192Mi" in advice_of(bench).message
    lose(bench, "n1")
    assert given_to(bench)["n3"][0] == 9
    least = AUTO | {"memory": {"min": "4Gi", "max": "9Gi"}}
    bench = running(job(least))
    uses(bench, 1.0, 4.0)
    lose(bench, "n1")
    assert given_to(bench)["n3"][0] == 4


@pytest.mark.parametrize("why", ["advise", "off", "queue", "platform", "short"])
def test_nothing_is_given_if_advice_is_all_that_is_wanted(why: str) -> None:
    advice = AUTO | ({"mode": why} if why in ("advise", "off") else {})
    found = document(advice | ({"observeSeconds": 3600} if why == "short" else {}))
    if why == "queue":
        found["metadata"]["labels"] = {LABEL_QUEUE: "q"}
    bench = running(ElasticJob.parse(found), Rules(limits_memory=why != "platform"))
    uses(bench, 2.0, 1.0)
    lose(bench, "n1")
    assert set(given_to(bench).values()) == {(0, 0)}
    if why == "off":
        status = bench.job.status(bench.now, WALL + bench.now)
        assert not [c for c in status.conditions if c.type == "ResourcesAdvised"]
        assert bench.job.state.new_nodes.usage == UsageRecord()
    if why == "short":
        assert advice_of(bench).message.endswith("of 1 h 0 min")


def test_another_template_is_measured_anew() -> None:
    bench = running(job())
    uses(bench, 2.0, 1.0)
    changed = document()
    changed["spec"]["replicaSpecs"]["worker"]["template"]["metadata"] = {"labels": {"v": "2"}}
    bench.change(ElasticJob.parse(changed))
    bench.pass_time(35)
    assert advice_of(bench).reason == ConditionReason.MEASURING
    lose(bench, "n1")
    assert given_to(bench)["n3"] == (0, 0)


# --- spec and Pods ---


@pytest.mark.parametrize(
    ("advice", "words"),
    [
        ({"mode": "auto"}, "auto, without limits for it"),
        ({"memory": {"min": "4Gi", "max": "2Gi"}}, "resourceAdvice.memory is from 4Gi to 2Gi"),
        ({"cpu": {"min": "0", "max": "2"}}, "resourceAdvice.cpu is from 0 to 2"),
        ({"cpu": {"min": "1Gi", "max": "2"}}, "resourceAdvice.cpu.min"),
        ({"margin": 1.0}, "resourceAdvice.margin"),
    ],
)
def test_a_wrong_spec_is_refused(advice: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job(advice)


def test_without_a_memory_limit_nothing_is_known() -> None:
    with pytest.raises(ConfigError, match="resourceAdvice needs a memory limit"):
        ElasticJob.parse(job_file(3, resourceAdvice={}))


def resources(found: Any, given: Given) -> Any:
    made = pod(ElasticJob.parse(found), NodeId("n0"), PodContext("u", "a:1"), given=given)
    return made["spec"]["containers"][0]["resources"]


def test_a_pod_has_what_it_is_given() -> None:
    found = document()
    assert resources(found, Given(2 * GIB, 1300)) == {
        "limits": {"memory": str(2 * GIB)},
        "requests": {"memory": str(2 * GIB), "cpu": "1300m"},
    }
    assert resources(found, Given())["requests"] == {"memory": "8Gi", "cpu": 4}
    older = Given(2 * GIB, 1300, "of another template")
    assert resources(found, older)["requests"] == {"memory": "8Gi", "cpu": 4}
    more = resources(found, Given(16 * GIB, 0, "of another template"))
    assert more["limits"]["memory"] == str(16 * GIB), "a raise counts for any template"
    (main,) = found["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    main["resources"]["limits"]["cpu"] = 6
    assert resources(found, Given(0, 9000))["requests"]["cpu"] == "6000m", "not above the limit"


def test_cpus_of_its_own_are_not_taken_from_a_container() -> None:
    found = document()
    (main,) = found["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    main["resources"]["limits"]["cpu"] = "4"
    bench = running(ElasticJob.parse(found))
    uses(bench, 2.0, 1.0)
    assert "CPU request" not in advice_of(bench).message
    lose(bench, "n1")
    assert given_to(bench)["n3"] == (2.5, 0)


def test_a_cpu_request_is_advised_up_to_the_limit_and_not_beside_cpus_of_the_whole_pod() -> None:
    found = document()
    spec = found["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    spec["containers"][0]["resources"]["limits"]["cpu"] = 6
    bench = running(ElasticJob.parse(found))
    uses(bench, 2.0, 5.5)
    assert "CPU request 6000m instead of 4000m" in advice_of(bench).message
    assert advice_of(bench).message.endswith("; new nodes get 2560Mi and 6000m")
    spec["resources"] = {"requests": {"cpu": 8}}
    bench = running(ElasticJob.parse(found))
    uses(bench, 2.0, 1.0)
    assert "CPU request" not in advice_of(bench).message
    lose(bench, "n1")
    assert given_to(bench)["n3"] == (2.5, 0)


@pytest.mark.parametrize("cpu", ["9e999999", "1e5000", "-1", "x", "", 1e300, [], {}, None])
def test_a_number_of_cpus_of_another_form_is_none(cpu: Any) -> None:
    assert cpu_milli({"resources": {"limits": {"cpu": cpu}}}, "limits") == 0
