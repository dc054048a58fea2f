"""What an ElasticJob object and its Kubernetes events say about the job.

All functions are pure. Values of another version are left out.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dlrover_py.protocol import names
from dlrover_py.protocol.job_view import problem_line, problems
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.status import Condition, JobEvent, JobStatus, unix_seconds
from dlrover_py.protocol.words import are, counted

MAKERS_OF_HOSTS = ("cluster-autoscaler", "karpenter")
"""Programs that add hosts for Pods that have no place, as their events name them."""


def nodes_left_out(obj: Mapping[str, Any]) -> int:
    """Return the number of nodes that the status of a job leaves out; see ``Training``."""
    return int(((obj.get("status") or {}).get("training") or {}).get("leftOut") or 0)


def left_out_notes(obj: Mapping[str, Any]) -> list[str]:
    """Return what the reader of a job must know about nodes that are not shown, in words."""
    left_out = nodes_left_out(obj)
    return [f"{counted(left_out, 'node')} {are(left_out)} not in the status"] if left_out else []


def read_status(obj: Mapping[str, Any]) -> JobStatus | None:
    """Return the master's status with all conditions; None if there is none that can be read.

    A status of another version that does not have the expected form counts as absent.
    """
    training = (obj.get("status") or {}).get("training")
    if not isinstance(training, dict):
        return None
    conditions = [c.model_dump() for c in read_conditions(obj)]
    with contextlib.suppress(ValidationError):  # it has the form of another version
        return JobStatus.model_validate(training | {"conditions": conditions})
    return None


def read_conditions(obj: Mapping[str, Any]) -> list[Condition]:
    """Return the conditions of an object. Those of another form are left out."""
    found = []
    for condition in (obj.get("status") or {}).get("conditions") or []:
        with contextlib.suppress(ValidationError):
            at = unix_seconds(condition.get("lastTransitionTime")) or 0.0
            found.append(
                Condition.model_validate(
                    {"reason": "", "message": "", **condition, "lastTransitionTime": at}
                )
            )
    return found


def read_phase(
    obj: Mapping[str, Any], status: JobStatus | None, conditions: Sequence[Condition]
) -> tuple[str, str]:
    """Return the phase of a job, and the best known reason for it.

    The phase is the operator's, else the master's, else ``Created``, or ``Deleting`` for an object
    that is being deleted. The reason says first if the job is being deleted, is managed by another
    controller, or was never processed. Otherwise it comes from the master's status if the phases
    agree, else from a condition: first a problem, then one of the phase.

    Args:
        obj: the ElasticJob.
        status: its master's status; None if there is none.
        conditions: its conditions.
    """
    meta, phase = obj["metadata"], (obj.get("status") or {}).get("phase") or ""
    if meta.get("deletionTimestamp"):
        return phase or "Deleting", "it is being deleted"
    managed_by = (obj.get("spec") or {}).get("managedBy")
    if not phase and status is None:
        if managed_by not in (None, "", names.MANAGED_BY):
            return "Created", f"it is managed by {managed_by} (spec.managedBy)"
        return "Created", (
            "no operator has processed it: check that one is installed and watches this namespace"
        )
    if status is not None and phase in ("", status.phase.value):
        return phase or status.phase.value, status.reason
    for condition in problems(conditions, status.round if status is not None else 0):
        return phase, problem_line(condition)
    for condition in conditions:
        if condition.type in (phase, ConditionType.MASTER_READY) and condition.message:
            return phase, condition.message
    return phase, "its master has not published a status yet" if status is None else status.reason


def read_events(status: JobStatus | None, events: Sequence[Mapping[str, Any]]) -> list[JobEvent]:
    """Return the events of the master and of the operator, oldest first, each once.

    They are those of the master's status, and the older ones that Kubernetes still keeps. Only
    events of the status have causes that can be followed. The operator's events get negative
    numbers.

    Args:
        status: the master's status; None if there is none.
        events: Kubernetes events about the job.
    """
    found = {event.id: event for event in (status.events if status is not None else [])}
    for number, obj in enumerate(events, start=1):
        by_master = _component(obj) == names.ROLE_MASTER
        tail = obj["metadata"]["name"].rpartition(".")[2]
        event_id = int(tail) if by_master and tail.isdecimal() else -number
        at = unix_seconds(_seen_at(obj)) or 0.0
        count = int(obj.get("count") or 1)
        event = JobEvent(
            id=event_id,
            at=at,
            type="Warning" if obj.get("type") == "Warning" else "Normal",
            reason=obj.get("reason") or "",
            message=(obj.get("message") or "") + (f" ({count} times)" if count > 1 else ""),
        )
        found.setdefault(event_id, event)
    return sorted(found.values(), key=lambda e: (e.at, e.id))


def waiting_pod(obj: Mapping[str, Any]) -> str:
    """Return the name of a Pod of a job for which no host has a place; empty if there is none."""
    for condition in read_conditions(obj):
        if (condition.type, condition.status) == (ConditionType.UNSCHEDULABLE, "True"):
            node, found, _ = condition.message.partition(": ")
            if found and re.fullmatch(names.NODE_ID, node):
                return f"{obj['metadata']['name']}-{node}"
    return ""


def new_hosts(pod: str, events: Sequence[Mapping[str, Any]], since: float) -> str:
    """Return what a program that makes hosts has last said of a Pod; empty if none has.

    Such programs are the cluster autoscaler of Kubernetes, and Karpenter.

    Args:
        pod: name of the Pod.
        events: Kubernetes events about a Pod of this name.
        since: time in Unix seconds; older events are about the Pod of an earlier job.
    """
    times = {
        seen_at: event
        for event in events
        if _component(event) in MAKERS_OF_HOSTS
        and (seen_at := unix_seconds(_seen_at(event)) or 0.0) >= since
    }
    if not times:
        return ""
    last = times[max(times)]
    return f"{pod}: {_component(last)}: {last.get('reason') or ''}: {last.get('message') or ''}"


def _seen_at(event: Mapping[str, Any]) -> str | None:
    """Return when an event was last seen."""
    return event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")


def _component(event: Mapping[str, Any]) -> str:
    """Return the name of the program that reported an event."""
    source = (event.get("source") or {}).get("component")
    return str(source or event.get("reportingComponent") or "")
