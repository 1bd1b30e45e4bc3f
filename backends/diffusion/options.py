# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of a diffusion stage, and what deploy.yaml may say about it. No torch here.

`read_wish` holds every rule that needs no model: a pipeline's `check` calls it in the thin stub, before any stage
works, and the engine calls it again, with the deploy file's limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from backends.core.engine import OptionsError
from backends.core.errors import BadRequest
from backends.core.generate import GenerateRequest, Part
from backends.core.hints import blamed, nearest_key

MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARS = 32_000
SIZE_MULTIPLE = 16
"""Pixels a token is wide: the VAE's factor 8 times the transformer's 2 x 2 patches. The loader checks the model."""
MIN_SIDE = 32
MAX_SIDE = 4096
MAX_SCALE = 20.0
MAX_LORA_SCALE = 4.0
MAX_PICTURES = 16
MAX_RATIO = 8
SOURCE_MULTIPLE = 32
"""Pictures to edit are brought to sides of whole 32 pixels."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request may cost on this machine.

    A schedule with a fixed last sigma divides zero by zero for one step, so there are at least two.
    max_pictures counts the pictures that a request brings to be edited, masks says whether they may be edited in part;
    the checkpoint may allow less.
    """

    max_pixels: Count = 2 * 1024 * 1024
    max_steps: Annotated[int, msgspec.Meta(ge=2, le=200)] = 200
    max_images: Annotated[int, msgspec.Meta(ge=1, le=10)] = 10
    max_partial_images: Annotated[int, msgspec.Meta(ge=0, le=3)] = 3
    max_total_pixels: Count = 8 * 1024 * 1024
    min_steps: Annotated[int, msgspec.Meta(ge=2)] = 2
    max_pictures: Annotated[int, msgspec.Meta(ge=0, le=MAX_PICTURES)] = 3
    masks: bool = True


class Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request that says nothing gets. Guidance works only against a negative prompt; " " is one.

    source_pixels is the area that a picture to edit is brought to, whatever it was, and the size of the edited one.
    """

    width: Count = 1024
    height: Count = 1024
    steps: Count = 50
    true_cfg_scale: float = 4.0
    negative_prompt: str | None = None
    lora: str = ""
    source_pixels: Annotated[int, msgspec.Meta(ge=128 * 128, le=MAX_SIDE * MAX_SIDE // MAX_RATIO)] = 1024 * 1024


class DiffusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `engine:` section of a diffusion stage in deploy.yaml; every default is here.

    model             folder in diffusers layout; "package:NAME" is a folder of the pipeline itself
    batching          packed: any mix in one forward; pad: equal sizes only; seq: the stock arithmetic, one by one
    dtype             float32 or bfloat16
    threads           torch threads on a CPU, fixed because results depend on it
    step_overhead_tokens  tokens that cost as much as a step costs anyway; runs share a step where that pays
                      (fairness.py); 0: measured when loading, for pictures of growing size
    max_batch_tokens  tokens one forward may hold, unless a single run needs more; 1: one by one; 0: no bound
    max_prompt_tokens longest prompt, counted after the template
    text_cache        prompts whose features are kept
    vae_tiling        decode large pictures in tiles (needs less memory; seams are blended, not exact)
    loras             adapters by name: folders or files, looked up like models; a request names one (`lora`)
    step_cache_threshold  lets requests skip parts of steps (`step_cache`; not exact); larger skips more; 0: refuse
    compile           compile the repeated blocks when first used; not with `batching: packed`, which does not call them
    offload           on a GPU: keep in memory what is not in use; model: whole networks (not with `batching: packed`,
                      which does not call the whole), sequential: layers (slow)
    """

    model: str
    batching: Literal["packed", "pad", "seq"] = "packed"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Count = 1
    step_overhead_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_batch_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_prompt_tokens: Count = 512
    text_cache: Annotated[int, msgspec.Meta(ge=0)] = 32
    vae_tiling: bool = False
    loras: dict[str, str] = {}
    step_cache_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    compile: bool = False
    offload: Literal["none", "model", "sequential"] = "none"
    limits: Limits = Limits()
    defaults: Defaults = Defaults()


def read_options(options: Mapping[str, Any], stage: str) -> DiffusionOptions:
    """Typed engine options; raises OptionsError naming the stage, the key and the nearest known key."""
    try:
        found = msgspec.convert(dict(options), DiffusionOptions)
    except msgspec.ValidationError as error:
        raise OptionsError(f"stage '{stage}', engine options: {error}{_hint(str(error))}") from None
    for clash, why in _clashes(found):
        if clash:
            raise OptionsError(f"stage '{stage}', engine options: {why}")
    return found


