"""The actions of a plan, carried out in its order; a refusal ends the plan."""

from dataclasses import dataclass
from typing import Literal

from dlrover_operator.observed import Obj
from dlrover_py.kubernetes.kinds import Kind
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.hosts import BadHosts
from dlrover_py.protocol.job import ElasticJob

What = Literal[
    "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Secret", "Service", "Deployment"
]


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object; an existing one is kept if the job owns it."""

    what: What
    obj: Obj


@dataclass(frozen=True, slots=True)
class MakeCredentials:
    """Create the Secrets of certificate and token with one authority, or keep existing ones.

    The Secret for the recipes of the namespace is created, too.
    """

    job: ElasticJob


@dataclass(frozen=True, slots=True)
class RestoreToken:
    """Restore the Secret of the token if it was deleted, with the same token.

    No Pod of the job starts without it.
    """

    job: ElasticJob


@dataclass(frozen=True, slots=True)
class ReplaceDeployment:
    """Replace the master's Deployment, if it has not changed since it was observed."""

    obj: Obj


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    """Scale the master's Deployment to 0, which ends the master."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteService:
    """Delete a Service whose address is not the one in the master's Deployment."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteMasterPod:
    """Delete the master's Pod; its Deployment creates another one."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeletePods:
    """Delete the worker Pods that hold resources, because no master does it."""


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete a job whose ``ttlSecondsAfterFinished`` is over."""

    uid: str


@dataclass(frozen=True, slots=True)
class Allot:
    """Write how many nodes the job may have; None: nothing limits it any more."""

    allocation: NodeAllocation | None


@dataclass(frozen=True, slots=True)
class KeepPodGroup:
    """Create the job's PodGroup, or change its minimum.

    Before 1.37, Kubernetes cannot change its own groups. Then the group is deleted, and created
    again when that is observed.
    """

    kind: Kind
    obj: Obj
    existing: str
    """Uid of the group that exists; empty if there is none."""


@dataclass(frozen=True, slots=True)
class TellOfHosts:
    """Write which hosts have failed in several jobs; None: there are none any more."""

    bad_hosts: BadHosts | None


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Write the operator's complete part of the status."""

    status: Obj


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Create a Kubernetes event; an equal event is created once per generation of the spec."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = (
    Create
    | MakeCredentials
    | RestoreToken
    | ReplaceDeployment
    | ScaleToZero
    | DeleteService
    | DeleteMasterPod
    | DeletePods
    | DeleteJob
    | Allot
    | KeepPodGroup
    | TellOfHosts
    | SetStatus
    | RecordEvent
)
