# SPDX-License-Identifier: Apache-2.0
"""The middleware around every request: id, access, size, metrics, trace, errors, and disconnected clients.

One place watches the connection: it runs the whole request as a task and cancels that task when the client
disconnects, in any phase. What the request holds open is closed on the way out, so the server stops working on it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import AsyncExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from triton_omni.backends import wire
from triton_omni.backends.telemetry.traces import Traces
from triton_omni.openai.http.bodies import ClientGone, Receiver, counted, decompressed
from triton_omni.openai.http.calls import BrokenOff
from triton_omni.openai.http.context import RequestContext, Services, set_context
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.metrics import CLIENT_GONE
from triton_omni.openai.http.pools import in_thread
from triton_omni.openai.http.protocol import MAX_HEAD_BYTES
from triton_omni.openai.http.settings import Settings
from triton_omni.openai.http.tracing import traced

log = logging.getLogger("triton_omni.proxy")

PROTECTED = ("/v1/", "/dev/")
FREE_NAMES = "/v1/events/"
"""Below it are ids that clients choose; they may end with a slash."""
NO_KEY = ApiError(401, "You didn't provide an API key.", code="invalid_api_key")
WRONG_KEY = ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
INTERNAL = ApiError(500, "Internal error of the proxy.", code="internal_error", kind="server_error")


MAX_REQUEST_ID_CHARS = 256
"""As the server allows."""
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
MAX_HEADER_CHARS = 4000


class Guard:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        services: Services,
        settings: Settings,
        routes: frozenset[str],
        traces: Traces | None,
    ) -> None:
        self._app = app
        self._services = services
        self._settings = settings
        self._routes = routes
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope and (path := scope["path"].removesuffix("/")) and not path.startswith(FREE_NAMES):
            scope["path"] = path  # a redirect would lose the body with most clients
        if scope["type"] == "websocket":
            await self._open_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics = self._services.metrics
        route = self._route(scope["path"])
        metrics.in_flight.labels(route).inc()
        async with AsyncExitStack() as stack:
            context = self._context(scope, stack)
            stack.enter_context(traced(self._traces, scope, context))
            response = ResponseSender(send, context)
            try:
                await self._answer(scope, receive, response)
            finally:
                metrics.in_flight.labels(route).dec()
                metrics.requests.labels(route, context.status).inc()
                if response.first_byte_s is not None:
                    metrics.first_byte.labels(route).observe(response.first_byte_s)

    def _context(self, scope: Scope, stack: AsyncExitStack) -> RequestContext:
        """The context of a request or WebSocket, under the id that its client sent if that is one."""
        sent_id = Headers(scope=scope).get("x-request-id", "")
        context = RequestContext(
            services=self._services,
            request_id=sent_id if _REQUEST_ID.fullmatch(sent_id) else wire.new_request_id(),
            stack=stack,
            share=stack.enter_context(self._services.budget.share()),
            ignored=[] if self._settings.is_lenient else None,
        )
        set_context(scope, context)
        return context

    def _route(self, path: str) -> str:
        for prefix, route in (
            ("/v1/models/", "/v1/models/{model}"),
            ("/v1/responses/", "/v1/responses/{response}"),
            ("/v1/events/", "/v1/events/{request}"),
            ("/v1/audio/voices/", "/v1/audio/voices/{name}"),
            ("/v1/audio/voice_consents/", "/v1/audio/voice_consents/{name}"),
        ):
            if path.startswith(prefix):
                return route
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
        context = response.context
        # of two ways to end a body another server may have believed the other one: what follows is not trusted
        response.closes = "content-length" in headers and "transfer-encoding" in headers
        self._admit(scope, headers, context)
        limits = self._settings.limits
        body: bytes | None = await Receiver(receive, context.share, limits).body(headers)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if body and encoding not in ("", "identity"):
            body = await in_thread(self._services.pools.media, decompressed, body, encoding, limits.body_bytes)
            context.share.take(counted(len(body)) - context.share.held)
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

    def _admit(self, scope: Scope, headers: Headers, context: RequestContext) -> None:
        """Count the request for its key. Raises ApiError for one that is not served, whatever its body is."""
        head_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        head_bytes += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if head_bytes > MAX_HEAD_BYTES:  # the parser bounds only heads that arrive in parts
            raise ApiError(431, f"The head must be at most {MAX_HEAD_BYTES} bytes.", code="head_too_large")
        if headers.get("x-request-id", context.request_id) != context.request_id:
            message = f"'X-Request-Id' must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces."
            raise ApiError(400, message, param="X-Request-Id")
        context.key = self._services.access.key_of(headers, scope["path"])
        if scope["path"].startswith(PROTECTED):
            if context.key is None:
                raise NO_KEY if "authorization" not in headers else WRONG_KEY
            context.stack.enter_context(context.key.request())

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a WebSocket on, or refuse it before it is accepted."""
        async with AsyncExitStack() as stack:
            context = self._context(scope, stack)
            try:
                self._admit(scope, Headers(scope=scope), context)
            except ApiError as error:
                await WebSocket(scope, receive, send).send_denial_response(error.response())
                return
            await self._app(scope, receive, send)


class ResponseSender:
    """Sends a response with its request id, and records what the metrics need."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self.context = context
        self.has_started = False
        self.closes = False
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
            if self.context.key is not None:
                headers.update(self.context.key.headers())
            if self.closes:
                headers["connection"] = "close"
            if self.context.ignored:
                names = ", ".join(self.context.ignored)[:MAX_HEADER_CHARS]
                headers["x-ignored-parameters"] = _UNPRINTABLE.sub("?", names)
        elif message.get("body") and self.first_byte_s is None:
            self.first_byte_s = time.monotonic() - self._arrived_s
        await self._send(message)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
