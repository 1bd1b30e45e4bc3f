# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP/1.1 protocol, which also closes idle connections.

It uses attributes of uvicorn that are not documented; `check_uvicorn` verifies them when the proxy starts.
"""

from __future__ import annotations

import asyncio

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

IDLE_S = 30.0
TESTED_VERSIONS = ((0, 30), (0, 55))
"""First version that works, and the first that has not been tested; pyproject.toml pins the same range."""


class Protocol(H11Protocol):
    """Closes a connection on which no request arrives for `idle_s`; uvicorn bounds the pause between requests only."""

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
        if self.cycle and not self.cycle.response_complete:  # the cycle is None before the first request
            self._forget()
        elif self._idle is None:
            self._idle = self.loop.call_later(self.idle_s, self.transport.close)

    def _forget(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def check_uvicorn(config: uvicorn.Config) -> None:
    """Raise RuntimeError if this uvicorn lacks what `Protocol` uses. Needs a running event loop."""
    version = tuple(int(part) for part in uvicorn.__version__.split(".")[:2])
    low, high = TESTED_VERSIONS
    config.load()
    protocol = Protocol(config, ServerState(), {})
    lacking = [name for name in ("cycle", "loop", "transport") if name not in vars(protocol)]
    lacking += [name for name in ("on_response_complete", "data_received") if not hasattr(H11Protocol, name)]
    lacking += [] if "response_complete" in RequestResponseCycle.__init__.__code__.co_names else ["response_complete"]
    if not low <= version < high or lacking:
        names = f"; it lacks: {', '.join(lacking)}" if lacking else ""
        raise RuntimeError(
            f"uvicorn {uvicorn.__version__} is not supported{names}. "
            f"Workaround: pip install 'uvicorn>={low[0]}.{low[1]},<{high[0]}.{high[1]}'"
        )
