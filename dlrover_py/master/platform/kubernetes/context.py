"""What the parts of the platform share: the job, its queue of facts, background tasks, errors."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.master.core.events import Event
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.pods import PodContext, PodView
from dlrover_py.master.platform.kubernetes.timing import PlatformTiming
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionType

log = logging.getLogger("master.kubernetes")


@dataclass(frozen=True, slots=True)
class PodProblem:
    """The reason why a Pod does not exist, as a condition of the job."""

    type: ConditionType
    message: str


class FactQueue:
    """Events for the core. An empty list means that a condition may have changed."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Sequence[Event]] = asyncio.Queue()

    def put(self, events: Sequence[Event]) -> None:
        """Queue events that belong together. The platform's ``watch`` passes them to the core."""
        self._queue.put_nowait(events)

    def conditions_changed(self) -> None:
        """Queue an empty list, so that the master publishes its status again."""
        self._queue.put_nowait([])

    def clear(self) -> None:
        """Drop all events, because the watch begins again.

        A task that already waits in :meth:`get` never gets an event any more.
        """
        self._queue = asyncio.Queue()

    async def get(self) -> Sequence[Event]:
        """Wait for the next events."""
        return await self._queue.get()


class BackgroundTasks:
    """Tasks that may fail without harm."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task and return immediately.

        A refusal of the API server (``KubeError``) ends the task with a warning in the log; the
        task is not repeated.
        """

        async def run() -> None:
            try:
                await work
            except KubeError as error:
                log.warning("background_task_failed", extra={"why": str(error)})

        task = asyncio.create_task(run())
        self.running.add(task)
        task.add_done_callback(self.running.discard)


@dataclass(frozen=True, slots=True)
class JobContext:
    """The job of this master, and what all parts of the platform use."""

    kube: KubeClient
    """Client of the API server."""
    namespace: str
    """Namespace of the ElasticJob."""
    name: str
    """Name of the ElasticJob."""
    pod_context: PodContext
    """Values that all Pods of the job share."""
    timing: PlatformTiming
    """The times of the platform."""
    facts: FactQueue = field(default_factory=FactQueue)
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    def owns(self, seen: PodView) -> bool:
        """Return whether the Pod belongs to this ElasticJob."""
        return seen.owner == self.pod_context.uid

    def node_of(self, seen: PodView) -> NodeId:
        """Return the id of the node that the Pod belongs to."""
        return pods.node_of(self.name, seen.name)

    def pod_of(self, node: NodeId) -> str:
        """Return the name of the node's Pod."""
        return names.pod_of(self.name, node)

    async def delete_pod(self, seen: PodView, grace_s: int | None = None) -> None:
        """Delete a Pod. Nothing happens if it is gone, or if another Pod has its name now.

        The return does not mean that the Pod is gone: its containers get their grace.

        Args:
            seen: The Pod.
            grace_s: Seconds that its containers get; None for the Pod's own period.

        Raises:
            KubeError: The API server refuses the deletion, or does not answer.
        """
        await self.kube.delete(PODS, seen.name, self.namespace, uid=seen.uid, grace_s=grace_s)


@contextlib.contextmanager
def transient(*known: type[Exception]) -> Iterator[None]:
    """Turn errors of the API server into TransientError, because each of them may pass.

    No such error ends the master. Errors of the types ``known``, and errors that are no
    ``KubeError``, are left to the caller.

    Raises:
        TransientError: The API server has refused a call, or does not answer.
    """
    try:
        yield
    except KubeError as error:
        if isinstance(error, (TransientError, *known)):
            raise
        raise TransientError(str(error)) from error
