"""Traces of recoveries: what their spans say, and that a dead or slow receiver costs nothing."""

import logging
import math
import socket
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.events import Event, RestoreAsked
from dlrover_py.master.core.state import Step
from dlrover_py.master.settings import Settings
from dlrover_py.master.traces import (
    Recovery,
    RecoveryTimes,
    Span,
    TraceExporter,
    spans_of,
    trace_exporter,
)
from dlrover_py.protocol.agents import FailureKind
from tests.builders import WALL, Bench, crash, elastic_job
from tests.otlp import receiver, seconds_of

RECOVERY = Recovery(
    began=10, failed=10, noticed=11, formed=12, taken_up=12.5, running=13, restoring=15,
    restored=17, resumed=20,
)  # fmt: skip
LENGTHS = {
    "detect": 1.0, "decide": 1.0, "assign": 0.5, "start": 0.5, "prepare": 2.0, "restore": 2.0,
    "first step": 3.0,
}  # fmt: skip


def lengths(spans: list[Span]) -> dict[str, float]:
    return {span.name: span.ended - span.began for span in spans[1:]}


def test_each_phase_lasts_until_the_next_one() -> None:
    spans = spans_of(RECOVERY, 1000)
    assert spans[0] == Span("recovery", 1010, 1020)
    assert lengths(spans) == LENGTHS


def test_without_a_checkpoint_the_first_step_begins_when_the_workers_run() -> None:
    spans = spans_of(replace(RECOVERY, restoring=math.nan, restored=math.nan), 0)
    assert list(lengths(spans)) == ["detect", "decide", "assign", "start", "first step"]
    assert lengths(spans)["first step"] == 7


def test_a_new_master_leaves_out_what_only_the_last_one_saw() -> None:
    unknown = replace(RECOVERY, failed=math.nan, noticed=math.nan, formed=math.nan, began=12.2)
    spans = spans_of(unknown, 0)
    assert spans[0].began == 12.2
    assert next(iter(lengths(spans))) == "start"


TIMES = st.floats(0, 100) | st.just(math.nan)


@given(st.builds(Recovery, *[st.floats(0, 100), *[TIMES] * 7, st.floats(0, 100)]))
def test_phases_are_in_order_without_gaps_inside_of_the_whole(recovery: Recovery) -> None:
    """Whatever is known, and in whatever order the reports came."""
    whole, *phases = spans_of(recovery, 0)
    for one, following in pairwise(phases):
        assert one.began <= one.ended == following.began
    if phases:
        assert whole.began <= phases[0].began
        assert phases[-1].ended == whole.ended == recovery.resumed


class TracedBench(Bench):
    """A job whose recoveries are traced."""

    def trace(self) -> None:
        self.sent: list[tuple[list[Span], dict[str, str | int]]] = []
        self.times = RecoveryTimes(lambda spans, said: self.sent.append((list(spans), said)))

    def step(self, *events: Event) -> Step:
        seen = self.job.state.next_event
        out = super().step(*events)
        if hasattr(self, "times"):
            self.times.take(self.job, events, seen, self.now)
        return out

    def first_step(self, *, after_s: float, load_s: float = 0.0) -> None:
        """The script of rank 0's node reports its first step."""
        assert self.job.state.world is not None
        agent = self.agent(self.job.state.world.members[0].node)
        agent.reach(7)
        assert agent.progress is not None
        found = {"first_step_after_s": after_s, "spent": {"load": load_s}}
        agent.progress = agent.progress.model_copy(update=found)
        self.exchange(agent)


@pytest.fixture
def bench() -> TracedBench:
    """A job of two nodes that has made its first step."""
    found = TracedBench(elastic_job(2, 1), now=100)
    found.trace()
    found.step()
    found.settle()
    found.first_step(after_s=0.0)
    assert found.sent == [], "the first round is no recovery"
    return found


def test_a_failure_of_a_worker_is_traced_from_its_report_to_the_first_step(
    bench: TracedBench,
) -> None:
    bench.agent("n1").fail(crash())
    bench.exchange()
    bench.settle()
    bench.now += 4
    bench.step(RestoreAsked(1, 2))
    bench.now += 4
    bench.first_step(after_s=7, load_s=3)
    ((spans, said),) = bench.sent
    assert lengths(spans) == pytest.approx(
        {"detect": 0, "decide": 0, "assign": 1, "start": 0, "prepare": 3, "restore": 3,
         "first step": 1}
    )  # fmt: skip
    assert spans[0] == Span("recovery", WALL + 100, WALL + 108)
    (kept,) = bench.times.newest
    assert (kept.round, kept.took_s) == (2, 8)
    assert list(kept.phases) == [one.name for one in spans[1:]]
    assert kept.phases == pytest.approx(lengths(spans))
    assert (
        said
        | {
            "dlrover.round": 2,
            "dlrover.kind": "failure",
            "dlrover.nodes": 2,
            "dlrover.workers": 2,
            "dlrover.cause": "WorkerFailed",
            "dlrover.cause.node": "n1",
            "dlrover.cause.class": "unknown",
        }
        == said
    )
    assert "n1: " in str(said["dlrover.cause.message"])


