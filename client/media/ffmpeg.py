# SPDX-License-Identifier: Apache-2.0
"""Opening audio and video files with FFmpeg's demuxers, restricted to the formats listed here."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from errno import EINVAL

import av
import av.container
import av.error

from triton_omni.media.limits import MediaError

FORMATS = {
    "WAV": "wav,w64", "MP3": "mp3", "FLAC": "flac", "Ogg": "ogg", "AAC": "aac", "MP4": "mov", "WebM": "matroska",
    "AIFF": "aiff", "CAF": "caf", "AU": "au", "AMR": "amr",
}  # fmt: skip
"""Name of a format → demuxers. Playlists and other formats that open further files are not among them."""
_WHITELIST = ",".join(FORMATS.values())


@contextmanager
def opened(data: bytes, kind: str) -> Generator[av.container.InputContainer]:
    """Demuxer of a file with a track of `kind`, "audio" or "video". FFmpeg's errors in the body become MediaError."""
    try:
        options = {"format_whitelist": _WHITELIST}
        with av.open(io.BytesIO(data), "r", options=options, metadata_errors="ignore") as container:  # Latin-1 titles
            yield container
    except MediaError:
        raise
    except (av.error.FFmpegError, IndexError, ValueError) as error:  # ValueError: the stream changes its format
        raise MediaError(f"not a supported {kind} file ({', '.join(FORMATS)}){_reason(error, kind)}") from None


def _reason(error: Exception, kind: str) -> str:
    if isinstance(error, IndexError):
        return f": it has no {kind} track"
    if isinstance(error, av.error.FFmpegError):  # its text names the buffer as '<none>'
        return "" if error.errno == EINVAL else f": {error.strerror}"  # EINVAL: a demuxer outside the whitelist
    return f": {error}"
