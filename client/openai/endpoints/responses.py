# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses; GET and DELETE of a response that was stored."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.openai.endpoints.responses_answer import ResponsesAnswer
from triton_omni.openai.endpoints.responses_request import input_items, owner_of, read_response
from triton_omni.openai.endpoints.schemas import Json, ResponsesBody
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import open_pieces
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, unsupported
from triton_omni.openai.http.pools import in_thread
from triton_omni.openai.http.stored_responses import StoredResponse
from triton_omni.pieces import Piece


async def create(request: Request) -> Response:
    """Answer with text or function calls; at once or as a stream of typed events."""
    context = context_of(request)
    services = context.services
    body = await read_json(request, ResponsesBody)
    call = await read_response(body, context)
    items = await in_thread(services.pools.media, msgspec.json.encode, input_items(body))
    answer = ResponsesAnswer(body, call, services.responses.new_id(), int(time.time()))
    pieces = await open_pieces(context, call.call)

    def on(piece: Piece) -> Iterable[Json]:
        yield from answer.on(piece)
        if piece.event.type == "end":
            yield from answer.end(piece.event, int(time.time()))
            if answer.body["store"]:
                answer.body["store"] = _store(context, answer.body, items)
            yield answer.final()

    if not call.is_stream:
        async for _, piece in pieces:
            for _event in on(piece):
                pass
        return JSONResponse(answer.body)
    await pieces.begin()

    def to_bytes(_: int, piece: Piece) -> Iterable[bytes]:
        return map(_event_bytes, on(piece))

    def on_error(error: ApiError) -> bytes:
        return _event_bytes(answer.failed(error))

    first = b"".join(map(_event_bytes, answer.start()))
    return sse.response(sse.body(services.pools, pieces, to_bytes, first=first, on_error=on_error))


def _event_bytes(event: Json) -> bytes:
    return sse.data(event, event["type"])


def _store(context: RequestContext, body: Json, items: bytes) -> bool:
    """Keep the response; False where it is too large to be kept."""
    stored = StoredResponse(body["id"], body["previous_response_id"] or "", items, msgspec.json.encode(body))
    return context.services.responses.keep(owner_of(context), stored)


async def show(request: Request) -> Response:
    """GET /v1/responses/{response}"""
    context = context_of(request)
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise unsupported("stream", "A stored response is not sent as a stream: its text is complete.")
    stored = context.services.responses.find(owner_of(context), request.path_params["response"])
    return Response(stored.body, media_type="application/json")


async def delete(request: Request) -> Response:
    """DELETE /v1/responses/{response}"""
    context = context_of(request)
    response_id = request.path_params["response"]
    context.services.responses.delete(owner_of(context), response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})
