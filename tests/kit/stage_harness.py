# SPDX-License-Identifier: Apache-2.0
"""A stage's loop in this process between made-up callers, an orchestrator that listens and a worker: real links.

The worker is a real one with a toy engine, or a script of the test's. Nothing runs by itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kit.worker_harness import Clock, Side, chat
from triton_omni.backends.config.schema import StageDeploy
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub, Peer
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.errors import OmniError
from triton_omni.backends.core.generate import GenerateRequest, encode_request
from triton_omni.backends.core.responses import Response
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE
from triton_omni.backends.stub.stage_loop import StageCall, StageLoop
from triton_omni.backends.stub.worker_process import Command, WorkerProcess

PATIENCE_TURNS = 200


class SocketWorkerProcess(WorkerProcess):
    """Keeps a worker that is no process: `theirs` is the worker's end, a kill closes it."""

    def __init__(self, worker_address: Path) -> None:
        super().__init__(Command(Path("none"), ()))
        self.theirs: Hub | None = None
        self.kills = 0
        self.stopped = False
        self._address = worker_address

    def start(self, now_s: float) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = Hub("toy/tokens", self._address)
        self.stub = self.theirs.adopt(theirs)
        self.started_s, self.ready_s = now_s, None
        self.state = "starting" if self.restarts == 0 else "restarting"
        return ours

    def due(self, now_s: float) -> bool:
        return self.theirs is None and super().due(now_s)

    def is_stopped(self) -> bool:
        return self.stopped

    def kill(self) -> None:
        self.kills += 1
        self.stopped = False
        if self.theirs is not None:
            self.theirs.close()
            self.theirs = None


class Client:
    """A Triton request: what went out through it, in order. Triton takes a FINAL when the test says so."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.published = 0
        self.gone: Callable[[], None] | None = None
        self._closed: list[Callable[[], None]] = []

    def acknowledge(self) -> None:
        assert self.sent == [], "an acknowledgement is a first response"
        self.sent.append("ack")

    def publish(self) -> None:
        assert not self.over, "metrics beside no open call"
        self.published += 1

    def watch(self, gone: Callable[[], None]) -> None:
        self.gone = gone

    def send(
        self, response: Response, failed: Callable[[OmniError], None], sent: Callable[[], None] | None = None
    ) -> None:
        assert not self.over and sent is not None, "a response after FINAL"
        self.sent.append((response.event.output, response.event.index))
        sent()

    def end(self, last: Response | OmniError | None, sent: Callable[[], None] | None = None) -> None:
        assert not self.over, "two FINALs"
        self.sent.append(("FINAL", last))
        self._closed.append(sent or (lambda: None))

    def close(self) -> None:
        """FINAL has gone through Triton."""
        self._closed.pop()()

    @property
    def over(self) -> bool:
        return bool(self.sent) and isinstance(self.sent[-1], tuple) and self.sent[-1][0] == "FINAL"


class StageBench:
    """One stage's loop and its surroundings."""

    def __init__(self, folder: Path, workers: int = 1, **deploy: Any) -> None:
        self.clock = Clock()
        self.pool = [SocketWorkerProcess(folder / f"worker{number}.sock") for number in range(workers)]
        self.worker_process = self.pool[0]
        self.hub = Hub("toy/tokens")
        self.orchestrator = Side(Hub("toy/", folder / "orchestrator.sock"))
        self.loop = StageLoop(
            stage=PIPELINE.stage("tokens"),
            deploy=StageDeploy(**deploy),
            workers={f"0_0.{number}": process for number, process in enumerate(self.pool)},
            hub=self.hub,
            on_ping=lambda worker, ping: None,
            clock=self.clock,
        )
        self.from_worker: list[Any] = []
        self.loop.start()

    # --- what the worker does --------------------------------------------------------------------------------------
    @property
    def to_stub(self) -> Peer:
        return self.worker_process.stub

    def worker_is_ready(self, number: int = 0) -> None:
        self.pool[number].stub.send(msg.PingMessage("toy/tokens", "ready"))
        self.turn()
        assert self.pool[number].state == "ready"

    def worker_dies(self, number: int = 0) -> None:
        theirs, self.pool[number].theirs = self.pool[number].theirs, None
        assert theirs is not None
        theirs.close()

    def worker_reads(self, number: int = 0) -> list[Any]:
        """What came to a worker since the last time."""
        theirs = self.pool[number].theirs
        assert theirs is not None
        return [item for peer, item in theirs.poll(0) if peer is not None]

    # --- what everybody else does ----------------------------------------------------------------------------------
    def call(self, run: bytes | None = None, *tensors: Tensor, request: GenerateRequest | None = None, **more: Any):
        """A Triton request arrives; returns its client and its run."""
        run, client = run or os.urandom(16), Client()
        fields = {"reply": self.orchestrator.hub.address, "wanted": ("text",), "has_inputs": bool(tensors)} | more
        message = msg.OpenMessage(run, "req", encode_request(request or chat()), **fields)
        inputs = Chunk(run, msg.INPUTS_EDGE, tensors=tensors) if tensors else None
        self.loop.submit(StageCall(client, message, inputs))
        return client, run

    def turn(self, count: int = 3) -> None:
        for _ in range(count):
            self.loop.turn(0)
            self.orchestrator.read()

    def sent_to_orchestrator(self, run: bytes) -> list[Any]:
        """What the orchestrator received about a run."""
        return [item for item in self.orchestrator.got if getattr(item, "run", None) == run]

    def orchestrator_dies(self) -> None:
        self.orchestrator.hub.close()
        self.orchestrator.hub = Hub("unused")

    def close(self) -> None:
        for process in self.pool:
            process.kill()
        for hub in (self.hub, self.orchestrator.hub):
            hub.close()
