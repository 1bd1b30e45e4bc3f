# SPDX-License-Identifier: Apache-2.0
"""When each word is said: where Whisper looked for its tokens, ordered, and cut at silences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

FRAME_S = 0.02
"""Whisper's encoder has a state for every 20 ms of audio."""
QUIET = 0.02
"""Of loud speech: what is below is silence. Noise may lift that bound up to LOUDEST_QUIET."""
NOISE_FACTOR, LOUDEST_QUIET = 1.5, 0.1
LOUD_PERCENTILE, NOISE_PERCENTILE = 95, 10
GAP_FRAMES = 12
"""A pause of 0.24 s stands between two words, never in one."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word and when it is said, in seconds."""

    text: str
    start_s: float
    end_s: float


def loud_frames(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """(frames,) bool: where there is no silence."""
    size = round(FRAME_S * rate_hz)
    padded = np.pad(samples.astype(np.float64), (0, -len(samples) % size))
    level = np.sqrt((padded.reshape(-1, size) ** 2).mean(axis=1))
    loud, noise = np.percentile(level, (LOUD_PERCENTILE, NOISE_PERCENTILE))
    return level > min(max(NOISE_FACTOR * noise, QUIET * loud), LOUDEST_QUIET * loud)


def words_at(texts: Sequence[str], starts: np.ndarray, is_loud: np.ndarray, length_s: float) -> Iterator[Word]:
    """The words without the silence around them; `starts` has the frame each begins at.

    length_s  of the audio, whose last frame may be a part of one
    """
    borders = _without_silent_spans([*map(int, starts), len(is_loud)], [len(text) for text in texts], is_loud)
    spans = [_sounding(begin, end, is_loud) for begin, end in pairwise(borders)]
    before = 0
    for index, (text, (begin, end)) in enumerate(zip(texts, spans, strict=True)):
        # What belongs to a neighbour's span and is not parted from this word by a pause is this word's.
        after = spans[index + 1][0] if index + 1 < len(spans) else len(is_loud)
        begin = begin - _reach(is_loud[before:begin][::-1])
        end = end + _reach(is_loud[end:after])
        before = end
        yield Word(text, round(begin * FRAME_S, 2), round(min(end * FRAME_S, length_s), 2))


def _without_silent_spans(borders: Sequence[int], sizes: Sequence[int], is_loud: np.ndarray) -> list[int]:
    """The borders of words of `sizes` characters. Alignment may put a word where nothing is said, or give it no frame:
    it shares the loud frames of the word before it (the first one: of those after it) in proportion to their sizes.
    """
    loud = [np.flatnonzero(is_loud[begin:end]) + begin for begin, end in pairwise(borders)]
    result, begin = list(borders), 0
    while begin < len(sizes):
        end, shared = begin + 1, loud[begin]
        while end < len(sizes) and not (len(shared) and len(loud[end])):
            shared = np.concatenate((shared, loud[end]))
            end += 1
        shared = shared if len(shared) else np.arange(borders[begin], borders[end])
        for index in range(begin + 1, end):
            done = len(shared) * sum(sizes[begin:index]) // sum(sizes[begin:end])
            result[index] = int(shared[done]) if len(shared) else borders[begin]
        begin = end
    return result


def _sounding(begin: int, end: int, is_loud: np.ndarray) -> tuple[int, int]:
    """The longest stretch of audio without a pause."""
    loud = begin + np.flatnonzero(is_loud[begin:end])
    if not len(loud):
        return begin, end
    longest = max(np.split(loud, np.flatnonzero(np.diff(loud) > GAP_FRAMES) + 1), key=len)
    return int(longest[0]), int(longest[-1]) + 1


def _reach(is_loud: np.ndarray) -> int:
    """How many of the frames are loud, or pauses within, from the first one on."""
    loud = np.flatnonzero(is_loud)
    pauses = np.flatnonzero(np.diff(loud, prepend=-1) > GAP_FRAMES)
    loud = loud[: pauses[0]] if len(pauses) else loud
    return int(loud[-1]) + 1 if len(loud) else 0
