"""HTTP for agents and people: decode, hand to the loop, encode. No decisions.

Two ports: the job's (token on every path) and one for health and metrics (no token, no secrets).
"""

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import ssl
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlrover_py import __version__, web
from dlrover_py.master.exchange import NODE, Exchanges, error_body, no_whole_body
from dlrover_py.master.loop import Loop, Passive
from dlrover_py.protocol.agents import AgentReport, Assignment, Candidates, ErrorReply, Holders
from dlrover_py.protocol.errors import ErrorCode
from dlrover_py.protocol.job import in_words
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus

log = logging.getLogger("master.server")


class TooLarge(Exception):
    """The body is over the limit."""


def error_reply(status: int, code: ErrorCode, message: str) -> Response:
    """A reply that says what was wrong."""
    return json_reply(status, error_body(code, message))


def json_reply(status: int, body: bytes) -> Response:
    """A reply whose body is JSON already."""
    return Response(body, status_code=status, media_type="application/json")


class Guard:
    """Stands before everything: the token, and the size of the body."""

    def __init__(self, app: ASGIApp, *, token: str, max_body_bytes: int, denied: Counter) -> None:
        self._app, self._denied, self._limit = app, denied, max_body_bytes
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or hand it on."""
        if scope["type"] != "http":
            return  # the server speaks nothing else; if it ever does, nobody gets in by that
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            self._denied.inc()
            reply = error_reply(401, ErrorCode.UNAUTHORIZED, "the job's token is expected")
            reply.headers["WWW-Authenticate"] = "Bearer"
            await reply(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit:
            await self._too_large()(scope, receive, send)
            return
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._limit:
                raise TooLarge
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> Response:
        return too_large(self._limit)


def too_large(limit: int) -> Response:
    """The reply to a body over the limit."""
    message = f"the body is too large: at most {limit} bytes are expected"
    return error_reply(413, ErrorCode.TOO_LARGE, message)


Number = Annotated[int, Query(ge=0, le=2**53)]
NodePath = Annotated[str, Path(pattern=f"^{NODE}$")]


EXCHANGE = "/v1/nodes/{node_id}/exchange"
OCTETS: dict[str, Any] = {"content": {"application/octet-stream": {}}}


def _described(app: FastAPI) -> dict[str, Any]:
    """The document of the API, with what FastAPI cannot see: bodies that we read ourselves, and the
    guard before it."""
    made = FastAPI.openapi(app)
    parts = made["components"]
    report = AgentReport.model_json_schema(ref_template="#/components/schemas/{model}")
    parts["schemas"] |= report.pop("$defs") | {AgentReport.__name__: report}
    ours = {"$ref": f"#/components/schemas/{AgentReport.__name__}"}
    paths = made["paths"]
    body = {"content": {"application/json": {"schema": ours}}, "required": True}
    paths[EXCHANGE]["post"]["requestBody"] = body
    paths["/v1/recipe"]["put"]["requestBody"] = {**OCTETS, "required": True}
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"token": []}]
    return made


def job_app(loop: Loop, exchanges: Exchanges, denied: Counter) -> ASGIApp:
    """What agents, people and dashboards call."""
    refusals: dict[int | str, Any] = {code: {"model": ErrorReply} for code in (401, 413, 422)}
    not_now: dict[int | str, Any] = {503: {"model": ErrorReply}}
    late: dict[int | str, Any] = {408: {"model": ErrorReply}}
    app = FastAPI(title="dlrover-py master", version=__version__, responses=refusals)
    app.openapi = functools.cache(functools.partial(_described, app))  # type: ignore[method-assign]
    recipe, body_s = exchanges.recipe, exchanges.body_s
    token, max_body_bytes = exchanges.token, exchanges.max_body_bytes

    @app.exception_handler(TooLarge)
    async def refuse(request: Request, error: Exception) -> Response:
        return too_large(max_body_bytes)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_reply(422, ErrorCode.INVALID, in_words(error.errors()))

    async def whole_body(request: Request) -> bytes | Response:
        try:
            async with asyncio.timeout(body_s):
                return await request.body()
        except TimeoutError:
            reply = json_reply(408, no_whole_body(body_s))
            reply.headers["Connection"] = "close"
            return reply
        except ClientDisconnect:
            return Response(status_code=499)

    @app.post(
        EXCHANGE,
        response_model=Assignment,
        responses={409: {"model": ErrorReply}, **not_now, **late},
    )
    async def exchange(node_id: NodePath, request: Request) -> Response:
        """Report up, assignment down; held until there is something new."""
        body = await whole_body(request)
        if isinstance(body, Response):
            return body
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def told(status: int, said: bytes) -> None:
            if not answer.done():
                answer.set_result((status, said))

        leave = exchanges.ask(NodeId(node_id), body, told)
        gone = asyncio.ensure_future(request.receive())
        try:
            either: tuple[asyncio.Future[Any], ...] = (answer, gone)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                leave()
        return json_reply(*answer.result()) if answer.done() else Response(status_code=499)

    @app.get("/v1/recipe", response_class=Response, responses={200: OCTETS})
    async def read_recipe() -> Response:
        """What this job's workers import, for agents that come later; empty until one has told."""
        return Response(recipe.body, media_type="application/octet-stream")

    @app.put("/v1/recipe", responses=late)
    async def keep_recipe(request: Request) -> Response:
        """Keep a recipe; in memory, as any agent of the running round has it too."""
        body = await whole_body(request)
        if isinstance(body, Response):
            return body
        recipe.body, recipe.digest = body, hashlib.sha256(body).hexdigest()[:16]
        return Response("{}", media_type="application/json")

    @app.get("/v1/checkpoints", response_model=Candidates, responses=not_now)
    async def checkpoints(request: Request, round: Number) -> Response:
        """What the nodes of a round could restore from memory, once all have looked."""
        found = asyncio.ensure_future(loop.candidates(round))
        gone = asyncio.ensure_future(request.receive())  # there is no body: the end of the line
        try:
            await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
            while not found.done() and gone.result()["type"] == "http.request":
                gone = asyncio.ensure_future(request.receive())
                await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                return Response(status_code=499)
            return json_reply(200, found.result().model_dump_json().encode())
        except Passive as error:
            return error_reply(503, ErrorCode.PASSIVE, str(error))
        finally:
            found.cancel()
            gone.cancel()

    @app.get("/v1/checkpoints/holders", response_model=Holders, responses=not_now)
    async def holders(step: Number, round: Number, lap: Number = 0) -> Response:
        """Which nodes have a checkpoint in memory, by rank."""
        try:
            found = loop.holders(step, round, lap)
        except Passive as error:
            return error_reply(503, ErrorCode.PASSIVE, str(error))
        return json_reply(200, found.model_dump_json().encode())

    @app.get("/v1/job", response_model=JobStatus, responses=not_now)
    async def job() -> Response:
        """All that a person or a dashboard needs to know."""
        status = loop.status()
        if status is None:
            return error_reply(503, ErrorCode.PASSIVE, "this master does not run the job yet")
        return Response(status.model_dump_json(by_alias=True), media_type="application/json")

    @app.get("/v1/job/name", response_model=str, responses=not_now)
    async def name() -> Response:
        """Of the job; where nodes come by themselves it is drawn for each run."""
        if not loop.name:
            return error_reply(503, ErrorCode.PASSIVE, "this master runs no job; ask again")
        return json_reply(200, json.dumps(loop.name).encode())

    return Guard(app, token=token, max_body_bytes=max_body_bytes, denied=denied)


