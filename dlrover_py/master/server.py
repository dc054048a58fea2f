"""The master's HTTP endpoints for agents and people; decisions are made elsewhere.

There are two ports: the job's port, where every path needs the token, and a port for health and
metrics, which needs no token and shows no secrets.
"""

import asyncio
import functools
import hashlib
import hmac
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlrover_py import __version__
from dlrover_py.master.core.events import SnapshotArrived
from dlrover_py.master.exchange import Exchanges, body_timeout, error_body
from dlrover_py.master.loop import Loop, PassiveMasterError
from dlrover_py.net import http_server
from dlrover_py.protocol import proof
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    ErrorReply,
    FailureClass,
    JobName,
    ReplicaLocations,
    RestoreCandidates,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import ConfigError, ErrorCode, TransientError
from dlrover_py.protocol.job import in_words
from dlrover_py.protocol.job_view import problems
from dlrover_py.protocol.names import MAX_COUNT, NODE_ID, NodeId, Round, Step, Timeline
from dlrover_py.protocol.reasons import ConditionType, EventReason
from dlrover_py.protocol.shards import NodeShardRequest, ShardAnswer
from dlrover_py.protocol.status import (
    JobPhase,
    JobStatus,
    NodePhase,
    NodeStatus,
    TablesStatus,
    TimeBucket,
)

log = logging.getLogger("master.server")


class BodyTooLargeError(Exception):
    """The body of a request is larger than the limit."""


def error_reply(status: int, code: ErrorCode, message: str) -> Response:
    """Return a reply that says what was wrong.

    Args:
        status: The HTTP status.
        code: The error for programs.
        message: The error for people.
    """
    return json_reply(status, error_body(code, message))


def json_reply(status: int, body: bytes) -> Response:
    """Return a reply whose body is JSON already."""
    return Response(body, status_code=status, media_type="application/json")


class RequestGuard:
    """Middleware before every path: checks the token and the size of the body.

    One request needs no token: the one for the master's proof that it knows the token.
    """

    def __init__(self, app: ASGIApp, *, token: str, max_body_bytes: int, denied: Counter) -> None:
        self._app, self._denied, self._limit = app, denied, max_body_bytes
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on; anything but HTTP is dropped without an answer.

        A refusal has status 401 (no valid token, which is counted) or 413 (the announced length is
        too large or no number).

        Raises:
            BodyTooLargeError: More of the body has arrived than the limit allows. The application
                raises it while it reads the body.
        """
        if scope["type"] != "http":
            return  # the server speaks HTTP only; anything else gets no access without the token
        if scope.get("method") == "GET" and scope["path"] == proof.PATH:
            await self._app(scope, receive, send)  # asked before the client sends the token
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            self._denied.inc()
            reply = error_reply(401, ErrorCode.UNAUTHORIZED, "the request needs the job's token")
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
                raise BodyTooLargeError
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> Response:
        return too_large(self._limit)


def too_large(limit: int) -> Response:
    """Return the reply to a body over the limit."""
    message = f"the body is too large: at most {limit} bytes are expected"
    return error_reply(413, ErrorCode.TOO_LARGE, message)


Number = Annotated[int, Query(ge=0, le=MAX_COUNT)]
Nonce = Annotated[str, Query(pattern=proof.NONCE_PATTERN)]
RecipeKey = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
NodePath = Annotated[str, Path(pattern=f"^{NODE_ID}$")]


DEAD_S = 30.0
"""Seconds without a turn of the loop after which the master is unhealthy."""
EXCHANGE = "/v1/nodes/{node_id}/exchange"
SHARDS = "/v1/nodes/{node_id}/shards"
SNAPSHOT = "/v1/nodes/{node_id}/snapshot"
EARLIER_RECIPE = "/v1/recipes/{key}"
OCTETS: dict[str, Any] = {"content": {"application/octet-stream": {}}}


def _described(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, completed by hand.

    FastAPI does not know the bodies that the endpoints read themselves, nor the check of the token
    before them (:class:`RequestGuard`).
    """
    made = FastAPI.openapi(app)
    parts = made["components"]
    paths = made["paths"]
    for path, model in (
        (EXCHANGE, AgentReport),
        (SHARDS, NodeShardRequest),
        (SNAPSHOT, NodeSnapshot),
    ):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        parts["schemas"] |= schema.pop("$defs") | {model.__name__: schema}
        found = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
        body = {"content": {"application/json": found}, "required": True}
        paths[path]["post"]["requestBody"] = body
    for path in ("/v1/recipe", EARLIER_RECIPE):
        paths[path]["put"]["requestBody"] = {**OCTETS, "required": True}
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"token": []}]
    return made


