"""Each script that was ported from another framework survives a killed worker, and ends alike."""

import os
import signal
from pathlib import Path

import pytest

from dlrover_py.trainer.data.verify import verify
from tests.process.harness import CALM, Place, eventually, job, lines, members

PORTED = Path(__file__).parents[2] / "examples" / "ported"


def loss(line: str) -> float:
    """Return the loss in the last line of a script."""
    return float(line.split()[1])


@pytest.fixture(scope="module")
def undisturbed() -> float:
    """The loss at the end without a fault. All scripts have the same task."""
    place = Place()
    command = ("elastic-run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    done = place.call(*command, str(PORTED / "from_dlrover.py"))
    place.close()
    assert done.returncode == 0, done.stderr
    return loss(done.stdout)


@pytest.mark.parametrize(
    ("name", "args"),
    [("from_horovod.py", ()), ("from_torchft.py", ()), ("from_dlrover.py", ("--fsdp",))],
)
def test_a_killed_worker_changes_nothing(
    place: Place, undisturbed: float, name: str, args: tuple[str, ...]
) -> None:
    more = (f"--ledger={place.folder / 'ledger'}", "--step-delay=0.1")
    with job(
        place, script=PORTED / name, args=args + more, replicas=2, restartCount=3, settings=CALM
    ) as run:
        run.until(lambda s: s.progress is not None and s.progress.step >= 5, "step 5")
        os.kill(members(run.running(2))[1].pids[0], signal.SIGKILL)
        eventually(lambda: lines(run, "n*", "^resumed after step [1-9]"), "a line", within_s=120)
        assert run.wait() == 0, "".join(run.output)
        (disturbed,) = lines(run, "n*", "^loss ")
    report = verify(place.folder / "ledger")
    assert (report.exact, report.problems) == (True, [])
    assert loss(disturbed) == pytest.approx(undisturbed, rel=1e-9)
