# SPDX-License-Identifier: Apache-2.0
"""Speech for clients: float samples → PCM, WAV, or a compressed stream, piece by piece. Pure.

One encoder makes streams and whole answers, so both have the same samples.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from typing import Any, Protocol

import av
import numpy as np

PCM_HZ = 24_000
"""The rate of OpenAI's raw PCM, which has no header to name another."""

MEDIA_TYPES = {
    "mp3": "audio/mpeg", "opus": "audio/ogg", "aac": "audio/aac", "flac": "audio/flac", "wav": "audio/wav",
    "pcm": "audio/pcm", "pcm16": "audio/pcm",
}  # fmt: skip
_CODECS = {"mp3": ("mp3", "libmp3lame"), "opus": ("ogg", "libopus"), "aac": ("adts", "aac"), "flac": ("flac", "flac")}
_UNKNOWN_LENGTH = 0xFFFFFFFF
_LIVE = {
    "mp3": {"write_xing": "0"},  # that header tells the length, and goes first
    "opus": {"page_duration": "100000"},  # microseconds; otherwise a page waits for a whole second of speech
}
_BITS_PER_SECOND = {"mp3": 96_000, "opus": 48_000, "aac": 96_000}


class Encoder(Protocol):
    """Samples in, bytes out; some of them later."""

    def feed(self, samples: np.ndarray) -> bytes:
        """Bytes that are ready after these samples; (samples,) float32, mono."""
        ...

    def finish(self) -> bytes:
        """The rest."""
        ...


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Float samples as 16-bit ones; what is outside -1..1 is cut off."""
    return np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")


def encoder(kind: str, rate_hz: int, *, is_whole: bool = False) -> Encoder:
    """An encoder for "mp3", "opus", "aac", "flac", "wav", "pcm" or "pcm16".

    `is_whole`: nothing is taken out before the end, so headers can tell the length.
    """
    if kind in ("pcm", "pcm16"):
        return Pcm(rate_hz)
    if kind == "wav":
        return Wav(rate_hz, is_whole)
    return Compressed(kind, rate_hz, is_whole)


def encode(kind: str, rate_hz: int, pieces: Iterable[np.ndarray]) -> bytes:
    """A whole file."""
    coder = encoder(kind, rate_hz, is_whole=True)
    return b"".join([*(coder.feed(piece) for piece in pieces), coder.finish()])


class Pcm:
    """Raw 16-bit mono at PCM_HZ, whatever the pipeline's rate is."""

    def __init__(self, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._resampler = None if rate_hz == PCM_HZ else av.AudioResampler("s16", "mono", PCM_HZ)

    def feed(self, samples: np.ndarray) -> bytes:
        if self._resampler is None:
            return to_int16(samples).tobytes()
        return self._bytes(self._resampler.resample(_frame(samples, self._rate_hz))) if len(samples) else b""

    def finish(self) -> bytes:
        return b"" if self._resampler is None else self._bytes(self._resampler.resample(None))

    @staticmethod
    def _bytes(frames: list[av.AudioFrame]) -> bytes:
        return b"".join(frame.to_ndarray().tobytes() for frame in frames)


class Wav:
    """16-bit mono at the pipeline's rate; a stream's header says that the length is not known."""

    def __init__(self, rate_hz: int, is_whole: bool) -> None:
        self._rate_hz = rate_hz
        self._kept: list[bytes] | None = [] if is_whole else None
        self._has_header = False

    def feed(self, samples: np.ndarray) -> bytes:
        data = to_int16(samples).tobytes()
        if self._kept is not None:
            self._kept.append(data)
            return b""
        return self._header(_UNKNOWN_LENGTH) + data

    def finish(self) -> bytes:
        if self._kept is None:
            return self._header(_UNKNOWN_LENGTH)
        data = b"".join(self._kept)
        return self._header(len(data)) + data

    def _header(self, data_bytes: int) -> bytes:
        if self._has_header:
            return b""
        self._has_header = True
        riff_bytes = min(36 + data_bytes, _UNKNOWN_LENGTH)
        form = struct.pack("<HHIIHH", 1, 1, self._rate_hz, 2 * self._rate_hz, 2, 16)
        head = b"RIFF" + struct.pack("<I", riff_bytes) + b"WAVEfmt " + struct.pack("<I", len(form)) + form
        return head + b"data" + struct.pack("<I", data_bytes)


class Compressed:
    """MP3, Opus in Ogg, AAC or FLAC through FFmpeg's libraries."""

    def __init__(self, kind: str, rate_hz: int, is_whole: bool) -> None:
        container, codec = _CODECS[kind]
        self._rate_hz = rate_hz
        self._file = io.BytesIO() if is_whole else _Pipe()
        self._is_whole = is_whole
        self._container: Any = av.open(
            self._file, "w", format=container, options={} if is_whole else _LIVE.get(kind, {})
        )
        stream = self._container.add_stream(codec, rate=_rate_for(codec, rate_hz))
        stream.layout = "mono"
        if kind in _BITS_PER_SECOND:
            stream.bit_rate = _BITS_PER_SECOND[kind]
        self._stream = stream

    def feed(self, samples: np.ndarray) -> bytes:
        if len(samples):
            frame = _frame(to_int16(samples), self._rate_hz)
            self._container.mux(self._stream.encode(frame))
        return self._taken()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.getvalue() if self._is_whole else self._taken()

    def _taken(self) -> bytes:
        if self._is_whole:
            return b""
        made = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return made


class _Pipe(io.BytesIO):
    """A file that cannot be sought in by FFmpeg: it may only write on."""

    def seekable(self) -> bool:
        return False


def _rate_for(codec: str, rate_hz: int) -> int:
    """The nearest rate that the codec takes, not below the source's if possible."""
    rates = av.Codec(codec, "w").audio_rates
    if not rates or rate_hz in rates:
        return rate_hz
    return min((r for r in rates if r >= rate_hz), default=max(rates))


def _frame(samples: np.ndarray, rate_hz: int) -> av.AudioFrame:
    form = "s16" if samples.dtype == np.int16 else "flt"
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples).reshape(1, -1), format=form, layout="mono")
    frame.sample_rate = rate_hz
    return frame
