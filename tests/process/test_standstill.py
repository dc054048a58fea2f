"""Helpers of ours that somebody has stopped (SIGSTOP): everything ends all the same."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from dlrover_agent import loop
from dlrover_agent.endpoint import Endpoint, OwnMaster
from dlrover_agent.workers import _minds
from dlrover_py import attend, web
from dlrover_py.local import Cluster, Paths, api
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.rpc import Client
from dlrover_py.trainer import alone
from dlrover_py.trainer.alone import Memory, Persister
from tests.process.harness import Place, alive, document, eventually
from tests.slots import order

WORKER = """
    import sys
    print("ready", flush=True)
    sys.stdin.readline()
"""

AGENT = """
    import sys
    from pathlib import Path
    from dlrover_agent.loop import Guardian
    print(Guardian(None, [Path(sys.argv[1])]).pid, flush=True)
    sys.stdin.read()
"""

DONE = """
import json, sys
for line in sys.stdin:
    if line == "\\n":
        break
    answer = {"kind": "answer", "attempt": json.loads(line)["attempt"], "phase": "done"}
    print(json.dumps(answer), flush=True)
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
    (guardian,) = [c.pid for c in children if any("guardian.py" in a for a in c.cmdline())]
    return process, guardian


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
    place.script(AGENT)
    agent = subprocess.Popen(
        (sys.executable, str(place.folder / "train.py"), str(folder)),
        env=place.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    guardian = int(agent.stdout.readline())
    eventually(lambda: _minds(guardian, signal.SIGTERM), "it is ready")
    os.kill(guardian, signal.SIGSTOP)
    agent.kill()
    agent.communicate()
    eventually(lambda: not alive(guardian), "it has ended")
    assert not folder.exists()


def test_a_guardian_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "DISMISSED_S", 0.01)
    folder = tmp_path / "scratch"
    folder.mkdir()
    guardian = loop.Guardian(None, [folder])
    held = os.dup(guardian._pipe)
    guardian.dismiss()
    os.close(held)
    assert not alive(guardian.pid)
    assert not folder.exists()


def test_a_guardian_that_does_not_read_holds_nobody_up() -> None:
    guardian = loop.Guardian(None, [])
    os.kill(guardian.pid, signal.SIGSTOP)
    for _ in range(1 << 16):
        guardian.tell("+1")
    eventually(lambda: guardian.ended, "it is killed, so that another one takes its place")
    guardian.dismiss()


@contextlib.asynccontextmanager
async def master_of_elastic_run(place: Place) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    with OwnMaster(Endpoint("job")) as master:
        keeping = asyncio.create_task(master.keep(set()))
        yield master._health, lambda: master._process.pid
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@contextlib.asynccontextmanager
async def master_of_job_run(place: Place) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    cluster = Cluster.prepare(
        ElasticJob.model_validate(document(["true"], replicas=1)),
        hosts=0,
        paths=Paths(place.folder / "run" / "job", place.folder / "state" / "job"),
        workdir=place.folder,
        environ=place.env,
    )
    server = web.server(api(cluster))
    serving = asyncio.create_task(server.serve([cluster.door()]))
    keeping = asyncio.create_task(cluster.keep_master())
    yield cluster.health_addr, lambda: cluster.master.pid if cluster.master is not None else 0
    await cluster.shut_down(0.0)
    server.should_exit = True
    await asyncio.gather(serving, keeping)
    cluster.close()


@pytest.mark.parametrize("ours", [master_of_elastic_run, master_of_job_run])
async def test_a_master_of_ours_that_is_stopped_is_replaced(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    ours: "Callable[[Place], AbstractAsyncContextManager[tuple[str, Callable[[], int]]]]",
) -> None:
    monkeypatch.setattr(attend, "PROBE_S", 0.5)
    monkeypatch.setattr(attend, "STARTS_S", 30.0)
    async with ours(place) as (address, pid):
        health = Client(address)
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


def test_memory_is_given_back_though_its_guard_is_stopped(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "job", "n0")
    os.kill(memory._guard.pid, signal.SIGSTOP)
    memory.close()
    assert not memory.path.exists()
    assert memory._guard.returncode == 0


def test_a_persister_that_is_stopped_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "WAKE_S", 0.1)
    persister = Persister(lambda answer: None, (sys.executable, "-c", DONE))
    persister.order(order(tmp_path, tmp_path, "first"))
    assert persister.wait(60)
    assert persister._process is not None
    pid = persister._process.pid
    for attempt in ("second", "third"):
        os.kill(pid, signal.SIGSTOP)
        persister.order(order(tmp_path, tmp_path, attempt))
        assert persister.wait(60)
    os.kill(pid, signal.SIGSTOP)
    persister.close()
    assert persister._process.returncode == 0
