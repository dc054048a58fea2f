"""The class of a failure, from a worker's end to what users read."""

from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS


def test_the_first_cause_is_classified_and_not_the_lost_connection(place: Place) -> None:
    script = PROGRAMS / "fail_on_a_full_disk.py"
    with job(place, script=script, replicas=2, settings=CALM) as run:
        status = run.until(lambda s: s.round == 2 and s.phase == "Running", "the second round")
        assert status.failures == {"storage": 1}
        line = "storage (sure): Check that storage is mounted, writable and not full"
        assert line in run.cli("job", "why", "job", "--round", "2")
        shown = " ".join(run.cli("job", "describe", "job").split())
        assert "cause storage (sure): OSError: [Errno 28] No space left on device" in shown
