"""Temporary bans of hosts on which nodes were lost through the host's fault."""

import math
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat

SHORTEST_S, LONGEST_S = 60.0, 3600.0
"""The shortest and the longest ban, in seconds."""
DOUBLINGS = 10
"""The highest power of two for a ban. It exceeds the longest ban, and is still a valid float."""
FORGOTTEN = 2.0
"""A host's strikes are forgotten after its latest ban times this factor."""


class Strikes(BaseModel):
    """The strikes against one host, as the journal has them."""

    number: Annotated[int, Field(ge=1, le=2**52)]
    """Number of strikes."""
    at: FiniteFloat
    """Unix time of the last strike. The next master's monotonic clock starts at another value."""


def ban_s(strikes: int) -> float:
    """Return the length of a ban: it doubles with each strike, up to an hour.

    Horovod's host discovery does the same.
    """
    return min(LONGEST_S, SHORTEST_S * 2.0 ** min(strikes - 1, DOUBLINGS))


class Hosts:
    """The bans of all hosts, by host name; ``now`` is always monotonic time.

    The strikes are part of the durable state, and changed in place.
    """

    def __init__(
        self, strikes: dict[str, Strikes] | None = None, *, now: float = 0.0, wall: float = 0.0
    ) -> None:
        """Take over the strikes.

        Args:
            strikes: The strikes so far, by host name.
            now: Monotonic time.
            wall: Unix time; it gives the age of each strike.
        """
        self.strikes = strikes if strikes is not None else {}
        self._struck_at = {n: now - max(0.0, wall - s.at) for n, s in self.strikes.items()}
        """Monotonic time of each host's last strike."""

    def strike(self, host: str, now: float, wall: float) -> float:
        """Count a strike, because a node was lost on this host.

        Hosts whose strikes are old enough are forgotten at the same time.

        Args:
            host: Name of the host.
            now: Monotonic time.
            wall: Unix time, for the next master.

        Returns:
            The length of the ban, in seconds.
        """
        for name, strikes in list(self.strikes.items()):
            if now - self._struck_at[name] > FORGOTTEN * ban_s(strikes.number):
                del self.strikes[name]
        old = self.strikes.get(host)
        number = 1 if old is None else old.number + 1
        self.strikes[host], self._struck_at[host] = Strikes(number=number, at=wall), now
        return ban_s(number)

    def banned(self, now: float) -> tuple[str, ...]:
        """Return the hosts on which no new node may be placed now."""
        return tuple(sorted(name for name in self.strikes if now < self._end(name)))

    def lift_bans(self, hosts: Iterable[str]) -> None:
        """Forget all strikes against these hosts, because there is no room on other hosts."""
        for host in hosts:
            self.strikes.pop(host, None)

    def next_end(self, now: float) -> float:
        """Return when the next ban ends; infinite if there is none."""
        return min((end for end in map(self._end, self.strikes) if end > now), default=math.inf)

    def _end(self, host: str) -> float:
        """Return when the host's last ban ends."""
        return self._struck_at[host] + ban_s(self.strikes[host].number)
