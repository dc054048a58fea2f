"""The master's part of the ElasticJob's status."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover_py.kubernetes.errors import ConflictError, NotFoundError
from dlrover_py.kubernetes.kinds import ELASTICJOBS
from dlrover_py.master.platform.kubernetes.conditions import PROBLEMS, PlatformConditions
from dlrover_py.master.platform.kubernetes.context import JobContext, transient
from dlrover_py.master.platform.kubernetes.event_recorder import EventRecorder
from dlrover_py.master.platform.kubernetes.job_watcher import ElasticJobWatcher
from dlrover_py.master.platform.kubernetes.pods import Obj
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import SupersededError
from dlrover_py.protocol.status import Condition, JobPhase, JobStatus, Training, rfc3339

log = logging.getLogger("master.kubernetes")

WHY_CHARS = 300
"""Limit of a condition's text in the job's reason, in characters."""


class StatusPublisher:
    """Writes the status when it has changed."""

    def __init__(
        self,
        context: JobContext,
        conditions: PlatformConditions,
        jobs: ElasticJobWatcher,
        recorder: EventRecorder,
    ) -> None:
        """Start before the first status.

        Args:
            context: The job.
            conditions: Adds the conditions of the platform.
            jobs: Knows whether the ElasticJob exists, and its newest term.
            recorder: Sends the events.
        """
        self._context, self._conditions = context, conditions
        self._jobs, self._recorder = jobs, recorder
        self._written: Obj = {}
        """The status that was last written."""
        self._written_at = 0.0
        self._times: dict[str, tuple[str, str]] = {}
        """Status and last transition of each condition in the cluster."""

    def restore(self, obj: Obj) -> None:
        """Take over the conditions of an ElasticJob, which an earlier master may have set."""
        for condition in (obj.get("status") or {}).get("conditions") or []:
            since = condition.get("lastTransitionTime") or ""
            self._times[condition["type"]] = condition["status"], since
            self._conditions.restore(condition)

    async def publish(self, status: JobStatus) -> None:
        """Write the master's part of the status if it has changed, and the new events.

        A change of fields in ``VOLATILE`` alone is not written within ``progress_s`` seconds of the
        last write. New events cause a write, and are sent after it, in the background. Nothing is
        done for an ElasticJob that was deleted without its Pods.

        Raises:
            SupersededError: Another master has begun a later term.
            TransientError: The API server does not answer, or refuses. If the ElasticJob is gone,
                a warning is logged instead.
        """
        jobs, context = self._jobs, self._context
        if jobs.orphaned:
            return  # the ElasticJob is gone
        if status.term < jobs.newest_term:
            # Agents must go to the other master, which gives up nodes that do not report to it.
            raise SupersededError(
                f"a master of term {jobs.newest_term} has taken over: this master ends"
            )
        conditions = self._conditions.added_to(status)
        status = status.model_copy(update={"reason": _reason_column(status, conditions)})
        body = status_body(status, conditions, names.workers_of(context.name), self._times)
        urgent_part = _urgent_part(body)
        now = asyncio.get_running_loop().time()
        soon = now - self._written_at < context.timing.progress_s
        if urgent_part == _urgent_part(self._written) and (body == self._written or soon):
            return
        await self._write(body)
        for condition in body["conditions"]:
            kind, came = condition["type"], condition["status"] == "True"
            if kind in PROBLEMS and came and self._times.get(kind, ("", ""))[0] != "True":
                self._recorder.warn(condition)
        self._times = {
            c["type"]: (c["status"], c["lastTransitionTime"]) for c in body["conditions"]
        }
        self._written, self._written_at = body, now
        self._recorder.publish(status.events)

    async def _write(self, body: Obj) -> None:
        """Write the master's part of the status.

        If the ElasticJob was deleted, or another one has its name, a warning is logged instead. The
        caller treats the status as written.

        Raises:
            TransientError: The API server refuses the write for another reason, or does not answer.
        """
        context = self._context
        job = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": context.name,
                "namespace": context.namespace,
                "uid": context.pod_context.uid,
            },
            "status": body,
        }
        with transient(NotFoundError, ConflictError):
            try:
                await context.kube.apply(
                    ELASTICJOBS, job, manager=names.MASTER_MANAGER, subresource="status"
                )
            except (NotFoundError, ConflictError) as error:
                # It was deleted, or another ElasticJob has its name.
                log.warning("status_not_written", extra={"why": str(error)})


def status_body(
    status: JobStatus,
    conditions: Sequence[Condition],
    selector: str,
    times: Mapping[str, tuple[str, str]],
) -> Obj:
    """Return the master's part of ``status``; ``training`` in it has at most 50 kB.

    Nothing is written. Numbers that are NaN or infinite are left out. So are nodes, events and
    partitions of streams beyond the limits.

    Args:
        status: The complete status of the job.
        conditions: Conditions of the core and of the platform.
        selector: Label selector of the worker Pods.
        times: Status and last transition of each condition in the cluster. An earlier master may
            have set it.
    """
    training = Training.of(status).model_dump(mode="json", by_alias=True, exclude_none=True)
    for left_out in ("conditions", "publishedAt"):
        del training[left_out]
    target = status.target_replicas
    return {
        "conditions": [_condition(c, times, status.generation) for c in conditions],
        "replicas": status.ready - status.standby,
        **({} if target is None else {"targetReplicas": target}),
        "selector": selector,
        "training": _finite(training),
    }


def _reason_column(status: JobStatus, conditions: Sequence[Condition]) -> str:
    """Return the reason of the job for the status: a problem of the platform, then the core's.

    At most one problem is shown, and only while the job waits for nodes or has fewer nodes than
    desired. Otherwise the result is the core's reason alone.
    """
    short = status.phase is JobPhase.RUNNING and status.nodes_in_round < status.desired
    if not (short or status.phase in (JobPhase.PENDING, JobPhase.FORMING)):
        return status.reason
    current = (c for c in conditions if c.type in PROBLEMS and c.status == "True")
    problems = [f"{c.type}: {c.message}"[:WHY_CHARS] for c in current]
    return "; ".join([*problems[:1], status.reason])


def _finite(value: Any) -> Any:
    """Remove NaN and infinity, for which the API server would refuse the status."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if not _is_not_finite(v)}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def _is_not_finite(value: Any) -> bool:
    """Return whether a value is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


def _condition(condition: Condition, times: Mapping[str, tuple[str, str]], generation: int) -> Obj:
    """Return a condition in the form of the API; its message is cut to 8,192 characters.

    The transition time in the cluster is kept if the status of the condition has not changed.
    """
    state, since = times.get(condition.type, ("", ""))
    same = state == condition.status and since
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason or condition.type,
        "message": condition.message[:8192],
        "lastTransitionTime": since if same else rfc3339(condition.last_transition_time),
        "observedGeneration": generation,
    }


VOLATILE = ("progress", "goodput", "nodes", "data", "summary", "tables")
"""Fields of the status whose change is not written immediately."""


def _urgent_part(body: Obj) -> Obj:
    """Return the part of the status whose change is written immediately.

    Of each node it has the id, the phase and the role only.
    """
    training = body.get("training") or {}
    return {
        **body,
        "training": {k: v for k, v in training.items() if k not in VOLATILE},
        "summary": {k: v for k, v in (training.get("summary") or {}).items() if k not in VOLATILE},
        "nodes": [(n["id"], n["phase"], n["role"]) for n in training.get("nodes") or []],
    }
