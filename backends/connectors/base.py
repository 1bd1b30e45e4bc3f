# SPDX-License-Identifier: Apache-2.0
"""The interface of all carriers of chunks between two processes, and their credits.

A connector is one end of a duplex, ordered pipe to one peer. Chunks need a credit, messages do not:

    put(chunk)      False: no credit or no room now; offer the same chunk again after an acknowledgement
    send(message)   small control bytes, in order with the chunks
    get()           next item from the peer (Chunk or bytes) or None; a Chunk must be released exactly once
    release(chunk)  the consumer no longer touches the chunk's bytes; gives the credit back
    close()         both ends see it

No method blocks. When the peer is gone, `get` first returns what had arrived and then raises PeerLost, as do `put`
and `send`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from triton_omni.backends.core.chunk import Chunk

WINDOW_CHUNKS = 8  # per run and edge: hides one round trip; small, so that a slow reader soon stops its producer
LINK_CHUNKS = 4096  # per link: bounds descriptors in flight, for any number of runs
INLINE_BYTES = 8192  # payloads up to this travel inside the packet: cheaper than a slab slot (transport.md §3)
PACKET_BYTES = 128 << 10  # cap of one packet: safely below a socket buffer of default size (net.core.wmem_max)
MESSAGE_BYTES = 16 << 20  # cap of one message; larger data belongs in chunks


class PeerLost(ConnectionError):
    """The process at the other end is gone, or the connection was closed."""


class Connector(Protocol):
    """One end of a pipe to a peer; tests/kit/connector_contract.py is the contract in code."""

    def put(self, chunk: Chunk) -> bool: ...
    def send(self, message: bytes) -> None: ...
    def get(self) -> Chunk | bytes | None: ...
    def release(self, chunk: Chunk) -> None: ...
    def close(self) -> None: ...


@dataclass
class Credits:
    """Unacknowledged chunks: at most `window` per run and edge and `limit` in all."""

    window: int = WINDOW_CHUNKS
    limit: int = LINK_CHUNKS
    total: int = 0
    used: dict[tuple[bytes, str], int] = field(default_factory=dict[tuple[bytes, str], int])

    def free(self, key: tuple[bytes, str]) -> bool:
        """True if one more chunk of this run and edge may go out."""
        return self.total < self.limit and self.used.get(key, 0) < self.window

    def take(self, key: tuple[bytes, str]) -> None:
        self.total += 1
        self.used[key] = self.used.get(key, 0) + 1

    def give(self, key: tuple[bytes, str]) -> None:
        self.total -= 1
        left = self.used[key] - 1
        if left:
            self.used[key] = left
        else:
            del self.used[key]
