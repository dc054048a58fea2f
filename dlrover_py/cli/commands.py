"""``dlrover job …`` and ``dlrover node …``."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from dlrover_py import __version__
from dlrover_py.cli import jobfile, view
from dlrover_py.cli.settings import Settings
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, DLRoverError, Unreachable
from dlrover_py.protocol.job import CLUSTER_ONLY, INERT
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobStatus
from dlrover_py.rpc import Client

T = TypeVar("T")
CALL_S = 10.0


class _Group(click.Group):
    """Commands in the order in which they are written here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dlrover``; return its exit code."""
    try:
        code = root.main(args=argv, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except DLRoverError as error:
        for line in str(error).splitlines():
            click.echo(f"dlrover: {line}", err=True)
        return int(error.exit_code)
    return code if isinstance(code, int) else 0


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dlrover")
def root() -> None:
    """Elastic, fault-tolerant PyTorch training."""


@root.group(cls=_Group)
def job() -> None:
    """Run a job on this machine, and look at it."""


@root.group(cls=_Group)
def node() -> None:
    """Hurt a node of a job on this machine, or bring another: to see what happens then."""


job_name = click.argument("name", required=False)
as_json = click.option("--json", "as_json", is_flag=True, help="For scripts: JSON instead of text.")
of_job = click.option("--job", "name", help="Name of the job, if more than one runs.")


# --- run ---


@job.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--nodes", "hosts", type=click.IntRange(1, 1000), help="Simulated hosts; default: all that fit."
)
@click.option("--json", "as_json", is_flag=True, help="Write events and status as lines of JSON.")
@click.option("--plain", is_flag=True, help="Lines instead of a live view, on a terminal too.")
@click.option(
    "--grace",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="For nodes to end when the job is stopped.",
)
def run(file: Path, hosts: int | None, as_json: bool, plain: bool, grace: float) -> int:
    """Run the ElasticJob in FILE on this machine until it ends.

    Each node is a process with its own agent, on one of --nodes simulated hosts. The exit code
    is 0 if the job succeeded and 1 if it failed. Ctrl-C stops it; a second one does at once.
    """
    settings = Settings.from_environment()
    wish = jobfile.load(file)
    for paths, word in ((wish.for_clusters_only(), CLUSTER_ONLY), (wish.without_effect(), INERT)):
        if paths:
            click.echo(f"dlrover: {', '.join(paths)}: {word}", err=True)
    if hosts is None:
        hosts = wish.worker.replicas + wish.worker.standby_replicas
    from dlrover_py.cli.run import run_job  # the web framework: only this command pays for it

    return run_job(
        wish,
        settings,
        hosts=hosts,
        workdir=file.resolve().parent,
        grace_s=grace,
        style="json" if as_json else "plain" if plain or not sys.stdout.isatty() else "live",
    )


# --- look ---


@job.command("list")
@click.option("--all", "show_all", is_flag=True, help="All that have ended, not only the last ten.")
@as_json
def list_jobs(show_all: bool, as_json: bool) -> None:
    """Jobs of this machine: those that run, and those that have ended."""
    settings = Settings.from_environment()
    rows: list[tuple[str, str, JobStatus | None]] = []
    for name in running(settings):
        with contextlib.suppress(Unreachable):
            snapshot = call(settings, name)
            rows.append((name, "running", snapshot.status))
    past = []
    for file in settings.state_root.glob(f"*/{names.STATUS_FILE}"):
        with contextlib.suppress(OSError, ValueError):
            past.append(JobStatus.model_validate_json(file.read_text()))
    past.sort(key=lambda s: s.ended_at or 0.0, reverse=True)
    rows += [(status.name, "ended", status) for status in (past if show_all else past[:10])]
    if as_json:
        click.echo(json.dumps([{"name": n, "state": s, "status": dump(st)} for n, s, st in rows]))
        return
    if not rows:
        click.echo("no jobs; start one with `dlrover job run job.yaml`")
    for name, state, status in rows:
        if status is None:
            click.echo(f"{name:24} starting")
            continue
        took = f"after {view.age(status.started_at, status.ended_at)}"
        when = f"{view.age(status.ended_at)} ago" if status.ended_at is not None else state
        click.echo(f"{name:24} {when:16} {view.summary(status)} {took}")
    if len(past) > 10 and not show_all:
        click.echo(f"… and {len(past) - 10} more (--all); they are in {settings.state_root}")


@job.command()
@job_name
@as_json
def describe(name: str | None, as_json: bool) -> None:
    """All that is known of a job: spec, nodes, conditions, last failure, events."""
    settings = Settings.from_environment()
    console = Console(highlight=False, soft_wrap=True)
    if name in running(settings) or (name is None and running(settings)):
        snapshot = call(settings, choose(settings, name))
        if as_json:
            click.echo(snapshot.model_dump_json(by_alias=True))
            return
        for line in view.wish(snapshot):
            console.print(line, markup=False)
        status = snapshot.status
    else:
        folder = last_run(settings, name)
        status = ended_status(folder)
        if as_json:
            click.echo(json.dumps({"status": dump(status)}))
            return
        console.print(f"{status.name} has ended; its logs are in {folder / 'logs'}", markup=False)
    if status is None:
        console.print("the master has not published a status yet")
        return
    for part in view.description(status):
        console.print(part)


@job.command()
@job_name
@as_json
def events(name: str | None, as_json: bool) -> None:
    """What happened, oldest first."""
    status = newest_status(name)
    for event in status.events:
        click.echo(event.model_dump_json() if as_json else view.event_line(event))


@job.command()
@job_name
@click.option("--round", "round_number", type=int, help="Why this round was formed.")
@as_json
def why(name: str | None, round_number: int | None, as_json: bool) -> None:
    """Why the job is where it is: the chain of causes, with times."""
    status = newest_status(name)
    chain = view.story(status.events, round_number)
    if as_json:
        click.echo(json.dumps([e.model_dump() for e in chain]))
        return
    if round_number is None:
        click.echo(f"{status.name} is {status.phase}: {status.reason}")
    elif not chain:
        raise ConfigError(
            f"round {round_number}: no event tells of it; the newest round is {status.round}"
        )
    for event in chain:
        click.echo(f"  {view.event_line(event)}")


@job.command()
@job_name
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--node", "only_node", help="Only this node.")
@click.option("--rank", "only_rank", type=int, help="Only this global rank.")
@click.option("--round", "only_round", type=int, help="Only this round.")
@click.option("--agents", is_flag=True, help="What agents and master say, not the workers.")
def logs(
    name: str | None,
    follow: bool,
    only_node: str | None,
    only_rank: int | None,
    only_round: int | None,
    agents: bool,
) -> None:
    """What the workers have written."""
    from dlrover_py.cli.logs import show

    settings = Settings.from_environment()
    folder, alive = log_folder(settings, name)
    show(
        folder,
        alive if follow else None,
        node=only_node,
        rank=only_rank,
        round_number=only_round,
        agents=agents,
    )


# --- change ---


@job.command()
@click.argument("replicas", type=click.IntRange(min=1))
@of_job
def scale(replicas: int, name: str | None) -> None:
    """Wish another number of nodes."""
    say("POST", name, f"/v1/scale?replicas={replicas}")


@job.command()
@job_name
def suspend(name: str | None) -> None:
    """Stop all nodes, and start none until it is resumed."""
    say("POST", name, "/v1/suspend?on=true")


@job.command()
@job_name
def resume(name: str | None) -> None:
    """Go on after a suspend."""
    say("POST", name, "/v1/suspend?on=false")


@job.command()
@job_name
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until it has ended.")
def stop(name: str | None, wait: bool) -> None:
    """End the job and all its processes."""
    settings = Settings.from_environment()
    chosen = choose(settings, name)
    say("POST", chosen, "/v1/stop")
    deadline = time.monotonic() + 60
    pause = threading.Event()
    while wait and (settings.runtime_root / chosen).exists():
        if time.monotonic() > deadline:
            raise Unreachable(f"{chosen} has not ended within a minute; see `dlrover job describe`")
        pause.wait(0.05)


# --- nodes ---


def _verb(verb: str, words: str) -> None:
    @node.command(verb, help=words)
    @click.argument("node_id")
    @of_job
    def command(node_id: str, name: str | None) -> None:
        say("POST", name, f"/v1/nodes/{node_id}/{verb}")


_verb("kill", "The host under a node is gone: all its processes are killed at once.")
_verb("freeze", "All processes of a node stand still, as if it was cut off.")
_verb("thaw", "A frozen node goes on; if it was replaced meanwhile it is refused, and ends.")
_verb("drain", "A node is asked to leave, and its host takes no other.")


@node.command()
@click.option("--count", type=click.IntRange(1, 1000), default=1, show_default=True)
@of_job
def add(count: int, name: str | None) -> None:
    """Bring more hosts; nodes that wait for one start at once."""
    say("POST", name, f"/v1/hosts?count={count}")


# --- small steps ---


def running(settings: Settings) -> list[str]:
    """Names of the jobs that have a cluster socket here."""
    return sorted(p.parent.name for p in settings.runtime_root.glob(f"*/{names.CLUSTER_SOCKET}"))


def choose(settings: Settings, name: str | None) -> str:
    """The job that is meant: the only one that runs, if none is named.

    Raises:
        ConfigError: there is no such job, or more than one.
    """
    names_here = running(settings)
    if name is not None:
        if name not in names_here:
            here = f"; these run: {', '.join(names_here)}" if names_here else "; no job runs"
            raise ConfigError(f"job {name} does not run on this machine{here}")
        return name
    if len(names_here) != 1:
        if not names_here:
            raise ConfigError("no job runs on this machine; see `dlrover job list`")
        raise ConfigError(f"{len(names_here)} jobs run here, name one: {', '.join(names_here)}")
    return names_here[0]


def client(settings: Settings, name: str) -> Client:
    """A line to the job's cluster."""
    return Client(f"unix:{settings.runtime_root / name / names.CLUSTER_SOCKET}")


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run one call."""
    return asyncio.run(coroutine)


def call(settings: Settings, name: str) -> Snapshot:
    """The job's snapshot."""
    body = wait_for(client(settings, name).call("GET", "/v1/job", deadline_s=CALL_S))
    return Snapshot.model_validate_json(body)


