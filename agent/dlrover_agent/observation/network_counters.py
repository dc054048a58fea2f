"""Errors of the network that the kernel counts: damaged and lost packets, segments sent again.

The numbers are those of the network namespace of this process: of a Pod, or of the whole host.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

NET = Path("/proc/self/net")
"""Folder with the files ``dev`` and ``snmp`` (proc(5))."""
_ERRORS = (2, 3, 10, 11)
"""Fields of a line of ``dev`` after the name: errors and drops, received and sent."""

FEWEST_SEGMENTS = 500
"""Segments between two readings, at least, for a share of them: on an idle network, one that is
sent again would be a large share."""


@dataclass(frozen=True, slots=True)
class NetworkCounters:
    """The counters at one time; 0 where the kernel does not say."""

    errors: int = 0
    """Packets that interfaces have lost or found damaged; the loopback does not count."""
    segments: int = 0
    """TCP segments that were sent, without those sent again."""
    resent: int = 0
    """TCP segments that were sent again."""

    def since(self, last: "NetworkCounters", seconds: float) -> tuple[float, float]:
        """Return the share of segments that were sent again, and the errors of interfaces a second.

        A counter that has become smaller, as after a reload of a driver, counts as unchanged. The
        share is 0 if fewer than ``FEWEST_SEGMENTS`` were sent.

        Args:
            last: The counters before.
            seconds: Time since then.
        """
        resent = max(0, self.resent - last.resent)
        sent = max(0, self.segments - last.segments) + resent
        share = resent / sent if sent >= FEWEST_SEGMENTS else 0.0
        return share, max(0, self.errors - last.errors) / seconds


def read(folder: Path = NET) -> NetworkCounters:
    """Read the counters; it takes a tenth of a millisecond.

    Args:
        folder: Folder with the files of the kernel.
    """
    errors = segments = resent = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (folder / "dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if name.strip() != "lo":
                fields = numbers.split()
                errors += sum(int(fields[at]) for at in _ERRORS)
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (folder / "snmp").read_text().splitlines()
        names, values = (line.split()[1:] for line in lines if line.startswith("Tcp: "))
        tcp = dict(zip(names, map(int, values), strict=True))
        segments, resent = tcp["OutSegs"], tcp["RetransSegs"]
    return NetworkCounters(errors, segments, resent)
