# SPDX-License-Identifier: Apache-2.0
"""Media that clients send: base64 speech and pictures → samples and pixels, within limits. Pure and blocking."""

from __future__ import annotations

import base64
import binascii
import io
import re

import av
import av.error
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from client.openai.errors import ApiError, invalid

SPEECH_HZ = 16_000
MAX_SPEECH_S = 1800
MAX_PIXELS = 32 * 1024 * 1024
AUDIO_FORMATS = ("wav", "mp3")
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w=.+-]+)*;base64,(.*)", re.DOTALL)


def from_base64(text: str, param: str, code: str) -> bytes:
    """Decoded bytes. Raises ApiError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(param, "The data is not valid base64.", code) from None


def from_data_url(url: str, param: str) -> bytes:
    """The bytes in a `data:…;base64,…` URL. Raises ApiError."""
    match = _DATA_URL.fullmatch(url)
    if match is None:
        raise invalid(param, "A data URL must have the form 'data:image/png;base64,...'.", "invalid_image")
    return from_base64(match[3].strip(), param, "invalid_image")


def decode_speech(data: bytes, kind: str, param: str) -> np.ndarray:
    """(samples,) float32, mono, at SPEECH_HZ. Raises ApiError for what is no such file, or too long."""
    resampler = av.AudioResampler("flt", "mono", SPEECH_HZ)
    pieces: list[np.ndarray] = []
    samples = 0
    try:
        with av.open(io.BytesIO(data), "r", format=kind) as container:
            for frame in container.decode(audio=0):
                made = [f.to_ndarray().reshape(-1) for f in resampler.resample(frame)]
                samples += sum(len(m) for m in made)
                if samples > MAX_SPEECH_S * SPEECH_HZ:
                    raise _too_long(param)
                pieces += made
            pieces += [f.to_ndarray().reshape(-1) for f in resampler.resample(None)]
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise invalid(param, f"The data is not {kind} audio: {error}", "invalid_audio") from None
    speech = np.concatenate([np.zeros(0, np.float32), *pieces])
    if not len(speech):
        raise invalid(param, "The audio is empty.", "invalid_audio")
    return speech.clip(-1.0, 1.0)


def decode_picture(data: bytes, param: str) -> np.ndarray:
    """(height, width, 3) uint8. Raises ApiError for what is no picture, or too large."""
    return np.asarray(_upright(data, PICTURE_FORMATS, param).convert("RGB"))


def decode_mask(data: bytes, param: str) -> np.ndarray:
    """(height, width) uint8, high where the picture is transparent. Raises ApiError, also if it is nowhere."""
    picture = _upright(data, ("PNG",), param)
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        raise invalid(param, "A mask needs an alpha channel: transparent pixels are edited.", "invalid_image")
    return 255 - np.asarray(picture.convert("RGBA"))[..., 3]


def _upright(data: bytes, formats: tuple[str, ...], param: str) -> Image.Image:
    """The picture as it is looked at."""
    try:
        with Image.open(io.BytesIO(data), formats=formats) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise invalid(param, f"A picture may have {MAX_PIXELS} pixels.", "invalid_image")
            picture.load()
            return ImageOps.exif_transpose(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow's words for data of no known format are the address of our buffer
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise invalid(param, f"The data is no picture ({', '.join(formats)}){why}", "invalid_image") from None


def _too_long(param: str) -> ApiError:
    return invalid(param, f"Audio may have {MAX_SPEECH_S} seconds.", "invalid_audio")
