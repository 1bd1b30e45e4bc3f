# SPDX-License-Identifier: Apache-2.0
"""The border of the proxy, around every request: id, key, size, metrics, errors, and clients that go away.

One place watches the connection: it runs the whole request as a task and cancels that task when the client leaves,
in any phase. Whatever the request has open is closed on the way out, so the server stops working on it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from contextlib import AsyncExitStack
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triton_omni.backends import wire
from triton_omni.openai.http.bodies import ClientGone, Limits, Receiver
from triton_omni.openai.http.budget import Budget
from triton_omni.openai.http.calls import BrokenOff
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.metrics import CLIENT_GONE, Metrics

log = logging.getLogger("triton_omni.proxy")

PROTECTED = "/v1/"


INTERNAL = ApiError(500, "Internal error of the proxy.", code="internal_error", kind="server_error")


class Guard:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str,
        metrics: Metrics,
        routes: frozenset[str],
        limits: Limits,
    ) -> None:
        self._app = app
        self._api_key = api_key.encode()
        self._metrics = metrics
        self._routes = routes
        self._limits = limits
        self._budget = Budget(limits.held_bytes)
        metrics.held_bytes = lambda: self._budget.held

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
                state["share"] = stack.enter_context(self._budget.share())
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
        state = scope["state"]
        body: bytes | None = await Receiver(receive, state["share"], self._limits).body(headers)
        state["body_bytes"] = state["share"].held
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
