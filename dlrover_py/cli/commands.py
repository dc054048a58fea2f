"""The commands ``dlrover job …`` and ``dlrover node …``."""

import contextlib
import functools
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from rich.console import Console
from rich.table import Table

from dlrover_py import __version__
from dlrover_py.cli import (
    complete,
    jobfile,
    local_jobs,
    locate,
    runs,
    server_map,
    view,
)
from dlrover_py.cli.cache import cache
from dlrover_py.cli.checkpoints import ckpt
from dlrover_py.cli.data import data, ledger_of, print_report
from dlrover_py.cli.evidence import last_known
from dlrover_py.cli.logs import LogQuery
from dlrover_py.cli.numbers import NodeCount, Real
from dlrover_py.cli.progress import OutputError, Style, whole_output
from dlrover_py.cli.ps import ps
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.process.ownership import replaced_when_whole
from dlrover_py.protocol import json_text
from dlrover_py.protocol.errors import ConfigError, DLRoverError, ExitCode, UnreachableError
from dlrover_py.protocol.job import CLUSTER_ONLY, INERT, ElasticJob
from dlrover_py.protocol.names import NODE_ID, ROLE_WORKER, SERVER_PREFIX
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.sdk import MAX_LOADER_WORKERS, MAX_MICRO_BATCH
from dlrover_py.protocol.status import JobPhase, JobStatus, TablesStatus, date_time
from dlrover_py.protocol.words import counted

SNAPSHOT_S = 60.0
"""Seconds that ``dlrover job stacks`` waits for the result."""

REBALANCE_S = 60.0
"""Seconds that ``dlrover ps rebalance`` waits for the answer."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class _NamesJobByFlag(click.Command):
    """A command that has a word of its own, so that the name of the job follows ``--job``."""

    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. A further word is probably the name of the job."""
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            words = " ".join(repr(word) for word in rest)
            ctx.fail(f"found {words}, expected no further word; a job's name follows --job")
        return rest


class _OrderedGroup(click.Group):
    """A group that lists its commands in the order of this file."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dlrover``; return its exit code, which is 130 after Ctrl-C or a refused confirmation.

    Errors of DLRover-Py, of the command line and of standard output are printed on standard error.
    Other exceptions are raised.
    """
    try:
        with whole_output():
            return _run(argv)
    except OutputError as error:
        _print_remarks([f"standard output: {error.strerror}"])
        return int(ExitCode.USAGE)


