"""``dlrover job report``: a job as one page of HTML that needs no other files.

All functions are pure. The output of scripts and workers appears as text only. Every word passes
through :func:`_escape`, and the page's own content security policy forbids scripts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dlrover_py import __version__
from dlrover_py.cli.view import JobView, clock, duration, plain, progress_words
from dlrover_py.protocol.local import History, ProgressSample
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobEvent, JobPhase, JobStatus, rfc3339
from dlrover_py.protocol.words import counted

LEFT, RIGHT, WIDTH = 84, 16, 960
"""Left margin, right margin and width of the pictures, in SVG units."""
ROW_HEIGHT, CURVE_HEIGHT = 22, 220
"""Height of a node's row, and height of the curve of steps, in SVG units."""
NODES_SHOWN = 64
"""Largest number of nodes in the picture."""
ROWS_SHOWN = 200
"""Largest number of rows in a table."""

_STYLE = """
:root { --ink: #1c2330; --soft: #667085; --line: #dfe3ea; --back: #fff; --card: #f7f8fa;
  --good: #2e7d5b; --bad: #c4483e; --calm: #3b6fb6; --lane: #a9c4e4; --warn: #b7791f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #333b49; --back: #14181f; --card: #1c222c;
    --good: #58b48c; --bad: #e57368; --calm: #7fabe6; --lane: #3d5f8a; --warn: #d8a24a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 48px; max-width: 1010px; color: var(--ink);
  background: var(--back); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
.phase { font-size: 14px; padding: 2px 10px; border-radius: 12px; color: #fff;
  background: var(--calm); vertical-align: middle; margin-left: 8px; font-weight: 600; }
.phase.Succeeded, .phase.Running { background: var(--good); }
.phase.Failed { background: var(--bad); }
.why { color: var(--soft); margin: 6px 0 18px; overflow-wrap: anywhere; white-space: pre-wrap; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 12px; overflow-wrap: anywhere; }
.facts dt { color: var(--soft); font-size: 12px; }
.facts dd { margin: 0; font-size: 18px; font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 12px; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
td.rest { width: 99%; }
td.at { white-space: nowrap; overflow-wrap: normal; }
.Warning td { color: var(--warn); }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  overflow-x: auto; font-size: 13px; }
ul.legend { list-style: none; padding: 0; margin: 8px 0 0; display: flex; flex-wrap: wrap;
  gap: 4px 18px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
footer { margin-top: 40px; color: var(--soft); font-size: 12px; }
"""

_COLOURS = {
    "start": "#8a8fa3",
    "failure": "#c4483e",
    "loss": "#d9822b",
    "drain": "#b7a13a",
    "scale": "#7a6fb0",
    "join": "#4f9da6",
}


@dataclass(frozen=True, slots=True)
class NodeTimeline:
    """The life of one node, from the first to the last known time. Times are Unix seconds."""

    node: str
    since: float
    until: float
    lost: bool


@dataclass(frozen=True, slots=True)
class Outage:
    """The event that ended a round, and the event that shows the cost."""

    cause: JobEvent
    round: int
    """Number of the next round; 0 if none followed."""
    resumed: JobEvent | None
    """Event of the first step after it; None if there was none."""


