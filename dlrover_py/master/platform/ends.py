"""How Pods end, PURE: who has ended one, and what that costs the job.

:data:`ENDS` is the one table. It is read from the top; the first row that fits counts. The reasons
are those of Kubernetes 1.34: of the kubelet (``pkg/kubelet``: lifecycle, eviction, preemption,
nodeshutdown, cm, sysctl), of the condition ``DisruptionTarget`` (scheduler and controllers), and of
containers (kubelet and containerd). docs/operations.md shows the table.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dlrover_py.protocol.names import MAIN_CONTAINER

Obj = dict[str, Any]


class Budget(StrEnum):
    """What an end is charged to."""

    NONE = "nothing"  # it says nothing of the training; the node is replaced
    REPLACEMENT = "a replacement"  # one of the `restartCount` that a place has


@dataclass(frozen=True, slots=True)
class Signs:
    """What a Pod's object tells of its end."""

    disruption: str = ""
    """Reason of its condition ``DisruptionTarget``; empty if that is not True."""
    deleted: bool = False
    """It has a ``deletionTimestamp``."""
    reason: str = ""
    """``status.reason``."""
    message: str = ""
    """``status.message``."""
    began: bool = False
    """A container of it has run."""
    main: Obj | None = None
    """State ``terminated`` of the main container; None if that has not ended."""
    init: Obj | None = None
    """The same of the init container that failed; None if none has. A native sidecar, which is an
    init container that is always restarted, is none of them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A way to end."""

    sign: str
    """What is seen of it, as Markdown."""
    by: str
    """Who has ended the Pod."""
    fits: Callable[[Signs], bool]
    budget: Budget
    avoids_host: bool = False
    """New nodes keep off its host for a while: the scheduler does not know what is wrong there."""


@dataclass(frozen=True, slots=True)
class End:
    """How a Pod has ended."""

    row: Row
    why: str
    exit_code: int | None
    """Of the container that ended it; None if it was none."""
    speaker: str
    """The container whose log may say more."""
    by_agent: bool
    """The exit code is that of the agent."""
    words: str
    """What the agent's container left as its termination message."""
    out_of_memory: str
    """That the kernel killed it for want of memory, with the limit; empty if it did not."""


def _disrupted(*reasons: str) -> Callable[[Signs], bool]:
    return lambda signs: signs.disruption in reasons


def _says(*reasons: str) -> Callable[[Signs], bool]:
    return lambda signs: signs.reason in reasons


def _is_over_its_own_limit(signs: Signs) -> bool:
    """A kubelet's words: `exceeds the total limit of containers`, `exceeded its local ephemeral
    storage limit`, `exceeds the limit` (of an emptyDir). Under pressure it says `low on resource`.
    """
    words = signs.message
    return signs.reason == "Evicted" and "exceed" in words and "low on resource" not in words


def _main(*reasons: str) -> Callable[[Signs], bool]:
    return lambda signs: signs.main is not None and signs.main.get("reason") in reasons


def _code(code: int) -> Callable[[Signs], bool]:
    return lambda signs: signs.main is not None and signs.main.get("exitCode") == code


LOST = ("ContainerStatusUnknown", "Unknown")
"""Why a container ended, where its host was restarted: of kubelets, and of containerd."""