def _run(argv: Sequence[str] | None) -> int:
    """Run ``dlrover`` as :func:`main` does. Errors of standard output are raised."""
    try:
        code = root.main(args=argv, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except DLRoverError as error:
        for line in str(error).splitlines():
            click.echo(view.plain(f"dlrover: {line}"), err=True)
        return int(error.exit_code)
    return code if isinstance(code, int) else 0


@click.group(cls=_OrderedGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dlrover")
def root() -> None:
    """Elastic, fault-tolerant PyTorch training."""


@root.group(cls=_OrderedGroup)
def job() -> None:
    """Run, show and change jobs, on this machine or in a cluster.

    `run`, `list`, `stop` and `rm` work on this machine. `submit`, `delete`, and `get` without a
    name work on a cluster. Every other command uses the job with the given name on this machine, if
    there is one. Otherwise it uses the one in the cluster that the kubeconfig names. With
    --namespace, --context or --kubeconfig it uses the cluster's job. Each command prints on
    standard error which job it uses.
    """


@root.group(cls=_OrderedGroup)
def node() -> None:
    """Inject faults into the nodes of a job on this machine, or add hosts.

    The faults show how the job recovers.
    """


@root.group(cls=_OrderedGroup)
def cluster() -> None:
    """Run several jobs on this machine that share hosts, or look at the hosts of a cluster."""


root.add_command(ckpt)
root.add_command(data)
root.add_command(cache)
root.add_command(ps)

job_name = click.argument("name", required=False, shell_complete=complete.jobs)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
of_job = click.option(
    "--job",
    "name",
    help="Name of the job. Needed if more than one job runs.",
    shell_complete=complete.jobs,
)
_TARGET_OPTIONS = (
    click.option("-n", "--namespace", default="", help="Namespace of the job in the cluster."),
    click.option("--context", default="", help="Context of the kubeconfig to use."),
    click.option(
        "--kubeconfig",
        type=click.Path(path_type=Path),
        help="Kubeconfig file to use instead of KUBECONFIG or ~/.kube/config.",
    ),
)


def target_options(command: F) -> F:
    """Give a command the flags that name a cluster; it receives them as its ``target``."""

    @functools.wraps(command)
    def with_target(
        *args: Any, namespace: str, context: str, kubeconfig: Path | None, **rest: Any
    ) -> Any:
        return command(*args, target=Target(namespace, context, kubeconfig), **rest)

    for option in reversed(_TARGET_OPTIONS):
        with_target = option(with_target)
    return with_target  # type: ignore[return-value]


# --- Commands that start jobs ---


@job.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--nodes",
    "hosts",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Number of simulated hosts. Default: one for each node and each standby.",
)
@click.option("--json", "as_json", is_flag=True, help="Print events and status as lines of JSON.")
@click.option("--plain", is_flag=True, help="Print lines, not a live display, even on a terminal.")
@click.option(
    "--logs",
    "show",
    type=click.Choice(["rank0", "all", "none"]),
    help="Workers whose output is shown. Default: rank0, and none with --json.",
)
@click.option(
    "--grace",
    type=Real(0, 3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time that nodes get to end when the job is stopped.",
)
@click.option("--dashboard", "shows_pages", is_flag=True, help="Also show it in a browser.")
def run(
    file: Path,
    hosts: int | None,
    as_json: bool,
    plain: bool,
    show: Literal["rank0", "all", "none"] | None,
    grace: float,
    shows_pages: bool,
) -> int:
    """Run the ElasticJob in FILE on this machine until it ends.

    Each node is a process with its own agent, on one of --nodes simulated hosts. The exit code is 0
    if the job succeeded, 128 plus the signal's number if a signal stopped it, and 1 otherwise.
    Ctrl-C stops the job; a second Ctrl-C stops it immediately. Fields of FILE that have no effect
    here are named on standard error. So is the link of --dashboard, whose pages are there until the
    command ends.

    \f

    Args:
        file: path of the job file.
        hosts: number of simulated hosts; None for as many as the job needs with its standbys.
        as_json: print events and status as lines of JSON.
        plain: print lines instead of a live display.
        show: workers whose output is shown; None for ``rank0``, or ``none`` with ``as_json``.
        grace: seconds that nodes get to end when the job is stopped.
        shows_pages: serve the dashboard until the job ends.
    """
    settings = Settings.from_environment()
    document = jobfile.load(file)
    elastic_job = document.job
    _print_remarks(document.remarks)
    _print_field_remark(elastic_job.for_clusters_only(), CLUSTER_ONLY)
    _print_field_remark(elastic_job.without_effect(), INERT)
    _print_worker_warnings(elastic_job)
    if hosts is None:
        hosts = elastic_job.worker.replicas + elastic_job.worker.standby_replicas
        hosts += elastic_job.servers.total if elastic_job.servers is not None else 0
    from dlrover_py.cli.run import run_job  # it imports the web framework, which takes time

    pages = None
    if shows_pages:
        from dlrover_py.cli import dashboard
        from dlrover_py.cli.jobs import Jobs

        listener = dashboard.listening_socket("127.0.0.1", None)
        pages = dashboard.Pages(Jobs(), elastic_job.metadata.name, listener)
        click.echo(f"the dashboard is at {pages.link}", err=True)
    return run_job(
        elastic_job,
        settings,
        hosts=hosts,
        workdir=file.resolve().parent,
        grace_s=grace,
        style=_style(as_json=as_json, plain=plain),
        show=show or ("none" if as_json else "rank0"),
        pages=pages,
    )


@cluster.command("run")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--nodes",
    "hosts",
    type=click.IntRange(1, 1000),
    default=6,
    show_default=True,
    metavar="N",
    help="Number of simulated hosts.",
)
def run_cluster(folder: Path, hosts: int) -> int:
    """Run all jobs of the job files in FOLDER on --nodes simulated hosts, until they have ended.

    The jobs grow and shrink as the allocator decides; no job dies of it. A file that is put into
    FOLDER later is a job that arrives. The exit code is 0 if all jobs succeeded. Ctrl-C stops all.

    \f

    Args:
        folder: folder of the job files (``*.yaml``).
        hosts: number of simulated hosts.
    """
    from dlrover_py.cli.shared import run_shared

    return run_shared(folder, Settings.from_environment(), hosts=hosts)


@cluster.command("hosts")
@as_json
@target_options
def show_hosts(as_json: bool, target: Target) -> None:
    """Show the hosts of a cluster that have failed, the worst first.

    The faults are those of all jobs that exist, also of ended ones: failed devices, failed checks,
    lost nodes. The score is the one that counts for the jobs of the namespace: all jobs of another
    one count as a single job. From 1.5 on the operator counts a host as a bad one for them. The
    namespaces whose jobs it has told of a host are shown.

    Users who may not list the jobs of all namespaces see the faults of the namespace.

    \f

    Args:
        as_json: print JSON instead of text.
        target: cluster that the flags name.

    Raises:
        DLRoverError: the cluster refuses a call, or does not answer.
    """
    from dlrover_py.cli.cluster import ClusterClient

    with ClusterClient(target) as client:
        rows = client.hosts()
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no host has failed")
    for row in rows:
        told = ((word, row[f"{word}For"]) for word in ("bad", "avoided"))
        state = "; ".join(f"{word} for {_few(spaces)}" for word, spaces in told if spaces)
        jobs = counted(row["jobs"], "job")
        line = f"{row['host']:40} {row['score']:5.1f}  {row['faults']} in {jobs}  {state}"
        click.echo(view.plain(line.rstrip()))


def _few(names: Sequence[str]) -> str:
    """Return the first three names, then the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@job.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--apply", is_flag=True, help="Update a job that exists already.")
@click.option("--dry-run", is_flag=True, help="Only have the API server check the jobs.")
@click.option("--wait", is_flag=True, help="Show the progress until the jobs end.")
@click.option("--json", "as_json", is_flag=True, help="With --wait: print lines of JSON.")
@click.option("--plain", is_flag=True, help="With --wait: print lines, not a live display.")
@target_options
def submit(
    files: tuple[Path, ...],
    apply: bool,
    dry_run: bool,
    wait: bool,
    as_json: bool,
    plain: bool,
    target: Target,
) -> int:
    """Create the ElasticJobs in FILES in a cluster.

    `-` is standard input. All jobs are checked before the first one is created. A job that exists
    already is refused, unless --apply is given. --apply replaces its spec with that of the file.
    `suspend` keeps its value if the file does not set it. Without --wait, the command returns
    before the jobs run. With --wait, the exit code is 0 if all jobs succeeded.
    Ctrl-C during --wait leaves the job running.

    \f

    Args:
        files: paths of job files; ``-`` is standard input.
        apply: change a job whose name is taken. Otherwise it is refused.
        dry_run: only have the API server check the jobs.
        wait: show the progress of the jobs, one after the other, until they end.
        as_json: print progress as lines of JSON.
        plain: print progress as lines instead of a live display.
        target: cluster that the flags name.
    """
    from dlrover_py.cli.cluster import ClusterClient

    documents = [document for file in files for document in jobfile.load_all(file)]
    for document in documents:
        _print_remarks(document.remarks)
        _print_field_remark(document.job.without_effect(), INERT)
        _print_worker_warnings(document.job)
    style = _style(as_json=as_json, plain=plain)
    with ClusterClient(target) as cluster:
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
    """Yield the flags with which a later command finds the same job."""
    yield f"-n {namespace}"
    if target.context:
        yield f"--context {target.context}"
    if target.kubeconfig:
        yield f"--kubeconfig {target.kubeconfig}"


def _style(*, as_json: bool, plain: bool) -> Style:
    """Return how progress is shown.

    Without a flag it is a live display on a terminal, and lines elsewhere.
    """
    return "json" if as_json else "plain" if plain or not sys.stdout.isatty() else "live"


def _print_remarks(lines: Sequence[str]) -> None:
    """Print remarks on standard error."""
    for line in lines:
        click.echo(view.plain(f"dlrover: {line}"), err=True)


def _print_field_remark(paths: Sequence[str], word: str) -> None:
    """Print one remark about several fields of a job, if there are any."""
    if paths:
        _print_remarks([f"{', '.join(paths)}: {word}"])


def _print_worker_warnings(job: ElasticJob) -> None:
    """Print a warning for what of the job's workers looks wrong."""
    remarks = (job.worker.restart_remarks(), job.worker.command_remarks())
    _print_remarks([f"warning: {text}" for text in remarks if text])


# --- Commands that read jobs ---


@job.command("list")
@click.option(
    "--all", "show_all", is_flag=True, help="Include all past jobs, not only the last ten."
)
@as_json
def list_jobs(show_all: bool, as_json: bool) -> None:
    """List the running and the past jobs of this machine.

    A run whose `dlrover job run` was killed has the phase Killed, and nothing else is known of it.
    """
    settings = Settings.from_environment()
    jobs = local_jobs.listed(settings)
    past = [job for job in jobs if job.state != "running"]
    left_out = [] if show_all else past[10:]
    found = jobs[: len(jobs) - len(left_out)]
    _print_remarks([job.problem for job in found if job.problem])
    if as_json:
        documents = [
            {"name": job.name, "state": job.state, "status": view.dump(job.status)} for job in found
        ]
        click.echo(json.dumps(documents))
        return
    _print_table([job.row for job in found], local=True)
    if not found:
        click.echo("no jobs; start one with `dlrover job run job.yaml`", err=True)
    if left_out:
        text = f"… and {len(left_out)} more: list them with --all, or see `dlrover job rm`"
        click.echo(text, err=True)


def _print_table(rows: Sequence[view.JobRow], *, local: bool) -> None:
    """Print a table of jobs; nothing, not even the head, if there are none."""
    table = view.JobTable(rows, local=local, width=_width())
    for text in (table.header(), *map(table.line, rows)) if rows else ():
        click.echo(text)


def _width() -> int | None:
    """Return the columns of the terminal; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@job.command()
@job_name
@click.option("-A", "--all-namespaces", "all_namespaces", is_flag=True, help="Show all namespaces.")
@click.option("-w", "--watch", is_flag=True, help="Print each job again when it changes.")
@as_json
@target_options
def get(name: str | None, all_namespaces: bool, watch: bool, as_json: bool, target: Target) -> None:
    """Show the jobs of a cluster, or one job, as a table.

    If no cluster is configured, the jobs that run on this machine are shown. With --watch, the
    command runs until it is interrupted.

    \f

    Args:
        name: name of the job; None for all jobs.
        all_namespaces: search all namespaces of the cluster.
        watch: continue, and print each change.
        as_json: print a list in JSON; with ``watch``, one object on a line for each job.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, no cluster is configured where one is needed, or a job on
            this machine is to be watched.
        DLRoverError: the API server or the job's cluster process refuses a call, or does not
            answer.
    """
    settings = Settings.from_environment()
    may_be_local = not (target.given or all_namespaces)
    if name is not None and may_be_local:
        with contextlib.suppress(local_jobs.JobNotFoundError):
            _print_local_jobs(
                [local_jobs.find_to_read(settings, name)], as_json=as_json, watch=watch
            )
            return
    from dlrover_py.cli.cluster import ClusterClient, NoClusterError, Rows, rows_as_json

    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(ClusterClient(target))
        except NoClusterError as error:
            jobs = [*local_jobs.running(settings).values()]
            if may_be_local and name is not None:
                raise ConfigError(
                    f"job {name} is not known on this machine; see `dlrover job list`\n{error}"
                ) from error
            if not may_be_local or (watch and not jobs):
                raise ConfigError(f"{error}; for this machine see `dlrover job list`") from error
            if not jobs:
                click.echo(f"dlrover: no job runs on this machine, and {error}", err=True)
            _print_local_jobs(jobs, as_json=as_json, watch=watch)
            return
        table: view.JobTable | None = None

        def show(rows: Rows) -> None:
            nonlocal table
            lines = []
            if as_json and not watch:
                click.echo(json.dumps([json_text.decoded(line) for line in rows_as_json(rows)]))
                return
            if as_json:
                lines = rows_as_json(rows)
            else:
                if table is None and rows:
                    first = [row for row, _ in rows]
                    table = view.JobTable(first, namespaces=all_namespaces, width=_width())
                    lines.append(table.header())
                lines += [table.line(row) for row, _ in rows] if table is not None else []
            for line in lines:
                click.echo(line)
            sys.stdout.flush()

        if not as_json:
            space = "all namespaces of " + cluster.kube.host
            click.echo(space if all_namespaces else cluster.place(cluster.namespace), err=True)
        if watch:
            if name is not None:  # a job that does not exist is refused, as kubectl does
                cluster.rows(name, all_namespaces=all_namespaces)
            cluster.watch_rows(name, all_namespaces=all_namespaces, show=show)
        rows = cluster.rows(name, all_namespaces=all_namespaces)
        show(rows)
        if not rows and not as_json:
            click.echo("no jobs; start one with `dlrover job submit job.yaml`", err=True)


def _print_local_jobs(
    jobs: Sequence[local_jobs.RunningJob | local_jobs.EndedJob], *, as_json: bool, watch: bool
) -> None:
    """Print jobs of this machine, as a table or as JSON.

    Raises:
        ConfigError: ``watch`` is given, or a job's last status is damaged.
        UnreachableError: a job's cluster process does not answer.
    """
    if watch:
        raise ConfigError(
            f"--watch is for jobs of a cluster, and {jobs[0].name} is {jobs[0].where}: "
            "use `dlrover job events` or `dlrover job logs -f`"
        )
    found = [(job.name, job.load_view()) for job in jobs]
    if as_json:
        fields = ("namespace", "name", "phase", "reason", "status")
        values = [("", name, p.phase, p.reason, view.dump(p.status)) for name, p in found]
        click.echo(json.dumps([dict(zip(fields, v, strict=True)) for v in values]))
        return
    click.echo(jobs[0].where if len(jobs) == 1 else "on this machine", err=True)
    _print_table([view.JobRow.of_job(name, p.status, p.phase) for name, p in found], local=False)


@job.command()
@job_name
@as_json
@target_options
def describe(name: str | None, as_json: bool, target: Target) -> None:
    """Show the details of a job.

    These are problems, spec, nodes, conditions, the last failure and events.

    \f

    Args:
        name: name of the job; None for the only one.
        as_json: print JSON instead of text.
        target: cluster that the flags name.
    """
    width = _width()
    console = Console(highlight=False, soft_wrap=True, width=width or 200)
    with selected_job(target, name, quiet=as_json) as job:
        job_view = job.load_view(with_pods=True)
        if as_json:
            shown = {"name": job_view.name, "phase": job_view.phase, "reason": job_view.reason}
            click.echo(json.dumps({**shown, **job_view.document}))
            return
        for part in view.description(job_view, width):
            console.print(part)


@job.command()
@job_name
@as_json
@target_options
def events(name: str | None, as_json: bool, target: Target) -> None:
    """Show the events of a job, the oldest first.

    These are the newest events that its master keeps. In a cluster, those that Kubernetes still
    keeps are added.

    \f

    Args:
        name: name of the job; None for the only one.
        as_json: print each event as a line of JSON.
        target: cluster that the flags name.
    """
    with selected_job(target, name, quiet=as_json) as job:
        job_view = job.load_view()
        _print_remarks(job_view.notes)
        for event in job_view.events:
            click.echo(event.model_dump_json() if as_json else view.event_line(event))


@job.command()
@job_name
@click.option(
    "--round",
    "round_number",
    type=click.IntRange(min=1),
    help="Explain why this round was formed.",
)
@as_json
@target_options
def why(name: str | None, round_number: int | None, as_json: bool, target: Target) -> None:
    """Show the chain of causes that led to the job's present state.

    Each cause is shown with its time, and so are the events in between. If no known event explains
    the state, only the phase and its reason are shown. Of a lost node, what was known last follows.

    \f

    Args:
        name: name of the job; None for the only one.
        round_number: number of the round to explain; None for the job's present state.
        as_json: print JSON instead of text.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, or no event is about the round.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    with selected_job(target, name, quiet=as_json) as job:
        job_view = job.load_view()
        chain = view.causal_chain([e for e in job_view.events if e.id > 0], round_number)
        losses = {(e.node, e.round or 0) for e in chain if e.reason == EventReason.NODE_LOST}
        bundles = job.evidence() if losses and not as_json else []
    _print_remarks(job_view.notes)
    newest = job_view.status.round if job_view.status is not None else 0
    if round_number is not None and not chain:
        raise ConfigError(
            f"round {round_number}: no event is about it; the newest round is {newest}"
        )
    if as_json:
        click.echo(json.dumps([e.model_dump(mode="json") for e in chain]))
        return
    if round_number is None:
        click.echo(view.plain(f"{job_view.name} is {job_view.phase}: {job_view.reason}"))
        for condition in job_view.problems:
            if not job_view.reason or job_view.reason not in condition.message:
                click.echo(f"  {view.problem_line(condition)}")
        if job_view.new_hosts:
            click.echo(f"  {view.plain(job_view.new_hosts)}")
        if job_view.size_reason:
            click.echo(f"  {view.plain(job_view.size_reason)}")
        if job_view.resource_advice:
            click.echo(f"  resources: {view.plain(job_view.resource_advice)}")
    for event in chain:
        click.echo(f"  {view.event_line(event)}")
    for line in last_known(losses, bundles):
        click.echo(f"  {view.plain(line)}")
    if (
        round_number is None
        and newest > 1
        and all(event.reason != EventReason.ROUND_FORMED for event in chain)
    ):
        click.echo(f"for the causes of its last round: dlrover job why {job.name} --round {newest}")


@job.command()
@job_name
@as_json
@target_options
def goodput(name: str | None, as_json: bool, target: Target) -> None:
    """Show where the time of a job went.

    The parts add up to the time since its start. The first line is the productive part of the time
    without suspensions.

    \f

    Args:
        name: name of the job; None for the only one.
        as_json: print JSON instead of text.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, or it has no status yet.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    with selected_job(target, name, quiet=as_json) as job:
        job_view = job.load_view()
    status = job_view.status
    if status is None or status.goodput is None:
        raise ConfigError(f"job {job_view.name} has no status yet: expected a master that runs it")
    if as_json:
        click.echo(status.goodput.model_dump_json())
        return
    words = status.goodput_words or "not known: the script has not reported a step (report_step)"
    click.echo(f"{job_view.name}: goodput {words}")
    for line in view.goodput_lines(status.goodput):
        click.echo(f"  {line}")
    if best := view.ceiling_line(status.goodput):
        click.echo(best)


@ps.command()
@job_name
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@target_options
def stats(name: str | None, as_json: bool, target: Target) -> None:
    """Show what the servers of a job have and do: buckets, rows, memory, rows per second.

    A server leads a bucket if it applies the pushes first. Rows and memory include copies. Pushes
    that wait are those that other copies do not have yet.

    \f

    Args:
        name: name of the job; None for the only one.
        as_json: print JSON instead of text.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, or its servers have not been heard.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    with selected_job(target, name, quiet=as_json) as job:
        job_view = job.load_view()
    tables = _tables(job_view)
    if as_json:
        click.echo(tables.model_dump_json())
        return
    _print_tables(job_view.name, tables, view.loads_table(tables))
    if line := view.staleness_line(tables):
        click.echo(line)


@ps.command("map")
@job_name
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@target_options
def show_map(name: str | None, as_json: bool, target: Target) -> None:
    """Show which server leads which buckets of a job's tables, or has copies, and their load.

    ASKED/S is rows per second in the last half minute, and OF MEAN compares it with the mean of the
    servers. With more than 512 buckets, they are counted and not listed.

    \f

    Args:
        name: name of the job; None for the only one.
        as_json: print JSON instead of text.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, or its servers have not been heard.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    with selected_job(target, name, quiet=as_json) as job:
        job_view = job.load_view()
    tables = _tables(job_view)
    leaving = server_map.leaving_servers(job_view.status) if job_view.status is not None else set()
    if as_json:
        click.echo(json.dumps(server_map.document(tables, leaving)))
        return
    _print_tables(job_view.name, tables, server_map.table(tables, leaving))


@ps.command()
@job_name
@click.option("--dry-run", is_flag=True, help="Show what would move, and change nothing.")
@target_options
def rebalance(name: str | None, dry_run: bool, target: Target) -> None:
    """Even the servers of a job by their loads now, and say what follows.

    The coordinator does so by itself when the busiest server has more than 1.25 times the mean for
    half a minute. Buckets move a few at a time while training goes on.

    \f

    Args:
        name: name of the job; None for the only one.
        dry_run: show what would move, and change nothing.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, it has no servers that were heard, or with ``dry_run``
            the loads of buckets are not known.
        UnreachableError: the job's coordinator has not answered within `REBALANCE_S`.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    at = date_time(view.now())
    with selected_live_job(target, name) as job:
        job_view = job.load_view()
        _tables(job_view)
        if dry_run and job_view.status is not None:
            plan = server_map.foreseen(job_view.status)
            click.echo(f"{job.name}: {plan.words}")
            for move in plan.moves:
                click.echo(f"  {move.words}")
            return
        job.even_servers(at)
        name = job.name

    def answer(status: JobStatus) -> str:
        answered = status.tables.rebalanced if status.tables is not None else None
        return answered.words if answered is not None and answered.request == at else ""

    words = _until(target, name, answer, REBALANCE_S)
    if not words:
        raise UnreachableError(
            f"{name}: no answer within {REBALANCE_S:g} s; the request stays open: see "
            "`dlrover ps map`"
        )
    click.echo(view.plain(f"{name}: {words}"))


@ps.command(cls=_NamesJobByFlag)
@click.argument("server_id", metavar="SERVER")
@of_job
@click.option(
    "--timeout",
    type=Real(0, 86_400),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time to wait. The server leaves after it all the same.",
)
@target_options
def drain(server_id: str, name: str | None, timeout: float, target: Target) -> None:
    """Move all buckets away from a server, which then ends, and wait for that.

    No row is lost, and training goes on. Another server takes its place, if a host has room. On
    this machine, the host of the server takes no other node: `dlrover node add` adds one.

    \f

    Args:
        server_id: id of the server, such as ``ps1``.
        name: name of the job; None for the only one.
        timeout: longest time to wait, in seconds.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job or server.
        UnreachableError: the server has not left in time.
        DLRoverError: the server ended before it had given all its rows away; or the job's cluster
            refuses a call, or does not answer.
    """
    with selected_live_job(target, name) as job:
        known = [one.id for one in _tables(job.load_view()).servers]
        if server_id not in known:
            raise ConfigError(
                f"{job.name} has no server {server_id}: expected one of {', '.join(known)}"
            )
        click.echo(job.drain_server(server_id), err=True)
        name = job.name

    if not _until(target, name, lambda status: server_map.has_left(status, server_id), timeout):
        raise UnreachableError(
            f"{name}: {server_id} has not ended after {timeout:g} s, and goes on leaving; see "
            "`dlrover ps map`"
        )
    click.echo(f"{name}: {server_id} has left")


def _tables(job_view: view.JobView) -> TablesStatus:
    """Return what is known of a job's tables.

    Raises:
        ConfigError: nothing is known.
    """
    tables = job_view.status.tables if job_view.status is not None else None
    if tables is None:
        raise ConfigError(
            f"job {job_view.name}: expected a job with the role ps whose master runs, found no "
            "news of its servers"
        )
    return tables


def _print_tables(name: str, tables: TablesStatus, table: Table) -> None:
    """Print a line about a job's tables, and a table of its servers.

    Args:
        name: name of the job.
        tables: what is known of the tables.
        table: the table of the servers.
    """
    console = Console(highlight=False, soft_wrap=True, width=_width() or 200)
    console.print(f"{name}: {view.tables_words(tables)}", markup=False)
    console.print(table)


def _until(target: Target, name: str, look: Callable[[JobStatus], T], within_s: float) -> T | None:
    """Look at the status of a job until something is true of it; return that, or the last value.

    Args:
        target: cluster that the flags name.
        name: name of the job.
        look: the question.
        within_s: longest time to wait, in seconds.

    Raises:
        ConfigError: there is no such job any more.
        DLRoverError: the question raises it; or the job's cluster refuses a call, or does not
            answer.
    """
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while True:
        # A job of a cluster is read anew each time: its handle has the object of the beginning.
        with selected_job(target, name, quiet=True) as found:
            status = found.load_view().status
        answer = look(status) if status is not None else None
        if answer or time.monotonic() >= deadline:
            return answer
        if status is not None and status.phase.ended:
            raise ConfigError(f"{name} has ended; see `dlrover job describe`")
        pause.wait(0.2)


@job.command()
@job_name
@target_options
def report(name: str | None, target: Target) -> None:
    """Write a page of HTML about a job: nodes, rounds, steps, goodput and failures.

    The page goes to standard output and needs no other files: dlrover job report NAME > report.html

    \f

    Raises:
        ConfigError: there is no such job, or standard output is a terminal.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    from dlrover_py.dashboard.pages import report as page

    with selected_job(target, name) as job:
        if sys.stdout.isatty():
            raise ConfigError(
                "standard output is a terminal: write the page to a file, as in "
                f"`dlrover job report {job.name} > {job.name}.html`"
            )
        text = page(job.load_view(with_pods=True), job.history(), now=view.now())
    click.echo(text.encode(), nl=False)  # UTF-8, the encoding that the page declares


@job.command("curves")
@job_name
@click.option(
    "--tensorboard",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write an event file of TensorBoard to DIR/NAME instead.",
)
@target_options
def curves_of_job(name: str | None, folder: Path | None, target: Target) -> None:
    """Write the steps, the speed and the script's numbers over time as CSV.

    The CSV goes to standard output: dlrover job curves NAME > curves.csv. With --tensorboard DIR,
    `tensorboard --logdir DIR` shows the curves of all jobs that were written to DIR. Only jobs of
    this machine have a history.

    \f

    Args:
        name: name of the job; None for the only one, or the last one.
        folder: parent of the folder of the event file; None for CSV.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, it has no history, TensorBoard is not installed, or the
            file cannot be written.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    from dlrover_py.dashboard import curves

    with selected_job(target, name) as job:
        history, title = job.history(), job.name
    if not history.samples:
        raise ConfigError(
            f"job {title} has no history: expected a job of this machine whose script reports its "
            "steps (report_step)"
        )
    if folder is None:
        click.echo(curves.as_csv(history).encode(), nl=False)
        return
    content = curves.as_event_file(history)
    file = folder / title / curves.EVENT_FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced_when_whole(file) as part:  # TensorBoard may look at the folder meanwhile
            part.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; choose another folder") from error
    click.echo(f"{file}: {counted(len(history.samples), 'sample')}")


@job.command()
@job_name
@click.option("-f", "--follow", is_flag=True, help="Continue until the job ends.")
@click.option("--node", "only_node", help="Show only this node.", shell_complete=complete.nodes)
@click.option(
    "--rank",
    "only_rank",
    type=click.IntRange(min=0),
    help="Show only this global rank; in a cluster, all workers of its node.",
)
@click.option(
    "--round",
    "only_round",
    type=click.IntRange(min=1),
    help="Show only this round; not in a cluster.",
)
@click.option("--agents", is_flag=True, help="Show the logs of agents and master instead.")
@click.option("--previous", is_flag=True, help="In a cluster: include Pods that have ended.")
@target_options
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
    """Show the output of the workers.

    Without --follow, the command prints what there is now, and ends. If a running job on this
    machine has no such log yet, it says so and succeeds.

    \f

    Args:
        name: name of the job; None for the only one.
        follow: continue until the job ends.
        only_node: id of the only node; None for all nodes.
        only_rank: the only global rank; None for all ranks.
        only_round: number of the only round; None for all rounds. A cluster refuses it.
        agents: print the lines of agents and master instead of those of the workers.
        previous: in a cluster, include Pods that have ended.
        target: cluster that the flags name.
    """
    query = LogQuery(
        node=only_node,
        rank=only_rank,
        round=only_round,
        agents=agents,
        follow=follow,
        previous=previous,
    )
    with selected_job(target, name) as job:
        job.show_logs(query)


@root.command()
@job_name
@click.option("--port", type=click.IntRange(1, 65535), help="Port [default: 8765, or a free one].")
@click.option("--operator", is_flag=True, help="Show the pages of the operator in the cluster.")
@target_options
def dashboard(name: str | None, port: int | None, operator: bool, target: Target) -> None:
    """Show jobs as pages in a browser, on this machine only, until it is interrupted.

    Without a flag for a cluster, the pages show the jobs of this machine, past ones too. The
    printed link has a token; without it nobody sees or changes anything.

    With --operator, the link opens the pages that the operator serves for the jobs and hosts of a
    cluster. kubectl connects to it, in the namespace of --namespace [default: dlrover-system].

    \f

    Args:
        name: name of the job whose page the link opens; None for the list of jobs.
        port: port on the loopback device; None for the default one.
        operator: show the operator's pages instead.
        target: cluster that the flags name.

    Raises:
        ConfigError: the port is taken, there is no such job, no kubectl, or no operator that serves
            pages.
        DLRoverError: the job's cluster does not answer.
    """
    if operator:
        import asyncio

        from dlrover_py.cli.operator_pages import OperatorPages

        if name is not None:
            raise click.UsageError("found a job and --operator: the operator's pages show all jobs")
        asyncio.run(OperatorPages(target, port).serve())
        return
    from dlrover_py.cli import dashboard as pages  # it imports the web framework, which takes time
    from dlrover_py.cli.jobs import Jobs

    jobs = Jobs.of_target(target)
    if name is not None:
        jobs.get(name)
    pages.serve(pages.Pages(jobs, name, pages.listening_socket("127.0.0.1", port)))


@job.command()
@job_name
@as_json
@target_options
def stacks(name: str | None, as_json: bool, target: Target) -> None:
    """Look at all ranks of a running job, and show what each one does.

    Ranks that do the same share a line, and the odd ones come first. The job is not stopped.

    \f

    Args:
        name: name of the job; None for the only one.
        as_json: print JSON instead of text.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job, or it does not train now.
        UnreachableError: the job has no result within `SNAPSHOT_S`.
    """
    at = date_time(view.now())
    deadline = time.monotonic() + SNAPSHOT_S
    pause = threading.Event()
    with selected_live_job(target, name) as job:
        phase = job.load_view().phase
        if phase != JobPhase.RUNNING:
            raise ConfigError(f"{job.name} is {phase}: expected a job whose ranks run")
        job.take_snapshot(at)
        name = job.name
    # A job of a cluster is read anew each time: its handle has the object of the beginning.
    while True:
        with selected_job(target, name, quiet=True) as found:
            status = found.load_view().status
        taken = None if status is None else status.diagnosis
        if taken is not None and taken.request == at:
            break
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"{name}: no snapshot within {SNAPSHOT_S:g} s; see `dlrover job describe`"
            )
        pause.wait(0.2)
    if as_json:
        click.echo(taken.model_dump_json())
        return
    for line in taken.lines:
        click.echo(view.plain(line))
    if taken.verdict is not None:
        click.echo(view.plain(f"verdict: {taken.verdict.message}"))
    if taken.folder:
        click.echo(f"evidence: {taken.folder}", err=True)


