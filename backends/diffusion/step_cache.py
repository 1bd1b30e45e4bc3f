# SPDX-License-Identifier: Apache-2.0
"""First-block cache: skip most of the transformer in steps where its first block changes little. Not exact.

diffusers' hooks keep their state in the blocks, by context name. A packed forward bypasses the hooked calls, so other
runs are unaffected; a run with the cache is not batched and has one context per guidance branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from triton_omni.backends.diffusion.batching import SequentialForward
from triton_omni.backends.diffusion.forward import Prediction
from triton_omni.backends.diffusion.image_run import ImageRun
from triton_omni.backends.diffusion.upstream import FBC_LEADER, FirstBlockCacheConfig, ModelMixin


class StepCachedForward:
    """The stock arithmetic with a first-block cache per run and branch."""

    def __init__(self, transformer: ModelMixin, threshold: float) -> None:
        transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        self._stock = SequentialForward(
            transformer, lambda run, branch: transformer.cache_context(_context(cast(ImageRun, run), branch))
        )
        leader = transformer.transformer_blocks[0]._diffusers_hook.get_hook(FBC_LEADER)
        self.states: dict[str, object] = leader.state_manager._state_cache
        """State of diffusers' hooks by context."""

    def predict(self, runs: Sequence[ImageRun]) -> list[Prediction]:
        return self._stock.predict(runs)

    def drop(self, image_run: ImageRun) -> None:
        """Free the state of a run."""
        for branch in range(2):
            self.states.pop(_context(image_run, branch), None)


def _context(image_run: ImageRun, branch: int) -> str:
    return f"{image_run.run.id.hex()}-{branch}"