def say(method: str, name: str | None, path: str) -> None:
    """Ask the job's cluster for something, and print its answer."""
    settings = Settings.from_environment()
    chosen = choose(settings, name)
    body = wait_for(client(settings, chosen).call(method, path, deadline_s=CALL_S))
    click.echo(json.loads(body)["message"])


def newest_status(name: str | None) -> JobStatus:
    """Of the job that runs, or else of its last run.

    Raises:
        ConfigError: there is none.
    """
    settings = Settings.from_environment()
    if name is None or name in running(settings):
        names_here = running(settings)
        if name is not None or names_here:
            status = call(settings, choose(settings, name)).status
            if status is None:
                raise ConfigError("the job is starting: there is no status yet")
            return status
    folder = last_run(settings, name)
    return ended_status(folder)


def ended_status(folder: Path) -> JobStatus:
    """The last status of a run that has ended."""
    return JobStatus.model_validate_json((folder / names.STATUS_FILE).read_text())


def last_run(settings: Settings, name: str | None) -> Path:
    """State folder of the newest run that has ended."""
    found = sorted(
        (p.parent for p in settings.state_root.glob(f"{name or '*'}@*/{names.STATUS_FILE}")),
        key=lambda p: p.name.rpartition("@")[2],
    )
    if not found:
        raise ConfigError(f"job {name or ''} is not known on this machine; see `dlrover job list`")
    return found[-1]


def log_folder(settings: Settings, name: str | None) -> tuple[Path, Path | None]:
    """Where the logs are, and the file that is there as long as the job runs."""
    names_here = running(settings)
    if name in names_here or (name is None and names_here):
        chosen = choose(settings, name)
        folder = Path(call(settings, chosen).log_dir)
        return folder, settings.runtime_root / chosen / names.CLUSTER_SOCKET
    return last_run(settings, name) / "logs", None


def dump(status: JobStatus | None) -> object:
    """For JSON."""
    return None if status is None else status.model_dump(mode="json", by_alias=True)
