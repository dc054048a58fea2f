"""What a job's events say about its course: nodes, interruptions and steps over time.

All functions are pure. Times are Unix seconds.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from dlrover_py.protocol.local import History, ProgressSample
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobEvent, JobPhase, JobStatus, NodePhase

NAMED = 16
"""Largest number of members of a round that are named; others are counted."""


@dataclass(frozen=True, slots=True)
class NodeTimeline:
    """The life of one node, from the first to the last known time. Times are Unix seconds."""

    node: str
    since: float
    until: float
    lost: bool
    """Whether it ended without a request. A node that left by plan is not lost."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The time without training between the end of a round and the first step of the next one."""

    cause: JobEvent
    round: int
    """Number of the next round; 0 if none followed."""
    resumed: JobEvent | None
    """Event of the first step after it; None if there was none."""


@dataclass(frozen=True, slots=True)
class RoundTimeline:
    """One round: who was in it, how long it lasted, and why it ended. Times are Unix seconds."""

    number: int
    since: float
    until: float
    nodes: int
    """Number of its members; 0 if it is not known."""
    workers: int
    """Number of its workers; 0 if it is not known."""
    members: tuple[str, ...]
    """Its first members, at most ``NAMED``, as far as events and status name them."""
    ended: str
    """Why it ended, in words; empty while it goes on."""

    @property
    def who(self) -> str:
        """Its members in words: the known names, and how many more there were."""
        more = self.nodes - len(self.members)
        if not self.members:
            return "not known" if self.nodes else ""
        return ", ".join(self.members) + (f" and {more} more" if more > 0 else "")


class MarkKind(StrEnum):
    """What a mark in the time line stands for; the words name its row."""

    SIZE = "size"
    CHECKPOINT = "checkpoints"
    MASTER = "master"


@dataclass(frozen=True, slots=True)
class TimeMark:
    """A moment in the time line that is not about one node."""

    at: float
    kind: MarkKind
    words: str
    bad: bool
    """Whether something has failed."""


_MARKS: dict[str, MarkKind] = {
    EventReason.SPEC_CHANGED: MarkKind.SIZE,
    EventReason.SCALED_UP: MarkKind.SIZE,
    EventReason.SCALED_DOWN: MarkKind.SIZE,
    EventReason.NODES_ALLOCATED: MarkKind.SIZE,
    EventReason.SUSPENDED: MarkKind.SIZE,
    EventReason.RESUMED: MarkKind.SIZE,
    EventReason.CHECKPOINT_STORED: MarkKind.CHECKPOINT,
    EventReason.CHECKPOINT_FAILED: MarkKind.CHECKPOINT,
    EventReason.CHECKPOINT_NOT_COPIED: MarkKind.CHECKPOINT,
    EventReason.NOTHING_STORED: MarkKind.CHECKPOINT,
    EventReason.JOB_STARTED: MarkKind.MASTER,
    EventReason.MASTER_STARTED: MarkKind.MASTER,
    EventReason.MASTER_ENDED: MarkKind.MASTER,
    EventReason.JOURNAL_BEHIND: MarkKind.MASTER,
}
"""The kind of the mark that an event is in the time line. Other events have none."""


def marks(events: Sequence[JobEvent]) -> list[TimeMark]:
    """Return the scalings, the checkpoints and the terms of masters, oldest first."""
    found = [(e, _MARKS[e.reason]) for e in events if e.reason in _MARKS]
    return [TimeMark(e.at, kind, e.message, e.type == "Warning") for e, kind in found]


_FORMED = re.compile(
    r"round (?P<number>\d+)(?:: (?P<nodes>\d{1,9}) nodes?)?(?:, (?P<workers>\d{1,9}) workers?)?"
    r"(?: \((?:joined: (?P<joined>[^;)]*))?(?:; )?(?:left: (?P<left>[^;)]*))?\))?"
)
"""The beginning of the message of a ``RoundFormed`` event."""


