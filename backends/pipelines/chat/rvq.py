# SPDX-License-Identifier: Apache-2.0
"""Codes for speech frames: principal components, residual vector quantisation, pitch in logarithmic bins.

A frame is CODES numbers: one index into each of BOOKS codebooks, then the pitch bin (0 is unvoiced). Fitted by
codebooks.py; numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

BOOKS = 8
ENTRIES = 512
COMPONENTS = 64
PITCH_BINS = 64  # with bin 0
CODES = BOOKS + 1
VOICED_HZ = 40.0  # hibari's own border
FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Codebooks:
    """mean (bins,), basis (components, bins), books (books, entries, components), pitch_hz (pitch bins,)."""

    mean: np.ndarray
    basis: np.ndarray
    books: np.ndarray
    pitch_hz: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> Codebooks:
        from safetensors.numpy import load_file

        return cls(**load_file(folder / FILE))

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        save_file({f.name: np.ascontiguousarray(getattr(self, f.name)) for f in fields(self)}, folder / FILE)

    def encode(self, spectrum: np.ndarray, pitch_hz: np.ndarray) -> np.ndarray:
        """Codes (frames, CODES) int16 of spectra (frames, bins) and pitch (frames,)."""
        codes = np.empty((len(spectrum), CODES), np.int16)
        rest = (spectrum - self.mean) @ self.basis.T
        for place, book in enumerate(self.books):
            codes[:, place] = nearest(rest, book)
            rest = rest - book[codes[:, place]]
        log_steps = np.log(self.pitch_hz[1:])
        edges = np.exp((log_steps[1:] + log_steps[:-1]) / 2)
        codes[:, BOOKS] = np.where(pitch_hz < VOICED_HZ, 0, 1 + np.searchsorted(edges, pitch_hz))
        return codes

    def decode(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Spectra (frames, bins) and pitch (frames,), float32, that codes stand for."""
        parts = self.books[np.arange(BOOKS), codes[:, :BOOKS]].sum(1)
        # a product per frame: in one of many rows a row's last bits depend on its place (OpenBLAS's Haswell kernels)
        spectra = np.matmul(parts[:, None], self.basis)[:, 0]
        return spectra + self.mean, self.pitch_hz[codes[:, BOOKS]]


def nearest(points: np.ndarray, book: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of `book` for every point."""
    return np.argmin((book * book).sum(1) - 2 * (points @ book.T), axis=1)
