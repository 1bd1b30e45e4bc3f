# SPDX-License-Identifier: Apache-2.0
"""Image files → pixels as a viewer shows them: upright, 8-bit RGB, the first frame, transparency over white."""

from __future__ import annotations

import io
import struct
from typing import Literal, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from triton_omni.media import limits
from triton_omni.media.limits import MediaError

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError)
Alpha = Literal["white", "drop"]
"""What becomes of transparency: composited over white, or ignored so that hidden colors show."""
_WHITE = (255, 255, 255)
_GREY_STEP = {"1": 255, "L;2": 85, "L;4": 17}
"""PNG raw mode with fewer than 8 bits → 8-bit step of one level."""


def decode_image(data: bytes, alpha: Alpha = "white") -> np.ndarray:
    """Pixels of an image file, (height, width, 3) uint8. Raises MediaError."""
    return np.asarray(to_rgb(_upright(data, IMAGE_FORMATS), alpha))


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) as the header of an image file says; (0, 0) for any other content."""
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            return image.size
    except _PILLOW_ERRORS:
        return 0, 0


def decode_mask(data: bytes) -> np.ndarray:
    """Mask of a PNG, (height, width) uint8: 255 where it is transparent. Raises MediaError if it has no alpha."""
    image = _upright(data, ("PNG",))
    if not image.has_transparency_data:
        raise MediaError("A mask needs an alpha channel: transparent pixels are edited.")
    return 255 - np.asarray(_to_8_bit(image).convert("RGBA"))[..., 3]


def to_rgb(image: Image.Image, alpha: Alpha = "white") -> Image.Image:
    """An image of any Pillow mode as RGB.

    16-bit greyscale is scaled to 8 bits; `Image.convert` would clip it. `alpha="drop"` is what diffusers'
    `load_image` does.
    """
    image = _to_8_bit(image)
    if alpha == "drop" or not image.has_transparency_data:
        return image.convert("RGB")
    layer, result = image.convert("RGBA"), Image.new("RGB", image.size, _WHITE)
    result.paste(layer, mask=layer)  # Image.alpha_composite would hold the GIL: 1.6 s for 32 Mi pixels
    return result


def _to_8_bit(image: Image.Image) -> Image.Image:
    """16-bit greyscale as 8-bit greyscale, with alpha if it has a transparent level. Other modes are unchanged."""
    if not image.mode.startswith("I"):  # "I" is what older versions of Pillow make of 16-bit greyscale
        return image
    levels = np.asarray(image).astype(np.int64)
    grey = Image.fromarray(((np.clip(levels, 0, 65535) * 255 + 32767) // 65535).astype(np.uint8))
    key = image.info.get("transparency")
    if key is not None:
        grey.putalpha(Image.fromarray(np.where(levels == key, 0, 255).astype(np.uint8)))
    return grey


def _upright(data: bytes, formats: tuple[str, ...]) -> Image.Image:
    """The first frame of a file, oriented as its EXIF data says."""
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            if image.width * image.height > limits.MAX_PIXELS:
                raise MediaError(f"An image must have at most {limits.MAX_PIXELS} pixels.")
            raw_mode = image.tile[0].args if image.tile else None
            image.load()
            _scale_color_key(image, raw_mode)
            return _transposed(image)
    except MediaError:
        raise
    except _PILLOW_ERRORS as error:
        # Pillow's message for data of no known format is the address of our buffer
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise MediaError(f"not a supported image ({', '.join(formats)}){why}") from None


def _scale_color_key(image: Image.Image, raw_mode: object) -> None:
    """Bring a PNG's transparent color to the 8 bits that Pillow scales the pixels to (PNG specification, tRNS)."""
    key = image.info.get("transparency")
    if isinstance(key, int) and isinstance(raw_mode, str) and raw_mode in _GREY_STEP:
        image.info["transparency"] = min(key * _GREY_STEP[raw_mode], 255)
    elif isinstance(key, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in cast("tuple[int, ...]", key))


def _transposed(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError, struct.error):
        return image  # viewers ignore invalid EXIF data, too