def job_app(loop: Loop, exchanges: Exchanges, denied: Counter) -> ASGIApp:
    """Return the HTTP application of the job: reports, recipes, checkpoints in memory, the status.

    Metrics and health are in :func:`health_app`. Every path but the proof needs the token. Plain
    reports of agents do not pass through this application (:func:`server`).

    Args:
        loop: The loop that runs the job.
        exchanges: Takes the reports of agents; holds the token, and the limits of a body's size and
            time.
        denied: Counter of the requests that this application refuses for want of the token.
    """
    refusals: dict[int | str, Any] = {code: {"model": ErrorReply} for code in (401, 413, 422)}
    not_now: dict[int | str, Any] = {503: {"model": ErrorReply}}
    late: dict[int | str, Any] = {408: {"model": ErrorReply}}
    app = FastAPI(title="dlrover-py master", version=__version__, responses=refusals)
    app.openapi = functools.cache(functools.partial(_described, app))  # type: ignore[method-assign]
    recipe, body_s = exchanges.recipe, exchanges.body_s
    token, max_body_bytes = exchanges.token, exchanges.max_body_bytes

    app.add_exception_handler(404, http_server.no_such_path)

    @app.exception_handler(BodyTooLargeError)
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
            reply = json_reply(408, body_timeout(body_s))
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
        """Take an agent's report and answer its assignment, once there is something new.

        Without anything new, the present assignment is the answer after ``exchange_s``.
        """
        body = await whole_body(request)
        if isinstance(body, Response):
            return body
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def on_reply(status: int, reply: bytes) -> None:
            if not answer.done():
                answer.set_result((status, reply))

        leave = exchanges.ask(NodeId(node_id), body, on_reply)
        gone = asyncio.ensure_future(request.receive())
        try:
            either: tuple[asyncio.Future[Any], ...] = (answer, gone)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                leave()
        return json_reply(*answer.result()) if answer.done() else Response(status_code=499)

    @app.post(SHARDS, response_model=ShardAnswer, responses={**not_now, **late})
    async def shards(node_id: NodePath, request: Request) -> Response:
        """Lease shards of a dataset to a worker, and take in what it has trained."""
        body = await whole_body(request)
        if isinstance(body, Response):
            return body
        try:
            asked = NodeShardRequest.model_validate_json(body)
        except ValidationError as error:
            return error_reply(422, ErrorCode.INVALID, in_words(error.errors()))
        try:
            answer = await loop.shards(NodeId(node_id), asked)
        except PassiveMasterError as error:
            return error_reply(503, ErrorCode.PASSIVE, str(error))
        return json_reply(200, answer.model_dump_json().encode())

    @app.post(SNAPSHOT, responses={**not_now, **late})
    async def snapshot(node_id: NodePath, request: Request) -> Response:
        """Take in what the workers of a node do, which an assignment has asked for."""
        body = await whole_body(request)
        if isinstance(body, Response):
            return body
        try:
            taken = NodeSnapshot.model_validate_json(body)
        except ValidationError as error:
            return error_reply(422, ErrorCode.INVALID, in_words(error.errors()))
        if not loop.ready:
            return error_reply(503, ErrorCode.PASSIVE, "this master does not run the job yet")
        loop.add_events([SnapshotArrived(NodeId(node_id), taken)])
        return Response("{}", media_type="application/json")

    @app.get("/v1/recipe", response_class=Response, responses={200: OCTETS})
    async def read_recipe() -> Response:
        """Return the list of modules that the job's workers import, for agents that come later.

        The body is empty until an agent has sent a list.
        """
        return Response(recipe.body, media_type="application/octet-stream")

    @app.put("/v1/recipe", responses=late)
    async def keep_recipe(request: Request) -> Response:
        """Keep a list of modules, in memory only: each agent of the running round has it too.

        It replaces the list before. Agents get its digest with their next assignment.
        """
        body = await whole_body(request)
        if isinstance(body, Response):
            return body
        recipe.body, recipe.digest = body, hashlib.sha256(body).hexdigest()[:16]
        return Response("{}", media_type="application/json")

    @app.get(EARLIER_RECIPE, response_class=Response, responses={200: OCTETS})
    async def read_earlier_recipe(key: RecipeKey) -> Response:
        """Return the recipe that an earlier run of the same program has left under this key.

        The body is empty if there is none, or if it cannot be read now.
        """
        found = b"" if exchanges.earlier is None else await exchanges.earlier.read(key)
        return Response(found, media_type="application/octet-stream")

    @app.put(EARLIER_RECIPE, responses={413: {"model": ErrorReply}, **not_now, **late})
    async def keep_recipe_for_later(key: RecipeKey, request: Request) -> Response:
        """Keep a recipe for later runs of the same program; an empty body removes it.

        On one machine nothing is kept: agents use files there.
        """
        body = await whole_body(request)
        if isinstance(body, Response):
            return body
        if exchanges.earlier is not None:
            try:
                await exchanges.earlier.write(key, body)
            except ConfigError as error:
                return error_reply(413, ErrorCode.TOO_LARGE, str(error))
            except TransientError as error:
                return error_reply(503, ErrorCode.PASSIVE, str(error))
        return Response("{}", media_type="application/json")

    @app.get("/v1/checkpoints", response_model=RestoreCandidates, responses=not_now)
    async def checkpoints(request: Request, round: Number) -> Response:
        """Return what can be restored from memory, once all nodes of the round have reported.

        The answer comes after ``memory_wait_s`` at the latest, with what is known by then.
        """
        found = asyncio.ensure_future(loop.candidates(round))
        gone = asyncio.ensure_future(request.receive())  # without a body: the connection's end
        try:
            await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
            while not found.done() and gone.result()["type"] == "http.request":
                gone = asyncio.ensure_future(request.receive())
                await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                return Response(status_code=499)
            return json_reply(200, found.result().model_dump_json().encode())
        except PassiveMasterError as error:
            return error_reply(503, ErrorCode.PASSIVE, str(error))
        finally:
            found.cancel()
            gone.cancel()

    @app.get("/v1/checkpoints/locations", response_model=ReplicaLocations, responses=not_now)
    async def locations(step: Number, round: Number, timeline: Number = 0) -> Response:
        """Return which nodes have a checkpoint in memory, by rank; empty if no node has it."""
        try:
            found = loop.locations(
                CheckpointId(round=Round(round), timeline=Timeline(timeline), step=Step(step))
            )
        except PassiveMasterError as error:
            return error_reply(503, ErrorCode.PASSIVE, str(error))
        return json_reply(200, found.model_dump_json().encode())

    @app.get("/v1/job", response_model=JobStatus, responses=not_now)
    async def job() -> Response:
        """Return the status of the job."""
        status = loop.status()
        if status is None:
            return error_reply(503, ErrorCode.PASSIVE, "this master does not run the job yet")
        return Response(status.model_dump_json(by_alias=True), media_type="application/json")

    @app.get(proof.PATH, response_model=str, openapi_extra={"security": []})
    async def prove(request: Request, nonce: Nonce) -> Response:
        """Prove that this master knows the job's token; the request needs no token.

        The answer is a JSON string: an HMAC-SHA256 in lowercase hexadecimal, with the token as the
        key. Its message is ``dlrover master proof``, a zero byte, the nonce, a zero byte, and the
        address of the server's end of the connection. The address is ``:PORT``, with the IP address
        before it on the loopback device, and empty if it is not known. Status 422 without a nonce.
        """
        server = request.scope["server"]
        where = "" if server is None or server[1] is None else proof.connection_address(*server)
        return json_reply(200, json.dumps(proof.master_proof(token, nonce, where)).encode())

    @app.get("/v1/job/name", response_model=JobName, responses=not_now)
    async def name() -> Response:
        """Return the name and size of the job; status 503 if this master runs none."""
        if loop.name is None:
            return error_reply(503, ErrorCode.PASSIVE, "this master runs no job; try again")
        return json_reply(200, loop.name.model_dump_json().encode())

    return RequestGuard(app, token=token, max_body_bytes=max_body_bytes, denied=denied)


