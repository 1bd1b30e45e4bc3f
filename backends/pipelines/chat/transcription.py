# SPDX-License-Identifier: Apache-2.0
"""Audio to segments with times, window by window, over a Whisper model.

A window is 30 s at most. Whisper closes a phrase with a timestamp. What follows the last complete phrase of a window
is decoded again at the start of the next one, as in openai/whisper; so is speech that the decoder left out at the end.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from triton_omni.backends.pipelines.chat.audio_windows import (
    SAMPLE_RATE_HZ,
    WINDOW_SAMPLES,
    leading_silence,
    quietest,
    quietest_near_the_end,
)
from triton_omni.backends.pipelines.chat.transcription_model import (
    FRAME_S,
    FRAME_SAMPLES,
    DecodedWindow,
    EncodedWindow,
    SpeechModel,
)
from triton_omni.backends.pipelines.chat.word_alignment import Word, loud_frames, words_at

LOW_LOGPROB = -1.0  # openai/whisper's bound for text that is hardly believed
NO_SPEECH, NO_SPEECH_LOGPROB = 0.5, -0.8  # a tone has 0.57 and more, and a doubtful "You"; faint speech has 0.22
SURELY_NO_SPEECH = 0.8  # silence has 0.95 and yet a firm "you"; speech, faint or late in a window, stays below 0.4
MAX_COMPRESSION_RATIO = 2.4  # openai/whisper's bound for text that repeats itself
MAX_TOKENS_PER_S = 8  # of speech; more are a loop, not a speaker who repeats himself
LONGEST_LOOP_TOKENS, LOOP_TIMES = 32, 4
SEEK_RADIUS = SAMPLE_RATE_HZ // 4
"""A timestamp is this far off at most; the next window begins where it is quietest within."""
BORDER_FRAMES = 25
"""A phrase that ends this near to the end of a full window may be cut off by it."""
REST_FRAMES = 15
"""More loud frames than these after the last phrase are decoded again."""
LEAST_SEEK = 3 * SAMPLE_RATE_HZ // 10
"""Windows advance by this at least, which bounds how often audio is decoded."""
PAUSE_FRAMES, LATE_FRAMES = 50, 75
"""No phrase is cut by a pause of this length and LATE_FRAMES behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A phrase. Times in seconds of its window; with words, they are those of the first and the last one.

    The last four fields are those of OpenAI's verbose_json; all but the tokens are of the whole window.
    """

    text: str
    start_s: float
    end_s: float
    words: tuple[Word, ...] = ()
    tokens: tuple[int, ...] = ()
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowTranscript:
    """A transcribed window, in samples of the audio passed.

    begin: where the window begins; end: where the next one begins
    """

    segments: tuple[Segment, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class DecodedPhrase:
    """Text tokens between two timestamps, in frames of the window. end: None if the decoder wrote none."""

    start: int
    end: int | None
    tokens: tuple[int, ...]


class Transcriber:
    """Transcribes audio window by window."""

    def __init__(self, model: SpeechModel) -> None:
        self._model = model

    def transcribe(self, samples: np.ndarray, timestamps: bool) -> WindowTranscript:
        """The next window of mono audio (n,) at 16 kHz; the next call takes the samples after its end.

        timestamps  align words with the audio: the segments have words and begin and end with speech
        """
        begin = leading_silence(samples)
        if begin == len(samples):
            return WindowTranscript((), begin, begin)
        window = samples[begin : begin + WINDOW_SAMPLES]
        is_last = begin + len(window) == len(samples)
        is_loud = loud_frames(window, SAMPLE_RATE_HZ)
        encoded = self._model.encode(window)
        decoding = self._decode(encoded, int(is_loud.sum()))
        phrases: list[DecodedPhrase] = []
        if not _has_no_speech(decoding):
            phrases = phrases_of(decoding.tokens, self._model.first_timestamp)
            phrases = complete_phrases(phrases, len(is_loud), is_last)
        end = _next_window(window, is_loud, phrases, is_last)
        is_loud = is_loud if end == len(window) else is_loud[: end // FRAME_SAMPLES]
        segments = tuple(self._segments(phrases, decoding, encoded, is_loud, timestamps))
        return WindowTranscript(segments, begin, begin + end)

    def _decode(self, encoded: EncodedWindow, loud: int) -> DecodedWindow:
        """The likeliest tokens, without repeats that no speaker says in `loud` frames."""
        first = self._model.decode(encoded)
        if not self._is_loop(first, loud):
            return first
        other = self._model.decode(encoded, no_repeat=True)
        if other.avg_logprob >= LOW_LOGPROB and not self._is_loop(other, loud):
            return other
        return DecodedWindow(without_loop(first.tokens), first.avg_logprob, first.no_speech_prob)

    def _is_loop(self, decoding: DecodedWindow, loud: int) -> bool:
        loud_s = max(1.0, loud * FRAME_S)
        if len(decoding.tokens) <= MAX_TOKENS_PER_S * loud_s:
            return False
        return compression_ratio(self._model.text(decoding.tokens)) > MAX_COMPRESSION_RATIO

    def _segments(
        self,
        phrases: Sequence[DecodedPhrase],
        decoding: DecodedWindow,
        encoded: EncodedWindow,
        is_loud: np.ndarray,
        timestamps: bool,
    ) -> Iterator[Segment]:
        model, length_s = self._model, encoded.samples / SAMPLE_RATE_HZ
        ratio = compression_ratio(model.text(decoding.tokens))
        phrases = [phrase for phrase in phrases if is_spoken(model.text(phrase.tokens))]
        groups = [word_tokens(phrase.tokens, model.text) for phrase in phrases]
        aligned = self._words([group for words in groups for group in words], encoded, is_loud) if timestamps else None
        for phrase, group in zip(phrases, groups, strict=True):
            words = () if aligned is None else tuple(islice(aligned, len(group)))
            end_s = length_s if phrase.end is None else min(phrase.end * FRAME_S, length_s)
            yield Segment(
                text=model.text(phrase.tokens).strip(),
                start_s=words[0].start_s if words else round(min(phrase.start * FRAME_S, end_s), 2),
                end_s=words[-1].end_s if words else round(end_s, 2),
                words=words, tokens=phrase.tokens, avg_logprob=decoding.avg_logprob, compression_ratio=ratio,
                no_speech_prob=decoding.no_speech_prob,
            )  # fmt: skip

    def _words(self, groups: Sequence[Sequence[int]], encoded: EncodedWindow, is_loud: np.ndarray) -> Iterator[Word]:
        """Every word of the window with its times; `groups` has the tokens of each."""
        if not groups:
            return iter(())
        frames = self._model.first_frames(encoded, [token for group in groups for token in group], len(is_loud))
        firsts = np.cumsum([0, *map(len, groups[:-1])])
        texts = [self._model.text(group).strip() for group in groups]
        return words_at(texts, frames[firsts], is_loud, encoded.samples / SAMPLE_RATE_HZ)


def phrases_of(tokens: Sequence[int], first_timestamp: int) -> list[DecodedPhrase]:
    """The phrases of a decoding; empty ones are left out."""
    phrases, start, text = list[DecodedPhrase](), 0, list[int]()
    for token in tokens:
        if token < first_timestamp:
            text.append(token)
            continue
        frame = token - first_timestamp
        if text:
            phrases.append(DecodedPhrase(start, frame, tuple(text)))
        start, text = frame, []
    if text:
        phrases.append(DecodedPhrase(start, None, tuple(text)))
    return phrases


def complete_phrases(phrases: list[DecodedPhrase], frames: int, is_last: bool) -> list[DecodedPhrase]:
    """Without the last phrase if the end of a window of `frames` may have cut it off, and others are left."""
    if len(phrases) < 2:
        return phrases
    end = phrases[-1].end
    is_cut = end is None or (not is_last and end >= frames - BORDER_FRAMES)
    return phrases[:-1] if is_cut else phrases


def _next_window(window: np.ndarray, is_loud: np.ndarray, phrases: Sequence[DecodedPhrase], is_last: bool) -> int:
    """Where the next window begins: after the last phrase, unless only silence follows it."""
    whole = len(window) if is_last else quietest_near_the_end(window)
    end = phrases[-1].end if phrases else None
    if end is None:
        return whole
    rest = np.flatnonzero(is_loud[end:])
    if len(rest) <= (REST_FRAMES if is_last else 0):
        return len(window)
    seek = quietest(window, _end_frame(phrases[-1].start, end, is_loud) * FRAME_SAMPLES, SEEK_RADIUS)
    return max(seek, LEAST_SEEK)


def _end_frame(start: int, end: int, is_loud: np.ndarray) -> int:
    """Where a phrase from `start` to `end` ends. Without the beginning of what follows it after a pause: a timestamp
    may be as late as LATE_FRAMES into it.
    """
    loud = start + np.flatnonzero(is_loud[start:end])
    pauses = np.flatnonzero(np.diff(loud) > PAUSE_FRAMES)
    if not len(pauses) or not is_loud[end : end + REST_FRAMES].all():
        return end
    begin = int(loud[pauses[-1] + 1])
    return begin - PAUSE_FRAMES // 2 if end - begin <= LATE_FRAMES else end


def word_tokens(tokens: Sequence[int], text: Callable[[Sequence[int]], str]) -> list[list[int]]:
    """The tokens of each word of a phrase. A sign that stands alone belongs to the word before it."""
    groups: list[list[int]] = []
    for token in tokens:
        if not groups or text([token]).startswith(" "):
            groups.append([])
        groups[-1].append(token)
    for index in range(len(groups) - 1, 0, -1):
        if not is_spoken(text(groups[index])):
            groups[index - 1] += groups.pop(index)
    return groups


def without_loop(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens with the sequence that they end with again and again, if any, only once."""
    for size in range(1, LONGEST_LOOP_TOKENS + 1):
        end = len(tokens)
        while end >= 2 * size and tokens[end - 2 * size : end - size] == tokens[end - size : end]:
            end -= 1
        if len(tokens) - end >= (LOOP_TIMES - 1) * size:
            return tuple(tokens[:end])
    return tuple(tokens)


def compression_ratio(text: str) -> float:
    """How many times zlib makes the text smaller, as openai/whisper measures repeats; 0 for no text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def is_spoken(text: str) -> bool:
    """True for a text with letters or digits."""
    return any(character.isalnum() for character in text)


def _has_no_speech(decoding: DecodedWindow) -> bool:
    is_unsure = decoding.no_speech_prob > NO_SPEECH and decoding.avg_logprob < NO_SPEECH_LOGPROB
    return decoding.no_speech_prob > SURELY_NO_SPEECH or is_unsure
