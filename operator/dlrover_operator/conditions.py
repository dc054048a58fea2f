"""The operator's part of a job's status: conditions, phase and reason (pure functions)."""

from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

from dlrover_operator import gang
from dlrover_operator.actions import RecordEvent, SetStatus
from dlrover_operator.facts import JobFacts
from dlrover_operator.observed import LastError, Obj, PodReason
from dlrover_py.protocol.errors import UnsupportedError
from dlrover_py.protocol.job import INERT, ElasticJob
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.refusals import Refusal, refusal_in
from dlrover_py.protocol.status import JobPhase, rfc3339

UNSEEN_S = 30.0
"""Seconds within which a scheduler normally processes a new Pod."""
OVERDUE = (
    "they were deleted, and their kubelets have not ended them. If a host is lost for good, delete "
    "its Node, or taint it with node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
)
REFUSED = "Refused"
"""Phase of a job that is not run; its condition ``Accepted`` has the reason."""
MESSAGE = 1024
"""Largest number of characters in the message of an event."""
STATES = frozenset(
    {
        ConditionType.ACCEPTED,
        ConditionType.MASTER_READY,
        ConditionType.PODS_READY,
        ConditionType.RUNNING,
        ConditionType.DEGRADED,
        ConditionType.JOURNAL_WRITABLE,
        ConditionType.SUSPENDED,
        ConditionType.DEADLINE_EXCEEDED,
        ConditionType.ALLOCATED,
        ConditionType.GANG_READY,
        ConditionType.SUCCEEDED,
        ConditionType.FAILED,
        ConditionType.STOPPED,
        ConditionType.PODS_LEFT,
    }
)
"""Conditions that describe the state of a job; any other condition that is True is a problem."""
UNDER_WAY = frozenset(
    {
        ConditionReason.CREATING,
        ConditionReason.STARTING,
        ConditionReason.WAITING,
        ConditionReason.SUSPENDED,
        ConditionReason.FINISHED,
        ConditionReason.AVAILABLE,
    }
)
"""Reasons of ``MasterReady`` that are not problems."""
EventType = Literal["", "Normal", "Warning"]
"""Type of the event for a change of a condition; empty: no event."""


class DesiredCondition(NamedTuple):
    """A condition that the operator writes."""

    type: ConditionType
    true: bool
    reason: ConditionReason | PodReason
    message: str = ""
    event_type: EventType = ""
    """Type of the event for its change."""


