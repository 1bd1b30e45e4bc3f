# SPDX-License-Identifier: Apache-2.0
"""The worker's half of runs whose input rows are made in the ranks: which may go on, and what the ranks are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.ar.rows import Begin, End, Frames, Words


@dataclass(eq=False, slots=True)
class GatedRun:
    """How far one run is."""

    prompt_length: int
    words: int = 0
    words_ended: bool = False
    paused: bool = False
    """A consumer cannot take more; the run keeps its place."""
    steps: int = 0
    """Frames made so far."""
    frames: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """Those not taken yet, each (books,) int16."""
    broken: str = ""
    """Why its rows cannot be made, if they cannot."""

    def ready(self, position: int) -> bool:
        """True if there is a word (or the end of them) for the row at `position`."""
        return not self.paused and (self.words_ended or position - self.prompt_length < self.words)

    @property
    def can_go_on(self) -> bool:
        return self.ready(self.prompt_length + self.steps - 1)


class RowGate:
    """`hooks.Gate` of all runs, by key. Notes wait for the next step; a run that ends takes its own along."""

    def __init__(self) -> None:
        self.runs: dict[str, GatedRun] = {}
        self._notes: list[Begin | Words | End] = []

    def begin(self, note: Begin, prompt_length: int) -> GatedRun:
        """A new run, of `prompt_length` rows."""
        self._notes.append(note)
        run = self.runs[note.key] = GatedRun(prompt_length)
        return run

    def say(self, key: str, token_ids: Sequence[int], last: bool) -> None:
        """Words for later steps; after the last ones a run goes on without."""
        run = self.runs[key]
        run.words += len(token_ids)
        run.words_ended = last
        if token_ids:
            self._notes.append(Words(key, token_ids))

    def end(self, key: str) -> None:
        """The run is over, whether ranks have heard of it or not."""
        del self.runs[key]
        self._notes = [note for note in self._notes if note.key != key]
        self._notes.append(End(key))

    # --- Gate -----------------------------------------------------------------------------------------------------
    def ready(self, key: str, position: int) -> bool:
        return self.runs[key].ready(position)

    def notes(self) -> Sequence[Begin | Words | End]:
        notes, self._notes = self._notes, []
        return notes

    def came(self, made: Frames) -> None:
        for key, frame in zip(made.keys, made.frames, strict=True):
            run = self.runs[key]
            run.steps += 1
            run.frames.append(frame)
        for key, reason in made.broken.items():
            self.runs[key].broken = reason
