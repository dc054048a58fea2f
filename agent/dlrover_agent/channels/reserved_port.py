"""The ports of this node, one for each round: by TCP the round's store, by UDP its probe.

The store is the key-value store of torch.distributed. By the probe, agents find out whether rank
0's agent is still there.
"""

import logging
import socket
from collections.abc import Callable

from dlrover_agent.channels.peer_probe import PeerProbe, bind_socket
from dlrover_py.protocol.agents import Assignment, Offer

log = logging.getLogger("agent")


class ReservedPort:
    """A port that is reserved on this machine for the store of a round.

    The socket already listens, so that clients on other nodes may connect before the store runs.
    If worker 0 has to host the store, the socket is only bound. The kernel then gives the port to
    no other process. Worker 0, which sets SO_REUSEADDR too, can still bind it.
    """

    def __init__(self, addr: str, *, listen: bool) -> None:
        """Reserve a free port.

        Args:
            addr: Address at which other nodes reach this one.
            listen: Whether the socket listens; if not, worker 0 hosts the store.

        Raises:
            OSError: This machine has no such address, or no port is free.
        """
        self._is_listening = listen
        # If worker 0 hosts the store, torch listens on all addresses. The port must be free on
        # each of them.
        self._socket = bind_socket(addr if listen else "", 0, socket.SOCK_STREAM)
        if listen:
            self._socket.listen(4096)
        self.offer = Offer(addr=addr, port=self._socket.getsockname()[1])

    def hand_over(self) -> socket.socket | None:
        """Return the listening socket, which the caller owns from now on.

        If the port is only bound, the result is None, and the port stays reserved. Call this once
        only: a second call returns a socket that is of no use.
        """
        if not self._is_listening:
            return None
        listening, self._socket = self._socket, socket.socket()
        return listening

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


class RoundPorts:
    """The port of the present round, and the port that is reserved for the next one."""

    def __init__(self, addr: str, *, listen: bool) -> None:
        """Reserve the port of the first round.

        Args:
            addr: Address at which other nodes reach this one.
            listen: Whether the sockets listen; if not, worker 0 hosts the store.

        Raises:
            OSError: This machine has no such address.
        """
        self._addr, self._listen = addr, listen
        self._current: ReservedPort | None = None
        self._next = ReservedPort(addr, listen=listen)
        self._probe: PeerProbe | None = None

    @property
    def offer(self) -> Offer:
        """Address and port that this node offers for the next round."""
        return self._next.offer

    def advance(self) -> None:
        """Use the reserved port for the present round, and reserve another one for the next round.

        The port of the last round is released.

        Raises:
            OSError: No port can be reserved.
        """
        if self._current is not None:
            self._current.close()
        self._current, self._next = self._next, ReservedPort(self._addr, listen=self._listen)

    def hand_over(self) -> socket.socket | None:
        """Return the listening socket of the present round, which the caller owns from now on.

        It must be called after :meth:`advance`, and once only.

        Returns:
            The socket; None if worker 0 hosts the store.
        """
        assert self._current is not None
        return self._current.hand_over()

    def open_probe(
        self,
        assignment: Assignment,
        token: str,
        *,
        is_in_round: Callable[[], bool],
        on_peer_seen: Callable[[], None],
    ) -> None:
        """Open the UDP socket for probes between the agents of a round of several nodes.

        The socket of an older round is closed first. Nothing is opened for a round of one node. If
        the port is taken, a warning is logged and this round has no probes.

        Args:
            assignment: This node's place in the round.
            token: The job's token.
            is_in_round: Returns whether this node is still in the round.
            on_peer_seen: Called when another node of the round was reached.
        """
        assert self._current is not None
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        if assignment.nnodes < 2:
            return
        offer = self._current.offer
        try:
            self._probe = PeerProbe(
                assignment.round,
                offer.addr,
                offer.port,
                token,
                is_in_round=is_in_round,
                on_peer_seen=on_peer_seen,
            )
        except OSError as error:  # without probes, silence means nothing, and workers go on
            log.warning("peer_probe_unavailable", extra={"port": offer.port, "why": str(error)})

    def probe(self, addr: str, port: int) -> None:
        """Ask the agent of rank 0, at this address, whether it is still in the round.

        The method does nothing if the round has no probe. See :meth:`PeerProbe.ask`.
        """
        if self._probe is not None:
            self._probe.ask(addr, port)

    def close(self) -> None:
        """Release all ports, and end the probe of the present round."""
        if self._probe is not None:
            self._probe.close()
        self._next.close()
        if self._current is not None:
            self._current.close()
