# SPDX-License-Identifier: Apache-2.0
"""How many bytes of clients the proxy holds at a time: bodies that arrive, and the media in them once decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from triton_omni.openai.http.errors import ApiError

HELD_BYTES = 1 << 30


class Budget:
    """What all requests may hold together. Threads may share it."""

    def __init__(self, most: int = HELD_BYTES) -> None:
        self.most = most
        self.held = 0
        self.lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What one request holds, for the `with` body."""
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
        """Hold so many bytes more. Raises ApiError: 413 if they could never be held, 503 if they cannot be now.

        After the end nothing is held: a thread that still decodes for a client that has gone drops what it makes.
        """
        most = self._budget.most
        with self._budget.lock:
            if self._has_ended:
                return
            if self.held + nbytes > most:
                raise ApiError(413, f"Body and decoded media may have {most} bytes together.", code="content_too_large")
            if nbytes > 0 and self._budget.held + nbytes > most:
                message = f"All requests together hold {most} bytes of bodies and media; try again."
                raise ApiError(503, message, code="overloaded", kind="server_error")
            self._hold(nbytes)

    def give(self, nbytes: int) -> None:
        """Hold so many bytes less."""
        with self._budget.lock:
            self._hold(-nbytes)

    def end(self) -> None:
        """Hold nothing from now on."""
        with self._budget.lock:
            self._has_ended = True
            self._hold(-self.held)

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self._budget.held += nbytes
