"""The creation of Pods, which is tried until each node has one."""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Sequence

from dlrover_py.kubernetes.errors import (
    AlreadyExistsError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.master.core.events import NodeEnded, NodeSeen
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.context import JobContext, PodProblem, transient
from dlrover_py.master.platform.kubernetes.ender import get_pod
from dlrover_py.master.platform.kubernetes.job_watcher import ElasticJobWatcher
from dlrover_py.master.platform.kubernetes.pod_calls import BACKOFF, PodCalls
from dlrover_py.master.platform.kubernetes.pod_table import ENDED_KEPT, PodTable
from dlrover_py.master.platform.kubernetes.rights import Rights
from dlrover_py.master.platform.kubernetes.template_trial import TemplateTrial, problem_of
from dlrover_py.protocol.autoscale import PodPlace
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId, is_server
from dlrover_py.protocol.reasons import ConditionType

log = logging.getLogger("master.kubernetes")

ASKING_AGAIN = 8
"""Limit of refused Pods that are tried again at the same time. They all lack the same thing."""
RESERVED_S = 30.0
"""Seconds for which a place is kept for a Pod that was requested and is not seen."""
CREATION = "creation of Pods"


class PodCreator:
    """Creates Pods, and keeps the number of ended ones within its limit."""

    def __init__(
        self,
        context: JobContext,
        table: PodTable,
        jobs: ElasticJobWatcher,
        trial: TemplateTrial,
        rights: Rights,
        calls: PodCalls,
    ) -> None:
        """Start without Pods to create.

        Args:
            context: The job.
            table: The Pods of the job; it receives refusals.
            jobs: Has the template.
            trial: Learns which templates work.
            rights: Receives refusals that are about permissions.
            calls: Limits the number of calls.
        """
        self._context, self._table, self._jobs = context, table, jobs
        self._trial, self._rights, self._calls = trial, rights, calls
        self._again = asyncio.Semaphore(ASKING_AGAIN)
        self._refused = 0
        """Number of refused Pods in a row."""
        self._made = asyncio.Event()
        """Set, and then replaced, when a Pod was created."""
        self._posts: dict[NodeId, asyncio.Task[PodProblem | None]] = {}
        """The running request to create a node's Pod."""
        self._deleting_old = False
        self._places: dict[NodeId, tuple[str, float]] = {}
        """Places of Pods that were requested and not seen yet, and until when they are kept.

        A Pod may be deleted before it is ever seen.
        """

    async def create_node(
        self, node: NodeId, avoid: Sequence[str], memory: int, stable: bool, cpu: int
    ) -> None:
        """Try to create the Pod until it exists or the task is canceled.

        Conditions of the job and the node's state show why the Pod does not exist. A refused Pod is
        tried again after at most 15 s, or when any Pod of the job was created. Only eight refused
        Pods are tried at a time; the others wait for their turn. An existing Pod of the job also
        counts if it has ended; the core then gets an event.

        Args:
            node: Id of the node.
            avoid: Hosts that the Pod must not be placed on.
            memory: Memory limit of the main container in bytes; 0 for that of the template.
            stable: Whether the Pod must not be placed on a spot host.
            cpu: CPU request of the main container in thousandths; 0 for that of the template.

        Raises:
            TransientError: An attempt failed without a refusal of the Pod. The caller calls again.
        """
        refusals = self._table.refusals
        job = self._jobs.job  # while a Pod is refused, its template may change
        given = pods.Given(memory, cpu, job.worker.template_hash if job is not None else "")
        try:
            problem = await self._create(node, avoid, given, stable)
            while problem is not None:
                if problem != refusals.get(node):
                    log.warning(problem.type, extra={"node": node, "why": problem.message})
                    refusals[node] = problem
                    refused = NodeSeen(node, False, message=problem.message, exists=False)
                    self._context.facts.put([refused])
                async with self._again:
                    await self._wait_for_room()
                    problem = await self._create(node, avoid, given, stable)
                    self._refused += problem is not None
            self._refused = 0
            self._made.set()
            self._made = asyncio.Event()
        finally:
            refusals.pop(node, None)

    async def settle(self, node: NodeId) -> None:
        """Wait until no request to create the node's Pod is under way, and drop its last refusal.

        The request is not canceled, and its failure is ignored. A Pod may therefore exist
        afterwards. The caller must have canceled :meth:`create_node` before, which would otherwise
        send another request.
        """
        self._table.refusals.pop(node, None)
        self._places.pop(node, None)
        if (post := self._posts.get(node)) is not None:
            await asyncio.wait([post])

    async def _wait_for_room(self) -> None:
        """Wait before the next attempt: for at most 15 s, or until any Pod was created.

        The wait grows with the number of refusals in a row, over all nodes.
        """
        wait_s = BACKOFF.delay_s(self._refused // ASKING_AGAIN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._made.wait()

    async def _create(
        self, node: NodeId, avoid: Sequence[str], given: pods.Given, stable: bool
    ) -> PodProblem | None:
        """Make one attempt; return the problem if the Pod is refused, otherwise None.

        If a request for the node is under way, its result is awaited instead. A request continues
        when this task is canceled, because a deletion must know its outcome.

        Raises:
            TransientError: The attempt failed without a refusal of the Pod.
        """
        post = self._posts.get(node)
        if post is None:
            post = self._posts[node] = asyncio.create_task(self._post(node, avoid, given, stable))
            post.add_done_callback(functools.partial(self._posted, node))
        return await asyncio.shield(post)

    def _posted(self, node: NodeId, post: asyncio.Task[PodProblem | None]) -> None:
        """Forget a request that has ended. Retrieve its error: its caller may be canceled."""
        del self._posts[node]
        if not post.cancelled():
            post.exception()

    async def _post(
        self, node: NodeId, avoid: Sequence[str], given: pods.Given, stable: bool
    ) -> PodProblem | None:
        """Send one request to create the node's Pod; return why it was refused, otherwise None.

        No Pod is requested if the ElasticJob was deleted, or if the template cannot be used; that
        is returned as a problem. A Pod of this job that exists already counts as created. When more
        than 32 ended Pods exist after a creation, the oldest are deleted in the background.

        Raises:
            TransientError: The API server does not answer, or a permission is missing that may come
                back soon.
        """
        context, jobs = self._context, self._jobs
        async with self._calls.turn():
            if not jobs.exists and not jobs.orphaned:
                # Pods are deleted with their job, so the ElasticJob itself may be about to go.
                await jobs.check_job_exists()
            if jobs.orphaned or jobs.job is None:
                message = "its ElasticJob was deleted: no more Pods are created"
                return PodProblem(ConditionType.JOB_GONE, message)
            job = jobs.job
            try:
                place = None if is_server(node) else self._place(job, node)
                pod = pods.pod(job, node, context.pod_context, avoid, place, given, stable)
                with transient(
                    ConfigError, AlreadyExistsError, InvalidError, ForbiddenError, NotFoundError
                ):
                    made = await context.kube.create(PODS, pod, strict=True)
            except AlreadyExistsError:
                return await self._check_existing_pod(node)
            except (ConfigError, InvalidError, ForbiddenError) as error:
                problem = problem_of(job, error, node)
                if problem.type != ConditionType.PERMISSION_DENIED:
                    self._rights.note_not_denied(CREATION)
                elif self._rights.may_be_temporary(CREATION):
                    raise TransientError(str(error)) from error
                return problem
            except NotFoundError as error:  # the namespace
                return PodProblem(ConditionType.PODS_FORBIDDEN, str(error))
        self._rights.note_not_denied(CREATION)
        self._trial.passed(job, node)
        log.info("pod_created", extra={"node": node, "pod": made["metadata"]["name"]})
        if not self._deleting_old and sum(p.done for p in self._table.pods.values()) > ENDED_KEPT:
            self._deleting_old = True
            context.tasks.start(self._keep_newest())
        return None

    def _place(self, job: ElasticJob, node: NodeId) -> PodPlace | None:
        """Choose the kind of hosts for a node's Pod, and reserve a place; None if all will do."""
        placements = job.allocation.placements if job.allocation is not None else ()
        seen = self._table.pods
        now = time.monotonic()
        self._places = {
            n: (place, until)
            for n, (place, until) in self._places.items()
            if n not in seen and n != node and now < until
        }
        taken = Counter(pod.placement for pod in seen.values() if not pod.done)
        reserved = Counter(place for place, _ in self._places.values())
        chosen = pods.place_for(placements, taken + reserved)
        if chosen is not None:
            self._places[node] = chosen.name, now + RESERVED_S
        return chosen

    async def _check_existing_pod(self, node: NodeId) -> PodProblem | None:
        """Find out whether an existing Pod of this name belongs to the job; return None if it does.

        If that Pod has ended or has to end, the core gets the event that the node has ended. A Pod
        of another owner is a problem. A Pod that has disappeared in the meantime is reported as a
        problem, so that the caller tries again.

        Raises:
            TransientError: The API server does not answer, or refuses.
        """
        name = self._context.pod_of(node)
        with transient():  # a right to read Pods that is missing may come back
            found = await get_pod(self._context, name)
        if found is None:
            message = f"Pod {name} existed a moment ago; its creation is tried again"
            return PodProblem(ConditionType.NAME_CONFLICT, message)
        if not self._context.owns(found):
            return PodProblem(
                ConditionType.NAME_CONFLICT,
                f"Pod {name} exists and does not belong to this job (its owner is "
                f"{found.owner or 'none'}); delete it, or give the job another name",
            )
        if found.ended or found.leaving:  # from a time that no journal knows
            self._context.facts.put([NodeEnded(node, found.ended or found.leaving, free=True)])
        return None

    async def _keep_newest(self) -> None:
        """Delete the oldest ended Pods, so that the newest 32 of them stay.

        The caller starts this in the background after the creation of a Pod. A refused deletion
        ends it, and a later creation starts it again. Pods that exist at the end of the job stay.
        """
        try:
            ended = [p for p in self._table.pods.values() if p.done]
            ended.sort(key=lambda p: p.created_at)
            for old in ended[:-ENDED_KEPT]:
                await self._context.delete_pod(old)
        finally:
            self._deleting_old = False
