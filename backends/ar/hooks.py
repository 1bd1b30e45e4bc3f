# SPDX-License-Identifier: Apache-2.0
"""What vLLM's runners and scheduler call of ours while a step runs; upstream.py makes them do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backends.ar.params import RUN_KEY

TAP_LAYERS = "omni_tap_layers"
"""Name in additional_config: layers whose input rows are handed to `Taps` (0: the embeddings)."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run's part of one step: rows `start` to `start + count`, at `position` and on in the run's sequence."""

    key: str
    position: int
    start: int
    count: int


class Taps(Protocol):
    """Takes hidden rows out. Called after each forward pass; what must outlive the call is copied."""

    def tapped(self, spans: Sequence[Span], token_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        """`layers`: one (rows, hidden) tensor for each of TAP_LAYERS."""
        ...


class Rows(Protocol):
    """Puts input rows in and takes sampled tokens out."""

    def ready(self, key: str, position: int) -> bool:
        """True if the row at `position` (and so every row before it) can be written."""
        ...

    def fill(self, spans: Sequence[Span], rows: torch.Tensor) -> None:
        """Write the input rows of this step into `rows` (rows, hidden)."""
        ...

    def sampled(self, keys: Sequence[str], hidden: torch.Tensor, tokens: Sequence[int]) -> None:
        """Last hidden rows (runs, hidden) and the tokens sampled from them, of runs that sampled one."""
        ...

    def positions(self, key: str) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions (3, prompt) and the offset of later ones; None: 0, 1, 2, …"""
        ...


def run_key(request: Any) -> str:
    """Our key of a request, as vLLM's scheduler, V1 runner and scheduler output know it."""
    return request.sampling_params.extra_args[RUN_KEY]
