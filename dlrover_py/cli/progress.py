"""Standard output, and a printer of a job's progress: as lines, or as lines of JSON."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TextIO

from dlrover_py.cli import view
from dlrover_py.process.blocking import write_all
from dlrover_py.protocol.status import JobStatus

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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


class OutputError(OSError):
    """Standard output cannot be written, for example because the disk of its file is full."""


class WholeWrites(io.RawIOBase):
    """A file descriptor for writing, without a buffer. Each write takes all data, or fails.

    At the end of the program, Python waits for the lock of a buffer that a thread still writes. A
    thread that waits for the reader of a full pipe would keep the program from its end.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._dropping = False

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: "ReadableBuffer") -> int:
        """Write all data.

        Raises:
            BrokenPipeError: a pipe has no reader any more.
            OutputError: the data cannot be written for another reason.
        """
        whole = bytes(data)
        if self._dropping:
            return len(whole)
        try:
            write_all(self._fd, whole)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error
        return len(whole)

    def drop_rest(self) -> None:
        """Ignore what is written from now on, such as the rest in the buffer of a stream."""
        self._dropping = True


def unbuffered(stdout: TextIO) -> TextIO:
    """Return a stream without a buffer for the same file.

    A stream that has no file is returned itself.
    """
    try:
        raw = WholeWrites(stdout.fileno())
    except OSError:
        return stdout
    stdout.flush()
    return io.TextIOWrapper(  # type: ignore[type-var]
        raw, encoding=stdout.encoding, errors=stdout.errors, write_through=True
    )


@contextlib.contextmanager
def whole_output() -> Iterator[None]:
    """Have everything that the block prints written to standard output, or raise an error.

    Without a buffer (PYTHONUNBUFFERED), Python ignores that a file has taken only a part. With one,
    it writes the last part when the program has already chosen its exit code. A standard output
    that has no file is left as it is.

    Raises:
        OutputError: standard output cannot be written. A pipe without a reader is no error here.
    """
    stdout = sys.stdout
    try:
        raw = WholeWrites(stdout.fileno())
        stdout.flush()
    except io.UnsupportedOperation:
        yield
        return
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stdout.encoding,
        errors=stdout.errors,
        line_buffering=stdout.isatty() or bool(getattr(stdout, "write_through", False)),
    )
    try:
        with contextlib.redirect_stdout(stream):
            yield
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
    finally:
        raw.drop_rest()
