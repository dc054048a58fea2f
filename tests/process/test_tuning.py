"""Micro-batch and loader workers are changed while a job trains; its result stays the same."""

import os
import re
import signal
from pathlib import Path

import pytest

from dlrover_py.protocol.status import JobEvent, JobStatus
from dlrover_py.trainer.data.verify import verify
from tests import exact_runs
from tests.exact_runs import EXACT, at_step
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Job, Place, job, members
from tests.programs import PROGRAMS

SCRIPT = PROGRAMS / "train_while_tuned.py"
EPOCHS = 2

Step = tuple[int, tuple[int, ...]]
"""The number of loader workers in a step, and the samples of each micro-batch."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    exact_runs.run_alone(SCRIPT, folder, epochs=EPOCHS)
    return folder


def with_reason(status: JobStatus, reason: str) -> list[JobEvent]:
    return [event for event in status.events if event.reason == reason]


def after(run: Job, reason: str, count: int) -> JobEvent:
    """Wait until there are so many events with a reason; return the newest of them."""
    status = run.until(lambda s: len(with_reason(s, reason)) >= count, f"{count} times {reason}")
    return with_reason(status, reason)[-1]


def steps_of(folder: Path, rank: int) -> dict[int, Step]:
    """Return how a rank has divided its steps; a step that was repeated counts as the last time."""
    found: dict[int, Step] = {}
    for path in sorted(folder.glob(f"*-{rank}.sizes")):
        for line in path.read_text().splitlines():
            step, workers, *sizes = map(int, line.split())
            found[step] = workers, tuple(sizes)
    return found


def step_in(event: JobEvent) -> int:
    """Return the step in ``from step N on``."""
    found = re.search(r"from step (\d+) on", event.message)
    assert found, event
    return int(found[1])


def test_settings_change_at_one_step_and_outlive_master_and_workers(
    place: Place, reference: Path
) -> None:
    exact_runs.provide_task(place)
    permit(place.folder, 0)
    with job(
        place,
        script=SCRIPT,
        args=(str(place.folder), str(EPOCHS)),
        replicas=2,
        settings=CALM,
    ) as run:
        run.running(2)
        at_step(run, 3)
        run.cli("job", "tune", "--micro-batch", "3", "--loader-workers", "0")
        first = after(run, "Tuned", 1)
        os.kill(run.snapshot().master_pid, signal.SIGKILL)
        run.until(lambda s: s.term == 2, "the next master")
        run.cli("job", "tune", "--loader-workers", "1000")
        refused = after(run, "TuningRefused", 1)
        os.kill(members(run.running(2))[1].pids[0], signal.SIGKILL)
        run.running(2, round_after=1)
        run.cli("job", "tune", "--loader-workers", "1", "--micro-batch", "2")
        second = after(run, "Tuned", 2)
        permit(place.folder, OPEN)
        assert run.wait() == 0, "".join(run.output)
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=EXACT)
    steps = steps_of(place.folder, 0)
    at, again = (step_in(event) for event in (first, second))
    assert steps[at - 1] == (1, (1, 1, 1, 1, 1))
    assert steps[at] == (0, (3, 2))
    assert steps[again - 1][1] == (3, 2), "a new round begins with the settings of the last one"
    assert steps[again][0] == 1
    assert max(steps[again][1]) == 2
    others = steps_of(place.folder, 1)
    assert {n: (w, len(sizes)) for n, (w, sizes) in steps.items()} == {
        n: (w, len(sizes)) for n, (w, sizes) in others.items()
    }, "all ranks change at the same step, and have equally many micro-batches"
    assert "1000 loader workers: expected at most" in refused.message


def test_the_auto_tuner_grows_the_micro_batch_and_backs_off_without_a_charge(place: Place) -> None:
    """The script gets no memory for more than one sample at once, and may not be restarted."""
    exact_runs.provide_task(place)
    with job(
        place,
        script=SCRIPT,
        args=(str(place.folder), "1000", "1"),
        replicas=1,
        restartCount=0,
        spec={"tuning": {"auto": True, "loaderWorkers": 1}},
        settings=CALM,
    ) as run:
        status = run.until(
            lambda s: [e for e in with_reason(s, "Tuned") if e.round and e.round > 1],
            "the auto-tuner has backed off",
        )
        at = step_in(with_reason(status, "Tuned")[-1])
        run.until(lambda s: s.progress and s.progress.step > at + 1, "further steps")
        run.stop()
    requested = [e.message for e in with_reason(status, "TuningRequested")]
    assert "(auto-tuner: micro-batch 1 needs" in requested[-2]
    assert requested[-1] == (
        "micro-batch 1, 1 loader worker from the next step on "
        "(auto-tuner: memory ran out with micro-batch 2)"
    )
    assert verify(place.folder).exact
