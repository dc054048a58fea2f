"""Memory of this process's control groups, as the kernel shows it (cgroup v1 and v2).

A container, a Slurm job and a systemd unit are control groups with a memory limit. The kernel's
out-of-memory killer ends processes of a group that exceeds it.
Sources: Linux, ``admin-guide/cgroup-v2.rst`` (memory) and ``admin-guide/cgroup-v1/memory.rst``.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OURS = Path("/proc/self/cgroup")
UNLIMITED = 1 << 62
"""A limit from here on is none: version 1 writes a number close to 2**63."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Files of one version of the interface."""

    limit: str
    used: str
    idle: str
    """Entry of ``memory.stat``: bytes of ``used`` that the kernel can take back at once."""
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
"""By controller, as ``/proc/self/cgroup`` names it; version 2 has no name."""


@dataclass(frozen=True, slots=True)
class OomKills:
    """Processes that the kernel has killed for want of memory in the group of this process."""

    count: int
    limit_bytes: int | None
    """The smallest limit of the group and of those above it; None if there is none."""
    peak_bytes: int | None
    """Most that the group with that limit has used; None where the kernel does not say."""

    def since(self, before: "OomKills") -> str:
        """What has happened since an earlier look, in words; empty if nothing has.

        Example: ``out of memory: the limit of its container is 2.0 GB, and it had used 2.0 GB``.
        """
        if self.count <= before.count:
            return ""
        if self.limit_bytes is None:
            return "out of memory: the machine had none left (its container has no limit)"
        words = f"out of memory: the limit of its container is {_size(self.limit_bytes)}"
        if self.peak_bytes is not None:
            words += f", and it had used {_size(self.peak_bytes)}"
        return words


def free_bytes(root: Path = ROOT, ours: Path = OURS) -> int | None:
    """Bytes that may still be used before a limit is reached; None if there is no limit.

    Args:
        root: where control groups are mounted.
        ours: the file that names the groups of this process.
    """
    free = None
    for group, names in _groups(root, ours):
        limit = _number(group / names.limit)
        used = _number(group / names.used)
        idle = _entry(group / "memory.stat", names.idle)
        if limit is not None and used is not None and idle is not None:
            left = limit - used + idle
            free = left if free is None else min(free, left)
    return free


def oom_kills(root: Path = ROOT, ours: Path = OURS) -> OomKills:
    """How often the kernel has killed a process of this group for want of memory.

    Args:
        root: where control groups are mounted.
        ours: the file that names the groups of this process.
    """
    count, limit, peak = 0, None, None
    for group, names in _groups(root, ours):
        # Groups follow from the outermost to our own: its own count is the one that stays.
        count = _entry(group / names.events, "oom_kill") or count
        here = _number(group / names.limit)
        if here is not None and here < UNLIMITED and (limit is None or here <= limit):
            limit, peak = here, _number(group / names.peak)
    return OomKills(count, limit, peak)


def _groups(root: Path, ours: Path) -> Iterator[tuple[Path, _Names]]:
    """Our group and all above it, from the outermost on. In a container that does not see those,
    its own group is the root."""
    for controller, names in _VERSIONS.items():
        parts: list[str] = []
        with contextlib.suppress(OSError):
            for line in ours.read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controller in controllers.split(","):
                    parts = path.strip("/").split("/")
        for count in range(len(parts) + 1):
            yield root.joinpath(controller, *parts[:count]), names


def _number(path: Path) -> int | None:
    """The number in a file; None if the file is not there or has none ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, name: str) -> int | None:
    """The number behind a name in a file of lines ``name number``; None if it is not there."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"