class _JobMetrics:
    """The metrics of the job, computed when they are read."""

    def __init__(self, loop: Loop, certificate_ends: float | None) -> None:
        self._loop, self._certificate_ends = loop, certificate_ends

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the present state; before this master runs the job, only its own."""
        loop = self._loop
        yield _gauge(
            "dlrover_master_ready",
            "1 if this master holds the term and knows its nodes, else 0.",
            loop.ready,
        )
        yield _count("dlrover_exchanges", "Reports of agents that arrived.", loop.exchanges)
        yield _count("dlrover_refused_reports", "Reports that were refused.", loop.refused)
        yield _count("dlrover_journal_writes", "Writes of the journal.", loop.journal_writes)
        yield _gauge(
            "dlrover_journal_writable",
            "1 if the journal can be written, else 0.",
            not loop.journal_error,
        )
        if self._certificate_ends is not None:
            help_text = "End of the certificate that agents are shown, in Unix seconds."
            end = self._certificate_ends
            yield _gauge("dlrover_certificate_expiry_timestamp_seconds", help_text, end)
        status = loop.status()
        if status is None:
            return
        yield from job_metrics(status)


def job_metrics(status: JobStatus) -> Iterator[Metric]:
    """Yield the metrics of a job that its status tells. Their number does not grow with the job."""
    phases = GaugeMetricFamily(
        "dlrover_phase", "1 for the present phase of the job, else 0.", labels=["phase"]
    )
    for phase in JobPhase:
        phases.add_metric([phase.value], float(phase is status.phase))
    yield phases
    yield _gauge("dlrover_term", "Term of this master.", status.term)
    yield _gauge("dlrover_round", "Number of the round.", status.round)
    yield _gauge("dlrover_world_size", "Workers in the round.", status.world_size)
    yield _gauge("dlrover_nodes_in_round", "Nodes in the round.", status.nodes_in_round)
    yield _gauge(
        "dlrover_nodes_ready", "Nodes that have reported and are not leaving.", status.ready
    )
    yield _gauge("dlrover_nodes_desired", "Desired number of nodes.", status.desired)
    if status.progress is not None:
        yield _gauge(
            "dlrover_step", "Newest step that the script has reported.", status.progress.step
        )
        speed = status.progress.steps_per_s
        yield _gauge("dlrover_steps_per_second", "Training steps per second.", speed)
    if status.goodput is not None:
        # A gauge: what was productive may turn out to be wasted.
        times = GaugeMetricFamily(
            "dlrover_time_seconds", "Seconds of the job, by what they were.", labels=["bucket"]
        )
        for bucket in TimeBucket:
            times.add_metric([bucket], status.goodput.seconds.get(bucket, 0.0))
        yield times
    if status.goodput is not None and status.goodput.share is not None:
        help_text = "Part of the job's time that brought new steps, from 0 to 1."
        yield _gauge("dlrover_goodput_ratio", help_text, status.goodput.share)
    if status.goodput is not None and status.goodput.ceiling is not None:
        help_text = "Best goodput that could be reached with these failures, from 0 to 1."
        yield _gauge("dlrover_goodput_ceiling_ratio", help_text, status.goodput.ceiling.share)
    last = status.last_checkpoint
    if last is not None:
        help_text = "Step of the newest checkpoint that can be restored."
        yield _gauge("dlrover_checkpoint_step", help_text, last.step)
        help_text = "Age of the newest checkpoint that can be restored, in seconds."
        yield _gauge("dlrover_checkpoint_age_seconds", help_text, last.age_s)
    if last is not None and last.stored_step is not None and last.stored_at is not None:
        help_text = "Step of the newest checkpoint in storage."
        yield _gauge("dlrover_checkpoint_stored_step", help_text, last.stored_step)
        help_text = "Age of the newest checkpoint in storage, in seconds."
        age = max(0.0, status.published_at - last.stored_at)
        yield _gauge("dlrover_checkpoint_stored_age_seconds", help_text, age)
    if last is not None or status.memory_checkpoints or status.checkpoint_failures:
        help_text = "Seconds of the job that no checkpoint in storage covers."
        yield _gauge("dlrover_checkpoint_unstored_seconds", help_text, _unstored_s(status))
    bad = {condition.type for condition in problems(status.conditions, status.round)}
    failing = ConditionType.CHECKPOINT_FAILING in bad
    yield _gauge(
        "dlrover_checkpoint_failing",
        "1 if the condition CheckpointFailing is True, else 0.",
        failing,
    )
    found = GaugeMetricFamily(
        "dlrover_problem", "1 for each condition that reports a problem.", labels=["condition"]
    )
    for kind in sorted(bad):
        found.add_metric([kind], 1.0)
    yield found
    help_text = "Checkpoints that this master has had written to storage."
    yield _count("dlrover_checkpoints_stored", help_text, status.checkpoints_stored)
    help_text = "Attempts to write a checkpoint to storage that failed."
    yield _count("dlrover_checkpoint_failures", help_text, status.checkpoint_failures)
    yield from _gpu_metrics(status.nodes)
    if status.tables is not None:
        yield from _table_metrics(status.tables)
    failures = CounterMetricFamily(
        "dlrover_failures", "Failures of workers and losses of nodes, by class.", labels=["class"]
    )
    for failure_class in FailureClass:
        failures.add_metric([failure_class], status.failures.get(failure_class, 0))
    yield failures
    rounds = CounterMetricFamily(
        "dlrover_new_rounds", "Rounds after the first, by cause.", labels=["cause"]
    )
    for cause in ("failure", "loss", "drain", "scale", "join"):
        rounds.add_metric([cause], status.restarts.get(cause, 0))
    yield rounds


def _unstored_s(status: JobStatus) -> float:
    """Return the age of the newest checkpoint in storage; without one, that of the job.

    A checkpoint of an earlier run is as old as the job. The time in which the job was suspended, or
    waited for its nodes before a first round, does not count.
    """
    last = status.last_checkpoint
    stored_at = last.stored_at if last is not None and last.stored_at is not None else 0.0
    if stored_at > status.started_at:
        rested_s, since = _rested_s(status, stored_at), stored_at
    else:
        seconds = status.goodput.seconds if status.goodput else {}
        rested = (TimeBucket.SUSPENDED, TimeBucket.INITIALIZATION)
        rested_s, since = sum(seconds.get(bucket, 0.0) for bucket in rested), status.started_at
    return max(0.0, status.published_at - since - rested_s)


def _rested_s(status: JobStatus, since: float) -> float:
    """Return the seconds between suspensions and the next rounds, as far as events tell of them.

    Args:
        status: status of the job.
        since: Unix seconds. Earlier time does not count.
    """
    rested_s, begun = 0.0, None
    for event in status.events:
        if event.reason == EventReason.SUSPENDED:
            begun = event.at
        elif event.reason == EventReason.ROUND_FORMED and begun is not None:
            rested_s += max(0.0, event.at - max(begun, since))
            begun = None
    if begun is not None:
        rested_s += max(0.0, status.published_at - max(begun, since))
    return rested_s


def _gpu_metrics(nodes: Sequence[NodeStatus]) -> Iterator[Metric]:
    """Yield how far the GPUs of all nodes are used; nothing where no node says it."""
    live = [node for node in nodes if node.phase is NodePhase.LIVE]
    gpus = sum(node.gpus for node in live)
    if gpus:
        help_text = "Share of the last minute in which the GPUs of the job ran a kernel."
        busy = sum(node.gpus * node.gpu_busy for node in live) / gpus
        yield _gauge("dlrover_gpu_busy_ratio", help_text, busy)
        help_text = "The same of the GPU that is used least."
        least = min(node.gpu_least_busy for node in live if node.gpus)
        yield _gauge("dlrover_gpu_least_busy_ratio", help_text, least)
    memory = sum(node.gpu_memory_limit for node in live)
    if memory:
        used = sum(node.gpu_memory_bytes for node in live)
        help_text = "Part of the memory of the job's GPUs that is in use."
        yield _gauge("dlrover_gpu_memory_ratio", help_text, used / memory)


def _table_metrics(tables: TablesStatus) -> Iterator[Metric]:
    """Yield the metrics of the servers of a parameter server, summed up over them."""
    servers = tables.servers
    yield _gauge("dlrover_ps_servers", "Servers of the parameter server.", len(servers))
    help_text = "Parts of the tables whose last copy has died."
    yield _gauge("dlrover_ps_lost_buckets", help_text, tables.lost_buckets)
    help_text = "Parts of the tables that are being copied to a server."
    yield _gauge("dlrover_ps_moving_buckets", help_text, sum(one.receives for one in servers))
    help_text = "Rows in the memory of all servers, copies included."
    yield _gauge("dlrover_ps_rows", help_text, sum(one.rows for one in servers))
    help_text = "Bytes of rows in the memory of the fullest server."
    largest = max((one.memory_bytes for one in servers), default=0)
    yield _gauge("dlrover_ps_memory_bytes_max", help_text, largest)
    help_text = "Rows per second that workers ask for."
    pulled = sum(one.pulled_per_s for one in servers)
    yield _gauge("dlrover_ps_pulled_rows_per_second", help_text, pulled)
    help_text = "Rows per second with gradients that workers send."
    pushed = sum(one.pushed_per_s for one in servers)
    yield _gauge("dlrover_ps_pushed_rows_per_second", help_text, pushed)
    help_text = "Pushes that other copies do not have yet."
    yield _gauge("dlrover_ps_waiting_pushes", help_text, sum(one.waiting for one in servers))
    help_text = "Pushes per second by the pushes of other workers since the worker pulled."
    stale = GaugeMetricFamily("dlrover_ps_stale_pushes_per_second", help_text, labels=["staleness"])
    for pushes, rate in tables.stale_pushes_per_s.items():
        stale.add_metric([pushes], rate)
    yield stale


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=float(value))


def _count(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=float(value))


def applications(
    loop: Loop, exchanges: Exchanges, certificate_ends: float | None
) -> tuple[ASGIApp, ASGIApp]:
    """Return the applications of the job's port and of the port for health, with their metrics.

    Args:
        loop: The loop that runs the job.
        exchanges: Takes the reports of agents.
        certificate_ends: End of the certificate, in Unix seconds; None if it is not known.
    """
    registry = CollectorRegistry()
    denied = Counter(
        "dlrover_unauthorized_requests", "Requests without a valid token.", registry=registry
    )
    health = health_app(loop, registry, certificate_ends=certificate_ends)
    return job_app(loop, exchanges, denied), health


def health_app(
    loop: Loop,
    registry: CollectorRegistry,
    *,
    dead_s: float = DEAD_S,
    certificate_ends: float | None = None,
) -> ASGIApp:
    """Return the application for health, readiness and metrics.

    The metrics of the job are registered here, so this function may be called only once for a
    registry. Nothing is served yet, and no page needs a token.

    Args:
        loop: The loop that runs the job.
        registry: Registry of the metrics.
        dead_s: Seconds without a turn of the loop after which a master that is ready is unhealthy.
        certificate_ends: End of the certificate for agents, in Unix seconds; None without one.
    """
    # They would be a second series for each counter, which nothing reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry.register(_JobMetrics(loop, certificate_ends))
    app = FastAPI(title="dlrover-py master health", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Report whether the loop is alive; a passive master is healthy."""
        alive = loop.silent_s < dead_s or not loop.ready
        help_text = "ok" if alive else f"the loop has made no turn for {loop.silent_s:.0f} s"
        return Response(help_text, status_code=200 if alive else 503, media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        """Report whether agents must use this master."""
        help_text = loop.journal_error or "ok" if loop.ready else "this master is passive"
        return Response(help_text, status_code=200 if loop.ready else 503, media_type="text/plain")

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
