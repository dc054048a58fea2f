"""Grids of many like things, such as all nodes by rank: a letter and a color for each. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from dlrover_py.protocol.agents import WorkerPhase
from dlrover_py.protocol.status import NodePhase, NodeStatus
from dlrover_py.protocol.words import counted, duration, plain

CELLS = 1024
"""Largest number of cells. In a larger job, one cell stands for several nodes of adjacent ranks."""
SLOW = 1.2
"""A node is slow if its step takes this many times the median, or more."""


@dataclass(frozen=True, slots=True, eq=False)  # marks are compared 100,000 times for a page
class Mark:
    """How a cell shows the state of a node. Each is equal to itself alone."""

    letter: str
    color: str
    """Class of the cell in the style sheet."""
    words: str


MARKS = (
    GONE := Mark("X", "bad", "gone"),
    SILENT := Mark("?", "bad", "does not answer"),
    LAGS := Mark("L", "warn", f"lags: its step takes {SLOW} times the median or more"),
    STARTS := Mark("S", "calm", "starts"),
    WAITS := Mark("W", "calm", "waits"),
    TRAINS := Mark("T", "good", "trains"),
)
"""All marks, the worst first. A cell for several nodes has the worst of theirs."""


def trains(node: NodeStatus) -> bool:
    """Return whether the workers of a node train in the present round."""
    live = node.phase is NodePhase.LIVE and node.node_rank is not None
    return live and node.workers is WorkerPhase.RUNNING


def mark_of(node: NodeStatus, median_s: float) -> Mark:
    """Return the mark of a node.

    Args:
        node: status of the node.
        median_s: median time of a step, in seconds; 0 if it is not known.
    """
    if node.phase is NodePhase.GONE:
        return GONE
    if node.phase is NodePhase.SUSPECT:
        return SILENT
    if node.phase is not NodePhase.LIVE:
        return STARTS
    if not trains(node):
        return WAITS
    slow = median_s > 0 and 0 < node.steps_per_s * median_s <= 1 / SLOW
    return LAGS if slow else TRAINS


def step_time(node: NodeStatus, median_s: float) -> str:
    """Return the time of a node's step, and its ratio to the median: ``2.1 s, 1.05 × median``.

    Returns:
        An empty text if the node does not train, or its speed is not known.
    """
    if not trains(node) or not node.steps_per_s:
        return ""
    ratio = f", {1 / (node.steps_per_s * median_s):.2f} × median" if median_s else ""
    return duration(1 / node.steps_per_s) + ratio


def cell(mark: Mark, words: str) -> str:
    """Return a cell of a grid as HTML, with its words as title."""
    return f'<b class="{mark.color}" title="{escape(plain(words))}">{mark.letter}</b>'


def with_legend(
    title: str, noun: str, cells: Sequence[str], marks: Sequence[Mark], order: Sequence[Mark]
) -> Markup:
    """Return a grid, with a legend that says how many things have which mark.

    To a screen reader the grid is one picture whose name is the legend.

    Args:
        title: what the grid shows.
        noun: name of one thing, such as ``node``.
        cells: all cells.
        marks: mark of each thing.
        order: all marks, the worst first.
    """
    counts = Counter(marks)
    legend = [(mark, f"{counted(counts[mark], noun)}: {mark.words}") for mark in counts]
    legend.sort(key=lambda item: -order.index(item[0]))
    label = escape("; ".join(words for _, words in legend))
    rows = "".join(
        f'<li><b class="{mark.color}">{mark.letter}</b> {escape(words)}</li>'
        for mark, words in legend
    )
    return Markup(
        f'<div class="ranks" role="img" aria-label="{title}. {label}">{"".join(cells)}</div>'
        f'<ul class="ranks legend">{rows}</ul>'
    )


def grid(nodes: Sequence[NodeStatus], median_s: float) -> Markup:
    """Return the grid of all nodes by rank.

    Args:
        nodes: nodes in the order of the cells; at least one.
        median_s: median time of a step, in seconds; 0 if it is not known.
    """
    marks = [mark_of(node, median_s) for node in nodes]
    each = -(-len(nodes) // CELLS)
    badness = {mark: i for i, mark in enumerate(MARKS)}
    cells = []
    for at in range(0, len(nodes), each):
        mark = min(marks[at : at + each], key=badness.__getitem__)
        first, last = nodes[at], nodes[min(at + each, len(nodes)) - 1]
        words = first.id if each == 1 else f"{first.id} to {last.id}"
        if first.node_rank is not None:
            words += f", rank {first.node_rank}" if each == 1 else f", from rank {first.node_rank}"
        if each == 1 and mark is LAGS:
            words += f", {step_time(first, median_s)}"
        if each == 1 and first.gpus:
            words += f", GPUs busy {first.gpu_words}"
        cells.append(cell(mark, f"{words}: {mark.words}"))
    more = f"<p>Each cell stands for {each} nodes, and has the worst mark.</p>" if each > 1 else ""
    return with_legend("Nodes by rank", "node", cells, marks, MARKS) + Markup(more)
