"""What the processes of this node use and lack: the kernel's counters, read now and then in a
thread."""

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrover_agent.observation import network_counters, tcp_links
from dlrover_agent.observation.devices import DeviceMeter, GpuUse
from dlrover_py.process import cgroups
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.agents import NodeLoad

PERIOD_S = 10.0
"""Seconds between two readings, at least."""
LEAST_CHANGE = 0.05
"""Least change that is reported: of a share, of the used memory as a share of its limit, and of the
CPUs as a share of those in use. A report that changes all the time says no more."""
LEAST_RESENT = 0.005
"""Least change of the share of TCP segments sent again that is reported. Networks in good health
send less than a thousandth again."""
LEAST_GROWTH = 0.01
"""Least growth of the peak of the memory that is reported, as a share of its limit."""
LEAST_SPEEDUP = 0.5
"""Least change of the speed of links that is reported, as a share of the new speed. It matters only
if a link is much slower than others."""
PRESSURE = Path("/proc/pressure")
"""Folder with the pressure stall information of the machine."""
_RESOURCES = ("cpu", "io", "memory")


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters at one time."""

    at: float
    """Seconds of a clock that never decreases."""
    periods: tuple[int, int]
    """Periods of the CPU limit, and those in which it stopped a process."""
    stalled_us: dict[str, int]
    """Microseconds in which some process waited, by resource."""
    usage: cgroups.Usage | None
    """What the container uses; None if that is not known."""
    shm: float
    """Share of ``/dev/shm`` that is in use."""
    links: Mapping[int, tcp_links.Connection]
    """TCP connections of the workers."""
    clocks: float
    """Share of the GPUs whose clocks are slowed."""
    network: network_counters.NetworkCounters
    """Errors of the network."""
    gpus: GpuUse
    """How far the GPUs are used."""


def _load(last: _Reading, new: _Reading, peak: int) -> NodeLoad:
    """Return how busy the node was between two readings: CPUs, memory, disk, network and GPUs.

    Args:
        last: The earlier reading.
        new: The later one.
        peak: Bytes of memory in the reading that had the most, since the agent started.
    """
    seconds = new.at - last.at
    passed = new.periods[0] - last.periods[0]
    shares = {"throttled": (new.periods[1] - last.periods[1]) / passed if passed > 0 else 0.0}
    for name in _RESOURCES:
        shares[name] = (new.stalled_us[name] - last.stalled_us[name]) / (1e6 * seconds)
    shares["sending"], peer, speed = tcp_links.busiest(last.links, new.links, seconds)
    shares["clocks"], shares["shm"] = new.clocks, new.shm
    shares["gpu_busy"], shares["gpu_least_busy"] = new.gpus.busy, new.gpus.least_busy
    rounded = {n: round(min(1.0, max(0.0, share)), 2) for n, share in shares.items()}
    load = NodeLoad(
        **rounded,
        gpus=new.gpus.count,
        gpu_memory_bytes=new.gpus.memory_bytes,
        gpu_memory_limit=new.gpus.memory_limit,
    )
    if load.sending:
        load = load.model_copy(update={"peer": peer, "link_bytes_s": int(float(f"{speed:.1e}"))})
    resent, errors = new.network.since(last.network, seconds)
    update = {"resent": round(resent, 3), "network_errors": float(f"{errors:.1e}")}
    load = load.model_copy(update=update)
    if new.usage is None:
        return load
    cpu_us = new.usage.cpu_us - (last.usage.cpu_us if last.usage is not None else new.usage.cpu_us)
    return load.model_copy(
        update={
            "memory_bytes": new.usage.memory_bytes,
            "memory_limit": new.usage.limit_bytes,
            "memory_peak": peak,
            "cores": round(max(0.0, cpu_us / (1e6 * seconds)), 2),
        }
    )


def _differs(new: NodeLoad, reported: NodeLoad) -> bool:
    """Return whether a new load differs enough from the reported one.

    ``LEAST_CHANGE`` and ``LEAST_SPEEDUP`` say what is enough.
    """
    least = {
        "memory_bytes": max(1.0, LEAST_CHANGE * new.memory_limit),
        "memory_limit": 1.0,
        "gpu_memory_bytes": max(1.0, LEAST_CHANGE * new.gpu_memory_limit),
        "gpu_memory_limit": 1.0,
        "memory_peak": max(1.0, LEAST_GROWTH * new.memory_limit),
        "cores": LEAST_CHANGE * max(1.0, new.cores),
        "resent": LEAST_RESENT,
        "network_errors": max(1.0, 0.5 * new.network_errors),
        # The speed in a short wait says little.
        "link_bytes_s": max(1.0, LEAST_SPEEDUP * new.link_bytes_s)
        if new.sending >= LEAST_CHANGE
        else math.inf,
    }
    before = reported.model_dump(exclude={"peer"})
    return any(
        abs(value - before[name]) >= least.get(name, LEAST_CHANGE)
        for name, value in new.model_dump(exclude={"peer"}).items()
    )


class NodeCounters:
    """The counters that the kernel keeps for this node, read at each call."""

    pressure = PRESSURE
    """Folder with the files ``cpu``, ``io`` and ``memory`` of the kernel."""

    def now(self) -> float:
        """Return seconds that never decrease."""
        return time.monotonic()

    def periods(self) -> tuple[int, int]:
        """Return the periods of the CPU limit, and those in which it stopped a process."""
        return cgroups.cpu_periods()

    def usage(self) -> cgroups.Usage | None:
        """Return what the container uses; None without a limit."""
        return cgroups.usage()

    def shm(self) -> float:
        """Return the share of ``/dev/shm`` that is in use; 0 if there is none."""
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return 0.0
        return 1 - found.f_bavail / found.f_blocks if found.f_blocks else 0.0

    def links(self, pids: Sequence[int]) -> Mapping[int, tcp_links.Connection]:
        """Return the TCP connections of processes, by their inode."""
        return tcp_links.connections(pids)

    def network(self) -> network_counters.NetworkCounters:
        """Return the errors of the network."""
        return network_counters.read()


class LoadMeter:
    """The newest measured load of this node."""

    def __init__(self, devices: DeviceMeter, counters: NodeCounters | None = None) -> None:
        """Read nothing yet.

        Args:
            devices: The GPUs of this node.
            counters: The counters of this node; None for those of the kernel.
        """
        self.devices = devices
        """What the GPUs of this node report."""
        self.newest: NodeLoad | None = None
        """The load that is reported; None before the second reading."""
        self._counters = counters or NodeCounters()
        self._thread = BackgroundThread("load")
        self._asked_at: float | None = None
        self._last: _Reading | None = None
        self._peak = 0
        """The most memory of all readings, in bytes."""

    def load(self, pids: Sequence[int] = ()) -> NodeLoad | None:
        """Return the newest load, without waiting; begin another reading if it is time.

        Args:
            pids: Processes of the workers, whose connections are looked at.
        """
        now = self._counters.now()
        due = self._asked_at is None or now - self._asked_at >= PERIOD_S
        if due and not self._thread.stuck_s:
            self._asked_at = now
            self._thread.post(lambda: self.read(tuple(pids)))
        return self.newest

    def read(self, pids: Sequence[int] = ()) -> None:
        """Read the counters.

        The load since the last reading becomes :attr:`newest` if it differs enough to be reported.
        The first reading gives none.

        Args:
            pids: Processes of the workers.
        """
        counters = self._counters
        new = _Reading(
            counters.now(),
            counters.periods(),
            {name: _stalled_us(counters.pressure / name) for name in _RESOURCES},
            counters.usage(),
            counters.shm(),
            counters.links(pids),
            self.devices.slowed,
            counters.network(),
            self.devices.use,
        )
        last, self._last = self._last, new
        if new.usage is not None:
            self._peak = max(self._peak, new.usage.memory_bytes)
        if last is None or new.at <= last.at:
            return
        found, old = _load(last, new, self._peak), self.newest
        if old is None or _differs(found, old):
            self.newest = found


def _stalled_us(path: Path) -> int:
    """Return the microseconds in which some process has waited; 0 if the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("some "):
                return int(line.rpartition("total=")[2])
    return 0
