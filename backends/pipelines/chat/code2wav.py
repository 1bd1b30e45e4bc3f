# SPDX-License-Identifier: Apache-2.0
"""Stage `code2wav`: speech codes to audio, by the method of hibari's `dsp.synth`, in windows that join without a seam.

The method is hibari's (hibari-tts, Apache-2.0, Maureese Williams): a pulse train of the pitch, filtered in short-time
spectra, plus shaped noise, then an inverse transform of overlapping frames. Written here for windows of many runs
at once: a window carries the pulses' phase over from the one before, and noise is chosen by the frame's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import scipy.fft

from triton_omni.backends.codec.decoder import Window
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.core.engine import OptionsError, read_engine_options
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.chat.options import Code2WavOptions, model_folder
from triton_omni.backends.pipelines.chat.rvq import BOOKS, CODES, ENTRIES, PITCH_BINS, VOICED_HZ, Codebooks

SAMPLE_RATE_HZ = 24_000
HOP = 300
TRANSFORM = 1200
OVERLAP = TRANSFORM // HOP
BINS = TRANSFORM // 2 + 1
HIGHEST_HARMONIC_HZ = 11_000.0
LOG_MAGNITUDE_MAX = 7.0
CONTEXT = 3  # frames a frame's audio depends on, each way …
PITCH_CONTEXT = 1  # … and one more, of which only the pitch counts
NOISE_FRAMES = 1024  # noise repeats after 12.8 s, which is inaudible
NOISE_SEED = 24
HANN = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(TRANSFORM) / TRANSFORM)).astype(np.float32)
PULSE_HANN = HANN / (TRANSFORM / 4)  # so that a harmonic of amplitude 1 has the magnitude 1
HANN_SQUARED = (HANN * HANN).reshape(OVERLAP, HOP)


@dataclass(slots=True)
class Phase:
    """Phase of the pulse train, in cycles, where the next window's pulses begin."""

    cycles: float = 0.0


class HibariDecoder:
    """triton_omni.backends.codec.decoder.Decoder of hibari codes."""

    codes = CODES
    left = right = CONTEXT + PITCH_CONTEXT
    samples_per_frame = HOP
    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(self, codebooks: Codebooks) -> None:
        self._codebooks = codebooks
        pairs = np.random.default_rng(NOISE_SEED).standard_normal((NOISE_FRAMES, 2 * BINS), np.float32)
        self._noise = pairs.view(np.complex64)

    def start(self) -> Phase:
        return Phase()

    def check(self, codes: np.ndarray) -> None:
        limits = np.array([ENTRIES] * BOOKS + [PITCH_BINS])
        if len(codes) and (codes.min() < 0 or (codes.max(0) >= limits).any()):
            raise BadRequest(f"codes must be from 0 to below {limits.tolist()}", "codes")

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        spectrum, pitch_hz = self._codebooks.decode(np.concatenate([w.codes for w in windows]))
        return self.synthesize(windows, np.minimum(spectrum, LOG_MAGNITUDE_MAX), pitch_hz)

    def synthesize(self, windows: Sequence[Window], spectrum: np.ndarray, pitch_hz: np.ndarray) -> list[np.ndarray]:
        """Audio of windows whose rows' spectra (rows, 1202) and pitches (rows,) lie one after the other."""
        ends = np.cumsum([len(w.codes) for w in windows])
        firsts = [int(end) - len(w.codes) for w, end in zip(windows, ends, strict=True)]
        used = [_used(w) for w in windows]
        pulses = [pulse_frames(w, pitch_hz[i : i + len(w.codes)]) for w, i in zip(windows, firsts, strict=True)]
        rows = np.concatenate([_range(u, first) for u, first in zip(used, firsts, strict=True)])
        numbers = np.concatenate([_range(u, w.start) for u, w in zip(used, windows, strict=True)])
        mixed: np.ndarray = scipy.fft.rfft(np.concatenate(pulses), axis=1)  # pyright: ignore[reportAssignmentType]
        mixed *= np.exp(spectrum[rows, :BINS])
        mixed += self._noise[numbers % NOISE_FRAMES] * np.exp(spectrum[rows, BINS:])
        frames: np.ndarray = scipy.fft.irfft(mixed, TRANSFORM, axis=1)  # pyright: ignore[reportAssignmentType]
        frames *= HANN
        stops = np.cumsum([len(_range(u, 0)) for u in used])
        pieces = np.split(frames, stops[:-1])
        return [overlap_add(p, w.left - u.start, w.take) for p, w, u in zip(pieces, windows, used, strict=True)]


