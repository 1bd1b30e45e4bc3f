# SPDX-License-Identifier: Apache-2.0
"""What deploy.yaml may say about a diffusion stage. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.hints import nearest_key

SIZE_MULTIPLE = 16
"""Pixels a token is wide: the VAE's factor 8 times the transformer's 2 x 2 patches. The loader checks the model."""
MAX_SIDE = 4096
MAX_PICTURES = 16
MAX_RATIO = 8
"""One side of a picture to edit to the other, at most."""

SHARED_CACHES = ("cache_backend", "cache_config", "cache_strategy", "enable_teacache", "teacache_params", "step_cache")
"""What other servers call step caches that live in the transformer; `step_cache` if it is to name one of these."""
NO_SHARED_CACHE = (
    "TeaCache, cache-dit and the like keep what they saw in the transformer, where requests that share steps would "
    "meet. The one cache kept for each request by itself is the first-block cache"
)

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


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks of one instance: processes that compute its forwards together, each with a GPU of its own (ranks.py).

    cfg       so many ranks share the guidance branches and pictures of a step
    context   instead: so many ranks share the tokens of every picture; with `batching: seq`
    kind      how these meet in attention: ulysses (each has some heads) or ring (bfloat16 on GPUs only)
    answer_s  a rank that owes an answer for so long is taken for dead, and the worker starts anew; less than `hang_s`
    """

    cfg: Count = 1
    context: Count = 1
    kind: Literal["ulysses", "ring"] = "ulysses"
    answer_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0

    @property
    def ranks(self) -> int:
        return self.cfg * self.context


class DiffusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `engine:` section of a diffusion stage in deploy.yaml; every default is here.

    model             folder in diffusers layout; "package:NAME" is a folder of the pipeline itself
    batching          packed: any mix in one forward; pad: equal sizes only; seq: the stock arithmetic, one by one
    dtype             float32 or bfloat16
    threads           torch threads on a CPU, fixed because results depend on it
    step_overhead_tokens  tokens that cost as much as a step costs anyway; runs share a step where that pays
                      (fairness.py); 0: measured when loading, for pictures of growing size, but one by one with seq
    max_batch_tokens  tokens one forward may hold, unless a single run needs more; 1: one by one; 0: no bound
    max_prompt_tokens longest prompt, counted after the template
    memory_bytes      what drawings may need at one time, beside the weights; who needs more is refused, who needs more
                      than is left waits; 0: nine tenths of what is free when the model has loaded
    cache_bytes       features of prompts and latents of pictures to edit that are kept, the newest used
    vae_tiling        decode large pictures in tiles (needs less memory; seams are blended, not exact)
    loras             adapters by name: folders or files, looked up like models; a request names one (`lora`)
    step_cache_threshold  lets requests skip parts of steps (`step_cache`; not exact); larger skips more; 0: refuse
    compile           compile the repeated blocks when first used; not with `batching: packed`, which does not call them
    offload           on a GPU: keep in memory what is not in use; model: whole networks (not with `batching: packed`,
                      which does not call the whole), sequential: layers (slow)
    parallel          more than one rank for an instance, each with one of its GPUs
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
    parallel: Parallel = Parallel()
    limits: Limits = Limits()
    defaults: Defaults = Defaults()

    @property
    def keeps_vae(self) -> bool:
        """True if the VAE is used as it is, not in its one-frame form (vae.py), which knows no tiles and no offload."""
        return self.batching == "seq" or self.vae_tiling or self.offload == "model"


def read_options(options: Mapping[str, Any], stage: str) -> DiffusionOptions:
    """Typed engine options; raises OptionsError naming the stage, the key and the nearest known key."""
    for name in SHARED_CACHES:
        if name in options:
            raise OptionsError(
                f"stage '{stage}', engine options: {name}: {NO_SHARED_CACHE}: `step_cache_threshold: 0.1`, say"
            )
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
    parallel = options.parallel
    return (
        (parallel.cfg > 1 and parallel.context > 1, "parallel: either cfg or context"),
        (parallel.context > 1 and options.batching != "seq",
         "parallel.context: shares one picture at a time; say `batching: seq`"),
        (parallel.kind == "ring" and parallel.context == 1, "parallel.kind: ring: says how ranks of `context` meet"),
        (parallel.kind == "ring" and options.dtype != "bfloat16", "parallel.kind: ring: say `dtype: bfloat16`"),
        *((parallel.ranks > 1 and bool(given), f"{name}: not with parallel, whose other ranks know nothing of it")
          for name, given in (("loras", options.loras), ("step_cache_threshold", options.step_cache_threshold),
                              ("compile", options.compile), ("offload", options.offload != "none"))),
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
    known = [name for kind in (DiffusionOptions, Limits, Defaults, Parallel) for name in kind.__struct_fields__]
    return nearest_key(message, known)