@job.command()
@job_name
@as_json
@target_options
def evidence(name: str | None, as_json: bool, target: Target) -> None:
    """List the bundles of evidence that were kept: hangs, failures, losses, slow or wrong steps.

    \f

    Args:
        name: name of the job; None for the only one.
        as_json: print JSON instead of text.
        target: cluster that the flags name.

    Raises:
        ConfigError: there is no such job.
    """
    with selected_job(target, name, quiet=as_json) as job:
        bundles = job.evidence()
    if as_json:
        documents = [bundle.model_dump(mode="json") for bundle in bundles]
        click.echo(json.dumps(documents))
        return
    if not bundles:
        click.echo("no evidence was kept: nothing has happened, and nobody has asked", err=True)
    for bundle in bundles:
        what = bundle.verdict.message if bundle.verdict is not None else bundle.reason
        at = f"{view.clock(bundle.at)} round {bundle.round}"
        click.echo(view.plain(f"{at}, {bundle.kind}: {what}"))
        if bundle.folder:
            click.echo(view.plain(f"  {bundle.folder}"))


# --- Commands that change jobs ---


@job.command(cls=_NamesJobByFlag)
@click.argument("replicas", type=NodeCount(min=1))
@click.option(
    "--role",
    type=click.Choice([ROLE_WORKER, SERVER_PREFIX]),
    default=ROLE_WORKER,
    show_default=True,
    help="Role of the nodes: ps are the servers of a parameter server.",
)
@of_job
@target_options
def scale(replicas: int, role: str, name: str | None, target: Target) -> None:
    """Change the desired number of nodes.

    The command returns when the request is accepted. The job's master then starts or ends nodes. A
    server that ends gives its rows to others first.

    \f

    Args:
        replicas: desired number of nodes.
        role: role of the nodes: ``worker`` or ``ps``.
        name: name of the job; None for the only one.
        target: cluster that the flags name.
    """
    with selected_live_job(target, name) as job:
        click.echo(job.scale(replicas, role))


