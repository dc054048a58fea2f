"""``dlrover job run``: the cluster on this machine, from its first process to its last."""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dlrover_py.checkpoint.directory import address
from dlrover_py.cli import runs, view
from dlrover_py.cli.logs import PrintedLine, WorkerOutput
from dlrover_py.cli.progress import ProgressPrinter, Style, line, unbuffered
from dlrover_py.cli.settings import Settings
from dlrover_py.localcluster.cluster import JobPaths, LocalCluster, api
from dlrover_py.net import http_server
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.process.identity import ignores_signal
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobPhase, JobStatus
from dlrover_py.telemetry import setup

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop the job."""
REDRAW_S = 0.25
"""Seconds between two drawings of the live display."""
LAST_OUTPUT_S = 5.0
"""Seconds that the last output may take after a signal. The pipe may have no reader any more."""
_APPENDS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
"""Flags for opening the log of this command."""
Show = Literal["rank0", "all", "none"]
"""The workers whose output is shown while the job runs."""


class ServedPages(Protocol):
    """Pages that are served while the job runs."""

    async def serve(self) -> None:
        """Serve them until :meth:`end`."""

    def end(self) -> None:
        """End the server."""


def run_job(
    job: ElasticJob,
    settings: Settings,
    *,
    hosts: int,
    workdir: Path,
    grace_s: float,
    style: Style,
    show: Show,
    pages: ServedPages | None = None,
) -> int:
    """Run a job until it ends or is stopped, in this process and its children.

    The folders of the run are made; the state folder, which has the logs, stays. Signals in
    ``ENDING`` are blocked while folders and processes are prepared or removed.

    Args:
        job: the job.
        settings: settings of this command.
        hosts: number of simulated hosts.
        workdir: working directory of the nodes.
        grace_s: seconds that nodes get to end when the job is stopped.
        style: form in which progress is shown.
        show: workers whose output is shown.
        pages: pages to serve until the job has ended; None for none.

    Returns:
        The exit code of the command: 0 if the job succeeded, else 128 plus the number of the first
        signal if one stopped it, and 1 otherwise, also after ``dlrover job stop``.

    Raises:
        ConfigError: a job of this name runs already, or the checkpoint directory or a folder cannot
            be used.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint is not None and checkpoint.dir is not None:
        address(checkpoint.dir)  # one error here, instead of one from each worker
    name = job.metadata.name
    stamp = runs.stamp_of(datetime.now().astimezone())
    paths = JobPaths(settings.runtime_root / name, settings.state_root / f"{name}@{stamp}")
    # Signals are blocked until the event loop handles them: what is made here is always removed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        cluster = LocalCluster.prepare(
            job, hosts=hosts, paths=paths, workdir=workdir, environ=settings.environ
        )
        try:
            _log_of(cluster)
            with contextlib.redirect_stdout(unbuffered(sys.stdout)):
                return asyncio.run(_run(cluster, grace_s, style, show, pages))
        finally:
            cluster.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LiveDisplay:
    """A display of the job and of the output of its script.

    One thread reads all logs and does all writing. A disk that hangs, a paused terminal (Ctrl-S) or
    a full pipe must not delay the cluster, or keep this command from its end.
    """

    def __init__(self, cluster: LocalCluster, style: Style, show: Show) -> None:
        self.style = style
        self._cluster, self._show = cluster, show
        self._output = WorkerOutput(cluster.paths.logs, all_ranks=show == "all")
        self._thread = BackgroundThread("display")
        self._console = Console(highlight=False)
        self._terminal = Live(console=self._console, auto_refresh=False, transient=False)
        self._printer = ProgressPrinter(style, since=asyncio.get_running_loop().time())

    @property
    def last_line(self) -> str:
        """The last line that the script of rank 0 has printed; empty if its output is not read."""
        return next((line for line in self._output.last_lines[::-1] if line.strip()), "")

    async def show(self) -> None:
        """Show the job until this coroutine is cancelled. It never returns by itself."""
        await (self._live() if self.style == "live" else self._lines())

    async def end(self, *, last_lines: bool) -> None:
        """Show the end of the job, and wait for that without a limit.

        Args:
            last_lines: whether to print the last lines about it.
        """
        await self._call(partial(self._end, self._cluster.snapshot(), last_lines=last_lines))

    async def _call(self, call: Callable[[], None]) -> None:
        """Have the thread make a call, and wait for it without a limit."""
        await self._thread.run(call, math.inf)

    async def _lines(self) -> None:
        """Print lines about what is new, at each change and every second, until it is canceled."""
        cluster, loop = self._cluster, asyncio.get_running_loop()
        hint = ""
        while True:
            if self.style == "plain" and hint != (hint := _hint(cluster)) and hint:
                await self._call(partial(line, hint))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await cluster.changed.wait()
            cluster.changed.clear()
            await self._call(partial(self._print_news, cluster.status, loop.time()))

    def _print_news(self, status: JobStatus | None, now: float | None) -> None:
        """Print the events, the step and the output that are new; ``now`` is None at the end.

        Runs in the thread. At the end, incomplete lines are printed, too.
        """
        if now is not None:
            self._printer.update(status, now)
        if self._show != "none":
            for printed in self._output.new_lines(status, end=now is None):
                line(printed_line(printed, self.style))
        if now is None:
            self._printer.finish(status)

    async def _live(self) -> None:
        """Draw the live display every ``REDRAW_S`` seconds, until it is canceled."""
        while True:
            await self._call(partial(self._draw, self._cluster.snapshot()))
            await asyncio.sleep(REDRAW_S)

    def _draw(self, snapshot: Snapshot, *, end: bool = False) -> None:
        """Read the new output and draw the live display, or what stays of it at the end.

        Runs in the thread.
        """
        self._terminal.start()  # nothing happens if it was started before
        new_lines = self._output.new_lines(snapshot.status, end=end)
        for printed in new_lines if self._show == "all" else ():
            self._console.print(Text(printed_line(printed, "live")), soft_wrap=True)
        render = self._final_display if end else self._live_display
        self._terminal.update(render(snapshot, self._console.size), refresh=not end)
        if end:
            self._terminal.stop()  # draws the display, even if it is higher than the terminal

    def _end(self, snapshot: Snapshot, *, last_lines: bool) -> None:
        """Show the end of the job, and the last lines about it unless the style is ``json``.

        Runs in the thread.
        """
        if self.style == "live":
            self._draw(snapshot, end=True)
        else:
            self._print_news(snapshot.status, None)
        if last_lines and self.style != "json":
            for text in _last_lines(self._cluster, self.last_line):
                line(text)

    def _live_display(self, snapshot: Snapshot, size: tuple[int, int]) -> RenderableType:
        """Return the live display of the job."""
        pid = snapshot.master_pid
        if snapshot.status is None:
            master = "the master is starting"
        else:
            master = f"pid {pid}" if pid else "not running"
        return view.live_display(
            snapshot.job.metadata.name,
            snapshot.status,
            master,
            output=self._shown_output,
            hint=_hint(self._cluster),
            size=size,
        )

    def _final_display(self, snapshot: Snapshot, size: tuple[int, int]) -> RenderableType:
        """Return the display that stays after the end of the job."""
        return view.final_display(
            snapshot.job.metadata.name, snapshot.status, output=self._shown_output, size=size
        )

    @property
    def _shown_output(self) -> list[str]:
        """The last lines that the script of rank 0 has printed, if they are to be shown."""
        return self._output.last_lines if self._show == "rank0" else []


