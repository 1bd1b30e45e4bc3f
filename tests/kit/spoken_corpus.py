# SPDX-License-Identifier: Apache-2.0
"""Recordings with known text: generated sentences, spoken by the embedded voice, joined with known pauses and noise.

The same seed gives the same recordings. `align` says which of the spoken sentences a transcript holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SUBJECTS = (
    "the old farmer", "my younger brother", "our neighbor", "the tall woman", "a young teacher", "the captain",
    "her best friend", "the little boy", "his grandmother", "the new doctor", "a friendly nurse", "the baker",
    "my uncle", "the lazy cat", "a group of students", "the quiet girl", "our guide", "the mayor",
    "the piano player", "a famous writer", "the bus driver", "my cousin", "the police officer", "the singer",
)  # fmt: skip
ACTIONS = (
    "walked slowly to the market", "painted the kitchen door", "found a wooden box", "opened the heavy window",
    "carried the basket home", "looked for the missing key", "wrote a short letter", "cooked dinner for everyone",
    "planted a row of apple trees", "waited at the station", "listened to the radio", "fixed the broken chair",
    "bought a loaf of fresh bread", "read the newspaper", "swam across the lake", "climbed the steep hill",
    "told a funny story", "washed the dirty dishes", "took a picture of the bridge", "sat down under the tree",
    "lost a pair of gloves", "drank a glass of cold water", "learned to ride a horse", "left the office early",
)  # fmt: skip
TAILS = (
    "before the sun came up", "after a long winter", "on the first day of spring", "while the rain was falling",
    "because the road was closed", "in the middle of the night", "without saying a word", "during the summer holiday",
    "when the music stopped", "near the old church", "with a smile", "as the snow began to melt",
    "at the end of the week", "behind the library", "for the second time", "although it was very late",
)  # fmt: skip
SHORT = (
    "Thank you very much.", "That is a good idea.", "Please come in and sit down.", "I have no time today.",
    "What a beautiful morning.", "Where is my coat?", "We are almost there.", "Nothing has changed.",
    "She smiled and nodded.", "How are you feeling today?", "The door is open.", "It was a cold day.",
    "Everyone was happy.", "Call me when you get home.", "The soup is too hot.", "He never said goodbye.",
    "You were right about that.", "Let us begin.", "The lights went out.", "Keep the change.",
)  # fmt: skip


def sentences(rng: np.random.Generator, count: int) -> list[str]:
    """`count` different sentences of 3 to about 22 words; a fifth of them short."""
    drawn: dict[str, None] = {}
    shorts = list(rng.permutation(SHORT))
    while len(drawn) < count:
        pick = lambda options: str(options[int(rng.integers(len(options)))])  # noqa: E731
        subject, action, tail = pick(SUBJECTS), pick(ACTIONS), pick(TAILS)
        forms = (
            f"{subject} {action}.",
            f"{subject} {action} {tail}.",
            f"{tail}, {subject} {action}.",
            f"{subject} {action}, and {pick(SUBJECTS)} {pick(ACTIONS)} {tail}.",
        )
        text = shorts.pop() if shorts and rng.random() < 0.2 else forms[int(rng.integers(len(forms)))]
        drawn[text[0].upper() + text[1:]] = None
    return list(drawn)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a recording is put together. gaps_s: lowest and highest pause between sentences; long_pauses: how many of
    the pauses are `long_pause_s` instead; noise_db: level of white noise below the speech, None for none.
    """

    count: int
    gaps_s: tuple[float, float] = (0.0, 0.0)
    lead_s: float = 0.0
    tail_s: float = 0.0
    long_pauses: int = 0
    long_pause_s: float = 8.0
    noise_db: float | None = None


