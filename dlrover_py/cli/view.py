"""What people see of a job: pure functions from a snapshot to text and tables.

What a script, a worker or another program has said is in them as :func:`plain` has it.
"""

import re
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rich.cells import cell_len
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
from dlrover_py.protocol.words import are, counted

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
_NEITHER = ("PodsReady", "Running", "Succeeded", "Suspended", "Stopped")
_CALM = ("Finished", "Suspended", "Waiting", "Creating")
"""Reasons why a master is not ready that need nobody's help."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


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
    """Since the job was created or started."""
    took: str = ""
    """How long it ran, or has run until now."""
    ended: str = ""
    """How long ago it ended."""

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
            took=short_age(status.started_at, status.ended_at),
            ended=f"{short_age(status.ended_at)} ago" if status.ended_at is not None else "",
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
    "took": 5,
    "ended": 9,
}
_OF_A_CLUSTER = ("name", "phase", "ready", "round", "progress", "restarts", "goodput", "age")
_OF_THIS_MACHINE = (*_OF_A_CLUSTER[:-1], "took", "ended")
_DISPENSABLE = ("goodput", "round", "restarts", "took", "ready", "progress", "namespace")
"""Columns that are left out on a narrow terminal, in this order."""


class JobTable:
    """Rows of text, which keep their columns when more are said later."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        namespaces: bool = False,
        here: bool = False,
        width: int | None = None,
    ) -> None:
        """Choose the columns.

        Args:
            rows: the first ones.
            namespaces: show the namespace of each.
            here: they are jobs of this machine: show when they ended, and how long they took.
            width: of the terminal, in characters; None: there is none, all columns are shown.
        """
        self._columns = [
            *(["namespace"] if namespaces else []),
            *(_OF_THIS_MACHINE if here else _OF_A_CLUSTER),
        ]
        self._widths = {
            c: max([_WIDTHS[c], *(len(getattr(row, c)) + 2 for row in rows)]) for c in self._columns
        }
        if width is None:
            return
        longest = max([len("name"), *(len(row.name) for row in rows)])
        self._widths["name"] = min(self._widths["name"], longest + 2)
        for column in _DISPENSABLE:
            if sum(self._widths[c] + 1 for c in self._columns) <= width:
                break
            if column in self._columns:
                self._columns.remove(column)

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


