# SPDX-License-Identifier: Apache-2.0
"""A connector inside one process, for tests: the same contract, no sockets, payloads copied once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from backends.connectors.base import MESSAGE_BYTES, Credits, PeerLost
from backends.core.chunk import Chunk, Tensor


class InlineConnector:
    """One end; made in pairs by `inline_pair`."""

    def __init__(self, credits: Credits) -> None:
        self.credits = credits
        self.peer: InlineConnector = self
        self.closed = False
        self._arrived: deque[Chunk | bytes] = deque()

    def send(self, message: bytes) -> None:
        self._check()
        if len(message) > MESSAGE_BYTES:
            raise ValueError(f"a message may have {MESSAGE_BYTES} bytes, not {len(message)}")
        self.peer._arrived.append(bytes(message))

    def put(self, chunk: Chunk) -> bool:
        self._check()
        if not self.credits.free(chunk.run, chunk.edge):
            return False
        self.credits.take(chunk.run, chunk.edge)
        copied = tuple(Tensor(t.spec, memoryview(bytes(memoryview(t.data)))) for t in chunk.tensors)
        self.peer._arrived.append(replace(chunk, tensors=copied, meta=dict(chunk.meta), slot=self))
        return True

    def get(self) -> Chunk | bytes | None:
        if self._arrived:
            return self._arrived.popleft()
        self._check()
        return None

    def release(self, chunk: Chunk) -> None:
        sender: InlineConnector | None = chunk.slot
        if sender is None:
            return
        chunk.slot = None
        chunk.tensors = ()
        sender.credits.give(chunk.run, chunk.edge)

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.closed or self.peer.closed:
            raise PeerLost("the peer is gone")


def inline_pair(window: int = 8) -> tuple[InlineConnector, InlineConnector]:
    """Two connected ends."""
    a, b = InlineConnector(Credits(window)), InlineConnector(Credits(window))
    a.peer, b.peer = b, a
    return a, b
