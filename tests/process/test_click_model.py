"""Example 08: neither a killed server nor a killed worker changes how well the model predicts."""

import importlib.util
import os
import re
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

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


def test_real_impressions_are_read_from_the_wheel(tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("click_model", SCRIPT)
    assert found is not None
    assert found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    users = [f"user_feature_{i}" for i in range(4)]
    lines = [
        ",".join(["", "timestamp", "item_id", "position", "click", *users]),
        "0,2019-11-24 07:03:24+00:00,32,2,1,a,b,c,d",
        "1,2019-11-24 23:03:24+00:00,79,3,0,a,b,c,e",
    ]
    with zipfile.ZipFile(tmp_path / "obp.whl", "w") as wheel:
        for log in example.LOGS:
            wheel.writestr(f"obp/dataset/obd/{log}.csv", "\n".join(lines))
    ids, clicked = example.impressions(str(tmp_path / "obp.whl"))
    assert ids.shape == (12, len(example.REAL_FIELDS))
    sizes = torch.tensor(list(example.REAL_FIELDS.values()))
    assert bool(((ids >= 0) & (ids < sizes)).all())
    assert ids[:, :4].max(0).values.tolist() == [5, 2, 23, 239]
    assert len(ids[:, 4].unique()) == 2
    assert len(ids[:, 5].unique()) == 6, "a user and an item of a shop"
    assert clicked.sum() == 6
    logits, labels = torch.tensor([0.1, 0.9, 0.9, 0.2]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert example.auc(logits, labels) == pytest.approx(0.625)
