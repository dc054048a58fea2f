"""``dlrover job run``: the cluster on this machine, from its first process to the last."""

import asyncio
import contextlib
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dlrover_py import web
from dlrover_py.cli import view
from dlrover_py.cli.logs import Output, Printed
from dlrover_py.cli.screen import News, Style, line
from dlrover_py.cli.settings import Settings
from dlrover_py.local import Cluster, Paths, api
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobPhase, JobStatus
from dlrover_py.storage import address
from dlrover_py.telemetry import setup

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REDRAW_S = 0.25
Show = Literal["rank0", "all", "none"]
"""Whose output is shown while the job runs."""


def run_job(
    job: ElasticJob,
    settings: Settings,
    *,
    hosts: int,
    workdir: Path,
    grace_s: float,
    style: Style,
    show: Show,
) -> int:
    """Run a job until it ends or is stopped.

    Args:
        job: what is wished.
        settings: of this command.
        hosts: simulated ones.
        workdir: of the nodes.
        grace_s: for nodes to end when the job is stopped, in seconds.
        style: how it is shown.
        show: whose output is shown.

    Returns:
        The exit code of the command.

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
            return asyncio.run(_run(cluster, grace_s, Screen(cluster, style, show)))
        finally:
            cluster.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Screen:
    """Shows the job and what its script prints, until it is cancelled.

    All reading of logs and all writing is done by one thread: a disk that hangs, a terminal that
    is held (Ctrl-S) or a full pipe must not hold up the cluster.
    """

    def __init__(self, cluster: Cluster, style: Style, show: Show) -> None:
        self.style = style
        self._cluster, self._show = cluster, show
        self._output = Output(cluster.paths.logs, all_ranks=show == "all")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="screen")

    @property
    def last_line(self) -> str:
        """The last line that the script of rank 0 has printed, if it was looked for."""
        return next((said for said in self._output.last_lines[::-1] if said.strip()), "")

    async def show(self) -> None:
        """Show what there is, again and again."""
        await (self._live() if self.style == "live" else self._lines())

    async def _lines(self) -> None:
        cluster, loop = self._cluster, asyncio.get_running_loop()
        if self.style == "plain":
            await loop.run_in_executor(self._thread, line, _hint(cluster))
        news = News(self.style, since=loop.time())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await cluster.changed.wait()
                cluster.changed.clear()
                now, status = loop.time(), cluster.status
                await loop.run_in_executor(self._thread, self._tell, news, status, now)
        finally:
            await loop.run_in_executor(self._thread, self._tell, news, cluster.status, None)

    def _tell(self, news: News, status: JobStatus | None, now: float | None) -> None:
        if now is not None:
            news.tell(status, now)
        if self._show != "none":
            for printed in self._output.fresh(status, end=now is None):
                line(printed_line(printed, self.style))
        if now is None:
            news.end(status)

    async def _live(self) -> None:
        loop, console = asyncio.get_running_loop(), Console(highlight=False)
        with Live(console=console, auto_refresh=False, transient=False) as screen:

            def draw(snapshot: Snapshot, *, end: bool = False) -> None:
                fresh = self._output.fresh(snapshot.status, end=end)
                for printed in fresh if self._show == "all" else ():
                    console.print(Text(printed_line(printed, "live")), soft_wrap=True)
                screen.update(self._picture(snapshot, console.size, end=end), refresh=True)

            try:
                while True:
                    await loop.run_in_executor(self._thread, draw, self._cluster.snapshot())
                    await asyncio.sleep(REDRAW_S)
            finally:
                last = partial(draw, self._cluster.snapshot(), end=True)
                await loop.run_in_executor(self._thread, last)

    def _picture(self, snapshot: Snapshot, size: tuple[int, int], *, end: bool) -> RenderableType:
        pid = snapshot.master_pid
        if snapshot.status is None:
            master = "the master is starting"
        else:
            master = f"pid {pid}" if pid else "away"
        return view.live(
            snapshot.job.metadata.name,
            snapshot.status,
            master,
            output=self._output.last_lines if self._show == "rank0" else (),
            hint="" if end else _hint(self._cluster),
            size=size,
        )


def _hint(cluster: Cluster) -> str:
    name = cluster.job.metadata.name
    return f"in another terminal: dlrover job describe|why|logs -f {name}; Ctrl-C stops the job"


def printed_line(printed: Printed, style: Style) -> str:
    """What a worker has printed, with where it comes from."""
    if style == "json":
        return json.dumps({"output": asdict(printed)})
    origin = f"{printed.node} rank {printed.rank}{' err' if printed.stream == 'stderr' else ''}"
    return f"[{origin}] {view.output_line(printed.line)}"


async def _run(cluster: Cluster, grace_s: float, screen: Screen) -> int:
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
    showing = asyncio.create_task(screen.show())
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
    return _farewell(cluster, screen, interrupts)


def _farewell(cluster: Cluster, screen: Screen, interrupts: list[int]) -> int:
    status = cluster.status
    name = cluster.job.metadata.name
    phase = status.phase if status is not None else JobPhase.PENDING
    if screen.style != "json":
        if status is None or not phase.ended:
            line(f"{name} was stopped")
        else:
            for words in view.farewell(status, screen.last_line):
                line(words)
        line(f"logs: {cluster.paths.logs}")
        line(f"a page of this run: dlrover job report {name} > {name}.html")
    if interrupts and phase is not JobPhase.SUCCEEDED:
        return 128 + interrupts[0]
    return 1 if phase is JobPhase.FAILED else 0
