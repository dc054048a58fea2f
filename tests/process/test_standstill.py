"""Helpers of ours that somebody has stopped (SIGSTOP): everything ends all the same."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from dlrover_agent import reaper_client
from dlrover_agent.standalone import Endpoint, OwnMaster
from dlrover_py.localcluster.cluster import ClusterTiming, JobPaths, LocalCluster, api
from dlrover_py.net import http_server
from dlrover_py.net.http_client import HttpClient
from dlrover_py.net.liveness import ProbeTiming, RestartPause
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reaper import SessionChange
from dlrover_py.trainer.standalone import StandaloneMemory, StandalonePersister
from tests.process.harness import Place, alive, document, eventually
from tests.programs import PROGRAMS
from tests.slots import order

WORKER = """
    import sys
    print("ready", flush=True)
    sys.stdin.readline()
"""


def started(place: Place) -> "tuple[subprocess.Popen[str], int]":
    """An elastic-run whose worker runs until its standard input has a line, and its guardian."""
    place.script(WORKER)
    process = place.popen(
        *("elastic-run", "--standalone", "train.py"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children()
    (guardian,) = [c.pid for c in children if any("reaper.py" in a for a in c.cmdline())]
    return process, guardian


def blocked_signals(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("SigBlk"))


def test_master_and_workers_of_elastic_run_block_no_signal(place: Place) -> None:
    process, reaper = started(place)
    children = [child.pid for child in psutil.Process(process.pid).children()]
    masks = {blocked_signals(pid) for pid in children if pid != reaper}
    process.communicate("go on\n", timeout=60)
    assert len(children) == 3, "master, worker and reaper"
    assert masks == {blocked_signals(os.getpid())}


def test_a_killed_guardian_costs_the_training_nothing(place: Place) -> None:
    """Its work was done at once, as if the agent had ended: the workers were killed."""
    process, first = started(place)
    os.kill(first, signal.SIGKILL)

    def another() -> list[int]:
        found = []
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # also a zombie, as the first one is
                if any("reaper.py" in a for a in child.cmdline()) and child.num_threads():
                    found.append(child.pid)
        return [pid for pid in found if pid != first]

    (second,) = eventually(another, "another guardian")
    ready = blocked_signals(os.getpid())
    eventually(lambda: blocked_signals(second) == ready, "it is ready")
    output, _ = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0, output


@pytest.mark.parametrize("signalled", [False, True])
def test_elastic_run_ends_though_its_guardian_is_stopped(place: Place, signalled: bool) -> None:
    process, guardian = started(place)
    os.kill(guardian, signal.SIGSTOP)
    if signalled:
        process.terminate()
    process.communicate("" if signalled else "go on\n", timeout=30)
    assert process.returncode == int(signalled)
    assert not alive(guardian)
    assert not list(Path("/tmp").glob(f"dlrover-*{process.pid}-*"))


def test_a_guardian_that_is_stopped_cleans_up_after_an_agent_that_is_killed(
    place: Place,
) -> None:
    folder = place.folder / "scratch"
    folder.mkdir()
    place.script(PROGRAMS / "start_a_reaper.py")
    agent = subprocess.Popen(
        (sys.executable, str(place.folder / "train.py"), str(folder)),
        env=place.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    guardian = int(agent.stdout.readline())
    # It unblocks its signals when it is ready, after it has asked to be continued by the kernel.
    ready = blocked_signals(os.getpid())
    eventually(lambda: blocked_signals(guardian) == ready, "it is ready")
    os.kill(guardian, signal.SIGSTOP)
    agent.kill()
    agent.communicate()
    eventually(lambda: not alive(guardian), "it has ended")
    assert not folder.exists()


def test_a_guardian_that_does_not_end_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    guardian = reaper_client.ReaperClient(None, [folder])
    held = os.dup(guardian._pipe)
    guardian.dismiss(timeout_s=0.01)
    os.close(held)
    assert not alive(guardian.pid)
    assert not folder.exists()


def test_a_guardian_that_was_killed_before_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    guardian = reaper_client.ReaperClient(None, [folder])
    os.kill(guardian.pid, signal.SIGKILL)
    eventually(lambda: guardian.ended, "it has ended")
    guardian.dismiss()
    assert not folder.exists()


def test_a_guardian_that_does_not_read_holds_nobody_up() -> None:
    guardian = reaper_client.ReaperClient(None, [])
    os.kill(guardian.pid, signal.SIGSTOP)
    for _ in range(1 << 16):
        guardian.send(SessionChange(True, 1 << 22, 0))
    eventually(lambda: guardian.ended, "it is killed, so that another one takes its place")
    guardian.dismiss()


@contextlib.asynccontextmanager
async def master_of_elastic_run(
    place: Place, probes: ProbeTiming
) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    with OwnMaster(Endpoint("job"), probes=probes) as master:
        keeping = asyncio.create_task(master.keep(set()))
        yield master._health, lambda: master._process.pid
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@contextlib.asynccontextmanager
async def master_of_job_run(
    place: Place, probes: ProbeTiming
) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    cluster = LocalCluster.prepare(
        ElasticJob.model_validate(document(["true"], replicas=1)),
        hosts=0,
        paths=JobPaths(place.folder / "run" / "job", place.folder / "state" / "job"),
        workdir=place.folder,
        environ=place.env,
        timing=ClusterTiming(probes=probes),
    )
    server = http_server.server(api(cluster))
    serving = asyncio.create_task(server.serve([cluster.listener()]))
    keeping = asyncio.create_task(cluster.run_master())
    yield cluster.health_addr, lambda: cluster.master.pid if cluster.master is not None else 0
    await cluster.shut_down(0.0)
    server.end()
    await asyncio.gather(serving, keeping)
    cluster.close()


RunningMaster = Callable[
    [Place, ProbeTiming], AbstractAsyncContextManager[tuple[str, Callable[[], int]]]
]
"""Starts a master, and returns the address of its health endpoint and a function for its pid."""


@pytest.mark.parametrize("ours", [master_of_elastic_run, master_of_job_run])
async def test_a_master_of_ours_that_is_stopped_is_replaced(
    place: Place, ours: RunningMaster
) -> None:
    probes = ProbeTiming(probe_interval_s=0.5, first_answer_timeout_s=30.0)
    async with ours(place, probes) as (address, pid):
        health = HttpClient(address)
        for _ in range(10):  # then the one who watches has been answered too
            await health.call("GET", "/healthz", deadline_s=60)
        first = pid()
        os.kill(first, signal.SIGSTOP)
        async with asyncio.timeout(90):
            while pid() == first:
                await asyncio.sleep(0.02)
        assert not alive(first)
        await health.call("GET", "/healthz", deadline_s=60)
        health.close()


async def test_a_master_whose_token_file_cannot_be_written_is_tried_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A cleaner has emptied /tmp, and the disk is full. The training ended."""
    probes = ProbeTiming(stable_after_s=0.0)
    async with master_of_elastic_run(place, probes) as (address, pid), asyncio.timeout(90):
        health = HttpClient(address)
        await health.call("GET", "/healthz", deadline_s=60)
        (folder,) = Path(tempfile.gettempdir()).glob(f"dlrover-run-{os.getpid()}-*")
        folder.rename(place.folder / "cleaned")
        folder.touch()  # nothing can be written into it
        first = pid()
        os.kill(first, signal.SIGKILL)
        while "master_not_started" not in caplog.messages:
            await asyncio.sleep(0.02)
        folder.unlink()
        while pid() == first:
            await asyncio.sleep(0.02)
        await health.call("GET", "/healthz", deadline_s=60)
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        health.close()


