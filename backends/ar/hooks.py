# SPDX-License-Identifier: Apache-2.0
"""What vLLM's runners and scheduler call of ours while a step runs; upstream.py makes them do it.

`Taps` and `Rows` live beside a model runner, one of each in every rank; a `Gate` lives beside the scheduler, in the
worker. With one rank all are in one process; with more, what they tell each other is pickled: it rides on what vLLM
sends through its shared memory in each step anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from triton_omni.backends.ar.params import RUN_KEY

TAP_LAYERS = "omni_tap_layers"
"""Name in additional_config: layers whose input rows are handed to `Taps` (0: the embeddings)."""
MODEL = "omni_model"
"""Name in additional_config: an out-of-tree model as (architecture, "module:class"), for ranks to import."""
NOTES = "omni_notes"
"""Attribute of vLLM's SchedulerOutput: what a step's `Gate.notes` were."""
MADE = "omni_made"
"""Attribute of vLLM's ModelRunnerOutput: what the step's `Taps.made` or `Rows.made` were."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run's part of one step: rows `start` to `start + count`, at `position` and on in the run's sequence."""

    key: str
    position: int
    start: int
    count: int
    tapped: bool = False
    """See `is_tapped`."""


class Taps(Protocol):
    """Takes hidden rows out, in the first rank. Called after each forward pass; what must outlive it is copied."""

    def tapped(self, spans: Sequence[Span], token_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        """`layers`: one (rows, hidden) tensor for each of TAP_LAYERS."""
        ...

    def made(self) -> Any:
        """What this step's rows came to, for the worker; None: nothing."""
        ...


class Rows(Protocol):
    """Puts input rows in and takes sampled tokens out. Every rank does the same with the same numbers."""

    def take(self, notes: Sequence[Any]) -> None:
        """The gate's notes, before the step that they came with."""
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

    def made(self) -> Any:
        """What came of this step's sampled tokens, for the worker; None: nothing."""
        ...


class Gate(Protocol):
    """Holds back runs whose next input row is missing, and speaks with every rank's `Rows`."""

    def ready(self, key: str, position: int) -> bool:
        """True if the row at `position` (and so every row before it) can be written."""
        ...

    def notes(self) -> Sequence[Any]:
        """What the ranks must know before this step; each note is given once."""
        ...

    def came(self, made: Any) -> None:
        """What the first rank made of a step."""
        ...


def is_tapped(request: Any) -> bool:
    """Whether `Taps` are to see a run's rows: then they must be computed, so it reads nothing from the prefix cache."""
    return bool(request.sampling_params.skip_reading_prefix_cache)


def run_key(request: Any) -> str:
    """Our key of a request, as vLLM's scheduler, V1 runner and scheduler output know it."""
    return request.sampling_params.extra_args[RUN_KEY]


def put_made(output: Any, hooks: Taps | Rows | None) -> None:
    """Let what a step's hooks made ride on the runner's output."""
    made = None if hooks is None else hooks.made()
    if made is not None:
        setattr(output, MADE, made)
