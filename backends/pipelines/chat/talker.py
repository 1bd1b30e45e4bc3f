# SPDX-License-Identifier: Apache-2.0
"""Stage `talker`: text, as it comes, to speech codes; a chunk of code frames per clause, or more for a long one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import (
    EngineChunk,
    EngineEvent,
    EngineFailed,
    EngineFinished,
    Run,
    read_engine_options,
)
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.outputs import WordsPiece
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.chat.clauses import UNREADABLE, Clauses
from triton_omni.backends.pipelines.chat.options import TalkerOptions, model_folder
from triton_omni.backends.pipelines.chat.rvq import Codebooks
from triton_omni.backends.pipelines.chat.voice import SpokenPhrase, Voice

QUEUE_CLAUSES = 64  # a run with more clauses to speak takes no more text for now


@dataclass(eq=False, slots=True)
class SpeechRunState:
    """State of one run.

    clauses   the text that is not cut yet
    queue     clauses to speak
    phrases   what is left of the clause being spoken, one for each step
    ended     no more text will come
    """

    clauses: Clauses = field(default_factory=Clauses)
    queue: deque[str] = field(default_factory=deque[str])
    phrases: deque[SpokenPhrase] = field(default_factory=deque[SpokenPhrase])
    ended: bool = False
    frames: int = 0
    spoken_chars: int = 0

    @property
    def has_text(self) -> bool:
        return bool(self.phrases or self.queue)


class TalkerEngine:
    """core.engine.Engine. A step speaks a few seconds of one run; runs take turns, and new ones come first."""

    def __init__(self, stage: str, voice: Voice, codebooks: Codebooks) -> None:
        self.stage = stage
        self._voice = voice
        self._codebooks = codebooks
        self._runs: deque[Run] = deque()

    def open(self, run: Run) -> None:
        state = SpeechRunState()
        if not run.upstream:
            state.queue.extend(state.clauses.feed(run.request.input, last=True))
            state.ended = True
        run.state = state
        self._runs.append(run)

    def feed(self, run: Run, inputs: str, last: bool) -> bool:
        """Take a piece of text."""
        state: SpeechRunState = run.state
        if len(state.queue) >= QUEUE_CLAUSES:
            return False
        state.queue.extend(state.clauses.feed(inputs, last))
        state.ended = last
        return True

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    @property
    def has_work(self) -> bool:
        return any(_can_work(run) for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        ready = [run for run in self._runs if _can_work(run)]
        if not ready:
            return ()
        run = next((run for run in ready if not run.state.frames), ready[0])  # its client still hears nothing
        self._runs.remove(run)
        state: SpeechRunState = run.state
        events: list[EngineEvent] = []
        if state.has_text:
            try:
                events += self._speak(run, state)
            except (LookupError, ValueError) as error:  # the text front end met a word that it cannot read
                return [EngineFailed(run, StageFailed(f"the text cannot be read aloud: {error}", self.stage))]
        if state.ended and not state.has_text:
            events.append(_end(run, state))
        else:
            self._runs.append(run)
        return events

    def close(self) -> None:
        self._runs.clear()

    def _speak(self, run: Run, state: SpeechRunState) -> list[EngineEvent]:
        speed = run.request.speech.speed
        if not state.phrases:
            clause = state.queue.popleft()
            state.spoken_chars += len(clause)
            state.phrases.extend(self._voice.phrases(clause, speed))
        if not state.phrases:
            return []
        phrase = state.phrases.popleft()
        frames = self._voice.frames(phrase.phonemes, speed)
        codes = self._codebooks.encode(frames.spectrum, frames.pitch_hz)
        if not len(codes):
            return []
        words = None
        if phrase.words and WordsPiece.kind in run.request.modalities:
            words = WordsPiece(frames.times(phrase.words, state.frames))
        state.frames += len(codes)
        return [EngineChunk(run, (Tensor.of("codes", codes),), words)]


def _can_work(run: Run) -> bool:
    state: SpeechRunState = run.state
    return not run.blocked and (state.has_text or state.ended)


def _end(run: Run, state: SpeechRunState) -> EngineEvent:
    """An answer may be silent, since its text was sent as well; a request for speech alone fails instead."""
    if not run.upstream and not state.frames:
        return EngineFailed(run, BadRequest(UNREADABLE, "input"))
    return EngineFinished(run, "stop", {"audio_frames": state.frames, "spoken_chars": state.spoken_chars})


def talker_engine(context: EngineContext) -> TalkerEngine:
    """The engine of stage `talker`, in its worker."""
    options = read_engine_options(context.options, TalkerOptions, context.stage)
    codebooks = Codebooks.load(model_folder(context, options.model))
    return TalkerEngine(context.stage, Voice(), codebooks)
