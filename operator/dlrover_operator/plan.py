"""PURE: what is to be done for one job, from what is seen of it now.

Level-triggered: the same view gives the same plan, whatever happened before; a plan that was
carried out is empty the next time. Two operators at once do no harm: everything has a name that
follows from the job's, creating is a POST, and what is there is kept if it is the job's.

States, as the master and the operator tell each other by the job's status:

===============  ==================================================================================
refused          the spec cannot be used: nothing is made; what runs already goes on, and what its
                 master needs is kept
running          Service, then Deployment (told the Service's address); made again if deleted
suspended        the master stops its nodes and says so, then the Deployment goes to 0;
                 a resume plans it anew from the spec, with this operator's version
too late         ``DeadlineExceeded`` is set and the master ends the job; without one, we do
ended            the Deployment goes to 0; after ``ttlSecondsAfterFinished`` the job is deleted
===============  ==================================================================================

A master knows when its agents are gone. Which Pods hold resources yet is for the API server to say:
worker Pods are listed before a master ends, and before a job is called suspended
(:attr:`Plan.looks`). A Pod holds resources until its phase is Succeeded or Failed, or it is gone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from dlrover_operator import manifests
from dlrover_operator.manifests import Options
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, Unsupported
from dlrover_py.protocol.job import INERT, ElasticJob
from dlrover_py.protocol.refusals import refusal_in
from dlrover_py.protocol.status import JobPhase, NodePhase, rfc3339, unix_seconds

Obj = dict[str, Any]

LEAVE_S = 90.0
"""After a job's end its nodes have so long to go; longer than a Pod's usual grace, twice."""
RIGHTS_S = 300.0
"""A master's account and rights are looked after so seldom: one that may not write its status
cannot tell."""
SKEW_S = 5.0
"""Two API servers may stamp what they make by clocks that differ by so much."""
HEAL_S = 30.0
"""With no master for so long, what it needs is made again where it was deleted."""
MASTERLESS_S = 60.0
"""With no master for so long, a job that is to stop is stopped without it."""
ADDRESS_S = 120.0
"""An address that is refused for so long belongs to another Service by now: a server may take a
moment to free that of a Service that was deleted."""
LOOK_S = 2.0
"""Pods that are about to go are listed again so soon."""
OLD_S = 1.0
"""Objects of a deleted job of the same name go soon; until then this is the pace of looking."""
PODS_SHOWN = 3
OVERDUE = (
    "they were deleted, and their kubelets have not ended them. Where a host is lost for good, "
    "delete that Node, or taint it with node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
)
ENDED = tuple(phase.value for phase in JobPhase if phase.ended)
GOING = (JobPhase.PENDING, JobPhase.RUNNING, JobPhase.FORMING)
REFUSED = "Refused"
"""Phase of a job that is not run: see its condition ``Accepted``."""
MESSAGE = 1024
STATES = (
    *("Accepted", "MasterReady", "PodsReady", "Running", "Degraded", "JournalWritable"),
    *("Suspended", "DeadlineExceeded", "Succeeded", "Failed", "Stopped", "PodsLeft"),
)
"""Conditions that tell where a job stands. Each other one is trouble as long as it is True."""
UNDER_WAY = ("", "Creating", "Starting", "Waiting", "Suspended", "Finished", "Available")
"""Reasons of ``MasterReady`` that are no trouble."""


# --- what is seen ---


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is kept of a master's Deployment."""

    uid: str
    owner: str
    """uid of the ElasticJob that it is of; empty if it is nobody's."""
    version: str
    replicas: int
    available: bool
    told: str
    """The Service's address that it was given."""
    trouble: str = ""
    """Why no Pod could be made, in the server's words."""
    planned: str = ""
    """The sum of what it was made from."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """The view of an object."""
        meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
        pod = (spec.get("template") or {}).get("spec") or {}
        env = [e for c in pod.get("containers") or () for e in c.get("env") or ()]
        told = next((e.get("value", "") for e in env if e["name"] == names.ENV_MASTER_SERVICE), "")
        trouble = [
            c.get("message", "")
            for c in status.get("conditions") or ()
            if c.get("type") == "ReplicaFailure" and c.get("status") == "True"
        ]
        return cls(
            uid=meta["uid"],
            owner=_owner(meta),
            version=meta.get("resourceVersion", ""),
            replicas=spec.get("replicas", 1),
            available=(status.get("availableReplicas") or 0) > 0,
            told=told.rpartition(":")[0].strip("[]"),
            trouble=trouble[0] if trouble else "",
            planned=(meta.get("annotations") or {}).get(names.NOTE_PLAN, ""),
        )


@dataclass(frozen=True, slots=True)
class Service:
    """What is kept of a master's Service."""

    uid: str
    owner: str
    address: str

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """The view of an object."""
        meta = obj["metadata"]
        address = (obj.get("spec") or {}).get("clusterIP") or ""
        return cls(uid=meta["uid"], owner=_owner(meta), address=address)


