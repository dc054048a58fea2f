"""Each sample is trained once, whatever happens, and the result is that of a run without faults."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from tests.flash import OPEN, permit
from tests.process.harness import CALM, Job, Place, job, members
from tests.programs import PROGRAMS

SCRIPT = PROGRAMS / "train_on_exact_data.py"
SAMPLES, STEPS = 407, 41
"""Samples and steps of an epoch."""
EPOCHS = 2


def surviving(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step in the history that the last checkpoint has, by step.

    A step that was trained again counts as its last round has trained it.
    """
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for path in folder.glob("*-*.txt"):
        number = int(path.stem.split("-")[0])
        for line in path.read_text().splitlines():
            step, _, *samples = map(int, line.split())
            found[step].setdefault(number, []).extend(samples)
    return {step: rounds[max(rounds)] for step, rounds in found.items()}


def check(folder: Path, reference: Path) -> None:
    """Compare a run with one that was not disturbed: the samples of each step, and the weights."""
    steps, expected = surviving(folder), surviving(reference)
    assert sorted(steps) == sorted(expected) == list(range(1, EPOCHS * STEPS + 1))
    for step, samples in steps.items():
        assert sorted(samples) == sorted(expected[step]), f"step {step}"
    for epoch in range(EPOCHS):
        whole = [s for step in range(STEPS) for s in steps[epoch * STEPS + step + 1]]
        assert sorted(whole) == list(range(SAMPLES)), f"epoch {epoch}"
    ours, theirs = (json.loads((f / "weights.json").read_text()) for f in (folder, reference))
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-13)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process without an agent, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, str(SCRIPT), str(folder), str(EPOCHS)]
    subprocess.run(command, check=True, timeout=150, capture_output=True)
    return folder


def at_step(run: Job, step: int) -> None:
    """Let the workers train up to a step, from which on they are slow."""
    permit(run.place.folder, step)
    run.until(
        lambda s: s.progress is not None and s.progress.step >= step,
        f"step {step}",
    )


def test_kills_resizes_and_a_drain_within_an_epoch(place: Place, reference: Path) -> None:
    permit(place.folder, 0)
    with job(
        place,
        script=SCRIPT,
        args=(str(place.folder), str(EPOCHS)),
        hosts=3,
        replicas=1,
        minReplicas=1,
        maxReplicas=3,
        restartCount=10,
        settings=CALM,
    ) as run:
        at_step(run, 4)
        first = run.running(1)
        run.cli("job", "scale", "3")
        three = run.running(3, round_after=first.round)
        at_step(run, 10)
        os.kill(members(three)[1].pids[0], signal.SIGKILL)
        again = run.running(3, round_after=three.round)
        at_step(run, 16)
        loaders = psutil.Process(members(again)[2].pids[0]).children()
        assert loaders, "the workers of a DataLoader"
        loaders[0].kill()
        third = run.running(3, round_after=again.round)
        at_step(run, 22)
        run.cli("job", "scale", "2")
        two = run.running(2, round_after=third.round)
        at_step(run, 28)
        run.hurt(members(two)[0].id, "kill")
        lost = run.running(2, round_after=two.round)
        at_step(run, STEPS + 3)
        run.cli("node", "drain", members(lost)[1].id)
        permit(place.folder, OPEN)
        assert run.wait(within_s=250) == 0, "".join(run.output)
    check(place.folder, reference)


def test_another_world_continues_from_a_folder(place: Place, reference: Path) -> None:
    """The first job is asked to end. Nothing of it is left but its folder of checkpoints."""
    spec = {"checkpoint": {"dir": str(place.folder / "store")}}
    permit(place.folder, 0)
    for first_round, world in ((0, 2), (100, 1)):
        with job(
            place,
            script=SCRIPT,
            args=(str(place.folder), str(EPOCHS), str(first_round)),
            name=f"job-{world}",
            replicas=world,
            spec=spec,
            settings=CALM,
        ) as run:
            if world > 1:
                at_step(run, 15)
                run.stop()
            else:
                permit(place.folder, OPEN)
                assert run.wait() == 0, "".join(run.output)
    check(place.folder, reference)
