# SPDX-License-Identifier: Apache-2.0
"""Sounds, pictures and films of a request: files → samples and pixels, within limits → the media tensors.

    media = Media()
    question = Message("user", (Part("text", "What is this?"), media.image(Path("cat.png").read_bytes())))
    client.generate("omni", GenerateRequest(messages=(question,)), media=media.tensors)

What a file is decides how it is read, never a name. Pure and blocking.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.error
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from triton_omni.backends.wire import AUDIO, IMAGE, VIDEO, Part

SPEECH_HZ = 16_000
MAX_SPEECH_S = 1800
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 32 * 1024 * 1024
FILM_FRAMES_PER_S = 2.0
"""So many frames of a film are taken: what models that watch films were trained on."""
MAX_FILM_FRAMES = 128
MAX_FILM_PIXELS = 768 * 28 * 28
"""Larger frames are made smaller."""
MAX_DECODED_FRAMES = 16_384
MAX_DECODED_PIXELS = 1 << 34
"""Of all frames of a film together: 68 s of 3840x2160 at 30 a second. Nothing can stop a decoder that is at work."""
MAX_BYTES = 256 * 1024 * 1024
"""Of all tensors of a request together. A server has a bound of its own: `max_media_bytes` in its deploy file."""
CONTAINERS = "wav,mp3,flac,ogg,aac,mov,matroska"
"""FFmpeg's readers that may look at a file; playlists and others that open further files are not among them."""
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w=.+-]+)*;base64,(.*)", re.DOTALL)
_SHAPES = {AUDIO: (np.dtype(np.float32), (1,)), IMAGE: (np.dtype(np.uint8), (2, 3)), VIDEO: (np.dtype(np.uint8), (4,))}


class MediaError(ValueError):
    """A file or URL is not what it should be, or too large. The message is for whoever sent it."""


class Media:
    """The media tensors of one request, filled part by part.

    claim  told the bytes of each part before it is kept; it may raise
    """

    def __init__(self, claim: Callable[[int], None] = lambda nbytes: None) -> None:
        self._claim = claim
        self._pieces: dict[str, list[np.ndarray]] = {}
        self._nbytes = 0

    def audio(self, sound: bytes | np.ndarray, sample_rate: int = SPEECH_HZ) -> Part:
        """The part for a sound: an audio file, or mono samples, (samples,) float32 in -1..1, at `sample_rate`."""
        if isinstance(sound, bytes):
            sound, sample_rate = decode_speech(sound), SPEECH_HZ
        return Part(AUDIO, offset=self._add(AUDIO, sound), length=len(sound), sample_rate=sample_rate)

    def image(self, picture: bytes | np.ndarray) -> Part:
        """The part for a picture: an image file, or pixels, (height, width, 3) uint8."""
        pixels = decode_picture(picture) if isinstance(picture, bytes) else picture
        return Part(IMAGE, offset=self._add(IMAGE, pixels), length=pixels.size, shape=pixels.shape)

    def mask(self, mask: bytes | np.ndarray) -> Part:
        """The part for the mask of an edit: a PNG that is transparent where to edit, or (height, width) uint8."""
        return self.image(decode_mask(mask) if isinstance(mask, bytes) else mask)

    def video(self, film: bytes | np.ndarray) -> Part:
        """The part for a film: a video file, or frames, (frames, height, width, 3) uint8, at FILM_FRAMES_PER_S."""
        frames = decode_film(film) if isinstance(film, bytes) else film
        offset = self._add(VIDEO, frames)
        return Part(VIDEO, offset=offset, length=frames.size, shape=frames.shape, fps=FILM_FRAMES_PER_S)

    def sound_of(self, film: bytes) -> Part:
        """The part for the sound of a video file; it stands right after the part of the film itself."""
        sound = decode_speech(film)
        return Part(AUDIO, offset=self._add(AUDIO, sound), length=len(sound), sample_rate=SPEECH_HZ, in_video=True)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Name → everything of that kind, one after the other."""
        for name, pieces in self._pieces.items():
            if len(pieces) > 1:  # the whole takes the place of its pieces
                self._pieces[name] = [np.concatenate(pieces)]
        return {name: piece for name, (piece,) in self._pieces.items()}

    def _add(self, name: str, piece: np.ndarray) -> int:
        """Keep a piece; returns its place in its tensor, in elements."""
        dtype, dimensions = _SHAPES[name]
        if piece.dtype != dtype or piece.ndim not in dimensions:
            raise MediaError(f"{name} cannot be {piece.dtype} of the shape {piece.shape}.")
        if self._nbytes + piece.nbytes > MAX_BYTES:
            raise MediaError(f"The media of a request may have {MAX_BYTES} bytes together when decoded.")
        self._claim(piece.nbytes)
        self._nbytes += piece.nbytes
        pieces = self._pieces.setdefault(name, [])
        pieces.append(piece.reshape(-1))
        return sum(len(p) for p in pieces[:-1])


def from_base64(text: str) -> bytes:
    """Decoded bytes. Raises MediaError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("The data is not valid base64.") from None


