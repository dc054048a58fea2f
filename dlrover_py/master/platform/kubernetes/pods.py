"""Nodes as Pods, as pure code: the Pod that a node needs, and the state of an existing Pod.

docs/kubernetes.md lists what is added to a user's template. Nothing else is changed.
"""

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dlrover_py.master.core import topology
from dlrover_py.master.core.events import Event, NodeEnded, NodeSeen
from dlrover_py.master.core.servers import LEAVE_S
from dlrover_py.master.platform.kubernetes.ends import (
    Budget,
    PodEnd,
    end_of,
    main_status,
    native_sidecars,
)
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import PodPlace
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.hosts import SPOT_LABELS
from dlrover_py.protocol.job import (
    OWN_ENV,
    SERVER_TEMPLATE,
    TEMPLATE,
    ElasticJob,
    ReplicaSpec,
    ServerSpec,
)
from dlrover_py.protocol.memory_growth import with_memory_limit
from dlrover_py.protocol.names import NodeId, id_key, is_server, role_of
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.resource_advice import with_cpu_request
from dlrover_py.protocol.template import in_lines
from dlrover_py.protocol.timing import POD_GRACE_S

Obj = dict[str, Any]
"""A Kubernetes object, or a part of it."""
Problem = tuple[ConditionType | Literal[""], str]
"""The type of a condition of the job, and words; both are empty if there is no problem."""
NO_PROBLEM: Problem = "", ""

SHM, TMP = "/dev/shm", "/tmp"
IMAGE_PROBLEMS = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"),
)
"""Reasons of a waiting container whose image is not available."""
START_PROBLEMS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
"""Reasons of a waiting container that cannot be created or started."""
CRASHES = "CrashLoopBackOff"
"""Reason of a container that waits because it ended again and again."""
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')
"""Names an unknown field in a message of an API server with strict validation."""
SPOT_WEIGHT = 10
"""Weight of the preference for spot hosts, of 100."""
CONNECT_S = "600"
"""Seconds that an agent tries to reach its master, which may be on its way to another host."""


@dataclass(frozen=True, slots=True)
class PodContext:
    """Values that all Pods of one job share."""

    uid: str
    """UID of the ElasticJob."""
    master_addr: str
    """Address of the master's Service."""


class Given(NamedTuple):
    """What a Pod gets instead of what the template says of its main container."""

    memory: int = 0
    """Memory limit in bytes; 0 for that of the template."""
    cpu: int = 0
    """CPU request in thousandths; 0 for that of the template."""
    template: str = ""
    """Hash of the template for which that was chosen; empty for the present one. A Pod of another
    template gets no less memory than that says, and its CPUs."""


AS_WRITTEN = Given()
"""The Pod gets what the template says."""


def node_of(job: str, pod: str) -> NodeId:
    """Return the id of the node that a Pod of this name belongs to.

    A name without the job's name before it is returned unchanged: the caller checks the Pod's
    owner.
    """
    return NodeId(pod.removeprefix(f"{job}-"))


