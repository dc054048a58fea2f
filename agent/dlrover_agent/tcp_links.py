"""How long the TCP connections of some processes have waited for the network, from the kernel."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SOCK_DIAG = 4
"""Protocol of netlink that lists sockets (``NETLINK_SOCK_DIAG``, sock_diag(7))."""
BY_FAMILY = 20
"""Kind of message that asks for sockets (``SOCK_DIAG_BY_FAMILY``)."""
DUMP = 0x301
"""Flags of a request for all sockets (``NLM_F_REQUEST | NLM_F_DUMP``)."""
INFO = 2
"""Attribute with the counters of a connection (``INET_DIAG_INFO``)."""
ESTABLISHED = 1 << 1
"""Mask of the state of an open connection."""
ERROR, DONE = 2, 3
"""Kinds of messages that end a list."""
TIMEOUT_S = 2.0
"""Seconds within which the kernel has to answer."""
BUSY_AT, BLOCKED_AT = 168, 176
"""Places of ``tcpi_busy_time`` and ``tcpi_rwnd_limited`` in ``struct tcp_info``: microseconds with
data that was not acknowledged, and those of them in which the receiver had no room."""
_HEADER, _SOCKET, _ATTRIBUTE = 16, 72, 4


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP connection."""

    peer: str
    """IP address of the other end."""
    waited_us: int
    """Microseconds in which the network had data of this connection, and the receiver had room."""


def connections(pids: Iterable[int], *, proc: Path = Path("/proc")) -> dict[int, Connection]:
    """Return the open TCP connections of some processes, by the inode of the socket.

    Args:
        pids: Ids of the processes; those that have ended are left out.
        proc: Folder of the kernel's files about processes.

    Returns:
        Empty if the kernel does not list connections.
    """
    own = {inode for pid in pids for inode in _sockets(proc / str(pid) / "fd")}
    if not own:
        return {}
    found: dict[int, Connection] = {}
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as kernel,
    ):
        kernel.settimeout(TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << INFO - 1, ESTABLISHED)
            kernel.send(struct.pack("=IHHII", _HEADER + len(asked), BY_FAMILY, DUMP, 0, 0) + asked)
            while _take(kernel.recv(1 << 17), family, found):
                pass
    return {inode: one for inode, one in found.items() if inode in own}


def busiest(
    before: Mapping[int, Connection], now: Mapping[int, Connection], seconds: float
) -> tuple[float, str]:
    """Return the share of the time in which the busiest connection waited, and its other end.

    Args:
        before: Connections at an earlier time.
        now: The same ones later; others are left out.
        seconds: Seconds between both; more than 0.

    Returns:
        A share from 0 to 1, and an IP address; 0 and an empty text without a connection.
    """
    waits = [
        (one.waited_us - before[inode].waited_us, one.peer)
        for inode, one in now.items()
        if inode in before and before[inode].peer == one.peer
    ]
    longest, peer = max(waits, default=(0, ""))
    share = min(1.0, max(0.0, longest / (1e6 * seconds)))
    return share, peer if share else ""


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


def _take(answer: bytes, family: int, found: dict[int, Connection]) -> bool:
    """Add the connections of a part of the list; return whether more parts follow.

    Raises:
        struct.error: The answer is cut off.
    """
    at = 0
    while at < len(answer):
        length, kind = struct.unpack_from("=IH", answer, at)
        if kind in (ERROR, DONE) or length < _HEADER:
            return False
        message, at = answer[at + _HEADER : at + length], at + (length + 3 & ~3)
        size = 4 if family == socket.AF_INET else 16
        peer = socket.inet_ntop(family, message[24 : 24 + size]).removeprefix("::ffff:")
        (inode,) = struct.unpack_from("=I", message, _SOCKET - 4)
        attribute = _SOCKET
        while attribute + _ATTRIBUTE <= len(message):
            length, kind = struct.unpack_from("=HH", message, attribute)
            info = message[attribute + _ATTRIBUTE : attribute + length]
            if kind == INFO and len(info) >= BLOCKED_AT + 8:  # Linux 4.10
                busy, blocked = (
                    struct.unpack_from("=Q", info, n)[0] for n in (BUSY_AT, BLOCKED_AT)
                )
                found[inode] = Connection(peer, max(0, busy - blocked))
            attribute += max(_ATTRIBUTE, length + 3 & ~3)
    return True