class _JobMetrics:
    """The job's state, read when it is asked for."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        loop = self._loop
        yield _gauge("dlrover_master_ready", "This master holds the term.", loop.ready)
        yield _count("dlrover_exchanges", "Reports of agents.", loop.exchanges)
        yield _count("dlrover_refused_reports", "Reports that were refused.", loop.refused)
        yield _count("dlrover_journal_writes", "Times the journal was stored.", loop.journal_writes)
        yield _gauge(
            "dlrover_journal_writable", "The journal can be stored.", not loop.journal_error
        )
        status = loop.status()
        if status is None:
            return
        yield _gauge("dlrover_term", "Number of this master's reign.", status.term)
        yield _gauge("dlrover_round", "Number of the round.", status.round)
        yield _gauge("dlrover_world_size", "Workers in the round.", status.world_size)
        yield _gauge("dlrover_nodes_in_round", "Nodes in the round.", status.nodes_in_round)
        yield _gauge("dlrover_nodes_ready", "Nodes that live.", status.ready)
        yield _gauge("dlrover_nodes_wanted", "Nodes that the spec wishes.", status.wanted)
        if status.progress is not None:
            yield _gauge("dlrover_step", "Newest step of the script.", status.progress.step)
            speed = status.progress.steps_per_s
            yield _gauge("dlrover_steps_per_second", "Speed of the script.", speed)
        last = status.last_checkpoint
        if last is not None:
            words = "Newest step that could be loaded."
            yield _gauge("dlrover_checkpoint_step", words, last.step)
            words = "Age of that, in seconds."
            yield _gauge("dlrover_checkpoint_age_seconds", words, last.age_s)
        if last is not None and last.stored_step is not None and last.stored_at is not None:
            words = "Newest step in storage."
            yield _gauge("dlrover_checkpoint_stored_step", words, last.stored_step)
            words = "Age of that, in seconds."
            age = max(0.0, status.published_at - last.stored_at)
            yield _gauge("dlrover_checkpoint_stored_age_seconds", words, age)
        failing = any(
            c.type == "CheckpointFailing" and c.status == "True" for c in status.conditions
        )
        yield _gauge("dlrover_checkpoint_failing", "As the condition CheckpointFailing.", failing)
        words = "Checkpoints that went to storage by this master's orders."
        yield _count("dlrover_checkpoints_stored", words, status.checkpoints_stored)
        words = "Orders that came to nothing."
        yield _count("dlrover_checkpoint_failures", words, status.checkpoint_failures)
        rounds = CounterMetricFamily(
            "dlrover_new_rounds", "Rounds after the first, by cause.", labels=["cause"]
        )
        for cause in ("failure", "loss", "drain", "scale", "join"):
            rounds.add_metric([cause], status.restarts.get(cause, 0))
        yield rounds


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=float(value))


def _count(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=float(value))


def health_app(loop: Loop, registry: CollectorRegistry, *, dead_s: float = 30.0) -> ASGIApp:
    """Health, readiness and metrics."""
    registry.register(_JobMetrics(loop))
    app = FastAPI(title="dlrover-py master health", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the loop turns; a master that only waits for its turn is healthy."""
        alive = loop.silent_s < dead_s or not loop.ready
        words = "ok" if alive else f"the loop has not turned for {loop.silent_s:.0f} s"
        return Response(words, status_code=200 if alive else 503, media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        """Whether agents should come here."""
        words = loop.journal_error or "ok" if loop.ready else "this master is passive"
        return Response(words, status_code=200 if loop.ready else 503, media_type="text/plain")

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def server(
    app: ASGIApp,
    *,
    header_s: float,
    exchanges: Exchanges | None = None,
    tls: ssl.SSLContext | None = None,
) -> web.Server:
    """A server that is ready to be run on a socket of ours."""
    protocol = web.Impatient if exchanges is None else _direct(exchanges)
    return web.server(app, header_s=header_s, protocol=protocol, tls=tls)


def _direct(exchanges: Exchanges) -> type[web.Impatient]:
    """A protocol in which exchanges that are plain take their direct road."""

    class Direct(web.Impatient):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._opened_at = self.loop.time()

        def on_headers_complete(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                held = exchanges.accept(self, self._opened_at)
                if held is not None:
                    self._wait_no_more()
                    self.cycle = held  # type: ignore[assignment]
                    self.scope = self.headers = None  # type: ignore[assignment]
                    return
            super().on_headers_complete()

    return Direct
