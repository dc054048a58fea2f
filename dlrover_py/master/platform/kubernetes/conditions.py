"""The conditions that come from Pods and from the API server."""

from typing import Any

from dlrover_py.master.platform.kubernetes.pod_table import PodTable
from dlrover_py.master.platform.kubernetes.pods import Obj
from dlrover_py.master.platform.kubernetes.rights import Rights
from dlrover_py.master.platform.kubernetes.template_trial import TemplateTrial
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.status import Condition, JobPhase, JobStatus, unix_seconds

PROBLEMS = (
    ConditionType.IMAGE_PULL_BACK_OFF,
    ConditionType.UNSCHEDULABLE,
    ConditionType.INVALID_TEMPLATE,
    ConditionType.QUOTA_EXCEEDED,
    ConditionType.POD_NOT_STARTING,
    ConditionType.PODS_FORBIDDEN,
    ConditionType.PODS_REFUSED,
    ConditionType.NAME_CONFLICT,
    ConditionType.PERMISSION_DENIED,
    ConditionType.POD_NOT_ENDING,
    ConditionType.JOB_GONE,
    ConditionType.POD_INITIALIZING,
)
"""Conditions that the platform sets; each is True as long as the problem exists."""


class PlatformConditions:
    """The conditions of the platform, with the times of their changes."""

    def __init__(self, table: PodTable, rights: Rights, trial: TemplateTrial) -> None:
        """Start without conditions.

        Args:
            table: The Pods of the job.
            rights: The permissions that are missing.
            trial: Knows the fault in the newest template.
        """
        self._table, self._rights, self._trial = table, rights, trial
        self._past: dict[ConditionType, Condition] = {}
        """The conditions as they were last set."""

    def restore(self, obj: Obj) -> None:
        """Take over a condition that an earlier master has set.

        A condition that the platform does not set is ignored, and so is one that is known already.
        """
        if obj["type"] in PROBLEMS:
            self._past.setdefault(ConditionType(obj["type"]), _read_condition(obj))

    def added_to(self, status: JobStatus) -> list[Condition]:
        """Return the conditions of the core, and those of the platform.

        A problem that is over stays in the list with status False. A time of change is kept until
        the status of its condition changes; the call stores the conditions for this purpose.
        """
        found = self._problems(rests=status.phase.ended or status.phase is JobPhase.SUSPENDED)
        current = {}
        for kind in sorted(found.keys() | self._past.keys()):
            messages = found.get(kind)
            message = "the problem is over"
            if messages:
                message = messages[0] + (
                    f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
                )
            old = self._past.get(kind)
            state: Any = "True" if messages else "False"
            same = old is not None and old.status == state
            current[kind] = Condition(
                type=kind,
                status=state,
                reason=kind if messages else ConditionReason.RESOLVED,
                message=message,
                last_transition_time=(
                    old.last_transition_time if old is not None and same else status.published_at
                ),
            )
        self._past = current
        return [*status.conditions, *current.values()]

    def _problems(self, *, rests: bool) -> dict[ConditionType, list[str]]:
        """Return the present problems, in words, by the type of their condition.

        The fault that the trial has found in the template is left out while Pods are refused. A
        problem of a Pod that has to end does not count.

        Args:
            rests: Whether the job needs no Pods. Refusals by hosts and Pods that do not end are
                then left out.
        """
        table = self._table
        found: dict[ConditionType, list[str]] = {}
        if self._trial.problem is not None and not table.refusals:
            found[self._trial.problem.type] = [self._trial.problem.message]
        for node, problem in sorted(table.refusals.items()):
            found.setdefault(problem.type, []).append(f"{node}: {problem.message}")
        for node, seen in sorted(table.pods.items()):
            if seen.problem_type and not seen.leaving:
                found.setdefault(seen.problem_type, []).append(f"{node}: {seen.message}")
        if table.refused_by_hosts and not rests:
            found[ConditionType.PODS_REFUSED] = table.refused_by_hosts
        if not rests and (overdue := table.overdue()):
            # Later the operator, which stays, reports this: ``PodsLeft``.
            found[ConditionType.POD_NOT_ENDING] = overdue
        if missing := self._rights.missing():
            found.setdefault(ConditionType.PERMISSION_DENIED, []).extend(missing)
        return found


def _read_condition(obj: Obj) -> Condition:
    """Read a condition from the form of the API; a missing time becomes 0."""
    return Condition(
        type=obj["type"],
        status=obj["status"],
        reason=obj.get("reason") or "",
        message=obj.get("message") or "",
        last_transition_time=unix_seconds(obj.get("lastTransitionTime")) or 0.0,
    )
