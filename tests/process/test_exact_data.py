"""Conformance of exact data: with each integration, a training with faults is as one without.

The cases happen one after the other in one job of each integration: a start of a framework costs
more than a case. At the end, the samples of each step, the ledger and the weights must be those of
a run that nothing has disturbed. Equal weights after equal steps mean equal losses.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import exact_runs
from tests.exact_runs import EPOCHS, at_step
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS

SCRIPT = "train_on_exact_data.py"
EXACT = 1e-12
"""Tolerance of weights of 64 bits, whose additions have another order."""
ROUNDED = 1e-4
"""Tolerance of weights of 32 bits, whose additions have another order. A step with another learning
rate, or without its momentum, makes a greater difference."""


@dataclass(frozen=True)
class Integration:
    """One row of the table: what is trained with, and which cases do not apply."""

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


def zero(stage: int) -> dict[str, str]:
    """Return the file with a config of DeepSpeed, for a stage of ZeRO."""
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 60, "warmup_max_lr": 0.01},
        },
    }
    return {"deepspeed.json": json.dumps(config)}


AS_PLAIN = "as with plain PyTorch: only the optimizer has another state, which other cases restore"

TABLE = {
    "plain PyTorch": Integration(SCRIPT),
    "ElasticLoop": Integration("train_with_elastic_loop.py", reference=SCRIPT),
    "FSDP2": Integration("train_with_fsdp2.py", same_files=("scaler.json",)),
    "ZeroRedundancyOptimizer": Integration(
        "train_with_zero_optimizer.py",
        without=dict.fromkeys(("killed prefetching worker", "torn checkpoint"), AS_PLAIN),
    ),
    "Lightning": Integration("train_with_lightning.py", reference=SCRIPT),
    "Accelerate": Integration("train_with_accelerate.py"),
    "HF Trainer": Integration("train_with_hf_trainer.py"),
    "DeepSpeed": Integration("train_with_deepspeed.py", tolerance=ROUNDED, files=zero(3)),
}
"""The integrations. Each has all cases of ``exact_runs.CASES`` but those that it names."""

Reference = Callable[[str], Path]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the folder of a run of one process that nothing disturbs; each program runs once."""
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        integration = TABLE[name]
        program = integration.reference or integration.program
        if program not in folders:
            folder = folders[program] = tmp_path_factory.mktemp("reference")
            provide(folder, integration.files)
            exact_runs.run_alone(PROGRAMS / program, folder, epochs=EPOCHS)
        return folders[program]

    return run


def provide(folder: Path, files: dict[str, str]) -> None:
    """Write files into a folder: contents by name."""
    for name, text in files.items():
        (folder / name).write_text(text)


def test_cases_that_are_left_out_have_a_reason() -> None:
    for integration in TABLE.values():
        assert set(integration.without) <= set(exact_runs.CASES)
        assert all(integration.without.values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TABLE)
def test_a_training_with_faults_is_as_one_without(
    place: Place, reference: Reference, name: str
) -> None:
    integration, undisturbed = TABLE[name], reference(name)
    provide(place.folder, integration.files)
    exact_runs.run_trial(place, PROGRAMS / integration.program, without=integration.without)
    exact_runs.check(place.folder, undisturbed, epochs=EPOCHS, tolerance=integration.tolerance)
    for file in integration.same_files:
        assert (place.folder / file).read_text() == (undisturbed / file).read_text()


@pytest.mark.timeout(900)
def test_zero_1_is_resized_and_continues_as_zero_2(place: Place, reference: Reference) -> None:
    """The world goes 2→1→2. The last workers find another stage of ZeRO in the config."""
    provide(place.folder, zero(1))
    permit(place.folder, 0)
    exact_runs.provide_task(place)
    with job(
        place,
        script=PROGRAMS / "train_with_deepspeed.py",
        args=(str(place.folder), str(EPOCHS)),
        hosts=2,
        replicas=2,
        minReplicas=1,
        maxReplicas=2,
        settings=CALM,
    ) as run:
        two = run.running(2)
        at_step(run, 3)
        run.cli("job", "scale", "1")
        one = run.running(1, round_after=two.round)
        at_step(run, 6)
        provide(place.folder, zero(2))
        run.cli("job", "scale", "2")
        run.running(2, round_after=one.round)
        permit(place.folder, OPEN)
        assert run.wait(within_s=200) == 0, "".join(run.output)
    exact_runs.check_planned_changes(place.folder, faults=())
    exact_runs.check(place.folder, reference("DeepSpeed"), epochs=EPOCHS, tolerance=ROUNDED)
