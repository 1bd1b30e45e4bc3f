# SPDX-License-Identifier: Apache-2.0
"""Audio files, and audio tracks of video files → mono samples."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np

from triton_omni.media import limits
from triton_omni.media.ffmpeg import opened
from triton_omni.media.limits import SPEECH_HZ, MediaError


def decode_audio(data: bytes) -> np.ndarray:
    """First audio track of a file, (samples,) float32 in -1..1, mono, at SPEECH_HZ. Raises MediaError."""
    resampler = av.AudioResampler("flt", "mono", SPEECH_HZ)
    pieces: list[np.ndarray] = []
    samples = 0
    with opened(data, "audio") as container:
        for frame in _with_flush(container.decode(audio=0)):
            resampled = [f.to_ndarray().reshape(-1) for f in resampler.resample(frame)]
            samples += sum(len(piece) for piece in resampled)
            if samples > limits.MAX_SPEECH_S * SPEECH_HZ:
                raise MediaError(f"Audio must be at most {limits.MAX_SPEECH_S} seconds long.")
            pieces += resampled
    if not samples:
        raise MediaError("The audio is empty.")
    audio = np.concatenate(pieces)
    return np.clip(audio, -1.0, 1.0, out=audio)


def _with_flush(frames: Iterator[av.AudioFrame]) -> Iterator[av.AudioFrame | None]:
    """The frames, then None, which flushes a resampler."""
    yield from frames
    yield None
