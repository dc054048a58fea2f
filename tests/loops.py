"""A master's loop that works while a block runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from dlrover_py.master.loop import Loop


@asynccontextmanager
async def working(loop: Loop) -> AsyncIterator["asyncio.Task[None]"]:
    """Have it run; what has ended it before raises at the end of the block."""
    running = asyncio.create_task(loop.run())
    try:
        yield running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
