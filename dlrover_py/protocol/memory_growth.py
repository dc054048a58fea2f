"""``memoryGrowth`` of a role: more memory for nodes after one has run out of it."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from dlrover_py.protocol.autoscale import STRICT
from dlrover_py.protocol.quantities import quantity

MIB = 1 << 20
"""Bytes in 1 MiB. Limits that are chosen are multiples of this."""
MOST = 1 << 52
"""Greatest number of bytes that is taken for a memory limit: 4 PiB."""


class MemoryGrowthSpec(BaseModel):
    """What happens once a node was killed because it needed more than its memory limit.

    New nodes get a higher limit then. It is raised once, until the template has such a limit
    itself. Without ``memoryGrowth``, nodes always have the limit of the template.
    """

    model_config = STRICT

    limit: Annotated[
        str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$", max_length=32)
    ]
    """The highest memory limit of the main container, such as ``64Gi``. Hosts must have room for
    Pods of this size."""
    factor: Annotated[float, Field(ge=1.05, le=16)] = 1.5
    """The higher limit, divided by that of the template."""

    @property
    def limit_bytes(self) -> int:
        """The highest memory limit in bytes."""
        return math.floor(min(quantity(self.limit), Decimal(MOST)))

    def raised(self, present: int) -> int:
        """Return the higher limit in bytes, for a present one; it may be the present one."""
        most = self.limit_bytes // MIB * MIB
        return max(present, min(most, math.ceil(present * self.factor / MIB) * MIB))


def memory_limit(container: Mapping[str, Any]) -> int:
    """Return the memory limit of a container of a Pod template, in bytes; 0 if it has none.

    It is also 0 if the template has another form there.
    """
    return _memory(container, "limits")


def with_memory_limit(container: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return a container with another memory limit, and its memory request changed by that factor.

    A container without a memory request gets none.

    Args:
        container: A container of a Pod template that has a memory limit. It is not changed.
        limit: The memory limit in bytes.
    """
    before = memory_limit(container)
    resources = dict(container["resources"])
    resources["limits"] = {**resources["limits"], "memory": str(limit)}
    if request := _memory(container, "requests"):
        request = limit * request // before
        resources["requests"] = {**resources["requests"], "memory": str(request)}
    return {**container, "resources": resources}


def _memory(container: Mapping[str, Any], kind: str) -> int:
    """Return the memory in bytes among the ``limits`` or ``requests``.

    It is 0 if there is none, or if what is there is no size of a memory.
    """
    found: object = container
    for name in ("resources", kind, "memory"):
        found = found.get(name) if isinstance(found, Mapping) else None
    try:
        value = quantity(str(found))
    except ValueError:
        return 0
    return math.floor(value) if 0 < value <= MOST else 0  # "1e999999999" would fill the memory
