"""``dlrover job …`` and ``dlrover node …``."""

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from rich.console import Console

from dlrover_py import __version__
from dlrover_py.cli import complete, here, jobfile, runs, view, where
from dlrover_py.cli.checkpoints import ckpt
from dlrover_py.cli.logs import LogWish
from dlrover_py.cli.screen import Style
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.protocol.errors import ConfigError, DLRoverError, Unreachable
from dlrover_py.protocol.job import CLUSTER_ONLY, INERT, ElasticJob
from dlrover_py.protocol.status import JobStatus
from dlrover_py.protocol.words import counted

F = TypeVar("F", bound=Callable[..., Any])


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
    """Run a job on this machine or in a cluster, look at it, change it.

    `run`, `list` and `rm` are about this machine; `submit`, `get` without a name and `delete`
    about a cluster. Every other command takes the job of that name that is on this machine, if
    there is one, and else the one in the cluster that the kubeconfig names. --namespace, --context
    or --kubeconfig say that the cluster's is meant. What was taken is told on standard error.
    """


@root.group(cls=_Group)
def node() -> None:
    """Hurt a node of a job on this machine, or bring another: to see what happens then."""


root.add_command(ckpt)

job_name = click.argument("name", required=False, shell_complete=complete.jobs)
as_json = click.option("--json", "as_json", is_flag=True, help="For scripts: JSON instead of text.")
of_job = click.option(
    "--job",
    "name",
    help="Name of the job, if more than one runs.",
    shell_complete=complete.jobs,
)
_PLACE = (
    click.option("-n", "--namespace", default="", help="In the cluster: this namespace."),
    click.option("--context", default="", help="In a cluster: this context of the kubeconfig."),
    click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path),
        help="In a cluster: this kubeconfig, not KUBECONFIG or ~/.kube/config.",
    ),
)


def in_cluster(command: F) -> F:
    """Give a command the flags that name a cluster, as its ``target``."""

    @functools.wraps(command)
    def with_target(
        *args: Any, namespace: str, context: str, kubeconfig: Path | None, **rest: Any
    ) -> Any:
        return command(*args, target=Target(namespace, context, kubeconfig), **rest)

    for option in reversed(_PLACE):
        with_target = option(with_target)
    return with_target  # type: ignore[return-value]


# --- run ---


@job.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--nodes", "hosts", type=click.IntRange(1, 1000), help="Simulated hosts; default: all that fit."
)
@click.option("--json", "as_json", is_flag=True, help="Write events and status as lines of JSON.")
@click.option("--plain", is_flag=True, help="Lines instead of a live view, on a terminal too.")
@click.option(
    "--logs",
    "show",
    type=click.Choice(["rank0", "all", "none"]),
    help="Whose output is shown: rank 0's (the default; with --json none's), all workers', none's.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="For nodes to end when the job is stopped.",
)
def run(
    file: Path,
    hosts: int | None,
    as_json: bool,
    plain: bool,
    show: Literal["rank0", "all", "none"] | None,
    grace: float,
) -> int:
    """Run the ElasticJob in FILE on this machine until it ends.

    Each node is a process with its own agent, on one of --nodes simulated hosts. The exit code
    is 0 if the job succeeded and 1 if it failed. Ctrl-C stops it; a second one does at once.
    """
    settings = Settings.from_environment()
    document = jobfile.load(file)
    wish = document.job
    _remark(document.remarks)
    _tell_of(wish.for_clusters_only(), CLUSTER_ONLY)
    _tell_of(wish.without_effect(), INERT)
    _warn_of_command(wish)
    if hosts is None:
        hosts = wish.worker.replicas + wish.worker.standby_replicas
    from dlrover_py.cli.run import run_job  # the web framework: only this command pays for it

    return run_job(
        wish,
        settings,
        hosts=hosts,
        workdir=file.resolve().parent,
        grace_s=grace,
        style=_style(as_json=as_json, plain=plain),
        show=show or ("none" if as_json else "rank0"),
    )


