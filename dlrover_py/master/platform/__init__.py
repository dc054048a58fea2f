"""Where nodes run: the :class:`Platform` seam, six calls."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dlrover_py.master.core.events import Event
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus


@dataclass(frozen=True, slots=True)
class Known:
    """What the platform remembers of earlier masters, should their journal be lost: numbers that
    must not be used again."""

    term: int = 0
    round: int = 0
    node: int = -1
    event: int = 0


class Platform(Protocol):
    """Creates and ends nodes, and tells what it sees. Every call is idempotent."""

    can_create: bool
    """Whether it creates nodes; if not, they come by themselves."""
    routed_s: float
    """How long until every node finds the way to a new master."""
    known: Known
    """Once the job was read."""

    async def get_job(self, accepted: ElasticJob | None = None) -> ElasticJob:
        """What the user wants, as it stands.

        Args:
            accepted: the wish that an earlier master followed; gone on with where the present one
                cannot be used.

        Raises:
            TransientError: not now.
        """

    def watch(self) -> AsyncIterator[Sequence[Event]]:
        """Yield the whole state first (ending with ``NodesListed``), then each change.

        Ends, or raises TransientError, when the view was lost: watch again.
        """

    def silent_s(self) -> float:
        """How long the platform has not been heard of, though it is asked all the time; 0 where it
        is of one piece with the master."""
        ...

    async def create_node(self, node: NodeId, avoid: Sequence[str] = ()) -> None:
        """Have the node created, now or when there is room; a node that exists stays as it is.

        Args:
            node: its id.
            avoid: hosts that it is not wished on, where the platform knows of hosts.

        Raises:
            TransientError: not now.
        """

    async def delete_node(self, node: NodeId, grace_s: float) -> None:
        """End the node: a signal first, a kill after the grace; one that is gone stays so.

        Raises:
            TransientError: not now.
        """

    async def publish(self, status: JobStatus) -> None:
        """Let people see the status.

        Raises:
            Superseded: another master has begun a later term.
            TransientError: not now.
        """
