"""Exact data with a sharded model (FSDP2), and with a sharded optimizer beside DDP."""

from pathlib import Path

import pytest

from tests import exact_runs
from tests.process.harness import Place
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


def test_sharded_optimizers_survive_kills_resizes_and_a_drain(place: Place, tmp_path: Path) -> None:
    program = PROGRAMS / "train_with_zero_optimizer.py"
    exact_runs.run_alone(program, tmp_path, epochs=EPOCHS)
    exact_runs.run_with_faults(place, program, epochs=EPOCHS)
    exact_runs.check(place.folder, tmp_path, epochs=EPOCHS, tolerance=EXACT)
