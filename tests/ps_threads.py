"""Servers of a parameter server as threads of the test, with real sockets between them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from dlrover_py.ps.client import PsClient
from dlrover_py.ps.coordinator import Coordinator
from dlrover_py.ps.cuts import CutDirectory, SavedCut
from dlrover_py.ps.door import visitor
from dlrover_py.ps.map_store import MapFile
from dlrover_py.ps.planner import PlanRules
from dlrover_py.ps.server import ParameterServer
from dlrover_py.ps.wire import JobAccess

TOKEN = "a-token-of-the-tests"


def turn(coordinator: Coordinator) -> None:
    """Let a coordinator do once what it does again and again."""
    coordinator.socket.poll(20)
    coordinator.receive(time.monotonic())
    coordinator.tick(time.monotonic())


@contextmanager
def coordinating(coordinator: Coordinator) -> Iterator[Callable[[], None]]:
    """Run a coordinator in a thread, then close it; yield a call that ends the thread earlier."""
    over = threading.Event()

    def coordinate() -> None:
        while not over.is_set():
            turn(coordinator)

    thread = threading.Thread(target=coordinate)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    try:
        yield stop
    finally:
        stop()
        coordinator.close()


@contextmanager
def servers(
    folder: Path, count: int = 2, buckets: int = 8, cuts: str = "", which: str | None = None
) -> Iterator[JobAccess]:
    """Run a coordinator and some servers; yield how to reach them.

    Args:
        folder: where the map is kept.
        count: number of servers.
        buckets: number of buckets.
        cuts: directory of cuts, if there is one.
        which: the cut to start from.
    """
    rules = PlanRules(buckets=buckets, servers=count, silence_s=60)
    source = SavedCut.open(cuts, which) if which is not None else None
    coordinator = Coordinator(
        "tests",
        TOKEN,
        MapFile(folder / "map.json"),
        rules,
        time.monotonic(),
        cuts=CutDirectory(cuts) if cuts else None,
        source=source,
    )
    running = [ParameterServer(coordinator.access, f"s{index}") for index in range(count)]
    threads = [threading.Thread(target=server.run) for server in running]
    with coordinating(coordinator):
        for thread in threads:
            thread.start()
        try:
            yield coordinator.access
        finally:
            for server, thread in zip(running, threads, strict=True):
                server.stop()
                thread.join()
                server.close()


def connect(context: "zmq.Context[Any]", address: str, key: bytes) -> Any:
    """Return a socket that connects to a server or to the coordinator with the password."""
    made = visitor(context, key)
    made.connect(address)
    return made


@contextmanager
def client(access: JobAccess, name: str = "worker-0") -> Iterator[PsClient]:
    """Connect a worker."""
    with PsClient(access, name, timeout_s=60) as connected:
        yield connected
