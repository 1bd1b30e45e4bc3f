# SPDX-License-Identifier: Apache-2.0
"""A stage model: decodes Triton's requests and passes them to the loop that supervises the engine worker.

Called by an orchestrator (input `open`): answers at once with an empty response and keeps the response sender open
until the run has ended. Called directly: outputs come back as decoupled responses.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import triton_python_backend_utils as pb

from triton_omni.backends import wire
from triton_omni.backends.config import paths
from triton_omni.backends.config.schema import CLUSTER, LINKS, StageDeploy, from_parameters
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import BadRequest, Internal, OmniError, describe
from triton_omni.backends.core.ids import new_request_id, new_run_id
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines import load
from triton_omni.backends.stub import placement
from triton_omni.backends.stub.external_worker import ExternalWorker, external_command
from triton_omni.backends.stub.heartbeat import InstanceHeartbeat
from triton_omni.backends.stub.links import link_settings, placer_command
from triton_omni.backends.stub.open_request import read_open
from triton_omni.backends.stub.placed_worker import PlacedWorker, Placer
from triton_omni.backends.stub.stage_loop import StageCall, StageLoop
from triton_omni.backends.stub.worker_process import Command, WorkerProcess
from triton_omni.backends.triton import tensors
from triton_omni.backends.triton.logs import use_triton_log
from triton_omni.backends.triton.metrics import StageMetrics
from triton_omni.backends.triton.responses import TritonResponseStream, read_request
from triton_omni.backends.triton.senders import CancelWatch, Senders

log = logging.getLogger("triton_omni.triton")

MAX_DIRECT_REQUEST_BYTES = 1 << 20


class TritonPythonModel:
    """One stage with all its workers; with `gpus` empty, those of one GPU."""

    def initialize(self, args: dict[str, str]) -> None:
        tensors.self_check()
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._model = args["model_name"]
        use_triton_log(self._model, pipeline=given["pipeline"], stage=given["stage"])
        self._pipeline = load(given.pop("pipeline"))
        self._stage = self._pipeline.stage(given.pop("stage"))
        self._links = link_settings(given.pop(LINKS, ""), f"model {self._model}")
        cluster = given.pop(CLUSTER, "")
        self._deploy = from_parameters(given, StageDeploy, f"model {self._model}")
        self._run_dir = paths.run_dir(os.getppid())
        is_open = self._deploy.direct_calls or bool(os.environ.get(paths.LOOPBACK_VARIABLE))
        self._key = "" if is_open else paths.operator_key(self._run_dir)
        is_placed = self._deploy.place is not None
        self._hub = Hub(
            f"{self._pipeline.name}/{self._stage.name}", links=self._links if is_placed else None, joinable=True
        )
        self._senders = Senders()
        self._watch = CancelWatch()
        self._metrics = StageMetrics(self._pipeline.name, self._stage.name)
        workers = placement.workers(args, self._deploy)
        by_ray = self._deploy.place is not None and self._deploy.place.by == "ray"
        self._placer = Placer(self._hub, placer_command(cluster, f"model {self._model}")) if by_ray else None
        self._loop = StageLoop(
            stage=self._stage,
            deploy=self._deploy,
            workers={name: self._worker(name, gpus) for name, gpus in workers.items()},
            hub=self._hub,
            on_ping=lambda worker, ping: self._metrics.note(worker.name, ping),
        )
        self._heartbeats = {
            name: InstanceHeartbeat(
                run_dir=self._run_dir, model=self._model, instance=name, role="stage", address=str(self._address(name))
            )
            for name in workers
        }
        self._settled = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()
        self._wait_ready()

    def execute(self, requests: list[pb.InferenceRequest]) -> None:
        for request in requests:
            responses = TritonResponseStream(request, self._senders, self._watch, self._metrics.publish)
            try:
                self._loop.submit(self._call(request, responses))
            except OmniError as error:
                responses.end(error)
            except Exception as error:  # Triton boundary: a request must be answered whatever it contained
                log.exception("request could not be read")
                responses.end(Internal(describe(error)))

    def finalize(self) -> None:
        self._closing = True
        self._hub.wake()
        self._thread.join(5.0)
        for heartbeat in self._heartbeats.values():
            heartbeat.remove()
        for worker in self._loop.workers:
            worker.process.terminate()
        for worker in self._loop.workers:
            worker.process.stop()
        self._senders.close()
        self._watch.close()
        self._hub.close()

    # --- start -----------------------------------------------------------------------------------------------------
    def _address(self, worker: str) -> Path:
        """Where a worker listens."""
        return self._run_dir / f"{self._model}_{worker}.{os.getpid()}.sock"

    def _worker(self, name: str, gpus: list[int]) -> WorkerProcess | ExternalWorker:
        """A worker of the pool, or the place of one that is started by other means."""
        is_placed = self._deploy.place is not None
        device = self._deploy.device if is_placed else "cuda" if gpus else "cpu"
        context = EngineContext(
            self._pipeline.name, self._stage.name, self._deploy.engine, device, str(paths.models_dir())
        )
        environment = {"OMP_NUM_THREADS": "1"} | dict(self._stage.environment(context))
        arguments = [
            *("--pipeline", context.pipeline, "--stage", context.stage, "--device", device),
            *("--models-dir", context.models_dir, "--options", json.dumps(dict(context.options))),
        ]
        if is_placed and self._links is not None:
            if self._placer is not None and self._deploy.place is not None:
                argv = [str(paths.engine_python()), "-m", "triton_omni.backends.worker", "--stub", self._hub.address]
                tls = ["--tls", *self._links.tls] if self._links.tls else []
                environment |= self._links.environment()
                label = f"{self._run_dir.name}/{self._model}/{name}"
                return PlacedWorker(
                    self._hub, self._placer, label, [*argv, *arguments, *tls], environment, self._deploy.place
                )
            command = external_command(self._hub.address, self._links, arguments, environment)
            return ExternalWorker(self._hub, command)
        environment["CUDA_VISIBLE_DEVICES"] = placement.visible_devices(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if self._links is not None:
            arguments += self._links.arguments()
            environment |= self._links.environment()
        arguments = ["--address", str(self._address(name)), *arguments]
        return WorkerProcess(Command(paths.engine_python(), arguments, environment))

    def _wait_ready(self) -> None:
        """Ready when the workers say so; the load error of all becomes the model's."""
        self._settled.wait()
        if self._loop.start_error:
            self.finalize()
            raise pb.TritonModelException(f"stage {self._stage.name}: {self._loop.start_error}")

    def _run(self) -> None:
        try:
            self._loop.start()
        except Exception as error:  # loop boundary: `initialize` waits for the outcome
            log.exception("the workers could not be started")
            self._loop.fail_start(describe(error))
        while not self._closing:
            try:
                self._loop.turn()
                self._update_heartbeat()
            except Exception:  # loop boundary: one call must not end the loop for others
                log.exception("a turn of the loop failed")

    def _update_heartbeat(self) -> None:
        """Update the heartbeats, then let `initialize` return."""
        workers = self._loop.workers
        for worker in workers:
            process = worker.process
            ready_s = 0.0 if process.ready_s is None else process.ready_s - process.started_s
            self._heartbeats[worker.name].update(
                worker.state,
                process.pid,
                process.restarts,
                ready_s,
                process.gpu_paths,
                worker.peer.listens_at if worker.peer is not None else "",
                process.placement,
            )
        restarts = sum(worker.process.restarts for worker in workers)
        self._metrics.count([worker.state for worker in workers], restarts, self._loop.moved_runs)
        if self._loop.start_decided:
            self._settled.set()

    # --- Triton's thread -------------------------------------------------------------------------------------------
    def _call(self, request: pb.InferenceRequest, responses: TritonResponseStream) -> StageCall:
        opened = tensors.bytes_input(request, wire.OPEN)
        sent = [tensors.tensor_input(request, spec.name) for spec in self._stage.inputs]
        given = tuple(tensor for tensor in sent if tensor is not None)
        if opened is None:
            message = self._direct(request, bool(given))
        else:
            message = read_open(opened, self._pipeline, self._stage.name, self._run_dir, bool(given))
        chunk = Chunk(message.run, msg.INPUTS_EDGE, tensors=given) if given else None
        return StageCall(responses, message, chunk)

    def _direct(self, request: pb.InferenceRequest, has_tensors: bool) -> msg.OpenMessage:
        """A call from a Triton client: the stage works from the request, or from tensors as one last chunk."""
        if self._key and not tensors.has_key(request, self._key):
            raise BadRequest(
                "stage models answer direct calls on a loopback address, where `direct_calls: true` is deployed, "
                f"or with the operator's key in parameter '{wire.OPERATOR_KEY}'",
                wire.OPERATOR_KEY,
            )
        upstream = [e.source for e in self._pipeline.edges if e.target == self._stage.name]
        entered = any(o.entry == self._stage.name for o in self._pipeline.operations)
        if upstream and not entered and not has_tensors:  # it would wait for a chunk that never comes
            own = self._stage.inputs[0].name if self._stage.inputs else wire.REQUEST
            raise BadRequest("this stage needs the tensors that the stage before it makes", own)
        decoded = read_request(request, MAX_DIRECT_REQUEST_BYTES, optional=has_tensors)
        feeds = has_tensors and bool(upstream) and not self._stage.media
        return msg.OpenMessage(
            new_run_id(),
            request.request_id() or new_request_id(),
            wire.encode_request(decoded),
            upstream=(upstream[0],) if feeds else (),
            wanted=tuple(o.name for o in self._pipeline.outputs if o.stage == self._stage.name),
            has_inputs=has_tensors,
            direct=feeds,
        )
