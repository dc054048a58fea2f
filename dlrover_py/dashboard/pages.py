"""The pages of the dashboard and the report, as HTML.

All functions are pure: they turn what is known of a job into text. Templates escape every value,
and control characters become visible, so a script, a user or a Pod cannot write markup.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dlrover_py import __version__
from dlrover_py.dashboard import buckets, curves, pictures, ranks, timeline
from dlrover_py.protocol.job_view import (
    JobView,
    causal_chain,
    ceiling_line,
    dataset_line,
    load_shares,
    loader_line,
    problem_line,
    progress_words,
    stream_line,
    tables_words,
)
from dlrover_py.protocol.local import History
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import (
    JobEvent,
    JobPhase,
    LastCheckpoint,
    NodePhase,
    NodeStatus,
    ServerLoad,
    rfc3339,
)
from dlrover_py.protocol.words import byte_size, counted, duration, minutes, plain

FOLDER = Path(__file__).parent
SECTIONS = (
    "head",
    "why",
    "stacks",
    "rounds",
    "time",
    "size",
    "ranks",
    "nodes",
    "checkpoints",
    "data",
    "tables",
    "curves",
    "conditions",
    "events",
)
"""The sections of a job's page, in this order. Each is a template, and is replaced on its own."""
TITLES = {
    "why": "Why",
    "rounds": "Rounds",
    "time": "Time",
    "nodes": "Nodes",
    "checkpoints": "Checkpoints",
    "data": "Data",
    "tables": "Parameter server",
    "curves": "Curves",
    "events": "Events",
}
"""The sections to which the top of a job's page has links. The style sheet hides the link to a
section that has no content."""
PICTURES = ("rounds", "time", "ranks", "curves")
"""The sections that change with the clock and are large."""
NODES_PER_PAGE = 100
"""Largest number of nodes in the table on one page."""
ROWS_SHOWN = 200
"""Largest number of rows in the other tables."""
CURVES_SHOWN = 16
"""Largest number of curves on a page."""
TICKS = 240
"""The pictures of a running job end at a multiple of 1/240 of its duration, so that they do not
change at each look."""