def _hint(cluster: LocalCluster) -> str:
    """Return the line about what the user can do now; empty once the job has ended."""
    name = cluster.job.metadata.name
    if cluster.status is not None and cluster.status.phase.ended:
        return ""
    if cluster.ending:
        return f"{name} is being stopped; a second Ctrl-C kills its workers immediately"
    return f"in another terminal: dlrover job describe|why|logs -f {name}; Ctrl-C stops the job"


def printed_line(printed: PrintedLine, style: Style) -> str:
    """Return a line that a worker has printed, with its origin."""
    if style == "json":
        return json.dumps({"output": asdict(printed)})
    origin = f"{printed.node} rank {printed.rank}{' err' if printed.stream == 'stderr' else ''}"
    return f"[{origin}] {view.output_line(printed.line)}"


def _log_of(cluster: LocalCluster) -> None:
    """Set up the log of this command, which a thread writes to ``cluster.log`` in the job's folder.

    The descriptor stays open for that thread.
    """
    log_file = os.open(cluster.paths.logs / "cluster.log", _APPENDS, 0o666)
    with open(log_file, "a", closefd=False) as stream:
        setup("cluster", stream=stream, aside=True, job=cluster.job.metadata.name)


async def _run(
    cluster: LocalCluster, grace_s: float, style: Style, show: Show, pages: ServedPages | None
) -> int:
    """Run the cluster until the job ends or is stopped, and shut it down; return the exit code.

    The first signal begins the shutdown with its grace period, and a second one ends that period.
    If the master or the API server of the cluster fails, the job ends, and the error is raised
    last.
    """
    loop = asyncio.get_running_loop()
    interrupts: list[int] = []
    at_once, interrupt = asyncio.Event(), asyncio.Event()

    def interrupted(number: int) -> None:
        interrupts.append(number)
        interrupt.set()
        cluster.ended.set()
        if len(interrupts) > 1:
            at_once.set()

    for number in ENDING:
        if not ignores_signal(number):
            loop.add_signal_handler(number, interrupted, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    display = LiveDisplay(cluster, style, show)
    servers = [http_server.server(api(cluster))]
    serving = asyncio.create_task(servers[0].serve([cluster.listener()]))
    more: list[asyncio.Task[None]] = []

    def serve(listener: socket.socket) -> None:
        servers.append(http_server.server(api(cluster)))
        more.append(asyncio.create_task(servers[-1].serve([listener])))

    more.append(asyncio.create_task(cluster.folder.keep(serve)))
    master = asyncio.create_task(cluster.run_master())
    showing = asyncio.create_task(display.show())
    viewed = asyncio.create_task(pages.serve()) if pages is not None else None
    failed: BaseException | None = None
    ended = asyncio.create_task(cluster.ended.wait())
    done, _ = await asyncio.wait({ended, master, serving}, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {ended}:
        failed = task.exception()
    if cluster.status is not None and cluster.status.phase.ended and not interrupts:
        grace_s = max(grace_s, 1.0)
    failure = "" if failed is None else str(failed)
    closing = asyncio.create_task(cluster.shut_down(grace_s, failure))
    hurry = asyncio.create_task(at_once.wait())
    await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await cluster.shut_down(0.0, failure)
    elif failed is None:
        failed = closing.exception()
    hurry.cancel()
    ended.cancel()
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    interrupt.clear()
    ending = asyncio.create_task(display.end(last_lines=failed is None))
    hurry = asyncio.create_task(interrupt.wait())
    # The output of a job that has ended by itself is waited for, until a signal.
    patience_s = LAST_OUTPUT_S / len(interrupts) if interrupts else None
    await asyncio.wait({ending, hurry}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (ending, hurry):
        task.cancel()
    await asyncio.gather(ending, hurry, return_exceptions=True)
    if pages is not None and viewed is not None:  # first: pages that are open read the job's end
        pages.end()
        await asyncio.gather(viewed, return_exceptions=True)
    more[0].cancel()
    for server in servers:
        server.end()
    master.cancel()
    await asyncio.gather(serving, master, *more, return_exceptions=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    if failed is not None:
        raise failed
    return _exit_code(cluster, interrupts)


def _last_lines(cluster: LocalCluster, last_output: str) -> Iterator[str]:
    """Yield the last lines about the job.

    If no end was published, the first of them says only that it was stopped.

    Args:
        cluster: the cluster.
        last_output: the last line that the script has printed.
    """
    status, name = cluster.status, cluster.job.metadata.name
    if status is None or not status.phase.ended:
        yield f"{name} was stopped"
    else:
        yield from view.closing_lines(status, last_output)
    yield f"logs: {cluster.paths.logs}"
    yield f"report: dlrover job report {name} > {name}.html"


def _exit_code(cluster: LocalCluster, interrupts: list[int]) -> int:
    """Return the exit code of the command, after these signals.

    It is 0 only if the job succeeded: `dlrover job run job.yaml && publish` must not publish a
    model whose training was stopped. After a signal it is 128 plus the number of the first one,
    and 1 for any other end.
    """
    if cluster.status is not None and cluster.status.phase is JobPhase.SUCCEEDED:
        return ExitCode.OK
    return 128 + interrupts[0] if interrupts else ExitCode.FAILED
