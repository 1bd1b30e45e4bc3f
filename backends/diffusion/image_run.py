# SPDX-License-Identifier: Apache-2.0
"""The state of one run: the one object that stopping a run drops."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from triton_omni.backends.core.engine import Run
from triton_omni.backends.diffusion.encoding import Pieces
from triton_omni.backends.diffusion.image_params import Wish
from triton_omni.backends.diffusion.options import SIZE_MULTIPLE
from triton_omni.backends.diffusion.text import Prompt


class Kept(NamedTuple):
    """What a masked edit must not change: `mask` is 1 where it may, (1, image tokens, channels); `noise` is the
    drawing's first latents."""

    mask: torch.Tensor
    noise: torch.Tensor


class Needs(NamedTuple):
    """Bytes of a drawing (memory.py): held all the time; in a step; and the most it needs at any time by itself."""

    held: int
    step: int
    alone: int


@dataclass(eq=False, slots=True)
class Drawing:
    """One request inside the engine; its `n` pictures share steps, scheduler and random stream.

    Set at open: run, wish, seed, prompt and negative prompt, tokens, weight, came_at, needs. Set piece by piece before
    the first step: pieces, made (what is computed of these), and for an edit digests (of its pictures).
    Set by `Model.prepare`: positive, negative (features (1, tokens, dim)), latents (n, image tokens, channels),
    scheduler, timesteps, and for an edit condition (latents of its pictures, (1, their tokens, channels)) and, with a
    mask, kept. Set by each step: latents, step.
    """

    run: Run
    wish: Wish
    seed: int
    prompt: Prompt
    negative_prompt: Prompt | None
    tokens: int
    weight: float
    came_at: int
    needs: Needs
    pieces: Pieces = field(default_factory=Pieces)
    made: dict[Hashable, torch.Tensor] = field(default_factory=dict[Hashable, torch.Tensor])
    digests: tuple[Hashable, ...] = ()
    positive: torch.Tensor | None = None
    negative: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    condition: torch.Tensor | None = None
    kept: Kept | None = None
    scheduler: Any = None
    timesteps: torch.Tensor | None = None
    step: int = 0

    @property
    def n(self) -> int:
        return self.wish.n

    @property
    def is_prepared(self) -> bool:
        return self.latents is not None

    @property
    def is_inside(self) -> bool:
        """True if it holds memory."""
        return bool(self.made) or self.is_prepared

    @property
    def step_bytes(self) -> int:
        return self.needs.step

    @property
    def steps_left(self) -> int:
        return self.wish.steps - self.step

    @property
    def work(self) -> int:
        """Tokens of all its steps."""
        return self.tokens * self.wish.steps

    @property
    def manner(self) -> tuple[str, float, int]:
        """What runs of one forward must have in common: the LoRA, and no step cache, or they are one."""
        return (self.wish.lora, self.wish.lora_scale, id(self) if self.wish.step_cache else 0)

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        """Frames, rows and columns of image tokens: of what is drawn, then of the pictures it comes from."""
        sizes = ((self.wish.width, self.wish.height), *self.wish.sources)
        return tuple((1, height // SIZE_MULTIPLE, width // SIZE_MULTIPLE) for width, height in sizes)

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompt, and the negative prompt if it counts."""
        return (self.prompt,) if self.negative_prompt is None else (self.prompt, self.negative_prompt)

    def branches(self) -> tuple[torch.Tensor, ...]:
        """Text features of each guidance branch: with the prompt, and with the negative prompt if it counts."""
        assert self.positive is not None
        return (self.positive,) if self.negative is None else (self.positive, self.negative)

    def time(self) -> torch.Tensor:
        """The current timestep, a scalar."""
        assert self.timesteps is not None
        return self.timesteps[self.step]

    def noisy(self) -> torch.Tensor:
        """The latents, known to exist."""
        assert self.latents is not None
        return self.latents

    def seen(self) -> torch.Tensor:
        """What the transformer sees of each picture: its latents, then those of the pictures it comes from."""
        latents = self.noisy()
        return (
            latents if self.condition is None else torch.cat([latents, self.condition.expand(len(latents), -1, -1)], 1)
        )
