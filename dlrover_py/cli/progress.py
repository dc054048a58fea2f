"""A printer of a job's progress: as lines, or as lines of JSON."""

import contextlib
from typing import Literal

from dlrover_py.cli import view
from dlrover_py.protocol.status import JobStatus

Style = Literal["live", "plain", "json"]
"""How progress is shown: a live display, lines, or lines of JSON."""
PROGRESS_S = 5.0
"""Seconds between two lines about the step, where there is no live display."""


class ProgressPrinter:
    """A printer of what is new in a status: each event once, and the step at intervals."""

    def __init__(self, style: Style, *, since: float = 0.0) -> None:
        """Set up the printer.

        Args:
            style: form of the lines.
            since: time, on the caller's clock, from which the first interval counts.
        """
        self._style = style
        self._shown = 0
        self._problems: list[str] = []
        self._step = -1
        self._next = since + PROGRESS_S

    def update(self, status: JobStatus | None, now: float) -> None:
        """Print what is new in this status since the last one; nothing if there is no status.

        The step is printed every ``PROGRESS_S`` seconds at most, and only if it has changed.
        Problems are printed when they appear, but not as JSON.

        Args:
            status: present status; None if there is none yet.
            now: time on the caller's clock, in seconds.
        """
        if status is None:
            return
        for event in status.events:
            if event.id > self._shown:
                self._shown = event.id
                body = f'{{"event": {event.model_dump_json()}}}'
                line(body if self._style == "json" else view.event_line(event))
        before = self._problems
        self._problems = [
            view.problem_line(c) for c in view.problems_without_event(status.conditions)
        ]
        if self._style != "json":
            for text in self._problems:
                if text not in before:
                    line(f"         {text}")
        if status.progress is None or now < self._next:
            return
        self._next = now + PROGRESS_S
        if status.progress.step != self._step:
            self._step = status.progress.step
            if self._style == "json":
                line(f'{{"progress": {status.progress.model_dump_json()}}}')
            else:
                line(f"         {view.summary(status)}")

    def finish(self, status: JobStatus | None) -> None:
        """Print the events and problems that are new, and with JSON the last status.

        The step is not printed again.
        """
        self._next = float("inf")
        self.update(status, 0.0)
        if self._style == "json" and status is not None:
            line(f'{{"status": {status.model_dump_json()}}}')


def line(text: str) -> None:
    """Print a line.

    If standard output has no reader any more, the line is lost without an error.
    """
    with contextlib.suppress(OSError):  # the reader has gone; the job continues
        print(text, flush=True)