@dataclass(frozen=True, slots=True)
class MasterPod:
    """Why a master's Pod does not run yet, and what it was made with."""

    reason: str = ""
    message: str = ""
    name: str = ""
    uid: str = ""
    made_at: float = 0.0
    made_by: str = ""
    """The ReplicaSet that it is of."""
    leaving: bool = False
    holds: bool = True
    """It holds resources."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """The view of an object."""
        status = obj.get("status") or {}
        reason = message = ""
        for condition in status.get("conditions") or ():
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                reason, message = condition.get("reason", ""), condition.get("message", "")
        for container in status.get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                reason, message = waiting["reason"], waiting.get("message", "")
                ended = (container.get("lastState") or {}).get("terminated")
                if ended:
                    message = f"{_last_words(ended)}; {message}"
        meta = obj["metadata"]
        makers = [o for o in meta.get("ownerReferences") or () if o.get("kind") == "ReplicaSet"]
        return cls(
            reason=reason,
            message=message,
            name=meta["name"],
            uid=meta["uid"],
            made_at=unix_seconds(meta.get("creationTimestamp")) or 0.0,
            made_by=makers[0].get("name", "") if makers else "",
            leaving="deletionTimestamp" in meta,
            holds=status.get("phase") not in ("Succeeded", "Failed"),
        )


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """A worker's Pod that holds resources: requests on a host, and a share of a quota."""

    name: str
    uid: str
    host: str
    leaving: bool
    """It was deleted, and is not gone yet."""

    @classmethod
    def of(cls, obj: Obj, job_uid: str) -> Self | None:
        """The view of a Pod; None if it holds nothing or is not of this job."""
        meta = obj["metadata"]
        owned = any(o.get("uid") == job_uid for o in meta.get("ownerReferences") or ())
        if not owned or (obj.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return None
        host = (obj.get("spec") or {}).get("nodeName") or ""
        return cls(meta["name"], meta["uid"], host, "deletionTimestamp" in meta)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the API server refused the last time."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a plan is made from."""

    job: Obj
    deployment: Deployment | None = None
    service: Service | None = None
    pods: tuple[MasterPod, ...] = ()
    trouble: Trouble | None = None
    made_at: float = 0.0
    """When this operator last made what a master needs."""
    rights_at: float = math.inf
    """When it last looked after the master's rights."""
    account_at: float = 0.0
    """When the master's account was made, as this operator last saw it."""
    refused: str = ""
    """What the API server said to the plan before, if it has refused some of it."""
    jobs: int = 1
    """ElasticJobs that the operator looks after."""
    holding: tuple[WorkerPod, ...] | None = None
    """The worker Pods that hold resources; None if they were not listed."""


# --- what is to be done, in this order; a refusal ends it ---

What = Literal[
    "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Secret", "Service", "Deployment"
]


@dataclass(frozen=True, slots=True)
class Create:
    """POST; what is there already is kept if it is the job's."""

    what: What
    obj: Obj


@dataclass(frozen=True, slots=True)
class MakeCredentials:
    """The two Secrets, of which one authority must be: what is there is kept."""

    job: ElasticJob


@dataclass(frozen=True, slots=True)
class KeepToken:
    """If the token's Secret is gone, make it again as it was: no Pod of the job starts without."""

    job: ElasticJob


@dataclass(frozen=True, slots=True)
class Replan:
    """Write the Deployment anew, if it is still as it was seen."""

    obj: Obj


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    """End the master."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteService:
    """It has another address than the one that was told."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteMasterPod:
    """Its Deployment makes another."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeletePods:
    """Delete the worker Pods that hold resources: there is no master that does it."""


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Its time after its end is over."""

    uid: str


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Our part of the status, whole."""

    status: Obj


@dataclass(frozen=True, slots=True)
class Tell:
    """A Kubernetes event; the same one is told once for each generation of the spec."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = (
    Create
    | MakeCredentials
    | KeepToken
    | Replan
    | ScaleToZero
    | DeleteService
    | DeleteMasterPod
    | DeletePods
    | DeleteJob
    | SetStatus
    | Tell
)


