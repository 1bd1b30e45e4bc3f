# SPDX-License-Identifier: Apache-2.0
"""Stage `transcriber`: the audio parts of a request to text, by Whisper: a chunk per part for the thinker, or
timed segments for the client (operation `transcription`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from backends.core.engine import Event, Finished, Output, Progress, Run, Send
from backends.core.pipeline import EngineContext
from backends.pipelines.chat.options import TranscriberOptions, model_folder, read_options
from backends.pipelines.chat.sound import SAMPLE_RATE_HZ, WINDOW_SAMPLES, Clip, clips_of, windows

MAX_TOKENS = 224  # of a window; Whisper's own bound, half of its decoder's positions
NO_SPEECH, LOW_LOG_PROBABILITY = 0.6, -1.0  # Whisper's own bounds: likely no speech, and words hardly believed
SURELY_NO_SPEECH = 0.8  # silence has 0.95 and yet a firm "you"; speech, faint or late in a window, stays below 0.4


OUTPUT = "transcript"
"""Name of the output for clients."""
LANGUAGE = "english"
SECONDS_PER_MARK = 0.02
FIRST_MARK_S = 1.0  # Whisper's own bound: the first words begin within the first second, or the mark says so


@dataclass(frozen=True, slots=True)
class Segment:
    """Words, and when they are said, in seconds of their window."""

    start_s: float
    end_s: float
    text: str


class Ear(Protocol):
    """What understands one window of sound."""

    def hear(self, samples: np.ndarray, timed: bool = False) -> list[Segment]:
        """The words in at most 30 s of mono sound at 16 kHz: one segment, or if `timed` one per phrase; or none."""
        ...


class WhisperEar:
    """Whisper in torch, greedy, one window at a time."""

    def __init__(self, folder: Path, device: str, threads: int) -> None:
        import torch
        from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

        torch.set_num_threads(threads)
        self._torch = torch
        self._device = device
        model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval().to(device)
        self._features = WhisperFeatureExtractor.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        settings: Any = model.generation_config
        self._begin = [settings.decoder_start_token_id, *(token for _, token in settings.forced_decoder_ids or ())]
        self._end: int = settings.eos_token_id
        self._no_speech: int = settings.no_speech_token_id
        self._no_marks: int = self._begin[-1]
        self._never = torch.tensor(settings.suppress_tokens, device=device)
        self._not_first = torch.tensor(settings.begin_suppress_tokens, device=device)

    def hear(self, samples: np.ndarray, timed: bool = False) -> list[Segment]:
        torch = self._torch
        with torch.inference_mode():
            given = self._features(samples, sampling_rate=SAMPLE_RATE_HZ, return_tensors="pt")
            heard = self._model.model.encoder(given.input_features.to(self._device, torch.float32))
            tokens, log_probability, no_speech = self._decode(heard, timed)
        hardly_believed = log_probability / (len(tokens) + 1) < LOW_LOG_PROBABILITY
        if no_speech > SURELY_NO_SPEECH or (no_speech > NO_SPEECH and hardly_believed):
            return []
        return list(self._segments(tokens, len(samples) / SAMPLE_RATE_HZ))

    def _segments(self, tokens: Sequence[int], length_s: float) -> Iterator[Segment]:
        """Phrases between two marks; what has no mark around it reaches to the window's borders."""
        start_s, words = 0.0, list[int]()
        for token in (*tokens, self._end):
            is_mark = token > self._no_marks
            if not is_mark and token != self._end:
                words.append(token)
                continue
            at_s = min((token - self._no_marks - 1) * SECONDS_PER_MARK if is_mark else length_s, length_s)
            text = self._tokenizer.decode(words, skip_special_tokens=True).strip()
            if text:
                yield Segment(round(start_s, 2), round(max(start_s, at_s), 2), text)
            start_s, words = at_s, []

    def _decode(self, heard: Any, timed: bool) -> tuple[list[int], float, float]:
        """(tokens, their log-probability together, probability that there is no speech)."""
        torch = self._torch
        tokens: list[int] = []
        total, no_speech, cache, ids = 0.0, 0.0, None, self._begin[:-1] if timed else self._begin
        while len(tokens) < MAX_TOKENS:
            given = torch.tensor([ids], device=self._device)
            out = self._model(encoder_outputs=heard, decoder_input_ids=given, past_key_values=cache, use_cache=True)
            cache, scores = out.past_key_values, out.logits[0, -1]
            if not tokens:
                no_speech = float(out.logits[0, 0].softmax(-1)[self._no_speech])
                scores[self._not_first] = -torch.inf
            scores[self._never] = -torch.inf
            if timed:
                self._keep_marks_in_order(scores, tokens)
            best = int(scores.argmax())
            total += float(scores.log_softmax(-1)[best])
            if best == self._end:
                break
            tokens.append(best)
            ids = [best]
        return tokens, total, no_speech

    def _keep_marks_in_order(self, scores: Any, tokens: Sequence[int]) -> None:
        """Whisper's grammar: a phrase stands between two marks, marks never go back, the likelier kind comes."""
        torch, first_mark = self._torch, self._no_marks + 1
        scores[self._no_marks] = -torch.inf
        marks = [token for token in tokens if token >= first_mark]
        after_mark = bool(tokens) and tokens[-1] >= first_mark
        if not tokens:
            scores[:first_mark] = -torch.inf
            scores[first_mark + round(FIRST_MARK_S / SECONDS_PER_MARK) + 1 :] = -torch.inf
        elif after_mark and len(marks) % 2:  # a phrase has begun: now its words
            scores[first_mark:] = -torch.inf
        elif after_mark:  # it has ended: the next one begins, or nothing comes
            scores[: self._end] = -torch.inf
        if marks:
            is_open_end = after_mark and not len(marks) % 2
            scores[first_mark : marks[-1] + (0 if is_open_end else 1)] = -torch.inf
        likely = scores.log_softmax(-1)
        if likely[first_mark:].logsumexp(-1) > likely[:first_mark].max():
            scores[:first_mark] = -torch.inf


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


