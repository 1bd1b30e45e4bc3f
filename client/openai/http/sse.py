# SPDX-License-Identifier: Apache-2.0
"""Server-sent events over pieces that may be long in coming: keep-alive comments, errors in mid-stream, clean ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from starlette.responses import StreamingResponse

from triton_omni.openai.http.calls import KEEP_ALIVE_S, Pieces
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.pools import Pools, in_thread
from triton_omni.pieces import Piece

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: Any, event: str = "") -> bytes:
    """One event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


Turn = Callable[[int, Piece], Iterable[bytes]]
"""Bytes to send for a piece of a run."""


async def body(
    pools: Pools, pieces: Pieces, turn: Turn, *, first: bytes = b"", last: bytes = b""
) -> AsyncIterator[bytes]:
    """The bytes of a stream: what `turn` makes of each piece, between `first` and `last`; comments meanwhile.

    An error is an event, too, and nothing follows it.
    """
    if first:
        yield first
    try:
        while True:
            while not await pieces.wait(KEEP_ALIVE_S):
                yield PING
            item = await pieces.next()
            if item is None:
                break
            if item[1].image is None:
                made = _joined(turn, *item)
            else:  # a picture takes its time to encode; others are served meanwhile
                made = await in_thread(pools.answers, _joined, turn, *item)
            if made:
                yield made
        if last:
            yield last
    except ApiError as error:
        yield data(error.body)


def _joined(turn: Turn, run: int, piece: Piece) -> bytes:
    return b"".join(turn(run, piece))


def response(content: AsyncIterator[bytes]) -> StreamingResponse:
    """An answer that streams events."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(content, media_type="text/event-stream", headers=headers)
