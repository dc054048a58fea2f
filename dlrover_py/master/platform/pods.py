"""A node as a Pod, PURE: the Pod that is asked for, and what an existing one says.

What is put into a user's template is listed in docs/kubernetes.md, and nothing else is changed.
"""

import copy
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dlrover_py.master.core.events import Event, NodeEnded, NodeSeen
from dlrover_py.master.platform.ends import Budget, End, end_of, main_status, native_sidecars
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import OWN_ENV, TEMPLATE, ElasticJob
from dlrover_py.protocol.names import NodeId

Obj = dict[str, Any]

SHM, TMP = "/dev/shm", "/tmp"
VOLUME = "dlrover-job"
IMAGE_TROUBLE = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"),
)
START_TROUBLE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
CRASHES = "CrashLoopBackOff"
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')
"""In the words of an API server that was asked to be strict."""
ZONE = "topology.kubernetes.io/zone"
"""Label of a node, which the API server copies to its Pods from Kubernetes 1.35 on."""
CONNECT_S = "600"
"""A Pod may start while its master is moved to another node."""
KUBERNETES_GRACE_S = 30
"""A Pod's terminationGracePeriodSeconds where its template says nothing."""


@dataclass(frozen=True, slots=True)
class Site:
    """What all Pods of one job share."""

    uid: str
    """Of the ElasticJob."""
    master_addr: str
    """Of the master's Service."""


def node_of(job: str, pod: str) -> NodeId:
    """The node that a Pod of this name is."""
    return NodeId(pod.removeprefix(f"{job}-"))


def pod(job: ElasticJob, node: NodeId, site: Site, avoid: Iterable[str] = ()) -> Obj:
    """The Pod to ask for.

    Raises:
        ConfigError: the template has no container for the agent, takes a place that is ours, or
            has a form that no API server reads. It names each place.
    """
    index = job.worker.main_container()
    # The API server judges unknown fields of the Pod, but it never sees those beside ``spec``.
    wrong = [
        fault
        for fault in job.worker.faults()
        if not (fault.unknown and fault.path.startswith(f"{TEMPLATE}.spec."))
    ]
    if wrong:
        raise ConfigError("\n".join(map(str, wrong)))
    template = copy.deepcopy(job.worker.template)
    given, spec = template.get("metadata") or {}, template["spec"]
    number = node.removeprefix("n")
    meta = {
        "name": names.pod_of(job.metadata.name, node),
        "namespace": job.metadata.namespace,
        "annotations": {
            **(given.get("annotations") or {}),
            names.NOTE_TEMPLATE: job.worker.template_hash,
        },
        "labels": {
            **(given.get("labels") or {}),
            names.LABEL_APP: names.APP,
            names.LABEL_JOB: job.metadata.name,
            names.LABEL_ROLE: names.ROLE_WORKER,
            names.LABEL_INDEX: number,
            names.LABEL_UID: site.uid,
        },
        "ownerReferences": [names.owner(job.metadata.name, site.uid)],
    }
    spec["restartPolicy"] = "Never"
    if "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    if job.worker.priority_class:
        spec.setdefault("priorityClassName", job.worker.priority_class)
    _equip(spec, spec["containers"][index], job, node, site)
    _keep_off(spec, avoid)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def refusal(job: ElasticJob, words: str) -> str:
    """Why the API server refuses a Pod: by the template's own paths, where they are known.

    Args:
        job: whose template the Pod was made of.
        words: the server's; they name unknown fields by their paths in the Pod.
    """
    named = {path.rpartition(".")[2] for path in _UNKNOWN.findall(words)}
    known = {fault.name: str(fault) for fault in job.worker.faults() if fault.unknown}
    if named and named <= known.keys():
        return "\n".join(known[name] for name in sorted(named))
    return words


