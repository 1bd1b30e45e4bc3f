# SPDX-License-Identifier: Apache-2.0
"""`python -m perf.request_path`: files whose functions one text chat executes, from HTTP to the first engine step.

The proxy, the orchestrator's stub, the stage's stub and its worker run in threads of this process. Triton's Python API
is replaced by objects that hand over what it would carry. Engine and pipeline files are those of `toy`.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import types
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("client", "backends")


class Recorder:
    """Files of the product whose functions are called while `on` is set, in the order of their first call."""

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, None] = {}
        sys.setprofile(self._call)
        threading.setprofile(self._call)

    def _call(self, frame: types.FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if self.on and event == "call" and name.startswith(tuple(f"{ROOT / part}/" for part in PARTS)):
            self.files.setdefault(name.removeprefix(f"{ROOT}/"))


def fake_triton(execute: Callable[[str, list[Any]], None]) -> None:
    """Install a module in place of Triton's Python API; `execute` runs a model of this process."""
    pb: Any = types.ModuleType("triton_python_backend_utils")
    pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    pb.Tensor = FakeTensor
    pb.TritonModelException = RuntimeError
    pb.TritonError = types.SimpleNamespace
    pb.InferenceResponse = lambda outputs=(), error=None: types.SimpleNamespace(has_error=lambda: False)
    pb.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    pb.Logger = types.SimpleNamespace(**dict.fromkeys(("log_info", "log_warn", "log_error", "log_verbose"), print))
    metric = types.SimpleNamespace(increment=lambda value: None, set=lambda value: None, value=lambda: 0.0)
    pb.MetricFamily = type(
        "MetricFamily", (), {"COUNTER": 0, "GAUGE": 0, "HISTOGRAM": 0, "__init__": lambda self, **_: None,
                             "Metric": lambda self, **_: metric}
    )  # fmt: skip

    class InferenceRequest:
        def __init__(self, *, model_name: str, inputs: list[FakeTensor], **_: Any) -> None:
            self.call = FakeRequest({tensor.name(): tensor for tensor in inputs})
            self.model = model_name

        def exec(self, decoupled: bool) -> Any:
            execute(self.model, [self.call])
            return iter(self.call.first, None)

    pb.InferenceRequest = InferenceRequest
    sys.modules["triton_python_backend_utils"] = pb


class FakeTensor:
    """A tensor of Triton's Python API."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class FakeRequest:
    """A request and its response sender."""

    def __init__(self, inputs: dict[str, FakeTensor]) -> None:
        self.inputs = inputs
        self._responses: list[Any] = []
        self._sent = threading.Condition()

    def get_response_sender(self) -> FakeRequest:
        return self

    def request_id(self) -> str:
        return "request"

    def parameters(self) -> str:
        return ""

    def is_cancelled(self) -> bool:
        return False

    def send(self, response: Any = None, flags: int = 0) -> None:
        with self._sent:
            self._responses.append(response)
            self._sent.notify_all()

    def first(self) -> Any:
        with self._sent:
            self._sent.wait_for(lambda: self._responses, 20)
        return self._responses[0]


def model_arguments(name: str, parameters: dict[str, str]) -> dict[str, str]:
    """What Triton gives a model's `initialize`."""
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {
        "model_config": json.dumps(config), "model_name": name, "model_instance_name": f"{name}_0",
        "model_instance_kind": "CPU", "model_instance_device_id": "0",
    }  # fmt: skip


def server_path(recorder: Recorder) -> None:
    """Run one chat through orchestrator, stub and worker up to the first step of the engine."""
    models: dict[str, Any] = {}
    fake_triton(lambda model, requests: models[model].execute(requests))
    from triton_omni.backends.config.schema import OrchestratorDeploy, StageDeploy, to_parameters
    from triton_omni.backends.control.hub import Hub
    from triton_omni.backends.core.pipeline import EngineContext
    from triton_omni.backends.pipelines.toy.engines import ToyEngine
    from triton_omni.backends.pipelines.toy.pipeline import PIPELINE
    from triton_omni.backends.stub.worker_process import WorkerProcess
    from triton_omni.backends.triton import orchestrator, stage, tensors
    from triton_omni.backends.worker.loop import Worker

    stepped = threading.Event()
    step = ToyEngine.step

    def first_step(engine: ToyEngine) -> Any:
        recorder.on = False
        stepped.set()
        return step(engine)

    ToyEngine.step = first_step  # type: ignore[method-assign]
    tensors.self_check = lambda: None

    class ThreadedWorker(WorkerProcess):
        """The worker in a thread of this process."""

        def start(self, now_s: float) -> socket.socket:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            address = Path(tempfile.mkdtemp()) / "worker.sock"
            hub = Hub("toy/tokens", address)
            stub = hub.adopt(theirs)
            engine = PIPELINE.stage("tokens").engine(EngineContext("toy", "tokens", {}))
            worker = Worker(PIPELINE, "tokens", engine, hub)
            stub.send(stage.msg.PingMessage("toy/tokens", "ready"))
            self.started_s, self.state = now_s, "starting"
            threading.Thread(target=worker.run_forever, args=(stub,), daemon=True).start()
            return ours

        def is_stopped(self) -> bool:
            return False

    stage.WorkerProcess = ThreadedWorker  # type: ignore[misc]
    models["toy_tokens"], models["toy"] = stage.TritonPythonModel(), orchestrator.TritonPythonModel()
    own = {"pipeline": "toy", "stage": "tokens"} | to_parameters(StageDeploy())
    models["toy_tokens"].initialize(model_arguments("toy_tokens", own))
    models["toy"].initialize(model_arguments("toy", {"pipeline": "toy"} | to_parameters(OrchestratorDeploy())))
    chat = json.dumps({"messages": [{"role": "user", "content": "hello"}], "modalities": ["text"]})
    recorder.on = True
    request: Any = FakeRequest({"request": FakeTensor("request", np.array([chat.encode()], np.object_))})
    models["toy"].execute([request])
    assert stepped.wait(20), "the engine never stepped"


def proxy_path(recorder: Recorder) -> None:
    """Send one chat through the proxy and the client up to gRPC."""
    import httpx

    from tests.kit.fake_backend import FakeBackend
    from tests.kit.proxy_server import running_proxy
    from triton_omni.backends.wire import GenerateRequest, OmniError
    from triton_omni.connection import AsyncClient
    from triton_omni.pieces import Piece

    class ToGrpc(FakeBackend):
        async def generate(
            self, pipeline: str, request: GenerateRequest, **options: Any
        ) -> AsyncGenerator[Piece, None]:
            try:
                async for _ in AsyncClient("127.0.0.1:9").generate(pipeline, request, **options):
                    pass
            except OmniError:
                recorder.on = False
            async for piece in super().generate(pipeline, request, **options):
                yield piece

    with running_proxy(ToGrpc()) as proxy:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        httpx.post(f"{proxy.root}/v1/chat/completions", json=body, timeout=30)  # what the first request sets up
        recorder.files.clear()
        recorder.on = True
        httpx.post(f"{proxy.root}/v1/chat/completions", json=body, timeout=30)
        recorder.on = False


def main() -> int:
    recorder = Recorder()
    proxy_path(recorder)
    proxy = len(recorder.files)
    server_path(recorder)
    for name in recorder.files:
        sys.stdout.write(f"{len((ROOT / name).read_text().splitlines()):5} {name}\n")
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in recorder.files)
    sys.stdout.write(f"{len(recorder.files)} files ({proxy} of them to gRPC), {lines} lines\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    import os

    status = main()
    os._exit(status)  # the threads of stubs and worker serve until the process ends