@job.command()
@job_name
@target_options
def suspend(name: str | None, target: Target) -> None:
    """Stop all nodes; none is started until the job is resumed.

    The command returns when the request is accepted. The nodes end afterwards.
    """
    with selected_live_job(target, name) as job:
        click.echo(job.suspend(on=True))


@job.command()
@job_name
@target_options
def resume(name: str | None, target: Target) -> None:
    """Continue a suspended job.

    The command returns when the request is accepted. It has no effect on a job that is not
    suspended.
    """
    with selected_live_job(target, name) as job:
        click.echo(job.suspend(on=False))


@job.command()
@job_name
@click.option(
    "--timeout",
    type=Real(0, 86_400),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time to wait. The write goes on after it.",
)
@target_options
def checkpoint(name: str | None, timeout: float, target: Target) -> None:
    """Store the newest checkpoint in memory now, while training goes on.

    The answer names the step and the folder, or says why nothing was stored, with exit code 1. A
    checkpoint that is in storage already is not written again.

    \f

    Args:
        name: name of the job; None for the only one.
        timeout: longest time to wait, in seconds.
        target: cluster that the flags name.

    Raises:
        CheckpointError: nothing could be stored.
        UnreachableError: the checkpoint was not in storage in time.
    """
    from dlrover_py.cli.jobs import Jobs, NamedJob

    with selected_live_job(target, name) as job:
        name = job.name
    jobs = Jobs.of_target(target)
    try:
        click.echo(view.plain(NamedJob(jobs, name).checkpoint(timeout)))
    except TimeoutError as error:
        raise UnreachableError(str(error)) from error


