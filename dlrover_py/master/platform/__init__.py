"""The interface to the environment in which nodes run: the :class:`Platform` protocol."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dlrover_py.master.core.events import Event
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus


@dataclass(frozen=True, slots=True)
class PriorMasterState:
    """Numbers of earlier masters that must not be used again, in case their journal is lost."""

    term: int = 0
    round: int = 0
    node: int = -1
    """The highest number of a node."""
    event: int = 0
    """The highest id of an event."""
    server: int = -1
    """The highest number of a server."""


class Platform(Protocol):
    """An environment that creates and ends nodes, and reports their state.

    Every call is idempotent.
    """

    can_create: bool
    """Whether it creates nodes; if not, nodes come by themselves."""
    avoids_hosts: bool
    """Whether it can keep a new node off given hosts."""
    limits_memory: bool
    """Whether it gives a new node the memory limit that it is asked for."""
    routed_s: float
    """Seconds until every node can reach a new master."""
    known: PriorMasterState
    """Numbers used by earlier masters; valid once the job was read."""

    async def get_job(self, accepted: ElasticJob | None = None) -> ElasticJob:
        """Return the current desired state of the job, as the user wrote it.

        Args:
            accepted: The spec that an earlier master used. It is returned if the current spec
                cannot be used.

        Raises:
            TransientError: The job cannot be read now, or cannot be used and none was accepted
                before.
        """

    def watch(self) -> AsyncIterator[Sequence[Event]]:
        """Yield the complete state first (ending with ``NodesListed``), then each change.

        An empty list means that a condition may have changed, and nothing else. When the view is
        lost, the iteration ends or raises. The caller then calls ``watch`` again.

        Raises:
            TransientError: The view of the nodes was lost.
        """

    def silent_s(self) -> float:
        """Return the seconds since the last contact with the platform.

        The call makes no request. The platform queries the environment by itself while it is
        watched.

        Returns:
            0 if the platform cannot fail separately from the master.
        """
        ...

    async def create_node(
        self,
        node: NodeId,
        avoid: Sequence[str] = (),
        memory: int = 0,
        stable: bool = False,
        cpu: int = 0,
    ) -> None:
        """Have the node created, now or when there is room; an existing node stays as it is.

        A platform may try until the node exists, or until the caller cancels the call. The return
        does not mean that the node runs: :meth:`watch` reports this.

        Args:
            node: Id of the node.
            avoid: Hosts that the node must not be placed on. A platform without ``avoids_hosts``
                ignores them.
            memory: Memory limit in bytes; 0 for that of the template. A platform without
                ``limits_memory`` ignores it.
            stable: Whether the node must not be placed on a spot host. A platform without
                ``avoids_hosts`` ignores it.
            cpu: CPU request in thousandths; 0 for that of the template. A platform without
                ``limits_memory`` ignores it.

        Raises:
            TransientError: The platform cannot be reached, or refuses now. The caller calls again.
        """

    async def delete_node(self, node: NodeId, grace_s: float) -> None:
        """Have the node ended within the grace. A node that is gone is no error.

        The return does not mean that the node has ended: :meth:`watch` reports this. On Kubernetes
        the platform sends no signal before the kill; the master orders the agent to stop.

        Args:
            node: Id of the node.
            grace_s: Seconds that the node has to end before it is killed.

        Raises:
            TransientError: The platform cannot be reached, or refuses now. The caller calls again.
        """

    async def publish(self, status: JobStatus) -> None:
        """Show the status to people.

        A platform may leave out a status that differs only in progress from the last one. It writes
        nothing if people read the status elsewhere.

        Raises:
            SupersededError: Another master has begun a later term.
            TransientError: The platform cannot be reached, or refuses now.
        """