def _clashes(options: DiffusionOptions) -> tuple[tuple[bool, str], ...]:
    """Options that contradict one another."""
    packed, limits, defaults = options.batching == "packed", options.limits, options.defaults
    return (
        (options.compile and packed, "compile: a packed step does not call the blocks; say `batching: pad` or `seq`"),
        (options.offload == "model" and packed, "offload: model: say `batching: pad` or `seq`, or sequential"),
        (options.step_cache_threshold > 0 and not packed,
         "step_cache_threshold: only beside `batching: packed` can a run's cache be kept apart from others"),
        (options.step_cache_threshold > 0 and options.offload != "none", "step_cache_threshold: not with offload"),
        (bool(defaults.lora) and defaults.lora not in options.loras, f"defaults.lora: loras has no '{defaults.lora}'"),
        (defaults.width * defaults.height > limits.max_pixels, "defaults.width, height: more than limits.max_pixels"),
        (limits.max_total_pixels < limits.max_pixels, "limits.max_total_pixels: less than limits.max_pixels"),
        (not limits.min_steps <= defaults.steps <= limits.max_steps, "defaults.steps: outside the limits"),
    )  # fmt: skip


def _hint(message: str) -> str:
    known = (*DiffusionOptions.__struct_fields__, *Limits.__struct_fields__, *Defaults.__struct_fields__)
    return nearest_key(message, known)


