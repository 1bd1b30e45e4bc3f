# SPDX-License-Identifier: Apache-2.0
"""Bytes that the proxy holds for clients at a time: bodies that arrive, and the media in them once decoded."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from triton_omni.openai.http.errors import ApiError

HELD_BYTES = 1 << 30


class Budget:
    """Bytes that all requests may hold together. Thread-safe."""

    def __init__(self, limit_bytes: int = HELD_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held = 0
        self.lock = threading.Lock()

    @contextmanager
    def share(self) -> Generator[Share]:
        """The bytes of one request; they are released when the `with` body ends."""
        share = Share(self)
        try:
            yield share
        finally:
            share.end()


class Share:
    """The bytes of one request."""

    def __init__(self, budget: Budget) -> None:
        self.held = 0
        self._has_ended = False
        self._budget = budget

    def take(self, nbytes: int) -> None:
        """Hold `nbytes` more. Raises ApiError: 413 if they exceed the whole budget, 503 if they do not fit now.

        Does nothing after `end`: a thread that still decodes for a disconnected client discards its result.
        """
        limit = self._budget.limit_bytes
        with self._budget.lock:
            if self._has_ended:
                return
            if self.held + nbytes > limit:
                message = f"Body and decoded media must be at most {limit} bytes together."
                raise ApiError(413, message, code="content_too_large")
            if nbytes > 0 and self._budget.held + nbytes > limit:
                message = f"All requests together hold {limit} bytes of bodies and media; try again."
                raise ApiError(503, message, code="overloaded", kind="server_error")
            self._hold(nbytes)

    def give(self, nbytes: int) -> None:
        """Hold `nbytes` less."""
        with self._budget.lock:
            self._hold(-nbytes)

    def end(self) -> None:
        """Release all bytes, and hold nothing from now on."""
        with self._budget.lock:
            self._has_ended = True
            self._hold(-self.held)

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self._budget.held += nbytes
