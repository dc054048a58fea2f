"""The exchange, the call that agents repeat: a report in, an assignment out, held in between.

There are two paths. FastAPI's path (``server``) takes any request that HTTP allows. The direct path
takes plain requests at the point where uvicorn would begin an ASGI call. It needs no task, no
routing and no scope, and one or two kilobytes for each exchange that is held
(docs/decisions/0006-scale.md).
"""

import asyncio
import hmac
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dlrover_py.master.loop import Loop, PassiveMasterError
from dlrover_py.master.recipe_secret import RecipeSecret
from dlrover_py.net import http_server
from dlrover_py.protocol.agents import AgentReport, Assignment, ErrorReply
from dlrover_py.protocol.errors import ErrorCode, SupersededError
from dlrover_py.protocol.job import explain
from dlrover_py.protocol.names import NODE_ID, NodeId

_PATH = re.compile(f"/v1/nodes/({NODE_ID})/exchange".encode())

Answer = Callable[[int, bytes], None]
"""A function that takes the status and the body of a reply."""


def error_body(code: ErrorCode, message: str) -> bytes:
    """Return the body of an error reply."""
    return ErrorReply(code=code, message=message).model_dump_json().encode()


def body_timeout(body_s: float) -> bytes:
    """Return the reply to a request whose body is incomplete after ``body_s`` seconds."""
    return error_body(
        ErrorCode.INVALID, f"the body of the request was not complete within {body_s:g} s"
    )


@dataclass(slots=True)
class JobRecipe:
    """The job's list of modules to import beforehand, which only agents can read."""

    body: bytes = b""
    digest: str = ""
    """Start of the SHA-256 of the body, in hexadecimal; empty if there is no list yet."""


class Exchanges:
    """The exchanges of all agents: decodes reports, and encodes the answers of the loop."""

    def __init__(self, loop: Loop, *, token: str, max_body_bytes: int, body_s: float) -> None:
        """Set the limits of requests.

        Args:
            loop: The loop that takes the reports.
            token: The job's token.
            max_body_bytes: Limit of a request's body.
            body_s: Seconds that a request's body may take to arrive.
        """
        self.recipe = JobRecipe()
        self.earlier: RecipeSecret | None = None
        """Recipes of earlier runs; None where agents keep them in files."""
        self.token, self.max_body_bytes, self.body_s = token, max_body_bytes, body_s
        self._loop = loop
        self._bearer = f"Bearer {token}".encode()

    def ask(self, node: NodeId, body: bytes, answer: Answer) -> Callable[[], None]:
        """Pass a report on to the loop, which answers when there is something new.

        The status of the reply is 200 with an assignment, 409 if the agent was refused, or 503 if
        it must try again. An invalid report is answered immediately, with status 422, and not
        passed on.

        Args:
            node: The node that reports.
            body: The report as JSON.
            answer: Called once with the reply, possibly before this method returns.

        Returns:
            A function to call if the connection closes before the answer.
        """
        try:
            report = AgentReport.model_validate_json(body)
        except ValidationError as error:
            message = explain(error, prefix="report")
            answer(422, error_body(ErrorCode.INVALID, message))
            return _no_reply

        name = self._loop.name
        if report.run and name is not None and report.run != name.name:
            message = "this agent belongs to an earlier run of the job: a new run has begun here"
            answer(409, error_body(ErrorCode.SUPERSEDED, message))
            return _no_reply

        def on_reply(outcome: Assignment | PassiveMasterError | SupersededError) -> None:
            if isinstance(outcome, Assignment):
                if self.recipe.digest or self._loop.disconnected:
                    changes = {
                        "recipe": self.recipe.digest,
                        "master_disconnected": self._loop.disconnected,
                    }
                    outcome = outcome.model_copy(update=changes)
                answer(200, outcome.model_dump_json().encode())
            elif isinstance(outcome, SupersededError):
                answer(409, error_body(ErrorCode.SUPERSEDED, str(outcome)))
            else:
                answer(503, error_body(ErrorCode.PASSIVE, str(outcome)))

        return self._loop.exchange(node, report, on_reply)

    def may_be_stale(self, age_s: float) -> bool:
        """Return whether a connection of this age, in seconds, may lead to a replaced master.

        That is so after a time without contact to the platform.
        """
        return self._loop.may_be_stale(age_s)

    def accept(self, protocol: HttpToolsProtocol, opened_at: float) -> "PendingCycle | None":
        """Take the request whose head has just arrived, if it is plain; the body follows later.

        A plain request is a POST of a report over HTTP/1.1, on a connection that stays open and can
        be written to. It has a valid token, a length within the limits, and none of the headers in
        ``_NOT_PLAIN``.

        Args:
            protocol: The connection, with the head of the request.
            opened_at: When the connection was opened, by the event loop's clock.

        Returns:
            The exchange, or None if FastAPI must handle the request, also to refuse it.
        """
        parser = protocol.parser
        if parser.get_method() != b"POST" or parser.get_http_version() != "1.1":
            return None
        found = _PATH.fullmatch(protocol.url)
        if found is None or not parser.should_keep_alive() or protocol.flow.write_paused:
            return None
        length = -1
        known = False
        for name, value in protocol.headers:
            if name == b"authorization":
                known = hmac.compare_digest(value, self._bearer)
            elif name == b"content-length":
                length = int(value) if value.isdigit() else -1
            elif name in _NOT_PLAIN:
                return None
        if not known or not 0 < length <= min(self.max_body_bytes, HIGH_WATER_LIMIT):
            return None
        return PendingCycle(self, protocol, NodeId(found[1].decode()), opened_at)


