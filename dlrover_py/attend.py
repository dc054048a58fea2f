"""Watching over a master that is a process of ours, as a kubelet does by its liveness probe.

Its end is seen at once. One that stands still does not end: somebody has stopped it (SIGSTOP), or
it hangs. It is asked for its health again and again, and killed where it does not answer: whoever
runs it starts it anew, and it goes on from its journal.
"""

import asyncio
import logging
import subprocess

from dlrover_py.processes import ended
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.rpc import Client

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""Between two questions, and for an answer."""
MISSED = 3
"""So many answers in a row must be missing: one is missing where we stood still ourselves (Ctrl-Z),
and on a machine that has no memory left. It takes 20 s at most, less than agents with nothing to do
wait for a master that is away (``MASTER_LOST_S``)."""
STARTS_S = 120.0
"""Until the first answer: a start imports much, perhaps from a slow disk."""


async def attended(process: "subprocess.Popen[bytes]", health: str) -> int:
    """Wait for the end of a master, which is killed where it stands still; return its exit code.

    Args:
        process: the master.
        health: address of its health.
    """

    async def look() -> None:
        why = await _stands_still(health)
        log.warning("master_stands_still", extra={"why": why, "then": "it is killed"})
        process.kill()

    looking = asyncio.create_task(look())
    try:
        return await ended(process)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _stands_still(health: str) -> str:
    """Ask until it does not answer any more; return what was wrong."""
    client = Client(health)
    try:
        why = await _asked(client, STARTS_S)
        in_a_row = MISSED if why else 0
        while in_a_row < MISSED:
            if not in_a_row:
                await asyncio.sleep(PROBE_S)
            why = await _asked(client, PROBE_S)
            in_a_row = in_a_row + 1 if why else 0
        return why
    finally:
        client.close()


async def _asked(client: Client, within_s: float) -> str:
    """What is wrong with it; empty if it is well."""
    try:
        await client.call("GET", "/healthz", deadline_s=within_s)
    except DLRoverError as error:
        return str(error)
    return ""
