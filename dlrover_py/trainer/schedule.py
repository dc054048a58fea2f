"""When a save is due, and when one that goes to storage. Pure: it needs neither torch nor a state.

``"auto"`` chooses the interval that loses the least time, where one save costs δ and the mean time
between failures is M. See J. W. Young (A first order approximation to the optimum checkpoint
interval, CACM 17(9), 1974), as refined by J. T. Daly (A higher order estimate of the optimum
checkpoint interval for restart dumps, FGCS 22(3), 2006), equation 37::

    T = √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ     for δ < 2M, else M

All costs are measured. For ``every``, δ is the time for which a save has blocked the training,
including the time for which the optimizer waited. For ``persist_every``, δ is the relative slowdown
of the steps while the persister was busy, multiplied by the time for which it was busy. The
interval is never shorter than that time. M is (6 h + the job's time) / (restarts + 1): one failure
in six hours is assumed before any data exists.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from typing import Protocol, Self

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.notices import SaveStats
from dlrover_py.trainer.standalone import CANCEL_AFTER_S
from dlrover_py.trainer.vote import RankVote

EVERY = 1
"""Default of ``every``: each call of ``save`` saves."""
PERSIST_EVERY = "5m"
"""Default of ``persist_every``."""
FIRST_PERSIST_S = 30.0
"""Seconds until the first checkpoint goes to storage by default, if no agent keeps the memory."""
PRIOR_S = 6 * 3600.0
"""Assumed seconds between two failures before any data exists."""
MIN_SLOWDOWN = 0.01
"""Least slowdown of the training that is assumed for a busy persister, as a fraction."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds per unit of time."""


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often to save. Exactly one of the fields is set."""

    steps: int = 0
    """Number of steps between two saves."""
    seconds: float = 0.0
    """Seconds between two saves."""
    auto: bool = False
    """The interval with the least lost time is computed from measured costs."""

    @classmethod
    def parse(cls, name: str, value: object) -> Self:
        """Parse ``10``, ``"30s"``, ``"5m"``, ``"2h"`` or ``"auto"``.

        Args:
            name: the name of the option, for the message of an error.
            value: the value of the option.

        Raises:
            ConfigError: the value has none of these forms.
        """
        if type(value) is int and value >= 1:
            return cls(steps=value)
        if value == "auto":
            return cls(auto=True)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value) if isinstance(value, str) else None
        if match is None or not float(match[1]):
            raise ConfigError(
                f"checkpoint: {name} is {value!r}: expected a number of steps (10), a time "
                '("30s", "5m", "2h") or "auto"'
            )
        return cls(seconds=float(match[1]) * _UNITS[match[2]])


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """Return the interval in seconds that loses the least time (Daly 2006, equation 37).

    Args:
        cost_s: seconds that one save costs the training.
        mtbf_s: mean seconds between two failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost_s


