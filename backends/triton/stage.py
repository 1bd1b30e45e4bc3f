# SPDX-License-Identifier: Apache-2.0
"""A stage model: translates between Triton's words and those of the loop that keeps the engine worker.

Called by an orchestrator (input `open`): answers at once with an empty response and keeps the response sender open
until the run has ended. Called directly: outputs come back as decoupled responses.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb

from triton_omni.backends import wire
from triton_omni.backends.config import paths
from triton_omni.backends.config.schema import StageDeploy, from_parameters
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import BadRequest, Internal, OmniError
from triton_omni.backends.core.ids import new_request_id, new_run_id
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines import load
from triton_omni.backends.stub import placement
from triton_omni.backends.stub.heartbeat import InstanceHeartbeat
from triton_omni.backends.stub.open_request import read_open
from triton_omni.backends.stub.stage_loop import StageCall, StageLoop
from triton_omni.backends.stub.worker_process import Command, WorkerProcess
from triton_omni.backends.triton import tensors
from triton_omni.backends.triton.logs import use_triton_log
from triton_omni.backends.triton.metrics import StageMetrics
from triton_omni.backends.triton.responses import FINAL, error_response, event_response, read_request, send_last
from triton_omni.backends.triton.senders import CancelWatch, Senders

log = logging.getLogger("triton_omni.triton")

MAX_DIRECT_REQUEST_BYTES = 1 << 20


class TritonPythonModel:
    """One instance of one stage."""

    def initialize(self, args: dict[str, str]) -> None:
        tensors.self_check()
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._model = args["model_name"]
        use_triton_log(self._model, pipeline=given["pipeline"], stage=given["stage"])
        self._pipeline = load(given.pop("pipeline"))
        self.stage = self._pipeline.stage(given.pop("stage"))
        self._deploy = from_parameters(given, StageDeploy, f"model {self._model}")
        self._instance = placement.instance_id(args)
        self._run_dir = paths.run_dir(os.getppid())
        is_open = self._deploy.direct_calls or bool(os.environ.get(paths.LOOPBACK_VARIABLE))
        self._key = "" if is_open else paths.operator_key(self._run_dir)
        self._hub = Hub(f"{self._pipeline.name}/{self.stage.name}")
        self.senders = Senders()
        self.watch = CancelWatch()
        self.metrics = StageMetrics(self._pipeline.name, self.stage.name, self._instance)
        self._worker_process = WorkerProcess(self._command(args))
        self._loop = StageLoop(
            stage=self.stage.name,
            deploy=self._deploy,
            worker_process=self._worker_process,
            hub=self._hub,
            on_ping=self._note,
        )
        self._heartbeat = InstanceHeartbeat(
            run_dir=self._run_dir, model=self._model, instance=self._instance, role="stage", address=str(self._address)
        )
        self._settled = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()
        self._wait_ready()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._loop.submit(self._call(request, sender))
            except OmniError as error:
                sender.send(error_response(error), flags=FINAL)
            except Exception as error:  # the Triton border: a request must be answered whatever it contained
                log.exception("request could not be read")
                sender.send(error_response(Internal(f"{type(error).__name__}: {error}")), flags=FINAL)

    def finalize(self) -> None:
        self._closing = True
        self._hub.wake()
        self._thread.join(5.0)
        self._heartbeat.remove()
        self._worker_process.stop()
        self.senders.close()
        self.watch.close()
        self._hub.close()

    # --- start -----------------------------------------------------------------------------------------------------
    def _command(self, args: dict[str, str]) -> Command:
        gpus = placement.gpus(args, self._deploy)
        device = "cuda" if gpus else "cpu"
        context = EngineContext(
            self._pipeline.name, self.stage.name, self._deploy.engine, device, str(paths.models_dir())
        )
        environment = {"OMP_NUM_THREADS": "1"} | dict(self.stage.environment(context))
        environment["CUDA_VISIBLE_DEVICES"] = placement.visible_devices(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._address = self._run_dir / f"{self._model}_{self._instance}.{os.getpid()}.sock"
        arguments = [
            *("--address", str(self._address)),
            *("--pipeline", context.pipeline, "--stage", context.stage, "--device", device),
            *("--models-dir", context.models_dir, "--options", json.dumps(dict(context.options))),
        ]
        return Command(paths.engine_python(), arguments, environment)

    def _wait_ready(self) -> None:
        """Ready when the worker says so; its load error becomes the model's."""
        self._settled.wait()
        if self._loop.start_error:
            self.finalize()
            raise pb.TritonModelException(f"stage {self.stage.name}: {self._loop.start_error}")

    def _run(self) -> None:
        try:
            self._loop.start()
        except Exception as error:  # the loop border: `initialize` waits for a word
            log.exception("the worker could not be started")
            self._loop.fail_start(f"{type(error).__name__}: {error}")
        while not self._closing:
            try:
                self._loop.turn()
                self._say()
            except Exception:  # the loop border: one call's trouble must not end the loop for others
                log.exception("a turn of the loop failed")

    def _say(self) -> None:
        """Bring the record up to date before anybody hears that we are ready."""
        worker_process = self._worker_process
        ready_s = 0.0 if worker_process.ready_s is None else worker_process.ready_s - worker_process.started_s
        self._heartbeat.update(
            self._loop.state, worker_process.pid, worker_process.restarts, ready_s, worker_process.gpu_paths
        )
        if self._loop.start_decided:
            self._settled.set()

    def _note(self, ping: msg.PingMessage) -> None:
        self.metrics.note(ping.numbers, ping.live, self._worker_process.restarts)

    # --- Triton's thread -------------------------------------------------------------------------------------------
    def _call(self, request: Any, sender: Any) -> StageCall:
        opened = tensors.bytes_input(request, wire.OPEN)
        sent = [tensors.tensor_input(request, spec.name) for spec in self.stage.inputs]
        given = tuple(tensor for tensor in sent if tensor is not None)
        if opened is None:
            message = self._direct(request, bool(given))
        else:
            message = read_open(opened, self._pipeline, self.stage.name, self._run_dir, bool(given))
        chunk = Chunk(message.run, msg.INPUTS_EDGE, tensors=given) if given else None
        return StageCall(_Caller(self, sender, message.request_id), message, chunk)

    def _direct(self, request: Any, has_tensors: bool) -> msg.OpenMessage:
        """A call from a Triton client: the stage works from the request, or from tensors as one last chunk."""
        if self._key and not tensors.has_key(request, self._key):
            raise BadRequest(
                "stage models answer direct calls on a loopback address, where `direct_calls: true` is deployed, "
                f"or with the operator's key in parameter '{wire.OPERATOR_KEY}'",
                wire.OPERATOR_KEY,
            )
        upstream = [e.source for e in self._pipeline.edges if e.target == self.stage.name]
        entered = any(o.entry == self.stage.name for o in self._pipeline.operations)
        if upstream and not entered and not has_tensors:  # it would wait for a chunk that nobody sends
            own = self.stage.inputs[0].name if self.stage.inputs else wire.REQUEST
            raise BadRequest("this stage works only from what the stage before it makes", own)
        decoded = read_request(request, MAX_DIRECT_REQUEST_BYTES, optional=has_tensors)
        feeds = has_tensors and bool(upstream) and not self.stage.media
        return msg.OpenMessage(
            new_run_id(),
            request.request_id() or new_request_id(),
            wire.encode_request(decoded),
            upstream=(upstream[0],) if feeds else (),
            wanted=tuple(o.name for o in self._pipeline.outputs if o.stage == self.stage.name),
            has_inputs=has_tensors,
            direct=feeds,
        )