_GRAVE = (Replan, ScaleToZero, DeletePods, DeleteJob)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now, and when to look again if nothing changes."""

    actions: tuple[Action, ...] = ()
    status: tuple[SetStatus | Tell, ...] = ()
    """Carried out last, and also when an action was refused (then planned again)."""
    wake_at: float | None = None
    grave: bool = False
    """It ends something, or undoes an end: to be decided on the job as it stands, not as it was
    last seen."""
    looks: bool = False
    """The next step depends on :attr:`Seen.holding`: list the Pods, then plan again."""


Loud = Literal["", "Normal", "Warning"]
Said = tuple[str, bool, str, str, Loud]
"""Of a condition: type, status, reason, message, and how loud its change is told."""


def plan(seen: Seen, now: float, options: Options) -> Plan:
    """What is to be done for a job."""
    meta, spec = seen.job["metadata"], seen.job.get("spec") or {}
    foreign = spec.get("managedBy") not in (None, names.MANAGED_BY)
    if foreign or meta.get("deletionTimestamp"):
        return Plan()
    return _Planner(seen, now, options).plan()


class _Planner:
    def __init__(self, seen: Seen, now: float, options: Options) -> None:
        self.seen, self.now, self.options = seen, now, options
        self.meta = seen.job["metadata"]
        self.spec: Obj = seen.job.get("spec") or {}
        self.status: Obj = seen.job.get("status") or {}
        self.training: Obj = self.status.get("training") or {}
        self.conditions = {c["type"]: c for c in self.status.get("conditions") or ()}
        self.name = names.master_of(self.meta["name"])
        self.wakes: list[float] = []
        self.looks = False
        self.refused: ConfigError | None = None
        self.job: ElasticJob | None = None
        """What the master's objects are made from; None if none are to be made."""
        try:
            self.job = ElasticJob.read(seen.job)
        except ConfigError as error:
            self.refused = error
        self.deployment, self.service = seen.deployment, seen.service
        self.foreign = ""
        """What of these names is not ours; ``old`` if it is of a deleted job of this name."""
        self.old = False
        self._set_foreign_aside()
        self.suspend = self.spec.get("suspend") is True
        self.resting = self.deployment is None or self.deployment.replicas == 0
        self.runs = not self.resting or self.training.get("phase") in GOING
        if self.refused is not None and self.runs:
            self.job = _bare(seen.job)
        self.ended = self._ended()
        self.start = self._start()
        self.pending_since = self._pending_since()
        self.masterless_since = self._masterless_since()
        self.too_late = self._too_late()
        if self.too_late and not self.ended and self.resting:
            self.ended = JobPhase.FAILED.value

    def plan(self) -> Plan:
        actions = tuple(self._actions())
        status = tuple(self._status())
        verdict = self.too_late is not None and not self._is("DeadlineExceeded")
        grave = verdict or any(isinstance(action, _GRAVE) for action in actions)
        return Plan(actions, status, min(self.wakes, default=None), grave, self.looks)

    # --- facts ---

    def _set_foreign_aside(self) -> None:
        for kind, owner in (
            ("Deployment", self.deployment and self.deployment.owner),
            ("Service", self.service and self.service.owner),
        ):
            if owner not in (None, self.meta["uid"]):
                self.foreign = kind
                self.old = owner != ""
                self.wakes.append(self.now + OLD_S)
        if self.foreign:
            self.deployment = self.service = None

    def _is(self, condition: str) -> bool:
        return bool(self.conditions.get(condition, {}).get("status") == "True")

    def _since(self, condition: str, status: str) -> float | None:
        """Since when a condition has this status; None if it has not."""
        found = self.conditions.get(condition, {})
        if found.get("status") != status:
            return None
        return unix_seconds(found.get("lastTransitionTime"))

    def _masterless_since(self) -> float | None:
        if self.deployment is not None and self.deployment.available:
            return None
        since = self._since("MasterReady", "False")
        return max(self.now if since is None else since, self.start or 0.0)

    def _masterless_for(self, limit_s: float) -> bool:
        return self.masterless_since is not None and self._past(self.masterless_since + limit_s)

    def _ended(self) -> str:
        for phase in (JobPhase.FAILED, JobPhase.SUCCEEDED):
            if self._is(phase.value):
                return phase.value
        if self.training.get("phase") in ENDED:
            return str(self.training["phase"])
        ours = self.status.get("phase")
        return str(ours) if ours in ENDED and self.status.get("completionTime") else ""

    def _start(self) -> float | None:
        """When the job began, or was resumed."""
        start = unix_seconds(self.status.get("startTime"))
        if self.ended:
            return start
        if self.suspend and self.resting:
            return None
        if self._is("Suspended"):
            return start if self.suspend else self.now
        if start is None and not (self.refused and self.resting):
            return self.now
        return start

    def _pending_since(self) -> float | None:
        """Since when training has not run, as seen here: the master's clock may be another."""
        if self.ended or self.start is None or self._is("Running"):
            return None
        known = unix_seconds(self.status.get("pendingSince"))
        first = self.now if "Running" in self.conditions else self.start
        return first if known is None else known

    def _too_late(self) -> tuple[str, str] | None:
        """Reason and message, once a deadline has passed."""
        if self._is("DeadlineExceeded"):
            found = self.conditions["DeadlineExceeded"]
            return found.get("reason", ""), found.get("message", "")
        if self.ended or self.start is None or self.suspend:
            return None
        limit = self.spec.get("activeDeadlineSeconds")
        if limit is not None and self._past(self.start + limit):
            return "ActiveDeadline", f"it was not over {limit} s after its start"
        limit = self.spec.get("pendingTimeoutSeconds")
        if limit is None or self.pending_since is None:
            return None
        if self._past(max(self.start, self.pending_since) + limit):
            words = f"it had fewer nodes than its minimum for {limit} s"
            reason, message = self._trouble()
            if reason:
                words += f"; {reason}: {message}" if message else f"; {reason}"
            return "PendingTimeout", words
        return None

    def _trouble(self) -> tuple[str, str]:
        """Reason and message of what keeps the job from running as it should; empty if nothing
        does."""
        for kind, true, reason, message, _ in (self._accepted(), self._master_ready()):
            if not true and (kind == "Accepted" or reason not in UNDER_WAY):
                return reason, message
        for condition in self.conditions.values():
            if condition["type"] not in STATES and condition.get("status") == "True":
                return condition["type"], condition.get("message", "")
        return "", ""

    def _reason(self) -> str:
        """The column beside the phase: one word for what is wrong, or why the job has failed."""
        if self.ended == JobPhase.FAILED:
            by_master = self.training.get("phase") == JobPhase.FAILED
            kind = "Failed" if by_master or self.too_late is None else "DeadlineExceeded"
            return str(self.conditions.get(kind, {}).get("reason", "")) or kind
        if self.ended or (self.suspend and self.resting):
            return "PodsLeft" if self._overdue() else ""
        return self._trouble()[0]

    def _past(self, at: float) -> bool:
        if self.now < at:
            self.wakes.append(at)
        return self.now >= at

    # --- actions ---

    def _actions(self) -> Iterator[Action]:
        if self.ended:
            yield from self._end()
        elif self.too_late:
            yield from self._keep_rights()
            yield from self._stop_masterless()
        elif self.suspend:
            if self.resting:
                yield from self._leave_no_pods()
            elif self._nodes_are_gone() and self._pods_are_gone():
                yield from self._scale_to_zero()
            else:
                yield from self._keep_service()
                yield from self._keep_rights()
                if self._waits_in_vain():
                    yield DeletePods()
                    yield from self._scale_to_zero()
                else:
                    yield from self._stop_masterless()
        elif self.job is not None and not self.foreign:
            yield from self._run(self.job)

    def _leave_no_pods(self) -> Iterator[Action]:
        """With no master there, delete the Pods that hold resources and were not deleted yet."""
        if not self._pods_are_gone() and not all(pod.leaving for pod in self.seen.holding or ()):
            yield DeletePods()

    def _end(self) -> Iterator[Action]:
        ttl = self.spec.get("ttlSecondsAfterFinished")
        completion = unix_seconds(self.status.get("completionTime"))
        if self.resting:
            yield from self._leave_no_pods()
        elif self._nodes_are_gone() and self._pods_are_gone():
            yield from self._scale_to_zero()
        elif completion is not None and self._past(completion + LEAVE_S):
            self._pods_are_gone()
            yield DeletePods()  # on a host that was lost, or of a container that does not end
            yield from self._scale_to_zero()
        else:
            yield from self._keep_service()
        if ttl is not None and completion is not None and self._past(completion + ttl):
            yield DeleteJob(self.meta["uid"])

    def _scale_to_zero(self) -> Iterator[Action]:
        if self.deployment is not None and self.deployment.replicas:
            yield ScaleToZero(self.name, self.deployment.uid)

    def _stop_masterless(self) -> Iterator[Action]:
        if self._masterless_for(MASTERLESS_S):
            yield DeletePods()
            yield from self._scale_to_zero()

    def _nodes_are_gone(self) -> bool:
        """The master says that it has stopped, as this very spec wishes, and that no node is
        left."""
        told = self.training
        nodes, phase = told.get("nodes") or (), told.get("phase")
        return bool(
            (phase in ENDED or self._has_suspended())
            and (nodes or not told.get("leftOut"))  # those that are gone are shown last
            and all(node.get("phase") == NodePhase.GONE for node in nodes)
        )

    def _pods_are_gone(self) -> bool:
        """Whether no Pod of the job holds resources. Asked until it is so, and not again."""
        if self._since("PodsLeft", "False") is not None:
            return True
        if self.seen.holding is None:
            self.looks = True
        elif self.seen.holding and not self._overdue():
            self.wakes.append(self.now + LOOK_S)
        return self.seen.holding == ()

    def _overdue(self) -> bool:
        """Whether Pods hold resources that should have gone long ago."""
        if self.seen.holding is None:
            return self._is("PodsLeft")
        since = self._since("Suspended", "False")
        if self.ended:
            since = unix_seconds(self.status.get("completionTime"))
        return bool(self.seen.holding) and since is not None and self._past(since + LEAVE_S)

    def _holding_in_words(self) -> str:
        pods = self.seen.holding or ()
        shown = ", ".join(
            f"{pod.name} on {pod.host}" if pod.host else pod.name for pod in pods[:PODS_SHOWN]
        )
        more = f" and {len(pods) - PODS_SHOWN} more" if len(pods) > PODS_SHOWN else ""
        return f"these Pods hold resources yet: {shown}{more}"

    def _has_suspended(self) -> bool:
        told = self.training
        fits = told.get("generation") == self.meta.get("generation")
        return fits and told.get("phase") == JobPhase.SUSPENDED

    def _waits_in_vain(self) -> bool:
        """Whether all that is left of a job to be suspended does not go: nodes that have never
        spoken, on hosts that are lost, or Pods whose agents have ended."""
        told = self.training
        phases = {node.get("phase") for node in told.get("nodes") or ()}
        silent = phases <= {NodePhase.PENDING, NodePhase.STARTING, NodePhase.GONE}
        suspending = self._since("Suspended", "False")
        return bool(
            self._has_suspended()
            and silent
            and (self._nodes_are_gone() or not told.get("leftOut"))
            and self.conditions.get("Suspended", {}).get("reason") == "Suspending"
            and suspending is not None
            and self._past(suspending + LEAVE_S)
        )

    def _keep_service(self) -> Iterator[Action]:
        """Agents that have lost their connection must find the master to hear of the end."""
        up = self.deployment is not None and self.deployment.replicas
        if up and self._address_is_lost():
            return
        if up and self.service is None and self.job is not None and self.deployment is not None:
            yield Create("Service", manifests.service(self.job, self.deployment.told))

    def _keep_rights(self) -> Iterator[Action]:
        """A master that is to end its nodes must hear of it, and tell."""
        if self.job is not None and self.deployment is not None and self.deployment.replicas:
            yield from self._renew()
            if self._past(self.seen.rights_at + RIGHTS_S):
                yield from _rights(self.job)

    def _renew(self) -> Iterator[Action]:
        """A token is good for the account that it was asked for, and for no later one of its name:
        all that this master asks for is refused, and a new container would have the same token for
        most of an hour. A new Pod has its own."""
        for pod in self._masters():
            if not pod.leaving and pod.made_at + SKEW_S < self.seen.account_at:
                yield DeleteMasterPod(pod.name, pod.uid)

    def _masters(self) -> list[MasterPod]:
        return [pod for pod in self.seen.pods if pod.made_by.startswith(f"{self.name}-")]

    def _run(self, job: ElasticJob) -> Iterator[Action]:
        deployment, service = self.deployment, self.service
        if service is None:
            if deployment is None:
                yield from self._needs(job)
            told = deployment.told if deployment is not None and deployment.replicas else ""
            if told and self._address_is_lost():  # its nodes cannot find it: they are made anew
                yield from self._scale_to_zero()
                return
            yield Create("Service", manifests.service(job, told))
            return  # the Deployment is told an address that is seen
        if deployment is None:
            yield Create("Deployment", self._deployment(job, service))
        elif deployment.replicas == 0:
            yield from self._needs(job)
            yield self._replan(deployment, self._deployment(job, service))
        elif deployment.told and deployment.told != service.address:
            yield DeleteService(self.name, service.uid)
        else:
            yield from self._heal(job, deployment, service)

    def _address_is_lost(self) -> bool:
        """Whether the Service cannot have the address again that was told."""
        since = self._since("MasterReady", "False")
        refused = self.service is None and "spec.clusterIP" in self.seen.refused
        return refused and since is not None and self._past(since + ADDRESS_S)

    def _deployment(self, job: ElasticJob, service: Service) -> Obj:
        return manifests.deployment(job, service.address, self.options, self.seen.jobs)

    def _replan(self, deployment: Deployment, wish: Obj) -> Replan:
        seen = {"uid": deployment.uid, "resourceVersion": deployment.version}
        return Replan(wish | {"metadata": wish["metadata"] | seen})

    def _heal(self, job: ElasticJob, deployment: Deployment, service: Service) -> Iterator[Action]:
        yield from self._renew()
        masterless = self._masterless_for(HEAL_S)
        lacks = masterless or self._lacks()
        if (lacks or self._is_short()) and self._past(self.seen.made_at + HEAL_S):
            if lacks:
                yield from self._needed_to_act(job)
            yield MakeCredentials(job) if masterless else KeepToken(job)
            wish = self._deployment(job, service)
            planned = wish["metadata"]["annotations"][names.NOTE_PLAN]
            if masterless and self._can_never_start() and deployment.planned != planned:
                yield self._replan(deployment, wish)
        elif self._past(self.seen.rights_at + RIGHTS_S):
            yield from _rights(job)

    def _can_never_start(self) -> bool:
        """No master has ever spoken, or none since the resume, and its Pod has trouble: what it was
        made from may have been a mistake that is mended by now. One that only takes its time is
        left alone: two operators of different versions would take it from each other."""
        trouble = self.deployment is not None and self.deployment.trouble
        stuck = trouble or any(pod.reason for pod in self.seen.pods)
        spoken = self.training.get("phase") not in (None, JobPhase.SUSPENDED)
        return bool(stuck) and not spoken and self.refused is None

    def _needs(self, job: ElasticJob) -> Iterator[Action]:
        """What a master needs before it is there; that nobody watches: it is made again by a
        POST."""
        yield from self._needed_to_act(job)
        yield MakeCredentials(job)

    def _needed_to_act(self, job: ElasticJob) -> Iterator[Action]:
        """What can be made again under a master that runs, too."""
        yield from _rights(job)
        yield Create("NetworkPolicy", manifests.network_policy(job))
        if self.options.workers_policy:
            yield Create("NetworkPolicy", manifests.workers_network_policy(job))
        yield Create("Secret", manifests.journal_secret(job))

    def _is_short(self) -> bool:
        """Whether nodes are missing. Their kubelets alone say that they miss a Secret."""
        told = self.training
        return told.get("phase") in GOING and told.get("nodesInRound", 0) < told.get("wanted", 0)

    def _lacks(self) -> bool:
        """Whether a master says that something is missing that it was made with; its clock may be
        ahead of this one's."""
        journal = self._since("JournalWritable", "False")
        denied = self._since("PermissionDenied", "True")
        told = [since for since in (journal, denied) if since is not None]
        return any(since > self.now or self._past(since + HEAL_S) for since in told)

    # --- status ---

    def _status(self) -> Iterator[SetStatus | Tell]:
        told = [self._condition(said) for said in self._ours_to_say()]
        status: Obj = {"conditions": [c for c, _ in told]}
        fields: Obj = {
            "phase": self._phase() or None,
            "reason": self._reason() or None,
            "observedGeneration": self.meta.get("generation"),
            "startTime": None if self.start is None else rfc3339(self.start),
            "pendingSince": None if self.pending_since is None else rfc3339(self.pending_since),
            "completionTime": self._completion(),
        }
        status |= {name: value for name, value in fields.items() if value is not None}
        changed = any(c != self.conditions.get(c["type"]) for c, _ in told)
        changed |= any(self.status.get(name) != value for name, value in fields.items())
        if changed:
            yield SetStatus(status)
        for condition, news in told:
            if news != "":
                yield Tell(news, condition["reason"], condition["message"][:MESSAGE])

    def _completion(self) -> str | None:
        if not self.ended:
            return None
        return str(self.status.get("completionTime") or rfc3339(self.now))

    def _phase(self) -> str:
        if self.ended:
            return self.ended
        if self.suspend and self.resting:
            return JobPhase.SUSPENDED.value
        if not self.runs and not self._accepted()[1]:
            return REFUSED
        published = self.training.get("phase")
        if published == JobPhase.SUSPENDED and not self.suspend:
            return JobPhase.PENDING.value  # its master has not spoken since the resume
        if published:
            return str(published)
        known = str(self.status.get("phase") or "")
        made = self.deployment is not None or self.service is not None
        # It was looked at, even where nothing could be made.
        return "Created" if made or known in ("", REFUSED) else known

    def _ours_to_say(self) -> Iterator[Said]:
        yield self._accepted()
        yield self._master_ready()
        if self.ended or self.suspend:
            yield from self._pods_left()
        if self.suspend and not self.ended:
            masters = [pod.name for pod in self._masters() if pod.holds]
            if self.resting and self._pods_are_gone() and not masters:
                words = "no node is left, and the master has ended"
                yield "Suspended", True, "Suspended", words, "Normal"
            else:
                words = "the master stops its nodes"
                if self.seen.holding:
                    words = self._holding_in_words()
                elif self.resting and masters:
                    words = f"no node is left, and the master's Pod {masters[0]} is about to end"
                yield "Suspended", False, "Suspending", words, ""
        elif "Suspended" in self.conditions:
            if self.ended:
                yield "Suspended", False, "Finished", "the job is over", ""
            else:
                yield "Suspended", False, "Resumed", "spec.suspend is false", "Normal"
        if self.too_late is not None:
            yield "DeadlineExceeded", True, *self.too_late, "Warning"
            by_master = self.training.get("phase") == JobPhase.FAILED
            if self.ended == JobPhase.FAILED and not by_master:
                yield "Failed", True, "DeadlineExceeded", self.too_late[1], ""

    def _pods_left(self) -> Iterator[Said]:
        old = self.conditions.get("PodsLeft")
        if self._since("PodsLeft", "False") is not None or self.seen.holding == ():
            yield "PodsLeft", False, "NoneLeft", "no worker's Pod holds resources", ""
        elif self.seen.holding is None:
            if old is not None:
                yield "PodsLeft", True, old["reason"], old["message"], ""
        elif self._overdue():
            words = f"{self._holding_in_words()}; {OVERDUE}"
            yield "PodsLeft", True, "NotEnding", words, "Warning"

    def _accepted(self) -> Said:
        if self.refused is not None:
            reason = "Unsupported" if isinstance(self.refused, Unsupported) else "InvalidSpec"
            return "Accepted", False, reason, str(self.refused), "Warning"
        if self.foreign and not self.old:
            words = f"{self.foreign} {self.name} is there already and is not this job's"
            return "Accepted", False, "NameConflict", f"{words}; delete it", "Warning"
        trouble = self.seen.trouble
        if trouble is not None and trouble.reason == "NameConflict":
            return "Accepted", False, trouble.reason, trouble.message, "Warning"
        inert = self.job.without_effect() if self.job is not None else []
        no_effect = f"{', '.join(inert)}: {INERT}" if inert else ""
        alone = self.job.worker.command_remarks() if self.job is not None else ""
        if alone:
            words = f"{alone}\n{no_effect}".rstrip()
            return "Accepted", True, "DoesNotJoin", words, "Warning"
        if inert:
            return "Accepted", True, "WithoutEffect", no_effect, "Normal"
        return "Accepted", True, "Accepted", "", ""

    def _master_ready(self) -> Said:
        if self.ended:
            return "MasterReady", False, "Finished", "the job is over", ""
        if self.suspend and self.resting:
            return "MasterReady", False, "Suspended", "", ""
        trouble = self.seen.trouble
        if trouble is not None and trouble.reason != "NameConflict":
            loud: Loud = "" if trouble.reason == "Waiting" else "Warning"
            return "MasterReady", False, trouble.reason, trouble.message, loud
        if self.old:
            words = "what a deleted job of this name has left is not gone yet"
            return "MasterReady", False, "Waiting", words, ""
        deployment = self.deployment
        if self.refused is not None and not self.runs:
            return "MasterReady", False, "Refused", "", ""
        if deployment is None:
            return "MasterReady", False, "Creating", "", ""
        if deployment.available:
            return "MasterReady", True, "Available", "it serves its nodes", "Normal"
        for pod in self.seen.pods:
            if pod.reason:
                return "MasterReady", False, pod.reason, pod.message, "Warning"
        if deployment.trouble:
            why = refusal_in(deployment.trouble) or "FailedCreate"
            return "MasterReady", False, str(why), deployment.trouble, "Warning"
        return "MasterReady", False, "Starting", "its Pod is not ready yet", ""

    def _condition(self, said: Said) -> tuple[Obj, Loud]:
        kind, true, reason, message, loud = said
        status = "True" if true else "False"
        old = self.conditions.get(kind, {})
        same = old.get("status") == status
        began = reason == "Suspending" and old.get("reason") != reason  # since when is asked for
        at = old.get("lastTransitionTime") if same and not began else None
        condition: Obj = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message[:32768],
            "lastTransitionTime": at or rfc3339(self.now),
        }
        if generation := self.meta.get("generation"):
            condition["observedGeneration"] = generation
        news = not same or old.get("reason") != reason
        return condition, loud if news else ""


