# SPDX-License-Identifier: Apache-2.0
"""The toy pipeline without Triton: a real orchestrator and real stubs' loops in threads, workers as processes.

A stage's worker is started by its stub, or by its stub's command: here, in another network namespace, or
on this host as if it were another (a host token of its own), so that all links are TCP.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.kit.budgets import within
from triton_omni.backends.config import paths
from triton_omni.backends.config.schema import OrchestratorDeploy, PlaceDeploy, StageDeploy
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.address import TOKEN_VARIABLE
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.control.link_settings import LinkSettings
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import OmniError
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.responses import Response, StageStatus
from triton_omni.backends.orchestrator.driver import Orchestrator
from triton_omni.backends.orchestrator.ports import OpenCall
from triton_omni.backends.orchestrator.request_state import Arrival
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE
from triton_omni.backends.stub.external_worker import ExternalWorker, external_command
from triton_omni.backends.stub.placed_worker import PlacedWorker, Placer
from triton_omni.backends.stub.stage_loop import PoolWorker, StageCall, StageLoop
from triton_omni.backends.stub.worker_process import Command, WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
STAGES = tuple(stage.name for stage in PIPELINE.stages)
READY_S = 60.0
OUTCOME_S = 60.0


class ToyCall:
    """A client's call: what it got, in order, and its end."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, bytes, tuple[bytes, ...]]] = []
        """(output, the piece as JSON, tensors)."""
        self.ends: list[Response | OmniError | None] = []
        self.over = threading.Event()
        self.first = threading.Event()
        self.gone: Callable[[], None] = lambda: None

    def watch(self, gone: Callable[[], None]) -> None:
        self.gone = gone

    def acknowledge(self) -> None:
        raise AssertionError("only stages acknowledge")

    def publish(self) -> None:
        """There are no metrics."""

    def send(
        self, response: Response, failed: Callable[[OmniError], None], sent: Callable[[], None] | None = None
    ) -> None:
        event = response.event
        if event.output:
            tensors = tuple(bytes(tensor.data) for tensor in response.tensors)
            self.pieces.append((event.output, msgspec.json.encode(event.piece), tensors))
            self.first.set()
        if sent is not None:
            sent()

    def end(self, last: Response | OmniError | None, sent: Callable[[], None] | None = None) -> None:
        self.ends.append(last)
        self.over.set()
        if sent is not None:
            sent()

    def outcome(self) -> Response | OmniError:
        """The one end, once it is there."""
        assert self.over.wait(within(OUTCOME_S)), f"no end; {len(self.pieces)} pieces came"
        [end] = self.ends
        assert end is not None
        return end

    def of(self, output: str) -> list[tuple[bytes, tuple[bytes, ...]]]:
        return [(piece, tensors) for name, piece, tensors in self.pieces if name == output]


class _StageStream:
    """Triton's side of a stage's call that an orchestrator opened."""

    def __init__(self, opened: Callable[[object], None], failed: Callable[[OmniError], None]) -> None:
        self._opened, self._failed, self._acknowledged = opened, failed, False

    def watch(self, gone: Callable[[], None]) -> None:
        """The client of this call is the orchestrator."""

    def publish(self) -> None:
        """There are no metrics."""

    def acknowledge(self) -> None:
        self._acknowledged = True
        self._opened(self)

    def send(self, response: Response, failed: Any, sent: Any = None) -> None:
        raise AssertionError("outputs travel over links")

    def end(self, last: Response | OmniError | None, sent: Callable[[], None] | None = None) -> None:
        if not self._acknowledged:
            assert isinstance(last, OmniError)
            self._failed(last)
        if sent is not None:
            sent()


