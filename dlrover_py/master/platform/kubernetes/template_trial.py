"""Dry runs of the Pod templates, and the conditions that describe refused Pods."""

import asyncio

from dlrover_py.kubernetes.errors import ForbiddenError, InvalidError
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.context import JobContext, PodProblem, transient
from dlrover_py.master.platform.kubernetes.event_recorder import EventRecorder
from dlrover_py.pacing import random_delay_s
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import SERVER_PREFIX, NodeId, role_of
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.refusals import Refusal, refusal_in

TRIAL = NodeId("trial")
"""Node id in the dry run of the workers' template."""
SERVER_TRIAL = NodeId(f"{SERVER_PREFIX}9999")
"""Node id in the dry run of the servers' template. No job has had so many."""


class TemplateTrial:
    """The trial of the newest templates, so that a bad edit is found early."""

    def __init__(self, context: JobContext, recorder: EventRecorder) -> None:
        """Start without templates.

        Args:
            context: The job.
            recorder: Receives warnings of the API server about the template.
        """
        self._context, self._recorder = context, recorder
        self._job: ElasticJob | None = None
        self._problems: dict[str, PodProblem] = {}
        """The fault in the template of each role that has one."""

    @property
    def problem(self) -> PodProblem | None:
        """A fault in a template of the newest spec, whether or not a Pod is needed; None if none.

        Until the API server has checked a template, it is the fault in the one before.
        """
        return next(iter(self._problems.values()), None)

    def start(self, job: ElasticJob) -> None:
        """Try the templates of a new spec in the background, in place of the earlier one.

        The result is in :attr:`problem` later. No Pod is created: the API server only checks it.
        """
        self._job = job
        self._context.tasks.start(self._try(job))

    def stop(self) -> None:
        """Ignore the result of the trial that runs, because the job is gone.

        :attr:`problem` keeps its value. The task ends after its present attempt.
        """
        self._job = None

    def passed(self, job: ElasticJob, node: NodeId) -> None:
        """Note that a node's Pod was created, so that the template of its role has no fault.

        Nothing happens if a newer spec than the one of this Pod is being tried.
        """
        if self._job is job:
            self._judge(node, None)

    async def _try(self, job: ElasticJob) -> None:
        """Try the templates until they are accepted, others are tried, or the job is gone.

        If a template is refused, or could not be checked, all are tried again each minute.
        """
        retry_s = self._context.timing.template_retry_s
        nodes = [TRIAL] if job.servers is None else [TRIAL, SERVER_TRIAL]
        while True:
            accepted = [await self._try_once(job, node) for node in nodes]
            if self._job is not job or all(accepted):
                return  # the task of a later edit tries that
            await asyncio.sleep(random_delay_s(0.8 * retry_s, retry_s))

    async def _try_once(self, job: ElasticJob, node: NodeId) -> bool:
        """Try the template of a node, and return whether it is accepted.

        A quota or a missing permission counts as accepted, because it is checked when a Pod is
        created. A failure that may pass does not change what is known, and neither does an answer
        after another edit. Warnings of the API server become an event.
        """
        context, problem = self._context, None
        warnings: list[str] = []
        try:
            pod = pods.pod(job, node, context.pod_context)
            with transient(ConfigError, InvalidError, ForbiddenError):
                await context.kube.create(
                    PODS, pod, dry_run=True, strict=True, on_warning=warnings.append
                )
        except (ConfigError, InvalidError, ForbiddenError) as error:
            found = problem_of(job, error, node)
            # A quota may have room when it matters, and permissions are checked again then.
            if found.type in (ConditionType.INVALID_TEMPLATE, ConditionType.PODS_FORBIDDEN):
                problem = found
        except TransientError:
            return False
        if self._job is job:
            if warnings:
                context.tasks.start(self._recorder.record_template(warnings))
            self._judge(node, problem)
        return problem is None

    def _judge(self, node: NodeId, problem: PodProblem | None) -> None:
        """Set the fault in the template of a node; if it is new, the status is published again."""
        before, role = self.problem, role_of(node)
        self._problems.pop(role, None)
        if problem is not None:
            self._problems[role] = problem
        if self.problem != before:
            self._context.facts.conditions_changed()


def problem_of(job: ElasticJob, error: Exception, node: NodeId) -> PodProblem:
    """Return the condition that tells the user why a Pod was refused.

    The status code is not enough, so the words of the message decide. A namespace that is being
    deleted gives ``JobGone``; :func:`refusal_in` knows the other words. If it knows none of them,
    a ForbiddenError becomes ``PodsForbidden``, and any other error ``InvalidTemplate``.

    Args:
        job: The job. The template of the node's role gives the paths of misspelt fields.
        error: The refusal of the API server, or the ConfigError about a template that is not sent.
        node: The node of the Pod.
    """
    message = str(error)
    if isinstance(error, ForbiddenError) and "is being terminated" in message:
        return PodProblem(ConditionType.JOB_GONE, message)
    kind = refusal_in(message)
    if kind is None and not isinstance(error, ForbiddenError):
        faults = "; ".join(pods.refusal(job, message, node).splitlines())
        return PodProblem(ConditionType.INVALID_TEMPLATE, faults)
    return PodProblem(ConditionType((kind or Refusal.POLICY).value), message)
