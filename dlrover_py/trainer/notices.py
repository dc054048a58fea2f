"""What saving has cost so far, and what the log has been told of it."""

import logging
import re
from dataclasses import dataclass


@dataclass(slots=True)
class SaveStats:
    """What saving has cost this rank so far."""

    calls: int = 0
    """Number of calls of ``save``."""
    saves: int = 0
    """Number of saves that were started."""
    sealed: int = 0
    """Number of saves that ended in a sealed slot."""
    skipped: int = 0
    """Number of saves that were due but not started, for lack of a free slot or of memory."""
    failed: int = 0
    """Number of saves that failed after they were started."""
    blocked_s: float = 0.0
    """Total seconds for which the training was blocked, in ``save`` and before the optimizer's
    step."""
    cost_s: float = 0.0
    """The part of ``blocked_s`` that the saves themselves cost. Calls that save nothing cost a
    little, too."""
    persisted: int = 0
    """Number of checkpoints that are known to be in storage. Only rank 0 counts them."""
    persist_s: float = 0.0
    """Seconds that the last write to storage took."""
    why: str = ""
    """Why the last skipped or failed save was skipped or failed, in words."""

    def ended(self, *, sealed: bool, why: str) -> None:
        """Count a save that was started, and that has ended.

        Args:
            sealed: whether it has ended in a sealed slot.
            why: why it has failed, if it has.
        """
        if sealed:
            self.sealed += 1
        else:
            self.failed += 1
            self.why = why


class NoticeLog:
    """Logs what is wrong with saves, each thing once."""

    def __init__(self, log: logging.Logger, stats: SaveStats) -> None:
        """Create the object.

        Args:
            log: receives the warnings.
            stats: counts the saves that were not started.
        """
        self._log, self._stats = log, stats
        self._logged: set[str] = set()

    def say(self, words: str) -> None:
        """Log a warning."""
        self._log.warning("checkpoints: %s", words)

    def warn_once(self, note: str) -> None:
        """Log a warning once; texts that differ only in numbers count as the same."""
        kind = re.sub(r"[\d,.]+", "", note)  # ignore sizes and counts in the text
        if kind not in self._logged:
            self._logged.add(kind)
            self.say(note)

    def warn_incomplete(self, step: int, *, unstored: bool) -> None:
        """Warn of a checkpoint that is not on all ranks.

        Args:
            step: its step.
            unstored: whether it was to go to storage. The next complete one goes there instead.
        """
        self._log.warning(
            "checkpoint of step %d is incomplete: some rank has not saved it; its log says why%s",
            step,
            "; it is not in storage, where the next one goes that all ranks save"
            if unstored
            else "",
        )

    def missed(self, step: int, why: str) -> None:
        """Count a save that was not started, and log each reason once.

        Once 100 texts were logged, all are forgotten: a reason may then be logged again.

        Args:
            step: the step of the save.
            why: the reason, in words.
        """
        self._stats.skipped += 1
        self._stats.why = why
        if why not in self._logged:
            self._logged = {*self._logged, why} if len(self._logged) < 100 else {why}
            self._log.warning("checkpoint of step %d is skipped: %s", step, why)
