"""How long a job may go without a step: a bound that is learned from its own steps."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

GAPS_KEPT = 64
"""Number of the newest gaps between steps from which the bound is learned."""
TYPICAL = 5.0
"""The bound is at least this many times the usual gap."""
LONGEST = 2.0
"""The bound is at least this many times the longest gap of the job: an evaluation or a checkpoint
that came once may come again."""
AGAIN = 2.0
"""A gap in which the job hung comes again if the next such gap is shorter than this many times the
first one."""
FEWEST_GAPS = 3
"""Number of gaps after which the usual gap is known."""


@dataclass(slots=True)
class StepClock:
    """The times of a job's steps; all times are in seconds of one monotonic clock.

    A gap is the time between two reports of which the second has a higher step. What the job does
    from time to time between two steps, such as an evaluation, is part of a gap.
    """

    least_s: float
    """Smallest bound."""
    first_s: float
    """Bound while the usual gap is not known."""
    step: int | None = None
    """Highest step of this round; None before the first one."""
    total: int | None = None
    """Number of all steps, if it is known."""
    moved_at: float = 0.0
    """Time of the newest step, or else of the begin of the round."""
    longest_s: float = 0.0
    """Longest gap of the job, without hangs."""
    longest_first_s: float = 0.0
    """Longest time from the begin of a round to its first step."""
    _hung_s: float = 0.0
    """The newest gap between two steps in which the job was found to hang."""
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))

    def begin(self, now: float) -> None:
        """Begin a round. What was learned in earlier rounds stays."""
        self.step, self.moved_at = None, now

    def shift(self, seconds: float) -> None:
        """Leave out a time in which the master itself stood still."""
        self.moved_at += seconds

    def saw(self, step: int, total: int | None, now: float, *, hung: bool = False) -> bool:
        """Take in a reported step; return whether it is higher than all before in this round.

        Args:
            step: The number of finished steps.
            total: The number of all steps, if it is known.
            now: Monotonic time.
            hung: Whether the job was found to hang before this step. The longest gap then stays:
                one outage must not hide all later hangs. If such a gap comes again, it is usual.
        """
        self.total = total
        if self.step is not None and step <= self.step:
            return False
        gap = max(0.0, now - self.moved_at)
        first = self.step is None
        counts = not hung or (not first and gap < AGAIN * self._hung_s)
        if not first:
            self._hung_s = gap if hung else self._hung_s
            self._gaps.append(gap)
        if counts and first:
            self.longest_first_s = max(self.longest_first_s, gap)
        elif counts:
            self.longest_s = max(self.longest_s, gap)
        self.step, self.moved_at = step, now
        return True

    @property
    def learned(self) -> bool:
        """Whether the usual gap is known."""
        return len(self._gaps) >= FEWEST_GAPS

    @property
    def bound_s(self) -> float:
        """Seconds without a step after which a hang is suspected.

        Before the first step of a round, and after the last one of all, it is at least ``first_s``:
        what happens there takes as long as it takes.
        """
        ended = self.total is not None and self.step is not None and self.step >= self.total
        if self.step is None or ended or not self.learned:
            return max(self.first_s, self.least_s, LONGEST * self.longest_first_s)
        return max(self.least_s, TYPICAL * median(self._gaps), LONGEST * self.longest_s)

    @property
    def due(self) -> float:
        """Time at which a hang is suspected if no step comes before."""
        return self.moved_at + self.bound_s
