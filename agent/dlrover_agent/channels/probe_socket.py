"""The agent's server for the probes of workers: threads that say what their worker does.

Each worker connects and says its round and its local rank (:mod:`dlrover_py.process.probe`). The
agent asks by one line, and the worker answers with a line of JSON. A worker that cannot answer is
not waited for.
"""

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

log = logging.getLogger("agent.probe")

MAX_CLIENTS = 2048
"""Most connections at the same time; a further one is closed."""
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


class ProbeServer:
    """Knows the probes of the present round's workers, until it is closed."""

    def __init__(self, path: Path) -> None:
        """Bind the socket and listen.

        Args:
            path: Path of the socket, of at most 107 bytes.

        Raises:
            OSError: If the socket cannot be bound.
        """
        self._path = path
        self._round = 0
        self._probes: dict[tuple[int, int], _Probe] = {}
        """Connections by round and local rank."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = self._bind()
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _bind(self) -> socket.socket:
        """Return a listening socket.

        Raises:
            OSError: The socket cannot be bound, for example because the file exists.
        """
        bound = socket.socket(socket.AF_UNIX)
        try:
            bound.bind(str(self._path))
            os.chmod(self._path, 0o600)
            bound.listen(128)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
        return bound

    def rebind(self) -> socket.socket | None:
        """Return a new socket if the file of the present one was removed; else return None.

        The method runs in a thread. The server does not use the new socket before :meth:`use`.

        Raises:
            OSError: If the socket cannot be bound.
        """
        return None if self._path.exists() else self._bind()

    def use(self, bound: socket.socket) -> None:
        """Listen on a socket of :meth:`rebind` from now on. Connections stay."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._socket.close()
        self._socket = bound
        loop.add_reader(bound, self._accept)

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

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        """Accept a connection, and start the task that serves it."""
        try:
            stream, _ = self._socket.accept()
        except OSError as error:
            log.debug("probe_gone", extra={"why": str(error)})
            return
        if len(self._tasks) >= MAX_CLIENTS:
            stream.close()
            return
        task = asyncio.create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before it began cannot close the stream itself.
        task.add_done_callback(lambda _: stream.close())

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
