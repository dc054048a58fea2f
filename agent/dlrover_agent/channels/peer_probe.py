"""A probe by UDP that finds out, while the master is silent, whether the round's rank 0 is there.

A datagram goes to the port number in the round's ``MASTER_PORT``. The agent of rank 0 has bound the
UDP port of this number. This has several advantages:

- Each node knows the address already.
- The probe works without checkpoints and without torch.
- The port closes when the agent ends, and an agent that hangs does not answer.
- Datagrams of 12,500 nodes take less than a tenth of one core.

Both sides prove that they have the job's token (:mod:`dlrover_py.protocol.probe`).
:mod:`dlrover_agent.core` decides when to ask, and what silence means.
"""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable

from dlrover_py.protocol.probe import ANSWER, ASK, LENGTH, NONCE, Probe, ProbeSide, encode

log = logging.getLogger("agent.peer_probe")

MAX_DATAGRAMS = 256
"""Datagrams that are read before other tasks of the event loop run."""


def bind_socket(addr: str, port: int, kind: socket.SocketKind) -> socket.socket:
    """Return a socket that is bound for peers which connect to ``addr``.

    If ``addr`` is a loopback address, the socket is bound to it. Otherwise the socket is bound to
    all addresses of this machine, with IPv4 and IPv6 if possible.

    Args:
        addr: IP address or name. On other nodes, a name may mean another address, of either family.
        port: Port number; 0 for any free port.
        kind: Kind of socket. A stream socket gets SO_REUSEADDR.

    Raises:
        OSError: If another process has the port, or this machine has no such address.
    """
    try:
        loopback = ipaddress.ip_address(addr).is_loopback
    except ValueError:
        loopback = False
    dual_stack = not loopback and socket.has_dualstack_ipv6()
    bound = socket.socket(
        socket.AF_INET6 if dual_stack or (loopback and ":" in addr) else socket.AF_INET, kind
    )
    try:
        if dual_stack:  # as in torch's TCPStore
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if kind is socket.SOCK_STREAM:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((addr if loopback else "", port))
    except OSError:
        bound.close()
        raise
    return bound


class PeerProbe:
    """A probe for one round: it asks the agent of rank 0, and answers requests of other agents.

    It answers only while this node is in the round.
    """

    def __init__(
        self,
        round_number: int,
        addr: str,
        port: int,
        token: str,
        *,
        is_in_round: Callable[[], bool],
        on_peer_seen: Callable[[], None],
    ) -> None:
        """Bind the port, and answer requests from now on.

        Args:
            round_number: Number of the round. Datagrams for other rounds are ignored.
            addr: Address that this node has offered for the round.
            port: Port that this node has offered for the round.
            token: The job's token.
            is_in_round: Returns whether this node is still in the round.
            on_peer_seen: Called when rank 0 has answered, or another node has asked.

        Raises:
            OSError: If another process has the port.
        """
        self._round = round_number
        self._token, self._is_in_round, self._on_peer_seen = (
            token.encode(),
            is_in_round,
            on_peer_seen,
        )
        self._has_seen_peer = False
        self._nonces: set[bytes] = set()
        """Random numbers of requests without an answer."""
        self._rank_0_addresses: list[tuple[str, int]] = []
        """Addresses of rank 0."""
        self._resolving: asyncio.Task[None] | None = None
        self._socket = bind_socket(addr, port, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._family = self._socket.family
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def ask(self, addr: str, port: int) -> None:
        """Send a request to the agent of rank 0, without waiting for an answer; ignore errors.

        An answer leads to a call of ``on_peer_seen``. The first call only starts a task that
        resolves the address and then sends. Calls are ignored while that task runs, and later calls
        ignore their arguments.
        """
        if self._rank_0_addresses:
            self._send()
        elif self._resolving is None or self._resolving.done():
            self._resolving = asyncio.create_task(self._resolve(addr, port))

    def close(self) -> None:
        """Close the socket, because the round is over."""
        if self._resolving is not None:
            self._resolving.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    async def _resolve(self, addr: str, port: int) -> None:
        """Resolve the address of rank 0, then send the first request to it.

        An address that was resolved is kept, because a node without network cannot resolve it
        later. After a failure nothing is sent, and the next :meth:`ask` tries again.
        """
        mapped = socket.AI_V4MAPPED | socket.AI_ALL if self._family == socket.AF_INET6 else 0
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                addr, port, family=self._family, type=socket.SOCK_DGRAM, flags=mapped
            )
        except (OSError, ValueError) as error:  # ValueError: not a valid name
            log.debug("rank_0_not_found", extra={"addr": addr, "why": str(error)})
            return
        self._rank_0_addresses = [(str(where[0]), port) for *_, where in found]
        self._send()

    def _send(self) -> None:
        """Send a request to all addresses of rank 0, once; a failure to send is ignored."""
        nonce = secrets.token_bytes(NONCE)
        if len(self._nonces) > MAX_DATAGRAMS:
            self._nonces.clear()
        self._nonces.add(nonce)
        for address in self._rank_0_addresses:
            with contextlib.suppress(
                OSError
            ):  # no route, or no buffer space: a later request may succeed
                self._socket.sendto(self._signed(ASK, nonce), address)

    def _read(self) -> None:
        """Read up to ``MAX_DATAGRAMS`` datagrams, and answer requests of this round.

        Invalid datagrams and those of other rounds are ignored. A request with the right token
        counts as a sign of a peer, but gets no answer if this node has left the round.
        """
        for _ in range(MAX_DATAGRAMS):
            try:
                data, sender = self._socket.recvfrom(LENGTH + 1)
            except OSError:
                return
            try:
                probe = Probe.decode(data)
            except ValueError:
                continue  # any program may send to the port
            if probe.round != self._round:
                continue
            if probe.nonce in self._nonces:
                if probe.proves(ANSWER, self._token):
                    self._nonces.clear()
                    self._peer_seen()
            elif probe.proves(ASK, self._token):
                self._peer_seen()
                if self._is_in_round():
                    with contextlib.suppress(OSError):
                        self._socket.sendto(self._signed(ANSWER, probe.nonce), sender)

    def _peer_seen(self) -> None:
        """Call ``on_peer_seen`` after a valid datagram of a peer; log a line the first time."""
        if not self._has_seen_peer:
            self._has_seen_peer = True
            log.info(
                "peer_probe_answered",
                extra={"then": "no answer from now on means that a node is cut off"},
            )
        self._on_peer_seen()

    def _signed(self, kind: ProbeSide, nonce: bytes) -> bytes:
        """Return a datagram of the round."""
        return encode(kind, self._token, self._round, nonce)
