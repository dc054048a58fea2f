"""Structured logs, set up once by each program.

An event is a fixed snake_case word with fields: ``log.info("round_formed", extra={"round": 3})``.
A person at a terminal gets it as a sentence. A pipe, a file and a Pod's log get a line of JSON.
``DLROVER_LOG_FORMAT`` (``words`` or ``json``) decides it otherwise, for each program of ours. The
standard library's logging does it: structlog costs the agent 0.14 s of start
(docs/decisions/0002-light-agent.md).
"""

import contextlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, TextIO

from dlrover_py.aside import Outlet, outlet

ENV_FORMAT = "DLROVER_LOG_FORMAT"
ENV_LEVEL = "DLROVER_LOG_LEVEL"
NOTICE = 35
"""Level of what a person who has started a program wants to know, whatever the level is."""
logging.addLevelName(NOTICE, "NOTICE")

_FORMATS = ("words", "json")

LAST_LINES_S = 1.0
"""So long a program waits at its end for its log to be taken."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SENTENCES = ("says", "why", "then", "instead")
_A_REASON = re.compile(r"([A-Z][a-z]+)+")
"""Events of a job, such as ``NodeLost``: what they tell is a whole sentence."""


def for_people(stream: TextIO) -> bool:
    """Whether the log in this stream is sentences, not JSON.

    ``DLROVER_LOG_FORMAT`` says so, or it is a terminal outside a Pod.
    """
    wished = os.environ.get(ENV_FORMAT)
    if wished in _FORMATS:
        return wished == "words"
    return stream.isatty() and "KUBERNETES_SERVICE_HOST" not in os.environ


def wished_level(default: str) -> str:
    """``DLROVER_LOG_LEVEL``, for a program without settings of its own."""
    return os.environ.get(ENV_LEVEL) or default


class _Lines(logging.Formatter):
    def __init__(self, program: str, bound: dict[str, Any], *, as_json: bool) -> None:
        super().__init__()
        self._program, self.bound, self._as_json = program, bound, as_json

    def format(self, record: logging.LogRecord) -> str:
        extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        error = self.formatException(record.exc_info) if record.exc_info else None
        if not self._as_json:
            line = f"{self._program}: {_sentence(record.getMessage(), extra)}"
            return line + (f"\n{error}" if error else "")
        at = datetime.fromtimestamp(record.created, UTC)
        head = {
            "at": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "program": self._program,
        }
        fields = self.bound | extra
        if error:
            fields = fields | {"error": error}
        return json.dumps(head | fields, default=str, ensure_ascii=False)


def _sentence(event: str, fields: dict[str, Any]) -> str:
    """An event for people: ``no contact: address in use; workers go on (port 29400)``."""
    told = [str(fields[name]) for name in _SENTENCES if fields.get(name)]
    if told and ("says" in fields or _A_REASON.fullmatch(event)):
        return "; ".join(told)
    details = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {value}{' s' * name.endswith('_s')}"
        for name, value in fields.items()
        if name not in _SENTENCES and value not in (None, "")
    )
    words = event.replace("_", " ") if " " not in event else event
    return words + (": " if told else "") + "; ".join(told) + (f" ({details})" if details else "")


class _Handler(logging.StreamHandler[TextIO]):
    """A full disk costs lines of the log; it is not the place to complain about it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Aside(logging.Handler):
    """Lines are written by a thread: a loop that must answer in time waits for no disk."""

    def __init__(self, out: Outlet) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 - as the handlers of the standard library
            self.handleError(record)
        else:
            self._out.write(line)

    def flush(self) -> None:
        self._out.finish(LAST_LINES_S)


def setup(
    program: str,
    *,
    aside: bool = False,
    level: int | str = logging.INFO,
    stream: TextIO | None = None,
    logger: str = "",
    elsewhere: Collection[str] = (),
    **bound: Any,
) -> logging.Logger:
    """Set up the logs of this process.

    Args:
        program: its name, in each line.
        aside: a thread writes the lines, for programs whose loop must answer in time.
        level: least severe level that is written.
        stream: where to; standard error if not given.
        logger: only this one and those below it, in a process that has logs of its own.
        elsewhere: events that people are told by another program on the same terminal.
        bound: fields that each line of JSON carries (job, node …).
    """
    stream = sys.stderr if stream is None else stream
    people = for_people(stream)
    handler: logging.Handler = _Handler(stream)
    if aside:
        with contextlib.suppress(io.UnsupportedOperation):  # no file stands behind it
            handler = _Aside(outlet(stream.fileno()))
    handler.setFormatter(_Lines(program, bound, as_json=not people))
    if people and elsewhere:
        handler.addFilter(lambda record: record.getMessage() not in elsewhere)
    root = logging.getLogger(logger)
    root.handlers[:] = [handler]
    root.setLevel(level)
    if logger:
        root.propagate = False
    else:
        logging.captureWarnings(capture=True)
    wished = os.environ.get(ENV_FORMAT, "")
    if wished not in ("", *_FORMATS):
        root.warning(
            "log_format_unknown",
            extra={"why": f"{ENV_FORMAT} is {wished!r}: expected {' or '.join(_FORMATS)}"},
        )
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
