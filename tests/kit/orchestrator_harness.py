# SPDX-License-Identifier: Apache-2.0
"""An orchestrator in this process with fake clients, a fake opener and scripted stages: real links, own clock.

The opener answers only when the test says so; a stage does only what the test tells it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.worker_harness import Clock
from triton_omni.backends.config.schema import OrchestratorDeploy
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub, Lost, Peer
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.errors import OmniError
from triton_omni.backends.core.generate import GenerateRequest, Message
from triton_omni.backends.core.outputs import OutputPiece
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.core.responses import PipelineStatus, Response
from triton_omni.backends.orchestrator.driver import Orchestrator
from triton_omni.backends.orchestrator.ports import OpenCall
from triton_omni.backends.orchestrator.request_state import Arrival
from triton_omni.backends.wire import Event, StageStatus, text_of


class Client:
    """A response stream: what a client saw. `reads` False keeps the responses in Triton, so to say."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._run = b""
        self.pieces: list[Response] = []
        self.ended: Response | None = None
        self.failed: OmniError | None = None
        self.reads = True
        self.published = 0
        self._unread: list[Callable[[], None]] = []

    @property
    def run(self) -> bytes:
        """The run of the call's request; it must be asked for while the request is not forgotten."""
        for state in self._orchestrator.requests.values():
            if state.arrival.responses is self:
                self._run = state.run
        return self._run

    def watch(self, gone: Callable[[], None]) -> None:
        self.gone = gone

    def acknowledge(self) -> None:
        raise AssertionError("only stages acknowledge")

    def send(
        self, response: Response, failed: Callable[[OmniError], None], sent: Callable[[], None] | None = None
    ) -> None:
        self.send_fails = failed
        assert not self.over, "a response after the end"
        self.pieces.append(response)
        if sent is not None:
            self._unread.append(sent)
            if self.reads:
                self.read()

    def publish(self) -> None:
        assert not self.over, "metrics beside no open request"
        self.published += 1

    def end(self, last: Response | OmniError | None, sent: Callable[[], None] | None = None) -> None:
        assert not self.over, "two ends"
        if isinstance(last, OmniError):
            self.failed = last
        else:
            assert last is not None, "an orchestrator's last response says how the request ended"
            self.ended = last

    def read(self) -> None:
        """Take what waits."""
        while self._unread:
            self._unread.pop(0)()

    @property
    def over(self) -> bool:
        return self.ended is not None or self.failed is not None

    @property
    def text(self) -> str:
        return "".join(text_of(p.event) or "" for p in self.pieces)

    @property
    def events(self) -> list[Event]:
        return [p.event for p in self.pieces]


class FakeOpener:
    """Collects open calls; the test answers them. Every handle must be closed once, or abandoned and
    perhaps closed later."""

    def __init__(self) -> None:
        self.calls: list[tuple[OpenCall, Callable[[Any], None], Callable[[OmniError], None]]] = []
        self.handles: list[str] = []
        self.closed: list[str] = []
        self.abandoned: list[str] = []
        self.stuck = False

    def open(self, call: OpenCall, opened: Callable[[Any], None], failed: Callable[[OmniError], None]) -> None:
        self.calls.append((call, opened, failed))

    def close(self, handle: Any) -> None:
        assert handle not in self.closed
        if handle in self.abandoned:
            self.abandoned.remove(handle)
        self.closed.append(handle)

    def abandon(self, handle: Any) -> None:
        assert handle not in self.closed + self.abandoned
        self.abandoned.append(handle)

    def check(self) -> None:
        assert sorted(self.closed + self.abandoned) == sorted(self.handles)


class ScriptedStage:
    """One worker of a stage. Says only what the test tells it to say."""

    def __init__(self, folder: Path, pipeline: Pipeline, stage: str, number: int = 0) -> None:
        self.stage = stage
        self.hub = Hub(f"{pipeline.name}/{stage}", folder / f"{stage}{number}.sock")
        self.link: Peer | None = None
        self.got: list[Any] = []
        self.sent = 0

    def reply(self, address: str, message: Any) -> None:
        self.link = self.hub.connect(address)
        assert self.link.send(message)

    def put(self, run: bytes, index: int, piece: OutputPiece, *tensors: Tensor) -> None:
        assert self.link is not None
        assert self.link.put(Chunk(run, f"@{piece.kind}", index, False, tensors, piece))

    def read(self) -> None:
        self.got += [item for peer, item in self.hub.poll(0) if peer is not None]

    @property
    def unreleased(self) -> int:
        return self.link.connector.in_flight if self.link is not None and not self.link.lost else 0

    @property
    def stops(self) -> list[bytes]:
        return [item.run for item in self.got if isinstance(item, msg.StopMessage)]