@job.command()
@job_name
@click.option(
    "--rolling",
    is_flag=True,
    help="Replace one unit of nodes at a time, each once the job trains at full size again.",
)
@target_options
def restart(name: str | None, rolling: bool, target: Target) -> None:
    """Replace all nodes with new ones.

    The new nodes are made from the job's present template. The newest state is stored first, if the
    job stores checkpoints. The restart does not count against any restart budget. The command
    returns when the request is accepted, before a node is replaced.

    \f

    Args:
        name: name of the job; None for the only one.
        rolling: replace one unit of nodes after the other, not all at the same time.
        target: cluster that the flags name.
    """
    with selected_live_job(target, name) as job:
        click.echo(job.restart(rolling=rolling))


@job.command()
@job_name
@click.option(
    "--micro-batch",
    type=click.IntRange(1, MAX_MICRO_BATCH),
    metavar="N",
    help="Greatest number of samples that a worker computes at once.",
)
@click.option(
    "--loader-workers",
    type=click.IntRange(0, MAX_LOADER_WORKERS),
    metavar="N",
    help="Number of processes that read data for each worker.",
)
@click.option(
    "--auto/--no-auto", default=None, help="Whether the auto-tuner chooses what you have not set."
)
@click.option("--reset", is_flag=True, help="Use the settings of the script again.")
@target_options
def tune(
    name: str | None,
    micro_batch: int | None,
    loader_workers: int | None,
    auto: bool | None,
    reset: bool,
    target: Target,
) -> None:
    """Change the data loading of a training that runs.

    All workers change at the same step. The samples of each step and its gradient stay the same.
    The script must read its data with an ElasticLoader. The command returns when the request is
    accepted; events show the step from which on it holds, or why it cannot be done.

    \f

    Args:
        name: name of the job; None for the only one.
        micro_batch: greatest number of samples that a worker computes at once; None to keep it.
        loader_workers: number of processes that read data for each worker; None to keep it.
        auto: whether the auto-tuner chooses what is not set; None to keep that.
        reset: remove all settings.
        target: cluster that the flags name.

    Raises:
        ConfigError: no flag is given, or ``--reset`` with another one; or as for the job.
        DLRoverError: the job's cluster refuses the change, or does not answer.
    """
    given = (micro_batch, loader_workers, auto) != (None, None, None)
    if given == reset:
        raise ConfigError(
            "expected --micro-batch, --loader-workers or --auto; or --reset without them"
        )
    with selected_live_job(target, name) as job:
        click.echo(job.tune(micro_batch=micro_batch, loader_workers=loader_workers, auto=auto))