ENDS: tuple[Row, ...] = (
    # --- taken away on purpose ---
    Row(
        "`DisruptionTarget`: `PreemptionByScheduler`",
        "scheduler: a Pod of higher priority needs its place",
        _disrupted("PreemptionByScheduler"),
        Budget.NONE,
    ),
    Row(
        "`DisruptionTarget`: `EvictionByEvictionAPI`",
        "`kubectl drain`, or who else asks for an eviction",
        _disrupted("EvictionByEvictionAPI"),
        Budget.NONE,
    ),
    Row(
        "`DisruptionTarget`: `DeletionByTaintManager`",
        "taint eviction controller: its host has a taint that it does not tolerate",
        _disrupted("DeletionByTaintManager"),
        Budget.NONE,
    ),
    Row(
        "`DisruptionTarget`: `DeletionByPodGC`",
        "Pod garbage collector: its host is gone",
        _disrupted("DeletionByPodGC"),
        Budget.NONE,
    ),
    Row(
        "`DisruptionTarget`: `TerminationByKubelet`",
        "kubelet: its host runs short of something, shuts down, or has a critical Pod to run",
        _disrupted("TerminationByKubelet"),
        Budget.NONE,
    ),
    Row(
        "`DisruptionTarget`: another reason",
        "a controller",
        lambda signs: bool(signs.disruption),
        Budget.NONE,
    ),
    Row("deleted", "a person, a controller, the master", lambda s: s.deleted, Budget.NONE),
    # --- ended by its kubelet ---
    Row(
        "`Evicted`, as it uses more than its own limit of storage",
        "kubelet",
        _is_over_its_own_limit,
        Budget.REPLACEMENT,
    ),
    Row("`Evicted`", "kubelet: its host runs short", _says("Evicted"), Budget.NONE),
    Row(
        "`Preempting`", "kubelet: for a critical Pod", _says("Preempting", "Preempted"), Budget.NONE
    ),
    Row(
        "`Terminated`, `Shutdown`, `NodeShutdown`",
        "kubelet: its host shuts down",
        _says("Terminated", "Shutdown", "NodeShutdown"),
        Budget.NONE,
    ),
    Row("`NodeLost`", "node controller: its host is lost", _says("NodeLost"), Budget.NONE),
    Row(
        "`DeadlineExceeded`",
        "kubelet: the template's `activeDeadlineSeconds`",
        _says("DeadlineExceeded"),
        Budget.REPLACEMENT,
    ),
    # --- refused by its kubelet before a container began ---
    Row(
        "`OutOf…` (`OutOfcpu`, `OutOfnvidia.com/gpu`, `OutOfpods`)",
        "kubelet: less is free than the scheduler believed",
        lambda signs: signs.reason.startswith("OutOf"),
        Budget.NONE,
    ),
    Row(
        "`NodeAffinity`, `NodeName`, `NodePorts`, `NodeUnschedulable`, `TaintToleration`",
        "kubelet: its host has changed since the scheduler chose it",
        _says("NodeAffinity", "NodeName", "NodePorts", "NodeUnschedulable", "TaintToleration"),
        Budget.NONE,
    ),
    Row(
        "`VolumeAttachmentLimitExceeded`",
        "kubelet: its host cannot take another volume",
        _says("VolumeAttachmentLimitExceeded"),
        Budget.NONE,
    ),
    Row(
        "`UnexpectedAdmissionError`",
        "kubelet: often a device plugin (a GPU that is not healthy)",
        _says("UnexpectedAdmissionError"),
        Budget.NONE,
        avoids_host=True,
    ),
    Row(
        "`TopologyAffinityError`, `SMTAlignmentError`",
        "kubelet: CPUs or devices are not free in the form that its policy wants",
        _says("TopologyAffinityError", "SMTAlignmentError"),
        Budget.NONE,
        avoids_host=True,
    ),
    Row(
        "`SysctlForbidden`, `AppArmor`, `PodOSNotSupported`, `PodLevelResourcesNotSupported`, "
        "`SupplementalGroupsPolicyNotSupported`, `InitContainerRestartPolicyForbidden`",
        "kubelet: the template asks for what it does not allow or know",
        _says(
            *("SysctlForbidden", "AppArmor", "PodOSNotSupported", "PodLevelResourcesNotSupported"),
            *("SupplementalGroupsPolicyNotSupported", "InitContainerRestartPolicyForbidden"),
        ),
        Budget.REPLACEMENT,
        avoids_host=True,
    ),
    Row(
        "another reason, and no container began",
        "kubelet: it refused the Pod",
        lambda signs: bool(signs.reason) and not signs.began,
        Budget.NONE,
        avoids_host=True,
    ),
    # --- ended with its main container ---
    Row(
        "main container: `ContainerStatusUnknown`, or `Unknown`",
        "kubelet or containerd: its host was restarted",
        _main(*LOST),
        Budget.NONE,
    ),
    Row(
        "main container: `OOMKilled`",
        "kernel: the container's memory limit",
        _main("OOMKilled"),
        Budget.REPLACEMENT,
    ),
    Row(
        "main container: `StartError`, `ContainerCannotRun`",
        "containerd: the command cannot be started",
        _main("StartError", "ContainerCannotRun"),
        Budget.REPLACEMENT,
    ),
    Row(
        "main container: exit code 2",
        "its agent. If no round was formed yet, `elastic-run` has refused its command line: the "
        "job fails (`InvalidCommand`)",
        _code(2),
        Budget.REPLACEMENT,
    ),
    Row(
        "main container: exit code 0",
        "its agent. If it never joined the job it is not replaced (`NeverJoined`)",
        _code(0),
        Budget.REPLACEMENT,
    ),
    Row(
        "main container: another exit code",
        "its agent",
        lambda signs: signs.main is not None,
        Budget.REPLACEMENT,
    ),
    # --- ended before its main container began ---
    Row(
        "init container: `ContainerStatusUnknown`, or `Unknown`",
        "kubelet or containerd: its host was restarted",
        lambda signs: signs.init is not None and signs.init.get("reason") in LOST,
        Budget.NONE,
    ),
    Row(
        "init container: any exit code but 0 (a native sidecar's end is none of the Pod)",
        "the init container",
        lambda signs: signs.init is not None,
        Budget.REPLACEMENT,
    ),
    Row("none of these", "unknown", lambda _: True, Budget.REPLACEMENT),
)