def _rights(job: ElasticJob) -> Iterator[Action]:
    yield Create("ServiceAccount", manifests.service_account(job))
    yield Create("Role", manifests.role(job))
    yield Create("RoleBinding", manifests.role_binding(job))


def _bare(obj: Obj) -> ElasticJob | None:
    """Of a job whose spec cannot be used: all that its master's objects are made from."""
    roles = (obj.get("spec") or {}).get("replicaSpecs") or {}
    theirs = ((roles.get(names.ROLE_WORKER) or {}).get("template") or {}).get("spec")
    pod: Obj = {"containers": [{"name": names.MAIN_CONTAINER}]}
    if isinstance(theirs, dict):
        pod["hostNetwork"] = theirs.get("hostNetwork")
    for master in (roles.get(names.ROLE_MASTER), None):
        worker = {"template": {"spec": pod}}
        spec = {"replicaSpecs": {names.ROLE_WORKER: worker, names.ROLE_MASTER: master}}
        try:
            return ElasticJob.read(obj | {"spec": spec})
        except ConfigError:
            continue
    return None  # its name is none that an object can have


def _last_words(ended: Obj) -> str:
    code = f"it ended with code {ended.get('exitCode')}, {ended.get('reason') or 'without a word'}"
    return (ended.get("message") or "").strip() or code


def _owner(meta: Obj) -> str:
    for reference in meta.get("ownerReferences") or ():
        if reference.get("kind") == names.KIND:
            return str(reference.get("uid", ""))
    return ""