def pod(
    job: ElasticJob,
    node: NodeId,
    pod_context: PodContext,
    avoid: Iterable[str] = (),
    place: PodPlace | None = None,
    given: Given = AS_WRITTEN,
    stable: bool = False,
) -> Obj:
    """Return the Pod to create for a node. Nothing is created, and the job is not changed.

    Args:
        job: The job with the template.
        node: Id of the node.
        pod_context: Values that all Pods of the job share.
        avoid: Hosts that the Pod must not be placed on.
        place: The kind of hosts that it must be placed on; None for all. What the template
            selects by the same label stays.
        given: Other memory and CPUs for the main container. It has no effect on what the template
            does not limit or request. Less memory than in the template is given only by advice.
        stable: Whether the Pod must not be placed on a spot host.

    Raises:
        ConfigError: The template has no container for the agent, uses a name or path that is
            reserved, or has a form that no API server accepts. The message names each place.
            Unknown fields of the Pod spec are left to the API server. Or the node is a server, and
            the job has none any more.
    """
    role, path = _role(job, node)
    index = role.main_container()
    # The API server reports unknown fields of the Pod, but it never sees fields beside ``spec``.
    wrong = [
        fault
        for fault in role.faults()
        if not (fault.unknown and fault.path.startswith(f"{path}.spec."))
    ]
    if wrong:
        raise ConfigError(in_lines(wrong))
    template: Obj = copy.deepcopy(role.template or {})
    written, spec = template.get("metadata") or {}, template["spec"]
    meta: Obj = {
        "name": names.pod_of(job.metadata.name, node),
        "namespace": job.metadata.namespace,
        "annotations": {
            **(written.get("annotations") or {}),
            names.NOTE_TEMPLATE: role.template_hash,
        },
        "labels": {
            **(written.get("labels") or {}),
            names.LABEL_APP: names.APP,
            names.LABEL_JOB: job.metadata.name,
            names.LABEL_ROLE: role_of(node),
            names.LABEL_INDEX: _number(node),
            names.LABEL_UID: pod_context.uid,
        },
        "ownerReferences": [names.owner(job.metadata.name, pod_context.uid)],
    }
    spec["restartPolicy"] = "Never"
    if "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    if role.priority_class:
        spec.setdefault("priorityClassName", role.priority_class)
    advice = job.worker.resource_advice
    same = given.template in ("", role.template_hash)
    may_have_less = advice is not None and advice.mode == "auto" and same
    if given.memory > job.worker.memory > 0 or (given.memory and may_have_less):
        spec["containers"][index] = with_memory_limit(spec["containers"][index], given.memory)
    if given.cpu and job.worker.cpu and same:
        spec["containers"][index] = with_cpu_request(spec["containers"][index], given.cpu)
    _extend_main_container(spec, spec["containers"][index], job, node, pod_context)
    _exclude_hosts(spec, avoid, SPOT_LABELS if stable else {})
    if is_server(node):
        spec.setdefault("terminationGracePeriodSeconds", round(LEAVE_S))
        _spread(spec, job.metadata.name)
    elif job.worker.spot_policy != "any" and not stable:
        _prefer_spot(spec)
    if place is not None:
        meta["labels"] = {**place.labels, **meta["labels"], names.LABEL_PLACEMENT: place.name}
        meta["annotations"] |= place.annotations
        spec["nodeSelector"] = {**place.node_selector, **(spec.get("nodeSelector") or {})}
        spec["tolerations"] = [*(spec.get("tolerations") or []), *place.tolerations]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _role(job: ElasticJob, node: NodeId) -> tuple[ReplicaSpec | ServerSpec, str]:
    """Return the role of a node, and the path of its template.

    Raises:
        ConfigError: The node is a server, and the job has none any more.
    """
    if not is_server(node):
        return job.worker, TEMPLATE
    if job.servers is None:
        raise ConfigError(f"{SERVER_TEMPLATE}: expected the template of {node}, found none")
    return job.servers, SERVER_TEMPLATE


def _number(node: NodeId) -> str:
    """Return the number in a node's id."""
    return node.removeprefix(names.SERVER_PREFIX if is_server(node) else "n")


def _spread(spec: Obj, job: str) -> None:
    """Prefer hosts without another server of the job, unless the template separates its Pods.

    The copies of a row are then on different hosts.
    """
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    labels = {names.LABEL_JOB: job, names.LABEL_ROLE: names.SERVER_PREFIX}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    affinity.setdefault("podAntiAffinity", {key: [{"weight": 100, "podAffinityTerm": term}]})


def refusal(job: ElasticJob, message: str, node: NodeId) -> str:
    """Return why the API server refuses a Pod, with the template's own paths where they are known.

    The message is returned unchanged if it names no unknown field, or one that the template check
    does not know.

    Args:
        job: The job whose template the Pod was made from.
        message: The message of the server, which names unknown fields by their paths in the Pod.
        node: The node of the Pod.
    """
    role = job.servers if is_server(node) else job.worker
    named = {path.rpartition(".")[2] for path in _UNKNOWN.findall(message)}
    known = {fault.name: fault for fault in (role.faults() if role else ()) if fault.unknown}
    if named and named <= known.keys():
        return in_lines([known[name] for name in sorted(named)])
    return message


