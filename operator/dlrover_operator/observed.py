"""The operator's view of a job and its objects, made from what the API server stores."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NewType, Self

from dlrover_py.kubernetes.kinds import Kind
from dlrover_py.protocol import names
from dlrover_py.protocol.reasons import ConditionReason
from dlrover_py.protocol.status import unix_seconds

Obj = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name of an object."""
JobUid = tuple[str, str]
"""Namespace and uid of an ElasticJob. Whoever may write in another namespace may write the uid
there, too, as that of an owner."""
PodReason = NewType("PodReason", str)
"""The reason that Kubernetes gives for a Pod that does not run."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The view of a master's Deployment."""

    uid: str
    owner: str
    """Uid of the ElasticJob that owns it; empty if no ElasticJob does."""
    version: str
    """``resourceVersion``."""
    replicas: int
    available: bool
    """Whether a replica is available."""
    service_address: str
    """Address of the Service in the master's environment."""
    create_error: str = ""
    """Message of the server why no Pod could be created."""
    planned: str = ""
    """Hash of the plan from which it was made."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of an object. A missing number of replicas is 1."""
        meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
        pod = (spec.get("template") or {}).get("spec") or {}
        env = [e for c in pod.get("containers") or () for e in c.get("env") or ()]
        service = next(
            (e.get("value", "") for e in env if e["name"] == names.ENV_MASTER_SERVICE), ""
        )
        errors = [
            c.get("message", "")
            for c in status.get("conditions") or ()
            if c.get("type") == "ReplicaFailure" and c.get("status") == "True"
        ]
        return cls(
            uid=meta["uid"],
            owner=owner(meta),
            version=meta.get("resourceVersion", ""),
            replicas=spec.get("replicas", 1),
            available=(status.get("availableReplicas") or 0) > 0,
            service_address=service.rpartition(":")[0].strip("[]"),
            create_error=errors[0] if errors else "",
            planned=(meta.get("annotations") or {}).get(names.NOTE_PLAN, ""),
        )


@dataclass(frozen=True, slots=True)
class Service:
    """The view of a master's Service."""

    uid: str
    owner: str
    """Uid of the ElasticJob that owns it; empty if no ElasticJob does."""
    address: str
    """The cluster IP."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of an object."""
        meta = obj["metadata"]
        address = (obj.get("spec") or {}).get("clusterIP") or ""
        return cls(uid=meta["uid"], owner=owner(meta), address=address)


