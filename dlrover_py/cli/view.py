"""The views of a job for people: pure functions from a snapshot to text and tables.

Text of scripts, workers and other programs is shown only after :func:`plain` has escaped it.
"""

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.job import ReplicaSpec
from dlrover_py.protocol.job_view import JobView as JobView
from dlrover_py.protocol.job_view import causal_chain as causal_chain
from dlrover_py.protocol.job_view import ceiling_line as ceiling_line
from dlrover_py.protocol.job_view import dataset_line as dataset_line
from dlrover_py.protocol.job_view import loader_line as loader_line
from dlrover_py.protocol.job_view import outdated_nodes as outdated_nodes
from dlrover_py.protocol.job_view import problem_line as problem_line
from dlrover_py.protocol.job_view import problems as problems
from dlrover_py.protocol.job_view import problems_without_event as problems_without_event
from dlrover_py.protocol.job_view import progress_words as progress_words
from dlrover_py.protocol.job_view import stream_line as stream_line
from dlrover_py.protocol.job_view import tables_words as tables_words
from dlrover_py.protocol.job_view import time_shares
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.status import (
    DataStatus,
    GoodputStatus,
    JobEvent,
    JobPhase,
    JobStatus,
    NodePhase,
    NodeStatus,
    ServerStatus,
    TablesStatus,
    summarize,
)
from dlrover_py.protocol.words import are, byte_size, counted
from dlrover_py.protocol.words import clock as clock
from dlrover_py.protocol.words import duration as duration
from dlrover_py.protocol.words import output_line as output_line
from dlrover_py.protocol.words import plain as plain

_COLOUR = {
    JobPhase.PENDING: "yellow",
    JobPhase.RUNNING: "green",
    JobPhase.FORMING: "yellow",
    JobPhase.SUSPENDED: "blue",
    JobPhase.SUCCEEDED: "bold green",
    JobPhase.FAILED: "bold red",
    JobPhase.STOPPED: "blue",
}


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of the table of jobs, with the columns of ``kubectl get elasticjobs``."""

    namespace: str
    name: str
    phase: str
    reason: str
    """The problem, in a cluster in one word; empty if there is none."""
    ready: str
    round: str
    progress: str
    restarts: str
    goodput: str
    age: str
    """Time since the job was created or started."""
    took: str = ""
    """Time that the job ran, or has run until now."""
    ended: str = ""
    """Time since the job ended."""

    @classmethod
    def of(cls, status: JobStatus, *, namespace: str = "") -> "JobRow":
        """Return the row of a job from its master's status."""
        summary = summarize(status)
        return cls(
            namespace=namespace,
            name=status.name,
            phase=status.phase.value,
            reason="",
            ready=summary.ready,
            round=str(status.round),
            progress=summary.progress,
            restarts=str(summary.restarts),
            goodput=summary.goodput,
            age=short_age(status.started_at),
            took=short_age(status.started_at, status.ended_at),
            ended=f"{short_age(status.ended_at)} ago" if status.ended_at is not None else "",
        )

    @classmethod
    def of_job(cls, name: str, status: JobStatus | None, phase: str, reason: str = "") -> "JobRow":
        """Return the row of a job of this machine.

        Args:
            name: name of the job.
            status: status of the job; None if there is none.
            phase: phase of a job without a status.
            reason: why the job has no status; empty if that is no problem.
        """
        if status is None:
            return cls("", name, phase, reason, "", "", "", "", "", "")
        return cls.of(status)


_WIDTHS = {
    "namespace": 12,
    "name": 24,
    "phase": 10,
    "reason": 16,
    "ready": 7,
    "round": 6,
    "progress": 16,
    "restarts": 9,
    "goodput": 8,
    "age": 5,
    "took": 5,
    "ended": 9,
}
"""Least width of each column, in characters."""
_FIGURES = ("ready", "round", "progress", "restarts", "goodput")
_CLUSTER_COLUMNS = ("name", "phase", "reason", *_FIGURES, "age")
_LOCAL_COLUMNS = ("name", "phase", *_FIGURES, "took", "ended")
_DISPENSABLE_COLUMNS = (
    "goodput",
    "round",
    "restarts",
    "took",
    "ready",
    "progress",
    "reason",
    "namespace",
)
"""Columns that are left out on a narrow terminal, in this order."""


