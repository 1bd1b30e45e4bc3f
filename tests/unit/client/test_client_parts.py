# SPDX-License-Identifier: Apache-2.0
"""Small pure parts: Triton's words, transcripts, encoders, fetching by URL."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from tests.kit.fake_backend import sine
from tests.kit.web_server import web
from triton_omni import failures
from triton_omni import fetch as fetching
from triton_omni.backends import wire
from triton_omni.media import MediaError
from triton_omni.media.images import decode_image
from triton_omni.openai.http.transcripts import Transcripts
from triton_omni.openai.media import audio as coding
from triton_omni.pieces import inputs_of


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("[too_busy:queue] full", "too_busy"),
        ("Request for unknown model: 'x' is not found", "not_found"),
        ("Request for unknown model: 'x' has no available versions", "unavailable"),
        ("in ensemble: model is not ready", "unavailable"),
        ("Server is stopping, scheduler for model has stopped", "unavailable"),
        ("something else", "internal"),
        ("[strange] words", "internal"),
    ],
)
def test_tritons_words(words: str, code: str) -> None:
    assert failures.of_triton(words).code == code


def test_transcripts_expire_and_are_bounded() -> None:
    now = [1000.0]
    kept = Transcripts(lambda: now[0], life_s=10, limit=2)
    assert kept.keep("a", "A") == 1010
    assert kept.find("a") == "A"
    now[0] = 1009.9
    assert kept.find("a") == "A"
    now[0] = 1010.0
    assert kept.find("a") is None
    for name in "bcd":
        kept.keep(name, name)
    assert [kept.find(name) for name in "bcd"] == [None, "c", "d"]


@pytest.mark.parametrize("rate_hz", [16_000, 22_050, 24_000, 44_100])
@pytest.mark.parametrize("kind", ["pcm", "aac", "wav"])
def test_pieces_encode_to_the_same_bytes_as_the_whole(kind: str, rate_hz: int) -> None:
    samples = np.concatenate([sine(i * 500, rate_hz) for i in range(20)])
    streamed = coding.encoder(kind, rate_hz)
    pieces = [streamed.feed(samples[i : i + 333]) for i in range(0, len(samples), 333)]
    joined = b"".join([*pieces, streamed.finish()])
    whole = coding.encode(kind, rate_hz, [samples])
    skip = 44 if kind == "wav" else 0  # the length in the header is known only for the whole
    assert joined[skip:] == whole[skip:]


@pytest.mark.parametrize("kind", ["mp3", "opus", "flac", "aac"])
def test_compressed_speech_does_not_wait_for_the_end(kind: str) -> None:
    streamed = coding.encoder(kind, 24_000)
    samples = np.concatenate([sine(i * 500) for i in range(48)])  # one second
    first = next(i for i in range(96) if len(streamed.feed(samples[i * 250 : i * 250 + 250])) > 0)
    ready = sum(len(streamed.feed(samples[i : i + 2400])) > 0 for i in range(0, len(samples), 2400))
    assert first < 48
    assert ready >= 5, "must flow, not come at once"
    assert streamed.finish()


def test_float_samples_are_cut_off_not_wrapped() -> None:
    assert coding.to_int16(np.array([2.0, 1.0, 0.0, -1.0, -2.0], np.float32)).tolist() == [
        32767,
        32767,
        0,
        -32767,
        -32767,
    ]


def test_media_of_a_wrong_type_are_refused_before_the_call() -> None:
    request = wire.GenerateRequest()
    with pytest.raises(ValueError, match="float32"):
        inputs_of(request, {"audio": np.zeros(3)})
    with pytest.raises(ValueError, match="uint8"):
        inputs_of(request, {"image": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="one dimension"):
        inputs_of(request, {"audio": np.zeros((2, 3), np.float32)})
    with pytest.raises(ValueError, match="not smell"):
        inputs_of(request, {"smell": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("2002:7f00:1::", False),
        ("192.168.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False), ("fd00::1", False), ("fe80::1", False),
        ("224.0.0.1", False), ("64:ff9b::7f00:1", False),
    ],
)  # fmt: skip
def test_only_public_addresses_are_fetched_from(address: str, is_public: bool) -> None:
    assert fetching.is_public(address) is is_public


def fetch(url: str, allowed: bool = True) -> bytes:
    return asyncio.run(fetching.read_url(url, lambda address: allowed))


def test_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 100)
    pages = {
        "/good": (200, {}, b"image"),
        "/moved": (302, {"location": "/good"}, b""),
        "/inward": (302, {"location": "file:///etc/passwd"}, b""),
        "/loop": (302, {"location": "/loop"}, b""),
        "/large": (200, {}, b"x" * 101),
        "/none": (404, {}, b""),
    }
    with web(pages) as root:
        assert fetch(f"{root}/good") == b"image"
        assert fetch(f"{root}/moved") == b"image"
        for path, words in (("/loop", "redirects"), ("/large", "larger"), ("/none", "404"), ("/inward", "Only http")):
            with pytest.raises(MediaError, match=words):
                fetch(f"{root}{path}")
        with pytest.raises(MediaError, match="not public"):
            fetch(f"{root}/good", allowed=False)
    with pytest.raises(MediaError, match="could not be read"):
        fetch("http://127.0.0.1:1/")


def test_an_error_about_an_image_does_not_show_where_the_server_keeps_it() -> None:
    with pytest.raises(MediaError) as caught:
        decode_image(b"no image at all")
    assert str(caught.value) == "not a supported image (PNG, JPEG, WEBP, GIF)"
    with pytest.raises(MediaError, match="truncated"):
        decode_image(png_of(40)[:-60])


def png_of(side: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)).save(file, "png")
    return file.getvalue()
