# SPDX-License-Identifier: Apache-2.0
"""All a worker knows of one run, in one object: dropping it ends the run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from backends.control.hub import Peer
from backends.control.messages import Failed, Finished
from backends.core.chunk import Chunk, Tensor
from backends.core.engine import Run


@dataclass(eq=False, slots=True)
class Sink:
    """Where chunks of one run go: a consumer stage, or the client ("@name"). Waits when there is no credit."""

    peer: Peer
    edge: str
    index: int = 0
    closed: bool = False
    queue: deque[Chunk] = field(default_factory=deque[Chunk])

    def add(self, run: bytes, tensors: tuple[Tensor, ...], meta: dict[str, Any], last: bool) -> None:
        """Queue one chunk; nothing may follow a last one."""
        assert not self.closed, f"a chunk after the last one on edge {self.edge}"
        self.queue.append(Chunk(run, self.edge, self.index, last, tensors, meta))
        self.index += 1
        self.closed = last

    def pump(self) -> tuple[int, int]:
        """Send what there is credit for; returns (chunks, bytes) sent."""
        chunks = nbytes = 0
        while self.queue and self.peer.put(self.queue[0]):
            chunks += 1
            nbytes += self.queue.popleft().nbytes
        return chunks, nbytes


@dataclass(slots=True)
class Waiting:
    """A received chunk that the engine has not taken yet, and what the edge's adapter made of it."""

    peer: Peer
    chunk: Chunk
    inputs: Any
    last: bool


@dataclass(eq=False, slots=True)
class Record:
    """One run in this worker.

    reply     the orchestrator's link; the stub's for a direct call
    sources   upstream stage → its link, known from its first chunk on
    open      upstream stages that have not ended yet
    expected  upstream stage → index of its next chunk
    ended     set once: the run's end, told to the stub first and to `reply` when the stub released it
    """

    run: Run
    stub: Peer
    reply: Peer
    sinks: dict[str, Sink]
    open: set[str]
    stall_s: float
    heard_at: float
    inputs: tuple[Peer, Chunk] | None = None
    sources: dict[str, Peer] = field(default_factory=dict[str, Peer])
    expected: dict[str, int] = field(default_factory=dict[str, int])
    inbox: deque[Waiting] = field(default_factory=deque[Waiting])
    ended: Finished | Failed | None = None
    told: bool = False

    @property
    def direct(self) -> bool:
        """True for a call that came from a Triton client instead of an orchestrator."""
        return self.reply is self.stub

    def release_inputs(self) -> None:
        """Give back all received chunks that the run still holds."""
        while self.inbox:
            waiting = self.inbox.popleft()
            waiting.peer.release(waiting.chunk)
        if self.inputs is not None:
            peer, chunk = self.inputs
            self.inputs = None
            peer.release(chunk)
