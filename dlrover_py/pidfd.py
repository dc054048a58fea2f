"""Waiting for the end of a process without polling (pidfd_open(2))."""

import asyncio
import os


async def ended(pid: int) -> None:
    """Wait until a child of ours has ended; its exit status is left for who reaps it."""
    fd = os.pidfd_open(pid)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
