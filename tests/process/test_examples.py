"""Every example runs as its README says, with real torch and real faults."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlrover_py.cli.jobfile import load
from tests.process.harness import CALM, Job, Place, eventually, lines, members

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(600)


@contextmanager
def example(place: Place, name: str, hosts: int, *more: str) -> Iterator[Job]:
    """Run a copy of an example with more arguments for its script."""
    folder = place.folder / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("ckpt"))
    file = folder / "job.yaml"
    text = file.read_text()
    command = re.search(r"command: \[(.*)\]", text)
    assert command is not None
    parts = ", ".join(json.dumps(m) for m in more)
    file.write_text(text.replace(command[1], f"{command[1]}, {parts}" if parts else command[1]))
    process = place.popen(
        "dlrover",
        "job",
        "run",
        str(file),
        "--json",
        "--nodes",
        str(hosts),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={f"DLROVER_MASTER_{k.upper()}": v for k, v in CALM.items()},
    )
    run = Job(place, load(file).job.metadata.name, process)
    try:
        eventually(lambda: run.socket.exists() or process.poll() is not None, "the job's socket")
        yield run
    finally:
        run.stop()
        if process.stdout is not None:
            process.stdout.close()


def test_01_digits_survives_a_killed_worker(place: Place) -> None:
    # Half a minute, so that it has not ended by the time that it is hurt.
    with example(place, "01-digits", 2, "--epochs=20", "--step-delay=0.1") as run:
        run.running(2)
        saved = place.folder / "01-digits" / "ckpt" / "checkpoint.pt"
        eventually(saved.exists, "a checkpoint", within_s=120)
        status = run.running(2)
        os.kill(members(status)[1].pids[0], signal.SIGKILL)
        run.running(2, round_after=status.round)
        assert run.wait(within_s=200) == 0
        (accuracy,) = lines(run, "n*", r"^accuracy ")
        assert float(accuracy.split()[1]) > 0.9


def test_02_gpt_learns_the_same_with_and_without_a_lost_node(place: Place) -> None:
    result = place.folder / "result.json"
    steps = ("--steps=60", "--ckpt-every=10", "--step-delay=0.4", f"--out={result}")
    with example(place, "02-gpt", 4, *steps) as run:
        before = run.until(
            lambda s: s.progress is not None and s.progress.step >= 15 and s.standby,
            "step 15, and a standby that takes the place",
        )
        run.hurt(members(before)[0].id, "kill")
        run.until(
            lambda s: s.round > before.round and s.progress is not None, "steps", within_s=120
        )
        assert run.wait(within_s=200) == 0
    survived = json.loads(result.read_text())
    alone = place.folder / "alone.json"
    done = place.call(
        "elastic-run",
        "--standalone",
        "--cold-start",
        "--nproc-per-node=2",
        str(EXAMPLES / "02-gpt" / "train.py"),
        "--steps=60",
        f"--ckpt={place.folder}/other",
        f"--out={alone}",
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    undisturbed = json.loads(alone.read_text())
    assert survived["step"] == undisturbed["step"] == 60
    assert survived["world_size"] == 3
    assert undisturbed["world_size"] == 2
    assert survived["loss"] == pytest.approx(undisturbed["loss"], abs=1e-3)
    assert survived["loss"] < 4.0


def test_02_gpt_ends_with_the_same_bytes_after_a_killed_worker(place: Place) -> None:
    results = []
    for name in ("undisturbed", "killed"):
        out = place.folder / f"{name}.json"
        more = ("--steps=40", "--step-delay=0.5", f"--ckpt={place.folder}/{name}", f"--out={out}")
        with example(place, "02-gpt", 2, *more) as run:
            if name == "killed":
                run.until(lambda s: s.progress is not None and s.progress.step >= 10, "step 10")
                before = run.running(2)
                os.kill(members(before)[1].pids[0], signal.SIGKILL)
                run.until(lambda s: s.round > before.round, "another round")  # noqa: B023
            assert run.wait(within_s=200) == 0
        results.append(json.loads(out.read_text()))
        shutil.rmtree(place.folder / "02-gpt")
    assert results[0] == results[1]
    assert results[0]["world_size"] == 2


RESUMED = "^resumed after step [1-9]|^training from step [1-9]"
"""Line of a worker that goes on from a checkpoint."""


def test_03_elastic_data_ends_alike_after_a_resize_and_a_kill(place: Place) -> None:
    with example(place, "03-elastic-data", 3, "--epochs=10", "--step-delay=0.5") as run:
        run.until(lambda s: s.progress is not None and s.progress.step >= 10, "step 10")
        two = run.running(2)
        run.cli("job", "scale", "3")
        three = run.running(3, round_after=two.round)
        eventually(lambda: lines(run, "n*", RESUMED), "a line of the round of three", within_s=120)
        os.kill(members(three)[1].pids[0], signal.SIGKILL)
        run.running(3, round_after=three.round)
        assert run.wait(within_s=200) == 0
        (accuracy,) = lines(run, "n*", r"^accuracy ")
        resumed = lines(run, "n*", RESUMED)
    assert len(resumed) >= 2
    all_samples_are_proven(place, "03-elastic-data", epochs=10)
    assert accuracy == accuracy_alone(place, "03-elastic-data", epochs=10)


@pytest.mark.parametrize("name", ["04-lightning", "05-huggingface", "06-deepspeed"])
def test_a_framework_ends_alike_after_a_kill(place: Place, name: str) -> None:
    """Their resizes are tested with their integrations."""
    with example(place, name, 2, "--epochs=3", "--step-delay=0.3") as run:
        run.until(lambda s: s.progress is not None and s.progress.step >= 5, "step 5")
        before = run.running(2)
        os.kill(members(before)[1].pids[0], signal.SIGKILL)
        run.running(2, round_after=before.round)
        assert run.wait(within_s=300) == 0
        (accuracy,) = lines(run, "n*", r"^accuracy ")
        resumed = lines(run, "n*", RESUMED)
    assert resumed
    if name != "05-huggingface":  # its Trainer has no ledger
        all_samples_are_proven(place, name, epochs=3)
    assert accuracy == accuracy_alone(place, name, epochs=3)


def all_samples_are_proven(place: Place, name: str, *, epochs: int) -> None:
    store = str(place.folder / name / "ckpt")
    proof = place.call("dlrover", "data", "verify", store)
    words = [f"epoch {epoch}: finished: all 1437 samples once" for epoch in range(epochs)]
    assert proof.stdout.splitlines() == words
    assert place.call("dlrover", "ckpt", "verify", store).returncode == 0


def accuracy_alone(place: Place, name: str, *, epochs: int) -> str:
    """The last line of an undisturbed run with one worker."""
    script = str(EXAMPLES / name / "train.py")
    flags = ("--standalone", "--cold-start")  # nothing is restarted
    alone = place.call("elastic-run", *flags, script, f"--epochs={epochs}", timeout=200)
    assert alone.returncode == 0, alone.stderr
    line = alone.stdout.splitlines()[-1]
    assert line.endswith(f" after {epochs} epochs")
    return line
