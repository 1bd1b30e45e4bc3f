# SPDX-License-Identifier: Apache-2.0
"""Memory that requests need beside the weights, and which waiting requests are admitted.

Bytes follow from the sizes of the model and of the request. The factors below are the highest use by torch that was
measured (CPU; two random models and the shipped one; images of 64 to 1024 pixels per side), rounded up.
tests/reference/test_diffusion_memory.py measures them again.

From admission to its last image a run *holds* its state: features, latents, source images and their encodings. On top
of what all runs hold comes the largest single *operation* of any run: its share of a step, an encode or a decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.diffusion.image_params import FieldName, ImageSpec
from triton_omni.backends.diffusion.image_run import ImageRun, MemoryNeeds
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.text import Prompt
from triton_omni.backends.diffusion.upstream import DiffusionPipeline

STEP_WIDTHS = 16
"""Values per token in a step, in units of the transformer's width. Attention stores no table of all pairs."""
STEP_BYTES = 256 * 1024
"""Fixed bytes of a step: attention's tiles."""
STATE_LATENTS = 10
"""Tensors of a run that are as large as its latents: latents, noise, predictions, preview, mask."""
ONE_FRAME_WIDTHS = 8
STOCK_VAE_WIDTHS = 42
"""Values per pixel in the VAE, in units of its outermost layer's width: one-frame form and stock form."""
DECODED_PIXEL_BYTES = 24
"""A decoded pixel: three float32 values, twice during the conversion to uint8."""
TILE_PIXELS = 256 * 256
TEXT_WIDTHS = 20
"""Values per token in the text encoder, in units of its width, beside one width per layer output."""
VISION_WIDTHS = 48
"""The same per image patch, beside four widths of the feed-forward layer."""
FREE_MEMORY_SHARE = 0.9
"""Share of the free memory that is used if the deploy file sets no limit."""


class ImageMemory:
    """Computes memory needs for one model."""

    def __init__(self, pipe: DiffusionPipeline, options: DiffusionOptions, device: torch.device) -> None:
        available = free_bytes(device) - _offloaded_bytes(pipe, options.offload)
        self.limit_bytes = options.memory_bytes or int(FREE_MEMORY_SHARE * available)
        self._value_bytes = torch.finfo(getattr(torch, options.dtype)).bits // 8
        self._sequential, self._tiles = options.batching == "seq", options.vae_tiling
        config, text = pipe.transformer.config, pipe.text_encoder.config
        self._channels: int = config.in_channels
        self._width: int = config.num_attention_heads * config.attention_head_dim
        self._vae_width: int = pipe.vae.config.base_dim
        self._vae_widths = STOCK_VAE_WIDTHS if options.keeps_vae else ONE_FRAME_WIDTHS
        self._text_width: int = text.text_config.hidden_size
        self._text_widths = TEXT_WIDTHS + text.text_config.num_hidden_layers
        self._vision = text.vision_config

    def needs(self, spec: ImageSpec, prompts: Sequence[Prompt]) -> MemoryNeeds:
        """Bytes of one request."""
        state = STATE_LATENTS * spec.n * spec.image_tokens + 3 * spec.source_tokens  # sources: moments and latents
        text = sum(prompt.tokens for prompt in prompts)
        held = self._value_bytes * (state * self._channels + text * self._text_width) + self._patch_bytes(prompts[0])
        branches = [spec.n * (spec.image_tokens + spec.source_tokens + prompt.tokens) for prompt in prompts]
        tokens = max(branches) if self._sequential else sum(branches)
        step = STEP_BYTES + self._value_bytes * STEP_WIDTHS * self._width * tokens
        vae = max(self._vae_bytes(width * height) for width, height in ((spec.width, spec.height), *spec.source_sizes))
        decode = (vae + DECODED_PIXEL_BYTES * spec.width * spec.height) * (spec.n if self._sequential else 1)
        return MemoryNeeds(held, step, max(step, decode, *(self._encode_bytes(prompt) for prompt in prompts)))

    def check(self, spec: ImageSpec, prompts: Sequence[Prompt], at: FieldName) -> MemoryNeeds:
        """Needs of a request that fits when it runs alone; raises BadRequest naming the field that is too large."""
        needs = self.needs(spec, prompts)
        if needs.held + needs.peak <= self.limit_bytes:
            return needs
        one = self.needs(msgspec.structs.replace(spec, n=1), prompts)
        field = "n" if one.held + one.peak <= self.limit_bytes else "width"
        needed, limit = _megabytes(needs.held + needs.peak), _megabytes(self.limit_bytes)
        raise BadRequest(f"needs about {needed} of memory; this stage has {limit} for requests", at(field))

    def _vae_bytes(self, pixels: int) -> int:
        pixels = min(pixels, TILE_PIXELS) if self._tiles else pixels
        return self._value_bytes * self._vae_widths * self._vae_width * pixels

    def _encode_bytes(self, prompt: Prompt) -> int:
        """Bytes while the text encoder processes a prompt and its images."""
        text = self._value_bytes * self._text_widths * self._text_width * len(prompt.ids)
        per_patch = self._value_bytes * (VISION_WIDTHS * self._vision.hidden_size + 4 * self._vision.intermediate_size)
        return text + self._patch_bytes(prompt) + self._patches(prompt) * per_patch

    def _patch_bytes(self, prompt: Prompt) -> int:
        """Bytes of a prompt's images as float32 patches, held until all prompts are encoded."""
        vision = self._vision
        return 4 * self._patches(prompt) * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def _patches(self, prompt: Prompt) -> int:
        return prompt.image_tokens * self._vision.spatial_merge_size**2


def admit(ready: Sequence[ImageRun], admitted: Iterable[ImageRun], limit_bytes: int) -> tuple[list[ImageRun], int]:
    """Those of `ready` (sorted by priority) that fit into memory, and the bytes left for their step.

    Admitted runs stay. The first new run that does not fit blocks later ones, so that its turn comes.
    """
    needs = [image_run.needs for image_run in admitted]
    held, peak = sum(n.held for n in needs), max((n.peak for n in needs), default=0)
    fitting: list[ImageRun] = []
    is_open = True
    for image_run in ready:
        if not image_run.is_admitted:
            new_peak = max(peak, image_run.needs.peak)
            is_open = is_open and held + image_run.needs.held + new_peak <= limit_bytes
            if not is_open:
                continue
            held, peak = held + image_run.needs.held, new_peak
        fitting.append(image_run)
    return fitting, limit_bytes - held


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; on a CPU within this process's control group (cgroup v2)."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit_file = Path("/sys/fs/cgroup/memory.max")
    limit = limit_file.read_text().strip() if limit_file.is_file() else "max"
    if limit == "max":
        return available
    used = dict(line.split() for line in limit_file.with_name("memory.stat").read_text().splitlines())
    return min(available, int(limit) - int(used["anon"]))


def _offloaded_bytes(pipe: DiffusionPipeline, offload: str) -> int:
    """Largest weights that offload moves to the device while requests run."""
    networks = (pipe.transformer, pipe.vae, pipe.text_encoder)
    if offload == "none":
        return 0
    if offload == "model":
        return max(sum(p.nbytes for p in network.parameters()) for network in networks)
    layers = [layer for network in networks for layer in network.modules()]
    return max(sum(p.nbytes for p in layer.parameters(recurse=False)) for layer in layers)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
