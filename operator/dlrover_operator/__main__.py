"""``dlrover-operator``: runs the operator for the ElasticJobs of a cluster."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from dlrover_operator.settings import Settings
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.net.http_server import raise_file_limit, server
from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.telemetry import setup

log = logging.getLogger("operator")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return its exit code.

    A ``DLRoverError`` that ends the operator is written to standard error, and its exit code is
    returned; any other error is raised. A wrong option ends the process with exit code 2.
    """
    try:
        settings = Settings.parse(argv)
        setup("operator", level=settings.log_level, aside=True)
        _check_cryptography()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except DLRoverError as error:
        sys.stderr.write(f"dlrover-operator: {error}\n")
        return int(error.exit_code)
    return 0


def _check_cryptography() -> None:
    """Check that the package can be imported that makes the masters' certificates.

    Raises:
        ConfigError: the package, or another one that it needs, is not installed.
    """
    try:
        from dlrover_operator import credentials  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name} is not installed: install DLRover-Py with its extra operator"
        ) from error


async def _run(settings: Settings) -> None:
    # Imported here, because they import cryptography.
    """Serve health pages and manage the jobs until SIGTERM or SIGINT.

    Signal handlers and the limit of open files of this process are changed, and not restored.

    Raises:
        ConfigError: The address of the health pages, or the port of the dashboard, cannot be used,
            or no API server is configured.
        Exception: The server of the pages or the work on jobs has failed; its error ends both.
    """
    from dlrover_operator import health
    from dlrover_operator.loop import Features, Operator

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    raise_file_limit()
    pages = health.listen(settings.health)
    port = settings.dashboard_port
    for_browsers = health.listen(f"127.0.0.1:{port}", "--dashboard-port") if port else None
    async with await KubeClient.connect() as api:
        operator = Operator(
            api,
            settings.masters,
            settings.namespaces,
            shared=settings.shared,
            features=Features(
                settings.kueue, settings.gangs, settings.bad_hosts, settings.host_labels
            ),
        )
        serving = server(health.app(operator))
        health_port = pages.getsockname()[1]
        where = ",".join(settings.namespaces) or "everywhere"
        log.info("started", extra={"namespaces": where, "health_port": health_port})
        tasks = [
            asyncio.create_task(operator.run()),
            asyncio.create_task(serving.serve([pages])),
            asyncio.create_task(stop.wait()),
        ]
        if for_browsers is not None:
            from dlrover_operator import dashboard  # templates are loaded only where they are used

            shown = server(dashboard.app(operator, api, loop.time))
            tasks.append(asyncio.create_task(shown.serve([for_browsers])))
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()
    log.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
