"""``dlrover job report``: a job as one page of HTML that needs nothing from elsewhere. Pure.

What a script or a worker has said is in it as text only: every word goes through :func:`_h`, and
the page's own policy forbids scripts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dlrover_py import __version__
from dlrover_py.cli.view import Picture, clock, duration, plain, progress_words, troubles
from dlrover_py.protocol.local import History, Sample
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.status import JobEvent, JobPhase, JobStatus, rfc3339
from dlrover_py.protocol.words import counted

LEFT, RIGHT, WIDTH = 84, 16, 960
LANE, CURVE = 22, 220
LANES_SHOWN = 64
ROWS_SHOWN = 200

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
class Lane:
    """The life of one node: from its first to its last moment, as far as they are known."""

    node: str
    since: float
    until: float
    lost: bool


@dataclass(frozen=True, slots=True)
class Outage:
    """What ended a round, and what it cost."""

    cause: JobEvent
    round: int
    """The next one; 0 if none followed."""
    resumed: JobEvent | None


def lanes(status: JobStatus, events: Sequence[JobEvent], end: float) -> list[Lane]:
    """One for each node that events or the status name.

    Args:
        status: of the job.
        events: oldest first, as :func:`complete` has them.
        end: of the picture, in Unix seconds. Nodes that are there live until then.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for event in events:
        for node in _nodes_of(event):
            first.setdefault(node, event.at)
            if event.reason in ("NodeLost", "NodeLeft"):
                last[node] = event.at
    for known in status.nodes:
        first.setdefault(known.id, status.started_at)
    if status.phase.ended and status.ended_at is not None:
        end = min(end, status.ended_at)
    order = sorted(map(NodeId, first), key=id_key)
    return [
        Lane(n, min(first[n], last.get(n, end)), max(first[n], last.get(n, end)), n in last)
        for n in order
    ]


def _nodes_of(event: JobEvent) -> list[str]:
    """The nodes that came or went; one event may name several that came."""
    if event.reason == "NodeJoined" and event.node is None:
        named = event.message.partition(": ")[2].partition(" and ")[0]
        return [node for node in named.split(", ") if node]
    return [event.node] if event.node is not None else []


def complete(events: Sequence[JobEvent]) -> list[JobEvent]:
    """Events with their node and round: Kubernetes keeps only the words of older ones."""
    found = []
    for event in events:
        news: dict[str, str | int] = {}
        node = re.match(
            r"([a-z0-9][-a-z0-9.]*)(?: is (?:there|lost|gone)\b|: worker )", event.message
        )
        number = re.match(r"(?:first step of )?round (\d+)\b", event.message)
        if event.node is None and node:
            news["node"] = node[1]
        if event.round is None and number:
            news["round"] = int(number[1])
        found.append(event.model_copy(update=news) if news else event)
    return found


def outages(events: Sequence[JobEvent]) -> list[Outage]:
    """What ended each round, oldest first."""
    by_id = {event.id: event for event in events}
    resumed = {e.round or 0: e for e in events if e.reason == "TrainingResumed"}
    found = []
    for event in events:
        cause = by_id.get(event.cause or 0)
        if event.reason == "RoundFormed" and cause is not None and (event.round or 0) > 1:
            found.append(Outage(cause, event.round or 0, resumed.get(event.round or 0)))
        elif cause is not None and event.type == cause.type == "Warning":
            found.append(Outage(cause, 0, None))
        elif event.reason == "MasterStarted":
            found.append(Outage(event, 0, None))
    told: set[int] = set()
    once = []
    for outage in sorted(found, key=lambda o: -o.round):  # one that a round followed says more
        if outage.cause.id not in told:
            told.add(outage.cause.id)
            once.append(outage)
    return sorted(once, key=lambda o: (o.cause.at, o.cause.id))


