"""The uvicorn server, embedded in DLRover's programs, with limits on time and size of requests."""

import asyncio
import contextlib
import logging
import resource
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dlrover_py.protocol.agents import ErrorReply
from dlrover_py.protocol.errors import ErrorCode
from dlrover_py.protocol.versions import unknown_path
from dlrover_py.telemetry import RepeatFilter

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a request's head, or of data after a body, that a client may send.

The HTTP parser keeps all of them in memory.
"""


async def no_such_path(request: Request, error: Exception) -> Response:
    """Refuse a path that does not exist, in words. The client may have another version."""
    body = ErrorReply(code=ErrorCode.NOT_FOUND, message=unknown_path(request.url.path))
    return Response(body.model_dump_json(), status_code=404, media_type="application/json")


class TimeoutHttpProtocol(HttpToolsProtocol):
    """The HTTP protocol of uvicorn, with limits on the time and size of a request's head.

    Without them, uvicorn waits forever for a head, and accepts one of any size.
    """

    header_s = 10.0
    """Seconds in which a head must be complete."""
    _head_timer: asyncio.TimerHandle | None = None
    """Timer that closes the connection; None if no head is expected."""
    _buffered_bytes = 0
    """Bytes since the last beginning or end of a head, or since the last part of a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection: its first head must be complete within ``header_s`` seconds."""
        super().connection_made(transport)
        self._start_head_timer()

    def on_message_begin(self) -> None:
        """Handle the beginning of a request's head, and start its timer if none runs."""
        self._buffered_bytes = 0
        super().on_message_begin()
        if self._head_timer is None:  # not the first request of this connection
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        """Handle the end of a request's head: its timer is stopped."""
        self._stop_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a part of a request's body: the count of bytes starts again at 0."""
        self._buffered_bytes = 0
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Handle received data.

        More than ``MAX_HEAD_BYTES`` bytes without progress of a request close the connection. Data
        that begins no request starts the timer of a head.
        """
        self._buffered_bytes += len(data)
        super().data_received(data)
        if self._buffered_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()
            return
        # uvicorn's own timer between two requests stops at any byte, even if the byte begins no
        # request, such as the rest of a body whose request was answered before.
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._stop_head_timer()
        super().connection_lost(exc)
        # Break the reference cycle of these objects, so that no garbage collection is needed.
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def _refuse_head(self) -> None:
        """Close the connection: without a limit, any client could fill this process's memory.

        The client gets a 400 reply first, unless the reply to another request is not complete.
        """
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(
                f"the head of the request is too large: expected at most {MAX_HEAD_BYTES} bytes"
            )
        self.transport.close()

    def _start_head_timer(self) -> None:
        """Start the timer that closes the connection, without a reply, after ``header_s`` seconds.

        An earlier timer is not stopped.
        """
        self._head_timer = self.loop.call_later(self.header_s, self.transport.close)

    def _stop_head_timer(self) -> None:
        """Stop the timer of a head, if one runs, and start the count of bytes again at 0."""
        self._buffered_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server without signal handlers, which wakes up once a second.

    uvicorn's own server wakes up ten times a second, to find out whether it should end. This one
    ends with :meth:`end`. It wakes up for the header ``Date`` of its replies.
    """

    _ending: asyncio.Event | None = None
    """Set by :meth:`end`; None before the server runs."""

    def end(self) -> None:
        """End the server soon; call it in the thread of its event loop."""
        self.should_exit = True
        if self._ending is not None:
            self._ending.set()

    async def main_loop(self) -> None:
        """Wait for :meth:`end`, and renew the header ``Date`` once a second meanwhile."""
        self._ending = asyncio.Event()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def server(
    app: ASGIApp,
    *,
    header_s: float = TimeoutHttpProtocol.header_s,
    protocol: type[TimeoutHttpProtocol] = TimeoutHttpProtocol,
    tls: ssl.SSLContext | None = None,
) -> EmbeddedServer:
    """Return a server that can be run on an existing listening socket. It does not run yet.

    The log of uvicorn in this process gets a :class:`RepeatFilter`, once.

    Args:
        app: The ASGI application.
        header_s: Seconds in which a request's head must be complete.
        protocol: Protocol class.
        tls: TLS context; None for plain HTTP.
    """
    options: dict[str, Any] = {
        "http": type(protocol.__name__, (protocol,), {"header_s": header_s}),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "log_level": logging.WARNING,
        "server_header": False,
        "proxy_headers": False,
        "backlog": 4096,
        # An agent's connection is idle only between two exchanges.
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": 1,
    }
    config = uvicorn.Config(app, **options)
    config.load()
    errors = logging.getLogger("uvicorn.error")
    if not any(isinstance(f, RepeatFilter) for f in errors.filters):
        errors.addFilter(RepeatFilter())
    config.ssl = tls  # uvicorn.Config accepts file names only
    return EmbeddedServer(config)


def raise_file_limit() -> None:
    """Raise the limit of open files to its maximum.

    Each agent and each idle connection needs a file descriptor. The usual limit of 1,024 is too
    low.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
