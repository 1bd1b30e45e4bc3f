# SPDX-License-Identifier: Apache-2.0
"""One span per HTTP request, and the trace context that goes on to the server with every call."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Scope

from triton_omni.backends.telemetry.traces import Traces
from triton_omni.backends.wire import TRACEPARENT
from triton_omni.openai.http.context import RequestContext

SERVER_ERROR = 500
_W3C = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@contextmanager
def traced(traces: Traces | None, scope: Scope, context: RequestContext) -> Generator[None]:
    """Set `context.traceparent` to the request's own span, or to the client's where no spans are written."""
    sent = Headers(scope=scope).get(TRACEPARENT, "")
    context.traceparent = sent if _W3C.fullmatch(sent) else ""  # anything else might not pass through gRPC
    if traces is None:
        yield
        return
    span = traces.begin(f"{scope['method']} {scope['path']}", context.traceparent)
    context.traceparent = traces.traceparent(span)
    try:
        yield
    finally:
        attributes = {
            "http.request.method": scope["method"], "url.path": scope["path"],
            "http.response.status_code": context.status, "omni.request_id": context.request_id,
        }  # fmt: skip
        traces.end(span, attributes, f"status {context.status}" if context.status >= SERVER_ERROR else "")
