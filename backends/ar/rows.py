# SPDX-License-Identifier: Apache-2.0
"""Input rows of runs whose conditioning arrives while they run: one RowStore in every rank, as `hooks.Rows`.

The input of a step is not a token's embedding but a row that the previous frame and the next row of text make
together. All rows stay, by position: a preempted run computes them again and must find the same ones. What crosses to
the ranks are notes with ids; each rank makes the rows out of its own network, and all make the same.
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

log = logging.getLogger("triton_omni.rows")

SAME_IN_ALL_RANKS = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError)
"""Errors that come of a note itself; others, as a want of memory, may be one rank's alone."""


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
    """What a step made: one frame for each of `keys`, (runs, books) int16; and why other runs can have no more."""

    keys: Sequence[str]
    frames: np.ndarray
    broken: Mapping[str, str]


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
    """Rows of all runs, by key. A step is everyone's: a run whose rows cannot be made is broken and steps on with
    zeros, until the worker has heard of it and ends it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._pad = network.text_rows([network.pad_text])[0]
        self._made: Frames | None = None
        self.runs: dict[str, RowRun] = {}
        self._broken: dict[str, str] = {}

    def take(self, notes: Sequence[Begin | Words | End]) -> None:
        for note in notes:
            try:
                self._take(note)
            except Exception as error:  # the engine-loop border: one run's note must not end the others
                if not (isinstance(error, SAME_IN_ALL_RANKS) or is_only_rank()):
                    raise  # the others have made these rows: without them no step would be the same
                if note.key not in self._broken:  # else more words for it
                    log.exception("rows of run %s", note.key)
                    self._broken[note.key] = f"{type(error).__name__}: {error}"

    def _take(self, note: Begin | Words | End) -> None:
        match note:
            case Begin(key, prompt, positions, seed):
                rows = self._network.prompt_rows(prompt)
                if not torch.isfinite(rows).all():  # in the cache they would spoil the runs that get its blocks next
                    raise ValueError("its rows grew beyond all bounds")
                self.runs[key] = RowRun(rows, self._pad, _generator(seed, rows), positions)
            case Words(key, token_ids):
                self.runs[key].text += self._network.text_rows(token_ids)
            case End(key):
                self.runs.pop(key, None)
                self._broken.pop(key, None)

    def positions(self, key: str) -> tuple[torch.Tensor, int] | None:
        return None if key in self._broken else self.runs[key].positions

    def fill(self, spans: Sequence[Span], rows: torch.Tensor) -> None:
        for span in spans:
            if span.key in self._broken:
                rows[span.start : span.start + span.count] = 0.0
                continue
            run = self.runs[span.key]
            prompt = run.prompt[span.position : span.position + span.count]
            rows[span.start : span.start + len(prompt)] = prompt
            for k in range(len(prompt), span.count):
                rows[span.start + k] = run.row(span.position + k)

    def sampled(self, keys: Sequence[str], hidden: torch.Tensor, tokens: Sequence[int]) -> None:
        for key, is_finite in zip(keys, torch.isfinite(hidden).all(-1).tolist(), strict=True):
            if not is_finite:  # nothing can be drawn from them, and trying would fail for all
                self._broken.setdefault(key, "its numbers grew beyond all bounds")
        whole = [place for place, key in enumerate(keys) if key not in self._broken]
        frames = np.zeros((0, 0), np.int16)
        if whole:
            runs = [self.runs[keys[place]] for place in whole]
            codes = torch.tensor(tokens, device=hidden.device)
            made, sums = self._network.predict(hidden[whole], codes[whole], [run.generator for run in runs])
            for run, total in zip(runs, sums, strict=True):
                run.sums.append(total)
            frames = made.to(torch.int16).cpu().numpy()
        self._made = Frames([keys[place] for place in whole], frames, dict(self._broken))

    def made(self) -> Frames | None:
        made, self._made = self._made, None
        return made


def _generator(seed: int | None, like: torch.Tensor) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device=like.device).manual_seed(seed)
