# SPDX-License-Identifier: Apache-2.0
"""Input rows of runs whose conditioning arrives while they run.

The input of a step is not a token's embedding but a row that the previous frame and the next row of text make
together. All rows stay, by position: a preempted run computes them again and must find the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from backends.ar.hooks import Span

Predict = Callable[[torch.Tensor, torch.Tensor, Sequence["torch.Generator | None"]], tuple[torch.Tensor, torch.Tensor]]
"""(hidden (runs, hidden), tokens (runs,), generators) → frames (runs, books) int64 and their summed embedding
(runs, hidden). A generator of None means greedy."""


@dataclass(eq=False, slots=True)
class RowRun:
    """Rows of one run. `text` holds one row per step that follows the prompt; `pad` stands for what comes after it."""

    prompt: torch.Tensor
    """(positions, hidden)"""
    pad: torch.Tensor
    generator: torch.Generator | None = None
    positions: tuple[torch.Tensor, int] | None = None
    text: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    text_ended: bool = False
    paused: bool = False
    """A consumer cannot take more; the run keeps its place."""
    frames: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Frames predicted so far and not taken, each (books,)."""
    sums: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Summed embedding of every frame predicted so far, each (hidden,)."""

    def ready(self, position: int) -> bool:
        if self.paused:
            return False
        step = position - len(self.prompt)
        return self.text_ended or step < len(self.text)

    def row(self, position: int) -> torch.Tensor:
        step = position - len(self.prompt)
        assert step < len(self.sums), "a row was asked for before its frame"
        return self.sums[step] + (self.text[step] if step < len(self.text) else self.pad)


class RowStore:
    """Rows of all runs, by key; hooks for upstream.Rows."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self.runs: dict[str, RowRun] = {}

    def ready(self, key: str, position: int) -> bool:
        return self.runs[key].ready(position)

    def positions(self, key: str) -> tuple[torch.Tensor, int] | None:
        return self.runs[key].positions

    def fill(self, spans: Sequence[Span], rows: torch.Tensor) -> None:
        for span in spans:
            run = self.runs[span.key]
            prompt = run.prompt[span.position : span.position + span.count]
            rows[span.start : span.start + len(prompt)] = prompt
            for k in range(len(prompt), span.count):
                rows[span.start + k] = run.row(span.position + k)

    def sampled(self, keys: Sequence[str], hidden: torch.Tensor, tokens: Sequence[int]) -> None:
        runs = [self.runs[key] for key in keys]
        codes = torch.tensor(tokens, device=hidden.device)
        frames, sums = self._predict(hidden, codes, [run.generator for run in runs])
        taken = frames.cpu()
        for place, run in enumerate(runs):
            run.frames.append(taken[place])
            run.sums.append(sums[place])
