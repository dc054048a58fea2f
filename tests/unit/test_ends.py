"""How Pods end: each row of the table, by a Pod as the cluster writes it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.events import NodeEnded
from dlrover_py.master.platform.kubernetes.ends import ENDS, Budget, PodEndRule, end_of
from dlrover_py.master.platform.kubernetes.pods import fact, view
from dlrover_py.protocol.names import NodeId

DOC = Path(__file__).parents[2] / "docs/operations.md"
Obj = dict[str, Any]

RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
WAITING = {"state": {"waiting": {"reason": "PodInitializing"}}}


def exited(code: int, reason: str = "Error") -> Obj:
    return {"state": {"terminated": {"exitCode": code, "reason": reason}}}


def pod(
    main: Obj | None = None, *, deleted: bool = False, phase: str = "Failed", **more: Any
) -> Obj:
    """A Pod with an init container, a native sidecar and an ordinary one.

    Args:
        main: state of the main container; None if its kubelet says nothing of any container.
        deleted: whether it was deleted.
        phase: its phase.
        more: ``fetch`` and ``mesh``, states of the init container and of the native sidecar; the
            rest is of its status.
    """
    fetch, mesh = more.pop("fetch", exited(0, "Completed")), more.pop("mesh", exited(143))
    if main is not None:
        more["containerStatuses"] = [{"name": "logs", **RUNNING}, {"name": "main", **main}]
        more["initContainerStatuses"] = [{"name": "mesh", **mesh}, {"name": "fetch", **fetch}]
    return {
        "metadata": {
            "name": "x-n0",
            "uid": "p",
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}),
        },
        "spec": {
            "nodeName": "h1",
            "initContainers": [{"name": "mesh", "restartPolicy": "Always"}, {"name": "fetch"}],
            "containers": [{"name": "logs"}, {"name": "main"}],
        },
        "status": {"phase": phase, **more},
    }


def disrupted(reason: str) -> Obj:
    told = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}
    return pod(exited(143), conditions=[told])


def refused(*reasons: str) -> list[Obj]:
    """As a kubelet's ``rejectPod`` leaves it; another version of it may keep what it knew."""
    bare = [pod(reason=r, message="Pod was rejected: m") for r in reasons]
    kept = [pod(WAITING, reason=r, message="m", mesh=exited(2)) for r in reasons]
    return bare + kept


PRESSURE = "The node was low on resource: memory. "

EXAMPLES: dict[str, list[Obj]] = {
    "`DisruptionTarget`: `PreemptionByScheduler`": [disrupted("PreemptionByScheduler")],
    "`DisruptionTarget`: `EvictionByEvictionAPI`": [disrupted("EvictionByEvictionAPI")],
    "`DisruptionTarget`: `DeletionByTaintManager`": [disrupted("DeletionByTaintManager")],
    "`DisruptionTarget`: `DeletionByPodGC`": [disrupted("DeletionByPodGC")],
    "`DisruptionTarget`: `TerminationByKubelet`": [disrupted("TerminationByKubelet")],
    "`DisruptionTarget`: another reason": [disrupted("Later"), disrupted("")],
    "deleted": [pod(exited(137), deleted=True), pod(WAITING, fetch=exited(2), deleted=True)],
    "`Evicted`, because it uses more than its own limit of storage": [
        pod(exited(137), reason="Evicted", message=words)
        for words in (
            'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ',
            "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
            'Container main exceeded its local ephemeral storage limit "1Gi". ',
        )
    ],
    "`Evicted`": [
        pod(WAITING, reason="Evicted", message=PRESSURE, mesh=exited(137)),
        pod(exited(137), reason="Evicted", message=PRESSURE
            + "Container main was using 9Gi, request is 1Gi, has larger consumption of memory. "),
        pod(reason="Evicted", message="The node had condition: [DiskPressure]. "),
    ],
    "`Preempting`": [pod(exited(137), reason="Preempting"), pod(reason="Preempted")],
    "`Terminated`, `Shutdown`, `NodeShutdown`": [
        pod(exited(137), reason="Terminated"), pod(reason="Shutdown"), *refused("NodeShutdown")
    ],
    "`NodeLost`": [pod(reason="NodeLost")],
    "`DeadlineExceeded`": [
        pod(exited(137), reason="DeadlineExceeded"),
        pod(WAITING, reason="DeadlineExceeded", mesh=exited(2)),
    ],
    "`OutOf…` (`OutOfcpu`, `OutOfnvidia.com/gpu`, `OutOfpods`)": refused(
        "OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfephemeral-storage", "OutOfnvidia.com/gpu"
    ),
    "`NodeAffinity`, `NodeName`, `NodePorts`, `NodeUnschedulable`, `TaintToleration`": refused(
        "NodeAffinity", "NodeName", "NodePorts", "NodeUnschedulable", "TaintToleration"
    ),
    "`VolumeAttachmentLimitExceeded`": refused("VolumeAttachmentLimitExceeded"),
    "`UnexpectedAdmissionError`": refused("UnexpectedAdmissionError"),
    "`TopologyAffinityError`, `SMTAlignmentError`": refused(
        "TopologyAffinityError", "SMTAlignmentError"
    ),
    "`SysctlForbidden`, `AppArmor`, `PodOSNotSupported`, `PodLevelResourcesNotSupported`, "
    "`SupplementalGroupsPolicyNotSupported`, `InitContainerRestartPolicyForbidden`": refused(
        *("SysctlForbidden", "AppArmor", "PodOSNotSupported", "PodLevelResourcesNotSupported"),
        *("SupplementalGroupsPolicyNotSupported", "InitContainerRestartPolicyForbidden"),
    ),
    "another reason, and no container started": [
        pod(reason=r)
        for r in (
            *("InvalidNodeInfo", "PodOSSelectorNodeLabelDoesNotMatch", "UnknownReason"),
            *("UnexpectedPredicateFailureType", "OfALaterKubernetes"),
        )
    ],
    "main container: `ContainerStatusUnknown`, or `Unknown`": [
        pod(exited(137, "ContainerStatusUnknown")), pod(exited(255, "Unknown"))
    ],
    "main container: `OOMKilled`": [pod(exited(137, "OOMKilled"), mesh=exited(2))],
    "main container: `StartError`, `ContainerCannotRun`": [
        pod(exited(128, "StartError")), pod(exited(127, "ContainerCannotRun"))
    ],
    "main container: exit code 2": [pod(exited(2)), pod(exited(2), phase="Running")],
    "main container: exit code 0": [
        pod(exited(0, "Completed"), phase="Running"), pod(exited(0, "Completed"), phase="Succeeded")
    ],
    "main container: another exit code": [
        pod(exited(1)), pod(exited(1), phase="Running"),
        pod(exited(137), mesh=exited(2)),
        pod(exited(1), reason="OfALaterKubernetes"),
    ],
    "init container: `ContainerStatusUnknown`, or `Unknown`": [
        pod(WAITING, fetch=exited(137, "ContainerStatusUnknown")),
        pod(WAITING, fetch=exited(255, "Unknown")),
    ],
    "init container: any exit code but 0 (the end of a native sidecar does not end the Pod)": [
        pod(WAITING, fetch=exited(code, reason))
        for code, reason in ((1, "Error"), (2, "Error"), (137, "OOMKilled"), (128, "StartError"))
    ],
    "none of these": [pod(), pod(WAITING), pod(phase="Succeeded")],
}  # fmt: skip


