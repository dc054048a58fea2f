"""Questions and answers between agents, over real datagrams."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from dlrover_agent.channels.peer_probe import PeerProbe, bind_socket
from dlrover_agent.channels.reserved_port import ReservedPort
from dlrover_py.protocol.probe import LENGTH

HERE = "127.0.0.1"


@dataclass
class Node:
    """One side, and what it was told."""

    contact: PeerProbe
    port: int
    there: bool = True
    times: int = 0
    met: asyncio.Event = field(default_factory=asyncio.Event)

    def meets(self) -> None:
        self.times += 1
        self.met.set()

    async def has_met(self, times: int) -> None:
        async with asyncio.timeout(60):
            while self.times < times:
                self.met.clear()
                await self.met.wait()


@contextmanager
def node(round_number: int = 7, token: str = "secret", addr: str = HERE) -> Iterator[Node]:
    """A node with its offer's port, of which the round's store has the TCP side."""
    found: list[Node] = []
    reserved = ReservedPort(addr, listen=True)
    port = reserved.offer.port
    contact = PeerProbe(
        round_number,
        addr,
        port,
        token,
        is_in_round=lambda: found[0].there,
        on_peer_seen=lambda: found[0].meets(),
    )
    found.append(Node(contact, port))
    try:
        yield found[0]
    finally:
        contact.close()
        reserved.close()


@contextmanager
def between() -> Iterator[socket.socket]:
    """Somebody who takes what is sent, and passes it on as they like."""
    with socket.socket(type=socket.SOCK_DGRAM) as wire:
        wire.bind((HERE, 0))
        wire.setblocking(False)
        yield wire


async def taken(wire: socket.socket) -> tuple[bytes, tuple[str, int]]:
    async with asyncio.timeout(60):
        data, sender = await asyncio.get_running_loop().sock_recvfrom(wire, LENGTH + 1)
        return data, sender


@pytest.mark.parametrize(
    ("offered", "addr"),
    [(HERE, HERE), ("::1", "::1"), *(("here", a) for a in (HERE, "localhost", "::1"))],
)
async def test_both_sides_learn_of_each_other(offered: str, addr: str) -> None:
    if addr == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    # no assert: has_met() waits, and fails if it was in vain
    with node(addr=offered) as first, node(addr=offered) as second:
        second.contact.ask(addr, first.port)
        await first.has_met(1)
        await second.has_met(1)
        second.contact.ask(addr, first.port)
        await second.has_met(2)


async def test_who_is_not_in_the_round_any_more_does_not_answer() -> None:
    with node() as first, node() as second, between() as wire:
        second.contact.ask(HERE, wire.getsockname()[1])
        question, _ = await taken(wire)
        first.there = False
        wire.sendto(question, (HERE, first.port))
        await first.has_met(1)
        first.there = True
        wire.sendto(question, (HERE, first.port))
        await taken(wire)
        with pytest.raises(BlockingIOError):
            wire.recvfrom(LENGTH)  # there was one answer to two questions


@pytest.mark.parametrize(("round_number", "token"), [(8, "secret"), (7, "another")])
async def test_other_rounds_and_other_jobs_are_strangers(round_number: int, token: str) -> None:
    with node() as first, node(round_number, token) as other, node() as second, between() as wire:
        other.contact.ask(HERE, wire.getsockname()[1])
        question, _ = await taken(wire)
        wire.sendto(question, (HERE, first.port))
        second.contact.ask(HERE, first.port)  # behind it, on the same way
        await second.has_met(1)
        assert first.times == 1
        with pytest.raises(BlockingIOError):
            wire.recvfrom(LENGTH)


async def test_an_answer_is_one_to_our_question_and_good_once() -> None:
    with node() as first, node() as second, node() as third, between() as wire:
        second.contact.ask(HERE, wire.getsockname()[1])
        question, asker = await taken(wire)
        wire.sendto(question, (HERE, first.port))
        answer, _ = await taken(wire)
        spoilt = (question, answer[:-1], answer + b"x", answer[:-1] + b"\0", b"")
        for data in (*spoilt, answer, answer):
            wire.sendto(data, asker)
        third.contact.ask(HERE, second.port)  # behind all of them
        await third.has_met(1)
        assert second.times == 2, "rank 0's answer, and the third node"


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_on_the_loopback_device_is_there_alone(kind: socket.SocketKind) -> None:
    for addr in (HERE, "127.0.1.1"):
        with bind_socket(addr, 0, kind) as ours:
            assert ours.getsockname()[0] == addr
    for addr in ("192.0.2.1", "node0.example", "localhost"):  # a name may mean more elsewhere
        with bind_socket(addr, 0, kind) as ours:
            assert ours.getsockname()[0] in ("::", "0.0.0.0")


def test_the_store_of_a_job_on_this_machine_is_for_this_machine() -> None:
    reserved = ReservedPort(HERE, listen=True)
    with socket.create_connection((HERE, reserved.offer.port)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", reserved.offer.port))
    reserved.close()
