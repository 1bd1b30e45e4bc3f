# SPDX-License-Identifier: Apache-2.0
"""Calls to the server: a checked request, and its output pieces, which can be awaited with a time-out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from triton_omni.backends import wire
from triton_omni.backends.wire import GenerateRequest, OmniError
from triton_omni.media.limits import SPEECH_HZ
from triton_omni.openai.http.access import KeyUse
from triton_omni.openai.http.context import RequestContext
from triton_omni.openai.http.errors import ApiError, of_omni
from triton_omni.pieces import Piece

KEEP_ALIVE_S = 10.0
"""Longest silence of a stream; and how long its response head waits for an error that deserves its own status."""
SEEDS = 2**64
PARTS = ("sampling", "image", "speech", "transcription")
"""Parts of a request whose fields are parameters of their own in OpenAI's bodies."""
ErrorOf = Callable[[OmniError], ApiError]


class BrokenOff(Exception):
    """A response failed after its head was sent, in a format without room for an error: cut the connection."""


class PieceStream:
    """The pieces of one or more runs as they arrive, each with the number of its run.

    A wait can time out without losing a piece. Use as a context manager: leaving it ends the runs that still go on.
    Audio counts for `key`.
    """

    def __init__(
        self, sources: Sequence[AsyncGenerator[Piece, None]], error_of: ErrorOf, key: KeyUse | None = None
    ) -> None:
        self._sources = dict(enumerate(sources))
        self._open = set(self._sources)
        self._error_of = error_of
        self._key = key
        self._pending: dict[int, asyncio.Task[Piece | None]] = {}

    async def __aenter__(self) -> PieceStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        closing = (source.aclose() for source in self._sources.values())
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def begin(self) -> None:
        """Wait up to KEEP_ALIVE_S for the first piece. Raises ApiError if an error comes first: it has a status."""
        await self.wait(KEEP_ALIVE_S)
        for task in self._pending.values():
            if task.done():
                self._result(task)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True once the next piece, the end or an error has arrived."""
        for run in self._open - self._pending.keys():
            self._pending[run] = asyncio.create_task(self._fetch(run))
        if not self._pending:
            return True
        done, _ = await asyncio.wait(self._pending.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def next(self) -> tuple[int, Piece] | None:
        """(run, piece); None when all runs have ended. Raises ApiError."""
        while self._open:
            await self.wait()
            # A run that was served is appended to the dict again, so runs take turns.
            run = next(run for run, task in self._pending.items() if task.done())
            piece = self._result(self._pending.pop(run))
            if piece is not None:
                return run, piece
            self._open.discard(run)
        return None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        while (item := await self.next()) is not None:
            yield item

    def _result(self, task: asyncio.Task[Piece | None]) -> Piece | None:
        try:
            return task.result()
        except OmniError as error:
            raise self._error_of(error) from error

    async def _fetch(self, run: int) -> Piece | None:
        piece = await anext(self._sources[run], None)
        if piece is not None and piece.event.outcome == "cancelled":
            raise wire.from_line("[cancelled] the request was aborted")
        if piece is not None and piece.audio is not None and self._key is not None:
            self._key.audio_s.spend(piece.audio.size / piece.sample_rate_hz)
        return piece


@dataclass(frozen=True)
class BackendCall:
    """A checked request, ready for the server.

    params  field of our request → parameter of the OpenAI request
    errors  field of our request → the error to answer instead of the server's
    runs    independent runs of the request; a given seed grows by one with each
    inputs  of a request for several texts: its `input`s, with as many runs for each as there are for the others
    """

    model: str
    request: GenerateRequest
    params: Mapping[str, str]
    media: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    runs: int = 1
    inputs: Sequence[str] = ()
    errors: Mapping[str, ApiError] = field(default_factory=dict[str, ApiError])

    def error_of(self, error: OmniError) -> ApiError:
        """A server's error as a response that names the OpenAI parameter."""
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
        """The request of one run."""
        request, choice = self.request, run
        if self.inputs:
            number, choice = divmod(run, self.runs // len(self.inputs))
            request = msgspec.structs.replace(request, input=self.inputs[number])
        sampling = request.sampling
        if not choice or sampling.seed is None:
            return request
        seed = (sampling.seed + choice + SEEDS // 2) % SEEDS - SEEDS // 2
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=seed))


def _largest(request: GenerateRequest) -> str:
    """The field with the most bytes."""
    name = _largest_field(request)
    return f"{name}.{_largest_field(getattr(request, name))}" if name in PARTS else name


def _largest_field(owner: msgspec.Struct) -> str:
    sizes = {name: len(msgspec.json.encode(value)) for name, value in msgspec.structs.asdict(owner).items()}
    return max(sizes, key=lambda name: sizes[name])


async def open_pieces(context: RequestContext, call: BackendCall) -> PieceStream:
    """Start the call; it ends with the HTTP request. The request's body has been parsed by now."""
    context.share.give(context.body_bytes)
    context.share.take((call.runs - 1) * sum(tensor.nbytes for tensor in call.media.values()))  # each run sends them
    pipeline = await context.services.catalogue.pipeline_of(call.model)
    key = context.key
    if key is not None:
        call = replace(call, request=key.limited(call.model, call.request))
        key.audio_s.spend(call.media[wire.AUDIO].size / SPEECH_HZ if wire.AUDIO in call.media else 0.0)
    sources = [
        context.services.backend.generate(
            pipeline, call.request_of(run), media=call.media,
            request_id=context.request_id, traceparent=context.traceparent,
        )
        for run in range(call.runs)
    ]  # fmt: skip
    return await context.stack.enter_async_context(PieceStream(sources, call.error_of, key))
