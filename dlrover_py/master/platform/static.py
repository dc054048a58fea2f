"""Nodes that come by themselves: ``elastic-run`` without a platform."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from dlrover_py.master.core.events import Event
from dlrover_py.master.platform import PriorMasterState
from dlrover_py.protocol.errors import InvariantError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus


class StaticPlatform:
    """The platform of agents that are started by hand; only the master watches them."""

    can_create = False
    avoids_hosts = False
    limits_memory = False
    routed_s = 0.0  # a new master has the address of its predecessor
    known = PriorMasterState()

    def __init__(self, job: ElasticJob) -> None:
        self._job = job

    async def get_job(self, accepted: ElasticJob | None = None) -> ElasticJob:  # noqa: D102
        return self._job

    async def watch(self) -> AsyncIterator[Sequence[Event]]:  # noqa: D102
        yield []
        await asyncio.Event().wait()

    def silent_s(self) -> float:
        """Return 0, because there is no platform that could fall silent."""
        return 0.0

    async def create_node(
        self,
        node: NodeId,
        avoid: Sequence[str] = (),
        memory: int = 0,
        stable: bool = False,
        cpu: int = 0,
    ) -> None:
        """Refuse to create a node, because nodes are started by hand.

        Args:
            node: Id of the node.
            avoid: Not used.
            memory: Not used.
            stable: Not used.
            cpu: Not used.

        Raises:
            InvariantError: In every case. The master must not call this, as `can_create` is false.
        """
        raise InvariantError(f"cannot create node {node}: nodes start by themselves here")

    async def delete_node(self, node: NodeId, grace_s: float) -> None:
        """Refuse to delete a node, because nodes are started by hand.

        Raises:
            InvariantError: In every case. The master must not call this, as `can_create` is false.
        """
        raise InvariantError(f"cannot delete node {node}: nodes start by themselves here")

    async def publish(self, status: JobStatus) -> None:
        """Do nothing, because people read the status at ``/v1/job``."""
