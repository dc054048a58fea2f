"""A training with Lightning survives the same faults as one without it, and ends alike."""

import pytest

from dlrover_py.trainer.data.verify import verify
from tests import exact_runs
from tests.process.harness import Place
from tests.programs import PROGRAMS

pytestmark = pytest.mark.whole_torch

SCRIPT = PROGRAMS / "train_with_lightning.py"
EPOCHS = 2
EXACT = 1e-12
"""Tolerance of weights of 64 bits, whose additions have another order."""


@pytest.mark.timeout(600)
def test_kills_resizes_and_a_drain_within_an_epoch(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The reference trains the same task without Lightning, in one process."""
    exact_runs.run_with_faults(place, SCRIPT, epochs=EPOCHS)
    reference = tmp_path_factory.mktemp("reference")
    exact_runs.run_alone(PROGRAMS / "train_on_exact_data.py", reference, epochs=EPOCHS)
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=EXACT)
    report = verify(place.folder)
    assert (report.exact, report.steps, report.problems) == (True, 82, [])
