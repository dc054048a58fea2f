"""Kinds of Kubernetes objects: the parts of their API paths."""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from dlrover_py.protocol.names import GROUP, KIND

Obj = dict[str, Any]
"""A Kubernetes object, or a part of it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of Kubernetes objects: the parts of its API path."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of the objects of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the API path of one object, of all objects in a namespace, or of all objects.

        Args:
            namespace: empty for all namespaces. Ignored for kinds without namespaces.
            name: name of the object; empty for all objects.
            subresource: such as ``log`` or ``scale``; empty for the object itself.
        """
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts += [self.plural, *(quote(part, safe="") for part in (name, subresource) if part)]
        return "/".join(parts)


PODS: Final = Kind("", "v1", "pods", "Pod")
SECRETS: Final = Kind("", "v1", "secrets", "Secret")
SERVICES: Final = Kind("", "v1", "services", "Service")
EVENTS: Final = Kind("", "v1", "events", "Event")
NODES: Final = Kind("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
SERVICE_ACCOUNTS: Final = Kind("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS: Final = Kind("apps", "v1", "deployments", "Deployment")
ROLES: Final = Kind("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS: Final = Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
NETWORK_POLICIES: Final = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
TOKEN_REVIEWS: Final = Kind(
    "authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False
)
ACCESS_REVIEWS: Final = Kind(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
ELASTICJOBS: Final = Kind(GROUP, "v1alpha1", "elasticjobs", KIND)
KUEUE: Final = "kueue.x-k8s.io"
"""API group of Kueue."""
WORKLOADS: Final = Kind(KUEUE, "v1beta2", "workloads", "Workload")
LOCAL_QUEUES: Final = Kind(KUEUE, "v1beta2", "localqueues", "LocalQueue")
RESOURCE_FLAVORS: Final = Kind(
    KUEUE, "v1beta2", "resourceflavors", "ResourceFlavor", namespaced=False
)
VOLCANO_GROUPS: Final = Kind("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
COSCHEDULING_GROUPS: Final = Kind("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
SCHEDULING: Final = "scheduling.k8s.io"
"""API group of Kubernetes' own gangs. Which version has them is asked of the API server."""
CRDS: Final = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)


def named(kind: Kind, obj: Obj) -> Obj:
    """Return the object with its ``apiVersion`` and ``kind``."""
    return {"apiVersion": kind.api_version, "kind": kind.name} | obj


def meta_of(obj: Obj) -> Obj:
    """Return the metadata of an object; empty if it has none."""
    return obj.get("metadata") or {}
