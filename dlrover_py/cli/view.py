"""What people see of a job: pure functions from a snapshot to text and tables.

What a script, a worker or another program has said is in them as :func:`plain` has it.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.job import ReplicaSpec
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.status import (
    Condition,
    JobEvent,
    JobPhase,
    JobStatus,
    NodePhase,
    NodeStatus,
    summarize,
)

_COLOUR = {
    JobPhase.PENDING: "yellow",
    JobPhase.RUNNING: "green",
    JobPhase.FORMING: "yellow",
    JobPhase.SUSPENDED: "blue",
    JobPhase.SUCCEEDED: "bold green",
    JobPhase.FAILED: "bold red",
    JobPhase.STOPPED: "blue",
}

_WELL_WHEN_TRUE = ("Accepted", "MasterReady", "JournalWritable")
_NEITHER = ("PodsReady", "Running", "Succeeded", "Suspended")
_CALM = ("Finished", "Suspended", "Waiting", "Creating")
"""Reasons why a master is not ready that need nobody's help."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Picture:
    """What is known of a job, wherever it is."""

    name: str
    heads: Sequence[str]
    """What is wished, and where it runs."""
    phase: str
    reason: str
    status: JobStatus | None
    """What its master has said; None: nothing yet."""
    conditions: Sequence[Condition]
    """The master's, and in a cluster the operator's."""
    events: Sequence[JobEvent]
    document: object
    """All of it, for scripts."""
    pods: Mapping[str, str] = field(default_factory=dict)
    """In a cluster: the Pod of each node, in words."""
    notes: Sequence[str] = ()
    """What could not be found out."""


@dataclass(frozen=True, slots=True)
class Row:
    """A job in a table, with the columns of ``kubectl get elasticjobs``."""

    namespace: str
    name: str
    phase: str
    ready: str
    round: str
    progress: str
    restarts: str
    goodput: str
    age: str

    @classmethod
    def of(cls, status: JobStatus, *, namespace: str = "") -> "Row":
        """Of a job whose master has spoken."""
        words = summarize(status)
        return cls(
            namespace=namespace,
            name=status.name,
            phase=status.phase.value,
            ready=words.ready,
            round=str(status.round),
            progress=words.progress,
            restarts=str(words.restarts),
            goodput=words.goodput,
            age=short_age(status.started_at),
        )


_WIDTHS = {
    "namespace": 12,
    "name": 24,
    "phase": 10,
    "ready": 7,
    "round": 6,
    "progress": 16,
    "restarts": 9,
    "goodput": 8,
    "age": 5,
}


class JobTable:
    """Rows of text, which keep their columns when more are said later."""

    def __init__(self, rows: Sequence[Row], *, namespaces: bool) -> None:
        self._columns = [c for c in _WIDTHS if namespaces or c != "namespace"]
        self._widths = {
            c: max([_WIDTHS[c], *(len(getattr(row, c)) + 2 for row in rows)]) for c in self._columns
        }

    def head(self) -> str:
        """The names of the columns."""
        return self._line({c: c.upper() for c in self._columns})

    def line(self, row: Row) -> str:
        """One job."""
        return self._line({c: getattr(row, c) for c in self._columns})

    def _line(self, cells: Mapping[str, str]) -> str:
        line = " ".join(cells[c].ljust(self._widths[c]) for c in self._columns)
        return plain(line.rstrip())


def plain(said: str) -> str:
    """Words that a terminal only shows: control characters other than newline and tab as ``\\x1b``.

    Raw they would clear the screen of who looks, or write what was never so.
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", said)


def _text(said: str, style: str = "") -> Text:
    return Text(plain(said), style=style)


def clock(at: float) -> str:
    """Local time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def event_line(event: JobEvent) -> str:
    """One event on one line."""
    took = f" [{duration(event.took_s)}]" if event.took_s is not None else ""
    return plain(f"{clock(event.at)} {event.reason}: {event.message}{took}")


def duration(seconds: float) -> str:
    """``43 ms``, ``2.1 s``, ``3 min 5 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def progress_words(progress: Progress | None) -> str:
    """Step, speed and the script's own metrics."""
    if progress is None:
        return ""
    of = f"/{progress.total}" if progress.total else ""
    speed = f", {progress.steps_per_s:.1f} steps/s" if progress.steps_per_s else ""
    metrics = "".join(f", {k} {v:.4g}" for k, v in progress.metrics.items())
    return plain(f"step {progress.step}{of}{speed}{metrics}")