def _equip(spec: Obj, main: Obj, job: ElasticJob, node: NodeId, site: Site) -> None:
    number = node.removeprefix("n")
    ours: list[Obj] = [
        {"name": names.ENV_MASTER_ADDR, "value": site.master_addr},
        {"name": names.ENV_TOKEN_FILE, "value": f"{names.NODE_MOUNT}/{names.SECRET_TOKEN}"},
        {"name": names.ENV_CA_FILE, "value": f"{names.NODE_MOUNT}/{names.SECRET_CA}"},
        {"name": names.ENV_JOB_NAME, "value": job.metadata.name},
        {"name": names.ENV_NODE_ID, "value": node},
        _downward(names.ENV_POD_IP, "status.podIP"),
    ]
    # DLRover's, for scripts that read them.
    more: list[Obj] = [
        {"name": names.ENV_CONNECT_S, "value": CONNECT_S},
        {"name": names.ENV_JOB_UID, "value": site.uid},
        {"name": names.ENV_NODE_TYPE, "value": names.ROLE_WORKER},
        {"name": names.ENV_NODE_NUMBER, "value": number},
        {"name": names.ENV_NODE_RANK, "value": number},
        {"name": names.ENV_NODE_NUM, "value": str(job.worker.replicas)},
        _downward(names.ENV_POD_NAME, "metadata.name"),
        _downward(names.ENV_NODE_IP, "status.hostIP"),
    ]
    theirs = [e for e in main.get("env") or [] if e.get("name") not in OWN_ENV]
    taken = {e.get("name") for e in theirs}
    # Ours first: a value of the template may refer to them, as $(NODE_NUM).
    main["env"] = ours + [e for e in more if e["name"] not in taken] + theirs
    mounts = list(main.get("volumeMounts") or [])
    places = {str(m.get("mountPath", "")).rstrip("/") for m in mounts}
    volumes = list(spec.get("volumes") or [])
    if names.NODE_MOUNT in places or VOLUME in {v.get("name") for v in volumes}:
        raise ConfigError(
            f"the template mounts something at {names.NODE_MOUNT} or has a volume named {VOLUME}: "
            "both are for the job's token; use another path and name"
        )
    # Readable by any user of this Pod: which one its image runs as is not known here.
    secret = {"secretName": names.token_of(job.metadata.name, site.uid), "defaultMode": 0o444}
    volumes.append({"name": VOLUME, "secret": secret})
    mounts.append({"name": VOLUME, "mountPath": names.NODE_MOUNT, "readOnly": True})
    if SHM not in places:  # the runtime's is 64 MB, and NCCL and DataLoaders need more
        volumes.append({"name": f"{VOLUME}-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": f"{VOLUME}-shm", "mountPath": SHM})
    sealed = (main.get("securityContext") or {}).get("readOnlyRootFilesystem") is True
    if sealed and TMP not in places:  # agents and workers have their sockets and files there
        volumes.append({"name": f"{VOLUME}-tmp", "emptyDir": {}})
        mounts.append({"name": f"{VOLUME}-tmp", "mountPath": TMP})
    spec["volumes"], main["volumeMounts"] = volumes, mounts


