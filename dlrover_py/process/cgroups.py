"""The memory limits and OOM kills of this process's control groups (cgroup v1 and v2).

A container, a Slurm job and a systemd unit are control groups with a memory limit. The kernel's
out-of-memory killer ends processes of a group that exceeds its limit. The kernel serves these files
from memory, so a read does not wait for a disk.
Sources: Linux, ``admin-guide/cgroup-v2.rst`` (memory) and ``admin-guide/cgroup-v1/memory.rst``.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
"""Folder in which control groups are mounted."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""File that lists the control groups of this process."""
MACHINE = Path("/proc/meminfo")
"""File with the memory of the machine, in lines such as ``MemTotal:  16384 kB``."""
UNLIMITED = 1 << 62
"""Bytes from which a limit means no limit: version 1 writes a number close to 2**63."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The file names of one version of the interface."""

    limit: str
    used: str
    idle: str
    """Entry in ``memory.stat``: bytes of ``used`` that the kernel can reclaim immediately."""
    peak: str
    events: str
    """File with the line ``oom_kill N``."""


_VERSIONS = {
    "": _Names("memory.max", "memory.current", "inactive_file", "memory.peak", "memory.events"),
    "memory": _Names(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.max_usage_in_bytes",
        "memory.oom_control",
    ),
}
"""File names by controller, as ``/proc/self/cgroup`` names it. Version 2 has an empty name."""


@dataclass(frozen=True, slots=True)
class OomKills:
    """The OOM kills in this process's control group, with its memory limit."""

    count: int
    """Number of processes that the kernel's out-of-memory killer has killed."""
    limit_bytes: int | None
    """The smallest limit of the group and its ancestors; None if there is no limit."""
    peak_bytes: int | None
    """The largest memory use of the group with that limit; None if the kernel does not show it."""

    def since(self, before: "OomKills") -> str:
        """Describe the OOM kills since an earlier reading; return empty text if there are none.

        Example: ``out of memory: the limit of its container is 2.0 GB, and it had used 2.0 GB``.
        """
        if self.count <= before.count:
            return ""
        if self.limit_bytes is None:
            return "out of memory: the machine had none left (its container has no limit)"
        text = f"out of memory: the limit of its container is {_size(self.limit_bytes)}"
        if self.peak_bytes is not None:
            text += f", and it had used {_size(self.peak_bytes)}"
        return text


def free_bytes(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> int | None:
    """Return the bytes that may still be used before a limit is reached.

    The group and all its ancestors count. Page cache that the kernel can reclaim immediately counts
    as free. The result may be negative. It is None without a limit, or if the kernel's files cannot
    be read. In version 1, a group without a limit gives a number close to 2**63.

    Args:
        root: Folder in which control groups are mounted.
        own_groups: File that lists the control groups of this process.
    """
    free = None
    for _, limit, used in _limits(root, own_groups):
        free = limit - used if free is None else min(free, limit - used)
    return free


def memory_use(
    root: Path = ROOT, own_groups: Path = OWN_GROUPS, machine: Path = MACHINE
) -> float | None:
    """Return the used share of the memory that this process's group may use.

    Of the group and its ancestors, the one that is closest to its limit counts. Without a limit it
    is the share of the machine's memory. Page cache that the kernel can reclaim immediately is not
    in use. The result is None if the kernel's files cannot be read.

    Args:
        root: Folder in which control groups are mounted.
        own_groups: File that lists the control groups of this process.
        machine: File with the memory of the machine.
    """
    shares = []
    for _, limit, used in _limits(root, own_groups):
        if 0 < limit < UNLIMITED:
            shares.append(used / limit)
    total, free = _entry(machine, "MemTotal:"), _entry(machine, "MemAvailable:")
    if total and free is not None:
        shares.append(1 - free / total)
    return max(0.0, *shares) if shares else None


def oom_kills(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> OomKills:
    """Return how often the kernel has killed a process of this process's group to free memory.

    The count is 0 if the kernel's files cannot be read.

    Args:
        root: Folder in which control groups are mounted.
        own_groups: File that lists the control groups of this process.
    """
    count, limit, peak = 0, None, None
    for group, names in _groups(root, own_groups):
        # Groups follow from the outermost to the own one, whose count is the last and stays.
        kills = _entry(group / names.events, "oom_kill")
        count = count if kills is None else kills
        here = _number(group / names.limit)
        if here is not None and here < UNLIMITED and (limit is None or here <= limit):
            limit, peak = here, _number(group / names.peak)
    return OomKills(count, limit, peak)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a control group with a memory limit uses."""

    memory_bytes: int
    """Memory in use, without page cache that the kernel can reclaim immediately."""
    limit_bytes: int
    """The memory limit."""
    cpu_us: int
    """Microseconds of processor time so far; 0 if the kernel does not say."""


def usage(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> Usage | None:
    """Return what this process's container uses: the innermost group with a memory limit.

    The result is None without a limit, or if the kernel's files cannot be read.

    Args:
        root: Folder in which control groups are mounted.
        own_groups: File that lists the control groups of this process.
    """
    found = None
    for group, limit, used in _limits(root, own_groups):
        if 0 < limit < UNLIMITED:
            cpu_us = _entry(group / "cpu.stat", "usage_usec") or 0
            found = Usage(max(0, used), limit, cpu_us)
    return found


def cpu_periods(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> tuple[int, int]:
    """Return the periods of the CPU limit so far, and those in which it has stopped a process.

    Of the group and its ancestors, the one that was stopped most counts. Both numbers are 0 without
    a limit, or if the kernel's files cannot be read.

    Args:
        root: Folder in which control groups are mounted.
        own_groups: File that lists the control groups of this process.
    """
    found = (0, 0)
    for controller in ("", "cpu"):
        for group in _paths(root, own_groups, controller):
            periods = _entry(group / "cpu.stat", "nr_periods") or 0
            stopped = _entry(group / "cpu.stat", "nr_throttled") or 0
            found = max(found, (periods, stopped), key=lambda one: one[1])
    return found


def _limits(root: Path, own_groups: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield each group that has a memory limit, with the limit and the memory in use, in bytes.

    Page cache that the kernel can reclaim immediately is not in use, so the number may be negative.
    The order is that of :func:`_groups`. Groups whose files cannot be read are left out.
    """
    for group, names in _groups(root, own_groups):
        limit = _number(group / names.limit)
        used = _number(group / names.used)
        idle = _entry(group / "memory.stat", names.idle)
        if limit is not None and used is not None and idle is not None:
            yield group, limit, used - idle


def _groups(root: Path, own_groups: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield this process's memory groups as in :func:`_paths`, first those of version 2."""
    for controller, names in _VERSIONS.items():
        for path in _paths(root, own_groups, controller):
            yield path, names


def _paths(root: Path, own_groups: Path, controller: str) -> Iterator[Path]:
    """Yield this process's group and its ancestors, from the outermost to its own.

    In a container that does not see the ancestors, the container's group is the root.

    Args:
        root: Folder in which control groups are mounted.
        own_groups: File that lists the control groups of this process.
        controller: Name of a controller of version 1; empty for version 2.
    """
    parts: list[str] = []
    with contextlib.suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                parts = path.strip("/").split("/")
    for count in range(len(parts) + 1):
        yield root.joinpath(controller, *parts[:count])


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or no number ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, name: str) -> int | None:
    """Return the number after a name in a file of lines ``name number …``; None if not found."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value.strip().partition(" ")[0])
    return None


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"
