"""The newest output of workers as it grows: which lines are new."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.job_view import LogTail

PING_S = 20.0
"""Seconds without a change of the output after which a stream sends a comment, so that it stays
open."""
QUIET = 2
"""Factor of the pause after a look that has found no new line."""
LINES_ADDED = 2000
"""Most lines that a page gets after each other. Then it gets the newest ones in place of all."""
_ORIGIN = re.compile(r"\[[^\]\n]* rank (\d{1,9})(?: err)?\] ")
"""The beginning of a line: the node, the round, the rank and the stream that it is from."""


def ranks_in(lines: Iterable[str]) -> set[int]:
    """Return the global ranks from which lines are."""
    return {int(found[1]) for line in lines if (found := _ORIGIN.match(line))}


def added(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the lines that are new, of two looks at the newest lines of some files.

    The lines of each file are compared on their own: the last ones of the first look are searched
    in the second one. What is behind them is new. Where all lines of a look are equal, no further
    equal line is found.

    Args:
        before: Complete lines of the first look, each with its origin.
        now: Complete lines of the second look.
    """
    old, new = _by_origin(before), _by_origin(now)
    return [line for origin, lines in new.items() for line in _behind(old.get(origin, []), lines)]


def _by_origin(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return the lines of each file, in their order."""
    found: dict[str, list[str]] = {}
    for line in lines:
        origin = _ORIGIN.match(line)
        found.setdefault(origin[0] if origin else "", []).append(line)
    return found


def _behind(before: list[str], now: list[str]) -> list[str]:
    """Return the lines behind the longest stretch of ``now`` with which ``before`` ends."""
    longest, end = 0, 0
    for i in range(1, len(now) + 1):
        length = min(i, len(before))
        if length > longest and now[i - length : i] == before[-length:]:
            longest, end = length, i
    return now[end:]


@dataclass(frozen=True, slots=True)
class LogChange:
    """What has changed of some logs since the last change."""

    log: LogTail
    """The new lines, and all that are not complete."""
    whole: bool
    """The lines take the place of all others. Otherwise they are added."""


class SharedLook:
    """Looks at logs once in some time, however many viewers ask."""

    def __init__(self, look: Callable[[], Awaitable[LogTail]], least_s: float) -> None:
        """Set it up; it does not look yet.

        Args:
            look: Returns the newest lines.
            least_s: Seconds after the begin of a look in which it is not repeated.
        """
        self._look, self._least_s = look, least_s
        self._task: asyncio.Future[LogTail] | None = None
        self._begun = 0.0

    async def newest(self) -> LogTail:
        """Return what the newest look has found, or will find.

        Raises:
            DLRoverError: That look has failed.
        """
        now = asyncio.get_running_loop().time()
        task = self._task
        if task is None or (task.done() and now - self._begun >= self._least_s):
            self._begun = now
            self._task = task = asyncio.ensure_future(self._look())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)  # it goes on if one of its viewers leaves


async def changes(
    tail: Callable[[], Awaitable[LogTail]],
    has_ended: Callable[[], Awaitable[bool]],
    poll_s: float,
    closing: asyncio.Event,
    *,
    ping_s: float = PING_S,
) -> AsyncGenerator[LogChange | None, None]:
    """Yield what changes: first all lines, then the new ones; now and then None.

    A look that fails changes nothing.

    Args:
        tail: Returns the newest lines.
        has_ended: Returns whether the job has ended. It is asked before None is yielded. As long as
            that is so, ``ping_s`` are between two looks: another run may have begun.
        poll_s: Seconds between two looks.
        closing: Ends it once it is set.
        ping_s: Seconds without a change after which None is yielded.
    """
    shown: LogTail | None = None
    count, quiet_s, rests = 0, 0.0, False
    while not closing.is_set():
        before = shown
        with contextlib.suppress(DLRoverError):  # the next look may succeed; the page says so
            shown = await tail()
        change = None if shown is None else _change(before, shown, count)
        if change is not None:
            count, quiet_s, rests = 0 if change.whole else count + len(change.log.lines), 0.0, False
            yield change
        elif quiet_s >= ping_s:
            quiet_s = 0.0
            with contextlib.suppress(DLRoverError):
                rests = await has_ended()
            yield None
        pause_s = ping_s if rests else poll_s * (1 if change is not None else QUIET)
        quiet_s += pause_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing.wait(), pause_s)


def _change(before: LogTail | None, now: LogTail, count: int) -> LogChange | None:
    """Return what a look has found that a page does not have; None if it has all.

    Args:
        before: What the page has; None if it has nothing yet.
        now: What the look has found.
        count: Number of lines that the page got after each other.
    """
    if before is None:
        return LogChange(now, whole=True)
    new = added(before.lines, now.lines)
    if not new and now.growing == before.growing:
        return None
    if count + len(new) > LINES_ADDED or not before.lines:
        return LogChange(now, whole=True)
    return LogChange(replace(now, lines=new), whole=False)
