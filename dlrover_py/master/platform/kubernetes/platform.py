"""The platform of a job on Kubernetes: it puts the parts together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.kubernetes.kinds import ELASTICJOBS
from dlrover_py.master.core.events import Event, JobChanged, NodesListed
from dlrover_py.master.platform import PriorMasterState
from dlrover_py.master.platform.kubernetes.conditions import PlatformConditions
from dlrover_py.master.platform.kubernetes.context import JobContext
from dlrover_py.master.platform.kubernetes.creator import PodCreator
from dlrover_py.master.platform.kubernetes.ender import PodEnder
from dlrover_py.master.platform.kubernetes.event_recorder import EventRecorder
from dlrover_py.master.platform.kubernetes.job_watcher import ElasticJobWatcher
from dlrover_py.master.platform.kubernetes.pod_calls import PodCalls
from dlrover_py.master.platform.kubernetes.pod_table import PodTable
from dlrover_py.master.platform.kubernetes.pods import Obj, PodContext
from dlrover_py.master.platform.kubernetes.rights import Rights
from dlrover_py.master.platform.kubernetes.status_publisher import StatusPublisher
from dlrover_py.master.platform.kubernetes.template_trial import TemplateTrial
from dlrover_py.master.platform.kubernetes.timing import PlatformTiming
from dlrover_py.master.platform.kubernetes.watcher import PodWatcher
from dlrover_py.pacing import random_delay_s
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus


class KubernetesPlatform:
    """The ``Platform`` of a job on Kubernetes.

    It adopts the Pods that the ElasticJob with this UID owns, and no others, whatever their names.
    """

    can_create = True
    avoids_hosts = True
    limits_memory = True
    routed_s = 5.0  # readiness, endpoints of the Service, kube-proxy on each node, a retry

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        job: str,
        pod_context: PodContext,
        *,
        timing: PlatformTiming | None = None,
    ) -> None:
        """Put the parts together without a call.

        Args:
            kube: Client of the API server.
            namespace: Namespace of the ElasticJob.
            job: Name of the ElasticJob.
            pod_context: Values that all Pods of the job share.
            timing: The times of the platform; None for the defaults.
        """
        self.known = PriorMasterState()
        self._context = context = JobContext(
            kube, namespace, job, pod_context, timing or PlatformTiming()
        )
        self._recorder = EventRecorder(context)
        self._trial = TemplateTrial(context, self._recorder)
        self._rights = Rights(context)
        self._table = PodTable(context)
        self._jobs = ElasticJobWatcher(context, self._rights, self._trial)
        calls = PodCalls()
        self._creator = PodCreator(
            context, self._table, self._jobs, self._trial, self._rights, calls
        )
        self._ender = PodEnder(context, self._table, self._jobs, self._rights, calls)
        self._watcher = PodWatcher(context, self._table, self._jobs, self._rights, self._ender)
        conditions = PlatformConditions(self._table, self._rights, self._trial)
        self._publisher = StatusPublisher(context, conditions, self._jobs, self._recorder)

    @property
    def program(self) -> str:
        """Digest of what the workers run; empty if it is not known, or the job was deleted."""
        return "" if self._jobs.job is None else self._jobs.job.worker.program_hash

    async def get_job(self, accepted: ElasticJob | None = None) -> ElasticJob:
        """Return the desired state of the job, and take over what its status says.

        The status of the ElasticJob has the conditions that earlier masters have set, and the
        numbers that they have used (``known``). Events of earlier masters are not sent again. A
        trial of the template starts in the background.

        Args:
            accepted: The spec that an earlier master used; None if there is none. If the present
                spec cannot be used, this one is used with the present suspend and node counts.

        Raises:
            TransientError: The ElasticJob cannot be read now, another ElasticJob has its name, or
                its spec cannot be used and none was accepted before.
        """
        obj = await self._jobs.read()
        self._publisher.restore(obj)
        self.known = _remembered((obj.get("status") or {}).get("training") or {})
        self._recorder.skip_to(self.known.event)  # Kubernetes has deleted the older events by now
        try:
            return self._jobs.use(obj, accepted)
        except ConfigError as error:
            raise TransientError(f"the spec cannot be used: {error}") from error

    async def watch(self) -> AsyncIterator[Sequence[Event]]:
        """Yield the Pods first (ending with ``NodesListed``), then each change of Pods and job.

        A change of the job may also come before. Events that were queued before the call are
        dropped, so there must be one watch at a time. The iteration never ends by itself; the
        watches of the API server are repeated after an error. The API server is queried when it is
        silent.

        Raises:
            TransientError: The ElasticJob was deleted, and the API server does not tell whether its
                Pods are to stay.
        """
        facts = self._context.facts
        facts.clear()
        looks = (self._jobs.watch(), self._watcher.watch(), self._listen())
        watches = [asyncio.create_task(look) for look in looks]
        fact = asyncio.create_task(facts.get())
        try:
            while True:
                await asyncio.wait([fact, *watches], return_when=asyncio.FIRST_COMPLETED)
                for failed in (task for task in watches if task.done()):
                    failed.result()  # a watch ends with an exception only
                if fact.done():
                    events = fact.result()
                    if any(isinstance(event, (JobChanged, NodesListed)) for event in events):
                        self._context.tasks.start(self._ender.vacate())
                    yield events
                    fact = asyncio.create_task(facts.get())
        finally:
            for task in (fact, *watches):
                task.cancel()

    def silent_s(self) -> float:  # noqa: D102
        return self._context.kube.silent_s

    async def _listen(self) -> None:
        """Query a silent API server: a watch notices a broken connection only after a minute.

        The queries go on as long as :meth:`watch`. None is made while answers or watch events
        arrive. A failed query is ignored; :meth:`silent_s` then goes on growing.
        """
        context = self._context
        least_s, most_s = context.timing.query_interval_s
        while True:
            silent_s = context.kube.silent_s
            if silent_s >= least_s:
                with contextlib.suppress(KubeError, TimeoutError):
                    async with asyncio.timeout(context.timing.query_after_s):
                        await context.kube.get(ELASTICJOBS, context.name, context.namespace)
                silent_s = 0.0
            await asyncio.sleep(random_delay_s(least_s, most_s) - silent_s)

    async def create_node(
        self,
        node: NodeId,
        avoid: Sequence[str] = (),
        memory: int = 0,
        stable: bool = False,
        cpu: int = 0,
    ) -> None:
        """Try to create the Pod until it exists or the task is canceled.

        Conditions of the job and the node's state show why the Pod does not exist. A Pod of this
        job that exists already is kept. After the ElasticJob was deleted, no Pod is created.

        Args:
            node: Id of the node.
            avoid: Hosts that the Pod must not be placed on.
            memory: Memory limit of the main container in bytes; 0 for that of the template.
            stable: Whether the Pod must not be placed on a spot host.
            cpu: CPU request of the main container in thousandths; 0 for that of the template.

        Raises:
            TransientError: An attempt failed without a refusal of the Pod. The caller calls again.
        """
        await self._creator.create_node(node, avoid, memory, stable, cpu)

    async def delete_node(self, node: NodeId, grace_s: float) -> None:
        """Wait until a Pod ends by itself within the grace; otherwise delete it.

        A Pod that ends by itself stays for its log. The master orders the agent to stop; this
        method sends no signal before the deletion. It first waits for a running request to create
        the Pod. If the node has no Pod, the core gets the event that the node has ended. Nothing is
        deleted if the ElasticJob was deleted without its Pods.

        Args:
            node: Id of the node.
            grace_s: Seconds that the agent has to end; with 0, the Pod is deleted after 2 s.

        Raises:
            TransientError: The API server does not answer, or refuses. The caller calls again.
        """
        await self._creator.settle(node)
        await self._ender.delete_node(node, grace_s)

    async def publish(self, status: JobStatus) -> None:
        """Write the master's part of the status if it has changed, then send the new events.

        A change of only progress, goodput, streams or details of nodes is not written within
        ``progress_s`` seconds of the last write. The events are sent in the background. Nothing is
        done for an ElasticJob that was deleted without its Pods.

        Raises:
            SupersededError: Another master has begun a later term.
            TransientError: The API server does not answer, or refuses.
        """
        await self._publisher.publish(status)


def _remembered(training: Obj) -> PriorMasterState:
    """Return the numbers of earlier masters in ``status.training``.

    A number that is missing there counts as unused.
    """
    ids = [str(node.get("id", "")).removeprefix("n") for node in training.get("nodes") or []]
    numbers = [int(number) for number in ids if number.isdigit()]
    events = [int(event.get("id") or 0) for event in training.get("events") or []]
    term, number = (int(training.get(what) or 0) for what in ("term", "round"))
    names = [str(one.get("id", "")).removeprefix("ps") for one in training.get("servers") or []]
    servers = max((int(name) for name in names if name.isdigit()), default=-1)
    return PriorMasterState(term, number, max(numbers, default=-1), max(events, default=0), servers)
