# SPDX-License-Identifier: Apache-2.0
"""One HTTP request's way to the server: what handlers share, and pieces that can be waited for with patience."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import numpy as np
from starlette.requests import Request

from triton_omni.backends import wire
from triton_omni.backends.wire import GenerateRequest, OmniError
from triton_omni.fetch import IsAllowed
from triton_omni.openai.backend import Backend
from triton_omni.openai.endpoints.models import Catalogue
from triton_omni.openai.endpoints.transcripts import Transcripts
from triton_omni.openai.http.budget import Share
from triton_omni.openai.http.errors import ApiError, of_omni
from triton_omni.openai.http.pools import Pools
from triton_omni.pieces import Piece

KEEP_ALIVE_S = 10.0
"""How long a stream may say nothing; and how long its head waits for an error that deserves its own status."""
SEEDS = 2**64
PARTS = ("sampling", "image", "speech", "transcription")
"""Parts of a request whose fields are parameters of their own in OpenAI's bodies."""
ErrorOf = Callable[[OmniError], ApiError]


class BrokenOff(Exception):
    """An answer failed after its head was sent, in a form that has no place for an error: cut the connection."""


@dataclass(frozen=True)
class Shared:
    """What all requests of one proxy share; `app.state.shared`. `may_fetch` says which addresses URLs may lead to."""

    backend: Backend
    catalogue: Catalogue
    transcripts: Transcripts
    pools: Pools
    may_fetch: IsAllowed


class Pieces:
    """The pieces of one or more runs, each with the number of its run, as they come.

    Waiting can time out without losing a piece that is on its way. Use as a context manager: leaving it ends the
    runs that have not ended.
    """

    def __init__(self, sources: Sequence[AsyncGenerator[Piece, None]], error_of: ErrorOf) -> None:
        self._sources = dict(enumerate(sources))
        self._open = set(self._sources)
        self._error_of = error_of
        self._coming: dict[int, asyncio.Task[Piece | None]] = {}

    async def __aenter__(self) -> Pieces:
        return self

    async def __aexit__(self, *_: object) -> None:
        for coming in self._coming.values():
            coming.cancel()
        await asyncio.gather(*self._coming.values(), return_exceptions=True)
        closing = (source.aclose() for source in self._sources.values())
        for failed in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(failed, BaseException):
                raise failed

    async def begin(self) -> None:
        """Wait a while for the first piece. Raises ApiError if an error comes first: it can still be the answer."""
        await self.wait(KEEP_ALIVE_S)
        for coming in self._coming.values():
            if coming.done():
                self._result(coming)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True once the next piece, the end or an error is there."""
        for number in self._open - self._coming.keys():
            self._coming[number] = asyncio.create_task(self._fetch(number))
        if not self._coming:
            return True
        done, _ = await asyncio.wait(self._coming.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def next(self) -> tuple[int, Piece] | None:
        """(run, piece); None when all runs have ended. Raises ApiError."""
        while self._open:
            await self.wait()
            # Who was served goes to the end of the dict when it is waited for anew: runs take turns.
            number = next(number for number, coming in self._coming.items() if coming.done())
            piece = self._result(self._coming.pop(number))
            if piece is not None:
                return number, piece
            self._open.discard(number)
        return None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        while (item := await self.next()) is not None:
            yield item

    def _result(self, coming: asyncio.Task[Piece | None]) -> Piece | None:
        try:
            return coming.result()
        except OmniError as error:
            raise self._error_of(error) from error

    async def _fetch(self, number: int) -> Piece | None:
        piece = await anext(self._sources[number], None)
        if piece is not None and piece.event.outcome == "cancelled":
            raise wire.from_line("[cancelled] the request was aborted")
        return piece


@dataclass(frozen=True)
class Call:
    """A checked request, ready for the server.

    params  maps our fields to the OpenAI request's parameters
    errors  for fields of ours that the client does not know: what to say instead
    runs    how many times to run it; a given seed grows by one with each run
    """

    model: str
    request: GenerateRequest
    params: Mapping[str, str]
    media: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    runs: int = 1
    errors: Mapping[str, ApiError] = field(default_factory=dict[str, ApiError])

    def error_of(self, error: OmniError) -> ApiError:
        """A server's error as an answer that names the OpenAI parameter."""
        is_field = error.code == wire.BadRequest.code
        return self.errors[error.where] if is_field and error.where in self.errors else of_omni(error, self._param_of)

    def _param_of(self, where: str) -> str | None:
        """The OpenAI parameter that a field of our request came from."""
        if where == "operation":  # this pipeline does not do what the URL asks for
            return "model"
        if where == wire.REQUEST:  # all of it is too large
            where = _largest(self.request)
        if where in self.params:
            return self.params[where]
        part, _, name = where.partition(".")
        return (name if part in PARTS and name else where) or None

    def request_of(self, run: int) -> GenerateRequest:
        """The request of one of the runs."""
        sampling = self.request.sampling
        if not run or sampling.seed is None:
            return self.request
        seed = (sampling.seed + run + SEEDS // 2) % SEEDS - SEEDS // 2
        return msgspec.structs.replace(self.request, sampling=msgspec.structs.replace(sampling, seed=seed))


def _largest(request: GenerateRequest) -> str:
    """The field that has most bytes."""
    size = lambda owner, name: len(msgspec.json.encode(getattr(owner, name)))  # noqa: E731
    name = max(request.__struct_fields__, key=lambda name: size(request, name))
    if name not in PARTS:
        return name
    part = getattr(request, name)
    return f"{name}.{max(part.__struct_fields__, key=lambda name: size(part, name))}"


def shared_of(request: Request) -> Shared:
    """What all requests share."""
    shared: Shared = request.app.state.shared
    return shared


async def open_pieces(request: Request, call: Call) -> Pieces:
    """Start the call; whatever happens to the HTTP request also happens to it. The body has been read by now."""
    shared = shared_of(request)
    share: Share = request.state.share
    share.give(request.state.body_bytes)
    share.take((call.runs - 1) * sum(tensor.nbytes for tensor in call.media.values()))  # each run sends them
    pipeline = await shared.catalogue.pipeline_of(call.model)
    sources = [
        shared.backend.generate(
            pipeline, call.request_of(run), media=call.media,
            request_id=request.state.request_id, traceparent=request.state.traceparent,
        )
        for run in range(call.runs)
    ]  # fmt: skip
    stack: AsyncExitStack = request.state.stack
    return await stack.enter_async_context(Pieces(sources, call.error_of))
