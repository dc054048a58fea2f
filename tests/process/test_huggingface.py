"""Accelerate and Hugging Face's ``Trainer`` train each sample once, whatever happens."""

import pytest

from dlrover_py.trainer.data.verify import verify
from tests import exact_runs
from tests.process.harness import Place
from tests.programs import PROGRAMS

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_torch]  # a new node imports transformers

EPOCHS = 2
EXACT = 1e-12
"""Tolerance of weights of 64 bits, whose additions have another order."""


@pytest.mark.parametrize("name", ["train_with_accelerate.py", "train_with_hf_trainer.py"])
def test_kills_resizes_and_a_drain_within_an_epoch(
    place: Place, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    reference = tmp_path_factory.mktemp("reference")
    exact_runs.run_alone(PROGRAMS / name, reference, epochs=EPOCHS)
    exact_runs.run_with_faults(place, PROGRAMS / name, epochs=EPOCHS)
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=EXACT)
    report = verify(place.folder)
    assert (report.exact, report.steps, report.problems) == (True, 82, [])
