"""Two workers train on three servers, one of which is killed: the result is as without that."""

import os
import signal
from pathlib import Path

from tests.process.harness import Place, carrying, eventually
from tests.programs import PROGRAMS
from tests.programs.train_on_ps import rows_of, train
from tests.ps_threads import client, servers

STEPS = 150


def steps(folder: Path, rank: int) -> list[float]:
    """Return when each step of a rank had ended."""
    path = folder / f"steps.{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(line.split()[1]) for line in lines]


def undisturbed(folder: Path, count: int = STEPS) -> list[str]:
    """Train the two ranks one after the other, in this process; return the rows."""
    folder.mkdir()
    with servers(folder) as access, client(access) as one:
        for rank in (0, 1):
            assert len(list(train(one, rank, 2, count))) == count
        return [rows_of(one, rank, 2) for rank in (0, 1)]


def test_a_killed_server_changes_no_row(place: Place) -> None:
    folder = place.folder / "run"
    folder.mkdir()
    script = str(PROGRAMS / "train_on_ps.py")
    launch = ("elastic-run", "--nproc-per-node", "2", script, str(folder), str(STEPS))
    run = place.popen("dlrover", "ps", "serve", "--servers", "3", "--", *launch)
    eventually(lambda: min(len(steps(folder, rank)) for rank in (0, 1)) > 20, "20 steps")
    found = [pid for pid, line in carrying(place.mark).items() if "dlrover_py.ps.server" in line]
    assert len(found) == 3
    before = max(len(steps(folder, rank)) for rank in (0, 1))
    os.kill(found[1], signal.SIGKILL)
    assert before < STEPS - 20, "the training was over before a server was killed"
    assert run.wait(120) == 0
    assert [len(steps(folder, rank)) for rank in (0, 1)] == [STEPS, STEPS]
    rows = [(folder / f"rows.{rank}").read_text() for rank in (0, 1)]
    assert rows == undisturbed(place.folder / "calm")
    counted = sum(float(row.split(",")[1].strip("]")) for row in rows[0].splitlines()[-50:])
    assert counted == 2 * 30 * STEPS