def _extend_main_container(
    spec: Obj, main: Obj, job: ElasticJob, node: NodeId, pod_context: PodContext
) -> None:
    """Add environment variables, volumes and mounts to the agent's container, in place.

    Variables that the agent needs replace those of the template. All others, and mounts at
    ``/dev/shm`` and ``/tmp``, are added only if the template has none. A volume for ``/tmp`` is
    added only for a read-only root file system.

    Args:
        spec: The Pod spec; it gets the volumes.
        main: The agent's container in it; it gets the variables and mounts.
        job: The job.
        node: Id of the node.
        pod_context: Values that all Pods of the job share.

    Raises:
        ConfigError: The template uses the mount path or the volume name of the job's token. The
            container's variables have been changed by then.
    """
    number = _number(node)
    own_env: list[Obj] = [
        {"name": names.ENV_MASTER_ADDR, "value": pod_context.master_addr},
        {"name": names.ENV_TOKEN_FILE, "value": f"{names.NODE_MOUNT}/{names.SECRET_TOKEN}"},
        {"name": names.ENV_CA_FILE, "value": f"{names.NODE_MOUNT}/{names.SECRET_CA}"},
        {"name": names.ENV_JOB_NAME, "value": job.metadata.name},
        {"name": names.ENV_NODE_ID, "value": node},
        _downward(names.ENV_POD_IP, "status.podIP"),
    ]
    # For scripts that were written for DLRover and read these variables.
    more: list[Obj] = [
        {"name": names.ENV_CONNECT_S, "value": CONNECT_S},
        {"name": names.ENV_JOB_UID, "value": pod_context.uid},
        {"name": names.ENV_NODE_TYPE, "value": role_of(node)},
        {"name": names.ENV_NODE_NUMBER, "value": number},
        {"name": names.ENV_NODE_RANK, "value": number},
        {"name": names.ENV_NODE_NUM, "value": str(job.worker.replicas)},
        _downward(names.ENV_POD_NAME, "metadata.name"),
        _downward(names.ENV_NODE_IP, "status.hostIP"),
    ]
    if job.servers is not None:
        host = pod_context.master_addr.rpartition(":")[0]
        more.append({"name": names.ENV_PS, "value": f"tcp://{host}:{names.SERVERS_PORT}"})
    user_env = [e for e in main.get("env") or [] if e.get("name") not in OWN_ENV]
    taken = {e.get("name") for e in user_env}
    # These come first, because a value of the template may refer to them, as $(NODE_NUM).
    main["env"] = own_env + [e for e in more if e["name"] not in taken] + user_env
    mounts = list(main.get("volumeMounts") or [])
    mount_paths = {str(m.get("mountPath", "")).rstrip("/") for m in mounts}
    volumes = list(spec.get("volumes") or [])
    if names.NODE_MOUNT in mount_paths or names.NODE_VOLUME in {v.get("name") for v in volumes}:
        raise ConfigError(
            f"the template mounts something at {names.NODE_MOUNT} or has a volume named "
            f"{names.NODE_VOLUME}: both are reserved for the job's token; use another path and name"
        )
    # Readable by any user of this Pod: the user of its image is not known here.
    secret = {
        "secretName": names.token_of(job.metadata.name, pod_context.uid),
        "defaultMode": 0o444,
    }
    volumes.append({"name": names.NODE_VOLUME, "secret": secret})
    mounts.append({"name": names.NODE_VOLUME, "mountPath": names.NODE_MOUNT, "readOnly": True})
    if SHM not in mount_paths:  # the runtime's default is 64 MB; NCCL and DataLoaders need more
        volumes.append({"name": f"{names.NODE_VOLUME}-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": f"{names.NODE_VOLUME}-shm", "mountPath": SHM})
    read_only_root = (main.get("securityContext") or {}).get("readOnlyRootFilesystem") is True
    if read_only_root and TMP not in mount_paths:  # agents and workers keep sockets and files there
        volumes.append({"name": f"{names.NODE_VOLUME}-tmp", "emptyDir": {}})
        mounts.append({"name": f"{names.NODE_VOLUME}-tmp", "mountPath": TMP})
    spec["volumes"], main["volumeMounts"] = volumes, mounts


