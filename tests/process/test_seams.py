"""Calls that block (a disk, a plug-in) hold up no loop: a hang is planted where each is made."""

import asyncio
import os
import stat
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from dlrover_py.kubernetes import auth, kubeconfig
from dlrover_py.kubernetes.auth import CredentialTiming, KubeconfigAccess, ServiceAccountAccess
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import DEPLOYMENTS, ELASTICJOBS
from dlrover_py.localcluster import cluster as local
from dlrover_py.localcluster.cluster import ClusterTiming, JobPaths, LocalCluster
from dlrover_py.master.core.events import Rules
from dlrover_py.master.journal_store import FileJournalStore
from dlrover_py.master.loop import Loop, PassiveMasterError
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.protocol.agents import AgentReport, Assignment
from dlrover_py.protocol.errors import ExitCode, SupersededError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import WatchEvent
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobPhase
from tests.builders import running
from tests.certificates import issue
from tests.fakes_kube import FakeCluster
from tests.loops import working
from tests.process.harness import Place, alive, document, eventually
from tests.process.test_operator import MASTER, job, operator, until
from tests.process.test_server import report
from tests.unit.test_kube import its_tls, no_longer_good

pytestmark = pytest.mark.process

Told = Assignment | PassiveMasterError | SupersededError


class Hang:
    """Stands in for a call of ours, and returns once the disk answers."""

    def __init__(self) -> None:
        self.begun, self.answers = threading.Event(), threading.Event()

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def hangs(*args: Any, **options: Any) -> Any:
            self.begun.set()
            assert self.answers.wait(60), "what waits for this call has stood still"
            return call(*args, **options)

        return hangs


@pytest.fixture
def hang() -> Iterator[Hang]:
    one = Hang()
    yield one
    one.answers.set()


# --- the master ---


async def exchanged(loop: Loop, seq: int) -> Told:
    """What the master answers to a report."""
    answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
    said = AgentReport.model_validate(report(seq=seq))
    loop.exchange(NodeId("n0"), said, answer.set_result)
    return await asyncio.wait_for(answer, 60)


