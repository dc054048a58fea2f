"""Synchronous workers lose one of them and a server by ``kill -9``: each step counts whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from dlrover_py.ps.client import PsClient
from dlrover_py.ps.local import LocalServers
from dlrover_py.ps.settings import read_access
from tests.process.harness import Place, eventually
from tests.programs import PROGRAMS
from tests.programs.steps_on_ps import IDS, TABLE

STEPS = 120


def ended(folder: Path, name: str) -> int:
    path = folder / f"steps.{name}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_killed_worker_and_a_killed_server_leave_no_half_step(place: Place) -> None:
    program = str(PROGRAMS / "steps_on_ps.py")
    with LocalServers(place.folder, 2) as running:
        running.wait_whole()

        def start(name: str, number: str) -> "subprocess.Popen[str]":
            words = (sys.executable, "-P", program, str(running.access), name, number)
            return place.popen(*words, "2", str(STEPS))

        stays, dies = start("stays", "1"), start("dies", "1000")
        eventually(lambda: ended(place.folder, "stays") >= 20, "20 steps")
        os.kill(next(iter(running.pids.values())), signal.SIGKILL)
        before = ended(place.folder, "stays")
        eventually(lambda: ended(place.folder, "stays") >= before + 20, "steps after the loss")
        os.kill(dies.pid, signal.SIGKILL)
        assert (dies.wait(60), stays.wait(120)) == (-signal.SIGKILL, 0)
        with PsClient(read_access(running.access), "reader") as reader:
            reader.create(TABLE)
            rows = reader.pull({"t": IDS}).result(60)["t"][:, 0]
    assert len(set(rows.tolist())) == 1, "some rows have half a step"
    together, alone = divmod(int(rows[0]), 1000)
    assert alone == STEPS
    assert ended(place.folder, "dies") <= together <= ended(place.folder, "dies") + 1
    assert together < STEPS