def samples(history: History, status: JobStatus, events: Sequence[JobEvent]) -> list[Sample]:
    """How far the training was, and when: kept by this machine, and as events and status tell."""
    found = list(history.samples)
    for event in events:
        first = re.match(r"first step of round (\d+) is (\d+)", event.message)
        stored = re.match(r"step (\d+) is in storage", event.message)
        nodes = status.nodes_in_round
        if event.reason == "TrainingResumed" and first:
            before = re.search(r"; step (\d+) had been reached", event.message)
            if before and event.took_s is not None:
                at, step = event.at - event.took_s, int(before[1])
                found.append(Sample(at=at, step=step, round=int(first[1]) - 1, nodes=nodes))
            found.append(Sample(at=event.at, step=int(first[2]), round=int(first[1]), nodes=nodes))
        elif stored and not history.samples:  # it was reached a little before
            number = event.round or status.round
            found.append(Sample(at=event.at, step=int(stored[1]), round=number, nodes=nodes))
    if status.progress is not None:
        at = status.ended_at or status.published_at
        found.append(
            Sample(
                at=at, step=status.progress.step, round=status.round, nodes=status.nodes_in_round
            )
        )
    return sorted(found, key=lambda sample: sample.at)


def page(picture: Picture, history: History, *, now: float) -> str:
    """The whole page.

    Args:
        picture: what is known of the job.
        history: how the training went on; empty where that is not known.
        now: Unix seconds.
    """
    status = picture.status
    since = "" if status is None else f"started at {rfc3339(status.started_at)} · "
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_h(picture.name)}: {_h(picture.phase)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f'<h1>{_h(picture.name)} <span class="phase {_word(picture.phase)}">'
        f"{_h(picture.phase)}</span></h1>",
        f'<p class="why">{_h(since + picture.reason)}</p>',
    ]
    if status is not None:
        parts += _of_status(picture, status, history, now)
    parts += _conditions(picture)
    parts += _events(picture.events)
    heads = "".join(f"{_h(head)}\n" for head in picture.heads)
    parts += [f"<h2>The job</h2><pre>{heads}</pre>"] if heads else []
    parts += [f"<p>{_h(note)}</p>" for note in picture.notes]
    parts += [
        f"<footer>written at {_h(rfc3339(now))} by dlrover {_h(__version__)}</footer>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _of_status(picture: Picture, status: JobStatus, history: History, now: float) -> Iterator[str]:
    end = status.ended_at or max(now if picture.document else 0.0, status.published_at)
    yield _facts(status, end)
    events = complete(picture.events)
    found = outages(events)
    points = samples(history, status, events)
    since = min([status.started_at, *(e.at for e in events if e.at > 0)])
    scale = _Scale(since, max(end, since + 1e-3))
    yield "<h2>Nodes and rounds</h2>"
    yield _time_line(lanes(status, events, end), events, found, scale)
    if len(points) > 1:
        yield "<h2>Steps</h2>"
        yield _curve(points, found, scale, status)
        if not history.samples:
            yield '<p class="why">Drawn from the events: between them the line is straight.</p>'
    if status.goodput is not None:
        yield "<h2>Where the time went</h2>"
        yield from _goodput(status)
    yield "<h2>Interruptions, and what they cost</h2>"
    yield from _outages(found, status, since)
    failure = status.last_failure
    if failure is not None:
        worker = failure.worker
        yield (
            f"<h2>Last failure</h2><p>{_h(clock(failure.at))} {_h(failure.node)}, round "
            f"{failure.round}, rank {worker.rank}: {_h(worker.message)}</p>"
        )
        yield f"<pre>{_h(worker.traceback)}</pre>" if worker.traceback else ""


def _facts(status: JobStatus, end: float) -> str:
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
        ("the script says", metrics),
    ]
    boxes = "".join(
        f"<div><dt>{_h(name)}</dt><dd>{_h(value)}</dd></div>" for name, value in facts if value
    )
    return f'<dl class="facts">{boxes}</dl>'