@job.command()
@job_name
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the job has ended."
)
@target_options
def stop(name: str | None, wait: bool, target: Target) -> None:
    """End a job on this machine, with all its processes.

    If the job has not ended after a minute, the command fails, and the job is still being stopped.
    For a job in a cluster see `delete`.

    \f

    Args:
        name: name of the job; None for the only one.
        wait: return only when the job has ended.
        target: cluster that the flags name.
    """
    with selected_live_job(target, name) as job:
        click.echo(job.stop(wait=wait))


@job.command()
@click.argument("name", shell_complete=complete.jobs)
@click.option(
    "--cascade",
    type=click.Choice(["background", "foreground", "orphan"]),
    default="background",
    show_default=True,
    help="Delete its Pods after it (background), before it (foreground), or not (orphan).",
)
@click.option("--wait", is_flag=True, help="Wait until the job and its Pods are gone.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@target_options
def delete(name: str, cascade: str, wait: bool, yes: bool, target: Target) -> None:
    """Delete a job of a cluster, with its Pods and their logs.

    The name of the job must be typed to confirm, unless --yes is given. Without --wait, the command
    returns when the API server has accepted the deletion.

    \f

    Args:
        name: name of the job.
        cascade: what happens to its Pods: ``background``, ``foreground`` or ``orphan``.
        wait: return only when the job is gone, and its Pods if they are deleted.
        yes: do not ask for confirmation.
        target: cluster that the flags name.
    """

    def confirm(what: str) -> None:
        if yes:
            return
        if not sys.stdin.isatty():
            raise ConfigError(
                f"this deletes {what}: standard input is no terminal; confirm with --yes"
            )
        answer = click.prompt(
            f"this deletes {what}\ntype the name of the job to confirm", default="", err=True
        )
        if answer != name:
            raise ConfigError(f"expected the name {name!r}, found {answer!r}: nothing was deleted")

    with selected_live_job(target, name) as job:
        click.echo(job.delete(cascade=cascade, wait=wait, confirm=confirm))


@job.command("rm")
@click.argument("jobs", nargs=-1, metavar="[NAME]...")
@click.option("--older-than", metavar="AGE", help="Remove runs that ended longer ago: 12h, 7d, 2w.")
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Keep the newest N runs of each job.",
)
@click.option("--all", "everything", is_flag=True, help="Remove the runs of all jobs.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def remove_runs(
    jobs: tuple[str, ...], older_than: str | None, keep: int, everything: bool, yes: bool
) -> None:
    """Remove past runs of this machine, with their logs. Running jobs are never removed.

    All given conditions must hold. If no past run matches, the command says so and succeeds. It
    fails, and removes nothing, if a job of a given name has no past run. What an earlier call could
    not remove completely is removed in any case.

    \f

    Args:
        jobs: names of jobs; empty for all jobs.
        older_than: least time since the end of a run, such as ``7d``; None for any time.
        keep: number of the newest runs of each job that stay.
        everything: permit that no other condition is given.
        yes: do not ask for confirmation.

    Raises:
        ConfigError: no condition is given, ``older_than`` has another form, a job of that name has
            no past run, a folder cannot be removed, or there is no terminal for the question.
        Abort: the user does not confirm (click.Abort).
    """
    settings = Settings.from_environment()
    if not (jobs or older_than or keep or everything):
        raise ConfigError("no runs selected: expected names of jobs, --older-than, --keep or --all")
    limit = None if older_than is None else runs.seconds(older_than)
    known = runs.ended(settings.state_folder)
    if unknown := set(jobs) - {run.name for run in known}:
        _finish_removals(settings.state_folder)
        names = ", ".join(name or "''" for name in sorted(unknown))
        raise ConfigError(
            f"no run of {names} has ended on this machine: nothing was removed; see "
            "`dlrover job list`"
        )
    gone = runs.to_remove(known, jobs=jobs, older_than_s=limit, keep=keep, now=view.now())
    if not gone:
        _finish_removals(settings.state_folder)
        click.echo("nothing to remove: no past run matches", err=True)
        return
    freed = sum(runs.size(run.folder) for run in gone)
    what = f"{counted(len(gone), 'run')} with their logs ({freed / 1e6:.1f} MB)"
    if not yes:
        for run in gone[:10]:
            click.echo(f"{run.name} {view.short_age(run.ended_at)} ago {run.folder}", err=True)
        if len(gone) > 10:
            click.echo(f"… and {len(gone) - 10} more", err=True)
        if not sys.stdin.isatty():
            raise ConfigError(
                f"this removes {what}: standard input is no terminal; confirm with --yes"
            )
        click.confirm(f"this removes {what}\ncontinue?", abort=True, err=True)
    removed = sum(map(runs.remove, gone))
    click.echo(f"removed {counted(removed, 'run')}")
    _finish_removals(settings.state_folder)