def _finalized(value: object) -> object:
    """Return a value for a template: text without control characters, markup as it is."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def when(at: float) -> Markup:
    """Return a time as HTML: the local day and time of day, and all of it in the title.

    Args:
        at: Unix seconds.
    """
    local = datetime.fromtimestamp(at).astimezone()
    words = f"{local.day} {_MONTHS[local.month - 1]} {local:%H:%M:%S}"
    iso = local.isoformat(timespec="seconds")
    return Markup(f'<time datetime="{iso}" title="{iso}">{words}</time>')


_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
"""Months by their number, the same in every locale."""
_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finalized,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals |= {
    "version": __version__,
    "byte_size": byte_size,
    "when": when,
    "duration": duration,
    "counted": counted,
    "problem_line": problem_line,
    "progress_words": progress_words,
    "tables_words": tables_words,
    "ceiling_line": ceiling_line,
    "dataset_line": dataset_line,
    "loader_line": loader_line,
    "stream_line": stream_line,
    "rows_shown": ROWS_SHOWN,
    "has_tensorboard": curves.has_tensorboard,
}


def render(template: str, **values: Any) -> str:
    """Return a template of the folder ``templates`` as text."""
    return _TEMPLATES.get_template(template).render(**values)


def style() -> Markup:
    """Return the style sheet, for a page that has no other files."""
    return Markup((FOLDER / "static" / "style.css").read_text())


@dataclass(frozen=True)
class JobPage:
    """What the sections of a job's page show. Values are computed when a section asks for them."""

    view: JobView
    history: History
    now: float
    """Unix seconds."""
    nodes_from: int = 0
    """Index of the first node in the table of nodes."""
    linked: bool = True
    """The page has links to others. A report has none."""

    @property
    def title(self) -> str:
        """The title of the page: the job, its phase and its step."""
        status = self.view.status
        words = f"{self.view.name}: {self.view.phase}"
        if status is None or status.progress is None:
            return words
        of = f" of {status.progress.total}" if status.progress.total else ""
        return f"{words}, step {status.progress.step}{of}"

    @property
    def run(self) -> str:
        """The start of the run, which tells it from other runs of the job; empty if not known."""
        return rfc3339(self.view.status.started_at) if self.view.status is not None else ""

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended, or was killed: then no status has its phase."""
        status = self.view.status
        return status.phase.ended if status is not None else self.view.phase not in set(JobPhase)

    def risk(self, action: str, value: str) -> str:
        """Ask whether an action is meant that ends nodes; empty for one that ends none.

        Args:
            action: What the page asks for.
            value: What its form says: a number of nodes, or a node.
        """
        status = self.view.status
        name = self.view.name
        nodes = counted(status.present if status is not None else 0, "node")
        if action == "suspend":
            return f"Suspend {name}? Its {nodes} end, and nothing trains until it is resumed."
        if action == "restart":
            return f"Replace all nodes of {name}? Its {nodes} end, and others start."
        if action == "drain":
            return f"Drain node {value} of {name}? It ends, and its host takes no other node."
        fewer = 0
        if action == "scale" and status is not None and re.fullmatch("[0-9]{1,9}", value):
            fewer = status.desired - int(value)
        if fewer > 0:
            ends = f"{counted(fewer, 'node')} less: the round ends, and a smaller one follows."
            return f"Scale {name} from {status.desired if status else 0} to {value}? {ends}"
        return ""

    @property
    def phase_class(self) -> str:
        """The phase as a CSS class, which has letters only."""
        return "".join(c for c in self.view.phase if c.isascii() and c.isalpha())

    @cached_property
    def events(self) -> list[JobEvent]:
        """The events, oldest first, with the nodes and rounds that their messages name."""
        return timeline.with_node_and_round(self.view.events)

    @property
    def loads(self) -> dict[str, ServerLoad]:
        """What each server of a parameter server has and does, by its id."""
        tables = self.view.status.tables if self.view.status is not None else None
        return {one.id: one for one in tables.servers} if tables is not None else {}

    @property
    def load_shares(self) -> dict[str, float]:
        """The load of each server as a multiple of the mean."""
        status = self.view.status
        tables = status.tables if status is not None else None
        return load_shares(tables, self._leaving) if tables is not None else {}

    @property
    def tables_state(self) -> list[str]:
        """What is uneven, at risk or late at the servers, in words."""
        status = self.view.status
        tables = status.tables if status is not None else None
        return buckets.state_words(tables, self._leaving) if tables is not None else []

    @property
    def _leaving(self) -> set[str]:
        """The servers that are to leave."""
        status = self.view.status
        return {one.id for one in status.servers if one.message} if status is not None else set()

    @property
    def bucket_grid(self) -> Markup:
        """The picture of the buckets of a parameter server; empty if they are not known."""
        tables = self.view.status.tables if self.view.status is not None else None
        return buckets.grid(tables) if tables is not None else Markup("")

    @cached_property
    def outages(self) -> list[timeline.Outage]:
        """What interrupted the training, oldest first."""
        return timeline.outages(self.events)

    @property
    def outages_shown(self) -> Sequence[timeline.Outage]:
        """The newest interruptions."""
        return self.outages[-ROWS_SHOWN:]

    def phases(self, outage: timeline.Outage) -> str:
        """Return how long the parts of the recovery took that followed; empty if not known."""
        status = self.view.status
        found = status.recoveries if status is not None and outage.round else []
        parts = next((one.phases for one in found if one.round == outage.round), {})
        return ", ".join(f"{n} {duration(s) if s >= 0.01 else '<10 ms'}" for n, s in parts.items())

    @property
    def since(self) -> float:
        """Start of the pictures, in Unix seconds."""
        status = self.view.status
        assert status is not None
        return min([status.started_at, *(e.at for e in self.events if e.at > 0)])

    @property
    def end(self) -> float:
        """End of the job, or the present time, in Unix seconds."""
        status = self.view.status
        assert status is not None
        return status.ended_at or max(self.now if self.view.document else 0.0, status.published_at)

    @cached_property
    def scale(self) -> pictures.Scale:
        """The time axis of the pictures. For a running job, it ends a little later than now."""
        status, since, end = self.view.status, self.since, self.end
        assert status is not None
        if status.ended_at is None:
            unit = max(4.0, (end - since) / TICKS)
            unit = 2.0 ** math.ceil(math.log2(unit))
            end = since + unit * math.ceil((end - since) / unit)
        return pictures.Scale(since, max(end, since + 1e-3))

    @cached_property
    def time_line(self) -> Markup:
        """The picture of nodes and rounds."""
        status = self.view.status
        assert status is not None
        rows = timeline.node_timelines(status, self.events, self.scale.until)
        return pictures.time_line(
            rows,
            self.events,
            self.outages,
            self.scale,
            rounds=self.rounds,
            marks=timeline.marks(self.events),
        )

    @cached_property
    def rounds(self) -> list[timeline.RoundTimeline]:
        """The rounds that events tell of, oldest first."""
        status = self.view.status
        if status is None:
            return []
        return timeline.round_timelines(status, self.events, self.scale.until)

    def events_of(self, node: str) -> list[JobEvent]:
        """Return the events about a node, and those of the rounds that it was in, oldest first."""
        return timeline.events_of(node, self.events, self.rounds)

    @property
    def rounds_shown(self) -> Sequence[timeline.RoundTimeline]:
        """The newest rounds, newest first."""
        return self.rounds[: -ROWS_SHOWN - 1 : -1]

    @cached_property
    def steps_curve(self) -> Markup:
        """The picture of the steps over time; empty if fewer than two points are known."""
        status = self.view.status
        assert status is not None
        points = timeline.samples(self.history, status, self.events)
        if len(points) < 2:
            return Markup("")
        return pictures.steps_curve(points, self.outages, self.scale, status)

    @cached_property
    def value_curves(self) -> list[tuple[str, Markup, str]]:
        """For speed and for each of the script's metrics: its name, its picture and its range."""
        kept = self.history.samples
        named = {"steps per second": [(s.at, s.steps_per_s) for s in kept if s.steps_per_s]}
        for sample in kept:
            for name, value in sample.metrics.items():
                named.setdefault(name, []).append((sample.at, value))
        found = []
        for name, points in list(named.items())[:CURVES_SHOWN]:
            if len(points) > 1:
                values = [value for _, value in points]
                words = f"last {values[-1]:.4g}, from {min(values):.4g} to {max(values):.4g}"
                curve = pictures.value_curve(points, self.outages, self.scale, name)
                found.append((name, curve, words))
        return found

    @cached_property
    def goodput_curve(self) -> Markup:
        """The picture of the goodput over time; empty if fewer than two values are known.

        A sample belongs to a new step. So the status is the last point: it has the time without
        steps since then.
        """
        status = self.view.status
        points = [(s.at, s.goodput) for s in self.history.samples if s.goodput is not None]
        if status is not None and status.goodput is not None and status.goodput.share is not None:
            at = status.ended_at or status.published_at
            if not points or at > points[-1][0]:
                points.append((at, status.goodput.share))
        if status is None or len(points) < 2:
            return Markup("")
        best = status.goodput.ceiling if status.goodput is not None else None
        share = None if best is None else min(1.0, max(0.0, best.share))
        return pictures.share_curve(points, self.outages, self.scale, share)

    @cached_property
    def goodput_bar(self) -> Markup:
        """The picture that shows where the time went; empty until a step is reported."""
        status = self.view.status
        if status is None or not status.goodput_words:
            return Markup("")
        return pictures.goodput_bar(status)

    @property
    def causes(self) -> list[JobEvent]:
        """The chain of causes that led to the present state, oldest first."""
        return causal_chain(self.view.events)[-ROWS_SHOWN:]

    @property
    def resizes(self) -> list[JobEvent]:
        """The newest changes of size that the autoscaler has made, newest first."""
        scaled = (EventReason.SCALED_UP, EventReason.SCALED_DOWN)
        return [e for e in reversed(self.view.events) if e.reason in scaled][:ROWS_SHOWN]

    @property
    def newest_events(self) -> list[JobEvent]:
        """The newest events, newest first."""
        return list(self.view.events[: -ROWS_SHOWN - 1 : -1])

    @cached_property
    def nodes(self) -> list[NodeStatus]:
        """The nodes: members by rank, then the others by name, then those that are gone."""

        def key(node: NodeStatus) -> tuple[bool, bool, int, tuple[Any, ...]]:
            rank = node.node_rank
            gone = node.phase is NodePhase.GONE
            if rank is not None and not gone:  # members have a rank each, and there are many
                return False, False, rank, ()
            return gone, rank is None, rank or 0, (id_key(NodeId(node.id)),)

        return sorted(self.view.status.nodes, key=key) if self.view.status is not None else []

    @cached_property
    def median_step_s(self) -> float:
        """The median of the nodes' times of a step, in seconds; 0 if none is known."""
        known = [1 / n.steps_per_s for n in self.nodes if ranks.trains(n) and n.steps_per_s]
        return median(known) if known else 0.0

    @cached_property
    def rank_grid(self) -> Markup:
        """The picture of all nodes by rank; empty without nodes, and once the job has ended."""
        status = self.view.status
        if status is None or status.phase.ended or not self.nodes:
            return Markup("")
        return ranks.grid(self.nodes, self.median_step_s)

    @cached_property
    def measured(self) -> bool:
        """Whether it is known of some node what it uses of its CPUs and its memory."""
        return any(node.memory_words for node in self.nodes)

    @cached_property
    def has_gpus(self) -> bool:
        """Whether it is known of some node how far its GPUs are used."""
        return any(node.gpus or node.gpu_memory_limit for node in self.nodes)

    def data_wait(self, node: NodeStatus) -> str:
        """Return the share of its time that a node waits for data; empty if not known, or small."""
        share = node.data_wait if ranks.trains(node) else 0.0
        return f"{100 * share:.0f} %" if share >= 0.005 else ""

    def step_time(self, node: NodeStatus) -> str:
        """Return the time of a node's step, and its ratio to the median; empty if not known."""
        return ranks.step_time(node, self.median_step_s)

    def age(self, at: float | None) -> str:
        """Return the time since ``at``, in whole minutes so that it changes seldom."""
        if at is None:
            return ""
        return minutes(self.end - at)

    @property
    def next_checkpoint(self) -> str:
        """Say when the next checkpoint in memory is due, as far as the last ones show it."""
        status = self.view.status
        if status is None or status.phase is not JobPhase.RUNNING or status.progress is None:
            return ""
        steps = sorted({c.step for c in status.memory_checkpoints if c.round == status.round})
        if len(steps) < 2:
            return ""
        due = 2 * steps[-1] - steps[-2]
        words = f"the next one is expected at step {due}, {due - steps[-1]} steps after the last"
        speed = status.progress.steps_per_s
        return words + (f": one in {duration((due - steps[-1]) / speed)}" if speed else "")

    @property
    def stored_only(self) -> LastCheckpoint | None:
        """The newest checkpoint in storage, unless it is in memory, too."""
        status = self.view.status
        last = None if status is None else status.last_checkpoint
        if status is None or last is None or last.stored_step is None:
            return None
        return None if any(one.stored for one in status.memory_checkpoints) else last

    @property
    def coverage(self) -> str:
        """Say how many members of the round have their state in memory, and a copy elsewhere."""
        members = [n for n in self.nodes if n.node_rank is not None]
        if not any(n.memory_step is not None for n in members):
            return ""
        own = sum(n.memory_step is not None for n in members)
        copies = sum(n.copy_step is not None for n in members)
        return (
            f"{own} of {counted(len(members), 'member')} have a checkpoint in their own memory, "
            f"and {copies} keep a copy of a peer's"
        )

    @property
    def nodes_shown(self) -> list[NodeStatus]:
        """The nodes of this page of the table."""
        return self.nodes[self.nodes_from : self.nodes_from + NODES_PER_PAGE]

    @property
    def has_notes(self) -> bool:
        """Whether there is a message about a node of this page of the table."""
        return any(n.message or self.view.pods.get(n.id) for n in self.nodes_shown)

    @property
    def node_counts(self) -> str:
        """The number of nodes in each phase, in words."""
        counts = Counter(node.phase for node in self.nodes)
        return ", ".join(f"{counts[p]} {p.value}" for p in NodePhase if p in counts)

    @property
    def node_pages(self) -> list[tuple[int, int]]:
        """Pages of the table of nodes: the first index of each, and its number.

        These are the first one, the last one, and those near the present one. None if all nodes
        are on one page.
        """
        last = max(0, len(self.nodes) - 1) // NODES_PER_PAGE
        here = min(self.nodes_from // NODES_PER_PAGE, last)
        near = range(max(1, here - 2), min(last, here + 3))
        return [(n * NODES_PER_PAGE, n + 1) for n in sorted({0, *near, last})] if last else []

    @property
    def facts(self) -> list[tuple[str, str, str]]:
        """The main numbers, each with its name and a note. Unknown ones are left out."""
        status = self.view.status
        if status is None:
            return []
        progress = status.progress
        if progress is not None and status.phase is not JobPhase.RUNNING:
            progress = progress.model_copy(update={"steps_per_s": 0.0})
        step = "" if progress is None else str(progress.step)
        left = ""
        if progress is not None and progress.total:
            step += f" of {progress.total}"
            if progress.steps_per_s:
                left = duration(max(0, progress.total - progress.step) / progress.steps_per_s)
        last = status.last_checkpoint
        ceiling = status.goodput.ceiling if status.goodput is not None else None
        best = f"at most {100 * ceiling.share:.1f}% could be reached" if ceiling else ""
        restarts = sum(status.restarts.get(cause, 0) for cause in ("failure", "loss"))
        size = "" if status.phase.ended else f"{status.present} of {status.desired}"
        limits = f"at least {status.minimum}"
        limits += "" if status.maximum is None else f", at most {status.maximum}"
        ran = 0.0 if status.ended_at is None else status.ended_at - status.started_at
        place = f"in {last.where}, {self.age(last.at)} old" if last else ""
        facts = [
            ("ran for", "" if status.ended_at is None else duration(max(0.0, ran)), ""),
            ("nodes", size, limits),
            ("workers", str(status.world_size), ""),
            ("step", step, ""),
            ("time left", left, ""),
            ("goodput", status.goodput_words, best),
            ("rounds", str(status.round), ""),
            ("interruptions", str(restarts), ""),
            ("newest checkpoint", f"step {last.step}" if last else "", place),
            ("metrics", progress_words(progress).partition(", ")[2], ""),
        ]
        return [fact for fact in facts if fact[1]]


def section(name: str, page: JobPage) -> str:
    """Return one of the :data:`SECTIONS` of a job's page, or nothing where it has no content.

    Raises:
        KeyError: There is no such section.
    """
    if name not in SECTIONS:
        raise KeyError(name)
    return render(f"sections/{name}.html", page=page, status=page.view.status)


def report(view: JobView, history: History, *, now: float) -> str:
    """Return a page about a job that needs no other files.

    Args:
        view: What is known of the job.
        history: History of the training; empty where it is not known.
        now: Unix seconds.
    """
    page = JobPage(view, history, now, linked=False)
    parts = [Markup(section(name, page)) for name in SECTIONS]
    return render("report.html", page=page, sections=parts, style=style(), written=rfc3339(now))