def round_timelines(
    status: JobStatus, events: Sequence[JobEvent], end: float
) -> list[RoundTimeline]:
    """Return the rounds that events tell of, oldest first, each once.

    The events say who joined and left. From a round whose members are all known, the members of
    the rounds before and after it follow. An event names only some of many nodes; no members follow
    across such an event, nor where their number is another than that of the event.

    Args:
        status: status of the job, which names the members of the present round.
        events: oldest first, completed by :func:`with_node_and_round`.
        end: end of the last round if it goes on, in Unix seconds.
    """
    place = {
        e.round: i for i, e in enumerate(events) if e.reason == EventReason.ROUND_FORMED and e.round
    }
    formed = {n: events[i] for n, i in place.items()}
    by_id = {e.id: e for e in events}
    parts = {n: m for n, e in formed.items() if (m := _FORMED.match(e.message)) is not None}
    order = sorted(parts)
    counts = {n: int(parts[n]["nodes"] or 0) for n in order}
    joined, left = ({n: _names(parts[n][what]) for n in order} for what in ("joined", "left"))
    known = {
        n: _changed([], set(), joined[n])
        for n in order
        if counts[n] and len(joined[n]) == counts[n]
    }
    present = {n.id for n in status.nodes if n.node_rank is not None}
    if status.round in parts and len(present) == counts[status.round]:
        known[status.round] = sorted(map(_by_id, present))
    whole = {n for n in order if not any(_is_cut(parts[n][what]) for what in ("joined", "left"))}
    for n in order:  # from each known round to the next one
        if n not in known and n - 1 in known and n in whole:
            members = _changed(known[n - 1], left[n], joined[n])
            if len(members) == counts[n]:
                known[n] = members
    for n in reversed(order):  # and to the one before
        if n not in known and n + 1 in known and n + 1 in whole:
            members = _changed(known[n + 1], joined[n + 1], left[n + 1])
            if len(members) == counts[n]:
                known[n] = members
    found = []
    for n, following in zip_longest(order, order[1:]):
        within = events[place[n] + 1 : place[following] if following else None]
        suspended = next((e for e in within if e.reason == EventReason.SUSPENDED), None)
        since, until, ended, cause = formed[n].at, end, "", None
        if following:
            cause = by_id.get(formed[following].cause or 0)
            until = formed[following].at
            ended = formed[following].message.partition("; because ")[2]
        elif status.phase is not JobPhase.RUNNING:
            cause = _cause_in(status.reason, within)
            until, ended = status.ended_at or end, status.reason
        if suspended is not None:
            until, ended = suspended.at, suspended.message
        elif cause is not None:
            ended = cause.message
            until = min(until, cause.at) if cause.type == "Warning" else until
        who = known[n] if n in known else _changed([], set(), joined[n])
        first = tuple(name for _, name in who[:NAMED]) if len(who) <= counts[n] else ()
        workers = int(parts[n]["workers"] or 0)
        found.append(RoundTimeline(n, since, max(since, until), counts[n], workers, first, ended))
    return found


def _cause_in(reason: str, events: Sequence[JobEvent]) -> JobEvent | None:
    """Return the newest Warning that the reason of a job's phase names; None if it names none."""
    warnings = [e for e in events if e.type == "Warning" and e.message and e.message in reason]
    return warnings[-1] if warnings else None


_Member = tuple[tuple[Any, ...], str]
"""The name of a node, behind what sorts it."""


def _by_id(name: str) -> _Member:
    return id_key(NodeId(name)), name


def _changed(members: list[_Member], gone: set[str], new: set[str]) -> list[_Member]:
    """Return sorted members without some and with others; the rest is not compared.

    Args:
        members: the members before, sorted.
        gone: names to leave out.
        new: names to add.
    """
    found = members.copy()
    for one in map(_by_id, gone):
        at = bisect_left(found, one)
        if found[at : at + 1] == [one]:
            del found[at]
    for one in map(_by_id, new):
        at = bisect_left(found, one)
        if found[at : at + 1] != [one]:
            found.insert(at, one)
    return found


