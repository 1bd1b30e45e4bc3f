# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.openai.endpoints.chat_answer import ChatCompletion, ChunkStream, Head
from triton_omni.openai.endpoints.chat_request import read_chat
from triton_omni.openai.endpoints.schemas import ChatBody
from triton_omni.openai.endpoints.voices import check_is_no_upload
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import open_pieces
from triton_omni.openai.http.context import context_of
from triton_omni.openai.http.pools import in_thread
from triton_omni.pieces import Piece


async def complete(request: Request) -> Response:
    """Answer a chat with text, audio and its transcript, or images; at once or as a stream."""
    context = context_of(request)
    services = context.services
    body = await read_json(request, ChatBody)
    if body.audio is not None:
        await check_is_no_upload(context, body.audio.voice, body.model, "audio.voice")
    call = await read_chat(body, context)
    head = Head(f"chatcmpl-{context.request_id}", int(time.time()), call.call.model)
    pieces = await open_pieces(context, call.call)
    if not call.is_stream:
        completion = ChatCompletion(call)
        async for run, piece in pieces:
            completion.on(run, piece)
        return JSONResponse(await in_thread(services.pools.answers, completion.body, head, services.transcripts))
    await pieces.begin()
    chunks = ChunkStream(call, head, services.transcripts)
    first = b"".join(map(sse.data, chunks.start()))

    def to_bytes(run: int, piece: Piece) -> Iterable[bytes]:
        return map(sse.data, chunks.on(run, piece))

    return sse.response(sse.body(services.pools, pieces, to_bytes, first=first, last=sse.DONE))