# --- a request ------------------------------------------------------------------------------------------------
class ImageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's own options for the stage (`stages.<stage>`); None means the deploy default.

    guidance_scale   for guidance-distilled models; reported as not applied by others
    true_cfg_scale   classifier-free guidance against the negative prompt; 1 or less switches it off
    partial_images   previews on the way, evenly spread over the steps, decoded exactly
    preview_every    instead: a fast preview, colours only, after every so many steps
    lora, lora_scale one of the deploy file's adapters; "" is none
    step_cache       skip parts of steps where little changes; not exact, and the run steps alone
    """

    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    n: int = 1
    partial_images: int = 0
    preview_every: int = 0
    lora: str | None = None
    lora_scale: float = 1.0
    step_cache: bool = False


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
    options = _options(request.stages.get(stage, {}), stage)
    seed = options.seed if options.seed is not None else request.sampling.seed
    prompt, pictures, mask = _description(request, limits)
    sources = tuple(source_size(part.shape, defaults.source_pixels) for part in pictures)
    width, height = sources[-1] if sources else (defaults.width, defaults.height)
    wish = Wish(
        prompt=prompt,
        negative_prompt=options.negative_prompt if options.negative_prompt is not None else defaults.negative_prompt,
        width=options.width if options.width is not None else width,
        height=options.height if options.height is not None else height,
        steps=options.steps if options.steps is not None else defaults.steps,
        true_cfg_scale=options.true_cfg_scale if options.true_cfg_scale is not None else defaults.true_cfg_scale,
        seed=seed,
        n=options.n,
        partial_images=options.partial_images,
        guidance_scale=options.guidance_scale,
        pictures=pictures,
        sources=sources,
        mask=mask,
        preview_every=options.preview_every,
        lora=options.lora if options.lora is not None else defaults.lora,
        lora_scale=options.lora_scale,
        step_cache=options.step_cache,
    )
    at = f"stages.{stage}"
    if mask is not None and (wish.width, wish.height) != (width, height):
        raise BadRequest(f"with a mask the edited picture is {width}x{height}", f"{at}.width")
    _check_size(wish, limits, at)
    _within(wish.steps, limits.min_steps, limits.max_steps, f"{at}.steps")
    _within(wish.n, 1, limits.max_images, f"{at}.n")
    _within(wish.partial_images, 0, limits.max_partial_images, f"{at}.partial_images")
    _within(wish.preview_every, 0, limits.max_steps, f"{at}.preview_every")
    if wish.partial_images and wish.preview_every:
        raise BadRequest("either partial_images or preview_every", f"{at}.preview_every")
    _within(wish.lora_scale, -MAX_LORA_SCALE, MAX_LORA_SCALE, f"{at}.lora_scale")
    if wish.n * wish.width * wish.height > limits.max_total_pixels:
        raise BadRequest(
            f"{wish.n} pictures of {wish.width}x{wish.height} are more than {limits.max_total_pixels} pixels", f"{at}.n"
        )
    _within(wish.true_cfg_scale, 0.0, MAX_SCALE, f"{at}.true_cfg_scale")
    if wish.guidance_scale is not None:
        _within(wish.guidance_scale, 0.0, MAX_SCALE, f"{at}.guidance_scale")
    if seed is not None:
        _within(seed, 0, MAX_SEED, f"{at}.seed" if options.seed is not None else "sampling.seed")
    if len(options.negative_prompt or "") > MAX_PROMPT_CHARS:
        raise BadRequest(f"longer than {MAX_PROMPT_CHARS} characters", f"{at}.negative_prompt")
    return wish


def _options(given: Mapping[str, Any], stage: str) -> ImageOptions:
    try:
        return msgspec.convert(dict(given), ImageOptions)
    except msgspec.ValidationError as error:
        message, name = blamed(error)
        hint = nearest_key(message, ImageOptions.__struct_fields__)
        raise BadRequest(message + hint, f"stages.{stage}.{name}".rstrip(".")) from None


def _description(request: GenerateRequest, limits: Limits) -> tuple[str, tuple[Part, ...], Part | None]:
    """What to draw: `input`, or the text, pictures and mask of the last user message."""
    field = "input" if request.operation == "image" else "messages"
    text, pictures, mask = request.input, (), None
    if field == "messages":
        places = [i for i, message in enumerate(request.messages) if message.role == "user"]
        if not places:
            raise BadRequest("there is no user message to draw", field)
        parts = request.messages[places[-1]].parts
        text = "".join(part.text for part in parts)
        pictures, mask = _pictures(parts, f"messages[{places[-1]}]", limits)
        if request.operation == "edit" and not pictures:
            raise BadRequest("an edit needs a picture", field)
    if not text.strip():
        raise BadRequest("a picture needs a description", field)
    if len(text) > MAX_PROMPT_CHARS:
        raise BadRequest(f"a description may have {MAX_PROMPT_CHARS} characters, not {len(text)}", field)
    return text, pictures, mask


def _pictures(parts: Sequence[Part], field: str, limits: Limits) -> tuple[tuple[Part, ...], Part | None]:
    """Pictures, and the mask if there is one: a part of type "image" with rows and columns only."""
    pictures: list[Part] = []
    mask: Part | None = None
    for place, part in enumerate(parts):
        at = f"{field}.content[{place}]"
        if part.type not in ("text", "image"):
            raise BadRequest(f"this model draws from text and pictures, not from {part.type}", at)
        if part.type == "image" and not limits.max_pictures:
            raise BadRequest("this model draws from text only; it does not edit pictures", at)
        if part.type == "image" and len(part.shape) == 2 and mask is None:
            mask = part
            if not limits.masks:
                raise BadRequest("this model edits whole pictures; it takes no mask", at)
            if not pictures or part.shape != pictures[0].shape[:2]:
                raise BadRequest("a mask follows its picture and has its height and width", f"{at}.shape")
        elif part.type == "image":
            _check_picture(part, f"{at}.shape")
            pictures.append(part)
            if len(pictures) > limits.max_pictures:
                raise BadRequest(f"this model takes {limits.max_pictures} at a time", at)
    return tuple(pictures), mask


def _check_picture(part: Part, field: str) -> None:
    """The shape is height, width, 3, and neither side is so short that nothing is left of it."""
    if len(part.shape) != 3 or part.shape[-1] != 3 or min(part.shape) < 1:
        raise BadRequest(f"must be height, width, 3, not {list(part.shape)}", field)
    height, width = part.shape[:2]
    if max(height, width) > MAX_RATIO * min(height, width):
        raise BadRequest(f"{width}x{height}: one side may be {MAX_RATIO} times the other", field)


def source_size(shape: Sequence[int], pixels: int) -> tuple[int, int]:
    """(width, height) of about `pixels` with the proportions of a picture of this shape, as diffusers computes it."""
    ratio = shape[1] / shape[0]
    width = math.sqrt(pixels * ratio)
    return round(width / SOURCE_MULTIPLE) * SOURCE_MULTIPLE, round(width / ratio / SOURCE_MULTIPLE) * SOURCE_MULTIPLE


def _check_size(wish: Wish, limits: Limits, at: str) -> None:
    for name, side in (("width", wish.width), ("height", wish.height)):
        _within(side, MIN_SIDE, MAX_SIDE, f"{at}.{name}")
        if side % SIZE_MULTIPLE:
            below = side // SIZE_MULTIPLE * SIZE_MULTIPLE
            raise BadRequest(
                f"{side} is not a multiple of {SIZE_MULTIPLE}; the nearest are {below} and {below + SIZE_MULTIPLE}",
                f"{at}.{name}",
            )
    if wish.width * wish.height > limits.max_pixels:
        raise BadRequest(
            f"{wish.width}x{wish.height} is more than the {limits.max_pixels} pixels this server draws", f"{at}.width"
        )


def _within(value: float, low: float, high: float, field: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"must be from {low} to {high}, not {value}", field)