class JobConditions:
    """The conditions that the operator writes, and the rest of its part of the status."""

    def __init__(self, facts: JobFacts) -> None:
        """Keep the facts, and compose the message if a deadline has passed."""
        self._facts = facts
        self.passed_deadline = self._find_passed_deadline()
        """Reason and message if a deadline has passed; otherwise None."""

    def _find_passed_deadline(self) -> tuple[ConditionReason, str] | None:
        """Return reason and message if a deadline has passed; otherwise None.

        A message that is already in the status is kept.
        """
        facts = self._facts
        if facts.deadline is None:
            return None
        if facts.is_true(ConditionType.DEADLINE_EXCEEDED):
            found = facts.conditions[ConditionType.DEADLINE_EXCEEDED]
            return facts.deadline, found.get("message", "")
        if facts.deadline == ConditionReason.ACTIVE_DEADLINE:
            limit = facts.spec["activeDeadlineSeconds"]
            return facts.deadline, (
                f"the job did not end within {limit} s of its start (activeDeadlineSeconds)"
            )
        limit = facts.spec["pendingTimeoutSeconds"]
        text = f"the job had fewer nodes than its minimum for {limit} s (pendingTimeoutSeconds)"
        reason, message = self._problem()
        if reason:
            text += f"; {reason}: {message}" if message else f"; {reason}"
        return facts.deadline, text

    def _problem(self) -> tuple[str, str]:
        """Return reason and message of the problem of the job; empty if there is none.

        A refused spec comes first, then the problem of the master, then the first other condition
        that is True and no normal state. The last is a command of the workers that seems not to
        start agents; it counts only while no node has joined.
        """
        facts = self._facts
        for own in (accepted := self._accepted(), self._master_state()):
            if not own.true and (own is accepted or own.reason not in UNDER_WAY):
                return own.reason, own.message
        if facts.held_back:
            for allocated in self._allocated():
                return allocated.reason, allocated.message
        for condition in facts.conditions.values():
            if condition["type"] not in STATES and condition.get("status") == "True":
                return condition["type"], condition.get("message", "")
        no_node_has_joined = facts.training.get("phase") == JobPhase.PENDING
        if no_node_has_joined and accepted.reason == ConditionReason.DOES_NOT_JOIN:
            return accepted.reason, accepted.message
        return "", ""

    def _reason(self) -> str:
        """Return one word for the problem of the job, or for the cause of its failure; "" if none.

        ``kubectl get`` shows it beside the phase. A job that has ended otherwise, or is suspended,
        has only the problem that its Pods do not end.
        """
        facts = self._facts
        if facts.ended == JobPhase.FAILED:
            by_master = facts.training.get("phase") == JobPhase.FAILED
            kind = (
                ConditionType.FAILED
                if by_master or self.passed_deadline is None
                else ConditionType.DEADLINE_EXCEEDED
            )
            return str(facts.conditions.get(kind, {}).get("reason", "")) or kind
        if facts.ended or (facts.suspend and facts.scaled_to_zero):
            return ConditionType.PODS_LEFT if facts.overdue() else ""
        return self._problem()[0]

    def status(self) -> Iterator[SetStatus | RecordEvent]:
        """Yield the status if it changes, and the events for changes of conditions.

        Only some conditions have an event: see :attr:`DesiredCondition.event_type`. A change of a
        message alone makes none. Nothing is yielded if the status is up to date.
        """
        facts = self._facts
        written = [self._condition(desired) for desired in self._conditions_to_write()]
        status: Obj = {"conditions": [c for c, _ in written]}
        fields: Obj = {
            "phase": self._phase() or None,
            "reason": self._reason() or None,
            "observedGeneration": facts.meta.get("generation"),
            "startTime": None if facts.start is None else rfc3339(facts.start),
            "pendingSince": None if facts.pending_since is None else rfc3339(facts.pending_since),
            "completionTime": self._completion(),
        }
        status |= {name: value for name, value in fields.items() if value is not None}
        changed = any(c != facts.conditions.get(c["type"]) for c, _ in written)
        changed |= any(facts.status.get(name) != value for name, value in fields.items())
        types = {c["type"] for c, _ in written}
        passing = {ConditionType.ALLOCATED, ConditionType.GANG_READY}
        changed |= bool(passing & (facts.conditions.keys() - types))  # they do not apply any more
        if changed:
            yield SetStatus(status)
        for condition, event in written:
            if event != "":
                yield RecordEvent(event, condition["reason"], condition["message"][:MESSAGE])

    def _completion(self) -> str | None:
        """Return the time of the job's end; None if it has not ended.

        It is the time at which the operator first saw the end.
        """
        facts = self._facts
        if not facts.ended:
            return None
        return str(facts.status.get("completionTime") or rfc3339(facts.now))

    def _phase(self) -> str:
        """Return the phase of the job.

        The operator decides it for a job that has ended, is suspended or is refused. Otherwise it
        is the phase that the master has reported, or ``Created`` before its first report.
        """
        facts = self._facts
        if facts.ended:
            return facts.ended
        if facts.suspend and facts.scaled_to_zero:
            return JobPhase.SUSPENDED.value
        if not facts.runs and not self._accepted().true:
            return REFUSED
        published = facts.training.get("phase")
        rests = facts.suspend or (facts.job is not None and facts.job.rests)
        if published == JobPhase.SUSPENDED and not rests:
            return JobPhase.PENDING.value  # the master has not reported since the resume
        if published:
            return str(published)
        known = str(facts.status.get("phase") or "")
        made = facts.deployment is not None or facts.service is not None
        # The job was processed, even if no object could be made.
        return "Created" if made or known in ("", REFUSED) else known

    def _conditions_to_write(self) -> Iterator[DesiredCondition]:
        """Yield the conditions that the operator writes.

        ``Accepted`` and ``MasterReady`` are always written. ``Allocated``, ``PodsLeft``,
        ``Suspended``, ``DeadlineExceeded`` and ``Failed`` are written only when they apply.
        ``Suspended`` is False until no node, Pod or master is left, and again after the suspension.
        ``Failed`` is left to the master if it has reported the failure.
        """
        facts = self._facts
        yield self._accepted()
        yield self._master_ready()
        if facts.seen.allotted and not facts.ended:
            yield from self._allocated()
        if facts.seen.gang is not None and facts.job is not None and not facts.ended:
            yield DesiredCondition(
                ConditionType.GANG_READY, *gang.verdict(facts.job, facts.seen.gang), "Normal"
            )
        if facts.ended or facts.suspend:
            yield from self._pods_left()
        if facts.suspend and not facts.ended:
            masters = [pod.name for pod in facts.masters() if pod.holds]
            if facts.scaled_to_zero and facts.pods_are_gone() and not masters:
                message = "no node is left, and the master has ended"
                yield DesiredCondition(
                    ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED, message, "Normal"
                )
            else:
                message = "the master is stopping its nodes"
                if facts.seen.remaining_pods:
                    message = facts.remaining_pods_message()
                elif facts.scaled_to_zero and masters:
                    message = f"no node is left, and the master's Pod {masters[0]} is ending"
                yield DesiredCondition(
                    ConditionType.SUSPENDED, False, ConditionReason.SUSPENDING, message
                )
        elif ConditionType.SUSPENDED in facts.conditions:
            if facts.ended:
                yield DesiredCondition(
                    ConditionType.SUSPENDED, False, ConditionReason.FINISHED, "the job has ended"
                )
            else:
                yield DesiredCondition(
                    ConditionType.SUSPENDED,
                    False,
                    ConditionReason.RESUMED,
                    "spec.suspend is false",
                    "Normal",
                )
        if self.passed_deadline is not None:
            yield DesiredCondition(
                ConditionType.DEADLINE_EXCEEDED, True, *self.passed_deadline, "Warning"
            )
            by_master = facts.training.get("phase") == JobPhase.FAILED
            if facts.ended == JobPhase.FAILED and not by_master:
                yield DesiredCondition(
                    ConditionType.FAILED,
                    True,
                    ConditionReason.DEADLINE_EXCEEDED,
                    self.passed_deadline[1],
                )

    def _allocated(self) -> Iterator[DesiredCondition]:
        """Yield the condition ``Allocated`` of a job to which the operator allots nodes.

        Whoever sees the condition knows that the operator has written the allocation. So a
        suspended job has it, too: it may leave its queue before it goes on.
        """
        facts = self._facts
        granted = ElasticJob.allocation_in(facts.seen.job)
        if granted is None:
            if not (facts.suspend or facts.refused):
                message = facts.seen.held_for or "the allocator has not decided yet"
                yield DesiredCondition(
                    ConditionType.ALLOCATED, False, ConditionReason.WAITING, message
                )
            return
        held = facts.held_back or not granted.nodes
        reason = ConditionReason.HELD_BACK if held else ConditionReason.ALLOCATED
        yield DesiredCondition(ConditionType.ALLOCATED, not held, reason, granted.reason, "Normal")

    def _pods_left(self) -> Iterator[DesiredCondition]:
        """Yield the condition ``PodsLeft``; nothing while its Pods still have time to end.

        It is False once no Pod holds resources, and then stays so. If the Pods were not listed, an
        earlier condition is repeated.
        """
        facts = self._facts
        old = facts.conditions.get(ConditionType.PODS_LEFT)
        if (
            facts.since(ConditionType.PODS_LEFT, "False") is not None
            or facts.seen.remaining_pods == ()
        ):
            yield DesiredCondition(
                ConditionType.PODS_LEFT,
                False,
                ConditionReason.NONE_LEFT,
                "no worker Pod holds resources",
            )
        elif facts.seen.remaining_pods is None:
            if old is not None:
                yield DesiredCondition(ConditionType.PODS_LEFT, True, old["reason"], old["message"])
        elif facts.overdue():
            message = f"{facts.remaining_pods_message()}; {OVERDUE}"
            yield DesiredCondition(
                ConditionType.PODS_LEFT, True, ConditionReason.NOT_ENDING, message, "Warning"
            )

    def _accepted(self) -> DesiredCondition:
        """Return the condition ``Accepted``.

        The condition is False for a spec that cannot be used, and for a name that another object
        has. It is True with a remark if parts of the spec have no effect. The same holds if the
        command of the workers seems not to start agents.
        """
        facts = self._facts
        if facts.refused is not None:
            reason = (
                ConditionReason.UNSUPPORTED
                if isinstance(facts.refused, UnsupportedError)
                else ConditionReason.INVALID_SPEC
            )
            return DesiredCondition(
                ConditionType.ACCEPTED, False, reason, str(facts.refused), "Warning"
            )
        if facts.foreign and not facts.old:
            message = f"{facts.foreign} {facts.name} already exists and does not belong to this job"
            return DesiredCondition(
                ConditionType.ACCEPTED,
                False,
                ConditionReason.NAME_CONFLICT,
                f"{message}; delete it",
                "Warning",
            )
        last_error = facts.seen.last_error
        if last_error is not None and last_error.reason == ConditionReason.NAME_CONFLICT:
            return DesiredCondition(
                ConditionType.ACCEPTED, False, last_error.reason, last_error.message, "Warning"
            )
        inert = facts.job.without_effect() if facts.job is not None else []
        no_effect = f"{', '.join(inert)}: {INERT}" if inert else ""
        restarts = facts.job.worker.restart_remarks() if facts.job is not None else ""
        no_effect = f"{no_effect}\n{restarts}".strip()
        alone = facts.job.worker.command_remarks() if facts.job is not None else ""
        if alone:
            message = f"{alone}\n{no_effect}".rstrip()
            return DesiredCondition(
                ConditionType.ACCEPTED, True, ConditionReason.DOES_NOT_JOIN, message, "Warning"
            )
        if inert:
            return DesiredCondition(
                ConditionType.ACCEPTED, True, ConditionReason.WITHOUT_EFFECT, no_effect, "Normal"
            )
        return DesiredCondition(ConditionType.ACCEPTED, True, ConditionReason.ACCEPTED)

    def _master_ready(self) -> DesiredCondition:
        """Return the condition ``MasterReady``; it is False for a job that has ended."""
        if self._facts.ended:
            over = (ConditionReason.FINISHED, "the job has ended")
            return DesiredCondition(ConditionType.MASTER_READY, False, *over)
        return self._master_state()

    def _master_state(self) -> DesiredCondition:
        """Return the condition ``MasterReady`` of a job that has not ended.

        The condition is True while the Deployment has an available replica. It is False all the
        same after the API server has refused an action of the plan, except a name conflict. It is
        False for a job that is suspended or refused, and while objects of a deleted job exist. A
        Pod that no scheduler has processed counts as a problem after 30 s.
        """
        facts = self._facts
        not_ready = partial(DesiredCondition, ConditionType.MASTER_READY, False)
        if facts.suspend and facts.scaled_to_zero:
            return not_ready(ConditionReason.SUSPENDED)
        last_error = facts.seen.last_error
        if last_error is not None and last_error.reason != ConditionReason.NAME_CONFLICT:
            event_type: EventType = (
                "" if last_error.reason == ConditionReason.WAITING else "Warning"
            )
            return not_ready(last_error.reason, self._by_template(last_error), event_type)
        if facts.old:
            message = "objects of a deleted job of this name still exist"
            return not_ready(ConditionReason.WAITING, message)
        deployment = facts.deployment
        if facts.refused is not None and not facts.runs:
            return not_ready(ConditionReason.REFUSED)
        if facts.held_back and not facts.runs:
            return not_ready(ConditionReason.WAITING, "the master starts when it may have nodes")
        if deployment is None:
            return not_ready(ConditionReason.CREATING)
        if deployment.available:
            return DesiredCondition(
                ConditionType.MASTER_READY,
                True,
                ConditionReason.AVAILABLE,
                "the master serves its nodes",
                "Normal",
            )
        for pod in facts.seen.pods:
            if pod.reason:
                return not_ready(pod.reason, pod.message, "Warning")
            if pod.pending_scheduler and facts.has_passed(pod.created_at + UNSEEN_S):
                message = (
                    "no scheduler has processed the master's Pod: check that the scheduler "
                    f"{pod.pending_scheduler} runs"
                )
                return not_ready(
                    ConditionReason.UNSCHEDULABLE,
                    message,
                    "Warning",
                )
        if deployment.create_error:
            forbidden = " is forbidden: " in deployment.create_error
            kind = refusal_in(deployment.create_error) or (Refusal.POLICY if forbidden else None)
            why = ConditionReason.FAILED_CREATE if kind is None else ConditionReason(kind.value)
            return not_ready(why, deployment.create_error, "Warning")
        return not_ready(ConditionReason.STARTING, "the master's Pod is not ready yet")

    def _by_template(self, last_error: LastError) -> str:
        """Return the message of a refusal, after the known faults of the job's master template.

        The message is returned unchanged if the refusal has another reason than ``Refused``, or if
        the spec cannot be used.
        """
        facts = self._facts
        if last_error.reason != ConditionReason.REFUSED or facts.job is None:
            return last_error.message
        faults = [str(fault) for fault in facts.job.master_faults() if not fault.unknown]
        return "\n".join([*faults, last_error.message])

    def _condition(self, desired: DesiredCondition) -> tuple[Obj, EventType]:
        """Return a condition for the status, and the type of the event for its change.

        The type is empty if neither the status nor the reason has changed. The transition time
        changes with the status, and at the beginning of a suspension.
        """
        facts = self._facts
        kind, true, reason, message, event_type = desired
        status = "True" if true else "False"
        old = facts.conditions.get(kind, {})
        same = old.get("status") == status
        # The beginning of a suspension restarts its time.
        began = reason == ConditionReason.SUSPENDING and old.get("reason") != reason
        at = old.get("lastTransitionTime") if same and not began else None
        condition: Obj = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message[:32768],
            "lastTransitionTime": at or rfc3339(facts.now),
        }
        if generation := facts.meta.get("generation"):
            condition["observedGeneration"] = generation
        news = not same or old.get("reason") != reason
        return condition, event_type if news else ""
