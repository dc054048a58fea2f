"""Find why a worker died, from its exit status, its error file and its last output. PURE."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile

from dlrover_agent.workers.failure_classes import DeathFacts, classify
from dlrover_py.protocol import json_text
from dlrover_py.protocol.agents import FailureKind, WorkerFailure

_PEER = re.compile(
    r"connection (closed|reset) by (remote )?peer|broken pipe|connection refused|socket closed"
    r"|connectfullmesh|remote process exited|unhandled system error|connection was likely closed"
    r"|failed to recv|nccl communicator was aborted",
    re.IGNORECASE,
)
# The texts are in torch/utils/data/_utils/signal_handling.py and concurrent/futures/process.py.
_KILLED_CHILD = re.compile(r"killed by signal: Killed|BrokenProcessPool")
_PEER_TYPES = re.compile(r"^(torch\.distributed\.\w+|RuntimeError|Connection\w+|BrokenPipeError)$")
# These expressions search text of the user's program, so each must run in linear time.
_FRAME = re.compile(r'^[ \t]*File "(?P<file>.+)", line (?P<line>\d+)(?:, in .+)?$', re.MULTILINE)
# For a script that cannot be compiled, Python prints no traceback: only the place, and at most
# three lines.
_SYNTAX = re.compile(
    r'^  File ".+", line \d+\n(?: .*\n){0,3}(?:Syntax|Indentation|Tab)Error: .*$', re.MULTILINE
)
_USAGE = re.compile(r"^usage: ", re.IGNORECASE | re.MULTILINE)
"""The beginning of the text by which argparse, click and absl refuse a command line."""
USAGE = 2
"""The exit code of a script that refuses its command line."""
_SECONDARY = re.compile(
    r"Exception ignored |Exception in thread |Exception in callback |Error in atexit"
    r"|Error in sys\.excepthook|--- Logging error ---"
)
"""The line that Python prints before a traceback that is not the reason why a program ends."""
_MARGIN = re.compile(r"^ +[|+](?: |-.*$)", re.MULTILINE)
_GROUP = "+ Exception Group Traceback"
_GROUP_HEAD = re.compile(r"^ *\+ Exception Group Traceback \(most recent call last\):$", re.M)
"""The first line of an exception group that Python prints; nested groups have no plus there."""
_IN_GROUP = re.compile(r" +[|+]")
_HEAD = re.compile(r"(?:^ *\+ Exception Group )?Traceback \(most recent call last\):", re.MULTILINE)
"""The beginning of a traceback, or of a group with all its tracebacks."""
_GROUP_CLOSED = re.compile(r"^ +\+-{36}$(?!\n +\+-)", re.MULTILINE)
"""The last line of a group. After that of a group in it, its next exception may follow."""
_FIRST_MEMBER = re.compile(r"( *)\+-\+-+ 1 -+$")
"""The line above the first exception of a group."""
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$", re.DOTALL)
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_TRACEBACK_HEAD = "Traceback (most recent call last):"
_CHAINED = re.compile(
    r"^(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):$",
    re.MULTILINE,
)
"""The line that Python prints between the tracebacks of two exceptions, the earlier one first."""
_FOLLOWING = 7
"""Number of lines after the exception of a process group that belong to its text."""
_MAX_CHAIN = 8
"""Number of exceptions that led to the last one which are looked at, the latest ones."""
_MAX_COLUMNS = 60
_MAX_TEXT = 4096
"""Characters of an exception's text that are used for the message and the fingerprint."""
_TRACE, _TRACE_END = 6000, 2000
"""Characters of a traceback that are reported: of its frames, and of the exception's text."""


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker's failure, with the details that only users and the agent's parent process need."""

    failure: WorkerFailure
    at: datetime
    error_file: str
    """Path of the worker's error file; empty if there is none that stays after the run."""
    said: str
    """Content of the worker's error file."""


def cause_first(deaths: Sequence[WorkerDeath]) -> list[WorkerDeath]:
    """Sort failures so that those which were caused by the loss of another worker come last."""
    return sorted(deaths, key=lambda death: death.failure.kind is FailureKind.PEER)