@dataclass(frozen=True, slots=True)
class MasterPod:
    """The view of a master's Pod."""

    reason: PodReason = PodReason("")
    """Reason why the Pod does not run yet; empty if there is none."""
    message: str = ""
    """Message that belongs to ``reason``."""
    name: str = ""
    uid: str = ""
    created_at: float = 0.0
    """Creation time in Unix seconds."""
    replica_set: str = ""
    """Name of the ReplicaSet that owns it."""
    leaving: bool = False
    """Whether it was deleted but still exists."""
    holds: bool = True
    """Whether it holds resources."""
    pending_scheduler: str = ""
    """Name of its scheduler if that has not processed the Pod yet; otherwise empty."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of an object.

        A reason is given only for a refused scheduling, and for a container that waits and is not
        simply being created. The last such container counts.
        """
        status = obj.get("status") or {}
        reason = message = ""
        spec = obj.get("spec") or {}
        scheduled = bool(spec.get("nodeName"))
        for condition in status.get("conditions") or ():
            scheduled |= condition.get("type") == "PodScheduled"
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                reason, message = condition.get("reason", ""), condition.get("message", "")
        for container in status.get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                reason, message = waiting["reason"], waiting.get("message", "")
                ended = (container.get("lastState") or {}).get("terminated")
                if ended:
                    message = f"{_termination_message(ended)}; {message}"
        meta = obj["metadata"]
        makers = [o for o in meta.get("ownerReferences") or () if o.get("kind") == "ReplicaSet"]
        return cls(
            reason=PodReason(reason),
            message=message,
            name=meta["name"],
            uid=meta["uid"],
            created_at=unix_seconds(meta.get("creationTimestamp")) or 0.0,
            replica_set=makers[0].get("name", "") if makers else "",
            leaving="deletionTimestamp" in meta,
            holds=status.get("phase") not in ("Succeeded", "Failed"),
            pending_scheduler="" if scheduled else spec.get("schedulerName") or "default-scheduler",
        )


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """A worker's Pod that holds resources: requests on a host and a share of a quota."""

    name: str
    uid: str
    host: str
    """Name of the Node; empty if the Pod is not scheduled."""
    leaving: bool
    """Whether it was deleted but still exists."""

    @classmethod
    def of(cls, obj: Obj, job_uid: str) -> Self | None:
        """Return the view of a Pod; None if it holds no resources or belongs to another job.

        Args:
            obj: the Pod.
            job_uid: uid of the job.
        """
        meta = obj["metadata"]
        owned = any(o.get("uid") == job_uid for o in meta.get("ownerReferences") or ())
        if not owned or (obj.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return None
        host = (obj.get("spec") or {}).get("nodeName") or ""
        return cls(meta["name"], meta["uid"], host, "deletionTimestamp" in meta)


@dataclass(frozen=True, slots=True)
class PodGroup:
    """The view of a PodGroup, or of a group of a Workload."""

    owner: str
    """Uid of the ElasticJob that owns it; empty if none does."""
    minimum: int
    """``minMember``, or ``minCount`` of Kubernetes' own groups."""
    uid: str = ""
    leaving: bool = False
    """Whether it was deleted but still exists."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of a PodGroup of any API group."""
        meta, spec = obj["metadata"], obj.get("spec") or {}
        gang = (spec.get("schedulingPolicy") or {}).get("gang") or {}
        minimum = spec.get("minMember") or gang.get("minCount") or 0
        return cls(owner(meta), minimum, meta.get("uid", ""), "deletionTimestamp" in meta)

    @classmethod
    def parts(cls, obj: Obj) -> dict[str, Self]:
        """Return the views of the groups in a Workload, by name."""
        whole = cls.of(obj)
        groups = (obj.get("spec") or {}).get("podGroups") or ()
        gangs = {one["name"]: (one.get("policy") or {}).get("gang") or {} for one in groups}
        return {
            name: replace(whole, minimum=gang.get("minCount") or 0) for name, gang in gangs.items()
        }

    @classmethod
    def part(cls, groups: Mapping[str, Self], name: str) -> Self:
        """Return the view of one group of a Workload.

        If the Workload has no such group, its template has named another one before. The minimum is
        0 then, and the owner that of the Workload. A Workload without groups is nobody's.

        Args:
            groups: the groups of the Workload, by name.
            name: name of the group.
        """
        if name in groups:
            return groups[name]
        return replace(next(iter(groups.values()), cls("", 0)), minimum=0)


@dataclass(frozen=True, slots=True)
class Gang:
    """What a job's template says of its group, and what the cluster has of it."""

    kind: Kind
    """Kind of the group. The version of Kubernetes' own kinds is empty until it is known."""
    name: str
    """Name of the PodGroup, or of the Workload."""
    part: str = ""
    """Name of the group in a Workload."""
    queue: str = ""
    """Queue of the group, for Volcano."""
    priority_class: str = ""
    """Priority class of its Pods, which Kubernetes' own PodGroups repeat."""
    group: PodGroup | None = None
    """The group; None if it does not exist."""
    missing: str = ""
    """Why groups of this kind cannot be read; empty if they can."""


@dataclass(frozen=True, slots=True)
class LastError:
    """The last refusal of the API server."""

    reason: ConditionReason
    """Reason for the condition of the job."""
    message: str
    """Message of the server."""


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """The view of a job from which a plan is made; all times are Unix seconds."""

    job: Obj
    """The ElasticJob."""
    deployment: Deployment | None = None
    """The master's Deployment."""
    service: Service | None = None
    """The master's Service."""
    pods: tuple[MasterPod, ...] = ()
    """The master's Pods."""
    last_error: LastError | None = None
    """Refusal of an action of this plan, which is made again to report it."""
    credentials_checked_at: float = 0.0
    """Time at which this operator last made or checked the master's credentials."""
    rights_checked_at: float = math.inf
    """Time at which this operator last made or checked the master's rights."""
    account_created_at: float = 0.0
    """Creation time of the master's ServiceAccount, as this operator last saw it."""
    refused: str = ""
    """Message of the API server if it has refused an action of the previous plan."""
    jobs: int = 1
    """Number of ElasticJobs in the operator's namespaces."""
    remaining_pods: tuple[WorkerPod, ...] | None = None
    """Worker Pods that hold resources; None if they were not listed."""
    allotted: bool = False
    """Whether the operator decides how many nodes the job may have."""
    gang: Gang | None = None
    """The PodGroup that its template names; None if it names none, or none is observed."""
    held_for: str = ""
    """Why it cannot decide; empty if it can."""


def _termination_message(ended: Obj) -> str:
    """Return the termination message of a container, or its exit code and reason."""
    code = f"it ended with exit code {ended.get('exitCode')} ({ended.get('reason') or 'no reason'})"
    return (ended.get("message") or "").strip() or code


def owner(meta: Obj) -> str:
    """Return the uid of the ElasticJob that owns an object; empty if there is none."""
    for reference in meta.get("ownerReferences") or ():
        if reference.get("kind") == names.KIND:
            return str(reference.get("uid", ""))
    return ""


def job_of(meta: Obj) -> JobUid:
    """Return the ElasticJob that owns an object, in the same namespace; the uid may be empty."""
    return meta.get("namespace", ""), owner(meta)


def uid_of(job: Obj) -> JobUid:
    """Return the namespace and the uid of an ElasticJob."""
    return job["metadata"]["namespace"], job["metadata"]["uid"]


def lean_job(obj: Obj) -> Obj:
    """Return a job without the parts that the operator does not use, to save memory.

    There may be a thousand jobs in memory. Of each node only phase and host are kept, and of the
    owners of fields only the allocator. The object itself is not changed.
    """
    meta = {k: v for k, v in obj["metadata"].items() if k != "managedFields"}
    writers = obj["metadata"].get("managedFields") or ()
    if ours := [writer for writer in writers if allots(writer)]:
        meta["managedFields"] = ours
    status = obj.get("status") or {}
    training = status.get("training")
    if training:
        kept = (
            *("phase", "generation", "endedAt", "leftOut", "nodesInRound", "desired", "speed"),
            *("hostFaults", "summary", "followedAllocation"),
        )
        lean = {k: training[k] for k in kept if k in training}
        lean["nodes"] = [
            {part: n[part] for part in ("phase", "host") if n.get(part)}
            for n in training.get("nodes") or ()
        ]
        status = status | {"training": lean}
    return obj | {"metadata": meta, "status": status}


def allots(writer: Obj) -> bool:
    """Return whether an entry of ``managedFields`` is of an operator that allots nodes to the job.

    Anybody who may change the job can write the entries, in any form.
    """
    fields = writer.get("fieldsV1")
    status = fields.get("f:status") if isinstance(fields, dict) else None
    ours = writer.get("manager") == names.ALLOCATOR_MANAGER
    return ours and isinstance(status, dict) and "f:allocation" in status