class TranscriberEngine:
    """core.engine.Engine. A step hears one window of one run; runs take turns."""

    def __init__(self, stage: str, ear: Ear, max_audio_s: float) -> None:
        self.stage = stage
        self._ear = ear
        self._max_audio_s = max_audio_s
        self._runs: deque[Run] = deque()

    def open(self, run: Run) -> None:
        clips = clips_of(run.request, run.inputs, self._max_audio_s)
        run.state = Hearing(deque(clips), seconds=sum(clip.seconds for clip in clips))
        self._runs.append(run)

    def feed(self, run: Run, inputs: object, last: bool) -> bool:
        raise AssertionError("nothing feeds the transcriber: its sound comes with the request")

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    @property
    def busy(self) -> bool:
        return any(not run.blocked for run in self._runs)

    def step(self) -> Sequence[Event]:
        run = next((run for run in self._runs if not run.blocked), None)
        if run is None:
            return ()
        self._runs.remove(run)
        live: Hearing = run.state
        if not live.windows:
            live.windows.extend(windows(live.clips.popleft().resampled()))
        window = live.windows.popleft()
        segments = self._ear.hear(window, timed=OUTPUT in run.wanted)
        events: list[Event] = [_said(run, live, segment) for segment in segments if OUTPUT in run.wanted]
        live.texts += [segment.text for segment in segments]
        live.heard_s += len(window) / SAMPLE_RATE_HZ
        events.append(Progress(run, {"heard_s": round(live.heard_s, 3), "audio_s": round(live.seconds, 3)}))
        if not live.windows:
            if run.feeds:
                events.append(Send(run, meta={"index": live.index, "text": " ".join(live.texts)}))
            live.texts.clear()
            live.index += 1
        if live.windows or live.clips:
            self._runs.append(run)  # the end of the queue: whoever waits comes first
        else:
            events.append(Finished(run, "stop", {"audio_input_s": round(live.seconds, 3)}))
        return events

    def close(self) -> None:
        self._runs.clear()


def _said(run: Run, live: Hearing, segment: Segment) -> Output:
    """A segment for the client, in seconds of all the audio. Joined, the texts are the whole transcript."""
    text = segment.text if not live.is_heard else f" {segment.text}"
    live.is_heard = True
    start_s, end_s = (round(live.heard_s + at_s, 2) for at_s in (segment.start_s, segment.end_s))
    return Output(run, OUTPUT, meta={"text": text, "start_s": start_s, "end_s": end_s, "language": LANGUAGE})


def transcriber_engine(context: EngineContext) -> TranscriberEngine:
    """The engine of stage `transcriber`, in its worker."""
    options = read_options(context, TranscriberOptions)
    ear = WhisperEar(model_folder(context, options.model), context.device, options.threads)
    ear.hear(np.zeros(WINDOW_SAMPLES, np.float32))  # torch's first call is its slowest
    return TranscriberEngine(context.stage, ear, options.max_audio_s)
