# SPDX-License-Identifier: Apache-2.0
"""Request bodies: received within bounds of size and time, parsed, and not kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive

from triton_omni.openai.http.budget import Share
from triton_omni.openai.http.context import context_of
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.parsing import load_json, parse_body
from triton_omni.openai.http.pools import in_thread
from triton_omni.openai.http.settings import BodyLimits

Body = TypeVar("Body", bound=msgspec.Struct)

DRAIN_FACTOR = 4
"""A refused body is read up to this multiple of the bound before the response, and for DRAIN_S at most."""
DRAIN_S = 30.0
LARGE_BYTES = 1 << 20
"""Larger bodies are parsed in a thread, so that the event loop serves others meanwhile."""
FREE_BYTES = 64 * 1024
"""Bytes of each body that are not counted: short requests pass while large ones fill the budget."""


ENCODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Content-Encoding → zlib's window bits."""


class ClientGone(Exception):
    """The client closed the connection."""


class Receiver:
    """Receives one body."""

    def __init__(
        self, receive: Receive, share: Share, limits: BodyLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._receive = receive
        self._share = share
        self._limits = limits
        self._clock = clock

    async def body(self, headers: Headers) -> bytes:
        """The whole body, counted in the share. Raises ApiError or ClientGone."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limits.body_bytes:
            error = self._too_large()
            error.closes = "expect" in headers  # the client sends its body later, or the next request instead of it
            await self._refuse(error, is_coming=not error.closes)
        start_s = self._clock()
        body = bytearray()
        more = True
        while more:
            message = await self._next(start_s, len(body))
            body += message.get("body", b"")
            more = message.get("more_body", False)
            try:
                if len(body) > self._limits.body_bytes:
                    raise self._too_large()
                self._share.take(counted(len(body)) - self._share.held)
            except ApiError as error:
                body.clear()
                self._share.give(self._share.held)  # the rest is discarded and must not block others
                await self._refuse(error, is_coming=more)
        return bytes(body)

    async def _next(self, start_s: float, received: int) -> Message:
        """The next part. Raises ApiError if it does not arrive in time."""
        limits = self._limits
        late_s = start_s + limits.silence_s + received / limits.bytes_per_s - self._clock()
        try:
            async with asyncio.timeout(min(limits.silence_s, late_s)):
                return await part_of(self._receive)
        except TimeoutError:
            message = f"The body stopped after {received} bytes, or arrived too slowly."
            raise ApiError(408, message, code="request_timeout") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body must be at most {self._limits.body_bytes} bytes.", code="content_too_large")

    async def _refuse(self, error: ApiError, *, is_coming: bool) -> NoReturn:
        """Raise the error, after the rest was read and discarded: most clients read the response after sending all."""
        if is_coming:
            await self._drain()
        raise error

    async def _drain(self) -> None:
        left = DRAIN_FACTOR * self._limits.body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while left > 0:
                    message = await part_of(self._receive)
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def decompressed(data: bytes, encoding: str, limit: int) -> bytes:
    """A body without its Content-Encoding. Raises ApiError: 415, 400, or 413 for more than `limit` bytes."""
    if encoding not in ENCODINGS:
        message = f"Content-Encoding must be gzip, deflate or identity (got '{encoding[:100]}')."
        raise ApiError(415, message, code="unsupported_content_encoding", param="Content-Encoding")
    is_raw = encoding == "deflate" and int.from_bytes(data[:2]) % 31 != 0  # some clients leave zlib's header out
    content = bytearray()
    try:
        while data:  # gzip allows several members
            inflater = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else ENCODINGS[encoding])
            content += inflater.decompress(data, limit + 1 - len(content))
            if len(content) > limit:
                message = f"The decompressed body must be at most {limit} bytes."
                raise ApiError(413, message, code="content_too_large")
            if not inflater.eof:
                raise zlib.error("the data ends early")
            data = inflater.unused_data
    except zlib.error as error:
        message = f"The body is not valid {encoding}: {error}."
        raise ApiError(400, message, code="invalid_content_encoding", param="Content-Encoding") from None
    return bytes(content)


def counted(nbytes: int) -> int:
    """The bytes of a body that count in the budget."""
    return max(0, nbytes - FREE_BYTES)


async def part_of(receive: Receive) -> Message:
    """The next part of a body. Raises ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


async def read_json(request: Request, kind: type[Body]) -> Body:
    """The JSON body as a struct. Raises ApiError naming the parameter."""
    context = context_of(request)
    # Request.body() would keep the bytes for as long as the response takes
    data = b"".join([part async for part in request.stream()])
    if len(data) < LARGE_BYTES:
        values = load_json(data)
    else:
        values = await in_thread(context.services.pools.media, load_json, data)
    return parse_body(kind, values, context.ignored)
