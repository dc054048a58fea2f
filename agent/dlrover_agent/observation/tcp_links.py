"""How long the TCP connections of some processes have waited for the network, from the kernel.

The kernel lists the connections of all processes. On a host with very many of them, most of the
work is to skip those of other processes. So the list is asked for without counters, for which the
kernel would lock each connection, and only the inode of a row is read. Then the kernel is asked for
the counters of each connection of the workers. The library pyroute2 (0.9.7) knows these messages,
too, but decodes each row into Python objects: a list of 10,000 connections takes it 0.50 s of CPU
time, and this module 0.01 s.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SOCK_DIAG = 4
"""Protocol of netlink that lists sockets (``NETLINK_SOCK_DIAG``, sock_diag(7))."""
BY_FAMILY = 20
"""Kind of a message that asks for sockets, or describes one (``SOCK_DIAG_BY_FAMILY``)."""
ONE, ALL = 0x1, 0x301
"""Flags of a request for one socket (``NLM_F_REQUEST``), or for all (with ``NLM_F_DUMP``)."""
INFO = 2
"""Attribute with the counters of a connection (``INET_DIAG_INFO``)."""
ESTABLISHED = 1 << 1
"""Mask of the state of an open connection."""
DEADLINE_S = 1.0
"""Seconds within which all connections have to be read."""
BUSY_AT, BLOCKED_AT = 168, 176
"""Places of ``tcpi_busy_time`` and ``tcpi_rwnd_limited`` in ``struct tcp_info``: microseconds with
data that was not acknowledged, and those of them in which the receiver had no room."""
ACKED_AT = 120
"""Place of ``tcpi_bytes_acked`` in it: bytes that the other end has acknowledged."""
MOST_BYTES = 1 << 16
"""Most bytes of one answer of the kernel; it sends 32 KiB at a time."""
_HEADER = struct.Struct("=IHHII")
"""Header of each message: its length, kind, flags, number and sender."""
_ROW = struct.Struct("=IH78xI")
"""A message about a socket, with the header: its length, its kind, and the inode at its end."""
_IDENTITY_AT, _IDENTITY_BYTES = 20, 48
"""Place and size of the addresses, ports and cookie of a socket in such a message."""
_PEER_AT = 40
"""Place of the address of the other end in such a message."""
_ATTRIBUTE = struct.Struct("=HH")
"""Header of an attribute: its length and kind."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP connection."""

    peer: str
    """IP address of the other end."""
    waited_us: int
    """Microseconds in which the network had data of this connection, and the receiver had room."""
    sent_bytes: int = 0
    """Bytes that the other end has acknowledged."""


def connections(
    pids: Iterable[int], *, proc: Path = Path("/proc"), deadline_s: float = DEADLINE_S
) -> dict[int, Connection]:
    """Return the open TCP connections of some processes, by the inode of the socket.

    Args:
        pids: Ids of the processes; those that have ended are left out.
        proc: Folder of the kernel's files about processes.
        deadline_s: Seconds within which all connections have to be read.

    Returns:
        Empty if the kernel does not list connections, or not within the deadline.
    """
    own = {inode for pid in pids for inode in _sockets(proc / str(pid) / "fd")}
    if not own:
        return {}
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as kernel,
    ):
        asked = _Asked(kernel, time.monotonic() + deadline_s)
        found: dict[int, Connection] = {}
        for family in (socket.AF_INET, socket.AF_INET6):
            # The list has to end before the kernel takes the next request.
            for inode, identity in list(asked.listed(family, own)):
                if (one := asked.counted(family, identity)) is not None:
                    found[inode] = one
        return found
    return {}


