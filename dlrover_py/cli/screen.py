"""Tells of a job while it goes on: lines, lines of JSON, or a picture that is drawn anew."""

import contextlib
from typing import Literal

from dlrover_py.cli import view
from dlrover_py.protocol.status import JobStatus

Style = Literal["live", "plain", "json"]
PROGRESS_S = 5.0
"""Without a terminal the step is printed this often."""


class News:
    """Prints what is new in a status: each event once, the step now and then."""

    def __init__(self, style: Style, *, since: float = 0.0) -> None:
        """Remember how; ``since`` is when the first step is waited for, on the caller's clock."""
        self._style = style
        self._shown = 0
        self._step = -1
        self._next = since + PROGRESS_S

    def tell(self, status: JobStatus | None, now: float) -> None:
        """Print what this status has that the last one had not."""
        if status is None:
            return
        for event in status.events:
            if event.id > self._shown:
                self._shown = event.id
                body = f'{{"event": {event.model_dump_json()}}}'
                line(body if self._style == "json" else view.event_line(event))
        if status.progress is None or now < self._next:
            return
        self._next = now + PROGRESS_S
        if status.progress.step != self._step:
            self._step = status.progress.step
            if self._style == "json":
                line(f'{{"progress": {status.progress.model_dump_json()}}}')
            else:
                line(f"         {view.summary(status)}")

    def end(self, status: JobStatus | None) -> None:
        """Print the rest, and for scripts the last status."""
        self._next = float("inf")
        self.tell(status, 0.0)
        if self._style == "json" and status is not None:
            line(f'{{"status": {status.model_dump_json()}}}')


def line(text: str) -> None:
    """Print a line, if anybody reads."""
    with contextlib.suppress(OSError):  # nobody reads any more: the job goes on
        print(text, flush=True)
