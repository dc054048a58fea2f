"""What people see of a job: pure functions from a snapshot to text and tables."""

import time
from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobEvent, JobPhase, JobStatus, NodePhase, NodeStatus

_COLOUR = {
    JobPhase.PENDING: "yellow",
    JobPhase.RUNNING: "green",
    JobPhase.FORMING: "yellow",
    JobPhase.SUSPENDED: "blue",
    JobPhase.SUCCEEDED: "bold green",
    JobPhase.FAILED: "bold red",
    JobPhase.STOPPED: "blue",
}


def clock(at: float) -> str:
    """Local time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def event_line(event: JobEvent) -> str:
    """One event on one line."""
    took = f" [{duration(event.took_s)}]" if event.took_s is not None else ""
    return f"{clock(event.at)} {event.reason}: {event.message}{took}"


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
    return f"step {progress.step}{of}{speed}{metrics}"


def summary(status: JobStatus) -> str:
    """The job on one line."""
    words = f"{status.phase} · round {status.round} · {status.nodes_in_round}/{status.wanted} nodes"
    words += f" · {status.world_size} workers"
    if status.standby:
        words += f" · {status.standby} on standby"
    said = progress_words(status.progress)
    return words + (f" · {said}" if said else "")


def nodes_table(nodes: Iterable[NodeStatus]) -> Table:
    """The nodes that are there, and those that went."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NODE", "PHASE", "ROLE", "RANK", "HOST", "WORKERS", "STEP", "RESTARTS", ""):
        table.add_column(column)
    for node in nodes:
        gone = node.phase is NodePhase.GONE
        pids = ", ".join(str(p) for p in node.pids if p)
        table.add_row(
            node.id,
            node.phase.value,
            "" if gone else node.role.value,
            "" if node.node_rank is None or gone else str(node.node_rank),
            node.host,
            "" if gone else f"{node.workers.value}{f' (pid {pids})' if pids else ''}",
            "" if node.step is None or gone else str(node.step),
            str(node.restarts) if node.restarts else "",
            escape(node.message),
            style="dim" if gone else None,
        )
    return table


def wish(snapshot: Snapshot) -> list[str]:
    """What is wished, and where it runs."""
    job, worker = snapshot.job, snapshot.job.worker
    most = worker.max_replicas if worker.max_replicas is not None else "any"
    health = snapshot.health_addr
    return [
        f"{job.metadata.name}  generation {job.metadata.generation}",
        f"wish      {worker.replicas} nodes (min {worker.minimum}, max {most}, unit "
        f"{worker.node_unit}, standby {worker.standby_replicas}), "
        f"{worker.restart_count} restarts per node",
        f"hosts     {', '.join(snapshot.hosts)}",
        f"master    pid {snapshot.master_pid or '-'}, {snapshot.master_addr}",
        f"health    http://{health}/healthz, http://{health}/metrics",
        f"logs      {snapshot.log_dir}",
    ]


def description(status: JobStatus) -> list[RenderableType]:
    """All that the master knows."""
    parts: list[RenderableType] = [
        Text(f"status    {summary(status)}"),
        Text(f"why       {status.reason}"),
    ]
    if status.restarts:
        words = ", ".join(f"{n} by {cause}" for cause, n in status.restarts.items())
        parts.append(Text(f"rounds    {words}"))
    parts += [Text(""), nodes_table(status.nodes), Text("")]
    for condition in status.conditions:
        mark = {"True": "yes", "False": "no"}.get(condition.status, "?")
        parts.append(Text(f"{condition.type:16} {mark:4} {condition.message}"))
    failure = status.last_failure
    if failure is not None:
        where = f"{failure.node}, round {failure.round}, rank {failure.worker.rank}"
        parts.append(
            Text(
                f"\nlast failure at {clock(failure.at)}: {where}: "
                f"{failure.worker.message}\n{failure.worker.traceback}"
            )
        )
    parts.append(Text(""))
    parts += [Text(event_line(event)) for event in status.events[-10:]]
    return parts


def live(snapshot: Snapshot, *, events: int = 8) -> RenderableType:
    """The picture that is drawn again and again while a job runs."""
    status = snapshot.status
    name = snapshot.job.metadata.name
    if status is None:
        return Text(f"{name}: the master is starting")
    head = Text.assemble(
        (name, "bold"), "  ", (status.phase.value, _COLOUR[status.phase]), f"  round {status.round}"
    )
    head.append(f"  {status.nodes_in_round}/{status.wanted} nodes  {status.world_size} workers")
    if status.standby:
        head.append(f"  {status.standby} on standby")
    master = f"pid {snapshot.master_pid}" if snapshot.master_pid else "away"
    head.append(f"  master {master} (term {status.term})", style="dim")
    parts: list[RenderableType] = [head]
    if status.phase in (JobPhase.FORMING, JobPhase.PENDING):
        parts.append(Text(status.reason, style="yellow"))
    progress = status.progress
    if progress is not None:
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = [ProgressBar(progress.total, progress.step, width=40)] if progress.total else []
        line.add_row(*bar, progress_words(progress))
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
