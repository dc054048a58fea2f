"""All servers are killed: all rows go back to the last cut, and training goes on from there."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dlrover_py.ps.client import DataLossError, PsClient
from dlrover_py.ps.cuts import CutDirectory
from dlrover_py.ps.local import LocalServers
from dlrover_py.ps.settings import read_access
from tests.process.harness import Place, eventually
from tests.process.test_parameter_server import steps, undisturbed
from tests.programs import PROGRAMS
from tests.programs.train_on_ps import rows_of, train
from tests.ps_threads import client, servers

CUT, STEPS = 15, 30


def run_steps(workers: list[PsClient], done: int, until: int) -> None:
    for rank, worker in enumerate(workers):
        assert len(list(train(worker, rank, 2, until, done))) == until - done


def rows(workers: list[PsClient]) -> list[str]:
    return [rows_of(worker, rank, 2) for rank, worker in enumerate(workers)]


def save_and_lose(folder: Path, cuts: str) -> None:
    """Train, save while a server is killed, kill all servers, and go back."""
    with (
        LocalServers(folder, 2, cuts=CutDirectory(cuts)) as running,
        ThreadPoolExecutor() as threads,
        ExitStack() as closing,
    ):
        running.wait_whole()

        def connect() -> list[PsClient]:
            access = read_access(running.access)
            made = [PsClient(access, f"worker-{rank}") for rank in (0, 1)]
            return [closing.enter_context(worker) for worker in made]

        workers = connect()
        run_steps(workers, 0, CUT)
        saving = threads.map(lambda worker: worker.save(CUT, 2), workers)
        os.kill(next(iter(running.pids.values())), signal.SIGKILL)  # before, while or after
        assert list(saving) == [None, None]
        before = rows(workers)
        run_steps(workers, CUT, CUT + 5)
        assert rows(workers) != before

        for pid in running.pids.values():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(DataLossError):
            rows(workers)
        workers = connect()
        eventually(lambda: len(running.map.servers) == 2, "new servers")
        with pytest.raises(DataLossError):
            rows(workers)
        assert list(threads.map(lambda worker: worker.restore(None, 2), workers)) == [CUT, CUT]
        assert rows(workers) == before


def test_all_servers_are_killed(place: Place) -> None:
    folder, cuts = place.folder / "run", str(place.folder / "cuts")
    folder.mkdir()
    save_and_lose(folder, cuts)

    # Other workers go on with three servers. They begin with the cut.
    script = (str(PROGRAMS / "train_on_ps.py"), str(folder), str(STEPS), str(CUT))
    serve = ("ps", "serve", "--servers", "3", "--checkpoints", cuts, "--restore", "newest")
    run = place.call("dlrover", *serve, "--", "elastic-run", "--nproc-per-node", "2", *script)
    assert run.returncode == 0, run.stderr
    assert [len(steps(folder, rank)) for rank in (0, 1)] == [STEPS - CUT] * 2
    found = [(folder / f"rows.{rank}").read_text() for rank in (0, 1)]
    assert found == undisturbed(place.folder / "calm", STEPS)
    assert sorted(path.name[:8] for path in Path(cuts).glob("*.json")) == ["step-15.", "step-30."]


def test_each_new_cut_is_exported(place: Place) -> None:
    cuts = place.folder / "cuts"
    with (
        servers(place.folder, cuts=str(cuts)) as access,
        client(access) as worker,
        ExitStack() as closing,
    ):
        run_steps([worker], 0, 1)
        worker.save(1, 1)
        call = ("ps", "export", str(cuts), "--to", str(place.folder / "{step}.pt"), "--every", "1")
        running = place.popen("dlrover", *call)
        closing.callback(running.wait)
        closing.callback(running.terminate)
        eventually((place.folder / "1.pt").exists, "the export of the first cut")
        worker.save(2, 1)
        eventually((place.folder / "2.pt").exists, "the export of the second cut")
        assert running.poll() is None
    assert sorted(one.name for one in place.folder.glob("*.pt")) == ["1.pt", "2.pt"]
