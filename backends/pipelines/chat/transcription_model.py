# SPDX-License-Identifier: Apache-2.0
"""Whisper on CTranslate2: a window of audio to tokens with their probabilities, and the frame of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from triton_omni.backends.pipelines.chat.audio_windows import SAMPLE_RATE_HZ, WINDOW_SAMPLES
from triton_omni.backends.pipelines.chat.mel import log_mel

FRAME_S = 0.02
"""The encoder has a state, and the vocabulary a timestamp, for every 20 ms of a window."""
FRAME_SAMPLES = round(FRAME_S * SAMPLE_RATE_HZ)
MAX_TOKENS = 224  # of a window: half of the decoder's positions, as in openai/whisper
TOKENS_PER_S, TOKENS_AT_LEAST = 12, 24  # fast speech has 7 tokens a second, and two timestamps a phrase
PADDING_S = 1.0
"""Silence encoded after the audio. Without it the decoder repeats the end, and the last timestamp is off."""
NGRAM_TOKENS = 5  # no sequence of this many tokens occurs twice in a decoding with `no_repeat`


@dataclass(frozen=True, slots=True)
class DecodedWindow:
    """Tokens of a window, without the end-of-text token.

    avg_logprob     mean log probability of the tokens and of the end
    no_speech_prob  probability of the no-speech token at the start of the transcript
    """

    tokens: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class EncodedWindow:
    """States of a window, (1, 1500, width), and the length of its audio in samples."""

    states: Any
    samples: int


class SpeechModel(Protocol):
    """A Whisper model as the transcriber uses it."""

    first_timestamp: int
    """Token ids from here on are timestamps, FRAME_S apart."""

    def encode(self, samples: np.ndarray) -> EncodedWindow:
        """Encoder states of at most 30 s of mono audio at 16 kHz."""
        ...

    def decode(self, encoded: EncodedWindow, no_repeat: bool = False) -> DecodedWindow:
        """The most likely tokens of a window; phrases stand between timestamp tokens."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without timestamps and other special tokens."""
        ...

    def first_frames(self, encoded: EncodedWindow, tokens: Sequence[int], frames: int) -> np.ndarray:
        """(len(tokens),) int64, rising: which of the first `frames` each text token begins at."""
        ...


class WhisperModel:
    """A CTranslate2 model folder of Whisper; greedy, one window at a time.

    The encoder runs on the audio and PADDING_S of silence instead of 30 s. The states of the rest are those of
    silence, computed once: the decoder was trained on 1,500 states and repeats itself on fewer.
    """

    def __init__(self, folder: Path, device: str, threads: int, compute_type: str) -> None:
        import ctranslate2
        from tokenizers import Tokenizer

        self._storage = ctranslate2.StorageView.from_array
        self._model = ctranslate2.models.Whisper(
            str(folder), device, compute_type=compute_type, intra_threads=threads, inter_threads=2
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        start, no_timestamps, self._end = (
            cast(int, self._tokenizer.token_to_id(f"<|{name}|>"))
            for name in ("startoftranscript", "notimestamps", "endoftext")
        )
        self._start = [start]
        self.first_timestamp: int = no_timestamps + 1
        self._silence = self._encode(np.zeros(WINDOW_SAMPLES, np.float32))

    def encode(self, samples: np.ndarray) -> EncodedWindow:
        padding = round(PADDING_S * SAMPLE_RATE_HZ)
        frames = min(math.ceil((len(samples) + padding) / FRAME_SAMPLES), WINDOW_SAMPLES // FRAME_SAMPLES)
        padded = np.zeros(frames * FRAME_SAMPLES, np.float32)
        padded[: len(samples)] = samples
        states = np.concatenate((self._encode(padded), self._silence[:, frames:]), axis=1)
        return EncodedWindow(self._storage(states), len(samples))

    def _encode(self, samples: np.ndarray) -> np.ndarray:
        """(1, frames, width) float32 states of whole frames."""
        features = self._storage(log_mel(samples)[None])
        return np.asarray(self._model.encode(features, to_cpu=True)).astype(np.float32)

    def decode(self, encoded: EncodedWindow, no_repeat: bool = False) -> DecodedWindow:
        limit = min(MAX_TOKENS, TOKENS_AT_LEAST + TOKENS_PER_S * encoded.samples // SAMPLE_RATE_HZ)
        (result,) = self._model.generate(
            encoded.states, [self._start], beam_size=1, max_length=limit,
            no_repeat_ngram_size=NGRAM_TOKENS if no_repeat else 0, return_scores=True, return_no_speech_prob=True,
        )  # fmt: skip
        tokens: list[int] = result.sequences_ids[0]
        total = result.scores[0] * len(tokens)  # the score is the sum over the tokens, divided by their number
        return DecodedWindow(tuple(tokens), total / (len(tokens) + 1), result.no_speech_prob)

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token < self._end])

    def first_frames(self, encoded: EncodedWindow, tokens: Sequence[int], frames: int) -> np.ndarray:
        features = 2 * frames  # a state of the encoder has two frames of features
        (result,) = self._model.align(encoded.states, self._start, [list(tokens)], features)
        pairs = np.array(result.alignments, np.int64)
        return pairs[np.searchsorted(pairs[:, 0], np.arange(len(tokens))), 1]
