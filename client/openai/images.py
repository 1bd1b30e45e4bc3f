# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/generations: pictures from a description, with previews if the client wants them. What is said
here of options, answers and events holds for edits, too."""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from backends.wire import Event, GenerateRequest, Message, OmniError, Part
from client.openai import extras, sse
from client.openai.bodies import read_json
from client.openai.calls import Call, open_pieces, shared_of
from client.openai.errors import ApiError, invalid, missing, unsupported
from client.openai.fields import IGNORED, Fields
from client.openai.pools import in_thread
from client.pieces import Piece

STAGE = "denoiser"
"""The stage that takes the options below, in every pipeline that draws."""
MAX_PROMPT_CHARS = 32_000
MAX_IMAGES = 10
MAX_PREVIEWS = 3
FORMATS = ("png", "jpeg", "webp")
QUALITIES = ("auto", "low", "medium", "high", "xhigh", "max", "standard", "hd")
OPTIONS = {
    "width": "size", "height": "size", "steps": "num_inference_steps", "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale", "negative_prompt": "negative_prompt", "seed": "seed", "n": "n",
    "partial_images": "partial_images",
}  # fmt: skip
"""Option of the stage → the parameter it comes from."""
PARAMS = {"input": "prompt", **{f"stages.{STAGE}.{option}": param for option, param in OPTIONS.items()}}
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_EVENTS = {"image": "image_generation", "edit": "image_edit"}
_ABLE = {"image": "draw from text", "edit": "edit pictures"}


@dataclass(frozen=True)
class Sources:
    """Pictures to edit: message parts, the tensors these are slices of, and the parameters they came from."""

    parts: tuple[Part, ...]
    media: Mapping[str, np.ndarray]
    params: Mapping[str, str]


def as_base64(pixels: np.ndarray, file_format: str = "png", options: Mapping[str, Any] | None = None) -> str:
    """A picture, (height, width, 3) uint8, as a base64 file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format, **(options or {}))
    return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class DrawCall:
    """Pictures as the client wants them."""

    call: Call
    is_stream: bool
    as_url: bool
    file_format: str
    compression: int
    quality: str

    def encode(self, pixels: np.ndarray) -> str:
        """A picture as a base64 file."""
        return as_base64(pixels, self.file_format, {} if self.file_format == "png" else {"quality": self.compression})

    def facts(self, pixels: np.ndarray) -> dict[str, Any]:
        """What every answer and event says about a picture."""
        height, width = pixels.shape[:2]
        return {
            "background": "opaque", "output_format": self.file_format, "quality": self.quality,
            "size": f"{width}x{height}",
        }  # fmt: skip


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


def read_draw(fields: Fields, sources: Sources | None = None) -> DrawCall:
    """The call. Raises ApiError naming the parameter."""
    model = fields.text("model", needed=True) or ""
    prompt = fields.text("prompt", needed=True, most=MAX_PROMPT_CHARS) or ""
    if not prompt.strip():
        raise missing("prompt")
    is_stream = fields.flag("stream")
    file_format = _format(fields)
    if fields.choice("background", ("auto", "opaque", "transparent")) == "transparent":
        raise unsupported("background", "Pictures with a transparent background are not supported.")
    options = _options(fields, is_stream)
    more = extras.request(fields)
    more["stages"] = with_options(more["stages"], options)
    drawn = DrawCall(
        _call(model, prompt, more, sources),
        is_stream,
        as_url=fields.choice("response_format", ("b64_json", "url")) == "url",
        file_format=file_format,
        compression=_compression(fields, file_format),
        quality=fields.choice("quality", QUALITIES, "auto") or "auto",
    )
    fields.choice("style", ("vivid", "natural"))
    fields.nothing_else(IGNORED)
    return drawn


def _call(model: str, prompt: str, more: dict[str, Any], sources: Sources | None) -> Call:
    if sources is None:
        return Call(model, GenerateRequest(operation="image", input=prompt, **more), PARAMS)
    message = Message("user", (*sources.parts, Part("text", prompt)))
    request = GenerateRequest(operation="edit", messages=(message,), **more)
    return Call(model, request, {**PARAMS, **sources.params, "messages": "prompt"}, sources.media)


