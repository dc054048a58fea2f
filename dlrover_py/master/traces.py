"""How long the parts of recoveries took, for the status and as traces of OpenTelemetry.

:func:`spans_of` is pure. :class:`RecoveryTimes` notes when each phase was seen, and
:class:`TraceExporter` sends the spans in a thread. Neither may delay or end the master. The
libraries of OpenTelemetry are imported with the first trace that is sent.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from dlrover_py.master.core.events import Event, RestoreAsked
from dlrover_py.master.core.job import Job
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.agents import FailureClass, WorkerPhase
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobEvent, RecoveryPhases

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("master.traces")

TIMES_KEPT = 200
"""Number of events whose times are remembered."""
RECOVERIES_KEPT = 20
"""Number of recoveries in the status."""
MOST_WAITING = 16
"""Number of recoveries that wait to be sent; beyond it, the oldest ones are dropped."""
SERVICE = "dlrover-master"
"""Name of the service in traces, unless ``OTEL_SERVICE_NAME`` is set."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a recovery. Times are Unix seconds."""

    name: str
    began: float
    ended: float


Send = Callable[[Sequence[Span], dict[str, str | int]], None]
"""Takes the spans of a recovery, the whole one first, and the attributes of the whole one."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """When the phases of one recovery began, in monotonic seconds; NaN if that is not known."""

    began: float
    """Begin of the time without training, maybe several rounds ago."""
    failed: float = math.nan
    """Last sign of life of what has failed."""
    noticed: float = math.nan
    """The master had the cause."""
    formed: float = math.nan
    """The round was formed."""
    taken_up: float = math.nan
    """The first node had its assignment."""
    running: float = math.nan
    """The workers of the first node had been started."""
    restoring: float = math.nan
    """A worker asked for a checkpoint."""
    restored: float = math.nan
    """The workers had loaded it."""
    resumed: float = math.nan
    """The first step was reported."""


_PHASES = (
    ("detect", "failed"),
    ("decide", "noticed"),
    ("assign", "formed"),
    ("start", "taken_up"),
    ("prepare", "running"),
    ("restore", "restoring"),
    ("first step", "restored"),
)
"""For each phase, in order: its name, and when it begins. It ends where the next one begins."""


def spans_of(recovery: Recovery, ahead: float) -> list[Span]:
    """Return the spans of a recovery: the whole one, then its phases in order.

    A phase whose begin is not known is left out, and the one before it lasts longer. Without a
    checkpoint, ``prepare`` and ``restore`` are left out, and ``first step`` begins when the workers
    run.

    Args:
        recovery: When its phases began. The first step must be known.
        ahead: Unix time minus monotonic time.
    """
    if math.isnan(recovery.restoring):
        recovery = replace(recovery, running=math.nan, restored=recovery.running)
    begins: list[tuple[str, float]] = []
    last = -math.inf
    for name, field in _PHASES:
        at = getattr(recovery, field)
        if not math.isnan(at):
            last = min(max(at, last), recovery.resumed)
            begins.append((name, last))
    begins.append(("", recovery.resumed))
    began = min(recovery.began, begins[0][1])
    return [
        Span("recovery", began + ahead, recovery.resumed + ahead),
        *(Span(name, at + ahead, end + ahead) for (name, at), (_, end) in pairwise(begins)),
    ]


class RecoveryTimes:
    """Notes when the phases of a job's recoveries were seen, and has each recovery sent."""

    def __init__(self, send: Send | None) -> None:
        """Note nothing yet.

        Args:
            send: Sends a finished trace; it must not wait. None: none is sent.
        """
        self._send = send
        self._failed = False
        self.newest: deque[RecoveryPhases] = deque(maxlen=RECOVERIES_KEPT)
        """The newest recoveries, for the status."""
        self._seen: dict[int, tuple[float, float]] = {}
        """Times of the newest events, by their ids: when the failure began, and of the event."""
        self._hang_began = math.nan
        self._running: tuple[int, float] = (0, math.nan)
        """A round, and when the workers of its first node had been started."""
        self._asked: tuple[int, float] = (0, math.nan)
        """A round, and when a worker asked for a checkpoint first."""

    def take(self, job: Job, events: Iterable[Event], since: int, now: float) -> None:
        """Take in one step of the job; keep a recovery that it has completed, and send its trace.

        An error in it ends that with a warning, and nothing else.

        Args:
            job: The job after the step.
            events: What the step has taken in.
            since: Id of the first event that the step has recorded, if any.
            now: Monotonic time of the step.
        """
        if self._failed:
            return
        try:
            self._take(job, events, since, now)
        except Exception:
            log.exception("no_traces", extra={"then": "the job goes on without traces"})
            self._failed = True

    def _take(self, job: Job, events: Iterable[Event], since: int, now: float) -> None:
        """Take in one step of the job; see :meth:`take`.

        Args:
            job: The job after the step.
            events: What the step has taken in.
            since: Id of the first event that the step has recorded, if any.
            now: Monotonic time of the step.
        """
        for event in events:
            if isinstance(event, RestoreAsked) and event.round > self._asked[0]:
                self._asked = event.round, now
        self._look_for_workers(job, now)
        fresh = list(takewhile(lambda e: e.id >= since, reversed(job.state.events)))
        for told in reversed(fresh):
            self._seen[told.id] = self._failure_began(job, told, now), now
            if len(self._seen) > TIMES_KEPT:
                del self._seen[next(iter(self._seen))]
            if told.reason == EventReason.TRAINING_RESUMED and job.state.round > 1:
                spans = spans_of(self._recovery(job, told, now), told.at - now)
                whole, *phases = ((one.name, round(one.ended - one.began, 3)) for one in spans)
                self.newest.append(
                    RecoveryPhases(round=job.state.round, took_s=whole[1], phases=dict(phases))
                )
                if self._send is not None:
                    self._send(spans, _attributes(job, told))

    def _look_for_workers(self, job: Job, now: float) -> None:
        """Note when the first node of the round reports that its workers run."""
        world = job.state.world
        if world is None or self._running[0] == world.round:
            return
        first = job.live.nodes.get(world.members[0].node)
        report = None if first is None else first.report
        if report is None or report.follows != world.round:
            return
        if report.phase is WorkerPhase.RUNNING:
            self._running = world.round, now

    def _failure_began(self, job: Job, event: JobEvent, now: float) -> float:
        """Return the last sign of life of what has failed, in monotonic seconds.

        For a hang this is its last step, which is kept for the failure that follows it. For an
        event that is no failure it is ``now``.
        """
        if event.reason == EventReason.NODE_LOST and event.node is not None:
            node = job.live.nodes.get(NodeId(event.node))
            return node.heard_at if node is not None and node.heard_at > -math.inf else now
        if event.reason == EventReason.HANG:
            self._hang_began = now - (event.took_s or 0.0)
        failure = job.state.last_failure
        if event.reason == EventReason.WORKER_FAILED and failure is not None:
            if failure.worker.failure_class is FailureClass.HANG:
                return self._hang_began
            return now - (event.took_s or 0.0)  # a broken connection may have been seen before
        return now

    def _recovery(self, job: Job, resumed: JobEvent, now: float) -> Recovery:
        """Return when the phases of the recovery that an event ends began."""
        formed = next((e for e in job.state.events if e.id == resumed.cause), None)
        cause = None if formed is None else formed.cause
        failed, noticed = self._seen.get(cause or 0, (math.nan, math.nan))
        _, formed_at = self._seen.get(resumed.cause or 0, (math.nan, math.nan))
        number, progress = job.state.round, job.live.progress
        restoring = self._asked[1] if self._asked[0] == number else math.nan
        taken_up, loaded_s = math.nan, 0.0
        if progress is not None:
            taken_up = now - progress[1].first_step_after_s
            loaded_s = progress[1].spent.get("load", 0.0)
        return Recovery(
            began=job.live.outage[1],
            failed=failed,
            noticed=noticed,
            formed=formed_at,
            taken_up=taken_up,
            running=self._running[1] if self._running[0] == number else math.nan,
            restoring=restoring,
            restored=restoring + loaded_s,
            resumed=now,
        )


