"""Wrong values of a real training: the rank is named, and the last good checkpoint restored."""

import json
import re
from pathlib import Path

import pytest

from dlrover_py.protocol.reasons import EventReason
from tests.process.harness import CALM, Place, job
from tests.programs import PROGRAMS

FLIP_RANK, FLIP_STEP, NAN_RANK, NAN_STEP, STEPS = 1, 13, 2, 23, 30


def test_a_flipped_bit_and_a_nan_take_the_job_back_to_a_good_checkpoint(place: Place) -> None:
    folder = place.folder / "checkpoints"
    with job(
        place,
        script=PROGRAMS / "train_wrongly.py",
        args=tuple(map(str, (folder, FLIP_RANK, FLIP_STEP, NAN_RANK, NAN_STEP, STEPS))),
        flags=("--nproc-per-node=3",),
        replicas=1,
        restartCount=3,
        spec={"diagnosis": {"wrong": "rollback"}, "checkpoint": {"compareEvery": 5}},
        settings=CALM,
    ) as run:
        status = run.until(lambda s: s.round == 3, "the round after both")
        (flip,) = (e for e in status.events if e.reason == EventReason.REPLICAS_DIFFER)
        assert flip.message == (
            "the parameters of rank 1 (node n0) differ from those of 2 other replicas at step 15; "
            "step 10 is the last good one; the round restarts from the newest checkpoint up to "
            "step 10"
        )
        (nan,) = (e for e in status.events if e.reason == EventReason.NOT_FINITE)
        assert nan.message.startswith("the loss of rank 2 (node n0) is nan at step 23; step 22 is")
        assert "is nan at step 23" in run.cli(
            "job", "why", "job", "--round", "3"
        )  # also if it is over
        shown = run.cli("job", "goodput", "job")
        assert shown.startswith("job: goodput ")
        spent = json.loads(run.cli("job", "goodput", "job", "--json"))
        assert sum(spent["seconds"].values()) == pytest.approx(spent["wall_s"], abs=0.1)
        kinds = {"productive", "program_startup", "wasted_progress", "checkpoint_save"}
        assert kinds | {"checkpoint_restore"} <= spent["seconds"].keys()
        assert "\nceiling " in shown
        assert spent["ceiling"]["failures"] == 2
        many = spent["seconds"]["checkpoint_save"] / spent["save_s"]
        assert many > 5, "each save is counted"
        assert run.wait() == 0
    output = Path(f"{folder}.said").read_text()
    began = dict(re.findall(r"round (\d) continues from (\d+)", output))
    assert began["1"] == "0"
    assert began["2"] == "10", "the last checkpoint on which all replicas agreed"
    assert 20 <= int(began["3"]) < NAN_STEP
    digests = re.findall(r"rank \d ends with (\d+)", output)
    assert len(digests) == 3
    assert len(set(digests)) == 1
    listed = place.call("dlrover", "ckpt", "ls", str(folder), "--json")
    rows = {row["step"]: row["certified"] for row in json.loads(listed.stdout)}
    assert rows[10]
    assert rows[STEPS]
