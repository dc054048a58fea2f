"""``resourceAdvice`` of a role: which memory and CPUs its nodes would need, by what they use."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from dlrover_py.protocol.autoscale import STRICT
from dlrover_py.protocol.memory_growth import MOST
from dlrover_py.protocol.quantities import quantity

Bytes = Annotated[
    str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$", max_length=32)
]
Cores = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?m?$", max_length=32)]
MOST_MILLI = 10**9
"""Greatest number of thousandths of a CPU that is taken for a request."""


class MemoryRange(BaseModel):
    """The memory limits that new nodes may get."""

    model_config = STRICT

    min: Bytes
    """The lowest memory limit of the main container, such as 8Gi."""
    max: Bytes
    """The highest memory limit of the main container. Hosts must have room for it."""

    @property
    def least(self) -> int:
        """The lowest limit in bytes."""
        return math.ceil(min(quantity(self.min), Decimal(MOST)))

    @property
    def most(self) -> int:
        """The highest limit in bytes."""
        return math.floor(min(quantity(self.max), Decimal(MOST)))


class CpuRange(BaseModel):
    """The CPU requests that new nodes may get."""

    model_config = STRICT

    min: Cores
    """The lowest CPU request of the main container, such as 2 or 500m."""
    max: Cores
    """The highest CPU request of the main container."""

    @property
    def least(self) -> int:
        """The lowest request in thousandths of a CPU."""
        return _milli(self.min)

    @property
    def most(self) -> int:
        """The highest request in thousandths of a CPU."""
        return _milli(self.max)


class ResourceAdviceSpec(BaseModel):
    """What is said of the memory and the CPUs of nodes, by what they were seen to use.

    A node that runs is never changed. It keeps what it was created with.
    """

    model_config = STRICT

    mode: Literal["off", "advise", "auto"] = "advise"
    """``off``: nothing is measured. ``advise``: an event and a condition say what would do.
    ``auto``: nodes that are created anyway get it, within ``memory`` and ``cpu``."""
    margin: Annotated[float, Field(ge=1.1, le=4)] = 1.25
    """What is advised, divided by what is used: the peak of the memory, and the number of CPUs that
    is not exceeded in 95 % of the time."""
    observe_seconds: Annotated[int, Field(ge=60, le=604_800)] = 3600
    """Seconds of training that are measured before anything is advised."""
    memory: MemoryRange | None = None
    """Memory limits that ``auto`` may give to new nodes. If absent, memory is only advised."""
    cpu: CpuRange | None = None
    """CPU requests that ``auto`` may give to new nodes. If absent, CPUs are only advised."""

    def problems(self, memory: int) -> list[str]:
        """Return what does not fit together, in words; empty if all does.

        Args:
            memory: The memory limit of the template's main container in bytes; 0 without one.
        """
        found = []
        for name, span in (("memory", self.memory), ("cpu", self.cpu)):
            if span is not None and not 0 < span.least <= span.most:
                found.append(
                    f"resourceAdvice.{name} is from {span.min} to {span.max}: "
                    "expected 0 < min ≤ max"
                )
        if self.mode == "auto" and self.memory is None and self.cpu is None:
            found.append(
                "resourceAdvice.mode is auto, without limits for it: expected "
                "resourceAdvice.memory or resourceAdvice.cpu"
            )
        if self.mode != "off" and not memory:
            found.append(
                "resourceAdvice needs a memory limit of the main container in the template, because"
                " what a node uses is known only then"
            )
        return found


def cpu_milli(container: Mapping[str, Any], kind: Literal["limits", "requests"]) -> int:
    """Return the CPU limit or request of a container of a Pod template, in thousandths of a CPU.

    It is 0 if there is none, or if what is there is no number of CPUs.
    """
    found: object = container
    for name in ("resources", kind, "cpu"):
        found = found.get(name) if isinstance(found, Mapping) else None
    try:
        value = quantity(str(found)) * 1000
    except (ValueError, ArithmeticError):
        return 0
    return math.ceil(value) if 0 < value <= MOST_MILLI else 0


def with_cpu_request(container: Mapping[str, Any], milli: int) -> dict[str, Any]:
    """Return a container with another CPU request, which is no higher than its CPU limit.

    Args:
        container: A container of a Pod template that has a CPU request. It is not changed.
        milli: The request in thousandths of a CPU.
    """
    limit = cpu_milli(container, "limits")
    request = f"{min(milli, limit) if limit else milli}m"
    resources = dict(container["resources"])
    resources["requests"] = {**resources["requests"], "cpu": request}
    return {**container, "resources": resources}


def has_own_cpus(container: Mapping[str, Any]) -> bool:
    """Return whether the CPU limit of a container is its request.

    Such a container may have CPUs of its own, and another request would take them away.
    """
    limit, request = cpu_milli(container, "limits"), cpu_milli(container, "requests")
    return bool(limit) and request in (0, limit)  # without a request, Kubernetes takes the limit


def _milli(text: str) -> int:
    """Return a number of CPUs in thousandths."""
    return math.ceil(min(quantity(text) * 1000, Decimal(MOST_MILLI)))