def summary(name: str, deaths: Sequence[WorkerDeath], host: str) -> str:
    """Return the summary of failures in the format that torchrun prints at its end.

    Two lines follow, which torchrun does not have: the class of the first failure, and what to do.

    The format is that of torch/distributed/elastic/multiprocessing/errors/__init__.py:
    ChildFailedError.format_msg.

    Args:
        name: Name of the script.
        deaths: Failures, at least one. The first one is the root cause.
        host: Host name of this node.
    """
    lost = any(death.failure.kind is not FailureKind.PEER for death in deaths)
    entries = [_entry(i, death, host, lost) for i, death in enumerate(deaths)]
    title = f"{name} FAILED"
    width = max(len(line) for text in (title, *entries) for line in text.split("\n"))
    width = min(width, _MAX_COLUMNS)
    others = "\n".join(entries[1:]) or "  <NO_OTHER_FAILURES>"
    parts = (
        *("=" * width, title, "-" * width, "Failures:", others, "-" * width),
        *("Root Cause (first observed failure):", entries[0], "=" * width),
    )
    text = "\n".join(parts) + "\n"
    if (cause := deaths[0].failure.cause) is not None:
        text += f"cause: {cause.failure_class} ({cause.confidence}): {cause.evidence}\n"
        text += f"what to do: {cause.advice}\n"
    return text


def _entry(index: int, death: WorkerDeath, host: str, lost: bool) -> str:
    """Return the lines of the summary for one failure.

    Args:
        index: Number of the failure in the summary.
        death: The failure.
        host: Host name of this node.
        lost: Whether one of the failures is that of a worker whose loss can have caused this one.
    """
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
    if failure.kind is FailureKind.PEER and not lost:
        head += (
            " its connection to another worker broke: that worker failed on another node, or it "
            "had ended while this one still waited for it"
        )
    elif failure.kind is FailureKind.PEER:
        head += " a consequence: another worker was lost, and this one's connection to it broke"
    return "\n".join([head, *(f"  {k:<10}: {v}" for k, v in fields.items())])


