"""Health, readiness and metrics of the operator, on one port."""

import socket

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics, generate_latest

from dlrover_operator.loop import STUCK_S, Operator
from dlrover_py.protocol.errors import ConfigError


def app(operator: Operator) -> FastAPI:
    """Return the application with ``/healthz``, ``/readyz`` and ``/metrics``. It is not served yet.

    ``/healthz`` answers 503 while work on a job has run for more than STUCK_S seconds. ``/readyz``
    answers 503 until all watched objects were listed once.

    Args:
        operator: The operator that the pages are about.
    """
    # They would be a second series for each counter, which nothing reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    pages = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @pages.get("/healthz")
    async def healthz() -> Response:
        """Report liveness.

        An answer shows that the event loop that does the work is running.
        """
        if operator.stuck:
            return PlainTextResponse(
                f"the work on a job has not ended for {STUCK_S:g} s", status_code=503
            )
        return PlainTextResponse("ok")

    @pages.get("/readyz")
    async def readyz() -> Response:
        """Report whether all watched objects were listed once."""
        if operator.ready:
            return PlainTextResponse("ok")
        return PlainTextResponse("the objects of the operator are not listed yet", status_code=503)

    @pages.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in the format of Prometheus."""
        return Response(generate_latest(operator.registry), media_type=CONTENT_TYPE_LATEST)

    return pages


def listen(address: str, option: str = "--health") -> socket.socket:
    """Return a listening socket. The caller must accept its connections and close it.

    Args:
        address: ``host:port``. A host is a name, or an IPv4 address, or an IPv6 address in
            brackets. For a name, this machine listens at its IPv4 address. An empty host means all
            addresses: of IPv4, and of IPv6 where this machine has it. So does ``[::]``.
        option: option that has the address, for the message of an error.

    Raises:
        ConfigError: the port is not a number up to 65535, or this machine cannot listen at the
            address.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("::" if both else host, int(port)),
            family=socket.AF_INET6 if both or ":" in host else socket.AF_INET,
            dualstack_ipv6=both,
        )
    except (OSError, OverflowError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "the port is not a number"
        raise ConfigError(f"{option} {address}: {why}; expected a free host:port") from error
