# SPDX-License-Identifier: Apache-2.0
"""Where calls arrive: those about the server are answered here, requests are checked and queued."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable

import msgspec

from triton_omni.backends.config.schema import OrchestratorDeploy
from triton_omni.backends.control.records import State
from triton_omni.backends.core import request as life
from triton_omni.backends.core.errors import BadRequest, Internal, OmniError
from triton_omni.backends.core.ids import OPERATOR_KEY, new_run_id
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.orchestrator.admission import Admission
from triton_omni.backends.orchestrator.check import check_request, check_request_id
from triton_omni.backends.orchestrator.metrics import PipelineMetrics
from triton_omni.backends.orchestrator.output_window import JSON_EXPANSION, OutputWindow
from triton_omni.backends.orchestrator.ports import Response, ResponseSink
from triton_omni.backends.orchestrator.request_state import Arrival, Collected, RequestDeadlines, RequestState
from triton_omni.backends.wire import WIRE_VERSION, Event, PipelineStatus, StageStatus

log = logging.getLogger("triton_omni.orchestrator")

SHOWN_REQUESTS = 100
ABORT = "abort"  # why a request was cancelled


class Door:
    """All live requests of one pipeline, and who may join them."""

    def __init__(
        self,
        pipeline: Pipeline,
        deploy: OrchestratorDeploy,
        metrics: PipelineMetrics,
        stage_states: Callable[[], dict[str, StageStatus]],
        state: Callable[[], State],
        apply: Callable[[RequestState, life.RequestEvent], None],
        clock: Callable[[], float],
    ) -> None:
        """`apply` brings an event to a request; `state` is the orchestrator's own, `stage_states` its stages'."""
        self.lives: dict[bytes, RequestState] = {}
        self.admission: Admission[RequestState] = Admission(deploy.max_live, deploy.max_queue)
        self._pipeline = pipeline
        self._deploy = deploy
        self._metrics = metrics
        self._stage_states = stage_states
        self._state = state
        self._apply = apply
        self._clock = clock

    def take(self, arrival: Arrival) -> None:
        """Answer a call, or queue its request."""
        try:
            check_request_id(arrival.request_id)
            match arrival.request.operation:
                case "health":
                    arrival.front.end(Response(self.health(arrival.request_id)))
                case "requests":
                    if not arrival.is_operator:
                        raise BadRequest(f"listing requests needs the operator's key in {OPERATOR_KEY}", OPERATOR_KEY)
                    arrival.front.end(Response(self.health(arrival.request_id, with_requests=True)))
                case "abort":
                    arrival.front.end(Response(self._abort(arrival)))
                case _:
                    self._queue(arrival)
        except OmniError as error:
            self.refuse(arrival.front, error)
        except Exception as error:  # the loop border: a bug in a pipeline's check must not leave a client waiting
            request_id = arrival.request_id
            log.exception("request %s could not be checked", request_id, extra={"request_id": request_id})
            self.refuse(arrival.front, Internal(f"{type(error).__name__}: {error}"))

    def refuse(self, front: ResponseSink, error: OmniError) -> None:
        """End a request at the door: it took no time."""
        self._metrics.ended(error.code, 0.0, {})
        front.fail(error)

    def _queue(self, arrival: Arrival) -> None:
        check_request(self._pipeline, arrival.request, arrival.media, self._deploy.engine)
        machine = life.RequestMachine(
            self._pipeline, self._pipeline.wanted(arrival.request), self._pipeline.needed(arrival.request)
        )
        limits = RequestDeadlines.of(arrival.request, self._deploy)
        live = RequestState(new_run_id(), arrival, machine, limits, self._clock())
        if arrival.request.stream:
            expansion = JSON_EXPANSION if arrival.is_short_form else 1
            live.window = OutputWindow(self._deploy.max_output_bytes, arrival.request.acknowledge, expansion)
        else:
            live.collected = Collected({output: [] for output in machine.emitted})
        self.admission.join(live, arrival.request.priority)
        self.lives[live.run] = live
        arrival.front.bind(live.run)

    def _abort(self, arrival: Arrival) -> Event:
        """End every request that has the target id and token; answers how many there were. Idempotent."""
        target, token = arrival.request.target, arrival.request.token
        if not target:
            raise BadRequest("an abort needs the id of the request to end", "target")
        if not (token or arrival.is_operator):
            raise BadRequest("an abort needs the token of the request's first event, or the operator's key", "token")
        working = [live for live in self.lives.values() if live.machine.outcome is None]
        found = [
            live
            for live in working
            if live.arrival.request_id == target
            and (arrival.is_operator or hmac.compare_digest(live.token.encode(), token.encode()))
        ]
        for live in found:
            self._apply(live, life.RequestCancelled(ABORT))
        return Event("end", arrival.request_id, outcome="completed", finish_reason="stop", aborted=len(found))

    def health(self, request_id: str = "", with_requests: bool = False) -> Event:
        """The pipeline's state: ready if runs can be opened and every stage has a ready instance."""
        now, lives = self._clock(), list(self.lives.values())
        states = self._stage_states()
        stages = {
            stage.name: msgspec.structs.replace(
                states.get(stage.name, StageStatus()),
                live=sum(1 for live in lives if stage.name in live.machine.open_runs),
            )
            for stage in self._pipeline.stages
        }
        ready = [name for name, stage in stages.items() if stage.state == "ready"]
        outputs = self._pipeline.served(ready) if self._state() == "ready" else ()
        whole = len(ready) == len(stages) and all(stage.ready == stage.instances for stage in stages.values())
        oldest = sorted(lives, key=lambda live: live.arrived_s)[: SHOWN_REQUESTS if with_requests else 0]
        status = PipelineStatus(
            pipeline=self._pipeline.name,
            version=WIRE_VERSION,
            ready=self._state() == "ready" and len(ready) == len(stages),
            state="unavailable" if not outputs else "ready" if whole else "degraded",
            outputs=outputs,
            stages=stages,
            live=len(self.admission.live),
            queued=self.admission.queued,
            operations=tuple(operation.name for operation in self._pipeline.operations),
            params=tuple(param for stage in self._pipeline.stages for param in stage.params),
            about={"media": list(self._pipeline.media), **self._pipeline.about},
            requests=tuple(live.status(now) for live in oldest),
        )
        return Event("health", request_id, status=status)
