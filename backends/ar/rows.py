# SPDX-License-Identifier: Apache-2.0
"""Input rows of runs whose conditioning arrives while they run: one RowStore in every rank, as `hooks.Rows`.

The input of a step is not a token's embedding but a row that the previous frame and the next row of text make
together. All rows stay, by position: a preempted run computes them again and must find the same ones. What crosses to
the ranks are notes with ids; each rank makes the rows out of its own network, and all make the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from backends.ar.hooks import Span


class Network(Protocol):
    """What a frame model's network makes rows and frames of. All ranks call the same in the same order."""

    pad_text: int
    """Word that stands for the text of steps after its end."""

    def prompt_rows(self, prompt: Any) -> torch.Tensor:
        """`Begin.prompt` as rows (positions, hidden)."""
        ...

    def text_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Words as rows (words, hidden)."""
        ...

    def predict(
        self, hidden: torch.Tensor, tokens: torch.Tensor, generators: Sequence[torch.Generator | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden (runs, hidden), tokens (runs,), generators) → frames (runs, books) int64 and their summed embedding
        (runs, hidden). A generator of None means greedy."""
        ...


@dataclass(frozen=True, slots=True)
class Begin:
    """A note: a run and its prompt, in the network's own form. `seed` None: its residual codes are greedy."""

    key: str
    prompt: Any
    positions: tuple[torch.Tensor, int] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """A note: words for the steps after those that have some, one for each."""

    key: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class End:
    """A note: the run is over."""

    key: str


@dataclass(frozen=True, slots=True)
class Frames:
    """What a step made: one frame for each of `keys`, (runs, books) int16."""

    keys: Sequence[str]
    frames: np.ndarray


@dataclass(eq=False, slots=True)
class RowRun:
    """Rows of one run. `text` holds one row per step that follows the prompt; `pad` stands for what comes after it."""

    prompt: torch.Tensor
    """(positions, hidden)"""
    pad: torch.Tensor
    generator: torch.Generator | None = None
    positions: tuple[torch.Tensor, int] | None = None
    text: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    sums: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Summed embedding of every frame predicted so far, each (hidden,)."""

    def row(self, position: int) -> torch.Tensor:
        step = position - len(self.prompt)
        assert step < len(self.sums), "a row was asked for before its frame"
        return self.sums[step] + (self.text[step] if step < len(self.text) else self.pad)


class RowStore:
    """Rows of all runs, by key."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._pad = network.text_rows([network.pad_text])[0]
        self._made: Frames | None = None
        self.runs: dict[str, RowRun] = {}

    def take(self, notes: Sequence[Any]) -> None:
        for note in notes:
            match note:
                case Begin(key, prompt, positions, seed):
                    rows = self._network.prompt_rows(prompt)
                    self.runs[key] = RowRun(rows, self._pad, _generator(seed, rows), positions)
                case Words(key, token_ids):
                    self.runs[key].text += self._network.text_rows(token_ids)
                case End(key):
                    self.runs.pop(key, None)
                case _:
                    raise TypeError(f"unknown note {note!r}")

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
        frames, sums = self._network.predict(hidden, codes, [run.generator for run in runs])
        for run, total in zip(runs, sums, strict=True):
            run.sums.append(total)
        self._made = Frames(list(keys), frames.to(torch.int16).cpu().numpy())

    def made(self) -> Frames | None:
        made, self._made = self._made, None
        return made


def _generator(seed: int | None, like: torch.Tensor) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device=like.device).manual_seed(seed)
