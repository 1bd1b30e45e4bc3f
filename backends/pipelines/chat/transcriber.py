# SPDX-License-Identifier: Apache-2.0
"""Stage `transcriber`: the audio parts of a request to text, by Whisper, a chunk per part."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from backends.core.engine import Event, Finished, Progress, Run, Send
from backends.core.pipeline import EngineContext
from backends.pipelines.chat.options import TranscriberOptions, model_folder, read_options
from backends.pipelines.chat.sound import SAMPLE_RATE_HZ, WINDOW_SAMPLES, Clip, clips_of, windows

MAX_TOKENS = 224  # of a window; Whisper's own bound, half of its decoder's positions
NO_SPEECH, LOW_LOG_PROBABILITY = 0.6, -1.0  # Whisper's own bounds: likely no speech, and words hardly believed
SURELY_NO_SPEECH = 0.8  # silence has 0.95 and yet a firm "you"; speech, faint or late in a window, stays below 0.4


class Ear(Protocol):
    """What understands one window of sound."""

    def hear(self, samples: np.ndarray) -> str:
        """The words in at most 30 s of mono sound at 16 kHz; empty if there are none."""
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
        self._never = torch.tensor(settings.suppress_tokens, device=device)
        self._not_first = torch.tensor(settings.begin_suppress_tokens, device=device)

    def hear(self, samples: np.ndarray) -> str:
        torch = self._torch
        with torch.inference_mode():
            given = self._features(samples, sampling_rate=SAMPLE_RATE_HZ, return_tensors="pt")
            heard = self._model.model.encoder(given.input_features.to(self._device, torch.float32))
            tokens, log_probability, no_speech = self._decode(heard)
        hardly_believed = log_probability / (len(tokens) + 1) < LOW_LOG_PROBABILITY
        if no_speech > SURELY_NO_SPEECH or (no_speech > NO_SPEECH and hardly_believed):
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def _decode(self, heard: Any) -> tuple[list[int], float, float]:
        """(tokens, their log-probability together, probability that there is no speech)."""
        torch = self._torch
        tokens: list[int] = []
        total, no_speech, cache, ids = 0.0, 0.0, None, self._begin
        while len(tokens) < MAX_TOKENS:
            given = torch.tensor([ids], device=self._device)
            out = self._model(encoder_outputs=heard, decoder_input_ids=given, past_key_values=cache, use_cache=True)
            cache, scores = out.past_key_values, out.logits[0, -1]
            if not tokens:
                no_speech = float(out.logits[0, 0].softmax(-1)[self._no_speech])
                scores[self._not_first] = -torch.inf
            scores[self._never] = -torch.inf
            best = int(scores.argmax())
            total += float(scores.log_softmax(-1)[best])
            if best == self._end:
                break
            tokens.append(best)
            ids = [best]
        return tokens, total, no_speech


@dataclass(eq=False, slots=True)
class Hearing:
    """State of one run: parts not begun, windows left of the one begun, and what was heard in it."""

    clips: deque[Clip]
    windows: deque[np.ndarray] = field(default_factory=deque[np.ndarray])
    texts: list[str] = field(default_factory=list[str])
    index: int = 0
    seconds: float = 0.0
    heard_s: float = 0.0


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
        live.texts.append(self._ear.hear(window))
        live.heard_s += len(window) / SAMPLE_RATE_HZ
        events: list[Event] = [Progress(run, {"heard_s": round(live.heard_s, 3), "audio_s": round(live.seconds, 3)})]
        if not live.windows:
            text = " ".join(text for text in live.texts if text)
            events.append(Send(run, meta={"index": live.index, "text": text}))
            live.texts.clear()
            live.index += 1
        if live.windows or live.clips:
            self._runs.append(run)  # the end of the queue: whoever waits comes first
        else:
            events.append(Finished(run, "stop", {"audio_input_s": round(live.seconds, 3)}))
        return events

    def close(self) -> None:
        self._runs.clear()


def transcriber_engine(context: EngineContext) -> TranscriberEngine:
    """The engine of stage `transcriber`, in its worker."""
    options = read_options(context, TranscriberOptions)
    ear = WhisperEar(model_folder(context, options.model), context.device, options.threads)
    ear.hear(np.zeros(WINDOW_SAMPLES, np.float32))  # torch's first call is its slowest
    return TranscriberEngine(context.stage, ear, options.max_audio_s)