class JobTable:
    """A table whose columns keep their widths when rows are added later."""

    def __init__(
        self,
        rows: Sequence[JobRow],
        *,
        namespaces: bool = False,
        local: bool = False,
        width: int | None = None,
    ) -> None:
        """Choose the columns.

        Args:
            rows: the first rows.
            namespaces: show the namespace of each job.
            local: the jobs are of this machine: show when they ended, and how long they ran.
            width: width of the terminal in characters; None to show all columns.
        """
        self._columns = [
            *(["namespace"] if namespaces else []),
            *(_LOCAL_COLUMNS if local else _CLUSTER_COLUMNS),
        ]
        self._widths = {
            c: max([_WIDTHS[c], *(len(getattr(row, c)) + 2 for row in rows)]) for c in self._columns
        }
        if width is None:
            return
        longest = max([len("name"), *(len(row.name) for row in rows)])
        self._widths["name"] = min(self._widths["name"], longest + 2)
        for column in _DISPENSABLE_COLUMNS:
            if sum(self._widths[c] + 1 for c in self._columns) <= width:
                break
            if column in self._columns:
                self._columns.remove(column)

    def header(self) -> str:
        """Return the line with the names of the columns."""
        return self._line({c: c.upper() for c in self._columns})

    def line(self, row: JobRow) -> str:
        """Return the line of one job. A cell that is wider than its column moves those after it."""
        return self._line({c: getattr(row, c) for c in self._columns})

    def _line(self, cells: Mapping[str, str]) -> str:
        """Return a line of cells."""
        line = " ".join(cells[c].ljust(self._widths[c]) for c in self._columns)
        return plain(line.rstrip())


def _text(text: str, style: str = "") -> Text:
    """Return escaped text with a style."""
    return Text(plain(text), style=style)


def goodput_lines(goodput: GoodputStatus) -> list[str]:
    """Return a table that shows where the time of a job went."""
    lines = [
        f"{part['what']:28} {duration(part['seconds']):>12} {100 * part['share']:6.1f}%"
        for part in time_shares(goodput)
    ]
    return [*lines, f"{'all':28} {duration(goodput.wall_s):>12} {100:6.1f}%"]


def event_line(event: JobEvent) -> str:
    """Return one event as one line."""
    took = f" [{duration(event.took_s)}]" if event.took_s is not None else ""
    return plain(f"{clock(event.at)} {event.reason}: {event.message}{took}")


def summary(status: JobStatus) -> str:
    """Return the state of a job as one line: phase, round, nodes, workers and progress."""
    if status.phase.ended:  # no node trains any more, so there is no speed
        text = f"{status.phase} · {counted(status.round, 'round')}"
        if status.world_size:
            text += f" · {counted(status.world_size, 'worker')} at the end"
    else:
        text = f"{status.phase} · round {status.round}"
        text += f" · {status.present}/{status.desired} nodes"
        text += f" · {counted(status.workers_in_training, 'worker')}"
        if status.standby:
            text += f" · {status.standby} on standby"
    progress = progress_words(_last_progress(status))
    return text + (f" · {progress}" if progress else "")


def _last_progress(status: JobStatus) -> Progress | None:
    """Return the progress of a job, with speed 0 while no round runs; None if there is none."""
    if status.progress is None or status.phase is JobPhase.RUNNING:
        return status.progress
    return status.progress.model_copy(update={"steps_per_s": 0.0})


_DISPENSABLE_NODE_COLUMNS = (
    *("RESTARTS", "CPUS", "HOST", "DOMAIN", "MEMORY", "POD", "STEP", "ROLE"),
)
"""Columns of the table of nodes that are left out on a narrow terminal, in this order."""


