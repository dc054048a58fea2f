"""``dlrover dashboard``: the jobs of this machine, or of a cluster, as pages for a browser."""

import asyncio
import contextlib
import re
import signal
import socket
from collections.abc import Sequence

import click

from dlrover_py.cli import local_jobs, locate, runs, view
from dlrover_py.cli.logs import LogQuery
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.dashboard import server
from dlrover_py.net import http_server
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job_view import JobView
from dlrover_py.protocol.local import History

PORT = 8765
"""The port of the dashboard where it is free; a link in a browser's history then stays right."""
PAST_JOBS = 50
"""Largest number of past runs in the list of jobs."""
POLL_S, CLUSTER_POLL_S = 1.0, 3.0
"""Seconds between two looks at a job that somebody watches."""


class LocalOrClusterJobs:
    """The jobs that the commands see with the same flags: :class:`server.Jobs` for one user."""

    def __init__(self, settings: Settings, target: Target) -> None:
        """Nothing is read yet.

        Args:
            settings: settings of this command.
            target: cluster that the flags name; without one, the jobs of this machine are listed.
        """
        self._settings, self._target = settings, target

    @property
    def where(self) -> str:
        """The place of the jobs, in words."""
        if not self._target.given:
            return "on this machine"
        return f"in namespace {self._target.namespace or 'of your kubeconfig'}"

    def rows(self) -> Sequence[view.JobRow]:
        """Return the jobs: running ones, and the newest runs that have ended.

        Raises:
            ConfigError: the folders of the jobs are not safe, or no cluster is configured.
            DLRoverError: the cluster does not answer.
        """
        if self._target.given:
            from dlrover_py.cli.cluster import ClusterClient  # importing takes 0.2 s

            with ClusterClient(self._target) as cluster:
                return [row for row, _ in cluster.rows(None, all_namespaces=False)]
        found = {}
        for name, job in local_jobs.running(self._settings).items():
            with contextlib.suppress(ConfigError):  # it ended, or is of another release
                found[name] = view.JobRow.of_job(name, job.snapshot().status, "Pending")
        for run in runs.ended(self._settings.state_folder)[:PAST_JOBS]:
            phase = local_jobs.KILLED if run.status is None else ""
            found.setdefault(run.name, view.JobRow.of_job(run.name, run.status, phase))
        return list(found.values())

    def load(self, name: str) -> tuple[JobView, History]:
        """Return what is known of a job, and its history.

        Raises:
            ConfigError: there is no such job.
            DLRoverError: the job's cluster refuses a call, or does not answer.
        """
        with locate.find_to_read(self._settings, self._target, name) as job:
            return job.load_view(with_pods=True), job.history()

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
        if action == "drain":
            if self._target.given:
                raise ConfigError(
                    f"a node in a cluster is drained by its host: kubectl drain, or kubectl delete "
                    f"pod {name}-{value}"
                )
            if not re.fullmatch(names.NODE_ID, value):
                raise ConfigError(f"node {value!r}: expected the id of a node, such as n0")
            job = local_jobs.find_to_change(self._settings, name)
            return job.request(f"/v1/nodes/{value}/drain")
        with locate.find_to_change(self._settings, self._target, name) as live:
            if action == "scale":
                if not (value.isascii() and value.isdigit() and 1 <= int(value) <= names.MAX_COUNT):
                    raise ConfigError(f"found {value!r} nodes, expected a number from 1")
                return live.scale(int(value))
            if action == "restart":
                return live.restart(rolling=False)
            return live.suspend(on=action == "suspend")

    def log_tail(self, name: str, node: str) -> list[str]:
        """Return the newest lines that a node's workers have printed; none for a cluster's job.

        Raises:
            ConfigError: there is no such job.
        """
        with locate.find_to_read(self._settings, self._target, name) as job:
            return job.log_tail(LogQuery(node=node))


def listening_socket(host: str, port: int | None) -> socket.socket:
    """Return a listening socket on a loopback address.

    Args:
        host: address to listen on.
        port: port; None for :data:`PORT`, or any free one if that is taken.

    Raises:
        ConfigError: the address cannot be used, or the port is taken.
    """
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((host, wanted), backlog=128)
        except OSError as error:
            problem = error
    raise ConfigError(f"{host}:{port}: {problem.strerror or problem}; choose another --port")


def serve(settings: Settings, target: Target, name: str | None, listener: socket.socket) -> None:
    """Serve the dashboard until the command is interrupted, and print its link.

    Args:
        settings: settings of this command.
        target: cluster that the flags name.
        name: job whose page the link opens; None for the list of jobs.
        listener: the listening socket.
    """
    access = server.Access()
    poll_s = CLUSTER_POLL_S if target.given else POLL_S
    pages = server.Dashboard(LocalOrClusterJobs(settings, target), access, view.now, poll_s=poll_s)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    then = f"&job={name}" if name is not None else ""
    click.echo(f"the dashboard is at http://{host}:{port}/enter?token={access.token}{then}")
    click.echo("it shows the jobs for as long as this command runs; end it with Ctrl-C", err=True)
    asyncio.run(_until_interrupted(pages, listener))


async def _until_interrupted(pages: server.Dashboard, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. A page that is open then gets the end of its stream."""
    running = http_server.server(pages.asgi, header_s=10.0)

    def end() -> None:
        running.should_exit = True
        pages.close()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    await running.serve(sockets=[listener])
