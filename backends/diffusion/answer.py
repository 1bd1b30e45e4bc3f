# SPDX-License-Identifier: Apache-2.0
"""What a client gets of a drawing: pictures and previews as they fall due, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from triton_omni.backends.diffusion.image_params import Wish
from triton_omni.backends.diffusion.image_run import Drawing


@dataclass(slots=True)
class Decode:
    """Pictures of a drawing that wait for the VAE, from `index` on: finished ones, or preview number `partial`."""

    drawing: Drawing
    latents: torch.Tensor
    index: int
    step: int
    partial: int | None


def due_previews(wish: Wish) -> list[int]:
    """Steps after which a preview is made, evenly spread and none after the last."""
    if wish.preview_every:
        return list(range(wish.preview_every, wish.steps, wish.preview_every))
    parts = wish.partial_images + 1
    return sorted({max(1, wish.steps * k // parts) for k in range(1, parts)} - {wish.steps})


def meta(decode: Decode) -> dict[str, Any]:
    """Facts about a picture."""
    drawing = decode.drawing
    found: dict[str, Any] = {
        "index": decode.index, "partial": decode.partial is not None, "step": decode.step, "steps": drawing.wish.steps,
        "seed": drawing.seed, "cfg_applied": drawing.wish.has_guidance,
    }  # fmt: skip
    if drawing.wish.lora:
        found["lora"] = drawing.wish.lora
    if drawing.wish.step_cache:
        found["step_cache"] = True
    if decode.partial is not None:
        found["partial_image_index"] = decode.partial
    if drawing.wish.guidance_scale is not None:
        found["guidance_scale_applied"] = False
    return found


def usage(drawing: Drawing) -> dict[str, float]:
    """What a drawing took, in tokens, pictures and steps."""
    wish = drawing.wish
    return {
        "prompt_tokens": drawing.prompt.tokens,
        "prompt_image_tokens": drawing.prompt.picture_tokens,
        "completion_tokens": wish.n * wish.picture_tokens,
        "images": wish.n,
        "steps": wish.steps,
    }
