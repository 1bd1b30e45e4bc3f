# SPDX-License-Identifier: Apache-2.0
"""The public model of a pipeline: translates Triton's words and hands over to the orchestrator's loop."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from triton_omni.backends import wire
from triton_omni.backends.config import paths
from triton_omni.backends.config.schema import OrchestratorDeploy, from_parameters
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.control.records import read_records
from triton_omni.backends.core.errors import BadRequest, Internal, OmniError
from triton_omni.backends.core.ids import new_request_id
from triton_omni.backends.orchestrator.check import MEDIA
from triton_omni.backends.orchestrator.driver import Orchestrator
from triton_omni.backends.orchestrator.ports import Response
from triton_omni.backends.orchestrator.request_state import Arrival
from triton_omni.backends.pipelines import load
from triton_omni.backends.stub.heartbeat import InstanceHeartbeat
from triton_omni.backends.stub.placement import instance_id
from triton_omni.backends.triton import tensors
from triton_omni.backends.triton.bls import BlsOpener
from triton_omni.backends.triton.logs import use_triton_log
from triton_omni.backends.triton.metrics import OrchestratorMetrics
from triton_omni.backends.triton.responses import error_response, event_response, read_request, send_last
from triton_omni.backends.triton.senders import CancelWatch, Senders
from triton_omni.backends.wire import StageStatus

log = logging.getLogger("triton_omni.triton")


class TritonPythonModel:
    """One orchestrator; Triton calls `execute` with new requests and never waits for them."""

    def initialize(self, args: dict[str, str]) -> None:
        tensors.self_check()
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        name = args["model_name"]
        use_triton_log(name, pipeline=given["pipeline"])
        self._pipeline = load(given.pop("pipeline"))
        self._deploy = from_parameters(given, OrchestratorDeploy, f"model {name}")
        self._run_dir = paths.run_dir(os.getppid())
        self._key = paths.operator_key(self._run_dir)
        instance = instance_id(args)
        self._hub = Hub(f"{self._pipeline.name}/", self._run_dir / f"{name}_{instance}.{os.getpid()}.sock")
        self.senders = Senders()
        self.watch = CancelWatch()
        self._opener = BlsOpener()
        self.orchestrator = Orchestrator(self._pipeline, self._deploy, self._hub, self._opener, self._stage_states)
        self.metrics = OrchestratorMetrics(self._pipeline.name, self.orchestrator)
        self._heartbeat = InstanceHeartbeat(
            run_dir=self._run_dir, model=name, instance=instance, role="orchestrator", address=self._hub.address
        )
        self._heartbeat.update("ready")
        self._closing = False
        self._loop = threading.Thread(target=self._run, name="orchestrator", daemon=True)
        self._loop.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            front = _Front(request, self)
            try:
                self.orchestrator.submit(self._arrival(request, front))
            except OmniError as error:
                self.orchestrator.refuse(front, error)
            except Exception as error:  # the Triton border: a request must be answered whatever it contained
                log.exception("request could not be read")
                self.orchestrator.refuse(front, Internal(f"{type(error).__name__}: {error}"))

    def finalize(self) -> None:
        self._closing = True
        self._hub.wake()
        self._loop.join(5.0)
        self._heartbeat.remove()
        drained = self._opener.stop()
        self.senders.close()
        self.watch.close()
        if self.orchestrator.traces is not None:
            self.orchestrator.traces.close()
        self._hub.close()
        if not drained:
            # The destructor of a dead stage's iterator waits for ever, holding up the unload of everything. The
            # kernel's alarm ends this process even then; Triton cleans up after it.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 1.0)

    def _run(self) -> None:
        while not self._closing:
            try:
                self.orchestrator.turn()
                self._heartbeat.update(self.orchestrator.state)
            except Exception:  # the loop border: one request's trouble must not end the loop for others
                log.exception("a turn of the loop failed")

    def _arrival(self, request: Any, front: _Front) -> Arrival:
        decoded = read_request(request, self._deploy.max_request_bytes)
        media = {name: t for name in MEDIA if (t := tensors.tensor_input(request, name)) is not None}
        if sum(t.spec.nbytes for t in media.values()) > self._deploy.max_media_bytes:
            raise BadRequest(f"media tensors may have {self._deploy.max_media_bytes} bytes together", min(media))
        counts = {name: int(np.prod(t.spec.shape)) for name, t in media.items()}
        traceparent = tensors.traceparent(request) if self.orchestrator.traces is not None else ""
        is_short_form = tensors.text_input(request, wire.REQUEST) is None
        is_operator = decoded.operation in ("abort", "requests") and tensors.has_key(request, self._key)
        return Arrival(front, front.request_id, decoded, counts, media, traceparent, is_short_form, is_operator)

    def _stage_states(self) -> dict[str, StageStatus]:
        """Stage → state of its instances, from their records."""
        states: dict[str, StageStatus] = {}
        records = [r for r in read_records(self._run_dir) if paths.start_time(r.pid) == r.start_time]
        for stage in self._pipeline.stages:
            own = [r for r in records if r.model == self._pipeline.model(stage.name)]
            if own:
                best = next((r for r in own if r.state == "ready"), own[0])
                states[stage.name] = StageStatus(
                    state=best.state,
                    instances=len(own),
                    ready=sum(r.state == "ready" for r in own),
                    restarts=sum(r.restarts for r in own),
                    worker_pids=tuple(r.worker_pid for r in own),
                    stub_pids=tuple(r.pid for r in own),
                    ready_s=best.ready_s,
                )
        return states


class _Front:
    """One client's call: its responses leave through one sender thread, in order."""

    def __init__(self, request: Any, model: TritonPythonModel) -> None:
        self.request_id = request.request_id() or new_request_id()
        self._sender = request.get_response_sender()
        self._lane = model.senders.lane()
        self._model = model
        self._run = b""

    def bind(self, run: bytes) -> None:
        self._run = run
        gone = self._model.orchestrator.client_gone
        self._model.watch.watch(self._sender, lambda: gone(run))

    def send(self, piece: Response, sent: Callable[[], None] | None) -> None:
        def job() -> None:
            try:
                self._sender.send(event_response(piece.event, piece.tensors))
            except Exception as error:  # the Triton border: a piece that cannot be sent ends its request
                log.exception("a response could not be sent")
                self._model.orchestrator.answer_failed(self._run, Internal(f"{type(error).__name__}: {error}"))
            finally:
                if sent is not None:
                    sent()

        self._lane(job)

    def publish(self) -> None:
        self._lane(self._model.metrics.publish)

    def end(self, piece: Response) -> None:
        self._last(lambda: event_response(piece.event, piece.tensors))

    def fail(self, error: OmniError) -> None:
        self._last(lambda: error_response(error))

    def _last(self, build: Callable[[], Any]) -> None:
        model = self._model
        self._lane(lambda: send_last(self._sender, model.watch, model.metrics.publish, build))
