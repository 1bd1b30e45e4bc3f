# SPDX-License-Identifier: Apache-2.0
"""Images, audio and video of a request: files → pixels and samples, within limits → the media tensors.

    media = Media()
    question = Message("user", (Part("text", "What is this?"), media.image(Path("cat.png").read_bytes())))
    client.generate("omni", GenerateRequest(messages=(question,)), media=media.tensors)

The content of a file selects its decoder, never a name or a MIME type. Pure and blocking.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from triton_omni.backends.wire import AUDIO, IMAGE, VIDEO, Part
from triton_omni.media import limits
from triton_omni.media.audio import decode_audio
from triton_omni.media.images import Alpha, decode_image, decode_mask, image_size
from triton_omni.media.limits import SPEECH_HZ, VIDEO_FRAMES_PER_S, MediaError
from triton_omni.media.video import decode_video

__all__ = ["Media", "MediaError", "is_large"]

_SHAPES = {AUDIO: (np.dtype(np.float32), (1,)), IMAGE: (np.dtype(np.uint8), (2, 3)), VIDEO: (np.dtype(np.uint8), (4,))}
"""Tensor → its dtype and the allowed numbers of dimensions of a piece."""


def is_large(data: bytes) -> bool:
    """True for a file that may take long to decode: a large image or long audio. Reads no more than a header."""
    width, height = image_size(data)
    return len(data) > limits.LARGE_BYTES or width * height > limits.LARGE_PIXELS


class Media:
    """The media tensors of one request, filled part by part.

    claim  called with the bytes of each part before it is kept; may raise to refuse it
    """

    def __init__(self, claim: Callable[[int], None] = lambda nbytes: None) -> None:
        self._claim = claim
        self._pieces: dict[str, list[np.ndarray]] = {}
        self._nbytes = 0

    def audio(self, audio: bytes | np.ndarray, sample_rate: int = SPEECH_HZ) -> Part:
        """Part for an audio file, or for mono samples, (samples,) float32 in -1..1, at `sample_rate` Hz."""
        if isinstance(audio, bytes):
            audio, sample_rate = decode_audio(audio), SPEECH_HZ
        return Part(AUDIO, offset=self._add(AUDIO, audio), length=len(audio), sample_rate=sample_rate)

    def image(self, image: bytes | np.ndarray, alpha: Alpha = "white") -> Part:
        """Part for an image file, or for pixels, (height, width, 3) uint8.

        Transparent pixels of a file are composited over white; "drop" ignores the alpha channel as diffusers does
        for images to edit.
        """
        pixels = decode_image(image, alpha) if isinstance(image, bytes) else image
        return Part(IMAGE, offset=self._add(IMAGE, pixels), length=pixels.size, shape=pixels.shape)

    def mask(self, mask: bytes | np.ndarray) -> Part:
        """Part for the mask of an edit: a PNG that is transparent where to edit, or (height, width) uint8."""
        return self.image(decode_mask(mask) if isinstance(mask, bytes) else mask)

    def video(self, video: bytes | np.ndarray) -> Part:
        """Part for a video file, or for frames, (frames, height, width, 3) uint8, at VIDEO_FRAMES_PER_S."""
        frames = decode_video(video) if isinstance(video, bytes) else video
        offset = self._add(VIDEO, frames)
        return Part(VIDEO, offset=offset, length=frames.size, shape=frames.shape, fps=VIDEO_FRAMES_PER_S)

    def video_audio(self, video: bytes) -> Part:
        """Part for the audio track of a video file; it goes right after the part of the video."""
        audio = decode_audio(video)
        return Part(AUDIO, offset=self._add(AUDIO, audio), length=len(audio), sample_rate=SPEECH_HZ, in_video=True)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Tensor name → all pieces of that kind, concatenated."""
        for name, pieces in self._pieces.items():
            if len(pieces) > 1:
                self._pieces[name] = [np.concatenate(pieces)]
        return {name: piece for name, (piece,) in self._pieces.items()}

    def _add(self, name: str, piece: np.ndarray) -> int:
        """Keep a piece; returns its offset in its tensor, in elements."""
        dtype, dimensions = _SHAPES[name]
        if piece.dtype != dtype or piece.ndim not in dimensions:
            raise MediaError(f"{name} cannot be {piece.dtype} of the shape {piece.shape}.")
        if self._nbytes + piece.nbytes > limits.MAX_BYTES:
            raise MediaError(f"The decoded media of a request must have at most {limits.MAX_BYTES} bytes together.")
        self._claim(piece.nbytes)
        self._nbytes += piece.nbytes
        pieces = self._pieces.setdefault(name, [])
        pieces.append(piece.reshape(-1))
        return sum(len(p) for p in pieces[:-1])
