# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.openai.endpoints.chat_answer import Chunks, Head, Whole
from triton_omni.openai.endpoints.chat_request import read_chat
from triton_omni.openai.endpoints.messages import Reader
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import open_pieces, shared_of
from triton_omni.openai.http.pools import in_thread


async def complete(request: Request) -> Response:
    """Answer a chat with text, speech and its transcript, or pictures; at once or as a stream."""
    shared = shared_of(request)
    call = await read_chat(await read_json(request), Reader(shared, request.state.share))
    head = Head(f"chatcmpl-{request.state.request_id}", int(time.time()), call.call.model)
    pieces = await open_pieces(request, call.call)
    if not call.is_stream:
        whole = Whole(call)
        async for run, piece in pieces:
            whole.on(run, piece)
        return JSONResponse(await in_thread(shared.pools.answers, whole.completion, head, shared.transcripts))
    await pieces.begin()
    chunks = Chunks(call, head, shared.transcripts)
    first = b"".join(map(sse.data, chunks.start()))
    turn = lambda run, piece: map(sse.data, chunks.on(run, piece))  # noqa: E731
    return sse.response(sse.body(shared.pools, pieces, turn, first=first, last=sse.DONE))