def _finish_removals(state_root: Path | None) -> None:
    """Remove what earlier removals have left, and print what still cannot be removed."""
    for problem in runs.finish_removals(state_root):
        click.echo(f"dlrover: left by an earlier removal: {problem}", err=True)


# --- Commands for nodes ---


def _add_node_command(verb: str, text: str) -> None:
    """Add a command that makes a request about one node, under the name of the request."""

    @node.command(verb, help=text, cls=_NamesJobByFlag)
    @click.argument("node_id", shell_complete=complete.nodes)
    @of_job
    def command(node_id: str, name: str | None) -> None:
        if not re.fullmatch(NODE_ID, node_id):
            raise ConfigError(f"node {node_id!r}: expected the id of a node, such as n0")
        _request(name, f"/v1/nodes/{node_id}/{verb}")


_add_node_command(
    "kill", "Kill all processes of a node and remove its host, as when a machine fails."
)
_add_node_command("freeze", "Stop all processes of a node (SIGSTOP), as when its network fails.")
_add_node_command(
    "thaw", "Continue a frozen node. If it was replaced in the meantime, it is refused and ends."
)
_add_node_command("drain", "Ask a node to leave. Its host takes no other node.")


@node.command(cls=_NamesJobByFlag)
@click.option(
    "--count",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of hosts to add.",
)
@of_job
def add(count: int, name: str | None) -> None:
    """Add simulated hosts. Nodes that wait for a host start immediately.

    Hosts for which no node waits stay free.
    """
    _request(name, f"/v1/hosts?count={count}")


