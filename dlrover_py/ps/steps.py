"""The workers that step together (pure): who they are, and which step all of them have ended.

A group is formed when as many workers of a round as ``WORLD_SIZE`` are there. It changes when one
of them ends, stands still, is started again, or when others come. Each change begins a new
generation. A step of the generation before is over if all its members had ended it. Otherwise it
never will be: no push of it counts, and the workers that are left send theirs for the next step.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps.cluster_map import StepId, Steps
from dlrover_py.ps.messages import Stepped
from dlrover_py.ps.specs import Consistency, ConsistencyKind

MAX_ENDS = 1024
"""Earlier generations whose last step is known. A server that missed more has long been lost."""


class StepGroup:
    """What the workers of a job have said about their steps."""

    def __init__(self, now: float, return_s: float = 0.0) -> None:
        """Start without workers.

        Args:
            now: The time. Members of a stored group have their silence from now on.
            return_s: Seconds that they have at least, to connect to this coordinator.
        """
        self._begun, self._return_s = now, return_s
        self._reports: dict[str, tuple[Stepped, float]] = {}
        """The last word of each worker, and when it came."""

    def wait_for_all(self, now: float) -> None:
        """Give all members ``return_s`` from now on to be heard: they must connect first."""
        self._begun, self._reports = now, {}

    def heard(self, report: Stepped, now: float) -> None:
        """Note the word of a worker. Late words of an earlier life do not count.

        Args:
            report: How far it is.
            now: The time.

        Raises:
            ConfigError: A number is outside its bounds.
        """
        if report.world < 1 or min(*report.step, report.round) < 0:
            raise ConfigError(f"expected a step and a number of workers, found {report}")
        known = self._reports.get(report.client)
        if known is None or _age(known[0]) <= _age(report):
            self._reports[report.client] = (report, now)

    def plan(
        self, known: Steps, newest: Mapping[str, int], now: float
    ) -> tuple[Steps, tuple[str, ...]]:
        """Return the steps as they are now, and the workers whose rights must end.

        Args:
            known: The steps before; the same object is returned if nothing has changed.
            newest: The newest incarnation of each worker.
            now: The time.
        """
        chosen = known.consistency
        if chosen is None or chosen.kind is ConsistencyKind.ASYNC:
            return known, ()
        here = {
            name: report
            for name, (report, at) in self._reports.items()
            if report.incarnation == newest.get(name) and now - at <= chosen.silence_s
            and not report.leaving
        }  # fmt: skip
        members = {
            name: incarnation
            for name, incarnation in known.members.items()
            if incarnation == newest.get(name)
            and (name in here or self._may_come(name, incarnation, now, chosen.silence_s))
        }
        complete = self._complete(here, members)
        members = members if complete is None else complete
        gone = tuple(
            name
            for name, incarnation in known.members.items()
            if name not in members and incarnation == newest.get(name)
        )
        if members != known.members:
            ends = (*known.ends, (known.generation, known.done))[-MAX_ENDS:]
            return replace(known, generation=known.generation + 1, members=members, ends=ends), gone
        ended = [
            here[name].step[1] if name in here and here[name].step[0] == known.generation else 0
            for name in members
        ]
        done = min(ended, default=0)
        return (replace(known, done=done) if done > known.done else known), gone

    def _may_come(self, name: str, incarnation: int, now: float, silence_s: float) -> bool:
        """Return whether a member has said nothing to this object, and may still do so."""
        known = self._reports.get(name)
        has_time = now - self._begun <= max(silence_s, self._return_s)
        return has_time and (known is None or known[0].incarnation != incarnation)

    def _complete(
        self, here: Mapping[str, Stepped], members: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Return the group that newcomers form, or that they join; None if they must wait.

        Args:
            here: The last word of each worker that is there.
            members: The members that stay.
        """
        # A program of an earlier round, or of none, must not end the rights of the members.
        least = max((here[name].round for name in here.keys() & members.keys()), default=0)
        newcomers = {_group(here[name]) for name in here.keys() - members.keys()}
        groups = {group for group in newcomers if group[0] >= least}
        for group in sorted(groups, reverse=True):
            same = {
                name: report.incarnation
                for name, report in sorted(here.items())
                if _group(report) == group
            }
            if len(same) >= group[1] or same.keys() & members.keys():
                return same
        return None


class Fate(StrEnum):
    """What a worker does after its push."""

    WAIT = "wait"
    """It waits for the other workers."""
    GO_ON = "go on"
    AGAIN = "again"
    """It sends the push again, for the next step: this one never will be over."""


class StepFollower:
    """How one worker steps with the others."""

    def __init__(self, consistency: Consistency) -> None:
        """Start before the first step.

        Args:
            consistency: How the steps are ordered: ``sync`` or ``ssp``.
        """
        self.consistency = consistency
        self.ended: StepId = (0, 0)
        """The last step that it has ended, in the newest generation of which it is a member."""

    @property
    def sync(self) -> bool:
        """Whether the pushes of all workers in a step are applied together."""
        return self.consistency.kind is ConsistencyKind.SYNC

    def follow(self, steps: Steps) -> bool:
        """Take over a newer state of the steps, if this worker is a member of the group.

        Returns:
            Whether the generation is new.
        """
        if steps.generation == self.ended[0]:
            return False
        ended = steps.done if self.sync else max(self.ended[1], steps.done)
        self.ended = (steps.generation, ended)
        return True

    def step(self) -> StepId:
        """Return the step that the next push ends."""
        return self.ended[0], self.ended[1] + 1

    def end(self, step: StepId) -> None:
        """Note that all servers have the push of a step."""
        self.ended = (self.ended[0], step[1])

    def fate(self, step: StepId, steps: Steps) -> Fate:
        """Return what a worker does whose push of a step is on its way, or on all servers.

        Args:
            step: The step.
            steps: The newest state of the steps.
        """
        if not self.sync:
            ahead = step[1] - steps.done > self.consistency.staleness
            return Fate.WAIT if ahead else Fate.GO_ON
        if steps.has(step):
            return Fate.GO_ON
        return Fate.WAIT if step[0] == steps.generation else Fate.AGAIN


def _age(report: Stepped) -> tuple[int, bool, tuple[int, int]]:
    return report.incarnation, report.leaving, report.step


def _group(report: Stepped) -> tuple[int, int]:
    """Return what the workers of one group have in common: their round, and their number."""
    return report.round, report.world
