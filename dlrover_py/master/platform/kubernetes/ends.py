"""The ends of Pods, as pure code: what has ended a Pod, and what that costs the job.

:data:`ENDS` is a table that is read from the top; the first row that fits counts. The reasons are
those of Kubernetes 1.34: of the kubelet (``pkg/kubelet``: lifecycle, eviction, preemption,
nodeshutdown, cm, sysctl), of the condition ``DisruptionTarget`` (scheduler and controllers), and of
containers (kubelet and containerd). docs/operations.md shows the table.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dlrover_py.protocol.names import MAIN_CONTAINER

Obj = dict[str, Any]
"""A Kubernetes object, or a part of it."""


class Budget(StrEnum):
    """The budget that the end of a Pod counts against."""

    NONE = "nothing"  # the end is unrelated to the training; the node is replaced
    REPLACEMENT = "a replacement"  # one of the `restartCount` replacements of a place


@dataclass(frozen=True, slots=True)
class PodEndSigns:
    """Information about a Pod's end in the Pod object."""

    disruption: str = ""
    """Reason of the condition ``DisruptionTarget``; empty unless the condition is True."""
    deleted: bool = False
    """Whether the Pod has a ``deletionTimestamp``."""
    reason: str = ""
    """``status.reason``."""
    message: str = ""
    """``status.message``."""
    began: bool = False
    """Whether a container of the Pod has run."""
    main: Obj | None = None
    """State ``terminated`` of the main container; None if it has not ended."""
    init: Obj | None = None
    """State ``terminated`` of the init container that failed; None if none has failed.

    Native sidecars, which are init containers that are always restarted, are not considered."""


@dataclass(frozen=True, slots=True)
class PodEndRule:
    """One row of the table: a way in which a Pod can end."""

    sign: str
    """The sign of this end, as Markdown."""
    ended_by: str
    """The component or person that ended the Pod."""
    fits: Callable[[PodEndSigns], bool]
    """Function that returns whether the row fits."""
    budget: Budget
    avoids_host: bool = False
    """Whether new nodes avoid the Pod's host for a while; the scheduler does not know the fault."""


@dataclass(frozen=True, slots=True)
class PodEnd:
    """The end of one Pod."""

    rule: PodEndRule
    """The row of the table that fits."""
    why: str
    """The reason, in words."""
    exit_code: int | None
    """Exit code of the container that ended the Pod; None if no container ended it."""
    container: str
    """Name of the container whose log may contain more."""
    by_agent: bool
    """Whether the exit code is that of the agent."""
    termination_message: str
    """The termination message of the agent's container."""
    out_of_memory: str
    """Description of an out-of-memory kill by the kernel, with the limit; empty if there was
    none."""


def _disrupted(*reasons: str) -> Callable[[PodEndSigns], bool]:
    """Return a test for these reasons of the condition ``DisruptionTarget``."""
    return lambda signs: signs.disruption in reasons


def _says(*reasons: str) -> Callable[[PodEndSigns], bool]:
    """Return a test for these values of ``status.reason``."""
    return lambda signs: signs.reason in reasons


def _is_over_its_own_limit(signs: PodEndSigns) -> bool:
    """Return whether the kubelet evicted the Pod because of the Pod's own storage limit.

    The kubelet then writes `exceeds the total limit of containers`, `exceeded its local ephemeral
    storage limit`, or `exceeds the limit` (of an emptyDir). When the host itself is short of
    storage, the kubelet writes `low on resource`.
    """
    message = signs.message
    return signs.reason == "Evicted" and "exceed" in message and "low on resource" not in message


def _main(*reasons: str) -> Callable[[PodEndSigns], bool]:
    """Return a test for these reasons of the main container's end."""
    return lambda signs: signs.main is not None and signs.main.get("reason") in reasons


def _code(code: int) -> Callable[[PodEndSigns], bool]:
    """Return a test for this exit code of the main container."""
    return lambda signs: signs.main is not None and signs.main.get("exitCode") == code


LOST = ("ContainerStatusUnknown", "Unknown")
"""Reasons of a container's end after a restart of its host, from kubelets and from containerd."""