class _Scale:
    """Times as places from left to right."""

    def __init__(self, since: float, until: float) -> None:
        self.since, self.until = since, until

    def x(self, at: float) -> float:
        """The place of a time, which is kept within the picture."""
        part = (min(max(at, self.since), self.until) - self.since) / (self.until - self.since)
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """At most eight places with their time since the start."""
        span = self.until - self.since
        sizes = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
        size = next((s for s in sizes if span / s <= 8), 86400 * max(1, round(span / 86400 / 7)))
        count = int(span / size)
        return [(self.x(self.since + i * size), _since(i * size)) for i in range(count + 1)]


def _since(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{seconds / 60:.1f} min"


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{_h(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _grid(scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    for x, words in scale.ticks():
        yield f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="var(--line)"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{_h(words)}</text>'


def _bands(found: Sequence[Outage], scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    """The times from what ended a round to the next step."""
    for outage in found:
        until = outage.resumed.at if outage.resumed is not None else outage.cause.at
        x = scale.x(outage.cause.at)
        width = max(1.5, scale.x(until) - x)
        yield (
            f'<rect x="{x}" y="{top}" width="{width:g}" height="{bottom - top}" '
            f'fill="var(--bad)" opacity="0.25"><title>{_h(outage.cause.message)}</title></rect>'
        )


def _time_line(
    rows: Sequence[Lane], events: Sequence[JobEvent], found: Sequence[Outage], scale: _Scale
) -> str:
    shown = rows[:LANES_SHOWN]
    top, bottom = 26, 26 + LANE * max(1, len(shown))
    parts = [*_grid(scale, top, bottom), *_bands(found, scale, top, bottom)]
    for i, lane in enumerate(shown):
        y = top + i * LANE
        x, width = scale.x(lane.since), max(2.0, scale.x(lane.until) - scale.x(lane.since))
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{_h(_cut(lane.node, 10))}</text>'
            f'<rect x="{x}" y="{y + 4}" width="{width:g}" height="{LANE - 8}" rx="3" '
            f'fill="var(--lane)"><title>{_h(lane.node)}</title></rect>'
        )
        if lane.lost:
            end = scale.x(lane.until)
            parts.append(
                f'<path d="M{end - 5} {y + 6}l10 10m0 -10l-10 10" stroke="var(--bad)" '
                f'stroke-width="2.5"><title>{_h(lane.node)} is lost</title></path>'
            )
    places = {lane.node: top + i * LANE for i, lane in enumerate(shown)}
    parts += [
        f'<circle cx="{scale.x(event.at)}" cy="{places[event.node] + LANE / 2}" r="4.5" '
        f'fill="var(--bad)"><title>{_h(event.message)}</title></circle>'
        for event in events
        if event.reason == "WorkerFailed" and event.node in places
    ]
    free = 0.0
    for event in events:
        if event.reason == "MasterStarted":
            x = scale.x(event.at)
            parts.append(
                f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="var(--warn)" '
                f'stroke-width="2"><title>{_h(event.message)}</title></line>'
            )
        if event.reason != "RoundFormed":
            continue
        x = scale.x(event.at)
        parts.append(
            f'<line x1="{x}" y1="{top - 6}" x2="{x}" y2="{bottom}" stroke="var(--calm)" '
            f'stroke-dasharray="3 3"><title>{_h(event.message)}</title></line>'
        )
        if x >= free:
            words = f"round {event.round}"
            parts.append(f'<text x="{x}" y="{top - 11}" text-anchor="middle">{_h(words)}</text>')
            free = x + 56
    drawn = _svg(bottom + 24, parts, "nodes and rounds over time")
    more = len(rows) - len(shown)
    legend = [
        ("var(--lane)", "a node is there"),
        ("var(--bad)", "● a worker failed, ✕ a node was lost; the band lasts to the next step"),
        ("var(--calm)", "a round was formed"),
        ("var(--warn)", "a new master took over"),
    ]
    return drawn + _legend(legend) + (f"<p>… and {counted(more, 'more node')}</p>" if more else "")


def _legend(items: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<li><i style="background:{c}"></i>{_h(words)}</li>' for c, words in items)
    return f'<ul class="legend">{rows}</ul>'


def _curve(
    points: Sequence[Sample], found: Sequence[Outage], scale: _Scale, status: JobStatus
) -> str:
    top, bottom = 10, 10 + CURVE
    total = status.progress.total if status.progress is not None else None
    most = max(1, total or 0, *(p.step for p in points))

    def y(step: int) -> float:
        return round(bottom - step / most * CURVE, 1)

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
    good = status.goodput or 0.0
    lost = {cause: seconds for cause, seconds in status.lost_s.items() if seconds > 0}
    total = sum(lost.values())
    shares = [("var(--good)", f"new steps: {100 * good:.1f}%", good)]
    for cause, seconds in sorted(lost.items(), key=lambda item: -item[1]):
        share = (1 - good) * seconds / total
        words = f"{cause}: {100 * share:.1f}% ({duration(seconds)})"
        shares.append((_COLOURS.get(cause, "#8a8fa3"), words, share))
    parts, x = [], 0.0
    for colour, words, share in shares:
        width = round(share * WIDTH, 2)
        parts.append(
            f'<rect x="{x:g}" y="0" width="{width:g}" height="26" fill="{colour}">'
            f"<title>{_h(words)}</title></rect>"
        )
        x += width
    yield _svg(26, parts, "goodput") + _legend([(colour, words) for colour, words, _ in shares])


def _outages(found: Sequence[Outage], status: JobStatus, since: float) -> Iterator[str]:
    if not found:
        good = status.phase not in (JobPhase.FAILED, JobPhase.PENDING)
        yield f"<p>{'None.' if good else 'No event tells of one that a round followed.'}</p>"
        return
    yield (
        "<table><tr><th>at</th><th>after</th><th>what happened</th><th>next step after</th>"
        "<th>steps</th></tr>"
    )
    for outage in found[-ROWS_SHOWN:]:
        again = outage.resumed
        took = "" if again is None or again.took_s is None else duration(again.took_s)
        repeated = "" if again is None else again.message.rpartition(": ")[2]
        cells = (outage.cause.message, took, repeated)
        yield (
            f'<tr><td class="at">{_h(clock(outage.cause.at))}</td>'
            f'<td class="at">{_h(duration(outage.cause.at - since))}</td>'
            + "".join(f"<td>{_h(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    yield "</table>"


def _conditions(picture: Picture) -> Iterator[str]:
    if not picture.conditions:
        return
    bad = {condition.type for condition in troubles(picture.conditions)}
    yield "<h2>Conditions</h2><table><tr><th>condition</th><th></th><th>message</th></tr>"
    for condition in picture.conditions:
        style = ' class="Warning"' if condition.type in bad else ""
        mark = {"True": "yes", "False": "no"}.get(condition.status, "?")
        yield (
            f'<tr{style}><td class="at">{_h(condition.type)}</td><td class="at">{mark}</td>'
            f'<td class="rest">{_h(condition.message.partition(chr(10))[0])}</td></tr>'
        )
    yield "</table>"


def _events(events: Sequence[JobEvent]) -> Iterator[str]:
    if not events:
        return
    yield "<h2>Events</h2><table><tr><th>at</th><th>reason</th><th>message</th></tr>"
    for event in events[-ROWS_SHOWN:]:
        style = ' class="Warning"' if event.type == "Warning" else ""
        yield (
            f'<tr{style}><td class="at">{_h(clock(event.at))}</td>'
            f'<td class="at">{_h(event.reason)}</td>'
            f'<td class="rest">{_h(event.message)}</td></tr>'
        )
    yield "</table>"
    if len(events) > ROWS_SHOWN:
        yield f"<p>… and {len(events) - ROWS_SHOWN} older ones</p>"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _word(phase: str) -> str:
    """A phase as a class: letters only."""
    return re.sub(r"[^A-Za-z]", "", phase)


def _h(text: str) -> str:
    """Text for a page: control characters are spelled, and no character means anything."""
    return escape(plain(text), quote=True)
