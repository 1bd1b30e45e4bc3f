# SPDX-License-Identifier: Apache-2.0
"""Whisper's input features: the log-mel spectrogram of openai/whisper, in numpy."""

from __future__ import annotations

from functools import cache

import numpy as np

from triton_omni.backends.pipelines.chat.audio_windows import SAMPLE_RATE_HZ

FFT_SAMPLES, HOP_SAMPLES, BANDS = 400, 160, 80
FLOOR, RANGE_DECADES = 1e-10, 8.0


def log_mel(samples: np.ndarray) -> np.ndarray:
    """(80, n // 160) float32 features of (n,) samples at 16 kHz; n is a multiple of 160 and at least 400."""
    padded = np.pad(samples, FFT_SAMPLES // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT_SAMPLES)[::HOP_SAMPLES][: len(samples) // HOP_SAMPLES]
    spectrum = np.fft.rfft(frames * _hann(), axis=1)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    levels = np.log10(np.maximum(_filters() @ power.T, FLOOR))
    levels = np.maximum(levels, levels.max() - RANGE_DECADES)
    return ((levels + 4.0) / 4.0).astype(np.float32)


@cache
def _hann() -> np.ndarray:
    """A periodic Hann window."""
    return np.hanning(FFT_SAMPLES + 1)[:-1].astype(np.float32)


@cache
def _filters() -> np.ndarray:
    """(80, 201) triangular filters on Slaney's mel scale, each of area 1 over Hz (as librosa.filters.mel)."""
    frequencies = np.fft.rfftfreq(FFT_SAMPLES, 1 / SAMPLE_RATE_HZ)
    edges = _hz(np.linspace(0.0, _mel(SAMPLE_RATE_HZ / 2), BANDS + 2))
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    area = 2.0 / (edges[2:] - edges[:-2])
    return (np.maximum(0.0, np.minimum(rising, falling)) * area[:, None]).astype(np.float32)


# Slaney's mel scale: linear up to 1 kHz (15 mel), then 27 steps for a factor of 6.4.
LINEAR_HZ, HZ_PER_MEL, LOG_STEP = 1000.0, 200.0 / 3, np.log(6.4) / 27


def _mel(hz: float) -> float:
    """The mel of a frequency above 1 kHz."""
    return float(LINEAR_HZ / HZ_PER_MEL + np.log(hz / LINEAR_HZ) / LOG_STEP)


def _hz(mel: np.ndarray) -> np.ndarray:
    knee = LINEAR_HZ / HZ_PER_MEL
    return np.where(mel < knee, mel * HZ_PER_MEL, LINEAR_HZ * np.exp(LOG_STEP * (mel - knee)))
