# SPDX-License-Identifier: Apache-2.0
"""wss /v1/realtime: accepts a client, and carries its events to and from its session; and secrets for browsers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from triton_omni.openai.endpoints.schemas import Json
from triton_omni.openai.http.access import SOCKET_KEY
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, invalid, missing
from triton_omni.openai.realtime.events import ClientSecretBody, merged, plain
from triton_omni.openai.realtime.session import Session, defaults

log = logging.getLogger("triton_omni.proxy")

SESSION_S = 3600.0
"""OpenAI's longest session."""
SESSION_BYTES = 1 << 20
"""What the proxy's budget is charged for a session beside its audio."""
SECRET_S = 600
"""Life of a client secret that is asked for without one, as OpenAI's."""
MAX_SECRET_BYTES = 8192
"""The secret is sent in the head of a request."""
GOING_AWAY, INTERNAL = 1001, 1011
"""WebSocket close codes."""


async def realtime(socket: WebSocket) -> None:
    """Serve one client until it leaves."""
    context = context_of(socket)
    try:
        context.share.take(SESSION_BYTES)
        preset = context.services.access.session_of(socket.headers)
        given: Json = {} if preset is None else msgspec.json.decode(preset)
        model = await _model(socket.query_params.get("model") or given.get("model") or "", context)
        if given.get("model", model) != model:
            raise invalid("model", f"The client secret is for the model '{given['model']}'.")
        about = await context.services.catalogue.entry(model)
    except ApiError as error:
        await socket.send_denial_response(error.response())
        return
    offered = [name for name in socket.scope.get("subprotocols", ()) if not name.startswith(SOCKET_KEY)]
    await socket.accept(subprotocol=offered[0] if offered else None)

    async def send(event: Json) -> None:
        with contextlib.suppress(RuntimeError):  # it has left: the reader notices
            await socket.send_text(msgspec.json.encode(event).decode())

    config = merged(defaults(model, about), given)
    session = Session(context, config, about.get("operations", ()), send)
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


async def create_client_secret(request: Request) -> Response:
    """POST /v1/realtime/client_secrets: a secret that a browser may have instead of the key."""
    context = context_of(request)
    assert context.key is not None, "routes below /v1 have a key"
    body = await read_json(request, ClientSecretBody)
    given: Json = {} if body.session is None else plain(body.session)
    model = await _model(given.get("model", ""), context, "session.model")
    given["model"] = model
    seconds = (body.expires_after and body.expires_after.seconds) or SECRET_S
    expires_at = int(time.time()) + seconds
    encoded = msgspec.json.encode(given)
    if len(encoded) > MAX_SECRET_BYTES:
        message = f"The session of a client secret may have {MAX_SECRET_BYTES} bytes (got {len(encoded)})."
        raise invalid("session", f"{message} The session itself can be given more.")
    value = context.services.access.client_secret(context.key, encoded, expires_at)
    config = merged(defaults(model, await context.services.catalogue.entry(model)), given)
    return JSONResponse({"value": value, "expires_at": expires_at, "session": config})


async def _model(model: str, context: RequestContext, param: str = "model") -> str:
    """The model that a client names, or the only one that answers speech with speech. Raises ApiError."""
    catalogue = context.services.catalogue
    if not model:
        states = await catalogue.states()
        able = [
            name for name, state in states.items()
            if "chat" in state.get("operations", ()) and state.get("about", {}).get("voices")
            and "audio" in state["about"].get("media", ())
        ]  # fmt: skip
        if len(able) != 1:
            raise missing(param)
        return able[0]
    try:
        await catalogue.pipeline_of(model)
        context.check_model(model)
    except ApiError as error:
        error.param = param
        raise
    return model
