"""Nodes that come by themselves: ``elastic-run`` without a platform."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from dlrover_py.master.core.events import Event
from dlrover_py.master.platform import Known
from dlrover_py.protocol.errors import Bug
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus


class StaticPlatform:
    """No platform at all: agents are started by hand, nobody watches them but the master."""

    can_create = False
    routed_s = 0.0  # it is where its predecessor was
    known = Known()

    def __init__(self, job: ElasticJob) -> None:
        self._job = job

    async def get_job(self, accepted: ElasticJob | None = None) -> ElasticJob:  # noqa: D102
        return self._job

    async def watch(self) -> AsyncIterator[Sequence[Event]]:  # noqa: D102
        yield []
        await asyncio.Event().wait()

    def silent_s(self) -> float:
        """There is nobody to hear."""
        return 0.0

    async def create_node(self, node: NodeId, avoid: Sequence[str] = ()) -> None:  # noqa: D102
        raise Bug(f"asked to create {node} where nodes come by themselves")

    async def delete_node(self, node: NodeId, grace_s: float) -> None:  # noqa: D102
        raise Bug(f"asked to delete {node} where nodes come by themselves")

    async def publish(self, status: JobStatus) -> None:
        """Nobody looks: ``/v1/job`` tells."""
