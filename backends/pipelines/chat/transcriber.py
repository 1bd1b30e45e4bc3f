# SPDX-License-Identifier: Apache-2.0
"""Stage `transcriber`: the audio parts of a request to text, by Whisper: a chunk per part for the thinker, or
timed segments for the client (operation `transcription`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFinished, EngineOutput, EngineProgress, Run
from triton_omni.backends.core.generate import with_stage_options
from triton_omni.backends.core.outputs import TranscriptPiece, WordTime
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.chat.ear import Ear, Segment, WhisperEar
from triton_omni.backends.pipelines.chat.options import TranscriberOptions, model_folder, read_options
from triton_omni.backends.pipelines.chat.sound import SAMPLE_RATE_HZ, WINDOW_SAMPLES, Clip, clips_of, windows

OUTPUT = TranscriptPiece.kind
"""Name of the output for clients."""
LANGUAGE = "english"


@dataclass(eq=False, slots=True)
class Hearing:
    """State of one run: parts not begun, windows left of the one begun, and what was heard in it."""

    clips: deque[Clip]
    windows: deque[np.ndarray] = field(default_factory=deque[np.ndarray])
    texts: list[str] = field(default_factory=list[str])
    index: int = 0
    seconds: float = 0.0
    heard_s: float = 0.0
    is_heard: bool = False
    with_words: bool = False


class TranscriberEngine:
    """core.engine.Engine. A step hears one window of one run; runs take turns."""

    def __init__(self, stage: str, ear: Ear, max_audio_s: float) -> None:
        self.stage = stage
        self._ear = ear
        self._max_audio_s = max_audio_s
        self._runs: deque[Run] = deque()

    def open(self, run: Run) -> None:
        clips = clips_of(run.request, run.inputs, self._max_audio_s)
        params = with_stage_options(run.request.transcription, run.options(self.stage), self.stage)
        run.state = Hearing(
            deque(clips), seconds=sum(clip.seconds for clip in clips), with_words=params.word_timestamps
        )
        self._runs.append(run)

    def feed(self, run: Run, inputs: object, last: bool) -> bool:
        raise AssertionError("nothing feeds the transcriber: its sound comes with the request")

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    @property
    def has_work(self) -> bool:
        return any(not run.blocked for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        run = next((run for run in self._runs if not run.blocked), None)
        if run is None:
            return ()
        self._runs.remove(run)
        live: Hearing = run.state
        if not live.windows:
            live.windows.extend(windows(live.clips.popleft().resampled()))
        window = live.windows.popleft()
        is_timed = OUTPUT in run.wanted
        segments = self._ear.hear(window, timed=is_timed, worded=is_timed and live.with_words)
        events: list[EngineEvent] = [_said(run, live, segment) for segment in segments if OUTPUT in run.wanted]
        live.texts += [segment.text for segment in segments]
        live.heard_s += len(window) / SAMPLE_RATE_HZ
        events.append(EngineProgress(run, round(live.heard_s, 3), round(live.seconds, 3)))
        if not live.windows:
            if run.feeds:
                events.append(EngineChunk(run, piece=TranscriptPiece(" ".join(live.texts), part=live.index)))
            live.texts.clear()
            live.index += 1
        if live.windows or live.clips:
            self._runs.append(run)  # the end of the queue: whoever waits comes first
        else:
            events.append(EngineFinished(run, "stop", {"audio_input_s": round(live.seconds, 3)}))
        return events

    def close(self) -> None:
        self._runs.clear()


def _said(run: Run, live: Hearing, segment: Segment) -> EngineOutput:
    """A segment for the client, in seconds of all the audio. Joined, the texts are the whole transcript."""
    text = segment.text if not live.is_heard else f" {segment.text}"
    live.is_heard = True
    start_s, end_s = (round(live.heard_s + at_s, 2) for at_s in (segment.start_s, segment.end_s))
    words = [
        WordTime(word.text, round(live.heard_s + word.start_s, 2), round(live.heard_s + word.end_s, 2))
        for word in (segment.words if live.with_words else ())
    ]
    return EngineOutput(run, TranscriptPiece(text, start_s, end_s, LANGUAGE, tuple(words)))


def transcriber_engine(context: EngineContext) -> TranscriberEngine:
    """The engine of stage `transcriber`, in its worker."""
    options = read_options(context, TranscriberOptions)
    ear = WhisperEar(model_folder(context, options.model), context.device, options.threads)
    ear.hear(np.zeros(WINDOW_SAMPLES, np.float32))  # torch's first call is its slowest
    return TranscriberEngine(context.stage, ear, options.max_audio_s)
