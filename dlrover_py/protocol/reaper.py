"""The lines that an agent writes to its reaper: the sessions that it has started or ended.

Both run from the same installation, so the lines have no version. The reaper runs without packages,
so this module needs only the standard library.
"""

import re
from typing import Final, NamedTuple, Self

MAX_LINE: Final = 64
"""Bytes that a line has at most."""
_LINE = re.compile(rb"([+-])([0-9]{1,10})@([0-9]{1,20})")


class SessionChange(NamedTuple):
    """The start or the end of a session: the reaper kills the sessions that have not ended."""

    runs: bool
    """Whether the session has started; otherwise it has ended."""
    pid: int
    """Process id of the session's leader."""
    started: int
    """Start time of the leader, in clock ticks after boot."""

    def encode(self) -> bytes:
        """Return the line, with its end."""
        return b"%c%d@%d\n" % (b"+" if self.runs else b"-", self.pid, self.started)

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """Return the content of a line without its end.

        Raises:
            ValueError: It is not such a line.
        """
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"expected +PID@TICKS or -PID@TICKS, found {line[:MAX_LINE]!r}")
        return cls(found[1] == b"+", int(found[2]), int(found[3]))


def split(data: bytes) -> tuple[list[SessionChange], bytes]:
    """Return the changes in the complete lines of some data, and the rest of it.

    Raises:
        ValueError: A line is not understood, or the rest is longer than a line.
    """
    *lines, rest = data.split(b"\n")
    if len(rest) > MAX_LINE:
        raise ValueError(f"expected lines of at most {MAX_LINE} bytes, found {rest[:MAX_LINE]!r}")
    return [SessionChange.decode(line) for line in lines], rest
