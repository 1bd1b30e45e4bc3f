# SPDX-License-Identifier: Apache-2.0
"""The bodies of /v1/images/generations and /v1/images/edits → a checked ImageCall; image options of chats, too."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from PIL import Image

from triton_omni.backends.wire import Deadlines, GenerateRequest, ImageParams, Message, Part
from triton_omni.openai.endpoints.schemas import ChatBody, ImageBody, Json, LoraChoice
from triton_omni.openai.http.calls import BackendCall
from triton_omni.openai.http.errors import invalid, missing, unsupported

OPTIONS = {
    "width": "size", "height": "size", "steps": "num_inference_steps", "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale", "negative_prompt": "negative_prompt", "seed": "seed", "n": "n",
    "partial_images": "partial_images", "preview_every": "preview_every", "lora": "lora", "lora_scale": "lora_scale",
    "step_cache": "step_cache",
}  # fmt: skip
"""Field of ImageParams → the parameter it comes from."""
PARAMS = {"input": "prompt", **{f"image.{option}": param for option, param in OPTIONS.items()}}
OLD_QUALITIES = {"standard": "medium", "hd": "high"}


@dataclass(frozen=True)
class EditSources:
    """Images to edit: message parts, the tensors these are slices of, and the parameters they came from."""

    parts: tuple[Part, ...]
    media: Mapping[str, np.ndarray]
    params: Mapping[str, str]


def as_base64(pixels: np.ndarray, file_format: str = "png", options: Mapping[str, object] | None = None) -> str:
    """An image, (height, width, 3) uint8, as a base64 file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, file_format, **(options or {}))
    return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True, kw_only=True)
class ImageCall:
    """A checked request for images, and the form of its answer."""

    call: BackendCall
    is_stream: bool
    as_url: bool
    file_format: str
    compression: int
    quality: str

    def encode(self, pixels: np.ndarray) -> str:
        """An image as a base64 file."""
        return as_base64(pixels, self.file_format, {} if self.file_format == "png" else {"quality": self.compression})

    def facts(self, pixels: np.ndarray) -> Json:
        """What every answer and event reports about an image."""
        height, width = pixels.shape[:2]
        return {
            "background": "opaque", "output_format": self.file_format, "quality": self.quality,
            "size": f"{width}x{height}",
        }  # fmt: skip


def read_image_call(body: ImageBody, sources: EditSources | None = None) -> ImageCall:
    """The call. Raises ApiError naming the parameter."""
    if not body.prompt.strip():
        raise missing("prompt")
    if body.background == "transparent":
        raise unsupported("background", "Images with a transparent background are not supported.")
    if body.stream and body.response_format == "url":
        raise unsupported("response_format", "A stream carries images as 'b64_json'.")
    previews = {"partial_images": body.partial_images or 0, "preview_every": body.preview_every or 0}
    for param, count in previews.items():
        if count and not body.stream:
            raise invalid(param, "Previews come in a stream: set 'stream' to true.")
    file_format = body.output_format or "png"
    if body.output_compression not in (None, 100) and file_format == "png":
        raise invalid("output_compression", "'output_compression' is for jpeg and webp only.")
    quality = body.quality or "auto"
    params = msgspec.structs.replace(
        image_params(body), n=body.n or 1, seed=None if body.seed == -1 else body.seed, **previews
    )
    return ImageCall(
        call=_call(body, params, sources),
        is_stream=body.stream is True,
        as_url=body.response_format == "url",
        file_format=file_format,
        compression=95 if body.output_compression is None else body.output_compression,
        quality=OLD_QUALITIES.get(quality, quality),
    )


def _call(body: ImageBody, params: ImageParams, sources: EditSources | None) -> BackendCall:
    request = GenerateRequest(
        operation="image",
        input=body.prompt,
        image=params,
        stages=body.stages or {},
        deadlines=body.deadlines or Deadlines(),
        priority=body.priority or 0,
    )
    if sources is None:
        return BackendCall(body.model, request, PARAMS)
    message = Message("user", (*sources.parts, Part("text", body.prompt)))
    request = msgspec.structs.replace(request, operation="edit", input="", messages=(message,))
    return BackendCall(body.model, request, {**PARAMS, **sources.params, "messages": "prompt"}, sources.media)


def image_params(body: ChatBody | ImageBody) -> ImageParams:
    """The parameters that images of a chat have, too."""
    width, height = _size(body.size)
    lora, scale = body.lora, body.lora_scale
    if isinstance(lora, LoraChoice):
        lora, scale = lora.name, scale if lora.scale is None else lora.scale
    return ImageParams(
        width=width,
        height=height,
        steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        true_cfg_scale=body.true_cfg_scale,
        negative_prompt=body.negative_prompt,
        lora=lora,
        lora_scale=1.0 if scale is None else scale,
        step_cache=body.step_cache is True,
    )


def _size(size: str | None) -> tuple[int | None, int | None]:
    """(width, height) in pixels; None for the pipeline's default."""
    if size is None or size == "auto":
        return None, None
    width, _, height = size.partition("x")
    return int(width), int(height)
