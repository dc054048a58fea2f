"""Nodes on this machine, through the socket of :mod:`dlrover_py.localcluster.cluster`."""

from collections.abc import AsyncIterator, Sequence

from dlrover_py.master.core.events import (
    Event,
    JobChanged,
    JobStopped,
    NodeEnded,
    NodeSeen,
    NodesListed,
    RoomSeen,
)
from dlrover_py.master.platform import PriorMasterState
from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol.errors import InvariantError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import Snapshot, WatchEvent
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus

CALL_S = 10.0
"""Limit of one call to the cluster process, in seconds."""


class LocalPlatform:
    """The platform of a job that was started with ``dlrover job run``."""

    can_create = True
    avoids_hosts = False
    limits_memory = False
    routed_s = 0.0
    known = PriorMasterState()

    def __init__(self, socket_path: str) -> None:
        self._client = HttpClient(f"unix:{socket_path}")

    async def get_job(self, accepted: ElasticJob | None = None) -> ElasticJob:  # noqa: D102
        body = await self._client.call("GET", "/v1/job", deadline_s=CALL_S)
        return Snapshot.model_validate_json(body).job

    async def watch(self) -> AsyncIterator[Sequence[Event]]:
        """Yield the complete state in one list, then each change in a list of its own.

        The iteration ends when the cluster process closes the connection. Before the first list is
        complete, nothing is yielded.

        Raises:
            UnreachableError: The connection could not be opened, or broke.
            InvariantError: A line of kind ``job`` has no job.
            ValidationError: A line of the watch is no event that this master knows.
        """
        first: list[Event] | None = []
        async for line in self._client.lines("/v1/watch"):
            seen = WatchEvent.model_validate_json(line)
            event = _event(seen)
            if first is None:
                yield [event]
                continue
            first.append(event)
            if seen.kind == "listed":
                yield first
                first = None

    def silent_s(self) -> float:
        """Return 0, because the platform runs on the master's machine."""
        return 0.0

    async def create_node(
        self,
        node: NodeId,
        avoid: Sequence[str] = (),
        memory: int = 0,
        stable: bool = False,
        cpu: int = 0,
    ) -> None:
        """Have the node created, now or when there is room; an existing node stays as it is.

        Args:
            node: Id of the node.
            avoid: Not used: the hosts are simulated.
            memory: Not used: processes have no memory limit.
            stable: Not used.
            cpu: Not used: processes have no CPU request.

        Raises:
            TransientError: The cluster process cannot be reached, or refuses now.
        """
        await self._client.call("PUT", f"/v1/nodes/{node}", deadline_s=CALL_S)

    async def delete_node(self, node: NodeId, grace_s: float) -> None:  # noqa: D102
        path = f"/v1/nodes/{node}?grace_s={grace_s}"
        await self._client.call("DELETE", path, deadline_s=CALL_S)

    async def publish(self, status: JobStatus) -> None:  # noqa: D102
        body = status.model_dump_json().encode()
        await self._client.call("PUT", "/v1/status", body, deadline_s=CALL_S)


def _event(seen: WatchEvent) -> Event:
    """Return a line of the watch as an event of the core.

    Raises:
        InvariantError: A line of kind ``job`` has no job.
    """
    node = NodeId(seen.node)
    match seen.kind:
        case "job" if seen.job is not None:
            return JobChanged(seen.job)
        case "node":
            return NodeSeen(node, seen.near, (seen.host,), seen.message, seen.leaving)
        case "ended":
            return NodeEnded(node, seen.why, seen.exit_code, seen.free, output=seen.output)
        case "stopped":
            return JobStopped()
        case "room":
            return RoomSeen(seen.hosts)
        case "listed":
            return NodesListed(frozenset(NodeId(n) for n in seen.nodes))
    raise InvariantError(f"a watch line of kind {seen.kind} has no content")
