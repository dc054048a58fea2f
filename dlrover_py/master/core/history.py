"""The events of a job, as people read them; each has its cause, and the time since the first."""

from collections.abc import Iterable
from dataclasses import dataclass

from dlrover_py.master.core.state import DurableState, TransientState
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobEvent

EVENTS_KEPT = 200
"""Number of events in the status and in the journal."""
NAMED = 16
"""Largest number of nodes that a sentence names; further nodes are only counted."""


class EventLog:
    """The newest events of a job, and the chains of their causes."""

    def __init__(self, state: DurableState, live: TransientState) -> None:
        self.state, self.live = state, live
        del state.events[:-EVENTS_KEPT]
        self._begun: dict[int, float] = {}
        """Monotonic time of the first cause of each event, by event id."""

    def record(
        self,
        reason: EventReason,
        message: str,
        *,
        node: str | None = None,
        cause: int | None = None,
        since: float | None = None,
        warning: bool = False,
    ) -> int:
        """Add an event to the state and return its id; the oldest events are dropped.

        The event is published and logged after the step. Nothing is sent here, and the journal gets
        the event with the next change of other fields. A master that ends before loses it.

        Args:
            reason: Reason of the event.
            message: The event in a sentence.
            node: Id of the node that the event is about.
            cause: Id of the event that led to it.
            since: Monotonic time of the first cause; None if the cause has it.
            warning: Whether the event is a warning.
        """
        state, now = self.state, self.live.now
        event_id = state.next_event
        state.next_event += 1
        root = since if since is not None else self._begun.get(cause or 0)
        self._begun[event_id] = now if root is None else root
        if len(self._begun) > 4 * EVENTS_KEPT:
            for key in sorted(self._begun)[:EVENTS_KEPT]:
                del self._begun[key]
        state.events.append(
            JobEvent(
                id=event_id,
                at=self.live.wall,
                type="Warning" if warning else "Normal",
                reason=reason,
                message=message,
                node=node,
                round=state.round or None,
                cause=cause,
                took_s=None if root is None else now - root,
            )
        )
        del state.events[:-EVENTS_KEPT]
        return event_id

    def begin(self, event: int, since: float) -> None:
        """Set when the first cause of an event began; does nothing if that is known already.

        Args:
            event: Id of the event.
            since: Monotonic time.
        """
        self._begun.setdefault(event, since)

    def begin_again(self, event: int, since: float) -> None:
        """Forget all chains of causes but that of one event, which has led to a new round.

        Args:
            event: Id of the event.
            since: Monotonic time of its first cause.
        """
        self._begun = {event: since}


@dataclass(frozen=True, slots=True)
class CoreContext:
    """What every component of a job works on."""

    state: DurableState
    live: TransientState
    log: EventLog


def named(nodes: Iterable[NodeId]) -> str:
    """Return the names of nodes for a sentence: at most 16, then the number of the others."""
    ordered = sorted(nodes, key=id_key)
    more = len(ordered) - NAMED
    return ", ".join(ordered[:NAMED]) + (f" and {more} more" if more > 0 else "")
