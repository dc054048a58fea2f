"""Exact data with DeepSpeed: partitions of ZeRO are cut anew for each world, without its files."""

import json
from pathlib import Path

import pytest

from tests import exact_runs
from tests.exact_runs import at_step
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS

SCRIPT = PROGRAMS / "train_with_deepspeed.py"
pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_torch]
EPOCHS = 2
ROUNDED = 1e-4
"""Tolerance of weights of 32 bits, whose additions have another order. A step with another learning
rate, or without its momentum, makes a greater difference."""


def configure(folder: Path, stage: int) -> None:
    """Write the config of a program."""
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 60, "warmup_max_lr": 0.01},
        },
    }
    (folder / "deepspeed.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    configure(folder, stage=1)
    exact_runs.run_alone(SCRIPT, folder, epochs=EPOCHS)
    return folder


def test_zero_3_survives_kills_resizes_and_a_drain(place: Place, reference: Path) -> None:
    configure(place.folder, stage=3)
    exact_runs.run_with_faults(place, SCRIPT, epochs=EPOCHS)
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=ROUNDED)


def test_zero_1_is_resized_and_continues_as_zero_2(place: Place, reference: Path) -> None:
    """The world goes 2→1→2. The last workers find another stage in the config."""
    configure(place.folder, stage=1)
    permit(place.folder, 0)
    exact_runs.provide_task(place)
    with job(
        place,
        script=SCRIPT,
        args=(str(place.folder), str(EPOCHS)),
        hosts=2,
        replicas=2,
        minReplicas=1,
        maxReplicas=2,
        settings=CALM,
    ) as run:
        at_step(run, 12)
        two = run.running(2)
        run.cli("job", "scale", "1")
        one = run.running(1, round_after=two.round)
        at_step(run, 20)
        configure(place.folder, stage=2)
        run.cli("job", "scale", "2")
        run.running(2, round_after=one.round)
        permit(place.folder, OPEN)
        assert run.wait(within_s=200) == 0, "".join(run.output)
    exact_runs.check(place.folder, reference, epochs=EPOCHS, tolerance=ROUNDED)
