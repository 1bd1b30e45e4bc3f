# SPDX-License-Identifier: Apache-2.0
"""Server-sent events over pieces that may be long in coming: keep-alive comments, errors in mid-stream, clean ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from starlette.responses import StreamingResponse

from client.openai.calls import KEEP_ALIVE_S, Pieces
from client.openai.errors import ApiError
from client.pieces import Piece

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: Any, event: str = "") -> bytes:
    """One event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


Turn = Callable[[Piece | None], Iterable[bytes]]
"""Bytes to send for a piece; None: for the end."""
AsError = Callable[[ApiError], bytes]


async def body(pieces: Pieces, first: bytes, turn: Turn, as_error: AsError) -> AsyncIterator[bytes]:
    """The bytes of a stream: `first`, then what `turn` makes of each piece, comments while nothing comes."""
    if first:
        yield first
    try:
        while True:
            while not await pieces.wait(KEEP_ALIVE_S):
                yield PING
            piece = await pieces.next()
            made = b"".join(turn(piece))
            if made:
                yield made
            if piece is None:
                return
    except ApiError as error:
        yield as_error(error)


def response(content: AsyncIterator[bytes]) -> StreamingResponse:
    """An answer that streams events."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(content, media_type="text/event-stream", headers=headers)


def error_event(error: ApiError) -> bytes:
    """What a stream sends when it fails; nothing follows it."""
    return data(error.body)
