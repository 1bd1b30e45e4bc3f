# SPDX-License-Identifier: Apache-2.0
"""Image files are decoded as a viewer shows them: every Pillow mode, transparency, orientation, broken files."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable

import numpy as np
import pytest
from PIL import Image

from triton_omni.media import Media, MediaError, limits
from triton_omni.media.images import decode_image, decode_mask, to_rgb

MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX", "RGBa",
         "I;16", "I;16L", "I;16B", "I;16N")  # fmt: skip


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # pyright: ignore[reportArgumentType]
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, depth: int, color: int, row: bytes, *chunks: bytes) -> bytes:
    """A PNG of one row, which Pillow does not write in every form."""
    header = struct.pack(">IIBBBBB", width, 1, depth, color, 0, 0, 0)
    parts = (chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(b"\0" + row)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def levels(values: Iterable[int]) -> list[list[int]]:
    return [[value] * 3 for value in values]


def test_16_bit_greyscale_is_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    row = decode_image(png(256, 16, 0, ramp.astype(">u2").tobytes()))[0]
    assert np.abs(row.astype(int) - np.arange(256)[:, None]).max() <= 1


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_16_bit_modes_keep_their_range(mode: str) -> None:
    dtype = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]
    image = Image.frombytes(mode, (3, 1), np.array([0, 32768, 65535], dtype).tobytes())
    assert np.asarray(to_rgb(image)).tolist() == [levels([0, 128, 255])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alpha", ["white", "drop"])
def test_every_mode_becomes_rgb(mode: str, alpha: str) -> None:
    pixels = np.asarray(to_rgb(Image.new(mode, (3, 2)), alpha))  # pyright: ignore[reportArgumentType]
    assert pixels.shape == (2, 3, 3) and pixels.dtype == np.uint8


@pytest.mark.parametrize(("mode", "color"), [("RGBA", (0, 0, 0, 128)), ("LA", (0, 128))])
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_half_transparent_black_is_grey_on_white(mode: str, color: tuple[int, ...], kind: str) -> None:
    data = file_of(Image.new(mode, (4, 4), color), kind, **({"lossless": True} if kind == "webp" else {}))
    assert np.abs(decode_image(data).astype(int) - 127).max() <= 1
    assert decode_image(data, "drop").max() == 0, "images to edit keep their hidden colors, as in diffusers"


def test_transparent_background_is_white_not_its_hidden_color() -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (2, 2, 6, 6))
    for kind in ("png", "webp", "gif"):
        pixels = decode_image(file_of(image, kind, **({"lossless": True} if kind == "webp" else {})))
        assert pixels[0, 0].tolist() == [255, 255, 255], kind
        assert pixels[3, 3].tolist() == [0, 0, 255], kind


PALETTE = chunk(b"PLTE", bytes([0, 0, 0, 255, 0, 0]))


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (png(2, 8, 3, bytes([0, 1]), PALETTE, chunk(b"tRNS", b"\x80")), [[127] * 3, [255, 0, 0]]),
        (png(2, 1, 3, bytes([0b01000000]), PALETTE, chunk(b"tRNS", b"\x00")), [[255] * 3, [255, 0, 0]]),
        (png(2, 1, 0, bytes([0b01000000]), chunk(b"tRNS", struct.pack(">H", 0))), levels([255, 255])),
        (png(4, 2, 0, bytes([0b00011011]), chunk(b"tRNS", struct.pack(">H", 1))), levels([0, 255, 170, 255])),
        (png(2, 4, 0, bytes([0x1A]), chunk(b"tRNS", struct.pack(">H", 1))), levels([255, 170])),
        (png(2, 8, 0, bytes([10, 20]), chunk(b"tRNS", struct.pack(">H", 20))), levels([10, 255])),
        (png(2, 16, 0, struct.pack(">2H", 1000, 257), chunk(b"tRNS", struct.pack(">H", 1000))), levels([255, 1])),
        (png(2, 8, 2, bytes([1, 2, 3, 4, 5, 6]), chunk(b"tRNS", struct.pack(">3H", 1, 2, 3))), [[255] * 3, [4, 5, 6]]),
        (
            png(2, 16, 2, struct.pack(">6H", 256, 512, 768, 1024, 1280, 1536),
                chunk(b"tRNS", struct.pack(">3H", 256, 512, 768))),
            [[255] * 3, [4, 5, 6]],
        ),
        (png(2, 16, 4, struct.pack(">4H", 0, 32896, 25700, 65535)), levels([127, 100])),
        (png(1, 16, 6, struct.pack(">4H", 0, 0, 0, 32896)), levels([127])),
    ],
    ids=["palette", "palette 1 bit", "grey 1 bit", "grey 2 bits", "grey 4 bits", "grey 8 bits", "grey 16 bits",
         "rgb 8 bits", "rgb 16 bits", "grey alpha 16 bits", "rgba 16 bits"],
)  # fmt: skip
def test_transparency_of_every_png_type(data: bytes, row: list[list[int]]) -> None:
    assert np.abs(decode_image(data)[0].astype(int) - np.array(row)).max() <= 1


def test_a_transparent_color_makes_a_mask_at_every_depth() -> None:
    two_bits = png(4, 2, 0, bytes([0b00011011]), chunk(b"tRNS", struct.pack(">H", 1)))
    deep = png(2, 16, 0, struct.pack(">2H", 1000, 257), chunk(b"tRNS", struct.pack(">H", 1000)))
    assert decode_mask(two_bits).tolist() == [[0, 255, 0, 0]]
    assert decode_mask(deep).tolist() == [[255, 0]]
    with pytest.raises(MediaError, match="alpha channel"):
        decode_mask(file_of(Image.new("I;16", (2, 2)), "png"))


def corners() -> Image.Image:
    """Red at the upper left, the rest green."""
    image = Image.new("RGB", (32, 16), (0, 200, 0))
    image.paste((200, 0, 0), (0, 0, 8, 8))
    return image


@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (-1, -1)), (6, (0, -1)), (8, (-1, 0))])
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_exif_orientation(orientation: int, corner: tuple[int, int], kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode_image(file_of(corners(), kind, exif=exif))
    assert pixels.shape[:2] == ((32, 16) if orientation > 4 else (16, 32))
    assert pixels[corner][0] > 150 and pixels[corner][1] < 80


def test_an_image_with_broken_exif_is_decoded_as_stored() -> None:
    for exif in (b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01"):
        assert decode_image(file_of(corners(), "jpeg", exif=exif)).shape == (16, 32, 3)


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "webp" else {}
    pixels = decode_image(file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options))
    assert pixels.shape == (8, 8, 3) and pixels[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGB"])
def test_jpeg_colors(mode: str) -> None:
    image = Image.new("RGB", (16, 16), (40, 40, 40)).convert(mode)
    assert np.abs(decode_image(file_of(image, "jpeg")).astype(int) - 40).max() <= 2


def test_a_jpeg_with_several_images_gives_the_first() -> None:
    extra = Image.new("RGB", (8, 8))
    assert decode_image(file_of(corners(), "mpo", save_all=True, append_images=[extra])).shape == (16, 32, 3)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_truncated_files_are_refused_at_any_length(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    data = file_of(Image.fromarray(noise), kind)
    for length in (0, 1, 8, 20, len(data) // 4, len(data) // 2):
        with pytest.raises(MediaError, match="not a supported image"):
            decode_image(data[:length])


def test_large_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    side = 1 << 16
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    with pytest.raises(MediaError, match=r"pixels|bomb"):
        decode_image(bomb + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b""))
    side = 1 + int(limits.MAX_PIXELS**0.5)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    with pytest.raises(MediaError, match=f"at most {limits.MAX_PIXELS} pixels"):
        decode_image(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")))


def test_compressed_metadata_that_expands_without_end_is_refused() -> None:
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * (80 << 20)))
    with pytest.raises(MediaError):
        decode_image(png(1, 8, 0, b"\0", bomb))


def test_other_formats_are_refused_whatever_pillow_reads() -> None:
    for kind in ("bmp", "tiff", "ppm", "ico"):
        with pytest.raises(MediaError, match="PNG, JPEG, WEBP, GIF"):
            decode_image(file_of(corners(), kind))


def test_broken_bytes_never_raise_anything_but_a_media_error() -> None:
    random = np.random.default_rng(7)
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("png", "jpeg", "webp", "gif"):
        data = np.frombuffer(file_of(corners(), kind, **({} if kind == "gif" else {"exif": exif})), np.uint8)
        for _ in range(60):
            broken = data.copy()
            broken[random.integers(0, len(data), 3)] = random.integers(0, 256, 3)
            try:
                decode_image(broken.tobytes())
            except MediaError:
                continue


def test_a_part_says_what_the_pixels_are() -> None:
    part = Media().image(file_of(Image.new("LA", (3, 2), (0, 0)), "png"))
    assert (part.shape, part.length) == ((2, 3, 3), 18)
