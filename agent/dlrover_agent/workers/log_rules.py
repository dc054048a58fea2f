"""Applies the job's log rules to the lines of workers, in a thread beside the agent's loop.

The lines are outside text, and the patterns are the user's. RE2 searches in a time that is linear
in the length of a line, whatever the pattern is, and without the lock of Python. Long lines are
cut. Of a worker that prints very fast, only some lines are looked at.
"""

import functools
import importlib.util
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from dlrover_py.process.blocking import BackgroundThread, read_regular
from dlrover_py.protocol.agents import LogFinding
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.log_rules import LOG_RULES, LogRule, rule_problems

log = logging.getLogger("agent.log_rules")

MAX_LINE = 4096
"""Bytes of a line that are looked at, from its beginning."""
MAX_LINES_S = 1000
"""Lines of a worker in a second that are looked at."""
MAX_WAITING = 1 << 18
"""Bytes that wait for the thread. Above it, the oldest are not looked at."""
MAX_QUOTE = 200
"""Characters of a line that a finding quotes."""
MAX_FILE = 1 << 16
"""Bytes of the largest file with rules."""
NOT_INSTALLED = "RE2 is not installed there: pip install google-re2"
_END_OF_LINE = re.compile(rb"[\r\n]+")


class Pattern(Protocol):
    """A compiled regular expression."""

    def search(self, text: str) -> "Match | None":
        """Return the first place where the expression is found; None if there is none."""


class Match(Protocol):
    """A place where a regular expression was found."""

    def group(self, number: int) -> str | None:
        """Return the text of a group; None if the group has no part in it."""


def compiled(pattern: str) -> Pattern:
    """Return a regular expression of RE2.

    Raises:
        ImportError: RE2 is not installed.
        ValueError: RE2 does not accept the pattern.
    """
    if importlib.util.find_spec("re2") is None:
        raise ImportError(NOT_INSTALLED)
    import re2  # an optional extra, which only jobs with log rules need

    options = re2.Options()
    options.log_errors = False  # it would write to standard error
    try:
        found: Pattern = re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0] if error.args else error
        text = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        raise ValueError(f"RE2 refuses its pattern: {text}") from error
    return found


class RuleState:
    """One rule, and what it has found at each rank. Times are seconds of one monotonic clock."""

    def __init__(self, rule: LogRule, pattern: Pattern) -> None:
        self.rule, self._pattern = rule, pattern
        self._hits: dict[int, deque[float]] = {}
        """Times of the newest lines that count, by rank. Of an expected line only the last one."""
        self._met: dict[int, float] = {}
        """When enough lines had come within the time, by rank; the newest such time."""
        self._quotes: dict[int, str] = {}
        """The newest line that counts, by rank."""
        self._applies: dict[int, str] = {}
        """The ranks to which the rule applies, and what was found there when it began to."""

    def saw(self, rank: int, line: str, at: float) -> bool:
        """Take in one line; return whether it counts.

        Args:
            rank: The rank that has printed it.
            line: The line, without its end.
            at: Monotonic time at which it came.
        """
        match = self._pattern.search(line)
        if match is None or (self.rule.has_range and not self.rule.in_range(match.group(1))):
            return False
        kept = 1 if self.rule.expected_every_seconds is not None else self.rule.count
        hits = self._hits.setdefault(rank, deque(maxlen=kept))
        hits.append(at)
        if len(hits) == kept and at - hits[0] <= self.rule.within_seconds:
            self._met[rank] = at
        self._quotes[rank] = line
        return True

    def missed(self, rank: int, at: float) -> None:
        """Take note that lines of a rank were not looked at: an expected one may be among them.

        A line is only expected of a rank that has printed one.
        """
        if self.rule.expected_every_seconds is not None and rank in self._hits:
            self._hits[rank].append(at)

    def ended(self, rank: int) -> None:
        """Expect no more lines of a rank."""
        if self.rule.expected_every_seconds is not None:
            self._hits.pop(rank, None)

    def finding(self, now: float) -> LogFinding | None:
        """Return what the rule tells now; None if it does not apply to any rank."""
        rule, expected_s = self.rule, self.rule.expected_every_seconds
        for rank in [rank for rank in self._applies if rank not in self._hits]:
            del self._applies[rank]
        for rank, hits in self._hits.items():
            if expected_s is not None:
                applies = now - hits[-1] > expected_s
            else:
                met = self._met.get(rank)
                applies = met is not None and now - met <= rule.within_seconds
            if not applies:
                self._applies.pop(rank, None)
            elif rank not in self._applies:
                self._applies[rank] = self._in_words(rank)
        if not self._applies:
            return None
        ranks = sorted(self._applies)
        said = self._applies[ranks[0]]
        return LogFinding(rule=rule.name, verdict=rule.verdict, ranks=ranks[:64], said=said)

    def _in_words(self, rank: int) -> str:
        """Return what was found at a rank when the rule begins to apply."""
        rule, line = self.rule, _quoted(self._quotes[rank])
        if rule.expected_every_seconds is not None:
            return (
                f"rank {rank} has printed no line like '{line}' for more than "
                f"{rule.expected_every_seconds} s"
            )
        if rule.count == 1:
            return f"rank {rank} has printed '{line}'"
        return (
            f"rank {rank} has printed {rule.count} lines like '{line}' within "
            f"{rule.within_seconds} s"
        )


