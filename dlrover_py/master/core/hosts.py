"""Hosts that are not asked again for a while, since a node was lost on them through their fault."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat

SHORTEST_S, LONGEST_S = 60.0, 3600.0
DOUBLINGS = 10
"""More than reach the longest ban: a larger power may not be a float any more."""
FORGOTTEN = 2.0
"""A strike counts until so many times the ban that it brought have passed."""


class Strikes(BaseModel):
    """What is journaled of a host."""

    number: Annotated[int, Field(ge=1, le=2**52)]
    at: FiniteFloat
    """Of the last one, in Unix seconds: the next master's other clock begins anew."""


@dataclass(slots=True)
class _Host:
    strikes: int
    struck_at: float
    wall: float


def ban_s(strikes: int) -> float:
    """Doubles with each strike, up to an hour (as Horovod's discovery does)."""
    return min(LONGEST_S, SHORTEST_S * 2.0 ** min(strikes - 1, DOUBLINGS))


@dataclass(slots=True)
class Hosts:
    """Bans by host name; times are monotonic."""

    _known: dict[str, _Host] = field(default_factory=dict)

    def strike(self, host: str, now: float, wall: float) -> float:
        """A node was lost on this host; returns for how long it is kept out."""
        self._known = {
            name: h
            for name, h in self._known.items()
            if now - h.struck_at <= FORGOTTEN * ban_s(h.strikes)
        }
        old = self._known.get(host)
        strikes = 1 if old is None else old.strikes + 1
        self._known[host] = _Host(strikes, now, wall)
        return ban_s(strikes)

    def kept_out(self, now: float) -> tuple[str, ...]:
        """Hosts on which no new node is wished now."""
        return tuple(
            sorted(n for n, h in self._known.items() if now < h.struck_at + ban_s(h.strikes))
        )

    def pardon(self, hosts: Iterable[str]) -> None:
        """There is no room but on these."""
        for host in hosts:
            self._known.pop(host, None)

    def next_end(self, now: float) -> float:
        """When the next ban ends."""
        ends = (h.struck_at + ban_s(h.strikes) for h in self._known.values())
        return min((end for end in ends if end > now), default=math.inf)

    def journal(self) -> dict[str, Strikes]:
        """What the next master must know."""
        return {name: Strikes(number=h.strikes, at=h.wall) for name, h in self._known.items()}

    @classmethod
    def read(cls, kept: dict[str, Strikes], now: float, wall: float) -> "Hosts":
        """Go on from a journal."""
        return cls({n: _Host(s.number, now - max(0.0, wall - s.at), s.at) for n, s in kept.items()})
