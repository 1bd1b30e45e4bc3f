# SPDX-License-Identifier: Apache-2.0
"""The body of /v1/images/generations and /v1/images/edits → a checked DrawCall; options of pictures for chats, too."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from triton_omni.backends.wire import GenerateRequest, ImageParams, Message, Part
from triton_omni.openai.endpoints import extras
from triton_omni.openai.http.calls import Call
from triton_omni.openai.http.errors import invalid, missing, unsupported
from triton_omni.openai.http.fields import IGNORED, Fields

MAX_PROMPT_CHARS = 32_000
MAX_IMAGES = 10
MAX_PREVIEWS = 3
FORMATS = ("png", "jpeg", "webp")
QUALITIES = ("auto", "low", "medium", "high", "xhigh", "max")
OPTIONS = {
    "width": "size", "height": "size", "steps": "num_inference_steps", "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale", "negative_prompt": "negative_prompt", "seed": "seed", "n": "n",
    "partial_images": "partial_images", "preview_every": "preview_every", "lora": "lora", "lora_scale": "lora_scale",
    "step_cache": "step_cache",
}  # fmt: skip
"""Field of ImageParams → the parameter it comes from."""
PARAMS = {"input": "prompt", **{f"image.{option}": param for option, param in OPTIONS.items()}}
OTHER_FORMATS = ("complexity", "frame_count", "frame_duration_ms", "svg")
DEPLOYED = ("cache_backend", "cache_config", "vae_use_slicing", "vae_use_tiling", "generator_device", "flow_shift")
"""What vLLM-Omni's clients may ask for and the deploy file says here."""
OLD_QUALITIES = {"standard": "medium", "hd": "high"}
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


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


def read_draw(fields: Fields, sources: Sources | None = None) -> DrawCall:
    """The call. Raises ApiError naming the parameter."""
    model = fields.text("model", needed=True) or ""
    prompt = fields.text("prompt", needed=True, most=MAX_PROMPT_CHARS) or ""
    if not prompt.strip():
        raise missing("prompt")
    is_stream = fields.flag("stream")
    for key in DEPLOYED:
        if fields.has(key):
            raise unsupported(key, f"'{key}' is not for clients to say: it stands in the server's deploy file.")
    file_format = _format(fields)
    if fields.choice("background", ("auto", "opaque", "transparent")) == "transparent":
        raise unsupported("background", "Pictures with a transparent background are not supported.")
    options = _options(fields, is_stream)
    more = extras.request(fields)
    more["image"] = ImageParams(**options)
    as_url = fields.choice("response_format", ("b64_json", "url")) == "url"
    if as_url and is_stream:
        raise unsupported("response_format", "A stream carries pictures as 'b64_json'.")
    quality = fields.choice("quality", (*QUALITIES, *OLD_QUALITIES), "auto") or "auto"
    drawn = DrawCall(
        _call(model, prompt, more, sources),
        is_stream,
        as_url=as_url,
        file_format=file_format,
        compression=_compression(fields, file_format),
        quality=OLD_QUALITIES.get(quality, quality),
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


def _format(fields: Fields) -> str:
    for key in OTHER_FORMATS:
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
    """Fields of ImageParams that were sent."""
    previews = {
        "partial_images": fields.integer("partial_images", 0, MAX_PREVIEWS),
        "preview_every": fields.integer("preview_every", 0, 1000),
    }
    for param, count in previews.items():
        if count and not is_stream:
            raise invalid(param, "Previews come in a stream: set 'stream' to true.")
    options = {
        "n": fields.integer("n", 1, MAX_IMAGES),
        **previews,
        "seed": fields.integer("seed", 0, 2**63 - 1),
    }
    return drawing_options(fields) | {name: value for name, value in options.items() if value is not None}


def drawing_options(fields: Fields) -> dict[str, Any]:
    """Those that images of a chat have, too."""
    width, height = _size(fields)
    lora, scale = _lora(fields)
    options = {
        "width": width,
        "height": height,
        "steps": fields.integer("num_inference_steps", 1, 1000),
        "guidance_scale": fields.number("guidance_scale", 0, 100),
        "true_cfg_scale": fields.number("true_cfg_scale", 0, 100),
        "negative_prompt": fields.text("negative_prompt", most=MAX_PROMPT_CHARS),
        "lora": lora,
        "lora_scale": scale,
        "step_cache": fields.flag("step_cache") or None,
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


def _lora(fields: Fields) -> tuple[str | None, float | None]:
    """(name, scale): `lora` and `lora_scale`, or vLLM-Omni's {"name", "scale"}."""
    scale = fields.number("lora_scale", -100, 100)
    if not isinstance(fields.take("lora"), dict):
        return fields.text("lora", most=200), scale
    inner = Fields(fields.take("lora"), "lora")
    for key in ("path", "int_id"):
        if inner.has(key):
            raise unsupported(inner.name(key), "A LoRA is asked for by 'name'; the deploy file says what it is.")
    name, own_scale = inner.text("name", needed=True), inner.number("scale", -100, 100)
    inner.nothing_else()
    return name, scale if own_scale is None else own_scale