LAST_EVENTS = 10
"""Largest number of events that a description and the final display of a job have."""
NOTES_SHOWN = 3
"""Largest number of node messages below a narrow table."""


def nodes_table(
    nodes: Iterable[NodeStatus], pods: Mapping[str, str] | None = None, width: int | None = None
) -> RenderableType:
    """Return a table of the present nodes and of those that have left.

    On a narrow terminal at most ``NOTES_SHOWN`` messages are shown. Without nodes only the head is.

    Args:
        nodes: the nodes, in the order of the rows.
        pods: in a cluster: a description of each node's Pod.
        width: width of the terminal in characters. Columns that do not fit are left out, and
            messages appear below the table. None shows everything.
    """
    nodes, pods = list(nodes), pods or {}
    domains = any(node.domain for node in nodes)
    measured = any(node.memory_words for node in nodes)
    loses = any(node.network_words for node in nodes)
    gpus = any(node.gpus for node in nodes)
    shown, notes = [], []
    for node in nodes:
        gone = node.phase is NodePhase.GONE
        pids = ", ".join(str(p) for p in node.pids if p)
        workers = f"{node.workers.value}{', warm' if node.warm else ''}"
        if pids and width is None:
            workers += f" (pid {pids})"
        cells = {
            "NODE": node.id,
            "PHASE": node.phase.value,
            "ROLE": "" if gone else node.role.value,
            "RANK": "" if node.node_rank is None or gone else str(node.node_rank),
            "HOST": node.host,
            **({"DOMAIN": node.domain} if domains else {}),
            "WORKERS": "" if gone else workers,
            "STEP": "" if node.step is None or gone else str(node.step),
            **({"CPUS": node.cores_words, "MEMORY": node.memory_words} if measured else {}),
            **({"NETWORK": node.network_words} if loses else {}),
            **({"GPUS": node.gpu_words} if gpus else {}),
            "RESTARTS": str(node.restarts) if node.restarts else "",
            **({"POD": pods.get(node.id, "-")} if pods else {}),
            "": node.message,
        }
        shown.append(({c: plain(text) for c, text in cells.items()}, gone))
    columns = list(shown[0][0]) if shown else ["NODE", "PHASE"]

    def needed() -> int:
        return sum(
            2 + max(cell_len(w) for w in (c, *(row[c] for row, _ in shown))) for c in columns
        )

    if width is not None and needed() > width:
        columns.remove("")
        notes = [f"{row['NODE']}: {row['']}" for row, _ in shown if row[""]][:NOTES_SHOWN]
        for column in _DISPENSABLE_NODE_COLUMNS:
            if needed() > width and column in columns:
                columns.remove(column)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=width is not None)
    for row, gone in shown:
        table.add_row(*(Text(row[c]) for c in columns), style="dim" if gone else None)
    return Group(table, *(Text(note, style="dim") for note in notes))


def spec_lines(snapshot: Snapshot) -> list[str]:
    """Return the head of a local job's description: desired state, hosts, addresses, log folder."""
    job, health = snapshot.job, snapshot.health_addr
    return [
        f"{job.metadata.name}  generation {job.metadata.generation}",
        desired_line(job.worker),
        f"hosts     {', '.join(snapshot.hosts)}",
        f"master    pid {snapshot.master_pid or '-'}, {snapshot.master_addr}",
        f"health    http://{health}/healthz, http://{health}/metrics",
        f"logs      {snapshot.log_dir}",
    ]


def desired_line(worker: ReplicaSpec) -> str:
    """Return the line about the desired number of nodes and the allowed restarts."""
    most = worker.max_replicas if worker.max_replicas is not None else "any"
    return (
        f"desired   {counted(worker.replicas, 'node')} (min {worker.minimum}, max {most}, unit "
        f"{worker.node_unit}, standby {worker.standby_replicas}), "
        f"{counted(worker.restart_count, 'restart')} per node"
    )


def server_line(server: ServerStatus) -> str:
    """Return the state of a server of a parameter server as one line."""
    state = f"runs on {server.host}" if server.running else "starts"
    return f"{server.id} {state}" + (f"; {server.message}" if server.message else "")


