"""Conformance of exact data with other frameworks; see ``test_exact_data.py``."""

import json

import pytest

from tests import exact_runs
from tests.exact_runs import PLAIN, Integration, References, at_step
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS


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


TABLE = {
    "Lightning": Integration("train_with_lightning.py", reference=PLAIN),
    "Accelerate": Integration("train_with_accelerate.py"),
    "HF Trainer": Integration("train_with_hf_trainer.py"),
    "DeepSpeed": Integration(
        "train_with_deepspeed.py", tolerance=exact_runs.ROUNDED, files=zero(3)
    ),
}
"""The integrations. Each has all cases of ``exact_runs.CASES``."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The runs without faults."""
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TABLE)
def test_a_training_with_faults_is_as_one_without(
    place: Place, references: References, name: str
) -> None:
    exact_runs.compare_with_faults(place, references, TABLE[name])


@pytest.mark.timeout(900)
def test_zero_1_is_resized_and_continues_as_zero_2(place: Place, references: References) -> None:
    """The world goes 2→1→2. The last workers find another stage of ZeRO in the config."""
    exact_runs.provide(place.folder, zero(1))
    permit(place.folder, 0)
    exact_runs.provide_task(place)
    with job(
        place,
        script=PROGRAMS / "train_with_deepspeed.py",
        args=(str(place.folder), str(exact_runs.EPOCHS)),
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
        exact_runs.provide(place.folder, zero(2))
        run.cli("job", "scale", "2")
        run.running(2, round_after=one.round)
        permit(place.folder, OPEN)
        assert run.wait(within_s=200) == 0, "".join(run.output)
    exact_runs.check_planned_changes(place.folder, faults=())
    exact_runs.check(
        place.folder,
        references.of(TABLE["DeepSpeed"]),
        epochs=exact_runs.EPOCHS,
        tolerance=exact_runs.ROUNDED,
    )