@dataclass(frozen=True, slots=True)
class SpokenSentence:
    """A sentence and where it is in its recording, in seconds."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Recording:
    """samples: (n,) float32 at `rate_hz`."""

    samples: np.ndarray
    rate_hz: int
    spoken: tuple[SpokenSentence, ...]

    @property
    def words(self) -> list[str]:
        return [word for sentence in self.spoken for word in words_of(sentence.text)]


def layouts(rng: np.random.Generator, files: int, spoken: int) -> list[Layout]:
    """`files` layouts of 10 to 60 sentences, `spoken` together: all pauses, leads, and noise levels mixed."""
    counts = [10] * files
    for index, size in enumerate((60, 40, 40, 30, 30)):
        if index < files and sum(counts) - 10 + size <= spoken:
            counts[index] = size
    while (missing := spoken - sum(counts)) > 0:
        counts[files - 1 - missing % max(1, files - 5)] += 1
    gaps = ((0.0, 0.0), (0.0, 0.4), (0.2, 0.2), (0.0, 1.5), (0.5, 0.5), (1.5, 1.5))
    made: list[Layout] = []
    for index, count in enumerate(counts):
        layout = Layout(
            count,
            gaps[index % len(gaps)],
            lead_s=float(rng.choice([0.0, 0.0, 0.3, 2.0, 20.0])),
            tail_s=float(rng.choice([0.0, 0.3, 5.0])),
            long_pauses=int(rng.choice([0, 0, 1, 3])) + (30 if count == 60 else 0),
            long_pause_s=float(rng.choice([4.0, 8.0, 12.0])) if count != 60 else 12.0,
            noise_db=[None, None, 30.0, 20.0][int(rng.integers(4))],
        )
        made.append(layout)
    return made


def record(
    layout: Layout, texts: Sequence[str], speak: Callable[[str], np.ndarray], rate_hz: int, rng: np.random.Generator
) -> Recording:
    """The recording of `texts` by `layout`; `speak` gives a sentence's samples at `rate_hz`."""
    pauses = [float(rng.uniform(*layout.gaps_s)) for _ in texts]
    for index in rng.permutation(len(texts) - 1)[: layout.long_pauses]:
        pauses[index] = layout.long_pause_s
    pauses[-1] = layout.tail_s
    parts, spoken, at_s = [_silence(layout.lead_s, rate_hz)], list[SpokenSentence](), layout.lead_s
    for text, pause_s in zip(texts, pauses, strict=True):
        voice = without_silence(speak(text))
        end_s = at_s + len(voice) / rate_hz
        spoken.append(SpokenSentence(text, at_s, end_s))
        silence = _silence(pause_s, rate_hz)
        parts += [voice, silence]
        at_s = end_s + len(silence) / rate_hz
    samples = np.concatenate(parts)
    if layout.noise_db is not None:
        level = float(np.sqrt(np.mean(np.square(parts[1])))) * 10 ** (-layout.noise_db / 20)
        samples = samples + level * rng.standard_normal(len(samples))
    return Recording(np.clip(samples, -1, 1).astype(np.float32), rate_hz, tuple(spoken))


def without_silence(samples: np.ndarray) -> np.ndarray:
    """The samples from the first loud one to the last."""
    loud = np.flatnonzero(np.abs(samples) > 0.03 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]


def _silence(seconds: float, rate_hz: int) -> np.ndarray:
    return np.zeros(round(seconds * rate_hz), np.float32)


def words_of(text: str) -> list[str]:
    """The words without case and punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower())


@dataclass(frozen=True, slots=True)
class Score:
    """What a transcript holds. lost: sentences of which fewer than half the words are there."""

    errors: int
    words: int
    lost: tuple[str, ...]


def align(recording: Recording, transcript: str) -> Score:
    """Align a transcript with the recording's text by the fewest word errors."""
    said, got = recording.words, words_of(transcript)
    table = np.zeros((len(said) + 1, len(got) + 1), np.int32)
    table[:, 0], table[0] = np.arange(len(said) + 1), np.arange(len(got) + 1)
    ids = {word: index for index, word in enumerate({*said, *got})}
    codes = np.array([ids[word] for word in got], np.int64)
    steps = np.arange(len(got) + 1)
    for i, word in enumerate(said, 1):
        row = np.minimum(table[i - 1, :-1] + (codes != ids[word]), table[i - 1, 1:] + 1)
        row = np.concatenate(([i], row)) - steps
        table[i] = np.minimum.accumulate(row) + steps
    matched = np.zeros(len(said), bool)
    i, j = len(said), len(got)
    while i and j:
        same = said[i - 1] == got[j - 1]
        if table[i, j] == table[i - 1, j - 1] + (not same):
            matched[i - 1] = same
            i, j = i - 1, j - 1
        elif table[i, j] == table[i - 1, j] + 1:
            i -= 1
        else:
            j -= 1
    lost, at = list[str](), 0
    for sentence in recording.spoken:
        count = len(words_of(sentence.text))
        if matched[at : at + count].mean() < 0.5:
            lost.append(sentence.text)
        at += count
    return Score(int(table[-1, -1]), len(said), tuple(lost))


def whisper(samples: np.ndarray) -> np.ndarray:
    """(samples,) float32: the same speech with noise instead of a voice. Its short spectra stay, smoothed."""
    size, step = 512, 128
    window = np.hanning(size)
    padded = np.pad(samples, size)
    noise = np.random.default_rng(0).standard_normal(len(padded))
    made = np.zeros(len(padded))
    for start in range(0, len(padded) - size, step):
        part = slice(start, start + size)
        loudness = np.convolve(np.abs(np.fft.rfft(padded[part] * window)), np.full(9, 1 / 9), "same")
        breath = np.fft.rfft(noise[part] * window)
        made[part] += np.fft.irfft(loudness * breath / (np.abs(breath) + 1e-9)) * window
    return made[size:-size].astype(np.float32)
