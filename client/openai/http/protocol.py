# SPDX-License-Identifier: Apache-2.0
"""HTTP connections on which nothing gets done are closed: heads that do not arrive, bodies nobody waits for."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S = 30.0


class Protocol(H11Protocol):
    """uvicorn's, which bounds only the pause between two requests."""

    idle_s = IDLE_S
    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._forget()
        elif self._idle is None:
            self._idle = self.loop.call_later(self.idle_s, self.transport.close)

    def _forget(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
