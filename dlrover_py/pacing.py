"""Delays between attempts, with jitter, and limits on rates.

Many programs see the same failure at the same moment. Random delays keep them from acting at the
same moment again. The random source and the time are parameters, so that a test can give them.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Draw = Callable[[float, float], float]
"""Returns a random number between two numbers."""
_DRAW: Final[Draw] = random.uniform
_MOST_DOUBLINGS: Final = 64
"""Number of doublings after which a delay no longer grows: 2**1024 is not a float."""


def random_delay_s(least_s: float, most_s: float, draw: Draw = _DRAW) -> float:
    """Return a random delay.

    Args:
        least_s: Shortest delay, in seconds.
        most_s: Longest delay, in seconds.
        draw: Random source.
    """
    return draw(least_s, most_s)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from failure to failure, with jitter."""

    first_s: float
    """Longest delay after the first failure, in seconds."""
    most_s: float
    """Longest delay after any number of failures, in seconds."""
    jitter: float = 0.5
    """Largest share by which a delay is shortened at random: 0 for none of it, 1 for all of it."""

    @property
    def doublings(self) -> int:
        """The least number of earlier failures after which a delay no longer grows."""
        return max(0, math.ceil(math.log2(self.most_s / self.first_s)))

    def longest_s(self, failures: int) -> float:
        """Return the delay without jitter, in seconds, after this many earlier failures in a row.

        It is :attr:`first_s` after the first failure, which has none before it.
        """
        return min(self.most_s, self.first_s * 2.0 ** min(failures, _MOST_DOUBLINGS))

    def delay_s(self, failures: int, draw: Draw = _DRAW) -> float:
        """Return the delay, in seconds, after this many earlier failures in a row.

        Args:
            failures: Number of failures in a row before the present one.
            draw: Random source.
        """
        longest_s = self.longest_s(failures)
        return random_delay_s(longest_s * (1 - self.jitter), longest_s, draw)


class TokenBucket:
    """A limit on a rate. Tokens arrive at this rate, and what is limited takes tokens.

    The bucket is full at first. More tokens may be taken than it has; they must then arrive before
    the next ones are taken.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        """Start with a full bucket.

        Args:
            rate: Tokens per second; 0 for no limit.
            burst: Number of tokens in a full bucket.
            now: Seconds of a monotonic clock.
        """
        self._rate, self._at = rate, now
        self._burst = self._tokens = burst

    def take(self, tokens: float, now: float) -> float:
        """Take tokens without waiting; return the seconds until the next ones may be taken.

        The tokens are taken even if the bucket has fewer. The result is 0 if the rate has no limit.

        Args:
            tokens: Number of tokens.
            now: Seconds of the same clock.
        """
        self._refill(now)
        if self._rate:
            self._tokens -= tokens
        return self.wait_s(0.0, now)

    def wait_s(self, tokens: float, now: float) -> float:
        """Return the seconds until the bucket has this many tokens. None are taken.

        The result is 0 if it has them now, or if the rate has no limit.

        Args:
            tokens: Number of tokens, at most the burst.
            now: Seconds of the same clock.
        """
        self._refill(now)
        return max(0.0, tokens - self._tokens) / self._rate if self._rate else 0.0

    def _refill(self, now: float) -> None:
        """Add the tokens that have arrived by now. A clock that goes back adds none."""
        earned = max(0.0, now - self._at) * self._rate
        self._at = max(self._at, now)
        self._tokens = min(self._burst, self._tokens + earned)
