"""The pictures of a job as inline SVG: nodes and rounds, steps, and where the time went.

All functions are pure and return markup. Every word passes through :func:`escaped`, so no text of a
script, a user or a Pod is read as markup. Each shape has a title, and no picture needs its colors
to be understood: shapes and legends say the same.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from string import ascii_uppercase

from markupsafe import Markup

from dlrover_py.dashboard.timeline import MarkKind, NodeTimeline, Outage, RoundTimeline, TimeMark
from dlrover_py.protocol.job_view import time_shares
from dlrover_py.protocol.local import ProgressSample
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobEvent, JobStatus, TimeBucket
from dlrover_py.protocol.words import counted, duration, plain

LEFT, RIGHT, WIDTH = 84, 16, 960
"""Left margin, right margin and width of the pictures, in SVG units."""
ROW_HEIGHT, CURVE_HEIGHT = 22, 220
"""Height of a node's row, and height of the curve of steps, in SVG units."""
CURVE_POINTS = 200
"""Largest number of points of a curve."""
NODES_SHOWN = 64
"""Largest number of nodes in the picture."""

MARK_WIDTH, MARK_TITLES = 13.0, 5
"""Least distance of two marks of a row, in SVG units, and how many of those that are nearer the
title of their common mark has."""
LETTER_WIDTH = 16.0
"""Least width of a part of a bar that has its letter in it."""

_COLORS: dict[str, str] = {
    TimeBucket.PRODUCTIVE: "var(--good)",
    TimeBucket.INFRASTRUCTURE_RECOVERY: "#d9822b",
    TimeBucket.WASTED_PROGRESS: "#c4483e",
    TimeBucket.PROGRAM_STARTUP: "#b7a13a",
    TimeBucket.DATA_LOADING: "#7a6fb0",
    TimeBucket.CHECKPOINT_SAVE: "#4f9da6",
    TimeBucket.CHECKPOINT_RESTORE: "#3d6f8e",
    TimeBucket.STANDSTILL: "#7d2f2a",
    TimeBucket.INITIALIZATION: "#5b7a4c",
    TimeBucket.SUSPENDED: "#8a8fa3",
}


