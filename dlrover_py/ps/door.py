"""The door of a port of the parameter server: no message of a stranger comes in.

ZeroMQ keeps the messages of a connection until they are read, and a message may have any number of
frames. So a program that knows nothing of the job could fill the memory. Therefore a connection
must give a password first, by ZeroMQ's mechanism PLAIN (RFC 24). ZeroMQ asks a thread whether it is
right (ZAP, RFC 27), and ends the connection otherwise.

The password is made from the job's key. A program at the address of a dead server learns it, but
not the key: so it opens doors only, and each message still needs its own proof
(:mod:`dlrover_py.ps.wire`).
"""

import contextlib
import hashlib
import hmac
import itertools
import logging
import socket as sockets
import struct
import threading
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dlrover_py import telemetry

FRAME_BYTES = 32 << 20
"""Largest frame of a message. A stranger can send one for each connection before its password."""
BEAT_MS, SILENCE_MS, CONNECT_MS = 1000, 5000, 3000
"""Milliseconds between two signs of life on a connection, until a silent connection is made again,
and of an attempt to connect. A Pod that was removed sends nothing that ends its connections."""
MAX_STRANGERS = 64
"""Connections to a port that may be without the password at a time, each for ``SILENCE_MS``."""
_COMES, _CLOSED = zmq.Event.ACCEPTED, zmq.Event.MONITOR_STOPPED
_GREETING_BYTES = 76
"""Most bytes that ZeroMQ sends without the password: its greeting, and perhaps an error."""
_TCP_INFO = struct.Struct("200xQ")
"""The bytes sent, in ``struct tcp_info`` of Linux."""
AGAIN_S = 1.0
"""Seconds from a refusal until the next attempt to connect."""
_GOES_ON = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.CONNECT_RETRIED
_ENDS = (
    zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.DISCONNECTED
)
"""After these, ZeroMQ retries the connection at once, or never."""
_ASKED = "inproc://zeromq.zap.01"
_LOG = logging.getLogger(__name__)
_LOG.addFilter(telemetry.RepeatFilter())


def new_context(*, ipv6: bool = False) -> "zmq.Context[Any]":
    """Return a context whose sockets notice by themselves that the other end is gone.

    Args:
        ipv6: Whether addresses may be of IPv6.
    """
    context: zmq.Context[Any] = zmq.Context()
    context.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
    context.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    context.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    context.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MS)  # the other end may not take connections
    context.setsockopt(zmq.IPV6, int(ipv6))
    return context


def visitor(context: "zmq.Context[Any]", key: bytes) -> Any:
    """Return a socket that gives the password, and is not connected yet.

    ZeroMQ does not try again if the other end refuses the password: see :class:`Line`.

    Args:
        context: Its context.
        key: The key of the job.
    """
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.plain_username = b"dlrover-ps"
    socket.plain_password = _password(key)
    return socket


class Line:
    """A connection to a server or to the coordinator, which is made again when it was refused.

    Another program may listen at the address for a while: the port was free between two masters,
    or a master of another release is there. ZeroMQ gives up then. One thread uses a line.
    """

    def __init__(
        self, context: "zmq.Context[Any]", address: str, key: bytes, *, queue: int | None = None
    ) -> None:
        """Begin to connect.

        Args:
            context: Its context.
            address: The address of the other end.
            key: The key of the job.
            queue: Messages that wait at most to be sent. None: ZeroMQ's limit.
        """
        self.socket, self._address = visitor(context, key), address
        if queue is not None:
            self.socket.sndhwm = queue
        self._events = _monitor(context, self.socket, _ENDS | _GOES_ON)
        self._over_at: float | None = None
        """Since when it is known that ZeroMQ does not connect any more."""
        self._said = False
        self.socket.connect(address)

    def mend(self, now: float) -> bool:
        """Connect again :data:`AGAIN_S` after a refusal; return whether it does so.

        The first refusal is logged, and the first one after a success.

        Args:
            now: The time in seconds.
        """
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            if event & _GOES_ON:
                self._over_at = None
            elif self._over_at is None:
                self._over_at = now
            self._said = self._said and event != zmq.Event.HANDSHAKE_SUCCEEDED
        if self._over_at is None or now - self._over_at < AGAIN_S:
            return False
        self._over_at = None
        if not self._said:
            self._said = True
            fields = {"to": self._address}
            _LOG.warning(
                "a connection was refused: expected a program of the same job and release at this "
                "address; it is tried again until there is one",
                extra={"fields": fields},
            )
        with contextlib.suppress(zmq.ZMQError):  # ZeroMQ may have forgotten it
            self.socket.disconnect(self._address)
        self.socket.connect(self._address)
        return True

    def close(self) -> None:
        """End the connection."""
        # First the events: ZeroMQ waits for ever to pass one on once nobody can read it, and all
        # connections of the context wait with it.
        self.socket.monitor(None, 0)
        self.socket.close()
        self._events.close()