def _downward(name: str, path: str) -> Obj:
    """Return an environment variable whose value is a field of the Pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _exclude_hosts(spec: Obj, avoid: Iterable[str], labels: Mapping[str, str]) -> None:
    """Exclude hosts in each of the node selector terms, of which one has to match.

    Without names and labels the Pod spec stays as it is. Terms of the template are kept.

    Args:
        spec: The Pod spec.
        avoid: Names of hosts to exclude.
        labels: Labels; a host that has one of them, with its value, is excluded.
    """
    bans = [
        {"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in sorted(avoid)
    ]
    kinds = [{"key": key, "operator": "NotIn", "values": [kind]} for key, kind in labels.items()]
    if not bans and not kinds:
        return
    node_affinity = _node_affinity(spec)
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (node_affinity.get(key) or {}).get("nodeSelectorTerms") or [{}]
    node_affinity[key] = {
        "nodeSelectorTerms": [
            {
                **term,
                **_joined(term, "matchFields", bans),
                **_joined(term, "matchExpressions", kinds),
            }
            for term in terms
        ]
    }


def _joined(term: Obj, key: str, more: list[Obj]) -> Obj:
    """Return ``{key: entries}`` with a term's entries and more; empty if there are no more."""
    return {key: [*(term.get(key) or []), *more]} if more else {}


def _prefer_spot(spec: Obj) -> None:
    """Prefer spot hosts, besides what the template prefers."""
    node_affinity = _node_affinity(spec)
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    node_affinity[key] = [
        *(node_affinity.get(key) or []),
        *(
            {
                "weight": SPOT_WEIGHT,
                "preference": {
                    "matchExpressions": [{"key": label, "operator": "In", "values": [value]}]
                },
            }
            for label, value in SPOT_LABELS.items()
        ),
    ]


def _node_affinity(spec: Obj) -> Obj:
    """Return the node affinity of a Pod spec, which the caller may change; add it if missing."""
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    node_affinity: Obj = dict(affinity.get("nodeAffinity") or {})
    affinity["nodeAffinity"] = node_affinity
    return node_affinity