def output_line(said: str) -> str:
    """A line that a script has printed, without its colours."""
    return plain(_COLOURS.sub("", said))


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
    """``43 ms``, ``2.1 s``, ``3 min 5 s``, ``2 h 40 min``, ``3 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


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
    if status.phase.ended:  # no node trains any more, and nothing has a speed
        words = f"{status.phase} · {counted(status.round, 'round')}"
        if status.world_size:
            words += f" · {counted(status.world_size, 'worker')} at last"
    else:
        words = f"{status.phase} · round {status.round}"
        words += f" · {status.nodes_in_round}/{status.wanted} nodes"
        words += f" · {counted(status.world_size, 'worker')}"
        if status.standby:
            words += f" · {status.standby} on standby"
    said = progress_words(_last_progress(status))
    return words + (f" · {said}" if said else "")


def _last_progress(status: JobStatus) -> Progress | None:
    """The progress; of a job that has ended without its speed."""
    if status.progress is None or not status.phase.ended:
        return status.progress
    return status.progress.model_copy(update={"steps_per_s": 0.0})


_LESS_NEEDED = ("RESTARTS", "HOST", "POD", "STEP", "ROLE")
"""Columns of the nodes that are left out on a narrow terminal, in this order."""


NOTES_SHOWN = 3


def nodes_table(
    nodes: Iterable[NodeStatus], pods: Mapping[str, str] | None = None, width: int | None = None
) -> RenderableType:
    """The nodes that are there, and those that went.

    Args:
        nodes: in this order.
        pods: in a cluster: the Pod of each node, in words.
        width: of the terminal, in characters. Columns that do not fit are left out, and messages
            stand below the table. None: all is shown.
    """
    pods = pods or {}
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
            "WORKERS": "" if gone else workers,
            "STEP": "" if node.step is None or gone else str(node.step),
            "RESTARTS": str(node.restarts) if node.restarts else "",
            **({"POD": pods.get(node.id, "-")} if pods else {}),
            "": node.message,
        }
        shown.append(({c: plain(words) for c, words in cells.items()}, gone))
    columns = list(shown[0][0]) if shown else ["NODE", "PHASE"]

    def needed() -> int:
        return sum(
            2 + max(cell_len(w) for w in (c, *(row[c] for row, _ in shown))) for c in columns
        )

    if width is not None and needed() > width:
        columns.remove("")
        notes = [f"{row['NODE']}: {row['']}" for row, _ in shown if row[""]][:NOTES_SHOWN]
        for column in _LESS_NEEDED:
            if needed() > width and column in columns:
                columns.remove(column)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=width is not None)
    for row, gone in shown:
        table.add_row(*(Text(row[c]) for c in columns), style="dim" if gone else None)
    return Group(table, *(Text(note, style="dim") for note in notes))


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
        f"wish      {counted(worker.replicas, 'node')} (min {worker.minimum}, max {most}, unit "
        f"{worker.node_unit}, standby {worker.standby_replicas}), "
        f"{counted(worker.restart_count, 'restart')} per node"
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


def description(picture: Picture, width: int | None = None) -> list[RenderableType]:
    """All that is known, what is wrong first.

    Args:
        picture: what is known.
        width: of the terminal, in characters; None: lines are not broken.
    """

    def text(said: str, indent: int, style: str = "") -> Text:
        return _text(said if width is None else _broken(plain(said), indent, width), style)

    parts: list[RenderableType] = [
        text(f"trouble   {trouble_line(c)}", 10, "yellow") for c in troubles(picture.conditions)
    ]
    parts += [text(line, 10) for line in picture.heads]
    status = picture.status
    told = summary(status) if status is not None else ""
    same = status is not None and status.phase.value == picture.phase
    now = told if same else f"{picture.phase} (its master: {told})" if told else picture.phase
    parts += [text(f"status    {now}", 10), text(f"why       {picture.reason}", 10)]
    if status is not None and status.restarts:
        words = ", ".join(f"{n} by {cause}" for cause, n in status.restarts.items())
        parts.append(text(f"rounds    {words}", 10))
    if status is not None and (old := of_old_templates(status)):
        words = f"{counted(old, 'node')} {are(old)} of an older template"
        said = f"template  {words}: `dlrover job restart` replaces all nodes"
        parts.append(text(said, 10, "yellow"))
    parts += [text(f"note      {note}", 10) for note in picture.notes]
    nodes = status.nodes if status is not None else []
    parts += [Text(""), nodes_table(nodes, picture.pods, width)] if nodes else []
    others = sorted({NodeId(n) for n in picture.pods} - {NodeId(n.id) for n in nodes}, key=id_key)
    parts += [text(f"{node:9} {picture.pods[node]}", 10) for node in others[:20]]
    if len(others) > 20:
        parts.append(_text(f"… and {len(others) - 20} more"))
    parts.append(Text(""))
    longest = max((len(condition.type) for condition in picture.conditions), default=0)
    for condition in picture.conditions:
        mark = {"True": "yes", "False": "no"}.get(condition.status, "?")
        said = condition.message
        if status is not None and status.last_failure is not None:  # it stands below
            said = said.removesuffix(status.last_failure.worker.traceback).rstrip()
        words = f"{condition.type:{longest}}  {mark:4} {said}"
        parts.append(text(words, longest + 7))
    failure = status.last_failure if status is not None else None
    if failure is not None:
        where = f"{failure.node}, round {failure.round}, rank {failure.worker.rank}"
        said = f"last failure at {clock(failure.at)}: {where}: {failure.worker.message}"
        parts += [Text(""), text(said, 2), _text(failure.worker.traceback)]
    parts.append(Text(""))
    parts += [text(event_line(event), 9) for event in picture.events[-10:]]
    return parts


def _broken(said: str, indent: int, width: int) -> str:
    """Text whose lines fit into a terminal; all but the first begin further to the right."""
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
        for line in said.split("\n")
    )


def farewell(status: JobStatus, last_line: str = "") -> list[str]:
    """The last words on a job that has ended.

    Args:
        status: its last one.
        last_line: what the script of rank 0 printed last, if that is known.
    """
    took = age(status.started_at, status.ended_at)
    progress = status.progress
    at = "" if progress is None else f" at step {progress.step}"
    if progress is not None and progress.total:
        at += f"/{progress.total}"
    lines = [f"{status.name} {status.phase.value.lower()} after {took}{at}: {status.reason}"]
    if status.phase is JobPhase.FAILED and status.last_failure is not None:
        lines += status.last_failure.worker.traceback.splitlines()
    if last_line:
        lines.append(f"last line of rank 0: {last_line}")
    return [plain(line) for line in lines]


def live(
    name: str,
    status: JobStatus | None,
    master: str,
    *,
    output: Sequence[str] = (),
    hint: str = "",
    size: tuple[int, int] = (160, 50),
) -> RenderableType:
    """The picture that is drawn again and again while a job runs.

    Args:
        name: of the job.
        status: what its master says; None: nothing yet.
        master: where that is, or why it says nothing.
        output: the last lines that the script of rank 0 has printed.
        hint: what else can be done, on the last line.
        size: columns and rows of the terminal; what is less needed is left out.
    """
    width, height = size
    if status is None:
        return _text(f"{name}: {master}")
    took = age(status.started_at, status.ended_at)
    head = Text.assemble(
        (name, "bold"), "  ", (status.phase.value, _COLOUR[status.phase]), f"  {took}"
    )
    if status.phase.ended:
        head.append(f"  {counted(status.round, 'round')}")
    else:
        head.append(f"  round {status.round}  {status.nodes_in_round}/{status.wanted} nodes")
        head.append(f"  {counted(status.world_size, 'worker')}")
        if status.standby:
            head.append(f"  {status.standby} on standby")
        if width >= 100 or "away" in master:
            head.append(f"  master {master} (term {status.term})", style="dim")
    parts: list[RenderableType] = [head]
    if status.phase in (JobPhase.FORMING, JobPhase.PENDING):
        parts.append(_text(status.reason, "yellow"))
    progress = _last_progress(status)
    if progress is not None:
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = [ProgressBar(progress.total, progress.step, width=min(40, width // 4))]
        line.add_row(*(bar if progress.total else []), _text(progress_words(progress)))
        parts.append(line)
    elif status.phase is JobPhase.RUNNING:
        parts.append(_text("no step yet: session.report_step(step, total) shows them here", "dim"))
    living = [n for n in status.nodes if n.phase is not NodePhase.GONE]
    gone = [n for n in status.nodes if n.phase is NodePhase.GONE][-4:]
    room = max(8, height - 8)  # the rest: lines between the parts, head, progress, hint
    nodes = [*living, *gone][: max(4, room // 2)]
    parts += [Text(""), nodes_table(nodes, width=width)]
    if more := len(living) + len(gone) - len(nodes):
        parts.append(_text(f"… and {more} more", "dim"))
    room = max(4, room - len(nodes) - 2 - min(NOTES_SHOWN, sum(1 for n in nodes if n.message)))
    lines = [output_line(said) for said in output][-max(2, room // 2) :]
    if lines:
        parts += [Text(""), _text("rank 0 prints:", "dim")]
        parts += [Text(said, overflow="ellipsis", no_wrap=True) for said in lines]
    parts.append(Text(""))
    for event in status.events[-max(2, min(8, room - len(lines))) :]:
        style = "yellow" if event.type == "Warning" else ""
        parts.append(Text(event_line(event), style=style, overflow="ellipsis", no_wrap=True))
    if hint:
        parts += [Text(""), _text(hint, "dim")]
    return Group(*parts)


_LAST_WORDS = ("JobSucceeded", "Suspended")


def story(events: Sequence[JobEvent], round_number: int | None = None) -> list[JobEvent]:
    """The chain of causes that led to a round, or to where the job stands now."""
    by_id = {e.id: e for e in events}
    ends = [
        e
        for e in events
        if e.reason in ("RoundFormed", "TrainingResumed")
        or (round_number is None and (e.cause is not None or e.reason in _LAST_WORDS))
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


def now() -> float:
    """Unix seconds."""
    return time.time()  # noqa: TID251 - for people, not for decisions


def age(since: float, until: float | None = None) -> str:
    """Time that has passed, in words."""
    return duration(max(0.0, (now() if until is None else until) - since))


def short_age(since: float, until: float | None = None) -> str:
    """Time that has passed, as kubectl's tables have it: ``45s``, ``12m``, ``5h``, ``3d``."""
    seconds = max(0, int((now() if until is None else until) - since))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def dump(status: JobStatus | None) -> object:
    """For ``--json``, whose keys are in snake_case (docs/cli.md)."""
    return None if status is None else status.model_dump(mode="json")
