# SPDX-License-Identifier: Apache-2.0
"""Stage `talker`: text, as it comes, to speech codes; a chunk of code frames per clause."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFailed, EngineFinished, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.chat.clauses import Clauses
from triton_omni.backends.pipelines.chat.options import TalkerOptions, model_folder, read_options
from triton_omni.backends.pipelines.chat.rvq import CODES, Codebooks
from triton_omni.backends.pipelines.chat.voice import Voice

QUEUE_CLAUSES = 64  # a run with so many takes no more text for now


@dataclass(eq=False, slots=True)
class Speaker:
    """State of one run: its open text, the clauses to speak, and whether more may come."""

    clauses: Clauses = field(default_factory=Clauses)
    waiting: deque[str] = field(default_factory=deque[str])
    ended: bool = False
    frames: int = 0
    spoken_chars: int = 0


class TalkerEngine:
    """core.engine.Engine. A step speaks one clause of one run; runs take turns, so none waits long for another."""

    def __init__(self, stage: str, voice: Voice, codebooks: Codebooks) -> None:
        self.stage = stage
        self._voice = voice
        self._codebooks = codebooks
        self._runs: deque[Run] = deque()

    def open(self, run: Run) -> None:
        speaker = Speaker()
        if not run.upstream:
            speaker.waiting.extend(speaker.clauses.feed(run.request.input, last=True))
            speaker.ended = True
        run.state = speaker
        self._runs.append(run)

    def feed(self, run: Run, inputs: str, last: bool) -> bool:
        """Take a piece of text."""
        speaker: Speaker = run.state
        if len(speaker.waiting) >= QUEUE_CLAUSES:
            return False
        speaker.waiting.extend(speaker.clauses.feed(inputs, last))
        speaker.ended = last
        return True

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    @property
    def has_work(self) -> bool:
        return any(_can_work(run) for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        run = next((run for run in self._runs if _can_work(run)), None)
        if run is None:
            return ()
        self._runs.remove(run)
        speaker: Speaker = run.state
        events: list[EngineEvent] = []
        if speaker.waiting:
            try:
                events += self._speak(run, speaker.waiting.popleft())
            except (LookupError, ValueError) as error:  # the reader of text met a word it cannot take
                return [EngineFailed(run, StageFailed(f"the text cannot be read aloud: {error}", self.stage))]
        if speaker.ended and not speaker.waiting:
            events.append(_end(run, speaker))
        else:
            self._runs.append(run)  # the end of the queue: whoever waits comes first
        return events

    def close(self) -> None:
        self._runs.clear()

    def _speak(self, run: Run, clause: str) -> list[EngineEvent]:
        speaker: Speaker = run.state
        speaker.spoken_chars += len(clause)
        made = [self._codes(piece, run.request.speech.speed) for piece in self._voice.phonemes(clause)]
        codes = np.concatenate(made) if made else np.zeros((0, CODES), np.int16)
        if not len(codes):  # signs without a reading
            return []
        speaker.frames += len(codes)
        return [EngineChunk(run, (Tensor.of("codes", codes),))]

    def _codes(self, phonemes: str, speed: float) -> np.ndarray:
        frames = self._voice.frames(phonemes, speed)
        return self._codebooks.encode(frames.spectrum, frames.pitch_hz)


def _can_work(run: Run) -> bool:
    speaker: Speaker = run.state
    return not run.blocked and (bool(speaker.waiting) or speaker.ended)


def _end(run: Run, speaker: Speaker) -> EngineEvent:
    """An answer may be silent, its text is there; who only wanted to hear a text must be told that it cannot be."""
    if not run.upstream and not speaker.frames:
        return EngineFailed(run, BadRequest("nothing in it can be read aloud; the voice reads English", "input"))
    return EngineFinished(run, "stop", {"audio_frames": speaker.frames, "spoken_chars": speaker.spoken_chars})


def talker_engine(context: EngineContext) -> TalkerEngine:
    """The engine of stage `talker`, in its worker."""
    options = read_options(context, TalkerOptions)
    codebooks = Codebooks.load(model_folder(context, options.model))
    return TalkerEngine(context.stage, Voice(), codebooks)
