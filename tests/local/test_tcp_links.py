"""The kernel's list of TCP connections, for connections of this process."""

import os
import socket

import pytest

from dlrover_agent.tcp_links import connections


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
            assert found[os.fstat(one.fileno()).st_ino].peer == address
        assert os.fstat(server.fileno()).st_ino not in found, "it is not connected"
    assert not set(found) & set(connections([os.getpid()]))


def test_a_receiver_that_does_not_read_is_no_slow_network() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0],
    ):
        client.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(1 << 26))
        found = connections([os.getpid()])[os.fstat(client.fileno()).st_ino]
        assert found.waited_us < 500_000


def test_connections_of_other_processes_and_of_none_are_left_out() -> None:
    assert connections([0]) == {}
    assert connections([]) == {}