class _Opener:
    """Opens runs as BLS does, one at a time, in a thread of its own."""

    stuck = False

    def __init__(self, stubs: Mapping[str, StubThread]) -> None:
        self._stubs = stubs
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def open(self, call: OpenCall, opened: Callable[[object], None], failed: Callable[[OmniError], None]) -> None:
        message = msg.decode(call.message)
        assert isinstance(message, msg.OpenMessage)
        inputs = Chunk(message.run, msg.INPUTS_EDGE, tensors=tuple(call.inputs.values())) if call.inputs else None
        stub = self._stubs[call.model.removeprefix(f"{PIPELINE.name}_")]
        self._jobs.put(lambda: stub.loop.submit(StageCall(_StageStream(opened, failed), message, inputs)))

    def close(self, handle: object) -> None:
        """Nothing is held."""

    abandon = close

    def stop(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class StubThread:
    """A stage's stub: its loop in a thread."""

    def __init__(
        self,
        stage: str,
        folder: Path,
        links: LinkSettings | None,
        placed: bool,
        placer: Sequence[str],
        demand: Mapping[str, Any],
        **deploy: Any,
    ) -> None:
        self.hub = Hub(f"{PIPELINE.name}/{stage}", links=links if placed else None, joinable=True)
        arguments = ["--pipeline", PIPELINE.name, "--stage", stage, "--models-dir", str(folder)]
        environment = {"OMP_NUM_THREADS": "1"}
        self.command = ""
        if placed:
            assert links is not None
            self.command = external_command(self.hub.address, links, arguments, environment)
            count = deploy.get("instances", 1)
            workers: dict[str, ExternalWorker | WorkerProcess] = {}
            argv = [str(paths.engine_python()), "-m", "triton_omni.backends.worker", "--stub", self.hub.address]
            ray = Placer(self.hub, placer) if placer else None
            for n in range(count):
                if ray is None:
                    workers[str(n)] = ExternalWorker(self.hub, self.command)
                else:
                    own = {**environment, **links.environment(), TOKEN_VARIABLE: f"host {n}"}
                    place = PlaceDeploy("ray", **demand)
                    label = f"{os.getpid()}-{id(self)}/{stage}/{n}"
                    workers[str(n)] = PlacedWorker(self.hub, ray, label, [*argv, *arguments], own, place)
            self.worker = workers["0"]
        else:
            if links is not None:
                arguments += links.arguments()
                environment |= links.environment()
            arguments = ["--address", str(folder / f"{stage}.sock"), *arguments]
            self.worker = WorkerProcess(Command(paths.engine_python(), arguments, environment))
            workers = {"0": self.worker}
        self.ready = threading.Event()
        self.lost = threading.Event()
        self.live = 0
        self.loop = StageLoop(
            stage=PIPELINE.stage(stage), deploy=StageDeploy(**deploy), workers=workers, hub=self.hub,
            on_ping=self._note,
        )  # fmt: skip
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where the worker listens; "" while there is none."""
        peer = self.loop.workers[0].peer
        return peer.listens_at if peer is not None else ""

    def _note(self, worker: PoolWorker, ping: msg.PingMessage) -> None:
        self.live = ping.live
        (self.ready.set if ping.state == "ready" else self.ready.clear)()
        if not ping.state:
            self.lost.set()

    def _run(self) -> None:
        self.loop.start()
        while not self._closing:
            self.loop.turn()

    def close(self) -> None:
        self._closing = True
        self.hub.wake()
        self._thread.join(10)
        self.worker.stop()
        self.hub.close()


class ToyHosts:
    """A pipeline whose stages are up; `placed` are those whose workers join."""

    def __init__(self, folder: Path, links: LinkSettings | None, placed: Sequence[str], **deploy: Any) -> None:
        placer: Sequence[str] = deploy.pop("placer", ())
        demand: Mapping[str, Any] = deploy.pop("demand", {})
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.scratch = tempfile.mkdtemp(prefix="omni-hosts-")  # TMPDIR of workers that join: paths of sockets are short
        self.stubs = {
            stage: StubThread(stage, folder, links, stage in placed, placer, demand, **deploy) for stage in STAGES
        }
        self._opener = _Opener(self.stubs)
        self.hub = Hub(f"{PIPELINE.name}/", folder / "orchestrator.sock", links=links)
        self.orchestrator = Orchestrator(
            pipeline=PIPELINE, hub=self.hub, opener=self._opener, stage_states=self._states,
            deploy=OrchestratorDeploy(
                max_live=64, max_queue=4096, queue_s=600.0,
                workers={stage: int(deploy["instances"]) for stage in placed if deploy.get("instances", 1) > 1},
            ),
        )  # fmt: skip
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(
        self, stage: str, prefix: Sequence[str] = (), token: str = "", wait_s: float = READY_S
    ) -> subprocess.Popen[bytes]:
        """Start a stage's worker by its stub's command, behind `prefix`; waits until it is ready."""
        stub = self.stubs[stage]
        stub.lost.clear()
        words = [sys.executable if word == "python" else word for word in shlex.split(stub.command)]
        environment = os.environ | {"TMPDIR": self.scratch} | ({TOKEN_VARIABLE: token} if token else {})
        self.workers[stage] = subprocess.Popen([*prefix, *words], env=environment, cwd=ROOT)
        self.wait_ready(stage, wait_s)
        return self.workers[stage]

    def wait_ready(self, stage: str, wait_s: float = READY_S) -> None:
        assert self.stubs[stage].ready.wait(within(wait_s)), f"the worker of {stage} is not ready"

    def call(self, request: GenerateRequest, request_id: str = "r") -> ToyCall:
        client = ToyCall()
        self.orchestrator.submit(Arrival(responses=client, request_id=request_id, request=request, media={}))
        return client

    @property
    def live(self) -> int:
        """Requests and runs that are not over."""
        return len(self.orchestrator.requests) + sum(stub.live for stub in self.stubs.values())

    def _states(self) -> dict[str, StageStatus]:
        return {
            stage: StageStatus(state=stub.loop.state, instances=1, ready=int(stub.loop.state == "ready"))
            for stage, stub in self.stubs.items()
        }

    def _run(self) -> None:
        while not self._closing:
            self.orchestrator.turn()

    def close(self) -> None:
        self._closing = True
        self.hub.wake()
        self._thread.join(10)
        self._opener.stop()
        for stub in self.stubs.values():
            stub.close()
        self.hub.close()
        for worker in self.workers.values():
            worker.kill()
            worker.wait(10)
        shutil.rmtree(self.scratch)


@contextlib.contextmanager
def toy_hosts(
    folder: Path, links: LinkSettings | None = None, placed: Sequence[str] = (), **deploy: Any
) -> Iterator[ToyHosts]:
    """A pipeline whose own workers are ready; those that are `placed` are to be joined."""
    hosts = ToyHosts(folder, links, placed, **deploy)
    try:
        for stage in STAGES:
            if stage not in placed:
                hosts.wait_ready(stage)
        yield hosts
    finally:
        hosts.close()
