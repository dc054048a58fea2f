"""``dlrover job run``: the cluster on this machine, from its first process to the last."""

import asyncio
import contextlib
import signal
from datetime import datetime
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from dlrover_py import web
from dlrover_py.cli import view
from dlrover_py.cli.screen import News, Style, line
from dlrover_py.cli.settings import Settings
from dlrover_py.local import Cluster, Paths, api
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import JobPhase
from dlrover_py.storage import address
from dlrover_py.telemetry import setup

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REDRAW_S = 0.25


def run_job(
    job: ElasticJob, settings: Settings, *, hosts: int, workdir: Path, grace_s: float, style: Style
) -> int:
    """Run a job until it ends or is stopped; return the exit code of the command.

    Raises:
        ConfigError: its checkpoint directory, or a folder of this user, cannot be used.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint is not None and checkpoint.dir is not None:
        address(checkpoint.dir)  # before each worker says it
    name = job.metadata.name
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S.%f")[:-3]
    paths = Paths(settings.runtime_root / name, settings.state_root / f"{name}@{stamp}")
    # What is made here is also unmade: signals wait until the loop takes them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        cluster = Cluster.prepare(
            job, hosts=hosts, paths=paths, workdir=workdir, environ=settings.environ
        )
        try:
            return asyncio.run(_run(cluster, grace_s, style))
        finally:
            cluster.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _run(cluster: Cluster, grace_s: float, style: Style) -> int:
    log_file = (cluster.paths.logs / "cluster.log").open("a")
    setup("cluster", stream=log_file, job=cluster.job.metadata.name)
    loop = asyncio.get_running_loop()
    interrupts: list[int] = []
    at_once = asyncio.Event()

    def interrupted(number: int) -> None:
        interrupts.append(number)
        cluster.ended.set()
        if len(interrupts) > 1:
            at_once.set()

    for number in ENDING:
        loop.add_signal_handler(number, interrupted, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    server = web.server(api(cluster))
    serving = asyncio.create_task(server.serve([cluster.door()]))
    master = asyncio.create_task(cluster.keep_master())
    showing = asyncio.create_task(_show(cluster, style))
    failed: BaseException | None = None
    ended = asyncio.create_task(cluster.ended.wait())
    done, _ = await asyncio.wait({ended, master, serving}, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {ended}:
        failed = task.exception()
    if cluster.status is not None and cluster.status.phase.ended and not interrupts:
        grace_s = max(grace_s, 1.0)
    closing = asyncio.create_task(cluster.shut_down(grace_s))
    hurry = asyncio.create_task(at_once.wait())
    await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await cluster.shut_down(0.0)
    hurry.cancel()
    ended.cancel()
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    server.should_exit = True
    master.cancel()
    await asyncio.gather(serving, master, return_exceptions=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    with contextlib.suppress(OSError):  # the disk is full: its last lines are lost
        log_file.close()
    if failed is not None:
        raise failed
    return _farewell(cluster, style, interrupts)


def _farewell(cluster: Cluster, style: Style, interrupts: list[int]) -> int:
    status = cluster.status
    name = cluster.job.metadata.name
    phase = status.phase if status is not None else JobPhase.PENDING
    if style != "json" and not phase.ended:
        line(f"{name} was stopped; its logs are in {cluster.paths.logs}")
    elif style != "json" and status is not None:
        for words in view.farewell(status):
            line(words)
        line(f"logs: {cluster.paths.logs}")
    if interrupts and phase is not JobPhase.SUCCEEDED:
        return 128 + interrupts[0]
    return 1 if phase is JobPhase.FAILED else 0


async def _show(cluster: Cluster, style: Style) -> None:
    if style == "live":
        await _show_live(cluster)
        return
    loop = asyncio.get_running_loop()
    news = News(style, since=loop.time())
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await cluster.changed.wait()
            cluster.changed.clear()
            news.tell(cluster.status, loop.time())
    finally:
        news.end(cluster.status)


def _picture(cluster: Cluster) -> RenderableType:
    snapshot = cluster.snapshot()
    pid = snapshot.master_pid
    if snapshot.status is None:
        master = "the master is starting"
    else:
        master = f"pid {pid}" if pid else "away"
    return view.live(cluster.job.metadata.name, snapshot.status, master)


async def _show_live(cluster: Cluster) -> None:
    with Live(console=Console(), auto_refresh=False, transient=False) as screen:
        try:
            while True:
                # In a thread: a terminal that takes nothing (Ctrl-S) must not hold up the cluster.
                await asyncio.to_thread(screen.update, _picture(cluster), refresh=True)
                await asyncio.sleep(REDRAW_S)
        finally:
            screen.update(_picture(cluster), refresh=True)
