"""Why a worker died, from what it left behind: exit status, error file, last words. Pure."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dlrover_py.protocol.agents import FailureKind, WorkerFailure

_PEER = re.compile(
    r"connection (closed|reset) by (remote )?peer|broken pipe|connection refused|socket closed"
    r"|connectfullmesh|remote process exited|unhandled system error|connection was likely closed"
    r"|failed to recv|nccl communicator was aborted",
    re.IGNORECASE,
)
# torch/utils/data/_utils/signal_handling.py and concurrent/futures/process.py
_KILLED_CHILD = re.compile(r"killed by signal: Killed|BrokenProcessPool")
_PEER_TYPES = re.compile(r"^(torch\.distributed\.\w+|RuntimeError|Connection\w+|BrokenPipeError)$")
# What is searched is the user's: each expression takes time in proportion to the text.
_FRAME = re.compile(r'^[ \t]*File "(?P<file>.+)", line (?P<line>\d+)(?:, in .+)?$', re.MULTILINE)
# A script that cannot be compiled has no traceback, only the place and at most three lines.
_SYNTAX = re.compile(
    r'^  File ".+", line \d+\n(?: .*\n){0,3}(?:Syntax|Indentation|Tab)Error: .*$', re.MULTILINE
)
_SECONDARY = re.compile(
    r"Exception ignored |Exception in thread |Exception in callback |Error in atexit"
    r"|Error in sys\.excepthook"
)
"""What Python prints before a traceback that is not why a program ends."""
_MARGIN = re.compile(r"^ +[|+](?: |-.*$)", re.MULTILINE)
_GROUP = "+ Exception Group Traceback"
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$", re.DOTALL)
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_HEAD = "Traceback (most recent call last):"
_MOST_COLUMNS = 60
_TEXT = 4096
"""Characters of an exception's own text that are looked at."""
_TRACE, _TRACE_END = 6000, 2000
"""Characters of a traceback that are told: of its frames, and of the exception's text."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker's failure, with what only people and parents of this process want to know."""

    failure: WorkerFailure
    at: datetime
    error_file: str
    """Its path; empty if it was given none, or one that does not stay."""
    said: str
    """What it wrote there."""


def cause_first(deaths: Sequence[Death]) -> list[Death]:
    """The same failures, those last that only say that another worker was lost."""
    return sorted(deaths, key=lambda death: death.failure.kind is FailureKind.PEER)


def summary(name: str, deaths: Sequence[Death], host: str) -> str:
    """The box that torchrun ends with
    (torch/distributed/elastic/multiprocessing/errors/__init__.py:ChildFailedError.format_msg).

    Args:
        name: of the script.
        deaths: at least one; the first is the root cause.
        host: of this node.
    """
    entries = [_entry(i, death, host) for i, death in enumerate(deaths)]
    title = f"{name} FAILED"
    width = max(len(line) for text in (title, *entries) for line in text.split("\n"))
    width = min(width, _MOST_COLUMNS)
    others = "\n".join(entries[1:]) or "  <NO_OTHER_FAILURES>"
    parts = (
        *("=" * width, title, "-" * width, "Failures:", others, "-" * width),
        *("Root Cause (first observed failure):", entries[0], "=" * width),
    )
    return "\n".join(parts) + "\n"


def _entry(index: int, death: Death, host: str) -> str:
    failure = death.failure
    killed = f" ({signal_name(-failure.exit_code)})" if failure.exit_code < 0 else ""
    trace = failure.traceback if failure.kind is FailureKind.EXCEPTION else ""
    if not trace and killed:
        trace = f"Signal {-failure.exit_code}{killed} received by PID {failure.pid}"
        if failure.out_of_memory:
            trace += f": {failure.out_of_memory}"
    fields = {
        "time": death.at.replace(tzinfo=None).isoformat(sep="_", timespec="seconds"),
        "host": host,
        "rank": f"{failure.rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.exit_code} (pid: {failure.pid}){killed}",
        "error_file": death.error_file or "<N/A>",
        "traceback": trace.rstrip().replace("\n", "\n  ") or "<N/A>",
    }
    head = f"[{index}]:"
    if failure.kind is FailureKind.PEER:
        head += " a consequence: another worker was lost, and this one's connection to it broke"
    return "\n".join([head, *(f"  {k:<10}: {v}" for k, v in fields.items())])


def for_parent(message: str, death: Death | None, at: int) -> str:
    """What a process that has started us finds in the error file that it named, as torchrun's
    ``@record`` leaves it: the root cause's own words, with its exit code.

    Args:
        message: why we failed, if no worker of ours said anything.
        death: the root cause, if it is one of our workers.
        at: Unix time.
    """
    if death is not None:
        try:
            said = json.loads(death.said)
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, dict) and "message" in said:
            if isinstance(said["message"], dict):
                said["message"]["errorCode"] = death.failure.exit_code
            return json.dumps(said)
    trace = death.failure.traceback if death is not None else ""
    more = {"py_callstack": trace or message, "timestamp": str(at)}
    return json.dumps({"message": {"message": message, "extraInfo": more}})


