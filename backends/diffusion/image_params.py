# SPDX-License-Identifier: Apache-2.0
"""What a request asks of a diffusion stage. No torch here.

`read_wish` holds every rule that needs no model: a pipeline's `check` calls it in the thin stub, before any stage
works, and the engine calls it again, with the deploy file's limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, ImageParams, Part, with_stage_options
from triton_omni.backends.diffusion.description import MAX_PROMPT_CHARS, read_description, source_size
from triton_omni.backends.diffusion.options import (
    MAX_SIDE,
    NO_SHARED_CACHE,
    SHARED_CACHES,
    SIZE_MULTIPLE,
    Defaults,
    Limits,
)

MAX_SEED = 2**63 - 1
MIN_SIDE = 32
MAX_SCALE = 20.0
MAX_LORA_SCALE = 4.0

T = TypeVar("T")
Place = Callable[[str], str]


class Wish(msgspec.Struct, frozen=True):
    """A request with everything decided but the seed (None: the engine draws one and reports it).

    pictures, mask  slices of the request's `image` tensor: what is to be edited, and where
    sources         (width, height) that each of these pictures is brought to
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
    pictures: tuple[Part, ...] = ()
    sources: tuple[tuple[int, int], ...] = ()
    mask: Part | None = None
    preview_every: int = 0
    lora: str = ""
    lora_scale: float = 1.0
    step_cache: bool = False

    @property
    def picture_tokens(self) -> int:
        """Tokens of one picture that is drawn."""
        return (self.width // SIZE_MULTIPLE) * (self.height // SIZE_MULTIPLE)

    @property
    def source_tokens(self) -> int:
        """Tokens of the latents of all pictures to edit."""
        return sum((width // SIZE_MULTIPLE) * (height // SIZE_MULTIPLE) for width, height in self.sources)

    @property
    def has_guidance(self) -> bool:
        """True if the unconditional branch has to be computed, too."""
        return self.true_cfg_scale > 1 and self.negative_prompt is not None


def read_wish(request: GenerateRequest, stage: str, limits: Limits, defaults: Defaults) -> Wish:
    """What the request asks for; raises BadRequest naming the field."""
    own = request.stages.get(stage, {})
    options = _options(request, own, stage)

    def at(name: str) -> str:
        """The place that a value came from."""
        return f"stages.{stage}.{name}" if name in own else f"image.{name}"

    wish = _decided(request, options, limits, defaults)
    _check_size(wish, limits, at)
    _check_counts(wish, limits, at)
    _check_scales(wish, at)
    if wish.seed is not None:
        _within(wish.seed, 0, MAX_SEED, at("seed") if options.seed is not None else "sampling.seed")
    if len(wish.negative_prompt or "") > MAX_PROMPT_CHARS:
        raise BadRequest(f"longer than {MAX_PROMPT_CHARS} characters", at("negative_prompt"))
    return wish


def _options(request: GenerateRequest, own: Mapping[str, Any], stage: str) -> ImageParams:
    for name in SHARED_CACHES:
        if name in own and not (name == "step_cache" and isinstance(own[name], bool)):
            raise BadRequest(f"{NO_SHARED_CACHE}: `step_cache: true`", f"stages.{stage}.{name}")
    return with_stage_options(request.image, own, stage)


def _decided(request: GenerateRequest, options: ImageParams, limits: Limits, defaults: Defaults) -> Wish:
    """The request's own values, else the deploy file's; an edited picture is as large as the last one it comes from."""
    text, pictures, mask = read_description(request, limits)
    sources = tuple(source_size(part.shape, defaults.source_pixels) for part in pictures)
    width, height = sources[-1] if sources else (defaults.width, defaults.height)
    return Wish(
        prompt=text,
        negative_prompt=_given(options.negative_prompt, defaults.negative_prompt),
        width=_given(options.width, width),
        height=_given(options.height, height),
        steps=_given(options.steps, defaults.steps),
        true_cfg_scale=_given(options.true_cfg_scale, defaults.true_cfg_scale),
        seed=_given(options.seed, request.sampling.seed),
        n=options.n,
        partial_images=options.partial_images,
        guidance_scale=options.guidance_scale,
        pictures=pictures,
        sources=sources,
        mask=mask,
        preview_every=options.preview_every,
        lora=_given(options.lora, defaults.lora),
        lora_scale=options.lora_scale,
        step_cache=options.step_cache,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_size(wish: Wish, limits: Limits, at: Place) -> None:
    for name, side in (("width", wish.width), ("height", wish.height)):
        _within(side, MIN_SIDE, MAX_SIDE, at(name))
        if side % SIZE_MULTIPLE:
            below = side // SIZE_MULTIPLE * SIZE_MULTIPLE
            raise BadRequest(
                f"{side} is not a multiple of {SIZE_MULTIPLE}; the nearest are {below} and {below + SIZE_MULTIPLE}",
                at(name),
            )
    size = f"{wish.width}x{wish.height}"
    if wish.mask is not None and (wish.width, wish.height) != wish.sources[-1]:
        width, height = wish.sources[-1]
        raise BadRequest(f"with a mask the edited picture is {width}x{height}, not {size}", at("width"))
    if wish.width * wish.height > limits.max_pixels:
        raise BadRequest(f"{size} is more than the {limits.max_pixels} pixels this server draws", at("width"))


def _check_counts(wish: Wish, limits: Limits, at: Place) -> None:
    _within(wish.steps, limits.min_steps, limits.max_steps, at("steps"))
    _within(wish.n, 1, limits.max_images, at("n"))
    if wish.n * wish.width * wish.height > limits.max_total_pixels:
        size = f"{wish.width}x{wish.height}"
        raise BadRequest(f"{wish.n} pictures of {size} are more than {limits.max_total_pixels} pixels", at("n"))
    _within(wish.partial_images, 0, limits.max_partial_images, at("partial_images"))
    _within(wish.preview_every, 0, limits.max_steps, at("preview_every"))
    if wish.partial_images and wish.preview_every:
        raise BadRequest("either partial_images or preview_every", at("preview_every"))


def _check_scales(wish: Wish, at: Place) -> None:
    _within(wish.true_cfg_scale, 0.0, MAX_SCALE, at("true_cfg_scale"))
    _within(wish.lora_scale, -MAX_LORA_SCALE, MAX_LORA_SCALE, at("lora_scale"))
    if wish.guidance_scale is not None:
        _within(wish.guidance_scale, 0.0, MAX_SCALE, at("guidance_scale"))


def _within(value: float, low: float, high: float, field: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"must be from {low} to {high}, not {value}", field)
