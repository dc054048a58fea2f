"""The log lines about restarts of the training, for the user at the terminal."""

import asyncio
import logging

from dlrover_agent import console
from dlrover_py.protocol.agents import Assignment
from dlrover_py.telemetry import NOTICE

log = logging.getLogger("agent")

NO_STEP_S = 5.0
"""Seconds after which a restart is logged although no step was reported."""


class RestartLog:
    """One log line for each restart, with the time from the end of a round to the next step."""

    def __init__(self) -> None:
        """Create the object, before the first round."""
        self._broke_at: float | None = None
        """When the last round of this node ended; None after the next round has begun."""
        self._pending: tuple[Assignment, float, float] | None = None
        """A restart not logged yet: its assignment, the end of the last round, and its start."""

    def broken(self, now: float) -> None:
        """Note the end of a round, because the next round is a restart.

        A restart that was not logged yet is logged now. Of several calls before the next round, the
        first one counts.
        """
        self._write(stepped=False)
        if self._broke_at is None:
            self._broke_at = now

    def started(self, assignment: Assignment) -> None:
        """Prepare the line of a restart, for its first step or ``NO_STEP_S`` without one.

        The method does nothing if no round has ended before. A check that has failed or was stopped
        counts as a round here.
        """
        if self._broke_at is None:
            return
        loop = asyncio.get_running_loop()
        self._pending, self._broke_at = (assignment, self._broke_at, loop.time()), None

        def no_step_yet() -> None:
            if self._pending is not None and self._pending[0] is assignment:
                self._write(stepped=False)

        loop.call_later(NO_STEP_S, no_step_yet)

    def stepped(self, round_number: int) -> None:
        """Log the restart if this step is the first one of its round; else do nothing."""
        if self._pending is not None and round_number == self._pending[0].round:
            self._write(stepped=True)

    def close(self) -> None:
        """Log the restart that has not been logged yet, if there is one."""
        self._write(stepped=False)

    def _write(self, *, stepped: bool) -> None:
        """Log the restart that has not been logged yet, and forget it; do nothing without one.

        Args:
            stepped: Whether the first step after the restart has just been reported.
        """
        if self._pending is None:
            return
        (assignment, broke_at, began), self._pending = self._pending, None
        after_s = (asyncio.get_running_loop().time() if stepped else began) - broke_at
        alone = assignment.nnodes == 1
        line = console.restarted(
            assignment.reason, single_node=alone, stepped=stepped, after_s=after_s
        )
        log.log(NOTICE, "restarted", extra={"says": line, "after_s": round(after_s, 3)})
