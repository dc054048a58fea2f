"""Two workers train on three servers, one of which is killed: the result is as without that."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dlrover_py.ps.client import connect
from dlrover_py.ps.coordinator import Coordinator
from dlrover_py.ps.local import LocalServers
from dlrover_py.ps.specs import TableSpec, sgd
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


def test_a_map_that_cannot_be_written_for_a_moment_loses_no_server(place: Place) -> None:
    with LocalServers(place.folder, 1) as running:
        running.wait_whole()
        before, spec = running.pids, TableSpec("t", 1, sgd(1.0))
        with connect(running.access) as worker:
            (place.folder / "map.new").mkdir()  # the new map is written there
            epoch = running.map.epoch
            with ThreadPoolExecutor(1) as thread:
                created = thread.submit(worker.create, spec)
                eventually(lambda: running.map.epoch > epoch, "a map that cannot be written")
                (place.folder / "map.new").rmdir()
                created.result(60)
            ids = np.arange(4)
            worker.push({"t": (ids, np.ones((4, 1), np.float32))}).result(60)
        assert (running.pids, running.failure) == (before, "")


def test_servers_that_end_by_a_fault_of_their_coordinator_say_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(self: Coordinator, now: float) -> None:
        raise AttributeError("planted")

    told = threading.Event()
    with LocalServers(place.folder, 1) as running:
        running.wait_whole()
        running.at_failure(told.set)
        monkeypatch.setattr(Coordinator, "receive", fault)
        assert told.wait(60)
        assert "the coordinator of the servers has failed: AttributeError" in running.failure
