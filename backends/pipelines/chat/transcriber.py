# SPDX-License-Identifier: Apache-2.0
"""Stage `transcriber`: the audio parts of a request to text, by Whisper: a chunk per part for the thinker, or
timed segments for the client (operation `transcription`).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.core.engine import (
    EngineChunk,
    EngineEvent,
    EngineFinished,
    EngineOutput,
    EngineProgress,
    Run,
    read_engine_options,
)
from triton_omni.backends.core.generate import with_stage_options
from triton_omni.backends.core.outputs import SegmentDecoding, TranscriptPiece, WordTime
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.chat.audio_windows import SAMPLE_RATE_HZ, Clip, clips_of
from triton_omni.backends.pipelines.chat.options import TranscriberOptions, model_folder
from triton_omni.backends.pipelines.chat.transcription import Segment, Transcriber, WindowTranscript
from triton_omni.backends.pipelines.chat.transcription_model import WhisperModel

OUTPUT = TranscriptPiece.kind
"""Name of the output for clients."""
LANGUAGE = "english"
NO_SAMPLES = np.zeros(0, np.float32)
SHORT_SAMPLES = 8 * SAMPLE_RATE_HZ
"""A window up to this is transcribed within a step; longer ones in a thread, so that short clips need not wait."""
WAIT_S = 0.005
"""A step without other work waits this long for the thread; then the worker may take new runs."""
BACKGROUND_NICE = 10


@dataclass(eq=False, slots=True)
class TranscriberRunState:
    """State of one run.

    clips      audio parts that are not begun
    rest       (n,) samples at 16 kHz of the part that is begun, from the next window on
    texts      what the part's windows said
    index      number of the part
    seconds    of all parts together
    offset_s   where `rest` begins in all the audio
    """

    clips: deque[Clip]
    seconds: float
    rest: np.ndarray = field(default_factory=lambda: NO_SAMPLES)
    texts: list[str] = field(default_factory=list[str])
    index: int = 0
    offset_s: float = 0.0
    has_said: bool = False
    word_timestamps: bool = False


class TranscriberEngine:
    """core.engine.Engine. Runs take turns by windows: short windows in `step`, one long window at a time beside it."""

    def __init__(self, stage: str, transcriber: Transcriber, max_audio_s: float) -> None:
        self.stage = stage
        self._transcriber = transcriber
        self._max_audio_s = max_audio_s
        self._runs: deque[Run] = deque()
        self._background: Future[WindowTranscript] | None = None
        self._background_run: Run | None = None
        """None if the run was stopped meanwhile; its result is dropped."""
        self._thread = ThreadPoolExecutor(1, "transcriber", initializer=_lower_priority)

    def open(self, run: Run) -> None:
        clips = clips_of(run.request, run.inputs, self._max_audio_s)
        params = with_stage_options(run.request.transcription, run.options(self.stage), self.stage)
        seconds = sum(clip.seconds for clip in clips)
        run.state = TranscriberRunState(deque(clips), seconds, word_timestamps=params.word_timestamps)
        self._runs.append(run)

    def feed(self, run: Run, inputs: object, last: bool) -> bool:
        raise AssertionError("nothing feeds the transcriber: its audio comes with the request")

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)
        if run is self._background_run:
            self._background_run = None

    @property
    def has_work(self) -> bool:
        return self._background is not None or any(not run.blocked for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        ready = [run for run in self._runs if not run.blocked]
        short = next((run for run in ready if _samples_left(run) <= SHORT_SAMPLES), None)
        long = next((run for run in ready if _samples_left(run) > SHORT_SAMPLES), None)
        if self._background is None and long is not None:
            self._runs.remove(long)
            self._background_run = long
            self._background = self._thread.submit(self._transcribe, long)
        if short is not None:
            self._runs.remove(short)
            return self._advance(short, self._transcribe(short))
        if self._background is None or not wait((self._background,), WAIT_S).done:
            return ()
        run, window = self._background_run, self._background.result()
        self._background = self._background_run = None
        return self._advance(run, window) if run is not None else ()

    def _transcribe(self, run: Run) -> WindowTranscript:
        state: TranscriberRunState = run.state
        if not len(state.rest):
            state.rest = state.clips.popleft().resampled()
        return self._transcriber.transcribe(state.rest, timestamps=OUTPUT in run.wanted)

    def _advance(self, run: Run, window: WindowTranscript) -> Sequence[EngineEvent]:
        """The window's output; go on behind it: to the rest of the part, the next part, or the end."""
        state: TranscriberRunState = run.state
        events: list[EngineEvent] = []
        if OUTPUT in run.wanted:
            events += [_output(run, state, window, segment) for segment in window.segments]
        state.texts += [segment.text for segment in window.segments]
        state.rest = state.rest[window.end :]
        state.offset_s += window.end / SAMPLE_RATE_HZ
        events.append(EngineProgress(run, round(state.offset_s, 3), round(state.seconds, 3)))
        if not len(state.rest):
            if run.feeds:
                events.append(EngineChunk(run, piece=TranscriptPiece(" ".join(state.texts), part=state.index)))
            state.texts.clear()
            state.index += 1
        if len(state.rest) or state.clips:
            self._runs.append(run)  # the end of the queue: other runs come first
        else:
            events.append(EngineFinished(run, "stop", {"audio_input_s": round(state.seconds, 3)}))
        return events

    def close(self) -> None:
        self._runs.clear()
        self._background_run = None
        self._thread.shutdown(cancel_futures=True)


def _samples_left(run: Run) -> float:
    """Samples at 16 kHz of the run's part that is begun, or of the next one."""
    state: TranscriberRunState = run.state
    return len(state.rest) or state.clips[0].seconds * SAMPLE_RATE_HZ


def _lower_priority() -> None:
    """Of this thread alone: Linux counts niceness by thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)


def _output(run: Run, state: TranscriberRunState, window: WindowTranscript, segment: Segment) -> EngineOutput:
    """A segment for the client, in seconds of all the audio. Joined, the texts are the whole transcript."""
    text = f" {segment.text}" if state.has_said else segment.text
    state.has_said = True
    begin_s = state.offset_s + window.begin / SAMPLE_RATE_HZ
    start_s, end_s = (round(begin_s + at_s, 2) for at_s in (segment.start_s, segment.end_s))
    words = [
        WordTime(word.text, round(begin_s + word.start_s, 2), round(begin_s + word.end_s, 2))
        for word in (segment.words if state.word_timestamps else ())
    ]
    decoding = SegmentDecoding(
        seek=round(begin_s * 100),
        tokens=segment.tokens,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
    )
    return EngineOutput(run, TranscriptPiece(text, start_s, end_s, LANGUAGE, tuple(words), decoding=decoding))


def transcriber_engine(context: EngineContext) -> TranscriberEngine:
    """The engine of stage `transcriber`, in its worker."""
    options = read_engine_options(context.options, TranscriberOptions, context.stage)
    model = WhisperModel(model_folder(context, options.model), context.device, options.threads, options.compute_type)
    return TranscriberEngine(context.stage, Transcriber(model), options.max_audio_s)
