# SPDX-License-Identifier: Apache-2.0
"""Hidden rows of chosen tokens, as `hooks.Taps`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triton_omni.backends.ar.hooks import Span
from triton_omni.backends.ar.ranks import is_only_rank

TappedRows = tuple[str, list[int], torch.Tensor]
"""A run's key, positions in its sequence, and their rows (positions, hidden): the network's dtype, on its device."""


class TokenTaps:
    """Copies the first tapped layer's rows of positions whose token is one of `token_ids`, for tapped runs."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = torch.tensor(token_ids)
        self._tapped: list[TappedRows] = []

    def on_forward(self, spans: Sequence[Span], token_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        if not any(span.tapped for span in spans):  # reading the mask below synchronizes with the device
            return
        mask = torch.isin(token_ids, self._token_ids.to(token_ids.device)).cpu()
        for span in spans:
            if not span.tapped:
                continue
            offsets = mask[span.start : span.start + span.count].nonzero()[:, 0].tolist()
            if offsets:
                rows = layers[0][[span.start + offset for offset in offsets]]  # a copy
                if not is_only_rank():  # the engine is another process
                    rows = rows.cpu()
                self._tapped.append((span.key, [span.position + offset for offset in offsets], rows))

    def step_result(self) -> list[TappedRows] | None:
        tapped, self._tapped = self._tapped, []
        return tapped or None