def loads_table(tables: TablesStatus) -> Table:
    """Return what each server of a parameter server has and does, as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("SERVER")
    names = ("LEADS", "COPIES OF", "RECEIVES", "ROWS", "MEMORY", "PULLED/S", "PUSHED/S", "WAITING")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in tables.servers:
        counts = (one.leads, one.backs_up, one.receives, one.rows)
        rates = (one.pulled_per_s, one.pushed_per_s)
        table.add_row(
            _text(one.id),
            *(f"{count:,}" for count in counts),
            byte_size(one.memory_bytes),
            *(f"{rate:,.0f}" for rate in rates),
            f"{one.waiting:,}",
        )
    return table


def staleness_line(tables: TablesStatus) -> str:
    """Return how stale the pushes to a parameter server are; empty if no push is counted."""
    rates = tables.stale_pushes_per_s
    whole = sum(rates.values())
    shares = [f"{name}: {100 * rate / whole:.1f} %" for name, rate in rates.items() if rate]
    return f"staleness  {', '.join(shares)}" if shares else ""


def description(job_view: JobView, width: int | None = None) -> list[RenderableType]:
    """Return all that is known of a job, with problems first, as parts for rich to print.

    Parts without data are left out. Of the events, the last ``LAST_EVENTS`` are shown.

    Args:
        job_view: what is known.
        width: width of the terminal in characters; None to keep lines unbroken.
    """

    def text(line: str, indent: int, style: str = "") -> Text:
        return _text(line if width is None else _wrapped(plain(line), indent, width), style)

    parts: list[RenderableType] = [
        text(f"problem   {problem_line(c)}", 10, "yellow") for c in job_view.problems
    ]
    parts += [text(line, 10) for line in job_view.header_lines]
    status = job_view.status
    state = summary(status) if status is not None else ""
    same = status is not None and status.phase.value == job_view.phase
    now = state if same else f"{job_view.phase} (its master: {state})" if state else job_view.phase
    parts += [text(f"status    {now}", 10), text(f"why       {job_view.reason}", 10)]
    if status is not None and status.restarts:
        line = ", ".join(f"{n} by {cause}" for cause, n in status.restarts.items())
        parts.append(text(f"rounds    {line}", 10))
    if status is not None and (old := outdated_nodes(status)):
        line = f"{counted(old, 'node')} {are(old)} from an older template"
        hint = "`dlrover job restart` replaces all nodes"
        parts.append(text(f"template  {line}: {hint}", 10, "yellow"))
    if job_view.resource_advice:
        parts.append(text(f"resources {job_view.resource_advice}", 10))
    data = status.data if status is not None else DataStatus()
    parts += [text(f"data      {loader_line(data.loader)}", 10)] if data.loader is not None else []
    parts += [text(f"data      {dataset_line(dataset)}", 10) for dataset in data.datasets]
    parts += [text(f"stream    {stream_line(stream)}", 10) for stream in data.streams]
    tables = status.tables if status is not None else None
    parts += [text(f"tables    {tables_words(tables)}", 10)] if tables is not None else []
    servers = status.servers if status is not None else []
    parts += [text(f"server    {server_line(server)}", 10) for server in servers]
    parts += [text(f"note      {note}", 10) for note in job_view.notes]
    nodes = status.nodes if status is not None else []
    parts += [Text(""), nodes_table(nodes, job_view.pods, width)] if nodes else []
    others = sorted({NodeId(n) for n in job_view.pods} - {NodeId(n.id) for n in nodes}, key=id_key)
    parts += [text(f"{node:9} {job_view.pods[node]}", 10) for node in others[:20]]
    if len(others) > 20:
        parts.append(_text(f"… and {len(others) - 20} more"))
    parts.append(Text(""))
    longest = max((len(condition.type) for condition in job_view.conditions), default=0)
    for condition in job_view.conditions:
        mark = {"True": "yes", "False": "no"}.get(condition.status, "?")
        message = condition.message
        if status is not None and status.last_failure is not None:  # it is shown below
            message = message.removesuffix(status.last_failure.worker.traceback).rstrip()
        line = f"{condition.type:{longest}}  {mark:4} {message}"
        parts.append(text(line, longest + 7))
    failure = status.last_failure if status is not None else None
    if failure is not None:
        where = f"{failure.node}, round {failure.round}, rank {failure.worker.rank}"
        line = f"last failure at {clock(failure.at)}: {where}: {failure.worker.message}"
        parts += [Text(""), text(line, 2)]
        if (cause := failure.worker.cause) is not None:
            known = f"{cause.failure_class} ({cause.confidence}): {cause.evidence}"
            parts += [text(f"cause      {known}", 11), text(f"what to do {cause.advice}", 11)]
        parts.append(_text(failure.worker.traceback))
    parts.append(Text(""))
    parts += [text(event_line(event), 9) for event in job_view.events[-LAST_EVENTS:]]
    return parts


def _wrapped(text: str, indent: int, width: int) -> str:
    """Wrap text to the width of a terminal. All lines but the first are indented."""
    inner = " " * min(indent, width // 3)
    return "\n".join(
        textwrap.fill(
            line,
            max(20, width),
            subsequent_indent=inner,
            replace_whitespace=False,
            drop_whitespace=True,
            break_on_hyphens=False,
        )
        or line
        for line in text.split("\n")
    )


MAX_LAST_LINE = 1000
"""Number of characters of a last line that are shown; a script can print a line of any length."""


def closing_lines(status: JobStatus, last_line: str = "") -> list[str]:
    """Return the last lines about a job that has ended.

    These are its end, the traceback of the last failure if it failed, and a problem with
    checkpoints. Lines of more than ``MAX_LAST_LINE`` characters are cut.

    Args:
        status: its last status.
        last_line: the last line that the script of rank 0 printed; empty if it is unknown.
    """
    took = age(status.started_at, status.ended_at)
    progress = status.progress
    at = "" if progress is None else f" at step {progress.step}"
    if progress is not None and progress.total:
        at += f"/{progress.total}"
    lines = [f"{status.name} {status.phase.value.lower()} after {took}{at}: {status.reason}"]
    if status.phase is JobPhase.FAILED and status.last_failure is not None:
        lines += status.last_failure.worker.traceback.splitlines()
        if status.last_failure.worker.cause is not None:
            lines.append(status.last_failure.worker.cause.line)
    # A success without a stored result must not look like a complete success.
    lines += [
        problem_line(c)
        for c in problems(status.conditions)
        if c.type == ConditionType.CHECKPOINT_FAILING
    ]
    if last_line:
        lines.append(f"last line of rank 0: {last_line}")
    return [
        plain(line if len(line) <= MAX_LAST_LINE else f"{line[:MAX_LAST_LINE]}…") for line in lines
    ]


def live_display(
    name: str,
    status: JobStatus | None,
    master: str,
    *,
    output: Sequence[str] = (),
    hint: str = "",
    size: tuple[int, int] = (160, 50),
) -> RenderableType:
    """Return the live display of a running job; without a status, a single line.

    Args:
        name: name of the job.
        status: the master's status; None if there is none yet.
        master: where the master is, or why there is no status.
        output: the last lines that the script of rank 0 has printed.
        hint: other commands, for the last line.
        size: columns and rows of the terminal. The less important parts are left out to fit.
    """
    width, height = size
    if status is None:
        return _text(f"{name}: {master}")
    parts = _state(name, status, master, width)
    present = [n for n in status.nodes if n.phase is not NodePhase.GONE]
    gone = [n for n in status.nodes if n.phase is NodePhase.GONE][-4:]
    room = max(8, height - 8)  # without empty lines, head, progress and hint
    nodes = [*present, *gone][: max(4, room // 2)]
    parts += [Text(""), nodes_table(nodes, width=width)]
    if more := len(present) + len(gone) - len(nodes):
        parts.append(_text(f"… and {more} more", "dim"))
    room = max(4, room - len(nodes) - 2 - min(NOTES_SHOWN, sum(1 for n in nodes if n.message)))
    lines = output[-max(2, room // 2) :]
    parts += _printed(lines)
    parts.append(Text(""))
    for event in status.events[-max(2, min(8, room - len(lines))) :]:
        parts.append(_event(event, whole=False))
    if hint:
        parts += [Text(""), _text(hint, "dim")]
    return Group(*parts)


def final_display(
    name: str,
    status: JobStatus | None,
    *,
    output: Sequence[str] = (),
    size: tuple[int, int] = (160, 50),
) -> RenderableType:
    """Return what stays of the live display after the job, with the last whole events.

    The nodes are left out, because what they have last reported is old.

    Args:
        name: name of the job.
        status: the master's last status; None if there is none.
        output: the last lines that the script of rank 0 has printed.
        size: columns and rows of the terminal.
    """
    width, height = size
    if status is None:
        return _text(f"{name}: there is no status")
    lines = output[-max(2, height // 3) :]
    events = [_event(e, whole=True) for e in status.events[-LAST_EVENTS:]]
    return Group(*_state(name, status, "", width), *_printed(lines), Text(""), *events)


def _state(name: str, status: JobStatus, master: str, width: int) -> list[RenderableType]:
    """Return the first lines of the live display: phase, problems and progress."""
    took = age(status.started_at, status.ended_at)
    head = Text.assemble(
        (name, "bold"), "  ", (status.phase.value, _COLOUR[status.phase]), f"  {took}"
    )
    if status.phase.ended:
        head.append(f"  {counted(status.round, 'round')}")
    else:
        head.append(f"  round {status.round}  {status.present}/{status.desired} nodes")
        head.append(f"  {counted(status.workers_in_training, 'worker')}")
        if status.standby:
            head.append(f"  {status.standby} on standby")
        if width >= 100 or "not running" in master:
            head.append(f"  master {master} (term {status.term})", style="dim")
    parts: list[RenderableType] = [head]
    if status.phase in (JobPhase.FORMING, JobPhase.PENDING, JobPhase.SUSPENDED):
        parts.append(_text(status.reason, "yellow"))
    parts += [_text(problem_line(c), "yellow") for c in problems_without_event(status.conditions)]
    progress = _last_progress(status)
    if progress is not None:
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = [ProgressBar(progress.total, progress.step, width=min(40, width // 4))]
        line.add_row(*(bar if progress.total else []), _text(progress_words(progress)))
        parts.append(line)
    elif status.phase is JobPhase.RUNNING:
        parts.append(
            _text("no step yet: the script can call session.report_step(step, total)", "dim")
        )
    return parts


def _printed(lines: Sequence[str]) -> list[RenderableType]:
    """Return lines that the script of rank 0 has printed, with a title; nothing without lines."""
    if not lines:
        return []
    shown = [Text(output_line(line), overflow="ellipsis", no_wrap=True) for line in lines]
    return [Text(""), _text("output of rank 0:", "dim"), *shown]


def _event(event: JobEvent, *, whole: bool) -> Text:
    """Return an event, cut at the end of the line unless it is shown as a whole."""
    style = "yellow" if event.type == "Warning" else ""
    overflow: Literal["fold", "ellipsis"] = "fold" if whole else "ellipsis"
    return Text(event_line(event), style=style, overflow=overflow, no_wrap=not whole)


def now() -> float:
    """Return the time in Unix seconds."""
    return time.time()  # noqa: TID251 - for people, not for decisions


def age(since: float, until: float | None = None) -> str:
    """Return the time that has passed, as text."""
    return duration(max(0.0, (now() if until is None else until) - since))


def short_age(since: float, until: float | None = None) -> str:
    """Return the time that has passed in kubectl's form: ``45s``, ``12m``, ``5h``, ``3d``."""
    seconds = max(0, int((now() if until is None else until) - since))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def dump(status: JobStatus | None) -> object:
    """Return a status for ``--json``, with keys in snake_case (docs/cli.md)."""
    return None if status is None else status.model_dump(mode="json")