def _range(rows: slice, offset: int) -> np.ndarray:
    return np.arange(offset + rows.start, offset + rows.stop)


def _used(window: Window) -> slice:
    """Rows of a window that are synthesised: all but the outermost, which lend their pitch alone."""
    begins = window.start == 0
    return slice(0 if begins else PITCH_CONTEXT, len(window.codes) - (0 if window.final else PITCH_CONTEXT))


def pulse_frames(window: Window, pitch_hz: np.ndarray) -> np.ndarray:
    """Windowed pulses around each used row (rows, TRANSFORM); moves the phase on to the next window's first."""
    used = _used(window)
    padded = np.pad(pitch_hz, 1, mode="edge")
    curve = pitch_curve(padded[used.start : used.stop + 2])
    decoded = window.start + window.left + window.take
    next_first = decoded - CONTEXT if decoded > CONTEXT + PITCH_CONTEXT else 0  # `_used` of the next window
    pulses = pulse_train(curve, window.state, (next_first - window.start - used.start) * HOP)
    around = np.pad(pulses, TRANSFORM // 2, mode="reflect" if len(pulses) > TRANSFORM // 2 else "constant")
    return np.lib.stride_tricks.sliding_window_view(around, TRANSFORM)[::HOP][: used.stop - used.start] * PULSE_HANN


def pitch_curve(pitch_hz: np.ndarray) -> np.ndarray:
    """Pitch per sample of all frames but the first and last, on straight lines between the frames' middles."""
    share = ((np.arange(HOP, dtype=np.float32) + 0.5) / HOP - 0.5) % 1.0
    first, second = slice(None, HOP // 2), slice(HOP // 2, None)
    curve = np.empty((len(pitch_hz) - 2, HOP), np.float32)
    before, here, after = pitch_hz[:-2, None], pitch_hz[1:-1, None], pitch_hz[2:, None]
    curve[:, first] = before * (1 - share[first]) + here * share[first]
    curve[:, second] = here * (1 - share[second]) + after * share[second]
    return curve.reshape(-1)


def pulse_train(curve: np.ndarray, phase: Phase, next_sample: int) -> np.ndarray:
    """Every harmonic below HIGHEST_HARMONIC_HZ at amplitude 1, silence where there is no voice.

    The sum of cos(h t) for h = 1 … H is sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2, and H where sin(t / 2) is 0.
    `phase` goes on to where sample `next_sample` begins.
    """
    voiced = curve > VOICED_HZ
    hz = np.maximum(curve, VOICED_HZ)
    cycles = phase.cycles + np.cumsum(hz, dtype=np.float64) / SAMPLE_RATE_HZ
    if next_sample:
        phase.cycles = float(cycles[next_sample - 1] % 1.0)
    angle = (2 * np.pi * (cycles % 1.0)).astype(np.float32)
    harmonics = np.floor(HIGHEST_HARMONIC_HZ / hz) + np.float32(0.5)
    divisor = 2 * np.sin(angle / 2)
    is_peak = np.abs(divisor) <= 2e-3
    train = np.sin(harmonics * angle) / np.where(is_peak, 1, divisor)
    train = np.where(is_peak, harmonics, train) - np.float32(0.5)
    return np.where(voiced, train, np.float32(0)).astype(np.float32)


def overlap_add(frames: np.ndarray, left: int, take: int) -> np.ndarray:
    """Audio of `take` frames, the first being row `left`, of overlapping frames (rows, TRANSFORM)."""
    rows = len(frames)
    blocks = frames.reshape(rows, OVERLAP, HOP)
    total = np.zeros((rows + OVERLAP - 1, HOP), np.float32)
    weight = np.zeros((rows + OVERLAP - 1, HOP), np.float32)
    for place in range(OVERLAP):
        total[place : place + rows] += blocks[:, place]
        weight[place : place + rows] += HANN_SQUARED[place]
    first = left + OVERLAP // 2  # a frame's middle lies two blocks behind its beginning
    audio = total[first : first + take] / np.maximum(weight[first : first + take], 1e-11)
    return audio.reshape(-1)


def code2wav_engine(context: EngineContext) -> CodecEngine:
    """The engine of stage `code2wav`, in its worker."""
    options = read_engine_options(context.options, Code2WavOptions, context.stage)
    try:
        chunks = msgspec.convert(options.chunks, CodecOptions)
    except msgspec.ValidationError as error:
        raise OptionsError(f"stage '{context.stage}', engine options, chunks: {error}") from None
    return CodecEngine(context.stage, HibariDecoder(Codebooks.load(model_folder(context, options.model))), chunks)