class Scale:
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
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escaped(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _grid(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield the vertical lines of the time axis."""
    for x, text in scale.ticks():
        yield f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="var(--line)"/>'
        anchor = "end" if x > WIDTH - RIGHT - 1 else "middle"  # the last one was cut off
        at = WIDTH if anchor == "end" else x
        yield f'<text x="{at}" y="{bottom + 16}" text-anchor="{anchor}">{escaped(text)}</text>'


def _bands(found: Sequence[Outage], scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield the bands that last from the end of a round to the next step, at least a thin line.

    A round that is to be larger trains on until the new nodes are there, so its band begins later
    than its cause.
    """
    for outage in found:
        since = until = outage.cause.at
        if outage.resumed is not None:
            until = outage.resumed.at
            since = max(since, until - (outage.resumed.took_s or 0.0))
        if outage.cause.type == "Warning":
            since = outage.cause.at
        x = scale.x(since)
        width = max(1.5, scale.x(until) - x)
        yield (
            f'<rect x="{x}" y="{top}" width="{width:g}" height="{bottom - top}" '
            f'fill="var(--bad)" opacity="0.25"><title>{escaped(outage.cause.message)}</title>'
            "</rect>"
        )


def time_line(
    rows: Sequence[NodeTimeline],
    events: Sequence[JobEvent],
    found: Sequence[Outage],
    scale: Scale,
    *,
    rounds: Sequence[RoundTimeline],
    marks: Sequence[TimeMark],
) -> Markup:
    """Return the picture of nodes and rounds, with its legend.

    Only ``NODES_SHOWN`` nodes are drawn, those with failures first; a sentence says how many more
    there are. Below them, there is a row for each kind of marks.

    Args:
        rows: life of each node.
        events: events of the job, with their nodes and rounds.
        found: interruptions.
        scale: time axis.
        rounds: the rounds, each of which has a bar above the nodes.
        marks: scalings, checkpoints and terms of masters.
    """
    failures = [event for event in events if event.reason == EventReason.WORKER_FAILED]
    failed = {event.node for event in failures} | {row.node for row in rows if row.lost}
    kept = {row.node for row in sorted(rows, key=lambda row: row.node not in failed)[:NODES_SHOWN]}
    shown = [row for row in rows if row.node in kept]
    kinds = [kind for kind in MarkKind if any(mark.kind is kind for mark in marks)]
    top = 42
    lower = top + ROW_HEIGHT * max(1, len(shown))
    bottom = lower + ROW_HEIGHT * len(kinds)
    parts = [*_grid(scale, top, bottom), *_bands(found, scale, top, lower)]
    for i, row in enumerate(shown):
        y = top + i * ROW_HEIGHT
        x, width = scale.x(row.since), max(2.0, scale.x(row.until) - scale.x(row.since))
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">'
            f"{escaped(_shorten(row.node, 10))}</text>"
            f'<rect x="{x}" y="{y + 4}" width="{width:g}" height="{ROW_HEIGHT - 8}" rx="3" '
            f'fill="var(--lane)"><title>{escaped(row.node)}</title></rect>'
        )
        if row.lost:
            end = scale.x(row.until)
            parts.append(
                f'<path d="M{end - 5} {y + 6}l10 10m0 -10l-10 10" stroke="var(--bad)" '
                f'stroke-width="2.5"><title>{escaped(row.node)} is lost</title></path>'
            )
    places = {row.node: top + i * ROW_HEIGHT for i, row in enumerate(shown)}
    parts += [
        f'<circle cx="{scale.x(event.at)}" cy="{places[event.node] + ROW_HEIGHT / 2}" r="4.5" '
        f'fill="var(--bad)"><title>{escaped(event.message)}</title></circle>'
        for event in failures
        if event.node in places
    ]
    parts += _round_bars(rounds, scale, top, lower)
    for i, kind in enumerate(kinds):
        parts += _mark_row(kind, [m for m in marks if m.kind is kind], scale, lower, i)
    drawn = _svg(bottom + 24, parts, "nodes and rounds over time")
    more = len(rows) - len(shown)
    legend = [
        ("var(--lane)", "a node is present"),
        ("var(--bad)", "● a worker failed, ✕ a node was lost; the band lasts to the next step"),
        ("var(--calm)", "a round, from the line at which it was formed; its title says who is in"),
    ]
    legend += [(_MARK_COLORS[kind], _MARK_WORDS[kind]) for kind in kinds]
    rest = f"<p>… and {counted(more, 'more node')}</p>" if more else ""
    return Markup(drawn + _legend(legend) + rest)


_MARK_COLORS = {
    MarkKind.SIZE: "var(--calm)",
    MarkKind.CHECKPOINT: "var(--good)",
    MarkKind.MASTER: "var(--warn)",
}
_MARK_WORDS = {
    MarkKind.SIZE: "▲ size: the job was scaled, suspended or resumed, or its spec was changed",
    MarkKind.CHECKPOINT: "■ checkpoints: one was stored, or ✕ could not be stored",
    MarkKind.MASTER: "◆ master: the term of another master began",
}
_MARK_SHAPES = {
    MarkKind.SIZE: "M{x} {y}m0 -6l6 11h-12z",
    MarkKind.CHECKPOINT: "M{x} {y}m-4.5 -4.5h9v9h-9z",
    MarkKind.MASTER: "M{x} {y}m0 -6l6 6l-6 6l-6 -6z",
}
"""Each kind has a shape of its own, so that no color is needed."""


def round_words(one: RoundTimeline) -> str:
    """Return a round as text: its size, who was in it, how long it lasted, and why it ended."""
    text = f"round {one.number}"
    if one.nodes:
        text += f": {counted(one.nodes, 'node')}"
    if one.who:
        text += f" ({one.who})"
    text += f", {duration(one.until - one.since)}"
    return text + (f"; it ended: {one.ended}" if one.ended else "")


def _round_bars(
    rounds: Sequence[RoundTimeline], scale: Scale, top: float, bottom: float
) -> Iterator[str]:
    """Yield a bar above the nodes for each round, a line where it begins, and maybe its number."""
    free = 0.0
    for one in rounds:
        x, until = scale.x(one.since), scale.x(one.until)
        words = f"<title>{escaped(round_words(one))}</title>"
        yield (
            f'<g>{words}<line x1="{x}" y1="{top - 20}" x2="{x}" y2="{bottom}" stroke="var(--calm)" '
            f'stroke-dasharray="3 3"/>'
            f'<rect x="{x}" y="{top - 18}" width="{max(2.0, until - x):g}" height="10" rx="2" '
            f'fill="var(--calm)" stroke="var(--back)"/></g>'
        )
        if x >= free:
            text = f"round {one.number}"
            anchor = "start" if x < LEFT + 28 else "end" if x > WIDTH - RIGHT - 28 else "middle"
            yield f'<text x="{x}" y="{top - 26}" text-anchor="{anchor}">{escaped(text)}</text>'
            free = x + 56


def _mark_row(
    kind: MarkKind, marks: Sequence[TimeMark], scale: Scale, top: float, index: int
) -> Iterator[str]:
    """Yield the name of a row and its marks. Marks that would overlap are one, with both titles."""
    y = top + index * ROW_HEIGHT + ROW_HEIGHT / 2
    yield f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{kind}</text>'
    groups: list[list[TimeMark]] = []
    for mark in sorted(marks, key=lambda mark: mark.at):
        if groups and scale.x(mark.at) - scale.x(groups[-1][0].at) < MARK_WIDTH:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups:
        x = scale.x(group[0].at)
        words = [mark.words for mark in group[-MARK_TITLES:]]
        if len(words) < len(group):
            words.insert(0, f"{counted(len(group), 'event')}, of which the last are:")
        text = "\n".join(words)
        shape = _MARK_SHAPES[kind].format(x=x, y=y)
        if any(mark.bad for mark in group):
            shape = f"M{x - 5} {y - 5}l10 10m0 -10l-10 10"
            yield (
                f'<path d="{shape}" stroke="var(--bad)" stroke-width="2.5">'
                f"<title>{escaped(text)}</title></path>"
            )
            continue
        yield (
            f'<path d="{shape}" fill="{_MARK_COLORS[kind]}"><title>{escaped(text)}</title></path>'
        )


def _legend(items: Sequence[tuple[str, str]]) -> str:
    """Return the legend of a picture. Its colors need no style attribute, which a page's content
    security policy forbids."""
    rows = "".join(
        f'<li><svg class="swatch" viewBox="0 0 11 11" aria-hidden="true"><rect width="11" '
        f'height="11" rx="3" fill="{color}"/></svg>{escaped(text)}</li>'
        for color, text in items
    )
    return f'<ul class="legend">{rows}</ul>'


def steps_curve(
    points: Sequence[ProgressSample], found: Sequence[Outage], scale: Scale, status: JobStatus
) -> Markup:
    """Return the picture of the steps over time.

    Args:
        points: known steps, oldest first; at least one.
        found: interruptions.
        scale: time axis.
        status: status of the job, which may have the total number of steps.
    """
    total = status.progress.total if status.progress is not None else None
    most = max(1, total or 0, *(p.step for p in points))
    line = [(p.at, float(p.step)) for p in points]
    return _curve(line, found, scale, label="steps over time", span=(0.0, float(most)))


def value_curve(
    points: Sequence[tuple[float, float]], found: Sequence[Outage], scale: Scale, name: str
) -> Markup:
    """Return the picture of a number over time.

    Args:
        points: Unix seconds and value, oldest first; at least one.
        found: interruptions.
        scale: time axis.
        name: what the number is.
    """
    low, high = min(value for _, value in points), max(value for _, value in points)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return _curve(points, found, scale, label=f"{name} over time", span=(low, high))


def share_curve(
    points: Sequence[tuple[float, float]],
    found: Sequence[Outage],
    scale: Scale,
    ceiling: float | None,
) -> Markup:
    """Return the picture of the goodput over time, in percent.

    Args:
        points: Unix seconds and share from 0 to 1, oldest first; at least one.
        found: interruptions.
        scale: time axis.
        ceiling: the best share that could be reached, as a line; None if it is not known.
    """
    percent = [(at, 100 * share) for at, share in points]
    level = None if ceiling is None else 100 * ceiling
    span = (0.0, 100.0)
    return _curve(percent, found, scale, label="goodput over time in %", span=span, level=level)


def _curve(
    points: Sequence[tuple[float, float]],
    found: Sequence[Outage],
    scale: Scale,
    *,
    label: str,
    span: tuple[float, float],
    level: float | None = None,
) -> Markup:
    """Return the picture of a line over time, with the interruptions, each of which ends a round.

    Args:
        points: Unix seconds and value.
        found: interruptions.
        scale: time axis.
        label: what the picture shows.
        span: values at the bottom and at the top.
        level: a value that gets a line of its own: the best one that could be reached.
    """
    top, bottom = 10, 10 + CURVE_HEIGHT
    low, high = span
    height = high - low or 1.0

    def y(value: float) -> float:
        return round(bottom - (value - low) / height * CURVE_HEIGHT, 1)

    parts = [*_grid(scale, top, bottom), *_bands(found, scale, top, bottom)]
    for part in range(5):
        value = low + height * part / 4
        parts.append(
            f'<line x1="{LEFT}" y1="{y(value)}" x2="{WIDTH - RIGHT}" y2="{y(value)}" '
            f'stroke="var(--line)"/><text x="{LEFT - 10}" y="{y(value) + 4}" '
            f'text-anchor="end">{_number(value)}</text>'
        )
    line = " ".join(f"{scale.x(at)},{y(value)}" for at, value in _thinned(points))
    parts.append(
        f'<polyline points="{line}" fill="none" stroke="var(--calm)" stroke-width="2" '
        'stroke-linejoin="round"/>'
    )
    if level is not None:
        text = f"at most {level:.1f} could be reached"
        parts.append(
            f'<path d="M{LEFT} {y(level)}H{WIDTH - RIGHT}" stroke="var(--good)" stroke-width="2" '
            f'stroke-dasharray="8 4"><title>{text}</title></path>'
        )
    for outage in found:
        if outage.round:
            x = scale.x(outage.resumed.at if outage.resumed is not None else outage.cause.at)
            parts.append(
                f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="var(--calm)" '
                f'stroke-dasharray="3 3"><title>round {outage.round}</title></line>'
            )
    return Markup(_svg(bottom + 24, parts, label))


def _thinned(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield at most ``CURVE_POINTS`` points: of each stretch the lowest and the highest one."""
    size = math.ceil(len(points) / (CURVE_POINTS // 2))
    if size <= 2:
        yield from points
        return
    for first in range(0, len(points), size):
        stretch = sorted(points[first : first + size], key=lambda point: point[1])
        yield from sorted({stretch[0], stretch[-1]})


def _number(value: float) -> str:
    """Return the text of a tick: whole numbers in full, others with four digits."""
    return str(round(value)) if abs(value) >= 100 or value == round(value) else f"{value:.4g}"


def goodput_bar(status: JobStatus) -> Markup:
    """Return the bar that shows where the time went, with its legend.

    Each bucket has its part, with a letter for those who do not see the color; productive time
    comes first.
    """
    shares = [
        (
            _COLORS.get(part["what"], "#8a8fa3"),
            f"{letter}: {part['what'].replace('_', ' ')}, {100 * part['share']:.1f}% "
            f"({duration(part['seconds'])})",
            part["share"],
        )
        for letter, part in zip(ascii_uppercase, time_shares(status.goodput), strict=False)
    ]
    parts, x = [], 0.0
    for color, text, share in shares:
        width = round(share * WIDTH, 2)
        parts.append(
            f'<rect x="{x:g}" y="0" width="{width:g}" height="26" fill="{color}">'
            f"<title>{escaped(text)}</title></rect>"
        )
        if width >= LETTER_WIDTH:
            parts.append(
                f'<text class="letter" x="{x + width / 2:g}" y="18" text-anchor="middle">'
                f"{text[0]}</text>"
            )
        x += width
    legend = _legend([(color, text) for color, text, _ in shares])
    return Markup(_svg(26, parts, "goodput") + legend)


def _shorten(text: str, most: int) -> str:
    """Return a text shortened to ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def escaped(text: str) -> str:
    """Escape text for the page: control characters become visible, and no character is markup."""
    return escape(plain(text), quote=True)