class StepTimes:
    """Measures the time of steps with and without a busy persister, as moving averages."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._mean: dict[bool, float] = {}

    def tick(self, *, busy: bool) -> None:
        """Record that a step has ended; the first call only starts the measurement.

        Args:
            busy: whether the persister is busy.
        """
        now = self._clock()
        if self._last is not None:
            spent, mean = now - self._last, self._mean.get(busy)
            self._mean[busy] = spent if mean is None else 0.95 * mean + 0.05 * spent
        self._last = now

    @property
    def slowdown(self) -> float:
        """The fraction by which steps take longer while the persister is busy; 0 if unknown."""
        idle, busy = self._mean.get(False), self._mean.get(True)
        return max(0.0, busy / idle - 1.0) if idle and busy else 0.0


@dataclass(frozen=True, slots=True)
class JobAge:
    """What is known of the job when this round begins."""

    seconds: float | None = None
    """The age of the job in seconds; None if it is unknown."""
    restarts: int = 0
    """Number of earlier rounds that ended in a failure."""


@dataclass(frozen=True, slots=True)
class ScheduleRules:
    """How often to save, and how often to storage."""

    every: SaveInterval
    """How often to save in memory."""
    persist_every: SaveInterval
    """How often a checkpoint goes to storage."""
    stores: bool
    """There is a directory for checkpoints."""
    first_is_early: bool = False
    """The first checkpoint goes to storage after ``FIRST_PERSIST_S`` seconds."""


class LoadedStep(Protocol):
    """The result of a load, as far as a schedule needs it."""

    @property
    def step(self) -> int:
        """The training step at which the checkpoint was saved."""

    @property
    def stored_at(self) -> float | None:
        """When the newest checkpoint in storage was committed; None if that is not known."""


class SaveSchedule:
    """Decides when saves are due.

    Intervals in steps are decided by each rank alike. Those in seconds are decided by the clock of
    rank 0, whose vote all ranks get.
    """

    def __init__(
        self, rules: ScheduleRules, age: JobAge, stats: SaveStats, clock: Callable[[], float]
    ) -> None:
        """Create the schedule. The first interval begins now.

        Args:
            rules: how often to save.
            age: what is known of the job.
            stats: what saves have cost so far.
            clock: returns seconds that never decrease.
        """
        self._rules, self._age, self._stats, self._clock = rules, age, stats, clock
        self._began = clock()
        self._steps = StepTimes(clock)
        self.previous: int | None = None
        """The step of the last call of ``save``, or the one that was loaded."""
        self.again = False
        """A checkpoint that was to go to storage was missed: the next one goes there instead."""
        self._persist_step: int | None = None
        """The step of the last save that goes to storage."""
        self._saved_at = self._began
        self._persist_due_since = self._began - self._ahead_s

    def tick(self, *, busy: bool) -> None:
        """Record that a step has ended, while a persister was busy or not."""
        self._steps.tick(busy=busy)

    def due(self, step: int, vote: RankVote) -> bool:
        """Return whether a save in memory is due, after the last vote.

        An interval in steps ignores the vote. A save is then due if the step has passed a multiple
        of the interval since the previous step. This is that of the previous call of ``save``, or
        the loaded one. With any other interval, the vote decides.

        Args:
            step: the step of this call of ``save``.
            vote: the result of the last vote.
        """
        every = self._rules.every.steps
        if not every:
            return bool(vote.save)
        previous = step - 1 if self.previous is None else self.previous
        return step // every != previous // every

    def persist_due(self, step: int, vote: RankVote, *, forced: bool) -> bool:
        """Return whether a save that is due goes to storage.

        Without a directory, none does. A forced one always does. Any other goes there once the
        interval is over, or if the last one that was to go there was missed. It waits while a
        persister is busy, unless that takes too long (``vote.persist`` is 2).

        Args:
            step: the step of the save.
            vote: the result of the last vote.
            forced: whether the script wants it there.
        """
        if not self._rules.stores or forced:
            return self._rules.stores
        every = self._rules.persist_every.steps
        if every:
            base = self._persist_step
            if base is None:
                base = self._persist_step = step - 1
            due = step // every != base // every
        else:
            due = vote.persist > 0
        return (due or self.again) and (not vote.busy or vote.persist == 2)

    def begun(self, step: int, *, persist_requested: bool) -> float:
        """Record that a save was due, and whether it goes to storage. Return the time."""
        now = self._saved_at = self._clock()
        if persist_requested:
            self._persist_due_since, self._persist_step, self.again = now, step, False
        return now

    def loaded(self, found: LoadedStep | None, now: float) -> None:
        """Begin the intervals again after a load, and forget a missed write to storage.

        Intervals in steps count from the loaded step. The time until the next save in memory counts
        from now. The time until the next write to storage counts from the newest commit there.

        If the time of that commit is unknown, a loaded or restarted job uses its own age instead.
        After a restart with an unknown age, the next write is due at once. A new job begins as in
        the constructor.

        Args:
            found: what was loaded; None if there was no checkpoint.
            now: wall-clock time of this node (``time.time()``). ``found.stored_at`` is wall-clock
                time too, but another node may have set it. A negative age therefore counts as 0.
        """
        stored_at = None if found is None else found.stored_at
        self.again = False
        self.previous = self._persist_step = None if found is None else found.step
        self._saved_at = self._clock()
        past_s = None if stored_at is None else now - stored_at
        self._persist_due_since = self._saved_at - self._passed_s(past_s, loaded=found is not None)

    def says(self, *, busy_since: float | None) -> RankVote:
        """Return the parts of the vote that the clock and the measurements of rank 0 decide.

        These are ``save`` and ``persist``. Each is 0 where the interval is in steps. But
        ``persist`` is 2 with any interval if the checkpoint on its way to storage takes too long:
        `CANCEL_AFTER_S`, and four intervals in time.

        Args:
            busy_since: since when a checkpoint is on its way to storage, if no other save is to go
                there; None if there is no such checkpoint.
        """
        now = self._clock()
        every = self._rules.every
        save = persist = 0
        if not every.steps:
            seconds = every.seconds
            if every.auto:
                cost_s = self._stats.cost_s / max(1, self._stats.saves)
                seconds = optimum_s(cost_s, self.mtbf_s) if cost_s else 0.0
            save = int(now - self._saved_at >= seconds)
        wait_s = self._persist_s
        if self._rules.stores:
            if not self._rules.persist_every.steps:
                persist = int(now - self._persist_due_since >= wait_s)
            if busy_since is not None and now - busy_since > max(CANCEL_AFTER_S, 4 * wait_s):
                persist = 2
        return RankVote(save=save, persist=persist)

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between two failures of this job, as far as it is known."""
        return (PRIOR_S + self._age_s) / (self._age.restarts + 1)

    @property
    def _age_s(self) -> float:
        """The known age of the job, in seconds."""
        return (self._age.seconds or 0.0) + self._clock() - self._began

    def _passed_s(self, past_s: float | None, *, loaded: bool) -> float:
        """Return the seconds that have passed of the current interval between writes to storage.

        If each start began a new interval, a job that fails more often than once per interval would
        never store anything. The clock of rank 0 decides for all ranks when the next write is due.
        The result is at least 0, and at most the interval.

        Args:
            past_s: seconds since the newest checkpoint in storage. None: not known; then the age of
                the job counts after a load or a restart. If that is unknown after a restart, the
                whole interval has passed.
            loaded: whether a checkpoint was loaded.
        """
        if past_s is None:
            if self._age.restarts and self._age.seconds is None:
                past_s = inf  # the running time is unknown, and nothing is in storage
            elif self._age.restarts or loaded:
                past_s = self._age_s
            else:
                past_s = self._ahead_s
        return min(max(past_s, 0.0), self._persist_s)

    @property
    def _ahead_s(self) -> float:
        """Seconds by which the first write to storage comes earlier than later ones."""
        return self._persist_s - FIRST_PERSIST_S if self._rules.first_is_early else 0.0

    @property
    def _persist_s(self) -> float:
        """The current interval between two writes to storage, in seconds."""
        persist_every = self._rules.persist_every
        return self._best_persist_s() if persist_every.auto else persist_every.seconds

    def _best_persist_s(self) -> float:
        """Return the interval between writes to storage that loses the least time, in seconds.

        The result is `PERSIST_EVERY` until a write was measured, and never less than the last write
        took.
        """
        if not self._stats.persist_s:
            return SaveInterval.parse("", PERSIST_EVERY).seconds
        cost = self._stats.persist_s * max(MIN_SLOWDOWN, self._steps.slowdown)
        return max(self._stats.persist_s, optimum_s(cost, self.mtbf_s))
