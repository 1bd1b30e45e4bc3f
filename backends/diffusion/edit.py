# SPDX-License-Identifier: Apache-2.0
"""Source images of edits: text encoder features, VAE latents and masks, computed as by diffusers' edit pipelines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from math import prod

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from triton_omni.backends.core.generate import Part
from triton_omni.backends.diffusion.image_params import source_size
from triton_omni.backends.diffusion.image_run import ImageRun, InpaintState
from triton_omni.backends.diffusion.options import MAX_SOURCE_IMAGES
from triton_omni.backends.diffusion.text import EncodeTasks, Prompt, PromptTemplate, text_features
from triton_omni.backends.diffusion.upstream import (
    BatchFeature,
    DiagonalGaussianDistribution,
    DiffusionPipeline,
    QwenImageEditInpaintPipeline,
    QwenImageEditPlusPipeline,
)
from triton_omni.backends.diffusion.vae import ImageCodec

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"


class EditEncoder:
    """The part of an edit pipeline that reads source images; the rest is the same as for text-to-image.

    There are two kinds of checkpoints: an edit pipeline takes one image and an optional mask, an edit-plus pipeline
    takes several images.
    """

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, codec: ImageCodec, source_pixels: int) -> None:
        self._pipe, self._device, self._codec = pipe, device, codec
        is_plus = isinstance(pipe, QwenImageEditPlusPipeline)
        self.max_source_images = MAX_SOURCE_IMAGES if is_plus else 1
        self.mask_processor = None if is_plus else QwenImageEditInpaintPipeline(**pipe.components).mask_processor
        self._intro = f"Picture {{}}: {VISION}" if is_plus else VISION  # Edit Plus numbers its images
        self._encoder_pixels = source_pixels * 9 // 64 if is_plus else source_pixels  # 384 x 384 of 1024 x 1024
        self._template = PromptTemplate(
            pipe.tokenizer, pipe.prompt_template_encode.replace(VISION, ""), pipe.prompt_template_encode_start_idx
        )
        self._pad: int = pipe.tokenizer.convert_tokens_to_ids(PAD)

    def prompt(self, text: str, images: Sequence[Part]) -> Prompt:
        """The prompt in its template, with one pad token per image token of the text encoder."""
        plain = self._template.prompt(text, "".join(self._intro.format(i + 1) for i in range(len(images))))
        processor = self._pipe.processor.image_processor
        sizes = [source_size(part.shape, self._encoder_pixels) for part in images]
        patches = [processor.get_number_of_image_patches(height, width) for width, height in sizes]
        counts = [count // processor.merge_size**2 for count in patches]
        remaining = iter(counts)
        ids = [i for token in plain.ids for i in ([token] * next(remaining) if token == self._pad else [token])]
        return plain._replace(ids=tuple(ids), image_tokens=sum(counts))

    def encode_tasks(self, image_run: ImageRun) -> EncodeTasks:
        """Text features of each prompt with its images, and VAE moments of each source image."""
        arrays = [_pixels(image_run, part) for part in image_run.spec.source_images]
        image_run.image_digests = tuple((a.shape, hashlib.sha256(a.tobytes()).digest()) for a in arrays)
        patches = cache(lambda: self._patches([Image.fromarray(a) for a in arrays]))
        tasks: EncodeTasks = {
            (prompt, image_run.image_digests): partial(self._features, prompt, patches)
            for prompt in image_run.prompts()
        }
        for key, array in zip(_source_keys(image_run), arrays, strict=True):
            tasks[key] = partial(self._moments, array, key[1])
        return tasks

    def condition(self, image_run: ImageRun, generator: torch.Generator) -> torch.Tensor:
        """Latents of the source images, (1, source tokens, channels): the mode, or with a mask a random sample."""
        sampler = generator if image_run.spec.mask else None
        latents = [self._latents(image_run.encoded[key], sampler) for key in _source_keys(image_run)]
        return torch.cat(latents, dim=1)

    def inpaint_state(self, image_run: ImageRun) -> InpaintState:
        """The mask at latent resolution, and the initial latents."""
        spec, latents = image_run.spec, image_run.current_latents()
        assert spec.mask is not None and self.mask_processor is not None
        image = Image.fromarray(_pixels(image_run, spec.mask))
        mask = self.mask_processor.preprocess(image, height=spec.height, width=spec.width)
        factor: int = self._pipe.vae_scale_factor
        mask = F.interpolate(mask, size=(spec.height // factor, spec.width // factor)).to(latents)
        return InpaintState(self._pack(mask.expand(-1, latents.shape[-1] // 4, -1, -1)), latents)

    def _patches(self, images: Sequence[Image.Image]) -> BatchFeature:
        """The images as inputs of the text encoder."""
        sizes = [source_size((image.height, image.width), self._encoder_pixels) for image in images]
        resize = self._pipe.image_processor.resize
        small = [resize(image, height, width) for image, (width, height) in zip(images, sizes, strict=True)]
        return self._pipe.processor.image_processor(images=small, return_tensors="pt").to(self._device)

    def _features(self, prompt: Prompt, patches: Callable[[], BatchFeature]) -> torch.Tensor:
        """(1, prompt.tokens, dim)"""
        return text_features(self._pipe.text_encoder, prompt, self._device, **patches())

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        """(1, channels, …, rows, columns) to (1, tokens, channels · 4), the transformer's layout."""
        return self._pipe._pack_latents(latents.contiguous(), 1, latents.shape[1], *latents.shape[-2:])

    def _moments(self, pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> torch.Tensor:
        """Mean and log variance of the VAE for an image resized to (width, height)."""
        width, height = size
        image = self._pipe.image_processor.preprocess(Image.fromarray(pixels), height, width).unsqueeze(2)
        return self._codec.encode(image.to(self._device, self._pipe.text_encoder.dtype)).parameters

    def _latents(self, moments: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """(1, image tokens, channels); the mode if there is no generator."""
        distribution, config = DiagonalGaussianDistribution(moments), self._pipe.vae.config
        mean, std = (
            torch.tensor(v).view(1, -1, 1, 1, 1).to(moments) for v in (config.latents_mean, config.latents_std)
        )
        if generator is not None:  # diffusers' inpaint pipeline multiplies by the inverse, which rounds differently
            return self._pack((distribution.sample(generator) - mean) * (1.0 / std))
        return self._pack((distribution.mode() - mean) / std)


def _source_keys(image_run: ImageRun) -> list[tuple[Hashable, tuple[int, int]]]:
    """Encode task of each source image's latents."""
    return list(zip(image_run.image_digests, image_run.spec.source_sizes, strict=True))


def _pixels(image_run: ImageRun, part: Part) -> npt.NDArray[np.uint8]:
    """A source image or a mask of the request."""
    flat = np.frombuffer(image_run.run.inputs["image"].data, np.uint8)
    return flat[part.offset : part.offset + prod(part.shape)].reshape(part.shape)
