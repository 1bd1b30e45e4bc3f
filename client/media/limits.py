# SPDX-License-Identifier: Apache-2.0
"""Bounds on the media of one request, and the error that names them."""

from __future__ import annotations

SPEECH_HZ = 16_000
MAX_SPEECH_S = 1800
MAX_PIXELS = 32 * 1024 * 1024
"""Of one image, or of one video frame."""
LARGE_PIXELS = 2 * 1024 * 1024
LARGE_BYTES = 1024 * 1024
"""From here on a file takes more than about 0.1 s to decode (`is_large`)."""
VIDEO_FRAMES_PER_S = 2.0
"""Sampling rate of videos: the rate that vision-language models are trained on."""
MAX_VIDEO_FRAMES = 128
MAX_VIDEO_PIXELS = 768 * 28 * 28
"""Of a sampled frame; larger frames are scaled down."""
MAX_DECODED_FRAMES = 16_384
MAX_DECODED_PIXELS = 1 << 34
"""Of all frames of a video together: 68 s of 3840x2160 at 30 frames/s. A running decoder cannot be interrupted."""
MAX_BYTES = 256 * 1024 * 1024
"""Of all media tensors of a request together. The server's own bound is `max_media_bytes` in the deploy file."""


class MediaError(ValueError):
    """A file or URL is invalid, not supported or too large. The message is meant for the client."""
