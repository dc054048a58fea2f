"""A rank that hangs is found by its collectives and its stack, told, and restarted if allowed."""

import json
import os
import signal
from pathlib import Path

from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobStatus
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS

SPEC = {"diagnosis": {"hang": "act", "hangSeconds": 2, "firstStepSeconds": 300}}
HOW, GUILTY, STEP = "lock", "1", "100"


def trains(status: JobStatus, after_round: int) -> bool:
    return (
        status.phase == "Running"
        and status.round > after_round
        and status.progress is not None
        and status.progress.step > 5
    )


def hangs(status: JobStatus) -> list[str]:
    return [event.message for event in status.events if event.reason == EventReason.HANG]


def test_a_hang_is_told_and_then_restarted(place: Place) -> None:
    with job(
        place,
        script=PROGRAMS / "hang.py",
        args=(HOW, GUILTY, STEP),
        replicas=2,
        spec=SPEC,
        settings=CALM,
    ) as run:
        status = run.until(lambda s: trains(s, 1), "the round after the hang")
        (told,) = hangs(status)
        assert told.startswith("rank 1 (node n1) has not entered the all_reduce after step ")
        assert "1 other waits in it; it is in wait_for_own_lock (train.py:" in told
        assert told.endswith(": code")
        assert "has not entered the all_reduce" in run.cli("job", "why", "job")

        # A healthy job is looked at on request, and goes on.
        shown = run.cli("job", "stacks", "job")
        assert "(train.py:" in shown
        assert "verdict" not in shown

        # A process that cannot answer is told by the kernel.
        (frozen,) = next(n.pids for n in run.status().nodes if n.id == "n0")
        os.kill(frozen, signal.SIGSTOP)
        status = run.until(lambda s: trains(s, 2), "the round after the frozen process")
        assert "rank 0 (node n0) is frozen" in hangs(status)[-1]

        bundles = json.loads(run.cli("job", "evidence", "job", "--json"))
        kinds = [b["verdict"] and b["verdict"]["kind"] for b in bundles]
        assert kinds == ["not-entered", None, "frozen"]
        folder = Path(bundles[0]["folder"])
        assert {path.name for path in folder.iterdir()} == {"manifest.json", "n0.json", "n1.json"}
        (guilty,) = json.loads((folder / "n1.json").read_text())["workers"]
        assert guilty["stack"][0]["function"] == "wait_for_own_lock"
        assert not any(one.get("open") for one in guilty["collectives"])
