# SPDX-License-Identifier: Apache-2.0
"""The middleware around every request: id, API key, size, metrics, trace, errors, and disconnected clients.

One place watches the connection: it runs the whole request as a task and cancels that task when the client
disconnects, in any phase. What the request holds open is closed on the way out, so the server stops working on it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from contextlib import AsyncExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triton_omni.backends import wire
from triton_omni.backends.telemetry.traces import Traces
from triton_omni.openai.http.bodies import BodyLimits, ClientGone, Receiver
from triton_omni.openai.http.calls import BrokenOff
from triton_omni.openai.http.context import RequestContext, Services, set_context
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.metrics import CLIENT_GONE
from triton_omni.openai.http.tracing import traced

log = logging.getLogger("triton_omni.proxy")

PROTECTED = "/v1/"
INTERNAL = ApiError(500, "Internal error of the proxy.", code="internal_error", kind="server_error")


class Guard:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        services: Services,
        api_key: str,
        routes: frozenset[str],
        limits: BodyLimits,
        traces: Traces | None,
    ) -> None:
        self._app = app
        self._services = services
        self._api_key = api_key.encode()
        self._routes = routes
        self._limits = limits
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics = self._services.metrics
        route = self._route(scope["path"])
        metrics.in_flight.labels(route).inc()
        async with AsyncExitStack() as stack:
            share = stack.enter_context(self._services.budget.share())
            context = RequestContext(
                services=self._services, request_id=wire.new_request_id(), stack=stack, share=share
            )
            set_context(scope, context)
            stack.enter_context(traced(self._traces, scope, context))
            response = ResponseSender(send, context)
            try:
                await self._answer(scope, receive, response)
            finally:
                metrics.in_flight.labels(route).dec()
                metrics.requests.labels(route, context.status).inc()
                if response.first_byte_s is not None:
                    metrics.first_byte.labels(route).observe(response.first_byte_s)

    def _route(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        return path if path in self._routes else "other"

    async def _answer(self, scope: Scope, receive: Receive, response: ResponseSender) -> None:
        """Run the request, and turn whatever it raises into a response."""
        context = response.context
        extra = {"request_id": context.request_id}
        try:
            await self._serve(scope, receive, response)
        except ClientGone:
            context.status = CLIENT_GONE
        except BrokenOff as error:  # returning without the last part makes the HTTP server cut the connection
            log.error("request %s broke off: %s", context.request_id, error, extra=extra)
        except ApiError as error:
            await error.response()(scope, receive, response.send)
        except Exception:  # the HTTP boundary: every request gets a response
            log.exception("request %s failed", context.request_id, extra=extra)
            if not response.has_started:
                await INTERNAL.response()(scope, receive, response.send)

    async def _serve(self, scope: Scope, receive: Receive, response: ResponseSender) -> None:
        headers = Headers(scope=scope)
        self._check_key(scope["path"], headers)
        context = response.context
        body: bytes | None = await Receiver(receive, context.share, self._limits).body(headers)
        context.body_bytes = context.share.held
        never = asyncio.Event()

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                message: Message = {"type": "http.request", "body": body, "more_body": False}
                body = None
                return message
            await never.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._app(scope, replay, response.send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            await work
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._api_key or not path.startswith(PROTECTED):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._api_key):
            message = "Incorrect API key provided." if key else "You didn't provide an API key."
            raise ApiError(401, message, code="invalid_api_key")


class ResponseSender:
    """Sends a response with its request id, and records what the metrics need."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self.context = context
        self.has_started = False
        self.first_byte_s: float | None = None
        self._send = send
        self._arrived_s = time.monotonic()

    async def send(self, message: Message) -> None:
        """Send one ASGI message."""
        if message["type"] == "http.response.start":
            self.has_started = True
            self.context.status = message["status"]
            headers = MutableHeaders(raw=message["headers"])
            headers["x-request-id"] = self.context.request_id
        elif message.get("body") and self.first_byte_s is None:
            self.first_byte_s = time.monotonic() - self._arrived_s
        await self._send(message)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