_numbers = itertools.count()
"""Numbers of the addresses for events. One is not used again: ZeroMQ frees it some time later."""


def _monitor(context: "zmq.Context[Any]", socket: Any, events: int) -> Any:
    """Return a socket with the events of another one.

    Args:
        context: Its context.
        socket: The other socket.
        events: The events.
    """
    address = f"inproc://events-{next(_numbers)}"
    socket.monitor(address, events)
    found = context.socket(zmq.PAIR)
    found.linger = 0
    found.rcvhwm = 0  # a full queue would stop all connections of the context
    found.connect(address)
    return found


def guarded(context: "zmq.Context[Any]") -> Any:
    """Return a socket for connections that give the password; :func:`guard` must have been called.

    Args:
        context: Its context.
    """
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.plain_server = True
    socket.maxmsgsize = FRAME_BYTES  # whoever reaches it could fill the memory
    # Only the thread closes the socket with the events, so the context must not know it.
    events = _monitor(zmq.Context.shadow(context), socket, _COMES | _CLOSED)
    threading.Thread(target=_bound, args=(events,), name="ps-strangers", daemon=True).start()
    return socket


def guard(context: "zmq.Context[Any]", key: bytes) -> None:
    """Start the thread that knows the password. It ends with the context.

    Args:
        context: The context, of which each thread closes its own sockets.
        key: The key of the job.
    """
    asked: Any = zmq.Context.shadow(context).socket(zmq.REP)
    asked.linger = 0
    asked.bind(_ASKED)
    password = _password(key)
    threading.Thread(target=_answer, args=(asked, password), name="ps-door", daemon=True).start()


def _bound(events: Any) -> None:
    """End the oldest connections without a password while there are too many of them.

    Args:
        events: The connections that a socket takes, until it is closed.
    """
    young: dict[int, None] = {}  # descriptors, the oldest one first
    with contextlib.suppress(zmq.ContextTerminated):
        while (event := recv_monitor_message(events))["event"] == _COMES:
            port = int(event["endpoint"].rpartition(b":")[2])
            young.pop(event["value"], None)
            young[event["value"]] = None
            if len(young) > MAX_STRANGERS:
                young = {one: None for one in young if _is_stranger(one, port)}
            while len(young) > MAX_STRANGERS:
                oldest = next(iter(young))
                del young[oldest]
                _is_stranger(oldest, port, end=True)
    events.close()


def _is_stranger(descriptor: int, port: int, *, end: bool = False) -> bool:
    """Return whether a descriptor is that of a connection that has not given the password.

    ZeroMQ does not say which one has. But it greets everybody, and sends more to members only.

    Args:
        descriptor: The descriptor. ZeroMQ may have closed it, and it may be another file now.
        port: The port at which the connection came.
        end: Whether the connection is ended then.
    """
    with (
        contextlib.suppress(OSError),
        sockets.fromfd(descriptor, sockets.AF_INET, sockets.SOCK_STREAM) as line,
    ):
        known = line.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO.size)
        if (
            len(known) == _TCP_INFO.size
            and _TCP_INFO.unpack(known)[0] <= _GREETING_BYTES
            and line.getsockname()[1] == port
            and not line.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
        ):
            if end:
                line.shutdown(sockets.SHUT_RDWR)
            return True
    return False


def _answer(asked: Any, password: bytes) -> None:
    """Answer whether passwords are right, until the context ends."""
    try:
        while True:
            version, request, _, address, *_, given = asked.recv_multipart()
            right = hmac.compare_digest(given, password)
            if not right:
                fields = {"from": address.decode(errors="replace")}
                _LOG.warning("a program of another job was refused", extra={"fields": fields})
            verdict = (b"200", b"OK") if right else (b"400", b"not a program of this job")
            asked.send_multipart([version, request, *verdict, b"", b""])
    except zmq.ContextTerminated:
        asked.close()


def _password(key: bytes) -> bytes:
    hashed = hashlib.blake2b(key=key, digest_size=16, person=b"dlrover-ps-door")
    return hashed.hexdigest().encode()