ENDS: tuple[PodEndRule, ...] = (
    # --- Removed on purpose ---
    PodEndRule(
        "`DisruptionTarget`: `PreemptionByScheduler`",
        "scheduler: a Pod of higher priority needs its place",
        _disrupted("PreemptionByScheduler"),
        Budget.NONE,
    ),
    PodEndRule(
        "`DisruptionTarget`: `EvictionByEvictionAPI`",
        "`kubectl drain`, or another client of the eviction API",
        _disrupted("EvictionByEvictionAPI"),
        Budget.NONE,
    ),
    PodEndRule(
        "`DisruptionTarget`: `DeletionByTaintManager`",
        "taint eviction controller: its host has a taint that it does not tolerate",
        _disrupted("DeletionByTaintManager"),
        Budget.NONE,
    ),
    PodEndRule(
        "`DisruptionTarget`: `DeletionByPodGC`",
        "Pod garbage collector: its host is gone",
        _disrupted("DeletionByPodGC"),
        Budget.NONE,
    ),
    PodEndRule(
        "`DisruptionTarget`: `TerminationByKubelet`",
        "kubelet: its host is low on a resource, shuts down, or has a critical Pod to run",
        _disrupted("TerminationByKubelet"),
        Budget.NONE,
    ),
    PodEndRule(
        "`DisruptionTarget`: another reason",
        "a controller",
        lambda signs: bool(signs.disruption),
        Budget.NONE,
    ),
    PodEndRule("deleted", "a person, a controller, the master", lambda s: s.deleted, Budget.NONE),
    # --- Ended by the kubelet ---
    PodEndRule(
        "`Evicted`, because it uses more than its own limit of storage",
        "kubelet",
        _is_over_its_own_limit,
        Budget.REPLACEMENT,
    ),
    PodEndRule(
        "`Evicted`", "kubelet: its host is low on a resource", _says("Evicted"), Budget.NONE
    ),
    PodEndRule(
        "`Preempting`", "kubelet: for a critical Pod", _says("Preempting", "Preempted"), Budget.NONE
    ),
    PodEndRule(
        "`Terminated`, `Shutdown`, `NodeShutdown`",
        "kubelet: its host shuts down",
        _says("Terminated", "Shutdown", "NodeShutdown"),
        Budget.NONE,
    ),
    PodEndRule("`NodeLost`", "node controller: its host is lost", _says("NodeLost"), Budget.NONE),
    PodEndRule(
        "`DeadlineExceeded`",
        "kubelet: the template's `activeDeadlineSeconds`",
        _says("DeadlineExceeded"),
        Budget.REPLACEMENT,
    ),
    # --- Refused by the kubelet before a container began ---
    PodEndRule(
        "`OutOf…` (`OutOfcpu`, `OutOfnvidia.com/gpu`, `OutOfpods`)",
        "kubelet: less is free than the scheduler assumed",
        lambda signs: signs.reason.startswith("OutOf"),
        Budget.NONE,
    ),
    PodEndRule(
        "`NodeAffinity`, `NodeName`, `NodePorts`, `NodeUnschedulable`, `TaintToleration`",
        "kubelet: its host has changed since the scheduler chose it",
        _says("NodeAffinity", "NodeName", "NodePorts", "NodeUnschedulable", "TaintToleration"),
        Budget.NONE,
    ),
    PodEndRule(
        "`VolumeAttachmentLimitExceeded`",
        "kubelet: its host cannot take another volume",
        _says("VolumeAttachmentLimitExceeded"),
        Budget.NONE,
    ),
    PodEndRule(
        "`UnexpectedAdmissionError`",
        "kubelet: often a device plugin (a GPU that is not healthy)",
        _says("UnexpectedAdmissionError"),
        Budget.NONE,
        avoids_host=True,
    ),
    PodEndRule(
        "`TopologyAffinityError`, `SMTAlignmentError`",
        "kubelet: CPUs or devices are not free in the form that its policy requires",
        _says("TopologyAffinityError", "SMTAlignmentError"),
        Budget.NONE,
        avoids_host=True,
    ),
    PodEndRule(
        "`SysctlForbidden`, `AppArmor`, `PodOSNotSupported`, `PodLevelResourcesNotSupported`, "
        "`SupplementalGroupsPolicyNotSupported`, `InitContainerRestartPolicyForbidden`",
        "kubelet: the template requests a feature that it does not allow or know",
        _says(
            *("SysctlForbidden", "AppArmor", "PodOSNotSupported", "PodLevelResourcesNotSupported"),
            *("SupplementalGroupsPolicyNotSupported", "InitContainerRestartPolicyForbidden"),
        ),
        Budget.REPLACEMENT,
        avoids_host=True,
    ),
    PodEndRule(
        "another reason, and no container started",
        "kubelet: it refused the Pod",
        lambda signs: bool(signs.reason) and not signs.began,
        Budget.NONE,
        avoids_host=True,
    ),
    # --- Ended with the main container ---
    PodEndRule(
        "main container: `ContainerStatusUnknown`, or `Unknown`",
        "kubelet or containerd: its host was restarted",
        _main(*LOST),
        Budget.NONE,
    ),
    PodEndRule(
        "main container: `OOMKilled`",
        "kernel: the container's memory limit",
        _main("OOMKilled"),
        Budget.REPLACEMENT,
    ),
    PodEndRule(
        "main container: `StartError`, `ContainerCannotRun`",
        "containerd: the command cannot be started",
        _main("StartError", "ContainerCannotRun"),
        Budget.REPLACEMENT,
    ),
    PodEndRule(
        "main container: exit code 2",
        "its agent. The job fails (`InvalidCommand`) if no round was formed yet, and the last "
        "lines are from `elastic-run`, which has refused its command line, or cannot be read",
        _code(2),
        Budget.REPLACEMENT,
    ),
    PodEndRule(
        "main container: exit code 0",
        "its agent. A node that never joined the job is not replaced (`NeverJoined`)",
        _code(0),
        Budget.REPLACEMENT,
    ),
    PodEndRule(
        "main container: another exit code",
        "its agent",
        lambda signs: signs.main is not None,
        Budget.REPLACEMENT,
    ),
    # --- Ended before the main container began ---
    PodEndRule(
        "init container: `ContainerStatusUnknown`, or `Unknown`",
        "kubelet or containerd: its host was restarted",
        lambda signs: signs.init is not None and signs.init.get("reason") in LOST,
        Budget.NONE,
    ),
    PodEndRule(
        "init container: any exit code but 0 (the end of a native sidecar does not end the Pod)",
        "the init container",
        lambda signs: signs.init is not None,
        Budget.REPLACEMENT,
    ),
    PodEndRule("none of these", "unknown", lambda _: True, Budget.REPLACEMENT),
)


