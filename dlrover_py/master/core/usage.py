"""What nodes use, and the memory and CPUs that follow from it: pure functions."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.protocol.agents import Count
from dlrover_py.protocol.memory_growth import MIB
from dlrover_py.protocol.words import duration

LEAST_CORES = 0.01
"""Upper end of the first bucket of CPUs."""
STEP = 1.1
"""The ends of two neighbouring buckets differ by this factor."""
KEPT = 20_000
"""Measurements of CPUs after which all counts are halved, so that newer ones count more."""
OFTEN = 0.95
"""Share of the measurements in which a node used no more CPUs than are advised for."""
WORTH = 0.1
"""Least change that is advised, as a share of what there is: smaller ones would only flap."""
MEMORY_STEP = 64 * MIB
"""Memory that is advised is a multiple of this."""
CPU_STEP = 100
"""The number of CPUs that is advised is a multiple of this, in thousandths of a CPU."""


class UsageRecord(BaseModel):
    """What the nodes of one template have used; a part of the journal."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    template: str = ""
    """Hash of the template of these nodes."""
    seconds: float = Field(default=0.0, ge=0)
    """Seconds of training that were measured."""
    peak: Count = 0
    """The most memory that a node has used, in bytes."""
    least_nodes: Count = 0
    """The least number of nodes of a round that was measured; 0 if none was."""
    cores: dict[int, Count] = Field(default_factory=dict)
    """Number of measurements by bucket of CPUs. Bucket ``i`` ends at ``LEAST_CORES · STEP^i``."""


@dataclass(frozen=True, slots=True)
class Present:
    """What new nodes have now."""

    memory: int
    """Memory limit in bytes."""
    cpu: int
    """CPU request in thousandths of a CPU; 0 if there is none."""
    minimum: int
    """Least number of nodes of a round."""
    cpu_limit: int = 0
    """CPU limit in thousandths of a CPU, which no request exceeds; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What new nodes should have."""

    memory: int
    """Memory limit in bytes; the present one if that fits."""
    cpu: int
    """CPU request in thousandths of a CPU; the present one if that fits."""
    why: str
    """What was measured, in words."""


def measured(
    record: UsageRecord,
    template: str,
    nodes: Iterable[tuple[int, float]],
    seconds: float,
    members: int,
) -> UsageRecord:
    """Return the record with one more measurement of each node.

    Args:
        record: What was measured before. That of another template is dropped.
        template: Hash of the template.
        nodes: The peak of the memory in bytes, and the CPUs in use, of each node of it.
        seconds: Seconds of training since the last measurement.
        members: Number of nodes in the round.
    """
    if record.template != template:
        record = UsageRecord(template=template)
    found = list(nodes)
    if not found:
        return record
    cores = dict(record.cores)
    for _, used in found:
        bucket = _bucket(used)
        cores[bucket] = cores.get(bucket, 0) + 1
    if sum(cores.values()) > KEPT:
        cores = {bucket: count // 2 for bucket, count in cores.items() if count > 1}
    return UsageRecord(
        template=template,
        seconds=record.seconds + seconds,
        peak=max(record.peak, *(peak for peak, _ in found)),
        least_nodes=min(record.least_nodes or members, members),
        cores=cores,
    )


def advise(record: UsageRecord, present: Present, margin: float, template: int) -> Advice:
    """Return the memory and CPUs that follow from what was measured.

    Memory is never less than the peak times the margin. It is below that of the template only as
    far as the job could still run with its minimum of nodes: a state that is sharded over ``k``
    times as many nodes may take ``k`` times the memory there.

    Args:
        record: What was measured.
        present: What new nodes have now.
        margin: What is advised, divided by what is used.
        template: The memory limit that the template has, in bytes.
    """
    need = _up(record.peak * margin, MEMORY_STEP)
    alone = max(1.0, record.least_nodes / present.minimum)
    safe = _up(record.peak * margin * alone, MEMORY_STEP)
    memory, least = present.memory, max(need, min(safe, template))
    if memory < least:
        memory = least
    elif safe < present.memory * (1 - WORTH):
        memory = safe
    often = percentile(record.cores, OFTEN)
    cpu = _up(1000 * often * margin, CPU_STEP)
    cpu = min(cpu, present.cpu_limit or cpu)
    if not present.cpu or abs(cpu - present.cpu) < WORTH * present.cpu:
        cpu = present.cpu
    why = (
        f"within {duration(record.seconds)} of training, a node used at most "
        f"{math.ceil(record.peak / MIB)} MiB, and in {OFTEN:.0%} of the time at most {often:.3g} "
        "CPUs"
    )
    if alone > 1 and need < present.memory * (1 - WORTH):
        why += (
            f"; with {present.minimum} nodes it may need up to "
            f"{record.least_nodes / present.minimum:.3g} times the memory of {record.least_nodes}"
        )
    return Advice(memory, cpu, why)


def percentile(cores: Mapping[int, int], share: float) -> float:
    """Return the number of CPUs that is not exceeded in this share of the measurements."""
    left = share * sum(cores.values())
    for bucket in sorted(cores):
        left -= cores[bucket]
        if left <= 1e-9:
            return LEAST_CORES * STEP**bucket
    return 0.0


def _bucket(cores: float) -> int:
    """Return the bucket of a number of CPUs."""
    if cores <= LEAST_CORES:
        return 0
    return math.ceil(round(math.log(cores / LEAST_CORES) / math.log(STEP), 9))


def _up(value: float, step: int) -> int:
    """Return the next multiple of ``step`` that is not below a value, and above 0."""
    return max(1, math.ceil(round(value / step, 9))) * step
