"""The progress of training, and where the time of the job went."""

from dlrover_py.master.core.ceiling import best_goodput
from dlrover_py.master.core.events import Kind
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.state import NON_DISRUPTIVE
from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import GoodputCeiling, GoodputStatus, JobPhase, TimeBucket
from dlrover_py.protocol.words import are, counted

_OF_WORKERS = {
    "data": TimeBucket.DATA_LOADING,
    "save": TimeBucket.CHECKPOINT_SAVE,
    "load": TimeBucket.CHECKPOINT_RESTORE,
}
"""Buckets of the times that workers measure, by their name in a report."""


class Goodput:
    """Takes in the progress of training, and keeps the account of the job's time."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._account = self.state.time
        self._round = self.state.round
        self._moved_at = self.live.now
        """When a step was reported last that was higher than all before in the round."""
        self._step = -1

    def progressed(self, node: Node, progress: Progress) -> None:
        """Take in the progress of a member of the current round.

        The first progress in a round is recorded as an event, unless a next round is pending. The
        time to repeat steps is counted as wasted. A report is ignored if a member with a lower rank
        has reported progress in this round.
        """
        if not self.show(node, progress):
            return
        self._begin_round()
        if progress.step > self._step:
            self._step, self._moved_at = progress.step, self.live.now
        before = self.state.max_step
        if before is None or progress.step > before:
            self.state.max_step = progress.step
        account, first = self._account, not self.state.resumed
        account.advance(self.live.steady_wall)
        spent = {bucket: progress.spent.get(name, 0.0) for name, bucket in _OF_WORKERS.items()}
        account.take(TimeBucket.PROGRAM_STARTUP if first else TimeBucket.PRODUCTIVE, spent)
        account.take_saves(progress.spent.get("saves", 0.0))
        speed, account.steps_per_s = (
            account.steps_per_s,
            progress.steps_per_s or account.steps_per_s,
        )
        if self.state.resumed or self.state.pending_round is not None:
            return
        self.state.resumed = True
        cause, since = self.live.round_causes.get(self.state.round, (None, self.live.formed_at))
        step = progress.started_at_step
        again = 0 if before is None else max(0, before - step + 1)
        message = f"first step of round {self.state.round} is {step}"
        if before is not None:
            message += f"; step {before} had been reached: {_repeated(again)}"
        kind, down_since = self.live.outage
        repeating_s = again / speed if speed else 0.0
        account.move(TimeBucket.PRODUCTIVE, TimeBucket.WASTED_PROGRESS, repeating_s)
        self._add_lost_time(kind, self.live.now - down_since + repeating_s)
        self.log.record(EventReason.TRAINING_RESUMED, message, cause=cause, since=since)

    def reached(self, step: int) -> None:
        """Take in a step that was reached before the current round began, or while one was stopped.

        Time to repeat it counts as wasted. It is no progress of the current round, and refills no
        restart budget.
        """
        state, live = self.state, self.live
        state.max_step = step if state.max_step is None else max(step, state.max_step)
        live.baseline_step = step if live.baseline_step is None else max(step, live.baseline_step)

    def show(self, node: Node, progress: Progress) -> bool:
        """Show the progress of a member of the round in the status, and count no time.

        Returns:
            False if a member with a lower rank has reported progress in this round. Nothing
            changes then.
        """
        assert self.state.world is not None
        rank = self.state.world.rank_of[node.id]
        if self.live.progress is not None and self.live.progress[0] < rank:
            return False
        self.live.progress = (rank, progress)
        return True

    def slept(self, seconds: float) -> None:
        """Count a sleep of the machine as suspended. The time of the job is that much later now."""
        if self.state.ended_at is None:
            self._account.sleep(self.live.steady_wall, seconds)
        self.live.ahead += seconds

    def decide(self) -> None:
        """Note in which bucket time passes from now on."""
        self._begin_round()
        bucket, account = self._bucket(), self._account
        if bucket is account.bucket:
            return
        if self.state.ended_at is not None:
            account.advance(self.state.ended_at, bucket)
            return
        before = account.bucket
        account.advance(self.live.steady_wall, bucket)
        if bucket is TimeBucket.STANDSTILL:  # it has begun before it was found
            account.move(before, bucket, self.live.now - self._moved_at)

    def status(self, now: float) -> GoodputStatus:
        """Return where the time of the job went until now, or until its end.

        Args:
            now: Monotonic time.
        """
        end = self.state.ended_at
        at = now + self.live.ahead if end is None else end
        seconds, counted_s = self._account.until(at), self._account.active_s(at)
        share = seconds.get(TimeBucket.PRODUCTIVE, 0.0) / counted_s if counted_s > 0 else 0.0
        return GoodputStatus(
            wall_s=round(sum(seconds.values()), 3),
            share=round(share, 4) if self.state.lost_s else None,
            save_s=round(self._save_s(seconds), 4) if self._account.saves else None,
            ceiling=self._ceiling(seconds, counted_s),
            seconds={bucket: round(one, 3) for bucket, one in seconds.items()},
        )

    def _ceiling(self, seconds: dict[TimeBucket, float], counted_s: float) -> GoodputCeiling | None:
        """Return the best goodput that could be reached; None before the first failure.

        Args:
            seconds: Where the time went, by bucket.
            counted_s: The time without suspensions, in seconds.
        """
        failures = sum(self.state.restarts.get(kind, 0) for kind in ("failure", "loss"))
        if not failures or not self.state.lost_s or counted_s <= 0:
            return None
        lost_s = sum(self.state.lost_s.get(kind, 0.0) for kind in ("failure", "loss"))
        lost_s += seconds.get(TimeBucket.STANDSTILL, 0.0)
        lost_s -= seconds.get(TimeBucket.WASTED_PROGRESS, 0.0)
        recovery_s, between_s = max(0.0, lost_s) / failures, counted_s / failures
        share, interval_s = best_goodput(between_s, recovery_s, self._save_s(seconds))
        return GoodputCeiling(
            share=round(share, 4),
            failures=failures,
            between_s=round(between_s, 3),
            recovery_s=round(recovery_s, 3),
            interval_s=round(interval_s, 3),
        )

    def _save_s(self, seconds: dict[TimeBucket, float]) -> float:
        """Return the mean seconds for which a save stops the training; 0 without a save.

        Args:
            seconds: Where the time went, by bucket.
        """
        return seconds.get(TimeBucket.CHECKPOINT_SAVE, 0.0) / max(1.0, self._account.saves)

    def _begin_round(self) -> None:
        """Begin to count what the workers of a new round report."""
        if self._round != self.state.round:
            self._round, self._step, self._moved_at = self.state.round, -1, self.live.now
            self._account.begin_round()

    def _bucket(self) -> TimeBucket:
        """Return the bucket in which time passes now."""
        state, pending = self.state, self.state.pending_round
        if state.phase.ended:
            return self._account.bucket
        if state.phase is JobPhase.SUSPENDED:
            return TimeBucket.SUSPENDED
        ends = pending is not None and pending.kind not in NON_DISRUPTIVE
        if state.world is None or ends or state.phase is not JobPhase.RUNNING:
            starts = pending is None or pending.kind == "start"
            return TimeBucket.INITIALIZATION if starts else TimeBucket.INFRASTRUCTURE_RECOVERY
        if self.live.hang:
            return TimeBucket.STANDSTILL
        return TimeBucket.PRODUCTIVE if state.resumed else TimeBucket.PROGRAM_STARTUP

    def _add_lost_time(self, kind: Kind, seconds: float) -> None:
        """Add to the time that rounds of one kind have cost, which the autoscaler weighs."""
        self.state.lost_s[kind] = self.state.lost_s.get(kind, 0.0) + max(0.0, seconds)


def _repeated(steps: int) -> str:
    """Describe the number of repeated steps."""
    return f"{counted(steps, 'step') if steps else 'no steps'} {are(steps)} repeated"
