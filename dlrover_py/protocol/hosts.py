"""Faults of hosts, and the hosts that have failed in several jobs."""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class HostFaultKind(StrEnum):
    """How a host has failed a node."""

    HARDWARE = "hardware"  # a device, its memory or its links failed under a worker
    CHECK = "check"  # the node did not pass its check
    LOST = "lost"  # the node fell silent, and nobody had asked it to leave


SPOT_LABELS: Final = {
    "cloud.google.com/gke-preemptible": "true",
    "cloud.google.com/gke-spot": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "elasticjob.dlrover/spot": "true",
}
"""Labels of hosts that are taken away at short notice. Clouds set all but the last one."""


class BadHosts(BaseModel):
    """Hosts that have failed in several jobs of the cluster (docs/diagnosis.md)."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    hosts: list[str] = Field(default_factory=list, max_length=1000)
    """Names of the hosts, the worst first."""
    avoid: list[str] = Field(default_factory=list, max_length=1000)
    """Names of the hosts on which no new node of the job is placed."""
    reason: Annotated[str, Field(max_length=4096)] = ""
    """Why, in words."""