def test_a_silent_node_is_detected_from_its_last_report_on(bench: TracedBench) -> None:
    bench.exchange()
    bench.agent("n1").frozen = True
    bench.pass_time(8)
    bench.settle()
    bench.first_step(after_s=0.5)
    ((spans, said),) = bench.sent
    assert said["dlrover.cause"] == "NodeLost"
    lease_s = bench.job.live.pace.lease_s
    assert lease_s <= lengths(spans)["detect"] <= lease_s + 1
    assert spans[0].began == spans[1].began == WALL + 100


def test_the_wait_for_the_cause_of_a_broken_connection_is_detection(bench: TracedBench) -> None:
    bench.agent("n0").fail(crash(kind=FailureKind.PEER))
    bench.exchange(bench.agent("n0"))
    bench.now += 0.125
    bench.agent("n1").fail(crash())
    bench.exchange(bench.agent("n1"))
    bench.settle()
    bench.first_step(after_s=0.0)
    ((spans, said),) = bench.sent
    assert said["dlrover.cause.node"] == "n1"
    assert lengths(spans)["detect"] == pytest.approx(0.125)


def test_a_round_that_fails_before_its_first_step_is_part_of_the_same_recovery(
    bench: TracedBench,
) -> None:
    for _ in range(2):
        bench.agent("n1").fail(crash())
        bench.exchange()
        bench.settle()
        bench.now += 2
    bench.first_step(after_s=1)
    ((spans, said),) = bench.sent
    assert said["dlrover.round"] == 3
    assert spans[0].ended - spans[0].began == 4
    assert sum(lengths(spans).values()) == pytest.approx(2), "the phases are of the last round"


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the log of a master has; pytest also shows what does not get there."""
    return [record for record in caplog.records if record.name == "master.traces"]


async def test_a_receiver_gets_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        exporter = TraceExporter()
        exporter.send(spans_of(RECOVERY, WALL), {"dlrover.job": "gpt", "dlrover.round": 2})
        trace = found.trace()
        assert trace.resource["service.name"] == "dlrover-master"
        assert trace.attributes == {"dlrover.job": "gpt", "dlrover.round": 2}
        assert seconds_of(trace.root) == 10
        assert trace.root.start_time_unix_nano == (WALL + 10) * 10**9
        assert trace.seconds == LENGTHS
        assert [span.name for span in trace.phases] == list(LENGTHS)
        await exporter.finish(60)


async def test_a_receiver_that_refuses_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with receiver(400) as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        exporter = TraceExporter()
        for _ in range(3):
            exporter.send(spans_of(RECOVERY, WALL), {})
        await exporter.finish(60)
        assert found.requests.qsize() == 3
        (warning,) = warnings(caplog)
        assert warning.getMessage() == "traces_dropped"
        assert "400" in warning.why  # type: ignore[attr-defined]
        found.status = 200
        exporter.send(spans_of(RECOVERY, WALL), {})
        await exporter.finish(60)
        found.status = 400
        exporter.send(spans_of(RECOVERY, WALL), {})
        await exporter.finish(60)
    assert len(warnings(caplog)) == 2, "after a success the next failure is news"


async def test_a_receiver_that_is_not_there_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.25")
    exporter = TraceExporter()
    exporter.send(spans_of(RECOVERY, WALL), {})
    await exporter.finish(60)
    (warning,) = warnings(caplog)
    assert "OTEL_EXPORTER_OTLP_" in warning.then  # type: ignore[attr-defined]


async def test_a_slow_receiver_delays_nothing_and_few_traces_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with receiver() as found:
        found.hold.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        exporter = TraceExporter()
        exporter.send(spans_of(RECOVERY, WALL), {"dlrover.round": 0})
        found.trace()  # it has arrived, and is not answered
        for number in range(1, 101):
            exporter.send(spans_of(RECOVERY, WALL), {"dlrover.round": number})
        assert found.requests.empty(), "none of these calls has waited"
        found.hold.set()
        await exporter.finish(60)
        kept = [found.trace(0).attributes["dlrover.round"] for _ in range(found.requests.qsize())]
    assert kept == list(range(85, 101))
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_the_standard_variables_switch_traces_on(variables: dict[str, str], on: bool) -> None:
    assert Settings.traces(variables) is on


def test_without_the_libraries_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert trace_exporter() is None
    (warning,) = warnings(caplog)
    assert "extra opentelemetry" in warning.then  # type: ignore[attr-defined]
    assert warning.levelno == logging.WARNING
