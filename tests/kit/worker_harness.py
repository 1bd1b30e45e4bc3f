# SPDX-License-Identifier: Apache-2.0
"""A worker in this process with a stub, an orchestrator and other stages around it: real sockets, own clock.

Nothing runs by itself: `turn` runs the worker once and lets everybody else read what it sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub, Lost, Peer
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling, encode_request
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.worker.loop import Worker

PATIENCE_TURNS = 2_000
ACCEPTED_TURNS = 2  # until the orchestrator has taken the worker's connection and read that a run is accepted


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Side:
    """A process beside the worker: everything it got from the worker, and whether it gives chunks back."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.got: list[Any] = []
        self.held: list[tuple[Peer, Chunk]] = []
        self.keeps_chunks = False
        self.texts: list[str] = []
        self.payloads: list[bytes] = []
        self.links: dict[bytes, Peer] = {}

    def read(self) -> None:
        for peer, item in self.hub.poll(0):
            if peer is None:
                continue
            if isinstance(item, msg.PingMessage):
                continue
            self.got.append(item)
            if isinstance(item, msg.AcceptedMessage):
                self.links[item.run] = peer
            if isinstance(item, Chunk):
                self.payloads.append(b"".join(bytes(t.data) for t in item.tensors))
                if isinstance(item.piece, TextPiece) and item.piece.text:
                    self.texts.append(item.piece.text)
                if self.keeps_chunks:
                    self.held.append((peer, item))
                else:
                    peer.release(item)

    def give_back(self) -> None:
        while self.held:
            peer, chunk = self.held.pop(0)
            peer.release(chunk)

    def kinds(self) -> list[str]:
        return [type(item).__name__ for item in self.got]

    def of(self, kind: type) -> list[Any]:
        return [item for item in self.got if isinstance(item, kind)]


class Bench:
    """One worker and its surroundings."""

    def __init__(self, folder: Path, pipeline: Pipeline, stage: str, engine: Engine) -> None:
        self.folder = folder
        self.clock = Clock()
        self.hub = Hub(f"{pipeline.name}/{stage}", folder / "worker.sock")
        self.worker = Worker(pipeline, stage, engine, self.hub, self.clock)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stub = Side(Hub("stub"))
        self.to_worker = self.stub.hub.adopt(ours)
        self.worker.stub = self.hub.adopt(theirs)
        self.sides: dict[str, Side] = {"stub": self.stub}
        self.orchestrator = self.side("orchestrator")
        self.upstream: dict[str, Peer] = {}

    def side(self, name: str) -> Side:
        """Another process that listens."""
        self.sides[name] = Side(Hub(name, self.folder / f"{name}.sock"))
        return self.sides[name]

    def kill(self, name: str) -> None:
        """A process goes away."""
        self.sides.pop(name).hub.close()

    def producer(self, name: str) -> Peer:
        """A producer's link to the worker, made on first use."""
        if name not in self.upstream:
            self.upstream[name] = self.side(name).hub.connect(self.hub.address)
        return self.upstream[name]

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.worker.turn(0)
            for side in list(self.sides.values()):
                side.read()

    def until(self, true: Any) -> None:
        """Turn until `true()`; the loop needs a bounded number of turns for everything."""
        for _ in range(PATIENCE_TURNS):
            if true():
                return
            self.turn()
        seen = {name: side.kinds()[-5:] for name, side in self.sides.items()}
        raise AssertionError(f"it never happened; last seen: {seen}")

    def open(self, run: bytes | None = None, **more: Any) -> bytes:
        """Send an Open as the stub would; returns the run's id.

        consumers  consumer → address: the orchestrator connects them when the run has been accepted
        late       further consumers, for `connect`
        """
        run = run or os.urandom(16)
        fields: dict[str, Any] = {"reply": self.orchestrator.hub.address} | more
        request = fields.pop("request", None) or chat()
        addresses = fields.pop("consumers", {})
        fields["consumers"] = (*addresses, *fields.pop("late", ()))
        self.to_worker.send(msg.OpenMessage(run, "req", encode_request(request), **fields))
        if addresses:
            self.turn(ACCEPTED_TURNS)
            for consumer, address in addresses.items():
                self.connect(run, consumer, address)
        return run

    def connect(self, run: bytes, consumer: str, address: str) -> None:
        """Tell the worker which instance of a consumer has accepted, as the orchestrator would."""
        self.orchestrator.links[run].send(msg.ConnectMessage(run, consumer, address))

    def stop(self, run: bytes) -> None:
        self.to_worker.send(msg.StopMessage(run))

    def release(self, run: bytes) -> None:
        self.to_worker.send(msg.ReleaseMessage(run))

    def close(self) -> None:
        self.hub.close()
        for side in self.sides.values():
            side.hub.close()


def chat(tokens: int = 3, /, **stages: dict[str, Any]) -> GenerateRequest:
    """A request for so many tokens, with options for single stages."""
    return GenerateRequest(messages=(Message("user", "a b c"),), sampling=Sampling(max_tokens=tokens), stages=stages)


@contextlib.contextmanager
def bench(folder: Path, pipeline: Pipeline, stage: str, engine: Engine) -> Iterator[Bench]:
    made = Bench(folder, pipeline, stage, engine)
    try:
        yield made
    finally:
        made.close()


def chunk(run: bytes, edge: str, index: int, last: bool = False, *tensors: Tensor, token: int | None = None) -> Chunk:
    piece = None if token is None else TextPiece(token_ids=(token,))
    return Chunk(run, edge, index, last, tensors, piece)


__all__ = ["Bench", "Clock", "Lost", "Side", "bench", "chat", "chunk"]
