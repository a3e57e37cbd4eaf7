"""A collector of OpenTelemetry's traces: it takes OTLP over HTTP and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """A span, with the attributes of its process."""

    trace: str
    id: str
    parent: str
    name: str
    begin: int
    end: int
    about: dict[str, str]


class Collector:
    """`spans` are all that have come to `variables`' endpoint."""

    def __init__(self, port: int) -> None:
        self.spans: list[Received] = []
        self.variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}

    def take(self, body: bytes) -> None:
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            process = {a.key: a.value.string_value for a in of.resource.attributes}
            for span in (span for scope in of.scope_spans for span in scope.spans):
                own = {
                    a.key: a.value.string_value or str(a.value.int_value) for a in span.attributes
                }
                received = Received(
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    begin=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    about=process | own,
                )
                self.spans.append(received)

    def named(self, name: str, generation: int) -> Received | None:
        """The span of this name of a change, as its attributes say."""
        told = "training.generation", str(generation)
        return next((s for s in self.spans if s.name == name and told in s.about.items()), None)

    def below(self, parent: Received) -> list[Received]:
        """The parts of a span, in the order of time."""
        found = [span for span in self.spans if span.parent == parent.id]
        return sorted(found, key=lambda span: span.begin)


@contextmanager
def collecting() -> Iterator[Collector]:
    """While this is open, spans are taken."""

    class Request(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Request) as server:
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
