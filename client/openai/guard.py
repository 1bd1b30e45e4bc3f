# SPDX-License-Identifier: Apache-2.0
"""The border of the proxy, around every request: id, key, size, metrics, errors, and clients that go away.

One place watches the connection: it runs the whole request as a task and cancels that task when the client leaves,
in any phase. Whatever the request has open is closed on the way out, so the server stops working on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from contextlib import AsyncExitStack
from typing import Any, NoReturn

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends import wire
from client.openai.calls import BrokenOff
from client.openai.errors import ApiError
from client.openai.metrics import CLIENT_GONE, Metrics

log = logging.getLogger("triton_omni.proxy")

MAX_BODY_BYTES = 64 * 1024 * 1024
DRAIN_FACTOR = 4
"""Of a body that is too large, so many times the bound are read before the answer; and for DRAIN_S at most."""
DRAIN_S = 30.0
PROTECTED = "/v1/"


INTERNAL = ApiError(500, "Internal error of the proxy.", code="internal_error", kind="server_error")


class ClientGone(Exception):
    """The client closed the connection."""


class Guard:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str,
        metrics: Metrics,
        routes: frozenset[str],
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app = app
        self._api_key = api_key.encode()
        self._metrics = metrics
        self._routes = routes
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = wire.new_request_id()
        route = self._route(scope["path"])
        answer = Answer(send, state["request_id"])
        self._metrics.in_flight[route] += 1
        try:
            async with AsyncExitStack() as stack:
                state["stack"] = stack
                await self._serve(scope, receive, answer)
        except ClientGone:
            answer.status = CLIENT_GONE
        except BrokenOff as error:  # returning now makes the HTTP server cut the connection: no false end is sent
            log.error("request %s broke off: %s", state["request_id"], error, extra={"request_id": state["request_id"]})
        except ApiError as error:
            await error.response()(scope, receive, answer.send)
        except Exception:  # the HTTP border: a request must be answered whatever went wrong
            log.exception("request %s failed", state["request_id"], extra={"request_id": state["request_id"]})
            if not answer.has_begun:
                await INTERNAL.response()(scope, receive, answer.send)
        finally:
            self._metrics.in_flight[route] -= 1
            self._metrics.finished[route, answer.status] += 1
            if answer.first_byte_s is not None:
                self._metrics.observe_first_byte(route, answer.first_byte_s)

    def _route(self, path: str) -> str:
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        return path if path in self._routes else "other"

    async def _serve(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        headers = Headers(scope=scope)
        self._check_key(scope["path"], headers)
        body = await self._body(receive, headers)
        gone = asyncio.Event()

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                message: Message = {"type": "http.request", "body": body, "more_body": False}
                body = None
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._app(scope, replay, answer.send))
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

    async def _body(self, receive: Receive, headers: Headers) -> bytes | None:
        """The whole body, bounded. Raises ApiError or ClientGone."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await self._refuse(receive, is_coming="expect" not in headers)  # who expects an answer first sends later
        body = bytearray()
        more = True
        while more:
            message = await _received(receive)
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_body_bytes:
                await self._refuse(receive, is_coming=more)
        return bytes(body)

    async def _refuse(self, receive: Receive, *, is_coming: bool) -> NoReturn:
        """Raise the error for a body that is too large.

        The rest is read before, without keeping it: most clients look for an answer only when they have sent all.
        """
        if is_coming:
            await self._drain(receive)
        raise ApiError(413, f"The body may have {self._max_body_bytes} bytes.", code="content_too_large")

    async def _drain(self, receive: Receive) -> None:
        left = DRAIN_FACTOR * self._max_body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while left > 0:
                    message = await _received(receive)
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


class Answer:
    """Sends an answer with its request id, and remembers what the metrics want to know."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = CLIENT_GONE
        self.has_begun = False
        self.first_byte_s: float | None = None
        self._send = send
        self._arrived_s = time.monotonic()

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.status = message["status"]
            headers: Any = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
        elif message.get("body") and self.first_byte_s is None:
            self.first_byte_s = time.monotonic() - self._arrived_s
        await self._send(message)


async def _received(receive: Receive) -> Message:
    """The next part of the body. Raises ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