def with_options(stages: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for stages, with those of the stage that draws on top; none for it if there are none."""
    own = {**stages.get(STAGE, {}), **options}
    return {**stages, STAGE: own} if own else dict(stages)


def not_drawn(model: str, options: Mapping[str, Any], stages: Mapping[str, Any]) -> dict[str, ApiError]:
    """What to say of these options where the pipeline has no stage that draws, and the client named none."""
    if not options or STAGE in stages:
        return {}
    param = OPTIONS[next(iter(options))]
    return {f"stages.{STAGE}": invalid(param, f"'{param}' is for models that draw; '{model}' does not.")}


def _format(fields: Fields) -> str:
    for key in ("complexity", "frame_count", "frame_duration_ms"):
        if fields.take(key) is not None:
            raise unsupported(key, f"'{key}' is for formats that are not supported here.")
    kind = fields.choice("output_format", (*FORMATS, "gif", "svg"), "png") or "png"
    if kind not in FORMATS:
        raise unsupported("output_format", f"'{kind}' is not supported; choose one of {', '.join(FORMATS)}.")
    return kind


def _compression(fields: Fields, file_format: str) -> int:
    compression = fields.integer("output_compression", 0, 100)
    if compression not in (None, 100) and file_format == "png":
        raise invalid("output_compression", "'output_compression' is for jpeg and webp only.")
    return 95 if compression is None else compression


def _options(fields: Fields, is_stream: bool) -> dict[str, Any]:
    """Options of the stage that draws; what was not sent is left to its defaults."""
    previews = fields.integer("partial_images", 0, MAX_PREVIEWS)
    if previews and not is_stream:
        raise invalid("partial_images", "Previews come in a stream: set 'stream' to true.")
    options = {
        "n": fields.integer("n", 1, MAX_IMAGES),
        "partial_images": previews,
        "seed": fields.integer("seed", 0, 2**63 - 1),
    }
    return drawing_options(fields) | {name: value for name, value in options.items() if value is not None}


def drawing_options(fields: Fields) -> dict[str, Any]:
    """Options of the stage that draws which pictures of a chat have, too."""
    width, height = _size(fields)
    options = {
        "width": width,
        "height": height,
        "steps": fields.integer("num_inference_steps", 1, 1000),
        "guidance_scale": fields.number("guidance_scale", 0, 100),
        "true_cfg_scale": fields.number("true_cfg_scale", 0, 100),
        "negative_prompt": fields.text("negative_prompt", most=MAX_PROMPT_CHARS),
    }
    return {name: value for name, value in options.items() if value is not None}


def _size(fields: Fields) -> tuple[int | None, int | None]:
    size = fields.text("size")
    if size in (None, "auto"):
        return None, None
    match = _SIZE.fullmatch(size)
    if match is None:
        raise invalid("size", f"'size' must be 'auto' or like '1024x1024', not {size!r}.")
    return int(match[1]), int(match[2])


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
    }


class Drawing:
    """Pieces of one request → its answer, or its events."""

    def __init__(self, call: DrawCall) -> None:
        self._call = call
        self._created = int(time.time())
        self._pictures: list[tuple[int, np.ndarray]] = []
        self._end = Event("end")

    def on(self, piece: Piece) -> None:
        """Take a piece; previews are for streams only."""
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
        return {"created": self._created, "data": entries, **call.facts(pictures[0]), "usage": usage_of(self._end)}

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """Previews at once. Finished pictures wait for the end: the usage belongs to the last event."""
        if piece.image is not None and piece.event.meta.get("partial"):
            index = int(piece.event.meta.get("partial_image_index", 0))
            yield self._event("partial_image", piece.image, {"partial_image_index": index})
            return
        self.on(piece)
        if piece.event.type == "end":
            for _, image in sorted(self._pictures, key=lambda item: item[0]):
                yield self._event("completed", image, {"usage": usage_of(piece.event)})

    def _event(self, name: str, image: np.ndarray, more: dict[str, Any]) -> bytes:
        call = self._call
        name = f"{_EVENTS[call.call.request.operation]}.{name}"
        content = {"type": name, "b64_json": call.encode(image), "created_at": self._created}
        return sse.data({**content, **call.facts(image), **more}, name)

    def _entry(self, b64: str) -> dict[str, Any]:
        if self._call.as_url:
            return {"url": f"data:image/{self._call.file_format};base64,{b64}"}
        return {"b64_json": b64}
