# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of Qwen-Image-Edit's two kinds on disk: for one image and a mask, and for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.tiny_image import STAGE
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.generate import GenerateRequest, Message, Part
from triton_omni.backends.core.ids import new_run_id

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PREFIX = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n"
)
SOURCE_PIXELS = 128 * 128  # instead of 1024 x 1024


def save_tiny_edit(folder: Path, seed: int = 0, several: bool = False, sources_at_zero: bool = False) -> Path:
    """Write the checkpoint (4 MB, diffusers layout); equal seeds give equal weights."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    from triton_omni.backends.diffusion.upstream import QwenImageEditPipeline, QwenImageEditPlusPipeline
    from triton_omni.backends.tools.digits import small_model as small

    sizes = small.Sizes()
    tokenizer = small.make_tokenizer([PREFIX], SPECIAL)
    encoder = small.make_text_encoder(len(tokenizer), sizes, seed)
    ids: Any = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    start, end, image, video = ids
    encoder.config.vision_start_token_id, encoder.config.vision_end_token_id = start, end
    encoder.config.image_token_id, encoder.config.video_token_id = image, video
    vae, transformer = small.make_vae(sizes, seed + 1), small.make_transformer(sizes, seed + 2)
    if sources_at_zero:  # no weight more or less
        weights = transformer.state_dict()
        transformer: Any = type(transformer).from_config({**transformer.config, "zero_cond_t": True})
        transformer.load_state_dict(weights)
    vae.register_to_config(latents_mean=[0.1, -0.2, 0.3, 0.05], latents_std=[1.1, 0.7, 1.9, 1.3])
    viewer = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    processor = Qwen2VLProcessor(viewer, tokenizer, Qwen2VLVideoProcessor())
    kind = QwenImageEditPlusPipeline if several else QwenImageEditPipeline
    kind(small.make_scheduler(), vae, encoder, tokenizer, processor, transformer).save_pretrained(folder)
    return folder


def photo(width: int, height: int, seed: int = 0) -> np.ndarray:
    """A smooth image without repetition, (height, width, 3) uint8."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + c + seed) + c) + np.cos(y / (5 + c) + seed) for c in range(3)]
    return ((np.stack(waves, -1) + 2) * 63).astype(np.uint8)


def hole(width: int, height: int) -> np.ndarray:
    """A mask (height, width) uint8 that lets the right half change."""
    mask = np.zeros((height, width), np.uint8)
    mask[:, width // 2 :] = 255
    return mask


def edit_run(prompt: str, images: list[np.ndarray], mask: np.ndarray | None = None, **options: Any) -> Run:
    """A run of operation "edit" with these stage options."""
    items = [*images, *([] if mask is None else [mask])]
    parts: list[Part] = []
    for item in items:
        offset = sum(p.length for p in parts)
        parts.append(Part("image", offset=offset, length=item.size, shape=item.shape))
    message = Message("user", (*parts, Part("text", prompt)))
    request = GenerateRequest(operation="edit", messages=(message,), stages={STAGE: options})
    pixels = np.concatenate([item.reshape(-1) for item in items]) if items else np.zeros(0, np.uint8)
    run_id = new_run_id()
    inputs = {"image": Tensor.of("image", pixels)}
    return Run(run_id, run_id.hex()[:8], request, inputs, wanted=frozenset({"image"}))
