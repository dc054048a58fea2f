"""The end of Pods: those of nodes that must go, and those whose agent has ended."""

import asyncio
import contextlib

from dlrover_py.kubernetes.errors import ForbiddenError, NotFoundError
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.master.core.events import NodeEnded
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.context import JobContext, transient
from dlrover_py.master.platform.kubernetes.job_watcher import ElasticJobWatcher
from dlrover_py.master.platform.kubernetes.pod_calls import PodCalls
from dlrover_py.master.platform.kubernetes.pod_table import PodTable
from dlrover_py.master.platform.kubernetes.pods import PodView
from dlrover_py.master.platform.kubernetes.rights import Rights, deletion_of
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.names import NodeId, is_server

SIDECARS_S = 30
"""Largest grace of other containers after the agent has ended, in seconds."""
KILL_S = 1
"""Grace of a Pod that has to end immediately, in seconds. With 0 the API server would forget the
Pod before its kubelet has ended it."""


class PodEnder:
    """Deletes Pods, so that they hold no resources after their agent has ended."""

    def __init__(
        self,
        context: JobContext,
        table: PodTable,
        jobs: ElasticJobWatcher,
        rights: Rights,
        calls: PodCalls,
    ) -> None:
        """Start without Pods to end.

        Args:
            context: The job.
            table: The Pods of the job.
            jobs: Knows whether the Pods are to stay without their ElasticJob.
            rights: Receives refusals.
            calls: Limits the number of calls.
        """
        self._context, self._table, self._jobs = context, table, jobs
        self._rights, self._calls = rights, calls
        self._vacating = False
        """Whether Pods in the wrong places are being deleted."""
        self._endings: dict[str, asyncio.Task[None]] = {}
        """Tasks that end a Pod whose agent has ended, by UID of the Pod."""

    def ensure_end(self, node: NodeId, seen: PodView) -> None:
        """Start a task that deletes a Pod whose agent has ended, if the Pod does not end by itself.

        Nothing happens if the agent runs, if the Pod has ended completely or was deleted, or if
        such a task runs already.
        """
        if seen.ended and not (seen.done or seen.deleted) and seen.uid not in self._endings:
            task = asyncio.create_task(self._end(node, seen.uid))
            self._endings[seen.uid] = task
            task.add_done_callback(lambda _: self._endings.pop(seen.uid))

    async def _end(self, node: NodeId, uid: str) -> None:
        """Delete a Pod that does not end with its agent; repeat this until the Pod ends.

        Before each deletion is a wait of 2 s if other containers still run, otherwise of 2 s and
        the Pod's own grace. The other containers then get at most 30 s. A failed deletion is tried
        again, and a missing permission is reported as a condition. Nothing is deleted if the
        ElasticJob was deleted without its Pods.
        """

        def left() -> PodView | None:
            seen = self._table.pods.get(node)
            gone = seen is None or seen.uid != uid or seen.done or seen.deleted
            return None if gone or self._jobs.orphaned else seen

        right = deletion_of(self._context.pod_of(node))
        linger_s = self._context.timing.linger_s
        while (seen := left()) is not None:
            await asyncio.sleep(
                linger_s if seen.sidecars_run else linger_s + seen.termination_grace_s
            )
            after = left()
            if after is None or after.sidecars_run != seen.sidecars_run:
                continue
            grace_s = round(max(KILL_S, min(seen.termination_grace_s, SIDECARS_S)))
            with contextlib.suppress(TransientError):
                async with self._calls.turn():
                    with self._rights.reporting(right), transient(ForbiddenError):
                        await self._context.delete_pod(seen, grace_s)
        self._rights.note_granted(right)

    async def vacate(self) -> None:
        """Delete the Pods whose places have fewer nodes now, until none is left to delete.

        The Pods have their own grace. To the core, this is a node that leaves with notice. A
        refused deletion is tried again. Nothing is done while the job is suspended or held back:
        then all its nodes end.
        """

        if self._vacating:
            return
        self._vacating = True
        try:
            await self._vacate()
        finally:
            self._vacating = False

    async def _vacate(self) -> None:
        def due() -> list[PodView]:
            job = self._jobs.job
            if job is None or job.allocation is None or job.rests or self._jobs.orphaned:
                return []
            return pods.misplaced(job.allocation.placements, self._table.pods.values())

        tried = set[str]()
        while found := due():
            for seen in found:
                tried.add(right := deletion_of(seen.name))
                with contextlib.suppress(TransientError):
                    async with self._calls.turn():
                        with self._rights.reporting(right), transient(ForbiddenError):
                            await self._context.delete_pod(seen)
            await self._table.wait_until(lambda: not due(), self._context.timing.linger_s)
        for right in tried:
            self._rights.note_granted(right)

    async def delete_node(self, node: NodeId, grace_s: float) -> None:
        """Wait until the Pod of a node ends by itself, and delete the Pod if it does not.

        It is called after the agent was ordered to stop, and sends no signal during the wait. A Pod
        that ends by itself is kept, so that its log can be read; :meth:`ensure_end` ends its other
        containers. A Pod that no host runs is deleted at once. So is that of a parameter server,
        whose process gets the grace after the deletion. Nothing is deleted if the user has deleted
        the ElasticJob and kept its Pods. If the node has no Pod, the core is told that it ended.

        Args:
            node: Id of the node.
            grace_s: Seconds that the agent has to end. 0 if the agent is lost: after a short wait
                for news of its end, its Pod is deleted, also one that is being deleted already.

        Raises:
            TransientError: The API server does not answer, or refuses. The caller calls again.
        """
        name = self._context.pod_of(node)
        right = deletion_of(name)
        last_s = KILL_S
        if is_server(node):
            last_s = max(KILL_S, round(grace_s))
        elif await self._ends_by_itself(node, grace_s or self._context.timing.linger_s):
            self._rights.note_granted(right)
            return
        async with self._calls.turn():
            with self._rights.reporting(right):
                found = await get_pod(self._context, name)
                if found is None or not self._context.owns(found):
                    self._context.facts.put([NodeEnded(node, "it has no Pod", free=True)])
                elif not (found.ended or self._jobs.orphaned or (found.leaving and grace_s > 0)):
                    with transient(ForbiddenError):
                        await self._context.delete_pod(found, last_s)

    async def _ends_by_itself(self, node: NodeId, grace_s: float) -> bool:
        """Wait at most ``grace_s`` seconds for the end of a Pod whose agent was ordered to stop.

        Returns:
            Whether the Pod has ended. False without a wait if it is not in the table or has no
            host.
        """

        def decided() -> bool:
            seen = self._table.pods.get(node)
            return seen is None or bool(seen.ended) or not seen.host  # no agent could get the order

        await self._table.wait_until(decided, grace_s)
        seen = self._table.pods.get(node)
        return seen is not None and bool(seen.ended)


async def get_pod(context: JobContext, name: str) -> PodView | None:
    """Return a Pod by its name, or None if there is none. It may belong to another job.

    Raises:
        TransientError: The API server does not answer, or refuses for another reason than a missing
            permission. A missing permission raises ``ForbiddenError``.
    """
    with transient(NotFoundError, ForbiddenError):
        try:
            return pods.view(await context.kube.get(PODS, name, context.namespace))
        except NotFoundError:
            return None
