# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from client.fetch import read_url
from client.openai import sse
from client.openai.calls import open_pieces, shared_of
from client.openai.chat_answer import Chunks, Head, Whole
from client.openai.chat_request import read_chat
from client.openai.fields import parse_json
from client.openai.messages import Reader


async def complete(request: Request) -> Response:
    """Answer a chat with text, speech and its transcript, or pictures; at once or as a stream."""
    shared = shared_of(request)
    reader = Reader(shared.transcripts, partial(read_url, is_allowed=shared.may_fetch))
    call = await read_chat(parse_json(await request.body()), reader)
    head = Head(f"chatcmpl-{request.state.request_id}", int(time.time()), call.call.model)
    pieces = await open_pieces(request, call.call)
    if not call.is_stream:
        whole = Whole(call)
        async for run, piece in pieces:
            whole.on(run, piece)
        return JSONResponse(await asyncio.to_thread(whole.completion, head, shared.transcripts))
    await pieces.begin()
    chunks = Chunks(call, head, shared.transcripts)
    first = b"".join(map(sse.data, chunks.start()))
    turn = lambda run, piece: map(sse.data, chunks.on(run, piece))  # noqa: E731
    return sse.response(sse.body(pieces, turn, first=first, last=sse.DONE))
