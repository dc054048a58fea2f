"""Example 08: neither a killed server nor a killed worker changes how well the model predicts."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.harness import Place, carrying, eventually

SCRIPT = Path(__file__).parents[2] / "examples" / "08-click-model" / "train.py"
SAMPLES, BATCH = 40_000, 500
STEPS = SAMPLES // BATCH


@contextmanager
def training(place: Place, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the example with its output in a pipe."""
    run = place.popen(
        "dlrover", "ps", "serve", "--servers=3", f"--checkpoints={place.folder / 'cuts'}", "--",
        "elastic-run", "--standalone", "--nproc-per-node=2", "--max-restarts=3", str(SCRIPT),
        f"--samples={SAMPLES}", f"--global-batch={BATCH}", "--save-every=15", *flags,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield run
    finally:
        run.terminate()
        run.wait()
        assert run.stdout is not None
        run.stdout.close()


def pids(place: Place, pattern: str) -> list[int]:
    return [pid for pid, line in carrying(place.mark).items() if re.search(pattern, line)]


def result(place: Place, run: "subprocess.Popen[str]", kills: dict[int, str]) -> tuple[float, bool]:
    """Return the log loss at the end, and whether training went on from a checkpoint.

    Args:
        place: The place of the test.
        run: The training.
        kills: Pattern of the command line of a process, by the step after which it is killed.
    """
    assert run.stdout is not None
    resumed = False
    for line in run.stdout:
        resumed = resumed or "resumed after step" in line
        if (step := re.search(r"step (\d+): log loss", line)) and int(step[1]) in kills:
            pattern = kills.pop(int(step[1]))
            found = eventually(lambda: pids(place, pattern), pattern)  # noqa: B023
            os.kill(found[-1], signal.SIGKILL)
        if end := re.search(r"log loss (\S+) after (\d+) steps.* has (\S+)", line):
            assert float(end[1]) < float(end[3]) - 0.02, "it has not learnt"
            assert int(end[2]) == STEPS
            assert not kills
            assert run.wait(60) == 0
            return float(end[1]), resumed
    raise AssertionError("the run ended without a result")


def test_the_log_loss_is_as_without_kills(place: Place) -> None:
    with training(place) as run:
        calm, resumed = result(place, run, {})
        assert not resumed
    with training(place, "--step-delay=0.05") as run:
        hurt, resumed = result(place, run, {20: r"ps\.server", 40: r" -u \S*train\.py"})
        assert resumed
    assert hurt == pytest.approx(calm, abs=0.002)