@job.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--apply", is_flag=True, help="Change a job that is there into what the file says.")
@click.option("--dry-run", is_flag=True, help="Have the API server check it; nothing is created.")
@click.option("--wait", is_flag=True, help="Show how it goes until it ends; 0 if it succeeded.")
@click.option("--json", "as_json", is_flag=True, help="With --wait: lines of JSON.")
@click.option("--plain", is_flag=True, help="With --wait: lines, on a terminal too.")
@in_cluster
def submit(
    files: tuple[Path, ...],
    apply: bool,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    plain: bool,
    target: Target,
) -> int:
    """Create the ElasticJobs in FILES in a cluster; `-` is standard input.

    All are checked before the first is created. A name that is taken is refused, unless --apply is
    given: then its spec becomes what the file says (`suspend` stays, if the file does not say it).
    Ctrl-C during --wait leaves the job running.
    """
    from dlrover_py.cli.cluster import Cluster

    documents = [document for file in files for document in jobfile.load_all(file)]
    for document in documents:
        _remark(document.remarks)
        _tell_of(document.job.without_effect(), INERT)
        _warn_of_command(document.job)
    style = _style(as_json=as_json, plain=plain)
    with Cluster(target) as cluster:
        submitted = cluster.submit(documents, apply=apply, dry_run=dry_run)
        for done, job in submitted:
            word = f"would be {done}" if dry_run else done
            click.echo(f"{job.name} {word} {job.where}", err=as_json)
        if dry_run:
            return 0
        if not wait:
            flags = "".join(f" {word}" for word in _flags(target, submitted[0][1].namespace))
            name = submitted[0][1].name
            click.echo(f"next: dlrover job describe {name}{flags}; or get, logs -f, why, delete")
            return 0
        return max(job.wait(style) for _, job in submitted)


def _flags(target: Target, namespace: str) -> Iterator[str]:
    """What makes a later command mean the same place."""
    yield f"-n {namespace}"
    if target.context:
        yield f"--context {target.context}"
    if target.kubeconfig:
        yield f"--kubeconfig {target.kubeconfig}"


def _style(*, as_json: bool, plain: bool) -> Style:
    return "json" if as_json else "plain" if plain or not sys.stdout.isatty() else "live"


