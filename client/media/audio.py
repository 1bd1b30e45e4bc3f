# SPDX-License-Identifier: Apache-2.0
"""Audio files, and audio tracks of video files → mono samples."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np

from triton_omni.media import limits
from triton_omni.media.ffmpeg import opened
from triton_omni.media.limits import SPEECH_HZ, MediaError


def decode_audio(data: bytes, rate_hz: int = SPEECH_HZ, max_s: float | None = None) -> np.ndarray:
    """First audio track of a file, (samples,) float32 in -1..1, mono, at `rate_hz`; at most MAX_SPEECH_S or
    `max_s` long. Raises MediaError."""
    resampler = av.AudioResampler("s32", "mono", rate_hz)  # integers: a mix of channels never exceeds full scale
    most_s = limits.MAX_SPEECH_S if max_s is None else max_s
    pieces: list[np.ndarray] = []
    samples = 0
    with opened(data, "audio") as container:
        for frame in _with_flush(container.decode(audio=0)):
            if frame is not None and frame.format.name.startswith(("flt", "dbl")):
                _check_finite(frame)
            resampled = [f.to_ndarray().reshape(-1) for f in resampler.resample(frame)]
            samples += sum(len(piece) for piece in resampled)
            if samples > most_s * rate_hz:
                raise MediaError(f"Audio must be at most {most_s:g} seconds long.")
            pieces += resampled
    if not samples:
        raise MediaError("The audio is empty.")
    audio = np.concatenate(pieces).astype(np.float32)
    audio /= np.float32(1 << 31)
    return audio


def _check_finite(frame: av.AudioFrame) -> None:
    if not np.isfinite(frame.to_ndarray()).all():
        raise MediaError("The audio has samples that are not finite numbers.")


def _with_flush(frames: Iterator[av.AudioFrame]) -> Iterator[av.AudioFrame | None]:
    """The frames, then None, which flushes a resampler."""
    yield from frames
    yield None