def node_timelines(status: JobStatus, events: Sequence[JobEvent], end: float) -> list[NodeTimeline]:
    """Return a timeline for each node that the events or the status name.

    A node whose start is not known began with the job. ``lost`` is also true for a node that left.

    Args:
        status: status of the job.
        events: oldest first, completed by :func:`with_node_and_round`.
        end: end of the picture, in Unix seconds. Present nodes last until then.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for event in events:
        for node in _nodes_of(event):
            first.setdefault(node, event.at)
            if event.reason in (EventReason.NODE_LOST, EventReason.NODE_LEFT):
                last[node] = event.at
    for known in status.nodes:
        first.setdefault(known.id, status.started_at)
    if status.phase.ended and status.ended_at is not None:
        end = min(end, status.ended_at)
    order = sorted(map(NodeId, first), key=id_key)
    return [
        NodeTimeline(n, min(first[n], last.get(n, end)), max(first[n], last.get(n, end)), n in last)
        for n in order
    ]


def _nodes_of(event: JobEvent) -> list[str]:
    """Return the nodes that an event is about. One event may name several nodes that joined."""
    if event.reason == EventReason.NODE_JOINED and event.node is None:
        named = event.message.partition(": ")[2].partition(" and ")[0]
        return [node for node in named.split(", ") if node]
    return [event.node] if event.node is not None else []


def with_node_and_round(events: Sequence[JobEvent]) -> list[JobEvent]:
    """Return the events, completed with node and round from their messages where these have them.

    Of older events Kubernetes keeps only the message. Other events are returned unchanged.
    """
    found = []
    for event in events:
        news: dict[str, str | int] = {}
        node = re.match(
            r"(?:node )?([a-z0-9][-a-z0-9.]*)(?: (?:joined|was lost|has left)\b|: worker )",
            event.message,
        )
        number = re.match(r"(?:first step of )?round (\d+)\b", event.message)
        if event.node is None and node:
            news["node"] = node[1]
        if event.round is None and number:
            news["round"] = int(number[1])
        found.append(event.model_copy(update=news) if news else event)
    return found


def outages(events: Sequence[JobEvent]) -> list[Outage]:
    """Return what interrupted the training, oldest first, each cause once.

    These are the causes of all rounds but the first, Warnings that caused another Warning, and the
    starts of masters that events report.
    """
    by_id = {event.id: event for event in events}
    resumed = {e.round or 0: e for e in events if e.reason == EventReason.TRAINING_RESUMED}
    found = []
    for event in events:
        cause = by_id.get(event.cause or 0)
        if (
            event.reason == EventReason.ROUND_FORMED
            and cause is not None
            and (event.round or 0) > 1
        ):
            found.append(Outage(cause, event.round or 0, resumed.get(event.round or 0)))
        elif cause is not None and event.type == cause.type == "Warning":
            found.append(Outage(cause, 0, None))
        elif event.reason == EventReason.MASTER_STARTED:
            found.append(Outage(event, 0, None))
    seen: set[int] = set()
    once = []
    for outage in sorted(
        found, key=lambda o: -o.round
    ):  # prefer the entry that names the round that followed
        if outage.cause.id not in seen:
            seen.add(outage.cause.id)
            once.append(outage)
    return sorted(once, key=lambda o: (o.cause.at, o.cause.id))


def samples(
    history: History, status: JobStatus, events: Sequence[JobEvent]
) -> list[ProgressSample]:
    """Return how far the training was at known times, oldest first; empty if nothing is known.

    Without a history, the steps come from the messages of events.

    Args:
        history: samples that this machine has kept; it may be empty.
        status: status of the job.
        events: events of the job, which name some steps.
    """
    found = list(history.samples)
    for event in events:
        first = re.match(r"first step of round (\d+) is (\d+)", event.message)
        stored = re.match(r"the checkpoint of step (\d+) was stored", event.message)
        nodes = status.nodes_in_round
        if event.reason == EventReason.TRAINING_RESUMED and first:
            before = re.search(r"; step (\d+) had been reached", event.message)
            if before and event.took_s is not None:
                at, step = event.at - event.took_s, int(before[1])
                found.append(ProgressSample(at=at, step=step, round=int(first[1]) - 1, nodes=nodes))
            found.append(
                ProgressSample(at=event.at, step=int(first[2]), round=int(first[1]), nodes=nodes)
            )
        elif stored and not history.samples:  # the step was reached a little earlier
            number = event.round or status.round
            found.append(
                ProgressSample(at=event.at, step=int(stored[1]), round=number, nodes=nodes)
            )
    if status.progress is not None:
        at = status.ended_at or status.published_at
        found.append(
            ProgressSample(
                at=at, step=status.progress.step, round=status.round, nodes=status.nodes_in_round
            )
        )
    return sorted(found, key=lambda sample: sample.at)


def page(job_view: JobView, history: History, *, now: float) -> str:
    """Return the whole page. Without a status it lacks the sections that need one.

    Args:
        job_view: what is known of the job.
        history: history of the training; empty where it is not known.
        now: Unix seconds.
    """
    status = job_view.status
    since = "" if status is None else f"started at {rfc3339(status.started_at)} · "
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_escape(job_view.name)}: {_escape(job_view.phase)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f'<h1>{_escape(job_view.name)} <span class="phase {_css_class(job_view.phase)}">'
        f"{_escape(job_view.phase)}</span></h1>",
        f'<p class="why">{_escape(since + job_view.reason)}</p>',
    ]
    if status is not None:
        parts += _status_sections(job_view, status, history, now)
    parts += _conditions(job_view)
    parts += _events(job_view.events)
    heads = "".join(f"{_escape(line)}\n" for line in job_view.header_lines)
    parts += [f"<h2>The job</h2><pre>{heads}</pre>"] if heads else []
    parts += [f"<p>{_escape(note)}</p>" for note in job_view.notes]
    parts += [
        f"<footer>written at {_escape(rfc3339(now))} by dlrover {_escape(__version__)}</footer>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _status_sections(
    job_view: JobView, status: JobStatus, history: History, now: float
) -> Iterator[str]:
    """Yield the sections that need a status. Those without data, such as goodput, are left out."""
    end = status.ended_at or max(now if job_view.document else 0.0, status.published_at)
    yield _facts(status, end)
    events = with_node_and_round(job_view.events)
    found = outages(events)
    points = samples(history, status, events)
    since = min([status.started_at, *(e.at for e in events if e.at > 0)])
    scale = _Scale(since, max(end, since + 1e-3))
    yield "<h2>Nodes and rounds</h2>"
    yield _time_line(node_timelines(status, events, end), events, found, scale)
    if len(points) > 1:
        yield "<h2>Steps</h2>"
        yield _curve(points, found, scale, status)
        if not history.samples:
            yield (
                '<p class="why">Only the steps that events name are known. The curve joins them by '
                "straight lines.</p>"
            )
    if status.goodput is not None:
        yield "<h2>Where the time went</h2>"
        yield from _goodput(status)
    yield "<h2>Interruptions, and what they cost</h2>"
    yield from _outages(found, status, since)
    failure = status.last_failure
    if failure is not None:
        worker = failure.worker
        yield (
            f"<h2>Last failure</h2><p>{_escape(clock(failure.at))} {_escape(failure.node)}, round "
            f"{failure.round}, rank {worker.rank}: {_escape(worker.message)}</p>"
        )
        yield f"<pre>{_escape(worker.traceback)}</pre>" if worker.traceback else ""


def _facts(status: JobStatus, end: float) -> str:
    """Return the boxes with the main numbers. Empty ones are left out."""
    progress = status.progress
    if progress is not None and status.phase.ended:
        progress = progress.model_copy(update={"steps_per_s": 0.0})
    step = "" if progress is None else str(progress.step)
    if progress is not None and progress.total:
        step += f" of {progress.total}"
    metrics = progress_words(progress).partition(", ")[2]
    stored = status.last_checkpoint.stored_step if status.last_checkpoint is not None else None
    restarts = sum(status.restarts.get(cause, 0) for cause in ("failure", "loss"))
    facts = [
        ("ran for", duration(max(0.0, end - status.started_at))),
        ("step", step),
        ("goodput", "" if status.goodput is None else f"{100 * status.goodput:.1f}%"),
        ("rounds", str(status.round)),
        ("interruptions", str(restarts)),
        ("workers", str(status.world_size)),
        ("step in storage", "" if stored is None else str(stored)),
        ("metrics", metrics),
    ]
    boxes = "".join(
        f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>"
        for name, value in facts
        if value
    )
    return f'<dl class="facts">{boxes}</dl>'


class _Scale:
    """The time axis: converts times to positions from left to right."""

    def __init__(self, since: float, until: float) -> None:
        self.since, self.until = since, until

    def x(self, at: float) -> float:
        """Return the position of a time. Times outside the picture are moved to its edge."""
        part = (min(max(at, self.since), self.until) - self.since) / (self.until - self.since)
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions, each with the time since the start as text, about eight at most."""
        span = self.until - self.since
        sizes = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
        size = next((s for s in sizes if span / s <= 8), 86400 * max(1, round(span / 86400 / 7)))
        count = int(span / size)
        return [(self.x(self.since + i * size), _since(i * size)) for i in range(count + 1)]