def from_data_url(url: str) -> bytes:
    """The bytes in a `data:…;base64,…` URL. Raises MediaError."""
    match = _DATA_URL.fullmatch(url)
    if match is None:
        raise MediaError("A data URL must have the form 'data:image/png;base64,...'.")
    return from_base64(match[3].strip())


def decode_speech(data: bytes) -> np.ndarray:
    """(samples,) float32, mono, at SPEECH_HZ: the first sound track of a file. Raises MediaError."""
    resampler = av.AudioResampler("flt", "mono", SPEECH_HZ)
    pieces: list[np.ndarray] = []
    samples = 0
    with _opened(data, "audio") as container:
        for frame in _then_none(container.decode(audio=0)):
            made = [f.to_ndarray().reshape(-1) for f in resampler.resample(frame)]
            samples += sum(len(m) for m in made)
            if samples > MAX_SPEECH_S * SPEECH_HZ:
                raise MediaError(f"Audio may have {MAX_SPEECH_S} seconds.")
            pieces += made
    if not samples:
        raise MediaError("The audio is empty.")
    sound = np.concatenate(pieces)
    return np.clip(sound, -1.0, 1.0, out=sound)


def decode_picture(data: bytes) -> np.ndarray:
    """(height, width, 3) uint8; of an animation the first picture. Raises MediaError."""
    return np.asarray(_upright(data, PICTURE_FORMATS).convert("RGB"))


def decode_mask(data: bytes) -> np.ndarray:
    """(height, width) uint8, high where the picture is transparent. Raises MediaError, also if it is nowhere."""
    picture = _upright(data, ("PNG",))
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        raise MediaError("A mask needs an alpha channel: transparent pixels are edited.")
    return 255 - np.asarray(picture.convert("RGBA"))[..., 3]


def _upright(data: bytes, formats: tuple[str, ...]) -> Image.Image:
    """The picture as it is looked at."""
    try:
        with Image.open(io.BytesIO(data), formats=formats) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise MediaError(f"A picture may have {MAX_PIXELS} pixels.")
            picture.load()
            return ImageOps.exif_transpose(picture)
    except MediaError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow's words for data of no known format are the address of our buffer
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise MediaError(f"The data is no picture ({', '.join(formats)}){why}") from None


def decode_film(data: bytes) -> np.ndarray:
    """(frames, height, width, 3) uint8: the frame on show every 1 / FILM_FRAMES_PER_S seconds. Raises MediaError."""
    count = 0
    with _opened(data, "video") as container:
        size = _frame_size(container)
        kept = np.empty((MAX_FILM_FRAMES, size[1], size[0], 3), np.uint8)  # what is never written takes no memory
        left = MAX_DECODED_PIXELS
        for decoded, frame in enumerate(container.decode(video=0)):
            pixels = frame.width * frame.height
            left -= pixels
            if decoded == MAX_DECODED_FRAMES or pixels > MAX_PIXELS:
                raise MediaError(f"A film may have {MAX_DECODED_FRAMES} frames of {MAX_PIXELS} pixels.")
            if left < 0:
                raise MediaError(f"The frames of a film may have {MAX_DECODED_PIXELS} pixels together.")
            while (frame.time or 0.0) * FILM_FRAMES_PER_S >= count:
                if count == MAX_FILM_FRAMES:
                    raise MediaError(f"A film may have {MAX_FILM_FRAMES / FILM_FRAMES_PER_S:g} seconds.")
                kept[count] = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
                count += 1
    if not count:
        raise MediaError("The film is empty.")
    return kept[:count]


def _frame_size(container: Any) -> tuple[int, int]:
    """(width, height) that the first picture track is read at."""
    track = container.streams.video[0]
    if track.codec_context is None:
        raise MediaError("The film's codec is not known.")
    width, height = track.width, track.height
    scale = min(1.0, (MAX_FILM_PIXELS / max(1, width * height)) ** 0.5)
    return max(1, int(width * scale)), max(1, int(height * scale))


@contextmanager
def _opened(data: bytes, kind: str) -> Iterator[Any]:
    """FFmpeg's reader of a file. Its refusals, also inside the `with` body, become MediaError."""
    try:
        only = {"format_whitelist": CONTAINERS}
        with av.open(io.BytesIO(data), "r", options=only, metadata_errors="ignore") as container:  # titles in Latin-1
            yield container
    except MediaError:
        raise
    except (av.error.FFmpegError, IndexError, ValueError) as error:  # ValueError: its form changes on the way
        why = f"it has no {kind} track" if isinstance(error, IndexError) else str(error).removesuffix(": '<none>'")
        raise MediaError(f"The data is no {kind} file ({CONTAINERS}): {why}") from None


def _then_none(frames: Iterator[Any]) -> Iterator[Any]:
    """The frames, and None, which empties a resampler."""
    yield from frames
    yield None
