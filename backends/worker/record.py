# SPDX-License-Identifier: Apache-2.0
"""All a worker knows of one run, in one object: dropping it ends the run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from triton_omni.backends.connectors.base import WINDOW_CHUNKS
from triton_omni.backends.control.hub import Peer
from triton_omni.backends.control.messages import FailedMessage, FinishedMessage, RunStats, Transfer
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.outputs import OutputPiece


@dataclass(eq=False, slots=True)
class Sink:
    """Where chunks of one run go: a consumer stage, or the client ("@name"). Waits when there is no credit.

    peer      None until the consumer's instance is known
    feeds     takes what the stage sends: a consumer stage, or the stub of a direct call
    optional  the run goes on if this consumer is lost
    """

    peer: Peer | None
    edge: str
    feeds: bool
    optional: bool = False
    index: int = 0
    closed: bool = False
    queue: deque[Chunk] = field(default_factory=deque[Chunk])

    def add(self, run: bytes, tensors: tuple[Tensor, ...], piece: OutputPiece | None, last: bool) -> None:
        """Queue one chunk; nothing may follow a last one."""
        assert not self.closed, f"a chunk after the last one on edge {self.edge}"
        self.queue.append(Chunk(run, self.edge, self.index, last, tensors, piece))
        self.index += 1
        self.closed = last

    @property
    def is_full(self) -> bool:
        """True if the run should pause: its consumer takes no more, or is not known yet and has enough waiting."""
        return len(self.queue) >= (1 if self.peer is not None else WINDOW_CHUNKS)

    def pump(self, now_s: float) -> None:
        """Send what there is credit for."""
        while self.queue and self.peer is not None:
            chunk = self.queue[0]
            chunk.sent_s = now_s
            if not self.peer.put(chunk):
                return
            self.queue.popleft()


@dataclass(eq=False, slots=True)
class Source:
    """An upstream stage of one run: its link, known from its first chunk on, and what it has delivered."""

    peer: Peer | None = None
    is_open: bool = True
    edge_stats: Transfer = field(default_factory=Transfer)


@dataclass(slots=True)
class Waiting:
    """A received chunk that the engine has not taken yet, and what the edge's adapter made of it."""

    source: Source
    peer: Peer
    chunk: Chunk
    inputs: object
    arrived_s: float


@dataclass(eq=False, slots=True)
class Record:
    """One run in this worker.

    reply     the orchestrator's link; the stub's for a direct call
    sinks     consumer stage or "@output" → where its chunks go
    sources   by upstream stage
    first_at  when the engine's first chunk or output came
    ended     set once: the run's end; sent to the stub first (`end_sent`), and to `reply` when the stub has released it
    """

    run: Run
    stub: Peer
    reply: Peer
    sinks: dict[str, Sink]
    sources: dict[str, Source]
    stall_s: float
    opened_at: float
    active_at: float = 0.0
    inbox: deque[Waiting] = field(default_factory=deque[Waiting])
    first_at: float | None = None
    ended: FinishedMessage | FailedMessage | None = None
    end_sent: bool = False

    @property
    def direct(self) -> bool:
        """True for a call that came from a Triton client instead of an orchestrator."""
        return self.reply is self.stub

    @property
    def open(self) -> list[str]:
        """Upstream stages that have not ended yet."""
        return [stage for stage, source in self.sources.items() if source.is_open]

    def stats(self, outcome: str, now_s: float) -> RunStats:
        """The run in numbers, at its end."""
        first_s = None if self.first_at is None else self.first_at - self.opened_at
        edges = {stage: source.edge_stats for stage, source in self.sources.items() if source.edge_stats.chunks}
        return RunStats(outcome, now_s - self.opened_at, first_s, edges)

    def release_inputs(self) -> None:
        """Give back all received chunks that the run still holds."""
        while self.inbox:
            waiting = self.inbox.popleft()
            waiting.peer.release(waiting.chunk)
