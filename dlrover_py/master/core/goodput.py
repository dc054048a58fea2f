"""Training time that is lost in a job, by the kind of round that it was lost for."""

from dlrover_py.master.core.events import Kind
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.state import NON_DISRUPTIVE
from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase
from dlrover_py.protocol.words import are, counted


class Goodput:
    """The progress of training, and the share of time in which it was made."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._speed = 0.0
        """Training steps per second in the last round that reported any."""

    def progressed(self, node: Node, progress: Progress) -> None:
        """Take in the progress of a member of the current round.

        The first progress in a round is recorded as an event, unless a next round is pending. The
        time without training before that step, and the time to repeat steps, are counted as lost. A
        report is ignored if a member with a lower rank has reported progress in this round.
        """
        assert self.state.world is not None
        rank = self.state.world.rank_of[node.id]
        if self.live.progress is not None and self.live.progress[0] < rank:
            return
        self.live.progress = (rank, progress)
        self._speed = progress.steps_per_s or self._speed
        before = self.state.max_step
        if before is None or progress.step > before:
            self.state.max_step = progress.step
        if self.state.resumed or self.state.pending_round is not None:
            return
        self.state.resumed = True
        cause, since = self.live.round_causes.get(self.state.round, (None, self.live.formed_at))
        first = progress.started_at_step
        again = 0 if before is None else max(0, before - first + 1)
        message = f"first step of round {self.state.round} is {first}"
        if before is not None:
            message += f"; step {before} had been reached: {_repeated(again)}"
        kind, down_since = self.live.outage
        repeating_s = again / self._speed if self._speed else 0.0
        self._add_lost_time(kind, self.live.now - down_since + repeating_s)
        self.log.record(EventReason.TRAINING_RESUMED, message, cause=cause, since=since)

    def share(self, now: float) -> float | None:
        """Return the share of the job's time that was not lost, from 0 to 1.

        The time of a fault or start that is not over counts as lost. Time in suspension does not
        count.

        Args:
            now: Monotonic time.

        Returns:
            None until the script has reported its first step, and if no time has passed.
        """
        if not self.state.lost_s:
            return None
        end = self.state.ended_at or self.state.suspended_at or now + self.live.ahead
        lost = sum(self.state.lost_s.values())
        if self.state.phase in (JobPhase.RUNNING, JobPhase.FORMING):
            pending = self.state.pending_round
            if pending is not None and pending.kind not in NON_DISRUPTIVE:
                lost += now - pending.since
            elif not self.state.resumed:
                lost += now - self.live.outage[1]
        elapsed = end - self.state.started_at - self.state.suspended_s
        return round(max(0.0, min(1.0, 1 - lost / elapsed)), 4) if elapsed > 0 else None

    def _add_lost_time(self, kind: Kind, seconds: float) -> None:
        """Add to the lost training time."""
        self.state.lost_s[kind] = self.state.lost_s.get(kind, 0.0) + max(0.0, seconds)


def _repeated(steps: int) -> str:
    """Describe the number of repeated steps."""
    return f"{counted(steps, 'step') if steps else 'no steps'} {are(steps)} repeated"
