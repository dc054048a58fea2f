"""uvicorn as a part of our programs: it leaves the signals alone, and waits for nobody for ever."""

import asyncio
import contextlib
import logging
import resource
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Impatient(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection that says nothing: uvicorn's waits for ever."""

    header_s = 10.0
    """For so long a whole head is waited for."""
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is open."""
        super().connection_made(transport)
        self._wait_for_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        if self._patience is None:  # not the first request of this connection
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """It is whole."""
        self._wait_no_more()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Something was said."""
        super().data_received(data)
        # uvicorn's own patience between two requests ends with any byte: one that begins no
        # request as well, such as the rest of a body that was answered before.
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._patience is None and self.timeout_keep_alive_task is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._wait_no_more()
        super().connection_lost(exc)
        # They refer to each other and to us: with that broken, no collector is needed.
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(self.header_s, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class Server(uvicorn.Server):
    """uvicorn, which keeps away from the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def server(
    app: ASGIApp,
    *,
    header_s: float = Impatient.header_s,
    protocol: type[Impatient] = Impatient,
    tls: ssl.SSLContext | None = None,
) -> Server:
    """A server that is ready to be run on a socket of ours."""
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
    config.ssl = tls  # it takes file names only
    return Server(config)


def raise_file_limit() -> None:
    """Each agent, and each silent connection, holds a descriptor: the usual 1,024 are few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