class _Caller:
    """One Triton request of the stage: its responses leave through one sender thread, in order."""

    def __init__(self, model: TritonPythonModel, sender: Any, request_id: str) -> None:
        self._model = model
        self._sender = sender
        self._request_id = request_id
        self._lane = model.senders.lane()

    def acknowledge(self) -> None:
        self._lane(lambda: self._sender.send(pb.InferenceResponse([])))

    def publish(self) -> None:
        self._lane(self._model.metrics.publish)

    def watch(self, gone: Callable[[], None]) -> None:
        self._model.watch.watch(self._sender, gone)

    def send(self, output: str, index: int, chunk: Chunk, failed: Callable[[], None], sent: Callable[[], None]) -> None:
        def job() -> None:
            try:
                self._sender.send(self._piece(output, index, chunk))
            except Exception:  # the Triton border: a piece that cannot be sent ends its call
                log.exception("a response could not be sent")
                failed()
            finally:
                sent()

        self._lane(job)

    def end(self, end: msg.FinishedMessage | msg.FailedMessage | None, pieces: int, sent: Callable[[], None]) -> None:
        def job() -> None:
            try:
                model = self._model
                send_last(self._sender, model.watch, model.metrics.publish, lambda: self._last(end, pieces))
            finally:
                sent()

        self._lane(job)

    def _piece(self, output: str, index: int, chunk: Chunk) -> Any:
        stage, piece = self._model.stage, chunk.piece
        kind = piece.kind if output and piece is not None else "chunk"
        event = wire.Event(kind, self._request_id, output, stage.name, index, piece)
        known = {spec.name for spec in stage.outputs}
        return event_response(event, [tensor for tensor in chunk.tensors if tensor.name in known])

    def _last(self, end: msg.FinishedMessage | msg.FailedMessage | None, pieces: int) -> Any:
        """The last response; None: FINAL alone."""
        if end is None:
            return None
        if isinstance(end, msg.FailedMessage):
            return error_response(end.error.error())
        event = wire.Event(
            "end",
            self._request_id,
            stage=self._model.stage.name,
            index=pieces,
            outcome="completed",
            finish_reason=end.reason,
            usage=end.usage,
        )
        return event_response(event)