def summary(status: JobStatus) -> str:
    """The job on one line."""
    words = f"{status.phase} · round {status.round} · {status.nodes_in_round}/{status.wanted} nodes"
    words += f" · {status.world_size} workers"
    if status.standby:
        words += f" · {status.standby} on standby"
    said = progress_words(status.progress)
    return words + (f" · {said}" if said else "")


def nodes_table(nodes: Iterable[NodeStatus], pods: Mapping[str, str] | None = None) -> Table:
    """The nodes that are there, and those that went; in a cluster with their Pods."""
    pods = pods or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("NODE", "PHASE", "ROLE", "RANK", "HOST", "WORKERS", "STEP", "RESTARTS")
    for column in (*columns, *(["POD"] if pods else []), ""):
        table.add_column(column)
    for node in nodes:
        gone = node.phase is NodePhase.GONE
        pids = ", ".join(str(p) for p in node.pids if p)
        workers = f"{node.workers.value}{', warm' if node.warm else ''}"
        cells = (
            node.id,
            node.phase.value,
            "" if gone else node.role.value,
            "" if node.node_rank is None or gone else str(node.node_rank),
            node.host,
            "" if gone else f"{workers}{f' (pid {pids})' if pids else ''}",
            "" if node.step is None or gone else str(node.step),
            str(node.restarts) if node.restarts else "",
            *([pods.get(node.id, "-")] if pods else []),
            node.message,
        )
        table.add_row(*map(_text, cells), style="dim" if gone else None)
    return table


def wish(snapshot: Snapshot) -> list[str]:
    """What is wished, and where it runs on this machine."""
    job, health = snapshot.job, snapshot.health_addr
    return [
        f"{job.metadata.name}  generation {job.metadata.generation}",
        wished(job.worker),
        f"hosts     {', '.join(snapshot.hosts)}",
        f"master    pid {snapshot.master_pid or '-'}, {snapshot.master_addr}",
        f"health    http://{health}/healthz, http://{health}/metrics",
        f"logs      {snapshot.log_dir}",
    ]


def wished(worker: ReplicaSpec) -> str:
    """How many nodes, and how they may fail."""
    most = worker.max_replicas if worker.max_replicas is not None else "any"
    return (
        f"wish      {worker.replicas} nodes (min {worker.minimum}, max {most}, unit "
        f"{worker.node_unit}, standby {worker.standby_replicas}), "
        f"{worker.restart_count} restarts per node"
    )


def troubles(conditions: Iterable[Condition]) -> list[Condition]:
    """Those conditions that say that something is wrong."""
    found = []
    for condition in conditions:
        if condition.type in _NEITHER:
            continue
        well = "True" if condition.type in _WELL_WHEN_TRUE else "False"
        if condition.status != well and condition.reason not in _CALM:
            found.append(condition)
    return found


def trouble_line(condition: Condition) -> str:
    """What is wrong, on one line."""
    said = condition.message.splitlines()
    words = condition.type if condition.status == "True" else f"not {condition.type}"
    return plain(f"{words}: {said[0] if said else condition.reason}")


def of_old_templates(status: JobStatus) -> int:
    """Number of living nodes that were made of a template that the job has no more."""
    if status.updated is None or status.phase.ended:
        return 0
    return max(0, status.ready - status.updated)


def description(picture: Picture) -> list[RenderableType]:
    """All that is known, what is wrong first."""
    parts: list[RenderableType] = [
        _text(f"trouble   {trouble_line(c)}", "yellow") for c in troubles(picture.conditions)
    ]
    parts += [_text(line) for line in picture.heads]
    status = picture.status
    told = summary(status) if status is not None else ""
    same = status is not None and status.phase.value == picture.phase
    now = told if same else f"{picture.phase} (its master: {told})" if told else picture.phase
    parts += [_text(f"status    {now}"), _text(f"why       {picture.reason}")]
    if status is not None and status.restarts:
        words = ", ".join(f"{n} by {cause}" for cause, n in status.restarts.items())
        parts.append(_text(f"rounds    {words}"))
    if status is not None and (old := of_old_templates(status)):
        subject = "1 node is" if old == 1 else f"{old} nodes are"
        words = f"{subject} of an older template: `dlrover job restart` replaces all nodes"
        parts.append(_text(f"template  {words}", "yellow"))
    parts += [_text(f"note      {note}") for note in picture.notes]
    nodes = status.nodes if status is not None else []
    parts += [Text(""), nodes_table(nodes, picture.pods)] if nodes else []
    others = sorted({NodeId(n) for n in picture.pods} - {NodeId(n.id) for n in nodes}, key=id_key)
    parts += [
        _text(f"{node:9} {picture.pods[node]}")
        for node in sorted(map(NodeId, others), key=id_key)[:20]
    ]
    if len(others) > 20:
        parts.append(_text(f"… and {len(others) - 20} more"))
    parts.append(Text(""))
    for condition in picture.conditions:
        mark = {"True": "yes", "False": "no"}.get(condition.status, "?")
        parts.append(_text(f"{condition.type:16} {mark:4} {condition.message}"))
    failure = status.last_failure if status is not None else None
    if failure is not None:
        where = f"{failure.node}, round {failure.round}, rank {failure.worker.rank}"
        parts.append(
            _text(
                f"\nlast failure at {clock(failure.at)}: {where}: "
                f"{failure.worker.message}\n{failure.worker.traceback}"
            )
        )
    parts.append(Text(""))
    parts += [_text(event_line(event)) for event in picture.events[-10:]]
    return parts


