# SPDX-License-Identifier: Apache-2.0
"""One span per HTTP request, and the trace context that goes on to the server with every call."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triton_omni.backends.telemetry.traces import Traces
from triton_omni.backends.wire import TRACEPARENT
from triton_omni.openai.http.metrics import CLIENT_GONE

SERVER_ERROR = 500
_W3C = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Traced:
    """ASGI middleware. Sets `state.traceparent`: the request's own span, or the client's where none is written."""

    def __init__(self, app: ASGIApp, *, traces: Traces | None) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        sent = Headers(scope=scope).get(TRACEPARENT, "")
        state["traceparent"] = sent if _W3C.fullmatch(sent) else ""  # another is none: gRPC may not even carry it
        if self._traces is None:
            await self._app(scope, receive, send)
            return
        span = self._traces.begin(f"{scope['method']} {scope['path']}", state["traceparent"])
        state["traceparent"] = self._traces.traceparent(span)
        status = CLIENT_GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            facts = {"http.request.method": scope["method"], "url.path": scope["path"]}
            facts |= {"http.response.status_code": status, "omni.request_id": state.get("request_id", "")}
            self._traces.end(span, facts, f"status {status}" if status >= SERVER_ERROR else "")