def error_file_document(message: str, death: WorkerDeath | None, at: int) -> str:
    """Return the document for the error file that the agent's parent process has named.

    It has the format that torchrun's ``@record`` writes: the text of the root cause, with its exit
    code. If the worker has written a document, that is used.

    Args:
        message: Why the agent failed. It is used if no worker wrote an error file.
        death: The root cause; None if it is not a worker of this agent.
        at: Time of the failure, in Unix seconds.
    """
    if death is not None:
        try:
            document = json_text.decoded(death.said)
        except ValueError:
            document = None
        if isinstance(document, dict) and "message" in document:
            if isinstance(document["message"], dict):
                document["message"]["errorCode"] = death.failure.exit_code
            return json.dumps(document)
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
    stderr_tail: str,
    final_stderr: str = "",
    step: int | None,
    ran_s: float,
    forked: bool = False,
    single_worker: bool = False,
    out_of_memory: str = "",
    ended_ranks: Sequence[int] = (),
) -> WorkerFailure:
    """Describe a worker's death for the master.

    The first cause counts. If an exception left the script, and a signal then killed the process
    while the interpreter ended, the exception is the cause. An error file proves the exception.
    Without an error file, a traceback in ``final_stderr`` proves it.

    Without a traceback, the description has the end of the standard error in its place.

    Args:
        exit_code: The exit code, or the negative signal number.
        local_rank: Local rank of the worker.
        rank: Global rank of the worker.
        pid: Process id of the worker.
        error_file: Content of TORCHELASTIC_ERROR_FILE (torch/distributed/elastic/multiprocessing/
            errors). It is empty if there was none.
        stderr_tail: The end of the worker's standard error.
        final_stderr: The part of ``stderr_tail`` that was written in the last seconds.
        step: The last step that the worker reported; None if it reported none.
        ran_s: Seconds from the start of the worker to its death.
        forked: Whether the worker was forked from a zygote.
        single_worker: Whether the round has one worker only, so that no connection to another one
            can have broken.
        out_of_memory: Description of what the kernel's out-of-memory killer did in this round. It
            is empty if it did nothing.
        ended_ranks: Ranks of this node that had ended with exit code 0 before.
    """
    killed = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else ""
    # A killed process may have handled all exceptions that it printed long before its death.
    stderr = final_stderr if killed else stderr_tail
    if out_of_memory and exit_code == -signal.SIGKILL:
        stderr = ""  # the OOM kill is the first cause, unless the error file has one
    said = _from_error_file(error_file) or stderr
    group = _group_in(said)
    from_file = _plain(said) if said is not stderr else ""
    trace = group.first if group is not None else from_file or _traceback_in(stderr)
    kind, message, fingerprint = FailureKind.EXIT, f"exited with code {exit_code}", ""
    last_words, raised_text = stderr, ""
    if trace:
        raised = _RAISED.match(_split(trace)[1])
        error_type = raised["type"] if raised else "Exception"
        text = ((raised["text"] or "") if raised else "")[:_MAX_TEXT]
        frames = list(_FRAME.finditer(trace))
        where = f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""
        peer = not single_worker and bool(_PEER_TYPES.match(error_type) and _PEER.search(text))
        kind = FailureKind.PEER if peer else FailureKind.EXCEPTION
        message = (
            f"raised {error_type[:_MAX_TEXT]}: {text}"
            if text
            else f"raised {error_type[:_MAX_TEXT]}"
        )
        fingerprint = f"{error_type}|{_VARYING.sub('#', text)[:200]}|{where}"
        raised_text = message.removeprefix("raised ")
        if group is not None:
            message = f"raised {group.raised}, of which the first is {raised_text}"
        if not from_file and error_type.startswith("torch.distributed."):
            # NCCL gives its reason in the lines that follow.
            follows = _plain(stderr).rpartition(trace)[2].splitlines()[:_FOLLOWING]
            raised_text += "\n".join(follows)[:_MAX_TEXT]
    elif killed:
        kind, message = FailureKind.SIGNAL, killed
        if exit_code == -signal.SIGABRT and _PEER.search(stderr_tail):
            kind = FailureKind.PEER  # a collective's watchdog gave up on another rank
    elif exit_code == USAGE and _USAGE.search(stderr_tail):
        # The script raised SystemExit. It would do so again with the same arguments.
        kind = FailureKind.EXCEPTION
        message_line = stderr_tail.rstrip().rpartition("\n")[2][:_MAX_TEXT]
        message = f"refused its command line: {message_line}"
        last_words = message_line
        fingerprint = f"usage|{_VARYING.sub('#', message_line)[:200]}"
    message = " ".join(message.split())
    if trace and killed:
        message = f"{_truncate(message, 960)}, and {killed} while it ended"
    if out_of_memory and not (exit_code == -signal.SIGKILL or _KILLED_CHILD.search(message)):
        out_of_memory = ""  # neither this worker nor a process it waited for was killed
    if out_of_memory:
        message = f"{_truncate(message, 600)}: {out_of_memory}"
    return WorkerFailure(
        kind=kind,
        local_rank=local_rank,
        rank=rank,
        pid=pid,
        exit_code=exit_code,
        message=_truncate(message, 1024),
        traceback=(
            group.text[:_TRACE]
            if group is not None
            else _shorten_traceback(trace) or _plain(stderr_tail)[-2000:]
        ),
        fingerprint=fingerprint[-500:],
        step=step,
        ran_s=ran_s,
        forked=forked,
        out_of_memory=out_of_memory,
        cause=classify(
            DeathFacts(
                kind=kind,
                exit_code=exit_code,
                raised=raised_text,
                earlier=_earlier(group.member if group else from_file or _plain(stderr))
                if trace
                else (),
                out_of_memory=out_of_memory,
                last_words=_plain(last_words if kind is not FailureKind.PEER else stderr_tail),
                ended_ranks=ended_ranks,
            )
        ),
    )


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _from_error_file(text: str) -> str:
    """Return the traceback in the content of an error file, with the margins of groups; empty if
    there is none."""
    if not text:
        return ""
    try:
        message = json_text.decoded(text)["message"]
        trace = message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError):
        return ""  # incomplete, or of another program: the last output is used instead
    return trace if isinstance(trace, str) else ""