def named(sign: str) -> PodEndRule:
    return next(row for row in ENDS if row.sign == sign)


@pytest.mark.parametrize(
    ("sign", "obj"), [(sign, obj) for sign, objs in EXAMPLES.items() for obj in objs]
)
def test_a_pod_ends_as_the_row_says(sign: str, obj: Obj) -> None:
    end = end_of(obj)
    assert end is not None
    assert end.rule.sign == sign
    told = fact(NodeId("n0"), view(obj))
    assert isinstance(told, NodeEnded)
    assert told.free == (named(sign).budget is Budget.NONE)
    assert told.refused_by == ("h1" if named(sign).avoids_host else "")
    status = obj["status"]
    for words in (status.get("reason"), status.get("message")):
        assert (words or "") in told.why
    main = [c for c in status.get("containerStatuses", ()) if c["name"] == "main"]
    dead = main[0]["state"].get("terminated") if main else None
    assert told.exit_code == (dead["exitCode"] if dead else None), "of its agent, and of no other"
    assert "mesh" not in told.why, "a native sidecar ends with the others"


def test_each_row_has_an_example_and_one_place() -> None:
    assert list(EXAMPLES) == [row.sign for row in ENDS]


def test_the_table_stands_in_the_docs() -> None:
    _, _, after = DOC.read_text().partition("\n## How Pods end\n")
    section = after.partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        f"| {r.sign} | {r.ended_by} | {r.budget.value} | {'yes' if r.avoids_host else ''} |"
        for r in ENDS
    ]


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
def test_a_pod_whose_main_container_has_not_ended_has_not(phase: str) -> None:
    """Not by its sidecars' end, nor by that of an init container that is tried again."""
    assert end_of(pod(RUNNING, phase=phase, mesh=exited(2))) is None
    assert end_of(pod(WAITING, phase=phase, fetch=exited(2))) is None


def test_an_init_container_is_named_and_its_log_has_more() -> None:
    obj = pod(WAITING, fetch=exited(137, "OOMKilled"))
    end = end_of(obj)
    assert end is not None
    assert end.why.startswith("its init container fetch ended with exit code 137 (OOMKilled)")
    assert (end.exit_code, end.container, end.by_agent) == (137, "fetch", False)


state = st.one_of(st.just(WAITING), st.just(RUNNING), st.builds(exited, st.integers(0, 255)))


@given(state, state, state, st.sampled_from(["", "Evicted", "OutOfcpu", "New"]), st.booleans())
def test_only_the_main_container_tells_the_agents_code(
    main: Obj, fetch: Obj, mesh: Obj, reason: str, deleted: bool
) -> None:
    obj = pod(main, deleted=deleted, fetch=fetch, mesh=mesh, reason=reason)
    told = fact(NodeId("n0"), view(obj))
    assert isinstance(told, NodeEnded)
    assert told.exit_code == main["state"].get("terminated", {}).get("exitCode")
    assert told.free or not deleted


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("2Gi", "out of memory: the memory limit of container main is 2Gi"),
        (None, "out of memory: container main has no memory limit, and its host had none left"),
    ],
)
def test_an_oom_kill_is_told_with_the_limit(limit: str | None, words: str) -> None:
    killed = pod(exited(137, "OOMKilled"))
    if limit:
        killed["spec"]["containers"][1]["resources"] = {"limits": {"memory": limit}}
    told = fact(NodeId("n0"), view(killed))
    assert isinstance(told, NodeEnded)
    assert told.out_of_memory == words
    assert told.why == f"its agent ended with exit code 137 (OOMKilled); {words}"
    other = fact(NodeId("n0"), view(pod(exited(137))))
    assert isinstance(other, NodeEnded)
    assert not other.out_of_memory
