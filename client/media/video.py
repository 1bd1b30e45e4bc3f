# SPDX-License-Identifier: Apache-2.0
"""Video files → frames sampled at a fixed rate."""

from __future__ import annotations

import av.container
import numpy as np

from triton_omni.media import limits
from triton_omni.media.ffmpeg import opened
from triton_omni.media.limits import VIDEO_FRAMES_PER_S, MediaError


def decode_video(data: bytes) -> np.ndarray:
    """Frames on show every 1 / VIDEO_FRAMES_PER_S seconds, (frames, height, width, 3) uint8. Raises MediaError."""
    count = 0
    with opened(data, "video") as container:
        width, height = _frame_size(container)
        frames = np.empty((limits.MAX_VIDEO_FRAMES, height, width, 3), np.uint8)  # untouched pages take no memory
        pixels_left = limits.MAX_DECODED_PIXELS
        for decoded, frame in enumerate(container.decode(video=0)):
            pixels = frame.width * frame.height
            pixels_left -= pixels
            if decoded == limits.MAX_DECODED_FRAMES or pixels > limits.MAX_PIXELS:
                most = f"{limits.MAX_DECODED_FRAMES} frames of {limits.MAX_PIXELS} pixels"
                raise MediaError(f"A video must have at most {most}.")
            if pixels_left < 0:
                raise MediaError(
                    f"All frames of a video must have at most {limits.MAX_DECODED_PIXELS} pixels together."
                )
            while (frame.time or 0.0) * VIDEO_FRAMES_PER_S >= count:
                if count == limits.MAX_VIDEO_FRAMES:
                    raise MediaError(f"A video must be at most {count / VIDEO_FRAMES_PER_S:g} seconds long.")
                frames[count] = frame.to_ndarray(format="rgb24", width=width, height=height)
                count += 1
    if not count:
        raise MediaError("The video is empty.")
    return frames[:count]


def _frame_size(container: av.container.InputContainer) -> tuple[int, int]:
    """(width, height) that the first video track is sampled at."""
    track = container.streams.video[0]
    if track.codec_context is None:  # pyright: ignore[reportUnnecessaryComparison] it is for an unknown codec
        raise MediaError("The codec of the video is not supported.")
    scale = min(1.0, (limits.MAX_VIDEO_PIXELS / max(1, track.width * track.height)) ** 0.5)
    return max(1, int(track.width * scale)), max(1, int(track.height * scale))