def _remark(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(f"dlrover: {line}", err=True)


def _tell_of(paths: Sequence[str], word: str) -> None:
    if paths:
        _remark([f"{', '.join(paths)}: {word}"])


def _warn_of_command(job: ElasticJob) -> None:
    words = job.worker.command_remarks()
    if words:
        _remark([f"warning: {words}"])


# --- look ---


@job.command("list")
@click.option("--all", "show_all", is_flag=True, help="All that have ended, not only the last ten.")
@as_json
def list_jobs(show_all: bool, as_json: bool) -> None:
    """Jobs of this machine: those that run, and those that have ended."""
    settings = Settings.from_environment()
    found: list[tuple[str, str, JobStatus | None]] = []
    for name in here.running(settings):
        with contextlib.suppress(Unreachable):
            status = here.RunningJob(settings, name).snapshot().status
            found.append((name, "running", status))
    past = here.past(settings)
    found += [(status.name, "ended", status) for status in (past if show_all else past[:10])]
    if as_json:
        click.echo(
            json.dumps([{"name": n, "state": s, "status": view.dump(st)} for n, s, st in found])
        )
        return
    _print_table([_row_here(name, status) for name, _, status in found], here_only=True)
    if not found:
        click.echo("no jobs; start one with `dlrover job run job.yaml`", err=True)
    if len(past) > 10 and not show_all:
        words = f"… and {len(past) - 10} more: see them with --all, remove them with `job rm`"
        click.echo(words, err=True)


def _row_here(name: str, status: JobStatus | None) -> view.Row:
    if status is None:
        return view.Row("", name, "Pending", "", "", "", "", "", "")
    return view.Row.of(status)


def _print_table(rows: Sequence[view.Row], *, here_only: bool) -> None:
    table = view.JobTable(rows, here=here_only, width=_width())
    for words in (table.head(), *map(table.line, rows)) if rows else ():
        click.echo(words)


def _width() -> int | None:
    """Columns of the terminal; None if nobody looks at one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@job.command()
@job_name
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Of all namespaces.")
@click.option("-w", "--watch", is_flag=True, help="Go on, and tell of each change.")
@as_json
@in_cluster
def get(name: str | None, everywhere: bool, watch: bool, as_json: bool, target: Target) -> None:
    """Jobs of a cluster, or one job, as a table.

    Where no cluster is configured: the jobs that run on this machine.
    """
    settings = Settings.from_environment()
    only_here = not (target.given or everywhere)
    if name is not None and only_here:
        with contextlib.suppress(here.NotHere):
            _print_here([here.to_look(settings, name)], as_json=as_json, watch=watch)
            return
    from dlrover_py.cli.cluster import Cluster, NoCluster, Rows, rows_as_json

    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(target))
        except NoCluster as error:
            jobs = [here.RunningJob(settings, n) for n in here.running(settings)]
            if not only_here or name is not None or not jobs:
                raise ConfigError(f"{error}; jobs of this machine: `dlrover job list`") from error
            _print_here(jobs, as_json=as_json, watch=watch)
            return
        table: view.JobTable | None = None

        def show(rows: Rows) -> None:
            nonlocal table
            lines = []
            if as_json and not watch:
                click.echo(json.dumps([json.loads(line) for line in rows_as_json(rows)]))
                return
            if as_json:
                lines = rows_as_json(rows)
            else:
                if table is None and rows:
                    first = [row for row, _ in rows]
                    table = view.JobTable(first, namespaces=everywhere, width=_width())
                    lines.append(table.head())
                lines += [table.line(row) for row, _ in rows] if table is not None else []
            for line in lines:
                click.echo(line)
            sys.stdout.flush()

        if not as_json:
            space = "all namespaces of " + cluster.kube.host
            click.echo(space if everywhere else cluster.place(cluster.namespace), err=True)
        if watch:
            cluster.watch_rows(name, everywhere=everywhere, show=show)
        rows = cluster.rows(name, everywhere=everywhere)
        show(rows)
        if not rows and not as_json:
            click.echo("no jobs; start one with `dlrover job submit job.yaml`", err=True)


def _print_here(
    jobs: Sequence[here.RunningJob | here.EndedJob], *, as_json: bool, watch: bool
) -> None:
    if watch:
        raise ConfigError(
            f"--watch: {jobs[0].name} is {jobs[0].where}: see `dlrover job events` and `logs -f`"
        )
    found = [(job.name, job.picture()) for job in jobs]
    if as_json:
        fields = ("namespace", "name", "phase", "status")
        values = [("", name, p.phase, view.dump(p.status)) for name, p in found]
        click.echo(json.dumps([dict(zip(fields, v, strict=True)) for v in values]))
        return
    click.echo(jobs[0].where if len(jobs) == 1 else "on this machine", err=True)
    _print_table([_row_here(name, p.status) for name, p in found], here_only=False)


@job.command()
@job_name
@as_json
@in_cluster
def describe(name: str | None, as_json: bool, target: Target) -> None:
    """All that is known of a job: what is wrong, spec, nodes, conditions, last failure, events."""
    width = _width()
    console = Console(highlight=False, soft_wrap=True, width=width or 200)
    with look(target, name, quiet=as_json) as job:
        picture = job.picture(whole=True)
        if as_json:
            click.echo(json.dumps(picture.document))
            return
        for part in view.description(picture, width):
            console.print(part)


@job.command()
@job_name
@as_json
@in_cluster
def events(name: str | None, as_json: bool, target: Target) -> None:
    """What happened, oldest first."""
    with look(target, name, quiet=as_json) as job:
        picture = job.picture()
        for note in picture.notes:
            click.echo(view.plain(f"dlrover: {note}"), err=True)
        for event in picture.events:
            click.echo(event.model_dump_json() if as_json else view.event_line(event))


@job.command()
@job_name
@click.option("--round", "round_number", type=int, help="Why this round was formed.")
@as_json
@in_cluster
def why(name: str | None, round_number: int | None, as_json: bool, target: Target) -> None:
    """Why the job is where it is: the chain of causes, with times."""
    with look(target, name, quiet=as_json) as job:
        picture = job.picture()
    chain = view.story([e for e in picture.events if e.id > 0], round_number)
    if as_json:
        click.echo(json.dumps([e.model_dump() for e in chain]))
        return
    if round_number is None:
        click.echo(view.plain(f"{picture.name} is {picture.phase}: {picture.reason}"))
        for condition in view.troubles(picture.conditions):
            if picture.reason not in condition.message:
                click.echo(f"  {view.trouble_line(condition)}")
    elif not chain:
        newest = picture.status.round if picture.status is not None else 0
        raise ConfigError(
            f"round {round_number}: no event tells of it; the newest round is {newest}"
        )
    for event in chain:
        click.echo(f"  {view.event_line(event)}")
    newest = picture.status.round if picture.status is not None else 0
    if (
        round_number is None
        and newest > 1
        and all(event.reason != "RoundFormed" for event in chain)
    ):
        click.echo(f"why its last round was formed: dlrover job why {job.name} --round {newest}")


@job.command()
@job_name
@in_cluster
def report(name: str | None, target: Target) -> None:
    """One page of HTML on standard output: nodes, rounds, steps, goodput, failures.

    It needs nothing from elsewhere: dlrover job report NAME > report.html
    """
    from dlrover_py.cli.report import page

    with look(target, name) as job:
        if sys.stdout.isatty():
            raise ConfigError(f"the page goes into a file: dlrover job report {job.name} > FILE")
        text = page(job.picture(whole=True), job.history(), now=view.now())
    click.echo(text, nl=False)


@job.command()
@job_name
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--node", "only_node", help="Only this node.", shell_complete=complete.nodes)
@click.option("--rank", "only_rank", type=int, help="Only this global rank; its node in a cluster.")
@click.option("--round", "only_round", type=int, help="Only this round; not in a cluster.")
@click.option("--agents", is_flag=True, help="What agents and master say, not the workers.")
@click.option("--previous", is_flag=True, help="In a cluster: of Pods that have ended, too.")
@in_cluster
def logs(
    name: str | None,
    follow: bool,
    only_node: str | None,
    only_rank: int | None,
    only_round: int | None,
    agents: bool,
    previous: bool,
    target: Target,
) -> None:
    """What the workers have written."""
    wish = LogWish(
        node=only_node,
        rank=only_rank,
        round=only_round,
        agents=agents,
        follow=follow,
        previous=previous,
    )
    with look(target, name) as job:
        job.show_logs(wish)


# --- change ---


@job.command()
@click.argument("replicas", type=click.IntRange(min=1))
@of_job
@in_cluster
def scale(replicas: int, name: str | None, target: Target) -> None:
    """Wish another number of nodes."""
    with change(target, name) as job:
        click.echo(job.scale(replicas))


@job.command()
@job_name
@in_cluster
def suspend(name: str | None, target: Target) -> None:
    """Stop all nodes, and start none until it is resumed."""
    with change(target, name) as job:
        click.echo(job.suspend(on=True))


@job.command()
@job_name
@in_cluster
def resume(name: str | None, target: Target) -> None:
    """Go on after a suspend."""
    with change(target, name) as job:
        click.echo(job.suspend(on=False))


@job.command()
@job_name
@click.option(
    "--rolling",
    is_flag=True,
    help="One unit of nodes after the other, each once the job trains at full size again.",
)
@in_cluster
def restart(name: str | None, rolling: bool, target: Target) -> None:
    """Replace all nodes by new ones, of the job's present template.

    The newest state is stored first, if the job stores checkpoints. Nobody is charged.
    """
    with change(target, name) as job:
        click.echo(job.restart(rolling=rolling))


@job.command()
@job_name
@click.option("--wait/--no-wait", default=True, show_default=True, help="Until it has ended.")
@in_cluster
def stop(name: str | None, wait: bool, target: Target) -> None:
    """End a job on this machine, and all its processes; in a cluster: see `delete`."""
    with change(target, name) as job:
        click.echo(job.stop(wait=wait))


@job.command()
@click.argument("name", shell_complete=complete.jobs)
@click.option(
    "--cascade",
    type=click.Choice(["background", "foreground", "orphan"]),
    default="background",
    show_default=True,
    help="What becomes of its Pods: deleted after it, before it, or left.",
)
@click.option("--wait", is_flag=True, help="Until it and its Pods are gone.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@in_cluster
def delete(name: str, cascade: str, wait: bool, yes: bool, target: Target) -> None:
    """Delete a job of a cluster, with its Pods and their logs."""

    def sure(what: str) -> None:
        if yes:
            return
        if not sys.stdin.isatty():
            raise ConfigError(f"this deletes {what}: say --yes, as there is nobody to be asked")
        said = click.prompt(f"this deletes {what}\nits name, to go on", default="", err=True)
        if said != name:
            raise ConfigError(f"found {said!r}, expected {name!r}: nothing was deleted")

    with change(target, name) as job:
        click.echo(job.delete(cascade=cascade, wait=wait, sure=sure))


@job.command("rm")
@click.argument("jobs", nargs=-1, metavar="[NAME]...")
@click.option("--older-than", metavar="AGE", help="Only runs that ended longer ago: 12h, 7d, 2w.")
@click.option("--keep", type=click.IntRange(min=0), default=0, help="So many of each job stay.")
@click.option("--all", "everything", is_flag=True, help="Of all jobs.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def remove_runs(
    jobs: tuple[str, ...], older_than: str | None, keep: int, everything: bool, yes: bool
) -> None:
    """Remove past runs of this machine, with their logs; never one that goes on."""
    settings = Settings.from_environment()
    if not (jobs or older_than or keep or everything):
        raise ConfigError("say which runs: names of jobs, --older-than 7d, --keep 3, or --all")
    limit = None if older_than is None else runs.seconds(older_than)
    known = runs.ended(settings.state_root)
    strangers = set(jobs) - {run.name for run in known}
    if strangers:
        raise ConfigError(f"no run of {', '.join(sorted(strangers))} has ended on this machine")
    gone = runs.to_remove(known, jobs=jobs, older_than_s=limit, keep=keep, now=view.now())
    if not gone:
        click.echo("no run is removed: none is meant", err=True)
        return
    freed = sum(runs.size(run.folder) for run in gone)
    what = f"{counted(len(gone), 'run')} with their logs ({freed / 1e6:.1f} MB)"
    if not yes:
        for run in gone[:10]:
            click.echo(f"{run.name} {view.short_age(run.ended_at)} ago {run.folder}", err=True)
        if len(gone) > 10:
            click.echo(f"… and {len(gone) - 10} more", err=True)
        if not sys.stdin.isatty():
            raise ConfigError(f"this removes {what}: say --yes, as there is nobody to be asked")
        click.confirm(f"this removes {what}\ngo on?", abort=True, err=True)
    removed = sum(map(runs.remove, gone))
    click.echo(f"removed {counted(removed, 'run')}")


# --- nodes ---


def _verb(verb: str, words: str) -> None:
    @node.command(verb, help=words)
    @click.argument("node_id", shell_complete=complete.nodes)
    @of_job
    def command(node_id: str, name: str | None) -> None:
        _ask(name, f"/v1/nodes/{node_id}/{verb}")


_verb("kill", "The host under a node is gone: all its processes are killed at once.")
_verb("freeze", "All processes of a node stand still, as if it was cut off.")
_verb("thaw", "A frozen node goes on; if it was replaced meanwhile it is refused, and ends.")
_verb("drain", "A node is asked to leave, and its host takes no other.")


@node.command()
@click.option("--count", type=click.IntRange(1, 1000), default=1, show_default=True)
@of_job
def add(count: int, name: str | None) -> None:
    """Bring more hosts; nodes that wait for one start at once."""
    _ask(name, f"/v1/hosts?count={count}")


def _ask(name: str | None, path: str) -> None:
    click.echo(here.to_change(Settings.from_environment(), name).ask(path))


# --- which job ---


@contextlib.contextmanager
def look(target: Target, name: str | None, *, quiet: bool = False) -> Iterator[where.Job]:
    """The job that is to be looked at; say which it is."""
    with where.to_look(Settings.from_environment(), target, name) as job:
        if not quiet:
            click.echo(f"{job.name} {job.where}", err=True)
        yield job


@contextlib.contextmanager
def change(target: Target, name: str | None) -> Iterator[where.LivingJob]:
    """The job that is to be changed; say which it is."""
    with where.to_change(Settings.from_environment(), target, name) as job:
        click.echo(f"{job.name} {job.where}", err=True)
        yield job
