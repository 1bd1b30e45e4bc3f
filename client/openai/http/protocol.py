# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP/1.1 protocol with time-outs of its own, and errors in OpenAI's shape.

It uses attributes of uvicorn that are not documented; `check_uvicorn` verifies them when the proxy starts.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from http import HTTPStatus

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from triton_omni.openai.http.errors import ApiError

HEAD_S = 30.0
"""Longest time from the first byte of a request's head to its last."""
KEEP_ALIVE_S = 75
"""Clients and load balancers keep idle connections for up to a minute; who closes first must not be the server."""
MAX_HEAD_BYTES = 64 * 1024
UNSENT_BYTES = 128 * 1024
"""What the kernel takes of an answer beyond what is on its way: otherwise a client that reads nothing fills a socket
with megabytes, which count as read. The bytes on their way are not bounded, so a fast client far away is as fast."""
_OVERRIDDEN = ("on_response_complete", "data_received", "handle_websocket_upgrade", "send_400_response")
TESTED_VERSIONS = ((0, 30), (0, 55))
"""First version that works, and the first that has not been tested; pyproject.toml pins the same range."""


class Protocol(H11Protocol):
    """Closes a connection on which no request begins for uvicorn's keep-alive time, or whose head stops arriving.

    Malformed requests are answered in OpenAI's shape.
    """

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None
    _is_head_timer = False
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._start(is_head=False)

    def eof_received(self) -> None:
        if self._is_refused:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_answering():
            self._stop()
        elif not self._is_head_timer:
            self._start(is_head=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering():  # a pipelined request has begun otherwise
            self._start(is_head=bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles h11's error."""
        if self._is_answering() and self.cycle.response_started:
            self.transport.close()  # the body broke off; there is no room for a second response
            return
        cause = sys.exception()
        status = getattr(cause, "error_status_hint", 400)
        response = ApiError(status, f"{msg.rstrip('.')}: {cause}.", code="invalid_http").response()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        body = bytes(response.body)
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self._is_refused = True  # closing at once would reset a connection on which the client still sends
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def _start(self, *, is_head: bool) -> None:
        self._stop()
        self._is_head_timer = is_head
        delay_s = self.head_s if is_head else self.timeout_keep_alive
        self._timer = self.loop.call_later(delay_s, self.transport.close)

    def _stop(self) -> None:
        self._is_head_timer = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def check_uvicorn(config: uvicorn.Config) -> None:
    """Raise RuntimeError if this uvicorn lacks what `Protocol` uses. Needs a running event loop."""
    version = tuple(int(part) for part in uvicorn.__version__.split(".")[:2])
    low, high = TESTED_VERSIONS
    config.load()
    protocol = Protocol(config, ServerState(), {})
    lacking = [
        name for name in ("conn", "cycle", "loop", "timeout_keep_alive", "transport") if name not in vars(protocol)
    ]
    lacking += [name for name in _OVERRIDDEN if not hasattr(H11Protocol, name)]
    lacking += [] if "response_complete" in RequestResponseCycle.__init__.__code__.co_names else ["response_complete"]
    if not low <= version < high or lacking:
        names = f"; it lacks: {', '.join(lacking)}" if lacking else ""
        raise RuntimeError(
            f"uvicorn {uvicorn.__version__} is not supported{names}. "
            f"Workaround: pip install 'uvicorn>={low[0]}.{low[1]},<{high[0]}.{high[1]}'"
        )
