# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans, enabled by the environment; without it nothing is imported.

OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) switches them on. Protocol, headers, sampling and
the rest follow OpenTelemetry's own variables: the SDK reads them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from triton_omni.backends.core.ids import TRACEPARENT

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("triton_omni.traces")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_THREAD = "flush-traces"
CLOSE_S = 1.0  # flush time-out at process exit: a dead collector must not delay it


def traces(service: str) -> Traces | None:
    """A span writer, or None without a collector. `service`: default of OTEL_SERVICE_NAME."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        return Traces(service)
    except ImportError as error:
        log.warning("no traces are written: %s (pip install 'triton-omni[trace]')", error)
        return None


class Traces:
    """Writes spans. A parent is a W3C traceparent string or a span of this process."""

    def __init__(self, service: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("triton_omni")
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: Span | str, at_s: float | None = None) -> Span:
        """Start a span now or at the monotonic time `at_s`. `parent`: a span or a traceparent ("" = no parent)."""
        if isinstance(parent, str):
            context = self._propagator.extract({TRACEPARENT: parent})
        else:
            context = self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, start_time=wall_ns(at_s))

    def end(
        self, span: Span, attributes: Mapping[str, str | float], error: str = "", at_s: float | None = None
    ) -> None:
        """End a span now or at the monotonic time `at_s`."""
        span.set_attributes(attributes)
        if error:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(wall_ns(at_s))

    def traceparent(self, span: Span) -> str:
        """W3C traceparent of a span, for its children in other processes."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier.get(TRACEPARENT, "")

    def close(self) -> None:
        """Flush pending spans for at most CLOSE_S."""
        # in a thread: force_flush of SDK 1.45 ignores its timeout and retries a dead collector for 10 s
        flush = threading.Thread(target=self._provider.force_flush, name=FLUSH_THREAD, daemon=True)
        flush.start()
        flush.join(CLOSE_S)


def wall_ns(at_s: float | None) -> int:
    """Wall-clock time in ns of a monotonic time of this host (None: now)."""
    now_ns = time.time_ns()
    return now_ns if at_s is None else now_ns - int((time.monotonic() - at_s) * 1e9)
