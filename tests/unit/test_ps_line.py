"""A connection that was refused is made again: the right program may come later."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import zmq

from dlrover_py.ps import door, specs
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.coordinator import Coordinator
from dlrover_py.ps.map_store import MapFile
from dlrover_py.ps.messages import Beat
from dlrover_py.ps.planner import PlanRules
from dlrover_py.ps.server import ParameterServer
from dlrover_py.ps.specs import TableSpec
from dlrover_py.ps.wire import JobAccess
from tests.ps_threads import coordinating, turn

RULES = PlanRules(buckets=2, servers=1, replicas=1, silence_s=60)
OTHER_JOB = JobAccess("job", "", "another token").key


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        yield made


class Heard(Coordinator):
    """A coordinator that remembers whose beats have come."""

    beating = ""

    def _handle(self, route: bytes, message: Any, now: float) -> None:
        self.beating = message.server if isinstance(message, Beat) else self.beating
        super()._handle(route, message, now)


def coordinator(folder: Path, listener: socket.socket) -> Heard:
    store = MapFile(folder / "map.json")
    return Heard("job", "token", store, RULES, time.monotonic(), listener=listener)


@contextmanager
def refusing(listener: socket.socket, kind: str) -> Iterator[Callable[[int], None]]:
    """Have a foreign program listen; yield a call that waits until it has ended connections."""
    port = listener.getsockname()[1]
    if kind == "no ZeroMQ":

        def end(count: int) -> None:
            listener.settimeout(20)
            for _ in range(count):
                line, _ = listener.accept()
                with line, suppress(ConnectionError):
                    line.settimeout(20)
                    line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
                    while line.recv(4096):
                        pass

        yield end
        return
    with zmq.Context() as context:
        if kind == "another password":
            door.guard(context, OTHER_JOB)
            inbox = door.guarded(context)
        else:
            inbox = context.socket(zmq.ROUTER)
        ended = inbox.get_monitor_socket(zmq.Event.DISCONNECTED)
        listener.setblocking(False)
        inbox.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
        inbox.bind(f"tcp://127.0.0.1:{port}")

        def wait(count: int) -> None:
            for _ in range(count):
                assert ended.poll(20_000), "nobody has tried to connect"
                ended.recv_multipart()

        yield wait
        context.destroy(linger=0)


@pytest.mark.parametrize("kind", ["another password", "no password", "no ZeroMQ"])
def test_a_server_and_its_beats_find_the_coordinator_after_a_foreign_program(
    tmp_path: Path,
    listener: socket.socket,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(door.__name__), "filters", [])
    caplog.set_level(logging.WARNING)

    def said() -> list[str]:
        return [line for line in caplog.messages if "a connection was refused" in line]

    access = JobAccess("job", f"tcp://127.0.0.1:{listener.getsockname()[1]}", "token")
    server = ParameterServer(access, "s0")
    thread = Thread(target=server.run)
    thread.start()
    try:
        with refusing(listener, kind) as ended:
            while len(said()) < 2:
                ended(1)
            ended(6)  # they are refused again
        with closing(coordinator(tmp_path, listener)) as made:
            deadline = time.monotonic() + 30
            while not (made.planner.map.servers and made.beating):
                assert time.monotonic() < deadline, "a refused connection is not made again"
                turn(made)
    finally:
        server.stop()
        thread.join()
        server.close()
    assert len(said()) == 2, "once for each connection"


def test_a_worker_outlives_a_foreign_program_between_two_coordinators(
    tmp_path: Path, listener: socket.socket
) -> None:
    first = coordinator(tmp_path, listener)
    server = ParameterServer(first.access, "s0")
    thread = Thread(target=server.run)
    thread.start()
    try:
        with coordinating(first) as stop:
            worker = PsClient(first.access, "w", timeout_s=30)
            stop()
        with worker:
            with refusing(listener, "another password") as ended:
                ended(4)
            with coordinating(coordinator(tmp_path, listener)):
                worker.create(TableSpec("t", 2, specs.sgd(1.0), specs.uniform(0.0, 0.0)))
                assert worker.pull({"t": np.arange(3)}).result()["t"].shape == (3, 2)
    finally:
        server.stop()
        thread.join()
        server.close()


@pytest.mark.timeout(120)
def test_a_line_that_is_closed_stops_no_other_connection(tmp_path: Path) -> None:
    """ZeroMQ passes on events of a dead address all the time, also while the line is closed."""
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        dead = f"tcp://127.0.0.1:{gone.getsockname()[1]}"
    with zmq.Context() as context:
        for _ in range(300):
            door.Line(context, dead, OTHER_JOB).close()
        one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        with closing(one), closing(other):
            port = one.bind_to_random_port("tcp://127.0.0.1")
            other.connect(f"tcp://127.0.0.1:{port}")
            one.send(b"still there")
            assert other.poll(20_000), "the thread for all connections stands still"
            assert other.recv() == b"still there"
