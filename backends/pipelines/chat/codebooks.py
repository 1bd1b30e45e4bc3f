# SPDX-License-Identifier: Apache-2.0
"""Fits the speech codes' codebooks on what hibari says of sentences from Python's own help texts.

Everything needed is installed already and every random choice is seeded.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np

from triton_omni.backends.pipelines.chat.rvq import (
    BOOKS,
    COMPONENTS,
    ENTRIES,
    PITCH_BINS,
    VOICED_HZ,
    Codebooks,
    nearest,
)

NETWORK = Path("hibari-tts", "hibari", "assets", "hibari.onnx")
SEED = 20261129
SENTENCES = 160
ROUNDS = 15
PITCH_MARGIN = 1.1  # pitches somewhat outside the fitted sentences' range keep a bin of their own
_SENTENCE = re.compile(r"[A-Z][A-Za-z',;: -]{40,200}[.?!](?=\s)")


def build(packages: Path, folder: Path) -> None:
    """Write the codebooks. `packages` is not read: hibari's code and network are installed."""
    from triton_omni.backends.pipelines.chat.voice import Voice

    voice = Voice()
    made = [voice.frames(phrase.phonemes, 1.0) for text in sentences() for phrase in voice.phrases(text)]
    spectrum = np.concatenate([frames.spectrum for frames in made])
    pitch_hz = np.concatenate([frames.pitch_hz for frames in made])
    fit(spectrum, pitch_hz).save(folder)


def sentences() -> list[str]:
    """SENTENCES plain English sentences."""
    from pydoc_data.topics import topics

    plain = (re.sub(r"\s+", " ", paragraph) for text in topics.values() for paragraph in text.split("\n\n"))
    found = sorted({sentence for paragraph in plain for sentence in _SENTENCE.findall(paragraph + " ")})
    return random.Random(SEED).sample(found, SENTENCES)


def fit(spectrum: np.ndarray, pitch_hz: np.ndarray) -> Codebooks:
    """Codebooks for frames like these."""
    rng = np.random.default_rng(SEED)
    mean = spectrum.mean(0)
    centred = spectrum - mean
    _, vectors = np.linalg.eigh(centred.T @ centred)  # in ascending order
    basis = np.ascontiguousarray(vectors[:, : -COMPONENTS - 1 : -1].T)
    rest = centred @ basis.T
    books = np.empty((BOOKS, ENTRIES, COMPONENTS), np.float32)
    for place in range(BOOKS):
        books[place] = k_means(rest, rng)
        rest = rest - books[place][nearest(rest, books[place])]
    voiced = pitch_hz[pitch_hz >= VOICED_HZ]
    bins = np.geomspace(voiced.min() / PITCH_MARGIN, voiced.max() * PITCH_MARGIN, PITCH_BINS - 1)
    return Codebooks(mean, basis, books, np.concatenate([[0.0], bins]).astype(np.float32))


def k_means(points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """ENTRIES centres of `points` by Lloyd's rounds; a centre that lost all its points takes a random one."""
    centres = points[rng.choice(len(points), ENTRIES, replace=False)]
    for _ in range(ROUNDS):
        owner = nearest(points, centres)
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=ENTRIES)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        sums = np.add.reduceat(points[order], np.minimum(starts, len(points) - 1), axis=0)
        lonely = counts == 0
        centres = np.where(
            lonely[:, None], points[rng.integers(len(points), size=ENTRIES)], sums / np.maximum(counts, 1)[:, None]
        ).astype(np.float32)
    return centres