def _since(seconds: float) -> str:
    """Return the time since the start as the text of a tick."""
    if seconds == 0:
        return "0"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{seconds / 60:.1f} min"


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    """Return an SVG picture of these parts."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{_escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _grid(scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield the vertical lines of the time axis."""
    for x, text in scale.ticks():
        yield f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="var(--line)"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{_escape(text)}</text>'


def _bands(found: Sequence[Outage], scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield the bands that last from the end of a round to the next step, at least a thin line."""
    for outage in found:
        until = outage.resumed.at if outage.resumed is not None else outage.cause.at
        x = scale.x(outage.cause.at)
        width = max(1.5, scale.x(until) - x)
        yield (
            f'<rect x="{x}" y="{top}" width="{width:g}" height="{bottom - top}" '
            f'fill="var(--bad)" opacity="0.25"><title>{_escape(outage.cause.message)}</title>'
            "</rect>"
        )


def _time_line(
    rows: Sequence[NodeTimeline], events: Sequence[JobEvent], found: Sequence[Outage], scale: _Scale
) -> str:
    """Return the picture of nodes and rounds, with its legend.

    Only the first ``NODES_SHOWN`` nodes are drawn; a sentence says how many more there are.
    """
    shown = rows[:NODES_SHOWN]
    top, bottom = 26, 26 + ROW_HEIGHT * max(1, len(shown))
    parts = [*_grid(scale, top, bottom), *_bands(found, scale, top, bottom)]
    for i, row in enumerate(shown):
        y = top + i * ROW_HEIGHT
        x, width = scale.x(row.since), max(2.0, scale.x(row.until) - scale.x(row.since))
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">'
            f"{_escape(_shorten(row.node, 10))}</text>"
            f'<rect x="{x}" y="{y + 4}" width="{width:g}" height="{ROW_HEIGHT - 8}" rx="3" '
            f'fill="var(--lane)"><title>{_escape(row.node)}</title></rect>'
        )
        if row.lost:
            end = scale.x(row.until)
            parts.append(
                f'<path d="M{end - 5} {y + 6}l10 10m0 -10l-10 10" stroke="var(--bad)" '
                f'stroke-width="2.5"><title>{_escape(row.node)} is lost</title></path>'
            )
    places = {row.node: top + i * ROW_HEIGHT for i, row in enumerate(shown)}
    parts += [
        f'<circle cx="{scale.x(event.at)}" cy="{places[event.node] + ROW_HEIGHT / 2}" r="4.5" '
        f'fill="var(--bad)"><title>{_escape(event.message)}</title></circle>'
        for event in events
        if event.reason == EventReason.WORKER_FAILED and event.node in places
    ]
    free = 0.0
    for event in events:
        if event.reason == EventReason.MASTER_STARTED:
            x = scale.x(event.at)
            parts.append(
                f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="var(--warn)" '
                f'stroke-width="2"><title>{_escape(event.message)}</title></line>'
            )
        if event.reason != EventReason.ROUND_FORMED:
            continue
        x = scale.x(event.at)
        parts.append(
            f'<line x1="{x}" y1="{top - 6}" x2="{x}" y2="{bottom}" stroke="var(--calm)" '
            f'stroke-dasharray="3 3"><title>{_escape(event.message)}</title></line>'
        )
        if x >= free:
            text = f"round {event.round}"
            parts.append(
                f'<text x="{x}" y="{top - 11}" text-anchor="middle">{_escape(text)}</text>'
            )
            free = x + 56
    drawn = _svg(bottom + 24, parts, "nodes and rounds over time")
    more = len(rows) - len(shown)
    legend = [
        ("var(--lane)", "a node is present"),
        ("var(--bad)", "● a worker failed, ✕ a node was lost; the band lasts to the next step"),
        ("var(--calm)", "a round was formed"),
        ("var(--warn)", "a new master took over"),
    ]
    return drawn + _legend(legend) + (f"<p>… and {counted(more, 'more node')}</p>" if more else "")


def _legend(items: Sequence[tuple[str, str]]) -> str:
    """Return the legend of a picture."""
    rows = "".join(f'<li><i style="background:{c}"></i>{_escape(text)}</li>' for c, text in items)
    return f'<ul class="legend">{rows}</ul>'


def _curve(
    points: Sequence[ProgressSample], found: Sequence[Outage], scale: _Scale, status: JobStatus
) -> str:
    """Return the picture of the steps over time."""
    top, bottom = 10, 10 + CURVE_HEIGHT
    total = status.progress.total if status.progress is not None else None
    most = max(1, total or 0, *(p.step for p in points))

    def y(step: int) -> float:
        return round(bottom - step / most * CURVE_HEIGHT, 1)

    parts = [*_grid(scale, top, bottom), *_bands(found, scale, top, bottom)]
    for part in range(5):
        step = round(most * part / 4)
        parts.append(
            f'<line x1="{LEFT}" y1="{y(step)}" x2="{WIDTH - RIGHT}" y2="{y(step)}" '
            f'stroke="var(--line)"/><text x="{LEFT - 10}" y="{y(step) + 4}" '
            f'text-anchor="end">{step}</text>'
        )
    line = " ".join(f"{scale.x(p.at)},{y(p.step)}" for p in points)
    parts.append(
        f'<polyline points="{line}" fill="none" stroke="var(--calm)" stroke-width="2" '
        'stroke-linejoin="round"/>'
    )
    return _svg(bottom + 24, parts, "steps over time")


def _goodput(status: JobStatus) -> Iterator[str]:
    """Yield the bar that shows where the time went, with its legend.

    The part that brought no new steps is divided by cause. If no cause is known, it stays empty.
    """
    good = status.goodput or 0.0
    lost = {cause: seconds for cause, seconds in status.lost_s.items() if seconds > 0}
    total = sum(lost.values())
    shares = [("var(--good)", f"new steps: {100 * good:.1f}%", good)]
    for cause, seconds in sorted(lost.items(), key=lambda item: -item[1]):
        share = (1 - good) * seconds / total
        text = f"{cause}: {100 * share:.1f}% ({duration(seconds)})"
        shares.append((_COLOURS.get(cause, "#8a8fa3"), text, share))
    parts, x = [], 0.0
    for colour, text, share in shares:
        width = round(share * WIDTH, 2)
        parts.append(
            f'<rect x="{x:g}" y="0" width="{width:g}" height="26" fill="{colour}">'
            f"<title>{_escape(text)}</title></rect>"
        )
        x += width
    yield _svg(26, parts, "goodput") + _legend([(colour, text) for colour, text, _ in shares])


def _outages(found: Sequence[Outage], status: JobStatus, since: float) -> Iterator[str]:
    """Yield the table of the last ``ROWS_SHOWN`` interruptions, or a sentence if there are none."""
    if not found:
        good = status.phase not in (JobPhase.FAILED, JobPhase.PENDING)
        yield f"<p>{'None.' if good else 'No event reports one.'}</p>"
        return
    yield (
        "<table><tr><th>at</th><th>after</th><th>what happened</th><th>time to the next step</th>"
        "<th>steps</th></tr>"
    )
    for outage in found[-ROWS_SHOWN:]:
        resumed = outage.resumed
        took = "" if resumed is None or resumed.took_s is None else duration(resumed.took_s)
        repeated = "" if resumed is None else resumed.message.rpartition(": ")[2]
        cells = (outage.cause.message, took, repeated)
        yield (
            f'<tr><td class="at">{_escape(clock(outage.cause.at))}</td>'
            f'<td class="at">{_escape(duration(outage.cause.at - since))}</td>'
            + "".join(f"<td>{_escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    yield "</table>"


def _conditions(job_view: JobView) -> Iterator[str]:
    """Yield the heading and table of conditions, as HTML; nothing if there are none.

    Problems are highlighted. Only the first line of a message is shown.
    """
    if not job_view.conditions:
        return
    bad = {condition.type for condition in job_view.problems}
    yield "<h2>Conditions</h2><table><tr><th>condition</th><th></th><th>message</th></tr>"
    for condition in job_view.conditions:
        style = ' class="Warning"' if condition.type in bad else ""
        mark = {"True": "yes", "False": "no"}.get(condition.status, "?")
        yield (
            f'<tr{style}><td class="at">{_escape(condition.type)}</td><td class="at">{mark}</td>'
            f'<td class="rest">{_escape(condition.message.partition(chr(10))[0])}</td></tr>'
        )
    yield "</table>"


def _events(events: Sequence[JobEvent]) -> Iterator[str]:
    """Yield the table of the last ``ROWS_SHOWN`` events; nothing if there are none."""
    if not events:
        return
    yield "<h2>Events</h2><table><tr><th>at</th><th>reason</th><th>message</th></tr>"
    for event in events[-ROWS_SHOWN:]:
        style = ' class="Warning"' if event.type == "Warning" else ""
        yield (
            f'<tr{style}><td class="at">{_escape(clock(event.at))}</td>'
            f'<td class="at">{_escape(event.reason)}</td>'
            f'<td class="rest">{_escape(event.message)}</td></tr>'
        )
    yield "</table>"
    if len(events) > ROWS_SHOWN:
        yield f"<p>… and {len(events) - ROWS_SHOWN} older ones</p>"


def _shorten(text: str, most: int) -> str:
    """Return a text shortened to ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _css_class(phase: str) -> str:
    """Return a phase as a CSS class, which has letters only."""
    return re.sub(r"[^A-Za-z]", "", phase)


def _escape(text: str) -> str:
    """Escape text for the page: control characters become visible, and no character is markup."""
    return escape(plain(text), quote=True)
