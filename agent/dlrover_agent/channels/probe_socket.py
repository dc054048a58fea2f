"""The agent's server for the probes of workers: threads that say what their worker does.

Each worker connects and says its round and its local rank (:mod:`dlrover_py.process.probe`). The
agent asks by one line, and the worker answers with a line of JSON. A worker that cannot answer is
not waited for.
"""

import asyncio
import contextlib
import socket
from pathlib import Path

from dlrover_agent.worker_socket import ConnectionServer

MAX_ANSWER = 1 << 20
"""Greatest size of an answer, in bytes."""
QUESTION = b"?\n"
"""Asks a worker what it does."""


class _Probe:
    """The connection of one worker."""

    __slots__ = ("answer", "writer")

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.answer: asyncio.Future[bytes] | None = None


class ProbeServer(ConnectionServer):
    """Knows the probes of the present round's workers, until it is closed."""

    _MAX_CLIENTS = 2048

    def __init__(self, path: Path) -> None:
        """Bind the socket and listen.

        Args:
            path: Path of the socket, of at most 107 bytes.

        Raises:
            OSError: If the socket cannot be bound.
        """
        self._round = 0
        self._probes: dict[tuple[int, int], _Probe] = {}
        """Connections by round and local rank."""
        super().__init__(path)

    def new_round(self, number: int) -> None:
        """Ask the workers of this round only, from now on."""
        self._round = number

    async def ask(self, local_rank: int, within_s: float) -> bytes | None:
        """Return what a worker of the round does, as JSON; None if it does not answer in time.

        Args:
            local_rank: Rank of the worker on its node.
            within_s: Seconds to wait.
        """
        probe = self._probes.get((self._round, local_rank))
        if probe is None:
            return None
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        probe.answer = answer
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(within_s):
                probe.writer.write(QUESTION)  # a few bytes, which the kernel always takes
                return await answer
        return None

    async def _serve(self, stream: socket.socket) -> None:
        """Register a worker, and pass its answers on until its end."""
        reader, writer = await asyncio.open_unix_connection(sock=stream, limit=MAX_ANSWER)
        probe, key = _Probe(writer), None
        try:
            with contextlib.suppress(OSError, ValueError):
                number, local_rank = map(int, (await reader.readline()).split())
                key = (number, local_rank)
                self._probes[key] = probe
                while line := await reader.readline():
                    if probe.answer is not None and not probe.answer.done():
                        probe.answer.set_result(line)
        finally:
            if key is not None and self._probes.get(key) is probe:
                del self._probes[key]
            writer.close()
