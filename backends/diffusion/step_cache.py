# SPDX-License-Identifier: Apache-2.0
"""Steps that skip most of the transformer where its first block says that little has changed: faster, not exact.

diffusers' hooks keep what they saw in the blocks themselves, under the name of a context. A packed forward does not go
through the hooked calls, so the other runs never meet them; a run that asks for the cache goes alone, with a context
of its own for each guidance branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton_omni.backends.diffusion.forward import OneByOne, Prediction
from triton_omni.backends.diffusion.image_run import Drawing
from triton_omni.backends.diffusion.upstream import FBC_LEADER, FirstBlockCacheConfig


class StepCached:
    """The stock arithmetic with a first-block cache per run and branch."""

    def __init__(self, transformer: Any, threshold: float) -> None:
        transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        self._transformer = transformer
        self._stock = OneByOne(transformer, lambda d, branch: transformer.cache_context(_context(d, branch)))
        leader = transformer.transformer_blocks[0]._diffusers_hook.get_hook(FBC_LEADER)
        self.states: dict[str, Any] = leader.state_manager._state_cache
        """What is kept, by context."""

    def predict(self, drawings: Sequence[Drawing]) -> list[Prediction]:
        return self._stock.predict(drawings)

    def drop(self, drawing: Drawing) -> None:
        """Forget what was kept for a run."""
        for branch in range(2):
            self.states.pop(_context(drawing, branch), None)


def _context(drawing: Drawing, branch: int) -> str:
    return f"{drawing.run.id.hex()}-{branch}"
