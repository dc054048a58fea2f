"""The job's Pods as they were last seen, and why others do not exist."""

import asyncio
import math
from collections.abc import Callable

from dlrover_py.master.platform.kubernetes.context import JobContext, PodProblem
from dlrover_py.master.platform.kubernetes.pods import PodView
from dlrover_py.protocol.names import NodeId

ENDED_KEPT = 32
"""Number of ended Pods, the newest, that are kept for their logs."""


class PodTable:
    """The Pods of the job. A task can wait until they are in some state."""

    def __init__(self, context: JobContext) -> None:
        """Start without Pods.

        Args:
            context: The job.
        """
        self._facts, self._overdue_s = context.facts, context.timing.overdue_s
        self.pods: dict[NodeId, PodView] = {}
        self.refusals: dict[NodeId, PodProblem] = {}
        """Why the Pod of a node could not be created."""
        self.refused_by_hosts: list[str] = []
        """Pods that their hosts have refused since a Pod last began to run, in words."""
        self._due: dict[str, float] = {}
        """When a deleted Pod should be gone, by UID of the Pod."""
        self._pods_changed = asyncio.Event()
        """Set, and then replaced, when a Pod has changed."""

    def take(self, node: NodeId, seen: PodView, *, listed: bool) -> bool:
        """Take in the state of a Pod; return whether its end is new.

        Tasks in :meth:`wait_until` check their state again. The refusal of the node is dropped. The
        list of refusals by hosts is emptied when a Pod begins to run.

        Args:
            node: Id of its node.
            seen: Its state.
            listed: Whether the state is from a list. An end in a list may be old, and is not added
                to the refusals by hosts.
        """
        before = self.pods.get(node)
        self.pods[node] = seen
        self._expect_end(seen)
        self.refusals.pop(node, None)
        self._wake()
        fresh = bool(seen.ended) and not (before and before.ended)
        if seen.runs and not (before and before.runs):
            self.refused_by_hosts.clear()
        elif fresh and seen.refused_by and not listed:
            self.refused_by_hosts.insert(0, f"{node} on {seen.refused_by}: {seen.ended}")
            del self.refused_by_hosts[ENDED_KEPT:]
        return fresh

    def forget(self, node: NodeId) -> None:
        """Drop a Pod that is gone, and wake the tasks in :meth:`wait_until`. No request is made."""
        if (seen := self.pods.pop(node, None)) is not None:
            self._due.pop(seen.uid, None)
        self._wake()

    def _expect_end(self, seen: PodView) -> None:
        """Note when a deleted Pod should be gone: ``overdue_s`` seconds after its grace.

        At that time the master publishes its status again. Nothing happens if the Pod was not
        deleted, has ended completely, or has a time already.
        """
        if seen.deleted and not seen.done and seen.uid not in self._due:
            loop = asyncio.get_running_loop()
            self._due[seen.uid] = due = loop.time() + seen.grace_s + self._overdue_s
            loop.call_at(due, self._facts.conditions_changed)

    def _wake(self) -> None:
        """Wake all tasks that wait for a change of the Pods."""
        self._pods_changed.set()
        self._pods_changed = asyncio.Event()

    async def wait_until(self, true: Callable[[], bool], within_s: float) -> bool:
        """Wait for a state of the Pods; return False if it does not come in time.

        The state is checked immediately, and after each change of a Pod.

        Args:
            true: Returns whether the state is there.
            within_s: Longest wait in seconds; infinite for no limit.
        """
        try:
            async with asyncio.timeout(within_s if within_s < math.inf else None):
                while not true():
                    await self._pods_changed.wait()
        except TimeoutError:
            return False
        return True

    def overdue(self) -> list[str]:
        """Describe the Pods that were deleted and are not gone in time.

        The time is ``overdue_s`` seconds after their grace. A Pod whose phase is Succeeded or
        Failed is left out.
        """
        now = asyncio.get_running_loop().time()
        return [
            f"{node}: Pod {seen.name} was deleted and still holds resources on "
            f"{seen.host or 'no host'}. If that host is lost for good, delete its Node, or taint "
            "it with node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
            for node, seen in sorted(self.pods.items())
            if not seen.done and now >= self._due.get(seen.uid, math.inf)
        ]
