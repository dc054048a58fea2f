"""``autoscale`` of a role: which sizes a job may take by itself, and what they are chosen for."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

STRICT: Final = ConfigDict(
    frozen=True,
    strict=True,  # as for Kubernetes, "3" and true are no numbers
    extra="forbid",
    alias_generator=to_camel,
    populate_by_name=True,
)
"""Settings of the models of a job file: immutable, strict, with fields in camelCase."""
_TIME = (
    r"^[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}"
    r"(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$"
)
"""A time as RFC 3339 writes it."""


class AutoscaleSpec(BaseModel):
    """How a job chooses its number of nodes by itself (docs/autoscaling.md).

    The size stays between ``minReplicas`` and ``maxReplicas``; without ``maxReplicas``,
    ``replicas`` is the upper limit. ``replicas`` is the size at the start. A change of it is
    followed, and the job scales on from there.
    """

    model_config = STRICT

    mode: Literal["off", "advise", "auto"] = "advise"
    """``off``: nothing is measured. ``advise``: an event and a condition say which size would be
    better. ``auto``: the job takes that size."""
    objective: Literal["throughput", "cost", "deadline"] = "throughput"
    """``throughput``: the fastest size, without nodes that add less than ``minGain``. ``cost``: the
    size with the lowest price of a step, in time for ``deadline`` if there is one. ``deadline``:
    the least size that ends in time."""
    min_gain: Annotated[float, Field(ge=0, le=10)] = 0.05
    """The least gain of throughput for which the size changes: 0.05 stands for 5 %. The time that
    the change takes is counted."""
    scale_up_delay_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60
    """Seconds for which a larger size must look better before it is taken."""
    wait_for_nodes_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Seconds after which nodes that have not come are given back. If absent, five times
    ``scaleUpDelaySeconds``. Where hosts are made on demand, it should be more than they need to
    start."""
    wait_for_spare_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """Seconds that the job waits at most for the replacement of a lost node before it goes on with
    fewer nodes. It waits only if two changes of size would cost more than the wait. If absent, it
    waits only for nodes that are starting already."""
    sizes: Annotated[
        list[Annotated[int, Field(ge=1, le=100_000)]] | None, Field(min_length=1, max_length=64)
    ] = None
    """The only sizes that a round may have, in nodes. If absent, all multiples of ``nodeUnit``. In
    the mode ``advise``, they limit the advice alone."""
    node_unit: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Sizes that are chosen are a multiple of this. If absent, the role's ``nodeUnit``."""
    max_resizes_per_hour: Annotated[int, Field(ge=1, le=60)] = 6
    """Changes of size in an hour at most. Those that faults force are not counted."""
    price_per_node_hour: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Price of one node for one hour, in any currency. It is used in reasons."""
    deadline: Annotated[str, StringConstraints(pattern=_TIME)] | None = None
    """Time by which the training should have ended, such as ``2027-01-31T18:00:00Z``."""

    def problems(self, *, minimum: int, maximum: int, unit: int) -> list[str]:
        """Return the relations that do not hold, in words; empty if all hold.

        Args:
            minimum: the least number of nodes of the role.
            maximum: its greatest number of nodes.
            unit: its ``nodeUnit``.
        """
        found = []
        for size in self.sizes or ():
            if not minimum <= size <= maximum:
                found.append(
                    f"autoscale.sizes has {size}: expected sizes from {minimum} (minReplicas) to "
                    f"{maximum} (maxReplicas, else replicas)"
                )
            elif size % unit:
                found.append(
                    f"autoscale.sizes has {size} and nodeUnit is {unit}: expected multiples of "
                    f"{unit}"
                )
        if self.sizes is not None and self.node_unit is not None:
            found.append("autoscale has sizes and nodeUnit: expected one of them")
        if self.node_unit is not None and self.node_unit % unit:
            found.append(
                f"autoscale.nodeUnit is {self.node_unit} and nodeUnit is {unit}: expected a "
                f"multiple of {unit}"
            )
        if self.objective == "deadline" and self.deadline is None:
            found.append(
                "autoscale.objective is deadline and autoscale.deadline is absent: expected a time "
                "such as 2027-01-31T18:00:00Z"
            )
        if self.deadline is not None and self.ends_at is None:
            found.append(f"autoscale.deadline is {self.deadline}: there is no such time")
        return found

    @property
    def ends_at(self) -> float | None:
        """Return the deadline as Unix time; None if there is none, or it is not a valid time."""
        if self.deadline is None:
            return None
        try:
            return datetime.fromisoformat(self.deadline).timestamp()
        except ValueError:
            return None


class PodPlace(BaseModel):
    """A kind of hosts that a queue or the allocator has given to a job, for this many Pods."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    name: Annotated[str, Field(max_length=63)]
    """Name of the kind of hosts; the value of a label of the Pods."""
    nodes: Annotated[int, Field(ge=0, le=100_000)]
    """Greatest number of Pods on these hosts, standbys included."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the hosts."""
    tolerations: list[dict[str, Any]] = Field(default_factory=list)
    """Tolerations that Pods on these hosts need."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that these Pods get besides."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations that these Pods get, such as the name of a ProvisioningRequest."""


class NodeAllocation(BaseModel):
    """How many nodes of a shared cluster a job may have (docs/autoscaling.md)."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    nodes: Annotated[int, Field(ge=0, le=100_000)]
    """Greatest number of nodes for now, without standbys. With fewer than ``minReplicas`` the job
    is held back."""
    standbys: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Greatest number of standbys for now; if absent, ``standbyReplicas``."""
    reason: str = ""
    """Why, in words."""
    since: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Unix time at which the number has changed."""
    forced: bool = False
    """Whether a loss of hosts, or the minimum of another job, has forced that change."""
    placements: Annotated[list[PodPlace], Field(max_length=64)] = Field(default_factory=list)
    """Where the Pods go, and how many to each place; empty if that is left to the template."""


AUTO: Final = AutoscaleSpec(mode="auto")
"""What DLRover's ``autoScale: true`` means."""
