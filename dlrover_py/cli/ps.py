"""``dlrover ps …``: run the servers of a parameter server, and export what they have saved."""

import contextlib
import math
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlrover_py.protocol.errors import CheckpointError, ConfigError, UnreachableError
from dlrover_py.protocol.words import counted

if TYPE_CHECKING:
    from dlrover_py.ps.cuts import SavedCut


@click.group()
def ps() -> None:
    """Run a parameter server, and export its tables."""


@contextlib.contextmanager
def _libraries() -> Iterator[None]:
    """Say in words which extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dlrover ps needs {error.name}, which is not installed: install DLRover-Py with its "
            "extra ps"
        ) from error


@ps.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--servers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of servers.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 2),
    default=2,
    show_default=True,
    help="Copies of each row.",
)
@click.option(
    "--buckets",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Parts of the tables.",
)
@click.option(
    "--ack",
    type=click.Choice(["primary", "backup"]),
    default="backup",
    show_default=True,
    help="Copies that must have a push before it is acknowledged.",
)
@click.option("--checkpoints", metavar="DIR", help="Directory in which ps.save() saves tables.")
@click.option("--restore", metavar="WHICH", help="Start from this cut in DIR: a step, or newest.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def serve(
    servers: int,
    replicas: int,
    buckets: int,
    ack: str,
    checkpoints: str | None,
    restore: str | None,
    command: tuple[str, ...],
) -> int:
    """Run servers on this machine while COMMAND runs.

    DLROVER_PS names a file by which ps.Embedding and ps.EmbeddingBag in COMMAND find them. A server
    that dies is replaced. The exit code is that of COMMAND. Example:

    dlrover ps serve --servers 3 -- elastic-run --nproc-per-node 2 train.py

    \f

    Args:
        servers: Number of servers.
        replicas: Copies of each row.
        buckets: Number of buckets; not used with ``restore``, as the cut has its own number.
        ack: Copies that must have a push before it is acknowledged: ``primary`` or ``backup``.
        checkpoints: Path or address of the directory of cuts; None: no cuts are saved.
        restore: Step or folder of the cut that the servers read first, or ``newest``; it needs
            ``checkpoints``. None: the tables are empty.
        command: The command.

    Raises:
        ConfigError: A number is outside its bounds, a library is missing, there is no such cut,
            ``restore`` is given without ``checkpoints``, or the command cannot be started.
        CheckpointError: The cut is damaged, or the store does not answer.
        UnreachableError: The servers have ended because of a fault.
    """
    with _libraries():
        from dlrover_py.ps.cluster_map import AckMode
        from dlrover_py.ps.cuts import CutDirectory, SavedCut
        from dlrover_py.ps.local import LocalServers
        from dlrover_py.ps.planner import PlanRules
        from dlrover_py.ps.settings import environment
    rules = PlanRules(buckets=buckets, replicas=replicas, ack=AckMode(ack))
    source = None
    if restore is not None:
        if checkpoints is None:
            raise ConfigError("--restore names a cut in a directory: expected --checkpoints DIR")
        source = SavedCut.open(checkpoints, None if restore == "newest" else restore)
        if source is None:
            raise ConfigError(f"{checkpoints}: there is no cut of a parameter server")
        source.verify()
        click.echo(f"dlrover: the servers start from {source.where}", err=True)
    cuts = CutDirectory(checkpoints) if checkpoints is not None else None
    with (
        tempfile.TemporaryDirectory(prefix="dlrover-ps-") as folder,
        LocalServers(Path(folder), servers, rules=rules, cuts=cuts, source=source) as running,
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
        running.at_failure(process.terminate)
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if running.failure:
            raise UnreachableError(
                f"{running.failure}; the rows are gone, and the command was ended: start it again"
            )
        return code if code >= 0 else 128 - code


@ps.command()
def server() -> int:
    """Serve rows as a node of the role ps. It is the command of that role in a job file.

    The job says in DLROVER_PS where its master is. SIGTERM makes the server give its rows away. The
    exit code is 1 if some are left.

    \f

    Raises:
        ConfigError: It was not started by a job, or a library is missing.
    """
    with _libraries():
        from dlrover_py.ps.server import serve as serve_rows
        from dlrover_py.ps.settings import NodeSettings, read_access
    node = NodeSettings.from_environment()
    return serve_rows(read_access(node.access), node.id, node.lifeline, node.host)


@ps.command()
@click.argument("directory", metavar="DIR")
@click.option(
    "--to",
    "out",
    required=True,
    type=click.Path(path_type=Path),
    help="New file: its name ends with .safetensors, .parquet or .pt.",
)
@click.option("--which", help="Step, or name of the folder. Default: the newest cut.")
@click.option(
    "--every",
    type=click.FloatRange(1, 86_400),
    metavar="SECONDS",
    help="Look for a newer cut this often, and export it; end when interrupted.",
)
def export(directory: str, out: Path, which: str | None, every: float | None) -> None:
    """Write ids and rows of all tables of a cut in DIR to one file.

    Safetensors and .pt have NAME.ids and NAME.weight for each table. Parquet has the columns table,
    id and weight. The optimizer's values are left out: `dlrover ckpt export` writes them, too.

    With --every, each newer cut replaces the file. {step} in its name stands for the step of the
    cut, so that each cut has a file.

    \f

    Args:
        directory: Path or address of the directory of cuts.
        out: The new file.
        which: Step, or name of the cut's folder; None for the newest.
        every: Seconds between two looks for a newer cut; None for one export.

    Raises:
        ConfigError: There is no such cut, the file exists, an option is wrong, or a library is
            missing.
        CheckpointError: The cut is damaged, or the file cannot be written.
    """
    with _libraries():
        from dlrover_py.ps.cuts import SavedCut
        from dlrover_py.ps.export import check_name
    if every is not None and which is not None:
        raise ConfigError("--every exports the newest cut each time: expected no --which with it")
    if every is not None and math.isnan(every):
        raise ConfigError("--every is not a number: expected 1 to 86400 seconds")
    check_name(out)

    def named(cut: "SavedCut") -> Path:
        """Return the path of the file with a cut."""
        return out.with_name(out.name.replace("{step}", str(cut.place.step)))

    if every is None:
        cut = SavedCut.open(directory, which)
        if cut is None:
            raise ConfigError(f"{directory}: there is no cut of a parameter server")
        _export(cut, named(cut), replace=False)
        return
    # So a part of a file is removed when a Pod is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    exported, pause = "", threading.Event()
    while True:
        try:
            cut = SavedCut.open(directory)
            if cut is not None and cut.place.folder != exported:
                _export(cut, named(cut), replace=True)
                exported = cut.place.folder
        except CheckpointError as error:  # a cut may go while it is read, when newer ones come
            click.echo(f"warning: {error}; the next try is in {every:g} s", err=True)
        pause.wait(every)


def _export(cut: "SavedCut", out: Path, *, replace: bool) -> None:
    """Export a cut, and print what was written."""
    from dlrover_py.ps import export as exports

    exports.export(cut, out, replace=replace)
    rows = sum(sum(sizes) for sizes in cut.document.rows.values())
    tables = counted(len(cut.document.tables), "table")
    click.echo(f"{out}: {counted(rows, 'row')} of {tables}, step {cut.place.step}")
