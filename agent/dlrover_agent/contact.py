"""Whether the other nodes of the round are there: what an agent asks when the master is silent.

A datagram goes to the port of the round's ``MASTER_PORT``, of which rank 0's agent holds the UDP
side: nobody has to be told another address, it is there without checkpoints and without torch, it
ends with the agent, one that stands still does not answer, and 12,500 of them take a core less than
a tenth of its time. Who asks and who answers proves that it has the job's token. When to ask, and
what follows from silence, is :mod:`dlrover_agent.core`'s.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable

log = logging.getLogger("agent.contact")

NONCE = 16
ROUND = 8
PROOF = 32
LENGTH = ROUND + NONCE + PROOF
AT_ONCE = 256
"""Datagrams that are taken in before others have their turn."""


def bound(addr: str, port: int, kind: socket.SocketKind) -> socket.socket:
    """A socket for those who come to ``addr``: on all of this machine, and where that is an
    address of its loopback device there alone.

    Args:
        addr: a number, or a name, which may mean another address of either family elsewhere.
        port: 0 for any that is free.
        kind: a stream's may be bound beside another of us.

    Raises:
        OSError: somebody else has the port, or there is no such address.
    """
    try:
        alone = ipaddress.ip_address(addr).is_loopback
    except ValueError:
        alone = False
    both = not alone and socket.has_dualstack_ipv6()
    made = socket.socket(
        socket.AF_INET6 if both or (alone and ":" in addr) else socket.AF_INET, kind
    )
    try:
        if both:  # as torch's TCPStore
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if kind is socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((addr if alone else "", port))
    except OSError:
        made.close()
        raise
    return made


class Contact:
    """Asks rank 0 of one round, and answers as rank 0."""

    def __init__(
        self,
        round_number: int,
        addr: str,
        port: int,
        token: str,
        *,
        stands: Callable[[], bool],
        met: Callable[[], None],
    ) -> None:
        """Be there for questions from now on.

        Args:
            round_number: no other is asked about, and none answered for.
            addr: of this node's offer for the round.
            port: of the same.
            token: the job's.
            stands: whether this node is in that round still.
            met: called when rank 0 has answered, or another node has asked.

        Raises:
            OSError: somebody else has the port.
        """
        self._round = round_number.to_bytes(ROUND, "big")
        self._token, self._stands, self._told = token.encode(), stands, met
        self._known = False
        self._nonces: set[bytes] = set()
        """Of questions that were not answered yet."""
        self._first: list[tuple[str, int]] = []
        """Addresses of rank 0."""
        self._finding: asyncio.Task[None] | None = None
        self._socket = bound(addr, port, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._family = self._socket.family
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def ask(self, addr: str, port: int) -> None:
        """Ask rank 0, there, whether it is in the round still."""
        if self._first:
            self._send()
        elif self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._find(addr, port))

    def close(self) -> None:
        """The round is over."""
        if self._finding is not None:
            self._finding.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    async def _find(self, addr: str, port: int) -> None:
        """Once: who is cut off asks no name server."""
        mapped = socket.AI_V4MAPPED | socket.AI_ALL if self._family == socket.AF_INET6 else 0
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                addr, port, family=self._family, type=socket.SOCK_DGRAM, flags=mapped
            )
        except (OSError, ValueError) as error:  # no name can be like that
            log.debug("rank_0_not_found", extra={"addr": addr, "why": str(error)})
            return
        self._first = [(str(where[0]), port) for *_, where in found]
        self._send()

    def _send(self) -> None:
        nonce = secrets.token_bytes(NONCE)
        if len(self._nonces) > AT_ONCE:
            self._nonces.clear()
        self._nonces.add(nonce)
        for where in self._first:
            with contextlib.suppress(OSError):  # no way there, or no room: it is asked again
                self._socket.sendto(self._signed(b"ask", nonce), where)

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                data, sender = self._socket.recvfrom(LENGTH + 1)
            except OSError:
                return
            if len(data) != LENGTH or not data.startswith(self._round):
                continue
            nonce = data[ROUND : ROUND + NONCE]
            if nonce in self._nonces:
                if hmac.compare_digest(data, self._signed(b"answer", nonce)):
                    self._nonces.clear()
                    self._met()
            elif hmac.compare_digest(data, self._signed(b"ask", nonce)):
                self._met()
                if self._stands():
                    with contextlib.suppress(OSError):
                        self._socket.sendto(self._signed(b"answer", nonce), sender)

    def _met(self) -> None:
        if not self._known:
            self._known = True
            log.info("contact_made", extra={"then": "silence would mean that one is cut off"})
        self._told()

    def _signed(self, side: bytes, nonce: bytes) -> bytes:
        words = b"dlrover contact 1 " + side + b"\0" + self._round + nonce
        return self._round + nonce + hmac.digest(self._token, words, "sha256")
