# SPDX-License-Identifier: Apache-2.0
"""Input rows of runs whose conditioning arrives while they run: one RowStore in every rank, as `hooks.Rows`.

The input of a step is not a token's embedding but the sum of the previous frame's embedding and the next text row. All
rows stay, by position: a preempted run computes them again and must read the same ones. Control events carry ids; each
rank makes the rows out of its own network, and all ranks make the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from triton_omni.backends.ar.hooks import Span
from triton_omni.backends.ar.ranks import is_only_rank
from triton_omni.backends.core.errors import describe

log = logging.getLogger("triton_omni.rows")

SAME_IN_ALL_RANKS = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError)
"""Errors that come of the event itself; others, such as out of memory, may concern one rank only."""


class Network(Protocol):
    """What makes rows and frames. All ranks call the same methods in the same order.

    pad_text  text token id of steps after the end of the text
    """

    pad_text: int

    def prompt_rows(self, prompt: Any) -> torch.Tensor:
        """`BeginRows.prompt` as rows (positions, hidden)."""
        ...

    def text_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Text tokens as rows (tokens, hidden)."""
        ...

    def predict(self, hidden: torch.Tensor, tokens: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Complete the frames that `tokens` (runs,) begin, from the last hidden rows (runs, hidden).

        Returns frames (runs, books) int64 and their summed embedding (runs, hidden); the next call may overwrite both.
        """
        ...


@dataclass(frozen=True, slots=True)
class Draws:
    """How the residual codes of a step's runs are drawn. Tensors lie on the network's device.

    seeds    (runs,) int64
    frames   (runs,) int64, number of the frame in its run: with the seed it names the random numbers
    greedy   (runs,) bool, the best code is taken instead
    """

    seeds: torch.Tensor
    frames: torch.Tensor
    greedy: torch.Tensor


@dataclass(frozen=True, slots=True)
class BeginRows:
    """Control event: a new run and its prompt, as the network reads it. `seed` None: its residual codes are greedy."""

    key: str
    prompt: object
    positions: tuple[torch.Tensor, int] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Control event: text tokens for the next steps that have none yet, one for each step."""

    key: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class EndRows:
    """Control event: the run has ended."""

    key: str


RowEvent = BeginRows | TextTokens | EndRows


@dataclass(frozen=True, slots=True)
class FrameBatch:
    """A step's result: one frame for each of `keys`, (runs, books) int16, and why other runs cannot step any more."""

    keys: Sequence[str]
    frames: np.ndarray
    failures: Mapping[str, str]


@dataclass(eq=False, slots=True)
class RowRun:
    """Rows of one run.

    prompt  (positions, hidden)
    pad     (hidden,) text row of the steps after the end of the text
    text    one row (hidden,) for each step after the prompt
    sums    summed embedding (hidden,) of every frame so far
    """

    prompt: torch.Tensor
    pad: torch.Tensor
    seed: int | None = None
    positions: tuple[torch.Tensor, int] | None = None
    text: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    sums: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def row(self, position: int) -> torch.Tensor:
        step = position - len(self.prompt)
        assert step < len(self.sums), "the row's frame has not been predicted"
        return self.sums[step] + (self.text[step] if step < len(self.text) else self.pad)


class RowStore:
    """Rows of all runs, by key. One step computes all runs, so a run whose rows cannot be made continues with zeros
    until the worker process has read its failure and ends it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._pad = network.text_rows([network.pad_text])[0]
        self._result: FrameBatch | None = None
        self.runs: dict[str, RowRun] = {}
        self._failures: dict[str, str] = {}

    def apply(self, events: Sequence[RowEvent]) -> None:
        for event in events:
            try:
                self._apply(event)
            except Exception as error:  # the engine-loop border: one run's event must not end the others
                if not (isinstance(error, SAME_IN_ALL_RANKS) or is_only_rank()):
                    raise  # the other ranks have made these rows; without them the steps would differ
                if event.key not in self._failures:
                    log.exception("rows of run %s", event.key)
                    self._failures[event.key] = describe(error)

    def _apply(self, event: RowEvent) -> None:
        match event:
            case BeginRows(key, prompt, positions, seed):
                rows = self._network.prompt_rows(prompt)
                if not torch.isfinite(rows).all():  # in the KV cache they would spoil the runs that reuse its blocks
                    raise ValueError("the prompt rows are not finite")
                self.runs[key] = RowRun(rows, self._pad, seed, positions)
            case TextTokens(key, token_ids):
                self.runs[key].text += self._network.text_rows(token_ids)
            case EndRows(key):
                self.runs.pop(key, None)
                self._failures.pop(key, None)

    def positions(self, key: str) -> tuple[torch.Tensor, int] | None:
        return None if key in self._failures else self.runs[key].positions

    def fill(self, spans: Sequence[Span], rows: torch.Tensor) -> None:
        for span in spans:
            if span.key in self._failures:
                rows[span.start : span.start + span.count] = 0.0
                continue
            run = self.runs[span.key]
            prompt = run.prompt[span.position : span.position + span.count]
            rows[span.start : span.start + len(prompt)] = prompt
            for k in range(len(prompt), span.count):
                rows[span.start + k] = run.row(span.position + k)

    def on_sampled(self, keys: Sequence[str], hidden: torch.Tensor, tokens: Sequence[int]) -> None:
        for key, is_finite in zip(keys, torch.isfinite(hidden).all(-1).tolist(), strict=True):
            if not is_finite:  # no code can be drawn from it, and trying would fail for all runs
                self._failures.setdefault(key, "the hidden state is not finite")
        finite = [index for index, key in enumerate(keys) if key not in self._failures]
        frames = np.zeros((0, 0), np.int16)
        if finite:
            runs = [self.runs[keys[index]] for index in finite]
            codes = torch.tensor(tokens, device=hidden.device)
            predicted, sums = self._network.predict(hidden[finite], codes[finite], _draws(runs, hidden.device))
            for run, total in zip(runs, sums.clone(), strict=True):
                run.sums.append(total)
            frames = predicted.to(torch.int16).cpu().numpy()
        self._result = FrameBatch([keys[index] for index in finite], frames, dict(self._failures))

    def step_result(self) -> FrameBatch | None:
        result, self._result = self._result, None
        return result


def _draws(runs: Sequence[RowRun], device: torch.device) -> Draws:
    seeds = torch.tensor([run.seed or 0 for run in runs], device=device)
    frames = torch.tensor([len(run.sums) for run in runs], device=device)
    greedy = torch.tensor([run.seed is None for run in runs], device=device)
    return Draws(seeds, frames, greedy)