# --- State of a Pod ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PodView:
    """The fields of a Pod that the master keeps in memory."""

    name: str
    uid: str
    owner: str
    """UID of the ElasticJob that owns the Pod, or that owned it and was deleted without it."""
    orphan: bool
    """Whether the Pod has no owner any more."""
    host: str
    domain: tuple[str, ...]
    """Topology domain of its host, the widest level first; a name that is not known is empty."""
    leaving: str
    """Why the Pod has to end; empty if it does not."""
    end: PodEnd | None
    """The Pod's end; None if it has not ended."""
    near: bool
    """Whether nothing prevents the agent from starting soon, as far as is known."""
    runs: bool
    """Whether the agent's container runs."""
    prepared: bool
    """Whether the Pod's volumes and network are ready; also true before it has a host."""
    waits_for: Problem
    """The cause of a wait, which may be normal for a while: reason of a condition, and words.

    Both are empty if it waits for nothing of this kind."""
    cut_off: bool
    """Whether its kubelet is silent, after it had reported the Pod as ready."""
    grace_s: float
    """Seconds between the order to end and the kill, if the Pod was deleted; otherwise infinite."""
    problem_type: ConditionType | Literal[""]
    """Reason of a condition of the job: why the Pod cannot start; empty if it can, as far as is
    known."""
    message: str
    """Description of ``problem_type``."""
    done: bool
    """Whether its phase is Succeeded or Failed, so that it holds no resources any more."""
    sidecars_run: bool
    """Whether the agent has ended, and another container runs until the Pod is deleted."""
    termination_grace_s: float
    """Seconds that its containers have to end after SIGTERM."""
    created_at: str
    """Time of its creation, as RFC 3339."""
    template_hash: str
    """Hash of the template; empty if the Pod was made by a master that did not record it."""
    placement: str = ""
    """Name of the kind of hosts that a queue has given to it; empty if none has."""

    @property
    def ended(self) -> str:
        """Why the Pod has ended; empty if it has not."""
        return self.end.why if self.end is not None else ""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the container that ended the Pod; None if no container ended it."""
        return self.end.exit_code if self.end is not None else None

    @property
    def free(self) -> bool:
        """Whether the Pod's end counts against no budget."""
        return self.end is not None and self.end.rule.budget is Budget.NONE

    @property
    def refused_by(self) -> str:
        """Host that ended the Pod for a reason unknown to the scheduler; empty if none."""
        return self.host if self.end is not None and self.end.rule.avoids_host else ""

    @property
    def deleted(self) -> bool:
        """Whether the Pod was deleted, and ends after its grace."""
        return math.isfinite(self.grace_s)


def place_for(placements: Sequence[PodPlace], taken: Mapping[str, int]) -> PodPlace | None:
    """Return where a new Pod goes: the first place with room, else the one that lacks least.

    A Pod that replaces another one may need a place before the old Pod has left it. The place
    without a name is for Pods from before there were places. New ones go there only if there is no
    other place.

    Args:
        placements: The places; if there are none, the result is None.
        taken: Number of Pods that hold resources, by name of the place.
    """
    named = [place for place in placements if place.name] or placements
    rooms = [(place.nodes - taken.get(place.name, 0), place) for place in named]
    free = [place for room, place in rooms if room > 0]
    if free:
        return free[0]
    return max(rooms, key=lambda one: one[0])[1] if rooms else None


def misplaced(placements: Sequence[PodPlace], table: Iterable[PodView]) -> list[PodView]:
    """Return the Pods to end because their places have fewer nodes now.

    Of each place, Pods that do not run go first, those of high number before others. Of the Pods
    that run, whole topology domains are given up first. Nothing is returned while all Pods are in
    one place that is still there: then any of them may end, and the round decides which. Servers
    have no place. A Pod that replaces one without a place is in excess nowhere.

    Args:
        placements: The places that the job has.
        table: The job's Pods.
    """
    holding = [
        seen
        for seen in table
        if not (seen.done or seen.ended or is_server(seen.name.rpartition("-")[2]))
    ]
    places = {place.name: place.nodes for place in placements}
    if len(places) <= 1 and all(seen.placement in places or not places for seen in holding):
        return []
    old = sum(not (seen.placement or seen.leaving) for seen in holding)
    spare = max(0, places.get("", 0) - old)
    found: list[PodView] = []
    for name in sorted({seen.placement for seen in holding}):
        here = [seen for seen in holding if seen.placement == name]
        staying = [seen for seen in here if not seen.leaving]
        staying.sort(key=lambda seen: id_key(NodeId(seen.name.rpartition("-")[2])))
        running = [seen for seen in staying if seen.runs]
        waiting = [seen for seen in staying if not seen.runs]
        room = places.get(name, 0)
        more = min(spare, max(0, len(staying) - room))
        room, spare = room + more, spare - more
        kept = set(topology.kept([seen.domain for seen in running], room))
        found += reversed(waiting[max(0, room - len(running)) :])
        found += [running[at] for at in reversed(range(len(running))) if at not in kept]
    return found


