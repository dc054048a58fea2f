"""The kernel's list of TCP connections, for connections of this process."""

import contextlib
import os
import socket
import struct
import time
from pathlib import Path

import pytest

from dlrover_agent.observation.tcp_links import BLOCKED_AT, BUSY_AT, connections


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def counters(one: socket.socket) -> tuple[int, int]:
    """Return the busy and the blocked time, in microseconds, as the socket itself has them."""
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (busy,), (blocked,) = (struct.unpack_from("=Q", info, at) for at in (BUSY_AT, BLOCKED_AT))
    return busy, blocked


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_own_connections_are_found_with_their_other_end(
    family: socket.AddressFamily, address: str
) -> None:
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
        server.accept()[0] as accepted,
    ):
        found = connections([os.getpid()])
        for one in (client, accepted):
            assert found[inode(one)].peer == address
        assert inode(server) not in found, "it is not connected"
    assert not set(found) & set(connections([os.getpid()]))


def test_an_ipv4_address_of_an_ipv6_socket_is_written_as_one() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])),
        server.accept()[0] as accepted,
    ):
        assert connections([os.getpid()])[inode(accepted)].peer == "127.0.0.1"


def test_a_receiver_that_does_not_read_is_no_slow_network() -> None:
    begun = time.monotonic()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        client.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(1 << 26))
        found = connections([os.getpid()])[inode(client)]
        busy, blocked = counters(client)
        passed = 1e6 * (time.monotonic() - begun)
        # It has had data nearly all the time. Other counters of the kernel do not fit in here.
        assert passed / 2 < blocked <= busy < 1.1 * passed
        assert found.waited_us == busy - blocked < passed / 2
        received = accepted.recv(1 << 26, socket.MSG_PEEK)
        assert len(received) <= found.sent_bytes < 1 << 26


def test_one_connection_is_found_among_many_of_others(tmp_path: Path) -> None:
    """The kernel sends about 250 connections in one part of its list."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = []
        for _ in range(350):
            ends.append(stack.enter_context(socket.create_connection(server.getsockname())))
            ends.append(stack.enter_context(server.accept()[0]))
        (tmp_path / "7" / "fd").mkdir(parents=True)
        for number, one in enumerate((server, ends[0], ends[333], ends[-1])):
            (tmp_path / "7" / "fd" / str(number)).symlink_to(f"socket:[{inode(one)}]")
        found = connections([7, 8], proc=tmp_path)
        assert {*found} == {inode(one) for one in (ends[0], ends[333], ends[-1])}


def test_a_list_that_takes_too_long_is_given_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        assert connections([os.getpid()])
        assert connections([os.getpid()], deadline_s=0.0) == {}


def test_connections_of_other_processes_and_of_none_are_left_out() -> None:
    assert connections([0]) == {}
    assert connections([]) == {}