@pytest.mark.parametrize("call", ["_acquire", "_save"])
async def test_the_exchange_goes_on_while_a_disk_of_the_master_hangs(
    call: str,
    hang: Hang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(FileJournalStore, call, hang.before(getattr(FileJournalStore, call)))
    platform = StaticPlatform(ElasticJob.parse(document(["true"], name="alone")))
    store = FileJournalStore(tmp_path / "journal", save_s=0.05, release_timeout_s=0.05)
    loop = Loop(platform, store, Rules(can_create=False, exchange_s=0.05))
    async with working(loop):
        await until(hang.begun.is_set, "a hang")
        for seq in range(1, 4):
            assert isinstance(await exchanged(loop, seq), PassiveMasterError)
        if call == "_acquire":
            await until(lambda: "passive" in [r.message for r in caplog.records], "words")
            assert "the disk has not answered within 0.05 s" in str(vars(caplog.records[-1]))
        else:
            await until(lambda: loop.journal_error, "words")
            assert loop.journal_error.endswith("the disk has not answered within 0.05 s")
            status = loop.status()
            assert status is not None
            assert ("JournalWritable", "False") in [(c.type, c.status) for c in status.conditions]
            assert loop.silent_s < 30, "it is not taken for dead"
        hang.answers.set()
        async with asyncio.timeout(60):
            while not isinstance(await exchanged(loop, seq := seq + 1), Assignment):
                pass
        assert not loop.journal_error


# --- the operator ---


HASTY = CredentialTiming(reread_timeout_s=0.05)
"""Files that were read once are given up soon."""


@asynccontextmanager
async def by_account(folder: Path) -> AsyncIterator[tuple[FakeCluster, KubeClient]]:
    """A cluster as a Pod sees it."""
    made = issue(folder, "localhost")
    (folder / "ca.crt").write_bytes(made.authority.read_bytes())
    (folder / "token").write_text("admin")
    async with FakeCluster(tls=its_tls(made)) as cluster:
        port = cluster.url.rpartition(":")[2]
        env = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": port}
        async with KubeClient(ServiceAccountAccess(folder, env, HASTY)) as kube:
            yield cluster, kube


@asynccontextmanager
async def by_kubeconfig(folder: Path) -> AsyncIterator[tuple[FakeCluster, KubeClient]]:
    (folder / "token").write_text("admin")
    async with FakeCluster() as cluster:
        config = cluster.kubeconfig(folder / "config", tokenFile="token")
        async with KubeClient(KubeconfigAccess([str(config)], None, HASTY)) as kube:
            yield cluster, kube


SEAMS: dict[str, tuple[Any, Any, str]] = {
    "service account": (by_account, ServiceAccountAccess, "_mounted"),
    "authority": (by_account, auth, "_trust"),
    "token file": (by_kubeconfig, kubeconfig, "known"),
    "authority file": (by_kubeconfig, kubeconfig.ClusterEntry, "authority"),
}


@pytest.mark.parametrize("seam", SEAMS)
async def test_jobs_are_looked_after_while_a_disk_of_the_operator_hangs(
    seam: str,
    hang: Hang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connect, where, call = SEAMS[seam]
    async with connect(tmp_path) as (cluster, kube), operator(kube):
        monkeypatch.setattr(where, call, hang.before(getattr(where, call)))
        if seam == "authority":  # another one, with which the server has no certificate
            with (tmp_path / "ca.crt").open("ab") as file:
                file.write(b"\n")
        no_longer_good(kube)
        cluster.put(ELASTICJOBS, job())
        await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a master")
        assert hang.begun.is_set()
        kept = next(record for record in caplog.records if record.message == "credentials_kept")
        assert "was not read within 0.05 s: its disk does not answer" in str(vars(kept))


PLUGIN = """#!/bin/sh
if [ -e "$0.pid" ]; then echo $$ > "$0.pid"; exec sleep 600; fi
touch "$0.pid"
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
 "status": {"token": "admin", "expirationTimestamp": "%s"}}'
"""


async def test_jobs_are_looked_after_while_a_plugin_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin, soon = tmp_path / "plugin", datetime.now(UTC) + timedelta(seconds=60)
    plugin.write_text(PLUGIN % soon.isoformat())
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    user = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}
    async with FakeCluster() as cluster:
        config = cluster.kubeconfig(tmp_path / "config", exec=user)
        timing = CredentialTiming(plugin_timeout_s=2.0)
        access = KubeconfigAccess([str(config)], None, timing)
        async with KubeClient(access) as kube, operator(kube):
            no_longer_good(kube)
            cluster.put(ELASTICJOBS, job())
            await until(lambda: cluster.one(DEPLOYMENTS, MASTER), "a master")
    assert "credentials_kept" in caplog.text
    with suppress(ValueError):  # it was killed before it had written its number
        pid = int(plugin.with_suffix(".pid").read_text())
        await asyncio.to_thread(eventually, lambda: not alive(pid), "it is killed")
        assert not os.path.exists(f"/proc/{pid}"), "and reaped"


# --- a job on this machine ---


@asynccontextmanager
async def one_job(
    place: Place, *command: str, start_timeout_s: float = 60.0
) -> AsyncIterator[LocalCluster]:
    """A job with one host, and without a master. It waits little for a disk that hangs."""
    cluster = LocalCluster.prepare(
        ElasticJob.model_validate(document(list(command), replicas=1)),
        hosts=1,
        paths=JobPaths(place.folder / "run" / "job", place.folder / "state" / "job"),
        workdir=place.folder,
        environ=place.env,
        timing=ClusterTiming(start_timeout_s=start_timeout_s, read_timeout_s=0.05),
    )
    try:
        yield cluster
        await cluster.shut_down(0.0)
    finally:
        cluster.close()


async def seen(cluster: LocalCluster, kind: str) -> WatchEvent:
    """The first that the master hears of this kind."""
    changes = cast(AsyncGenerator[WatchEvent, None], cluster.watch())
    async with asyncio.timeout(60), aclosing(changes) as watch:
        async for one in watch:
            if one.kind == kind:
                return one
    raise AssertionError(kind)


N0 = NodeId("n0")
SPAWN = local._spawn


async def test_a_node_whose_program_hangs_as_it_is_started_is_told_and_killed_later(
    place: Place, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def spawned(*args: Any) -> Any:
        started.append(SPAWN(*args))
        return started[0]

    monkeypatch.setattr(local, "_spawn", hang.before(spawned))
    async with one_job(place, "sleep", "600", start_timeout_s=0.05) as cluster:
        told = asyncio.create_task(seen(cluster, "ended"))
        await asyncio.sleep(0)
        cluster.create_node(N0)
        one = await told
        assert one.exit_code == 126
        assert one.why == (
            "could not be started: sleep: no answer within 0.05 s from the disk of the program or "
            "of its folder"
        )
        hang.answers.set()
        await until(lambda: started and started[0].poll() is not None, "its end")


async def test_a_request_for_a_node_that_has_ended_is_answered_with_its_whole_end(
    place: Place,
) -> None:
    """A master that had missed the end got it without the exit code, and replaced the node."""
    async with one_job(place, "no-such-program") as cluster:
        cluster.create_node(N0)
        await until(lambda: cluster.nodes[N0].ended, "its end")
        told = asyncio.create_task(seen(cluster, "ended"))
        await asyncio.sleep(0)
        cluster.create_node(N0)
        one = await told
        assert one.exit_code == ExitCode.USAGE
        assert one.why == "could not be started: no-such-program: no such program on the PATH"


async def test_a_node_that_is_deleted_as_it_is_started_does_not_stay(
    place: Place, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_spawn", hang.before(SPAWN))
    async with one_job(place, "sleep", "600") as cluster:
        cluster.create_node(N0)
        await until(hang.begun.is_set, "a hang")
        assert cluster.snapshot().nodes[0].state == "pending"
        cluster.delete_node(N0, 0.0)
        assert cluster.snapshot().nodes[0].state == "ended"
        hang.answers.set()
        node = cluster.nodes[N0]
        await until(lambda: node.process is not None and node.process.poll() is not None, "its end")


async def test_a_node_is_killed_though_a_look_into_proc_hangs(
    place: Place, hang: Hang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "signal_marked", hang.before(local.signal_marked))
    async with one_job(place, "sleep", "600") as cluster:
        cluster.create_node(N0)
        await until(lambda: cluster.nodes[N0].process, "a process")
        told = asyncio.create_task(seen(cluster, "ended"))
        await asyncio.sleep(0)
        await cluster.inject_fault(N0, "kill")
        assert "signals_late" in caplog.text
        assert (await told).why == "host-0 was killed"


@pytest.mark.parametrize("call", ["_keep", "_tail"])
async def test_a_job_ends_though_the_disk_of_its_state_hangs(
    place: Place,
    call: str,
    hang: Hang,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    where: Any = LocalCluster if call == "_keep" else local
    monkeypatch.setattr(where, call, hang.before(getattr(where, call)))
    async with one_job(place, "false") as cluster:
        told = asyncio.create_task(seen(cluster, "ended"))
        await asyncio.sleep(0)
        cluster.create_node(N0)
        if call == "_keep":
            status = running().job.status(0.0, 1.0)
            cluster.take_status(status.model_copy(update={"phase": JobPhase.FAILED}))
            assert cluster.ended.is_set()
        one = await told
        assert (one.why, one.output) == ("its agent exited with code 1", "")
    if call == "_keep":
        assert "status_not_written" in caplog.text
