"""What answers without a token: three pages of the master, and three of the operator."""

from collections.abc import Iterable
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from dlrover_operator import health as operators
from dlrover_operator.loop import Operator
from dlrover_operator.manifests import Options
from dlrover_py.master.core.events import Rules
from dlrover_py.master.loop import Loop
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.master.server import Guard, health_app
from dlrover_py.protocol.job import ElasticJob
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
    guard = Guard(app, token="t" * 20, max_body_bytes=10, denied=denied)
    await guard({"type": kind, "path": "/v1/job", "headers": []}, receive, send)
    assert [m["status"] for m in told if "status" in m] == ([401] if kind == "http" else [])
