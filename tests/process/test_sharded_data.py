"""Exact data with a sharded model (FSDP2, tensor parallelism), and with a sharded optimizer."""

import os
import signal
from pathlib import Path

import pytest

from dlrover_py.trainer.data.verify import verify
from tests import exact_runs
from tests.exact_runs import at_step
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Place, job, members
from tests.programs import PROGRAMS

pytestmark = pytest.mark.timeout(600)
EPOCHS = 2
EXACT = 1e-12
"""Tolerance of weights of 64 bits, whose additions have another order."""


def test_fully_sharded_models_survive_kills_resizes_and_a_drain(
    place: Place, tmp_path: Path
) -> None:
    """Gradients are clipped, and a ``GradScaler`` skips one step of each epoch."""
    program = PROGRAMS / "train_with_fsdp2.py"
    exact_runs.run_alone(program, tmp_path, epochs=EPOCHS)
    exact_runs.run_with_faults(place, program, epochs=EPOCHS)
    exact_runs.check(place.folder, tmp_path, epochs=EPOCHS, tolerance=EXACT)
    ours, theirs = (folder / "scaler.json" for folder in (place.folder, tmp_path))
    assert ours.read_text() == theirs.read_text()


def test_fully_sharded_models_leave_out_a_torn_checkpoint_after_all_nodes_are_lost(
    place: Place, tmp_path: Path
) -> None:
    program = PROGRAMS / "train_with_fsdp2.py"
    exact_runs.run_alone(program, tmp_path, epochs=EPOCHS)
    exact_runs.run_with_a_torn_checkpoint(place, program, epochs=EPOCHS)
    exact_runs.check(place.folder, tmp_path, epochs=EPOCHS, tolerance=EXACT)


def test_sharded_optimizers_survive_kills_resizes_and_a_drain(place: Place, tmp_path: Path) -> None:
    program = PROGRAMS / "train_with_zero_optimizer.py"
    exact_runs.run_alone(program, tmp_path, epochs=EPOCHS)
    exact_runs.run_with_faults(place, program, epochs=EPOCHS)
    exact_runs.check(place.folder, tmp_path, epochs=EPOCHS, tolerance=EXACT)


def test_ranks_of_one_copy_of_a_model_get_the_same_samples(place: Place, tmp_path: Path) -> None:
    """Each node has a copy, which two tensor-parallel ranks divide; one of the nodes is removed."""
    program = PROGRAMS / "train_on_mesh.py"
    exact_runs.run_alone(program, tmp_path, epochs=1)
    permit(place.folder, 0)
    exact_runs.provide_task(place)
    with job(
        place,
        script=program,
        flags=("--nproc-per-node=2",),
        args=(str(place.folder), "1"),
        replicas=2,
        minReplicas=1,
        restartCount=5,
        settings=CALM,
    ) as run:
        at_step(run, 5)
        first = run.running(2)
        os.kill(members(first)[1].pids[0], signal.SIGKILL)
        second = run.running(2, round_after=first.round)
        at_step(run, 12)
        run.cli("job", "scale", "1")
        run.running(1, round_after=second.round)
        permit(place.folder, OPEN)
        assert run.wait(within_s=250) == 0, "".join(run.output)
    exact_runs.check(place.folder, tmp_path, epochs=1, tolerance=EXACT)
    report = verify(place.folder)
    assert (report.exact, report.steps, report.problems) == (True, 41, [])