def describe(
    *,
    exit_code: int,
    local_rank: int,
    rank: int,
    pid: int,
    error_file: str,
    last_words: str,
    final_words: str = "",
    step: int | None,
    ran_s: float,
    forked: bool = False,
    out_of_memory: str = "",
) -> WorkerFailure:
    """What the master needs to know of a worker's death.

    The first cause counts: an exception that left the script, and not the signal that killed the
    process while the interpreter ended. An error file proves it. Without one, a traceback in the
    final words does.

    Args:
        exit_code: or the negative signal number.
        error_file: content of TORCHELASTIC_ERROR_FILE (torch/distributed/elastic/multiprocessing/
            errors), empty if there was none.
        last_words: the end of its standard error.
        final_words: the part of it that was written in the last seconds.
        step: last step that it reported.
        ran_s: from its start to its death.
        forked: it came from a zygote.
        out_of_memory: what the kernel's out-of-memory killer did in this round, in words; empty if
            it did nothing.
    """
    killed = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else ""
    # A process that was killed may have handled all exceptions that it wrote of long before.
    words = final_words if killed else last_words
    if out_of_memory and exit_code == -signal.SIGKILL:
        words = ""  # that is the first cause, unless the error file knows of an earlier one
    trace = _from_error_file(error_file) or _from_words(words)
    kind, message, mark = FailureKind.EXIT, f"exited with code {exit_code}", ""
    if trace:
        raised = _RAISED.match(_raised_line(trace))
        error_type = raised["type"] if raised else "Exception"
        text = ((raised["text"] or "") if raised else "")[:_TEXT]
        frames = list(_FRAME.finditer(trace))
        where = f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""
        peer = bool(_PEER_TYPES.match(error_type) and _PEER.search(text))
        kind = FailureKind.PEER if peer else FailureKind.EXCEPTION
        message = f"raised {error_type[:_TEXT]}: {text}" if text else f"raised {error_type[:_TEXT]}"
        mark = f"{error_type}|{_VARYING.sub('#', text)[:200]}|{where}"
    elif killed:
        kind, message = FailureKind.SIGNAL, killed
        if exit_code == -signal.SIGABRT and _PEER.search(last_words):
            kind = FailureKind.PEER  # the watchdog of a collective gave up on another rank
    message = " ".join(message.split())
    if trace and killed:
        message = f"{_shortened(message, 960)}, and {killed} while it ended"
    if out_of_memory and not (exit_code == -signal.SIGKILL or _KILLED_CHILD.search(message)):
        out_of_memory = ""  # it was not this worker, nor a process that it waited for
    if out_of_memory:
        message = f"{_shortened(message, 600)}: {out_of_memory}"
    return WorkerFailure(
        kind=kind,
        local_rank=local_rank,
        rank=rank,
        pid=pid,
        exit_code=exit_code,
        message=_shortened(message, 1024),
        traceback=_told(trace) or _plain(last_words)[-2000:],
        fingerprint=mark[-500:],
        step=step,
        ran_s=ran_s,
        forked=forked,
        out_of_memory=out_of_memory,
    )


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _from_error_file(text: str) -> str:
    if not text:
        return ""
    try:
        message = json.loads(text)["message"]
        trace = message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""  # half written, or another program's: the last words must do
    return _plain(trace) if isinstance(trace, str) else ""


def _from_words(words: str) -> str:
    """The last traceback, and nothing that was printed after it."""
    words = _plain(words)
    heads = [found.start() for found in re.finditer(re.escape(_HEAD), words)]
    if not heads:
        found = _SYNTAX.findall(words)
        return str(found[-1]) if found else ""
    primary = [start for start in heads if not _SECONDARY.match(_line_before(words, start))]
    start = (primary or heads)[-1]
    lines = words[start:].splitlines()
    kept = [lines[0]]
    for line in lines[1:]:
        kept.append(line)
        if line and not line[0].isspace():  # "SomeError: text" ends it
            break
    return "\n".join(kept)


def _line_before(text: str, at: int) -> str:
    end = text.rfind("\n", 0, at)
    return text[text.rfind("\n", 0, max(0, end)) + 1 : end] if end >= 0 else ""


def _plain(text: str) -> str:
    """Text that can be sent: no half of a surrogate pair, no margin of an exception group, and no
    ``[rank1]: `` that torch.distributed puts before each line once a process group is there."""
    text = _RANK.sub("", text.encode("utf-8", "replace").decode())
    return _MARGIN.sub("", text) if _GROUP in text else text


def _raised_line(trace: str) -> str:
    """The line that names the exception, with what follows of its text."""
    lines = trace.rstrip().splitlines()
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i]
        if line[:1].isspace() or line == _HEAD:
            return "\n".join(lines[i + 1 :])
    return lines[-1] if lines else ""


def _told(trace: str) -> str:
    """What people are told of a traceback: a long text of the exception hides no frames."""
    said = _raised_line(trace)
    frames = trace.rstrip()
    frames = frames[: len(frames) - len(said)]
    return frames[-_TRACE:] + _shortened(said, _TRACE_END)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
