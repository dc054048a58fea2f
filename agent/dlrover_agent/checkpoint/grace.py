"""The time that the agent's last work may take, once a signal has asked the agent to end."""

import asyncio
import contextlib
from collections.abc import Awaitable


class GraceAfterSignal:
    """A time limit that begins with the first signal; without one there is no limit."""

    def __init__(self, grace_s: float) -> None:
        """Create the limit, which has not begun.

        Args:
            grace_s: Seconds from the first signal.
        """
        self._grace_s = grace_s
        self._end_at: float | None = None
        self._timeout: asyncio.Timeout | None = None
        """The timeout of the work that is under way."""

    def begin(self) -> None:
        """Take note of a signal; only the first one counts."""
        if self._end_at is None:
            self._end_at = asyncio.get_running_loop().time() + self._grace_s
            if self._timeout is not None:
                self._timeout.reschedule(self._end_at)

    async def limit(self, work: Awaitable[None]) -> None:
        """Wait for some work, which is canceled when the time is over."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._end_at) as self._timeout:
                    await work
        finally:
            self._timeout = None
