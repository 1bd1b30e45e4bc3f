# SPDX-License-Identifier: Apache-2.0
"""The public model of a pipeline: decodes Triton's requests and passes them to the orchestrator's loop."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading

import triton_python_backend_utils as pb

from triton_omni.backends import wire
from triton_omni.backends.config import paths
from triton_omni.backends.config.schema import CLUSTER, LINKS, OrchestratorDeploy, from_parameters
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.control.records import read_records
from triton_omni.backends.core.errors import BadRequest, Internal, OmniError, describe
from triton_omni.backends.core.ids import new_request_id
from triton_omni.backends.core.pipeline import MEDIA
from triton_omni.backends.orchestrator.driver import Orchestrator
from triton_omni.backends.orchestrator.request_state import Arrival
from triton_omni.backends.orchestrator.status import stage_statuses
from triton_omni.backends.pipelines import load
from triton_omni.backends.stub.heartbeat import InstanceHeartbeat
from triton_omni.backends.stub.links import link_settings
from triton_omni.backends.stub.placement import instance_id
from triton_omni.backends.triton import tensors
from triton_omni.backends.triton.bls import BlsOpener
from triton_omni.backends.triton.logs import use_triton_log
from triton_omni.backends.triton.metrics import OrchestratorMetrics
from triton_omni.backends.triton.responses import TritonResponseStream, read_request
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
        links = link_settings(given.pop(LINKS, ""), f"model {name}")
        given.pop(CLUSTER, None)
        self._deploy = from_parameters(given, OrchestratorDeploy, f"model {name}")
        self._run_dir = paths.run_dir(os.getppid())
        self._key = paths.operator_key(self._run_dir)
        instance = instance_id(args)
        path = self._run_dir / f"{name}_{instance}.{os.getpid()}.sock"
        self._hub = Hub(f"{self._pipeline.name}/", path, links=links)
        self._senders = Senders()
        self._watch = CancelWatch()
        self._opener = BlsOpener()
        self.orchestrator = Orchestrator(
            pipeline=self._pipeline,
            deploy=self._deploy,
            hub=self._hub,
            opener=self._opener,
            stage_states=self._stage_states,
        )
        self._metrics = OrchestratorMetrics(self._pipeline.name, self.orchestrator)
        self._heartbeat = InstanceHeartbeat(
            run_dir=self._run_dir, model=name, instance=instance, role="orchestrator", address=self._hub.address
        )
        self._heartbeat.update("ready")
        self._closing = False
        self._loop = threading.Thread(target=self._run, name="orchestrator", daemon=True)
        self._loop.start()

    def execute(self, requests: list[pb.InferenceRequest]) -> None:
        for request in requests:
            responses = TritonResponseStream(request, self._senders, self._watch, self._metrics.publish)
            try:
                self.orchestrator.submit(self._arrival(request, responses))
            except OmniError as error:
                self.orchestrator.refuse(responses, error)
            except Exception as error:  # Triton boundary: a request must be answered whatever it contained
                log.exception("request could not be read")
                self.orchestrator.refuse(responses, Internal(describe(error)))

    def finalize(self) -> None:
        self._closing = True
        self._hub.wake()
        self._loop.join(5.0)
        self._heartbeat.remove()
        drained = self._opener.stop()
        self._senders.close()
        self._watch.close()
        if self.orchestrator.traces is not None:
            self.orchestrator.traces.close()
        self._hub.close()
        if not drained:
            # The destructor of a dead stage's iterator never returns and blocks the unload of all models. The
            # kernel's alarm ends this process even then; Triton cleans up after it.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 1.0)

    def _run(self) -> None:
        while not self._closing:
            try:
                self.orchestrator.turn()
                self._heartbeat.update(self.orchestrator.state)
            except Exception:  # loop boundary: one request must not end the loop for others
                log.exception("a turn of the loop failed")

    def _arrival(self, request: pb.InferenceRequest, responses: TritonResponseStream) -> Arrival:
        decoded = read_request(request, self._deploy.max_request_bytes)
        media = {name: t for name in MEDIA if (t := tensors.tensor_input(request, name)) is not None}
        most = self._deploy.max_media_bytes
        if sum(tensor.spec.nbytes for tensor in media.values()) > most:
            raise BadRequest(f"media tensors must be at most {most} bytes together", min(media))
        return Arrival(
            responses=responses,
            request_id=request.request_id() or new_request_id(),
            request=decoded,
            media=media,
            traceparent=tensors.traceparent(request) if self.orchestrator.traces is not None else "",
            is_short_form=tensors.text_input(request, wire.REQUEST) is None,
            is_operator=decoded.operation in ("abort", "requests") and tensors.has_key(request, self._key),
        )

    def _stage_states(self) -> dict[str, StageStatus]:
        records = [r for r in read_records(self._run_dir) if paths.start_time(r.pid) == r.start_time]
        return stage_statuses(self._pipeline, records)
