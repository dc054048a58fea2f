"""The class of a failure, and its evidence, from a worker's end to what users read."""

import json
from pathlib import Path
from typing import Any

from dlrover_py.protocol.diagnosis import NodeSnapshot
from tests.process.harness import CALM, Job, Place, job
from tests.programs import PROGRAMS


def bundles(run: Job) -> list[Any]:
    found: list[Any] = json.loads(run.cli("job", "evidence", "job", "--json"))
    return found


def test_of_a_node_that_is_killed_with_its_agent_the_last_reports_are_kept(place: Place) -> None:
    with job(place, replicas=2, hosts=3, settings=CALM) as run:
        lost = next(node.id for node in run.running(2).nodes)
        run.hurt(lost, "kill")
        run.running(2, round_after=1)
        run.until(lambda _: bundles(run), "the bundle")
        (kept,) = bundles(run)
        assert (kept["kind"], kept["missing"]) == ("lost", [lost])
        shown = run.cli("job", "why", "job", "--round", "2")
        assert "before, its workers running in round 1" in shown
        assert f"evidence: {kept['folder']}" in shown


def test_the_first_cause_is_classified_and_not_the_lost_connection(place: Place) -> None:
    script = PROGRAMS / "fail_on_a_full_disk.py"
    with job(place, script=script, replicas=2, settings=CALM) as run:
        status = run.until(lambda s: s.round == 2 and s.phase == "Running", "the second round")
        assert status.failures == {"storage": 1}
        line = "storage (sure): Check that storage is mounted, writable and not full"
        assert line in run.cli("job", "why", "job", "--round", "2")
        shown = " ".join(run.cli("job", "describe", "job").split())
        assert "cause storage (sure): OSError: [Errno 28] No space left on device" in shown

        # The bundle has what was known of both nodes, and was no reason to wait.
        run.until(lambda _: bundles(run), "the bundle")
        (kept,) = bundles(run)
        assert kept["kind"] == "failure"
        assert kept["failure"]["worker"]["cause"]["failure_class"] == "storage"
        assert kept["nodes"] == ["n0", "n1"]
        failed = kept["failure"]["node"]
        text = (Path(kept["folder"]) / f"{failed}.json").read_text()
        (worker,) = NodeSnapshot.model_validate_json(text).workers
        assert worker.failure is not None
        assert "No space left on device" in worker.failure.traceback
        assert any("No space left on device" in line for line in worker.output)
        assert ", failure: " in run.cli("job", "evidence", "job")
