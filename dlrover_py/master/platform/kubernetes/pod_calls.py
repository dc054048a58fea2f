"""The limit of calls for Pods at the same time, and the delays after failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dlrover_py.pacing import Backoff
from dlrover_py.protocol.errors import TransientError

CALLS = 48
"""Limit of calls for Pods at the same time: three quarters of ``kubernetes.client.IN_FLIGHT``. The
rest is for the journal and the status."""
BACKOFF = Backoff(first_s=0.5, most_s=15.0)
"""Delays between two attempts to create a Pod that the API server refuses."""


class PodCalls:
    """The calls for Pods that are made at the same time."""

    def __init__(self) -> None:
        self._calls = asyncio.Semaphore(CALLS)
        self._failures = 0
        """Number of failed calls in a row."""

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for one of the 48 turns, and keep it during the body of the ``async with``.

        After a TransientError in the body, the turn is kept for a delay, and then the error is
        raised. The delay is at most 15 s, or longer if the server asks for it. In this way a
        thousand nodes put no more load on a failing API server than a few do.

        Raises:
            TransientError: The body has raised it.
        """
        async with self._calls:
            try:
                yield
                self._failures = 0
            except TransientError as error:
                wait_s = BACKOFF.delay_s(self._failures // CALLS)
                self._failures += 1
                await asyncio.sleep(max(wait_s, error.retry_after))
                raise
