# SPDX-License-Identifier: Apache-2.0
"""Hidden rows of chosen tokens, as `hooks.Taps`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from triton_omni.backends.ar.hooks import Span

Tapped = tuple[str, list[int], np.ndarray]
"""A run's key, positions in its sequence, and their rows (positions, hidden) float32."""


class TokenTaps:
    """Takes the first tapped layer's rows of positions whose token is one of `token_ids`, of runs that are tapped."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = torch.tensor(token_ids)
        self._made: list[Tapped] = []

    def tapped(self, spans: Sequence[Span], token_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        wanted = torch.isin(token_ids, self._token_ids.to(token_ids.device))
        if not wanted.any():
            return
        for span in spans:
            places = wanted[span.start : span.start + span.count].nonzero()[:, 0].tolist() if span.tapped else []
            if places:
                rows = layers[0][[span.start + place for place in places]].float().cpu().numpy()
                self._made.append((span.key, [span.position + place for place in places], rows))

    def made(self) -> list[Tapped] | None:
        made, self._made = self._made, []
        return made or None
