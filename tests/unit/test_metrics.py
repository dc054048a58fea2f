"""The metrics of a master: what they say, and that nobody else chooses their labels."""

from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_operator import credentials
from dlrover_py.master.app import certificate_end
from dlrover_py.master.core.events import Kind
from dlrover_py.master.server import job_metrics
from dlrover_py.protocol.agents import FailureClass
from dlrover_py.protocol.reasons import ConditionType, EventReason
from dlrover_py.protocol.status import (
    GoodputStatus,
    JobEvent,
    JobPhase,
    JobStatus,
    LastCheckpoint,
    NodePhase,
    TablesStatus,
    TimeBucket,
)
from tests.unit.test_view import LOAD, hostile, status

LABELS: dict[str, set[str]] = {
    "class": set(FailureClass),
    "phase": set(JobPhase),
    "cause": set(get_args(Kind)),
    "condition": set(ConditionType),
}


def values(shown: JobStatus, name: str) -> dict[str, float]:
    """The values of one metric by its label."""
    samples = [s for metric in job_metrics(shown) for s in metric.samples if s.name == name]
    return {next(iter(s.labels.values()), ""): s.value for s in samples}


SECONDS = {"productive": 12.0, "wasted_progress": 4.0}


def test_the_phase_and_the_time_are_told() -> None:
    shown = status(JobPhase.FORMING).model_copy(
        update={"goodput": GoodputStatus(wall_s=16.0, share=0.75, seconds=SECONDS)}
    )
    phases = values(shown, "dlrover_phase")
    assert phases.keys() == set(JobPhase)
    assert [phase for phase, value in phases.items() if value] == ["Forming"]
    assert values(shown, "dlrover_goodput_ratio") == {"": 0.75}
    told = values(shown, "dlrover_time_seconds")
    assert {bucket: seconds for bucket, seconds in told.items() if seconds} == SECONDS
    assert told.keys() == set(TimeBucket)
    assert values(shown.model_copy(update={"goodput": None}), "dlrover_goodput_ratio") == {}


def test_a_job_that_never_stored_a_checkpoint_has_an_age_too_if_it_takes_any() -> None:
    """The alert about old checkpoints never fired for it."""
    name, at = "dlrover_checkpoint_unstored_seconds", 20_000.0
    goodput = GoodputStatus(wall_s=1.0, seconds={"suspended": 3000.0})
    bare = status(JobPhase.RUNNING).model_copy(
        update={"started_at": 5000.0, "published_at": at, "goodput": goodput}
        | {"last_checkpoint": None, "memory_checkpoints": [], "checkpoint_failures": 0}
    )
    assert values(bare, name) == {}
    last = LastCheckpoint(step=3, where="memory", at=at)
    stored = last.model_copy(update={"stored_step": 1, "stored_at": at - 60})
    for changes, age in (
        ({"last_checkpoint": last}, 12_000.0),
        ({"last_checkpoint": last, "goodput": None}, 15_000.0),
        ({"checkpoint_failures": 1}, 12_000.0),
        ({"last_checkpoint": stored}, 60.0),
    ):
        assert values(bare.model_copy(update=changes), name) == {"": age}


def test_time_without_training_is_no_time_without_a_checkpoint() -> None:
    """The alert fired for jobs that had waited for nodes, or had been suspended, for hours."""
    name, at = "dlrover_checkpoint_unstored_seconds", 20_000.0
    waited = {"infrastructure_initialization": 10_800.0, "suspended": 500.0}
    last = LastCheckpoint(step=3, where="memory", at=at)

    def event(number: int, reason: EventReason, when: float) -> JobEvent:
        return JobEvent(id=number, at=when, reason=reason, message="")

    rested = [
        event(1, EventReason.SUSPENDED, 6000.0),
        event(2, EventReason.ROUND_FORMED, 6500.0),
        event(3, EventReason.SUSPENDED, 9000.0),
        event(4, EventReason.RESUMED, 19_000.0),
        event(5, EventReason.ROUND_FORMED, 19_900.0),
    ]
    begun = status(JobPhase.RUNNING).model_copy(
        update={"started_at": 5000.0, "published_at": at, "last_checkpoint": last}
        | {"goodput": GoodputStatus(wall_s=15_000.0, seconds=waited), "events": rested}
    )
    for stored_at, age in (
        (None, 3700.0),
        (4000.0, 3700.0),  # of an earlier run
        (6200.0, 20_000 - 6200 - 300 - 10_900.0),
        (8900.0, 200.0),
        (10_000.0, 100.0),
        (19_950.0, 50.0),
    ):
        kept = last.model_copy(update={"stored_step": 1, "stored_at": stored_at})
        assert values(begun.model_copy(update={"last_checkpoint": kept}), name) == {"": age}
    resting = begun.model_copy(update={"events": rested[:3]})
    kept = last.model_copy(update={"stored_step": 1, "stored_at": 8900.0})
    assert values(resting.model_copy(update={"last_checkpoint": kept}), name) == {"": 100.0}


