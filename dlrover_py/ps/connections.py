"""The sockets of a worker: one to the coordinator, and one to each server.

All calls but :meth:`Connections.wake` are made by one thread.
"""

import contextlib
import socket
import time
from collections.abc import Collection, Iterator
from typing import Any

import zmq

from dlrover_py.ps.door import Line, new_context
from dlrover_py.ps.store import Payload
from dlrover_py.ps.wire import UnprovenError, decode, send

MEND_S = 0.05
"""Seconds between two looks for connections that were refused."""
AT_ONCE = 32
"""Messages that are read from one socket before the next one has its turn."""


class Connections:
    """Sockets by the name of a server; that of the coordinator is empty."""

    def __init__(self, coordinator: str, key: bytes) -> None:
        """Make no connection yet.

        Args:
            coordinator: Address of the coordinator.
            key: The key that all messages of the job have.
        """
        self._key = key
        self._context = new_context(ipv6="[" in coordinator)
        self._poller = zmq.Poller()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._lines: dict[str, Line] = {}
        self._mended_at = 0.0
        self._known = False
        """Whether the coordinator has proved that it is that of the job."""

    def poll(self, seconds: float) -> None:
        """Wait until there is something to read, or :meth:`wake` is called, or for some seconds."""
        self._poller.poll(int(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def wake(self) -> None:
        """End :meth:`poll`, now or the next time. Any thread may call this, after the end, too."""
        with contextlib.suppress(OSError):
            self._wakes.send(b".")

    def send(self, name: str, address: str, message: Any, payload: Payload) -> None:
        """Send a message, if its queue has room. A connection is made first if there is none.

        Args:
            name: Name of the receiver.
            address: Its address.
            message: The message.
            payload: Its arrays.

        Raises:
            ConfigError: The arrays are larger than a message may be.
        """
        if name not in self._lines:
            self._lines[name] = Line(self._context, address, self._key)
            self._poller.register(self._lines[name].socket, zmq.POLLIN)
        # A full queue is one more lost message: what has no answer is sent again.
        with contextlib.suppress(zmq.Again):
            send(self._lines[name].socket, message, payload, self._key)

    def received(self) -> Iterator[tuple[Any, Payload]]:
        """Yield the messages that have come. Connections may be ended meanwhile.

        Any program may listen at the address of a server that has died, until the coordinator says
        that the server is lost, and at that of a coordinator until the next one is there. What such
        a program sends is left out.

        Raises:
            WireError: A message of a server, or of the coordinator, cannot be read.
            UnprovenError: The first coordinator is that of another job or version.
        """
        if (now := time.monotonic()) - self._mended_at >= MEND_S:
            self._mended_at = now
            refused = [name for name, line in self._lines.items() if line.mend(now)]
            if "" in refused and not self._known:
                raise UnprovenError(
                    "the coordinator is of another job, or of another release of DLRover-Py: use "
                    "the same release for servers and workers"
                )
        for name in list(self._lines):
            for _ in range(AT_ONCE):
                try:
                    frames = self._lines[name].socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except (KeyError, zmq.Again):  # KeyError: it was ended
                    break
                try:
                    found = decode([frame.buffer for frame in frames], self._key)
                except UnprovenError:
                    if not name and not self._known:
                        raise
                else:
                    self._known = self._known or not name
                    yield found

    def keep(self, names: Collection[str]) -> None:
        """End the connections to all others."""
        for gone in self._lines.keys() - set(names):
            ended = self._lines.pop(gone)
            self._poller.unregister(ended.socket)
            ended.close()

    def close(self, linger_ms: int) -> None:
        """End all connections, at the latest after some milliseconds for what is not sent yet."""
        self._context.destroy(linger=linger_ms)
        self._woken.close()
        self._wakes.close()
