"""The call that agents make all the time: a report in, an assignment out, held in between.

It has two roads. FastAPI's (``server``) takes any request that HTTP allows. The direct one, for
requests that are plain, stands where uvicorn would begin an ASGI call: no task, no routing, no
scope, a kilobyte or two for each exchange that is held (docs/decisions/0006-scale.md).
"""

import asyncio
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dlrover_py.master.loop import Loop, Passive
from dlrover_py.protocol.agents import AgentReport, Assignment, ErrorReply
from dlrover_py.protocol.errors import ErrorCode, Superseded
from dlrover_py.protocol.job import explain
from dlrover_py.protocol.names import NodeId

NODE = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_PATH = re.compile(f"/v1/nodes/({NODE})/exchange".encode())

Answer = Callable[[int, bytes], None]
"""Takes the status and the body of a reply."""


RENEWED_S = 30.0
"""A master that may have been replaced keeps a connection for so long: only a new one is led to the
master that the platform knows. Half of ``Rules.unreached_s``, in which that one waits for all."""


def error_body(code: ErrorCode, message: str) -> bytes:
    """Says what was wrong."""
    return ErrorReply(code=code, message=message).model_dump_json().encode()


def no_whole_body(body_s: float) -> bytes:
    """The reply to a body that does not come to its end."""
    return error_body(ErrorCode.INVALID, f"no whole body within {body_s:g} s")


@dataclass(slots=True)
class Recipe:
    """The job's warm recipe, which only agents understand."""

    body: bytes = b""
    digest: str = ""


class Exchanges:
    """Decodes reports, and encodes what the loop answers."""

    def __init__(self, loop: Loop, *, token: str, max_body_bytes: int, body_s: float) -> None:
        self.recipe = Recipe()
        self.token, self.max_body_bytes, self.body_s = token, max_body_bytes, body_s
        self._loop = loop
        self._bearer = f"Bearer {token}".encode()

    def ask(self, node: NodeId, body: bytes, answer: Answer) -> Callable[[], None]:
        """Hand a report on; the answer comes at once, or when there is something new.

        Returns what to call when the connection closes before.
        """
        try:
            report = AgentReport.model_validate_json(body)
        except ValidationError as error:
            words = explain(error, prefix="report")
            answer(422, error_body(ErrorCode.INVALID, words))
            return _nothing

        def told(outcome: Assignment | Passive | Superseded) -> None:
            if isinstance(outcome, Assignment):
                if self.recipe.digest or self._loop.adrift:
                    beside = {"recipe": self.recipe.digest, "adrift": self._loop.adrift}
                    outcome = outcome.model_copy(update=beside)
                answer(200, outcome.model_dump_json().encode())
            elif isinstance(outcome, Superseded):
                answer(409, error_body(ErrorCode.SUPERSEDED, str(outcome)))
            else:
                answer(503, error_body(ErrorCode.PASSIVE, str(outcome)))

        return self._loop.exchange(node, report, told)

    def strays(self, age_s: float) -> bool:
        """Whether a connection of this age may lead to the wrong master by now."""
        return age_s > RENEWED_S and self._loop.adrift

    def accept(self, protocol: HttpToolsProtocol, opened_at: float) -> "Held | None":
        """Take the request whose head has just arrived, if all about it is plain."""
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
        return Held(self, protocol, NodeId(found[1].decode()), opened_at)


_NOT_PLAIN = (b"expect", b"transfer-encoding", b"upgrade", b"connection")


def _nothing() -> None:
    """The answer was given."""


class Held:
    """One exchange under way, in the place of uvicorn's ``RequestResponseCycle``.

    The protocol sets ``body``, ``more_body``, ``disconnected`` and ``keep_alive``, and rings
    ``message_event`` when one of the first three has changed.
    """

    __slots__ = (
        "_exchanges",
        "_leave",
        "_node",
        "_opened_at",
        "_patience",
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
        self._patience: asyncio.TimerHandle | None = protocol.loop.call_later(
            exchanges.body_s, self._too_late
        )
        self.body = b""
        self.more_body = self.keep_alive = True
        self.disconnected = self.response_complete = False

    @property
    def message_event(self) -> "Held":
        """What the protocol rings."""
        return self

    def set(self) -> None:
        """Look at what has changed."""
        if self.response_complete:
            return
        if self.disconnected:
            self._wait_no_more()
            if self._leave is not None:
                self._leave()
            self.response_complete = True
        elif not self.more_body and self._patience is not None:
            self._wait_no_more()
            body, self.body = self.body, b""
            leave = self._exchanges.ask(self._node, body, self._answer)
            if not self.response_complete:
                self._leave = leave

    def _answer(self, status: int, body: bytes) -> None:
        protocol = self._protocol
        self.response_complete = True
        self._leave = None
        if protocol.transport.is_closing():
            return
        if self._exchanges.strays(protocol.loop.time() - self._opened_at):
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
        self._patience = None
        self.keep_alive = False
        self._answer(408, no_whole_body(self._exchanges.body_s))

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
