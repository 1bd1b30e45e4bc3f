# SPDX-License-Identifier: Apache-2.0
"""The state of one run: the one object that stopping a run drops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backends.core.engine import Run
from backends.diffusion.options import SIZE_MULTIPLE, Wish


@dataclass(eq=False, slots=True)
class Drawing:
    """One request inside the engine; its `n` pictures share steps, scheduler and random stream.

    Set at open: run, wish, seed, prompt and negative ids, tokens, came_at. Set by the engine's `_prepare`:
    positive, negative (features (1, tokens, dim)), latents (n, image tokens, channels), scheduler, timesteps.
    Set by each step: latents, step.
    """

    run: Run
    wish: Wish
    seed: int
    prompt_ids: tuple[int, ...]
    negative_ids: tuple[int, ...] | None
    prompt_tokens: int
    tokens: int
    came_at: int
    positive: torch.Tensor | None = None
    negative: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    scheduler: Any = None
    timesteps: torch.Tensor | None = None
    step: int = 0

    @property
    def is_prepared(self) -> bool:
        return self.latents is not None

    @property
    def steps_left(self) -> int:
        return self.wish.steps - self.step

    @property
    def work(self) -> int:
        """Tokens of all its steps."""
        return self.tokens * self.wish.steps

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of image tokens."""
        return (1, self.wish.height // SIZE_MULTIPLE, self.wish.width // SIZE_MULTIPLE)

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
