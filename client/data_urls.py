# SPDX-License-Identifier: Apache-2.0
"""`data:` URLs and base64 as browsers read them. Pure.

Sources: WHATWG Fetch, "data: URL processor"; WHATWG Infra, "forgiving-base64 decode"; WHATWG URL, basic URL parser.
"""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from triton_omni.media.limits import MediaError

_URL_TRIM = "".join(map(chr, range(0x21)))
"""C0 controls and space, which the URL parser strips at both ends."""
_NO_WHITESPACE = str.maketrans("", "", "\t\n\f\r ")
_NO_LINE_BREAKS = str.maketrans("", "", "\t\n\r")
_IS_BASE64 = re.compile(r"; *base64\s*\Z", re.IGNORECASE)
_BASE64_AFTER_COMMAS = re.compile(r"[^;]{0,256}(?:;[^;]{0,256}){0,8}?; *base64\s*,", re.IGNORECASE)
"""A header whose parameters have commas, e.g. `;codecs=vp8,opus;base64,` as FileReader of browsers writes it."""
_HEADER_CHARS = 2048


def is_data_url(url: str) -> bool:
    """True if the URL has the scheme `data`, in any case and after white space."""
    return url[:_HEADER_CHARS].lstrip(_URL_TRIM).translate(_NO_LINE_BREAKS)[:5].lower() == "data:"


def from_data_url(url: str) -> bytes:
    """Content of a data URL; its MIME type is ignored. Raises MediaError.

    One extension of the standard: commas in the MIME type are accepted where `;base64,` follows.
    """
    if not is_data_url(url):
        raise MediaError("A data URL must begin with 'data:'.")
    url = url.strip(_URL_TRIM).translate(_NO_LINE_BREAKS).partition("#")[0]
    header, comma, body = url[5:].partition(",")
    if not comma:
        raise MediaError("A data URL must have the form 'data:image/png;base64,...'.")
    is_base64 = _IS_BASE64.search(header) is not None
    if not is_base64 and (match := _BASE64_AFTER_COMMAS.match(url[:_HEADER_CHARS])):
        is_base64, body = True, url[match.end() :]
    if is_base64 and "%" not in body:
        return from_base64(body)
    content = unquote_to_bytes(body.encode("utf-8", "replace"))
    return from_base64(content.decode("latin-1")) if is_base64 else content


def from_base64(text: str) -> bytes:
    """Bytes of base64 text, with or without line breaks and padding. Raises MediaError for other characters."""
    text = text.translate(_NO_WHITESPACE)
    if len(text) % 4 == 0 and text.endswith("="):
        text = text[:-2] + text[-2:].rstrip("=")
    try:
        if len(text) % 4 == 1 or "=" in text:
            raise ValueError
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("The data is not valid base64.") from None
