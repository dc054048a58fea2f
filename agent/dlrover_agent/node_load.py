"""What the processes of this node lack: the kernel's counters, read now and then in a thread."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from dlrover_py.process import cgroups
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.agents import NodeLoad

PERIOD_S = 10.0
"""Seconds between two readings, at least."""
LEAST_CHANGE = 0.05
"""A number must change by this much to be reported: a report that changes all the time says no
more."""
PRESSURE = Path("/proc/pressure")
"""Folder with the pressure stall information of the machine."""
_RESOURCES = ("cpu", "io", "memory")


class LoadMeter:
    """The newest measured load of this node."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        periods: Callable[[], tuple[int, int]] = cgroups.cpu_periods,
        pressure: Path = PRESSURE,
    ) -> None:
        """Read nothing yet.

        Args:
            clock: Returns seconds that never decrease.
            periods: Returns the periods of the CPU limit, and those in which it stopped a process.
            pressure: Folder with the files ``cpu``, ``io`` and ``memory`` of the kernel.
        """
        self.newest: NodeLoad | None = None
        """The load that is reported; None before the second reading."""
        self._clock, self._periods, self._pressure = clock, periods, pressure
        self._thread = BackgroundThread("load")
        self._asked_at: float | None = None
        self._last: tuple[float, tuple[int, int], dict[str, int]] | None = None

    def load(self) -> NodeLoad | None:
        """Return the newest load, without waiting; begin another reading if it is time."""
        now = self._clock()
        due = self._asked_at is None or now - self._asked_at >= PERIOD_S
        if due and not self._thread.stuck_s:
            self._asked_at = now
            self._thread.post(self.read)
        return self.newest

    def read(self) -> None:
        """Read the counters, and take over the load since the reading before."""
        now, periods = self._clock(), self._periods()
        waits = {name: _stalled_us(self._pressure / name) for name in _RESOURCES}
        last, self._last = self._last, (now, periods, waits)
        if last is None or now <= last[0]:
            return
        passed = periods[0] - last[1][0]
        throttled = (periods[1] - last[1][1]) / passed if passed > 0 else 0.0
        shares = {
            name: (waits[name] - last[2][name]) / (1e6 * (now - last[0])) for name in _RESOURCES
        }
        found = {
            name: round(min(1.0, max(0.0, share)), 2)
            for name, share in {"throttled": throttled, **shares}.items()
        }
        old = self.newest.model_dump() if self.newest is not None else {}
        if not old or any(abs(share - old[n]) >= LEAST_CHANGE for n, share in found.items()):
            self.newest = NodeLoad(**found)


def _stalled_us(path: Path) -> int:
    """Return the microseconds in which some process has waited; 0 if the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("some "):
                return int(line.rpartition("total=")[2])
    return 0