def end_of(obj: Obj) -> End | None:
    """How a Pod has ended; None if it has not.

    A Pod has ended for the job once its main container has, whatever its other containers do.
    """
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    main = (main_status(spec, status).get("state") or {}).get("terminated")
    if main is None and status.get("phase") not in ("Succeeded", "Failed"):
        return None
    failed = _failed_init(spec, status) if main is None else {}
    signs = Signs(
        disruption=_disruption(status),
        deleted=bool(obj["metadata"].get("deletionTimestamp")),
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        began=any(_began(container) for container in _statuses(status)),
        main=main,
        init=(failed.get("state") or {}).get("terminated"),
    )
    row = next(row for row in ENDS if row.fits(signs))
    speaker = failed.get("name") or main_name(spec)
    dead = main or signs.init or {}
    memory = _limit(spec, speaker) if dead.get("reason") == "OOMKilled" else ""
    said, code = [], None
    if signs.reason or not (main or failed):
        said.append(f"its Pod ended: {signs.reason or status['phase']}")
        said[0] += f": {signs.message}" if signs.message else ""
    if main is not None:
        code = main.get("exitCode")
        said.append(f"its agent {_ended_with(main)}")
    elif signs.init is not None and not signs.reason:
        code = signs.init.get("exitCode")
        said.append(f"its init container {failed['name']} {_ended_with(signs.init)}")
    return End(
        row=row,
        why="; ".join([*said, memory] if memory else said),
        exit_code=code,
        speaker=speaker,
        by_agent=main is not None,
        words=((main or {}).get("message") or "").strip(),
        out_of_memory=memory,
    )


def native_sidecars(spec: Obj) -> set[str]:
    """Names of the init containers that run on beside the others (Kubernetes: KEP-753)."""
    inits: Iterable[Obj] = spec.get("initContainers") or ()
    return {str(c.get("name")) for c in inits if c.get("restartPolicy") == "Always"}


def main_name(spec: Obj) -> str:
    """Name of the container that the agent is in."""
    containers = spec.get("containers") or [{}]
    listed = [str(c.get("name", "")) for c in containers]
    return MAIN_CONTAINER if MAIN_CONTAINER in listed else listed[0]


def main_status(spec: Obj, status: Obj) -> Obj:
    """What the kubelet says of that container; empty if it has said nothing."""
    name = main_name(spec)
    statuses: list[Obj] = status.get("containerStatuses") or []
    return next((c for c in statuses if c.get("name") == name), {})


def _statuses(status: Obj) -> list[Obj]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _began(container: Obj) -> bool:
    states = (container.get("state") or {}, container.get("lastState") or {})
    return any("running" in state or "terminated" in state for state in states)


def _disruption(status: Obj) -> str:
    conditions = status.get("conditions") or ()
    found = (c for c in conditions if c.get("type") == "DisruptionTarget")
    return next((c.get("reason") or "?" for c in found if c.get("status") == "True"), "")


def _failed_init(spec: Obj, status: Obj) -> Obj:
    """The init container that has ended the Pod before its agent ran; empty if none has."""
    natives = native_sidecars(spec)
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode") and container.get("name") not in natives:
            return dict(container)
    return {}


def _limit(spec: Obj, name: str) -> str:
    """The words for a container that the kernel killed for want of memory."""
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    found: Obj = next((c for c in containers if c.get("name") == name), {})
    limit = ((found.get("resources") or {}).get("limits") or {}).get("memory")
    if limit is None:
        return f"out of memory: container {name} has no limit, and its host had none left"
    return f"out of memory: the limit of container {name} is {limit}"


def _ended_with(ended: Obj) -> str:
    words = f"ended with exit code {ended.get('exitCode')}"
    reason = ended.get("reason")
    return words if reason in (None, "Completed", "Error") else f"{words} ({reason})"
