"""``dlrover dashboard --operator``: a port of this machine that leads to the operator's pages.

``kubectl port-forward`` makes the connection. It ends with the operator's Pod, so it is started
again for the next Pod, at the same port.
"""

import asyncio
import contextlib
import re
import shutil
import signal
import socket

import click

from dlrover_py.cli.settings import DASHBOARD_PORT, Target
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import PODS, Obj
from dlrover_py.process.identity import signal_at_parents_end
from dlrover_py.protocol.errors import ConfigError, DLRoverError

NAMESPACE = "dlrover-system"
"""Where the operator is, if nothing else is given."""
RETRY_S = 1.0
"""Seconds before the connection is made again."""
STOP_S = 5.0
"""Seconds that ``kubectl`` gets to end."""
_SELECTOR = "app.kubernetes.io/name=dlrover-operator"
_PAGES = re.compile(r"--dashboard-port=(\d+)")
_FORWARDS = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+)")


class OperatorPages:
    """A connection to the operator's pages, and its restarts."""

    def __init__(self, target: Target, port: int | None) -> None:
        """Look for ``kubectl``; no process is started.

        Args:
            target: the cluster, and the operator's namespace.
            port: port of this machine; None for :data:`DASHBOARD_PORT`, or any free one if that is
                taken.

        Raises:
            ConfigError: there is no ``kubectl``.
        """
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise ConfigError(
                "found no kubectl in PATH, which makes the connection to the operator: install it"
            )
        flags = [f"--context={target.context}"] if target.context else []
        flags += [f"--kubeconfig={target.kubeconfig}"] if target.kubeconfig is not None else []
        self._target, self._namespace = target, target.namespace or NAMESPACE
        self._kubectl = (kubectl, *flags, "--namespace", self._namespace, "port-forward")
        self._port = port if port is not None else _free_port()

    async def serve(self) -> None:
        """Forward the port and print the link, until SIGINT or SIGTERM.

        Raises:
            ConfigError: no operator serves pages in the namespace, or ``kubectl`` ends before the
                first connection.
            DLRoverError: the API server refuses the first list of Pods, or does not answer.
        """
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        forwards = asyncio.create_task(self._forward_always())
        stopped = asyncio.create_task(ended.wait())
        await asyncio.wait((forwards, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, forwards):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await forwards

    async def _forward_always(self) -> None:
        """Forward the port to the present Pod of the operator, and to each later one.

        Raises:
            ConfigError: there was no first connection, or another program has taken the port.
            DLRoverError: as :meth:`_forward`, before the first connection.
        """
        await self._forward(first=True)
        while True:
            click.echo("the connection to the operator is lost; it is made again", err=True)
            await self._reconnect()

    async def _reconnect(self) -> None:
        """Connect again and again, until a connection has been made and was lost.

        Each reason why there is none is printed once.

        Raises:
            ConfigError: another program has taken the port. A browser would send it the token.
        """
        told = ""
        while True:
            await asyncio.sleep(RETRY_S)
            _refuse_if_taken(self._port)
            try:
                await self._forward(first=False)
                return
            except DLRoverError as error:
                if str(error) != told:
                    told = str(error)
                    click.echo(f"there is no connection yet: {told}", err=True)

    async def _forward(self, *, first: bool) -> None:
        """Run ``kubectl`` until it ends.

        Raises:
            ConfigError: no operator serves pages, or there has been no connection.
            DLRoverError: the API server refuses the list of Pods, or does not answer.
        """
        pod, port = await self._find()
        process = await asyncio.create_subprocess_exec(
            *self._kubectl,
            "--address=127.0.0.1",
            f"pod/{pod}",
            f"{self._port}:{port}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends it by way of this process
            preexec_fn=lambda: signal_at_parents_end(signal.SIGTERM),  # also if that is killed
        )
        try:
            assert process.stdout is not None
            said, connected = b"", False
            async for line in process.stdout:
                said = (said + line)[-2000:]
                if not connected and (found := _FORWARDS.search(line)):
                    connected, self._port = True, int(found[1])
                    self._tell(first)
            if not connected:
                words = said.decode(errors="replace").strip().replace("\n", "; ")
                raise ConfigError(f"kubectl port-forward has ended: {words or 'it said nothing'}")
        finally:
            await _stop(process)

    def _tell(self, first: bool) -> None:
        """Print the link, or that it works again."""
        if not first:
            click.echo("the connection to the operator is there again", err=True)
            return
        click.echo(f"the operator's pages are at http://127.0.0.1:{self._port}")
        click.echo(
            "they ask for a token, as `kubectl -n NAMESPACE create token ACCOUNT "
            "--audience=dlrover-dashboard` prints;\n"
            "they are there for as long as this command runs; end it with Ctrl-C",
            err=True,
        )

    async def _find(self) -> tuple[str, int]:
        """Return a Pod of the operator that serves pages, and the port of the pages.

        Raises:
            ConfigError: there is none in the namespace.
            DLRoverError: the API server refuses the list of Pods, or does not answer.
        """
        target = self._target
        async with await KubeClient.connect(
            kubeconfig=target.kubeconfig, context=target.context or None
        ) as kube:
            pods = await kube.list(PODS, self._namespace, labels=_SELECTOR)
        running = [pod for pod in pods if _is_ready(pod)]
        if not running:
            raise ConfigError(
                f"found no operator that is ready in the namespace {self._namespace}: give the "
                "namespace of its release with -n"
            )
        for pod in running:
            if found := _PAGES.search("\n".join(_arguments(pod))):
                return pod["metadata"]["name"], int(found[1])
        raise ConfigError(
            f"the operator in the namespace {self._namespace} serves no pages: set "
            "dashboard.enabled=true in the values of its chart"
        )


def _is_ready(pod: Obj) -> bool:
    """Return whether a Pod takes requests and is not being deleted."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def _arguments(pod: Obj) -> list[str]:
    containers = (pod.get("spec") or {}).get("containers") or []
    return [arg for container in containers for arg in container.get("args") or []]


def _free_port() -> int:
    """Return :data:`DASHBOARD_PORT` if it is free, or else 0, for which kubectl takes any port."""
    try:
        _refuse_if_taken(DASHBOARD_PORT)
    except ConfigError:
        return 0
    return DASHBOARD_PORT


def _refuse_if_taken(port: int) -> None:
    """Refuse a port at which another program listens.

    Raises:
        ConfigError: one does.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"127.0.0.1:{port}: {error.strerror}: another program may answer there now, so the "
                "link must not be used any more"
            ) from error


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
