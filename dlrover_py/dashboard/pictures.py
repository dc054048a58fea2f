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

from dlrover_py.dashboard.timeline import NodeTimeline, Outage
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
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{escaped(text)}</text>'


def _bands(found: Sequence[Outage], scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield the bands that last from the end of a round to the next step, at least a thin line."""
    for outage in found:
        until = outage.resumed.at if outage.resumed is not None else outage.cause.at
        x = scale.x(outage.cause.at)
        width = max(1.5, scale.x(until) - x)
        yield (
            f'<rect x="{x}" y="{top}" width="{width:g}" height="{bottom - top}" '
            f'fill="var(--bad)" opacity="0.25"><title>{escaped(outage.cause.message)}</title>'
            "</rect>"
        )


def time_line(
    rows: Sequence[NodeTimeline], events: Sequence[JobEvent], found: Sequence[Outage], scale: Scale
) -> Markup:
    """Return the picture of nodes and rounds, with its legend.

    Only the first ``NODES_SHOWN`` nodes are drawn; a sentence says how many more there are.

    Args:
        rows: life of each node.
        events: events of the job, with their nodes and rounds.
        found: interruptions.
        scale: time axis.
    """
    shown = rows[:NODES_SHOWN]
    top, bottom = 26, 26 + ROW_HEIGHT * max(1, len(shown))
    parts = [*_grid(scale, top, bottom), *_bands(found, scale, top, bottom)]
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
        for event in events
        if event.reason == EventReason.WORKER_FAILED and event.node in places
    ]
    free = 0.0
    for event in events:
        if event.reason == EventReason.MASTER_STARTED:
            x = scale.x(event.at)
            parts.append(
                f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="var(--warn)" '
                f'stroke-width="2"><title>{escaped(event.message)}</title></line>'
            )
        if event.reason != EventReason.ROUND_FORMED:
            continue
        x = scale.x(event.at)
        parts.append(
            f'<line x1="{x}" y1="{top - 6}" x2="{x}" y2="{bottom}" stroke="var(--calm)" '
            f'stroke-dasharray="3 3"><title>{escaped(event.message)}</title></line>'
        )
        if x >= free:
            text = f"round {event.round}"
            parts.append(
                f'<text x="{x}" y="{top - 11}" text-anchor="middle">{escaped(text)}</text>'
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
    rest = f"<p>… and {counted(more, 'more node')}</p>" if more else ""
    return Markup(drawn + _legend(legend) + rest)


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


def _curve(
    points: Sequence[tuple[float, float]],
    found: Sequence[Outage],
    scale: Scale,
    *,
    label: str,
    span: tuple[float, float],
) -> Markup:
    """Return the picture of a line over time, with the interruptions, each of which ends a round.

    Args:
        points: Unix seconds and value.
        found: interruptions.
        scale: time axis.
        label: what the picture shows.
        span: values at the bottom and at the top.
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
