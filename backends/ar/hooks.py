# SPDX-License-Identifier: Apache-2.0
"""What vLLM's runners and scheduler call of ours during a step; upstream.py installs the calls.

`Taps` and `Rows` live beside a model runner, one of each in every rank; a `Gate` lives beside the scheduler, in the
worker process. With one rank all are in one process. With more, control events and step results are pickled and travel
with vLLM's own messages of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

RUN_KEY = "omni_run"
"""Name of a run's key in SamplingParams.extra_args. vLLM adds a random suffix to request ids; extra_args stay."""
TAP_LAYERS = "omni_tap_layers"
"""Name in additional_config: layers whose input rows are handed to `Taps` (0: the embeddings)."""
MODEL = "omni_model"
"""Name in additional_config: an out-of-tree model as (architecture, "module:class"), for ranks to import."""
CONTROL_EVENTS = "omni_control_events"
"""Attribute of vLLM's SchedulerOutput: the step's `Gate.control_events`."""
STEP_RESULT = "omni_step_result"
"""Attribute of vLLM's ModelRunnerOutput: the step's `Taps.step_result` or `Rows.step_result`."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run's part of one step: batch rows `start` to `start + count`, from `position` on in the run's sequence."""

    key: str
    position: int
    start: int
    count: int
    tapped: bool = False
    """Rows of a run that `is_tapped`, and of its prompt: those of its answer are not read."""


class Taps(Protocol):
    """Reads hidden rows in the first rank. Called after each forward pass; copies what must outlive the step."""

    def on_forward(self, spans: Sequence[Span], token_ids: torch.Tensor, layers: Sequence[torch.Tensor]) -> None:
        """`layers`: one (rows, hidden) tensor for each of TAP_LAYERS."""
        ...

    def step_result(self) -> Any:
        """The step's result for the worker process, or None."""
        ...


class Rows(Protocol):
    """Writes input rows and reads sampled tokens. Every rank computes the same from the same numbers."""

    def apply(self, events: Sequence[Any]) -> None:
        """Apply the gate's control events before the step they came with."""
        ...

    def fill(self, spans: Sequence[Span], rows: torch.Tensor) -> None:
        """Write the input rows of this step into `rows` (rows, hidden)."""
        ...

    def on_sampled(self, keys: Sequence[str], hidden: torch.Tensor, tokens: Sequence[int]) -> None:
        """Last hidden rows (runs, hidden) and the tokens sampled from them, of the runs that sampled one."""
        ...

    def positions(self, key: str) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions (3, prompt) and the offset of later ones; None: 0, 1, 2, …"""
        ...

    def step_result(self) -> Any:
        """The step's result for the worker process, or None."""
        ...


class Gate(Protocol):
    """Holds back runs whose next input row is missing, and sends control events to every rank's `Rows`."""

    def ready(self, key: str, position: int) -> bool:
        """True if the row at `position`, and so every row before it, can be written."""
        ...

    def control_events(self) -> Sequence[Any]:
        """What the ranks must know before this step; each event is returned once."""
        ...

    def on_step_result(self, result: Any) -> None:
        """Take the first rank's step result."""
        ...


def is_tapped(request: Any) -> bool:
    """True if `Taps` read the run's rows. These must be computed, so the run reads nothing from the prefix cache."""
    return bool(request.sampling_params.skip_reading_prefix_cache)


def run_key(request: Any) -> str:
    """Our key of a request, as vLLM's scheduler, V1 runner and scheduler output know it."""
    return request.sampling_params.extra_args[RUN_KEY]


def attach_step_result(output: Any, hooks: Taps | Rows | None) -> None:
    """Attach the hooks' step result to the runner's output."""
    result = None if hooks is None else hooks.step_result()
    if result is not None:
        setattr(output, STEP_RESULT, result)
