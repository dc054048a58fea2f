"""A job chooses its size by itself: real processes, whose speed is measured."""

from dlrover_py.protocol.status import JobStatus
from tests.process.harness import Place, job
from tests.programs import PROGRAMS

SCRIPT = PROGRAMS / "report_at_a_speed.py"
SETTINGS = {"measure_s": "0.5", "settle_s": "0.1"}


def reason(status: JobStatus) -> str:
    """Return why the job has its size."""
    found = [c.message for c in status.conditions if c.type == "ScalingActive"]
    return found[0] if found else ""


def test_a_job_grows_on_measured_gain_once_there_is_room(place: Place) -> None:
    """The speed of the script is that of its world, and a second host comes while it trains."""
    with job(
        place,
        script=SCRIPT,
        args=(str(place.folder / "reached"),),
        hosts=1,
        settings=SETTINGS,
        replicas=1,
        minReplicas=1,
        maxReplicas=2,
        autoscale={"mode": "auto", "scaleUpDelaySeconds": 1},
    ) as run:
        alone = "not scaled: 1 more node would add 87 %, and there is no room for them"
        status = run.until(lambda s: reason(s) == alone, "a reason not to grow")
        assert status.target_replicas == 1
        run.api("POST", "/v1/hosts?count=1")
        status = run.running(2)
        assert status.target_replicas == 2
        assert run.snapshot().job.worker.replicas == 1, "replicas is the user's"
        assert "ScaledUp" in run.event_reasons()
        largest = "not scaled: 2 nodes are the largest allowed size"
        run.until(lambda s: reason(s) == largest, "the speed of two nodes")
        why = run.cli("job", "why")
        assert f"size: {largest}" in why
        assert "1→2: +87 % for" in why
