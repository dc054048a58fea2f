"""A receiver of OTLP over HTTP in the test's process, which reads what arrives."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class Receiver:
    """Keeps each request of an exporter, and answers with a status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.hold = threading.Event()
        """Requests are answered while it is set."""
        self.hold.set()
        self.requests: queue.Queue[ResourceSpans] = queue.Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    (found,) = ExportTraceServiceRequest.FromString(body).resource_spans
                    receiver.requests.put(found)
                receiver.hold.wait(60)
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def trace(self, within_s: float = 60.0) -> "Trace":
        """Wait for the next trace."""
        return Trace(self.requests.get(timeout=within_s))


class Trace:
    """The spans of one request, which must be one trace with one root."""

    def __init__(self, found: ResourceSpans) -> None:
        self.resource = plain(found.resource.attributes)
        spans = [span for scope in found.scope_spans for span in scope.spans]
        assert len({span.trace_id for span in spans}) == 1
        (self.root,) = (span for span in spans if not span.parent_span_id)
        phases = [span for span in spans if span.parent_span_id]
        assert {span.parent_span_id for span in phases} == {self.root.span_id}
        self.phases = sorted(phases, key=lambda s: (s.start_time_unix_nano, s.end_time_unix_nano))
        self.attributes = plain(self.root.attributes)

    @property
    def seconds(self) -> dict[str, float]:
        """How long each phase took."""
        return {span.name: seconds_of(span) for span in self.phases}


def seconds_of(span: Span) -> float:
    """How long a span took."""
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def plain(attributes: "list[KeyValue]") -> dict[str, str | int]:
    """Attributes as a dictionary."""
    found: dict[str, str | int] = {}
    for one in attributes:
        text = one.value.HasField("string_value")
        found[one.key] = one.value.string_value if text else one.value.int_value
    return found


@contextmanager
def receiver(status: int = 200) -> Iterator[Receiver]:
    """Run a receiver for the block."""
    found = Receiver(status)
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.hold.set()
        found.server.shutdown()
        found.server.server_close()
        thread.join()