def busiest(
    before: Mapping[int, Connection], now: Mapping[int, Connection], seconds: float
) -> tuple[float, str, float]:
    """Return how long the busiest connection waited, its other end, and how fast the links are.

    Args:
        before: Connections at an earlier time.
        now: The same ones later; others are left out.
        seconds: Seconds between both; more than 0.

    Returns:
        The share of the time in which the busiest connection waited, from 0 to 1. The IP address of
        its other end. The bytes that all connections have sent for each second of that wait: many
        connections at the same time share a link. Without a wait 0, an empty text, and 0.
    """
    lasted = [
        (one, before[inode])
        for inode, one in now.items()
        if inode in before and before[inode].peer == one.peer
    ]
    waits = [(one.waited_us - old.waited_us, one.peer) for one, old in lasted]
    longest, peer = max(waits, default=(0, ""))
    share = min(1.0, max(0.0, longest / (1e6 * seconds)))
    if not share:
        return 0.0, "", 0.0
    sent = sum(max(0, one.sent_bytes - old.sent_bytes) for one, old in lasted)
    return share, peer, sent / (share * seconds)


def _sockets(folder: Path) -> list[int]:
    """Return the inodes of the sockets of a process; empty if it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    found.append(int(target[len("socket:[") : -1]))
    return found


class _Asked:
    """A netlink socket on which the kernel is asked for connections."""

    def __init__(self, kernel: socket.socket, until: float) -> None:
        """Ask nothing yet.

        Args:
            kernel: The socket.
            until: Monotonic time at which all answers must have come.
        """
        self._kernel, self._until = kernel, until

    def listed(
        self, family: socket.AddressFamily, own: Collection[int]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the inode and the identity of each open connection whose inode is in ``own``.

        Raises:
            OSError: The deadline is over, or the kernel refuses.
        """
        self._send(ALL, family, extensions=0, identity=bytes(_IDENTITY_BYTES))
        size, known = _ROW.size, BY_FAMILY
        while True:
            answer, at = self._receive(), 0
            while at + size <= len(answer):
                length, kind, inode = _ROW.unpack_from(answer, at)
                if kind != known:
                    return
                if inode in own:
                    yield inode, answer[at + _IDENTITY_AT :][:_IDENTITY_BYTES]
                at += length + 3 & ~3
            if at < len(answer):  # a message that is too short for a socket: the end
                return

    def counted(self, family: socket.AddressFamily, identity: bytes) -> Connection | None:
        """Return the connection with this identity; None if it is closed, or is not counted.

        Raises:
            OSError: The deadline is over.
            struct.error: The answer is cut off.
        """
        self._send(ONE, family, extensions=1 << INFO - 1, identity=identity)
        answer = self._receive()
        if _HEADER.unpack_from(answer)[1] != BY_FAMILY:
            return None
        size = 4 if family == socket.AF_INET else 16
        peer = socket.inet_ntop(family, answer[_PEER_AT : _PEER_AT + size])
        at = _ROW.size
        while at + _ATTRIBUTE.size <= len(answer):
            length, kind = _ATTRIBUTE.unpack_from(answer, at)
            info = answer[at + _ATTRIBUTE.size : at + length]
            if kind == INFO and len(info) >= BLOCKED_AT + 8:  # Linux 4.10
                busy, blocked, sent = (
                    struct.unpack_from("=Q", info, n)[0] for n in (BUSY_AT, BLOCKED_AT, ACKED_AT)
                )
                return Connection(peer.removeprefix("::ffff:"), max(0, busy - blocked), sent)
            at += max(_ATTRIBUTE.size, length + 3 & ~3)
        return None

    def _send(
        self, flags: int, family: socket.AddressFamily, *, extensions: int, identity: bytes
    ) -> None:
        asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, extensions, ESTABLISHED)
        asked += identity
        header = _HEADER.pack(_HEADER.size + len(asked), BY_FAMILY, flags, 0, 0)
        self._kernel.send(header + asked)

    def _receive(self) -> bytes:
        """Return the next answer.

        Raises:
            TimeoutError: The deadline is over.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._kernel.settimeout(left)
        return self._kernel.recv(MOST_BYTES)
