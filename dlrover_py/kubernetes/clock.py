"""The time on the API server's clock."""

import time
from collections.abc import (
    Callable,
)
from email.utils import parsedate_to_datetime

_PROMPT_S = 2.0
"""Longest time of an answer, in seconds, whose date is used. The date of a slower answer says
little.
"""
_STEP_S = 60.0
"""Seconds. A date that differs by more from the present estimate is used only if the next answer
agrees.
"""
_AGREE_S = 5.0
"""Largest difference between two answers of the same clock, in seconds."""


class ServerClock:
    """The time on the API server's clock.

    One machine writes a timestamp and another machine reads it, and the clock of either may be
    wrong. All programs therefore follow the API server, whose timestamps (``creationTimestamp``)
    are everywhere. Between two answers this clock advances with the machine's monotonic clock. The
    ``Date`` of an answer has whole seconds, and corrects the clock only where the two contradict
    each other. One of several API servers may be wrong itself, so a large correction needs two
    answers that agree.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Use this machine's clock until the first answer arrives."""
        self._now = now
        self._offset_s = time.time() - now()
        self._has_estimate = False
        self._disputed: float | None = None
        """The difference that the last answer showed, if the clock has not taken it over yet."""

    def __call__(self) -> float:
        """Return the time in seconds since 1970."""
        return self._now() + self._offset_s

    @property
    def disputed(self) -> bool:
        """Whether the last answer contradicts the present estimate. The next answer may decide."""
        return self._disputed is not None

    def take_date(self, date: str, took_s: float) -> None:
        """Correct the clock by the ``Date`` header of an answer, if the two contradict each other.

        A value that is no date, and an answer that took more than 2 s, are ignored. A correction of
        more than 60 s is applied only if the next answer agrees within 5 s; the first answer is
        always used.

        Args:
            date: value of the header.
            took_s: seconds between the request and the answer.
        """
        try:
            offset_s = parsedate_to_datetime(date).timestamp() - self._now()
        except (ValueError, OverflowError):
            return  # not a date: a proxy may have written it
        if took_s > _PROMPT_S:
            return
        new_offset_s = min(max(self._offset_s, offset_s), offset_s + 1 + took_s)
        step = self._has_estimate and abs(new_offset_s - self._offset_s) > _STEP_S
        if step and (self._disputed is None or abs(new_offset_s - self._disputed) > _AGREE_S):
            self._disputed = new_offset_s
        else:
            self._offset_s, self._has_estimate, self._disputed = new_offset_s, True, None