def _attributes(job: Job, resumed: JobEvent) -> dict[str, str | int]:
    """Return what a trace says of the recovery that an event ends."""
    state, world = job.state, job.state.world
    by_id = {event.id: event for event in state.events}
    formed = by_id.get(resumed.cause or 0)
    cause = None if formed is None else by_id.get(formed.cause or 0)
    found: dict[str, str | int] = {
        "dlrover.job": state.job,
        "dlrover.term": state.term,
        "dlrover.round": state.round,
        "dlrover.kind": job.live.outage[0],
        "dlrover.result": resumed.message,
    }
    if world is not None:
        found |= {"dlrover.nodes": len(world.members), "dlrover.workers": world.world_size}
    if cause is not None:
        found |= {"dlrover.cause": cause.reason, "dlrover.cause.message": cause.message}
        if cause.node is not None:
            found["dlrover.cause.node"] = cause.node
        failure = state.last_failure
        if cause.reason == EventReason.WORKER_FAILED and failure is not None:
            found["dlrover.cause.class"] = failure.worker.failure_class
    return found


class _LastWords(logging.Handler):
    """Keeps the newest message of OpenTelemetry's libraries, instead of many log lines."""

    words = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.words = record.getMessage()


class TraceExporter:
    """Sends spans over OTLP/HTTP, as the standard ``OTEL_`` variables say, in a thread.

    A trace that cannot be sent is dropped. The first one is warned of, and the next one only after
    another could be sent.
    """

    def __init__(self) -> None:
        """Send nothing yet."""
        self._thread = BackgroundThread("traces", max_waiting=MOST_WAITING)
        self._exporter: SpanExporter | None = None
        self._failed = False
        self._words = _LastWords()

    def send(self, spans: Sequence[Span], attributes: dict[str, str | int]) -> None:
        """Have a trace sent; never wait. If too many wait, the oldest is dropped without a warning.

        Args:
            spans: The whole recovery, then its phases.
            attributes: Attributes of the first span.
        """
        self._thread.post(lambda: self._send(spans, attributes), size=1)

    async def finish(self, within_s: float) -> None:
        """Wait until all traces are sent or dropped, for this time at most, in seconds."""
        await self._thread.wait_posted(within_s)

    def _send(self, spans: Sequence[Span], attributes: dict[str, str | int]) -> None:
        """Send a trace, or warn that it was dropped."""
        try:
            sent = self._export(spans, attributes)
        except (ImportError, ValueError) as error:
            self._words.words, sent = f"{error}", False
        if not sent and not self._failed:
            log.warning(
                "traces_dropped",
                extra={
                    "why": self._words.words or "the receiver of OTLP has refused it",
                    "then": "training goes on; check the OTEL_EXPORTER_OTLP_ variables",
                },
            )
        self._failed = not sent

    def _export(self, spans: Sequence[Span], attributes: dict[str, str | int]) -> bool:
        """Send a trace, and return whether it was taken.

        Raises:
            ImportError: A library is missing.
            ValueError: A variable of OpenTelemetry cannot be used.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.trace import set_span_in_context

        if self._exporter is None:
            theirs = logging.getLogger("opentelemetry")
            theirs.addHandler(self._words)
            theirs.propagate = False
            self._exporter = OTLPSpanExporter()
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE}))
        made = InMemorySpanExporter()
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(made))
        tracer = provider.get_tracer("dlrover_py.master")
        whole, *phases = spans
        root = tracer.start_span(
            whole.name, start_time=_nanoseconds(whole.began), attributes=attributes
        )
        for phase in phases:
            span = tracer.start_span(
                phase.name,
                context=set_span_in_context(root),
                start_time=_nanoseconds(phase.began),
            )
            span.end(_nanoseconds(phase.ended))
        root.end(_nanoseconds(whole.ended))
        return self._exporter.export(made.get_finished_spans()) is SpanExportResult.SUCCESS


def _nanoseconds(at: float) -> int:
    """Return Unix seconds as the nanoseconds of a span."""
    return int(at * 1e6) * 1000


def trace_exporter() -> TraceExporter | None:
    """Return an exporter; None, with a warning, if OpenTelemetry's libraries are not installed."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        log.warning(
            "no_traces",
            extra={
                "why": "a receiver of traces is named, but opentelemetry-sdk is not installed",
                "then": "install DLRover-Py with its extra opentelemetry",
            },
        )
        return None
    return TraceExporter()
