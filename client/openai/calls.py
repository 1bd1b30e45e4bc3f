# SPDX-License-Identifier: Apache-2.0
"""One HTTP request's way to the server: what handlers share, and pieces that can be waited for with patience."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from starlette.requests import Request

from backends import wire
from backends.wire import GenerateRequest, OmniError
from client.connection import Model
from client.openai.errors import ParamOf, of_omni
from client.openai.models import Catalogue
from client.openai.transcripts import Transcripts
from client.pieces import Piece

KEEP_ALIVE_S = 10.0
"""How long a stream may say nothing; and how long its head waits for an error that deserves its own status."""


class BrokenOff(Exception):
    """An answer failed after its head was sent, in a form that has no place for an error: cut the connection."""


class Backend(Protocol):
    """What the proxy needs of a server; AsyncClient is one."""

    def generate(
        self,
        pipeline: str,
        request: GenerateRequest,
        *,
        audio: np.ndarray | None = None,
        image: np.ndarray | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Piece, None]: ...

    async def health(self, pipeline: str) -> dict[str, Any]: ...

    async def models(self) -> list[Model]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Shared:
    """What all requests of one proxy share; `app.state.shared`."""

    backend: Backend
    catalogue: Catalogue
    transcripts: Transcripts


class Pieces:
    """A backend's pieces. Waiting can time out without losing the piece that is on its way.

    Use as a context manager: leaving it ends the request if it has not ended.
    """

    def __init__(self, source: AsyncGenerator[Piece, None], param_of: ParamOf) -> None:
        self._source = source
        self._param_of = param_of
        self._coming: asyncio.Task[Piece | None] | None = None

    async def __aenter__(self) -> Pieces:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)
        await self._source.aclose()

    async def begin(self) -> None:
        """Wait a while for the first piece. Raises ApiError if an error comes first: it can still be the answer."""
        if await self.wait(KEEP_ALIVE_S):
            assert self._coming is not None
            self._result(self._coming)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True once the next piece, the end or an error is there."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._fetch())
        done, _ = await asyncio.wait({self._coming}, timeout=timeout_s)
        return bool(done)

    async def next(self) -> Piece | None:
        """The next piece; None after the last. Raises ApiError."""
        await self.wait()
        assert self._coming is not None
        coming, self._coming = self._coming, None
        return self._result(coming)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self.next()) is not None:
            yield piece

    def _result(self, coming: asyncio.Task[Piece | None]) -> Piece | None:
        try:
            return coming.result()
        except OmniError as error:
            raise of_omni(error, self._param_of) from error

    async def _fetch(self) -> Piece | None:
        piece = await anext(self._source, None)
        if piece is not None and piece.event.outcome == "cancelled":
            raise wire.from_line("[cancelled] the request was aborted")
        return piece


@dataclass(frozen=True)
class Call:
    """A checked request, ready for the server. `params` maps our fields to the OpenAI request's parameters."""

    model: str
    request: GenerateRequest
    params: Mapping[str, str]
    audio: np.ndarray | None = None
    image: np.ndarray | None = None

    def param_of(self, where: str) -> str | None:
        """The OpenAI parameter that a field of our request came from."""
        if where == "operation":  # this pipeline does not do what the URL asks for
            return "model"
        return self.params.get(where, where.removeprefix("sampling.") or None)


def shared_of(request: Request) -> Shared:
    """What all requests share."""
    shared: Shared = request.app.state.shared
    return shared


async def open_pieces(request: Request, call: Call) -> Pieces:
    """Start the call; whatever happens to the HTTP request also happens to it."""
    shared = shared_of(request)
    pipeline = await shared.catalogue.pipeline_of(call.model)
    source = shared.backend.generate(
        pipeline, call.request, audio=call.audio, image=call.image, request_id=request.state.request_id
    )
    stack: AsyncExitStack = request.state.stack
    return await stack.enter_async_context(Pieces(source, call.param_of))
