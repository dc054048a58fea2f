"""The watch of the job's Pods: each change is an event for the core."""

import asyncio
import contextlib
import logging
from dataclasses import replace

from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.kubernetes.watch import Changed, Gone, Listed
from dlrover_py.master.core.events import Event, NodeEnded, NodesListed
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.context import JobContext
from dlrover_py.master.platform.kubernetes.ender import PodEnder
from dlrover_py.master.platform.kubernetes.ends import PodEnd
from dlrover_py.master.platform.kubernetes.job_watcher import ElasticJobWatcher
from dlrover_py.master.platform.kubernetes.pod_table import PodTable
from dlrover_py.master.platform.kubernetes.pods import PodView, Problem
from dlrover_py.master.platform.kubernetes.rights import Rights
from dlrover_py.protocol import names
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionType

log = logging.getLogger("master.kubernetes")

LOG_LINES, LOG_S, SLOW_LOG_S = 20, 3.0, 0.3
"""Lines of a log that are read; limit of that call; duration that counts as slow, in seconds."""


class PodWatcher:
    """Turns changes of the job's Pods into events."""

    def __init__(
        self,
        context: JobContext,
        table: PodTable,
        jobs: ElasticJobWatcher,
        rights: Rights,
        ender: PodEnder,
    ) -> None:
        """Start before the watch.

        Args:
            context: The job.
            table: Receives the Pods.
            jobs: Is asked about the ElasticJob after a Pod has gone.
            rights: Receives refusals of the watch.
            ender: Ends Pods whose agent has ended.
        """
        self._context, self._table, self._jobs = context, table, jobs
        self._rights, self._ender = rights, ender
        self._no_logs_until = 0.0

    async def watch(self) -> None:
        """Queue an event for the core for each change of the job's Pods, indefinitely.

        A list of all Pods becomes one batch that ends with ``NodesListed``. A Pod that is gone
        counts as deleted, against no budget. Pods that the ElasticJob does not own are ignored. So
        is the end of a Pod that another Pod of the same name has replaced.
        """
        context = self._context
        changes = context.kube.watch(
            PODS,
            context.namespace,
            labels=names.nodes_of(context.name),
            view=lambda obj: pods.view(obj, self._jobs.topology_labels),
            on_error=lambda error: self._rights.on_error("Pods", error),
        )
        async with contextlib.aclosing(changes):
            async for change in changes:
                match change:
                    case Listed(items):
                        owned = {context.node_of(p): p for p in items if context.owns(p)}
                        for node in self._table.pods.keys() - owned.keys():
                            self._table.forget(node)
                        events = [
                            await self._seen(node, p, listed=True) for node, p in owned.items()
                        ]
                        context.facts.put([*events, NodesListed(frozenset(owned), free=True)])
                    case Changed(seen):
                        if context.owns(seen):
                            context.facts.put([await self._seen(context.node_of(seen), seen)])
                    case Gone(seen):
                        node = context.node_of(seen)
                        known = self._table.pods.get(node, seen)
                        if context.owns(seen) and known.uid == seen.uid:
                            self._jobs.pod_left()
                            self._table.forget(node)
                            context.facts.put([NodeEnded(node, "its Pod was deleted", free=True)])

    async def _seen(self, node: NodeId, seen: PodView, *, listed: bool = False) -> Event:
        """Take in the state of a Pod, and return the event for the core.

        A task starts that deletes the Pod if it does not end with its agent. Other tasks later
        report a Pod that still waits. If the agent or an init container has just failed, and there
        is no termination message, the end of the log is read first. This takes at most 3 s.

        Args:
            node: Id of its node.
            seen: Its state.
            listed: Whether the state is from a list. No log is then read, because a list does not
                wait.
        """
        before = self._table.pods.get(node)
        if not seen.prepared and not seen.ended:
            if before is None or before.prepared or before.uid != seen.uid:
                self._context.tasks.start(self._report_not_starting(node, seen.uid))
            elif before.problem_type == ConditionType.POD_NOT_STARTING:
                seen = replace(seen, problem_type=before.problem_type, message=before.message)
        if any(seen.waits_for) and not seen.problem_type:
            if before is None or (before.uid, before.waits_for) != (seen.uid, seen.waits_for):
                self._context.tasks.start(self._report_long_wait(node, seen.uid, seen.waits_for))
            elif (before.problem_type, before.message) == seen.waits_for:
                seen = replace(seen, problem_type=before.problem_type, message=before.message)
        fresh = self._table.take(node, seen, listed=listed)
        self._ender.ensure_end(node, seen)
        if seen.leaving:
            self._jobs.pod_left()
        output = ""
        end = seen.end
        if (
            fresh and end and end.exit_code and not end.termination_message and not listed
        ):  # a list does not wait
            output = await self._log_tail(seen, end)
        return pods.fact(node, seen, output)

    async def _report_not_starting(self, node: NodeId, uid: str) -> None:
        """Report a Pod that is without volumes or network for 10 s.

        The report says where to look, because only the events of the Pod's kubelet have the reason.
        Nothing is reported if the Pod is prepared, has ended, has another problem, or is gone by
        then.
        """
        await asyncio.sleep(self._context.timing.unprepared_s)
        seen = self._table.pods.get(node)
        if seen is None or seen.uid != uid or seen.prepared or seen.ended or seen.problem_type:
            return
        more = f"see `kubectl describe pod {seen.name}`"
        why = f"its volumes or its network are not ready on {seen.host}; {more}"
        self._report(node, seen, (ConditionType.POD_NOT_STARTING, why))

    async def _report_long_wait(self, node: NodeId, uid: str, what: Problem) -> None:
        """Report a Pod that waits for the same thing for 30 s; for Kubernetes this is not an error.

        Nothing is reported if the Pod waits for something else or is gone by then. If it has
        another problem, the report is tried again every 30 s.

        Args:
            node: Id of the node.
            uid: UID of the Pod.
            what: What the Pod waits for, as its ``waits_for`` says.
        """
        while True:
            await asyncio.sleep(self._context.timing.waiting_s)
            seen = self._table.pods.get(node)
            if seen is None or (seen.uid, seen.waits_for) != (uid, what):
                return
            if not seen.problem_type:
                break
        self._report(node, seen, what)

    def _report(self, node: NodeId, seen: PodView, problem: Problem) -> None:
        """Report a problem of a Pod that its state does not show.

        The problem goes into the table, and an event for the core is queued.
        """
        kind, message = problem
        seen = self._table.pods[node] = replace(seen, problem_type=kind, message=message)
        self._context.facts.put([pods.fact(node, seen)])

    async def _log_tail(self, seen: PodView, end: PodEnd) -> str:
        """Return the last lines of a Pod's log, at most 20 lines and 2,000 characters.

        The events of other Pods wait meanwhile, at most 3 s. After a log that took longer than 0.3
        s, no log is read for ten times that duration.

        Returns:
            "" if the log was not read, or is empty. A failure is only logged.
        """
        now = asyncio.get_running_loop().time
        if now() < self._no_logs_until:
            return ""
        began = now()
        try:
            async with asyncio.timeout(LOG_S):
                text = await self._context.kube.log(
                    seen.name, self._context.namespace, tail=LOG_LINES, container=end.container
                )
        except (KubeError, TimeoutError) as error:
            log.info("log_not_read", extra={"pod": seen.name, "why": str(error)})
            return ""
        finally:
            if (took := now() - began) > SLOW_LOG_S:
                self._no_logs_until = now() + 10 * took
        return text.strip()[-2000:]