def test_the_loads_of_servers_are_summed_up() -> None:
    other = LOAD.model_copy(update={"id": "ps1", "memory_bytes": 1})
    tables = TablesStatus(epoch=1, tables=["t"], buckets=4, lost_buckets=1, servers=[LOAD, other])
    shown = status(JobPhase.RUNNING).model_copy(update={"tables": tables})
    told = {name: values(shown, f"dlrover_ps_{name}")[""] for name in (
        "servers", "lost_buckets", "moving_buckets", "rows", "memory_bytes_max",
        "pulled_rows_per_second", "pushed_rows_per_second", "waiting_pushes",
    )}  # fmt: skip
    assert list(told.values()) == [2, 1, 4, 24_690, 3 << 20, 1400.8, 1301.2, 18]
    assert values(status(JobPhase.RUNNING), "dlrover_ps_servers") == {}
    name = "dlrover_ps_stale_pushes_per_second"
    assert values(shown, name) == {}
    stale = [one.model_copy(update={"stale_pushes_per_s": [2.0, 1.5]}) for one in (LOAD, other)]
    more = tables.model_copy(update={"servers": [*stale, LOAD]})
    assert values(shown.model_copy(update={"tables": more}), name) == {"0": 4.0, "1": 3.0}


def test_the_use_of_gpus_is_that_of_all_live_nodes() -> None:
    shown = status(JobPhase.RUNNING)
    node = shown.nodes[0].model_copy(update={"phase": NodePhase.LIVE})
    one = {"gpus": 3, "gpu_busy": 0.8, "gpu_least_busy": 0.7}
    memory = {"gpu_memory_bytes": 30, "gpu_memory_limit": 40}
    two = {"gpus": 1, "gpu_busy": 0.4, "gpu_least_busy": 0.4, "gpu_memory_limit": 80}
    gone = node.model_copy(update=two | {"gpu_least_busy": 0.0, "phase": NodePhase.GONE})
    nodes = [node.model_copy(update=one | memory), node.model_copy(update=two), node, gone]
    told = shown.model_copy(update={"nodes": nodes})
    assert values(told, "dlrover_gpu_busy_ratio") == {"": pytest.approx(0.7)}
    assert values(told, "dlrover_gpu_least_busy_ratio") == {"": 0.4}
    assert values(told, "dlrover_gpu_memory_ratio") == {"": 0.25}
    assert values(shown, "dlrover_gpu_busy_ratio") == {}
    assert values(shown, "dlrover_gpu_memory_ratio") == {}


@given(words=st.text(max_size=30), phase=st.sampled_from(JobPhase))
def test_no_words_of_a_job_become_a_label(words: str, phase: JobPhase) -> None:
    told = hostile(words).status
    assert told is not None
    for metric in job_metrics(told.model_copy(update={"phase": phase})):
        for sample in metric.samples:
            for label, value in sample.labels.items():
                assert value in LABELS[label], f"{sample.name} has a series for {value!r}"


@given(st.integers(10**9, 3_500_000_000))
def test_the_end_of_a_certificate_is_read(at: int) -> None:
    """From 2050 on, a certificate has its times in another form."""
    begun = datetime.fromtimestamp(at, UTC)
    issued = credentials.issue(begun.timestamp())
    ends = (begun + timedelta(days=3650)).timestamp()
    assert certificate_end(issued.cert.decode()) == ends
    assert certificate_end("a chain\n" + issued.cert.decode() + issued.ca.decode()) == ends


@given(st.text(max_size=200) | st.just("-----BEGIN CERTIFICATE-----\nAAAA\n"))
def test_what_is_no_certificate_has_no_end(text: str) -> None:
    assert certificate_end(text) is None