def _request(name: str | None, path: str) -> None:
    """Make a request to the cluster process of a job, and print its answer."""
    click.echo(local_jobs.find_to_change(Settings.from_environment(), name).request(path))


# --- Data ---


@data.command()
@click.argument(
    "what", metavar="[DIR|JOB]", required=False, shell_complete=complete.folders_or_jobs
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@target_options
def verify(what: str | None, as_json: bool, target: Target) -> int:
    """Prove that each sample of each finished epoch was trained once.

    DIR is the folder of ElasticLoader(ledger=…) or of ShardLoader.keep_ledger(…), or a folder with
    it in its folder "ledger". Of a JOB, the ledger is the folder "ledger" beside its checkpoints:
    all runs that continue from these checkpoints share it. The training may be running. Steps that
    were lost with a failure and trained again count once. The exit code is 1 if a sample was left
    out or trained twice, or if that cannot be proven.

    \f

    Args:
        what: the folder, or the name of a job; None for the only job.
        as_json: print JSON instead of text.
        target: cluster that the flags name; then ``what`` is a job.

    Raises:
        ConfigError: there is no such folder and no such job, or no ledger, or torch is not
            installed.
        DLRoverError: the job's cluster refuses a call, or does not answer.
    """
    if what is not None and not target.given and ("/" in what or os.path.exists(what)):
        return 0 if print_report(Path(what), as_json=as_json) else 1
    try:
        with selected_job(target, what, quiet=as_json) as job:
            job_view = job.load_view()
    except ConfigError as error:
        if what is None or target.given:
            raise
        raise ConfigError(f"{error}\n{what}: there is no folder of this name, either") from error
    folder = ledger_of(job_view)
    if not as_json:
        later = "; later runs that continue it are in there, too" if "@" in (what or "") else ""
        click.echo(f"its ledger is {folder}{later}", err=True)
    return 0 if print_report(folder, as_json=as_json) else 1


# --- Choice of a job ---


@contextlib.contextmanager
def selected_job(
    target: Target, name: str | None, *, quiet: bool = False
) -> Iterator[locate.JobHandle]:
    """Find the job to read, and print where it is on standard error, unless ``quiet``.

    A connection to a cluster is closed at the end of the block. Errors are those of
    :func:`dlrover_py.cli.locate.find_to_read`.

    Args:
        target: cluster that the flags name.
        name: name of the job; None for the only one.
        quiet: print nothing.
    """
    from dlrover_py.cli.jobs import Jobs

    with Jobs.of_target(target).reading(name) as job:
        if not quiet:
            click.echo(f"{job.name} {job.where}", err=True)
        yield job


@contextlib.contextmanager
def selected_live_job(target: Target, name: str | None) -> Iterator[locate.LiveJobHandle]:
    """Find the job to change, and print where it is on standard error.

    A connection to a cluster is closed at the end of the block. Errors are those of
    :func:`dlrover_py.cli.locate.find_to_change`.

    Args:
        target: cluster that the flags name.
        name: name of the job; None for the only one.
    """
    from dlrover_py.cli.jobs import Jobs

    with Jobs.of_target(target).changing(name) as job:
        click.echo(f"{job.name} {job.where}", err=True)
        yield job
