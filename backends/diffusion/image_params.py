# SPDX-License-Identifier: Apache-2.0
"""Checks image parameters and fills in defaults. Imports no torch.

`resolve` holds every rule that needs no model. The stage's `check` calls it in the orchestrator, before admission, with
the limits of the deploy file; the engine calls it again with those of its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, ImageParams, Part, with_stage_options
from triton_omni.backends.diffusion.options import (
    MAX_RATIO,
    MAX_SIDE,
    NO_SHARED_CACHE,
    SHARED_CACHES,
    SIZE_MULTIPLE,
    ImageDefaults,
    ImageLimits,
)

MAX_PROMPT_CHARS = 32_000
MAX_SEED = 2**63 - 1
MIN_SIDE = 32
MAX_SCALE = 20.0
MAX_LORA_SCALE = 4.0
SOURCE_MULTIPLE = 32
"""Source images are resized to sides that are multiples of 32 pixels."""

T = TypeVar("T")
FieldName = Callable[[str], str]
"""Name of a parameter as the client wrote it, for error messages: "image.width" or "stages.<stage>.width"."""


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request with all defaults filled in. `seed` None: the engine draws a seed and reports it.

    source_images  slices of the request's `image` tensor: uint8 (height, width, 3) each
    source_sizes   (width, height) that each source image is resized to
    mask           slice of the `image` tensor: uint8 (height, width), 128 and more where the edit may change the image
    """

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    steps: int
    true_cfg_scale: float
    seed: int | None
    n: int
    partial_images: int
    guidance_scale: float | None
    source_images: tuple[Part, ...] = ()
    source_sizes: tuple[tuple[int, int], ...] = ()
    mask: Part | None = None
    preview_every: int = 0
    lora: str = ""
    lora_scale: float = 1.0
    step_cache: bool = False

    @property
    def image_tokens(self) -> int:
        """Tokens of one generated image."""
        return _tokens(self.width, self.height)

    @property
    def source_tokens(self) -> int:
        """Tokens of the latents of all source images."""
        return sum(_tokens(width, height) for width, height in self.source_sizes)

    @property
    def pixel_steps(self) -> int:
        """Work in pixels: all images and their source images, for every step and guidance branch."""
        pixels = self.n * (self.image_tokens + self.source_tokens) * SIZE_MULTIPLE**2
        return pixels * self.steps * (2 if self.has_guidance else 1)

    @property
    def has_guidance(self) -> bool:
        """True if the unconditional branch is computed as well."""
        return self.true_cfg_scale > 1 and self.negative_prompt is not None

    @property
    def preview_steps(self) -> list[int]:
        """Steps after which a preview is sent; never the last step."""
        if self.preview_every:
            return list(range(self.preview_every, self.steps, self.preview_every))
        parts = self.partial_images + 1
        return sorted({max(1, self.steps * k // parts) for k in range(1, parts)} - {self.steps})


class PromptInputs(NamedTuple):
    """The prompt text, and slices of the request's `image` tensor: source images and an optional mask."""

    text: str
    source_images: tuple[Part, ...] = ()
    mask: Part | None = None


def field_name(request: GenerateRequest, stage: str) -> FieldName:
    """Where each parameter came from: the request's typed `image` parameters or its options for the stage."""
    own = request.stages.get(stage, {})
    return lambda name: f"stages.{stage}.{name}" if name in own else f"image.{name}"


def resolve(request: GenerateRequest, stage: str, limits: ImageLimits, defaults: ImageDefaults) -> ImageSpec:
    """Check a request and fill in defaults; raises BadRequest naming the field."""
    at = field_name(request, stage)
    params = _params(request, stage)
    spec = _spec(request, params, limits, defaults)
    _check_size(spec, limits, at)
    _check_counts(spec, limits, at)
    _check_scales(spec, at)
    if spec.seed is not None:
        _check_range(spec.seed, 0, MAX_SEED, at("seed") if params.seed is not None else "sampling.seed")
    if len(spec.negative_prompt or "") > MAX_PROMPT_CHARS:
        raise BadRequest(f"must be at most {MAX_PROMPT_CHARS} characters", at("negative_prompt"))
    return spec


def source_size(shape: Sequence[int], pixels: int) -> tuple[int, int]:
    """(width, height) of about `pixels` in the proportions of an image of `shape` (height, width, …).

    Formula: `calculate_dimensions` in diffusers' edit pipeline.
    """
    ratio = shape[1] / shape[0]
    width = math.sqrt(pixels * ratio)
    return round(width / SOURCE_MULTIPLE) * SOURCE_MULTIPLE, round(width / ratio / SOURCE_MULTIPLE) * SOURCE_MULTIPLE


def _params(request: GenerateRequest, stage: str) -> ImageParams:
    own = request.stages.get(stage, {})
    for name in SHARED_CACHES:
        if name in own and not (name == "step_cache" and isinstance(own[name], bool)):
            raise BadRequest(f"{NO_SHARED_CACHE}: `step_cache: true`", f"stages.{stage}.{name}")
    return with_stage_options(request.image, own, stage)


def _spec(request: GenerateRequest, params: ImageParams, limits: ImageLimits, defaults: ImageDefaults) -> ImageSpec:
    """The request's values, else the defaults; an edited image has the size of the last source image."""
    inputs = _prompt_inputs(request, limits)
    sizes = tuple(source_size(part.shape, defaults.source_pixels) for part in inputs.source_images)
    width, height = sizes[-1] if sizes else (defaults.width, defaults.height)
    return ImageSpec(
        prompt=inputs.text,
        negative_prompt=_or_default(params.negative_prompt, defaults.negative_prompt),
        width=_or_default(params.width, width),
        height=_or_default(params.height, height),
        steps=_or_default(params.steps, defaults.steps),
        true_cfg_scale=_or_default(params.true_cfg_scale, defaults.true_cfg_scale),
        seed=_or_default(params.seed, request.sampling.seed),
        n=params.n,
        partial_images=params.partial_images,
        guidance_scale=params.guidance_scale,
        source_images=inputs.source_images,
        source_sizes=sizes,
        mask=inputs.mask,
        preview_every=params.preview_every,
        lora=_or_default(params.lora, defaults.lora),
        lora_scale=params.lora_scale,
        step_cache=params.step_cache,
    )


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value


def _tokens(width: int, height: int) -> int:
    return (width // SIZE_MULTIPLE) * (height // SIZE_MULTIPLE)


# --- prompt and source images ------------------------------------------------------------------------------------
def _prompt_inputs(request: GenerateRequest, limits: ImageLimits) -> PromptInputs:
    """`input`, or text, images and mask of the last user message; raises BadRequest naming the field."""
    if request.operation == "image":
        inputs, field = PromptInputs(request.input), "input"
    else:
        inputs, field = _from_messages(request, limits), "messages"
    if not inputs.text.strip():
        raise BadRequest("the prompt must not be empty", field)
    if len(inputs.text) > MAX_PROMPT_CHARS:
        raise BadRequest(f"the prompt must be at most {MAX_PROMPT_CHARS} characters (got {len(inputs.text)})", field)
    return inputs


def _from_messages(request: GenerateRequest, limits: ImageLimits) -> PromptInputs:
    indices = [i for i, message in enumerate(request.messages) if message.role == "user"]
    if not indices:
        raise BadRequest("no user message", "messages")
    parts = request.messages[indices[-1]].parts
    images, mask = _source_images(parts, f"messages[{indices[-1]}]", limits)
    if request.operation == "edit" and not images:
        raise BadRequest("an edit needs an image", "messages")
    return PromptInputs("".join(part.text for part in parts), images, mask)


def _source_images(parts: Sequence[Part], field: str, limits: ImageLimits) -> tuple[tuple[Part, ...], Part | None]:
    """Source images, and the mask if present: an image part with two dimensions."""
    images: list[Part] = []
    mask: Part | None = None
    for index, part in enumerate(parts):
        at = f"{field}.content[{index}]"
        if part.type == "text":
            continue
        if part.type != "image":
            raise BadRequest(f"this model takes text and images, not {part.type}", at)
        if not limits.max_source_images:
            raise BadRequest("this model takes text only; it does not edit images", at)
        if len(part.shape) == 2 and mask is None:
            _check_mask(part, images, limits, at)
            mask = part
        else:
            _check_source_image(part, f"{at}.shape")
            images.append(part)
            if len(images) > limits.max_source_images:
                raise BadRequest(f"this model takes at most {limits.max_source_images} image(s) per request", at)
    return tuple(images), mask


def _check_mask(part: Part, images: Sequence[Part], limits: ImageLimits, at: str) -> None:
    if not limits.masks:
        raise BadRequest("this model does not take a mask", at)
    if not images or part.shape != images[0].shape[:2]:
        raise BadRequest("a mask must follow its image and have the same height and width", f"{at}.shape")


def _check_source_image(part: Part, field: str) -> None:
    if len(part.shape) != 3 or part.shape[-1] != 3 or min(part.shape) < 1:
        raise BadRequest(f"shape must be height, width, 3 (got {list(part.shape)})", field)
    height, width = part.shape[:2]
    if max(height, width) > MAX_RATIO * min(height, width):
        raise BadRequest(f"{width}x{height}: one side must be at most {MAX_RATIO} times the other", field)


# --- numbers -----------------------------------------------------------------------------------------------------
def _check_size(spec: ImageSpec, limits: ImageLimits, at: FieldName) -> None:
    for name, side in (("width", spec.width), ("height", spec.height)):
        _check_range(side, MIN_SIDE, MAX_SIDE, at(name))
        if side % SIZE_MULTIPLE:
            below = side // SIZE_MULTIPLE * SIZE_MULTIPLE
            raise BadRequest(
                f"{side} is not a multiple of {SIZE_MULTIPLE}; the nearest are {below} and {below + SIZE_MULTIPLE}",
                at(name),
            )
    size = f"{spec.width}x{spec.height}"
    if spec.mask is not None and (spec.width, spec.height) != spec.source_sizes[-1]:
        width, height = spec.source_sizes[-1]
        raise BadRequest(f"with a mask the size must be {width}x{height} (got {size})", at("width"))
    if spec.width * spec.height > limits.max_pixels:
        raise BadRequest(f"must be at most {limits.max_pixels} pixels (got {size})", at("width"))


def _check_counts(spec: ImageSpec, limits: ImageLimits, at: FieldName) -> None:
    _check_range(spec.steps, limits.min_steps, limits.max_steps, at("steps"))
    _check_range(spec.n, 1, limits.max_images, at("n"))
    if spec.n * spec.width * spec.height > limits.max_total_pixels:
        size = f"{spec.n} images of {spec.width}x{spec.height}"
        raise BadRequest(f"all images together must be at most {limits.max_total_pixels} pixels (got {size})", at("n"))
    if spec.pixel_steps > limits.max_pixel_steps:
        raise BadRequest(
            f"pixels x steps of all images, source images and guidance branches must be at most "
            f"{limits.max_pixel_steps} (got {spec.pixel_steps})",
            at("steps"),
        )
    _check_range(spec.partial_images, 0, limits.max_partial_images, at("partial_images"))
    _check_range(spec.preview_every, 0, limits.max_steps, at("preview_every"))
    if spec.partial_images and spec.preview_every:
        raise BadRequest("set either partial_images or preview_every, not both", at("preview_every"))


def _check_scales(spec: ImageSpec, at: FieldName) -> None:
    _check_range(spec.true_cfg_scale, 0.0, MAX_SCALE, at("true_cfg_scale"))
    _check_range(spec.lora_scale, -MAX_LORA_SCALE, MAX_LORA_SCALE, at("lora_scale"))
    if spec.guidance_scale is not None:
        _check_range(spec.guidance_scale, 0.0, MAX_SCALE, at("guidance_scale"))


def _check_range(value: float, low: float, high: float, field: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"must be from {low} to {high} (got {value})", field)