def farewell(status: JobStatus) -> list[str]:
    """The last words on a job that has ended."""
    took = age(status.started_at, status.ended_at)
    lines = [f"{status.name} {status.phase.value.lower()} after {took}: {status.reason}"]
    if status.phase is JobPhase.FAILED and status.last_failure is not None:
        lines += status.last_failure.worker.traceback.splitlines()
    return [plain(line) for line in lines]


def live(name: str, status: JobStatus | None, master: str, *, events: int = 8) -> RenderableType:
    """The picture that is drawn again and again while a job runs.

    Args:
        name: of the job.
        status: what its master says; None: nothing yet.
        master: where that is, or why it says nothing.
        events: so many, the newest.
    """
    if status is None:
        return _text(f"{name}: {master}")
    head = Text.assemble(
        (name, "bold"), "  ", (status.phase.value, _COLOUR[status.phase]), f"  round {status.round}"
    )
    head.append(f"  {status.nodes_in_round}/{status.wanted} nodes  {status.world_size} workers")
    if status.standby:
        head.append(f"  {status.standby} on standby")
    head.append(f"  master {master} (term {status.term})", style="dim")
    parts: list[RenderableType] = [head]
    if status.phase in (JobPhase.FORMING, JobPhase.PENDING):
        parts.append(_text(status.reason, "yellow"))
    progress = status.progress
    if progress is not None:
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = [ProgressBar(progress.total, progress.step, width=40)] if progress.total else []
        line.add_row(*bar, _text(progress_words(progress)))
        parts.append(line)
    living = [n for n in status.nodes if n.phase is not NodePhase.GONE]
    gone = [n for n in status.nodes if n.phase is NodePhase.GONE]
    parts += [Text(""), nodes_table(living + gone[-4:]), Text("")]
    for event in status.events[-events:]:
        style = "yellow" if event.type == "Warning" else ""
        parts.append(Text(event_line(event), style=style, overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def story(events: Sequence[JobEvent], round_number: int | None = None) -> list[JobEvent]:
    """The chain of causes that led to a round, or to where the job stands now."""
    by_id = {e.id: e for e in events}
    ends = [
        e
        for e in events
        if e.reason in ("RoundFormed", "TrainingResumed")
        or (e.cause is not None and round_number is None)
        or e.reason in ("JobSucceeded", "Suspended")
    ]
    if round_number is not None:
        ends = [e for e in ends if e.round == round_number]
    if not ends:
        return []
    chain: dict[int, JobEvent] = {}
    last: JobEvent | None = ends[-1]
    while last is not None and last.id not in chain:
        chain[last.id] = last
        last = by_id.get(last.cause or 0)
    first = min(chain)
    # What else happened in between belongs to the story.
    return [e for e in events if first <= e.id <= ends[-1].id]


def age(since: float, until: float | None = None) -> str:
    """Time that has passed, in words."""
    end = time.time() if until is None else until  # noqa: TID251 - for people, not for decisions
    return duration(max(0.0, end - since))


def short_age(since: float) -> str:
    """Time that has passed, as kubectl's tables have it: ``45s``, ``12m``, ``5h``, ``3d``."""
    seconds = max(0, int(time.time() - since))  # noqa: TID251 - for people, not for decisions
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def dump(status: JobStatus | None) -> object:
    """For JSON."""
    return None if status is None else status.model_dump(mode="json", by_alias=True)
