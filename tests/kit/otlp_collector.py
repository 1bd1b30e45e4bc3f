# SPDX-License-Identifier: Apache-2.0
"""An OpenTelemetry collector for tests: OTLP over HTTP on loopback, spans kept as plain objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """One received span; ids in hex, times in seconds; `event_s` has those of its events."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    start_s: float
    end_s: float
    failed: bool
    status: str
    attributes: dict[str, Any]
    events: list[str]
    event_s: dict[str, float]


@dataclass
class Collector:
    """`url` is for OTEL_EXPORTER_OTLP_ENDPOINT."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)

    def take(self, data: bytes) -> None:
        """Note the spans of one export."""
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            service = _facts(resource.resource.attributes)["service.name"]
            self.spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]

    def of(self, trace: str) -> list[Span]:
        """The spans of one trace."""
        return [span for span in list(self.spans) if span.trace == trace]


def _span(service: str, span: Any) -> Span:
    return Span(
        span.name, service, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9, span.status.code == 2, span.status.message,
        _facts(span.attributes), [event.name for event in span.events],
        {event.name: event.time_unix_nano / 1e9 for event in span.events},
    )  # fmt: skip


def _facts(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collector() -> Iterator[Collector]:
    """A listening collector for the `with` body."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Type"] == "application/x-protobuf":  # Triton's own exporter speaks JSON
                made.take(data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
