# SPDX-License-Identifier: Apache-2.0
"""Server-sent events from pieces: keep-alive comments while none arrives, errors as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

import msgspec
from starlette.responses import StreamingResponse

from triton_omni.openai.http.calls import KEEP_ALIVE_S, PieceStream
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.pools import Pools, in_thread
from triton_omni.pieces import Piece

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: object, event: str = "") -> bytes:
    """One event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


ToBytes = Callable[[int, Piece], Iterable[bytes]]
"""(run, piece) → the events to send."""


def error_event(error: ApiError) -> bytes:
    """An error as the last event of a stream."""
    return data(error.body)


async def body(
    pools: Pools,
    pieces: PieceStream,
    to_bytes: ToBytes,
    *,
    first: bytes = b"",
    last: bytes = b"",
    on_error: Callable[[ApiError], bytes] = error_event,
) -> AsyncIterator[bytes]:
    """The bytes of a stream: the events of each piece between `first` and `last`, comments while none arrives.

    An error is an event, too, and ends the stream.
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
                events = _joined(to_bytes, *item)
            else:  # encoding an image takes long; the event loop serves others meanwhile
                events = await in_thread(pools.answers, _joined, to_bytes, *item)
            if events:
                yield events
        if last:
            yield last
    except ApiError as error:
        yield on_error(error)


def _joined(to_bytes: ToBytes, run: int, piece: Piece) -> bytes:
    return b"".join(to_bytes(run, piece))


def response(content: AsyncIterator[bytes]) -> StreamingResponse:
    """A response that streams events."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(content, media_type="text/event-stream", headers=headers)
