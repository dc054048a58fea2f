"""Conformance runs for exact data: a training with faults must be as one without faults.

A program under test is called ``PROGRAM FOLDER EPOCHS [FIRST_ROUND]``. It trains the samples of
``exact_task.Points`` in global batches of 10, so that an epoch has 41 steps. It reads them with at
least one process of a ``DataLoader``. Its ``exact_task.Record`` keeps these documents:

- FOLDER/ROUND-RANK.txt has a line ``STEP EPOCH SAMPLE …`` for each step that a rank has computed,
  written before the step is saved. FIRST_ROUND is added to the number of the round, where several
  jobs follow each other.
- FOLDER/weights.json has the weights at the end, as one flat list.

It is slow beyond the step in FOLDER/gate, so that faults hit where the test means them to.
"""

import json
import os
import re
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

SAMPLES, STEPS = 407, 41
"""Samples of the dataset, and steps of an epoch."""


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


def check(folder: Path, reference: Path, *, epochs: int, tolerance: float) -> None:
    """Compare a run with one that was not disturbed: the samples of each step, and the weights.

    Args:
        folder: that of the run.
        reference: that of the run without faults.
        epochs: the epochs that both have trained.
        tolerance: greatest relative difference of two weights; a tenth of it is the absolute one.
    """
    steps, expected = surviving(folder), surviving(reference)
    assert sorted(steps) == sorted(expected) == list(range(1, epochs * STEPS + 1))
    for step, samples in steps.items():
        assert sorted(samples) == sorted(expected[step]), f"step {step}"
    for epoch in range(epochs):
        whole = [s for step in range(STEPS) for s in steps[epoch * STEPS + step + 1]]
        assert sorted(whole) == list(range(SAMPLES)), f"epoch {epoch}"
    ours, theirs = (json.loads((f / "weights.json").read_text()) for f in (folder, reference))
    assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance / 10)


def run_alone(program: Path, folder: Path, *, epochs: int) -> None:
    """Run a program in one process without an agent, where nothing disturbs it."""
    command = [sys.executable, str(program), str(folder), str(epochs)]
    subprocess.run(command, check=True, timeout=150, capture_output=True)


def provide_task(place: Place) -> None:
    """Put the module of the task beside the program of a job."""
    place.script(PROGRAMS / "exact_task.py", name="exact_task.py")


def at_step(run: Job, step: int) -> None:
    """Let the workers train up to a step, from which on they are slow."""
    permit(run.place.folder, step)
    run.until(
        lambda s: s.progress is not None and s.progress.step >= step,
        f"step {step}",
    )


def run_with_faults(place: Place, program: Path, *, epochs: int) -> None:
    """Run a program as a job whose epochs are disturbed by kills, resizes and a drain.

    The world is resized 1→3→2 within the first epoch. A worker, a process of a data loader and a
    node are killed, and a node is drained in the second epoch.

    Args:
        place: where the job runs; the program gets its folder.
        program: the program under test.
        epochs: how many epochs it trains, at least 2.
    """
    permit(place.folder, 0)
    provide_task(place)
    with job(
        place,
        script=program,
        args=(str(place.folder), str(epochs)),
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


def run_with_a_torn_checkpoint(place: Place, program: Path, *, epochs: int) -> None:
    """Run a program as a job whose nodes are lost at once, with a torn checkpoint in its storage.

    The world is resized 2→1→2 within the first epoch. In the second one, all nodes are lost. The
    job must continue from the newest checkpoint that is whole. One node may do so first: the nodes
    that replace the lost ones are ready at different times.

    Args:
        place: where the job runs; the program gets its folder.
        program: the program under test.
        epochs: how many epochs it trains, at least 2.
    """
    permit(place.folder, 0)
    provide_task(place)
    only_on_request = {"dir": str(place.folder / "store"), "persistEvery": "1h"}
    with job(
        place,
        script=program,
        args=(str(place.folder), str(epochs)),
        hosts=4,  # two are lost
        replicas=2,
        minReplicas=1,
        maxReplicas=2,
        restartCount=10,
        spec={"checkpoint": only_on_request},
        settings=CALM,
    ) as run:
        last = run.running(2)
        for step, world in ((4, 1), (8, 2)):
            at_step(run, step)
            run.cli("job", "scale", str(world))
            last = run.running(world, round_after=last.round)
        at_step(run, STEPS + 3)
        whole, _ = stored(run)
        run.until(
            lambda s: s.last_checkpoint is not None and s.last_checkpoint.step > whole,
            f"a checkpoint that is newer than that of step {whole}",
        )
        newer, folder = stored(run)
        assert newer > whole
        # Each world reads all of this file. What belongs to rank 1 alone, one node does not read.
        torn = folder / "__0_0.distcp"
        os.truncate(torn, torn.stat().st_size // 2)
        for verb in ("freeze", "kill"):  # none may go on alone from its memory in between
            for node in members(last):
                run.hurt(node.id, verb)
        run.running(2, round_after=last.round)
        permit(place.folder, OPEN)
        assert run.wait(within_s=250) == 0, "".join(run.output)
    assert first_step(place.folder, round_after=last.round) == whole + 1


def stored(run: Job) -> tuple[int, Path]:
    """Have the newest checkpoint stored, and return its step and its folder."""
    said = run.cli("job", "checkpoint", run.name)
    found = re.fullmatch(r"job: the checkpoint of step (\d+) is in (\S+)\n", said)
    assert found is not None, said
    return int(found[1]), Path(found[2])


def first_step(folder: Path, *, round_after: int) -> int:
    """Return the first step that was trained in the rounds after a round."""
    found = {int(path.stem.split("-")[0]): path for path in folder.glob("*-0.txt")}
    steps = {number: path.read_text().split() for number, path in found.items()}
    first = min(number for number, words in steps.items() if number > round_after and words)
    return int(steps[first][0])