def view(obj: Obj, labels: Sequence[str] = ()) -> PodView:
    """Return the needed fields of a Pod.

    A Pod that has ended has no problem and waits for nothing. A disruption comes before a deletion
    as the reason why the Pod has to end. A disruption is what the condition ``DisruptionTarget``
    reports, such as an eviction. The owner of a Pod without a controller is taken from its label.

    Args:
        obj: The Pod.
        labels: Labels of the topology domain, the widest level first. The operator copies them from
            the host, and from Kubernetes 1.35 on, the API server copies the label of the zone.
    """
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    disrupted = conditions.get("DisruptionTarget") or {}
    disrupted = disrupted if disrupted.get("status") == "True" else {}
    controller: Obj = next(
        (o for o in meta.get("ownerReferences") or [] if o.get("controller")), {}
    )
    end = end_of(obj)
    problem_type, message = NO_PROBLEM if end else _problem(spec, status, conditions)
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
        domain=tuple((meta.get("labels") or {}).get(label, "") for label in labels),
        leaving=leaving,
        end=end,
        near=not problem_type,
        runs="running" in ((main_status(spec, status)).get("state") or {}),
        prepared=not spec.get("nodeName") or _prepared(status, conditions),
        waits_for=NO_PROBLEM if end else _waits_for(meta["name"], spec, status, conditions),
        cut_off=end is None and not spec.get("readinessGates") and _host_not_ready(conditions),
        grace_s=float(meta.get("deletionGracePeriodSeconds", math.inf)),
        problem_type=problem_type,
        message=message,
        done=status.get("phase") in ("Succeeded", "Failed"),
        sidecars_run=end is not None and not _all_ended(spec, status),
        termination_grace_s=float(spec.get("terminationGracePeriodSeconds", POD_GRACE_S)),
        created_at=meta.get("creationTimestamp") or "",
        template_hash=(meta.get("annotations") or {}).get(names.NOTE_TEMPLATE, ""),
        placement=(meta.get("labels") or {}).get(names.LABEL_PLACEMENT, ""),
    )


def _host_not_ready(conditions: Mapping[str, Obj]) -> bool:
    """Return whether the Pod's Kubernetes node is NotReady after the Pod was ready.

    The node controller then changes the condition ``Ready`` of the Pod only. It leaves what the
    kubelet had reported about containers (Kubernetes, ``nodelifecycle``).
    """
    containers, pod = (conditions.get(kind) or {} for kind in ("ContainersReady", "Ready"))
    return (containers.get("status"), pod.get("status")) == ("True", "False")


def _prepared(status: Obj, conditions: Mapping[str, Obj]) -> bool:
    """Return whether the kubelet has prepared the Pod's volumes and network.

    The result is False if the condition ``PodReadyToStartContainers`` is False (Kubernetes, enabled
    since 1.29). It is also False until the kubelet reports a container, or a phase after Pending.
    """
    ready = (conditions.get("PodReadyToStartContainers") or {}).get("status")
    begun = status.get("initContainerStatuses") or status.get("containerStatuses")
    return ready != "False" and bool(begun or status.get("phase") not in (None, "Pending"))


def _waits_for(name: str, spec: Obj, status: Obj, conditions: Mapping[str, Obj]) -> Problem:
    """Return the condition of the job, and its message, for a normal wait of a Pod.

    A Pod waits normally, for a while, if no scheduler has processed it, or if an init container has
    begun and is not finished. The result is ``NO_PROBLEM`` if it does not wait.

    Args:
        name: Name of the Pod, for the kubectl command in the message.
        spec: The Pod's spec.
        status: Its status.
        conditions: Its conditions, by type.
    """
    if not spec.get("nodeName") and "PodScheduled" not in conditions:
        scheduler = spec.get("schedulerName") or "default-scheduler"
        message = f"no scheduler has processed it: check that the scheduler {scheduler} runs"
        return ConditionType.UNSCHEDULABLE, message
    if init := _init_under_way(spec, status):
        message = f"its init container {init} has not finished"
        return ConditionType.POD_INITIALIZING, f"{message}; see `kubectl logs {name} -c {init}`"
    return NO_PROBLEM


