# SPDX-License-Identifier: Apache-2.0
"""Data URLs and base64 as browsers, SDKs and the `base64` command write them."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from triton_omni.data_urls import from_base64, from_data_url, is_data_url
from triton_omni.media import MediaError

CONTENT = bytes(range(256)) + b"\xfb\xff\xfe"  # its base64 has "+", "/" and padding
CODED = base64.b64encode(CONTENT).decode()


@pytest.mark.parametrize(
    "header",
    ["data:image/png;base64", "data:;base64", "data:audio/ogg; codecs=opus;base64", "DATA:image/png;BASE64",
     'data:audio/ogg;codecs="opus";base64', 'data:text/plain;name="a;b\\"c";base64', "data:image/png; base64",
     "data:image/png;charset=utf-8;name=cat%20photo.png;base64", " \n data:image/png;base64", "data:image/png;base64  ",
     "data:video/webm;codecs=vp8,opus;base64", 'data:video/webm;codecs="vp8, opus";base64', "data:nonsense;base64",
     "da\nta:image/png;base64", "data:image/p\tng;base64", "data:image/png;x;base64"],
)  # fmt: skip
def test_headers(header: str) -> None:
    assert from_data_url(f"{header},{CODED}") == CONTENT


@pytest.mark.parametrize(
    "body",
    [
        CODED, CODED.rstrip("="), quote(CODED, safe=""), CODED.replace("+", "%2B").replace("/", "%2f"),
        "\n".join(CODED[i : i + 76] for i in range(0, len(CODED), 76)) + "\n",
        "\r\n".join(CODED[i : i + 64] for i in range(0, len(CODED), 64)),
        f" {CODED[:50]} \t{CODED[50:]}\f ", "%0A".join([CODED[:100], CODED[100:]]), f"{CODED}#fragment",
    ],
)  # fmt: skip
def test_bodies(body: str) -> None:
    assert from_data_url(f"data:image/png;base64,{body}") == CONTENT


@pytest.mark.parametrize(
    ("url", "content"),
    [
        ("data:,Hello%2C%20World%21", b"Hello, World!"),
        ("data:text/plain;charset=utf-8,caf%C3%A9", "café".encode()),
        ("data:image/png;base64;x=1,QUJD", b"QUJD"),  # base64 must come last
        ("data:image/pngbase64,QUJD", b"QUJD"),
        ("data:,100%", b"100%"),
        ("data:,%zz%41", b"%zzA"),
        ("data:;base64,", b""),
        ("data:,", b""),
    ],
)
def test_the_standard_for_other_urls(url: str, content: bytes) -> None:
    assert from_data_url(url) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [("YQ==", b"a"), ("YQ", b"a"), ("YR", b"a"), ("Y Q = =", b"a"), ("YWI=", b"ab"), ("YWI", b"ab"), ("YWJj", b"abc"),
     ("", b""), (" \t\n\f\r", b"")],
)  # fmt: skip
def test_forgiving_base64(text: str, content: bytes) -> None:
    assert from_base64(text) == content


@pytest.mark.parametrize(
    "text",
    ["Y", "YQ=", "YQ===", "=", "==", "YQ==YQ==", "Y=Q=", "YWJj=", "YW-_", "YW\u00e9j", "YW\u00a0Jj", "YW\vJj", "YW\0j",
     "\ud800YWJj", "YWJj*", "Y%51=="],
)  # fmt: skip
def test_foreign_characters_and_wrong_padding_are_refused(text: str) -> None:
    with pytest.raises(MediaError, match="base64"):
        from_base64(text)


@pytest.mark.parametrize(
    "url", ["data:image/png;base64", "data:", "http://x/", "", "data:;base64,\ud800", "data:;base64,*"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(MediaError):
        from_data_url(url)


def test_only_data_urls_are_data_urls() -> None:
    assert is_data_url("  DaTa:,") and is_data_url("data:")
    assert not is_data_url("https://example.com/?data:") and not is_data_url("") and not is_data_url("UklGRg==")
