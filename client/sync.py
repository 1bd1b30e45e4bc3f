# SPDX-License-Identifier: Apache-2.0
"""Client: AsyncClient for code without an event loop. Runs a loop in a background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from triton_omni.backends.wire import GenerateRequest
from triton_omni.connection import AsyncClient, Model
from triton_omni.fetch import is_any, read_url
from triton_omni.pieces import NO_MEDIA, Piece

T = TypeVar("T")


class Client:
    """Calls the pipelines of one server; any thread may use it, any number of requests at once."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None, key: str = "") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="triton-omni-client", daemon=True)
        self._thread.start()
        self._client = self.run(_connect(address, headers, key))

    def generate(
        self,
        pipeline: str,
        request: GenerateRequest,
        *,
        media: Mapping[str, np.ndarray] = NO_MEDIA,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Piece]:
        """AsyncClient.generate. Closing the iterator, or leaving a `for` over it, cancels the request."""
        pieces = self._client.generate(pipeline, request, media=media, request_id=request_id, timeout_s=timeout_s)
        try:
            while (piece := self.run(_next(pieces))) is not None:
                yield piece
        finally:
            self.run(pieces.aclose())

    def abort(self, pipeline: str, request_id: str, token: str = "") -> int:
        """See AsyncClient.abort."""
        return self.run(self._client.abort(pipeline, request_id, token))

    def append(self, pipeline: str, token: str, text: str, *, ends: bool = False) -> None:
        """See AsyncClient.append."""
        self.run(self._client.append(pipeline, token, text, ends=ends))

    def health(self, pipeline: str) -> dict[str, Any]:
        """See AsyncClient.health."""
        return self.run(self._client.health(pipeline))

    def requests(self, pipeline: str, request_id: str = "") -> dict[str, Any]:
        """See AsyncClient.requests."""
        return self.run(self._client.requests(pipeline, request_id))

    def is_public(self, name: str) -> bool:
        """See AsyncClient.is_public."""
        return self.run(self._client.is_public(name))

    def models(self) -> list[Model]:
        """Public models in the server's repository, ready or not. Raises OmniError."""
        return self.run(self._client.models())

    def is_live(self) -> bool:
        """True if the server answers."""
        return self.run(self._client.is_live())

    def read_url(self, url: str) -> bytes:
        """The bytes of a data URL or behind an http(s) one, of any address. Raises MediaError."""
        return self.run(read_url(url, is_any))

    def close(self) -> None:
        """End the channel and the thread; open requests are cancelled."""
        if self._loop.is_closed():
            return
        self.run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connection(self) -> AsyncClient:
        """The client behind this one, for work that is handed to `run` or `submit`."""
        return self._client

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work in the loop of `connection`; cancelling the result cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work in the loop of `connection`."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:  # a Ctrl-C here must not leave the work behind
            future.cancel()
            raise


async def _connect(address: str, headers: Mapping[str, str] | None, key: str) -> AsyncClient:
    return AsyncClient(address, headers, key)


async def _next(pieces: AsyncGenerator[Piece, None]) -> Piece | None:
    return await anext(pieces, None)
