# SPDX-License-Identifier: Apache-2.0
"""How much memory a drawing needs, beside the weights, and who may come in while others are there.

Bytes follow from the sizes of the model and of the request; the factors below were measured as the most that torch held
at one time (CPU; two random models and the shipped one; pictures of 64 to 1024 pixels), and rounded up.
tests/reference/test_diffusion_memory.py measures them again.

A drawing *holds* its state (features, latents, pictures to edit and what is made of them) from its first piece to its
last picture, and *works* beside all that is held: in a step with others, when it encodes or decodes by itself. So what
is held and the greatest work of anybody who is in have to fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.diffusion.image_params import Wish
from triton_omni.backends.diffusion.image_run import Drawing, Needs
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.text import Prompt

STEP_WIDTHS = 16
"""Numbers a token needs in a step, in widths of the transformer. Attention keeps no table of all pairs."""
STEP_BYTES = 256 * 1024
"""Beside that in every step: attention's tiles."""
STATE_LATENTS = 10
"""Latents, noise, predictions of both branches, a preview, a mask, each as large as the latents."""
PLAIN_WIDTHS = 8
VIDEO_WIDTHS = 42
"""Numbers a pixel needs in the VAE, in widths of its outermost layer: in its one-frame form, and in its own."""
PICTURE_BYTES = 24
"""A pixel that was decoded, as three float32 and once more as it is turned into bytes."""
TILE_PIXELS = 256 * 256
TEXT_WIDTHS = 20
"""Numbers a token needs in the text encoder, in its widths, beside one width for each layer's output."""
VISION_WIDTHS = 48
"""The same for a patch of a picture, and four widths of the feed-forward layer."""
SPARE = 0.9
"""Part of the free memory that is used where the deploy file does not say how much."""


class Memory:
    """The bytes of one model's drawings."""

    def __init__(self, pipe: Any, options: DiffusionOptions, device: torch.device) -> None:
        self.most = options.memory_bytes or int(SPARE * (free_bytes(device) - _visiting_bytes(pipe, options.offload)))
        self._number = torch.finfo(getattr(torch, options.dtype)).bits // 8
        self._one_by_one, self._tiles = options.batching == "seq", options.vae_tiling
        config, text = pipe.transformer.config, pipe.text_encoder.config
        self._channels: int = config.in_channels
        self._width: int = config.num_attention_heads * config.attention_head_dim
        self._vae_width: int = pipe.vae.config.base_dim
        self._vae_widths = VIDEO_WIDTHS if options.keeps_vae else PLAIN_WIDTHS
        self._text_width: int = text.text_config.hidden_size
        self._text_widths = TEXT_WIDTHS + text.text_config.num_hidden_layers
        self._vision = text.vision_config

    def needs(self, wish: Wish, prompts: Sequence[Prompt]) -> Needs:
        """Bytes of one drawing."""
        state = STATE_LATENTS * wish.n * wish.picture_tokens + 3 * wish.source_tokens  # moments of sources, and latents
        text = sum(prompt.tokens for prompt in prompts)
        held = self._number * (state * self._channels + text * self._text_width) + self._viewed(prompts[0])
        branches = [wish.n * (wish.picture_tokens + wish.source_tokens + prompt.tokens) for prompt in prompts]
        tokens = max(branches) if self._one_by_one else sum(branches)
        step = STEP_BYTES + self._number * STEP_WIDTHS * self._width * tokens
        vae = max(self._vae(width * height) for width, height in ((wish.width, wish.height), *wish.sources))
        decode = (vae + PICTURE_BYTES * wish.width * wish.height) * (wish.n if self._one_by_one else 1)
        return Needs(held, step, max(step, decode, *(self._encode(prompt) for prompt in prompts)))

    def check(self, wish: Wish, prompts: Sequence[Prompt], at: str) -> Needs:
        """The needs of a drawing that fits by itself; raises BadRequest naming what is too large."""
        needs = self.needs(wish, prompts)
        if needs.held + needs.alone <= self.most:
            return needs
        one = self.needs(msgspec.structs.replace(wish, n=1), prompts)
        field = "n" if one.held + one.alone <= self.most else "width"
        needed = f"needs about {_megabytes(needs.held + needs.alone)} of memory"
        raise BadRequest(f"{needed}; this stage has {_megabytes(self.most)} for drawings", f"{at}.{field}")

    def _vae(self, pixels: int) -> int:
        seen = min(pixels, TILE_PIXELS) if self._tiles else pixels
        return self._number * self._vae_widths * self._vae_width * seen

    def _encode(self, prompt: Prompt) -> int:
        """Bytes while the text encoder looks at a prompt and its pictures."""
        text = self._number * self._text_widths * self._text_width * len(prompt.ids)
        layers = self._number * (VISION_WIDTHS * self._vision.hidden_size + 4 * self._vision.intermediate_size)
        return text + self._viewed(prompt) + self._patches(prompt) * layers

    def _viewed(self, prompt: Prompt) -> int:
        """Bytes of a prompt's pictures as the text encoder takes them, in float32: there until all are encoded."""
        vision = self._vision
        return 4 * self._patches(prompt) * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def _patches(self, prompt: Prompt) -> int:
        return prompt.picture_tokens * self._vision.spatial_merge_size**2


def fitting(waiting: Sequence[Drawing], inside: Iterable[Drawing], most: int) -> tuple[list[Drawing], int]:
    """Those of `waiting` (by need) that there is memory for, and the bytes left for a step of theirs.

    Who is inside stays. The first newcomer that does not fit keeps later ones out, so that its turn comes.
    """
    needs = [drawing.needs for drawing in inside]
    held, work = sum(n.held for n in needs), max((n.alone for n in needs), default=0)
    found: list[Drawing] = []
    is_open = True
    for drawing in waiting:
        if not drawing.is_inside:
            work_then = max(work, drawing.needs.alone)
            is_open = is_open and held + drawing.needs.held + work_then <= most
            if not is_open:
                continue
            held, work = held + drawing.needs.held, work_then
        found.append(drawing)
    return found, most - held


def free_bytes(device: torch.device) -> int:
    """What a device has free now; on a CPU within this process's control group."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup/memory.max")
    most = group.read_text().strip() if group.is_file() else "max"
    if most == "max":
        return free
    used = dict(line.split() for line in group.with_name("memory.stat").read_text().splitlines())
    return min(free, int(most) - int(used["anon"]))


def _visiting_bytes(pipe: Any, offload: str) -> int:
    """Weights that are elsewhere now, and come to the device while drawings are there."""
    networks = (pipe.transformer, pipe.vae, pipe.text_encoder)
    if offload == "none":
        return 0
    if offload == "model":
        return max(sum(p.nbytes for p in network.parameters()) for network in networks)
    layers = [layer for network in networks for layer in network.modules()]
    return max(sum(p.nbytes for p in layer.parameters(recurse=False)) for layer in layers)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
