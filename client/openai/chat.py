# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from client.openai import sse
from client.openai.calls import open_pieces, shared_of
from client.openai.chat_answer import Chunks, Head, Whole
from client.openai.chat_request import read_chat
from client.openai.fields import parse_json
from client.openai.messages import Reader
from client.pieces import Piece


async def complete(request: Request) -> Response:
    """Answer a chat: text, or speech with its transcript, at once or as a stream."""
    transcripts = shared_of(request).transcripts
    call = await read_chat(parse_json(await request.body()), Reader(transcripts))
    head = Head(f"chatcmpl-{request.state.request_id}", int(time.time()), call.call.model)
    pieces = await open_pieces(request, call.call)
    if not call.is_stream:
        whole = Whole(call)
        async for piece in pieces:
            whole.on(piece)
        return JSONResponse(await asyncio.to_thread(whole.completion, head, transcripts))
    await pieces.begin()
    chunks = Chunks(call, head, transcripts)

    def turn(piece: Piece | None) -> Iterable[bytes]:
        return [sse.DONE] if piece is None else map(sse.data, chunks.on(piece))

    first = b"".join(map(sse.data, chunks.start()))
    return sse.response(sse.body(pieces, first, turn, sse.error_event))
