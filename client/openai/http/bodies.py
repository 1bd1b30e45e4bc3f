# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: received within bounds of size and time, and handed on without being kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive

from triton_omni.openai.http.budget import HELD_BYTES, Share
from triton_omni.openai.http.calls import shared_of
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.fields import Fields, parse_json
from triton_omni.openai.http.pools import in_thread

DRAIN_FACTOR = 4
"""Of a body that is refused, so many times the bound are read before the answer; and for DRAIN_S at most."""
DRAIN_S = 30.0
LARGE_BYTES = 1 << 20
"""More is read in a thread: it takes longer than others should wait."""
FREE_BYTES = 64 * 1024
"""Of each body, this much is not counted: short requests go on while large ones fill the budget."""


class ClientGone(Exception):
    """The client closed the connection."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what clients send.

    body_bytes   of one body
    held_bytes   of all bodies not yet read and all decoded media together
    silence_s    longest pause within a body
    bytes_per_s  slowest average of a body that has taken longer than `silence_s`
    """

    body_bytes: int = 64 * 1024 * 1024
    held_bytes: int = HELD_BYTES
    silence_s: float = 30.0
    bytes_per_s: int = 16 * 1024


class Receiver:
    """Receives one body."""

    def __init__(
        self, receive: Receive, share: Share, limits: Limits, clock: Callable[[], float] = time.monotonic
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
            error.closes = "expect" in headers  # who expects an answer first sends later, or the next request instead
            await self._refuse(error, is_coming=not error.closes)
        begun_s = self._clock()
        body = bytearray()
        more = True
        while more:
            message = await self._next(begun_s, len(body))
            body += message.get("body", b"")
            more = message.get("more_body", False)
            try:
                if len(body) > self._limits.body_bytes:
                    raise self._too_large()
                self._share.take(counted(len(body)) - self._share.held)
            except ApiError as error:
                body.clear()
                self._share.give(self._share.held)  # what is dropped from now on must not stand in the way of others
                await self._refuse(error, is_coming=more)
        return bytes(body)

    async def _next(self, begun_s: float, received: int) -> Message:
        """The next part. Raises ApiError if it does not come in time."""
        limits = self._limits
        late_s = begun_s + limits.silence_s + received / limits.bytes_per_s - self._clock()
        try:
            async with asyncio.timeout(min(limits.silence_s, late_s)):
                return await part_of(self._receive)
        except TimeoutError:
            message = f"The body stopped after {received} bytes, or came too slowly."
            raise ApiError(408, message, code="request_timeout") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body may have {self._limits.body_bytes} bytes.", code="content_too_large")

    async def _refuse(self, error: ApiError, *, is_coming: bool) -> NoReturn:
        """Raise the error.

        The rest is read before, without keeping it: most clients look for an answer only when they have sent all.
        """
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


def counted(nbytes: int) -> int:
    """What of a body of so many bytes counts in a budget."""
    return max(0, nbytes - FREE_BYTES)


async def part_of(receive: Receive) -> Message:
    """The next part of a body. Raises ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


async def read_json(request: Request) -> Fields:
    """The body's JSON. Raises ApiError."""
    # Request.body() would keep it for as long as the answer takes
    body = b"".join([part async for part in request.stream()])
    if len(body) < LARGE_BYTES:
        return parse_json(body)
    return await in_thread(shared_of(request).pools.media, parse_json, body)
