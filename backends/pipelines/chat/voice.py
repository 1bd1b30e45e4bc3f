# SPDX-License-Identifier: Apache-2.0
"""hibari's acoustic half: text to spectra and pitch, 80 frames a second (hibari-tts, Apache-2.0, Maureese Williams)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hibari
import numpy as np
from hibari.voices import voice_path

from triton_omni.backends.core.outputs import WordTime
from triton_omni.backends.pipelines.chat.spoken_words import PlacedWord, WordReader, placed

VOICE = "heart"  # the one voice inside the package; any other name would make hibari download
SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 300
FRAMES_PER_S = SAMPLE_RATE_HZ // SAMPLES_PER_FRAME
DURATIONS = b"/Cast_32_output_0"
"""Value inside hibari's network: int64 (ids,), how long each phoneme is, in units of FRAMES_PER_DURATION frames."""
FRAMES_PER_DURATION = 2
BINS = 601
LOG_MAGNITUDE_MAX = 7.0  # hibari's own ceiling
LONGEST_WORD = 50  # hibari's reader takes time by the third power of a word's length: 8 s for one of 300 characters
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
_PIECE = re.compile(rf"\S{{0,{LONGEST_WORD - 1}}}[^\w\s](?=\S)|\S{{1,{LONGEST_WORD}}}")
_CAPITALS = re.compile(r"\b[A-Z]{2,}(?:'[A-Z]+)?\b|\bA\b")
MAX_PIECE_S = 12.0
"""Longest speech at a time; others of the same thread wait for it. The network takes 9 ms for a second of speech."""
PHONEMES_PER_S = 18.0  # measured: 17 to 19 at speed 1
FASTEST = 2.0  # the network gives each phoneme a frame at least; beyond this it would not get much shorter


@dataclass(frozen=True, slots=True)
class Frames:
    """What the network says of a clause, one row a frame: spectrum (frames, 1202) and pitch in Hz (frames,).

    The spectrum is [harmonic, noise] log magnitudes. hibari's third branch, of free phase, is folded into the noise by
    power, and the harmonics' phase is left out: the words stay as intelligible (see README.md).

    edges  (phonemes + 1,) frames before each phoneme; the last entry is where the last one ends
    """

    spectrum: np.ndarray
    pitch_hz: np.ndarray
    edges: np.ndarray

    def times(self, words: Sequence[PlacedWord], frames_before: int) -> tuple[WordTime, ...]:
        """When words of these phonemes are said, `frames_before` of the speech being in front of them."""
        seconds = [round(int(edge) / FRAMES_PER_S, 4) for edge in frames_before + self.edges]
        return tuple(WordTime(word.text, seconds[word.begin], seconds[word.end]) for word in words)


@dataclass(frozen=True, slots=True)
class SpokenPhrase:
    """What one step says: phonemes, and the words written for them."""

    phonemes: str
    words: tuple[PlacedWord, ...] = ()


