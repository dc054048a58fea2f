"""Conformance of exact data: a training with faults must be as one without faults.

A program under test is called ``PROGRAM FOLDER EPOCHS``. It trains the samples of
``exact_task.Points`` in global batches of 10, so that an epoch has 41 steps. It reads them with at
least one process of a ``DataLoader``. Its ``exact_task.Record`` keeps these documents:

- FOLDER/ROUND-RANK.txt has a line ``STEP EPOCH SAMPLE …`` for each step that a rank has computed,
  written before the step is saved.
- FOLDER/weights.json has the weights at the end, as one flat list.
- FOLDER/ledger is what ``dlrover data verify`` reads.

It is slow beyond the step in FOLDER/gate, so that faults hit where the test means them to.

:class:`Trial` does to a job all that :data:`CASES` has, and :func:`check` judges the result.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.trainer.data.verify import verify
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Job, Place, job, members
from tests.programs import LATE_TORCH, PROGRAMS

SAMPLES, STEPS = 407, 41
"""Samples of the dataset, and steps of an epoch."""
EPOCHS = 2
"""Epochs of a trial."""
PLAIN = "train_on_exact_data.py"
"""The program that trains without an integration."""
EXACT = 1e-12
"""Tolerance of weights of 64 bits, whose additions have another order."""
ROUNDED = 1e-4
"""Tolerance of weights of 32 bits, whose additions have another order. A step with another learning
rate, or without its momentum, makes a greater difference."""


def rounds_of(folder: Path) -> dict[int, dict[int, list[list[int]]]]:
    """Return the lines of all files: by round, by rank. A round without lines is left out."""
    found: dict[int, dict[int, list[list[int]]]] = defaultdict(dict)
    for path in folder.glob("*-*.txt"):
        number, rank = map(int, path.stem.split("-"))
        if rows := [[int(word) for word in row.split()] for row in path.read_text().splitlines()]:
            found[number][rank] = rows
    return dict(sorted(found.items()))


def surviving(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step in the history that the last checkpoint has, by step.

    A step that was trained again counts as its last round has trained it.
    """
    found: dict[int, list[int]] = {}
    for ranks in rounds_of(folder).values():
        trained: dict[int, list[int]] = defaultdict(list)
        for step, _, *samples in (row for rows in ranks.values() for row in rows):
            trained[step] += samples
        found |= trained
    return found


