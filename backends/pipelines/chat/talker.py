# SPDX-License-Identifier: Apache-2.0
"""Stage `talker`: text, as it comes, to speech codes; a chunk of code frames per clause, or more for a long one."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

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
from triton_omni.backends.pipelines.chat.voice import FASTEST, PHONEMES_PER_S, Frames, SpokenPhrase, Voice

QUEUE_CLAUSES = 64  # a run with more clauses to speak takes no more text for now
SHORT_S = 4.0
"""A run's first phrase is spoken within a step if it lasts about this long at most; all others in threads beside it."""
WAIT_S = 0.002
"""A step without other work waits this long for the threads; then the worker may take new runs."""
LATER_NICE = 5
"""Niceness of the thread of later phrases: a third of a first phrase's share of a busy core, which is enough to speak
faster than a score of clients play."""


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


@dataclass(frozen=True, slots=True)
class Speech:
    """A phrase as spoken: its words, the frames, and their codes (frames, CODES) int16."""

    phrase: SpokenPhrase
    frames: Frames
    codes: np.ndarray


@dataclass(eq=False, slots=True)
class SpeakingThread:
    """A thread that speaks one phrase at a time, and the run that it speaks for; None if that was stopped meanwhile."""

    executor: ThreadPoolExecutor
    speech: Future[Speech] | None = None
    run: Run | None = None

    @property
    def is_done(self) -> bool:
        return self.speech is not None and self.speech.done()


class TalkerEngine:
    """core.engine.Engine. A step speaks the short first phrase of a run that is still silent.

    Longer first phrases and all later ones are spoken in a thread each, a phrase at a time; runs take turns. So a run
    that begins waits for no phrase of others, whatever their texts are.
    """

    def __init__(self, stage: str, voice: Voice, codebooks: Codebooks) -> None:
        self.stage = stage
        self._voice = voice
        self._codebooks = codebooks
        self._runs: deque[Run] = deque()
        self._first = SpeakingThread(ThreadPoolExecutor(1, "first-phrase"))
        self._later = SpeakingThread(ThreadPoolExecutor(1, "later-phrase", _lower_priority))
        self._threads = (self._first, self._later)

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
        for thread in self._threads:
            if run is thread.run:
                thread.run = None

    @property
    def has_work(self) -> bool:
        return any(thread.speech for thread in self._threads) or any(_can_work(run) for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        if (spoken := next((thread for thread in self._threads if thread.is_done), None)) is not None:
            return self._collect(spoken)
        ready = [run for run in self._runs if _can_work(run)]
        for run in sorted(ready, key=_has_spoken):  # stable: those whose clients hear nothing yet come first
            thread = self._later if _has_spoken(run) else self._first
            if not (thread is self._later and thread.speech):
                events = self._advance(run, thread)
                if events is not None:
                    return events
        busy = [thread.speech for thread in self._threads if thread.speech is not None]
        wait(busy, WAIT_S, FIRST_COMPLETED)
        return ()

    def close(self) -> None:
        self._runs.clear()
        for thread in self._threads:
            thread.run = None
            thread.executor.shutdown(cancel_futures=True)

    def _advance(self, run: Run, thread: SpeakingThread) -> Sequence[EngineEvent] | None:
        """Speak the run's next phrase now, begin it in the thread, or end the run; None if it must wait its turn."""
        state: SpeechRunState = run.state
        speed = run.request.speech.speed
        try:
            if not state.phrases and state.queue:
                state.phrases.extend(self._voice.phrases(state.queue[0], speed))
                state.spoken_chars += len(state.queue.popleft())
            if not state.phrases:
                self._runs.remove(run)
                return self._put_back(run)
            is_short = len(state.phrases[0].phonemes) <= SHORT_S * PHONEMES_PER_S * min(speed, FASTEST)
            if thread is self._first and is_short:
                self._runs.remove(run)
                return self._output(run, self._speak(state.phrases.popleft(), speed))
        except (LookupError, ValueError) as error:
            return self._failed(run, error)
        if thread.speech is not None:
            return None
        self._runs.remove(run)
        thread.run = run
        thread.speech = thread.executor.submit(self._speak, state.phrases.popleft(), speed)
        return ()

    def _collect(self, thread: SpeakingThread) -> Sequence[EngineEvent]:
        run, speech = thread.run, thread.speech
        thread.run = thread.speech = None
        if run is None or speech is None:
            return ()
        try:
            return self._output(run, speech.result())
        except (LookupError, ValueError) as error:
            return self._failed(run, error)

    def _speak(self, phrase: SpokenPhrase, speed: float) -> Speech:
        frames = self._voice.frames(phrase.phonemes, speed)
        return Speech(phrase, frames, self._codebooks.encode(frames.spectrum, frames.pitch_hz))

    def _output(self, run: Run, speech: Speech) -> Sequence[EngineEvent]:
        state: SpeechRunState = run.state
        events: list[EngineEvent] = []
        if len(speech.codes):
            words = None
            if speech.phrase.words and WordsPiece.kind in run.request.modalities:
                words = WordsPiece(speech.frames.times(speech.phrase.words, state.frames))
            state.frames += len(speech.codes)
            events.append(EngineChunk(run, (Tensor.of("codes", speech.codes),), words))
        return [*events, *self._put_back(run)]

    def _put_back(self, run: Run) -> Sequence[EngineEvent]:
        """The run waits for its next turn, or ends."""
        state: SpeechRunState = run.state
        if state.ended and not state.has_text:
            return [_end(run, state)]
        self._runs.append(run)
        return ()

    def _failed(self, run: Run, error: Exception) -> Sequence[EngineEvent]:
        """The text front end met a word that it cannot read."""
        self.stop(run)
        return [EngineFailed(run, StageFailed(f"the text cannot be read aloud: {error}", self.stage))]


def _lower_priority() -> None:
    """Of this thread alone: Linux counts niceness by thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LATER_NICE)


def _has_spoken(run: Run) -> bool:
    state: SpeechRunState = run.state
    return state.frames > 0


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
