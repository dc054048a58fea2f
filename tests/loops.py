"""Runs a master's event loop during a block."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from dlrover_py.master.loop import Loop


@asynccontextmanager
async def working(loop: Loop) -> AsyncIterator["asyncio.Task[None]"]:
    """Run the loop in a task. An error that ended it is raised at the end of the block."""
    running = asyncio.create_task(loop.run())
    try:
        yield running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
