"""Exact data with tensor parallelism, where some ranks get the same samples."""

import os
import signal
from pathlib import Path

import pytest

from tests import exact_runs
from tests.exact_runs import EXACT, at_step
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Place, job, members
from tests.programs import PROGRAMS

pytestmark = pytest.mark.timeout(600)


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