def _downward(name: str, path: str) -> Obj:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _keep_off(spec: Obj, avoid: Iterable[str]) -> None:
    """No host of these: each of the terms, of which one has to hold, gets it."""
    bans = [
        {"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in sorted(avoid)
    ]
    if not bans:
        return
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    wish = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (wish.get(key) or {}).get("nodeSelectorTerms") or [{}]
    wish[key] = {
        "nodeSelectorTerms": [
            {**term, "matchFields": [*(term.get("matchFields") or []), *bans]} for term in terms
        ]
    }


# --- what a Pod says -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PodView:
    """The few fields of a Pod that are kept."""

    name: str
    uid: str
    owner: str
    """uid of the ElasticJob that owns it, or did before that was deleted without it."""
    orphan: bool
    """It has no owner any more."""
    host: str
    zone: str
    leaving: str
    """Why it is about to go; empty if it is not."""
    end: End | None
    """How it has ended; None if it has not."""
    near: bool
    runs: bool
    """Its container has started."""
    prepared: bool
    """No container of it waits any more for the Pod's volumes and its network."""
    cut_off: bool
    """Its kubelet, that called it ready, is not heard of any more."""
    grace_s: float
    """If it is leaving: from the order to the kill."""
    trouble: str
    """Reason of a condition of the job: why it cannot start; empty if it can, as far as is seen."""
    message: str
    done: bool
    """Its phase is Succeeded or Failed: it holds no resources any more."""
    lingers: bool
    """Its agent has ended, and another container runs that ends only if the Pod is deleted."""
    allowed_s: float
    """How long its containers have to end once they are told to."""
    created_at: str
    made_of: str
    """Hash of its template; empty if a master has made it that did not say."""

    @property
    def ended(self) -> str:
        """Why it has ended; empty if it has not."""
        return self.end.why if self.end is not None else ""

    @property
    def exit_code(self) -> int | None:
        """Of the container that has ended it; None if none has."""
        return self.end.exit_code if self.end is not None else None

    @property
    def free(self) -> bool:
        """Its end is charged to nothing."""
        return self.end is not None and self.end.row.budget is Budget.NONE

    @property
    def refused_by(self) -> str:
        """The host that ended it for a reason that the scheduler does not know; empty if none."""
        return self.host if self.end is not None and self.end.row.avoids_host else ""

    @property
    def deleted(self) -> bool:
        """It was deleted, and is to be gone after its grace."""
        return math.isfinite(self.grace_s)


def view(obj: Obj) -> PodView:
    """Keep what is needed of a Pod."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    disrupted = conditions.get("DisruptionTarget") or {}
    disrupted = disrupted if disrupted.get("status") == "True" else {}
    controller: Obj = next(
        (o for o in meta.get("ownerReferences") or [] if o.get("controller")), {}
    )
    end = end_of(obj)
    trouble, message = ("", "") if end else _trouble(spec, status, conditions)
    leaving = ""
    if disrupted:
        leaving = f"its Pod is disrupted: {disrupted.get('message') or disrupted.get('reason')}"
    elif meta.get("deletionTimestamp"):
        leaving = "its Pod is being deleted"
    return PodView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        owner=(controller or {"uid": (meta.get("labels") or {}).get(names.LABEL_UID)}).get("uid")
        or "",
        orphan=not controller,
        host=spec.get("nodeName") or "",
        zone=(meta.get("labels") or {}).get(ZONE, ""),
        leaving=leaving,
        end=end,
        near=not trouble,
        runs="running" in ((main_status(spec, status)).get("state") or {}),
        prepared=not spec.get("nodeName") or _prepared(status, conditions),
        cut_off=end is None and not spec.get("readinessGates") and _unheard(conditions),
        grace_s=float(meta.get("deletionGracePeriodSeconds", math.inf)),
        trouble=trouble,
        message=message,
        done=status.get("phase") in ("Succeeded", "Failed"),
        lingers=end is not None and not _all_ended(spec, status),
        allowed_s=float(spec.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_S)),
        created_at=meta.get("creationTimestamp") or "",
        made_of=(meta.get("annotations") or {}).get(names.NOTE_TEMPLATE, ""),
    )


def _unheard(conditions: Mapping[str, Obj]) -> bool:
    """Whether its node is NotReady: then the node controller writes this one condition of a Pod
    and leaves what the kubelet had said of its containers (Kubernetes, ``nodelifecycle``).
    """
    containers, pod = (conditions.get(kind) or {} for kind in ("ContainersReady", "Ready"))
    return (containers.get("status"), pod.get("status")) == ("True", "False")


def _prepared(status: Obj, conditions: Mapping[str, Obj]) -> bool:
    """What its kubelet says (Kubernetes: ``PodReadyToStartContainers``, on since 1.29); one that
    says nothing of any container has not begun."""
    said = (conditions.get("PodReadyToStartContainers") or {}).get("status")
    begun = status.get("initContainerStatuses") or status.get("containerStatuses")
    return said != "False" and bool(begun or status.get("phase") not in (None, "Pending"))


def _all_ended(spec: Obj, status: Obj) -> bool:
    """Whether all containers have, but for native sidecars: a kubelet ends those by itself, and
    then the Pod."""
    ended = [
        c for c in status.get("containerStatuses") or [] if "terminated" in (c.get("state") or {})
    ]
    return 0 < len(spec.get("containers") or []) == len(ended)


def _trouble(spec: Obj, status: Obj, conditions: Mapping[str, Obj]) -> tuple[str, str]:
    scheduled = conditions.get("PodScheduled") or {}
    if not spec.get("nodeName") and scheduled.get("status") == "False":
        return "Unschedulable", scheduled.get("message") or scheduled.get("reason") or ""
    natives = native_sidecars(spec)
    main_runs = "running" in (main_status(spec, status).get("state") or {})
    for container in [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or ""
        said = f"{container.get('name')}: {waiting.get('message') or reason}"
        if reason == CRASHES and container.get("name") in natives and not main_runs:
            ended = (container.get("lastState") or {}).get("terminated") or {}
            code = f"; it ended with exit code {ended['exitCode']}" if "exitCode" in ended else ""
            return "PodNotStarting", f"sidecar {said}{code}"
        if reason in IMAGE_TROUBLE:
            return "ImagePullBackOff", said
        if reason in START_TROUBLE:
            return "InvalidTemplate", said
    return "", ""


def fact(node: NodeId, seen: PodView, output: str = "") -> Event:
    """What the core is told of a Pod that exists."""
    if seen.end is not None:
        return NodeEnded(
            node,
            seen.ended,
            seen.exit_code if seen.end.by_agent else None,
            seen.free,
            output or seen.end.words,
            refused_by=seen.refused_by,
            out_of_memory=seen.end.out_of_memory,
        )
    topology = (seen.zone, seen.host) if seen.host else ()
    return NodeSeen(
        node,
        seen.near,
        topology,
        seen.message,
        seen.leaving,
        runs=seen.runs,
        grace_s=seen.grace_s,
        cut_off=seen.cut_off,
        made_of=seen.made_of,
    )
