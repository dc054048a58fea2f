"""What answers without a token: three pages of the master, and three of the operator."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from dlrover_operator import health as operators
from dlrover_operator.loop import Operator
from dlrover_operator.manifests import Options
from dlrover_py.master.app import inherited, listen
from dlrover_py.master.core.events import Rules
from dlrover_py.master.loop import Loop
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.master.server import RequestGuard, health_app
from dlrover_py.net.http_server import server
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.telemetry import REPEAT_S, RepeatFilter
from tests.builders import job_file
from tests.fakes import MemoryStore
from tests.fakes_kube import fake_cluster

PAGES = {("/healthz", "GET"), ("/readyz", "GET"), ("/metrics", "GET")}


def calls(routes: Iterable[BaseRoute]) -> set[tuple[str, str]]:
    """Each path with its method; one that is mounted, or a socket, stands for all methods."""
    return {
        (str(getattr(route, "path", route)), method)
        for route in routes
        for method in getattr(route, "methods", None) or {"any"}
    }


def test_the_masters_open_port_has_three_pages() -> None:
    loop = Loop(StaticPlatform(ElasticJob.parse(job_file(1))), MemoryStore(), Rules())
    app = health_app(loop, CollectorRegistry())
    assert isinstance(app, FastAPI)
    assert calls(app.routes) == PAGES


async def test_the_operators_open_port_has_three_pages(tmp_path: Any) -> None:
    async with fake_cluster(tmp_path) as (_, kube):
        app = operators.app(Operator(kube, Options(image="m"), ()))
        assert calls(app.routes) == PAGES


@pytest.mark.parametrize("kind", ["http", "websocket", "lifespan", "of another time"])
async def test_the_guard_hands_nothing_on_that_has_no_token(kind: str) -> None:
    """Whatever the server comes to speak: FastAPI's document does not list all of that."""
    told: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError(f"{kind} has come through")

    async def receive() -> Message:
        return {"type": f"{kind}.connect"}

    async def send(message: Message) -> None:
        told.append(message)

    denied = Counter("denied", "Requests.", registry=CollectorRegistry())
    guard = RequestGuard(app, token="t" * 20, max_body_bytes=10, denied=denied)
    await guard({"type": kind, "path": "/v1/job", "headers": []}, receive, send)
    assert [m["status"] for m in told if "status" in m] == ([401] if kind == "http" else [])


async def test_malformed_requests_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn logs a line for each of them, and no token is needed to send one."""
    logger = logging.getLogger("uvicorn.error")
    for old in [f for f in logger.filters if isinstance(f, RepeatFilter)]:
        logger.removeFilter(old)
    door = socket.create_server(("127.0.0.1", 0))
    serving = server(FastAPI())
    task = asyncio.create_task(serving.serve([door]))
    for _ in range(50):
        reader, writer = await asyncio.open_connection(*door.getsockname())
        writer.write(b"\0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
    serving.end()
    await task
    assert len([r for r in caplog.records if r.name == logger.name]) == 1


def test_a_repeated_warning_is_counted() -> None:
    now = 0.0
    only = RepeatFilter(lambda: now)

    def record(level: int = logging.WARNING) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.error", level, "", 0, "Malformed.", None, None)

    passed = [only.filter(record()) for _ in range(4)]
    assert passed == [True, False, False, False]
    assert only.filter(record(logging.ERROR))
    now = REPEAT_S
    last = record()
    assert only.filter(last)
    assert last.getMessage() == "Malformed. (3 more since the last such line)"


def test_a_descriptor_that_does_not_listen_is_refused_and_stays_open() -> None:
    """The parent passes descriptors to the master; a wrong number must not end in a traceback."""
    with socket.socket() as other:
        for fd in (-1, 1 << 20, other.fileno()):
            with pytest.raises(ConfigError, match=f"descriptor {fd} is not a listening socket"):
                inherited(fd)
        other.getsockname()
    door = socket.create_server(("127.0.0.1", 0))
    with door, inherited(os.dup(door.fileno())) as taken:
        assert taken.getsockname() == door.getsockname()


LISTENS = pytest.mark.parametrize("opened", [listen, operators.listen], ids=["master", "operator"])


def has_ipv6() -> bool:
    """Whether this machine has IPv6's address of itself."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def is_reached(door: socket.socket, host: str) -> bool:
    try:
        socket.create_connection((host, door.getsockname()[1])).close()
    except ConnectionRefusedError:
        return False
    return True


@LISTENS
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_one_address_of_ipv6_is_listened_at_alone(opened: Callable[[str], socket.socket]) -> None:
    with opened("[::1]:0") as door:
        assert door.getsockname()[0] == "::1"
        assert is_reached(door, "::1")
        assert not is_reached(door, "127.0.0.1")


@LISTENS
@pytest.mark.parametrize("address", [":0", "[::]:0"])
def test_all_addresses_are_those_of_both_kinds(
    opened: Callable[[str], socket.socket], address: str
) -> None:
    if address != ":0" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with opened(address) as door:
        assert is_reached(door, "127.0.0.1")
        assert is_reached(door, "::1") or not has_ipv6()


@LISTENS
def test_an_address_of_ipv4_is_listened_at_alone(opened: Callable[[str], socket.socket]) -> None:
    for address in ("127.0.0.1:0", "localhost:0"):
        with opened(address) as door:
            assert door.getsockname()[0] == "127.0.0.1"
    with opened("0.0.0.0:0") as door:
        assert door.family is socket.AF_INET