@dataclass(frozen=True, slots=True)
class _ExceptionGroup:
    """An exception group that has ended a program (PEP 654)."""

    text: str
    """What Python prints of it."""
    raised: str
    """The group itself, such as ``ExceptionGroup: errors in a TaskGroup (2 sub-exceptions)``."""
    member: str
    """What Python prints of its first exception, without margins: that which came first in time. Of
    a group in a group, it is the first exception of the inner one."""
    first: str
    """The traceback of that exception."""


def _group_in(text: str) -> _ExceptionGroup | None:
    """Return the exception group at the end of a text; None if another exception is the last."""
    text = _unranked(text)
    chains = _chains(text)
    own = [one for one in chains if not one.secondary] or chains
    if not own or not _GROUP_HEAD.match(text, own[-1].head):
        return None
    last = own[-1]
    block = text[last.head : last.end].splitlines()
    member: Sequence[str] = block
    raised = frames = ""
    while (found := _first_member(member)) is not None:
        above, member = found
        raised = raised or _raised_by(above)
        lines = _unmargined(above).splitlines(keepends=True)
        frames = "".join(line for line in lines if line.startswith("  ")) or frames
    inner = _unmargined(member)
    # An exception that was never raised has no traceback. Its group was raised.
    first = _traceback_in(inner) or f"{_TRACEBACK_HEAD}\n{frames}{inner.strip()}"
    if not raised or not inner.strip():
        return None
    return _ExceptionGroup("\n".join(block), _truncate(raised, 400), inner, first)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Exceptions that Python prints together, as one has led to the next, as offsets in a text."""

    start: int
    """Begin of the first one."""
    head: int
    """Begin of the last one."""
    end: int
    """End of a group; of another exception, the end of its first line."""
    secondary: bool
    """Whether it does not end the program."""


def _chains(text: str) -> list[_Chain]:
    """Return the chains of exceptions in a text; what is in a group belongs to it."""
    found: list[_Chain] = []
    for match in _HEAD.finditer(text):
        head, end = match.start(), match.end()
        if found and head < found[-1].end:
            continue
        if _GROUP_HEAD.match(text, head):
            end = _group_end(text, head)
        if found and _CHAINED.search(text, found[-1].head, head):
            start, secondary = found[-1].start, found.pop().secondary
        else:
            start, secondary = head, bool(_SECONDARY.match(_line_before(text, head)))
        found.append(_Chain(start, head, end, secondary))
    return found


def _group_end(text: str, head: int) -> int:
    """Return the offset of the end of a group.

    Until Python 3.12, the further lines of an exception's text have no margin.

    Args:
        text: A text without prefixes of ranks.
        head: Offset of the group.
    """
    following = _GROUP_HEAD.search(text, head + 1)
    last = following.start() if following is not None else len(text)
    if (closed := _GROUP_CLOSED.search(text, head, last)) is not None:
        return closed.end()
    lines = text[head:last].splitlines(keepends=True)  # its end is missing
    return head + sum(len(line) for line in takewhile(_IN_GROUP.match, lines))


def _without_secondary_groups(text: str) -> str:
    """Return a text without the groups that do not end the program; all, if nothing else does."""
    text = _unranked(text)
    chains = _chains(text)
    if all(one.secondary for one in chains):
        return text
    for one in reversed(chains):
        if one.secondary and _GROUP_HEAD.match(text, one.head):
            # The empty line keeps what follows apart from the line above the group.
            text = f"{text[: one.start]}\n{text[one.end :]}"
    return text


def _raised_by(above: Sequence[str]) -> str:
    """Return the name and the text of a group in one line.

    Args:
        above: Its lines above its first exception, with margins.
    """
    lines = _unmargined(above).splitlines()
    frames = [n for n, one in enumerate(lines) if one[:1].isspace() or _TRACEBACK_HEAD in one]
    return " ".join(" ".join(lines[frames[-1] + 1 if frames else 0 :]).split())


def _first_member(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]] | None:
    """Return the lines of a group itself, and those of its first exception; None without a group.

    Args:
        lines: What Python prints of the group, with margins.
    """
    for at, line in enumerate(lines):
        if (found := _FIRST_MEMBER.match(line)) is not None:
            end, members = f"{found[1]}  +---", lines[at + 1 :]
            ends = (number for number, one in enumerate(members) if one.startswith(end))
            return lines[:at], members[: next(ends, len(members))]
    return None


def _unmargined(lines: Sequence[str]) -> str:
    """Return the text of lines without the margins of groups."""
    return _MARGIN.sub("", "\n".join(lines))


def _traceback_in(text: str) -> str:
    """Return the last traceback in a text; empty if there is none.

    Of a chain of exceptions, the last one is returned, with the first line of its message. Prefixes
    of ranks and margins of exception groups are removed. Without a traceback, the report of a
    SyntaxError is returned.

    A chain below a line such as ``Exception in thread`` does not end the program. It counts only if
    there is no other.
    """
    text = _plain(_without_secondary_groups(text))
    heads = [found.start() for found in re.finditer(re.escape(_TRACEBACK_HEAD), text)]
    if not heads:
        found = _SYNTAX.findall(text)
        return str(found[-1]) if found else ""
    primary, secondary, end = [], False, 0
    for start in heads:
        if not _CHAINED.search(text, end, start):
            secondary = bool(_SECONDARY.match(_line_before(text, start)))
        if not secondary:
            primary.append(start)
        end = start
    start = (primary or heads)[-1]
    lines = text[start:].splitlines()
    kept = [lines[0]]
    for line in lines[1:]:
        kept.append(line)
        if line and not line[0].isspace():  # "SomeError: text" ends it
            break
    return "\n".join(kept)


def _earlier(text: str) -> list[str]:
    """Return the exceptions that led to the last one of a text, the oldest first."""
    blocks = _CHAINED.split(text)
    if blocks[-1].count(_TRACEBACK_HEAD) != 1:
        return []  # the last traceback is of another exception than this chain
    return [_split(block)[1][:_MAX_TEXT] for block in blocks[-1 - _MAX_CHAIN : -1]]


def _line_before(text: str, offset: int) -> str:
    """Return the line above the one that contains an offset."""
    end = text.rfind("\n", 0, offset)
    return text[text.rfind("\n", 0, max(0, end)) + 1 : end] if end >= 0 else ""


def _plain(text: str) -> str:
    """Return a text without unpaired surrogates, margins of exception groups and rank prefixes.

    torch.distributed puts a prefix such as ``[rank1]: `` before each line once there is a process
    group.
    """
    text = _unranked(text)
    return _MARGIN.sub("", text) if _GROUP in text else text


def _unranked(text: str) -> str:
    """Return a text without unpaired surrogates and rank prefixes."""
    return _RANK.sub("", text.encode("utf-8", "replace").decode())


def _split(trace: str) -> tuple[str, str]:
    """Split a traceback into its frames and the exception: its name, and all lines of its text.

    The lines of the exception end with a newline, whatever ended them before.
    """
    lines = trace.rstrip().splitlines(keepends=True)
    first = max(0, len(lines) - 1)  # if all lines could belong to the exception, only the last does
    for i in range(len(lines) - 1, -1, -1):
        if lines[i][:1].isspace() or lines[i].splitlines() == [_TRACEBACK_HEAD]:
            first = i + 1
            break
    return "".join(lines[:first]), "\n".join("".join(lines[first:]).splitlines())


def _shorten_traceback(trace: str) -> str:
    """Shorten a traceback for the report, such that a long exception text hides no frames."""
    frames, raised = _split(trace)
    return frames[-_TRACE:] + _truncate(raised, _TRACE_END)


def _truncate(text: str, limit: int) -> str:
    """Return a text with at most this many characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
