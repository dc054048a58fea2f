"""The thread of the master that owns the map of the servers, while the map cannot be stored."""

import asyncio
import socket
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from dlrover_py.master.servers import ServerMap, ServerPlace
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.ps import messages as m
from dlrover_py.ps.settings import read_access
from dlrover_py.ps.wire import decode, send
from tests.builders import job_file
from tests.ps_threads import connect


class BusyStore:
    """Takes the first map. Afterwards it wants to be left alone for an hour."""

    name, step_buckets = "a busy store", 64

    def __init__(self) -> None:
        self.writes = 0

    def read(self) -> bytes | None:
        return None

    def check(self) -> bool:
        return True

    def write(self, document: bytes) -> None:
        self.writes += 1
        if self.writes > 1:
            busy = TransientError("too many requests")
            busy.retry_after = 3600.0
            raise busy


def ask(dealer: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
    """Send what is no message, and wait for the refusal: the coordinator has made a turn."""
    dealer.send_multipart(frames)
    assert dealer.poll(30_000)
    dealer.recv_multipart()


async def test_a_store_that_wants_to_be_left_alone_is_left_alone(tmp_path: Path) -> None:
    found = job_file(1)
    main = {"name": "main", "command": ["dlrover", "ps", "server"]}
    found["spec"]["distributionStrategy"] = "ParameterServerStrategy"
    found["spec"]["replicaSpecs"]["ps"] = {"template": {"spec": {"containers": [main]}}}
    store, context = BusyStore(), zmq.Context()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        servers = ServerMap(ServerPlace(listener, tmp_path / "access", store, "token"))
        await servers.open(ElasticJob.parse(found))
        running = asyncio.create_task(servers.run(lambda _: None))
        access = read_access(tmp_path / "access")
        dealer = connect(context, access.address, access.key)
        try:
            send(dealer, m.WatchMap(-1), [], access.key)
            assert await asyncio.to_thread(dealer.poll, 30_000)
            known, _ = decode(dealer.recv_multipart(), access.key)
            assert isinstance(known, m.MapNews)
            send(dealer, m.JoinClient("w", "call"), [], access.key)
            for _ in range(20):
                await asyncio.to_thread(ask, dealer, [b"no message"])
            assert store.writes == 2
        finally:
            running.cancel()
            context.destroy(linger=0)
            with pytest.raises(asyncio.CancelledError):
                await running