def end_of(obj: Obj) -> PodEnd | None:
    """Return how a Pod has ended; None if it has not.

    For the job, a Pod has ended once its main container has, whatever its other containers do. A
    Pod without a report about its main container has ended when its phase is Succeeded or Failed.
    """
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    main = (main_status(spec, status).get("state") or {}).get("terminated")
    if main is None and status.get("phase") not in ("Succeeded", "Failed"):
        return None
    failed = _failed_init(spec, status) if main is None else {}
    signs = PodEndSigns(
        disruption=_disruption(status),
        deleted=bool(obj["metadata"].get("deletionTimestamp")),
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        began=any(_began(container) for container in _statuses(status)),
        main=main,
        init=(failed.get("state") or {}).get("terminated"),
    )
    rule = next(rule for rule in ENDS if rule.fits(signs))
    container = failed.get("name") or main_name(spec)
    dead = main or signs.init or {}
    memory = _limit(spec, container) if dead.get("reason") == "OOMKilled" else ""
    causes, code = [], None
    if signs.reason or not (main or failed):
        causes.append(f"its Pod ended: {signs.reason or status['phase']}")
        causes[0] += f": {signs.message}" if signs.message else ""
    if main is not None:
        code = main.get("exitCode")
        causes.append(f"its agent {_ended_with(main)}")
    elif signs.init is not None and not signs.reason:
        code = signs.init.get("exitCode")
        causes.append(f"its init container {failed['name']} {_ended_with(signs.init)}")
    return PodEnd(
        rule=rule,
        why="; ".join([*causes, memory] if memory else causes),
        exit_code=code,
        container=container,
        by_agent=main is not None,
        termination_message=((main or {}).get("message") or "").strip(),
        out_of_memory=memory,
    )


def native_sidecars(spec: Obj) -> set[str]:
    """Return the names of the init containers that run beside the others (Kubernetes: KEP-753)."""
    inits: Iterable[Obj] = spec.get("initContainers") or ()
    return {str(c.get("name")) for c in inits if c.get("restartPolicy") == "Always"}


def main_name(spec: Obj) -> str:
    """Return the name of the agent's container."""
    containers = spec.get("containers") or [{}]
    listed = [str(c.get("name", "")) for c in containers]
    return MAIN_CONTAINER if MAIN_CONTAINER in listed else listed[0]


def main_status(spec: Obj, status: Obj) -> Obj:
    """Return the status of the agent's container; empty if the kubelet has not reported one."""
    name = main_name(spec)
    statuses: list[Obj] = status.get("containerStatuses") or []
    return next((c for c in statuses if c.get("name") == name), {})


def _statuses(status: Obj) -> list[Obj]:
    """Return the status of all containers, init containers first."""
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _began(container: Obj) -> bool:
    """Return whether the container runs or has run."""
    states = (container.get("state") or {}, container.get("lastState") or {})
    return any("running" in state or "terminated" in state for state in states)


def _disruption(status: Obj) -> str:
    """Return the reason of the condition ``DisruptionTarget``; empty unless it is True."""
    conditions = status.get("conditions") or ()
    found = (c for c in conditions if c.get("type") == "DisruptionTarget")
    return next((c.get("reason") or "?" for c in found if c.get("status") == "True"), "")


def _failed_init(spec: Obj, status: Obj) -> Obj:
    """Return the init container that ended the Pod before its agent ran; empty if there is none."""
    natives = native_sidecars(spec)
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode") and container.get("name") not in natives:
            return dict(container)
    return {}


def _limit(spec: Obj, name: str) -> str:
    """Describe an out-of-memory kill of the container, with its memory limit or the lack of one."""
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    found: Obj = next((c for c in containers if c.get("name") == name), {})
    limit = ((found.get("resources") or {}).get("limits") or {}).get("memory")
    if limit is None:
        return f"out of memory: container {name} has no memory limit, and its host had none left"
    return f"out of memory: the memory limit of container {name} is {limit}"


def _ended_with(ended: Obj) -> str:
    """Describe the exit code and reason of a container's end."""
    text = f"ended with exit code {ended.get('exitCode')}"
    reason = ended.get("reason")
    return text if reason in (None, "Completed", "Error") else f"{text} ({reason})"
