"""Each sample is trained once, whatever happens, and the result is that of a run without faults."""

from pathlib import Path

import pytest

from dlrover_py.trainer.data.verify import verify
from tests import exact_runs
from tests.exact_runs import at_step
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS

SCRIPT = PROGRAMS / "train_on_exact_data.py"
EPOCHS = 2
EXACT = 1e-12
"""Tolerance of weights of 64 bits, whose additions have another order."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    exact_runs.run_alone(SCRIPT, folder, epochs=EPOCHS)
    return folder


def test_kills_resizes_and_a_drain_within_an_epoch(place: Place, reference: Path) -> None:
    exact_runs.run_with_faults(place, SCRIPT, epochs=EPOCHS)
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=EXACT)
    report = verify(place.folder)
    assert (report.exact, report.steps, report.problems) == (True, 82, [])


def test_a_torn_checkpoint_is_left_out_after_all_nodes_are_lost(
    place: Place, reference: Path
) -> None:
    exact_runs.run_with_a_torn_checkpoint(place, SCRIPT, epochs=EPOCHS)
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=EXACT)
    report = verify(place.folder)
    assert (report.exact, report.steps, report.problems) == (True, 82, [])


def test_another_world_continues_from_a_folder(place: Place, reference: Path) -> None:
    """The first job is asked to end. Nothing of it is left but its folder of checkpoints."""
    spec = {"checkpoint": {"dir": str(place.folder / "store")}}
    permit(place.folder, 0)
    exact_runs.provide_task(place)
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
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=EXACT)
