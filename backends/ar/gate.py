# SPDX-License-Identifier: Apache-2.0
"""The worker's half of runs whose input rows are made in the ranks: which runs may step, and the ranks' events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.ar.rows import BeginRows, EndRows, FrameBatch, RowEvent, TextTokens


@dataclass(eq=False, slots=True)
class GatedRun:
    """Progress of one run.

    text_tokens  text tokens that have arrived, one for each step after the prompt
    paused       a consumer cannot take more; the run keeps its cache blocks
    steps        frames made so far
    frames       frames that the engine has not taken yet, each (books,) int16
    failure      why the run's rows cannot be made; empty if they can
    """

    prompt_length: int
    text_tokens: int = 0
    text_ended: bool = False
    paused: bool = False
    steps: int = 0
    frames: list[np.ndarray] = field(default_factory=list[np.ndarray])
    failure: str = ""

    def ready(self, position: int) -> bool:
        """True if the row at `position` has its text token, or the text has ended."""
        return not self.paused and (self.text_ended or position - self.prompt_length < self.text_tokens)

    @property
    def can_step(self) -> bool:
        return self.ready(self.prompt_length + self.steps - 1)


class RowGate:
    """`hooks.Gate` of all runs, by key. Control events wait for the next step; a run that ends drops its own."""

    def __init__(self) -> None:
        self.runs: dict[str, GatedRun] = {}
        self._pending: list[RowEvent] = []

    def begin(self, event: BeginRows, prompt_length: int) -> GatedRun:
        """Add a run of `prompt_length` prompt rows."""
        self._pending.append(event)
        run = self.runs[event.key] = GatedRun(prompt_length)
        return run

    def push_tokens(self, key: str, token_ids: Sequence[int], last: bool) -> None:
        """Add text tokens for later steps; after the last ones the run steps without text."""
        run = self.runs[key]
        run.text_tokens += len(token_ids)
        run.text_ended = last
        if token_ids:
            self._pending.append(TextTokens(key, token_ids))

    def end(self, key: str) -> None:
        """Remove a run, whether the ranks know it yet or not."""
        del self.runs[key]
        self._pending = [event for event in self._pending if event.key != key]
        self._pending.append(EndRows(key))

    # --- Gate -----------------------------------------------------------------------------------------------------
    def ready(self, key: str, position: int) -> bool:
        return self.runs[key].ready(position)

    def control_events(self) -> Sequence[RowEvent]:
        events, self._pending = self._pending, []
        return events

    def on_step_result(self, result: FrameBatch) -> None:
        for key, frame in zip(result.keys, result.frames, strict=True):
            run = self.runs[key]
            run.steps += 1
            run.frames.append(frame)
        for key, reason in result.failures.items():
            self.runs[key].failure = reason
