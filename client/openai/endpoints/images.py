# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/generations: pictures from a description, with previews if the client wants them. Answers and events
are those of edits, too."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.backends.wire import Event, OmniError
from triton_omni.openai.endpoints.image_request import DrawCall, read_draw
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import Call, open_pieces, shared_of
from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.http.pools import in_thread
from triton_omni.pieces import Piece

_EVENTS = {"image": "image_generation", "edit": "image_edit"}
_ABLE = {"image": "draw from text", "edit": "edit pictures"}


async def generate(request: Request) -> Response:
    """Draw."""
    return await answer(request, read_draw(await read_json(request)))


async def answer(request: Request, call: DrawCall) -> Response:
    """The pictures, or the events of a stream."""
    pools = shared_of(request).pools
    pieces = await open_pieces(request, call.call)
    try:
        await pieces.begin()
    except ApiError as error:
        raise await _naming_others(request, call.call, error) from error
    if call.is_stream:
        return sse.response(sse.body(pools, pieces, Drawing(call).events))
    drawing = Drawing(call)
    async for _, piece in pieces:
        drawing.on(piece)
    return JSONResponse(await in_thread(pools.answers, drawing.answer))


async def _naming_others(request: Request, call: Call, error: ApiError) -> ApiError:
    """If the model is the wrong one for this URL: the error with the names of those that can."""
    if error.param != "model":
        return error
    operation = call.request.operation
    try:
        states = await shared_of(request).catalogue.states()
    except OmniError:  # the list is an extra
        return error
    able = [model for model, state in states.items() if operation in state.get("operations", ())]
    others = f"these can: {', '.join(able)}" if able else "no model here can"
    return invalid("model", f"The model '{call.model}' does not {_ABLE[operation]}; {others}.", error.code)


def usage_of(event: Event) -> dict[str, Any]:
    """OpenAI's counts for pictures."""
    prompt, made, seen = (
        int(event.usage.get(name, 0)) for name in ("prompt_tokens", "completion_tokens", "prompt_image_tokens")
    )
    return {
        "input_tokens": prompt,
        "output_tokens": made,
        "total_tokens": prompt + made,
        "input_tokens_details": {"text_tokens": prompt - seen, "image_tokens": seen},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": made},
    }


class Drawing:
    """Pieces of one request → its answer, or its events."""

    def __init__(self, call: DrawCall) -> None:
        self._call = call
        self._created = int(time.time())
        self._pictures: list[tuple[int, np.ndarray]] = []
        self._encoded: list[tuple[int, tuple[str, dict[str, Any]]]] = []
        self._end = Event("end")

    def on(self, piece: Piece) -> None:
        """Take a piece of an answer that is sent at once; previews are for streams only."""
        if piece.event.type == "end":
            self._end = piece.event
        elif piece.image is not None and not piece.event.meta.get("partial"):
            self._pictures.append((int(piece.event.meta.get("index", len(self._pictures))), piece.image))

    def answer(self) -> dict[str, Any]:
        """The whole answer; encodes the pictures."""
        if not self._pictures:
            raise ApiError(500, "The server made no picture.", code="internal_error", kind="server_error")
        call = self._call
        pictures = [image for _, image in sorted(self._pictures, key=lambda item: item[0])]
        entries = [self._entry(call.encode(image)) for image in pictures]
        facts = call.facts(pictures[0])
        if call.quality == "auto":  # a word of requests and events only
            facts["quality"] = None
        return {"created": self._created, "data": entries, **facts, "usage": usage_of(self._end)}

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """Previews at once. Finished pictures wait for the end: the usage belongs to the last event.

        They are encoded as they come, in the thread that a piece with a picture has.
        """
        meta = piece.event.meta
        if piece.image is not None and meta.get("partial"):
            name, content = self._content("partial_image", piece.image)
            yield sse.data({**content, "partial_image_index": int(meta.get("partial_image_index", 0))}, name)
        elif piece.image is not None:
            self._encoded.append((int(meta.get("index", len(self._encoded))), self._content("completed", piece.image)))
        elif piece.event.type == "end":
            for _, (name, content) in sorted(self._encoded, key=lambda item: item[0]):
                yield sse.data({**content, "usage": usage_of(piece.event)}, name)

    def _content(self, name: str, image: np.ndarray) -> tuple[str, dict[str, Any]]:
        """(name, content) of an event."""
        call = self._call
        name = f"{_EVENTS[call.call.request.operation]}.{name}"
        content = {"type": name, "b64_json": call.encode(image), "created_at": self._created}
        return name, {**content, **call.facts(image)}

    def _entry(self, b64: str) -> dict[str, Any]:
        if self._call.as_url:
            return {"url": f"data:image/{self._call.file_format};base64,{b64}"}
        return {"b64_json": b64}
