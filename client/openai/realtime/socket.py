# SPDX-License-Identifier: Apache-2.0
"""wss /v1/realtime: accepts a client, and carries its events to and from its session."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from triton_omni.openai.endpoints.schemas import Json
from triton_omni.openai.http.access import SOCKET_KEY
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, missing
from triton_omni.openai.realtime.session import Session

log = logging.getLogger("triton_omni.proxy")

SESSION_S = 3600.0
"""OpenAI's longest session."""
SESSION_BYTES = 1 << 20
"""What the proxy's budget is charged for a session beside its audio."""
GOING_AWAY, INTERNAL = 1001, 1011
"""WebSocket close codes."""


async def realtime(socket: WebSocket) -> None:
    """Serve one client until it leaves."""
    context = context_of(socket)
    try:
        context.share.take(SESSION_BYTES)
        model = await _model(socket, context)
        context.check_model(model)
        about = await context.services.catalogue.entry(model)
    except ApiError as error:
        await socket.send_denial_response(error.response())
        return
    offered = [name for name in socket.scope.get("subprotocols", ()) if not name.startswith(SOCKET_KEY)]
    await socket.accept(subprotocol=offered[0] if offered else None)

    async def send(event: Json) -> None:
        with contextlib.suppress(RuntimeError):  # it has left: the reader notices
            await socket.send_text(msgspec.json.encode(event).decode())

    session = Session(context, model, about, send)
    code = GOING_AWAY
    try:
        async with asyncio.timeout(SESSION_S):
            await session.start()
            while True:
                await session.on(await _message(socket))
    except WebSocketDisconnect:
        return
    except TimeoutError:
        error = ApiError(408, f"Sessions last at most {SESSION_S:g} s.", code="session_expired")
        await send({"type": "error", "event_id": "event_last", "error": error.body["error"]})
    except Exception:  # the border: every session ends with a word
        log.exception("session %s failed", context.request_id, extra={"request_id": context.request_id})
        code = INTERNAL
    finally:
        await session.close()
    if socket.application_state is WebSocketState.CONNECTED:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await socket.close(code)


async def _message(socket: WebSocket) -> bytes:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1000)
    text = message.get("text")
    return message["bytes"] if text is None else text.encode("utf-8", "surrogatepass")


async def _model(socket: WebSocket, context: RequestContext) -> str:
    """The model of the query, or the only one that answers speech with speech. Raises ApiError."""
    catalogue = context.services.catalogue
    if model := socket.query_params.get("model", ""):
        await catalogue.pipeline_of(model)
        return model
    states = await catalogue.states()
    able = [
        name for name, state in states.items()
        if "chat" in state.get("operations", ()) and state.get("about", {}).get("voices")
        and "audio" in state["about"].get("media", ())
    ]  # fmt: skip
    if len(able) != 1:
        raise missing("model")
    return able[0]
