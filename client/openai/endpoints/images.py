# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/generations: images from a description, with previews on request. Edits share answers and events."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.backends.wire import Event, ImagePiece, OmniError
from triton_omni.openai.endpoints.image_request import ImageCall, read_image_call
from triton_omni.openai.endpoints.schemas import ImageBody, Json
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import open_pieces
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.http.pools import in_thread
from triton_omni.pieces import Piece

_EVENTS = {"image": "image_generation", "edit": "image_edit"}
_VERBS = {"image": "make images from text", "edit": "edit images"}


async def generate(request: Request) -> Response:
    """Make images."""
    return await image_response(context_of(request), read_image_call(await read_json(request, ImageBody)))


async def image_response(context: RequestContext, call: ImageCall) -> Response:
    """The images, or the events of a stream."""
    pools = context.services.pools
    pieces = await open_pieces(context, call.call)
    try:
        await pieces.begin()
    except ApiError as error:
        if error.param != "model":
            raise
        raise await wrong_model(context, call.call.model, call.call.request.operation, error) from error
    answer = ImageAnswer(call)
    if call.is_stream:
        return sse.response(sse.body(pools, pieces, answer.events))
    async for _, piece in pieces:
        answer.on(piece)
    return JSONResponse(await in_thread(pools.answers, answer.body))


async def wrong_model(context: RequestContext, model: str, operation: str, error: ApiError) -> ApiError:
    """The error of a model that lacks this URL's operation, with the names of those that have it."""
    try:
        states = await context.services.catalogue.states()
    except OmniError:  # the names are a hint only
        return error
    able = [name for name, state in states.items() if operation in state.get("operations", ())]
    others = f"these can: {', '.join(able)}" if able else "no model here can"
    return invalid("model", f"The model '{model}' does not {_VERBS[operation]}; {others}.", error.code)


def image_usage(event: Event) -> Json:
    """OpenAI's token counts of images."""
    prompt, output, from_images = (
        int(event.usage.get(name, 0)) for name in ("prompt_tokens", "completion_tokens", "prompt_image_tokens")
    )
    return {
        "input_tokens": prompt,
        "output_tokens": output,
        "total_tokens": prompt + output,
        "input_tokens_details": {"text_tokens": prompt - from_images, "image_tokens": from_images},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": output},
    }


class ImageAnswer:
    """Pieces of one request → its response body, or its events."""

    def __init__(self, call: ImageCall) -> None:
        self._call = call
        self._created = int(time.time())
        self._images: list[tuple[int, np.ndarray]] = []
        self._completed: list[tuple[int, tuple[str, Json]]] = []
        self._end = Event("end")

    def on(self, piece: Piece) -> None:
        """Take a piece of an answer that is sent at once; previews are for streams only."""
        if piece.event.type == "end":
            self._end = piece.event
        elif piece.image is not None and isinstance(piece.event.piece, ImagePiece) and not piece.is_preview:
            self._images.append((piece.event.piece.index, piece.image))

    def body(self) -> Json:
        """The response body; encodes the images."""
        if not self._images:
            raise ApiError(500, "The server made no image.", code="internal_error", kind="server_error")
        call = self._call
        images = [image for _, image in sorted(self._images, key=lambda item: item[0])]
        entries = [self._entry(call.encode(image)) for image in images]
        facts = call.facts(images[0])
        if call.quality == "auto":  # a value of requests and events only
            facts["quality"] = None
        return {"created": self._created, "data": entries, **facts, "usage": image_usage(self._end)}

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """Previews at once. Finished images wait for the end: the usage belongs to the last event.

        They are encoded as they arrive, in the thread of their piece.
        """
        about = piece.event.piece
        if piece.image is not None and isinstance(about, ImagePiece) and about.partial:
            name, content = self._content("partial_image", piece.image)
            yield sse.data({**content, "partial_image_index": about.partial_image_index or 0}, name)
        elif piece.image is not None and isinstance(about, ImagePiece):
            self._completed.append((about.index, self._content("completed", piece.image)))
        elif piece.event.type == "end":
            for _, (name, content) in sorted(self._completed, key=lambda item: item[0]):
                yield sse.data({**content, "usage": image_usage(piece.event)}, name)

    def _content(self, name: str, image: np.ndarray) -> tuple[str, Json]:
        """(name, content) of an event."""
        call = self._call
        name = f"{_EVENTS[call.call.request.operation]}.{name}"
        content = {"type": name, "b64_json": call.encode(image), "created_at": self._created}
        return name, {**content, **call.facts(image)}

    def _entry(self, b64: str) -> Json:
        if self._call.as_url:
            return {"url": f"data:image/{self._call.file_format};base64,{b64}"}
        return {"b64_json": b64}
