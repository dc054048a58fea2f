"""``dlrover dashboard``: the jobs of this machine, or of a cluster, as pages for a browser."""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence

import click

from dlrover_py.cli import view
from dlrover_py.cli.jobs import Jobs, NamedJob
from dlrover_py.cli.settings import DASHBOARD_PORT
from dlrover_py.dashboard import server
from dlrover_py.net import http_server
from dlrover_py.protocol import names
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job_view import JobView, LogTail
from dlrover_py.protocol.local import History
from dlrover_py.protocol.status import EvidenceManifest

RUNS_SHOWN = 20
"""Most runs of a job that its page names."""
SAMPLES_KEPT, HISTORIES_KEPT = 1000, 50
"""Most samples of a job of a cluster that are kept while its page is open; most such jobs."""
STORE_S = 10.0
"""Seconds that a page waits for a checkpoint. A longer write goes on, and is shown."""
POLL_S, CLUSTER_POLL_S = 1.0, 3.0
"""Seconds between two looks at a job that somebody watches."""


class JobPages:
    """The jobs of one user for the pages: :class:`server.ShownJobs`."""

    def __init__(self, jobs: Jobs) -> None:
        # A page stays open when its job has ended. A job of a cluster may have the same name.
        self._jobs = jobs.of_one_place()
        self._histories: dict[str, tuple[float, History]] = {}
        """The start of the run and what was seen of it, for jobs of a cluster, which keeps none."""

    @property
    def where(self) -> str:
        """The place of the jobs, in words."""
        return self._jobs.where

    @property
    def can_drain(self) -> bool:
        """Whether a page can drain a node."""
        return not self._jobs.in_cluster

    def rows(self) -> Sequence[view.JobRow]:
        """Return the jobs, each name once: running ones, and the newest runs that have ended.

        Raises:
            ConfigError: the folders of the jobs are not safe, or no cluster is configured.
            DLRoverError: the cluster does not answer.
        """
        return self._jobs.list(each_name_once=True)

    def runs(self, name: str) -> Sequence[str]:
        """Return the names of the newest runs of a job, newest first.

        Raises:
            ConfigError: the folders of the jobs are not safe.
        """
        return self._jobs.runs(name)[:RUNS_SHOWN]

    def load(self, name: str) -> tuple[JobView, History]:
        """Return what is known of a job, and its history: in a cluster, what was seen of it here.

        Raises:
            ConfigError: there is no such job.
            DLRoverError: the job's cluster refuses a call, or does not answer.
        """
        found, history = NamedJob(self._jobs, name).view_and_history()
        if not self._jobs.in_cluster or found.status is None:
            return found, history
        start = found.status.started_at
        run, seen = self._histories.pop(name, (start, History(partial=True)))
        seen = (seen if run == start else History(partial=True)).with_sample(
            found.status, SAMPLES_KEPT
        )
        self._histories[name] = start, seen
        for oldest in [*self._histories][:-HISTORIES_KEPT]:
            self._histories.pop(oldest, None)
        return found, seen

    def change(self, name: str, action: str, value: str) -> str:
        """Do what a page asks for; return a sentence about the new state.

        Args:
            name: name of the job.
            action: one of :data:`server.ACTIONS`.
            value: what the form says.

        Raises:
            ConfigError: there is no such job, or the value does not fit the action.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """
        job = NamedJob(self._jobs, name)
        if action == "scale":
            if not (value.isascii() and value.isdigit() and 1 <= int(value) <= names.MAX_COUNT):
                raise ConfigError(f"found {value!r} nodes, expected a number from 1")
            return job.scale(int(value))
        if action == "drain":
            return job.drain(value)
        simple: dict[str, Callable[[], str]] = {
            "suspend": job.suspend,
            "resume": job.resume,
            "restart": job.restart,
            "stacks": job.take_stacks,
            "checkpoint": lambda: _stored(job),
        }
        return simple[action]()

    def log_tail(self, name: str, node: str, rank: int | None) -> LogTail:
        """Return the newest lines that a node's workers have printed.

        Args:
            name: name of the job.
            node: id of the node.
            rank: the only global rank; None for all of the node.

        Raises:
            ConfigError: there is no such job.
            DLRoverError: the job's cluster refuses a call, or does not answer.
        """
        return NamedJob(self._jobs, name).log_tail(node, rank)

    def evidence(
        self, name: str, node: str
    ) -> tuple[Sequence[EvidenceManifest], NodeSnapshot | None]:
        """Return the bundles of evidence, the oldest first, and the newest stacks of a node.

        Raises:
            ConfigError: there is no such job.
            DLRoverError: the job's cluster refuses a call, or does not answer.
        """
        return NamedJob(self._jobs, name).evidence(node)


def _stored(job: NamedJob) -> str:
    """Have the newest checkpoint stored; return a sentence, also if it takes longer."""
    try:
        return job.checkpoint(STORE_S)
    except TimeoutError:
        return f"{job.name}: the checkpoint is being stored; the answer is shown at Checkpoints"


def listening_socket(host: str, port: int | None) -> socket.socket:
    """Return a listening socket on a loopback address.

    Args:
        host: address to listen on.
        port: port; None for :data:`DASHBOARD_PORT`, or any free one if that is taken.

    Raises:
        ConfigError: the address cannot be used, or the port is taken.
    """
    for wanted in (DASHBOARD_PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((host, wanted), backlog=128)
        except OSError as error:
            problem = error
    raise ConfigError(f"{host}:{port}: {problem.strerror or problem}; choose another --port")


class Pages:
    """The dashboard's server, with its secrets. It begins with :meth:`serve`."""

    def __init__(self, jobs: Jobs, name: str | None, listener: socket.socket) -> None:
        """Draw the secrets; nothing is served yet.

        Args:
            jobs: the jobs that are shown.
            name: job whose page the link opens; None for the list of jobs.
            listener: the listening socket.
        """
        access = server.Access()
        poll_s = CLUSTER_POLL_S if jobs.in_cluster else POLL_S
        self._pages = server.Dashboard(JobPages(jobs), access, view.now, poll_s=poll_s)
        self._listener = listener
        self._server = http_server.server(self._pages.asgi, header_s=10.0)
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        then = f"&job={name}" if name is not None else ""
        self.link = f"http://{host}:{port}/enter?token={access.token}{then}"

    async def serve(self) -> None:
        """Serve until :meth:`end`."""
        await self._server.serve(sockets=[self._listener])

    def end(self) -> None:
        """End the server. A page that is open gets the end of its stream."""
        self._server.end()
        self._pages.close()


def serve(pages: Pages) -> None:
    """Print the dashboard's link, and serve it until SIGINT or SIGTERM, in the main thread."""
    click.echo(f"the dashboard is at {pages.link}")
    click.echo("it shows the jobs for as long as this command runs; end it with Ctrl-C", err=True)

    async def until_interrupted() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, pages.end)
        await pages.serve()

    asyncio.run(until_interrupted())
