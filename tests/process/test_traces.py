"""The trace of a real recovery, as a receiver of OpenTelemetry gets it."""

import os
import signal

import pytest

from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobEvent, JobStatus
from tests.otlp import receiver, seconds_of
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS


def resumed(status: JobStatus, round_: int) -> JobEvent | None:
    """The event of the first step of a round."""
    events = (e for e in status.events if e.reason == EventReason.TRAINING_RESUMED)
    return next((event for event in events if event.round == round_), None)


def test_a_killed_worker_is_traced_from_its_death_to_the_next_step(place: Place) -> None:
    with receiver() as found:
        place.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = found.url
        place.env["OTEL_RESOURCE_ATTRIBUTES"] = "deployment.environment=test"
        with job(place, script=PROGRAMS / "save_each_step.py", replicas=2, settings=CALM) as run:
            status = run.until(lambda s: resumed(s, 1) is not None, "the first step")
            (pid,) = next(node.pids for node in status.nodes if node.id == "n1")
            os.kill(pid, signal.SIGKILL)
            trace = found.trace(120)
            event = resumed(run.until(lambda s: resumed(s, 2) is not None, "a step"), 2)
        assert event is not None
        assert event.took_s is not None
        assert trace.resource["service.name"] == "dlrover-master"
        assert trace.resource["deployment.environment"] == "test"
        assert trace.root.name == "recovery"
        assert [span.name for span in trace.phases] == [
            "detect", "decide", "assign", "start", "prepare", "restore", "first step",
        ]  # fmt: skip
        assert seconds_of(trace.root) == pytest.approx(event.took_s, abs=1e-4)
        assert sum(trace.seconds.values()) == pytest.approx(event.took_s, abs=1e-4)
        assert trace.root.end_time_unix_nano / 1e9 == pytest.approx(event.at, abs=2e-3)
        assert (
            trace.attributes
            | {
                "dlrover.job": "job",
                "dlrover.round": 2,
                "dlrover.kind": "failure",
                "dlrover.nodes": 2,
                "dlrover.workers": 2,
                "dlrover.cause": "WorkerFailed",
                "dlrover.cause.node": "n1",
                "dlrover.cause.class": "killed",
            }
            == trace.attributes
        )
        assert found.requests.empty(), "one trace for each recovery"
