# SPDX-License-Identifier: Apache-2.0
"""State of one request inside the engine. Stopping a request drops this object."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.outputs import ImagePiece
from triton_omni.backends.diffusion.image_params import ImageSpec
from triton_omni.backends.diffusion.options import SIZE_MULTIPLE
from triton_omni.backends.diffusion.text import EncodeTasks, Prompt


class InpaintState(NamedTuple):
    """Mask of an edit, (1, image tokens, channels), 1 where the image may change; and the initial latents."""

    mask: torch.Tensor
    noise: torch.Tensor


class MemoryNeeds(NamedTuple):
    """Bytes of a request (memory.py): for its whole life; its share of a step; and its largest single operation."""

    held: int
    step: int
    peak: int


@dataclass(eq=False, slots=True, kw_only=True)
class ImageRun:
    """One request; its `n` images share steps, scheduler and random stream.

    Set by `open`: run, spec, seed, prompt, negative_prompt, tokens, step_cost, arrival_tokens, needs.
    Set before the first step: encode_tasks, encoded (results by task), image_digests (of source images).
    Set by `ImageModel.prepare`: positive and negative (text features, (1, tokens, dim)), latents
    (n, image tokens, channels), scheduler, timesteps; for an edit condition (latents of the source images,
    (1, source tokens, channels)) and, with a mask, inpaint.
    Updated by each step: latents, step.
    """

    run: Run
    spec: ImageSpec
    seed: int
    prompt: Prompt
    negative_prompt: Prompt | None
    tokens: int
    step_cost: float
    arrival_tokens: int
    needs: MemoryNeeds
    encode_tasks: EncodeTasks = field(default_factory=EncodeTasks)
    encoded: dict[Hashable, torch.Tensor] = field(default_factory=dict[Hashable, torch.Tensor])
    image_digests: tuple[Hashable, ...] = ()
    positive: torch.Tensor | None = None
    negative: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    condition: torch.Tensor | None = None
    inpaint: InpaintState | None = None
    scheduler: Any = None
    timesteps: torch.Tensor | None = None
    step: int = 0

    @property
    def n(self) -> int:
        return self.spec.n

    @property
    def is_prepared(self) -> bool:
        return self.latents is not None

    @property
    def is_admitted(self) -> bool:
        """True if it holds memory."""
        return bool(self.encoded) or self.is_prepared

    @property
    def can_step(self) -> bool:
        return self.steps_left > 0 and not self.run.blocked

    @property
    def steps_left(self) -> int:
        return self.spec.steps - self.step

    @property
    def step_bytes(self) -> int:
        return self.needs.step

    @property
    def total_tokens(self) -> int:
        return self.tokens * self.spec.steps

    @property
    def batch_key(self) -> tuple[str, float, bytes]:
        """Runs of one forward use the same LoRA; a run with a step cache is not batched."""
        return (self.spec.lora, self.spec.lora_scale, self.run.id if self.spec.step_cache else b"")

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        """(frames, rows, columns) in tokens: of the generated image, then of each source image."""
        sizes = ((self.spec.width, self.spec.height), *self.spec.source_sizes)
        return tuple((1, height // SIZE_MULTIPLE, width // SIZE_MULTIPLE) for width, height in sizes)

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompt of each guidance branch."""
        return (self.prompt,) if self.negative_prompt is None else (self.prompt, self.negative_prompt)

    def branches(self) -> tuple[torch.Tensor, ...]:
        """Text features of each guidance branch, (1, tokens, dim)."""
        assert self.positive is not None
        return (self.positive,) if self.negative is None else (self.positive, self.negative)

    def timestep(self) -> torch.Tensor:
        """The current timestep, a scalar from 1000 down to 0."""
        assert self.timesteps is not None
        return self.timesteps[self.step]

    def current_latents(self) -> torch.Tensor:
        """(n, image tokens, channels); the run must be prepared."""
        assert self.latents is not None
        return self.latents

    def model_input(self) -> torch.Tensor:
        """Latents of each image, followed by those of the source images: (n, tokens, channels)."""
        latents = self.current_latents()
        if self.condition is None:
            return latents
        return torch.cat([latents, self.condition.expand(len(latents), -1, -1)], 1)


@dataclass(slots=True)
class PendingDecode:
    """Latents of a run that wait for the VAE, from `index` on: of final images, or of preview `partial`."""

    image_run: ImageRun
    latents: torch.Tensor
    index: int
    step: int
    partial: int | None


def image_piece(decode: PendingDecode, preview: str = "") -> ImagePiece:
    """What the next image of `decode` is."""
    spec = decode.image_run.spec
    return ImagePiece(
        index=decode.index,
        partial=decode.partial is not None,
        partial_image_index=decode.partial,
        preview=preview,
        step=decode.step,
        steps=spec.steps,
        seed=decode.image_run.seed,
        cfg_applied=spec.has_guidance,
        guidance_scale_applied=None if spec.guidance_scale is None else False,
        lora=spec.lora,
        step_cache=spec.step_cache,
    )


def usage(image_run: ImageRun) -> dict[str, float]:
    """Tokens, images and steps of a finished run."""
    spec = image_run.spec
    return {
        "prompt_tokens": image_run.prompt.tokens,
        "prompt_image_tokens": image_run.prompt.image_tokens,
        "completion_tokens": spec.n * spec.image_tokens,
        "images": spec.n,
        "steps": spec.steps,
    }