_NOT_PLAIN = (b"expect", b"transfer-encoding", b"upgrade", b"connection")
"""Headers with which a request is not plain."""


def _no_reply() -> None:
    """Do nothing, because the answer was given already."""


class PendingCycle:
    """A running exchange, in the place of uvicorn's ``RequestResponseCycle``.

    The protocol sets ``body``, ``more_body``, ``disconnected`` and ``keep_alive``. It calls ``set``
    of ``message_event`` when one of the first three has changed.
    """

    __slots__ = (
        "_body_timer",
        "_exchanges",
        "_leave",
        "_node",
        "_opened_at",
        "_protocol",
        "body",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
    )

    def __init__(
        self, exchanges: Exchanges, protocol: HttpToolsProtocol, node: NodeId, opened_at: float
    ) -> None:
        self._exchanges, self._protocol, self._node = exchanges, protocol, node
        self._opened_at = opened_at
        self._leave: Callable[[], None] | None = None
        self._body_timer: asyncio.TimerHandle | None = protocol.loop.call_later(
            exchanges.body_s, self._too_late
        )
        self.body = b""
        self.more_body = self.keep_alive = True
        self.disconnected = self.response_complete = False

    @property
    def message_event(self) -> "PendingCycle":
        """The object whose ``set`` the protocol calls: this one."""
        return self

    def set(self) -> None:
        """React to a change of ``body``, ``more_body`` or ``disconnected``.

        Once the body is complete, the report is passed on. If the connection has closed, the
        exchange ends without a reply. After the reply, nothing happens.
        """
        if self.response_complete:
            return
        if self.disconnected:
            self._cancel_body_timer()
            if self._leave is not None:
                self._leave()
            self.response_complete = True
        elif not self.more_body and self._body_timer is not None:
            self._cancel_body_timer()
            body, self.body = self.body, b""
            leave = self._exchanges.ask(self._node, body, self._answer)
            if not self.response_complete:
                self._leave = leave

    def _answer(self, status: int, body: bytes) -> None:
        """Write the reply, and close the connection if it is not to be kept.

        Nothing is written to a connection that is closing. If this master may have been replaced,
        an old connection is closed after the reply, so that the agent opens a new one.
        """
        protocol = self._protocol
        self.response_complete = True
        self._leave = None
        if protocol.transport.is_closing():
            return
        if self._exchanges.may_be_stale(protocol.loop.time() - self._opened_at):
            self.keep_alive = False
        parts = [STATUS_LINE[status]]
        for name, value in protocol.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"content-type: application/json\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"content-length: %d\r\n\r\n" % len(body), body)
        protocol.transport.write(b"".join(parts))
        if not self.keep_alive:
            protocol.transport.close()
        protocol.on_response_complete()

    def _too_late(self) -> None:
        """Answer with status 408 that the body is incomplete, and close the connection."""
        self._body_timer = None
        self.keep_alive = False
        self._answer(408, body_timeout(self._exchanges.body_s))

    def _cancel_body_timer(self) -> None:
        """Stop the timer that limits the wait for the body."""
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None


def server(
    app: ASGIApp,
    *,
    header_s: float,
    exchanges: Exchanges | None = None,
    tls: ssl.SSLContext | None = None,
) -> http_server.EmbeddedServer:
    """Return a server to run on a socket that is open already; it is not started here.

    Args:
        app: The application.
        header_s: Seconds that a connection may take to send the head of a request.
        exchanges: Answers plain reports of agents without a call of ``app``; None: ``app`` answers
            all requests.
        tls: TLS settings; None for plain HTTP.
    """
    protocol = http_server.TimeoutHttpProtocol if exchanges is None else _direct(exchanges)
    return http_server.server(app, header_s=header_s, protocol=protocol, tls=tls)


def _direct(exchanges: Exchanges) -> type[http_server.TimeoutHttpProtocol]:
    """Return a protocol class in which plain exchanges do not reach the ASGI application.

    ``exchanges`` answers these reports of agents itself (:meth:`Exchanges.accept` says which are
    plain). All other requests are passed on to the application.
    """

    class Direct(http_server.TimeoutHttpProtocol):
        """Protocol of connections on which plain exchanges skip the ASGI application."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._opened_at = self.loop.time()

        def on_headers_complete(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                held = exchanges.accept(self, self._opened_at)
                if held is not None:
                    self._stop_head_timer()
                    self.cycle = held  # type: ignore[assignment]
                    self.scope = self.headers = None  # type: ignore[assignment]
                    return
            super().on_headers_complete()

    return Direct