class Voice:
    """The network and the text front end, loaded once. `phrases` is for one thread, `frames` for any."""

    def __init__(self) -> None:
        self._reader = WordReader()
        network = with_output(Path(voice_path(VOICE)).read_bytes(), DURATIONS)
        self._hibari = hibari.Hibari(VOICE, model=network, threads=1, g2p=self._reader)
        self._reader("Load the words.")

    def phrases(self, clause: str, speed: float = 1.0) -> list[SpokenPhrase]:
        """A clause in phrases of at most MAX_PIECE_S; empty if there is nothing to say."""
        text = shortened(self._without_capitals(clause))
        self._reader.read.clear()
        try:
            sentences = self._hibari.phonemize(text)
        except (LookupError, ValueError):  # its reader of numbers ends at 10**36 and takes some signs for digits
            self._reader.read.clear()
            sentences = self._hibari.phonemize(spelled(text))
        longest = int(MAX_PIECE_S * PHONEMES_PER_S * min(speed, FASTEST))
        pieces = [piece for sentence in sentences for piece in cut(sentence, longest)]
        words = placed(clause, self._reader.read, pieces)
        return [SpokenPhrase(piece, tuple(found)) for piece, found in zip(pieces, words, strict=True)]

    def _without_capitals(self, clause: str) -> str:
        """A clause all in capitals in small letters, so that it is read as words. Abbreviations, which the lexicon does
        not know in small letters, stay, and so does a word alone."""
        if clause.upper() != clause or len(clause.split()) < 2:
            return clause
        known = self._reader.g2p.lexicon.golds
        return _CAPITALS.sub(lambda word: word[0].lower() if word[0].lower() in known else word[0], clause)

    def frames(self, phonemes: str, speed: float) -> Frames:
        """Frames of one piece; none if the network's alphabet has none of its signs."""
        ids = self._hibari.ids(phonemes)
        if len(ids) < 3:  # only the silence at both ends
            silent = np.zeros(len(phonemes) + 1, np.int64)
            return Frames(np.zeros((0, 2 * BINS), np.float32), np.zeros(0, np.float32), silent)
        inputs = {
            "ids": np.asarray([ids], np.int64),
            "speed": np.asarray([min(speed, FASTEST)], np.float32),
        }
        *outputs, durations = (np.asarray(out) for out in self._hibari.sess.run(None, inputs))
        harmonic, _phase, noise, free, _free_phase, pitch_hz = (out[0] for out in outputs)
        spectrum = np.concatenate([np.minimum(harmonic, LOG_MAGNITUDE_MAX), _fold(noise, free)]).T
        edges = self._edges(phonemes, durations)
        if speed <= FASTEST:
            return Frames(spectrum, pitch_hz, edges)
        kept = np.arange(0, len(spectrum), speed / FASTEST).astype(np.int64)
        return Frames(spectrum[kept], pitch_hz[kept], np.searchsorted(kept, edges))

    def _edges(self, phonemes: str, durations: np.ndarray) -> np.ndarray:
        """`Frames.edges` of the durations (ids,), of which the first is the silence in front."""
        ends = np.cumsum(durations) * FRAMES_PER_DURATION
        known = np.cumsum([0, *(sign in self._hibari.vocab for sign in phonemes)])  # the network has no ids for others
        return ends[known]


def with_output(network: bytes, name: bytes) -> bytes:
    """An ONNX model with one more output, a value inside it.

    Protobuf joins a message that comes twice: a second `graph` with an `output` adds that to the first one's.
    """
    value = _field(1, name)  # ValueInfoProto.name
    return network + _field(7, _field(12, value))  # ModelProto.graph, GraphProto.output


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a protobuf message; `data` of up to 127 bytes, `number` up to 15."""
    return bytes([number << 3 | 2, len(data)]) + data


def cut(phonemes: str, longest: int) -> list[str]:
    """The phonemes in pieces of at most `longest`, cut between words where there are any."""
    pieces: list[str] = []
    while len(phonemes) > longest:
        end = phonemes.rfind(" ", 1, longest + 1)
        pieces.append(phonemes[: end if end > 0 else longest])
        phonemes = phonemes[len(pieces[-1]) :].lstrip()
    return [*pieces, phonemes] if phonemes else pieces


def shortened(text: str) -> str:
    """The text with words that are too long in pieces, cut behind a sign where there is one."""
    return _LONG_WORD.sub(lambda word: " ".join(_PIECE.findall(word[0])), text)


def spelled(text: str) -> str:
    """The text with every digit a word of its own, and without other numbers and currencies: always readable."""
    return "".join(_spelled(char) for char in text)


def _spelled(char: str) -> str:
    if char.isdigit():
        return f" {unicodedata.digit(char)} "
    return " " if unicodedata.category(char) in ("Sc", "Nl", "No") else char


def _fold(noise: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Log magnitude of noise that has the power of both branches; a complex normal number has the power 2."""
    return 0.5 * np.logaddexp(2 * noise, 2 * np.minimum(free, LOG_MAGNITUDE_MAX) - np.log(np.float32(2)))
