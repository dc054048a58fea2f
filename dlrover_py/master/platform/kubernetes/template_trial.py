"""Dry runs of the Pod template, and the conditions that describe refused Pods."""

import asyncio

from dlrover_py.kubernetes.errors import ForbiddenError, InvalidError
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.context import JobContext, PodProblem, transient
from dlrover_py.master.platform.kubernetes.event_recorder import EventRecorder
from dlrover_py.pacing import random_delay_s
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.refusals import Refusal, refusal_in

TRIAL = NodeId("trial")
"""Node id in the dry run of a template."""


class TemplateTrial:
    """The trial of the newest template, so that a bad edit is found early."""

    def __init__(self, context: JobContext, recorder: EventRecorder) -> None:
        """Start without a template.

        Args:
            context: The job.
            recorder: Receives warnings of the API server about the template.
        """
        self._context, self._recorder = context, recorder
        self._job: ElasticJob | None = None
        self.problem: PodProblem | None = None
        """The fault in the template of the newest spec, whether or not a Pod is needed.

        Until the API server has checked this template, it is the fault in the one before.
        """

    def start(self, job: ElasticJob) -> None:
        """Try the template of a new spec in the background, in place of the earlier one.

        The result is in :attr:`problem` later. No Pod is created: the API server only checks it.
        """
        self._job = job
        self._context.tasks.start(self._try(job))

    def stop(self) -> None:
        """Ignore the result of the trial that runs, because the job is gone.

        :attr:`problem` keeps its value. The task ends after its present attempt.
        """
        self._job = None

    def passed(self, job: ElasticJob) -> None:
        """Note that a Pod was created from the template of a spec, so that it has no fault.

        Nothing happens if a newer spec is being tried.
        """
        if self._job is job:
            self._judge(None)

    async def _try(self, job: ElasticJob) -> None:
        """Try the template until it is accepted, another one is tried, or the job is gone.

        A refused template is tried again each minute, and so is one that could not be checked. A
        quota or a missing permission counts as accepted, because it is checked when a Pod is
        created. A failure that may pass does not change what is known. Warnings of the API server
        become an event.
        """
        context = self._context
        retry_s = context.timing.template_retry_s
        while True:
            problem, checked = None, True
            warnings: list[str] = []
            try:
                pod = pods.pod(job, TRIAL, context.pod_context)
                with transient(ConfigError, InvalidError, ForbiddenError):
                    await context.kube.create(
                        PODS, pod, dry_run=True, strict=True, on_warning=warnings.append
                    )
            except (ConfigError, InvalidError, ForbiddenError) as error:
                found = problem_of(job, error)
                # A quota may have room when it matters, and permissions are checked again then.
                if found.type in (ConditionType.INVALID_TEMPLATE, ConditionType.PODS_FORBIDDEN):
                    problem = found
            except TransientError:
                problem, checked = self.problem, False
            if self._job is not job:
                return  # the task of the later edit tries that
            if warnings:
                context.tasks.start(self._recorder.record_template(warnings))
            self._judge(problem)
            if checked and problem is None:
                return
            await asyncio.sleep(random_delay_s(0.8 * retry_s, retry_s))

    def _judge(self, problem: PodProblem | None) -> None:
        """Set the fault in the template; if it is new, the status is published again."""
        if problem != self.problem:
            self.problem = problem
            self._context.facts.conditions_changed()


def problem_of(job: ElasticJob, error: Exception) -> PodProblem:
    """Return the condition that tells the user why a Pod was refused.

    The status code is not enough, so the words of the message decide. A namespace that is being
    deleted gives ``JobGone``; :func:`refusal_in` knows the other words. If it knows none of them,
    a ForbiddenError becomes ``PodsForbidden``, and any other error ``InvalidTemplate``.

    Args:
        job: The job. Its template gives the paths of misspelt fields for the message.
        error: The refusal of the API server, or the ConfigError about a template that is not sent.
    """
    message = str(error)
    if isinstance(error, ForbiddenError) and "is being terminated" in message:
        return PodProblem(ConditionType.JOB_GONE, message)
    kind = refusal_in(message)
    if kind is None and not isinstance(error, ForbiddenError):
        faults = "; ".join(pods.refusal(job, message).splitlines())
        return PodProblem(ConditionType.INVALID_TEMPLATE, faults)
    return PodProblem(ConditionType((kind or Refusal.POLICY).value), message)