class LineSplitter:
    """Splits one stream of a rank into lines. Long lines are cut, and a fast stream is thinned."""

    def __init__(self) -> None:
        self._rest = b""
        """Beginning of the line that has not ended yet, at most ``MAX_LINE`` bytes."""
        self._second, self._left = 0.0, MAX_LINES_S

    def lines(self, data: bytes, at: float) -> tuple[list[str], bool]:
        """Return the lines that have ended, and whether others were left out.

        Args:
            data: The next bytes of the stream.
            at: Monotonic time at which they came.
        """
        *ended, rest = _END_OF_LINE.split(data)
        if ended:
            ended[0], self._rest = self._rest + ended[0], b""
        self._rest = (self._rest + rest[:MAX_LINE])[:MAX_LINE]
        if at - self._second >= 1.0:
            self._second, self._left = at, MAX_LINES_S
        looked_at = ended[: self._left]
        self._left -= len(looked_at)
        texts = [line[:MAX_LINE].decode("utf-8", "replace") for line in looked_at if line]
        return texts, len(looked_at) < len(ended)

    def skip(self) -> None:
        """Forget the line that has not ended, because bytes that follow are missing."""
        self._rest = b""


class LogWatch:
    """The log rules of a node: gets the output of its workers, and knows which rules apply."""

    def __init__(
        self,
        thread: BackgroundThread | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without rules.

        Args:
            thread: Thread in which lines are searched; None for a new one.
            clock: Returns seconds that never decrease.
        """
        self.in_use = False
        """Whether there are rules for the workers of this round."""
        self._clock = clock
        self._thread = thread or BackgroundThread("log-rules", max_waiting=MAX_WAITING)
        self._round = 0
        self._states: list[RuleState] = []
        self._unused: list[LogFinding] = []
        """The rules that cannot be used."""
        self._newest: tuple[list[RuleState], list[LogFinding]] = self._states, []
        """The rules that were last asked, and what they told."""
        self._asked = False
        """Whether the thread has been asked, and has not answered."""
        self._logged: set[str] = set()
        """The rules that apply and have been logged."""

    def new_round(self, number: int, rules: Sequence[LogRule], more: str = "") -> None:
        """Apply rules to the workers of the round that begins; forget the earlier ones.

        Args:
            number: Number of the round.
            rules: Some rules.
            more: Further rules as JSON; empty if there are none.
        """
        self._round, self._states, self._unused = number, [], []
        self.in_use = bool(rules or more)
        if self.in_use:  # the import of RE2 reads files, so the thread makes it
            states, unused = self._states, self._unused
            self._thread.post(lambda: _prepare(rules, more, states, unused))

    def stream(self, rank: int) -> "WatchedStream | None":
        """Return what takes in a stream of a worker of this round; None without rules."""
        if not self.in_use:
            return None
        states, unused = self._states, self._unused
        counts = functools.partial(self._find, states, unused)
        return WatchedStream(rank, states, self._thread, self._clock, counts)

    def findings(self, number: int) -> list[LogFinding]:
        """Return which rules apply in a round, without waiting; have the thread ask them again."""
        if not self.in_use or number != self._round:
            return []
        if not self._asked:
            self._asked = True
            states, unused = self._states, self._unused
            self._thread.post(lambda: self._answer(states, unused))
        asked, found = self._newest
        return found if asked is self._states else []

    def _answer(self, states: list[RuleState], unused: list[LogFinding]) -> None:
        """Ask all rules, after the lines that have come before. Runs in the thread."""
        self._find(states, unused)
        self._asked = False

    def _find(self, states: list[RuleState], unused: list[LogFinding]) -> None:
        """Ask all rules. Runs in the thread."""
        now = self._clock()
        found = [finding for state in states if (finding := state.finding(now)) is not None]
        if states is self._states:
            found = [*unused, *found]
            self._newest = states, found
            for finding in found:
                if finding.rule not in self._logged:
                    fields = {"rule": finding.rule, "verdict": finding.verdict}
                    log.warning("log_rule", extra=fields | {"why": finding.said})
            self._logged = {finding.rule for finding in found}


def _prepare(
    rules: Sequence[LogRule], more: str, states: list[RuleState], unused: list[LogFinding]
) -> None:
    """Compile rules.

    Args:
        rules: Some rules.
        more: Further rules as JSON; empty if there are none.
        states: Gets the rules that can be used.
        unused: Gets the rules that cannot be used, with the reason.
    """
    try:
        rules = [*rules, *(LOG_RULES.validate_json(more, extra="ignore") if more else ())]
    except ValidationError as error:
        why = f"the rules of the job are not understood, of another version: {error}"
        unused.append(LogFinding(rule="", verdict="UNUSED", said=" ".join(why.split())))
    for rule in rules:
        try:
            states.append(RuleState(rule, compiled(rule.pattern)))
        except ImportError as error:
            unused.append(LogFinding(rule="", verdict="UNUSED", said=str(error)))
            return
        except ValueError as error:
            unused.append(LogFinding(rule=rule.name, verdict="UNUSED", said=str(error)))


def rules_in(path: Path) -> tuple[LogRule, ...]:
    """Return the rules in a YAML file: a list, or a mapping with the list as ``logRules``.

    Raises:
        ConfigError: The file cannot be read, or a rule in it cannot be used.
    """
    import yaml  # only this flag needs it

    try:
        found = yaml.safe_load(read_regular(path, MAX_FILE))
        found = found.get("logRules") if isinstance(found, dict) else found
        rules = LOG_RULES.validate_python(found)
    except OSError as error:
        raise ConfigError(f"--log-rules {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"--log-rules {path}: expected YAML, found: {text}") from error
    except ValidationError as error:
        faults = (
            f"{'.'.join(str(part) for part in fault['loc']) or 'the file'}: {fault['msg']}"
            for fault in error.errors()
        )
        raise ConfigError(f"--log-rules {path}: {'; '.join(faults)}") from error
    except ValueError as error:  # such as a date that does not exist
        raise ConfigError(f"--log-rules {path}: expected YAML, found: {error}") from error
    if problems := rule_problems(rules):
        raise ConfigError(f"--log-rules {path}: {'; '.join(problems)}")
    return tuple(rules)


class WatchedStream:
    """One stream of a worker, whose bytes are passed to the thread."""

    def __init__(
        self,
        rank: int,
        states: list[RuleState],
        thread: BackgroundThread,
        clock: Callable[[], float],
        counts: Callable[[], None],
    ) -> None:
        """Take in a stream from its beginning.

        Args:
            rank: Rank of the worker in the round.
            states: The rules of the round.
            thread: Thread in which the rules are applied.
            clock: Returns seconds that never decrease.
            counts: Called in the thread after lines of which one counts for a rule: its worker may
                die of what it has printed.
        """
        self._rank, self._states, self._thread, self._clock = rank, states, thread, clock
        self._counts = counts
        self._splitter = LineSplitter()
        self._lost_at: float | None = None
        """Newest time at which bytes came that the thread had no time for; None if it had."""

    def take(self, data: bytes) -> None:
        """Pass the next bytes to the thread. This never waits."""
        at = self._clock()
        self._thread.post(lambda: self._look(data, at), len(data), lambda: self._lose(at))

    def end(self) -> None:
        """Expect no more lines of this worker."""
        self._thread.post(self._end)

    def _lose(self, at: float) -> None:
        """Take note of bytes that are dropped; the caller holds the lock of the thread."""
        self._lost_at = at

    def _look(self, data: bytes, at: float) -> None:
        """Apply the rules to the lines that end in some bytes. Runs in the thread."""
        lost_at, self._lost_at = self._lost_at, None
        if lost_at is not None:
            self._splitter.skip()
        lines, left_out = self._splitter.lines(data, at)
        hits = 0
        for state in self._states:
            hits += sum(state.saw(self._rank, line, at) for line in lines)
            if left_out or lost_at is not None:
                state.missed(self._rank, at)
        if hits:
            self._counts()

    def _end(self) -> None:
        for state in self._states:
            state.ended(self._rank)


def _quoted(line: str) -> str:
    """Return a line for a message: on one line, cut, and without control characters."""
    text = " ".join(line.split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 1] + "…"
