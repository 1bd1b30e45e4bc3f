# SPDX-License-Identifier: Apache-2.0
"""Pictures to edit: what the text encoder and the transformer see of them, as diffusers' edit pipelines make it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from triton_omni.backends.core.generate import Part
from triton_omni.backends.diffusion.description import source_size
from triton_omni.backends.diffusion.encoding import Pieces
from triton_omni.backends.diffusion.image_run import Drawing, Kept
from triton_omni.backends.diffusion.options import MAX_PICTURES
from triton_omni.backends.diffusion.text import Prompt, Template, features
from triton_omni.backends.diffusion.upstream import (
    DiagonalGaussianDistribution,
    QwenImageEditInpaintPipeline,
    QwenImageEditPlusPipeline,
)
from triton_omni.backends.diffusion.vae import Codec

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"


class Editor:
    """The part of an edit pipeline that looks at pictures; the rest of the work is that of any drawing.

    There are two kinds of checkpoints: those that take one picture, and a mask, and those that take several.
    """

    def __init__(self, pipe: Any, device: torch.device, codec: Codec, source_pixels: int) -> None:
        self._pipe, self._device, self._codec = pipe, device, codec
        takes_several = isinstance(pipe, QwenImageEditPlusPipeline)
        self.max_pictures = MAX_PICTURES if takes_several else 1
        self.masks = None if takes_several else QwenImageEditInpaintPipeline(**pipe.components).mask_processor
        self._intro = f"Picture {{}}: {VISION}" if takes_several else VISION
        self._seen_pixels = source_pixels * 9 // 64 if takes_several else source_pixels  # 384 x 384 of 1024 x 1024
        self._template = Template(
            pipe.tokenizer, pipe.prompt_template_encode.replace(VISION, ""), pipe.prompt_template_encode_start_idx
        )
        self._pad: int = pipe.tokenizer.convert_tokens_to_ids(PAD)

    def prompt(self, text: str, pictures: Sequence[Part]) -> Prompt:
        """The prompt in its template, with as many tokens for each picture as the encoder makes of it."""
        plain = self._template.prompt(text, "".join(self._intro.format(i + 1) for i in range(len(pictures))))
        viewer = self._pipe.processor.image_processor
        sizes = [source_size(part.shape, self._seen_pixels) for part in pictures]
        counts = [viewer.get_number_of_image_patches(height, width) // viewer.merge_size**2 for width, height in sizes]
        left = iter(counts)
        ids = [i for token in plain.ids for i in ([token] * next(left) if token == self._pad else [token])]
        return plain._replace(ids=tuple(ids), picture_tokens=sum(counts))

    def pieces(self, drawing: Drawing) -> Pieces:
        """What the text encoder sees in the pictures, with each prompt, and what the VAE makes of each picture."""
        wish = drawing.wish
        pixels = [_pixels(drawing, part) for part in wish.pictures]
        drawing.digests = tuple((p.shape, hashlib.sha256(p.tobytes()).digest()) for p in pixels)
        seen = cache(lambda: self._seen([Image.fromarray(p) for p in pixels]))
        found: Pieces = {(p, drawing.digests): partial(self._features, p, seen) for p in drawing.prompts()}
        for key, array in zip(source_keys(drawing), pixels, strict=True):
            found[key] = partial(self._moments, array, key[1])
        return found

    def condition(self, drawing: Drawing, generator: torch.Generator) -> torch.Tensor:
        """Latents of the pictures, (1, their tokens, channels): the most likely ones, under a mask drawn at random."""
        dice = generator if drawing.wish.mask else None
        return torch.cat([self._latents(drawing.made[key], dice) for key in source_keys(drawing)], dim=1)

    def kept(self, drawing: Drawing) -> Kept:
        """The mask, one value per number of the latents."""
        wish, latents = drawing.wish, drawing.noisy()
        assert wish.mask is not None and self.masks is not None
        picture = Image.fromarray(_pixels(drawing, wish.mask))
        spread = self.masks.preprocess(picture, height=wish.height, width=wish.width)
        factor: int = self._pipe.vae_scale_factor
        mask = F.interpolate(spread, size=(wish.height // factor, wish.width // factor)).to(latents)
        return Kept(self._pack(mask.expand(-1, latents.shape[-1] // 4, -1, -1)), latents)

    def _seen(self, pictures: Sequence[Image.Image]) -> Any:
        """The pictures as the text encoder takes them."""
        sizes = [source_size((p.height, p.width), self._seen_pixels) for p in pictures]
        resize = self._pipe.image_processor.resize
        small = [resize(picture, height, width) for picture, (width, height) in zip(pictures, sizes, strict=True)]
        return self._pipe.processor.image_processor(images=small, return_tensors="pt").to(self._device)

    def _features(self, prompt: Prompt, seen: Callable[[], Any]) -> torch.Tensor:
        """(1, prompt.tokens, dim)"""
        return features(self._pipe.text_encoder, prompt, self._device, **seen())

    def _pack(self, spread: torch.Tensor) -> torch.Tensor:
        """(1, channels, …, rows, columns) as the transformer takes latents."""
        return self._pipe._pack_latents(spread.contiguous(), 1, spread.shape[1], *spread.shape[-2:])

    def _moments(self, pixels: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
        """The VAE's distribution of latents of a picture brought to (width, height)."""
        width, height = size
        source = self._pipe.image_processor.preprocess(Image.fromarray(pixels), height, width).unsqueeze(2)
        return self._codec.encode(source.to(self._device, self._pipe.text_encoder.dtype)).parameters

    def _latents(self, moments: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """(1, image tokens, channels); without a generator the most likely ones."""
        found, config = DiagonalGaussianDistribution(moments), self._pipe.vae.config
        mean, std = (
            torch.tensor(v).view(1, -1, 1, 1, 1).to(moments) for v in (config.latents_mean, config.latents_std)
        )
        if generator is not None:  # the inpaint pipeline multiplies, which rounds otherwise
            return self._pack((found.sample(generator) - mean) * (1.0 / std))
        return self._pack((found.mode() - mean) / std)


def source_keys(drawing: Drawing) -> list[tuple[Hashable, tuple[int, int]]]:
    """Which pieces the latents of its pictures are made of."""
    return list(zip(drawing.digests, drawing.wish.sources, strict=True))


def _pixels(drawing: Drawing, part: Part) -> np.ndarray:
    """A picture or a mask of the request."""
    flat = np.frombuffer(drawing.run.inputs["image"].data, np.uint8)
    return flat[part.offset : part.offset + int(np.prod(part.shape))].reshape(part.shape)
