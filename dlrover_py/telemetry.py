"""Structured logs, set up once by each program.

An event is a fixed snake_case name with fields: ``log.info("round_formed", extra={"round": 3})``.
On a terminal, it is written as a sentence. In a pipe, a file or the log of a Pod, it is a line of
JSON. ``DLROVER_LOG_FORMAT`` (``words`` or ``json``) overrides this for all programs of DLRover.
The module uses the standard library's logging, because structlog adds 0.14 s to an agent's start
(docs/decisions/0002-light-agent.md).
"""

import contextlib
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any, TextIO

from dlrover_py.process.blocking import BackgroundWriter, shared_writer
from dlrover_py.protocol.words import plain, plain_json

ENV_FORMAT = "DLROVER_LOG_FORMAT"
"""Environment variable for the format of logs: ``words`` or ``json``."""
ENV_LEVEL = "DLROVER_LOG_LEVEL"
"""Environment variable for the least severe level that is logged."""
NOTICE = 35
"""Level of events for the user who has started a program: written even if the level is WARNING."""
logging.addLevelName(NOTICE, "NOTICE")

_FORMATS = ("words", "json")

LAST_LINES_S = 1.0
"""Seconds without progress after which a program stops writing its log at its end."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SENTENCES = ("says", "why", "then", "instead")
_A_REASON = re.compile(r"([A-Z][a-z]+)+")
"""Names of a job's events, such as ``NodeLost``. Their text is a complete sentence."""


def for_people(stream: TextIO) -> bool:
    """Return whether the log in a stream consists of sentences instead of JSON.

    ``DLROVER_LOG_FORMAT`` decides. Without it, or with an unknown value, a terminal outside a Pod
    gets sentences.
    """
    wished = os.environ.get(ENV_FORMAT)
    if wished in _FORMATS:
        return wished == "words"
    return stream.isatty() and "KUBERNETES_SERVICE_HOST" not in os.environ


def wished_level(default: str) -> str:
    """Return ``DLROVER_LOG_LEVEL`` or a default, for a program without its own settings."""
    return os.environ.get(ENV_LEVEL) or default


class _LineFormatter(logging.Formatter):
    """A formatter of events as sentences or JSON."""

    def __init__(self, program: str, bound: dict[str, Any], *, as_json: bool) -> None:
        super().__init__()
        self._program, self.bound, self._as_json = program, bound, as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line; in sentences, a traceback may follow on more lines.

        Control characters are escaped.
        """
        extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        error = self.formatException(record.exc_info) if record.exc_info else None
        if not self._as_json:
            line = f"{self._program}: {_sentence(record.getMessage(), extra)}"
            return plain(f"{line}\n{error}" if error else line)
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
        return plain_json(json.dumps(head | fields, default=str, ensure_ascii=False))


def _sentence(event: str, fields: dict[str, Any]) -> str:
    """Format an event as text: ``no contact: address in use; workers go on (port 29400)``.

    Fields with an empty value are left out. An event with the field ``says``, or of a job, consists
    of the texts of its fields ``says``, ``why``, ``then`` and ``instead`` alone.
    """
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
    """A handler that ignores errors of the disk: they cost log lines, and must print nothing."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _BackgroundHandler(logging.Handler):
    """A handler whose lines a thread writes, because an event loop must not wait for a disk."""

    def __init__(self, out: BackgroundWriter) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record, and pass the line to the thread, which writes it later.

        If the stream does not take lines, the oldest of them are dropped.
        """
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 - as in the standard library's handlers
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

    All handlers of the logger are replaced. An unknown level or format is not an error: it is
    logged as a warning, and the default is used. With ``aside``, a stream without a file descriptor
    is still written directly. Without ``logger``, Python's warnings are logged as well.

    Args:
        program: Name of the program, which is part of each line.
        aside: Whether a thread writes the lines, for a program whose event loop must not block.
        level: Least severe level that is written, by number or name. An unknown name means INFO.
        stream: Stream for the log; None for standard error.
        logger: Name of the logger to set up, in a process of another program. The other logs of
            that program then do not get this logger's records. Empty for all loggers.
        elsewhere: Names of events that are not written as sentences, because another program shows
            them on the same terminal. In JSON they are written.
        bound: Fields of each line of JSON, such as job and node.

    Returns:
        The logger of the program.
    """
    stream = sys.stderr if stream is None else stream
    people = for_people(stream)
    handler: logging.Handler = _Handler(stream)
    if aside:
        with contextlib.suppress(io.UnsupportedOperation):  # the stream has no file descriptor
            handler = _BackgroundHandler(shared_writer(stream.fileno()))
    handler.setFormatter(_LineFormatter(program, bound, as_json=not people))
    if people and elsewhere:
        handler.addFilter(lambda record: record.getMessage() not in elsewhere)
    root = logging.getLogger(logger)
    root.handlers[:] = [handler]
    known = logging.getLevelNamesMapping()
    least = level if isinstance(level, int) else known.get(level.strip().upper())
    root.setLevel(logging.INFO if least is None else least)
    if logger:
        root.propagate = False
    else:
        logging.captureWarnings(capture=True)
    if least is None:
        names = "DEBUG, INFO, WARNING or ERROR"
        root.warning(
            "log_level_unknown", extra={"why": f"the log's level is {level!r}: expected {names}"}
        )
    wished = os.environ.get(ENV_FORMAT, "")
    if wished not in ("", *_FORMATS):
        root.warning(
            "log_format_unknown",
            extra={"why": f"{ENV_FORMAT} is {wished!r}: expected {' or '.join(_FORMATS)}"},
        )
    return logging.getLogger(program)


def open_streams() -> None:
    """Open file descriptors 0 to 2 on ``/dev/null`` if they are closed. Open ones are not changed.

    Otherwise a new socket could get one of these numbers, and output would be written to it. A
    stream of ``sys`` that is None is replaced by one of this descriptor.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is fd
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - stays open


def bind(**fields: Any) -> None:
    """Add fields to all later lines of JSON in this process's log.

    Sentences do not show them. Without an earlier :func:`setup` of all loggers, nothing happens.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _LineFormatter):
            handler.formatter.bound.update(fields)


REPEAT_S = 60.0
"""Seconds in which a log with a :class:`RepeatFilter` repeats no warning."""


class RepeatFilter(logging.Filter):
    """Lets each warning pass once in :data:`REPEAT_S`; the next one says how many were left out.

    uvicorn and the parameter server log a line for each malformed message. Without this filter, any
    client that reaches the port could fill the disk with log lines.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no warning seen.

        Args:
            clock: Monotonic clock, in seconds.
        """
        super().__init__()
        self._clock = clock
        self._passed_at: dict[object, float] = {}
        self._left_out: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged: errors always, and a warning once in :data:`REPEAT_S`.

        Records are the same warning if their unformatted messages are equal. The record's message
        is changed if warnings before it were left out.
        """
        if record.levelno >= logging.ERROR:
            return True
        now, key = self._clock(), record.msg
        if now - self._passed_at.get(key, -REPEAT_S) < REPEAT_S:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return False
        self._passed_at[key] = now
        if more := self._left_out.pop(key, 0):
            record.msg = f"{key} ({more} more since the last such line)"
        return True
