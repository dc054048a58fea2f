"""Health, readiness and metrics of the operator, on one port."""

import socket

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from dlrover_operator.loop import STUCK_S, Operator
from dlrover_py.protocol.errors import ConfigError


def app(operator: Operator) -> FastAPI:
    """The three pages."""
    pages = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @pages.get("/healthz")
    async def healthz() -> Response:
        """An answer is the proof: it comes from the loop that does the work."""
        if operator.stuck:
            return PlainTextResponse(f"work on a job runs for {STUCK_S:g} s", status_code=503)
        return PlainTextResponse("ok")

    @pages.get("/readyz")
    async def readyz() -> Response:
        if operator.ready:
            return PlainTextResponse("ok")
        return PlainTextResponse("not everything is listed yet", status_code=503)

    @pages.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(operator.registry), media_type=CONTENT_TYPE_LATEST)

    return pages


def listen(address: str) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: it cannot be had.
    """
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host or "0.0.0.0", int(port)))
    except (OSError, OverflowError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "the port is no number"
        raise ConfigError(f"--health {address}: {why}; expected a free host:port") from error