def _init_under_way(spec: Obj, status: Obj) -> str:
    """Return the first init container that is not finished; empty if there is none or none began.

    A native sidecar is an init container that runs beside the others, and counts as finished once
    it is started. While all init containers wait for their first start, none counts as begun.
    """
    statuses = {str(c.get("name")): c for c in status.get("initContainerStatuses") or []}
    if not any(
        "waiting" not in (c.get("state") or {}) or c.get("restartCount") for c in statuses.values()
    ):
        return ""
    natives = native_sidecars(spec)
    for name in [str(c.get("name")) for c in spec.get("initContainers") or []]:
        found = statuses.get(name) or {}
        ended = (found.get("state") or {}).get("terminated") or {}
        if not (found.get("started") if name in natives else ended.get("exitCode") == 0):
            return name
    return ""


def _all_ended(spec: Obj, status: Obj) -> bool:
    """Return whether all containers but native sidecars have ended; False without any container.

    Native sidecars are init containers that run beside the others. The kubelet ends them by itself,
    and then the Pod.
    """
    ended = [
        c for c in status.get("containerStatuses") or [] if "terminated" in (c.get("state") or {})
    ]
    return 0 < len(spec.get("containers") or []) == len(ended)


def _problem(spec: Obj, status: Obj, conditions: Mapping[str, Obj]) -> Problem:
    """Return why the Pod cannot start: the reason of a condition, and words; both may be empty.

    The problems are a refused scheduling, a sidecar that crashes before the agent runs, a missing
    image, and a container that cannot be created. Other reasons of a wait are ignored.
    """
    scheduled = conditions.get("PodScheduled") or {}
    if not spec.get("nodeName") and scheduled.get("status") == "False":
        message = scheduled.get("message") or scheduled.get("reason") or ""
        if host := status.get("nominatedNodeName"):
            message += f"; it is to get a place on {host}, if need be from Pods of lower priority"
        return ConditionType.UNSCHEDULABLE, message
    natives = native_sidecars(spec)
    main_runs = "running" in (main_status(spec, status).get("state") or {})
    for container in [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or ""
        message = f"{container.get('name')}: {waiting.get('message') or reason}"
        if reason == CRASHES and container.get("name") in natives and not main_runs:
            ended = (container.get("lastState") or {}).get("terminated") or {}
            code = f"; it ended with exit code {ended['exitCode']}" if "exitCode" in ended else ""
            return ConditionType.POD_NOT_STARTING, f"sidecar {message}{code}"
        if reason in IMAGE_PROBLEMS:
            return ConditionType.IMAGE_PULL_BACK_OFF, message
        if reason in START_PROBLEMS:
            return ConditionType.INVALID_TEMPLATE, message
    return NO_PROBLEM


UNORDERED_STOP = (
    "but it was neither deleted nor evicted: does its livenessProbe or startupProbe fail?"
)
"""What is said of a Pod that received SIGTERM though the API server shows no order for it."""


def fact(node: NodeId, seen: PodView, output: str = "") -> Event:
    """Return the event for the core that describes an existing Pod: how it ended, or its state.

    The exit code of another container than the agent's is left out.

    Args:
        node: The node that the Pod belongs to.
        seen: State of the Pod.
        output: Last lines of the log of a Pod that has ended; if empty, the termination message.
    """
    if seen.end is not None:
        return NodeEnded(
            node,
            seen.ended,
            seen.exit_code if seen.end.by_agent else None,
            seen.free,
            seen.end.rule.ended_by.startswith("kubelet"),
            output or seen.end.termination_message,
            refused_by=seen.refused_by,
            out_of_memory=seen.end.out_of_memory,
            unordered_stop=UNORDERED_STOP,
        )
    return NodeSeen(
        node,
        seen.near,
        (*seen.domain, seen.host) if seen.host else (),
        seen.message,
        seen.leaving,
        runs=seen.runs,
        grace_s=seen.grace_s,
        cut_off=seen.cut_off,
        template_hash=seen.template_hash,
    )
