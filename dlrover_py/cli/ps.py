"""``dlrover ps …``: run the servers of a parameter server on this machine."""

import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.words import counted


@click.group()
def ps() -> None:
    """Run a parameter server."""


@ps.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--servers", type=int, default=2, show_default=True, help="Number of servers.")
@click.option("--replicas", type=int, default=2, show_default=True, help="Copies of each row.")
@click.option("--buckets", type=int, default=64, show_default=True, help="Parts of the tables.")
@click.option(
    "--ack",
    type=click.Choice(["primary", "backup"]),
    default="backup",
    show_default=True,
    help="Copies that must have a push before it is acknowledged.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def serve(servers: int, replicas: int, buckets: int, ack: str, command: tuple[str, ...]) -> int:
    """Run servers on this machine while COMMAND runs.

    COMMAND gets their address in DLROVER_PS, for ps.Embedding and ps.EmbeddingBag. A server that
    dies is replaced. The exit code is that of COMMAND. Example:

    dlrover ps serve --servers 3 -- elastic-run --nproc-per-node 2 train.py

    \f

    Args:
        servers: Number of servers.
        replicas: Copies of each row.
        buckets: Number of buckets.
        ack: When a push is acknowledged.
        command: The command.

    Raises:
        ConfigError: A number is outside its bounds, a library is missing, or the command cannot be
            started.
    """
    try:
        from dlrover_py.ps.cluster_map import AckMode
        from dlrover_py.ps.local import LocalServers
        from dlrover_py.ps.planner import PlanRules
        from dlrover_py.ps.settings import environment
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dlrover ps needs {error.name}, which is not installed: install DLRover-Py with its "
            "extra ps"
        ) from error
    rules = PlanRules(buckets=buckets, replicas=replicas, ack=AckMode(ack))
    with (
        tempfile.TemporaryDirectory(prefix="dlrover-ps-") as folder,
        LocalServers(Path(folder), servers, rules=rules) as running,
    ):
        click.echo(f"dlrover: {counted(servers, 'parameter server')} started", err=True)
        try:
            process = subprocess.Popen(command, env=environment(running.access))
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from error

        def pass_on(number: int, _frame: Any) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, pass_on)
                  for number in (signal.SIGTERM, signal.SIGHUP)}  # fmt: skip
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it gets it, too
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return code if code >= 0 else 128 - code