def check(folder: Path, reference: Path, *, epochs: int, tolerance: float) -> None:
    """Compare a run with one that was not disturbed: the samples of each step, and the weights.

    The ledger must say the same about the samples.

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
    report = verify(folder)
    assert (report.exact, report.steps, report.problems) == (True, epochs * STEPS, [])


def check_planned_changes(folder: Path, faults: Iterable[int]) -> None:
    """Check that no step was repeated where the world changed by plan.

    Args:
        folder: that of the run.
        faults: the rounds that have begun after a fault.
    """
    after_fault = set(faults)
    for (last, before), (number, now) in pairwise(rounds_of(folder).items()):
        if not after_fault & set(range(last + 1, number + 1)):
            ended = {rows[-1][0] for rows in before.values()}
            began = {rows[0][0] for rows in now.values()}
            assert began == {max(ended) + 1}, f"rounds {last} and {number}: {ended}, {began}"


def run_alone(program: Path, folder: Path, *, epochs: int) -> None:
    """Run a program in one process without an agent, where nothing disturbs it."""
    command = [sys.executable, str(program), str(folder), str(epochs)]
    env = os.environ | LATE_TORCH
    subprocess.run(command, check=True, timeout=150, capture_output=True, env=env)


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


class Trial:
    """A job whose training is disturbed, by one case after the other."""

    def __init__(self, run: Job) -> None:
        """Wait for the first round.

        Args:
            run: the job, which begins with one node.
        """
        self.run, self.folder = run, run.place.folder
        self.last = run.running(1)
        self.faults: set[int] = set()
        """The rounds that have begun after a fault."""
        self.stored_by_two = 0
        """The step of a checkpoint that two nodes have stored."""

    # --- Cases ---

    def resize_1_3_2(self) -> None:
        """Two nodes join. One is drained (SIGTERM) before the three save their first step."""
        at_step(self.run, 3)
        self.run.cli("job", "scale", "3")
        three = self.last = self.run.running(3, round_after=self.last.round)
        self._first_step()
        self.run.cli("node", "drain", members(three)[1].id)  # no host is left for another one
        self.last = self.run.running(2, round_after=three.round)
        self.run.cli("job", "scale", "2")

    def lose_node(self) -> None:
        """SIGKILL ends an agent and its worker. The other node goes on from the memory of both.

        The checkpoint of the two nodes is stored before.
        """
        self._train(3)
        self.stored_by_two, _ = stored(self.run)
        self._train(2)
        self.run.hurt(members(self.last)[0].id, "kill")
        self._after_fault(1)

    def tear_checkpoint(self) -> None:
        """All nodes are lost, and the newest stored checkpoint is torn: that before it is loaded.

        This is the one that two nodes have stored. One node loads it.
        """
        self._train(2)
        newer, folder = stored(self.run)
        assert newer > self.stored_by_two
        torn = folder / "__0_0.distcp"
        os.truncate(torn, torn.stat().st_size // 2)
        self.run.hurt(members(self.last)[0].id, "kill")
        self.run.cli("node", "add")
        self._after_fault(1)
        self._first_step()
        assert rounds_of(self.folder)[self.last.round][0][0][0] == self.stored_by_two + 1

    def join(self) -> None:
        """A node joins the only one before that has saved its first step."""
        self._first_step()
        self.run.cli("node", "add")
        self.last = self.run.running(2, round_after=self.last.round)

    def kill_worker(self) -> None:
        """SIGKILL ends a worker. Both start again from the memory of their nodes."""
        at_step(self.run, STEPS + 3)
        os.kill(members(self.last)[1].pids[0], signal.SIGKILL)
        self._after_fault(2)

    def kill_prefetching_worker(self) -> None:
        """SIGKILL ends a process of a data loader, which has read batches ahead."""
        self._train(3)
        loaders = psutil.Process(members(self.last)[1].pids[0]).children()
        assert loaders, "the workers of a DataLoader"
        loaders[0].kill()
        self._after_fault(2)

    # --- The end ---

    def finish(self) -> None:
        """Let the job end, and check what the programs have written about the rounds."""
        permit(self.folder, OPEN)
        assert self.run.wait(within_s=250) == 0, "".join(self.run.output)
        stored_steps = [m.step for m in CheckpointDirectory(self.folder / "store").checkpoints()]
        assert max(stored_steps) == EPOCHS * STEPS, "the end of the training is stored"
        rounds = rounds_of(self.folder)
        worlds = [len(ranks) for ranks in rounds.values() if ranks[0][0][0] <= STEPS]
        changes = [a for a, b in pairwise([*worlds, 0]) if a != b]
        assert (changes[0], changes[-4:]) == (1, [3, 2, 1, 2]), f"in the first epoch: {changes}"
        check_planned_changes(self.folder, self.faults)

    # --- Steps of the cases ---

    def _first_step(self) -> int:
        """Wait for the first step of the round, and return the newest one.

        Workers that may not train on pause after a step, before they save it.
        """
        number = self.last.round
        status = self.run.until(
            lambda s: s.round == number and s.progress is not None, f"a step of round {number}"
        )
        assert status.progress is not None
        return status.progress.step

    def _train(self, steps: int) -> None:
        """Train some steps of the round."""
        at_step(self.run, self._first_step() + steps)

    def _after_fault(self, nodes: int) -> None:
        """Wait until the nodes run that are left after a fault."""
        self.faults.add(self.last.round + 1)
        self.last = self.run.running(nodes, round_after=self.last.round)


CASES = {
    "resize 1→3→2 with SIGTERM drain": Trial.resize_1_3_2,
    "resize 2→1 with a lost node": Trial.lose_node,
    "torn checkpoint": Trial.tear_checkpoint,
    "resize 1→2": Trial.join,
    "kill -9": Trial.kill_worker,
    "killed prefetching worker": Trial.kill_prefetching_worker,
}
"""What may happen in a trial, in this order: all resizes in the first epoch, the rest after it."""


def run_trial(place: Place, program: Path, *, without: Iterable[str] = ()) -> None:
    """Run a program as a job in which all cases happen, and check what its rounds have done.

    Args:
        place: where the job runs; the program gets its folder.
        program: the program under test.
        without: the cases that are left out.
    """
    permit(place.folder, 0)
    provide_task(place)
    only_on_request = {"dir": str(place.folder / "store"), "persistEvery": "1h"}
    with job(
        place,
        script=program,
        args=(str(place.folder), str(EPOCHS)),
        hosts=3,  # the cases add others when the job may grow again
        replicas=1,
        minReplicas=1,
        maxReplicas=3,
        restartCount=10,
        spec={"checkpoint": only_on_request},
        settings=CALM,
    ) as run:
        trial = Trial(run)
        for name, happen in CASES.items():
            if name in without:
                continue
            try:
                happen(trial)
            except AssertionError as error:
                error.add_note(f"in the case {name!r}")
                raise
        trial.finish()


def stored(run: Job) -> tuple[int, Path]:
    """Have the newest checkpoint stored, and return its step and its folder."""
    said = run.cli("job", "checkpoint", run.name)
    found = re.fullmatch(r"job: the checkpoint of step (\d+) is in (\S+)\n", said)
    assert found is not None, said
    return int(found[1]), Path(found[2])


@dataclass(frozen=True)
class Integration:
    """What is trained with, and which cases do not apply."""

    program: str
    """Its program in tests/programs."""
    reference: str = ""
    """The program that is run without faults; the same one if empty."""
    tolerance: float = EXACT
    """Greatest relative difference of the weights."""
    files: dict[str, str] = field(default_factory=dict)
    """What is put into the folder of its program: contents by name."""
    same_files: tuple[str, ...] = ()
    """What the program writes, and must write as without faults: names in the folder."""
    without: dict[str, str] = field(default_factory=dict)
    """The cases that are left out, and why."""


class References:
    """The folders of runs that nothing disturbs. Each program runs once."""

    def __init__(self, folder: Path) -> None:
        """Use a folder; nothing is run yet."""
        self._folder = folder
        self._found: dict[str, Path] = {}

    def of(self, integration: Integration) -> Path:
        """Return the folder of a run of one process."""
        program = integration.reference or integration.program
        if program not in self._found:
            folder = self._found[program] = self._folder / program
            folder.mkdir()
            provide(folder, integration.files)
            run_alone(PROGRAMS / program, folder, epochs=EPOCHS)
        return self._found[program]


def provide(folder: Path, files: dict[str, str]) -> None:
    """Write files into a folder: contents by name."""
    for name, text in files.items():
        (folder / name).write_text(text)


def compare_with_faults(place: Place, references: References, integration: Integration) -> None:
    """Train with all cases, and check that all is as without faults.

    Args:
        place: where the job runs.
        references: the runs without faults.
        integration: what is trained with.
    """
    assert set(integration.without) <= set(CASES)
    assert all(integration.without.values()), "a case that is left out needs a reason"
    undisturbed = references.of(integration)
    provide(place.folder, integration.files)
    run_trial(place, PROGRAMS / integration.program, without=integration.without)
    check(place.folder, undisturbed, epochs=EPOCHS, tolerance=integration.tolerance)
    for file in integration.same_files:
        assert (place.folder / file).read_text() == (undisturbed / file).read_text()
