# SPDX-License-Identifier: Apache-2.0
"""Engine options of a diffusion stage in deploy.yaml. Imports no torch: the stub loads this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from triton_omni.backends.core.engine import OptionsError, read_engine_options

SIZE_MULTIPLE = 16
"""Width of an image token in pixels: the VAE's factor of 8 times the transformer's 2 x 2 patches. Checked at load."""
MAX_SIDE = 4096
MAX_SOURCE_IMAGES = 16
MAX_RATIO = 8
"""Longest allowed ratio of the sides of a source image."""

SHARED_CACHES = ("cache_backend", "cache_config", "cache_strategy", "enable_teacache", "teacache_params", "step_cache")
"""Names that other servers use for step caches whose state lives in the transformer."""
NO_SHARED_CACHE = (
    "TeaCache, cache-dit and similar caches keep their state in the transformer, which batched requests share; "
    "use the first-block cache, which keeps its state per request"
)

Count = Annotated[int, msgspec.Meta(ge=1)]


class ImageLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds of one request.

    min_steps          at least 2: with a fixed last sigma the schedule of one step divides zero by zero
    max_total_pixels   pixels of all `n` images of a request
    max_pixel_steps    work of a request: pixels of all images and source images, times steps and guidance branches
    max_source_images  images to edit that a request may bring; a checkpoint may allow fewer
    masks              whether a request may bring a mask; a checkpoint may not support it
    """

    max_pixels: Count = 2 * 1024 * 1024
    max_steps: Annotated[int, msgspec.Meta(ge=2, le=200)] = 200
    max_images: Annotated[int, msgspec.Meta(ge=1, le=10)] = 10
    max_partial_images: Annotated[int, msgspec.Meta(ge=0, le=3)] = 3
    max_total_pixels: Count = 8 * 1024 * 1024
    max_pixel_steps: Count = 100 * 8 * 1024 * 1024
    min_steps: Annotated[int, msgspec.Meta(ge=2)] = 2
    max_source_images: Annotated[int, msgspec.Meta(ge=0, le=MAX_SOURCE_IMAGES)] = 3
    masks: bool = True


class ImageDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values for requests that leave them out. Guidance needs a negative prompt; " " is a valid one.

    source_pixels  area in pixels that a source image is resized to, and the default size of the edited image
    """

    width: Count = 1024
    height: Count = 1024
    steps: Count = 50
    true_cfg_scale: float = 4.0
    negative_prompt: str | None = None
    lora: str = ""
    source_pixels: Annotated[int, msgspec.Meta(ge=128 * 128, le=MAX_SIDE * MAX_SIDE // MAX_RATIO)] = 1024 * 1024


class ParallelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Processes (ranks) of one instance that compute each forward together, each on its own GPU (parallel/ranks.py).

    cfg       number of ranks that share the guidance branches and images of a step
    context   number of ranks that share the tokens of every image; needs `batching: seq`; not together with cfg
    kind      attention across `context` ranks: ulysses (split by heads) or ring (bfloat16 on GPUs only)
    answer_s  response time-out of a rank in seconds; on expiry the worker restarts. Must be less than `hang_s`
    """

    cfg: Count = 1
    context: Count = 1
    kind: Literal["ulysses", "ring"] = "ulysses"
    answer_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0

    @property
    def ranks(self) -> int:
        return self.cfg * self.context


class DiffusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `engine:` section of a diffusion stage.

    model             folder in diffusers layout; "package:NAME" is a folder inside the pipeline's package
    batching          packed: any mix of requests in one forward; pad: requests of equal size only;
                      seq: one request per forward, bit for bit the arithmetic of diffusers' pipeline
    dtype             float32 or bfloat16
    threads           torch threads on a CPU; fixed, because results depend on the number
    step_overhead_tokens  fixed cost of a step, in tokens; requests are batched while that pays (scheduling.py).
                      0: measured at load for images of growing size, except with seq
    max_batch_tokens  tokens per forward, unless a single request needs more; 1: no batching; 0: unlimited
    max_prompt_tokens longest prompt in tokens, without the template's prefix
    memory_bytes      memory for running requests beside the weights. A request that needs more is refused; one that
                      needs more than is free waits. 0: nine tenths of the memory that is free after load
    cache_bytes       LRU cache of prompt features and of latents of source images
    vae_tiling        decode large images in tiles: less memory, blended seams, not exact
    loras             adapters by name: folders or files, resolved like `model`; a request selects one with `lora`
    step_cache_threshold  enables the request option `step_cache`; not exact; larger values skip more; 0: disabled
    compile           compile the repeated blocks on first use; not with `batching: packed`, which bypasses their calls
    offload           GPU only; model: move whole networks to host memory while unused (not with `batching: packed`);
                      sequential: move single layers (slow)
    parallel          ranks per instance
    """

    model: str
    batching: Literal["packed", "pad", "seq"] = "packed"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Count = 1
    step_overhead_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_batch_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_prompt_tokens: Count = 512
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 * 1024 * 1024
    vae_tiling: bool = False
    loras: dict[str, str] = {}
    step_cache_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    compile: bool = False
    offload: Literal["none", "model", "sequential"] = "none"
    parallel: ParallelOptions = ParallelOptions()
    limits: ImageLimits = ImageLimits()
    defaults: ImageDefaults = ImageDefaults()

    @property
    def keeps_vae(self) -> bool:
        """True if the stock VAE is used. The one-frame form (vae.py) supports neither tiling nor model offload."""
        return self.batching == "seq" or self.vae_tiling or self.offload == "model"


def read_options(options: Mapping[str, object], stage: str) -> DiffusionOptions:
    """Parse engine options; raises OptionsError naming the stage, the key and the nearest known key."""
    at = f"stage '{stage}', engine options: "
    for name in SHARED_CACHES:
        if name in options:
            raise OptionsError(f"{at}{name}: {NO_SHARED_CACHE}: `step_cache_threshold: 0.1`, for example")
    parsed = read_engine_options(options, DiffusionOptions, stage)
    for is_conflict, message in _conflicts(parsed):
        if is_conflict:
            raise OptionsError(at + message)
    return parsed


def _conflicts(options: DiffusionOptions) -> tuple[tuple[bool, str], ...]:
    """Pairs of (whether these options contradict one another, error message)."""
    packed, limits, defaults = options.batching == "packed", options.limits, options.defaults
    parallel = options.parallel
    return (
        (parallel.cfg > 1 and parallel.context > 1, "parallel: set either cfg or context, not both"),
        (parallel.context > 1 and options.batching != "seq",
         "parallel.context: splits one image at a time; set `batching: seq`"),
        (parallel.kind == "ring" and parallel.context == 1, "parallel.kind: ring: needs parallel.context > 1"),
        (parallel.kind == "ring" and options.dtype != "bfloat16", "parallel.kind: ring: set `dtype: bfloat16`"),
        *((parallel.ranks > 1 and is_set, f"{name}: not supported with parallel")
          for name, is_set in (("loras", bool(options.loras)),
                               ("step_cache_threshold", options.step_cache_threshold > 0),
                               ("compile", options.compile), ("offload", options.offload != "none"))),
        (options.compile and packed,
         "compile: a packed step does not call the compiled blocks; set `batching: pad` or `seq`"),
        (options.offload == "model" and packed, "offload: model: set `batching: pad` or `seq`, or offload: sequential"),
        (options.step_cache_threshold > 0 and not packed,
         "step_cache_threshold: needs `batching: packed`, which keeps the cache of a request apart from others"),
        (options.step_cache_threshold > 0 and options.offload != "none",
         "step_cache_threshold: not supported with offload"),
        (bool(defaults.lora) and defaults.lora not in options.loras, f"defaults.lora: loras has no '{defaults.lora}'"),
        (defaults.width * defaults.height > limits.max_pixels, "defaults.width, height: more than limits.max_pixels"),
        (limits.max_total_pixels < limits.max_pixels, "limits.max_total_pixels: less than limits.max_pixels"),
        (2 * defaults.steps * defaults.width * defaults.height > limits.max_pixel_steps,
         "defaults.width, height, steps: more than limits.max_pixel_steps"),
        (not limits.min_steps <= defaults.steps <= limits.max_steps,
         "defaults.steps: must be from limits.min_steps to limits.max_steps"),
    )  # fmt: skip
