"""The ElasticJob: its watch, the spec that is used, and whether it still exists."""

import asyncio
import contextlib
import logging

from dlrover_py.kubernetes.errors import NotFoundError
from dlrover_py.kubernetes.kinds import ELASTICJOBS, PODS
from dlrover_py.kubernetes.watch import Changed, Gone, Listed
from dlrover_py.master.core.events import Event, JobChanged, JobStopped
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.context import JobContext, transient
from dlrover_py.master.platform.kubernetes.pods import Obj
from dlrover_py.master.platform.kubernetes.rights import Rights
from dlrover_py.master.platform.kubernetes.template_trial import TemplateTrial
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reasons import ConditionType, EventReason

log = logging.getLogger("master.kubernetes")


class ElasticJobWatcher:
    """Turns changes of the ElasticJob into events, and knows the desired state."""

    def __init__(self, context: JobContext, rights: Rights, trial: TemplateTrial) -> None:
        """Start before the first read of the ElasticJob.

        Args:
            context: The job.
            rights: Receives refusals of the watch.
            trial: Tries the template of each new spec.
        """
        self._context, self._rights, self._trial = context, rights, trial
        self.job: ElasticJob | None = None
        """The desired state; None before the first read, and after the ElasticJob was deleted."""
        self.orphaned = False
        """Whether the ElasticJob was deleted in a way that leaves its Pods."""
        self.exists = False
        """Whether no Pod has gone since the ElasticJob was last known to exist."""
        self.newest_term = 0
        """The highest term in the status of the ElasticJob."""
        self._looking = asyncio.Lock()

    async def read(self) -> Obj:
        """Return the ElasticJob. Its spec is not used yet: see :meth:`use`.

        Raises:
            TransientError: It cannot be read now, or another ElasticJob has its name.
        """
        context = self._context
        with transient():
            obj = await context.kube.get(ELASTICJOBS, context.name, context.namespace)
        if obj["metadata"].get("uid") != context.pod_context.uid:
            raise TransientError(
                "another ElasticJob has this name now; the ElasticJob of this master was deleted"
            )
        self.exists = True
        return obj

    @property
    def topology_labels(self) -> tuple[str, ...]:
        """The labels of the topology domain; none after the ElasticJob was deleted."""
        return self.job.topology_labels if self.job is not None else ()

    async def watch(self) -> None:
        """Queue an event for each change of the ElasticJob that matters to the core, indefinitely.

        A new spec or allocation, other bad hosts, a deletion and a passed deadline cause one; other
        changes of the status do not.
        The deletion of a job whose Pods are to stay causes none. An ElasticJob that was replaced by
        another one of its name counts as deleted.

        Raises:
            TransientError: The ElasticJob was deleted, and the API server does not tell whether its
                Pods are to stay.
        """
        context = self._context
        changes = context.kube.watch(
            ELASTICJOBS,
            context.namespace,
            fields=f"metadata.name={context.name}",
            view=lambda obj: obj,
            on_error=lambda error: self._rights.on_error("ElasticJobs", error),
        )
        async with contextlib.aclosing(changes):
            async for change in changes:
                match change:
                    case Listed(items):
                        if not any(
                            i["metadata"].get("uid") == context.pod_context.uid for i in items
                        ):
                            await self._check_orphaned()
                        found = [self._event(item) for item in items] or [self._gone()]
                        context.facts.put([e for e in found if e is not None])
                    case Changed(item):
                        if event := self._event(item):
                            context.facts.put([event])
                    case Gone():
                        if event := self._gone():
                            context.facts.put([event])

    def _event(self, obj: Obj) -> Event | None:
        """Take in a new version of the ElasticJob, and return its event for the core.

        A new spec is used from now on (:meth:`use`). An ElasticJob that is being deleted, or
        another one of the same name, counts as deleted. A passed deadline stops the job.

        Returns:
            None if the spec is not new, or cannot be used and none was accepted before. None also
            if the ElasticJob is deleted without its Pods.
        """
        meta = obj["metadata"]
        if meta.get("uid") != self._context.pod_context.uid:
            return self._gone()
        status = obj.get("status") or {}
        self.newest_term = int((status.get("training") or {}).get("term") or 0)
        self.orphaned = "orphan" in (meta.get("finalizers") or [])
        if meta.get("deletionTimestamp"):
            return self._gone()
        for condition in status.get("conditions") or []:
            too_late = condition["type"] == ConditionType.DEADLINE_EXCEEDED
            if too_late and condition["status"] == "True":
                why = condition.get("message") or "a deadline has passed"
                return JobStopped(why, EventReason.DEADLINE_EXCEEDED)
        if self.job is not None and self.job.metadata.generation == meta.get("generation"):
            old, self.job = self.job, self.job.with_status_of(obj)
            return None if self.job == old else JobChanged(self.job)
        try:
            return JobChanged(self.use(obj, self.job))
        except ConfigError as error:  # and no spec was accepted before: the job is gone
            log.error("spec_refused", extra={"why": str(error)})
            return None

    async def _check_orphaned(self) -> None:
        """Find out whether a deleted ElasticJob has left its Pods; set :attr:`orphaned` if so.

        The ElasticJob was deleted while this master did not watch. If its Pods were to stay, the
        garbage collector has removed their owner before (Kubernetes: finalizer ``orphan``). Without
        Pods of the job, nothing changes.

        Raises:
            TransientError: The Pods cannot be listed now.
        """
        context = self._context
        with transient():
            found = await context.kube.list(
                PODS, context.namespace, labels=names.nodes_of(context.name)
            )
        owned = [seen for seen in map(pods.view, found) if context.owns(seen)]
        self.orphaned |= any(seen.orphan for seen in owned)

    def _gone(self) -> Event | None:
        """Return the event for a deleted ElasticJob; None if its Pods are to stay."""
        return None if self.orphaned else JobStopped()

    def use(self, obj: Obj, accepted: ElasticJob | None) -> ElasticJob:
        """Use the spec of an ElasticJob from now on; return the desired state of the job.

        The API server's validation does not see templates, and allows other roles to be added. An
        edit that cannot be used is logged with the reason. Only its suspend and node counts are
        then applied to the spec that was used before. A trial of the template starts in the
        background.

        Args:
            obj: The ElasticJob.
            accepted: The spec that was used before; None if there is none.

        Raises:
            ConfigError: The spec cannot be used, and none was accepted before.
        """
        try:
            self.job = ElasticJob.read(obj)
        except ConfigError as error:
            if accepted is None:
                raise
            self.job = accepted.with_fields_of(obj).with_status_of(obj)
            then = (
                "the last accepted spec stays in use; only suspend and numbers of nodes are applied"
            )
            fields = {"why": str(error), "then": then, "generation": self.job.metadata.generation}
            log.error("spec_refused", extra=fields)
        self._trial.start(self.job)
        return self.job

    def pod_left(self) -> None:
        """Note that a Pod has gone or must go; perhaps the ElasticJob was deleted, too.

        No request is made. The next creation of a Pod first checks whether the ElasticJob exists.
        """
        self.exists = False

    async def check_job_exists(self) -> None:
        """Read the ElasticJob, unless it is known to exist or known to be deleted.

        Tasks that call this at the same time cause one request. The result is in :attr:`exists` and
        :attr:`job`; the core gets the event of a change.

        Raises:
            TransientError: The ElasticJob cannot be read now.
        """
        async with self._looking:
            if not self.exists and self.job is not None:
                await self._read_job()

    async def _read_job(self) -> None:
        """Read the ElasticJob, take in its state, and queue the event of a change.

        If the ElasticJob was deleted, :attr:`job` becomes None. The core gets no event if it no
        longer exists at all, because the watch reports that.

        Raises:
            TransientError: The ElasticJob cannot be read now.
        """
        context = self._context
        with transient(NotFoundError):
            try:
                obj = await context.kube.get(ELASTICJOBS, context.name, context.namespace)
            except NotFoundError:
                self._drop()
                return
        event = self._event(obj)
        if isinstance(event, JobStopped):
            self._drop()
        else:
            self.exists = True
        if event is not None:
            context.facts.put([event])

    def _drop(self) -> None:
        """Note that the ElasticJob was deleted: no more Pods are created, and the trial ends."""
        self.job = None
        self._trial.stop()