async def test_a_master_of_job_run_that_cannot_be_started_for_a_while_is_started_later(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async with master_of_job_run(place, ProbeTiming()) as (_, pid), asyncio.timeout(60):
        while not (first := pid()):
            await asyncio.sleep(0.02)
        place.env["TOO_LONG"] = "x" * (1 << 18)  # for the system: no process starts with it
        os.kill(first, signal.SIGKILL)
        while "master_not_started" not in caplog.text:
            await asyncio.sleep(0.02)
        del place.env["TOO_LONG"]
        while pid() == first:
            await asyncio.sleep(0.02)
        assert alive(pid())


@pytest.mark.parametrize("ours", [master_of_elastic_run, master_of_job_run])
async def test_the_pause_before_a_restart_is_short_again_after_a_master_that_lasted(
    place: Place, caplog: pytest.LogCaptureFixture, ours: RunningMaster
) -> None:
    pids, probes = {0}, ProbeTiming(stable_after_s=0.0)  # each master has lasted
    async with ours(place, probes) as (_, pid), asyncio.timeout(90):
        while len(pids) < 6:
            if pid() not in pids:
                pids.add(pid())
                os.kill(pid(), signal.SIGKILL)
            await asyncio.sleep(0.02)
        while pid() in pids:
            await asyncio.sleep(0.02)
    ends = [record for record in caplog.records if record.message == "master_ended"]
    assert [vars(record)["again_after_s"] for record in ends[:5]] == [0.0] * 5


def test_the_pause_before_a_restart_grows_while_masters_do_not_last() -> None:
    pause = RestartPause()
    assert [pause.next_s(1.0) for _ in range(7)] == [0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 5.0]
    assert [pause.next_s(60.0), pause.next_s(0.0)] == [0.0, 0.1]


def test_memory_is_given_back_though_its_guard_is_stopped(tmp_path: Path) -> None:
    memory = StandaloneMemory(tmp_path, "job", "n0")
    guard = memory._cleanup_shell
    os.kill(guard.pid, signal.SIGSTOP)
    memory.close()
    assert not memory.path.exists()
    assert guard.returncode == 0


def test_a_persister_that_is_stopped_is_woken(tmp_path: Path) -> None:
    argv = (sys.executable, str(PROGRAMS / "persister.py"), "done")
    persister = StandalonePersister(lambda answer: None, argv, wake_interval_s=0.1)
    persister.order(order(tmp_path, tmp_path, "first"))
    assert persister.wait(60)
    process = persister._process
    assert process is not None
    for attempt in ("second", "third"):
        os.kill(process.pid, signal.SIGSTOP)
        persister.order(order(tmp_path, tmp_path, attempt))
        assert persister.wait(60)
    os.kill(process.pid, signal.SIGSTOP)
    persister.close()
    assert process.returncode == 0
