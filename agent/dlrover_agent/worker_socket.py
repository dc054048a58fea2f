"""Unix sockets by which the node's workers reach the agent, in a folder that may be removed."""

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from pathlib import Path

log = logging.getLogger("agent")


class WorkerSocket(ABC):
    """A server with a socket for workers, which can be made again if its file was removed."""

    _BACKLOG = 128
    """Connections that may wait to be accepted."""

    def __init__(self, path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
        """Bind the socket. Nothing is received yet.

        Args:
            path: Path of the socket, of at most 107 bytes.
            kind: ``SOCK_STREAM``, which then listens, or ``SOCK_DGRAM``.

        Raises:
            OSError: If the socket cannot be bound.
        """
        self._path, self._kind = path, kind
        self._socket = self._bind()

    def _bind(self) -> socket.socket:
        """Return a new socket that is bound to the path.

        Raises:
            OSError: The socket cannot be bound, for example because the file exists.
        """
        bound = socket.socket(socket.AF_UNIX, self._kind)
        try:
            bound.bind(str(self._path))
            os.chmod(self._path, 0o600)
            if self._kind == socket.SOCK_STREAM:
                bound.listen(self._BACKLOG)
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
        """Serve a socket of :meth:`rebind` from now on. Connections of the present one stay."""
        self._stop_reading()
        self._socket = bound
        self._read_from(bound)

    def _stop_reading(self) -> None:
        """Close the present socket."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    @abstractmethod
    def _read_from(self, bound: socket.socket) -> None:
        """Have the event loop call this server when the socket can be read."""


class ConnectionServer(WorkerSocket):
    """A server that has a task for each worker's connection, until it is closed."""

    _MAX_CLIENTS: int
    """Most connections at the same time; a further one is closed."""

    def __init__(self, path: Path) -> None:
        """Bind the socket and listen.

        Args:
            path: Path of the socket, of at most 107 bytes.

        Raises:
            OSError: If the socket cannot be bound.
        """
        self._tasks: set[asyncio.Task[None]] = set()
        super().__init__(path)
        self._read_from(self._socket)

    def _read_from(self, bound: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(bound, self._accept)

    def _accept(self) -> None:
        """Accept a connection, and start the task that serves it."""
        try:
            stream, _ = self._socket.accept()
        except OSError as error:
            log.debug("worker_gone", extra={"path": str(self._path), "why": str(error)})
            return
        if len(self._tasks) >= self._MAX_CLIENTS:
            stream.close()
            return
        task = asyncio.create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before it began cannot close the stream itself.
        task.add_done_callback(lambda _: stream.close())

    @abstractmethod
    async def _serve(self, stream: socket.socket) -> None:
        """Serve one connection until its end."""

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self._stop_reading()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