class Scene:
    """The orchestrator and everything around it."""

    def __init__(self, folder: Path, pipeline: Pipeline, deploy: OrchestratorDeploy) -> None:
        self.folder = folder
        self.pipeline = pipeline
        self.clock = Clock()
        self.opener = FakeOpener()
        self.states = {stage.name: StageStatus(state="ready") for stage in pipeline.stages}
        self.hub = Hub(f"{pipeline.name}/", folder / "orchestrator.sock")
        self.orchestrator = Orchestrator(
            pipeline=pipeline,
            deploy=deploy,
            hub=self.hub,
            opener=self.opener,
            stage_states=lambda: self.states,
            clock=self.clock,
        )
        self.stages = {s.name: ScriptedStage(folder, pipeline, s.name) for s in pipeline.stages}

    def ask(
        self, request: GenerateRequest | None = None, request_id: str = "req", is_operator: bool = True, **media: int
    ) -> Client:
        client = Client(self.orchestrator)
        tensors = {name: Tensor.of(name, np.zeros(count, np.uint8)) for name, count in media.items()}
        self.orchestrator.submit(
            Arrival(
                responses=client,
                request_id=request_id,
                request=request or chat(),
                media=tensors,
                is_operator=is_operator,
            )
        )
        self.turn()
        _ = client.run
        return client

    def health(self) -> PipelineStatus:
        ended = self.ask(GenerateRequest(operation="health")).ended
        assert ended is not None and ended.event.status is not None
        return ended.event.status

    def turn(self, count: int = 2) -> None:
        for _ in range(count):
            self.orchestrator.turn(0)
            for stage in self.stages.values():
                stage.read()

    def until(self, true: Callable[[], object]) -> None:
        for _ in range(1_000):
            if true():
                return
            self.turn(1)
        raise AssertionError("it never happened")

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.turn()

    def take_call(self) -> tuple[msg.OpenMessage, Callable[[Any], None], Callable[[OmniError], None]]:
        """An open call of the request whose calls came first: that of its last consumer."""
        self.until(lambda: self.opener.calls)
        messages = [msg.decode(call.message) for call, _, _ in self.opener.calls]
        opens = [message for message in messages if isinstance(message, msg.OpenMessage)]
        found = max(i for i, message in enumerate(opens) if message.run == opens[0].run)
        _, opened, failed = self.opener.calls.pop(found)
        return opens[found], opened, failed

    def answer(self, opened: Callable[[Any], None]) -> str:
        """BLS answers an open call."""
        handle = f"handle{len(self.opener.handles)}"
        self.opener.handles.append(handle)
        opened(handle)
        self.turn()
        return handle

    def accept(self, opener_answers: bool = True) -> msg.OpenMessage:
        """The next stage takes its run."""
        message, opened, _ = self.take_call()
        stage = self.stage_of(message)
        stage.reply(message.reply, msg.AcceptedMessage(message.run, stage.hub.address))
        self.turn()
        if opener_answers:
            self.answer(opened)
        return message

    def stage_of(self, message: msg.OpenMessage) -> ScriptedStage:
        outputs = {o.name: o.stage for o in self.pipeline.outputs}
        for edge in self.pipeline.edges:
            if edge.target in message.consumers:
                return self.stages[edge.source]
        return self.stages[outputs[message.wanted[0]]] if message.wanted else next(iter(self.stages.values()))

    def finish(self, stage: str, run: bytes, reason: str = "stop", **usage: float) -> None:
        link = self.stages[stage].link
        assert link is not None
        link.send(msg.FinishedMessage(run, reason, usage))
        self.turn()

    def fail(self, stage: str, run: bytes, error: OmniError, worker_died: bool = False) -> None:
        link = self.stages[stage].link
        assert link is not None
        link.send(msg.FailedMessage(run, msg.ErrorInfo.of(error, stage), worker_died=worker_died))
        self.turn()

    def kill(self, stage: str) -> None:
        self.stages.pop(stage).hub.close()
        self.turn()

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        self.until(lambda: not any(s.unreleased for s in self.stages.values()))
        assert self.orchestrator.requests == {}
        assert not self.orchestrator.admission.live
        assert self.orchestrator.admission.queued == 0
        self.opener.check()

    def close(self) -> None:
        self.hub.close()
        for stage in self.stages.values():
            stage.hub.close()


def chat(*modalities: str, **more: Any) -> GenerateRequest:
    return GenerateRequest(messages=(Message("user", "hi"),), modalities=modalities, **more)


def audio_tensor(samples: int, value: float) -> Tensor:
    return Tensor.of("audio", np.full(samples, value, np.float32))


@contextlib.contextmanager
def scene(folder: Path, pipeline: Pipeline, **limits: Any) -> Iterator[Scene]:
    made = Scene(folder, pipeline, OrchestratorDeploy(**limits))
    try:
        yield made
    finally:
        made.close()


__all__ = ["Client", "Lost", "Scene", "ScriptedStage", "audio_tensor", "chat", "scene"]
