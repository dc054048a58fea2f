"""Structured logs, set up once by each program.

An event is a fixed snake_case word with fields: ``log.info("round_formed", extra={"round": 3})``.
On a terminal it is a line for people, elsewhere a line of JSON. The standard library's logging
does it: structlog costs the agent 0.14 s of start (docs/decisions/0002-light-agent.md).
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _Lines(logging.Formatter):
    def __init__(self, program: str, bound: dict[str, Any], *, as_json: bool) -> None:
        super().__init__()
        self._program, self.bound, self._as_json = program, bound, as_json

    def format(self, record: logging.LogRecord) -> str:
        extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        fields = self.bound | extra
        at = datetime.fromtimestamp(record.created, UTC)
        error = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            head = {
                "at": at.isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(),
                "event": record.getMessage(),
                "program": self._program,
            }
            if error:
                fields = fields | {"error": error}
            return json.dumps(head | fields, default=str, ensure_ascii=False)
        words = " ".join(f"{k}={v}" for k, v in fields.items() if v not in (None, ""))
        line = f"{at:%H:%M:%S}.{record.msecs:03.0f} {self._program} {record.getMessage()} {words}"
        return line.rstrip() + (f"\n{error}" if error else "")


class _Handler(logging.StreamHandler[TextIO]):
    """A full disk costs lines of the log; it is not the place to complain about it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def setup(
    program: str,
    *,
    level: int | str = logging.INFO,
    stream: TextIO | None = None,
    logger: str = "",
    **bound: Any,
) -> logging.Logger:
    """Set up the logs of this process.

    Args:
        program: its name, in each line.
        level: least severe level that is written.
        stream: where to; standard error if not given.
        logger: only this one and those below it, in a process that has logs of its own.
        bound: fields that each line carries (job, node …).
    """
    stream = sys.stderr if stream is None else stream
    handler = _Handler(stream)
    handler.setFormatter(_Lines(program, bound, as_json=not stream.isatty()))
    root = logging.getLogger(logger)
    root.handlers[:] = [handler]
    root.setLevel(level)
    if logger:
        root.propagate = False
    else:
        logging.captureWarnings(capture=True)
    return logging.getLogger(program)


def open_streams() -> None:
    """See that descriptors 0 to 2 are open: a socket that got one of them would be written to."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - stays open


def bind(**fields: Any) -> None:
    """Add fields to all later lines of this process."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Lines):
            handler.formatter.bound.update(fields)