def _names(text: str | None) -> set[str]:
    """Return the nodes that a part of a message names, such as ``n0, n1 and 4 more``."""
    return {name for name in (text or "").partition(" and ")[0].split(", ") if name}


def _is_cut(text: str | None) -> bool:
    """Return whether a part of a message names only some of the nodes that it is about."""
    return text is not None and text.endswith(" more")


def node_timelines(status: JobStatus, events: Sequence[JobEvent], end: float) -> list[NodeTimeline]:
    """Return a timeline for each node that the events or the status name.

    A node whose start is not known began with the job. A node that has returned since, or is there
    by the status, is not lost; its line covers its absence. A node of which nothing is known but
    that it left has no timeline: it was taken away before it started.

    Args:
        status: status of the job.
        events: oldest first, completed by :func:`with_node_and_round`.
        end: end of the picture, in Unix seconds. Present nodes last until then, or until the job
            ended.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    lost: set[str] = set()
    for event in events:
        for node in _nodes_of(event):
            if node not in first and event.reason == EventReason.NODE_LEFT:
                continue
            first.setdefault(node, event.at)
            if event.reason in (EventReason.NODE_LOST, EventReason.NODE_LEFT):
                last[node] = event.at
                (lost.add if event.reason == EventReason.NODE_LOST else lost.discard)(node)
            elif event.reason in (EventReason.NODE_JOINED, EventReason.NODE_RESTARTED):
                last.pop(node, None)  # where nodes come by themselves, a lost one may return
    for known in status.nodes:
        if known.phase is not NodePhase.GONE or known.incarnation:
            first.setdefault(known.id, status.started_at)
        if known.phase in (NodePhase.LIVE, NodePhase.SUSPECT):
            last.pop(known.id, None)  # the event of many that joined does not name them all
    if status.phase.ended and status.ended_at is not None:
        end = min(end, status.ended_at)
    order = sorted(map(NodeId, first), key=id_key)
    return [
        NodeTimeline(
            n,
            min(first[n], last.get(n, end)),
            max(first[n], last.get(n, end)),
            lost=n in last and n in lost,
        )
        for n in order
    ]


def _nodes_of(event: JobEvent) -> list[str]:
    """Return the nodes that an event is about. One event may name several nodes that joined."""
    if event.reason == EventReason.NODE_JOINED and event.node is None:
        return sorted(_names(event.message.partition(": ")[2]))
    return [event.node] if event.node is not None else []


def events_of(
    node: str, events: Sequence[JobEvent], rounds: Sequence[RoundTimeline]
) -> list[JobEvent]:
    """Return the events about a node, and those of the rounds that it was in, in their order.

    Args:
        node: Id of the node.
        events: All events of the job.
        rounds: The rounds that these tell of.
    """
    own = {one.number for one in rounds if node in one.members}
    return [
        event
        for event in events
        if node in _nodes_of(event)
        or (event.reason == EventReason.ROUND_FORMED and event.round in own)
    ]


def with_node_and_round(events: Sequence[JobEvent]) -> list[JobEvent]:
    """Return the events, completed with node and round from their messages where these have them.

    Of older events Kubernetes keeps only the message. Other events are returned unchanged.
    """
    found = []
    for event in events:
        news: dict[str, str | int] = {}
        node = re.match(
            r"(?:node )?([a-z0-9][-a-z0-9.]*)"
            r"(?: (?:joined|was lost|has left|has a new agent process)\b|: worker )",
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

    Before the history begins, the steps come from the messages of events.

    Args:
        history: samples that were kept; it may be empty.
        status: status of the job.
        events: events of the job, which name some steps.
    """
    found = list(history.samples)
    begins = found[0].at if found else math.inf
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
        elif stored and event.at < begins:  # the step was reached a little earlier
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
