"""Where the time of a job went: an account whose buckets always add up to the time that passed."""

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.protocol.status import TimeBucket


class TimeAccount(BaseModel):
    """The seconds of a job in each bucket.

    Time passes in one bucket. What turns out later to have been something else is moved to another
    one. So no second is counted twice, and none is lost.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    seconds: dict[TimeBucket, float] = Field(default_factory=dict)
    """Seconds of each bucket until ``at``."""
    at: float = 0.0
    """Unix time until which the time is counted."""
    bucket: TimeBucket = TimeBucket.INITIALIZATION
    """The bucket of the time since ``at``."""
    reported: dict[TimeBucket, float] = Field(default_factory=dict)
    """Seconds that the workers of this round have reported, and that were moved."""
    saves: float = 0.0
    """Number of saves that workers have reported."""
    reported_saves: float = 0.0
    """Number of saves that the workers of this round have reported."""
    steps_per_s: float = 0.0
    """Speed of the last round that reported any."""

    def advance(self, at: float, bucket: TimeBucket | None = None) -> None:
        """Count the time until now; a clock that was set back does not count.

        Args:
            at: Unix time.
            bucket: The bucket of the time from now on; None: the same.
        """
        passed = max(0.0, at - self.at)
        self.seconds[self.bucket] = self.seconds.get(self.bucket, 0.0) + passed
        self.at = at
        self.bucket = self.bucket if bucket is None else bucket

    def sleep(self, at: float, seconds: float) -> None:
        """Count a sleep of the machine, after the time until its end by a clock that stood still.

        Args:
            at: Unix time by that clock.
            seconds: Duration of the sleep.
        """
        self.advance(at)
        here = self.seconds.get(TimeBucket.SUSPENDED, 0.0)
        self.seconds[TimeBucket.SUSPENDED] = here + seconds
        self.at += seconds

    def move(self, source: TimeBucket, target: TimeBucket, seconds: float) -> None:
        """Move seconds to another bucket; at most those that are there.

        Args:
            source: Where they were counted.
            target: What they were.
            seconds: How many; a negative number counts as none.
        """
        moved = min(max(0.0, seconds), self.seconds.get(source, 0.0))
        if moved:
            self.seconds[source] -= moved
            self.seconds[target] = self.seconds.get(target, 0.0) + moved

    def take(self, source: TimeBucket, totals: dict[TimeBucket, float]) -> None:
        """Move what workers have spent since their last report.

        Args:
            source: Where that time was counted.
            totals: Seconds since the begin of the round, by bucket.
        """
        for bucket, total in totals.items():
            self.move(source, bucket, total - self.reported.get(bucket, 0.0))
            self.reported[bucket] = max(total, self.reported.get(bucket, 0.0))

    def take_saves(self, total: float) -> None:
        """Count the saves since the last report; ``total`` are those since the begin of a round."""
        self.saves += max(0.0, total - self.reported_saves)
        self.reported_saves = max(total, self.reported_saves)

    def begin_round(self) -> None:
        """Count from zero what the workers of a new round report."""
        self.reported.clear()
        self.reported_saves = 0.0

    def active_s(self, at: float) -> float:
        """Return the seconds until a time in which the job was not suspended."""
        found = self.until(at)
        return sum(found.values()) - found.get(TimeBucket.SUSPENDED, 0.0)

    def until(self, at: float) -> dict[TimeBucket, float]:
        """Return the seconds of each bucket until a time; buckets without any are left out."""
        found = dict(self.seconds)
        found[self.bucket] = found.get(self.bucket, 0.0) + max(0.0, at - self.at)
        return {bucket: found[bucket] for bucket in TimeBucket if found.get(bucket)}
